"""Weight decay: how far the iterates go, where the norm of Z settles, and what is only a bound's growth."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import anytime
from anytime import theory

F64 = torch.float64
many = settings(max_examples=40)
some = settings(many, max_examples=15)
cosine = st.floats(-1, 1)
shrink = st.floats(0.01, 0.95)


def directed(shape, start, **options):
    """SFMuon that steps along the gradient itself, 0.2 η √(mn) long, and its parameter."""
    p = torch.nn.Parameter(start.clone())
    optimizer = anytime.SFMuon(
        [("W", p)], momentum=0.0, warmup_steps=0, polar=lambda M: M, rules={"W": "matrix"}, **options
    )
    return p, optimizer


# -------------------------------------------------------------- decay at Z


@given(st.floats(0, 50), st.lists(cosine, min_size=1, max_size=30), st.floats(0.05, 2), shrink, st.floats(0, 1))
@many
def test_nothing_passes_its_bound_with_decay_at_z(first, pushes, eta, e, beta):
    decay = e / eta
    z, mean = first, 0.0
    for t, push in enumerate(pushes):
        z = (1 - e) * z - 0.2 * eta * math.copysign(1, push)
        mean = mean * t / (t + 1) + z / (t + 1)
        at = t + 1, first, eta, decay, 1, 1
        slack = 1 + 1e-9
        assert abs(z) <= theory.z_bound(*at) * slack
        assert abs(mean) <= theory.x_bound(*at) * slack
        assert abs((1 - beta) * z + beta * mean) <= theory.y_bound(*at, beta) * slack
        assert theory.x_bound(*at) == pytest.approx(
            sum(theory.z_bound(s, *at[1:]) for s in range(1, t + 2)) / (t + 1), rel=1e-9
        )


def test_the_bound_of_z_is_not_one_of_x():
    """The lemma's last sentence fails at a finite t: X_3 = 2.63 where the bound of Z_3 is 1.65."""
    p, optimizer = directed((1, 1), torch.full((1, 1), 10.0, dtype=F64), lr=1.0, beta=0.9, weight_decay=0.5)
    for _ in range(3):
        p.grad = torch.ones_like(p)
        optimizer.step()
    x, y, z = (abs(float(w)) for w in optimizer.iterates(p))
    at = 3, 10.0, 1.0, 0.5, 1, 1
    assert (z, x) == (pytest.approx(0.9), pytest.approx((4.8 + 2.2 + 0.9) / 3))
    assert z <= theory.z_bound(*at) == pytest.approx(1.65)
    assert x > theory.z_bound(*at)
    assert y > theory.z_bound(*at)
    assert x <= theory.x_bound(*at)
    assert y <= theory.y_bound(*at, 0.9)
    assert theory.x_bound(10**6, *at[1:]) == pytest.approx(theory.z_limit(0.5, 1, 1), rel=1e-4)


def test_z_reaches_its_limit():
    p, optimizer = directed((3, 2), torch.zeros(3, 2, dtype=F64), lr=0.5, beta=0.9, weight_decay=0.4)
    for _ in range(200):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert float(optimizer.iterates(p).z.norm()) == pytest.approx(theory.z_limit(0.4, 3, 2), rel=1e-12)


# ------------------------------------------------------------ steady state


@given(st.floats(0, 10), cosine, st.floats(1e-3, 2), shrink, st.integers(0, 10**6))
@many
def test_one_step_of_rho(rho, alpha, eta, e, seed):
    generator = torch.Generator().manual_seed(seed)
    Z, N = torch.linalg.qr(torch.randn(12, 2, generator=generator, dtype=F64))[0].T
    P = alpha * Z + math.sqrt(1 - alpha**2) * N
    new = (1 - e) * rho * Z - 0.2 * eta * P  # unit vectors: norms are root mean squares
    printed = (1 - e) ** 2 * rho**2 - 0.4 * eta * (1 - e) * alpha * rho + 0.04 * eta**2
    found = theory.rho_step(rho, alpha, eta, e / eta)
    assert found == pytest.approx(float(new.norm()), rel=1e-7, abs=1e-9)
    assert found**2 == pytest.approx(printed, rel=1e-7, abs=1e-9)


@given(cosine, st.floats(1e-3, 2), shrink, st.floats(0, 20))
@many
def test_rho_converges_to_its_fixed_point(alpha, eta, e, start):
    """By 1 − ηλ a step, from everywhere."""
    decay = e / eta
    fixed = theory.rho_fixed_point(alpha, eta, decay)
    assert theory.rho_step(fixed, alpha, eta, decay) == pytest.approx(fixed, rel=1e-9, abs=1e-12)
    rho = start
    for t in range(1, 200):
        rho = theory.rho_step(rho, alpha, eta, decay)
        assert abs(rho - fixed) <= (1 - e) ** t * abs(start - fixed) + 1e-9
    assert fixed <= theory.z_limit(decay, 1, 1) * (1 + 1e-12)


