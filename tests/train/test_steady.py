"""The steady state of the paper's appendix, on a model that is trained."""

from __future__ import annotations

from statistics import fmean

import pytest

from anytime import theory
from anytime.diagnostics import detailed
from anytime.train import train
from anytime.train.config import Config, merged
from anytime.train.presets import preset
from anytime.train.runs import read_lines

LR, DECAY, WARMUP = 0.04, 0.1, 100
WINDOW = round(1 / (LR * DECAY))


@pytest.mark.slow
def test_the_size_of_z_is_what_its_angle_to_the_update_says(tmp_path):
    """The demo's model under the paper's recipe: ρ² follows its recursion at every step that was looked at, and after
    warmup + 3/(ηλ) steps, α averaged over 1/(ηλ) of them, ρ is within 5% of its prediction."""
    steps = WARMUP + 6 * WINDOW
    optimizer = {"lr": LR, "weight_decay": DECAY, "warmup_steps": WARMUP, "betas": [0.9, 0.95]}
    optimizer["recipe"] = "paper"
    settings = {
        "run": str(tmp_path / "run"), "until": f"{steps} steps", "optimizer": optimizer, "batch_size": 8,
        "diagnose_every": 5, "eval_per_doubling": 0, "checkpoint_every": 0, "keep_every": 0, "prompt": "",
        "report": False,
    }  # fmt: skip
    with detailed():
        train(merged(merged(Config(), preset("demo")), settings))
    rows = [row for row in read_lines(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "average"]
    names = list(rows[0]["layers"])
    assert len(rows) == steps // 5
    assert len(names) == 12
    for row in rows:
        eta = LR * min(1, row["step"] / WARMUP)
        for seen in row["layers"].values():
            after = theory.rho_step(seen["rho_before"], seen["alpha"], eta, DECAY, update_rms=seen["update_rms"])
            assert seen["rho"] == pytest.approx(after, rel=1e-7)
    for start in range(WARMUP + 3 * WINDOW, steps, WINDOW):
        inside = [row["layers"] for row in rows if start < row["step"] <= start + WINDOW]
        off = []
        for name in names:
            mean = {key: fmean(layers[name][key] for layers in inside) for key in ("rho", "alpha", "update_rms")}
            said = theory.rho_quasi_steady(mean["alpha"], LR, DECAY, update_rms=mean["update_rms"])
            off.append(abs(said / mean["rho"] - 1))
        assert fmean(off) < 0.05
        assert -0.2 < mean["alpha"] < -0.01
