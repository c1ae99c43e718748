"""Distributed checkpoints without pickle: tensors in safetensors files, everything else in one JSON file.

A folder holds index.json, which says which part of which tensor is in which file and has all other values, and one
part-….safetensors for each process that had something to write. Whatever way tensors were sharded when they were
saved, they can be read in any other way. The first half of this file needs no process group; the second plugs it into
torch.distributed.checkpoint.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import metadata as meta
from torch.distributed.checkpoint import planner as planning
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.futures import Future

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
        _sync(path)

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
        tensor = region.tensor.detach().cpu().contiguous()
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
    _sync(path)
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
class _Read(Generic[T]):
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
                reads.append(_Read(name, entry.dtype, part, _within(box, part.offset), into))
                found += into.numel()
        if found != region.tensor.numel():
            raise ValueError(f"{name} is not whole in {folder}: {found} of {region.tensor.numel()} elements are there")
    for _ in _opened(folder, reads):
        pass
    for read, file in _opened(folder, reads):
        read.target.copy_(_taken(file, read))


def _within(box: Iterable[tuple[int, int]], offset: Shape) -> tuple[slice, ...]:
    return tuple(slice(start - first, stop - first) for (start, stop), first in zip(box, offset, strict=True))


def _opened(folder: Folder, reads: Iterable[_Read[T]]) -> Iterator[tuple[_Read[T], Any]]:
    """Each read with its file, one file open at a time; a part that is not what the index says is an error."""
    by_file: dict[str, list[_Read[T]]] = {}
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


def _taken(file: Any, read: _Read[T]) -> Tensor:
    tensor: Tensor = file.get_slice(read.part.key)[read.piece] if read.piece else file.get_tensor(read.part.key)
    return tensor


def _sync(path: Path) -> None:
    """Onto the disk itself, of a folder its names; Windows cannot do that."""
    if path.is_dir() and sys.platform == "win32":
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ------------------------------------------------------------------------ torch.distributed.checkpoint


class JsonSavePlanner(DefaultSavePlanner):
    """torch's, with what is no tensor in JSON; what JSON cannot hold is refused before anything is written."""

    def create_local_plan(self) -> planning.SavePlan:
        for name, value in self.state_dict.items():
            if isinstance(value, DTensor):
                regions_of(name, value)  # refuses what torch would put in the wrong place
            elif not isinstance(value, Tensor):
                to_json(name, value)
        return super().create_local_plan()

    def transform_object(self, write_item: planning.WriteItem, object: Any) -> Any:
        if write_item.type == planning.WriteItemType.BYTE_IO:
            return _packed(write_item.index.fqn, object)
        return super().transform_object(write_item, object)


