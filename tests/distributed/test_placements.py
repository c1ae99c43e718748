"""Sharded parameters: whatever the placement, X, Y, Z and the state are those of one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import tasks
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tasks import Arrays, Case, Where
from torch.distributed.tensor import Replicate, Shard

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)

PLACES: dict[str, tuple[int, Where]] = {
    "rows of 2": (2, ((2,), [S0])),
    "columns of 2": (2, ((2,), [S1])),
    "third of 2": (2, ((2,), [S2])),
    "replicas": (2, ((2,), [R])),
    "rows of 4": (4, ((4,), [S0])),
    "columns of 4": (4, ((4,), [S1])),
    "hybrid": (4, ((2, 2), [R, S0])),
    "hybrid columns": (4, ((2, 2), [S1, R])),
    "tiles": (4, ((2, 2), [S0, S1])),
    "tiles, columns first": (4, ((2, 2), [S1, S0])),
    "rows twice": (4, ((2, 2), [S0, S0])),
    "columns twice": (4, ((2, 2), [S1, S1])),
    "experts and rows": (4, ((2, 2), [S1, S2])),
    "one in the mesh's way": (2, ((1, 2), [S1, S0])),
}
BASE: dict[str, Any] = {"lr": 0.05, "warmup_steps": 5, "weight_decay": 0.1}
CASES: dict[str, Case] = {
    "SFNorMuon": ("SFNorMuon", BASE),
    "late average": ("SFNorMuon", {**BASE, "averaging_power": 1.0, "averaging_warmup": 10}),
    "growing β": ("SFNorMuon", {**BASE, "beta_growth": 0.5, "beta_growth_start": 5}),
    "nesterov, decay at y": (
        "SFNorMuon",
        {**BASE, "nesterov": True, "momentum_growth": 0.5, "momentum_growth_start": 2, "decay_at": "y"},
    ),
    "no decay": ("SFNorMuon", {**BASE, "decay_at": None}),
    "rows as they are": ("SFNorMuon", {**BASE, "row_norm": False}),
    "max-side": ("SFNorMuon", {**BASE, "scaling": "max-side"}),
    "aspect": ("SFNorMuon", {**BASE, "scaling": "aspect", "eps": 0.0}),
    "unscaled": ("SFNorMuon", {**BASE, "scaling": None}),
    "narrow momentum": ("SFNorMuon", {**BASE, "momentum_dtype": torch.bfloat16}),
    "SFMuon": ("SFMuon", BASE),
    "SFMuon, aspect": ("SFMuon", {**BASE, "scaling": "aspect"}),
    "SFSpectralSGD": ("SFSpectralSGD", {"lr": 0.05}),
    "frobenius ball": ("SFSpectralSGD", {"lr": 0.05, "projection": "frobenius", "radius": 1.0}),
    "spectral ball": ("SFSpectralSGD", {"lr": 0.05, "projection": "spectral", "radius": 1.0}),
    "SFAdamW": ("SFAdamW", BASE),
    "SFAdamW, moment": ("SFAdamW", {**BASE, "bias_correction": "moment"}),
    "SFSGD": ("SFSGD", {"lr": 0.1}),
    "SFLion": ("SFLion", {**BASE, "lr": 0.01}),
    "NorMuon": ("NorMuon", {"lr": 0.05}),
    "Muon": ("Muon", {"lr": 0.05, "scaling": "aspect"}),
    "SpectralDescent": ("SpectralDescent", {"lr": 0.05, "momentum": 0.5}),
    "Shampoo": ("Shampoo", {"lr": 0.05}),
    "AdamW": ("AdamW", {"lr": 0.01}),
    "SignSGD": ("SignSGD", {"lr": 0.01, "momentum": 0.9}),
    "Lion": ("Lion", {"lr": 0.01}),
}
WITHIN = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 1e-5}
STEPS = 100
COMMON = {"rows of 2", "columns of 2", "rows of 4", "hybrid", "tiles"}


@cache
def alone(name: str, dtype: torch.dtype, steps: int) -> Arrays:
    return tasks.train(CASES[name], dtype, steps)


def compare(everyones: list[Arrays], expected: Arrays, within: float, *, narrow: bool = False) -> None:
    """Bit for bit the same on every process, and within the tolerance what one process finds.

    Narrow parameters are rounded from y, which is compared, and may fall to the other side.
    """
    for found in everyones:
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert found[key].tobytes() == everyones[0][key].tobytes(), key
            if not narrow or (" " in key and not key.endswith("residual")):
                np.testing.assert_allclose(found[key], value, rtol=within, atol=within, err_msg=key)


def check(pools: Any, name: str, place: str, dtype: torch.dtype, steps: int = STEPS) -> None:
    world, where = PLACES[place]
    expected = alone(name, dtype, steps)
    assert expected["skipped"] == (steps + 19) // 40 > 0
    found = pools(world)(tasks.train, CASES[name], dtype, steps, where)
    compare(found, expected, WITHIN[dtype], narrow=dtype == torch.bfloat16)


@pytest.mark.parametrize("place", PLACES)
def test_every_placement(pools, place):
    check(pools, "SFNorMuon", place, torch.float64, STEPS if place in COMMON else 30)


@pytest.mark.slow
@pytest.mark.parametrize("place", [place for place in PLACES if place not in COMMON])
def test_every_placement_for_longer(pools, place):
    check(pools, "SFNorMuon", place, torch.float64)


@pytest.mark.parametrize(("number", "name"), list(enumerate(CASES)), ids=list(CASES))
def test_every_optimizer(pools, number, name):
    place = ("columns of 2", "rows of 2", "columns of 2", "rows of 2", "tiles")[number % 5]
    check(pools, name, place, (torch.float64, torch.float32)[number % 2])


def test_narrow_parameters(pools):
    check(pools, "SFNorMuon", "tiles", torch.bfloat16)


OTHERS = ["columns of 4", "tiles, columns first", "rows twice", "hybrid", "experts and rows"]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "name"), list(enumerate(CASES)), ids=list(CASES))
def test_every_optimizer_in_other_places(pools, number, name):
    """Three places each, and a precision each."""
    for turn, dtype in enumerate(WITHIN):
        check(pools, name, OTHERS[(number + 2 * turn) % len(OTHERS)], dtype)


@pytest.mark.parametrize("placements", [[S0, S1], [S0, S0], [S1, R]], ids=["tiles", "rows twice", "hybrid"])
def test_processes_of_a_mesh_in_an_order_of_their_own(pools, placements):
    """Along each dimension of a mesh they must ascend, for torch too; over several they need not."""
    where: Where = (((0, 2), (1, 3)), placements)
    found = pools(4)(tasks.train, CASES["SFNorMuon"], torch.float64, 5, where, timeout=60)
    expected = tasks.train(CASES["SFNorMuon"], torch.float64, 5)
    compare(found, expected, 1e-9)


@pytest.mark.parametrize("place", ["rows of 2", "columns of 2", "tiles", "hybrid"])
def test_a_step_is_skipped_by_all_or_none(pools, place):
    world, where = PLACES[place]
    for spoiled, value in ((0, float("inf")), (world - 1, float("nan"))):
        for kept, went_on, skipped, raised_kept, said in pools(world)(
            tasks.skip, CASES["SFNorMuon"], where, spoiled, value
        ):
            assert kept
            assert went_on
            assert skipped == 1
            assert raised_kept
            assert "inf or NaN" in said


def test_a_step_is_skipped_beside_the_mesh(pools):
    """Everyone in the mesh that the parameters' was cut from."""
    assert pools(4)(tasks.skip_beside) == [1, 1, 1, 1]


