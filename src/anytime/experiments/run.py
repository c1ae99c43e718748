"""One run of a grid: what it is known by, and its row."""

from __future__ import annotations

import functools
import gc
import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..diagnostics import detailed
from ..train.build import with_recipe
from ..train.checkpoint import checkpoints_in, read_resume, read_state, step_of, unflatten, weights
from ..train.config import FIXED, Config, Until, flat, merged, plain
from ..train.device import device_name
from ..train.errors import Diverged, UserError
from ..train.loop import train
from ..train.presets import preset
from ..train.runs import origin, read_lines
from ..train.use import evaluate_model, load

Row = dict[str, Any]

#: Settings that say how a run is run, or what of it is kept, not what comes out.
HOW = (
    "run", "preset", "seed", "data.path", "data.validation", "data.tokenizer", "parallel.", "device", "threads",
    "micro_batch", "compile", "recompute", "checkpoint_every", "keep_last", "keep_every", "log_every", "log_to",
    "prompt", "report",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One run of a grid. `settings` are as of `anytime train`, `preset` among them.

    watch: what its row holds besides the losses at X: "average" (rows of diagnostics), "layers" (those by layer),
    "sequences" (losses at Y and Z at the steps of `keep_at`).
    """

    name: str
    seed: int
    settings: Mapping[str, Any]
    watch: tuple[str, ...] = ()

    @functools.cached_property
    def config(self) -> Config:
        settings = dict(self.settings)
        base = merged(Config(), preset(settings.pop("preset")) if "preset" in settings else {})
        return with_recipe(merged(merged(base, settings), {"seed": self.seed}))

    @functools.cached_property
    def key(self) -> str:
        """What its row is known by."""
        said = {k: v for k, v in unusual(self.config).items() if not k.startswith(HOW)}
        return f"{self.name} #{self.seed} {digest([said, sorted(self.watch)])}"

    @property
    def steps(self) -> int:
        until = Until.parse(self.config.until)
        if until.kind != "steps":
            raise UserError(f"{self.name}: until is {self.config.until!r}, a run of a grid needs '600 steps'")
        return int(until.value)

    @property
    def tokens(self) -> int:
        return self.steps * self.config.batch_size * self.config.model.context

    def folder(self, work: Path) -> Path:
        """One for runs that differ only in how far they go: the longer one goes on from the shorter."""
        kept = (*FIXED, "batch_size", "eval_tokens")
        same = {k: v for k, v in flat(plain(self.config)).items() if k.startswith(kept)}
        plainly = "".join(c if c.isalnum() or c in "-." else "_" for c in self.name)
        return work / f"{plainly}-{self.seed}-{digest(same)}"

    def execute(self, folder: Path, machine: Machine) -> Row | None:
        """Runs, from where it stands, and gives the row; None if it was asked to stop."""
        return _train(self, folder, machine)


def unusual(config: Config) -> dict[str, Any]:
    """The settings that are not the defaults, by their full names."""
    usual = flat(plain(Config()))
    return {k: v for k, v in flat(plain(config)).items() if v != usual.get(k)}


def digest(thing: Any) -> str:
    return hashlib.sha256(json.dumps(thing, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Machine:
    """Where runs are run."""

    data: str
    tokens: int
    fingerprint: str
    device: str
    threads: int
    jobs: int
    vocabulary: int | None = None  # of the data's tokenizer, where they have one


def execute(run: Run, folder: Path, machine: Machine) -> Row | None:
    return run.execute(folder, machine)


def _train(run: Run, folder: Path, machine: Machine) -> Row | None:
    threads = run.config.threads or machine.threads
    here = {"run": str(folder), "data": {"path": machine.data}, "device": machine.device, "threads": threads}
    config = merged(run.config, here)
    row: Row = {"key": run.key, "name": run.name, "seed": run.seed, "settings": dict(run.settings)}
    try:
        with detailed():  # always: another run may go on from this one, and want them
            result = train(config)
        if result.reason in ("SIGINT", "SIGTERM"):
            return None
    except Diverged as wrong:
        row["failed"] = str(wrong).partition(":")[0]
    finally:
        torch.compiler.reset()
        gc.collect()
    rows = read_lines(folder / "metrics.jsonl")
    row["losses"] = {str(r["step"]): round(r["loss"], 5) for r in rows if r["kind"] == "eval" and r["step"]}
    if "failed" not in row and any(str(s) not in row["losses"] for s in config.eval_at if 0 < s <= run.steps):
        shutil.rmtree(folder)  # another run had passed there without looking
        return run.execute(folder, machine)
    average = [r for r in rows if r["kind"] == "average"]
    if "average" in run.watch or "layers" in run.watch:
        row["average"] = [
            rounded({k: v for k, v in r.items() if k not in ("kind", "layers")}) for r in thin(average, 200)
        ]
    if "layers" in run.watch:
        row["layers"] = [rounded({"step": r["step"], **r["layers"]}) for r in thin(average, 200)]
    if "sequences" in run.watch:
        row |= sequences(folder, config)
    last = next((r for r in reversed(rows) if "seconds" in r), {"seconds": 0.0, "tokens": 0})
    speed = [r["tokens_per_second"] for r in rows if r["kind"] == "speed"]
    row |= {"tokens": last["tokens"], "seconds": round(last["seconds"], 2)}
    row["tokens_per_second"] = speed[-1] if speed else None
    return row | {"jobs": machine.jobs, "data": machine.fingerprint, "device": rows[0]["device"], **origin()}


def blank(run: Run, machine: Machine) -> Row:
    """The row of a run that has not begun."""
    row: Row = {"key": run.key, "name": run.name, "seed": run.seed, "settings": dict(run.settings), "losses": {}}
    row |= {"tokens": 0, "seconds": 0.0, "tokens_per_second": None, "jobs": machine.jobs}
    return row | {"device": device_name(torch.device(machine.device)), **origin()}


def thin(rows: Sequence[Row], limit: int) -> list[Row]:
    """At most so many, evenly spread, the last among them."""
    count = min(limit, len(rows))
    return [rows[(i + 1) * len(rows) // count - 1] for i in range(count)]


def rounded(thing: Any) -> Any:
    """Numbers to six digits."""
    if isinstance(thing, dict):
        return {k: rounded(v) for k, v in thing.items()}
    return float(f"{thing:.6g}") if isinstance(thing, float) else thing


def sequences(folder: Path, config: Config) -> dict[str, dict[str, float]]:
    """Losses at Y and at Z, of the checkpoints of `keep_at`."""
    found: dict[str, dict[str, float]] = {"losses_y": {}, "losses_z": {}}
    for path in reversed(checkpoints_in(folder / "checkpoints")):
        if step_of(path) not in config.keep_at:
            continue
        tensors, groups = read_resume(path), read_state(path)["groups"]
        states = unflatten(tensors)
        y = weights(tensors)
        index = {n: i for group in groups for n, i in zip(group["param_names"], group["params"], strict=True)}
        z = {n: torch.add(y[n], states[i]["d"] * states[i]["beta"]) for n, i in index.items()}
        trained = load(path, device=config.device)
        for name, values in (("losses_y", y), ("losses_z", {**y, **z})):
            trained.model.load_state_dict({n: v.to(torch.float32) for n, v in values.items()}, strict=False)
            loss = evaluate_model(trained, config.data.path, count=config.eval_tokens).loss
            found[name][str(step_of(path))] = round(loss, 5)
    return found
