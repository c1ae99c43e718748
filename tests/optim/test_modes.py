"""Train and eval mode, the average inside a block and out of place, and parameters narrower than float32."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anytime

SETTINGS: dict[str, dict[str, Any]] = {
    "SFNorMuon": {"lr": 0.05, "warmup_steps": 2, "beta_growth": 0.4, "beta_growth_start": 3},
    "SFMuon": {"lr": 0.05, "warmup_steps": 2},
    "SFSpectralSGD": {"lr": 0.05, "beta": 0.0},
    "SFAdamW": {"lr": 0.05, "warmup_steps": 2},
    "SFSGD": {"lr": 0.1, "beta": 1.0},
    "SFLion": {"lr": 0.02, "warmup_steps": 0},
    "SFPlus": {"lr": 0.5, "averaging_power": 1.0, "beta_anneal_steps": 4},
}
SCHEDULED = ("NorMuon", "AdamW")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

each = pytest.mark.parametrize("name", SETTINGS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


class Net(nn.Module):
    """Tied weights, buffers, a frozen layer, and one parameter that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 4)
        self.hidden = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.frozen(self.norm(self.hidden(self.embed(tokens)).tanh())))


def make(name: str, params: Any, **more: Any) -> anytime.AnytimeOptimizer:
    return getattr(anytime, name)(params, **{**SETTINGS.get(name, {"lr": 0.02}), **more})


def train(model: Net, optimizer: torch.optim.Optimizer, seeds: Iterable[int]) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(7, (6,), generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).float(), tokens.roll(1))
        loss.backward()
        optimizer.step(lambda: loss)  # noqa: B023


def trained(name: str, dtype: torch.dtype = torch.float32, steps: int = 6) -> tuple[Net, anytime.AnytimeOptimizer]:
    model = Net().to(dtype)
    optimizer = make(name, model)
    train(model, optimizer, range(steps))
    return model, optimizer


def bits(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().view(-1)
    return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]).clone()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {key: bits(value) for key, value in model.state_dict().items()}


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = weights(model)
    for i, p in enumerate(model.parameters()):
        found |= {f"state {i} {key}": bits(value) for key, value in optimizer.state.get(p, {}).items()}
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


# -------------------------------------------------------------------- the block


@each
@each_dtype
def test_averaged_holds_x_and_gives_back_y_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    model, optimizer = trained(name, dtype)
    before = everything(model, optimizer)
    y = {key: value.clone() for key, value in model.state_dict().items()}
    x = {p: optimizer.iterates(p).x for p in model.parameters()}
    with optimizer.averaged():
        assert not optimizer.training
        for p in model.parameters():
            assert torch.equal(bits(p), bits(x[p].to(dtype)))
        if SETTINGS[name].get("beta") != 1.0:  # β = 1 is Y = X
            assert not torch.equal(model.hidden.weight, y["hidden.weight"])
    assert optimizer.training
    assert same(before, everything(model, optimizer))


@each
def test_averaged_gives_back_y_when_the_body_raises(name: str) -> None:
    model, optimizer = trained(name)
    before = everything(model, optimizer)
    with pytest.raises(KeyError, match="inside"), optimizer.averaged():
        raise KeyError("inside")
    assert optimizer.training
    assert same(before, everything(model, optimizer))
    train(model, optimizer, [9])


@each
def test_averaged_nests(name: str) -> None:
    model, optimizer = trained(name)
    before = everything(model, optimizer)
    with optimizer.averaged():
        x = weights(model)
        with optimizer.averaged():
            assert same(x, weights(model))
        assert not optimizer.training
        assert same(x, weights(model))
        with pytest.raises(RuntimeError), optimizer.averaged():
            raise RuntimeError
        assert same(x, weights(model))
    assert same(before, everything(model, optimizer))


