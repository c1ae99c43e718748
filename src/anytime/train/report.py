"""One self-contained HTML page about one or several runs: curves, settings, samples.

Python reads and thins the rows; page/report.js draws them. The page needs no network, and its content security policy
lets only the two scripts written here run, so that nothing in a run's name, settings or samples can.
"""

from __future__ import annotations

import base64
import hashlib
import html
import importlib
import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from .config import flat, read_toml
from .errors import UserError
from .runs import CONFIG, Row

#: Name of a column to its numbers, None where there is none.
Columns = dict[str, list[float | None]]

PAGE = Path(__file__).with_name("page")
POINTS = 2_000  # of a curve, at most
ALL_POINTS = 8_000  # of the same curve over all runs
EVALUATIONS = 500  # of a run; these are picked, not averaged
SAMPLE_CHARACTERS = 1_000_000  # over all runs
AVERAGE = ("beta", "c", "rho", "alpha", "distance", "update_rms")
SPEED = ("tokens_per_second", "mfu")
STEP = ("loss", "lr", "grad_norm")
EVAL = ("loss", "perplexity", "bits_per_byte")


@dataclass(frozen=True)
class RunData:
    """What a run has written so far."""

    folder: Path
    rows: tuple[Row, ...]  # of metrics.jsonl, without those that a resume took back
    config: Row
    samples: tuple[Row, ...]
    branch: Row | None
    unreadable: int  # lines in the middle of metrics.jsonl
    written: float  # when metrics.jsonl last changed, seconds since 1970

    def of(self, kind: str) -> list[Row]:
        return [row for row in self.rows if row["kind"] == kind]

    def evaluations(self) -> list[Row]:
        """At X, or of the only weights there are, in a run without an average; the last word on each step."""
        rows = self.of("eval")
        at_x = [row for row in rows if row.get("sequence", "x") == "x"]
        return list({row["step"]: row for row in at_x or rows}.values())

    def stopped(self) -> str | None:
        """The reason; None while the run goes on, or if it was killed."""
        stops = self.of("stop")  # a resume took back those before it
        return str(stops[-1].get("reason", "")) if stops else None


def read_run(folder: Path) -> RunData:
    """A run's files, tolerant of a run that is being written, and of lines torn when it was killed."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"there is no metrics.jsonl in {folder}: give the folder of a run that has begun")
    lines = _json_lines(path)
    rows: list[Row] = []
    for row in lines:
        if row is None or not isinstance(row.get("kind"), str) or not _is_step(row.get("step")):
            continue
        if row["kind"] == "start":  # what came after the checkpoint it goes on from is done again
            rows = [old for old in rows if old["step"] <= row["step"] and old["kind"] != "stop"]
        rows.append(row)
    if not rows:
        raise UserError(f"{path} holds no row of metrics yet: wait for the run's first step, or give another folder")
    samples = _json_lines(folder / "samples.jsonl") if (folder / "samples.jsonl").is_file() else []
    return RunData(
        folder=folder,
        rows=tuple(rows),
        config=read_toml(folder / CONFIG) if (folder / CONFIG).is_file() else {},
        samples=tuple(row for row in samples if row is not None and _is_step(row.get("step"))),
        branch=_branch(folder / "branch.json"),
        unreadable=sum(row is None for row in lines[:-1]),
        written=path.stat().st_mtime,
    )


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """The page about these runs, at `out`, which is replaced in one piece."""
    if not runs:
        raise UserError("no runs given: name at least one run folder")
    if out.is_dir():
        raise UserError(f"{out} is a folder: give the file to write, such as {out / 'report.html'}")
    read = [read_run(folder) for folder in runs]
    page = _page(read, _names(runs), datetime.now(timezone.utc))
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_text(page, encoding="utf-8", errors="replace", newline="\n")
            part.replace(out)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}; give another place") from error
    return out


# --- reading ---


def _json_lines(path: Path) -> list[Row | None]:
    """One entry for each line that is not blank, None where it is no JSON object."""
    rows: list[Row | None] = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            rows.append(row if isinstance(row, dict) else None)
    return rows


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _branch(path: Path) -> Row | None:
    """None also while the file is being written."""
    if not path.is_file():
        return None
    try:
        branch = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    return branch if isinstance(branch, dict) else None


def _names(folders: Sequence[Path]) -> list[str]:
    """The folders' names, with as many of the folders above as it takes to tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    names = []
    for own in parts:
        same = [other for other in parts if other != own]
        length = next((n for n in range(1, len(own)) if all(other[-n:] != own[-n:] for other in same)), len(own))
        names.append("/".join(own[-length:]))
    return names


