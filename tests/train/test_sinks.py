"""What reaches TensorBoard, trackio and wandb, and what happens when they fail."""

from __future__ import annotations

import json
import math
import os
import sqlite3
import subprocess
import sys
import warnings
from contextlib import closing

import pytest

from anytime.train import sinks
from anytime.train.errors import UserError
from anytime.train.sinks import open_sinks, scalars

ROWS = [
    {"kind": "start", "step": 0, "seconds": 0.0, "parameters": 10},
    *({"kind": "step", "step": n, "tokens": 10 * n, "loss": 5.0 - n, "lr": 0.01} for n in (1, 2, 3)),
    {"kind": "average", "step": 3, "tokens": 30, "c": 0.5, "beta": 0.9, "distance": 2.0},
    {"kind": "speed", "step": 3, "tokens": 30, "seconds": 1.5, "tokens_per_second": 20.0},
    {"kind": "eval", "step": 3, "tokens": 30, "loss": 2.5, "perplexity": 12.2, "sequence": "x"},
]
# Killed after step 3, the run goes on from step 2.
RESUMED = [
    {"kind": "start", "step": 2, "seconds": 1.0},
    *({"kind": "step", "step": n, "tokens": 10 * n, "loss": 4.5 - n, "lr": 0.01} for n in (3, 4)),
]


