"""On a GPU: the same numbers as on the CPU and the slow way, no synchronization, and a whole step in a CUDA graph."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import anytime
from anytime.optim import fused

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

OPTIMIZERS = {
    "sf_normuon": lambda p, **kw: anytime.SFNorMuon(p, warmup_steps=10, recipe="anytime", **kw),
    "sf_muon": lambda p, **kw: anytime.SFMuon(p, warmup_steps=10, decay_fading=3, **kw),
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


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def move_grads(ps: list[nn.Parameter], offset: int = 0) -> None:
    """The gradients to other memory, `offset` elements behind where an allocation starts."""
    for p in ps:
        if p.grad is not None:
            memory = torch.empty(p.numel() + offset, dtype=p.grad.dtype, device=p.device)
            p.grad = memory[offset:].view(p.shape).copy_(p.grad)


def everything(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Weights and all state."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            yield p.detach()
            yield from (value for _, value in sorted(optimizer.state[p].items()))


def same_bits(one: torch.optim.Optimizer, two: torch.optim.Optimizer) -> bool:
    """NaN would differ from itself: there is none."""
    return all(torch.equal(a, b) for a, b in zip(everything(one), everything(two), strict=True))


def graphs(optimizer: anytime.AnytimeOptimizer) -> list[torch.cuda.CUDAGraph]:
    return [graph for graph in optimizer._fused._graphs.values() if graph is not None]


def step_slowly(optimizer: anytime.AnytimeOptimizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a kernel."""
    with monkeypatch.context() as patch:
        patch.setattr(fused, "available", lambda device: False)
        optimizer.step()
    assert not optimizer._fused._engines


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody has written yet reads as NaN."""

    def filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def poison(*args, **kw):
            tensor = make(*args, **kw)
            if tensor.device.type == "cuda" and tensor.numel() and tensor.is_contiguous():
                tensor.view(-1).view(torch.uint8).fill_(255)
            return tensor

        return poison

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, filled(getattr(torch, name)))


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
    """But for the first, which builds tables; neither a changed rate nor gradients elsewhere make it wait."""
    ps = params("cuda", dtype)
    optimizer = OPTIMIZERS[name](ps)
    set_grads(ps, 0)
    optimizer.step()
    for step in range(1, 6):
        set_grads(ps, step)
        if step % 2:
            move_grads(ps)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            set_rate(optimizer, 0.01 / step)
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(p.isfinite().all() for p in ps)


def test_a_rate_that_is_another_tensor_every_time_does_not_synchronize():
    ps, qs = params("cuda"), params("cuda")
    one, two = OPTIMIZERS["sf_normuon"](ps), OPTIMIZERS["sf_normuon"](qs)
    for step in range(5):
        set_grads(ps, step)
        set_grads(qs, step)
        rate = 0.01 / (1 + step // 2)  # also one of the same value
        rates = [torch.tensor(rate, dtype=torch.float64, device="cuda") for _ in two.param_groups]
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            for group, lr in zip(two.param_groups, rates, strict=True):
                group["lr"] = lr
            two.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        set_rate(one, rate)
        one.step()
    assert same_bits(one, two)


@pytest.mark.parametrize("name", ["sf_normuon", "adamw"])
def test_a_replayed_step_never_synchronizes(name):
    """The second records; it may wait."""
    ps = params("cuda")
    optimizer = OPTIMIZERS[name](ps, graph=True)
    for step in range(8):
        set_grads(ps, step)
        if step == 4:
            move_grads(ps)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
        try:
            set_rate(optimizer, 0.01 / (1 + step))
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len(graphs(optimizer)) == 1
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


# ------------------------------------------------------ the kernels against the slow way

#: Sides of 1 and about 128; more rows than columns, fewer, as many; experts, kernels of a convolution, flat tensors.
AWKWARD = [(1, 1), (1, 130), (3, 127), (129, 3), (127, 127), (129, 129), (65, 300), (769, 130)]
AWKWARD += [(5, 7, 9), (6, 5, 3, 3), (4097,), (1,), ()]


def awkward(dtype: torch.dtype, gap: int = 0) -> list[nn.Parameter]:
    """Each `gap` elements behind where an allocation starts."""
    generator = torch.Generator().manual_seed(2)
    out = []
    for shape in AWKWARD:
        w = (torch.randn(shape, generator=generator) * 0.1).to("cuda", dtype)
        memory = torch.zeros(w.numel() + gap, dtype=dtype, device="cuda")
        out.append(nn.Parameter(memory[gap:].view(shape).copy_(w)))
    return out


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("name", "dtype", "gap", "more"),
    [
        ("sf_normuon", torch.float32, 0, {}),
        ("sf_normuon", torch.float32, 3, {"decay_at": "y", "nesterov": True}),
        ("sf_muon", torch.bfloat16, 0, {"scaling": "aspect", "momentum_dtype": torch.bfloat16}),
        ("normuon", torch.bfloat16, 0, {"polar": "polar-express"}),
        ("sf_normuon", torch.float32, 0, {"polar": "polar-express-4"}),
        ("muon", torch.float32, 0, {"scaling": "max-side", "polar_dtype": torch.bfloat16, "weight_decay": 0.0}),
        ("sf_adamw", torch.bfloat16, 1, {}),
        ("adamw", torch.float32, 0, {}),
    ],
    ids=[
        "sf_normuon",
        "sf_normuon-odd",
        "sf_muon-bf16",
        "normuon-bf16",
        "four-steps",
        "muon-bf16-factor",
        "sf_adamw-odd",
        "adamw",
    ],
)
def test_kernels_equal_the_slow_way(name, dtype, gap, more, monkeypatch):
    """Momentum to the last digits, moves to those of the polar factor's precision."""
    taken, slow = awkward(dtype, gap), awkward(dtype)
    start = [p.detach().float().clone() for p in taken]
    exact = {"polar_dtype": torch.float32} if name in SPECTRAL else {}
    one = OPTIMIZERS[name](taken, chunk_bytes=1 << 18, **more)
    two = OPTIMIZERS[name](slow, **{**more, **exact})
    generator = torch.Generator().manual_seed(7)
    for step in range(5):
        for p, q in zip(taken, slow, strict=True):
            grad = torch.randn(p.shape, generator=generator) * 100.0 ** (step - 2)
            p.grad, q.grad = (grad.to("cuda", dtype) for _ in range(2))
        one.step()
        step_slowly(two, monkeypatch)
    assert len(one._fused._engines) == 1
    digits = 1e-1 if more.get("polar_dtype") == torch.bfloat16 else 2e-2
    for p, q, w in zip(taken, slow, start, strict=True):
        a, b = one.state[p], two.state[q]
        assert a.keys() == b.keys()
        for scalar in {"step", "weight_sum", "beta"} & a.keys():
            torch.testing.assert_close(a[scalar], b[scalar], rtol=1e-12, atol=0)
        if "momentum" in a:
            rounding = 1e-6 if a["momentum"].dtype == torch.float32 else 1e-2
            assert near(a["momentum"].float(), b["momentum"].float(), rounding)
        matrix = w.ndim > 1 and name in SPECTRAL
        for x, y in zip(one.iterates(p), two.iterates(q), strict=True):
            assert x.isfinite().all()
            assert near(x - w, y - w, digits if matrix else 1e-4), p.shape


