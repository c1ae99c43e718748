"""Which polar factor trains best? SF-NorMuon on a byte-level model with each named one, several seeds, side by side.

    python benchmarks/polar_choice.py TEXT VALIDATION --out rows.jsonl

TEXT and VALIDATION are files of any bytes (.bz2 is unpacked). One process a run, several at once on one device. Each
row holds the settings, the loss at X at several steps and the versions it was measured with.
"""

from __future__ import annotations

import argparse
import bz2
import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
import anytime
from demo import ByteModel, Setup, sample

RECIPES = {
    "paper": {},
    "growing": {"betas": (0.4, 0.95), "beta_growth": 0.4, "beta_growth_start": 200, "averaging_power": 3.0},
}
POLARS = {
    "newton-schulz bf16": {"polar": "newton-schulz", "polar_dtype": torch.bfloat16},
    "newton-schulz fp32": {"polar": "newton-schulz", "polar_dtype": torch.float32},
    "polar-express bf16": {"polar": "polar-express", "polar_dtype": torch.bfloat16},
    "quintic bf16": {"polar": "quintic", "polar_dtype": torch.bfloat16},
}


def read(path: str, size: int) -> torch.Tensor:
    with bz2.open(path) if path.endswith(".bz2") else open(path, "rb") as file:
        return torch.frombuffer(bytearray(file.read(size)), dtype=torch.uint8)


def train(arguments: argparse.Namespace) -> dict[str, object]:
    """One run; returns its row."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    setup = Setup(width=arguments.width, layers=arguments.layers, heads=2, context=512, batch=arguments.batch)
    torch.manual_seed(arguments.seed)
    model = ByteModel(setup).to(device)
    text, held_out = read(arguments.text, 150_000_000), read(arguments.validation, 5_000_000)
    optimizer = anytime.SFNorMuon(
        model,
        lr=arguments.lr,
        warmup_steps=150,
        averaging_warmup=150 if arguments.recipe == "growing" else 0,
        **RECIPES[arguments.recipe],
        **POLARS[arguments.polar],
    )
    batches, checks = torch.Generator().manual_seed(1000 + arguments.seed), torch.Generator().manual_seed(7)
    validation = [sample(held_out, setup, checks).to(device) for _ in range(16)]
    stops = [arguments.steps // 4, arguments.steps // 2, arguments.steps]
    losses, start = {}, time.time()
    for step in range(1, arguments.steps + 1):
        with torch.autocast(device, torch.bfloat16):
            loss = model(sample(text, setup, batches).to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in stops:
            with optimizer.averaged(), torch.no_grad(), torch.autocast(device, torch.bfloat16):
                losses[step] = statistics.fmean(model(batch).item() for batch in validation)
    return {
        **{
            key: getattr(arguments, key)
            for key in ("polar", "recipe", "seed", "lr", "steps", "width", "layers", "batch")
        },
        "loss_at_x": losses,
        "seconds": round(time.time() - start, 1),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text")
    parser.add_argument("validation")
    parser.add_argument("--out", default="polar_choice.jsonl")
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.016)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--polar", choices=POLARS)
    parser.add_argument("--recipe", choices=RECIPES)
    parser.add_argument("--seed", type=int)
    arguments = parser.parse_args()
    if arguments.seed is not None:
        with open(arguments.out, "a") as out:
            out.write(json.dumps(train(arguments)) + "\n")
        return
    waiting = [
        [sys.executable, *sys.argv, "--polar", polar, "--recipe", recipe, "--seed", str(seed)]
        for seed, recipe, polar in itertools.product(range(arguments.seeds), RECIPES, POLARS)
    ]
    running: list[subprocess.Popen[bytes]] = []
    while waiting or running:
        while waiting and len(running) < arguments.at_once:
            running.append(subprocess.Popen(waiting.pop(0)))
        time.sleep(0.5)
        running = [process for process in running if process.poll() is None]
    rows = [json.loads(line) for line in Path(arguments.out).read_text().splitlines()]
    for recipe, polar in itertools.product(RECIPES, POLARS):
        found = [row["loss_at_x"] for row in rows if (row["recipe"], row["polar"]) == (recipe, polar)]
        if found:
            cells = [
                f"{statistics.fmean(r[stop] for r in found):.4f} ± {statistics.pstdev([r[stop] for r in found]):.4f}"
                for stop in found[0]
            ]
            print(f"{recipe:8} {polar:20} {'  '.join(cells)}  ({len(found)} seeds, at {', '.join(found[0])})")


if __name__ == "__main__":
    main()
