"""Parts of tensors in safetensors files, and the index that says which is where. It needs no process group."""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

INDEX = "index.json"
FORMAT = 1
_FLOATS = "float64:F64 float32:F32 float16:F16 bfloat16:BF16 float8_e4m3fn:F8_E4M3 float8_e5m2:F8_E5M2"
_OTHERS = "int64:I64 int32:I32 int16:I16 int8:I8 uint8:U8 bool:BOOL"
_CODES = dict(pair.split(":") for pair in f"{_FLOATS} {_OTHERS}".split())
#: What can be stored, with the name that safetensors has for it.
DTYPES: dict[torch.dtype, str] = {getattr(torch, name): code for name, code in _CODES.items()}

Shape = tuple[int, ...]
Folder = str | os.PathLike[str]
T = TypeVar("T")


# ------------------------------------------------------------------------ regions


@dataclass(frozen=True, eq=False)
class Region:
    """A box of a tensor: where it begins in the whole, and what is there. A plain tensor is one box."""

    name: str
    shape: Shape  # of the whole
    offset: Shape
    tensor: Tensor


def regions_of(name: str, tensor: Tensor, *, replicas: bool = False, plain: bool = True) -> list[Region]:
    """What this process holds of a tensor, in the same memory: one region, or none.

    Along a replicated dimension of a mesh only the first process has it, so that each part is written once; with
    `replicas` all have, as reading needs. A plain tensor is the same everywhere: `plain` says whether it counts here.
    """
    if not isinstance(tensor, DTensor):
        return [Region(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor.detach())] if plain else []
    mesh, placements, shape = tensor.device_mesh, tensor.placements, tuple(tensor.shape)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []
    for dim, placement in enumerate(placements):
        if placement.is_partial():
            raise ValueError(f"{name} is a sum over processes that has not been taken yet: {placements}")
        within = [mesh.size(d) for d in range(dim + 1, mesh.ndim) if _cuts(placements[d]) == _cuts(placement)]
        if mesh.size(dim) > 1 and getattr(placement, "split_factor", 1) not in (1, math.prod(within)):
            raise ValueError(f"what a process holds of {name} is not in one piece: {placements}")
    sizes, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    local: Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    if tuple(sizes) != tuple(local.shape):
        raise ValueError(
            f"this process has {tuple(local.shape)} of {name} {shape}, and by {placements} should have {tuple(sizes)}: "
            "a dimension that is cut twice has to be cut evenly"
        )
    first = not any(at for at, placement in zip(coordinate, placements, strict=True) if _cuts(placement) is None)
    empty = 0 in sizes and (0 not in shape or any(coordinate))  # of a tensor without elements one keeps the name
    return [Region(name, shape, tuple(offset), local)] if (first or replicas) and not empty else []


def _cuts(placement: Any) -> int | None:
    """The dimension along which a placement cuts."""
    return getattr(placement, "dim", None)


def _overlap(offset: Shape, sizes: Shape, other: Shape, other_sizes: Shape) -> tuple[tuple[int, int], ...] | None:
    """Start and stop of what two boxes have in common, along each dimension."""
    ends = zip(offset, sizes, other, other_sizes, strict=True)
    box = tuple((max(a, b), min(a + size, b + other_size)) for a, size, b, other_size in ends)
    return box if all(start < stop for start, stop in box) else None


# ------------------------------------------------------------------------ the index


@dataclass(frozen=True)
class Part:
    """A box of a tensor in a file."""

    file: str
    key: str
    offset: Shape
    sizes: Shape


