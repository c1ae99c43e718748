"""One run that may stop at any step, against one scheduled run for each stopping point.

A small byte-level language model learns the source of Python's standard library. SF-NorMuon trains once and is looked
at, in its average X, at several steps without knowing which will be the last. NorMuon, the same direction with warmup
and cosine decay, needs a run of its own for each of these steps. All runs share the initial weights and the order of
the batches.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import anytime

Curve = dict[int, float]  # step -> validation loss, nats per byte

# Tuned with seed 0 on two CPU cores, by the mean loss over the four stops of 1200 steps.
# SF-NorMuon: lr 0.01, 0.02, 0.03 with growing β and lr 0.01, 0.03, 0.06 with the default constant β, at warmup 20;
# then, at growing β and lr 0.02: warmup 20, 40; first β 0.4, 0.6; growth 0.3, 0.4; adam_lr 0.01, 0.02.
# NorMuon, at warmup 40: lr 0.01, 0.02, 0.04 with momentum 0.95; 0.02, 0.03 with 0.9; 0.015 with 0.85; 0.012, 0.02, 0.03
# with 0.8; 0.02 with 0.7. (AdamW, its lr, warmup and β2 tuned likewise, came to 2.400, 2.161, 1.942, 1.700.)
SF_NORMUON_LR = 0.02
NORMUON_LR = 0.03
NORMUON_MOMENTUM = 0.8
WARMUP = 40


@dataclass(frozen=True)
class Setup:
    width: int = 96
    layers: int = 2
    heads: int = 3
    context: int = 128
    batch: int = 4  # windows per step
    validation: int = 128  # windows


def standard_library() -> tuple[Tensor, Tensor]:
    """The *.py files of the running Python's standard library as bytes: training, and one file in ten held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for name in sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py")):
        if skipped.isdisjoint(name.split("/")):
            parts[zlib.crc32(name.encode()) % 10 == 0].append((root / name).read_bytes())
    train, held_out = (torch.frombuffer(bytearray().join(part), dtype=torch.uint8) for part in parts)
    if min(len(train), len(held_out)) < 100_000:
        raise SystemExit(f"the demo learns from Python's own source files, and found too few of them in {root}")
    return train, held_out


def sample(data: Tensor, count: int, context: int, generator: torch.Generator) -> Tensor:
    """Windows from random places: [count, context + 1]."""
    starts = torch.randint(len(data) - context, (count, 1), generator=generator)
    return data[starts + torch.arange(context + 1)].long()


def rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


