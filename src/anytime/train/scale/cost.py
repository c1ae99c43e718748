"""What a GPU holds, what it sends in a step, and how long that takes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ...core.polar import polar_flops
from ...distributed.exchange import ROUND_BYTES, rounds
from ...distributed.processes import MARKS
from ..errors import UserError
from ..model import ModelConfig
from .mesh import Mesh, Weight, chunk, holders, kept, owners_of, part

#: Part of the memory that may be planned with: the rest is the driver's, NCCL's, and what lies between allocations.
USABLE = 0.9
#: Bytes read and written for a parameter in an optimizer step: of a matrix, of another.
MOVED = {True: 38, False: 32}
#: Bytes of what travels in the optimizer: momentum and polar factor between the holders of a matrix.
TRAVELS = 4


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU. The first three are counted, the others estimated."""

    parameters: int
    gradients: int
    state: dict[str, int]
    optimizer: int  # while it steps
    gathered: int  # of FSDP2, weights and gradients of whole blocks; or of plain ones, copies in bfloat16
    activations: int
    logits: int
    backward: int  # at the end of the backward pass, in place of the three before: gradients that are yet to be added

    @property
    def fixed(self) -> int:
        return self.parameters + self.gradients + sum(self.state.values())

    @property
    def moving(self) -> int:
        return self.gathered + self.activations + self.logits

    @property
    def total(self) -> int:
        """At the highest: activations and the optimizer's working memory are never there together."""
        return self.fixed + max(self.moving, self.backward, self.optimizer)


@dataclass(frozen=True)
class Work:
    """How a step is done: sequences of all GPUs and of one at once, and whether activations are computed again."""

    sequences: int
    at_once: int
    recompute: bool = False
    owners: str | None = None

    def parts(self, mesh: Mesh) -> int:
        """Forward and backward passes of a GPU in a step."""
        return self.sequences // (mesh.data * self.at_once)


def held_bytes(
    weights: Sequence[Weight], mesh: Mesh, owners: str | None = None, rank: int = 0
) -> tuple[int, int, dict[str, int]]:
    """Parameters, gradients and, by name, state of one GPU: exactly."""
    s, t = divmod(rank % (mesh.shard * mesh.tensor), mesh.tensor)
    owner = owners_of(weights, mesh, among="all") if owners in ("state", "gradient") else {}
    parameters, state = 0, dict[str, int]()
    for w in weights:
        held = part(w, mesh, s, t)
        parameters += math.prod(held) * w.itemsize
        for name, shape, itemsize in w.state if owner.get(w.name, rank) == rank else ():
            state[name] = state.get(name, 0) + kept(w, shape, held) * itemsize
    return parameters, parameters, state


def fullest(weights: Sequence[Weight], mesh: Mesh, owners: str | None) -> int:
    """The GPU with most: the first of a replica, or the owner of most."""
    if owners not in ("state", "gradient"):
        return 0
    owner = owners_of(weights, mesh, among="all")
    load = [0] * mesh.gpus
    for w in weights:
        if w.name in owner:
            load[owner[w.name]] += sum(math.prod(shape) * itemsize for _, shape, itemsize in w.state)
    return max(range(mesh.gpus), key=lambda rank: (load[rank], -rank))


