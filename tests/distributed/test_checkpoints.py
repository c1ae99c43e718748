"""Save on some processes and resume on others through torch's distributed checkpoint, in our storage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import build, optimizer, spread, tokens
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from anytime import storage

KINDS = {  # world, shard, tensor, replicate
    "one": (1, 1, 1, 1),
    "ddp 2": (2, 1, 1, 1),
    "ddp 4": (4, 1, 1, 1),
    "owners 2": (2, 1, 1, 1),
    "owners 4": (4, 1, 1, 1),
    "fsdp 2": (2, 2, 1, 1),
    "fsdp 4": (4, 4, 1, 1),
    "tensor 2": (2, 1, 2, 1),
    "tensor 4": (4, 1, 4, 1),
    "hsdp 4": (4, 2, 1, 2),
    "fsdp × tensor 4": (4, 2, 2, 1),
}
BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-5}
HALF, END = 6, 12


class Trained:
    """A model on its mesh, its optimizer, and this process's share of the data."""

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        world, shard, tensor, replicate = KINDS[kind]
        self.plain = self.model = build(dtype)
        self.parts, self.part = (world, dist.get_rank()) if world > 1 else (1, 0)
        if shard * tensor * replicate > 1:
            mesh = spread(self.plain, shard, tensor, replicate)
            self.parts = shard * replicate
            self.part = mesh.get_local_rank("replicate") * shard + mesh.get_local_rank("shard")
        elif world > 1:
            self.model = DistributedDataParallel(self.plain)
        self.optimizer = optimizer(self.model, owners="state" if kind.startswith("owners") else None)

    def go(self, steps: range) -> dict[str, Tensor]:
        for step in steps:
            self.model(tokens(step).chunk(self.parts)[self.part]).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        found = self.optimizer.averaged_state_dict(self.plain)
        return {
            name: (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
            for name, value in found.items()
        }


def save(kind: str, dtype: torch.dtype, folder: Path, flat: bool = False, later: bool = False) -> None:
    run = Trained(kind, dtype)
    run.go(range(HALF))
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, state = get_state_dict(run.model, run.optimizer, options=options)
    if later:
        storage.async_save(folder, {"model": model, "optimizer": state}).result()
    else:
        storage.save(folder, {"model": model, "optimizer": state})


def resume(kind: str, dtype: torch.dtype, folder: Path, flat: bool = False, calls: int = 1) -> dict[str, Tensor]:
    run = Trained(kind, dtype)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, state = get_state_dict(run.model, run.optimizer, options=options)
    loaded = {"model": model, "optimizer": state}
    storage.load(folder, loaded)
    if calls == 1:
        set_state_dict(
            run.model,
            run.optimizer,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optimizer"],
            options=options,
        )
    else:
        set_model_state_dict(run.model, loaded["model"])
        set_optimizer_state_dict(run.model, run.optimizer, loaded["optimizer"], options=options)
    return run.go(range(HALF, END))


def call(pools, kind, function, *arguments):
    world = KINDS[kind][0]
    return pools(world)(function, kind, *arguments) if world > 1 else [function(kind, *arguments)]


def check(pools, tmp_path, saved, others, dtype, **how):
    flat, later, calls = how.get("flat", False), how.get("later", False), how.get("calls", 1)
    call(pools, saved, save, dtype, tmp_path / "saved", flat, later)
    one = Trained("one", dtype).go(range(END))
    for resumed in others:
        for found in call(pools, resumed, resume, dtype, tmp_path / "saved", flat, calls):
            for name, wanted in one.items():
                assert float((found[name] - wanted).abs().max()) < BOUNDS[dtype], (resumed, name)


QUICK = [
    ("one", "fsdp 2"), ("fsdp 2", "one"), ("ddp 2", "fsdp 4"), ("fsdp 4", "ddp 2"), ("tensor 2", "fsdp 2"),
    ("fsdp × tensor 4", "tensor 2"), ("hsdp 4", "fsdp × tensor 4"), ("owners 2", "fsdp 4"), ("fsdp 2", "owners 4"),
    ("owners 4", "owners 2"),
]  # fmt: skip


@pytest.mark.parametrize(("saved", "resumed"), QUICK)
def test_resume_on_another_mesh(pools, tmp_path, saved, resumed):
    check(pools, tmp_path, saved, [resumed], torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("saved", KINDS)
def test_resume_on_any_mesh(pools, tmp_path, saved, dtype):
    check(pools, tmp_path, saved, KINDS, dtype)


@pytest.mark.parametrize("how", [{"flat": True}, {"later": True}, {"calls": 2}, {"flat": True, "calls": 2}], ids=str)
def test_other_ways_to_save_and_load(pools, tmp_path, how):
    check(pools, tmp_path, "fsdp 2", ["fsdp 4"], torch.float64, **how)


def wrong_weights(folder: Path) -> str:
    """The optimizer's state loaded by names, and other weights after it."""
    run = Trained("fsdp 2", torch.float64)
    model, state = get_state_dict(run.model, run.optimizer)
    loaded = {"model": model, "optimizer": state}
    storage.load(folder, loaded)
    with torch.no_grad():
        next(iter(run.plain.parameters())).add_(1)
    set_optimizer_state_dict(run.model, run.optimizer, loaded["optimizer"])
    run.model(tokens(0)).backward()
    with pytest.raises(ValueError, match="are not those the state was saved with") as error:
        run.optimizer.step()
    return str(error.value)


def test_weights_that_never_came_are_an_error_at_the_next_step(pools, tmp_path):
    pools(2)(save, "fsdp 2", torch.float64, tmp_path / "saved")
    assert all("embedding.weight" in text for text in pools(2)(wrong_weights, tmp_path / "saved"))


def no_dummy_step() -> None:
    """torch's tools take a step of zeros with an optimizer that has no state yet: ours has one."""
    run = Trained("fsdp 2", torch.float64)
    before = {name: p.full_tensor().clone() for name, p in run.plain.named_parameters()}
    _, state = get_state_dict(run.model, run.optimizer)
    assert all(float(entry["step"]) == 0 for entry in state["state"].values())
    assert all(torch.equal(p.full_tensor(), before[name]) for name, p in run.plain.named_parameters())
    assert not any(isinstance(p.grad, Tensor) for p in run.plain.parameters())
    assert isinstance(run.model, nn.Module)


def test_no_step_is_taken_to_make_a_state(pools):
    pools(2)(no_dummy_step)
