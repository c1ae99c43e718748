"""Token files: what their bytes mean, and many of them read as one long sequence.

A shard is a header of 256 little-endian int32 (magic, version, token count), then its tokens: uint16 (the layout of
modded-nanogpt), or uint32 under llm.c's second magic for vocabularies above 65,536. A file that begins with neither
magic is nanoGPT's: uint16 tokens without a header.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from .errors import UserError
from .files import publish, temporary

Split: TypeAlias = Literal["train", "val"]
Source: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"
Integers: TypeAlias = npt.NDArray[np.integer[Any]]

_HEADER = 256 * 4
_NARROW: tuple[int, int, np.dtype[Any]] = (20240520, 1, np.dtype("<u2"))
_WIDE: tuple[int, int, np.dtype[Any]] = (20240801, 7, np.dtype("<u4"))
_MAX_TOKENS = 2**31 - 1  # what the header can say
_OPEN_MAPS = 128  # each map holds a file descriptor, and there may be thousands of shards


@dataclass(frozen=True)
class Shard:
    """One token file: the type of its tokens, where they begin (in bytes) and how many there are."""

    path: Path
    dtype: np.dtype[Any]
    begin: int
    count: int

    @classmethod
    def read(cls, path: Path) -> Shard:
        """Reads and checks the header alone."""
        try:
            with path.open("rb") as file:
                head = np.frombuffer(file.read(3 * 4).ljust(3 * 4, b"\0"), "<i4")
                size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise unreadable(path, error) from error
        if size == 0:
            raise UserError(f"{path} is empty; delete it or write it anew")
        magic, version, count = head.tolist()
        for known_magic, known_version, dtype in (_NARROW, _WIDE):
            if magic != known_magic:
                continue
            if version != known_version:
                raise UserError(f"{path} has format version {version}; this magic is known with {known_version} alone")
            there = (size - _HEADER) / dtype.itemsize
            if count != there:
                raise UserError(f"{path}: the header says {count} tokens, the file has {there:g}; write it anew")
            if count == 0:
                raise UserError(f"{path} holds no tokens; delete it or write it anew")
            return cls(path, dtype, _HEADER, count)
        if path.suffix != ".bin":
            raise UserError(f"{path} is no file of tokens; if it is text, make tokens of it by `anytime data`")
        if size % 2:
            raise UserError(f"{path} has no header and {size} bytes, an odd number: these are not uint16 tokens")
        return cls(path, _NARROW[2], 0, size // 2)

    def map(self) -> Integers:
        """The tokens, memory-mapped."""
        try:
            mapped = np.memmap(self.path, self.dtype, "r", self.begin, (self.count,))
        except (OSError, ValueError) as error:
            raise unreadable(self.path, error) from error
        return mapped.view(np.ndarray)  # slices of a plain array are several times cheaper


class Tokens:
    """The tokens of many shards, one after another. Opening reads the headers; files are mapped when they are read."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = tuple(shards)
        self._ends = np.cumsum([shard.count for shard in self.shards], dtype=np.int64)
        self._begins: list[int] = [0, *self._ends.tolist()]
        self._map = lru_cache(_OPEN_MAPS)(lambda index: self.shards[index].map())

    @classmethod
    def open(cls, source: Source, split: Split) -> Tokens:
        """From a folder, a file, a glob, or a list of these.

        In a folder the `.bin` files that begin with the split's name or have `_<split>_` in theirs are taken, sorted;
        files named outright are taken as they are, whatever the split.
        """
        sources = [source] if isinstance(source, str | os.PathLike) else list(source)
        if not sources:
            raise UserError(f"no {split} tokens were named; name a folder of .bin files, a file or a glob")
        return cls([Shard.read(path) for item in sources for path in _find(item, split)])

    @property
    def files(self) -> list[Path]:
        """The paths, in the order of their tokens."""
        return [shard.path for shard in self.shards]

    def __len__(self) -> int:
        return self._begins[-1]

    def fingerprint(self) -> str:
        """The same for the same tokens wherever they lie: of every shard its size and its first tokens."""
        total = hashlib.sha256()
        for index, shard in enumerate(self.shards):
            total.update(f"{shard.count}:".encode() + self._map(index)[:1024].astype(np.uint32).tobytes())
        return total.hexdigest()[:16]

    def locate(self, index: int) -> tuple[Path, int]:
        """The file in which a token lies, and its position there, in tokens."""
        if not 0 <= index < len(self):
            raise IndexError(f"token {index} of {len(self)}")
        shard = int(np.searchsorted(self._ends, index, side="right"))
        return self.shards[shard].path, index - self._begins[shard]

    def gather(self, starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int32]:
        """[n] starts → [n, length] tokens; a window may run over from one shard into the next."""
        if len(starts) and (starts.min() < 0 or starts.max() + length > len(self)):
            raise IndexError(f"windows of {length} from {starts.min()} to {starts.max()} in {len(self)} tokens")
        windows = np.empty((len(starts), length), np.int32)
        shards = np.searchsorted(self._ends, starts, side="right")
        for window, start, shard in zip(windows, starts.tolist(), shards.tolist(), strict=True):
            offset, filled = start - self._begins[shard], 0
            while filled < length:
                piece = self._map(shard)[offset : offset + length - filled]
                window[filled : filled + len(piece)] = piece
                filled += len(piece)
                shard, offset = shard + 1, 0
        return windows


