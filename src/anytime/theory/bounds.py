"""What the paper's appendix proves of SF-SpectralSGD and its main text of SF-SGD, one function a statement.

The iterates, t = 0, 1, …, from X_0 = Z_0 and M_0 = G_0:

    Y_t = β X_t + (1 − β) Z_t        M_t = μ M_{t−1} + (1 − μ) G_t        P_t = polar(M_t)
    Z_{t+1} = Z_t − η P_t            X_{t+1} = (t X_t + Z_{t+1}) / (t + 1)

G_t is the mean of B stochastic gradients at Y_t, g_t = ∇f(Y_t), S_t = Z_t − Y_t, ‖·‖_* the nuclear norm. Labels in
brackets are the paper's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.polar import svd_polar
from .checks import choice, number, whole

NORMS = ("frobenius", "spectral")


@dataclass(frozen=True)
class Constants:
    """What the theorems assume of a function and of the points visited.

    norm: in which smoothness and diameter are measured: "frobenius" [eq:frobenius_smoothness, eq:diameter_frobenius]
        or "spectral" [eq:spectral_smoothness, eq:diameter_spectral].
    delta: Δ = f(Y_0) − f*, f* = f(W*) ≤ f and ∇f(W*) = 0.
    smoothness: L_F of ‖∇f(U) − ∇f(V)‖_F ≤ L_F ‖U − V‖_F, or L_S of ‖∇f(U) − ∇f(V)‖_* ≤ L_S ‖U − V‖_op.
    diameter: D_F or D_S: ‖W*‖ and every ‖Z_t‖ are at most D/2.
    rank: r = min(m, n).
    sigma: σ of E‖G_t − g_t‖_F² ≤ σ²/B [eq:variance_assumption_common], of Frobenius norm in both cases.
    batch: B.
    """

    norm: str
    delta: float
    smoothness: float
    diameter: float
    rank: int
    sigma: float = 0.0
    batch: int = 1

    def __post_init__(self) -> None:
        choice("norm", self.norm, NORMS)
        number("delta", self.delta, "[0, ∞)")
        number("smoothness", self.smoothness, "(0, ∞)")
        number("diameter", self.diameter, "(0, ∞)")
        whole("rank", self.rank, 1)
        number("sigma", self.sigma, "[0, ∞)")
        whole("batch", self.batch, 1)

    @property
    def root(self) -> float:
        """What ‖P‖ is at most: √r in Frobenius norm, 1 in spectral norm."""
        return math.sqrt(self.rank) if self.norm == "frobenius" else 1.0

    @property
    def noise(self) -> float:
        """√r σ/√B, what the noise of one gradient is at most in nuclear norm, on average."""
        return math.sqrt(self.rank / self.batch) * self.sigma


@dataclass(frozen=True)
class Bound:
    """The terms of a stationarity bound, each with its 1/(1 − β).

    descent: of Δ and of the drift's sums, over Tη. step: of η alone. tracking: of η through the momentum. drift: of
    log(eT)/T. noise: what stays of σ. first: of the noise of the first gradient, over T.
    """

    descent: float
    step: float
    tracking: float
    drift: float
    noise: float
    first: float

    @property
    def total(self) -> float:
        return self.descent + self.step + self.tracking + self.drift + self.noise + self.first


# ------------------------------------------------------------ stationarity


def log_e(T: int) -> float:
    """log(eT), which 1 + 1/2 + … + 1/T never passes."""
    return 1 + math.log(whole("T", T, 1))


def stationarity(constants: Constants, T: int, eta: float, mu: float, beta: float) -> Bound:
    """Of (1/T) Σ_{t<T} E‖∇f(Y_t)‖_*, at any β in [0, 1) [thm:Y_stationarity_frobenius_noisy_reorg,
    thm:Y_stationarity_spectral_noisy_reorg].

    The main text's theorem [thm:sf_spectral_descent] has `step` and `tracking` twice as large: see main_text.
    """
    return _stationarity(constants, T, eta, mu, beta, 2 * constants.diameter)


def stationarity_beta_zero(constants: Constants, T: int, eta: float, mu: float) -> Bound:
    """The same at β = 0, where S_t = 0: no logarithm and no diameter [eq:frobenius_beta_zero_bound,
    eq:spectral_beta_zero_bound]."""
    return _stationarity(constants, T, eta, mu, 0.0, 0.0)


def stationarity_sharper(constants: Constants, T: int, eta: float, mu: float, beta: float) -> Bound:
    """Not in the paper: its proof with ‖S_t‖ = β‖Z_t − X_t‖ ≤ βD, which the diameter gives, in place of 2D.

    It is never above `stationarity` and is `stationarity_beta_zero` at β = 0.
    """
    return _stationarity(constants, T, eta, mu, beta, beta * constants.diameter)


def _stationarity(c: Constants, T: int, eta: float, mu: float, beta: float, s: float) -> Bound:
    """The proof of both theorems for ‖S_t‖ ≤ s."""
    number("eta", eta, "(0, ∞)")
    number("mu", mu, "[0, 1)")
    number("beta", beta, "[0, 1)")
    L, D, log = c.smoothness, c.diameter, log_e(T)
    over = 1 / (1 - beta)
    return Bound(
        descent=over * (c.delta + L * D * s * log + L * s**2 * math.pi**2 / 12) / (T * eta),
        step=over * L * c.root**2 * eta / 2,
        tracking=over * 2 * mu * L * c.root**2 * eta / (1 - mu),
        drift=over * L * s * c.root * log / T * (1 + 2 * mu / (1 - mu)),
        noise=over * 2 * c.noise * math.sqrt((1 - mu) / (1 + mu)),
        first=over * 2 * c.noise / ((1 - mu) * T),
    )


def main_text(constants: Constants, T: int, eta: float, mu: float, beta: float) -> float:
    """The right side of the main text's theorem [thm:sf_spectral_descent], for Frobenius smoothness: the appendix's
    with its terms in η doubled, hence weaker."""
    if constants.norm != "frobenius":
        raise ValueError(f"norm is {constants.norm!r}; the main text's theorem is of 'frobenius'")
    bound = stationarity(constants, T, eta, mu, beta)
    return bound.total + bound.step + bound.tracking


def one_step(
    constants: Constants, t: int, eta: float, beta: float, f: float, gradient: float, tracking: float
) -> float:
    """What f(Y_{t+1}) is at most after step t ≥ 0 [eq:one_step_frobenius_reorg, eq:one_step_spectral_reorg].

    f: f(Y_t). gradient: ‖g_t‖_*. tracking: ‖g_t − M_t‖_*. It holds of every step of every run, without expectations.
    """
    c, D = constants, constants.diameter
    number("eta", eta, "(0, ∞)")
    number("beta", beta, "[0, 1)")
    step = increment_bound(constants, t, eta)
    descent = -eta * (1 - beta) * gradient + 2 * eta * tracking
    return f + descent + 2 * c.smoothness * D**2 / (t + 1) + c.smoothness / 2 * step**2


# --------------------------------------------------------- tuned constants


@dataclass(frozen=True)
class Tuned:
    """μ_T and η_T; alpha is 1 − μ_T."""

    mu: float
    eta: float

    @property
    def alpha(self) -> float:
        return 1 - self.mu


def a_of(constants: Constants, T: int) -> float:
    """A_T = Δ + 2 L D² (log(eT) + π²/6), of the proofs of cor:frobenius_tuned_rates and cor:spectral_tuned_rates."""
    c = constants
    return c.delta + 2 * c.smoothness * c.diameter**2 * (log_e(T) + math.pi**2 / 6)


def best_eta(constants: Constants, T: int, mu: float, *, beta_zero: bool = False) -> float:
    """η that makes `stationarity` least at this μ [eq:frobenius_eta_star_alpha, eq:spectral_eta_star_alpha], or
    `stationarity_beta_zero`, where Δ stands in place of A_T."""
    c, alpha = constants, 1 - number("mu", mu, "[0, 1)")
    A = _numerator(c, T, beta_zero)
    return math.sqrt(2 * A * alpha / (c.smoothness * c.root**2 * T * (4 - 3 * alpha)))


def tuned(constants: Constants, T: int, *, beta_zero: bool = False) -> Tuned:
    """(μ_T, η_T) of the corollaries, the same at every β; noiseless at σ = 0, where μ_T = 0
    [eq:frobenius_mu_eta_choice, eq:frobenius_eta_star_noiseless and their spectral twins].

    beta_zero: the choice of part (iii), for `stationarity_beta_zero`.
    μ_T = 1 − α_T, α_T = min(1, 2 √(A L B/(σ² T))) in Frobenius and 2 √(A L B/(r σ² T)) in spectral norm: this makes the
    two leading terms equal and their sum least as α → 0, not the whole bound at a given T.
    """
    c = constants
    alpha = 1.0
    if c.sigma > 0:
        A = _numerator(c, T, beta_zero)
        alpha = min(1.0, 2 * c.root * math.sqrt(A * c.smoothness / T) / c.noise)
    mu = 1 - alpha
    return Tuned(mu=mu, eta=best_eta(c, T, mu, beta_zero=beta_zero))


def rate(constants: Constants, T: int, beta: float) -> float:
    """`stationarity` at (μ_T, η_T): O((log T/T)^¼), or O((log T/T)^½) at σ = 0 [eq:frobenius_plugged_alpha and
    eq:spectral_plugged_alpha at α_T]."""
    at = tuned(constants, T)
    return stationarity(constants, T, at.eta, at.mu, beta).total


def rate_beta_zero(constants: Constants, T: int) -> float:
    """`stationarity_beta_zero` at its own (μ_T, η_T): O(T^−¼), or √(2 L Δ/T), times √r in Frobenius norm, at σ = 0
    [eq:frobenius_rate_beta_zero_noisy, eq:frobenius_rate_beta_zero_noiseless and their spectral twins]."""
    at = tuned(constants, T, beta_zero=True)
    return stationarity_beta_zero(constants, T, at.eta, at.mu).total


def leading_rate(constants: Constants, T: int, beta: float, *, beta_zero: bool = False) -> float:
    """What `rate` (or `rate_beta_zero`) tends to: 4 (A L r σ² ρ²/(B T))^¼/(1 − β), or √(2 A L ρ²/T)/(1 − β) at σ = 0,
    with ρ² = r in Frobenius and 1 in spectral norm. The logarithm is in A_T alone."""
    c = constants
    over = 1 / (1 - number("beta", beta, "[0, 1)"))
    AL = _numerator(c, T, beta_zero) * c.smoothness * c.root**2 / T
    return over * (4 * (AL * c.noise**2) ** 0.25 if c.sigma > 0 else math.sqrt(2 * AL))


def _numerator(constants: Constants, T: int, beta_zero: bool) -> float:
    if not beta_zero:
        return a_of(constants, T)
    whole("T", T, 1)
    return number("delta", constants.delta, "(0, ∞)")


# ----------------------------------------------------------------- lemmas


def next_s(S: Tensor, P: Tensor, t: int, eta: float, beta: float) -> Tensor:
    """S_{t+1} = t/(t+1) (S_t − β η P_t), t ≥ 0 [lem:iterate_identities, eq:S_recursion_common]."""
    return (S - beta * eta * P) * (whole("t", t, 0) / (t + 1))


def y_increment(S: Tensor, P: Tensor, t: int, eta: float, beta: float) -> Tensor:
    """Y_{t+1} − Y_t = S_t/(t+1) − η (1 − β + β/(t+1)) P_t, t ≥ 0 [lem:iterate_identities, eq:Y_increment_common]."""
    return S / (whole("t", t, 0) + 1) - eta * (1 - beta + beta / (t + 1)) * P


def increment_bound(constants: Constants, t: int, eta: float) -> float:
    """What ‖Y_{t+1} − Y_t‖ is at most: 2D/(t+1) + η, times √r for η in Frobenius norm [eq:Y_increment_frobenius,
    eq:Y_increment_spectral]. 2D is of ‖S_t‖, which is in fact at most βD."""
    return 2 * constants.diameter / (whole("t", t, 0) + 1) + number("eta", eta, "(0, ∞)") * constants.root


def averaged_step(X: Tensor, Z: Tensor, U: Tensor, eta: float, c: float) -> Tensor:
    """X_{t+1} = X_t − c η U_t + c (Z_t − X_t), for Z_{t+1} = Z_t − η U_t [app:sf-review].

    The main text [eq:lr_effective_xz, and again in sec:sf-wd] prints Z_{t+1} in the last bracket, which counts U twice.
    """
    return X - number("c", c, "[0, 1]") * eta * U + c * (Z - X)


def shares(T: int) -> Tensor:
    """[T]: (T − s)/T, the part of step s = 0, …, T − 1 that is in X_T: X_T = Z_0 − η Σ_s share_s U_s.

    The factor ηc = η/(t+1) of `averaged_step`, the paper's effective rate, is how much of a step enters at once; the
    rest of it follows through Z − X, so the last step has share 1/T and the first all of it.
    """
    return torch.arange(whole("T", T, 1), 0, -1, dtype=torch.float64) / T


def polar_alignment(g: Tensor, M: Tensor) -> tuple[Tensor, Tensor]:
    """⟨g, polar(M)⟩, and ‖g‖_* − 2‖g − M‖_*, which it is at least [lem:polar_alignment]; of each matrix [..., m, n]."""
    product = (g * svd_polar(M)).sum(dim=(-2, -1))
    return product, nuclear(g) - 2 * nuclear(g - M)


def ema_error_at(constants: Constants, t: int, mu: float) -> float:
    """What √(E‖E_t‖_F²) is at most, E_t = C_t − M_t the noise in the momentum, C_t the momentum of the g_t
    [proof of lem:ema_noise, before the roots are taken apart]: with equality where every gradient's noise has variance
    σ²/B and is independent of the others."""
    number("mu", mu, "[0, 1)")
    start = mu ** (2 * whole("t", t, 0))
    return constants.sigma / math.sqrt(constants.batch) * math.sqrt(start + (1 - mu) / (1 + mu) * (1 - start))


def ema_error(constants: Constants, T: int, mu: float) -> float:
    """What (1/T) Σ_{t<T} E‖E_t‖_* is at most [lem:ema_noise, eq:E_avg_common]."""
    number("mu", mu, "[0, 1)")
    return constants.noise * (1 / ((1 - mu) * whole("T", T, 1)) + math.sqrt((1 - mu) / (1 + mu)))


def tracking_error(constants: Constants, T: int, eta: float, mu: float) -> float:
    """What (1/T) Σ_{t<T} E‖g_t − M_t‖_* is at most [lem:tracking_frobenius, lem:tracking_spectral]."""
    c, log = constants, log_e(T)
    lag = mu * c.smoothness * c.root / (1 - number("mu", mu, "[0, 1)"))
    return lag * (number("eta", eta, "(0, ∞)") * c.root + 2 * c.diameter * log / T) + ema_error(c, T, mu)


def nuclear(A: Tensor) -> Tensor:
    """‖A‖_* of each matrix [..., m, n]."""
    result: Tensor = torch.linalg.svdvals(A).sum(-1)
    return result


def shortest_horizon() -> int:
    """The least T at which the noiseless η_T [eq:frobenius_eta_star_noiseless, eq:spectral_eta_star_noiseless] can be
    what the theorems assume: one step of full rank is ‖Z_1 − Z_0‖ = η_T ρ ≤ D only where T ≥ 4 (log(eT) + π²/6), since
    A_T > 2 L D² (log(eT) + π²/6)."""
    T = 1
    while 4 * (log_e(T) + math.pi**2 / 6) > T:
        T += 1
    return T


# ----------------------------------------------------------------- SF-SGD


def sgd_eta(T: int, D: float, G: float) -> float:
    """η = D/(G √T) [app:sf-review]."""
    return number("D", D, "(0, ∞)") / (number("G", G, "(0, ∞)") * math.sqrt(whole("T", T, 1)))


def sgd_bound(T: int, D: float, G: float, eta: float | None = None, *, average: str = "main") -> float:
    """What E[F(x_T) − F(x*)] is at most for convex F, any β in [0, 1] [app:sf-review]: D G/√T at η = D/(G √T), and
    D²/(2ηT) + ηG²/2 at any other.

    D = ‖x_1 − x*‖; E‖g_t‖² ≤ G². average: "main", x_T is the mean of z_1, …, z_T, the first of which is the start, as
    the statement has it (c_{t+1} = 1/(t+1) from t = 1); "appendix", x_T is the mean of the T points after the start,
    as X of Algorithm 1 and of this package: one more gradient is in it, and ηG²/(2T) is added (D G/(2 T^{3/2})).
    """
    choice("average", average, ("main", "appendix"))
    eta = sgd_eta(T, D, G) if eta is None else number("eta", eta, "(0, ∞)")
    number("D", D, "(0, ∞)")
    number("G", G, "(0, ∞)")
    gradients = whole("T", T, 1) + (average == "appendix")
    return (D**2 / eta + gradients * eta * G**2) / (2 * T)
