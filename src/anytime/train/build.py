"""From settings to the optimizer, and to the rate of every step."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..core import averaging
from ..optim import scheduled, sf_elementwise, sf_plus, sf_spectral
from ..optim.base import AnytimeOptimizer
from ..optim.options import CHECKS, LATER
from ..optim.rules import ELEMENTWISE
from .config import Config, OptimizerConfig, Until, bare
from .errors import UserError

OPTIMIZERS: dict[str, type[AnytimeOptimizer]] = {
    kind.__name__: kind
    for kind in (
        sf_spectral.SFNorMuon, sf_spectral.SFMuon, sf_spectral.SFSpectralSGD,
        sf_elementwise.SFAdamW, sf_elementwise.SFSGD, sf_elementwise.SFLion, sf_plus.SFPlus,
        scheduled.NorMuon, scheduled.Muon, scheduled.SpectralDescent, scheduled.Shampoo,
        scheduled.AdamW, scheduled.SignSGD, scheduled.Lion,
    )
}  # fmt: skip

#: Settings that are the trainer's, not options of the class.
OURS = ("name", "schedule", "horizon", "decay_steps", "decay_power", "decay_part", "clip")
ENDLESS = ("constant", "power")


def optimizer_class(name: str) -> type[AnytimeOptimizer]:
    """By name, in any case and with or without hyphens."""
    known = {key.lower(): key for key in OPTIMIZERS}
    said = bare(name)
    if said not in known:
        near = difflib.get_close_matches(said, known, 1, 0.4)
        hint = f"; did you mean {known[near[0]]!r}?" if near else ""
        raise UserError(f"optimizer.name is {name!r}{hint}; there are {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[known[said]]


def build_optimizer(model: nn.Module, config: OptimizerConfig, *, owners: str | None = None) -> AnytimeOptimizer:
    kind = optimizer_class(config.name)
    sharded = any(isinstance(p, DTensor) for p in model.parameters())
    options: dict[str, Any] = {"graph": not sharded and owners is None, "owners": owners}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if f.name in OURS or value is None:
            continue
        if f.name.endswith("_dtype"):
            value = getattr(torch, value)
        options[f.name] = None if value == "none" else value
    try:
        return kind(model, **options)
    except (TypeError, ValueError) as wrong:
        raise UserError(f"optimizer: {wrong}") from None


def _filled(o: OptimizerConfig) -> dict[str, Any]:
    """What the recipe that is asked for fills in, where it is not given."""
    if o.recipe is None or optimizer_class(o.name) is not sf_spectral.SFNorMuon:
        return {}
    basis = {"lr": _basis(o, "lr"), "warmup_steps": warmup(o)}
    return {**basis, **sf_spectral.RECIPES[o.recipe].fill(*basis.values())}


def _changed(config: Config, values: Mapping[str, Any]) -> Config:
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, **values)) if values else config


def with_recipe(config: Config) -> Config:
    """The settings with what their recipe fills in, for another version of it may fill in something else."""
    o = config.optimizer
    return _changed(config, {name: value for name, value in _filled(o).items() if getattr(o, name) is None})


def without_recipe(config: Config) -> Config:
    """The settings less what their recipe fills in, so that another rate may be given and it is filled in for that."""
    o = config.optimizer
    filled = _filled(o)
    if filled:  # of these two it must not be what is given
        none = dataclasses.replace(o, lr=None, warmup_steps=None)
        filled |= {name: _basis(none, name) for name in ("lr", "warmup_steps")}
    return _changed(config, {name: None for name, value in filled.items() if getattr(o, name) == value})


def recalled(config: Config, groups: Sequence[Mapping[str, Any]]) -> Config:
    """The settings with what their recipe had filled in when the groups of a checkpoint were saved: settings have not
    always kept it."""
    o, values = config.optimizer, {}
    for name in (name for name, value in _filled(o).items() if value is not None and getattr(o, name) is None):
        group = next((g for g in groups if (g["rule"] in ELEMENTWISE) == name.startswith("adam_")), {})
        value = group.get(name.removeprefix("adam_"), LATER.get(name))
        values[name] = tuple(value) if isinstance(value, list) else value
    if "lr" in values:  # that of a group may follow a schedule; every recipe's was this one then
        values["lr"] = 0.008
    if "adam_lr" in values:
        values["adam_lr"] = values.get("lr", o.lr)
    return _changed(config, values)


def settled(config: Config) -> Config:
    """The settings with all in them that must not move when the run is extended: what a recipe fills in, and a
    schedule's last step."""
    config = with_recipe(config)
    o = config.optimizer
    if o.decay_steps < 1 or o.decay_power < 0:
        raise UserError(
            f"optimizer.decay_steps is {o.decay_steps}, must be at least 1, and decay_power is {o.decay_power:g}, must "
            "be at least 0"
        )
    if o.clip is not None and not 0 < o.clip < math.inf:
        raise UserError(f"optimizer.clip is {o.clip:g}, must be above 0, or nothing for none")
    if o.schedule in ENDLESS:
        if o.horizon is not None:
            raise UserError(f"optimizer.horizon is given but optimizer.schedule is {o.schedule!r}, which has no end")
        return config
    if o.horizon is None:
        until = Until.parse(config.until)
        if until.kind == "steps":
            horizon = int(until.value)
        elif until.kind == "tokens":
            horizon = math.ceil(until.value / (config.batch_size * config.model.context))
        else:
            raise UserError(
                f"the schedule {o.schedule!r} needs its last step: say --until '600 steps' or --optimizer.horizon 600"
            )
        o = dataclasses.replace(o, horizon=horizon)
    assert o.horizon is not None
    if o.horizon <= warmup(o):
        raise UserError(f"optimizer.horizon is {o.horizon}, must be above warmup_steps, which is {warmup(o)}")
    if not 0 < o.decay_part <= 1:
        raise UserError(f"optimizer.decay_part is {o.decay_part}, must be in (0, 1]")
    return dataclasses.replace(config, optimizer=o)


