"""What a step does to lists of tensors, where no kernel does it: from gradients to the new y, z and parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..core import averaging
from ..core.averaging import Tensors
from ..core.direction import Parts
from ..core.layout import Layout
from ..core.polar import project
from ..distributed.parts import local
from .groups import Group


def all_finite(grads: list[Tensor]) -> Tensor:
    """Whether gradients of one device are all finite, there."""
    grads = [grad for grad in grads if grad.numel()] or [grads[0].new_zeros(1)]  # a part may be empty
    if grads[0].device.type == "cpu":  # its norm of infinite order is not vectorized
        return torch.stack([end for g in grads for end in torch.aminmax(g)]).isfinite().all()
    return torch.stack(list(torch._foreach_norm(grads, float("inf")))).isfinite().all()


def compute_dtype(p: Tensor) -> torch.dtype:
    """The precision of an update: the parameter's, float32 at least."""
    return torch.promote_types(p.dtype, torch.float32)


def precise_y(p: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Y in the precision of the update: the parameter itself, or a new tensor where the parameter is narrower."""
    return p.detach() if "residual" not in state else p.to(state["residual"].dtype) + state["residual"]


def placed_as(p: Tensor, grad: Tensor) -> Tensor:
    """The part of a sharded parameter's gradient that belongs to the part held here."""
    if grad.placements != p.placements:  # type: ignore[attr-defined]
        grad = grad.redistribute(p.device_mesh, p.placements)  # type: ignore[attr-defined]
    return local(grad)


def where_ok(grads: list[Tensor], ok: Tensor) -> list[Tensor]:
    """Gradients, or zeros if the step does not count: bit by bit, for what is not finite must not reach the buffers
    even times zero. (On a CPU torch.where takes six times as long.)"""
    bits = {4: torch.int32, 8: torch.int64}[grads[0].element_size()]
    mask = -ok.to(bits)
    return [(grad.view(bits) & mask).view(grad.dtype) for grad in grads]


def chunks(params: Sequence[Tensor], size: int = 1 << 18) -> Iterator[slice]:
    """Parameters that follow each other, as many as stay in a cache while they are passed over."""
    first, count = 0, 0
    for i, p in enumerate(params):
        if count and count + p.numel() > size:
            yield slice(first, i)
            first, count = i, 0
        count += p.numel()
    yield slice(first, len(params))


def fast_step(
    y: Tensors, z: Tensors, U: Tensors, eta: Tensor, decay: Sequence[float] | Tensor, group: Group
) -> Tensors:
    """z' − z = −η (U + λ z or y). Cautious decay spares what U enlarges."""
    dtype = y[0].dtype
    if group["weight_decay"] and group.get("decay_at", "z") is not None:
        at = y if group.get("decay_at") == "y" else z
        if group.get("cautious"):
            at = [a.masked_fill(averaging.opposed(u, a), 0) for u, a in zip(U, at, strict=True)]
        if isinstance(decay, Tensor):
            U = torch._foreach_addcmul(U, at, decay.to(dtype).unbind())
        else:
            U = torch._foreach_add(U, at, alpha=decay[0])
    return torch._foreach_mul(U, (-eta).to(dtype).unbind())


def confined(Z: list[Tensor], layouts: list[Layout], parts: Parts | None, group: Group) -> list[Tensor]:
    """Each matrix of Z in the ball that the group asks for."""

    def inside(tensors: list[Tensor], layouts: list[Layout]) -> list[Tensor]:
        return [
            layout.join(
                [project(piece, group["projection"], group["radius"]) for piece in layout.pieces(tensor)], tensor.shape
            )
            for tensor, layout in zip(tensors, layouts, strict=True)
        ]

    return inside(Z, layouts) if parts is None else parts.whole(inside, Z)


def write_(p: Tensor, y: Tensor, state: dict[str, Tensor]) -> None:
    """p ← y where p is narrower, so that y is a tensor of its own; what rounding takes away goes to the residual."""
    if "residual" in state:
        p.copy_(y)
        state["residual"].copy_(y.sub_(p.to(y.dtype)))
