"""The training system on a GPU: asynchronous copies, compiled graphs, FlexAttention, moving between devices."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from anytime.train import GPT, Config, ModelConfig, merged, train
from anytime.train import checkpoint as files
from anytime.train.runs import read_lines
from anytime.train.shards import write_shard

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SHAPE = {"layers": 2, "width": 128, "head": 64, "context": 128, "vocabulary": 256}


@pytest.fixture
def config(tmp_path):
    text = np.random.default_rng(0).integers(0, 64, 200_000).cumsum() % 251
    (tmp_path / "data").mkdir()
    write_shard(tmp_path / "data/train-0.bin", text[:180_000].astype(np.uint16))
    write_shard(tmp_path / "data/val-0.bin", text[180_000:].astype(np.uint16))
    values = {"model": SHAPE, "data": {"path": str(tmp_path / "data")}, "batch_size": 8, "eval_tokens": 2048}
    values |= {"optimizer": {"warmup_steps": 5}, "run": str(tmp_path / "run"), "checkpoint_every": 10}
    return merged(Config(), {**values, "eval_per_doubling": 0, "eval_every": 10, "keep_every": 10})


def losses(config):
    rows = read_lines(Path(config.run) / "metrics.jsonl")
    return [row["loss"] for row in rows if row["kind"] == "step"]


def run(config, until, name, **more):
    changed = dataclasses.replace(config, run=config.run + name, until=f"{until} steps", **more)
    train(changed)
    return changed


@pytest.mark.parametrize("compiled", ["no", "yes"])
def test_a_resumed_run_goes_on_as_the_whole_one(config, compiled):
    whole = run(config, 40, "whole", compile=compiled)
    run(config, 20, "parts", compile=compiled)
    parts = run(config, 40, "parts", compile=compiled)
    assert len(losses(parts)) == 40
    torch.testing.assert_close(torch.tensor(losses(parts)), torch.tensor(losses(whole)), atol=5e-3, rtol=0)


def test_the_checkpoint_is_of_its_step_though_training_goes_on(config):
    """Steps follow at once; what was copied without waiting is what stood there."""
    ended = run(config, 20, "ended", compile="no", precision="float32")
    going = run(config, 60, "going", compile="no", precision="float32")
    for read in (lambda folder: files.read_tensors(folder / files.MODEL), files.read_resume):
        first, second = (read(Path(c.run) / "checkpoints/step-00000020") for c in (ended, going))
        assert first.keys() == second.keys()
        for key, tensor in first.items():
            if tensor.is_floating_point():
                torch.testing.assert_close(tensor, second[key], atol=2e-3, rtol=2e-3)


def test_a_run_moves_to_the_cpu_and_back(config):
    run(config, 20, "moved", device="cuda", compile="no", precision="float32")
    run(config, 40, "moved", device="cpu")
    moved = run(config, 60, "moved", device="cuda", compile="no", precision="float32")
    whole = run(config, 60, "whole", compile="no", precision="float32")
    torch.testing.assert_close(torch.tensor(losses(moved)), torch.tensor(losses(whole)), atol=2e-2, rtol=0)


def test_documents_by_flex_attention_are_those_of_the_dense_mask():
    torch.manual_seed(0)
    config = ModelConfig(**SHAPE)
    dense, flex = GPT(config, separator=0), GPT(config, separator=0).cuda()
    dense.initialize(0)
    for p in dense.parameters():
        torch.nn.init.normal_(p, std=0.1)
    flex.load_state_dict(dense.state_dict())
    tokens = torch.randint(0, 12, (4, 129))
    expected = dense(tokens[:, :-1], tokens[:, 1:])
    compiled = torch.compile(flex)
    found = compiled(tokens[:, :-1].cuda(), tokens[:, 1:].cuda())
    found.backward()
    expected.backward()
    assert math.isclose(found.item(), expected.item(), abs_tol=1e-3)
    for ours, theirs in zip(flex.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, atol=2e-3, rtol=2e-2)


def test_the_cache_gives_the_same_logits_in_bfloat16():
    model = GPT(ModelConfig(**SHAPE)).cuda()
    model.initialize(0)
    tokens = torch.randint(0, 256, (2, 40), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        generated = model.generate(tokens, 20, temperature=0)
        logits = model(generated[:, :-1])[:, 39:]
    chosen = logits.gather(-1, generated[:, 40:, None]).squeeze(-1)
    assert (logits.max(-1).values - chosen).abs().max() < 0.05
