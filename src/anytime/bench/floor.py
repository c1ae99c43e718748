"""What a step of SF-NorMuon cannot go below: its bytes at the rate of a large copy, its products at a large one's.

Both rates are measured in the run that is compared with them.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..core.polar import COEFFICIENTS, polar_flops, product

Shapes = dict[str, tuple[int, ...]]


def settled(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


@dataclass(frozen=True)
class Rates:
    """What the device does at best: bytes read and written a second, and operations of matrix products."""

    bandwidth: float
    products: float


def measure_rates(device: torch.device) -> Rates:
    """By a copy beyond all caches, and a product in the precision of the polar factor."""
    cuda = device.type == "cuda"
    source = torch.ones(1 << (28 if cuda else 26), device=device)
    copy = torch.empty_like(source)
    side = 8192 if cuda else 1024
    a, b = (torch.randn(side, side, device=device, dtype=torch.float16 if cuda else torch.float32) for _ in range(2))

    def per_second(amount: float, work: Callable[[], object]) -> float:
        times = []
        for _ in range(6):
            began = settled(device)
            for _ in range(10):
                work()
            times.append((settled(device) - began) / 10)
        return amount / statistics.median(times[1:])

    return Rates(
        per_second(2 * 4 * source.numel(), lambda: copy.copy_(source)),
        per_second(2.0 * side**3, lambda: a @ b if cuda else product(a, b)),
    )


def moved_bytes(dtype: torch.dtype, *, matrix: bool) -> int:
    """A parameter's bytes in a schedule-free step: the gradient read, y, d and one buffer read and written.

    The buffer is the momentum of a matrix, which also has its polar factor written and read in half precision, or the
    second moment of another. A narrow y has a residual in float32.
    """
    size = torch.finfo(dtype).bits // 8
    return 3 * size + 2 * 4 + 2 * 4 + (2 * 4 if size < 4 else 0) + (2 * 2 if matrix else 0)


def floor_seconds(
    matrices: Shapes, rest: Shapes, dtype: torch.dtype, rates: Rates, polar: str | None = "newton-schulz"
) -> float:
    """Of a step of SF-NorMuon by a polar factor; by None: of one that treats every parameter by its elements."""
    numbers = [sum(map(math.prod, shapes.values())) for shapes in (matrices, rest)]
    spectral = polar is not None
    moved = numbers[0] * moved_bytes(dtype, matrix=spectral) + numbers[1] * moved_bytes(dtype, matrix=False)
    flops = 0.0 if polar is None else sum(polar_flops(m, n, COEFFICIENTS[polar]) for m, n in matrices.values())
    return moved / rates.bandwidth + flops / rates.products
