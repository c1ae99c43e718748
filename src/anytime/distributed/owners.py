"""Data parallelism: parameters are whole everywhere, and owners share the work on their matrices.

"factor"     the owner computes the polar factor, all get it; everything else is done everywhere
"state"      the owner has the state and makes the step, all get its y
"gradient"   as "state", and the gradients are added up on their way to the owner: no DDP around the model
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.layout import Layout
from .exchange import ROUND_BYTES, Transform, balanced, cost, rounds
from .processes import all_gather, reduce_scatter

MODES = ("factor", "state", "gradient")


class Owners:
    """Who does what among the processes of a group."""

    def __init__(self, mode: str, group: Any) -> None:
        self.mode, self.group = mode, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.of: dict[Tensor, int] = {}
        self._load = [0.0] * self.size

    def add(self, params: Sequence[Tensor], layouts: Sequence[Layout]) -> None:
        """An owner for each of more matrices."""
        costs = [cost(layout, p.shape) for p, layout in zip(params, layouts, strict=True)]
        self.of.update(zip(params, balanced(costs, [range(self.size)] * len(costs), self._load), strict=True))

    def holds(self, p: Tensor) -> bool:
        """Whether its state is here."""
        return self.mode == "factor" or self.of.get(p, self.rank) == self.rank

    def gather_(self, params: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """Fills in the tensors that others own, each of a parameter."""
        owners = [self.of[p] for p in params]
        for together in self._alike(owners, tensors):
            self._gather([owners[i] for i in together], [tensors[i] for i in together])()

    def reduce_(self, params: Sequence[Tensor]) -> None:
        """The mean of the processes' gradients: of an owned matrix at its owner, of the rest everywhere."""
        matrices = [p.grad for p in params if p in self.of and p.grad is not None]
        owners = [self.of[p] for p in params if p in self.of and p.grad is not None]
        for together in self._alike(owners, matrices):
            self._scatter([owners[i] for i in together], [matrices[i] for i in together])
        rest = [p.grad for p in params if p not in self.of and p.grad is not None]
        for together in self._alike([0] * len(rest), rest):
            flat = torch.cat([rest[i].reshape(-1) for i in together])
            dist.all_reduce(flat, group=self.group)
            flat /= self.size
            for i, mean in zip(together, torch.split(flat, [rest[i].numel() for i in together]), strict=True):
                rest[i].copy_(mean.view(rest[i].shape))

    def whole(
        self, owners: Sequence[int], f: Transform, tensors: Sequence[Tensor], layouts: Sequence[Layout]
    ) -> list[Tensor]:
        """f of all tensors, each computed by its owner; a round travels while the next is computed."""
        into = [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in tensors]
        arriving: Callable[[], None] | None = None
        for together in self._alike(owners, tensors):
            mine = [i for i in together if owners[i] == self.rank]
            for i, result in zip(
                mine, f([tensors[i] for i in mine], [layouts[i] for i in mine]) if mine else [], strict=True
            ):
                into[i].copy_(result)
            if arriving is not None:
                arriving()
            arriving = self._gather([owners[i] for i in together], [into[i] for i in together])
        if arriving is not None:
            arriving()
        return into

    def _alike(self, owners: Sequence[int], tensors: Sequence[Tensor]) -> Iterator[list[int]]:
        """Rounds, each of one precision."""
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            which = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
            sizes = [tensors[i].numel() * tensors[i].element_size() for i in which]
            kinds = [tuple(tensors[i].shape) for i in which]
            for together in rounds([owners[i] for i in which], sizes, kinds, self.size, ROUND_BYTES):
                yield [which[i] for i in together]

    def _places(self, owners: Sequence[int], tensors: Sequence[Tensor]) -> tuple[list[int], int]:
        """Where each lies in a buffer with equal room for every owner, and that room."""
        filled = [0] * self.size
        starts = []
        for owner, tensor in zip(owners, tensors, strict=True):
            starts.append(filled[owner])
            filled[owner] += tensor.numel()
        room = max(filled)
        return [owner * room + start for owner, start in zip(owners, starts, strict=True)], room

    def _gather(self, owners: Sequence[int], tensors: Sequence[Tensor]) -> Callable[[], None]:
        """Starts it; what is returned waits for it and fills the tensors in."""
        starts, room = self._places(owners, tensors)
        mine = tensors[0].new_zeros(room)
        for owner, start, tensor in zip(owners, starts, tensors, strict=True):
            if owner == self.rank:
                mine[start - owner * room :][: tensor.numel()] = tensor.reshape(-1)
        everyones = tensors[0].new_empty(room * self.size)
        work: Any = all_gather(everyones, mine, group=self.group, async_op=True)

        def arrive() -> None:
            work.wait()
            for owner, start, tensor in zip(owners, starts, tensors, strict=True):
                if owner != self.rank:
                    tensor.copy_(everyones[start : start + tensor.numel()].view(tensor.shape))

        return arrive

    def _scatter(self, owners: Sequence[int], tensors: Sequence[Tensor]) -> None:
        starts, room = self._places(owners, tensors)
        buffer = tensors[0].new_zeros(room * self.size)
        for start, tensor in zip(starts, tensors, strict=True):
            buffer[start : start + tensor.numel()] = tensor.reshape(-1)
        mine = buffer.new_empty(room)
        reduce_scatter(mine, buffer, group=self.group)
        mine /= self.size
        for owner, start, tensor in zip(owners, starts, tensors, strict=True):
            if owner == self.rank:
                tensor.copy_(mine[start - owner * room :][: tensor.numel()].view(tensor.shape))


class Shared:
    """Members whose polar factors owners compute; as `Parts`, but everything is whole."""

    def __init__(self, owners: Owners, params: Sequence[Tensor], layouts: Sequence[Layout]) -> None:
        self.owners, self.ranks = owners, [owners.of[p] for p in params]
        self.layouts = list(layouts)
        self.sides = [layout.sides(p.shape) for p, layout in zip(params, layouts, strict=True)]

    def whole(self, f: Transform, parts: Sequence[Tensor]) -> list[Tensor]:
        return self.owners.whole(self.ranks, f, parts, self.layouts)

    def sum_(self, kind: str, values: Sequence[Sequence[Tensor]]) -> None:
        pass

    def everywhere(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return list(parts)

    def here(self, wholes: Sequence[Tensor]) -> list[Tensor]:
        return list(wholes)
