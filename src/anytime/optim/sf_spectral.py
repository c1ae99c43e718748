"""SF-NorMuon (the paper's Algorithm 1), SF-Muon (without its rows' normalization) and SF-SpectralSGD (its theory)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast, final

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..core.polar import Polar
from ..routing import Params
from . import keywords
from .base import AnytimeOptimizer
from .groups import Ruled
from .options import validate


class ScheduleFreeSpectral(AnytimeOptimizer):
    """Abstract: a schedule-free spectral rule for matrices, SF-AdamW for the rest."""

    def __init__(self, params: Params, rule: str, options: dict[str, Any], more: keywords.ScheduleFreeSpectral) -> None:
        average, adam, spectral, handling = keywords.take(
            more, type(self), keywords.AVERAGE, keywords.ADAM, keywords.SPECTRAL, keywords.HANDLING
        )
        matrix = {"rate": 1.0, **options, **average, **spectral}
        validate(matrix, matrix, type(self).__name__)
        beta = options["betas"][0] if "betas" in options else options["beta"]
        if beta == 1 and average["beta_growth"]:
            raise ValueError(
                f"{type(self).__name__}: beta is 1 and beta_growth {average['beta_growth']}; it cannot grow from there"
            )
        rest = keywords.the_rest(adam, options) | average
        if rest["betas"] is None:
            rest["betas"] = (beta if average["beta_growth"] else 0.95, 0.99)
        super().__init__(params, matrix=Ruled(rule, matrix), rest=Ruled("sf-adamw", rest), **handling)


def paper_recipe(lr: float | Tensor, warmup_steps: int) -> dict[str, Any]:
    """Algorithm 1 with the settings of the paper's tables."""
    return {"betas": (0.9, 0.95), "momentum": 0.8, "weight_decay": 0.05, "averaging_power": 0.0}


def anytime_recipe(lr: float | Tensor, warmup_steps: int) -> dict[str, Any]:
    """Every time scale grows with the step t, so that no horizon is preferred: docs/frontier.md.

    With S = max(warmup_steps, 100), after step S: β_t = 1 − 0.6 ((S − 1)/(t − 1))^0.4, and the momentum, Nesterov's,
    μ_t = 1 − 0.2 ((S − 1)/(t − 1))^0.3. The rate falls as t^−0.3: where noise agrees with itself for longer, it moves Z
    further, by η²/(1 − μ) a step. Weights are η_t² t³. The decay is η λ_t = a / (S + t): what was learnt at step s
    counts (s / t)^a at step t. Where lr ≥ 4 / S, a is 2; below, λ is ½ and a = lr S / 2, for low rates are for weights
    that are good already, as in fine-tuning, which must not fade. A rate changed later, or of a group, changes the
    decay. What is no hidden matrix does not decay, and its rate is 0.03 at most: beyond, the embedding is what suffers.
    For vectors (biases, gains) β_t begins at 0.9: each adds its noise to all that a layer puts out.
    """
    start = max(warmup_steps, 100)
    return {
        "betas": (0.4, 0.95),
        "momentum": 0.8,
        "momentum_growth": 0.3,
        "momentum_growth_start": start,
        "nesterov": True,
        "weight_decay": 2 / max(4, float(lr) * start),
        "adam_lr": None if float(lr) <= 0.03 else torch.full_like(lr, 0.03) if isinstance(lr, Tensor) else 0.03,
        "adam_weight_decay": 0.0,
        "adam_vector_betas": (0.9, 0.99),
        "averaging_power": 3.0,
        "beta_growth": 0.4,
        "beta_growth_start": start,
        "decay_fading": start,
        "rate_fall": 0.3,
        "rate_fall_start": start,
    }


@dataclass(frozen=True)
class Recipe:
    """The rate and the warmup where none is given, and what else is filled in, from these two."""

    lr: float
    warmup_steps: int
    fill: Callable[[float | Tensor, int], dict[str, Any]]


RECIPES = {"paper": Recipe(0.008, 2000, paper_recipe), "anytime": Recipe(0.02, 10, anytime_recipe)}


