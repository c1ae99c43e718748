"""Text into shards: what is in them, resuming, and what is refused."""

from __future__ import annotations

import errno
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anytime.train import sources
from anytime.train.errors import UserError
from anytime.train.prepare import Count, prepare, read_meta
from anytime.train.shards import Shard, Tokens
from anytime.train.tokenizer import BytesTokenizer, Tokenizer, train_tokenizer

END = "<|endoftext|>"
module = importlib.import_module("anytime.train.prepare")  # its function has the same name in the package


def corpus(folder: Path, count: int, name: str = "corpus.txt") -> tuple[Path, list[str]]:
    texts = [f"Document {i}: " + "naïve words\n" * (i * 7 % 11) + "." for i in range(count)]
    path = folder / name
    path.write_bytes(f"\n{END}\n".join(texts).encode())
    return path, texts


def ids(folder: Path, split: str) -> list[int]:
    tokens = Tokens.open(folder, split)
    return tokens.gather(np.array([0]), len(tokens))[0].tolist()


def documents(folder: Path, split: str) -> list[str]:
    *found, rest = bytes(ids(folder, split)).split(b"\0")
    assert rest == b""  # each document is followed by the end
    return [text.decode() for text in found]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_every_document_is_there_once(tmp_path):
    path, texts = corpus(tmp_path, 95)
    summary = prepare([str(path)], tmp_path / "out", "bytes", val_every=10, workers=1)
    assert documents(tmp_path / "out", "val") == texts[9::10]
    assert documents(tmp_path / "out", "train") == [t for i, t in enumerate(texts) if i % 10 != 9]
    size = sum(len(text.encode()) for text in texts[9::10])
    assert summary.val == Count(size + 9, size, 9)
    assert summary.train.documents == 86
    assert (summary.vocabulary, summary.end, summary.folder) == (256, 0, tmp_path / "out")


def test_each_part_gives_its_share_of_validation(tmp_path):
    path, texts = corpus(tmp_path, 400)
    out = tmp_path / "out"
    prepare([str(path)], out, "bytes", val_every=4, part_bytes=4096, workers=1)
    parts = sorted(path.name for path in out.glob("train-*.bin"))
    assert len(parts) > 3
    assert parts == [f"train-{i:06d}.bin" for i in range(len(parts))]
    assert sorted(path.name for path in out.glob("val-*.bin")) == [name.replace("train", "val") for name in parts]
    assert sorted(documents(out, "train") + documents(out, "val")) == sorted(texts)


