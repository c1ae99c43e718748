"""What the processes of a pool do in these tests, and one process alone does for comparison."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from models import named_mesh
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import anytime
from anytime.core.direction import Batch, Direction
from anytime.optim.rules import RULES as RULES_OF_OPTIMIZERS
from anytime.optim.sf_spectral import ScheduleFreeSpectral

Case = tuple[str, dict[str, Any]]  # an optimizer and its options
Where = tuple[tuple[Any, ...], Sequence[Any]]  # a mesh's shape (or the processes in it), and placements on it
Arrays = dict[str, np.ndarray]

#: Sides that 2 and 4 divide and do not, and sides with less than one for each.
SHAPES: dict[str, tuple[int, ...]] = {
    "even": (8, 4),
    "uneven": (5, 7),
    "small": (2, 3),
    "conv": (6, 3, 2, 1),
    "split_conv": (5, 2, 2, 1),
    "experts": (3, 4, 5),
    "qkv_rows": (12, 4),
    "qkv_columns": (3, 10),
    "split_experts": (2, 6, 3),
    "plain": (3, 4),
    "frozen": (4, 3),
    "vector": (7,),
    "plain_vector": (3,),
    "number": (),
}
RULES: dict[str, dict[str, Any]] = {
    "even": {"rule": "matrix"},
    "uneven": {"rule": "matrix"},
    "small": {"rule": "matrix"},
    "conv": {"rule": "matrix"},
    "split_conv": {"rule": "matrix", "split": (3, 2)},
    "experts": {"rule": "matrix"},
    "qkv_rows": {"rule": "matrix", "split": (5, 4, 3)},
    "qkv_columns": {"rule": "matrix", "split": {"sizes": (3, 5, 2), "dim": 1}},
    "split_experts": {"rule": "matrix", "split": 2},
    "plain": {"rule": "matrix"},
    "frozen": {"rule": "matrix"},
}
#: These stay whole on every process, whatever happens to the others.
PLAIN = ("plain", "plain_vector")
BY_ELEMENTS = ("SFAdamW", "SFSGD", "SFLion", "AdamW", "SignSGD", "Lion")


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype, shapes: Mapping[str, Sequence[int]] = SHAPES, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in shapes.items():
            start = torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)
            self.register_parameter(name, nn.Parameter(start, requires_grad=name != "frozen"))


def make(case: Case, params: Any, rules: Mapping[str, Any] | None = None, **more: Any) -> anytime.AnytimeOptimizer:
    kind, options = case
    if kind in BY_ELEMENTS:
        return getattr(anytime, kind)(params, **options, **more)
    rules = {name: dict(rule) for name, rule in (RULES if rules is None else rules).items()}
    if kind == "Shampoo":
        rules = {name: {"rule": "matrix"} for name in rules}
    return getattr(anytime, kind)(params, rules=rules, **options, **more)


@cache
def mesh_of(shape: tuple[Any, ...]) -> DeviceMesh:
    """Of a shape, or of the processes in an order of one's own."""
    if isinstance(shape[0], tuple):
        return DeviceMesh("cpu", [list(row) for row in shape])
    return init_device_mesh("cpu", shape)


def fitting(placements: Sequence[Any], ndim: int) -> list[Any]:
    """Without cuts of dimensions that a tensor does not have."""
    return [p if p.is_replicate() or p.dim < ndim else Replicate() for p in placements]


