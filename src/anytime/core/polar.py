"""The polar factor of a matrix: U Vᵀ where M = U Σ Vᵀ, exactly or by odd quintic polynomials of M.

The polynomials apply (a, b, c) as X ← a X + b (X Xᵀ) X + c (X Xᵀ)² X to the matrix scaled to unit Frobenius norm,
so every singular value moves by a σ + b σ³ + c σ⁵ and the singular vectors stay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Polar = str | Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Coefficients:
    """A named iteration: one (a, b, c) a step, and what the input's norm is divided by beyond itself."""

    steps: tuple[tuple[float, float, float], ...]
    safety: float = 1.0


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
    # You Jiacheng's quintic: [0.978, 1.032] for singular values of [1e-2, 1], [0.48, 1.15] below.
    "quintic": Coefficients(
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        )
    ),
}
METHODS = (*COEFFICIENTS, "svd")


def polar(M: Tensor, method: Polar = "newton-schulz", dtype: torch.dtype | None = None) -> Tensor:
    """The polar factor of each matrix of M [..., m, n], in M's dtype; zero for a zero matrix.

    dtype is the precision of the iteration; None is bfloat16 on CUDA and M's own elsewhere. A callable maps one m × n
    matrix to another; it gets M in `dtype` where one is given.
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
    dtype = dtype or (torch.bfloat16 if M.is_cuda else M.dtype)
    return polynomial_polar(M, COEFFICIENTS[method], dtype).to(M.dtype)


def unit_norm(M: Tensor, safety: float = 1.0) -> Tensor:
    """M / (safety · ‖M‖_F), zero where M is; the largest entry is divided out first so that no square under- or
    overflows, whatever M's scale."""
    peak = M.abs().amax(dim=(-2, -1), keepdim=True)
    M = M / torch.where(peak > 0, peak, 1)
    norm = torch.linalg.matrix_norm(M, keepdim=True)
    return M / torch.where(norm > 0, norm * safety, 1)


def polynomial_polar(M: Tensor, coefficients: Coefficients, dtype: torch.dtype) -> Tensor:
    """[..., m, n] -> [..., m, n] in `dtype`, iterating on the smaller side's Gram matrix."""
    tall = M.shape[-2] > M.shape[-1]
    X = unit_norm(M, coefficients.safety).to(dtype)
    X = X.mT if tall else X
    for a, b, c in coefficients.steps:
        A = X @ X.mT
        X = a * X + (b * A + c * (A @ A)) @ X
    return X.mT if tall else X


def svd_polar(M: Tensor) -> Tensor:
    """U Vᵀ over the singular values above max(m, n)·eps·σ₁: the exact duality map of the spectral norm."""
    U, S, Vh = torch.linalg.svd(unit_norm(M), full_matrices=False)
    cutoff = max(M.shape[-2:]) * torch.finfo(S.dtype).eps * S[..., :1]
    kept: Tensor = (S > cutoff) & (S > 0)  # noqa: SIM300
    return torch.matmul(U * kept.to(U.dtype).unsqueeze(-2), Vh)


def project(Z: Tensor, ball: str, radius: float) -> Tensor:
    """The nearest point to each matrix of Z [..., m, n] in a ball of the "frobenius" or "spectral" norm."""
    if ball == "frobenius":
        norm: Tensor = torch.linalg.matrix_norm(Z, keepdim=True)
        return Z * (radius / norm.clamp(min=radius))
    U, S, Vh = torch.linalg.svd(Z, full_matrices=False)
    return Z - torch.matmul(U * (S - radius).clamp(min=0).unsqueeze(-2), Vh)
