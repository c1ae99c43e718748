"""The loss on validation tokens against a plain loop."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from anytime.train.errors import UserError
from anytime.train.evaluate import Evaluation, autocast, evaluate
from anytime.train.model import GPT, ModelConfig
from anytime.train.shards import Tokens, write_shard
from anytime.train.tokenizer import BytesTokenizer, Tokenizer

CONTEXT = 16
MODEL = ModelConfig(vocabulary=256, layers=1, width=32, head=16, context=CONTEXT)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> GPT:
    model = GPT(MODEL).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.empty(p.shape).normal_(std=0.2, generator=generator))
    return model


def tokens_of(tmp_path, count: int) -> tuple[Tokens, np.ndarray]:
    ids = np.random.default_rng(0).integers(0, 256, count).astype(np.uint16)
    ids[::7] = 0  # ends of documents, which stand for no byte
    half = count // 2
    write_shard(tmp_path / "val-0.bin", ids[:half])
    write_shard(tmp_path / "val-1.bin", ids[half:])
    return Tokens.open(tmp_path, "val"), ids


def by_hand(model: GPT, ids: np.ndarray, windows: int) -> tuple[float, int]:
    """Mean loss of each target's own cross-entropy, and the bytes of the targets."""
    losses, targets = [], []
    for i in range(windows):
        part = torch.from_numpy(ids[i * CONTEXT : (i + 1) * CONTEXT + 1].astype(np.int64))
        with torch.no_grad():
            logits = model(part[None, :-1])[0]
        losses += F.cross_entropy(logits, part[1:], reduction="none").tolist()
        targets += part[1:].tolist()
    assert len(losses) == windows * CONTEXT
    return sum(losses) / len(losses), sum(t != 0 for t in targets)


def run(model, tokens, count: int, at_once: int, **more) -> Evaluation:
    more = {"context": CONTEXT, "vocabulary": 256, "device": CPU, **more}
    return evaluate(model, tokens, count=count, at_once=at_once, **more)


def test_against_a_plain_loop(tmp_path, model):
    tokens, ids = tokens_of(tmp_path, 1000)
    found = run(model, tokens, 8 * CONTEXT, 2, tokenizer=BytesTokenizer())
    loss, size = by_hand(model, ids, 8)
    assert found.loss == pytest.approx(loss, rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(loss), rel=1e-6)
    assert found.bits_per_byte == pytest.approx(loss * 8 * CONTEXT / math.log(2) / size, rel=1e-6)
    assert found.tokens == 8 * CONTEXT
    assert size < 8 * CONTEXT


class Long(Tokenizer):
    """Ids below 200, of as many bytes as their number has digits."""

    kind = "long"
    vocabulary = 200
    end = None

    def _encode(self, texts):
        raise NotImplementedError

    def decode(self, ids):
        raise NotImplementedError

    def byte_lengths(self):
        return np.array([len(str(i)) for i in range(200)], np.int32)

    def _files(self):
        return {}


def test_bits_of_tokens_of_several_bytes(tmp_path, model):
    ids = np.random.default_rng(0).integers(0, 200, 100).astype(np.uint16)
    write_shard(tmp_path / "val.bin", ids)
    found = run(model, Tokens.open(tmp_path, "val"), 64, 4, tokenizer=Long())
    loss, _ = by_hand(model, ids, 4)
    size = sum(len(str(i)) for i in ids[1:65])
    assert found.bits_per_byte == pytest.approx(loss * 64 / math.log(2) / size, rel=1e-6)


@pytest.mark.parametrize("at_once", [1, 2, 3, 4, 5, 7, 12, 50])
def test_it_does_not_depend_on_how_many_at_once(tmp_path, model, at_once):
    """Not the mean, and not what it is of: 12 windows are 12 windows."""
    tokens, _ = tokens_of(tmp_path, 1000)
    one = run(model, tokens, 12 * CONTEXT, 1, tokenizer=BytesTokenizer())
    found = run(model, tokens, 12 * CONTEXT, at_once, tokenizer=BytesTokenizer())
    assert found.tokens == one.tokens == 12 * CONTEXT
    assert found.loss == pytest.approx(one.loss, rel=1e-6)
    assert found.bits_per_byte == pytest.approx(one.bits_per_byte, rel=1e-6)


