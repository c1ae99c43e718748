"""Runs of SF-SpectralSGD and SF-SGD on known problems, as the theorems assume them, beside the bounds.

The constants of a bound are of the points that the run visited: D is twice the largest of ‖W*‖ and ‖Z_0‖, …, ‖Z_T‖, L
the problem's on that ball, and σ² the largest variance of a stochastic gradient at Y_0, …, Y_{T−1}, where it was asked
for. An expectation is the mean over independent runs, and the constants the largest over them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..optim.base import AnytimeOptimizer
from ..optim.sf_elementwise import SFSGD
from ..optim.sf_spectral import SFSpectralSGD
from . import bounds
from .bounds import Bound, Constants
from .checks import choice, number, whole
from .problems import Problem, size

AVERAGES = ("appendix", "main")


@dataclass(frozen=True)
class Measured:
    """What T steps gave beside the theorem.

    average: (1/T) Σ_{t<T} of the mean ‖∇f(Y_t)‖_* over the runs; minimum: the least of these means. bound: the
    theorem's, at β = 0 that of corollary (iii); sharper: the same proof with ‖S_t‖ ≤ βD.
    """

    T: int
    eta: float
    mu: float
    beta: float
    average: float
    minimum: float
    constants: Constants
    bound: Bound
    sharper: Bound


@dataclass(frozen=True)
class Trace:
    """A stack of S runs of T steps: Y_0, …, Y_T and Z_0, …, Z_T [T + 1, S, m, n], M_0, …, M_{T−1} [T, S, m, n], and
    the average X at the end [S, m, n]. batch None: without noise."""

    problem: Problem
    eta: float
    mu: float
    beta: float
    batch: int | None
    Y: Tensor
    Z: Tensor
    M: Tensor
    X: Tensor

    @cached_property
    def g(self) -> Tensor:
        """[T, S, m, n]: ∇f(Y_t)."""
        return self.problem.gradient(self.Y[:-1])

    @cached_property
    def gradient(self) -> Tensor:
        """[T, S]: ‖∇f(Y_t)‖_*."""
        return bounds.nuclear(self.g)

    @cached_property
    def tracking(self) -> Tensor:
        """[T, S]: ‖∇f(Y_t) − M_t‖_*."""
        return bounds.nuclear(self.g - self.M)

    @cached_property
    def variance(self) -> Tensor:
        """[T, S]: E‖G − ∇f(Y_t)‖_F² of one stochastic gradient."""
        return self.problem.variance(self.Y[:-1])

    @cached_property
    def loss(self) -> Tensor:
        """[T + 1, S]: f(Y_t)."""
        return self.problem.loss(self.Y)

    @cached_property
    def sizes(self) -> dict[str, Tensor]:
        """Norm -> [T + 1, S]: ‖Z_t‖."""
        return {norm: size(self.Z, norm) for norm in bounds.NORMS}

    def constants(self, T: int, norm: str) -> Constants:
        """Of the first T steps."""
        if whole("T", T, 1) > len(self.M):
            raise ValueError(f"T is {T}; it must be in [1, {len(self.M)}], the steps of this run")
        visited = float(self.sizes[choice("norm", norm, bounds.NORMS)][: T + 1].max())
        radius = max(visited, float(size(self.problem.optimum, norm)))
        return Constants(
            norm=norm,
            delta=max(0.0, float(self.loss[0].max()) - self.problem.least),
            smoothness=self.problem.smoothness(norm, radius),
            diameter=2 * radius,
            rank=min(self.problem.shape),
            sigma=float(self.variance[:T].max()) ** 0.5 if self.batch else 0.0,
            batch=self.batch or 1,
        )

    def at(self, T: int, norm: str = "frobenius") -> Measured:
        """The first T steps."""
        constants = self.constants(T, norm)
        means = self.gradient[:T].mean(dim=1)
        setting = constants, T, self.eta, self.mu
        theorem = bounds.stationarity(*setting, self.beta) if self.beta else bounds.stationarity_beta_zero(*setting)
        return Measured(
            T=T,
            eta=self.eta,
            mu=self.mu,
            beta=self.beta,
            average=float(means.mean()),
            minimum=float(means.min()),
            constants=constants,
            bound=theorem,
            sharper=bounds.stationarity_sharper(*setting, self.beta),
        )


@torch.no_grad()
def trace(
    problem: Problem,
    T: int,
    *,
    eta: float,
    mu: float,
    beta: float,
    batch: int | None = None,
    runs: int = 1,
    seed: int = 0,
    average: str = "appendix",
    **options: Any,
) -> Trace:
    """T steps of SFSpectralSGD from the problem's start: exact polar factor, M_0 = G_0, uniform weights, no decay.

    batch: stochastic gradients a step; None takes ∇f itself. runs: how many at once, each with its own noise.
    average: "appendix", X_T is the mean of Z_1, …, Z_T; "main", of Z_0, …, Z_T, the main text's c. The theorem holds of
    both. options: others of the optimizer's, for what the theorem does not speak of (decay, projection).
    """
    whole("T", T, 1)
    whole("runs", runs, 1)
    number("beta", beta, "[0, 1)")
    choice("average", average, AVERAGES)
    p = problem.start.expand(runs, *problem.shape).clone().requires_grad_(True)
    optimizer = SFSpectralSGD(
        [("W", p)], lr=number("eta", eta, "(0, ∞)"), beta=beta, momentum=mu, rules={"W": "matrix"}, **options
    )
    if average == "main":
        _start_in_the_average(optimizer, p)
    generator = torch.Generator().manual_seed(seed)
    Y, Z, M = [p.detach().clone()], [p.detach().clone()], []
    for _ in range(T):
        p.grad = problem.gradient(p) if batch is None else problem.sample(p, batch, generator)
        optimizer.step()
        optimizer.param_groups[0]["momentum"] = mu
        M.append(optimizer.state[p]["momentum"].clone())
        X, y, z = optimizer.iterates(p)
        Y.append(y)
        Z.append(z)
    return Trace(problem, eta, mu, beta, batch, torch.stack(Y), torch.stack(Z), torch.stack(M), X)


def _start_in_the_average(optimizer: AnytimeOptimizer, p: Tensor) -> None:
    """One step that goes nowhere: its weight is the start's, and the momentum after it is the next gradient."""
    p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0.0