@dataclass(frozen=True)
class Activations:
    """Bytes for a token, in bfloat16, with the forward pass compiled and attention that stores no scores.

    A block keeps its input, the normalized one, q, k and v, q and k turned, what attention gives, the sum, the
    normalized sum (2 · 11 · width), and the hidden layer before and after its square (2 · 2 · hidden). What lies
    between the blocks of a tensor-parallel model is whole on every GPU: four of the eleven. With recomputation a block
    keeps its input alone, and one block at a time has everything. The logits are kept in bfloat16.
    """

    block: int
    entry: int
    ends: int
    logits: int

    @classmethod
    def of(cls, model: ModelConfig, tensor: int = 1) -> Activations:
        whole, cut = 2 * 4 * model.width, 2 * 7 * model.width + 2 * 2 * model.hidden
        vocabulary = chunk(model.vocabulary, tensor, 0)
        return cls(whole + -(-cut // tensor), 2 * model.width, 6 * model.width, 2 * vocabulary)

    def total(self, layers: int, recompute: bool) -> tuple[int, int]:
        """Of all blocks and the ends, and of the logits, when both together are most."""
        if not recompute:
            return layers * self.block + self.ends, self.logits
        fixed = layers * self.entry + self.ends  # the last block is computed again when the logits have gone
        return (fixed, self.logits) if self.logits > self.block else (fixed + self.block, 0)


def working(weights: Sequence[Weight], mesh: Mesh, state: int) -> int:
    """Of the optimizer's step: a seventh of the state for the kernels; where matrices are cut, two tensors of the
    size of those held here, and about ten rounds of whole matrices."""
    matrices = [w for w in weights if w.matrix]
    if mesh.shard * mesh.tensor == 1 or not matrices:
        return max(1 << 24, state // 7)
    largest = max(math.prod(w.shape) for w in matrices) * TRAVELS
    return 2 * sum(math.prod(part(w, mesh)) for w in matrices) * 4 + 10 * max(ROUND_BYTES, largest)


def memory_of(
    model: ModelConfig, weights: Sequence[Weight], mesh: Mesh, work: Work, *, wire: Wire | None = None
) -> Memory:
    """Of the GPU that has most."""
    wire = wire or Wire()
    rank = fullest(weights, mesh, work.owners)
    parameters, gradients, state = held_bytes(weights, mesh, work.owners, rank)
    tokens, each = work.at_once * model.context, Activations.of(model, mesh.tensor)
    blocks, logits = each.total(model.layers, work.recompute)
    whole = Mesh(mesh.tensor, 1, mesh.tensor)
    sizes = {w.name: math.prod(part(w, whole)) for w in weights}
    block = sum(size for name, size in sizes.items() if name.startswith("blocks.0."))
    root = sum(size for name, size in sizes.items() if not name.startswith("blocks."))
    backward = 0
    if mesh.shard > 1:
        # The root stays gathered; a block and the next one; one block's gradients before and while they are reduced.
        gathered = root * weights[0].itemsize + 3 * block * wire.blocks + max(block, root) * wire.reduced
        if work.parts(mesh) > 1 and not wire.every_part:
            gathered += sum(sizes.values()) * wire.reduced
    else:
        # Autocast's copies last until the backward pass, where blocks are computed again those of one block.
        gathered = 2 * (root + block if work.recompute else sum(sizes.values()))
        if work.parts(mesh) > 1:  # a compiled backward pass hands over all gradients at its end
            backward = gradients + gathered + (each.block * tokens if work.recompute else 0)
    optimizer = working(weights, mesh, sum(state.values()))
    moving = (blocks * tokens, logits * tokens)
    return Memory(parameters, gradients, state, optimizer, gathered, *moving, backward)


@dataclass(frozen=True)
class Wire:
    """Bytes an element of what training sends: blocks gathered by FSDP2 (the rest as it is), gradients, activations.

    `every_part`: FSDP2 reduces gradients after every part of a batch, rather than keeping whole ones until the last.
    """

    blocks: int = 2
    reduced: int = 4
    activations: int = 2
    every_part: bool = False


@dataclass(frozen=True)
class Message:
    """What a GPU sends in a step to the others of a group of GPUs, counted as a ring does."""

    of: Literal["training", "optimizer"]
    what: str
    group: int
    span: int  # GPUs from the first of the group to the last
    elements: int
    bytes: int


def all_reduce(elements: int, group: int) -> int:
    """Elements sent by each: 2 (1 − 1/group) of them."""
    return -(-2 * (group - 1) * elements // group)


def training_messages(
    model: ModelConfig, weights: Sequence[Weight], mesh: Mesh, work: Work, wire: Wire
) -> Iterator[Message]:
    """DDP's all-reduce, FSDP2's gathers and reductions, tensor parallelism's sums of activations."""
    s, t, r = mesh.shard, mesh.tensor, mesh.replicas
    parts = work.parts(mesh)

    def message(what: str, group: int, span: int, elements: int, size: int) -> Message:
        return Message("training", what, group, span, elements, elements * size)

    # FSDP2 sends the first GPU's share of every weight, padded to it where the others have less.
    held = {w.name: math.prod(part(w, mesh)) for w in weights}
    if s > 1:
        blocks = sum(size for name, size in held.items() if name.startswith("blocks."))
        root = sum(held.values()) - blocks
        span = s * t
        # Blocks are gathered in the forward pass and again in the backward pass, the root once.
        yield message("weights of blocks, all-gather", s, span, parts * 2 * blocks * (s - 1), wire.blocks)
        yield message("other weights, all-gather", s, span, parts * root * (s - 1), weights[0].itemsize)
        reduced = (parts if wire.every_part else 1) * sum(held.values())
        yield message("gradients, reduce-scatter", s, span, reduced * (s - 1), wire.reduced)
        if r > 1:
            yield message("gradients, all-reduce", r, mesh.gpus, all_reduce(reduced, r), wire.reduced)
    elif r > 1:
        if work.owners == "gradient":
            rest = sum(held[w.name] for w in weights if not w.matrix)
            matrices = _rooms(weights, mesh, 4)
            yield message("gradients, reduce-scatter", r, mesh.gpus, matrices * (r - 1), 4)
            yield message("gradients of the rest, all-reduce", r, mesh.gpus, all_reduce(rest, r), 4)
        else:
            yield message("gradients, all-reduce", r, mesh.gpus, all_reduce(sum(held.values()), r), wire.reduced)
    if t > 1:
        # Two sums a block forward, two backward, one when it is computed again; the embedding's, and before the logits.
        sums = model.layers * (5 if work.recompute else 4) + 2
        elements = parts * sums * all_reduce(work.at_once * model.context * model.width, t)
        yield message("activations, all-reduce", t, t, elements, wire.activations)


def _rooms(weights: Sequence[Weight], mesh: Mesh, itemsize: int) -> int:
    """Elements that every owner sends in the rounds of a gather: as many as the one that has most in each."""
    matrices = [w for w in weights if w.matrix]
    found = owners_of(weights, mesh, among="all")
    owner, sizes = [found[w.name] for w in matrices], [math.prod(w.shape) for w in matrices]
    total = 0
    for together in rounds(owner, [n * itemsize for n in sizes], [w.shape for w in matrices], mesh.gpus, ROUND_BYTES):
        filled: dict[int, int] = {}
        for i in together:
            filled[owner[i]] = filled.get(owner[i], 0) + sizes[i]
        total += max(filled.values())
    return total


def exchanged(weights: Sequence[Weight], mesh: Mesh) -> list[tuple[int, int]]:
    """Elements that each GPU of a replica sends to owners, and as an owner to the others: exactly."""
    cells = list(holders(mesh))
    owner = owners_of(weights, mesh, among="replica")
    matrices = [w for w in weights if w.matrix]
    shares = {(w.shape, w.cut): [math.prod(part(w, mesh, *at)) for at in cells] for w in matrices}
    counts = {key: sum((w.shape, w.cut) == key for w in matrices) for key in shares}
    there = [sum(counts[key] * share[r] for key, share in shares.items()) for r in range(len(cells))]
    back = [0] * len(cells)
    for w in matrices:
        rank = owner[w.name]
        mine = shares[w.shape, w.cut][rank]
        there[rank] -= mine
        back[rank] += math.prod(w.shape) - mine
    return list(zip(there, back, strict=True))


def optimizer_messages(weights: Sequence[Weight], mesh: Mesh, owners: str | None) -> Iterator[Message]:
    """What the optimizer sends beyond that: momentum to the owners and polar factors back, or what owners made."""
    s, t = mesh.shard, mesh.tensor

    def message(what: str, group: int, span: int, elements: int, size: int) -> Message:
        return Message("optimizer", what, group, span, elements, elements * size)

    if s * t > 1:
        matrices = [w for w in weights if w.matrix]
        most = max(exchanged(weights, mesh), key=sum, default=(0, 0))
        if matrices:
            yield message("momentum to owners, all-to-all", s * t, s * t, most[0], TRAVELS)
            yield message("polar factors back, all-to-all", s * t, s * t, most[1], TRAVELS)
        columns = sum(part(w, mesh)[0] for w in matrices if w.cut == 1)
        if t > 1 and columns:
            yield message("squares of rows, all-reduce", t, t, all_reduce(columns, t), 4)
        cut = {0: s * t, 1: s}  # the GPUs that have other rows of a matrix, by where tensor parallelism cuts it
        for group in sorted({cut[w.cut] for w in matrices} - {1}):
            number = sum(cut[w.cut] == group for w in matrices)
            yield message("a norm a matrix, all-reduce", group, s * t, all_reduce(number, group), 4)
    elif owners is not None and mesh.replicas > 1:
        itemsize = TRAVELS if owners == "factor" else max(w.itemsize for w in weights)
        what = "polar factors, all-gather" if owners == "factor" else "y, all-gather"
        elements = _rooms(weights, mesh, itemsize) * (mesh.gpus - 1)
        yield message(what, mesh.gpus, mesh.gpus, elements, itemsize)
    if s * t > 1 or (owners is not None and mesh.replicas > 1):
        yield message("that all take the same step, all-gather", mesh.gpus, mesh.gpus, MARKS * (mesh.gpus - 1), 8)
        yield message("whether gradients are finite, all-reduce", mesh.gpus, mesh.gpus, all_reduce(1, mesh.gpus), 8)


@dataclass(frozen=True)
class Machine:
    """A GPU and its links: bytes of memory; operations and bytes a second; GPUs a node.

    The rates are those that an H200 reaches: `products` in training and in the polar factor alike.
    """

    memory: float = 80e9
    products: float = 500e12
    bandwidth: float = 4.3e12
    link: float = 50e9  # a GPU sends to other nodes
    inner: float = 300e9  # and within its node
    node: int = 8

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise UserError(f"{name} is {value}, must be above 0")

    @property
    def usable(self) -> float:
        return USABLE * self.memory

    def seconds(self, message: Message) -> float:
        """A group that leaves the node goes at the rate of its slowest link; latency is left out."""
        return message.bytes / (self.inner if message.span <= self.node else self.link)


def polar_seconds(weights: Sequence[Weight], mesh: Mesh, owners: str | None, machine: Machine) -> float:
    """Of the GPU that has most of them: all, or those that it owns."""
    flops = {w.name: sum(polar_flops(m, n) for m, n in w.layout.sides(w.shape)) for w in weights if w.matrix}
    if mesh.shard * mesh.tensor == 1 and owners is None:
        return sum(flops.values()) / machine.products
    load: dict[int, float] = {}
    for name, owner in owners_of(weights, mesh, among="all" if owners else "replica").items():
        load[owner] = load.get(owner, 0.0) + flops[name]
    return max(load.values(), default=0.0) / machine.products


def memory_seconds(weights: Sequence[Weight], mesh: Mesh, owners: str | None, machine: Machine) -> float:
    """Of reading and writing what is updated here."""
    moved = 0
    owner = owners_of(weights, mesh, among="all") if owners in ("state", "gradient") else {}
    for w in weights:
        moved += MOVED[w.matrix] * math.prod(part(w, mesh)) if w.name not in owner else 0
    if owner:
        load = [0] * mesh.gpus
        for w in weights:
            if w.name in owner:
                load[owner[w.name]] += MOVED[True] * math.prod(w.shape)
        moved += max(load)
    return moved / machine.bandwidth
