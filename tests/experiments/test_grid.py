"""Rows are made once, go on where they broke, and tell of what diverged."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from anytime.experiments import grid as room
from anytime.experiments.grid import Estimate, Grid, duration, read_grid
from anytime.experiments.run import Run, rounded, thin
from anytime.optim import sf_spectral
from anytime.train import UserError, evaluate_model, load, merged, train
from anytime.train.checkpoint import read_resume, read_tensors, weights
from anytime.train.runs import read_lines

TINY = {
    "model": {"vocabulary": 256, "layers": 1, "width": 16, "head": 8, "context": 16},
    "optimizer": {"lr": 0.02, "warmup_steps": 2},
    "batch_size": 2,
    "eval_per_doubling": 0,
    "eval_at": [4, 8],
    "eval_tokens": 128,
    "checkpoint_every": 4,
    "diagnose_every": 2,
    "log_every": 2,
    "until": "8 steps",
}


def run(name="a", seed=0, watch=(), **changes) -> Run:
    return Run(name, seed, {**TINY, **changes}, watch)


@pytest.fixture
def grid(tmp_path, words):
    with Grid(tmp_path / "rows.jsonl", tmp_path / "work", data=str(words), device="cpu") as made:
        yield made


def again(grid) -> Grid:
    return Grid(grid.path, grid.work, data=grid.data, device="cpu")


def never(*arguments):
    raise AssertionError("a run was run again")


def test_a_row_for_each_run(grid, words):
    grid.fill([run(), run("b", 1, ("average",))])
    one, other = read_lines(grid.path)
    assert (one["name"], one["seed"], other["name"], other["seed"]) == ("a", 0, "b", 1)
    assert list(one["losses"]) == ["4", "8"]
    assert all(0 < loss < 6 for loss in one["losses"].values())
    assert one["tokens"] == 8 * 2 * 16
    assert one["seconds"] > 0
    assert one["tokens_per_second"] > 0
    assert {"version", "commit", "device", "data", "jobs", "settings"} <= one.keys()
    assert "average" not in one
    assert [r["step"] for r in other["average"]] == [2, 4, 6, 8]
    assert {"rho", "alpha", "c"} <= other["average"][0].keys()
    assert "layers" not in other


def test_what_is_there_is_not_run_again(grid, monkeypatch):
    grid.fill([run()])
    monkeypatch.setattr(room, "execute", never)
    later = again(grid)
    assert later.missing([run(), run("b")]) == [run("b")]
    later.fill([run(), run(log_every=5), run(threads=2)])  # how it is run is not what it is


def test_a_changed_recipe_is_another_run(monkeypatch):
    one = run(optimizer={"recipe": "anytime", "lr": 0.01})
    assert one.key == run(optimizer={"recipe": "anytime", "lr": 0.01}).key  # and made, once
    plain = sf_spectral.RECIPES["anytime"]
    other = dataclasses.replace(plain, fill=lambda lr, warmup: plain.fill(lr, warmup) | {"momentum": 0.1})
    monkeypatch.setitem(sf_spectral.RECIPES, "anytime", other)
    other = run(optimizer={"recipe": "anytime", "lr": 0.01})
    assert one.key != other.key
    assert one.settings == other.settings


def test_changed_settings_are_run_again(grid):
    grid.fill([run()])
    changed = run(optimizer={"lr": 0.01, "warmup_steps": 2})
    grid.fill([run(), changed, run(watch=("average",))])
    assert len(read_lines(grid.path)) == 3
    assert len({row["key"] for row in read_lines(grid.path)}) == 3


def test_what_broke_goes_on(grid, words):
    """From its checkpoint of step 4; the row has all of it."""
    broken = run()
    here = {"run": str(broken.folder(grid.work)), "data": {"path": str(words)}, "until": "4 steps", "device": "cpu"}
    train(merged(broken.config, here))
    grid.fill([broken])
    rows = read_lines(broken.folder(grid.work) / "metrics.jsonl")
    assert [row["step"] for row in rows if row["kind"] == "start"] == [0, 4]
    (row,) = read_lines(grid.path)
    assert list(row["losses"]) == ["4", "8"]


def test_a_longer_run_of_the_same_name_goes_on_from_the_shorter(grid):
    short, long = run(until="4 steps"), run(watch=("layers",))
    grid.fill([short])
    grid.fill([short, long])
    assert [list(row["losses"]) for row in read_lines(grid.path)] == [["4"], ["4", "8"]]
    row = grid.rows[long.key]
    assert [r["step"] for r in row["average"]] == [r["step"] for r in row["layers"]] == [2, 4, 6, 8]
    assert all("change" in r for r in row["average"])  # of the part before too
    rows = read_lines(long.folder(grid.work) / "metrics.jsonl")
    assert [row["step"] for row in rows if row["kind"] == "start"] == [0, 4]


def test_a_step_that_another_run_passed_without_looking_is_looked_at(grid):
    """The longer run goes on from the shorter, which had passed step 3: so it begins anew."""
    short, long = run(until="4 steps"), run(eval_at=[3, 8])
    assert short.folder(grid.work) == long.folder(grid.work)
    grid.fill([short])
    grid.fill([long])
    assert list(grid.rows[long.key]["losses"]) == ["3", "8"]
    rows = read_lines(long.folder(grid.work) / "metrics.jsonl")
    assert [row["step"] for row in rows if row["kind"] == "start"] == [0]
    assert run(eval_tokens=64).folder(grid.work) != short.folder(grid.work)


def test_two_that_share_a_folder_are_not_run_at_once(grid):
    with pytest.raises(UserError, match="two runs named 'a' of seed 0"):
        grid.fill([run(until="4 steps"), run()])


def test_a_run_that_diverges_is_a_row(grid):
    wild = run("wild", optimizer={"name": "SFAdamW", "lr": 1e19, "weight_decay": 1e19, "warmup_steps": 0})
    grid.fill([wild, run()])
    rows = {row["name"]: row for row in read_lines(grid.path)}
    assert rows["wild"]["failed"].startswith("the loss is nan at step")
    assert "failed" not in rows["a"]
    assert again(grid).missing([wild]) == []


def test_other_errors_are_no_rows(grid):
    with pytest.raises(UserError, match=r"there is no setting 'optimizer\.rate'"):
        grid.fill([run(optimizer={"rate": 1.0})])
    wrong = dataclasses.replace(grid.machine, data="/nowhere")
    with pytest.raises(UserError, match="there is no data"):
        room.execute(run(), grid.work / "wrong", wrong)
    assert not grid.path.exists()


def test_a_torn_last_line_costs_that_row_alone(grid):
    grid.fill([run()])
    with grid.path.open("a") as file:
        file.write('{"key": "half')
    later = again(grid)
    assert list(later.rows) == [run().key]
    later.fill([run("b")])
    assert [row["name"] for row in read_lines(grid.path)] == ["a", "b"]


def test_rows_of_other_tokens_are_not_mixed(grid):
    grid.fill([run()])
    row = read_lines(grid.path)[0]
    grid.path.write_text(json.dumps({**row, "data": "others"}) + "\n")
    with pytest.raises(UserError, match="come from other tokens"):
        again(grid).fill([run("b")])
    again(grid).fill([run()])  # what is there needs no data


def test_layers_by_name(grid):
    grid.fill([run(watch=("layers",))])
    (row,) = read_lines(grid.path)
    assert row["layers"][-1]["step"] == 8
    assert {"rho", "predicted", "alpha", "change", "row_spread", "polar_error"} <= row["layers"][0][
        "blocks.0.q.weight"
    ].keys()
    assert {"predicted", "change"} <= row["average"][0].keys()


def test_losses_at_y_and_z(grid, words):
    """z = (y − β x) / (1 − β), from the other tensors of the checkpoint."""
    made = run(watch=("sequences",), keep_at=[4, 8])
    grid.fill([made])
    (row,) = read_lines(grid.path)
    assert list(row["losses_y"]) == list(row["losses_z"]) == ["4", "8"]
    for step in (4, 8):
        folder = made.folder(grid.work) / "checkpoints" / f"step-{step:08d}"
        trained = load(folder, device="cpu")
        x, y = read_tensors(folder / "model.safetensors"), weights(read_resume(folder))
        beta = {name: 0.95 if name == "embedding.weight" else 0.9 for name in x}
        z = {name: (y[name] - beta[name] * x[name]) / (1 - beta[name]) for name in x}
        for key, values in (("losses", x), ("losses_y", y), ("losses_z", z)):
            trained.model.load_state_dict(values, strict=False)
            loss = evaluate_model(trained, str(words), count=128).loss
            assert row[key][str(step)] == pytest.approx(loss, abs=2e-4)
    assert row["losses_z"] != row["losses"]
    assert torch.isfinite(torch.tensor(list(row["losses_z"].values()))).all()


@pytest.mark.slow
def test_several_at_once(tmp_path, words):
    with Grid(tmp_path / "rows.jsonl", tmp_path / "work", data=str(words), device="cpu", jobs=2) as grid:
        states = []
        grid.fill([run(name) for name in "abc"], states.append)
        assert {row["name"] for row in read_lines(grid.path)} == set("abc")
        assert all(row["jobs"] == 2 for row in grid.rows.values())
        assert max(len(state.running) for state in states) == 2
        assert grid.estimate([run("d")]).seconds > 0
    alone = tmp_path / "alone.jsonl"
    with Grid(alone, tmp_path / "other", data=str(words), device="cpu") as grid:
        grid.fill([run("a")])
    both = [next(row for row in read_lines(path) if row["name"] == "a") for path in (tmp_path / "rows.jsonl", alone)]
    assert both[0]["losses"] == pytest.approx(both[1]["losses"], abs=1e-3)


def test_no_run_is_started_after_its_time(tmp_path, words):
    grid = Grid(tmp_path / "rows.jsonl", tmp_path / "work", data=str(words), device="cpu", seconds=-1)
    grid.fill([run()])
    assert not grid.path.exists()


def test_no_run_is_started_that_would_end_too_late(grid, monkeypatch):
    monkeypatch.setattr(room, "STARTING", 1.0)
    runs = [run("long", until="80 steps"), run("middle", until="40 steps"), run("short")]
    assert grid._next(list(runs), math.inf) is runs[0]
    assert grid._next(list(runs), 1e9) is runs[2]  # nothing is known: the one that will tell soonest
    assert grid._next(list(runs), 0.0) is None
    grid.rows["x"] = {"jobs": 1, "tokens": 320, "seconds": 10.0, "tokens_per_second": 50.0}
    for left, expected in ((82, 0), (80, 1), (42, 1), (10, 2), (8, None)):
        waiting = list(runs)
        found = grid._next(waiting, left)
        assert found is (None if expected is None else runs[expected])
        assert len(waiting) == (3 if expected is None else 2)


def test_what_is_wanted_may_follow_from_what_was_found(grid):
    asked = []

    def wanted():
        asked.append(set(grid.rows))
        first, second = run("a"), run("b")
        return [first, second] if first.key in grid.rows else [first]

    grid.fill(wanted)
    assert [row["name"] for row in read_lines(grid.path)] == ["a", "b"]
    assert len(asked[-1]) == 2


def test_what_it_will_cost(grid, monkeypatch):
    runs = [run(), run("b", until="4 steps")]
    monkeypatch.setattr(grid, "_probe", lambda first: 64.0)
    assert grid.estimate(runs) == Estimate(2, 12 * 32, 12 * 32 / 64)
    assert grid.estimate(runs, speed=32.0).seconds == 12
    assert grid.estimate(runs, probe=False).seconds is None
    grid.rows["x"] = {"jobs": 1, "tokens": 100, "seconds": 10.0, "tokens_per_second": 50.0}
    assert grid.estimate(runs, speed=32.0).seconds == pytest.approx(12 * 32 / 10)  # by what was measured
    grid.jobs = 2
    assert grid.estimate(runs).seconds == pytest.approx(8 * 32 / 10)  # the longest run
    assert str(grid.estimate([])) == "nothing to run"
    assert str(Estimate(2, 384, 90.0)) == "2 runs, 384 tokens, about 90 s"
    assert [duration(s) for s in (5, 600, 36000, 864000)] == ["5 s", "10 min", "10 h", "10.0 days"]


def test_a_probe_measures_and_leaves_nothing(grid):
    scheduled = {"name": "AdamW", "lr": 0.01, "warmup_steps": 2, "schedule": "cosine", "horizon": 8}
    found = grid.estimate([run(optimizer=scheduled)])
    assert found.seconds > 0
    assert not grid.path.exists()
    assert list(grid.work.iterdir()) == []


def test_a_grid_from_a_file(tmp_path):
    file = tmp_path / "grid.toml"
    file.write_text(
        'seeds = [0, 1]\n[base]\npreset = "demo"\nuntil = "8 steps"\n[base.optimizer]\nlr = 0.5\n'
        "[runs]\nplain = {}\nother = { optimizer = { momentum = 0.7 } }\n"
    )
    runs = read_grid(file)
    assert [(r.name, r.seed) for r in runs] == [("plain", 0), ("other", 0), ("plain", 1), ("other", 1)]
    assert (runs[1].config.optimizer.lr, runs[1].config.optimizer.momentum) == (0.5, 0.7)
    assert runs[1].config.model.width == 96
    assert runs[1].steps == 8
    file.write_text("seeds = [0]\n[base]\n")
    with pytest.raises(UserError, match="runs is missing"):
        read_grid(file)
    with pytest.raises(UserError, match="needs '600 steps'"):
        run(until="2 h").steps  # noqa: B018


def test_thinning_keeps_the_last():
    rows = [{"step": i} for i in range(1, 101)]
    assert [r["step"] for r in thin(rows, 4)] == [25, 50, 75, 100]
    assert thin(rows[:3], 10) == rows[:3]
    assert thin([], 10) == []
    assert math.isclose(rounded({"a": [1], "b": 1 / 3})["b"], 0.333333)
