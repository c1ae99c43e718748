"""Without the average, for comparison: NorMuon, Muon, AdamW and the geometry family of the paper's appendix A.

They take a learning-rate schedule like any torch optimizer. train(), eval() and averaged() are there and change
nothing: X, Y and Z are the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..core.polar import Polar
from ..routing import Params
from . import keywords
from .base import AnytimeOptimizer
from .groups import Ruled

_ADAM = {**keywords.ADAM, "adam_betas": (0.9, 0.95), "adam_bias_correction": "moment"}
del _ADAM["adam_decay_at"], _ADAM["adam_vector_betas"]
_SPECTRAL = {**keywords.SPECTRAL, "nesterov": True}


class ScheduledMatrices(AnytimeOptimizer):
    """Abstract: a rule for matrices, AdamW for the rest. `table` holds further options of the rule."""

    averages = False

    def __init__(
        self, params: Params, rule: str, options: dict[str, Any], more: Mapping[str, Any], table: Mapping[str, Any]
    ) -> None:
        further, adam, handling = keywords.take(more, type(self), table, _ADAM, keywords.HANDLING)
        rest = keywords.the_rest(adam, options) | {"momentum_dtype": None}
        matrix = Ruled(rule, {"rate": 1.0, **options, **further})
        super().__init__(params, matrix=matrix, rest=Ruled("adamw", rest), **handling)


class ScheduledElementwise(AnytimeOptimizer):
    """Abstract: one rule for every parameter."""

    averages = False

    def __init__(self, params: Params, rule: str, options: dict[str, Any], more: Mapping[str, Any]) -> None:
        (handling,) = keywords.take(more, type(self), keywords.HANDLING)
        ruled = Ruled(rule, {"rate": 1.0, "momentum_dtype": None, **options})
        super().__init__(params, matrix=None, rest=ruled, **handling)


@final
class NorMuon(ScheduledMatrices):
    """NorMuon: W ← W − η_t λ W − 0.2 η_t √(mn) P̂ / ‖P̂‖_F with Nesterov momentum; AdamW for the rest."""

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.008,
        momentum: float = 0.95,
        beta2: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        warmup_steps: int = 0,
        polar: Polar = "newton-schulz",
        polar_dtype: torch.dtype | None = None,
        **more: Unpack[keywords.ScheduledSpectral],
    ) -> None:
        options: dict[str, Any] = {
            "lr": lr,
            "momentum": momentum,
            "beta2": beta2,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        options |= {"warmup_steps": warmup_steps, "row_norm": True, "polar": polar, "polar_dtype": polar_dtype}
        super().__init__(params, "normuon", options, more, _SPECTRAL)


@final
class Muon(ScheduledMatrices):
    """Muon: W ← W − η_t λ W − η_t s P with Nesterov momentum; AdamW for the rest.

    scaling s: "rms" is 0.2 √(mn) / ‖P‖_F, "max-side" 0.2 √max(m, n), "aspect" √max(1, m/n), None 1.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.008,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        warmup_steps: int = 0,
        polar: Polar = "newton-schulz",
        polar_dtype: torch.dtype | None = None,
        **more: Unpack[keywords.ScheduledSpectral],
    ) -> None:
        options: dict[str, Any] = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "warmup_steps": warmup_steps,
        }
        options |= {"row_norm": False, "polar": polar, "polar_dtype": polar_dtype}
        super().__init__(params, "muon", options, more, _SPECTRAL)


@final
class SpectralDescent(ScheduledMatrices):
    """W ← W − η polar(M), the exact steepest descent of the spectral norm; M = G without momentum."""

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.01,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        **more: Unpack[keywords.ScheduledMatrices],
    ) -> None:
        options: dict[str, Any] = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "warmup_steps": warmup_steps,
        }
        super().__init__(params, "spectral-descent", options, more, {"momentum_dtype": None})


@final
class Shampoo(ScheduledMatrices):
    """W ← W − η L^(−1/4) M R^(−1/4); at β2 = 0 the polar factor of M."""

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.01,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        **more: Unpack[keywords.ScheduledMatrices],
    ) -> None:
        options: dict[str, Any] = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "warmup_steps": warmup_steps}
        super().__init__(params, "shampoo", options, more, {"momentum_dtype": None})


@final
class AdamW(ScheduledElementwise):
    """AdamW; without bias correction (None) at β2 = 0 it is m / (|g| + ε): a sign only at β1 = 0."""

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        warmup_steps: int = 0,
        bias_correction: str | None = "moment",
        **more: Unpack[keywords.Handling],
    ) -> None:
        options: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "warmup_steps": warmup_steps,
        }
        super().__init__(params, "adamw", {**options, "bias_correction": bias_correction}, more)


@final
class SignSGD(ScheduledElementwise):
    """W ← W − η sign(M), the steepest descent of the entrywise maximum; M = G without momentum."""

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        **more: Unpack[keywords.Handling],
    ) -> None:
        options: dict[str, Any] = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "warmup_steps": warmup_steps,
        }
        super().__init__(params, "sign", options, more)


@final
class Lion(ScheduledElementwise):
    """W ← W − η (sign(β1 M + (1 − β1) G) + λ W), then M ← β2 M + (1 − β2) G."""

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.1,
        warmup_steps: int = 0,
        **more: Unpack[keywords.Handling],
    ) -> None:
        options: dict[str, Any] = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "warmup_steps": warmup_steps}
        super().__init__(params, "lion", options, more)
