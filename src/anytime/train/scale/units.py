"""Numbers with their units, in three digits."""

from __future__ import annotations


def size_of(number: float) -> str:
    """Bytes in decimal units, three digits."""
    unit, name = next(((u, n) for u, n in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if number >= u), (1.0, "B"))
    return f"{digits(number / unit)} {name}"


def time_of(seconds: float) -> str:
    unit, name = next(((u, n) for u, n in ((1.0, "s"), (1e-3, "ms")) if seconds >= u), (1e-6, "µs"))
    return f"{digits(seconds / unit)} {name}"


def digits(value: float) -> str:
    return (
        f"{value:,.0f}"
        if value >= 99.95 or value == int(value)
        else f"{value:.1f}"
        if value >= 9.995
        else f"{value:.2f}"
    )
