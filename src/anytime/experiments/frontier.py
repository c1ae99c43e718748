"""`anytime frontier`: searches, freezes and runs a study, then draws regrets from the rows alone."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from ..train.config import nearest
from ..train.errors import UserError
from ..train.files import write_atomically
from . import draw
from .anytime import (
    EPOCHS,
    Choice,
    Found,
    Study,
    freeze,
    frozen,
    inherited,
    study_of,
)
from .grid import Grid, Show, longest_first
from .methods import METHODS, PARTS, RECIPE, Method
from .regret import NEAR, Regret, span, token_ratio
from .run import Run
from .tables import Table, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Say = Callable[[str], None]


def methods_of(names: Sequence[str]) -> list[Method]:
    """By name, all of them for none; those that make the envelope always."""
    for name in names:
        if name not in METHODS:
            raise UserError(f"there is no method {name!r}{nearest(name, METHODS)}; there are {', '.join(METHODS)}")
    return [m for m in METHODS.values() if m.enveloped or not names or m.name in names]


def frontier(
    name: str,
    *,
    methods: Sequence[str] = (),
    data: str = "data",
    out: Path | None = None,
    work: Path | None = None,
    jobs: int = 1,
    device: str = "",
    seconds: float | None = None,
    agree: Callable[[str], bool] = lambda text: True,
    say: Say = lambda text: None,
    showing: Callable[[], AbstractContextManager[Show]] | None = None,
) -> Path | None:
    """A study by name, from where its rows stand; the page, or None if not agreed or if time ran out before its end.
    What there is of the page is drawn in any case."""
    study, chosen = study_of(name), methods_of(methods)
    out = out or Path("results/frontier") / name
    work = work or Path("runs/frontier") / name
    if study.inherits:
        other = out.parent / study.inherits / "frozen.json"
        if not other.exists():
            raise UserError(
                f"{name} takes its settings from {study.inherits}, but there is no {other}: run `anytime frontier "
                f"{study.inherits}` first"
            )
        choices = frozen(other, study_of(study.inherits))
        chosen = [inherited(m, choices, study) for m in chosen]
    ends = math.inf if seconds is None else time.monotonic() + seconds
    with Grid(out / "rows.jsonl", work, data=data, jobs=jobs, device=device) as grid:
        found = Found(study, grid.rows)

        def held() -> dict[str, Choice]:
            """What the searches found that are over."""
            already = freeze(out / "frozen.json", study, {})  # not searched again after every row
            over = [m for m in chosen if m.name not in already and not found.next_tries(m)]
            return freeze(out / "frozen.json", study, {m.name: found.choice(m) for m in over})

        def wanted() -> list[Run]:
            return in_order(found, chosen, held())

        def drawn() -> Path | None:
            """Of what was not asked for too, as far as it was run."""
            others = [] if study.inherits else [m for m in METHODS.values() if m.name in held() and m not in chosen]
            return redraw(found, [*chosen, *others], held(), out, say)

        choices = {m.name: _guess(study, m) for m in chosen} | held()
        counted = finals(found, chosen, choices)
        missing = [*wanted(), *counted, *besides(found, chosen, choices)]
        if not grid.missing(missing):
            return drawn()
        longest = max(run.tokens for run in counted)
        if longest > EPOCHS * grid.machine.tokens:
            raise UserError(
                f"the longest run of {name} takes {longest:,} tokens, more than {EPOCHS} times the "
                f"{grid.machine.tokens:,} in {data}: give it more text"
            )
        if not agree(f"{name}: at least {grid.estimate(missing)} at {jobs} at once"):
            drawn()
            return None
        with nullcontext() if showing is None else showing() as show:
            grid.seconds = None if ends == math.inf else max(0.0, ends - time.monotonic())
            grid.fill(wanted, show)
        page = drawn()
        return None if grid.missing(wanted()) else page


def in_order(found: Found, methods: Sequence[Method], choices: Mapping[str, Choice]) -> list[Run]:
    """What searches want to know, for others wait for it; the runs that count, where one is over; what is besides."""
    over = [m for m in methods if m.name in choices]
    tries = [run for m in methods if m not in over for run in found.next_tries(m)]
    parts = tries, finals(found, over, choices), besides(found, over, choices)
    return [run for part in parts for run in longest_first(part)]


def finals(found: Found, methods: Sequence[Method], choices: Mapping[str, Choice]) -> list[Run]:
    return [run for m in methods for run in found.final(m, choices[m.name])]


def besides(found: Found, methods: Sequence[Method], choices: Mapping[str, Choice]) -> list[Run]:
    """Ablations of the recipe, and the sweep of its rate and of the envelope's."""
    if not found.study.parts or all(m.name != RECIPE for m in methods):
        return []
    parts = [run for part in PARTS for run in found.final(*found.without(METHODS[RECIPE], choices[RECIPE], part))]
    return [*parts, *(run for m in swept(methods) for run in found.rates(m, choices[m.name], middle(found)).values())]


