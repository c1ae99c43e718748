"""What a probe says about a step, against the iterates before and after it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import anytime
from anytime.core import averaging
from anytime.diagnostics import Probe, detailed
from anytime.optim.rules import RULES
from anytime.train.model import GPT, ModelConfig

MODEL = ModelConfig(vocabulary=20, layers=1, width=8, head=4, context=8)
WARMUP = 3
LR = 0.1


def make(name: str, **options):
    """A model in float64 with weights of every size, and the optimizer."""
    model = GPT(MODEL).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_((1 + i) * 0.1 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return model, getattr(anytime, name)(model, **{"lr": LR, "warmup_steps": WARMUP, **options})


def set_gradients(model: nn.Module, step: int) -> None:
    """Of their own, not of the weights: two optimizers given the same ones find the same directions."""
    generator = torch.Generator().manual_seed(1000 + step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)


def iterates(model, optimizer) -> dict[str, anytime.Iterates]:
    return {name: optimizer.iterates(p) for name, p in model.named_parameters()}


def rms(t: torch.Tensor) -> float:
    return float(t.square().mean().sqrt())


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)


SPECTRAL = ["SFNorMuon", "SFMuon", "SFSpectralSGD", "NorMuon", "Muon", "SpectralDescent", "Shampoo"]
AVERAGING = [
    {"weight_decay": 0.3, "decay_at": "z"},
    {"weight_decay": 0.3, "decay_at": "y"},
    {"weight_decay": 0.3, "decay_at": None},
    {"weight_decay": 0.0},
    {"weight_decay": 0.3, "averaging_power": 2.0},
    {"weight_decay": 0.3, "averaging_warmup": 4},
    {"weight_decay": 0.3, "beta_growth": 0.5, "beta_growth_start": 2},
    {"weight_decay": 0.3, "averaging_power": 3.0, "averaging_warmup": 2, "beta_growth": 0.4, "beta_growth_start": 3},
    {"weight_decay": 0.3, "warmup_steps": 0},
    {"weight_decay": 0.3, "decay_fading": 2},
    {"weight_decay": 0.3, "cautious": True},
    {"weight_decay": 0.3, "cautious": True, "decay_at": "y"},
]
CASES = [
    *(("SFNorMuon", options) for options in AVERAGING),
    *((name, AVERAGING[i]) for name in ("SFMuon", "SFSpectralSGD", "SFAdamW", "SFSGD", "SFLion") for i in (0, 1, 7)),
    *((name, {"weight_decay": 0.3}) for name in ("NorMuon", "Muon", "SpectralDescent", "AdamW", "SignSGD", "Lion")),
    ("Shampoo", {"weight_decay": 0.3}),
    ("SFAdamW", {"weight_decay": 0.3, "bias_correction": "moment"}),
    ("NorMuon", {"weight_decay": 0.3, "scaling": "aspect", "update_rms": 0.7}),
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v)))
def test_a_probe_against_the_iterates(name, options):
    """A twin without decay gives the bare update: directions do not depend on the decay."""
    model, optimizer = make(name, **options)
    twin_model, twin = make(name, **{**options, "weight_decay": 0.0})
    everything = [n for n, _ in model.named_parameters()]
    watched = [n for n in everything if n != "embedding.weight"] if name in SPECTRAL else everything
    warmup = options.get("warmup_steps", WARMUP)
    weights: list[float] = []
    for step in range(1, 8):
        set_gradients(model, step)
        set_gradients(twin_model, step)
        old, old_twin = iterates(model, optimizer), iterates(twin_model, twin)
        probe = Probe(optimizer)
        optimizer.step()
        twin.step()
        found = probe.read()
        new, new_twin = iterates(model, optimizer), iterates(twin_model, twin)
        eta = LR * (min(1.0, step / warmup) if warmup else 1.0)
        if name == "SFAdamW" and options.get("bias_correction") != "moment":
            eta *= math.sqrt(1 - 0.99**step)

        update = {n: old_twin[n].z - new_twin[n].z for n in watched}  # η U
        cosines = [float((update[n] * old[n].z).sum() / update[n].norm() / old[n].z.norm()) for n in watched]
        assert found["rho"] == pytest.approx(mean(rms(new[n].z) for n in watched), rel=1e-9)
        assert found["alpha"] == pytest.approx(mean(cosines), abs=1e-9)
        assert found["update_rms"] == pytest.approx(mean(rms(update[n]) / eta for n in watched), rel=1e-7)
        if not optimizer.averages:
            assert set(found) == {"rho", "alpha", "update_rms"}
            continue

        assert set(found) == {"rho", "alpha", "update_rms", "c", "beta", "distance"}
        weights.append(eta**2 * step ** options.get("averaging_power", 0.0))
        warms = step <= options.get("averaging_warmup", 0)
        c = 1.0 if warms else weights[-1] / sum(weights[options.get("averaging_warmup", 0) :])
        assert found["c"] == pytest.approx(c, rel=1e-9)
        growth, start = options.get("beta_growth", 0.0), options.get("beta_growth_start", 200)
        first = optimizer.param_groups[-1].get("beta") or optimizer.param_groups[-1]["betas"][0]
        beta = 1 - ((start - 1) / max(step, start - 1)) ** growth * (1 - first)
        assert found["beta"] == pytest.approx(beta, rel=1e-9)
        for n in watched:
            x = (1 - found["c"]) * old[n].x + found["c"] * new[n].z
            torch.testing.assert_close(new[n].x, x, rtol=1e-9, atol=1e-9)
            y = (1 - found["beta"]) * new[n].z + found["beta"] * new[n].x
            torch.testing.assert_close(new[n].y, y, rtol=1e-9, atol=1e-9)
        squares = sum(float((i.x - i.z).square().sum()) for i in new.values())  # of all parameters
        assert found["distance"] == pytest.approx(math.sqrt(squares), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("steps", [1, 5])
def test_the_update_of_sf_normuon_has_an_rms_of_one_fifth(steps):
    model, optimizer = make("SFNorMuon", weight_decay=0.5)
    for step in range(steps):
        set_gradients(model, step)
        probe = Probe(optimizer)
        optimizer.step()
    assert probe.read()["update_rms"] == pytest.approx(0.2, rel=1e-6)


def test_in_float32_and_with_narrow_weights():
    """Where the parameter is narrower than the update, the iterates are not."""
    for dtype in (torch.float32, torch.bfloat16):
        model, _ = make("SFNorMuon")
        model.to(dtype)
        optimizer = anytime.SFNorMuon(model, lr=0.1, warmup_steps=0)
        for step in range(3):
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).to(dtype)
            probe = Probe(optimizer)
            optimizer.step()
        assert probe.read()["update_rms"] == pytest.approx(0.2, rel=1e-3)


def test_c_and_beta_against_the_clock():
    """tick() is what the optimizer counts by."""
    model, optimizer = make("SFNorMuon", averaging_power=1.5, beta_growth=0.3, beta_growth_start=2)
    group = next(g for g in optimizer.param_groups if g["rule"] == "normuon")
    weight_sum = beta = torch.zeros(1, dtype=torch.float64)
    for step in range(1, 6):
        t = torch.tensor([float(step)], dtype=torch.float64)
        clock = averaging.tick(
            t, weight_sum, beta, averaging.warmed_up(t, LR, WARMUP), torch.ones((), dtype=torch.float64),
            averaging_power=1.5, averaging_warmup=0, beta_start=group["betas"][0], beta_growth=0.3,
            beta_growth_start=2,
        )  # fmt: skip
        weight_sum, beta = clock.weight_sum, clock.beta_next
        set_gradients(model, step)
        probe = Probe(optimizer)
        optimizer.step()
        found = probe.read()
        assert found["c"] == pytest.approx(float(clock.c), rel=1e-9)
        assert found["beta"] == pytest.approx(float(clock.beta_next), rel=1e-9)


def test_the_rate_of_the_step_is_that_of_the_group():
    """A schedule that writes lr before the step, and a multiplier of a pattern's own."""
    model, _ = make("SFNorMuon")
    optimizer = anytime.SFNorMuon(
        model, lr=LR, warmup_steps=0, weight_decay=0.4, rules={"*.up.*": {"rule": "matrix", "rate": 0.5}}
    )
    for group in optimizer.param_groups:
        group["lr"] = 0.03
    set_gradients(model, 0)
    probe = Probe(optimizer)
    optimizer.step()
    assert probe.read()["update_rms"] == pytest.approx(0.2, rel=1e-6)


