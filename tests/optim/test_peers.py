"""Against others' implementations: schedulefree, torch.optim, and methods of a few lines written out here."""

from __future__ import annotations

import math

import pytest
import schedulefree
import torch
from torch.optim._muon import _zeropower_via_newtonschulz

import anytime

STEPS = 120
SHAPES = ((12, 7), (7, 12), (8, 8), (10,), ())
MATRICES = SHAPES[:3]
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-11}


def weights(shapes=SHAPES, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    draws = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [torch.nn.Parameter(w.to(dtype)) for w in draws]


class Gradients:
    """Of a quadratic at the weights given, plus noise."""

    def __init__(self, shapes=SHAPES, dtype=torch.float64, seed=2):
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        self.targets = [self.draw(shape) for shape in shapes]

    def draw(self, shape):
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def at(self, params):
        return [
            (p.detach() - target) + 0.5 * self.draw(p.shape) for p, target in zip(params, self.targets, strict=True)
        ]


def set_grads(params, grads):
    """Copies, since schedulefree writes on the gradients."""
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()


def assert_close(ours, theirs, tolerance, what):
    """Relative error of all parameters together: one alone may pass through zero."""
    a, b = (torch.cat([p.detach().flatten() for p in params]) for params in (ours, theirs))
    far = float((a - b).norm() / b.norm())
    assert far <= tolerance, f"{what}: {far:.1e}"


def check_against(peer, optimizer, theirs, ours, dtype=torch.float64, steps=STEPS, averaged=False, each_step=None):
    gradients = Gradients([p.shape for p in theirs], dtype)
    for t in range(1, steps + 1):
        grads = gradients.at(theirs)
        set_grads(theirs, grads)
        set_grads(ours, grads)
        peer.step()
        optimizer.step()
        if each_step:
            each_step()
        assert_close(ours, theirs, TOLERANCE[dtype], f"step {t}")
        if averaged and t % 40 == 0:
            peer.eval()
            with optimizer.averaged():
                assert_close(ours, theirs, TOLERANCE[dtype], f"x at step {t}")
            peer.train()


# ----------------------------------------------------------------- schedulefree


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("lr", "beta", "decay", "warmup", "r"),
    [(0.1, 0.9, 0.0, 0, 0.0), (0.3, 0.9, 0.1, 40, 0.0), (0.1, 0.5, 0.02, 40, 2.0), (0.1, 0.98, 0.1, 500, 0.5)],
)
def test_schedulefree_sgd(lr, beta, decay, warmup, r, dtype):
    theirs, ours = weights(dtype=dtype), weights(dtype=dtype)
    peer = schedulefree.SGDScheduleFree(theirs, lr=lr, momentum=beta, weight_decay=decay, warmup_steps=warmup, r=r)
    peer.train()
    optimizer = anytime.SFSGD(
        ours, lr=lr, beta=beta, weight_decay=decay, decay_at="y", warmup_steps=warmup, averaging_power=r
    )
    check_against(peer, optimizer, theirs, ours, dtype, averaged=True)


@pytest.mark.parametrize(
    ("peer_class", "bias_correction"),
    [(schedulefree.AdamWScheduleFreePaper, "rate"), (schedulefree.AdamWScheduleFree, "moment")],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("lr", "betas", "eps", "decay", "warmup", "r"),
    [
        (0.02, (0.9, 0.999), 1e-8, 0.0, 0, 0.0),
        (0.05, (0.95, 0.99), 1e-8, 0.1, 40, 0.0),
        (0.02, (0.5, 0.9), 1e-3, 0.02, 40, 2.0),
        (0.02, (0.98, 0.99), 1e-8, 0.1, 500, 0.5),
    ],
)
def test_schedulefree_adamw(peer_class, bias_correction, lr, betas, eps, decay, warmup, r, dtype):
    theirs, ours = weights(dtype=dtype), weights(dtype=dtype)
    common = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": decay, "warmup_steps": warmup}
    peer = peer_class(theirs, r=r, **common)
    peer.train()
    optimizer = anytime.SFAdamW(ours, bias_correction=bias_correction, averaging_power=r, **common)
    check_against(peer, optimizer, theirs, ours, dtype, averaged=True)