def swept(methods: Sequence[Method]) -> list[Method]:
    return [m for m in methods if m.enveloped or m.name == RECIPE]


def middle(found: Found) -> float:
    """The horizon of the rate sweep: the second, where there are several."""
    return found.study.horizons[:2][-1]


def _guess(study: Study, method: Method) -> Choice:
    """Before anything was run: what it costs does not depend on the settings."""
    return Choice({horizon: [method.first] for horizon in study.horizons}, 0)


def redraw(
    found: Found, methods: Sequence[Method], choices: Mapping[str, Choice], out: Path, say: Say = lambda text: None
) -> Path | None:
    """The page of a study, of all that was run to its end; None before the envelope was."""
    study = found.study
    there = [m for m in methods if m.name in choices and found.has(found.final(m, choices[m.name]))]
    losses = {m.name: found.losses(m, choices[m.name]) for m in there}
    envelope = next((losses[m.name] for m in there if m.enveloped), None)
    if envelope is None:
        return None
    missing = [m.name for m in methods if m not in there]
    parts = [regrets(study, there, losses, envelope, choices)]
    if study.parts and RECIPE in losses:
        alone = [p for p in PARTS if found.has(found.final(*found.without(METHODS[RECIPE], choices[RECIPE], p)))]
        missing += [f"{RECIPE}, {p}" for p in PARTS if p not in alone]
        parts += [ablations(found, alone, choices[RECIPE], losses[RECIPE])] if alone else []
        both = swept(there)
        over = [m for m in both if found.has(found.rates(m, choices[m.name], middle(found)).values())]
        missing += [f"the rates of {m.name}" for m in both if m not in over]
        parts += [spans(found, over, choices)] if over else []
    parts.append(settings(found, there, choices))
    figure = out / "frontier"
    draw.save(lambda _: picture(found, there, choices, envelope), found, figure)
    text = (
        f"# One run against the schedule tuned for each horizon, {study.name}\n\n"
        f"Seeds {', '.join(map(str, study.seeds))}, of methods without ± the first; settings chosen on seed"
        f"{'s' * (len(study.set_apart) > 1)} {', '.join(map(str, study.set_apart))}. 1× is {study.steps(1):,} steps. "
        f"Drawn from rows.jsonl by `anytime frontier {study.name}`; what was chosen is in frozen.json.\n\n"
        + (f"Still to be run: {'; '.join(missing)}.\n\n" if missing else "")
        + "![losses over tokens](frontier.svg)\n\n"
        + "\n".join(f"## {part.title}\n\n{part.markdown()}" for part in parts)
    )
    write_atomically(out / "index.md", text.encode())
    say(parts[0].title)
    return out / "index.md"


def regrets(
    study: Study,
    methods: Sequence[Method],
    losses: Mapping[str, Mapping[float, Sequence[float]]],
    envelope: Mapping[float, Sequence[float]],
    choices: Mapping[str, Choice],
) -> Table:
    marks = [f"{h:g}×" for h in study.horizons]
    body = []
    for method in methods:
        found = losses[method.name]
        beside = {h: values[: len(found[h])] for h, values in envelope.items()}
        regret = Regret.of(found, beside)
        means = {h: statistics.fmean(values) for h, values in beside.items()}
        body.append(
            [
                method.name,
                *(number(found[h], 4) for h in study.horizons),
                *(signed(regret.means[h]) for h in study.horizons),
                _interval(regret.most),
                _interval(regret.mean),
                _ratio(means, statistics.fmean(found[study.horizons[-1]])),
                str(choices[method.name].tried),
            ]
        )
    head = ["", *marks, *(f"R {m}" for m in marks), "max R", "mean R", f"ρ {marks[-1]}", "tries"]
    note = (
        "Loss at X, nats a token, mean ± standard deviation over the seeds. R: above the envelope, seed by seed; in "
        "brackets the upper end of the 95% interval. ρ: the part of the last horizon's tokens that the envelope needs "
        "for the same loss, on the same seeds."
    )
    return Table(f"Regret against the envelope, {study.name}", head, body, note)


