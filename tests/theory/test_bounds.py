"""The formulas against the paper's, written out a second time, and against what they say of each other."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anytime import theory
from anytime.theory import Constants
from anytime.theory.bounds import log_e

F64 = torch.float64
many = settings(max_examples=60)
some = settings(many, max_examples=15)
unit = st.floats(0.0, 0.99)
size = st.floats(1e-2, 1e2)
norms = st.sampled_from(["frobenius", "spectral"])


@st.composite
def constants(draw, noisy=None):
    sigma = draw(st.sampled_from([0.0, 0.3, 7.0])) if noisy is None else 0.5 if noisy else 0.0
    numbers = {name: draw(size) for name in ("delta", "smoothness", "diameter")}
    return Constants(draw(norms), rank=draw(st.integers(1, 9)), sigma=sigma, batch=draw(st.integers(1, 8)), **numbers)


def randn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def parts(c):
    """Δ, L, D, r, √r σ/√B, and r or 1 by the norm, as the theorems differ."""
    return c.delta, c.smoothness, c.diameter, c.rank, math.sqrt(c.rank) * c.sigma / math.sqrt(c.batch)


# ------------------------------------------------------------ the theorems


@given(constants(), st.integers(1, 10**6), size, unit, unit)
@many
def test_the_theorems_as_printed(c, T, eta, mu, beta):
    delta, L, D, r, s = parts(c)
    ell = math.log(math.e * T)
    A = delta + 2 * L * D**2 * (ell + math.pi**2 / 6)
    noise = 2 * s / (1 - beta) * math.sqrt((1 - mu) / (1 + mu)) + 2 * s / ((1 - beta) * (1 - mu) * T)
    if c.norm == "frobenius":
        rest = L * r * eta / (2 * (1 - beta)) + 2 * mu * L * r * eta / ((1 - beta) * (1 - mu))
        rest += 2 * math.sqrt(r) * L * D * ell / ((1 - beta) * T) * (1 + 2 * mu / (1 - mu))
    else:
        rest = L * eta / (2 * (1 - beta)) + 2 * mu * L * eta / ((1 - beta) * (1 - mu))
        rest += 2 * L * D * ell / ((1 - beta) * T) * (1 + 2 * mu / (1 - mu))
    bound = theory.stationarity(c, T, eta, mu, beta)
    assert bound.total == pytest.approx(A / ((1 - beta) * T * eta) + rest + noise, rel=1e-12)
    assert theory.a_of(c, T) == pytest.approx(A, rel=1e-12)


@given(constants(), st.integers(1, 10**6), size, unit, unit)
@many
def test_the_main_texts_theorem_is_the_weaker(c, T, eta, mu, beta):
    if c.norm == "spectral":
        with pytest.raises(ValueError, match="norm is 'spectral'"):
            theory.main_text(c, T, eta, mu, beta)
        return
    delta, L, D, r, s = parts(c)
    ell = math.log(math.e * T)
    printed = (delta + 2 * L * D**2 * (ell + math.pi**2 / 6)) / ((1 - beta) * T * eta)
    printed += 2 * s / (1 - beta) * (math.sqrt((1 - mu) / (1 + mu)) + 1 / ((1 - mu) * T))
    printed += 2 * math.sqrt(r) * L * D * ell / ((1 - beta) * T) * (1 + mu) / (1 - mu)
    printed += L * r * eta / (1 - beta) * (1 + 3 * mu) / (1 - mu)
    assert theory.main_text(c, T, eta, mu, beta) == pytest.approx(printed, rel=1e-12)
    assert theory.stationarity(c, T, eta, mu, beta).total < printed


@given(constants(), st.integers(1, 10**6), size, unit, unit)
@many
def test_beta_zero_and_the_sharper_form(c, T, eta, mu, beta):
    delta, L, _, r, s = parts(c)
    k = r if c.norm == "frobenius" else 1
    printed = delta / (T * eta) + L * k * eta / 2 + 2 * mu * L * k * eta / (1 - mu)
    printed += 2 * s * math.sqrt((1 - mu) / (1 + mu)) + 2 * s / ((1 - mu) * T)
    zero = theory.stationarity_beta_zero(c, T, eta, mu)
    assert zero.total == pytest.approx(printed, rel=1e-12)
    assert theory.stationarity_sharper(c, T, eta, mu, 0.0) == zero
    assert theory.stationarity_sharper(c, T, eta, mu, beta).total <= theory.stationarity(c, T, eta, mu, beta).total
    far = Constants(**{**vars(c), "diameter": 1e9})
    assert theory.stationarity_beta_zero(far, T, eta, mu) == zero


@given(constants(), st.integers(0, 10**4), size, unit, size, size, size)
@many
def test_one_step_as_printed(c, t, eta, beta, f, gradient, tracking):
    root = math.sqrt(c.rank) if c.norm == "frobenius" else 1
    printed = f - eta * (1 - beta) * gradient + 2 * eta * tracking + 2 * c.smoothness * c.diameter**2 / (t + 1)
    printed += c.smoothness / 2 * (2 * c.diameter / (t + 1) + eta * root) ** 2
    assert theory.one_step(c, t, eta, beta, f, gradient, tracking) == pytest.approx(printed, rel=1e-9, abs=1e-9)


@given(st.integers(1, 400))
@many
def test_harmonic_sums(T):
    assert sum(1 / t for t in range(1, T + 1)) <= log_e(T)
    assert sum(1 / (t + 1) for t in range(1, T + 1)) <= log_e(T)  # the main text's, from t = 1


# ---------------------------------------------------------- tuned constants


@given(constants(), st.integers(1, 10**9), unit)
@many
def test_eta_of_the_corollary_makes_the_bound_least(c, T, mu):
    alpha, L = 1 - mu, c.smoothness
    k = c.rank if c.norm == "frobenius" else 1
    for beta_zero in (False, True):
        A = c.delta if beta_zero else theory.a_of(c, T)
        eta = theory.best_eta(c, T, mu, beta_zero=beta_zero)
        assert eta == pytest.approx(math.sqrt(2 * A * alpha / (L * k * T * (4 - 3 * alpha))), rel=1e-12)

        def total(eta, beta_zero=beta_zero):
            of = theory.stationarity_beta_zero if beta_zero else theory.stationarity
            return of(c, T, eta, mu, *([] if beta_zero else [0.5])).total

        assert total(eta) <= min(total(eta * 1.01), total(eta / 1.01)) * (1 + 1e-12)
        bound = (theory.stationarity_beta_zero if beta_zero else theory.stationarity)(
            c, T, eta, mu, *([] if beta_zero else [0.5])
        )
        over = 1 if beta_zero else 2
        plugged = over * math.sqrt(2 * A * L * k / T * (4 - 3 * alpha) / alpha)
        assert bound.descent + bound.step + bound.tracking == pytest.approx(plugged, rel=1e-9)


@given(constants(), st.integers(1, 10**12))
@many
def test_mu_of_the_corollary(c, T):
    for beta_zero in (False, True):
        A = c.delta if beta_zero else theory.a_of(c, T)
        at = theory.tuned(c, T, beta_zero=beta_zero)
        alpha = 1.0
        if c.sigma:
            r = 1 if c.norm == "frobenius" else c.rank
            alpha = min(1, 2 * math.sqrt(A * c.smoothness * c.batch / (r * c.sigma**2 * T)))
        assert at.alpha == pytest.approx(alpha, rel=1e-6, abs=1e-12)
        assert at.eta == theory.best_eta(c, T, at.mu, beta_zero=beta_zero)
        assert 0 <= at.mu < 1


def slope(x, y):
    mean = [sum(v) / len(v) for v in (x, y)]
    pairs = list(zip(x, y, strict=True))
    return sum((a - mean[0]) * (b - mean[1]) for a, b in pairs) / sum((a - mean[0]) ** 2 for a in x)


@given(constants(noisy=True), constants(noisy=False), unit)
@some
def test_the_tuned_bound_has_its_slope(noisy, noiseless, beta):
    """−1/4 and −1/2 in log(T/A_T), which is log T without the logarithm's part; in log T itself at β = 0."""
    far = [10**k for k in range(20, 27)]
    for c, expected in ((noisy, -0.25), (noiseless, -0.5)):
        x = [math.log(T / theory.a_of(c, T)) for T in far]
        assert slope(x, [math.log(theory.rate(c, T, beta)) for T in far]) == pytest.approx(expected, abs=2e-3)
        assert theory.rate(c, far[-1], beta) == pytest.approx(theory.leading_rate(c, far[-1], beta), rel=1e-2)
        x = [math.log(T) for T in far]
        assert slope(x, [math.log(theory.rate_beta_zero(c, T)) for T in far]) == pytest.approx(expected, abs=2e-3)
        leading = theory.leading_rate(c, far[-1], 0.0, beta_zero=True)
        assert theory.rate_beta_zero(c, far[-1]) == pytest.approx(leading, rel=1e-2)
    k = noiseless.rank if noiseless.norm == "frobenius" else 1
    exact = math.sqrt(2 * noiseless.smoothness * k * noiseless.delta / 7)
    assert theory.rate_beta_zero(noiseless, 7) == pytest.approx(exact, rel=1e-12)


