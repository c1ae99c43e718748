"""The optimizers on known problems, beside what the paper proves of them."""

from __future__ import annotations

import math
import runpy
from pathlib import Path

import pytest
import torch

from anytime import theory
from anytime.core.polar import svd_polar
from anytime.theory import AbsoluteError, Constants, Factorization, Quadratic, Softmax, measure, measure_sgd, trace

F64 = torch.float64
PROBLEMS = {"quadratic": Quadratic(), "factorization": Factorization(), "softmax": Softmax()}
NORMS = ("frobenius", "spectral")
BETAS = (0.0, 0.5, 0.9)
problems = pytest.mark.parametrize("name", PROBLEMS)
noise = pytest.mark.parametrize("batch", [None, 2], ids=["noiseless", "noisy"])


class Wave(theory.Problem):
    """f(w) = 1 + cos π(w − ½) of a 1 × 1 matrix: its minima are w = −½, which is W*, and 3/2; no noise."""

    def __init__(self):
        self.start, self.optimum = torch.full((1, 1), 0.6, dtype=F64), torch.full((1, 1), -0.5, dtype=F64)
        self.least = 0.0

    def loss(self, W):
        return 1 + torch.cos(math.pi * (W[..., 0, 0] - 0.5))

    def gradient(self, W):
        return -math.pi * torch.sin(math.pi * (W - 0.5))

    def sample(self, W, batch, generator):
        return self.gradient(W)

    def variance(self, W):
        return torch.zeros(W.shape[:-2], dtype=F64)

    def sigma(self, norm, radius):
        return 0.0

    def smoothness(self, norm, radius):
        return math.pi**2


# ------------------------------------------------------- the run is the theory's


@pytest.mark.parametrize("average", ["appendix", "main"])
@pytest.mark.parametrize("beta", BETAS)
def test_the_run_is_the_papers(beta, average):
    """X, Y, Z and M written out, c of the appendix (X_1 = Z_1) or of the main text (c_{t+1} = 1/(t+1) from t = 1)."""
    problem, eta, mu, T = Quadratic(), 0.05, 0.7, 12
    run = trace(problem, T, eta=eta, mu=mu, beta=beta, average=average)
    X = Z = problem.start
    M = None
    for t in range(T):
        Y = beta * X + (1 - beta) * Z
        g = problem.gradient(Y)
        M = g if M is None else mu * M + (1 - mu) * g
        for found, expected in ((run.Y[t], Y), (run.Z[t], Z), (run.M[t], M), (run.g[t], g)):
            torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-12)
        Z = Z - eta * svd_polar(M)
        c = 1 / (t + 1) if average == "appendix" else 1 / (t + 2)
        X = (1 - c) * X + c * Z
    torch.testing.assert_close(run.X[0], X, rtol=0, atol=1e-12)
    torch.testing.assert_close(run.Z[T][0], Z, rtol=0, atol=1e-12)


def test_runs_are_independent_and_repeat():
    problem = Softmax()
    many = trace(problem, 6, eta=0.1, mu=0.5, beta=0.5, batch=1, runs=3, seed=4)
    assert torch.equal(many.Z, trace(problem, 6, eta=0.1, mu=0.5, beta=0.5, batch=1, runs=3, seed=4).Z)
    assert not torch.equal(many.Z, trace(problem, 6, eta=0.1, mu=0.5, beta=0.5, batch=1, runs=3, seed=5).Z)
    assert not torch.allclose(many.Z[-1, 0], many.Z[-1, 1])
    one = trace(problem, 6, eta=0.1, mu=0.5, beta=0.5)
    assert torch.allclose(trace(problem, 6, eta=0.1, mu=0.5, beta=0.5, runs=3).Z[:, 2], one.Z[:, 0], atol=1e-13)


def test_constants_are_of_what_was_visited():
    problem = Factorization()
    run = trace(problem, 20, eta=0.3, mu=0.0, beta=0.5, batch=3, runs=4)
    for norm, order in (("frobenius", "fro"), ("spectral", 2)):
        for T in (1, 20):
            radius = max(
                float(torch.linalg.matrix_norm(run.Z[: T + 1], order).max()),
                float(torch.linalg.matrix_norm(problem.optimum, order)),
            )
            c = run.constants(T, norm)
            assert (c.diameter, c.rank, c.batch) == (2 * radius, 3, 3)
            assert c.smoothness == problem.smoothness(norm, radius)
            assert c.sigma == pytest.approx(math.sqrt(float(problem.variance(run.Y[:T]).max())))
            assert c.sigma <= problem.sigma(norm, radius)
            assert c.delta == float(problem.loss(problem.start))
    assert trace(problem, 1, eta=0.3, mu=0.0, beta=0.5).constants(1, "spectral").sigma == 0


