"""`anytime robust`: does the recipe, frozen by a study on one text and size, hold untouched on other work?

Each task is the recipe's one run, looked at in X at a quarter, a half and the whole of its horizon, against scheduled
NorMuon with a run for each horizon and rate, of which the best at each horizon and seed counts.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..train.checkpoint import checkpoints_in
from ..train.config import nearest
from ..train.errors import UserError
from ..train.files import write_atomically
from .anytime import STUDIES, Found, Study
from .anytime import frozen as read_frozen
from .frontier import Say, signed
from .grid import Grid, Show, longest_first
from .methods import METHODS, RECIPE
from .reading import TEXT, WORDS, Read, Task, check, write_texts
from .recipes import MissingRow
from .regret import Regret, span
from .run import Row, Run
from .search import Try
from .tables import Table, number
from .vision import Images

PAPERS = "SF-NorMuon, the paper's"
SCHEDULED = "NorMuon"
#: Of the schedule, what the study 2M found at 2×; and in half octaves of the study's rate, its rates: a quarter, a
#: half, once, twice, four times.
SCHEDULE = {"schedule": "linear", "momentum": 0.9, "weight_decay": 0.1, "adam_weight_decay": 0.0}
OCTAVES = (-4, -2, 0, 2, 4)
#: Where a run is looked at, in parts of its horizon; where a text that changes half way is.
HORIZONS = (0.25, 0.5, 1.0)
SHIFT, SHIFTED = 0.5, (0.75, 1.0)


@dataclass(frozen=True)
class Scale:
    """The study whose recipe is taken, with its rate and its warmup, and the sizes of the tasks.

    settings: of the model of bytes. whole: the horizon, in multiples of 20 tokens a parameter. images: of Images.
    """

    study: Study
    settings: Mapping[str, Any]
    whole: float = 1.0
    seeds: tuple[int, ...] = (0, 1, 2)
    images: Mapping[str, Any] = field(default_factory=dict)

    def _common(self, horizons: Sequence[float] = HORIZONS) -> dict[str, Any]:
        study = self.study
        said = {"preset": study.preset, "seeds": self.seeds, "short": (), "rate": study.rate, "warmup": study.warmup}
        return {**said, "horizons": tuple(horizons)}

    def task(self, name: str, *, batch: float = 1.0, horizons: Sequence[float] = HORIZONS, **more: Any) -> Task:
        """With another batch the tokens stay, of the horizon and of the warmup."""
        common = self._common([self.whole * h for h in horizons])
        size = round(self.settings["batch_size"] * batch)
        settings = {**self.settings, "batch_size": size, "micro_batch": min(size, self.settings["micro_batch"])}
        return Task(name, **{**common, "warmup": round(self.study.warmup / batch)}, settings=settings, **more)

    def tasks(self, point: Try, other: str) -> dict[str, Study]:
        """By name; `other` is the text that is gone on with."""
        code = self.task("code")
        return {
            "code": code,
            "bytes": self.task("bytes", text=TEXT),
            "small-batch": self.task("small batch", batch=1 / 4),
            "large-batch": self.task("large batch", batch=4),
            "rates": code,
            "fine-tune": self.task(f"fine-tune to {other}", text=other, base=lambda seed: recipe(code, point, seed)),
            "shift": self.task(f"shift to {other}", text=other, shift=self.whole * SHIFT, horizons=SHIFTED),
            **{net: Images(net, **self._common(), net=net, **self.images) for net in ("vit", "conv")},
        }


_BYTES = {"layers": 4, "width": 160, "head": 32, "vocabulary": 256}
SCALES = {
    "2M": Scale(STUDIES["2M"], {"model": _BYTES, "batch_size": 16, "micro_batch": 32}),
    "nano": Scale(
        STUDIES["nano"], STUDIES["nano"].settings, whole=0.5, seeds=(0, 1),
        images={"size": 16, "width": 16, "count": 2048, "batch": 32, "whole": 160},
    ),
}  # fmt: skip
TASKS = tuple(SCALES["nano"].tasks(Try((), 0), WORDS))


# ------------------------------------------------------------------------ runs


def recipe(task: Study, point: Try, seed: int, octave: int = 0, **more: Any) -> Run:
    return task.run(METHODS[RECIPE], Try(point.setting, point.octave + octave), task.horizons[-1], seed, **more)


def papers(task: Study, seed: int) -> Run:
    return task.run(METHODS[PAPERS], Try((), 0), task.horizons[-1], seed)


def scheduled(task: Study, octave: int, horizon: float, seed: int) -> Run:
    return task.run(METHODS[SCHEDULED], Try.of(SCHEDULE, octave), horizon, seed)


@dataclass(frozen=True)
class Suite:
    """Tasks by name, the recipe's setting, and rows."""

    tasks: Mapping[str, Study]
    point: Try
    rows: Mapping[str, Row]

    @functools.cached_property
    def _by_seed(self) -> dict[str, list[list[Run]]]:
        """Of each task and seed the runs that follow from no row; made once, for they are asked for after every row."""
        found: dict[str, list[list[Run]]] = {}
        for name, task in self.tasks.items():
            for seed in task.seeds:
                own = [recipe(task, self.point, seed), papers(task, seed)]
                horizons = task.horizons
                if name == "rates":
                    own = [recipe(task, self.point, seed, o) for o in OCTAVES]
                    horizons = horizons[-1:]
                if name == "shift":
                    own.append(recipe(task, self.point, seed, average="restart"))
                own += [scheduled(task, o, h, seed) for h in horizons for o in OCTAVES]
                found.setdefault(name, []).append(own)
        return found

    def runs(self, name: str) -> list[Run]:
        """Of a task, as far as it can be told by the rows there are: what a run begins with comes first."""
        found: list[Run] = []
        for own in self._by_seed[name]:
            bases = [run.base for run in own[:1] if isinstance(run, Read) and run.base is not None]
            there = all(run.key in self.rows for run in bases) or all(run.key in self.rows for run in own)
            found += own if there else bases
        if name == "rates" and all(run.key in self.rows for run in found):
            found += [run for runs in self.rates(self.tasks[name])[SCHEDULED].values() for run in runs]
        return found

    def loss(self, task: Study, run: Run, horizon: float) -> float:
        return Found(task, self.rows).loss(run, task.steps(horizon))

    def best(self, task: Study, horizon: float, seed: int) -> tuple[float, int]:
        """(the schedule's lowest loss, at which octave)."""
        return min((self.loss(task, scheduled(task, o, horizon, seed), horizon), o) for o in OCTAVES)

    def rates(self, task: Study) -> dict[str, dict[int, list[Run]]]:
        """Method -> octave of a rate -> runs of all seeds, around the recipe's own rate and the schedule's best."""
        end = task.horizons[-1]
        mean = {
            o: statistics.fmean(self.loss(task, scheduled(task, o, end, s), end) for s in task.seeds) for o in OCTAVES
        }
        best = min(OCTAVES, key=lambda o: mean[o])
        return {
            RECIPE: {self.point.octave + o: [recipe(task, self.point, s, o) for s in task.seeds] for o in OCTAVES},
            SCHEDULED: {best + o: [scheduled(task, best + o, end, s) for s in task.seeds] for o in OCTAVES},
        }