def test_the_tuned_step_asks_for_a_horizon():
    """Below 24 steps the noiseless η_T of β > 0 leaves the ball that the theorem assumes, in one step."""
    assert theory.shortest_horizon() == 24
    for norm in ("frobenius", "spectral"):
        c = Constants(norm, delta=0.0, smoothness=3.0, diameter=2.0, rank=5)
        length = [theory.tuned(c, T).eta * c.root for T in (23, 24)]
        assert length[0] > c.diameter > length[1]


# ----------------------------------------------------------------- lemmas


@given(unit, size, st.integers(0, 10**6))
@some
def test_iterate_identities(beta, eta, seed):
    """X, Y and Z as the appendix writes them, with any directions; X_T by the shares of each step too."""
    X = Z = start = randn(3, 2, seed=seed)
    steps = 12
    P = [torch.linalg.qr(randn(3, 2, seed=seed + t + 1))[0] for t in range(steps)]
    for t in range(steps):
        Y = beta * X + (1 - beta) * Z
        Z_next = Z - eta * P[t]
        X_next = t / (t + 1) * X + Z_next / (t + 1)
        Y_next = beta * X_next + (1 - beta) * Z_next
        close = {"rtol": 1e-11, "atol": 1e-11 * (1 + eta)}
        S = theory.next_s(Z - Y, P[t], t, eta, beta)
        torch.testing.assert_close(S, Z_next - Y_next, **close)
        torch.testing.assert_close(theory.y_increment(Z - Y, P[t], t, eta, beta), Y_next - Y, **close)
        torch.testing.assert_close(theory.averaged_step(X, Z, P[t], eta, 1 / (t + 1)), X_next, **close)
        X, Z = X_next, Z_next
    through = start - eta * torch.tensordot(theory.shares(steps), torch.stack(P), dims=1)
    torch.testing.assert_close(X, through, rtol=1e-11, atol=1e-10 * (1 + eta))


