"""The planner against what it counts: real parameters and state, shards of FSDP2, and every message of a step.

Run as a script, this file is one of the processes whose parts and messages are counted.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from anytime.cli import main
from anytime.train import scale
from anytime.train.build import OPTIMIZERS, build_optimizer
from anytime.train.config import Config, OptimizerConfig, merged
from anytime.train.errors import UserError
from anytime.train.model import GPT, ModelConfig
from anytime.train.presets import preset
from anytime.train.scale import Asked, Machine, Mesh, Message, Wire, Work

PAGE = Path(__file__).parents[2] / "docs/scale.md"
UNEVEN = ModelConfig(vocabulary=50, layers=2, width=20, head=4, context=8)
EVEN = ModelConfig(vocabulary=64, layers=2, width=16, head=4, context=8)
NORMUON = OptimizerConfig()
#: Of the tests below: (replicas, shard, tensor, owners, recompute), by the number of processes.
LAYOUTS = {
    2: [(2, 1, 1, None, 0), (1, 2, 1, None, 0), (1, 1, 2, None, 0), (1, 1, 2, None, 1)]
    + [(2, 1, 1, owners, 0) for owners in ("factor", "state", "gradient")],
    4: [(1, 4, 1, None, 1), (2, 2, 1, None, 0), (1, 2, 2, None, 0), (2, 1, 2, None, 0), (4, 1, 1, "state", 0)],
}
SEQUENCES, PARTS = 3, 2


def model_for(tensor: int) -> ModelConfig:
    """Sharding may be uneven, tensor parallelism not."""
    return EVEN if tensor > 1 else UNEVEN


# ------------------------------------------------------------------ bytes


def by_name(states) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for state in states:
        for name, value in state.items():
            value = value.to_local() if hasattr(value, "to_local") else value
            found[name] += value.nbytes
    return dict(found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bytes_of_weights_and_state_are_the_real_ones(name, dtype):
    config = OptimizerConfig(name=name)
    model = GPT(UNEVEN).to(getattr(torch, dtype))
    optimizer = build_optimizer(model, config)
    weights = scale.weights_of(UNEVEN, config, dtype)
    parameters, gradients, state = scale.held_bytes(weights, Mesh())
    assert parameters == gradients == sum(p.nbytes for p in model.parameters())
    assert state == by_name(optimizer.state.values())


@pytest.mark.parametrize("name", ["demo", "0.5M", "2M", "125M", "772M"])
def test_presets_are_counted(name):
    model = merged(Config(), preset(name)).model
    with torch.device("meta"):
        optimizer = build_optimizer(GPT(model), NORMUON)
    weights = scale.weights_of(model, NORMUON)
    _, _, state = scale.held_bytes(weights, Mesh())
    assert state == by_name(optimizer.state.values())
    rows = model.layers * (5 * model.width + model.hidden)
    others = model.vocabulary * model.width
    assert state["d"] == 4 * model.parameters
    assert state["momentum"] == 4 * model.matrix_parameters
    assert (state["row_moment"], state["second_moment"]) == (4 * rows, 4 * others)
    assert state["step"] == state["beta"] == state["weight_sum"] == 8 * (6 * model.layers + 1)


def test_larger_models_have_about_the_parameters_of_their_names():
    for name in scale.SHAPES:
        assert scale.model_of(name).parameters / 1e9 == pytest.approx(float(name.rstrip("B")), rel=0.06)


@pytest.mark.parametrize("size", [0, 1, 5, 8, 50, 50304])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7, 64])
def test_a_dimension_is_cut_as_by_torch(size, parts):
    pieces = [len(piece) for piece in torch.empty(size).chunk(parts)] if size else []
    assert [scale.chunk(size, parts, i) for i in range(parts)] == pieces + [0] * (parts - len(pieces))


def test_parts_make_up_the_whole():
    weights = scale.weights_of(UNEVEN, NORMUON)
    for mesh in (Mesh(8, 8), Mesh(6, 3, 2), Mesh(64, 64)):
        parts = [scale.held_bytes(weights, mesh, rank=rank)[0] for rank in range(mesh.shard * mesh.tensor)]
        assert sum(parts) == 4 * UNEVEN.parameters
        assert max(parts) == parts[scale.fullest(weights, mesh, None)]


def test_owners_share_the_state():
    weights = scale.weights_of(UNEVEN, NORMUON)
    whole = scale.held_bytes(weights, Mesh())[2]
    each = [scale.held_bytes(weights, Mesh(3), "state", rank)[2] for rank in range(3)]
    for name in ("momentum", "row_moment"):
        assert sum(state.get(name, 0) for state in each) == whole[name]
    most = scale.fullest(weights, Mesh(3), "state")
    assert sum(each[most].values()) == max(sum(state.values()) for state in each)
    assert scale.held_bytes(weights, Mesh(3), "factor")[2] == whole


# ---------------------------------------------------------------- messages


class Listener(torch.utils._python_dispatch.TorchDispatchMode):
    """Writes down every collective: its kind, the size of its group, and the elements that a ring sends for it."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: dict[str, int] = defaultdict(int)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        import torch.distributed as dist

        name = function._schema.name.partition("::")[2]
        if function.namespace == "_c10d_functional" and name == "all_reduce":
            group = dist.distributed_c10d._resolve_process_group(args[2]).size()
            self.add("all-reduce", group, scale.all_reduce(args[0].numel(), group))
        elif function.namespace == "c10d" and name in ("allreduce_", "_allgather_base_", "alltoall_base_"):
            place = 1 if name == "allreduce_" else 2
            processes = dist.ProcessGroup.unbox(args[place])
            group = processes.size()
            if name == "allreduce_":
                self.add("all-reduce", group, scale.all_reduce(sum(t.numel() for t in args[0]), group))
            elif name == "_allgather_base_":
                self.add("all-gather", group, args[1].numel() * (group - 1))
            else:
                self.add("all-to-all", group, sum(args[4]) - args[4][processes.rank()])
        elif function.namespace == "c10d" and name == "_reduce_scatter_base_":
            group = dist.ProcessGroup.unbox(args[2]).size()
            self.add("reduce-scatter", group, args[0].numel() * (group - 1))
        return function(*args, **(kwargs or {}))

    def add(self, kind: str, group: int, elements: int) -> None:
        if group > 1 and elements:
            self.heard[f"{kind} among {group}"] += elements


