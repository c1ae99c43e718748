"""Plans as text, tables and JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ..config import OptimizerConfig
from .cost import fullest, held_bytes, memory_seconds, optimizer_messages, polar_seconds
from .mesh import weights_of
from .plan import Plan
from .units import size_of, time_of


def heading(found: Plan) -> str:
    w, m, mesh = found.work, found.model, found.mesh
    owners = f", owners={w.owners!r}" if w.owners else ""
    again = ", activations computed again" if w.recompute else ""
    return (
        f"{found.name}: {m.layers} layers × {m.width:,}, {m.parameters:,} parameters; {mesh.gpus:,} GPUs: "
        f"{mesh.words}{owners}\n"
        f"{found.tokens:,} tokens a step: {mesh.data:,} × {w.parts(mesh)} × {w.at_once} sequences of {m.context:,}"
        f"{again}"
    )


def memory_cells(found: Plan) -> list[list[str]]:
    """What the fullest GPU holds, its heading first."""
    m = found.memory
    scalars = ("step", "weight_sum", "beta")
    state = [[f"state: {name}", size_of(size), "counted"] for name, size in m.state.items() if name not in scalars]
    small = sum(m.state.get(name, 0) for name in scalars)
    rows = [
        ["parameters", size_of(m.parameters), "counted"],
        ["gradients", size_of(m.gradients), "counted"],
        *state,
        ["state: t, Σw, β", size_of(small), "counted"],
        ["gathered, or copies in bfloat16", size_of(m.gathered), "estimated"],
        ["activations", size_of(m.activations), "estimated"],
        ["logits", size_of(m.logits), "estimated"],
        ["working memory of the optimizer", size_of(m.optimizer), "estimated, not beside the three before"],
        ["at the highest", size_of(m.total), f"of {size_of(found.machine.usable)} that can be used"],
    ]
    return [["on the fullest GPU", "bytes", ""], *rows]


def message_cells(found: Plan) -> list[list[str]]:
    """What a GPU sends in a step."""
    rows = [
        [f"{m.of}: {m.what}", f"{m.group:,}", f"{m.elements:,}", size_of(m.bytes), time_of(found.machine.seconds(m))]
        for m in found.messages
    ]
    return [["sent by a GPU in a step", "among", "elements", "bytes", "time"], *rows]


def time_line(found: Plan) -> str:
    return (
        f"optimizer step {time_of(found.optimizer_seconds)}: polar factors {time_of(found.polar_seconds)}, "
        f"memory {time_of(found.memory_seconds)}, messages {time_of(found.sending_seconds('optimizer'))}; "
        f"forward and backward {time_of(found.training_seconds)}, messages of training "
        f"{time_of(found.sending_seconds('training'))} (estimated)"
    )


def owners_line(found: Plan, optimizer: OptimizerConfig, dtype: str = "float32") -> str:
    """Under DDP without owners, what they would change; nothing elsewhere."""
    if found.mesh.kind != "DDP" or found.work.owners is not None:
        return ""
    weights = weights_of(found.model, optimizer, dtype)
    said = []
    for owners in ("factor", "state"):
        messages = optimizer_messages(weights, found.mesh, owners)
        seconds = sum(map(found.machine.seconds, messages)) + sum(
            part_of(weights, found.mesh, owners, found.machine) for part_of in (polar_seconds, memory_seconds)
        )
        state = sum(held_bytes(weights, found.mesh, owners, fullest(weights, found.mesh, owners))[2].values())
        less = sum(found.memory.state.values()) - state
        said.append(f"{owners!r} {time_of(seconds)}{f' and {size_of(less)} less state' if less else ''}")
    return f"with owners: {', '.join(said)}"


def line_cells(plans: Sequence[Plan]) -> list[list[str]]:
    """A line for each of several."""
    columns: dict[str, Callable[[Plan], str]] = {
        "model": lambda p: p.name,
        "GPUs": lambda p: f"{p.mesh.gpus:,}",
        "layout": lambda p: p.mesh.words + ("" if p.fits else " (does not fit)"),
        "sequences at once": lambda p: f"{p.work.at_once} × {p.model.context:,}{', again' if p.work.recompute else ''}",
        "weights, gradients, state": lambda p: f"{size_of(p.memory.fixed)}",
        "highest": lambda p: f"{size_of(p.memory.total)}",
        "training sends": lambda p: f"{size_of(p.sent('training'))}",
        "optimizer sends": lambda p: f"{size_of(p.sent('optimizer'))}",
        "optimizer step": lambda p: f"{time_of(p.optimizer_seconds)}",
        "its share": lambda p: f"{p.share:.1%}",
    }
    return [list(columns), *([write(p) for write in columns.values()] for p in plans)]


def markdown(cells: Sequence[Sequence[str]]) -> str:
    head, *body = cells
    rule = ["---"] * len(head)
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *body))


def as_json(found: Plan) -> dict[str, Any]:
    """Plain values; bytes, elements and seconds."""
    values = dataclasses.asdict(found)
    values["mesh"] |= {"replicas": found.mesh.replicas, "kind": found.mesh.kind}
    values["model"] |= {"parameters": found.model.parameters, "matrix_parameters": found.model.matrix_parameters}
    values["memory"] |= {"fixed": found.memory.fixed, "total": found.memory.total, "usable": found.machine.usable}
    for message, given in zip(values["messages"], found.messages, strict=True):
        message["seconds"] = found.machine.seconds(given)
    return values | {
        "fits": found.fits,
        "tokens": found.tokens,
        "sent": {of: found.sent(of) for of in ("training", "optimizer")},
        "optimizer_seconds": found.optimizer_seconds,
        "training_seconds": found.training_seconds,
    }