# ------------------------------------------------------------------ torch.optim


@pytest.mark.parametrize(
    ("lr", "betas", "eps", "decay"),
    [(0.01, (0.9, 0.999), 1e-8, 0.0), (0.02, (0.9, 0.95), 1e-8, 0.1), (0.02, (0.0, 0.9), 1e-2, 0.5)],
)
def test_torch_adamw(lr, betas, eps, decay):
    """In float64: torch multiplies weights by 1 − lr·decay, which drifts by more than 1e-6 in float32."""
    theirs, ours = weights(), weights()
    common = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": decay}
    check_against(torch.optim.AdamW(theirs, **common), anytime.AdamW(ours, **common), theirs, ours)


def test_torch_adamw_under_a_schedule():
    theirs, ours = weights(), weights()
    common = {"lr": 0.02, "betas": (0.9, 0.95), "weight_decay": 0.1}
    peer, optimizer = torch.optim.AdamW(theirs, **common), anytime.AdamW(ours, **common)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, STEPS) for o in (peer, optimizer)]
    check_against(peer, optimizer, theirs, ours, each_step=lambda: [schedule.step() for schedule in schedules])


def test_warmup_of_scheduled_optimizers():
    """η_t = lr min(1, t / warmup_steps), as a LambdaLR around torch's AdamW gives."""
    theirs, ours = weights(), weights()
    common = {"lr": 0.02, "betas": (0.9, 0.95), "weight_decay": 0.1}
    peer = torch.optim.AdamW(theirs, **common)
    schedule = torch.optim.lr_scheduler.LambdaLR(peer, lambda done: min(1.0, (done + 1) / 30))
    optimizer = anytime.AdamW(ours, warmup_steps=30, **common)
    check_against(peer, optimizer, theirs, ours, each_step=schedule.step)


def torch_polar(M):
    return _zeropower_via_newtonschulz(M, (3.4445, -4.7750, 2.0315), 5, 1e-7)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("scaling", "adjust"), [("aspect", "original"), ("max-side", "match_rms_adamw")])
@pytest.mark.parametrize(("lr", "momentum", "decay"), [(0.02, 0.95, 0.1), (0.005, 0.5, 0.0)])
def test_torch_muon(lr, momentum, decay, scaling, adjust, nesterov):
    theirs, ours = weights(MATRICES), weights(MATRICES)
    common = {"lr": lr, "momentum": momentum, "weight_decay": decay, "nesterov": nesterov}
    peer = torch.optim.Muon(theirs, adjust_lr_fn=adjust, **common)
    optimizer = anytime.Muon(ours, polar=torch_polar, scaling=scaling, **common)
    check_against(peer, optimizer, theirs, ours)


def test_muon_with_adamw_for_the_rest():
    """One anytime.Muon equals torch's Muon on the matrices beside torch's AdamW on the rest."""
    theirs, ours = weights(), weights()
    adam = {"betas": (0.8, 0.9), "eps": 1e-4}
    peers = [
        torch.optim.Muon(theirs[:3], lr=0.02, weight_decay=0.1),
        torch.optim.AdamW(theirs[3:], lr=0.003, weight_decay=0.3, **adam),
    ]
    optimizer = anytime.Muon(
        ours,
        lr=0.02,
        weight_decay=0.1,
        polar=torch_polar,
        scaling="aspect",
        adam_lr=0.003,
        adam_weight_decay=0.3,
        **{f"adam_{key}": value for key, value in adam.items()},
    )
    gradients = Gradients()
    for t in range(1, STEPS + 1):
        grads = gradients.at(theirs)
        set_grads(theirs, grads)
        set_grads(ours, grads)
        for peer in peers:
            peer.step()
        optimizer.step()
        assert_close(ours, theirs, 1e-11, f"step {t}")


