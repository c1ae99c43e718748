"""Several processes that train one model: who they are, what they agree on, and how the model is spread over them.

torchrun starts them and tells each in its environment who it is. They form a mesh of replicas × shard × tensor: the
batch is cut over the first two, weights and state are over `shard` (FSDP2), every layer is over `tensor`. Without
torchrun there is one process, and all of this does nothing.
"""

from __future__ import annotations

import logging
import math
import os
import re
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from .config import Config, flat, plain
from .device import choose_device, narrow
from .errors import Elsewhere, UserError
from .model import GPT, ModelConfig

T = TypeVar("T")

#: Seconds for which those who have nothing to say stay: when the first of them ends, torchrun ends the rest.
LAST_WORDS = 3.0
#: A checkpoint may take its time: its writers wait for each other so many times longer than others.
_WRITERS_WAIT = 10


def leads() -> bool:
    """Whether this process speaks for all; known before they have met."""
    return os.environ.get("RANK", "0") == "0"


# ------------------------------------------------------------------ agreement


class Peers:
    """Processes that tell each other small things past the devices, by a group of their own; by default one alone."""

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.rank, self.size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def everyones(self, value: T) -> list[T]:
        """What each of them brings, in order."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def leaders(self, value: T) -> T:
        """What the first brings."""
        return self.everyones(value if self.leads else None)[0]  # type: ignore[return-value]

    def each(self, act: Callable[[], T]) -> list[T]:
        """Everyone's act(); where one fails all do, with the same words, once none is at work any more."""
        mine: T | None = None
        wrong: Exception | None = None
        try:
            mine = act()
        except Exception as found:
            wrong = found
        disk = isinstance(wrong, OSError)
        told = self.everyones((mine, None if wrong is None else (disk, str(wrong) if disk else repr(wrong))))
        for rank, (_, failed) in enumerate(told):
            if failed is not None:
                if rank == self.rank and wrong is not None:
                    raise wrong
                raise (OSError if failed[0] else RuntimeError)(failed[1])
        return [value for value, _ in told]  # type: ignore[misc]

    def leader_does(self, act: Callable[[], object]) -> None:
        """The first acts, all know how it went."""
        self.each(act if self.leads else lambda: None)

    @contextmanager
    def leader_first(self) -> Iterator[None]:
        """The others come in once the first is through."""
        if not self.leads:
            self.everyones(None)
        yield
        if self.leads:
            self.everyones(None)


# -------------------------------------------------------------------- a world


@dataclass
class World:
    """The processes of a run as one of them sees them; by default it is alone."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    replicas: int = 1
    shard: int = 1
    tensor: int = 1
    mesh: DeviceMesh | None = None
    talk: Peers = field(default_factory=Peers)  # for the main thread
    files: Peers = field(default_factory=Peers)  # for the thread that writes checkpoints

    @property
    def rank(self) -> int:
        return self.talk.rank

    @property
    def size(self) -> int:
        return self.talk.size

    @property
    def leads(self) -> bool:
        return self.talk.leads

    @property
    def readers(self) -> int:
        """In how many parts a batch is cut: processes that share layers read the same."""
        return self.replicas * self.shard

    @property
    def reader(self) -> int:
        """Which part is this process's."""
        return self.rank // self.tensor

    def at_once(self, config: Config) -> int:
        """Sequences at once: the most that the settings allow and that cut this process's share evenly."""
        share = config.batch_size // self.readers
        return max(n for n in range(1, config.sequences_at_once + 1) if share % n == 0)

    def total(self, values: Tensor) -> Tensor:
        """The sum over all readers, on the device, in place; in the order of its stream, without waiting."""
        if self.size > 1:
            dist.all_reduce(values)
            values /= self.tensor
        return values

    def agree(self, asked: int, seconds: float) -> tuple[int, float]:
        """A signal that any process got, and the first one's clock: all stop after the same step.

        Sixteen bytes between hosts at every step, which takes a tenth of a millisecond and waits for no device. Less
        often would be no cheaper in sum and leave a process without an answer to its signal for as long.
        """
        if self.size == 1:
            return asked, seconds
        found = torch.tensor([asked, seconds if self.leads else 0.0], dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.talk.group)
        return int(found[0]), float(found[1])

    # ------------------------------------------------------------- the model

    def owners(self, config: Config) -> str | None:
        """Who works on a matrix where every process has it whole."""
        owners = config.parallel.owners
        if owners == "all" or self.size == 1:
            return None
        if self.shard > 1 or self.tensor > 1:
            raise UserError(f"parallel.owners is {owners!r}, which is for parallel.shard 1 and parallel.tensor 1")
        return owners

    def spread(self, model: GPT, config: Config, compiled: bool) -> Forward:
        """Cuts the model up in place and moves it to the device; how it is called from now on.

        Every process comes with the same whole weights, so that nothing need be sent, and is left with its part.
        """
        check_model(config.model, self.shard, self.tensor)
        if self.tensor > 1:
            assert self.mesh is not None
            parallelize_module(model, self.mesh["tensor"], _plan(config.model.layers), src_data_rank=None)
        cut = self.shard > 1 or self.tensor > 1
        if compiled and cut:  # in pieces between which FSDP comes in
            for block in model.blocks:
                block.forward = torch.compile(block.forward, dynamic=False)
            model.score = torch.compile(model.score, dynamic=False)  # type: ignore[method-assign]
        if cut and self.readers > 1:
            self._shard(model, narrow(self.device, config.precision))
        model.to(self.device)
        module: nn.Module = model
        if self.readers > 1 and not cut:
            devices = [self.device] if self.device.type == "cuda" else None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # of a name that is new in torch 2.13
                module = DistributedDataParallel(
                    model, device_ids=devices, gradient_as_bucket_view=True, broadcast_buffers=False
                )
        return Forward(module, torch.compile(module, dynamic=False) if compiled and not cut else module)

    def _shard(self, model: GPT, half: bool) -> None:
        """Each block's weights travel together, in the precision in which they are used: half the bytes in bfloat16."""
        assert self.mesh is not None
        mesh = self.mesh["replicate", "shard"] if self.replicas > 1 else self.mesh["shard"]
        wide = torch.float32 if half else None
        policy = MixedPrecisionPolicy(torch.bfloat16 if half else None, wide, cast_forward_inputs=False)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh)