class JsonLoadPlanner(DefaultLoadPlanner):
    """torch's, with what is no tensor from JSON; tensors have to have the dtype they were saved in."""

    def create_local_plan(self) -> planning.LoadPlan:
        saved = self.metadata.state_dict_metadata if self.metadata is not None else {}
        for name, value in self.state_dict.items():
            if isinstance(value, DTensor):
                regions_of(name, value)
            known = saved.get(name)
            if not isinstance(value, Tensor) or not isinstance(known, meta.TensorStorageMetadata):
                continue
            if known.properties.dtype != value.dtype:
                raise ValueError(f"{name} was saved in {known.properties.dtype}, here it is {value.dtype}")
        return super().create_local_plan()

    def load_bytes(self, read_item: planning.ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        holder: Any = self.original_state_dict
        *above, last = self.mappings.get(name, (name,))
        for key in above:
            holder = holder[_own(holder, key)]
        holder[_own(holder, last)] = from_json(json.loads(value.getvalue()))


def _own(holder: Any, key: str | int) -> Any:
    """torch flattens keys of all types to strings; this is the one that was meant."""
    if not isinstance(holder, Mapping) or key in holder:
        return key
    return next((mine for mine in holder if str(mine) == key), key)


def _packed(name: str, value: Any) -> io.BytesIO:
    return io.BytesIO(json.dumps(to_json(name, value)).encode())


class SafetensorsWriter(StorageWriter):
    """For dcp.save, with JsonSavePlanner: a folder that takes its name once it is whole, in place of the one before.

    It has to be on a file system that all processes share.
    """

    def __init__(self, folder: Folder) -> None:
        self.reset(folder)

    def reset(self, checkpoint_id: Folder | None = None) -> None:
        if checkpoint_id is not None:
            self.folder = Path(os.path.realpath(checkpoint_id))
            self.beside = self.folder.with_name(f".{self.folder.name}.new")
            self.aside = self.folder.with_name(f".{self.folder.name}.old")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Folder) -> bool:
        return "://" not in os.fspath(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise ValueError("the processes make one index together: use_collectives has to be True")

    def prepare_local_plan(self, plan: planning.SavePlan) -> planning.SavePlan:
        for item in plan.items:
            if item.tensor_data is not None and item.tensor_data.properties.dtype not in DTYPES:
                raise ValueError(f"{item.index.fqn} is {item.tensor_data.properties.dtype}, which cannot be stored")
        return plan

    def prepare_global_plan(self, plans: list[planning.SavePlan]) -> list[planning.SavePlan]:
        if self.aside.exists() and not self.folder.exists():
            os.rename(self.aside, self.folder)  # the last one was stopped between its two renames
        if self.folder.exists() and not (self.folder / INDEX).exists() and any(self.folder.iterdir()):
            raise ValueError(f"{self.folder} is there and is no checkpoint: it is not replaced")
        shutil.rmtree(self.beside, ignore_errors=True)
        self.beside.mkdir(parents=True)
        return [replace(plan, storage_data=f"part-{n:05d}.safetensors") for n, plan in enumerate(plans)]

    def write_data(self, plan: planning.SavePlan, planner: planning.SavePlanner) -> Future[list[WriteResult]]:
        regions, values = [], {}
        for item in plan.items:
            name, data = item.index.fqn, planner.resolve_data(item)
            if item.tensor_data is not None:
                assert isinstance(data, Tensor)
                whole, offset = tuple(item.tensor_data.size), tuple(item.tensor_data.chunk.offsets)
                if data.numel() or 0 in whole:
                    regions.append(Region(name, whole, offset, data))
            elif isinstance(planner, JsonSavePlanner) and isinstance(data, io.BytesIO):
                values[name] = from_json(json.loads(data.getvalue()))
            else:
                raise ValueError(f"{name} is no tensor: give dcp.save planner=JsonSavePlanner()")
        if not self.beside.is_dir():
            raise ValueError(f"{self.beside} is not there for this process: all have to share the file system")
        index = replace(write_regions(self.beside / plan.storage_data, regions), values=values)
        size = sum(region.tensor.nbytes for region in regions)
        return _done([WriteResult(meta.MetadataIndex(plan.storage_data), size, index)])

    def finish(self, metadata: meta.Metadata, results: list[list[WriteResult]]) -> None:
        index = Index.merged(result.storage_data for of_process in results for result in of_process)
        index = replace(index, paths=metadata.planner_data or {})
        index.check(self.beside)
        index.write(self.beside)
        _sync(self.beside)
        shutil.rmtree(self.aside, ignore_errors=True)
        if self.folder.exists():
            os.rename(self.folder, self.aside)
        os.rename(self.beside, self.folder)
        _sync(self.folder.parent)
        shutil.rmtree(self.aside, ignore_errors=True)


class SafetensorsReader(StorageReader):
    """For dcp.load, with JsonLoadPlanner: reads what SafetensorsWriter wrote."""

    def __init__(self, folder: Folder) -> None:
        self.index = Index()
        self.reset(folder)

    def reset(self, checkpoint_id: Folder | None = None) -> None:
        if checkpoint_id is not None:
            self.folder = Path(os.path.realpath(checkpoint_id))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Folder) -> bool:
        return "://" not in os.fspath(checkpoint_id)

    def read_metadata(self, *args: Any, **others: Any) -> meta.Metadata:
        self.index = Index.read(self.folder)
        known: dict[str, Any] = {name: meta.BytesStorageMetadata() for name in self.index.values}
        for name, entry in self.index.tensors.items():
            chunks = [meta.ChunkStorageMetadata(torch.Size(p.offset), torch.Size(p.sizes)) for p in entry.parts]
            properties = meta.TensorProperties(dtype=entry.dtype)
            known[name] = meta.TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
        return meta.Metadata(known, planner_data=dict(self.index.paths))

    def set_up_storage_reader(self, metadata: meta.Metadata, is_coordinator: bool, *args: Any, **others: Any) -> None:
        self._parts = {(name, part.offset): part for name, e in self.index.tensors.items() for part in e.parts}

    def prepare_local_plan(self, plan: planning.LoadPlan) -> planning.LoadPlan:
        for _ in _opened(self.folder, self._reads(plan)):  # all processes check before one of them changes anything
            pass
        return plan

    def prepare_global_plan(self, plans: list[planning.LoadPlan]) -> list[planning.LoadPlan]:
        return plans

    def read_data(self, plan: planning.LoadPlan, planner: planning.LoadPlanner) -> Future[None]:
        values = [item for item in plan.items if item.type == planning.LoadItemType.BYTE_IO]
        if values and not isinstance(planner, JsonLoadPlanner):
            raise ValueError(f"{values[0].dest_index.fqn} is no tensor: give dcp.load planner=JsonLoadPlanner()")
        for read, file in _opened(self.folder, self._reads(plan)):
            target = planner.resolve_tensor(read.target).detach()
            target.copy_(_taken(file, read))
            planner.commit_tensor(read.target, target)
        for item in values:
            name = item.storage_index.fqn
            planner.load_bytes(item, _packed(name, self.index.values[name]))
        return _done(None)

    def _reads(self, plan: planning.LoadPlan) -> Iterator[_Read[planning.ReadItem]]:
        for item in plan.items:
            if item.type == planning.LoadItemType.TENSOR:
                name, offset = item.storage_index.fqn, tuple(item.storage_index.offset or ())
                piece = tuple(slice(a, a + n) for a, n in zip(item.storage_offsets, item.lengths, strict=True))
                yield _Read(name, self.index.tensors[name].dtype, self._parts[name, offset], piece, item)