@pytest.mark.parametrize("decay_at", ["y", "z"])
def test_sf_adamw_without_an_average_is_adamw(decay_at):
    """At β = 0 and c = 1 throughout, X = Y = Z is torch's AdamW without a first moment."""
    theirs, ours = weights(), weights()
    common = {"lr": 0.02, "betas": (0.0, 0.95), "weight_decay": 0.1}
    optimizer = anytime.SFAdamW(
        ours, warmup_steps=0, averaging_warmup=10**6, bias_correction="moment", decay_at=decay_at, **common
    )
    check_against(torch.optim.AdamW(theirs, **common), optimizer, theirs, ours)
    for p in ours:
        x, y, z = optimizer.iterates(p)
        assert torch.equal(x, y)
        assert torch.equal(y, z)


# ------------------------------------------------------------- a few lines each


def polar_factor(M, rank=None):
    U, _, Vh = torch.linalg.svd(M, full_matrices=False)
    rank = rank or min(M.shape)
    return U[:, :rank] @ Vh[:rank]


class ByHand:
    """update(i, p, G) -> U of p ← p − lr (U + decay p)."""

    def __init__(self, params, lr, decay, update):
        self.params, self.lr, self.decay, self.update = params, lr, decay, update

    @torch.no_grad()
    def step(self):
        for i, p in enumerate(self.params):
            p.sub_(self.lr * (self.update(i, p.grad) + self.decay * p))


def moments(beta, shapes):
    """An exponential mean a parameter, from zero; calling it adds a gradient."""
    M = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]

    def add(i, G):
        M[i] = beta * M[i] + (1 - beta) * G
        return M[i]

    return add


def test_lion():
    theirs, ours = weights(), weights()
    M = [torch.zeros_like(p) for p in theirs]

    def update(i, G):
        U = torch.sign(0.8 * M[i] + 0.2 * G)
        M[i] = 0.97 * M[i] + 0.03 * G
        return U.detach()

    optimizer = anytime.Lion(ours, lr=0.02, betas=(0.8, 0.97), weight_decay=0.1)
    check_against(ByHand(theirs, 0.02, 0.1, update), optimizer, theirs, ours)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sign_sgd(momentum):
    theirs, ours = weights(), weights()
    M = moments(momentum, SHAPES)
    optimizer = anytime.SignSGD(ours, lr=0.02, momentum=momentum, weight_decay=0.1)
    peer = ByHand(theirs, 0.02, 0.1, lambda i, G: torch.sign(M(i, G)))
    check_against(peer, optimizer, theirs, ours)


def test_the_sign_of_zero_is_zero():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = anytime.SignSGD([p], lr=0.25)
    p.grad = torch.tensor([0.0, 2.0, -3.0])
    optimizer.step()
    assert p.tolist() == [1.0, 0.75, 1.25]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_spectral_descent(momentum):
    theirs, ours = weights(MATRICES), weights(MATRICES)
    M = moments(momentum, MATRICES)
    optimizer = anytime.SpectralDescent(ours, lr=0.02, momentum=momentum, weight_decay=0.1)
    peer = ByHand(theirs, 0.02, 0.1, lambda i, G: polar_factor(M(i, G)))
    check_against(peer, optimizer, theirs, ours)


@pytest.mark.parametrize("beta1", [0.0, 0.7])
def test_adam_at_beta2_zero(beta1):
    """m / (|g| + ε), which is a sign at β1 = 0 alone."""
    theirs, ours = weights(), weights()
    M = moments(beta1, SHAPES)
    eps = 1e-6
    optimizer = anytime.AdamW(ours, lr=0.01, betas=(beta1, 0.0), eps=eps, weight_decay=0.1, bias_correction=None)
    peer = ByHand(theirs, 0.01, 0.1, lambda i, G: M(i, G) / (G.abs() + eps))
    check_against(peer, optimizer, theirs, ours)


