"""How far a grid is: a live table on a terminal, a line a run elsewhere."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from .grid import Show, State, duration
from .run import Row, Run


def line(row: Row) -> str:
    """A run that is done."""
    losses = list(row["losses"].items())
    said = row.get("failed") or (f"loss {losses[-1][1]:.4f} at step {int(losses[-1][0]):,}" if losses else "no losses")
    return f"{row['name']}, seed {row['seed']}: {said}, {duration(row['seconds'])}"


def last_row(folder: Path) -> Row:
    """The newest row of a run's metrics that has a step; little of the file is read."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 4096))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return {}
    found: Row = {}
    for text in lines:
        try:
            row = json.loads(text)
        except ValueError:
            continue
        found |= {key: row[key] for key in ("step", "loss") if isinstance(row, dict) and key in row}
    return found


def left(state: State, running: dict[str, tuple[Run, Row]], waiting: int) -> float | None:
    """Seconds still to go, by what has been done so far; None before anything has."""
    here = sum(run.steps and min(1.0, row.get("step", 0) / run.steps) for run, row in running.values())
    done = len(state.done) + here
    return (len(running) - here + waiting) * state.seconds / done if done > 0.05 else None


@contextmanager
def showing(stream: TextIO, say: Callable[[str], None]) -> Iterator[Show]:
    """What a grid is told to call with its state."""
    if not stream.isatty():
        yield _lines(say)
        return
    try:
        from rich.live import Live
    except ImportError:
        yield _lines(say)
        return
    with Live(refresh_per_second=2, transient=True) as live:
        said = 0

        def show(state: State) -> None:
            nonlocal said
            for row in state.done[said:]:
                live.console.print(line(row), highlight=False, markup=False)
            said = len(state.done)
            live.update(table(state))

        yield show


def _lines(say: Callable[[str], None]) -> Show:
    said = 0
    at = -60.0

    def show(state: State) -> None:
        nonlocal said, at
        for row in state.done[said:]:
            say(line(row))
        if said != len(state.done) and time.monotonic() - at > 30:
            at = time.monotonic()
            togo = left(state, {f: (run, last_row(Path(f))) for f, run in state.running.items()}, state.left)
            rest = "" if togo is None else f", about {duration(togo)} left"
            say(f"  {len(state.done)} done, {len(state.running)} running, {state.left} waiting{rest}")
        said = len(state.done)

    return show


def table(state: State) -> Any:
    from rich.table import Table

    running = {folder: (run, last_row(Path(folder))) for folder, run in state.running.items()}
    togo = left(state, running, state.left)
    rest = "" if togo is None else f", about {duration(togo)} left"
    title = f"{len(state.done)} done, {len(running)} running, {state.left} waiting; {duration(state.seconds)}{rest}"
    found = Table(title=title, title_justify="left")
    for head, side in (("run", "left"), ("seed", "right"), ("step", "right"), ("of", "right"), ("loss", "right")):
        found.add_column(head, justify=side)  # type: ignore[arg-type]
    for run, row in running.values():
        loss = f"{row['loss']:.3f}" if isinstance(row.get("loss"), float) else ""
        found.add_row(run.name, str(run.seed), f"{row.get('step', 0):,}", f"{run.steps:,}", loss)
    return found