def test_one_long_text_gives_its_tail(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("".join(f"{i} lines\n" for i in range(1000)))
    summary = prepare([str(path)], tmp_path / "out", "bytes", val_every=50, workers=1)
    whole = [*path.read_bytes(), 0]
    train, val = ids(tmp_path / "out", "train"), ids(tmp_path / "out", "val")
    assert train + val == whole
    assert len(val) == len(whole) // 50
    assert summary.train == Count(len(train), len(train), 1)
    assert summary.val == Count(len(val), len(val) - 1, 0)


def test_no_validation(tmp_path):
    path, texts = corpus(tmp_path, 5)
    summary = prepare([str(path)], tmp_path / "out", "bytes", val_every=0, workers=1)
    assert documents(tmp_path / "out", "train") == texts
    assert summary.val == Count()
    assert list((tmp_path / "out").glob("val*")) == []


def test_validation_inputs(tmp_path):
    one, texts = corpus(tmp_path, 30, "one.txt")
    other, others = corpus(tmp_path, 3, "other.txt")
    prepare([str(one)], tmp_path / "out", "bytes", val_every=2, val_inputs=[str(other)], workers=1)
    assert documents(tmp_path / "out", "train") == texts
    assert documents(tmp_path / "out", "val") == others


@settings(max_examples=30)
@given(limit=st.integers(1, 6000), part_bytes=st.sampled_from([1024, 1 << 20]))
def test_the_limit_holds(tmp_path_factory, limit, part_bytes):
    folder = tmp_path_factory.mktemp("limit")
    path, _ = corpus(folder, 40)
    out = folder / "out"
    summary = prepare([str(path)], out, "bytes", val_every=0, limit_tokens=limit, part_bytes=part_bytes, workers=1)
    assert summary.train.tokens == len(ids(out, "train")) <= limit
    whole = len(path.read_bytes())
    assert summary.train.tokens >= min(limit, whole) * 0.85  # separators and short parts


def test_the_meta_file(tmp_path):
    path, _ = corpus(tmp_path, 20)
    out = tmp_path / "out"
    assert read_meta(out) is None
    summary = prepare([str(path)], out, "bytes", val_every=5, workers=1)
    meta = read_meta(out)
    assert meta == json.loads((out / "meta.json").read_text())
    assert meta["format"] == 1
    assert meta["tokenizer"] == {**BytesTokenizer().about(), "fingerprint": BytesTokenizer().fingerprint}
    assert (meta["vocabulary"], meta["end"]) == (256, 0)
    assert Count(**meta["train"]) == summary.train
    assert Count(**meta["val"]) == summary.val
    assert isinstance(Tokenizer.load(out), BytesTokenizer)


def test_a_tokenizer_is_trained_on_the_data(tmp_path):
    pytest.importorskip("tokenizers")
    path, texts = corpus(tmp_path, 60)
    out = tmp_path / "out"
    prepare([str(path)], out, train_tokenizer=300, val_every=0, part_bytes=1024, workers=1)
    tokenizer = Tokenizer.load(out)
    assert tokenizer.vocabulary == 300
    assert ids(out, "train") == [i for text in texts for i in [*tokenizer.encode(text), tokenizer.end]]
    assert max(ids(out, "train")) < 300


def test_a_wide_vocabulary_makes_wide_shards(tmp_path):
    class Wide(BytesTokenizer):
        vocabulary = 65537

        def byte_lengths(self):
            return np.ones(self.vocabulary, np.int32)

        def _encode(self, texts):
            return [np.array([65536], np.uint32) for _ in texts]

    path, _ = corpus(tmp_path, 1)
    prepare([str(path)], tmp_path / "out", Wide(), val_every=0, workers=1)
    assert Shard.read(tmp_path / "out" / "train-000000.bin").map().tolist() == [65536, 0]


def test_long_documents_are_whole(tmp_path, monkeypatch):
    """They are tokenized in pieces, but go to one side and end once."""
    monkeypatch.setattr(sources, "_PIECE", 50)
    monkeypatch.setattr(module, "_BATCH", 120)
    path, texts = corpus(tmp_path, 30)
    prepare([str(path)], tmp_path / "out", "bytes", val_every=3, workers=1)
    assert documents(tmp_path / "out", "val") == texts[2::3]
    assert sorted(documents(tmp_path / "out", "train") + texts[2::3]) == sorted(texts)


def test_progress(tmp_path):
    path, _ = corpus(tmp_path, 300)
    seen = []
    summary = prepare([str(path)], tmp_path / "out", "bytes", part_bytes=4096, workers=1, progress=seen.append)
    total = summary.train + summary.val
    assert (seen[0].parts_done, seen[0].tokens) == (0, 0)
    assert (seen[-1].parts_done, seen[-1].tokens, seen[-1].bytes) == (seen[-1].parts, total.tokens, total.bytes)
    assert len({p.parts_done for p in seen}) == seen[-1].parts + 1 > 4
    for before, after in pairwise(seen):
        assert before.parts_done <= after.parts_done
        assert before.tokens <= after.tokens
        assert before.seconds <= after.seconds


def test_a_finished_folder_is_left_alone(tmp_path, monkeypatch):
    path, _ = corpus(tmp_path, 50)
    first = prepare([str(path)], tmp_path / "out", "bytes", workers=1)
    before = contents(tmp_path / "out")
    monkeypatch.setattr(module, "_tokenize", None)
    assert prepare([str(path)], tmp_path / "out", "bytes", workers=1) == first
    assert contents(tmp_path / "out") == before


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("trained", [None, 300])
def test_it_goes_on_where_it_was(tmp_path, trained, monkeypatch):
    if trained:
        pytest.importorskip("tokenizers")
    path, _ = corpus(tmp_path, 300)
    chosen = {"tokenizer": "bytes", "train_tokenizer": trained, "part_bytes": 2048, "workers": 1}

    def interrupt(progress):
        if progress.parts_done == 3:
            raise Interrupted

    out = tmp_path / "out"
    with pytest.raises(Interrupted):
        prepare([str(path)], out, progress=interrupt, **chosen)
    assert read_meta(out) is None
    assert not list(out.rglob("*.tmp"))
    (out / ".train-000005.bin.123.tmp").write_bytes(b"left by a killed process")
    done = {name: (out / name).stat().st_mtime_ns for name in os.listdir(out) if name.startswith("train")}
    assert len(done) == 3
    seen = []
    with monkeypatch.context() as patch:
        patch.setattr(module, "train", None)  # the tokenizer stands
        prepare([str(path)], out, progress=seen.append, **chosen)
    assert seen[0].parts_done == 3
    assert seen[0].tokens > 0
    assert all((out / name).stat().st_mtime_ns == before for name, before in done.items())
    prepare([str(path)], tmp_path / "at once", **chosen)
    assert contents(out) == contents(tmp_path / "at once")


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"val_every": 7}, "val_every was 200, is 7"),
        ({"separator": "---"}, "separator was '<|endoftext|>', is '---'"),
        ({"part_bytes": 5000}, "part_bytes was 2048, is 5000"),
        ({"limit_tokens": 9}, "limit_tokens was None, is 9"),
        ({"text_key": "content"}, "text_key was 'text', is 'content'"),
        ({"inputs": "other.txt"}, "inputs was"),
        ({"tokenizer": "trained"}, "tokenizer was"),
    ],
)
def test_other_settings_are_refused(tmp_path, change, message, finished):
    corpus(tmp_path, 300)
    corpus(tmp_path, 299, "other.txt")
    chosen = {"inputs": "corpus.txt", "tokenizer": "bytes", "part_bytes": 2048}
    if change == {"tokenizer": "trained"}:
        pytest.importorskip("tokenizers")
        change = {"tokenizer": train_tokenizer([], 257)}

    def run(inputs, progress=None, **more):
        prepare([str(tmp_path / inputs)], tmp_path / "out", workers=1, progress=progress, **more)

    def interrupt(progress):
        if progress.parts_done == 1 and not finished:
            raise Interrupted

    try:
        run(**chosen, progress=interrupt)
    except Interrupted:
        assert not finished
    before = contents(tmp_path / "out")
    with pytest.raises(UserError, match="was prepared with other settings") as caught:
        run(**(chosen | change))
    assert message in str(caught.value)
    assert contents(tmp_path / "out") == before


