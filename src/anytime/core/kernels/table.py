"""How kernels find tensors and settings, and what every step begins with: is each gradient finite, and the scalars.

Tensors are found through a table of addresses on the device, one row a parameter, so that a step takes as many
launches for a thousand parameters as for one, and a captured graph follows gradients that move. The arithmetic is
core/averaging.py's.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Columns of the table of addresses.
GRAD: tl.constexpr = tl.constexpr(0)
PARAM: tl.constexpr = tl.constexpr(1)
D: tl.constexpr = tl.constexpr(2)
RESIDUAL: tl.constexpr = tl.constexpr(3)
MOMENTUM: tl.constexpr = tl.constexpr(4)
SECOND: tl.constexpr = tl.constexpr(5)
STEP: tl.constexpr = tl.constexpr(6)
WEIGHT_SUM: tl.constexpr = tl.constexpr(7)
BETA: tl.constexpr = tl.constexpr(8)
GROUP: tl.constexpr = tl.constexpr(9)
COLUMNS: tl.constexpr = tl.constexpr(10)

# Columns of a group's settings, float64 kept as its bits; `tick` reads them by number.
SETTINGS = (
    "lr",  # 0
    "warmup_steps",  # 1
    "rate",  # 2
    "averaging_power",  # 3
    "averaging_warmup",  # 4
    "beta",  # 5
    "beta_growth",  # 6
    "beta_growth_start",  # 7
    "weight_decay",  # 8
    "decay1",  # 9
    "decay2",  # 10
    "eps",  # 11
    "update_rms",  # 12
    "correct_rate",  # 13
    "correct_moment",  # 14
    "first_moment",  # 15
    "decay_fading",  # 16
    "momentum_growth",  # 17
    "momentum_growth_start",  # 18
    "rate_fall",  # 19
    "rate_fall_start",  # 20
)
WIDTH: tl.constexpr = tl.constexpr(21)

# Columns of a parameter's coefficients in a step, float32; a row is as wide as the settings'.
OK: tl.constexpr = tl.constexpr(0)
ETA: tl.constexpr = tl.constexpr(1)
KEEP_D: tl.constexpr = tl.constexpr(2)  # 1 − c
OLD_BETA: tl.constexpr = tl.constexpr(3)
Y_FROM_D: tl.constexpr = tl.constexpr(4)  # β − β'(1 − c)
Y_FROM_DZ: tl.constexpr = tl.constexpr(5)  # 1 − β'(1 − c)
A1: tl.constexpr = tl.constexpr(6)  # momentum ← A1 momentum + B1 g
B1: tl.constexpr = tl.constexpr(7)
A2: tl.constexpr = tl.constexpr(8)  # second moment ← A2 second + B2 …
B2: tl.constexpr = tl.constexpr(9)
UNBIAS1: tl.constexpr = tl.constexpr(10)
UNBIAS2: tl.constexpr = tl.constexpr(11)
DECAY: tl.constexpr = tl.constexpr(12)
EPS: tl.constexpr = tl.constexpr(13)
RMS: tl.constexpr = tl.constexpr(14)
MU: tl.constexpr = tl.constexpr(15)


@triton.jit
def address(table, parameter, column: tl.constexpr, kind, ALIGNED: tl.constexpr):
    where = tl.load(table + parameter * COLUMNS + column).to(tl.pointer_type(kind))
    if ALIGNED:
        where = tl.multiple_of(where, 16)
    return where


@triton.jit
def span(tensor_of_block, first_block, sizes, BLOCK: tl.constexpr):
    """This program's tensor, its elements there, and which of them exist."""
    block = tl.program_id(0)
    tensor = tl.load(tensor_of_block + block)
    at = (block - tl.load(first_block + tensor)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return tensor, at, at < tl.load(sizes + tensor)


@triton.jit
def finite(
    table,
    tensor_of_block,
    first_block,
    sizes,
    first,
    bad,
    KIND: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """bad ← 1 if a gradient holds inf or NaN. Block b is of tensor tensor_of_block[b], which is parameter first + …"""
    tensor, at, inside = span(tensor_of_block, first_block, sizes, BLOCK)
    grad = address(table, first + tensor, GRAD, KIND, ALIGNED)
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    # x − x is 0 unless x is inf or NaN.
    wrong = tl.max((g - g != 0.0).to(tl.int32))
    if wrong > 0:
        tl.atomic_max(bad, 1)


@triton.jit
def _setting(settings, column: tl.constexpr):
    return tl.load(settings + column).to(tl.float64, bitcast=True)


@triton.jit
def _falling(t, power, start):
    """averaging.falling; t is the step's number less one, like `start`."""
    return tl.exp(power * tl.log(start / tl.maximum(t, start)))


@triton.jit
def _growing(t, constant, growth, start):
    """averaging.growing, of the same t and `start`."""
    return tl.where(growth > 0, 1.0 - _falling(t, growth, start) * (1.0 - constant), constant)


@triton.jit
def tick(
    table,
    settings,
    bad,
    ok,
    skipped,
    coefficients,
    count,
    AVERAGES: tl.constexpr,
    COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """averaging.tick, and every other scalar of the step, for all parameters; t, Σw and β advance here.

    ok ← 1 where nothing is bad, else 0: then no parameter's time advances and its coefficients stand still, and
    `skipped` grows by one if it COUNTS.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    row = table + i * COLUMNS
    group = settings + tl.load(row + GROUP, mask=inside, other=0) * WIDTH
    step = tl.load(row + STEP, mask=inside, other=0).to(tl.pointer_type(tl.float64))
    fine = (tl.load(bad) == 0).to(tl.float64)
    if tl.program_id(0) == 0:
        tl.store(ok, fine)
        if COUNTS:
            tl.store(skipped, tl.load(skipped) + 1.0 - fine)
    t = tl.load(step, mask=inside, other=0.0) + 1.0
    tl.store(step, t - 1.0 + fine, mask=inside)
    warmup = _setting(group, 1)
    eta = _setting(group, 0) * tl.where(warmup > 0, tl.minimum(t / tl.maximum(warmup, 1.0), 1.0), 1.0)
    decay1 = _setting(group, 9)
    decay2 = _setting(group, 10)
    bias1 = 1.0 - tl.exp(t * tl.log(decay1))
    bias2 = 1.0 - tl.exp(t * tl.log(decay2))
    fall = _falling(t - 1.0, _setting(group, 19), _setting(group, 20) - 1.0)
    eta = eta * _setting(group, 2) * tl.where(_setting(group, 13) > 0, tl.sqrt(bias2), 1.0) * fall
    out = coefficients + i * WIDTH
    if AVERAGES:
        at_sum = tl.load(row + WEIGHT_SUM, mask=inside, other=0).to(tl.pointer_type(tl.float64))
        at_beta = tl.load(row + BETA, mask=inside, other=0).to(tl.pointer_type(tl.float64))
        averages = t > _setting(group, 4)
        w = tl.where(averages, eta * eta * tl.exp(_setting(group, 3) * tl.log(t)), 0.0) * fine
        weight_sum = tl.load(at_sum, mask=inside, other=0.0) + w
        some = weight_sum > 0
        c = tl.where(averages & some, w / tl.where(some, weight_sum, 1.0), 1.0) * fine
        beta = tl.load(at_beta, mask=inside, other=0.0)
        beta_next = _growing(t, _setting(group, 5), _setting(group, 6), _setting(group, 7) - 1.0)
        beta_next = tl.where(fine > 0, beta_next, beta)
        tl.store(at_sum, weight_sum, mask=inside)
        tl.store(at_beta, beta_next, mask=inside)
        keep = beta_next * (1.0 - c)
        tl.store(out + KEEP_D, (1.0 - c).to(tl.float32), mask=inside)
        tl.store(out + OLD_BETA, beta.to(tl.float32), mask=inside)
        tl.store(out + Y_FROM_D, (beta - keep).to(tl.float32), mask=inside)
        tl.store(out + Y_FROM_DZ, (1.0 - keep).to(tl.float32), mask=inside)
    moment = _setting(group, 14) > 0
    mu = _growing(t - 1.0, decay1, _setting(group, 17), _setting(group, 18) - 1.0)
    tl.store(out + OK, fine.to(tl.float32) + tl.zeros((BLOCK,), tl.float32), mask=inside)
    tl.store(out + ETA, (eta * fine).to(tl.float32), mask=inside)
    tl.store(out + A1, (1.0 - (1.0 - mu) * fine).to(tl.float32), mask=inside)
    tl.store(out + B1, ((1.0 - mu) * fine).to(tl.float32), mask=inside)
    tl.store(out + A2, (1.0 - (1.0 - decay2) * fine).to(tl.float32), mask=inside)
    tl.store(out + B2, ((1.0 - decay2) * fine).to(tl.float32), mask=inside)
    tl.store(out + UNBIAS1, tl.where(moment & (_setting(group, 15) > 0), bias1, 1.0).to(tl.float32), mask=inside)
    tl.store(out + UNBIAS2, tl.where(moment, bias2, 1.0).to(tl.float32), mask=inside)
    fading = _setting(group, 16)
    decay = _setting(group, 8) * tl.where(fading > 0, fading / tl.maximum(fading + t, 1.0), 1.0)
    tl.store(out + DECAY, (decay / fall).to(tl.float32), mask=inside)
    tl.store(out + EPS, _setting(group, 11).to(tl.float32), mask=inside)
    tl.store(out + RMS, _setting(group, 12).to(tl.float32), mask=inside)
    tl.store(out + MU, mu.to(tl.float32), mask=inside)
