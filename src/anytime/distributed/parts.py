"""Tensors that lie in parts on several processes (DTensors): which part is here, and new ones spread alike.

Everything that goes element by element is done on the part held here, in plain tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.layout import Layout

Box = tuple[tuple[int, int], ...]  # first and behind the last index, a dimension at a time


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor; a replicated one counts."""
    if type(tensor) in (Tensor, torch.nn.Parameter) or not dist.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """The part held here, in the same memory; a plain tensor itself."""
    part = tensor.detach()
    return part.to_local() if is_sharded(part) else part  # type: ignore[attr-defined]


def part_like(part: Tensor, like: Tensor) -> Tensor:
    """A part as a tensor that is spread as `like` is."""
    if not is_sharded(like):
        return part
    return wrapped(part, like.device_mesh, like.placements, like.shape)  # type: ignore[attr-defined]


def wrapped(part: Tensor, mesh: Any, placements: Sequence[Any], shape: Sequence[int]) -> Tensor:
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


@dataclass(frozen=True)
class Spread:
    """How a tensor of a shape lies on a mesh of processes."""

    shape: tuple[int, ...]
    mesh: Any
    placements: tuple[Any, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Spread:
        found = cls(tuple(tensor.shape), tensor.device_mesh, tuple(tensor.placements))  # type: ignore[attr-defined]
        if any(placement.is_partial() for placement in found.placements):
            raise ValueError(f"a parameter of shape {found.shape} is spread as {found.placements}: parts of a sum")
        return found

    def __hash__(self) -> int:
        return hash((self.shape, self.placements))

    def sharded(self) -> Iterator[tuple[int, int]]:
        """Dimensions of the mesh that cut the tensor, each with the tensor's dimension it cuts."""
        for number, placement in enumerate(self.placements):
            if not placement.is_replicate() and self.mesh.size(number) > 1:
                yield number, placement.dim

    def box(self, coordinate: Sequence[int] | None = None) -> Box:
        """The part at a coordinate of the mesh, this process's by default."""
        from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as compute

        at = list(self.mesh.get_coordinate() if coordinate is None else coordinate)
        sizes, offsets = compute(self.shape, tuple(self.mesh.shape), at, self.placements)
        return tuple((first, first + size) for first, size in zip(offsets, sizes, strict=True))

    def boxes(self) -> list[Box]:
        """The parts of those who hold the tensor together, in the order of `holders`."""
        dims = [number for number, _ in self.sharded()]
        found = []
        for at in product(*(range(self.mesh.size(number)) for number in dims)):
            coordinate = list(self.mesh.get_coordinate())
            for number, place in zip(dims, at, strict=True):
                coordinate[number] = place
            found.append(self.box(coordinate))
        if not _tile(found, self.shape):
            raise ValueError(f"a parameter of shape {self.shape} spread as {self.placements} does not lie in blocks")
        return found

    def holders(self) -> list[int]:
        """The processes that hold the tensor together, as all processes are numbered, in the mesh's order."""
        return ranks_over(self.mesh, [number for number, _ in self.sharded()])

    def rows(self, layout: Layout) -> tuple[Any, ...]:
        """Placements of a statistic a row: whole where columns are cut."""
        from torch.distributed.tensor import Replicate

        ndim = len(self.shape)
        return tuple(
            placement if not placement.is_replicate() and layout.kind(placement.dim, ndim) != "column" else Replicate()
            for placement in self.placements
        )

    def layout_here(self, layout: Layout) -> Layout:
        """The layout of the part held here: of each split piece as much as lies in it."""
        if not layout.sizes:
            return layout
        box = self.box()
        if layout.flat and layout.dim == 1:
            if any(layout.kind(dim, len(self.shape)) == "column" for _, dim in self.sharded()):
                raise ValueError(f"a parameter of shape {self.shape} read as {layout} cannot be cut along its columns")
            return layout
        first, end = box[0] if layout.flat else box[-2 + layout.dim]
        sizes, start = [], 0
        for size in layout.sizes:
            sizes.append(max(0, min(end, start + size) - max(first, start)))
            start += size
        return Layout(layout.flat, layout.dim, tuple(sizes))


def ranks_over(mesh: Any, dims: Sequence[int]) -> list[int]:
    """Those who differ from this process in these dimensions of the mesh alone, in the mesh's order."""
    where = [slice(None) if number in dims else at for number, at in enumerate(mesh.get_coordinate())]
    found: list[int] = mesh.mesh[tuple(where)].flatten().tolist()
    return found


#: State that is whole on every process, whatever shape it has.
WHOLE = ("step", "weight_sum", "beta", "left", "right")


def zeros(name: str, shape: Sequence[int], dtype: torch.dtype, p: Tensor, layout: Layout) -> Tensor:
    """A new buffer for a parameter: spread as it is, a statistic a row by its rows, 0-dim and some others plain."""
    if name == "row_moment" and is_sharded(p):
        return _zero_rows(shape, dtype, p, layout)
    if len(shape) and name not in WHOLE and tuple(shape) == tuple(p.shape):
        return torch.zeros_like(p, dtype=dtype, requires_grad=False)
    return torch.zeros(shape, dtype=dtype, device=p.device)


def _zero_rows(shape: Sequence[int], dtype: torch.dtype, p: Tensor, layout: Layout) -> Tensor:
    spread = Spread.of(p)
    rows = Spread(tuple(shape), spread.mesh, spread.rows(layout))
    part = torch.zeros([end - first for first, end in rows.box()], dtype=dtype, device=p.device)
    return wrapped(part, rows.mesh, rows.placements, shape)


def part_of(value: Tensor, like: Tensor) -> Tensor:
    """The part of a value that belongs to the part of `like` held here, whichever way either is spread."""
    if is_sharded(value):
        if is_sharded(like) and (like.device_mesh, like.placements) == (value.device_mesh, value.placements):  # type: ignore[attr-defined]
            return local(value)
        value = value.full_tensor()  # type: ignore[attr-defined]
    if is_sharded(like) and value.shape == like.shape:
        return value[slices(Spread.of(like).box())]
    return value


def fill_(target: Tensor, value: Tensor) -> Tensor:
    """target ← value. A whole value is cut, parts are put together where needed."""
    local(target).copy_(part_of(value, target))
    return target


def numel(box: Box) -> int:
    return math.prod(end - first for first, end in box)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(first, end) for first, end in box)


def _tile(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """Whether the boxes cover the shape and, a dimension at a time, either coincide or keep apart."""
    boxes = [box for box in boxes if numel(box)]
    for dim in range(len(shape)):
        intervals = sorted({box[dim] for box in boxes})
        if any(end > first for (_, end), (first, _) in pairwise(intervals)):
            return False
    return sum(map(numel, boxes)) == math.prod(shape)
