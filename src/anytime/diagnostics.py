"""What an averaging optimizer does in one step: c_t, β_t, ‖x − z‖, ρ, α and the size of its update.

Over the matrices of hidden layers where there are any, each the mean over them; ‖x − z‖ is of all parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .core import averaging
from .optim.base import AnytimeOptimizer
from .optim.groups import Place, places
from .optim.rules import ELEMENTWISE, RULES


class Probe:
    """Made before a step, read after it."""

    @torch.no_grad()
    def __init__(self, optimizer: AnytimeOptimizer) -> None:
        self.optimizer = optimizer
        everything = [place for group in optimizer.param_groups for place in places(group)]
        held = [place for place in everything if optimizer.state.get(place.param)]
        self.watched = [place for place in held if place.group["rule"] not in ELEMENTWISE] or held
        self.before = [optimizer.iterates(place.param) for place in self.watched]
        self.clocks = [self._clock(place) for place in self.watched]

    @torch.no_grad()
    def read(self) -> dict[str, float]:
        """One number each; a single read from the device."""
        if not self.watched:
            return {}
        columns: dict[str, list[Tensor]] = {"rho": [], "alpha": [], "update_rms": []}
        if self.optimizer.averages:
            columns |= {"c": [], "beta": []}
        for place, old, (step, weight_sum) in zip(self.watched, self.before, self.clocks, strict=True):
            z, group, state = self.optimizer.iterates(place.param).z, place.group, self.optimizer.state[place.param]
            t = state["step"]
            eta = averaging.warmed_up(t, group["lr"], group["warmup_steps"]) * group["rate"]
            eta = (eta * RULES[group["rule"]].rate(t, group) * (t > step)).to(z.dtype)  # 0 if the step was left out
            at = {"z": old.z, "y": old.y, None: torch.zeros_like(z)}[group.get("decay_at", "z")]
            update = (old.z - z) - eta * group["weight_decay"] * at
            columns["rho"].append(z.square().mean().sqrt())
            columns["alpha"].append((update * old.z).sum() / (update.norm() * old.z.norm()).clamp(min=1e-30))
            columns["update_rms"].append(update.square().mean().sqrt() / eta.clamp(min=1e-30))
            if self.optimizer.averages:
                now = state["weight_sum"]
                at_z = (t <= group["averaging_warmup"]) | (now == 0)  # X stays at Z
                c = torch.where(at_z, 1.0, 1 - weight_sum / torch.where(at_z, 1.0, now))
                columns["c"].append(torch.where(t > step, c, 0.0))
                columns["beta"].append(state["beta"])
        found = {name: torch.stack([v.to(torch.float64) for v in column]).mean() for name, column in columns.items()}
        if self.optimizer.averages:
            squares = [state["d"].square().sum(dtype=torch.float64) for state in self.optimizer.state.values() if state]
            found["distance"] = torch.stack(squares).sum().sqrt()
        return dict(zip(found, torch.stack(list(found.values())).tolist(), strict=True))

    def _clock(self, place: Place) -> tuple[Tensor, Tensor]:
        state = self.optimizer.state[place.param]
        return state["step"].clone(), state.get("weight_sum", state["step"]).clone()
