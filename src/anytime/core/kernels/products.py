"""Products of batches of matrices, and the polynomials that polar factors are made of.

What the polar iteration multiplies are polynomials of one Gram matrix: all symmetric, all commuting. So every product
can be read as A Bᵀ, rows of both contiguous, and only tiles on and below the diagonal are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

#: What rounding takes from an entry is kept times this: in float16 it would be lost below the least number.
_LOW: tl.constexpr = tl.constexpr(2048)


@triton.jit
def _mirrored(tile, c, batch, row, column, BLOCK: tl.constexpr):
    """Stores a tile on or below the diagonal, and its mirror image."""
    if row == column:  # rounding makes factors commute but nearly, and what is not symmetric grows
        inside = tl.arange(0, BLOCK)
        c = tl.where(inside[:, None] >= inside[None, :], c, c.T)
    else:
        tile.store([batch, column, row], c.T.reshape(1, BLOCK, BLOCK))
    tile.store([batch, row, column], c.reshape(1, BLOCK, BLOCK))


@triton.jit
def _symmetric(
    a_rows,
    b_rows,
    d_tile,
    e_tile,
    c_tile,
    low_tile,
    scales,
    k,
    tiles,
    alpha,
    beta,
    gamma,
    delta,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_E: tl.constexpr,
    HAS_LOW: tl.constexpr,
    POWER: tl.constexpr,
    DTYPE: tl.constexpr,
):
    batch = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    # Tile number to (i, j), i ≥ j: the root of i (i + 1) / 2 ≤ tile, mended where its rounding is off by one.
    i = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where((i + 1) * (i + 2) // 2 <= tile, i + 1, i)
    i = tl.where(i * (i + 1) // 2 > tile, i - 1, i)
    j = tile - i * (i + 1) // 2
    row = i * BLOCK
    column = j * BLOCK
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for at in tl.range(0, k, BLOCK_K):
        a = a_rows.load([batch, row, at]).reshape(BLOCK, BLOCK_K)
        b = b_rows.load([batch, column, at]).reshape(BLOCK, BLOCK_K)
        acc = tl.dot(a, b.T, acc)
    acc = acc * alpha
    if HAS_D:
        acc += beta * d_tile.load([batch, row, column]).reshape(BLOCK, BLOCK).to(tl.float32)
    if HAS_E:
        acc += delta * e_tile.load([batch, row, column]).reshape(BLOCK, BLOCK).to(tl.float32)
    inside = tl.arange(0, BLOCK)
    if i == j:
        acc += tl.where(inside[:, None] == inside[None, :], gamma, 0.0)
    if POWER > 0:
        scale = tl.load(scales + batch)
        acc = acc * scale
        if POWER > 1:
            acc = acc * scale
    c = acc.to(DTYPE)
    _mirrored(c_tile, c, batch, row, column, BLOCK)
    if HAS_LOW:
        _mirrored(low_tile, ((acc - c.to(tl.float32)) * _LOW).to(DTYPE), batch, row, column, BLOCK)


DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
_BLOCK_K = 64


def _block(n: int) -> int:
    return 128 if n > 64 else 64 if n > 32 else 32


def symmetric(
    A: Tensor,
    B: Tensor,
    out: Tensor,
    D: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    gamma: float = 0.0,
    *,
    E: Tensor | None = None,
    delta: float = 0.0,
    low: Tensor | None = None,
    scales: Tensor | None = None,
    power: int = 1,
) -> Tensor:
    """out = (alpha A Bᵀ + beta D + gamma I + delta E) · scales^power for A, B [batch, n, k] whose product is symmetric.

    D, E, out and low are [batch, n, n], scales [batch], power 1 or 2; low is what rounding took from out, times
    2048. Those written are none of the others, but low may be E. Rows are contiguous and start at multiples of 16
    bytes; what lies between the end of a written row and the next such multiple may be written too.
    """
    batch, n, k = A.shape
    block = _block(n)
    blocks = triton.cdiv(n, block)
    tiles = blocks * (blocks + 1) // 2
    d, e, c, remainder = (
        TensorDescriptor.from_tensor(out if x is None else x, [1, block, block]) for x in (D, E, out, low)
    )
    _symmetric[(batch * tiles,)](
        TensorDescriptor.from_tensor(A, [1, block, _BLOCK_K]),
        TensorDescriptor.from_tensor(B, [1, block, _BLOCK_K]),
        d,
        e,
        c,
        remainder,
        out if scales is None else scales,
        k,
        tiles,
        alpha,
        beta,
        gamma,
        delta,
        BLOCK=block,
        BLOCK_K=_BLOCK_K,
        HAS_D=D is not None,
        HAS_E=E is not None,
        HAS_LOW=low is not None,
        POWER=0 if scales is None else power,
        DTYPE=DTYPES[out.dtype],
        num_warps=4,
        num_stages=3,  # two programs fit on a processor, and one's beginning and end hide behind the other
    )
    return out


Steps = Sequence[tuple[float, float, float]]


def _row(n: int) -> int:
    """Elements from row to row: rows start at multiples of 16 bytes."""
    return -(-n // 8) * 8


@dataclass(frozen=True)
class Form:
    """How polynomials of m × n matrices are taken: by R = X Xᵀ alone where `gram`, and in how much memory.

    The iteration reads X [n, k] with n ≤ k. core.polar.polar_flops counts its operations.
    """

    m: int
    n: int
    gram: bool

    @property
    def tall(self) -> bool:
        return self.m > self.n

    @property
    def sides(self) -> tuple[int, int]:
        return min(self.m, self.n), max(self.m, self.n)

    @property
    def square(self) -> int:
        """Elements of a Gram matrix."""
        return _row(self.sides[0]) ** 2

    @property
    def whole(self) -> int:
        """Elements of a matrix or of its transpose; with `gram` at least three Gram matrices."""
        size = _row(self.m) * _row(self.n)
        return max(size, 3 * self.square) if self.gram else size

    @property
    def room(self) -> int:
        """Elements of working memory for each matrix, the matrix included."""
        return 2 * self.whole + self.square * (1 if self.gram or self.m == self.n else 2)


def matrices(memory: Tensor, batch: int, m: int, n: int, start: int = 0) -> Tensor:
    """[batch, m, n] in `memory` from element batch · start on."""
    return memory.as_strided((batch, m, n), (m * _row(n), _row(n), 1), memory.storage_offset() + batch * start)


def polynomial(form: Form, memory: Tensor, scales: Tensor, steps: Steps, restart: int) -> Tensor:
    """X ← (a I + b X Xᵀ + c (X Xᵀ)²) X for each step, of X [batch, n, k] at the start of `memory` times `scales`.

    The result [batch, form.m, form.n] lies in `memory` too. The Gram form starts anew from X after `restart` steps, if
    there are more: rounding makes the smallest eigenvalues of R negative, and every step multiplies them.
    """
    batch, (n, k) = len(scales), form.sides
    rest = 2 * form.whole
    cuts = [steps[:restart], steps[restart:]] if form.gram else [[step] for step in steps]
    parts = [part for part in cuts if part]
    X = matrices(memory, batch, n, k)
    for number, part in enumerate(parts):
        there = 0 if number % 2 else form.whole  # where X goes next; what it is made of may lie there until then
        slots = [there + i * form.square if form.gram else there if n == k else rest + form.square for i in range(3)]
        Q, R, B, T = (matrices(memory, batch, n, n, start) for start in (rest, *slots))
        _factor(X, part, Q, R, B, T, scales if number == 0 else None)
        if number == len(parts) - 1 and form.tall:
            return torch.bmm(X.mT, Q, out=matrices(memory, batch, k, n, there))
        X = torch.bmm(Q, X, out=matrices(memory, batch, n, k, there))
    return X


def _factor(X: Tensor, steps: Steps, Q: Tensor, R: Tensor, B: Tensor, T: Tensor, scales: Tensor | None) -> None:
    """Q ← the product of the steps' F = a I + b R + c R², R = X Xᵀ at first, then F R F; X and Q scaled by `scales`.

    A single step needs neither B nor T. Of several, F and their product are kept without their part of the identity
    until the last: rounding a large diagonal turns the vectors of F, which then no more commute. Of the first R and
    R F, whose least eigenvalues grow most, what rounding took is kept too.
    """
    last = len(steps) - 1
    symmetric(X, X, R, scales=scales, power=2, low=B if last else None)
    product, other = (T, Q) if last % 2 else (Q, T)  # they change places at every step but the first
    identity = 1.0  # how much of it the product has, beside what is kept
    for number, (a, b, c) in enumerate(steps):
        factor = B if number else product
        symmetric(R, R, factor, R, c, b, 0.0 if last else a, scales=None if last else scales)
        if number < last:
            low, back = (None, 0.0) if number else (B, a / _LOW.value)
            RF = symmetric(R, factor, other, R, beta=a, E=low, delta=back, low=low)
            symmetric(RF, factor, R, RF, beta=a, E=low, delta=back)
        if number:
            ends = number == last
            product, other = (
                symmetric(
                    product, factor, other, product, beta=a, gamma=identity * a if ends else 0.0,
                    E=factor, delta=identity, scales=scales if ends else None,
                ),
                product,
            )  # fmt: skip
        identity *= a
