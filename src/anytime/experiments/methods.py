"""The methods that are compared: an optimizer each, and which of its settings are searched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .search import Try

#: Stand for the study's steps of warmup and for the run's rate in an option.
WARMUP, RATE = "warmup", "rate"


@dataclass(frozen=True)
class Method:
    """An optimizer, what is the same in all of its tries, and what is searched besides the rate.

    axes: values of what is searched, in their order; None leaves an option to the class.
    start: where the search begins; where it is silent, at the middle value of an axis.
    scheduled: needs a run for each horizon. enveloped: is searched at each horizon and makes E(H) with its like.
    published: is taken as its authors gave it, at the study's rate, and not searched.
    after: a part of the horizon that is added to it and not charged: a cooldown branched off at the horizon.
    rate: the middle of its rates, where its scale is not that of the study's.
    claimed: what is claimed rests on it, so it is run on all seeds; the others on the first ones. part: it is the
    recipe without one of its parts.
    only: by horizon what another study found there, of which the rate alone is searched.
    """

    name: str
    options: Mapping[str, Any]
    axes: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    start: Mapping[str, Any] = field(default_factory=dict)
    scheduled: bool = False
    enveloped: bool = False
    published: bool = False
    after: float = 0.0
    rate: float | None = None
    claimed: bool = False
    part: bool = False
    only: Mapping[float, Try] = field(default_factory=dict)

    @property
    def first(self) -> Try:
        """Where its search begins."""
        middle = {axis: values[(len(values) - 1) // 2] for axis, values in self.axes.items()}
        return Try.of({**middle, **self.start}, 0)

    def ends(self, point: Try, tried: Sequence[Mapping[str, Any]]) -> list[str]:
        """What stands at an end of the values that were tried, so that the best may lie beyond; `tried` are options."""
        setting, found = dict(point.setting), []
        for axis, of in self.axes.items():
            there = [value for value in of if any(_listed(options.get(axis)) == _listed(value) for options in tried)]
            if len(of) > 2 and setting.get(axis) in (*there[:1], *there[-1:]):
                found.append(axis)
        return found


def _listed(value: Any) -> Any:
    """As a file has it."""
    return list(value) if isinstance(value, tuple) else value


_NORMUON = {
    "weight_decay": (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4), "adam_weight_decay": (None, 0.0),
    "momentum": (0.7, 0.8, 0.9, 0.95, 0.98),
}  # fmt: skip
_AVERAGED = {"name": "SFNorMuon", "betas": [0.0, 0.95], "nesterov": True, "averaging_warmup": WARMUP}
_WEIGHTS = {"momentum": (0.9, 0.95), "averaging_power": (4.0, 9.0), "weight_decay": (0.025, 0.05, 0.1)}
_ADAM_DECAY = (0.025, 0.05, 0.1, 0.2)

METHODS = {
    method.name: method
    for method in (
        Method(
            "NorMuon", {"name": "NorMuon"}, {**_NORMUON, "schedule": ("cosine", "linear")}, {"weight_decay": 0.1},
            scheduled=True, enveloped=True, claimed=True,
        ),
        Method(
            "NorMuon, 1 − √ cooldown", {"name": "NorMuon", "schedule": "wsd"},
            {"decay_part": (0.2, 0.4), **_NORMUON}, {"weight_decay": 0.1}, scheduled=True,
        ),
        Method(
            "NorMuon, 1 − √ cooldown not charged", {"name": "NorMuon", "schedule": "wsd", "decay_part": 1 / 6},
            _NORMUON, {"weight_decay": 0.1}, scheduled=True, after=0.2,
        ),
        Method(
            "AdamW, cosine", {"name": "AdamW", "schedule": "cosine"},
            {"betas": ((0.9, 0.95), (0.95, 0.99)), "weight_decay": _ADAM_DECAY}, scheduled=True,
        ),
        Method("SF-AdamW", {"name": "SFAdamW"}, {"betas": ((0.9, 0.99), (0.95, 0.99)), "weight_decay": _ADAM_DECAY}),
        Method(
            "ScheduleFree+", {"name": "SFPlus", "averaging_warmup": WARMUP},
            {"weight_decay": (5.0, 20.0, 50.0), "averaging_power": (0.0, 2.0)}, rate=1.0,
        ),
        Method("SF-NorMuon, the paper's", {"name": "SFNorMuon", "betas": [0.9, 0.95]}, published=True),
        Method(
            "SF-NorMuon, retuned", {"name": "SFNorMuon"},
            {
                "betas": ((0.6, 0.95), (0.8, 0.95), (0.9, 0.95)), "momentum": (0.5, 0.6, 0.7, 0.8, 0.9),
                "weight_decay": (0.0125, 0.025, 0.05, 0.1, 0.2), "adam_weight_decay": (None, 0.0),
            },
            {"betas": (0.9, 0.95), "weight_decay": 0.05, "momentum": 0.8},
        ),
        Method(
            "AMUSE", {"name": "SFMuon", "momentum": 0.95, "beta_growth_start": WARMUP},
            {"beta": (0.4, 0.6, 0.8), "beta_growth": (0.2, 0.4, 0.6), "weight_decay": (0.025, 0.05, 0.1, 0.2)},
            {"weight_decay": 0.05},
        ),
        Method("constant rate, weights t^r", _AVERAGED, _WEIGHTS),
        Method(
            "rate 1/√t, weights t^r", {**_AVERAGED, "schedule": "power", "decay_power": 0.5, "decay_steps": 400},
            _WEIGHTS,
        ),
        Method("anytime", {"name": "SFNorMuon", "recipe": "anytime", "warmup_steps": None}, claimed=True),
    )
}  # fmt: skip

#: The method that is taken apart, and its parts, each as the paper has it, but that the warmup stays below
#: step S. The paper's λ for embeddings would fade away at once: they have the largest that matrices begin with.
RECIPE = "anytime"
PARTS: dict[str, dict[str, Any]] = {
    "β constant": {"betas": (0.9, 0.95), "beta_growth": 0.0},
    "μ constant": {"momentum_growth": 0.0, "nesterov": False},
    "rate constant": {"rate_fall": 0.0},
    "weights uniform": {"averaging_power": 0.0},
    "decay constant": {"decay_fading": 0, "weight_decay": 0.05},
    "embeddings decay too": {"adam_weight_decay": 0.5},
    "embeddings at the rate": {"adam_lr": RATE},
    "warmup of 75 steps": {"warmup_steps": 75},
}
