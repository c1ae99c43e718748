"""The loss of a model on validation tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .batches import split, validation_windows, windows
from .device import autocast
from .errors import UserError
from .shards import Tokens
from .tokenizer import Tokenizer


@dataclass(frozen=True)
class Evaluation:
    """Mean cross-entropy in nats a token; bits a byte where the tokenizer is known."""

    loss: float
    perplexity: float
    bits_per_byte: float | None
    tokens: int

    def row(self) -> dict[str, Any]:
        return {k: v for k, v in asdict(self).items() if v is not None and k != "tokens"}


@torch.no_grad()
def evaluate(
    loss: Callable[[Tensor, Tensor], Tensor] | nn.Module,
    tokens: Tokens,
    *,
    context: int,
    vocabulary: int,
    count: int,
    at_once: int,
    device: torch.device,
    precision: str = "auto",
    tokenizer: Tokenizer | None = None,
) -> Evaluation:
    """On the first `count` tokens, in windows of `context`, `at_once` of them at a time."""
    if at_once < 1:
        raise UserError(f"at_once is {at_once}, must be at least 1")
    starts = validation_windows(tokens, context, max(1, count // context))
    total = torch.zeros((), dtype=torch.float64, device=device)
    lengths = torch.from_numpy(tokenizer.byte_lengths()).to(device) if tokenizer is not None else None
    seen = torch.zeros((), dtype=torch.int64, device=device)
    for i in range(0, len(starts), at_once):
        inputs, targets = split(windows(tokens, starts[i : i + at_once], context, vocabulary), device)
        with autocast(device, precision):
            total += loss(inputs, targets).double() * len(inputs)
        if lengths is not None:
            seen += lengths[targets.clamp(max=len(lengths) - 1)].sum()
    mean = float(total) / len(starts)
    size, count_of_bytes = len(starts) * context, int(seen)
    bits = mean * size / math.log(2) / count_of_bytes if count_of_bytes else None
    return Evaluation(mean, math.exp(min(mean, 700.0)), bits, size)
