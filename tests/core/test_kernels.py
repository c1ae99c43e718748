"""The kernels one by one against the same in torch, float64 where it can be, in memory that reads as NaN elsewhere.

Without a GPU they run in Triton's interpreter.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from anytime.core import averaging
from anytime.core.kernels import passes, products, table
from anytime.core.polar import COEFFICIENTS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F64 = torch.float64
KINDS = [torch.float32, torch.float16, torch.bfloat16]
#: Triton's interpreter multiplies the bits of bfloat16 as integers.
#: Float32 tells a mistake from rounding in the interpreter; on a GPU it is multiplied as TF32, and never asked for.
MULTIPLIED = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float32, torch.float16]
NAN = float("nan")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of overflow in a branch not taken

few = settings(max_examples=40)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(DEVICE)


def blank(size: int, dtype: torch.dtype) -> Tensor:
    return torch.full((size,), NAN, dtype=dtype, device=DEVICE)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def epsilon(dtype: torch.dtype) -> float:
    """Of what is stored."""
    return torch.finfo(dtype).eps


# ------------------------------------------------------------------ symmetric products


class Padded:
    """[batch, m, n] with NaN behind every row, between the matrices and after them."""

    def __init__(self, values: Tensor, dtype: torch.dtype, gap: int = 8) -> None:
        batch, m, n = values.shape
        row = -(-n // 8) * 8 + gap
        self.memory = blank(batch * (m + 2) * row + 64, dtype)
        self.view = self.memory.as_strided((batch, m, n), ((m + 2) * row, row, 1))
        self.view.copy_(values)
        self.before = self.memory.clone()

    @classmethod
    def empty(cls, batch: int, n: int, dtype: torch.dtype) -> Padded:
        return cls(torch.full((batch, n, n), NAN, device=DEVICE), dtype)

    def only_itself_changed(self) -> bool:
        """Up to the multiple of 16 bytes that ends a row: stores come in such pieces."""
        batch, m, n = self.view.shape
        whole = -(-n * self.memory.element_size() // 16) * 16 // self.memory.element_size()
        rows = [memory.as_strided((batch, m, whole), self.view.stride()) for memory in (self.before, self.memory)]
        rows[0].copy_(rows[1])
        return torch.equal(bits(self.before), bits(self.memory))


@pytest.mark.parametrize("dtype", MULTIPLIED, ids=str)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (1, 130), (3, 5), (33, 64), (65, 63), (127, 3), (129, 127), (129, 200)])
def test_a_gram_matrix(n, k, dtype):
    A = Padded(randn(3, n, k), dtype)
    out = Padded.empty(3, n, dtype)
    assert products.symmetric(A.view, A.view, out.view) is out.view
    exact = A.view.double()
    expected = exact @ exact.mT
    size = exact.abs() @ exact.abs().mT
    assert ((out.view.double() - expected).abs() <= epsilon(dtype) * expected.abs() + 1e-6 * size + 1e-300).all()
    assert torch.equal(out.view, out.view.mT)
    assert A.only_itself_changed()
    assert out.only_itself_changed()


def commuting(batch: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Symmetric matrices that are polynomials of one, up to rounding."""
    S = randn(batch, n, n, seed=1)
    S = (S + S.mT) / (2 * math.sqrt(n))
    eye = torch.eye(n, dtype=F64, device=DEVICE)
    return tuple(x.to(dtype) for x in (S, 0.5 * eye - S @ S, S + 0.25 * eye))


@pytest.mark.parametrize("power", [None, 1, 2])
@pytest.mark.parametrize("added", ["", "D", "E", "DE"])
@pytest.mark.parametrize("dtype", MULTIPLIED, ids=str)
def test_a_product_with_everything_added(dtype, added, power):
    batch, n = 2, 129
    A, B, D = (Padded(x, dtype, gap) for x, gap in zip(commuting(batch, n, dtype), (8, 0, 16), strict=True))
    E = Padded(commuting(batch, n, dtype)[1], dtype, 24)
    out = Padded.empty(batch, n, dtype)
    scales = torch.tensor([0.25, 3.0], device=DEVICE)
    how = {name: x.view for name, x in (("D", D), ("E", E)) if name in added}
    how |= {"scales": scales, "power": power} if power else {}
    products.symmetric(A.view, B.view, out.view, alpha=-1.5, beta=0.75, gamma=2.0, delta=-0.5, **how)
    a, b, d, e = (x.view.double() for x in (A, B, D, E))
    expected = -1.5 * a @ b.mT + 2.0 * torch.eye(n, dtype=F64, device=DEVICE)
    expected = expected + 0.75 * d * ("D" in added) - 0.5 * e * ("E" in added)
    expected = expected * scales.double().view(-1, 1, 1) ** (power or 0)
    difference = (out.view.double() - expected).abs()
    # The upper triangle is the lower one's mirror; inputs that were rounded commute up to their rounding.
    lower = torch.ones(n, n, device=DEVICE).tril().bool()
    scale = scales.max().item() ** (power or 0)
    assert (difference <= epsilon(dtype) * expected.abs() + 1e-5 * scale)[:, lower].all()
    assert (difference <= epsilon(dtype) * (expected.abs() + 8 * scale)).all()
    assert torch.equal(out.view, out.view.mT)
    assert all(x.only_itself_changed() for x in (A, B, D, E, out))


