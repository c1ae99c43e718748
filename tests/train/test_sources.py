"""Documents out of files: every kind of file, where they are cut, and what is refused."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anytime.train import sources
from anytime.train.errors import UserError
from anytime.train.sources import batched, cut, pieces

END = "<|endoftext|>"


def documents(inputs: list[str], near: int = 1 << 20, key: str = "text", separator: str = END) -> list[str]:
    """All documents of the inputs, put together from their pieces."""
    found, held = [], ""
    for part in cut(inputs, [], near, separator):
        for item in part.slices:
            for piece in pieces(item, key, separator):
                held += piece.text
                if piece.ends:
                    found.append(held)
                    held = ""
    assert not held
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one document\n", ["one document\n"]),
        (f"a\n{END}\nb\nc\n{END}\n", ["a", "b\nc"]),
        (f"{END}\na\n\n{END}\n{END}\n \n{END}\nb", ["a\n", "b"]),
        (f"a\r\n{END}\r\nb\r\n", ["a", "b\r\n"]),
        (f"a {END}\n{END} b\n", [f"a {END}\n{END} b\n"]),
        ("\ufeffa\n", ["a\n"]),
        ("", []),
        (" \n\n", []),
    ],
)
def test_plain_text(tmp_path, text, expected):
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    assert documents([str(path)]) == expected


@given(
    texts=st.lists(st.text(st.sampled_from("aé日 \n"), max_size=300).map(lambda t: t + "x"), min_size=1, max_size=40),
    near=st.integers(16, 400),
)
def test_documents_do_not_depend_on_the_parts(tmp_path_factory, texts, near):
    """As long as none is longer than a part; JSON Lines in any case."""
    folder = tmp_path_factory.mktemp("cut")
    (folder / "a.txt").write_bytes(f"\n{END}\n".join(texts).encode())
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    longest = max(len(t.encode()) for t in texts) + len(END) + 2
    assert documents([str(folder / "a.txt")], max(near, longest)) == texts
    assert documents([str(folder / "a.jsonl")], near) == texts


@given(text=st.text(st.sampled_from("aé日𝄞 \n"), min_size=1, max_size=800), near=st.integers(8, 100))
def test_a_long_document_is_cut_but_nothing_is_lost(tmp_path_factory, text, near):
    path = tmp_path_factory.mktemp("long") / "a.txt"
    path.write_bytes(f"x{text}x".encode())
    parts = cut([str(path)], [], near, END)
    ends = [(item.begin, item.end) for part in parts for item in part.slices]
    assert ends[0][0] == 0
    assert ends[-1][1] == path.stat().st_size
    assert all(a[1] == b[0] for a, b in pairwise(ends))
    assert "".join(documents([str(path)], near)).split() == f"x{text}x".split()
    assert all(b - a <= 2 * near + 3 for a, b in ends)


@pytest.mark.parametrize("line", ["é" * 30, "some words\n", "a\n\n", "\r\n", f" {END}x\n"])
def test_a_long_document_comes_in_pieces(tmp_path, monkeypatch, line):
    """Some at a time, whatever its lines; together they are the document."""
    monkeypatch.setattr(sources, "_PIECE", 101)
    text = "a" + line * 100 + "b"
    path = tmp_path / "a.txt"
    path.write_bytes(f"{text}\n{END}\n{text}".encode())
    (part,) = cut([str(path)], [], 1 << 20, END)
    found = list(pieces(part.slices[0], "text", END))
    assert max(len(piece.text.encode()) for piece in found) < 5 * 101
    assert documents([str(path)]) == [text, text]


def test_pieces_are_cut_where_no_token_is(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_PIECE", 12)
    path = tmp_path / "a.txt"
    path.write_text("0123456789\n\n  indented\nnext line\nlast")
    (part,) = cut([str(path)], [], 1 << 20, END)
    assert [piece.text for piece in pieces(part.slices[0], "text", END)] == [
        "0123456789\n\n  indented\n",
        "next line\nlast",
    ]


@pytest.mark.parametrize(("suffix", "compress"), [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)])
def test_compressed_files(tmp_path, suffix, compress):
    (tmp_path / f"a.txt.{suffix}").write_bytes(compress(f"a\n{END}\nb".encode()))
    (tmp_path / f"b.jsonl.{suffix}").write_bytes(compress(b'{"text": "c"}\n{"text": "d"}\n'))
    assert documents([str(tmp_path)], near=16) == ["a", "b", "c", "d"]


def test_zstandard(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    with pyarrow.output_stream(str(tmp_path / "a.txt.zst"), compression="zstd") as stream:
        stream.write(f"a\n{END}\nb".encode())
    assert documents([str(tmp_path)]) == ["a", "b"]


def test_json_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "é\\n", "id": 1}\n\n{"text": ""}\n{"text": null}\n{"text": "b"}')
    assert documents([str(path)]) == ["é\n", "b"]


def parquet(path: Path, texts: list[str | None], rows: int = 2, name: str = "text") -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({name: texts, "id": list(range(len(texts)))})
    pytest.importorskip("pyarrow.parquet").write_table(table, path, row_group_size=rows)


def test_parquet(tmp_path):
    texts = [f"document {i} " * 20 for i in range(9)]
    parquet(tmp_path / "a.parquet", [*texts, None, ""])
    parts = cut([str(tmp_path)], [], 500, END)
    assert len(parts) > 1
    assert documents([str(tmp_path)], near=500) == documents([str(tmp_path)]) == texts


def test_a_dataset_in_a_folder(tmp_path):
    pytest.importorskip("datasets")
    for i in range(3):
        parquet(tmp_path / f"train-{i}.parquet", [f"{i}a", f"{i}b"])
    parts = cut([f"hf:{tmp_path}"], [], 1 << 20, END)
    assert len(parts) == 3  # a part a file
    assert documents([f"hf:{tmp_path}"]) == ["0a", "0b", "1a", "1b", "2a", "2b"]
    with pytest.raises(UserError, match="no 'content'; choose the text key among: text, id"):
        documents([f"hf:{tmp_path}"], key="content")


def test_folders_and_globs(tmp_path):
    for name in ("b/2.md", "b/1.py", "a.txt", "c.png", ".git/config.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert documents([str(tmp_path)]) == ["a.txt", "b/1.py", "b/2.md"]
    assert documents([str(tmp_path / "b" / "*")]) == ["b/1.py", "b/2.md"]
    assert documents([str(tmp_path / "c.png"), str(tmp_path / "b")]) == ["c.png", "b/1.py", "b/2.md"]


def test_small_files_are_put_together(tmp_path):
    for i in range(100):
        (tmp_path / f"{i:03d}.txt").write_text("x" * 30)
    parts = cut([str(tmp_path)], [], 300, END)
    assert [len(part.slices) for part in parts] == [10] * 10
    assert [part.index for part in parts] == list(range(10))


def test_validation_inputs_are_parts_of_their_own(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name)
    parts = cut([str(tmp_path / "a.txt")], [str(tmp_path / "b.txt")], 1 << 20, END, limit=7)
    assert [(p.index, p.validation, p.limit, Path(p.slices[0].path).name) for p in parts] == [
        (0, False, 7, "a.txt"),
        (1, True, None, "b.txt"),
    ]


@given(limit=st.integers(1, 10**12), sizes=st.lists(st.integers(1, 500), min_size=1, max_size=9))
def test_the_limit_is_shared_by_size(tmp_path_factory, limit, sizes):
    folder = tmp_path_factory.mktemp("limit")
    for i, size in enumerate(sizes):
        (folder / f"{i}.txt").write_text("x" * size)
    parts = cut([str(folder)], [], 250, END, limit)
    assert sum(part.limit for part in parts) == limit
    for part in parts:
        share = limit * sum(item.size for item in part.slices) / sum(sizes)
        assert abs(part.limit - share) <= 1 + 1e-9 * limit


def test_batched():
    found = [sources.Piece("x" * n) for n in (1, 2, 5, 1, 1)]
    assert [[len(p.text) for p in batch] for batch in batched(found, 3)] == [[1, 2], [5], [1, 1]]
    assert list(batched([], 3)) == []


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"abc\n\xffdef", r"a\.txt is not UTF-8 at byte 4; convert it"),
        ("a.txt", b"abc\xe9", r"not UTF-8 at byte 3"),
        ("a.txt", b"\xef\xbb\xbfab\xff", r"not UTF-8 at byte 5"),
        ("a.txt", f"é\n{END}\né\n".encode() + b"\x80", r"not UTF-8 at byte 20"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"not UTF-8 at byte 24"),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": "b"\n', r"a\.jsonl line 3: broken JSON \(.* at column"),
        ("a.json", b"[\n1]\n", r"a\.json line 1: a list begins here; write one object a line"),
        (
            "a.jsonl",
            b'{"text": "a", "n": ' + b"1" * 5000 + b"}\n",
            r"line 1: JSON that cannot be read \(Exceeds the limit",
        ),
        (
            "a.jsonl",
            b'{"text": "a"}\n' + b"[" * 100_000 + b"\n",
            r"line 2: JSON that cannot be read \(maximum recursion",
        ),
        ("a.txt", "hello\n".encode("utf-16"), r"it is UTF-16: convert it \(iconv -f utf-16"),
        ("a.txt", b"PK\x03\x04\xff", r"it is a zip archive: unpack it"),
        ("a.jsonl", b'{"text": "a"}\n["b"]\n', r"line 2: an object with the key 'text' is wanted, not list"),
        ("a.jsonl", b'{"content": "a", "id": 3}\n', r"line 1: there is no 'text'; .* among: content, id"),
        ("a.jsonl", b'{"text": 3}\n', r"line 1: 'text' is int, not text"),
        ("a.txt.gz", gzip.compress(b"abc" * 1000, mtime=0)[:-12], r"a\.txt\.gz is damaged"),
        ("a.txt.gz", b"not gzip", r"a\.txt\.gz cannot be read"),
        ("a.txt.xz", b"not xz", r"a\.txt\.xz is damaged"),
        ("a.parquet", b"not parquet", r"a\.parquet is not a Parquet file"),
        ("a.png", None, r"a\.png does not exist"),
    ],
)
def test_wrong_files_are_named(tmp_path, name, data, message):
    path = tmp_path / name
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(UserError, match=message) as caught:
        documents([str(path)])
    assert "\n" not in str(caught.value)


def test_the_offset_is_right_in_a_later_part_and_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_PIECE", 64)
    path = tmp_path / "a.txt"
    path.write_bytes("é line\n".encode() * 1000 + b"\xff")
    with pytest.raises(UserError, match="not UTF-8 at byte 8000"):
        documents([str(path)], near=3000)
    path.write_bytes(("a" + "é" * 4000).encode() + b"\xff")  # pieces end within a character
    with pytest.raises(UserError, match="not UTF-8 at byte 8001"):
        documents([str(path)])


def test_a_binary_file_ends(tmp_path):
    """Bytes that could all be the middle of a character have no place to be cut at."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"\x80" * 5000)
    with pytest.raises(UserError, match="not UTF-8 at byte 0"):
        documents([str(path)], near=1024)


def test_folders_without_text_are_named(tmp_path):
    with pytest.raises(UserError, match="it has: no files"):
        documents([str(tmp_path)])
    (tmp_path / "a.png").write_text("a")
    with pytest.raises(UserError, match=r"it has: a\.png"):
        documents([str(tmp_path)])


def test_a_parquet_file_without_the_key(tmp_path):
    parquet(tmp_path / "a.parquet", ["a"], name="content")
    with pytest.raises(UserError, match=r"a\.parquet: there is no 'text'; choose the text key among: content, id"):
        documents([str(tmp_path)])


@pytest.mark.parametrize("error", [ConnectionError("Couldn't reach\nthe Hub"), ValueError("Bad split: train")])
def test_a_dataset_out_of_reach(monkeypatch, error):
    datasets = pytest.importorskip("datasets")

    def fail(*args, **kw):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(
        UserError, match=r"hf:some/name:config cannot be read .*check its name and the network"
    ) as caught:
        documents(["hf:some/name:config"])
    assert "\n" not in str(caught.value)
