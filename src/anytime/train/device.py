"""Where a model runs, in which precision, and how fast the device could be."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from .errors import UserError

#: Dense bf16 operations a second, by a part of the device's name.
_PEAKS = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12, "4090": 165e12}


def choose_device(name: str) -> torch.device:
    """By name; empty is CUDA where there is one, else the CPU."""
    if not name:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError("it computes nothing")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError) as wrong:
        raise UserError(f"device is {name!r}, which is not here: {str(wrong).splitlines()[0]}") from None
    return device


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def peak(device: torch.device) -> float | None:
    """Operations a second that it can do at best, where that is known."""
    name = device_name(device)
    return next((rate for part, rate in _PEAKS.items() if part in name), None)


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager[Any]:
    """bfloat16 for the products where asked for."""
    return torch.autocast(device.type, torch.bfloat16) if narrow(device, precision) else contextlib.nullcontext()


def narrow(device: torch.device, precision: str) -> bool:
    """Whether products are in bfloat16; "auto" is on CUDA."""
    return precision == "bfloat16" or (precision == "auto" and device.type == "cuda")
