"""What every optimizer promises: one table of them all, and each promise checked over the table."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import anytime
from anytime.optim import base, moves

#: Name in anytime to settings under which a few steps visibly move small weights.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SFNorMuon": {"lr": 0.05, "warmup_steps": 2},
    "SFMuon": {"lr": 0.05, "warmup_steps": 2},
    "SFSpectralSGD": {"lr": 0.05},
    "SFAdamW": {"lr": 0.05, "warmup_steps": 2},
    "SFSGD": {"lr": 0.2, "weight_decay": 0.01},
    "SFLion": {"lr": 0.02, "warmup_steps": 2},
    "SFPlus": {"lr": 1.0, "warmup_steps": 2},
    "NorMuon": {"lr": 0.05},
    "Muon": {"lr": 0.05},
    "AdamW": {"lr": 0.05},
    "SignSGD": {"lr": 0.02},
    "Lion": {"lr": 0.02},
    "SpectralDescent": {"lr": 0.05},
    "Shampoo": {"lr": 0.05},
}
SCHEDULE_FREE = tuple(name for name in OPTIMIZERS if name.startswith("SF"))
SCHEDULED = tuple(name for name in OPTIMIZERS if name not in SCHEDULE_FREE)
#: Those whose update of a matrix does not depend on the gradient's scale.
SCALE_FREE = tuple(name for name in OPTIMIZERS if name not in ("SFAdamW", "SFSGD", "SFPlus", "AdamW"))
#: Those whose rate comes from all gradients together.
ONE_RATE = ("SFPlus",)
MIXED = ("SFNorMuon", "SFMuon", "SFSpectralSGD", "NorMuon", "Muon", "SpectralDescent", "Shampoo")

every = pytest.mark.parametrize("name", OPTIMIZERS)
schedule_free = pytest.mark.parametrize("name", SCHEDULE_FREE)


def make(name: str, params: Any, **more: Any) -> anytime.AnytimeOptimizer:
    return getattr(anytime, name)(params, **{**OPTIMIZERS[name], **more})


def accepts(name: str, option: str) -> bool:
    """Whether the constructor takes an option, by trying: many come through **more."""
    try:
        make(name, [nn.Parameter(torch.zeros(2, 2))], **{option: 0.5})
    except TypeError:
        return False
    return True


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def feed(params: Any, seed: int) -> None:
    """Gradients that depend on the seed alone; representable in bfloat16 so that every dtype sees the same."""
    generator = torch.Generator().manual_seed(seed)
    for p in params.parameters() if isinstance(params, nn.Module) else params:
        p.grad = torch.randn(p.shape, generator=generator).to(torch.bfloat16).to(p.dtype)


def step(optimizer: torch.optim.Optimizer, loss: float | Tensor = 1.0) -> None:
    """One step, with the loss for those that need it."""
    if getattr(optimizer, "needs_loss", False):
        optimizer.step(lambda: loss)
    else:
        optimizer.step()


def train(params: Any, optimizer: torch.optim.Optimizer, seeds: Iterator[int] | range) -> None:
    for seed in seeds:
        feed(params, seed)
        step(optimizer)


def loss_of(model: nn.Module, seed: int = 0, size: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    p = next(model.parameters())
    x, y = (torch.randn(size, n, generator=generator, dtype=torch.float64).to(p.dtype) for n in (4, 3))
    return (model(x) - y).square().mean()


def bits(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().view(-1)
    return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])


def snapshot(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Weights and all state of an optimizer, in order and as copies."""
    out: list[Any] = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            out.append((p.detach().clone(), {key: value.clone() for key, value in sorted(state.items())}))
    return out


def identical(a: list[Any], b: list[Any]) -> bool:
    """Bit for bit, dtypes and keys too."""
    return len(a) == len(b) and all(
        s.keys() == t.keys()
        and all(x.dtype == y.dtype and torch.equal(bits(x), bits(y)) for x, y in [(p, q), *((s[k], t[k]) for k in s)])
        for (p, s), (q, t) in zip(a, b, strict=True)
    )


def moved(before: list[Any], after: list[Any]) -> list[bool]:
    return [not torch.equal(p, q) for (p, _), (q, _) in zip(before, after, strict=True)]


def all_finite(optimizer: torch.optim.Optimizer) -> bool:
    return all(t.isfinite().all() for p, state in snapshot(optimizer) for t in (p, *state.values()))


# ------------------------------------------------------------- the table, the class


def test_the_table_covers_every_exported_optimizer() -> None:
    exported = {name: getattr(anytime, name) for name in anytime.__all__}
    optimizers = {
        name
        for name, value in exported.items()
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer) and value is not anytime.AnytimeOptimizer
    }
    assert optimizers == set(OPTIMIZERS)


@every
def test_is_a_torch_optimizer_in_train_mode(name: str) -> None:
    optimizer = make(name, network())
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(optimizer, anytime.AnytimeOptimizer)
    assert optimizer.training
    assert optimizer.averages == (name in SCHEDULE_FREE)
    assert name in repr(optimizer)


@every
@pytest.mark.parametrize("method", ["step", "zero_grad", "state_dict", "load_state_dict", "add_param_group"])
def test_signatures_are_those_of_torch(name: str, method: str) -> None:
    ours = inspect.signature(getattr(getattr(anytime, name), method)).parameters
    theirs = inspect.signature(getattr(torch.optim.Optimizer, method)).parameters
    assert [(p.name, p.default, p.kind) for p in ours.values()] == [
        (p.name, p.default, p.kind) for p in theirs.values()
    ]


@every
def test_parameters_come_first_and_lr_second(name: str) -> None:
    signature = list(inspect.signature(getattr(anytime, name)).parameters)
    assert signature[:2] == ["params", "lr"]
    assert all(group["lr"] == 0.25 for group in getattr(anytime, name)(network(), 0.25).param_groups)


@every
def test_hooks_around_the_step_run(name: str) -> None:
    model = network()
    optimizer = make(name, model)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    train(model, optimizer, range(2))
    assert seen == ["before", "after"] * 2


# ------------------------------------------------------------------------ the step


