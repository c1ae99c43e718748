"""The processes that take a step together, as an optimizer sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.layout import Layout
from .exchange import Parts
from .owners import Owners, Shared
from .parts import Spread, is_sharded, ranks_over
from .processes import agree, among, control, over


class Team:
    """Nobody but this process, until a parameter is sharded or owners are asked for."""

    def __init__(self, owners: str | None = None, group: Any = None) -> None:
        self.owners: Owners | None = None
        self.device = torch.device("cpu")
        self._ranks: tuple[int, ...] = ()
        self._alike: tuple[int, ...] = ()  # those of them who have the same parameters
        self._root: Any = None
        self._dims: set[str] = set()
        self._parts: dict[Any, Parts | Shared] = {}
        self._agreed: dict[Any, str] = {}
        if owners is not None and dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
            self.owners = Owners(owners, group or dist.group.WORLD)
            self._ranks = self._alike = tuple(dist.get_process_group_ranks(self.owners.group))

    def __deepcopy__(self, memo: dict[int, Any]) -> Team:
        """Groups of processes are not copied: copies of an optimizer share them."""
        memo[id(self)] = other = Team()
        other.device, other._ranks, other._alike = self.device, self._ranks, self._alike
        other._root, other._dims = self._root, {*self._dims}
        if self.owners is not None:
            other.owners = Owners(self.owners.mode, self.owners.group)
            other.owners._load = list(self.owners._load)
            other.owners.of = {memo.get(id(p), p): rank for p, rank in self.owners.of.items()}
        return other

    @property
    def active(self) -> bool:
        return bool(self._ranks)

    def add(self, params: Sequence[Tensor], layouts: Sequence[Layout], *, matrices: bool) -> None:
        """Parameters of one rule that join."""
        for p in params:
            self.device = p.device
            if is_sharded(p) and p.device_mesh.size() > 1:  # type: ignore[attr-defined]
                if self.owners is not None:
                    raise ValueError("owners is for parameters that are whole on every process; these are sharded")
                root = root_of(p.device_mesh)  # type: ignore[attr-defined]
                if root.size() > len(self._ranks):
                    self._ranks, self._root = tuple(sorted(root.mesh.flatten().tolist())), root
                self._dims.update(p.device_mesh.mesh_dim_names or ("",))  # type: ignore[attr-defined]
                self._alike = ranks_along(self._root, self._dims)
        if self.owners is not None and matrices:
            self.owners.add(params, layouts)
        self._agreed.clear()

    def forget(self, p: Tensor) -> None:
        """A parameter that leaves, everywhere."""
        self._parts.clear()  # its identity may become another's
        if self.owners is not None:
            self.owners.of.pop(p, None)

    def holds(self, p: Tensor) -> bool:
        """Whether this process has the parameter's state."""
        return self.owners is None or self.owners.holds(p)

    def meet(self, key: Any, lines: Callable[[], Sequence[str]], wrong: Exception | None) -> None:
        """Before a step: an error everywhere unless all are about to take the same one."""
        if wrong is not None:
            agree("error", lambda: [f"error {wrong}"], control(self._ranks), self._alike)
            raise wrong
        if key not in self._agreed:
            if len(self._agreed) > 64:
                self._agreed.clear()
            self._agreed[key] = "\n".join(lines())
        agree(self._agreed[key], lines, control(self._ranks), self._alike)

    def all_of_us(self, ok: Tensor) -> Tensor:
        """1 if it is 1 for every process, else 0."""
        dist.all_reduce(ok, op=dist.ReduceOp.MIN, group=among(self._ranks))
        return ok

    def sum_(self, values: Tensor) -> None:
        dist.all_reduce(values, group=among(self._ranks))

    def sum_parts_(self, params: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Adds up what the processes that hold a sharded parameter together have each found of it; all of one shape."""
        together: dict[int, tuple[Any, list[Tensor]]] = {}
        for p, value in zip(params, values, strict=True):
            if is_sharded(p) and (dims := [number for number, _ in Spread.of(p).sharded()]):
                group = over(p.device_mesh, dims)  # type: ignore[attr-defined]
                together.setdefault(id(group), (group, []))[1].append(value)
        for group, alike in together.values():
            totals = torch.stack(alike)
            dist.all_reduce(totals, group=group)
            for value, total in zip(alike, totals.unbind(), strict=True):
                value.copy_(total)

    def parts(self, params: Sequence[Tensor], layouts: Sequence[Layout]) -> Parts | Shared | None:
        """How matrices of these parameters are had whole; None where they are."""
        sharded = is_sharded(params[0])
        if not sharded and (self.owners is None or self.owners.mode != "factor"):
            return None
        key = tuple(map(id, params))
        if key not in self._parts:
            if len(self._parts) > 64:  # parameters that come and go
                self._parts.clear()
            self._parts[key] = (
                Parts([Spread.of(p) for p in params], layouts) if sharded else Shared(self.owners, params, layouts)  # type: ignore[arg-type]
            )
        return self._parts[key]


def root_of(mesh: Any) -> Any:
    """The mesh that this one was cut from."""
    return mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh


def ranks_along(root: Any, dims: set[str]) -> tuple[int, ...]:
    """Those who differ from this process in these dimensions of a mesh alone, as the processes of one stage of a
    pipeline; everyone, where they are not all dimensions of it."""
    names = root.mesh_dim_names or ()
    if not dims <= {*names}:
        return tuple(sorted(root.mesh.flatten().tolist()))
    return tuple(sorted(ranks_over(root, [number for number, name in enumerate(names) if name in dims])))


def refuse_flat(params: Iterable[Tensor]) -> None:
    """The parameters of FSDP's first version have lost their shapes."""
    for p in params:
        if getattr(p, "_fsdp_flattened", False):
            raise ValueError(
                "FullyShardedDataParallel (FSDP1) flattens parameters, and no matrix is left of them: use "
                "torch.distributed.fsdp.fully_shard (FSDP2)"
            )


def reshard(params: Sequence[Tensor]) -> None:
    """Makes FSDP2 gather the parameters anew at the next forward pass, for they have changed.

    It does so by itself after a backward pass, but keeps what it gathered in an evaluation, at the root at least.
    """
    if not any(map(is_sharded, params)):
        return
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp import FSDPModule

    mine = set(map(id, params))
    for module in list(_module_state_mapping):
        if isinstance(module, FSDPModule) and any(id(p) in mine for p in _sharded_params(module)):
            module.reshard()


def _sharded_params(module: Any) -> list[Tensor]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [held.sharded_param for group in groups if group is not None for held in group.fsdp_params]
