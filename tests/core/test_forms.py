"""The ways to iterate on a matrix against the polynomial itself, in float64, and which is taken where."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from anytime.core import polar as forms
from anytime.core.direction import Batch, Spectral
from anytime.core.layout import Layout
from anytime.core.polar import COEFFICIENTS, _on_gram, _singly, _singly_on_gram, _whole, at_once, iteration, polar

F64 = torch.float64
CPU = torch.device("cpu")
FORMS = {"whole": _whole, "singly": _singly, "on Gram": _on_gram, "singly, on Gram": _singly_on_gram}
quick = settings(max_examples=60)


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def orthonormal(m, k, seed):
    return torch.linalg.qr(randn(m, k, seed=seed))[0]


def exact(X, coefficients):
    """Every singular value by the polynomial."""
    U, S, Vh = torch.linalg.svd(X.double(), full_matrices=False)
    for a, b, c in coefficients.steps:
        S = a * S + b * S**3 + c * S**5
    return (U * S.unsqueeze(-2)) @ Vh


def unit(M, method):
    return M / (torch.linalg.matrix_norm(M, keepdim=True) * COEFFICIENTS[method].safety)


# ------------------------------------------------------------------- the forms


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", COEFFICIENTS)
@quick
@given(
    count=st.integers(1, 3),
    m=st.integers(1, 9),
    more=st.integers(0, 9),
    turned=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_every_form_is_the_polynomial(form, method, count, m, more, turned, seed):
    """Any m ≤ n, odd ones too, from memory in either order, which it keeps."""
    X = unit(randn(count, m, m + more, seed=seed), method)
    X = X.mT.contiguous().mT if turned else X
    P = FORMS[form](X, COEFFICIENTS[method])
    torch.testing.assert_close(P, exact(X, COEFFICIENTS[method]), rtol=0, atol=1e-9)
    if form != "whole":
        assert (P.mT if turned else P).is_contiguous()


def hard(kind, m, n):
    """Input that costs digits, of unit norm."""
    if kind == "1 to 1e-6":
        M = (orthonormal(m, m, 1) * torch.logspace(0, -6, m, dtype=F64)) @ orthonormal(n, m, 2).T
    elif kind == "rank one and little":
        M = randn(m, 1, seed=1) @ randn(1, n, seed=2) + 1e-4 * randn(m, n, seed=3)
    elif kind == "rank one":
        M = randn(m, 1, seed=1) @ randn(1, n, seed=2)
    elif kind == "rank one, spiked":
        M = randn(m, 1, seed=1) ** 7 @ randn(1, n, seed=2) ** 7
    else:
        M = {"random": randn(m, n), "ones": torch.ones(m, n, dtype=F64), "orthogonal": orthonormal(n, m, 1).T}[kind]
    return (M / M.norm()).float()


HARD = ("random", "orthogonal", "1 to 1e-6", "rank one and little", "rank one", "rank one, spiked", "ones")


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape", [(513, 513), (512, 700), (513, 900)])
@pytest.mark.parametrize("form", ["singly", "singly, on Gram"])
def test_large_symmetric_products_are_mirrored(form, shape, turned):
    X = unit(randn(1, *shape), "newton-schulz")
    X = X.mT.contiguous().mT if turned else X
    P = FORMS[form](X, COEFFICIENTS["newton-schulz"])
    torch.testing.assert_close(P, exact(X, COEFFICIENTS["newton-schulz"]), rtol=0, atol=1e-9)


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 0, 1), (0, 1, 2)])
def test_matrices_taken_singly_may_lie_anyhow(order):
    """oneDNN takes minutes where neither rows nor columns are contiguous."""
    M = randn(3, 200, 256).float().permute(*sorted(range(3), key=order.__getitem__)).contiguous().permute(*order)
    assert M.shape == (3, 200, 256)
    torch.testing.assert_close(polar(M), polar(M.contiguous()), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "onednn"),
    [
        *((shape, True) for shape in [(384, 384), (384, 1536), (1536, 384), (257, 400), (513, 600), (800, 513)]),
        *((shape, False) for shape in [(257, 270), (400, 257)]),
    ],
)
@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize("method", COEFFICIENTS)
def test_float32_keeps_its_digits(method, kind, shape, onednn, monkeypatch):
    """At the sizes where matrices are taken singly, by either library; bfloat16 is at 5e-2 on the easiest of these."""
    if not onednn:
        monkeypatch.setattr(forms, "_onednn", lambda: False)
    elif not forms._onednn():
        pytest.skip("no AVX-512, or a torch without oneDNN")
    M = hard(kind, min(shape), max(shape))
    M = M.T.contiguous() if shape[0] > shape[1] else M
    expected = exact(M.double() / COEFFICIENTS[method].safety, COEFFICIENTS[method])
    P = polar(M, method).double()
    easy = kind in ("random", "orthogonal")
    assert float((P - expected).norm() / expected.norm()) < (1e-4 if easy else 4e-2)


# ------------------------------------------------------------------ the choice


@pytest.mark.parametrize(
    ("m", "n", "dtype", "device", "form"),
    [
        (191, 191, torch.float32, "cpu", _whole),
        (63, 9999, torch.float32, "cpu", _whole),
        (64, 127, torch.float32, "cpu", _whole),
        (64, 128, torch.float32, "cpu", _on_gram),
        (191, 9999, torch.float32, "cpu", _on_gram),
        (191, 9999, F64, "cpu", _whole),
        (191, 9999, torch.bfloat16, "cpu", _whole),
        (191, 9999, torch.float32, "cuda", _whole),
        (192, 192, torch.float32, "cpu", _singly),
        (192, 287, torch.float32, "cpu", _singly),
        (192, 288, torch.float32, "cpu", _singly_on_gram),
        (192, 288, F64, "cpu", _singly),
        (192, 288, torch.bfloat16, "cpu", _whole),
        (192, 288, torch.float16, "cpu", _whole),
        (192, 288, torch.float32, "cuda", _whole),
        (192, 288, torch.bfloat16, "cuda", _whole),
        (192, 288, torch.float32, "mps", _whole),
    ],
)
def test_which_form_is_taken(m, n, dtype, device, form):
    assert iteration(m, n, dtype, torch.device(device)) is form


@pytest.mark.parametrize("shape", [(2, 200, 200), (2, 200, 500)])
def test_large_matrices_compile_to_one_graph(shape):
    """Together: one at a time they would be written out each."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    M = randn(*shape).float()
    found = torch.compile(polar, fullgraph=True, backend=backend)(M)
    torch._dynamo.reset()
    torch.testing.assert_close(found, polar(M), rtol=0, atol=1e-4)
    assert sum("matmul" in str(node.target) or "baddbmm" in str(node.target) for node in graphs[0].graph.nodes) < 20


