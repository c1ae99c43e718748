"""Which parameters an optimizer has, by which rule, and their state.

A group follows one rule (`group["rule"]`). A parameter's state is plain tensors by name, each of the parameter's shape,
a statistic a row, or 0-dim, and all zeros at the start:

    step, weight_sum, beta   t, Σw and the β that formed y
    d                        z − x
    residual                 y − p, where the parameter p is narrower than float32
    y                        the parameter as it was in train mode, while in eval mode
    …                        the direction's own buffers

so it needs no dummy step, weights may still be loaded before the first step, and it shards as its parameter does.
Scheduled optimizers are the same without the average: x = y = z = p, and no d.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import routing
from ..core import averaging
from ..core.layout import Layout
from ..distributed.parts import is_sharded, zeros
from ..distributed.team import Team, refuse_flat
from .files import Resumable, fingerprint
from .groups import Group, Place, Router, Ruled, places
from .moves import compute_dtype
from .options import ABOUT
from .rules import ELEMENTWISE, RULES

State = dict[str, Tensor]


class Members(Resumable):
    """Abstract: the parameters, taken up, exchanged and forgotten, each with its state, here or at another process."""

    def __init__(
        self,
        params: routing.Params,
        matrix: Ruled | None,
        rest: Ruled,
        rules: routing.Rules | None,
        unmatched: str,
        owners: str | None,
        process_group: Any,
    ) -> None:
        if not isinstance(rules or {}, Mapping):
            raise TypeError(f"rules is {rules!r}; it must be a dict from patterns to 'matrix', 'rest' or options")
        self.plan = routing.Plan()
        self._router = Router(type(self).__name__, matrix, rest, dict(rules or {}), unmatched)
        self._team = Team(owners, process_group)
        self._fitted: dict[Tensor, tuple[torch.device, torch.dtype]] = {}
        self._known: set[Tensor] = set()
        self._module = weakref.ref(params) if isinstance(params, nn.Module) else None
        collected = routing.collect(params)
        refuse_flat(given.param for members, _ in collected for given in members)
        groups, self.plan.entries = self._router.resolve(collected)
        super().__init__(groups, dict((matrix or rest).options))

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: getattr(self, name) for name in ("plan", "_router", "_team", "_known")}
        return {**super().__getstate__(), **kept, "_fitted": {}, "_module": None}

    def __repr__(self) -> str:
        lists = ("params", "param_names", "layouts", "order", "rule", *ABOUT)
        lines = [
            f"  {group['rule']}, {len(group['params'])} parameters: "
            + ", ".join(f"{key}={value!r}" for key, value in sorted(group.items()) if key not in lists)
            for group in self.param_groups
        ]
        return "\n".join([f"{type(self).__name__} (", *lines, ")"])

    def add_param_group(self, param_group: Group) -> None:
        """Adds parameters, routed as the constructor's are: matrices and others become a group each."""
        if not isinstance(param_group, dict):
            raise TypeError(f"a parameter group is a dict with the key 'params', not {type(param_group).__name__}")
        if param_group.pop("routed", False):
            own = {"param_names", *param_group}
            super().add_param_group(param_group)
            for key in [key for key in param_group if key not in own]:
                del param_group[key]  # torch fills in the defaults of the other rule
            param_group |= self.about()
            self._take_up(param_group)
            return
        known = {id(p) for group in self.param_groups for p in group["params"]}
        collected = routing.collect_group(param_group)
        if any(id(given.param) in known for given in collected[0]):
            raise ValueError("some parameters appear in more than one parameter group")
        groups, entries = self._router.resolve([collected], offset=len(self.plan), complete=False)
        before = len(self.param_groups)
        try:
            for group in groups:
                self.add_param_group(group)
        except Exception:
            for group in self.param_groups[before:]:
                self._forget(group["params"])
            del self.param_groups[before:]
            raise
        self.plan.entries.extend(entries)

    def _take_up(self, group: Group) -> None:
        """Decides who holds a group's parameters, and makes their state; of those that are new."""
        fresh = [place for place in places(group) if place.param not in self._known]
        by_parts = group["rule"] in ELEMENTWISE or RULES[group["rule"]].shardable
        if not by_parts and any(is_sharded(place.param) for place in fresh):
            raise ValueError(f"the rule {group['rule']!r} does not say that it takes sharded matrices: see Direction")
        self._team.add(
            [place.param for place in fresh],
            [Layout.parse(place.layout) for place in fresh],
            matrices=group["rule"] not in ELEMENTWISE,
        )
        self._known.update(place.param for place in fresh)
        for place in fresh:
            if place.param.requires_grad and self._team.holds(place.param):
                self._ensure_state(place)

    def _forget(self, params: Iterable[Tensor]) -> None:
        for p in params:
            self.state.pop(p, None)
            self._fitted.pop(p, None)
            self._known.discard(p)
            self._team.forget(p)

    def _follow(self, *, replaced: bool = False) -> None:
        """Takes up parameters that were put in the places of those given: Accelerate shards a model after its optimizer
        was made, and exchanges them in the groups. What is in no group any more is forgotten.

        replaced: whether all state is about to be loaded, so that none can be lost.
        """
        mine = {p for group in self.param_groups for p in group["params"]}
        if mine == self._known:
            return
        gone, fresh = self._known - mine, mine - self._known
        if gone and fresh:
            what = f"{type(self).__name__}: {len(gone)} parameters were exchanged for others"
            if (owners := self._team.owners) is not None:
                raise RuntimeError(
                    f"{what}, but owners={owners.mode!r} was settled: build the optimizer on the new ones"
                )
            steps = [self.state[p]["step"] for p in gone if self.state.get(p)]
            moved = all(map(self.state.get, fresh))
            if not moved and not replaced and any(not step.is_meta and step.item() for step in steps):
                raise RuntimeError(
                    f"{what} after the first step, and their state belongs to the old ones. Save, build the optimizer "
                    "on the new parameters, and load; or move the entries of optimizer.state yourself"
                )
        self._forget(gone)
        for group in self.param_groups:
            self._take_up(group)

    # ----------------------------------------------------------------- state

    def state_spec(
        self, p: Tensor, group: Mapping[str, Any], layout: str
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        scalar, precise = averaging.scalar_dtype(p.device), compute_dtype(p)
        shape = tuple(p.shape)
        buffers = RULES[group["rule"]].buffers(shape, Layout.parse(layout), group)
        spec = {name: (shape_, dtype or precise) for name, (shape_, dtype) in buffers.items()}
        if self.averages:
            spec |= {"d": (shape, precise), "weight_sum": ((), scalar), "beta": ((), scalar)}
        if p.dtype != precise:
            spec["residual"] = (shape, precise)
        return spec | {"step": ((), scalar)}

    def _ensure_state(self, place: Place) -> State:
        """The parameter's state, created, or moved where the parameter has gone; idempotent."""
        p = place.param
        old: State = self.state.get(p, {})
        if old and self._fitted.get(p) == (p.device, p.dtype):
            return old
        new: State = {}
        layout = Layout.parse(place.layout)
        with torch.inference_mode(False):  # what an evaluation makes, steps will write to
            for name, (shape, dtype) in self.state_spec(p, place.group, place.layout).items():
                if name in old and not old[name].is_meta:
                    new[name] = old[name].to(p.device, dtype)
                else:
                    new[name] = zeros(name, shape, dtype, p, layout)
            if "y" in old:
                new["y"] = old["y"].to(p.device, p.dtype)
            elif self.averages and not self.training:
                new["y"] = p.detach().clone()
        self.state[p] = new
        self._fitted[p] = (p.device, p.dtype)
        return new

    def _place(self, p: Tensor) -> Place:
        for group in self.param_groups:
            for place in places(group):
                if place.param is p:
                    return place
        raise KeyError(f"a tensor of shape {tuple(p.shape)} is not a parameter of this optimizer")

    def ensure_state(self, p: Tensor) -> State:
        """The state of a parameter, created if it has none yet because it was frozen."""
        if not self._team.holds(p):
            raise RuntimeError(f"the state of a parameter of shape {tuple(p.shape)} is held by another process")
        return self._ensure_state(self._place(p))

    def _each(self) -> Iterator[tuple[Tensor, State]]:
        """Parameters that have state, with it; one that never was trainable has none."""
        for group in self.param_groups:
            for place in places(group):
                if self.state.get(place.param):
                    yield place.param, self._ensure_state(place)

    # ----------------------------------------------------------------- files

    def fingerprints(self, params: Sequence[Tensor]) -> list[Tensor]:
        found = [fingerprint(p) for p in params]
        self.sum_parts_(params, found)
        return found

    def holds(self, p: Tensor) -> bool:
        return self._team.holds(p)

    def is_owned(self, p: Tensor) -> bool:
        """Whether one process alone has the state of a parameter."""
        owners = self._team.owners
        return owners is not None and owners.mode != "factor" and p in owners.of

    def sum_parts_(self, params: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Adds up, in place, what was found on the parts of each parameter; all processes must ask for it."""
        self._team.sum_parts_(params, values)

    def sum_owned_(self, value: Tensor) -> None:
        """Adds up, in place, what each process found on the parameters that it owns."""
        owners = self._team.owners
        if owners is not None and owners.mode != "factor":
            self._team.sum_(value)

    def fit_state(self, *, replaced: bool = False) -> None:
        self._follow(replaced=replaced)
        for group in self.param_groups:
            for place in places(group):
                if self.state.get(place.param) or (place.param.requires_grad and self._team.holds(place.param)):
                    self._ensure_state(place)
