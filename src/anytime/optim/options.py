"""Every option of every optimizer: what is legal, said in the error; and its plain form in files."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..core.polar import METHODS
from ..distributed.owners import MODES

Check = Callable[[Any], bool]


def _real(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, numbers.Real) and math.isfinite(value)


def _between(low: float, high: float, *, closed: bool = False) -> Check:
    return lambda v: _real(v) and low <= v and (v <= high if closed else v < high)


def _whole(low: int) -> Check:
    return lambda v: _real(v) and isinstance(v, numbers.Integral) and int(v) >= low


def _one_of(*choices: Any) -> Check:
    return lambda v: any(v is c or (isinstance(v, str) and v == c) for c in choices)


def _pair(check: Check) -> Check:
    return lambda v: isinstance(v, tuple | list) and len(v) == 2 and all(map(check, v))


def _rate(value: Any) -> bool:
    if isinstance(value, Tensor):
        if value.numel() != 1 or not value.is_floating_point():
            return False
        return value.device.type != "cpu" or bool((value >= 0) & value.isfinite())
    return _real(value) and value >= 0


def _dtype(value: Any) -> bool:
    return value is None or (isinstance(value, torch.dtype) and value.is_floating_point)


CHECKS: dict[str, tuple[Check, str]] = {
    "lr": (_rate, "a number in [0, ∞) or a floating-point tensor of one"),
    "rate": (_between(0, math.inf), "a multiplier in [0, ∞)"),
    "beta": (_between(0, 1, closed=True), "in [0, 1]"),
    "betas": (_pair(_between(0, 1)), "two numbers in [0, 1)"),
    "vector_betas": (lambda v: v is None or _pair(_between(0, 1))(v), "two numbers in [0, 1) or None"),
    "beta2": (_between(0, 1), "in [0, 1)"),
    "momentum": (_between(0, 1), "in [0, 1)"),
    "momentum_growth": (_between(0, math.inf), "an exponent in [0, ∞), 0 for a constant μ"),
    "momentum_growth_start": (_whole(2), "a whole number in [2, ∞)"),
    "nesterov": (_one_of(True, False), "True or False"),
    "eps": (_between(0, math.inf), "in [0, ∞)"),
    "weight_decay": (_between(0, math.inf), "in [0, ∞)"),
    "decay_at": (_one_of("z", "y", None), "'z', 'y' or None"),
    "cautious": (_one_of(True, False), "True or False"),
    "warmup_steps": (_whole(0), "a whole number in [0, ∞)"),
    "row_norm": (_one_of(True, False), "True or False"),
    "polar": (lambda v: callable(v) or v in METHODS, f"one of {', '.join(map(repr, METHODS))} or a callable"),
    "polar_dtype": (_dtype, "a floating-point torch.dtype or None"),
    "momentum_dtype": (
        _one_of(torch.float32, torch.bfloat16, torch.float64, None),  # others have too short a range
        "torch.float32, torch.bfloat16, torch.float64 or None",
    ),
    "scaling": (_one_of("rms", "max-side", "aspect", None), "'rms', 'max-side', 'aspect' or None"),
    "update_rms": (lambda v: _real(v) and v > 0, "in (0, ∞)"),
    "averaging_power": (_between(0, math.inf), "in [0, ∞)"),
    "averaging_warmup": (_whole(0), "a whole number in [0, ∞)"),
    "beta_growth": (_between(0, math.inf), "an exponent in [0, ∞), 0 for a constant β"),
    "beta_growth_start": (_whole(2), "a whole number in [2, ∞)"),
    "decay_fading": (_whole(0), "a whole number in [0, ∞), 0 for a constant decay"),
    "rate_fall": (_between(0, 2, closed=True), "an exponent in [0, 2], 0 for a constant rate"),
    "rate_fall_start": (_whole(2), "a whole number in [2, ∞)"),
    "beta_max": (_between(0, 1, closed=True), "in [0, 1]"),
    "beta_anneal_steps": (_whole(0), "a whole number in [0, ∞), 0 for a constant β"),
    "polyak_beta": (_between(0, 1), "in [0, 1)"),
    "bias_correction": (_one_of("rate", "moment", None), "'rate', 'moment' or None"),
    "projection": (_one_of("frobenius", "spectral", None), "'frobenius', 'spectral' or None"),
    "radius": (lambda v: v is None or (_real(v) and v > 0), "in (0, ∞), or None without a projection"),
}
#: Of an optimizer as a whole: no group has them.
WHOLE: dict[str, tuple[Check, str]] = {
    "on_nonfinite": (_one_of("skip", "raise"), "'skip' or 'raise'"),
    "graph": (_one_of(True, False), "True or False"),
    "owners": (_one_of(None, *MODES), f"None, {', '.join(map(repr, MODES))}"),
    "chunk_bytes": (lambda v: v is None or _whole(1)(v), "a whole number in [1, ∞) or None"),
}
#: What a state's groups say of the optimizer as a whole.
ABOUT = ("algorithm", "format", "sequence", "skipped_steps")
#: What an option is in files from before there was such a one.
LATER: dict[str, Any] = {"decay_fading": 0, "cautious": False, "momentum_growth": 0.0, "rate_fall": 0.0}
#: Keys of a group that others than the optimizer write there; kept, not checked.
FOREIGN = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr", "name", "param_names"}


def unknown(key: str, known: Iterable[str], owner: str) -> str:
    """The words for an option that is not there: the nearest one, or all."""
    known = sorted(set(known) - {"params"})
    near = difflib.get_close_matches(key, known, n=1)
    return f"{owner} has no option {key!r}; " + (
        f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}"
    )


def validate(options: Mapping[str, Any], known: Iterable[str], owner: str, prefix: str = "") -> None:
    """Unknown keys and illegal values are errors; `prefix` is what the user wrote before the key."""
    known = set(known)
    for key, value in options.items():
        if key in FOREIGN:
            continue
        if key not in known:
            if key in (*WHOLE, "rules", "unmatched", "process_group", "recipe"):
                raise ValueError(f"{key!r} is for the whole optimizer: an argument of {owner}, no option of a group")
            raise ValueError(unknown(prefix + key, (prefix + k for k in known), owner))
        check, legal = CHECKS[key] if key in CHECKS else WHOLE[key]
        if not check(value):
            raise ValueError(f"{owner}: {prefix}{key} is {value!r}; it must be {legal}")


def validate_together(options: Mapping[str, Any], owner: str) -> None:
    """What options owe each other."""
    if options.get("projection") is not None and options.get("radius") is None:
        raise ValueError(
            f"{owner}: projection is {options['projection']!r} and needs a radius in (0, ∞), but it is None"
        )


def plain_number(value: Any) -> Any:
    """numpy's numbers as Python's."""
    if type(value) in (bool, int, float) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def to_plain(key: str, value: Any) -> Any:
    """As it goes into a file: numbers, strings, lists and tensors, nothing that needs code to load."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if key == "polar" and callable(value):
        return f"callable {getattr(value, '__qualname__', type(value).__name__)}"
    return [plain_number(v) for v in value] if isinstance(value, tuple | list) else plain_number(value)


def from_plain(key: str, value: Any, current: Any) -> Any:
    """The inverse; a callable cannot be in a file, so the optimizer's own stays."""
    if key in ("polar_dtype", "momentum_dtype") and isinstance(value, str):
        return getattr(torch, value)
    if key == "polar" and isinstance(value, str) and value.startswith("callable "):
        if not callable(current):
            raise ValueError(
                f"the state was saved with polar={value[9:]!r}, a callable: build the optimizer with it too"
            )
        return current
    if isinstance(value, Tensor):
        return value.clone()
    return tuple(value) if isinstance(value, list) else value
