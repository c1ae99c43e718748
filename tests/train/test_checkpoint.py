"""Checkpoints: whole or not there, found to be damaged where they are, written while training goes on."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import tempfile
import threading
import zipfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError

from anytime import __version__
from anytime.storage import regions
from anytime.storage.regions import regions_of
from anytime.train import checkpoint
from anytime.train.checkpoint import Snapshot, Writer
from anytime.train.config import Config, merged
from anytime.train.errors import UserError
from anytime.train.tokenizer import BytesTokenizer

FILES = (
    "anytime_tokenizer.json",
    "checksums.json",
    "config.json",
    "index.json",
    "model.safetensors",
    "resume-00000-of-00001.safetensors",
    "state.json",
)


def snapshot(step: int, value: float = 0.0) -> Snapshot:
    texts = {"state.json": json.dumps({"format": 2, "step": step})}
    return Snapshot(step, {"w": torch.full((3,), value)}, regions_of("d", torch.ones(2, 2)), texts, BytesTokenizer())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A checkpoint's folder."""
    return checkpoint.write_checkpoint(tmp_path_factory.mktemp("whole"), snapshot(7))


# ------------------------------------------------------------------------ whole


def test_a_checkpoint_has_its_files_and_their_sums(whole):
    assert whole.name == "step-00000007"
    assert checkpoint.step_of(whole) == 7
    assert checkpoint.damage(whole) is None
    sums = json.loads((whole / "checksums.json").read_text())
    assert {*sums["files"], "checksums.json"} == {path.name for path in whole.iterdir()} == {*FILES} - {"config.json"}
    assert (whole.parent / "latest").read_text() == "step-00000007\n"
    assert sorted(path.name for path in whole.parent.iterdir()) == ["latest", "step-00000007"]


def test_the_files_of_a_run(bench):
    bench.train("run", until="2 steps")
    found = bench.at("run")
    assert {path.name for path in found.iterdir()} == {*FILES}
    state = checkpoint.read_state(found)
    assert state["version"] == __version__
    assert state["commit"] is None or len(state["commit"]) == 40
    assert merged(Config(), state["config"]) == bench.config("run", until="2 steps")
    card = json.loads((found / "config.json").read_text())
    assert (card["step"], card["tokens"], card["version"]) == (2, 128, __version__)
    assert card["model"]["width"] == 32


def test_nothing_in_a_run_is_a_pickle(bench):
    bench.train("run", until="4 steps", prompt="one", eval_every=2)
    files = bench.files("run")
    assert len(files) == 11  # config, metrics, samples, latest and seven of the checkpoint
    for name, content in files.items():
        path = bench.folder / "run" / name
        assert not zipfile.is_zipfile(path), name
        assert not content.startswith((b"\x80", b"PK")), name
        if not name.endswith(".safetensors"):
            content.decode("utf-8")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(st.data())
def test_a_flipped_bit_or_a_missing_end_is_found(whole, data):
    name = data.draw(st.sampled_from([path.name for path in sorted(whole.iterdir())]))
    content = bytearray((whole / name).read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[place:]
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(whole, Path(folder) / "copy")
        (Path(folder) / "copy" / name).write_bytes(content)
        wrong = checkpoint.damage(Path(folder) / "copy")
    if name == "checksums.json":
        try:  # a space that became another, or another format number, leaves the sums what they were
            same = json.loads(content)["files"] == json.loads((whole / name).read_text())["files"]
        except (ValueError, KeyError, TypeError):
            same = False
        assert (wrong is None) == same
    else:
        assert wrong == f"{name} is not what was written"
    assert wrong is None or "\n" not in wrong


@pytest.mark.parametrize("name", [name for name in FILES if name != "config.json"])
def test_a_missing_file_is_found(whole, tmp_path, name):
    copy = shutil.copytree(whole, tmp_path / "copy")
    (copy / name).unlink()
    assert checkpoint.damage(copy) == f"{name} is missing"


@pytest.mark.parametrize("text", ["", "[]", "5", "{}", '{"files": []}', '{"files": {"state.json": 5}}', "null"])
def test_sums_that_are_no_sums(whole, tmp_path, text):
    copy = shutil.copytree(whole, tmp_path / "copy")
    (copy / "checksums.json").write_text(text)
    assert checkpoint.damage(copy) is not None


def damage_file(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "flipped":
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :])
    elif how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()


