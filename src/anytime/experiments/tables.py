"""The paper's tables, from rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..theory.steady import rho_quasi_steady
from ..train.build import build_optimizer
from ..train.config import OptimizerConfig
from ..train.model import GPT, ModelConfig
from .recipes import Found
from .run import Row
from .scales import OPTIMIZERS, RATES, RECIPES, SCALES, SCHEDULED, Scale


@dataclass(frozen=True)
class Table:
    """Cells of text; ** around one makes it bold. The first column is to the left, the others to the right."""

    title: str
    head: Sequence[str]
    body: Sequence[Sequence[str]]
    note: str = ""

    def markdown(self) -> str:
        lines = [self.head, ["---", *["---:"] * (len(self.head) - 1)], *self.body]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return table + (f"\n\n{self.note}" if self.note else "") + "\n"

    def latex(self) -> str:
        lines = [f"\\begin{{tabular}}{{@{{}}l{'r' * (len(self.head) - 1)}@{{}}}}", "\\toprule"]
        lines += [f"{' & '.join(map(tex, self.head))} \\\\", "\\midrule"]
        lines += [f"{' & '.join(map(tex, row))} \\\\" for row in self.body]
        text = "\n".join([*lines, "\\bottomrule", "\\end{tabular}"])
        note = f"\n\n{tex(self.note)}" if self.note else ""
        caption = f"\\caption{{{tex(self.title)}}}"
        return f"\\begin{{table}}\n\\centering\n{caption}\n{text}{note}\n\\end{{table}}\n"


_TEX = {
    "\\": "\\textbackslash{}", "%": "\\%", "&": "\\&", "_": "\\_", "#": "\\#", "$": "\\$", "×": "$\\times$",
    "±": "$\\pm$", "—": "---", "–": "--", "−": "$-$", "β": "$\\beta$", "λ": "$\\lambda$", "μ": "$\\mu$", "η": "$\\eta$",
    "₁": "$_1$", "₂": "$_2$", "√": "$\\surd$", "≥": "$\\ge$",
}  # fmt: skip


def tex(cell: str) -> str:
    pieces = "".join(_TEX.get(c, c) for c in cell).split("**")
    return "".join(f"\\textbf{{{piece}}}" if i % 2 else piece for i, piece in enumerate(pieces))


# --------------------------------------------------------------------- results


def first_at(curve: Sequence[tuple[int, float]], loss: float) -> float | None:
    """The step at which a curve first comes down to a loss: straight lines over the logarithm of the steps."""
    before: tuple[int, float] | None = None
    for step, value in curve:
        if value <= loss:
            if before is None or before[1] == value:
                return float(step)
            part = (before[1] - loss) / (before[1] - value)
            return math.exp((1 - part) * math.log(before[0]) + part * math.log(step))
        before = (step, value)
    return None


def saved(found: Found, horizon: int) -> list[float]:
    """Part of the steps that SF-NorMuon saves to SF-AdamW's loss at a horizon, of each seed; −∞: not reached."""
    steps = found.recipes.scale.steps(horizon)
    parts = []
    for seed in found.recipes.scale.seeds:
        goal = found.loss(found.best("SF-AdamW", horizon, seed), steps)
        curve = [at for at in found.curve(found.best("SF-NorMuon", horizon, seed)) if at[0] <= steps]
        reached = first_at(curve, goal)
        parts.append(-math.inf if reached is None else 1 - reached / steps)
    return parts


def number(values: Sequence[float], digits: int = 3) -> str:
    """A mean, ± the standard deviation where there are several."""
    if not all(map(math.isfinite, values)):
        return "diverged"
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}"


def percent(parts: Sequence[float]) -> str:
    if not all(map(math.isfinite, parts)):
        return "not reached"
    spread = f" ± {100 * statistics.stdev(parts):.0f}" if len(parts) > 1 else ""
    return f"{100 * statistics.fmean(parts):.0f}{spread}%"


def losses(found: Found, optimizers: Sequence[str]) -> list[list[str]]:
    """A line a horizon: its name, and the loss of each optimizer, the lowest in bold."""
    body = []
    for horizon in found.recipes.scale.horizons:
        values = [found.losses(optimizer, horizon) for optimizer in optimizers]
        means = [statistics.fmean(v) for v in values]
        cells = [
            f"**{number(v)}**" if m == min(means) < math.inf else number(v) for v, m in zip(values, means, strict=True)
        ]
        body.append([f"{horizon}×", *cells])
    return body


