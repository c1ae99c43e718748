"""What a state dict holds beyond torch's, and how it comes back: matched, checked whole, and only then applied.

Everything is in the two places that torch's tools carry along: per parameter a fingerprint of its weights, per group
plain values, among them the algorithm, the sequence the weights held (y, or x in eval mode) and the order in which the
parameters were given.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.layout import Layout
from ..distributed.parts import Box, Spread, fill_, is_sharded, local, zeros
from .groups import Place, places, unique_names
from .options import ABOUT, CHECKS, LATER, from_plain, to_plain, validate

FORMAT = 1
_PLACES = ("params", "param_names", "layouts", "order", "held")
_CHUNK = 1 << 22


def fingerprint(tensor: Tensor) -> Tensor:
    """A 64-bit hash of a tensor's bits, as a 0-dim int64 tensor on its device; of a sharded one, this process's share.

    A sum over elements of (bits + 1) times an odd number of the element's position, modulo 2^64: independent of the
    order of summation, so that shards can be added up.
    """
    part = local(tensor).contiguous()
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[part.element_size()]
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    bits = part.view(-1).view(integers)
    box: Box = ((0, part.numel()),)
    strides: tuple[int, ...] = (1,)
    if is_sharded(tensor) and tensor.dim():
        bits, box = bits.view(part.shape), Spread.of(tensor).box()
        strides = torch.empty(tensor.shape, device="meta").stride()
    if not bits.numel():
        return total
    first = torch.zeros((), dtype=torch.int64, device=part.device)
    for (begin, end), stride in zip(box[1:], strides[1:], strict=True):  # positions within one slice of the rest
        first = first.unsqueeze(-1) + torch.arange(begin, end, device=part.device) * stride
    at_once = max(1, _CHUNK // max(1, first.numel()))
    for start in range(0, len(bits), at_once):
        chunk = bits[start : start + at_once].to(torch.int64)
        rows = torch.arange(start, start + len(chunk), device=part.device) + box[0][0]
        place = rows.view(-1, *[1] * first.dim()) * strides[0] + first
        total += ((chunk + 1) * (place * 0x5851F42D4C957F2E + 0x14057B7EF767814F)).sum()
    return total


class Resumable(torch.optim.Optimizer):
    """Abstract: an optimizer whose state dict describes itself. What it asks of the class below, and what it gives."""

    averages: bool
    _expected: dict[Tensor, tuple[_Pair, str]] = {}  # noqa: RUF012  exchanged whole, never written to

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_expected": self._expected}

    def look_at_weights(self) -> None:
        """An error if weights that were to come after the state are not the ones it was saved with."""
        if not self._expected:
            return
        prints = self.fingerprints(list(self._expected))
        for (pair, sequence), found in zip(self._expected.values(), prints, strict=True):
            if (error := _not_these_weights(pair, int(found), sequence)) is not None:
                raise ValueError(error)
        self._expected = {}

    @property
    @abstractmethod
    def training(self) -> bool:
        """Whether the weights are y rather than x."""

    @property
    @abstractmethod
    def skipped_steps(self) -> int:
        """How many steps were left out."""

    @abstractmethod
    def fingerprints(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Of the whole parameters, sharded or not."""

    @abstractmethod
    def holds(self, p: Tensor) -> bool:
        """Whether the state of a parameter is this process's to keep."""

    @abstractmethod
    def fit_state(self, *, replaced: bool = False) -> None:
        """Brings the state to where its parameters are, and drops what belongs to none; `replaced` soon by another."""

    @abstractmethod
    def state_spec(
        self, p: Tensor, group: Mapping[str, Any], layout: str
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name to shape and dtype of everything kept for a parameter between steps in train mode."""

    @abstractmethod
    def restore(self, *, training: bool, skipped_steps: int) -> None:
        """Takes the part of a loaded state that belongs to no parameter."""

    def about(self) -> dict[str, Any]:
        """What each group says of the whole; in the groups themselves, because some tools save only what is there."""
        sequence = "y" if self.training else "x"
        return dict(zip(ABOUT, (type(self).__name__, FORMAT, sequence, self.skipped_steps), strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on, in either mode; says which sequence the weights hold and what they are.

        Its tensors are the optimizer's own, as torch's are.
        """
        self.fit_state()
        packed = super().state_dict()
        everywhere = [place for group in self.param_groups for place in places(group)]
        held = {
            index: packed["state"].get(index, {})
            for index, place in enumerate(everywhere)
            if packed["state"].get(index) or (place.param.requires_grad and not self.holds(place.param))
        }
        prints = self.fingerprints([everywhere[index].param for index in held])
        states = {
            index: {**state, "fingerprint": stated, "order": torch.tensor(everywhere[index].order, device="cpu")}
            for (index, state), stated in zip(held.items(), prints, strict=True)
        }
        about = self.about()
        for group in packed["param_groups"]:
            group.update(about, held=[index in states for index in group["params"]])
        groups = [{key: to_plain(key, value) for key, value in group.items()} for group in packed["param_groups"]]
        return {**packed, "state": states, "param_groups": groups}

    @torch.inference_mode(False)  # what is loaded beside an evaluation, steps will write to
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from a state_dict(), once the weights saved with it are in the model; see docs/checkpoints.md."""
        self.fit_state(replaced=True)
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        said = _said(self, state_dict)
        pairs = _pair_up(self, state_dict)
        origin = {pair.place.param: pair.saved.group for pair in pairs}
        groups = [_merged(self, group, origin, state_dict["param_groups"]) for group in self.param_groups]
        options = {
            p: {**group, **merged}
            for group, merged in zip(self.param_groups, groups, strict=True)
            for p in group["params"]
        }
        prints = dict(zip(pairs, map(int, self.fingerprints([pair.place.param for pair in pairs])), strict=True))
        states = {pair.place.param: _checked(self, pair, options[pair.place.param], said["sequence"]) for pair in pairs}
        wrong = [error for pair in pairs if (error := _not_these_weights(pair, prints[pair], said["sequence"]))]
        by_names = all(isinstance(name, str) for group in state_dict["param_groups"] for name in group["params"])
        if wrong and not by_names:
            raise ValueError(wrong[0])

        self.state.clear()
        self.state.update({p: state for p, state in states.items() if state is not None})
        for group, merged in zip(self.param_groups, groups, strict=True):
            group.update(merged)
        self.restore(training=said["sequence"] == "y", skipped_steps=said["skipped_steps"])
        self._expected = {}
        if wrong:  # torch's set_state_dict brings the optimizer before the weights; they are looked at when next used
            self._expected = {pair.place.param: (pair, said["sequence"]) for pair in pairs}
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)


@dataclass(frozen=True)
class _Saved:
    """One parameter of a state dict."""

    group: int
    rule: str
    layout: str
    held: bool
    state: Mapping[str, Tensor] | None


@dataclass(frozen=True, eq=False)
class _Pair:
    """A parameter of the optimizer and its saved self."""

    place: Place
    name: str
    saved: _Saved


def _said(optimizer: Resumable, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    if not {"state", "param_groups"} <= state_dict.keys() or not state_dict["param_groups"]:
        raise ValueError(f"this is no optimizer state: it has the keys {sorted(map(str, state_dict))}")
    first = state_dict["param_groups"][0]
    mine = type(optimizer).__name__
    if "algorithm" not in first:
        raise ValueError(
            f"this state was not saved by {mine}; to start from a checkpoint of AdamW, Muon or schedulefree use "
            "anytime.start_from(optimizer, state)"
        )
    for number, group in enumerate(state_dict["param_groups"]):
        needed = ("params", "rule", "layouts", "order", *(ABOUT if number == 0 else ()))
        if missing := [key for key in needed if key not in group]:
            raise ValueError(f"group {number} of the state lacks {', '.join(map(repr, missing))}: it is not whole")
    if first["algorithm"] != mine:
        raise ValueError(f"the state is of {first['algorithm']}, this optimizer is {mine}")
    if first["format"] > FORMAT:
        raise ValueError(f"the state has format {first['format']}; this version reads up to {FORMAT}: upgrade anytime")
    return {key: first[key] for key in ABOUT}


def _pair_up(optimizer: Resumable, state_dict: Mapping[str, Any]) -> list[_Pair]:
    """Each parameter with its saved self: by name where both sides have names, else by the order they were given."""
    saved_groups = state_dict["param_groups"]
    states = state_dict["state"]
    by_order = {int(state["order"]): state for state in states.values() if "order" in state}
    here = [place for group in optimizer.param_groups for place in places(group)]
    labels = unique_names(optimizer.param_groups) or [f"parameter {place.order}" for place in here]
    if not by_order and not any("held" in group for group in saved_groups):
        # A tool made these entries for this very optimizer and left the lists as they were saved: its order tells.
        at = [(index, number) for number, group in enumerate(saved_groups) for index in group["params"]]
        if len(at) != len(here):
            raise ValueError(f"the state is of {len(at)} parameters, this optimizer has {len(here)}")
        return [
            _Pair(place, label, _Saved(number, saved_groups[number]["rule"], place.layout, False, states.get(index)))
            for place, label, (index, number) in zip(here, labels, at, strict=True)
        ]
    if not all("held" in group for group in saved_groups):
        raise ValueError("a group of the state lacks 'held', the list of what had a state: it is not whole")
    saved = [
        _Saved(number, group["rule"], layout, held, by_order.get(order))
        for number, group in enumerate(saved_groups)
        for layout, order, held in zip(group["layouts"], group["order"], group["held"], strict=True)
    ]
    names, saved_names = unique_names(optimizer.param_groups), unique_names(saved_groups)
    keys: Sequence[Any]
    saved_keys: Sequence[Any]
    if names is not None and saved_names is not None:
        keys, saved_keys = names, saved_names
        if set(keys) != set(saved_keys):
            missing, extra = sorted(set(keys) - set(saved_keys)), sorted(set(saved_keys) - set(keys))
            raise ValueError(
                f"names differ: the state lacks {_some(missing)} and has {_some(extra)} that this optimizer lacks"
            )
    else:
        if len(here) != len(saved):
            raise ValueError(f"the state is of {len(saved)} parameters, this optimizer has {len(here)}")
        keys = _ranks([place.order for place in here])  # numbers of groups that are gone are missing
        saved_keys = _ranks([i for group in saved_groups for i in group["order"]])
    found = dict(zip(saved_keys, saved, strict=True))
    return [_Pair(place, label, found[key]) for place, label, key in zip(here, labels, keys, strict=True)]


def _ranks(order: Sequence[int]) -> list[int]:
    rank = {number: i for i, number in enumerate(sorted(order))}
    return [rank[number] for number in order]


def _checked(optimizer: Resumable, pair: _Pair, options: Mapping[str, Any], sequence: str) -> dict[str, Tensor] | None:
    """The parameter's new state, or the error that says why the saved one is not its own."""
    (p, group, layout, _), name, saved = pair.place, pair.name, pair.saved
    if (saved.rule, saved.layout) != (group["rule"], layout):
        raise ValueError(
            f"{name} followed the rule {saved.rule!r} read as {saved.layout!r} in the state, "
            f"here {group['rule']!r} read as {layout!r}"
        )
    if not optimizer.holds(p):
        return None
    if not saved.state:
        if saved.held:
            raise ValueError(f"the state of {name} is missing, though it was there when this was saved")
        return None
    kept = {key: value for key, value in saved.state.items() if key not in ("fingerprint", "order")}
    spec = optimizer.state_spec(p, options, layout)
    expected = {key: shape for key, (shape, _) in spec.items()}
    if sequence == "x" and optimizer.averages:
        expected["y"] = tuple(p.shape)
    narrow = "residual" in kept
    precise = kept["d"].dtype if "d" in kept else None
    if narrow != ("residual" in expected) or (precise is not None and precise != spec["d"][1]):
        was = "weights narrower than float32" if narrow else f"{precise or 'wider'} weights"
        raise ValueError(
            f"the state of {name} was saved beside {was}, here they are {p.dtype}: build the model in the precision it "
            "had, load, and change it then"
        )
    shapes = {key: tuple(value.shape) for key, value in kept.items()}
    if shapes != expected:
        wrong = [k for k in sorted({*shapes, *expected}) if shapes.get(k) != expected.get(k)]
        if wrong == ["y"] and "y" not in shapes:
            raise ValueError(
                f"the state of {name} lacks the y that it has in eval mode, in which it was saved. Tools that load "
                "into a state made beforehand (torch.distributed.checkpoint) need it in that mode: optimizer.eval()"
            )
        detail = ", ".join(f"{k} is {shapes.get(k, 'absent')} and should be {expected.get(k, 'absent')}" for k in wrong)
        raise ValueError(f"the state of {name} ({tuple(p.shape)}, {p.dtype}) does not fit: {detail}")
    if "y" in kept and kept["y"].dtype != p.dtype:
        raise ValueError(f"the state of {name} was saved with {kept['y'].dtype} weights, here they are {p.dtype}")
    return {
        key: fill_(zeros(key, value.shape, value.dtype, p, Layout.parse(layout)), value) for key, value in kept.items()
    }


def _not_these_weights(pair: _Pair, found: int, sequence: str) -> str | None:
    """The words for weights that the state was not saved with."""
    stated = (pair.saved.state or {}).get("fingerprint")
    if stated is None or int(stated) == found:
        return None
    held = "the iterate Y (train mode)" if sequence == "y" else "the average X (eval mode)"
    return (
        f"the weights of {pair.name} are not those the state was saved with, which were {held}: load the weights "
        "first, saved at the same moment and in the same mode. To go on from other weights on purpose, remove "
        "'fingerprint' from the state's entries."
    )


def _merged(
    optimizer: Resumable,
    group: Mapping[str, Any],
    origin: Mapping[Tensor, int],
    saved_groups: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The saved options of a group that has the same members still; a regrouped one keeps its own."""
    origins = {origin[p] for p in group["params"]}
    if len(origins) != 1:
        return {}
    saved = saved_groups[origins.pop()]
    if len(saved["params"]) != len(group["params"]):
        return {}
    merged = {key: value for key, value in LATER.items() if key in group} | {
        key: from_plain(key, value, group.get(key))
        for key, value in saved.items()
        if key not in ABOUT and key not in _PLACES
    }
    # A scheduler may have left keys of its own there; they pass.
    known = {k: v for k, v in merged.items() if k in CHECKS and k in group}
    validate(known, known, type(optimizer).__name__)
    return merged


def _some(names: Sequence[str]) -> str:
    return (
        "nothing"
        if not names
        else ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    )
