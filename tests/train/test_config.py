"""Settings: precedence, types, TOML there and back, presets, and when a run ends."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import types
import typing
from dataclasses import replace
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anytime.optim import keywords
from anytime.optim.options import CHECKS
from anytime.optim.sf_spectral import RECIPES
from anytime.train.build import OPTIMIZERS, OURS
from anytime.train.config import (
    FILLED,
    FIXED,
    Config,
    Cooldown,
    DataConfig,
    OptimizerConfig,
    ParallelConfig,
    Until,
    changed,
    flat,
    merged,
    nearest,
    plain,
    read_toml,
    to_toml,
)
from anytime.train.errors import UserError
from anytime.train.model import ModelConfig
from anytime.train.presets import PRESETS, preset

# ------------------------------------------------------------------ merging


def test_later_values_win_and_the_rest_stays():
    first = merged(Config(), {"seed": 1, "model": {"width": 256, "layers": 3}, "optimizer": {"lr": 0.1}})
    both = merged(first, {"model": {"layers": 5}, "optimizer": {"clip": 1}, "until": "5 steps"})
    assert (both.seed, both.until) == (1, "5 steps")
    assert (both.model.width, both.model.layers, both.model.head) == (256, 5, 128)
    assert (both.optimizer.lr, both.optimizer.clip) == (0.1, 1.0)
    assert first.until == ""  # what it began from is as it was


def test_another_optimizer_begins_with_its_own_options():
    """Those that a preset chose for the first are not for the second; the trainer's own stay."""
    first = merged(Config(), {"optimizer": {"betas": [0.4, 0.95], "lr": 0.1, "warmup_steps": 7, "clip": 1}})
    same = merged(first, {"optimizer": {"name": "sf-normuon", "momentum": 0.5}})
    assert same.optimizer == replace(first.optimizer, name="sf-normuon", momentum=0.5)
    other = merged(first, {"optimizer": {"name": "AdamW", "eps": 1e-6}})
    assert other.optimizer == OptimizerConfig(name="AdamW", eps=1e-6, warmup_steps=7, clip=1.0)


def test_merging_nothing_changes_nothing():
    assert merged(Config(seed=4), {}) == Config(seed=4)
    assert merged(Config(seed=4), {"model": {}}) == Config(seed=4)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"seed": True}, "seed is True, must be a whole number"),
        ({"seed": 1.0}, "seed is 1.0, must be a whole number"),
        ({"seed": "1"}, "seed is '1', must be a whole number"),
        ({"seed": None}, "seed is None, must be a whole number"),
        ({"report": 1}, "report is 1, must be true or false"),
        ({"run": 5}, "run is 5, must be a text"),
        ({"optimizer": {"lr": "0.1"}}, "optimizer.lr is '0.1', must be a number"),
        ({"optimizer": {"lr": True}}, "optimizer.lr is True, must be a number"),
        ({"optimizer": {"warmup_steps": 2.5}}, "optimizer.warmup_steps is 2.5, must be a whole number"),
        ({"optimizer": {"name": 5}}, "optimizer.name is 5, must be a text"),
        ({"optimizer": {"betas": [0.9]}}, "optimizer.betas is .*, must be a list of 2"),
        ({"optimizer": {"betas": [0.9, 0.9, 0.9]}}, "must be a list of 2"),
        ({"optimizer": {"betas": [0.9, "x"]}}, "optimizer.betas is .*, must be a number"),
        ({"optimizer": {"betas": 0.9}}, "must be a list"),
        ({"optimizer": {"betas": "ab"}}, "must be a list"),
        ({"optimizer": {"decay_at": "x"}}, "optimizer.decay_at is 'x', must be one of 'z', 'y', 'none'"),
        ({"optimizer": {"decay_at": 1}}, "must be one of"),
        ({"compile": True}, "compile is True, must be one of 'auto', 'yes', 'no'"),
        ({"on_nan": ["stop"]}, "must be one of 'stop', 'skip'"),
        ({"eval_at": 5}, "eval_at is 5, must be a list"),
        ({"eval_at": [1, 2.5]}, "must be a whole number"),
        ({"log_to": "wandb"}, "log_to is 'wandb', must be a list"),
        ({"model": 3}, "model is 3, must be a table of settings"),
        ({"model": {"width": True}}, "model.width is True, must be a whole number"),
        ({"data": {"documents": "yes"}}, "data.documents is 'yes', must be true or false"),
    ],
)
def test_a_wrong_type_names_the_setting_the_value_and_what_it_must_be(values, words):
    with pytest.raises(UserError, match=words) as found:
        merged(Config(), values, source="my.toml")
    assert str(found.value).startswith("my.toml: ")
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"batchsize": 4}, "there is no setting 'batchsize'; did you mean 'batch_size'?"),
        ({"optimizer": {"learning_rate": 1}}, "there is no setting 'optimizer.learning_rate'"),
        ({"optimizer": {"weight_decy": 1}}, "'optimizer.weight_decy'; did you mean 'weight_decay'?"),
        ({"model": {"layer": 1}}, "there is no setting 'model.layer'; did you mean 'layers'?"),
        ({"optimiser": {"lr": 1}}, "there is no setting 'optimiser'; did you mean 'optimizer'?"),
        ({"model.width": 3}, "there is no setting 'model.width'"),
    ],
)
def test_an_unknown_key_names_the_nearest(values, words):
    with pytest.raises(UserError) as found:
        merged(Config(), values)
    assert words in str(found.value)


