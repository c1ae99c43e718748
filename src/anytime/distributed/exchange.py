"""How whole matrices travel: everyone sends the owner of a matrix its part, and gets its part of the result back.

Owners are balanced by cost, and many matrices travel in one all-to-all: the next ones while the last are worked on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.layout import Layout
from .parts import Box, Spread, numel, slices, wrapped
from .processes import over

Transform = Callable[[list[Tensor], list[Layout]], list[Tensor]]
ROUND_BYTES = 64 << 20  # of whole matrices that an owner has at once


@dataclass(frozen=True)
class Unit:
    """A matrix (all of its split pieces) of one member: who holds which part of it, by rank in the group."""

    member: int
    index: tuple[int, ...]
    shape: tuple[int, ...]
    boxes: Mapping[int, Box]
    cost: float


def cost(layout: Layout, shape: Sequence[int]) -> float:
    """Of a polar factor, up to a factor: multiply-adds of its iteration."""
    count, m, n = layout.shape(shape)
    return count * min(m, n) ** 2 * (2.0 * max(m, n) + min(m, n))


def balanced(costs: Sequence[float], among: Sequence[Sequence[int]], load: list[float]) -> list[int]:
    """An owner for each: the heaviest first, to the candidate with the least so far; `load` goes on."""
    owners = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owners[i] = min(among[i], key=lambda rank: (load[rank], rank))
        load[owners[i]] += costs[i]
    return owners


def rounds(owners: Sequence[int], sizes: Sequence[int], kinds: Sequence[Any], size: int, most: int) -> list[list[int]]:
    """What travels together: of every owner about `most` at a time, alike ones beside each other."""
    found: list[list[int]] = []
    for owner in range(size):
        mine = sorted((i for i in range(len(owners)) if owners[i] == owner), key=lambda i: (kinds[i], i))
        at, room = 0, most
        for i in mine:
            if sizes[i] > room and room < most:
                at, room = at + 1, most
            room -= sizes[i]
            while len(found) <= at:
                found.append([])
            found[at].append(i)
    return found


class Exchange:
    """Members spread alike, as far as the group that holds them goes: their matrices to the owners and back."""

    def __init__(
        self, group: Any, members: Sequence[int], spreads: Sequence[Spread], layouts: Sequence[Layout]
    ) -> None:
        self.group, self.members = group, members
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.layouts = dict(zip(members, layouts, strict=True))
        self.boxes = {i: spread.box() for i, spread in zip(members, spreads, strict=True)}
        boxes = {spread: self._by_rank(spread) for spread in spreads}
        self.units = [
            unit
            for i, spread, layout in zip(members, spreads, layouts, strict=True)
            for unit in _units(i, spread, layout, boxes[spread])
        ]
        self.owners = balanced(
            [unit.cost for unit in self.units], [sorted(unit.boxes) for unit in self.units], [0.0] * self.size
        )
        self._plans: dict[int, list[list[int]]] = {}

    def _by_rank(self, spread: Spread) -> dict[int, Box]:
        """A group numbers its processes in their order, a mesh as it likes."""
        ranks = [dist.get_group_rank(self.group, rank) for rank in spread.holders()]
        return dict(zip(ranks, spread.boxes(), strict=True))

    def plan(self, itemsize: int) -> list[list[int]]:
        if itemsize not in self._plans:
            sizes = [math.prod(unit.shape) * itemsize for unit in self.units]
            kinds = [unit.shape for unit in self.units]
            self._plans[itemsize] = rounds(self.owners, sizes, kinds, self.size, ROUND_BYTES)
        return self._plans[itemsize]

    def __call__(self, f: Transform, parts: Mapping[int, Tensor], into: Mapping[int, Tensor]) -> None:
        """into ← f of the whole matrices that the parts are of, in parts again."""
        plan = self.plan(next(iter(parts.values())).element_size())
        coming = self._send(plan[0], parts)
        going = None
        for number, together in enumerate(plan):
            after = self._send(plan[number + 1], parts) if number + 1 < len(plan) else None
            mine = self._mine(together)
            wholes = self._receive(mine, coming)
            results = f(wholes, [self.layouts[self.units[u].member] for u in mine]) if mine else []
            if going is not None:
                self._settle(*going, into)
            going = (together, self._return(together, dict(zip(mine, results, strict=True)), parts))
            if after is not None:
                coming = after
        assert going is not None
        self._settle(*going, into)

    def _here(self, unit: Unit) -> tuple[Any, ...]:
        """Where the unit's part lies in the member's part held here."""
        box = self.boxes[unit.member]
        return tuple(i - box[d][0] for d, i in enumerate(unit.index))

    def _send(self, together: Sequence[int], parts: Mapping[int, Tensor]) -> Trip:
        pieces = [parts[unit.member][self._here(unit)] for unit in self._parted(together)]
        coming = [
            sum(numel(self.units[u].boxes[source]) for u in self._mine(together) if source in self.units[u].boxes)
            for source in range(self.size)
        ]
        return self._travel(pieces, self._by_owner(together), coming, parts)

    def _by_owner(self, together: Sequence[int]) -> list[int]:
        """Elements held here of each owner's units."""
        found = [0] * self.size
        for u in together:
            if self.rank in self.units[u].boxes:
                found[self.owners[u]] += numel(self.units[u].boxes[self.rank])
        return found

    def _mine(self, together: Sequence[int]) -> list[int]:
        return [u for u in together if self.owners[u] == self.rank]

    def _receive(self, mine: Sequence[int], trip: Trip) -> list[Tensor]:
        buffer = trip.arrived()
        wholes = {u: buffer.new_empty(self.units[u].shape) for u in mine}
        at = 0
        for source in range(self.size):
            for u in (u for u in mine if source in self.units[u].boxes):
                at = _take(buffer, at, wholes[u][slices(self.units[u].boxes[source])])
        return list(wholes.values())

    def _settle(self, together: Sequence[int], trip: Trip, into: Mapping[int, Tensor]) -> None:
        buffer = trip.arrived()
        at = 0
        for unit in self._parted(together):
            at = _take(buffer, at, into[unit.member][self._here(unit)])

    def _parted(self, together: Sequence[int]) -> list[Unit]:
        """Units of which a part is here; by owner, for that is how a round lists them."""
        return [self.units[u] for u in together if self.rank in self.units[u].boxes]

    def _return(self, together: Sequence[int], results: Mapping[int, Tensor], parts: Mapping[int, Tensor]) -> Trip:
        pieces, splits = [], [0] * self.size
        for target in range(self.size):
            for u in (u for u in results if target in self.units[u].boxes):
                pieces.append(results[u][slices(self.units[u].boxes[target])])
                splits[target] += pieces[-1].numel()
        return self._travel(pieces, splits, self._by_owner(together), parts)

    def _travel(
        self, pieces: Sequence[Tensor], splits: list[int], coming: list[int], parts: Mapping[int, Tensor]
    ) -> Trip:
        like = next(iter(parts.values()))
        buffer = torch.cat([like.new_empty(0), *(piece.reshape(-1).to(like.dtype) for piece in pieces)])
        arrived = like.new_empty(sum(coming))
        work = dist.all_to_all_single(arrived, buffer, coming, splits, group=self.group, async_op=True)
        return Trip(arrived, buffer, work)


