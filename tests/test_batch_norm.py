"""BatchNorm's statistics at the average."""

import pytest
import torch
from torch import nn

import anytime


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(288, 2)
    )


def batches(n: int = 5) -> list[tuple[torch.Tensor, int]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(16, 3, 8, 8, generator=generator) * 2 + 1, 0) for _ in range(n)]


def test_statistics_become_those_of_the_average():
    model = network()
    optimizer = anytime.SFNorMuon(model, lr=0.05, warmup_steps=2)
    for x, _ in batches():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    norm = model[1]
    with optimizer.averaged():
        anytime.recalibrate_batch_norm(model, batches())
        outputs = [model[0](x) for x, _ in batches()]
        mean = torch.stack([y.mean(dim=(0, 2, 3)) for y in outputs]).mean(0)
        variance = torch.stack([y.var(dim=(0, 2, 3)) for y in outputs]).mean(0)
    torch.testing.assert_close(norm.running_mean, mean)
    torch.testing.assert_close(norm.running_var, variance)
    weights = optimizer.averaged_state_dict(model)
    assert torch.equal(weights["1.running_mean"], norm.running_mean)


def test_modes_and_momentum_are_restored_and_dropout_stays_off():
    model = network().train()
    model[3].eval()
    seen = []
    model[3].register_forward_hook(lambda module, *_: seen.append(module.training))
    anytime.recalibrate_batch_norm(model, batches(), max_batches=2)
    assert seen == [False, False]
    assert model.training
    assert not model[3].training
    assert model[1].momentum == 0.1
    assert model[1].num_batches_tracked == 2


def test_batches_of_other_kinds():
    model = network()
    with pytest.raises(TypeError, match="forward="):
        anytime.recalibrate_batch_norm(model, [{"x": torch.randn(4, 3, 8, 8)}])
    anytime.recalibrate_batch_norm(model, [{"x": torch.randn(4, 3, 8, 8)}], forward=lambda m, b: m(b["x"]))
    anytime.recalibrate_batch_norm(model, [torch.randn(4, 3, 8, 8)])


def test_an_empty_loader_is_an_error_and_loses_nothing():
    model = network()
    model(batches()[0][0])
    before = model[1].running_mean.clone()
    with pytest.raises(ValueError, match="no batch"):
        anytime.recalibrate_batch_norm(model, [])
    assert torch.equal(model[1].running_mean, before)


def test_without_batch_norm_the_loader_is_not_read():
    def loader():
        raise AssertionError("read")
        yield

    anytime.recalibrate_batch_norm(nn.Linear(2, 2), loader())


def test_a_loader_that_breaks_loses_nothing():
    def loader():
        yield from batches(2)
        raise OSError("gone")

    model = network()
    model(batches()[0][0])
    before = model[1].running_mean.clone()
    with pytest.raises(OSError, match="gone"):
        anytime.recalibrate_batch_norm(model, loader())
    assert torch.equal(model[1].running_mean, before)
    assert model[1].momentum == 0.1
