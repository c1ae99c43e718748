"""The schedule-free average against x, y and z stored in full."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anytime.core.averaging import Clock, advance_, growing, scalar_dtype, tick, warmed_up, x_of, z_of

F64 = torch.float64
quick = settings(max_examples=200)
unit = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.0, 1.0))


def scalar(value):
    return torch.tensor(value, dtype=F64)


def randn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


# ------------------------------------------------------------------ advance_


@quick
@given(beta=unit, steps=st.lists(st.tuples(unit, unit), min_size=1, max_size=6), seed=st.integers(0, 2**16))
def test_advance_is_the_stored_average(beta, steps, seed):
    """Any c and any sequence of β, 0 and 1 included."""
    x, z = randn(seed, 2, 3, 4)
    y = (1 - beta) * z + beta * x
    fast_y, d, b = y.clone(), z - x, scalar(beta)
    for i, (c, beta_next) in enumerate(steps):
        dz = randn(seed + 1 + i, 3, 4)
        z = z + dz
        x = (1 - c) * x + c * z
        y = (1 - beta_next) * z + beta_next * x
        advance_([fast_y], [d], [dz], *(s.reshape(1) for s in (scalar(c), b, scalar(beta_next))))
        b = scalar(beta_next)
        for fast, slow in ((fast_y, y), (x_of(fast_y, d, b), x), (z_of(fast_y, d, b), z)):
            torch.testing.assert_close(fast, slow, rtol=0, atol=1e-13)


@given(beta=unit, seed=st.integers(0, 2**16))
def test_maps_between_the_sequences(beta, seed):
    y, d = randn(seed, 2, 5)
    x, z = x_of(y, d, scalar(beta)), z_of(y, d, scalar(beta))
    torch.testing.assert_close(z - x, d, rtol=0, atol=1e-14)
    torch.testing.assert_close((1 - beta) * z + beta * x, y, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("beta", [0.0, 0.37, 0.9, 1.0])
def test_advance_by_nothing_changes_no_bit(beta, dtype):
    y, d = randn(0, 2, 50).to(dtype)
    before = y.clone(), d.clone()
    advance_([y], [d], [torch.zeros_like(d)], *(scalar(s).reshape(1) for s in (0.0, beta, beta)))
    assert torch.equal(y, before[0])
    assert torch.equal(d, before[1])


def test_advance_keeps_the_dtype():
    y, d = randn(0, 2, 5).float()
    advance_([y], [d], [torch.ones(5)], *(scalar(s).reshape(1) for s in (0.3, 0.9, 0.95)))
    assert y.dtype == d.dtype == torch.float32


# --------------------------------------------------------------------- rules


@pytest.mark.parametrize(("beta", "power", "start"), [(0.4, 0.4, 60), (0.0, 1.0, 2), (0.9, 0.3, 200)])
def test_growing_beta(beta, power, start):
    t = torch.arange(1, 1001, dtype=F64)
    found = growing(t, beta, power, start)
    for i, value in enumerate(found.tolist()):
        step = i + 1
        expected = beta if step <= start else 1 - ((start - 1) / (step - 1)) ** power * (1 - beta)
        assert value == pytest.approx(expected, rel=1e-14, abs=1e-15)
    assert (found.diff() >= 0).all()
    assert found[start] > found[start - 1]
    assert found[-1] < 1


def test_growing_beta_by_numbers():
    assert float(growing(scalar(5.0), 0.5, 1.0, 3)) == 0.75
    assert float(growing(scalar(9.0), 0.5, 1.0, 3)) == 0.875
    assert float(growing(scalar(9.0), 0.5, 0.5, 3)) == 0.75


def test_beta_is_constant_at_power_zero():
    assert growing(torch.tensor([1.0, 1e6], dtype=F64), 0.9, 0.0, 200).tolist() == [0.9, 0.9]


def test_warmup():
    t = torch.tensor([1.0, 5.0, 10.0, 11.0, 1000.0], dtype=F64)
    torch.testing.assert_close(warmed_up(t, 2.0, 10), torch.tensor([0.2, 1.0, 2.0, 2.0, 2.0], dtype=F64))
    assert warmed_up(t, 2.0, 0).tolist() == [2.0] * 5
    torch.testing.assert_close(warmed_up(t, torch.tensor(2.0, dtype=F64), 10), warmed_up(t, 2.0, 10))


def test_scalars_are_float64_where_there_is_one():
    assert scalar_dtype(torch.device("cpu")) == scalar_dtype(torch.device("cuda")) == F64
    assert scalar_dtype(torch.device("mps")) == torch.float32


# ---------------------------------------------------------------------- tick

RULE = {
    "averaging_power": 2.0,
    "averaging_warmup": 0,
    "beta_start": 0.4,
    "beta_growth": 0.4,
    "beta_growth_start": 5,
}


def ticks(rates, **changes) -> list[Clock]:
    """The clocks of consecutive steps at these rates, of one parameter that starts new."""
    rule = {**RULE, **changes}
    weight_sum = beta = torch.zeros(1, dtype=F64)
    clocks = []
    for t, eta in enumerate(rates, start=1):
        clock = tick(
            torch.full((1,), float(t), dtype=F64), weight_sum, beta, scalar(eta).reshape(1), scalar(1.0), **rule
        )
        weight_sum, beta = clock.weight_sum, clock.beta_next
        clocks.append(clock)
    return clocks


@pytest.mark.parametrize("r", [0.0, 2.0, 2.5])
@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_weights_of_the_average(warmup, r):
    """c = w / Σw, w = η² t^r; 1 while the average warms up, which leaves no weight behind."""
    rates = [0.1, 0.2, 0.3, 0.3, 0.05, 0.3, 0.0, 0.3]
    total = 0.0
    for t, (eta, clock) in enumerate(
        zip(rates, ticks(rates, averaging_power=r, averaging_warmup=warmup), strict=True), 1
    ):
        weight = eta**2 * t**r if t > warmup else 0.0
        total += weight
        assert float(clock.weight_sum) == pytest.approx(total, rel=1e-14)
        assert float(clock.c) == pytest.approx(weight / total if t > warmup else 1.0, rel=1e-14)
        assert float(clock.eta) == eta


def test_beta_that_formed_y_goes_on():
    clocks = ticks([0.1] * 12)
    for t, clock in enumerate(clocks, start=1):
        assert float(clock.beta_next) == float(growing(scalar(t + 1.0), 0.4, 0.4, 5))
    assert all(torch.equal(a.beta_next, b.beta) for a, b in itertools.pairwise(clocks))


def test_uniform_weights_are_one_over_t():
    clocks = ticks([0.1] * 50, averaging_power=0.0)
    for t, clock in enumerate(clocks, start=1):
        assert float(clock.c) == pytest.approx(1 / t, rel=1e-13)


@quick
@given(
    t=st.integers(1, 1000),
    weight_sum=st.sampled_from([0.0, 1e-30, 0.37, 1e9]),
    beta=unit,
    eta=st.sampled_from([0.0, 1e-3, 0.1, 1e4]),
    warmup=st.sampled_from([0, 5, 10**6]),
    seed=st.integers(0, 2**16),
)
def test_a_step_that_does_not_count_changes_nothing(t, weight_sum, beta, eta, warmup, seed):
    """Bit for bit, whatever the rate and the β at hand."""
    old = [torch.full((3,), float(value), dtype=F64) for value in (t, weight_sum, beta, eta)]
    clock = tick(*old, scalar(0.0), **{**RULE, "averaging_warmup": warmup})
    assert torch.equal(clock.weight_sum, old[1])
    assert torch.equal(clock.beta, old[2])
    assert torch.equal(clock.beta_next, old[2])
    assert clock.eta.tolist() == clock.c.tolist() == [0.0] * 3
    y, d = randn(seed, 2, 20).float()
    before = y.clone(), d.clone()
    advance_([y], [d], [torch.ones_like(d) * clock.eta[0].float()], clock.c[:1], clock.beta[:1], clock.beta_next[:1])
    assert torch.equal(y, before[0])
    assert torch.equal(d, before[1])


def test_a_rate_of_zero_gives_no_nan():
    """From the first step on c = 1, later steps of rate zero have no weight."""
    assert [float(clock.c) for clock in ticks([0.0, 0.0, 0.0])] == [1.0] * 3
    later = ticks([0.0, 0.1, 0.0, 0.1], averaging_power=0.0)
    assert [float(clock.c) for clock in later] == [1.0, 1.0, 0.0, 0.5]
    for clock in later:
        assert all(torch.isfinite(value).all() for value in vars(clock).values())


def test_parameters_tick_on_their_own():
    t = torch.tensor([1.0, 7.0, 300.0], dtype=F64)
    sums = torch.tensor([0.0, 0.5, 9.0], dtype=F64)
    beta = torch.tensor([0.0, 0.4, 0.9], dtype=F64)
    eta = torch.tensor([0.1, 0.2, 0.3], dtype=F64)
    together = tick(t, sums, beta, eta, scalar(1.0), **RULE)
    for i in range(3):
        alone = tick(t[i : i + 1], sums[i : i + 1], beta[i : i + 1], eta[i : i + 1], scalar(1.0), **RULE)
        for name, value in vars(alone).items():
            assert torch.equal(getattr(together, name)[i : i + 1], value), name
