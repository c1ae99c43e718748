"""Documents out of text, JSON Lines and Parquet files and Hugging Face datasets, and how inputs are cut into slices.

- Plain text (any other suffix): documents are separated by a line that is exactly the separator; that line and the
  newline before it belong to none. A file without one is one document.
- `.jsonl`, `.json`: one object a line. `.parquet`: one document a row. Both take the text under a key.
- `.gz`, `.bz2`, `.xz` and `.zst` around text or JSON Lines; such a file cannot be cut, only read through.
- `hf:NAME` or `hf:NAME:CONFIG`: the train split of a dataset, streamed; `hf:/a/folder` is a dataset on the disk.
"""

from __future__ import annotations

import bz2
import codecs
import glob
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias

from .errors import UserError
from .shards import unreadable
from .tokenizer import require

Kind: TypeAlias = Literal["text", "jsonl", "parquet", "hf"]

_KINDS: dict[str, Kind] = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
_OPENERS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": lambda path: io.BufferedReader(require("pyarrow").input_stream(str(path), compression="zstd")),
}
#: What is taken from a folder, beside the kinds above; a file that is named outright may have any suffix.
_TEXT = (
    *(".txt", ".md", ".rst", ".tex", ".html", ".css", ".py", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".java", ".kt"),
    *(".scala", ".js", ".ts", ".go", ".rs", ".rb", ".php", ".swift", ".r", ".jl", ".hs", ".ml", ".lua", ".sh", ".sql"),
)
_PIECE = 1 << 20  # bytes of a long document that are held and tokenized at once


@dataclass(frozen=True)
class Slice:
    """A stretch of an input: bytes of a file, row groups of a Parquet file, or one shard of a dataset.

    `size` is about how much there is to do, in bytes. An `end` of None is the end of the file.
    """

    kind: Kind
    path: str
    begin: int
    end: int | None
    size: int


@dataclass(frozen=True)
class Part:
    """Slices that are tokenized together, all of them for validation or none, up to `limit` tokens."""

    index: int
    slices: tuple[Slice, ...]
    validation: bool = False
    limit: int | None = None


@dataclass(frozen=True)
class Piece:
    """A document, or a stretch of a long one; `ends` says whether the document ends with it."""

    text: str
    ends: bool = True


def cut(
    inputs: Sequence[str], val_inputs: Sequence[str], near: int, separator: str, limit: int | None = None
) -> list[Part]:
    """Cuts the inputs, in order, into parts of about `near` bytes, and shares out the limit of tokens.

    Large files are cut, between documents where possible, and small ones put together.
    """
    parts: list[Part] = []
    for validation, names in ((False, inputs), (True, val_inputs)):
        groups: list[list[Slice]] = []
        size = near
        for item in _slices(names, near, separator):
            if size >= near:
                groups.append([])
                size = 0
            groups[-1].append(item)
            size += item.size
        total = sum(item.size for group in groups for item in group)
        before = 0
        for group in groups:
            after = before + sum(item.size for item in group)
            share = None if limit is None or validation else limit * after // total - limit * before // total
            parts.append(Part(len(parts), tuple(group), validation, share))
            before = after
    return parts


def _slices(inputs: Sequence[str], near: int, separator: str) -> list[Slice]:
    found: list[Slice] = []
    for item in inputs:
        if item.startswith("hf:"):
            found += _slice_dataset(item, near)
            continue
        for path in _files(item):
            found += _slice_file(path, near, separator)
    return found


def pieces(part: Slice, text_key: str, separator: str) -> Iterator[Piece]:
    """The documents of a slice. Empty ones are left out, and those longer than some megabytes come in pieces."""
    if part.kind == "parquet":
        yield from _parquet(part, text_key)
        return
    if part.kind == "hf":
        yield from _dataset(part, text_key)
        return
    path = Path(part.path)
    try:
        with _open(path) as stream:
            if part.begin:
                stream.seek(part.begin)
            if part.kind == "text":
                yield from _text(stream, part, separator.encode())
            else:
                yield from _jsonl(stream, part, text_key)
    except (EOFError, lzma.LZMAError, zlib.error) as error:
        raise UserError(f"{path} is damaged: {error}; fetch it again") from error
    except OSError as error:
        raise unreadable(path, error) from error


