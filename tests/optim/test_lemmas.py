"""What the paper proves of the iterates, on the iterates of the optimizers."""

from __future__ import annotations

import math

import pytest
import torch

import anytime

SHAPES = ((12, 7), (7, 12), (8, 8), (16, 2))
F64 = torch.float64


def randn(shape, seed, dtype=F64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def parameter(shape, seed=0, scale=1.0, dtype=F64):
    return torch.nn.Parameter(scale * randn(shape, seed, dtype))


def svd_polar(M):
    U, _, Vh = torch.linalg.svd(M, full_matrices=False)
    return U @ Vh


def rate(t, lr, warmup):
    return lr * min(1.0, t / warmup) if warmup else lr


# ----------------------------------------------- boundedness under decay at Z


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("start", [0.0, 3.0])
@pytest.mark.parametrize(
    "average", [{}, {"averaging_power": 3.0, "beta_growth": 0.4, "beta_growth_start": 5, "averaging_warmup": 10}]
)
@pytest.mark.parametrize("optimizer_class", [anytime.SFNorMuon, anytime.SFMuon])
def test_z_reaches_its_bound_and_nothing_passes_it(optimizer_class, average, start, shape):
    """‖Z_t‖ ≤ (1 − ηλ)^t ‖Z_0‖ + 0.2 √(mn)/λ, reached under a constant gradient; X and Y are convex combinations."""
    lr, decay = 0.05, 2.0
    p = parameter(shape, scale=start)
    bound, first = 0.2 * math.sqrt(p.numel()) / decay, float(p.detach().norm())
    optimizer = optimizer_class([p], lr=lr, weight_decay=decay, warmup_steps=0, **average)
    p.grad = randn(shape, 1)
    slack = 1 + 1e-12
    for t in range(1, 121):
        optimizer.step()
        x, y, z = (float(w.norm()) for w in optimizer.iterates(p))
        assert z <= ((1 - lr * decay) ** t * first + bound) * slack
        assert max(x, y) <= (first + bound) * slack
    assert z >= 0.99 * bound


@pytest.mark.parametrize("decay_at", ["z", "y", None])
def test_only_decay_at_z_bounds_z(decay_at):
    p = parameter((8, 8), scale=0.0)
    optimizer = anytime.SFNorMuon([p], lr=0.05, weight_decay=2.0, decay_at=decay_at, warmup_steps=0)
    p.grad = randn((8, 8), 1)
    largest = 0.0
    for _ in range(200):
        optimizer.step()
        largest = max(largest, float(optimizer.iterates(p).z.norm()))
    bound = 0.2 * 8 / 2.0
    assert largest <= bound * (1 + 1e-12) if decay_at == "z" else largest > 1.2 * bound


# --------------------------------------------------------- the update's size


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (F64, 1e-12)])
@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [(anytime.SFNorMuon, {}), (anytime.SFNorMuon, {"polar": "svd", "momentum": 0.0}), (anytime.SFMuon, {})],
)
def test_root_mean_square_of_every_step(optimizer_class, options, dtype, tolerance):
    """0.2 η_t exactly, in warmup too, for each matrix on its own, whatever its shape and the gradient's scale."""
    lr, warmup = 1.0, 10
    shapes = {"a": (12, 7), "b": (7, 12), "c": (8, 8), "kernel": (6, 3, 2, 2), "experts": (3, 5, 4), "qkv": (12, 5)}
    params = {name: parameter(shape, scale=0.0, dtype=dtype) for name, shape in shapes.items()}
    optimizer = optimizer_class(
        list(params.items()),
        lr=lr,
        weight_decay=0.0,
        warmup_steps=warmup,
        polar_dtype=dtype,
        rules={"qkv": {"split": 3}, "c": {"rate": 0.5}},
        **options,
    )
    before = {name: p.detach().clone() for name, p in params.items()}
    for t in range(1, 21):
        for i, p in enumerate(params.values()):
            p.grad = randn(p.shape, 100 * t + i, dtype) * 10.0 ** (i - 3)
        optimizer.step()
        for name, p in params.items():
            z = optimizer.iterates(p).z
            step = (z - before[name]).double()
            before[name] = z
            for piece in step.split(4) if name == "qkv" else step if name == "experts" else [step]:
                expected = 0.2 * rate(t, lr, warmup) * (0.5 if name == "c" else 1.0)
                rms = float(piece.square().mean().sqrt())
                assert abs(rms / expected - 1) <= tolerance, f"{name}, step {t}"


def test_update_rms_is_an_option():
    p = parameter((6, 4), scale=0.0)
    optimizer = anytime.SFNorMuon([p], lr=0.5, weight_decay=0.0, warmup_steps=0, update_rms=0.7)
    p.grad = randn((6, 4), 1)
    optimizer.step()
    assert float(optimizer.iterates(p).z.square().mean().sqrt()) == pytest.approx(0.35, rel=1e-12)


