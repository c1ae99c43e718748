"""The polar factor against the SVD, and the projections onto balls."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import anytime
from anytime.core.polar import COEFFICIENTS, METHODS, low_rank_polar, polar, project, svd_polar, unit_norm

F64 = torch.float64
#: Where singular values of [1e-3, 1] land, as the table of coefficients says, to its last digit.
INTERVALS = {
    "newton-schulz": (0.465, 1.205),
    "polar-express": (0.845, 1.145),
    "polar-express-4": (0.27, 1.2155),
    "quintic": (0.475 - 1e-3, 1.155),
    "svd": (1 - 1e-9, 1 + 1e-9),
}
#: method -> from where on it is nearer, and how near.
NEARER = {"quintic": (1e-2, 0.9775, 1.0325), "polar-express-4": (3e-3 * 1.04, 0.7845, 1.2155)}
SHAPES = ((1, 1), (1, 6), (6, 1), (5, 5), (9, 4), (4, 9))
quick = settings(max_examples=60)


def randn(*shape, seed=0, dtype=F64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def orthonormal(m, k, seed):
    return torch.linalg.qr(randn(m, k, seed=seed))[0]


@st.composite
def decomposed(draw, smallest=1e-3):
    """(U, σ, V) with ‖σ‖ = 1 and σ ≥ smallest."""
    m, n = draw(st.integers(1, 10)), draw(st.integers(1, 10))
    k = min(m, n)
    low = draw(st.floats(math.log10(smallest * 1.001 * math.sqrt(k)), 0.0))
    exponents = draw(st.lists(st.floats(low, 0.0), min_size=k, max_size=k))
    sigma = 10 ** torch.tensor(exponents, dtype=F64)
    seed = draw(st.integers(0, 2**16))
    return orthonormal(m, k, seed), sigma / sigma.norm(), orthonormal(n, k, seed + 1)


def in_basis(P, U, V):
    """Uᵀ P V: diagonal if P has these singular vectors."""
    return U.T @ P @ V


# -------------------------------------------------------------- named methods


def test_every_method_is_tested():
    """The low-rank factor has no interval: what it leaves out is zero."""
    assert set(METHODS) == {*INTERVALS, "low-rank"} == {*COEFFICIENTS, "svd", "low-rank"}


@pytest.mark.parametrize("method", INTERVALS)
@quick
@given(decomposition=decomposed(), scale=st.floats(-20, 20))
def test_singular_values_land_in_the_interval_and_vectors_stay(method, decomposition, scale):
    U, sigma, V = decomposition
    assert sigma.min() >= 1e-3
    P = polar(10**scale * (U * sigma) @ V.T, method)
    inner = in_basis(P, U, V)
    low, high = INTERVALS[method]
    assert inner.diagonal().min() >= low
    assert inner.diagonal().max() <= high
    assert (inner - torch.diag(inner.diagonal())).abs().max() <= 1e-10
    assert (P - U @ inner @ V.T).abs().max() <= 1e-10


@pytest.mark.parametrize("method", NEARER)
@quick
@given(data=st.data())
def test_larger_singular_values_land_nearer(method, data):
    smallest, low, high = NEARER[method]
    U, sigma, V = data.draw(decomposed(smallest=smallest))
    values = in_basis(polar((U * sigma) @ V.T, method), U, V).diagonal()
    assert values.min() >= low
    assert values.max() <= high


@pytest.mark.parametrize("method", COEFFICIENTS)
def test_the_documented_interval_is_tight(method):
    """Each end is reached within 0.02, by 2 × 2 matrices of singular values over [1e-3, 1]."""
    s = torch.logspace(-3, 0, 2000, dtype=F64).clamp(max=1 - 1e-12)
    M = torch.zeros(2000, 2, 2, dtype=F64)
    M[:, 0, 0], M[:, 1, 1] = s, (1 - s.square()).sqrt()
    values = polar(M, method)[:, 0, 0]
    low, high = INTERVALS[method]
    assert low <= values.min() <= low + 0.02
    assert high - 0.02 <= values.max() <= high


@pytest.mark.parametrize("method", COEFFICIENTS)
def test_singular_values_follow_the_polynomial(method):
    """a σ + b σ³ + c σ⁵, one (a, b, c) a step, on σ divided by the safety factor."""
    sigma = torch.tensor([0.9, 0.4, 0.1, 0.02], dtype=F64)
    sigma = sigma / sigma.norm()
    U, V = orthonormal(7, 4, 1), orthonormal(5, 4, 2)
    values = sigma / COEFFICIENTS[method].safety
    for a, b, c in COEFFICIENTS[method].steps:
        values = a * values + b * values**3 + c * values**5
    inner = in_basis(polar(3.0 * (U * sigma) @ V.T, method), U, V)
    torch.testing.assert_close(inner, torch.diag(values), rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", COEFFICIENTS)
def test_a_largest_singular_value_above_one_does_not_diverge(method):
    """Rounding to bfloat16 moves a norm of 1 by less than 0.03."""
    values = torch.linspace(1.0, 1.03, 1000, dtype=F64) / COEFFICIENTS[method].safety
    for a, b, c in COEFFICIENTS[method].steps:
        values = a * values + b * values**3 + c * values**5
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_newton_schulz_is_the_papers():
    assert COEFFICIENTS["newton-schulz"].steps == ((3.4445, -4.7750, 2.0315),) * 5
    assert COEFFICIENTS["newton-schulz"].safety == 1


# ------------------------------------------------------------------- scale


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-8, 1e8, 1e20, 1e30])
def test_scale_does_not_matter(method, shape, scale):
    M = randn(*shape, dtype=torch.float32)
    P = polar(M * scale, method)
    assert P.dtype == torch.float32
    torch.testing.assert_close(P, polar(M, method), rtol=0, atol=2e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("power", [-90, 90])
def test_a_power_of_two_changes_no_bit(method, power):
    M = randn(5, 7, dtype=torch.float32)
    assert torch.equal(polar(M * 2.0**power, method), polar(M, method))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_zero_matrix_gives_zero(method, dtype):
    M = torch.stack([torch.zeros(4, 6, dtype=dtype), randn(4, 6, dtype=dtype)])
    P = polar(M, method)
    assert torch.equal(P[0], torch.zeros_like(P[0]))
    assert P[1].norm() > 0.9


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 3, 3), (2, 0, 5)])
def test_an_empty_matrix_gives_an_empty_one(method, shape):
    assert polar(torch.zeros(shape), method).shape == shape


@pytest.mark.parametrize("safety", [1.0, 1.5])
@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1.0, 1e38])
@pytest.mark.parametrize("low", [-1.0, 0.0])
@pytest.mark.parametrize("sign", [1, -1])
def test_unit_norm(sign, low, scale, safety):
    """Entries of both signs, or of one."""
    M = sign * randn(3, 4, 5, dtype=torch.float32).clamp(low, 1)
    norms = torch.linalg.matrix_norm(unit_norm(M * scale, safety))
    torch.testing.assert_close(norms, torch.full_like(norms, 1 / safety), rtol=1e-5, atol=0)


# -------------------------------------------------------------- rank and SVD


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize(("m", "n", "rank"), [(6, 4, 2), (4, 6, 1), (5, 5, 4), (8, 3, 3)])
def test_svd_polar_of_deficient_rank(m, n, rank, dtype):
    """U Vᵀ over the support: `rank` singular values of 1, zero on the rest; ⟨M, P⟩ is the nuclear norm."""
    U, V = orthonormal(m, rank, 1), orthonormal(n, rank, 2)
    M = ((U * torch.linspace(1, 5, rank, dtype=F64)) @ V.T).to(dtype)
    P = svd_polar(M)
    tolerance = {torch.float32: 1e-5, F64: 1e-13}[dtype]
    torch.testing.assert_close(P, (U @ V.T).to(dtype), rtol=0, atol=tolerance)
    assert float((M * P).sum()) == pytest.approx(float(torch.linalg.svdvals(M).sum()), rel=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_svd_polar_cuts_below_rounding_alone(dtype):
    """A singular value above max(m, n)·eps·σ₁ counts as 1, one below as 0."""
    eps = torch.finfo(dtype).eps
    for factor, kept in ((20.0, 1.0), (0.05, 0.0)):
        M = torch.diag(torch.tensor([1.0, factor * 8 * eps], dtype=dtype))
        M = torch.nn.functional.pad(M, (0, 6))
        assert float(svd_polar(M)[1, 1]) == pytest.approx(kept, abs=1e-6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("second", [0.0, 1e-20, 1e-12, 1e-6, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_near_rank_one(method, second, dtype):
    """The leading direction comes out near 1; what is nearly nothing does not blow up."""
    U, V = orthonormal(7, 2, 1), orthonormal(5, 2, 2)
    M = ((U * torch.tensor([1.0, second], dtype=F64)) @ V.T).to(dtype)
    P = polar(M, method).double()
    assert torch.isfinite(P).all()
    most = max(1.21, INTERVALS.get(method, (0, 0))[1])
    assert 0.6 <= float(in_basis(P, U, V)[0, 0]) <= most
    assert float(torch.linalg.matrix_norm(P, 2)) <= most


# ----------------------------------------------------------------- low rank


@quick
@given(decomposition=decomposed(smallest=1e-2), more=st.integers(0, 3), data=st.data())
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_low_rank_is_exact_where_it_is_enough(dtype, decomposition, more, data):
    """M of rank k has the polar factor of its support, for every rank from k on: nothing comes of rounding."""
    U, sigma, V = decomposition
    k = data.draw(st.integers(1, len(sigma)))
    U, sigma, V = U[:, :k], sigma[:k], V[:, :k]
    P = low_rank_polar(((U * sigma) @ V.T).to(dtype), k + more)
    torch.testing.assert_close(P.double(), U @ V.T, rtol=0, atol={torch.float32: 1e-4, F64: 1e-12}[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("factor", [20.0, 0.5, 0.0])
def test_low_rank_cuts_where_the_svd_does(factor, dtype):
    M = torch.nn.functional.pad(
        torch.diag(torch.tensor([1.0, factor * 8 * torch.finfo(dtype).eps], dtype=dtype)), (0, 6)
    )
    torch.testing.assert_close(low_rank_polar(M, 2), svd_polar(M), rtol=0, atol=0.2)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (3, 24, 24)])
def test_low_rank_is_an_isometry_of_that_rank_along_the_leading_directions(shape):
    """With gaps of 10 between singular values two power iterations find the leading 5 of 24."""
    count = shape[0] if len(shape) == 3 else 1
    U = torch.stack([orthonormal(shape[-2], 24, 3 * i) for i in range(count)])
    V = torch.stack([orthonormal(shape[-1], 24, 3 * i + 1) for i in range(count)])
    M = ((U * 10.0 ** -torch.arange(24.0, dtype=F64)) @ V.mT).reshape(shape)
    P = low_rank_polar(M, 5)
    torch.testing.assert_close(P.reshape(count, *shape[-2:]), U[..., :5] @ V[..., :5].mT, rtol=0, atol=1e-3)
    values = torch.linalg.svdvals(P)
    expected = torch.cat([torch.ones(5, dtype=F64), torch.zeros(19, dtype=F64)]).expand_as(values)
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("shape", "rank"), [((16, 16), 4), ((9, 40), 2), ((3, 50), 1), ((2, 20, 12), 3)])
def test_low_rank_by_name_is_a_quarter_of_the_smaller_side(shape, rank):
    M = randn(*shape)
    P = polar(M, "low-rank")
    assert torch.equal(P, low_rank_polar(M, rank))
    assert (torch.linalg.matrix_rank(P) == rank).all()


def test_more_iterations_come_nearer_to_the_leading_directions():
    M = randn(96, 64)
    S = torch.linalg.svdvals(M)
    found = [float((low_rank_polar(M, 16, i) * M).sum() / S[:16].sum()) for i in (1, 2, 4, 8)]
    assert found == sorted(found)
    assert found[0] > 0.7
    assert 0.99 < found[3] <= 1 + 1e-12


def test_low_rank_is_the_same_each_time_and_takes_no_random_numbers():
    M = randn(12, 8)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    P = polar(M, "low-rank")
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(polar(M, "low-rank"), P)


@pytest.mark.parametrize("given_as", ["low-rank", lambda M: low_rank_polar(M, 2)], ids=["name", "callable"])
def test_an_optimizer_takes_it(given_as):
    p = torch.nn.Parameter(randn(16, 12).float())
    before = p.detach().clone()
    optimizer = anytime.SFMuon([p], lr=0.1, warmup_steps=0, weight_decay=0.0, polar=given_as)
    p.grad = randn(16, 12, seed=1).float()
    optimizer.step()
    values = torch.linalg.svdvals(p.detach() - before)
    rank = 3 if given_as == "low-rank" else 2
    assert values[rank - 1] > 0.5 * values[0]
    assert values[rank] < 1e-5 * values[0]


# ---------------------------------------------------- batches, sides, dtypes


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(4, 6, 3), (2, 3, 3, 5), (1, 4, 4)])
def test_a_batch_is_its_matrices_one_by_one(method, shape):
    M = randn(*shape)
    P = polar(M, method)
    assert P.shape == M.shape
    for index in torch.cartesian_prod(*(torch.arange(side) for side in shape[:-2])).reshape(-1, len(shape) - 2):
        i = tuple(index.tolist())
        torch.testing.assert_close(P[i], polar(M[i], method), rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(9, 4), (7, 1), (3, 8, 5)])
def test_tall_is_the_transpose_of_wide(method, shape):
    M = randn(*shape)
    torch.testing.assert_close(polar(M, method), polar(M.mT.contiguous(), method).mT, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["random", "rank one", "identity", "zero"])
def test_bfloat16_iteration_is_finite(method, kind):
    """Where rounding puts singular values above 1 too."""
    M = {
        "random": randn(3, 24, 40),
        "rank one": randn(3, 24, 1) @ randn(3, 1, 40, seed=1),
        "identity": torch.eye(24, dtype=F64).expand(3, 24, 24),
        "zero": torch.zeros(3, 24, 40, dtype=F64),
    }[kind].float()
    P = polar(M, method, torch.bfloat16)
    assert P.dtype == torch.float32
    assert torch.isfinite(P).all()
    assert float(torch.linalg.matrix_norm(P, 2).max()) <= 1.3


def test_the_iteration_runs_in_its_dtype():
    M = randn(6, 9, dtype=torch.float32)
    exact = polar(M.double(), "newton-schulz")
    errors = [
        float((polar(M, "newton-schulz", dtype) - exact).abs().max()) for dtype in (torch.bfloat16, torch.float32, F64)
    ]
    assert errors[0] > 1e-3
    assert 1e-8 < errors[1] < 1e-4
    assert errors[2] < 1e-6
    assert torch.equal(polar(M, "newton-schulz"), polar(M, "newton-schulz", torch.float32))


def test_svd_never_runs_narrower_than_float32():
    M = randn(6, 9, dtype=torch.float32)
    assert torch.equal(polar(M, "svd", torch.bfloat16), polar(M, "svd"))


# ----------------------------------------------------------------- callables


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_a_callable_gets_one_matrix_at_a_time(dtype):
    seen = []

    def halve(M):
        seen.append(M)
        return M / 2

    M = randn(2, 3, 4, 5)
    P = polar(M, halve, dtype)
    assert [tuple(m.shape) for m in seen] == [(4, 5)] * 6
    assert {m.dtype for m in seen} == {dtype or F64}
    assert P.dtype == F64
    torch.testing.assert_close(P, (M if dtype is None else M.to(dtype)).to(F64) / 2, rtol=1e-6 if dtype else 0, atol=0)


def test_a_callable_takes_a_single_matrix():
    M = randn(4, 5)
    assert torch.equal(polar(M, lambda A: -A), -M)


# --------------------------------------------------------------- projections

matrices = st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**16), st.floats(-3, 3)).map(
    lambda a: 10 ** a[3] * randn(3, a[0], a[1], seed=a[2])
)


def norm_of(Z, ball):
    return torch.linalg.matrix_norm(Z, "fro" if ball == "frobenius" else 2)


@pytest.mark.parametrize("ball", ["frobenius", "spectral"])
@quick
@given(Z=matrices, radius=st.floats(0.01, 100.0), seed=st.integers(0, 2**16))
def test_projection_is_the_nearest_point_of_the_ball(ball, Z, radius, seed):
    """Inside; again the same; ⟨Z − P, Q − P⟩ ≤ 0 for every Q of the ball, which only the nearest point fulfils."""
    P = project(Z, ball, radius)
    scale = float(Z.abs().max()) + radius
    assert (norm_of(P, ball) <= radius + 1e-13 * scale).all()
    torch.testing.assert_close(project(P, ball, radius), P, rtol=0, atol=1e-13 * scale)
    Q = randn(*Z.shape, seed=seed)
    Q = radius * Q / norm_of(Q, ball)[:, None, None]
    for inside in (Q, 0.3 * Q, torch.zeros_like(Q)):
        assert (((Z - P) * (inside - P)).sum(dim=(-2, -1)) <= 1e-11 * scale**2).all()


@quick
@given(Z=matrices, radius=st.floats(0.01, 100.0))
def test_projections_by_formula(Z, radius):
    for z, f, s in zip(Z, project(Z, "frobenius", radius), project(Z, "spectral", radius), strict=True):
        atol = 1e-12 * (float(z.norm()) + radius)
        torch.testing.assert_close(f, z * min(1.0, radius / float(z.norm())), rtol=0, atol=atol)
        U, S, Vh = torch.linalg.svd(z, full_matrices=False)
        torch.testing.assert_close(s, U @ torch.diag(S.clamp(max=radius)) @ Vh, rtol=0, atol=atol)


@pytest.mark.parametrize("ball", ["frobenius", "spectral"])
def test_what_is_inside_stays(ball):
    Z = torch.stack([torch.zeros(4, 3, dtype=F64), 0.1 * randn(4, 3), 100 * randn(4, 3)])
    P = project(Z, ball, 10.0)
    assert torch.equal(P[:2], Z[:2])
    assert float(norm_of(P[2], ball)) == pytest.approx(10.0)


def test_a_callable_that_changes_the_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="polar made"):
        polar(torch.randn(3, 5), lambda M: M.T)