def test_whole_numbers_do_for_numbers_and_lists_become_tuples():
    found = merged(Config(), {"optimizer": {"lr": 1, "betas": [0, 0.5]}, "eval_at": [1, 2], "log_to": []})
    assert isinstance(found.optimizer.lr, float)
    assert found.optimizer.betas == (0.0, 0.5)
    assert all(isinstance(b, float) for b in found.optimizer.betas)
    assert found.eval_at == (1, 2)
    assert found.log_to == ()


def test_what_is_checked_is_checked_when_merged_too():
    with pytest.raises(UserError, match=r"model\.head is 7"):
        merged(Config(), {"model": {"head": 7}})
    with pytest.raises(UserError, match="batch_size is 0, must be at least 1"):
        merged(Config(), {"batch_size": 0})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 0), ("micro_batch", -1), ("eval_per_doubling", -1), ("eval_every", -1), ("eval_tokens", 0),
        ("checkpoint_every", -1), ("keep_last", 0), ("keep_every", -1), ("log_every", 0), ("diagnose_every", -1),
        ("threads", -1),
    ],
)  # fmt: skip
def test_numbers_that_are_too_small(name, value):
    with pytest.raises(UserError, match=f"{name} is {value}, must be at least {value + 1}"):
        Config(**{name: value})
    assert getattr(Config(**{name: value + 1}), name) == value + 1


def test_a_micro_batch_divides_the_batch():
    with pytest.raises(UserError, match="micro_batch is 3, must divide batch_size, which is 8"):
        Config(batch_size=8, micro_batch=3)
    assert Config(batch_size=8, micro_batch=4).sequences_at_once == 4
    assert Config(batch_size=8).sequences_at_once == 8


def test_nearest():
    assert nearest("widht", ["width", "head"]) == "; did you mean 'width'?"
    assert nearest("qqq", ["width", "head"]) == ""


# ---------------------------------------------------------------------- TOML

TEXTS = st.text(max_size=20) | st.sampled_from(
    ['a "quoted" one', "two\nlines\r\n", "tab\t", "back\\slash", "😀 🇨🇭", "é 中文", "\x00\x1f\x7f\x85\u2028", "[x]\n#"]
)
FINITE = st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([1e-8, 1e16, -0.0, 0.1, 5e-324, 1.7e308])


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        (inner,) = [a for a in arguments if a is not type(None)]
        return st.none() | values_of(inner)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return st.lists(values_of(arguments[0]), max_size=4).map(tuple)
        return st.tuples(*map(values_of, arguments))
    return {int: st.integers(1, 2**40), float: FINITE, str: TEXTS, bool: st.booleans()}[kind]