@pytest.mark.parametrize(("there", "windows"), [(17, 1), (32, 1), (33, 2), (100, 6)])
def test_a_short_validation_set_is_used_as_far_as_it_goes(tmp_path, model, there, windows):
    tokens, ids = tokens_of(tmp_path, there)
    found = run(model, tokens, 1 << 20, 1)
    assert found.tokens == windows * CONTEXT
    assert found.loss == pytest.approx(by_hand(model, ids, windows)[0], rel=1e-6)


def test_fewer_windows_than_at_once(tmp_path, model):
    tokens, ids = tokens_of(tmp_path, 50)
    found = run(model, tokens, 1 << 20, 512)
    assert found.tokens == 3 * CONTEXT
    assert found.loss == pytest.approx(by_hand(model, ids, 3)[0], rel=1e-6)


@pytest.mark.parametrize(("count", "windows"), [(1, 1), (CONTEXT, 1), (2 * CONTEXT - 1, 1), (2 * CONTEXT, 2)])
def test_the_count_is_rounded_down_to_windows_but_one_at_least(tmp_path, model, count, windows):
    tokens, _ = tokens_of(tmp_path, 200)
    assert run(model, tokens, count, 1).tokens == windows * CONTEXT


def test_too_few_tokens_for_one_window(tmp_path, model):
    tokens, _ = tokens_of(tmp_path, CONTEXT)
    with pytest.raises(UserError, match="too few for one window of context 16"):
        run(model, tokens, 100, 1)


def test_an_id_outside_the_vocabulary(tmp_path, model):
    tokens, ids = tokens_of(tmp_path, 100)
    assert ids[:33].max() >= 200
    with pytest.raises(UserError, match="but the vocabulary is 200"):
        run(model, tokens, 32, 1, vocabulary=200)


def test_bits_are_left_out_without_a_tokenizer(tmp_path, model):
    tokens, _ = tokens_of(tmp_path, 100)
    found = run(model, tokens, 32, 1)
    assert found.bits_per_byte is None
    assert found.row() == {"loss": found.loss, "perplexity": found.perplexity}


def test_bits_are_left_out_where_no_token_stands_for_a_byte(tmp_path, model):
    write_shard(tmp_path / "val.bin", np.zeros(40, np.uint16))
    assert run(model, Tokens.open(tmp_path, "val"), 32, 1, tokenizer=BytesTokenizer()).bits_per_byte is None


def test_the_row_of_an_evaluation():
    assert Evaluation(1.0, 2.0, 3.0, 4).row() == {"loss": 1.0, "perplexity": 2.0, "bits_per_byte": 3.0}


def test_a_loss_beyond_all_bounds_is_no_error(tmp_path):
    tokens, _ = tokens_of(tmp_path, 100)
    found = run(lambda i, t: torch.tensor(5000.0), tokens, 32, 1)
    assert found.loss == 5000
    assert math.isfinite(found.perplexity)


def test_no_gradients_are_kept(tmp_path, model):
    tokens, _ = tokens_of(tmp_path, 100)
    seen = []

    def loss(inputs, targets):
        seen.append(torch.is_grad_enabled())
        return model(inputs, targets)

    run(loss, tokens, 32, 1)
    assert seen == [False, False]


@pytest.mark.parametrize(
    ("device", "precision", "narrow"),
    [("cpu", "auto", False), ("cpu", "float32", False), ("cpu", "bfloat16", True)],
)
def test_precision(device, precision, narrow):
    with autocast(torch.device(device), precision):
        assert torch.is_autocast_enabled(device) == narrow
        assert not narrow or torch.get_autocast_dtype(device) == torch.bfloat16
    assert not torch.is_autocast_enabled(device)


def test_the_precision_reaches_the_model(tmp_path):
    tokens, _ = tokens_of(tmp_path, 100)
    model = GPT(MODEL)
    model.initialize(0)
    exact, narrow = (run(model, tokens, 32, 2, precision=p) for p in ("float32", "bfloat16"))
    assert exact.loss != narrow.loss
    assert exact.loss == pytest.approx(narrow.loss, abs=0.05)
