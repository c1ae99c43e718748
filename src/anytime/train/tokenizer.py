"""Text to token ids and back: bytes, GPT-2, any tokenizer.json, or one trained on the data.

A tokenizer writes itself into a folder and comes back from it, so that data and models carry their own. Special ids
stand for no text: they are never made from text and are left out when ids are decoded.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from .errors import UserError
from .files import write_atomically
from .shards import Integers, unreadable

END = "<|endoftext|>"
ABOUT = "anytime_tokenizer.json"
_RANKS = "gpt2.tiktoken"
_JSON = "tokenizer.json"
#: What ends a document in the tokenizers of others; the first that is found.
_ENDS = (END, "</s>", "<|end_of_text|>", "<|im_end|>", "<eos>", "<|eot_id|>", "[SEP]")
_GPT2_SIZE = 50256
# The pattern of GPT-2 as tiktoken writes it: possessive, so that long runs of one kind cost no backtracking.
_GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


def require(module: str) -> Any:
    """An optional package, or what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise UserError(f'this needs the package {package}: pip install "anytime-optim[data]"') from error


class Tokenizer(ABC):
    """Ids below `vocabulary`; `end` is the id that ends a document, or None."""

    kind: ClassVar[str]
    vocabulary: int
    end: int | None

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without `end`."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text."""
        return [ids.tolist() for ids in self.encode_arrays(texts)]

    def encode_arrays(self, texts: Sequence[str]) -> list[Integers]:
        """The same as arrays: a list of millions of Python integers is slow and large."""
        # Half of a surrogate pair (from JSON, or a command line) is no text and becomes "?".
        return self._encode([text if _is_text(text) else text.encode("utf-8", "replace").decode() for text in texts])

    @abstractmethod
    def _encode(self, texts: Sequence[str]) -> list[Integers]: ...

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; what is not UTF-8 becomes U+FFFD, special and unknown ids nothing."""

    @abstractmethod
    def byte_lengths(self) -> npt.NDArray[np.int32]:
        """[vocabulary]: how many bytes of text each id stands for."""

    @abstractmethod
    def _files(self) -> dict[str, bytes]:
        """Name to contents of what it takes to load it again."""

    @cached_property
    def fingerprint(self) -> str:
        """The same for tokenizers that give the same ids."""
        digest = hashlib.sha256(self.kind.encode())
        for name, data in sorted(self._files().items()):
            digest.update(name.encode() + b"\0" + data)
        return digest.hexdigest()[:16]

    def about(self) -> dict[str, Any]:
        """What it is, in JSON."""
        return {"kind": self.kind, "vocabulary": self.vocabulary, "end": self.end}

    def save(self, folder: Path) -> None:
        """Writes what `load` reads."""
        about = json.dumps(self.about()).encode()
        for name, data in {**self._files(), ABOUT: about}.items():
            write_atomically(folder / name, data)

    @staticmethod
    def load(folder: Path) -> Tokenizer:
        """From a folder that `save` wrote, or one with a tokenizer.json."""
        if not (folder / ABOUT).exists():
            if (folder / _JSON).exists():
                return JsonTokenizer.read(folder / _JSON)
            raise UserError(f"{folder} has no tokenizer (neither {ABOUT} nor {_JSON})")
        try:
            about = json.loads(_read(folder / ABOUT))
            kind = about["kind"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{folder / ABOUT} is broken; write the tokenizer anew") from error
        if kind == BytesTokenizer.kind:
            return BytesTokenizer()
        if kind == Gpt2Tokenizer.kind:
            return Gpt2Tokenizer.read(folder / _RANKS)
        if kind == JsonTokenizer.kind:
            return JsonTokenizer.read(folder / _JSON)
        raise UserError(f"{folder / ABOUT} has the unknown kind {kind!r}; a newer version may have written it")


class BytesTokenizer(Tokenizer):
    """The bytes of UTF-8. NUL, which no text needs, ends a document; in a text it is dropped."""

    kind = "bytes"
    vocabulary = 256
    end = 0

    def _encode(self, texts: Sequence[str]) -> list[Integers]:
        return [np.frombuffer(text.encode().replace(b"\0", b""), np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if 0 < i < 256).decode("utf-8", "replace")

    def byte_lengths(self) -> npt.NDArray[np.int32]:
        return np.minimum(np.arange(256), 1).astype(np.int32)

    def _files(self) -> dict[str, bytes]:
        return {}


class Gpt2Tokenizer(Tokenizer):
    """GPT-2's, by tiktoken: 50,256 byte pairs, then the end."""

    kind = "gpt2"
    vocabulary = _GPT2_SIZE + 1
    end = _GPT2_SIZE

    def __init__(self, ranks: dict[bytes, int]) -> None:
        self._tokens = sorted(ranks, key=ranks.__getitem__)
        special = {END: self.end}
        tiktoken = require("tiktoken")
        self._encoding = tiktoken.Encoding(
            "gpt2",
            pat_str=_GPT2_PATTERN,
            mergeable_ranks=ranks,
            special_tokens=special,
            explicit_n_vocab=self.vocabulary,
        )

    @classmethod
    def read(cls, path: Path) -> Gpt2Tokenizer:
        """From a file of ranks as tiktoken has them: on each line a token in base64 and its rank."""
        lines = _read(path).splitlines()
        try:
            pairs = [line.split() for line in lines if line]
            ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
        except ValueError as error:
            raise UserError(f"{path} is not a file of tiktoken ranks (on each line base64 and a number)") from error
        if sorted(ranks.values()) != list(range(_GPT2_SIZE)):
            raise UserError(f"{path} has {len(ranks)} ranks; GPT-2 has those from 0 to {_GPT2_SIZE - 1}")
        return cls(ranks)

    @classmethod
    def download(cls) -> Gpt2Tokenizer:
        """From where tiktoken has it, or from its cache."""
        tiktoken = require("tiktoken")
        try:
            encoding = tiktoken.get_encoding("gpt2")
        except OSError as error:
            raise UserError(
                "the GPT-2 tokenizer could not be downloaded (no network?): set TIKTOKEN_CACHE_DIR to a folder that "
                "has it, give a file of ranks as gpt2:PATH, or use the tokenizer bytes"
            ) from error
        return cls({encoding.decode_single_token_bytes(i): i for i in range(_GPT2_SIZE)})

    def _encode(self, texts: Sequence[str]) -> list[Integers]:
        return [self._encoding.encode_to_numpy(text, disallowed_special=()) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(self._tokens[i] for i in ids if 0 <= i < _GPT2_SIZE).decode("utf-8", "replace")

    def byte_lengths(self) -> npt.NDArray[np.int32]:
        return np.array([*map(len, self._tokens), 0], np.int32)

    def _files(self) -> dict[str, bytes]:
        lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(self._tokens))
        return {_RANKS: b"".join(lines)}


