"""Tokenizers: there and back, what special tokens are, and what a folder carries."""

from __future__ import annotations

import base64
import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anytime.train import tokenizer as module
from anytime.train.errors import UserError
from anytime.train.tokenizer import (
    BytesTokenizer,
    JsonTokenizer,
    Tokenizer,
    open_tokenizer,
    require,
    train_tokenizer,
)

tiktoken = pytest.importorskip("tiktoken")
tokenizers = pytest.importorskip("tokenizers")

TEXT = "The quick brown fox doesn't jump over 12 lazy dogs; naïve café — 日本語.\n\n  def f(x):\n\treturn x\n"
END = "<|endoftext|>"


def ranks() -> dict[bytes, int]:
    """As many as GPT-2 has: the bytes, then 50,000 pairs of them; letters with a space before come first."""
    letters = [b" " + bytes([c]) for c in range(97, 123)]
    pairs = (bytes(pair) for pair in itertools.product(range(256), repeat=2))
    tokens = [bytes([i]) for i in range(256)] + letters
    tokens += itertools.islice((pair for pair in pairs if pair not in letters), 50256 - len(tokens))
    return {token: i for i, token in enumerate(tokens)}


@pytest.fixture(scope="module")
def rank_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks") / "some.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks().items()))
    return path


@pytest.fixture(scope="module")
def made(rank_file) -> dict[str, Tokenizer]:
    return {
        "bytes": open_tokenizer("bytes"),
        "gpt2": open_tokenizer(f"gpt2:{rank_file}"),
        "trained": train_tokenizer([TEXT] * 3, 300),
    }


@pytest.fixture(params=["bytes", "gpt2", "trained"])
def each(request, made) -> Tokenizer:
    return made[request.param]


def test_their_sizes(made):
    sizes = {name: (t.vocabulary, t.end) for name, t in made.items()}
    assert sizes == {"bytes": (256, 0), "gpt2": (50257, 50256), "trained": (300, 0)}


@pytest.mark.parametrize("name", ["bytes", "gpt2", "trained"])
@given(text=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_there_and_back(made, name, text):
    t = made[name]
    ids = t.encode(text)
    assert t.decode(ids) == text
    assert all(0 <= i < t.vocabulary for i in ids)
    assert t.byte_lengths()[ids].sum() == len(text.encode())
    assert t.end not in ids


def test_batches_are_the_same_as_single_texts(each):
    texts = [TEXT, "", "a", f"a{END}b"]
    assert each.encode_batch(texts) == [each.encode(text) for text in texts]
    assert [a.tolist() for a in each.encode_arrays(texts)] == each.encode_batch(texts)


def test_special_text_in_a_document_is_text(each):
    ids = each.encode(f"a{END}b")
    assert each.end not in ids
    assert each.decode(ids) == f"a{END}b"


def test_special_and_unknown_ids_stand_for_nothing(each):
    lengths = each.byte_lengths()
    assert lengths.shape == (each.vocabulary,)
    assert lengths.dtype == np.int32
    assert lengths[each.end] == 0
    assert (np.delete(lengths, each.end) > 0).all()
    assert each.decode([*each.encode("ab"), each.end, each.vocabulary, -1, *each.encode("c")]) == "abc"


def test_broken_utf8_is_replaced(each):
    ids = each.encode("é")
    first = ids if len(ids) > 1 else each.encode("日")
    assert "\ufffd" in each.decode(first[:1])


def test_half_a_surrogate_pair_is_no_text(each):
    assert each.decode(each.encode("a\ud800b")) == "a?b"


def test_bytes_drop_nul():
    assert BytesTokenizer().encode("a\0b") == [97, 98]


def test_ranks_are_the_ids(made):
    assert made["gpt2"].encode(" a b") == [256, 257]


def test_the_pattern_is_that_of_gpt2(made):
    """tiktoken's possessive form against the one OpenAI published."""
    published = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    oracle = tiktoken.Encoding("oracle", pat_str=published, mergeable_ranks=ranks(), special_tokens={})

    @given(st.text(st.sampled_from("abcé12 \n\t.,'stdmrevl\u3000日")))
    def same(text):
        assert made["gpt2"].encode(text) == oracle.encode(text)

    same()
    assert made["gpt2"].encode(TEXT) == oracle.encode(TEXT)


def test_a_saved_one_comes_back(each, tmp_path):
    each.save(tmp_path)
    back = Tokenizer.load(tmp_path)
    assert type(back) is type(each)
    assert back.encode(TEXT) == each.encode(TEXT)
    assert (back.vocabulary, back.end, back.fingerprint) == (each.vocabulary, each.end, each.fingerprint)
    assert open_tokenizer(str(tmp_path)).fingerprint == each.fingerprint
    about = json.loads((tmp_path / "anytime_tokenizer.json").read_text())
    assert about == {"kind": each.kind, "vocabulary": each.vocabulary, "end": each.end}


def test_fingerprints_differ(made):
    other = train_tokenizer([TEXT] * 3, 299)
    assert len({t.fingerprint for t in (*made.values(), other)}) == 4


def test_a_lone_tokenizer_json_loads(made, tmp_path):
    made["trained"].save(tmp_path)
    (tmp_path / "anytime_tokenizer.json").unlink()
    for spec in (tmp_path, tmp_path / "tokenizer.json"):
        assert open_tokenizer(str(spec)).encode(TEXT) == made["trained"].encode(TEXT)


def test_the_json_of_others_is_bent_to_the_task():
    """Truncation, padding and tokens added around a text are for other uses."""
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "a": 1, "[SEP]": 2, "##b": 5}, "[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.add_special_tokens(["[SEP]"])
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="$A [SEP]", special_tokens=[("[SEP]", 2)])
    inner.enable_truncation(2)
    inner.enable_padding(length=8)
    t = JsonTokenizer(inner)
    assert t.encode("a a a a") == [1, 1, 1, 1]
    assert (t.vocabulary, t.end) == (6, 2)  # ids may have holes
    assert t.byte_lengths().tolist() == [5, 1, 0, 0, 0, 1]


