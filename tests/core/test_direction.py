"""What each direction makes of a gradient, what it keeps, and what a skipped step leaves alone."""

from __future__ import annotations

import math

import pytest
import torch

import anytime
from anytime.core.direction import Adam, Batch, Direction, Gradient, Shampoo, Spectral, Steepest, duality_map
from anytime.core.layout import Layout
from anytime.core.polar import svd_polar

F64 = torch.float64
SPECTRAL = {
    "momentum": 0.8,
    "nesterov": False,
    "polar": "newton-schulz",
    "polar_dtype": None,
    "momentum_dtype": None,
    "row_norm": False,
    "scaling": "rms",
    "update_rms": 0.2,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
}
ADAM = {"betas": (0.9, 0.95), "eps": 1e-8, "momentum_dtype": None}
CASES: dict[str, tuple[Direction, dict]] = {
    "gradient": (Gradient(), {}),
    **{f"sf-adam {c}": (Adam(), {**ADAM, "bias_correction": c}) for c in ("rate", "moment", None)},
    **{f"adam {c}": (Adam(first_moment=True), {**ADAM, "bias_correction": c}) for c in ("moment", None)},
    "muon": (Spectral(), SPECTRAL),
    "muon nesterov": (Spectral(), {**SPECTRAL, "nesterov": True}),
    "normuon": (Spectral(), {**SPECTRAL, "row_norm": True}),
    "normuon bfloat16": (Spectral(), {**SPECTRAL, "row_norm": True, "momentum_dtype": torch.bfloat16}),
    "spectral-sgd": (Spectral(first_gradient=True), {**SPECTRAL, "scaling": None, "polar": "svd"}),
    "sign": (Steepest("max"), {"momentum": 0.0, "momentum_dtype": None}),
    "sign with momentum": (Steepest("max"), {"momentum": 0.9, "momentum_dtype": None}),
    "lion": (Steepest("max"), {"betas": (0.9, 0.99), "momentum_dtype": None}),
    "spectral descent": (Steepest("spectral"), {"momentum": 0.9, "momentum_dtype": None}),
    "frobenius descent": (Steepest("frobenius"), {"betas": (0.5, 0.9), "momentum_dtype": None}),
    "shampoo": (Shampoo(), {"betas": (0.9, 0.99), "momentum_dtype": None}),
}
#: Two of one shape, so that they are stacked, and others.
PLACES = [((6, 4), Layout()), ((6, 4), Layout()), ((4, 6), Layout()), ((3, 4, 5), Layout()), ((4, 3, 2), Layout(True))]
SPLIT = [*PLACES, ((6, 4), Layout(False, 0, (2, 4))), ((4, 6), Layout(False, 1, (3, 3)))]