@pytest.mark.parametrize("dtype", MULTIPLIED, ids=str)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (3, 5), (129, 200)])
def test_what_rounding_takes_is_kept(n, k, dtype):
    """Of entries so small that float16 would lose it; with it a product has twice the digits."""
    A = Padded(randn(2, n, k) * 2.0**-4, dtype)
    out, low = Padded.empty(2, n, dtype), Padded.empty(2, n, dtype)
    scales = torch.full((2,), 2.0**-3, device=DEVICE)
    products.symmetric(A.view, A.view, out.view, low=low.view, scales=scales, power=2)
    exact = A.view.double()
    expected = exact @ exact.mT / 64
    size = exact.abs() @ exact.abs().mT / 64
    found = out.view.double() + low.view.double() / 2048
    assert ((found - expected).abs() <= 2 * epsilon(dtype) ** 2 * expected.abs() + 1e-6 * size).all()
    assert torch.equal(low.view, low.view.mT)
    assert bool(low.view.any()) == (dtype != torch.float32)
    assert all(x.only_itself_changed() for x in (A, out, low))


@pytest.mark.parametrize("dtype", MULTIPLIED, ids=str)
@pytest.mark.parametrize("n", [1, 3, 129])
def test_what_rounding_took_is_multiplied_where_few_singular_values_rule(n, dtype):
    """Of two matrices the second alone: their sums of squares say which."""
    A, _, B = (Padded(x, dtype) for x in commuting(2, n, dtype))
    a_low, b_low = (Padded(x.view.double() / 2, dtype, 8) for x in (B, A))
    squares = torch.full((2 * products.tiles(n),), NAN, dtype=torch.float32, device=DEVICE)
    plain, out = Padded.empty(2, n, dtype), Padded.empty(2, n, dtype)
    products.symmetric(A.view, B.view, plain.view, squares=squares)
    sums = squares.view(2, -1).sum(1).double()
    torch.testing.assert_close(sums, plain.view.double().square().sum((1, 2)), rtol=4e-3, atol=1e-6)
    squares = torch.tensor([0.09, 0.11], device=DEVICE) / products.tiles(n)
    squares = squares.repeat_interleave(products.tiles(n))
    products.symmetric(A.view, B.view, out.view, squares=squares, lows=(a_low.view, b_low.view))
    assert torch.equal(out.view[0], plain.view[0])
    a, b, al, bl = (x.view[1].double() for x in (A, B, a_low, b_low))
    expected = a @ b.mT + (a @ bl.mT + al @ b.mT) / 2048
    lower = torch.ones(n, n, device=DEVICE).tril().bool()
    difference = (out.view[1].double() - expected).abs()[lower]
    assert (difference <= epsilon(dtype) * expected.abs()[lower] + 1e-5).all()
    if dtype == torch.float32:
        assert not torch.allclose(plain.view[1].double()[lower], expected[lower], rtol=0, atol=2e-5)
    assert all(x.only_itself_changed() for x in (A, B, a_low, b_low, plain, out))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", MULTIPLIED, ids=str)
def test_a_product_of_many_tiles(dtype):
    """28 tiles: each number finds its own row and column."""
    A = Padded(randn(1, 769, 769), dtype)
    out = Padded.empty(1, 769, dtype)
    products.symmetric(A.view, A.view, out.view, alpha=1 / 769)
    expected = A.view.double() @ A.view.double().mT / 769
    assert (out.view.double() - expected).abs().max() <= epsilon(dtype) + 1e-6
    assert A.only_itself_changed()
    assert out.only_itself_changed()


# ------------------------------------------------------------------------- polynomials


def spectrum(m: int, n: int, values: Tensor, seed: int) -> Tensor:
    U, V = (torch.linalg.qr(randn(side, min(m, n), seed=seed + i))[0] for i, side in enumerate((m, n)))
    return (U * values.to(DEVICE)) @ V.mT


def family(kind: str, m: int, n: int) -> Tensor:
    k = min(m, n)
    if kind.startswith("1 to "):
        return spectrum(m, n, torch.logspace(0, math.log10(float(kind[5:])), k, dtype=F64), 5)
    if kind == "4 large":
        return spectrum(m, n, torch.where(torch.arange(k) < 4, 1.0, 0.01).to(F64), 5)
    u, v = randn(m, 1, seed=1), randn(n, 1, seed=2)
    if kind == "near rank 1":
        return u @ v.mT / math.sqrt(m * n) + 1e-4 * randn(m, n, seed=3) / math.sqrt(n)
    if kind == "power law":
        return spectrum(m, n, torch.arange(1, k + 1, dtype=F64) ** -1.5, 5)
    if kind == "positive":
        return torch.rand(m, n, generator=torch.Generator().manual_seed(4), dtype=F64).to(DEVICE)
    return {"random": randn(m, n), "rank 1": u @ v.mT, "zero": torch.zeros(m, n, dtype=F64, device=DEVICE)}[kind]


FAMILIES = ("random", "1 to 1e-3", "1 to 1e-6", "near rank 1", "rank 1", "4 large", "power law", "positive")


def exact(M: Tensor, method: str) -> Tensor:
    """Every singular value by the polynomial."""
    U, S, Vh = torch.linalg.svd(M / (torch.linalg.matrix_norm(M, keepdim=True) * COEFFICIENTS[method].safety), False)
    for a, b, c in COEFFICIENTS[method].steps:
        S = a * S + b * S**3 + c * S**5
    return (U * S.unsqueeze(-2)) @ Vh


def papers(M: Tensor, method: str) -> Tensor:
    """As the paper's code iterates, in bfloat16."""
    X = (M / (torch.linalg.matrix_norm(M, keepdim=True) * COEFFICIENTS[method].safety)).bfloat16()
    X = X.mT if M.shape[-2] > M.shape[-1] else X
    for a, b, c in COEFFICIENTS[method].steps:
        A = X @ X.mT
        X = a * X + (b * A + c * (A @ A)) @ X
    return (X.mT if M.shape[-2] > M.shape[-1] else X).double()