@each
def test_averaged_refuses_a_step_and_goes_on_after(name: str) -> None:
    model, optimizer = trained(name)
    straight, other = trained(name)
    with optimizer.averaged(), pytest.raises(RuntimeError, match=r"train\(\)"):
        optimizer.step()
    train(model, optimizer, range(6, 9))
    train(straight, other, range(6, 9))
    assert same(everything(model, optimizer), everything(straight, other))


@each
@pytest.mark.parametrize("before", ["train", "eval"])
@pytest.mark.parametrize("inside", ["train", "eval"])
def test_averaged_ends_in_the_mode_it_began_in(name: str, before: str, inside: str) -> None:
    model, optimizer = trained(name)
    getattr(optimizer, before)()
    held = everything(model, optimizer)
    with optimizer.averaged():
        getattr(optimizer, inside)()
    assert optimizer.training == (before == "train")
    assert same(held, everything(model, optimizer))


@each
def test_averaged_works_inside_inference_and_no_grad_modes(name: str) -> None:
    model, optimizer = trained(name)
    straight, other = trained(name)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode(), optimizer.averaged():
            model(torch.arange(7))
        model.eval()
        with optimizer.averaged(), mode():
            model(torch.arange(7))
        model.train()
        for buffer, plain in zip(model.buffers(), straight.buffers(), strict=True):
            buffer.copy_(plain)
    train(model, optimizer, range(6, 8))
    train(straight, other, range(6, 8))
    assert same(everything(model, optimizer), everything(straight, other))


@each
def test_averaged_before_the_first_step(name: str) -> None:
    model = Net()
    optimizer = make(name, model)
    before = everything(model, optimizer)
    with optimizer.averaged():
        assert same(weights(Net()), weights(model))
    assert same(before, everything(model, optimizer))


@each
def test_gradients_of_the_model_are_left_alone(name: str) -> None:
    model, optimizer = trained(name)
    grads = {p: p.grad.clone() for p in model.parameters() if p.grad is not None}
    with optimizer.averaged():
        assert all(torch.equal(p.grad, grad) for p, grad in grads.items())
        loss = model(torch.arange(7)).sum()
        loss.backward()  # gradients at X may be taken, for a diagnostic
    assert all(p.requires_grad for p in grads)


# ----------------------------------------------------------------------- modes


@each
@each_dtype
def test_eval_and_train_are_idempotent_and_exact(name: str, dtype: torch.dtype) -> None:
    model, optimizer = trained(name, dtype)
    before = everything(model, optimizer)
    optimizer.train()
    assert same(before, everything(model, optimizer))
    optimizer.eval()
    x = everything(model, optimizer)
    optimizer.eval()
    assert same(x, everything(model, optimizer))
    optimizer.train()
    assert same(before, everything(model, optimizer))
    optimizer.train()
    assert same(before, everything(model, optimizer))
    assert all("y" not in state for state in optimizer.state.values())


@each
@each_dtype
def test_evaluating_at_every_step_changes_nothing(name: str, dtype: torch.dtype) -> None:
    model, optimizer = trained(name, dtype, steps=0)
    straight, other = trained(name, dtype, steps=0)
    for seed in range(6):
        train(model, optimizer, [seed])
        train(straight, other, [seed])
        optimizer.eval()
        optimizer.train()
        with optimizer.averaged():
            optimizer.averaged_state_dict(model)
    assert same(everything(model, optimizer), everything(straight, other))


@pytest.mark.parametrize("name", SCHEDULED)
def test_without_an_average_the_modes_leave_the_weights(name: str) -> None:
    model, optimizer = trained(name)
    before = everything(model, optimizer)
    optimizer.eval()
    assert not optimizer.training
    assert same(before, everything(model, optimizer))
    with pytest.raises(RuntimeError, match=r"train\(\)"):
        optimizer.step()
    optimizer.train()
    assert same(before, everything(model, optimizer))
    for p in model.parameters():
        assert all(torch.equal(p, iterate) for iterate in optimizer.iterates(p))


# ------------------------------------------------------------------- iterates


