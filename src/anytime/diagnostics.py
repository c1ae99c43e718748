"""What an averaging optimizer does in one step: c_t, β_t, ‖x − z‖, ρ, α and the size of its update.

Over the matrices of hidden layers where there are any, each the mean over them; ‖x − z‖ is of all parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .core import averaging
from .optim.base import AnytimeOptimizer
from .optim.groups import Place, places
from .optim.rules import RULES

#: Rules for everything but matrices of hidden layers.
_ELEMENTWISE = ("sf-adamw", "adamw", "sgd", "sign", "lion")


class Probe:
    """Made before a step, read after it."""

    @torch.no_grad()
    def __init__(self, optimizer: AnytimeOptimizer) -> None:
        self.optimizer = optimizer
        everything = [place for group in optimizer.param_groups for place in places(group)]
        held = [place for place in everything if optimizer.state.get(place.param)]
        self.watched = [place for place in held if place.group["rule"] not in _ELEMENTWISE] or held
        self.before = [optimizer.iterates(place.param) for place in self.watched]
        self.weight_sums = [self._weight_sum(place) for place in self.watched]

    @torch.no_grad()
    def read(self) -> dict[str, float]:
        """One number each; a single read from the device."""
        if not self.watched:
            return {}
        columns: dict[str, list[Tensor]] = {"rho": [], "alpha": [], "update_rms": []}
        if self.optimizer.averages:
            columns |= {"c": [], "beta": []}
        for place, old, weight_sum in zip(self.watched, self.before, self.weight_sums, strict=True):
            z, group, state = self.optimizer.iterates(place.param).z, place.group, self.optimizer.state[place.param]
            t = state["step"]
            eta = averaging.warmed_up(t, group["lr"], group["warmup_steps"]) * group["rate"]
            eta = (eta * RULES[group["rule"]].rate(t, group)).to(z.dtype)
            at = {"z": old.z, "y": old.y, None: torch.zeros_like(z)}[group.get("decay_at", "z")]
            update = (old.z - z) - eta * group["weight_decay"] * at
            columns["rho"].append(z.square().mean().sqrt())
            columns["alpha"].append((update * old.z).sum() / (update.norm() * old.z.norm()).clamp(min=1e-30))
            columns["update_rms"].append(update.square().mean().sqrt() / eta.clamp(min=1e-30))
            if self.optimizer.averages:
                now = self._weight_sum(place)
                columns["c"].append(torch.where(now > weight_sum, 1 - weight_sum / now, 1.0))
                columns["beta"].append(state["beta"])
        found = {name: torch.stack([v.to(torch.float64) for v in column]).mean() for name, column in columns.items()}
        if self.optimizer.averages:
            squares = [state["d"].square().sum(dtype=torch.float64) for state in self.optimizer.state.values() if state]
            found["distance"] = torch.stack(squares).sum().sqrt()
        return dict(zip(found, torch.stack(list(found.values())).tolist(), strict=True))

    def _weight_sum(self, place: Place) -> Tensor:
        if not self.optimizer.averages:
            return torch.zeros(())
        weight_sum: Tensor = self.optimizer.state[place.param]["weight_sum"].clone()
        return weight_sum