@every
def test_least_squares_goes_down(name: str) -> None:
    torch.manual_seed(0)
    inputs, truth = torch.randn(32, 5), torch.randn(5, 4)
    targets = inputs @ truth + 0.5
    model = nn.Linear(5, 4)
    optimizer = make(name, model)

    def loss() -> Tensor:
        return (model(inputs) - targets).square().mean()

    start = float(loss().detach())
    for _ in range(80):
        optimizer.zero_grad()
        now = loss()
        now.backward()
        step(optimizer, now)
    at_y = float(loss().detach())
    with optimizer.averaged():
        at_x = float(loss().detach())
    assert at_y < 0.5 * start
    assert at_x < 0.5 * start


@every
def test_gradients_are_read_and_not_kept(name: str) -> None:
    model = network()
    optimizer = make(name, model)
    for seed in range(3):
        feed(model, seed)
        grads = [p.grad for p in model.parameters()]
        copies = [g.clone() for g in grads]
        step(optimizer)
        for p, grad, saved in zip(model.parameters(), grads, copies, strict=True):
            assert p.grad is grad
            assert torch.equal(bits(grad), bits(saved))
    before = snapshot(optimizer)
    for p in model.parameters():
        p.grad.fill_(7.0)
    assert identical(before, snapshot(optimizer))


@every
def test_a_parameter_without_gradient_is_untouched_and_its_time_stands_still(name: str) -> None:
    model = network()
    optimizer = make(name, model)
    train(model, optimizer, range(2))
    idle, busy = model[0].weight, model[3].weight
    before = snapshot(optimizer)
    for seed in range(2, 5):
        feed(model, seed)
        idle.grad = None
        step(optimizer)
    assert optimizer.state[idle]["step"] == 2
    assert optimizer.state[busy]["step"] == 5
    index = [p is idle for group in optimizer.param_groups for p in group["params"]].index(True)
    assert identical(before[index : index + 1], snapshot(optimizer)[index : index + 1])
    feed(model, 9)
    step(optimizer)
    assert optimizer.state[idle]["step"] == 3
    assert not torch.equal(before[index][0], idle)


@every
def test_no_gradient_at_all_changes_nothing(name: str) -> None:
    model = network()
    optimizer = make(name, model)
    before = snapshot(optimizer)
    step(optimizer)
    assert identical(before, snapshot(optimizer))


@every
def test_zero_gradients_are_harmless(name: str) -> None:
    model = network()
    optimizer = make(name, model, weight_decay=0.0)
    before = snapshot(optimizer)
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        step(optimizer)
    assert all_finite(optimizer)
    assert not any(moved(before, snapshot(optimizer)))
    train(model, optimizer, range(2))
    assert all_finite(optimizer)
    assert all(moved(before, snapshot(optimizer)))


@every
def test_zero_gradients_are_harmless_without_eps(name: str) -> None:
    options = {option: 0.0 for option in ("eps", "adam_eps", "weight_decay") if accepts(name, option)}
    model = network()
    optimizer = make(name, model, **options)
    before = snapshot(optimizer)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    step(optimizer)
    assert all_finite(optimizer)
    assert not any(moved(before, snapshot(optimizer)))
    feed(model, 0)
    for p in model.parameters():
        p.grad.view(-1)[0] = math.nan
    step(optimizer)
    assert not any(moved(before, snapshot(optimizer)))


@every
def test_a_zero_rate_moves_nothing_and_later_rates_work(name: str) -> None:
    model = network()
    optimizer = make(name, model, lr=0.0)
    start = snapshot(optimizer)
    train(model, optimizer, range(3))
    assert all_finite(optimizer)
    assert not any(moved(start, snapshot(optimizer)))
    for p in model.parameters():
        assert all(torch.equal(p, iterate) for iterate in optimizer.iterates(p))
    for group in optimizer.param_groups:
        group["lr"] = 0.05
    train(model, optimizer, range(3, 4))
    assert all_finite(optimizer)
    assert all(moved(start, snapshot(optimizer)))
    for p in model.parameters():  # weights of zero do not count: the average starts here
        assert torch.equal(optimizer.iterates(p).x, optimizer.iterates(p).z)
    before = snapshot(optimizer)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, range(4, 6))
    assert not any(moved(before, snapshot(optimizer)))
    assert all_finite(optimizer)


@every
def test_empty_groups_are_allowed(name: str) -> None:
    model = network()
    optimizer = make(name, [{"params": []}, {"params": list(model.parameters())}, {"params": []}])
    alone = network()
    other = make(name, list(alone.parameters()))
    train(model, optimizer, range(3))
    train(alone, other, range(3))
    assert identical(snapshot(optimizer), snapshot(other))
    with optimizer.averaged():
        pass
    optimizer.load_state_dict(optimizer.state_dict())
    nothing = make(name, [{"params": []}])
    step(nothing)
    nothing.load_state_dict(nothing.state_dict())


@every
@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (2, 0, 3)])
def test_tensors_without_elements_pass_through(name: str, shape: tuple[int, ...]) -> None:
    params = [nn.Parameter(torch.zeros(shape)), nn.Parameter(torch.ones(3, 2))]
    optimizer = make(name, params)
    train(params, optimizer, range(2))
    with optimizer.averaged():
        assert params[0].shape == shape
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.skipped_steps == 0
    assert not torch.equal(params[1], torch.ones(3, 2))


@pytest.mark.parametrize("name", SCALE_FREE)
@pytest.mark.parametrize("scale", [1e-30, 2.0**-110, 1e30])
def test_updates_of_matrices_do_not_depend_on_the_scale_of_gradients(name: str, scale: float) -> None:
    runs = []
    for factor in (1.0, scale):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(3, 6))]
        optimizer = make(name, params)
        for seed in range(4):
            feed(params, seed)
            for p in params:
                p.grad.mul_(factor)
            step(optimizer)
        runs.append([p.detach() for p in params])
    for plain, scaled in zip(*runs, strict=True):
        torch.testing.assert_close(plain, scaled, rtol=1e-5, atol=1e-6)


