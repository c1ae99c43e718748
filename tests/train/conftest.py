"""Tiny runs for the tests of the loop, of checkpoints and of run folders: one model, one text, a few steps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anytime import cli
from anytime.train import checkpoint
from anytime.train.config import Config, merged, to_toml
from anytime.train.loop import Result, train
from anytime.train.runs import read_lines
from anytime.train.shards import write_shard
from anytime.train.tokenizer import BytesTokenizer

TINY: dict[str, Any] = {
    "model": {"vocabulary": 256, "layers": 1, "width": 32, "head": 16, "context": 32},
    "optimizer": {"lr": 0.01, "warmup_steps": 4, "clip": 1.0},
    "batch_size": 2,
    "eval_per_doubling": 0,
    "eval_tokens": 256,
    "checkpoint_every": 4,
    "log_every": 1,
    "device": "cpu",
    "threads": 1,
}

# Imports once and forks a child for every line of orders: a start of Python and torch for each would take seconds.
# A child is told to kill itself at the n-th call that changes the disk, of the thread named.
FORKS = """
import json, os, shutil, signal, sys, threading
from pathlib import Path
import anytime.cli, anytime.train.display, anytime.train.loop, anytime.train.sinks, tyro
from anytime.storage import regions
from anytime.train import checkpoint

