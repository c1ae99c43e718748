"""The folder of a run: lines that are whole, settings that stay, one process at a time, and what is refused."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import os
import re
import resource
import shutil
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anytime import cli
from anytime.optim import sf_spectral
from anytime.train import build, checkpoint, data, runs
from anytime.train.batches import Batches
from anytime.train.config import FILLED, Config, to_toml
from anytime.train.errors import UserError
from anytime.train.runs import Lines, Run, find_checkpoint, read_lines, some, stored_config
from anytime.train.shards import Tokens, write_shard

# ------------------------------------------------------------------------ lines


@pytest.fixture
def lines(tmp_path):
    made = Lines(tmp_path / "metrics.jsonl")
    yield made
    made.close()


def row(step, **more):
    return {"kind": "step", "step": step, **more}


def test_rows_come_back(lines):
    for step in (1, 2):
        lines.add(row(step, loss=float("nan"), text="ünïcode \u2028\x85\n"))
    assert not lines.path.exists()
    assert lines.flush() is None
    assert read_lines(lines.path) == [row(step, loss=None, text="ünïcode \u2028\x85\n") for step in (1, 2)]
    lines.add(row(3, loss=float("-inf"), lr=0.5))
    assert lines.flush(sync=True) is None
    assert read_lines(lines.path)[2:] == [row(3, loss=None, lr=0.5)]


@given(st.dictionaries(st.text(), st.text() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)))
def test_any_row_is_one_line(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("lines") / "metrics.jsonl"
    made = Lines(path)
    made.add({**values, "step": 1})
    made.add({"step": 2})
    made.cut(1)
    assert made.flush() is None
    assert read_lines(path) == [{**values, "step": 1}]
    assert path.read_bytes().count(b"\n") == 1
    made.close()


@pytest.mark.parametrize("step", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("torn", ["", '{"kind": "step", "st', "{", '{"kind": "step", "step": 1', "\ufffd", "5", "null"])
def test_a_cut_keeps_what_is_whole_and_not_past_the_step(lines, step, torn):
    content = [row(1), row(2), {"kind": "eval", "step": 2}, row(3), {"kind": "start", "step": 1}]
    lines.path.write_text("".join(json.dumps(r) + "\n" for r in content) + torn, encoding="utf-8")
    lines.cut(step)
    kept = [] if step is None else [r for r in content if r["step"] <= step]
    assert lines.path.read_text(encoding="utf-8") == "".join(json.dumps(r) + "\n" for r in kept)
    lines.add(row(9))
    lines.flush()
    assert read_lines(lines.path) == [*kept, row(9)]


def test_a_cut_of_bytes_that_are_no_text(lines):
    lines.path.write_bytes(b'{"step": 1}\n\xff\xfe\x00\n{"step": 2}\n{"step": "x"}\n{"ste\xc3')
    lines.cut(5)
    assert lines.path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


def test_a_cut_of_nothing(lines):
    assert read_lines(lines.path) == []
    lines.cut(3)
    assert read_lines(lines.path) == []


def test_torn_lines_are_left_out_when_read(lines):
    lines.path.write_bytes(b'{"step": 1}\n{"step": 2')
    assert read_lines(lines.path) == [{"step": 1}]


def test_a_line_is_whole_or_waits(lines):
    """The system cuts a write short in the middle of a line; nothing of it stays, and later it is there once."""
    lines.add(row(1, text="a" * 80))
    assert lines.flush() is None
    size = lines.path.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 40, hard))
    try:
        lines.add(row(2, text="b" * 80))
        for _ in range(2):
            wrong = lines.flush(sync=True)
            assert isinstance(wrong, OSError)
            assert wrong.errno == errno.EFBIG
            assert lines.path.stat().st_size == size
            lines.add(row(3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    lines.add(row(4))
    assert lines.flush() is None
    assert [r["step"] for r in read_lines(lines.path)] == [1, 2, 3, 3, 4]
    assert lines.path.read_bytes().count(b"\n") == 5


def test_lines_that_cannot_be_opened(tmp_path):
    made = Lines(tmp_path / "missing" / "metrics.jsonl")
    made.add(row(1))
    assert isinstance(made.flush(), FileNotFoundError)
    (tmp_path / "missing").mkdir()
    assert made.flush() is None
    assert read_lines(made.path) == [row(1)]
    made.close()


class Disk:
    """Where files are opened that take the half of a write and then no more, while the disk is full."""

    def __init__(self):
        self.full = False

    def open(self, path, mode="r", **named):
        disk = self

        class Raw(io.FileIO):
            def write(self, data):
                if disk.full and "lock" not in str(path):
                    super().write(bytes(data)[: len(data) // 2])
                    raise OSError(errno.ENOSPC, "No space left on device")
                return super().write(data)

        return io.TextIOWrapper(io.BufferedWriter(Raw(str(path), mode)), **named)


def test_metrics_wait_for_room(bench, monkeypatch):
    disk, warnings, sizes = Disk(), [], []
    monkeypatch.setattr(runs, "open", disk.open, raising=False)
    path = bench.folder / "run/metrics.jsonl"

    def listen(r):
        if r["kind"] == "step":
            disk.full = 3 <= r["step"] < 7
            if r["step"] in (3, 7):
                sizes.append(path.read_bytes())

    bench.train("run", until="9 steps", prompt="one", listeners=[listen], warn=warnings.append)
    assert sizes[0] == sizes[1]
    assert sizes[0].endswith(b"\n")
    assert len(warnings) >= 5  # four rows of speed, and the sample
    for text in warnings:
        assert "No space left on device" in text
        assert "training goes on" in text
        assert "\n" not in text
    bench.train("whole", until="9 steps", prompt="one")
    assert bench.differences("run", "whole") == []
    kinds = [[r["kind"] for r in read_lines(bench.folder / name / "metrics.jsonl")] for name in ("run", "whole")]
    assert kinds[0] == kinds[1]
    samples = [read_lines(bench.folder / name / "samples.jsonl") for name in ("run", "whole")]
    assert samples[0] == samples[1]


def test_metrics_that_never_find_room(bench, capsys, monkeypatch):
    """The model is saved, the command says that something is missing, and the next one writes what it can."""
    disk = Disk()
    monkeypatch.setattr(runs, "open", disk.open, raising=False)
    disk.full = True
    assert bench.command("run", "--until", "3 steps") == 1
    said = capsys.readouterr().err
    assert "No space left on device; the last checkpoint is of step 3: make room and run the same command" in said
    assert said.count("\n") == 1
    assert bench.content("run")["step"] == 3
    assert (bench.folder / "run/metrics.jsonl").read_bytes() == b""
    disk.full = False
    assert bench.command("run", "--until", "5 steps") == 0
    assert [r["step"] for r in bench.rows("run", "step")] == [4, 5]


def test_a_resume_on_a_full_disk(bench, capsys, monkeypatch):
    """Said in a line, with nothing lost."""
    bench.train("run", until="4 steps")
    before = bench.files("run")

    def full(path, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    for module in (runs, checkpoint):
        monkeypatch.setattr(module, "write_atomically", full)
    for until in ("6 steps", "8 steps"):  # the settings change
        assert bench.command("run", "--until", until) == 1
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert "No space left on device" in said
        assert said.count("\n") == 1
        assert bench.files("run") == before


def test_no_room_for_the_data_that_a_run_makes(bench, capsys, monkeypatch):
    def full(path, tokens):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(data, "write_shard", full)
    assert "No space left on device" in refused(bench, capsys, "run", "--until", "2 steps", data={"path": "python"})


# ---------------------------------------------------------------------- settings


def test_settings_are_written_and_come_back(bench):
    changes = {"prompt": 'a "quote" \\ and\ttab\n', "keep_at": (3, 5), "optimizer": {"betas": [0.5, 0.9]}}
    bench.train("run", until="1 steps", **changes)
    assert stored_config(bench.folder / "run") == bench.config("run", until="1 steps", **changes)
    assert stored_config(bench.folder) is None


def test_a_prompt_of_nothing_is_found_at_the_start(bench):
    """Not at the first checkpoint, with the steps up to there lost; bytes have no zero, it ends a document."""
    with pytest.raises(UserError, match="prompt"):
        bench.train("run", until="5 steps", prompt="\0")
    assert bench.rows("run", "step") == []


@pytest.mark.parametrize("prompt", ["😀", "é ü", "\u2028", "\x7f", "\U0001d11e"])
def test_any_prompt_leaves_a_run_that_goes_on(bench, prompt):
    bench.train("run", until="1 steps", prompt=prompt)
    assert stored_config(bench.folder / "run").prompt == prompt
    bench.train("run", until="2 steps", prompt=prompt)


def test_settings_that_may_change_do(bench):
    bench.train("run", until="2 steps")
    changes = {"batch_size": 4, "micro_batch": 2, "eval_every": 1, "keep_last": 5, "on_nan": "skip", "log_every": 3}
    bench.train("run", until="4 steps", **changes)
    assert stored_config(bench.folder / "run") == bench.config("run", until="4 steps", **changes)


@pytest.mark.parametrize("lr", [0.01, 0.05])  # the embeddings' rate is filled in for the second alone
def test_a_run_keeps_the_recipe_that_it_began_with(bench, monkeypatch, lr):
    """Though a later version of the library has another of that name; to ask for that one is an error."""
    optimizer = {"recipe": "anytime", "warmup_steps": 2, "lr": lr}
    bench.train("whole", until="6 steps", optimizer=optimizer)
    bench.train("run", until="2 steps", optimizer=optimizer)
    bench.train("run", until="3 steps", optimizer=optimizer)
    plain = sf_spectral.RECIPES["anytime"]
    other = dataclasses.replace(plain, fill=lambda lr, warmup: plain.fill(lr, warmup) | {"momentum": 0.1})
    monkeypatch.setitem(sf_spectral.RECIPES, "anytime", other)
    with pytest.raises(UserError, match=r"optimizer.momentum: 0.1 was 0.8"):
        bench.train("run", until="6 steps", optimizer=optimizer)
    assert cli.main(["train", "--run", str(bench.folder / "run"), "--until", "6 steps"]) == 0
    assert bench.differences("run", "whole") == []


@pytest.mark.parametrize("lacks", ["everything", "the warmup"])
def test_a_run_whose_settings_did_not_keep_its_recipe(bench, monkeypatch, lacks):
    """Those of earlier versions: its checkpoint tells, not the recipe of today."""
    optimizer = {"recipe": "anytime", "lr": 0.05, "adam_lr": 0.05, "rate_fall": 0.0, "warmup_steps": 3, "momentum": 0.7}
    optimizer |= {"schedule": "linear", "horizon": 9}  # so that the groups' rates are others
    bench.train("whole", until="6 steps", optimizer=optimizer)
    bench.train("run", until="2 steps", optimizer=optimizer)
    path = bench.folder / "run/config.toml"
    filled = FILLED if lacks == "everything" else ()
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line for line in lines if line.split(" = ")[0] not in (*filled, "warmup_steps")))
    state = bench.folder / "run/checkpoints/step-00000002/state.json"
    assert '"rate_fall": 0.0' in state.read_text()
    if lacks == "everything":
        assert stored_config(bench.folder / "run").optimizer.rate_fall == 0.0
    assert cli.main(["train", "--run", str(bench.folder / "run"), "--until", "6 steps"]) == 0
    assert bench.differences("run", "whole") == []


def test_a_run_whose_settings_have_no_rate_goes_on_at_what_was_every_recipes(bench):
    """Its groups may hold what a schedule had made of it."""
    optimizer = {"recipe": "anytime", "lr": 0.008, "warmup_steps": 1}
    bench.train("whole", until="6 steps", optimizer={**optimizer, "schedule": "linear", "horizon": 9})
    bench.train("run", until="3 steps", optimizer={**optimizer, "schedule": "linear", "horizon": 9})
    path = bench.folder / "run/config.toml"
    path.write_text("".join(line for line in path.read_text().splitlines(True) if not line.startswith("lr = ")))
    assert cli.main(["train", "--run", str(bench.folder / "run"), "--until", "6 steps"]) == 0
    assert bench.differences("run", "whole") == []


def test_a_run_without_a_checkpoint_may_have_another_rate(bench):
    """And then what its recipe fills in from the rate."""
    folder = bench.folder / "run"
    optimizer = {"recipe": "anytime", "warmup_steps": 2000, "lr": 0.5, "momentum": 0.7}
    bench.train("run", until="1 steps", optimizer=optimizer)
    shutil.rmtree(folder / "checkpoints")
    arguments = ["--run", str(folder), "--optimizer.lr", "0.02", "--optimizer.warmup-steps", "200"]
    found = cli._asked([*arguments, "--until", "2 steps"]).optimizer
    assert (found.lr, found.warmup_steps, found.momentum) == (0.02, 200, 0.7)
    settled = build.with_recipe(Config(optimizer=found)).optimizer
    assert (settled.weight_decay, settled.decay_fading, settled.rate_fall_start) == (0.5, 200, 200)


@pytest.mark.parametrize(
    ("said", "warmup"),
    [(["--optimizer.warmup-steps", "500"], 500), (["--preset", "demo"], 10), ([], 10), (["--preset", "30M"], 20)],
)
def test_a_run_without_a_checkpoint_keeps_its_warmup(bench, said, warmup):
    """The same command again, or the folder alone."""
    folder = bench.folder / "run"
    begin = ["--run", str(folder), *said, "--optimizer.recipe", "anytime", "--until", "1 steps"]
    first = build.settled(cli._asked([*begin]))
    folder.mkdir()
    (folder / "config.toml").write_text(to_toml(first))
    (folder / "lock").touch()
    for again in (begin, ["--run", str(folder), "--until", "1 steps"]):
        found = build.settled(cli._asked([*again])).optimizer
        assert found == first.optimizer
        assert (found.warmup_steps, found.decay_fading) == (warmup, max(warmup, 100))


def test_the_command_remembers_the_settings(bench, capsys):
    """The folder alone is enough to go on."""
    bench.train("run", until="2 steps", checkpoint_every=3)
    assert cli.main(["train", "--run", str(bench.folder / "run"), "--until", "4 steps"]) == 0
    bench.train("whole", until="4 steps", checkpoint_every=3)
    assert bench.differences("run", "whole") == []
    assert bench.steps("run") == [2, 3, 4][-2:]


def test_settings_of_a_run_that_cannot_be_read(bench, capsys):
    bench.train("run", until="2 steps")
    (bench.folder / "run/config.toml").write_text("batch_size = 'tw")
    before = bench.files("run")
    assert bench.command("run", "--until", "4 steps") == 1
    said = capsys.readouterr().err
    assert "run/config.toml is not TOML" in said
    assert said.count("\n") == 1
    assert bench.files("run") == before


# ------------------------------------------------------------------------ folders


def test_a_folder_that_is_not_a_run(bench, capsys):
    folder = bench.folder / "run"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    assert bench.command("run", "--until", "2 steps") == 1
    said = capsys.readouterr().err
    assert said == f"error: {folder} is not a run's (thesis.txt): choose another --run\n"
    assert bench.files("run") == {"thesis.txt": b"years of work"}


@pytest.mark.parametrize("left", [(), ("lock",), ("lock", ".config.toml.123.tmp")])
def test_a_folder_that_a_start_was_killed_in(bench, left):
    (bench.folder / "run").mkdir()
    for name in left:
        (bench.folder / "run" / name).write_text("")
    bench.train("run", until="2 steps")
    assert bench.leftovers("run") == []


@pytest.mark.parametrize("name", ["file", "file/run", "file/deep/run"])
def test_a_folder_that_cannot_be(bench, capsys, name):
    (bench.folder / "file").write_text("not a folder")
    assert bench.command("run", "--until", "2 steps", "--run", str(bench.folder / name)) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: cannot write to the run's folder {bench.folder / name}: ")
    assert said.count("\n") == 1
    assert (bench.folder / "file").read_text() == "not a folder"


@pytest.mark.parametrize("call", ["mkdir", "open", "replace"])
def test_a_folder_without_permission(bench, capsys, monkeypatch, call):
    def deny(*given, **named):
        raise PermissionError(errno.EACCES, "Permission denied")

    arguments = bench.arguments("run", "--until", "2 steps")
    if call == "open":
        monkeypatch.setattr(runs, "open", deny, raising=False)
    else:
        monkeypatch.setattr(os, call, deny)
    assert cli.main(arguments) == 1
    monkeypatch.undo()
    said = capsys.readouterr().err
    assert said == f"error: cannot write to the run's folder {bench.folder / 'run'}: Permission denied\n"


def test_a_lock_is_for_one_process_and_ends_with_it(bench):
    with Run(bench.config("run")) as run:
        run.begin()
        with pytest.raises(UserError, match="another process trains in"):
            Run(bench.config("run"))
        code = f"""
