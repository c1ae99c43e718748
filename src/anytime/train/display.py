"""What a user sees while a run goes on: a live block on a terminal, sparse plain lines elsewhere.

A Display is a listener of metric rows. Time left is told only where an end is known; an anytime run need have none.
"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TextIO

from .runs import Row

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

SMOOTHING = 0.98  # of the loss at Y: about the last fifty steps


class Display:
    """Shows the rows it is called with; use it as a context manager.

    `end` maps a row to the share of the run that is done, or to None where no end is known. Output goes to `stream`,
    stdout unless told. `clock` counts seconds.
    """

    def __init__(
        self,
        end: Callable[[Row], float | None] | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._end = end
        self._stream = sys.stdout if stream is None else stream
        self._clock = clock
        self._live: Live | None = None
        self._latest: Row = {}  # the newest of each number shown
        self._loss = _Smoothed()
        self._began: tuple[float, float] | None = None  # clock and share done when first known
        self._done: float | None = None
        self._heard = clock()  # when the newest row with seconds came

    def __enter__(self) -> Display:
        if _is_terminal(self._stream):
            from rich.console import Console
            from rich.live import Live

            console = Console(file=self._stream, highlight=False)
            self._live = Live(console=console, get_renderable=self._block, transient=True, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __call__(self, row: Row) -> None:
        """Take in one row of metrics."""
        kind = row["kind"]
        self._take(row)
        if kind == "start":
            self._say(_started(row))
        elif kind == "eval":
            self._say(_line(row, *_scores(row), ("", _time(row))), "bold")
        elif kind == "checkpoint":
            self._say(_line(row, ("checkpoint, waited", _seconds(row.get("save_seconds")))), "dim")
        elif kind == "stop":
            self._say(f"stopped at step {row['step']:,}: {row.get('reason', '')}")
        elif kind == "speed" and self._live is None:
            left = self._left()
            facts = [("loss at Y", self._loss.shown()), *self._facts(), ("", _time(row))]
            self._say(_line(row, *facts, *([("", f"{left} left")] if left else [])))

    def message(self, text: str) -> None:
        """A line that stays."""
        self._say(text)

    def warning(self, text: str) -> None:
        """A line that stays and stands out."""
        self._say(f"warning: {text}", "yellow")

    # --- what is known ---

    def _take(self, row: Row) -> None:
        kind = row["kind"]
        self._latest["step"] = row["step"]
        if kind == "step":
            self._loss.add(_number(row.get("loss")))
        if kind == "eval":
            self._latest["eval"] = row
        for name in ("tokens", "seconds", "tokens_per_second", "mfu", "distance"):
            if name in row:
                self._latest[name] = _number(row[name])
        if "seconds" in row:
            self._heard = self._clock()
        done = self._end(row) if self._end is not None and kind != "start" else None
        if done is not None:
            self._done = min(max(done, 0.0), 1.0)
            if self._began is None:
                self._began = (self._clock(), self._done)

    def _left(self) -> str | None:
        """At the pace since the end was first known; None before there is a pace."""
        if self._began is None or self._done is None or self._done <= self._began[1]:
            return None
        pace = (self._clock() - self._began[0]) / (self._done - self._began[1])
        return duration((1 - self._done) * pace)

    def _facts(self) -> list[tuple[str, str]]:
        """Named numbers of speed and averaging, those there are."""
        shown: list[tuple[str, Callable[[float], str], str]] = [
            ("tokens_per_second", short, "tokens/s"),
            ("mfu", lambda value: f"{value:.1%}", "MFU"),
            ("distance", lambda value: f"{value:.3g}", "|x-z|"),
        ]
        return [(label, write(self._latest[name])) for name, write, label in shown if name in self._latest]

    # --- how it looks ---

    def _say(self, text: str, style: str = "") -> None:
        if self._live is not None:
            from rich.text import Text

            self._live.console.print(Text(text, style=style))
        else:
            encoding = getattr(self._stream, "encoding", None) or "utf-8"
            try:
                self._stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
                self._stream.flush()
            except BrokenPipeError:  # nobody reads any more, as in `… | head`: no reason to stop training
                self._stream = open(os.devnull, "w", encoding=encoding)  # noqa: SIM115, until the process ends

    def _block(self) -> RenderableType:
        """The live block: where the run is, how well, how fast, and how far where that is known."""
        from rich.columns import Columns
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        if "step" not in self._latest:
            return Text("waiting for the first step", style="dim")
        cells = [("step", f"{self._latest['step']:,}"), ("loss at Y", self._loss.shown())]
        if "eval" in self._latest:
            cells.append(("loss at X", f"{_loss(self._latest['eval'])} (step {self._latest['eval']['step']:,})"))
        if "tokens" in self._latest:
            cells.append(("tokens", short(self._latest["tokens"])))
        cells += self._facts()
        if "seconds" in self._latest:
            cells.append(("time", duration(self._latest["seconds"] + self._clock() - self._heard)))
        # Padded, so that the block does not shiver; on as many lines as the terminal needs.
        words = [Text.assemble((f"{label} ", "dim"), (f"{value:<7}", "bold")) for label, value in cells]
        lines: list[RenderableType] = [Columns(words, padding=(0, 2))]
        if self._done is not None:
            bar = Table.grid(padding=(0, 1))
            bar.add_row(ProgressBar(1.0, self._done, width=40), f"{self._done:.0%}", f"{self._left() or '-'} left")
            lines.append(bar)
        return Group(*lines)


def eval_table(rows: Iterable[Row]) -> str:
    """The anytime curve, one line for each evaluation among the rows; others are passed over."""
    table = [("step", "tokens", "loss at X", "perplexity", "bits/byte")]
    for row in rows:
        if row["kind"] == "eval":
            scores = (_loss(row), _decimal(row, "perplexity", 2), _decimal(row, "bits_per_byte", 4))
            table.append((f"{row['step']:,}", short(_number(row.get("tokens"))), *scores))
    kept = [column for column in zip(*table, strict=True) if len(table) == 1 or any(cell != "-" for cell in column[1:])]
    widths = [max(map(len, column)) for column in kept]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in zip(*kept, strict=True))


def duration(seconds: float) -> str:
    """Two units: "3 h 12 min"."""
    if not math.isfinite(seconds):
        return "-"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def short(number: float) -> str:
    """Four digits: "123.6M"."""
    if not math.isfinite(number):
        return "-"
    for unit in ("", "k", "M", "B"):
        if abs(number) < 999.95:
            return f"{number:.4g}{unit}"
        number /= 1000
    return f"{number:.4g}T"


class _Smoothed:
    """An exponential mean, right from the first number on; a NaN is shown while it is the newest, then forgotten."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0
        self._newest: float | None = None

    def add(self, value: float) -> None:
        self._newest = value
        if math.isfinite(value):
            self._sum = SMOOTHING * self._sum + (1 - SMOOTHING) * value
            self._weight = SMOOTHING * self._weight + (1 - SMOOTHING)

    def shown(self) -> str:
        if self._newest is None:
            return "-"
        return f"{self._sum / self._weight:.4f}" if math.isfinite(self._newest) else "nan"


