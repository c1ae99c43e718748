"""Another run from a kept step: what it takes along, what it changes, and that the first one stays as it is."""

from __future__ import annotations

import hashlib
import importlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from anytime.train import checkpoint
from anytime.train import data as data_module
from anytime.train.batches import Batches, split
from anytime.train.branch import branch, fine_tune
from anytime.train.build import Rates, build_optimizer
from anytime.train.checkpoint import unflatten, weights
from anytime.train.config import Config, Cooldown, DataConfig, OptimizerConfig
from anytime.train.errors import UserError
from anytime.train.loop import train
from anytime.train.model import GPT, ModelConfig
from anytime.train.runs import read_lines, stored_config
from anytime.train.shards import Tokens, write_shard
from anytime.train.tokenizer import BytesTokenizer

module = importlib.import_module("anytime.train.branch")  # its name in the package is the function's
MODEL = ModelConfig(vocabulary=256, layers=1, width=32, head=16, context=32)


def write_data(folder: Path, seed: int) -> None:
    folder.mkdir(parents=True)
    ids = np.random.default_rng(seed).integers(97, 123, 3000).astype(np.uint16)
    write_shard(folder / "train-000000.bin", ids[:2000])
    write_shard(folder / "val-000000.bin", ids[2000:])
    BytesTokenizer().save(folder)


def settings(folder: Path, into: str = "run", **optimizer) -> Config:
    return Config(
        model=MODEL,
        data=DataConfig(path=str(folder / "data")),
        optimizer=OptimizerConfig(**{"lr": 0.02, "warmup_steps": 2, **optimizer}),
        run=str(folder / into),
        until="8 steps",
        batch_size=2,
        eval_tokens=128,
        keep_at=(2, 4),
        log_every=1,
        threads=1,
    )


@pytest.fixture(scope="module")
def origin(tmp_path_factory) -> Path:
    """A schedule-free run of 8 steps that keeps 2 and 4, a scheduled one, and other data."""
    folder = tmp_path_factory.mktemp("branch")
    write_data(folder / "data", 0)
    write_data(folder / "other", 1)
    train(settings(folder))
    train(settings(folder, "scheduled", name="NorMuon"))
    return folder


@pytest.fixture(scope="module")
def run(origin) -> Path:
    return origin / "run"


def step_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def tensors(run: Path, step: int, name: str = "resume") -> dict[str, torch.Tensor]:
    folder = step_folder(run, step)
    return checkpoint.read_resume(folder) if name == "resume" else load_file(folder / f"{name}.safetensors")


def state(run: Path, step: int) -> dict:
    return json.loads((step_folder(run, step) / "state.json").read_text())


def rows(run: Path, kind: str) -> list[dict]:
    return [row for row in read_lines(run / "metrics.jsonl") if row["kind"] == kind]


def bits(values: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in values.items()}


