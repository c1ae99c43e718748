"""Functions of one m × n matrix of which everything is known that the theorems ask for: optimum, smoothness, noise.

All take stacks [..., m, n] and give a number for each matrix; float64, drawn from a seed. Smoothness and noise hold on
the centred ball of a radius in a norm, "frobenius" or "spectral": balls are convex, so a bound on the second derivative
inside is a Lipschitz constant there.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import final

import torch
from torch import Tensor

from .bounds import NORMS
from .checks import choice, number, whole

F64 = torch.float64


class Problem(ABC):
    """Abstract. `start` and `optimum` are W_0 and W*, `least` is f*; `lipschitz` stays None where f is not convex."""

    start: Tensor
    optimum: Tensor
    least: float

    @property
    def shape(self) -> tuple[int, int]:
        return self.start.shape[0], self.start.shape[1]

    @abstractmethod
    def loss(self, W: Tensor) -> Tensor:
        """f(W) of each matrix."""

    @abstractmethod
    def gradient(self, W: Tensor) -> Tensor:
        """∇f(W), or a subgradient where there is none."""

    @abstractmethod
    def sample(self, W: Tensor, batch: int, generator: torch.Generator) -> Tensor:
        """The mean of `batch` independent stochastic gradients at each matrix: unbiased."""

    @abstractmethod
    def variance(self, W: Tensor) -> Tensor:
        """E‖G − ∇f(W)‖_F² of one stochastic gradient, exactly."""

    @abstractmethod
    def sigma(self, norm: str, radius: float) -> float:
        """What √variance is at most on the ball."""

    @abstractmethod
    def smoothness(self, norm: str, radius: float) -> float:
        """L_F for "frobenius" and L_S for "spectral", on the ball of that norm: exact or above."""

    def lipschitz(self, radius: float) -> float | None:
        """What √(E‖G‖_F²) is at most on the Frobenius ball, for convex f."""
        return None

    def radius(self, norm: str) -> float:
        """Of the smallest ball with W_0 and W* in it."""
        return max(float(size(W, norm)) for W in (self.start, self.optimum))


def size(W: Tensor, norm: str) -> Tensor:
    """‖W‖ of each matrix in a norm by name."""
    order = {"frobenius": "fro", "spectral": 2}[choice("norm", norm, NORMS)]
    result: Tensor = torch.linalg.matrix_norm(W, order)
    return result


def _draw(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def _drawn(W: Tensor, items: int, batch: int, generator: torch.Generator) -> Tensor:
    """[..., items]: for each matrix of W, the part that each item has in a batch drawn with replacement."""
    drawn = torch.randint(items, (*W.shape[:-2], whole("batch", batch, 1)), generator=generator)
    return torch.nn.functional.one_hot(drawn, items).sum(dim=-2).to(F64) / batch


def _ball(norm: str, radius: float, sides: int) -> tuple[float, float]:
    """(what ‖W‖_op is at most, what ‖W‖_F is at most) on the ball; sides is min(m, n)."""
    choice("norm", norm, NORMS)
    number("radius", radius, "(0, ∞)")
    return radius, radius * (math.sqrt(sides) if norm == "spectral" else 1.0)


@final
class Quadratic(Problem):
    """f(W) = ½‖A W B − C‖_F², A and B square with singular values from 1 down to `least_value`; Gaussian noise of σ.

    L_F = σ₁(A)² σ₁(B)² and L_S = Σ_i σ_i(A)² σ_i(B)² exactly (von Neumann's trace inequality, attained). C = A W* B.
    """

    def __init__(
        self,
        m: int = 6,
        n: int = 4,
        *,
        noise: float = 1.0,
        least_value: float = 0.3,
        distance: float = 1.0,
        seed: int = 0,
    ) -> None:
        whole("m", m, 1)
        whole("n", n, 1)
        self.noise = number("noise", noise, "[0, ∞)")
        number("least_value", least_value, "(0, 1]")
        number("distance", distance, "(0, ∞)")
        self.A, self.B = (self._spread(side, least_value, seed + i) for i, side in enumerate((m, n)))
        self.optimum = distance * _draw((m, n), seed + 2) / math.sqrt(max(m, n))
        self.start = -self.optimum
        self.C = self.A @ self.optimum @ self.B
        self.least = 0.0
        self.values = (torch.linalg.svdvals(self.A).square(), torch.linalg.svdvals(self.B).square())

    @staticmethod
    def _spread(side: int, least: float, seed: int) -> Tensor:
        U, _, Vh = torch.linalg.svd(_draw((side, side), seed))
        values = torch.logspace(0, math.log10(least), side, dtype=F64)
        return torch.matmul(U * values, Vh)

    def loss(self, W: Tensor) -> Tensor:
        return (self.A @ W @ self.B - self.C).square().sum(dim=(-2, -1)) / 2

    def gradient(self, W: Tensor) -> Tensor:
        return self.A.mT @ (self.A @ W @ self.B - self.C) @ self.B.mT

    def sample(self, W: Tensor, batch: int, generator: torch.Generator) -> Tensor:
        scale = self.noise / math.sqrt(W.shape[-2] * W.shape[-1] * whole("batch", batch, 1))
        return self.gradient(W) + scale * torch.randn(W.shape, generator=generator, dtype=F64)

    def variance(self, W: Tensor) -> Tensor:
        return torch.full(W.shape[:-2], self.noise**2, dtype=F64)

    def sigma(self, norm: str, radius: float) -> float:
        _ball(norm, radius, 1)
        return self.noise

    def smoothness(self, norm: str, radius: float) -> float:
        _ball(norm, radius, 1)
        a, b = self.values
        r = min(self.shape)
        return float(a[0] * b[0]) if norm == "frobenius" else float((a[:r] * b[:r]).sum())

    def lipschitz(self, radius: float) -> float | None:
        slope = self.smoothness("frobenius", radius) * (radius + float(size(self.optimum, "frobenius")))
        return math.hypot(slope, self.noise)


@final
class Factorization(Problem):
    """f(W) = ¼‖W Wᵀ − C‖_F² with C = W* W*ᵀ: not convex, f* = 0; a stochastic gradient is of one row of the residual.

    With R = W Wᵀ − C and ‖R‖_op ≤ max(‖W‖²_op, ‖C‖_op), from f″[U] = (U Wᵀ + W Uᵀ) W + R U:
    L_F ≤ 2‖W‖²_op + ‖R‖_op and L_S ≤ 2‖W‖²_F + min(n‖R‖_op, ‖W‖²_F + tr C).
    """

    def __init__(self, m: int = 6, n: int = 3, *, seed: int = 0) -> None:
        whole("m", m, 1)
        whole("n", n, 1)
        self.optimum = _draw((m, n), seed) / math.sqrt(m)
        self.start = 0.5 * _draw((m, n), seed + 1) / math.sqrt(m)
        self.C = self.optimum @ self.optimum.mT
        self.least = 0.0

    def _residual(self, W: Tensor) -> Tensor:
        return W @ W.mT - self.C

    def loss(self, W: Tensor) -> Tensor:
        return self._residual(W).square().sum(dim=(-2, -1)) / 4

    def gradient(self, W: Tensor) -> Tensor:
        return self._residual(W) @ W

    def sample(self, W: Tensor, batch: int, generator: torch.Generator) -> Tensor:
        m = W.shape[-2]
        R = self._residual(W) * (m * _drawn(W, m, batch, generator)).unsqueeze(-1)
        return (R @ W + R.mT @ W) / 2

    def variance(self, W: Tensor) -> Tensor:
        m, R = W.shape[-2], self._residual(W)
        RW = R @ W
        each = RW.square().sum(-1) + R.square().sum(-1) * W.square().sum(-1)
        each = each + 2 * R.diagonal(dim1=-2, dim2=-1) * (RW * W).sum(-1)
        return m / 4 * each.sum(-1) - RW.square().sum(dim=(-2, -1))

    def sigma(self, norm: str, radius: float) -> float:
        op, fro = _ball(norm, radius, min(self.shape))
        return math.sqrt(self.shape[0]) * op * (op * fro + float(size(self.C, "frobenius")))

    def smoothness(self, norm: str, radius: float) -> float:
        op, fro = _ball(norm, radius, min(self.shape))
        residual = max(op**2, float(size(self.C, "spectral")))
        if norm == "frobenius":
            return 2 * op**2 + residual
        return 2 * fro**2 + min(self.shape[1] * residual, fro**2 + float(self.C.trace()))


@final
class Softmax(Problem):
    """f(W) = mean_i [log Σ_k exp(W x_i)_k − (W x_i)_{y_i}] + κ/2 ‖W‖_F², W of `classes` × `features`; convex.

    A stochastic gradient is of one of the `points`, drawn with replacement. The optimum is found by Newton's method, to
    rounding. diag(p) − p pᵀ is at most ½, so L_F ≤ λ₁/2 + κ and L_S ≤ Σ_{i ≤ r} λ_i/2 + κr everywhere, λ of XᵀX/N.
    """

    def __init__(
        self, classes: int = 4, features: int = 5, *, points: int = 40, ridge: float = 0.05, seed: int = 0
    ) -> None:
        m, n = whole("classes", classes, 2), whole("features", features, 1)
        whole("points", points, 1)
        self.ridge = number("ridge", ridge, "(0, ∞)")
        self.X = _draw((points, n), seed)
        logits = self.X @ _draw((n, m), seed + 1) + _draw((points, m), seed + 2)
        self.Y = torch.nn.functional.one_hot(logits.argmax(-1), m).to(F64)
        self.start = _draw((m, n), seed + 3)
        self.values = torch.linalg.eigvalsh(self.X.mT @ self.X / points).flip(0)
        self.optimum = self._newton(torch.zeros_like(self.start))
        self.least = float(self.loss(self.optimum))

    def _newton(self, W: Tensor) -> Tensor:
        m, n = W.shape
        for _ in range(50):
            p = torch.softmax(self.X @ W.mT, dim=-1)
            inner = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
            H = torch.einsum("ikl,ia,ib->kalb", inner, self.X, self.X) / len(self.X)
            H = H.reshape(m * n, m * n) + self.ridge * torch.eye(m * n, dtype=F64)
            step = torch.linalg.solve(H, self.gradient(W).flatten()).reshape(m, n)
            while self.loss(W - step) > self.loss(W) + 1e-14 and float(step.abs().max()) > 1e-14:
                step = step / 2
            W = W - step
        return W

    def _errors(self, W: Tensor) -> Tensor:
        """p − e_y, [..., points, classes]."""
        return torch.softmax(self.X @ W.mT, dim=-1) - self.Y

    def loss(self, W: Tensor) -> Tensor:
        logits = self.X @ W.mT
        data = (torch.logsumexp(logits, dim=-1) - (logits * self.Y).sum(-1)).mean(-1)
        return data + self.ridge / 2 * W.square().sum(dim=(-2, -1))

    def gradient(self, W: Tensor) -> Tensor:
        return self._errors(W).mT @ self.X / len(self.X) + self.ridge * W

    def sample(self, W: Tensor, batch: int, generator: torch.Generator) -> Tensor:
        parts = _drawn(W, len(self.X), batch, generator).unsqueeze(-1)
        return (self._errors(W) * parts).mT @ self.X + self.ridge * W

    def variance(self, W: Tensor) -> Tensor:
        squares = self._errors(W).square().sum(-1) * self.X.square().sum(-1)
        mean = self._errors(W).mT @ self.X / len(self.X)
        return squares.mean(-1) - mean.square().sum(dim=(-2, -1))

    def sigma(self, norm: str, radius: float) -> float:
        _ball(norm, radius, 1)
        return math.sqrt(2 * float(self.X.square().sum(-1).mean()))  # ‖p − e_y‖² ≤ 2

    def smoothness(self, norm: str, radius: float) -> float:
        _ball(norm, radius, 1)
        if norm == "frobenius":
            return float(self.values[0]) / 2 + self.ridge
        r = min(self.shape)
        return float(self.values[:r].sum()) / 2 + self.ridge * r

    def lipschitz(self, radius: float) -> float | None:
        return self.sigma("frobenius", radius) + self.ridge * radius


@final
class AbsoluteError(Problem):
    """f(W) = mean_i |⟨A_i, W⟩ − b_i|, b_i = ⟨A_i, W*⟩: convex, f* = 0, Lipschitz everywhere, nowhere smooth at W*.

    A stochastic gradient is of one of the `points`. For SF-SGD: the spectral theorems need a smooth f.
    """

    def __init__(self, m: int = 4, n: int = 3, *, points: int = 30, seed: int = 0) -> None:
        whole("m", m, 1)
        whole("n", n, 1)
        whole("points", points, 1)
        self.A = _draw((points, m, n), seed)
        self.optimum = _draw((m, n), seed + 1)
        self.start = torch.zeros_like(self.optimum)
        self.least = 0.0

    def _signs(self, W: Tensor) -> Tensor:
        return torch.einsum("imn,...mn->...i", self.A, W - self.optimum).sign()

    def loss(self, W: Tensor) -> Tensor:
        return torch.einsum("imn,...mn->...i", self.A, W - self.optimum).abs().mean(-1)

    def gradient(self, W: Tensor) -> Tensor:
        return torch.einsum("...i,imn->...mn", self._signs(W), self.A) / len(self.A)

    def sample(self, W: Tensor, batch: int, generator: torch.Generator) -> Tensor:
        parts = _drawn(W, len(self.A), batch, generator)
        return torch.einsum("...i,imn->...mn", self._signs(W) * parts, self.A)

    def variance(self, W: Tensor) -> Tensor:
        squares = self._signs(W).abs() * self.A.square().sum(dim=(-2, -1))
        return squares.mean(-1) - self.gradient(W).square().sum(dim=(-2, -1))

    def sigma(self, norm: str, radius: float) -> float:
        _ball(norm, radius, 1)
        return math.sqrt(float(self.A.square().sum(dim=(-2, -1)).mean()))

    def smoothness(self, norm: str, radius: float) -> float:
        raise ValueError("AbsoluteError is not smooth: the stationarity bounds do not speak of it")

    def lipschitz(self, radius: float) -> float | None:
        return self.sigma("frobenius", radius)
