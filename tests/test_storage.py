"""Checkpoints in safetensors and JSON: saved in any sharding, read in any other, whole or not there, never a pickle."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import anytime
from anytime import storage
from anytime.storage import dcp as ours
from anytime.storage import regions as stored
from anytime.storage.regions import Entry, Index, Part, Region, read_into, regions_of, write_regions

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]
PROCESSES = 4
SECONDS = 240

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def filled(shape: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-100, 100, tuple(shape), generator=generator).to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def state() -> dict[str, Any]:
    """Of one process: all dtypes, sizes without elements, shared memory, values of all kinds."""
    w = filled((4, 3))
    model = {"w": w, "tied": w, "row": w[1], "turned": w.t(), "scalar": torch.tensor(2.5), "none": torch.empty(0, 3)}
    model |= {str(dtype): filled((3, 5), dtype) for dtype in DTYPES}
    group = {
        "lr": 0.1,
        "betas": (0.9, 0.95),
        "names": ["a", "b"],
        "decay": None,
        "on": True,
        "n": 2**70,
        "é": "ü\ud800",
    }
    odd = {"up": math.inf, "down": -math.inf, "deep": ([1, (2.0, None)], {"k": (3,)}), "empty": [], "nothing": ()}
    return {"model": model, "optimizer": {"param_groups": [group, odd], "state": {7: {"step": 3, "m": filled((2,))}}}}


def emptied(thing: Any) -> Any:
    """The same keys with other contents."""
    if isinstance(thing, Tensor):
        return torch.full_like(thing, 1)
    if isinstance(thing, dict):
        return {key: emptied(value) for key, value in thing.items()}
    if isinstance(thing, list) and any(isinstance(item, dict) for item in thing):
        return [emptied(item) for item in thing]
    return "another"


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return same(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    storage.save(tmp_path / "checkpoint", state())
    return tmp_path / "checkpoint"


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


# ------------------------------------------------------------------------ regions


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[tuple[int, int], ...]]]:
    """A shape, and boxes that tile it: cut again and again, each time one of them in two."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    boxes = [tuple((0, size) for size in shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        cuttable = [dim for dim, (start, stop) in enumerate(box) if stop - start > 1]
        if not cuttable:
            boxes.append(box)
            continue
        dim = draw(st.sampled_from(cuttable))
        start, stop = box[dim]
        at = draw(st.integers(start + 1, stop - 1))
        boxes += [(*box[:dim], (start, at), *box[dim + 1 :]), (*box[:dim], (at, stop), *box[dim + 1 :])]
    return shape, draw(st.permutations(boxes))


def cut(name: str, tensor: Tensor, box: Sequence[tuple[int, int]]) -> Region:
    part = tensor[tuple(slice(start, stop) for start, stop in box)]
    return Region(name, tuple(tensor.shape), tuple(start for start, _ in box), part)


def in_files(folder: Path, regions: Sequence[Region], files: int) -> Index:
    """Dealt out to files in turn, and read back from disk."""
    dealt = [write_regions(folder / f"{n}.safetensors", regions[n::files]) for n in range(files)]
    Index.merged(dealt).write(folder)
    return Index.read(folder)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tilings(), tilings(), st.sampled_from(DTYPES), st.integers(1, 3), st.data())
def test_any_tiling_is_read_in_any_boxes(tmp_path_factory, one, other, dtype, files, data):
    folder = tmp_path_factory.mktemp("tiling")
    wholes = {"a": filled(one[0], dtype, 1), "b": filled(other[0], dtype, 2)}
    regions = [cut(n, wholes[n], box) for n, (_, boxes) in zip("ab", (one, other), strict=True) for box in boxes]
    index = in_files(folder, data.draw(st.permutations(regions)), files)
    wanted = []
    for name, whole in wholes.items():
        ends = [sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2), label=name)) for size in whole.shape]
        region = cut(name, torch.ones_like(whole), ends)
        wanted.append((region, cut(name, whole, ends).tensor))
    before = copy.deepcopy([region.tensor for region, _ in wanted])
    read_into(folder, index, [region for region, _ in wanted])
    assert all(same(region.tensor, expected) for region, expected in wanted)
    read_into(folder, index, fresh := {name: torch.ones_like(whole) for name, whole in wholes.items()})
    assert equal(fresh, wholes)
    assert [t.shape for t in before] == [region.tensor.shape for region, _ in wanted]


@settings(max_examples=60)
@given(tilings(), st.data())
def test_gaps_and_overlaps_are_seen(tiling, data):
    shape, boxes = tiling
    parts = [Part("f", str(n), tuple(a for a, _ in box), tuple(b - a for a, b in box)) for n, box in enumerate(boxes)]
    Index({"w": Entry(torch.float32, shape, tuple(parts))}).check()
    lost = data.draw(st.integers(0, len(parts) - 1))
    with pytest.raises(ValueError, match="w is not whole: "):
        Index({"w": Entry(torch.float32, shape, (*parts[:lost], *parts[lost + 1 :]))}).check()
    with pytest.raises(ValueError, match=r"w overlap: f at|w is not whole: 2 of its 1 elements"):
        Index({"w": Entry(torch.float32, shape, (*parts, parts[lost]))}).check()
    if len(parts) > 1 and shape:  # as many elements, but not the same ones
        other = data.draw(st.sampled_from([n for n in range(len(parts)) if n != lost]))
        moved = Part("f", "x", parts[other].offset, parts[lost].sizes)
        with pytest.raises(ValueError, match=r"w overlap|w is not whole|w .* has no part"):
            Index({"w": Entry(torch.float32, shape, (*parts[:lost], moved, *parts[lost + 1 :]))}).check()


@pytest.mark.parametrize(
    ("shape", "boxes"),
    [
        ((4,), [((0,), (2,)), ((1,), (2,))]),
        ((4,), [((1,), (2,)), ((0,), (2,))]),
        ((6,), [((0,), (4,)), ((1,), (1,)), ((3,), (1,))]),
        ((4, 4), [((0, 0), (4, 2)), ((2, 1), (2, 2)), ((0, 3), (4, 1))]),
    ],
)
def test_an_overlap_that_makes_up_for_a_gap_is_seen(shape, boxes):
    parts = tuple(Part("f", "", offset, sizes) for offset, sizes in boxes)
    assert sum(math.prod(part.sizes) for part in parts) == math.prod(shape)
    with pytest.raises(ValueError, match="parts of w overlap: f at"):
        Index({"w": Entry(torch.float32, shape, parts)}).check()


