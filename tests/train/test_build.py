"""Optimizers and rates from settings."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anytime.train.build import OPTIMIZERS, Options, Rates, build_optimizer, optimizer_class, settled
from anytime.train.config import Config, Cooldown, OptimizerConfig, merged
from anytime.train.errors import UserError
from anytime.train.model import GPT, ModelConfig

MODEL = ModelConfig(vocabulary=64, layers=1, width=32, head=16, context=8)


def built(**options):
    return build_optimizer(GPT(MODEL), OptimizerConfig(**options))


def by_rule(optimizer, rule: str) -> dict:
    (group,) = [g for g in optimizer.param_groups if g["rule"] == rule]
    return group


# --------------------------------------------------------------- optimizers


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_by_its_name(name):
    kind = OPTIMIZERS[name]
    for said in (name, name.lower(), name.upper(), name.replace("SF", "SF-"), name.replace("SF", "sf_")):
        assert optimizer_class(said) is kind
    optimizer = built(name=name.lower(), lr=0.125, warmup_steps=3)
    assert type(optimizer) is kind
    assert {g["lr"] for g in optimizer.param_groups} == {0.125}
    assert {g["warmup_steps"] for g in optimizer.param_groups} == {3}


@pytest.mark.parametrize(
    ("name", "hint"), [("SFNorMoun", "'SFNorMuon'"), ("adam-w", "AdamW"), ("adan", "'AdamW'"), ("zzzz", None)]
)
def test_an_unknown_name_names_the_nearest_and_all(name, hint):
    if name == "adam-w":
        assert optimizer_class(name).__name__ == hint
        return
    with pytest.raises(UserError) as found:
        optimizer_class(name)
    assert f"optimizer.name is {name!r}" in str(found.value)
    assert (f"did you mean {hint}?" in str(found.value)) == (hint is not None)
    for known in OPTIMIZERS:
        assert known in str(found.value)


def test_defaults_are_the_classes_own():
    for name, kind in OPTIMIZERS.items():
        ours, theirs = built(name=name), kind(GPT(MODEL))
        for a, b in zip(ours.param_groups, theirs.param_groups, strict=True):
            keys = set(a) - {"params"}
            assert {k: a[k] for k in keys} == {k: b[k] for k in keys}


def test_options_arrive_in_the_groups():
    optimizer = built(
        lr=0.01, betas=(0.5, 0.6), momentum=0.7, eps=1e-6, weight_decay=0.3, decay_at="y", row_norm=False,
        cautious=True, nesterov=True, polar="quintic", polar_dtype="bfloat16", momentum_dtype="bfloat16",
        momentum_growth=0.3, momentum_growth_start=8,
        scaling="aspect", update_rms=0.1, averaging_power=2.0, averaging_warmup=5, beta_growth=0.4, beta_growth_start=9,
        decay_fading=11, adam_lr=0.02, adam_weight_decay=0.04, adam_betas=(0.1, 0.2), adam_eps=1e-5, adam_decay_at="z",
        adam_bias_correction="moment", rate_fall=0.2, rate_fall_start=12,
    )  # fmt: skip
    matrix, rest = by_rule(optimizer, "normuon"), by_rule(optimizer, "sf-adamw")
    shared = {"averaging_power": 2.0, "averaging_warmup": 5, "beta_growth": 0.4, "beta_growth_start": 9}
    shared |= {"decay_fading": 11, "rate_fall": 0.2, "rate_fall_start": 12}
    wanted = {
        "lr": 0.01, "betas": (0.5, 0.6), "momentum": 0.7, "eps": 1e-6, "weight_decay": 0.3, "decay_at": "y",
        "row_norm": False, "nesterov": True, "polar": "quintic", "polar_dtype": torch.bfloat16,
        "momentum_dtype": torch.bfloat16, "scaling": "aspect", "update_rms": 0.1, "cautious": True,
        "momentum_growth": 0.3, "momentum_growth_start": 8, **shared,
    }  # fmt: skip
    assert {k: matrix[k] for k in wanted} == wanted
    wanted = {
        "lr": 0.02, "weight_decay": 0.04, "betas": (0.1, 0.2), "eps": 1e-5, "decay_at": "z",
        "bias_correction": "moment", **shared,
    }  # fmt: skip
    assert {k: rest[k] for k in wanted} == wanted


def test_other_classes_options_arrive_too():
    assert by_rule(built(name="SFMuon", beta=0.3), "muon")["beta"] == 0.3
    assert by_rule(built(name="NorMuon", beta2=0.3), "normuon")["beta2"] == 0.3
    group = by_rule(built(name="SFSpectralSGD", projection="spectral", radius=2.0), "spectral-sgd")
    assert (group["projection"], group["radius"]) == ("spectral", 2.0)
    assert by_rule(built(name="SFAdamW", bias_correction="moment"), "sf-adamw")["bias_correction"] == "moment"


def test_none_is_none():
    optimizer = built(decay_at="none", scaling="none", adam_decay_at="none", adam_bias_correction="none")
    matrix, rest = by_rule(optimizer, "normuon"), by_rule(optimizer, "sf-adamw")
    assert [matrix["decay_at"], matrix["scaling"], rest["decay_at"], rest["bias_correction"]] == [None] * 4
    assert by_rule(built(name="AdamW", bias_correction="none"), "adamw")["bias_correction"] is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "AdamW", "momentum": 0.9}, "AdamW has no option 'momentum'"),
        ({"name": "NorMuon", "betas": (0.9, 0.9)}, "NorMuon has no option 'betas'"),
        ({"name": "NorMuon", "averaging_power": 1.0}, "NorMuon has no option 'averaging_power'"),
        ({"name": "SFSpectralSGD", "row_norm": True}, "no option 'row_norm'"),
        ({"name": "SFAdamW", "adam_lr": 0.1}, "SFAdamW has no option 'adam_lr'"),
        ({"beta": 0.9}, "SFNorMuon has no option 'beta'"),
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": math.inf}, "lr is inf"),
        ({"betas": (0.9, 1.5)}, "betas is"),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
        ({"polar": "none"}, "polar is None"),
        ({"polar": "svdd"}, "polar is 'svdd'"),
        ({"scaling": "big"}, "scaling is 'big'"),
        ({"name": "SFSpectralSGD", "projection": "spectral"}, "needs a radius"),
        ({"adam_eps": -1.0}, "eps is -1.0"),
    ],
)
def test_a_wrong_option_is_named(options, words):
    with pytest.raises(UserError) as found:
        built(**options)
    assert words in str(found.value)
    assert str(found.value).startswith("optimizer: ")
    assert "\n" not in str(found.value)


# ------------------------------------------------------------------ horizon


def scheduled(schedule: str, until: str = "", **options) -> Config:
    optimizer = OptimizerConfig(name="NorMuon", schedule=schedule, **options)
    return Config(model=MODEL, optimizer=optimizer, until=until, batch_size=3)


def groups(model: torch.nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    optimizer = build_optimizer(model, config)
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


@pytest.mark.parametrize("recipe", ["paper", "anytime"])
@pytest.mark.parametrize("options", [{}, {"lr": 0.1, "warmup_steps": 300, "weight_decay": 0.3, "nesterov": False}])
def test_what_a_recipe_fills_in_is_in_the_settings(recipe, options):
    """And makes the optimizer that the recipe makes; what is given stays."""
    config = Config(model=MODEL, optimizer=OptimizerConfig(recipe=recipe, **options))
    found = settled(config)
    assert found.optimizer.momentum == 0.8
    assert found.optimizer.lr == options.get("lr", 0.02 if recipe == "anytime" else 0.008)
    assert found.optimizer.rate_fall == (0.3 if recipe == "anytime" else None)
    assert {key: getattr(found.optimizer, key) for key in options} == options
    assert settled(found) == found
    model = GPT(MODEL)
    assert groups(model, found.optimizer) == groups(model, config.optimizer)
    other = merged(found, {"optimizer": {"recipe": "paper" if recipe == "anytime" else "anytime"}})
    assert (other.optimizer.momentum, other.optimizer.adam_lr) == (None, None)  # another recipe's


def test_a_recipe_of_another_optimizer_is_its_class_to_refuse():
    config = Config(model=MODEL, optimizer=OptimizerConfig(name="SFAdamW", recipe="anytime"))
    assert settled(config) is config
    with pytest.raises(UserError, match="recipe"):
        build_optimizer(GPT(MODEL), config.optimizer)


@pytest.mark.parametrize("clip", [0.0, -1.0, float("inf"), float("nan")])
def test_a_norm_to_clip_at_is_above_zero(clip):
    """A negative one would turn gradients round."""
    with pytest.raises(UserError, match=r"optimizer.clip is .*must be above 0"):
        settled(Config(optimizer=OptimizerConfig(clip=clip)))


def test_a_constant_rate_has_no_horizon():
    config = Config(until="600 steps")
    assert settled(config) is config
    assert Rates(config).last_step is None
    with pytest.raises(UserError, match=r"horizon is given but .* is 'constant'"):
        settled(Config(optimizer=OptimizerConfig(horizon=5)))


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize(
    ("until", "horizon"), [("600 steps", 600), ("240 tokens", 10), ("241 tokens", 11), ("1e3 steps", 1000)]
)
def test_the_horizon_is_where_the_run_ends(schedule, until, horizon):
    """A step is 3 sequences of 8 tokens."""
    found = settled(scheduled(schedule, until))
    assert found.optimizer.horizon == horizon
    assert found.until == until
    assert Rates(found).last_step == horizon
    assert settled(found) == found


def test_a_stated_horizon_stays_when_the_end_moves():
    assert settled(scheduled("linear", "900 steps", horizon=600)).optimizer.horizon == 600


@pytest.mark.parametrize("until", ["", "2 h", "loss 3"])
def test_a_schedule_needs_its_last_step(until):
    with pytest.raises(UserError, match=r"the schedule 'cosine' needs its last step: say --until"):
        settled(scheduled("cosine", until))
    assert settled(scheduled("cosine", until, horizon=7)).optimizer.horizon == 7


def test_a_horizon_lies_behind_the_warmup():
    with pytest.raises(UserError, match="horizon is 5, must be above warmup_steps, which is 5"):
        settled(scheduled("linear", "5 steps", warmup_steps=5))
    assert settled(scheduled("linear", "6 steps", warmup_steps=5)).optimizer.horizon == 6
    with pytest.raises(UserError, match="horizon is 0"):
        settled(scheduled("linear", horizon=0))


@pytest.mark.parametrize("part", [0.0, -0.1, 1.5, math.nan])
def test_the_part_that_decays(part):
    with pytest.raises(UserError, match="decay_part is"):
        settled(scheduled("wsd", "10 steps", decay_part=part))


# -------------------------------------------------------------------- rates


def factors(config: Config, count: int) -> list[float]:
    return [Rates(config).factor(done) for done in range(count)]


def test_cosine():
    found = factors(scheduled("cosine", horizon=50, warmup_steps=10), 70)
    wanted = [1.0] * 10 + [0.5 * (1 + math.cos(math.pi * i / 40)) for i in range(40)] + [0.0] * 20
    assert found == pytest.approx(wanted, abs=1e-12)


def test_linear():
    found = factors(scheduled("linear", horizon=50, warmup_steps=10), 70)
    assert found == pytest.approx([1.0] * 10 + [1 - i / 40 for i in range(40)] + [0.0] * 20, abs=1e-12)


def test_wsd():
    found = factors(scheduled("wsd", horizon=100, warmup_steps=10, decay_part=0.3), 130)
    assert found == pytest.approx([1.0] * 70 + [1 - math.sqrt(i / 30) for i in range(30)] + [0.0] * 30, abs=1e-12)


def test_wsd_that_would_begin_in_the_warmup_begins_after_it():
    found = factors(scheduled("wsd", horizon=20, warmup_steps=15, decay_part=1.0), 25)
    assert found == pytest.approx([1.0] * 15 + [1 - math.sqrt(i / 5) for i in range(5)] + [0.0] * 5, abs=1e-12)


def test_a_power_never_ends():
    config = settled(scheduled("power", "50 steps", warmup_steps=10, decay_steps=20, decay_power=0.5))
    assert config.optimizer.horizon is None
    assert Rates(config).last_step is None
    assert factors(config, 12) == pytest.approx([1.0] * 11 + [(1 + 1 / 20) ** -0.5])
    assert Rates(config).factor(10 + 3 * 20) == pytest.approx(0.5)
    assert factors(scheduled("power", decay_power=0.0), 9) == [1.0] * 9
    with pytest.raises(UserError, match=r"horizon is given but .* is 'power', which has no end"):
        settled(scheduled("power", horizon=5))
    for wrong in ({"decay_steps": 0}, {"decay_power": -0.1}):
        with pytest.raises(UserError, match=r"decay_steps is .*, must be at least 1, and decay_power is"):
            settled(scheduled("power", **wrong))


def test_a_cooldown_falls_to_zero_from_where_it_starts():
    config = replace(Config(), cooldown=Cooldown(start=30, steps=4))
    assert factors(config, 37) == [1.0] * 30 + [1.0, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0]
    assert Rates(config).last_step == 34


def test_a_cooldown_of_a_schedule():
    config = replace(scheduled("linear", horizon=40), cooldown=Cooldown(start=10, steps=10))
    assert Rates(config).factor(15) == pytest.approx(0.5 * (1 - 15 / 40))
    assert Rates(config).last_step == 20
    assert Rates(replace(config, cooldown=Cooldown(30, 20))).last_step == 40


@given(
    schedule=st.sampled_from(["cosine", "linear", "wsd"]),
    horizon=st.integers(1, 2000),
    warmup=st.integers(0, 1999),
    part=st.floats(1e-4, 1.0),
)
def test_rates_fall_from_one_to_zero(schedule, horizon, warmup, part):
    """Never up, full as long as it warms up, above zero until the last step and zero from there on."""
    try:
        config = settled(scheduled(schedule, horizon=horizon, warmup_steps=warmup, decay_part=part))
    except UserError:
        assert horizon <= warmup
        return
    rates = Rates(config)
    found = [rates.factor(done) for done in {0, warmup, horizon // 2, horizon - 1, horizon, horizon + 1}]
    assert all(0 <= factor <= 1 for factor in found)
    assert rates.factor(0) == rates.factor(warmup) == 1
    assert rates.factor(horizon - 1) > 0
    assert rates.factor(horizon) == rates.factor(horizon + 5) == 0
    middle = sorted({warmup, (warmup + horizon) // 2, horizon - 1, horizon})
    values = [rates.factor(done) for done in middle]
    assert values == sorted(values, reverse=True)


# ------------------------------------------------------------------ options


def test_options_scale_the_rate_of_every_group():
    optimizer = built(lr=0.5, adam_lr=0.25)
    options = Options(optimizer)
    options.apply(0.5)
    assert by_rule(optimizer, "normuon")["lr"] == 0.25
    assert by_rule(optimizer, "sf-adamw")["lr"] == 0.125
    options.apply(1.0)  # of what is stated, not of what is there
    assert by_rule(optimizer, "normuon")["lr"] == 0.5


def test_the_rate_that_is_told_is_that_of_the_setting_lr():
    assert Options(built(lr=0.5)).apply(0.5) == 0.25
    assert Options(built(lr=0.5, adam_lr=0.125)).apply(0.5) == 0.25


def test_options_are_the_settings_whatever_a_state_brought():
    """A branch with another rate loads the old state, groups included."""
    model = GPT(MODEL)

    def of(**options):
        return build_optimizer(model, OptimizerConfig(**options))

    old = of(lr=0.5, weight_decay=0.9, betas=(0.1, 0.2), averaging_power=7.0, decay_at="y")
    new = of(lr=0.25, weight_decay=0.1, betas=(0.3, 0.4), averaging_power=2.0, averaging_warmup=6, decay_at="none")
    options = Options(new)
    wanted = copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in new.param_groups])
    new.load_state_dict(old.state_dict())
    assert by_rule(new, "normuon")["lr"] == 0.5  # it does bring them
    assert options.apply(1.0) == 0.25
    assert [{k: v for k, v in g.items() if k != "params"} for g in new.param_groups] == wanted
    assert options.apply(0.5) == 0.125


def test_the_rate_that_is_said_is_the_rate_of_the_step():
    """The optimizer moves by lr · factor: at a factor of 0 nothing does."""
    model = GPT(MODEL)
    model.initialize(0)
    optimizer = build_optimizer(model, OptimizerConfig(name="NorMuon", lr=0.1))
    options = Options(optimizer)
    moves = []
    for factor in (1.0, 0.5, 0.0):
        tokens = torch.arange(8)[None]
        optimizer.zero_grad()
        model(tokens, tokens).backward()
        options.apply(factor)
        before = model.blocks[0].down.weight.detach().clone()
        optimizer.step()
        moves.append(float((model.blocks[0].down.weight.detach() - before).square().mean().sqrt()))
    assert moves == pytest.approx([0.1 * 0.2, 0.05 * 0.2, 0.0], rel=0.05)
