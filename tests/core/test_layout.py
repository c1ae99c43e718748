"""How parameters are read as matrices, and back."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anytime.core.layout import Layout

quick = settings(max_examples=150)


@st.composite
def partitions(draw, total):
    """Positive sizes that add up to total."""
    cuts = sorted(draw(st.sets(st.integers(1, total - 1), max_size=3))) if total > 1 else []
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True))


@st.composite
def cases(draw):
    """(shape, layout that fits it)."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=2, max_size=5)))
    flat = draw(st.booleans())
    if not draw(st.booleans()):
        return shape, Layout(flat)
    dim = draw(st.integers(0, 1))
    rows, columns = (shape[0], math.prod(shape[1:])) if flat else shape[-2:]
    return shape, Layout(flat, dim, draw(partitions((rows, columns)[dim])))


def numbered(shape):
    return torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)


@quick
@given(case=cases())
def test_join_is_the_inverse_of_pieces(case):
    shape, layout = case
    w = numbered(shape)
    pieces = layout.pieces(w)
    assert sum(piece.numel() for piece in pieces) == w.numel()
    joined = layout.join(pieces, shape)
    assert joined.shape == shape
    assert torch.equal(joined, w)
    assert torch.equal(layout.join([piece + 1 for piece in pieces], shape), w + 1)


@quick
@given(case=cases())
def test_pieces_are_the_matrices(case):
    shape, layout = case
    count, rows, columns = layout.shape(shape)
    assert (count, rows, columns) == (
        (1, shape[0], math.prod(shape[1:])) if layout.flat else (math.prod(shape[:-2]), shape[-2], shape[-1])
    )
    whole = numbered(shape).reshape(count, rows, columns)
    pieces = layout.pieces(numbered(shape))
    assert len(pieces) == max(1, len(layout.sizes))
    start = 0
    for piece, size in zip(pieces, layout.sizes or (rows,), strict=True):
        expected = whole[:, :, start : start + size] if layout.dim else whole[:, start : start + size]
        assert torch.equal(piece, expected)
        start += size


@quick
@given(case=cases())
def test_parse_is_the_inverse_of_str(case):
    _, layout = case
    assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (Layout(), "matrix"),
        (Layout(True), "flat"),
        (Layout(False, 0, (4, 4, 4)), "matrix rows 4+4+4"),
        (Layout(True, 1, (2, 3)), "flat columns 2+3"),
    ],
)
def test_a_layout_as_text(layout, text):
    assert str(layout) == text
    assert Layout.parse(text) == layout


@quick
@given(case=cases())
def test_row_pieces_are_views_with_a_row_for_each_row(case):
    """One number for each row of each piece: all of the statistic, each once, written in place."""
    shape, layout = case
    rows = torch.zeros(layout.row_shape(shape))
    pieces = layout.pieces(numbered(shape))
    views = layout.row_pieces(rows)
    assert [tuple(view.shape) for view in views] == [tuple(piece.shape[:2]) for piece in pieces]
    for i, view in enumerate(views, start=1):
        view.add_(i)
    assert rows.numel() == sum(view.numel() for view in views)
    assert float(rows.sum()) == sum(i * view.numel() for i, view in enumerate(views, start=1))
    assert (rows > 0).all()


@pytest.mark.parametrize(
    ("shape", "layout", "expected"),
    [
        ((6, 4), Layout(), (6,)),
        ((3, 6, 4), Layout(), (3, 6)),
        ((2, 3, 6, 4), Layout(), (2, 3, 6)),
        ((6, 3, 2, 2), Layout(True), (6,)),
        ((6, 4), Layout(False, 0, (2, 4)), (6,)),
        ((6, 4), Layout(False, 1, (1, 3)), (6, 2)),
        ((3, 6, 4), Layout(False, 1, (1, 3)), (3, 6, 2)),
        ((6, 3, 2, 2), Layout(True, 1, (4, 4, 4)), (6, 3)),
    ],
)
def test_row_shape_leads_as_the_parameter_does(shape, layout, expected):
    assert layout.row_shape(shape) == expected


@quick
@given(case=cases())
def test_row_pieces_go_with_the_rows_of_pieces(case):
    """A statistic reduced from the parameter by hand is what the pieces see."""
    shape, layout = case
    w = numbered(shape) + 1
    rows = torch.zeros(layout.row_shape(shape), dtype=w.dtype)
    for view, piece in zip(layout.row_pieces(rows), layout.pieces(w), strict=True):
        view.copy_(piece.sum(dim=-1))
    whole = w.reshape(layout.shape(shape)).sum(dim=-1).reshape(shape[0] if layout.flat else shape[:-1])
    by_row = rows.sum(dim=-1) if layout.sizes and layout.dim == 1 else rows
    assert torch.equal(by_row.reshape(whole.shape), whole)


def test_pieces_of_a_plain_matrix_are_views():
    w = numbered((6, 4))
    Layout(False, 0, (2, 4)).pieces(w)[1].zero_()
    assert torch.equal(w[2:], torch.zeros(4, 4, dtype=w.dtype))
    assert w[:2].any()


def test_a_tensor_that_is_not_contiguous():
    w = numbered((4, 6)).T
    layout = Layout(False, 1, (1, 3))
    assert torch.equal(layout.join(layout.pieces(w), w.shape), w)
    assert torch.equal(layout.pieces(w)[0][0], w[:, :1])


@quick
@given(case=cases())
def test_addresses_are_where_the_pieces_lie(case):
    """Each matrix and its row statistics, read from flat memory, in the order of pieces."""
    shape, layout = case
    w, rows = numbered(shape), numbered(layout.row_shape(shape))
    matrices = [matrix for part in layout.pieces(w) for matrix in part]
    statistics = [row for part in layout.row_pieces(rows) for row in part]
    found = list(layout.addresses(shape))
    assert len(found) == len(matrices) == len(statistics)
    for piece, matrix, statistic in zip(found, matrices, statistics, strict=True):
        assert torch.equal(w.view(-1).as_strided((piece.m, piece.n), (piece.stride, 1), piece.first), matrix)
        assert torch.equal(rows.view(-1).as_strided((piece.m,), (piece.row_stride,), piece.first_row), statistic)