def beside_paper(scale: Scale, columns: Sequence[str], body: list[list[str]], last: str = "") -> list[str]:
    """Adds the paper's numbers to the lines where it has some; their heads."""
    told = [name for name in columns if name in scale.reported]
    for i, line in enumerate(body):
        line += [f"{scale.reported[name][i]:.3f}" for name in told]
        line += [f"{scale.reported[last][i]}%"] if last in scale.reported else []
    heads = [f"paper: {name}" for name in told]
    return heads + (["paper: saved"] if last in scale.reported else [])


def seeds_note(scale: Scale) -> str:
    if len(scale.seeds) == 1:
        return "One seed."
    return f"Means ± standard deviations of {len(scale.seeds)} seeds; rates were chosen on the first."


def main_results(found: Found) -> Table:
    scale, columns = found.recipes.scale, ("SF-NorMuon", "SF-AdamW", "AdamW")
    body = losses(found, columns)
    for line, horizon in zip(body, scale.horizons, strict=True):
        line.append(percent(saved(found, horizon)))
    more = beside_paper(scale, columns, body, "saved")
    note = (
        "Saved: part of the steps that SF-NorMuon saves on the way to SF-AdamW's loss. One schedule-free run serves "
        f"all horizons, its rate chosen at {scale.tuned_at}×; AdamW has a cosine and a rate of its own for each. "
    )
    head = ["Chinchilla", "SF-NorMuon (decay z)", "SF-AdamW (decay y)", "AdamW (cosine)", "saved", *more]
    return Table("Validation loss at X by horizon", head, body, note + seeds_note(scale))


def comparison(found: Found) -> Table:
    scale, columns = found.recipes.scale, ("SF-NorMuon", "SF-AdamW", "NorMuon", "AdamW")
    body = losses(found, columns)
    for line, horizon in zip(body, scale.horizons, strict=True):
        line[0] += f" ({amount(scale.tokens(scale.steps(horizon)))} tokens)"
    more = beside_paper(scale, columns, body)
    note = "NorMuon and AdamW: a cosine to zero and a rate chosen for each horizon. " + seeds_note(scale)
    return Table("Final validation loss, with and without a schedule", ["Horizon", *columns, *more], body, note)


def sequences(found: Found) -> Table:
    """Losses at X, Y and Z over the long run."""
    scale, body = found.recipes.scale, []
    for optimizer, decay in (("SF-NorMuon", d) for d in ("z", "y", "none")):
        run = found.recipes.long(optimizer, decay, found.best_rate(optimizer))
        row = found.row(run)
        for multiple in (scale.last, scale.long):
            step = str(scale.steps(multiple))
            cells = [row[key].get(step, math.inf) for key in ("losses", "losses_y", "losses_z")]
            body.append(
                [f"{optimizer}, decay at {decay}" if decay != "none" else f"{optimizer}, no decay", f"{multiple}×"]
            )
            body[-1] += [number([cell]) for cell in cells]
    head = ["", "Chinchilla", "at X", "at Y", "at Z"]
    return Table("Validation loss of the three sequences", head, body, "One seed.")


def prediction(found: Found) -> Table:
    """ρ of the long run beside what its own α says, once both have settled, in windows of 1/(ηλ) steps."""
    run = found.recipes.long("SF-NorMuon", "z", found.best_rate("SF-NorMuon"))
    rows, options = found.row(run)["layers"], run.config.optimizer
    assert options.lr is not None
    assert options.weight_decay is not None
    assert options.warmup_steps is not None
    window = 1 / (options.lr * options.weight_decay)
    start = options.warmup_steps + 3 * window
    body = []
    while start + window <= run.steps + 1:
        inside = [row for row in rows if start < row["step"] <= start + window]
        if inside:
            body.append(
                [f"{start:,.0f} to {start + window:,.0f}", *_predicted(inside, options.lr, options.weight_decay)]
            )
        start += window
    note = (
        f"Means over the matrices and over windows of 1/(ηλ) = {window:,.0f} steps, from warmup + 3/(ηλ) on; α and ρ "
        "of each matrix are averaged before the prediction is made of them."
    )
    if not body:
        note += f" The run of {run.steps:,} steps ends before the first of them."
    return Table("ρ in the steady state", ["steps", "ρ", "predicted", "off by", "matrix most off by"], body, note)


