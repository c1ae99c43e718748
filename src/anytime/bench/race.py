"""The measuring: contestants take turns, one step each, so that what disturbs the machine disturbs them all.

Each has weights, gradients and state of its own; where memory cannot hold them together they run in several heats.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..train.config import Config, merged
from ..train.device import device_name
from ..train.errors import UserError
from ..train.model import GPT
from ..train.presets import preset
from ..train.runs import Row, origin
from .floor import Shapes, floor_seconds, measure_rates, settled
from .peers import Contestant, fused_adamw

Named = list[tuple[str, nn.Parameter]]

#: Steps before the first that counts: compilation, autotuning and the capture of graphs are over by then.
WARMUP = {"cpu": 2, "cuda": 6}
STEPS = {"cpu": 5, "cuda": 20}
PRESET = {"cpu": "2M", "cuda": "125M"}
PARTS = ("matrices", "all")
#: Bytes of memory to reckon with for each parameter of a contestant: itself, its gradient, two of state, a temporary.
BYTES = 20
#: Steps put into the device's queue at once for its own time.
QUEUED = 5


def preset_shapes(name: str) -> tuple[Shapes, Shapes]:
    """The hidden matrices of a preset and its other parameters, by name."""
    with torch.device("meta"):
        model = GPT(merged(Config(), preset(name)).model)
    found: tuple[Shapes, Shapes] = ({}, {})
    for key, p in model.named_parameters():
        found[0 if key.startswith("blocks.") else 1][key] = tuple(p.shape)
    return found


@dataclass
class Entry:
    """A contestant at work."""

    contestant: Contestant
    named: Named
    gradients: list[Tensor]  # what every step gets, whatever the one before made of its own
    matrices: int
    own: list[Tensor] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    row: Row = field(default_factory=dict)

    def build(self) -> None:
        c = self.contestant
        mine, rest = (self.named[: self.matrices], self.named[self.matrices :]) if c.matrices_only else (self.named, [])
        self.own = [gradient.clone() for gradient in self.gradients]
        self.refresh()
        self.optimizers = [c.make(mine if c.ours else [p for _, p in mine])]
        if rest:
            self.optimizers.append(fused_adamw([p for _, p in rest]))
            self.row["rest"] = "torch AdamW, fused"

    def refresh(self) -> None:
        """Some optimizers write into gradients, some drop them."""
        torch._foreach_copy_(self.own, self.gradients)
        for (_, p), gradient in zip(self.named, self.own, strict=True):
            p.grad = gradient

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def time(self, device: torch.device) -> None:
        """One step from an empty queue: until it returns, and until the device is done."""
        self.refresh()
        began = settled(device)
        self.step()
        self.host.append(time.perf_counter() - began)
        self.wall.append(settled(device) - began)

    def device_seconds(self) -> float:
        """A step's share of several queued ones; the device sleeps first so that the host can run ahead."""
        cuda: Any = torch.cuda  # not all of it is typed
        times = []
        for _ in range(3):
            start, end = (cuda.Event(enable_timing=True) for _ in range(2))
            cuda._sleep(int(2e9 * min(0.5, 1.2 * QUEUED * statistics.median(self.host))))
            start.record()
            for _ in range(QUEUED):
                self.step()
            end.record()
            end.synchronize()
            times.append(float(start.elapsed_time(end)) / 1e3 / QUEUED)
        return statistics.median(times)

    def let_go(self) -> None:
        self.named, self.gradients, self.own, self.optimizers = [], [], [], []

    def extra_bytes(self) -> int:
        """What a step takes beyond what is there before it."""
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def measure(
    preset: str,
    part: str,
    among: Sequence[Contestant],
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    steps: int | None = None,
    tell: Callable[[str], None] = lambda text: None,
    also: Callable[[Callable[[], None]], Row] | None = None,
) -> list[Row]:
    """A row for each contestant: a step on the matrices of a preset alone, or on all its parameters.

    One that fails has "error" in place of times. `also` gets a step to call and gives more columns.
    """
    kind = "cuda" if device.type == "cuda" else "cpu"
    steps = STEPS[kind] if steps is None else steps
    if steps < 1:
        raise UserError(f"steps is {steps}, must be at least 1")
    matrices, rest = preset_shapes(preset)
    rest = rest if part == "all" else {}
    shapes = matrices | rest
    settings: Row = {"preset": preset, "part": part, "dtype": str(dtype).removeprefix("torch."), "steps": steps}
    settings |= {"parameters": sum(map(math.prod, shapes.values())), "matrices": len(matrices)}
    rows: list[Row] = []
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # what was compiled for other shapes counts against those of today
    with torch.cuda.device(device) if kind == "cuda" else contextlib.nullcontext():
        rates = measure_rates(device)
        settings |= {"bandwidth": rates.bandwidth, "products": rates.products, "device": device_name(device)}
        settings |= {"threads": torch.get_num_threads(), "torch": torch.__version__, **origin()}
        for heat, group in enumerate(heats(among, BYTES * settings["parameters"], _room(device))):
            tell(f"{preset}, {part}: heat {heat + 1}: {'; '.join(c.name for c in group)}")
            for entry in _race(group, shapes, len(matrices), device, dtype, WARMUP[kind], steps, also):
                c = entry.contestant
                floor = floor_seconds(matrices, rest, dtype, rates, c.polar if c.spectral else None)
                row = {"contestant": c.name, "ours": c.ours, "peer_version": c.version, **settings, "heat": heat}
                row |= {"spectral": c.spectral, "floor_ms": 1e3 * floor, **entry.row}
                if "error" not in row:
                    wall = statistics.median(entry.wall)
                    row |= {"wall_ms": 1e3 * wall, "wall_min_ms": 1e3 * min(entry.wall), "of_floor": floor / wall}
                    row |= {"wall_max_ms": 1e3 * max(entry.wall)}
                rows.append(row)
            del entry
            gc.collect()
    order = [c.name for c in among]
    return sorted(rows, key=lambda row: order.index(row["contestant"]))


