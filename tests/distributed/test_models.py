"""A model of experts, fused QKV and tied embeddings on every mesh, against one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from models import build, optimizer, spread, tokens
from torch import Tensor

import anytime
from anytime.diagnostics import Probe

MESHES = {  # shard, tensor, replicate
    "fsdp 2": (2, 1, 1),
    "fsdp 4": (4, 1, 1),
    "tensor 2": (1, 2, 1),
    "tensor 4": (1, 4, 1),
    "hsdp 2 × 2": (2, 1, 2),
    "fsdp × tensor 2 × 2": (2, 2, 1),
}
BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-5}
QUICK = [("fsdp 2", torch.float32), ("fsdp × tensor 2 × 2", torch.float64)]


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def train(mesh_sizes: tuple[int, int, int], dtype: torch.dtype, steps: int) -> dict[str, object]:
    """Losses of X and the probe on the way, and the iterates after the last step."""
    model = build(dtype)
    shard, tensor, replicate = mesh_sizes
    mesh = spread(model, shard, tensor, replicate) if shard * tensor * replicate > 1 else None
    opt = optimizer(model)
    parts = shard * replicate
    part = mesh.get_local_rank("replicate") * shard + mesh.get_local_rank("shard") if mesh else 0
    losses, probes = [], []
    for step in range(steps):
        batch = tokens(step).chunk(parts)[part]
        loss = model(batch)
        loss.backward()
        probe = Probe(opt) if step % 10 == 5 else None
        opt.step()
        opt.zero_grad()
        if probe:
            probes.append(probe.read())
        if step % 7 == 3:
            with opt.averaged(), torch.no_grad():
                losses.append(float(model(tokens(-1))))
    x = {name: whole(value) for name, value in opt.averaged_state_dict(model).items()}
    found = {name: tuple(map(whole, opt.iterates(p))) for name, p in model.named_parameters()}
    names = [name for group in opt.param_groups for name in group["param_names"]]
    return {"iterates": found, "x": x, "losses": losses, "probes": probes, "plan": str(opt.plan), "names": names}


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


CASES = [
    pytest.param(mesh, dtype, marks=[] if (mesh, dtype) in QUICK else pytest.mark.slow)
    for mesh in MESHES
    for dtype in BOUNDS
]


@pytest.mark.parametrize(("mesh", "dtype"), CASES, ids=str)
def test_a_hundred_steps_are_those_of_one_process(pools, mesh, dtype):
    sizes, bound = MESHES[mesh], BOUNDS[dtype]
    one = train((1, 1, 1), dtype, 100)
    results = pools(sizes[0] * sizes[1] * sizes[2])(train, sizes, dtype, 100)
    for result in results:
        assert result["plan"] == one["plan"]
        assert result["names"].count("embedding.weight") == 1  # tied, in one group
        assert "head.weight" not in result["names"]
        for name, wanted in one["iterates"].items():
            for found, value in zip(result["iterates"][name], wanted, strict=True):
                assert distance(found, value) < bound, name
            assert distance(result["x"][name], wanted[0]) < bound
        assert result["losses"] == pytest.approx(one["losses"], abs=10 * bound)
        for found, wanted in zip(result["probes"], one["probes"], strict=True):
            assert found == pytest.approx(wanted, rel=1e-3 if dtype == torch.float32 else 1e-7, abs=bound)
        for name in one["iterates"]:  # whole tensors are put together from the same parts: no bit may differ
            assert all(map(torch.equal, result["iterates"][name], results[0]["iterates"][name]))


def evaluate_between(keep: bool) -> tuple[list[float], list[float]]:
    """Losses of training steps with and without an evaluation of X before each."""
    found = []
    for evaluates in (False, True):
        model = build()
        spread(model, 2, 1)
        opt = optimizer(model)
        losses = []
        for step in range(4):
            if evaluates:
                with opt.averaged(), torch.no_grad():
                    model(tokens(50))
            elif keep:
                with torch.no_grad():
                    model(tokens(50))  # leaves the root gathered
                opt.eval()
                opt.train()
            loss = model(tokens(step).chunk(2)[dist.get_rank()])
            loss.backward()
            losses.append(float(loss))
            opt.step()
            opt.zero_grad()
        found.append(losses)
    return found[0], found[1]


@pytest.mark.parametrize("keep", [False, True])
def test_an_evaluation_leaves_no_stale_weights_in_fsdp(pools, keep):
    """FSDP2 keeps the root's gathered weights after a forward pass without a backward one."""
    for plain, evaluated in pools(2)(evaluate_between, keep):
        assert plain == evaluated


def parameters_alone() -> list[float]:
    model = build()
    spread(model, 2, 1)
    opt = anytime.SFNorMuon(list(model.parameters()), lr=0.05, warmup_steps=0)
    losses = []
    for step in range(3):
        with opt.averaged(), torch.no_grad():
            model(tokens(50))
        loss = model(tokens(step).chunk(2)[dist.get_rank()])
        loss.backward()
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            a = float(model(tokens(60)))
        for module in model.modules():
            if hasattr(module, "reshard"):
                module.reshard()
        with torch.no_grad():
            losses.append(abs(a - float(model(tokens(60)))))
    return losses


def test_no_stale_weights_without_the_module(pools):
    """The optimizer finds FSDP's modules by their parameters."""
    for losses in pools(2)(parameters_alone):
        assert losses == [0.0, 0.0, 0.0]


def exchanged(processes: int, spoiled: int | None) -> dict[str, object]:
    """The optimizer is made first; the model is sharded then, and its new parameters put into the groups, as Accelerate
    does. One step of six has NaN on one process."""
    model = build()
    opt = optimizer(model)
    names = {p: name for name, p in model.named_parameters()}
    if processes > 1:
        spread(model, processes, 1)
        now = dict(model.named_parameters())
        for group in opt.param_groups:
            group["params"] = [now[names[p]] for p in group["params"]]
    rank = dist.get_rank() if processes > 1 else 0
    for step in range(6):
        model(tokens(step).chunk(processes)[rank]).backward()
        if step == 3 and rank == spoiled:
            grad = model.blocks[0].up.weight.grad
            (grad.to_local() if processes > 1 else grad)[0, 0] = torch.nan
        opt.step()
        opt.zero_grad()
        if step == 4:
            opt.load_state_dict(opt.state_dict())
    mine = {p for group in opt.param_groups for p in group["params"]}
    found = {name: tuple(map(whole, opt.iterates(p))) for name, p in model.named_parameters()}
    return {"skipped": opt.skipped_steps, "only": opt.state.keys() == mine, "iterates": found}


def test_parameters_exchanged_before_the_first_step(pools):
    one = exchanged(1, 0)
    assert one["skipped"] == 1
    for result in pools(2)(exchanged, 2, 1):
        assert result["skipped"] == 1
        assert result["only"]  # the whole tensors' state is gone
        for name, wanted in one["iterates"].items():
            for found, value in zip(result["iterates"][name], wanted, strict=True):
                assert distance(found, value) < 1e-9, name