def robust(
    names: Sequence[str] = (),
    *,
    scale: str = "2M",
    text: str = "",
    frozen: Path | None = None,
    out: Path | None = None,
    work: Path | None = None,
    jobs: int = 1,
    device: str = "",
    seconds: float | None = None,
    agree: Callable[[str], bool] = lambda text: True,
    say: Say = lambda text: None,
    showing: Callable[[], AbstractContextManager[Show]] | None = None,
) -> Path | None:
    """Tasks by name, all by default, from where their rows stand; the page, or None if not agreed or out of time."""
    if scale not in SCALES:
        raise UserError(f"there is no scale {scale!r}{nearest(scale, SCALES)}; there are {', '.join(SCALES)}")
    for name in names:
        if name not in TASKS:
            raise UserError(f"there is no task {name!r}{nearest(name, TASKS)}; there are {', '.join(TASKS)}")
    point = frozen_recipe(frozen, SCALES[scale].study)
    out = out or Path("results/robust") / ("" if scale == "2M" else scale)
    work = work or Path("runs/robust") / scale
    with Grid(out / "rows.jsonl", work, jobs=jobs, device=device, seconds=seconds) as grid:
        told = bool(text) or any(TEXT in row.get("texts", ()) for row in grid.rows.values())
        suite = Suite(SCALES[scale].tasks(point, TEXT if told else WORDS), point, grid.rows)
        chosen = [name for name in TASKS if name in (names or TASKS) and (told or name != "bytes")]
        if not told and "bytes" in (names or TASKS):
            say("bytes is left out: it needs a text, by --text FILE")
        if not chosen:
            return None

        def wanted() -> list[Run]:
            return longest_first(run for name in chosen for run in suite.runs(name))

        for run in grid.missing(wanted()):
            if isinstance(run, Read) and run.base and not checkpoints_in(run.base.folder(work) / "checkpoints"):
                grid.rows.pop(run.base.key, None)  # its folder is gone: once more
        if missing := grid.missing(wanted()):
            reading = [run for run in missing if isinstance(run, Read)]
            check(reading, write_texts(reading, text, grid), grid)
            seeing = f"{len(missing) - len(reading)} runs on images"
            cost = f"{grid.estimate(reading)} on texts and {seeing}" if reading else seeing
            if not agree(f"{', '.join(chosen)}: at least {cost} at {jobs} at once"):
                return None
        with nullcontext() if showing is None else showing() as show:
            grid.fill(wanted, show)
        return None if grid.missing(wanted()) else redraw(suite, chosen, out)


