"""Many runs side by side: settings times seeds, several at once on one device, a row of results for each.

    python benchmarks/grid.py GRID.toml --data FOLDER --out results/NAME.jsonl --jobs 8

GRID.toml holds a table `base` of settings (as of `anytime train`, `preset` among them), a list `seeds`, and a table
`runs` of names, each with the settings it changes. A run that has its row already is left out; one that was
interrupted goes on where it stopped, as long as --work is kept. Losses are of X at the steps of `eval_at`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
from anytime.experiments.grid import Grid, longest_first, read_grid
from anytime.experiments.progress import showing


def main() -> None:
    parser = argparse.ArgumentParser(description="Many runs side by side.")
    parser.add_argument("grid", type=Path)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/grid"))
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--seconds", type=float, help="start no run after so long")
    arguments = parser.parse_args()
    runs = read_grid(arguments.grid)
    with (
        Grid(
            arguments.out,
            arguments.work / arguments.grid.stem,
            data=arguments.data,
            jobs=arguments.jobs,
            seconds=arguments.seconds,
        ) as grid,
        showing(sys.stdout, lambda text: print(text, flush=True)) as show,
    ):
        print(grid.estimate(runs, probe=False), flush=True)
        grid.fill(longest_first(runs), show)


if __name__ == "__main__":
    main()