def batched(found: Iterable[Piece], characters: int) -> Iterator[list[Piece]]:
    """Some pieces at a time: enough to keep a tokenizer busy, and never a whole file in memory."""
    batch: list[Piece] = []
    size = 0
    for piece in found:
        batch.append(piece)
        size += len(piece.text)
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _files(item: str) -> list[Path]:
    path = Path(item)
    if path.is_dir():
        found = [p for p in sorted(path.rglob("*")) if p.is_file() and not _hidden(p.relative_to(path))]
        chosen = [p for p in found if (kind := _suffix(p)) in _TEXT or kind in _KINDS]
        if not chosen:
            there = ", ".join(p.name for p in found[:8]) + (", …" if len(found) > 8 else "") if found else "no files"
            raise UserError(f"{path} has no text, JSON Lines or Parquet files; it has: {there}")
        return chosen
    if path.exists():
        return [path]
    if names := sorted(glob.glob(item, recursive=True)):
        return [file for name in names for file in _files(name)]
    raise UserError(f"the input {item} does not exist; name a file, a folder, a glob or hf:DATASET")


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _suffix(path: Path) -> str:
    """The suffix under that of a compression."""
    return (Path(path.stem) if path.suffix.lower() in _OPENERS else path).suffix.lower()


def _open(path: Path) -> BinaryIO:
    opener = _OPENERS.get(path.suffix.lower())
    stream: BinaryIO = opener(path) if opener else path.open("rb")
    return stream


def _slice_file(path: Path, near: int, separator: str) -> list[Slice]:
    kind = _KINDS.get(_suffix(path), "text")
    try:
        size = path.stat().st_size
        if kind == "parquet":
            return _slice_parquet(path, near)
        if path.suffix.lower() in _OPENERS:
            return [Slice(kind, str(path), 0, None, size)]
        cuts = [0]
        with path.open("rb") as file:
            while cuts[-1] + near < size:
                cuts.append(_cut(file, cuts[-1] + near, near, separator.encode() if kind == "text" else None))
    except OSError as error:
        raise unreadable(path, error) from error
    ends = [*cuts[1:], size]
    return [Slice(kind, str(path), a, b, b - a) for a, b in zip(cuts, ends, strict=True) if a < b]


def _cut(file: BinaryIO, near: int, reach: int, separator: bytes | None) -> int:
    """The end of the first separator after `near`, or of the file; beyond reach, of the line; or `near` itself."""
    file.seek(near)
    line = file.readline() if separator is None else file.readline(reach)
    line_end = file.tell()
    if separator is None:
        return line_end
    if len(line) == reach and not line.endswith(b"\n"):  # one endless line: cut it before a character
        file.seek(near - 3)
        near -= next((back for back, byte in enumerate(file.read(4)[::-1]) if byte & 0xC0 != 0x80), 0)
        return near
    while file.tell() < near + reach:
        line = file.readline(reach)
        if not line or line.rstrip(b"\r\n") == separator:
            return file.tell()
    return line_end


def _text(stream: BinaryIO, part: Slice, separator: bytes) -> Iterator[Piece]:
    decoder = codecs.getincrementaldecoder("utf-8")()  # holds back half a character at the end of a piece
    held: list[bytes] = []  # lines, from the byte `start` of the file on
    start = position = part.begin
    line_begins, document_begins = True, True

    def decode(data: bytes, ends: bool) -> str:
        waiting = len(decoder.getstate()[0])
        try:
            return decoder.decode(data, ends)
        except UnicodeDecodeError as error:
            raise _not_utf8(part.path, start - waiting + error.start) from error

    while line := stream.readline(_PIECE if part.end is None else min(_PIECE, part.end - position)):
        if line_begins and line.rstrip(b"\r\n") == separator:
            text = decode(b"".join(held).removesuffix(b"\n").removesuffix(b"\r"), True)
            if text.strip() or not document_begins:
                yield Piece(text)
            held, start, document_begins = [], position + len(line), True
        else:
            # Between two lines that begin and end with no space a cut changes no token of GPT-2.
            good = line_begins and not line[:1].isspace() and not b"".join(held[-1:])[-2:-1].isspace()
            if position - start >= (_PIECE if good else 2 * _PIECE):
                yield Piece(decode(b"".join(held), False), ends=False)
                held, start, document_begins = [], position, False
            if position == 0 and line.startswith(codecs.BOM_UTF8):
                held.append(line[3:])
                start = 3
            else:
                held.append(line)
        line_begins = line.endswith(b"\n")
        position += len(line)
    text = decode(b"".join(held), True)
    if text.strip() or not document_begins:
        yield Piece(text)