@pytest.mark.parametrize("beta1", [0.0, 0.9])
@pytest.mark.parametrize("rank", [None, 1, 3])
def test_shampoo_at_beta2_zero_is_the_polar_factor(rank, beta1):
    """Step by step, of deficient rank too: zero outside the support."""
    shapes = ((6, 4), (4, 6), (5, 5))
    theirs, ours = weights(shapes), weights(shapes)
    M = moments(beta1, shapes)
    generator = torch.Generator().manual_seed(5)
    rights = [torch.randn(rank or shape[1], shape[1], generator=generator, dtype=torch.float64) for shape in shapes]
    optimizer = anytime.Shampoo(ours, lr=0.02, betas=(beta1, 0.0), weight_decay=0.1)
    peer = ByHand(theirs, 0.02, 0.1, lambda i, G: polar_factor(M(i, G), rank))
    gradients = Gradients([(shape[0], rank or shape[1]) for shape in shapes])
    for t in range(1, 41):
        grads = [gradients.draw(target.shape) @ R for target, R in zip(gradients.targets, rights, strict=True)]
        set_grads(theirs, grads)
        set_grads(ours, grads)
        before = [p.detach().clone() for p in ours]
        peer.step()
        optimizer.step()
        assert_close(ours, theirs, 1e-7, f"step {t}")
        if rank:
            for p, old, R in zip(ours, before, rights, strict=True):
                outside = torch.linalg.svd(R)[2][rank:].T
                assert (((p - old) + 0.02 * 0.1 * old) @ outside).abs().max() < 1e-7


def test_shampoo_with_statistics():
    """L^(−1/4) M R^(−1/4) with eigendecompositions written out, β2 > 0."""
    shapes = ((6, 4), (5, 5))
    theirs, ours = weights(shapes), weights(shapes)
    M = moments(0.9, shapes)
    left, right = moments(0.8, [(m, m) for m, _ in shapes]), moments(0.8, [(n, n) for _, n in shapes])

    def root(A):
        values, vectors = torch.linalg.eigh(A)
        support = values > 1e-12 * values[-1]
        return vectors[:, support] @ torch.diag(values[support] ** -0.25) @ vectors[:, support].T

    def update(i, G):
        m = M(i, G)
        return root(left(i, m @ m.T)) @ m @ root(right(i, m.T @ m))

    optimizer = anytime.Shampoo(ours, lr=0.02, betas=(0.9, 0.8), weight_decay=0.1)
    gradients = Gradients(shapes)
    peer = ByHand(theirs, 0.02, 0.1, update)
    for t in range(1, 41):
        grads = gradients.at(theirs)
        set_grads(theirs, grads)
        set_grads(ours, grads)
        peer.step()
        optimizer.step()
        assert_close(ours, theirs, 1e-6, f"step {t}")


@pytest.mark.parametrize("nesterov", [True, False])
def test_normuon(nesterov):
    theirs, ours = weights(MATRICES), weights(MATRICES)
    M, v = moments(0.9, MATRICES), moments(0.8, [(m, 1) for m, _ in MATRICES])

    def update(i, G):
        m = M(i, G)
        P = polar_factor(0.9 * m + 0.1 * G if nesterov else m)
        P = P / (v(i, (P * P).mean(dim=1, keepdim=True)).sqrt() + 1e-4)
        return 0.2 * math.sqrt(G.numel()) * P / P.norm()

    optimizer = anytime.NorMuon(
        ours, lr=0.02, momentum=0.9, beta2=0.8, eps=1e-4, weight_decay=0.1, polar="svd", nesterov=nesterov
    )
    check_against(ByHand(theirs, 0.02, 0.1, update), optimizer, theirs, ours)
