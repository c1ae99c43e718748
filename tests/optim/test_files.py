"""Save anywhere, load anywhere: the run goes on bit for bit, and what does not belong together is refused whole."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import anytime
from anytime.optim.options import LATER

NAMES = tuple(
    name
    for name in anytime.__all__
    if isinstance(value := getattr(anytime, name), type)
    and issubclass(value, torch.optim.Optimizer)
    and value is not anytime.AnytimeOptimizer
)
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SFNorMuon": [
        {},
        {"beta_growth": 0.4, "beta_growth_start": 2, "averaging_power": 2.0},
        {"averaging_warmup": 3, "polar": "svd", "decay_at": "y"},
        {"recipe": "anytime"},
        {"momentum_dtype": torch.bfloat16, "polar_dtype": torch.bfloat16, "row_norm": False},
        {"lr": torch.tensor(0.05)},
    ],
    "SFMuon": [{}, {"nesterov": True, "scaling": "aspect"}],
    "SFSpectralSGD": [{}, {"momentum_dtype": torch.bfloat16}],
    "SFAdamW": [{}, {"bias_correction": "moment", "betas": (0.0, 0.9)}],
    "SFPlus": [{}, {"polyak_beta": 0.5, "beta_anneal_steps": 4, "averaging_power": 2.0, "weight_decay": 20.0}],
    "SignSGD": [{}, {"momentum": 0.9}],
    "SpectralDescent": [{}, {"momentum": 0.9}],
}
SHAPES = [(4, 3), (3, 5), (1, 4), (5,), (), (0, 3), (4, 2, 2, 2), (2, 3, 4)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]

Named = list[tuple[str, nn.Parameter]]
each = pytest.mark.parametrize("name", NAMES)


def make(name: str, params: Any, **more: Any) -> anytime.AnytimeOptimizer:
    return getattr(anytime, name)(params, **{"lr": 0.05, "warmup_steps": 3, **more})


def parameters(shapes: Iterable[tuple[int, ...]], dtype: torch.dtype, seed: int = 0) -> Named:
    generator = torch.Generator().manual_seed(seed)
    return [(f"p{i}", nn.Parameter(torch.randn(s, generator=generator).to(dtype))) for i, s in enumerate(shapes)]


def train(named: Named, optimizer: torch.optim.Optimizer, seeds: Iterable[int]) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(1000 + seed)
        for _, p in named:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        if seed % 5 == 3:  # some steps are skipped
            named[0][1].grad.view(-1)[:1] = math.nan
        optimizer.step(*([lambda: 2.0] if getattr(optimizer, "needs_loss", False) else []))


def to_file(optimizer: torch.optim.Optimizer, named: Named) -> dict[str, Any]:
    """Through a file that holds no code."""
    buffer = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "model": {name: p.detach() for name, p in named}}, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def put_weights(named: Named, saved: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, p in named:
            p.copy_(saved[name])


def bits(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().view(-1)
    return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]).clone()


def everything(named: Named, optimizer: anytime.AnytimeOptimizer) -> dict[str, Any]:
    """All that a run depends on, comparable with ==."""
    found: dict[str, Any] = {"training": optimizer.training, "skipped": optimizer.skipped_steps}
    for name, p in named:
        tensors = {"weights": p, **optimizer.state.get(p, {})}
        found[name] = {k: (str(v.dtype), tuple(v.shape), bits(v).tolist()) for k, v in sorted(tensors.items())}
    found["groups"] = [
        {k: v.tolist() if isinstance(v, Tensor) else v for k, v in sorted(group.items()) if k != "params"}
        for group in optimizer.param_groups
    ]
    return found


def small(name: str = "SFNorMuon", seed: int = 0, **more: Any) -> tuple[Named, anytime.AnytimeOptimizer]:
    named = parameters([(4, 3), (3, 4), (5,)], torch.float32, seed)
    return named, make(name, named, **more)


def refuses(
    named: Named, optimizer: anytime.AnytimeOptimizer, state: Any, match: str, error: type[Exception] = ValueError
) -> None:
    before = everything(named, optimizer)
    with pytest.raises(error, match=match):
        optimizer.load_state_dict(state)
    assert everything(named, optimizer) == before


# ------------------------------------------------------------------ stop anywhere


@each
@settings(max_examples=40)
@given(data=st.data())
def test_a_run_stopped_anywhere_goes_on_bit_for_bit(name: str, data: st.DataObject) -> None:
    options = data.draw(st.sampled_from(OPTIONS.get(name, [{}])))
    shapes = data.draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4))
    if name == "Shampoo":
        shapes = [s for s in shapes if len(s) < 4] or [(3, 2)]
    dtype = data.draw(st.sampled_from(DTYPES))
    before, after = data.draw(st.integers(0, 6)), data.draw(st.integers(1, 4))
    evaluating = data.draw(st.booleans())
    named_file = data.draw(st.booleans())

    def build(seed: int) -> tuple[Named, anytime.AnytimeOptimizer]:
        named = parameters(shapes, dtype, seed)
        fresh = {key: value.clone() if isinstance(value, Tensor) else value for key, value in options.items()}
        return named, make(name, named if named_file else [p for _, p in named], **fresh)

    named, optimizer = build(0)
    train(named, optimizer, range(before))
    if evaluating:
        optimizer.eval()
    saved = to_file(optimizer, named)
    others, other = build(1)
    use = data.draw(st.sampled_from(["new", "used", "used, eval"]))
    if use != "new":
        train(others, other, range(50, 52))
        if use == "used, eval":
            other.eval()
    put_weights(others, saved["model"])
    other.load_state_dict(saved["optimizer"])
    assert everything(others, other) == everything(named, optimizer)
    optimizer.train()
    other.train()
    assert everything(others, other) == everything(named, optimizer)
    train(named, optimizer, range(before, before + after))
    train(others, other, range(before, before + after))
    assert everything(others, other) == everything(named, optimizer)


@each
def test_loading_copies(name: str) -> None:
    """Neither the state dict nor the optimizer that it came from is tied to the one that loaded it."""
    named, optimizer = small(name, lr=torch.tensor(0.05))
    train(named, optimizer, range(2))
    state = optimizer.state_dict()
    others, other = small(name, lr=torch.tensor(0.05))
    put_weights(others, dict(named))
    other.load_state_dict(state)
    before = everything(named, optimizer)
    frozen = copy.deepcopy(state)
    train(others, other, range(2, 4))
    for group in other.param_groups:
        group["lr"].mul_(0.5)
        group["layouts"].append("x")
    assert everything(named, optimizer) == before
    for index, entry in frozen["state"].items():
        assert all(torch.equal(value, state["state"][index][key]) for key, value in entry.items())
    assert [g["lr"] for g in state["param_groups"]] == [g["lr"] for g in frozen["param_groups"]]


@each
def test_a_state_dict_holds_plain_values_alone(name: str) -> None:
    def check(value: Any, path: str) -> None:
        if isinstance(value, dict):
            assert type(value) is dict, path
            for key, item in value.items():
                assert type(key) in (str, int), path
                check(item, f"{path}.{key}")
        elif isinstance(value, list):
            assert type(value) is list, path
            for item in value:
                check(item, path)
        else:
            assert value is None or type(value) in (str, int, float, bool, Tensor), f"{path} is {type(value)}"

    for options in OPTIONS.get(name, [{}]):
        named, optimizer = small(name, **options)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1.0)
        train(named, optimizer, range(2))
        for state in (optimizer.state_dict(), (optimizer.eval(), optimizer.state_dict())[1]):
            check(state, "state_dict")
            assert all(group["algorithm"] == name for group in state["param_groups"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_state_keeps_its_dtype(dtype: torch.dtype) -> None:
    named = parameters([(4, 3), (5,)], dtype)
    optimizer = make("SFNorMuon", named, momentum_dtype=torch.bfloat16)
    train(named, optimizer, range(3))
    saved = to_file(optimizer, named)
    others = parameters([(4, 3), (5,)], dtype)
    other = make("SFNorMuon", others)  # the option comes with the state
    put_weights(others, saved["model"])
    other.load_state_dict(saved["optimizer"])
    precise = torch.promote_types(dtype, torch.float32)
    state = other.state[others[0][1]]
    assert state["momentum"].dtype == torch.bfloat16
    assert state["d"].dtype == state["row_moment"].dtype == precise
    assert state["step"].dtype == state["weight_sum"].dtype == torch.float64
    assert other.param_groups[0]["momentum_dtype"] is torch.bfloat16
    assert other.state[others[1][1]]["second_moment"].dtype == precise
    train(named, optimizer, range(4, 6))
    train(others, other, range(4, 6))
    assert everything(named, optimizer) == everything(others, other)


@each
def test_skipped_steps_survive(name: str) -> None:
    named, optimizer = small(name)
    train(named, optimizer, range(9))  # two of them bad
    assert optimizer.skipped_steps == 2
    others, other = small(name)
    put_weights(others, dict(named))
    other.load_state_dict(to_file(optimizer, named)["optimizer"])
    assert other.skipped_steps == 2
    train(others, other, [13])
    assert other.skipped_steps == 3
    assert optimizer.skipped_steps == 2


def test_parameters_frozen_at_save_and_at_load() -> None:
    named, _ = small()
    named[0][1].requires_grad_(False)
    frozen = make("SFNorMuon", named)
    train(named[1:], frozen, range(2))
    others, other = small()  # nothing is frozen here
    put_weights(others, dict(named))
    other.load_state_dict(to_file(frozen, named)["optimizer"])
    train(others, other, range(5, 6))
    assert [float(other.state[p]["step"]) for _, p in others] == [1, 3, 3]


def test_loading_leaves_nothing_of_what_was_there_before() -> None:
    named, _ = small()
    named[0][1].requires_grad_(False)
    frozen = make("SFNorMuon", named)
    train(named[1:], frozen, range(2))
    others, other = small()
    train(others, other, range(2))
    other.eval()
    put_weights(others, dict(named))
    other.load_state_dict(frozen.state_dict())
    train(others, other, range(5, 6))
    assert [float(other.state[p]["step"]) for _, p in others] == [1, 3, 3]
    assert all("y" not in state for state in other.state.values())


# ---------------------------------------------------------------------- regrouped


def grouped(named: Named, kind: str, **more: Any) -> anytime.AnytimeOptimizer:
    a, b, c = named
    groups: Any = {
        "one": [{"params": [a, b, c]}],
        "reversed": [{"params": [c, b, a]}],
        "split": [{"params": [b], "lr": 0.01, "rate": 0.5}, {"params": [a, c], "lr": 0.02}],
        "apart": [{"params": [c]}, {"params": [b]}, {"params": [a]}],
    }[kind]
    return make("SFNorMuon", groups, **more)


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(["one", "reversed", "split", "apart"], 2)))
@pytest.mark.parametrize("evaluating", [False, True], ids=["train", "eval"])
def test_state_follows_names_into_other_groups(first: str, second: str, evaluating: bool) -> None:
    shapes = [(4, 4), (4, 4), (5,)]
    named, others = parameters(shapes, torch.float32), parameters(shapes, torch.float32, 1)
    optimizer, other = grouped(named, first), grouped(others, second)
    train(named, optimizer, range(3))
    if evaluating:
        optimizer.eval()
    saved = to_file(optimizer, named)
    put_weights(others, saved["model"])
    other.load_state_dict(saved["optimizer"])
    mine, theirs = everything(named, optimizer), everything(others, other)
    assert all(mine[key] == theirs[key] for key in mine if key != "groups")
    assert [group["layouts"] for group in other.param_groups] == [
        group["layouts"] for group in grouped(others, second).param_groups
    ]


def test_a_regrouped_group_keeps_its_own_options_and_an_unchanged_one_takes_the_saved() -> None:
    shapes = [(4, 4), (4, 4), (5,)]
    named, others = parameters(shapes, torch.float32), parameters(shapes, torch.float32)
    optimizer = make("SFNorMuon", [{"params": named[:2]}, {"params": named[2:]}], lr=0.1)
    other = make(
        "SFNorMuon", [{"params": others[2:]}, {"params": others[:1]}, {"params": others[1:2], "lr": 0.3}], lr=0.2
    )
    other.load_state_dict(optimizer.state_dict())
    rates = {name: group["lr"] for group in other.param_groups for name in group["param_names"]}
    assert rates == {"p2": 0.1, "p0": 0.2, "p1": 0.3}
    whole = make("SFNorMuon", others, lr=0.2, momentum=0.5, betas=(0.5, 0.5), polar="svd")
    whole.load_state_dict(optimizer.state_dict())
    assert {group["lr"] for group in whole.param_groups} == {0.1}
    matrices = next(group for group in whole.param_groups if group["rule"] == "normuon")
    assert (matrices["momentum"], matrices["betas"], matrices["polar"]) == (0.8, (0.9, 0.95), "newton-schulz")


@pytest.mark.parametrize(
    ("name", "saved"),
    [
        ("SFNorMuon", {"row_norm": False}),
        ("SignSGD", {"momentum": 0.9}),
        ("SpectralDescent", {"momentum": 0.9}),
        ("AdamW", {"betas": (0.5, 0.6)}),
    ],
)
def test_saved_options_bring_the_buffers_they_need(name: str, saved: dict[str, Any]) -> None:
    named, optimizer = small(name, **saved)
    train(named, optimizer, range(2))
    others, other = small(name)
    put_weights(others, dict(named))
    other.load_state_dict(to_file(optimizer, named)["optimizer"])
    train(named, optimizer, range(4, 6))
    train(others, other, range(4, 6))
    assert everything(named, optimizer) == everything(others, other)


@pytest.mark.parametrize("saved_with_names", [False, True])
@pytest.mark.parametrize("loaded_with_names", [False, True])
def test_without_names_the_order_in_which_they_were_given_counts(
    saved_with_names: bool, loaded_with_names: bool
) -> None:
    shapes = [(4, 4), (5,), (4, 4), (2,)]

    def build(with_names: bool, seed: int) -> tuple[Named, anytime.AnytimeOptimizer]:
        named = parameters(shapes, torch.float32, seed)
        return named, make("SFNorMuon", named if with_names else [p for _, p in named])

    named, optimizer = build(saved_with_names, 0)
    train(named, optimizer, range(3))
    others, other = build(loaded_with_names, 1)
    put_weights(others, dict(named))
    other.load_state_dict(to_file(optimizer, named)["optimizer"])
    mine, theirs = everything(named, optimizer), everything(others, other)
    assert all(mine[key] == theirs[key] for key in mine if key != "groups")
    assert ("param_names" in other.param_groups[0]) == loaded_with_names


def test_order_counts_across_groups_without_names() -> None:
    """A matrix and a vector each become groups of their own; the order given is still the key."""
    shapes = [(4, 4), (5,), (4, 4), (2,)]
    named, others = parameters(shapes, torch.float32), parameters(shapes, torch.float32, 1)
    optimizer = make("SFNorMuon", [p for _, p in named])
    train(named, optimizer, range(3))
    put_weights(others, dict(named))
    other = make("SFNorMuon", [{"params": [p]} for _, p in others])
    other.load_state_dict(optimizer.state_dict())
    mine, theirs = everything(named, optimizer), everything(others, other)
    assert all(mine[key] == theirs[key] for key in mine if key != "groups")


def test_two_modules_with_the_same_names() -> None:
    """As the two networks of a GAN in one optimizer."""

    def build() -> tuple[Named, anytime.AnytimeOptimizer]:
        torch.manual_seed(0)
        a, b = nn.Linear(3, 4), nn.Linear(3, 4)
        optimizer = make("SFNorMuon", [{"params": a, "lr": 0.1}, {"params": b, "lr": 0.2}])
        return [(f"{i}.{n}", p) for i, m in enumerate((a, b)) for n, p in m.named_parameters()], optimizer

    named, optimizer = build()
    train(named, optimizer, range(3))
    others, other = build()
    put_weights(others, dict(named))
    other.load_state_dict(to_file(optimizer, named)["optimizer"])
    assert everything(named, optimizer) == everything(others, other)


@each
def test_named_parameters_and_their_module_are_the_same(name: str) -> None:
    """A state saved from a module loads where the named parameters were given, and the other way round."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 3), nn.LayerNorm(3), nn.Conv2d(2, 3, 2))

    model, twin = build(), build()
    optimizer = make(name, model)
    other = make(name, model.named_parameters(), rules={"0.weight": "rest"})
    train(list(model.named_parameters()), optimizer, range(2))
    other.load_state_dict(optimizer.state_dict())
    again = make(name, twin)
    put_weights(list(twin.named_parameters()), dict(model.named_parameters()))
    again.load_state_dict(other.state_dict())
    mine, theirs = (everything(list(m.named_parameters()), o) for m, o in ((model, optimizer), (twin, again)))
    assert all(mine[key] == theirs[key] for key in mine if key != "groups")


