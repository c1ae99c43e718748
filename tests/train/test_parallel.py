"""Several processes train what one would: same losses, same files, any of them stopped, killed or at fault."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from anytime import cli
from anytime.train import checkpoint, use
from anytime.train.batches import Batches
from anytime.train.config import Config, merged
from anytime.train.errors import UserError
from anytime.train.parallel import Peers, check_model, mesh_of
from anytime.train.runs import read_lines
from anytime.train.shards import Tokens

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and forks")

MODEL = {"layers": 2, "width": 32, "head": 8}
BASE = {"model": MODEL, "batch_size": 8, "micro_batch": 2, "eval_every": 4, "eval_tokens": 5 * 32, "diagnose_every": 3}
BASE |= {"parallel": {"timeout": 300.0}}

#: Name to (processes, settings).
LAYOUTS = {
    "one": (1, {}),
    "ddp2": (2, {}),
    "ddp4": (4, {}),
    "owners2": (2, {"owners": "state"}),
    "fsdp2": (2, {"shard": 0}),
    "fsdp4": (4, {"shard": 4}),
    "hsdp4": (4, {"shard": 2}),
    "tp2": (2, {"tensor": 2}),
    "tp4": (4, {"tensor": 4}),
    "ddp-tp4": (4, {"tensor": 2}),
    "fsdp-tp4": (4, {"shard": 2, "tensor": 2}),
}

# Imports once and forks the processes of a world for every line of orders, and keeps their store as torchrun does.
# `code` runs first in each of them.
RANKS = """
import json, os, sys
import anytime.cli, anytime.train.display, anytime.train.loop, anytime.train.sinks, tyro
import torch._dynamo, torch.distributed as dist
from anytime.train import parallel
parallel.LAST_WORDS = anytime.cli.LAST_WORDS = 0.2

def child(rank, order):
    with open(f"{order['output']}-{rank}", "ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.chdir(order["folder"])
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": order["world"], "MASTER_PORT": order["port"]}
    os.environ.update({"MASTER_ADDR": "127.0.0.1", **{key: str(value) for key, value in here.items()}})
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    exec(order["code"], {"rank": rank, "__name__": "code"})
    status = anytime.cli.main(order["arguments"])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # the store of the process that forked is not this one's to end

for line in sys.stdin:
    order = json.loads(line)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    order["port"], pids = store.port, []
    for rank in range(order["world"]):
        pids.append(os.fork())
        if pids[-1] == 0:
            try:
                child(rank, order)
            except Exception:
                import traceback
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
    print(json.dumps(pids), flush=True)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)
"""

BEFORE_STEP = """
from anytime.train.loop import Loop
plain = Loop._train_step
def step(self, source):
    act(self, self.step + 1)
    plain(self, source)
