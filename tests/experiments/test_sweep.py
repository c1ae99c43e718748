"""A search for settings: its file, its trials, and going on."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from anytime import cli
from anytime.experiments import sweep as room
from anytime.experiments.sweep import Range, Space, sweep
from anytime.train import UserError
from anytime.train.config import read_toml

FILE = """
until = "6 steps"
batch_size = 2
eval_per_doubling = 0
eval_at = [2, 4, 6]
eval_tokens = 64
checkpoint_every = 2
device = "cpu"
threads = 1
[model]
vocabulary = 256
layers = 1
width = 16
head = 8
context = 16
[optimizer]
warmup_steps = 2
[space]
"optimizer.lr" = { low = 0.001, high = 0.1, log = true }
"optimizer.betas" = [[0.9, 0.95], [0.95, 0.99]]
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "space.toml"
    path.write_text(FILE)
    return path


def test_a_space(file, words):
    space = Space.read(file, data={"path": str(words)})
    assert space.ranges[0] == Range("optimizer.lr", 0.001, 0.1, True)
    config = space.config({"optimizer.lr": 0.02, "optimizer.betas": [0.95, 0.99]})
    assert (config.optimizer.lr, config.optimizer.betas, config.data.path) == (0.02, (0.95, 0.99), str(words))


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ('"optimizer.lr" = { low = 0.1, high = 0.01 }', "low must be below high"),
        ('"optimizer.lr" = { low = 0.0, high = 0.01, log = true }', "above 0"),
        ('"optimizer.lr" = 0.1', "must be a list of values"),
        ('"optimizer.lr" = { low = 0.1, hihg = 1.0 }', "must be a list of values"),
        ('"optimizer.rate" = [0.1]', "there is no setting 'optimizer.rate'"),
        ('"optimizer.momentum" = [0.8, 7.0]', "momentum is 7.0; it must be in"),
        ('"optimizer.lr" = { low = -1.0, high = 0.1 }', "lr is -1.0"),
        ("", "has no table"),
    ],
)
def test_a_space_that_is_wrong(tmp_path, said, wrong):
    path = tmp_path / "space.toml"
    path.write_text(f'until = "6 steps"\n[space]\n{said}\n')
    with pytest.raises(UserError, match=wrong):
        Space.read(path)


def test_a_sweep_needs_an_end(tmp_path):
    path = tmp_path / "space.toml"
    path.write_text('[space]\n"optimizer.lr" = [0.1]\n')
    with pytest.raises(UserError, match="needs an end"):
        Space.read(path)


def test_whole_numbers_and_choices():
    class Trial:
        def __getattr__(self, name):
            return lambda *arguments, **more: said.append((name, *arguments))

    said: list[tuple] = []
    Range.of("a", {"low": 1, "high": 5}).suggest(Trial())
    Range.of("b", {"low": 1.0, "high": 5}).suggest(Trial())
    Range.of("c", ["x", [1, 2]]).suggest(Trial())
    assert said[:2] == [("suggest_int", "a", 1, 5), ("suggest_float", "b", 1.0, 5)]
    assert said[2] == ("suggest_categorical", "c", ['"x"', "[1, 2]"])
    assert Range.of("c", ["x", [1, 2]]).value("[1, 2]") == [1, 2]


@pytest.mark.slow
def test_trials_on_disk_and_more_of_them(file, words, tmp_path, capsys):
    out = tmp_path / "out"
    command = ["sweep", str(file), "--data", str(words), "--out", str(out), "--jobs", "2"]
    assert cli.main([*command, "--trials", "2"]) == 0
    assert cli.main([*command, "--trials", "3"]) == 0
    rows = [json.loads(line) for line in (out / "trials.jsonl").read_text().splitlines()]
    assert [row["trial"] for row in rows] == [0, 1, 2]
    assert all(row["state"] in ("complete", "pruned") for row in rows)
    assert all(row["losses"] for row in rows)
    best = min((row for row in rows if row["state"] == "complete"), key=lambda row: row["loss"])
    assert read_toml(out / "best.toml")["optimizer"]["lr"] == pytest.approx(best["settings"]["optimizer.lr"])
    assert f"The best loss is {best['loss']:.4f}" in capsys.readouterr().out