def _find(source: str | os.PathLike[str], split: Split) -> list[Path]:
    path = Path(source)
    if path.is_dir():
        names = sorted(item.name for item in path.iterdir())
        chosen = [n for n in names if n.endswith(".bin") and (n.startswith(split) or f"_{split}_" in n)]
        if not chosen:
            there = ", ".join(names[:8]) + (", …" if len(names) > 8 else "") if names else "nothing"
            raise UserError(f"{path} has no {split} tokens ({split}*.bin or *_{split}_*.bin); it has: {there}")
        return [path / name for name in chosen]
    if path.exists():
        return [path]
    if found := sorted(glob.glob(str(source), recursive=True)):
        return [Path(name) for name in found]
    raise UserError(f"{source} does not exist; name a folder of .bin files, a file or a glob")


class ShardWriter:
    """A shard under way: tokens go into a temporary file beside it, and `commit` puts it into place, whole."""

    def __init__(self, path: Path, wide: bool = False) -> None:
        self.path = path
        self.count = 0
        self._magic, self._version, self._dtype = _WIDE if wide else _NARROW
        self._temporary = temporary(path)
        self._file: BinaryIO = self._temporary.open("w+b")
        self._file.write(bytes(_HEADER))

    def append(self, tokens: Integers) -> None:
        """Adds tokens at the end."""
        if len(tokens) == 0:
            return
        least, most = int(tokens.min()), int(tokens.max())
        if least < 0 or most > np.iinfo(self._dtype).max:
            raise ValueError(f"{self.path}: tokens from {least} to {most} do not fit into {self._dtype.name}")
        if self.count + len(tokens) > _MAX_TOKENS:
            raise UserError(f"{self.path} would have more than {_MAX_TOKENS} tokens; cut its input into smaller files")
        self._file.write(np.ascontiguousarray(tokens, self._dtype).data)
        self.count += len(tokens)

    def take_back(self, count: int) -> Integers:
        """Removes the last `count` tokens and returns them."""
        if not 0 <= count <= self.count:
            raise ValueError(f"{count} tokens of {self.count}")
        self.count -= count
        end = _HEADER + self.count * self._dtype.itemsize
        self._file.seek(end)
        tokens: Integers = np.frombuffer(self._file.read(), self._dtype)
        self._file.truncate(end)
        self._file.seek(end)
        return tokens

    def commit(self) -> None:
        """Writes the header and renames the file to its path."""
        header = np.zeros(256, "<i4")
        header[:3] = self._magic, self._version, self.count
        self._file.seek(0)
        self._file.write(header.data)
        publish(self._file, self._temporary, self.path)

    def discard(self) -> None:
        """Leaves nothing behind, unless it was committed before."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)


def write_shard(path: Path, tokens: Integers, wide: bool = False) -> None:
    """Writes a whole shard; the file appears complete or not at all. `wide` is for ids above 65,535."""
    writer = ShardWriter(path, wide)
    try:
        writer.append(tokens)
        writer.commit()
    finally:
        writer.discard()


def unreadable(path: Path, error: Exception) -> UserError:
    """The error for a file that the system does not let us read."""
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return UserError(f"{path} cannot be read: {reason}")