Loop._train_step = step
"""


class Job:
    """The processes of one command."""

    def __init__(self, server, output, world):
        self._server, self._output, self._world = server, output, world
        self.pids = json.loads(self._line())
        self._statuses = None

    def _line(self):
        line = self._server.stdout.readline()
        assert line, "the process that forks has ended"
        return line

    def output(self, rank):
        path = Path(f"{self._output}-{rank}")
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    @property
    def said(self):
        """By all together."""
        return "".join(map(self.output, range(self._world)))

    def wait_for(self, text, rank=0):
        for _ in range(6000):
            if text in self.output(rank):
                return
            time.sleep(0.005)
        pytest.fail(f"it does not say {text!r}: {self.said}")

    def statuses(self, timeout=240):
        """How they ended; it is an error if some do not."""
        if self._statuses is None:
            limit = subprocess.Popen(["sh", "-c", f"sleep {timeout}; kill -9 {' '.join(map(str, self.pids))}"])
            self._statuses = json.loads(self._line())
            late = limit.poll() is not None
            limit.kill()
            limit.wait()
            assert not late, f"it did not end: {self.said}"
        return self._statuses


class Ranks:
    def __init__(self, folder):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        self._folder, self._count = folder, 0
        self._server = subprocess.Popen(
            [sys.executable, "-c", RANKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.job = None

    def start(self, world, arguments, code=""):
        if self.job is not None:
            self.job.statuses()
        self._count += 1
        output = self._folder / f"output-{self._count}"
        order = {"world": world, "arguments": arguments, "code": code, "output": str(output)}
        order["folder"] = str(self._folder)
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        self.job = Job(self._server, output, world)
        return self.job

    def close(self):
        self._server.stdin.close()
        self._server.wait()


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    made = Ranks(tmp_path_factory.mktemp("ranks"))
    yield made
    made.close()


def settings(layout, **changes):
    found = {**BASE, **changes}
    return {**found, "parallel": {**BASE["parallel"], **LAYOUTS[layout][1], **changes.get("parallel", {})}}


def start(ranks, bench, name, layout, *more, code="", **changes):
    return ranks.start(LAYOUTS[layout][0], bench.arguments(name, *more, **settings(layout, **changes)), code)


def run(ranks, bench, name, layout, *more, code="", **changes):
    """To its end, which is a good one."""
    job = start(ranks, bench, name, layout, *more, code=code, **changes)
    assert set(job.statuses()) == {0}, job.said
    assert "warning" not in job.said
    assert job.said == job.output(0), "one speaks for all"
    return job


@pytest.fixture(scope="module")
def whole(tmp_path_factory, bench_in):
    """One process's run of 8 steps that never stopped."""
    made = bench_in(tmp_path_factory.mktemp("whole"))
    made.train("run", until="8 steps", **settings("one"))
    return made


def column(bench, name, kind, key):
    return [row[key] for row in bench.rows(name, kind)]


def compare(bench, name, reference, other="run", *, rtol=1e-4):
    """Rows and the last checkpoint of a run against those of one process's, up to rounding."""
    keys = ("step", "loss"), ("step", "grad_norm"), ("eval", "loss"), ("eval", "bits_per_byte"), ("average", "distance")
    for kind, key in (*keys, ("step", "step"), ("step", "lr"), ("eval", "step"), ("average", "alpha")):
        found, wanted = column(bench, name, kind, key), column(reference, other, kind, key)
        np.testing.assert_allclose(found, wanted, rtol=rtol, err_msg=f"{kind} {key}")
    here, there = bench.content(name), reference.content(other)
    assert here.keys() == there.keys()
    for key, value in there.items():
        if not isinstance(value, torch.Tensor):
            assert here[key] == value, key
        elif value.is_floating_point():  # where polar factors of tiny gradients are taken, rounding may show
            torch.testing.assert_close(here[key], value, rtol=0.02, atol=2e-4, msg=key)


# ------------------------------------------------------------------------ equality


@pytest.mark.parametrize(
    "layout",
    ["ddp2", "fsdp2", "tp2", "fsdp-tp4"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in ("ddp4", "owners2", "fsdp4", "hsdp4", "tp4", "ddp-tp4")],
)
def test_several_processes_train_what_one_would(ranks, bench, whole, layout):
    run(ranks, bench, "run", layout, "--until", "8 steps")
    compare(bench, "run", whole)


def test_a_rate_from_the_loss_is_from_everyones(ranks, bench):
    optimizer = {"name": "SFPlus", "lr": 1.0, "clip": 1.0}
    bench.train("one", until="8 steps", **settings("one", optimizer=optimizer))
    run(ranks, bench, "two", "ddp2", "--until", "8 steps", optimizer=optimizer)
    compare(bench, "two", bench, "one")


