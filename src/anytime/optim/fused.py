"""Which parameters the Triton kernels take, and what the host does before it launches them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.direction import Adam, Spectral
from ..core.layout import Layout
from ..core.polar import COEFFICIENTS
from .rules import RULES

if TYPE_CHECKING:  # it needs Triton
    from .engine import Engine

State = dict[str, Tensor]
Group = dict[str, Any]
Member = tuple[Tensor, State, Layout]
Work = Sequence[tuple[Group, list[Member]]]

_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_SCALARS = ("step", "weight_sum", "beta")
_POLAR = (None, torch.float16, torch.bfloat16)


@cache
def available(device: torch.device) -> bool:
    """Whether kernels run there: NVIDIA's GPUs since Ampere with Triton, which torch brings along on Linux."""
    if device.type != "cuda" or torch.version.hip is not None or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def takes(group: Group, member: Member) -> bool:
    """Whether the kernels do this parameter's update: of Adam's and the polynomial spectral rules, on plain dense
    tensors of at most 32 bits, the rate not from the loss. Everything else goes the slow way, which is the definition.
    """
    p, state, _ = member
    grad = p.grad
    if group["rule"] == "sf-plus":
        return False
    if grad is None or not available(p.device) or type(grad) is not Tensor or type(p.data) is not Tensor:
        return False
    if p.dtype not in _NARROW or grad.dtype not in _NARROW or grad.stride() != p.stride() or p.numel() >= 2**31:
        return False
    for name, value in state.items():
        kinds = (torch.float64,) if name in _SCALARS else _NARROW if name == "momentum" else (torch.float32,)
        if value.device != p.device or value.dtype not in kinds:
            return False
        if value.shape == p.shape and value.stride() != p.stride():
            return False
    direction = RULES[group["rule"]]
    if isinstance(direction, Adam):
        return bool(torch.ops.aten.is_non_overlapping_and_dense(p))
    return (
        isinstance(direction, Spectral)
        and not direction.first_gradient
        and p.is_contiguous()
        and group["polar"] in COEFFICIENTS
        and group["polar_dtype"] in _POLAR
        and group.get("projection") is None
    )


def split(work: Work) -> tuple[dict[torch.device, list[tuple[Group, list[Member]]]], list[tuple[Group, list[Member]]]]:
    """What the kernels take, by device, each entry of one precision; and the rest."""
    taken: dict[torch.device, dict[tuple[int, torch.dtype], tuple[Group, list[Member]]]] = {}
    rest = []
    compiling = torch.compiler.is_compiling()
    for number, (group, members) in enumerate(work):
        others = []
        for member in members:
            p = member[0]
            if not compiling and takes(group, member):
                assert p.grad is not None
                by_kind = taken.setdefault(p.device, {})
                by_kind.setdefault((number, p.grad.dtype), (group, []))[1].append(member)
            else:
                others.append(member)
        if others:
            rest.append((group, others))
    return {device: list(by_kind.values()) for device, by_kind in taken.items()}, rest


_CHOICES = ("rule", "decay_at", "cautious", "row_norm", "scaling", "nesterov", "polar", "polar_dtype", "momentum_dtype")
Choices = tuple[Any, ...]


def _choices(group: Group) -> Choices:
    """Options that choose between kernels, rather than being read by them."""
    get = group.get
    return (get("weight_decay") == 0, *(get(key) for key in _CHOICES))


def _kind(member: Member) -> tuple[Any, ...]:
    p, state, layout = member
    assert p.grad is not None
    momentum = state["momentum"].dtype if "momentum" in state else None
    return id(p), p.device, p.shape, layout, p.dtype, p.grad.dtype, momentum


def signature(work: Work, chunk_bytes: int | None) -> tuple[Any, ...]:
    """What an engine is built for: the parameters, their shapes and precisions, and the choices of their groups."""
    return (
        chunk_bytes,
        *((*_choices(group), *map(_kind, members)) for group, members in work),
    )


@dataclass
class _Seen:
    """The last step's engine and what its table was made of, as lists that are compared whole: this is what the host
    does in most steps."""

    engine: Engine
    params: list[int]
    with_grad: list[bool]
    kinds: list[torch.dtype]
    shapes: list[torch.Size]
    weights: list[int]
    states: list[int]
    choices: list[Choices]
    rows: list[int]
    numbers: list[int]
    grads: list[int]
    settings: list[list[int]]


def _addresses(states: Mapping[Tensor, State]) -> list[int]:
    return list(map(Tensor.data_ptr, chain.from_iterable(map(dict.values, states.values()))))


