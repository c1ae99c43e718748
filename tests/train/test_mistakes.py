"""Mistakes that people make, each told in a line, and nothing of theirs or of the run's lost."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from anytime import cli
from anytime.train import Config, UserError, branch, evaluate_model, load, merged, train
from anytime.train import checkpoint as checkpoints
from anytime.train.runs import stored_config
from anytime.train.shards import write_shard
from anytime.train.tokenizer import BytesTokenizer, train_tokenizer

SHAPE = {"layers": 1, "width": 32, "head": 16, "context": 16, "vocabulary": 320}


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "data").mkdir()
    tokens = np.random.default_rng(0).integers(1, 250, 4000).astype(np.uint16)
    for split in ("train", "val"):
        write_shard(tmp_path / "data" / f"{split}-0.bin", tokens)
    BytesTokenizer().save(tmp_path / "data")
    values = {"model": SHAPE, "data": {"path": str(tmp_path / "data")}, "batch_size": 2, "eval_tokens": 64}
    return {**values, "optimizer": {"warmup_steps": 2}, "run": str(tmp_path / "run"), "until": "4 steps"}


def run(settings, **more):
    return train(merged(Config(), {**settings, **more}))


def test_a_folder_with_settings_of_ones_own_is_no_run(settings, tmp_path):
    mine = tmp_path / "run"
    mine.mkdir()
    for name in ("config.toml", ".notes.tmp"):
        (mine / name).write_text("# mine\n")
    with pytest.raises(UserError, match="is not a run's"):
        run(settings)
    assert sorted(path.name for path in mine.iterdir()) == [".notes.tmp", "config.toml"]
    assert (mine / "config.toml").read_text() == "# mine\n"


def test_hidden_files_of_others_stay_in_a_run(settings, tmp_path):
    run(settings)
    (tmp_path / "run/.notes.tmp").write_text("mine")
    (tmp_path / "run/.config.toml.77.tmp").write_text("left by a kill")
    run(settings, until="5 steps")
    assert (tmp_path / "run/.notes.tmp").exists()
    assert not (tmp_path / "run/.config.toml.77.tmp").exists()


def test_a_run_killed_before_its_first_checkpoint_keeps_its_settings(settings, tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("anytime.train.loop.Loop._train_step", killed)
        with pytest.raises(KeyboardInterrupt):
            run(settings)
    assert stored_config(tmp_path / "run").model.width == 32
    assert cli.main(["train", "--run", str(tmp_path / "run"), "--until", "2 steps"]) == 0
    assert load(tmp_path / "run").model.config.width == 32


def test_settings_that_failed_at_the_start_are_not_kept(settings, tmp_path):
    with pytest.raises(UserError, match="optimizer: "):
        run(settings, optimizer={"lr": -1.0})
    assert stored_config(tmp_path / "run") is None
    assert run(settings).step == 4


def test_a_disk_that_cannot_be_read_for_a_moment_costs_no_checkpoint(settings, tmp_path, monkeypatch):
    run(settings)

    def fails(path):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "digest", fails)
        with pytest.raises(UserError, match="cannot read the checkpoint"):
            run(settings, until="6 steps")
    assert run(settings, until="6 steps").step == 6


def test_a_damaged_checkpoint_is_set_aside_and_told_of(settings, tmp_path, capsys):
    run(settings, checkpoint_every=2)
    newest = tmp_path / "run/checkpoints/step-00000004/model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    assert cli.main(["eval", str(tmp_path / "run"), "--tokens", "64"]) == 0
    said = capsys.readouterr()
    assert "step-00000004 is damaged: model.safetensors" in said.err
    assert "(step 2," in said.out
    assert run(settings).step == 4
    assert (tmp_path / "run/checkpoints/damaged-step-00000004").is_dir()


def test_data_of_another_tokenizer(settings, tmp_path):
    run(settings)
    other = tmp_path / "other"
    other.mkdir()
    train_tokenizer(["some words and some more words " * 50], 260).save(other)
    for split in ("train", "val"):
        write_shard(other / f"{split}-0.bin", np.arange(1000, dtype=np.uint16) % 250)
    with pytest.raises(UserError, match="made with another tokenizer"):
        evaluate_model(load(tmp_path / "run"), str(other))
    with pytest.raises(UserError, match="made with another tokenizer"):
        branch(tmp_path / "run", tmp_path / "b", changes={"data": {"path": str(other)}})
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("changes", [{"data": {"path": "nowhere"}}, {"optimizer": {"lr": -3.0}}])
def test_a_branch_that_cannot_be_leaves_nothing(settings, tmp_path, changes):
    run(settings)
    with pytest.raises(UserError):
        branch(tmp_path / "run", tmp_path / "b", changes=changes)
    assert not (tmp_path / "b").exists()


def test_text_is_not_taken_for_tokens(settings, tmp_path):
    (tmp_path / "text.txt").write_text("words " * 1000)
    with pytest.raises(UserError, match=r"text.txt is no file of tokens; .* by `anytime data`"):
        run(settings, data={"path": str(tmp_path / "text.txt")}, eval_per_doubling=0)


def test_a_cooldown_is_begun_by_a_branch(settings, tmp_path, capsys):
    run(settings)
    assert cli.main(["train", "--run", str(tmp_path / "run"), "--cooldown.steps", "5"]) == 1
    assert "anytime branch RUN --cooldown STEPS" in capsys.readouterr().err


def test_a_runs_folder_may_stand_where_the_settings_do(settings, tmp_path, capsys):
    run(settings)
    assert cli.main(["train", str(tmp_path / "run"), "--until", "6 steps"]) == 0
    assert "--until '12 steps'" in capsys.readouterr().out


def test_weights_are_readable_for_others(settings, tmp_path):
    run(settings)
    newest = tmp_path / "run/checkpoints/step-00000004"
    assert {path.stat().st_mode & 0o777 for path in newest.iterdir()} == {
        (newest / "state.json").stat().st_mode & 0o777
    }