def test_products_are_onednns_where_the_cpu_has_avx_512_and_torch_may_use_it(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert forms._onednn() == torch.backends.mkldnn.is_available()
    with torch.backends.mkldnn.flags(enabled=False):
        assert not forms._onednn()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert not forms._onednn()


@pytest.mark.parametrize(
    ("m", "dtype", "there"), [(192, torch.float32, True), (191, torch.float32, False), (192, F64, False)]
)
def test_where_onednn_is_called(m, dtype, there):
    class Seen(TorchDispatchMode):
        found = False

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.found |= function.namespace == "mkldnn"
            return function(*args, **(kwargs or {}))

    with Seen() as seen:
        polar(randn(m, m).to(dtype))
    assert seen.found == (there and forms._onednn())


def test_float64_keeps_all_of_its_digits():
    """Where float32 would take the Gram matrix."""
    X = unit(randn(256, 512), "newton-schulz")
    torch.testing.assert_close(polar(X, "newton-schulz"), exact(X, COEFFICIENTS["newton-schulz"]), rtol=0, atol=1e-12)


# ------------------------------------------------------------ some at a time


@pytest.mark.parametrize("shape", [(9, 400, 400), (3, 2, 300, 500), (5, 500, 300)])
def test_more_matrices_than_are_taken_at_once(shape):
    M = randn(*shape).float()
    assert M[..., 0, 0].numel() > at_once(*shape[-2:], CPU)
    P = polar(M, "newton-schulz")
    for p, matrix in zip(P.reshape(-1, *shape[-2:]), M.reshape(-1, *shape[-2:]), strict=True):
        torch.testing.assert_close(p, polar(matrix, "newton-schulz"), rtol=0, atol=1e-5)


@pytest.mark.parametrize("row_norm", [True, False])
def test_a_direction_of_more_parameters_than_are_taken_at_once(row_norm):
    """Each gets what it would alone, its row statistic too; some are two matrices in one."""
    shapes = [(400, 400)] * 6 + [(2, 400, 400), (400, 300), (400, 400)]
    assert len(shapes) > at_once(400, 400, CPU)
    options = {"momentum": 0.5, "nesterov": False, "polar": "newton-schulz", "polar_dtype": None, "beta2": 0.9}
    options |= {"momentum_dtype": None, "row_norm": row_norm, "scaling": "rms", "update_rms": 0.2, "eps": 1e-8}

    def run(chosen):
        layouts, one = [Layout()] * len(chosen), torch.ones((), dtype=F64)
        states = [
            {name: torch.zeros(size) for name, (size, _) in Spectral().buffers(shapes[i], Layout(), options).items()}
            for i in chosen
        ]
        grads = [randn(*shapes[i], seed=i).float() for i in chosen]
        return Spectral()(Batch(grads, states, layouts, options, one.expand(len(chosen)), one)), states

    U, states = run(range(len(shapes)))
    for i in range(len(shapes)):
        (u,), (state,) = run([i])
        torch.testing.assert_close(U[i], u, rtol=1e-4, atol=1e-5)
        for name, value in state.items():
            torch.testing.assert_close(states[i][name], value, rtol=1e-4, atol=1e-7)
