"""The runs behind the paper's tables and figures, at any scale.

In two rounds: the rates that are searched, then what needs the best of them. One schedule-free run serves every
horizon, and the long runs go on from where the search left off.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..train.errors import UserError
from .run import Row, Run
from .scales import OPTIMIZERS, RECIPES, SCHEDULE_FREE, SCHEDULED, Scale

#: Variants of the schedule-free runs: name to (optimizer, changed options).
DECAYS = {
    ("SF-AdamW", "y"): "SF-AdamW",
    ("SF-AdamW", "z"): "SF-AdamW, decay at z",
    ("SF-AdamW", "none"): "SF-AdamW, no decay",
    ("SF-NorMuon", "z"): "SF-NorMuon",
    ("SF-NorMuon", "y"): "SF-NorMuon, decay at y",
    ("SF-NorMuon", "none"): "SF-NorMuon, no decay",
}
ABLATIONS: dict[str, dict[str, Any]] = {
    "SF-NorMuon, no momentum": {"momentum": 0.0},
    "SF-NorMuon, no row normalization": {"row_norm": False},
}


class MissingRow(Exception):
    """A row that a table or figure needs is not there."""

    def __init__(self, run: Run) -> None:
        super().__init__(f"there is no row of {run.name!r}, seed {run.seed}, {run.steps:,} steps")
        self.run = run


class Rows:
    """Rows by their keys; what is missing is an error that names it."""

    rows: Mapping[str, Row]

    def row(self, run: Run) -> Row:
        if run.key not in self.rows:
            raise MissingRow(run)
        return self.rows[run.key]

    def has(self, runs: Iterable[Run]) -> bool:
        """Whether all of them were run."""
        return all(run.key in self.rows for run in runs)

    def loss(self, run: Run, steps: int) -> float:
        """At X; of a run that diverged, infinite."""
        row = self.row(run)
        if str(steps) not in row["losses"] and "failed" not in row:
            asked = f"the row of {run.name!r}, seed {run.seed}, was not looked at in step {steps:,}"
            raise UserError(f"{asked}: take its line out of rows.jsonl and it is run again")
        return float(row["losses"].get(str(steps), float("inf")))


@dataclass(frozen=True)
class Recipes:
    """Runs of one scale."""

    scale: Scale

    def _run(
        self, name: str, optimizer: str, rate: float, steps: int, seed: int, watch: tuple[str, ...] = (), **more: Any
    ) -> Run:
        scale = self.scale
        options = {
            "name": OPTIMIZERS[optimizer],
            "lr": rate,
            "warmup_steps": scale.warmup(optimizer),
            **RECIPES[optimizer],
        }
        if optimizer in SCHEDULED:
            options |= {"horizon": steps, "warmup_steps": min(options["warmup_steps"], steps // 2)}
        model = scale.model
        settings: dict[str, Any] = {
            "model": {f: getattr(model, f) for f in ("vocabulary", "layers", "width", "head", "context", "rope_base")},
            "batch_size": scale.batch,
            "micro_batch": scale.micro_batch,
            "optimizer": {**options, **more},
            "until": f"{steps} steps",
            "eval_per_doubling": 6,
            "eval_at": [scale.steps(h) for h in (*scale.horizons, scale.long) if scale.steps(h) <= steps],
            "eval_tokens": scale.eval_tokens,
            "checkpoint_every": max(500, scale.steps(1)),
            "keep_last": 1,
            "log_every": max(10, scale.steps(1) // 50),
            "diagnose_every": 0 if optimizer in SCHEDULED else max(1, scale.steps(scale.long) // 200),
        }
        if "sequences" in watch:
            settings["keep_at"] = [scale.steps(scale.last), steps]
        return Run(f"{name}, rate {rate:g}", seed, settings, watch)

    # ------------------------------------------------------------- first round

    def scheduled(self, optimizer: str, rate: float, horizon: int, seed: int | None = None) -> Run:
        steps = self.scale.steps(horizon)
        return self._run(f"{optimizer} to {horizon}×", optimizer, rate, steps, self.seed if seed is None else seed)

    def schedule_free(self, optimizer: str, rate: float, seed: int | None = None) -> Run:
        """To the longest horizon of the tables; looked at on the way."""
        steps = self.scale.steps(self.scale.last)
        return self._run(optimizer, optimizer, rate, steps, self.seed if seed is None else seed)

    @property
    def seed(self) -> int:
        """The one that rates are searched with."""
        return self.scale.seeds[0]

    def search(self, optimizer: str) -> Iterator[Run]:
        for rate in self.scale.rates(optimizer):
            if optimizer in SCHEDULED:
                yield from (self.scheduled(optimizer, rate, horizon) for horizon in self.scale.horizons)
            else:
                yield self.schedule_free(optimizer, rate)

    # ------------------------------------------------------------ second round

    def long(self, optimizer: str, decay: str, rate: float) -> Run:
        """To the end of the long run, with decay at z, y or nowhere; with the paper's the one that was searched."""
        usual = RECIPES[optimizer]["decay_at"] == decay
        watch = ("average", "sequences", *(["layers"] if usual and optimizer == "SF-NorMuon" else []))
        options = {} if usual else {"decay_at": decay}
        steps = self.scale.steps(self.scale.long)
        return self._run(DECAYS[optimizer, decay], optimizer, rate, steps, self.seed, watch, **options)

    def ablation(self, name: str, rate: float) -> Run:
        return self._run(name, "SF-NorMuon", rate, self.scale.steps(self.scale.last), self.seed, **ABLATIONS[name])


@dataclass(frozen=True)
class Found(Rows):
    """The rows there are, by what they are of."""

    recipes: Recipes
    rows: Mapping[str, Row]

    def best_rate(self, optimizer: str, horizon: int | None = None) -> float:
        """Of a scheduled optimizer for a horizon, of a schedule-free one at the horizon that they are tuned at."""
        recipes, scale = self.recipes, self.recipes.scale
        if optimizer in SCHEDULE_FREE:
            at = scale.steps(scale.tuned_at)
            return min(scale.rates(optimizer), key=lambda r: self.loss(recipes.schedule_free(optimizer, r), at))
        assert horizon is not None
        at = scale.steps(horizon)
        return min(scale.rates(optimizer), key=lambda r: self.loss(recipes.scheduled(optimizer, r, horizon), at))

    def best(self, optimizer: str, horizon: int, seed: int | None = None) -> Run:
        """The run that the tables show for a horizon."""
        rate = self.best_rate(optimizer, horizon)
        if optimizer in SCHEDULED:
            return self.recipes.scheduled(optimizer, rate, horizon, seed)
        return self.recipes.schedule_free(optimizer, rate, seed)

    def losses(self, optimizer: str, horizon: int) -> list[float]:
        """Of each seed, at the horizon."""
        scale = self.recipes.scale
        return [self.loss(self.best(optimizer, horizon, seed), scale.steps(horizon)) for seed in scale.seeds]

    def curve(self, run: Run) -> list[tuple[int, float]]:
        """(step, loss at X) in order."""
        return sorted((int(step), loss) for step, loss in self.row(run)["losses"].items())


class Guess(Found):
    """Before anything has run: rates in the middle. What the second round costs does not depend on them."""

    def best_rate(self, optimizer: str, horizon: int | None = None) -> float:
        rates = self.recipes.scale.rates(optimizer)
        return rates[len(rates) // 2]
