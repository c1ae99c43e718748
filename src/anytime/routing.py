"""Which parameter goes to which rule, and the plan that says so.

Ordered patterns of the user first, the first match wins; then what the module says (embeddings, convolutions), the
name and the shape. Nothing is left uncovered: what no rule can take is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from .core.layout import Layout

Overrides: TypeAlias = Mapping[str, Any]
Rules: TypeAlias = Mapping[str, "str | Overrides"]
Params: TypeAlias = "nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]"

_EMBEDDING = re.compile(r"(^|\.)(\w*emb|\w*embed\w*|wte|wpe)(\.|$)")
#: Of parameters that are no module's weight: embeddings, learned positions, tokens that a model brings along.
_TABLE = re.compile(r"(^|\.)(\w*emb|\w*embed\w*|(\w+_)?(pos|positions?|positional|tokens?)(_\w+)?)$")
_HEAD = re.compile(r"(^|.*\.)(lm_head|head|classifier|score|unembed\w*|output_projection)\.")
_FUSED = re.compile(r"(qkv|c_attn|in_proj|query_key_value|gate_up|w13)")
_GATES = {nn.LSTM: 4, nn.LSTMCell: 4, nn.GRU: 3, nn.GRUCell: 3}


@dataclass(frozen=True)
class Entry:
    """One parameter: where it went and why. `aliases` are its other names, where weights are tied."""

    name: str
    shape: tuple[int, ...]
    matrix: bool
    layout: Layout
    reason: str
    rule: str = ""
    rate: float = 1.0
    frozen: bool = False
    aliases: tuple[str, ...] = ()


@dataclass
class Plan:
    """What was routed where, in the order the parameters were given. `print(optimizer.plan)` shows it."""

    entries: list[Entry] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, name: str) -> Entry:
        for entry in self.entries:
            if name == entry.name or name in entry.aliases:
                return entry
        raise KeyError(name)

    def __str__(self) -> str:
        head = ("parameter", "shape", "rule", "read as", "rate", "why")
        rows = [
            (
                " = ".join((e.name, *e.aliases)),
                "×".join(map(str, e.shape)) or "scalar",
                e.rule + (" (frozen)" if e.frozen else ""),
                str(e.layout) if e.matrix else "-",
                f"{e.rate:g}",
                e.reason,
            )
            for e in self.entries
        ]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)
        ]
        totals: dict[str, list[int]] = {}
        for e in self.entries:
            total = totals.setdefault(e.rule, [0, 0])
            total[0] += 1
            total[1] += torch.Size(e.shape).numel()
        lines += ["", *(f"{rule}: {count} tensors, {size:,} parameters" for rule, (count, size) in totals.items())]
        return "\n".join(lines)


@dataclass(frozen=True)
class Given:
    """A parameter as the user gave it: its name (None where it has none), its other names and its module."""

    param: Tensor
    name: str | None
    aliases: tuple[str, ...] = ()
    module: nn.Module | None = None


def collect(params: Params) -> list[tuple[list[Given], dict[str, Any]]]:
    """The user's parameters as [(parameters, options of that group)], whatever form they came in."""
    if isinstance(params, nn.Module):
        if not (found := _from_module(params)):
            raise ValueError(f"{type(params).__name__} has no parameters")
        return [(found, {})]
    if isinstance(params, Tensor):
        raise TypeError("params must be a module or an iterable of parameters, not a single tensor: use [tensor]")
    if isinstance(params, set | frozenset):
        raise TypeError("parameters in a set have no order; use a list")
    if isinstance(params, dict) or not isinstance(params, Iterable):
        hint = "it must be a module or an iterable of parameters"
        if isinstance(params, dict):
            hint = "a group goes into a list" if "params" in params else "pass its .items()"
        raise TypeError(f"params is {type(params).__name__}: {hint}")
    items = list(params)
    if not items:
        raise ValueError("the optimizer got an empty parameter list; a generator can be read only once")
    if any(isinstance(item, dict) for item in items):
        groups = []
        for item in items:
            if not isinstance(item, dict):
                raise TypeError(f"params mixes groups (dicts) with {type(item).__name__}")
            groups.append(collect_group(item))
        return groups
    return [(_from_items(items), {})]


def collect_group(group: dict[str, Any]) -> tuple[list[Given], dict[str, Any]]:
    if "params" not in group:
        raise ValueError(f"a parameter group needs the key 'params'; this one has {sorted(group)}")
    options = {key: value for key, value in group.items() if key != "params"}
    params = group["params"]
    if isinstance(params, nn.Module):
        return _from_module(params), options
    if isinstance(params, set | frozenset):
        raise TypeError("parameters in a set have no order; use a list")
    return _from_items([params] if isinstance(params, Tensor) else list(params)), options


