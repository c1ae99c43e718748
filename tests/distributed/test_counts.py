"""What travels in a step, counted: elements each process sends, and calls.

All-to-all: what goes to others. All-gather: the output less one's own share. Reduce-scatter: the input less one's own
share. All-reduce: twice that. P elements of matrices, R others, W processes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tasks
import torch
from tasks import Count
from torch.distributed.tensor import Replicate, Shard

R, S0, S1 = Replicate(), Shard(0), Shard(1)
MODES = ("factor", "state", "gradient")
NORMUON = ("SFNorMuon", {"lr": 0.05, "warmup_steps": 5})


def matrices(number: int, shape: tuple[int, ...] = (8, 12)) -> dict[str, tuple[int, ...]]:
    return {f"m{i}": shape for i in range(number)}


def mean(counts: list[Count], kind: str) -> float:
    return float(np.mean([count["elements"][kind] for count in counts]))


def calls(counts: list[Count]) -> dict[str, int]:
    """The same on every process."""
    for count in counts:
        assert count["calls"] == counts[0]["calls"]
        assert (count["agreements"], count["flags"]) == (1, 1)
    return {kind: number for kind, number in counts[0]["calls"].items() if number}


def room(shapes: dict[str, tuple[int, ...]], world: int) -> int:
    """Elements of the fullest owner, the heaviest matrix first to who has the least to do."""
    load, filled = [0.0] * world, [0] * world
    cost = {name: min(s) ** 2 * (2 * max(s) + min(s)) for name, s in shapes.items()}
    for name in sorted(shapes, key=lambda name: -cost[name]):
        owner = load.index(min(load))
        load[owner] += cost[name]
        filled[owner] += shapes[name][0] * shapes[name][1]
    return max(filled)


# ------------------------------------------------------------------- data parallelism


@pytest.mark.parametrize("name", ["SFNorMuon", "SFAdamW"])
def test_nothing_travels_by_default(pools, name):
    for count in pools(2)(tasks.counted, (name, {}), {**matrices(4), "v": (7,)}, None, None):
        assert count["all"] == 0
        assert (count["agreements"], count["flags"]) == (0, 0)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_owners_without_padding(pools, mode, world):
    shapes = {**matrices(8), "v": (7,), "w": (6,)}
    P, rest = 8 * 96, 13
    counts = pools(world)(tasks.counted, NORMUON, shapes, None, mode)
    away = 1 - 1 / world
    expected = {"all_gather": P * away}
    if mode == "gradient":
        expected |= {"reduce_scatter": P * away, "all_reduce": 2 * rest * away}
    assert calls(counts) == dict.fromkeys(expected, 1)
    for count in counts:
        assert {kind: count["elements"][kind] for kind in expected} == pytest.approx(expected)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("mode", MODES)
def test_owners_with_padding(pools, mode, world):
    """Every owner sends as much as the fullest."""
    shapes = {"a": (8, 12), "b": (5, 7), "c": (9, 4), "d": (3, 3), "e": (6, 2)}
    P = sum(m * n for m, n in shapes.values())
    padded = world * room(shapes, world)
    assert padded > P
    counts = pools(world)(tasks.counted, NORMUON, {**shapes, "v": (7,)}, None, mode)
    away = 1 - 1 / world
    for count in counts:
        assert count["elements"]["all_gather"] == pytest.approx((P + (padded - P)) * away)
        if mode == "gradient":
            assert count["elements"]["reduce_scatter"] == pytest.approx(padded * away)


@pytest.mark.parametrize("mode", MODES)
def test_calls_do_not_grow_with_the_matrices(pools, mode):
    few = calls(pools(2)(tasks.counted, NORMUON, matrices(4), None, mode))
    assert few == calls(pools(2)(tasks.counted, NORMUON, matrices(12), None, mode))


@pytest.mark.parametrize("mode", MODES)
def test_evaluating_gathers_once(pools, mode):
    """eval() and train() each bring the others' matrices, unless everyone has everything."""
    for count in pools(2)(tasks.counted_modes, NORMUON, matrices(4), mode):
        assert count == ([0, 0, 0] if mode == "factor" else [4 * 96 / 2] * 3)


# ------------------------------------------------------------------- shards


@pytest.mark.parametrize("world", [2, 4])
def test_rows(pools, world):
    counts = pools(world)(tasks.counted, NORMUON, {**matrices(8), "v": (8,)}, ((world,), [S0]), None)
    P = 8 * 96
    assert calls(counts) == {"all_to_all": 2, "all_reduce": 1}
    assert mean(counts, "all_to_all") == 2 * (P / world) * (1 - 1 / world)
    assert mean(counts, "all_reduce") == pytest.approx(2 * 8 * (1 - 1 / world))  # a number a matrix