# --------------------------------------------------------- under the bound


def holds(run, T, norm):
    found = run.at(T, norm)
    means = run.gradient[:T].mean(dim=1)
    assert found.average == pytest.approx(float(means.mean()), rel=1e-12)
    assert found.minimum == float(means.min()) <= found.average
    assert found.average <= found.sharper.total <= found.bound.total


@noise
@pytest.mark.parametrize("mu", [0.0, 0.9])
@pytest.mark.parametrize("beta", BETAS)
@problems
def test_untuned_runs_lie_under_the_bound(name, beta, mu, batch):
    """At every horizon of one run, in both norms."""
    run = trace(PROBLEMS[name], 60, eta=0.07, mu=mu, beta=beta, batch=batch, runs=4 if batch else 1)
    for norm in NORMS:
        for T in (1, 2, 3, 5, 10, 20, 40, 60):
            holds(run, T, norm)


@noise
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("beta", BETAS)
@problems
def test_tuned_runs_lie_under_the_bound(name, beta, norm, batch):
    problem = PROBLEMS[name]
    for T in (2, 24, 60):
        found = measure(problem, T, norm=norm, beta=beta, batch=batch, runs=4 if batch else 1)
        at = theory.tuned(theory.prior(problem, norm, batch=batch), T, beta_zero=beta == 0)
        assert (found.mu, found.eta) == (at.mu, at.eta)
        assert (found.mu > 0) <= (batch is not None)
        assert found.average <= found.sharper.total <= found.bound.total


def test_the_main_texts_average_lies_under_the_bound_too():
    for problem in PROBLEMS.values():
        run = trace(problem, 60, eta=0.07, mu=0.5, beta=0.9, average="main")
        for norm in NORMS:
            for T in (1, 5, 60):
                holds(run, T, norm)


@pytest.mark.parametrize("sides", [1, 3])
@pytest.mark.parametrize("norm", NORMS)
def test_the_bound_is_reached(norm, sides):
    """½‖W‖² from W = ηI/2 at β = μ = 0: every step changes the sign, so ‖∇f‖_* stays at rη/2, which is the bound but
    for Δ/(Tη) = rη/(8T)."""
    problem = Quadratic(sides, sides, least_value=1.0)
    problem.A = problem.B = torch.eye(sides, dtype=F64)
    problem.optimum, problem.C = torch.zeros(2, sides, sides, dtype=F64)
    eta = 0.1
    problem.start = eta / 2 * torch.eye(sides, dtype=F64)
    for T in (1, 10, 50):
        found = measure(problem, T, norm=norm, beta=0.0, eta=eta, mu=0.0)
        assert found.average == pytest.approx(sides * eta / 2, rel=1e-9)
        assert found.bound.total == pytest.approx(found.average * (1 + 1 / (4 * T)), rel=1e-9)


@noise
@pytest.mark.parametrize("beta", BETAS)
@problems
def test_each_step_of_the_proof(name, beta, batch):
    """‖S_t‖ ≤ βD, ‖Y_{t+1} − Y_t‖, the descent of f, and the alignment: of every step of every run."""
    run = trace(PROBLEMS[name], 40, eta=0.15, mu=0.8, beta=beta, batch=batch, runs=3 if batch else 1)
    left, right = theory.polar_alignment(run.g, run.M)
    assert bool((left >= right - 1e-10).all())
    for norm, order in (("frobenius", "fro"), ("spectral", 2)):
        c = run.constants(40, norm)
        S = torch.linalg.matrix_norm(run.Z - run.Y, order)
        assert float(S.max()) <= beta * c.diameter + 1e-12
        moved = torch.linalg.matrix_norm(run.Y[1:] - run.Y[:-1], order)
        for t in range(40):
            assert float(moved[t].max()) <= theory.increment_bound(c, t, run.eta)
            for i in range(run.X.shape[0]):
                at = float(run.loss[t, i]), float(run.gradient[t, i]), float(run.tracking[t, i])
                assert float(run.loss[t + 1, i]) <= theory.one_step(c, t, run.eta, beta, *at) + 1e-12
        if batch is None or beta:
            assert float(run.tracking.mean()) <= theory.tracking_error(c, 40, run.eta, run.mu)