class JsonTokenizer(Tokenizer):
    """Whatever a tokenizer.json of the package `tokenizers` describes."""

    kind = "json"

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a document is text
        self.vocabulary = max(tokenizer.get_vocab().values(), default=-1) + 1
        self.end = next((i for i in map(tokenizer.token_to_id, _ENDS) if i is not None), None)

    @classmethod
    def read(cls, path: Path) -> JsonTokenizer:
        """From a tokenizer.json."""
        data = _read(path)
        try:
            tokenizer = require("tokenizers").Tokenizer.from_buffer(data)
        except ValueError as error:
            raise UserError(f"{path} is not a tokenizer.json: {_one_line(error)}") from error
        return cls(tokenizer)

    def _encode(self, texts: Sequence[str]) -> list[Integers]:
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(item.ids, np.uint32) for item in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        known = [i for i in ids if 0 <= i < self.vocabulary]
        return str(self._tokenizer.decode(known, skip_special_tokens=True))

    def byte_lengths(self) -> npt.NDArray[np.int32]:
        """Exact for byte-level tokenizers and those that fall back on bytes; others may add or lose spaces."""
        lengths = np.zeros(self.vocabulary, np.int32)
        byte_level = '"ByteLevel"' in json.dumps(json.loads(self._tokenizer.to_str())["decoder"])
        for token, i in self._tokenizer.get_vocab(with_added_tokens=False).items():
            if byte_level:
                lengths[i] = len(token)  # a character for each byte
            elif re.fullmatch("<0x[0-9A-F]{2}>", token):
                lengths[i] = 1
            else:  # U+2581 stands for a space, and ## for none before the token
                lengths[i] = len(token.replace("\u2581", " ").removeprefix("##").encode())
        for i, added in self._tokenizer.get_added_tokens_decoder().items():
            lengths[i] = 0 if added.special else len(added.content.encode())
        if self.end is not None:
            lengths[self.end] = 0
        return lengths

    def _files(self) -> dict[str, bytes]:
        return {_JSON: self._tokenizer.to_str().encode()}


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE made for these texts: the end is id 0, then the 256 bytes, then the pairs."""
    if vocabulary < 257:
        raise UserError(f"a trained vocabulary of {vocabulary} is too small: the bytes and the end are 257")
    tokenizers = require("tokenizers")
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=byte_level.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    if (reached := tokenizer.get_vocab_size()) != vocabulary:
        raise UserError(
            f"the text is too small for a vocabulary of {vocabulary}: it gives {reached}; ask for {reached} at most, "
            "or give more text"
        )
    return JsonTokenizer(tokenizer)


def open_tokenizer(spec: str) -> Tokenizer:
    """From "bytes", "gpt2", "gpt2:FILE OF RANKS", the path of a tokenizer.json, or a folder that has a tokenizer."""
    if spec == BytesTokenizer.kind:
        return BytesTokenizer()
    if spec == Gpt2Tokenizer.kind:
        return Gpt2Tokenizer.download()
    if spec.startswith("gpt2:"):
        return Gpt2Tokenizer.read(Path(spec.removeprefix("gpt2:")))
    path = Path(spec)
    if path.is_dir():
        return Tokenizer.load(path)
    if path.exists():
        return JsonTokenizer.read(path)
    raise UserError(
        f"tokenizer {spec!r} is neither bytes, gpt2, gpt2:FILE nor the path of a tokenizer.json or a folder with one"
    )


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