def factor(form: products.Form, M: Tensor, method: str, dtype: torch.dtype) -> Tensor:
    """Of M [batch, m, n] as the engine has it: a norm of a few hundred in poisoned memory, of which the rest stays."""
    batch = len(M)
    norm = torch.linalg.matrix_norm(M)
    scaled = M * (300 / torch.where(norm > 0, norm, 1)).view(-1, 1, 1)
    memory = blank(batch * form.room + 256, dtype)
    products.matrices(memory, batch, *form.sides).copy_(scaled.mT if form.tall else scaled)
    scales = torch.where(norm > 0, 1 / (300 * COEFFICIENTS[method].safety), 0).float()
    restart = COEFFICIENTS[method].restart if min(form.sides) >= 256 else 2  # the engine takes no smaller ones by Gram
    P = products.polynomial(form, memory, scales, COEFFICIENTS[method].steps, restart)
    assert P.shape == M.shape
    assert P.dtype == dtype
    assert P.data_ptr() >= memory.data_ptr()
    assert P.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
    assert memory[batch * form.room :].isnan().all()
    return P.double()


def error(P: Tensor, expected: Tensor) -> float:
    return float((P - expected).norm() / expected.norm())


OTHERS = sorted(COEFFICIENTS.keys() - {"polar-express"})
SHAPES = [(1, 1), (1, 9), (9, 1), (33, 33), (33, 40), (40, 33), (33, 66), (67, 33), (5, 129), (129, 5)]


@pytest.mark.parametrize("method", ["polar-express", *(pytest.param(m, marks=pytest.mark.slow) for m in OTHERS)])
@pytest.mark.parametrize("gram", [False, True], ids=["plain", "gram"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_form_is_the_polynomial(shape, gram, method):
    """Square, wide and tall, by either form, whichever is the cheaper."""
    M = randn(2, *shape, seed=sum(shape))
    # in float16 a single singular value may err by 0.03: its error has no others to be averaged with
    dtype, bound = (torch.float16, 4e-2 if 1 in shape else 2e-2) if DEVICE == "cuda" else (torch.float32, 2e-5)
    P = factor(products.Form(*shape, gram=gram), M, method, dtype)
    assert error(P, exact(M, method)) <= bound


@pytest.mark.parametrize("shape", [*SHAPES, (33, 70), (40, 121), (66, 200), (330, 66)], ids=str)
def test_without_a_new_start_it_is_the_polynomial_too(shape):
    """The whole polynomial's derivative, 276 at zero, multiplies rounding; wherever there is room for what it takes."""
    M = randn(2, *shape, seed=sum(shape))
    dtype, bound = (torch.float16, 0.1) if DEVICE == "cuda" else (torch.float32, 2e-4)
    P = factor(products.Form(*shape, gram=True, straight=True), torch.cat((M, 0 * M[:1])), "polar-express-4", dtype)
    assert error(P[:2], exact(M, "polar-express-4")) <= bound
    assert not P[2].any()


LARGE = [((257, 769), True), ((769, 257), True), ((300, 400), False), ((512, 1024), True)]


@pytest.mark.parametrize(
    ("shape", "gram"),
    [
        *[((64, 64), False), ((64, 100), False), ((64, 130), True), ((130, 64), True), ((20, 48), True)],
        *(pytest.param(*large, marks=pytest.mark.slow) for large in LARGE),
    ],
    ids=str,
)
@pytest.mark.parametrize("method", COEFFICIENTS)
def test_float16_errs_less_than_the_papers_bfloat16(method, shape, gram):
    """By the form that each shape takes, on easy and hard input."""
    M = torch.stack([family(kind, *shape) for kind in FAMILIES])
    P, expected, theirs = (
        factor(products.Form(*shape, gram=gram), M, method, torch.float16),
        exact(M, method),
        papers(M, method),
    )
    for i, kind in enumerate(FAMILIES):
        assert error(P[i], expected[i]) <= error(theirs[i], expected[i]), kind


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(512, 1024), (1100, 520)], ids=str)
def test_four_steps_straight_on_err_less_than_newton_schulz_in_bfloat16(shape):
    """Without a new start; nor does what one matrix needs depend on those beside it."""
    kinds = (*FAMILIES, "random")
    M = torch.stack([family(kind, *shape) for kind in kinds])
    form = products.Form(*shape, gram=True, straight=True)
    P, expected = factor(form, M, "polar-express-4", torch.float16), exact(M, "polar-express-4")
    usual, theirs = exact(M, "newton-schulz"), papers(M, "newton-schulz")
    for i, kind in enumerate(kinds):
        assert error(P[i], expected[i]) <= error(theirs[i], usual[i]), kind
    assert torch.equal(P[0], P[-1])


@pytest.mark.parametrize("dtype", MULTIPLIED, ids=str)
@pytest.mark.parametrize(("shape", "gram"), [((20, 20), False), ((20, 30), False), ((20, 48), True), ((48, 20), True)])
def test_degenerate_input_stays_finite(shape, gram, dtype):
    """Beside each other in one batch; zero stays zero."""
    if gram and dtype == torch.bfloat16:
        pytest.skip("never taken: the Gram form needs the digits of float16")
    kinds = ("zero", "rank 1", "near rank 1", "1 to 1e-6", "zero")
    M = torch.stack([family(kind, *shape) for kind in kinds])
    P = factor(products.Form(*shape, gram=gram), M, "newton-schulz", dtype)
    assert P.isfinite().all()
    assert not P[0].any()
    assert not P[-1].any()
    assert torch.linalg.matrix_norm(P, 2).max() < 1.4


# --------------------------------------------------------------------------- the passes