@pytest.mark.parametrize("name", ["SFAdamW", "SFSGD", "SFLion", "AdamW", "SignSGD", "Lion"])
def test_elementwise_state_does_not_depend_on_how_a_tensor_would_be_read(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Conv1d(2, 3, 2)
    optimizer = make(name, model)
    train(list(model.named_parameters()), optimizer, range(2))
    other = make(name, model.named_parameters())
    other.load_state_dict(optimizer.state_dict())
    assert other.state[model.weight]["step"] == 2


# -------------------------------------------------------------------------- errors


def test_wrong_shapes() -> None:
    _, optimizer = small()
    others = parameters([(4, 3), (3, 4), (6,)], torch.float32)
    refuses(others, make("SFNorMuon", others), optimizer.state_dict(), r"p2.*\(6,\)")
    others = parameters([(3, 4), (4, 3), (5,)], torch.float32)
    refuses(others, make("SFNorMuon", others), optimizer.state_dict(), r"p0.*\(3, 4\)")


def test_another_precision_of_the_weights() -> None:
    named, optimizer = small()
    train(named, optimizer, range(2))
    others = [(name, nn.Parameter(p.detach().bfloat16())) for name, p in named]
    refuses(others, make("SFNorMuon", others), optimizer.state_dict(), "p0.*float32 weights.*bfloat16")
    optimizer.eval()
    others = [(name, nn.Parameter(p.detach().double())) for name, p in named]
    refuses(others, make("SFNorMuon", others), optimizer.state_dict(), "p0.*float32.*float64")


@pytest.mark.parametrize("trained", [0, 2])
def test_other_names(trained: int) -> None:
    named, optimizer = small()
    train(named, optimizer, range(trained))
    state = optimizer.state_dict()
    others, _ = small()
    renamed = make("SFNorMuon", [("p0", others[0][1]), ("p1", others[1][1]), ("gain", others[2][1])])
    refuses(others, renamed, state, "'gain'.*'p2'")
    fewer = make("SFNorMuon", others[:2])
    refuses(others[:2], fewer, state, "'p2'")
    more = parameters([(4, 3), (3, 4), (5,), (2,)], torch.float32)
    refuses(more, make("SFNorMuon", more), state, "lacks 'p3'")


def test_another_number_of_parameters_without_names() -> None:
    named, _ = small()
    optimizer = make("SFNorMuon", [p for _, p in named])
    others, _ = small()
    refuses(others[:2], make("SFNorMuon", [p for _, p in others[:2]]), optimizer.state_dict(), "3 parameters.* 2")


@each
def test_another_algorithm(name: str) -> None:
    _, optimizer = small(name)
    for wrong in NAMES:
        if wrong != name:
            others, other = small(wrong)
            refuses(others, other, optimizer.state_dict(), f"{name}.*{wrong}")


@each
def test_a_state_of_torch(name: str) -> None:
    named, optimizer = small(name)
    foreign = torch.optim.AdamW([p for _, p in named])
    for state in (foreign.state_dict(), torch.optim.SGD(named).state_dict()):
        refuses(named, optimizer, state, f"not saved by {name}.*start_from")


@pytest.mark.parametrize("state", [{}, {"state": {}}, {"state": {}, "param_groups": []}, {"model": {}, "step": 3}])
def test_no_state_at_all(state: dict[str, Any]) -> None:
    named, optimizer = small()
    refuses(named, optimizer, state, "no optimizer state")


def test_another_rule_layout_or_split() -> None:
    shapes = [(6, 6), (4, 3, 3), (5,)]

    def build(**more: Any) -> tuple[Named, anytime.AnytimeOptimizer]:
        named = parameters(shapes, torch.float32)
        return named, make("SFNorMuon", named, **more)

    _, optimizer = build()
    state = optimizer.state_dict()
    refuses(*build(rules={"p0": "rest"}), state, "p0.*'normuon'.*'sf-adamw'")
    refuses(*build(rules={"p0": {"split": 2}}), state, "p0.*'matrix'.*'matrix rows 3[+]3'")
    refuses(*build(rules={"p0": {"split": {"sizes": 2, "dim": 1}}}), state, "p0.*'matrix columns 3[+]3'")
    _, split = build(rules={"p0": {"split": [2, 4]}})
    refuses(*build(rules={"p0": {"split": [4, 2]}}), split.state_dict(), "p0.*2[+]4.*4[+]2")


@pytest.mark.parametrize("evaluating", [False, True], ids=["train", "eval"])
def test_weights_that_are_not_the_stated_ones(evaluating: bool) -> None:
    named, optimizer = small()
    train(named, optimizer, range(3))
    if evaluating:
        optimizer.eval()
    saved = to_file(optimizer, named)
    held = "the average X" if evaluating else "the iterate Y"
    others, other = small(seed=1)
    refuses(others, other, saved["optimizer"], f"weights of p0.*{held}.*load the weights first")  # model loaded after
    put_weights(others, saved["model"])
    with torch.no_grad():
        others[2][1][0] += 1e-6
    refuses(others, other, saved["optimizer"], f"weights of p2.*{held}")
    put_weights(others, saved["model"])
    other.load_state_dict(saved["optimizer"])


@pytest.mark.parametrize("evaluating", [False, True], ids=["train", "eval"])
def test_weights_of_the_other_mode(evaluating: bool) -> None:
    """Weights X beside a state of train mode, or the other way round."""
    named, optimizer = small()
    train(named, optimizer, range(3))
    first = to_file(optimizer, named)
    optimizer.eval()
    second = to_file(optimizer, named)
    state, weights = (second, first) if evaluating else (first, second)
    others, other = small(seed=1)
    put_weights(others, weights["model"])
    refuses(others, other, state["optimizer"], "the average X" if evaluating else "the iterate Y")


def test_other_weights_on_purpose() -> None:
    named, optimizer = small()
    train(named, optimizer, range(3))
    state = to_file(optimizer, named)["optimizer"]
    for entry in state["state"].values():
        del entry["fingerprint"]
    others, other = small(seed=1)
    other.load_state_dict(state)
    assert all(float(other.state[p]["step"]) == 3 for _, p in others)


@pytest.mark.parametrize("key", ["step", "d", "momentum", "weight_sum", "beta", "row_moment"])
def test_a_missing_tensor(key: str) -> None:
    named, optimizer = small()
    train(named, optimizer, range(2))
    state = to_file(optimizer, named)["optimizer"]
    del state["state"][0][key]
    refuses(named, optimizer, state, f"p0.*{key} is absent")
    state["state"][0][key] = torch.zeros(2, 2, 2)
    refuses(named, optimizer, state, rf"p0.*{key} is \(2, 2, 2\)")


def test_a_surplus_tensor() -> None:
    named, optimizer = small()
    state = to_file(optimizer, named)["optimizer"]
    state["state"][0]["exp_avg"] = torch.zeros(4, 3)
    refuses(named, optimizer, state, "p0.*exp_avg.*should be absent")


def test_a_missing_entry() -> None:
    """A parameter that was trained has a state; a file without it is broken, and t = 0 would be silent."""
    named, optimizer = small()
    train(named, optimizer, range(2))
    state = to_file(optimizer, named)["optimizer"]
    del state["state"][1]
    refuses(named, optimizer, state, "p1|p2|state")
    state["state"].clear()
    refuses(named, optimizer, state, "state")


def test_y_is_there_in_eval_mode_alone() -> None:
    named, optimizer = small()
    train(named, optimizer, range(2))
    optimizer.eval()
    state = to_file(optimizer, named)["optimizer"]
    del state["state"][0]["y"]
    refuses(named, optimizer, state, "p0.*lacks the y that it has in eval mode")


@pytest.mark.parametrize(
    "key", ["algorithm", "format", "sequence", "skipped_steps", "layouts", "order", "held", "rule", "params"]
)
@pytest.mark.parametrize("group", [0, 1])
def test_a_missing_key_of_a_group(key: str, group: int) -> None:
    named, _ = small()
    optimizer = make("SFNorMuon", [p for _, p in named])
    state = optimizer.state_dict()
    del state["param_groups"][group][key]
    if group == 1 and key in ("algorithm", "format", "sequence", "skipped_steps"):
        optimizer.load_state_dict(state)  # said once is enough
    else:
        refuses(named, optimizer, state, key if key != "algorithm" else "not saved by")


def test_a_newer_format() -> None:
    named, optimizer = small()
    state = optimizer.state_dict()
    state["param_groups"][0]["format"] = 99
    refuses(named, optimizer, state, "format 99.*upgrade")


@pytest.mark.parametrize(("key", "value"), [("lr", -1.0), ("betas", [0.9, 1.5]), ("polar", "magic"), ("decay_at", "w")])
def test_illegal_options_in_a_file(key: str, value: Any) -> None:
    named, optimizer = small()
    state = to_file(optimizer, named)["optimizer"]
    state["param_groups"][0][key] = value
    refuses(named, optimizer, state, f"{key} is")


def test_an_error_in_the_last_parameter_leaves_the_first_as_it_was() -> None:
    named, optimizer = small()
    train(named, optimizer, range(2))
    state = to_file(optimizer, named)["optimizer"]
    others, other = small(seed=1)
    train(others, other, range(7, 9))
    other.eval()
    put_weights(others[:2], dict(named))
    refuses(others, other, state, "weights of p2")


# --------------------------------------------------------------- options and hooks


def half_polar(M: Tensor) -> Tensor:
    return 0.5 * M


def test_a_callable_polar_is_named_in_the_file_and_stays_the_optimizers_own() -> None:
    named, optimizer = small(polar=half_polar)
    train(named, optimizer, range(2))
    saved = to_file(optimizer, named)
    assert "half_polar" in saved["optimizer"]["param_groups"][0]["polar"]
    others, other = small(polar=half_polar)
    put_weights(others, saved["model"])
    other.load_state_dict(saved["optimizer"])
    assert all(group["polar"] is half_polar for group in other.param_groups if group["rule"] == "normuon")
    train(named, optimizer, range(2, 3))
    train(others, other, range(2, 3))
    assert everything(named, optimizer) == everything(others, other)
    others, other = small()
    put_weights(others, saved["model"])
    refuses(others, other, saved["optimizer"], "half_polar.*build the optimizer with it")


@pytest.mark.parametrize("key", LATER)
def test_an_option_that_is_younger_than_the_file(key: str) -> None:
    """What was trained without it goes on without it, whatever the constructor says."""
    options = {"decay_fading": 9, "cautious": True, "momentum_growth": 0.3, "rate_fall": 0.3}
    assert options.keys() == LATER.keys()
    model, fresh = nn.Linear(4, 3), nn.Linear(4, 3)
    optimizer, other = anytime.SFNorMuon(model), anytime.SFNorMuon(fresh, **{key: options[key]})
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group.pop(key, None)
    fresh.load_state_dict(model.state_dict())
    other.load_state_dict(state)
    for group, old in zip(other.param_groups, optimizer.param_groups, strict=True):
        assert group.get(key) == old.get(key)


def test_load_hooks_run_and_may_change_the_state() -> None:
    _, optimizer = small()
    seen: list[str] = []

    def replace_rate(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        seen.append("pre")
        return {**state, "param_groups": [{**group, "lr": 0.75} for group in state["param_groups"]]}

    optimizer.register_load_state_dict_pre_hook(lambda *_: seen.append("silent"))
    optimizer.register_load_state_dict_pre_hook(replace_rate)
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(f"post {o.param_groups[0]['lr']}"))
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    assert seen == ["silent", "pre", "post 0.75"]
    assert state["param_groups"][0]["lr"] == 0.05


def test_save_hooks_run() -> None:
    _, optimizer = small()
    optimizer.register_state_dict_pre_hook(lambda o: o.train())
    optimizer.register_state_dict_post_hook(lambda o, state: {**state, "note": "mine"})
    optimizer.eval()
    state = optimizer.state_dict()
    assert state["note"] == "mine"
    assert state["param_groups"][0]["sequence"] == "y"
    optimizer.load_state_dict(state)
    assert optimizer.training


def test_keys_that_others_put_into_a_group_survive() -> None:
    _, optimizer = small()
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
    for group in optimizer.param_groups:
        group["name"] = "mine"
        group["tag"] = "of the user"
    _, other = small()
    for group in other.param_groups:
        group["tag"] = "here"
    other.load_state_dict(optimizer.state_dict())
    assert all(group["name"] == "mine" and group["tag"] == "of the user" for group in other.param_groups)
    assert [group["max_lr"] for group in other.param_groups] == [0.1, 0.1]
    _, fresh = small()
    fresh.load_state_dict(optimizer.state_dict())  # nobody put a tag there yet


def test_a_scheduler_goes_on_from_a_file() -> None:
    named, optimizer = small()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    for seed in range(3):
        train(named, optimizer, [seed])
        scheduler.step()
    others, other = small()
    again = torch.optim.lr_scheduler.CosineAnnealingLR(other, T_max=10)
    put_weights(others, dict(named))
    other.load_state_dict(to_file(optimizer, named)["optimizer"])
    again.load_state_dict(scheduler.state_dict())
    for seed in range(4, 7):
        for n, o, s in ((named, optimizer, scheduler), (others, other, again)):
            train(n, o, [seed])
            s.step()
    assert everything(named, optimizer) == everything(others, other)


# ---------------------------------------------------------- distributed checkpoint


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(5, 4), nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 4), nn.Linear(4, 5, bias=False)
    )
    model[4].weight = model[0].weight
    model[3].requires_grad_(False)
    return model