def _jsonl(stream: BinaryIO, part: Slice, text_key: str) -> Iterator[Piece]:
    position = part.begin
    while (part.end is None or position < part.end) and (line := stream.readline()):
        if line.strip():
            try:
                record = json.loads(line)
            except UnicodeDecodeError as error:
                raise _not_utf8(part.path, position + error.start) from error
            except json.JSONDecodeError as error:
                what = f"broken JSON ({error.msg} at column {error.colno}); mend or remove the line"
                if position == 0 and line.lstrip().startswith(b"["):
                    what = "a list begins here; write one object a line (JSON Lines)"
                raise UserError(f"{_line(part.path, position)}: {what}") from error
            except (ValueError, RecursionError) as error:  # thousands of digits or brackets
                what = f"JSON that cannot be read ({_one_line(error)}); mend or remove the line"
                raise UserError(f"{_line(part.path, position)}: {what}") from error
            try:
                yield from _document(record, text_key)
            except UserError as error:
                raise UserError(f"{_line(part.path, position)}: {error}") from error
        position += len(line)


def _slice_parquet(path: Path, near: int) -> list[Slice]:
    metadata = _parquet_file(str(path)).metadata
    sizes = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
    found, begin = [], 0
    for i in range(len(sizes)):
        if (size := sum(sizes[begin : i + 1])) >= near or i + 1 == len(sizes):
            found.append(Slice("parquet", str(path), begin, i + 1, size))
            begin = i + 1
    return found


def _parquet(part: Slice, text_key: str) -> Iterator[Piece]:
    file = _parquet_file(part.path)
    if text_key not in file.schema_arrow.names:
        raise UserError(f"{part.path}: {_no_key(text_key, file.schema_arrow.names)}")
    groups = list(range(part.begin, part.end or file.num_row_groups))
    try:
        for batch in file.iter_batches(256, row_groups=groups, columns=[text_key]):
            for text in batch.column(0).to_pylist():
                yield from _document({text_key: text}, text_key)
    except (OSError, require("pyarrow").ArrowException) as error:
        raise UserError(f"{part.path} cannot be read: {_one_line(error)}") from error


def _parquet_file(path: str) -> Any:
    try:
        return require("pyarrow.parquet").ParquetFile(path)
    except (OSError, require("pyarrow").ArrowException) as error:
        raise UserError(f"{path} is not a Parquet file: {_one_line(error)}") from error


def _slice_dataset(item: str, near: int) -> list[Slice]:
    count = _open_dataset(item).num_shards
    return [Slice("hf", item, i, count, near) for i in range(count)]


def _dataset(part: Slice, text_key: str) -> Iterator[Piece]:
    dataset = _open_dataset(part.path).shard(num_shards=part.end, index=part.begin)
    try:
        for record in dataset:
            yield from _document(record, text_key)
    except UserError as error:
        raise UserError(f"{part.path}: {error}") from error
    except OSError as error:
        raise _unreachable(part.path, error) from error


@lru_cache(1)
def _open_dataset(item: str) -> Any:
    datasets = require("datasets")
    datasets.disable_progress_bars()
    name, _, config = item.removeprefix("hf:").partition(":")
    try:
        return datasets.load_dataset(name, config or None, split="train", streaming=True)
    except (OSError, ValueError) as error:
        raise _unreachable(item, error) from error


def _unreachable(item: str, error: Exception) -> UserError:
    return UserError(
        f"the dataset {item} cannot be read ({_one_line(error)}): check its name and the network and run this again, "
        "or name text files that are on this machine"
    )


def _document(record: object, text_key: str) -> Iterator[Piece]:
    if not isinstance(record, dict):
        raise UserError(f"an object with the key {text_key!r} is wanted, not {type(record).__name__}")
    if text_key not in record:
        raise UserError(_no_key(text_key, list(record)))
    text = record[text_key]
    if text is not None and not isinstance(text, str):
        raise UserError(f"{text_key!r} is {type(text).__name__}, not text; choose another text key")
    if text and text.strip():
        yield Piece(text)


def _no_key(text_key: str, names: Sequence[str]) -> str:
    return f"there is no {text_key!r}; choose the text key among: {', '.join(names) or 'nothing'}"


def _not_utf8(path: str, offset: int) -> UserError:
    """The error for bytes that are no text."""
    with _open(Path(path)) as stream:
        begin = stream.read(4)
    what = "convert it (iconv -f latin1 -t utf-8)"
    if begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        what = "it is UTF-16: convert it (iconv -f utf-16 -t utf-8)"
    elif begin == b"PK\x03\x04":
        what = "it is a zip archive: unpack it"
    return UserError(f"{path} is not UTF-8 at byte {offset}; {what} or leave it out")


def _line(path: str, position: int) -> str:
    """The line of a file that begins at a byte, for a message."""
    with _open(Path(path)) as stream:
        seen, number = 0, 1
        while seen < position:
            seen += len(stream.readline())
            number += 1
    return f"{path} line {number}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
