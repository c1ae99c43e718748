"""Trained models in use: loaded from a run, a checkpoint or an export; sampled, judged, exported."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from anytime.train import use
from anytime.train.checkpoint import read_resume
from anytime.train.config import Config, DataConfig, OptimizerConfig
from anytime.train.errors import UserError
from anytime.train.loop import train
from anytime.train.model import GPT, ModelConfig
from anytime.train.runs import read_lines
from anytime.train.shards import write_shard
from anytime.train.tokenizer import BytesTokenizer

MODEL = ModelConfig(vocabulary=256, layers=1, width=32, head=16, context=32)


def write_data(folder: Path) -> Path:
    """Short documents, several in a window."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    texts = [b"the number %d, then %d.\0" % tuple(rng.integers(0, 1000, 2)) for _ in range(200)]
    ids = np.frombuffer(b"".join(texts), np.uint8).astype(np.uint16)
    write_shard(folder / "train-000000.bin", ids[:2000])
    write_shard(folder / "val-000000.bin", ids[2000:2600])
    BytesTokenizer().save(folder)
    return folder


def settings(folder: Path, **more) -> Config:
    config = Config(
        model=MODEL,
        data=DataConfig(path=str(folder / "data")),
        optimizer=OptimizerConfig(lr=0.02, warmup_steps=2),
        run=str(folder / "run"),
        until="6 steps",
        batch_size=2,
        eval_at=(3,),
        eval_tokens=256,
        keep_at=(3,),
        threads=1,
    )
    return replace(config, **more)


@pytest.fixture(scope="module")
def origin(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("use")
    write_data(folder / "data")
    train(settings(folder))
    return folder


@pytest.fixture(scope="module")
def run(origin) -> Path:
    """Read only."""
    return origin / "run"


@pytest.fixture
def copy(origin, tmp_path) -> Path:
    """One to do harm to; its data are where they were."""
    return Path(shutil.copytree(origin / "run", tmp_path / "copy"))


def step_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def weights(trained: use.Trained) -> dict[str, torch.Tensor]:
    return trained.model.state_dict()


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


# --------------------------------------------------------------------- load


def average(folder: Path) -> dict[str, torch.Tensor]:
    """X from what a checkpoint keeps to go on: y − (1 − β) d."""
    tensors = read_resume(folder)
    groups = json.loads((folder / "state.json").read_text())["groups"]
    names = {i: n for g in groups for i, n in zip(g["params"], g["param_names"], strict=True)}
    found = {}
    for i, name in names.items():
        beta = tensors[f"optimizer/{i}/beta"].float()
        found[name] = tensors[f"weights/{name}"] - (1 - beta) * tensors[f"optimizer/{i}/d"]
    return found


def test_a_run_gives_its_newest_average(run):
    trained = use.load(run)
    assert trained.card["step"] == 6
    assert trained.folder == step_folder(run, 6)
    wanted = average(step_folder(run, 6))
    assert wanted.keys() == weights(trained).keys()
    for name, x in wanted.items():
        torch.testing.assert_close(weights(trained)[name], x, rtol=1e-6, atol=1e-7)
        assert not torch.equal(read_resume(step_folder(run, 6))[f"weights/{name}"], x)


def test_a_run_at_a_step_and_a_checkpoint_by_its_folder(run):
    at, folder = use.load(run, at=3), use.load(str(step_folder(run, 3)))
    assert at.card["step"] == folder.card["step"] == 3
    assert equal(weights(at), weights(folder))
    assert not equal(weights(at), weights(use.load(run)))


def test_a_loaded_model_is_to_be_used(run):
    trained = use.load(run, device="cpu")
    assert not trained.model.training
    assert not any(p.requires_grad for p in trained.model.parameters())
    assert trained.device == torch.device("cpu")
    assert isinstance(trained.tokenizer, BytesTokenizer)
    assert trained.model.config == MODEL
    assert trained.card["tokens"] == 6 * 2 * 32


def test_what_cannot_be_loaded(run, tmp_path):
    with pytest.raises(UserError, match=r"there is no run or model at .*nowhere"):
        use.load(tmp_path / "nowhere")
    with pytest.raises(UserError, match="has no checkpoint yet"):
        use.load(tmp_path)
    with pytest.raises(UserError, match="keeps no step 4; it keeps 3, 6"):
        use.load(run, at=4)
    with pytest.raises(UserError, match="is one model, it has no step to choose"):
        use.load(step_folder(run, 3), at=3)
    with pytest.raises(UserError, match="device is 'nonsense'"):
        use.load(run, device="nonsense")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "resume-00000-of-00001.safetensors"])