@pytest.mark.parametrize("shape", [(2000, 1), (1, 2000), (4, 500), (128, 8)])
def test_many_parts_are_checked_quickly(monkeypatch, shape):
    """As thousands of processes would have them, each looks at its neighbours alone."""
    parts = tuple(Part("f", "", (r, c), (1, 1)) for r in range(shape[0]) for c in range(shape[1]))
    looks = []
    overlap = stored._overlap
    monkeypatch.setattr(stored, "_overlap", lambda *given: looks.append(1) or overlap(*given))
    Index({"w": Entry(torch.float32, shape, parts)}).check()
    assert len(looks) <= 4 * len(parts)


def test_a_plain_tensor_is_one_region():
    tensor = nn.Parameter(filled((2, 3)))
    (region,) = regions_of("w", tensor)
    assert (region.name, region.shape, region.offset) == ("w", (2, 3), (0, 0))
    assert region.tensor.data_ptr() == tensor.data_ptr()
    assert not region.tensor.requires_grad
    assert regions_of("w", tensor, plain=False) == []


def test_names_in_a_file_are_unique_and_plain_where_they_can_be(tmp_path):
    whole = filled((4, 2))
    regions = [
        cut("w", whole, ((0, 2), (0, 2))),
        cut("w", whole, ((2, 4), (0, 2))),
        *regions_of("w@2,0", filled((3,))),
        *regions_of("__metadata__", filled((2,))),
        *regions_of("v", filled((5,))),
    ]
    index = in_files(tmp_path, regions, 1)
    assert {*load_file(tmp_path / "0.safetensors")} == {"w@0,0", "w@2,0", "w@2,0'", "__metadata__'", "v"}
    targets = {"w": whole * 0, "w@2,0": torch.zeros(3), "__metadata__": torch.zeros(2), "v": torch.zeros(5)}
    read_into(tmp_path, index, targets)
    assert equal(targets, {"w": whole, "w@2,0": filled((3,)), "__metadata__": filled((2,)), "v": filled((5,))})


def test_describe_says_what_will_be_written(tmp_path):
    regions = [cut("w", filled((4, 2)), ((0, 2), (0, 2))), *regions_of("b", torch.tensor(True))]
    described = stored.describe("0.safetensors", regions)
    assert not [*tmp_path.iterdir()]
    assert write_regions(tmp_path / "0.safetensors", regions) == described
    assert write_regions(tmp_path / "1.safetensors", []) == Index()
    assert [path.name for path in tmp_path.iterdir()] == ["0.safetensors"]