def test_a_probe_changes_nothing():
    """The step after it, and what it read, are the same with and without."""
    states = []
    for probing in (False, True):
        model, optimizer = make("SFNorMuon", weight_decay=0.3)
        for step in range(4):
            set_gradients(model, step)
            probe = Probe(optimizer) if probing else None
            optimizer.step()
            if probe is not None:
                assert probe.read() == probe.read()
        states.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*states, strict=True):
        assert torch.equal(a, b)


def test_all_rules_are_sorted():
    """Those for matrices of hidden layers, and the others: a new rule must be put on its side."""
    from anytime.optim.rules import ELEMENTWISE

    assert set(RULES) >= set(ELEMENTWISE)
    assert set(RULES) - set(ELEMENTWISE) == {"normuon", "muon", "spectral-sgd", "spectral-descent", "shampoo"}


def test_a_step_that_is_left_out_moves_nothing():
    model, optimizer = make("SFNorMuon", weight_decay=0.3)
    for step in range(3):
        set_gradients(model, step)
        optimizer.step()
    set_gradients(model, 4)
    next(model.parameters()).grad[0, 0] = math.nan
    probe = Probe(optimizer)
    optimizer.step()
    assert optimizer.skipped_steps == 1
    found = probe.read()
    assert found["c"] == 0
    assert found["update_rms"] == pytest.approx(0, abs=1e-9)