@pytest.mark.usefixtures("poisoned")
def test_fused_weights_split_by_rows_and_columns(monkeypatch):
    rules = {"rows": {"split": [96, 33, 33]}, "columns": {"split": {"sizes": [65, 31], "dim": 1}}, "deep": {"split": 2}}

    def build():
        generator = torch.Generator().manual_seed(3)
        shapes = {"rows": (162, 70), "columns": (80, 96), "deep": (3, 10, 24), "plain": (80, 96)}
        named = {name: nn.Parameter(torch.randn(s, generator=generator).cuda()) for name, s in shapes.items()}
        return list(named.values()), list(named.items())

    (taken, named), (slow, named_slow) = build(), build()
    start = [p.detach().clone() for p in taken]
    one = anytime.SFNorMuon(named, warmup_steps=2, rules=rules)
    two = anytime.SFNorMuon(named_slow, warmup_steps=2, rules=rules, polar_dtype=torch.float32)
    for step in range(3):
        set_grads(taken, step)
        set_grads(slow, step)
        one.step()
        step_slowly(two, monkeypatch)
    assert len(one._fused._engines) == 1
    for p, q, w in zip(taken, slow, start, strict=True):
        assert near(one.state[p]["momentum"], two.state[q]["momentum"], 1e-6)
        assert near(one.state[p]["row_moment"], two.state[q]["row_moment"], 2e-2)
        assert near(one.iterates(p).z - w, two.iterates(q).z - w, 2e-2), p.shape


