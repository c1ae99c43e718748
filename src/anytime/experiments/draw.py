"""The paper's figures, from rows. matplotlib is imported where something is drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..train.errors import UserError
from .recipes import ABLATIONS, DECAYS, Found
from .scales import SCHEDULED
from .tables import amount, first_at

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

T = TypeVar("T")

#: Okabe and Ito's colours, which the colour-blind tell apart.
GREEN, BLUE, RED, PINK, ORANGE, SKY, GREY = "#009E73", "#0072B2", "#D55E00", "#CC79A7", "#E69F00", "#56B4E9", "#666666"
COLOURS = {"SF-NorMuon": GREEN, "SF-AdamW": BLUE, "AdamW": RED, "NorMuon": PINK}
DECAY_COLOURS = {"z": GREEN, "y": BLUE, "none": ORANGE}
DECAY_WORDS = {"z": "decay at z", "y": "decay at y", "none": "no decay"}

STYLE: Any = {
    "font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.labelsize": 9,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6, "axes.axisbelow": True, "lines.linewidth": 1.6, "legend.frameon": False,
    "legend.fontsize": 8, "svg.hashsalt": "anytime", "svg.fonttype": "none", "pdf.fonttype": 42,
    "axes.formatter.useoffset": False,
}  # fmt: skip


def panels(
    count: int, *, rows: int = 1, width: float = 4.2, height: float = 3.1, **more: Any
) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels in so many rows."""
    from matplotlib.figure import Figure

    columns = math.ceil(count / rows)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **more).flat)


def save(draw: Callable[[T], Figure], found: T, path: Path, kinds: Sequence[str] = ("svg", "pdf")) -> None:
    """Draws in one look for all, and writes path.svg and path.pdf; the same rows give the same bytes."""
    try:
        import matplotlib
    except ImportError:
        raise UserError('figures need matplotlib: pip install "anytime-optim[paper]"') from None
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None, "ModDate": None}, "png": {}}
    with matplotlib.rc_context(STYLE):
        figure = draw(found)
        for kind in kinds:
            figure.savefig(path.with_suffix(f".{kind}"), metadata=dates[kind], dpi=160, bbox_inches="tight")


def label_ends(axes: Axes, labels: Iterable[tuple[float, float, str, str]]) -> None:
    """Names beside the last points (x, y, text, colour) of lines, moved apart where they would overlap."""
    least = 10.0  # points
    ends = sorted(labels, key=lambda end: end[1])
    axes.figure.draw_without_rendering()  # type: ignore[union-attr]
    height = axes.get_window_extent().height * 72 / axes.figure.dpi
    places = [height * axes.transAxes.inverted().transform(axes.transData.transform((x, y)))[1] for x, y, _, _ in ends]
    wanted = list(places)
    for _ in range(200):  # neighbours push each other away
        for i in range(len(places) - 1):
            if (short := least - (places[i + 1] - places[i])) > 0:
                places[i], places[i + 1] = places[i] - short / 2, places[i + 1] + short / 2
    for (x, y, text, colour), at, place in zip(ends, wanted, places, strict=True):
        axes.annotate(
            text, (x, y), (6, place - at), textcoords="offset points", color=colour, fontsize=8, va="center",
            annotation_clip=False,
        )  # fmt: skip


def over_tokens(axes: Axes, found: Found, last: int, first: float = 0.25) -> None:
    """The axis of tokens: logarithmic, marked at multiples of Chinchilla."""
    scale = found.recipes.scale
    once = scale.tokens(scale.steps(1))
    marks = [m for m in (0.25, 0.5, 1, 2, 4, 8, 16, scale.long) if first <= m <= last and (m == last or m * 1.3 < last)]
    axes.set_xscale("log")
    axes.set_xlim(first * once, last * once)
    axes.set_xticks([m * once for m in marks], [f"{m:g}×\n{amount(m * once)}" for m in marks])
    axes.minorticks_off()
    axes.set_xlabel("tokens, and multiples of 20 a parameter")


def fit_heights(axes: Axes, values: Sequence[float], most: float | None = None) -> None:
    """From a little below the lowest to a little above the highest, or `most`."""
    seen = [v for v in values if math.isfinite(v)]
    low, high = min(seen), min(max(seen), math.inf if most is None else most)
    room = 0.06 * (high - low or 1.0)
    axes.set_ylim(low - room, high + room)


