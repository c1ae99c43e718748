"""The tokens of a run: made by `anytime data`, by others, or, for a first try, the source of Python's own library."""

from __future__ import annotations

import os
import sysconfig
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from .config import DataConfig
from .errors import UserError
from .shards import Tokens, write_shard
from .tokenizer import ABOUT, BytesTokenizer, Tokenizer, open_tokenizer

PYTHON = "python"


@dataclass(frozen=True)
class Data:
    """Training and validation tokens, and the tokenizer they came from where it is known."""

    train: Tokens
    validation: Tokens | None
    tokenizer: Tokenizer | None


def absolute(config: DataConfig) -> DataConfig:
    """With full paths, so that a run can be resumed from any folder."""

    def full(path: str) -> str:
        return os.path.abspath(path) if path else ""

    kind, colon, ranks = config.tokenizer.partition(":")
    named = {"bytes": "bytes", "gpt2": "gpt2" + colon + full(ranks)}
    return replace(
        config,
        path=config.path if config.path == PYTHON else full(config.path),
        validation=full(config.validation),
        tokenizer=named.get(kind) or full(config.tokenizer),
    )


def open_data(config: DataConfig, folder: Path) -> Data:
    """`folder` is where the data that the run makes for itself lies."""
    if not config.path:
        raise UserError("data.path is empty: name a folder made by `anytime data`, or 'python' to try things out")
    source = Path(config.path)
    if config.path == PYTHON:
        source = folder
        write_python(folder)
    elif not source.exists() and not any(c in config.path for c in "*?["):
        raise UserError(f"there is no data at {config.path}: make it with `anytime data FILES --out {config.path}`")
    train = Tokens.open(str(source), "train")
    validation = None
    if config.validation:
        validation = Tokens.open(config.validation, "val")
    elif source.is_dir():
        try:
            validation = Tokens.open(str(source), "val")
        except UserError:
            if any(source.glob("*val*.bin")):
                raise
    tokenizer = None
    if config.tokenizer:
        tokenizer = open_tokenizer(config.tokenizer)
    elif source.is_dir():
        tokenizer = tokenizer_in(source)
    return Data(train, validation, tokenizer)


def tokenizer_in(folder: Path) -> Tokenizer | None:
    """The one that a folder carries, if any."""
    there = (folder / ABOUT).exists() or (folder / "tokenizer.json").exists()
    return Tokenizer.load(folder) if there else None


def check_vocabulary(tokenizer: Tokenizer | None, vocabulary: int) -> None:
    """That the model has a place for every id of the data's tokenizer."""
    if tokenizer is not None and tokenizer.vocabulary > vocabulary:
        size = tokenizer.vocabulary
        raise UserError(
            f"the data's tokenizer has {size} ids, the model a vocabulary of {vocabulary}: set "
            f"--model.vocabulary {-(-size // 64) * 64}, or prepare the data with another tokenizer"
        )


def check_tokenizer(data: Tokenizer | None, model: Tokenizer | None) -> None:
    """That the tokens mean the same to the data and to the model."""
    if data is not None and model is not None and data.fingerprint != model.fingerprint:
        raise UserError(
            f"the data were made with another tokenizer ({data.kind}, {data.vocabulary} ids) than the model's "
            f"({model.kind}, {model.vocabulary} ids): prepare them anew, with the model's folder as --tokenizer"
        )


def write_python(folder: Path) -> None:
    """The *.py files of the running Python's standard library as bytes, one file in ten held out.

    Kept with the run, because another Python has another library.
    """
    if (folder / ABOUT).exists():
        return
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for name in sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py")):
        if skipped.isdisjoint(name.split("/")):
            text = (root / name).read_bytes().replace(b"\0", b"")
            parts[zlib.crc32(name.encode()) % 10 == 0].append(text + b"\0")
    tokenizer = BytesTokenizer()
    for split, part in zip(("train", "val"), parts, strict=True):
        tokens = np.frombuffer(b"".join(part), np.uint8)
        if len(tokens) < 100_000:
            raise UserError(f"there are too few of Python's own source files in {root}; give other data by --data.path")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_shard(folder / f"{split}-000000.bin", tokens.astype(np.uint16))
        except OSError as wrong:
            raise UserError(f"cannot write to {folder}: {wrong.strerror or wrong}") from None
    tokenizer.save(folder)
