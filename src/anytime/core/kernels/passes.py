"""The update's passes over memory: momentum to the polar factor's input, rows, and the move of y and d; and Adam in one
pass. Tensors are found through table.py's; `pieces` lists matrices as (parameter, first element, first row statistic).
All of it is arithmetic of core/direction.py and core/averaging.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .table import (
    A1,
    A2,
    B1,
    B2,
    COLUMNS,
    DECAY,
    EPS,
    ETA,
    GRAD,
    KEEP_D,
    MOMENTUM,
    MU,
    OK,
    OLD_BETA,
    PARAM,
    RESIDUAL,
    RMS,
    SECOND,
    UNBIAS1,
    UNBIAS2,
    WIDTH,
    Y_FROM_D,
    Y_FROM_DZ,
    D,
    address,
    span,
)


@triton.jit
def _piece(pieces, b, ALIGNED: tl.constexpr):
    first = tl.load(pieces + 3 * b + 1)
    if ALIGNED:
        first = tl.multiple_of(first, 16)
    return tl.load(pieces + 3 * b), first, tl.load(pieces + 3 * b + 2)


@triton.jit
def _times_two_to(x, e):
    """x · 2^e exactly, |e| up to 250, in two halves so that neither factor leaves float32's range."""
    half = e // 2
    first = ((half + 127) << 23).to(tl.float32, bitcast=True)
    second = ((e - half + 127) << 23).to(tl.float32, bitcast=True)
    return x * first * second


@triton.jit
def _polar_input(M, grad, at, counts, inside, mu, NESTEROV: tl.constexpr):
    """What the polar factor is taken of: the momentum as it is stored, or (1 − μ) G + μ M."""
    x = tl.load(M + at, mask=inside, other=0.0).to(tl.float32)
    if NESTEROV:
        g = tl.load(grad + at, mask=counts, other=0.0).to(tl.float32)
        x = g + mu * (x - g)
    return x


@triton.jit
def _store_x(X, x, r, col, inside, x_row, TALL: tl.constexpr):
    if TALL:
        tl.store(X + col * x_row + r, x, mask=inside)
    else:
        tl.store(X + r * x_row + col, x, mask=inside)