def fields_of(kind: type, **fixed: st.SearchStrategy[Any]) -> dict[str, st.SearchStrategy[Any]]:
    hints = typing.get_type_hints(kind)
    return {name: fixed[name] if name in fixed else values_of(hints[name]) for name in hints}


MODELS = st.builds(
    ModelConfig,
    **fields_of(ModelConfig, head=st.just(16), width=st.sampled_from([16, 64]), rope_base=st.floats(1.5, 1e9)),
)
CONFIGS = st.builds(
    Config,
    **fields_of(
        Config,
        model=MODELS,
        data=st.builds(DataConfig, **fields_of(DataConfig)),
        optimizer=st.builds(OptimizerConfig, **fields_of(OptimizerConfig)),
        cooldown=st.builds(Cooldown, **fields_of(Cooldown)),
        parallel=st.builds(ParallelConfig, **fields_of(ParallelConfig, timeout=st.floats(1e-3, 1e9))),
        micro_batch=st.just(0),
        until=st.sampled_from(["", "600 steps", "1e9 tokens", "loss 3.2"]),
    ),
)


@given(config=CONFIGS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_toml_there_and_back(tmp_path, config):
    path = tmp_path / "config.toml"
    path.write_bytes(to_toml(config).encode())
    assert merged(Config(), read_toml(path)) == config


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(
    "table", [{"optimizer": {"clip": 0}}, {"optimizer": {"betas": 0}}, {"model": {"rope_base": 0}}]
)
def test_a_number_that_is_none_is_refused_or_comes_back(tmp_path, table, value):
    """What a TOML file may say (inf, nan) must not make the run's own file unreadable."""
    ((name, inner),) = table.items()
    (key,) = inner
    try:
        config = merged(Config(), {name: {key: [value, value] if key == "betas" else value}})
    except UserError:
        return
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    assert repr(merged(Config(), read_toml(path))) == repr(config)


def test_toml_reads_as_a_person_writes_it(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text("until = '2 h'\n[optimizer]\nlr = 1e-3\nbetas = [0.9, 0.99]\n[model]\nlayers = 1_0\n")
    found = merged(Config(), read_toml(path))
    assert (found.until, found.model.layers) == ("2 h", 10)
    assert (found.optimizer.lr, found.optimizer.betas) == (1e-3, (0.9, 0.99))


def test_files_that_are_no_toml(tmp_path):
    missing = tmp_path / "none.toml"
    with pytest.raises(UserError, match=r"there is no file .*none\.toml"):
        read_toml(missing)
    broken = tmp_path / "broken.toml"
    broken.write_text("until = \n")
    with pytest.raises(UserError, match=r"broken.toml is not TOML: .*line 1"):
        read_toml(broken)
    broken.write_bytes(b"until = '\xff'")
    with pytest.raises(UserError, match=r"cannot read .*broken.toml"):
        read_toml(broken)
    with pytest.raises(UserError, match="cannot read"):
        read_toml(tmp_path)


def test_plain_leaves_out_what_is_not_set():
    found = plain(Config(optimizer=OptimizerConfig(betas=(0.9, 0.99))))
    assert "lr" not in found["optimizer"]
    assert found["optimizer"]["betas"] == [0.9, 0.99]
    assert found["eval_at"] == []
    assert json.loads(json.dumps(found)) == found


def test_flat():
    assert flat({"a": {"b": 1, "c": {"d": 2}}, "e": [3]}) == {"a.b": 1, "a.c.d": 2, "e": [3]}


# -------------------------------------------------------------------- presets


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_valid_and_builds_its_optimizer(name):
    from anytime.train.build import build_optimizer, settled
    from anytime.train.model import GPT

    config = settled(merged(Config(), preset(name), source=name))
    small = replace(config.model, layers=1, width=config.model.head, vocabulary=64, context=8)
    build_optimizer(GPT(small), config.optimizer)
    assert config.batch_size % config.sequences_at_once == 0


def test_presets_of_the_paper():
    """Their sizes, batch and context; the optimizer's own defaults are the paper's."""
    for name, layers, width in (("125M", 12, 768), ("772M", 36, 1280)):
        config = merged(Config(), preset(name))
        assert (config.model.layers, config.model.width, config.model.head) == (layers, width, 128)
        assert (config.model.vocabulary, config.model.context, config.batch_size) == (50304, 1024, 512)
        assert config.optimizer == OptimizerConfig()


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(UserError, match=r"there is no preset '125m'; did you mean '125M'\?; there are demo, 0.5M"):
        preset("125m")


# ---------------------------------------------------------------------- until


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("", None, 0),
        ("  ", None, 0),
        ("600 steps", "steps", 600),
        ("1 step", "steps", 1),
        ("600steps", "steps", 600),
        ("  600   Steps ", "steps", 600),
        ("1_000 steps", "steps", 1000),
        ("1,000,000 steps", "steps", 1e6),
        ("1e3 steps", "steps", 1000),
        ("1.5e3 steps", "steps", 1500),
        ("1e9 tokens", "tokens", 1e9),
        ("10b tokens", "tokens", 1e10),
        ("1.5 B tokens", "tokens", 1.5e9),
        ("10M tokens", "tokens", 1e7),
        ("3k tokens", "tokens", 3000),
        ("1 token", "tokens", 1),
        ("2 h", "seconds", 7200),
        ("2h", "seconds", 7200),
        ("1 hour", "seconds", 3600),
        ("1.5 hours", "seconds", 5400),
        ("10 min", "seconds", 600),
        ("1 minute", "seconds", 60),
        ("10 minutes", "seconds", 600),
        ("30 s", "seconds", 30),
        ("1 second", "seconds", 1),
        ("90 seconds", "seconds", 90),
        ("loss 3.2", "loss", 3.2),
        ("LOSS 3", "loss", 3),
        ("loss <= 3.2", "loss", 3.2),
        ("loss=3.2", "loss", 3.2),
        ("loss < 1e-1", "loss", 0.1),
    ],
)
def test_until(text, kind, value):
    assert Until.parse(text) == Until(kind, value)