@every
@pytest.mark.parametrize("scale", [1e-30, 1e-38, 1e15])
def test_tiny_and_large_gradients_stay_finite(name: str, scale: float) -> None:
    model = network()
    optimizer = make(name, model)
    for seed in range(4):
        feed(model, seed)
        for p in model.parameters():
            p.grad.mul_(scale)
        step(optimizer)
    assert all_finite(optimizer)
    assert optimizer.skipped_steps == 0


@every
@pytest.mark.parametrize("kind", ["outer", "one entry", "zero rows", "one zero matrix"])
def test_rank_deficient_gradients_stay_finite(name: str, kind: str) -> None:
    torch.manual_seed(1)
    params = [nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(2, 4, 4))]
    optimizer = make(name, params)
    start = snapshot(optimizer)
    for _ in range(3):
        for i, p in enumerate(params):
            p.grad = torch.zeros_like(p)
            if kind == "outer":
                p.grad.copy_(torch.randn(p.shape[-2], 1) @ torch.randn(1, p.shape[-1]))
            elif kind == "one entry":
                p.grad.view(-1)[0] = 1.0
            elif kind == "zero rows":
                p.grad[..., 1:, :] = torch.randn(p.shape[-1])
            elif i:
                p.grad.copy_(torch.randn(p.shape))
        step(optimizer)
    assert all_finite(optimizer)
    assert all(moved(start, snapshot(optimizer))[1:])


@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_precision_of_parameters(name: str, dtype: torch.dtype) -> None:
    """Weights and gradients are the same in each dtype, so a narrow run's iterates are the float32 run's exactly."""
    model, wide = network(torch.bfloat16).to(dtype), network(torch.bfloat16).float()
    for p, q in zip(model.parameters(), wide.parameters(), strict=True):
        q.data.copy_(p)
    optimizer, exact = make(name, model), make(name, wide)
    train(model, optimizer, range(6))
    train(wide, exact, range(6))
    assert all_finite(optimizer)
    for p, q in zip(model.parameters(), wide.parameters(), strict=True):
        assert p.dtype == dtype
        assert all(t.dtype in (torch.float32, torch.float64) for t in optimizer.state[p].values())
        assert ("residual" in optimizer.state[p]) == (dtype in (torch.bfloat16, torch.float16))
        for ours, theirs in zip(optimizer.iterates(p), exact.iterates(q), strict=True):
            if dtype == torch.float64:
                torch.testing.assert_close(ours, theirs.double(), rtol=1e-3, atol=1e-4)
            else:
                assert ours.dtype == torch.float32
                assert torch.equal(ours, theirs)
        assert torch.equal(p, optimizer.iterates(p).y.to(dtype))


@every
def test_dtypes_may_be_mixed(name: str) -> None:
    torch.manual_seed(0)
    weights = torch.randn(3, 4, 5).bfloat16()
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    together = [nn.Parameter(w.to(d)) for w, d in zip(weights, dtypes, strict=True)]
    optimizer = make(name, together)
    train(together, optimizer, range(3))
    assert all_finite(optimizer)
    for i, dtype in enumerate(dtypes):
        alone = [nn.Parameter(w.to(dtype)) for w in weights]
        other = make(name, alone)
        train(alone, other, range(3))
        torch.testing.assert_close(together[i].detach(), alone[i].detach(), rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------ bad gradients


@every
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 3])
def test_a_bad_gradient_is_skipped_as_if_it_had_never_been(name: str, bad: float, at: int) -> None:
    model, clean = network(), network()
    optimizer, other = make(name, model), make(name, clean)
    train(model, optimizer, range(at))
    train(clean, other, range(at))
    count = len(list(model.parameters()))
    for i in range(count):  # in one parameter at a time: the whole step is left out
        before = snapshot(optimizer)
        feed(model, 100 + i)
        list(model.parameters())[i].grad.view(-1)[-1] = bad
        grads = [p.grad.clone() for p in model.parameters()]
        step(optimizer)
        assert identical(before, snapshot(optimizer))
        assert all(torch.equal(bits(p.grad), bits(g)) for p, g in zip(model.parameters(), grads, strict=True))
        assert optimizer.skipped_steps == i + 1
    train(model, optimizer, range(at, at + 3))
    train(clean, other, range(at, at + 3))
    assert identical(snapshot(optimizer), snapshot(other))
    assert optimizer.skipped_steps == count
    assert other.skipped_steps == 0


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_bad_gradient_is_skipped_in_every_precision(name: str, dtype: torch.dtype) -> None:
    model, clean = network(dtype), network(dtype)
    optimizer, other = make(name, model), make(name, clean)
    train(model, optimizer, range(2))
    train(clean, other, range(2))
    feed(model, 50)
    model[1].bias.grad.fill_(math.inf)
    step(optimizer)
    train(model, optimizer, range(2, 4))
    train(clean, other, range(2, 4))
    assert identical(snapshot(optimizer), snapshot(other))


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("SFNorMuon", {"beta_growth": 0.4, "beta_growth_start": 2, "averaging_power": 2.0}),
        ("SFNorMuon", {"averaging_warmup": 2, "decay_at": "y"}),
        ("SFNorMuon", {"momentum_dtype": torch.bfloat16, "polar": "svd", "weight_decay": 0.0}),
        ("SFMuon", {"nesterov": True, "scaling": "aspect"}),
        ("SFAdamW", {"bias_correction": "moment", "beta_growth": 0.4, "beta_growth_start": 2}),
        ("SFSpectralSGD", {"projection": "spectral", "radius": 0.5, "adam_bias_correction": "moment"}),
        ("SFSpectralSGD", {"projection": "frobenius", "radius": 0.5}),
        ("SFPlus", {"polyak_beta": 0.5, "beta_anneal_steps": 3, "averaging_power": 2.0, "weight_decay": 20.0}),
        ("SignSGD", {"momentum": 0.9}),
        ("SpectralDescent", {"momentum": 0.9}),
        ("AdamW", {"bias_correction": None}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)),
)
def test_a_bad_gradient_is_skipped_with_every_option(name: str, more: dict[str, Any]) -> None:
    runs = []
    for at in (None, 0, 1, 4):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(3, 4))]
        optimizer = make(name, params, **more)
        for seed in range(6):
            if seed == at:
                feed(params, 99)
                params[0].grad[0, 0] = math.nan
                step(optimizer)
            train(params, optimizer, range(seed, seed + 1))
        assert all_finite(optimizer)
        runs.append(snapshot(optimizer))
    assert all(identical(runs[0], run) for run in runs[1:])