def contents(folder: Path) -> dict[str, str]:
    """Every file by its sum."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def go_on(config: Config, until: str = "8 steps"):
    return train(replace(config, until=until))


# ---------------------------------------------------------- nothing changed


def test_a_branch_that_changes_nothing_is_the_run_itself(run, tmp_path):
    config = branch(run, tmp_path / "b", at=4)
    assert go_on(config).step == 8
    for name in ("resume", "model"):
        assert bits(tensors(tmp_path / "b", 8, name)) == bits(tensors(run, 8, name))
    losses = {row["step"]: row["loss"] for row in rows(run, "step")}
    assert {row["step"]: row["loss"] for row in rows(tmp_path / "b", "step")} == {s: losses[s] for s in (5, 6, 7, 8)}


def test_what_a_branch_takes_along(run, tmp_path):
    config = branch(run, tmp_path / "b", at=4)
    assert stored_config(tmp_path / "b") == config
    assert config == replace(stored_config(run), run=str(tmp_path / "b"), until="")
    for name in ("resume", "model"):
        assert bits(tensors(tmp_path / "b", 4, name)) == bits(tensors(run, 4, name))
    folders = [step_folder(tmp_path / "b", 4), step_folder(run, 4)]
    names = [sorted(path.name for path in folder.iterdir()) for folder in folders]
    assert names[0] == names[1]
    assert "anytime_tokenizer.json" in names[0]
    assert checkpoint.damage(folders[0]) is None
    old, new = state(run, 4), state(tmp_path / "b", 4)
    for key in ("step", "tokens", "position", "data", "seconds", "groups", "format"):
        assert new[key] == old[key]
    about = json.loads((tmp_path / "b" / "branch.json").read_text())
    assert about == {"from": str(run.resolve()), "step": 4, "average": "keep", "cooldown": 0}
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == ["branch.json", "checkpoints", "config.toml", "lock"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b"]


def test_the_newest_step_is_the_default(run, tmp_path):
    branch(run, tmp_path / "b")
    assert [p.name for p in (tmp_path / "b" / "checkpoints").glob("step*")] == ["step-00000008"]


def test_the_source_is_never_touched(origin, run, tmp_path):
    before = contents(run)
    config = branch(run, tmp_path / "b", at=4, average="restart", changes={"data": {"path": str(origin / "other")}})
    go_on(config, "7 steps")
    branch(run, tmp_path / "c", cooldown=2)
    with pytest.raises(UserError):
        branch(run, tmp_path / "c", cooldown=2)
    assert contents(run) == before
    assert len(before) > 10


def test_a_branch_of_a_branch(run, tmp_path):
    first = branch(run, tmp_path / "b", at=2)
    train(replace(first, until="5 steps"))
    second = branch(tmp_path / "b", tmp_path / "c", at=4)
    go_on(second)
    assert bits(tensors(tmp_path / "c", 8)) == bits(tensors(run, 8))


# ------------------------------------------------------------------ changes


def test_another_rate_takes_effect(run, tmp_path):
    config = branch(run, tmp_path / "b", at=4, changes={"optimizer": {"lr": 0.005, "weight_decay": 0.3}})
    go_on(config, "5 steps")
    (row,) = rows(tmp_path / "b", "step")
    assert row["lr"] == 0.005
    groups = {g["rule"]: g for g in state(tmp_path / "b", 5)["groups"]}
    assert groups["normuon"]["lr"] == groups["sf-adamw"]["lr"] == 0.005
    assert groups["normuon"]["weight_decay"] == 0.3
    # The update of a matrix has the rate's size: its z moves by 0.2 lr, decay aside.
    model, optimizer = restored(tmp_path / "b", 4)
    _, after = restored(tmp_path / "b", 5, model)
    for name, old in optimizer.items():
        if name != "embedding.weight":
            move = after[name].z - old.z + 0.005 * 0.3 * old.z
            assert float(move.square().mean().sqrt()) == pytest.approx(0.2 * 0.005, rel=1e-3)


def restored(run: Path, step: int, model: GPT | None = None) -> tuple[GPT, dict]:
    """The model Y of a checkpoint and the iterates of every parameter."""
    model = GPT(MODEL) if model is None else model
    found = tensors(run, step)
    model.load_state_dict(weights(found))
    optimizer = build_optimizer(model, stored_config(run).optimizer)
    optimizer.load_state_dict({"state": unflatten(found), "param_groups": state(run, step)["groups"]})
    return model, {name: optimizer.iterates(p) for name, p in model.named_parameters()}


def test_another_rate_has_what_the_recipe_fills_in_for_it(origin, run, tmp_path):
    """λ, of which η λ does not depend on the rate; without another rate nothing is filled in anew."""
    train(settings(origin, str(tmp_path / "recipe"), recipe="anytime", lr=0.1, momentum=0.7))
    old = stored_config(tmp_path / "recipe").optimizer
    assert (old.weight_decay, old.warmup_steps) == (pytest.approx(0.2), 2)
    lower = branch(tmp_path / "recipe", tmp_path / "lower", changes={"optimizer": {"lr": 0.05}}).optimizer
    assert lower == replace(old, lr=0.05, weight_decay=pytest.approx(0.4))
    same = branch(tmp_path / "recipe", tmp_path / "same", changes={"optimizer": {"clip": 1.0}}).optimizer
    assert same == replace(old, clip=1.0)


def test_other_data_begin_at_their_beginning(origin, run, tmp_path):
    other = str(origin / "other")
    config = branch(run, tmp_path / "b", at=4, changes={"data": {"path": other}})
    begun = state(tmp_path / "b", 4)
    assert (begun["position"], begun["data"]) == (0, None)
    assert begun["tokens"] == 4 * 2 * 32  # what was read is read
    go_on(config, "6 steps")
    assert state(tmp_path / "b", 6)["position"] == 4
    tokens = Tokens.open(other, "train")
    assert state(tmp_path / "b", 6)["data"] == tokens.fingerprint() != state(run, 4)["data"]
    model, _ = restored(run, 4)
    inputs, targets = split(Batches(tokens, 32, 0).batch(0, 2), torch.device("cpu"))
    with torch.no_grad():
        assert rows(tmp_path / "b", "step")[0]["loss"] == pytest.approx(float(model(inputs, targets)), rel=1e-5)


def test_the_sources_evaluation_does_not_judge_the_branch(origin, run, tmp_path):
    """A loss to stop at is of the branch's own tokens: the first evaluation of its own decides."""
    assert state(run, 4)["evaluation"]["loss"] < 100
    changes = {"data": {"path": str(origin / "other")}, "until": "loss 100", "eval_at": [5]}
    assert train(branch(run, tmp_path / "b", at=4, changes=changes)).step == 5


