"""One device's part of a step as launches of Triton kernels: its tables, its chunks, their order.

What changes from step to step (addresses of gradients and state, every setting of a group) lies in one table of 64-bit
words on the device, uploaded when it differs: so a changed learning rate neither compiles nor waits, and a captured
graph goes on when gradients move.

Matrices are worked on in chunks, to bound the working memory, on two streams: where one's launch leaves processors
idle, the other's may use them.
"""

from __future__ import annotations

import copy
import itertools
import math
import struct
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.direction import Adam, Spectral
from ..core.kernels import passes, products, table
from ..core.layout import Layout
from ..core.polar import COEFFICIENTS, Coefficients
from .rules import RULES

State = dict[str, Tensor]
Group = dict[str, Any]
Member = tuple[Tensor, State, Layout]
Work = Sequence[tuple[Group, list[Member]]]

_BLOCK = 4096  # elements a program, where tensors are read as flat
_TILE = 2048  # and as matrices, at a time
_LANES = 2  # streams
_GRAM = 256  # rows of the least Gram matrix that is iterated on
_MOST = 65535  # matrices a launch


@dataclass(frozen=True)
class _Flat:
    """Tensors cut into blocks: which tensor a block belongs to, and each tensor's first block and size."""

    tensor_of_block: Tensor
    first_block: Tensor
    sizes: Tensor


@dataclass(frozen=True)
class _Chunk:
    """Matrices of one shape that are orthogonalized together; `pieces` and `exponents` as passes.py reads them."""

    pieces: Tensor
    exponents: Tensor
    m: int
    n: int
    stride: int
    row_stride: int
    aligned: bool
    form: products.Form


@dataclass(frozen=True)
class _Part:
    """A group's members of one device and precision, parameters `first`, `first` + 1, … of the table; `dtype` is the
    polar factors'."""

    first: int
    kinds: dict[str, Any]
    options: dict[str, Any]
    dtype: torch.dtype
    flat: _Flat
    chunks: tuple[_Chunk, ...]


@dataclass
class _Lane:
    """Jobs done one after the other on one stream (without a chunk: Adam's), and the memory that the largest needs."""

    jobs: list[tuple[_Part, _Chunk | None]]
    cost: float = 0.0
    bytes: int = 0