def _ratio(envelope: Mapping[float, float], loss: float) -> str:
    """ρ at the last horizon; beyond the envelope's ends, on which side."""
    first, last = min(envelope), max(envelope)
    ratio = token_ratio(envelope, last, loss)
    if ratio is not None or loss == envelope[last]:
        return f"{ratio or 1:.2f}"
    if not math.isfinite(loss):
        return "—"
    return "> 1" if loss < envelope[last] else f"< {first / last:.3g}"


def signed(value: float) -> str:
    return f"{value:+.4f}".replace("-", "−") if math.isfinite(value) else "diverged"


def _interval(pair: tuple[float, float]) -> str:
    value, upper = pair
    return signed(value) + (f" ({signed(upper)})" if math.isfinite(upper) else "")


def ablations(found: Found, parts: Sequence[str], choice: Choice, recipe: Mapping[float, Sequence[float]]) -> Table:
    body, horizons = [], found.study.ablated
    for part in parts:
        losses = found.losses(*found.without(METHODS[RECIPE], choice, part))
        worse = Regret.of(losses, {h: recipe[h][: len(losses[h])] for h in horizons})
        mean, upper = worse.mean
        interval = f" ± {upper - mean:.4f}" if math.isfinite(upper) else ""
        body.append([part, *(signed(worse.means[h]) for h in horizons), signed(mean) + interval])
    note = "Loss above the recipe's, seed by seed; ± half of the 95% interval."
    return Table("The recipe without its parts", ["", *(f"{h:g}×" for h in horizons), "mean"], body, note)


def spans(found: Found, methods: Sequence[Method], choices: Mapping[str, Choice]) -> Table:
    steps = found.study.steps(middle(found))
    body = []
    for method in methods:
        losses = {
            r: found.loss(run, steps) for r, run in found.rates(method, choices[method.name], middle(found)).items()
        }
        width, seen = span(losses)
        said = " ".join(f"{rate:g}: {number([loss], 4)}" for rate, loss in losses.items())
        body.append([method.name, f"{'' if seen else '≥ '}{width:.2f}", said])
    return Table(
        f"Rates within {NEAR:g} of the best at {middle(found):g}×", ["", "log₂ of the range", "losses by rate"], body
    )


def settings(found: Found, methods: Sequence[Method], choices: Mapping[str, Choice]) -> Table:
    """What was frozen."""
    study, body = found.study, []
    for method in methods:
        for horizon in study.horizons if method.enveloped else study.horizons[-1:]:
            for point in choices[method.name].points[horizon]:
                at = f"{horizon:g}×" if method.enveloped else "all"
                place = horizon if method.enveloped else study.short[-1]
                ends = ", ".join(method.ends(point, found.tries(method, place)))
                body.append([method.name, at, f"{study.lr(point.octave, method):g}", point.said, ends])
    return Table("Settings", ["", "horizon", "rate", "others", "at the end of what was tried"], body)


def picture(
    found: Found, methods: Sequence[Method], choices: Mapping[str, Choice], envelope: Mapping[float, Sequence[float]]
) -> Figure:
    """Every horizon-free method one line, the envelope stars."""
    study = found.study
    figure, (axes,) = draw.panels(1, width=6.4, height=4.2)
    axes.set_xscale("log")
    marks = [study.steps(h) for h in study.horizons]
    axes.set_xlim(marks[0] * 0.7, marks[-1] * 1.05)
    heights: list[float] = []
    colours = [draw.GREEN, draw.BLUE, draw.ORANGE, draw.SKY, draw.PINK, draw.GREY]
    for i, method in enumerate(reversed([m for m in methods if not m.scheduled])):
        runs = found.final(method, choices[method.name])
        curves = [found.rows[run.key]["losses"] for run in runs]
        steps = sorted(int(s) for s in curves[0] if all(s in c for c in curves) and int(s) >= marks[0] * 0.7)
        values = [statistics.fmean(c[str(s)] for c in curves) for s in steps]
        axes.plot(steps, values, color=colours[i % len(colours)], label=method.name)
        heights += values
    points = [statistics.fmean(envelope[h]) for h in study.horizons]
    axes.plot(marks, points, "*", color=draw.RED, markersize=9, label="NorMuon, tuned for each horizon", zorder=5)
    axes.set_xticks(marks, [f"{h:g}×" for h in study.horizons])
    axes.minorticks_off()
    draw.fit_heights(axes, [*heights, *points], most=max(points) + 0.1)
    axes.set_xlabel("multiples of 20 tokens a parameter")
    axes.set_ylabel("validation loss at X")
    axes.legend()
    return figure
