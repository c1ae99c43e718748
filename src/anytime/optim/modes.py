"""Whether the model holds Y or the average X, and how X is had."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core import averaging
from ..distributed.parts import local, part_like
from ..distributed.team import reshard
from .members import Members, State
from .moves import compute_dtype, precise_y


class Iterates(NamedTuple):
    """The three sequences of one parameter, in the precision of the update."""

    x: Tensor
    y: Tensor
    z: Tensor


class Modes(Members):
    """Abstract: train mode, eval mode, and the average out of place. A new optimizer is in train mode."""

    _training = True

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_training": self._training}

    @property
    def training(self) -> bool:
        """Whether the model holds Y (train mode) rather than X (eval mode)."""
        return self._training

    @torch.no_grad()
    def iterates(self, p: Tensor) -> Iterates:
        """Copies of X, Y and Z of a parameter, in any mode."""
        self.look_at_weights()
        state = self.state.get(p, {})
        if not state:
            self._place(p)
            if not self._team.holds(p):
                self.ensure_state(p)
            return Iterates(*(p.detach().to(compute_dtype(p), copy=True) for _ in range(3)))
        if self._fitted.get(p) != (p.device, p.dtype):
            state = self.ensure_state(p)
        y, d, beta = self._local_y(state.get("y", p), state).clone(), local(state.get("d", p)), state.get("beta")
        if beta is None:
            return Iterates(*(part_like(part, p) for part in (y.clone(), y, y.clone())))
        found = averaging.x_of(y, d, beta), y, averaging.z_of(y, d, beta)
        return Iterates(*(part_like(part, p) for part in found))

    @torch.no_grad()
    def eval(self) -> None:
        """The model holds the average X until train(); Y is kept aside."""
        self.look_at_weights()
        if not self._training:
            return
        each = list(self._each())
        self._set_mode(training=False)
        if self.averages:
            for p, state in each:
                y = p.detach().clone()
                x = self._local_x(p, state)
                state["y"] = y
                local(p).copy_(x)
            self._weights_changed()

    @torch.no_grad()
    def train(self) -> None:
        """The model holds Y again, bit for bit what it was before eval()."""
        self.look_at_weights()
        back = not self._training
        for p, state in self._each():
            if "y" in state:
                local(p).copy_(local(state["y"]))
                del state["y"]
        self._set_mode(training=True)
        if back and self.averages:
            self._weights_changed()

    def _weights_changed(self) -> None:
        """Brings other processes' matrices up to date, and whatever was gathered of them."""
        params = [p for group in self.param_groups for p in group["params"]]
        owners = self._team.owners
        if owners is not None and (owned := [p for p in params if self.is_owned(p)]):
            owners.gather_(owned, [p.detach() for p in owned])
        reshard(params)

    def _local_y(self, p: Tensor, state: State) -> Tensor:
        return precise_y(local(p), {name: local(value) for name, value in state.items()})

    def _local_x(self, p: Tensor, state: State) -> Tensor:
        """X of a parameter that holds Y, a new tensor: of the part held here."""
        y = self._local_y(p, state)
        return averaging.x_of(y, local(state["d"]), state["beta"]) if self.averages else y.clone()

    def _set_mode(self, *, training: bool) -> None:
        self._training = training
        for group in self.param_groups:
            group["sequence"] = "y" if training else "x"

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the model holds X; after, exactly what it held before, whatever happened. Nests."""
        was_training = self._training
        try:
            self.eval()
            yield
        finally:
            self.train() if was_training else self.eval()

    @torch.no_grad()
    def averaged_state_dict(self, model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Any]:
        """model.state_dict() with X in place of the parameters, as new tensors; the model is not touched.

        dtype None keeps each parameter's own. Buffers are copied as they are: statistics of BatchNorm belong to Y
        unless recalibrate_batch_norm ran at X.
        """
        self.look_at_weights()
        found = model.state_dict(keep_vars=True)
        mine = {id(p) for group in self.param_groups for p in group["params"]}
        if not any(id(value) in mine for value in found.values()):
            raise ValueError("averaged_state_dict: none of the optimizer's parameters belong to this model")
        new: dict[int, Tensor] = {}
        for p, state in self._each():
            x = self._local_x(state.get("y", p), state)
            new[id(p)] = part_like(x.to(dtype or p.dtype), p)
        owners = self._team.owners
        if owners is not None and owners.mode != "factor":
            for p in owners.of:
                new.setdefault(id(p), p.detach().to(dtype or p.dtype, copy=True))
            owners.gather_([*owners.of], [new[id(p)] for p in owners.of])
        for name, value in found.items():
            if isinstance(value, Tensor):
                if id(value) not in new:
                    convert = dtype is not None and isinstance(value, nn.Parameter) and value.is_floating_point()
                    new[id(value)] = value.detach().to(dtype if convert else value.dtype, copy=True)
                found[name] = new[id(value)]
        return found
