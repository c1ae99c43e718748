"""Many runs, each a row of results: what is there is skipped, what broke goes on, several at once.

A row is known by the run's name, its seed and a hash of its settings, so that changed settings are run again. A run
that diverges is a row too, with `failed`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import shutil
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ..train.config import DataConfig, read_toml
from ..train.data import PYTHON, open_data, write_python
from ..train.device import choose_device
from ..train.errors import UserError
from ..train.files import make_folder
from ..train.runs import read_lines
from .run import Machine, Row, Run, execute

#: Seconds from a run's start to its first step, about: compiling is most of it.
STARTING = 20.0


def longest_first(runs: Iterable[Run]) -> list[Run]:
    """So that none is left over at the end, alone."""
    return sorted(runs, key=lambda run: -run.tokens)


def read_grid(path: Path) -> list[Run]:
    """Of a TOML file: a table `base` of settings, a list `seeds`, and a table `runs` of names and their settings."""
    grid = read_toml(path)
    for key, kind in (("base", dict), ("seeds", list), ("runs", dict)):
        if not isinstance(grid.get(key), kind):
            raise UserError(f"{path}: {key} is missing, or not a {'list' if kind is list else 'table'}")

    def over(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
        both = {k: over(base[k], more[k]) for k in base.keys() & more.keys() if isinstance(base[k], dict)}
        return {**base, **more, **both}

    return [Run(name, seed, over(grid["base"], more)) for seed in grid["seeds"] for name, more in grid["runs"].items()]


@dataclass(frozen=True)
class State:
    """How far a grid is, for who shows it."""

    done: Sequence[Row]
    running: Mapping[str, Run]  # by folder
    left: int
    seconds: float


Show = Callable[[State], None]


class Grid:
    """A file of rows, and the processes that fill it. Use it in a `with` block, which ends them.

    Args:
        path: the rows, a JSON object a line.
        work: where the folders of runs are, kept.
        data: a folder of tokens, or "python".
        jobs: runs at once, each in a process of its own.
        seconds: no run is started after so long, nor one that would end later by the speed of the rows there are.
    """

    def __init__(
        self,
        path: Path,
        work: Path,
        *,
        data: str = PYTHON,
        jobs: int = 1,
        device: str = "",
        seconds: float | None = None,
    ) -> None:
        if jobs < 1:
            raise UserError(f"jobs is {jobs}, must be at least 1")
        self.path, self.work, self.data, self.jobs, self.seconds = path, work, data, jobs, seconds
        self.device = device
        self._pool: Executor | None = None
        self.rows: dict[str, Row] = {row["key"]: row for row in read_lines(path) if "key" in row}

    def __enter__(self) -> Grid:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def missing(self, runs: Iterable[Run]) -> list[Run]:
        """Those without a row, each once."""
        return list({run.key: run for run in runs if run.key not in self.rows}.values())

    @functools.cached_property
    def machine(self) -> Machine:
        data = self.data
        if data == PYTHON:  # once, not for every run
            data = str(self.work / "python")
            write_python(Path(data))
        opened = open_data(DataConfig(path=data), self.work)
        train, tokenizer = opened.train, opened.tokenizer
        fingerprint = train.fingerprint()
        for row in self.rows.values():
            if row.get("data", fingerprint) != fingerprint:
                raise UserError(
                    f"the rows in {self.path} come from other tokens than {self.data}: choose another --out"
                )
        device = choose_device(self.device)
        threads = max(1, torch.get_num_threads() // self.jobs) if device.type == "cpu" else 0
        vocabulary = None if tokenizer is None else tokenizer.vocabulary
        return Machine(os.path.abspath(data), len(train), fingerprint, str(device), threads, self.jobs, vocabulary)

    def fill(self, runs: Iterable[Run] | Callable[[], Iterable[Run]], show: Show | None = None) -> None:
        """Runs what is missing, in this order; a row is on disk as soon as its run is done. A function is asked again
        after every row, so that what is wanted may follow from what was found."""
        wanted = runs if callable(runs) else functools.partial(list[Run], list(runs))
        if not self.missing(wanted()):
            return
        with stoppable():
            self._go(wanted, show)

    def _waiting(self, runs: Iterable[Run], running: Iterable[tuple[str, Run]]) -> list[Run]:
        """Those without a row that can be started beside the ones that are running."""
        missing = self.missing(runs)
        folders = {str(run.folder(self.work)): run for run in missing}
        if len(folders) < len(missing):
            twice = next(run for run in missing if folders[str(run.folder(self.work))] is not run)
            raise UserError(
                f"there are two runs named {twice.name!r} of seed {twice.seed}, one the beginning of the other"
            )
        busy = {folder for folder, _ in running}
        return [run for folder, run in folders.items() if folder not in busy]

    def _next(self, waiting: list[Run], left: float) -> Run | None:
        """Of those waiting, the first that ends in time; where no speed is known, the shortest."""
        speed = self.speed()
        if left == math.inf:
            fits = waiting[:1]
        elif speed is None:
            fits = [min(waiting, key=lambda run: run.tokens)] if waiting and left > 0 else []
        else:
            fits = [run for run in waiting if STARTING + run.tokens / speed < left][:1]
        for run in fits:
            waiting.remove(run)
            return run
        return None

    def _go(self, wanted: Callable[[], Iterable[Run]], show: Show | None) -> None:
        began, done = time.monotonic(), list[Row]()
        running: dict[Future[Row | None], tuple[str, Run]] = {}
        waiting = self._waiting(wanted(), ())

        def tell() -> None:
            if show is not None:
                show(State(done, dict(running.values()), len(waiting), time.monotonic() - began))

        try:
            while True:
                left = math.inf if self.seconds is None else began + self.seconds - time.monotonic()
                while len(running) < self.jobs and (run := self._next(waiting, left)) is not None:
                    folder = run.folder(self.work)
                    running[self._submit(execute, run, folder, self.machine)] = (str(folder), run)
                tell()
                if not running:
                    break
                finished = wait(running, timeout=0.5, return_when=FIRST_COMPLETED).done
                for future in finished:
                    del running[future]
                    row = future.result()
                    if row is None:
                        raise KeyboardInterrupt
                    self._add(row)
                    done.append(row)
                if finished:
                    waiting = self._waiting(wanted(), running.values())
        except BrokenProcessPool:
            self._pool = None
            raise UserError(
                "a process was killed, perhaps for want of memory: the same command goes on, try it with fewer --jobs"
            ) from None
        except BaseException:
            wait(running)  # each saves where it stands, or ends as it would have
            raise

    def _submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        if self.jobs == 1:
            future: Future[Any] = Future()
            future.set_result(work(*arguments))
            return future
        if self._pool is None:
            self._pool = ProcessPoolExecutor(self.jobs, get_context("spawn"), deaf)
        return self._pool.submit(work, *arguments)

    def _add(self, row: Row) -> None:
        self.rows[row["key"]] = row
        make_folder(self.path.parent)
        with self.path.open("a+b") as file:
            file.seek(max(0, file.tell() - 1))
            torn = file.read() not in (b"", b"\n")
            file.write(b"\n" * torn + json.dumps(row, ensure_ascii=False).encode() + b"\n")

    # ------------------------------------------------------------------- cost

    def estimate(self, runs: Iterable[Run], speed: float | None = None, *, probe: bool = True) -> Estimate:
        """What is missing, and how long it takes, by the rows there are, by a stated speed, or by a few steps."""
        missing = self.missing(runs)
        tokens = sum(run.tokens for run in missing)
        if missing:
            speed = self.speed() or speed
            if speed is None and probe:
                speed = self._probe(missing[0])
        if speed is None:
            return Estimate(len(missing), tokens, None)
        longest = max((run.tokens for run in missing), default=0)
        return Estimate(len(missing), tokens, max(tokens / self.jobs, longest) / speed)

    def speed(self) -> float | None:
        """Tokens a second of one run, by the rows of as many at once, or of any."""
        alike = [r for r in self.rows.values() if r.get("tokens_per_second") and "failed" not in r]
        alike = [r for r in alike if r["jobs"] == self.jobs] or alike
        return statistics.median(r["tokens"] / max(r["seconds"], 1e-9) for r in alike) if alike else None

    def _probe(self, run: Run) -> float:
        """Tokens a second of one of as many runs at once as there will be."""
        settings = {"until": "30 steps", "eval_per_doubling": 0, "eval_at": [], "log_every": 10, "checkpoint_every": 0}
        tries = [Run(f"probe {i}", run.seed, {**run.settings, **settings, "keep_at": []}) for i in range(self.jobs)]
        tries = [dataclasses.replace(t, settings=_without_end(t.settings)) for t in tries]
        with contextlib.ExitStack() as stack:
            futures = []
            for t in tries:
                folder = t.folder(self.work)
                stack.callback(shutil.rmtree, folder, ignore_errors=True)
                futures.append(self._submit(execute, t, folder, self.machine))
            rows = [future.result() for future in futures]
        if None in rows:
            raise KeyboardInterrupt
        return float(statistics.median(row["tokens_per_second"] for row in rows))


def _without_end(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The horizon of a schedule left out, for it would not suit a run this short."""
    optimizer = {k: v for k, v in settings.get("optimizer", {}).items() if k not in ("horizon", "schedule")}
    return {**settings, "optimizer": optimizer}


def deaf() -> None:
    """In a process that waits: signals are for those that train, who then save, and for the one who started them."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM is as Ctrl-C, and reaches the processes that train as well: a terminal tells only of Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        for child in active_children():
            child.terminate()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass(frozen=True)
class Estimate:
    """Of what is missing; seconds None where nobody knows."""

    runs: int
    tokens: int
    seconds: float | None

    def __str__(self) -> str:
        if not self.runs:
            return "nothing to run"
        about = "" if self.seconds is None else f", about {duration(self.seconds)}"
        return f"{self.runs} run{'s' * (self.runs > 1)}, {self.tokens:,} tokens{about}"


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"
