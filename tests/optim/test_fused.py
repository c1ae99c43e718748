"""The step by kernels against the slow way, which is the definition: every option, layout and precision they take, and
whatever may happen between two steps. Here they run in Triton's interpreter; test_cuda.py has them on a GPU."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import anytime
from anytime.core.layout import Layout
from anytime.core.polar import COEFFICIENTS
from anytime.optim import fused

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted where there is no GPU"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of overflow in a branch not taken
]

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
POLAR = {"polar_dtype": F32}


class Way:
    """Which way steps go."""

    kernels = True


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels take tensors of the CPU, and float32 for the polar factor, so that both ways agree to its digits."""
    monkeypatch.setattr(Way, "kernels", True)
    monkeypatch.setattr(fused, "available", lambda device: Way.kernels)
    monkeypatch.setattr(fused, "_POLAR", (*fused._POLAR, F32))


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody has written yet reads as NaN."""

    def filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def poison(*args: Any, **kw: Any) -> Tensor:
            tensor = make(*args, **kw)
            if tensor.numel() and tensor.is_contiguous():
                tensor.view(-1).view(torch.uint8).fill_(255)
            return tensor

        return poison

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, filled(getattr(torch, name)))


@pytest.fixture
def quick_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The polynomials by torch, in the same memory: for tests that are about the rest."""
    from anytime.core.kernels import products

    def polynomial(form: Any, memory: Tensor, scales: Tensor, steps: Any, restart: int) -> Tensor:
        X = products.matrices(memory, len(scales), *form.sides) * scales.view(-1, 1, 1).to(memory.dtype)
        for a, b, c in steps:
            A = X @ X.mT
            X = a * X + (b * A + c * A @ A) @ X
        memory.fill_(float("nan"))
        return products.matrices(memory, len(scales), form.m, form.n, form.whole).copy_(X.mT if form.tall else X)

    monkeypatch.setattr(products, "polynomial", polynomial)


def step(optimizer: torch.optim.Optimizer, kernels: bool) -> None:
    before, Way.kernels = Way.kernels, kernels
    try:
        optimizer.step()
    finally:
        Way.kernels = before


