"""SFNorMuon by a recipe's name: what it fills in, what it leaves alone, and what it does."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from torch import nn

import anytime
from anytime.optim.sf_spectral import RECIPES

PAPER = {"betas": (0.9, 0.95), "momentum": 0.8, "weight_decay": 0.05, "averaging_power": 0.0, "beta_growth": 0.0}
PAPER |= {"decay_fading": 0, "averaging_warmup": 0, "momentum_growth": 0.0, "nesterov": False, "rate_fall": 0.0}


def groups(**options):
    matrix, rest = anytime.SFNorMuon(nn.Linear(4, 4), **options).param_groups
    assert (matrix["rule"], rest["rule"]) == ("normuon", "sf-adamw")
    return matrix, rest


def test_without_a_word_it_is_the_papers():
    for options in ({}, {"recipe": "paper"}):
        matrix, rest = groups(**options)
        assert {key: matrix[key] for key in PAPER} == PAPER
        assert rest["betas"] == (0.95, 0.99)
        assert rest["weight_decay"] == 0.05


@pytest.mark.parametrize("warmup", [0, 40, 100, 150, 2000])
@pytest.mark.parametrize("lr", [1e-4, 0.008, 0.5])
def test_the_anytime_recipe_follows_from_rate_and_warmup(lr, warmup):
    start = max(warmup, 100)
    wanted = {"betas": (0.4, 0.95), "momentum": 0.8, "averaging_power": 3.0, "beta_growth": 0.4}
    wanted |= {"momentum_growth": 0.3, "momentum_growth_start": start, "nesterov": True}
    wanted |= {"beta_growth_start": start, "decay_fading": start, "averaging_warmup": 0}
    wanted |= {"rate_fall": 0.3, "rate_fall_start": start}
    matrix, rest = groups(recipe="anytime", lr=lr, warmup_steps=warmup)
    assert {key: matrix[key] for key in wanted} == wanted
    fades = lr * matrix["weight_decay"] * matrix["decay_fading"]
    assert fades == pytest.approx(2) if lr * start > 4 else matrix["weight_decay"] == 0.5
    assert fades <= 2 * (1 + 1e-12)
    assert (rest["betas"], rest["weight_decay"]) == ((0.4, 0.99), 0.0)
    assert (matrix["lr"], rest["lr"]) == (lr, min(lr, 0.03))
    for key in ("averaging_power", "beta_growth", "beta_growth_start", "decay_fading", "rate_fall", "rate_fall_start"):
        assert rest[key] == matrix[key]


@pytest.mark.parametrize(
    ("key", "value"),
    [("betas", (0.9, 0.95)), ("momentum", 0.7), ("weight_decay", 0.05), ("weight_decay", 0.0), ("averaging_power", 0.0),
     ("momentum_growth", 0.0), ("momentum_growth_start", 7), ("nesterov", False), ("beta_growth", 0.0),
     ("beta_growth_start", 7), ("decay_fading", 0), ("averaging_warmup", 9), ("rate_fall", 0.0),
     ("rate_fall_start", 7)],
)  # fmt: skip
def test_what_is_given_is_kept(key, value):
    """Even where it is what the other recipe would have filled in."""
    recipe, plain = groups(recipe="anytime", **{key: value})[0], groups(recipe="anytime")[0]
    assert recipe[key] == value != plain[key]
    assert {k: v for k, v in recipe.items() if k != "params" and v != plain[k]} == {key: value}


@pytest.mark.parametrize("lr", [0.05, torch.tensor(0.05)])
def test_the_embeddings_rate_that_is_given_is_kept(lr):
    assert groups(recipe="anytime", lr=lr, adam_lr=0.04)[1]["lr"] == 0.04
    assert groups(recipe="anytime", lr=lr)[1]["lr"] == pytest.approx(0.03)
    assert groups(recipe="paper", lr=lr)[1]["lr"] == lr


def test_a_rate_in_a_tensor_stays_one():
    """So that it may be changed where it is; each group has its own."""
    lr = torch.tensor(0.05)
    matrix, rest = groups(recipe="anytime", lr=lr)
    matrix["lr"].fill_(0.01)
    assert isinstance(rest["lr"], torch.Tensor)
    assert rest["lr"].item() == pytest.approx(0.03)


def test_a_rate_of_zero_or_in_a_tensor():
    assert groups(recipe="anytime", lr=0.0)[0]["weight_decay"] == 0.5
    assert groups(recipe="anytime", lr=torch.tensor(0.5))[0]["weight_decay"] == 2 / (0.5 * 100)


@pytest.mark.parametrize(("recipe", "lr", "steps"), [("paper", 0.008, 2000), ("anytime", 0.02, 10)])
def test_a_rate_or_a_warmup_that_is_not_given(recipe, lr, steps):
    """A run whose end nobody knows may be over before the paper's warmup is."""
    for group in groups(recipe=recipe):
        assert (group["lr"], group["warmup_steps"]) == (lr, steps)
    assert groups(recipe=recipe, warmup_steps=0, lr=0.0)[0]["warmup_steps"] == 0
    given = groups(recipe=recipe, warmup_steps=steps, lr=lr)
    assert [group | {"params": 0} for group in groups(recipe=recipe)] == [group | {"params": 0} for group in given]


@pytest.mark.parametrize("warmup", [0, 100, 2000])
def test_at_a_low_rate_weights_stay(warmup):
    """Fine-tuning begins with weights that are good: a long run at a hundredth of the usual rate leaves them."""
    p = nn.Parameter(torch.ones(3, 3, dtype=torch.float64))
    optimizer = anytime.SFNorMuon([p], lr=1e-4, recipe="anytime", warmup_steps=warmup)
    for _ in range(1000):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    assert optimizer.iterates(p).z.min() > 0.97


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="recipe is 'any'; it must be one of 'paper', 'anytime'"):
        groups(recipe="any")
    with pytest.raises(ValueError, match="lr is -1; it must be a number"):
        groups(recipe="anytime", lr=-1)
    with pytest.raises(ValueError, match=r"warmup_steps is 1\.5"):
        groups(recipe="anytime", warmup_steps=1.5)
    with pytest.raises(TypeError, match="SFMuon has no option 'recipe'"):
        anytime.SFMuon(nn.Linear(4, 4), recipe="anytime")


def test_every_recipe_is_documented():
    assert all(f'"{name}"' in (inspect.getdoc(anytime.SFNorMuon) or "") for name in RECIPES)


def test_the_fast_iterate_forgets_in_proportion_to_time():
    """Without an update z shrinks as the product of 1 − 2/(S + t): to about (S / (S + t))² after the warmup."""
    p = nn.Parameter(torch.ones(3, 3, dtype=torch.float64))
    optimizer = anytime.SFNorMuon([p], lr=0.05, recipe="anytime", warmup_steps=0)
    for _ in range(1200):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    z = optimizer.iterates(p).z[0, 0].item()
    assert z == pytest.approx(math.prod(1 - 2 / (100 + t) for t in range(1, 1201)), rel=1e-12)
    assert z == pytest.approx((100 / 1300) ** 2, rel=0.05)