def test_a_file_has_the_permissions_of_any_other(tmp_path):
    (tmp_path / "other").touch()
    write_regions(tmp_path / "f.safetensors", regions_of("w", filled((2,))))
    assert (tmp_path / "f.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_what_several_processes_have_is_one_index():
    part = Part("f", "w", (0,), (2,))
    one = Index({"w": Entry(torch.float32, (4,), (part,))}, {"a": 1})
    two = Index({"w": Entry(torch.float32, (4,), (Part("g", "w", (2,), (2,)), Part("g", "x", (0,), (2,))))}, {"b": 2})
    merged = Index.merged([one, two])
    merged.check()
    assert [part.file for part in merged.tensors["w"].parts] == ["f", "g"]
    assert merged.values == {"a": 1, "b": 2}
    assert one.tensors["w"].parts == (part,)
    with pytest.raises(
        ValueError, match=r"w is torch.float32 \(4,\) for one process, torch.float32 \(5,\) for another"
    ):
        Index.merged([one, Index({"w": Entry(torch.float32, (5,), (part,))})])
    with pytest.raises(ValueError, match=r"w is torch.float32 .* torch.float64"):
        Index.merged([one, Index({"w": Entry(torch.float64, (4,), (part,))})])


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ({"v": torch.ones(4, 2)}, "has no tensor 'v'"),
        ({"w": torch.ones(2, 4)}, r"w is torch.float32 \(4, 2\) in .*, here it is torch.float32 \(2, 4\)"),
        ({"w": torch.ones(4, 2, dtype=torch.float64)}, "w is torch.float32 .*, here it is torch.float64"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_changes(tmp_path, target, words):
    index = in_files(tmp_path, regions_of("w", filled((4, 2))) + regions_of("u", filled((3,))), 1)
    targets = {"u": torch.full((3,), 0.5), **target}
    with pytest.raises(ValueError, match=words):
        read_into(tmp_path, index, targets)
    assert same(targets["u"], torch.full((3,), 0.5))


def test_an_index_with_a_gap_is_not_read_from(tmp_path):
    index = write_regions(tmp_path / "f.safetensors", [cut("w", filled((4, 2)), ((0, 3), (0, 2)))])
    read_into(tmp_path, index, [cut("w", torch.ones(4, 2), ((1, 3), (0, 2)))])
    with pytest.raises(ValueError, match=r"w is not whole in .*: 6 of 8 elements are there"):
        read_into(tmp_path, index, {"w": torch.ones(4, 2)})


def test_all_files_are_looked_at_before_anything_changes(tmp_path):
    index = in_files(tmp_path, [*regions_of("a", filled((3,))), *regions_of("b", filled((3,)))], 2)
    path = tmp_path / "1.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    targets = {"a": torch.full((3,), 0.5), "b": torch.full((3,), 0.5)}
    with pytest.raises(ValueError, match=r"1.safetensors, which has b, cannot be read"):
        read_into(tmp_path, index, targets)
    assert same(targets["a"], torch.full((3,), 0.5))


def test_only_what_is_needed_is_read(tmp_path, monkeypatch):
    whole = filled((6, 2))
    index = in_files(tmp_path, [cut("w", whole, ((n, n + 2), (0, 2))) for n in (0, 2, 4)], 3)
    (tmp_path / "2.safetensors").unlink()
    region = cut("w", torch.ones(6, 2), ((1, 3), (0, 2)))
    taken = []
    take = stored.piece
    monkeypatch.setattr(stored, "piece", lambda *given: taken.append(take(*given)) or taken[-1])
    read_into(tmp_path, index, [region])
    assert same(region.tensor, whole[1:3])
    assert [tuple(piece.shape) for piece in taken] == [(1, 2), (1, 2)]


@pytest.mark.parametrize("tensor", [torch.ones(2, dtype=torch.complex64), torch.eye(2).to_sparse()])
def test_what_cannot_be_stored_is_named(tmp_path, tensor):
    with pytest.raises(ValueError, match=r"odd is torch.* which cannot be stored"):
        write_regions(tmp_path / "f.safetensors", regions_of("odd", tensor))
    assert not [*tmp_path.iterdir()]


# ------------------------------------------------------------------------ one process


def test_a_state_comes_back_as_it_was(saved):
    target = emptied(state())
    tensors = list(target["model"].values())
    storage.load(saved, target)
    assert equal(target, state())
    assert all(value is tensor for value, tensor in zip(target["model"].values(), tensors, strict=True))


def test_torchs_own_functions_save_and_load(tmp_path):
    target = emptied(state())
    writer, reader = storage.SafetensorsWriter(tmp_path / "other"), storage.SafetensorsReader(tmp_path / "other")
    dcp.save(state(), storage_writer=writer, planner=storage.JsonSavePlanner(), checkpoint_id=tmp_path / "here")
    dcp.load(target, storage_reader=reader, planner=storage.JsonLoadPlanner(), checkpoint_id=tmp_path / "here")
    assert equal(target, state())
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    index = Index.read(tmp_path / "here")
    assert index.paths["optimizer.param_groups.0.lr"] == ("optimizer", "param_groups", 0, "lr")


def test_planners_keep_torchs_options(tmp_path):
    writer, reader = storage.SafetensorsWriter(tmp_path / "a"), storage.SafetensorsReader(tmp_path / "a")
    flat = {"w": filled((3,)), "n": (1, 2)}
    dcp.save(flat, storage_writer=writer, planner=storage.JsonSavePlanner(flatten_state_dict=False))
    target = {"w": torch.ones(3), "n": None, "new": 5}
    planner = storage.JsonLoadPlanner(flatten_state_dict=False, allow_partial_load=True)
    dcp.load(target, storage_reader=reader, planner=planner)
    assert equal(target, {**flat, "new": 5})
    for _ in range(2):
        dcp.save(flat, storage_writer=writer, planner=storage.JsonSavePlanner(enable_plan_caching=True))
    target = {"w": torch.ones(3), "n": None}
    storage.load(tmp_path / "a", target)
    assert equal(target, flat)


def test_a_part_of_a_checkpoint_can_be_loaded(saved):
    target = {"model": {"w": torch.ones(4, 3)}}
    storage.load(saved, target)
    assert same(target["model"]["w"], state()["model"]["w"])
    with pytest.raises(RuntimeError, match=r"Missing key.*model.other"):
        storage.load(saved, {"model": {"other": torch.ones(4, 3)}})


def test_options_that_came_later_than_the_file(tmp_path):
    """They are not the new optimizer's: the run went on without them."""

    def build(**options):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = anytime.SFNorMuon(model, lr=0.1, warmup_steps=0, **options)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        return model, optimizer

    weights, old = get_state_dict(*build())
    for group in old["param_groups"]:
        for key in ("rate_fall", "rate_fall_start", "momentum_growth", "cautious"):
            group.pop(key, None)
    storage.save(tmp_path / "a", {"model": weights, "optimizer": old})
    model, optimizer = build(rate_fall=0.5, momentum_growth=0.5, cautious=True, decay_fading=3)
    weights, state = get_state_dict(model, optimizer)
    loaded = {"model": weights, "optimizer": state}
    storage.load(tmp_path / "a", loaded)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    assert {group["rate_fall"] for group in optimizer.param_groups} == {0.0}
    assert (optimizer.param_groups[0]["momentum_growth"], optimizer.param_groups[0]["cautious"]) == (0.0, False)
    assert {group["decay_fading"] for group in optimizer.param_groups} == {0}
    with pytest.raises(RuntimeError, match=r"Missing key.*model.other"):
        storage.load(tmp_path / "a", {"model": {"other": 5}})


@pytest.mark.parametrize("how", ["ours", "torch's"])
def test_saved_while_work_goes_on(tmp_path, how):
    before = state()
    live = copy.deepcopy(before)
    if how == "ours":
        future = storage.async_save(tmp_path / "checkpoint", live)
    else:
        writer = storage.SafetensorsWriter(tmp_path / "checkpoint")
        future = dcp.async_save(live, storage_writer=writer, planner=storage.JsonSavePlanner())
    for tensor in live["model"].values():
        tensor.fill_(1)
    future.result(SECONDS)
    target = emptied(before)
    storage.load(tmp_path / "checkpoint", target)
    assert equal(target, before)


def test_nothing_in_a_folder_is_a_pickle(saved, monkeypatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a pickle")

    for module, name in ((torch, "load"), (torch, "save"), *((pickle, n) for n in ("load", "loads", "dump", "dumps"))):
        monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr(pickle, "Unpickler", refuse)
    storage.save(saved, state())
    target = emptied(state())
    storage.load(saved, target)
    assert equal(target, state())
    assert {path.name for path in saved.iterdir()} == {"index.json", "part-00000.safetensors"}
    json.loads((saved / "index.json").read_text(), parse_constant=refuse)  # not even NaN
    assert set(load_file(saved / "part-00000.safetensors")) == set(Index.read(saved).tensors)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), "a.b is of a type that JSON cannot hold, object"),
        ([1, {2}], r"a.b\[1\] is .*, set: \{2\}"),
        (torch.float32, "a.b is .*, dtype: torch.float32"),
        ((torch.ones(2),), r"a.b\[0\] is .*, Tensor"),
        (b"bytes", "a.b is .*, bytes"),
        (({1: 2},), r"a.b\[0\] is .*, dict"),
        (({"$tuple": []},), r"a.b\[0\] is .*, dict"),
        (torch.ones(2, dtype=torch.complex64), "a.b is torch.complex64, which cannot be stored"),
    ],
)
def test_what_cannot_be_saved_is_named_and_leaves_nothing(tmp_path, value, words):
    with pytest.raises(ValueError, match=words):
        storage.save(tmp_path / "checkpoint", {"w": torch.ones(2), "a": {"b": value}})
    assert not [*tmp_path.iterdir()]


