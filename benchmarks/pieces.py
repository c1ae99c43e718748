"""A piece of a long study, where time is short and none of the command line's packages is installed.

    python benchmarks/pieces.py paper micro --data data --out results/paper/micro --seconds 590 --jobs 14
    python benchmarks/pieces.py frontier 2M --data data --out results/frontier/2M --seconds 590 --jobs 14
    python benchmarks/pieces.py explore 2M --data data --out explored --seconds 590 --jobs 14 --plan plan.json

The first two are `anytime paper` and `anytime frontier`, to be given again until nothing is left; a row is in OUT as
soon as its run is over. `explore` runs settings beside a study, on its model, batch and warmup, and looks at them at
every power of two of its 1×. The plan is a list of [name, options of the optimizer, rate, horizon, seed], such as
["anytime", {"name": "SFNorMuon", "recipe": "anytime"}, 0.023, 8, 1000].
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
from anytime.experiments.anytime import Study, study_of
from anytime.experiments.frontier import frontier
from anytime.experiments.grid import Grid
from anytime.experiments.paper import paper
from anytime.experiments.run import Run
from anytime.train.build import ENDLESS


def planned(study: Study, name: str, options: dict[str, Any], lr: float, horizon: float, seed: int) -> Run:
    """One run of a plan."""
    last = study.steps(horizon)
    looks = {study.steps(2.0**i) for i in range(-1, 7) if 2.0**i <= horizon} | {last}
    chosen = {"lr": lr, "warmup_steps": study.warmup, **options}
    if options.get("schedule", "constant") not in ENDLESS:
        looks, chosen = {last}, {**chosen, "horizon": last}
    settings = {
        **study.setup, "optimizer": chosen, "until": f"{last} steps", "eval_per_doubling": 0, "eval_at": sorted(looks),
        "checkpoint_every": 0, "diagnose_every": 0, "log_every": 100,
    }  # fmt: skip
    return Run(name, seed, settings)


def main() -> None:
    parser = argparse.ArgumentParser(description="A piece of a long study, within a time.")
    parser.add_argument("what", choices=("paper", "frontier", "explore"))
    parser.add_argument("name", help="of the scale or the study")
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True, help="the folder of rows.jsonl")
    parser.add_argument("--work", type=Path, default=Path("runs/pieces"), help="where the folders of runs are")
    parser.add_argument("--seconds", type=float, required=True, help="no run is started that would end later")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--methods", nargs="*", default=[], help="of the frontier")
    parser.add_argument("--plan", type=Path, help="of what is explored")
    given = parser.parse_args()
    work = given.work / given.what / given.name
    common = {"data": given.data, "work": work, "jobs": given.jobs, "seconds": given.seconds}
    if given.what == "explore":
        study = study_of(given.name)
        with Grid(given.out / "rows.jsonl", **common) as grid:
            runs = [planned(study, *entry) for entry in json.loads(given.plan.read_text("utf-8"))]
            grid.fill(runs)
        for row in grid.rows.values():
            print(row["name"], row["seed"], row["settings"]["optimizer"]["lr"], row["losses"], row.get("failed", ""))
        print(f"{len(runs)} runs, {len(grid.missing(runs))} left")
    elif given.what == "paper":
        print(paper(scale=given.name, out=given.out, **common) or "there is more to run")
    else:
        print(frontier(given.name, methods=given.methods, out=given.out, **common) or "there is more to run")


if __name__ == "__main__":
    main()
