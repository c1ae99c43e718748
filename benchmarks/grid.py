"""Many runs side by side: settings times seeds, several at once on one device, a row of results for each.

    python benchmarks/grid.py GRID.toml --data FOLDER --out results/NAME.jsonl --jobs 8

GRID.toml holds a table `base` of settings (as of `anytime train`, `preset` among them), a list `seeds`, and a table
`runs` of names, each with the settings it changes. A run that has its row already is left out; one that was
interrupted goes on where it stopped, as long as --work is kept. Losses are of X at the steps of `eval_at`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
from anytime.train import Config, UserError, merged, preset, train
from anytime.train.config import read_toml
from anytime.train.runs import origin


def one(arguments: argparse.Namespace) -> None:
    """One run, in a process of its own; its row goes to standard output."""
    job = json.loads(arguments.one)
    config = merged(Config(), preset(job["base"].pop("preset", "6M")))
    config = merged(merged(config, job["base"]), job["settings"])
    config = merged(config, {"seed": job["seed"], "run": job["folder"], "data": {"path": str(arguments.data)}})
    losses: dict[str, float] = {}

    def look(row: dict[str, Any]) -> None:
        if row["kind"] == "eval" and row["step"]:
            losses[str(row["step"])] = round(row["loss"], 5)

    row = {key: job[key] for key in ("name", "seed", "settings")}
    try:
        result = train(config, listeners=[look])
        row |= {"losses": losses, "seconds": round(result.seconds, 1)}
    except UserError as wrong:  # a run that diverges is a result too
        row |= {"losses": losses, "failed": str(wrong)}
    print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Many runs side by side.")
    parser.add_argument("grid", type=Path, nargs="?")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", type=Path, default=Path("runs/grid"))
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no run after so long")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        one(arguments)
        return
    if arguments.grid is None or arguments.out is None:
        parser.error("GRID and --out are needed")
    grid = read_toml(arguments.grid)
    done = set()
    if arguments.out.exists():
        rows = [json.loads(line) for line in arguments.out.read_text().splitlines()]
        done = {(row["grid"], row["name"], row["seed"]) for row in rows}
    began = time.monotonic()

    def work(job: dict[str, Any]) -> None:
        if time.monotonic() - began > arguments.seconds:
            return
        command = [sys.executable, __file__, "--data", str(arguments.data), "--one", json.dumps(job)]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        if finished.returncode:
            print(job["name"], job["seed"], "failed:", finished.stderr.strip()[-500:], flush=True)
            return
        row = {"grid": arguments.grid.stem, **json.loads(finished.stdout.splitlines()[-1]), "base": grid["base"]}
        with arguments.out.open("a") as file:
            file.write(json.dumps({**row, **origin()}) + "\n")
        print(
            f"{row['name']:<40} seed {row['seed']}  {row['losses']}  {row.get('seconds', row.get('failed'))}",
            flush=True,
        )

    jobs = [
        {"base": grid["base"], "settings": settings, "name": name, "seed": seed}
        | {"folder": str(arguments.work / arguments.grid.stem / f"{name}-{seed}".replace(" ", "_").replace("/", "-"))}
        for seed in grid["seeds"]
        for name, settings in grid["runs"].items()
        if (arguments.grid.stem, name, seed) not in done
    ]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(work, jobs))


if __name__ == "__main__":
    main()
