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
from .parallel import World
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
    world: World | None = None,
) -> Evaluation:
    """On the first `count` tokens, in windows of `context`, `at_once` of them at a time; the same on every process.

    The processes of a world take turns. All call the model equally often, for it may be cut up among them: who has no
    windows left reads the first again, and does not count it.
    """
    if at_once < 1:
        raise UserError(f"at_once is {at_once}, must be at least 1")
    starts = validation_windows(tokens, context, max(1, count // context))
    world = world or World(device)
    lengths = torch.from_numpy(tokenizer.byte_lengths()).to(device) if tokenizer is not None else None
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # of losses and of bytes
    for first in range(0, len(starts), at_once * world.readers):
        mine = first + at_once * world.reader
        counts = mine < len(starts)
        mine = mine if counts else 0
        inputs, targets = split(windows(tokens, starts[mine : mine + at_once], context, vocabulary), device)
        with autocast(device, precision):
            found = loss(inputs, targets).double() * len(inputs)
        if counts:
            sums[0] += found
            if lengths is not None:
                sums[1] += lengths[targets.clamp(max=len(lengths) - 1)].sum()
    total, seen = world.total(sums).tolist()
    mean, size, count_of_bytes = total / len(starts), len(starts) * context, round(seen)
    bits = mean * size / math.log(2) / count_of_bytes if count_of_bytes else None
    return Evaluation(mean, math.exp(min(mean, 700.0)), bits, size)