def summed(messages: list[Message]) -> dict[str, int]:
    """As a Listener writes them down."""
    found: dict[str, int] = defaultdict(int)
    for message in messages:
        if message.group > 1 and message.elements:
            found[f"{message.what.rpartition(', ')[2]} among {message.group}"] += message.elements
    return dict(found)


def close(heard: dict[str, int], planned: dict[str, int]) -> bool:
    """Equal, but for all-reduces: those of several tensors are rounded up one by one."""
    return heard.keys() == planned.keys() and all(
        heard[key] == planned[key] or (key.startswith("all-reduce") and 0 <= heard[key] - planned[key] < 20)
        for key in heard
    )


def gather(world: int, folder: Path) -> list[list[dict]]:
    """What each process found of each layout."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, str(rank), str(world), str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        said = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * world, "\n".join(said)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_step_holds_and_sends_what_is_planned(world, tmp_path):
    found = gather(world, tmp_path)
    for number, (replicas, shard, tensor, owners, recompute) in enumerate(LAYOUTS[world]):
        model, mesh = model_for(tensor), Mesh(world, shard, tensor)
        assert mesh.replicas == replicas
        weights = scale.weights_of(model, NORMUON)
        work = Work(SEQUENCES * PARTS * mesh.data, SEQUENCES, bool(recompute), owners)
        training = list(scale.training_messages(model, weights, mesh, work, Wire()))
        exchanged = scale.exchanged(weights, mesh)
        for rank in range(world):
            real, about = found[rank][number], (world, LAYOUTS[world][number], rank)
            parameters, gradients, state = scale.held_bytes(weights, mesh, owners, rank)
            assert (real["parameters"], real["gradients"], real["state"]) == (parameters, gradients, state), about
            assert close(real["training"], summed(training)), (about, real["training"], summed(training))
            optimizer = [m for m in scale.optimizer_messages(weights, mesh, owners) if "all-to-all" not in m.what]
            if shard * tensor > 1:
                sent = sum(exchanged[rank % (shard * tensor)])
                optimizer.append(Message("optimizer", "to owners and back, all-to-all", shard * tensor, 1, sent, 0))
            assert close(real["optimizer"], summed(optimizer)), (about, real["optimizer"], summed(optimizer))


def measure(layout: tuple[int, int, int, str | None, int]) -> dict:
    """The second step of a layout as this process sees it; with "gradient" the optimizer adds the gradients up."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import loss_parallel

    from anytime import SFNorMuon
    from anytime.train.parallel import Forward, Peers, World

    replicas, shard, tensor, owners, recompute = layout
    dims = dict(zip(("replicate", "shard", "tensor"), layout[:3], strict=True))
    if replicas == 1 or tensor == 1:
        dims = {name: size for name, size in dims.items() if size > 1}
    mesh = init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))
    world = World(torch.device("cpu"), replicas, shard, tensor, mesh, Peers(dist.group.WORLD), Peers(dist.group.WORLD))
    config = merged(Config(), {"precision": "float32", "compile": "no"})
    config = replace(config, model=model_for(tensor))
    model = GPT(config.model, recompute=bool(recompute))
    model.initialize(0)
    forward = Forward(model, model) if owners == "gradient" else world.spread(model, config, False)
    optimizer = SFNorMuon(model, owners=owners)
    tokens = torch.randint(0, config.model.vocabulary, (SEQUENCES, config.model.context))
    with loss_parallel() if tensor > 1 else nullcontext():
        for _ in range(2):
            optimizer.zero_grad()
            with Listener() as training:
                for part in range(PARTS):
                    with forward.accumulating(part == PARTS - 1):
                        forward.loss(tokens, tokens).backward()
            grads = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in model.parameters()]
            with Listener() as stepping:
                optimizer.step()
    if owners == "gradient":  # its sums of gradients are training's
        for key in [key for key in stepping.heard if key.startswith("reduce-scatter")]:
            training.heard[key] += stepping.heard.pop(key)
        rest = scale.all_reduce(config.model.vocabulary * config.model.width, replicas)
        stepping.heard[f"all-reduce among {replicas}"] -= rest
        training.heard[f"all-reduce among {replicas}"] += rest
    parts = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    return {
        "parameters": sum(part.nbytes for part in parts),
        "gradients": sum(grad.nbytes for grad in grads),
        "state": by_name(optimizer.state.values()),
        "training": training.heard,
        "optimizer": stepping.heard,
    }


