"""How long a step of an optimizer takes on this machine, beside other libraries' in the same run, and how long it must.

A contestant has weights, gradients and state of its own. They take turns, one step each, so that what disturbs the
machine disturbs them all; where memory cannot hold them together they run in several heats. The floor is what the step
of SF-NorMuon cannot go below: its bytes at the rate of a large copy and its products at the rate of a large one, both
measured in the same run.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import importlib.util
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .core.polar import COEFFICIENTS, polar_flops, product
from .optim.sf_elementwise import SFAdamW
from .optim.sf_spectral import SFNorMuon
from .train.config import Config, merged, nearest, preset
from .train.device import device_name
from .train.errors import UserError
from .train.model import GPT
from .train.runs import Row, origin

Named = list[tuple[str, nn.Parameter]]
Shapes = dict[str, tuple[int, ...]]

#: Steps before the first that counts: compilation, autotuning and the capture of graphs are over by then.
WARMUP = {"cpu": 2, "cuda": 6}
STEPS = {"cpu": 5, "cuda": 20}
PRESET = {"cpu": "2M", "cuda": "125M"}
PARTS = ("matrices", "all")
#: Bytes of memory to reckon with for each parameter of a contestant: itself, its gradient, two of state, a temporary.
BYTES = 20
#: Steps put into the device's queue at once for its own time.
QUEUED = 5


# ------------------------------------------------------------------ the floor


@dataclass(frozen=True)
class Rates:
    """What the device does at best: bytes read and written a second, and operations of matrix products."""

    bandwidth: float
    products: float


def measure_rates(device: torch.device) -> Rates:
    """By a copy beyond all caches, and a product in the precision of the polar factor."""
    cuda = device.type == "cuda"
    source = torch.ones(1 << (28 if cuda else 26), device=device)
    copy = torch.empty_like(source)
    side = 8192 if cuda else 1024
    a, b = (torch.randn(side, side, device=device, dtype=torch.float16 if cuda else torch.float32) for _ in range(2))

    def per_second(amount: float, work: Callable[[], object]) -> float:
        times = []
        for _ in range(6):
            began = _settled(device)
            for _ in range(10):
                work()
            times.append((_settled(device) - began) / 10)
        return amount / statistics.median(times[1:])

    return Rates(
        per_second(2 * 4 * source.numel(), lambda: copy.copy_(source)),
        per_second(2.0 * side**3, lambda: a @ b if cuda else product(a, b)),
    )


def moved_bytes(dtype: torch.dtype, *, matrix: bool) -> int:
    """A parameter's bytes in a schedule-free step: the gradient read, y, d and one buffer read and written.

    The buffer is the momentum of a matrix, which also has its polar factor written and read in half precision, or the
    second moment of another. A narrow y has a residual in float32.
    """
    size = torch.finfo(dtype).bits // 8
    return 3 * size + 2 * 4 + 2 * 4 + (2 * 4 if size < 4 else 0) + (2 * 2 if matrix else 0)


def floor_seconds(
    matrices: Shapes, rest: Shapes, dtype: torch.dtype, rates: Rates, polar: str | None = "newton-schulz"
) -> float:
    """Of a step of SF-NorMuon by a polar factor; by None: of one that treats every parameter by its elements."""
    numbers = [sum(map(math.prod, shapes.values())) for shapes in (matrices, rest)]
    spectral = polar is not None
    moved = numbers[0] * moved_bytes(dtype, matrix=spectral) + numbers[1] * moved_bytes(dtype, matrix=False)
    flops = 0.0 if polar is None else sum(polar_flops(m, n, COEFFICIENTS[polar]) for m, n in matrices.values())
    return moved / rates.bandwidth + flops / rates.products


# ------------------------------------------------------------ the paper's listing


def newton_schulz(G: Tensor) -> Tensor:
    """The listing's polar factor: five steps in bfloat16, on one matrix."""
    tall = G.shape[0] > G.shape[1]
    X: Tensor = G.bfloat16()
    X = X / torch.linalg.matrix_norm(X).add(1e-7)
    X = X.mT if tall else X
    for _ in range(5):
        A = X @ X.mT
        B = A @ X
        X = 3.4445 * X - 4.7750 * B + 2.0315 * A @ B
    return X.mT if tall else X


