"""ScheduleFree+: the average around Adam's direction, with a rate that the loss sets.

After arXiv 2605.19095 and, where that leaves a choice, AdamCScheduleFreePlusPaper of facebookresearch/schedule_free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..core import averaging
from ..routing import Params
from . import fused, keywords
from .base import AnytimeOptimizer, Rates, averaging_beta
from .groups import Group, Ruled
from .members import State
from .moves import compute_dtype


@final
class SFPlus(AnytimeOptimizer):
    """ScheduleFree+ (arXiv 2605.19095): z ← z − η_t (m̂ / (√v̂ + ε) + η_t λ y), where the loss F sets the rate:
    η_t = lr · min(1, t / warmup_steps) · α_t with α_t = max(0, F + β ⟨g, z − x⟩) / ‖g‖, norm and product over all
    parameters. Step t has the weight t^averaging_power · max(η_1 … η_t)² in the average.

    ‖g‖ is √(π/2) Σ|g|, or its running mean of polyak_beta, corrected as in the authors' code: the corrected mean is
    what goes on. β goes from beta to beta_max in beta_anneal_steps, evenly in log(1 − β). Decay is of another scale
    than elsewhere: 20 to 50 are the authors' words. lr = 0 does nothing; in their code it stands for eps.

    step() needs a closure that returns F, under DDP the mean over processes. Not for sharded parameters or owners.
    State beside the base's: polyak (α), norm (the running mean, of the parameter's own gradient) and peak (max η).
    """

    needs_loss = True

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1.0,
        beta: float = 0.9,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        polyak_beta: float = 0.0,
        beta_max: float = 0.965,
        beta_anneal_steps: int = 0,
        averaging_power: float = 0.0,
        averaging_warmup: int = 0,
        **more: Unpack[keywords.Handling],
    ) -> None:
        (handling,) = keywords.take(more, type(self), keywords.HANDLING)
        options: dict[str, Any] = {"lr": lr, "beta": beta, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        options |= {"warmup_steps": warmup_steps, "polyak_beta": polyak_beta}
        options |= {"beta_max": beta_max, "beta_anneal_steps": beta_anneal_steps}
        options |= {"averaging_power": averaging_power, "averaging_warmup": averaging_warmup}
        fixed = {"rate": 1.0, "decay_at": "y", "bias_correction": "moment", "momentum_dtype": None}
        super().__init__(params, matrix=None, rest=Ruled("sf-plus", {**fixed, **options}), **handling)

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        if self._team.active:
            raise ValueError(
                f"{type(self).__name__} takes parameters that are whole on every process, without owners: use DDP, or "
                "another optimizer"
            )

    def state_spec(
        self, p: Tensor, group: Mapping[str, Any], layout: str
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        scalar = averaging.scalar_dtype(p.device)
        return super().state_spec(p, group, layout) | dict.fromkeys(("polyak", "norm", "peak"), ((), scalar))

    def beta(self, group: Group, t: Tensor) -> float | Tensor:
        start, steps = averaging_beta(group), group["beta_anneal_steps"]
        if steps == 0:
            return start
        part = ((t - 1) / steps).clamp(max=1)
        gap: Tensor = (1 - start) ** (1 - part) * (1 - group["beta_max"]) ** part
        return 1 - gap

    def rates(self, group: Group, t: Tensor, states: Sequence[State]) -> Rates:
        eta = super().rates(group, t, states).eta * _column(states, "polyak")
        return Rates(eta, _column(states, "peak"), group["weight_decay"] * eta)

    def _look(self, work: fused.Work, finite: Mapping[torch.device, Tensor], loss: Tensor | None) -> None:
        assert loss is not None
        norms, sums = [], []
        for group, members in work:
            params, states, _ = zip(*members, strict=True)
            t = _column(states, "step") + 1
            grads = [p.grad.to(compute_dtype(p)) for p in params]
            new = torch.stack([torch.linalg.vector_norm(g, 1) for g in grads]).to(t.dtype) * math.sqrt(math.pi / 2)
            keep = group["polyak_beta"]
            norms.append((keep * _column(states, "norm") + (1 - keep) * new) / (1 - keep**t))
            inner = torch.stack([(g * s["d"]).sum() for g, s in zip(grads, states, strict=True)]).to(t.dtype)
            sums.append(torch.stack([norms[-1].sum(), (self.beta(group, t) * inner).sum()]))
        found = {}
        for device, ok in finite.items():
            norm, inner = torch.stack([s.to(device, ok.dtype) for s in sums]).sum(0).unbind()
            value = (loss.to(device, ok.dtype) + inner).clamp(min=0)
            found[device] = torch.where(norm > 0, value / torch.where(norm > 0, norm, 1), 0)
        for (group, members), norm in zip(work, norms, strict=True):
            own = [state for _, state, _ in members]
            counts = finite[norm.device] > 0
            _put(own, "polyak", found[norm.device].expand_as(norm), counts)
            _put(own, "norm", norm, counts)
            eta, peak, _ = self.rates(group, _column(own, "step") + 1, own)
            _put(own, "peak", torch.maximum(peak, eta), counts)


def _column(states: Sequence[State], name: str) -> Tensor:
    return torch.stack([state[name] for state in states])


def _put(states: Sequence[State], name: str, values: Tensor, counts: Tensor) -> None:
    """Where the step counts."""
    new = torch.where(counts, values, _column(states, name))
    torch._foreach_copy_([state[name] for state in states], list(new.unbind()))
