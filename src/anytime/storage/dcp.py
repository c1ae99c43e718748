"""The same files under torch.distributed.checkpoint: planners without pickle, a writer and a reader."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import metadata as meta
from torch.distributed.checkpoint import planner as planning
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from .regions import (
    DTYPES,
    INDEX,
    Folder,
    Index,
    Read,
    Region,
    T,
    from_json,
    opened,
    piece,
    regions_of,
    sync,
    to_json,
    write_regions,
)


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
    """torch's, with what is no tensor from JSON; tensors have to have the dtype they were saved in. Options of groups
    that came later than the file are taken out of the state dict, so that the optimizer sees what it was saved with."""

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
        for name in [name for name, value in self.state_dict.items() if not isinstance(value, Tensor)]:
            if name not in saved and "param_groups" in self.mappings.get(name, ()):
                holder, last = self._holder(name)
                del holder[last], self.state_dict[name]
        return super().create_local_plan()

    def load_bytes(self, read_item: planning.ReadItem, value: io.BytesIO) -> None:
        holder, last = self._holder(read_item.dest_index.fqn)
        holder[last] = from_json(json.loads(value.getvalue()))

    def _holder(self, name: str) -> tuple[Any, Any]:
        """Where a value of the flattened state dict lies in the one that was given, and under which key."""
        holder: Any = self.original_state_dict
        *above, last = self.mappings.get(name, (name,))
        for key in above:
            holder = holder[_own(holder, key)]
        return holder, _own(holder, last)


def _own(holder: Any, key: str | int) -> Any:
    """torch flattens keys of all types to strings; this is the one that was meant."""
    if not isinstance(holder, Mapping) or key in holder:
        return key
    return next((mine for mine in holder if str(mine) == key), key)


def _packed(name: str, value: Any) -> io.BytesIO:
    return io.BytesIO(json.dumps(to_json(name, value)).encode())


def _neighbours(folder: Path) -> tuple[Path, Path]:
    """Where the next checkpoint of that name is written, and where the last one is put before it takes the name."""
    return folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")


def standing(folder: Path) -> Path:
    """Where the checkpoint of that name lies: not there itself if a save was stopped between its two renames."""
    if folder.exists():
        return folder
    return next((path for path in _neighbours(folder) if (path / INDEX).exists()), folder)


class SafetensorsWriter(StorageWriter):
    """For dcp.save, with JsonSavePlanner: a folder that takes its name once it is whole, in place of the one before.

    It has to be on a file system that all processes share.
    """

    def __init__(self, folder: Folder) -> None:
        self.reset(folder)

    def reset(self, checkpoint_id: Folder | None = None) -> None:
        if checkpoint_id is not None:
            self.folder = Path(os.path.realpath(checkpoint_id))
            self.beside, self.aside = _neighbours(self.folder)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Folder) -> bool:
        return "://" not in os.fspath(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise ValueError("the processes make one index together: use_collectives has to be True")
        if is_coordinator and (found := standing(self.folder)) != self.folder:
            os.rename(found, self.folder)

    def prepare_local_plan(self, plan: planning.SavePlan) -> planning.SavePlan:
        for item in plan.items:
            if item.tensor_data is not None and item.tensor_data.properties.dtype not in DTYPES:
                raise ValueError(f"{item.index.fqn} is {item.tensor_data.properties.dtype}, which cannot be stored")
        return plan

    def prepare_global_plan(self, plans: list[planning.SavePlan]) -> list[planning.SavePlan]:
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
        sync(self.beside)
        shutil.rmtree(self.aside, ignore_errors=True)
        if self.folder.exists():
            os.rename(self.folder, self.aside)
        os.rename(self.beside, self.folder)
        sync(self.folder.parent)
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
        self.folder = standing(self.folder)
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
        for _ in opened(self.folder, self._reads(plan)):  # all processes check before one of them changes anything
            pass
        return plan

    def prepare_global_plan(self, plans: list[planning.LoadPlan]) -> list[planning.LoadPlan]:
        return plans

    def read_data(self, plan: planning.LoadPlan, planner: planning.LoadPlanner) -> Future[None]:
        values = [item for item in plan.items if item.type == planning.LoadItemType.BYTE_IO]
        if values and not isinstance(planner, JsonLoadPlanner):
            raise ValueError(f"{values[0].dest_index.fqn} is no tensor: give dcp.load planner=JsonLoadPlanner()")
        for read, file in opened(self.folder, self._reads(plan)):
            target = planner.resolve_tensor(read.target).detach()
            target.copy_(piece(file, read))
            planner.commit_tensor(read.target, target)
        for item in values:
            name = item.storage_index.fqn
            planner.load_bytes(item, _packed(name, self.index.values[name]))
        return _done(None)

    def _reads(self, plan: planning.LoadPlan) -> Iterator[Read[planning.ReadItem]]:
        for item in plan.items:
            if item.type == planning.LoadItemType.TENSOR:
                name, offset = item.storage_index.fqn, tuple(item.storage_index.offset or ())
                piece = tuple(slice(a, a + n) for a, n in zip(item.storage_offsets, item.lengths, strict=True))
                yield Read(name, self.index.tensors[name].dtype, self._parts[name, offset], piece, item)


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