# ------------------------------------------------------------------- rates


def slopes(x, y):
    mean = sum(x) / len(x), sum(y) / len(y)
    whole = sum((a - mean[0]) * (b - mean[1]) for a, b in zip(x, y, strict=True)) / sum((a - mean[0]) ** 2 for a in x)
    return whole, [(y[i + 1] - y[i]) / (x[i + 1] - x[i]) for i in range(len(x) - 1)]


def measured_slopes(problem, horizons, norm, beta, **more):
    """Of log(average) against log(T/A_T), A_T with the logarithm; A = Δ at β = 0, where there is none."""
    prior = theory.prior(problem, norm, batch=more.get("batch"))
    x = [math.log(T / (theory.a_of(prior, T) if beta else 1)) for T in horizons]
    return slopes(x, [math.log(measure(problem, T, norm=norm, beta=beta, **more).average) for T in horizons])


@pytest.mark.parametrize("beta", [0.0, 0.5])
@problems
def test_noiseless_tuned_runs_fall_as_their_bound(name, beta):
    whole, _ = measured_slopes(PROBLEMS[name], (40, 120, 360), "frobenius", beta)
    assert whole <= -0.45


@pytest.mark.slow
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("beta", BETAS)
@problems
def test_noiseless_tuned_runs_fall_as_their_bound_for_long(name, beta, norm):
    whole, _ = measured_slopes(PROBLEMS[name], (100, 300, 1000, 3000), norm, beta)
    assert whole <= -0.475


@pytest.mark.slow
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("beta", [0.5, 0.9])
@problems
def test_noisy_tuned_runs_fall_as_their_bound(name, beta, norm):
    whole, _ = measured_slopes(PROBLEMS[name], (100, 300, 1000, 3000), norm, beta, batch=1, runs=4)
    assert whole <= -0.25


@pytest.mark.slow
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("problem", "horizons"),
    [(Quadratic(), (10000, 30000)), (Factorization(), (3000, 10000)), (Softmax(), (3000, 10000))],
    ids=["quadratic", "factorization", "softmax"],
)
def test_noisy_tuned_runs_at_beta_zero_fall_as_their_bound(problem, horizons, norm):
    """(μ_T, η_T) of the constants at the points that a first run visited: on the smallest ball the factorization's σ is
    7 to 12 times as large. The way to the optimum is dist/(η_T T) ~ T^−¼ of the run, so the slope nears −1/4 slowly."""
    averages = []
    for T in horizons:
        setting = {"norm": norm, "beta": 0.0, "batch": 1}
        first = measure(problem, T, **setting)
        found = measure(problem, T, **setting, runs=4, seed=1, constants=first.constants)
        assert found.average <= found.bound.total
        averages.append(math.log(found.average))
    whole, _ = slopes([math.log(T) for T in horizons], averages)
    assert whole <= -0.24


# ------------------------------------------------- what the theorem does not cover


def test_the_projected_variant_is_not_covered():
    """The paper would enforce the diameter by projecting Z on a ball. The run then rests on the ball's surface, where
    the gradient is π, and the bound, which assumes Z_{t+1} = Z_t − ηP_t, falls below."""
    problem, T, radius = Wave(), 400, 1.0
    c = Constants("spectral", float(problem.loss(problem.start)), math.pi**2, 2 * radius, 1)
    at = theory.tuned(c, T, beta_zero=True)
    setting = {"eta": at.eta, "mu": at.mu, "beta": 0.0}
    run = trace(problem, T, **setting, projection="spectral", radius=radius)
    assert float(run.sizes["spectral"].max()) <= radius + 1e-12
    assert float(run.gradient[-1]) == pytest.approx(math.pi)
    assert run.at(T, "spectral").average > 2 > theory.rate_beta_zero(c, T)
    free = trace(problem, T, **setting)
    assert free.at(T, "spectral").average <= free.at(T, "spectral").bound.total