def test_the_same_data_must_be_the_same(origin, run, tmp_path):
    """Only a change of data.path may change them."""
    shutil.copytree(origin / "data", tmp_path / "data")
    config = settings(tmp_path)
    train(config)
    made = branch(tmp_path / "run", tmp_path / "b", at=4)
    shutil.rmtree(tmp_path / "data")
    shutil.copytree(origin / "other", tmp_path / "data")
    with pytest.raises(UserError, match=r"are not those that the run .* began with"):
        go_on(made)


def test_the_data_that_a_run_made_for_itself_go_along(tmp_path, monkeypatch):
    library = tmp_path / "lib"
    library.mkdir()
    for i in range(40):
        (library / f"m{i}.py").write_bytes(f"module {i}\n".encode() * 4000)
    monkeypatch.setattr(data_module.sysconfig, "get_paths", lambda: {"stdlib": str(library)})
    config = replace(settings(tmp_path), data=DataConfig(path="python"), until="4 steps")
    train(config)
    made = branch(tmp_path / "run", tmp_path / "b", at=4)
    assert contents(tmp_path / "b" / "data") == contents(tmp_path / "run" / "data")
    shutil.rmtree(library)  # another Python
    assert go_on(made, "5 steps").step == 5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"width": 64}}, "model.width is 64 and was 32: a branch cannot change it"),
        ({"model": {"context": 16}}, "model.context is 16 and was 32"),
        ({"optimizer": {"name": "SFMuon"}}, "optimizer.name is 'SFMuon' and was 'SFNorMuon'"),
        ({"optimizer": {"momentum_dtype": "bfloat16"}}, "optimizer.momentum_dtype is 'bfloat16' and was None"),
        ({"optimizer": {"lrr": 1.0}}, "there is no setting 'optimizer.lrr'; did you mean 'lr'?"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"until": "someday"}, "until is 'someday'"),
    ],
)
def test_changes_that_are_refused(run, tmp_path, changes, words):
    with pytest.raises(UserError) as found:
        branch(run, tmp_path / "b", at=4, changes=changes)
    assert words in str(found.value)
    assert list(tmp_path.iterdir()) == []


def test_the_end_of_a_branch(run, tmp_path):
    """It goes on without end unless told; the source's end is the source's."""
    assert branch(run, tmp_path / "a", at=4).until == ""
    assert branch(run, tmp_path / "b", at=4, changes={"until": "9 steps"}).until == "9 steps"
    assert branch(run, tmp_path / "c", at=4, changes={"until": "8 steps"}).until == "8 steps"


