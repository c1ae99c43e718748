"""The polar factor of a matrix: U Vᵀ where M = U Σ Vᵀ, exactly or by odd quintic polynomials of M.

The polynomials apply (a, b, c) as X ← a X + b (X Xᵀ) X + c (X Xᵀ)² X to the matrix scaled to unit Frobenius norm,
so every singular value moves by a σ + b σ³ + c σ⁵ and the singular vectors stay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

Polar = str | Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Coefficients:
    """A named iteration: one (a, b, c) a step, c ≠ 0, what the input's norm is divided by beyond itself, and the number
    of steps after which float16 on the Gram matrix starts anew, where that errs least on hard input; from `straight`
    rows on, where there are such, it need not."""

    steps: tuple[tuple[float, float, float], ...]
    safety: float = 1.0
    restart: int = 3
    straight: int | None = None

    def goes_straight(self, rows: int) -> bool:
        """Whether it does not start anew on so many rows."""
        return self.straight is not None and rows >= self.straight


COEFFICIENTS: dict[str, Coefficients] = {
    # The paper's: Jordan et al., "Muon" (2024). Singular values of [1e-3, 1] land in [0.47, 1.20].
    "newton-schulz": Coefficients(((3.4445, -4.7750, 2.0315),) * 5),
    # Amsel et al., "The Polar Express" (2025), designed for [1e-3, 1]: lands in [0.85, 1.14]. It diverges soon
    # above 1, where rounding can put the largest singular value, hence the safety factor.
    "polar-express": Coefficients(
        (
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ),
        safety=1.02,
    ),
    # The same construction in four steps, for [3e-3, 1] and with 2% to spare for rounding at each: that lands in
    # [0.785, 1.215], what is smaller is multiplied by 276. The input must not be above 1 at all.
    "polar-express-4": Coefficients(
        (
            (8.383673612923165, -24.765905857974534, 18.357081892887596),
            (3.9689843714118447, -2.842422414511317, 0.516747039711024),
            (3.4626124495836907, -2.4982056962127093, 0.480221263892855),
            (2.490970863042579, -1.7799893417541235, 0.4059897170367134),
        ),
        safety=1.04,
        restart=2,
        straight=512,
    ),
    # You Jiacheng's quintic: [0.978, 1.032] for singular values of [1e-2, 1], [0.48, 1.15] below.
    "quintic": Coefficients(
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        restart=2,  # after three, matrices of nearly rank one are lost
    ),
}
METHODS = (*COEFFICIENTS, "svd", "low-rank")


def polar(M: Tensor, method: Polar = "newton-schulz", dtype: torch.dtype | None = None) -> Tensor:
    """The polar factor of each matrix of M [..., m, n], in M's dtype; zero for a zero matrix.

    dtype is the precision of the iteration; None is float16 on CUDA (as fast as bfloat16, with an eighth of its error)
    and M's own elsewhere. A callable maps one m × n matrix to another; it gets M in `dtype` where one is given.
    """
    if M.numel() == 0:
        return torch.zeros_like(M)
    if callable(method):
        A = M if dtype is None else M.to(dtype)
        factors = torch.stack([method(matrix) for matrix in A.reshape(-1, *A.shape[-2:])])
        if factors.shape[1:] != M.shape[-2:]:
            raise ValueError(f"polar made {tuple(factors.shape[1:])} of a matrix of {tuple(M.shape[-2:])}")
        return factors.reshape(M.shape).to(M.dtype)
    if method == "svd":
        return svd_polar(M if dtype is None else M.to(torch.promote_types(dtype, torch.float32))).to(M.dtype)
    if method == "low-rank":
        A = M if dtype is None else M.to(torch.promote_types(dtype, torch.float32))
        return low_rank_polar(A, max(1, min(M.shape[-2:]) // 4)).to(M.dtype)
    dtype = dtype or (torch.float16 if M.is_cuda else M.dtype)
    return polynomial_polar(M, COEFFICIENTS[method], dtype).to(M.dtype)


def unit_norm(M: Tensor, safety: float = 1.0) -> Tensor:
    """M / (safety · ‖M‖_F), zero where M is; the largest entry is divided out first so that no square under- or
    overflows, whatever M's scale."""
    peak = torch.maximum(M.amax(dim=(-2, -1), keepdim=True), -M.amin(dim=(-2, -1), keepdim=True))
    M = M / torch.where(peak > 0, peak, 1)
    norm = torch.linalg.matrix_norm(M, keepdim=True)
    return M.div_(torch.where(norm > 0, norm * safety, 1))


