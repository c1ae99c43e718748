"""SFPlus against its formulas, written out; resumed, skipped, and used wrongly."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anytime
from anytime.diagnostics import Probe
from anytime.optim import fused

SHAPES = [(4, 3), (5,), (), (2, 3, 2)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"lr": 0.7, "weight_decay": 0.3, "averaging_power": 2.0, "averaging_warmup": 5, "warmup_steps": 4},
    {"polyak_beta": 0.8, "beta": 0.7, "betas": (0.8, 0.99), "eps": 1e-4, "weight_decay": 0.1},
    {"beta_anneal_steps": 11, "averaging_power": 0.5, "averaging_warmup": 2, "polyak_beta": 0.5},
    {"beta": 0.5, "beta_max": 0.99, "beta_anneal_steps": 60, "weight_decay": 0.5, "lr": 0.5},
]
each_options = pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "defaults")


def loss_of(weights: list[Tensor], step: int) -> Tensor:
    """Has a gradient everywhere, is now and then below zero, and each step has its own."""
    generator = torch.Generator().manual_seed(step)
    targets = [torch.randn(w.shape, generator=generator, dtype=w.dtype) for w in weights]
    loss = sum(((w - a).square() + 0.1 * (3 * w).cos()).sum() for w, a in zip(weights, targets, strict=True))
    return 0.3 * loss - (20 if step % 7 == 3 else 0)


def start(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(99)
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)) for s in SHAPES]


def train(params: list[nn.Parameter], optimizer: anytime.SFPlus, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(params, step)
        loss.backward()
        optimizer.step(lambda: loss)  # noqa: B023


def slowly(steps: int, lr=1.0, beta=0.9, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, warmup_steps=0, polyak_beta=0.0,
           beta_max=0.965, beta_anneal_steps=0, averaging_power=0.0, averaging_warmup=0):  # fmt: skip
    """(x, y, z) of each parameter and the rates, by the formulas and with nothing but Python's numbers between."""
    y = [p.detach() for p in start()]
    x, z = [w.clone() for w in y], [w.clone() for w in y]
    m, v = [torch.zeros_like(w) for w in y], [torch.zeros_like(w) for w in y]
    norm = peak = total = 0.0
    rates = []
    for k in range(steps):
        at = [w.clone().requires_grad_() for w in y]
        loss = loss_of(at, k)
        grads = torch.autograd.grad(loss, at)
        b = beta
        if beta_anneal_steps:
            done = min(k / beta_anneal_steps, 1)
            b = 1 - math.exp(math.log(1 - beta) * (1 - done) + math.log(1 - beta_max) * done)
        product = sum(float((g * (c - a)).sum()) for g, c, a in zip(grads, z, x, strict=True))
        size = sum(float(g.abs().sum()) for g in grads) * math.sqrt(math.pi / 2)
        norm = (polyak_beta * norm + (1 - polyak_beta) * size) / (1 - polyak_beta ** (k + 1))
        rate = lr * max(0.0, float(loss.detach()) + b * product) / norm
        rate *= min(1, (k + 1) / warmup_steps) if warmup_steps else 1
        peak = max(peak, rate)
        c = 1.0
        if k >= averaging_warmup:
            weight = (k + 1) ** averaging_power * peak**2
            total += weight
            c = weight / total
        for i, g in enumerate(grads):
            z[i] = z[i] - rate**2 * weight_decay * y[i]
            m[i] = betas[0] * m[i] + (1 - betas[0]) * g
            v[i] = betas[1] * v[i] + (1 - betas[1]) * g * g
            root = (v[i] / (1 - betas[1] ** (k + 1))).sqrt()
            z[i] = z[i] - rate * (m[i] / (1 - betas[0] ** (k + 1))) / (root + eps)
            x[i] = (1 - c) * x[i] + c * z[i]
            y[i] = b * x[i] + (1 - b) * z[i]
        rates.append(rate)
    return x, y, z, rates


def agree(params: list[nn.Parameter], optimizer: anytime.SFPlus, steps: int, options: dict[str, Any]) -> None:
    for p, *expected in zip(params, *slowly(steps, **options)[:3], strict=True):
        for ours, theirs in zip(optimizer.iterates(p), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@each_options
def test_the_formulas(options: dict[str, Any]) -> None:
    params = start()
    optimizer = anytime.SFPlus(params, **options)
    for steps in (1, 2, 12, 40):
        train(params, optimizer, range(int(optimizer.state[params[0]]["step"]), steps))
        agree(params, optimizer, steps, options)
    rates = slowly(40, **options)[3]
    assert any(rate == 0 for rate in rates)
    assert all(float(optimizer.state[p]["peak"]) == pytest.approx(max(rates), rel=1e-12) for p in params)


@each_options
def test_resumed_in_the_middle(options: dict[str, Any]) -> None:
    params = start()
    optimizer = anytime.SFPlus(params, **options)
    train(params, optimizer, range(17))
    saved = copy.deepcopy(optimizer.state_dict())
    others = [nn.Parameter(p.detach().clone()) for p in params]
    other = anytime.SFPlus(others, **options)
    other.load_state_dict(saved)
    train(others, other, range(17, 35))
    agree(others, other, 35, options)
    train(params, optimizer, range(17, 35))
    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))


