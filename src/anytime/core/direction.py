"""What turns gradients into a step: each direction maps G to U, and the fast iterate moves by −η_t (U + λ ·).

Every direction works on a batch of parameters of one device and dtype and keeps its own buffers, which start at zero
and change by `Batch.ema_` alone: a step that does not count leaves them as they are, bit for bit.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from .averaging import Tensors, growing
from .layout import Layout
from .polar import at_once, polar, svd_polar, unit_norm

Options = Mapping[str, Any]
Buffers = dict[str, tuple[tuple[int, ...], torch.dtype | None]]
Stacked = Callable[[Tensor, Sequence[tuple[int, int]]], Tensor]  # of matrices [B, m, n], and where they come from


class Parts(Protocol):
    """Parameters held here in part only: what a direction may ask of those who hold the rest."""

    layouts: list[Layout]  # of the parts held here
    sides: list[list[tuple[int, int]]]  # of each member, (m, n) of its whole pieces

    def whole(self, f: Callable[[list[Tensor], list[Layout]], list[Tensor]], parts: Sequence[Tensor]) -> list[Tensor]:
        """f of whole matrices, in the parts held here."""

    def sum_(self, kind: str, values: Sequence[Sequence[Tensor]]) -> None:
        """Adds up in place what the holders of other rows ("row") or columns ("column") have; a list a member."""

    def everywhere(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The whole tensors."""

    def here(self, wholes: Sequence[Tensor]) -> list[Tensor]:
        """Of whole tensors, the parts held here."""


