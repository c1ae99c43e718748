"""The folder of a run: its settings, metrics, samples and checkpoints, and who may write there."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from ..version import __version__
from .build import recalled, with_recipe
from .checkpoint import MODEL, SUMS, checkpoints_in, damage, drop_after, newest_whole, read_state, step_of, sweep
from .config import Config, as_begun, changed, merged, read_toml, to_toml
from .errors import UserError
from .files import write_atomically
from .parallel import Peers

Row = dict[str, Any]
CONFIG = "config.toml"
LOCK = "lock"


def stored_config(folder: Path) -> Config | None:
    """The settings of the run in a folder, what it is as its checkpoints say; None if there is none."""
    said, began = _written(folder), _begun(folder)
    if began is not None:
        return began if said is None else as_begun(said, began)
    if said is None or not (checkpoints_in(folder / "checkpoints") or (folder / LOCK).exists()):
        return None
    return with_recipe(said)


def _written(folder: Path) -> Config | None:
    path = folder / CONFIG
    return merged(Config(), read_toml(path), source=str(path)) if path.exists() else None


def _begun(folder: Path, config: Config | None = None) -> Config | None:
    """The settings that the newest checkpoint holds, or those given with what their recipe had filled in then."""
    for checkpoint in checkpoints_in(folder / "checkpoints"):
        with contextlib.suppress(OSError, ValueError, KeyError):  # damaged ones are told of where they are used
            state = read_state(checkpoint)
            found = config or merged(Config(), state["config"], source=str(checkpoint / "state.json"))
            return with_recipe(recalled(found, state["groups"]))
    return None


@functools.cache
def origin() -> Row:
    """The version of this library, and its commit where it lies in a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {"version": __version__, "commit": None}
    return {"version": __version__, "commit": done.stdout.strip() or None}


