"""Variants of SF-NorMuon side by side: one byte-level model, several seeds, the loss at X at several steps.

    python benchmarks/variants.py TEXT VALIDATION --variants "paper, moment" "growing, moment" --out rows.jsonl

TEXT and VALIDATION are files of any bytes. One process a run, several at once on one device; each appends a row with
its settings to the output, and the means are printed last.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("examples", "src")]
import anytime  # noqa: E402
from demo import ByteModel, Setup, sample  # noqa: E402

GROWING: dict[str, Any] = {"betas": (0.4, 0.95), "beta_growth": 0.4, "beta_growth_start": 200, "averaging_power": 3.0}
GROWING |= {"averaging_warmup": 150}
VARIANTS: dict[str, dict[str, Any]] = {
    "paper, newton-schulz bf16": {"polar": "newton-schulz", "polar_dtype": torch.bfloat16},
    "paper, newton-schulz fp32": {"polar": "newton-schulz", "polar_dtype": torch.float32},
    "paper, polar-express bf16": {"polar": "polar-express", "polar_dtype": torch.bfloat16},
    "paper, quintic bf16": {"polar": "quintic", "polar_dtype": torch.bfloat16},
    "paper, moment": {"adam_bias_correction": "moment"},
    "growing, newton-schulz bf16": {**GROWING, "polar": "newton-schulz", "polar_dtype": torch.bfloat16},
    "growing, newton-schulz fp32": {**GROWING, "polar": "newton-schulz", "polar_dtype": torch.float32},
    "growing, polar-express bf16": {**GROWING, "polar": "polar-express", "polar_dtype": torch.bfloat16},
    "growing, quintic bf16": {**GROWING, "polar": "quintic", "polar_dtype": torch.bfloat16},
    "growing, moment": {**GROWING, "adam_bias_correction": "moment"},
    "growing, moment, embedding at a quarter": {
        **GROWING,
        "adam_bias_correction": "moment",
        "rules": {"embedding.weight": {"rate": 0.25}},
    },
    "growing matrices, constant rest": {
        **GROWING,
        "adam_betas": (0.95, 0.99),
        "rules": {"embedding.weight": {"beta_growth": 0.0}},
    },
}


def read(path: str, size: int) -> torch.Tensor:
    with open(path, "rb") as file:
        return torch.frombuffer(bytearray(file.read(size)), dtype=torch.uint8)


def train(arguments: argparse.Namespace) -> dict[str, Any]:
    """One run; returns its row."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    setup = Setup(width=arguments.width, layers=arguments.layers, heads=2, context=512, batch=arguments.batch)
    torch.manual_seed(arguments.seed)
    model = ByteModel(setup).to(device)
    text, held_out = read(arguments.text, 150_000_000), read(arguments.validation, 5_000_000)
    optimizer = anytime.SFNorMuon(model, lr=arguments.lr, warmup_steps=150, **VARIANTS[arguments.variant])
    batches, checks = torch.Generator().manual_seed(1000 + arguments.seed), torch.Generator().manual_seed(7)
    validation = [sample(held_out, setup.batch, setup.context, checks).to(device) for _ in range(16)]
    stops = [arguments.steps // 4, arguments.steps // 2, arguments.steps]
    losses, start = {}, time.time()
    for step in range(1, arguments.steps + 1):
        with torch.autocast(device, torch.bfloat16):
            loss = model(sample(text, setup.batch, setup.context, batches).to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in stops:
            with optimizer.averaged(), torch.no_grad(), torch.autocast(device, torch.bfloat16):
                losses[step] = statistics.fmean(model(batch).item() for batch in validation)
    return {
        **{key: getattr(arguments, key) for key in ("variant", "seed", "lr", "steps", "width", "layers", "batch")},
        "loss_at_x": losses,
        "seconds": round(time.time() - start, 1),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text")
    parser.add_argument("validation")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--out", default="variants.jsonl")
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.016)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.seed is not None:
        with open(arguments.out, "a") as out:
            out.write(json.dumps(train(arguments)) + "\n")
        return
    waiting = [
        [sys.executable, *sys.argv, "--variant", variant, "--seed", str(seed)]
        for seed, variant in itertools.product(range(arguments.seeds), arguments.variants)
    ]
    running: list[subprocess.Popen[bytes]] = []
    while waiting or running:
        while waiting and len(running) < arguments.at_once:
            running.append(subprocess.Popen(waiting.pop(0)))
        time.sleep(0.5)
        running = [process for process in running if process.poll() is None]
    rows = [json.loads(line) for line in Path(arguments.out).read_text().splitlines()]
    for variant in arguments.variants:
        found = [row["loss_at_x"] for row in rows if row["variant"] == variant]
        if found:
            cells = [f"{statistics.fmean(row[stop] for row in found):.4f}" for stop in found[0]]
            print(f"{variant:42} {'  '.join(cells)}  ({len(found)} seeds, at {', '.join(found[0])})")


if __name__ == "__main__":
    main()