@pytest.mark.parametrize("world", [2, 4])
def test_columns(pools, world):
    counts = pools(world)(tasks.counted, NORMUON, {**matrices(8), "v": (8,)}, ((world,), [S1]), None)
    P = 8 * 96
    assert calls(counts) == {"all_to_all": 2, "all_reduce": 1}
    assert mean(counts, "all_to_all") == 2 * (P / world) * (1 - 1 / world)
    assert mean(counts, "all_reduce") == pytest.approx(2 * 8 * 8 * (1 - 1 / world))  # a number a row


def test_tiles(pools):
    counts = pools(4)(tasks.counted, NORMUON, matrices(8), ((2, 2), [S0, S1]), None)
    assert calls(counts) == {"all_to_all": 2, "all_reduce": 2}
    assert mean(counts, "all_to_all") == 2 * (8 * 96 / 4) * (1 - 1 / 4)
    assert mean(counts, "all_reduce") == pytest.approx(8 * (8 / 2) + 8)  # among two each: rows held here, matrices


def test_replicas_of_shards_send_within_their_shards_alone(pools):
    counts = pools(4)(tasks.counted, NORMUON, matrices(8), ((2, 2), [R, S0]), None)
    assert calls(counts) == {"all_to_all": 2, "all_reduce": 1}
    assert mean(counts, "all_to_all") == 2 * (8 * 96 / 2) * (1 - 1 / 2)
    assert {size for count in counts for size in count["groups"]["all_to_all"]} == {2}
    assert {size for count in counts for size in count["groups"]["all_reduce"]} == {2}


def test_replicas_send_nothing(pools):
    assert calls(pools(2)(tasks.counted, NORMUON, matrices(3), ((2,), [R]), None)) == {}


def test_whole_experts_stay(pools):
    assert calls(pools(2)(tasks.counted, NORMUON, {"experts": (4, 8, 12)}, ((2,), [S0]), None)) == {}
    counts = pools(2)(tasks.counted, NORMUON, {"experts": (4, 8, 12)}, ((2,), [S1]), None)
    assert calls(counts) == {"all_to_all": 2, "all_reduce": 1}
    assert mean(counts, "all_to_all") == 2 * (4 * 96 / 2) * (1 - 1 / 2)


def test_experts_travel_among_their_holders_alone(pools):
    counts = pools(4)(tasks.counted, NORMUON, {"experts": (8, 8, 12)}, ((2, 2), [S0, S1]), None)
    assert calls(counts) == {"all_to_all": 2, "all_reduce": 1}
    assert mean(counts, "all_to_all") == 2 * (8 * 96 / 4) * (1 - 1 / 2)
    assert {size for count in counts for size in count["groups"]["all_reduce"]} == {2}


def test_without_a_norm_rows_need_no_sum(pools):
    counts = pools(2)(tasks.counted, ("SFNorMuon", {"scaling": "max-side"}), matrices(4), ((2,), [S0]), None)
    assert calls(counts) == {"all_to_all": 2}


def test_elementwise_rules_send_nothing(pools):
    assert calls(pools(2)(tasks.counted, ("SFAdamW", {}), matrices(4), ((2,), [S0]), None)) == {}


def test_calls_do_not_grow_with_the_shards(pools):
    few = calls(pools(2)(tasks.counted, NORMUON, matrices(2), ((2,), [S0]), None))
    assert few == calls(pools(2)(tasks.counted, NORMUON, matrices(12), ((2,), [S0]), None))


# ------------------------------------------------------------------- rounds


@pytest.mark.parametrize("mode", [None, *MODES])
def test_small_rounds_find_the_same(pools, mode):
    """One matrix of every owner at a time: more calls, as many elements, equal results bit for bit."""
    shapes = {**matrices(8), **{f"n{i}": (4, 6) for i in range(4)}, "big": (24, 8)}
    where: Any = ((2,), [S0]) if mode is None else None
    bytes_ = 96 * 8  # one of the matrices in float64; the big one goes over it, two small ones do not
    at_once = pools(2)(tasks.counted, NORMUON, shapes, where, mode)
    in_rounds = pools(2)(tasks.counted, NORMUON, shapes, where, mode, bytes_)
    kind = "all_to_all" if mode is None else "all_gather"
    assert calls(at_once)[kind] == (2 if mode is None else 1)
    more = calls(in_rounds)[kind]
    assert (8 if mode is None else 4) <= more <= (14 if mode is None else 7)
    for a, b in zip(at_once, in_rounds, strict=True):
        for key, value in a["results"].items():
            np.testing.assert_allclose(b["results"][key], value, rtol=1e-12, atol=1e-12, err_msg=key)
    if mode is None:
        assert mean(at_once, kind) == mean(in_rounds, kind)
    assert torch.equal(*(torch.tensor(count["rounds"]) for count in in_rounds))
    assert in_rounds[0]["rounds"][0] > at_once[0]["rounds"][0]