@pytest.fixture(scope="module")
def resumable(tmp_path_factory, bench_in):
    """A run that stands at step 6 with checkpoints of 4 and 6, and the same run at step 8."""
    made = bench_in(tmp_path_factory.mktemp("resumable"))
    made.train("base", until="6 steps", checkpoint_every=4)
    made.train("whole", until="8 steps", checkpoint_every=4)
    return made


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["flipped", "truncated", "missing", "empty"])
def test_the_checkpoint_before_a_damaged_one_is_used(resumable, bench, name, how):
    for run in ("base", "whole"):
        shutil.copytree(resumable.folder / run, bench.folder / run)
    shutil.move(bench.folder / "base", bench.folder / "run")
    damage_file(bench.at("run", 6) / name, how)
    warnings = []
    bench.train("run", until="8 steps", warn=warnings.append)
    (warning,) = warnings
    assert warning.startswith(f"the checkpoint {bench.at('run', 6)} is damaged: ")
    assert warning.endswith("; the one before it is used")
    assert "\n" not in warning
    assert [row["step"] for row in bench.rows("run", "start")] == [0, 4]
    assert bench.steps("run") == [4, 8]
    assert bench.differences("run", "whole") == []
    assert bench.leftovers("run") == []


def test_damaged_ones_are_passed_over_to_the_newest_that_is_whole(bench):
    bench.train("run", until="8 steps", checkpoint_every=2, keep_last=4)
    (bench.at("run", 8) / "state.json").unlink()
    damage_file(bench.at("run", 6) / "resume-00000-of-00001.safetensors", "flipped")
    bench.at("run").with_name("step-00000099").mkdir()
    bench.at("run").with_name("step-notes").mkdir()
    bench.at("run").with_name("step-00000100").write_text("a file")
    warnings = []
    bench.train("run", until="9 steps", checkpoint_every=2, keep_last=4, warn=warnings.append)
    assert [warning.split(" is damaged")[0][-2:] for warning in warnings] == ["99", "08", "06"]
    assert bench.steps("run") == [4, 6, 8, 9]
    bench.train("whole", until="9 steps")
    assert bench.differences("run", "whole") == []


def test_one_that_was_passed_over_does_not_stay_in_the_way(bench):
    """Killed again right after the resume: the damaged one is gone, and `latest` names one that is there."""
    bench.train("run", until="6 steps")
    damage_file(bench.at("run", 6) / "model.safetensors", "flipped")

    def fall(row):
        raise RuntimeError("fell")

    with pytest.raises(RuntimeError, match="fell"):
        bench.train("run", until="8 steps", listeners=[fall], warn=lambda text: None)
    assert bench.steps("run") == [4]
    assert (bench.folder / "run/checkpoints/latest").read_text() == "step-00000004\n"


def test_no_checkpoint_is_whole(bench, capsys):
    bench.train("run", until="6 steps")
    for step in (4, 6):
        damage_file(bench.at("run", step) / "state.json", "truncated")
    before = bench.files("run")
    assert bench.command("run", "--until", "8 steps") == 1
    said = capsys.readouterr()
    assert said.err == (
        f"error: no checkpoint in {bench.folder / 'run/checkpoints'} is whole: restore one from a backup, or remove "
        "the folder to start over\n"
    )
    assert said.out.count("is damaged: state.json is not what was written") == 2
    after = bench.files("run")
    assert {name: after[name] for name in after if name != "config.toml"} == {
        name: before[name] for name in before if name != "config.toml"
    }


