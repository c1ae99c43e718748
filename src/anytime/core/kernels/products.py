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
#: Σ σ⁴ of X of unit norm from which on a few large σ rule its Gram matrix, and the others are lost in their rounding.
_RULED: tl.constexpr = tl.constexpr(0.1)


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
    a_lows,
    b_lows,
    squares,
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
    SUMS: tl.constexpr,
    CAREFUL: tl.constexpr,
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
    if CAREFUL > 0:
        each = tl.arange(0, CAREFUL)
        fourth = tl.sum(tl.load(squares + batch * tiles + each, mask=each < tiles, other=0.0), 0)
        acc = acc * _LOW
        end = tl.where(fourth > _RULED, k, 0)
        for at in tl.range(0, end, BLOCK_K):  # one after the other, in the shared memory of the first loop
            a = a_rows.load([batch, row, at]).reshape(BLOCK, BLOCK_K)
            b = b_lows.load([batch, column, at]).reshape(BLOCK, BLOCK_K)
            acc = tl.dot(a, b.T, acc)
        for at in tl.range(0, end, BLOCK_K):
            a = a_lows.load([batch, row, at]).reshape(BLOCK, BLOCK_K)
            b = b_rows.load([batch, column, at]).reshape(BLOCK, BLOCK_K)
            acc = tl.dot(a, b.T, acc)
        acc = acc / _LOW
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
    if SUMS:
        total = tl.sum(tl.sum(acc * acc, 1), 0)
        tl.store(squares + batch * tiles + tile, tl.where(i == j, total, 2 * total))
    c = acc.to(DTYPE)
    _mirrored(c_tile, c, batch, row, column, BLOCK)
    if HAS_LOW:
        _mirrored(low_tile, ((acc - c.to(tl.float32)) * _LOW).to(DTYPE), batch, row, column, BLOCK)


DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
_BLOCK_K = 64


def _block(n: int) -> int:
    return 128 if n > 64 else 64 if n > 32 else 32


