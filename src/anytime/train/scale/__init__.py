"""What a model takes on one GPU or many: the bytes that each holds, and those that it sends in a step.

Weights, gradients, state and messages are counted from the shapes, for the GPU that has most; every one of them can be
compared with a run, and tests do. Activations, the working memory of the optimizer and times are estimates: by the
formulas at `Activations`, `working` and `Plan.optimizer_seconds`, whose constants are measured ones.

GPUs form a mesh: replicas × shard × tensor, neighbours last. A replica's weights are cut over shard · tensor GPUs.
"""

from __future__ import annotations

from .cost import (
    Machine,
    Message,
    Wire,
    Work,
    all_reduce,
    exchanged,
    fullest,
    held_bytes,
    memory_of,
    optimizer_messages,
    training_messages,
)
from .mesh import SHAPES, Mesh, chunk, model_of, weights_of
from .plan import Asked, Plan, plan
from .show import as_json, heading, line_cells, markdown, memory_cells, message_cells, owners_line, time_line

__all__ = [
    "SHAPES",
    "Asked",
    "Machine",
    "Mesh",
    "Message",
    "Plan",
    "Wire",
    "Work",
    "all_reduce",
    "as_json",
    "chunk",
    "exchanged",
    "fullest",
    "heading",
    "held_bytes",
    "line_cells",
    "markdown",
    "memory_cells",
    "memory_of",
    "message_cells",
    "model_of",
    "optimizer_messages",
    "owners_line",
    "plan",
    "time_line",
    "training_messages",
    "weights_of",
]
