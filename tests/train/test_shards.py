"""Token files: their bytes, reading many as one, and what is refused."""

from __future__ import annotations

import os
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anytime.train.errors import UserError
from anytime.train.shards import Shard, ShardWriter, Tokens, write_shard


def header(magic: int, version: int, count: int) -> bytes:
    return struct.pack("<3i", magic, version, count).ljust(1024, b"\0")


def test_the_bytes_are_those_of_modded_nanogpt_and_llm_c(tmp_path):
    write_shard(tmp_path / "a.bin", np.array([1, 2, 65535]))
    assert (tmp_path / "a.bin").read_bytes() == header(20240520, 1, 3) + struct.pack("<3H", 1, 2, 65535)
    write_shard(tmp_path / "b.bin", np.array([1, 65536]), wide=True)
    assert (tmp_path / "b.bin").read_bytes() == header(20240801, 7, 2) + struct.pack("<2I", 1, 65536)
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "b.bin"]  # nothing temporary stays


def test_all_three_layouts_are_read_as_one(tmp_path):
    write_shard(tmp_path / "1.bin", np.array([1, 2]))
    write_shard(tmp_path / "2.bin", np.array([70000]), wide=True)
    (tmp_path / "3.bin").write_bytes(struct.pack("<3H", 7, 8, 9))
    tokens = Tokens.open(str(tmp_path / "*.bin"), "train")
    assert len(tokens) == 6
    window = tokens.gather(np.array([0]), 6)
    assert window.dtype == np.int32
    assert window.tolist() == [[1, 2, 70000, 7, 8, 9]]
    assert tokens.files == [tmp_path / f"{i}.bin" for i in (1, 2, 3)]


@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    length=st.integers(0, 12),
    data=st.data(),
)
def test_gather_is_slicing_of_the_concatenation(tmp_path_factory, counts, length, data):
    folder = tmp_path_factory.mktemp("shards")
    whole = np.arange(sum(counts)) * 7 % 65536
    for i, piece in enumerate(np.split(whole, np.cumsum(counts)[:-1])):
        write_shard(folder / f"train-{i}.bin", piece)
    tokens = Tokens.open(folder, "train")
    length = min(length, len(whole))
    starts = data.draw(st.lists(st.integers(0, len(whole) - length), max_size=6))
    expected = [whole[s : s + length].tolist() for s in starts]
    assert tokens.gather(np.array(starts, np.int64), length).tolist() == expected
    for index in range(len(whole)):
        path, offset = tokens.locate(index)
        assert Tokens.open(path, "train").gather(np.array([offset]), 1)[0, 0] == whole[index]


def test_a_fingerprint_is_of_the_tokens(tmp_path):
    for folder, second in (("one", 5), ("same", 5), ("other", 6)):
        (tmp_path / folder).mkdir()
        for i in range(2):
            write_shard(tmp_path / folder / f"train-{i}.bin", np.array([1, second]), wide=folder == "same")
    found = {name: Tokens.open(tmp_path / name, "train").fingerprint() for name in ("one", "same", "other")}
    assert found["one"] == found["same"] != found["other"]


@pytest.mark.parametrize(("start", "length"), [(-1, 1), (3, 1), (0, 4)])
def test_a_window_outside_is_an_error(tmp_path, start, length):
    write_shard(tmp_path / "a.bin", np.array([1, 2, 3]))
    tokens = Tokens.open(tmp_path / "a.bin", "train")
    with pytest.raises(IndexError):
        tokens.gather(np.array([start]), length)


def test_locate_outside_is_an_error(tmp_path):
    write_shard(tmp_path / "a.bin", np.array([1]))
    with pytest.raises(IndexError):
        Tokens.open(tmp_path / "a.bin", "train").locate(1)