def _from_module(model: nn.Module) -> list[Given]:
    names: dict[Tensor, list[str]] = {}
    owners: dict[Tensor, list[nn.Module]] = {}
    wrapped = [
        f"{prefix}.module." if prefix else "module."
        for prefix, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.parallel.DistributedDataParallel)
    ]
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            full = f"{prefix}.{name}" if prefix else name
            for wrapper in wrapped:  # the name that it has without
                if full.startswith(wrapper):
                    full = wrapper.removesuffix("module.") + full.removeprefix(wrapper)
            full = plain_name(full)
            if full not in names.setdefault(param, []):
                names[param].append(full)
            owners.setdefault(param, []).append(module)
    found = []
    for param, all_names in names.items():
        # A tied weight belongs to its embedding, whichever module comes first.
        module = next((m for m in owners[param] if isinstance(m, nn.Embedding | nn.EmbeddingBag)), owners[param][0])
        found.append(Given(param, all_names[0], tuple(all_names[1:]), module))
    return found


def _from_items(items: Sequence[Any]) -> list[Given]:
    found: dict[Tensor, Given] = {}
    for item in items:
        name, param = item if isinstance(item, tuple) and len(item) == 2 else (None, item)
        name = plain_name(name) if isinstance(name, str) else None
        if isinstance(param, nn.Module):
            raise TypeError("several modules go into groups: [{'params': first}, {'params': second}]")
        if not isinstance(param, Tensor):
            raise TypeError(f"an optimizer takes tensors, (name, tensor) pairs or groups, not {type(param).__name__}")
        if param in found:
            first = found[param]
            if name is None or first.name is None:
                raise ValueError(f"parameter {len(found)} of shape {tuple(param.shape)} is given twice")
            found[param] = Given(param, first.name, (*first.aliases, name), None)
        else:
            found[param] = Given(param, name)
    if len({given.name is None for given in found.values()}) > 1:
        raise ValueError("either all parameters have names or none")
    return list(found.values())