class _LateReader(SafetensorsReader):
    """Says what is wrong with the index one call later: in the first torch would log it and look for another."""

    def read_metadata(self, *args: Any, **others: Any) -> meta.Metadata:
        self.wrong: Exception | None = None
        try:
            return super().read_metadata()
        except Exception as wrong:
            self.wrong = wrong
            return meta.Metadata({})

    def set_up_storage_reader(self, metadata: meta.Metadata, is_coordinator: bool, *args: Any, **others: Any) -> None:
        if self.wrong is not None:
            raise self.wrong
        super().set_up_storage_reader(metadata, is_coordinator)


def _done(result: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(result)
    return future


@contextmanager
def _plain_errors() -> Iterator[None]:
    """What went wrong itself, rather than torch's collection of it, which `except Exception` does not catch."""
    try:
        yield
    except CheckpointException as failed:
        wrong, _ = next(iter(failed.failures.values()))
        raise wrong from failed


def save(folder: Folder, state_dict: dict[str, Any], *, process_group: ProcessGroup | None = None) -> None:
    """dcp.save into a folder of this format."""
    writer, planner = SafetensorsWriter(folder), JsonSavePlanner()
    try:
        with _plain_errors():
            state_dict_saver.save(state_dict, storage_writer=writer, planner=planner, process_group=process_group)
    except BaseException:
        shutil.rmtree(writer.beside, ignore_errors=True)
        raise


def async_save(
    folder: Folder, state_dict: dict[str, Any], *, process_group: ProcessGroup | None = None
) -> futures.Future[Any]:
    """dcp.async_save into a folder of this format: returns once the state has been copied, and writes meanwhile."""
    writer, planner = SafetensorsWriter(folder), JsonSavePlanner()
    started = state_dict_saver.async_save(
        state_dict, storage_writer=writer, planner=planner, process_group=process_group
    )
    return started if isinstance(started, futures.Future) else started.upload_completion


def load(folder: Folder, state_dict: dict[str, Any], *, process_group: ProcessGroup | None = None) -> None:
    """dcp.load from a folder of this format: into the tensors of the state dict, and its other values are replaced."""
    reader, planner = _LateReader(folder), JsonLoadPlanner()
    with _plain_errors():
        state_dict_loader.load(state_dict, storage_reader=reader, planner=planner, process_group=process_group)