def test_a_rate_of_zero_averages_nothing():
    model, optimizer = make("SFNorMuon", weight_decay=0.3)
    for step in range(3):
        set_gradients(model, step)
        optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = iterates(model, optimizer)
    set_gradients(model, 4)
    probe = Probe(optimizer)
    optimizer.step()
    assert all(torch.equal(before[n].x, i.x) for n, i in iterates(model, optimizer).items())
    assert probe.read()["c"] == 0


def test_an_average_that_is_told_to_wait_later():
    """As in a branch: X stays at Z though there is a sum already."""
    model, optimizer = make("SFNorMuon", weight_decay=0.3)
    for step in range(4):
        set_gradients(model, step)
        for group in optimizer.param_groups:
            group["averaging_warmup"] = 100 * (step == 3)
        probe = Probe(optimizer)
        optimizer.step()
    assert probe.read()["c"] == 1
    assert all(torch.equal(i.x, i.z) for i in iterates(model, optimizer).values())


def test_parameters_that_are_not_trained_are_not_watched():
    model, _ = make("SFNorMuon")
    for p in model.blocks.parameters():
        p.requires_grad_(False)
    model.embedding.weight.requires_grad_(False)
    optimizer = anytime.SFNorMuon(model)
    probe = Probe(optimizer)
    optimizer.step()
    assert probe.read() == {}


# ------------------------------------------------------------------ in detail


def details(optimizer, model, step):
    set_gradients(model, step)
    probe = Probe(optimizer)
    optimizer.step()
    with detailed():
        return probe.read()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SFNorMuon", {"weight_decay": 0.3}),
        ("SFNorMuon", {"weight_decay": 0.3, "beta_growth": 0.5, "beta_growth_start": 2}),
        ("SFNorMuon", {"weight_decay": 0.3, "decay_fading": 2}),
        ("SFNorMuon", {"weight_decay": 0.3, "decay_fading": 2, "rate_fall": 0.5, "rate_fall_start": 2}),
        ("SFMuon", {"weight_decay": 0.1}),
        ("SFSpectralSGD", {"weight_decay": 0.2}),
        ("NorMuon", {"weight_decay": 0.2}),
        ("SFAdamW", {"weight_decay": 0.3, "decay_at": "z"}),
    ],
)
def test_the_recursion_of_rho_holds_to_rounding(name, options):
    """ρ_{t+1}² = (1 − ηλ)² ρ_t² − 2 u η (1 − ηλ) α_t ρ_t + u² η², by layer."""
    model, optimizer = make(name, **options)
    for step in range(1, 6):
        found = details(optimizer, model, step)
        eta = LR * min(1.0, step / WARMUP) * (math.sqrt(1 - 0.99**step) if name == "SFAdamW" else 1)
        fall = max(step - 1, 1) ** -options.get("rate_fall", 0.0)
        eta *= fall
        T = options.get("decay_fading", math.inf)
        decay = options["weight_decay"] / (1 + step / T) / fall
        kept = 1 - eta * decay
        for row in found["layers"].values():
            rho, alpha, u = row["rho_before"], row["alpha"], row["update_rms"]
            wanted = (kept * rho) ** 2 - 2 * u * eta * kept * alpha * rho + (u * eta) ** 2
            assert row["rho"] ** 2 == pytest.approx(wanted, rel=1e-12)
            assert row["change"] == pytest.approx(abs(row["rho"] - rho) / rho, rel=1e-9)
            root = math.sqrt(alpha**2 + 2 * eta * decay)
            assert row["predicted"] == pytest.approx(u / 2 * (root - alpha) / decay, rel=1e-12)