def test_a_damaged_checkpoint_is_not_used(copy, name):
    flip(step_folder(copy, 3) / name)
    with pytest.raises(UserError, match=f"damaged: {name} is not what was written"):
        use.load(copy, at=3)
    with pytest.raises(UserError, match="damaged"):
        use.load(step_folder(copy, 3))
    assert use.load(copy).card["step"] == 6


def test_a_run_whose_newest_is_damaged_gives_the_one_before(copy):
    flip(step_folder(copy, 6) / "model.safetensors")
    assert use.load(copy).card["step"] == 3
    flip(step_folder(copy, 3) / "model.safetensors")
    with pytest.raises(UserError, match="damaged") as found:
        use.load(copy)
    assert "the one before it is used" not in str(found.value)


# ------------------------------------------------------------------- sample


def test_samples_depend_on_the_seed_alone(run):
    once = use.sample(use.load(run), "the ", count=30, seed=5)
    torch.manual_seed(0)
    assert use.sample(use.load(run), "the ", count=30, seed=5) == once
    assert use.sample(use.load(run), "the ", count=30, seed=6) != once
    assert use.sample(use.load(run, at=3), "the ", count=30, seed=5) != once


def test_copies_are_several_texts(run):
    texts = use.sample(use.load(run), "the ", count=30, copies=4)
    assert len(texts) == 4
    assert len(set(texts)) > 1
    assert len(set(use.sample(use.load(run), "the ", count=30, copies=3, temperature=0))) == 1


def test_no_copies_are_a_word_not_a_traceback(run):
    with pytest.raises(UserError, match="copies"):
        use.sample(use.load(run), "the ", copies=0)


def fake(run: Path, rows: list[list[int]]) -> tuple[use.Trained, dict]:
    """A model that goes on as told, and what it was asked for."""
    trained, asked = use.load(run), {}

    def generate(tokens, count, **more):
        asked.update(more, tokens=tokens.tolist(), count=count)
        return torch.cat((tokens, torch.tensor(rows)), dim=1)

    trained.model.generate = generate
    return trained, asked


def test_a_text_ends_with_its_document_and_has_no_prompt(run):
    trained, asked = fake(run, [list(b"one\0two"), list(b"three\0\0"), list(b"sixsix\xc3")])
    found = use.sample(trained, "say: ", copies=3, count=7, temperature=0.3, top_k=9)
    assert found == ["one", "three", "sixsix\ufffd"]
    assert asked["tokens"] == [list(b"say: ")] * 3
    assert (asked["count"], asked["temperature"], asked["top_k"], asked["limit"]) == (7, 0.3, 9, 256)


def test_an_empty_prompt_begins_a_document(run):
    trained, asked = fake(run, [list(b"hi")])
    assert use.sample(trained, "") == ["hi"]
    assert asked["tokens"] == [[0]]


def test_ids_that_the_tokenizer_does_not_have_are_never_drawn(run):
    """A vocabulary is padded to a multiple of 64; here the padding is by far the likeliest."""
    model = GPT(replace(MODEL, vocabulary=320))
    model.initialize(0)
    with torch.no_grad():
        model.embedding.weight[256:] = 100 * model.embedding.weight[ord("a")]
    trained = replace(use.load(run), model=model)
    assert len(use.sample(trained, "a", count=20, temperature=0)[0].encode()) >= 20


def test_without_a_tokenizer(run, tmp_path):
    to = use.export(use.load(run), tmp_path / "out")
    (to / "anytime_tokenizer.json").unlink()
    trained = use.load(to)
    assert trained.tokenizer is None
    with pytest.raises(UserError, match="has no tokenizer"):
        use.sample(trained, "x")


# ----------------------------------------------------------------- evaluate


