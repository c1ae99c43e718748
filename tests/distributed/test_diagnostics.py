"""What a probe says in detail on parameters in parts, and where each process owns some: what one process says."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from models import build, optimizer, spread, tokens

import anytime
from anytime.diagnostics import Probe, detailed


def probes(shard: int, tensor: int) -> list[dict]:
    model = build(torch.float64)
    if shard * tensor > 1:
        spread(model, shard, tensor)
    return follow(
        model, optimizer(model), lambda step: tokens(step).chunk(shard)[dist.get_rank() // tensor if shard > 1 else 0]
    )


def owned(world: int) -> list[dict]:
    model = build(torch.float64)
    mode = {"owners": "state"} if world > 1 else {}
    return follow(model, anytime.SFNorMuon(model, lr=0.05, warmup_steps=2, **mode), tokens)


def follow(model, opt, batch) -> list[dict]:
    found = []
    for step in range(4):
        model(batch(step)).backward()
        probe = Probe(opt)
        opt.step()
        opt.zero_grad()
        with detailed():
            found.append(probe.read())
    return found


def alike(found: dict, wanted: dict) -> None:
    assert found.keys() == wanted.keys()
    for name, row in wanted.items():
        if name == "layers":
            assert found[name].keys() == row.keys()
            for layer, values in row.items():
                assert found[name][layer] == pytest.approx(values, rel=1e-6, abs=1e-9), layer
        else:
            assert found[name] == pytest.approx(row, rel=1e-6, abs=1e-9), name


@pytest.mark.parametrize(("shard", "tensor"), [(2, 1), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_of_parts(pools, shard, tensor):
    one = probes(1, 1)
    for result in pools(shard * tensor)(probes, shard, tensor):
        for found, wanted in zip(result, one, strict=True):
            alike(found, wanted)


def test_of_owners(pools):
    one = owned(1)
    assert {"row_spread", "polar_error", "layers"} <= one[0].keys()
    for result in pools(2)(owned, 2):
        for found, wanted in zip(result, one, strict=True):
            alike(found, wanted)