class Lines:
    """Rows of JSON appended to a file. A row the disk will not take waits in memory for the next try."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None
        self._waiting: list[str] = []

    def cut(self, step: int | None) -> None:
        """Removes rows past a step, all if None, and a last line that was not finished."""
        self.close()
        if not self.path.exists():
            return
        kept = []
        there = self.path.read_text(encoding="utf-8", errors="replace")
        for line in there.split("\n"):
            try:
                if step is not None and json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except (ValueError, KeyError, TypeError):
                continue
        if "".join(kept) != there:
            write_atomically(self.path, "".join(kept).encode())

    def add(self, row: Mapping[str, Any]) -> None:
        plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self._waiting.append(json.dumps(plain, ensure_ascii=False) + "\n")

    def flush(self, *, sync: bool = False) -> OSError | None:
        """Writes what waits; what went wrong, if anything. A line is written whole or left for later."""
        try:
            if self._file is None:
                self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115, open as long as the run
            while self._waiting:
                end = self._file.tell()
                try:
                    self._file.write("".join(self._waiting))
                    self._file.flush()
                except OSError:
                    self._abandon(end)
                    raise
                self._waiting.clear()
            if sync:
                os.fsync(self._file.fileno())
        except OSError as wrong:
            return wrong
        return None

    def _abandon(self, end: int) -> None:
        """After a write that failed half way: what reached the file is cut off again."""
        file, self._file = self._file, None
        assert file is not None
        with contextlib.suppress(OSError):  # its buffer cannot be written either
            file.close()
        os.truncate(self.path, end)

    def close(self) -> None:
        if self._waiting:
            self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None


def read_lines(path: Path) -> list[Row]:
    """The rows of a file of metrics; a torn line is left out."""
    rows: list[Row] = []
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                rows.append(row)
    return rows


class Run:
    """A folder opened for training: created, or checked to be of the same run, and locked against a second run.

    Of several processes the first alone changes anything there, checkpoints aside.
    """

    def __init__(self, config: Config, peers: Peers | None = None) -> None:
        self.config = config
        self.folder = Path(config.run)
        self.leads = peers is None or peers.leads
        self.metrics = Lines(self.folder / "metrics.jsonl")
        self.samples = Lines(self.folder / "samples.jsonl")
        self._lock: TextIO | None = None
        with (peers or Peers()).leader_first():
            if self.leads:
                self._open()
            elif not (self.folder / LOCK).exists():
                raise UserError(f"another process made {self.folder}, here it is not to be seen: use a shared disk")

    def _open(self) -> None:
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            ours = (self.folder / LOCK).exists() or checkpoints_in(self.checkpoints)
            if not ours and (foreign := sorted(path.name for path in self.folder.iterdir())):
                raise UserError(f"{self.folder} is not a run's ({', '.join(foreign[:3])}): choose another --run")
            self._lock = self._take()
        try:
            self._settle()
        except BaseException:
            self._lock.close()
            raise

    def _take(self) -> TextIO:
        lock = open(self.folder / LOCK, "a", encoding="utf-8")  # noqa: SIM115, held as long as the run
        if sys.platform != "win32":
            import fcntl

            # Those whom torchrun starts again may meet one of the time before that has not noticed its end yet.
            tries = 60 if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" else 1
            for left in reversed(range(tries)):
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if left:
                        time.sleep(0.5)
                        continue
                    lock.close()
                    wrong = f"another process trains in {self.folder}: stop it, or choose another --run"
                    raise UserError(wrong) from None
        return lock

    def _settle(self) -> None:
        """Checks the settings against those of the run that is there; one without a checkpoint may change them."""
        stored = stored_config(self.folder)
        written = _written(self.folder)
        now = None if written is None else _begun(self.folder, written)
        if stored is not None and now is not None and (edited := changed(stored, now)):
            raise UserError(
                f"{self.folder / CONFIG} says of the run what its checkpoints do not ({'; '.join(edited)}): set it "
                "back, or start from it by `anytime branch`"
            )
        differences = [] if stored is None else changed(stored, self.config)
        if differences and checkpoints_in(self.checkpoints):
            raise UserError(
                f"{self.folder} holds a run with other settings ({'; '.join(differences)}): choose another --run, "
                "leave these settings as they were, or start from it by `anytime branch`"
            )
        with self._writing():
            self.checkpoints.mkdir(exist_ok=True)
            for folder in (self.folder, self.checkpoints, self.data):
                sweep(folder)

    def begin(self) -> None:
        """Takes the settings for the run's own, once they have shown to work."""
        with self._writing():
            if self.leads and (not (self.folder / CONFIG).exists() or stored_config(self.folder) != self.config):
                write_atomically(self.folder / CONFIG, to_toml(self.config).encode())

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as wrong:
            raise UserError(f"cannot write to the run's folder {self.folder}: {wrong.strerror or wrong}") from None

    def go_back_to(self, found: Path | None) -> None:
        """Removes what is past a checkpoint: damaged ones, rows of metrics and samples; all of them if None."""
        if not self.leads:
            return
        with self._writing():
            if found is not None:
                drop_after(self.checkpoints, found)
            for lines in (self.metrics, self.samples):
                lines.cut(None if found is None else step_of(found))

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def data(self) -> Path:
        """Where data that the run makes for itself lies."""
        return self.folder / "data"

    def milestone(self, step: int) -> bool:
        c = self.config
        return step in c.keep_at or (c.keep_every > 0 and step % c.keep_every == 0)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.metrics.close()
        self.samples.close()
        if self._lock is not None:
            self._lock.close()


def find_checkpoint(path: Path, at: int | None = None, warn: Callable[[str], None] | None = None) -> Path:
    """A checkpoint by its own folder, or a run's newest whole one, or that of a step."""
    if (path / MODEL).exists():
        if at is not None:
            raise UserError(f"{path} is one model, it has no step to choose: leave out --at, or name the run's folder")
        if (path / SUMS).exists() and (wrong := damage(path)) is not None:
            raise UserError(f"the checkpoint {path} is damaged: {wrong}; use another of the run")
        return path
    if not path.is_dir():
        raise UserError(f"there is no run or model at {path}")
    folder = path / "checkpoints"
    there = [step_of(p) for p in checkpoints_in(folder)]
    if not there:
        raise UserError(f"{path} has no checkpoint yet")
    if at is not None and at not in there:
        raise UserError(f"{path} keeps no step {at}; it keeps {some(sorted(there))}")
    damaged: list[str] = []
    found = newest_whole(folder, damaged.append, at=at)
    if found is None:
        raise UserError(damaged[0])
    for text in damaged:
        if warn is not None:
            warn(text)
    return found


def some(numbers: Iterable[int]) -> str:
    """1, 2, 3, …, 9"""
    every = [str(n) for n in numbers]
    return ", ".join(every if len(every) <= 8 else [*every[:5], "…", *every[-2:]])