def test_a_json_without_an_end():
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a"))
    assert JsonTokenizer(inner).end is None


def test_byte_fallback_lengths():
    vocabulary = {"<unk>": 0, "</s>": 1, "<0x0A>": 2, "▁the": 3, "é": 4}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    inner.add_special_tokens(["<unk>", "</s>"])
    t = JsonTokenizer(inner)
    assert t.byte_lengths().tolist() == [0, 0, 1, 4, 2]
    assert t.end == 1


def test_training_is_deterministic_and_of_the_size_asked(made):
    again = train_tokenizer(iter([TEXT] * 3), 300)
    assert again.fingerprint == made["trained"].fingerprint
    assert len(made["trained"].encode(TEXT)) < len(TEXT.encode())
    assert train_tokenizer([], 257).encode("a") == [65]


@pytest.mark.parametrize(("vocabulary", "message"), [(256, "the bytes and the end are 257"), (5000, "at most")])
def test_a_vocabulary_that_cannot_be_is_refused(vocabulary, message):
    with pytest.raises(UserError, match=message):
        train_tokenizer([TEXT], vocabulary)


def test_gpt2_by_its_name_is_tiktokens(monkeypatch, made):
    whole = tiktoken.Encoding("gpt2", pat_str="x", mergeable_ranks=ranks(), special_tokens={END: 50256})
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: {"gpt2": whole}[name])
    assert open_tokenizer("gpt2").fingerprint == made["gpt2"].fingerprint


def test_gpt2_without_a_network(monkeypatch):
    def fail(name):
        raise ConnectionError("HTTPSConnectionPool: Max retries exceeded\nand more")

    monkeypatch.setattr(tiktoken, "get_encoding", fail)
    with pytest.raises(UserError, match="gpt2:PATH") as caught:
        open_tokenizer("gpt2")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("gpt2:{}", b"QQ== 0\n", "has 1 ranks; GPT-2 has those from 0 to 50255"),
        ("gpt2:{}", b"no ranks here\n", "not a file of tiktoken ranks"),
        ("gpt2:{}", None, "cannot be read: No such file"),
        ("{}", b"{}", "is not a tokenizer.json"),
        ("{}", b"\xff\n", "is not a tokenizer.json"),
        ("{}", None, "is neither bytes, gpt2"),
    ],
)
def test_wrong_files_are_named(tmp_path, name, data, message):
    path = tmp_path / "file"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(UserError, match=message) as caught:
        open_tokenizer(name.format(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("about", "message"),
    [(None, "has no tokenizer"), ("{", "is broken"), ("[]", "is broken"), ('{"kind": "new"}', "unknown kind 'new'")],
)
def test_wrong_folders_are_named(tmp_path, about, message):
    if about is not None:
        (tmp_path / "anytime_tokenizer.json").write_text(about)
    with pytest.raises(UserError, match=message):
        open_tokenizer(str(tmp_path))


def test_a_missing_package_is_named(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(module.importlib, "import_module", missing)
    with pytest.raises(UserError, match=r'pyarrow: pip install "anytime-optim\[data\]"'):
        require("pyarrow.parquet")
    assert BytesTokenizer().encode("a") == [97]  # which needs none