def _is_terminal(stream: TextIO) -> bool:
    """One that rich can redraw, and that has its characters."""
    encoding = (getattr(stream, "encoding", None) or "").lower().replace("-", "")
    able = stream.isatty() and os.environ.get("TERM") != "dumb" and encoding == "utf8"
    return able and importlib.util.find_spec("rich") is not None


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def _decimal(row: Row, name: str, digits: int) -> str:
    if name not in row:
        return "-"
    number = _number(row[name])
    return f"{number:.{digits}f}" if abs(number) < 1e9 else f"{number:.3g}"


def _loss(row: Row) -> str:
    return _decimal(row, "loss", 4)


def _time(row: Row) -> str:
    return duration(_number(row.get("seconds")))


def _seconds(value: object) -> str:
    return duration(_number(value))


def _scores(row: Row) -> list[tuple[str, str]]:
    scores = [(f"loss at {str(row.get('sequence', 'x')).upper()}", _loss(row))]
    for name, label, digits in (("perplexity", "perplexity", 2), ("bits_per_byte", "bits/byte", 4)):
        if name in row:
            scores.append((label, _decimal(row, name, digits)))
    return scores


def _line(row: Row, *facts: tuple[str, str]) -> str:
    words = [f"{label} {value}".strip() for label, value in facts]
    tokens = [f"{short(_number(row['tokens']))} tokens"] if "tokens" in row and row["kind"] != "checkpoint" else []
    return "  ".join([f"step {row['step']:,}", *tokens, *words])


def _started(row: Row) -> str:
    about: Sequence[str] = [
        f"{short(_number(row['parameters']))} parameters" if "parameters" in row else "",
        str(row.get("device", "")),
    ]
    begin = f"resumed at step {row['step']:,}" if row["step"] else "started"
    return "  ".join([begin, *filter(None, about)])
