"""Keyword options that classes share, with their defaults, stated once."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor

from ..routing import Rules
from .options import unknown


class Handling(TypedDict, total=False):
    """How any optimizer takes parameters and gradients; see AnytimeOptimizer."""

    rules: Rules | None
    unmatched: str
    on_nonfinite: str
    graph: bool
    chunk_bytes: int | None
    owners: str | None
    process_group: Any


class Timed(Handling, total=False):
    """What changes with the step: β_t = 1 − ((T0 − 1)/(t − 1))^beta_growth (1 − β) after step T0 = beta_growth_start,
    λ_t = λ T / (T + t) for T = decay_fading, and the rate times ((T0 − 1)/(t − 1))^rate_fall after step
    T0 = rate_fall_start, which leaves the decay as it was; 0 keeps β, λ and the rate."""

    beta_growth: float
    beta_growth_start: int
    decay_fading: int
    rate_fall: float
    rate_fall_start: int


class Average(Timed, total=False):
    """The average of a schedule-free optimizer: w = η_t² t^averaging_power, X at Z for averaging_warmup steps."""

    averaging_power: float
    averaging_warmup: int


class Adam(TypedDict, total=False):
    """The (SF-)AdamW part of an optimizer of matrices; None takes the matrices' lr and weight_decay, and adam_betas for
    vectors."""

    adam_lr: float | Tensor | None
    adam_betas: tuple[float, float] | None
    adam_vector_betas: tuple[float, float] | None
    adam_eps: float
    adam_weight_decay: float | None
    adam_decay_at: str | None
    adam_bias_correction: str | None


class Spectral(TypedDict, total=False):
    """The polar factor of an optimizer of matrices and what it is taken of; μ_t grows as β_t does."""

    nesterov: bool
    momentum_growth: float
    momentum_growth_start: int
    momentum_dtype: torch.dtype | None
    scaling: str | None
    update_rms: float
    cautious: bool


class ScheduledMatrices(Handling, Adam, total=False):
    momentum_dtype: torch.dtype | None


class ScheduledSpectral(Handling, Adam, Spectral, total=False):
    pass


class SFNorMuon(Timed, Adam, Spectral, total=False):
    pass


class ScheduleFreeSpectral(Average, Adam, Spectral, total=False):
    pass


HANDLING: dict[str, Any] = {
    "rules": None,
    "unmatched": "auto",
    "on_nonfinite": "skip",
    "graph": False,
    "chunk_bytes": None,
    "owners": None,
    "process_group": None,
}
AVERAGE: dict[str, Any] = {
    "averaging_power": 0.0,
    "averaging_warmup": 0,
    "beta_growth": 0.0,
    "beta_growth_start": 200,
    "decay_fading": 0,
    "rate_fall": 0.0,
    "rate_fall_start": 200,
}
ADAM: dict[str, Any] = {
    "adam_lr": None,
    "adam_betas": None,
    "adam_vector_betas": None,
    "adam_eps": 1e-8,
    "adam_weight_decay": None,
    "adam_decay_at": "y",
    "adam_bias_correction": "rate",
}
SPECTRAL: dict[str, Any] = {
    "nesterov": False,
    "momentum_growth": 0.0,
    "momentum_growth_start": 200,
    "momentum_dtype": None,
    "scaling": "rms",
    "update_rms": 0.2,
    "cautious": False,
}


def take(given: Mapping[str, Any], owner: type, *tables: Mapping[str, Any]) -> list[dict[str, Any]]:
    """`given` sorted into the tables it may come from, defaults filled in; what is in none of them is an error."""
    known = [key for table in tables for key in table]
    for key in given:
        if key not in known:
            named = [name for name in inspect.signature(owner).parameters if name != "more"]
            raise TypeError(unknown(key, [*known, *named], owner.__name__))
    return [{key: given.get(key, default) for key, default in table.items()} for table in tables]


def the_rest(adam: Mapping[str, Any], matrix: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the (SF-)AdamW part: without their prefix, lr and weight_decay the matrices' where not given."""
    rest = {key.removeprefix("adam_"): value for key, value in adam.items()}
    own = {key: matrix[key] for key in ("lr", "weight_decay") if rest[key] is None}
    return {"rate": 1.0, "warmup_steps": matrix["warmup_steps"], **rest, **own}