@dataclass(frozen=True)
class Entry:
    """A tensor and where its parts are."""

    dtype: torch.dtype
    shape: Shape
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Index:
    """What a folder holds, or what one process adds to it."""

    tensors: Mapping[str, Entry] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    paths: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)  # the keys of nested dicts in a name

    @classmethod
    def merged(cls, indexes: Iterable[Index]) -> Index:
        """Those of several processes as one; of a part that more than one has, the first is taken."""
        firsts: dict[str, Entry] = {}
        parts: dict[str, dict[tuple[Shape, Shape], Part]] = {}
        values: dict[str, Any] = {}
        paths: dict[str, tuple[str | int, ...]] = {}
        for index in indexes:
            for name, entry in index.tensors.items():
                first = firsts.setdefault(name, entry)
                if (first.dtype, first.shape) != (entry.dtype, entry.shape):
                    raise ValueError(f"{name} is {_said(first)} for one process, {_said(entry)} for another")
                held = parts.setdefault(name, {})
                for part in entry.parts:
                    held.setdefault((part.offset, part.sizes), part)
            values |= index.values
            paths |= index.paths
        tensors = {name: replace(first, parts=tuple(parts[name].values())) for name, first in firsts.items()}
        return cls(tensors, values, paths)

    def check(self, folder: Folder | None = None) -> None:
        """That the parts make up each tensor, exactly once, and in a given folder that their files are there."""
        files = {part.file for entry in self.tensors.values() for part in entry.parts}
        absent = {file for file in files if folder is not None and not (Path(folder) / file).is_file()}
        for name, entry in self.tensors.items():
            for part in entry.parts:
                if part.file in absent:
                    raise ValueError(f"{name} is in {part.file}, which is missing from {folder}")
                dims = {len(entry.shape), len(part.offset), len(part.sizes)}
                if len(dims) > 1 or any(map(lambda o, s, n: o + s > n, part.offset, part.sizes, entry.shape)):
                    raise ValueError(f"{name} {entry.shape} has no part {part.sizes} at {part.offset} ({part.file})")
            _check_overlaps(name, entry)
            held, needed = sum(math.prod(part.sizes) for part in entry.parts), math.prod(entry.shape)
            if held != needed:
                where = ", ".join(sorted({part.file for part in entry.parts})) or "no file"
                raise ValueError(f"{name} is not whole: {held} of its {needed} elements are in {where}")

    def write(self, folder: Folder) -> None:
        """As index.json, onto the disk itself."""
        tensors = {
            name: {"dtype": str(e.dtype).removeprefix("torch."), "shape": e.shape, "parts": [vars(p) for p in e.parts]}
            for name, e in self.tensors.items()
        }
        values = {name: to_json(name, value) for name, value in self.values.items()}
        text = json.dumps({"format": FORMAT, "tensors": tensors, "values": values, "paths": dict(self.paths)})
        path = Path(folder) / INDEX
        path.write_text(text, encoding="utf-8")
        sync(path)

    @classmethod
    def read(cls, folder: Folder) -> Index:
        """From index.json, and checked."""
        path = Path(folder) / INDEX
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            newer = saved["format"] > FORMAT
            index = cls() if newer else cls._parsed(saved)
        except FileNotFoundError:
            raise ValueError(f"{folder} is no checkpoint: it has no {INDEX}") from None
        except (KeyError, TypeError, AttributeError, ValueError) as wrong:
            raise ValueError(f"{path} is damaged: {wrong!r}") from wrong
        if newer:
            said = f"{folder} has format {saved['format']}"
            raise ValueError(f"{said}, this version reads up to {FORMAT}: upgrade anytime")
        index.check(folder)
        return index

    @classmethod
    def _parsed(cls, saved: Any) -> Index:
        tensors = {}
        dtypes = {name: getattr(torch, name) for name in _CODES}
        for name, entry in saved["tensors"].items():
            parts = [Part(p["file"], p["key"], _shape(p["offset"]), _shape(p["sizes"])) for p in entry["parts"]]
            for part in parts:
                if not isinstance(part.key, str) or Path(part.file).name != part.file:
                    raise ValueError(f"{name} is said to be {part.key!r} in {part.file!r}")
            tensors[name] = Entry(dtypes[entry["dtype"]], _shape(entry["shape"]), tuple(parts))
        values = {name: from_json(value) for name, value in saved["values"].items()}
        return cls(tensors, values, {name: tuple(path) for name, path in saved["paths"].items()})


def _shape(saved: Any) -> Shape:
    if not isinstance(saved, list) or any(type(size) is not int or size < 0 for size in saved):
        raise ValueError(f"{saved!r} is no list of sizes")
    return tuple(saved)


def _said(entry: Entry) -> str:
    return f"{entry.dtype} {entry.shape}"


def _check_overlaps(name: str, entry: Entry) -> None:
    """Along the dimension that is cut most often: there a part meets only the few that begin before it ends."""
    parts = [part for part in entry.parts if 0 not in part.sizes]
    along = max(range(len(entry.shape)), key=lambda dim: len({part.offset[dim] for part in parts}), default=None)
    if along is None:
        return
    parts.sort(key=lambda part: part.offset[along])
    for number, part in enumerate(parts):
        for other in itertools.islice(parts, number + 1, None):
            if other.offset[along] >= part.offset[along] + part.sizes[along]:
                break
            if _overlap(part.offset, part.sizes, other.offset, other.sizes) is not None:
                both = f"{part.file} at {part.offset} and {other.file} at {other.offset}"
                raise ValueError(f"parts of {name} overlap: {both}")


def to_json(key: str, value: Any) -> Any:
    """The value in JSON's terms, with marks for tuples and for floats that are no numbers. `key` is for the error."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, list | tuple):
        items = [to_json(f"{key}[{number}]", item) for number, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, dict) and all(isinstance(k, str) and not k.startswith("$") for k in value):
        return {k: to_json(f"{key}.{k}", item) for k, item in value.items()}
    raise ValueError(f"{key} is of a type that JSON cannot hold, {type(value).__name__}: {value!r:.60}")


def from_json(value: Any) -> Any:
    """What to_json was given."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "$float" in value:
        return float(value["$float"])
    if "$tuple" in value:
        return tuple(from_json(item) for item in value["$tuple"])
    return {key: from_json(item) for key, item in value.items()}


# ------------------------------------------------------------------------ files


