"""Text into token shards: in parallel, resumable, and the same bytes whatever the number of processes.

The inputs are cut into parts of about `part_bytes`. Part 123 becomes `train-000123.bin` and `val-000123.bin`; once both
stand complete, `parts/000123.json` says so, and a second run leaves that part alone. At the end `meta.json` takes the
place of `parts/`. Every file is written beside its place and renamed into it, so a kill at any moment tears nothing.

Each document is followed by the tokenizer's end token (nanoGPT's order).
"""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .errors import UserError
from .files import write_atomically
from .shards import Integers, ShardWriter, unreadable
from .sources import Part, Piece, batched, cut, pieces
from .tokenizer import Tokenizer, open_tokenizer
from .tokenizer import train_tokenizer as train

FINEWEB = "hf:HuggingFaceFW/fineweb:sample-10BT"
META = "meta.json"
_PARTS = "parts"
_SETTINGS = "settings.json"
_BATCH = 1 << 20  # characters tokenized at once
_TRAINING = 100 << 20  # characters that a tokenizer is trained on


@dataclass(frozen=True)
class Count:
    """`bytes` are those of the text that the tokens stand for."""

    tokens: int = 0
    bytes: int = 0
    documents: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.tokens + other.tokens, self.bytes + other.bytes, self.documents + other.documents)


@dataclass(frozen=True)
class Progress:
    """How far it is; `seconds` count from the start of this run, the rest from the first one."""

    parts_done: int
    parts: int
    tokens: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Summary:
    """What the folder holds."""

    folder: Path
    vocabulary: int
    end: int | None
    train: Count
    val: Count


@dataclass(frozen=True)
class _Job:
    """What every part is done with."""

    out: Path
    text_key: str
    separator: str
    val_every: int

    def record(self, part: Part) -> Path:
        return self.out / _PARTS / f"{part.index:06d}.json"

    def read(self, part: Part) -> tuple[Count, Count]:
        counts = json.loads(self.record(part).read_bytes())
        return Count(**counts["train"]), Count(**counts["val"])

    def pieces(self, part: Part) -> Iterator[Piece]:
        for piece in part.slices:
            yield from pieces(piece, self.text_key, self.separator)


def prepare(
    inputs: Sequence[str],
    out: Path,
    tokenizer: str | Tokenizer = "gpt2",
    *,
    train_tokenizer: int | None = None,
    val_every: int = 200,
    val_inputs: Sequence[str] = (),
    text_key: str = "text",
    separator: str = "<|endoftext|>",
    part_bytes: int = 64 << 20,
    workers: int | None = None,
    limit_tokens: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Summary:
    """Tokenizes the inputs (files, folders, globs, `hf:` datasets; none at all is FineWeb) into the folder `out`.

    `train_tokenizer` is the size of a vocabulary to train on the data, in place of `tokenizer`.

    Validation is `val_inputs` if there are any. Otherwise it is each `val_every`-th document of every part; a part
    with fewer documents gives the last 1 / `val_every` of its tokens instead, so that one long text has some too.
    With `val_every` 0 there is none.

    `limit_tokens` bounds what is made of the inputs: each part stops at its share, so that all of them are sampled.

    Run it again after an interruption and it goes on; in a folder made with other settings it refuses.
    """
    if val_every < 0 or val_every == 1:
        raise UserError(f"val_every is {val_every}; it must be 0 (no validation) or at least 2")
    for name, value, least in (
        ("part_bytes", part_bytes, 1024),
        ("workers", workers, 1),
        ("limit_tokens", limit_tokens, 1),
    ):
        if value is not None and value < least:
            raise UserError(f"{name} is {value}; it must be at least {least}")
    begun = time.monotonic()
    parts = cut(inputs or [FINEWEB], val_inputs, part_bytes, separator, limit_tokens)
    job = _Job(Path(out), text_key, separator, 0 if val_inputs else val_every)
    choice: int | Tokenizer
    if train_tokenizer is not None:
        choice = train_tokenizer
    else:
        choice = open_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    settings = {
        "inputs": _digest(parts),
        "tokenizer": f"trained {choice}" if isinstance(choice, int) else choice.fingerprint,
        "val_every": job.val_every,
        "text_key": text_key,
        "separator": separator,
        "part_bytes": part_bytes,
        "limit_tokens": limit_tokens,
    }

    def report(done: int, count: Count) -> None:
        if progress is not None:
            progress(Progress(done, len(parts), count.tokens, count.bytes, time.monotonic() - begun))

    try:
        if (meta := read_meta(job.out)) is None:
            chosen = _begin(job, settings, parts, choice)
            _do(job, parts, chosen, workers or os.cpu_count() or 1, report)
            meta = _finish(job, settings, parts, chosen)
        _compare(job.out, meta.get("settings"), settings)
        _clean(job.out)
    except OSError as error:  # all reading raises errors of its own
        raise _unwritable(job.out, error) from error
    except BrokenProcessPool as error:
        raise UserError(
            "a worker died: of lack of memory perhaps, then run it again with fewer workers; or in a script that calls"
            " prepare outside of `if __name__ == '__main__':`, then put it there"
        ) from error
    return Summary(job.out, meta["vocabulary"], meta["end"], Count(**meta["train"]), Count(**meta["val"]))


def read_meta(folder: Path) -> dict[str, Any] | None:
    """What `prepare` wrote about a folder; None if it is not finished or not its work."""
    path = Path(folder) / META
    try:
        meta = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        raise UserError(f"{path} is broken; prepare the data anew") from error
    if not isinstance(meta, dict) or meta.get("format") != 1:
        raise UserError(f"{path} is not of format 1; a newer version may have written it")
    return meta


def _digest(parts: Sequence[Part]) -> str:
    """Knows the inputs by name and size, not by folder: a data folder may move between two runs."""
    known = [(p.validation, [(s.kind, Path(s.path).name, s.begin, s.end, s.size) for s in p.slices]) for p in parts]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]