class Engines:
    """An optimizer's engines by what they were built for, the graphs that replay them, and the last step's."""

    def __init__(self) -> None:
        self._engines: dict[tuple[Any, ...], Engine] = {}
        self._graphs: dict[tuple[Any, ...], torch.cuda.CUDAGraph | None] = {}
        self._captured: list[Engine] = []
        self._last: _Seen | None = None

    def get(self, work: Work, averages: bool, chunk_bytes: int | None, skipped: Tensor) -> Engine:
        """The engine for this work, its table up to date; `skipped` is the same tensor in every call for a device."""
        self._last = None
        key = signature(work, chunk_bytes)
        engine = self._engines.get(key)
        if _capturing(work[0][1][0][0].device):
            if engine is None:
                raise RuntimeError("take one step() before capturing it in a CUDA graph: kernels are compiled there")
            engine = engine.for_capture()
            self._captured.append(engine)  # its memory belongs to the graph
        elif engine is None:
            if len(self._engines) >= 16:  # parameters that come and go
                self._engines.clear()
                self._graphs.clear()
            from .engine import Engine

            engine = self._engines[key] = Engine(work, averages, chunk_bytes, skipped)
        engine.refresh(work)
        return engine

    def run(self, engine: Engine, *, graph: bool) -> None:
        """The whole step of an engine; with `graph`, recorded at the second and replayed from there on."""
        key = (id(engine), engine.aligned, *(rate.data_ptr() for rate in engine.rates.values()))
        if not graph or engine.device.type != "cuda" or _capturing(engine.device) or key not in self._graphs:
            self._graphs.setdefault(key)
            engine.check()
            engine.update()
            return
        recorded = self._graphs[key]
        if recorded is None:
            recorded = self._graphs[key] = torch.cuda.CUDAGraph()
            with torch.cuda.device(engine.device), torch.cuda.graph(recorded, capture_error_mode="thread_local"):
                engine.check()
                engine.update()
        recorded.replay()

    def remember(self, engine: Engine, work: Work, groups: Sequence[Group], states: Mapping[Tensor, State]) -> None:
        """Keeps what `again` compares with."""
        params = [p for group in groups for p in group["params"]]
        row = {p: at * engine.columns for at, (p, _, _) in enumerate(m for _, members in work for m in members)}
        taken = [p for p in params if p in row]
        numbers = {id(group): number for number, (group, _) in enumerate(work)}
        if _capturing(engine.device) or len(numbers) < len(work) or not all(p.is_contiguous() for p in taken):
            return
        self._last = _Seen(
            engine,
            params=list(map(id, params)),
            with_grad=[p.grad is not None for p in params],
            kinds=[p.grad.dtype for p in taken if p.grad is not None],
            shapes=[p.shape for p in taken],
            weights=list(map(Tensor.data_ptr, taken)),
            states=_addresses(states),
            choices=[_choices(group) for group in groups],
            rows=[row[p] for p in taken],
            numbers=[numbers.get(id(group), -1) for group in groups],
            grads=[],
            settings=[],
        )

    def again(self, groups: Sequence[Group], states: Mapping[Tensor, State]) -> Engine | None:
        """The last step's engine, its table up to date, if nothing but gradients' addresses and settings has changed
        since; None if it takes a closer look."""
        last = self._last
        if last is None or torch.compiler.is_compiling() or _capturing(last.engine.device):
            return None
        engine = last.engine
        params = [p for group in groups for p in group["params"]]
        grads = [p.grad for p in params]
        live = [grad for grad in grads if grad is not None]
        moving = [p for p, grad in zip(params, grads, strict=True) if grad is not None]
        if (
            list(map(id, params)) != last.params
            or [grad is not None for grad in grads] != last.with_grad
            or [grad.dtype for grad in live] != last.kinds
            or not all(map(Tensor.is_contiguous, live))
            or [p.shape for p in moving] != last.shapes
            or not all(map(Tensor.is_contiguous, moving))
            or list(map(Tensor.data_ptr, moving)) != last.weights
            or _addresses(states) != last.states
            or [_choices(group) for group in groups] != last.choices
        ):
            return None
        addresses = list(map(Tensor.data_ptr, live))
        settings = [engine.settings(group) for group in groups]
        words = [words for words, _ in settings]
        for number, (_, rate) in zip(last.numbers, settings, strict=True):
            if number >= 0 and rate is not engine.rates.get(number):
                return None
        if addresses == last.grads and words == last.settings:
            return engine
        values = engine.values.copy()
        for at, address in zip(last.rows, addresses, strict=True):
            if engine.aligned and address % 16:
                return None
            values[at] = address
        for number, of_group in zip(last.numbers, words, strict=True):
            if number >= 0:
                start = engine.settings_at + number * engine.width
                values[start : start + engine.width] = of_group
        engine.upload(values)
        last.grads, last.settings = addresses, words
        return engine


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