def prior(problem: Problem, norm: str, *, batch: int | None = None) -> Constants:
    """What can be said before a run: of the smallest ball with the start and the optimum in it."""
    radius = problem.radius(norm)
    return Constants(
        norm=norm,
        delta=max(0.0, float(problem.loss(problem.start)) - problem.least),
        smoothness=problem.smoothness(norm, radius),
        diameter=2 * radius,
        rank=min(problem.shape),
        sigma=problem.sigma(norm, radius) if batch else 0.0,
        batch=batch or 1,
    )


def measure(
    problem: Problem,
    T: int,
    *,
    norm: str = "frobenius",
    beta: float = 0.9,
    eta: float | None = None,
    mu: float | None = None,
    batch: int | None = None,
    runs: int = 1,
    seed: int = 0,
    average: str = "appendix",
    constants: Constants | None = None,
) -> Measured:
    """T steps of SFSpectralSGD and the bound in that norm. mu and eta None are the corollaries' μ_T and η_T, part
    (iii)'s at β = 0, of `constants`; None takes `prior`. Those of an earlier run, `Measured.constants`, are of the
    points that it visited, where the noise may be far below what it can be on a ball."""
    constants = constants or prior(problem, norm, batch=batch)
    if mu is None:
        mu = bounds.tuned(constants, T, beta_zero=beta == 0).mu
    if eta is None:
        eta = bounds.best_eta(constants, T, mu, beta_zero=beta == 0)
    run = trace(problem, T, eta=eta, mu=mu, beta=beta, batch=batch, runs=runs, seed=seed, average=average)
    return run.at(T, norm)


@dataclass(frozen=True)
class MeasuredSGD:
    """F(x_T) − F(x*), the mean over the runs, beside its bound; D = ‖x_1 − x*‖, G of the ball visited."""

    T: int
    eta: float
    beta: float
    gap: float
    D: float
    G: float
    bound: float


@torch.no_grad()
def measure_sgd(
    problem: Problem,
    T: int,
    *,
    beta: float = 0.9,
    eta: float | None = None,
    batch: int | None = None,
    runs: int = 1,
    seed: int = 0,
    average: str = "main",
) -> MeasuredSGD:
    """SFSGD on a convex problem up to x_T; eta None is D/(G √T) with G of the smallest ball with x_1 and x* in it.

    average: "main", x_T is the mean of z_1, …, z_T, the start first: T − 1 gradients; "appendix", the package's own X
    after T gradients. See sgd_bound.
    """
    choice("average", average, AVERAGES)
    D = float(size(problem.start - problem.optimum, "frobenius"))
    if eta is None:
        eta = bounds.sgd_eta(T, D, _lipschitz(problem, problem.radius("frobenius")))
    p = problem.start.expand(whole("runs", runs, 1), *problem.shape).clone().requires_grad_(True)
    optimizer = SFSGD([p], lr=eta, beta=beta)
    if average == "main":
        _start_in_the_average(optimizer, p)
    generator = torch.Generator().manual_seed(seed)
    visited = problem.radius("frobenius")
    for _ in range(whole("T", T, 1) - (average == "main")):
        p.grad = problem.gradient(p) if batch is None else problem.sample(p, batch, generator)
        visited = max(visited, float(size(p, "frobenius").max()))
        optimizer.step()
    x = optimizer.iterates(p).x
    G = _lipschitz(problem, max(visited, float(size(p, "frobenius").max())))
    gap = float(problem.loss(x).mean()) - problem.least
    return MeasuredSGD(T, eta, beta, gap, D, G, bounds.sgd_bound(T, D, G, eta, average=average))


def _lipschitz(problem: Problem, radius: float) -> float:
    G = problem.lipschitz(radius)
    if G is None:
        raise ValueError(f"{type(problem).__name__} is not convex; the bound of SF-SGD is of convex functions")
    return G