class Engine:
    """The launches of one device's part of a step. `check` finds bad gradients, `update` does the rest.

    `bad` is 1 where a gradient is not finite; between the two it may be set for what was found elsewhere. `ok` is the
    verdict, for those whom the kernels do not take. `skipped` counts the steps left out, unless `update` is told that
    others do.
    """

    def __init__(self, work: Work, averages: bool, chunk_bytes: int | None, skipped: Tensor) -> None:
        self.device = work[0][1][0][0].device
        self.averages = averages
        self.skipped = skipped
        self.count = sum(len(members) for _, members in work)
        if chunk_bytes is None:
            chunk_bytes = max(1 << 24, _state_bytes(work) // 7)
        lanes = _LANES if self.device.type == "cuda" else 1
        first = 0
        self.parts = []
        for group, members in work:
            self.parts.append(_part(group, members, first, averages, chunk_bytes // lanes))
            first += len(members)
        self.lanes = _lanes(self.parts, lanes)
        self.sides: list[Any] = [torch.cuda.Stream(self.device) for _ in self.lanes[1:]]  # type: ignore[no-untyped-call]
        self.values: list[int] = []
        self.aligned = False
        self.rates: dict[int, Tensor] = {}
        self._allocate(len(work))
        self.spare: list[Tensor] = []

    def _allocate(self, groups: int) -> None:
        self.columns, self.width = table.COLUMNS.value, table.WIDTH.value
        self.settings_at = self.count * self.columns
        self.table = torch.zeros(self.settings_at + groups * self.width, dtype=torch.int64, device=self.device)
        self.coefficients = torch.zeros(self.count, self.width, dtype=torch.float32, device=self.device)
        self.bad = torch.zeros((), dtype=torch.int32, device=self.device)
        self.ok = torch.ones((), dtype=torch.float64, device=self.device)

    def _host(self) -> Tensor:
        return torch.empty(len(self.table), dtype=torch.int64, pin_memory=self.device.type == "cuda")

    def for_capture(self) -> Engine:
        """This engine with tables of its own, which nothing but the graph being captured will ever read."""
        twin = copy.copy(self)
        twin.values = []
        twin._allocate(len(self.parts))
        twin.spare = [self.spare.pop() if self.spare else self._host()]
        return twin

    def refresh(self, work: Work) -> None:
        """Brings the table up to date."""
        values: list[int] = []
        for number, (_, members) in enumerate(work):
            for p, state, _ in members:
                assert p.grad is not None
                values += _addresses(p, p.grad, state)
                values.append(number)
        together = 0
        for at, address in enumerate(values):
            together |= address if at % self.columns < 6 else 0
        self.aligned = together % 16 == 0
        self.rates = {}
        for number, (group, _) in enumerate(work):
            words, rate = self.settings(group)
            values += words
            if rate is not None:
                self.rates[number] = rate
        self.upload(values)

    def settings(self, group: Group) -> tuple[list[int], Tensor | None]:
        """A group's settings as words, and its learning rate where that is a tensor on the device."""
        lr = group["lr"]
        there = isinstance(lr, Tensor) and lr.device == self.device
        numbers = _numbers(group, 0.0 if there else float(lr))
        return list(struct.unpack(f"{self.width}q", struct.pack(f"{self.width}d", *numbers))), lr if there else None

    def upload(self, values: list[int]) -> None:
        """Copies the table to the device, in the order of its stream, unless it is there already."""
        if values == self.values:
            return
        self.values = values
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            host = self.spare[0]  # a capture cannot always have new pinned memory; every replay copies from it again
        else:
            host = self._host()
            self.spare = self.spare or [self._host()]
        self.table.copy_(host.copy_(torch.tensor(values)), non_blocking=True)

    def check(self) -> None:
        with _on(self.device):
            self.bad.zero_()
            for part in self.parts:
                flat = part.flat
                table.finite[(len(flat.tensor_of_block),)](
                    self.table,
                    flat.tensor_of_block,
                    flat.first_block,
                    flat.sizes,
                    part.first,
                    self.bad,
                    KIND=part.kinds["KIND_G"],
                    ALIGNED=self.aligned,
                    BLOCK=_BLOCK,
                )

    def update(self, *, counts: bool = True) -> None:
        with _on(self.device):
            self._update(counts)

    def _update(self, counts: bool) -> None:
        of_groups = self.table[self.settings_at :]
        for number, lr in self.rates.items():
            of_groups[number * self.width].view(torch.float64).copy_(lr.reshape(()))
        table.tick[(_cdiv(self.count, 64),)](
            self.table,
            of_groups,
            self.bad,
            self.ok,
            self.skipped,
            self.coefficients,
            self.count,
            AVERAGES=self.averages,
            COUNTS=counts,
            BLOCK=64,
        )
        memories = [torch.empty(lane.bytes, dtype=torch.uint8, device=self.device) for lane in self.lanes]
        main: Any = torch.cuda.current_stream(self.device) if self.sides else None
        for side in self.sides:
            side.wait_stream(main)
        for jobs in itertools.zip_longest(*(lane.jobs for lane in self.lanes)):
            for job, memory, stream in zip(jobs, memories, (None, *self.sides), strict=True):
                if job is not None:
                    part, chunk = job
                    with torch.cuda.stream(stream):  # None: the current one
                        self._adam(part) if chunk is None else self._spectral(part, chunk, memory.view(part.dtype))
        for side in self.sides:
            main.wait_stream(side)

    def _adam(self, part: _Part) -> None:
        flat = part.flat
        passes.adam[(len(flat.tensor_of_block),)](
            self.table,
            self.coefficients,
            flat.tensor_of_block,
            flat.first_block,
            flat.sizes,
            part.first,
            **part.kinds,
            **part.options,
            ALIGNED=self.aligned,
            BLOCK=_BLOCK,
        )

    def _spectral(self, part: _Part, chunk: _Chunk, memory: Tensor) -> None:
        batch, m, n, form = len(chunk.pieces), chunk.m, chunk.n, chunk.form
        kinds, options = part.kinds, part.options
        cols = min(256, _power_of_two(n))
        rows = max(1, _TILE // cols)
        programs = min(128, _power_of_two(_cdiv(m, rows) * _cdiv(n, cols)))
        sizes = [batch * size for size in (3 * programs, programs, m if options["ROW_NORM"] else 0, 1)]
        empty = torch.empty(sum(sizes), dtype=torch.float32, device=self.device)
        squares, sums, factors, scales = torch.split(empty, sizes)
        right = torch.empty_like(chunk.exponents)
        at = (self.table, self.coefficients, chunk.pieces)
        how = {"ALIGNED": self.aligned and chunk.aligned, "PROGRAMS": programs, "ROWS": rows, "COLS": cols}

        X = products.matrices(memory, batch, *form.sides)
        where = (m, n, chunk.stride, X.stride(0), X.stride(1))
        how_in = how | {
            "KIND": kinds["KIND_G"],
            "KIND_M": kinds["KIND_M"],
            "KIND_X": products.DTYPES[part.dtype],
            "NESTEROV": options["NESTEROV"],
            "TALL": form.tall,
        }
        if form.tall:  # written across
            how_in |= {"ROWS": 32, "COLS": 64}
        polar = options["polar"]
        passes.momentum[(programs, batch)](*at, chunk.exponents, squares, X, *where, **how_in)
        passes.settle[(min(16, programs), batch)](
            *at, chunk.exponents, right, scales, squares, X, *where, polar.safety, **how_in
        )
        P = products.polynomial(form, memory, scales, polar.steps, polar.restart)
        strides = P.stride()[:2]
        if options["ROW_NORM"] or options["UNIT"]:
            passes.rows[(programs, batch)](
                *at,
                P,
                factors,
                sums,
                m,
                n,
                *strides,
                chunk.row_stride,
                ROW_NORM=options["ROW_NORM"],
                PROGRAMS=programs,
                ROWS=rows,
                COLS=cols,
            )
        passes.move[(programs, batch)](
            *at,
            chunk.exponents,
            right,
            P,
            factors,
            sums,
            m,
            n,
            chunk.stride,
            *strides,
            _scale(options["scaling"], m, n),
            KIND=kinds["KIND"],
            HAS_RESIDUAL=kinds["HAS_RESIDUAL"],
            AVERAGES=self.averages,
            DECAY_AT=options["DECAY_AT"],
            CAUTIOUS=options["CAUTIOUS"],
            ROW_NORM=options["ROW_NORM"],
            UNIT=options["UNIT"],
            **how,
        )


def _lanes(parts: Sequence[_Part], count: int) -> list[_Lane]:
    """The parts' jobs on at most `count` lanes, dear ones first, each to the lane that has least to do."""
    jobs: list[tuple[float, _Part, _Chunk | None]] = []
    for part in parts:
        jobs += [(len(c.pieces) * c.m * c.n * min(c.m, c.n), part, c) for c in part.chunks]
        if not part.chunks:
            jobs.append((len(part.flat.tensor_of_block) * _BLOCK * 1000, part, None))
    lanes = [_Lane([]) for _ in range(min(count, len(jobs)))]
    for cost, part, chunk in sorted(jobs, key=lambda job: -job[0]):
        lane = min(lanes, key=lambda lane: lane.cost)
        lane.jobs.append((part, chunk))
        lane.cost += cost
        lane.bytes = max(lane.bytes, 0 if chunk is None else len(chunk.pieces) * chunk.form.room * part.dtype.itemsize)
    return lanes


def _scale(scaling: str | None, m: int, n: int) -> float:
    """The factor of direction._scaled but for update_rms, which is among the settings."""
    if scaling == "aspect":
        return math.sqrt(max(1.0, m / n))
    return {"rms": math.sqrt(m * n), "max-side": math.sqrt(max(m, n)), None: 1.0}[scaling]


def _part(group: Group, members: list[Member], first: int, averages: bool, chunk_bytes: int) -> _Part:
    p, state, _ = members[0]
    assert p.grad is not None
    momentum = state["momentum"].dtype if "momentum" in state else torch.float32
    kinds = {
        "KIND": products.DTYPES[p.dtype],
        "KIND_G": products.DTYPES[p.grad.dtype],
        "KIND_M": products.DTYPES[momentum],
        "HAS_RESIDUAL": "residual" in state,
    }
    direction = RULES[group["rule"]]
    decay_at = group.get("decay_at", "z") if group["weight_decay"] else None
    options: dict[str, Any] = {"DECAY_AT": {None: 0, "z": 1, "y": 2}[decay_at]}
    flat = _flat([p.numel() for p, _, _ in members], p.device)
    if isinstance(direction, Adam):
        options |= {"FIRST_MOMENT": direction.first_moment, "AVERAGES": averages}
        return _Part(first, kinds, options, torch.float32, flat, ())
    options |= {
        "NESTEROV": group["nesterov"],
        "CAUTIOUS": group.get("cautious", False),
        "ROW_NORM": group["row_norm"],
        "UNIT": group["scaling"] == "rms",
        "polar": COEFFICIENTS[group["polar"]],
        "scaling": group["scaling"],
    }
    dtype = group["polar_dtype"] or torch.float16
    chunks = _chunks(members, first, dtype, options["polar"], chunk_bytes)
    return _Part(first, kinds, options, dtype, flat, tuple(chunks))


def _chunks(
    members: list[Member], first: int, dtype: torch.dtype, polar: Coefficients, chunk_bytes: int
) -> Iterator[_Chunk]:
    """The members' matrices by shape and strides, in chunks of equal size that need at most `chunk_bytes`.

    The Gram form pays from an aspect ratio of 2 on; it needs the digits of float16, and many rows for their rounding to
    even out.
    """
    found: dict[tuple[int, int, int, int], list[tuple[int, int, int]]] = {}
    for index, (p, _, layout) in enumerate(members, first):
        for piece in layout.addresses(p.shape):
            found.setdefault((piece.m, piece.n, piece.stride, piece.row_stride), []).append(
                (index, piece.first, piece.first_row)
            )
    device = members[0][0].device
    for (m, n, stride, row_stride), pieces in found.items():
        gram = dtype != torch.bfloat16 and max(m, n) >= 2 * min(m, n) and min(m, n) >= _GRAM
        form = products.Form(m, n, gram, straight=gram and polar.goes_straight(min(m, n)))
        most = min(max(1, chunk_bytes // (form.room * dtype.itemsize)), _MOST)
        size = _cdiv(len(pieces), _cdiv(len(pieces), most))
        aligned = all(value % 16 == 0 for value in (n, stride, *(start for _, start, _ in pieces)))
        for at in range(0, len(pieces), size):
            listed = torch.tensor(pieces[at : at + size], dtype=torch.int64, device=device)
            exponents = torch.zeros(len(listed), dtype=torch.int32, device=device)
            yield _Chunk(listed, exponents, m, n, stride, row_stride, aligned, form)


def _flat(sizes: list[int], device: torch.device) -> _Flat:
    counts = torch.tensor([_cdiv(size, _BLOCK) for size in sizes])
    return _Flat(
        torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), counts).to(device),
        (counts.cumsum(0) - counts).to(device, torch.int32),
        torch.tensor(sizes, dtype=torch.int64, device=device),
    )


def _state_bytes(work: Work) -> int:
    return sum(value.nbytes for _, members in work for _, state, _ in members for value in state.values())


_STATE = ("d", "residual", "momentum", "second", "step", "weight_sum", "beta")


def _addresses(p: Tensor, grad: Tensor, state: State) -> list[int]:
    """A row of the table but for the group's number; 0 where there is no such tensor."""
    tensors = {"second": state.get("row_moment", state.get("second_moment")), **state}
    return [
        grad.data_ptr(),
        p.data_ptr(),
        *(0 if (t := tensors.get(name)) is None else t.data_ptr() for name in _STATE),
    ]


def _numbers(group: Group, lr: float) -> tuple[float, ...]:
    """A group's settings in the order of table.SETTINGS."""
    direction = RULES[group["rule"]]
    betas = group.get("betas", (0.0, 0.0))
    correction = group.get("bias_correction")
    return (
        lr,
        group["warmup_steps"],
        group["rate"],
        group.get("averaging_power", 0),
        group.get("averaging_warmup", 0),
        group["beta"] if "beta" in group else betas[0],
        group.get("beta_growth", 0),
        group.get("beta_growth_start", 2),
        group["weight_decay"],
        group["momentum"] if isinstance(direction, Spectral) else betas[0],
        group["beta2"] if "beta2" in group else betas[1],
        group.get("eps", 0),
        group["update_rms"] if group.get("scaling") in ("rms", "max-side") else 1.0,
        correction == "rate",
        correction == "moment",
        getattr(direction, "first_moment", False),
        group.get("decay_fading", 0),
        group.get("momentum_growth", 0),
        group.get("momentum_growth_start", 2),
        group.get("rate_fall", 0),
        group.get("rate_fall_start", 2),
    )


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