class Block(nn.Module):
    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.heads = setup.heads
        self.q, self.k, self.v, self.o = (nn.Linear(setup.width, setup.width, bias=False) for _ in range(4))
        self.up = nn.Linear(setup.width, 4 * setup.width, bias=False)
        self.down = nn.Linear(4 * setup.width, setup.width, bias=False)
        nn.init.zeros_(self.o.weight)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        h = rms_norm(x)
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = rotate(rms_norm(q), turn), rotate(rms_norm(k), turn)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(-2))
        x = x + self.down(F.relu(self.up(rms_norm(x))).square())
        return x


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

    def forward(self, windows: Tensor) -> Tensor:
        """Mean cross-entropy of the next byte, in nats; windows: [batch, context + 1]."""
        x = rms_norm(self.embedding(windows[:, :-1]))
        for block in self.blocks:
            x = block(x, self.turn)
        logits = F.linear(rms_norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


class Task:
    """Data, initial weights, order of the batches: the same for every run of one seed."""

    def __init__(self, setup: Setup, seed: int) -> None:
        self.setup, self.seed = setup, seed
        self.data, held_out = standard_library()
        generator = torch.Generator().manual_seed(seed)
        self.validation = sample(held_out, setup.validation, setup.context, generator)

    def model(self) -> ByteModel:
        torch.manual_seed(self.seed)
        return ByteModel(self.setup)

    @torch.no_grad()
    def validate(self, model: nn.Module) -> float:
        return float(model(self.validation))


def train(
    task: Task,
    looks: set[int],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: LambdaLR | None = None,
    averaged: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Curve:
    """Trains up to the last look; the validation loss at each of them."""
    curve, generator = Curve(), torch.Generator().manual_seed(task.seed + 1)
    for step in range(1, max(looks) + 1):
        model(sample(task.data, task.setup.batch, task.setup.context, generator)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
        if step in looks:
            with averaged():
                curve[step] = task.validate(model)
    return curve


def anytime_run(task: Task, looks: set[int]) -> Curve:
    """SF-NorMuon with growing β, looked at in X; no setting depends on the last step."""
    model = task.model()
    optimizer = anytime.SFNorMuon(
        model,
        lr=SF_NORMUON_LR,
        betas=(0.4, 0.95),
        warmup_steps=WARMUP,
        averaging_power=3.0,
        beta_growth=0.4,
        beta_growth_start=WARMUP,
    )
    return train(task, looks, model, optimizer, averaged=optimizer.averaged)


def scheduled_run(task: Task, looks: set[int]) -> Curve:
    """NorMuon with linear warmup and cosine decay to zero at the last look."""
    horizon = max(looks)
    warmup = min(WARMUP, horizon // 4)

    def rate(done: int) -> float:
        if done < warmup:
            return (done + 1) / warmup
        return 0.5 + 0.5 * math.cos(math.pi * (done - warmup) / (horizon - warmup))

    model = task.model()
    optimizer = anytime.NorMuon(model, lr=NORMUON_LR, momentum=NORMUON_MOMENTUM)
    return train(task, looks, model, optimizer, LambdaLR(optimizer, rate))


def table(stops: list[int], free: Curve, scheduled: dict[int, Curve]) -> str:
    columns = {
        "stop at step": [str(stop) for stop in stops],
        "one anytime run, at X": [f"{free[stop]:.3f}" for stop in stops],
        "NorMuon scheduled for that stop": [f"{scheduled[stop][stop]:.3f}" for stop in stops],
        "the longest schedule, stopped there": [f"{scheduled[stops[-1]][stop]:.3f}" for stop in stops],
    }
    form = " | ".join(f"{{:>{len(name)}}}" for name in columns)
    rule = "-+-".join("-" * len(name) for name in columns)
    return "\n".join([form.format(*columns), rule, *(form.format(*row) for row in zip(*columns.values(), strict=True))])


def draw(stops: list[int], free: Curve, scheduled: dict[int, Curve], path: Path) -> None:
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for i, stop in enumerate(stops):
        curve, grey = scheduled[stop], str(0.7 - 0.15 * i)
        axes.plot(list(curve), list(curve.values()), color=grey, lw=1.5)
        axes.plot(stop, curve[stop], "*", color=grey, ms=14, label=f"NorMuon, cosine to zero at {stop}")
    axes.plot(list(free), list(free.values()), color="#c2410c", lw=2.2)
    axes.plot(stops, [free[stop] for stop in stops], "o", color="#c2410c", ms=7, label="SF-NorMuon at X, one run")
    axes.set_xscale("log", base=2)
    axes.set_xticks(stops, [str(stop) for stop in stops])
    axes.minorticks_off()
    axes.set(xlabel="step", ylabel="validation loss (nats/byte)")
    axes.set_title("A byte-level language model of Python's standard library", loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, reverse=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def main() -> None:
    parser = argparse.ArgumentParser(description="One anytime run against one scheduled run for each stopping point.")
    parser.add_argument("--steps", type=int, help="the last stopping point, at least 8 (1200, or 16 with --quick)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("demo/anytime.png"), help="where the picture goes")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few steps: only shows that it runs")
    options = parser.parse_args()
    steps: int = (16 if options.quick else 1200) if options.steps is None else options.steps
    if steps < 8:
        parser.error(f"--steps is {steps}, must be at least 8")
    setup = Setup(width=32, layers=1, heads=2, context=32, validation=16) if options.quick else Setup()

    torch.set_num_threads(1)  # the model is too small to gain much from more
    began = time.perf_counter()
    stops = [steps // 8, steps // 4, steps // 2, steps]
    looks = {round(steps * 2 ** (-i / 4)) for i in range(17)} | set(stops)
    task = Task(setup, options.seed)
    weights = sum(p.numel() for p in task.model().parameters())
    print(f"A model of {weights:,} weights learns from {len(task.data):,} bytes of Python.")
    print(f"SF-NorMuon, once, to step {steps} ...", flush=True)
    free = anytime_run(task, looks)
    scheduled = {}
    for stop in stops:
        print(f"NorMuon, scheduled to end at step {stop} ...", flush=True)
        scheduled[stop] = scheduled_run(task, {look for look in looks if look <= stop})

    print(f"\n{table(stops, free, scheduled)}\n")
    print("Validation loss, nats per byte. Anytime: SF-NorMuon with growing β. NorMuon: warmup, then cosine to zero.")
    print(f"Steps trained: {steps} by the one anytime run, {sum(stops)} by the {len(stops)} scheduled ones.")
    draw(stops, free, scheduled, options.out)
    print(f"Picture: {options.out.resolve()} ({time.perf_counter() - began:.0f} s)")


if __name__ == "__main__":
    main()