@given(cosine, st.floats(1e-3, 2), st.floats(1e-6, 0.5))
@many
def test_the_papers_rho_is_right_to_first_order(alpha, eta, e):
    exact, printed = theory.rho_fixed_point(alpha, eta, e / eta), theory.rho_quasi_steady(alpha, eta, e / eta)
    assert printed == pytest.approx(exact, rel=e)
    by_hand = 0.1 * (-alpha + math.sqrt(alpha**2 + 2 * e)) / (e / eta)
    assert printed == pytest.approx(by_hand, rel=1e-6, abs=1e-12 / e)
    other = theory.rho_quasi_steady(alpha, eta, e / eta, update_rms=0.6)
    assert other == pytest.approx(3 * printed, rel=1e-12)


def test_the_papers_rho_passes_the_limit_of_z():
    """α = −1: the limit is 0.2/λ, the exact fixed point too; the paper's is 2% above at ηλ = 0.05."""
    eta, decay = 0.1, 0.5
    limit = theory.z_limit(decay, 1, 1)
    assert theory.rho_fixed_point(-1, eta, decay) == pytest.approx(limit, rel=1e-12)
    assert theory.rho_quasi_steady(-1, eta, decay) > 1.02 * limit


@pytest.mark.parametrize("alpha", [-0.6, -0.05, 0.0, 0.3, 0.9])
def test_a_run_at_a_constant_cosine_settles_there(alpha):
    eta, decay, generator = 0.4, 0.5, torch.Generator().manual_seed(0)
    p, optimizer = directed((4, 3), torch.randn(4, 3, generator=generator, dtype=F64), lr=eta, weight_decay=decay)
    rho = float(p.detach().square().mean().sqrt())
    for _ in range(120):
        Z = optimizer.iterates(p).z
        N = torch.randn(4, 3, generator=generator, dtype=F64)
        N -= (N * Z).sum() / Z.square().sum() * Z
        p.grad = alpha * Z / Z.norm() + math.sqrt(1 - alpha**2) * N / N.norm()
        optimizer.step()
        rho = theory.rho_step(rho, alpha, eta, decay)
        assert float(optimizer.iterates(p).z.square().mean().sqrt()) == pytest.approx(rho, rel=1e-10)
    assert rho == pytest.approx(theory.rho_fixed_point(alpha, eta, decay), rel=1e-8)
    assert theory.rho_quasi_steady(alpha, eta, decay) == pytest.approx(rho, rel=eta * decay)


# -------------------------------------------------------------- decay at Y


@given(st.floats(0, 1), shrink, st.integers(0, 10**6))
@some
def test_the_recursion_with_decay_at_y(beta, e, seed):
    """The signed matrix moves the iterates; the unsigned one, their norms' bound."""
    eta, decay = 0.3, e / 0.3
    generator = torch.Generator().manual_seed(seed)
    Z = torch.randn(5, generator=generator, dtype=F64)
    X, first = Z.clone(), float(Z.norm())
    bound = torch.tensor([first, 0.0], dtype=F64)
    for t in range(15):
        c = 1 / (t + 1)
        U = torch.nn.functional.normalize(torch.randn(5, generator=generator, dtype=F64), dim=0) * 0.2 * eta
        new = theory.y_decay_matrix(eta, decay, beta, c) @ torch.stack([Z, Z - X])
        new -= torch.stack([U, (1 - c) * U])
        Z = Z - e * ((1 - beta) * Z + beta * X) - U
        X = (1 - c) * X + c * Z
        torch.testing.assert_close(new, torch.stack([Z, Z - X]), rtol=1e-11, atol=1e-11)
        push = torch.tensor([0.2 * eta, (1 - c) * 0.2 * eta], dtype=F64)
        bound = theory.y_decay_matrix(eta, decay, beta, c, of="bound") @ bound + push
        at = t + 1, first, eta, decay, 1, 1, beta
        triangle, worst = theory.z_triangle_with_y_decay(*at), theory.z_worst_with_y_decay(*at)
        assert triangle == pytest.approx(float(bound[0]), rel=1e-10)
        assert float(Z.norm()) <= worst * (1 + 1e-9) <= triangle * (1 + 1e-8)


@given(st.floats(0.01, 1), shrink)
@many
def test_both_pairs_of_eigenvalues(beta, e):
    for of in ("bound", "iterates"):
        found = theory.y_decay_eigenvalues(1.0, e, beta, of=of)
        matrix = theory.y_decay_matrix(1.0, e, beta, of=of)
        assert sum(found) == pytest.approx(float(matrix.trace()), rel=1e-12)
        assert math.prod(found) == pytest.approx(float(torch.linalg.det(matrix)), abs=1e-12)
        assert found[0] >= found[1]
    assert theory.y_decay_eigenvalues(1.0, e, beta, of="bound")[0] > 1
    assert theory.y_decay_eigenvalues(1.0, e, beta) == (1.0, 1 - e * (1 - beta))
    along = theory.y_decay_matrix(1.0, e, beta) @ torch.tensor([beta, 1.0], dtype=F64)  # Z = βD, that is Y = 0
    torch.testing.assert_close(along, torch.tensor([beta, 1.0], dtype=F64))


