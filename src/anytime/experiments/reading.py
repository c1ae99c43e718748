"""Runs of the robustness suite on texts, which may change on the way; and where the texts come from."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..train.branch import branch, fine_tune
from ..train.checkpoint import checkpoints_in
from ..train.config import merged
from ..train.data import PYTHON
from ..train.errors import UserError
from ..train.files import make_folder
from ..train.prepare import prepare, read_meta
from ..train.shards import Split, Tokens, write_shard
from ..train.tokenizer import BytesTokenizer
from .anytime import EPOCHS, Study
from .grid import Grid
from .methods import Method
from .run import Machine, Row, Run, blank, digest
from .search import Try

#: Texts by name, besides Python's own library: the user's, and the documentation in that library.
TEXT, WORDS = "text", "words"
Average = Literal["keep", "restart"]


@dataclass(frozen=True)
class Read(Run):
    """A run on a text by name.

    first, at: the text of its first steps, and how many these are. average: what becomes of the average there.
    base: the run whose weights it begins with, under an optimizer that has seen nothing.
    """

    text: str = PYTHON
    first: str = ""
    at: int = 0
    average: Average = "keep"
    base: Run | None = None

    @functools.cached_property
    def key(self) -> str:
        more = [self.text, self.first, self.at, self.average, self.base and self.base.key]
        return f"{super().key} {digest(more)}"

    @property
    def reads(self) -> dict[str, int]:
        """Tokens of each text."""
        each = self.tokens // self.steps
        return {name: each * n for name, n in ((self.first, self.at), (self.text, self.steps - self.at)) if n}

    def execute(self, folder: Path, machine: Machine) -> Row | None:
        def on(text: str) -> Machine:
            return dataclasses.replace(machine, data=str(Path(machine.data).with_name(text)))

        here = {"run": str(folder), "data": {"path": on(self.text).data}, "until": f"{self.steps} steps"}
        if self.first and not folder.exists():
            before = folder.with_name(f"{folder.name}-first")
            first = Run(self.name, self.seed, {**self.settings, "until": f"{self.at} steps", "eval_at": []})
            row = first.execute(before, on(self.first))
            if row is None:
                return None
            if "failed" in row:
                return blank(self, machine) | {"failed": row["failed"]}
            changes = {key: value for key, value in here.items() if key != "run"}
            branch(before, folder, average=self.average, changes={**changes, "eval_at": self.config.eval_at})
        if self.base is not None and not folder.exists():
            source = self.base.folder(folder.parent)
            if not checkpoints_in(source / "checkpoints"):
                return blank(self, machine) | {"failed": "there is nothing to begin with"}
            fine_tune(source, merged(self.config, here))
        row = super().execute(folder, on(self.text))
        if row is not None:
            del row["data"]  # of a grid that has one text
            row["texts"] = {name: Tokens.open(on(name).data, "train").fingerprint() for name in self.reads}
        return row


@dataclass(frozen=True)
class Task(Study):
    """A study of the recipe on a text, of which nothing is searched.

    shift: the part of the horizon that is on Python's library, before the text. base: by seed, see Read.
    """

    text: str = PYTHON
    shift: float = 0.0
    base: Callable[[int], Run] | None = None

    def run(
        self, method: Method, point: Try, multiple: float, seed: int, *, curve: bool = False, average: Average = "keep"
    ) -> Run:
        made = super().run(method, point, multiple, seed, curve=curve)
        name = f"{self.name}: {made.name}{', average restarted' if average == 'restart' else ''}"
        more: dict[str, Any] = {"first": PYTHON, "at": self.steps(self.shift)} if self.shift else {}
        base = None if self.base is None else self.base(seed)
        return Read(name, seed, made.settings, text=self.text, average=average, base=base, **more)


def write_texts(runs: Sequence[Read], text: str, grid: Grid) -> dict[str, Tokens]:
    """The texts that the runs read, each in a folder by its name beside Python's."""
    if not runs:
        return {}
    python = Path(grid.machine.data)
    names = sorted({name for run in runs for name in run.reads})
    if TEXT in names and text:
        prepare([text], python.with_name(TEXT), "bytes", val_every=20)
    elif TEXT in names and read_meta(python.with_name(TEXT)) is None:
        raise UserError(f"{runs[0].name} needs the text that the rows before it are of: give it by --text FILE")
    if WORDS in names:
        write_words(python, python.with_name(WORDS))
    return {name: Tokens.open(str(python.with_name(name)), "train") for name in names}


def write_words(python: Path, folder: Path) -> None:
    """What stands between triple quotes in the lines of Python's own library, held out where its file is."""
    make_folder(folder)
    splits: tuple[Split, ...] = ("train", "val")
    for split in splits:
        tokens = Tokens.open(str(python), split)
        source = tokens.gather(np.zeros(1, np.int64), len(tokens))[0].astype(np.uint8).tobytes()
        inner = [
            piece for file in source.split(b"\0") for piece in re.findall(rb'^\s*r?"""(.*?)"""', file, re.S | re.M)
        ]
        found = b"\0".join(inner)
        write_shard(folder / f"{split}-000000.bin", np.frombuffer(found, np.uint8).astype(np.uint16))
    BytesTokenizer().save(folder)


def check(runs: Sequence[Read], texts: Mapping[str, Tokens], grid: Grid) -> None:
    """That the texts are long enough, and those of the rows."""
    for run in runs:
        for name, count in run.reads.items():
            if count > EPOCHS * len(texts[name]):
                raise UserError(
                    f"{run.name!r} takes {count:,} bytes of {name}, more than {EPOCHS} times the {len(texts[name]):,} "
                    "there are: give more by --text FILE"
                )
    marks = {name: tokens.fingerprint() for name, tokens in texts.items()}
    for row in grid.rows.values():
        for name, mark in row.get("texts", {}).items():
            if marks.get(name, mark) != mark:
                raise UserError(f"the rows in {grid.path} are of another {name} than this one: choose another --out")
