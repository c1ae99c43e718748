"""What the problems say of themselves: gradient, noise, smoothness and optimum, found in another way."""

from __future__ import annotations

import math

import pytest
import torch

from anytime.theory import AbsoluteError, Factorization, Quadratic, Softmax, nuclear
from anytime.theory.problems import size

F64 = torch.float64
SMOOTH = [Quadratic(5, 3, noise=0.7), Quadratic(3, 5), Factorization(5, 3), Softmax(), Softmax(2, 3, ridge=1.0)]
ALL = [*SMOOTH, AbsoluteError()]
NORMS = ("frobenius", "spectral")


def name(problem):
    return f"{type(problem).__name__}{problem.shape}"


def points(problem, norm, radius, count, seed=0):
    """Inside the ball and on its surface, half each."""
    generator = torch.Generator().manual_seed(seed)
    W = torch.randn(count, *problem.shape, generator=generator, dtype=F64)
    W[::3] = W[::3, :, :1] * W[::3, :1, :]  # some of rank one
    scale = torch.rand(count, generator=generator, dtype=F64)
    scale[::2] = 1.0
    return W * (radius * scale / size(W, norm)).reshape(-1, 1, 1)


@pytest.mark.parametrize("problem", ALL, ids=name)
def test_gradient_and_optimum(problem):
    W = points(problem, "frobenius", 2.0, 40).requires_grad_(True)
    loss = problem.loss(W)
    loss.sum().backward()
    torch.testing.assert_close(problem.gradient(W.detach()), W.grad, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(problem.loss(W[3]), loss[3])
    assert float(loss.detach().min()) > problem.least
    assert float(problem.loss(problem.optimum)) == pytest.approx(problem.least, abs=1e-14)
    assert float(nuclear(problem.gradient(problem.optimum))) < 1e-13
    near = problem.optimum + 1e-4 * points(problem, "frobenius", 1.0, 40, seed=1)
    assert float(problem.loss(near).min()) >= problem.least - 1e-15


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("problem", ALL, ids=name)
def test_stochastic_gradients(problem, batch):
    """Unbiased, with the variance that is claimed, over B."""
    W, N = points(problem, "frobenius", 2.0, 1)[0], 20000
    draws = problem.sample(W.expand(N, *problem.shape), batch, torch.Generator().manual_seed(0))
    error = draws - problem.gradient(W)
    expected = float(problem.variance(W)) / batch
    assert float(error.square().sum((1, 2)).mean()) == pytest.approx(expected, rel=0.06)
    assert float(error.mean(0).norm()) < 4 * math.sqrt(expected / N)
    again = problem.sample(W.expand(N, *problem.shape), batch, torch.Generator().manual_seed(0))
    assert torch.equal(draws, again)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("radius", [0.3, 2.0])
@pytest.mark.parametrize("problem", ALL, ids=name)
def test_noise_on_the_ball(problem, radius, norm):
    W = points(problem, norm, radius, 200)
    assert float(problem.variance(W).max()) <= problem.sigma(norm, radius) ** 2 * (1 + 1e-12)
    assert float(problem.variance(W).min()) >= -1e-12


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("radius", [0.3, 2.0])
@pytest.mark.parametrize("problem", SMOOTH, ids=name)
def test_smoothness_on_the_ball(problem, radius, norm):
    U, V = points(problem, norm, radius, 300), points(problem, norm, radius, 300, seed=1)
    V[:100] = U[:100] + 1e-3 * V[:100]
    V = V * (radius / size(V, norm).clamp(min=radius)).reshape(-1, 1, 1)
    change = problem.gradient(U) - problem.gradient(V)
    change = change.norm(dim=(1, 2)) if norm == "frobenius" else nuclear(change)
    ratio = float((change / size(U - V, norm)).max())
    assert ratio <= problem.smoothness(norm, radius) * (1 + 1e-9)
    assert ratio >= 0.1 * problem.smoothness(norm, radius)  # not a bound of another problem


def test_the_quadratics_constants_are_exact():
    for problem in (Quadratic(5, 3), Quadratic(3, 5), Quadratic(4, 4, least_value=1.0)):
        r = min(problem.shape)
        Va, Ub = torch.linalg.svd(problem.A)[2].mT, torch.linalg.svd(problem.B)[0]
        for norm, U in (("frobenius", Va[:, :1] @ Ub[:, :1].mT), ("spectral", Va[:, :r] @ Ub[:, :r].mT)):
            change = problem.gradient(U) - problem.gradient(torch.zeros_like(U))
            change = float(change.norm() if norm == "frobenius" else nuclear(change))
            assert float(size(U, norm)) == pytest.approx(1.0, rel=1e-12)
            assert change == pytest.approx(problem.smoothness(norm, 1.0), rel=1e-12)


def test_the_factorizations_constants_are_reached():
    """Along W itself, at the surface of a large ball and away from C: f″[W] = 3‖W‖² W."""
    problem, radius, step = Factorization(6, 3), 2.0, 1e-6
    Q = torch.linalg.svd(problem.optimum)[0][:, 3:]  # C Q = 0
    for norm, U in (("frobenius", Q[:, :1] @ torch.eye(1, 3, dtype=F64)), ("spectral", Q)):
        change = problem.gradient(radius * U) - problem.gradient((radius - step) * U)
        change = float(change.norm() if norm == "frobenius" else nuclear(change))
        assert change / step == pytest.approx(problem.smoothness(norm, radius), rel=1e-5)


@pytest.mark.parametrize("problem", [p for p in ALL if p.lipschitz(1.0) is not None], ids=name)
def test_second_moment_on_the_ball(problem):
    for radius in (0.3, 2.0):
        W = points(problem, "frobenius", radius, 200)
        moment = problem.gradient(W).square().sum((1, 2)) + problem.variance(W)
        assert float(moment.max()) <= problem.lipschitz(radius) ** 2 * (1 + 1e-12)


@pytest.mark.parametrize("problem", [Quadratic(), Softmax(), AbsoluteError()], ids=name)
def test_convex_where_it_says_so(problem):
    U, V = points(problem, "frobenius", 3.0, 200), points(problem, "frobenius", 3.0, 200, seed=1)
    assert bool((problem.loss((U + V) / 2) <= (problem.loss(U) + problem.loss(V)) / 2 + 1e-12).all())


def test_the_factorization_is_not_convex():
    problem = Factorization()
    assert problem.lipschitz(1.0) is None
    W = problem.optimum
    assert problem.loss(0 * W) > (problem.loss(W) + problem.loss(-W)) / 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Quadratic(0), r"m is 0; it must be a whole number in \[1, ∞\)"),
        (lambda: Quadratic(noise=-1), r"noise is -1; it must be a number in \[0, ∞\)"),
        (lambda: Quadratic(least_value=2), r"least_value is 2; it must be a number in \(0, 1\]"),
        (lambda: Softmax(1), r"classes is 1; it must be a whole number in \[2, ∞\)"),
        (lambda: Softmax(ridge=0), r"ridge is 0; it must be a number in \(0, ∞\)"),
        (lambda: Quadratic().smoothness("nuclear", 1), r"norm is 'nuclear'; it must be one of"),
        (lambda: Factorization().sigma("spectral", 0), r"radius is 0; it must be a number in \(0, ∞\)"),
        (lambda: AbsoluteError().smoothness("spectral", 1), r"AbsoluteError is not smooth"),
    ],
)
def test_arguments_out_of_range(call, message):
    with pytest.raises(ValueError, match=message):
        call()