def trainable(model: nn.Module) -> Named:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


OPTIONS_OF_DCP = {
    "plain": StateDictOptions(),
    "full": StateDictOptions(full_state_dict=True, cpu_offload=True),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
}


@pytest.mark.parametrize("name", ["SFNorMuon", "SFAdamW", "NorMuon"])
@pytest.mark.parametrize("options", OPTIONS_OF_DCP)
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_distributed_checkpoint_state_dicts(name: str, options: str, steps: int, mode: str) -> None:
    model, fresh = network(), network()
    optimizer, other = make(name, model), make(name, fresh)
    train(trainable(model), optimizer, range(steps))
    getattr(optimizer, mode)()
    if options == "flat":  # torch reads the flat form by the names that the loading optimizer has: y in eval mode alone
        getattr(other, mode)()
    chosen = OPTIONS_OF_DCP[options]
    before = everything(list(model.named_parameters()), optimizer)
    saved = get_optimizer_state_dict(model, optimizer, options=chosen)
    assert everything(list(model.named_parameters()), optimizer) == before  # no step was taken to make a state
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    fresh.load_state_dict(model.state_dict())
    set_optimizer_state_dict(fresh, other, torch.load(buffer, weights_only=True), options=chosen)
    assert everything(list(fresh.named_parameters()), other) == before
    assert all(
        float(state["step"]) == sum(seed % 5 != 3 for seed in range(steps)) for p, state in other.state.items() if state
    )
    for m, o in ((model, optimizer), (fresh, other)):
        o.train()
        train(trainable(m), o, range(5, 7))
    assert everything(list(model.named_parameters()), optimizer) == everything(list(fresh.named_parameters()), other)


