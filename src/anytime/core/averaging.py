"""The schedule-free average: η_t, c_t, β_t, and the maps between x, y and z.

One difference d = z − x is stored beside y, so that

    x = y − (1 − β) d        z = y + β d

hold without a division for every β, 0 included, and a new parameter's whole state is zeros. β is the one that formed
y; it may change from step to step. All scalars are tensors on the parameter's device: whether a step counts (`ok`) is
known there alone, and a step that does not count multiplies every change by zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = list[Tensor] | tuple[Tensor, ...]


@dataclass(frozen=True)
class Clock:
    """Scalars of one step for B parameters, each a vector [B]; a step that does not count has η = c = 0 and β' = β."""

    weight_sum: Tensor
    eta: Tensor
    c: Tensor
    beta: Tensor
    beta_next: Tensor


def scalar_dtype(device: torch.device) -> torch.dtype:
    """Step counts and sums of weights are float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def falling(t: Tensor, power: float, start: int) -> Tensor:
    """1 up to step `start`, then ((start − 1)/(t − 1))^power."""
    factor: Tensor = ((start - 1) / (t - 1).clamp(min=start - 1)) ** power
    return factor


def growing(t: Tensor, beta: float | Tensor, power: float, start: int) -> Tensor:
    """β_t, or μ_t: `beta` up to step `start`, then 1 − ((start − 1)/(t − 1))^power (1 − beta); constant at power 0.

    For β the rule of AMUSE (arXiv 2605.22432).
    """
    if power == 0:
        return torch.zeros_like(t) + beta
    return 1 - falling(t, power, start) * (1 - beta)


def warmed_up(t: Tensor, lr: float | Tensor, warmup_steps: int) -> Tensor:
    """η_t = η min(1, t / T_warmup)."""
    return lr * (t / warmup_steps).clamp(max=1) if warmup_steps > 0 else lr * torch.ones_like(t)


def faded(t: Tensor, decay: float, steps: int) -> Tensor:
    """λ_t = λ T / (T + t), for T steps."""
    return decay * steps / (steps + t)


def opposed(u: Tensor, at: Tensor) -> Tensor:
    """Where `at` grows when u is subtracted: their signs differ. Cautious decay (arXiv 2510.12402) spares these."""
    return ((u > 0) & (at < 0)) | ((u < 0) & (at > 0))


def tick(
    t: Tensor,
    weight_sum: Tensor,
    beta: Tensor,
    eta: Tensor,
    ok: Tensor,
    *,
    averaging_power: float,
    averaging_warmup: int,
    beta_start: float | Tensor,
    beta_growth: float,
    beta_growth_start: int,
    weighs: Tensor | None = None,
) -> Clock:
    """The scalars of step number t at rate η_t: weight w = η_t² t^r and c = w / Σw, with c = 1 and no sum
    during the average's warmup. `weighs` takes η_t's place in the weight."""
    averages = t > averaging_warmup
    w = torch.where(averages, (eta if weighs is None else weighs).square() * t**averaging_power, 0) * ok
    weight_sum = weight_sum + w
    c = torch.where(averages & (weight_sum > 0), w / torch.where(weight_sum > 0, weight_sum, 1), 1)
    beta_next = growing(t + 1, beta_start, beta_growth, beta_growth_start)
    return Clock(
        weight_sum=weight_sum,
        eta=eta * ok,
        c=c * ok,
        beta=beta,
        beta_next=torch.where(ok > 0, beta_next, beta),
    )


def x_of(y: Tensor, d: Tensor, beta: Tensor) -> Tensor:
    return torch.addcmul(y, d, (1 - beta).to(y.dtype), value=-1)


def z_of(y: Tensor, d: Tensor, beta: Tensor) -> Tensor:
    return torch.addcmul(y, d, beta.to(y.dtype))


def advance_(y: Tensors, d: Tensors, dz: Tensors, c: Tensor, beta: Tensor, beta_next: Tensor) -> None:
    """z' = z + dz, x' = (1 − c) x + c z', y' = (1 − β') z' + β' x' of B tensors, written on y and d in place.

    With k = 1 − β'(1 − c): y' = y + (β − β'(1 − c)) d + k dz and d' = (1 − c)(d + dz), all increments, so that y does
    not lose digits to x and z. c, β and β' are vectors [B].
    """
    keep, dtype = beta_next * (1 - c), y[0].dtype
    torch._foreach_addcmul_(y, d, (beta - keep).to(dtype).unbind())
    torch._foreach_addcmul_(y, dz, (1 - keep).to(dtype).unbind())
    torch._foreach_add_(d, dz)
    torch._foreach_mul_(d, (1 - c).to(dtype).unbind())
