"""Images for the robustness suite: drawn from a seed, two small nets, and a loop of its own around the optimizers."""

from __future__ import annotations

import functools
import itertools
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from ..batch_norm import recalibrate_batch_norm
from ..optim.base import AnytimeOptimizer
from ..train.build import Rates, build_optimizer, settled
from ..train.config import Config, merged
from ..train.signals import Stop
from .anytime import Study
from .methods import Method
from .run import Machine, Row, Run, blank, digest, unusual
from .search import Try

KINDS = 10
#: Side of a patch, in pixels: an image is counted as so many tokens as it has patches.
PATCH = 4
#: Validation images, from a seed of their own.
HELD_OUT = 4096


def images(count: int, size: int, seed: int, noise: float = 0.25) -> tuple[Tensor, Tensor]:
    """[count, 1, size, size] and [count] kinds: polygons and stars of three to seven corners, turned, stretched,
    of any size and place and brightness, and under noise."""
    draw = torch.Generator().manual_seed(seed)
    pieces = [_drawn(min(4096, count - first), size, noise, draw) for first in range(0, count, 4096)]
    pixels, kinds = zip(*pieces, strict=True)
    return torch.cat(pixels), torch.cat(kinds)


def _drawn(count: int, size: int, noise: float, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    def between(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, 1, 1, generator=draw)

    def turned(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        angle = between(0, 2 * math.pi)
        return angle.cos() * x - angle.sin() * y, angle.sin() * x + angle.cos() * y

    kinds = torch.randint(KINDS, (count,), generator=draw)
    corners, star = (3 + kinds % 5).view(-1, 1, 1), (kinds >= 5).view(-1, 1, 1)
    line = torch.linspace(-1, 1, size)
    y, x = torch.meshgrid(line, line, indexing="ij")
    x, y = turned(x - between(-0.25, 0.25), y - between(-0.25, 0.25))
    stretch = 2 ** between(-0.25, 0.25)
    x, y = turned(x * stretch, y / stretch)
    part = torch.remainder(torch.atan2(y, x) / (2 * math.pi) * corners, 1)  # of the way from a corner to the next
    polygon = torch.cos(math.pi / corners) / torch.cos((2 * part - 1) * math.pi / corners)
    edge = torch.where(star, 0.45 + 0.55 * (2 * part - 1).abs(), polygon) * between(0.45, 0.8)
    shape = torch.sigmoid(size * (edge - torch.hypot(x, y)))
    pixels = between(0.6, 1.0) * shape + noise * torch.randn(count, size, size, generator=draw)
    return pixels.unsqueeze(1), kinds


class Vit(nn.Module):
    """A vision transformer: patches, learned positions, the mean of all places at the end."""

    def __init__(self, size: int, width: int, depth: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, PATCH, PATCH)
        self.positions = nn.Parameter(0.02 * torch.randn((size // PATCH) ** 2, width))
        layer = functools.partial(nn.TransformerEncoderLayer, width, max(1, width // 16), 4 * width)
        self.blocks = nn.ModuleList(
            layer(dropout=0.0, activation="gelu", batch_first=True, norm_first=True) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, KINDS)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patches(pixels).flatten(2).mT + self.positions
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(self.norm(x.mean(1)))
        return found


def conv(size: int, width: int) -> nn.Module:
    """Four convolutions with BatchNorm, each of half the side and twice the channels of the one before."""
    widths = [1, *(width * 2**i // 4 for i in range(4))]
    layers: list[nn.Module] = []
    for i, (before, after) in enumerate(itertools.pairwise(widths)):
        layers += [nn.Conv2d(before, after, 3, 1 if i == 0 else 2, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], KINDS))


NETS = {"vit": Vit, "conv": conv}


@dataclass(frozen=True)
class Seeing(Run):
    """A run on images. `settings`: net, size, width, count, batch, steps, looks, and the optimizer's as in training."""

    @functools.cached_property
    def config(self) -> Config:
        """The optimizer's part of it counts."""
        return settled(merged(Config(), {"optimizer": self.settings["optimizer"], "seed": self.seed}))

    @functools.cached_property
    def key(self) -> str:
        return f"{self.name} #{self.seed} {digest([dict(self.settings), unusual(self.config)])}"

    @property
    def steps(self) -> int:
        return int(self.settings["steps"])

    @property
    def tokens(self) -> int:
        """Patches."""
        return self.steps * int(self.settings["batch"]) * (int(self.settings["size"]) // PATCH) ** 2

    def execute(self, folder: Path, machine: Machine) -> Row | None:
        """Begins at the first step, however far it was."""
        s, began, device = self.settings, time.monotonic(), torch.device(machine.device)
        if machine.threads:
            torch.set_num_threads(machine.threads)
        seen, kinds = (part.to(device) for part in images(s["count"], s["size"], seed=1))
        held_out = [part.to(device) for part in images(HELD_OUT, s["size"], seed=2)]
        with torch.random.fork_rng([]):
            torch.manual_seed(self.seed)
            model = NETS[s["net"]](s["size"], s["width"]).to(device)
        optimizer = build_optimizer(model, self.config.optimizer)
        schedule = LambdaLR(optimizer, Rates(self.config).factor)
        draw = torch.Generator().manual_seed(self.seed)
        epochs = math.ceil(self.steps * s["batch"] / s["count"])
        order = torch.cat([torch.randperm(s["count"], generator=draw) for _ in range(epochs)]).to(device)
        row = blank(self, machine)
        with Stop().listening() as stop:
            for step, batch in enumerate(torch.split(order, s["batch"])[: self.steps], 1):
                F.cross_entropy(model(seen[batch]), kinds[batch]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                if stop.asked:
                    return None
                if step in s["looks"]:
                    loss = loss_at_x(model, optimizer, seen[:HELD_OUT], *held_out)
                    if not math.isfinite(loss):
                        row["failed"] = f"the loss is {loss} at step {step}"
                        break
                    row["losses"][str(step)] = round(loss, 5)
        return row | {"tokens": self.tokens, "seconds": round(time.monotonic() - began, 2)}


def loss_at_x(model: nn.Module, optimizer: AnytimeOptimizer, some: Tensor, pixels: Tensor, kinds: Tensor) -> float:
    """The mean loss; BatchNorm measured anew on some of the training images."""
    with optimizer.averaged(), torch.no_grad():
        recalibrate_batch_norm(model, torch.split(some, 512))
        model.eval()
        pieces = zip(torch.split(pixels, 512), torch.split(kinds, 512), strict=True)
        found = [F.cross_entropy(model(p), k, reduction="sum") for p, k in pieces]
    model.train()
    return float(torch.stack(found).sum()) / len(pixels)


@dataclass(frozen=True)
class Images(Study):
    """A study whose runs are on images; its horizons are parts of `whole` steps."""

    net: str = "vit"
    size: int = 24
    width: int = 64
    count: int = 65536
    batch: int = 128
    whole: int = 2400

    def steps(self, multiple: float) -> int:
        return math.ceil(multiple * self.whole)

    def run(self, method: Method, point: Try, multiple: float, seed: int, *, curve: bool = False) -> Run:
        made = super().run(method, point, multiple, seed, curve=curve)
        settings: dict[str, Any] = {key: getattr(self, key) for key in ("net", "size", "width", "count", "batch")}
        settings |= {"optimizer": made.settings["optimizer"], "looks": made.settings["eval_at"], "steps": made.steps}
        return Seeing(f"{self.name}: {made.name}", seed, settings)
