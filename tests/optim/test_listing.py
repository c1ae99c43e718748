"""SFNorMuon against the paper's own listing, with its bfloat16 iteration in float32."""

from __future__ import annotations

import math

import pytest
import torch

import anytime

STEPS = 200
SHAPES = ((16, 16), (24, 7), (5, 20), (9, 2))


def zeropower_via_newtonschulz5(G, steps=5, eps=1e-7):
    assert len(G.shape) == 2
    a, b, c = (3.4445, -4.7750, 2.0315)
    X = G.float()
    X = X / (X.norm() + eps)
    if G.size(0) > G.size(1):
        X = X.T
        for _ in range(steps):
            A = X @ X.T
            B = A @ X
            X = a * X + b * B + c * A @ B
        return X.T
    for _ in range(steps):
        A = X @ X.T
        B = A @ X
        X = a * X + b * B + c * A @ B
    return X


class NorMuonScheduleFree(torch.optim.Optimizer):
    def __init__(
        self,
        params,
        lr=0.005,
        betas=(0.9, 0.95),
        momentum=0.8,
        eps=1e-8,
        weight_decay=0.1,
        warmup_steps=2000,
        eta_scale=0.2,
    ):
        defaults = {
            "lr": lr,
            "betas": betas,
            "momentum": momentum,
            "eps": eps,
            "weight_decay": weight_decay,
            "warmup_steps": warmup_steps,
            "eta_scale": eta_scale,
            "k": 0,
            "train_mode": False,
            "weight_sum": 0.0,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def eval(self):
        for group in self.param_groups:
            if group["train_mode"]:
                beta = group["betas"][0]
                for p in group["params"]:
                    state = self.state[p]
                    if "z" in state:
                        p.lerp_(end=state["z"], weight=1.0 - 1.0 / beta)
                group["train_mode"] = False

    @torch.no_grad()
    def train(self):
        for group in self.param_groups:
            if not group["train_mode"]:
                beta = group["betas"][0]
                for p in group["params"]:
                    state = self.state[p]
                    if "z" in state:
                        p.lerp_(end=state["z"], weight=1.0 - beta)
                group["train_mode"] = True

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure else None
        for group in self.param_groups:
            beta, beta2 = group["betas"]
            mu, eps = group["momentum"], group["eps"]
            eta_scale, decay = group["eta_scale"], group["weight_decay"]
            k, warmup_steps = group["k"], group["warmup_steps"]
            sched = (k + 1) / warmup_steps if k < warmup_steps else 1.0
            lr = group["lr"] * sched
            weight = lr * lr
            weight_sum = group["weight_sum"] = group["weight_sum"] + weight
            ckp1 = weight / weight_sum
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad, state = p.grad, self.state[p]
                if "z" not in state:
                    state["z"] = p.clone()
                    state["v"] = torch.zeros(p.shape[0], device=p.device, dtype=torch.float32)
                    state["mom"] = torch.zeros_like(p)
                z, v, mom = state["z"], state["v"], state["mom"]
                mom.mul_(mu).add_(grad, alpha=1.0 - mu)
                P = zeropower_via_newtonschulz5(mom).to(p.dtype)
                row_ms = (P * P).mean(dim=1).float()
                v.mul_(beta2).add_(row_ms, alpha=1.0 - beta2)
                Phat = P / (v.sqrt() + eps).to(P.dtype).unsqueeze(1)
                m, n = p.shape
                eta_hat = eta_scale * lr * math.sqrt(m * n) / max(1e-12, Phat.float().norm())
                x_t = (p - (1.0 - beta) * z) / beta  # recover X_t before z update
                if decay != 0.0:
                    z.sub_(z, alpha=lr * decay)
                z.sub_(Phat, alpha=eta_hat)  # z is now Z_{t+1}
                x_tp1 = (1.0 - ckp1) * x_t + ckp1 * z
                p.copy_((1.0 - beta) * z + beta * x_tp1)
            group["k"] = k + 1
        return loss


def weights():
    generator = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter(0.3 * torch.randn(shape, generator=generator)) for shape in SHAPES]


def error(a, b):
    return float(((a - b).norm() / b.norm()).detach())


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": 0.02, "weight_decay": 0.1, "warmup_steps": 60},
        {"lr": 0.01, "weight_decay": 0.0, "warmup_steps": 60, "betas": (0.5, 0.8), "momentum": 0.95},
        {"lr": 0.01, "weight_decay": 0.5, "warmup_steps": 0, "eps": 1e-3},
        {"lr": 0.05, "weight_decay": 0.1, "warmup_steps": 250, "betas": (0.98, 0.95)},
    ],
)
def test_same_as_the_listing(settings):
    """Y at every step, and X through the listing's eval() and our averaged(), after which both go on at Y."""
    theirs, ours = weights(), weights()
    listing = NorMuonScheduleFree(theirs, **settings)
    listing.train()
    optimizer = anytime.SFNorMuon(ours, polar="newton-schulz", polar_dtype=torch.float32, **settings)
    generator = torch.Generator().manual_seed(4)
    signal = [torch.randn(shape, generator=generator) for shape in SHAPES]
    for t in range(1, STEPS + 1):
        for p, q, A in zip(theirs, ours, signal, strict=True):
            p.grad = A + torch.randn(A.shape, generator=generator)
            q.grad = p.grad.clone()
        listing.step()
        optimizer.step()
        assert max(error(q, p) for p, q in zip(theirs, ours, strict=True)) <= 1e-5, f"Y at step {t}"
        if t % 50 == 0:
            Y = [p.detach().clone() for p in theirs]
            listing.eval()
            with optimizer.averaged():
                assert max(error(q, p) for p, q in zip(theirs, ours, strict=True)) <= 1e-5, f"X at step {t}"
                assert all(error(p, y) > 1e-4 for p, y in zip(theirs, Y, strict=True))
            listing.train()


def test_defaults_are_the_listings():
    """But for the rate and the decay, where the paper's tables differ from its listing."""
    p = weights()
    theirs, ours = NorMuonScheduleFree(p).param_groups[0], anytime.SFNorMuon(p).param_groups[0]
    for key in ("betas", "momentum", "eps", "warmup_steps"):
        assert ours[key] == theirs[key]
    assert ours["update_rms"] == theirs["eta_scale"]
    assert (ours["lr"], ours["weight_decay"], ours["decay_at"]) == (0.008, 0.05, "z")