def plain_name(name: str) -> str:
    """The name without what torch.compile and checkpoint_wrapper put before it: all of them share checkpoints."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def match(given: Sequence[Given], rules: Rules, *, unmatched: str, complete: bool = True) -> list[dict[str, Any]]:
    """The overrides of the first pattern that matches each parameter, under any of its names.

    A pattern that decides nothing is an error where the parameters are complete.
    """
    parsed = {pattern: _overrides(pattern, value) for pattern, value in rules.items()}
    if rules and any(g.name is None for g in given):
        raise ValueError("rules match parameters by name: pass the module or model.named_parameters()")
    decided: dict[str, int] = dict.fromkeys(parsed, 0)
    chosen: list[dict[str, Any]] = []
    for g in given:
        names = (g.name or "", *g.aliases)
        pattern = next((p for p in parsed if any(fnmatchcase(n, p) for n in names)), None)
        if pattern is not None:
            decided[pattern] += 1
        elif unmatched == "raise" and g.param.requires_grad:
            raise ValueError(f"parameter {g.name!r} is left over: no pattern of rules matches it")
        chosen.append({**parsed[pattern], "pattern": pattern} if pattern is not None else {})
    for pattern, count in decided.items():
        if count == 0 and complete:
            shadowed = any(fnmatchcase(n, pattern) for g in given for n in (g.name or "", *g.aliases))
            why = "decides nothing: earlier patterns take all it matches" if shadowed else "matches no parameter"
            some = ", ".join(repr(g.name) for g in given[:5])
            raise ValueError(
                f"pattern {pattern!r} of rules {why}; the parameters are {some}{', …' if len(given) > 5 else ''}"
            )
    return chosen


def _overrides(pattern: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, str | Mapping):
        raise TypeError(f"rules[{pattern!r}] is {value!r}; it must be 'matrix', 'rest' or a dict of options")
    return {"rule": value} if isinstance(value, str) else dict(value)


def classify(given: Given, index: int, heads: Mapping[Tensor, str], overrides: Overrides) -> Entry:
    """Matrix or not, read how, and why. `overrides` may hold "rule" ("matrix" or "rest") and "split"."""
    param, module = given.param, given.module
    name = given.name if given.name is not None else f"parameter {index}"
    shape = tuple(param.shape)
    if not param.is_floating_point():
        if param.requires_grad:
            raise TypeError(f"{name} is {param.dtype}: only real floating-point parameters can be optimized")
        return Entry(name, shape, False, Layout(), str(param.dtype), frozen=True, aliases=given.aliases)
    flat = isinstance(module, nn.modules.conv._ConvNd) or param.ndim > 3
    layout = _layout(name, shape, flat, overrides.get("split"))
    matrix, reason = _automatic(given, name, layout, heads)
    forced = overrides.get("rule")
    if forced is not None:
        if forced not in ("matrix", "rest"):
            raise ValueError(f"rule for {name} is {forced!r}; it must be 'matrix' or 'rest'")
        if forced == "matrix" and (param.ndim < 2 or param.numel() == 0):
            raise ValueError(
                f"{name} of shape {shape} cannot follow the matrix rule: a matrix has two dimensions, not empty"
            )
        where = f"pattern {overrides['pattern']!r}" if "pattern" in overrides else "its group"
        matrix, reason = forced == "matrix", f"{where} says so"
    elif layout.sizes and not matrix:
        raise ValueError(f"{name} cannot be split: it is no matrix ({reason}); add rule='matrix' if it is one")
    return Entry(
        name,
        shape,
        matrix,
        layout if matrix else Layout(),
        reason,
        frozen=not param.requires_grad,
        aliases=given.aliases,
    )


def heads(given: Sequence[Given]) -> dict[Tensor, str]:
    """Weights of output layers, with the reason: the last matrix of a module called as a head is, and the last Linear
    if it has the shape of an embedding that is not tied.

    The last one only, because a classifier may have hidden layers, and hidden layers may well be as wide as a table of
    positions is long.
    """
    found: dict[Tensor, str] = {}
    by_name: dict[str, Tensor] = {}
    for g in given:
        if g.name is not None and g.param.ndim == 2 and (called := _HEAD.match(g.name)):
            by_name[called[0]] = g.param
    found |= dict.fromkeys(by_name.values(), "head, by its name")
    embeddings = [g for g in given if isinstance(g.module, nn.Embedding | nn.EmbeddingBag)]
    linear = [g.param for g in given if isinstance(g.module, nn.Linear) and g.param.ndim == 2]
    tied = any(g.aliases for g in embeddings)
    if linear and not tied and linear[-1].shape in {g.param.shape for g in embeddings}:
        found.setdefault(linear[-1], "head, of the embedding's shape")
    return found


def _automatic(given: Given, name: str, layout: Layout, heads: Mapping[Tensor, str]) -> tuple[bool, str]:
    param, module = given.param, given.module
    if param.numel() == 0:
        return False, "empty"
    if param.ndim < 2:
        return False, "scalar" if param.ndim == 0 else "vector: bias, gain or norm"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return False, "embedding" + (", tied" if given.aliases else "")
    _, m, n = layout.shape(param.shape)
    if min(m, n) == 1:
        return False, f"{m}×{n}: a side of 1"
    if _TABLE.search(name):
        return False, "embedding, by its name"
    if layout.flat:
        return True, f"kernel as {m}×{n}"
    if not isinstance(module, nn.Linear) and _EMBEDDING.search(name):
        return False, "embedding, by its name"
    if param in heads:
        return False, heads[param]
    if module is None and given.aliases and param.ndim == 2:
        return False, "tied under two names"
    if layout.sizes:
        return True, "split as asked"
    if param.ndim > 2:
        return True, f"{param[..., 0, 0].numel()} matrices of {m}×{n}"
    if (gates := _GATES.get(type(module))) and "weight_hr" not in name:
        return True, f"hidden matrix; {gates} gates, split them?"
    return True, "hidden matrix" + ("; looks fused, split it?" if _FUSED.search(name) else "")


def _layout(name: str, shape: tuple[int, ...], flat: bool, split: Any) -> Layout:
    """split: a number of equal parts of the rows, the parts' sizes, or {"sizes": either, "dim": 0 rows, 1 columns}."""
    if split is None:
        return Layout(flat)
    if isinstance(split, Mapping) and not {"sizes"} <= split.keys() <= {"sizes", "dim"}:
        raise ValueError(f"split of {name}: the keys are 'sizes' and 'dim', not {sorted(map(str, split))}")
    sizes: Any = split["sizes"] if isinstance(split, Mapping) else split
    dim = split.get("dim", 0) if isinstance(split, Mapping) else 0
    if len(shape) < 2:
        raise ValueError(f"{name} has the shape {shape} and cannot be split: only matrices can")
    if dim not in (0, 1):
        raise ValueError(
            f"split of {name}: dim is {dim!r} and must be 0 (rows) or 1 (columns) of a matrix, shape {shape}"
        )
    side = Layout(flat).shape(shape)[1 + dim]
    if isinstance(sizes, int):
        if sizes < 1 or side % sizes:
            raise ValueError(
                f"split of {name}: {side} {('rows', 'columns')[dim]} do not divide into {sizes} equal parts"
            )
        sizes = (side // sizes,) * sizes
    if not isinstance(sizes, Sequence) or isinstance(sizes, str):
        raise ValueError(f"split of {name}: sizes is {sizes!r}; it must be a number of equal parts or the parts' sizes")
    sizes = tuple(sizes)
    if any(not isinstance(s, int) or s < 1 for s in sizes) or sum(sizes) != side:
        raise ValueError(f"split of {name}: sizes {sizes} must be positive and add up to {side}")
    return Layout(flat, dim, sizes)
