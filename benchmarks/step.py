"""The step of every optimizer on the paper's models, beside its peers: `anytime bench` at length, and launches counted.

    python benchmarks/step.py --presets 125M 772M --out results/step.jsonl

Peers take part where they can be imported. The rows of a table are written as soon as they are known, the tables last.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.autograd import DeviceType

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
from anytime.bench import peers, race, show
from anytime.train.device import choose_device
from anytime.train.runs import Row


def counted(step: Callable[[], None]) -> Row:
    """Kernels that ran on the device in one step, and how often the host asked for something."""
    if not torch.cuda.is_available():
        return {}
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if not event.is_user_annotation]
    asked = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
    return {
        "kernels": sum(event.device_type == DeviceType.CUDA for event in events),
        "launches": sum(event.device_type == DeviceType.CPU and event.name.startswith(asked) for event in events),
    }


def plain(rows: list[Row]) -> str:
    """The table of rows as text."""
    table = show.cells(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    sides = ["<" if name in ("optimizer", "note") else ">" for name in table[0]]
    return "\n".join(
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(line, sides, widths, strict=True)).rstrip()
        for line in table
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="One step of every optimizer on the paper's models.")
    parser.add_argument("--presets", nargs="+", default=["125M", "772M"])
    parser.add_argument("--parts", nargs="+", default=list(race.PARTS), choices=race.PARTS)
    parser.add_argument("--device", default="")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--steps", type=int, default=None, help="that the median is of")
    parser.add_argument("--only", nargs="*", default=[], help="optimizers whose names contain one of these")
    parser.add_argument("--out", type=Path, default=None, help="a file of rows to append to")
    parser.add_argument("--picture", type=Path, default=None)
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    among, missing = peers.chosen(peers.contestants(device), arguments.only)
    found: list[Row] = []
    shown = []
    for preset in arguments.presets:
        for part in arguments.parts:
            rows = race.measure(
                preset,
                part,
                among,
                device,
                dtype=getattr(torch, arguments.dtype),
                steps=arguments.steps,
                tell=lambda text: print(text, file=sys.stderr, flush=True),
                also=counted,
            )
            found += rows
            shown.append(f"{show.heading(rows[0])}\n{plain(rows)}\n{show.floor_line(rows)}\n")
            if arguments.out is not None:
                with arguments.out.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in rows)
            if arguments.picture is not None:
                show.draw(found, arguments.picture)
    if missing:
        print(f"left out, not installed: {', '.join(missing)}\n")
    print("\n".join(shown))


if __name__ == "__main__":
    main()