class Listing(torch.optim.Optimizer):
    """The operations of the paper's listing: SF-NorMuon a matrix at a time, a norm read on the host for each."""

    def __init__(
        self,
        params: Sequence[Tensor],
        lr: float = 0.005,
        betas: tuple[float, float] = (0.9, 0.95),
        momentum: float = 0.8,
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        warmup_steps: int = 2000,
        polar: Callable[[Tensor], Tensor] = newton_schulz,
    ) -> None:
        self.polar, self.taken, self.weight_sum = polar, 0, 0.0
        options = {"lr": lr, "betas": betas, "momentum": momentum, "eps": eps}
        super().__init__(params, {**options, "weight_decay": weight_decay, "warmup_steps": warmup_steps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.taken += 1
        for group in self.param_groups:
            beta, beta2 = group["betas"]
            eta = group["lr"] * min(1.0, self.taken / group["warmup_steps"])
            self.weight_sum += eta**2
            c = eta**2 / self.weight_sum
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"z": p.clone(), "mom": torch.zeros_like(p), "v": torch.zeros_like(p[:, 0]).float()}
                z, v, M = state["z"], state["v"], state["mom"]
                M.mul_(group["momentum"]).add_(p.grad, alpha=1 - group["momentum"])
                P = self.polar(M).to(p.dtype)
                v.mul_(beta2).add_((P * P).mean(dim=1).float(), alpha=1 - beta2)
                P = P / (v.sqrt() + group["eps"]).to(P.dtype).unsqueeze(1)
                scale = 0.2 * eta * math.sqrt(p.numel()) / max(1e-12, float(P.float().norm()))
                x = (p - (1 - beta) * z) / beta
                z.sub_(z, alpha=eta * group["weight_decay"])
                z.sub_(P, alpha=scale)
                p.copy_((1 - beta) * z + beta * ((1 - c) * x + c * z))


# -------------------------------------------------------------- the contestants


@dataclass(frozen=True)
class Contestant:
    """An optimizer by name: `make` gets named parameters if it is ours, else bare ones.

    With `matrices_only`, another optimizer, torch's fused AdamW, takes the rest. `module` is what must be installed.
    The floor that a spectral one is compared with is that of SF-NorMuon by the polar factor `polar`.
    """

    name: str
    make: Callable[[Any], Any]
    module: str = ""
    ours: bool = False
    spectral: bool = True
    matrices_only: bool = False
    polar: str = "newton-schulz"

    @property
    def version(self) -> str | None:
        """The peer's, where its package says."""
        try:
            return importlib.metadata.version({"muon": "muon-optimizer"}.get(self.module, self.module))
        except (importlib.metadata.PackageNotFoundError, ValueError):  # none, or no package
            return None


def _fused_adamw(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, fused=True)


def contestants(device: torch.device) -> list[Contestant]:
    """Ours first, then the peers, installed or not."""
    cuda = device.type == "cuda"

    def peer(name: str, module: str, make: Callable[[Any, list[Tensor]], Any], *, spectral: bool = True) -> Contestant:
        def build(params: list[Tensor]) -> Any:
            return make(importlib.import_module(module), params)

        return Contestant(name, build, module, spectral=spectral, matrices_only=spectral)

    def in_training(optimizer: Any) -> Any:
        optimizer.train()
        return optimizer

    def muon_group(params: list[Tensor]) -> list[dict[str, Any]]:
        return [{"params": params, "use_muon": True}]

    def listing(params: list[Tensor]) -> Listing:
        return Listing(params, polar=torch.compile(newton_schulz) if cuda else newton_schulz)

    def replayed(module: Any, params: list[Tensor]) -> Any:
        wrap = importlib.import_module("dion.cuda_graph").CudaGraphOptimizer
        return wrap(module.NorMuon(params, use_triton=True), warmup_steps=3)

    def in_four(*, graph: bool) -> Contestant:
        name, four = f"SFNorMuon, four steps{', graph' * graph}", "polar-express-4"
        return Contestant(name, lambda named: SFNorMuon(named, polar=four, graph=graph), ours=True, polar=four)

    graphs = [
        Contestant("SFNorMuon, graph", lambda named: SFNorMuon(named, graph=True), ours=True),
        in_four(graph=True),
        Contestant("SFAdamW, graph", lambda named: SFAdamW(named, graph=True), ours=True, spectral=False),
    ]
    on_cuda = [
        peer("pytorch_optimizer Muon, Gram", "pytorch_optimizer",
             lambda m, ps: m.Muon(muon_group(ps), ns_method="gram_newton_schulz")),
        peer("dion NorMuon, Triton", "dion", lambda m, ps: m.NorMuon(ps, use_triton=True)),
        peer("dion NorMuon, Triton, graph", "dion", replayed),
    ]  # fmt: skip
    return [
        *(graphs if cuda else []),
        Contestant("SFNorMuon", SFNorMuon, ours=True),
        in_four(graph=False),
        Contestant("SFAdamW", SFAdamW, ours=True, spectral=False),
        Contestant("paper's listing", listing, matrices_only=True),
        Contestant("torch AdamW, fused", _fused_adamw, spectral=False),
        peer("torch Muon", "torch", lambda m, ps: m.optim.Muon(ps)),
        peer("schedulefree AdamW", "schedulefree", lambda m, ps: in_training(m.AdamWScheduleFree(ps)), spectral=False),
        peer("muon Muon", "muon", lambda m, ps: m.SingleDeviceMuon(ps)),
        peer("pytorch_optimizer Muon", "pytorch_optimizer", lambda m, ps: m.Muon(muon_group(ps))),
        peer("pytorch_optimizer ScheduleFree(NorMuon)", "pytorch_optimizer",
             lambda m, ps: in_training(m.ScheduleFreeWrapper(m.NorMuon(muon_group(ps))))),
        peer("heavyball Muon", "heavyball", lambda m, ps: m.Muon(ps, consume_grad=False)),
        peer("dion NorMuon", "dion", lambda m, ps: m.NorMuon(ps)),
        *(on_cuda if cuda else []),
    ]  # fmt: skip


def chosen(among: Sequence[Contestant], only: Sequence[str]) -> tuple[list[Contestant], list[str]]:
    """Those whose names contain one of `only` (all if none is given), and the packages among them that are missing."""

    def bare(name: str) -> str:
        return re.sub("[^a-z0-9]", "", name.lower())

    for said in only:
        if not bare(said) or not any(bare(said) in bare(c.name) for c in among):
            names = [c.name for c in among]
            near = nearest(said, [*names, *(word for name in names for word in re.split("[ ,()]+", name))])
            raise UserError(f"there is no contestant {said!r}{near}; there are {'; '.join(names)}")
    wanted = [c for c in among if not only or any(bare(said) in bare(c.name) for said in only)]
    missing = {c.module for c in wanted if c.module and importlib.util.find_spec(c.module) is None}
    found = [c for c in wanted if c.module not in missing]
    if not found:
        raise UserError(f"nothing to measure: {', '.join(sorted(missing))} is not installed")
    return found, sorted(missing)


# ------------------------------------------------------------------ measuring


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
            self.optimizers.append(_fused_adamw([p for _, p in rest]))
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
        began = _settled(device)
        self.step()
        self.host.append(time.perf_counter() - began)
        self.wall.append(_settled(device) - began)

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


def _settled(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


# -------------------------------------------------------------------- showing


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """A table of rows, its heading first, without columns that are empty."""

    def number(key: str, scale: float = 1.0, digits: int = 2) -> Callable[[Row], str]:
        return lambda row: f"{row[key] * scale:,.{digits}f}" if row.get(key) is not None else ""

    columns: dict[str, Callable[[Row], str]] = {
        "optimizer": lambda row: str(row["contestant"]),
        "step ms": number("wall_ms"),
        "of the floor": lambda row: f"{row['of_floor']:.0%}" if "of_floor" in row else "",
        "device ms": number("device_ms"),
        "host ms": number("host_ms"),
        "state MiB": number("state_bytes", 2**-20, 1),
        "extra MiB": number("extra_bytes", 2**-20, 1),
        "kernels": number("kernels", digits=0),
        "launches": number("launches", digits=0),
        "note": lambda row: row.get("error") or (f"the rest: {row['rest']}" if "rest" in row else ""),
    }
    table = [list(columns), *([write(row) for write in columns.values()] for row in rows)]
    kept = [column for column in zip(*table, strict=True) if any(column[1:])]
    return [list(line) for line in zip(*kept, strict=True)]


def heading(row: Row) -> str:
    """What the rows of one table have in common."""
    what = f"{row['matrices']} matrices" if row["part"] == "matrices" else "all parameters"
    return (
        f"{row['preset']}, {what}: {row['parameters'] / 1e6:,.1f}M in {row['dtype']} on {row['device']}, "
        f"torch {row['torch']}, median of {row['steps']}"
    )


def floor_line(rows: Sequence[Row]) -> str:
    """The floors of the rows, and what they follow from."""
    floors = {row["spectral"]: f"{row['floor_ms']:.2f} ms with{'' if row['spectral'] else 'out'} a polar factor"
              for row in rows}  # fmt: skip
    rates = f"{rows[0]['bandwidth'] / 1e9:,.0f} GB/s and {rows[0]['products'] / 1e12:,.2f} TFLOP/s"
    return f"floor: {', '.join(floors.values())} (at {rates}, measured in this run)"


def figure_class(path: Path) -> Any:
    """matplotlib's, if it is there and can write such a file."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("the picture needs matplotlib: pip install matplotlib") from None
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise UserError(f"the picture is {str(path)!r}, must end in .svg, .png or .pdf")
    return Figure


#: Of bars, by whether they are ours and whether they take a polar factor.
COLOURS = {(True, True): "#c8374d", (True, False): "#eba9b2", (False, True): "#7d8a99", (False, False): "#c9d0d8"}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Bars of all that did not fail, fastest first, ours in colour, a panel for each preset and part."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in sorted((row for row in rows if "wall_ms" in row), key=lambda row: float(row["wall_ms"])):
        groups.setdefault((row["preset"], row["part"]), []).append(row)
    if not groups:
        raise UserError("nothing to draw: every optimizer failed")
    sizes = [len(group) + 2 for group in groups.values()]
    figure = figure_class(path)(figsize=(9, 0.32 * sum(sizes) + 0.5 * len(sizes)), layout="constrained")
    panels = figure.subplots(len(groups), 1, squeeze=False, height_ratios=sizes)[:, 0]
    for panel, group in zip(panels, groups.values(), strict=True):
        times = [float(row["wall_ms"]) for row in group]
        floor = max(float(row["floor_ms"]) for row in group)
        colours = [COLOURS[row["ours"], row["spectral"]] for row in group]
        bars = panel.barh([row["contestant"] for row in group], times, color=colours)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # legible across the line of the floor
        panel.bar_label(bars, [f"{value:,.3g}" for value in times], padding=4, fontsize=9, bbox=box)
        panel.axvline(floor, color="black", linestyle="--", linewidth=1)
        panel.annotate(f"floor {floor:.3g}", (floor, 1), (3, 2), xycoords=("data", "axes fraction"),
                       textcoords="offset points", fontsize=8)  # fmt: skip
        panel.invert_yaxis()
        if max(times) > 20 * min(times):
            panel.set_xscale("log")
            panel.xaxis.set_major_formatter("{x:g}")
        panel.margins(x=0.15)
        panel.set_title(heading(group[0]), fontsize=10, loc="right", pad=14)
        panel.set_xlabel("milliseconds a step (pale: without a polar factor)", fontsize=9)
        panel.spines[["top", "right"]].set_visible(False)
        for label, row in zip(panel.get_yticklabels(), group, strict=True):
            label.set_fontweight("bold" if row["ours"] else "normal")
    figure.savefig(path)