@settings(max_examples=50)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda deeper: (
            st.lists(deeper)
            | st.lists(deeper).map(tuple)
            | st.dictionaries(st.text().filter(lambda key: not key.startswith("$")), deeper)
        ),
    )
)
def test_values_survive_json(value):
    text = json.dumps(stored.to_json("v", value), allow_nan=False)
    assert equal(stored.from_json(json.loads(text)), value)


def test_a_nan_survives_json():
    text = json.dumps(stored.to_json("v", (math.nan,)), allow_nan=False)
    assert math.isnan(stored.from_json(json.loads(text))[0])


def test_planners_that_pickle_are_refused(saved, tmp_path):
    with pytest.raises(dcp.CheckpointException, match=r"is no tensor: give dcp.save planner=JsonSavePlanner\(\)"):
        dcp.save(state(), storage_writer=storage.SafetensorsWriter(tmp_path / "new"))
    assert not (tmp_path / "new").exists()
    target = emptied(state())
    with pytest.raises(dcp.CheckpointException, match=r"is no tensor: give dcp.load planner=JsonLoadPlanner\(\)"):
        dcp.load(target, storage_reader=storage.SafetensorsReader(saved))
    assert equal(target, emptied(state()))
    with pytest.raises(ValueError, match="use_collectives has to be True"):
        storage.SafetensorsWriter(tmp_path).set_up_storage_writer(True, use_collectives=False)


def test_tensors_alone_need_no_planner(tmp_path):
    dcp.save({"w": filled((3,))}, storage_writer=storage.SafetensorsWriter(tmp_path / "new"))
    dcp.load(target := {"w": torch.ones(3)}, storage_reader=storage.SafetensorsReader(tmp_path / "new"))
    assert same(target["w"], filled((3,)))


# ------------------------------------------------------------------------ whole or not there


class Stopped(BaseException):
    """Where a process was killed."""


def calls(monkeypatch: pytest.MonkeyPatch, stop: int | None) -> list[str]:
    """Everything a save does to the disk, in order; it ends at a given one."""
    log: list[str] = []

    def watch(module: Any, name: str) -> None:
        do = getattr(module, name)

        def watched(*given: Any, **more: Any) -> Any:
            if len(log) == stop:
                raise Stopped
            log.append(name)
            return do(*given, **more)

        monkeypatch.setattr(module, name, watched)

    for module, names in ((stored, "save_file sync"), (ours, "sync"), (os, "rename"), (shutil, "rmtree")):
        for name in names.split():
            watch(module, name)
    for name in ("mkdir", "write_text"):
        watch(Path, name)
    return log


def write(folder: Path, state_dict: dict[str, Any]) -> None:
    """Without what storage.save does when something goes wrong, as when a process is killed."""
    dcp.save(state_dict, storage_writer=storage.SafetensorsWriter(folder), planner=storage.JsonSavePlanner())


@pytest.mark.parametrize("there", [False, True])
def test_a_save_that_is_killed_leaves_what_was_there(tmp_path, monkeypatch, there):
    folder = tmp_path / "checkpoint"
    old, new = {"w": filled((3,), seed=1), "n": 1}, {"w": filled((3,), seed=2), "n": 2}
    with monkeypatch.context() as patch:
        log = calls(patch, None)
        write(folder, old)
    start, write_files = ["rmtree", "mkdir"], ["save_file", "sync", "write_text", "sync", "sync"]
    assert log == [*start, *write_files, "rmtree", "rename", "sync", "rmtree"]
    steps = len(log) + there
    seen = set()
    for stop in range(steps):
        storage.save(folder, old) if there else shutil.rmtree(folder, ignore_errors=True)
        with monkeypatch.context() as patch:
            log = calls(patch, stop)
            with pytest.raises(dcp.CheckpointException):
                write(folder, new)
        renames = log.count("rename")
        target = {"w": torch.ones(3), "n": 0}
        if renames == 1 + there:  # it has its name
            storage.load(folder, target)
            assert equal(target, new)
        elif there and renames == 0:
            storage.load(folder, target)
            assert equal(target, old)
        else:
            assert not folder.exists()
        seen.add(renames)
        storage.save(folder, new)
        storage.load(folder, target)
        assert equal(target, new)
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    assert seen == {0, 1, 2} if there else {0, 1}


