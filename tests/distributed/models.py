"""A model with everything that makes sharding hard: fused QKV, experts, tied embeddings, norms and biases."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import anytime

WIDTH, HEADS, EXPERTS, HIDDEN, VOCABULARY = 8, 2, 3, 6, 11
RULES = {"*.qkv.weight": {"split": (WIDTH, WIDTH, WIDTH)}, "*.experts.*": "matrix"}


class Experts(nn.Module):
    """Every token through every expert, weighed by a gate: [E, m, n] weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(EXPERTS, HIDDEN, WIDTH))
        self.down = nn.Parameter(torch.empty(EXPERTS, WIDTH, HIDDEN))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        up, down = (p.full_tensor() if isinstance(p, DTensor) else p for p in (self.up, self.down))
        hidden = torch.einsum("bti,ehi->bteh", x, up).relu()
        return torch.einsum("bteh,eoh,bte->bto", hidden, down, weight)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        x = x + self.experts(x, self.gate(x).softmax(-1))
        return x + self.down(self.up(x).relu().square())


class Model(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def build(dtype: torch.dtype = torch.float64) -> Model:
    model = Model().to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def tokens(step: int, batch: int = 4) -> Tensor:
    return torch.randint(VOCABULARY, (batch, 6), generator=torch.Generator().manual_seed(1000 + step))


@cache  # groups of processes hold threads
def named_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def spread(model: Model, shard: int, tensor: int, replicate: int = 1) -> DeviceMesh:
    """Tensor parallelism inside, FSDP2 (or HSDP) outside; experts are cut along their number or their rows."""
    names = [("replicate", replicate), ("shard", shard), ("tensor", tensor)]
    mesh = named_mesh(tuple(n for _, n in names), tuple(name for name, _ in names))
    if tensor > 1:
        for block in model.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tensor"], plan)

            def cut(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
                for key, p in list(module.named_parameters(recurse=False)):
                    module.register_parameter(key, nn.Parameter(distribute_tensor(p, mesh, [Shard(1)])))

            distribute_module(block.experts, mesh["tensor"], cut)
    if shard > 1 or replicate > 1:
        data = mesh["replicate", "shard"] if replicate > 1 else mesh["shard"]
        for block in model.blocks:
            fully_shard(block, mesh=data)
        fully_shard(model, mesh=data)
    return mesh


def optimizer(model: nn.Module, **more: object) -> anytime.SFNorMuon:
    options = {"lr": 0.008, "warmup_steps": 5, "weight_decay": 0.1, "averaging_power": 1.0, "beta_growth": 0.4}
    return anytime.SFNorMuon(model, rules=RULES, **(options | {"beta_growth_start": 5, "decay_fading": 4} | more))
