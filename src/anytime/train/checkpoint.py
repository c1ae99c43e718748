"""Checkpoints: folders that are there whole or not at all, checked by their sums, written while training goes on.

A checkpoint is a finished model (model.safetensors holds X, config.json its shape, and the tokenizer) with what it
takes to go on beside it: Y and the optimizer's tensors in one resume-….safetensors for each process that trained, with
index.json to say what is where, and state.json (everything else). Any number of processes can go on from it.
checksums.json is written last, into a folder with a temporary name that is then renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..storage.regions import DTYPES, INDEX, Entry, Index, Part, Region, read_into, regions_of, write_regions
from .errors import UserError
from .files import by_umask, sync_folder, write_atomically
from .parallel import Peers
from .tokenizer import Tokenizer

SUMS = "checksums.json"
LATEST = "latest"
MODEL = "model.safetensors"
FORMAT = 2  # 1 had a single resume.safetensors and no index


@dataclass(frozen=True)
class Snapshot:
    """A moment of a run, one process's part of it, copied off the live tensors."""

    step: int
    model: Mapping[str, Tensor]  # X, on the CPU; for the first process
    resume: Sequence[Region]  # on the CPU
    texts: Mapping[str, str]  # file name to its content
    tokenizer: Tokenizer | None
    copied: torch.cuda.Event | None = None  # the tensors are whole once this has happened


def copy_off(tensor: Tensor) -> Tensor:
    """A copy on the CPU; from CUDA through pinned memory, in the order of the stream, without waiting."""
    if not tensor.is_cuda:
        return tensor.detach().contiguous().clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor.detach(), non_blocking=True)


def parts_of(tensors: Mapping[str, Tensor], peers: Peers) -> list[Region]:
    """This process's share of all, copied off: what it alone has, and its turns of what several have alike."""
    holders: dict[str, list[int]] = {}
    for rank, names in enumerate(peers.everyones([name for name, t in tensors.items() if not isinstance(t, DTensor)])):
        for name in names:
            holders.setdefault(name, []).append(rank)
    turns = {name: ranks[number % len(ranks)] for number, (name, ranks) in enumerate(holders.items())}
    return [
        replace(region, tensor=copy_off(region.tensor))
        for name, tensor in tensors.items()
        for region in regions_of(name, tensor, plain=turns.get(name) == peers.rank)
    ]


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def digest(path: Path) -> str:
    total = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            total.update(block)
    return total.hexdigest()


def damage(folder: Path, peers: Peers | None = None) -> str | None:
    """What is wrong with a checkpoint, in words; None if every file is what was written. Peers take turns."""
    peers = peers or Peers()
    return next(filter(None, peers.everyones(_damage(folder, peers.rank, peers.size))), None)


def _damage(folder: Path, rank: int, size: int) -> str | None:
    try:
        sums = json.loads((folder / SUMS).read_text(encoding="utf-8"))
        for name, stated in list(sums["files"].items())[rank::size]:
            if not (folder / name).is_file():
                return f"{name} is missing"
            if digest(folder / name) != stated:
                return f"{name} is not what was written"
    except FileNotFoundError:
        return f"{SUMS} is missing"
    except OSError as wrong:  # the disk's trouble, perhaps for a moment: no reason to give the checkpoint up
        raise UserError(f"cannot read the checkpoint {folder}: {wrong}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as wrong:
        return f"{SUMS} cannot be read ({wrong})"
    return None


def write_checkpoint(folder: Path, snapshot: Snapshot, peers: Peers | None = None) -> Path:
    """Writes folder/step-…; whatever happens before its last lines leaves no trace of that name.

    Every process writes its part, the first all the rest and the name. Where one cannot, none of it stays, and all
    say the same.
    """
    peers = peers or Peers()
    if snapshot.copied is not None:
        snapshot.copied.synchronize()
    final = folder / name_of(snapshot.step)
    beside = folder / f".{final.name}.new"

    def begin() -> None:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)

    def end() -> None:
        index = Index.merged(index for index, _ in written)
        index.check(beside)
        index.write(beside)
        sums = {name: of for _, files in written for name, of in files.items()} | {INDEX: digest(beside / INDEX)}
        (beside / SUMS).write_text(json.dumps({"format": FORMAT, "files": sums}, indent=1), encoding="utf-8")
        _sync(beside / SUMS)
        sync_folder(beside)
        if final.exists():  # a damaged one of the same step
            remove(final)
        os.rename(beside, final)
        sync_folder(folder)
        write_atomically(folder / LATEST, (final.name + "\n").encode())

    try:
        peers.leader_does(begin)
        written = peers.each(lambda: _write_part(beside, snapshot, peers))
        peers.leader_does(end)
    except Exception as wrong:
        if peers.leads:
            shutil.rmtree(beside, ignore_errors=True)
        if not isinstance(wrong, OSError):
            raise
        raise UserError(f"the checkpoint of step {snapshot.step} could not be written to {folder}: {wrong}") from wrong
    return final


