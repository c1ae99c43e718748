"""Which mesh for a model on so many GPUs, and whether it fits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from ...distributed.owners import MODES
from ..config import OptimizerConfig
from ..errors import UserError
from ..model import ModelConfig
from ..parallel import check_model, divisors
from .cost import (
    Machine,
    Memory,
    Message,
    Wire,
    Work,
    memory_of,
    memory_seconds,
    optimizer_messages,
    polar_seconds,
    training_messages,
)
from .mesh import Mesh, model_of, weights_of
from .units import size_of

#: Tokens of a step where nobody says, if every GPU then has a sequence.
BATCH_TOKENS = 512 * 1024
#: Most sequences at once where nobody says; more are hardly faster.
AT_ONCE = 32


@dataclass(frozen=True)
class Plan:
    """What a model takes in one arrangement, and why this one."""

    name: str
    model: ModelConfig
    mesh: Mesh
    work: Work
    machine: Machine
    memory: Memory
    messages: tuple[Message, ...] = ()
    polar_seconds: float = 0.0
    memory_seconds: float = 0.0
    reason: str = ""

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.machine.usable

    @property
    def tokens(self) -> int:
        return self.work.sequences * self.model.context

    def sent(self, of: str) -> int:
        return sum(m.bytes for m in self.messages if m.of == of)

    def sending_seconds(self, of: str) -> float:
        return sum(self.machine.seconds(m) for m in self.messages if m.of == of)

    @property
    def optimizer_seconds(self) -> float:
        """Of a step, with nothing hidden behind anything else."""
        return self.polar_seconds + self.memory_seconds + self.sending_seconds("optimizer")

    @property
    def training_seconds(self) -> float:
        """Of the forward and backward passes alone, at the rate of products; a third more where they are repeated."""
        again = 4 / 3 if self.work.recompute else 1.0
        return again * self.tokens * self.model.flops_per_token / (self.mesh.gpus * self.machine.products)

    @property
    def share(self) -> float:
        """The optimizer's part of a step whose messages are all hidden but its own."""
        return self.optimizer_seconds / (self.optimizer_seconds + self.training_seconds)


@dataclass(frozen=True)
class Asked:
    """What a plan is wanted for; None leaves the choice to the planner."""

    model: str = "125M"
    gpus: int = 1
    shard: int | None = None
    tensor: int | None = None
    owners: str | None = None
    batch_tokens: int | None = None
    micro_batch: int | None = None
    recompute: bool | None = None
    context: int | None = None
    vocabulary: int | None = None
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    dtype: str = "float32"
    wire: Wire = field(default_factory=lambda: Wire())