def place(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> DTensor:
    """Without a message: everyone has the whole tensor."""
    return distribute_tensor(tensor, mesh, fitting(placements, tensor.dim()), src_data_rank=None)


def spread(model: nn.Module, where: Where) -> nn.Module:
    """The model with its parameters sharded."""
    for name, p in list(model.named_parameters()):
        if name not in PLAIN:
            placed = place(p.detach(), mesh_of(where[0]), where[1])
            model.register_parameter(name, nn.Parameter(placed, requires_grad=p.requires_grad))
    return model


def full(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def array(tensor: Tensor) -> np.ndarray:
    tensor = full(tensor)
    return (tensor.double() if tensor.is_floating_point() else tensor).clone().numpy()


class Gradients:
    """Random gradients of every step, spread as the parameters are."""

    def __init__(self, model: nn.Module, steps: int, seed: int = 1) -> None:
        self.params = dict(model.named_parameters())
        generator = torch.Generator().manual_seed(seed)
        self.of: dict[str, Tensor] = {}
        for name, p in self.params.items():
            all_ = torch.randn((steps, *p.shape), generator=generator, dtype=torch.float64).to(p.dtype)
            if isinstance(p, DTensor):
                later = [q if q.is_replicate() else Shard(q.dim + 1) for q in p.placements]
                all_ = part(distribute_tensor(all_, p.device_mesh, later, src_data_rank=None))
            self.of[name] = all_

    def put(self, step: int, without: Sequence[str] = ()) -> None:
        for name, p in self.params.items():
            p.grad = None
            if p.requires_grad and name not in without:
                p.grad = like(self.of[name][step].clone(), p)


def like(part: Tensor, p: Tensor) -> Tensor:
    """A part as a tensor spread as `p` is."""
    if not isinstance(p, DTensor):
        return part
    return DTensor.from_local(
        part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=torch.empty(p.shape).stride()
    )


def results(model: nn.Module, optimizer: anytime.AnytimeOptimizer) -> Arrays:
    """X, Y, Z and the state of every parameter, whole."""
    found: Arrays = {"skipped": np.array(optimizer.skipped_steps)}
    for name, p in model.named_parameters():
        found[name] = array(p)
        for letter, value in optimizer.iterates(p)._asdict().items():
            assert value.shape == p.shape
            found[f"{name} {letter}"] = array(value)
        for key, value in optimizer.state.get(p, {}).items():
            found[f"{name} {key}"] = array(value)
    return found


def net(dtype: torch.dtype, where: Where | None, **more: Any) -> Any:
    return Net(dtype, **more) if where is None else spread(Net(dtype, **more), where)


def train(case: Case, dtype: torch.dtype, steps: int, where: Where | None = None) -> Arrays:
    """Steps with all that may happen: one parameter without a gradient now and then, others never, and inf in one
    element at times."""
    model = net(dtype, where)
    optimizer = make(case, model)
    gradients = Gradients(model, steps)
    for step in range(steps):
        gradients.put(step, without=["uneven", "vector"] if step % 7 == 3 else [])
        if step % 40 == 20:
            spoil(model.even)
        optimizer.step()
    return results(model, optimizer)


def spoil(p: Tensor) -> None:
    """inf in the gradient's first element, which one process holds (or its replicas)."""
    assert p.grad is not None
    grad = part(p.grad)
    if not isinstance(p, DTensor) or all(at == 0 or q.is_replicate() for at, q in coordinates(p)):
        grad.view(-1)[0] = torch.inf


def coordinates(p: DTensor) -> list[tuple[int, Any]]:
    return list(zip(p.device_mesh.get_coordinate(), p.placements, strict=True))


def bits(model: nn.Module, optimizer: anytime.AnytimeOptimizer) -> list[bytes]:
    """Everything a step changes, as held here."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    tensors = [*held, *(value for p in held for value in optimizer.state.get(p, {}).values())]
    return [part(t).contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors]


def skip(case: Case, where: Where, spoiled: int, value: float) -> tuple[bool, bool, int, bool, str]:
    """A step where one process alone has inf or NaN, and one after it; of every process whether each changed its
    parameters and state, how many were skipped, and what on_nonfinite="raise" said."""
    model = net(torch.float32, where)
    optimizer = make(case, model)
    gradients = Gradients(model, 5)
    for step in range(2):  # after one, zeros may have a sign
        gradients.put(step)
        optimizer.step()
    before = bits(model, optimizer)
    gradients.put(4)
    if dist.get_rank() == spoiled:
        part(model.even.grad).view(-1)[-1] = value
    optimizer.step()
    kept = bits(model, optimizer) == before
    gradients.put(2)
    optimizer.step()
    went_on = bits(model, optimizer) != before
    strict = make((case[0], {**case[1], "on_nonfinite": "raise"}), model)
    before = bits(model, strict)
    gradients.put(3)
    if dist.get_rank() == spoiled:
        part(model.plain_vector.grad)[0] = value
    try:
        strict.step()
        said = ""
    except RuntimeError as error:
        said = str(error)
    return kept, went_on, optimizer.skipped_steps, bits(model, strict) == before, said


def skip_beside() -> int:
    """Matrices sharded between two, and two such pairs side by side; inf in the first pair alone."""
    mesh = named_mesh((2, 2), ("data", "tensor"))["tensor"]
    model = Net(torch.float32, {"even": (8, 4)})
    model.even = nn.Parameter(place(model.even.detach(), mesh, [Shard(0)]))
    optimizer = make(("SFNorMuon", {}), model, {"even": {"rule": "matrix"}})
    Gradients(model, 1).put(0)
    if dist.get_rank() == 1:
        part(model.even.grad)[0, 0] = torch.inf
    optimizer.step()
    return optimizer.skipped_steps


def moved_gradients(case: Case, where: Where | None, placements: Sequence[Any] | None) -> Arrays:
    """Gradients placed otherwise than their parameters: parts of a sum if None."""
    model = net(torch.float64, where)
    optimizer = make(case, model)
    gradients = Gradients(net(torch.float64, None), 10)
    for step in range(10):
        for name, p in model.named_parameters():
            if not p.requires_grad:
                continue
            whole = gradients.of[name][step]
            p.grad = whole
            if isinstance(p, DTensor) and placements is not None:
                p.grad = place(whole, p.device_mesh, placements)
            elif isinstance(p, DTensor):
                from torch.distributed.tensor import Partial

                share = whole * (2.0 * dist.get_rank() / (dist.get_world_size() - 1)) / dist.get_world_size()
                p.grad = DTensor.from_local(share, p.device_mesh, [Partial()] * p.device_mesh.ndim, run_check=False)
        optimizer.step()
    return results(model, optimizer)


def modes(case: Case, dtype: torch.dtype, where: Where | None = None) -> Arrays:
    """Both modes, the average in and out of place, more parameters, copies; arrays to compare with one process's."""
    found: Arrays = {}
    model = net(dtype, where)
    late = Net(dtype, {"late": (6, 4), "late_vector": (5,)}, seed=5)
    if where is not None:
        spread(late, where)
    optimizer = make(case, model)
    gradients = Gradients(model, 12)
    for step in range(6):
        gradients.put(step)
        optimizer.step()
    before = bits(model, optimizer)
    averaged = optimizer.averaged_state_dict(model)
    narrow = optimizer.averaged_state_dict(model, dtype=torch.bfloat16)
    assert bits(model, optimizer) == before
    for name, p in model.named_parameters():
        x = averaged[name]
        assert isinstance(x, DTensor) == isinstance(p, DTensor)
        assert x.dtype == p.dtype
        assert narrow[name].dtype == torch.bfloat16
        if isinstance(p, DTensor):
            assert (x.device_mesh, x.placements) == (p.device_mesh, p.placements)
            assert part(x).shape == part(p).shape
            assert part(x).untyped_storage().data_ptr() != part(p).untyped_storage().data_ptr()
        found[f"{name} averaged"] = array(x)
        assert torch.equal(full(narrow[name]), full(x).bfloat16())
        found[f"{name} iterate"] = array(optimizer.iterates(p).x)
    with optimizer.averaged():
        for name, p in model.named_parameters():
            assert torch.equal(full(p), full(averaged[name]))
        again = optimizer.averaged_state_dict(model)
        with optimizer.averaged():
            pass
        for name, x in averaged.items():
            assert torch.equal(full(again[name]), full(x))
        for name, p in model.named_parameters():
            found[f"{name} inside"] = array(optimizer.iterates(p).z)
    assert bits(model, optimizer) == before
    optimizer.eval()
    optimizer.eval()
    assert optimizer.averages == (bits(model, optimizer) != before)
    optimizer.train()
    assert bits(model, optimizer) == before

    optimizer.add_param_group({"params": list(late.named_parameters())})
    late_gradients = Gradients(late, 12, seed=7)
    for step in range(6, 9):
        gradients.put(step)
        late_gradients.put(step)
        optimizer.step()
    model.late = late
    copied_model, copied = copy.deepcopy((model, optimizer))
    for some, theirs in ((model, optimizer), (copied_model, copied)):
        later, latest = Gradients(some, 12), Gradients(some.late, 12, seed=7)
        for step in range(9, 12):
            later.put(step)
            latest.put(step)
            theirs.step()
    assert bits(copied_model, copied) == bits(model, optimizer)
    return {**found, **results(model, optimizer)}


def reloaded(case: Case, dtype: torch.dtype, first: Where | None, then: Where | None, evaluating: bool) -> Arrays:
    """Half of the steps spread in one way, the rest in another, from the state dict."""
    one = net(dtype, first)
    optimizer = make(case, one)
    gradients = Gradients(one, 12)
    for step in range(6):
        gradients.put(step)
        optimizer.step()
    if evaluating:
        optimizer.eval()
    other = net(dtype, None)
    with torch.no_grad():
        for p, q in zip(other.parameters(), one.parameters(), strict=True):
            p.copy_(full(q))
    if then is not None:
        spread(other, then)
    loaded = make(case, other)
    state = optimizer.state_dict()
    loaded.load_state_dict(state)
    prints = [int(held["fingerprint"]) for held in state["state"].values()]
    assert prints == [int(held["fingerprint"]) for held in loaded.state_dict()["state"].values()]
    for p in other.parameters():
        for key, value in loaded.state.get(p, {}).items():
            assert isinstance(value, DTensor) == (isinstance(p, DTensor) and value.dim() > 0 and key not in UNSPREAD)
    loaded.train()
    gradients = Gradients(other, 12)
    for step in range(6, 12):
        gradients.put(step)
        loaded.step()
    found = results(other, loaded)
    found["fingerprints"] = np.array(prints)
    with torch.no_grad():
        part(other.even).view(-1)[:1] += 1
    try:
        make(case, other).load_state_dict(state)
        found["refused"] = np.array(0)
    except ValueError as error:
        found["refused"] = np.array(int("are not those the state was saved with" in str(error)))
    return found


UNSPREAD = ("left", "right")


def prints(where: Where | None) -> list[int]:
    """Fingerprints, the middle of a run."""
    found = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        model = net(dtype, where)
        state = make(("SFAdamW", {}), model).state_dict()["state"]
        found += [int(held["fingerprint"]) for held in state.values()]
    return found


def few(
    case: Case, shapes: Mapping[str, Sequence[int]], rules: Mapping[str, Any], where: Where | None, steps: int = 4
) -> Arrays:
    model = net(torch.float64, where, shapes=shapes)
    optimizer = make(case, model, rules)
    gradients = Gradients(model, steps)
    for step in range(steps):
        gradients.put(step)
        optimizer.step()
    return results(model, optimizer)


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, hidden)
        self.down = nn.Linear(hidden, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


def real(hidden: int, parallel: bool, steps: int = 30) -> Arrays:
    """Training: by FSDP2 over two halves of the batch, each of two processes that share the layers; or alone."""
    torch.manual_seed(3)
    model = nn.Sequential(Block(hidden), Block(hidden), nn.Linear(6, 6)).double()
    x, target = torch.randn(2, 8, 6, dtype=torch.float64)
    if parallel:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = named_mesh((2, 2), ("data", "tensor"))
        for block in model[:2]:
            parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
        half = mesh["data"].get_local_rank()
        x, target = x[half * 4 :][:4], target[half * 4 :][:4]
    rules = {name: {"rule": "matrix"} for name, p in model.named_parameters() if p.dim() == 2}
    optimizer = anytime.SFNorMuon(model, lr=0.02, warmup_steps=3, rules=rules)
    found: Arrays = {}

    def look(name: str) -> None:
        with torch.no_grad():
            at_all = torch.linspace(-1, 1, 12, dtype=torch.float64).view(2, 6)
            found[name] = array(model(at_all))

    for step in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), target).backward()
        optimizer.step()
        if step % 10 == 4:
            look(f"y {step}")
            with optimizer.averaged():
                look(f"x {step}")
                if step == 14:
                    optimizer.train()
                    look(f"y inside {step}")
                    optimizer.eval()
                look(f"x again {step}")
            look(f"y again {step}")
    found |= results(model, optimizer)
    placements = [p.placements for p in model.parameters() if isinstance(p, DTensor)]
    found["strided"] = np.array(any("Strided" in type(q).__name__ for of in placements for q in of))
    return found


