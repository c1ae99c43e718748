"""Every table and figure of the paper: which runs it needs, and what makes it of their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..train.config import nearest
from ..train.errors import UserError
from . import draw, tables
from .recipes import ABLATIONS, DECAYS, Found
from .run import Run
from .tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Item:
    """searches: the optimizers whose rates must be known; runs: what is needed once they are.

    One of table and figure is there. `paper` is what the paper shows, in words, for a figure.
    """

    name: str
    title: str
    searches: tuple[str, ...] = ()
    runs: Callable[[Found], Iterable[Run]] = lambda found: ()
    table: Callable[[Found], Table] | None = None
    figure: Callable[[Found], Figure] | None = None
    paper: str = ""


def _best(optimizers: Sequence[str], *, seeds: bool) -> Callable[[Found], Iterator[Run]]:
    def runs(found: Found) -> Iterator[Run]:
        scale = found.recipes.scale
        for optimizer in optimizers:
            for horizon in scale.horizons:
                yield from (found.best(optimizer, horizon, s) for s in (scale.seeds if seeds else scale.seeds[:1]))

    return runs


def _long(*which: tuple[str, str]) -> Callable[[Found], Iterator[Run]]:
    def runs(found: Found) -> Iterator[Run]:
        return (found.recipes.long(name, decay, found.best_rate(name)) for name, decay in which)

    return runs


def _ablations(found: Found) -> Iterator[Run]:
    return (found.recipes.ablation(name, found.best_rate("SF-NorMuon")) for name in ABLATIONS)


_FREE = ("SF-NorMuon", "SF-AdamW")
_ALL = (*_FREE, "NorMuon", "AdamW")
_THREE = (*_FREE, "AdamW")

ITEMS = {
    item.name: item
    for item in (
        Item("main", "Main results", _THREE, _best(_THREE, seeds=True), tables.main_results),
        Item(
            "loss", "Validation loss against tokens", _THREE, figure=draw.loss,
            paper="SF-NorMuon below SF-AdamW at every token count, and level with the cosines tuned for each horizon.",
        ),
        Item("comparison", "Comparison with NorMuon", _ALL, _best(_ALL, seeds=True), tables.comparison),
        Item(
            "optimizers", "Optimizer comparison", _ALL, figure=draw.optimizers,
            paper="SF-NorMuon follows scheduled NorMuon at a distance of 0.02–0.03 nats.",
        ),
        Item(
            "decay", "Decay strategies over the long run", _FREE, _long(*DECAYS), figure=draw.decay,
            paper="SF-AdamW: decay at y is best up to about 12×, then diverges, as without decay; at z it is stable. "
            "SF-NorMuon: only decay at z is stable, and best throughout.",
        ),
        Item(
            "sequences", "The three sequences", ("SF-NorMuon",), _long(*(d for d in DECAYS if d[0] == "SF-NorMuon")),
            tables.sequences,
        ),
        Item(
            "ablation", "Ablations of momentum and of row normalization", ("SF-NorMuon",), _ablations,
            figure=draw.ablation,
            paper="Final losses at 8×: without momentum 3.28, without row normalization 3.142, SF-NorMuon 3.136; the "
            "normalization of rows saves 12% of the tokens.",
        ),
        Item(
            "steady", "Quasi steady state", ("SF-NorMuon",), _long(("SF-NorMuon", "z")), figure=draw.steady,
            paper="|Δρ|/ρ below 1% after warmup; α small and negative; the prediction lies on ρ.",
        ),
        Item(
            "layers", "Quasi steady state by layer", ("SF-NorMuon",), _long(("SF-NorMuon", "z")),
            figure=draw.steady_layers, paper="Not shown: the paper has the mean over layers alone.",
        ),
        Item("prediction", "Predicted ρ", ("SF-NorMuon",), _long(("SF-NorMuon", "z")), tables.prediction),
        Item(
            "rates", "Rate sweep, SF-AdamW and SF-NorMuon", _FREE, figure=draw.rates_free,
            paper="SF-NorMuon lower at every rate, and flat around its best.",
        ),
        Item(
            "rates-adamw", "Rate sweep, AdamW by horizon", ("AdamW",), figure=draw.rates_scheduled,
            paper="The best rate is 0.008 for 1×–4× and 0.004 for 8×.",
        ),
        Item("architecture", "Architecture", table=tables.architecture),
        Item("budgets", "Training budgets", table=tables.budgets),
        Item("space", "Search space", table=tables.space),
        Item("best", "Best settings", _ALL, table=tables.best_settings),
        Item("memory", "Memory", table=tables.memory),
    )
}  # fmt: skip


def items_of(names: Sequence[str]) -> list[Item]:
    """By name; all of them for none."""
    for name in names:
        if name not in ITEMS:
            raise UserError(f"there is no item {name!r}{nearest(name, ITEMS)}; there are {', '.join(ITEMS)}")
    return [ITEMS[name] for name in names] if names else list(ITEMS.values())