def test_a_schedule_may_begin_in_a_branch(run, tmp_path):
    changes = {"optimizer": {"schedule": "linear"}, "until": "8 steps"}
    config = branch(run, tmp_path / "b", at=4, changes=changes)
    assert train(config).step == 8
    assert [row["lr"] for row in rows(tmp_path / "b", "step")] == pytest.approx(
        [0.02 * (1 - (done - 2) / 6) for done in (4, 5, 6, 7)]
    )


def test_data_that_moved_are_the_same_data(origin, run, tmp_path):
    """The branch goes on in them, however the source was last told where they are."""
    shutil.copytree(origin / "data", tmp_path / "moved")
    config = branch(run, tmp_path / "b", at=4, changes={"data": {"path": str(tmp_path / "moved")}})
    begun, before = state(tmp_path / "b", 4), state(run, 4)
    assert (begun["position"], begun["data"]) == (before["position"], before["data"]) == (8, before["data"])
    train(replace(config, until="5 steps"))
    train(replace(branch(run, tmp_path / "c", at=4), until="5 steps"))
    assert bits(tensors(tmp_path / "b", 5)) == bits(tensors(tmp_path / "c", 5))


# ----------------------------------------------------------------- cooldown


@pytest.mark.parametrize("name", ["run", "scheduled"])
def test_a_cooldown_falls_to_zero_and_ends_there(origin, tmp_path, name):
    config = branch(origin / name, tmp_path / "b", at=4, cooldown=4)
    assert config.cooldown == Cooldown(4, 4)
    result = train(config)
    assert (result.step, result.reason) == (8, "until 8 steps")
    found = {row["step"]: row["lr"] for row in rows(tmp_path / "b", "step")}
    assert found == pytest.approx({5: 0.02, 6: 0.015, 7: 0.01, 8: 0.005})
    assert Rates(config).factor(8) == 0
    with pytest.raises(UserError, match="the rate is zero from step 8 on"):
        go_on(config, "9 steps")