# ------------------------------------------------------------------- owners


def put_with_noise(gradients: Gradients, noise: Gradients, step: int, mode: str | None, without: Sequence[str]) -> None:
    """The same gradients everywhere, or where the optimizer adds them up, others whose mean they are."""
    gradients.put(step, without)
    if mode == "gradient":
        off = dist.get_rank() - (dist.get_world_size() - 1) / 2
        for name, p in gradients.params.items():
            if p.grad is not None:
                p.grad += off * noise.of[name][step]


def owned(case: Case, mode: str, dtype: torch.dtype, steps: int) -> dict[str, Any]:
    """What `train` does, by owners."""
    model = net(dtype, None)
    optimizer = make(case, model, owners=mode)
    gradients, noise = Gradients(model, steps), Gradients(model, steps, seed=9)
    for step in range(steps):
        put_with_noise(gradients, noise, step, mode, ["uneven", "vector"] if step % 7 == 3 else [])
        if step % 40 == 20 and (mode != "gradient" or dist.get_rank() == step // 40 % 2):
            spoil(model.even)
        optimizer.step()
    found: dict[str, Any] = {"skipped": optimizer.skipped_steps, "held": {}, "refused": {}}
    names = dict(model.named_parameters())
    found["y"] = {name: array(p) for name, p in names.items()}
    found["averaged"] = {name: array(x) for name, x in optimizer.averaged_state_dict(model).items() if name != "frozen"}
    found["averaged"]["frozen"] = found["y"]["frozen"]
    before = bits(model, optimizer)
    with optimizer.averaged():
        found["eval"] = {name: array(p) for name, p in names.items()}
    assert bits(model, optimizer) == before
    found["again"] = {name: array(p) for name, p in names.items()}
    for name, p in names.items():
        try:
            iterates = optimizer.iterates(p)._asdict()
            found["refused"][name] = ""
        except RuntimeError as error:
            found["refused"][name] = str(error)
            assert not optimizer.state.get(p)
            continue
        state = optimizer.state.get(p, {})
        found["held"][name] = {key: array(value) for key, value in {**state, **iterates}.items()} if state else {}
    return found


def frozen_average(mode: str) -> np.ndarray:
    model = net(torch.float32, None)
    optimizer = make(("SFNorMuon", {}), model, owners=mode)
    # Memory that was in use: what is not filled in shows.
    rubbish = [torch.full((4, 3), torch.nan) for _ in range(64)]
    del rubbish
    return array(optimizer.averaged_state_dict(model)["frozen"])


def names_of_half(shapes: Mapping[str, Any]) -> list[str]:
    return list(shapes)[: len(shapes) // 2 + 1]


def state_bytes(shapes: Mapping[str, Sequence[int]], mode: str | None) -> tuple[int, float]:
    """Bytes of the state held here, and what its polar factors cost; of two groups."""
    model = net(torch.float32, None, shapes=shapes)
    rules = {name: {"rule": "matrix", "rate": 1.0 if name in names_of_half(shapes) else 2.0} for name in shapes}
    optimizer = make(("SFNorMuon", {}), model, rules, owners=mode)
    gradients = Gradients(model, 1)
    gradients.put(0)
    optimizer.step()
    cost = sum(min(p.shape) ** 2 * (2.0 * max(p.shape) + min(p.shape)) for p, held in optimizer.state.items() if held)
    tensors = [value for held in optimizer.state.values() for value in held.values()]
    return sum(value.numel() * value.element_size() for value in tensors), cost


def of_kinds(kinds: Mapping[str, tuple[Sequence[int], torch.dtype]], mode: str | None) -> Arrays:
    """A few steps of parameters, each of a shape and a precision."""
    model = nn.Module()
    for name, (shape, dtype) in kinds.items():
        model.register_parameter(name, nn.Parameter(Net(dtype, {"p": shape}).p.detach()))
    rules = {name: {"rule": "matrix"} for name, (shape, _) in kinds.items() if len(shape) == 2}
    optimizer = make(("SFNorMuon", {"lr": 0.05, "warmup_steps": 2}), model, rules, owners=mode)
    gradients, noise = Gradients(model, 6), Gradients(model, 6, seed=9)
    for step in range(6):
        put_with_noise(gradients, noise, step, mode, [])
        optimizer.step()
    averaged = optimizer.averaged_state_dict(model)
    found = {name: array(p) for name, p in model.named_parameters()}
    return found | {f"{name} x": array(x) for name, x in averaged.items()}


def grown(mode: str | None) -> Arrays:
    """Parameters that come later, in two lots; one without a gradient everywhere for a while."""
    found: Arrays = {}
    model = net(torch.float64, None)
    optimizer = make(("SFNorMuon", {"warmup_steps": 3}), model, owners=mode)
    everyone = [model]
    for lot in range(3):
        if lot:
            more = Net(torch.float64, {f"late{lot}": (6, 4), f"later{lot}": (4, 4), f"bias{lot}": (5,)}, seed=lot)
            optimizer.add_param_group({"params": list(more.named_parameters())})
            everyone.append(more)
        for step in range(4):
            for part_ in everyone:
                put_with_noise(
                    Gradients(part_, 4), Gradients(part_, 4, seed=9), step, mode, ["even", "late1"] if step > 1 else []
                )
            optimizer.step()
    for model_ in everyone:
        averaged = optimizer.averaged_state_dict(model_)
        for name, p in model_.named_parameters():
            found[f"{lot} {name}"] = array(p)
            if name != "frozen":
                found[f"{lot} {name} x"] = array(averaged[name])
    return found


def copied(mode: str | None) -> Arrays:
    """A copy and a reloaded one, each with steps of its own."""
    model = net(torch.float64, None)
    case = ("SFNorMuon", {"warmup_steps": 3})
    optimizer = make(case, model, owners=mode)

    def go_on(model: Any, optimizer: Any, steps: Sequence[int]) -> None:
        gradients, noise = Gradients(model, 9), Gradients(model, 9, seed=9)
        for step in steps:
            put_with_noise(gradients, noise, step, mode, [])
            optimizer.step()

    go_on(model, optimizer, range(3))
    twin, its = copy.deepcopy((model, optimizer))
    go_on(twin, its, range(3, 6))
    kept = bits(model, optimizer)
    third = net(torch.float64, None)
    third.load_state_dict(model.state_dict())
    reloaded = make(case, third, owners=mode)
    state = optimizer.state_dict()
    reloaded.load_state_dict(state)
    assert bits(model, optimizer) == kept
    assert len(state["state"]) == len(SHAPES) - 1  # all but the frozen one: of others' matrices what they were
    for name in ("even", "uneven", "vector"):
        other = copy.deepcopy(model)
        with torch.no_grad():
            getattr(other, name).view(-1)[0] += 1
        error, said = error_of(lambda other=other: make(case, other, owners=mode).load_state_dict(state))
        assert error == "ValueError"
        assert f"weights of {name} are not those" in said
    assert bits(third, reloaded) == kept
    go_on(third, reloaded, range(3, 6))
    assert bits(third, reloaded) == bits(twin, its)
    return {name: array(p) for name, p in twin.named_parameters()}


@cache
def groups_of(ranks: tuple[tuple[int, ...], ...]) -> list[Any]:
    return [dist.new_group(list(each)) for each in ranks]


def pairs(mode: str | None, which: int | None = None) -> Arrays:
    """Training in a group that is not all: processes 0 and 1, or 2 and 3."""
    group = None
    if mode is not None:
        which = dist.get_rank() // 2
        group = groups_of(((0, 1), (2, 3)))[which]
    model = net(torch.float64, None)
    optimizer = make(("SFNorMuon", {"warmup_steps": 3}), model, owners=mode, process_group=group)
    gradients, noise = Gradients(model, 6, seed=which or 0), Gradients(model, 6, seed=9)
    for step in range(6):
        gradients.put(step)
        if mode == "gradient":
            for name, p in gradients.params.items():
                if p.grad is not None:
                    p.grad += (2 * dist.get_rank(group) - 1) * noise.of[name][step]
        optimizer.step()
    averaged = optimizer.averaged_state_dict(model)
    found = {name: array(p) for name, p in model.named_parameters()}
    return found | {f"{name} x": array(averaged[name]) for name in found if name != "frozen"}


def group_of_one(mode: str) -> Arrays:
    groups = groups_of(tuple((rank,) for rank in range(dist.get_world_size())))
    options = {"lr": 0.05, "warmup_steps": 5, "weight_decay": 0.1, "owners": mode}
    return train(("SFNorMuon", {**options, "process_group": groups[dist.get_rank()]}), torch.float32, 5)


def _several(mode: str, count: int) -> tuple[dict[str, nn.Parameter], Any]:
    """Square matrices, one of which each process owns in turn, after a step."""
    torch.manual_seed(0)
    named = {name: nn.Parameter(torch.randn(8, 8)) for name in "abcd"[:count]}
    optimizer = make(("SFNorMuon", {"lr": 0.1, "warmup_steps": 0, "owners": mode}), named.items(), {})
    for p in named.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return named, optimizer


def exchanged_under_owners(mode: str) -> str:
    """What is said when one matrix is exchanged for another."""
    _, optimizer = _several(mode, 3)
    optimizer.param_groups[0]["params"][1] = p = nn.Parameter(torch.ones(8, 8))
    p.grad = torch.ones_like(p)
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


def taken_away_under_owners(mode: str) -> list[str]:
    """Which parameters are left to be gathered when a group of them is taken away."""
    named, optimizer = _several(mode, 1)
    more = nn.Parameter(torch.ones(8, 8))
    optimizer.add_param_group({"params": [("more", more)]})
    named["a"].grad = torch.ones(8, 8)
    optimizer.step()
    optimizer.param_groups.pop()
    optimizer.step()
    return [name for name, p in named.items() if p in optimizer._team.owners.of] + ["more"] * (
        more in optimizer._team.owners.of
    )


def groups_made() -> tuple[list[int], list[int]]:
    """How many groups of processes there are after each of three optimizers of a pair has taken a step, and who is in
    the pair's group."""
    from anytime.distributed.processes import among

    mesh = named_mesh((2, 2), ("data", "tensor"))["tensor"]
    pair = among(mesh.mesh.tolist())
    made = []
    for _ in range(3):
        model = Net(torch.float32, {"even": (8, 4)})
        model.even = nn.Parameter(place(model.even.detach(), mesh, [Shard(0)]))
        optimizer = make(("SFNorMuon", {}), model, {"even": {"rule": "matrix"}})
        Gradients(model, 1).put(0)
        optimizer.step()
        assert among(reversed(mesh.mesh.tolist())) is pair
        made.append(len(dist.distributed_c10d._world.pg_map))
    return made, dist.get_process_group_ranks(pair)


# ------------------------------------------------------------------- counts

Count = dict[str, Any]


class Counter:
    """Inside, collective calls are counted as they are made."""

    KINDS = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")

    def __init__(self) -> None:
        self.elements = dict.fromkeys(self.KINDS, 0.0)
        self.calls = dict.fromkeys(self.KINDS, 0)
        self.groups: dict[str, list[int]] = {kind: [] for kind in self.KINDS}
        self.agreements = self.flags = self.all = 0

    def add(self, kind: str, elements: float, group: Any) -> None:
        self.calls[kind] += 1
        self.elements[kind] += elements
        self.groups[kind].append(dist.get_world_size(group))

    def __enter__(self) -> Counter:
        from anytime.distributed import owners, processes

        def all_to_all(out: Tensor, into: Tensor, coming: Any, going: Any, group: Any = None, **more: Any) -> Any:
            self.all += 1
            assert sum(going) == into.numel()
            self.add("all_to_all", into.numel() - going[dist.get_rank(group)], group)
            return self.old[0](out, into, coming, going, group=group, **more)

        def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, **more: Any) -> Any:
            self.all += 1
            if op == dist.ReduceOp.MIN:
                assert tensor.numel() == 1
                self.flags += 1
            else:
                self.add("all_reduce", 2 * tensor.numel() * (1 - 1 / dist.get_world_size(group)), group)
            return self.old[1](tensor, op=op, group=group, **more)

        def all_gather(out: Tensor, into: Tensor, group: Any = None, **more: Any) -> Any:
            self.all += 1
            if into.dtype == torch.int64:
                assert into.numel() == 3
                self.agreements += 1
            else:
                self.add("all_gather", out.numel() * (1 - 1 / dist.get_world_size(group)), group)
            return self.old[2](out, into, group=group, **more)

        def reduce_scatter(out: Tensor, into: Tensor, group: Any = None, **more: Any) -> Any:
            self.all += 1
            self.add("reduce_scatter", into.numel() * (1 - 1 / dist.get_world_size(group)), group)
            return self.old[3](out, into, group=group, **more)

        self.places = [
            (dist, "all_to_all_single", all_to_all),
            (dist, "all_reduce", all_reduce),
            (processes, "all_gather", all_gather),
            (owners, "reduce_scatter", reduce_scatter),
            (owners, "all_gather", all_gather),
        ]
        self.old = [getattr(module, name) for module, name, _ in self.places]
        for module, name, counting in self.places:
            setattr(module, name, counting)
        return self

    def __exit__(self, *error: Any) -> None:
        for (module, name, _), old in zip(self.places, self.old, strict=True):
            setattr(module, name, old)


def counted(
    case: Case,
    shapes: Mapping[str, Sequence[int]],
    where: Where | None,
    mode: str | None,
    round_bytes: int | None = None,
) -> Count:
    """What the second of two steps sends."""
    from anytime.distributed import exchange, owners

    old = exchange.ROUND_BYTES
    if round_bytes is not None:
        exchange.ROUND_BYTES = owners.ROUND_BYTES = round_bytes
    try:
        model = net(torch.float64, where, shapes=shapes)
        rules = {name: {"rule": "matrix"} for name, shape in shapes.items() if len(shape) > 1}
        optimizer = make(case, model, rules, owners=mode)
        gradients = Gradients(model, 2)
        gradients.put(0)
        optimizer.step()
        gradients.put(1)
        with Counter() as counter:
            optimizer.step()
    finally:
        exchange.ROUND_BYTES = owners.ROUND_BYTES = old
    return {
        "elements": counter.elements,
        "calls": counter.calls,
        "groups": counter.groups,
        "agreements": counter.agreements,
        "flags": counter.flags,
        "all": counter.all,
        "rounds": [max(counter.calls.values())],
        "results": {name: array(p) for name, p in model.named_parameters()},
    }


def counted_modes(case: Case, shapes: Mapping[str, Sequence[int]], mode: str) -> list[float]:
    """Elements gathered by eval(), by train() and by averaged_state_dict()."""
    model = net(torch.float64, None, shapes=shapes)
    optimizer = make(case, model, {name: {"rule": "matrix"} for name in shapes}, owners=mode)
    found = []
    for act in (optimizer.eval, optimizer.train, lambda: optimizer.averaged_state_dict(model)):
        with Counter() as counter:
            act()
        assert counter.all == counter.calls["all_gather"] <= 1
        found.append(counter.elements["all_gather"])
    return found


# ------------------------------------------------------------------- mistakes


def error_of(act: Callable[[], Any]) -> tuple[str, str]:
    try:
        act()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def mistake(kind: str, mode: str | None) -> tuple[str, str, bool]:
    """What a step says if process 1 is wrong, and whether the right step is made after it."""
    wrong = dist.get_rank() == 1
    shapes = {"a": (4, 6), "b": (3, 4), "plain": (3, 4)}

    def build(wrong: bool) -> tuple[Any, Any]:
        mine = dict(shapes)
        if wrong and kind == "count":
            mine["c"] = (2,)
        if wrong and kind == "shape":
            mine["a"] = (4, 8)
        if wrong and kind == "order":
            mine = dict(reversed(mine.items()))
        model = Net(torch.float64, mine)
        if wrong and kind == "dtype":
            model.b = nn.Parameter(model.b.detach().float())
        for name, p in list(model.named_parameters()):
            if mode is None and name not in PLAIN:
                cut = Shard(1 if wrong and kind == "placements" and name == "b" else 0)
                setattr(model, name, nn.Parameter(place(p.detach(), mesh_of((2,)), [cut])))
        rules: dict[str, Any] = {name: {"rule": "matrix"} for name in ("a", "b", "plain")}
        if wrong and kind == "rule":
            rules["a"] = {"rule": "rest"}
        return model, make(("SFNorMuon", {"warmup_steps": 2}), model, rules, owners=mode)

    model, optimizer = build(wrong)
    Gradients(model, 1).put(0)
    if wrong and kind == "missing gradient":
        model.b.grad = None
    if wrong and kind == "missing everywhere but here":
        for p in model.parameters():
            p.grad = None
    if (wrong and kind == "sparse gradient") or kind == "sparse everywhere":
        give_sparse(model.plain)
    if wrong and kind == "sparse gradient of another's":
        give_sparse(model.a)
    if wrong and kind == "complex gradient":
        model.plain.grad = None
        model.plain.grad_dtype = None
        model.plain.grad = torch.zeros(3, 4, dtype=torch.complex64)
    if wrong and kind == "plain gradient":
        model.b.grad = torch.zeros(3, 4, dtype=torch.float64)
    before = bits(model, optimizer)
    error, said = error_of(optimizer.step)
    kept = bits(model, optimizer) == before
    if kind in ("count", "shape", "order", "dtype", "placements", "rule"):
        model, optimizer = build(False)
    if wrong and kind == "complex gradient":
        model.plain.grad = None
    Gradients(model, 1).put(0)
    optimizer.step()
    return error, said, kept and bits(model, optimizer) != before


def give_sparse(p: Tensor) -> None:
    p.grad = None
    p.grad = torch.zeros(p.shape, dtype=p.dtype).to_sparse()


def mistake_of(rank: int) -> str:
    model = net(torch.float64, ((4,), [Shard(0)]), shapes={"a": (8, 6)})
    optimizer = make(("SFNorMuon", {}), model, {"a": {"rule": "matrix"}})
    Gradients(model, 1).put(0)
    if dist.get_rank() == rank:
        model.a.grad = None
    return error_of(optimizer.step)[1]


def owners_of_shards(mode: str) -> tuple[str, str]:
    model = net(torch.float64, ((2,), [Shard(0)]))
    return error_of(lambda: make(("SFNorMuon", {}), model, owners=mode))


def owners_of_late_shards() -> tuple[str, str, bool]:
    model = net(torch.float64, None)
    optimizer = make(("SFNorMuon", {}), model, owners="state")
    late = spread(Net(torch.float64, {"late": (4, 4)}), ((2,), [Shard(0)]))
    error, said = error_of(lambda: optimizer.add_param_group({"params": list(late.named_parameters())}))
    Gradients(model, 1).put(0)
    optimizer.step()
    return error, said, len(optimizer.averaged_state_dict(model)) == len(SHAPES)


def flattened(use_orig_params: bool) -> tuple[str, str]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(
        nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), use_orig_params=use_orig_params, device_id=torch.device("cpu")
    )
    return error_of(lambda: anytime.SFNorMuon(model))