def test_a_folder_with_the_tokens_of_others_is_refused(tmp_path):
    path, _ = corpus(tmp_path, 3)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "train.bin").write_bytes(b"ab")
    with pytest.raises(UserError, match=r"has train\.bin, which is not the work of prepare"):
        prepare([str(path)], tmp_path / "out", "bytes", workers=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"val_every": 1}, "val_every is 1; it must be 0"),
        ({"val_every": -1}, "val_every is -1"),
        ({"workers": 0}, "workers is 0; it must be at least 1"),
        ({"part_bytes": 5}, "part_bytes is 5; it must be at least 1024"),
        ({"limit_tokens": 0}, "limit_tokens is 0"),
        ({"tokenizer": "nothing"}, "tokenizer 'nothing' is neither"),
        ({"train_tokenizer": 9}, "9 is too small"),
        ({"train_tokenizer": 9999}, "too small for a vocabulary of 9999"),
        ({"inputs": ["nowhere.txt"]}, "nowhere.txt does not exist"),
        ({"inputs": ["empty.txt"]}, "the inputs are empty"),
        ({"inputs": ["blank.txt"]}, "the inputs are empty"),
    ],
)
def test_wrong_settings_are_named(tmp_path, monkeypatch, change, message):
    if "train_tokenizer" in change:
        pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)
    corpus(tmp_path, 3)
    Path("empty.txt").touch()
    Path("blank.txt").write_text("\n \n")
    with pytest.raises(UserError, match=message) as caught:
        prepare(**{"inputs": ["corpus.txt"], "out": Path("out"), "tokenizer": "bytes", "workers": 1, **change})
    assert "\n" not in str(caught.value)
    assert read_meta(Path("out")) is None
    prepare(["corpus.txt"], Path("out"), "bytes", workers=1)  # and nothing stands in the way of doing it right


def test_no_input_is_fineweb(tmp_path, monkeypatch):
    asked = []

    def cut(inputs, *args):
        asked.extend(inputs)
        raise UserError("no network")

    monkeypatch.setattr(module, "cut", cut)
    with pytest.raises(UserError):
        prepare([], tmp_path, "bytes")
    assert asked == ["hf:HuggingFaceFW/fineweb:sample-10BT"]


@pytest.mark.parametrize(
    ("number", "message"),
    [(errno.ENOSPC, "the disk is full; free some space"), (errno.EROFS, "cannot be written: Read-only")],
)
def test_a_disk_that_takes_nothing(tmp_path, monkeypatch, number, message):
    path, _ = corpus(tmp_path, 300)
    real = os.fsync
    calls = []

    def fsync(descriptor):
        calls.append(descriptor)
        if len(calls) == 20:
            raise OSError(number, os.strerror(number))
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(UserError, match=message):
            prepare([str(path)], tmp_path / "out", "bytes", part_bytes=2048, workers=1)
    assert not list((tmp_path / "out").rglob("*.tmp"))
    prepare([str(path)], tmp_path / "out", "bytes", part_bytes=2048, workers=1)
    prepare([str(path)], tmp_path / "at once", "bytes", part_bytes=2048, workers=1)
    assert contents(tmp_path / "out") == contents(tmp_path / "at once")