def plot_curve(axes: Axes, found: Found, curve: Sequence[tuple[int, float]], **more: Any) -> list[float]:
    """A line of losses over tokens; the losses that are in sight."""
    scale = found.recipes.scale
    shown = [(scale.tokens(step), loss) for step, loss in curve if math.isfinite(loss)]
    axes.plot([x for x, _ in shown], [y for _, y in shown], **more)
    return [y for x, y in shown if x >= axes.get_xlim()[0] * 0.999]


# --------------------------------------------------------------------- figures


def _against_tokens(found: Found, title: str, scheduled: Sequence[str], *, dashes: bool) -> Figure:
    """Schedule-free runs as one line each, scheduled ones as a line a horizon with a star at its end."""
    scale = found.recipes.scale
    figure, (axes,) = panels(1, width=6.4, height=4.2)
    over_tokens(axes, found, scale.last)
    heights: list[float] = []
    ends: list[tuple[float, float, str, str]] = []
    for name in scheduled:
        for horizon in scale.horizons:
            curve = found.curve(found.best(name, horizon))
            look = {"color": COLOURS[name], "linewidth": 0.9, "alpha": 0.75}
            heights += plot_curve(axes, found, curve, **look)[-8:]
            x, y = scale.tokens(curve[-1][0]), curve[-1][1]
            axes.plot([x], [y], "*", color=COLOURS[name], markersize=10, clip_on=False, zorder=5)
        ends.append((x, y, f"{name}, cosine", COLOURS[name]))
    for name in ("SF-AdamW", "SF-NorMuon"):
        curve = [at for at in found.curve(found.best(name, scale.last)) if at[0] <= scale.steps(scale.last)]
        heights += plot_curve(axes, found, curve, color=COLOURS[name], linewidth=2.2)
        ends.append((scale.tokens(curve[-1][0]), curve[-1][1], name, COLOURS[name]))
    if dashes:
        for horizon in scale.horizons[:-1]:
            steps = scale.steps(horizon)
            x, low = scale.tokens(steps), found.loss(found.best("AdamW", horizon), steps)
            others = [found.loss(found.best("AdamW", h), steps) for h in scale.horizons if h > horizon]
            axes.plot([x, x], [low, max(others)], "--", color="black", linewidth=1)
            heights.append(max(others))
    fit_heights(axes, heights)
    axes.set_ylabel("validation loss (nats a token)")
    axes.set_title(title)
    label_ends(axes, ends)
    return figure


def loss(found: Found) -> Figure:
    """Dashed: what a schedule made for longer has at a point where one made for it has ended."""
    return _against_tokens(found, "One anytime run, and a cosine for each horizon", ["AdamW"], dashes=True)


def optimizers(found: Found) -> Figure:
    return _against_tokens(found, "With and without a schedule", ["AdamW", "NorMuon"], dashes=False)