# --- columns ---


def _number(value: object) -> float:
    """NaN for what is absent, null or no number."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


def _array(rows: Sequence[Row], name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array([_number(row.get(name)) for row in rows], dtype=np.float64)


def _fill(rows: Sequence[Row], name: str, everything: Sequence[Row]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A column, by steps between the rows of the run that have it: step rows carry no seconds.

    Past the last known value it goes on at the run's mean rate.
    """
    known = {row["step"]: value for row in everything if math.isfinite(value := _number(row.get(name)))}
    own = _array(rows, name)
    if len(known) < 2:
        return own
    steps = np.array(sorted(known), dtype=np.float64)
    values = np.array([known[int(step)] for step in steps])
    at = _array(rows, "step")
    rate = (values[-1] - values[0]) / (steps[-1] - steps[0])
    between = np.interp(at, steps, values) + rate * np.maximum(at - steps[-1], 0)
    return np.where(np.isfinite(own), own, between)


def _buckets(count: int, limit: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Where buckets of rows begin: half even, half log-spaced, so that the curve is fine on both kinds of axis."""
    if count <= limit:
        return np.arange(count)
    half = limit // 2
    even = np.linspace(0, count, half, endpoint=False)
    spaced = np.geomspace(1, count, limit - half, endpoint=False) - 1
    return np.unique(np.concatenate([even, spaced]).astype(np.int64))


def _curve(rows: Sequence[Row], names: Iterable[str], run: RunData, limit: int) -> Columns:
    """At most `limit` points, each the mean over a bucket of rows; columns without a number are left out."""
    if not rows:
        return {}
    arrays = {"step": _array(rows, "step")}
    arrays |= {name: _fill(rows, name, run.rows) for name in ("tokens", "seconds")}
    arrays |= {name: _array(rows, name) for name in names}
    begins = _buckets(len(rows), limit)
    columns: Columns = {}
    for name, array in arrays.items():
        finite = np.isfinite(array)
        if finite.any():
            counts = np.add.reduceat(finite.astype(np.float64), begins)
            sums = np.add.reduceat(np.where(finite, array, 0.0), begins)
            pairs = zip(sums.tolist(), counts.tolist(), strict=True)
            digits = 10 if name in ("step", "tokens") else 6
            columns[name] = [float(f"{total / n:.{digits}g}") if n else None for total, n in pairs]
    return columns


def _thinned(items: list[Any], limit: int) -> list[Any]:
    """Evenly spread over the list, the last among them."""
    if len(items) <= limit:
        return items
    return [items[-1 - round(i * (len(items) - 1) / max(limit - 1, 1))] for i in range(limit)][::-1]


def _samples(run: RunData, characters: int) -> list[Row]:
    """Those of as many steps as fit."""
    by_step: dict[int, list[Row]] = {}
    for row in run.samples:
        by_step.setdefault(row["step"], []).append({k: str(row.get(k, "")) for k in ("prompt", "text")})
    steps = sorted(by_step)

    def size() -> int:
        return sum(len(s["prompt"]) + len(s["text"]) for step in steps for s in by_step[step])

    while len(steps) > 1 and size() > characters:
        steps = _thinned(steps, len(steps) // 2)
    return [{"step": step, **{k: v[:characters] for k, v in s.items()}} for step in steps for s in by_step[step]]


def _words(value: object) -> str:
    """A setting as it stands in TOML, texts without quotes."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


# --- the page ---


def _last(rows: Iterable[Row], name: str) -> Any:
    """The newest value; None where it is null or in no row."""
    return next((row[name] for row in reversed(list(rows)) if name in row), None)


def _plain(value: object) -> float | int | None:
    """A number that JSON has."""
    number = _number(value)
    return None if not math.isfinite(number) else int(number) if number.is_integer() else number


def _headline(run: RunData) -> Row:
    evaluations, losses = run.evaluations(), [row for row in run.of("step") if "loss" in row]
    last = evaluations[-1] if evaluations else {}
    return {
        "evaluated": bool(last),
        "at_step": last.get("step"),
        "sequence": str(last.get("sequence", "x")),
        **{name: _plain(last.get(name)) for name in EVAL},
        "train_loss": _plain(_last(losses, "loss")),
        "step": run.rows[-1]["step"],
        **{name: _plain(_last(run.rows, name)) for name in ("tokens", "seconds", "tokens_per_second", "parameters")},
        "mfu": _plain(_last(run.of("speed"), "mfu")),
        "device": str(_last(run.rows, "device") or ""),
        "version": str(_last(run.rows, "version") or ""),
        "commit": str(_last(run.rows, "commit") or "")[:12],
        "stopped": run.stopped(),
        "written": datetime.fromtimestamp(run.written, timezone.utc).isoformat(timespec="seconds"),
        "not_finite": sum(row["loss"] is None for row in losses),
        "unreadable": run.unreadable,
        "resumes": max(len(run.of("start")) - 1, 0),
        "branch": None if run.branch is None else {k: str(run.branch.get(k, "")) for k in ("from", "step")},
    }


def _data(run: RunData, name: str, count: int) -> Row:
    """What the page's script needs of one run out of `count`."""
    limit = min(POINTS, ALL_POINTS // count)
    evaluations = run.evaluations()
    shown = _thinned(evaluations, min(EVALUATIONS, limit))
    return {
        "name": name,
        "folder": str(run.folder),
        "headline": _headline(run),
        "eval": {n: [_plain(row.get(n)) for row in shown] for n in ("step", "tokens", "seconds", *EVAL)},
        "evaluations": len(evaluations),
        "train": _curve(run.of("step"), STEP, run, limit),
        "average": _curve(run.of("average"), AVERAGE, run, limit),
        "speed": _curve(run.of("speed"), SPEED, run, limit),
        "settings": {key: _words(value) for key, value in flat(run.config).items()},
        "samples": _samples(run, SAMPLE_CHARACTERS // count),
    }


def _plotly() -> str:
    try:
        offline = importlib.import_module("plotly.offline")
    except ImportError as error:
        raise UserError('the report needs plotly: pip install "anytime-optim[train]"') from error
    script: str = offline.get_plotlyjs()
    return script.replace("\r\n", "\n").replace("\r", "\n")  # as browsers read it before they hash it


def _page(runs: Sequence[RunData], names: Sequence[str], now: datetime) -> str:
    data = {
        "made": now.isoformat(timespec="seconds"),
        "runs": [_data(run, name, len(runs)) for run, name in zip(runs, names, strict=True)],
    }
    own, plotly = (PAGE / "report.js").read_text(encoding="utf-8"), _plotly()
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in (own, plotly))
    pieces = {
        "title": html.escape(", ".join(names)),
        "policy": " ".join(f"'sha256-{digest}'" for digest in digests),
        "style": (PAGE / "report.css").read_text(encoding="utf-8"),
        "script": own,
        "plotly": plotly,
        "data": json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
    }
    template = (PAGE / "report.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: pieces[found[1]], template)