@triton.jit
def momentum(
    table,
    coefficients,
    pieces,
    exponents,
    sums,
    X,
    m,
    n,
    stride,
    x_batch,
    x_row,
    KIND: tl.constexpr,
    KIND_M: tl.constexpr,
    KIND_X: tl.constexpr,
    NESTEROV: tl.constexpr,
    TALL: tl.constexpr,
    ALIGNED: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """M ← A1 M + B1 G, and X ← the polar factor's input times 2^exponent, transposed if it is tall.

    The exponent is a guess, the last step's; `settle` looks whether it holds. sums [3, batch, PROGRAMS] are squares of
    entries above 2^40 (times 2^-80), between, and below 2^-40 (times 2^80): none under- or overflows.
    """
    b = tl.program_id(1)
    parameter, first, _ = _piece(pieces, b, ALIGNED)
    c = coefficients + parameter * WIDTH
    valid = tl.where(tl.load(c + OK) > 0, m, 0)  # rows whose gradient counts
    a1 = tl.load(c + A1)
    b1 = tl.load(c + B1)
    mu = tl.load(c + MU)
    exponent = tl.load(exponents + b)
    grad = address(table, parameter, GRAD, KIND, ALIGNED) + first
    M = address(table, parameter, MOMENTUM, KIND_M, ALIGNED) + first
    X += b.to(tl.int64) * x_batch
    big = tl.zeros((ROWS, COLS), tl.float32)
    middle = tl.zeros((ROWS, COLS), tl.float32)
    small = tl.zeros((ROWS, COLS), tl.float32)
    across = tl.cdiv(n, COLS)
    for tile in range(tl.program_id(0), tl.cdiv(m, ROWS) * across, PROGRAMS):
        r = (tile // across) * ROWS + tl.arange(0, ROWS)[:, None]
        col = (tile % across) * COLS + tl.arange(0, COLS)[None, :]
        inside = (r < m) & (col < n)
        at = r * stride + col
        counts = (r < valid) & (col < n)
        g = tl.load(grad + at, mask=counts, other=0.0).to(tl.float32)
        x = tl.load(M + at, mask=inside, other=0.0).to(tl.float32) * a1 + g * b1
        kept = x.to(KIND_M)
        tl.store(M + at, kept, mask=counts)
        x = kept.to(tl.float32)
        if NESTEROV:
            x = g + mu * (x - g)
        size = tl.abs(x)
        is_big = size > 1099511627776.0
        is_small = size < 9.094947017729282e-13
        high = x * 8.271806125530277e-25
        low = x * 1.2089258196146292e24
        big += tl.where(is_big, high * high, 0.0)
        middle += tl.where(is_big | is_small, 0.0, x * x)
        small += tl.where(is_small, low * low, 0.0)
        _store_x(X, _times_two_to(x, exponent).to(KIND_X), r, col, inside, x_row, TALL)
    out = sums + b * PROGRAMS + tl.program_id(0)
    plane = tl.num_programs(1) * PROGRAMS
    tl.store(out, tl.sum(tl.sum(big, 1), 0))
    tl.store(out + plane, tl.sum(tl.sum(middle, 1), 0))
    tl.store(out + 2 * plane, tl.sum(tl.sum(small, 1), 0))


@triton.jit
def settle(
    table,
    coefficients,
    pieces,
    exponents,
    right,
    scales,
    sums,
    X,
    m,
    n,
    stride,
    x_batch,
    x_row,
    safety,
    KIND: tl.constexpr,
    KIND_M: tl.constexpr,
    KIND_X: tl.constexpr,
    NESTEROV: tl.constexpr,
    TALL: tl.constexpr,
    ALIGNED: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """scales ← 1 / (safety · ‖X‖) with the right exponent, which puts the norm in [2^8, 2^9); X anew where the guess
    was wrong. So X depends on the momentum alone, and a resumed run goes on bit for bit."""
    b = tl.program_id(1)
    parameter, first, _ = _piece(pieces, b, ALIGNED)
    at = b * PROGRAMS + tl.arange(0, PROGRAMS)
    plane = tl.num_programs(1) * PROGRAMS
    big = tl.sum(tl.load(sums + at), 0)
    middle = tl.sum(tl.load(sums + plane + at), 0)
    small = tl.sum(tl.load(sums + 2 * plane + at), 0)
    down = 8.271806125530277e-25
    before = tl.where(big > 0, -80, tl.where(middle > 0, 0, 80))
    square = tl.where(big > 0, big + middle * down * down, tl.where(middle > 0, middle + small * down * down, small))
    twice = ((square.to(tl.int32, bitcast=True) >> 23) - 127) & -2  # the even part of its exponent
    exponent = tl.where(square > 0, 8 + before - twice // 2, 0)
    if tl.program_id(0) == 0:
        norm = tl.sqrt(_times_two_to(square, 16 - twice)) * safety
        tl.store(scales + b, tl.where(square > 0, 1.0 / tl.where(square > 0, norm, 1.0), 0.0))
        tl.store(right + b, exponent)
    if exponent != tl.load(exponents + b):
        c = coefficients + parameter * WIDTH
        valid = tl.where(tl.load(c + OK) > 0, m, 0)
        M = address(table, parameter, MOMENTUM, KIND_M, ALIGNED) + first
        grad = address(table, parameter, GRAD, KIND, ALIGNED) + first
        mu = tl.load(c + MU)
        X += b.to(tl.int64) * x_batch
        across = tl.cdiv(n, COLS)
        for tile in range(tl.program_id(0), tl.cdiv(m, ROWS) * across, tl.num_programs(0)):
            r = (tile // across) * ROWS + tl.arange(0, ROWS)[:, None]
            col = (tile % across) * COLS + tl.arange(0, COLS)[None, :]
            inside = (r < m) & (col < n)
            x = _polar_input(M, grad, r * stride + col, (r < valid) & (col < n), inside, mu, NESTEROV)
            _store_x(X, _times_two_to(x, exponent).to(KIND_X), r, col, inside, x_row, TALL)


@triton.jit
def rows(
    table,
    coefficients,
    pieces,
    P,
    factors,
    sums,
    m,
    n,
    p_batch,
    p_row,
    row_stride,
    ROW_NORM: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """v ← A2 v + B2 mean(P²) for each row, factors ← 1 / (√v + ε), and the sum of squares of P · factor:
    the rows' own means are all that it needs."""
    b = tl.program_id(1)
    parameter, _, first = _piece(pieces, b, False)
    c = coefficients + parameter * WIDTH
    valid = tl.where(tl.load(c + OK) > 0, m, 0)
    P += b.to(tl.int64) * p_batch
    total = tl.zeros((ROWS,), tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(m, ROWS), PROGRAMS):
        r = block * ROWS + tl.arange(0, ROWS)
        square = tl.zeros((ROWS, COLS), tl.float32)
        for start in range(0, n, COLS):
            col = start + tl.arange(0, COLS)
            inside = (r[:, None] < m) & (col[None, :] < n)
            p = tl.load(P + r[:, None] * p_row + col[None, :], mask=inside, other=0.0).to(tl.float32)
            square += p * p
        norm = tl.sum(square, 1)
        if ROW_NORM:
            moment = tl.load(table + parameter * COLUMNS + SECOND).to(tl.pointer_type(tl.float32)) + first
            v = tl.load(moment + r * row_stride, mask=r < m, other=0.0)
            v = v * tl.load(c + A2) + norm / n * tl.load(c + B2)
            tl.store(moment + r * row_stride, v, mask=r < valid)
            root = tl.sqrt(v) + tl.load(c + EPS)
            factor = 1.0 / tl.where(root > 0, root, 1.0)
            tl.store(factors + b * m + r, factor, mask=r < m)
            norm = norm * factor * factor
        total += tl.where(r < m, norm, 0.0)
    tl.store(sums + b * PROGRAMS + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _load_y(param, residual, at, inside, HAS_RESIDUAL: tl.constexpr):
    y = tl.load(param + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        y += tl.load(residual + at, mask=inside, other=0.0)
    return y


@triton.jit
def _decayed(u, at, decay, CAUTIOUS: tl.constexpr):
    """λ times what decays; CAUTIOUS spares what is averaging.opposed."""
    if CAUTIOUS:
        at = tl.where(((u > 0) & (at < 0)) | ((u < 0) & (at > 0)), 0.0, at)
    return decay * at


@triton.jit
def _move(
    u,
    y,
    param,
    d_at,
    residual,
    at,
    inside,
    c,
    KIND: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    AVERAGES: tl.constexpr,
    DECAY_AT: tl.constexpr,
    CAUTIOUS: tl.constexpr,
):
    """averaging.advance_ by dz = −η (U + λ z or y), and what rounding y takes away to the residual."""
    eta = tl.load(c + ETA)
    decay = tl.load(c + DECAY)
    if AVERAGES:
        d = tl.load(d_at + at, mask=inside, other=0.0)
        if DECAY_AT == 1:
            u += _decayed(u, y + tl.load(c + OLD_BETA) * d, decay, CAUTIOUS)
        elif DECAY_AT == 2:
            u += _decayed(u, y, decay, CAUTIOUS)
        dz = -eta * u
        y += tl.load(c + Y_FROM_D) * d + tl.load(c + Y_FROM_DZ) * dz
        tl.store(d_at + at, (d + dz) * tl.load(c + KEEP_D), mask=inside)
    else:
        if DECAY_AT > 0:
            u += _decayed(u, y, decay, CAUTIOUS)
        y -= eta * u
    p = y.to(KIND)
    tl.store(param + at, p, mask=inside)
    if HAS_RESIDUAL:
        tl.store(residual + at, y - p.to(tl.float32), mask=inside)


@triton.jit
def move(
    table,
    coefficients,
    pieces,
    exponents,
    right,
    P,
    factors,
    sums,
    m,
    n,
    stride,
    p_batch,
    p_row,
    scale,
    KIND: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    AVERAGES: tl.constexpr,
    DECAY_AT: tl.constexpr,
    CAUTIOUS: tl.constexpr,
    ROW_NORM: tl.constexpr,
    UNIT: tl.constexpr,
    ALIGNED: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """U = scale · update_rms · P · factor, with UNIT divided by the Frobenius norm of P · factor; then y and d move.
    The right exponents become the next step's guess."""
    b = tl.program_id(1)
    if tl.program_id(0) == 0:
        tl.store(exponents + b, tl.load(right + b))
    parameter, first, _ = _piece(pieces, b, ALIGNED)
    c = coefficients + parameter * WIDTH
    if tl.load(c + OK) > 0:
        scale *= tl.load(c + RMS)
        if UNIT:
            square = tl.sum(tl.load(sums + b * PROGRAMS + tl.arange(0, PROGRAMS)), 0)
            scale *= tl.where(square > 0, tl.rsqrt(tl.where(square > 0, square, 1.0)), 0.0)
        param = address(table, parameter, PARAM, KIND, ALIGNED) + first
        d_at = address(table, parameter, D, tl.float32, ALIGNED) + first
        residual = address(table, parameter, RESIDUAL, tl.float32, ALIGNED) + first
        P += b.to(tl.int64) * p_batch
        across = tl.cdiv(n, COLS)
        for tile in range(tl.program_id(0), tl.cdiv(m, ROWS) * across, tl.num_programs(0)):
            r = (tile // across) * ROWS + tl.arange(0, ROWS)[:, None]
            col = (tile % across) * COLS + tl.arange(0, COLS)[None, :]
            inside = (r < m) & (col < n)
            u = tl.load(P + r * p_row + col, mask=inside, other=0.0).to(tl.float32) * scale
            if ROW_NORM:
                u *= tl.load(factors + b * m + r, mask=r < m, other=0.0)
            at = r * stride + col
            y = _load_y(param, residual, at, inside, HAS_RESIDUAL)
            _move(u, y, param, d_at, residual, at, inside, c, KIND, HAS_RESIDUAL, AVERAGES, DECAY_AT, CAUTIOUS)


@triton.jit
def adam(
    table,
    coefficients,
    tensor_of_block,
    first_block,
    sizes,
    first,
    KIND: tl.constexpr,
    KIND_G: tl.constexpr,
    KIND_M: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    AVERAGES: tl.constexpr,
    DECAY_AT: tl.constexpr,
    FIRST_MOMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """U = G / (√v + ε), or m̂ / (√v̂ + ε) with the first moment; then y and d move."""
    tensor, at, inside = span(tensor_of_block, first_block, sizes, BLOCK)
    parameter = first + tensor
    c = coefficients + parameter * WIDTH
    if tl.load(c + OK) > 0:
        grad = address(table, parameter, GRAD, KIND_G, ALIGNED)
        second = address(table, parameter, SECOND, tl.float32, ALIGNED)
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(second + at, mask=inside, other=0.0) * tl.load(c + A2) + g * g * tl.load(c + B2)
        tl.store(second + at, v, mask=inside)
        u = g
        if FIRST_MOMENT:
            M = address(table, parameter, MOMENTUM, KIND_M, ALIGNED)
            kept = tl.load(M + at, mask=inside, other=0.0).to(tl.float32) * tl.load(c + A1) + g * tl.load(c + B1)
            kept = kept.to(KIND_M)
            tl.store(M + at, kept, mask=inside)
            u = kept.to(tl.float32) / tl.load(c + UNBIAS1)
        root = tl.sqrt(v / tl.load(c + UNBIAS2)) + tl.load(c + EPS)
        u = u / tl.where(root > 0, root, 1.0)
        param = address(table, parameter, PARAM, KIND, ALIGNED)
        d_at = address(table, parameter, D, tl.float32, ALIGNED)
        residual = address(table, parameter, RESIDUAL, tl.float32, ALIGNED)
        y = _load_y(param, residual, at, inside, HAS_RESIDUAL)
        _move(u, y, param, d_at, residual, at, inside, c, KIND, HAS_RESIDUAL, AVERAGES, DECAY_AT, False)
