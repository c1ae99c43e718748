"""Does one run that knows no horizon reach what a schedule reaches that was tuned for each? The protocol, as code.

E(H), the envelope, is the lowest validation loss of scheduled NorMuon at horizon H, its rate, decay, momentum and
schedule searched at every H. A horizon-free method is one run, one setting, looked at in X on the way: its regret at H
is its loss there less E(H), seed by seed.

In this order, so that nothing can be chosen by what it is judged by:
1. Tries, on seeds set apart: horizon-free methods at short horizons alone, the envelope at each of its own. Every
   method is searched by the same rule and in at most as many tries; the envelope's search at a longer horizon begins
   with what was best at the one before.
2. What was found is frozen, in a file that is written once.
3. The runs that count, on other seeds, to the longest horizon.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..train.config import nearest
from ..train.errors import UserError
from ..train.files import make_folder, write_atomically
from ..train.model import ModelConfig
from ..train.presets import PRESETS
from ..train.runs import origin
from .methods import METHODS, PARTS, RATE, WARMUP, Method
from .recipes import Rows
from .regret import NEAR
from .run import Row, Run, unusual
from .search import Loss, Rule, Try, bracket, coordinates, search

#: The most tries of a method's search, and of an enveloped one's at each horizon after its first.
TRIES, LATER = 24, 12
#: Of settings that are given, the first rates, in half octaves from the one they were found with.
RATES = (-1, 0, 1)
#: How often a run may see a text at most.
EPOCHS = 4
#: Of the rate sweep, half octaves around the choice, a factor of 16; and how many more on either side at most, while
#: the loss there is still near the best.
SWEPT, BEYOND = range(-4, 5), 6


@dataclass(frozen=True)
class Study:
    """A model, its horizons in multiples of Chinchilla, and the seeds.

    tries, later: as TRIES and LATER.
    short: the horizons at which horizon-free settings are chosen, by the mean of the losses. kept: how many of a
    schedule's best settings at a horizon are run on the seeds that count. parts, others: on how many of the seeds the
    recipe is run without one of its parts, and methods on which no claim rests; without parts the rates are not swept
    either. inherits: a study whose settings are taken, and rates alone are searched.
    """

    name: str
    preset: str
    horizons: tuple[float, ...]
    seeds: tuple[int, ...]
    short: tuple[float, ...] = (0.5, 1)
    set_apart: tuple[int, ...] = (1000,)
    kept: int = 2
    parts: int = 3
    others: int = 1
    inherits: str = ""
    rate: float = 0.016
    warmup: int = 150
    tries: int = TRIES
    later: int = LATER
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ablated(self) -> tuple[float, ...]:
        """The horizons of ablations: all but the dearest."""
        return self.horizons[:-1] or self.horizons

    @property
    def setup(self) -> dict[str, Any]:
        """Of every run; the preset's optimizer is not a method's."""
        return {**{k: v for k, v in PRESETS[self.preset].items() if k != "optimizer"}, **self.settings}

    def steps(self, multiple: float) -> int:
        found = self.setup
        model, batch = ModelConfig(**found["model"]), int(found["batch_size"])
        return math.ceil(multiple * 20 * model.parameters / (batch * model.context))

    def seeds_of(self, method: Method) -> tuple[int, ...]:
        return self.seeds if method.claimed else self.seeds[: self.parts if method.part else self.others]

    def lr(self, octave: int, method: Method | None = None) -> float:
        middle = self.rate if method is None or method.rate is None else method.rate
        return float(f"{middle * 2 ** (octave / 2):.3g}")

    def run(self, method: Method, point: Try, multiple: float, seed: int, *, curve: bool = False) -> Run:
        """One run; a horizon-free one is looked at in all horizons on its way, with `curve` between them too."""
        lr = self.lr(point.octave, method)
        options = {"warmup_steps": WARMUP, **method.options, **dict(point.setting), "lr": lr}
        stands = {WARMUP: self.warmup, RATE: lr}
        options = {
            k: stands[v] if isinstance(v, str) and v in stands else v for k, v in options.items() if v is not None
        }
        free = not method.scheduled
        steps = self.steps(multiple * (1 + method.after))
        if method.scheduled:
            options["horizon"] = steps
        looks = sorted({steps, *(self.steps(h) for h in (*self.short, *self.horizons))})
        settings = {
            **self.setup,
            "optimizer": options,
            "until": f"{steps} steps",
            "eval_per_doubling": 4 if curve else 0,
            "eval_at": [s for s in looks if s <= steps] if free else [steps],
            "checkpoint_every": 0,
            "diagnose_every": 0,
            "log_every": 100,
        }
        to = f" to {multiple:g}×" if method.scheduled else ""
        name = ", ".join(filter(None, (f"{method.name}{to}", point.said, f"rate {lr:g}")))
        return Run(name, seed, settings)


_TINY = {
    "model": {"layers": 1, "width": 16, "head": 8, "vocabulary": 256, "context": 32, "rope_base": 1000.0},
    "batch_size": 16, "micro_batch": 16, "eval_tokens": 1 << 12,
}  # fmt: skip
STUDIES = {
    study.name: study
    for study in (
        Study("nano", "demo", (1, 2), (0, 1), rate=0.05, warmup=20, tries=6, later=4, settings=_TINY),
        Study("0.5M", "0.5M", (1, 8, 32), (0, 1, 2), kept=1, parts=0),
        Study("2M", "2M", (1, 2, 4, 8), (0, 1, 2, 3, 4, 5)),
        Study("6M", "6M", (1, 2, 4), (0, 1, 2), kept=1, parts=0, inherits="2M"),
        Study("12M", "12M", (1,), (0,), kept=1, parts=0, inherits="2M"),
    )
}


def study_of(name: str) -> Study:
    if name not in STUDIES:
        raise UserError(f"there is no study {name!r}{nearest(name, STUDIES)}; there are {', '.join(STUDIES)}")
    return STUDIES[name]


@dataclass(frozen=True)
class Found(Rows):
    """A study's rows, and what is still to be run for each part of it."""

    study: Study
    rows: Mapping[str, Row]

    def _places(self, method: Method) -> Sequence[float]:
        """Where a method is searched: an enveloped one at each horizon, the others once."""
        return self.study.horizons if method.enveloped else self.study.short[-1:]

    def _tried(self, method: Method, point: Try, place: float) -> Iterator[tuple[Run, list[int]]]:
        """The runs of a point at a place, and the steps at which their losses count."""
        study = self.study
        looks = [place] if method.scheduled else study.short
        for seed in study.set_apart:
            yield (
                study.run(method, point, place, seed),
                [study.steps(h * (1 + method.after)) for h in looks],
            )

    def tried(self, method: Method, place: float) -> Loss:
        """The mean loss of a try, None before it was run."""

        def loss(point: Try) -> float | None:
            runs = list(self._tried(method, point, place))
            if any(run.key not in self.rows for run, _ in runs):
                return None
            return statistics.fmean(self.loss(run, step) for run, steps in runs for step in steps)

        return loss

    def _searches(self, method: Method) -> Iterator[tuple[float, list[Try], list[Try]]]:
        """(place, what is to be tried next there, what was tried, the best first), up to the first that is not over."""
        centre, limit = method.first, self.study.tries
        for place in self._places(method):
            rule: Rule = functools.partial(coordinates, method.axes, centre)
            if method.only:
                given = method.only[min(method.only, key=lambda horizon: abs(math.log(horizon / place)))]
                rule = functools.partial(bracket, [Try(given.setting, given.octave + o) for o in RATES])
            wants, ranked = search(rule, self.tried(method, place), limit)
            yield place, wants, ranked
            if wants:
                return
            centre, limit = ranked[0], self.study.later

    def next_tries(self, method: Method) -> list[Run]:
        """What its search wants to know next; nothing once it is over."""
        return [
            run
            for place, wants, _ in (() if method.published else self._searches(method))
            for point in wants
            for run, _ in self._tried(method, point, place)
            if run.key not in self.rows
        ]

    def tries(self, method: Method, horizon: float) -> list[Mapping[str, Any]]:
        """The options with which it was tried, where a method is searched at each horizon at this one."""
        begins = f"{method.name} to {horizon:g}×," if method.scheduled else f"{method.name},"
        apart = (row for row in self.rows.values() if row["seed"] in self.study.set_apart)
        return [row["settings"]["optimizer"] for row in apart if row["name"].startswith(begins)]

    def choice(self, method: Method) -> Choice:
        """Of a search that is over."""
        if method.published:
            return Choice({place: [Try((), 0)] for place in self.study.horizons}, 0)
        count, chosen = 0, {}
        for place, _, ranked in self._searches(method):
            count += len(ranked)
            chosen[place] = ranked[: self.study.kept if method.enveloped else 1]
        if not method.enveloped:
            (points,) = chosen.values()
            chosen = dict.fromkeys(self.study.horizons, points)
        return Choice(chosen, count)

    def final(self, method: Method, choice: Choice) -> list[Run]:
        """The runs that count."""
        study = self.study
        if not method.scheduled:
            (point,) = choice.points[choice.last]
            return [study.run(method, point, choice.last, seed, curve=True) for seed in study.seeds_of(method)]
        return [
            study.run(method, point, horizon, seed)
            for horizon, points in choice.points.items()
            for point in points
            for seed in study.seeds_of(method)
        ]

    def without(self, method: Method, choice: Choice, part: str) -> tuple[Method, Choice]:
        """A method with one of the recipe's parts as the paper has it, to the last horizon but one."""
        changed = dataclasses.replace(method, name=f"{method.name}, {part}", published=True, claimed=False, part=True)
        points = {
            h: [Try.of({**dict(p.setting), **PARTS[part]}, p.octave) for p in choice.points[h]]
            for h in self.study.ablated
        }
        return changed, Choice(points, 0)

    def rates(self, method: Method, choice: Choice, horizon: float) -> dict[float, Run]:
        """Rate -> a run to a horizon, over a factor of 16 around the choice, and on until both ends of what is near the
        best are seen; on a seed set apart: tries go on there."""
        study, point = self.study, choice.points[horizon][0]
        low, high = first, last = SWEPT[0], SWEPT[-1]
        while True:
            octaves = [point.octave + i for i in range(low, high + 1)]
            runs = [study.run(method, Try(point.setting, octave), horizon, study.set_apart[0]) for octave in octaves]
            found = dict(zip(map(study.lr, octaves), runs, strict=True))
            if not self.has(runs):
                return found
            losses = [self.loss(run, study.steps(horizon)) for run in runs]
            near = [loss <= min(losses) + NEAR and math.isfinite(loss) for loss in losses]
            wider = max(first - BEYOND, low - near[0]), min(last + BEYOND, high + near[-1])
            if wider == (low, high):
                return found
            low, high = wider

    def losses(self, method: Method, choice: Choice) -> dict[float, list[float]]:
        """Horizon -> loss of each seed; of several settings kept, those of the one with the lowest mean."""
        study, found = self.study, {}
        for horizon, points in choice.points.items():
            steps = study.steps(horizon * (1 + method.after))
            to = horizon if method.scheduled else choice.last
            found[horizon] = min(
                (
                    [
                        self.loss(study.run(method, point, to, seed, curve=not method.scheduled), steps)
                        for seed in study.seeds_of(method)
                    ]
                    for point in points
                ),
                key=statistics.fmean,
            )
        return found


