"""Weight decay in the fast iterate: how far Z, X and Y go, and where the norm of Z settles.

Z_{t+1} = (1 − ηλ) Z_t − η̂_t P̂_t with η̂_t ‖P̂_t‖_F = uη√(mn): every update has root mean square uη, u = 0.2 in the
paper (`update_rms`). ρ_t = ‖Z_t‖_F/√(mn), α_t is the cosine of Z_t and P̂_t. With decay at Y, Z_{t+1} = Z_t − ηλ Y_t −
η̂_t P̂_t, and D_t = Z_t − X_t.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .checks import choice, number, whole

# -------------------------------------------------------------- decay at Z


def z_limit(decay: float, m: int, n: int, *, update_rms: float = 0.2) -> float:
    """u√(mn)/λ, what the upper limit of ‖Z_t‖_F is at most [lem:Z-bounded]; reached where P̂ stays the same."""
    number("decay", decay, "(0, ∞)")
    number("update_rms", update_rms, "(0, ∞)")
    return update_rms * math.sqrt(whole("m", m, 1) * whole("n", n, 1)) / decay


def z_bound(t: int, first: float, eta: float, decay: float, m: int, n: int, *, update_rms: float = 0.2) -> float:
    """What ‖Z_t‖_F is at most: ‖Z_0‖ (1 − ηλ)^t + u√(mn)/λ [lem:Z-bounded]. first: ‖Z_0‖_F.

    It holds in warmup too where decay warms up with the step, with Π (1 − η_s λ) in place of the power.
    """
    return number("first", first, "[0, ∞)") * _keep(eta, decay) ** whole("t", t, 0) + z_limit(
        decay, m, n, update_rms=update_rms
    )


def x_bound(t: int, first: float, eta: float, decay: float, m: int, n: int, *, update_rms: float = 0.2) -> float:
    """What ‖X_t‖_F is at most, X_t the mean of Z_1, …, Z_t: the mean of their bounds.

    The lemma says that X and Y "satisfy the same bound" as Z. They do in the limit; at a finite t they satisfy the mean
    of the bounds, since (1 − ηλ)^s is larger for the earlier Z_s: m = n = η = 1, λ = 1/2, Z_0 = 10 and P̂ = 1 give
    Z = 4.8, 2.2, 0.9, so X_3 = 2.63 where z_bound is 1.65.
    """
    limit = z_limit(decay, m, n, update_rms=update_rms)
    if whole("t", t, 0) == 0:
        return number("first", first, "[0, ∞)") + limit
    keep = _keep(eta, decay)
    powers = keep * (1 - keep**t) / (eta * decay)  # keep + … + keep^t
    return number("first", first, "[0, ∞)") * powers / t + limit


def y_bound(
    t: int, first: float, eta: float, decay: float, m: int, n: int, beta: float, *, update_rms: float = 0.2
) -> float:
    """What ‖Y_t‖_F is at most: (1 − β) z_bound + β x_bound."""
    number("beta", beta, "[0, 1]")
    z = z_bound(t, first, eta, decay, m, n, update_rms=update_rms)
    return (1 - beta) * z + beta * x_bound(t, first, eta, decay, m, n, update_rms=update_rms)


def rho_step(rho: float, alpha: float, eta: float, decay: float, *, update_rms: float = 0.2) -> float:
    """ρ_{t+1}, of ρ_{t+1}² = (1 − ηλ)² ρ_t² − 2uη (1 − ηλ) α_t ρ_t + u²η² [eq:rho-dynamics, u = 0.2].

    At constant α it contracts by 1 − ηλ or more: |dρ_{t+1}/dρ_t| ≤ 1 − ηλ everywhere.
    """
    kept, u = _keep(eta, decay) * number("rho", rho, "[0, ∞)"), update_rms * eta
    along = kept - u * number("alpha", alpha, "[-1, 1]")
    return math.sqrt(along**2 + u**2 * (1 - alpha**2))


def rho_fixed_point(alpha: float, eta: float, decay: float, *, update_rms: float = 0.2) -> float:
    """The ρ that `rho_step` leaves as it is, exactly: with k = 1 − ηλ,
    λρ = u [−kα + √(k²α² + ηλ(2 − ηλ))]/(2 − ηλ).
    """
    k, e = _keep(eta, decay), eta * decay
    b = k * number("alpha", alpha, "[-1, 1]")
    root = math.sqrt(b**2 + e * (2 - e))
    # −b + root without cancellation where b > 0.
    top = e * (2 - e) / (b + root) if b > 0 else root - b
    return update_rms * top / (2 - e) / decay


def rho_quasi_steady(alpha: float, eta: float, decay: float, *, update_rms: float = 0.2) -> float:
    """The paper's ρ: λρ = (u/2) [−α + √(α² + 2ηλ)] [lem:Z-steady-state], `rho_fixed_point` to first order in ηλ.

    At α = −1 it is above u/λ, which no Z passes in the limit [lem:Z-bounded]; the exact one is u/λ there.
    """
    _keep(eta, decay)
    number("alpha", alpha, "[-1, 1]")
    root = math.sqrt(alpha**2 + 2 * eta * decay)
    top = 2 * eta * decay / (alpha + root) if alpha > 0 else root - alpha
    return update_rms / 2 * top / decay


def _keep(eta: float, decay: float) -> float:
    """1 − ηλ, for 0 < ηλ < 1."""
    number("eta", eta, "(0, ∞)")
    number("decay", decay, "(0, ∞)")
    return 1 - number("eta · decay", eta * decay, "(0, 1)")


# -------------------------------------------------------------- decay at Y


def y_decay_matrix(eta: float, decay: float, beta: float, c: float = 0.0, *, of: str = "iterates") -> Tensor:
    """[2, 2], the map of (Z_t, D_t) to (Z_{t+1}, D_{t+1}) without the update, or of their norms' bounds.

    of: "iterates", the recursion itself, with −(1 − c)ηλ below on the left; "bound", what the triangle inequality makes
    of it, with a plus there [eq:wd-y-triangle].
    """
    choice("of", of, ("iterates", "bound"))
    _keep(eta, decay)
    number("beta", beta, "[0, 1]")
    number("c", c, "[0, 1]")
    e, sign = eta * decay, 1 if of == "bound" else -1
    return torch.tensor([[1 - e, e * beta], [sign * (1 - c) * e, (1 - c) * (1 + e * beta)]], dtype=torch.float64)


def y_decay_eigenvalues(eta: float, decay: float, beta: float, *, of: str = "iterates") -> tuple[float, float]:
    """The eigenvalues of `y_decay_matrix` as c → 0, the larger first.

    of: "bound", 1 + ηλ/2 (±√(1 + 6β + β²) − (1 − β)), the first of which the paper calls leading and which is above 1
    for β > 0: of the triangle inequality's bound, not of the iterates. "iterates": 1, along Y = 0, and 1 − ηλ(1 − β).
    """
    choice("of", of, ("iterates", "bound"))
    _keep(eta, decay)
    e, gap = eta * decay, 1 - number("beta", beta, "[0, 1]")
    if of == "iterates":
        return 1.0, 1 - e * gap
    root = math.sqrt(1 + 6 * beta + beta**2)
    return 1 + e / 2 * (root - gap), 1 + e / 2 * (-root - gap)


def z_worst_with_y_decay(
    t: int, first: float, eta: float, decay: float, m: int, n: int, beta: float, *, update_rms: float = 0.2
) -> float:
    """The largest ‖Z_t‖_F that any directions P̂_0, …, P̂_{t−1} can make with decay at Y, exactly; c = 1/(s + 1).

    Z_t = a Z_0 − Σ_s a_s η̂_s P̂_s is linear with numbers for coefficients, so it is |a| ‖Z_0‖ + uη√(mn) Σ_s |a_s|. It
    stays bounded as t grows for β < 1, below (1 + β)/(1 − β) u√(mn)/λ as far as computed, where what
    `z_triangle_with_y_decay` gives grows without end.
    """
    size = z_limit(decay, m, n, update_rms=update_rms) * eta * decay
    e, z, d, total = eta * decay, 1.0, 0.0, 0.0  # Z_t = z Z_s + d D_s + …, from s = t down to 0, where D_0 = 0
    y_decay_matrix(eta, decay, beta)
    for s in reversed(range(whole("t", t, 0))):
        kept = s / (s + 1) * d
        total += abs(z + kept)
        z, d = (1 - e) * z - e * kept, e * beta * z + (1 + e * beta) * kept
    return abs(z) * number("first", first, "[0, ∞)") + size * total


def z_triangle_with_y_decay(
    t: int, first: float, eta: float, decay: float, m: int, n: int, beta: float, *, update_rms: float = 0.2
) -> float:
    """What the triangle inequality makes of ‖Z_t‖_F with decay at Y [eq:wd-y-triangle]; c = 1/(s + 1)."""
    size = z_limit(decay, m, n, update_rms=update_rms) * eta * decay
    y_decay_matrix(eta, decay, beta)
    e, z, d = eta * decay, number("first", first, "[0, ∞)"), 0.0
    for s in range(whole("t", t, 0)):
        z, d = (1 - e) * z + e * beta * d + size, s / (s + 1) * (e * z + (1 + e * beta) * d + size)
    return z
