"""Searches along coordinates: a function of the losses known, replayed after each new one, so that nothing is saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: How many half octaves from the study's rate a search may go.
FARTHEST = 10


@dataclass(frozen=True)
class Try:
    """A point of a method's search: its setting, and its rate in half octaves of the study's."""

    setting: tuple[tuple[str, Any], ...]
    octave: int

    @classmethod
    def of(cls, setting: Mapping[str, Any], octave: int) -> Try:
        return cls(tuple(sorted((k, tuple(v) if isinstance(v, list) else v) for k, v in setting.items())), octave)

    @property
    def said(self) -> str:
        """Its setting, in words."""
        return ", ".join(f"{k} {v}" for k, v in self.setting if v is not None)


Loss = Callable[[Try], float | None]
#: A search: given the losses so far, which grow as it goes on, what it wants to know, a batch at a time.
Rule = Callable[[Mapping[Try, float]], Iterator[list[Try]]]


def search(rule: Rule, loss: Loss, limit: int) -> tuple[list[Try], list[Try]]:
    """(what is to be tried next, what was tried, the best first), of at most so many tries. A function of the losses
    alone: rows may come in any order. One that diverged counts as infinitely bad."""
    known: dict[Try, float] = {}
    wants: list[Try] = []
    for points in rule(known):
        fresh = [point for point in dict.fromkeys(points) if point not in known][: limit - len(known)]
        values = {point: loss(point) for point in fresh}
        known |= {point: value for point, value in values.items() if value is not None}
        wants = [point for point, value in values.items() if value is None]
        if wants or len(known) == limit:
            break
    return wants, sorted(known, key=lambda point: known[point])


def rates(point: Try, by: int) -> list[Try]:
    """So many half octaves below and above."""
    return [Try(point.setting, o) for o in (point.octave - by, point.octave + by) if abs(o) <= FARTHEST]


def coordinates(axes: Mapping[str, Sequence[Any]], centre: Try, known: Mapping[Try, float]) -> Iterator[list[Try]]:
    """One step along each coordinate, the rate's a factor of 2; then all that were better at once, or the best of them
    if that is better still; and so on from there. Ends where no step helps, with the half octaves around."""

    def steps(point: Try) -> list[list[Try]]:
        """Neighbours, coordinate by coordinate: the rate, then the axes in their order."""
        setting, found = dict(point.setting), [rates(point, 2)]
        for axis, values in axes.items():
            at = values.index(setting[axis])
            beside = [*values[max(0, at - 1) : at], *values[at + 1 : at + 2]]
            found.append([Try.of({**setting, axis: value}, point.octave) for value in beside])
        return found

    def star(point: Try) -> list[Try]:
        return [point, *(neighbour for each in steps(point) for neighbour in each)]

    yield star(centre)
    while True:
        better = [best for each in steps(centre) if (best := min([centre, *each], key=known.__getitem__)) != centre]
        if not better:
            break
        moves = {axis: value for best in better for axis, value in set(best.setting) - set(centre.setting)}
        octave = centre.octave + sum(best.octave - centre.octave for best in better)
        joint = Try.of({**dict(centre.setting), **moves}, octave)
        yield star(joint)  # before it is known whether the search goes on from there: fewer rounds
        centre = min([*better, joint], key=known.__getitem__)
        yield star(centre)
    yield rates(centre, 1)


def bracket(points: Sequence[Try], known: Mapping[Try, float]) -> Iterator[list[Try]]:
    """These points, then rates alone, until the best is between two others, half an octave apart."""
    yield [point for point in points if abs(point.octave) <= FARTHEST]
    while True:
        best = min(known, key=known.__getitem__)
        tried = sorted(point.octave for point in known if point.setting == best.setting)
        between = tried[0] < best.octave < tried[-1]
        by = 1 if between or abs(best.octave) > FARTHEST - 2 else 2
        wants = [point for point in rates(best, by) if point not in known]
        if not wants:
            return
        yield wants
