"""One run that may stop at any step, against one AdamW schedule for each stopping point.

A small byte-level language model learns the source of Python's standard library. SF-NorMuon trains once and is looked
at, at its average X, at several steps without knowing which is the last. AdamW with warmup and cosine decay needs a
run of its own for each of these steps. All runs share the initial weights and the order of the batches.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anytime

Curve = dict[int, float]  # step -> validation loss, nats per byte


@dataclass(frozen=True)
class Setup:
    width: int = 128
    layers: int = 2
    heads: int = 4
    context: int = 128
    batch: int = 16
    validation_batches: int = 8


# ------------------------------------------------------------------ data


def standard_library() -> tuple[Tensor, Tensor]:
    """The *.py files of the running Python's standard library as bytes: training, and one file in ten held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for name in sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py")):
        if skipped.isdisjoint(name.split("/")):
            parts[zlib.crc32(name.encode()) % 10 == 0].append((root / name).read_bytes())
    train, held_out = (torch.from_numpy(np.frombuffer(b"".join(part), np.uint8).copy()) for part in parts)
    if min(len(train), len(held_out)) < 100_000:
        raise SystemExit(f"the demo learns from Python's own source files, and found too few of them in {root}")
    return train, held_out


def sample(data: Tensor, setup: Setup, generator: torch.Generator) -> Tensor:
    """[batch, context + 1] windows at random places."""
    starts = torch.randint(len(data) - setup.context, (setup.batch, 1), generator=generator)
    return data[starts + torch.arange(setup.context + 1)].long()


# ------------------------------------------------------------------ model


def rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


class Block(nn.Module):
    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.heads = setup.heads
        self.q, self.k, self.v, self.o = (nn.Linear(setup.width, setup.width, bias=False) for _ in range(4))
        self.up = nn.Linear(setup.width, 4 * setup.width, bias=False)
        self.down = nn.Linear(4 * setup.width, setup.width, bias=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        h = rms_norm(x)
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = rotate(rms_norm(q), turn), rotate(rms_norm(k), turn)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.relu(self.up(rms_norm(x))).square())


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Rotary positions: the two halves of x [..., context, d] turned by the angles in turn [context, d / 2]."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = turn.cos(), turn.sin()
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class ByteModel(nn.Module):
    turn: Tensor

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, setup.width)  # tied: also the output layer
        self.blocks = nn.ModuleList(Block(setup) for _ in range(setup.layers))
        half = setup.width // setup.heads // 2
        frequencies = 1000.0 ** -(torch.arange(half) / half)
        self.register_buffer("turn", torch.arange(setup.context)[:, None] * frequencies, persistent=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        for block in self.blocks:
            nn.init.zeros_(block.o.weight)
            nn.init.zeros_(block.down.weight)

    def forward(self, windows: Tensor) -> Tensor:
        """Mean cross-entropy of the next byte, in nats; windows: [batch, context + 1]."""
        x = rms_norm(self.embedding(windows[:, :-1]))
        for block in self.blocks:
            x = block(x, self.turn)
        logits = F.linear(rms_norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