def _begin(job: _Job, settings: dict[str, Any], parts: Sequence[Part], choice: int | Tokenizer) -> Tokenizer:
    """Checks or writes the settings, and gives the tokenizer. Once the settings stand, the tokenizer does too.

    Settings with which no part was finished, as after a mistake in the inputs, hold nobody up.
    """
    stand = job.out / _PARTS / _SETTINGS
    begun = [path for path in stand.parent.glob("*.json") if path != stand]
    if stand.exists():
        stood = json.loads(stand.read_bytes())
        if begun or stood == settings:
            _compare(job.out, stood, settings)
            return choice if isinstance(choice, Tokenizer) else Tokenizer.load(job.out)
        for unfinished in job.out.glob("*.bin"):
            unfinished.unlink()
    if strange := sorted(path.name for path in job.out.glob("*.bin")):
        raise UserError(f"{job.out} has {strange[0]}, which is not the work of prepare; use an empty folder")
    stand.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(choice, int):
        choice = train(_sample(job, [part for part in parts if not part.validation]), choice)
    choice.save(job.out)
    write_atomically(stand, _json(settings))
    return choice


def _compare(out: Path, there: Any, now: dict[str, Any]) -> None:
    there = there if isinstance(there, dict) else {}
    if differ := [f"{key} was {there.get(key)!r}, is {now[key]!r}" for key in now if there.get(key) != now[key]]:
        raise UserError(f"{out} was prepared with other settings ({'; '.join(differ)}); use another folder")


def _sample(job: _Job, parts: Sequence[Part]) -> Iterator[str]:
    """The beginning of every part, equally much of each."""
    for part in parts:
        left = _TRAINING // len(parts)
        for piece in job.pieces(part):
            yield piece.text[:left]
            left -= len(piece.text)
            if left <= 0:
                break


def _do(
    job: _Job, parts: Sequence[Part], tokenizer: Tokenizer, workers: int, report: Callable[[int, Count], None]
) -> None:
    """Does the parts that are not done: here, or in processes if there is work for more than one."""
    todo = [part for part in parts if not job.record(part).exists()]
    done = len(parts) - len(todo)
    left = {part.index for part in todo}
    seen = sum((sum(job.read(part), Count()) for part in parts if part.index not in left), Count())
    report(done, seen)
    if min(workers, len(todo)) <= 1:

        def count(more: Count) -> None:
            nonlocal seen
            seen += more
            report(done, seen)

        for part in todo:
            _tokenize(job, part, tokenizer, count)
            done += 1
            report(done, seen)
        return
    context = multiprocessing.get_context("spawn")
    shared = context.Array("q", 4)  # tokens, bytes and documents of this run, and whether to stop
    with ProcessPoolExecutor(min(workers, len(todo)), context, _start, (job, shared)) as pool:
        waiting = {pool.submit(_work, part) for part in todo}
        try:
            while waiting:
                finished, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
                for future in finished:
                    future.result()
                done += len(finished)
                report(done, seen + Count(*shared[:3]))
        except BaseException:
            shared[3] = 1
            pool.shutdown(cancel_futures=True)  # and waits: a worker may be in the midst of a file
            raise