@every
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_gradient_raises_where_asked(name: str, bad: float) -> None:
    model = network()
    optimizer = make(name, model, on_nonfinite="raise")
    train(model, optimizer, range(2))
    before = snapshot(optimizer)
    feed(model, 2)
    model[3].bias.grad[0] = bad
    with pytest.raises(RuntimeError, match="inf or NaN"):
        step(optimizer)
    assert identical(before, snapshot(optimizer))
    assert optimizer.skipped_steps == 0
    train(model, optimizer, range(2, 3))
    assert all(moved(before, snapshot(optimizer)))


@every
def test_a_sparse_gradient_is_a_clear_error_and_changes_nothing(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Embedding(5, 3, sparse=True))
    optimizer = make(name, model)
    before = snapshot(optimizer)
    feed([model[0].weight, model[0].bias], 0)
    model[1](torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=r"dense gradients.*\(5, 3\).*sparse=False"):
        step(optimizer)
    assert identical(before, snapshot(optimizer))
    assert optimizer.skipped_steps == 0


@every
def test_complex_parameters_are_a_clear_error(name: str) -> None:
    wrong = torch.zeros(3, 3, dtype=torch.complex64, requires_grad=True)
    with pytest.raises(TypeError, match=r"wrong is torch\.complex64.*real floating-point"):
        make(name, [("wrong", wrong)])
    optimizer = make(name, network())
    before, groups = snapshot(optimizer), len(optimizer.param_groups)
    with pytest.raises(TypeError, match="real floating-point"):
        optimizer.add_param_group({"params": [("wrong", wrong)]})
    assert len(optimizer.param_groups) == groups
    assert len(optimizer.plan) == len(before)
    assert identical(before, snapshot(optimizer))


# ------------------------------------------------------- closures, rates, scalers


@every
def test_closures(name: str) -> None:
    model, plain = network(), network()
    optimizer, other = make(name, model), make(name, plain)
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    with torch.no_grad():
        returned = optimizer.step(closure)
    assert calls == 1
    expected = loss_of(plain)
    expected.backward()
    step(other, expected)
    assert torch.equal(returned, expected)
    assert identical(snapshot(optimizer), snapshot(other))


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]] = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=6),
    "one-cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=8, cycle_momentum=False),
}


@every
@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
def test_learning_rate_schedulers(name: str, kind: str, tensor: bool) -> None:
    """A scheduler does what setting each group's rate by hand does, for a rate that is a tensor too."""
    rate = OPTIMIZERS[name]["lr"]
    model, plain = network(), network()
    optimizer = make(name, model, lr=torch.tensor(rate, dtype=torch.float64) if tensor else rate)
    assert len({id(group["lr"]) for group in optimizer.param_groups}) == len(optimizer.param_groups) or not tensor
    scheduler = SCHEDULERS[kind](optimizer)
    template = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate)
    expected = SCHEDULERS[kind](template)
    other = make(name, plain)
    for seed in range(5):
        for group in other.param_groups:
            group["lr"] = template.param_groups[0]["lr"]
        for group in optimizer.param_groups:
            assert float(group["lr"]) == pytest.approx(template.param_groups[0]["lr"])
        train(model, optimizer, range(seed, seed + 1))
        train(plain, other, range(seed, seed + 1))
        template.step()
        scheduler.step()
        expected.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-6, atol=1e-7)


@every
def test_one_cycle_with_its_default_momentum_cycle(name: str) -> None:
    model = network()
    optimizer = make(name, model)
    if not {"momentum", "betas"} & optimizer.defaults.keys():
        with pytest.raises(ValueError, match="momentum"):
            torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4)
        return
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4)
    before = snapshot(optimizer)
    for seed in range(4):
        train(model, optimizer, range(seed, seed + 1))
        if seed < 3:
            scheduler.step()
    assert all(moved(before, snapshot(optimizer)))
    assert all_finite(optimizer)
    fresh = network()
    fresh.load_state_dict(model.state_dict())
    other = make(name, fresh)
    other.load_state_dict(optimizer.state_dict())
    assert identical(snapshot(optimizer), snapshot(other))


@every
def test_the_rate_multiplies_the_learning_rate(name: str) -> None:
    model, plain = network(), network()
    optimizer = make(name, [{"params": list(model.parameters()), "rate": 0.5}], lr=0.25)
    other = make(name, list(plain.parameters()), lr=0.125)
    train(model, optimizer, range(4))
    train(plain, other, range(4))
    assert identical(snapshot(optimizer), snapshot(other))


@every
def test_grad_scaler(name: str) -> None:
    model, plain = network(), network()
    optimizer, other = make(name, model), make(name, plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for i in range(4):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, i)).backward()
        if i == 2:  # an overflow: the scaler leaves the step out
            before = snapshot(optimizer)
            model[0].weight.grad[0, 0] = math.inf
        scaler.step(optimizer, *([lambda: 1.0] if optimizer.needs_loss else []))
        scaler.update()
        if i == 2:
            assert identical(before, snapshot(optimizer))
            assert scaler.get_scale() == 2.0**9
            continue
        other.zero_grad()
        loss_of(plain, i).backward()
        step(other)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-4, atol=1e-5)


@every
def test_clipping_before_the_step(name: str) -> None:
    model, plain = network(), network()
    optimizer, other = make(name, model), make(name, plain)
    for seed in range(3):
        feed(model, seed)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert norm > 0.5
        step(optimizer)
        feed(plain, seed)
        for p in plain.parameters():
            p.grad.mul_(0.5 / (norm + 1e-6))
        step(other)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-5, atol=1e-6)