@pytest.mark.parametrize("placements", [[S1], [R], None], ids=["columns", "replicated", "partial"])
def test_gradients_placed_otherwise(pools, placements):
    expected = tasks.moved_gradients(CASES["SFNorMuon"], None, placements)
    found = pools(2)(tasks.moved_gradients, CASES["SFNorMuon"], ((2,), [S0]), placements)
    compare(found, expected, 1e-9)


@pytest.mark.parametrize("name", ["SFNorMuon", "NorMuon", "SFAdamW"])
@pytest.mark.parametrize("place", ["rows of 2", "columns of 2", "tiles"])
def test_modes(pools, name, place):
    world, where = PLACES[place]
    found = pools(world)(tasks.modes, CASES[name], torch.float32, where)
    compare(found, tasks.modes(CASES[name], torch.float32), 1e-5)


def test_modes_of_narrow_parameters(pools):
    found = pools(2)(tasks.modes, CASES["SFNorMuon"], torch.bfloat16, PLACES["columns of 2"][1])
    assert found[0].keys() == tasks.modes(CASES["SFNorMuon"], torch.bfloat16).keys()


TRANSFERS = {
    "plain to rows": (2, None, ((2,), [S0])),
    "rows to plain": (2, ((2,), [S0]), None),
    "rows to rows": (2, ((2,), [S0]), ((2,), [S0])),
    "columns to rows": (2, ((2,), [S1]), ((2,), [S0])),
    "rows to tiles": (4, ((4,), [S0]), ((2, 2), [S0, S1])),
    "plain to tiles": (4, None, ((2, 2), [S1, S0])),
    "hybrid to plain": (4, ((2, 2), [R, S0]), None),
}


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("evaluating", [False, True], ids=["train", "eval"])
def test_states_between_placements(pools, transfer, evaluating):
    world, first, then = TRANSFERS[transfer]
    case = CASES["Shampoo"] if transfer == "rows to plain" and not evaluating else CASES["SFNorMuon"]
    expected = tasks.reloaded(case, torch.float64, None, None, evaluating)
    assert expected["refused"] == 1
    straight = tasks.reloaded(case, torch.float64, None, None, False)
    for key in straight.keys() - {"fingerprints"}:
        np.testing.assert_array_equal(straight[key], expected[key], err_msg=key)
    found = pools(world)(tasks.reloaded, case, torch.float64, first, then, evaluating)
    prints = [of.pop("fingerprints") for of in found]
    for some in prints:
        np.testing.assert_array_equal(some, prints[0])
    expected.pop("fingerprints")
    compare(found, expected, 1e-9)