# -------------------------------------------------------- iterate identities


def test_iterate_identities_of_the_paper():
    """S_{t+1} = t/(t+1) (S_t − β η P_t) and Y_{t+1} − Y_t = S_t/(t+1) − η (1 − β + β/(t+1)) P_t with S = Z − Y, t ≥ 0.

    For SF-SpectralSGD as the theory has it: no decay, no warmup, uniform weights, M_0 = G_0.
    """
    lr, beta, mu = 0.1, 0.8, 0.7
    p = parameter((6, 4))
    optimizer = anytime.SFSpectralSGD([p], lr=lr, beta=beta, momentum=mu)
    M = None
    for t in range(60):
        _, Y, Z = optimizer.iterates(p)
        S = Z - Y
        p.grad = randn(p.shape, 50 + t)
        M = p.grad if M is None else mu * M + (1 - mu) * p.grad
        P = svd_polar(M)
        optimizer.step()
        X_next, Y_next, Z_next = optimizer.iterates(p)
        S_next = Z_next - Y_next
        torch.testing.assert_close(S_next, beta * (Z_next - X_next), rtol=0, atol=1e-13)
        torch.testing.assert_close(S_next, t / (t + 1) * (S - beta * lr * P), rtol=0, atol=1e-13)
        torch.testing.assert_close(Y_next - Y, S / (t + 1) - lr * (1 - beta + beta / (t + 1)) * P, rtol=0, atol=1e-13)


@pytest.mark.parametrize("decay_at", ["z", "y", None])
@pytest.mark.parametrize(
    "average",
    [
        {},
        {"averaging_power": 2.0, "averaging_warmup": 7},
        {"averaging_power": 1.0, "beta_growth": 0.5, "beta_growth_start": 10},
    ],
)
def test_iterate_identities_in_general(average, decay_at):
    """With weights c, rates η, decay λ of W (Z or Y) and a β that changes to β':

    Z_{t+1} = Z_t − Δ_t,  Δ_t = η_t (P_t + λ W_t), and X_{t+1} = (1 − c) X_t + c Z_{t+1} give
    Z_{t+1} − X_{t+1} = (1 − c) (Z_t − X_t − Δ_t). Since S = β (Z − X) at each step with the β of that step,

        S_{t+1}       = (1 − c) β' (S_t/β − Δ_t)
        Y_{t+1} − Y_t = S_t − S_{t+1} − Δ_t = (1 − (1 − c) β'/β) S_t − (1 − (1 − c) β') Δ_t,

    which are the paper's at β' = β, c = 1/(t+1) and Δ = η P.
    """
    lr, first_beta, mu, decay, warmup = 0.1, 0.8, 0.7, 0.5, 12
    r, averaging_warmup = average.get("averaging_power", 0.0), average.get("averaging_warmup", 0)
    p = parameter((6, 4))
    optimizer = anytime.SFSpectralSGD(
        [p],
        lr=lr,
        beta=first_beta,
        momentum=mu,
        weight_decay=decay,
        decay_at=decay_at,
        warmup_steps=warmup,
        **average,
    )

    def beta_at(t):
        T0 = average.get("beta_growth_start", math.inf)
        return first_beta if t <= T0 else 1 - ((T0 - 1) / (t - 1)) ** average["beta_growth"] * (1 - first_beta)

    M, total = None, 0.0
    for t in range(1, 61):
        _, Y, Z = optimizer.iterates(p)
        S = Z - Y
        p.grad = randn(p.shape, 50 + t)
        M = p.grad if M is None else mu * M + (1 - mu) * p.grad
        eta = rate(t, lr, warmup)
        decayed = {"z": Z, "y": Y, None: torch.zeros_like(Z)}[decay_at]
        delta = eta * (svd_polar(M) + decay * decayed)
        weight = eta**2 * t**r if t > averaging_warmup else 0.0
        total += weight
        c = weight / total if t > averaging_warmup else 1.0
        beta, beta_next = beta_at(t), beta_at(t + 1)
        optimizer.step()
        _, Y_next, Z_next = optimizer.iterates(p)
        torch.testing.assert_close(Z_next - Y_next, (1 - c) * beta_next * (S / beta - delta), rtol=0, atol=1e-13)
        torch.testing.assert_close(
            Y_next - Y,
            (1 - (1 - c) * beta_next / beta) * S - (1 - (1 - c) * beta_next) * delta,
            rtol=0,
            atol=1e-13,
        )


# -------------------------------------------------------------- norm of Z