@pytest.mark.parametrize("at", ["first", "last", "elsewhere"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_bad_gradient_anywhere_changes_nothing(value, at):
    """Also one of a parameter that the kernels leave to the slow way."""
    ps = [*awkward(torch.float32), nn.Parameter(torch.randn(9, 5, device="cuda").T)]
    optimizer = OPTIMIZERS["sf_normuon"](ps)
    generator = torch.Generator().manual_seed(4)

    def feed():
        for p in ps:
            p.grad = torch.randn(p.shape, generator=generator).cuda()

    feed()
    optimizer.step()
    assert fused.split(optimizer._work())[1]
    before = [value.clone() for value in everything(optimizer)]
    spots = [(-1, 3)] if at == "elsewhere" else [(i, 0 if at == "first" else -1) for i in (0, 7, 10, 12)]
    for i, where in spots:
        feed()
        ps[i].grad.view(-1)[where] = value
        optimizer.step()
    assert optimizer.skipped_steps == len(spots)
    assert all(torch.equal(a, b) for a, b in zip(everything(optimizer), before, strict=True))


# ------------------------------------------------------------------------------ graphs


@pytest.mark.parametrize("name", ["sf_normuon", "muon", "sf_adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replayed_steps_equal_launched_ones_bit_for_bit(name, dtype):
    """Through gradients that move (also to odd addresses), rates that change, a skipped step, and a parameter that is
    frozen for a while."""
    launched, replayed = params("cuda", dtype), params("cuda", dtype)
    one, two = OPTIMIZERS[name](launched), OPTIMIZERS[name](replayed, graph=True)
    for step in range(16):
        for ps, optimizer in ((launched, one), (replayed, two)):
            set_grads(ps, step)
            if step in (3, 4, 13):
                move_grads(ps)
            if step == 10:
                move_grads(ps, offset=1)
            if step > 4:
                set_rate(optimizer, 0.02 / step)
            if 6 <= step < 9:
                ps[0].grad = ps[6].grad = None
            if step in (5, 14):
                ps[2].grad[-1, -1] = float("inf")
            optimizer.step()
        assert same_bits(one, two), step
    assert one.skipped_steps == two.skipped_steps == 2
    assert len(graphs(two)) >= 2  # with all parameters, and without the frozen
    assert not graphs(one)


def test_a_rate_on_the_device_is_read_at_every_replay():
    launched, replayed = params("cuda"), params("cuda")
    lr = torch.tensor(0.01, device="cuda")
    one, two = OPTIMIZERS["sf_normuon"](launched), OPTIMIZERS["sf_normuon"](replayed, graph=True)
    for group in two.param_groups:
        group["lr"] = lr
    for step in range(6):
        rate = float(torch.tensor(0.01 / (1 + step)))  # as float32 has it
        set_rate(one, rate)
        lr.fill_(rate)
        for ps, optimizer in ((launched, one), (replayed, two)):
            set_grads(ps, step)
            optimizer.step()
    assert same_bits(one, two)
    assert len(graphs(two)) == 1


def record(optimizer: anytime.AnytimeOptimizer) -> torch.cuda.CUDAGraph:
    """The user's own graph of a step, which is recorded and not taken."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        optimizer.step()
    return graph


@pytest.mark.parametrize("name", ["sf_normuon", "muon", "adamw"])
def test_a_users_graph_goes_on_after_steps_with_other_gradients(name):
    """The graph has tables of its own: what other steps do with the engine's is nothing to it."""
    eager, graphed = params("cuda"), params("cuda")
    one, two = OPTIMIZERS[name](eager), OPTIMIZERS[name](graphed)
    for ps, optimizer in ((eager, one), (graphed, two)):
        set_grads(ps, 0)
        optimizer.step()
    graph = record(two)
    static = [p.grad for p in graphed]
    for step in range(1, 13):
        set_grads(eager, step)
        if step % 4 == 3:  # launched, from gradients elsewhere, some without
            for p in graphed:
                p.grad = None
            set_grads(graphed, step)
            if step == 7:
                eager[1].grad = graphed[1].grad = None
            two.step()
        else:
            for p, grad in zip(graphed, static, strict=True):
                p.grad = grad
            set_grads(graphed, step)
            if step == 6:
                eager[0].grad[0, 0] = graphed[0].grad[0, 0] = float("nan")
            graph.replay()
        one.step()
        assert same_bits(one, two), step
    assert one.skipped_steps == two.skipped_steps == 1


def test_several_graphs_of_a_user_each_read_their_own_gradients():
    """Recorded one after the other, without a step between them."""
    eager, graphed = params("cuda"), params("cuda")
    one, two = OPTIMIZERS["sf_normuon"](eager), OPTIMIZERS["sf_normuon"](graphed)
    for ps, optimizer in ((eager, one), (graphed, two)):
        set_grads(ps, 0)
        optimizer.step()
    recorded, kept = [], []
    for number in range(3):
        for p in graphed:
            p.grad = None
        set_grads(graphed, 100 + number)
        kept.append([p.grad for p in graphed])
        recorded.append(record(two))
    for number in (1, 2, 0, 1):
        set_grads(eager, 100 + number)
        one.step()
        recorded[number].replay()
        assert same_bits(one, two), number
    assert kept


def test_recording_before_the_first_step_is_a_clear_error():
    ps = params("cuda")
    optimizer = OPTIMIZERS["sf_normuon"](ps)
    set_grads(ps, 0)
    with pytest.raises(RuntimeError, match="take one step"):
        record(optimizer)


# --------------------------------------------------------------- what a step costs


def compiled() -> int:
    """How many kernels Triton holds in this process."""
    from triton.runtime.jit import JITFunction

    from anytime.core.kernels import passes, products, table

    functions = [f for module in (table, passes, products) for f in vars(module).values() if isinstance(f, JITFunction)]
    return sum(len(cache[0]) for f in functions for cache in f.device_caches.values())


def test_changed_settings_compile_nothing():
    ps = params("cuda")
    optimizer = OPTIMIZERS["sf_normuon"](ps)
    set_grads(ps, 0)
    optimizer.step()
    before = compiled()
    assert before > 0
    for step in range(1, 6):
        set_grads(ps, step)
        set_rate(optimizer, [0.0, 1.0, 16.0, 1e-3, 0.5][step - 1])
        for group in optimizer.param_groups:
            group["weight_decay"], group["eps"] = step / 100, step * 1e-8
            group["warmup_steps"] = group["beta_growth_start"] = step + 1
            if "momentum" in group:
                group["momentum"], group["update_rms"] = step / 10, float(step)
        optimizer.step()
    assert compiled() == before


@pytest.mark.parametrize(
    ("name", "shape"), [("sf_normuon", (1024, 1024)), ("sf_normuon", (512, 2048)), ("muon", (2048, 512))]
)
def test_a_step_takes_little_memory_beyond_the_state(name, shape):
    ps = [nn.Parameter(torch.randn(shape, device="cuda") * 0.02) for _ in range(24)]
    optimizer = OPTIMIZERS[name](ps)
    for p in ps:
        p.grad = torch.randn_like(p)
    optimizer.step()  # cuBLAS takes its workspaces here
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    torch.cuda.synchronize()
    state = sum(value.nbytes for p in ps for value in optimizer.state[p].values())
    assert torch.cuda.memory_allocated() == before
    # A scheduled optimizer's state is half as much; chunks have their least size.
    assert torch.cuda.max_memory_allocated() - before <= max(0.15 * state, 17 * 2**20)


# ------------------------------------------------------------------------- going on


@pytest.mark.parametrize("graph", [False, True], ids=["launched", "replayed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["sf_normuon", "normuon"])
def test_a_resumed_run_goes_on_bit_for_bit(name, dtype, graph):
    straight = params("cuda", dtype)
    one = OPTIMIZERS[name](straight, graph=graph)
    for step in range(4):
        set_grads(straight, step)
        one.step()
    resumed = [nn.Parameter(p.detach().clone()) for p in straight]
    two = OPTIMIZERS[name](resumed, graph=graph)
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    copied, three = copy.deepcopy((straight, one))
    for step in range(4, 9):
        for ps, optimizer in ((straight, one), (resumed, two), (copied, three)):
            set_grads(ps, step)
            optimizer.step()
    assert same_bits(one, two)
    assert same_bits(one, three)
