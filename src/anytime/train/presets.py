"""Settings by name, of the demo to the paper's models."""

from __future__ import annotations

from typing import Any

from .config import nearest
from .errors import UserError


def _small(layers: int, width: int, head: int, *, batch: int, lr: float = 0.02, **more: Any) -> dict[str, Any]:
    """A preset below the paper's sizes: its own tokenizer of 4,096, the anytime recipe; the warmup stays for others."""
    model = {"layers": layers, "width": width, "head": head, "vocabulary": 4096}
    optimizer = {"recipe": "anytime", "lr": lr, "warmup_steps": 20}
    return {"model": model, "optimizer": optimizer, "batch_size": batch, "data": {"path": "data"}, **more}


PRESETS: dict[str, dict[str, Any]] = {
    "demo": {
        "model": {"layers": 2, "width": 96, "head": 32, "vocabulary": 256, "context": 128, "rope_base": 1000.0},
        "data": {"path": "python"},
        "optimizer": {"recipe": "anytime", "lr": 0.02, "warmup_steps": 10},
        "until": "3000 steps",
        "batch_size": 4,
        "eval_tokens": 16384,
        "checkpoint_every": 500,
        "keep_every": 500,
        "prompt": "def ",
        "report": True,
        "threads": 1,
    },
    "0.5M": _small(5, 64, 32, batch=16, lr=0.032),
    "2M": _small(4, 160, 32, batch=32, lr=0.032),
    "6M": _small(6, 256, 128, batch=32, lr=0.032),
    "12M": _small(6, 384, 128, batch=64, micro_batch=32),
    "30M": _small(9, 512, 128, batch=128, micro_batch=32),
    "125M": {
        "model": {"layers": 12, "width": 768, "head": 128, "vocabulary": 50304},
        "data": {"path": "data"},
        "micro_batch": 64,
        "eval_every": 250,
    },
    "772M": {
        "model": {"layers": 36, "width": 1280, "head": 128, "vocabulary": 50304},
        "data": {"path": "data"},
        "micro_batch": 32,
        "eval_every": 250,
    },
}


def preset(name: str) -> dict[str, Any]:
    """The settings of a preset, to be laid over the defaults."""
    if name not in PRESETS:
        raise UserError(f"there is no preset {name!r}{nearest(name, PRESETS)}; there are {', '.join(PRESETS)}")
    return PRESETS[name]
