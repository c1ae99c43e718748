"""What a model takes on one GPU or many: the bytes that each holds, and those that it sends in a step.

Weights, gradients, state and messages are counted from the shapes, for the GPU that has most; every one of them can be
compared with a run, and tests do. Activations, the working memory of the optimizer and times are estimates: by the
formulas at `Activations`, `working` and `optimizer_seconds`, whose constants are measured ones.

GPUs form a mesh: replicas × shard × tensor, neighbours last. A replica's weights are cut over shard · tensor GPUs.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import torch

from ..core.layout import Layout
from ..core.polar import polar_flops
from ..distributed.exchange import ROUND_BYTES, balanced, cost, rounds
from ..distributed.owners import MODES
from ..optim.rules import ELEMENTWISE
from .build import build_optimizer
from .config import PRESETS, Config, OptimizerConfig, merged, nearest
from .errors import UserError
from .model import GPT, ModelConfig
from .parallel import check_model, divisors

Shape = tuple[int, ...]

#: Larger models of the same family than the presets: layers × width, the rest as it is usual at their size.
SHAPES: dict[str, dict[str, int]] = {
    "1.3B": {"layers": 24, "width": 2048, "context": 2048},
    "7B": {"layers": 32, "width": 4096, "context": 4096},
    "13B": {"layers": 40, "width": 5120, "context": 4096},
    "70B": {"layers": 80, "width": 8192, "mlp": 36864, "context": 4096},
}
#: Which dimension tensor parallelism cuts, by the last part but one of a weight's name.
CUT = {"q": 0, "k": 0, "v": 0, "up": 0, "o": 1, "down": 1, "embedding": 0}
#: Part of the memory that may be planned with: the rest is the driver's, NCCL's, and what lies between allocations.
USABLE = 0.9
#: Tokens of a step where nobody says, if every GPU then has a sequence.
BATCH_TOKENS = 512 * 1024
#: Most sequences at once where nobody says; more are hardly faster.
AT_ONCE = 32
#: Bytes read and written for a parameter in an optimizer step: of a matrix, of another.
MOVED = {True: 38, False: 32}
#: Bytes of what travels in the optimizer: momentum and polar factor between the holders of a matrix.
TRAVELS = 4


# ------------------------------------------------------------------ models


def model_of(said: str, *, context: int | None = None, vocabulary: int | None = None) -> ModelConfig:
    """A preset's model, a larger one's (SHAPES), or LAYERSxWIDTH."""
    found = re.fullmatch(r"(\d+)\s*[x×]\s*(\d+)", said.strip())
    if found is not None:
        width = int(found[2])
        head = next((n for n in (128, 64, 32, 16, 8, 4, 2) if width % n == 0), width)
        model = ModelConfig(layers=int(found[1]), width=width, head=head)
    elif said in SHAPES:
        model = merged(ModelConfig(), SHAPES[said])
    elif said in PRESETS:
        model = merged(Config(), PRESETS[said]).model
    else:
        names = [*PRESETS, *SHAPES]
        raise UserError(
            f"there is no model {said!r}{nearest(said, names)}; there are {', '.join(names)}, and LAYERSxWIDTH"
        )
    changes = {"context": context, "vocabulary": vocabulary}
    return dataclasses.replace(model, **{key: value for key, value in changes.items() if value is not None})


@dataclass(frozen=True)
class Weight:
    """A parameter, and what the optimizer keeps for it: name to shape and bytes an element."""

    name: str
    shape: Shape
    itemsize: int
    matrix: bool
    layout: Layout
    state: tuple[tuple[str, Shape, int], ...]

    @property
    def cut(self) -> int:
        """The dimension that tensor parallelism cuts."""
        return CUT[self.name.split(".")[-2]]


@lru_cache(maxsize=32)
def weights_of(model: ModelConfig, optimizer: OptimizerConfig, dtype: str = "float32") -> tuple[Weight, ...]:
    """As the optimizer itself routes them and says what it keeps, on tensors without memory."""
    with torch.device("meta"):
        module = GPT(model).to(getattr(torch, dtype))
    made = build_optimizer(module, optimizer)
    found: dict[str, Weight] = {}
    for group in made.param_groups:
        for name, p, layout in zip(group["param_names"], group["params"], group["layouts"], strict=True):
            spec = made.state_spec(p, group, layout)
            state = tuple((key, shape, kind.itemsize) for key, (shape, kind) in spec.items())
            matrix = group["rule"] not in ELEMENTWISE
            found[name] = Weight(name, tuple(p.shape), p.element_size(), matrix, Layout.parse(layout), state)
    return tuple(found[name] for name, _ in module.named_parameters())


# ------------------------------------------------------------------ the mesh


@dataclass(frozen=True)
class Mesh:
    """replicas × shard × tensor; a shard of 0 is all GPUs."""

    gpus: int = 1
    shard: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.tensor < 1 or self.shard < 0:
            raise UserError(
                f"gpus is {self.gpus}, tensor {self.tensor}, shard {self.shard}: they must be at least 1, 1 and 0"
            )
        if self.gpus % self.tensor:
            raise UserError(f"tensor is {self.tensor}, must divide the {self.gpus} GPUs")
        if self.shard == 0:
            object.__setattr__(self, "shard", self.gpus // self.tensor)
        if self.gpus % (self.shard * self.tensor):
            raise UserError(
                f"shard · tensor is {self.shard} · {self.tensor}, must divide the number of GPUs, which is {self.gpus}"
            )

    @property
    def replicas(self) -> int:
        return self.gpus // (self.shard * self.tensor)

    @property
    def data(self) -> int:
        """Groups of GPUs that read different sequences."""
        return self.gpus // self.tensor

    @property
    def kind(self) -> str:
        if self.gpus == 1:
            return "one GPU"
        over = ["HSDP" if self.replicas > 1 else "FSDP2"] if self.shard > 1 else ["DDP"] if self.replicas > 1 else []
        return " × ".join([*over, *(["TP"] if self.tensor > 1 else [])])

    @property
    def words(self) -> str:
        sizes = {"shard": self.shard, "tensor": self.tensor}
        return ", ".join([self.kind, *(f"{name} {size}" for name, size in sizes.items() if size > 1)])


def chunk(size: int, parts: int, index: int) -> int:
    """Of a dimension cut as torch.chunk does: all parts of ⌈size / parts⌉, the last ones shorter or empty."""
    step = -(-size // parts)
    return max(0, min(size, (index + 1) * step) - index * step)


def part(weight: Weight, mesh: Mesh, s: int = 0, t: int = 0) -> Shape:
    """The shape that GPU (s, t) of a replica holds: tensor parallelism cuts first, then FSDP2 the first dimension."""
    shape = list(weight.shape)
    shape[weight.cut] = chunk(shape[weight.cut], mesh.tensor, t)
    shape[0] = chunk(shape[0], mesh.shard, s)
    return tuple(shape)


def kept(weight: Weight, shape: Shape, held: Shape) -> int:
    """Elements of a buffer of `shape` beside a part: cut as the weight is, by its rows alone, or whole."""
    if shape == weight.shape:
        return math.prod(held)
    return math.prod(held[: len(shape)]) if shape == weight.layout.row_shape(weight.shape) else math.prod(shape)


def holders(mesh: Mesh) -> Iterator[tuple[int, int]]:
    """(s, t) of the GPUs that hold a replica together."""
    return ((s, t) for s in range(mesh.shard) for t in range(mesh.tensor))


def owners_of(weights: Sequence[Weight], mesh: Mesh, *, among: Literal["replica", "all"]) -> dict[str, int]:
    """Who computes the polar factor of each matrix, by its number in the replica or among all."""
    matrices = [w for w in weights if w.matrix]
    if among == "all":
        able: list[Sequence[int]] = [range(mesh.gpus)] * len(matrices)
    else:
        cells = list(holders(mesh))
        kinds = {(w.shape, w.cut): w for w in matrices}
        there = {key: [r for r, at in enumerate(cells) if math.prod(part(w, mesh, *at))] for key, w in kinds.items()}
        able = [there[w.shape, w.cut] for w in matrices]
    size = mesh.gpus if among == "all" else mesh.shard * mesh.tensor
    found = balanced([cost(w.layout, w.shape) for w in matrices], able, [0.0] * size)
    return {w.name: owner for w, owner in zip(matrices, found, strict=True)}


# ------------------------------------------------------------------ memory


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


# ------------------------------------------------------------------ messages


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
        yield message("that all take the same step, all-gather", mesh.gpus, mesh.gpus, mesh.gpus - 1, 8)
        yield message("whether gradients are finite, all-reduce", mesh.gpus, mesh.gpus, all_reduce(1, mesh.gpus), 8)


# ------------------------------------------------------------------ time


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


# ------------------------------------------------------------------ plans


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


# ------------------------------------------------------------------ showing


def size_of(number: float) -> str:
    """Bytes in decimal units, three digits."""
    unit, name = next(((u, n) for u, n in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if number >= u), (1.0, "B"))
    return f"{_digits(number / unit)} {name}"


def time_of(seconds: float) -> str:
    unit, name = next(((u, n) for u, n in ((1.0, "s"), (1e-3, "ms")) if seconds >= u), (1e-6, "µs"))
    return f"{_digits(seconds / unit)} {name}"


def _digits(value: float) -> str:
    return (
        f"{value:,.0f}"
        if value >= 99.95 or value == int(value)
        else f"{value:.1f}"
        if value >= 9.995
        else f"{value:.2f}"
    )


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