def describe(file: str, regions: Sequence[Region]) -> Index:
    """What write_regions returns, without writing: for processes that agree on an index first and write later."""
    entries = []
    for key, region in zip(_keys(regions), regions, strict=True):
        tensor, part = region.tensor, Part(file, key, region.offset, tuple(region.tensor.shape))
        if tensor.dtype not in DTYPES or tensor.layout != torch.strided:
            raise ValueError(f"{region.name} is {tensor.dtype} ({tensor.layout}), which cannot be stored")
        entries.append(Index({region.name: Entry(tensor.dtype, region.shape, (part,))}))
    return Index.merged(entries)


def write_regions(path: Path, regions: Sequence[Region]) -> Index:
    """Writes a safetensors file, onto the disk itself, from whatever devices; without regions there is no file."""
    index = describe(path.name, regions)
    if not regions:
        return index
    tensors: dict[str, Tensor] = {}
    seen = set()
    for key, region in zip(_keys(regions), regions, strict=True):
        tensor = region.tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        tensors[key] = tensor.clone() if storage in seen else tensor  # the library refuses memory that is shared
        seen.add(storage)
    path.touch()
    mode = path.stat().st_mode  # that of any new file; the library writes for its owner alone
    try:
        save_file(tensors, path)
    except SafetensorError as wrong:
        raise OSError(f"{path} could not be written: {wrong}") from wrong
    path.chmod(mode)
    sync(path)
    return index


def _keys(regions: Iterable[Region]) -> list[str]:
    """Each region's name in its file: the tensor's own where it is whole."""
    keys = ["__metadata__"]  # the format keeps this name for itself
    taken = set(keys)
    for region in regions:
        whole = tuple(region.tensor.shape) == region.shape
        key = region.name if whole else f"{region.name}@{','.join(map(str, region.offset))}"
        while key in taken:
            key += "'"
        keys.append(key)
        taken.add(key)
    return keys[1:]


@dataclass(frozen=True)
class Read(Generic[T]):
    """A piece of a part, and what it is for."""

    name: str
    dtype: torch.dtype
    part: Part
    piece: tuple[slice, ...]
    target: T


def read_into(folder: Folder, index: Index, targets: Mapping[str, Tensor] | Iterable[Region]) -> None:
    """Fills tensors (of DTensors the part held here) or regions, reading no more than they need.

    Names, shapes, dtypes and the files' headers are checked first; only then does anything change.
    """
    if isinstance(targets, Mapping):
        tensors = targets.items()
        targets = [region for name, tensor in tensors for region in regions_of(name, tensor, replicas=True)]
    reads = []
    for region in targets:
        name, here = region.name, Entry(region.tensor.dtype, region.shape, ())
        if (entry := index.tensors.get(name)) is None:
            raise ValueError(f"{folder} has no tensor {name!r}")
        if replace(entry, parts=()) != here:
            raise ValueError(f"{name} is {_said(entry)} in {folder}, here it is {_said(here)}")
        found = 0
        for part in entry.parts:
            box = _overlap(part.offset, part.sizes, region.offset, tuple(region.tensor.shape))
            if box is not None:
                into = region.tensor[_within(box, region.offset)]
                reads.append(Read(name, entry.dtype, part, _within(box, part.offset), into))
                found += into.numel()
        if found != region.tensor.numel():
            raise ValueError(f"{name} is not whole in {folder}: {found} of {region.tensor.numel()} elements are there")
    for _ in opened(folder, reads):
        pass
    for read, file in opened(folder, reads):
        read.target.copy_(piece(file, read))


def _within(box: Iterable[tuple[int, int]], offset: Shape) -> tuple[slice, ...]:
    return tuple(slice(start - first, stop - first) for (start, stop), first in zip(box, offset, strict=True))


def opened(folder: Folder, reads: Iterable[Read[T]]) -> Iterator[tuple[Read[T], Any]]:
    """Each read with its file, one file open at a time; a part that is not what the index says is an error."""
    by_file: dict[str, list[Read[T]]] = {}
    for read in reads:
        by_file.setdefault(read.part.file, []).append(read)
    for name, group in by_file.items():
        path = Path(folder) / name
        try:
            with safe_open(path, framework="pt") as file:
                keys = set(file.keys())
                for read in group:
                    if read.part.key not in keys:
                        raise ValueError(f"{path} does not hold {read.name} ({read.part.key!r})")
                    part = file.get_slice(read.part.key)
                    there = f"{part.get_dtype()} {tuple(part.get_shape())}"
                    if there != (said := f"{DTYPES[read.dtype]} {read.part.sizes}"):
                        raise ValueError(f"{read.name} is {there} in {path}, and by {INDEX} should be {said}")
                    yield read, file
        except (OSError, SafetensorError) as wrong:
            raise ValueError(f"{path}, which has {group[0].name}, cannot be read: {wrong}") from wrong


def piece(file: Any, read: Read[T]) -> Tensor:
    tensor: Tensor = file.get_slice(read.part.key)[read.piece] if read.piece else file.get_tensor(read.part.key)
    return tensor


def sync(path: Path) -> None:
    """Onto the disk itself, of a folder its names; Windows cannot do that."""
    if path.is_dir() and sys.platform == "win32":
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
