"""Start from the checkpoint of another optimizer: torch's AdamW or Adam, Muon, or schedulefree's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .base import AnytimeOptimizer

State = Mapping[str, Any]


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
    average starts anew at the weights. Muon: the momentum buffer becomes M; it counts no steps, so warmup starts again
    unless `step` says how many there were. schedulefree: z, Σw, t and the second moment; training goes on where it was,
    whichever mode the weights were saved in (for its AdamWScheduleFree choose bias_correction="moment").

    Parameters are matched by name where both sides have names, else in the order in which they were given; `params` are
    the foreign optimizer's in its order, where it had only some of them. Options stay this optimizer's.
    """
    if not optimizer.training or any(float(s["step"]) for s in optimizer.state.values()):
        raise ValueError("start_from needs a new optimizer, in train mode and before its first step")
    foreign = _entries(state_dict)
    pairs = _match(optimizer, state_dict, [p for p, _ in foreign], params)
    found: list[tuple[Tensor, State, State, Callable[..., None]]] = []
    for index, group in foreign:
        p, label = pairs[index]
        state = state_dict["state"].get(index)
        if state is None:
            continue
        convert = _converter(state, group, label)
        for key, value in state.items():
            if isinstance(value, Tensor) and value.ndim and value.shape != p.shape:
                raise ValueError(
                    f"{label} is {tuple(p.shape)} here, but its {key} in the state is {tuple(value.shape)}"
                )
        found.append((p, state, group, convert))
    if not found:
        raise ValueError("the state holds nothing: it was saved before the first step")
    for p, state, group, convert in found:
        own = optimizer.ensure_state(p)
        convert(p, own, state, group)
        if step is not None:
            own["step"].fill_(step)


def _entries(state_dict: Mapping[str, Any]) -> list[tuple[Any, State]]:
    try:
        return [(index, group) for group in state_dict["param_groups"] for index in group["params"]]
    except (KeyError, TypeError):
        raise ValueError("this is no state of a torch optimizer: it needs 'state' and 'param_groups'") from None


def _match(
    optimizer: AnytimeOptimizer, state_dict: Mapping[str, Any], indices: list[Any], params: Sequence[Tensor] | None
) -> dict[Any, tuple[Tensor, str]]:
    """The foreign state's index to the parameter here and what to call it in errors."""
    own = {i: p for group in optimizer.param_groups for i, p in zip(group["order"], group["params"], strict=True)}
    names = [name for group in state_dict["param_groups"] for name in group.get("param_names", ())]
    here = {
        name: p
        for group in optimizer.param_groups
        for name, p in zip(group.get("param_names", ()), group["params"], strict=False)
    }
    if params is None and here and len(names) == len(indices):
        if missing := [name for name in names if name not in here]:
            raise ValueError(f"the state has {missing[0]!r}, which this optimizer does not know")
        return {index: (here[name], name) for index, name in zip(indices, names, strict=True)}
    ordered = list(params) if params is not None else [own[i] for i in sorted(own)]
    if len(ordered) != len(indices):
        hint = "" if params is not None else "; pass params, those of the optimizer that saved it, in its order"
        raise ValueError(f"the state is of {len(indices)} parameters, here are {len(ordered)}{hint}")
    return {index: (p, f"parameter {i}") for i, (index, p) in enumerate(zip(indices, ordered, strict=True))}


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
    """Its weights are y in train mode, x in eval mode; here they become y."""
    beta = group["momentum"] if "momentum" in group else group["betas"][0]
    precise = own["step"].dtype
    w, z = p.to(precise), state["z"].to(p.device, precise)
    d = (z - w) / beta if group["train_mode"] else z - w
    _put(own, "d", d)
    _put(own, "weight_sum", group["weight_sum"])
    _put(own, "beta", beta)
    _put(own, "step", group["k"])
    if "exp_avg_sq" in state:
        _put(own, "second_moment", state["exp_avg_sq"])
    if not group["train_mode"]:
        y = w + (1 - beta) * d
        p.copy_(y)
        _put(own, "residual", y - p.to(precise))
