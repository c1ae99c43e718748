"""Regret against an envelope, its intervals, the tokens it costs, and how wide a range of rates will do."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: A loss this close to the best is as good.
NEAR = 0.02


@dataclass(frozen=True)
class Regret:
    """A method's loss above the envelope, by horizon and seed."""

    by_horizon: Mapping[float, Sequence[float]]

    @classmethod
    def of(cls, losses: Mapping[float, Sequence[float]], envelope: Mapping[float, Sequence[float]]) -> Regret:
        return cls({h: [a - b for a, b in zip(losses[h], envelope[h], strict=True)] for h in envelope})

    @property
    def means(self) -> dict[float, float]:
        return {h: statistics.fmean(values) for h, values in self.by_horizon.items()}

    @property
    def most(self) -> tuple[float, float]:
        """(the largest mean over the seeds of any horizon, the highest upper end of any horizon's 95% interval): where
        the true regret is largest that end is above it 39 times in 40, however noisy the others are, and alike."""
        return max(self.means.values()), max(upper(values) for values in self.by_horizon.values())

    @property
    def mean(self) -> tuple[float, float]:
        """(the mean over horizons and seeds, the upper end of the 95% interval over the seeds' means)."""
        each = [statistics.fmean(values) for values in zip(*self.by_horizon.values(), strict=True)]
        return statistics.fmean(each), upper(each)


def upper(values: Sequence[float]) -> float:
    """The upper end of the 95% interval of their mean; infinite for one alone, or where one diverged."""
    count = len(values)
    if count < 2 or not all(map(math.isfinite, values)):
        return math.inf
    return statistics.fmean(values) + student(count - 1) * statistics.stdev(values) / math.sqrt(count)


@functools.cache
def student(freedom: int, part: float = 0.975) -> float:
    """The quantile of Student's t: by bisection of Simpson's integral of its density."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)

    def below(t: float, pieces: int = 2000) -> float:
        def density(x: float) -> float:
            return scale * math.exp(-(freedom + 1) / 2 * math.log1p(x * x / freedom))

        h = t / pieces
        inner = sum((4 if i % 2 else 2) * density(i * h) for i in range(1, pieces))
        return 0.5 + h / 3 * (density(0.0) + inner + density(t))

    low, high = 0.0, 1.0
    while below(high) < part:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < part else (low, middle)
    return (low + high) / 2


def token_ratio(envelope: Mapping[float, float], horizon: float, loss: float) -> float | None:
    """ρ with E(ρ H) = loss, on straight lines between horizons over their logarithm; None beyond the ends."""
    points = sorted(envelope.items())
    for (a, high), (b, low) in itertools.pairwise(points):
        if low <= loss <= high and low < high:
            part = (high - loss) / (high - low)
            return math.exp((1 - part) * math.log(a) + part * math.log(b)) / horizon
    return None


def span(losses: Mapping[float, float], within: float = NEAR) -> tuple[float, bool]:
    """(log₂ of the range of rates around the best whose losses lie within so much of it, whether its ends were seen);
    on straight lines over the logarithm of the rate. Nothing, if all diverged."""
    points = sorted((math.log2(rate), loss) for rate, loss in losses.items())
    best = min(range(len(points)), key=lambda i: points[i][1])
    if not math.isfinite(points[best][1]):
        return 0.0, True
    limit = points[best][1] + within
    ends, seen = [], True
    for way in (points[best::-1], points[best:]):
        end = way[-1][0]
        for (x, low), (to, high) in itertools.pairwise(way):
            if high > limit:
                end = x + (to - x) * ((limit - low) / (high - low) if math.isfinite(high) else 0.0)
                break
        else:
            seen = False
        ends.append(end)
    return ends[1] - ends[0], seen