def table_of(*rows: dict[str, Tensor | int]) -> Tensor:
    """A table of addresses; what is not named is 0."""
    names = ("grad", "param", "d", "residual", "momentum", "second", "step", "weight_sum", "beta", "group")
    assert len(names) == table.COLUMNS.value
    values = [[row.get(name, 0) for name in names] for row in rows]
    numbers = [[v.data_ptr() if isinstance(v, Tensor) else v for v in row] for row in values]
    return torch.tensor(numbers, dtype=torch.int64, device=DEVICE)


def spans(sizes: list[int], block: int) -> tuple[Tensor, Tensor, Tensor]:
    blocks = [-(-size // block) for size in sizes]
    first = [sum(blocks[:i]) for i in range(len(sizes))]
    of_block = [i for i, count in enumerate(blocks) for _ in range(count)]
    return (
        torch.tensor(of_block, dtype=torch.int32, device=DEVICE),
        torch.tensor(first, dtype=torch.int32, device=DEVICE),
        torch.tensor(sizes, dtype=torch.int64, device=DEVICE),
    )


SIZES = [1, 63, 64, 65, 200]


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("value", [math.inf, -math.inf, NAN, None], ids=str)
def test_finite_finds_inf_and_nan_wherever_they_are(value, dtype):
    """In the first and the last element of tensors about a block long, the largest finite number beside them; what
    lies behind a tensor is not its own."""
    offset = 3  # addresses that are multiples of nothing
    memories = [blank(size + offset + 64, dtype) for size in SIZES]
    grads = [memory[offset : offset + size] for memory, size in zip(memories, SIZES, strict=True)]
    where = spans(SIZES[1:], 64)
    addresses = table_of(*({"grad": grad} for grad in grads))
    largest = torch.finfo(dtype).max
    for i in range(1, len(SIZES)) if value is not None else [0]:
        for at in (0, -1):
            for grad in grads:
                grad.fill_(-largest)
            grads[0].fill_(NAN)  # not among the `first` + …
            if value is not None:
                grads[i][at] = value
            bad = torch.zeros((), dtype=torch.int32, device=DEVICE)
            how = {"KIND": products.DTYPES[dtype], "ALIGNED": False, "BLOCK": 64}
            table.finite[(len(where[0]),)](addresses, *where, 1, bad, **how)
            assert int(bad) == (value is not None), (i, at)


unit = st.floats(0, 0.999) | st.just(0.0)


@st.composite
def group_settings(draw):
    growth = draw(st.sampled_from([0.0, 0.4, 1.5]))
    return {
        "lr": draw(st.floats(1e-6, 10) | st.just(0.0)),
        "warmup_steps": draw(st.integers(0, 20)),
        "rate": draw(st.floats(0.1, 4)),
        "averaging_power": draw(st.sampled_from([0.0, 1.0, 2.5])),
        "averaging_warmup": draw(st.integers(0, 10)),
        "beta": draw(unit | st.just(1.0)),
        "beta_growth": growth,
        "beta_growth_start": draw(st.integers(2, 12)),
        "weight_decay": draw(st.floats(0, 1)),
        "decay1": draw(unit),
        "decay2": draw(unit),
        "eps": draw(st.sampled_from([0.0, 1e-8])),
        "update_rms": draw(st.floats(0.1, 2)),
        "correct_rate": draw(st.booleans()),
        "correct_moment": draw(st.booleans()),
        "first_moment": draw(st.booleans()),
        "decay_fading": draw(st.sampled_from([0, 1, 3, 400])),
        "momentum_growth": draw(st.sampled_from([0.0, 0.3, 1.5])),
        "momentum_growth_start": draw(st.integers(2, 12)),
        "rate_fall": draw(st.sampled_from([0.0, 0.3, 1.5])),
        "rate_fall_start": draw(st.integers(2, 12)),
    }


def test_settings_are_drawn_in_their_order():
    assert table.WIDTH.value == len(table.SETTINGS)


@few
@given(
    groups=st.lists(group_settings(), min_size=1, max_size=2),
    steps=st.lists(st.integers(0, 5000), min_size=1, max_size=6),
    fresh=st.booleans(),
    bad=st.booleans(),
    averages=st.booleans(),
)
def test_tick_is_the_clock_of_the_average(groups, steps, fresh, bad, averages):
    """Every scalar of a step, for parameters of their own time each; a bad step leaves time standing still."""
    count = len(steps)
    steps = [0] * count if fresh else steps
    t0 = torch.tensor(steps, dtype=F64)
    sums0 = torch.zeros(count, dtype=F64) if fresh else torch.linspace(0, 3, count, dtype=F64)
    betas0 = torch.linspace(0, 1, count, dtype=F64)
    scalars = [[v.clone().to(DEVICE) for v in x.unbind()] for x in (t0, sums0, betas0)]
    mine = [i % len(groups) for i in range(count)]
    rows = [
        {"step": scalars[0][i], "weight_sum": scalars[1][i], "beta": scalars[2][i], "group": mine[i]}
        for i in range(count)
    ]
    numbers = torch.tensor([[float(group[name]) for name in table.SETTINGS] for group in groups], dtype=F64)
    coefficients = torch.full((count + 1, table.WIDTH.value), NAN, device=DEVICE)
    ok, skipped = torch.tensor([NAN, 7.0], dtype=F64, device=DEVICE).unbind()
    counts = count % 2 == 0
    table.tick[(-(-count // 4),)](
        table_of(*rows),
        numbers.view(torch.int64).to(DEVICE),
        torch.tensor(int(bad), dtype=torch.int32, device=DEVICE),
        ok,
        skipped,
        coefficients,
        count,
        AVERAGES=averages,
        COUNTS=counts,
        BLOCK=4,
    )
    fine = torch.tensor(0.0 if bad else 1.0, dtype=F64)
    assert ok.item() == fine.item()
    assert skipped.item() == 7 + (bad and counts)
    assert coefficients[count].isnan().all()
    for i in range(count):
        group, t = groups[mine[i]], t0[i] + 1
        eta = averaging.warmed_up(t, group["lr"], group["warmup_steps"]) * group["rate"]
        bias1, bias2 = (1 - group[name] ** t for name in ("decay1", "decay2"))
        fall = averaging.falling(t, group["rate_fall"], group["rate_fall_start"])
        eta = (eta * bias2.sqrt() if group["correct_rate"] else eta) * fall
        clock = averaging.tick(
            t,
            sums0[i],
            betas0[i],
            eta,
            fine,
            averaging_power=group["averaging_power"],
            averaging_warmup=group["averaging_warmup"],
            beta_start=group["beta"],
            beta_growth=group["beta_growth"],
            beta_growth_start=group["beta_growth_start"],
        )
        mu = averaging.growing(t, group["decay1"], group["momentum_growth"], group["momentum_growth_start"])
        moment, decay, fading = group["correct_moment"], group["weight_decay"], group["decay_fading"]
        expected = {
            "OK": fine,
            "ETA": clock.eta,
            "A1": 1 - (1 - mu) * fine,
            "B1": (1 - mu) * fine,
            "A2": 1 - (1 - group["decay2"]) * fine,
            "B2": (1 - group["decay2"]) * fine,
            "UNBIAS1": bias1 if moment and group["first_moment"] else torch.ones((), dtype=F64),
            "UNBIAS2": bias2 if moment else torch.ones((), dtype=F64),
            "DECAY": (averaging.faded(t, decay, fading) if fading else decay) / fall,
            "EPS": group["eps"],
            "RMS": group["update_rms"],
            "MU": mu,
        }
        after = [x[i].cpu() for x in scalars]
        assert after[0].item() == steps[i] + (not bad)
        if averages:
            keep = clock.beta_next * (1 - clock.c)
            expected |= {"KEEP_D": 1 - clock.c, "OLD_BETA": clock.beta}
            expected |= {"Y_FROM_D": clock.beta - keep, "Y_FROM_DZ": 1 - keep}
            torch.testing.assert_close(after[1], clock.weight_sum, rtol=1e-12, atol=0)
            torch.testing.assert_close(after[2], clock.beta_next, rtol=1e-12, atol=1e-15)
        if bad or not averages:
            assert torch.equal(after[1], sums0[i])
            assert torch.equal(after[2], betas0[i])
        for name, value in expected.items():
            got = coefficients[i, getattr(table, name).value].cpu()
            torch.testing.assert_close(got.double(), torch.as_tensor(value, dtype=F64), rtol=1e-6, atol=1e-9, msg=name)
        if not averages:
            assert coefficients[i, table.KEEP_D.value].isnan()


def coefficients_of(count: int, **values: float) -> Tensor:
    """A row a parameter, NaN but for what is named; OK = 1."""
    out = torch.full((count, table.WIDTH.value), NAN, device=DEVICE)
    for name, value in {"OK": 1.0, **values}.items():
        out[:, getattr(table, name).value] = value
    return out


class Matrices:
    """Two m × n pieces inside parameters with columns to spare, gradient and momentum in memory that is NaN beside
    them, and X as `polynomial` reads it."""

    def __init__(self, grads: list[Tensor], momenta: list[Tensor], kind=torch.float32, kind_m=torch.float32) -> None:
        self.m, self.n = grads[0].shape
        self.count, self.stride, self.first = len(grads), self.n + 5, 7
        self.kind, self.kind_m = kind, kind_m
        self.size = self.first + self.m * self.stride
        self.grad_memory = [blank(self.size, kind) for _ in grads]
        self.momentum_memory = [blank(self.size, kind_m) for _ in grads]
        for memory, values in zip(self.grad_memory + self.momentum_memory, grads + momenta, strict=True):
            self.inside(memory).copy_(values)
        self.table = table_of(
            {},
            *({"grad": g, "momentum": m} for g, m in zip(self.grad_memory, self.momentum_memory, strict=True)),
        )
        pieces = [[1 + i, self.first, 0] for i in range(self.count)]
        self.pieces = torch.tensor(pieces, dtype=torch.int64, device=DEVICE)
        self.form = products.Form(self.m, self.n, gram=False)

    def inside(self, memory: Tensor) -> Tensor:
        return memory.as_strided((self.m, self.n), (self.stride, 1), self.first)

    def run(self, coefficients: Tensor, guess: list[int], kind_x: torch.dtype, *, safety=1.0, nesterov=False):
        """(X, its scales, the right exponents) after `momentum` and `settle`."""
        memory = blank(self.count * self.form.room, kind_x)
        X = products.matrices(memory, self.count, *self.form.sides)
        before = memory.clone()
        rows, cols, programs = (4, 16, 4)
        exponents = torch.tensor(guess, dtype=torch.int32, device=DEVICE)
        right = torch.full((self.count,), -999, dtype=torch.int32, device=DEVICE)
        scales, sums = blank(self.count, torch.float32), blank(3 * self.count * programs, torch.float32)
        how = {
            "KIND": products.DTYPES[self.kind],
            "KIND_M": products.DTYPES[self.kind_m],
            "KIND_X": products.DTYPES[kind_x],
            "NESTEROV": nesterov,
            "TALL": self.form.tall,
            "ALIGNED": False,
            "PROGRAMS": programs,
            "ROWS": rows,
            "COLS": cols,
        }
        at = (self.table, coefficients, self.pieces, exponents)
        where = (self.m, self.n, self.stride, X.stride(0), X.stride(1))
        passes.momentum[(programs, self.count)](*at, sums, X, *where, **how)
        passes.settle[(2, self.count)](*at, right, scales, sums, X, *where, safety, **how)
        assert exponents.tolist() == guess
        outside = memory.clone()
        for tensor in (outside, before):
            products.matrices(tensor, self.count, *self.form.sides).zero_()
        assert torch.equal(bits(outside), bits(before))
        X = X.clone()
        return (X.mT if self.form.tall else X), scales, right.tolist()


def right_exponent(norm: float) -> int:
    """That which puts a norm into [2^8, 2^9)."""
    return 8 - math.floor(math.log2(norm)) if norm > 0 else 0


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(
    ("kind", "kind_m"),
    [(torch.float32, torch.float32), (torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)],
)
@pytest.mark.parametrize("shape", [(5, 19), (19, 5)], ids=str)
def test_momentum_and_the_input_of_the_polar_factor(shape, kind, kind_m, nesterov):
    grads = [randn(*shape, seed=i).to(kind) for i in range(2)]
    momenta = [randn(*shape, seed=2 + i).to(kind_m) for i in range(2)]
    work = Matrices(grads, momenta, kind, kind_m)
    before = [memory.clone() for memory in work.grad_memory]
    c = coefficients_of(3, A1=0.75, B1=0.25, MU=0.75)
    X, scales, right = work.run(c, [0, 3], torch.float32, safety=1.02, nesterov=nesterov)
    for i in range(2):
        g, m = grads[i].double(), momenta[i].double()
        kept = work.inside(work.momentum_memory[i])
        torch.testing.assert_close(kept.double(), (0.75 * m + 0.25 * g).to(kind_m).double(), rtol=1e-2, atol=1e-6)
        if kind_m == torch.float32:
            torch.testing.assert_close(kept.double(), 0.75 * m + 0.25 * g, rtol=0, atol=5e-7)
        x = kept.double()
        x = 0.25 * g + 0.75 * x if nesterov else x
        assert right[i] == right_exponent(float(x.norm()))
        torch.testing.assert_close(X[i].double(), x * 2.0 ** right[i], rtol=1e-5, atol=1e-3)
        assert 2**8 <= float(X[i].double().norm()) < 2**9
        torch.testing.assert_close(
            scales[i].double() * 1.02 * X[i].double().norm(), torch.ones((), dtype=F64).to(DEVICE)
        )
        assert torch.equal(bits(work.grad_memory[i]), bits(before[i]))
        outside = work.momentum_memory[i].clone()
        work.inside(outside).fill_(NAN)
        assert outside.isnan().all()


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_skipped_step_takes_no_gradient(nesterov):
    """Not even where it is NaN: the momentum keeps its bits, and X is of it alone."""
    momenta = [randn(5, 9, seed=i).float() for i in range(2)]
    momenta[0][0, 0] = -0.0
    work = Matrices([torch.full((5, 9), NAN)] * 2, momenta)
    before = [memory.clone() for memory in work.momentum_memory]
    c = coefficients_of(3, OK=0.0, A1=1.0, B1=0.0, MU=0.75)
    X, _, _ = work.run(c, [0, 0], torch.float32, nesterov=nesterov)
    assert X.isfinite().all()
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(before, work.momentum_memory, strict=True))


def entries(kind: str) -> Tensor:
    values = randn(6, 11, seed=4).clamp(-3, 3)
    if kind == "mixed":
        return values * torch.logspace(-44, 38, 66, dtype=F64, device=DEVICE).view(6, 11)
    return values * float({"zero": 0, "denormal": 1e-43}.get(kind, kind))


SCALES = ["zero", "denormal", "1e-38", "1e-30", "1e-12", "1e-6", "1", "1e6", "1e12", "1e30", "1e38", "mixed"]


@pytest.mark.parametrize("kind", SCALES)
def test_x_is_the_same_whatever_was_guessed(kind):
    """Over all of float32's range its norm is a few hundred, to all digits, and no guess leaves a trace in it."""
    g = entries(kind).float()
    assert g.isfinite().all()
    c = coefficients_of(3, A1=0.0, B1=1.0, MU=0.0)
    grads = [g, 2 * g.clamp(-1e38, 1e38)]

    def run(guess: list[int]) -> tuple[Tensor, Tensor, list[int]]:
        return Matrices(grads, [torch.zeros(6, 11)] * 2).run(c, guess, torch.float16)

    found = [run([0, -120]), run([157, 1])]
    found.append(run(found[0][2]))
    X, scales, right = found[0]
    for other in found[1:]:
        assert torch.equal(bits(X), bits(other[0]))
        assert torch.equal(bits(scales), bits(other[1]))
        assert right == other[2]
    if kind == "zero":
        assert not X.any()
        assert not scales.any()
        return
    exact = g.double() * 2.0 ** right[0]
    assert torch.equal(X[0], exact.half())
    torch.testing.assert_close(float(scales[0]) * float(exact.norm()), 1.0, rtol=1e-5, atol=0)
    if kind != "denormal":
        assert right[0] == right_exponent(float(g.double().norm()))


def flat_state(sizes: list[int], dtypes: dict[str, torch.dtype]) -> tuple[list[dict[str, Tensor]], Tensor]:
    """Random tensors of these names for each size, NaN behind each; and the table of them, from its second row on."""
    made = []
    for i, size in enumerate(sizes):
        tensors = {}
        for j, (name, dtype) in enumerate(dtypes.items()):
            memory = blank(size + 70, dtype)
            values = randn(size, seed=100 * i + j)
            values = values.abs() if name == "second" else values * 0.01 if name == "residual" else values
            tensors[name] = memory[3 : 3 + size].copy_(values)
        made.append(tensors)
    return made, table_of({}, *made)


def moved(
    y: Tensor, d: Tensor | None, U: Tensor, c: dict[str, float], decay_at: int, cautious: bool
) -> tuple[Tensor, Tensor | None]:
    """advance_ in float64, for the coefficients of `tick`."""
    at = {0: torch.zeros_like(y), 1: y if d is None else y + c["OLD_BETA"] * d, 2: y}[decay_at]
    if cautious:
        at = torch.where(U * at >= 0, at, 0.0)
    if d is None:
        return y - c["ETA"] * (U + c["DECAY"] * at), None
    dz = -c["ETA"] * (U + c["DECAY"] * at)
    return y + c["Y_FROM_D"] * d + c["Y_FROM_DZ"] * dz, (d + dz) * c["KEEP_D"]


MOVE = {"ETA": 0.25, "DECAY": 0.5, "OLD_BETA": 0.75, "Y_FROM_D": 0.125, "Y_FROM_DZ": 0.375, "KEEP_D": 0.625}


def check_move(
    old: dict[str, Tensor], new: dict[str, Tensor], U: Tensor, decay_at: int, cautious: bool = False
) -> None:
    """new is old moved by U, in its precision."""
    d = old["d"].double() if "d" in old else None
    y = old["param"].double() + (old["residual"].double() if "residual" in old else 0)
    y_expected, d_expected = moved(y, d, U, MOVE, decay_at, cautious)
    y_new = new["param"].double() + (new["residual"].double() if "residual" in new else 0)
    torch.testing.assert_close(y_new, y_expected, rtol=1e-5, atol=1e-5)
    if "residual" in new and (
        new["param"].dtype != torch.bfloat16 or DEVICE == "cuda"
    ):  # the interpreter cuts digits off
        assert torch.equal(new["param"], y_new.to(new["param"].dtype))
    if d_expected is not None:
        torch.testing.assert_close(new["d"].double(), d_expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("decay_at", [0, 1, 2])
@pytest.mark.parametrize("averages", [False, True], ids=["scheduled", "averages"])
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("first_moment", [False, True])
def test_adam(first_moment, dtype, averages, decay_at):
    """One pass over tensors about a block long; the first parameter of the table and what lies behind are not its."""
    sizes = [1, 64, 65]
    kind_m = torch.bfloat16 if dtype == torch.float16 else torch.float32
    dtypes = {"grad": dtype, "param": dtype, "second": torch.float32}
    dtypes |= {"d": torch.float32} if averages else {}
    dtypes |= {"residual": torch.float32} if dtype != torch.float32 else {}
    dtypes |= {"momentum": kind_m} if first_moment else {}
    state, addresses = flat_state(sizes, dtypes)
    old = [{name: value.clone() for name, value in tensors.items()} for tensors in state]
    numbers = {"A1": 0.75, "B1": 0.25, "A2": 0.875, "B2": 0.125, "UNBIAS1": 0.5, "UNBIAS2": 0.75, "EPS": 0.01}
    c = coefficients_of(4, **MOVE, **numbers)
    where = spans(sizes, 64)
    how = {"KIND": dtype, "KIND_G": dtype, "KIND_M": kind_m}
    passes.adam[(len(where[0]),)](
        addresses,
        c,
        *where,
        1,
        **{name: products.DTYPES[kind] for name, kind in how.items()},
        HAS_RESIDUAL=dtype != torch.float32,
        AVERAGES=averages,
        DECAY_AT=decay_at,
        FIRST_MOMENT=first_moment,
        ALIGNED=False,
        BLOCK=64,
    )
    for before, after in zip(old, state, strict=True):
        g = before["grad"].double()
        assert torch.equal(before["grad"], after["grad"])
        v = 0.875 * before["second"].double() + 0.125 * g * g
        torch.testing.assert_close(after["second"].double(), v, rtol=1e-6, atol=1e-7)
        u = g
        if first_moment:
            m = 0.75 * before["momentum"].double() + 0.25 * g
            torch.testing.assert_close(
                after["momentum"].double(), m, rtol=1e-2 if kind_m != torch.float32 else 1e-6, atol=1e-6
            )
            u = after["momentum"].double() / 0.5
        check_move(before, after, u / ((v / 0.75).sqrt() + 0.01), decay_at)
        for value in after.values():
            behind = value.as_strided((67,), (1,), value.storage_offset() + len(value))
            assert behind.isnan().all()


def test_adam_without_eps_stands_still_where_there_never_was_a_gradient():
    state, addresses = flat_state([70], {"grad": torch.float32, "param": torch.float32, "second": torch.float32})
    for name in ("grad", "second"):
        state[0][name][:40] = 0.0
    before = state[0]["param"].clone()
    c = coefficients_of(2, ETA=0.25, DECAY=0.0, A2=0.875, B2=0.125, UNBIAS2=1.0, EPS=0.0)
    kinds = dict.fromkeys(("KIND", "KIND_G", "KIND_M"), products.DTYPES[torch.float32])
    how = {
        "HAS_RESIDUAL": False,
        "AVERAGES": False,
        "DECAY_AT": 1,
        "FIRST_MOMENT": False,
        "ALIGNED": False,
        "BLOCK": 64,
    }
    passes.adam[(2,)](addresses, c, *spans([70], 64), 1, **kinds, **how)
    assert torch.equal(state[0]["param"][:40], before[:40])
    assert not torch.equal(state[0]["param"], before)
    assert state[0]["param"].isfinite().all()


class Moves:
    """Two m × n pieces of factors P, with a row statistic between others, and parameters they are to move."""

    def __init__(self, m: int, n: int, dtype: torch.dtype, *, averages: bool, kind_p=torch.float16) -> None:
        self.m, self.n, self.stride, self.first, self.row_stride = m, n, n + 3, 5, 3
        names = {"param": dtype} | ({"d": torch.float32} if averages else {})
        names |= {"residual": torch.float32} if dtype != torch.float32 else {}
        size = self.first + m * self.stride
        self.state, _ = flat_state([size, size], names)
        self.second = [blank(2 + m * self.row_stride, torch.float32) for _ in range(2)]
        for i, memory in enumerate(self.second):
            self.rows_of(memory).copy_(randn(m, seed=50 + i).abs())
        self.table = table_of({}, *(s | {"second": v} for s, v in zip(self.state, self.second, strict=True)))
        self.pieces = torch.tensor([[1, self.first, 2], [2, self.first, 2]], dtype=torch.int64, device=DEVICE)
        self.P = products.matrices(blank(2 * m * products._row(n), kind_p), 2, m, n)
        self.P.copy_(randn(2, m, n, seed=60) / 8)
        self.factors = blank(2 * m, torch.float32)
        self.how = {"PROGRAMS": 2, "ROWS": 4, "COLS": 16}
        self.sums = blank(2 * 2, torch.float32)

    def rows_of(self, memory: Tensor) -> Tensor:
        return memory.as_strided((self.m,), (self.row_stride,), 2)

    def inside(self, memory: Tensor) -> Tensor:
        return memory.as_strided((self.m, self.n), (self.stride, 1), memory.storage_offset() + self.first)

    def rows(self, c: Tensor, *, row_norm: bool) -> None:
        passes.rows[(2, 2)](
            self.table,
            c,
            self.pieces,
            self.P,
            self.factors,
            self.sums,
            self.m,
            self.n,
            *self.P.stride()[:2],
            self.row_stride,
            ROW_NORM=row_norm,
            **self.how,
        )


@pytest.mark.parametrize("ok", [True, False], ids=["taken", "skipped"])
@pytest.mark.parametrize("eps", [0.0, 0.01])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (3, 33), (9, 7)])
def test_rows(m, n, eps, ok):
    """The statistic, what a row is multiplied by, and the norm of all that; a row that never was anything is left."""
    work = Moves(m, n, torch.float32, averages=False)
    if m > 1:
        for i, memory in enumerate(work.second):
            work.rows_of(memory)[1] = 0.0
            work.P[i, 1] = 0.0
    before = [memory.clone() for memory in work.second]
    work.rows(coefficients_of(3, OK=float(ok), A2=0.75, B2=0.25, EPS=eps), row_norm=True)
    for i in range(2):
        P = work.P[i].double()
        v = 0.75 * work.rows_of(before[i]).double() + 0.25 * P.square().mean(dim=1)
        after = work.rows_of(work.second[i])
        if ok:
            torch.testing.assert_close(after.double(), v, rtol=1e-5, atol=1e-9)
            work.rows_of(before[i]).copy_(after)
        assert torch.equal(bits(before[i]), bits(work.second[i]))
        root = v.sqrt() + eps
        factors = 1 / torch.where(root > 0, root, 1)
        torch.testing.assert_close(work.factors[i * m : (i + 1) * m].double(), factors, rtol=1e-5, atol=0)
        total = (P * factors.unsqueeze(1)).square().sum()
        torch.testing.assert_close(work.sums.view(2, 2)[i].double().sum(), total, rtol=1e-5, atol=1e-12)


def test_the_norm_without_rows():
    work = Moves(9, 7, torch.float32, averages=False)
    before = [memory.clone() for memory in work.second]
    work.rows(coefficients_of(3), row_norm=False)
    torch.testing.assert_close(work.sums.view(2, 2).double().sum(1), work.P.double().square().sum((1, 2)))
    assert work.factors.isnan().all()
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(before, work.second, strict=True))


@pytest.mark.parametrize(("decay_at", "cautious"), [(0, False), (1, False), (2, False), (1, True), (2, True)])
@pytest.mark.parametrize("averages", [False, True], ids=["scheduled", "averages"])
@pytest.mark.parametrize("dtype", KINDS[:2], ids=str)
@pytest.mark.parametrize("normed", [(True, True), (True, False), (False, True), (False, False)], ids=str)
def test_move(normed, dtype, averages, decay_at, cautious):
    """What is moved is the pieces alone; the next guess is the right exponent, also of a skipped step."""
    row_norm, unit_norm = normed
    work = Moves(9, 7, dtype, averages=averages)
    old = [{name: value.clone() for name, value in tensors.items()} for tensors in work.state]
    c = coefficients_of(3, **MOVE, RMS=0.5, A2=0.75, B2=0.25, EPS=0.01)
    c[2, table.OK.value] = 0.0
    if row_norm or unit_norm:
        work.rows(c, row_norm=row_norm)
    exponents = torch.tensor([3, 4], dtype=torch.int32, device=DEVICE)
    right = torch.tensor([-7, 9], dtype=torch.int32, device=DEVICE)
    passes.move[(2, 2)](
        work.table,
        c,
        work.pieces,
        exponents,
        right,
        work.P,
        work.factors,
        work.sums,
        work.m,
        work.n,
        work.stride,
        *work.P.stride()[:2],
        3.0,
        KIND=products.DTYPES[dtype],
        HAS_RESIDUAL=dtype != torch.float32,
        AVERAGES=averages,
        DECAY_AT=decay_at,
        CAUTIOUS=cautious,
        ROW_NORM=row_norm,
        UNIT=unit_norm,
        ALIGNED=False,
        **work.how,
    )
    assert exponents.tolist() == [-7, 9]
    U = work.P[0].double() * (work.factors[:9].double().unsqueeze(1) if row_norm else 1)
    U = 3.0 * 0.5 * (U / U.norm() if unit_norm else U)
    cut = [{name: work.inside(value) for name, value in tensors.items()} for tensors in (old[0], work.state[0])]
    check_move(*cut, U, decay_at, cautious)
    for name, value in cut[0].items():
        value.copy_(cut[1][name])
    for before, after in zip(old, work.state, strict=True):
        assert all(torch.equal(bits(before[name]), bits(after[name])) for name in before)