def test_only_an_empty_folder(bench):
    (bench.folder / "run/checkpoints").mkdir(parents=True)
    bench.train("other", until="1 steps")
    shutil.copy(bench.folder / "other/config.toml", bench.folder / "run/config.toml")
    (bench.folder / "run/lock").touch()
    bench.train("run", until="1 steps")
    shutil.rmtree(bench.at("run"))
    (bench.folder / "run/checkpoints/step-00000003").mkdir()
    with pytest.raises(UserError, match="is whole: restore one from a backup"):
        bench.train("run", until="2 steps", warn=lambda text: None)


def test_a_format_of_later(whole, tmp_path):
    copy = shutil.copytree(whole, tmp_path / "copy")
    (copy / "state.json").write_text('{"format": 3}')
    with pytest.raises(UserError, match="has format 3, this version reads up to 2: upgrade anytime"):
        checkpoint.read_state(copy)


def test_tensors_that_cannot_be_read(tmp_path):
    (tmp_path / "no.safetensors").write_bytes(b"no tensors at all")
    for name in ("no.safetensors", "missing.safetensors"):
        with pytest.raises(UserError, match=f"cannot read .*{name}"):
            checkpoint.read_tensors(tmp_path / name)


def test_names_of_tensors_come_back():
    states = {0: {"d": torch.ones(2), "step": torch.tensor(3.0)}, 12: {"a/b": torch.zeros(1)}}
    flat = checkpoint.flatten(states) | checkpoint.as_weights([("layers.0.q", torch.ones(1))])
    assert flat.keys() == {"optimizer/0/d", "optimizer/0/step", "optimizer/12/a/b", "weights/layers.0.q"}
    back = checkpoint.unflatten(flat)
    assert {index: [*state] for index, state in back.items()} == {0: ["d", "step"], 12: ["a/b"]}
    assert [*checkpoint.weights(flat)] == ["layers.0.q"]


def test_copies_are_copies():
    live = {"w": torch.ones(4, requires_grad=True), "t": torch.arange(6.0).reshape(2, 3).t()}
    copies = {name: checkpoint.copy_off(tensor) for name, tensor in live.items()}
    with torch.no_grad():
        live["w"].zero_()
        live["t"].zero_()
    assert copies["w"].tolist() == [1.0] * 4
    assert copies["t"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert copies["t"].is_contiguous()
    assert not copies["w"].requires_grad


# ---------------------------------------------------------------- order of writing


def test_nothing_bears_the_name_before_everything_is_on_disk(tmp_path, monkeypatch):
    """Files and their folder are synced, then renamed, then the folder above is, then `latest` is moved."""
    order = []

    def watch(name, describe):
        plain = getattr(os, name)

        def call(*given, **named):
            order.append((name, describe(*given)))
            return plain(*given, **named)

        monkeypatch.setattr(os, name, call)

    watch("fsync", lambda handle: Path(os.readlink(f"/proc/self/fd/{handle}")).name)
    watch("rename", lambda old, new: Path(new).name)
    watch("replace", lambda old, new: Path(new).name)
    checkpoint.write_checkpoint(tmp_path / "c", snapshot(7))
    names = [f"{call} {what}" for call, what in order if "tokenizer" not in what or call == "fsync"]
    renamed = names.index("rename step-00000007")
    before = {name.removeprefix("fsync ") for name in names[:renamed]}
    assert {*FILES} - {"config.json"} <= before
    assert names[renamed - 1] == "fsync .step-00000007.new"
    assert names[renamed + 1] == "fsync c"
    moved = names.index("replace latest")
    assert moved > renamed
    assert names[moved - 1].startswith("fsync .latest")


def test_a_damaged_one_of_the_same_step_is_replaced(tmp_path):
    found = checkpoint.write_checkpoint(tmp_path, snapshot(7))
    damage_file(found / "state.json", "missing")
    (found / "stray").write_text("of the old one")
    (tmp_path / ".step-00000007.new").mkdir()
    (tmp_path / ".step-00000007.new" / "stray").write_text("of a try before")
    checkpoint.write_checkpoint(tmp_path, snapshot(7))
    assert checkpoint.damage(found) is None
    assert not (found / "stray").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000007"]


def test_half_a_removal_is_no_checkpoint(tmp_path, monkeypatch):
    """Stopped before any file of it is gone: its name is."""
    found = checkpoint.write_checkpoint(tmp_path, snapshot(7))
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda *given, **named: None)
    checkpoint.remove(found)
    assert checkpoint.checkpoints_in(tmp_path) == []
    monkeypatch.undo()
    checkpoint.sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]


