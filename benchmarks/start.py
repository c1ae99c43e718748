"""Do the paper's own sizes start? Twenty steps of each by `train` itself, at its batch, on random tokens.

    python benchmarks/start.py --presets 125M 772M --out results/start.jsonl

A row has the first and the last loss (of random tokens ln 50,304 = 10.826), and of the last five steps tokens a second,
MFU and memory.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
from anytime.train import Config, merged, preset, train
from anytime.train.runs import origin, read_lines
from anytime.train.shards import write_shard


def start(name: str, steps: int, folder: Path) -> dict[str, object]:
    settings = preset(name)
    config = merged(
        merged(Config(), settings),
        {
            "run": str(folder / name), "data": {"path": str(folder)}, "until": f"{steps} steps", "log_every": 5,
            "eval_per_doubling": 0, "eval_every": 0, "checkpoint_every": 0, "diagnose_every": 0,
            "report": False, "prompt": "",
        },
    )  # fmt: skip
    train(config)
    rows = read_lines(folder / name / "metrics.jsonl")
    losses = [row["loss"] for row in rows if row["kind"] == "step"]
    speed = [row for row in rows if row["kind"] == "speed"][-1]
    kept = {key: speed.get(key) for key in ("tokens_per_second", "mfu", "memory")}
    return {"preset": name, **kept, "first": losses[0], "last": losses[-1], "device": rows[0]["device"], **origin()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Twenty steps of the paper's sizes, on random tokens.")
    parser.add_argument("--presets", nargs="+", default=["125M", "772M"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=None, help="a file of rows to append to")
    arguments = parser.parse_args()
    for name in arguments.presets:
        with tempfile.TemporaryDirectory() as made:
            draw = np.random.default_rng(0)
            for split, size in (("train", 12_000_000), ("val", 1_200_000)):
                tokens = draw.integers(0, min(50_304, preset(name)["model"]["vocabulary"]), size, dtype=np.uint16)
                write_shard(Path(made) / f"{split}-000000.bin", tokens)
            row = start(name, arguments.steps, Path(made))
        print(json.dumps(row), flush=True)
        if arguments.out is not None:
            with arguments.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
