"""The tokens of a run, and what importing the training system brings along."""

from __future__ import annotations

import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

import anytime
from anytime.train import data as module
from anytime.train.config import DataConfig
from anytime.train.data import open_data, tokenizer_in, write_python
from anytime.train.errors import UserError
from anytime.train.shards import Tokens, write_shard
from anytime.train.tokenizer import BytesTokenizer

ROOT = Path(anytime.__file__).parent


def write(path: Path, count: int, first: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_shard(path, (np.arange(count) % 200 + first).astype(np.uint16))


@pytest.fixture
def folder(tmp_path) -> Path:
    write(tmp_path / "d" / "train-000000.bin", 100)
    write(tmp_path / "d" / "val-000000.bin", 30)
    BytesTokenizer().save(tmp_path / "d")
    return tmp_path / "d"


def test_a_folder_has_training_and_validation_and_its_tokenizer(folder, tmp_path):
    found = open_data(DataConfig(path=str(folder)), tmp_path / "own")
    assert (len(found.train), len(found.validation)) == (100, 30)
    assert isinstance(found.tokenizer, BytesTokenizer)
    assert not (tmp_path / "own").exists()


def test_validation_may_lie_elsewhere(folder, tmp_path):
    write(tmp_path / "e" / "val-0.bin", 50)
    found = open_data(DataConfig(path=str(folder), validation=str(tmp_path / "e")), tmp_path / "own")
    assert len(found.validation) == 50
    write(tmp_path / "judge.bin", 60)
    found = open_data(DataConfig(path=str(folder), validation=str(tmp_path / "judge.bin")), tmp_path / "own")
    assert len(found.validation) == 60
    with pytest.raises(UserError, match="does not exist"):
        open_data(DataConfig(path=str(folder), validation=str(tmp_path / "none")), tmp_path / "own")


def test_without_validation_tokens(folder, tmp_path):
    (folder / "val-000000.bin").unlink()
    assert open_data(DataConfig(path=str(folder)), tmp_path / "own").validation is None
    file = folder / "train-000000.bin"
    found = open_data(DataConfig(path=str(file)), tmp_path / "own")
    assert (len(found.train), found.validation, found.tokenizer) == (100, None, None)
    found = open_data(DataConfig(path=str(folder / "train*.bin")), tmp_path / "own")
    assert (len(found.train), found.validation) == (100, None)


def test_broken_validation_tokens_are_not_passed_over(folder, tmp_path):
    (folder / "val-000000.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"val-000000\.bin is empty"):
        open_data(DataConfig(path=str(folder)), tmp_path / "own")


def test_another_tokenizer_may_be_named(folder, tmp_path):
    (folder / "anytime_tokenizer.json").unlink()
    assert open_data(DataConfig(path=str(folder)), tmp_path / "own").tokenizer is None
    found = open_data(DataConfig(path=str(folder), tokenizer="bytes"), tmp_path / "own").tokenizer
    assert isinstance(found, BytesTokenizer)
    with pytest.raises(UserError, match="tokenizer 'nonsense'"):
        open_data(DataConfig(path=str(folder), tokenizer="nonsense"), tmp_path / "own")


def test_no_data(tmp_path):
    with pytest.raises(UserError, match=r"data\.path is empty"):
        open_data(DataConfig(path=""), tmp_path)
    with pytest.raises(
        UserError, match=r"there is no data at nowhere: make it with `anytime data FILES --out nowhere`"
    ):
        open_data(DataConfig(path="nowhere"), tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        open_data(DataConfig(path=str(tmp_path / "*.bin")), tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="has no train tokens"):
        open_data(DataConfig(path=str(tmp_path / "empty")), tmp_path)


def test_tokenizer_in(folder, tmp_path):
    assert isinstance(tokenizer_in(folder), BytesTokenizer)
    assert tokenizer_in(tmp_path) is None
    (folder / "anytime_tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="is broken"):
        tokenizer_in(folder)


# -------------------------------------------------- the library of Python


@pytest.fixture
def library(tmp_path, monkeypatch) -> Path:
    """A small one."""
    root = tmp_path / "lib"
    for i in range(60):
        path = root / ("pack" if i % 2 else "") / f"m{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"# module {i}\n".encode() * 3000)
    for left_out in ("site-packages/x.py", "test/y.py", "pack/tests/z.py", "idlelib/idle_test/i.py"):
        (root / left_out).parent.mkdir(parents=True, exist_ok=True)
        (root / left_out).write_bytes(b"SECRET" * 1000)
    (root / "nul.py").write_bytes(b"a = '\0\0NUL'\n" * 100)
    monkeypatch.setattr(module.sysconfig, "get_paths", lambda: {"stdlib": str(root)})
    return root


def read(folder: Path, split) -> bytes:
    tokens = Tokens.open(folder, split)
    return tokens.gather(np.zeros(1, np.int64), len(tokens))[0].astype(np.uint8).tobytes()


def test_the_library_of_python_as_bytes(library, tmp_path):
    out = tmp_path / "run" / "data"
    found = open_data(DataConfig(path="python"), out)
    assert isinstance(found.tokenizer, BytesTokenizer)
    train, held = read(out, "train"), read(out, "val")
    assert train.endswith(b"\0")
    assert held.endswith(b"\0")
    names = sorted(p.relative_to(library).as_posix() for p in library.rglob("*.py"))
    wanted: dict[bool, bytes] = {False: b"", True: b""}
    for name in names:
        if not any(part in name for part in ("site-packages", "test/", "tests/", "idle_test")):
            text = (library / name).read_bytes().replace(b"\0", b"")
            wanted[zlib.crc32(name.encode()) % 10 == 0] += text + b"\0"
    assert train == wanted[False]
    assert held == wanted[True]
    assert b"SECRET" not in train + held
    assert (train + held).count(b"\0") == 61  # files, and no NUL besides


def test_it_is_written_once(library, tmp_path):
    out = tmp_path / "data"
    write_python(out)
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    for path in library.rglob("m*.py"):
        path.write_bytes(path.read_bytes() + b"# newer")
    write_python(out)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before


def test_what_was_interrupted_is_written_anew(library, tmp_path):
    out = tmp_path / "data"
    write_python(out)
    whole = {p.name: p.read_bytes() for p in out.iterdir()}
    (out / "anytime_tokenizer.json").unlink()  # it comes last
    (out / "val-000000.bin").unlink()
    write_python(out)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == whole


def test_a_python_without_its_library(tmp_path, monkeypatch):
    monkeypatch.setattr(module.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "none")})
    with pytest.raises(UserError, match="too few of Python's own source files"):
        write_python(tmp_path / "data")


@pytest.mark.slow
def test_this_pythons_library_is_enough_to_learn_from(tmp_path):
    found = open_data(DataConfig(path="python"), tmp_path)
    assert len(found.train) > 5e6
    assert 0.03 < len(found.validation) / len(found.train) < 0.3
    read(tmp_path, "train").decode("utf-8", "ignore")
    assert b"import " in read(tmp_path, "val")


# ------------------------------------------------------------------ imports


def test_the_core_of_training_brings_torch_numpy_and_safetensors_alone():
    """Optional packages wait for the function that needs them."""
    ours = ("config", "model", "build", "checkpoint", "loop", "runs", "evaluate")
    ours += ("batches", "shards", "data", "tokenizer")
    code = (
        "import sys, torch, numpy, safetensors.torch, typing_extensions, torch.nn.attention.flex_attention\n"
        "import torch.distributed.checkpoint, torch.distributed.tensor.parallel, torch.distributed.fsdp\n"
        "old = {*sys.modules}\n"
        f"import {', '.join(f'anytime.train.{name}' for name in ours)}\n"
        "print(*({*sys.modules} - old))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    brought = {name.partition(".")[0] for name in done.stdout.split()}
    assert "anytime" in brought
    allowed = {"anytime", "torch", "numpy", "safetensors", *sys.stdlib_module_names}
    assert brought - allowed == set()


def test_paths_are_made_full_so_that_a_run_goes_on_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = module.absolute(DataConfig(path="tokens", validation="val.bin", tokenizer="gpt2:ranks"))
    assert found == DataConfig(f"{tmp_path}/tokens", f"{tmp_path}/val.bin", f"gpt2:{tmp_path}/ranks")
    assert module.absolute(found) == found
    assert module.absolute(DataConfig("python", "", "bytes")) == DataConfig("python", "", "bytes")
    assert module.absolute(DataConfig("a*.bin", "", "gpt2")).path == f"{tmp_path}/a*.bin"
    assert module.absolute(DataConfig("a", "", "gpt2")).tokenizer == "gpt2"
    assert module.absolute(DataConfig("a", "", "t.json")).tokenizer == f"{tmp_path}/t.json"
    assert module.absolute(DataConfig("a")).tokenizer == ""