def unnamed() -> str:
    """A gradient of the third parameter that is missing on process 1; matrices are kept beside each other."""
    shapes = [(4, 6), (3,), (5, 4)]
    params = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = anytime.SFNorMuon(params, owners="factor")
    for number, p in enumerate(params):
        p.grad = None if number == 2 and dist.get_rank() == 1 else torch.ones_like(p)
    return error_of(optimizer.step)[1]


def own_direction(shardable: bool) -> tuple[Tensor, Tensor]:
    """A matrix of rows here and there under somebody's own direction, and the same on one process."""

    class Frobenius(Direction):
        def __call__(self, batch: Batch) -> list[Tensor]:
            return batch.whole(lambda tensors, layouts: [t / t.norm() for t in tensors], batch.grads)

    class SFFrobenius(ScheduleFreeSpectral):
        def __init__(self, params: Any) -> None:
            super().__init__(params, "frobenius", {"lr": 0.1, "beta": 0.9, "weight_decay": 0.1, "warmup_steps": 2}, {})

    Frobenius.shardable = shardable
    generator = torch.Generator().manual_seed(0)
    start, *grads = (torch.randn(5, 4, generator=generator) for _ in range(4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RULES_OF_OPTIMIZERS, "frobenius", Frobenius())
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        params = nn.Parameter(distribute_tensor(start, mesh, [Shard(0)])), nn.Parameter(start.clone())
        for p in params:
            optimizer = SFFrobenius([p])
            for grad in grads:
                p.grad = distribute_tensor(grad, mesh, [Shard(0)]) if isinstance(p, DTensor) else grad.clone()
                optimizer.step()
    return params[0].full_tensor().detach(), params[1].detach()


def pipeline(wrong: str) -> tuple[list[Tensor], list[Tensor]]:
    """Two stages of other depths, each over two processes; the weights of this one, and what one process makes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = mesh.get_local_rank("pp")

    def trained(sharded: bool) -> list[Tensor]:
        torch.manual_seed(stage)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(1 + stage)))
        if sharded:
            fully_shard(model, mesh=mesh["dp"])
        optimizer = anytime.SFNorMuon(model, lr=0.1, warmup_steps=0, polar="svd", rules={"*.weight": "matrix"})
        for t in range(4):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(t))
            loss = model(x).square().sum() * (float("nan") if t == 2 and stage == 1 else 1)
            loss.backward()
            if sharded and wrong == "gradient" and t == 3 and dist.get_rank() == 3:
                next(iter(model.parameters())).grad = None
            if sharded or t != 2:  # what is wrong in one stage is left out by both
                optimizer.step()
            optimizer.zero_grad()
        if sharded:
            assert optimizer.skipped_steps == 1
        return [(p.full_tensor() if isinstance(p, DTensor) else p).detach() for p in model.parameters()]

    return trained(sharded=True), trained(sharded=False)


def coming_and_going(owners: str | None) -> list[Tensor]:
    """Parameters that join and leave, which Python likes to give the identities of those that are gone."""
    keep, found = nn.Parameter(seeded((4, 4), 0)), []
    optimizer = anytime.SFMuon([("keep", keep)], lr=0.1, warmup_steps=0, rules={"*": "matrix"}, owners=owners)
    for i in range(12):
        p = nn.Parameter(seeded((4, 6) if i % 2 else (16, 3), i + 1))
        optimizer.add_param_group({"params": [("p", p)]})
        p.grad, keep.grad = seeded(p.shape, 100 + i), seeded(keep.shape, 200 + i)
        optimizer.step()
        found.append(p.detach().clone())
        del optimizer.param_groups[-1], p
        keep.grad = seeded(keep.shape, 300 + i)
        optimizer.step()
        gc.collect()
    return [*found, keep.detach()]


def seeded(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