@dataclass(frozen=True)
class Forward:
    """A model as the loop calls it."""

    module: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """For a part of a batch: gradients of all but the last stay where they are."""
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(last)
            self.module.set_is_last_backward(last)
        elif isinstance(self.module, DistributedDataParallel) and not last:
            return self.module.no_sync()
        return nullcontext()


def clip_(parameters: Sequence[Tensor], most: float, world: World) -> Tensor:
    """Scales the gradients so that the norm of all of them is at most so much; what it was."""
    grads = [p.grad for p in parameters if p.grad is not None]
    here = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    norm = torch.nn.utils.get_total_norm(here)
    if isinstance(grads[0], DTensor):
        norm = norm.square()
        dist.all_reduce(norm)
        norm = (norm / world.replicas).sqrt()
    torch._foreach_mul_(here, (most / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _plan(layers: int) -> dict[str, ParallelStyle]:
    """q, k, v and up by their rows (heads, hidden columns), o and down by their columns, the embedding by its ids."""
    whole = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    plan: dict[str, ParallelStyle] = {"embedding": RowwiseParallel(input_layouts=Replicate()), "shared": whole}
    for i in range(layers):
        plan |= {f"blocks.{i}.{name}": ColwiseParallel() for name in ("q", "k", "v", "up")}
        plan |= {f"blocks.{i}.{name}": RowwiseParallel() for name in ("o", "down")}
        plan[f"blocks.{i}.shared"] = whole
    return plan


# ------------------------------------------------------------------- checking


def mesh_of(count: int, config: Config) -> tuple[int, int, int]:
    """Replicas, shard and tensor for so many processes."""
    tensor = config.parallel.tensor
    if count % tensor:
        raise UserError(
            f"parallel.tensor is {tensor}, must divide the number of processes, {count}: {_one_of(divisors(count))}"
        )
    rest = count // tensor
    shard = config.parallel.shard or rest
    if rest % shard:
        among = f"{count} processes" if tensor == 1 else f"{count} processes / parallel.tensor = {rest}"
        raise UserError(
            f"parallel.shard is {shard}, must divide {among}: say --parallel.shard 0 (all) or {_one_of(divisors(rest))}"
        )
    if config.batch_size % rest:
        raise UserError(f"batch_size is {config.batch_size}, must be a multiple of {rest}, the processes that share it")
    return rest // shard, shard, tensor


def check_model(model: ModelConfig, shard: int, tensor: int) -> None:
    """That every layer can be cut evenly."""
    if tensor == 1:
        return
    heads, sizes = model.width // model.head, (model.vocabulary, model.width, model.hidden)
    fits = [n for n in divisors(math.gcd(heads, *sizes)) if not any(size % (n * shard) for size in sizes)]
    if tensor not in fits:
        also = f" times parallel.shard, {shard}," if shard > 1 else ""
        raise UserError(
            f"parallel.tensor is {tensor}, must divide the model's {heads} heads, and{also} its vocabulary "
            f"{sizes[0]}, width {sizes[1]} and hidden width {sizes[2]}: {_one_of(fits) if fits else 'there is none'}"
        )


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _one_of(numbers: Sequence[int]) -> str:
    return f"one of {', '.join(map(str, numbers))}" if len(numbers) > 1 else str(numbers[0])


# -------------------------------------------------------------------- joining


@contextmanager
def joined(config: Config) -> Iterator[World]:
    """The world that torchrun's environment describes, joined; one process where there is none.

    Of several processes that fail, the first says why and the others end with Elsewhere: one cause, one message.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        mesh_of(1, config)
        yield World(choose_device(config.device))
        return
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise UserError(f"WORLD_SIZE is {count} but {', '.join(missing)} not set: start the processes by torchrun")
    patience = timedelta(seconds=config.parallel.timeout)
    store = _fresh(next(rendezvous("env://", timeout=patience))[0], int(os.environ["RANK"]), count, patience)
    try:
        world = _meet(config, count, store, patience)
        with loss_parallel() if world.tensor > 1 else nullcontext():
            yield world
        world.talk.everyones(None)  # the first may hold what the others still need to end
        dist.destroy_process_group()
    except Exception as wrong:
        if not _first_to_fail(store):
            time.sleep(LAST_WORDS)
            raise Elsewhere(f"another process of the run failed ({wrong})") from wrong
        if _is_of_a_lost_process(wrong):
            what = re.sub(r"^\[[^]]*\] ", "", str(wrong).splitlines()[0]).partition(". ")[0]  # without its line of C++
            raise UserError(
                f"a process of the run was lost ({what}): run the same command again to go on from the last checkpoint "
                f"in {config.run}"
            ) from wrong
        raise


def _fresh(store: Any, rank: int, count: int, patience: timedelta) -> Any:
    """A part of the store that nobody used before. torchrun's outlives those whom it starts again, and what the last
    ones left would be taken for addresses of these.

    Each leaves a name. The first puts all of them on a list, anew as long as some of those listed do not answer: their
    names were left by others.
    """
    mine, end = uuid.uuid4().hex, time.monotonic() + patience.total_seconds()
    names = [f"anytime/{each}" for each in range(count)]
    store.set(names[rank], mine)
    while time.monotonic() < end:
        if rank == 0 and store.check(names):
            store.set("anytime/list", " ".join(store.get(name).decode() for name in names))
        listed = store.get("anytime/list").decode().split() if store.check(["anytime/list"]) else []
        if len(listed) == count and listed[rank] == mine:
            store.set(f"{listed[0]}/{rank}", "here")
            if rank or store.check([f"{mine}/{each}" for each in range(count)]):
                return PrefixStore(listed[0], store)
        time.sleep(0.02)
    raise UserError(f"not all of {count} processes came within {patience}: see to the others, or to parallel.timeout")


def _meet(config: Config, count: int, store: Any, patience: timedelta) -> World:
    sizes = mesh_of(count, config)
    device = _own_device(config.device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=int(os.environ["RANK"]), world_size=count, timeout=patience)
    talk = Peers(dist.new_group(backend="gloo", timeout=patience))
    files = Peers(dist.new_group(backend="gloo", timeout=patience * _WRITERS_WAIT))
    _check_alike(config, talk)
    dims = dict(zip(("replicate", "shard", "tensor"), sizes, strict=True))
    if sizes[0] == 1 or sizes[2] == 1:  # else FSDP takes the place of DDP, which knows no such parameters
        dims = {name: n for name, n in dims.items() if n > 1}
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(
        logging.ERROR
    )  # it finds two meshes' work slow
    mesh = init_device_mesh(device.type, tuple(dims.values()), mesh_dim_names=tuple(dims))
    return World(device, *sizes, mesh, talk, files)


def _own_device(name: str) -> torch.device:
    """Of the GPUs, the one that is this process's."""
    device = choose_device(name)
    if device.type == "cuda":
        local, there = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= there:
            raise UserError(f"there are {there} GPUs for more processes: torchrun --nproc-per-node {there}")
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    return device


def _check_alike(config: Config, talk: Peers) -> None:
    mine = flat(plain(config))
    first = talk.leaders(mine)
    if differences := [f"{key}: {mine.get(key)} for {first.get(key)}" for key in first if mine.get(key) != first[key]]:
        raise UserError(f"process {talk.rank} was started with other settings ({'; '.join(differences)})")


def _first_to_fail(store: Any) -> bool:
    try:
        return bool(store.add("anytime/failed", 1) == 1)
    except RuntimeError:  # whoever kept it is gone: better said twice than never
        return True


def _is_of_a_lost_process(wrong: Exception) -> bool:
    return isinstance(wrong, dist.DistError) or (isinstance(wrong, RuntimeError) and "gloo" in str(wrong).lower())