def test_killed_between_its_renames_the_old_one_is_not_lost(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoint"
    storage.save(folder, {"n": 1})
    os.rename(folder, tmp_path / ".checkpoint.old")
    with pytest.raises(ValueError, match="n is of a type"):
        storage.save(folder, {"n": object()})
    with monkeypatch.context() as patch:
        calls(patch, 3)
        with pytest.raises(dcp.CheckpointException):
            write(folder, {"n": 2})
    storage.load(folder, target := {"n": 0})
    assert target == {"n": 1}


def test_a_folder_that_is_no_checkpoint_is_not_replaced(tmp_path):
    (tmp_path / "photos").mkdir()
    storage.save(tmp_path / "photos", {"n": 1})  # nothing in it to lose
    (tmp_path / "photos" / "index.json").unlink()
    (tmp_path / "photos" / "one.jpg").touch()
    with pytest.raises(ValueError, match="photos is there and is no checkpoint"):
        storage.save(tmp_path / "photos", {"n": 1})
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["one.jpg"]


def test_what_a_killed_save_left_does_not_get_in(tmp_path):
    (tmp_path / ".checkpoint.new").mkdir()
    (tmp_path / ".checkpoint.new" / "part-00007.safetensors").touch()
    storage.save(tmp_path / "checkpoint", {"w": filled((3,))})
    assert {path.name for path in (tmp_path / "checkpoint").iterdir()} == {"index.json", "part-00000.safetensors"}


def test_a_failed_save_cleans_up(tmp_path, monkeypatch):
    def full(*_: Any) -> None:
        raise stored.SafetensorError("No space left on device")

    monkeypatch.setattr(stored, "save_file", full)
    with pytest.raises(OSError, match=r"part-00000.safetensors could not be written: No space left"):
        storage.save(tmp_path / "checkpoint", state())
    assert not [*tmp_path.iterdir()]


def test_paths_of_all_kinds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for path in ("deep/er/checkpoint/", str(tmp_path / "link"), Path("real/../last")):
        for number in range(2):
            storage.save(path, {"n": number})
        storage.load(path, target := {"n": None})
        assert target == {"n": 1}
    assert (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "last", "link", "real"]
    assert storage.SafetensorsWriter.validate_checkpoint_id(tmp_path)
    assert not storage.SafetensorsReader.validate_checkpoint_id("s3://bucket/checkpoint")


# ------------------------------------------------------------------------ damage


def truncate(folder: Path) -> None:
    path = folder / "part-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    path = folder / "part-00000.safetensors"
    tensors = {key: value.clone() for key, value in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


def of_w(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    return lambda folder: edit(folder, lambda index: change(index["tensors"]["model.w"]))


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "no folder": (lambda f: shutil.rmtree(f), "checkpoint is no checkpoint: it has no index.json"),
    "no index": (lambda f: (f / "index.json").unlink(), "is no checkpoint: it has no index.json"),
    "no JSON": (lambda f: (f / "index.json").write_text('{"format": 1,'), "index.json is damaged: JSONDecodeError"),
    "no text": (lambda f: (f / "index.json").write_bytes(b"\x80\x04"), "index.json is damaged: UnicodeDecodeError"),
    "a list": (lambda f: (f / "index.json").write_text("[]"), "index.json is damaged: TypeError"),
    "no values": (lambda f: edit(f, lambda i: i.pop("values")), "index.json is damaged: KeyError.'values'"),
    "newer": (lambda f: edit(f, lambda i: i.update(format=2)), "has format 2, this version reads up to 1: upgrade"),
    "no file": (lambda f: (f / "part-00000.safetensors").unlink(), "is in part-00000.safetensors, which is missing"),
    "truncated": (truncate, "part-00000.safetensors, which has model.w, cannot be read"),
    "emptied": (lambda f: (f / "part-00000.safetensors").write_bytes(b""), "part-00000.safetensors.*cannot be read"),
    "no tensor": (lambda f: rewrite(f, lambda t: t.pop("model.tied")), "part-.* does not hold model.tied"),
    "other shape": (
        lambda f: rewrite(f, lambda t: t.update({"model.tied": torch.ones(3, 4)})),
        r"model.tied is F32 \(3, 4\) in .*, and by index.json should be F32 \(4, 3\)",
    ),
    "other dtype": (
        lambda f: rewrite(f, lambda t: t.update({"model.tied": torch.ones(4, 3, dtype=torch.int32)})),
        "model.tied is I32 .* should be F32",
    ),
    "no part": (of_w(lambda w: w.update(parts=[])), "model.w is not whole: 0 of its 12 elements are in no file"),
    "half a part": (of_w(lambda w: w["parts"][0].update(sizes=[2, 3])), "model.w is not whole: 6 of its 12"),
    "outside": (
        of_w(lambda w: w["parts"][0].update(offset=[1, 0])),
        r"model.w \(4, 3\) has no part \(4, 3\) at \(1, 0",
    ),
    "negative": (of_w(lambda w: w["parts"][0].update(offset=[-1, 0])), "index.json is damaged.*no list of sizes"),
    "fractions": (of_w(lambda w: w.update(shape=[4.0, 3])), "index.json is damaged.*no list of sizes"),
    "dimensions": (of_w(lambda w: w["parts"][0].update(offset=[0])), "model.w .* has no part"),
    "twice": (of_w(lambda w: w["parts"].append(w["parts"][0])), "parts of model.w overlap"),
    "elsewhere": (of_w(lambda w: w["parts"][0].update(file="../f")), r"damaged.*model.w is said to be .* in '../f'"),
    "no key": (of_w(lambda w: w["parts"][0].update(key=[])), "damaged.*model.w is said to be"),
    "strange dtype": (of_w(lambda w: w.update(dtype="float33")), "damaged: KeyError.'float33'"),
    "its dtype": (of_w(lambda w: w.update(dtype="float64")), "model.w was saved in torch.float64, here it is torch.fl"),
    "its shape": (
        of_w(lambda w: (w.update(shape=[3, 4]), w["parts"][0].update(sizes=[3, 4]))),
        "Size mismatch between saved .*3, 4.* for model.w",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_nothing_is_loaded(saved, kind, caplog):
    damage, words = DAMAGE[kind]
    damage(saved)
    target = emptied(state())
    with pytest.raises(ValueError, match=words):
        storage.load(saved, target)
    assert equal(target, emptied(state()))
    assert [record for record in caplog.records if record.name == "root"] == []
    reader = storage.SafetensorsReader(saved)
    with pytest.raises(dcp.CheckpointException, match=words):
        dcp.load(target, storage_reader=reader, planner=storage.JsonLoadPlanner())
    assert equal(target, emptied(state()))


def test_what_a_reader_cannot_read_it_says_itself(tmp_path):
    with pytest.raises(ValueError, match="is no checkpoint"):
        storage.SafetensorsReader(tmp_path / "nothing").read_metadata()


# ------------------------------------------------------------------------ optimizers


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 5, bias=False))
    model[1].bias.requires_grad_(False)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: Sequence[int]) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(5, (6,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens), tokens.roll(1)).backward()
        optimizer.step()


@pytest.mark.parametrize("options", [{}, {"betas": (0.0, 0.9)}, {"lr": torch.tensor(0.05)}], ids=["", "betas", "lr"])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_an_optimizer_goes_on(tmp_path, options, flat, mode):
    chosen = StateDictOptions(flatten_optimizer_state_dict=flat)
    name = "SFAdamW" if "betas" in options else "SFNorMuon"

    def build(seeds: Sequence[int]) -> tuple[nn.Module, anytime.AnytimeOptimizer]:
        model = network()
        optimizer = getattr(anytime, name)(model, **{"lr": 0.05, **copy.deepcopy(options)})
        train(model, optimizer, seeds)
        getattr(optimizer, mode)()
        return model, optimizer

    def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        weights, its_state = get_state_dict(model, optimizer, options=chosen)
        return {"model": weights, "optimizer": its_state}

    model, optimizer = build(range(3))
    storage.save(tmp_path / "checkpoint", state_of(model, optimizer))
    fresh, other = build([7])
    target = state_of(fresh, other)
    storage.load(tmp_path / "checkpoint", target)
    assert equal(target, state_of(model, optimizer))
    set_model_state_dict(fresh, target["model"])
    set_optimizer_state_dict(fresh, other, target["optimizer"], options=chosen)
    assert equal(other.state_dict(), optimizer.state_dict())
    for m, o in ((model, optimizer), (fresh, other)):
        o.train()
        train(m, o, range(3, 5))
    assert equal(fresh.state_dict(), model.state_dict())


# ------------------------------------------------------------------------ several processes


class World:
    """Processes that do together what they are told, a scene at a time; they part after their slow imports."""

    def __init__(self, folder: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(Path(anytime.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
        if sys.platform == "linux":
            environment["GLOO_SOCKET_IFNAME"] = "lo"
        orders, answers = ([os.pipe() for _ in range(PROCESSES)] for _ in range(2))
        theirs = [(order[0], answer[1]) for order, answer in zip(orders, answers, strict=True)]
        self.orders = [os.fdopen(order[1], "w") for order in orders]
        self.answers = [os.fdopen(answer[0]) for answer in answers]
        self.errors = (folder / "errors").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(folder / "meeting"), json.dumps(theirs)],
            stdout=self.errors,
            stderr=self.errors,
            env=environment,
            pass_fds=[end for pair in theirs for end in pair],
            start_new_session=True,
        )
        for end in (end for pair in theirs for end in pair):
            os.close(end)
        self.ended = False

    def __call__(self, scene: str, **given: Any) -> list[Any]:
        """What each process made of it; the first that fails fails the test, and ends them all."""
        watch = threading.Timer(SECONDS, self.end)
        watch.start()
        try:
            for orders in self.orders:
                print(
                    json.dumps([scene, {key: os.fspath(value) for key, value in given.items()}]),
                    file=orders,
                    flush=True,
                )
            lines = [answers.readline() for answers in self.answers]
        except BrokenPipeError:
            lines = [""]
        finally:
            watch.cancel()
        answers = [json.loads(line) if line else {"wrong": "it ended"} for line in lines]
        if wrong := [f"process {n}: {a['wrong']}" for n, a in enumerate(answers) if "wrong" in a]:
            self.end()
            self.errors.seek(0)
            pytest.fail("\n".join([*wrong, self.errors.read()[-4000:]]))
        return [answer["result"] for answer in answers]

    def end(self) -> None:
        if not self.ended:
            self.ended = True
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def close(self) -> None:
        self.end()
        for file in (*self.orders, *self.answers, self.errors):
            with suppress(BrokenPipeError):
                file.close()


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], World]]:
    """The processes, started once; anew after a failure."""
    made: list[World] = []

    def get() -> World:
        if not made or made[-1].ended:
            made.append(World(tmp_path_factory.mktemp("world")))
        return made[-1]

    yield get
    for world in made:
        world.close()