def test_what_was_interrupted_is_swept(tmp_path):
    checkpoint.write_checkpoint(tmp_path, snapshot(7))
    for name in (".step-00000009.new", ".step-00000005.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text("half")
    (tmp_path / ".latest.123.tmp").write_text("step-000")
    checkpoint.sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000007"]


# ------------------------------------------------------------------- what is kept


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=10, unique=True).map(sorted),
    st.integers(1, 4),
    st.sets(st.integers(0, 60), max_size=4),
)
def test_the_last_and_the_milestones_are_kept(steps, keep_last, milestones):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for i, step in enumerate(steps):
            (folder / checkpoint.name_of(step)).mkdir()
            checkpoint.prune(folder, keep_last, milestones.__contains__)
            there = [checkpoint.step_of(path) for path in checkpoint.checkpoints_in(folder)]
            expected = {*steps[: i + 1][-keep_last:], *(s for s in steps[: i + 1] if s in milestones)}
            assert there == sorted(expected, reverse=True)
        assert not [path for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"checkpoint_every": 2, "keep_last": 2}, [12, 13]),
        ({"checkpoint_every": 2, "keep_last": 1}, [13]),
        ({"checkpoint_every": 3, "keep_last": 3}, [9, 12, 13]),
        ({"checkpoint_every": 0}, [13]),
        ({"checkpoint_every": 2, "keep_every": 4}, [4, 8, 12, 13]),
        ({"checkpoint_every": 0, "keep_every": 5, "keep_last": 1}, [5, 10, 13]),
        ({"checkpoint_every": 4, "keep_at": (3, 4), "keep_last": 1}, [3, 4, 13]),
        ({"checkpoint_every": 100, "keep_at": (1, 99)}, [1, 13]),
    ],
)
def test_a_run_keeps_what_it_says(bench, changes, expected):
    """In one go and with a stop on the way, which leaves nothing for good."""
    bench.train("run", until="13 steps", **changes)
    assert bench.steps("run") == expected
    assert (bench.folder / "run/checkpoints/latest").read_text() == f"step-{expected[-1]:08d}\n"
    bench.train("parts", until="7 steps", **changes)
    bench.train("parts", until="13 steps", **changes)
    assert bench.steps("parts")[-1] == 13
    assert {*expected} - {*bench.steps("parts")} <= {12, 9}  # the stop counts as one of the last
    for step in expected[:-1]:
        if step in bench.steps("parts"):
            assert bench.differences("run", "parts", step) == []


def test_a_milestone_is_the_run_at_its_step(bench):
    bench.train("run", until="9 steps", keep_at=(2, 5), checkpoint_every=0)
    for step in (2, 5, 9):
        bench.train(f"until-{step}", until=f"{step} steps")
        assert bench.differences("run", f"until-{step}", step) == []


# -------------------------------------------------------------------- asynchrony


def test_training_goes_on_while_a_checkpoint_is_written(bench, monkeypatch):
    """Step 4 is written only once step 7 is done, and is the run at step 4 all the same."""
    plain, done = checkpoint.write_checkpoint, threading.Event()
    waited = []

    def write(folder, made, peers):
        if made.step == 4:
            waited.append(done.wait(60))
        return plain(folder, made, peers)

    def listen(row):
        if row["kind"] == "step" and row["step"] == 7:
            assert not waited
            assert bench.steps("run") == []
            done.set()

    monkeypatch.setattr(checkpoint, "write_checkpoint", write)
    bench.train("run", until="9 steps", keep_last=9, listeners=[listen])
    assert waited == [True]
    monkeypatch.undo()
    assert bench.steps("run") == [4, 8, 9]
    for step in (4, 8, 9):
        bench.train(f"until-{step}", until=f"{step} steps")
        assert bench.differences("run", f"until-{step}", step) == []