@pytest.mark.parametrize(
    "text",
    [
        "600", "steps", "600 stepss", "600 epochs", "-5 steps", "nan steps", "inf steps", "10 m", "10 k steps",
        "loss", "loss abc", "loss -1", "loss > 3", "3.2 loss", "2 h 30 min", "1.5 steps", "1e-1 steps", "600 steps!",
        "loss 3,2", "loss 3_", "1e999 steps", "1e400 tokens", "1e999 h", "loss 1e999",
    ],
)  # fmt: skip
def test_until_nonsense(text):
    with pytest.raises(UserError) as found:
        Until.parse(text)
    assert repr(text) in str(found.value)
    with pytest.raises(UserError):
        Config(until=text)


@given(text=st.text(alphabet="0123456789.,_e+- lostepkhmin<=", max_size=14) | st.text(max_size=10))
def test_until_gives_a_finite_number_or_a_word_about_it(text):
    try:
        found = Until.parse(text)
    except UserError:
        return
    assert found.kind is None or (math.isfinite(found.value) and found.value >= 0)


def test_fraction():
    assert Until.parse("600 steps").fraction(150, 10**9, 1e9) == 0.25
    assert Until.parse("1e3 tokens").fraction(10**9, 500, 1e9) == 0.5
    assert Until.parse("10 s").fraction(10**9, 10**9, 2.5) == 0.25
    assert Until.parse("600 steps").fraction(599, 0, 0) < 1
    assert Until.parse("600 steps").fraction(600, 0, 0) == 1
    assert Until.parse("600 steps").fraction(601, 0, 0) == 1
    assert Until.parse("").fraction(5, 5, 5) is None
    assert Until.parse("loss 3").fraction(5, 5, 5) is None