@every
def test_accumulated_gradients_equal_the_big_batch(name: str) -> None:
    model, whole = network(torch.float64), network(torch.float64)
    optimizer, other = make(name, model), make(name, whole)
    inputs, targets = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)
    for _ in range(4):
        optimizer.zero_grad()
        for part in range(4):
            rows = slice(2 * part, 2 * part + 2)
            ((model(inputs[rows]) - targets[rows]).square().mean() / 4).backward()
        step(optimizer)
        other.zero_grad()
        (whole(inputs) - targets).square().mean().backward()
        step(other)
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-7, atol=1e-9)


# -------------------------------------------------------------- copies and modes


@every
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("evaluating", [False, True], ids=["train", "eval"])
def test_a_copy_of_model_and_optimizer_goes_on_alike(name: str, way: str, evaluating: bool) -> None:
    model = network(torch.bfloat16)
    optimizer = make(name, model)
    train(model, optimizer, range(3))
    feed(model, 77)
    model[0].weight.grad[0, 0] = math.nan
    step(optimizer)
    if evaluating:
        optimizer.eval()
    if way == "deepcopy":
        twin, other = copy.deepcopy((model, optimizer))
    elif way == "pickle":
        twin, other = pickle.loads(pickle.dumps((model, optimizer)))
    else:
        buffer = io.BytesIO()
        torch.save((model, optimizer), buffer)
        buffer.seek(0)
        twin, other = torch.load(buffer, weights_only=False)
    before = snapshot(optimizer)
    assert type(other) is type(optimizer)
    assert identical(before, snapshot(other))
    assert other.training is not evaluating
    assert other.skipped_steps == 1
    assert str(other.plan) == str(optimizer.plan)
    for o in (optimizer, other):
        o.train()
    middle = snapshot(optimizer)
    train(twin, other, range(3, 6))
    assert identical(middle, snapshot(optimizer))  # nothing is shared
    assert all(moved(middle, snapshot(other)))
    train(model, optimizer, range(3, 6))
    assert identical(snapshot(optimizer), snapshot(other))


@every
def test_modes_and_averages_are_there(name: str) -> None:
    model = network()
    optimizer = make(name, model)
    train(model, optimizer, range(4))
    y = [p.detach().clone() for p in model.parameters()]
    average = optimizer.averaged_state_dict(model)
    assert average.keys() == model.state_dict().keys()
    with optimizer.averaged():
        assert not optimizer.training
        assert all(torch.equal(average[key], value) for key, value in model.state_dict().items())
    optimizer.eval()
    x = [p.detach().clone() for p in model.parameters()]
    different = [not torch.equal(a, b) for a, b in zip(x, y, strict=True)]
    assert all(different) if name in SCHEDULE_FREE else not any(different)
    optimizer.train()
    assert optimizer.training
    assert all(torch.equal(bits(p), bits(q)) for p, q in zip(model.parameters(), y, strict=True))


@every
def test_a_step_in_eval_mode_is_an_error_that_says_what_to_do(name: str) -> None:
    model = network()
    optimizer = make(name, model)
    train(model, optimizer, range(2))
    optimizer.eval()
    before = snapshot(optimizer)
    feed(model, 2)
    called: list[int] = []
    with pytest.raises(RuntimeError, match=r"eval mode.*train\(\)"):
        optimizer.step(lambda: called.append(1) or 0.0)
    assert not called
    assert identical(before, snapshot(optimizer))
    optimizer.train()
    step(optimizer)


# ----------------------------------------------------------- models that change


@every
def test_channels_last_kernels(name: str) -> None:
    torch.manual_seed(0)
    plain = nn.Conv2d(3, 4, 3)
    model = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    optimizer, other = make(name, model), make(name, plain)
    for seed in range(3):
        feed(plain, seed)
        feed(model, seed)
        model.weight.grad = model.weight.grad.to(memory_format=torch.channels_last)
        step(optimizer)
        step(other)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    for key, value in optimizer.state[model.weight].items():
        if value.shape == model.weight.shape:
            assert value.is_contiguous(memory_format=torch.channels_last), key
    torch.testing.assert_close(model.weight, plain.weight, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(optimizer.iterates(model.weight).x, other.iterates(plain.weight).x, rtol=1e-6, atol=1e-7)
    state = copy.deepcopy(optimizer.state_dict())
    before = snapshot(optimizer)
    optimizer.load_state_dict(state)
    assert identical(before, snapshot(optimizer))
    assert all(
        value.is_contiguous(memory_format=torch.channels_last)
        for value in optimizer.state[model.weight].values()
        if value.shape == model.weight.shape
    )


@every
def test_transposed_parameters(name: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(4, 6)
    plain, transposed = nn.Parameter(weight.t().clone()), nn.Parameter(weight.t())
    assert not transposed.is_contiguous()
    optimizer, other = make(name, [transposed]), make(name, [plain])
    train([transposed], optimizer, range(3))
    train([plain], other, range(3))
    optimizer.load_state_dict(optimizer.state_dict())
    train([transposed], optimizer, range(3, 5))
    train([plain], other, range(3, 5))
    torch.testing.assert_close(transposed.detach(), plain.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(optimizer.iterates(transposed).x, other.iterates(plain).x, rtol=1e-6, atol=1e-6)


@every
def test_a_frozen_layer_rests_until_it_is_unfrozen(name: str) -> None:
    model = network()
    model[0].requires_grad_(False)
    optimizer = make(name, model)
    weight = model[0].weight
    start = weight.detach().clone()
    for i in range(3):
        optimizer.zero_grad()
        loss_of(model, i).backward()
        step(optimizer)
    with optimizer.averaged():
        assert torch.equal(weight, start)
    assert torch.equal(weight, start)
    assert all(torch.equal(start, iterate) for iterate in optimizer.iterates(weight))
    assert torch.equal(optimizer.averaged_state_dict(model)["0.weight"], start)
    model[0].requires_grad_(True)
    for i in range(3, 5):
        optimizer.zero_grad()
        loss_of(model, i).backward()
        step(optimizer)
    assert not torch.equal(weight, start)
    assert optimizer.state[weight]["step"] == 2
    assert optimizer.state[model[3].weight]["step"] == 5
    assert all_finite(optimizer)


@every
def test_looking_at_the_state_of_a_frozen_parameter_does_no_harm(name: str) -> None:
    """The state is a defaultdict: reading it makes an empty entry."""
    model = network()
    model[0].requires_grad_(False)
    optimizer = make(name, model)
    assert optimizer.state[model[0].weight] == {}
    train([model[3].weight, model[3].bias], optimizer, range(2))
    with optimizer.averaged():
        optimizer.averaged_state_dict(model)
    optimizer.iterates(model[0].weight)
    optimizer.load_state_dict(optimizer.state_dict())
    model[0].requires_grad_(True)
    train(model, optimizer, range(2, 3))
    assert optimizer.state[model[0].weight]["step"] == 1


@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_converted_before_the_first_step(name: str, dtype: torch.dtype) -> None:
    model, plain = network(), network().to(dtype)
    optimizer = make(name, model)
    model.to(dtype)
    other = make(name, plain)
    with optimizer.averaged():
        pass
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    train(model, optimizer, range(3))
    train(plain, other, range(3))
    assert identical(snapshot(optimizer), snapshot(other))


@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_converted_before_the_first_step_can_be_saved(name: str, dtype: torch.dtype) -> None:
    model, plain = network(), network().to(dtype)
    optimizer = make(name, model)
    model.to(dtype)
    other = make(name, plain)
    other.load_state_dict(optimizer.state_dict())
    train(model, optimizer, range(2))
    train(plain, other, range(2))
    assert identical(snapshot(optimizer), snapshot(other))


@every
@pytest.mark.parametrize(("before", "after"), [(torch.float32, torch.float64), (torch.bfloat16, torch.float32)])
def test_a_model_widened_in_mid_run_goes_on_from_where_it_was(
    name: str, before: torch.dtype, after: torch.dtype
) -> None:
    model = network(before)
    optimizer = make(name, model)
    train(model, optimizer, range(3))
    iterates = [optimizer.iterates(p) for p in model.parameters()]
    model.to(after)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, range(3, 4))
    for p, old in zip(model.parameters(), iterates, strict=True):
        state = optimizer.state[p]
        assert state["step"] == 4
        assert "residual" not in state
        assert all(value.dtype in (after, torch.float64) for value in state.values())
        for i, (new, was) in enumerate(zip(optimizer.iterates(p), old, strict=True)):
            if i == 2 or name not in ONE_RATE:  # a step at no rate has a weight there: X and Y go on to Z
                torch.testing.assert_close(new, was.to(after), rtol=torch.finfo(before).eps, atol=1e-3)


@every
def test_weights_loaded_before_the_first_step(name: str) -> None:
    torch.manual_seed(5)
    source = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))
    model = network()
    optimizer = make(name, model)
    model.load_state_dict(source.state_dict())
    other = make(name, source)
    for p in model.parameters():
        assert all(torch.equal(p, iterate) for iterate in optimizer.iterates(p))
    train(model, optimizer, range(3))
    train(source, other, range(3))
    assert identical(snapshot(optimizer), snapshot(other))