@dataclass(frozen=True)
class Choice:
    """The settings that are run on the seeds that count, by horizon, and how many were tried before."""

    points: Mapping[float, Sequence[Try]]
    tried: int

    @property
    def last(self) -> float:
        """The longest horizon."""
        return max(self.points)


def freeze(path: Path, study: Study, choices: Mapping[str, Choice]) -> dict[str, Choice]:
    """Writes what was chosen, once: what is in the file already stays, and is given back."""
    held: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    if fresh := choices.keys() - held.keys():
        for name in sorted(fresh):
            points = choices[name].points.items()
            said = {f"{h:g}": [[dict(p.setting), p.octave] for p in ps] for h, ps in points}
            held[name] = {"tried": choices[name].tried, "rate": study.rate, "points": said, **origin()}
            if "recipe" in METHODS[name].options:
                held[name]["optimizer"] = _optimizer(study, METHODS[name], choices[name])
        make_folder(path.parent)
        write_atomically(path, json.dumps(held, indent=1).encode())
    return frozen(path, study) if held else {}


def frozen(path: Path, study: Study) -> dict[str, Choice]:
    """What a study chose."""
    found = {}
    for name, entry in json.loads(path.read_text("utf-8")).items():
        if entry["rate"] != study.rate:
            raise UserError(f"{path}: {name} was chosen at rates of {entry['rate']:g}, the study's is {study.rate:g}")
        points = {float(h): [Try.of(setting, octave) for setting, octave in ps] for h, ps in entry["points"].items()}
        found[name] = Choice(points, entry["tried"])
        if "optimizer" in entry and (now := _optimizer(study, METHODS[name], found[name])) != entry["optimizer"]:
            was = entry["optimizer"]
            differ = [f"{k}: {now.get(k)} was {was.get(k)}" for k in {**was, **now} if now.get(k) != was.get(k)]
            raise UserError(f"{path}: the recipe of {name} has changed since it was frozen: {', '.join(differ)}")
    return found


def _optimizer(study: Study, method: Method, choice: Choice) -> dict[str, Any]:
    """The options of the run that counts, those that a recipe fills in too."""
    run = study.run(method, choice.points[choice.last][0], choice.last, study.seeds[0])
    return {k: v for k, v in unusual(run.config).items() if k.startswith("optimizer.")}


def inherited(method: Method, choices: Mapping[str, Choice], study: Study) -> Method:
    """A method with what another study found best at each of its horizons."""
    if method.published:
        return method
    if method.name not in choices:
        raise UserError(
            f"{method.name} has no settings of {study.inherits}: anytime frontier {study.inherits} --methods "
            f"{method.name!r} finds them"
        )
    return dataclasses.replace(method, only={h: points[0] for h, points in choices[method.name].points.items()})
