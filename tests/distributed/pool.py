"""Processes that stay, connected by gloo, and run functions together: starting them takes longer than most tests."""

from __future__ import annotations

import multiprocessing
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


def _serve(rank: int, world: int, port: int, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0)
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
        for rank, (process, pipe) in enumerate(self._processes):
            if not pipe.poll(timeout):
                results.append((False, f"no answer in {timeout} s"))
                timeout = 1
                continue
            try:
                results.append(pipe.recv())
            except EOFError:
                results.append((False, f"process {rank} died with {process.exitcode}"))
        if not all(fine for fine, _ in results):
            self.close()
        return results

    def _start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        for rank in range(self.world):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append((process, mine))

    def close(self) -> None:
        for process, pipe in self._processes:
            pipe.close()
            process.kill()
            process.join()
        self._processes = []
