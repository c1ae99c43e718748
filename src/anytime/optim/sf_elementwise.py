"""SF-AdamW, the paper's review of it, and the average around other elementwise directions: SGD and Lion."""

from __future__ import annotations

from typing import Any, final

from torch import Tensor
from typing_extensions import Unpack

from ..routing import Params
from . import keywords
from .base import AnytimeOptimizer
from .groups import Ruled


class ScheduleFreeElementwise(AnytimeOptimizer):
    """Abstract: one schedule-free rule for every parameter."""

    def __init__(self, params: Params, rule: str, options: dict[str, Any], more: keywords.Average) -> None:
        average, handling = keywords.take(more, type(self), keywords.AVERAGE, keywords.HANDLING)
        super().__init__(params, matrix=None, rest=Ruled(rule, {"rate": 1.0, **options, **average}), **handling)


@final
class SFAdamW(ScheduleFreeElementwise):
    """Schedule-Free AdamW: z ← z − η_t (g / (√v + ε) + λ y), with η_t = lr · min(1, t / warmup_steps) · √(1 − β2^t).

    bias_correction: "rate" is the paper's, as above; "moment" divides v by 1 − β2^t instead; None does neither.
    vector_betas: of biases, gains and other vectors; None is betas.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.008,
        betas: tuple[float, float] = (0.95, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.05,
        decay_at: str | None = "y",
        warmup_steps: int = 2000,
        bias_correction: str | None = "rate",
        vector_betas: tuple[float, float] | None = None,
        **more: Unpack[keywords.Average],
    ) -> None:
        options: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decay_at": decay_at,
        }
        options |= {"warmup_steps": warmup_steps, "bias_correction": bias_correction, "vector_betas": vector_betas}
        super().__init__(params, "sf-adamw", options, more)


@final
class SFSGD(ScheduleFreeElementwise):
    """Schedule-Free SGD: z ← z − η_t (g + λ y)."""

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1.0,
        beta: float = 0.9,
        weight_decay: float = 0.0,
        decay_at: str | None = "y",
        warmup_steps: int = 0,
        **more: Unpack[keywords.Average],
    ) -> None:
        options: dict[str, Any] = {"lr": lr, "beta": beta, "weight_decay": weight_decay, "decay_at": decay_at}
        super().__init__(params, "sgd", {**options, "warmup_steps": warmup_steps}, more)


@final
class SFLion(ScheduleFreeElementwise):
    """Schedule-Free Lion: z ← z − η_t (sign(β1 M + (1 − β1) g) + λ z), M ← β2 M + (1 − β2) g, (β1, β2) = betas."""

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 3e-4,
        beta: float = 0.9,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.05,
        decay_at: str | None = "z",
        warmup_steps: int = 2000,
        **more: Unpack[keywords.Average],
    ) -> None:
        options: dict[str, Any] = {
            "lr": lr,
            "beta": beta,
            "betas": betas,
            "weight_decay": weight_decay,
            "decay_at": decay_at,
        }
        super().__init__(params, "lion", {**options, "warmup_steps": warmup_steps, "momentum_dtype": None}, more)