@dataclass(frozen=True)
class Batch:
    """Gradients (in the precision of the update, zero in a skipped step) with what their parameters have.

    t [B] is the number of this step; ok is 1 where the step counts and 0 where it is skipped. Where all of this is of
    parts, `parts` knows the rest.
    """

    grads: list[Tensor]
    states: Sequence[dict[str, Tensor]]
    layouts: Sequence[Layout]
    options: Options
    t: Tensor
    ok: Tensor
    parts: Parts | None = None

    def __iter__(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        return iter(zip(self.grads, self.states, strict=True))

    def whole(self, f: Callable[[list[Tensor], list[Layout]], list[Tensor]], tensors: Sequence[Tensor]) -> list[Tensor]:
        """f of the whole matrices of parameters, though only parts of them may be held here."""
        return f([*tensors], [*self.layouts]) if self.parts is None else self.parts.whole(f, tensors)

    def weights(self, decay: float | Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(a, b) of m ← a m + b g: (decay, 1 − decay), or (1, 0) where the step is skipped."""
        take = (1 - decay) * self.ok
        return (1 - take).to(dtype), take.to(dtype)

    def ema_(self, name: str, values: Tensors, decay: float | Tensor) -> list[Tensor]:
        """m ← decay·m + (1 − decay)·value for the buffer of that name; returned in the values' precision.

        A buffer narrower than the values is rounded, and what is stored is what is returned.
        """
        _, take = self.weights(decay, values[0].dtype)
        takes = take.expand(len(values)).unbind()
        out = []
        for state, value, b in zip(self.states, values, takes, strict=True):
            buffer = state[name]
            if buffer.dtype == value.dtype:
                out.append(buffer.lerp_(value, b))
            else:
                buffer.copy_(buffer.to(value.dtype).lerp_(value, b))
                out.append(buffer.to(value.dtype))
        return out


class Direction(ABC):
    """A gradient's way to a step. Stateless itself: buffers live with the parameter, settings in its group."""

    #: Whether what needs a matrix as a whole asks for it by `Batch.whole`; else no sharded matrix is taken.
    shardable = False

    @abstractmethod
    def __call__(self, batch: Batch) -> list[Tensor]:
        """U for each parameter, in the gradients' precision."""

    def buffers(self, shape: tuple[int, ...], layout: Layout, options: Options) -> Buffers:
        """Name to (shape, dtype) of the buffers it keeps for a parameter; dtype None is the update's precision."""
        return {}

    def rate(self, t: Tensor, options: Options) -> Tensor | float:
        """A factor of η_t."""
        return 1.0


class Gradient(Direction):
    """U = G."""

    def __call__(self, batch: Batch) -> list[Tensor]:
        return list(batch.grads)


@dataclass(frozen=True)
class Adam(Direction):
    """U = G / (√v + ε), or with the first moment, U = m̂ / (√v̂ + ε).

    `bias_correction` is "rate" (the paper's: √(1 − β2^t) multiplies η_t), "moment" (v is divided by 1 − β2^t, and the
    first moment, where kept, by 1 − β1^t) or None. At β2 = 0 this is m / (|G| + ε): a sign only where m is G.
    """

    first_moment: bool = False

    def buffers(self, shape: tuple[int, ...], layout: Layout, options: Options) -> Buffers:
        second: Buffers = {"second_moment": (shape, None)}
        return {"momentum": (shape, options["momentum_dtype"]), **second} if self.first_moment else second

    def rate(self, t: Tensor, options: Options) -> Tensor | float:
        return (1 - options["betas"][1] ** t).sqrt() if options["bias_correction"] == "rate" else 1.0

    def __call__(self, batch: Batch) -> list[Tensor]:
        beta1, beta2 = batch.options["betas"]
        eps = batch.options["eps"]
        correct = batch.options["bias_correction"] == "moment"
        m: Tensors = batch.ema_("momentum", batch.grads, beta1) if self.first_moment else batch.grads
        v: Tensors = batch.ema_("second_moment", torch._foreach_mul(batch.grads, batch.grads), beta2)
        if correct:
            dtype = batch.grads[0].dtype
            v = torch._foreach_div(v, (1 - beta2**batch.t).to(dtype).unbind())
            if self.first_moment:
                m = torch._foreach_div(m, (1 - beta1**batch.t).to(dtype).unbind())
        return list(torch._foreach_div(m, [_positive(root, eps) for root in torch._foreach_sqrt(v)]))


@dataclass(frozen=True)
class Spectral(Direction):
    """U from the polar factor of the momentum: NorMuon's rows, Muon, or the bare factor.

    Options: momentum and its growth, nesterov, polar, polar_dtype; row_norm with beta2 (or betas[1]) and eps;
    `scaling`, the factor's multiplier: "rms" makes the update's root mean square `update_rms` exactly, "max-side"
    multiplies by update_rms·√max(m, n), "aspect" by √max(1, m/n), None by nothing. `first_gradient` starts the
    momentum at G_1 instead of zero.
    """

    first_gradient: bool = False
    shardable = True

    def buffers(self, shape: tuple[int, ...], layout: Layout, options: Options) -> Buffers:
        momentum: Buffers = {"momentum": (shape, options["momentum_dtype"])}
        return {**momentum, "row_moment": (layout.row_shape(shape), None)} if options["row_norm"] else momentum

    def __call__(self, batch: Batch) -> list[Tensor]:
        options = batch.options
        mu = growing(
            batch.t, options["momentum"], options.get("momentum_growth", 0.0), options.get("momentum_growth_start", 2)
        )
        M = batch.ema_("momentum", batch.grads, (batch.t > 1) * mu if self.first_gradient else mu)
        if options["nesterov"]:
            each = mu.to(M[0].dtype).unbind()
            M = [torch.lerp(g, m, weight) for g, m, weight in zip(batch.grads, M, each, strict=True)]
        if batch.parts is not None:
            return _normalize_parts(batch.parts.whole(partial(_stacked, self._factor(options)), M), batch, batch.parts)
        if not options["row_norm"]:
            return _stacked(lambda S, _: _scaled(self._factor(options)(S, _), options), M, batch.layouts)
        rows = [layout.row_pieces(s["row_moment"]) for s, layout in zip(batch.states, batch.layouts, strict=True)]
        return _stacked(
            lambda S, at: _normalize_rows(self._factor(options)(S, at), [rows[i][j] for i, j in at], batch),
            M,
            batch.layouts,
        )

    @staticmethod
    def _factor(options: Options) -> Stacked:
        return lambda S, _: polar(S, options["polar"], options["polar_dtype"])


def _stacked(f: Stacked, tensors: Sequence[Tensor], layouts: Sequence[Layout]) -> list[Tensor]:
    """f of the matrices of all tensors, those of one shape stacked, as many at once as suits the device."""
    pieces = [layout.pieces(tensor) for tensor, layout in zip(tensors, layouts, strict=True)]
    places: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for i, parts in enumerate(pieces):
        for j, part in enumerate(parts):
            places.setdefault((part.shape[-2], part.shape[-1]), []).append((i, j))
    for shape, same_shape in places.items():
        size = at_once(*shape, tensors[0].device)
        for together in (same_shape[k : k + size] for k in range(0, len(same_shape), size)):
            stack = [pieces[i][j] for i, j in together]
            results = torch.split(f(torch.cat(stack), together), [len(part) for part in stack])
            for (i, j), result in zip(together, results, strict=True):
                pieces[i][j] = result
    return [layout.join(parts, whole.shape) for layout, parts, whole in zip(layouts, pieces, tensors, strict=True)]


def _normalize_parts(P: Sequence[Tensor], batch: Batch, held: Parts) -> list[Tensor]:
    """What `_normalize_rows` and `_scaled` do, for parts of matrices and in place: sums are of the whole."""
    options = batch.options
    pieces = [layout.pieces(part) for part, layout in zip(P, held.layouts, strict=True)]
    squares = [[piece.square().sum(-1) for piece in member] for member in pieces]  # a row
    if options["row_norm"] or options["scaling"] == "rms":
        held.sum_("column", squares)
    factors: list[list[Tensor]] = [[torch.ones_like(q) for q in member] for member in squares]
    if options["row_norm"]:
        a, b = batch.weights(_beta2(options), P[0].dtype)
        for i, (state, layout) in enumerate(zip(batch.states, held.layouts, strict=True)):
            for j, row in enumerate(layout.row_pieces(state["row_moment"])):
                row.mul_(a).addcmul_(squares[i][j] / held.sides[i][j][1], b)
                factors[i][j] = 1 / _positive(row.sqrt(), options["eps"])
    if options["scaling"] == "rms":
        sums = [
            [(q * factor.square()).sum(-1, keepdim=True) for q, factor in zip(*member, strict=True)]
            for member in zip(squares, factors, strict=True)
        ]
        held.sum_("row", sums)
    for i, member in enumerate(pieces):
        for j, (m, n) in enumerate(held.sides[i]):
            factor = _multiplier(m, n, options)
            if options["scaling"] == "rms":
                norm = sums[i][j].sqrt()
                factor = options["update_rms"] * math.sqrt(m * n) / torch.where(norm > 0, norm, 1)
            member[j].mul_((factors[i][j] * factor).unsqueeze(-1))
    return list(P)


def _beta2(options: Options) -> float:
    return float(options["beta2"] if "beta2" in options else options["betas"][1])


def _normalize_rows(P: Tensor, rows: Sequence[Tensor], batch: Batch) -> Tensor:
    """P̂ = P / (√v + ε), scaled, v the running mean square of each row of P [B, m, n]; `rows` [b, m] add up to B.

    What P̂ is to be scaled by follows from its rows too, so that P is read twice in all, and written over.
    """
    m, n = P.shape[-2:]
    a, b = batch.weights(_beta2(batch.options), P.dtype)
    rms = torch.linalg.vector_norm(P, dim=-1) / math.sqrt(n)
    v = torch.cat(list(rows)).mul_(a).addcmul_(rms.square(), b)
    for row, new in zip(rows, torch.split(v, [len(row) for row in rows]), strict=True):
        row.copy_(new)
    root = _positive(v.sqrt(), batch.options["eps"])
    if batch.options["scaling"] == "rms":
        norm = torch.linalg.vector_norm(rms / root, dim=-1, keepdim=True)
        factor = batch.options["update_rms"] * math.sqrt(m) / torch.where(norm > 0, norm, 1)
    else:
        factor = _multiplier(m, n, batch.options)
    return P.mul_((factor / root).unsqueeze(-1))


def _positive(root: Tensor, eps: float) -> Tensor:
    """√v + ε in place, and 1 where that is 0 (at ε = 0): what is divided by it is 0 there."""
    return root.add_(eps) if eps else root.masked_fill_(root == 0, 1)


def _scaled(P: Tensor, options: Options) -> Tensor:
    if options["scaling"] == "rms":
        return unit_norm(P).mul_(options["update_rms"] * math.sqrt(P.shape[-2] * P.shape[-1]))
    return P.mul_(_multiplier(P.shape[-2], P.shape[-1], options)) if options["scaling"] else P


def _multiplier(m: int, n: int, options: Options) -> float:
    """The factor of an m × n matrix under the scalings that do not look at it."""
    if options["scaling"] == "max-side":
        return float(options["update_rms"] * math.sqrt(max(m, n)))
    return math.sqrt(max(1.0, m / n)) if options["scaling"] == "aspect" else 1.0


def duality_map(G: Tensor, norm: str) -> Tensor:
    """argmax ⟨G, U⟩ over ‖U‖ ≤ 1 for each matrix of G [..., m, n]: the steepest direction of a geometry.

    norm: "max" (ℓ1 → ℓ∞, the entrywise maximum) gives sign(G); "spectral" (ℓ2 → ℓ2) the polar factor; "frobenius"
    G / ‖G‖_F.
    """
    maps: dict[str, Callable[[Tensor], Tensor]] = {"max": torch.sign, "spectral": svd_polar, "frobenius": unit_norm}
    if norm not in maps:
        raise ValueError(f"norm is {norm!r}; it must be one of {', '.join(map(repr, maps))}")
    return maps[norm](G)


@dataclass(frozen=True)
class Steepest(Direction):
    """U = duality_map(β1 M + (1 − β1) G), then M ← β2 M + (1 − β2) G: Lion's two timescales in any norm.

    Options: `betas` (β1, β2), or one `momentum` for both (β1 = β2: U of the new M; 0: of the gradient alone).
    """

    norm: str
    shardable = True

    def _betas(self, options: Options) -> tuple[float, float]:
        return options["betas"] if "betas" in options else (options["momentum"],) * 2

    def buffers(self, shape: tuple[int, ...], layout: Layout, options: Options) -> Buffers:
        return {"momentum": (shape, options["momentum_dtype"])}

    def __call__(self, batch: Batch) -> list[Tensor]:
        beta1, beta2 = self._betas(batch.options)
        C = [torch.lerp(g, state["momentum"].to(g.dtype), beta1) for g, state in batch]
        batch.ema_("momentum", batch.grads, beta2)
        if self.norm == "max":  # entry by entry: any shape will do
            return [duality_map(c, self.norm) for c in C]
        return batch.whole(self._of_matrices, C)

    def _of_matrices(self, tensors: Sequence[Tensor], layouts: Sequence[Layout]) -> list[Tensor]:
        return [
            layout.join([duality_map(part, self.norm) for part in layout.pieces(tensor)], tensor.shape)
            for tensor, layout in zip(tensors, layouts, strict=True)
        ]


class Shampoo(Direction):
    """U = L^(−1/4) M R^(−1/4) with M of β1, L and R of β2, each power on the support of its matrix.

    At β2 = 0 it is the polar factor of M. Without damping, as in the paper, hence float64: for comparison, not speed.
    """

    shardable = True

    def buffers(self, shape: tuple[int, ...], layout: Layout, options: Options) -> Buffers:
        if layout.sizes:
            raise ValueError(f"Shampoo preconditions whole matrices; a split ({layout}) is not supported")
        count, m, n = layout.shape(shape)
        return {
            "momentum": (shape, options["momentum_dtype"]),
            "left": ((count, m, m), torch.float64),
            "right": ((count, n, n), torch.float64),
        }

    def __call__(self, batch: Batch) -> list[Tensor]:
        beta1, beta2 = batch.options["betas"]
        held = batch.ema_("momentum", batch.grads, beta1)
        wholes = held if batch.parts is None else batch.parts.everywhere(held)
        M = [layout.pieces(m)[0].double() for m, layout in zip(wholes, batch.layouts, strict=True)]
        left = batch.ema_("left", [m @ m.mT for m in M], beta2)
        right = batch.ema_("right", [m.mT @ m for m in M], beta2)
        U = [
            (_inverse_fourth_root(L) @ m @ _inverse_fourth_root(R)).reshape(whole.shape).to(whole.dtype)
            for L, m, R, whole in zip(left, M, right, wholes, strict=True)
        ]
        return U if batch.parts is None else batch.parts.here(U)


def _inverse_fourth_root(A: Tensor) -> Tensor:
    """A^(−1/4) of symmetric positive semidefinite A, zero outside its support; A's scale is divided out first."""
    peak = A.abs().amax(dim=(-2, -1), keepdim=True)
    scale = torch.where(peak > 0, peak, 1)
    values, vectors = torch.linalg.eigh(A / scale)
    cutoff = A.shape[-1] * torch.finfo(A.dtype).eps * values[..., -1:].clamp(min=0)
    roots = torch.where(values > cutoff, values.clamp(min=torch.finfo(A.dtype).tiny) ** -0.25, 0)
    return torch.matmul(vectors * roots.unsqueeze(-2), vectors.mT) * scale**-0.25
