"""A trained model in use: load it from a run, a checkpoint or an export; sample, evaluate, export."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from .checkpoint import MODEL, read_tensors
from .config import Config, merged
from .data import check_tokenizer, check_vocabulary, open_data, tokenizer_in
from .device import choose_device
from .errors import UserError
from .evaluate import Evaluation, evaluate
from .files import by_umask, write_atomically
from .model import GPT, ModelConfig
from .runs import find_checkpoint, stored_config
from .shards import Tokens
from .texts import write_texts
from .tokenizer import Tokenizer

_CARD = "config.json"


@dataclass(frozen=True)
class Trained:
    """A finished model (the average X), its tokenizer where it is known, and what its files say of it."""

    model: GPT
    tokenizer: Tokenizer | None
    card: dict[str, Any]
    folder: Path

    @property
    def device(self) -> torch.device:
        return self.model.embedding.weight.device

    def needs_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UserError(f"{self.folder} has no tokenizer: put a tokenizer.json there")
        return self.tokenizer


def load(
    path: Path | str, *, at: int | None = None, device: str = "", warn: Callable[[str], None] | None = None
) -> Trained:
    """The model of a run (its newest checkpoint, or that of step `at`), of a checkpoint's folder, or of an export.

    `warn` is told of checkpoints that are damaged and passed over.
    """
    folder = find_checkpoint(Path(path), at, warn)
    try:
        card = json.loads((folder / _CARD).read_text(encoding="utf-8"))
        config = merged(ModelConfig(), dict(card["model"]), source=str(folder / _CARD))
    except (OSError, ValueError, KeyError, TypeError) as wrong:
        raise UserError(f"{folder / _CARD} does not describe a model of this library: {wrong}") from None
    model = GPT(config, separator=card.get("separator"))
    tensors = read_tensors(folder / MODEL)
    try:
        model.load_state_dict(tensors)
    except RuntimeError as wrong:
        raise UserError(f"{folder / MODEL} is not the model that {_CARD} describes: {_second_line(wrong)}") from None
    model.to(choose_device(device)).eval().requires_grad_(False)
    return Trained(model, tokenizer_in(folder), card, folder)


def sample(
    trained: Trained,
    prompt: str,
    *,
    count: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
    copies: int = 1,
) -> list[str]:
    """Texts that go on from the prompt, without it; each ends where the model ends its document."""
    tokenizer = trained.needs_tokenizer()
    return write_texts(
        trained.model,
        tokenizer,
        prompt,
        count=count,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        copies=copies,
    )


def evaluate_model(
    trained: Trained, data: str = "", *, count: int | None = None, at_once: int = 8, precision: str = "auto"
) -> Evaluation:
    """On the first `count` validation tokens at `data`; by default those of the run the model belongs to, and as many
    as it evaluates itself on."""
    config = trained.model.config
    if count is None:
        count = (stored_config(_run_of(trained)) or Config()).eval_tokens
    if count < 1:
        raise UserError(f"tokens is {count}, must be at least 1")
    validation, tokenizer = _validation(trained, data)
    check_tokenizer(tokenizer, trained.tokenizer)
    check_vocabulary(tokenizer, config.vocabulary)
    return evaluate(
        trained.model,
        validation,
        context=config.context,
        vocabulary=config.vocabulary,
        count=count,
        at_once=at_once,
        device=trained.device,
        precision=precision,
        tokenizer=tokenizer or trained.tokenizer,
    )


def _run_of(trained: Trained) -> Path:
    return trained.folder.resolve().parent.parent


def _validation(trained: Trained, data: str) -> tuple[Tokens, Tokenizer | None]:
    if data:
        return Tokens.open(data, "val"), tokenizer_in(Path(data))
    run = _run_of(trained)
    config = stored_config(run)
    if config is None:
        raise UserError(f"{trained.folder} does not belong to a run: name the data by --data")
    opened = open_data(config.data, run / "data")
    if opened.validation is None:
        raise UserError(f"{config.data.path} has no validation tokens: name some by --data")
    return opened.validation, opened.tokenizer


def export(trained: Trained, to: Path, *, dtype: str = "float32") -> Path:
    """A folder with the weights (safetensors), config.json and the tokenizer; it loads like a checkpoint."""
    if dtype not in ("float32", "bfloat16", "float16"):
        raise UserError(f"dtype is {dtype!r}, must be 'float32', 'bfloat16' or 'float16'")
    if to.name in ("", ".."):
        raise UserError(f"to is {str(to)!r}: name a folder for it")
    if to.exists() and any(to.iterdir() if to.is_dir() else [to]):
        raise UserError(f"{to} is there already and not empty: choose another folder")
    beside = to.with_name(f".{to.name}.new")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        tensors = {n: t.to("cpu", getattr(torch, dtype)).contiguous() for n, t in trained.model.state_dict().items()}
        save_file(tensors, beside / MODEL, metadata={"format": "pt"})
        by_umask(beside / MODEL)
        write_atomically(beside / _CARD, json.dumps({**trained.card, "dtype": dtype}, indent=1).encode())
        if trained.tokenizer is not None:
            trained.tokenizer.save(beside)
        if to.exists():
            to.rmdir()
        beside.rename(to)
    except (OSError, SafetensorError) as wrong:
        shutil.rmtree(beside, ignore_errors=True)
        raise UserError(f"cannot write to {to}: {getattr(wrong, 'strerror', None) or wrong}") from None
    return to


def _second_line(wrong: Exception) -> str:
    lines = [line.strip() for line in str(wrong).splitlines() if line.strip()]
    return lines[min(1, len(lines) - 1)]
