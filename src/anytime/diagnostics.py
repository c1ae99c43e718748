"""What an averaging optimizer does in one step: c_t, β_t, ‖x − z‖, ρ, α and the size of its update.

Over the matrices of hidden layers where there are any, each the mean over them; ‖x − z‖ is of all parameters. Inside
`detailed()` there is more, and each of it by layer too. Where parameters are sharded or owned by one process each, the
numbers are of the whole, and all processes must ask for them.

    rho          ρ = RMS of z after the step              c, beta      of the average
    alpha        cosine of the update and z before it     distance     ‖x − z‖
    update_rms   RMS of the update over the rate, u
and in detail
    rho_before   ρ before the step                        change       |Δρ| / ρ
    predicted    where ρ would settle at this α and η: λρ = (u/2)[−α + √(α² + 2ηλ)], for decay at z
    row_spread   of the rows of the update: their norms' standard deviation over their mean
    polar_error  ‖PPᵀ − I‖_F / √r of the polar factor behind the update, at the scale where its mean square is right
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from .core.averaging import opposed
from .core.layout import Layout
from .distributed.parts import is_sharded, local, part_like
from .optim.base import AnytimeOptimizer
from .optim.groups import Place, places
from .optim.rules import ELEMENTWISE

_detailed: ContextVar[bool] = ContextVar("detailed", default=False)


@contextmanager
def detailed() -> Iterator[None]:
    """Probes read in here say more, and by layer."""
    before = _detailed.set(True)
    try:
        yield
    finally:
        _detailed.reset(before)


class Probe:
    """Made before a step, read after it."""

    @torch.no_grad()
    def __init__(self, optimizer: AnytimeOptimizer) -> None:
        self.optimizer = optimizer
        everything = [place for group in optimizer.param_groups for place in places(group)]
        matrices = [place for place in everything if place.group["rule"] not in ELEMENTWISE]
        trained = any(place.param.requires_grad or optimizer.state.get(place.param) for place in matrices)
        self.places = matrices if trained else everything
        self.spectral = trained
        self.held = [i for i, place in enumerate(self.places) if optimizer.state.get(place.param)]
        self.watched = [self.places[i] for i in self.held]
        self.before = [self._z_and_decayed(place) for place in self.watched]
        self.clocks = [self._clock(place) for place in self.watched]

    @torch.no_grad()
    def read(self) -> dict[str, Any]:
        """One number each; a single read from the device. In detail "layers" has the numbers of each, by its name."""
        optimizer, detail = self.optimizer, _detailed.get()
        device = next(p.device for group in optimizer.param_groups for p in group["params"])
        columns = self._columns(device, detail)
        # A row a place, and how many processes hold it: where each owns some, the others' are added.
        table = torch.zeros(len(self.places), len(columns) + 1, dtype=torch.float64, device=device)
        if self.held:
            table[self.held] = torch.stack([*columns.values(), torch.ones_like(columns["rho"])], 1)
        optimizer.sum_owned_(table)
        table[:, :-1] /= table[:, -1:].clamp(min=1)
        distance = self._distance(device) if optimizer.averages else table.new_zeros(())
        *cells, total = torch.cat([table.flatten(), distance.reshape(1)]).tolist()
        width = len(columns) + 1
        rows = {
            name: dict(zip(columns, cells[width * i :], strict=False))
            for i, name in enumerate(self._names())
            if cells[width * (i + 1) - 1]
        }
        if not rows:
            return {}
        found: dict[str, Any] = {key: sum(row[key] for row in rows.values()) / len(rows) for key in columns}
        if optimizer.averages:
            found["distance"] = total
        return found | ({"layers": rows} if detail else {})

    def _columns(self, device: torch.device, detail: bool) -> dict[str, Tensor]:
        """Name to the numbers [layers held here]."""
        groups, states = [p.group for p in self.watched], [self.optimizer.state[p.param] for p in self.watched]

        def column(values: Sequence[Any]) -> Tensor:
            of: dict[str, Any] = {"dtype": torch.float64, "device": device}
            return torch.cat([torch.empty(0, **of), *(torch.as_tensor(v, **of).reshape(1) for v in values)])

        rates = [self._rates(place, step) for place, (step, _) in zip(self.watched, self.clocks, strict=True)]
        sums, shapes = [], []
        for place, before, (eta, decay) in zip(self.watched, self.before, rates, strict=True):
            update, z = self._update(place, before, eta * decay)
            sums.append(self._sums(place, before[0], update, z))
            if detail and self.spectral:
                shapes.append(self._shape(place, update))
        self.optimizer.sum_parts_([place.param for place in self.watched], sums)
        z, u, old, product, d = (column([s[i] for s in sums]) for i in range(5))
        size, rate = column([place.param.numel() for place in self.watched]), column([eta for eta, _ in rates])
        found = {
            "rho": (z / size).sqrt(),
            "alpha": product / (u * old).sqrt().clamp(min=1e-30),
            "update_rms": (u / size).sqrt() / rate.clamp(min=1e-30),
        }
        if self.optimizer.averages:
            t, now = column([s["step"] for s in states]), column([s["weight_sum"] for s in states])
            step, weight_sum = (column([clock[i] for clock in self.clocks]) for i in range(2))
            at_z = (t <= column([g["averaging_warmup"] for g in groups])) | (now == 0)  # X stays at Z
            c = torch.where(at_z, 1.0, 1 - weight_sum / torch.where(at_z, 1.0, now))
            found |= {"c": torch.where(t > step, c, 0.0), "beta": column([s["beta"] for s in states])}
        if not detail:
            return found
        rho, was = found["rho"], (old / size).sqrt()
        change = (rho - was).abs() / torch.where(was > 0, was, rho)
        found |= {"rho_before": was, "change": torch.where(rho == was, 0.0, change)}
        if self.optimizer.averages:
            found["distance"] = d.sqrt()
        everyone = [place.group for place in self.places]
        if all(g["weight_decay"] and g.get("decay_at", "z") == "z" and not g.get("cautious") for g in everyone):
            decay, alpha = column([decay for _, decay in rates]), found["alpha"]
            root = (alpha.square() + 2 * rate * decay).sqrt()
            found["predicted"] = found["update_rms"] / 2 * (root - alpha) / decay
        if self.spectral:
            found["row_spread"], found["polar_error"] = (column([s[i] for s in shapes]) for i in range(2))
        return found

    def _names(self) -> list[str]:
        names = {
            id(p): name
            for group in self.optimizer.param_groups
            for p, name in zip(group["params"], group.get("param_names", ()), strict=False)
        }
        return [names.get(id(place.param), f"parameter {place.order}") for place in self.places]

    def _rates(self, place: Place, before: Tensor) -> tuple[Tensor, float | Tensor]:
        """η_t and λ of the step that was taken, η_t 0 if it was left out."""
        state = self.optimizer.state[place.param]
        eta, _, decay = self.optimizer.rates(place.group, state["step"].reshape(1), [state])
        return eta[0] * (state["step"] > before), decay[0]

    def _z_and_decayed(self, place: Place) -> tuple[Tensor, Tensor | None]:
        """z, and what decays: z, y or nothing; of the part held here."""
        at = self.optimizer.iterates(place.param)
        return local(at.z), {"z": local(at.z), "y": local(at.y), None: None}[place.group.get("decay_at", "z")]

    def _update(self, place: Place, before: tuple[Tensor, Tensor | None], decay: Tensor) -> tuple[Tensor, Tensor]:
        """η U, what the step took from z beside the decay, and z; of the part held here."""
        old, decayed = before
        z = local(self.optimizer.iterates(place.param).z)
        update = old - z
        if decayed is not None:
            if place.group.get("cautious"):  # what decayed moved towards zero, what was spared away from it
                decayed = decayed.masked_fill(opposed(update, decayed), 0)
            update -= decay.to(z.dtype) * decayed
        return update, z

    def _sums(self, place: Place, old: Tensor, update: Tensor, z: Tensor) -> Tensor:
        """[5]: z², U², z² before, U·z before and (z − x)², summed over the part held here."""
        d = local(self.optimizer.state[place.param].get("d", torch.zeros_like(z[:0])))
        pairs = (z, z), (update, update), (old, old), (update, old), (d, d)
        return torch.stack([(a * b).sum(dtype=torch.float64) for a, b in pairs])

    def _shape(self, place: Place, update: Tensor) -> tuple[Tensor, Tensor]:
        """The spread of the rows and the error of the polar factor, means over the matrices of a parameter."""

        def whole(part: Tensor, like: Tensor) -> Tensor:
            return part_like(part, like).full_tensor() if is_sharded(like) else part  # type: ignore[attr-defined]

        state, layout = self.optimizer.state[place.param], Layout.parse(place.layout)
        pieces = layout.pieces(whole(update, place.param))
        rows = [torch.ones_like(piece[..., 0]) for piece in pieces]
        if "row_moment" in state:
            moment = state["row_moment"]
            rows = [r.sqrt() + place.group["eps"] for r in layout.row_pieces(whole(local(moment), moment))]
        spreads, errors = [], []
        for piece, row in zip(pieces, rows, strict=True):
            norms = torch.linalg.vector_norm(piece, dim=-1, dtype=torch.float64)
            spreads.append(norms.std(-1, correction=0) / norms.mean(-1).clamp(min=1e-30))
            P = piece * row.unsqueeze(-1)  # before its rows were normalized, but for a factor
            P = P / torch.linalg.matrix_norm(P, keepdim=True).clamp(min=1e-30)
            gram = P @ P.mT if P.shape[-2] <= P.shape[-1] else P.mT @ P  # its trace is 1
            squares = gram.square().sum((-2, -1), dtype=torch.float64)
            errors.append((squares * gram.shape[-1] - 1).clamp(min=0).sqrt())
        return torch.cat(spreads).mean(), torch.cat(errors).mean()

    def _distance(self, device: torch.device) -> Tensor:
        held = [(p, state["d"]) for p, state in self.optimizer.state.items() if "d" in state]
        squares = [local(d).square().sum(dtype=torch.float64) for _, d in held]
        self.optimizer.sum_parts_([p for p, _ in held], squares)
        zero = torch.zeros((), dtype=torch.float64, device=device)
        owned, rest = zero.clone(), zero.clone()
        for (p, _), square in zip(held, squares, strict=True):
            (owned if self.optimizer.is_owned(p) else rest).add_(square.to(device))
        self.optimizer.sum_owned_(owned)
        return (owned + rest).sqrt()

    def _clock(self, place: Place) -> tuple[Tensor, Tensor]:
        state = self.optimizer.state[place.param]
        return state["step"].clone(), state.get("weight_sum", state["step"]).clone()