def test_a_cooldown_ends_where_it_ends(run, tmp_path):
    with pytest.raises(UserError, match="a cooldown of 3 steps ends there: leave out until"):
        branch(run, tmp_path / "b", at=4, cooldown=3, changes={"until": "9 steps"})
    whole = branch(run, tmp_path / "whole", at=4, cooldown=2)
    train(whole)
    with pytest.raises(UserError, match=r"the rate is zero from step 6 on, and .*step-00000006 is at 6"):
        branch(tmp_path / "whole", tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_cooldown_that_was_stopped_goes_on(origin, run, tmp_path):
    """In one go or in two: the same."""
    whole = branch(run, tmp_path / "whole", at=4, cooldown=4)
    train(whole)
    parts = branch(run, tmp_path / "parts", at=4, cooldown=4)
    train(replace(parts, until="6 steps"))
    train(parts)
    assert bits(tensors(tmp_path / "whole", 8)) == bits(tensors(tmp_path / "parts", 8))


def test_a_cooldown_with_the_average_kept_averages_on(run, tmp_path):
    train(branch(run, tmp_path / "b", at=4, cooldown=4))
    found = tensors(tmp_path / "b", 8)
    assert any(t.abs().max() > 0 for name, t in found.items() if name.endswith("/d"))
    sums = {float(t) for name, t in found.items() if name.endswith("/weight_sum")}
    before = {float(t) for name, t in tensors(run, 4).items() if name.endswith("/weight_sum")}
    assert min(sums) > min(before) > 0


@pytest.mark.parametrize(
    "changes",
    [{"lr": 0.004}, {"lr": 0.1}, {"averaging_power": 3.0}, {"averaging_power": 1.5, "rate_fall": 0.3,
     "rate_fall_start": 3}, {"recipe": "anytime"}, {"recipe": "anytime", "lr": 0.05},
     {"recipe": "paper", "lr": 0.004, "adam_lr": 0.03}, {}],
)  # fmt: skip
@pytest.mark.parametrize("origins", [{}, {"recipe": "anytime"}], ids=["paper", "anytime"])
def test_the_average_goes_on_at_its_pace_whatever_the_weights_are(origin, tmp_path, changes, origins):
    """c is that of the run which was left, so that X neither stops nor jumps to Z."""
    config = replace(settings(origin, **origins), run=str(tmp_path / "run"), diagnose_every=1)
    train(config)
    train(replace(branch(config.run, tmp_path / "b", at=4, changes={"optimizer": changes}), until="5 steps"))
    (expected,) = (row["c"] for row in rows(tmp_path / "run", "average") if row["step"] == 5)
    (found,) = (row["c"] for row in rows(tmp_path / "b", "average") if row["step"] == 5)
    assert found == pytest.approx(expected, rel=1e-5)


# ------------------------------------------------------------------ restart


def test_a_restarted_average_begins_at_the_weights(run, tmp_path):
    branch(run, tmp_path / "b", at=4, average="restart")
    old, new = tensors(run, 4), tensors(tmp_path / "b", 4)
    _, found = restored(tmp_path / "b", 4)
    _, before = restored(run, 4)
    model = tensors(tmp_path / "b", 4, "model")
    for name, it in found.items():
        assert torch.equal(it.x, it.y)
        assert torch.equal(it.y, it.z)
        assert torch.equal(it.y, before[name].y)
        assert torch.equal(model[name], it.y)
        assert not torch.equal(before[name].x, before[name].y)
    assert {float(t) for name, t in new.items() if name.endswith("/weight_sum")} == {0.0}
    untouched = [name for name in old if not name.endswith(("/d", "/weight_sum"))]
    assert {n: bits(new)[n] for n in untouched} == {n: bits(old)[n] for n in untouched}
    assert {n.rpartition("/")[2] for n in untouched} >= {"momentum", "second_moment", "row_moment", "step", "beta"}


def test_a_restarted_average_goes_on_as_an_average(run, tmp_path):
    """Its first step has c = 1 and then it averages again."""
    config = replace(branch(run, tmp_path / "b", at=4, average="restart"), diagnose_every=1)
    go_on(config)
    found = [row["c"] for row in rows(tmp_path / "b", "average")]
    assert found == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4], rel=1e-6)
    assert any(t.abs().max() > 0 for name, t in tensors(tmp_path / "b", 8).items() if name.endswith("/d"))


def test_what_comes_out_of_a_restarted_cooldown_is_the_last_iterate(run, tmp_path):
    config = branch(run, tmp_path / "b", at=4, cooldown=4, average="restart")
    assert config.optimizer.averaging_warmup == 8
    train(config)
    found, model = tensors(tmp_path / "b", 8), tensors(tmp_path / "b", 8, "model")
    distances = [t for name, t in found.items() if name.endswith("/d")]
    assert len(distances) == 7
    assert all(t.abs().max() == 0 for t in distances)
    for name, y in weights(found).items():
        assert torch.equal(model[name], y)
    assert json.loads((tmp_path / "b" / "branch.json").read_text())["average"] == "restart"


def test_a_scheduled_optimizer_has_no_average(origin, tmp_path):
    with pytest.raises(UserError, match="NorMuon has no average to restart"):
        branch(origin / "scheduled", tmp_path / "b", average="restart")
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------- errors


def test_a_step_that_is_not_kept(run, tmp_path):
    with pytest.raises(UserError, match=r"keeps no step 5; it keeps 2, 4, 8"):
        branch(run, tmp_path / "b", at=5)
    assert list(tmp_path.iterdir()) == []


def test_a_source_that_is_no_run(tmp_path):
    with pytest.raises(UserError, match="is not a run's folder"):
        branch(tmp_path / "nowhere", tmp_path / "b")
    with pytest.raises(UserError, match="is not a run's folder"):
        branch(tmp_path, tmp_path / "b")


@pytest.mark.parametrize(
    ("more", "words"),
    [({"cooldown": -1}, "cooldown is -1"), ({"average": "drop"}, "average is 'drop', must be 'keep' or 'restart'")],
)
def test_wrong_arguments(run, tmp_path, more, words):
    with pytest.raises(UserError, match=words):
        branch(run, tmp_path / "b", **more)