def tiles(n: int) -> int:
    """On and below the diagonal of n × n."""
    blocks: int = triton.cdiv(n, _block(n))
    return blocks * (blocks + 1) // 2


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
    squares: Tensor | None = None,
    lows: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """out = (alpha A Bᵀ + beta D + gamma I + delta E) · scales^power for A, B [batch, n, k] whose product is symmetric.

    D, E, out and low are [batch, n, n], scales [batch], power 1 or 2; low is what rounding took from out, times
    2048. Those written are none of the others, but low may be E. Rows are contiguous and start at multiples of 16
    bytes; what lies between the end of a written row and the next such multiple may be written too.

    squares [batch · tiles(n)] gets the sum of squares of each tile of out. With `lows`, of A and B, it is read: where a
    matrix's sum is large, what rounding took from A and B is multiplied as well.
    """
    batch, n, k = A.shape
    block, count = _block(n), tiles(n)
    d, e, c, remainder = (
        TensorDescriptor.from_tensor(out if x is None else x, [1, block, block]) for x in (D, E, out, low)
    )
    a, b, a_low, b_low = (TensorDescriptor.from_tensor(x, [1, block, _BLOCK_K]) for x in (A, B, *(lows or (A, B))))
    _symmetric[(batch * count,)](
        a,
        b,
        d,
        e,
        c,
        remainder,
        a_low,
        b_low,
        out if squares is None else squares,
        out if scales is None else scales,
        k,
        count,
        alpha,
        beta,
        gamma,
        delta,
        BLOCK=block,
        BLOCK_K=_BLOCK_K,
        HAS_D=D is not None,
        HAS_E=E is not None,
        HAS_LOW=low is not None,
        SUMS=squares is not None and lows is None,
        CAREFUL=0 if lows is None else triton.next_power_of_2(count),
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
    """How polynomials of m × n matrices are taken: by R = X Xᵀ alone where `gram`, and in how much memory. `straight`
    is by R of the first X to the end, with room for what rounding takes from two more factors.

    The iteration reads X [n, k] with n ≤ k. core.polar.polar_flops counts its operations.
    """

    m: int
    n: int
    gram: bool
    straight: bool = False

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
        return 2 * self.whole + self.square * (self.outside if self.gram else 1 if self.m == self.n else 2)

    @property
    def outside(self) -> int:
        """Of the Gram form's matrices [n, n], those that the place of the next X cannot hold."""
        return 4 + 2 * self.straight - self.inside

    @property
    def inside(self) -> int:
        return min(3 + 2 * self.straight, self.whole // self.square)


def matrices(memory: Tensor, batch: int, m: int, n: int, start: int = 0) -> Tensor:
    """[batch, m, n] in `memory` from element batch · start on."""
    return memory.as_strided((batch, m, n), (m * _row(n), _row(n), 1), memory.storage_offset() + batch * start)


def polynomial(form: Form, memory: Tensor, scales: Tensor, steps: Steps, restart: int) -> Tensor:
    """X ← (a I + b X Xᵀ + c (X Xᵀ)²) X for each step, of X [batch, n, k] at the start of `memory` times `scales`.

    The result [batch, form.m, form.n] lies in `memory` too. The Gram form starts anew from X after `restart` steps, if
    it is not straight: rounding makes the smallest eigenvalues of R negative, and every step multiplies them.
    """
    batch, (n, k) = len(scales), form.sides
    rest = 2 * form.whole
    cut = len(steps) if form.straight else restart
    parts = [part for part in (steps[:cut], steps[cut:]) if part] if form.gram else [[step] for step in steps]
    X = matrices(memory, batch, n, k)
    for number, part in enumerate(parts):
        there = 0 if number % 2 else form.whole  # where X goes next; what it is made of may lie there until then
        if form.gram:
            slots = [there + i * form.square for i in range(form.inside)]
            slots = [*(rest + i * form.square for i in range(form.outside)), *slots]
        else:
            slots = [rest, *[there if n == k else rest + form.square] * 3]
        Q, R, B, T, *lows = (matrices(memory, batch, n, n, start) for start in slots)
        _factor(X, part, Q, R, B, T, lows, scales if number == 0 else None)
        if number == len(parts) - 1 and form.tall:
            return torch.bmm(X.mT, Q, out=matrices(memory, batch, k, n, there))
        X = torch.bmm(Q, X, out=matrices(memory, batch, n, k, there))
    return X


def _factor(
    X: Tensor, steps: Steps, Q: Tensor, R: Tensor, B: Tensor, T: Tensor, lows: list[Tensor], scales: Tensor | None
) -> None:
    """Q ← the product of the steps' F = a I + b R + c R², R = X Xᵀ at first, then F R F; X and Q scaled by `scales`.

    A single step needs neither B nor T. Of several, F and their product are kept without their part of the identity
    until the last: rounding a large diagonal turns the vectors of F, which then no more commute. Of the first R and
    R F, whose least eigenvalues grow most, what rounding took is kept too; with two more matrices `lows`, of the first
    F as well, and where a few singular values rule R, it is multiplied in the first F and R F.
    """
    last = len(steps) - 1
    squares = torch.empty(len(X) * tiles(len(R[0])), dtype=torch.float32, device=X.device) if lows else None
    symmetric(X, X, R, scales=scales, power=2, low=B if last else None, squares=squares)
    product, other = (T, Q) if last % 2 else (Q, T)  # they change places at every step but the first
    identity = 1.0  # how much of it the product has, beside what is kept
    for number, (a, b, c) in enumerate(steps):
        factor = B if number else product
        if lows and not number:
            of_f, of_rf = lows
            symmetric(R, R, factor, R, c, b, E=B, delta=b / _LOW.value, low=of_f, squares=squares, lows=(B, B))
            back = a / _LOW.value
            RF = symmetric(R, factor, other, R, beta=a, E=B, delta=back, low=of_rf, squares=squares, lows=(B, of_f))
            symmetric(RF, factor, R, RF, beta=a, E=of_rf, delta=back)
        else:
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