def sequences(asked: Asked, model: ModelConfig, mesh: Mesh) -> int:
    """Of a step: those asked for, else about BATCH_TOKENS, and one for each GPU that reads at least."""
    if asked.batch_tokens is None:
        return mesh.data * max(1, BATCH_TOKENS // (model.context * mesh.data))
    each = model.context * mesh.data
    if asked.batch_tokens < 1 or asked.batch_tokens % each:
        raise UserError(
            f"batch_tokens is {asked.batch_tokens:,}, must be a multiple of {each:,}: a sequence of {model.context:,} "
            f"for each of {mesh.data}"
        )
    return asked.batch_tokens // model.context


def _plan(asked: Asked, machine: Machine, mesh: Mesh, recompute: bool) -> Plan:
    """Of one arrangement, with as many sequences at once as fit, or one."""
    model = model_of(asked.model, context=asked.context, vocabulary=asked.vocabulary)
    check_model(model, mesh.shard, mesh.tensor)
    if asked.owners is not None and (asked.owners not in MODES or mesh.shard * mesh.tensor > 1):
        raise UserError(f"owners is {asked.owners!r}, must be one of {', '.join(MODES)}, with shard and tensor 1")
    weights = weights_of(model, asked.optimizer, asked.dtype)
    total = sequences(asked, model, mesh)
    each = total // mesh.data
    if asked.micro_batch is None:
        sizes = [n for n in range(min(each, AT_ONCE), 0, -1) if each % n == 0]
    elif asked.micro_batch < 1 or each % asked.micro_batch:
        raise UserError(f"micro_batch is {asked.micro_batch}, must divide the {each} sequences of a GPU's step")
    else:
        sizes = [asked.micro_batch]
    for size in sizes:
        work = Work(total, size, recompute, asked.owners)
        memory = memory_of(model, weights, mesh, work, wire=asked.wire)
        if memory.total <= machine.usable:
            break
    return Plan(asked.model, model, mesh, work, machine, memory)


def _complete(found: Plan, asked: Asked, reason: str) -> Plan:
    """With what only the chosen arrangement is asked for."""
    weights, mesh, owners = weights_of(found.model, asked.optimizer, asked.dtype), found.mesh, asked.owners
    return dataclasses.replace(
        found,
        messages=(
            *training_messages(found.model, weights, mesh, found.work, asked.wire),
            *optimizer_messages(weights, mesh, owners),
        ),
        polar_seconds=polar_seconds(weights, mesh, owners, found.machine),
        memory_seconds=memory_seconds(weights, mesh, owners, found.machine),
        reason=reason,
    )


def candidates(asked: Asked, machine: Machine) -> Iterator[tuple[int, int, bool]]:
    """Shard, tensor and recomputation to try, those that send least first. Sharding costs messages that can be hidden,
    recomputation a third more work, and the sums of tensor parallelism wait for nothing: each comes when the one before
    is not enough."""
    node = [n for n in divisors(asked.gpus) if n <= machine.node]
    for tensor in node if asked.tensor is None else [asked.tensor]:
        shards = divisors(asked.gpus // tensor) if asked.shard is None else [asked.shard]
        for recompute in [False, True] if asked.recompute is None else [asked.recompute]:
            for shard in shards:
                yield shard, tensor, recompute


def plan(asked: Asked, machine: Machine) -> Plan:
    """The arrangement asked for, else the smallest that fits."""
    Mesh(asked.gpus, tensor=1 if asked.tensor is None else asked.tensor)
    given = asked.shard is not None and asked.tensor is not None
    wrong: UserError | None = None
    before: Plan | None = None
    least: Plan | None = None
    for shard, tensor, recompute in candidates(asked, machine):
        try:
            found = _plan(asked, machine, Mesh(asked.gpus, shard, tensor), recompute)
        except UserError as refused:  # as the others may be, for other reasons; the first is of the plainest
            wrong = wrong or refused
            continue
        if found.fits:
            return _complete(found, asked, _reason(found, before, given))
        before = found
        least = found if least is None or found.memory.total < least.memory.total else least
    if least is None:
        assert wrong is not None
        raise wrong
    return _complete(least, asked, _too_large(least))


def _reason(found: Plan, before: Plan | None, given: bool) -> str:
    have = f"{size_of(found.memory.total)} of {size_of(found.machine.usable)}"
    if before is None:
        return f"as asked for: {have}" if given else f"nothing has to be cut: {have}"
    again = ", with activations computed again" if found.work.recompute else ""
    what = f"{before.mesh.words}{', activations computed again' if before.work.recompute else ''}"
    return f"the smallest that fits{again}: {have}; {what} needs {size_of(before.memory.total)}"


def _too_large(least: Plan) -> str:
    what = f"{size_of(least.memory.total)}, of {size_of(least.machine.usable)} that can be used"
    fixed, most = least.memory.fixed * least.mesh.shard * least.mesh.tensor, least.machine.usable
    rest = most - (least.memory.total - least.memory.fixed)
    if rest <= 0:
        return f"does not fit: {what}; fewer sequences at once, a shorter context or larger GPUs would help"
    return f"does not fit: {what}; about {math.ceil(fixed / rest)} GPUs would hold it"