def row(run: Path, step: int) -> dict:
    (found,) = [r for r in read_lines(run / "metrics.jsonl") if r["kind"] == "eval" and r["step"] == step]
    return found


@pytest.mark.parametrize("step", [3, 6])
def test_the_runs_own_evaluation(run, step):
    found = use.evaluate_model(use.load(run, at=step), count=256)
    assert found.tokens == 256
    assert found.loss == pytest.approx(row(run, step)["loss"], rel=1e-6)
    assert found.perplexity == pytest.approx(row(run, step)["perplexity"], rel=1e-5)
    assert found.bits_per_byte == pytest.approx(row(run, step)["bits_per_byte"], rel=1e-6)


def test_the_runs_own_evaluation_within_documents(origin, tmp_path):
    config = settings(origin, run=str(tmp_path / "run"), data=DataConfig(path=str(origin / "data"), documents=True))
    train(config)
    found = use.evaluate_model(use.load(config.run), count=256)
    assert found.loss == pytest.approx(row(tmp_path / "run", 6)["loss"], rel=1e-6)


def test_an_exported_model_within_documents(origin, tmp_path):
    """What attention sees belongs to the model, so it goes with it."""
    config = settings(origin, run=str(tmp_path / "run"), data=DataConfig(path=str(origin / "data"), documents=True))
    train(config)
    to = use.export(use.load(config.run), tmp_path / "out")
    found = use.evaluate_model(use.load(to), str(origin / "data"), count=256)
    assert found.loss == pytest.approx(row(tmp_path / "run", 6)["loss"], rel=1e-6)


def test_a_checkpoint_knows_its_run(run, monkeypatch):
    wanted = row(run, 3)["loss"]
    assert use.evaluate_model(use.load(step_folder(run, 3)), count=256).loss == pytest.approx(wanted, rel=1e-6)
    monkeypatch.chdir(step_folder(run, 3))
    assert use.evaluate_model(use.load("."), count=256).loss == pytest.approx(wanted, rel=1e-6)


def test_other_data(run, origin, tmp_path):
    trained = use.load(run)
    wanted = row(run, 6)["loss"]
    by_folder = use.evaluate_model(trained, str(origin / "data"), count=256)
    by_file = use.evaluate_model(trained, str(origin / "data" / "val-000000.bin"), count=256)
    assert by_folder.loss == pytest.approx(wanted, rel=1e-6)
    assert by_file.loss == pytest.approx(wanted, rel=1e-6)
    assert by_file.bits_per_byte == pytest.approx(by_folder.bits_per_byte)  # by the model's own tokenizer
    other = use.evaluate_model(trained, str(origin / "data" / "train-000000.bin"), count=256)
    assert other.loss != pytest.approx(wanted, rel=1e-4)


def test_data_of_validation_tokens_alone(run, origin, tmp_path):
    (tmp_path / "val").mkdir()
    shutil.copy(origin / "data" / "val-000000.bin", tmp_path / "val")
    found = use.evaluate_model(use.load(run), str(tmp_path / "val"), count=256)
    assert found.loss == pytest.approx(row(run, 6)["loss"], rel=1e-6)


def test_data_that_cannot_judge(run, origin, tmp_path):
    trained = use.load(run)
    with pytest.raises(UserError, match="nowhere does not exist"):
        use.evaluate_model(trained, "nowhere")
    (tmp_path / "train").mkdir()
    shutil.copy(origin / "data" / "train-000000.bin", tmp_path / "train")
    with pytest.raises(UserError, match="has no val tokens"):
        use.evaluate_model(trained, str(tmp_path / "train"))
    write_shard(tmp_path / "wide.bin", np.full(100, 300, np.uint16))
    with pytest.raises(UserError, match=r"has token 300 .* vocabulary is 256"):
        use.evaluate_model(trained, str(tmp_path / "wide.bin"))


@pytest.mark.parametrize("at_once", [0, -1])
def test_no_windows_at_once(run, at_once):
    with pytest.raises(UserError, match=f"at_once is {at_once}"):
        use.evaluate_model(use.load(run), count=256, at_once=at_once)