@every
def test_a_group_added_in_mid_run(name: str) -> None:
    model, alone = network(), network()
    optimizer, other = make(name, model), make(name, alone)
    train(model, optimizer, range(3))
    train(alone, other, range(3))
    torch.manual_seed(3)
    more = nn.Linear(3, 2)
    optimizer.add_param_group({"params": [("more.weight", more.weight), ("more.bias", more.bias)], "lr": 0.01})
    start = [p.detach().clone() for p in more.parameters()]
    for seed in range(3, 5):
        feed(model, seed)
        feed(more, seed)
        step(optimizer)
    train(alone, other, range(3, 5))
    assert name in ONE_RATE or identical(snapshot(optimizer)[: len(snapshot(other))], snapshot(other))
    for p, w in zip(more.parameters(), start, strict=True):
        assert optimizer.state[p]["step"] == 2
        assert not torch.equal(p, w)
    assert optimizer.plan["more.weight"].shape == (2, 3)
    assert [g["lr"] for g in optimizer.param_groups if any(p is more.bias for p in g["params"])] == [0.01]
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [("again", more.weight)]})
    before = snapshot(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    assert identical(before, snapshot(optimizer))


@schedule_free
def test_a_group_added_in_eval_mode_can_be_saved(name: str) -> None:
    def parts() -> tuple[nn.Module, list[tuple[str, nn.Parameter]]]:
        model = network()
        return model, [(f"more.{key}", p) for key, p in nn.Linear(3, 2).named_parameters()]

    model, more = parts()
    optimizer = make(name, model)
    train(model, optimizer, range(2))
    optimizer.eval()
    optimizer.add_param_group({"params": more})
    twin, others = parts()
    twin.load_state_dict(model.state_dict())
    other = make(name, [*twin.named_parameters(), *others])
    other.load_state_dict(optimizer.state_dict())
    for o in (optimizer, other):
        o.train()
    train([*model.parameters(), *(p for _, p in more)], optimizer, range(2, 4))
    train([*twin.parameters(), *(p for _, p in others)], other, range(2, 4))
    for (_, p), (_, q) in zip([*model.named_parameters(), *more], [*twin.named_parameters(), *others], strict=True):
        assert torch.equal(p, q)
    assert optimizer.state[more[0][1]]["step"] == 2


# --------------------------------------------------------- the rules of one optimizer


@pytest.mark.parametrize("name", [n for n in MIXED if n in SCHEDULE_FREE])
def test_what_is_no_matrix_follows_sf_adamw_exactly(name: str) -> None:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(7)), nn.Parameter(torch.randn(()))]
    alone = [nn.Parameter(p.detach().clone()) for p in params]
    matrix = nn.Parameter(torch.randn(4, 3))
    shared = {"lr": 0.05, "weight_decay": 0.02, "warmup_steps": 2}
    optimizer = make(name, [matrix, *params], **shared, adam_betas=(0.7, 0.9), adam_eps=1e-6)
    other = anytime.SFAdamW(alone, **shared, betas=(0.7, 0.9), eps=1e-6)
    for seed in range(5):
        feed(params, seed)
        feed(alone, seed)
        matrix.grad = torch.ones_like(matrix)
        step(optimizer)
        step(other)
    for p, q in zip(params, alone, strict=True):
        assert optimizer.state[p]["beta"] == 0.7
        assert torch.equal(p, q)
        assert all(torch.equal(a, b) for a, b in zip(optimizer.iterates(p), other.iterates(q), strict=True))