@pytest.mark.parametrize("options", OPTIONS_OF_DCP)
def test_distributed_checkpoint_state_dicts_of_two_optimizers(options: str) -> None:
    def build() -> tuple[nn.Module, list[anytime.AnytimeOptimizer]]:
        torch.manual_seed(0)
        model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        return model, [
            make(name, [(f"{key}.{n}", p) for n, p in model[key].named_parameters()])
            for name, key in (("SFNorMuon", "a"), ("SFAdamW", "b"))
        ]

    chosen = OPTIONS_OF_DCP[options]
    model, optimizers = build()
    for _ in range(3):
        for optimizer, key in zip(optimizers, "ab", strict=True):
            train(list(model[key].named_parameters()), optimizer, range(2))
    fresh, others = build()
    fresh.load_state_dict(model.state_dict())
    saved = get_optimizer_state_dict(model, optimizers, options=chosen)
    set_optimizer_state_dict(fresh, others, saved, options=chosen)
    for optimizer, other, key in zip(optimizers, others, "ab", strict=True):
        mine = everything(list(model[key].named_parameters()), optimizer)
        assert mine == everything(list(fresh[key].named_parameters()), other)


def test_distributed_checkpoint_state_dicts_in_another_order() -> None:
    """torch lists the parameters in the order of the optimizer that loads, beside lists in the order saved."""
    model, fresh = network(), network()
    named = list(fresh.named_parameters())
    optimizer, other = make("SFNorMuon", model.named_parameters()), make("SFNorMuon", named[::-1])
    train(trainable(model), optimizer, range(3))
    fresh.load_state_dict(model.state_dict())
    set_optimizer_state_dict(fresh, other, get_optimizer_state_dict(model, optimizer))
    mine, theirs = everything(list(model.named_parameters()), optimizer), everything(named, other)
    assert all(mine[key] == theirs[key] for key in mine if key != "groups")


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("options", OPTIONS_OF_DCP)
def test_a_distributed_checkpoint_on_disk(options: str, mode: str, tmp_path: Any) -> None:
    """It is loaded into a state made beforehand: one in the mode that was saved."""
    model, fresh = network(), network()
    optimizer, other = make("SFNorMuon", model), make("SFNorMuon", fresh)
    train(trainable(model), optimizer, range(3))
    getattr(optimizer, mode)()
    chosen = OPTIONS_OF_DCP[options]

    def state(m: nn.Module, o: torch.optim.Optimizer) -> dict[str, Any]:
        return {"model": m.state_dict(), "optimizer": get_optimizer_state_dict(m, o, options=chosen)}

    def load() -> None:
        target = state(fresh, other)
        dcp.load(target, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
        fresh.load_state_dict(target["model"])
        set_optimizer_state_dict(fresh, other, target["optimizer"], options=chosen)

    dcp.save(state(model, optimizer), checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    if mode == "eval" and options == "plain":
        with pytest.raises(ValueError, match=r"lacks the y that it has in eval mode.*optimizer\.eval\(\)"):
            load()
    getattr(other, mode)()
    load()
    assert everything(list(fresh.named_parameters()), other) == everything(list(model.named_parameters()), optimizer)


def test_a_layer_unfrozen_just_before_it_was_saved_goes_on(tmp_path: Any) -> None:
    """Its state is there from then on, as that of a new optimizer: tools that load into what is there find a place."""

    def new() -> tuple[nn.Module, anytime.SFNorMuon]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[0].requires_grad_(False)
        return model, anytime.SFNorMuon(model)

    model, optimizer = new()
    train([*model[1].named_parameters()], optimizer, range(2))
    model.requires_grad_(True)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(saved, checkpoint_id=tmp_path / "checkpoint")
    other, goes_on = new()
    other.requires_grad_(True)
    found = {"model": other.state_dict(), "optimizer": goes_on.state_dict()}
    dcp.load(found, checkpoint_id=tmp_path / "checkpoint")
    other.load_state_dict(found["model"])
    goes_on.load_state_dict(found["optimizer"])
    for m, o in ((model, optimizer), (other, goes_on)):
        train([*m.named_parameters()], o, range(2, 6))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("where", ["group", "constructor"])
def test_numbers_of_numpy_load_without_code(where: str) -> None:
    named = parameters([(4, 3), (5,)], torch.float32)
    betas = (np.float64(0.9), np.float64(0.95)) if where == "constructor" else (0.9, 0.95)
    optimizer = make("SFNorMuon", named, betas=betas)
    optimizer.param_groups[0]["lr"] = np.float64(0.25)
    train(named, optimizer, range(2))
    group = to_file(optimizer, named)["optimizer"]["param_groups"][0]
    assert (type(group["lr"]), group["lr"], group["betas"]) == (float, 0.25, [0.9, 0.95])


def test_a_group_that_is_gone_leaves_no_gap_without_names() -> None:
    a, b, c = (nn.Parameter(torch.randn(4, 4)) for _ in range(3))
    optimizer = anytime.SFAdamW([{"params": [a]}, {"params": [b]}])
    del optimizer.param_groups[1]
    optimizer.add_param_group({"params": [c]})
    train([("a", a), ("c", c)], optimizer, range(2))
    other = anytime.SFAdamW([{"params": [a]}, {"params": [c]}])
    other.load_state_dict(optimizer.state_dict())
    for p in (a, c):
        assert torch.equal(other.state[p]["d"], optimizer.state[p]["d"])


def test_copies_look_at_their_weights_too() -> None:
    """torch's tools load an optimizer before its weights; what is copied in between has not been looked at yet."""
    named = parameters([(4, 3)], torch.float32)
    model = nn.ParameterDict(named)
    optimizer = make("SFNorMuon", model)
    train([*model.named_parameters()], optimizer, range(2))
    saved = get_optimizer_state_dict(model, optimizer)
    other = nn.ParameterDict(parameters([(4, 3)], torch.float32, seed=1))
    loaded = make("SFNorMuon", other)
    set_optimizer_state_dict(other, loaded, saved)
    for _, copied in (copy.deepcopy((other, loaded)), pickle.loads(pickle.dumps((other, loaded)))):
        with pytest.raises(ValueError, match="are not those the state was saved with"):
            copied.step()