def test_a_model_smaller_than_its_tokenizer(run, origin):
    model = GPT(replace(MODEL, vocabulary=128))
    with pytest.raises(UserError, match="the data's tokenizer has 256 ids, the model a vocabulary of 128"):
        use.evaluate_model(replace(use.load(run), model=model), str(origin / "data"))


# ------------------------------------------------------------------- export


def test_an_export_is_the_model(run, tmp_path):
    trained = use.load(run, at=3)
    to = use.export(trained, tmp_path / "deep" / "out")
    assert sorted(p.name for p in to.iterdir()) == ["anytime_tokenizer.json", "config.json", "model.safetensors"]
    again = use.load(to)
    assert equal(weights(again), weights(trained))
    assert again.model.config == trained.model.config
    assert again.card == {**trained.card, "dtype": "float32"}
    assert use.sample(again, "the ", count=20) == use.sample(trained, "the ", count=20)
    assert [p.name for p in to.parent.iterdir()] == ["out"]  # nothing is left beside it


@pytest.mark.parametrize(("name", "dtype"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
def test_an_export_in_half_the_bytes(run, tmp_path, name, dtype):
    trained = use.load(run)
    to = use.export(trained, tmp_path / "out", dtype=name)
    stored = load_file(to / "model.safetensors")
    assert {t.dtype for t in stored.values()} == {dtype}
    again = use.load(to)
    assert again.card["dtype"] == name
    for n, tensor in weights(trained).items():
        assert torch.equal(weights(again)[n], tensor.to(dtype).float())
    assert use.evaluate_model(again, str(json_data(run)), count=256).loss == pytest.approx(
        use.evaluate_model(trained, count=256).loss, abs=0.02
    )


def json_data(run: Path) -> Path:
    return run.parent / "data"


def test_where_an_export_may_go(run, tmp_path):
    trained = use.load(run)
    (tmp_path / "empty").mkdir()
    assert use.load(use.export(trained, tmp_path / "empty")).card["step"] == 6
    with pytest.raises(UserError, match="is there already and not empty"):
        use.export(trained, tmp_path / "empty")
    file = tmp_path / "file"
    file.write_text("keep me")
    with pytest.raises(UserError, match="is there already"):
        use.export(trained, file)
    with pytest.raises(UserError, match="cannot write to"):
        use.export(trained, file / "below")
    assert file.read_text() == "keep me"
    with pytest.raises(UserError, match="dtype is 'int8'"):
        use.export(trained, tmp_path / "new", dtype="int8")
    assert not (tmp_path / "new").exists()


def test_an_export_that_fails_leaves_nothing(run, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(use, "write_atomically", full)
    with pytest.raises(UserError, match="No space left on device"):
        use.export(use.load(run), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_export_belongs_to_no_run(run, tmp_path):
    to = use.export(use.load(run), tmp_path / "a" / "b" / "out")
    with pytest.raises(UserError, match="does not belong to a run: name the data by --data"):
        use.evaluate_model(use.load(to))


@pytest.mark.parametrize(
    ("card", "words"),
    [
        ("{", "does not describe a model"),
        ("[1]", "does not describe a model"),
        ("{}", "does not describe a model"),
        ('{"model": 3}', "does not describe a model"),
        ('{"model": {"widht": 3}}', "there is no setting 'widht'; did you mean 'width'?"),
        ('{"model": {"width": 64, "head": 16, "layers": 1, "vocabulary": 256}}', "is not the model that config.json"),
        ('{"model": {"width": 32, "head": 16, "layers": 2, "vocabulary": 256}}', "is not the model that config.json"),
    ],
)
def test_a_card_of_another_model(run, tmp_path, card, words):
    to = use.export(use.load(run), tmp_path / "out")
    (to / "config.json").write_text(card)
    with pytest.raises(UserError) as found:
        use.load(to)
    assert words in str(found.value)
    assert "\n" not in str(found.value)


def test_an_export_that_is_not_whole(run, tmp_path):
    to = use.export(use.load(run), tmp_path / "out")
    (to / "config.json").rename(tmp_path / "config.json")
    with pytest.raises(UserError, match="does not describe a model"):
        use.load(to)
    (tmp_path / "config.json").rename(to / "config.json")
    (to / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(UserError, match=r"cannot read .*model\.safetensors"):
        use.load(to)
