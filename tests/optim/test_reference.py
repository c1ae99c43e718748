"""Every schedule-free optimizer against the paper's algorithms line by line, x, y and z all stored."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import anytime
from anytime.core.polar import COEFFICIENTS
from anytime.optim.reference import (
    Reference,
    ReferenceSFAdamW,
    ReferenceSFLion,
    ReferenceSFNorMuon,
    ReferenceSFSGD,
    ReferenceSFSpectralSGD,
)

STEPS = 300
CHECKED = (1, 2, 30, 61, 150, STEPS)
SHAPES: dict[str, tuple[int, ...]] = {
    "tall": (12, 7),
    "wide": (7, 12),
    "square": (8, 8),
    "line": (1, 9),
    "kernel": (6, 3, 2, 2),
    "experts": (3, 5, 4),
    "vector": (10,),
    "scalar": (),
}
TWO = ("tall", "wide")
ALL = tuple(SHAPES)
MATRICES = ("tall", "wide", "square", "kernel", "experts")
BETAS = {
    "constant": {"beta": 0.9},
    "growing": {
        "beta": 0.4, "beta_growth": 0.4, "beta_growth_start": 60, "decay_fading": 40,
        "rate_fall": 0.3, "rate_fall_start": 50,
    },
    "zero": {"beta": 0.0, "rate_fall": 0.3, "rate_fall_start": 50},
}  # fmt: skip
DTYPES = (torch.float64, torch.float32)


def cut(name: str, w: Tensor) -> list[Tensor]:
    """The tensors that the algorithm works on, one by one: a kernel is out × rest, experts are matrices."""
    if name == "kernel":
        return [w.reshape(w.shape[0], -1)]
    return [w[i] for i in range(w.shape[0])] if name == "experts" else [w]


@functools.cache
def problem(shapes: tuple[tuple[str, tuple[int, ...]], ...], dtype: torch.dtype) -> tuple[dict[str, Tensor], ...]:
    """First weights, and STEPS gradients of each parameter: a signal with noise."""
    generator = torch.Generator().manual_seed(7)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    start = {name: draw(shape).to(dtype) for name, shape in shapes}
    grads = {name: (draw(shape) + 0.5 * draw(STEPS, *shape)).to(dtype) for name, shape in shapes}
    return start, grads


def newton_schulz(M: Tensor) -> Tensor:
    X = M / M.norm()
    for _ in range(5):
        A = X @ X.T
        X = 3.4445 * X - 4.7750 * A @ X + 2.0315 * A @ A @ X
    return X


def polar_express(M: Tensor) -> Tensor:
    X = M / (1.02 * M.norm())
    for a, b, c in COEFFICIENTS["polar-express"].steps:
        A = X @ X.T
        X = a * X + b * A @ X + c * A @ A @ X
    return X


def svd(M: Tensor) -> Tensor:
    U, _, Vh = torch.linalg.svd(M, full_matrices=False)
    return U @ Vh


POLARS = {"newton-schulz": newton_schulz, "polar-express": polar_express, "svd": svd}


def frobenius_ball(Z: Tensor, radius: float) -> Tensor:
    return Z * min(1.0, radius / float(Z.norm()))


def spectral_ball(Z: Tensor, radius: float) -> Tensor:
    U, S, Vh = torch.linalg.svd(Z, full_matrices=False)
    return U @ torch.diag(S.clamp(max=radius)) @ Vh


def error(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    return float((a - b).norm() / b.norm())


def compare(
    build: Callable[[list[tuple[str, torch.nn.Parameter]]], anytime.AnytimeOptimizer],
    reference: Callable[[str, Tensor], Reference],
    names: tuple[str, ...],
    dtype: torch.dtype,
    *,
    shapes: dict[str, tuple[int, ...]] = SHAPES,
    cut: Callable[[str, Tensor], list[Tensor]] = cut,
    tolerance: float | None = None,
) -> None:
    """Both get the same gradients; X, Y and Z of every piece agree at some of the steps and at the last."""
    tolerance = tolerance or {torch.float64: 1e-10, torch.float32: 1e-5}[dtype]
    start, grads = problem(tuple((name, shapes[name]) for name in names), dtype)
    params = {name: torch.nn.Parameter(start[name].clone()) for name in names}
    optimizer = build(list(params.items()))
    references = {name: [reference(name, piece.clone()) for piece in cut(name, start[name])] for name in names}
    for t in range(1, STEPS + 1):
        for name, p in params.items():
            p.grad = grads[name][t - 1]
            for piece, G in zip(references[name], cut(name, p.grad), strict=True):
                piece.step(G)
        optimizer.step()
        if t not in CHECKED:
            continue
        for name, p in params.items():
            iterates = optimizer.iterates(p)
            assert torch.equal(iterates.y, p)
            for sequence in ("x", "y", "z"):
                for i, (fast, slow) in enumerate(
                    zip(cut(name, getattr(iterates, sequence)), references[name], strict=True)
                ):
                    far = error(fast, getattr(slow, sequence))
                    assert far <= tolerance, f"{sequence} of {name}, piece {i}, step {t}: {far:.1e}"


def averaging(beta: str, r: float, warm: int) -> dict[str, Any]:
    """Options of the average but β, as both take them."""
    growth = {key: value for key, value in BETAS[beta].items() if key != "beta"}
    return {"averaging_power": r, "averaging_warmup": warm, **growth}


def adam_part(common: dict[str, Any], average: dict[str, Any], beta: float) -> Callable[[Tensor], ReferenceSFAdamW]:
    """What is no matrix follows SF-AdamW with decay at y and betas (0.95, 0.99), or (β, 0.99) if β grows."""
    own = beta if "beta_growth" in average else 0.95
    return lambda w: ReferenceSFAdamW(w, beta=own, beta2=0.99, eps=1e-8, decay_at="y", **common, **average)


def check_spectral(
    row_norm: bool,
    dtype: torch.dtype,
    names: tuple[str, ...],
    *,
    decay_at: str | None,
    beta: str,
    r: float,
    warm: int,
    momentum: float,
    polar: str = "newton-schulz",
    **more: Any,
) -> None:
    common = {"lr": 0.02, "weight_decay": 0.1, "warmup_steps": 50}
    average, b = averaging(beta, r, warm), BETAS[beta]["beta"]
    rest = adam_part(common, average, b)

    def build(params: list[tuple[str, torch.nn.Parameter]]) -> anytime.AnytimeOptimizer:
        shared = {**common, **average, "momentum": momentum, "decay_at": decay_at, "polar": polar, "polar_dtype": dtype}
        shared |= more
        if row_norm:
            return anytime.SFNorMuon(params, betas=(b, 0.9), **shared)
        return anytime.SFMuon(params, beta=b, **shared)

    def reference(name: str, w: Tensor) -> Reference:
        if name not in MATRICES:
            return rest(w)
        own = {"polar": POLARS[polar], "momentum": momentum, "beta2": 0.9, "row_norm": row_norm, "decay_at": decay_at}
        return ReferenceSFNorMuon(w, beta=b, **own, **common, **average, **more)

    tolerance = 3e-5 if dtype == torch.float32 and momentum == 0 else None
    compare(build, reference, names, dtype, tolerance=tolerance)


DECAYS = ("z", "y", None)
CROSS = list(itertools.product(DECAYS, BETAS, (0.0, 3.0), (0.8, 0.0)))
#: Every pair of decay, β, r and momentum.
PAIRS = [
    (decay_at, beta, 3.0 * ((i + j) % 2), 0.8 * (1 <= i + j <= 2))
    for (i, decay_at), (j, beta) in itertools.product(enumerate(DECAYS), enumerate(BETAS))
]


@pytest.mark.parametrize(("decay_at", "beta", "r"), list(itertools.product(DECAYS, BETAS, (0.0, 3.0))))
def test_sf_normuon(decay_at, beta, r):
    check_spectral(True, torch.float64, TWO, decay_at=decay_at, beta=beta, r=r, warm=30 if r else 0, momentum=0.8)


@pytest.mark.parametrize(("decay_at", "beta", "r", "momentum"), PAIRS)
@pytest.mark.parametrize(("row_norm", "dtype"), [(True, torch.float32), (False, torch.float64)])
def test_spectral_pairs(row_norm, decay_at, beta, r, momentum, dtype):
    check_spectral(row_norm, dtype, TWO, decay_at=decay_at, beta=beta, r=r, warm=30 if not r else 0, momentum=momentum)


@pytest.mark.parametrize("decay_at", ["z", "y"])
def test_cautious_decay(decay_at):
    options = {"decay_at": decay_at, "beta": "growing", "r": 3.0, "warm": 0, "momentum": 0.8, "cautious": True}
    check_spectral(True, torch.float64, TWO, **options)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(("row_norm", "dtype"), [(True, torch.float32), (False, torch.float64)])
def test_growing_momentum(row_norm, dtype, nesterov):
    options = {"decay_at": "z", "beta": "growing", "r": 3.0, "warm": 0, "momentum": 0.5, "nesterov": nesterov}
    check_spectral(row_norm, dtype, TWO, **options, momentum_growth=0.6, momentum_growth_start=20)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("decay_at", "beta", "r", "momentum"), CROSS)
@pytest.mark.parametrize("row_norm", [True, False])
def test_spectral_cross(row_norm, decay_at, beta, r, momentum, dtype):
    check_spectral(row_norm, dtype, ALL, decay_at=decay_at, beta=beta, r=r, warm=30 if r else 0, momentum=momentum)


@pytest.mark.parametrize(
    ("row_norm", "beta", "momentum", "polar", "dtype"),
    [
        (True, "constant", 0.8, "newton-schulz", torch.float64),
        (True, "constant", 0.8, "newton-schulz", torch.float32),
        (True, "growing", 0.0, "newton-schulz", torch.float32),
        (True, "zero", 0.8, "polar-express", torch.float64),
        (False, "growing", 0.8, "svd", torch.float64),
        (False, "constant", 0.0, "polar-express", torch.float32),
    ],
)
def test_spectral_all_shapes(row_norm, beta, momentum, polar, dtype):
    """Tall, wide, square, kernel and experts in one optimizer with a line, a vector and a scalar, which follow SF-AdamW
    with settings of its own."""
    check_spectral(row_norm, dtype, ALL, decay_at="z", beta=beta, r=3.0, warm=30, momentum=momentum, polar=polar)


@pytest.mark.parametrize(
    ("bias_correction", "dtype"), [("rate", torch.float64), ("moment", torch.float32), (None, torch.float64)]
)
def test_adam_part_has_its_own_settings(bias_correction, dtype):
    def build(params):
        return anytime.SFNorMuon(
            params,
            lr=0.02,
            weight_decay=0.1,
            warmup_steps=50,
            polar_dtype=dtype,
            adam_lr=0.005,
            adam_betas=(0.8, 0.97),
            adam_eps=1e-3,
            adam_weight_decay=0.3,
            adam_decay_at="z",
            adam_bias_correction=bias_correction,
        )

    def reference(name, w):
        if name == "tall":
            own = {"lr": 0.02, "weight_decay": 0.1, "polar": newton_schulz, "momentum": 0.8, "beta2": 0.95}
            return ReferenceSFNorMuon(w, beta=0.9, decay_at="z", warmup_steps=50, **own)
        own = {"lr": 0.005, "weight_decay": 0.3, "beta2": 0.97, "eps": 1e-3, "bias_correction": bias_correction}
        return ReferenceSFAdamW(w, beta=0.8, decay_at="z", warmup_steps=50, **own)

    compare(build, reference, ("tall", "line", "vector", "scalar"), dtype)


def check_elementwise(kind: str, dtype: torch.dtype, decay_at: str | None, beta: str, r: float, warm: int) -> None:
    common = {"lr": 0.02, "weight_decay": 0.1, "warmup_steps": 50, "decay_at": decay_at, **averaging(beta, r, warm)}
    b = BETAS[beta]["beta"]
    build, reference = {
        "sgd": (
            lambda params: anytime.SFSGD(params, beta=b, **common),
            lambda _, w: ReferenceSFSGD(w, beta=b, **common),
        ),
        "lion": (
            lambda params: anytime.SFLion(params, beta=b, betas=(0.8, 0.95), **common),
            lambda _, w: ReferenceSFLion(w, beta=b, betas=(0.8, 0.95), **common),
        ),
        **{
            f"adamw {correction}": (
                lambda params, c=correction: anytime.SFAdamW(
                    params, betas=(b, 0.97), eps=1e-6, bias_correction=c, **common
                ),
                lambda _, w, c=correction: ReferenceSFAdamW(
                    w, beta=b, beta2=0.97, eps=1e-6, bias_correction=c, **common
                ),
            )
            for correction in ("rate", "moment", None)
        },
    }[kind]
    compare(build, reference, ("tall", "experts", "scalar"), dtype, cut=lambda _, w: [w])


ELEMENTWISE = ("sgd", "lion", "adamw rate", "adamw moment", "adamw None")


@pytest.mark.parametrize(
    ("kind", "decay_at", "beta", "r"),
    [(kind, *pair[:3]) for i, kind in enumerate(ELEMENTWISE) for pair in (PAIRS if i < 3 else PAIRS[i % 3 :: 4])],
)
def test_elementwise(kind, decay_at, beta, r):
    dtype = torch.float32 if decay_at == "y" else torch.float64
    check_elementwise(kind, dtype, decay_at, beta, r, warm=0 if r else 30)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("decay_at", "beta", "r"), list(itertools.product(DECAYS, BETAS, (0.0, 3.0))))
@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_elementwise_cross(kind, decay_at, beta, r, dtype):
    check_elementwise(kind, dtype, decay_at, beta, r, warm=30 if r else 0)


@pytest.mark.parametrize(
    ("projection", "decay_at", "beta", "momentum", "dtype"),
    [
        (None, None, "constant", 0.9, torch.float64),
        (None, "z", "growing", 0.9, torch.float32),
        (None, "y", "zero", 0.0, torch.float32),
        ("frobenius", "y", "constant", 0.9, torch.float64),
        ("frobenius", "z", "growing", 0.5, torch.float32),
        ("spectral", "z", "growing", 0.9, torch.float64),
        ("spectral", None, "zero", 0.0, torch.float32),
    ],
)
def test_sf_spectral_sgd(projection, decay_at, beta, momentum, dtype):
    """Exact polar factors, M_1 = G_1; a projection keeps each matrix of Z, and nothing else, in its ball."""
    common = {"lr": 0.02, "weight_decay": 0.1, "warmup_steps": 50}
    average, b = averaging(beta, 3.0 if beta == "growing" else 0.0, 30 if beta == "zero" else 0), BETAS[beta]["beta"]
    radius = 1.5
    ball = {
        None: lambda Z: Z,
        "frobenius": lambda Z: frobenius_ball(Z, radius),
        "spectral": lambda Z: spectral_ball(Z, radius),
    }[projection]
    rest = adam_part(common, average, b)
    outside = []

    def build(params):
        own = {"momentum": momentum, "decay_at": decay_at, "projection": projection}
        return anytime.SFSpectralSGD(params, beta=b, radius=radius if projection else None, **own, **common, **average)

    def project(Z):
        inside = ball(Z)
        outside.append(not torch.allclose(inside, Z))
        return inside

    def reference(name, w):
        if name not in MATRICES:
            return rest(w)
        own = {"polar": svd, "momentum": momentum, "project": project, "decay_at": decay_at}
        return ReferenceSFSpectralSGD(w, beta=b, **own, **common, **average)

    names = ("tall", "wide", "kernel", "experts", "vector", "scalar")
    compare(build, reference, names, dtype, tolerance=3e-5 if dtype == torch.float32 and momentum == 0 else None)
    assert projection is None or sum(outside) > STEPS, "the ball never mattered"


def test_split_matrices_are_separate():
    """A fused matrix split into parts equals the parts on their own: rows by number, rows by sizes, columns, a kernel's
    columns and the rows of experts."""
    shapes = {"qkv": (12, 5), "gate": (9, 4), "sides": (4, 9), "kernel": (4, 3, 2, 2), "experts": (3, 6, 4)}
    split = {
        "qkv": 3,
        "gate": (6, 3),
        "sides": {"sizes": (4, 5), "dim": 1},
        "kernel": {"sizes": 2, "dim": 1},
        "experts": {"sizes": (2, 4), "dim": 0},
    }
    common = {"lr": 0.02, "weight_decay": 0.1, "warmup_steps": 50, "averaging_power": 3.0}

    def pieces(name, w):
        if name == "kernel":
            w = w.reshape(4, 12)
            return [w[:, :6], w[:, 6:]]
        if name == "experts":
            return [part for expert in w for part in (expert[:2], expert[2:])]
        return {
            "qkv": lambda: [w[:4], w[4:8], w[8:]],
            "gate": lambda: [w[:6], w[6:]],
            "sides": lambda: [w[:, :4], w[:, 4:]],
        }[name]()

    def build(params):
        rules = {name: {"split": how} for name, how in split.items()}
        return anytime.SFNorMuon(params, rules=rules, polar_dtype=torch.float64, **common)

    def reference(_, w):
        own = {"polar": newton_schulz, "momentum": 0.8, "beta2": 0.95, "decay_at": "z"}
        return ReferenceSFNorMuon(w, beta=0.9, **own, **common)

    compare(build, reference, tuple(shapes), torch.float64, shapes=shapes, cut=pieces)


def test_rates_multiply_by_pattern():
    """`rate` and `lr` of a pattern hold for the matrices and for the rest; others keep the optimizer's."""
    common = {"weight_decay": 0.1, "warmup_steps": 50}
    lr = {"tall": 0.02 * 0.25, "wide": 0.02, "square": 0.05, "vector": 0.02 * 3, "scalar": 0.02}

    def build(params):
        rules = {"tall": {"rate": 0.25}, "square": {"lr": 0.05}, "vec*": {"rate": 3.0}}
        return anytime.SFNorMuon(params, lr=0.02, rules=rules, polar_dtype=torch.float64, **common)

    def reference(name, w):
        own = {"lr": lr[name], **common}
        if name in MATRICES:
            return ReferenceSFNorMuon(w, beta=0.9, polar=newton_schulz, momentum=0.8, beta2=0.95, decay_at="z", **own)
        return adam_part(own, {}, 0.9)(w)

    compare(build, reference, tuple(lr), torch.float64)