@pytest.mark.parametrize("where", [((2,), [S0]), ((2,), [S1])], ids=["rows", "columns"])
def test_fingerprints_of_parts_add_up(pools, where):
    expected = tasks.prints(None)
    for found in pools(2)(tasks.prints, where):
        assert found == expected
    for found in pools(4)(tasks.prints, ((2, 2), [S0, S1])):
        assert found == expected


def test_square_experts_under_shampoo(pools):
    shapes, rules = {"experts": (3, 4, 4)}, {"experts": {"rule": "matrix"}}
    expected = tasks.few(CASES["Shampoo"], shapes, rules, None)
    for where in (((2,), [S0]), ((2,), [S1])):
        compare(pools(2)(tasks.few, CASES["Shampoo"], shapes, rules, where), expected, 1e-9)


def test_a_split_into_single_columns(pools):
    shapes, rules = {"pair": (6, 2)}, {"pair": {"rule": "matrix", "split": {"sizes": (1, 1), "dim": 1}}}
    expected = tasks.few(CASES["SFNorMuon"], shapes, rules, None)
    for where in (((2,), [S0]), ((2,), [S1])):
        compare(pools(2)(tasks.few, CASES["SFNorMuon"], shapes, rules, where), expected, 1e-9)


@pytest.mark.parametrize("hidden", [8, 10])
def test_fsdp_with_tensor_parallelism(pools, hidden):
    expected = tasks.real(hidden, parallel=False)
    found = pools(4)(tasks.real, hidden, True)
    assert all(of.pop("strided") for of in found)
    expected.pop("strided")
    for of in found:
        assert of.keys() == expected.keys()
        for key, value in expected.items():
            np.testing.assert_allclose(of[key], value, rtol=1e-9, atol=1e-9, err_msg=key)


@st.composite
def spreads(draw: st.DrawFn, world: int) -> tuple[dict[str, Any], dict[str, Any], Where]:
    """Some matrices, split or not, flat or not, on some mesh."""
    side = st.integers(1, 6)
    shapes: dict[str, Any] = {}
    rules: dict[str, Any] = {}
    for number in range(draw(st.integers(1, 4))):
        name = f"m{number}"
        shape = draw(st.lists(side, min_size=2, max_size=4).map(tuple))
        shapes[name], rules[name] = shape, {"rule": "matrix"}
        if len(shape) == 2 and draw(st.booleans()):
            dim = draw(st.integers(0, 1))
            cut = draw(st.integers(0, shape[dim] - 1))
            sizes = tuple(size for size in (cut, shape[dim] - cut) if size)
            if len(sizes) < shape[1] or dim == 0:
                rules[name]["split"] = {"sizes": sizes, "dim": dim}
    mesh = draw(st.sampled_from([(2,)] if world == 2 else [(4,), (2, 2)]))
    placements = [draw(st.sampled_from([R, S0, S1, S2, Shard(3)])) for _ in mesh]
    return shapes, rules, (mesh, placements)


@pytest.mark.parametrize("world", [2, 4])
def test_any_placement(pools, world):
    any_placement(pools, world, 8)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_any_placement_at_length(pools, world):
    any_placement(pools, world, 100)


def any_placement(pools: Any, world: int, examples: int) -> None:
    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(spreads(world), st.sampled_from(["SFNorMuon", "SFMuon, aspect", "max-side", "NorMuon"]))
    def run(drawn: tuple[dict[str, Any], dict[str, Any], Where], name: str) -> None:
        shapes, rules, where = drawn
        expected = tasks.few(CASES[name], shapes, rules, None)
        compare(pools(world)(tasks.few, CASES[name], shapes, rules, where), expected, 1e-9)

    run()


def test_optimizers_share_their_groups_of_processes(pools):
    """A group holds threads to its end: a second optimizer of the same layout makes none."""
    for rank, (made, pair) in enumerate(pools(4)(tasks.groups_made)):
        assert len(set(made)) == 1
        assert pair == [rank - rank % 2, rank - rank % 2 + 1]