def test_decay_is_not_covered():
    """Decay at Z bounds Z, but then the update is another: Z settles where P = −λZ, not where ∇f = 0."""
    problem, T = Quadratic(1, 1, least_value=1.0), 400
    problem.A = problem.B = torch.ones(1, 1, dtype=F64)
    problem.C = problem.optimum = torch.full((1, 1), 2.0, dtype=F64)
    problem.start = torch.zeros(1, 1, dtype=F64)
    c = theory.prior(problem, "spectral")
    at = theory.tuned(c, T, beta_zero=True)
    setting = {"eta": at.eta, "mu": at.mu, "beta": 0.0}
    decayed = trace(problem, T, **setting, weight_decay=1.0)
    assert float(decayed.sizes["spectral"].max()) <= 1.0  # 1/λ
    assert decayed.at(T, "spectral").average >= 1.0 > theory.rate_beta_zero(c, T)
    plain = trace(problem, T, **setting).at(T, "spectral")
    assert plain.average <= plain.bound.total * (1 + 1e-12)
    assert plain.bound.total == pytest.approx(theory.rate_beta_zero(c, T), rel=1e-12)


# ----------------------------------------------------------------- SF-SGD


@pytest.mark.parametrize("average", ["main", "appendix"])
@pytest.mark.parametrize("beta", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("problem", [AbsoluteError(), Quadratic(), Softmax()], ids=lambda p: type(p).__name__)
def test_sgd_lies_under_its_bound(problem, beta, average):
    for T in (1, 2, 10, 60):
        for batch, runs in ((None, 1), (1, 4)):
            found = measure_sgd(problem, T, beta=beta, batch=batch, runs=runs, average=average)
            assert 0 <= found.gap <= found.bound
            wide = measure_sgd(problem, T, beta=beta, eta=3 * found.eta, batch=batch, runs=runs, average=average)
            assert wide.eta == 3 * found.eta
            assert wide.gap <= wide.bound
    assert found.bound == pytest.approx(theory.sgd_bound(60, found.D, found.G, found.eta, average=average))


def test_the_bound_of_sgd_is_reached():
    """T = 1 of |a w|: x_1 is the start, D G above."""
    found = measure_sgd(AbsoluteError(1, 1, points=1), 1)
    assert found.gap == pytest.approx(found.bound, rel=1e-12)
    assert found.bound == pytest.approx(found.D * found.G, rel=1e-12)


def test_sgds_average_is_the_statements():
    problem, T = AbsoluteError(), 7
    eta = 0.1
    for average, first in (("main", 0), ("appendix", 1)):
        z, x, seen = problem.start, problem.start, []
        for _ in range(T + 1):
            seen.append(z)
            x = torch.stack(seen[first:]).mean(0) if len(seen) > first else z
            z = z - eta * problem.gradient(0.5 * x + 0.5 * z)
        expected = torch.stack(seen[first : first + T]).mean(0)
        found = measure_sgd(problem, T, beta=0.5, eta=eta, average=average)
        assert found.gap == pytest.approx(float(problem.loss(expected)), rel=1e-12)


# --------------------------------------------------------------- example


def test_the_example_prints_its_tables(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["theory.py", "--horizons", "2", "--runs", "1", "--norm", "spectral"])
    runpy.run_path(str(Path(__file__).parents[2] / "examples/theory.py"), run_name="__main__")
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 18 + 2 + 9
    for row in rows:
        if " 2 | " in row:  # T
            *_, measured, bound = row.strip("| ").split(" | ")  # of SF-SpectralSGD, the sharper bound and the bound
            assert float(measured) <= float(bound)


# ------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: measure(Quadratic(), 0), r"T is 0; it must be a whole number in \[1, ∞\)"),
        (lambda: trace(Quadratic(), 1, eta=0, mu=0, beta=0), r"eta is 0; it must be a number in \(0, ∞\)"),
        (lambda: trace(Quadratic(), 1, eta=1, mu=0, beta=1), r"beta is 1; it must be a number in \[0, 1\)"),
        (lambda: trace(Quadratic(), 1, eta=1, mu=1, beta=0), r"momentum is 1; it must be in \[0, 1\)"),
        (lambda: trace(Quadratic(), 1, eta=1, mu=0, beta=0, runs=0), r"runs is 0; it must be a whole number"),
        (lambda: trace(Quadratic(), 1, eta=1, mu=0, beta=0, average="x"), r"average is 'x'; it must be one of"),
        (lambda: trace(Quadratic(), 2, eta=1, mu=0, beta=0).at(3), r"T is 3; it must be in \[1, 2\]"),
        (lambda: measure(Quadratic(), 1, norm="max"), r"norm is 'max'; it must be one of 'frobenius', 'spectral'"),
        (lambda: measure_sgd(Factorization(), 1), r"Factorization is not convex"),
    ],
)
def test_arguments_out_of_range(call, message):
    with pytest.raises(ValueError, match=message):
        call()
