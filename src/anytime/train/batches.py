"""Which tokens make which batch, and batches made ahead of the training step.

The order of the data is a pure function of (seed, number of sequences consumed): it does not depend on the batch size,
the number of processes, or where a run was interrupted, and needs no state beyond that number.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from types import TracebackType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .errors import UserError
from .shards import Tokens

_ROUNDS = 4  # each changes both halves: eight rounds as Feistel networks are counted
_MASK = 2**64 - 1


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of splitmix64: every bit of the result depends on every bit of x."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _keys(seed: int, epoch: int, count: int) -> npt.NDArray[np.uint64]:
    """`count` random words for an epoch; the same on every machine and with every version of numpy."""
    key = np.array([seed & _MASK], np.uint64)
    key = _mix(_mix(key + np.uint64(0x9E3779B97F4A7C15)) + np.uint64(epoch))
    return _mix(key + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def permute(index: npt.NDArray[np.int64], n: int, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """A pseudo-random permutation of [0, n) at the given places, without a table.

    A Feistel network permutes [0, 2^bits), the smallest such range that holds [0, n); what falls outside of [0, n)
    goes through again until it falls inside, which keeps it one to one (cycle walking; at most half are outside).
    """
    bits = (n - 1).bit_length()
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << bits // 2) - 1)
    high_mask = np.uint64((1 << bits - bits // 2) - 1)
    result = index.astype(np.uint64)
    walking = np.arange(len(result))
    while len(walking):
        value = result[walking]
        high, low = value >> low_bits, value & low_mask
        for key in keys:
            high = high ^ (_mix(low + key) & high_mask)
            low = low ^ (_mix(high + ~key) & low_mask)
        value = high << low_bits | low
        result[walking] = value
        walking = walking[value >= n]
    return result.astype(np.int64)


class Batches:
    """Batches of windows of `context` + 1 tokens: inputs, and the same shifted by one as targets.

    In every epoch the tokens are cut into windows anew, at an offset drawn from (seed, epoch), and the windows come in
    an order drawn from it too. Within an epoch no token is a target twice.
    """

    def __init__(self, tokens: Tokens, context: int, seed: int, vocabulary: int | None = None) -> None:
        if context < 1:
            raise UserError(f"context is {context}; it must be at least 1")
        if len(tokens) < 2 * context:
            raise UserError(
                f"{_name(tokens)} has {len(tokens)} tokens, too few for context {context}: "
                f"it takes {2 * context}; use more data or a smaller context"
            )
        self.tokens = tokens
        self.context = context
        self.seed = seed
        self.vocabulary = vocabulary
        self.sequences_per_epoch = (len(tokens) - context) // context

    def starts(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """[count]: where the sequences number first, first + 1, … begin."""
        n = self.sequences_per_epoch
        last = first + count
        found = [np.empty(0, np.int64)]
        for epoch in range(first // n, -(-last // n)):
            places = np.arange(max(first, epoch * n), min(last, (epoch + 1) * n), dtype=np.int64) - epoch * n
            keys = _keys(self.seed, epoch, _ROUNDS + 1)
            offset = int(keys[0]) % self.context
            found.append(offset + permute(places, n, keys[1:]) * self.context)
        return np.concatenate(found)

    def batch(self, first: int, count: int, rank: int = 0, world: int = 1) -> npt.NDArray[np.int32]:
        """[count / world, context + 1]: the share of one process, a contiguous slice of the global batch."""
        if count % world:
            raise UserError(f"a batch of {count} sequences cannot be shared equally among {world} processes")
        share = count // world
        return windows(self.tokens, self.starts(first + rank * share, share), self.context, self.vocabulary)


def windows(
    tokens: Tokens, starts: npt.NDArray[np.int64], context: int, vocabulary: int | None = None
) -> npt.NDArray[np.int32]:
    """[n, context + 1] tokens from the starts; an id that the vocabulary does not have is an error."""
    block = tokens.gather(starts, context + 1)
    # As unsigned numbers, so that ids from 2^31 on, negative as int32, are caught by the same pass.
    if vocabulary is not None and block.size and (unsigned := block.view(np.uint32)).max() >= vocabulary:
        row, column = np.argwhere(unsigned >= vocabulary)[0].tolist()
        path, position = tokens.locate(int(starts[row]) + column)
        raise UserError(
            f"{path} has token {unsigned[row, column]} at position {position}, but the vocabulary is {vocabulary}; "
            "use the tokenizer that the file was made with, or a larger vocabulary"
        )
    return block


def validation_windows(tokens: Tokens, context: int, count: int) -> npt.NDArray[np.int64]:
    """Starts of the first `count` windows one after another, in order; fewer where the tokens end before."""
    if len(tokens) < context + 1:
        raise UserError(
            f"{_name(tokens)} has {len(tokens)} tokens, too few for one window of context {context}; "
            "use more validation data or a smaller context"
        )
    return np.arange(min(count, (len(tokens) - 1) // context), dtype=np.int64) * context


def split(block: npt.NDArray[np.int32], device: torch.device) -> tuple[Tensor, Tensor]:
    """[B, T + 1] → inputs and targets on the device, [B, T] int64. They are widened there: half the bytes travel."""
    cuda = device.type == "cuda"
    tensor = torch.from_numpy(block)
    tensor = (tensor.pin_memory() if cuda else tensor).to(device, non_blocking=cuda)
    return tensor[:, :-1].long(), tensor[:, 1:].long()


class Prefetcher(Iterator[tuple[Tensor, Tensor]]):
    """Micro-batches (inputs, targets) without end, built ahead by a thread; on CUDA copied on a stream of their own.

    Item k is always the same: the micro-batches of one process's share of global batch 0 in order, then of batch 1, …
    counted from sequence number `first`. An error in the thread is raised by `next`. Close it, or use it in a `with`.
    """

    def __init__(
        self,
        batches: Batches,
        first: int,
        global_batch: int,
        micro_batch: int,
        device: torch.device | str,
        rank: int = 0,
        world: int = 1,
        depth: int = 4,
    ) -> None:
        if micro_batch < 1 or global_batch < 1 or global_batch % (micro_batch * world):
            raise UserError(
                f"a batch of {global_batch} sequences cannot be cut into micro-batches of {micro_batch} "
                f"on {world} process{'es' * (world > 1)}; make it a multiple of {max(micro_batch, 1) * world}"
            )
        self._batches = batches
        self._first = first + rank * (global_batch // world)
        self._global_batch = global_batch
        self._micro_batch = micro_batch
        self._per_batch = global_batch // world // micro_batch
        self._device = torch.device(device)
        cuda = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if cuda else None  # type: ignore[no-untyped-call]
        self._ready: queue.Queue[tuple[Tensor, Tensor, torch.cuda.Event | None] | BaseException] = queue.Queue(depth)
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="prefetcher", daemon=True)
        self._thread.start()

    def __next__(self) -> tuple[Tensor, Tensor]:
        if self._stop.is_set():
            raise RuntimeError("the prefetcher is closed")
        if self._error is None:
            item = self._ready.get()
            if not isinstance(item, BaseException):
                return self._receive(*item)
            self._error = item
        raise self._error

    def close(self) -> None:
        """Ends the thread and drops what it made; again is fine."""
        self._stop.set()
        while self._thread.is_alive():
            try:
                self._ready.get(timeout=0.01)  # it may be waiting for room
            except queue.Empty:
                self._thread.join(0.01)

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _work(self) -> None:
        try:
            number = 0
            while not self._stop.is_set():
                self._ready.put(self._build(number))
                number += 1
        except BaseException as error:  # raised where the consumer stands
            self._ready.put(error)

    def _build(self, number: int) -> tuple[Tensor, Tensor, torch.cuda.Event | None]:
        batch, micro = divmod(number, self._per_batch)
        first = self._first + batch * self._global_batch + micro * self._micro_batch
        block = self._batches.batch(first, self._micro_batch)
        if self._stream is None:
            return *split(block, self._device), None
        with torch.cuda.stream(self._stream):
            inputs, targets = split(block, self._device)
            return inputs, targets, self._stream.record_event()

    def _receive(self, inputs: Tensor, targets: Tensor, copied: torch.cuda.Event | None) -> tuple[Tensor, Tensor]:
        if copied is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(copied)
            for tensor in (inputs, targets):
                tensor.record_stream(current)  # or its memory could be used again while the step still reads it
        return inputs, targets


def _name(tokens: Tokens) -> str:
    return str(tokens.files[0]) + (f" and {len(tokens.files) - 1} more" if len(tokens.files) > 1 else "")