@pytest.mark.parametrize("name", [n for n in MIXED if n in SCHEDULED])
def test_what_is_no_matrix_follows_adamw_exactly(name: str) -> None:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(7)), nn.Parameter(torch.randn(()))]
    alone = [nn.Parameter(p.detach().clone()) for p in params]
    matrix = nn.Parameter(torch.randn(4, 3))
    shared = {"lr": 0.05, "weight_decay": 0.02, "warmup_steps": 2}
    optimizer = make(name, [matrix, *params], **shared, adam_betas=(0.7, 0.9), adam_eps=1e-6)
    other = anytime.AdamW(alone, **shared, betas=(0.7, 0.9), eps=1e-6)
    for seed in range(5):
        feed(params, seed)
        feed(alone, seed)
        matrix.grad = torch.ones_like(matrix)
        step(optimizer)
        step(other)
    assert all(torch.equal(p, q) for p, q in zip(params, alone, strict=True))


@pytest.mark.parametrize("ball", ["frobenius", "spectral"])
def test_a_projection_holds_for_matrices_alone(ball: str) -> None:
    model = network()
    with torch.no_grad():
        model[1].weight.fill_(3.0)
    optimizer = make("SFSpectralSGD", model, projection=ball, radius=0.5)
    train(model, optimizer, range(3))
    for p in (model[0].weight, model[3].weight):
        norm = torch.linalg.matrix_norm(optimizer.iterates(p).z, "fro" if ball == "frobenius" else 2)
        assert norm <= 0.5 + 1e-5
    assert model[1].weight.norm() > 1


