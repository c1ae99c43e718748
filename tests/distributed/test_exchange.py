"""Who owns what, what travels together, and which part of a tensor lies where: without any process."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from anytime.core.layout import Layout
from anytime.distributed.exchange import _units, balanced, cost, rounds
from anytime.distributed.parts import Spread, _tile, numel, slices
from anytime.distributed.processes import _differences

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
SIDES = st.integers(1, 9)


class Mesh:
    """As much of a DeviceMesh as a Spread looks at."""

    def __init__(self, shape: tuple[int, ...], at: tuple[int, ...] | None = None) -> None:
        self.shape, self.ndim = shape, len(shape)
        self.at = at or (0,) * len(shape)
        self.mesh = torch.arange(math.prod(shape)).view(shape).flip(0)

    def size(self, number: int | None = None) -> int:
        return math.prod(self.shape) if number is None else self.shape[number]

    def get_coordinate(self) -> list[int]:
        return list(self.at)


def chunks(side: int, number: int) -> list[tuple[int, int]]:
    """What torch.chunk makes of a side, empty ones too: the definition of Shard."""
    size = -(-side // number)
    return [(min(i * size, side), min((i + 1) * size, side)) for i in range(number)]


# ------------------------------------------------------------------- owners


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 6), st.data())
def test_an_owner_is_a_candidate_and_loads_add_up(costs, size, data):
    among = [
        data.draw(st.lists(st.integers(0, size - 1), min_size=1, unique=True).map(sorted), label="among") for _ in costs
    ]
    before = [float(data.draw(st.integers(0, 20), label="load")) for _ in range(size)]
    load = list(before)
    owners = balanced(costs, among, load)
    assert all(owner in candidates for owner, candidates in zip(owners, among, strict=True))
    for rank in range(size):
        assert load[rank] == before[rank] + sum(c for c, owner in zip(costs, owners, strict=True) if owner == rank)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 6))
def test_no_owner_has_more_than_another_and_one_matrix(costs, size):
    """Graham's bound: whoever is fullest had least before its last matrix."""
    load = [0.0] * size
    owners = balanced(costs, [range(size)] * len(costs), load)
    smallest = {
        rank: min((c for c, o in zip(costs, owners, strict=True) if o == rank), default=0) for rank in range(size)
    }
    for rank in range(size):
        assert load[rank] - smallest[rank] <= min(load)
    assert size * max(load) <= sum(costs) + (size - 1) * max(costs)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(1, 3))
def test_owners_are_within_a_third_of_the_best_division(costs, size):
    """What the longest processing time first rule is known for: 4/3 − 1/(3 size) of the best that there is."""
    load = [0.0] * size
    balanced(costs, [range(size)] * len(costs), load)
    best = min(
        max(sum(c for c, o in zip(costs, owners, strict=True) if o == rank) for rank in range(size))
        for owners in product(range(size), repeat=len(costs))
    )
    assert 3 * size * max(load) <= (4 * size - 1) * best


def test_equal_matrices_go_around():
    assert balanced([3.0] * 6, [range(3)] * 6, [0.0] * 3) == [0, 1, 2, 0, 1, 2]
    assert balanced([1.0, 5.0, 1.0], [range(2)] * 3, [0.0, 0.0]) == [1, 0, 1]
    load = [4.0, 0.0]
    assert balanced([1.0, 1.0], [range(2)] * 2, load) == [1, 1]
    assert load == [4.0, 2.0]


def test_the_cost_of_a_polar_factor():
    """Multiply-adds of an iteration: Gram matrix, its square, and the product; of every matrix."""
    assert cost(Layout(), (2, 3)) == cost(Layout(), (3, 2)) == 4 * (2 * 3 + 2)
    assert cost(Layout(), (5, 2, 3)) == 5 * cost(Layout(), (2, 3))
    assert cost(Layout(flat=True), (2, 3, 5)) == cost(Layout(), (2, 15))


# ------------------------------------------------------------------- rounds


@given(
    st.integers(1, 5).flatmap(
        lambda size: st.tuples(
            st.just(size),
            st.lists(st.tuples(st.integers(0, size - 1), st.integers(1, 30), st.integers(0, 3)), max_size=40),
        )
    ),
    st.integers(1, 60),
)
def test_rounds_hold_everything_once_and_no_owner_too_much(drawn, most):
    size, units = drawn
    owners, sizes, kinds = ([unit[i] for unit in units] for i in range(3))
    found = rounds(owners, sizes, kinds, size, most)
    assert sorted(i for together in found for i in together) == list(range(len(units)))
    assert all(found)
    for owner in range(size):
        mine = [[i for i in together if owners[i] == owner] for together in found]
        order = [i for together in mine for i in together]
        assert order == sorted(order, key=lambda i: (kinds[i], i))
        for number, together in enumerate(mine):
            total = sum(sizes[i] for i in together)
            assert total <= most or len(together) == 1
            if number + 1 < len(mine) and mine[number + 1]:  # it was full
                assert together
                assert total + sizes[mine[number + 1][0]] > most


