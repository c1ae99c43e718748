"""The paper's algorithms line by line, one tensor at a time, with x, y and z all stored: the oracle of the tests.

Slow and obvious on purpose. Scalars are Python floats; nothing is shared with the fast path but the polar factor,
which is passed in.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def grown(beta: float, t: int, power: float, start: int) -> float:
    """β_t of a β that grows from step `start` on."""
    return beta if power == 0 or t <= start else 1 - ((start - 1) / (t - 1)) ** power * (1 - beta)


class Reference(ABC):
    """A schedule-free method on one tensor: `y` is where the next gradient is to be taken, `x` what to use."""

    def __init__(
        self,
        w: Tensor,
        *,
        lr: float,
        beta: float,
        weight_decay: float,
        decay_at: str | None,
        warmup_steps: int,
        averaging_power: float = 0.0,
        averaging_warmup: int = 0,
        beta_growth: float = 0.0,
        beta_growth_start: int = 200,
        decay_fading: int = 0,
        rate_fall: float = 0.0,
        rate_fall_start: int = 200,
        cautious: bool = False,
    ) -> None:
        self.lr, self.beta, self.weight_decay, self.decay_at = lr, beta, weight_decay, decay_at
        self.warmup_steps = warmup_steps
        self.averaging_power, self.averaging_warmup = averaging_power, averaging_warmup
        self.beta_growth, self.beta_growth_start = beta_growth, beta_growth_start
        self.decay_fading, self.cautious = decay_fading, cautious
        self.rate_fall, self.rate_fall_start = rate_fall, rate_fall_start
        self.x, self.y, self.z = w.clone(), w.clone(), w.clone()
        self.t = 0
        self.s = 0.0

    @abstractmethod
    def direction(self, G: Tensor) -> Tensor:
        """U of Z ← Z − η_t U."""

    def rate(self) -> float:
        """η_t before its fall, which decay follows."""
        return self.lr * min(1.0, self.t / self.warmup_steps) if self.warmup_steps else self.lr

    def fall(self) -> float:
        """What is left of the rate."""
        return 1 - grown(0.0, self.t, self.rate_fall, self.rate_fall_start)

    def beta_at(self, t: int) -> float:
        """β_t, which forms Y_t."""
        return grown(self.beta, t, self.beta_growth, self.beta_growth_start)

    def decay(self) -> float:
        """λ_t."""
        T = self.decay_fading
        return self.weight_decay * T / (T + self.t) if T else self.weight_decay

    def fast(self, Z: Tensor) -> Tensor:
        """What else happens to the new Z."""
        return Z

    def step(self, G: Tensor) -> None:
        self.t += 1
        before = self.rate()
        eta = before * self.fall()
        U = self.direction(G)
        decayed = {"z": self.z, "y": self.y, None: torch.zeros_like(self.z)}[self.decay_at]
        if self.cautious:
            decayed = decayed * (U.sign() * decayed.sign() >= 0)
        self.z = self.fast(self.z - before * self.decay() * decayed - eta * U)
        if self.t <= self.averaging_warmup:
            c = 1.0
        else:
            w = eta**2 * self.t**self.averaging_power
            self.s += w
            c = w / self.s if self.s > 0 else 1.0
        self.x = (1 - c) * self.x + c * self.z
        beta = self.beta_at(self.t + 1)
        self.y = (1 - beta) * self.z + beta * self.x


class ReferenceSFSGD(Reference):
    def direction(self, G: Tensor) -> Tensor:
        return G


class ReferenceSFAdamW(Reference):
    def __init__(self, w: Tensor, *, beta2: float, eps: float, bias_correction: str | None = "rate", **kw: Any) -> None:
        super().__init__(w, **kw)
        self.beta2, self.eps, self.bias_correction = beta2, eps, bias_correction
        self.v = torch.zeros_like(w)

    def rate(self) -> float:
        correction = math.sqrt(1 - self.beta2**self.t) if self.bias_correction == "rate" else 1.0
        return super().rate() * correction

    def direction(self, G: Tensor) -> Tensor:
        self.v = self.beta2 * self.v + (1 - self.beta2) * G * G
        v = self.v / (1 - self.beta2**self.t) if self.bias_correction == "moment" else self.v
        return G / (torch.sqrt(v) + self.eps)


class ReferenceSFLion(Reference):
    def __init__(self, w: Tensor, *, betas: tuple[float, float], **kw: Any) -> None:
        super().__init__(w, **kw)
        self.betas = betas
        self.M = torch.zeros_like(w)

    def direction(self, G: Tensor) -> Tensor:
        beta1, beta2 = self.betas
        C = beta1 * self.M + (1 - beta1) * G
        self.M = beta2 * self.M + (1 - beta2) * G
        return torch.sign(C)


class ReferenceSFNorMuon(Reference):
    """Algorithm 1 on one m × n matrix; row_norm=False is SF-Muon."""

    def __init__(
        self,
        w: Tensor,
        *,
        polar: Callable[[Tensor], Tensor],
        momentum: float,
        beta2: float = 0.95,
        eps: float = 1e-8,
        row_norm: bool = True,
        nesterov: bool = False,
        momentum_growth: float = 0.0,
        momentum_growth_start: int = 200,
        **kw: Any,
    ) -> None:
        super().__init__(w, **kw)
        self.polar, self.momentum, self.beta2, self.eps, self.row_norm = polar, momentum, beta2, eps, row_norm
        self.nesterov, self.momentum_growth, self.momentum_growth_start = (
            nesterov,
            momentum_growth,
            momentum_growth_start,
        )
        self.M = torch.zeros_like(w)
        self.v = torch.zeros_like(w[:, :1])

    def direction(self, G: Tensor) -> Tensor:
        m, n = G.shape
        mu = grown(self.momentum, self.t, self.momentum_growth, self.momentum_growth_start)
        self.M = mu * self.M + (1 - mu) * G
        P = self.polar(mu * self.M + (1 - mu) * G if self.nesterov else self.M)
        if self.row_norm:
            self.v = self.beta2 * self.v + (1 - self.beta2) * (P * P).mean(dim=1, keepdim=True)
            P = P / (torch.sqrt(self.v) + self.eps)
        norm = float(P.norm())
        return P * (0.2 * math.sqrt(m * n) / norm if norm > 0 else 0.0)


class ReferenceSFSpectralSGD(Reference):
    """The method of the theorems: exact polar factor, M_1 = G_1; `project` maps Z into a ball."""

    def __init__(
        self,
        w: Tensor,
        *,
        polar: Callable[[Tensor], Tensor],
        momentum: float,
        project: Callable[[Tensor], Tensor] = lambda Z: Z,
        **kw: Any,
    ) -> None:
        super().__init__(w, **kw)
        self.polar, self.momentum, self.project = polar, momentum, project
        self.M = torch.zeros_like(w)

    def direction(self, G: Tensor) -> Tensor:
        self.M = G if self.t == 1 else self.momentum * self.M + (1 - self.momentum) * G
        return self.polar(self.M)

    def fast(self, Z: Tensor) -> Tensor:
        return self.project(Z)