def test_a_folder_that_cannot_be_made(tmp_path):
    path, _ = corpus(tmp_path, 3)
    with pytest.raises(UserError, match="cannot be written: Not a directory"):
        prepare([str(path)], path / "out", "bytes", workers=1)


@pytest.mark.parametrize("text", ["{", '{"format": 2}', "[]"])
def test_a_broken_meta_file_is_named(tmp_path, text):
    (tmp_path / "meta.json").write_text(text)
    with pytest.raises(UserError, match=r"meta\.json is (broken|not of format 1)"):
        read_meta(tmp_path)


def test_two_workers_make_the_same(tmp_path):
    """And what goes wrong in one of them is said here, as it is, and leaves nothing half done."""
    path, _ = corpus(tmp_path, 400)
    seen = []
    for workers in (1, 2):
        out = tmp_path / str(workers)
        summary = prepare([str(path)], out, "bytes", part_bytes=2048, workers=workers, progress=seen.append)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    assert seen[-1].parts_done == seen[-1].parts
    assert seen[-1].tokens == (summary.train + summary.val).tokens
    path.write_bytes(path.read_bytes() + b"\xff")
    with pytest.raises(UserError, match=f"not UTF-8 at byte {path.stat().st_size - 1}"):
        prepare([str(path)], tmp_path / "out", "bytes", part_bytes=2048, workers=2)
    assert not list((tmp_path / "out").rglob("*.tmp"))


SCRIPT = """
import sys
from pathlib import Path
from anytime.train.prepare import prepare
prepare([sys.argv[1]], Path(sys.argv[2]), "bytes", part_bytes=1024, val_every=5, workers=int(sys.argv[3]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_at_any_moment(tmp_path, workers):
    """Killed again and again, soon after some more parts are done, and in the end as if nothing had been."""
    path, _ = corpus(tmp_path, 3000)
    out = tmp_path / "out"
    command = [sys.executable, "-c", SCRIPT, str(path), str(out), str(workers)]
    random = np.random.default_rng(workers)
    killed_halfway = 0
    for goal in (1, 30, 90):
        process = subprocess.Popen(command)
        while len(list(out.glob("parts/0*.json"))) < goal and process.poll() is None:
            time.sleep(0.001)
        time.sleep(random.uniform(0, 0.02))
        process.send_signal(signal.SIGKILL)
        process.wait()
        killed_halfway += read_meta(out) is None
        for shard in out.glob("*.bin"):
            Shard.read(shard)  # whole, each of them
    assert killed_halfway == 3
    subprocess.run(command, check=True)
    prepare([str(path)], tmp_path / "at once", "bytes", part_bytes=1024, val_every=5, workers=1)
    assert contents(out) == contents(tmp_path / "at once")


def test_a_script_that_its_workers_would_run_anew_is_told(tmp_path):
    path, _ = corpus(tmp_path, 300)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(path), str(tmp_path / "out"), "2"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode
    [told] = [line for line in found.stderr.splitlines() if "UserError: a worker died" in line]
    assert "if __name__ == '__main__':" in told


def test_inputs_that_were_mended_go_into_the_same_folder(tmp_path):
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "some words"}\n{"txt": "a mistake"}\n')
    with pytest.raises(UserError, match="there is no 'text'"):
        prepare([str(source)], tmp_path / "out", "bytes", val_every=0, workers=1)
    source.write_text('{"text": "some words"}\n{"text": "mended"}\n')
    made = prepare([str(source)], tmp_path / "out", "bytes", val_every=0, workers=1)
    assert made.train.documents == 2


def test_a_shard_without_its_record_is_no_obstacle(tmp_path):
    """As a kill between the two leaves it; the inputs may even be mended before the next try."""
    source, folder = tmp_path / "a.jsonl", tmp_path / "out"
    source.write_text('{"txt": "a mistake"}\n')
    with pytest.raises(UserError, match="there is no 'text'"):
        prepare([str(source)], folder, "bytes", val_every=0, workers=1)
    (folder / "train-000000.bin").write_bytes(b"of another try")
    source.write_text('{"text": "mended, and longer"}\n')
    made = prepare([str(source)], folder, "bytes", val_every=0, workers=1)
    assert (made.train.documents, made.train.bytes) == (1, len("mended, and longer"))
    assert len(Tokens.open(str(folder), "train")) == made.train.tokens