def test_rounds_of_several_owners_are_side_by_side():
    assert rounds([0, 1, 0, 1], [5, 5, 5, 5], [0, 0, 0, 0], 2, 100) == [[0, 2, 1, 3]]
    assert rounds([0, 1, 0, 1], [5, 5, 5, 5], [0, 0, 0, 0], 2, 5) == [[0, 1], [2, 3]]
    assert rounds([0, 0, 0], [5, 5, 5], [2, 1, 1], 1, 10) == [[1, 2], [0]]
    assert rounds([], [], [], 3, 10) == []


# ------------------------------------------------------------------- parts


@st.composite
def spread_at(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]]:
    shape = tuple(draw(st.lists(SIDES, min_size=1, max_size=4)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    dims = st.integers(0, len(shape) - 1)
    placements = tuple(draw(st.one_of(st.just(R), dims.map(Shard))) for _ in mesh)
    return shape, mesh, placements


@given(spread_at())
def test_boxes_are_torchs_chunks_and_tile_the_tensor(drawn):
    shape, mesh, placements = drawn
    whole = torch.arange(math.prod(shape)).view(shape)
    at = next(iter(product(*map(range, mesh))))
    boxes = Spread(shape, Mesh(mesh, at), placements).boxes()
    cut = [number for number, p in enumerate(placements) if not p.is_replicate() and mesh[number] > 1]
    assert len(boxes) == math.prod(mesh[number] for number in cut)
    assert sorted(torch.cat([whole[slices(box)].reshape(-1) for box in boxes]).tolist()) == whole.view(-1).tolist()
    for coordinate in product(*map(range, mesh)):
        part = whole
        for number, placement in enumerate(placements):
            if not placement.is_replicate():
                first, end = chunks(part.shape[placement.dim], mesh[number])[coordinate[number]]
                part = part.narrow(placement.dim, first, end - first)
        spread = Spread(shape, Mesh(mesh, coordinate), placements)
        assert torch.equal(whole[slices(spread.box())], part)
        here = 0  # this process's number among those who hold the tensor together
        for number in cut:
            here = here * mesh[number] + coordinate[number]
        assert spread.holders()[here] == spread.mesh.mesh[coordinate]
        assert numel(spread.boxes()[here]) == part.numel()
        assert torch.equal(whole[slices(spread.boxes()[here])], part)


def test_what_cuts():
    assert list(Spread((4, 4), Mesh((2, 1, 2)), (S1, S0, R)).sharded()) == [(0, 1)]
    assert list(Spread((4, 4), Mesh((2, 2)), (S0, S1)).sharded()) == [(0, 0), (1, 1)]


class Placed:
    """A tensor as far as `Spread.of` looks."""

    def __init__(self, placements: tuple[Any, ...]) -> None:
        self.shape, self.device_mesh, self.placements = (4, 4), Mesh((2,)), placements


def test_parts_of_a_sum_are_no_parameter():
    assert Spread.of(Placed((S0,))).placements == (S0,)
    with pytest.raises(ValueError, match=r"shape \(4, 4\).*parts of a sum"):
        Spread.of(Placed((Partial(),)))


@pytest.mark.parametrize(
    ("boxes", "fine"),
    [
        ([((0, 2), (0, 4)), ((2, 4), (0, 4))], True),
        ([((0, 2), (0, 4)), ((2, 4), (0, 4)), ((4, 4), (0, 4))], True),
        ([((0, 2), (0, 2)), ((0, 2), (2, 4)), ((2, 4), (0, 2)), ((2, 4), (2, 4))], True),
        ([((0, 2), (0, 4))], False),
        ([((0, 3), (0, 4)), ((1, 4), (0, 4))], False),
        ([((0, 2), (0, 4)), ((1, 3), (0, 4))], False),
        ([((0, 4), (0, 2)), ((0, 2), (2, 4)), ((2, 4), (2, 4))], False),
        ([((0, 2), (0, 4)), ((0, 2), (0, 4)), ((2, 4), (0, 4))], False),
    ],
)
def test_tiles(boxes, fine):
    assert _tile(boxes, (4, 4)) == fine


def test_parts_that_are_no_blocks_are_refused(monkeypatch):
    monkeypatch.setattr(Spread, "box", lambda self, at=None: ((0, 3), (0, 4)))
    with pytest.raises(ValueError, match=r"shape \(4, 4\).*does not lie in blocks"):
        Spread((4, 4), Mesh((2,)), (S0,)).boxes()


@st.composite
def split(draw: st.DrawFn) -> tuple[tuple[int, ...], Layout]:
    flat = draw(st.booleans())
    shape = tuple(draw(st.lists(SIDES, min_size=2, max_size=4)))
    dim = 0 if flat else draw(st.integers(0, 1))
    _, m, n = Layout(flat).shape(shape)
    side = (m, n)[dim]
    cuts = sorted(draw(st.sets(st.integers(1, side), max_size=3)) | {side})
    sizes = tuple(b - a for a, b in zip([0, *cuts], cuts, strict=False))
    return shape, Layout(flat, dim, sizes if draw(st.booleans()) else ())


@given(split(), st.integers(1, 4), st.data())
def test_the_layout_of_a_part_is_its_share_of_each_piece(drawn, world, data):
    shape, layout = drawn
    cut = data.draw(st.integers(0, len(shape) - 1), label="cut")
    whole = torch.arange(math.prod(shape)).view(shape)
    found = []
    for rank in range(world):
        spread = Spread(shape, Mesh((world,), (rank,)), (Shard(cut),))
        part = whole[slices(spread.box())]
        here = spread.layout_here(layout)
        assert (here.flat, here.dim, len(here.sizes)) == (layout.flat, layout.dim, len(layout.sizes))
        pieces = here.pieces(part)
        assert torch.equal(here.join(pieces, part.shape), part)
        found.append([piece.reshape(-1).tolist() for piece in pieces])
    for number, piece in enumerate(layout.pieces(whole)):
        assert sorted(i for of in found for i in of[number]) == sorted(piece.reshape(-1).tolist())


def test_a_flat_kernel_split_by_columns_is_not_cut_along_them():
    layout = Layout(True, 1, (2, 4))
    shape = (4, 3, 2)
    assert Spread(shape, Mesh((2,)), (S0,)).layout_here(layout) == layout
    with pytest.raises(ValueError, match="cannot be cut along its columns"):
        Spread(shape, Mesh((2,)), (S1,)).layout_here(layout)


@given(split(), st.data())
def test_kinds_and_sides(drawn, data):
    shape, layout = drawn
    ndim = len(shape)
    kinds = [layout.kind(dim, ndim) for dim in range(ndim)]
    assert kinds == [layout.kind(dim - ndim, ndim) for dim in range(ndim)]
    count, m, n = layout.shape(shape)
    for kind, size in (("lead", count), ("row", m), ("column", n)):
        assert math.prod(side for side, k in zip(shape, kinds, strict=True) if k == kind) == size
    assert layout.sides(shape) == [tuple(piece.shape[-2:]) for piece in layout.pieces(torch.empty(shape))]


@given(split(), st.integers(1, 4), st.data())
def test_a_statistic_a_row_is_spread_as_rows_are(drawn, world, data):
    shape, layout = drawn
    cut = data.draw(st.integers(0, len(shape) - 1), label="cut")
    for rank in range(world):
        spread = Spread(shape, Mesh((world,), (rank,)), (Shard(cut),))
        rows = Spread(layout.row_shape(shape), spread.mesh, spread.rows(layout))
        if layout.kind(cut, len(shape)) == "column":
            assert rows.placements == (R,)
        else:
            assert rows.placements == (Shard(cut),)
            assert rows.box()[cut] == spread.box()[cut]


# ------------------------------------------------------------------- units


@given(split(), st.integers(1, 3), st.integers(1, 3), st.data())
def test_units_are_the_matrices_and_their_parts_tile_them(drawn, a, b, data):
    shape, layout = drawn
    dims = st.integers(0, len(shape) - 1)
    placements = tuple(Shard(data.draw(dims)) for _ in range(2))
    spread = Spread(shape, Mesh((a, b)), placements)
    boxes = spread.boxes()
    units = list(_units(7, spread, layout, dict(enumerate(boxes))))
    count, m, n = layout.shape(shape)
    assert len(units) == count
    for unit in units:
        assert unit.member == 7
        assert math.prod(unit.shape) == m * n
        assert unit.cost == cost(layout, unit.shape) > 0
        assert sum(map(numel, unit.boxes.values())) == m * n
        assert all(numel(box) for box in unit.boxes.values())
        for rank, box in unit.boxes.items():
            inside = [first <= i < end for i, (first, end) in zip(unit.index, boxes[rank], strict=False)]
            assert all(inside)
            assert box == boxes[rank][len(unit.index) :]
    assert len({unit.index for unit in units}) == count


# ------------------------------------------------------------------- words


def test_differences_name_the_process_and_the_parameter(monkeypatch):
    monkeypatch.setattr("torch.distributed.get_process_group_ranks", lambda group: [3, 5, 8])
    assert "process 3 has 2 of them, process 8 1" in _differences([["a", "b"], ["a", "b"], ["a"]], [0] * 3, None)
    assert "process 3 has b; process 5 has c" in _differences([["a", "b"], ["a", "c"], ["a", "d"]], [0] * 3, None)
    assert "process 5 has b; process 8 has c" in _differences([["a"], ["b"], ["c"]], [0, 1, 1], None)
    errors = [["a"], ["error too bad"], ["error worse"]]
    assert _differences(errors, [0, 1, 1], None) == "process 5: too bad; process 8: worse"
    assert _differences([["a"], ["a"], ["a"]], [0] * 3, None)