def test_the_main_texts_averaged_step_counts_the_gradient_twice():
    """x = z = 0, c = 1/2, η = g = 1: z' = −1 and x' = −1/2, where the main text's equation gives −1."""
    x = z = torch.zeros(1, 1, dtype=F64)
    g, c, eta = torch.ones(1, 1, dtype=F64), 0.5, 1.0
    z_next = z - eta * g
    assert (1 - c) * x + c * z_next == theory.averaged_step(x, z, g, eta, c) == -0.5
    assert x - eta * c * g + c * (z_next - x) == -1.0


@given(st.integers(1, 5), st.integers(1, 5), st.floats(0, 3), st.integers(0, 10**6))
@many
def test_polar_alignment(m, n, distance, seed):
    g = randn(m, n, seed=seed)
    left, right = theory.polar_alignment(g, g + distance * randn(m, n, seed=seed + 1))
    assert left >= right - 1e-12
    left, right = theory.polar_alignment(g, g)
    assert float(left) == pytest.approx(float(right), rel=1e-12)


def test_polar_alignment_cannot_be_better():
    left, right = theory.polar_alignment(torch.ones(1, 1, dtype=F64), -1e-9 * torch.ones(1, 1, dtype=F64))
    assert float(left) == pytest.approx(float(right), rel=1e-8)


@given(constants(noisy=True), unit, st.integers(1, 60))
@many
def test_noise_in_the_momentum(c, mu, T):
    one = c.sigma**2 / c.batch
    variance, roots = one, []
    for t in range(T):
        variance = variance if t == 0 else mu**2 * variance + (1 - mu) ** 2 * one
        assert theory.ema_error_at(c, t, mu) ** 2 == pytest.approx(variance, rel=1e-9)
        roots.append(math.sqrt(c.rank * variance))
    bound = theory.ema_error(c, T, mu)
    printed = 1 / ((1 - mu) * T) + math.sqrt((1 - mu) / (1 + mu))
    assert bound == pytest.approx(math.sqrt(c.rank * one) * printed, rel=1e-12)
    assert sum(roots) / T <= bound * (1 + 1e-12)


def test_noise_in_the_momentum_of_many_draws():
    """Where noise is the same everywhere, the second moment is not only bounded."""
    mu, T, N = 0.8, 6, 20000
    c = Constants("frobenius", delta=1, smoothness=1, diameter=1, rank=2, sigma=1.5, batch=4)
    draws = c.sigma / math.sqrt(6 * c.batch) * randn(T, N, 3, 2, seed=0)
    E = draws[0]
    for t in range(T):
        E = E if t == 0 else mu * E + (1 - mu) * draws[t]
        assert float(E.square().sum((1, 2)).mean().sqrt()) == pytest.approx(theory.ema_error_at(c, t, mu), rel=0.02)