def child(order):
    with open(order["output"], "ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.chdir(order["folder"])
    if order["kill_at"] is not None:
        watch(order["thread"], order["kill_at"])
    sys.exit(anytime.cli.main(order["arguments"]))

def watch(thread, kill_at):
    seen = 0
    def event(name):
        nonlocal seen
        if threading.current_thread().name == thread:
            if seen == kill_at:
                os.write(1, f"killed at {name}\\n".encode())
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1
    def wrap(place, name):
        plain = getattr(place, name)
        def call(*given, **named):
            event(name)
            return plain(*given, **named)
        setattr(place, name, call)
    for name in ("fsync", "rename", "replace", "truncate", "unlink", "mkdir", "rmdir"):
        wrap(os, name)
    plain_text, plain_tensors = Path.write_text, regions.save_file
    def write_text(path, text, **named):
        event("write_text")
        plain_text(path, text[: len(text) // 2], **named)
        event("half of write_text")
        return plain_text(path, text, **named)
    def save_file(tensors, path):
        event("save_file")
        plain_tensors(tensors, path)
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        event("half of save_file")
        plain_tensors(tensors, path)
    Path.write_text, checkpoint.save_file, regions.save_file = write_text, save_file, save_file

for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        child(json.loads(line))
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Bench:
    """Makes runs of the tiny model in one folder, and looks at what they left."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.folder, self.data = folder, data

    def config(self, name: str, **changes: Any) -> Config:
        values = {**TINY, "data": {"path": str(self.data)}, "run": str(self.folder / name)}
        for key, value in changes.items():
            values[key] = {**values.get(key, {}), **value} if isinstance(value, Mapping) else value
        return merged(Config(), values)

    def train(self, name: str, listeners: Any = (), warn: Any = None, **changes: Any) -> Result:
        """A warning is an error unless someone listens."""
        return train(self.config(name, **changes), listeners=listeners, warn=warn or refuse)

    def arguments(self, name: str, *more: str, **changes: Any) -> list[str]:
        """Of the command that trains the run `name`."""
        file = self.folder / f"{name}.toml"
        file.write_text(to_toml(self.config(name, **changes)), encoding="utf-8")
        return ["train", str(file), *more]

    def command(self, name: str, *more: str, **changes: Any) -> int:
        return cli.main(self.arguments(name, *more, **changes))

    def rows(self, name: str, kind: str) -> list[dict[str, Any]]:
        return [row for row in read_lines(self.folder / name / "metrics.jsonl") if row["kind"] == kind]

    def steps(self, name: str) -> list[int]:
        """Of the checkpoints there, whole or not, in order."""
        return [
            checkpoint.step_of(path) for path in reversed(checkpoint.checkpoints_in(self.folder / name / "checkpoints"))
        ]

    def at(self, name: str, step: int | None = None) -> Path:
        """The folder of a checkpoint, the newest unless told."""
        step = self.steps(name)[-1] if step is None else step
        return self.folder / name / "checkpoints" / checkpoint.name_of(step)

    def content(self, name: str, step: int | None = None) -> dict[str, Any]:
        """All that a checkpoint says of where the run stands; times and places of the run left out."""
        found = self.at(name, step)
        assert checkpoint.damage(found) is None
        state = checkpoint.read_state(found)
        tensors = {f"model/{key}": t for key, t in checkpoint.read_tensors(found / checkpoint.MODEL).items()}
        tensors |= {f"resume/{key}": t for key, t in checkpoint.read_resume(found).items()}
        return {**{key: state[key] for key in ("step", "tokens", "position", "data", "groups")}, **tensors}

    def differences(self, name: str, other: str, step: int | None = None) -> list[str]:
        """What is not equal to the bit between two runs: their checkpoints of a step, and the losses up to there."""
        here, there = self.content(name, step), self.content(other, step)
        wrong = [f"{key} is in one alone" for key in here.keys() ^ there.keys()]
        wrong += [key for key in here.keys() & there.keys() if not equal(here[key], there[key])]
        last = here["step"]
        for run in (name, other):
            numbers = [row["step"] for row in self.rows(run, "step") if row["step"] <= last]
            if numbers != list(range(1, last + 1)):
                wrong.append(f"{run} has rows of the steps {numbers}")
        losses = [[row for row in self.rows(run, "step") if row["step"] <= last] for run in (name, other)]
        return wrong + (["rows of steps"] if losses[0] != losses[1] else [])

    def leftovers(self, name: str) -> list[str]:
        """Whatever has a temporary name."""
        folder = self.folder / name
        return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.name.startswith(".")]

    def files(self, name: str) -> dict[str, bytes]:
        """All content of a run's folder, but for the lock."""
        folder = self.folder / name
        found = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
        return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def refuse(text: str) -> None:
    raise AssertionError(f"a warning came: {text}")


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        bits = [tensor.reshape(-1).view(torch.uint8) for tensor in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
    return bool(a == b)


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of byte tokens with its tokenizer: words in a random order, the same for everyone."""
    folder = tmp_path_factory.mktemp("tiny-data")
    words = np.array(["one ", "two ", "three ", "four ", "five ", "six.\n"])
    for split, count in (("train", 4000), ("val", 200)):
        text = "".join(np.random.default_rng(count).choice(words, count))
        write_shard(folder / f"{split}-000000.bin", np.frombuffer(text.encode(), np.uint8).astype(np.uint16))
    BytesTokenizer().save(folder)
    return folder


@pytest.fixture(scope="session")
def bench_in(tiny_data: Path) -> Callable[[Path], Bench]:
    """For a bench that outlives a test."""
    return lambda folder: Bench(folder, tiny_data)


@pytest.fixture
def bench(tmp_path: Path, tiny_data: Path) -> Bench:
    return Bench(tmp_path, tiny_data)


class Child:
    """A process that runs a command; one at a time."""

    def __init__(self, server: subprocess.Popen[str], output: Path) -> None:
        self._server, self._output = server, output
        self._status: int | None = None
        self.pid = int(self._line())

    def _line(self) -> str:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        assert line, "the process that forks has ended"
        return line

    @property
    def output(self) -> str:
        return self._output.read_text(encoding="utf-8", errors="replace") if self._output.exists() else ""

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        assert self.status() == -signal.SIGKILL

    def status(self) -> int:
        """How it ended, once it has."""
        if self._status is None:
            self._status = int(self._line())
        return self._status

    def end(self) -> None:
        """After a test that failed half way."""
        if self._status is None:
            self.signal(signal.SIGKILL)
            self.status()


class Forks:
    def __init__(self, folder: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        self._folder = folder
        self._count = 0
        self._child: Child | None = None
        self._server = subprocess.Popen(
            [sys.executable, "-c", FORKS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def start(self, arguments: list[str], *, thread: str = "", kill_at: int | None = None) -> Child:
        """Runs `anytime ARGUMENTS`, killed at the n-th call of a thread that changes the disk."""
        if self._child is not None:
            self._child.end()
        self._count += 1
        output = self._folder / f"output-{self._count}"
        order = {"arguments": arguments, "thread": thread, "kill_at": kill_at, "output": str(output)}
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps({**order, "folder": str(self._folder)}) + "\n")
        self._server.stdin.flush()
        self._child = Child(self._server, output)
        return self._child

    def close(self) -> None:
        if self._child is not None:
            self._child.end()
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """Commands in processes of their own."""
    made = Forks(tmp_path_factory.mktemp("forks"))
    yield made
    made.close()
