"""The weights of a model and the mesh of GPUs that holds them: who has which part, and who works on it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from ...core.layout import Layout
from ...distributed.exchange import balanced, cost
from ...optim.rules import ELEMENTWISE
from ..build import build_optimizer
from ..config import Config, OptimizerConfig, merged, nearest
from ..errors import UserError
from ..model import GPT, ModelConfig
from ..presets import PRESETS

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