def _race(
    among: Sequence[Contestant],
    shapes: Shapes,
    matrices: int,
    device: torch.device,
    dtype: torch.dtype,
    warmup: int,
    steps: int,
    also: Callable[[Callable[[], None]], Row] | None,
) -> list[Entry]:
    """All of them measured, a step each in turn; their weights and state are let go."""

    def drawn(seed: int, scale: float) -> list[Tensor]:
        generator = torch.Generator(device).manual_seed(seed)
        draw = (torch.randn(shape, generator=generator, device=device) for shape in shapes.values())
        return [tensor.mul_(scale).to(dtype) for tensor in draw]

    gradients = drawn(0, 1e-3)
    entries = [Entry(contestant, [], gradients, matrices) for contestant in among]

    def prepare(entry: Entry) -> None:
        entry.named = list(zip(shapes, map(nn.Parameter, drawn(1, 0.02)), strict=True))
        pools = _graph_pools(device)
        entry.build()
        for _ in range(warmup):
            entry.refresh()
            entry.step()
        entry.row["state_bytes"] = state_bytes(entry.optimizers)
        if device.type == "cuda":
            entry.row["extra_bytes"] = entry.extra_bytes() + _graph_pools(device) - pools

    def conclude(entry: Entry) -> None:
        if device.type == "cuda":
            entry.row["host_ms"] = 1e3 * statistics.median(entry.host)
            entry.row["device_ms"] = 1e3 * entry.device_seconds()
        if also is not None:
            entry.row |= also(entry.step)
        entry.let_go()

    for work in (prepare, *[lambda entry: entry.time(device)] * steps, conclude):
        for entry in entries:
            if "error" not in entry.row:
                _attempt(entry, work)
    return entries


def _attempt(entry: Entry, work: Callable[[Entry], None]) -> None:
    """What goes wrong with a contestant is noted, and it is out; the others go on."""
    try:
        work(entry)
    except Exception as wrong:
        words = str(wrong).strip().splitlines() or [""]
        entry.row["error"] = f"{type(wrong).__name__}: {words[0]}"
        entry.let_go()


def heats(among: Sequence[Contestant], each: int, room: int) -> list[list[Contestant]]:
    """As few groups as memory allows, of about equal size, at `each` bytes for one."""
    count = math.ceil(len(among) / max(1, room // each))
    return [list(among[i::count]) for i in range(count)]


def _room(device: torch.device) -> int:
    """Bytes that may be taken; where nobody says, 8 GiB."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return int(0.9 * torch.cuda.mem_get_info()[0])
    try:
        return int(0.7 * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return 8 << 30


def _graph_pools(device: torch.device) -> int:
    """Bytes that captured graphs keep for their temporaries, which no step takes any more."""
    if device.type != "cuda":
        return 0
    cuda: Any = torch.cuda
    private = [s for s in cuda.memory_snapshot() if tuple(s["segment_pool_id"]) != (0, 0)]
    return sum(int(s["total_size"]) - int(s["allocated_size"]) for s in private)


def state_bytes(optimizers: Sequence[Any]) -> int:
    """Of all tensors in the optimizers' state, each counted once."""
    found: dict[int, int] = {}

    def look(thing: Any) -> None:
        if isinstance(thing, Tensor):
            found[id(thing)] = thing.numel() * thing.element_size()
        elif isinstance(thing, (Mapping, list, tuple)):
            for inner in thing.values() if isinstance(thing, Mapping) else thing:
                look(inner)

    for optimizer in optimizers:
        look(optimizer.state)
        look(getattr(getattr(optimizer, "optimizer", None), "state", {}))  # of one that wraps another
    return sum(found.values())