def _stated(config: OptimizerConfig, name: str) -> Any:
    """An option as it is given, or as the class has it."""
    given = getattr(config, name)
    return inspect.signature(optimizer_class(config.name)).parameters[name].default if given is None else given


@functools.cache  # asked for at every step
def warmup(config: OptimizerConfig) -> int:
    """Steps of the optimizer's own warmup."""
    return int(_basis(config, "warmup_steps"))


def _basis(config: OptimizerConfig, name: str) -> Any:
    """The rate or the warmup, as it is given, or as the class or its recipe has it."""
    value = _stated(config, name)
    return getattr(sf_spectral.RECIPES[_stated(config, "recipe")], name) if value is None else value


@dataclass(frozen=True)
class Rates:
    """The factor of the rate at each step beyond the optimizer's own warmup; a pure function of the step."""

    config: Config

    def factor(self, done: int) -> float:
        """Of the step after `done` others."""
        o, cooldown = self.config.optimizer, self.config.cooldown
        factor, start = 1.0, warmup(o)
        if o.schedule == "power":
            factor = (1 + max(0, done - start) / o.decay_steps) ** -o.decay_power
        elif o.horizon is not None:
            if o.schedule == "wsd":
                start = max(start, round(o.horizon * (1 - o.decay_part)))
            part = 1.0 if done >= o.horizon else max(0.0, (done - start) / max(1, o.horizon - start))
            factor = {"cosine": 0.5 + 0.5 * math.cos(math.pi * part), "linear": 1 - part, "wsd": 1 - math.sqrt(part)}[
                o.schedule
            ]
        if cooldown.steps:
            factor *= min(1.0, max(0.0, 1 - (done - cooldown.start) / cooldown.steps))
        return factor

    def warmed(self, done: int) -> float:
        """The part of the rate that the optimizer's own warmup leaves."""
        steps = warmup(self.config.optimizer)
        return min(1.0, (done + 1) / steps) if steps else 1.0

    @property
    def last_step(self) -> int | None:
        """The step after which the rate is zero for good."""
        ends = [self.config.optimizer.horizon] if self.config.optimizer.horizon is not None else []
        if self.config.cooldown.steps:
            ends.append(self.config.cooldown.start + self.config.cooldown.steps)
        return min(ends, default=None)


class Options:
    """The options of an optimizer's groups as the settings say, whatever a loaded state brought along."""

    def __init__(self, optimizer: AnytimeOptimizer) -> None:
        self.optimizer = optimizer
        self.stated = [{k: v for k, v in group.items() if k in CHECKS} for group in optimizer.param_groups]
        matrices = [group for group in optimizer.param_groups if group["rule"] not in ELEMENTWISE]
        self._shown = (matrices or optimizer.param_groups)[0]

    def apply(self, factor: float) -> float:
        """Restores them with the rate times `factor`; the rate, of the matrices where there are some."""
        for group, stated in zip(self.optimizer.param_groups, self.stated, strict=True):
            group.update(stated, lr=stated["lr"] * factor)
        return float(self._shown["lr"])

    def fallen(self, done: int) -> float:
        """The part of that rate that its own fall leaves to the step after `done` others."""
        if not (power := self._shown.get("rate_fall")):
            return 1.0
        return float(averaging.falling(torch.tensor(done + 1.0), power, self._shown["rate_fall_start"]))
