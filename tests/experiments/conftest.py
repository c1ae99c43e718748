"""Rows that no run made, of losses that can be checked by hand; and a tiny text for those that are run."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from anytime.experiments.items import items_of
from anytime.experiments.paper import rounds, searches
from anytime.experiments.recipes import Found, Recipes
from anytime.experiments.scales import SCALES
from anytime.train.shards import write_shard
from anytime.train.tokenizer import BytesTokenizer

#: What each optimizer ends above 2 by at one step; the best rate is the middle one.
HEIGHTS = {"SF-NorMuon": 8.0, "SF-AdamW": 10.0, "NorMuon": 7.0, "AdamW": 9.0}


def made_up(recipes: Recipes, run):
    """loss = 2 + height / √step · (1 + the rate's distance from the middle one) + seed / 100; cosines come late."""
    scale = recipes.scale
    optimizer = next(name for name in HEIGHTS if run.name.startswith(name))
    rates = scale.rates(optimizer)
    away = abs(math.log(run.config.optimizer.lr / rates[len(rates) // 2]))
    extra = {"no momentum": 2.0, "no row": 1.1, "no decay": 1.3, "decay at": 1.2}
    factor = next((value for words, value in extra.items() if words in run.name), 1.0)

    def loss(step):
        late = 1.0 if optimizer.startswith("SF") else 1.5 - 0.5 * step / run.steps
        return round(2 + HEIGHTS[optimizer] / math.sqrt(step) * (1 + away) * factor * late + run.seed / 100, 5)

    evals = sorted({round(2 ** (i / 6)) for i in range(18, 200)} | set(run.config.eval_at))
    row = {"key": run.key, "name": run.name, "seed": run.seed, "settings": dict(run.settings), "jobs": 1}
    row |= {"losses": {str(step): loss(step) for step in evals if step <= run.steps}, "tokens": run.tokens}
    row |= {"seconds": 10.0, "tokens_per_second": run.tokens / 10, "data": "made up", "device": "paper"}
    every = max(1, run.steps // 50)
    steps = range(every, run.steps + 1, every)
    numbers = {
        step: {
            "rho": 0.05 + 0.1 * (1 - math.exp(-step / 200)) * factor,
            "change": 0.5 / step,
            "update_rms": 0.2,
            "alpha": -0.03 + 0.1 / math.sqrt(step),
            "predicted": 0.06 + 0.1 * (1 - math.exp(-step / 220)),
        }
        for step in steps
    }
    if "average" in run.watch:
        row["average"] = [{"step": step, **values} for step, values in numbers.items()]
    if "layers" in run.watch:
        kinds = ("q", "k", "v", "o", "up", "down")
        names = [f"blocks.{i}.{kind}.weight" for i in range(scale.model.layers) for kind in kinds]
        row["layers"] = [
            {"step": step} | {n: {k: v * (1 + 0.02 * i) for k, v in values.items()} for i, n in enumerate(names)}
            for step, values in numbers.items()
        ]
    if "sequences" in run.watch:
        row |= {
            f"losses_{s}": {str(k): loss(k) + add for k in run.config.keep_at} for s, add in (("y", 0.1), ("z", 0.5))
        }
    return row


def rows_of(scale_name: str, names=()):
    """Of all runs that the items need."""
    recipes = Recipes(SCALES[scale_name])
    items = items_of(names)
    rows = {run.key: made_up(recipes, run) for run in searches(items, recipes)}
    rows |= {run.key: made_up(recipes, run) for run in rounds(items, Found(recipes, rows))}
    return rows


@pytest.fixture(scope="session")
def found():
    """What there is of a scale, by its name."""
    made = {}

    def of(scale_name: str) -> Found:
        if scale_name not in made:
            made[scale_name] = Found(Recipes(SCALES[scale_name]), rows_of(scale_name))
        return made[scale_name]

    return of


@pytest.fixture(scope="session")
def words(tmp_path_factory) -> Path:
    """A folder of byte tokens: words in a random order."""
    folder = tmp_path_factory.mktemp("words")
    choice = np.array(["one ", "two ", "three ", "four ", "five ", "six.\n"])
    for split, count in (("train", 4000), ("val", 200)):
        text = "".join(np.random.default_rng(count).choice(choice, count))
        write_shard(folder / f"{split}-000000.bin", np.frombuffer(text.encode(), np.uint8).astype(np.uint16))
    BytesTokenizer().save(folder)
    return folder