SCENES: dict[str, Callable[..., Any]] = {}


def scene(function: Callable[..., Any]) -> Callable[..., Any]:
    SCENES[function.__name__] = function
    return function


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    """Over the first processes; made by all, as torch needs."""
    names = ("dp", "tp")[: len(shape)]
    return DeviceMesh("cpu", torch.arange(math.prod(shape)).view(shape), mesh_dim_names=names)


GROUPS: dict[int, Any] = {}


def group_of(size: int) -> Any:
    if size not in GROUPS:
        GROUPS[size] = dist.new_group(list(range(size)))
    return GROUPS[size]


def members(size: int) -> bool:
    return dist.get_rank() < size


LINE = [[Shard(0)], [Shard(1)], [Replicate()]]
GRID = [
    [Shard(0), Shard(1)],
    [Shard(1), Shard(0)],
    [Shard(0), Shard(0)],
    [Shard(1), Replicate()],
    [Replicate(), Shard(0)],
    [Replicate(), Replicate()],
    "strided",
]
SHAPES = [(8, 6), (5, 7), (3, 2), (1, 4), (0, 4), (4, 3, 2)]
NAMES = {f"{shape}.{n}": (number, n) for number, shape in enumerate(SHAPES) for n in range(len(GRID))}


def spread(mesh: DeviceMesh, *, turn: int = 0, blank: bool = False) -> dict[str, Any]:
    """Every shape in every way that the mesh allows, by turns; blank to be loaded into."""

    def placed(whole: Tensor, placements: Any) -> Tensor:
        if placements == "strided":
            placements = [_StridedShard(0, split_factor=mesh.size(1)) if mesh.size(1) > 1 else Shard(0), Shard(0)]
        return distribute_tensor(torch.ones_like(whole) if blank else whole, mesh, placements, src_data_rank=None)

    tensors: dict[str, Any] = {}
    ways = LINE if mesh.ndim == 1 else GRID
    for name, (number, n) in NAMES.items():
        whole = filled(SHAPES[number], DTYPES[(number + n) % len(DTYPES)], number)
        tensors[name] = placed(whole, ways[(n + turn) % len(ways)])
    tensors["scalar"] = placed(torch.tensor(3.5), [Replicate()] * mesh.ndim)
    tensors["plain"] = filled((2, 3)) * (not blank)
    tensors["plain scalar"] = torch.tensor(7 * (not blank))
    tensors["values"] = None if blank else [1, (2.5, "three")]
    return {"deep": tensors}


def only_tensors(state_dict: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state_dict["deep"].items() if isinstance(value, Tensor)}


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        mine, theirs = (v.to_local() if isinstance(v, DTensor) else v for v in (found[name], value))
        assert equal(mine, theirs), (name, mine, theirs)