def test_a_folder_gives_the_files_of_the_split(tmp_path):
    names = ["fineweb_val_000000.bin", "fineweb_train_000002.bin", "fineweb_train_000001.bin", "train.txt", "val.bin"]
    for name in names:
        write_shard(tmp_path / name, np.array([1]))
    found = {split: [p.name for p in Tokens.open(tmp_path, split).files] for split in ("train", "val")}
    assert found["train"] == ["fineweb_train_000001.bin", "fineweb_train_000002.bin"]
    assert found["val"] == ["fineweb_val_000000.bin", "val.bin"]


def test_a_list_keeps_its_order(tmp_path):
    for name in "ab":
        write_shard(tmp_path / f"{name}.bin", np.array([ord(name)]))
    tokens = Tokens.open([tmp_path / "b.bin", str(tmp_path / "a.bin")], "val")
    assert tokens.gather(np.array([0]), 2).tolist() == [[ord("b"), ord("a")]]


def test_more_shards_than_file_descriptors(tmp_path):
    """Maps are let go again: each holds a descriptor."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = 400
    for i in range(count):
        write_shard(tmp_path / f"train-{i:03d}.bin", np.array([i]))
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
    try:
        assert Tokens.open(tmp_path, "train").gather(np.array([0]), count).tolist() == [list(range(count))]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"abc", "3 bytes, an odd number"),
        (header(20240520, 2, 1) + b"ab", "version 2"),
        (header(20240801, 1, 1) + b"abcd", "version 1"),
        (header(20240520, 1, 3) + b"abcd", "says 3 tokens, the file has 2"),
        (header(20240520, 1, 2) + b"abc", "says 2 tokens, the file has 1.5"),
        (header(20240520, 1, 0), "holds no tokens"),
        (header(20240520, 1, 1)[:100], "says 1 tokens"),
    ],
)
def test_broken_files_are_named(tmp_path, data, message):
    path = tmp_path / "train.bin"
    path.write_bytes(data)
    with pytest.raises(UserError, match=message) as caught:
        Tokens.open(tmp_path, "train")
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere.*does not exist"):
        Tokens.open(tmp_path / "nowhere", "train")
    with pytest.raises(UserError, match="it has: nothing"):
        Tokens.open(tmp_path, "train")
    (tmp_path / "val.bin").write_bytes(b"ab")
    with pytest.raises(UserError, match=r"no train tokens.*val\.bin"):
        Tokens.open(tmp_path, "train")
    with pytest.raises(UserError, match="no train tokens were named"):
        Tokens.open([], "train")
    (tmp_path / "train.bin").mkdir()
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        Tokens.open(tmp_path, "train")


def test_a_file_that_shrank_since_is_an_error(tmp_path):
    path = tmp_path / "a.bin"
    write_shard(path, np.arange(10))
    tokens = Tokens.open(path, "train")
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(UserError, match="cannot be read"):
        tokens.gather(np.array([0]), 1)


@pytest.mark.parametrize("token", [-1, 65536])
def test_a_token_that_does_not_fit_is_not_written(tmp_path, token):
    with pytest.raises(ValueError, match="do not fit into uint16"):
        write_shard(tmp_path / "a.bin", np.array([5, token]))
    assert os.listdir(tmp_path) == []


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.bin"
    write_shard(path, np.array([1]))
    writer = ShardWriter(path)
    writer.append(np.array([2]))
    writer.discard()
    assert Tokens.open(path, "train").gather(np.array([0]), 1).tolist() == [[1]]
    assert os.listdir(tmp_path) == ["a.bin"]


def test_tokens_can_be_taken_back(tmp_path):
    writer = ShardWriter(tmp_path / "a.bin", wide=True)
    writer.append(np.arange(5))
    assert writer.take_back(2).tolist() == [3, 4]
    assert writer.take_back(0).tolist() == []
    writer.append(np.array([9]))
    with pytest.raises(ValueError, match="5 tokens of 4"):
        writer.take_back(5)
    writer.commit()
    assert Shard.read(tmp_path / "a.bin").map().tolist() == [0, 1, 2, 9]