def test_the_triangle_inequality_grows_and_the_iterates_do_not():
    """Its growth a step is the paper's leading eigenvalue; the worst that any directions can do tends to
    (1 + β)/(1 − β) times the limit of decay at Z, from below."""
    eta, decay = 0.1, 0.5
    for beta in (0.3, 0.5, 0.9):
        at = eta, decay, 1, 1, beta
        triangle = [theory.z_triangle_with_y_decay(t, 0.0, *at) for t in (3000, 3001)]
        growth = theory.y_decay_eigenvalues(eta, decay, beta, of="bound")[0]
        assert triangle[1] / triangle[0] == pytest.approx(growth, rel=1e-3)
        limit = (1 + beta) / (1 - beta) * theory.z_limit(decay, 1, 1)
        worst = [theory.z_worst_with_y_decay(t, 0.0, *at) for t in (10, 100, 1000, 10000, 100000)]
        assert worst == sorted(worst)
        assert 0.94 * limit < worst[-1] < limit
        assert triangle[0] > 1e20 * worst[-1]
    assert theory.z_worst_with_y_decay(300, 2.0, eta, decay, 1, 1, 0.0) == pytest.approx(
        theory.z_limit(decay, 1, 1), rel=1e-5
    )  # β = 0 is decay at Z


def test_the_worst_directions_are_reached_by_a_run():
    eta, decay, beta, steps = 0.2, 1.0, 0.8, 60
    at = eta, decay, 1, 1, beta
    # The sign of each step's coefficient, from what one step alone does.
    signs = []
    for s in range(steps):
        pair = torch.tensor([-1.0, -s / (s + 1)], dtype=F64)
        for t in range(s + 1, steps):
            pair = theory.y_decay_matrix(eta, decay, beta, 1 / (t + 1)) @ pair
        signs.append(-math.copysign(1.0, float(pair[0])))
    p, optimizer = directed((1, 1), torch.zeros(1, 1, dtype=F64), lr=eta, beta=beta, weight_decay=decay, decay_at="y")
    for sign in signs:
        p.grad = torch.full_like(p, sign)
        optimizer.step()
    reached = abs(float(optimizer.iterates(p).z))
    assert reached == pytest.approx(theory.z_worst_with_y_decay(steps, 0.0, *at), rel=1e-11)
    assert reached > 1.2 * theory.z_limit(decay, 1, 1)


# ------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.z_limit(0, 1, 1), r"decay is 0; it must be a number in \(0, ∞\)"),
        (lambda: theory.z_limit(1, 0, 1), r"m is 0; it must be a whole number in \[1, ∞\)"),
        (lambda: theory.z_bound(-1, 1, 1, 0.5, 1, 1), r"t is -1; it must be a whole number in \[0, ∞\)"),
        (lambda: theory.z_bound(1, 1, 2, 0.5, 1, 1), r"eta · decay is 1.0; it must be a number in \(0, 1\)"),
        (lambda: theory.x_bound(0, -1, 1, 0.5, 1, 1), r"first is -1; it must be a number in \[0, ∞\)"),
        (lambda: theory.y_bound(1, 1, 1, 0.5, 1, 1, 2), r"beta is 2; it must be a number in \[0, 1\]"),
        (lambda: theory.rho_step(1, 2, 1, 0.5), r"alpha is 2; it must be a number in \[-1, 1\]"),
        (lambda: theory.rho_fixed_point(0, 0, 0.5), r"eta is 0; it must be a number in \(0, ∞\)"),
        (lambda: theory.rho_quasi_steady(-1.5, 1, 0.5), r"alpha is -1.5; it must be a number in \[-1, 1\]"),
        (lambda: theory.y_decay_matrix(1, 0.5, 1, 2), r"c is 2; it must be a number in \[0, 1\]"),
        (lambda: theory.y_decay_eigenvalues(1, 0.5, 1, of="x"), r"of is 'x'; it must be one of 'iterates', 'bound'"),
        (lambda: theory.z_worst_with_y_decay(1, 0, 1, 0.5, 1, 1, -1), r"beta is -1; it must be a number in \[0, 1\]"),
    ],
)
def test_arguments_out_of_range(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_before_the_first_step():
    at = 0, 3.0, 0.5, 0.4, 2, 2
    assert theory.z_bound(*at) == theory.x_bound(*at) == theory.y_bound(*at, 0.5)
