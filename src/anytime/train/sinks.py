"""Metric rows as they come, handed on to TensorBoard, trackio or Weights & Biases.

A sink never stops training: what goes wrong in one is told once, as a warning, and the sink is silent from then on.
"""

from __future__ import annotations

import difflib
import importlib
import math
import os
import uuid
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

from .errors import UserError
from .runs import Row

PROJECT = "anytime"
#: Kind of row to what its numbers are called; the loss of an evaluation is named by its sequence.
NAMES = {
    "step": {"loss": "loss/train", "lr": "step/lr", "grad_norm": "step/grad_norm"},
    "speed": {
        "tokens": "progress/tokens",
        "seconds": "progress/seconds",
        "tokens_per_second": "speed/tokens_per_second",
        "mfu": "speed/mfu",
        "data_wait": "speed/data_wait",
        "memory": "speed/memory",
    },
    "average": {
        "c": "average/c",
        "beta": "average/beta",
        "distance": "average/distance",
        "rho": "average/rho",
        "alpha": "average/alpha",
        "update_rms": "average/update_rms",
    },
    "eval": {"loss": "loss/", "perplexity": "eval/perplexity", "bits_per_byte": "eval/bits_per_byte"},
    "checkpoint": {"save_seconds": "speed/save_seconds"},
}


class Listener(Protocol):
    """What the training loop calls with each row, and closes at its end."""

    def __call__(self, row: Row) -> None: ...

    def close(self) -> None: ...


def scalars(row: Row) -> dict[str, float]:
    """The finite numbers of a row under the names they are logged by."""
    found = {}
    for key, name in NAMES.get(row["kind"], {}).items():
        value = row.get(key)
        if isinstance(value, (int, float)) and math.isfinite(value):
            found[name + str(row.get("sequence", "x")) if name.endswith("/") else name] = float(value)
    return found


def open_sinks(names: Sequence[str], folder: Path, name: str, config: dict[str, Any]) -> list[Listener]:
    """One sink for each name; `folder` is the run's, `name` what it is called there.

    Opened again on the same folder, a sink goes on with the same run.
    """
    for wanted in names:
        if wanted not in SINKS:
            near = difflib.get_close_matches(wanted, SINKS, 1, 0.0)[0]
            raise UserError(f"there is no sink {wanted!r}; did you mean {near!r}? (known: {', '.join(SINKS)})")
    return [SINKS[wanted](folder, name, config) for wanted in dict.fromkeys(names)]


class _Sink(ABC):
    """Guards what a sink does: the first exception is its last."""

    package: ClassVar[str]
    module: ClassVar[str]

    def __init__(self, folder: Path, name: str, config: dict[str, Any]) -> None:
        self.folder = folder
        self.name = name
        self.config = config
        self._usable, self._begun = True, False
        try:
            self.tool: Any = importlib.import_module(self.module)
        except ImportError as error:
            raise UserError(
                f'the sink {self.package} needs its package: pip install "anytime-optim[{self.package}]"'
            ) from error

    def __call__(self, row: Row) -> None:
        if not self._usable:
            return
        try:
            if not self._begun:
                self._begin(row["step"])
                self._begun = True
            values = scalars(row)
            if values:
                self._log(row["step"], values)
        except Exception as error:  # whatever it is, training goes on
            self._give_up(error)

    def close(self) -> None:
        if self._usable and self._begun:
            try:
                self._finish()
            except Exception as error:  # as above
                self._give_up(error)
        self._usable = False

    def _give_up(self, error: Exception) -> None:
        self._usable = False
        text = f"{self.package} failed and gets no more rows: {type(error).__name__}: {error}"
        warnings.warn(text, RuntimeWarning, stacklevel=3)

    @abstractmethod
    def _begin(self, step: int) -> None:
        """Open or resume the run, of which `step` was the last step done."""

    @abstractmethod
    def _log(self, step: int, values: dict[str, float]) -> None: ...

    @abstractmethod
    def _finish(self) -> None: ...


class TensorBoard(_Sink):
    """Event files in RUN/tensorboard."""

    package = "tensorboard"
    module = "torch.utils.tensorboard"

    def _begin(self, step: int) -> None:
        # Steps that a killed run logged after its last checkpoint come again: TensorBoard drops their first version.
        self._writer = self.tool.SummaryWriter(str(self.folder / "tensorboard"), purge_step=step + 1 if step else None)

    def _log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def _finish(self) -> None:
        self._writer.close()


class Trackio(_Sink):
    """A local trackio project; the run's name and an id kept in RUN/trackio.id make the run."""

    package = "trackio"
    module = "trackio"

    def _begin(self, step: int) -> None:
        name = f"{self.name}-{_kept_id(self.folder / 'trackio.id')}"
        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        self._run = self.tool.init(project=project, name=name, config=self.config, resume="allow", embed=False)

    def _log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def _finish(self) -> None:
        self.tool.finish()


class Wandb(_Sink):
    """A Weights & Biases run whose id is kept in RUN/wandb.id."""

    package = "wandb"
    module = "wandb"

    def _begin(self, step: int) -> None:
        self._run = self.tool.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=self.name,
            id=_kept_id(self.folder / "wandb.id"),
            resume="allow",
            dir=str(self.folder),
            config=self.config,
            settings=self.tool.Settings(console="off"),  # the live display has the terminal
        )
        # wandb's own step may not go back, as it does after a kill; ours is a number like the others.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def _log(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step, **values})

    def _finish(self) -> None:
        self._run.finish()


SINKS: dict[str, type[_Sink]] = {sink.package: sink for sink in (TensorBoard, Trackio, Wandb)}


def _kept_id(path: Path) -> str:
    """The id in this file, made on first use."""
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:8] + "\n", encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()