def test_a_target_that_is_there(run, tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "file").write_text("keep me")
    for name in ("b", "file"):
        with pytest.raises(UserError, match=f"{name} is there already: choose another folder"):
            branch(run, tmp_path / name)
    assert (tmp_path / "file").read_text() == "keep me"
    with pytest.raises(UserError, match="cannot write the branch to"):
        branch(run, tmp_path / "file" / "below")


def test_a_damaged_step_is_not_branched_from(origin, tmp_path):
    copy = Path(shutil.copytree(origin / "run", tmp_path / "copy"))
    path = step_folder(copy, 4) / "resume-00000-of-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match=r"damaged: resume-00000-of-00001\.safetensors is not what was written"):
        branch(copy, tmp_path / "b", at=4)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("moment", ["checkpoint", "first", "branch.json", "config.toml"])
def test_killed_on_the_way_it_leaves_no_run(run, tmp_path, monkeypatch, moment):
    """Right after each thing that it writes; made again, it is whole."""
    write, fill, save = module.write_atomically, module._fill, module.write_checkpoint

    def killing(function, when):
        def call(*arguments, **more):
            function(*arguments, **more)
            if when(*arguments):
                raise Killed

        return call

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_atomically", killing(write, lambda path, _: path.name == moment))
        patch.setattr(module, "_fill", killing(fill, lambda *_: moment == "first"))
        patch.setattr(module, "write_checkpoint", killing(save, lambda *_: moment == "checkpoint"))
        with pytest.raises(Killed):
            branch(run, tmp_path / "b", at=4)
    assert not (tmp_path / "b").exists()
    assert list(tmp_path.iterdir())  # something was under way
    go_on(branch(run, tmp_path / "b", at=4), "5 steps")
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


def test_a_full_disk_leaves_nothing(run, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_atomically", full)
    with pytest.raises(UserError, match=r"cannot write the branch to .*: No space left on device"):
        branch(run, tmp_path / "b", at=4)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------ fine-tuning


@pytest.mark.parametrize("name", ["SFNorMuon", "NorMuon", "AdamW"])
def test_fine_tuning_begins_with_x_and_a_fresh_optimizer(origin, run, tmp_path, name):
    """As if the weights of X had been those of a new run; with any optimizer, on other data."""
    config = replace(settings(origin), run=str(tmp_path / "tuned"), data=DataConfig(path=str(origin / "other")))
    config = replace(config, optimizer=OptimizerConfig(name=name, lr=0.01, warmup_steps=2), until="3 steps")
    fine_tune(run, config, at=4)
    x = tensors(run, 4, "model")
    begun = tensors(tmp_path / "tuned", 0)
    assert all(torch.equal(x[key], tensor) for key, tensor in weights(begun).items())
    assert all(torch.equal(x[key], tensor) for key, tensor in tensors(tmp_path / "tuned", 0, "model").items())
    model = GPT(MODEL)
    model.load_state_dict(x)
    fresh = build_optimizer(model, config.optimizer)
    assert train(config).step == 3
    tokens = Tokens.open(str(origin / "other"), "train")
    for step in range(3):
        model(*split(Batches(tokens, MODEL.context, config.seed).batch(2 * step, 2), torch.device("cpu"))).backward()
        fresh.step()
        fresh.zero_grad()
    for key, tensor in weights(tensors(tmp_path / "tuned", 3)).items():
        torch.testing.assert_close(tensor, model.state_dict()[key], rtol=1e-5, atol=1e-6)
    assert train(replace(config, until="4 steps")).step == 4


def test_fine_tuning_refuses_another_model_and_a_folder_that_is_there(origin, run, tmp_path):
    config = replace(settings(origin), run=str(tmp_path / "tuned"))
    with pytest.raises(UserError, match=r"model\.width is 64 and was 32"):
        fine_tune(run, replace(config, model=replace(MODEL, width=64)))
    assert not (tmp_path / "tuned").exists()
    with pytest.raises(UserError, match="is there already"):
        fine_tune(run, settings(origin))