# ------------------------------------------------------------ the polynomials

Iteration = Callable[[Tensor, Coefficients], Tensor]


def iteration(m: int, n: int, dtype: torch.dtype, device: torch.device) -> Iteration:
    """The cheapest accurate way to iterate on m × n, m ≤ n: on a CPU the Gram matrix saves products from n = 1.5 m or
    2 m, and costs digits that float32 has to spare; large matrices are taken one at a time, but where a compiler would
    write all of them out."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.float64) or m < 64:
        return _whole
    if m < 192 or torch.compiler.is_compiling():
        return _on_gram if dtype == torch.float32 and n >= 2 * m else _whole
    return _singly_on_gram if dtype == torch.float32 and 2 * n >= 3 * m else _singly


def at_once(m: int, n: int, device: torch.device) -> int:
    """How many m × n matrices to take together: on a CPU as many as its caches hold, elsewhere all."""
    return max(4, 600_000 // (m * n)) if device.type == "cpu" else 2**62


def polynomial_polar(M: Tensor, coefficients: Coefficients, dtype: torch.dtype) -> Tensor:
    """[..., m, n] -> [..., m, n] in `dtype`, iterating on the smaller side's Gram matrix."""
    m, n = M.shape[-2:]
    iterate = iteration(min(m, n), max(m, n), dtype, M.device)
    parts = []
    for part in torch.split(M.reshape(-1, m, n), at_once(m, n, M.device)):
        X = unit_norm(part, coefficients.safety).to(dtype)
        parts.append(iterate(X.mT, coefficients).mT if m > n else iterate(X, coefficients))
    return (torch.cat(parts) if len(parts) > 1 else parts[0]).reshape(M.shape)


def _whole(X: Tensor, coefficients: Coefficients) -> Tensor:
    """As written at the top, all of a batch in one product."""
    for a, b, c in coefficients.steps:
        A = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X


def _on_gram(X: Tensor, coefficients: Coefficients) -> Tensor:
    """X ← Q X at the end alone: B = a + b R + c R², Q ← B Q and R ← B R B for the Gram matrix R = X Xᵀ."""
    R, Q = X @ X.mT, None
    for i, (a, b, c) in enumerate(coefficients.steps):
        B = torch.baddbmm(R, R, R, beta=b, alpha=c)
        B.diagonal(dim1=-2, dim2=-1).add_(a)
        Q = B if Q is None else B @ Q
        if i + 1 < len(coefficients.steps):
            R = B @ R @ B
    return X if Q is None else _times(Q, X)


def _times(Q: Tensor, X: Tensor) -> Tensor:
    """Q X, as X lies in memory."""
    return Q @ X if X.is_contiguous() else (X.mT @ Q.mT).mT


def _one(X: Tensor, coefficients: Coefficients) -> Tensor:
    """As written at the top, X [m, n]."""
    for a, b, c in coefficients.steps:
        X = product(_quadratic(_symmetric(X, X), a, b, c), X.mT)
    return X


def _one_on_gram(X: Tensor, coefficients: Coefficients) -> Tensor:
    """`_on_gram` of X [m, n].

    All of them commute, up to rounding. B and R may be taken as symmetric nevertheless, but not Q: that would let the
    rounding of each step grow with the largest value of Q, and X of nearly rank one is lost to it.
    """
    R, Q = _symmetric(X, X), None
    for i, (a, b, c) in enumerate(coefficients.steps):
        B = _quadratic(R, a, b, c)
        Q = B if Q is None else product(B, Q.mT)
        if i + 1 < len(coefficients.steps):
            R = _symmetric(_symmetric(B, R), B)
    if Q is None:
        return X
    return product(Q, X.mT) if X.is_contiguous() else product(X.mT, Q).mT  # as X lies in memory


def _each(iterate: Iteration, X: Tensor, coefficients: Coefficients) -> Tensor:
    """One matrix at a time."""
    out = torch.empty_like(X)
    for one, place in zip(X, out, strict=True):
        dense = one if one.is_contiguous() or one.mT.is_contiguous() else one.contiguous()
        place.copy_(iterate(dense, coefficients))
    return out


_singly = partial(_each, _one)
_singly_on_gram = partial(_each, _one_on_gram)


def _quadratic(A: Tensor, a: float, b: float, c: float) -> Tensor:
    """a + b A + c A² of symmetric A, as A (c A + b) + a: one product, one pass and two diagonals."""
    factor = A * c
    factor.diagonal().add_(b)
    B = _symmetric(A, factor)
    B.diagonal().add_(a)
    return B