def randn(seed, *shape, dtype=F64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def new_states(direction, options, places, dtype):
    return [
        {
            name: torch.zeros(size, dtype=own or dtype)
            for name, (size, own) in direction.buffers(shape, layout, options).items()
        }
        for shape, layout in places
    ]


def call(direction, options, grads, states, places, t, ok=1.0):
    count = torch.full((len(grads),), float(t), dtype=F64)
    layouts = [layout for _, layout in places]
    return direction(Batch(grads, states, layouts, options, count, torch.tensor(ok, dtype=F64)))


def run(direction, options, places, dtype, steps, seed=0):
    """States and directions after `steps` counted steps on random gradients."""
    states, U = new_states(direction, options, places, dtype), []
    for t in range(1, steps + 1):
        grads = [randn(seed + 100 * t + i, *shape, dtype=dtype) for i, (shape, _) in enumerate(places)]
        U = call(direction, options, grads, states, places, t)
    return states, U


def places_of(name):
    return PLACES if name == "shampoo" else SPLIT


# ------------------------------------------------------------- every direction


@pytest.mark.parametrize(("dtype", "huge"), [(torch.float32, 1e18), (F64, 1e150)])
@pytest.mark.parametrize("scale", [0.0, 1.0, "tiny", "huge"])
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("name", CASES)
def test_a_step_that_does_not_count_leaves_the_buffers(name, steps, scale, dtype, huge):
    """Bit for bit, from the start or later, whatever the gradients, so long as their squares are finite."""
    scale = {"tiny": 1 / huge, "huge": huge}.get(scale, scale)
    direction, options = CASES[name]
    places = places_of(name)
    states, _ = run(direction, options, places, dtype, steps)
    before = [{key: value.clone() for key, value in state.items()} for state in states]
    grads = [scale * randn(i, *shape, dtype=dtype) for i, (shape, _) in enumerate(places)]
    call(direction, options, grads, states, places, t=steps + 1, ok=0.0)
    for state, old in zip(states, before, strict=True):
        assert state.keys() == old.keys()
        for key, value in state.items():
            assert torch.equal(value, old[key]), key


@pytest.mark.parametrize("name", CASES)
def test_a_step_that_counts_changes_every_buffer(name):
    """So that the test above can fail."""
    direction, options = CASES[name]
    states, _ = run(direction, options, places_of(name), F64, 1)
    for state in states:
        assert all(value.any() for value in state.values())


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("name", CASES)
def test_zero_gradients_give_zero(name, dtype):
    direction, options = CASES[name]
    places = places_of(name)
    states = new_states(direction, options, places, dtype)
    grads = [torch.zeros(shape, dtype=dtype) for shape, _ in places]
    for t in (1, 2):
        for u, g in zip(call(direction, options, grads, states, places, t), grads, strict=True):
            assert torch.equal(u, g)
    for state in states:
        assert all(torch.isfinite(value).all() for value in state.values())


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_read_alone(name):
    direction, options = CASES[name]
    places = places_of(name)
    states = new_states(direction, options, places, F64)
    grads = [randn(i, *shape) for i, (shape, _) in enumerate(places)]
    before = [g.clone() for g in grads]
    U = call(direction, options, grads, states, places, 1)
    assert all(torch.equal(g, old) for g, old in zip(grads, before, strict=True))
    assert [u.shape for u in U] == [g.shape for g in grads]
    assert all(u.dtype == F64 for u in U)


@pytest.mark.parametrize("name", CASES)
def test_a_batch_is_its_parameters_one_by_one(name):
    direction, options = CASES[name]
    places = places_of(name)
    states, U = run(direction, options, places, F64, 3)
    for i, place in enumerate(places):
        # Parameter i of step t gets the gradient of seed 100 t + i in both.
        alone, (u,) = run(direction, options, [place], F64, 3, seed=i)
        torch.testing.assert_close(u, U[i], rtol=1e-9, atol=1e-11)
        for key, value in alone[0].items():
            torch.testing.assert_close(value, states[i][key], rtol=1e-9, atol=1e-12)


CORRECTIONS = ("rate", "moment", None)
OPTIMIZERS = [
    *((c, {}) for c in (anytime.SFSGD, anytime.SFLion, anytime.SignSGD, anytime.Lion)),
    *((c, {"bias_correction": how}) for c in (anytime.SFAdamW, anytime.AdamW) for how in CORRECTIONS),
    *(
        (c, {"adam_bias_correction": how})
        for c in (anytime.SFNorMuon, anytime.SFMuon, anytime.SFSpectralSGD, anytime.NorMuon, anytime.Muon)
        for how in CORRECTIONS
    ),
    *((c, {}) for c in (anytime.SpectralDescent, anytime.Shampoo)),
]


@pytest.mark.parametrize(("optimizer_class", "options"), OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_a_skipped_step_leaves_parameters_and_state(optimizer_class, options, steps, scale):
    """The first step or a later one; the gradients beside the infinite one may be as large as float32 holds."""
    params = [torch.nn.Parameter(randn(i, *shape).float()) for i, shape in enumerate([(6, 4), (5,), (3,)])]
    optimizer = optimizer_class(params, **options)
    for t in range(steps):
        for i, p in enumerate(params):
            p.grad = randn(10 * t + i, *p.shape).float()
        optimizer.step()

    def everything():
        return [p.detach().clone() for p in params] + [
            value.clone() for p in params for _, value in sorted(optimizer.state[p].items())
        ]

    before = everything()
    for i, p in enumerate(params):
        p.grad = scale * randn(i, *p.shape).float()
    params[-1].grad[1] = math.inf
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert all(torch.equal(a, b) for a, b in zip(everything(), before, strict=True))


# ----------------------------------------------------------------- by formula


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("row_norm", [True, False])
def test_rms_scaling_is_exact(row_norm, dtype):
    """The root mean square of each matrix of U is update_rms."""
    places = SPLIT
    _, U = run(Spectral(), {**SPECTRAL, "row_norm": row_norm}, places, dtype, 3)
    for u, (_, layout) in zip(U, places, strict=True):
        for piece in layout.pieces(u.double()):
            rms = piece.square().mean(dim=(-2, -1)).sqrt()
            torch.testing.assert_close(
                rms, torch.full_like(rms, 0.2), rtol={torch.float32: 1e-6, F64: 1e-13}[dtype], atol=0
            )


@pytest.mark.parametrize(
    ("scaling", "factor"),
    [
        ("max-side", lambda m, n: 0.3 * math.sqrt(max(m, n))),
        ("aspect", lambda m, n: math.sqrt(max(1.0, m / n))),
        (None, lambda m, n: 1.0),
        ("rms", lambda m, n: 0.3 * math.sqrt(m * n) / math.sqrt(min(m, n))),
    ],
)
def test_scalings_of_the_exact_polar_factor(scaling, factor):
    places = [((6, 4), Layout()), ((4, 6), Layout()), ((5, 5), Layout())]
    options = {**SPECTRAL, "momentum": 0.0, "polar": "svd", "scaling": scaling, "update_rms": 0.3}
    _, U = run(Spectral(), options, places, F64, 1)
    for i, (u, ((m, n), _)) in enumerate(zip(U, places, strict=True)):
        torch.testing.assert_close(u, factor(m, n) * svd_polar(randn(100 + i, m, n)), rtol=0, atol=1e-12)


def test_normuon_rows_by_hand():
    options = {**SPECTRAL, "row_norm": True, "polar": "svd", "eps": 1e-3}
    M, v = torch.zeros(6, 4, dtype=F64), torch.zeros(6, 1, dtype=F64)
    for t in range(1, 4):
        M = 0.8 * M + 0.2 * randn(100 * t, 6, 4)
        P = svd_polar(M)
        v = 0.95 * v + 0.05 * P.square().mean(dim=1, keepdim=True)
    P_hat = P / (v.sqrt() + 1e-3)
    (state,), (u,) = run(Spectral(), options, [((6, 4), Layout())], F64, 3)
    torch.testing.assert_close(state["row_moment"], v[:, 0], rtol=1e-12, atol=0)
    torch.testing.assert_close(u, 0.2 * math.sqrt(24) * P_hat / P_hat.norm(), rtol=0, atol=1e-12)


def test_beta2_of_the_rows_may_be_its_own_option():
    with_betas = {**SPECTRAL, "row_norm": True, "betas": (0.1, 0.7)}
    with_beta2 = {**{k: v for k, v in SPECTRAL.items() if k != "betas"}, "row_norm": True, "beta2": 0.7}
    a, b = (run(Spectral(), options, SPLIT, F64, 3)[0] for options in (with_betas, with_beta2))
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x["row_moment"], y["row_moment"])


@pytest.mark.parametrize("mu", [0.0, 0.9])
def test_momentum_starts_at_the_first_gradient_where_asked(mu):
    """M_1 = G_1, then the exponential mean, to the last digit of float64."""
    options = {**SPECTRAL, "momentum": mu, "scaling": None, "polar": "svd"}
    place = [((6, 4), Layout())]
    for first_gradient in (True, False):
        M = torch.zeros(6, 4, dtype=F64)
        for t in range(1, 5):
            G = randn(100 * t, 6, 4)
            M = G if first_gradient and t == 1 else mu * M + (1 - mu) * G
            (state,), (u,) = run(Spectral(first_gradient), options, place, F64, t)
            torch.testing.assert_close(state["momentum"], M, rtol=1e-14, atol=1e-15)
            torch.testing.assert_close(u, svd_polar(M), rtol=0, atol=1e-12)


def test_nesterov_looks_ahead():
    options = {**SPECTRAL, "nesterov": True, "polar": "svd", "scaling": None}
    M = torch.zeros(6, 4, dtype=F64)
    for t in range(1, 4):
        G = randn(100 * t, 6, 4)
        M = 0.8 * M + 0.2 * G
    _, (u,) = run(Spectral(), options, [((6, 4), Layout())], F64, 3)
    torch.testing.assert_close(u, svd_polar(0.8 * M + 0.2 * G), rtol=0, atol=1e-12)


@pytest.mark.parametrize("correction", ["rate", "moment", None])
def test_adam_by_hand(correction):
    beta1, beta2, eps, t = 0.9, 0.95, 1e-3, 4
    m = v = torch.zeros(6, 4, dtype=F64)
    for step in range(1, t + 1):
        G = randn(100 * step, 6, 4)
        m, v = beta1 * m + (1 - beta1) * G, beta2 * v + (1 - beta2) * G * G
    options = {**ADAM, "eps": eps, "bias_correction": correction}
    seconds = v / (1 - beta2**t) if correction == "moment" else v
    firsts = m / (1 - beta1**t) if correction == "moment" else m
    for first_moment, numerator in ((False, G), (True, firsts)):
        direction = Adam(first_moment)
        _, (u,) = run(direction, options, [((6, 4), Layout())], F64, t)
        torch.testing.assert_close(u, numerator / (seconds.sqrt() + eps), rtol=1e-12, atol=0)
        rate = direction.rate(torch.tensor([float(t)], dtype=F64), options)
        assert float(rate) == pytest.approx(math.sqrt(1 - beta2**t) if correction == "rate" else 1.0, rel=1e-14)


def test_lion_has_two_timescales():
    M = torch.zeros(6, 4, dtype=F64)
    for t in range(1, 4):
        G = randn(100 * t, 6, 4)
        C, M = 0.9 * M + 0.1 * G, 0.99 * M + 0.01 * G
    direction, options = CASES["lion"]
    (state,), (u,) = run(direction, options, [((6, 4), Layout())], F64, 3)
    assert torch.equal(u, C.sign())
    torch.testing.assert_close(state["momentum"], M, rtol=1e-13, atol=1e-16)


def test_a_narrow_buffer_is_rounded_and_used_as_stored():
    options = {**CASES["lion"][1], "betas": (0.5, 0.0), "momentum_dtype": torch.bfloat16}
    states = new_states(Steepest("frobenius"), options, [((2, 3), Layout())], torch.float32)
    G = randn(1, 2, 3, dtype=torch.float32)
    call(Steepest("frobenius"), options, [G], states, [((2, 3), Layout())], 1)
    assert torch.equal(states[0]["momentum"], G.bfloat16())
    (u,) = call(Steepest("frobenius"), options, [torch.zeros(2, 3)], states, [((2, 3), Layout())], 2)
    expected = G.bfloat16().float()
    torch.testing.assert_close(u, expected / expected.norm())


def test_ema_returns_what_it_stores():
    states = [{"m": torch.zeros(4, dtype=torch.bfloat16)}, {"m": torch.ones(4, dtype=torch.bfloat16)}]
    grads = [randn(i, 4, dtype=torch.float32) for i in range(2)]
    one = torch.ones(2, dtype=F64)
    batch = Batch(grads, states, [Layout()] * 2, {}, one, one[0])
    out = batch.ema_("m", grads, 0.3)
    for state, value, g, old in zip(states, out, grads, (0.0, 1.0), strict=True):
        assert value.dtype == torch.float32
        assert torch.equal(value, state["m"].float())
        torch.testing.assert_close(value, 0.3 * old + 0.7 * g, rtol=1e-2, atol=1e-2)


def test_shampoo_refuses_a_split():
    with pytest.raises(ValueError, match="split"):
        Shampoo().buffers((6, 4), Layout(False, 0, (2, 4)), CASES["shampoo"][1])


# ---------------------------------------------------------------- duality map

NORMS = {
    "max": (lambda U: U.abs().amax(dim=(-2, -1)), lambda G: G.abs().sum(dim=(-2, -1))),
    "spectral": (lambda U: torch.linalg.matrix_norm(U, 2), lambda G: torch.linalg.matrix_norm(G, "nuc")),
    "frobenius": (torch.linalg.matrix_norm, torch.linalg.matrix_norm),
}


@pytest.mark.parametrize("rank", [1, 2, None])
@pytest.mark.parametrize("shape", [(5, 5), (7, 3), (3, 7)])
@pytest.mark.parametrize("norm", NORMS)
def test_duality_map_attains_the_dual_norm(norm, shape, rank):
    """⟨G, U⟩ = ‖G‖_* with ‖U‖ ≤ 1: no other U of the ball does better."""
    G = randn(1, 4, *shape) if rank is None else randn(1, 4, shape[0], rank) @ randn(2, 4, rank, shape[1])
    primal, dual = NORMS[norm]
    U = duality_map(G, norm)
    assert (primal(U) <= 1 + 1e-12).all()
    torch.testing.assert_close((G * U).sum(dim=(-2, -1)), dual(G), rtol=1e-12, atol=0)
    other = randn(3, 4, *shape)
    other = other / primal(other)[:, None, None]
    assert ((G * other).sum(dim=(-2, -1)) <= dual(G)).all()


@pytest.mark.parametrize("norm", NORMS)
def test_duality_map_of_zero_is_zero(norm):
    assert not duality_map(torch.zeros(2, 3, 4), norm).any()