def randn(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights(shapes: Any, dtype: torch.dtype = F32) -> list[nn.Parameter]:
    return [nn.Parameter(randn(shape, i).to(dtype)) for i, shape in enumerate(shapes)]


def feed(params: Any, seed: int, scale: float = 1.0) -> None:
    """Gradients at new addresses; numbers that every precision has."""
    for i, p in enumerate(params):
        p.grad = (randn(p.shape, 1000 * (seed + 1) + i) * scale).to(BF16).to(p.dtype)


def agree(one: Any, two: Any, tolerance: float = 2e-5) -> None:
    """The first went by kernels, the second not: the same state and iterates, but for the last digits."""
    for group, other in zip(one.param_groups, two.param_groups, strict=True):
        for p, q in zip(group["params"], other["params"], strict=True):
            a, b = one.state.get(p, {}), two.state.get(q, {})
            assert a.keys() == b.keys()
            for name in a:
                assert a[name].dtype == b[name].dtype
                if a[name].dtype == F64 and a[name].ndim == 0:
                    torch.testing.assert_close(a[name], b[name], rtol=1e-12, atol=0, msg=name)
                elif name != "residual":  # it is what rounding took: the iterates have it
                    near(a[name], b[name], max(tolerance, 2e-2 if a[name].dtype == BF16 else 0), name)
            for x, y in zip(one.iterates(p), two.iterates(q), strict=True):
                near(x, y, tolerance, f"an iterate of {tuple(p.shape)}")
    assert one.skipped_steps == two.skipped_steps


def near(a: Tensor, b: Tensor, tolerance: float, what: str) -> None:
    assert a.isfinite().all(), what
    assert float((a.double() - b.double()).norm()) <= tolerance * (float(b.double().norm()) + 1e-30), what


def snapshot(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Weights and all state, as they are in memory."""
    return [
        value.detach().clone().contiguous().view(-1).view(torch.uint8)
        for group in optimizer.param_groups
        for p in group["params"]
        for value in (p, *(state for _, state in sorted(optimizer.state.get(p, {}).items())))
    ]


def same_bits(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def taken(optimizer: Any) -> tuple[int, int]:
    """How many parameters go by kernels, and how many do not."""
    by_kernels, rest = fused.split(optimizer._work())
    return (
        sum(len(members) for work in by_kernels.values() for _, members in work),
        sum(len(members) for _, members in rest),
    )


def both_ways(
    make: Callable[[list[nn.Parameter]], Any], shapes: Any, dtype: torch.dtype = F32, steps: int = 3
) -> tuple[Any, Any]:
    """The same steps by kernels and without, from gradients of changing scale."""
    pair = []
    for kernels in (True, False):
        params = weights(shapes, dtype)
        optimizer = make(params)
        for t in range(steps):
            feed(params, t, scale=(1.0, 1e3, 1e-3, 30.0)[t % 4])
            step(optimizer, kernels)
        pair.append(optimizer)
    assert taken(pair[0]) == (sum(nn.Parameter(torch.empty(s)).numel() > 0 for s in shapes), 0)
    assert pair[0]._fused._engines
    assert not pair[1]._fused._engines
    return pair[0], pair[1]


@pytest.mark.parametrize(
    ("polar", "dtype", "straight"),
    [
        ("polar-express-4", torch.float16, [True, False, False]),
        ("newton-schulz", torch.float16, [False] * 3),
        ("polar-express-4", torch.bfloat16, [False] * 3),
    ],
)
def test_what_goes_straight_on(polar, dtype, straight, monkeypatch):
    """Four steps in float16 on the Gram matrix, from 512 rows on: it has the digits, and there are rows enough."""
    from anytime.core.kernels import products

    forms = []

    def nothing(form: Any, memory: Tensor, scales: Tensor, steps: Any, restart: int) -> Tensor:
        forms.append(form)
        return products.matrices(memory, len(scales), form.m, form.n).zero_()

    monkeypatch.setattr(products, "polynomial", nothing)
    params = [nn.Parameter(torch.zeros(shape)) for shape in ((1024, 512), (511, 1022), (512, 600))]
    for p in params:
        p.grad = torch.zeros_like(p)
    anytime.SFNorMuon(params, polar=polar, polar_dtype=dtype).step()
    assert [form.straight for form in forms] == straight


# ---------------------------------------------------------------------------- options

#: Square, tall (both forms), wide (both forms), of rank one, two of a shape, and what is no matrix.
SHAPES = [(6, 6), (9, 7), (13, 5), (7, 9), (5, 13), (1, 3), (3, 1), (7, 9), (4,), ()]
SOME = [(9, 7), (5, 13), (4,)]

SF = {"lr": 0.05, "warmup_steps": 3}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "SFNorMuon": ("SFNorMuon", SF),
    "SFMuon": ("SFMuon", SF),
    "SFAdamW": ("SFAdamW", SF),
    "NorMuon": ("NorMuon", {"lr": 0.05}),
    "Muon": ("Muon", {"lr": 0.05}),
    "AdamW": ("AdamW", {"lr": 0.05}),
    "nesterov": ("SFNorMuon", {**SF, "nesterov": True}),
    "no nesterov": ("Muon", {"lr": 0.05, "nesterov": False}),
    "decay at y": ("SFNorMuon", {**SF, "decay_at": "y", "adam_decay_at": "z", "weight_decay": 4.0}),
    "decay at z": ("SFNorMuon", {**SF, "decay_at": "z", "adam_decay_at": None, "weight_decay": 4.0}),
    "decay nowhere": ("SFMuon", {**SF, "decay_at": None, "weight_decay": 0.5}),
    "no decay": ("NorMuon", {"lr": 0.05, "weight_decay": 0.0}),
    "decay of one part": ("SFNorMuon", {**SF, "weight_decay": 0.0, "adam_weight_decay": 0.5}),
    "no row norm": ("SFNorMuon", {**SF, "row_norm": False}),
    "aspect": ("Muon", {"lr": 0.05, "scaling": "aspect"}),
    "aspect of rows": ("NorMuon", {"lr": 0.05, "scaling": "aspect"}),
    "max-side": ("SFNorMuon", {**SF, "scaling": "max-side", "update_rms": 0.5}),
    "no scaling": ("Muon", {"lr": 0.05, "scaling": None}),
    "update_rms": ("SFMuon", {**SF, "update_rms": 0.7}),
    "average": ("SFNorMuon", {**SF, "averaging_power": 1.5, "averaging_warmup": 1}),
    "growth": ("SFNorMuon", {**SF, "beta_growth": 0.6, "beta_growth_start": 2, "betas": (0.5, 0.9)}),
    "growing momentum": ("SFNorMuon", {**SF, "momentum_growth": 0.7, "momentum_growth_start": 2}),
    "growing momentum, nesterov": (
        "SFMuon",
        {**SF, "momentum_growth": 2.0, "momentum_growth_start": 3, "nesterov": True},
    ),
    "growing momentum, scheduled": ("NorMuon", {"lr": 0.05, "momentum_growth": 0.4, "momentum_growth_start": 2}),
    "fading": ("SFNorMuon", {**SF, "weight_decay": 4.0, "decay_fading": 2}),
    "falling": ("SFNorMuon", {**SF, "weight_decay": 4.0, "rate_fall": 0.7, "rate_fall_start": 2}),
    "falling and fading": (
        "SFAdamW",
        {**SF, "weight_decay": 4.0, "decay_fading": 2, "rate_fall": 0.7, "rate_fall_start": 3},
    ),
    "cautious": ("SFNorMuon", {**SF, "weight_decay": 4.0, "cautious": True}),
    "cautious at y": ("SFMuon", {**SF, "weight_decay": 4.0, "cautious": True, "decay_at": "y"}),
    "cautious, scheduled": ("NorMuon", {"lr": 0.05, "weight_decay": 4.0, "cautious": True}),
    "beta 0": ("SFAdamW", {**SF, "betas": (0.0, 0.0)}),
    "beta 1": ("SFMuon", {**SF, "beta": 1.0, "momentum": 0.0}),
    "no warmup": ("SFNorMuon", {"lr": 0.05, "warmup_steps": 0}),
    "no eps": ("NorMuon", {"lr": 0.05, "eps": 0.0, "adam_eps": 0.0}),
    "lr 0": ("SFNorMuon", {**SF, "lr": 0.0}),
    "bias moment": ("SFNorMuon", {**SF, "adam_bias_correction": "moment"}),
    "bias none": ("SFNorMuon", {**SF, "adam_bias_correction": None}),
    "first moment, bias rate": ("AdamW", {"lr": 0.05, "bias_correction": "rate"}),
    "first moment, bias none": ("AdamW", {"lr": 0.05, "bias_correction": None}),
    "polar-express": ("SFNorMuon", {**SF, "polar": "polar-express"}),
    "quintic": ("SFMuon", {**SF, "polar": "quintic"}),
    "narrow momentum": ("NorMuon", {"lr": 0.05, "momentum_dtype": BF16}),
    "a rate that is a tensor": ("SFNorMuon", {**SF, "lr": torch.tensor(0.05)}),
    "a rate of one entry": ("SFNorMuon", {**SF, "lr": torch.tensor([0.05])}),
}


def build(name: str, options: dict[str, Any], params: Any, **more: Any) -> Any:
    return getattr(anytime, name)(params, **options, **(POLAR if name[-4:] == "Muon" else {}), **more)


@pytest.mark.usefixtures("poisoned", "quick_products")
@pytest.mark.parametrize("case", CASES)
def test_every_option_equals_the_slow_way(case):
    name, options = CASES[case]
    one, two = both_ways(lambda params: build(name, options, params), SOME, steps=4)
    narrow = options.get("momentum_dtype") is not None
    agree(one, two, 5e-3 if narrow else 2e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("polar", "rows"), [*((polar, 256) for polar in COEFFICIENTS), ("polar-express-4", 512)])
def test_the_gram_form_in_a_step(polar, rows):
    """Wide and tall, by the kernels' own products, from the size on that the engine takes it; in one part or two."""
    shapes = [(rows, 2 * rows), (2 * rows, rows)]
    one, two = both_ways(lambda ps: build("SFNorMuon", {**SF, "polar": polar}, ps), shapes, steps=2)
    (engine,) = one._fused._engines.values()
    assert all(chunk.form.gram for part in engine.parts for chunk in part.chunks)
    agree(one, two, 1e-3)


@pytest.mark.usefixtures("poisoned", "quick_products")
@pytest.mark.parametrize("case", ["SFNorMuon", "Muon"])
def test_every_kind_of_shape(case):
    name, options = CASES[case]
    agree(*both_ways(lambda params: build(name, options, params), SHAPES))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", ["SFNorMuon", "Muon", "polar-express"])
def test_with_the_products_by_kernels_too(case):
    name, options = CASES[case]
    one, two = both_ways(lambda params: build(name, options, params), [(9, 7), (13, 5), (5, 13)], steps=2)
    agree(one, two, 1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", CASES)
def test_every_option_with_the_products_by_kernels_too(case):
    """At sizes about a tile's as well."""
    name, options = CASES[case]
    shapes = [*SHAPES, (127, 129), (129, 127), (3, 129)]
    one, two = both_ways(lambda params: build(name, options, params), shapes, steps=4)
    agree(one, two, 2e-2 if options.get("momentum_dtype") is not None else 3e-4)


@pytest.mark.usefixtures("poisoned", "quick_products")
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("case", ["SFNorMuon", "NorMuon", "SFAdamW", "AdamW"])
def test_every_precision_equals_the_slow_way(case, dtype):
    """y = p + residual to the digits of float32."""
    name, options = CASES[case]
    one, two = both_ways(lambda params: build(name, options, params), SOME, dtype)
    agree(one, two)


@pytest.mark.usefixtures("poisoned", "quick_products")
def test_a_narrow_momentum_beside_narrow_parameters():
    options = {**SF, "momentum_dtype": BF16, "row_norm": False}
    one, two = both_ways(lambda params: build("SFNorMuon", options, params), SOME, BF16)
    agree(one, two, 2e-2)


@pytest.mark.usefixtures("quick_products")
def test_precisions_side_by_side():
    """In one group, as torch allows."""
    pair = []
    for kernels in (True, False):
        params = [p for dtype in (F32, F16, BF16) for p in weights([(5, 7), (7, 5), (6,)], dtype)]
        optimizer = build("SFNorMuon", SF, params)
        for t in range(3):
            feed(params, t)
            step(optimizer, kernels)
        pair.append(optimizer)
    assert taken(pair[0]) == (9, 0)
    agree(*pair)


@pytest.mark.usefixtures("poisoned", "quick_products")
def test_groups_of_their_own_options():
    def make(params):
        groups = [
            {"params": params[:4], "lr": 0.1},
            {"params": params[4:6], "lr": torch.tensor(0.02), "weight_decay": 0.3, "momentum": 0.5},
            {"params": params[6:], "adam_lr": 0.2, "warmup_steps": 7},
        ]
        return build("SFNorMuon", SF, groups)

    agree(*both_ways(make, SHAPES, steps=4))


@pytest.mark.usefixtures("quick_products")
def test_options_that_kernels_do_not_take_go_the_slow_way(monkeypatch):
    monkeypatch.setattr(fused, "_POLAR", (None, F16, BF16))
    params = weights([(5, 7), (6,)])
    feed(params, 0)
    for kw in ({"polar": "svd"}, {"polar": lambda M: M}, {"polar": "low-rank"}, {"polar_dtype": F64}, POLAR):
        optimizer = anytime.SFNorMuon(params, **kw)
        assert taken(optimizer) == (1, 1), kw
        step(optimizer, True)
    assert taken(anytime.SFSpectralSGD(params, polar="newton-schulz")) == (1, 1)
    assert taken(anytime.SFSGD(params)) == (0, 2)
    assert taken(anytime.Lion(params)) == (0, 2)
    wide = weights([(5, 7), (6,)], F64)
    feed(wide, 0)
    assert taken(anytime.SFNorMuon(wide)) == (0, 2)


@pytest.mark.usefixtures("quick_products")
def test_a_momentum_that_kernels_do_not_read_goes_the_slow_way():
    pair = []
    for kernels in (True, False):
        params = weights([(5, 7), (6,)])
        optimizer = build("SFNorMuon", {**SF, "momentum_dtype": F64}, params)
        for t in range(2):
            feed(params, t)
            step(optimizer, kernels)
        pair.append(optimizer)
    for p, q in zip(*(o.param_groups[0]["params"] for o in pair), strict=True):
        near(p.detach(), q.detach(), 2e-5, "weights")


# ---------------------------------------------------------------------------- layouts


@pytest.mark.usefixtures("poisoned", "quick_products")
@pytest.mark.parametrize(("name", "chunk_bytes"), [("SFNorMuon", 1), ("Muon", None)], ids=["many chunks", "few chunks"])
def test_splits_experts_and_kernels_of_convolutions(name, chunk_bytes):
    shapes = {"rows": (12, 5), "columns": (5, 12), "experts": (3, 4, 7), "both": (2, 6, 7), "conv": (6, 2, 3, 3)}
    shapes |= {"uneven": (9, 4), "plain": (4, 5), "bias": (5,)}
    rules = {"rows": {"split": 3}, "columns": {"split": {"sizes": 3, "dim": 1}}, "both": {"split": [1, 5]}}
    rules |= {"uneven": {"split": [2, 7]}}

    def make(params):
        options = SF if name[:2] == "SF" else {"lr": 0.05}
        return build(name, options, list(zip(shapes, params, strict=True)), rules=rules, chunk_bytes=chunk_bytes)

    one, two = both_ways(make, shapes.values(), steps=2)
    layouts = {layout for group in one.param_groups for layout in group["layouts"]}
    assert {"matrix rows 4+4+4", "matrix columns 4+4+4", "matrix rows 1+5", "flat", "matrix"} <= layouts
    (engine,) = one._fused._engines.values()
    matrices = sum(
        len(list(Layout.parse(layout).addresses(p.shape)))
        for group in one.param_groups
        for p, layout in zip(group["params"], group["layouts"], strict=True)
        if group["rule"] in ("normuon", "muon")
    )
    chunks = [chunk for part in engine.parts for chunk in part.chunks]
    assert sum(len(chunk.pieces) for chunk in chunks) == matrices
    assert chunk_bytes is None or len(chunks) == matrices
    agree(one, two)


@pytest.mark.usefixtures("poisoned", "quick_products")
def test_a_chunk_of_some_matrices():
    """Seven of a shape, at most three at a time."""
    one, two = both_ways(lambda params: build("SFNorMuon", SF, params, chunk_bytes=3 * 4 * 384), [(7, 9)] * 7 + [(4,)])
    (engine,) = one._fused._engines.values()
    assert [len(chunk.pieces) for part in engine.parts for chunk in part.chunks] == [3, 3, 1]
    agree(one, two)


def test_no_chunk_has_more_matrices_than_a_launch_can():
    """65535 on the second axis of a grid."""
    params = weights([(70000, 2, 2)])
    optimizer = anytime.SFNorMuon(params, chunk_bytes=1 << 40)
    feed(params, 0)
    (work,) = fused.split(optimizer._work())[0].values()
    engine = optimizer._fused.get(work, True, 1 << 40, torch.zeros((), dtype=F64))
    chunks = [chunk for part in engine.parts for chunk in part.chunks]
    assert sum(len(chunk.pieces) for chunk in chunks) == 70000
    assert max(len(chunk.pieces) for chunk in chunks) <= 65535


@pytest.mark.usefixtures("poisoned", "quick_products")
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_parameters_and_gradients_at_odd_addresses(dtype):
    """Views into one buffer, a few elements apart; what lies between them stays."""
    pair = []
    for kernels in (True, False):
        plain = weights(SHAPES, dtype)
        size = sum(p.numel() + 3 for p in plain)
        buffer, grads = torch.full((size,), 7.0, dtype=dtype), torch.full((size,), float("nan"), dtype=dtype)
        at, params, places = 1, [], []
        for p in plain:
            places.append(slice(at, at + p.numel()))
            params.append(nn.Parameter(buffer[places[-1]].view(p.shape).copy_(p.detach())))
            at += p.numel() + 3
        optimizer = build("SFNorMuon", SF, params)
        for t in range(3):
            feed(plain, t)
            for p, q, place in zip(params, plain, places, strict=True):
                p.grad = grads[place].view(p.shape).copy_(q.grad)
            step(optimizer, kernels)
        between = buffer.clone()
        for place in places:
            between[place] = 7.0
        assert (between == 7.0).all()
        pair.append(optimizer)
    assert taken(pair[0]) == (len(SHAPES), 0)
    agree(*pair)


@pytest.mark.usefixtures("quick_products")
def test_what_is_not_contiguous_goes_the_slow_way_beside_the_rest():
    """A transposed weight, a transposed gradient, an expanded gradient; Adam takes channels-last as it lies."""

    def build_one():
        params = weights([(5, 7), (7, 5), (6, 6), (4, 3, 2, 2), (6,)])
        params[0] = nn.Parameter(params[0].detach().T.contiguous().T)
        params[3] = nn.Parameter(params[3].detach().to(memory_format=torch.channels_last))
        rules = {"p3": "rest"}
        return params, build("SFNorMuon", SF, [(f"p{i}", p) for i, p in enumerate(params)], rules=rules)

    pair = []
    for kernels in (True, False):
        params, optimizer = build_one()
        for t in range(3):
            feed(params, t)
            params[0].grad = params[0].grad.T.contiguous().T
            params[1].grad = params[1].grad.T.contiguous().T
            params[3].grad = params[3].grad.to(memory_format=torch.channels_last)
            params[4].grad = torch.tensor(float(t)).expand(6)
            step(optimizer, kernels)
        pair.append(optimizer)
    assert taken(pair[0]) == (2, 3)  # the plain matrix and the channels-last one
    agree(*pair)


# --------------------------------------------------------------- parameters come and go


@pytest.mark.usefixtures("quick_products")
def test_gradients_missing_for_some_steps_frozen_empty_and_later_parameters():
    pair = []
    for kernels in (True, False):
        params = weights([(5, 7), (5, 7), (0, 4), (6,), (0,), (4, 4)])
        params[5].requires_grad_(False)
        optimizer = build("SFNorMuon", SF, params)
        for t in range(8):
            feed(params, t)
            if t != 4:
                params[5].grad = None
            if t % 3 == 1:
                params[0].grad = None
            if t == 5:
                params[3].grad = None
            if t == 6:
                params.append(nn.Parameter(randn((5, 7), 99)))
                optimizer.add_param_group({"params": [params[-1]], "lr": 0.3})
                params[-1].grad = randn((5, 7), 98)
            step(optimizer, kernels)
        pair.append(optimizer)
    assert len(pair[0]._fused._engines) > 2
    agree(*pair)


@pytest.mark.usefixtures("quick_products")
def test_no_gradient_at_all():
    params = weights([(5, 7), (6,)])
    optimizer = build("SFNorMuon", SF, params)
    before = snapshot(optimizer)
    step(optimizer, True)
    assert same_bits(before, snapshot(optimizer))


@pytest.mark.usefixtures("quick_products")
def test_many_sets_of_parameters_with_gradients():
    """More than engines are kept for."""
    pair = []
    for kernels in (True, False):
        params = weights([(2, 3)] + [(2,)] * 5)
        optimizer = build("SFNorMuon", SF, params)
        for t in range(20):
            feed(params, t)
            for i, p in enumerate(params[1:]):
                if (t + 1) >> i & 1:
                    p.grad = None
            step(optimizer, kernels)
        pair.append(optimizer)
    agree(*pair)


# ------------------------------------------------------------------------ skipped steps


@pytest.mark.usefixtures("quick_products")
@pytest.mark.parametrize(
    ("case", "bad"), [("SFNorMuon", float("inf")), ("nesterov", float("nan")), ("AdamW", float("-inf"))]
)
def test_a_skipped_step_changes_nothing_bit_for_bit(case, bad):
    """At the first or the last entry of any parameter, also of one that goes the slow way."""
    name, options = CASES[case]
    params = [*weights([(6, 6), (9, 7), (5, 13), (4,), ()]), nn.Parameter(randn((5, 7), 9).T)]
    optimizer = build(name, options, params)
    feed(params, 0)
    step(optimizer, True)
    before = snapshot(optimizer)
    spots = [(0, 0), (1, -1), (2, -1), (3, 0), (4, 0), (5, 3)]
    for t, (i, at) in enumerate(spots):
        feed(params, t + 1)
        params[i].grad.view(-1)[at] = bad
        if i < 5:  # once with all by kernels
            params[5].grad = None
        step(optimizer, True)
        assert same_bits(before, snapshot(optimizer)), i
    assert optimizer.skipped_steps == len(spots)


@pytest.mark.usefixtures("quick_products")
def test_a_run_goes_on_after_a_skipped_step_as_if_it_had_never_been():
    pair = []
    for kernels in (True, False):
        params = weights(SOME)
        optimizer = build("SFNorMuon", {**SF, "nesterov": True}, params)
        for t in range(5):
            feed(params, t)
            if t == 2:
                params[1].grad[0, 0] = float("nan")
            step(optimizer, kernels)
        pair.append(optimizer)
    assert pair[0].skipped_steps == 1
    agree(*pair)


@pytest.mark.usefixtures("quick_products")
@pytest.mark.parametrize("mixed", [False, True], ids=["kernels", "with a slow part"])
def test_a_bad_gradient_raises_where_asked_and_changes_nothing(mixed):
    params = weights([(5, 7), (6,)]) + ([nn.Parameter(randn((5, 7), 9).T)] if mixed else [])
    optimizer = build("SFNorMuon", SF, params, on_nonfinite="raise")
    feed(params, 0)
    step(optimizer, True)
    before = snapshot(optimizer)
    feed(params, 1)
    params[1].grad[3] = float("inf")
    with pytest.raises(RuntimeError, match="inf or NaN"):
        step(optimizer, True)
    assert same_bits(before, snapshot(optimizer))
    assert optimizer.skipped_steps == 0
    feed(params, 2)
    step(optimizer, True)
    assert not same_bits(before, snapshot(optimizer))


# ------------------------------------------------------------------- between two steps


class Two:
    """The same run twice, by kernels and not."""

    def __init__(self, name: str = "SFNorMuon", shapes: Any = ((4, 4), (3, 7), (4, 4), (5,)), **more: Any) -> None:
        self.t, self.converted = 0, False
        options = CASES[name][1]
        self.params = [weights(shapes) for _ in range(2)]
        self.optimizers = [build(name, options, params, **more) for params in self.params]

    def each(self) -> Iterator[tuple[list[nn.Parameter], Any]]:
        return zip(self.params, self.optimizers, strict=True)

    def groups(self) -> Iterator[dict[str, Any]]:
        return (group for optimizer in self.optimizers for group in optimizer.param_groups)

    def feed(self) -> None:
        self.t += 1
        for params in self.params:
            feed(params, self.t)

    def step(self) -> None:
        for optimizer, kernels in zip(self.optimizers, (True, False), strict=True):
            step(optimizer, kernels)
        agree(*self.optimizers, tolerance=5e-3 if self.converted else 1e-4)


def new_grads(two: Two, x: float) -> None:
    two.feed()


def grads_in_place(two: Two, x: float) -> None:
    for params in two.params:
        for p in params:
            if p.grad is not None:
                p.grad.mul_(1 + x)


def odd_grads(two: Two, x: float) -> None:
    two.feed()
    for params in two.params:
        for p in params:
            p.grad = torch.zeros(p.numel() + 1, dtype=p.dtype)[1:].view(p.shape).copy_(p.grad)


def turned_grads(two: Two, x: float) -> None:
    two.feed()
    for params in two.params:
        params[int(4 * x) % 3].grad = params[int(4 * x) % 3].grad.T.contiguous().T


def no_grad_of_one(two: Two, x: float) -> None:
    two.feed()
    for params in two.params:
        params[int(4 * x) % 4].grad = None


def no_grads(two: Two, x: float) -> None:
    for optimizer in two.optimizers:
        optimizer.zero_grad(set_to_none=True)
    for params in two.params:
        params[0].grad = randn(params[0].shape, int(100 * x)).to(params[0].dtype)


def bad_grad(two: Two, x: float) -> None:
    two.feed()
    for params in two.params:
        params[int(4 * x) % 4].grad.view(-1)[-1] = float("nan")


def rate(two: Two, x: float) -> None:
    for group in two.groups():
        group["lr"] = 0.1 * x


def rate_as_tensor(two: Two, x: float) -> None:
    for group in two.groups():
        group["lr"] = torch.tensor(0.1 * x, dtype=F64)


def rate_filled(two: Two, x: float) -> None:
    for group in two.groups():
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(0.1 * x)


def numbers(two: Two, x: float) -> None:
    for group in two.groups():
        for key in ("weight_decay", "momentum", "eps", "update_rms"):
            if key in group:
                group[key] = (0.01 + x) / 2
        if "betas" in group:
            group["betas"] = (x / 2, 0.5)


def choices(two: Two, x: float) -> None:
    for group in two.groups():
        if "decay_at" in group:
            group["decay_at"] = ("z", "y", None)[int(9 * x) % 3]
        if "nesterov" in group:
            group["nesterov"] = x > 0.5
            group["scaling"] = ("rms", "max-side", "aspect", None)[int(17 * x) % 4]
        group["weight_decay"] = (0.0, 0.3)[int(7 * x) % 2]


def state_replaced(two: Two, x: float) -> None:
    for optimizer in two.optimizers:
        for state in optimizer.state.values():
            for name in list(state):
                state[name] = state[name].clone()


def state_remade(two: Two, x: float) -> None:
    """The old tensors are gone before the new ones are there, as when state goes to another device and back."""
    for optimizer in two.optimizers:
        for state in optimizer.state.values():
            for name in list(state):
                away = state.pop(name).numpy().copy()
                state[name] = torch.from_numpy(away)


def state_data(two: Two, x: float) -> None:
    for optimizer in two.optimizers:
        for state in optimizer.state.values():
            for value in state.values():
                value.data = value.data.clone()


def loaded(two: Two, x: float) -> None:
    for optimizer in two.optimizers:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def weights_swapped(two: Two, x: float) -> None:
    for params in two.params:
        for p in params:
            p.data = p.data.clone()


def weights_changed(two: Two, x: float) -> None:
    with torch.no_grad():
        for params in two.params:
            params[0].mul_(1 - x / 4)


def narrowed(two: Two, x: float) -> None:
    """Where the two differ in a last digit, they may round to either side."""
    two.converted = True
    for params in two.params:
        for p in params:
            p.grad, p.data = None, p.data.half()
    two.feed()


def widened(two: Two, x: float) -> None:
    two.converted = True
    for params in two.params:
        for p in params:
            p.grad, p.data = None, p.data.float()
    two.feed()


def evaluated(two: Two, x: float) -> None:
    for optimizer in two.optimizers:
        with optimizer.averaged():
            pass


EVENTS = (new_grads, grads_in_place, odd_grads, turned_grads, no_grad_of_one, no_grads, bad_grad, rate, rate_as_tensor)
EVENTS += (rate_filled, numbers, choices, state_replaced, state_remade, state_data, loaded, weights_swapped)
EVENTS += (weights_changed, narrowed, widened, evaluated)
#: Shrinking would take minutes: the events are printed as they are.
QUICKLY = settings(
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
happenings = st.lists(st.tuples(st.sampled_from(EVENTS), st.floats(0, 1, width=16)), min_size=3, max_size=7)


@pytest.mark.usefixtures("quick_products")
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_every_event_between_two_steps(event):
    """After steps that found nothing new, and such after it."""
    two = Two()
    two.feed()
    two.step()
    two.step()
    for x in (0.2, 0.9):
        event(two, x)
        two.step()
    two.step()
    two.feed()
    two.step()


@pytest.mark.usefixtures("quick_products")
@settings(QUICKLY, max_examples=4)
@given(events=happenings)
def test_any_events_between_steps(events):
    happen(events, "SFNorMuon")


@pytest.mark.slow
@pytest.mark.usefixtures("quick_products")
@pytest.mark.parametrize("name", ["SFNorMuon", "Muon", "SFAdamW", "AdamW"])
@settings(QUICKLY, max_examples=40)
@given(events=happenings)
def test_any_events_between_steps_of_any_optimizer(name, events):
    happen(events, name)


def happen(events: list[tuple[Callable[[Two, float], None], float]], name: str) -> None:
    two = Two(name)
    two.feed()
    two.step()
    two.step()
    for event, x in events:
        event(two, x)
        two.step()
    two.step()


@pytest.mark.usefixtures("quick_products")
def test_a_step_in_parts_between_two_that_are_not():
    """Weights and gradients are where they were two steps ago; the table is not of that step any more."""
    two = Two(shapes=((4, 4), (5,), (3, 7)))
    for params in two.params:
        feed(params[:2], 0)
    two.step()
    two.step()
    old = [[(p.data, p.grad) for p in params[:2]] for params in two.params]
    for params in two.params:
        for p in params[:2]:
            p.data = p.data.clone()
        feed(params, 1)
        params[2].grad = params[2].grad.T.contiguous().T
    assert taken(two.optimizers[0]) == (2, 1)
    two.step()
    for params, before in zip(two.params, old, strict=True):
        for p, (data, grad) in zip(params, before, strict=False):
            data.copy_(p.data)
            p.data, p.grad = data, grad
        params[2].grad = None
    two.step()


@pytest.mark.usefixtures("quick_products")
def test_a_weight_that_is_turned_where_it_lies():
    """Its address stays."""
    two = Two()
    two.feed()
    two.step()
    two.step()
    for params in two.params:
        params[0].data = params[0].data.T
    two.step()


@pytest.mark.usefixtures("quick_products")
@pytest.mark.parametrize("rows", [3, 9], ids=["fewer", "more"])
def test_a_parameter_of_another_shape(rows):
    """As when a vocabulary grows: the same Parameter, its state made anew."""
    two = Two("SFAdamW", shapes=((5, 4), (6,)))
    two.feed()
    two.step()
    for params, optimizer in two.each():
        params[0].grad = None
        params[0].data = randn((rows, 4), 5)
        del optimizer.state[params[0]]
    two.feed()
    two.step()
    two.step()


@pytest.mark.usefixtures("quick_products")
def test_a_momentum_of_another_precision():
    two = Two("Muon")
    two.feed()
    two.step()
    for optimizer in two.optimizers:
        for state in optimizer.state.values():
            state["momentum"] = state["momentum"].half()
    for _ in range(2):
        for optimizer, kernels in zip(two.optimizers, (True, False), strict=True):
            step(optimizer, kernels)
        agree(*two.optimizers, tolerance=5e-3)


@pytest.mark.usefixtures("quick_products")
def test_a_sparse_gradient_after_dense_ones_is_a_clear_error():
    params = weights([(5, 4), (6,)])
    optimizer = build("SFAdamW", SF, params)
    feed(params, 0)
    step(optimizer, True)
    step(optimizer, True)
    before = snapshot(optimizer)
    params[0].grad = params[0].grad.to_sparse()
    with pytest.raises(RuntimeError, match="dense gradients"):
        step(optimizer, True)
    assert same_bits(before, snapshot(optimizer))


# ---------------------------------------------------------------------------- going on


def go_on(optimizer: Any, params: list[nn.Parameter], seeds: range) -> list[Tensor]:
    for t in seeds:
        feed(params, t, scale=10.0 ** (t % 5 - 2))
        step(optimizer, True)
    return snapshot(optimizer)


@pytest.mark.usefixtures("poisoned", "quick_products")
@pytest.mark.parametrize(("case", "dtype"), [("SFNorMuon", F32), ("nesterov", BF16), ("Muon", F16), ("AdamW", BF16)])
def test_a_resumed_run_goes_on_bit_for_bit(case, dtype):
    """With the default precision of the polar factor; guesses of exponents are not in the file."""
    name, options = CASES[case]
    params = weights(SOME, dtype)
    optimizer = getattr(anytime, name)(params, **options)
    go_on(optimizer, params, range(3))
    resumed = [nn.Parameter(p.detach().clone()) for p in params]
    other = getattr(anytime, name)(resumed, **options)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    straight = go_on(optimizer, params, range(3, 5))
    assert same_bits(straight, go_on(other, resumed, range(3, 5)))


@pytest.mark.usefixtures("quick_products")
@pytest.mark.parametrize("way", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"])
def test_a_copy_goes_on_alike(way):
    params = weights(SOME)
    optimizer = build("SFNorMuon", SF, params)
    go_on(optimizer, params, range(3))
    copied, other = way((params, optimizer))
    assert not other._fused._engines
    assert same_bits(go_on(optimizer, params, range(3, 5)), go_on(other, copied, range(3, 5)))