def decay(found: Found) -> Figure:
    """Losses above, the root mean square of Z below; SF-AdamW to the left, SF-NorMuon to the right."""
    scale = found.recipes.scale
    figure, grid = panels(4, rows=2, width=4.6)
    for column, optimizer in enumerate(("SF-AdamW", "SF-NorMuon")):
        above, below = grid[column], grid[2 + column]
        heights, ends, below_ends = list[float](), [], []
        for axes in (above, below):
            over_tokens(axes, found, scale.long)
        for name, where in DECAYS:
            if name != optimizer:
                continue
            run = found.recipes.long(optimizer, where, found.best_rate(optimizer))
            curve, colour = found.curve(run), DECAY_COLOURS[where]
            heights += plot_curve(above, found, curve, color=colour)
            ends.append((scale.tokens(curve[-1][0]), curve[-1][1], DECAY_WORDS[where], colour))
            size = [(scale.tokens(r["step"]), r["rho"]) for r in found.row(run)["average"]]
            below.plot([x for x, _ in size], [y for _, y in size], color=colour)
            below_ends.append((*size[-1], DECAY_WORDS[where], colour))
        fit_heights(above, heights, most=min(heights) + 3 * (sorted(heights)[len(heights) // 2] - min(heights)))
        above.set_title(optimizer)
        above.set_ylabel("validation loss at X (nats a token)")
        below.set_ylabel("RMS of Z, mean over matrices" if optimizer == "SF-NorMuon" else "RMS of Z, mean over weights")
        below.set_ylim(bottom=0)
        label_ends(above, ends)
        label_ends(below, below_ends)
    return figure


def ablation(found: Found) -> Figure:
    """Without momentum, and without the normalization of rows."""
    scale = found.recipes.scale
    rate = found.best_rate("SF-NorMuon")
    full = found.curve(found.recipes.schedule_free("SF-NorMuon", rate))
    figure, grid = panels(2, width=4.8)
    names = zip(ABLATIONS, ("no momentum (μ = 0)", "no row normalization"), (0.25, 1.0), strict=True)
    for axes, (name, words, first) in zip(grid, names, strict=True):
        over_tokens(axes, found, scale.last, first)  # the second is closer
        curve = found.curve(found.recipes.ablation(name, rate))
        heights = plot_curve(axes, found, full, color=GREEN) + plot_curve(axes, found, curve, color=ORANGE)
        named = (full, "SF-NorMuon", GREEN), (curve, words, ORANGE)
        ends = [(scale.tokens(c[-1][0]), c[-1][1], f"{text} {c[-1][1]:.3f}", colour) for c, text, colour in named]
        fit_heights(axes, heights)
        label_ends(axes, ends)
        axes.set_title(words)
        reached = first_at(full, curve[-1][1])
        if reached is None:
            text = "SF-NorMuon does not reach its loss"
        else:
            x, y = scale.tokens(round(reached)), curve[-1][1]
            axes.annotate(
                "", (x, y), (scale.tokens(curve[-1][0]), y), arrowprops={"arrowstyle": "->", "color": "black"}
            )
            text = f"{100 * (1 - reached / curve[-1][0]):.0f}% of the tokens saved"
        axes.text(0.98, 0.95, text, transform=axes.transAxes, ha="right", va="top", fontsize=8)
        axes.set_ylabel("validation loss at X (nats a token)")
    return figure


def _long_run(found: Found) -> dict[str, Any]:
    return found.row(found.recipes.long("SF-NorMuon", "z", found.best_rate("SF-NorMuon")))


def smooth(values: Sequence[float], reach: int = 3) -> list[float]:
    """Means of each value and so many to either side: α is of one step, and noisy."""
    near = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    return [sum(some) / len(some) for some in near]


def steady(found: Found) -> Figure:
    """|Δρ|/ρ; ρ, what it is predicted to be, and α: means over the matrices. Pale: before smoothing."""
    scale, rows = found.recipes.scale, _long_run(found)["average"]
    figure, (left, right) = panels(2, width=4.8)
    x = [scale.tokens(r["step"]) for r in rows]
    warm = scale.tokens(scale.warmup("SF-NorMuon"))
    for axes in (left, right):
        over_tokens(axes, found, scale.long, first=0.25)
        axes.axvline(warm, color=GREY, linewidth=0.8, linestyle=":")
    near: Any = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "fontsize": 8, "color": GREY}
    left.annotate("end of warmup", (warm, 0.02), (4, 0), **near)
    left.plot(x, [100 * r["change"] for r in rows], color=GREEN)
    left.axhline(1, color="black", linewidth=0.8, linestyle="--")
    left.annotate("1%", (1, 1), (-2, 3), xycoords=("axes fraction", "data"), textcoords="offset points", ha="right")
    left.set_yscale("log")
    left.set_ylabel("|ρ(t+1) − ρ(t)| / ρ(t) (%)")
    left.set_title("Change of ρ = RMS(Z) in a step")
    right.plot(x, [r["rho"] for r in rows], color=RED)
    predicted = [r["predicted"] for r in rows]
    right.plot(x, predicted, color=BLUE, linewidth=0.7, alpha=0.3)
    right.plot(x, smooth(predicted), color=BLUE, linestyle="--")
    right.set_ylabel("ρ")
    after = [r for r in rows if scale.tokens(r["step"]) >= right.get_xlim()[0]]
    right.set_ylim(0, 1.35 * max(max(r["rho"], min(r["predicted"], 2 * r["rho"])) for r in after))
    other = right.twinx()
    other.spines["top"].set_visible(False)
    other.grid(False)
    every = [r["alpha"] for r in rows]
    other.plot(x, every, color=PINK, linewidth=0.7, alpha=0.3)
    other.plot(x, smooth(every), color=PINK, linewidth=1.2)
    other.set_ylabel("α", color=PINK)
    alphas = [r["alpha"] for r in after]
    other.set_ylim(min(*alphas, -0.02) * 1.1, max(*alphas, 0.02) + 2.5 * (max(*alphas, 0.02) - min(*alphas, -0.02)))
    right.set_title("Observed and predicted")
    for axes, key, words, colour in (
        (right, "rho", "ρ", RED),
        (right, "predicted", "predicted ρ", BLUE),
        (other, "alpha", "α", PINK),
    ):
        axes.plot([], [], color=colour, linestyle="--" if key == "predicted" else "-", label=words)
    handles = [*right.get_lines()[-2:], other.get_lines()[-1]]
    right.legend(handles=handles, loc="upper right", ncols=3)
    return figure


def steady_layers(found: Found) -> Figure:
    """ρ (full) and its prediction (dashed, smoothed) of every matrix, a panel a kind, the shade its depth."""
    import matplotlib

    scale, rows = found.recipes.scale, _long_run(found)["layers"]
    names = [name for name in rows[-1] if name != "step"]
    kinds = ("q", "k", "v", "o", "up", "down")
    figure, grid = panels(len(kinds), rows=2, width=3.4, height=2.7, sharex=True)
    shades = matplotlib.colormaps["viridis"]
    x = [scale.tokens(r["step"]) for r in rows]
    for number, (axes, kind) in enumerate(zip(grid, kinds, strict=True)):
        over_tokens(axes, found, scale.long, first=1)
        highest = 0.0
        of_kind = [name for name in names if name.split(".")[-2] == kind]
        for depth, name in enumerate(of_kind):
            colour = shades(0.9 * depth / max(1, len(of_kind) - 1))
            axes.plot(x, [r[name]["rho"] for r in rows], color=colour, linewidth=1.3, label=f"layer {depth + 1}")
            axes.plot(x, smooth([r[name]["predicted"] for r in rows]), color=colour, linewidth=1, linestyle="--")
            highest = max(highest, *(r[name]["rho"] for r in rows))
        axes.set_ylim(0, 1.6 * highest)
        axes.set_title(kind)
        axes.tick_params(labelbottom=number >= 3)
        if number < 3:
            axes.set_xlabel("")
        if number % 3 == 0:
            axes.set_ylabel("ρ (dashed: predicted)")
    handles, labels = grid[0].get_legend_handles_labels()
    ends = handles if len(handles) <= 4 else [handles[0], handles[-1]]
    grid[2].legend(ends, labels if len(handles) <= 4 else [labels[0], labels[-1]], loc="upper right")
    return figure


def _sweep(axes: Axes, points: Sequence[tuple[float, float]], colour: Any) -> tuple[float, float]:
    """A line of final losses over rates, a star at the best; the last point that is there."""
    seen = [(rate, value) for rate, value in points if math.isfinite(value)]
    axes.plot([r for r, _ in seen], [v for _, v in seen], "o-", color=colour, markersize=4)
    best = min(seen, key=lambda at: at[1])
    axes.plot([best[0]], [best[1]], "*", color=colour, markersize=12, zorder=5)
    return seen[-1]


def _rates_axis(axes: Axes, rates: Iterable[float]) -> None:
    marks = sorted(set(rates))
    axes.set_xscale("log")
    axes.set_xticks(marks, [f"{r:g}" for r in marks])
    axes.minorticks_off()
    axes.set_xlabel("learning rate η")


def rates_free(found: Found) -> Figure:
    """Both schedule-free optimizers at the longest horizon."""
    scale = found.recipes.scale
    at = scale.steps(scale.last)
    figure, (axes,) = panels(1, width=5.2, height=3.6)
    ends = []
    for name in ("SF-AdamW", "SF-NorMuon"):
        points = [(r, found.loss(found.recipes.schedule_free(name, r), at)) for r in scale.rates(name)]
        ends.append((*_sweep(axes, points, COLOURS[name]), name, COLOURS[name]))
    _rates_axis(axes, (r for name in ("SF-AdamW", "SF-NorMuon") for r in scale.rates(name)))
    axes.set_ylabel(f"validation loss at {scale.last}× (nats a token)")
    axes.set_title("Without a schedule, by rate")
    label_ends(axes, ends)
    return figure


def rates_scheduled(found: Found, optimizer: str = "AdamW") -> Figure:
    """A line a horizon."""
    import matplotlib

    assert optimizer in SCHEDULED
    scale = found.recipes.scale
    figure, (axes,) = panels(1, width=5.2, height=3.8)
    shades = matplotlib.colormaps["viridis"]
    ends = []
    for number, horizon in enumerate(scale.horizons):
        colour = matplotlib.colors.to_hex(shades(0.85 * number / max(1, len(scale.horizons) - 1)))
        runs = [(r, found.recipes.scheduled(optimizer, r, horizon)) for r in scale.rates(optimizer)]
        points = [(r, found.loss(run, scale.steps(horizon))) for r, run in runs]
        ends.append((*_sweep(axes, points, colour), f"{horizon}× ({scale.steps(horizon):,} steps)", colour))
    _rates_axis(axes, scale.rates(optimizer))
    axes.set_ylabel("final validation loss (nats a token)")
    axes.set_title(f"{optimizer} with a cosine, by rate and horizon")
    label_ends(axes, ends)
    return figure