MODEL_ALONE = """
import json, os, torch, torch.distributed as dist
from torch.distributed.tensor import DTensor
from anytime.train.config import Config, merged
from anytime.train.model import GPT
from anytime.train.parallel import clip_, joined

def stirred(config):
    model = GPT(config.model, recompute=config.recompute).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.empty(p.shape).normal_(std=0.2, generator=generator))
    return model

config = merged(Config(), SETTINGS)
tokens = torch.randint(0, 256, (8, 33), generator=torch.Generator().manual_seed(1))
alone = stirred(config)
expected = alone(tokens[:, :-1], tokens[:, 1:])
expected.backward()
grads = [p.grad.clone() for p in alone.parameters()]
drawn = alone.generate(tokens[:2, :4], 40, generator=torch.Generator().manual_seed(3))
with joined(config) as world:
    model = stirred(config)
    forward = world.spread(model, config, config.compile == "yes")
    assert len([*model.parameters()]) == 6 * config.model.layers + 1
    mine = tokens.chunk(world.readers)[world.reader]
    for number, part in enumerate(mine.chunk(2)):
        with forward.accumulating(last=number == 1):
            loss = forward.loss(part[:, :-1], part[:, 1:]) / 2
            loss.backward()
        total = loss.detach() if number == 0 else total + loss.detach()
    torch.testing.assert_close(world.total(total) / world.readers, expected.detach(), rtol=0, atol=1e-10)
    for p, grad in zip(model.parameters(), grads, strict=True):
        found = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        torch.testing.assert_close(found, grad, rtol=0, atol=1e-10)
    norm = clip_(list(model.parameters()), 0.1, world)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1), rtol=0, atol=1e-10)
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        found = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        torch.testing.assert_close(found, q.grad, rtol=0, atol=1e-10)
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(model.generate(tokens[:2, :4], 40, generator=torch.Generator().manual_seed(3)), drawn)
os._exit(0)
"""


def alone(ranks, bench, layout, **changes):
    values = {**settings(layout, **changes), "run": "none", "device": "cpu"}
    values["model"] = {**MODEL, "vocabulary": 256, "context": 32}
    job = ranks.start(LAYOUTS[layout][0], [], MODEL_ALONE.replace("SETTINGS", repr(values)))
    assert set(job.statuses(300)) == {0}, job.said