@dataclass(frozen=True)
class Trip:
    """An all-to-all under way; what is sent must not be freed before it is over."""

    buffer: Tensor
    sent: Tensor
    work: Any

    def arrived(self) -> Tensor:
        self.work.wait()
        return self.buffer


def _take(buffer: Tensor, at: int, target: Tensor) -> int:
    """target ← the buffer from `at` on; where the next begins."""
    end = at + target.numel()
    target.copy_(buffer[at:end].view(target.shape))
    return end


def _units(member: int, spread: Spread, layout: Layout, boxes: Mapping[int, Box]) -> Iterator[Unit]:
    leading = 0 if layout.flat else len(spread.shape) - 2
    shape = spread.shape[leading:]
    for index in product(*(range(side) for side in spread.shape[:leading])):
        held = {
            rank: box[leading:]
            for rank, box in boxes.items()
            if numel(box) and all(first <= i < end for i, (first, end) in zip(index, box, strict=False))
        }
        yield Unit(member, index, shape, held, cost(layout, shape))


class Parts:
    """Sharded members of a step: what a direction does with matrices of which only a part is here."""

    def __init__(self, spreads: Sequence[Spread], layouts: Sequence[Layout]) -> None:
        self.spreads = list(spreads)
        self.wholes = list(layouts)
        self.layouts = [spread.layout_here(layout) for spread, layout in zip(spreads, layouts, strict=True)]
        self.sides = [layout.sides(spread.shape) for spread, layout in zip(spreads, layouts, strict=True)]
        self._sums: dict[str, dict[int, Any]] = {"row": {}, "column": {}}
        together: dict[int, tuple[Any, list[int]]] = {}
        self._whole_here = []
        for i, (spread, layout) in enumerate(zip(spreads, layouts, strict=True)):
            dims: dict[str, list[int]] = {"row": [], "column": [], "lead": []}
            for number, dim in spread.sharded():
                dims[layout.kind(dim, len(spread.shape))].append(number)
            for kind in ("row", "column"):
                if dims[kind]:
                    self._sums[kind][i] = over(spread.mesh, dims[kind])
            if not dims["row"] and not dims["column"]:
                self._whole_here.append(i)
                continue
            group = over(spread.mesh, [number for number, _ in spread.sharded()])
            together.setdefault(id(group), (group, []))[1].append(i)
        self.exchanges = [
            Exchange(group, members, [spreads[i] for i in members], [layouts[i] for i in members])
            for group, members in together.values()
        ]

    def whole(self, f: Transform, parts: Sequence[Tensor]) -> list[Tensor]:
        """f of the whole matrices, in the parts held here."""
        into = [torch.empty(part.shape, dtype=part.dtype, device=part.device) for part in parts]
        for exchange in self.exchanges:
            exchange(f, {i: parts[i] for i in exchange.members}, {i: into[i] for i in exchange.members})
        here = [i for i in self._whole_here if parts[i].numel()]
        for i, result in zip(here, f([parts[i] for i in here], [self.layouts[i] for i in here]), strict=True):
            into[i] = result
        return into

    def sum_(self, kind: str, values: Sequence[Sequence[Tensor]]) -> None:
        """Adds up, in place, what those have who hold other rows (or columns) of the same matrices; values[i] are of
        member i."""
        together: dict[int, tuple[Any, list[Tensor]]] = {}
        for i, group in self._sums[kind].items():
            together.setdefault(id(group), (group, []))[1].extend(values[i])
        for group, tensors in together.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            dist.all_reduce(flat, group=group)
            for tensor, total in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(total.view(tensor.shape))

    def everywhere(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The whole tensors on every process; for what is not made for speed."""
        return [
            wrapped(part, spread.mesh, spread.placements, spread.shape).full_tensor()  # type: ignore[attr-defined]
            for part, spread in zip(parts, self.spreads, strict=True)
        ]

    def here(self, wholes: Sequence[Tensor]) -> list[Tensor]:
        return [whole[slices(spread.box())] for whole, spread in zip(wholes, self.spreads, strict=True)]
