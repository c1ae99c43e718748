"""Texts by a model."""

from __future__ import annotations

import torch

from .device import autocast
from .errors import UserError
from .model import GPT
from .tokenizer import Tokenizer


def write_texts(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    count: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
    copies: int = 1,
    precision: str = "auto",
) -> list[str]:
    """Texts that go on from the prompt, without it; each ends where the model ends its document."""
    if copies < 1:
        raise UserError(f"copies is {copies}, must be at least 1")
    if count < 0:
        raise UserError(f"count is {count}, must be 0 or more")
    if not -(2**63) <= seed < 2**63:
        raise UserError(f"seed is {seed}, must have at most 63 bits")
    device = model.embedding.weight.device
    start = tokenizer.encode(prompt) or ([] if tokenizer.end is None else [tokenizer.end])
    tokens = torch.tensor([start] * copies, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    with autocast(device, precision):
        drawn = model.generate(
            tokens, count, temperature=temperature, top_k=top_k, limit=tokenizer.vocabulary, generator=generator
        )
    texts = []
    for row in drawn[:, tokens.shape[1] :].tolist():
        ended = row.index(tokenizer.end) if tokenizer.end in row else len(row)
        texts.append(tokenizer.decode(row[:ended]))
    return texts
