"""Owners under data parallelism: equal to one process, state where it belongs, work shared out."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import tasks
import torch
from tasks import Arrays, Case

import anytime

BASE: dict[str, Any] = {"lr": 0.05, "warmup_steps": 5, "weight_decay": 0.1}
CASES: dict[str, Case] = {
    "SFNorMuon": ("SFNorMuon", BASE),
    "SFMuon": ("SFMuon", {**BASE, "scaling": "max-side"}),
    "spectral ball": ("SFSpectralSGD", {"lr": 0.05, "projection": "spectral", "radius": 1.0}),
    "NorMuon": ("NorMuon", {"lr": 0.05}),
    "Shampoo": ("Shampoo", {"lr": 0.05}),
    "SpectralDescent": ("SpectralDescent", {"lr": 0.05}),
    "SFAdamW": ("SFAdamW", BASE),
}
MODES = ("factor", "state", "gradient")
WITHIN = {torch.float64: 1e-9, torch.float32: 1e-5}
STEPS = 100


@cache
def alone(name: str, dtype: torch.dtype, steps: int = STEPS) -> Arrays:
    return tasks.train(CASES[name], dtype, steps)


def check(pools: Any, name: str, mode: str, world: int, dtype: torch.dtype, steps: int = STEPS) -> None:
    expected = alone(name, dtype, steps)
    everyones = pools(world)(tasks.owned, CASES[name], mode, dtype, steps)
    by_elements = name == "SFAdamW"
    matrices = {} if by_elements else {n for n in tasks.RULES if n != "frozen"}

    def near(found: np.ndarray, key: str) -> None:
        np.testing.assert_allclose(found, expected[key], rtol=WITHIN[dtype], atol=WITHIN[dtype], err_msg=key)

    for found in everyones:
        assert found["skipped"] == expected["skipped"] > 0
        for name_ in tasks.SHAPES:
            for kind, key in (("y", name_), ("eval", f"{name_} x"), ("averaged", f"{name_} x"), ("again", name_)):
                assert found[kind][name_].tobytes() == everyones[0][kind][name_].tobytes()
                near(found[kind][name_], key)
    for name_ in tasks.SHAPES:
        holders = [found for found in everyones if found["held"].get(name_)]
        if name_ == "frozen":
            assert not holders
            continue
        assert len(holders) == (1 if mode != "factor" and name_ in matrices else world)
        for found in holders:
            for key, value in found["held"][name_].items():
                near(value, f"{name_} {key}")
            assert found["refused"][name_] == ""
        for found in everyones:
            if not any(found is holder for holder in holders):
                assert "held by another process" in found["refused"][name_]
                assert str(tuple(tasks.SHAPES[name_])) in found["refused"][name_]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world", [2, 4])
def test_owners_change_nothing(pools, mode, world):
    check(pools, "SFNorMuon", mode, world, torch.float64)


@pytest.mark.parametrize("name", list(CASES)[1:])
def test_every_kind_of_optimizer(pools, name):
    for number, mode in enumerate(MODES):
        check(pools, name, mode, 2, (torch.float64, torch.float32)[number % 2], 25)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", WITHIN, ids=str)
def test_every_kind_of_optimizer_among_four(pools, name, mode, dtype):
    check(pools, name, mode, 4, dtype)


@pytest.mark.parametrize("mode", MODES)
def test_a_frozen_matrix_in_the_average(pools, mode):
    """Nobody has a state of it, and everybody has the matrix."""
    expected = tasks.array(tasks.net(torch.float32, None).frozen)
    for found in pools(2)(tasks.frozen_average, mode):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_state_lies_at_its_owner_in_equal_shares(pools, mode, world):
    shapes = {f"m{i}": ((16, 16), (16, 8), (4, 16))[i % 3] for i in range(48)}
    whole = tasks.state_bytes(shapes, None)
    shares = pools(world)(tasks.state_bytes, shapes, mode)
    if mode == "factor":
        assert shares == [whole] * world
        return
    assert sum(bytes_ for bytes_, _ in shares) == whole[0]
    assert max(bytes_ for bytes_, _ in shares) <= 1.25 * whole[0] / world
    assert sum(cost for _, cost in shares) == pytest.approx(whole[1])
    assert max(cost for _, cost in shares) <= 1.05 * whole[1] / world


@pytest.mark.parametrize("mode", MODES)
def test_more_processes_than_matrices(pools, mode):
    """Some have nothing of their own to do."""
    expected = tasks.of_kinds({"only": ((6, 4), torch.float64)}, None)
    for found in pools(4)(tasks.of_kinds, {"only": ((6, 4), torch.float64)}, mode):
        np.testing.assert_allclose(found["only"], expected["only"], rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(found["only x"], expected["only x"], rtol=1e-9, atol=1e-9)


KINDS = {
    "single": ((6, 4), torch.float32),
    "twofold": ((4, 6), torch.float64),
    "narrow": ((5, 3), torch.bfloat16),
    "other_single": ((3, 3), torch.float32),
    "vector": ((5,), torch.float64),
    "narrow_vector": ((4,), torch.bfloat16),
}


@pytest.mark.parametrize("mode", MODES)
def test_parameters_of_several_precisions(pools, mode):
    expected = tasks.of_kinds(KINDS, None)
    for found in pools(2)(tasks.of_kinds, KINDS, mode):
        for name, (_, dtype) in KINDS.items():
            within = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
            np.testing.assert_allclose(found[name], expected[name], rtol=within, atol=within, err_msg=name)
            np.testing.assert_allclose(found[f"{name} x"], expected[f"{name} x"], rtol=within, atol=within)


@pytest.mark.parametrize("mode", MODES)
def test_more_parameters_later(pools, mode):
    expected = tasks.grown(None)
    for found in pools(2)(tasks.grown, mode):
        for key, value in expected.items():
            np.testing.assert_allclose(found[key], value, rtol=1e-9, atol=1e-9, err_msg=key)


@pytest.mark.parametrize("mode", MODES)
def test_copies_and_states_go_on(pools, mode):
    expected = tasks.copied(None)
    for found in pools(2)(tasks.copied, mode):
        for key, value in expected.items():
            np.testing.assert_allclose(found[key], value, rtol=1e-9, atol=1e-9, err_msg=key)


@pytest.mark.parametrize("mode", MODES)
def test_owners_among_some_of_the_processes(pools, mode):
    """Two pairs of four, each with gradients of its own."""
    for found, expected in zip(pools(4)(tasks.pairs, mode), [tasks.pairs(None, i) for i in (0, 0, 1, 1)], strict=True):
        for key, value in expected.items():
            np.testing.assert_allclose(found[key], value, rtol=1e-9, atol=1e-9, err_msg=key)


@pytest.mark.parametrize("mode", MODES)
def test_alone_owners_mean_nothing(mode):
    found = tasks.train(("SFNorMuon", {**BASE, "owners": mode}), torch.float32, 10)
    for key, value in tasks.train(CASES["SFNorMuon"], torch.float32, 10).items():
        np.testing.assert_array_equal(found[key], value)


@pytest.mark.parametrize("mode", MODES)
def test_a_group_of_one_process(pools, mode):
    expected = tasks.train(CASES["SFNorMuon"], torch.float32, 5)
    for found in pools(2)(tasks.group_of_one, mode):
        for key, value in expected.items():
            np.testing.assert_array_equal(found[key], value)


@pytest.mark.parametrize("mode", MODES)
def test_parameters_exchanged_under_owners_are_refused_everywhere(pools, mode):
    """By those too that hold nothing of what was exchanged."""
    for found in pools(2)(tasks.exchanged_under_owners, mode):
        assert f"1 parameters were exchanged for others, but owners={mode!r} was settled" in found
    assert [*pools(2)(tasks.taken_away_under_owners, mode)] == [["a"]] * 2


def test_unknown_owners():
    with pytest.raises(ValueError, match=r"owners is 'nobody'.*'factor', 'state', 'gradient'"):
        anytime.SFNorMuon([torch.nn.Parameter(torch.ones(2, 2))], owners="nobody")
