"""What an averaging optimizer does in one step: c_t, β_t, ‖x − z‖, ρ, α and the size of its update.

Over the matrices of hidden layers where there are any, each the mean over them; ‖x − z‖ is of all parameters. Where
parameters are sharded or owned by one process each, the numbers are of the whole, and all processes must ask for them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .core import averaging
from .distributed.parts import local
from .optim.base import AnytimeOptimizer, Iterates
from .optim.groups import Place, places
from .optim.rules import ELEMENTWISE, RULES


class Probe:
    """Made before a step, read after it."""

    @torch.no_grad()
    def __init__(self, optimizer: AnytimeOptimizer) -> None:
        self.optimizer = optimizer
        everything = [place for group in optimizer.param_groups for place in places(group)]
        matrices = [place for place in everything if place.group["rule"] not in ELEMENTWISE]
        trained = any(place.param.requires_grad or optimizer.state.get(place.param) for place in matrices)
        self.watched = [place for place in (matrices if trained else everything) if optimizer.state.get(place.param)]
        self.before = [optimizer.iterates(place.param) for place in self.watched]
        self.clocks = [self._clock(place) for place in self.watched]

    @torch.no_grad()
    def read(self) -> dict[str, float]:
        """One number each; a single read from the device."""
        optimizer = self.optimizer
        names = ["rho", "alpha", "update_rms", *(["c", "beta"] if optimizer.averages else [])]
        rates = [self._rate(place, step) for place, (step, _) in zip(self.watched, self.clocks, strict=True)]
        sums = [self._sums(*of) for of in zip(self.watched, self.before, rates, strict=True)]
        optimizer.sum_parts_([place.param for place in self.watched], sums)
        device = optimizer.param_groups[0]["params"][0].device
        total = torch.zeros(len(names) + 1, dtype=torch.float64, device=device)
        for place, found, eta, (step, weight_sum) in zip(self.watched, sums, rates, self.clocks, strict=True):
            z, u, old, product = found.unbind()
            size, state = place.param.numel(), optimizer.state[place.param]
            row = [
                (z / size).sqrt(),
                product / (u * old).sqrt().clamp(min=1e-30),
                (u / size).sqrt() / eta.clamp(min=1e-30),
            ]
            if optimizer.averages:
                t, now = state["step"], state["weight_sum"]
                at_z = (t <= place.group["averaging_warmup"]) | (now == 0)  # X stays at Z
                c = torch.where(at_z, 1.0, 1 - weight_sum / torch.where(at_z, 1.0, now))
                row += [torch.where(t > step, c, 0.0), state["beta"]]
            total += torch.stack([value.to(device, torch.float64) for value in (*row, torch.ones_like(z))])
        optimizer.sum_owned_(total)
        means = [*(total[:-1] / total[-1]).unbind()]
        if optimizer.averages:
            names.append("distance")
            means.append(self._distance(device))
        numbers = torch.stack([*means, total[-1]]).tolist()
        return dict(zip(names, numbers, strict=False)) if numbers[-1] else {}

    def _rate(self, place: Place, before: Tensor) -> Tensor:
        """η_t of the step that was taken, 0 if it was left out."""
        group, t = place.group, self.optimizer.state[place.param]["step"]
        eta = averaging.warmed_up(t, group["lr"], group["warmup_steps"]) * group["rate"]
        rate: Tensor = eta * RULES[group["rule"]].rate(t, group) * (t > before)
        return rate

    def _sums(self, place: Place, before: Iterates, eta: Tensor) -> Tensor:
        """[4]: z², U², z² before and U·z before, summed over the part held here; U is the update without the decay."""
        z, old = local(self.optimizer.iterates(place.param).z), local(before.z)
        at = {"z": old, "y": local(before.y), None: torch.zeros_like(z)}[place.group.get("decay_at", "z")]
        update = (old - z) - eta.to(z.dtype) * place.group["weight_decay"] * at
        pairs = (z, z), (update, update), (old, old), (update, old)
        return torch.stack([(a * b).sum(dtype=torch.float64) for a, b in pairs])

    def _distance(self, device: torch.device) -> Tensor:
        held = [(p, state["d"]) for p, state in self.optimizer.state.items() if "d" in state]
        squares = [local(d).square().sum(dtype=torch.float64) for _, d in held]
        self.optimizer.sum_parts_([p for p, _ in held], squares)
        zero = torch.zeros((), dtype=torch.float64, device=device)
        owned, rest = zero.clone(), zero.clone()
        for (p, _), square in zip(held, squares, strict=True):
            (owned if self.optimizer.is_owned(p) else rest).add_(square.to(device))
        self.optimizer.sum_owned_(owned)
        return (owned + rest).sqrt()

    def _clock(self, place: Place) -> tuple[Tensor, Tensor]:
        state = self.optimizer.state[place.param]
        return state["step"].clone(), state.get("weight_sum", state["step"]).clone()