def _predicted(rows: Sequence[Row], lr: float, decay: float) -> list[str]:
    seen, said = [], []
    for name in (key for key in rows[0] if key != "step"):
        mean = {key: statistics.fmean(row[name][key] for row in rows) for key in ("rho", "alpha", "update_rms")}
        seen.append(mean["rho"])
        said.append(rho_quasi_steady(mean["alpha"], lr, decay, update_rms=mean["update_rms"]))
    off = [abs(p / rho - 1) for p, rho in zip(said, seen, strict=True)]
    means = statistics.fmean(seen), statistics.fmean(said)
    return [*(f"{mean:.4f}" for mean in means), f"{100 * statistics.fmean(off):.1f}%", f"{100 * max(off):.1f}%"]


# -------------------------------------------------------------------- settings


def architecture(found: Found) -> Table:
    scales = [found.recipes.scale, *(SCALES[name] for name in ("small", "large") if name != found.recipes.scale.name)]

    def line(name: str, of: object) -> list[str]:
        return [name, *(f"{of(s):,}" if callable(of) else "" for s in scales)]

    body = [
        line("Vocabulary", lambda s: s.model.vocabulary),
        line("Layers", lambda s: s.model.layers),
        line("Width", lambda s: s.model.width),
        line("Heads", lambda s: s.model.width // s.model.head),
        line("Head dimension", lambda s: s.model.head),
        line("MLP dimension", lambda s: s.model.hidden),
        line("Context", lambda s: s.model.context),
        line("Parameters", lambda s: s.model.parameters),
        line("… of the embedding", lambda s: s.model.vocabulary * s.model.width),
        line("… of matrices", lambda s: s.model.matrix_parameters),
        line("Sequences a step", lambda s: s.batch),
        line("Tokens a step", lambda s: s.tokens(1)),
    ]
    return Table("Architecture", ["", *(_titled(s) for s in scales)], body, _PAPERS)


_PAPERS = "Small and large are the paper's models, number for number."


def budgets(found: Found) -> Table:
    scales = [found.recipes.scale, *(SCALES[name] for name in ("small", "large") if name != found.recipes.scale.name)]
    multiples = (1, 2, 4, 8)
    body = []
    for s in scales:
        long = f"{s.long}×: {s.steps(s.long):,}"
        body.append([_titled(s), "steps", *(f"{s.steps(m):,}" if m in s.horizons else "—" for m in multiples), long])
        tokens = [amount(s.tokens(s.steps(m))) if m in s.horizons else "—" for m in multiples]
        body.append(["", "tokens", *tokens, f"{s.long}×: {amount(s.tokens(s.steps(s.long)))}"])
    head = ["Model", "", *(f"{m}×" for m in multiples), "long run"]
    note = "20 tokens a parameter, embeddings included; small and large rounded up to 5,000 steps, as in the paper."
    return Table("Training budgets", head, body, note)


def _titled(scale: Scale) -> str:
    return f"{scale.name} ({amount(scale.model.parameters)})"


def amount(count: float) -> str:
    """2.6B, 10.5M, 123K"""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= size:
            value = count / size
            return f"{value:.0f}{letter}" if value >= 100 else f"{value:.1f}{letter}"
    return f"{count:.0f}"


def space(found: Found) -> Table:
    """What is searched; what is not is the paper's best."""
    scale, body = found.recipes.scale, []
    for optimizer in OPTIMIZERS:
        paper = "not said" if optimizer == "NorMuon" else ", ".join(f"{r:g}" for r in RATES[optimizer])
        tried = "at each horizon" if optimizer in SCHEDULED else f"at {scale.tuned_at}×"
        body.append([optimizer, f"rate, {tried}", ", ".join(f"{r:g}" for r in scale.rates(optimizer)), paper])
        body.append(["", "warmup steps", f"{scale.warmup(optimizer):,}", _SEARCHED[optimizer]["warmup"]])
        for option, value in RECIPES[optimizer].items():
            shown = f"({', '.join(f'{v:g}' for v in value)})" if isinstance(value, list) else str(value)
            body.append(["", option.replace("_", " "), shown, _SEARCHED[optimizer].get(option, "not said")])
    head = ["Optimizer", "Setting", "searched here", "searched in the paper"]
    return Table("Search space", head, body, "Settings other than the rate are the paper's best at every scale.")


_BETAS = "β₁ 0.9, 0.95, 0.99, 0.995; β₂ 0.9, 0.95, 0.99, 0.995"
_FREE = {"betas": _BETAS, "weight_decay": "0, 0.05, 0.1", "warmup": "1500, 2000, 2500", "decay_at": "y, z"}
_SEARCHED = {
    "AdamW": {
        "betas": _BETAS,
        "weight_decay": "0, 0.05, 0.1",
        "warmup": "1000, 1500, 2000, 2500",
        "schedule": "cosine to 0",
    },
    "NorMuon": {"warmup": "not said", "schedule": "cosine"},
    "SF-AdamW": _FREE,
    "SF-NorMuon": {**_FREE, "momentum": "0.8, 0.9, 0.95, 0.99"},
}


def best_settings(found: Found) -> Table:
    scale, optimizers = found.recipes.scale, ("AdamW", "NorMuon", "SF-AdamW", "SF-NorMuon")
    rates = [
        " / ".join(f"{found.best_rate(o, h):g}" for h in scale.horizons)
        if o in SCHEDULED
        else f"{found.best_rate(o):g}"
        for o in optimizers
    ]

    def line(name: str, *values: str) -> list[str]:
        return [name, *values]

    body = [
        line(f"Rate ({' / '.join(f'{h}×' for h in scale.horizons)} where scheduled)", *rates),
        line("(β₁, β₂), vectors and embedding", "(0.9, 0.95)", "(0.9, 0.95)", "(0.95, 0.99)", "(0.95, 0.99)"),
        line("(β₁, β₂), matrices", "(0.9, 0.95)", "β₂ 0.95", "(0.95, 0.99)", "(0.9, 0.95)"),
        line("Momentum μ", "—", f"{RECIPES['NorMuon']['momentum']}", "—", f"{RECIPES['SF-NorMuon']['momentum']}"),
        line("Weight decay λ", *(f"{RECIPES[o]['weight_decay']:g}" for o in optimizers)),
        line("Warmup steps", *(f"{scale.warmup(o):,}" for o in optimizers)),
        line("Decay at", *(RECIPES[o].get("decay_at", "—") for o in optimizers)),
        line("Schedule", *(RECIPES[o].get("schedule", "none") for o in optimizers)),
    ]
    note = ""
    if "rates" in scale.reported:
        told = scale.reported["rates"]
        note = f"In the paper: AdamW {' / '.join(f'{r:g}' for r in told['AdamW'])}, SF-AdamW {told['SF-AdamW']:g}, "
        note += f"SF-NorMuon {told['SF-NorMuon']:g}."
    return Table("Best settings", ["", *optimizers], body, note)


def memory(found: Found) -> Table:
    """Counted in the state of an optimizer after a step, for the m × n matrix of a block's MLP."""
    width = found.recipes.scale.model.width
    config = ModelConfig(vocabulary=64, layers=1, width=width, head=found.recipes.scale.model.head, context=8)
    formulas = {"SF-NorMuon": (3, 1), "SF-AdamW": (3, 0), "AdamW": (3, 0), "NorMuon": (2, 1)}
    body = []
    for name, (squares, rows) in formulas.items():
        model = GPT(config)
        optimizer = build_optimizer(model, OptimizerConfig(name=OPTIMIZERS[name]))
        weight = dict(model.named_parameters())["blocks.0.up.weight"]
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        kept = [weight, *(value for value in optimizer.state[weight].values() if value.ndim)]
        scalars = [value for value in optimizer.state[weight].values() if not value.ndim]
        m, n = weight.shape
        formula = "".join([f"{squares}mn", " + m" if rows else ""])
        total = sum(value.numel() for value in kept)
        size = sum(value.numel() * value.element_size() for value in kept)
        wanted = squares * m * n + rows * m
        body.append([name, formula, f"{wanted:,}", f"{total:,}", f"{size:,}", f"{len(scalars)}"])
    head = ["Optimizer", "in the paper", f"at {4 * width} × {width}", "counted", "bytes", "scalars besides"]
    return Table("Memory of a matrix, weights included", head, body, "Numbers held between steps, gradients left out.")
