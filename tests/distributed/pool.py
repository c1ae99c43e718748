"""Processes that stay, connected by gloo, and run functions together: starting them takes longer than most tests."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


def _serve(rank: int, world: int, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
        pipe.send(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", pipe.recv(), world, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        function, arguments = task
        try:
            pipe.send((True, function(*arguments)))
        except BaseException as error:
            pipe.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


class Pool:
    """`world` processes; a call that fails or takes too long ends them, and the next call starts others."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._processes: list[tuple[Any, Connection]] = []

    def __call__(self, function: Callable[..., Any], *arguments: Any, timeout: float = 120) -> list[Any]:
        """function(*arguments) in every process; what it returned, by rank."""
        results = self.try_(function, *arguments, timeout=timeout)
        failed = [f"process {rank}: {value}" for rank, (fine, value) in enumerate(results) if not fine]
        if failed:
            raise AssertionError("\n".join(failed))
        return [value for _, value in results]

    def try_(self, function: Callable[..., Any], *arguments: Any, timeout: float = 120) -> list[tuple[bool, Any]]:
        """The same; whether each did it, and its result or the words of its error."""
        if not self._processes:
            self._start()
        for _, pipe in self._processes:
            pipe.send((function, arguments))
        results: list[tuple[bool, Any]] = []
        end = time.monotonic() + timeout
        for rank, (process, pipe) in enumerate(self._processes):
            failed = not all(fine for fine, _ in results)
            if not pipe.poll(min(2.0, timeout) if failed else max(0.0, end - time.monotonic())):
                results.append((False, f"no answer in {timeout} s"))
                continue
            try:
                results.append(pipe.recv())
            except EOFError:
                results.append((False, f"process {rank} died with {process.exitcode}"))
        if not all(fine for fine, _ in results):
            self.close()
        return results

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed.tensor", "torch.distributed.fsdp", "anytime"])
        for rank in range(self.world):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append((process, mine))
        port = self._processes[0][1].recv()
        for _, pipe in self._processes[1:]:
            pipe.send(port)

    def close(self) -> None:
        for process, pipe in self._processes:
            pipe.close()
            process.kill()
            process.join()
        self._processes = []
