"""From what a user gives to the groups that torch keeps: one rule each, every option present and legal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from .. import routing
from ..core.layout import Layout
from .options import ABOUT, FOREIGN, plain_number, validate, validate_together

Group = dict[str, Any]
Options = Mapping[str, Any]

#: Without the prefix adam_, these options of a group hold for its matrices and for the rest alike.
_SHARED = {"lr", "rate", "weight_decay", "warmup_steps"}
_SHARED |= {"averaging_power", "averaging_warmup", "beta_growth", "beta_growth_start", "decay_fading"}
_SHARED |= {"rate_fall", "rate_fall_start"}
_ROUTING = ("rule", "split", "pattern")


#: What a group has beside its options.
_OF_A_GROUP = ("rule", "layouts", "order", "param_names", *ABOUT)


class Place(NamedTuple):
    """A parameter in its group: how it is read as matrices, and its number among all that were given."""

    param: Tensor
    group: Group
    layout: str
    order: int


def places(group: Group) -> Iterator[Place]:
    for param, layout, order in zip(group["params"], group["layouts"], group["order"], strict=True):
        yield Place(param, group, layout, order)


def unique_names(groups: Sequence[Mapping[str, Any]]) -> list[str] | None:
    """The parameters' names, or None if not all have one of their own."""
    names = [name for group in groups for name in group.get("param_names", ())]
    return names if len(set(names)) == sum(len(group["params"]) for group in groups) else None


def _comparable(value: Any) -> Any:
    """The same for values that mean the same, another for others."""
    if isinstance(value, Tensor):
        return float(value), str(value.dtype), str(value.device)
    return id(value) if callable(value) else value


@dataclass(frozen=True)
class Ruled:
    """A rule's name (of `rules.RULES`) and its options with their defaults."""

    rule: str
    options: Options


@dataclass(frozen=True)
class Router:
    """What an optimizer does with parameters: a rule for matrices (or None: one rule for all), one for the rest."""

    owner: str
    matrix: Ruled | None
    rest: Ruled
    rules: routing.Rules
    unmatched: str

    def __post_init__(self) -> None:
        if self.unmatched not in ("auto", "raise"):
            raise ValueError(f"{self.owner}: unmatched is {self.unmatched!r}; it must be 'auto' or 'raise'")
        for ruled in filter(None, (self.matrix, self.rest)):
            prefix = "adam_" if self.matrix is not None and ruled is self.rest else ""
            validate(ruled.options, ruled.options, self.owner, prefix)

    def resolve(
        self, collected: Sequence[tuple[list[routing.Given], Group]], *, offset: int = 0, complete: bool = True
    ) -> tuple[list[Group], list[routing.Entry]]:
        """(groups, plan entries in the order given) of the user's groups; `offset` parameters came before."""
        collected = [(members, self._asked(options)) for members, options in collected]
        everything = [given for members, _ in collected for given in members]
        matched = iter(routing.match(everything, self.rules, unmatched=self.unmatched, complete=complete))
        heads = routing.heads(everything)
        routed: list[list[tuple[routing.Given, routing.Entry, Group]]] = []
        for members, options in collected:
            routed.append([])
            for given in members:
                own = next(matched)
                entry = routing.classify(given, offset + sum(map(len, routed)), heads, {**options, **own})
                if self.matrix is None:
                    if {**options, **own}.get("rule") == "matrix":
                        raise ValueError(
                            f"{entry.name}: {self.owner} has one rule for all parameters, none for matrices"
                        )
                    entry = replace(entry, matrix=False, layout=Layout(), reason="one rule for all")
                routed[-1].append((given, entry, own))
        patterns_of_matrices = {own.get("pattern") for part in routed for _, entry, own in part if entry.matrix}

        groups: list[Group] = []
        entries: list[routing.Entry] = []
        for (_, options), part in zip(collected, routed, strict=True):
            made: dict[str, Group] = {}
            group_has_matrix = any(entry.matrix for _, entry, _ in part)
            for given, entry, own in part:
                values = {
                    **self._own(options, entry.matrix, group_has_matrix),
                    **self._own(own, entry.matrix, own.get("pattern") in patterns_of_matrices),
                }
                of_vectors = values.get("vector_betas", self.rest.options.get("vector_betas"))
                if given.param.ndim < 2 and of_vectors is not None:
                    values.setdefault("betas", of_vectors)
                group = self._group(entry.matrix, values)
                alike = repr(sorted((key, _comparable(value)) for key, value in group.items()))
                group = made.setdefault(alike, group)
                group["params"].append(given.param if given.name is None else (given.name, given.param))
                group["layouts"].append(str(entry.layout))
                group["order"].append(offset + len(entries))
                entries.append(replace(entry, rule=group["rule"], rate=group["rate"]))
            if not part:
                made[""] = self._group(True, self._own(options, True, True))
                made[""] |= {"param_names": []} if any(given.name for given in everything) else {}
            groups.extend(made.values())
        return groups, entries

    def _group(self, matrix: bool, values: Options) -> Group:
        ruled = self.matrix if matrix and self.matrix else self.rest
        group = {"params": [], "rule": ruled.rule, **ruled.options, **values, "layouts": [], "order": []}
        group = {**{key: plain_number(value) for key, value in group.items()}, "routed": True}
        if isinstance(group["lr"], Tensor):
            group["lr"] = group["lr"].clone().reshape(())  # a scheduler multiplies each group's in place
        validate_together(group, self.owner)
        return group

    def _asked(self, options: Group) -> Group:
        """The options alone of what may be a copy of some optimizer's group."""
        if "layouts" not in options:
            return options
        asked = {key: value for key, value in options.items() if key not in _OF_A_GROUP}
        of_the_rest = self.matrix is not None and options.get("rule") == self.rest.rule
        return {**asked, "rule": "rest"} if of_the_rest else asked

    def _own(self, given: Options, matrix: bool, has_matrix: bool) -> Group:
        """The options that a user's group or pattern sets for one parameter of it.

        A key goes to matrices, `adam_key` to the rest. Without the prefix a key reaches the rest too if both share its
        meaning, or if the group or pattern covers no matrix at all.
        """
        given = {key: value for key, value in given.items() if key not in _ROUTING}
        foreign = {key: value for key, value in given.items() if key in FOREIGN and key != "param_names"}
        if self.matrix is None:
            validate(given, [*self.rest.options, *_ROUTING[:2]], self.owner)
            return given
        prefixed = {f"adam_{key}": key for key in self.rest.options}
        plain = {key: value for key, value in given.items() if key not in prefixed and key not in FOREIGN}
        adam = {prefixed[key]: value for key, value in given.items() if key in prefixed}
        known = {*self.matrix.options, *prefixed} if has_matrix else {*self.rest.options}
        validate(plain, known | {*_ROUTING[:2]}, self.owner)
        validate(adam, self.rest.options, self.owner, "adam_")
        if matrix:
            return {**foreign, **plain}
        shared = {key: v for key, v in plain.items() if key in self.rest.options and (key in _SHARED or not has_matrix)}
        return {**foreign, **shared, **adam}