def _symmetric(A: Tensor, B: Tensor) -> Tensor:
    """A Bᵀ [n, n] where it is symmetric: of large ones without the fourth block, which is the mirrored third."""
    n = len(A)
    if n < 512 or not (A.is_contiguous() and B.is_contiguous()):
        return product(A, B)
    half = n // 2
    C = A.new_empty(n, n)
    C[:half, :half] = product(A[:half], B[:half])
    C[half:] = product(A[half:], B)
    C[:half, half:] = C[half:, :half].mT
    return C


def product(A: Tensor, B: Tensor) -> Tensor:
    """A Bᵀ, A [m, k], B [n, k], each contiguous or the transpose of such.

    In float32, on a CPU with AVX-512, by oneDNN: torch's own product is by MKL, which on AMD's does not use it and
    takes twice as long (on other strides than these oneDNN takes a hundred times as long, or more).
    """
    if A.dtype == torch.float32 and A.device.type == "cpu" and _onednn():
        found: Tensor = torch.ops.mkldnn._linear_pointwise(A, B, None, "none", [], "")
        return found
    return A @ B.mT


def _onednn() -> bool:
    backends = torch.backends
    if not (torch._C._has_mkldnn and backends.mkldnn.enabled and backends.cpu.get_cpu_capability() == "AVX512"):
        return False
    return hasattr(torch.ops.mkldnn, "_linear_pointwise")  # it is no public name


# ------------------------------------------------------------ exact, and parts


def svd_polar(M: Tensor, size: int = 0) -> Tensor:
    """U Vᵀ over the singular values above max(m, n, size)·eps·σ₁: the exact duality map of the spectral norm."""
    U, S, Vh = torch.linalg.svd(unit_norm(M), full_matrices=False)
    cutoff = max(*M.shape[-2:], size) * torch.finfo(S.dtype).eps * S[..., :1]
    kept: Tensor = (S > cutoff) & (S > 0)  # noqa: SIM300
    return torch.matmul(U * kept.to(U.dtype).unsqueeze(-2), Vh)


def low_rank_polar(M: Tensor, rank: int, iterations: int = 2) -> Tensor:
    """The polar factor of each matrix of M [..., m, n] within its leading `rank` directions, found by power iterations
    from a fixed random start, as in Dion (arXiv 2504.05295); exact where M has no more than those.

    The same for the same M, and torch's random state is not touched. QR and SVD read from the device: a CUDA graph
    cannot hold it.
    """
    m, n = M.shape[-2:]
    if m > n:
        return low_rank_polar(M.mT, rank, iterations).mT
    X = unit_norm(M)
    generator = torch.Generator("cpu").manual_seed(0)
    start = torch.randn(n, min(rank, m), generator=generator, dtype=torch.float64, device="cpu")
    V = start.to(X)
    for _ in range(iterations):
        U, _ = torch.linalg.qr(X @ V)
        V, R = torch.linalg.qr(X.mT @ U)  # U Uᵀ X = U Rᵀ Vᵀ
    return torch.matmul(U @ svd_polar(R.mT, size=n), V.mT)


def project(Z: Tensor, ball: str, radius: float) -> Tensor:
    """The nearest point to each matrix of Z [..., m, n] in a ball of the "frobenius" or "spectral" norm."""
    if ball == "frobenius":
        norm: Tensor = torch.linalg.matrix_norm(Z, keepdim=True)
        return Z * (radius / norm.clamp(min=radius))
    U, S, Vh = torch.linalg.svd(Z, full_matrices=False)
    return Z - torch.matmul(U * (S - radius).clamp(min=0).unsqueeze(-2), Vh)


def polar_flops(
    m: int,
    n: int,
    coefficients: Coefficients = COEFFICIENTS["newton-schulz"],
    *,
    symmetric: bool = True,
    gram: bool = True,
) -> float:
    """Operations of an iteration on an m × n matrix.

    Symmetric products are computed by half. From an aspect ratio of 3 the iteration is on the Gram matrix.
    """
    side, ratio, steps = min(m, n), max(m, n) / min(m, n), len(coefficients.steps)
    if not gram or ratio < 3:
        return steps * (3 * ratio + 1 if symmetric else 4 * ratio + 2) * side**3
    if coefficients.goes_straight(side):
        return (3 * ratio + 4 * steps - 3) * side**3
    return (6 * ratio + 4 * steps - 6) * side**3