import anytime.train.runs as runs
from anytime.train.config import Config, merged, read_toml
from pathlib import Path
try:
    runs.Run(merged(Config(), read_toml(Path({str(bench.folder / "run/config.toml")!r}))))
except runs.UserError as wrong:
    print(wrong)
"""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
        assert done.stdout.startswith(f"another process trains in {bench.folder / 'run'}")
    with Run(bench.config("run")):
        pass


def test_the_lock_is_given_back_when_the_folder_is_refused(bench):
    bench.train("run", until="1 steps")
    held = []  # with them what they came from
    for _ in range(2):
        with pytest.raises(UserError, match="holds a run with other settings") as caught:
            Run(bench.config("run", seed=5))
        held.append(caught)
    bench.train("run", until="2 steps")


def test_what_a_kill_left_is_removed_at_the_next_start(bench):
    bench.train("run", until="2 steps")
    folder = bench.folder / "run"
    (folder / ".metrics.jsonl.77.tmp").write_text("half")
    (folder / "checkpoints/.latest.77.tmp").write_text("half")
    (folder / "checkpoints/.step-00000004.new").mkdir()
    (folder / "checkpoints/.step-00000001.old").mkdir()
    (folder / "checkpoints/.step-00000001.old/state.json").write_text("half")
    with Run(bench.config("run")):
        assert bench.leftovers("run") == []
    assert bench.steps("run") == [2]


def test_python_as_data_is_made_once(bench, capsys):
    """Kept with the run; what a kill left of it is written over."""
    data = bench.folder / "run/data"
    bench.train("run", until="1 steps")
    data.mkdir()
    (data / "train-000000.bin").write_bytes(b"half")
    (data / ".train-000000.bin.77.tmp").write_bytes(b"half")
    shutil.rmtree(bench.folder / "run/checkpoints")
    result = bench.train("run", until="2 steps", eval_every=1, data={"path": "python"})
    assert result.evaluation.bits_per_byte > 0
    times = {path.name: path.stat().st_mtime_ns for path in data.iterdir()}
    assert times.keys() == {"train-000000.bin", "val-000000.bin", "anytime_tokenizer.json"}
    bench.train("run", until="3 steps", data={"path": "python"})
    assert {path.name: path.stat().st_mtime_ns for path in data.iterdir()} == times


# ---------------------------------------------------------------------- milestones


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({}, set()),
        ({"keep_every": 3}, {0, 3, 6, 9}),
        ({"keep_at": (1, 6)}, {1, 6}),
        ({"keep_every": 5, "keep_at": (2,)}, {0, 2, 5}),
    ],
)
def test_milestones(bench, changes, steps):
    with Run(bench.config("run", **changes)) as run:
        assert {step for step in range(10) if run.milestone(step)} == steps


# ----------------------------------------------------------------- find a checkpoint


def test_a_checkpoint_is_found(bench):
    bench.train("run", until="6 steps", checkpoint_every=2, keep_last=3)
    folder = bench.folder / "run"
    assert find_checkpoint(folder) == bench.at("run", 6)
    assert find_checkpoint(folder, 2) == bench.at("run", 2)
    assert find_checkpoint(bench.at("run", 4)) == bench.at("run", 4)
    (bench.at("run", 6) / "config.json").write_text("{}")
    assert find_checkpoint(folder) == bench.at("run", 4)
    with pytest.raises(UserError, match=r"step-00000006 is damaged: config.json is not what was written$"):
        find_checkpoint(folder, 6)
    with pytest.raises(UserError, match=r"step-00000006 is damaged: .*; use another of the run"):
        find_checkpoint(bench.at("run", 6))
    with pytest.raises(UserError, match="keeps no step 3; it keeps 2, 4, 6"):
        find_checkpoint(folder, 3)
    with pytest.raises(UserError, match="is one model, it has no step to choose"):
        find_checkpoint(bench.at("run", 4), 4)
    with pytest.raises(UserError, match="there is no run or model at"):
        find_checkpoint(bench.folder / "nowhere")
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(UserError, match="has no checkpoint yet"):
        find_checkpoint(folder)


def test_some_numbers():
    assert some([1, 2, 3]) == "1, 2, 3"
    assert some(range(8)) == "0, 1, 2, 3, 4, 5, 6, 7"
    assert some(range(100)) == "0, 1, 2, 3, 4, …, 98, 99"


def test_the_origin_is_a_version_and_a_commit(monkeypatch):
    found = runs.origin()
    assert found.keys() == {"version", "commit"}
    runs.origin.cache_clear()
    monkeypatch.setenv("PATH", "")
    try:
        assert runs.origin() == {"version": found["version"], "commit": None}
    finally:
        runs.origin.cache_clear()


# --------------------------------------------------------------------- mistakes


def refused(bench, capsys, name, *more, **changes):
    """The one line that the command says, having exited with 1."""
    assert bench.command(name, *more, **changes) == 1
    said = capsys.readouterr()
    assert said.err.startswith("error: ")
    assert said.err.endswith("\n")
    assert said.err.count("\n") == 1, said.err
    return said.err


def other_data(folder, tokens, *, name="train-000000.bin", **named):
    folder.mkdir(exist_ok=True)
    write_shard(folder / name, np.asarray(tokens, np.uint32 if named.get("wide") else np.uint16), **named)
    write_shard(folder / "val-000000.bin", np.full(400, 65, np.uint16))
    return str(folder)


def lying(folder):
    path = other_data(folder, np.full(4000, 65))
    content = (folder / "train-000000.bin").read_bytes()
    (folder / "train-000000.bin").write_bytes(content[:-100])
    return path


def foreign(folder):
    path = other_data(folder, np.full(4000, 65))
    (folder / "train-000000.bin").write_bytes(b"%PDF-1.7 this is no shard" * 3)
    return path


def empty(folder):
    path = other_data(folder, np.full(4000, 65))
    (folder / "train-000000.bin").write_bytes(b"")
    return path


def without(folder):
    folder.mkdir()
    (folder / "notes.txt").write_text("nothing here")
    return str(folder)


DATA = [
    (lambda folder: str(folder), r"there is no data at .*bad: make it with `anytime data"),
    (lambda folder: f"{folder}/*.bin", r"bad/\*.bin does not exist"),
    (without, r"bad has no train tokens .*it has: notes.txt"),
    (lying, r"train-000000.bin: the header says 4000 tokens, the file has 3950"),
    (foreign, r"train-000000.bin has no header and 75 bytes, an odd number"),
    (empty, r"train-000000.bin is empty"),
    (lambda folder: other_data(folder, np.full(4000, 300)), r"train-000000.bin has token 300 at position .* is 256"),
    (lambda folder: other_data(folder, np.full(40, 65)), r"has 40 tokens, too few for context 32"),
    (lambda folder: "", r"data.path is empty"),
]


@pytest.mark.parametrize(("make", "message"), DATA, ids=range(len(DATA)))
def test_bad_data_for_a_new_run(bench, capsys, make, message):
    """Said in a line; with good data the same command then works."""
    path = make(bench.folder / "bad")
    said = refused(bench, capsys, "run", "--until", "4 steps", data={"path": path})
    assert re.search(message, said)
    assert bench.command("run", "--until", "4 steps") == 0
    bench.train("whole", until="4 steps")
    assert bench.differences("run", "whole") == []


@pytest.mark.parametrize(("make", "message"), DATA, ids=range(len(DATA)))
def test_bad_data_under_a_run(bench, capsys, make, message):
    """The run is not harmed: without the bad path it goes on."""
    bench.train("run", until="4 steps", checkpoint_every=2)
    path = make(bench.folder / "bad")
    said = refused(bench, capsys, "run", "--until", "6 steps", data={"path": path})
    assert re.search(message, said) or "are not those that the run" in said
    assert bench.steps("run") == [2, 4]
    assert cli.main(["train", "--run", str(bench.folder / "run"), "--until", "6 steps"]) == 0
    bench.train("whole", until="6 steps")
    assert bench.differences("run", "whole") == []


def test_changed_data_under_a_run(bench, capsys):
    mine = bench.folder / "mine"
    shutil.copytree(bench.data, mine)
    bench.train("run", until="4 steps", data={"path": str(mine)})
    before = bench.files("run")
    tokens = Tokens.open(str(mine), "train").gather(np.array([0]), 5000)[0]
    tokens[7] += 1
    write_shard(mine / "train-000000.bin", tokens)
    said = refused(bench, capsys, "run", "--until", "6 steps", data={"path": str(mine)})
    assert "mine are not those that the run" in said
    assert bench.files("run") == before
    # Where the tokens lie does not matter.
    bench.train("run", until="6 steps")
    bench.train("whole", until="6 steps")
    assert bench.differences("run", "whole") == []


def test_a_bad_token_in_mid_run(bench, capsys):
    """Training stops where it comes up, in a line, and goes on from the checkpoint with the token mended."""
    tokens = Tokens.open(str(bench.data), "train").gather(np.array([0]), 12000)[0]
    mine = bench.folder / "mine"
    bad = tokens.copy()
    other_data(mine, tokens)
    starts = Batches(Tokens.open(str(mine), "train"), 32, 0).starts(0, 16).tolist()
    place = starts[13] + 5
    assert place >= 1024
    assert not any(start <= place <= start + 32 for start in starts[:12])
    bad[place] = 999
    other_data(mine, bad)
    said = refused(bench, capsys, "run", "--until", "8 steps", data={"path": str(mine)})
    assert f"has token 999 at position {place}" in said
    assert bench.steps("run") == [4]
    other_data(mine, tokens)
    bench.train("run", until="8 steps", data={"path": str(mine)})
    bench.train("whole", until="8 steps", data={"path": str(mine)})
    assert bench.differences("run", "whole") == []


def test_the_hint_on_a_small_vocabulary_works(bench, capsys):
    """What the message says to do must not be refused for the settings of the attempt."""
    said = refused(bench, capsys, "run", "--until", "2 steps", model={"vocabulary": 128})
    assert "--model.vocabulary 256" in said
    assert bench.command("run", "--until", "2 steps", "--model.vocabulary", "256", model={"vocabulary": 128}) == 0


SETTINGS = [
    ("until = 600", "until is 600, must be a text"),
    ("batch_size = 2.5", "batch_size is 2.5, must be a whole number"),
    ("batch_size = true", "batch_size is True, must be a whole number"),
    ("report = 1", "report is 1, must be true or false"),
    ("batch_sise = 2", "there is no setting 'batch_sise'; did you mean 'batch_size'?"),
    ("[model]\nwidht = 64", "there is no setting 'model.widht'; did you mean 'width'?"),
    ("[optimizer]\nlearning_rate = 1", "there is no setting 'optimizer.learning_rate'"),
    ('[optimizer]\nlr = "big"', "optimizer.lr is 'big', must be a number"),
    ("[optimizer]\nbetas = [0.9]", "optimizer.betas is [0.9], must be a list of 2"),
    ("model = 5", "model is 5, must be a table of settings"),
    ('on_nan = "ignore"', "on_nan is 'ignore', must be one of 'stop', 'skip'"),
    ('until = "soon"', "until is 'soon': say '600 steps'"),
    ('until = "1.5 steps"', "the number of steps must be whole"),
    ('until = "1e999 steps"', "until is '1e999 steps'"),
    ('until = "loss 3,2"', "until is 'loss 3,2'"),
    ('until = "-5 steps"', "until is '-5 steps'"),
    ("batch_size = 0", "batch_size is 0, must be at least 1"),
    ("keep_last = 0", "keep_last is 0, must be at least 1"),
    ("batch_size = 5\nmicro_batch = 2", "micro_batch is 2, must divide batch_size, which is 5"),
    ("[model]\nhead = 5", "model.head is 5, must be even and divide"),
    ('[optimizer]\nname = "SFNorMoun"', "did you mean 'SFNorMuon'?"),
    ('[optimizer]\nschedule = "cosine"', "the schedule 'cosine' needs its last step"),
    ("[optimizer]\nhorizon = 9", "optimizer.horizon is given but optimizer.schedule is 'constant'"),
    ("[optimizer]\nlr = -1.0", "optimizer: "),
    ("run = 5", "run is 5, must be a text"),
    ("preset = 5", "preset is 5, must be a text"),
    ('preset = "demmo"', "there is no preset 'demmo'; did you mean 'demo'?"),
    ('device = "gpu"', "device is 'gpu', which is not here"),
    ("this is = not TOML", "is not TOML"),
    ('until = "\udcff"', "cannot read"),
]


@pytest.mark.parametrize(("text", "message"), SETTINGS, ids=[text[:24] for text, _ in SETTINGS])
def test_a_mistake_in_the_settings(bench, capsys, monkeypatch, text, message):
    monkeypatch.chdir(bench.folder)
    file = bench.folder / "mine.toml"
    head = "" if text.startswith(("run", "preset")) else f'run = "{bench.folder / "run"}"\n'
    tail = "" if "[data]" in text else f'\n[data]\npath = "{bench.data}"\n'
    file.write_bytes((head + text + tail).encode("utf-8", "surrogateescape"))
    assert cli.main(["train", str(file)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert message in said
    assert not (bench.folder / "run" / "checkpoints").exists() or bench.steps("run") == []


@pytest.mark.parametrize("until", ["soon", "5", "steps", "5 parsecs", "loss", "NaN steps", "1,5 h h"])
def test_an_end_in_nonsense_on_the_command_line(bench, capsys, until):
    said = refused(bench, capsys, "run", f"--until={until}")
    assert f"until is {until!r}: say '600 steps', '1e9 tokens', '2 h', 'loss 3.2', or nothing" in said
    assert not (bench.folder / "run").exists()


def test_a_file_of_settings_that_is_not_there(bench, capsys):
    assert cli.main(["train", str(bench.folder / "no.toml")]) == 1
    assert capsys.readouterr().err == f"error: there is no file {bench.folder / 'no.toml'}\n"


OTHERS = [
    ({"model": {"width": 64}}, "model.width: 64 was 32"),
    ({"optimizer": {"lr": 0.5}}, "optimizer.lr: 0.5 was 0.01"),
    ({"optimizer": {"name": "SFAdamW"}}, "optimizer.name: SFAdamW was SFNorMuon"),
    ({"seed": 1}, "seed: 1 was 0"),
    ({"data": {"documents": True}}, "data.documents: True was False"),
    ({"optimizer": {"schedule": "cosine", "horizon": 99}}, "optimizer.schedule: cosine was constant"),
    ({"preset": "demo"}, "began from no preset, not 'demo': choose another --run"),
]


@pytest.mark.parametrize(("changes", "message"), OTHERS, ids=range(len(OTHERS)))
def test_a_folder_of_another_run(bench, capsys, changes, message):
    bench.train("run", until="2 steps")
    before = bench.files("run")
    assert message in refused(bench, capsys, "run", "--until", "4 steps", **changes)
    assert bench.files("run") == before


def test_a_schedule_is_not_extended(bench, capsys):
    """Neither by steps nor by tokens; the folder stays as it was, and the run can still be finished."""
    cosine = {"optimizer": {"schedule": "cosine"}}
    bench.train("run", until="6 steps", **cosine)
    before = bench.files("run")
    for until in ("7 steps", "1e6 tokens"):
        assert cli.main(["train", "--run", str(bench.folder / "run"), "--until", until]) == 1, until
        said = capsys.readouterr().err
        assert said.startswith("error: the rate is zero from step 6 on")
        assert said.count("\n") == 1
        assert bench.files("run") == before


def test_a_schedule_by_tokens_ends_there(bench):
    bench.train("run", until="384 tokens", optimizer={"schedule": "linear", "warmup_steps": 0})
    rates = [row["lr"] for row in bench.rows("run", "step")]
    np.testing.assert_allclose(rates, [0.01 * (1 - n / 6) for n in range(6)])


def test_no_validation_tokens(bench, capsys):
    mine = bench.folder / "mine"
    shutil.copytree(bench.data, mine)
    (mine / "val-000000.bin").unlink()
    for changes in ({"eval_every": 2}, {"until": "loss 2"}):
        said = refused(bench, capsys, "run", data={"path": str(mine)}, **changes)
        assert "validation" in said
    bench.train("run", until="2 steps", data={"path": str(mine)})