@pytest.mark.parametrize(
    "layout", ["fsdp-tp4", *(pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS if name != "fsdp-tp4")]
)
def test_loss_gradients_and_texts_in_double_precision(ranks, bench, layout):
    """Accumulated over two parts."""
    alone(ranks, bench, layout, recompute=layout.startswith("fsdp"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp2", "fsdp2", "tp2", "fsdp-tp4"])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_same_compiled(ranks, bench, layout, recompute):
    alone(ranks, bench, layout, compile="yes", recompute=recompute)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp2", "fsdp2", "tp2"])
def test_a_compiled_run(ranks, bench, whole, layout):
    job = start(ranks, bench, "run", layout, "--until", "8 steps", compile="yes")
    assert job.statuses(600) == [0, 0], job.said  # torch itself has something to say here
    compare(bench, "run", whole)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp2", "fsdp2", "tp2", "fsdp-tp4"])
def test_in_bfloat16(ranks, bench, layout):
    """FSDP moves weights in bfloat16 then, which is the rounding that autocast does."""
    bench.train("one", until="8 steps", **settings("one", precision="bfloat16"))
    run(ranks, bench, "run", layout, "--until", "8 steps", precision="bfloat16")
    for kind in ("step", "eval"):
        np.testing.assert_allclose(column(bench, "run", kind, "loss"), column(bench, "one", kind, "loss"), rtol=5e-3)


def test_the_windows_are_those_of_one_process_in_order(ranks, bench, tiny_data):
    code = """
import json, torch
from anytime.train.model import GPT
plain, seen = GPT.forward, open(f"windows-{rank}", "a")
def forward(self, inputs, *rest, **named):
    if torch.is_grad_enabled():
        seen.write(json.dumps(inputs.tolist()) + "\\n"); seen.flush()
    return plain(self, inputs, *rest, **named)
GPT.forward = forward
"""
    run(ranks, bench, "run", "ddp2", "--until", "3 steps", code=code, eval_every=0)
    shares = [(ranks._folder / f"windows-{rank}").read_text().splitlines() for rank in range(2)]
    lines = [line for step in range(3) for share in shares for line in share[2 * step : 2 * step + 2]]
    wanted = Batches(Tokens.open(str(tiny_data), "train"), 32, 0, 256).batch(0, 24)[:, :-1].tolist()
    assert [window for line in lines for window in json.loads(line)] == wanted


COUNT = """
import json
from collections import Counter
from anytime.train.loop import Loop
plain = Loop._train_step
def step(self, source):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        plain(self, source)
    if self.step == 3 and rank == 0:
        found = Counter(event.name for event in profile.events() if event.name.startswith("gloo:"))
        json.dump(found, open("counted", "w"))
import torch
Loop._train_step = step
"""


@pytest.mark.parametrize("layout", ["ddp2", "fsdp2"])
def test_gradients_travel_once_a_step(ranks, bench, layout):
    """However many parts the batch is cut into; nothing else of the step sums anything over the model."""
    counted = []
    for micro in (4, 1):
        changes = {"micro_batch": micro, "eval_every": 0, "diagnose_every": 0}
        job = start(ranks, bench, f"cut-by-{micro}", layout, "--until", "3 steps", code=COUNT, **changes)
        assert job.statuses() == [0, 0], job.said
        counted.append(json.loads((ranks._folder / "counted").read_text()))
    once, four = ({k: n for k, n in found.items() if "reduce" in k} for found in counted)
    assert once == four
    assert sum(once.values()) > 0


# ------------------------------------------------------------- stop, resume, elsewhere


AGAIN = """
from anytime.train.loop import Loop
plain = Loop._restore
def restore(self):
    plain(self)
    self.saved = None
Loop._restore = restore
"""


@pytest.fixture(scope="module")
def halves(tmp_path_factory, bench_in, ranks):
    """Runs of 4 steps by layout, made when asked for."""
    made, there = bench_in(tmp_path_factory.mktemp("halves")), set()

    def half(layout):
        if layout not in there:
            there.add(layout)
            run(ranks, made, layout, layout, "--until", "4 steps")
        return made

    return half


ALL = ["one", "ddp2", "ddp4", "owners2", "fsdp2", "fsdp4", "tp2", "tp4", "fsdp-tp4"]
QUICK = {("ddp2", "tp2"), ("fsdp2", "one")}


@pytest.mark.parametrize(
    ("before", "after"),
    [(a, b) if (a, b) in QUICK else pytest.param(a, b, marks=pytest.mark.slow) for a in ALL for b in ALL],
)
def test_saved_by_some_and_resumed_by_others(ranks, bench, whole, halves, before, after):
    """What is read is to the bit what was written, and the run ends as the one that never stopped."""
    made = halves(before)
    shutil.copytree(made.folder / before, bench.folder / "run")
    kept = made.content(before)
    run(ranks, bench, "run", after, "--until", "4 steps", code=AGAIN)
    found = bench.content("run")
    assert found.keys() == kept.keys()
    assert [key for key in kept if not same(found[key], kept[key])] == []
    parts = [path.name for path in sorted(bench.at("run").glob("resume-*"))]
    count = LAYOUTS[after][0]
    assert parts == [f"resume-{rank:05d}-of-{count:05d}.safetensors" for rank in range(count)]
    run(ranks, bench, "run", after, "--until", "8 steps")
    compare(bench, "run", whole)


def same(a, b):
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


#: DDP orders its buckets anew after its first step: sums of more than two gradients are then rounded otherwise.
TO_THE_BIT = [layout for layout in ALL if layout != "ddp4"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", TO_THE_BIT)
def test_a_resumed_run_is_to_the_bit_the_one_that_never_stopped(ranks, bench, layout):
    changes = {"prompt": "one"}
    run(ranks, bench, "straight", layout, "--until", "6 steps", **changes)
    for until in (3, 6):
        run(ranks, bench, "parts", layout, "--until", f"{until} steps", **changes)
    assert bench.differences("parts", "straight") == []
    samples = [read_lines(bench.folder / name / "samples.jsonl")[-1] for name in ("parts", "straight")]
    assert samples[0] == samples[1]
    assert bench.leftovers("parts") == []


def test_what_several_made_is_used_by_one(ranks, bench, whole, capsys, halves):
    made = halves("fsdp2")
    folder = str(made.folder / "fsdp2")
    trained = use.load(folder)
    assert trained.card["step"] == 4
    evaluated = column(made, "fsdp2", "eval", "loss")[-1]
    assert use.evaluate_model(trained, count=160).loss == pytest.approx(evaluated, rel=1e-5)
    assert cli.main(["sample", folder, "--prompt", "one", "--count", "5"]) == 0
    assert cli.main(["export", folder, "--to", str(bench.folder / "export")]) == 0
    arguments = ["branch", folder, "--run", str(bench.folder / "branch"), "--until", "8 steps"]
    assert cli.main([*arguments, "--parallel.shard", "1"]) == 0
    capsys.readouterr()
    wanted = column(whole, "run", "step", "loss")[4:]
    np.testing.assert_allclose(column(bench, "branch", "step", "loss"), wanted, rtol=1e-4)


def test_a_checkpoint_of_the_first_format(bench):
    """One file without an index."""
    from safetensors.torch import save_file

    bench.train("run", until="4 steps")
    folder = bench.at("run")
    save_file(checkpoint.read_resume(folder), folder / "resume.safetensors")
    (folder / "resume-00000-of-00001.safetensors").unlink()
    (folder / "index.json").unlink()
    state = json.loads((folder / "state.json").read_text()) | {"format": 1}
    state["config"].pop("parallel")
    (folder / "state.json").write_text(json.dumps(state))
    sums = {path.name: checkpoint.digest(path) for path in folder.iterdir() if path.name != "checksums.json"}
    (folder / "checksums.json").write_text(json.dumps({"format": 1, "files": sums}))
    bench.train("run", until="8 steps")
    bench.train("whole", until="8 steps")
    assert bench.differences("run", "whole") == []


# ------------------------------------------------------------------------- the end


@pytest.mark.parametrize("layout", ["fsdp2", pytest.param("ddp2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_to_one_stops_all_after_the_same_step(ranks, bench, whole, layout, number):
    job = start(ranks, bench, "run", layout, checkpoint_every=0)
    job.wait_for("step 2 ")
    os.kill(job.pids[1], number)
    assert job.statuses() == [128 + number] * 2, job.said
    step = bench.steps("run")[-1]
    assert step >= 2
    assert column(bench, "run", "stop", "reason") == [number.name]
    run(ranks, bench, "run", layout, "--until", f"{step + 2} steps")
    bench.train("one", until=f"{step + 2} steps", **settings("one"))
    np.testing.assert_allclose(column(bench, "run", "step", "loss"), column(bench, "one", "step", "loss"), rtol=1e-3)


def test_the_first_ones_clock_decides(ranks, bench):
    """The other's runs ten times as fast."""
    code = f"""
from types import SimpleNamespace
from anytime.train import loop
now = [0.0]
loop.time = SimpleNamespace(perf_counter=lambda: now[0])
def act(self, number):
    now[0] += 10.0 if rank else 1.0
{BEFORE_STEP}
"""
    run(ranks, bench, "run", "ddp2", "--until", "5 s", code=code)
    assert bench.steps("run")[-1] == 5
    assert column(bench, "run", "stop", "seconds") == [5.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": {"tensor": 3}}, "parallel.tensor is 3, must divide the number of processes, 2: one of 1, 2"),
        (
            {"parallel": {"shard": 3}},
            "parallel.shard is 3, must divide 2 processes: say --parallel.shard 0 (all) or one of 1, 2",
        ),
        (
            {"parallel": {"tensor": 2}, "model": {**MODEL, "head": 32}},
            "parallel.tensor is 2, must divide the model's 1 heads, and its vocabulary 256, width 32 and hidden width "
            "128: 1",
        ),
        ({"batch_size": 3, "micro_batch": 1}, "batch_size is 3, must be a multiple of 2, the processes that share it"),
        ({"optimizer": {"lr": -1.0}}, "optimizer: "),
        (
            {"optimizer": {"name": "SFPlus"}, "parallel": {"shard": 2}},
            "optimizer: SFPlus takes parameters that are whole on every process, without owners: use DDP, or another "
            "optimizer",
        ),
        ({"optimizer": {"name": "SFPlus"}, "parallel": {"owners": "state"}}, "optimizer: SFPlus takes parameters "),
        ({"data": {"path": "nowhere"}}, "there is no data at "),
    ],
)
def test_a_mistake_is_said_once(ranks, bench, changes, message):
    job = ranks.start(2, bench.arguments("run", **{**BASE, **changes}))
    assert job.statuses() == [1, 1]
    assert job.said.count("error: ") == 1, job.said
    assert f"error: {message}" in job.said
    assert "Traceback" not in job.said


def test_an_error_in_one_ends_all(ranks, bench, whole):
    code = f"def act(self, number):\n    1 / (0 if rank and number == 6 else 1)\n{BEFORE_STEP}"
    job = start(ranks, bench, "run", "fsdp2", "--until", "8 steps", code=code)
    assert job.statuses() == [1, 1]
    assert job.said.count("ZeroDivisionError") == 1
    assert "error" not in job.output(0)
    assert bench.steps("run") == [4]
    run(ranks, bench, "run", "fsdp2", "--until", "8 steps")
    compare(bench, "run", whole)


def test_settings_that_differ(ranks, bench):
    code = "from anytime import cli\nplain = cli._asked\n"
    code += 'cli._asked = lambda rest: plain([*rest, "--seed", str(rank)])'
    job = start(ranks, bench, "run", "ddp2", code=code)
    assert job.statuses() == [1, 1]
    assert "error: process 1 was started with other settings (seed: 1 for 0)" in job.said
    assert job.said.count("error: ") == 1


FULL = """
import errno, threading
from anytime.storage import regions
plain, count = regions.save_file, [0]
def save(tensors, path):
    count[0] += 1
    if rank == 1 and count[0] in (2, 3):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")
    plain(tensors, path)
regions.save_file = save
"""


@pytest.mark.parametrize("layout", ["fsdp2", pytest.param("ddp4", marks=pytest.mark.slow)])
def test_a_full_disk_of_one(ranks, bench, whole, layout):
    """Steps 4 and 6 find no room there, 2 and 8 do: none of them appears in part, and training goes on."""
    changes = {"checkpoint_every": 2, "keep_last": 4}
    job = start(ranks, bench, "run", layout, "--until", "8 steps", code=FULL, **changes)
    assert set(job.statuses()) == {0}, job.said
    for step in (4, 6):
        assert job.said.count(f"the checkpoint of step {step} could not be written") == 1
    assert job.output(0).count("No space left on device") == 2
    assert bench.steps("run") == [2, 8]
    assert bench.leftovers("run") == []
    compare(bench, "run", whole)
    job = start(
        ranks, bench, "run", layout, "--until", "10 steps", code=FULL.replace("(2, 3)", "(1,)"), checkpoint_every=0
    )
    assert set(job.statuses()) == {1}
    assert job.said.count("error: ") == 1
    assert "error: the checkpoint of step 10 could not be written" in job.said
    assert "the last checkpoint is of step 8: make room and run the same command again" in job.said


# --------------------------------------------------------------------------- kills


def killed(ranks, bench, layout, count, seed):
    """One of the processes, at random moments; each start goes on from a checkpoint that is whole."""
    chance = random.Random(seed)
    world = LAYOUTS[layout][0]
    changes = {"checkpoint_every": 2, "log_every": 2, "eval_every": 0, "diagnose_every": 0}
    reached = 0
    for number in range(count):
        job = start(ranks, bench, "run", layout, **changes)
        job.wait_for("resumed at step" if reached else "started")
        time.sleep(chance.uniform(0.0, 1.0))
        victim = chance.randrange(world)
        os.kill(job.pids[victim], signal.SIGKILL)
        found = job.statuses()
        assert found[victim] == -signal.SIGKILL
        assert all(status == 1 for rank, status in enumerate(found) if rank != victim), (number, found, job.said)
        assert job.said.count("error: a process of the run was lost") == 1, job.said
        steps = bench.steps("run")
        if steps:
            latest = (bench.folder / "run/checkpoints/latest").read_text().strip()
            assert checkpoint.damage(bench.folder / "run/checkpoints" / latest) is None
        reached = steps[-1] if steps else 0
    last = reached + 3
    run(ranks, bench, "run", layout, "--until", f"{last} steps", **changes)
    assert bench.leftovers("run") == []
    run(ranks, bench, "straight", layout, "--until", f"{last} steps", **changes)
    assert bench.differences("run", "straight") == []


def test_one_is_killed(ranks, bench):
    killed(ranks, bench, "fsdp2", 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp2", "fsdp2", "fsdp-tp4"])
def test_one_is_killed_twenty_times(ranks, bench, layout):
    killed(ranks, bench, layout, 20, 2)


IN_A_SAVE = """
import os, signal, threading
from pathlib import Path
from anytime.train import checkpoint
def watch(place, name):
    plain = getattr(place, name)
    def call(*given, **named):
        if threading.current_thread().name == "checkpoint":
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
        return plain(*given, **named)
    setattr(place, name, call)
left = [AT if rank == WHO else -1]
for place, name in ((os, "fsync"), (os, "rename"), (os, "replace"), (Path, "write_text"), (Path, "mkdir")):
    watch(place, name)
"""


@pytest.mark.parametrize(
    ("who", "stride"), [(0, 16), *(pytest.param(who, 1, marks=pytest.mark.slow) for who in (0, 1))]
)
def test_one_is_killed_in_a_save(ranks, bench, who, stride):
    """Before its n-th change of the disk in the save of step 4, for every n: step 2 stands, or 4 is whole."""
    changes = {"eval_every": 0, "diagnose_every": 0}
    bench.train("base", until="2 steps", **settings("one", **changes))
    bench.train("one", until="6 steps", **settings("one", **changes))
    for at in range(stride // 2, 40, stride):
        shutil.copytree(bench.folder / "base", bench.folder / "run")
        code = IN_A_SAVE.replace("AT", str(at)).replace("WHO", str(who))
        job = start(ranks, bench, "run", "fsdp2", "--until", "4 steps", code=code, **changes)
        if job.statuses() == [0, 0]:
            break
        assert job.statuses()[who] == -signal.SIGKILL, job.said
        run(ranks, bench, "run", "fsdp2", "--until", "6 steps", **changes)
        found, wanted = (column(bench, name, "step", "loss") for name in ("run", "one"))
        np.testing.assert_allclose(found, wanted, rtol=1e-4)
        assert bench.leftovers("run") == []
        shutil.rmtree(bench.folder / "run")
    assert at > 0


# ------------------------------------------------------------------------- torchrun


class Torchrun:
    """The command as people give it."""

    def __init__(self, output, options, arguments):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "--", "anytime", *arguments]
        self._output = output
        with output.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)

    @property
    def said(self):
        return self._output.read_text(encoding="utf-8", errors="replace")

    def status(self, timeout=300):
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            pytest.fail(f"it did not end: {self.said}")

    def wait_for(self, text, timeout=180):
        for _ in range(timeout * 20):
            if text in self.said:
                return
            assert self.process.poll() is None, self.said
            time.sleep(0.05)
        pytest.fail(f"it does not say {text!r}: {self.said}")

    def workers(self):
        found = subprocess.run(["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True, check=False)
        return [int(pid) for pid in found.stdout.split()]


def test_by_torchrun(bench, whole):
    options = ["--nproc-per-node", "2", "--standalone"]
    arguments = bench.arguments("run", "--until", "8 steps", **settings("fsdp2"))
    command = Torchrun(bench.folder / "output", options, arguments)
    assert command.status() == 0, command.said
    compare(bench, "run", whole)


@pytest.mark.slow
def test_a_mistake_by_torchrun(bench):
    arguments = bench.arguments("run", "--until", "8 steps", **settings("tp2", model={**MODEL, "head": 32}))
    command = Torchrun(bench.folder / "output", ["--nproc-per-node", "2", "--standalone"], arguments)
    assert command.status() == 1
    assert command.said.count("error: ") == 1
    assert "error: parallel.tensor is 2, must divide the model's 1 heads" in command.said
    command = Torchrun(bench.folder / "output", ["--nproc-per-node", "2", "--standalone"], [*arguments, "--sead", "1"])
    assert command.status() == 1
    assert command.said.count("Unrecognized options:") == 1, command.said


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_torchrun_is_asked_to_stop(bench, number):
    arguments = bench.arguments("run", **settings("fsdp2", checkpoint_every=0))
    command = Torchrun(bench.folder / "output", ["--nproc-per-node", "2", "--standalone"], arguments)
    command.wait_for("step 3 ")
    os.kill(command.process.pid, number)
    assert command.status() != 0
    (step,) = bench.steps("run")
    assert step >= 3
    assert column(bench, "run", "stop", "reason") == [number.name]


@pytest.mark.slow
def test_torchrun_starts_again_after_a_kill(bench):
    """With restarts allowed, the job goes on by itself from the last checkpoint."""
    arguments = bench.arguments("run", "--until", "300 steps", **settings("fsdp2", checkpoint_every=10, eval_every=0))
    options = ["--nproc-per-node", "2", "--standalone", "--max-restarts", "2"]
    command = Torchrun(bench.folder / "output", options, arguments)
    command.wait_for("step 20  checkpoint")
    os.kill(command.workers()[1], signal.SIGKILL)
    assert command.status() == 0, command.said
    assert "resumed at step" in command.said
    assert column(bench, "run", "step", "step") == [*range(1, 301)]


@pytest.mark.slow
def test_a_machine_is_lost(bench):
    """Two agents of one job; one is killed with its processes, and the other goes on alone: shard 0 adapts."""
    arguments = bench.arguments("run", "--until", "2000 steps", **settings("fsdp2", checkpoint_every=10, eval_every=0))
    options = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
    options += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "job", "--rdzv-conf", "last_call_timeout=5"]
    first = Torchrun(bench.folder / "first", options, arguments)
    time.sleep(1.0)
    second = Torchrun(bench.folder / "second", options, arguments)
    speaker = None
    for _ in range(1200):
        speaker = next((c for c in (first, second) if "step 20  checkpoint" in c.said), None)
        if speaker is not None:
            break
        time.sleep(0.05)
    assert speaker is not None, first.said + second.said
    for pid in second.workers():
        os.kill(pid, signal.SIGKILL)
    os.kill(second.process.pid, signal.SIGKILL)
    second.process.wait()
    assert first.status(300) == 0, first.said
    assert "resumed at step" in first.said
    starts = bench.rows("run", "start")
    assert [row.get("processes", 1) for row in starts] == [2, 1]
    assert column(bench, "run", "step", "step") == [*range(1, 2001)]


# ------------------------------------------------------------------------ the parts


@pytest.mark.parametrize(
    ("count", "given", "found"),
    [
        (1, {}, (1, 1, 1)),
        (8, {}, (8, 1, 1)),
        (8, {"shard": 0}, (1, 8, 1)),
        (8, {"shard": 4}, (2, 4, 1)),
        (8, {"shard": 0, "tensor": 2}, (1, 4, 2)),
        (8, {"shard": 2, "tensor": 2}, (2, 2, 2)),
        (8, {"tensor": 8}, (1, 1, 8)),
        (1, {"shard": 2}, None),
        (6, {"tensor": 4}, None),
        (6, {"shard": 4}, None),
        (7, {}, None),
    ],
)
def test_the_mesh(count, given, found):
    config = merged(Config(), {"batch_size": 24 if count == 6 else 64, "parallel": given})
    if found is not None:
        assert mesh_of(count, config) == found
        return
    with pytest.raises(UserError):
        mesh_of(count, config)


def test_what_can_be_cut():
    model = merged(Config(), {"model": {"width": 768, "head": 128, "vocabulary": 50304}}).model
    for tensor in (1, 2, 3, 6):
        check_model(model, 1, tensor)
    with pytest.raises(UserError, match=r"parallel.tensor is 4, must divide the model's 6 heads.*: one of 1, 2, 3, 6"):
        check_model(model, 1, 4)
    with pytest.raises(UserError, match=r"times parallel.shard, 512, .*: there is none"):
        check_model(model, 512, 2)


def test_alone_there_is_nothing_to_agree_on():
    peers = Peers()
    assert (peers.leads, peers.everyones(3), peers.leaders(4), peers.each(lambda: 5)) == (True, [3], 4, [5])
    with pytest.raises(ZeroDivisionError):
        peers.leader_does(lambda: 1 / 0)