def test_groups_share_alpha_and_have_rates_of_their_own() -> None:
    params = start()
    first, rest = {"params": params[:2], "lr": 0.5, "weight_decay": 10.0}, {"params": params[2:]}
    optimizer = anytime.SFPlus([first, rest], averaging_power=1.0)
    train(params, optimizer, range(9))
    states = [optimizer.state[p] for p in params]
    assert len({float(s["polyak"]) for s in states}) == 1
    assert float(states[0]["peak"]) == 0.5 * float(states[2]["peak"])


def test_a_gradient_in_bfloat16_counts_in_full() -> None:
    """The norm of many small entries is not rounded away."""
    p = nn.Parameter(torch.zeros(4097, dtype=torch.bfloat16))
    optimizer = anytime.SFPlus([p])
    p.grad = torch.ones_like(p)
    optimizer.step(lambda: 1.0)
    assert float(optimizer.state[p]["norm"]) == pytest.approx(4097 * math.sqrt(math.pi / 2), rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_loss_is_skipped_like_a_bad_gradient(bad: float) -> None:
    params, others = start(), start()
    optimizer, other = anytime.SFPlus(params), anytime.SFPlus(others)
    train(params, optimizer, range(3))
    train(others, other, range(3))
    optimizer.step(lambda: bad)
    assert optimizer.skipped_steps == 1
    train(params, optimizer, range(3, 6))
    train(others, other, range(3, 6))
    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))
    strict = anytime.SFPlus(params, on_nonfinite="raise")
    with pytest.raises(RuntimeError, match="the loss or a gradient holds inf or NaN"):
        strict.step(lambda: bad)


def test_what_a_probe_says_of_a_step() -> None:
    weight = nn.Parameter(torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    optimizer = anytime.SFPlus([weight], weight_decay=20.0)
    for step in range(4):
        loss = loss_of([weight], step)
        (weight.grad,) = torch.autograd.grad(loss, [weight])
        probe, before = Probe(optimizer), optimizer.iterates(weight)
        optimizer.step(lambda: loss)  # noqa: B023
    state = optimizer.state[weight]
    eta, moment = float(state["polyak"]), state["momentum"] / (1 - 0.9**4)
    U = moment / ((state["second_moment"] / (1 - 0.95**4)).sqrt() + 1e-8)
    torch.testing.assert_close(before.z - optimizer.iterates(weight).z, eta * U + eta**2 * 20 * before.y)
    assert probe.read()["update_rms"] == pytest.approx(float(U.square().mean().sqrt()))


@pytest.mark.parametrize(("name", "taken"), [("AdamW", True), ("SFPlus", False)])
def test_the_kernels_do_not_take_it(name: str, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "available", lambda device: True)
    p = nn.Parameter(torch.ones(4, 3))
    optimizer = getattr(anytime, name)([p])
    p.grad = torch.ones_like(p)
    ((group, (member,)),) = optimizer._work()
    assert fused.takes(group, member) is taken


# ------------------------------------------------------------------- wrong use


def test_a_step_without_the_loss_says_what_to_do() -> None:
    params = start()
    optimizer = anytime.SFPlus(params)
    loss_of(params, 0).backward()
    before = [p.detach().clone() for p in params]
    for step in (optimizer.step, lambda: optimizer.step(lambda: None)):
        with pytest.raises(
            RuntimeError, match=r"SFPlus\.step\(\) needs the loss: call optimizer\.step\(lambda: loss\)"
        ):
            step()
    with pytest.raises(RuntimeError, match=r"needs the loss as one number, not of shape \(3,\)"):
        optimizer.step(lambda: torch.ones(3))
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    optimizer.step(lambda: torch.ones(1))
    assert not torch.equal(params[0], before[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"polyak_beta": 1.0}, r"polyak_beta is 1\.0; it must be in \[0, 1\)"),
        ({"beta_max": 1.1}, r"beta_max is 1\.1; it must be in \[0, 1\]"),
        ({"beta_anneal_steps": -1}, r"beta_anneal_steps is -1; it must be a whole number in \[0, ∞\)"),
    ],
)
def test_illegal_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"SFPlus: {message}"):
        anytime.SFPlus(start(), **options)


def test_growth_is_not_an_option() -> None:
    with pytest.raises(TypeError, match="SFPlus has no option 'beta_growth'"):
        anytime.SFPlus(start(), beta_growth=0.4)  # type: ignore[call-arg]
