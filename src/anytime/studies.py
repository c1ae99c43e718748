"""The commands that fill grids of runs and draw from their rows: what each may be asked, and how."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .train.errors import UserError


def say(text: str, stream: Any = None) -> None:
    (stream or sys.stdout).write(text + "\n")


@dataclass(frozen=True)
class Where:
    """What they have in common.

    Args:
        out: where rows and the page go, a folder in results/ by default.
        work: where the folders of runs are, in runs/ by default.
        jobs: runs at once.
        device: empty is CUDA where there is one, else the CPU.
        minutes: no run is started that would end later, as far as is known; 0 is no limit.
        yes: do not ask whether the cost is agreed to.
    """

    out: str = ""
    work: str = ""
    jobs: int = 1
    device: str = ""
    minutes: float = 0.0
    yes: bool = False

    def given(self) -> dict[str, Any]:
        """As arguments of paper, frontier and robust."""
        from .experiments.progress import showing

        if not 0 <= self.minutes < math.inf:
            raise UserError(f"minutes is {self.minutes:g}, must be 0 (no limit) or more")
        return {
            "out": Path(self.out) if self.out else None, "work": Path(self.work) if self.work else None,
            "jobs": self.jobs, "device": self.device, "seconds": 60 * self.minutes or None,
            "agree": lambda cost: agreed(cost, self.yes), "say": say, "showing": lambda: showing(sys.stdout, say),
        }  # fmt: skip

    def told(self, page: Path | None) -> int:
        """The exit status, and where the page is."""
        if page is not None:
            say(f"Page: {page.resolve()}")
        elif self.minutes:
            say("There is more to run: the same command goes on.")
        return 0 if page is not None else 1


def agreed(cost: str, yes: bool) -> bool:
    """Whether a person, or --yes, agrees to a cost."""
    say(cost)
    if yes:
        return True
    if not sys.stdin.isatty():
        raise UserError("nobody is there to agree to it: say --yes")
    return input("Run it? [y/N] ").strip().lower() in ("y", "yes")


def paper(
    items: tuple[str, ...] = (), /, scale: str = "nano", data: str = "", where: Where = Where()  # noqa: B008
) -> int:  # fmt: skip
    """redraw the paper's tables and figures from fresh or recorded runs: anytime paper [ITEM…] --scale nano --jobs 2

    Runs what has no row yet, once its cost is agreed to, and draws from the rows alone. An interrupted one goes on when
    the same command is given again. Items: main, loss, comparison, optimizers, decay, sequences, ablation, steady,
    layers, prediction, rates, rates-adamw, architecture, budgets, space, best, memory; all by default.

    Args:
        items: tables and figures by name.
        scale: nano (minutes on two cores), micro (one GPU, about ten minutes), small or large (the paper's).
        data: a folder of tokens; nano takes the source of Python's own library by default.
        where: Of the runs.
    """
    from .experiments.paper import paper as make

    return where.told(make(items, scale=scale, data=data, **where.given()))


def frontier(
    study: str, /, methods: tuple[str, ...] = (), data: str = "", where: Where = Where()  # noqa: B008
) -> int:  # fmt: skip
    """one horizon-free run against the schedule tuned for each horizon: anytime frontier 2M --data data --jobs 10

    Searches settings on seeds set apart, freezes them in a file, runs them on others, and draws losses and regrets from
    the rows. An interrupted one goes on when the same command is given again.

    Args:
        study: nano, 0.5M, 2M, 6M or 12M.
        methods: those compared with the envelope, by name; all by default.
        data: a folder of tokens; nano takes the source of Python's own library.
        where: Of the runs.
    """
    from .experiments.frontier import frontier as make

    found = data or ("python" if study == "nano" else "data")
    return where.told(make(study, methods=methods, data=found, **where.given()))


def robust(
    tasks: tuple[str, ...] = (), /, scale: str = "2M", text: str = "", frozen: str = "", where: Where = Where()  # noqa: B008
) -> int:  # fmt: skip
    """the recipe that `anytime frontier` froze, untouched on other work: anytime robust --text book.txt --jobs 10

    Its one run against NorMuon scheduled for each horizon, at the best of five rates. An interrupted one goes on when
    the same command is given again. Tasks: code, bytes, small-batch, large-batch, rates, fine-tune, shift, vit, conv;
    all by default.

    Args:
        tasks: by name.
        scale: 2M (one GPU), or nano (minutes on two cores).
        text: a text of yours, for bytes; fine-tune and shift take it too.
        frozen: where the recipe is; results/frontier/SCALE/frozen.json by default.
        where: Of the runs.
    """
    from .experiments.robust import robust as make

    held = Path(frozen) if frozen else None
    return where.told(make(tasks, scale=scale, text=text, frozen=held, **where.given()))


def sweep(
    space: str, /, preset: str = "", data: str = "", out: str = "", trials: int = 20, jobs: int = 1, seed: int = 0
) -> int:
    """search for settings, and end what falls behind: anytime sweep SPACE.toml --preset 2M --data data --trials 40

    SPACE.toml holds settings as of `anytime train`, and a table [space] of what to search, such as
    "optimizer.lr" = { low = 0.002, high = 0.04, log = true } or "optimizer.momentum" = [0.8, 0.9]. Given again, the
    same command goes on; more trials add to those that are there.

    Args:
        space: the file.
        preset: a model by name, where the file names none.
        data: a folder of tokens, where the file names none.
        out: where trials, runs and the best settings go; sweeps/NAME of the file by default.
        trials: how many, in all.
        jobs: trials at once.
        seed: of the search.
    """
    from .experiments.sweep import Space
    from .experiments.sweep import sweep as search

    given: dict[str, Any] = {"preset": preset} if preset else {}
    folder = Path(out) if out else Path("sweeps") / Path(space).stem
    loss, _ = search(
        Space.read(Path(space), **given, **({"data": {"path": data}} if data else {})),
        folder, trials=trials, jobs=jobs, seed=seed, say=say,
    )  # fmt: skip
    say(f"The best loss is {loss:.4f}. Its settings: {folder / 'best.toml'}")
    return 0