def test_details_are_by_layer_and_their_means():
    model, optimizer = make("SFNorMuon", weight_decay=0.3)
    for step in range(4):
        old = iterates(model, optimizer)
        found = details(optimizer, model, step)
    layers = found.pop("layers")
    names = [n for n, _ in model.named_parameters() if n != "embedding.weight"]
    assert list(layers) == names
    total = found.pop("distance")
    for key, value in found.items():
        assert value == pytest.approx(mean(row[key] for row in layers.values()), rel=1e-12)
    new = iterates(model, optimizer)
    for n in names:
        assert layers[n]["rho"] == pytest.approx(rms(new[n].z), rel=1e-12)
        assert layers[n]["rho_before"] == pytest.approx(rms(old[n].z), rel=1e-12)
        assert layers[n]["distance"] == pytest.approx(float((new[n].x - new[n].z).norm()), rel=1e-12)
    assert total == pytest.approx(math.sqrt(sum(float((i.x - i.z).norm()) ** 2 for i in new.values())), rel=1e-9)


@pytest.mark.parametrize(("name", "rows"), [("SFSpectralSGD", False), ("SFNorMuon", True), ("SFMuon", False)])
def test_the_polar_error_is_of_the_factor_before_its_rows_are_normalized(name, rows):
    """The exact factor has none; Newton-Schulz's squared singular values spread by as much as is told."""
    exact, optimizer = make(name, weight_decay=0.3, polar="svd")
    for step in range(3):
        found = details(optimizer, exact, step)
    assert found["polar_error"] == pytest.approx(0, abs=1e-6)
    model, optimizer = make(name, weight_decay=0.3, polar="newton-schulz")
    for step in range(3):
        found = details(optimizer, model, step)
    for n, p in model.named_parameters():
        if n != "embedding.weight":
            squares = torch.linalg.svdvals(optimizer_factor(optimizer, p)).square()
            spread = float(squares.std(correction=0) / squares.mean())
            assert found["layers"][n]["polar_error"] == pytest.approx(spread, rel=1e-6)
    assert (found["row_spread"] < 0.5) == rows or not rows


def optimizer_factor(optimizer, p):
    from anytime.core.polar import polar

    return polar(optimizer.state[p]["momentum"].unsqueeze(0), "newton-schulz", None)[0]


def test_the_spread_of_rows():
    """Of equal rows none; of rows of norm 1 and 3, one half."""
    model = nn.Sequential(nn.Linear(4, 2, bias=False), nn.Linear(2, 1, bias=False)).double()
    optimizer = anytime.SFSpectralSGD(
        model, lr=LR, rules={"0.weight": "matrix"}, polar=lambda M: torch.tensor([[1.0, 0, 0, 0], [0, 3, 0, 0]]).to(M)
    )
    set_gradients(model, 0)
    probe = Probe(optimizer)
    optimizer.step()
    with detailed():
        assert probe.read()["layers"]["0.weight"]["row_spread"] == pytest.approx(0.5, rel=1e-9)


def test_without_decay_of_all_of_z_nothing_is_predicted():
    for options in (
        {"weight_decay": 0.0},
        {"weight_decay": 0.3, "decay_at": "y"},
        {"weight_decay": 0.3, "cautious": True},
    ):
        model, optimizer = make("SFNorMuon", **options)
        assert "predicted" not in details(optimizer, model, 0)


def test_a_matrix_that_starts_at_zero_changes_by_all_of_itself():
    model, optimizer = make("SFNorMuon", weight_decay=0.3)
    with torch.no_grad():
        model.blocks[0].o.weight.zero_()
    layers = details(optimizer, model, 0)["layers"]
    assert layers["blocks.0.o.weight"]["change"] == 1