@pytest.mark.parametrize("shape", SHAPES)
def test_one_step_of_the_norm_of_z(shape):
    """ρ'² = (1 − ηλ)² ρ² − 0.4 η (1 − ηλ) α ρ + 0.04 η², ρ the RMS of Z and α its cosine with P̂, by hand."""
    lr, decay, mu, beta2, warmup = 0.3, 0.5, 0.8, 0.9, 15
    p = parameter(shape)
    optimizer = anytime.SFNorMuon(
        [p], lr=lr, betas=(0.7, beta2), momentum=mu, weight_decay=decay, warmup_steps=warmup, polar="svd"
    )
    M, v = torch.zeros_like(p.detach()), torch.zeros(shape[0], 1, dtype=F64)
    A = randn(shape, 1)
    for t in range(1, 81):
        p.grad = A + 0.5 * randn(shape, 50 + t)
        M = mu * M + (1 - mu) * p.grad
        P = svd_polar(M)
        v = beta2 * v + (1 - beta2) * P.square().mean(dim=1, keepdim=True)
        P_hat = P / (v.sqrt() + 1e-8)
        Z = optimizer.iterates(p).z
        rho, alpha = float(Z.square().mean().sqrt()), float((P_hat * Z).sum() / (P_hat.norm() * Z.norm()))
        optimizer.step()
        eta = rate(t, lr, warmup)
        keep = 1 - eta * decay
        expected = keep**2 * rho**2 - 0.4 * eta * keep * alpha * rho + 0.04 * eta**2
        assert float(optimizer.iterates(p).z.square().mean()) == pytest.approx(expected, rel=1e-11)


# ------------------------------------------------------- the weights of X


def gather(optimizer, p, steps):
    """Z after each step, with X of the last; gradients are random."""
    fast = []
    for t in range(1, steps + 1):
        p.grad = randn(p.shape, 50 + t)
        optimizer.step()
        fast.append(optimizer.iterates(p).z)
    return torch.stack(fast), optimizer.iterates(p).x


@pytest.mark.parametrize("beta", [0.0, 0.9])
@pytest.mark.parametrize("steps", [1, 2, 30])
def test_x_is_the_mean_of_z(beta, steps):
    """Without warmup and at r = 0, X_{t+1} is the plain mean of Z_2, …, Z_{t+1}: the weights of Algorithm 1 give the
    first Z, which is the initial point, none."""
    for build in (
        lambda p: anytime.SFNorMuon([p], lr=0.1, betas=(beta, 0.95), warmup_steps=0),
        lambda p: anytime.SFSGD([p], lr=0.1, beta=beta, warmup_steps=0),
    ):
        p = parameter((6, 4))
        fast, x = gather(build(p), p, steps)
        torch.testing.assert_close(x, fast.mean(dim=0), rtol=0, atol=1e-13)


@pytest.mark.parametrize("averaging_warmup", [0, 9])
@pytest.mark.parametrize("r", [0.0, 1.5, 3.0])
@pytest.mark.parametrize("growth", [0.0, 0.5])
def test_x_is_a_weighted_mean_of_z(growth, r, averaging_warmup):
    """w_t = η_t² t^r over the steps after the average's warmup; η_t of SF-AdamW holds √(1 − β2^t)."""
    lr, warmup, beta2, steps = 0.1, 20, 0.9, 40
    average = {"averaging_power": r, "averaging_warmup": averaging_warmup, "beta_growth": growth}
    cases = (
        (lambda p: anytime.SFNorMuon([p], lr=lr, betas=(0.8, 0.95), warmup_steps=warmup, **average), lambda t: 1.0),
        (
            lambda p: anytime.SFAdamW([p], lr=lr, betas=(0.8, beta2), warmup_steps=warmup, **average),
            lambda t: math.sqrt(1 - beta2**t),
        ),
    )
    for build, correction in cases:
        p = parameter((6, 4))
        fast, x = gather(build(p), p, steps)
        w = torch.tensor(
            [
                (rate(t, lr, warmup) * correction(t)) ** 2 * t**r if t > averaging_warmup else 0.0
                for t in range(1, steps + 1)
            ],
            dtype=F64,
        )
        torch.testing.assert_close(x, torch.tensordot(w / w.sum(), fast, dims=1), rtol=0, atol=1e-13)


def test_x_follows_z_in_the_averages_warmup():
    p = parameter((6, 4))
    optimizer = anytime.SFNorMuon([p], lr=0.1, warmup_steps=0, averaging_warmup=5)
    for t in range(1, 9):
        p.grad = randn(p.shape, 50 + t)
        optimizer.step()
        x, _, z = optimizer.iterates(p)
        assert torch.equal(x, z) == (t <= 6)