def meshes(saver: str, loader: str) -> Iterator[tuple[str, DeviceMesh, DeviceMesh]]:
    """Of one and of two dimensions."""
    grids = {"1": (1, 1), "2": (1, 2), "4": (2, 2)}
    for one, other in ((1, 1), (1, 2), (2, 1), (2, 2)):
        shapes = ((int(size),) if dims == 1 else grids[size] for size, dims in ((saver, one), (loader, other)))
        here, there = map(mesh_of, shapes)
        yield f"{one}{other}", here, there


@scene
def dcp_from_to(folder: str, saver: str, loader: str) -> None:
    for name, here, there in meshes(saver, loader):
        groups = group_of(int(saver)), group_of(int(loader))
        path = Path(folder) / name
        if members(int(saver)):
            storage.save(path, spread(here), process_group=groups[0])
        dist.barrier()
        if members(int(loader)):
            target = spread(there, turn=1, blank=True)
            storage.load(path, target, process_group=groups[1])
            compare(target["deep"], spread(there, turn=1)["deep"])
        dist.barrier()


@scene
def files_from_to(folder: str, saver: str, loader: str) -> None:
    rank = dist.get_rank()
    for name, here, there in meshes(saver, loader):
        path = Path(folder) / name
        path.mkdir(exist_ok=True)
        index = Index()
        if members(int(saver)):
            tensors = only_tensors(spread(here))
            regions = [r for n, tensor in tensors.items() for r in regions_of(n, tensor, plain=rank == 0)]
            assert all(region.tensor.numel() or 0 in region.shape for region in regions)
            index = write_regions(path / f"{rank}.safetensors", regions)
        everyones: list[Any] = [None] * PROCESSES
        dist.all_gather_object(everyones, index)
        merged = Index.merged(everyones)
        assert {*merged.tensors} == {"plain", "plain scalar", "scalar", *NAMES}
        parts, written = (sum(len(e.parts) for i in of for e in i.tensors.values()) for of in ([merged], everyones))
        assert parts == written  # each once
        if rank == 0:
            merged.write(path)
        dist.barrier()
        if members(int(loader)):
            target = only_tensors(spread(there, turn=1, blank=True))
            read_into(path, Index.read(path), target)
            compare(target, only_tensors(spread(there, turn=1)))
        dist.barrier()


@pytest.mark.parametrize("loader", [1, 2, 4])
@pytest.mark.parametrize("saver", [1, 2, 4])
@pytest.mark.parametrize("way", ["dcp_from_to", "files_from_to"])
def test_saved_by_some_and_loaded_by_others(worlds, tmp_path, way, saver, loader):
    worlds()(way, folder=tmp_path, saver=str(saver), loader=str(loader))
    for path in tmp_path.rglob("*.*"):
        assert path.suffix in (".safetensors", ".json")


def mlp(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 6), nn.Linear(6, 3))


