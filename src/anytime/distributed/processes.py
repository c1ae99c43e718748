"""Groups of processes, and what they agree on before they send each other anything."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .parts import ranks_over

#: By their newer names, where they have them.
all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor


class _Made:
    """Groups by who is in them and how they speak. All optimizers of a process share them, for a group holds threads
    and sockets to its end; when there is another world, there are none yet."""

    def __init__(self) -> None:
        self.world: Any = None
        self.groups: dict[tuple[tuple[int, ...], str | None], Any] = {}

    def get(self, ranks: tuple[int, ...], backend: str | None) -> Any:
        if self.world is not dist.group.WORLD:
            self.world, self.groups = dist.group.WORLD, {}
        key = ranks, backend
        if key not in self.groups:
            self.groups[key] = dist.new_group(list(ranks), backend=backend, use_local_synchronization=True)
        return self.groups[key]


_made = _Made()


def over(mesh: Any, dims: Sequence[int]) -> Any:
    """The group of those who differ from this process in these dimensions of the mesh alone."""
    if len(dims) == 1:
        return mesh.get_group(dims[0])
    return among(ranks_over(mesh, dims))


def among(ranks: Iterable[int], *, backend: str | None = None) -> Any:
    """The group of these processes, made when it is first asked for."""
    ranks = tuple(sorted(ranks))
    if backend is None and ranks == tuple(range(dist.get_world_size())):
        return dist.group.WORLD
    return _made.get(ranks, backend)


def control(ranks: tuple[int, ...]) -> Any:
    """A group whose messages go between hosts, past the devices and their queues."""
    if ranks == tuple(range(dist.get_world_size())):
        try:
            dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
            return dist.group.WORLD
        except RuntimeError:  # made for devices alone
            pass
    return among(ranks, backend="gloo")


#: Numbers by which a process says what it is about to do.
MARKS = 3


def agree(text: str, lines: Callable[[], Sequence[str]], group: Any, kin: Sequence[int] = ()) -> None:
    """An error on every process of the group, unless all of the same kin come with the same text, and nobody with an
    error alone; `lines` say what is behind it."""
    mine = [_number(text), _number(repr(kin)), int(text == "error")]
    found = torch.zeros(dist.get_world_size(group) * MARKS, dtype=torch.int64)
    all_gather(found, torch.tensor(mine), group=group)
    texts, kins, errors = found.view(-1, MARKS).T.tolist()
    if len({*zip(texts, kins, strict=True)}) == len({*kins}) and len({*errors}) == 1:
        return
    said = [text.split("\n") for text in _everyones("\n".join(lines()), group)]
    raise RuntimeError(_differences(said, kins, group))


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")


def _everyones(text: str, group: Any) -> list[str]:
    data = text.encode()
    lengths = torch.zeros(dist.get_world_size(group), dtype=torch.int64)
    all_gather(lengths, torch.tensor([len(data)]), group=group)
    longest = max(1, int(lengths.max()))
    mine = torch.zeros(longest, dtype=torch.uint8)
    mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
    everyones = torch.zeros(len(lengths) * longest, dtype=torch.uint8)
    all_gather(everyones, mine, group=group)
    rows = zip(everyones.view(len(lengths), longest), lengths.tolist(), strict=True)
    return [bytes(row[:length].tolist()).decode() for row, length in rows]


def _differences(lines: Sequence[Sequence[str]], kins: Sequence[int], group: Any) -> str:
    ranks = dist.get_process_group_ranks(group)
    errors = [f"process {rank}: {of[0][6:]}" for rank, of in zip(ranks, lines, strict=True) if of[0][:6] == "error "]
    if errors:
        return "; ".join(errors)
    firsts: dict[int, tuple[int, Sequence[str]]] = {}
    for rank, kin, other in zip(ranks, kins, lines, strict=True):
        one, first = firsts.setdefault(kin, (rank, other))
        if len(other) != len(first):
            return (
                f"the processes do not train the same parameters: process {one} has {len(first)} of them, "
                f"process {rank} {len(other)}"
            )
        for a, b in zip(first, other, strict=True):
            if a != b:
                return f"the processes differ: process {one} has {a}; process {rank} has {b}"
    return "the processes differ in their parameters or gradients"