def test_rates_multiply_by_group():
    """Groups may differ in every option; a key of a group with a matrix in it reaches the rest if both share it."""
    rate = {"tall": 0.5, "vector": 0.5, "wide": 2.0, "scalar": 1.0}

    def build(params):
        named = dict(params)
        groups = [
            {"params": [(name, named[name]) for name in ("tall", "vector")], "rate": 0.5, "averaging_power": 3.0},
            {"params": [("wide", named["wide"])], "rate": 2.0, "momentum": 0.6, "betas": (0.7, 0.8), "decay_at": "y"},
            {"params": [("scalar", named["scalar"])], "betas": (0.7, 0.8)},
        ]
        return anytime.SFNorMuon(groups, lr=0.02, weight_decay=0.1, warmup_steps=50, polar_dtype=torch.float64)

    def reference(name, w):
        own = {"lr": 0.02 * rate[name], "weight_decay": 0.1, "warmup_steps": 50}
        power = {"averaging_power": 3.0} if rate[name] == 0.5 else {}
        if name == "vector":
            return adam_part(own, power, 0.9)(w)
        if name == "scalar":
            return ReferenceSFAdamW(w, beta=0.7, beta2=0.8, eps=1e-8, decay_at="y", **own)
        wide = name == "wide"
        settings = (
            {"beta": 0.7, "beta2": 0.8, "momentum": 0.6} if wide else {"beta": 0.9, "beta2": 0.95, "momentum": 0.8}
        )
        return ReferenceSFNorMuon(w, polar=newton_schulz, decay_at="y" if wide else "z", **settings, **own, **power)

    compare(build, reference, tuple(rate), torch.float64)