def process(rank: int, world: int, folder: Path) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    found = [measure(layout) for layout in LAYOUTS[world]]
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
    os._exit(0)  # a thread of gloo's that drops its last tensor while the interpreter ends takes the process down


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_messages_come_to_the_known_formulas(ranks):
    """P(1 − 1/W) of y for owners, 2(P/S)(1 − 1/S) for FSDP2, and what an all-reduce takes with owned gradients."""
    model = scale.model_of("7B")
    weights, P = scale.weights_of(model, NORMUON), model.matrix_parameters
    sent = {
        owners: sum(m.elements for m in scale.optimizer_messages(weights, Mesh(ranks), owners))
        for owners in (None, "state", "factor")
    }
    assert sent[None] == 0
    if P % ranks == 0 and 192 % ranks == 0:  # as many matrices for each
        assert sent["state"] == pytest.approx(P * (1 - 1 / ranks), rel=1e-6)
        assert sent["factor"] == sent["state"]
    work = Work(ranks, 1, owners="gradient")
    whole = list(scale.training_messages(model, weights, Mesh(ranks), work, Wire()))
    plain = list(scale.training_messages(model, weights, Mesh(ranks), Work(ranks, 1), Wire()))
    assert sum(m.elements for m in whole) + sent["state"] == pytest.approx(sum(m.elements for m in plain), rel=1e-5)
    sharded = sum(m.elements for m in scale.optimizer_messages(weights, Mesh(ranks, ranks), None))
    assert sharded == pytest.approx(2 * P / ranks * (1 - 1 / ranks), rel=1e-4)


# ------------------------------------------------------------------- plans


@pytest.mark.parametrize(("name", "measured"), [("125M", 3.2e-3), ("772M", 30e-3)])
def test_the_estimated_step_is_near_the_measured_one(name, measured):
    """results/README.md: a step on one H200, its graph queued."""
    assert scale.plan(Asked(name), Machine()).optimizer_seconds == pytest.approx(measured, rel=0.2)


@pytest.mark.parametrize(
    ("layers", "width", "vocabulary", "at_once", "recompute", "measured"),
    [
        (8, 2048, 256, 8, False, 6_053_995_520),
        (4, 1024, 50304, 16, False, 4_612_822_016),
        (12, 768, 50304, 32, False, 15_297_426_432),
        (36, 1280, 50304, 8, False, 16_945_091_584),
        (8, 1024, 256, 8, True, 855_214_592),
        (8, 2048, 256, 8, True, 2_317_978_112),
        (12, 768, 50304, 32, True, 4_256_826_368),
    ],
)
def test_estimated_activations_are_near_the_measured_ones(layers, width, vocabulary, at_once, recompute, measured):
    """The peak of a second forward and backward pass beyond weights and gradients: one H200, torch 2.11, compiled."""
    model = ModelConfig(layers=layers, width=width, vocabulary=vocabulary, context=1024)
    weights = scale.weights_of(model, NORMUON)
    memory = scale.memory_of(model, weights, Mesh(), Work(2 * at_once, at_once, recompute))
    assert max(memory.moving, memory.backward) == pytest.approx(measured, rel=0.13 if recompute else 0.04)