def train(name: str, folder, rows=ROWS) -> None:
    """With no failure let by."""
    folder.mkdir(exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        (sink,) = open_sinks([name], folder, "my run", {"seed": 1, "model": {"width": 8}})
        for row in rows:
            sink(row)
        sink.close()


def test_rows_become_named_numbers():
    assert scalars({"kind": "step", "step": 1, "tokens": 9, "loss": 2, "lr": 0.1, "grad_norm": None, "new": 1}) == {
        "loss/train": 2.0,
        "step/lr": 0.1,
    }
    assert scalars({"kind": "eval", "step": 1, "loss": 2.0, "bits_per_byte": 0.9}) == {
        "loss/x": 2.0,
        "eval/bits_per_byte": 0.9,
    }
    assert scalars({"kind": "eval", "step": 1, "loss": 2.0, "sequence": "z"}) == {"loss/z": 2.0}
    assert scalars({"kind": "step", "step": 1, "loss": math.nan}) == {}
    assert scalars({"kind": "start", "step": 0, "parameters": 3}) == {}
    assert scalars({"kind": "something new", "step": 0}) == {}


def test_tensorboard_holds_the_run(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def read(name):
        events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
        events.Reload()
        return [(event.step, event.value) for event in events.Scalars(name)]

    train("tensorboard", tmp_path / "run")
    assert read("loss/train") == [(1, 4.0), (2, 3.0), (3, 2.0)]
    assert read("loss/x") == [(3, 2.5)]
    assert read("average/c") == [(3, 0.5)]
    assert read("speed/tokens_per_second") == [(3, 20.0)]
    train("tensorboard", tmp_path / "run", RESUMED)
    assert read("loss/train") == [(1, 4.0), (2, 3.0), (3, 1.5), (4, 0.5)]


def test_trackio_goes_on_with_the_same_run(tmp_path, monkeypatch):
    """A stand-in: trackio keeps its data in a place chosen when it is imported, which is the user's own."""
    said = []

    class Trackio:
        def init(self, **options):
            said.append(options)
            return self

        def log(self, values, step):
            said.append((step, values))

        def finish(self):
            said.append("finished")

    monkeypatch.setitem(sys.modules, "trackio", Trackio())
    monkeypatch.delenv("TRACKIO_PROJECT", raising=False)
    train("trackio", tmp_path / "run")
    train("trackio", tmp_path / "run", RESUMED)
    train("trackio", tmp_path / "other")
    opened = [words for words in said if isinstance(words, dict)]
    assert [(o["project"], o["resume"], o["config"]["seed"]) for o in opened] == [("anytime", "allow", 1)] * 3
    assert opened[0]["name"] == opened[1]["name"] != opened[2]["name"]
    assert opened[0]["name"].startswith("my run-")
    assert said[1] == (1, {"loss/train": 4.0, "step/lr": 0.01})
    assert said.count("finished") == 3


def test_trackio_itself_takes_the_rows(tmp_path):
    """The real package, in a process of its own, on a folder of its own."""
    pytest.importorskip("trackio")
    code = f"""
import json, warnings
from pathlib import Path
from anytime.train.sinks import open_sinks
warnings.simplefilter("error", RuntimeWarning)
for rows in json.loads({json.dumps(json.dumps([ROWS, RESUMED]))}):
    (sink,) = open_sinks(["trackio"], Path({str(tmp_path)!r}), "my run", {{"seed": 1}})
    for row in rows:
        sink(row)
    sink.close()
"""
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    environment.pop("TRACKIO_PROJECT", None)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    name = "my run-" + (tmp_path / "trackio.id").read_text().strip()
    with closing(sqlite3.connect(tmp_path / "trackio" / "anytime.db")) as data:
        kept = data.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert {run for run, _, _ in kept} == {name}
    rows = [(step, json.loads(text)) for _, step, text in kept]
    losses = [(step, values["loss/train"]) for step, values in rows if "loss/train" in values]
    assert losses == [(1, 4.0), (2, 3.0), (3, 2.0), (3, 1.5), (4, 0.5)]


def test_wandb_offline_goes_on_with_the_same_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    train("wandb", tmp_path / "run")
    train("wandb", tmp_path / "run", RESUMED)
    kept = (tmp_path / "run" / "wandb.id").read_text().strip()
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert [path.name for path in files] in ([f"run-{kept}.wandb"] * 2, [f"run-{kept}.wandb"])  # one in the same second
    content = b"".join(path.read_bytes() for path in files)
    assert all(word in content for word in (b"loss/train", b"loss/x", b"average/beta", b"my run", b"width"))


def test_wandb_is_told_our_own_step(tmp_path, monkeypatch):
    said = []

    class Wandb:
        def Settings(self, **options):
            return options

        def init(self, **options):
            said.append(options)
            return self

        def define_metric(self, name, **options):
            said.append((name, options))

        def log(self, values):
            said.append(values)

        def finish(self):
            said.append("finished")

    monkeypatch.setitem(sys.modules, "wandb", Wandb())
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    train("wandb", tmp_path / "run")
    assert (said[0]["project"], said[0]["name"], said[0]["resume"]) == ("mine", "my run", "allow")
    assert ("*", {"step_metric": "step"}) in said
    assert {"step": 3, "loss/x": 2.5, "eval/perplexity": 12.2} in said
    assert said[-1] == "finished"


def test_an_unknown_name_gets_the_nearest(tmp_path):
    with pytest.raises(UserError, match=r"no sink 'tensorbord'; did you mean 'tensorboard'\?"):
        open_sinks(["wandb", "tensorbord"], tmp_path, "run", {})
    with pytest.raises(UserError, match="known: tensorboard, trackio, wandb"):
        open_sinks(["§"], tmp_path, "run", {})


@pytest.mark.parametrize("name", sinks.SINKS)
def test_a_missing_package_is_named_with_its_extra(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, sinks.SINKS[name].module, None)
    with pytest.raises(UserError, match=rf'pip install "anytime-optim\[{name}\]"'):
        open_sinks([name], tmp_path, "run", {})


def test_each_name_opens_one_sink(tmp_path):
    assert open_sinks([], tmp_path, "run", {}) == []
    assert len(open_sinks(["tensorboard", "tensorboard"], tmp_path, "run", {})) == 1
    assert list(tmp_path.iterdir()) == []  # nothing is written before there is a row


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_a_failing_sink_warns_once_and_is_silent_after(where, tmp_path, monkeypatch):
    calls = []

    class Trackio:
        def init(self, **options):
            return self.do("init")

        def log(self, values, step):
            self.do("log")

        def finish(self):
            self.do("finish")

        def do(self, name):
            calls.append(name)
            if name == where:
                raise ConnectionError("the line is cut")
            return self

    monkeypatch.setitem(sys.modules, "trackio", Trackio())
    (sink,) = open_sinks(["trackio"], tmp_path, "run", {})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for row in ROWS:
            sink(row)
        sink.close()
        sink.close()
        sink(ROWS[1])
    assert [str(w.message) for w in caught] == [
        "trackio failed and gets no more rows: ConnectionError: the line is cut"
    ]
    assert calls.count(where) == 1
    assert calls[-1] == where


def test_an_interrupt_goes_through(tmp_path, monkeypatch):
    class Trackio:
        def init(self, **options):
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "trackio", Trackio())
    (sink,) = open_sinks(["trackio"], tmp_path, "run", {})
    with pytest.raises(KeyboardInterrupt):
        sink(ROWS[0])
