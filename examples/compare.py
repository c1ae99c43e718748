"""One run that may stop at any step, against one scheduled run for each stopping point.

The demo's model and data. SF-NorMuon trains once and is looked at, in its average X, at several steps without knowing
which will be the last. NorMuon, the same direction with warmup and cosine decay, needs a run of its own for each of
these steps. All runs share the initial weights and the order of the batches.
"""

from __future__ import annotations

import argparse
import math
import shutil
from pathlib import Path
from typing import Any

from anytime.train import Config, merged, preset, train, write_report

# Tuned with seed 0 on two CPU cores, by the mean loss over the four stops of 1,200 steps, about ten tries each; the
# settings of SF-NorMuon are the demo's.
NORMUON: dict[str, Any] = {"name": "NorMuon", "lr": 0.03, "momentum": 0.8, "schedule": "cosine"}
WARMUP = 40


def run(
    folder: Path, stop: int, looks: list[int], arguments: argparse.Namespace, optimizer: dict[str, Any]
) -> list[float]:
    """Trains up to `stop`; the validation losses at the looks."""
    config = merged(Config(), preset("demo"))
    if optimizer:
        config = merged(config, {"optimizer": {**optimizer, "horizon": stop}})
    values: dict[str, Any] = {
        "run": str(folder),
        "until": f"{stop} steps",
        "seed": arguments.seed,
        "eval_per_doubling": 0,
    }
    values |= {"eval_at": looks, "checkpoint_every": 0, "keep_every": 0, "prompt": "", "report": False}
    if arguments.quick:
        values |= {"model": {"layers": 1, "width": 32, "head": 16}, "eval_tokens": 2048}
    losses: dict[int, float] = {}

    def look(row: dict[str, Any]) -> None:
        if row["kind"] == "eval":
            losses[row["step"]] = row["loss"]

    train(merged(config, values), listeners=[look])
    return [losses[step] for step in looks]


def main() -> None:
    parser = argparse.ArgumentParser(description="One anytime run against one scheduled run for each stopping point.")
    parser.add_argument("--steps", type=int, default=None, help="the last stopping point (1200, or 48 with --quick)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/compare"), help="where the runs go; emptied first")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few steps: only shows that it runs")
    arguments = parser.parse_args()
    last = arguments.steps or (48 if arguments.quick else 1200)
    stops = [last // 8, last // 4, last // 2, last]
    if stops[0] < 2:
        parser.error(f"--steps is {last}, must be at least 16")
    shutil.rmtree(arguments.out, ignore_errors=True)

    print(f"SF-NorMuon, once, to step {last} ...", flush=True)
    columns = {"stop at step": [f"{stop:,}" for stop in stops]}
    free = run(arguments.out / "anytime", last, stops, arguments, {})
    columns["one anytime run, at X"] = [f"{loss:.3f}" for loss in free]
    scheduled: dict[int, list[float]] = {}
    for stop in stops:
        print(f"NorMuon, scheduled to end at step {stop} ...", flush=True)
        optimizer = {**NORMUON, "warmup_steps": min(WARMUP, stop // 4)}
        looks = [look for look in stops if look <= stop]
        scheduled[stop] = run(arguments.out / f"scheduled-{stop}", stop, looks, arguments, optimizer)
    columns["NorMuon scheduled for that stop"] = [f"{scheduled[stop][-1]:.3f}" for stop in stops]
    columns["its longest schedule, stopped there"] = [f"{loss:.3f}" for loss in scheduled[last]]
    form = " | ".join(f"{{:>{len(name)}}}" for name in columns)
    print(form.format(*columns))
    for row in zip(*columns.values(), strict=True):
        print(form.format(*row))
    print("Validation loss, nats per byte.")
    assert all(math.isfinite(loss) for loss in free)
    print("Report:", write_report(sorted(p for p in arguments.out.iterdir()), arguments.out / "report.html").resolve())


if __name__ == "__main__":
    main()