def test_one_snapshot_is_written_at_a_time(tmp_path, monkeypatch):
    plain, order = checkpoint.write_checkpoint, []

    def write(folder, made, peers):
        order.append(f"begin {made.step}")
        threading.Event().wait(0.05)
        found = plain(folder, made, peers)
        order.append(f"end {made.step}")
        return found

    monkeypatch.setattr(checkpoint, "write_checkpoint", write)
    writer = Writer(tmp_path, 2, lambda step: False)
    for step in (1, 2, 3):
        assert writer.save(snapshot(step)) is None
    assert writer.wait() is None
    assert order == [f"{what} {step}" for step in (1, 2, 3) for what in ("begin", "end")]
    assert [checkpoint.step_of(path) for path in checkpoint.checkpoints_in(tmp_path)] == [3, 2]


def test_a_failed_write_is_told_once(tmp_path, monkeypatch):
    writer = Writer(tmp_path / "c", 2, lambda step: False)
    monkeypatch.setattr(regions, "save_file", full_disk(OSError))
    assert writer.save(snapshot(1)) is None
    writer._thread.join()
    monkeypatch.undo()
    failed = writer.save(snapshot(2))
    assert isinstance(failed, UserError)
    assert "the checkpoint of step 1 could not be written to" in str(failed)
    assert writer.wait() is None
    assert [checkpoint.step_of(path) for path in checkpoint.checkpoints_in(tmp_path / "c")] == [2]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_of_another_kind_is_no_success(bench, monkeypatch):
    """Nobody may be told that a run is saved when the writer fell, for whatever reason."""

    def fall(tensors, path):
        raise RuntimeError("not of the disk")

    monkeypatch.setattr(checkpoint, "save_file", fall)
    with pytest.raises(Exception, match="not of the disk"):
        bench.train("run", until="2 steps")
    assert bench.leftovers("run") == []


# --------------------------------------------------------------------- full disk


def full_disk(kind):
    """A save_file that writes a half and then finds no room."""

    def save(tensors, path):
        path.write_bytes(b"half of it")
        if kind is OSError:
            raise OSError(errno.ENOSPC, "No space left on device")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    return save


@contextmanager
def no_room(where):
    """No room in the middle of a checkpoint, for the thread that writes it."""
    with pytest.MonkeyPatch.context() as patch:
        if where in (OSError, SafetensorError):
            patch.setattr(checkpoint if where is OSError else regions, "save_file", full_disk(where))
        else:
            place, name = {
                "write_text": (Path, "write_text"),
                "fsync": (os, "fsync"),
                "rename": (os, "rename"),
                "mkdir": (Path, "mkdir"),
                "tokenizer": (BytesTokenizer, "save"),
            }[where]
            plain = getattr(place, name)

            def fail(*given, **named):
                if threading.current_thread().name == "checkpoint":
                    raise OSError(errno.ENOSPC, "No space left on device")
                return plain(*given, **named)

            patch.setattr(place, name, fail)
        yield


PLACES = [OSError, SafetensorError, "write_text", "fsync", "rename", "mkdir", "tokenizer"]


