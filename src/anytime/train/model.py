"""The paper's decoder: rotary positions, weightless RMSNorm, normalized q and k, squared ReLU, tied embeddings.

Every weight is a matrix, q, k and v apart: six a layer and the embedding, which is also the output layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from .errors import UserError

#: Small beside the square of an embedding at initialization, whose scale is 1 / (4 width).
EPSILON = 1e-12


@dataclass(frozen=True)
class ModelConfig:
    """What the weights are shaped by; written beside them."""

    vocabulary: int = 50304
    layers: int = 12
    width: int = 768
    head: int = 128
    mlp: int = 0  # 0: four times the width
    context: int = 1024
    rope_base: float = 10000.0

    def __post_init__(self) -> None:
        for name in ("vocabulary", "layers", "width", "head", "context"):
            if getattr(self, name) < 1:
                raise UserError(f"model.{name} is {getattr(self, name)}, must be at least 1")
        if self.mlp < 0:
            raise UserError(f"model.mlp is {self.mlp}, must be 0 (four times the width) or more")
        if self.head % 2 or self.width % self.head:
            raise UserError(f"model.head is {self.head}, must be even and divide model.width, which is {self.width}")
        if self.rope_base <= 1:
            raise UserError(f"model.rope_base is {self.rope_base}, must be above 1")

    @property
    def hidden(self) -> int:
        return self.mlp or 4 * self.width

    @property
    def matrix_parameters(self) -> int:
        return self.layers * (4 * self.width**2 + 2 * self.width * self.hidden)

    @property
    def parameters(self) -> int:
        return self.matrix_parameters + self.vocabulary * self.width

    @property
    def flops_per_token(self) -> int:
        """Of a forward and a backward pass: 6 a parameter, and attention counted in full as is the custom."""
        return 6 * self.parameters + 12 * self.layers * self.width * self.context


def rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=EPSILON)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The two halves of each head x [..., time, head] turned by the angles of their positions [time, head / 2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def whole(x: Tensor) -> Tensor:
    """All of what tensor-parallel processes hold in parts."""
    return x.full_tensor() if isinstance(x, DTensor) else x


class Cache:
    """What was read so far: tokens [batch, time], of each layer keys and values [2, batch, heads, context, head]."""

    def __init__(self, model: GPT, batch: int) -> None:
        self.context = model.config.context
        self.tokens = torch.empty((batch, 0), dtype=torch.int64, device=model.embedding.weight.device)
        self.store: dict[int, Tensor] = {}

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all `length` tokens; those given are of the last."""
        batch, heads, time, head = k.shape
        store, fresh = self.store.get(layer), slice(self.length - time, self.length)
        if store is None:
            store = self.store[layer] = k.new_empty((2, batch, heads, self.context, head))
        store[0, :, :, fresh] = k.detach()
        store[1, :, :, fresh] = v.detach()
        return store[0, :, :, : self.length], store[1, :, :, : self.length]


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head = config.head
        self.q, self.k, self.v, self.o = (nn.Linear(config.width, config.width, bias=False) for _ in range(4))
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)
        self.shared = nn.Identity()  # what every tensor-parallel process needs whole; see parallel.py

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: BlockMask | Tensor | None = None,
        cache: tuple[Cache, int] | None = None,
    ) -> Tensor:
        h = self.shared(rms_norm(x))
        q, k, v = (f(h).unflatten(-1, (-1, self.head)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = rotate(rms_norm(q), cos, sin).to(v.dtype), rotate(rms_norm(k), cos, sin).to(v.dtype)
        if cache is not None:
            k, v = cache[0].extend(cache[1], k, v)
        if isinstance(mask, BlockMask):
            mixed: Tensor = flex_attention(q, k, v, block_mask=mask)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        x = x + self.o(mixed.transpose(1, 2).flatten(-2))
        out: Tensor = x + self.down(F.relu(self.up(self.shared(rms_norm(x)))).square())
        return out


class GPT(nn.Module):
    """forward(tokens) gives logits, forward(tokens, targets) the mean cross-entropy in nats.

    With `separator`, the id that ends a document, attention stays within documents (FlexAttention on a GPU); without,
    it is plain causal attention. With `recompute`, activations of the blocks are computed again in the backward pass.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, *, separator: int | None = None, recompute: bool = False) -> None:
        super().__init__()
        self.config, self.separator, self.recompute = config, separator, recompute
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.shared = nn.Identity()
        half = config.head // 2
        angles = torch.outer(torch.arange(config.context), config.rope_base ** -(torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """The same weights for a seed on every device. The first loss is the logarithm of the vocabulary.

        Blocks begin as the identity (o and down are zero). The embedding is normalized where it enters, so its scale
        only shows at the output: 1 / (4 width) makes a token's logit for itself 1/4, and the others' next to nothing.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if name.endswith(("o.weight", "down.weight")):
                p.zero_()
            else:
                scale = 0.25 / self.config.width if p is self.embedding.weight else p.shape[1] ** -0.5
                p.copy_(torch.empty(p.shape).normal_(std=scale, generator=generator))

    def forward(self, tokens: Tensor, targets: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """tokens: [batch, time]; the logits are [batch, time, vocabulary]."""
        start = 0 if cache is None else cache.length
        end = start + tokens.shape[1]
        if end > self.config.context:
            raise UserError(f"{end} tokens are more than the model's context of {self.config.context}")
        if cache is not None:
            cache.tokens = torch.cat((cache.tokens, tokens), dim=1)
        mask = self.mask(tokens, cache)
        x = rms_norm(self.embedding(tokens))
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        cos, sin = self.cos[start:end].to(x.dtype), self.sin[start:end].to(x.dtype)
        for i, block in enumerate(self.blocks):
            if self.recompute and cache is None and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, mask, use_reentrant=False)
            else:
                x = block(x, cos, sin, mask, None if cache is None else (cache, i))
        return self.score(x, targets)

    def score(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """From the last block's output to the logits, or to the loss where there are targets."""
        logits = F.linear(self.shared(rms_norm(x)), self.embedding.weight)
        if targets is None:
            return whole(logits)
        wide = torch.promote_types(logits.dtype, torch.float32)
        return whole(F.cross_entropy(logits.to(wide).flatten(0, 1), targets.flatten())).clone()  # FSDP wants no view

    def mask(self, tokens: Tensor, cache: Cache | None) -> BlockMask | Tensor | None:
        """Who sees whom, [batch, 1, time, all time]; None is plain causal. A document ends with its separator."""
        if cache is None and self.separator is None:
            return None
        read = tokens if cache is None else cache.tokens
        number = read.eq(-1 if self.separator is None else self.separator).cumsum(1).roll(1, 1)
        number[:, 0] = 0

        def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return q.ge(k) & number[b, q].eq(number[b, k])

        batch, time = read.shape
        if cache is None and tokens.is_cuda:
            return create_block_mask(sees, batch, None, time, time, device=str(tokens.device))
        place = torch.arange(time, device=read.device)
        rows = torch.arange(batch, device=read.device)[:, None, None, None]
        return sees(rows, rows, place[time - tokens.shape[1] :, None], place)

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        count: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        limit: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """`count` tokens more for each row of tokens [batch, time], drawn with a cache of keys and values.

        Temperature 0 takes the likeliest; ids from `limit` on are never drawn. Once the context is full, its later half
        is read again, the rest forgotten.
        """
        if not tokens.shape[1]:
            raise UserError("nothing to go on from: the prompt is empty")
        if not 0 <= temperature < math.inf:
            raise UserError(f"temperature is {temperature}, must be 0 or more")
        if top_k is not None and top_k < 1:
            raise UserError(f"top_k is {top_k}, must be 1 or more")
        context = self.config.context
        cache: Cache | None = None
        fresh = tokens[:, -context:]
        for _ in range(count):
            if cache is None or cache.length + fresh.shape[1] > context:
                if cache is not None:
                    fresh = tokens[:, -max(1, context // 2) :]
                cache = Cache(self, len(tokens))
            logits = self(fresh, cache=cache)[:, -1, :limit].float()
            if top_k is not None and top_k < logits.shape[-1]:
                logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -math.inf)
            if temperature:
                logits -= logits.amax(-1, keepdim=True)  # or a tiny temperature makes infinities of them
                fresh = (logits / temperature).softmax(-1).multinomial(1, generator=generator)
            else:
                fresh = logits.argmax(-1, keepdim=True)
            tokens = torch.cat((tokens, fresh), dim=1)
        return tokens