@every
def test_a_step_does_not_depend_on_how_many_tensors_are_taken_at_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where their clocks differ, as after a step in which some had no gradient."""
    found = []
    for size in (1, 20, 1 << 18):
        monkeypatch.setattr(base, "chunks", functools.partial(moves.chunks, size=size))
        params = everywhere()
        optimizer = make(name, params)
        for seed in range(4):
            feed(params, seed)
            if seed < 2:
                params[seed].grad = params[4].grad = None
            step(optimizer)
        found.append([torch.cat([p.detach().flatten(), optimizer.iterates(p).x.flatten()]) for p in params])
    assert all(torch.equal(a, b) for other in found[:2] for a, b in zip(other, found[2], strict=True))


# --------------------------------------------------- no host read-back, no recompile


class NoReadBack(TorchDispatchMode):
    """Counts, or refuses, every operation that needs a value of a tensor on the host."""

    NAMES = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "unique_dim")

    def __init__(self, refuse: bool = True) -> None:
        super().__init__()
        self.refuse, self.seen = refuse, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        elsewhere = name == "_to_copy" and kwargs.get("device") not in (None, args[0].device)
        if name in self.NAMES or by_mask or elsewhere:
            self.seen += 1
            assert not self.refuse, f"{func} needs a value on the host"
        return func(*args, **kwargs)


def everywhere() -> list[nn.Parameter]:
    torch.manual_seed(0)
    shapes = [(4, 6), (6, 4), (5,), (), (1, 4), (4, 2, 2, 2), (2, 3, 4)]
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


READ_BACK = [(name, {}) for name in OPTIMIZERS] + [
    ("SFNorMuon", {"beta_growth": 0.4, "averaging_power": 2.0, "averaging_warmup": 2, "polar": "svd"}),
    ("SFNorMuon", {"lr": torch.tensor(0.1), "momentum_dtype": torch.bfloat16, "polar": "polar-express"}),
    ("SFSpectralSGD", {"projection": "frobenius", "radius": 1.0}),
    ("SFSpectralSGD", {"projection": "spectral", "radius": 1.0}),
    ("SpectralDescent", {"momentum": 0.9}),
]


@pytest.mark.parametrize(("name", "more"), READ_BACK, ids=lambda v: v if isinstance(v, str) else "-".join(v))
def test_a_step_reads_nothing_back(name: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    params = everywhere()
    optimizer = make(name, params, **more)
    for method in ("item", "tolist", "numpy", "__bool__", "__float__", "__int__"):

        def refused(*_: Any, method: str = method, **__: Any) -> None:
            raise AssertionError(f"Tensor.{method} needs a value on the host")

        monkeypatch.setattr(Tensor, method, refused)
    for seed in range(3):
        feed(params, seed)
        if seed == 1:
            params[0].grad.fill_(math.inf)
        with NoReadBack():
            step(optimizer)
    monkeypatch.undo()
    assert optimizer.skipped_steps == 1


@every
def test_raising_costs_one_number_a_step(name: str) -> None:
    params = everywhere()
    optimizer = make(name, params, on_nonfinite="raise")
    for seed in range(3):
        feed(params, seed)
        with NoReadBack(refuse=False) as mode:
            step(optimizer)
        assert mode.seen == 1


@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("name", ["SFNorMuon", "SFAdamW", "AdamW"])
def test_a_step_compiles_to_one_graph_and_a_changing_rate_does_not_recompile(name: str, tensor: bool) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    model, plain = network(), network()
    rate: Any = torch.tensor(0.1, dtype=torch.float64) if tensor else 0.1
    optimizer, other = make(name, model, lr=rate), make(name, plain, lr=0.1)
    step = torch.compile(optimizer.step, backend=counter)
    frames = []
    for seed in range(6):
        for group in (*optimizer.param_groups, *other.param_groups):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(0.1 / (1 + seed))
            else:
                group["lr"] = 0.1 / (1 + seed)
        feed(model, seed)
        feed(plain, seed)
        step()
        other.step()
        frames.append(counter.frame_count)
    torch._dynamo.reset()
    assert frames[0] == 1  # the whole step is one graph
    assert frames[1] == frames[-1]  # once more after the first step is allowed: a number becomes a variable then
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("name", "elements"),
    [
        ("SFNorMuon", lambda m, n: 3 * m * n + m + 3),
        ("SFMuon", lambda m, n: 3 * m * n + 3),
        ("SFAdamW", lambda m, n: 3 * m * n + 3),
        ("SFSGD", lambda m, n: 2 * m * n + 3),
        ("SFPlus", lambda m, n: 4 * m * n + 6),
        ("NorMuon", lambda m, n: 2 * m * n + m + 1),
        ("Muon", lambda m, n: 2 * m * n + 1),
        ("AdamW", lambda m, n: 3 * m * n + 1),
        ("SignSGD", lambda m, n: 2 * m * n + 1),
    ],
)
def test_memory_of_a_matrix(name: str, elements: Callable[[int, int], int]) -> None:
    """The parameter counted; scalars are t, and for schedule-free ones Σw and β; of SFPlus, α, ‖g‖ and the peak too."""
    m, n = 17, 23
    p = nn.Parameter(torch.randn(m, n))
    optimizer = make(name, [p])
    for _ in range(2):
        assert p.numel() + sum(t.numel() for t in optimizer.state[p].values()) == elements(m, n)
        assert all(t.untyped_storage().nbytes() == t.numel() * t.element_size() for t in optimizer.state[p].values())
        train([p], optimizer, range(2))
    optimizer.eval()
    optimizer.train()
    assert p.numel() + sum(t.numel() for t in optimizer.state[p].values()) == elements(m, n)


# ------------------------------------------------------------------------- copies of groups


def test_a_copied_group_is_routed_anew() -> None:
    p, q, b = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(4))
    optimizer = anytime.SFNorMuon([p], lr=0.1)
    copied = optimizer.param_groups[0]
    optimizer.add_param_group({**copied, "params": [q], "lr": 0.2})
    with pytest.raises(ValueError, match="has no option 'row_norm'"):
        optimizer.add_param_group({**copied, "params": [b]})
    with pytest.raises(ValueError, match="lr is -1"):
        optimizer.add_param_group({**copied, "params": [b], "lr": -1})
    assert [(g["rule"], g["lr"], g["order"]) for g in optimizer.param_groups] == [
        ("normuon", 0.1, [0]),
        ("normuon", 0.2, [1]),
    ]
    train([p, q], optimizer, range(3))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_the_groups_of_an_optimizer_make_another() -> None:
    p, b = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(4))
    one = anytime.SFNorMuon([p, b], lr=0.1, adam_lr=0.2, momentum=0.7)
    two = anytime.SFNorMuon(one.param_groups)
    for g, h in zip(one.param_groups, two.param_groups, strict=True):
        assert {k: v for k, v in g.items() if k not in ("params", "order")} == {
            k: v for k, v in h.items() if k not in ("params", "order")
        }
    assert anytime.SFAdamW(anytime.SFAdamW([p, b]).param_groups).param_groups[0]["params"] == [p, b]


def test_patterns_with_rates_or_polar_factors_that_only_print_alike() -> None:
    class Half(nn.Module):
        def __init__(self, sign: float) -> None:
            super().__init__()
            self.sign = sign

        def forward(self, matrix: Tensor) -> Tensor:
            return self.sign * matrix

    named = [("a", nn.Parameter(torch.randn(3, 3))), ("b", nn.Parameter(torch.randn(3, 3)))]
    rates = {"a": {"lr": torch.tensor(1e-5)}, "b": {"lr": torch.tensor(1.00004e-5)}}
    assert len(anytime.SFNorMuon(named, rules=rates).param_groups) == 2
    factors = {"a": {"polar": Half(1)}, "b": {"polar": Half(-1)}}
    assert len(anytime.SFNorMuon(named, rules=factors).param_groups) == 2
    alike = {"a": {"lr": torch.tensor(1e-5)}, "b": {"lr": torch.tensor(1e-5)}}
    assert len(anytime.SFNorMuon(named, rules=alike).param_groups) == 1


@pytest.mark.parametrize(
    ("build", "error", "said"),
    [
        (lambda m: anytime.SFNorMuon(m, recipe=["anytime"]), ValueError, "must be one of 'paper', 'anytime'"),
        (lambda m: anytime.SFNorMuon(m, rules="matrix"), TypeError, "rules is 'matrix'; it must be a dict"),
        (lambda m: anytime.SFNorMuon(m).add_param_group(nn.Linear(2, 2)), TypeError, "a parameter group is a dict"),
        (lambda m: anytime.SFNorMuon(m, lr=torch.tensor(math.inf)), ValueError, "lr is tensor"),
        (lambda m: anytime.SFMuon(m, beta=1.0, beta_growth=0.4), ValueError, "beta is 1 and beta_growth 0.4"),
        (lambda m: anytime.SFMuon(m, momentum_dtype=torch.float16), ValueError, "momentum_dtype is torch.float16"),
    ],
)
def test_mistakes_of_kind_are_told(build: Callable[[nn.Module], Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        build(network())


def test_a_default_device_changes_nothing() -> None:
    model = network()
    optimizer = anytime.SFNorMuon(model, polar="low-rank")
    feed(model.parameters(), 0)
    plus = anytime.SFPlus(network())
    feed([p for g in plus.param_groups for p in g["params"]], 0)
    with torch.device("meta"):
        optimizer.step()
        plus.step(lambda: 1.0)
        assert not any(v.is_meta for s in optimizer.state_dict()["state"].values() for v in s.values())
    assert all_finite(optimizer)


def test_iterates_are_what_the_model_holds_after_it_was_widened() -> None:
    model = network(torch.bfloat16)
    optimizer = anytime.SFAdamW(model, lr=0.01, warmup_steps=0)
    train([*model.parameters()], optimizer, range(3))
    model.float()
    for p in model.parameters():
        assert torch.equal(optimizer.iterates(p).y, p)
    model.bfloat16()
    for p in model.parameters():
        assert {part.dtype for part in optimizer.iterates(p)} == {torch.float32}


def test_steps_that_were_skipped_elsewhere_are_counted_on() -> None:
    optimizer = anytime.SFAdamW(network())
    optimizer._counter(torch.device("cpu")).add_(3)
    assert optimizer._counter(torch.device("meta")).is_meta
    del optimizer._skipped[torch.device("meta")]
    optimizer._counter(torch.device("cpu", 0)).add_(1)
    assert optimizer.skipped_steps == 4