TP = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def sharded(seed: int, mesh: DeviceMesh) -> nn.Module:
    """FSDP2, over tensor parallelism where the mesh has two dimensions; the last layer is under FSDP alone."""
    model = mlp(seed)
    if mesh.ndim == 2:
        parallelize_module(model, mesh["tp"], TP)
    fully_shard(model[0], mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


@scene
def fsdp(folder: str, layouts: str) -> list[str]:
    """From every layout to every other; what is under FSDP alone is there once for each rank of TP."""
    shapes = {name: tuple(map(int, name.split("x"))) for name in layouts.split()}
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    meshes = {name: None if name == "1" else mesh_of(shape) for name, shape in shapes.items()}
    kinds = set()
    for name, mesh in meshes.items():
        group = group_of(sizes[name])
        if members(sizes[name]):
            model = mlp(0) if mesh is None else sharded(0, mesh)
            kinds |= {str(p.placements) for p in model.parameters() if isinstance(p, DTensor)}
            storage.save(Path(folder) / name, model.state_dict(), process_group=group)
        dist.barrier()
        indexes: list[Any] = [None] * PROCESSES
        mine = Index()
        if members(sizes[name]):
            plain = dist.get_rank() == 0
            regions = [r for n, t in model.state_dict().items() for r in regions_of(n, t, plain=plain)]
            (Path(folder) / f"{name} files").mkdir(exist_ok=True)
            mine = write_regions(Path(folder) / f"{name} files" / f"{dist.get_rank()}.safetensors", regions)
        dist.all_gather_object(indexes, mine)
        if dist.get_rank() == 0:
            Index.merged(indexes).write(Path(folder) / f"{name} files")
        dist.barrier()
    for name, mesh in meshes.items():
        group = group_of(sizes[name])
        for source in meshes:
            if members(sizes[name]):
                whole = dict(mlp(0).named_parameters())
                for way in ("dcp", "files"):
                    model = mlp(1) if mesh is None else sharded(1, mesh)
                    target = model.state_dict()
                    if way == "dcp":
                        storage.load(Path(folder) / source, target, process_group=group)
                    else:
                        read_into(
                            Path(folder) / f"{source} files", Index.read(Path(folder) / f"{source} files"), target
                        )
                    for key, p in model.named_parameters():
                        found = p.full_tensor() if isinstance(p, DTensor) else p
                        assert torch.equal(found, whole[key]), (source, name, way, key)
            dist.barrier()
    return sorted(kinds)


@pytest.mark.parametrize("layouts", ["2x2 1", pytest.param("2x2 4 1x4 4x1 2 1", marks=pytest.mark.slow)])
def test_fsdp_over_tensor_parallelism(worlds, tmp_path, layouts):
    kinds = worlds()("fsdp", folder=tmp_path, layouts=layouts)[0]
    assert any("_S" in kind for kind in kinds)


def refused(do: Callable[[], Any]) -> str:
    try:
        do()
    except ValueError as wrong:
        return str(wrong)
    return "nothing was wrong"


@scene
def refusals(folder: str) -> dict[str, str]:
    """What one process finds wrong is wrong for all, and nobody has loaded anything."""
    line, square = mesh_of((4,)), mesh_of((2, 2))
    rank = dist.get_rank()
    path = Path(folder) / "checkpoint"
    good = distribute_tensor(filled((8,)), line, [Shard(0)], src_data_rank=None)
    storage.save(path, {"w": good, "n": 1})
    answers = {}
    shape = {"shape": torch.Size([8]), "stride": (1,)}
    strange = {
        "sum": DTensor.from_local(torch.ones(8), line, [Partial()]),
        "pieces": DTensor.from_local(torch.ones(2), line, [_StridedShard(0, split_factor=2)], **shape),
        "pieces here": DTensor.from_local(
            torch.ones(4), square, [_StridedShard(0, split_factor=2), Replicate()], **shape
        ),
        "uneven": DTensor.from_local(torch.ones(3 if rank == 2 else 2), line, [Shard(0)], **shape),
    }
    for name, tensor in strange.items():
        answers[f"regions of {name}"] = refused(lambda: regions_of("w", tensor))  # noqa: B023
        answers[f"save {name}"] = refused(lambda: storage.save(path, {"w": tensor}))  # noqa: B023
        answers[f"load {name}"] = refused(lambda: storage.load(path, {"w": tensor}))  # noqa: B023
    answers["value"] = refused(lambda: storage.save(path, {"w": good, "n": object() if rank == 3 else 1}))
    dist.barrier()
    assert not (Path(folder) / ".checkpoint.new").exists()
    if rank == 0:
        file = path / "part-00003.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
    dist.barrier()
    target = {"w": distribute_tensor(torch.ones(8), line, [Shard(0)], src_data_rank=None), "n": 5}
    answers["truncated"] = refused(lambda: storage.load(path, target))
    assert torch.equal(target["w"].to_local(), torch.ones(2))
    assert target["n"] == 5
    if rank == 0:
        (path / "index.json").unlink()
    dist.barrier()
    answers["no index"] = refused(lambda: storage.load(path, target))
    pair = mesh_of((2,))
    if rank > 1:
        for shape in ((4, 2), (0, 2)):
            outside = DTensor.from_local(torch.ones(shape), pair, [Shard(0)], shape=torch.Size(shape), stride=(2, 1))
            assert regions_of("w", outside, replicas=True) == []
    return answers


def test_what_one_process_finds_wrong_is_wrong_for_all(worlds, tmp_path):
    answers = worlds()("refusals", folder=tmp_path)
    words = {
        "sum": "w is a sum over processes that has not been taken yet",
        "pieces": "what a process holds of w is not in one piece",
        "pieces here": "what a process holds of w is not in one piece",
    }
    for rank, answer in enumerate(answers):
        for name, text in words.items():
            for what in ("regions of", "save", "load"):
                assert text in answer[f"{what} {name}"], (rank, what, name, answer)
        uneven = "this process has (3,) of w (8,)"
        assert (uneven in answer["regions of uneven"]) == (rank == 2)
        assert uneven in answer["save uneven"]
        assert uneven in answer["load uneven"]
        assert "n is of a type that JSON cannot hold" in answer["value"]
        assert "part-00003.safetensors, which has w, cannot be read" in answer["truncated"]
        assert "is no checkpoint: it has no index.json" in answer["no index"]


@scene
def meanwhile(folder: str) -> None:
    mesh = mesh_of((4,))
    live = spread(mesh)
    future = storage.async_save(Path(folder) / "checkpoint", live)
    for value in live["deep"].values():
        if isinstance(value, Tensor):
            value.zero_()
    future.result(SECONDS)
    dist.barrier()
    target = spread(mesh, blank=True)
    storage.load(Path(folder) / "checkpoint", target)
    compare(target["deep"], spread(mesh)["deep"])


def test_processes_save_while_work_goes_on(worlds, tmp_path):
    worlds()("meanwhile", folder=tmp_path)


def perform(rank: int, meeting: str, orders: int, answers: int) -> None:
    """What each process of a World does."""
    limit = timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=PROCESSES, timeout=limit)
    with os.fdopen(orders) as lines, os.fdopen(answers, "w") as replies:
        for line in lines:
            name, given_to_it = json.loads(line)
            try:
                answer = {"result": SCENES[name](**given_to_it)}
            except BaseException:
                answer = {"wrong": traceback.format_exc()}
            print(json.dumps(answer), file=replies, flush=True)
            if "wrong" in answer:  # the others need not wait for this one
                break


if __name__ == "__main__":
    for mine, pipes in enumerate(json.loads(sys.argv[2])):
        if os.fork() == 0:
            perform(mine, sys.argv[1], *pipes)
            os._exit(0)
    for _ in range(PROCESSES):
        os.wait()


def test_a_lazily_negated_tensor_is_saved_with_its_sign(tmp_path):
    negated = torch.tensor([1 + 2j]).conj().imag
    assert negated.is_neg()
    storage.save(tmp_path / "x", {"a": negated})
    found = {"a": torch.empty(1)}
    storage.load(tmp_path / "x", found)
    assert found["a"].tolist() == [-2.0]


@pytest.mark.parametrize("then", ["load", "save"])
@pytest.mark.parametrize("left", [[".x.old"], [".x.old", ".x.new"]], ids=["old", "old and new"])
def test_a_save_stopped_between_its_renames_is_there(tmp_path, left, then):
    """The newest that is whole is read, and stays until the next one is."""
    for value, name in enumerate(left, 1):
        storage.save(tmp_path / "x", {"a": torch.full((3,), float(value))})
        (tmp_path / "x").rename(tmp_path / f"then {name}")
    for name in left:
        (tmp_path / f"then {name}").rename(tmp_path / name)
    (tmp_path / ".x.new").mkdir(exist_ok=True)  # one without an index is not whole
    if then == "save":
        with pytest.raises(ValueError, match="cannot be stored"):
            storage.save(tmp_path / "x", {"a": torch.zeros(3), "b": torch.zeros(3, dtype=torch.float8_e8m0fnu)})
    found = {"a": torch.zeros(3)}
    storage.load(tmp_path / "x", found)
    assert found["a"].tolist() == [float(len(left))] * 3
    storage.save(tmp_path / "x", {"a": torch.full((3,), 3.0)})
    storage.load(tmp_path / "x", found)
    assert found["a"].tolist() == [3.0] * 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x"]