@each
@each_dtype
def test_iterates_are_copies_without_a_graph_in_either_mode(name: str, dtype: torch.dtype) -> None:
    model, optimizer = trained(name, dtype)
    before = everything(model, optimizer)
    precise = torch.promote_types(dtype, torch.float32)
    for p in model.parameters():
        seen = optimizer.iterates(p)
        with optimizer.averaged():
            again = optimizer.iterates(p)
        for a, b in zip(seen, again, strict=True):
            assert not a.requires_grad
            assert a.dtype == precise
            assert torch.equal(bits(a), bits(b))
            a.fill_(7.0)
    assert same(before, everything(model, optimizer))


@each
def test_y_lies_between_x_and_z(name: str) -> None:
    model, optimizer = trained(name)
    for p in model.parameters():
        if (state := optimizer.state.get(p)) and state["step"] > 0:
            x, y, z = optimizer.iterates(p)
            beta = float(state["beta"])
            torch.testing.assert_close(y, (1 - beta) * z + beta * x, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(state["d"], z - x, rtol=1e-4, atol=1e-6)


def test_iterates_of_a_stranger_are_an_error() -> None:
    _, optimizer = trained("SFAdamW")
    with pytest.raises(KeyError, match=r"\(5, 2\)"):
        optimizer.iterates(torch.zeros(5, 2))


# --------------------------------------------------------- out of place, as a dict


@each
@each_dtype
def test_averaged_state_dict_is_what_the_block_holds(name: str, dtype: torch.dtype) -> None:
    model, optimizer = trained(name, dtype)
    before = everything(model, optimizer)
    average = optimizer.averaged_state_dict(model)
    assert same(before, everything(model, optimizer))
    with optimizer.averaged():
        held = {key: value.clone() for key, value in model.state_dict().items()}
        assert same({key: bits(value) for key, value in optimizer.averaged_state_dict(model).items()}, weights(model))
    assert average.keys() == held.keys()
    for key, value in held.items():
        assert average[key].dtype == value.dtype
        assert torch.equal(bits(average[key]), bits(value)), key
        assert not average[key].requires_grad
    assert torch.equal(average["norm.running_mean"], model.norm.running_mean)
    assert average["norm.num_batches_tracked"] == 6
    fresh = Net().to(dtype)
    fresh.load_state_dict(average)
    assert torch.equal(fresh.head.weight, fresh.embed.weight)


@each
def test_averaged_state_dict_shares_nothing_with_the_model(name: str) -> None:
    model, optimizer = trained(name)
    before = everything(model, optimizer)
    average = optimizer.averaged_state_dict(model)
    mine = {value.untyped_storage().data_ptr() for value in [*model.state_dict().values()]}
    mine |= {value.untyped_storage().data_ptr() for state in optimizer.state.values() for value in state.values()}
    assert not mine & {value.untyped_storage().data_ptr() for value in average.values()}
    for value in average.values():
        value.zero_()
    assert same(before, everything(model, optimizer))
    saved = copy.deepcopy(optimizer.averaged_state_dict(model))
    average = optimizer.averaged_state_dict(model)
    train(model, optimizer, [7])
    assert all(torch.equal(average[key], saved[key]) for key in saved)


@each
def test_averaged_state_dict_keeps_tied_weights_tied(name: str) -> None:
    model, optimizer = trained(name)
    average = optimizer.averaged_state_dict(model)
    assert torch.equal(average["head.weight"], average["embed.weight"])
    assert torch.equal(average["head.weight"], optimizer.iterates(model.embed.weight).x)


@pytest.mark.parametrize("name", [*SETTINGS, *SCHEDULED])
@pytest.mark.parametrize("evaluating", [False, True], ids=["train", "eval"])
def test_averaged_state_dict_in_another_dtype(name: str, evaluating: bool) -> None:
    model, optimizer = trained(name, torch.bfloat16)
    exact = {p: optimizer.iterates(p).x for p in model.parameters()}
    if evaluating:
        optimizer.eval()
    average = optimizer.averaged_state_dict(model, torch.float32)
    for key, p in model.named_parameters(remove_duplicate=False):
        assert average[key].dtype == torch.float32, key
        assert torch.equal(average[key], exact[p].float()), key
    assert average["norm.num_batches_tracked"].dtype == torch.int64
    rounded = optimizer.averaged_state_dict(model, torch.float16)
    assert rounded["hidden.weight"].dtype == torch.float16


@each
def test_averaged_state_dict_of_a_wrapped_model_or_a_part_of_it(name: str) -> None:
    model, optimizer = trained(name)
    whole = optimizer.averaged_state_dict(model)
    wrapped = optimizer.averaged_state_dict(nn.ModuleDict({"module": model}))
    assert all(torch.equal(wrapped[f"module.{key}"], value) for key, value in whole.items())
    part = optimizer.averaged_state_dict(model.hidden)
    assert torch.equal(part["weight"], whole["hidden.weight"])


@each
def test_averaged_state_dict_of_another_model_is_an_error(name: str) -> None:
    _, optimizer = trained(name)
    with pytest.raises(ValueError, match="none of the optimizer's parameters"):
        optimizer.averaged_state_dict(Net())


# ------------------------------------------------------------- narrow parameters


@pytest.mark.parametrize(
    ("name", "rate", "dtype"),
    [
        ("SFSGD", 1e-4, torch.bfloat16),
        ("SFSGD", 1e-4, torch.float16),
        ("SFAdamW", 2e-4, torch.bfloat16),
        ("SFNorMuon", 1e-3, torch.bfloat16),
    ],
    ids=str,
)
def test_small_steps_do_not_stall_in_narrow_parameters(name: str, rate: float, dtype: torch.dtype) -> None:
    """2,000 steps below the parameters' resolution: plain accumulation stays where it is, the optimizer moves."""

    def run(of: torch.dtype) -> tuple[nn.Parameter, anytime.AnytimeOptimizer]:
        p = nn.Parameter(torch.full((4, 4), 2.0, dtype=of))
        optimizer = getattr(anytime, name)([p], lr=rate, weight_decay=0.0, warmup_steps=0)
        target = torch.eye(4, dtype=of)
        for _ in range(2000):
            p.grad = p.detach() - target
            optimizer.step()
        return p, optimizer

    p, optimizer = run(dtype)
    q, exact = run(torch.float32)
    assert (q.detach() - 2).abs().max() > 0.1
    torch.testing.assert_close(p.detach().float(), q.detach(), rtol=0.02, atol=0.02)
    torch.testing.assert_close(optimizer.iterates(p).x.detach(), exact.iterates(q).x, rtol=0.02, atol=0.02)
    plain = torch.full((4, 4), 2.0, dtype=dtype)
    for _ in range(2000):
        plain -= 2e-4  # none of the steps above is longer
    assert torch.equal(plain, torch.full_like(plain, 2.0))
    state = optimizer.state[p]
    assert state["residual"].dtype == state["d"].dtype == torch.float32
    assert state["residual"].abs().max() > 0
    assert p.dtype == dtype


@each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_residual_is_what_rounding_took(name: str, dtype: torch.dtype) -> None:
    model, optimizer = trained(name, dtype)
    for p in model.parameters():
        if p in optimizer.state and optimizer.state[p]["step"] > 0:
            y = optimizer.iterates(p).y
            assert torch.equal(y.to(dtype), p)
            assert torch.equal(y - p.float(), optimizer.state[p]["residual"])


def test_parameters_exchanged_in_mid_training_are_an_error():
    """Their state would be lost; entries that were moved along are not."""
    model = nn.Linear(4, 3)
    optimizer = anytime.SFNorMuon(model, lr=0.1, warmup_steps=0)
    (matrix,) = optimizer.param_groups[0]["params"]

    def step(p: nn.Parameter) -> None:
        p.grad = torch.ones_like(p)
        optimizer.step()

    step(matrix)
    pruned = optimizer.param_groups[0]["params"][0] = nn.Parameter(matrix.detach()[:2].clone())
    for act in (lambda: step(pruned), optimizer.state_dict):
        with pytest.raises(RuntimeError, match="1 parameters were exchanged for others after the first step"):
            act()
    old = optimizer.state.pop(matrix)
    optimizer.state[pruned] = {name: value[:2].clone() if value.ndim else value for name, value in old.items()}
    step(pruned)
    assert optimizer.state[pruned]["step"] == 2
    assert list(optimizer.iterates(pruned).z.shape) == [2, 4]


def test_parameters_exchanged_after_a_step_may_be_loaded():
    """All state is replaced then, and none lost."""
    model, other = nn.Linear(4, 3), nn.Linear(4, 3)
    optimizer, saved = anytime.SFNorMuon(model, lr=0.1), anytime.SFNorMuon(other, lr=0.1)
    for some, its in ((model, optimizer), (other, saved)):
        for _ in range(2):
            for p in some.parameters():
                p.grad = torch.ones_like(p)
            its.step()
    for group, theirs in zip(optimizer.param_groups, saved.param_groups, strict=True):
        group["params"] = list(theirs["params"])
    with pytest.raises(RuntimeError, match="2 parameters were exchanged"):
        optimizer.state_dict()
    optimizer.load_state_dict(saved.state_dict())
    assert optimizer.state.keys() == set(other.parameters())
    for p in other.parameters():
        assert torch.equal(optimizer.iterates(p).x, saved.iterates(p).x)


def test_parameters_made_on_meta_are_taken_up_where_they_are_put():
    with torch.device("meta"):
        model = nn.Linear(4, 3)
    optimizer = anytime.SFNorMuon(model, lr=0.1, warmup_steps=0)
    names = [group["param_names"] for group in optimizer.param_groups]
    model.to_empty(device="cpu")
    now = dict(model.named_parameters())
    for p in now.values():
        nn.init.ones_(p)
        p.grad = torch.ones_like(p)
    for group, those in zip(optimizer.param_groups, names, strict=True):
        group["params"] = [now[name] for name in those]
    optimizer.step()
    assert optimizer.state.keys() == set(now.values())
    assert {int(state["step"]) for state in optimizer.state.values()} == {1}
    assert all((p < 1).all() for p in now.values())


@pytest.mark.parametrize("frozen", [True, False])
def test_a_group_that_is_taken_away_takes_its_state_along(frozen: bool) -> None:
    """It is no exchange, though a frozen parameter has no state."""
    kept, gone = nn.Linear(4, 3), nn.Linear(3, 3)
    kept.bias.requires_grad_(not frozen)
    optimizer = anytime.SFNorMuon([{"params": list(kept.parameters())}, {"params": list(gone.parameters())}], lr=0.1)

    def step() -> None:
        for p in (*kept.parameters(), *gone.parameters()):
            p.grad = torch.ones_like(p) if p.requires_grad else None
        optimizer.step()

    step()
    mine = set(kept.parameters())
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if set(group["params"]) <= mine]
    assert len(optimizer.state_dict()["state"]) == 2 - frozen
    step()
    assert optimizer.state.keys() == {p for p in mine if p.requires_grad}
    assert copy.deepcopy(optimizer).state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()


@pytest.mark.parametrize("what", ["eval", "load"])
def test_what_an_evaluation_makes_can_be_written_to(what: str) -> None:
    """State that is moved or loaded inside inference mode takes steps outside of it."""
    model = nn.Linear(4, 3)
    optimizer = anytime.SFNorMuon(model, lr=0.1, warmup_steps=0)

    def step() -> None:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()

    step()
    if what == "eval":
        model.to(torch.bfloat16)
    with torch.inference_mode():
        if what == "eval":
            with optimizer.averaged():
                pass
        else:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step()
    assert {int(state["step"]) for state in optimizer.state.values()} == {2}