@pytest.mark.parametrize("where", PLACES)
def test_training_goes_on_with_a_full_disk(bench, where):
    """Steps 4 and 6 find no room, 8 does: training ends as if nothing had been."""
    bench.train("run", until="2 steps")
    kept, seen, warnings = bench.content("run", 2), [], []
    disk = no_room(where)

    def listen(row):
        if row["kind"] == "step" and row["step"] == 3:
            disk.__enter__()
        if row["kind"] == "checkpoint" and row["step"] == 6:
            for thread in threading.enumerate():
                if thread.name == "checkpoint":
                    thread.join()
            seen.append((bench.steps("run"), bench.leftovers("run")))
            disk.__exit__(None, None, None)

    bench.train("run", until="8 steps", checkpoint_every=2, listeners=[listen], warn=warnings.append)
    assert seen == [([2], [])]
    assert len(warnings) == 2
    # The second comes with the next save, whose checkpoint may be there by then.
    for step, last, warning in zip((4, 6), ("2", "28"), warnings, strict=True):
        assert warning.startswith(f"the checkpoint of step {step} could not be written to ")
        assert "No space left on device" in warning
        assert re.search(f"the last checkpoint is of step [{last}]; training goes on", warning)
        assert "\n" not in warning
    assert bench.steps("run") == [2, 8]
    assert all(torch.equal(a, b) for a, b in both(kept, bench.content("run", 2)))
    bench.train("whole", until="8 steps")
    assert bench.differences("run", "whole") == []


def both(here, there):
    return [(here[key], there[key]) for key in here if isinstance(here[key], torch.Tensor)]


@pytest.mark.parametrize("where", PLACES)
def test_a_last_checkpoint_that_finds_no_room(bench, capsys, where):
    bench.train("run", until="4 steps")
    with no_room(where):
        assert bench.command("run", "--until", "6 steps") == 1
    said = capsys.readouterr().err
    assert said.startswith("error: the checkpoint of step 6 could not be written to ")
    assert "the last checkpoint is of step 4: make room and run the same command again" in said
    assert said.count("\n") == 1
    assert bench.steps("run") == [4]
    assert bench.leftovers("run") == []
    assert bench.command("run", "--until", "6 steps") == 0
    bench.train("whole", until="6 steps")
    assert bench.differences("run", "whole") == []


def test_no_room_for_the_very_first(bench, capsys):
    with no_room(OSError):
        assert bench.command("run", "--until", "6 steps") == 1
    said = capsys.readouterr()
    assert "there is no checkpoint yet: make room and run the same command again" in said.err
    assert "warning: the checkpoint of step 4 could not be written" in said.out
    assert "there is no checkpoint yet; training goes on" in said.out
    assert bench.command("run", "--until", "6 steps") == 0


@contextmanager
def files_no_larger_than(size):
    """By the system itself: a write beyond the size is cut there, and the next fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_the_system_cuts_short(bench, capsys):
    """The file to resume from does not fit, everything else does."""
    bench.train("run", until="4 steps")
    size = (bench.at("run") / "resume-00000-of-00001.safetensors").stat().st_size
    with files_no_larger_than(size // 2):
        assert bench.command("run", "--until", "9 steps") == 1
    said = capsys.readouterr()
    assert said.out.count("warning: the checkpoint of step 8 could not be written") == 1
    assert said.err.startswith("error: the checkpoint of step 9 could not be written")
    assert said.err.count("\n") == 1
    assert bench.steps("run") == [4]
    assert bench.leftovers("run") == []
    assert bench.command("run", "--until", "9 steps") == 0
    bench.train("whole", until="9 steps")
    assert bench.differences("run", "whole") == []


def test_an_old_one_that_cannot_be_removed(bench, monkeypatch):
    """Said, and no reason to stop; the new one is there."""
    plain = checkpoint.remove

    def stuck(folder):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(checkpoint, "remove", stuck)
    warnings = []
    with pytest.raises(UserError, match=r"old checkpoints in .* could not be removed: .*Permission denied"):
        bench.train("run", until="3 steps", checkpoint_every=1, keep_last=1, warn=warnings.append)
    assert len(warnings) == 1
    assert bench.steps("run") == [1, 2, 3]
    monkeypatch.setattr(checkpoint, "remove", plain)
    bench.train("run", until="4 steps", checkpoint_every=1, keep_last=1)
    assert bench.steps("run") == [4]