def frozen_recipe(path: Path | None, study: Study) -> Try:
    """The recipe's setting and rate that a study has frozen."""
    path = path or Path("results/frontier") / study.name / "frozen.json"
    choice = read_frozen(path, study).get(RECIPE) if path.exists() else None
    if choice is None:
        raise UserError(f"{path} holds no recipe: `anytime frontier {study.name}` finds it and freezes it there")
    return choice.points[study.horizons[-1]][0]


# ------------------------------------------------------------------------ page


def redraw(suite: Suite, names: Sequence[str], out: Path) -> Path:
    """The page of these tasks."""
    try:
        parts = [regrets(suite, [name for name in names if name != "rates"])]
        parts += [rates(suite, suite.tasks["rates"])] if "rates" in names else []
        parts += [shift(suite, suite.tasks["shift"])] if "shift" in names else []
    except MissingRow as missing:
        raise UserError(f"{missing}; make it by: anytime robust --out {out}") from None
    text = (
        f"# The recipe on other work\n\nFrozen: {suite.point.said}, rate "
        f"{suite.tasks['code'].lr(suite.point.octave):g}. Drawn from rows.jsonl by `anytime robust`.\n\n"
        + "\n".join(f"## {part.title}\n\n{part.markdown()}" for part in parts if part.body)
    )
    write_atomically(out / "index.md", text.encode())
    return out / "index.md"


def regrets(suite: Suite, names: Sequence[str]) -> Table:
    body = []
    for task in (suite.tasks[name] for name in names):
        ours = {h: [suite.loss(task, recipe(task, suite.point, s), h) for s in task.seeds] for h in task.horizons}
        best = {h: [suite.best(task, h, s) for s in task.seeds] for h in task.horizons}
        regret = Regret.of(ours, {h: [loss for loss, _ in found] for h, found in best.items()})
        for h in task.horizons:
            published = [suite.loss(task, papers(task, s), h) for s in task.seeds]
            found = [number(values, 4) for values in (ours[h], [loss for loss, _ in best[h]], published)]
            at = ", ".join(dict.fromkeys(f"{task.lr(octave):g}" for _, octave in best[h]))
            each = ", ".join(map(signed, regret.by_horizon[h]))
            body.append([task.name, f"{task.steps(h):,}", *found, at, signed(regret.means[h]), each])
    head = ["", "steps", "the recipe, one run", "best schedule", PAPERS, "best rate", "regret", "by seed"]
    note = (
        "Validation loss at X, nats a byte or an image, mean ± standard deviation over the seeds. The schedule has a "
        "run for each horizon and rate; seed by seed the best counts. Regret: the recipe above it."
    )
    return Table("Regret", head, body, note)


def rates(suite: Suite, task: Study) -> Table:
    end, body = task.horizons[-1], []
    for method, by_octave in suite.rates(task).items():
        losses = {o: [suite.loss(task, run, end) for run in runs] for o, runs in by_octave.items()}
        width, seen = span({task.lr(o): statistics.fmean(values) for o, values in losses.items()})
        middle = task.lr(list(losses)[len(losses) // 2])
        cells = [number(values, 4) for values in losses.values()]
        body.append([method, f"{middle:g}", *cells, f"{'' if seen else '≥ '}{width:.1f}"])
    factors = [f"×{2 ** (o / 2):g}" for o in OCTAVES]
    note = f"{task.name}, loss at {task.steps(end):,} steps. Last: log₂ of the range of rates within 0.02 of the best."
    return Table("Rates", ["", "rate", *factors, "octaves"], body, note)


def shift(suite: Suite, task: Study) -> Table:
    def of(run: Callable[[int], Run]) -> list[str]:
        return [number([suite.loss(task, run(s), h) for s in task.seeds], 4) for h in task.horizons]

    best = [number([suite.best(task, h, s)[0] for s in task.seeds], 4) for h in task.horizons]
    body = [
        ["the recipe, average kept", *of(lambda s: recipe(task, suite.point, s))],
        ["the recipe, average begun anew", *of(lambda s: recipe(task, suite.point, s, average="restart"))],
        ["best schedule", *best],
        [PAPERS, *of(lambda s: papers(task, s))],
    ]
    assert isinstance(task, Task)
    after = [f"{task.steps(h) - task.steps(task.shift):,} steps after" for h in task.horizons]
    return Table(task.name.capitalize(), ["", *after], body)