def _write_part(beside: Path, snapshot: Snapshot, peers: Peers) -> tuple[Index, dict[str, str]]:
    """One process's files, on disk; what is where in them, and their sums."""
    name = f"resume-{peers.rank:05d}-of-{peers.size:05d}.safetensors"
    index = write_regions(beside / name, snapshot.resume)
    files = [beside / name] if snapshot.resume else []
    if peers.leads:
        try:
            save_file(dict(snapshot.model), beside / MODEL)
        except SafetensorError as wrong:
            raise OSError(str(wrong)) from wrong
        by_umask(beside / MODEL)
        for text, content in snapshot.texts.items():
            (beside / text).write_text(content, encoding="utf-8")
        if snapshot.tokenizer is not None:
            snapshot.tokenizer.save(beside)
        # Other processes' files are not this one's, nor are the hidden ones that these still have to be.
        others = [path for path in sorted(beside.iterdir()) if not path.name.startswith(("resume-", "."))]
        for path in others:
            _sync(path)
        files += others
    return index, {path.name: digest(path) for path in files}


def _sync(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def remove(folder: Path) -> None:
    """Its name goes first, so that no half of it is ever taken for a checkpoint."""
    aside = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(folder, aside)
    shutil.rmtree(aside, ignore_errors=True)


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints there, the newest first; not checked."""
    found = [path for path in folder.glob("step-*") if path.is_dir() and path.name[5:].isdigit()]
    return sorted(found, key=step_of, reverse=True)


def sweep(folder: Path) -> None:
    """Removes what an interrupted write or removal left."""
    for path in (*folder.glob(".step-*.new"), *folder.glob(".step-*.old")):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(".*.tmp"):
        if path.name.split(".")[-2].isdigit():  # a name of ours: .file.process.tmp
            path.unlink()


def drop_after(folder: Path, last: Path) -> None:
    """Sets checkpoints after one aside: damaged all of them, and in the way of those to come."""
    for path in checkpoints_in(folder):
        if step_of(path) > step_of(last):
            aside = path.with_name(f"damaged-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(path, aside)
    latest = folder / LATEST
    if not latest.exists() or latest.read_text(encoding="utf-8", errors="replace").strip() != last.name:
        write_atomically(latest, (last.name + "\n").encode())


def newest_whole(
    folder: Path, warn: Callable[[str], None], *, at: int | None = None, peers: Peers | None = None
) -> Path | None:
    """The newest checkpoint that is whole (or the one of a given step); each that is damaged gets a word."""
    peers = peers or Peers()
    words: list[str] = []
    found = None
    for path in peers.leaders(checkpoints_in(folder)):
        if at is not None and step_of(path) != at:
            continue
        wrong = damage(path, peers)
        if wrong is None:
            found = path
            break
        words.append(f"the checkpoint {path} is damaged: {wrong}")
    for text in words:
        warn(text if found is None else f"{text}; the one before it is used")
    return found


def read_state(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    if state["format"] > FORMAT:
        raise UserError(f"{folder} has format {state['format']}, this version reads up to {FORMAT}: upgrade anytime")
    return state


def read_tensors(path: Path, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    try:
        return load_file(path, device=str(device))
    except (OSError, SafetensorError) as wrong:
        raise UserError(f"cannot read {path}: {wrong}") from None


def index_of(folder: Path) -> Index:
    """What is where of what it takes to go on."""
    try:
        if (folder / INDEX).exists():
            return Index.read(folder)
        name = "resume.safetensors"  # of format 1
        with safe_open(folder / name, framework="pt") as file:
            dtypes = {there: dtype for dtype, there in DTYPES.items()}
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118, it is no mapping
            shapes = {key: tuple(piece.get_shape()) for key, piece in slices.items()}
            return Index(
                {
                    key: Entry(dtypes[slices[key].get_dtype()], shape, (Part(name, key, (0,) * len(shape), shape),))
                    for key, shape in shapes.items()
                }
            )
    except (OSError, SafetensorError, ValueError) as wrong:
        raise UserError(f"cannot read {folder}: {wrong}") from None


def fill(folder: Path, index: Index, tensors: Mapping[str, Tensor]) -> None:
    """Tensors by their names in a checkpoint, in place; of sharded ones no more is read than is held here."""
    try:
        read_into(folder, index, tensors)
    except ValueError as wrong:
        raise UserError(f"cannot go on from {folder}: {wrong}") from None


def read_resume(folder: Path) -> dict[str, Tensor]:
    """All that it takes to go on, whole."""
    index = index_of(folder)
    tensors = {name: torch.empty(entry.shape, dtype=entry.dtype) for name, entry in index.tensors.items()}
    fill(folder, index, tensors)
    return tensors


@dataclass
class Writer:
    """Writes one snapshot at a time in a thread of its own, and then removes what need not be kept."""

    folder: Path
    keep_last: int
    milestone: Callable[[int], bool]
    peers: Peers = field(default_factory=Peers)
    _thread: threading.Thread | None = None
    _failed: Exception | None = field(default=None)

    def save(self, snapshot: Snapshot) -> UserError | None:
        """Returns at once unless the last one is still being written; an error is of the one before."""
        failed = self.wait()
        self._thread = threading.Thread(target=self._write, args=(snapshot,), name="checkpoint", daemon=True)
        self._thread.start()
        return failed

    def wait(self) -> UserError | None:
        """Until everything handed over is on disk; what went wrong, if anything."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failed, self._failed = self._failed, None
        if failed is not None and not isinstance(failed, UserError):
            raise failed
        return failed

    def _write(self, snapshot: Snapshot) -> None:
        try:
            write_checkpoint(self.folder, snapshot, self.peers)
            self.peers.leader_does(lambda: prune(self.folder, self.keep_last, self.milestone))
        except UserError as wrong:
            self._failed = wrong
        except OSError as wrong:
            self._failed = UserError(f"old checkpoints in {self.folder} could not be removed: {wrong}")
        except Exception as wrong:  # a mistake of ours: raised where training waits
            self._failed = wrong


def prune(folder: Path, keep_last: int, milestone: Callable[[int], bool]) -> None:
    for path in checkpoints_in(folder)[keep_last:]:
        if not milestone(step_of(path)):
            remove(path)


def flatten(states: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The optimizer's tensors under one name each."""
    return {f"optimizer/{index}/{key}": value for index, state in states.items() for key, value in state.items()}


def unflatten(tensors: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    states: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith("optimizer/"):
            _, index, key = name.split("/", 2)
            states.setdefault(int(index), {})[key] = value
    return states


def weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix("weights/"): t for n, t in tensors.items() if n.startswith("weights/")}


def as_weights(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {f"weights/{name}": tensor for name, tensor in tensors}
