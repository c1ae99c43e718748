"""Start from the checkpoint of another optimizer: torch's AdamW or Adam, Muon, or schedulefree's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..distributed.parts import local, part_of
from ..routing import plain_name
from .base import AnytimeOptimizer
from .groups import places, unique_names

State = Mapping[str, Any]
_HINT = "pass params, those of the optimizer that saved it, in its order"


@torch.no_grad()
def start_from(
    optimizer: AnytimeOptimizer,
    state_dict: Mapping[str, Any],
    *,
    params: Sequence[Tensor] | None = None,
    step: int | None = None,
) -> None:
    """Fills a new optimizer with what a foreign state has of use, once the model holds the weights saved with it.

    AdamW, Adam: the first moment becomes M where a rule has one, the second the v of (SF-)AdamW, the step count t; the
    average starts anew at the weights. The running mean of ‖g‖ that SFPlus keeps begins at Σ √v, as if all were noise.
    Muon: the momentum buffer becomes M; it counts no steps, so warmup starts again unless `step` says how many there
    were. schedulefree: z, Σw, t and the second moment; training goes on where it was, whichever mode the weights were
    saved in (for its AdamWScheduleFree choose bias_correction="moment").

    Parameters are matched by name where both sides have names, else in the order in which they were given; `params` are
    the foreign optimizer's in its order, where it had only some of them. Options stay this optimizer's.
    """
    if not optimizer.training:
        raise ValueError("start_from needs an optimizer in train mode")
    if step is not None and step < 0:
        raise ValueError(f"step is {step}; it must be in [0, ∞)")
    found: list[tuple[Tensor, State, State, Callable[..., None]]] = []
    for index, group, p, label in _match(optimizer, state_dict, params):
        state = state_dict["state"].get(index)
        if state is None:
            continue
        own = optimizer.state.get(p, {})
        if own and float(own["step"]):
            raise ValueError(f"{label} has taken steps already: start_from needs a new optimizer")
        convert = _converter(state, group, label)
        for key, value in state.items():
            if isinstance(value, Tensor) and value.ndim and value.shape != p.shape:
                raise ValueError(
                    f"{label} is {tuple(p.shape)} here, but its {key} in the state is {tuple(value.shape)}; {_HINT}"
                )
        if convert is _from_muon and "momentum" not in optimizer.ensure_state(p):
            raise ValueError(f"{label} has no momentum here: nothing of this state can be used for it")
        found.append((p, state, group, convert))
    if not found:
        raise ValueError("the state holds nothing: it was saved before the first step")
    for p, state, group, convert in found:
        own = optimizer.ensure_state(p)
        here = {key: part_of(value, p) if isinstance(value, Tensor) else value for key, value in state.items()}
        convert(local(p), {key: local(value) for key, value in own.items()}, here, group)
        if step is not None:
            own["step"].fill_(step)
        if "norm" in own and "exp_avg_sq" in state:
            seen = state["step"] if "step" in state else group["k"]
            sizes = (state["exp_avg_sq"] / (1 - group["betas"][1] ** seen)).sqrt()
            _put(own, "norm", sizes.sum() * (1 - optimizer._place(p).group["polyak_beta"] ** own["step"]))


def _match(
    optimizer: AnytimeOptimizer, state_dict: Mapping[str, Any], params: Sequence[Tensor] | None
) -> list[tuple[Any, State, Tensor, str]]:
    """(index, group) of the foreign state with the parameter here and what to call it in errors."""
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError("this is no state of a torch optimizer: it needs 'state' and 'param_groups'")
    groups = state_dict["param_groups"]
    if any("algorithm" in group for group in groups):
        raise ValueError("this state is one of ours: use optimizer.load_state_dict")
    entries = [(index, group) for group in groups for index in group["params"]]
    own = [place for group in optimizer.param_groups for place in places(group)]
    names, here = unique_names(groups), unique_names(optimizer.param_groups)
    if params is None and names is not None and here is not None:
        known = dict(zip(here, own, strict=True))
        names = [plain_name(name) for name in names]
        if missing := [name for name in names if name not in known]:
            raise ValueError(f"the state has {missing[0]!r}, which this optimizer does not know")
        return [(*entry, known[name].param, name) for entry, name in zip(entries, names, strict=True)]
    if params is None:
        if len(groups) > 1:
            raise ValueError(f"the state has {len(groups)} groups and no names to tell its parameters by; {_HINT}")
        ordered = [place.param for place in sorted(own, key=lambda place: place.order)]
    else:
        ordered = list(params)
        mine = {id(place.param) for place in own}
        if strangers := [p for p in ordered if id(p) not in mine]:
            raise ValueError(f"params holds {type(strangers[0]).__name__} that is no parameter of this optimizer")
    if len(ordered) != len(entries):
        raise ValueError(f"the state is of {len(entries)} parameters, here are {len(ordered)}; {_HINT}")
    return [(*entry, p, f"parameter {i}") for i, (entry, p) in enumerate(zip(entries, ordered, strict=True))]


def _converter(state: State, group: State, label: str) -> Callable[..., None]:
    if "z" in state and "weight_sum" in group:
        return _from_schedulefree
    if "exp_avg_sq" in state and "exp_avg" in state:
        return _from_adam
    if "momentum_buffer" in state:
        return _from_muon
    raise ValueError(
        f"the state of {label} is of no kind known here (AdamW, Muon, schedulefree): it has {sorted(state)}"
    )


def _put(own: dict[str, Tensor], name: str, value: Any) -> None:
    if name in own:
        own[name].copy_(value) if isinstance(value, Tensor) else own[name].fill_(value)


def _from_adam(p: Tensor, own: dict[str, Tensor], state: State, group: State) -> None:
    _put(own, "momentum", state["exp_avg"])
    _put(own, "second_moment", state["exp_avg_sq"])
    _put(own, "step", state["step"])


def _from_muon(p: Tensor, own: dict[str, Tensor], state: State, group: State) -> None:
    _put(own, "momentum", state["momentum_buffer"])


def _from_schedulefree(p: Tensor, own: dict[str, Tensor], state: State, group: State) -> None:
    """Its weights are y in train mode, x in eval mode; here they become y, or x where there is no average."""
    beta = group["momentum"] if "momentum" in group else group["betas"][0]
    precise = own["step"].dtype
    w, z = p.to(precise), state["z"].to(p.device, precise)
    d = (z - w) / beta if group["train_mode"] else z - w
    x = w - (1 - beta) * d if group["train_mode"] else w
    _put(own, "d", d)
    _put(own, "weight_sum", group["weight_sum"])
    _put(own, "beta", beta)
    _put(own, "step", group["k"])
    if "exp_avg_sq" in state:
        _put(own, "second_moment", state["exp_avg_sq"])
    if group["train_mode"] != ("d" in own):
        new = x + (1 - beta) * d if "d" in own else x
        p.copy_(new)
        _put(own, "residual", new - p.to(precise))