def test_nothing_to_do_is_done():
    """`0 steps` is reached before the first."""
    assert Until.parse("0 steps").fraction(0, 0, 0.0) == 1


@given(steps=st.integers(1, 10**12))
def test_a_number_of_steps_is_reached_at_that_step(steps):
    until = Until.parse(f"{steps} steps")
    assert until.fraction(steps, 0, 0.0) == 1
    assert until.fraction(steps - 1, 0, 0.0) < 1


# -------------------------------------------------------------------- changed


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model": {"width": 256}}, ["model.width: 256 was 768"]),
        ({"optimizer": {"lr": 0.1}}, ["optimizer.lr: 0.1 was default"]),
        ({"optimizer": {"name": "AdamW"}}, ["optimizer.name: AdamW was SFNorMuon"]),
        ({"seed": 3}, ["seed: 3 was 0"]),
        ({"data": {"documents": True}}, ["data.documents: True was False"]),
        ({"cooldown": {"start": 1, "steps": 2}}, ["cooldown.start: 1 was 0", "cooldown.steps: 2 was 0"]),
        ({"preset": "demo"}, ["preset: demo was "]),
        ({"data": {"path": "elsewhere"}}, []),
        ({"run": "x", "until": "9 steps", "batch_size": 4, "device": "cpu", "threads": 2, "eval_at": [3]}, []),
    ],
)
def test_what_makes_another_run_of_it(values, words):
    assert changed(Config(), merged(Config(), values)) == words
    assert bool(changed(merged(Config(), values), Config())) == bool(words)  # the other way round too


def test_fixed_settings_exist():
    keys = {**flat(plain(Config())), **dict.fromkeys(f.name for f in dataclasses.fields(Config))}
    for name in FIXED:
        assert name in keys
        assert [key for key in keys if key.startswith(name) and not (key == name or key.startswith(name + "."))] == []


# -------------------------------------------- the options of the optimizers


def options_of(kind: type) -> set[str]:
    """What its constructor takes by keyword, the shared tables' included, as far as it can be said in plain words."""
    found = set()
    for name, parameter in inspect.signature(kind.__init__).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            table = getattr(keywords, parameter.annotation.removeprefix("Unpack[keywords.").removesuffix("]"))
            found |= table.__optional_keys__
        else:
            found.add(name)
    wholes = {"on_nonfinite", "graph", "chunk_bytes", "owners", "process_group"}
    return found - {"self", "params", "rules", "unmatched", *wholes}


SETTINGS = {f.name for f in dataclasses.fields(OptimizerConfig)} - set(OURS)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_option_of_every_optimizer_is_a_setting(name):
    found = options_of(OPTIMIZERS[name])
    assert {"lr", "weight_decay", "warmup_steps"} <= found
    assert found - SETTINGS == set()


def test_every_setting_is_an_option_of_some_optimizer():
    assert set().union(*map(options_of, OPTIMIZERS.values())) == SETTINGS


def test_settings_of_one_of_a_few_words_know_them_all():
    """Literal fields take exactly what the optimizers take."""
    hints = typing.get_type_hints(OptimizerConfig)
    for name in SETTINGS:
        words = [a for part in typing.get_args(hints[name]) for a in typing.get_args(part)]
        words = [w for w in words if isinstance(w, str)]
        if not words or name.endswith("_dtype"):
            continue
        if name == "recipe":
            assert words == list(RECIPES)
            assert set(FILLED) == {"averaging_warmup"}.union(*(recipe.fill(0.01, 100) for recipe in RECIPES.values()))
            continue
        check, _ = CHECKS[name.removeprefix("adam_")]
        assert all(check(None if w == "none" else w) for w in words), name
        assert not check("x")


def test_every_optimizer_of_the_package_is_there():
    import anytime

    public = [getattr(anytime, name) for name in anytime.__all__]
    kinds = [k for k in public if inspect.isclass(k) and issubclass(k, anytime.AnytimeOptimizer)]
    assert set(OPTIMIZERS.values()) == set(kinds) - {anytime.AnytimeOptimizer}