def test_the_smallest_layout_that_fits_is_proposed():
    found = {
        (name, gpus): scale.plan(Asked(name, gpus), Machine())
        for name, gpus in (("125M", 1), ("125M", 8), ("7B", 8), ("7B", 64), ("70B", 1024))
    }
    assert all(plan.fits for plan in found.values())
    assert [plan.mesh.kind for plan in found.values()] == ["one GPU", "DDP", "FSDP2", "HSDP", "HSDP"]
    for plan in found.values():
        if plan.mesh.shard == 1:
            continue
        smaller = max(n for n in range(1, plan.mesh.shard) if plan.mesh.gpus % n == 0)
        asked = Asked(plan.name, plan.mesh.gpus, smaller, 1, recompute=plan.work.recompute)
        assert not scale.plan(asked, Machine()).fits
        assert "the smallest that fits" in plan.reason
    assert scale.plan(Asked("7B", 64), Machine(memory=141e9)).mesh.shard < found["7B", 64].mesh.shard


def test_what_does_not_fit_says_what_would():
    found = scale.plan(Asked("70B", 8), Machine())
    assert not found.fits
    said = re.search(r"about (\d+) GPUs", found.reason)
    assert said is None or int(said[1]) > 8
    assert "does not fit" in scale.line_cells([found])[1][2]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (Asked("7b"), "did you mean '7B'"),
        (Asked("2x"), "LAYERSxWIDTH"),
        (Asked("125M", 6, 4, 1), "must divide the number of GPUs"),
        (Asked("125M", 6, 1, 4), "tensor is 4, must divide"),
        (Asked("125M", 0), "must be at least 1"),
        (Asked("125M", 8, 1, 8), "heads"),
        (Asked("125M", 8, batch_tokens=1000), "must be a multiple of 8,192"),
        (Asked("125M", 8, micro_batch=5), "micro_batch is 5"),
        (Asked("125M", 8, 8, 1, owners="state"), "owners is 'state'"),
    ],
)
def test_mistakes_are_told(asked, words):
    with pytest.raises(UserError, match=re.escape(words)):
        scale.plan(asked, Machine())


def test_more_gpus_than_sequences_take_tensor_parallelism():
    found = scale.plan(Asked("7B", 16, batch_tokens=8 * 4096), Machine())
    assert (found.mesh.tensor, found.mesh.data, found.fits) == (2, 8, True)


def test_a_shard_of_all():
    asked = Asked("7B", 16, shard=0)
    assert scale.plan(asked, Machine()).mesh == Mesh(16, 16)
    assert scale.plan(replace(asked, tensor=2), Machine()).mesh == Mesh(16, 8, 2)


def test_layers_by_width():
    model = scale.model_of("24x2048", context=4096, vocabulary=1000)
    assert (model.layers, model.width, model.head, model.context) == (24, 2048, 128, 4096)
    assert model.parameters == 12 * 24 * 2048**2 + 1000 * 2048


# ----------------------------------------------------------- command and page


def test_the_command_shows_a_plan(capsys):
    assert main(["plan", "--model", "7B", "--gpus", "8"]) == 0
    shown = capsys.readouterr().out
    for words in ("FSDP2, shard 8", "row_moment", "momentum to owners", "optimizer step", "the smallest that fits"):
        assert words in shown
    assert main(["plan", "--model", "125M", "772M", "--gpus", "1", "8"]) == 0
    assert capsys.readouterr().out.count("DDP") == 2


def test_the_command_writes_json(capsys):
    assert main(["plan", "--model", "125M", "--gpus", "4", "--shard", "2", "--tensor", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    model = scale.model_of("125M")
    assert found["memory"]["parameters"] == math.ceil(4 * model.parameters / 2)
    assert found["mesh"]["replicas"] == 2
    assert found["sent"]["optimizer"] == sum(m["bytes"] for m in found["messages"] if m["of"] == "optimizer")


def test_the_pages_table_is_the_planners(capsys):
    page = PAGE.read_text()
    (command,) = re.findall(r"^anytime (plan .*--markdown)", page, re.MULTILINE)
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out.strip() in page, f"run `anytime {command}` and put its table into docs/scale.md"


def test_the_pages_models_are_the_planners():
    page = PAGE.read_text()
    for name in scale.SHAPES:
        model = scale.model_of(name)
        row = re.search(rf"^\| {re.escape(name)} \| (\d+) × ([\d,]+).* \| ([\d,]+) \| ([\d,]+) \|$", page, re.MULTILINE)
        assert row is not None, name
        found = [int(number.replace(",", "")) for number in row.groups()]
        assert found == [model.layers, model.width, model.parameters, model.context]


def test_the_pages_messages_are_said_somewhere():
    source = "".join(path.read_text() for path in Path(scale.__file__).parents[2].rglob("*.py"))
    said = re.sub(r"\s+", " ", re.sub(r'"\s*\n\s*f?"', "", source))
    table = PAGE.read_text().partition("| message |")[2]
    for message in re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE):
        words = max(re.split(r"'[a-z]+'|\d+|RUN|…|RANK,", message), key=len).strip(" ,")
        assert words.startswith("torchrun") or words in said, words


if __name__ == "__main__":
    process(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
