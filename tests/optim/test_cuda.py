"""On a GPU: the same numbers as on the CPU, no synchronization, and the whole step in a CUDA graph."""

import pytest
import torch
from torch import Tensor, nn

import anytime

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

OPTIMIZERS = {
    "sf_normuon": lambda p, **kw: anytime.SFNorMuon(p, warmup_steps=10, averaging_power=2.0, beta_growth=0.4, **kw),
    "sf_muon": lambda p, **kw: anytime.SFMuon(p, warmup_steps=10, **kw),
    "sf_adamw": lambda p, **kw: anytime.SFAdamW(p, warmup_steps=10, **kw),
    "sf_sgd": lambda p, **kw: anytime.SFSGD(p, lr=0.1, **kw),
    "sf_lion": lambda p, **kw: anytime.SFLion(p, warmup_steps=10, **kw),
    "normuon": lambda p, **kw: anytime.NorMuon(p, **kw),
    "muon": lambda p, **kw: anytime.Muon(p, **kw),
    "adamw": lambda p, **kw: anytime.AdamW(p, **kw),
    "lion": lambda p, **kw: anytime.Lion(p, **kw),
}
SPECTRAL = ("sf_normuon", "sf_muon", "normuon", "muon")
SHAPES = [(24, 40), (40, 24), (32, 32), (1, 9), (8, 4, 3, 3), (3, 16, 20), (7,), ()]


def params(device: str, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter((torch.randn(s, generator=generator) * 0.1).to(device, dtype)) for s in SHAPES]


def set_grads(ps: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in ps:
        grad = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
        if p.grad is None:
            p.grad = grad
        else:
            p.grad.copy_(grad)


def near(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return bool((a - b).norm() <= tolerance * b.norm())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_the_cpu(name):
    extra = {"polar_dtype": torch.float64} if name in SPECTRAL else {}
    cpu, gpu = params("cpu", torch.float64), params("cuda", torch.float64)
    on_cpu, on_gpu = OPTIMIZERS[name](cpu, **extra), OPTIMIZERS[name](gpu, **extra)
    for step in range(60):
        set_grads(cpu, step)
        set_grads(gpu, step)
        on_cpu.step()
        on_gpu.step()
    for p, q in zip(cpu, gpu, strict=True):
        for a, b in zip(on_cpu.iterates(p), on_gpu.iterates(q), strict=True):
            assert near(b.cpu(), a, 1e-10)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_never_synchronizes(name, dtype):
    ps = params("cuda", dtype)
    optimizer = OPTIMIZERS[name](ps)
    for step in range(3):
        set_grads(ps, step)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(p.isfinite().all() for p in ps)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_captured_step_equals_an_eager_one(name):
    lr = torch.tensor(0.01, device="cuda")
    eager, graphed = params("cuda"), params("cuda")
    one, two = OPTIMIZERS[name](eager), OPTIMIZERS[name](graphed)
    for group in two.param_groups:
        group["lr"] = lr
    set_grads(graphed, 0)
    before = [p.detach().clone() for p in graphed]
    two.step()  # warm the libraries up; undone below
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        for p, old in zip(graphed, before, strict=True):
            p.copy_(old)
            for value in two.state[p].values():
                value.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            two.step()
    torch.cuda.current_stream().wait_stream(stream)
    for step in range(30):
        rate = 0.01 / (1 + step)
        for group in one.param_groups:
            group["lr"] = rate
        lr.fill_(rate)
        set_grads(eager, step)
        set_grads(graphed, step)
        one.step()
        graph.replay()
    for p, q in zip(eager, graphed, strict=True):
        for a, b in zip(one.iterates(p), two.iterates(q), strict=True):
            assert near(b, a, 1e-6)


def test_a_skipped_step_changes_nothing():
    ps = params("cuda")
    optimizer = OPTIMIZERS["sf_normuon"](ps)
    set_grads(ps, 0)
    optimizer.step()
    state = [{k: v.clone() for k, v in optimizer.state[p].items()} for p in ps]
    weights = [p.detach().clone() for p in ps]
    ps[3].grad.fill_(float("nan"))
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert all(torch.equal(p, w) for p, w in zip(ps, weights, strict=True))
    for p, old in zip(ps, state, strict=True):
        assert all(torch.equal(v, old[k]) for k, v in optimizer.state[p].items())
