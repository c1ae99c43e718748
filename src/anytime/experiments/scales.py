"""The sizes at which the paper's experiments are run, and the rules that take its settings from one to another.

nano    all of it in minutes on two CPU cores: a check that everything works, no evidence
micro   half a million parameters, about ten minutes of one H200
small   the paper's 125M model     large    its 772M model

What is scaled, and how:
- 1× Chinchilla is 20 tokens a parameter, embeddings included, in whole steps; the paper's two are rounded up to 5,000.
- Warmup is the paper's part of 1× of its small model: 2,000 of 5,000 steps schedule-free, 2,500 of 5,000 scheduled.
  Its large model keeps the small one's steps, as in the paper.
- Rates are the paper's times √(768 / width), to two digits; the large model keeps the small one's.
- β, μ and λ are the paper's everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..train.config import nearest
from ..train.errors import UserError
from ..train.model import ModelConfig
from ..train.presets import PRESETS

#: The paper's names, ours, and what the paper searched and found best (in its table of best settings).
OPTIMIZERS = {"SF-NorMuon": "SFNorMuon", "SF-AdamW": "SFAdamW", "NorMuon": "NorMuon", "AdamW": "AdamW"}
SCHEDULED = ("AdamW", "NorMuon")
SCHEDULE_FREE = ("SF-NorMuon", "SF-AdamW")
#: Of the small model. The paper does not say what it searched for NorMuon: the schedule-free rates are taken.
RATES = {
    "AdamW": (0.002, 0.004, 0.006, 0.008, 0.01),
    "NorMuon": (0.005, 0.008, 0.01, 0.012, 0.015),
    "SF-AdamW": (0.005, 0.008, 0.01, 0.012, 0.015),
    "SF-NorMuon": (0.005, 0.008, 0.01, 0.012, 0.015),
}
#: Everything but the rate, at every scale.
RECIPES: dict[str, dict[str, Any]] = {
    "AdamW": {"betas": [0.9, 0.95], "weight_decay": 0.1, "schedule": "cosine"},
    "NorMuon": {"momentum": 0.95, "beta2": 0.95, "weight_decay": 0.1, "schedule": "cosine"},
    "SF-AdamW": {"betas": [0.95, 0.99], "weight_decay": 0.05, "decay_at": "y"},
    "SF-NorMuon": {"betas": [0.9, 0.95], "momentum": 0.8, "weight_decay": 0.05, "decay_at": "z"},
}


@dataclass(frozen=True)
class Scale:
    """One size of the experiments.

    horizons and long are multiples of Chinchilla; tuned_at the one that schedule-free rates are chosen at; pick says
    which of the paper's five rates are tried; grain is what 1× is rounded up to; speed is tokens a second, where it
    was measured; data "" asks for a folder; shown are the items drawn unless others are asked for, all if empty.
    """

    name: str
    model: ModelConfig
    batch: int
    horizons: tuple[int, ...]
    long: int
    seeds: tuple[int, ...]
    pick: tuple[int, ...]
    tuned_at: int = 2
    grain: int = 1
    keeps_rates: bool = False
    keeps_warmup: bool = False
    micro_batch: int = 0
    eval_tokens: int = 1 << 20
    data: str = ""
    speed: float | None = None
    shown: tuple[str, ...] = ()

    def steps(self, multiple: int) -> int:
        once = 20 * self.model.parameters / (self.batch * self.model.context)
        return multiple * self.grain * math.ceil(once / self.grain)

    def tokens(self, steps: int) -> int:
        return steps * self.batch * self.model.context

    def warmup(self, optimizer: str) -> int:
        part = 2500 if optimizer in SCHEDULED else 2000
        return part if self.keeps_warmup else max(1, round(part / 5000 * self.steps(1)))

    def rate(self, paper: float) -> float:
        """What a rate of the paper becomes."""
        factor = 1.0 if self.keeps_rates else math.sqrt(768 / self.model.width)
        return float(f"{paper * factor:.2g}")

    def rates(self, optimizer: str) -> tuple[float, ...]:
        return tuple(self.rate(RATES[optimizer][i]) for i in self.pick)

    @property
    def last(self) -> int:
        """The longest horizon of the tables."""
        return self.horizons[-1]

    @property
    def reported(self) -> Mapping[str, Any]:
        """The paper's own numbers for this size, if it is one of the paper's."""
        return REPORTED.get(self.name, {})


def _of_preset(known: str, /, **more: Any) -> Scale:
    preset = PRESETS[known]
    batch = {"batch": preset.get("batch_size", 512), "micro_batch": preset.get("micro_batch", 0)}
    return Scale(model=ModelConfig(**preset["model"]), **batch, **more)


SCALES = {
    scale.name: scale
    for scale in (
        Scale(
            "nano", ModelConfig(vocabulary=256, layers=2, width=16, head=8, context=32, rope_base=1000.0), 128,
            (1, 2, 4), 20, (0,), (0, 2, 4), micro_batch=128, eval_tokens=1 << 14, data="python",
        ),
        _of_preset("0.5M", name="micro", horizons=(1, 2, 4, 8), long=20, seeds=(0, 1, 2), pick=(0, 2, 4)),
        _of_preset(
            "125M", name="small", horizons=(1, 2, 4, 8), long=48, seeds=(0,), pick=(0, 1, 2, 3, 4), grain=5000,
            keeps_rates=True, keeps_warmup=True, speed=579_723.0,
        ),
        _of_preset(
            "772M", name="large", horizons=(1, 2, 4), long=20, seeds=(0,), pick=(1,), grain=5000,
            keeps_rates=True, keeps_warmup=True, speed=100_675.0,
            shown=("main", "loss", "architecture", "budgets", "space", "memory"),
        ),
    )
}  # fmt: skip

#: Validation losses by horizon, and percentages of steps saved, as the paper prints them.
REPORTED: dict[str, dict[str, Any]] = {
    "small": {
        "SF-NorMuon": (3.318, 3.229, 3.170, 3.136),
        "SF-AdamW": (3.399, 3.282, 3.205, 3.141),
        "NorMuon": (3.292, 3.200, 3.139, 3.103),
        "AdamW": (3.354, 3.231, 3.170, 3.124),
        "saved": (35, 35, 36, 11),
        "ablation": {"no momentum": 3.28, "no row normalization": 3.142, "SF-NorMuon": 3.136, "tokens saved": 12},
        "rates": {"AdamW": (0.008, 0.008, 0.008, 0.004), "SF-AdamW": 0.008, "SF-NorMuon": 0.008},
    },
    "large": {
        "SF-NorMuon": (2.777, 2.729, 2.698),
        "SF-AdamW": (2.852, 2.780, 2.726),
        "AdamW": (2.826, 2.768, 2.720),
        "saved": (50, 52, 47),
    },
}


def scale_of(name: str) -> Scale:
    if name not in SCALES:
        raise UserError(f"there is no scale {name!r}{nearest(name, SCALES)}; there are {', '.join(SCALES)}")
    return SCALES[name]
