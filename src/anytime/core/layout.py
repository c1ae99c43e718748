"""How a parameter is read as matrices: as it is, flattened, batched or split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor


class Piece(NamedTuple):
    """An m × n matrix inside a parameter: its first element and the distance of its rows, and the same for the
    statistic a row that goes with it."""

    m: int
    n: int
    first: int
    stride: int
    first_row: int
    row_stride: int


@dataclass(frozen=True)
class Layout:
    """`flat`: out × everything else, as a convolution kernel; otherwise the last two dimensions are the matrix and
    those before them count matrices (experts). `sizes` splits the matrix along its rows (dim 0) or columns (1)."""

    flat: bool = False
    dim: int = 0
    sizes: tuple[int, ...] = ()

    def __str__(self) -> str:
        text = "flat" if self.flat else "matrix"
        return f"{text} {('rows', 'columns')[self.dim]} {'+'.join(map(str, self.sizes))}" if self.sizes else text

    @classmethod
    @cache  # parsed for every parameter at every step
    def parse(cls, text: str) -> Layout:
        kind, *split = text.split()
        if not split:
            return cls(kind == "flat")
        return cls(kind == "flat", ("rows", "columns").index(split[0]), tuple(map(int, split[1].split("+"))))

    def shape(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """(how many, rows, columns) of the whole matrices in a parameter of this shape."""
        if self.flat:
            return 1, shape[0], _product(shape[1:])
        return _product(shape[:-2]), shape[-2], shape[-1]

    def kind(self, dim: int, ndim: int) -> str:
        """What a dimension of a parameter counts: "row", "column", or "lead" where it counts matrices."""
        if self.flat:
            return "column" if dim % ndim else "row"
        return {ndim - 1: "column", ndim - 2: "row"}.get(dim % ndim, "lead")

    def sides(self, shape: Sequence[int]) -> list[tuple[int, int]]:
        """(m, n) of each of `pieces`."""
        _, m, n = self.shape(shape)
        return [(size, n) if self.dim == 0 else (m, size) for size in self.sizes] or [(m, n)]

    def pieces(self, tensor: Tensor) -> list[Tensor]:
        """The matrices of a parameter-shaped tensor, as [count, m, n] each; views where strides allow it."""
        whole = tensor.reshape(self.shape(tensor.shape))
        return list(torch.split(whole, list(self.sizes), dim=1 + self.dim)) if self.sizes else [whole]

    def join(self, pieces: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        """The inverse of `pieces`."""
        return (torch.cat(list(pieces), dim=1 + self.dim) if len(pieces) > 1 else pieces[0]).reshape(list(shape))

    def addresses(self, shape: Sequence[int]) -> Iterator[Piece]:
        """Where each matrix of a contiguous parameter of this shape lies, in the order of `pieces` and within them."""
        count, M, N = self.shape(shape)
        starts = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        for j, (start, size) in enumerate(zip(starts, self.sizes, strict=True) if self.sizes else [(0, 0)]):
            for i in range(count):
                if not self.sizes:
                    yield Piece(M, N, i * M * N, N, i * M, 1)
                elif self.dim == 0:
                    yield Piece(size, N, i * M * N + start * N, N, i * M + start, 1)
                else:
                    yield Piece(M, size, i * M * N + start, N, i * M * len(self.sizes) + j, len(self.sizes))

    def row_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of a statistic a row: the parameter's leading dimensions, so that it shards as the parameter does."""
        rows = (shape[0],) if self.flat else tuple(shape[:-1])
        return (*rows, len(self.sizes)) if self.sizes and self.dim == 1 else rows

    def row_pieces(self, rows: Tensor) -> list[Tensor]:
        """Views [count, m] of a row statistic, one for each of `pieces`."""
        if not self.sizes:
            return [rows.view(_product(rows.shape[:-1]), rows.shape[-1])]
        if self.dim == 1:
            return list(rows.view(_product(rows.shape[:-2]), *rows.shape[-2:]).unbind(-1))
        return list(torch.split(rows.view(_product(rows.shape[:-1]), rows.shape[-1]), list(self.sizes), dim=1))


def _product(shape: Sequence[int]) -> int:
    size = 1
    for side in shape:
        size *= side
    return size