@given(constants(), st.integers(1, 10**6), size, unit)
@many
def test_tracking_as_printed(c, T, eta, mu):
    _, L, D, r, s = parts(c)
    ell = math.log(math.e * T)
    noise = s * (1 / ((1 - mu) * T) + math.sqrt((1 - mu) / (1 + mu)))
    if c.norm == "frobenius":
        printed = mu * r * L * eta / (1 - mu) + 2 * mu * math.sqrt(r) * L * D * ell / ((1 - mu) * T) + noise
    else:
        printed = mu * L * eta / (1 - mu) + 2 * mu * L * D * ell / ((1 - mu) * T) + noise
    assert theory.tracking_error(c, T, eta, mu) == pytest.approx(printed, rel=1e-12)
    root = math.sqrt(r) if c.norm == "frobenius" else 1
    assert theory.increment_bound(c, 3, eta) == pytest.approx(2 * D / 4 + eta * root, rel=1e-12)


# ----------------------------------------------------------------- SF-SGD


@given(st.integers(1, 10**6), size, size)
@many
def test_sgd(T, D, G):
    eta = theory.sgd_eta(T, D, G)
    bound = theory.sgd_bound(T, D, G)
    assert bound == pytest.approx(D * G / math.sqrt(T), rel=1e-12)
    assert bound <= min(theory.sgd_bound(T, D, G, eta * f) for f in (0.9, 1.1))
    after = theory.sgd_bound(T, D, G, average="appendix")
    assert after == pytest.approx(bound * (1 + 1 / (2 * T)), rel=1e-12)


# ------------------------------------------------------------- arguments


C = Constants("frobenius", delta=1, smoothness=1, diameter=1, rank=2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Constants("nuclear", 1, 1, 1, 1), r"norm is 'nuclear'; it must be one of 'frobenius', 'spectral'"),
        (lambda: Constants("spectral", -1, 1, 1, 1), r"delta is -1; it must be a number in \[0, ∞\)"),
        (lambda: Constants("spectral", 1, 0, 1, 1), r"smoothness is 0; it must be a number in \(0, ∞\)"),
        (lambda: Constants("spectral", 1, 1, math.inf, 1), r"diameter is inf; it must be a number in \(0, ∞\)"),
        (lambda: Constants("spectral", 1, 1, 1, 0), r"rank is 0; it must be a whole number in \[1, ∞\)"),
        (lambda: Constants("spectral", 1, 1, 1, 1, math.nan), r"sigma is nan; it must be a number in \[0, ∞\)"),
        (lambda: Constants("spectral", 1, 1, 1, 1, 1, 1.5), r"batch is 1.5; it must be a whole number in \[1, ∞\)"),
        (lambda: theory.stationarity(C, 0, 1, 0, 0), r"T is 0; it must be a whole number in \[1, ∞\)"),
        (lambda: theory.stationarity(C, 1, 0, 0, 0), r"eta is 0; it must be a number in \(0, ∞\)"),
        (lambda: theory.stationarity(C, 1, 1, 1, 0), r"mu is 1; it must be a number in \[0, 1\)"),
        (lambda: theory.stationarity(C, 1, 1, 0, 1), r"beta is 1; it must be a number in \[0, 1\)"),
        (lambda: theory.stationarity_beta_zero(C, 1, 1, -0.1), r"mu is -0.1; it must be a number in \[0, 1\)"),
        (lambda: theory.one_step(C, -1, 1, 0, 1, 1, 1), r"t is -1; it must be a whole number in \[0, ∞\)"),
        (lambda: theory.best_eta(C, 1, True), r"mu is True; it must be a number in \[0, 1\)"),
        (lambda: theory.rate(C, 1, 1.0), r"beta is 1.0; it must be a number in \[0, 1\)"),
        (
            lambda: theory.rate_beta_zero(Constants("spectral", 0, 1, 1, 1), 1),
            r"delta is 0; it must be a number in \(0, ∞\)",
        ),
        (lambda: theory.ema_error(C, 1, 1), r"mu is 1; it must be a number in \[0, 1\)"),
        (lambda: theory.tracking_error(C, 1, -1, 0), r"eta is -1; it must be a number in \(0, ∞\)"),
        (lambda: theory.shares(0), r"T is 0; it must be a whole number in \[1, ∞\)"),
        (lambda: theory.sgd_bound(1, 0, 1), r"D is 0; it must be a number in \(0, ∞\)"),
        (lambda: theory.sgd_bound(1, 1, 1, 0), r"eta is 0; it must be a number in \(0, ∞\)"),
        (lambda: theory.sgd_bound(1, 1, 1, average="x"), r"average is 'x'; it must be one of 'main', 'appendix'"),
        (
            lambda: theory.averaged_step(torch.ones(1), torch.ones(1), torch.ones(1), 1, 1.5),
            r"c is 1.5; it must be a number in \[0, 1\]",
        ),
    ],
)
def test_arguments_out_of_range(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("name", theory.__all__)
def test_public_names_are_documented(name):
    assert (getattr(theory, name).__doc__ or "").strip()
