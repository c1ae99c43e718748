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
    assert (rest["betas"], rest["weight_decay"]) == ((0.9, 0.99), 0.0)  # a bias
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


class Net(nn.Module):
    """A table, matrices, and vectors before, between and after them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gain = nn.Parameter(torch.ones(6))
        self.embedding = nn.Embedding(9, 6)
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6)

    def forward(self, tokens):
        return self.last(self.norm(self.first(self.gain * self.embedding(tokens)).tanh()))


def betas_by_name(optimizer):
    return {name: group["betas"] for group in optimizer.param_groups for name in group["param_names"]}


VECTORS = {"gain", "first.bias", "norm.weight", "norm.bias", "last.bias"}


def test_vectors_begin_at_another_beta():
    def found(**options):
        return betas_by_name(anytime.SFNorMuon(Net(), **options))

    assert {name for name, betas in found(recipe="anytime").items() if betas == (0.9, 0.99)} == VECTORS
    assert found(recipe="anytime")["embedding.weight"] == (0.4, 0.99)
    assert {betas for name, betas in found().items() if name in VECTORS} == {(0.95, 0.99)}
    given = found(recipe="anytime", adam_vector_betas=(0.7, 0.9), adam_betas=(0.5, 0.8))
    assert {betas for name, betas in given.items() if name in VECTORS} == {(0.7, 0.9)}
    assert given["embedding.weight"] == (0.5, 0.8)
    without = found(recipe="anytime", adam_vector_betas=None)
    assert {without[name] for name in VECTORS} == {without["embedding.weight"]} == {(0.4, 0.99)}
    assert len(anytime.SFNorMuon(Net(), recipe="anytime", adam_vector_betas=None).param_groups) == 2
    alone = betas_by_name(anytime.SFAdamW(Net(), vector_betas=(0.7, 0.9)))
    assert {name for name, betas in alone.items() if betas == (0.7, 0.9)} == VECTORS


def test_vectors_whose_betas_are_given_keep_them():
    rules = {"gain": {"betas": (0.1, 0.2)}, "norm.*": {"vector_betas": (0.3, 0.4)}}
    found = betas_by_name(anytime.SFNorMuon(Net(), recipe="anytime", rules=rules))
    assert (found["gain"], found["norm.bias"], found["first.bias"]) == ((0.1, 0.2), (0.3, 0.4), (0.9, 0.99))
    net = Net()
    groups = [{"params": list(net.named_parameters()), "adam_betas": (0.5, 0.6)}]
    found = betas_by_name(anytime.SFNorMuon(groups, recipe="anytime"))
    assert {found[name] for name in (*VECTORS, "embedding.weight")} == {(0.5, 0.6)}


@pytest.mark.parametrize("betas", [(0.9,), (1.0, 0.5), 0.9, "a"])
def test_betas_of_vectors_that_are_none(betas):
    with pytest.raises(ValueError, match=r"adam_vector_betas is .* it must be two numbers in"):
        anytime.SFNorMuon(Net(), adam_vector_betas=betas)


@pytest.mark.parametrize("before", [{}, {"adam_vector_betas": None}])
def test_a_state_of_two_groups_or_three_is_gone_on_with(before):
    """Saved where vectors had the betas of the rest, it is regrouped; saved as it is now, it goes on bit for bit."""
    tokens = torch.arange(9)

    def steps(net, optimizer, count):
        for _ in range(count):
            net(tokens).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    net = Net()
    optimizer = anytime.SFNorMuon(net, recipe="anytime", **before)
    steps(net, optimizer, 3)
    other = Net()
    other.load_state_dict(net.state_dict())
    again = anytime.SFNorMuon(other, recipe="anytime")
    again.load_state_dict(optimizer.state_dict())
    assert betas_by_name(again)["gain"] == (0.9, 0.99)
    if not before:
        assert {group.get("vector_betas") for group in again.param_groups} == {(0.9, 0.99), None}
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        for name, value in optimizer.state[p].items():
            assert torch.equal(value, again.state[q][name])
    steps(net, optimizer, 3)
    steps(other, again, 3)
    for (name, p), q in zip(net.named_parameters(), other.parameters(), strict=True):
        assert before or torch.equal(p, q), name
        assert p.isfinite().all()


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
