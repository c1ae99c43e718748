"""Tokens a second of the paper's models in the real training loop, and where the time goes.

    python benchmarks/throughput.py --presets 125M 772M --out results/throughput.jsonl

Every preset trains on random tokens in shards on disk, at its own batch, by the loop's own step. Tokens a second
include everything. The parts are timed by themselves: forward and backward, the optimizer, waiting for
data (the loop's own count), and the rest, which is what is left. By itself a part is started from an empty queue; what
the optimizer adds to a step in the loop is said by as many steps without it. A second run of as many steps holds the
evaluations and the checkpoint of 1,000 steps (four of 1M tokens, one save); what it takes longer is their cost.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
from anytime.train import Config, merged, preset
from anytime.train.batches import Batches, Prefetcher
from anytime.train.device import autocast, choose_device
from anytime.train.loop import Loop
from anytime.train.parallel import World
from anytime.train.runs import Row, Run, origin
from anytime.train.shards import write_shard


class Counted(Loop):
    """A loop that is left running: more steps after the last."""

    def steps(self, count: int) -> None:
        batches = Batches(self.data.train, self.config.model.context, 0, self.config.model.vocabulary)
        size, at_once = self.config.batch_size, self.config.sequences_at_once
        with Prefetcher(batches, self.position, size, at_once, self.device) as source:
            for _ in range(count):
                self._train_step(source)
        self._flush()


def settled(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def median_of(count: int, device: torch.device, work: Any) -> float:
    times = []
    for _ in range(count):
        began = settled(device)
        work()
        times.append(settled(device) - began)
    return statistics.median(times)


def measure(name: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    values = {**preset(name), "run": str(folder / name), "data": {"path": str(folder)}, "eval_per_doubling": 0}
    values |= {"eval_every": 0, "checkpoint_every": 0, "diagnose_every": 0}
    config = merged(merged(Config(), values), json.loads(arguments.settings))
    rows: list[Row] = []
    with Run(config) as run:
        loop = Counted(run, [rows.append], sys.stderr.write, World(choose_device(config.device)))
        device, model = loop.device, config.model
        began = settled(device)
        loop.steps(2)
        compiled = settled(device) - began
        loop._waited = 0.0
        seconds = median_of(arguments.rounds, device, lambda: loop.steps(arguments.steps)) / arguments.steps
        data = loop._waited / arguments.rounds / arguments.steps
        with mock.patch.object(loop.optimizer, "step"):
            bare = median_of(arguments.rounds, device, lambda: loop.steps(arguments.steps)) / arguments.steps
        share = round(100 * (1 - bare / seconds), 2)
        print(f"{name}: a step {1e3 * seconds:.1f} ms, of which the optimizer {share}%", flush=True)
        loop._evaluate()  # compiled apart, which takes as long again

        # As many steps with what 1,000 steps hold besides.
        started = settled(device)
        loop._save()
        for _ in range(4):
            loop._evaluate()
            loop.steps(arguments.steps // 4)
        loop.steps(arguments.steps % 4)
        loop._disk(loop.writer.wait())
        extra = settled(device) - started - seconds * arguments.steps
        evaluation = median_of(3, device, loop._evaluate)
        saved = [row["save_seconds"] for row in rows if row["kind"] == "checkpoint"]

        inputs, targets = next(
            Prefetcher(
                Batches(loop.data.train, model.context, 0), 0, config.batch_size, config.sequences_at_once, device
            )
        )
        parts = config.batch_size // config.sequences_at_once

        def forward_backward() -> None:
            for _ in range(parts):
                with autocast(device, config.precision):
                    loss = loop.forward.loss(inputs, targets)
                (loss / parts).backward()

        def step() -> None:
            loop.optimizer.step()

        products = median_of(5, device, forward_backward)
        optimizer = median_of(5, device, step)
        memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return {
        "preset": name,
        "tokens_per_step": config.batch_size * model.context,
        "micro_batch": config.sequences_at_once,
        "tokens_per_second": round(config.batch_size * model.context / seconds),
        "mfu": round(config.batch_size * model.context / seconds * model.flops_per_token / 989e12, 4),
        "step_ms": round(1e3 * seconds, 1),
        "forward_backward_ms": round(1e3 * products, 1),
        "optimizer_ms": round(1e3 * optimizer, 1),
        "optimizer_share_percent": share,
        "data_wait_ms": round(1e3 * data, 2),
        "rest_ms": round(1e3 * (seconds - products - optimizer - data), 1),
        "evaluation_ms": round(1e3 * evaluation, 1),
        "save_wait_ms": round(1e3 * saved[-1], 1),
        "extra_of_1000_steps_percent": round(100 * extra / (1000 * seconds), 3),
        "memory_gib": round(memory / 2**30, 1),
        "first_steps_s": round(compiled, 1),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        **origin(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens a second of the presets, and where the time goes.")
    parser.add_argument("--presets", nargs="+", default=["125M", "772M"])
    parser.add_argument("--steps", type=int, default=8, help="steps of one measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--settings", default="{}", help="further settings, as JSON")
    parser.add_argument("--out", type=Path, default=None, help="a file of rows to append to")
    arguments = parser.parse_args()
    found = []
    for name in arguments.presets:
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            draw = np.random.default_rng(0)
            for split, size in (("train", 20_000_000), ("val", 1_200_000)):
                write_shard(folder / f"{split}-000000.bin", draw.integers(0, 4096, size, dtype=np.uint16))
            found.append(measure(name, arguments, folder))
        print(json.dumps(found[-1]), flush=True)
        if arguments.out is not None:
            with arguments.out.open("a") as file:
                file.write(json.dumps(found[-1]) + "\n")
    keys = [
        "preset",
        "tokens_per_second",
        "mfu",
        "step_ms",
        "forward_backward_ms",
        "optimizer_ms",
        "optimizer_share_percent",
        "data_wait_ms",
        "rest_ms",
        "extra_of_1000_steps_percent",
    ]
    print(" | ".join(keys))
    for row in found:
        print(" | ".join(str(row[key]) for key in keys))


if __name__ == "__main__":
    main()
