"""`anytime sweep`: a search for settings by optuna, with its trials on disk, that goes on where it stopped.

The file is one of settings, as of `anytime train`, with a table `space` besides:

    preset = "2M"
    until = "1150 steps"

    [space]
    "optimizer.lr" = { low = 0.002, high = 0.04, log = true }
    "optimizer.momentum" = [0.8, 0.9, 0.95]

Trials that fall behind the others at the same step are ended early, by the loss at X, but none within twice its warmup:
high rates are ahead there.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from ..train.build import build_optimizer, settled, warmup
from ..train.config import Config, merged, read_toml, to_toml
from ..train.errors import UserError
from ..train.files import make_folder, write_atomically
from ..train.loop import train
from ..train.model import GPT
from ..train.presets import preset
from .grid import deaf, stoppable

Values = dict[str, Any]


@dataclass(frozen=True)
class Range:
    """Numbers from low to high, whole ones if both are; or, with `choices`, one of these."""

    name: str
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    choices: tuple[Any, ...] = ()

    @classmethod
    def of(cls, name: str, said: Any) -> Range:
        if isinstance(said, list) and said:
            return cls(name, choices=tuple(said))
        known = isinstance(said, Mapping) and {"low", "high"} <= said.keys() <= {"low", "high", "log"}
        if not known or not all(isinstance(said[key], (int, float)) for key in ("low", "high")):
            raise UserError(
                f"space: {name} is {said!r}, must be a list of values, or {{ low = 0.001, high = 0.1, log = true }}"
            )
        if not said["low"] < said["high"] or (said.get("log") and said["low"] <= 0):
            raise UserError(
                f"space: {name} goes from {said['low']} to {said['high']}: low must be below high, above 0 in a log"
            )
        return cls(name, said["low"], said["high"], bool(said.get("log", False)))

    def suggest(self, trial: Any) -> None:
        if self.choices:  # as text, for a choice may be a list
            trial.suggest_categorical(self.name, [json.dumps(choice) for choice in self.choices])
        elif isinstance(self.low, int) and isinstance(self.high, int):
            trial.suggest_int(self.name, self.low, self.high, log=self.log)
        else:
            trial.suggest_float(self.name, self.low, self.high, log=self.log)

    def value(self, parameter: Any) -> Any:
        return json.loads(parameter) if self.choices else parameter


@dataclass(frozen=True)
class Space:
    """What is searched, and the settings around it."""

    base: Values
    ranges: tuple[Range, ...]

    @classmethod
    def read(cls, path: Path, **more: Any) -> Space:
        values = read_toml(path)
        said = values.pop("space", None)
        if not isinstance(said, Mapping) or not said:
            raise UserError(f"{path} has no table [space] of what to search")
        space = cls({**values, **more}, tuple(Range.of(name, of) for name, of in said.items()))
        first = {r.name: (r.choices or (r.low,))[0] for r in space.ranges}
        for r in space.ranges:  # that all of it is legal
            for value in r.choices or (r.low, r.high):
                config = settled(space.config({**first, r.name: value}))
                with torch.device("meta"):
                    build_optimizer(GPT(config.model), config.optimizer)
        return space

    def config(self, found: Mapping[str, Any]) -> Config:
        """The settings of a trial, `found` by the full names of the settings."""
        base = dict(self.base)
        name = base.pop("preset", "")
        config = merged(merged(Config(), preset(name) if name else {}), base, source="the settings of the sweep")
        for key, value in found.items():
            *tables, last = key.split(".")
            change: Values = {last: value}
            for table in reversed(tables):
                change = {table: change}
            config = merged(config, change, source="space")
        if not config.until:
            raise UserError("a sweep needs an end for its trials: say until = '600 steps' in its file")
        return config


def sweep(
    space: Space,
    out: Path,
    *,
    trials: int = 20,
    jobs: int = 1,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[float, Config]:
    """So many trials in all, those of an earlier call counted in, several at once; the best loss and its settings."""
    optuna = needs_optuna()
    if jobs < 1 or trials < 1:
        raise UserError(f"jobs is {jobs} and trials {trials}, both must be at least 1")
    make_folder(out)
    study = open_study(out, seed)
    same_space(study, space, out)
    study.sampler = sampler(seed + len(study.trials))  # or the first ones would be drawn again
    running: dict[Future[Any], Any] = {}
    # Those that were broken off: each goes on from its last checkpoint.
    broken = [t for t in study.trials if t.state == optuna.trial.TrialState.RUNNING]
    again = [optuna.trial.Trial(study, t._trial_id) for t in broken]
    with stoppable(), ProcessPoolExecutor(jobs, get_context("spawn"), deaf) as pool:
        while True:
            while len(running) < jobs and (again or len(study.trials) < trials):
                trial = again.pop(0) if again else study.ask()
                for r in space.ranges:
                    r.suggest(trial)
                found = {r.name: r.value(trial.params[r.name]) for r in space.ranges}
                running[pool.submit(attempt, space, found, out, trial.number, trial._trial_id, seed)] = trial
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                trial = running.pop(future)
                state, loss = future.result()
                if state == "stopped":
                    raise KeyboardInterrupt
                kept = optuna.trial.TrialState.COMPLETE if state == "done" else optuna.trial.TrialState.PRUNED
                study.tell(trial, loss if state == "done" else None, kept)
                values = ", ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                                   for name, value in trial.params.items())  # fmt: skip
                ended = f"loss {loss:.4f}, {state}" if math.isfinite(loss) else state
                say(f"trial {trial.number}: {ended}; {values}")
                write_rows(study, out, space)
    if not any(t.state == optuna.trial.TrialState.COMPLETE for t in study.trials):
        raise UserError("no trial came to its end: all diverged; search lower rates")
    best = space.config({r.name: r.value(study.best_params[r.name]) for r in space.ranges})
    write_atomically(out / "best.toml", to_toml(best).encode())
    return float(study.best_value), best


def attempt(space: Space, found: Values, out: Path, number: int, trial_id: int, seed: int) -> tuple[str, float]:
    """A trial, in a process of its own: "done", "behind", "diverged" or "stopped", and its last loss."""
    optuna = needs_optuna()
    trial = optuna.trial.Trial(open_study(out, seed), trial_id)
    config = merged(space.config(found), {"run": str(out / "runs" / f"trial-{number:04d}")})
    loss = math.inf

    def look(row: Mapping[str, Any]) -> None:
        nonlocal loss
        if row["kind"] == "eval" and row["step"]:
            loss = float(row["loss"])
            trial.report(loss, row["step"])
            if row["step"] > 2 * warmup(config.optimizer) and trial.should_prune():
                raise optuna.TrialPruned

    try:
        result = train(config, listeners=[look])
    except optuna.TrialPruned:
        return "behind", loss
    except UserError as wrong:
        if not str(wrong).startswith("the loss is "):
            raise
        return "diverged", math.inf
    if result.reason in ("SIGINT", "SIGTERM"):
        return "stopped", loss
    return "done", loss if result.evaluation is None else result.evaluation.loss


def needs_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise UserError('a sweep needs optuna: pip install "anytime-optim[paper]"') from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def open_study(out: Path, seed: int) -> Any:
    """The study of a folder, new or not."""
    optuna = needs_optuna()
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    return optuna.create_study(
        study_name="sweep",
        storage=JournalStorage(JournalFileBackend(str(out / "journal.log"))),
        sampler=sampler(seed),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4),
        load_if_exists=True,
    )


def sampler(seed: int) -> Any:
    return needs_optuna().samplers.TPESampler(seed=seed, constant_liar=True)


def same_space(study: Any, space: Space, out: Path) -> None:
    """Refuses trials of another search, or around other settings: their losses do not compare."""
    said = json.loads(json.dumps({"settings": space.base, "space": [dataclasses.astuple(r) for r in space.ranges]}))
    held = study.user_attrs.get("searched")
    if held is None:
        study.set_user_attr("searched", said)
    elif held != said:
        what = " and ".join(key for key in said if said[key] != held[key])
        raise UserError(f"the trials in {out} were made with other {what}: choose another --out")


def write_rows(study: Any, out: Path, space: Space) -> None:
    """All trials, a JSON object a line."""
    rows: Sequence[Values] = [
        {
            "trial": t.number,
            "state": t.state.name.lower(),
            "loss": t.value,
            "settings": {r.name: r.value(t.params[r.name]) for r in space.ranges if r.name in t.params},
            "losses": {str(step): round(loss, 5) for step, loss in sorted(t.intermediate_values.items())},
        }
        for t in study.trials
    ]
    write_atomically(out / "trials.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
