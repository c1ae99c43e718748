"""Rows as a table and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..train.errors import UserError
from ..train.runs import Row


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """A table of rows, its heading first, without columns that are empty."""

    def number(key: str, scale: float = 1.0, digits: int = 2) -> Callable[[Row], str]:
        return lambda row: f"{row[key] * scale:,.{digits}f}" if row.get(key) is not None else ""

    columns: dict[str, Callable[[Row], str]] = {
        "optimizer": lambda row: str(row["contestant"]),
        "step ms": number("wall_ms"),
        "of the floor": lambda row: f"{row['of_floor']:.0%}" if "of_floor" in row else "",
        "device ms": number("device_ms"),
        "host ms": number("host_ms"),
        "state MiB": number("state_bytes", 2**-20, 1),
        "extra MiB": number("extra_bytes", 2**-20, 1),
        "kernels": number("kernels", digits=0),
        "launches": number("launches", digits=0),
        "note": lambda row: row.get("error") or (f"the rest: {row['rest']}" if "rest" in row else ""),
    }
    table = [list(columns), *([write(row) for write in columns.values()] for row in rows)]
    kept = [column for column in zip(*table, strict=True) if any(column[1:])]
    return [list(line) for line in zip(*kept, strict=True)]


def heading(row: Row) -> str:
    """What the rows of one table have in common."""
    what = f"{row['matrices']} matrices" if row["part"] == "matrices" else "all parameters"
    return (
        f"{row['preset']}, {what}: {row['parameters'] / 1e6:,.1f}M in {row['dtype']} on {row['device']}, "
        f"torch {row['torch']}, median of {row['steps']}"
    )


def floor_line(rows: Sequence[Row]) -> str:
    """The floors of the rows, and what they follow from."""
    floors = {row["spectral"]: f"{row['floor_ms']:.2f} ms with{'' if row['spectral'] else 'out'} a polar factor"
              for row in rows}  # fmt: skip
    rates = f"{rows[0]['bandwidth'] / 1e9:,.0f} GB/s and {rows[0]['products'] / 1e12:,.2f} TFLOP/s"
    return f"floor: {', '.join(floors.values())} (at {rates}, measured in this run)"


def figure_class(path: Path) -> Any:
    """matplotlib's, if it is there and can write such a file."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("the picture needs matplotlib: pip install matplotlib") from None
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise UserError(f"the picture is {str(path)!r}, must end in .svg, .png or .pdf")
    return Figure


#: Of bars, by whether they are ours and whether they take a polar factor.
COLOURS = {(True, True): "#c8374d", (True, False): "#eba9b2", (False, True): "#7d8a99", (False, False): "#c9d0d8"}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Bars of all that did not fail, fastest first, ours in colour, a panel for each preset and part."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in sorted((row for row in rows if "wall_ms" in row), key=lambda row: float(row["wall_ms"])):
        groups.setdefault((row["preset"], row["part"]), []).append(row)
    if not groups:
        raise UserError("nothing to draw: every optimizer failed")
    sizes = [len(group) + 2 for group in groups.values()]
    figure = figure_class(path)(figsize=(9, 0.32 * sum(sizes) + 0.5 * len(sizes)), layout="constrained")
    panels = figure.subplots(len(groups), 1, squeeze=False, height_ratios=sizes)[:, 0]
    for panel, group in zip(panels, groups.values(), strict=True):
        times = [float(row["wall_ms"]) for row in group]
        floor = max(float(row["floor_ms"]) for row in group)
        colours = [COLOURS[row["ours"], row["spectral"]] for row in group]
        bars = panel.barh([row["contestant"] for row in group], times, color=colours)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # legible across the line of the floor
        panel.bar_label(bars, [f"{value:,.3g}" for value in times], padding=4, fontsize=9, bbox=box)
        panel.axvline(floor, color="black", linestyle="--", linewidth=1)
        panel.annotate(f"floor {floor:.3g}", (floor, 1), (3, 2), xycoords=("data", "axes fraction"),
                       textcoords="offset points", fontsize=8)  # fmt: skip
        panel.invert_yaxis()
        if max(times) > 20 * min(times):
            panel.set_xscale("log")
            panel.xaxis.set_major_formatter("{x:g}")
        panel.margins(x=0.15)
        panel.set_title(heading(group[0]), fontsize=10, loc="right", pad=14)
        panel.set_xlabel("milliseconds a step (pale: without a polar factor)", fontsize=9)
        panel.spines[["top", "right"]].set_visible(False)
        for label, row in zip(panel.get_yticklabels(), group, strict=True):
            label.set_fontweight("bold" if row["ours"] else "normal")
    figure.savefig(path)
