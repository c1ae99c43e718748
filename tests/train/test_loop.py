"""A run stopped, killed, resumed and extended is the run that never stopped; what it does when things go wrong."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anytime.train import checkpoint, loop
from anytime.train.batches import Batches
from anytime.train.device import choose_device
from anytime.train.errors import UserError
from anytime.train.loop import Loop, log_spaced
from anytime.train.model import GPT
from anytime.train.runs import read_lines
from anytime.train.shards import Tokens
from anytime.train.tokenizer import BytesTokenizer

posix = pytest.mark.skipif(os.name != "posix", reason="signals and forks")


def before_step(monkeypatch, act):
    """Calls act(loop, number) before every step, with the number the step will have."""
    plain = Loop._train_step

    def step(self, source):
        act(self, self.step + 1)
        plain(self, source)

    monkeypatch.setattr(Loop, "_train_step", step)


def signal_at(step, *numbers):
    """A listener that sends signals when the row of a step comes."""

    def listen(row):
        if row["kind"] == "step" and row["step"] == step:
            for number in numbers:
                signal.raise_signal(number)

    return listen


@pytest.fixture
def windows(monkeypatch):
    """The inputs of every training step of the process so far, in order."""
    seen = []
    plain = GPT.forward

    def forward(self, inputs, *rest, **named):
        if torch.is_grad_enabled():
            seen.extend(inputs.tolist())
        return plain(self, inputs, *rest, **named)

    monkeypatch.setattr(GPT, "forward", forward)
    return seen


@pytest.fixture
def clock(monkeypatch):
    """Time that passes by a second a step and not otherwise."""
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: now.seconds))

    def tick(self, number):
        now.seconds += 1.0

    before_step(monkeypatch, tick)
    return now


def in_order(data, count, seed=0):
    """The first `count` windows as the pure function says."""
    batches = Batches(Tokens.open(str(data), "train"), 32, seed, 256)
    return batches.batch(0, count)[:, :-1].tolist()


# ------------------------------------------------------------ stop and resume


@pytest.mark.parametrize(
    ("stops", "changes"),
    [
        ((1, 2), {}),
        ((5, 11), {"batch_size": 4, "micro_batch": 2, "checkpoint_every": 3}),
        ((7,), {"optimizer": {"name": "SFAdamW", "clip": None}, "checkpoint_every": 0}),
        ((6,), {"optimizer": {"name": "SFMuon", "momentum_dtype": "bfloat16"}}),
        ((4,), {"optimizer": {"name": "SFPlus", "lr": 1.0, "weight_decay": 20.0, "polyak_beta": 0.5}}),
        ((3, 9), {"optimizer": {"name": "NorMuon", "schedule": "cosine", "horizon": 12, "warmup_steps": 2}}),
        ((8,), {"optimizer": {"name": "AdamW", "schedule": "wsd", "horizon": 12}, "seed": 3}),
    ],
)
def test_stopped_and_resumed_is_the_run_that_never_stopped(bench, windows, tiny_data, stops, changes):
    bench.train("whole", until="12 steps", **changes)
    reference = list(windows)
    windows.clear()
    for step in (*stops, 12):
        result = bench.train("parts", until=f"{step} steps", **changes)
        assert (result.step, result.reason) == (step, f"until {step} steps")
    assert bench.differences("parts", "whole") == []
    assert windows == reference
    assert [row["step"] for row in bench.rows("parts", "start")] == [0, *stops]


def test_a_checkpoint_holds_everything_of_the_optimizer(bench):
    """What differences() compares: were a buffer not written, both sides would lack it."""
    bench.train("run", until="4 steps")
    names = {key.rpartition("/")[2] for key in bench.content("run") if "/optimizer/" in key}
    assert names >= {"d", "weight_sum", "beta", "step", "momentum"}
    weights = [key for key in bench.content("run") if "/weights/" in key]
    assert len(weights) == 7


def test_resume_reads_every_tensor_of_the_checkpoint(bench, monkeypatch):
    """Right after a resume the live state is the one that was written."""
    bench.train("run", until="5 steps")
    found = {}

    def look(self, number):
        found.update({region.name: region.tensor for region in self._snapshot().resume})
        raise RuntimeError("seen")

    before_step(monkeypatch, look)
    with pytest.raises(RuntimeError, match="seen"):
        bench.train("run", until="6 steps")
    written = checkpoint.read_resume(bench.at("run", 5))
    assert found.keys() == written.keys()
    for key, tensor in written.items():
        assert torch.equal(found[key], tensor), key
    assert any(tensor.abs().sum() > 0 for key, tensor in written.items() if key.endswith("/d"))


@posix
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("step", [1, 8, 9])
def test_a_signal_saves_and_stops_after_the_step(bench, number, step):
    bench.train("whole", until="12 steps")
    before = signal.getsignal(number)
    result = bench.train("run", until="12 steps", listeners=[signal_at(step, number)])
    assert signal.getsignal(number) == before
    assert (result.step, result.reason) == (step, number.name)
    assert bench.steps("run")[-1] == step
    assert bench.rows("run", "stop")[-1]["reason"] == number.name
    bench.train("run", until="12 steps")
    assert bench.differences("run", "whole") == []


@posix
def test_no_evaluation_is_lost_by_a_signal(bench):
    """The signal comes at a step that is to be evaluated: its row is there after the resume as without the signal."""
    bench.train("whole", until="12 steps", eval_every=4)
    bench.train("run", until="12 steps", eval_every=4, listeners=[signal_at(8, signal.SIGTERM)])
    bench.train("run", until="12 steps", eval_every=4)
    evals = [[(row["step"], row["loss"]) for row in bench.rows(name, "eval")] for name in ("run", "whole")]
    assert evals[0] == evals[1]


@posix
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_shell_is_told_of_the_signal(bench, monkeypatch, capsys, number, status):
    before_step(monkeypatch, lambda self, step: signal.raise_signal(number) if step == 3 else None)
    assert bench.command("run", "--until", "9 steps") == status
    assert bench.steps("run") == [3]
    monkeypatch.undo()
    assert bench.command("run", "--until", "5 steps") == 0
    bench.train("whole", until="5 steps")
    assert bench.differences("run", "whole") == []


@posix
def test_a_second_interrupt_is_not_waited_for(bench, monkeypatch, capsys):
    def twice(self, step):
        if step == 7:
            self.writer.wait()  # of step 4
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            pytest.fail("it went on")

    before_step(monkeypatch, twice)
    assert bench.command("run", "--until", "9 steps") == 130
    assert bench.steps("run") == [4]
    assert bench.content("run")["step"] == 4
    monkeypatch.undo()
    bench.train("run", until="9 steps")
    bench.train("whole", until="9 steps")
    assert bench.differences("run", "whole") == []


@posix
def test_a_second_interrupt_leaves_a_save_that_hangs(bench, monkeypatch, capsys):
    """The first came at step 6, whose checkpoint is never done."""
    plain, hung = checkpoint.write_checkpoint, threading.Event()
    waiting = []

    def write(folder, snapshot, peers):
        if snapshot.step != 6:
            return plain(folder, snapshot, peers)
        waiting.append(snapshot.step)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        assert hung.wait(60)
        return folder

    monkeypatch.setattr(checkpoint, "write_checkpoint", write)

    def first(self, step):
        if step == 6:
            self.writer.wait()  # of step 4
            signal.raise_signal(signal.SIGINT)

    before_step(monkeypatch, first)
    try:
        assert bench.command("run", "--until", "9 steps") == 130
        assert [thread.name for thread in threading.enumerate()].count("checkpoint") == 1  # it was not waited for
    finally:
        hung.set()
    assert waiting == [6]
    assert bench.steps("run") == [4]
    assert bench.content("run")["step"] == 4


# ----------------------------------------------------------------------- kills


def killed_often(bench, start, count, seed, delays, changes):
    """Starts the run, kills it after a while, and so on; then to an end some steps further."""
    chance = random.Random(seed)
    for number in range(count):
        child = start("run")
        wait_for_start(child)
        time.sleep(chance.uniform(*delays))
        child.kill()
        assert "error" not in child.output, f"start {number}: {child.output}"
    last = (bench.steps("run") or [0])[-1] + 5
    warnings = []
    bench.train("run", until=f"{last} steps", warn=warnings.append, **changes)
    assert warnings == []
    assert bench.leftovers("run") == []
    bench.train("whole", until=f"{last} steps", **changes)
    assert bench.differences("run", "whole") == []
    samples = [read_lines(bench.folder / name / "samples.jsonl") for name in ("run", "whole")]
    assert samples[0] == samples[1]


def wait_for_start(child):
    """Until it says that it trains."""
    for _ in range(6000):
        if "started" in child.output or "resumed at step" in child.output:
            return
        time.sleep(0.005)
    pytest.fail(f"it does not start: {child.output}")


@posix
def test_killed_at_any_moment(bench, forks):
    changes = {"checkpoint_every": 2, "prompt": "one"}
    killed_often(bench, lambda name: forks.start(bench.arguments(name, **changes)), 5, 1, (0.0, 0.4), changes)


class Real:
    """The command in a process of its own, from the start of Python on."""

    def __init__(self, arguments, output):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "anytime.cli", *arguments]
        self._output = output
        with output.open("wb") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)

    @property
    def output(self):
        return self._output.read_text(encoding="utf-8", errors="replace")

    def signal(self, number):
        self._process.send_signal(number)

    def status(self):
        return self._process.wait(300)

    def kill(self):
        self.signal(signal.SIGKILL)
        assert self.status() == -signal.SIGKILL


@posix
@pytest.mark.slow
def test_killed_fifty_times(bench):
    """Most of the time a checkpoint is being written."""
    changes, numbers = {"checkpoint_every": 2, "log_every": 2}, itertools.count()

    def start(name):
        return Real(bench.arguments(name, **changes), bench.folder / f"output-{next(numbers)}")

    killed_often(bench, start, 50, 2, (0.0, 0.5), changes)


@posix
@pytest.mark.parametrize("thread", ["checkpoint", "MainThread"])
@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_each_change_of_the_disk(bench, forks, thread, stride):
    """Before the n-th call that changes the disk, and half way through a file, for every n of a life of 2 steps.

    The writer's life begins from step 4, saves 6 and removes 2; that of the main thread begins from nothing.
    """
    changes = {"checkpoint_every": 2, "prompt": "" if thread == "checkpoint" else "one"}
    bench.train("whole", until="8 steps", **changes)
    if thread == "checkpoint":
        bench.train("base", until="4 steps", **changes)
    wrong, kills = [], []
    for n in range(0, 200, stride):
        if thread == "checkpoint":
            shutil.copytree(bench.folder / "base", bench.folder / "run")
        last = 6 if thread == "checkpoint" else 2
        child = forks.start(bench.arguments("run", "--until", f"{last} steps", **changes), thread=thread, kill_at=n)
        if child.status() == 0:
            break
        assert child.status() == -signal.SIGKILL, child.output
        kills.append(child.output.strip().splitlines()[-1])
        bench.train("run", until="8 steps", **changes)
        wrong += [f"{n}, {kills[-1]}: {what}" for what in bench.differences("run", "whole")]
        wrong += [f"{n}, {kills[-1]}: {what} stays" for what in bench.leftovers("run")]
        if (latest := (bench.folder / "run/checkpoints/latest").read_text()) != "step-00000008\n":
            wrong.append(f"{n}, {kills[-1]}: latest is {latest!r}")
        shutil.rmtree(bench.folder / "run")
    assert wrong == []
    assert len(kills) >= 2
    if stride == 1:
        of_a_save = {"save_file", "half of save_file", "write_text", "fsync", "rename", "replace", "rmdir", "unlink"}
        needed = of_a_save if thread == "checkpoint" else {"fsync", "replace", "mkdir"}
        assert {kill.removeprefix("killed at ") for kill in kills} >= needed


@posix
@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_real_command_stops_by_a_signal(bench, number, status):
    child = Real(bench.arguments("run"), bench.folder / "output")
    wait_for_start(child)
    child.signal(number)
    assert child.status() == status, child.output
    step = bench.steps("run")[-1]
    bench.train("run", until=f"{step + 3} steps")
    bench.train("whole", until=f"{step + 3} steps")
    assert bench.differences("run", "whole") == []


@posix
def test_a_second_process_is_refused(bench, forks, capsys):
    """While one trains; once it was killed, the next may."""
    child = forks.start(bench.arguments("run", checkpoint_every=0))
    wait_for_start(child)
    config = (bench.folder / "run/config.toml").read_bytes()
    assert bench.command("run", "--until", "1 steps", "--batch-size", "7") == 1
    said = capsys.readouterr().err
    assert said == f"error: another process trains in {bench.folder / 'run'}: stop it, or choose another --run\n"
    assert (bench.folder / "run/config.toml").read_bytes() == config
    assert bench.steps("run") == []
    child.kill()
    bench.train("run", until="2 steps")


# ------------------------------------------------------------------ extensions


@pytest.mark.parametrize("half", [30, pytest.param(300, marks=pytest.mark.slow)])
def test_extended_to_twice_its_length(bench, half):
    bench.train("whole", until=f"{2 * half} steps", checkpoint_every=half)
    bench.train("run", until=f"{half} steps")
    assert bench.differences("run", "whole", half) == []
    assert bench.train("run", until=f"{2 * half} steps").step == 2 * half
    assert bench.differences("run", "whole") == []


def test_another_batch_size_takes_the_windows_that_come_next(bench, windows, tiny_data):
    for until, size, micro in ((3, 2, 0), (5, 6, 3), (9, 1, 0)):
        bench.train("run", until=f"{until} steps", batch_size=size, micro_batch=micro)
    total = 3 * 2 + 2 * 6 + 4 * 1
    assert windows == in_order(tiny_data, total)
    assert bench.content("run")["position"] == total
    assert [row["tokens"] for row in bench.rows("run", "step")][-1] == total * 32 == bench.content("run")["tokens"]


def test_more_than_an_epoch(bench, windows, tiny_data):
    n = Batches(Tokens.open(str(tiny_data), "train"), 32, 0, 256).sequences_per_epoch
    bench.train("run", until="1 steps", batch_size=n - 2)
    bench.train("run", until="3 steps", batch_size=3)
    assert windows == in_order(tiny_data, n + 4)


def test_another_seed_is_another_order_and_other_weights(bench, windows, tiny_data):
    for seed in (0, 7):
        bench.train(f"seed-{seed}", until="3 steps", seed=seed)
    assert windows == in_order(tiny_data, 6) + in_order(tiny_data, 6, seed=7)
    assert windows[:6] != windows[6:]
    name = "resume/weights/embedding.weight"
    assert not torch.equal(bench.content("seed-0")[name], bench.content("seed-7")[name])


def test_accumulated_gradients_are_those_of_one_batch(bench):
    bench.train("one", until="6 steps", batch_size=8)
    bench.train("four", until="6 steps", batch_size=8, micro_batch=2)
    losses = [[row["loss"] for row in bench.rows(name, "step")] for name in ("one", "four")]
    assert losses[0] != losses[1]  # summed in another order
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
    norms = [[row["grad_norm"] for row in bench.rows(name, "step")] for name in ("one", "four")]
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-3)


@pytest.mark.parametrize(("until", "step"), [("640 tokens", 10), ("641 tokens", 11), ("0.7k tokens", 11)])
def test_until_tokens(bench, until, step):
    bench.train("run", until="64 tokens")
    result = bench.train("run", until=until)
    assert (result.step, result.tokens) == (step, step * 64)
    bench.train("whole", until=f"{step} steps")
    assert bench.differences("run", "whole") == []


def test_until_seconds_of_training_in_all(bench, clock):
    """Restarts included; the time between them, and of what a kill threw away, is not."""
    assert bench.train("run", until="3 s").step == 3
    clock.seconds += 1e6
    assert bench.train("run", until="0.1 min").step == 6

    def fall(row):
        if row["kind"] == "step" and row["step"] == 10:
            raise RuntimeError("fell")

    with pytest.raises(RuntimeError, match="fell"):
        bench.train("run", until="1 h", listeners=[fall])
    assert bench.steps("run")[-1] == 8
    result = bench.train("run", until="12 seconds")
    assert (result.step, result.seconds) == (12, 12.0)
    assert [row["seconds"] for row in bench.rows("run", "speed")] == [float(n) for n in range(1, 13)]
    assert [row["seconds"] for row in bench.rows("run", "start")] == [0.0, 3.0, 6.0, 8.0]


@pytest.mark.parametrize("until", ["", "loss 0.001"])
def test_a_checkpoint_knows_all_the_seconds(bench, clock, until):
    """Also where nobody asked for the time since the last row of speed."""

    def fall(row):
        if row["kind"] == "step" and row["step"] == 8:
            raise RuntimeError("fell")

    with pytest.raises(RuntimeError, match="fell"):
        bench.train("run", until=until, log_every=100, diagnose_every=8, eval_at=(99,), listeners=[fall])
    assert checkpoint.read_state(bench.at("run", 4))["seconds"] == 4.0


@posix
def test_seconds_up_to_a_signal_count(bench, clock):
    bench.train("run", listeners=[signal_at(5, signal.SIGTERM)])
    assert checkpoint.read_state(bench.at("run", 5))["seconds"] == 5.0


def test_until_a_loss_of_the_average(bench):
    bench.train("whole", until="24 steps", eval_every=3)
    losses = {row["step"]: row["loss"] for row in bench.rows("whole", "eval")}
    goal = losses[15]
    first = min(step for step, loss in losses.items() if loss <= goal)
    assert first > 0
    bench.train("run", until=f"{first - 2} steps", eval_every=3)
    for _ in range(2):  # the second time it is there already
        result = bench.train("run", until=f"loss {goal}", eval_every=3)
        assert (result.step, result.reason) == (first, f"until loss {goal}")
        assert result.evaluation.loss <= goal
    assert [row["loss"] for row in bench.rows("run", "step")] == [
        row["loss"] for row in bench.rows("whole", "step") if row["step"] <= first
    ]


def test_until_a_loss_needs_evaluations(bench):
    """Without any it would be met at the start, or never."""
    with pytest.raises(UserError, match="until a loss needs evaluations: give --eval-per-doubling"):
        bench.train("run", until="loss 100")
    result = bench.train("run", until="loss 100", eval_at=(9,))
    assert result.step == 0
    assert [row["step"] for row in bench.rows("run", "eval")] == [0]


def test_too_many_threads(bench):
    with pytest.raises(UserError, match="threads is 100000, must be at most 1024"):
        bench.train("run", until="1 steps", threads=100_000)


def test_a_run_that_is_done_stays_as_it_is(bench):
    bench.train("run", until="5 steps", eval_every=2)
    before = bench.files("run")
    assert bench.train("run", until="5 steps", eval_every=2).step == 5
    assert bench.train("run", until="3 steps", eval_every=2).step == 5
    after = bench.files("run")
    assert {name for name in before if before[name] != after[name]} <= {"metrics.jsonl", "config.toml"}
    assert before.keys() == after.keys()
    assert len(bench.rows("run", "eval")) == 4


# ----------------------------------------------------------------- evaluations


def test_looking_changes_nothing(bench):
    """Evaluations, samples, diagnostics and checkpoints at every step, against none of them."""
    often = {"eval_every": 1, "diagnose_every": 1, "checkpoint_every": 1, "prompt": "one two", "log_every": 1}
    never = {"eval_every": 0, "diagnose_every": 0, "checkpoint_every": 0, "prompt": "", "log_every": 100}
    bench.train("often", until="10 steps", **often)
    bench.train("never", until="10 steps", **never)
    assert bench.differences("often", "never") == []
    assert [row["step"] for row in bench.rows("often", "eval")] == list(range(11))
    assert [row["step"] for row in bench.rows("often", "average")] == list(range(1, 11))
    assert bench.rows("never", "eval") == bench.rows("never", "average") == []


def test_evaluations_are_of_the_average(bench):
    """The loss in the metrics is that of the weights in model.safetensors, which are X."""
    bench.train("run", until="8 steps", eval_every=8)
    card = bench.config("run").model
    model = GPT(card)
    validation = Tokens.open(str(bench.data), "val")
    tensors = checkpoint.read_tensors(bench.at("run") / "model.safetensors")
    resume = checkpoint.read_resume(bench.at("run"))
    losses = []
    for weights in (tensors, checkpoint.weights(resume)):
        model.load_state_dict(weights)
        block = torch.from_numpy(validation.gather(np.arange(8) * 32, 33)).long()
        with torch.no_grad():
            losses.append(model(block[:, :-1], block[:, 1:]).item())
    (_, row) = bench.rows("run", "eval")
    assert row["loss"] == pytest.approx(losses[0], rel=1e-5)
    assert row["loss"] != pytest.approx(losses[1], rel=1e-5)
    assert row["perplexity"] == pytest.approx(np.exp(row["loss"]))
    assert row["bits_per_byte"] == pytest.approx(row["loss"] / np.log(2))
    assert row["sequence"] == "x"


def test_samples_are_of_the_average(bench):
    """The text in samples.jsonl is what model.safetensors writes, drawn with a seed of the step."""
    bench.train("run", until="25 steps", prompt="one ", seed=2, optimizer={"lr": 0.05}, checkpoint_every=0)
    (row,) = read_lines(bench.folder / "run/samples.jsonl")
    tokenizer, texts = BytesTokenizer(), []
    resume = checkpoint.read_resume(bench.at("run"))
    for weights in (checkpoint.read_tensors(bench.at("run") / "model.safetensors"), checkpoint.weights(resume)):
        model = GPT(bench.config("run").model)
        model.load_state_dict(weights)
        tokens = torch.tensor([tokenizer.encode("one ")])
        drawn = model.generate(tokens, 200, temperature=0.8, generator=torch.Generator().manual_seed(2 + 25))
        texts.append(tokenizer.decode(drawn[0, 4:].tolist()))
    assert row == {"step": 25, "prompt": "one ", "text": texts[0]}
    assert texts[0] != texts[1]


@given(st.integers(1, 5), st.integers(0, 5000))
def test_evaluations_are_spaced_evenly_in_the_logarithm(per_doubling, step):
    powers = {round(2 ** (k / per_doubling)) for k in range(13 * per_doubling + 1)}
    assert log_spaced(step, per_doubling) == (step >= 8 and step in powers)
    assert not log_spaced(step, 0)


def test_steps_that_are_evaluated(bench):
    """The first, the last, the log-spaced ones, every so many, and those named."""
    bench.train("run", until="21 steps", eval_per_doubling=2, eval_every=10, eval_at=(3, 13))
    # 2^(6/2) = 8, 2^(7/2) = 11.3, 16
    assert [row["step"] for row in bench.rows("run", "eval")] == [0, 3, 8, 10, 11, 13, 16, 20, 21]


# --------------------------------------------------------- metrics and samples


def test_rows_past_the_checkpoint_are_cut(bench, monkeypatch):
    changes = {"eval_every": 1, "prompt": "one", "diagnose_every": 1}

    def fall(self, number):
        if number == 7:
            self.run.samples.add({"step": 6, "prompt": "one", "text": "not of a checkpoint"})
            self.run.samples.flush()
            raise RuntimeError("fell")

    before_step(monkeypatch, fall)
    with pytest.raises(RuntimeError, match="fell"):
        bench.train("run", until="10 steps", **changes)
    monkeypatch.undo()
    folder = bench.folder / "run"
    assert bench.rows("run", "step")[-1]["step"] == 6
    for name, torn in (("metrics.jsonl", '{"kind": "step", "step": 4, "lo'), ("samples.jsonl", '{"step": 4, "te')):
        with (folder / name).open("a", encoding="utf-8") as file:
            file.write(torn)
    bench.train("run", until="10 steps", **changes)
    bench.train("whole", until="10 steps", **changes)
    assert bench.differences("run", "whole") == []
    for kind, key in (("eval", "loss"), ("average", "distance"), ("checkpoint", "tokens")):
        both = [[(row["step"], row[key]) for row in bench.rows(name, kind)] for name in ("run", "whole")]
        assert both[0] == both[1], kind
    samples = [read_lines(bench.folder / name / "samples.jsonl") for name in ("run", "whole")]
    assert samples[0] == samples[1]
    assert [row["step"] for row in samples[0]] == [4, 8, 10]
    assert all(len(row["text"]) > 0 and row["prompt"] == "one" for row in samples[0])
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == len(read_lines(folder / "metrics.jsonl"))


def test_without_a_checkpoint_it_begins_anew(bench, monkeypatch):
    before_step(monkeypatch, lambda self, number: 1 / 0 if number == 3 else None)
    with pytest.raises(ZeroDivisionError):
        bench.train("run", until="5 steps", eval_every=1)
    assert bench.rows("run", "step")[-1]["step"] == 2
    monkeypatch.undo()
    bench.train("run", until="5 steps")
    bench.train("whole", until="5 steps")
    assert bench.differences("run", "whole") == []
    assert bench.rows("run", "eval") == []


def test_a_checkpoint_never_runs_ahead_of_the_metrics(bench, monkeypatch):
    """When a checkpoint gets its name, the rows and samples up to its step are in their files."""
    plain, seen = checkpoint.Writer.save, []

    def save(self, snapshot):
        failed = plain(self, snapshot)
        self._thread.join()
        rows = [row["step"] for row in bench.rows("run", "step")]
        samples = read_lines(bench.folder / "run/samples.jsonl")
        seen.append((snapshot.step, rows[-1] if rows else None, samples[-1]["step"] if samples else None))
        return failed

    monkeypatch.setattr(checkpoint.Writer, "save", save)
    bench.train("run", until="6 steps", log_every=100, checkpoint_every=2, prompt="one")
    assert seen == [(2, 2, 2), (4, 4, 4), (6, 6, 6)]


def test_rows_say_what_the_documents_say(bench):
    bench.train("run", until="4 steps", eval_every=2, diagnose_every=4, log_every=2)
    keys = {
        "start": "step tokens seconds time version commit device parameters flops_per_token",
        "step": "step tokens loss lr grad_norm",
        "speed": "step tokens seconds tokens_per_second data_wait",
        "average": "step tokens c beta distance rho alpha update_rms",
        "eval": "step tokens seconds loss perplexity bits_per_byte sequence",
        "checkpoint": "step tokens seconds save_seconds",
        "stop": "step tokens seconds reason",
    }
    for kind, names in keys.items():
        rows = bench.rows("run", kind)
        assert rows, kind
        assert all(row.keys() == {"kind", *names.split()} for row in rows), kind
    assert [row["step"] for row in bench.rows("run", "speed")] == [2, 4]
    assert [round(row["lr"], 9) for row in bench.rows("run", "step")] == [0.0025, 0.005, 0.0075, 0.01]
    assert bench.rows("run", "start")[0]["parameters"] == bench.config("run").model.parameters


def test_listeners_hear_every_row(bench):
    heard = []
    bench.train("run", until="4 steps", eval_every=2, listeners=[heard.append])
    assert heard == read_lines(bench.folder / "run/metrics.jsonl")


# ------------------------------------------------------------- NaN, memory, …


def poison(at):
    def act(self, number):
        if number == at:
            with torch.no_grad():
                self.model.embedding.weight.fill_(float("nan"))

    return act


@pytest.mark.parametrize("log_every", [1, 100])
@pytest.mark.parametrize("step", [2, 4, 5, 8, 10])
def test_a_nan_stops_with_the_last_good_checkpoint(bench, monkeypatch, log_every, step):
    """Also where it comes at the step of a checkpoint, or is only read steps later."""
    before_step(monkeypatch, poison(step))
    with pytest.raises(UserError) as caught:
        bench.train("run", until="10 steps", log_every=log_every)
    message, good = str(caught.value), (step - 1) // 4 * 4
    assert "\n" not in message
    assert f"the loss is nan at step {step}: stopped" in message
    assert (f"the last checkpoint is of step {good};" if good else "there is no checkpoint yet") in message
    assert bench.steps("run") == [4, 8][: good // 4]
    monkeypatch.undo()
    bench.train("run", until="10 steps", log_every=log_every)
    bench.train("whole", until="10 steps")
    assert bench.differences("run", "whole") == []


def test_a_nan_by_the_command_line(bench, monkeypatch, capsys):
    before_step(monkeypatch, poison(6))
    assert bench.command("run", "--until", "9 steps") == 1
    said = capsys.readouterr().err
    assert said.startswith("error: the loss is nan at step 6: stopped, the last checkpoint is of step 4;")
    assert said.count("\n") == 1


def spoil_once(monkeypatch, at, value):
    """The loss of the training step number `at` of this process is `value`."""
    plain, calls = GPT.forward, itertools.count(1)

    def forward(self, *given, **named):
        found = plain(self, *given, **named)
        return found * value if torch.is_grad_enabled() and next(calls) == at else found

    monkeypatch.setattr(GPT, "forward", forward)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_nan_may_be_skipped(bench, monkeypatch, value):
    spoil_once(monkeypatch, 5, value)
    assert bench.train("run", until="8 steps", on_nan="skip", checkpoint_every=1, keep_last=8).step == 8
    rows = bench.rows("run", "step")
    assert [row["loss"] is None for row in rows] == [False] * 4 + [True] + [False] * 3
    before, after = bench.content("run", 4), bench.content("run", 5)
    kept = [key for key in before if "/weights/" in key or key.endswith(("/d", "/step", "/weight_sum", "/momentum"))]
    assert kept
    for key in kept:
        assert torch.equal(before[key], after[key]), key
    assert after["groups"][0]["skipped_steps"] == 1
    assert bench.train("run", until="10 steps", on_nan="skip").step == 10


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"batch_size": 8}, "for 8 sequences of 32 at once: try --micro-batch 4;"),
        ({"batch_size": 8, "micro_batch": 2}, "for 2 sequences of 32 at once: try --micro-batch 1;"),
        ({"batch_size": 1}, "for 1 sequences of 32 at once: try --recompute, or a smaller model;"),
    ],
)
@pytest.mark.parametrize("step", [1, 6])
def test_a_full_gpu_is_told_what_to_do(bench, monkeypatch, changes, hint, step):
    def full(self, number):
        if number == step:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has …")

    before_step(monkeypatch, full)
    with pytest.raises(UserError) as caught:
        bench.train("run", until="8 steps", **changes)
    message = str(caught.value)
    assert "there is too little memory" in message
    assert hint in message
    assert "\n" not in message
    assert "None" not in message
    assert ("step 4" in message) == (step == 6)
    monkeypatch.undo()
    bench.train("run", until="8 steps", **changes)
    bench.train("whole", until="8 steps", **changes)
    assert bench.differences("run", "whole") == []


def test_threads_are_those_asked_for(bench):
    before = torch.get_num_threads()
    try:
        bench.train("run", until="1 steps", threads=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_device_that_is_not_here():
    with pytest.raises(UserError, match=r"device is 'gpu', which is not here: "):
        choose_device("gpu")
    with pytest.raises(UserError, match="device is 'hpu', which is not here"):
        choose_device("hpu")
    assert choose_device("cpu").type == "cpu"


def test_the_rate_that_is_told_falls_as_the_optimizers_does(bench):
    """From step 3 on as (2 / (t − 1))^½, after a warmup of two steps."""
    optimizer = {"name": "SFNorMuon", "lr": 0.01, "warmup_steps": 2, "rate_fall": 0.5, "rate_fall_start": 3}
    bench.train("run", until="6 steps", optimizer=optimizer)
    told = [row["lr"] for row in bench.rows("run", "step")]
    assert told == pytest.approx([0.005, 0.01, 0.01, *(0.01 * (2 / t) ** 0.5 for t in (3, 4, 5))])