def test_a_trial_that_was_broken_off_is_taken_up(file, words, tmp_path, monkeypatch):
    """It keeps its number and its settings; what falls behind or diverges is told apart."""
    out = tmp_path / "out"
    out.mkdir()
    space = Space.read(file, data={"path": str(words)})
    study = room.open_study(out, 0)
    trial = study.ask()
    for r in space.ranges:
        r.suggest(trial)
    tried = []

    class Here:
        def __init__(self, *arguments):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *arguments):
            pass

        def submit(self, work, *arguments):
            from concurrent.futures import Future

            future: Future = Future()
            tried.append(arguments)
            future.set_result(work(*arguments))
            return future

    ends = iter([("done", 3.0), ("behind", 4.0), ("diverged", float("inf")), ("done", 2.5)])
    monkeypatch.setattr(room, "ProcessPoolExecutor", Here)
    monkeypatch.setattr(room, "attempt", lambda *arguments: next(ends))
    loss, best = sweep(space, out, trials=4)
    assert loss == 2.5
    assert [arguments[3] for arguments in tried] == [0, 1, 2, 3]
    assert tried[0][1]["optimizer.lr"] == trial.params["optimizer.lr"]
    assert best.optimizer.lr == tried[3][1]["optimizer.lr"]
    states = [json.loads(line)["state"] for line in (out / "trials.jsonl").read_text().splitlines()]
    assert states == ["complete", "pruned", "pruned", "complete"]


def test_a_trial_reports_its_losses_and_may_be_ended(file, words, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    space = Space.read(file, data={"path": str(words)})
    study = room.open_study(out, 0)
    for number in range(4):  # four that were far better
        good = study.ask()
        for step in (2, 4, 6):
            good.report(0.1, step)
        study.tell(good, 0.1)
        assert good.number == number
    trial = study.ask()
    found = {"optimizer.lr": 0.01, "optimizer.betas": [0.9, 0.95]}
    state, loss = room.attempt(space, found, out, trial.number, trial._trial_id, 0)
    assert state == "behind"
    assert list(study.trials[trial.number].intermediate_values) == [2, 4, 6]  # not within twice its warmup
    assert study.trials[trial.number].intermediate_values[6] == loss


def test_more_trials_are_others(file, words, tmp_path, monkeypatch):
    """Two calls of four, not the first four twice; and not of another space."""
    monkeypatch.setattr(room, "attempt", lambda *arguments: ("done", 1.0))
    monkeypatch.setattr(room, "ProcessPoolExecutor", lambda jobs, *more: ThreadPoolExecutor(jobs))
    space = Space.read(file, data={"path": str(words)})
    out = tmp_path / "out"
    for trials in (2, 4, 8):
        sweep(space, out, trials=trials)
    rows = [json.loads(line) for line in (out / "trials.jsonl").read_text().splitlines()]
    assert len({row["settings"]["optimizer.lr"] for row in rows}) == 8
    assert all(row["settings"]["optimizer.betas"] in ([0.9, 0.95], [0.95, 0.99]) for row in rows)
    longer = Space.read(file, data={"path": str(words)}, until="8 steps")
    with pytest.raises(UserError, match=r"were made with other settings: choose another --out"):
        sweep(longer, out, trials=9)
    fewer = Space(space.base, space.ranges[:1])
    with pytest.raises(UserError, match=r"were made with other space: choose another --out"):
        sweep(fewer, out, trials=9)


def test_a_trial_that_diverges(file, words, tmp_path):
    space = Space.read(file, data={"path": str(words)})
    other = room.open_study(tmp_path, 0).ask()
    wild = Space(
        {**space.base, "optimizer": {"name": "SFAdamW", "weight_decay": 1e19, "warmup_steps": 0}}, space.ranges[:1]
    )
    assert room.attempt(wild, {"optimizer.lr": 1e19}, tmp_path, other.number, other._trial_id, 0)[0] == "diverged"