@final
class SFNorMuon(ScheduleFreeSpectral):
    """Schedule-Free NorMuon for the matrices of hidden layers, Schedule-Free AdamW for all other parameters.

        M ← μ M + (1 − μ) G           v ← β2 v + (1 − β2) mean_cols(P ⊙ P),  P = polar(M)
        Z ← Z − η_t λ Z − 0.2 η_t √(mn) P̂ / ‖P̂‖_F,  P̂ = P / (√v + ε)
        X ← (1 − c) X + c Z,  c = w / Σw,  w = η_t² t^r
        Y = (1 − β) Z + β X           gradients are taken here

    Args:
        params: a module, parameters, named parameters, or groups of them.
        lr, warmup_steps: η_t = lr · min(1, t / warmup_steps); lr from the start at 0.
        recipe: what is not given is as the recipe has it. "paper": betas (0.9, 0.95), momentum 0.8, weight_decay 0.05,
            averaging_power 0, lr 0.008, warmup_steps 2000, nothing else. "anytime", made for runs whose end nobody
            knows, has lr 0.02 and warmup_steps 10: see `anytime_recipe`.
        betas: β of the interpolation, 0 included, and β2 of the row statistics.
        momentum: μ.
        weight_decay, decay_at: λ, and where it acts: "z", "y" or None.
        decay_fading: λ_t = λ T / (T + t) for T steps; 0 keeps λ.
        cautious=False: True spares entries that their update makes larger (arXiv 2510.12402) the decay.
        row_norm: False leaves P̂ = P.
        polar: "newton-schulz", "polar-express", "polar-express-4" (four steps instead of five), "quintic", "svd",
            "low-rank", or a callable from one matrix to another.
        polar_dtype: the precision of the polar factor; None is float16 on CUDA, the parameter's own elsewhere.
        averaging_power, averaging_warmup: r, and for how many steps X stays at Z.
        beta_growth, beta_growth_start: β_t = 1 − ((T0 − 1)/(t − 1))^growth (1 − β) after step T0; 0 keeps β.
        momentum_growth=0, momentum_growth_start: the same rule for μ.
        rate_fall=0, rate_fall_start: the rate times ((T0 − 1)/(t − 1))^fall after step T0; decay does not follow it.
        momentum_dtype=None: a narrower M. nesterov=False: the polar factor of (1 − μ) G + μ M instead of M.
        scaling="rms", update_rms=0.2: the 0.2 √(mn) / ‖P̂‖_F above; for others see Muon.
        adam_lr, adam_weight_decay, adam_betas, adam_eps, adam_decay_at="y": of the SF-AdamW part; by default lr and
            weight_decay as above or as the recipe has them, betas (0.95, 0.99), or (β, 0.99) if β grows.
        adam_vector_betas=None: of biases, gains and other vectors; None is adam_betas.
        adam_bias_correction="rate": η_t times √(1 − β2^t), as the paper does; "moment" divides v instead, None neither.
        rules, unmatched, on_nonfinite, graph, owners: see AnytimeOptimizer.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor | None = None,
        betas: tuple[float, float] | None = None,
        momentum: float | None = None,
        eps: float = 1e-8,
        weight_decay: float | None = None,
        decay_at: str | None = "z",
        warmup_steps: int | None = None,
        row_norm: bool = True,
        polar: Polar = "newton-schulz",
        polar_dtype: torch.dtype | None = None,
        averaging_power: float | None = None,
        averaging_warmup: int = 0,
        recipe: str = "paper",
        **more: Unpack[keywords.SFNorMuon],
    ) -> None:
        if not isinstance(recipe, str) or recipe not in RECIPES:
            raise ValueError(f"SFNorMuon: recipe is {recipe!r}; it must be one of {', '.join(map(repr, RECIPES))}")
        lr = RECIPES[recipe].lr if lr is None else lr
        warmup_steps = RECIPES[recipe].warmup_steps if warmup_steps is None else warmup_steps
        options: dict[str, Any] = {"lr": lr, "eps": eps, "decay_at": decay_at, "warmup_steps": warmup_steps}
        options |= {"row_norm": row_norm, "polar": polar, "polar_dtype": polar_dtype}
        validate(options, options, type(self).__name__)
        given = {"betas": betas, "momentum": momentum, "weight_decay": weight_decay, "averaging_power": averaging_power}
        stated: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
        filled = {**RECIPES[recipe].fill(lr, warmup_steps), **stated, **more, "averaging_warmup": averaging_warmup}
        options |= {key: filled.pop(key) for key in ("betas", "momentum", "weight_decay")}
        super().__init__(params, "normuon", options, cast(keywords.ScheduleFreeSpectral, filled))


@final
class SFMuon(ScheduleFreeSpectral):
    """SF-NorMuon without the normalization of rows: Z ← Z − η_t λ Z − 0.2 η_t √(mn) P / ‖P‖_F."""

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.008,
        beta: float = 0.9,
        momentum: float = 0.8,
        weight_decay: float = 0.05,
        decay_at: str | None = "z",
        warmup_steps: int = 2000,
        polar: Polar = "newton-schulz",
        polar_dtype: torch.dtype | None = None,
        **more: Unpack[keywords.ScheduleFreeSpectral],
    ) -> None:
        options: dict[str, Any] = {
            "lr": lr,
            "beta": beta,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "decay_at": decay_at,
        }
        options |= {"warmup_steps": warmup_steps, "row_norm": False, "polar": polar, "polar_dtype": polar_dtype}
        super().__init__(params, "muon", options, more)


@final
class SFSpectralSGD(ScheduleFreeSpectral):
    """Z ← Z − η polar(M), M_1 = G_1, with the exact polar factor, no scaling, and no decay unless asked for.

    projection: "frobenius" or "spectral" keeps each matrix of Z in that ball of the given radius; None does not.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 0.01,
        beta: float = 0.9,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        decay_at: str | None = "z",
        warmup_steps: int = 0,
        projection: str | None = None,
        radius: float | None = None,
        polar: Polar = "svd",
        **more: Unpack[keywords.ScheduleFreeSpectral],
    ) -> None:
        options: dict[str, Any] = {
            "lr": lr,
            "beta": beta,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "decay_at": decay_at,
        }
        options |= {"warmup_steps": warmup_steps, "row_norm": False, "polar": polar, "polar_dtype": None}
        options |= {"projection": projection, "radius": radius}
        more.setdefault("scaling", None)
        super().__init__(params, "spectral-sgd", options, more)