@dataclass(frozen=True)
class _Worker:
    """What a process of the pool holds."""

    job: _Job
    tokenizer: Tokenizer
    shared: Any

    def count(self, more: Count) -> None:
        with self.shared.get_lock():
            for i, value in enumerate((more.tokens, more.bytes, more.documents)):
                self.shared[i] += value
        if self.shared[3]:
            raise _Stopped


class _Stopped(Exception):
    """Another part failed, or the user interrupted."""


_worker: _Worker


def _start(job: _Job, shared: Any) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the parts are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it and says stop
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _worker = _Worker(job, Tokenizer.load(job.out), shared)


def _die_with_parent() -> None:
    """A parent that is killed says nothing, and its workers would wait for parts for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(part: Part) -> None:
    _tokenize(_worker.job, part, _worker.tokenizer, _worker.count)


class _Side:
    """One shard of a part, and what went into it."""

    def __init__(self, path: Path, wide: bool, lengths: Integers) -> None:
        self.writer = ShardWriter(path, wide)
        self.lengths = lengths
        self.count = Count()

    def add(self, ids: Integers, documents: int) -> Count:
        self.writer.append(ids)
        more = Count(len(ids), int(self.lengths[ids].sum()), documents)
        self.count += more
        return more

    def take_back(self, count: int) -> Integers:
        ids = self.writer.take_back(count)
        self.count += Count(-len(ids), -int(self.lengths[ids].sum()))
        return ids


def _tokenize(job: _Job, part: Part, tokenizer: Tokenizer, count: Callable[[Count], None]) -> None:
    """Makes the shards of a part, then its record."""
    wide, lengths = tokenizer.vocabulary > 1 << 16, tokenizer.byte_lengths()
    train, val = (_Side(job.out / f"{split}-{part.index:06d}.bin", wide, lengths) for split in ("train", "val"))
    end = [] if tokenizer.end is None else [tokenizer.end]
    documents, left = 0, part.limit
    try:
        for batch in batched(job.pieces(part), _BATCH):
            seen = Count()
            for piece, ids in zip(batch, tokenizer.encode_arrays([piece.text for piece in batch]), strict=True):
                if left == 0:
                    break
                chosen = job.val_every and documents % job.val_every == job.val_every - 1
                ids = np.append(ids, np.array(end if piece.ends else [], ids.dtype))[:left]
                seen += (val if part.validation or chosen else train).add(ids, int(piece.ends))
                documents += piece.ends
                left = None if left is None else left - len(ids)
            count(seen)
            if left == 0:
                break
        if job.val_every and not part.validation and documents < job.val_every:
            val.add(train.take_back(train.count.tokens // job.val_every), 0)
        for side in (train, val):
            if side.writer.count:
                side.writer.commit()
        write_atomically(job.record(part), _json({"train": asdict(train.count), "val": asdict(val.count)}))
    finally:
        train.writer.discard()
        val.writer.discard()


def _finish(job: _Job, settings: dict[str, Any], parts: Sequence[Part], tokenizer: Tokenizer) -> dict[str, Any]:
    counts = [job.read(part) for part in parts]
    train, val = (sum((count[side] for count in counts), Count()) for side in (0, 1))
    if not (train + val).tokens:
        shutil.rmtree(job.out / _PARTS)
        raise UserError("the inputs are empty: there is no text in them")
    meta = {
        "format": 1,
        "tokenizer": tokenizer.about() | {"fingerprint": tokenizer.fingerprint},
        "vocabulary": tokenizer.vocabulary,
        "end": tokenizer.end,
        "train": asdict(train),
        "val": asdict(val),
        "settings": settings,
    }
    write_atomically(job.out / META, _json(meta))
    return meta


def _clean(out: Path) -> None:
    """Removes what only an unfinished folder needs, and what killed processes left."""
    shutil.rmtree(out / _PARTS, ignore_errors=True)
    for path in out.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1).encode() + b"\n"


def _unwritable(out: Path, error: OSError) -> UserError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(f"{out}: the disk is full; free some space and run this again, it goes on where it was")
    return UserError(f"{out} cannot be written: {error.strerror or error}")
