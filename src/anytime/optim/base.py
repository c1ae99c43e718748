"""The one Optimizer behind all of them: state, the step, modes and the average.

A group follows one rule (`group["rule"]`). A parameter's state is plain tensors by name, each of the parameter's shape,
a statistic a row, or 0-dim, and all zeros at the start:

    step, weight_sum, beta   t, Σw and the β that formed y
    d                        z − x
    residual                 y − p, where the parameter p is narrower than float32
    y                        the parameter as it was in train mode, while in eval mode
    …                        the direction's own buffers

so it needs no dummy step, weights may still be loaded before the first step, and it shards as its parameter does.
Scheduled optimizers are the same without the average: x = y = z = p, and no d.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, overload

import torch
from torch import Tensor, nn

from .. import routing
from ..core import averaging
from ..core.averaging import Tensors
from ..core.direction import Batch
from ..core.layout import Layout
from ..distributed.parts import is_sharded, local, part_like, zeros
from ..distributed.team import Team, refuse_flat, reshard
from . import fused
from .files import ABOUT, Resumable, fingerprint
from .groups import Group, Place, Router, Ruled, places, unique_names
from .moves import all_finite, chunks, compute_dtype, confined, fast_step, placed_as, where_ok, write_
from .options import validate
from .rules import ELEMENTWISE, RULES

if TYPE_CHECKING:  # it needs Triton
    from .engine import Engine

State = dict[str, Tensor]


class Iterates(NamedTuple):
    """The three sequences of one parameter, in the precision of the update."""

    x: Tensor
    y: Tensor
    z: Tensor


class Rates(NamedTuple):
    """Of one step of B parameters: η, the rate whose square weighs the step in the average, and λ of each."""

    eta: Tensor
    weighs: Tensor
    decay: Sequence[float] | Tensor


class AnytimeOptimizer(Resumable):
    """Abstract. `matrix` and `rest` are the rules and defaults that a final class brings.

    rules: name pattern -> "matrix", "rest" or options (rule, split, rate, lr, …); the first match wins.
    unmatched: "auto" routes what no pattern matches, "raise" refuses it.
    on_nonfinite: "skip" leaves out a step whose gradients hold inf or NaN, "raise" stops there.
    graph: replay step() from a CUDA graph where the kernels do all of it on one device; elsewhere it has no effect.
    chunk_bytes: working memory of the kernels at a time; None is a seventh of the state.
    owners, process_group: under data parallelism, who works on a matrix: None everyone, "factor" one process computes
        its polar factor, "state" one process has its state and makes its step, "gradient" the same and the optimizer
        adds up the gradients itself. Sharded parameters (FSDP2, tensor parallelism) need no word.
    """

    averages = True
    #: Whether step() must be given the loss, by a closure that returns it.
    needs_loss = False

    def __init__(
        self,
        params: routing.Params,
        *,
        matrix: Ruled | None,
        rest: Ruled,
        rules: routing.Rules | None = None,
        unmatched: str = "auto",
        on_nonfinite: str = "skip",
        graph: bool = False,
        chunk_bytes: int | None = None,
        owners: str | None = None,
        process_group: Any = None,
    ) -> None:
        whole = {"on_nonfinite": on_nonfinite, "graph": graph, "chunk_bytes": chunk_bytes, "owners": owners}
        validate(whole, whole, type(self).__name__)
        self.plan = routing.Plan()
        self._router = Router(type(self).__name__, matrix, rest, dict(rules or {}), unmatched)
        self._on_nonfinite = on_nonfinite
        self._graph, self._chunk_bytes = graph, chunk_bytes
        self._fused = fused.Engines()
        self._team = Team(owners, process_group)
        self._training = True
        self._skipped: dict[torch.device, Tensor] = {}
        self._fitted: dict[Tensor, tuple[torch.device, torch.dtype]] = {}
        self._known: set[Tensor] = set()
        self._module = weakref.ref(params) if isinstance(params, nn.Module) else None
        collected = routing.collect(params)
        refuse_flat(given.param for members, _ in collected for given in members)
        groups, self.plan.entries = self._router.resolve(collected)
        super().__init__(groups, dict((matrix or rest).options))

    def __getstate__(self) -> dict[str, Any]:
        own = ("plan", "_router", "_on_nonfinite", "_graph", "_chunk_bytes", "_training", "_skipped", "_team", "_known")
        kept = {name: getattr(self, name) for name in own}
        return {**super().__getstate__(), **kept, "_fitted": {}, "_fused": fused.Engines(), "_module": None}

    def __repr__(self) -> str:
        lists = ("params", "param_names", "layouts", "order", "rule", *ABOUT)
        lines = [
            f"  {group['rule']}, {len(group['params'])} parameters: "
            + ", ".join(f"{key}={value!r}" for key, value in sorted(group.items()) if key not in lists)
            for group in self.param_groups
        ]
        return "\n".join([f"{type(self).__name__} (", *lines, ")"])

    def add_param_group(self, param_group: Group) -> None:
        """Adds parameters, routed as the constructor's are: matrices and others become a group each."""
        if "layouts" in param_group:  # resolved
            own = {"param_names", *param_group}
            super().add_param_group(param_group)
            for key in [key for key in param_group if key not in own]:
                del param_group[key]  # torch fills in the defaults of the other rule
            param_group |= self.about()
            self._take_up(param_group)
            return
        known = {id(p) for group in self.param_groups for p in group["params"]}
        collected = routing.collect_group(param_group)
        if any(id(given.param) in known for given in collected[0]):
            raise ValueError("some parameters appear in more than one parameter group")
        groups, entries = self._router.resolve([collected], offset=len(self.plan), complete=False)
        before = len(self.param_groups)
        try:
            for group in groups:
                self.add_param_group(group)
        except Exception:
            for group in self.param_groups[before:]:
                self._forget(group["params"])
            del self.param_groups[before:]
            raise
        self.plan.entries.extend(entries)

    def _take_up(self, group: Group) -> None:
        """Decides who holds a group's parameters, and makes their state; of those that are new."""
        fresh = [place for place in places(group) if place.param not in self._known]
        self._team.add(
            [place.param for place in fresh],
            [Layout.parse(place.layout) for place in fresh],
            matrices=group["rule"] not in ELEMENTWISE,
        )
        self._known.update(place.param for place in fresh)
        for place in fresh:
            if place.param.requires_grad and self._team.holds(place.param):
                self._ensure_state(place)

    def _forget(self, params: Iterable[Tensor]) -> None:
        for p in params:
            self.state.pop(p, None)
            self._fitted.pop(p, None)
            self._known.discard(p)
            self._team.forget(p)

    def _follow(self, *, replaced: bool = False) -> None:
        """Takes up parameters that were put in the places of those given: Accelerate shards a model after its optimizer
        was made, and exchanges them in the groups. What is in no group any more is forgotten.

        replaced: whether all state is about to be loaded, so that none can be lost.
        """
        mine = {p for group in self.param_groups for p in group["params"]}
        if mine == self._known:
            return
        gone, fresh = self._known - mine, mine - self._known
        if gone and fresh:
            what = f"{type(self).__name__}: {len(gone)} parameters were exchanged for others"
            if (owners := self._team.owners) is not None:
                raise RuntimeError(
                    f"{what}, but owners={owners.mode!r} was settled: build the optimizer on the new ones"
                )
            steps = [self.state[p]["step"] for p in gone if self.state.get(p)]
            moved = all(map(self.state.get, fresh))
            if not moved and not replaced and any(not step.is_meta and step.item() for step in steps):
                raise RuntimeError(
                    f"{what} after the first step, and their state belongs to the old ones. Save, build the optimizer "
                    "on the new parameters, and load; or move the entries of optimizer.state yourself"
                )
        self._forget(gone)
        for group in self.param_groups:
            self._take_up(group)

    # ----------------------------------------------------------------- state

    def state_spec(
        self, p: Tensor, group: Mapping[str, Any], layout: str
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        scalar, precise = averaging.scalar_dtype(p.device), compute_dtype(p)
        shape = tuple(p.shape)
        buffers = RULES[group["rule"]].buffers(shape, Layout.parse(layout), group)
        spec = {name: (shape_, dtype or precise) for name, (shape_, dtype) in buffers.items()}
        if self.averages:
            spec |= {"d": (shape, precise), "weight_sum": ((), scalar), "beta": ((), scalar)}
        if p.dtype != precise:
            spec["residual"] = (shape, precise)
        return spec | {"step": ((), scalar)}

    def _ensure_state(self, place: Place) -> State:
        """The parameter's state, created, or moved where the parameter has gone; idempotent."""
        p = place.param
        old: State = self.state.get(p, {})
        if old and self._fitted.get(p) == (p.device, p.dtype):
            return old
        new: State = {}
        layout = Layout.parse(place.layout)
        with torch.inference_mode(False):  # what an evaluation makes, steps will write to
            for name, (shape, dtype) in self.state_spec(p, place.group, place.layout).items():
                if name in old and not old[name].is_meta:
                    new[name] = old[name].to(p.device, dtype)
                else:
                    new[name] = zeros(name, shape, dtype, p, layout)
            if "y" in old:
                new["y"] = old["y"].to(p.device, p.dtype)
            elif self.averages and not self._training:
                new["y"] = p.detach().clone()
        self.state[p] = new
        self._fitted[p] = (p.device, p.dtype)
        return new

    def _place(self, p: Tensor) -> Place:
        for group in self.param_groups:
            for place in places(group):
                if place.param is p:
                    return place
        raise KeyError(f"a tensor of shape {tuple(p.shape)} is not a parameter of this optimizer")

    def ensure_state(self, p: Tensor) -> State:
        """The state of a parameter, created if it has none yet because it was frozen."""
        if not self._team.holds(p):
            raise RuntimeError(f"the state of a parameter of shape {tuple(p.shape)} is held by another process")
        return self._ensure_state(self._place(p))

    def _each(self) -> Iterator[tuple[Tensor, State]]:
        """Parameters that have state, with it; one that never was trainable has none."""
        for group in self.param_groups:
            for place in places(group):
                if self.state.get(place.param):
                    yield place.param, self._ensure_state(place)

    # ------------------------------------------------------------------ step

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update from the gradients of the parameters that have one. They are read, not written, unless this
        optimizer adds them up itself (owners="gradient"): then they become the mean, an owned one at its owner."""
        if not self._training:
            raise RuntimeError(
                f"{type(self).__name__}.step() in eval mode: the model holds the average X, gradients must be taken "
                "at Y. Call optimizer.train() before the forward pass, or leave the averaged() block first."
            )
        self.look_at_weights()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        value = as_loss(loss, type(self).__name__) if self.needs_loss else None
        engine = None if self._team.active else self._fused.again(self.param_groups, self.state)
        if engine is None:
            if not torch.compiler.is_compiling():
                self._follow()
            if self._team.active:
                self._step_together()
                return loss
            by_kernels, rest = fused.split(self._work())
            if len(by_kernels) != 1 or rest:
                self._step_in_parts(by_kernels, rest, value)
                return loss
            (work,) = by_kernels.values()
            engine = self._engine(work)
            self._fused.remember(engine, work, self.param_groups, self.state)
        self._fused.run(engine, graph=self._graph)
        if self._on_nonfinite == "raise" and not engine.ok.item():
            engine.skipped.sub_(1)
            self._refuse()
        return loss

    def _step_together(self) -> None:
        """The step of several processes, which all take it or none."""
        team = self._team
        work: fused.Work = []
        wrong = None
        try:
            work = self._work()
        except RuntimeError as error:
            wrong = error
        params = [p for group in self.param_groups for p in group["params"]]
        team.meet(tuple(p.grad is not None for p in params), self._lines, wrong)
        owners = team.owners
        if owners is not None and owners.mode == "gradient":
            owners.reduce_(params)
        if owners is not None and owners.mode == "factor":
            self._step_in_parts({}, work)
            return
        self._step_in_parts(*fused.split(work))
        if owners is not None:
            moved = [p for p in params if p in owners.of and p.grad is not None]
            owners.gather_(moved, [p.detach() for p in moved])

    def _lines(self) -> list[str]:
        """What processes must have in common, a line a parameter."""
        everywhere = [place for group in self.param_groups for place in places(group)]
        names = unique_names(self.param_groups) or [f"parameter {place.order}" for place in everywhere]
        return [
            f"{name} of shape {tuple(p.shape)}, {p.dtype}, rule {group['rule']}, "
            + (f"placed as {p.placements}, " if is_sharded(p) else "")  # type: ignore[attr-defined]
            + ("without" if p.grad is None else "with")
            + " a gradient"
            for name, (p, group, _, _) in zip(names, everywhere, strict=True)
        ]

    def _step_in_parts(
        self, by_kernels: Mapping[torch.device, fused.Work], rest: fused.Work, loss: Tensor | None = None
    ) -> None:
        """The step of several devices or processes, or of parameters that the kernels do not take."""
        engines = {device: self._engine(work) for device, work in by_kernels.items()}
        flags = [] if loss is None else [loss.isfinite()]
        for engine in engines.values():
            engine.check()
            flags.append(engine.bad == 0)
        finite = self._finite(
            [local(p.grad) for _, members in rest for p, _, _ in members if p.grad is not None], flags, [*engines]
        )
        if self._team.active:
            ok = next(iter(finite.values()), torch.ones((), device=self._team.device))
            ok = self._team.all_of_us(ok.to(self._team.device, averaging.scalar_dtype(self._team.device)))
            finite = {device: ok.to(device) for device in {*finite, self._team.device}}
        self._judge(finite)
        for device, engine in engines.items():
            engine.bad.copy_(finite[device] == 0)
            engine.update(counts=False)
        self._look(rest, finite, loss)
        for group, members in rest:
            self._update(group, members, finite[members[0][0].device])

    def _work(self) -> list[tuple[Group, list[tuple[Tensor, State, Layout]]]]:
        """Parameters with a gradient, by group, device and dtype; everything that can be wrong is found here."""
        work: list[tuple[Group, list[tuple[Tensor, State, Layout]]]] = []
        for group in self.param_groups:
            members: dict[tuple[torch.device, torch.dtype, bool], list[tuple[Tensor, State, Layout]]] = defaultdict(
                list
            )
            for place in places(group):
                p = place.param
                if p.grad is None or p.numel() == 0:
                    continue
                if p.grad.layout != torch.strided:
                    raise RuntimeError(
                        f"{type(self).__name__} takes dense gradients, but one of shape {tuple(p.shape)} is "
                        f"{p.grad.layout}: build its layer with sparse=False"
                    )
                if p.grad.is_complex():
                    found = f"one of shape {tuple(p.shape)} is {p.grad.dtype}"
                    raise RuntimeError(f"{type(self).__name__} takes real gradients, but {found}")
                if is_sharded(p) != is_sharded(p.grad):
                    kinds = ("a plain tensor", "sharded") if is_sharded(p.grad) else ("sharded", "a plain tensor")
                    raise RuntimeError(f"a parameter of shape {tuple(p.shape)} is {kinds[0]}, its gradient {kinds[1]}")
                if not self._team.holds(p):
                    continue
                kind = (p.device, p.dtype, is_sharded(p))
                members[kind].append((p, self._ensure_state(place), Layout.parse(place.layout)))
            work.extend((group, batch) for batch in members.values())
        module = None if self._module is None or work else self._module()
        if module is not None:
            mine = {id(p) for group in self.param_groups for p in group["params"]}
            now = list(module.parameters())
            if now and not any(id(p) in mine for p in now):
                raise RuntimeError(
                    f"the model has other parameters than when {type(self).__name__} was built: shard the model "
                    "(fully_shard, parallelize_module), move it or load it first, and build the optimizer then"
                )
        return work

    @staticmethod
    def _finite(grads: list[Tensor], flags: list[Tensor], devices: list[torch.device]) -> dict[torch.device, Tensor]:
        """1 on every device if all gradients are finite and all flags are set, else 0."""
        by_device: dict[torch.device, list[Tensor]] = defaultdict(list, {device: [] for device in devices})
        for grad in grads:
            by_device[grad.device].append(grad)
        flags = flags + [all_finite(of_device) for of_device in by_device.values() if of_device]
        finite = {}
        for device in by_device:
            ok = torch.stack([flag.to(device, non_blocking=True) for flag in flags]).all()
            finite[device] = ok.to(averaging.scalar_dtype(device))
        return finite

    def _judge(self, finite: dict[torch.device, Tensor]) -> None:
        """Counts a skipped step, or raises where asked; it changes nothing in either case."""
        if self._on_nonfinite == "raise" and finite and not next(iter(finite.values())).item():
            self._refuse()
        for device, ok in finite.items():
            self._counter(device).add_(1 - ok)

    def _refuse(self) -> NoReturn:
        what = "the loss or a gradient" if self.needs_loss else "a gradient"
        raise RuntimeError(f"{what} holds inf or NaN; nothing was changed (on_nonfinite='raise')")

    def _counter(self, device: torch.device) -> Tensor:
        """Of skipped steps, on a device; it stays the same tensor, for kernels and graphs have its address."""
        if device not in self._skipped:
            self._skipped[device] = torch.zeros((), dtype=averaging.scalar_dtype(device), device=device)
        return self._skipped[device]

    def _engine(self, work: fused.Work) -> Engine:
        counter = self._counter(work[0][1][0][0].device)
        return self._fused.get(work, self.averages, self._chunk_bytes, counter)

    def _look(self, work: fused.Work, finite: Mapping[torch.device, Tensor], loss: Tensor | None) -> None:
        """What must be known of all gradients before any parameter moves; a class that has such puts it in states."""

    def rates(self, group: Group, t: Tensor, states: Sequence[State]) -> Rates:
        """Of step number t [B]."""
        eta = averaging.warmed_up(t, group["lr"], group["warmup_steps"]) * group["rate"]
        eta = eta * RULES[group["rule"]].rate(t, group)
        decay, fading = group["weight_decay"], group.get("decay_fading", 0)
        if not group.get("rate_fall"):
            return Rates(eta, eta, averaging.faded(t, decay, fading) if fading else [decay] * len(states))
        fall = averaging.falling(t, group["rate_fall"], group["rate_fall_start"])
        faded = averaging.faded(t, decay, fading) if fading else torch.full_like(fall, decay)
        return Rates(eta * fall, eta * fall, faded / fall)

    def beta(self, group: Group, t: Tensor) -> float | Tensor:
        """β of step number t [B], before its growth."""
        return averaging_beta(group)

    def _update(self, group: Group, members: list[tuple[Tensor, State, Layout]], ok: Tensor) -> None:
        params, states, layouts = (list(column) for column in zip(*members, strict=True))
        grads = [p.grad for p in params]
        parts = None if group["rule"] in ELEMENTWISE else self._team.parts(params, layouts)
        if is_sharded(params[0]):
            grads = [placed_as(p, grad) for p, grad in zip(params, grads, strict=True)]
            params = [local(p) for p in params]
            states = [{name: local(value) for name, value in state.items()} for state in states]
        precise = compute_dtype(params[0])
        t = torch.stack([state["step"] for state in states]) + 1
        eta, weighs, decay = self.rates(group, t, states)
        if self.averages:
            clock = averaging.tick(
                t,
                torch.stack([state["weight_sum"] for state in states]),
                torch.stack([state["beta"] for state in states]),
                eta,
                ok,
                averaging_power=group["averaging_power"],
                averaging_warmup=group["averaging_warmup"],
                beta_start=self.beta(group, t),
                beta_growth=group.get("beta_growth", 0.0),
                beta_growth_start=group.get("beta_growth_start", 2),
                weighs=weighs,
            )
            eta = clock.eta
        else:
            eta = eta * ok

        def direction(some: slice) -> list[Tensor]:
            taken = where_ok([grad.to(precise) for grad in grads[some]], ok)
            return RULES[group["rule"]](Batch(taken, states[some], layouts[some], group, t[some], ok, parts))

        whole = slice(None)
        U = [] if group["rule"] in ELEMENTWISE else direction(whole)
        confines = group.get("projection") is not None
        for some in [whole] if confines else chunks(params):
            u = U[some] or direction(some)
            y = [self._y(p, state) for p, state in zip(params[some], states[some], strict=True)]
            d = [state["d"] for state in states[some]] if self.averages else []
            z: Tensors = torch._foreach_addcmul(y, d, clock.beta[some].to(precise).unbind()) if self.averages else y
            dz = fast_step(y, z, u, eta[some], decay[some], group)
            if confines:
                inside = confined(list(torch._foreach_add(z, dz)), layouts, parts, group)
                dz = [torch.where(e > 0, new - old, 0) for e, new, old in zip(eta, inside, z, strict=True)]
            if self.averages:
                averaging.advance_(y, d, dz, clock.c[some], clock.beta[some], clock.beta_next[some])
            else:
                torch._foreach_add_(y, dz)
            for p, new, state in zip(params[some], y, states[some], strict=True):
                write_(p, new, state)
        if self.averages:
            torch._foreach_copy_([state["weight_sum"] for state in states], list(clock.weight_sum.unbind()))
            torch._foreach_copy_([state["beta"] for state in states], list(clock.beta_next.unbind()))
        torch._foreach_copy_([state["step"] for state in states], list((t - 1 + ok).unbind()))

    @property
    def training(self) -> bool:
        """Whether the model holds Y (train mode) rather than X (eval mode)."""
        return self._training

    @property
    def skipped_steps(self) -> int:
        """How many steps were left out for inf or NaN gradients; reads one number from the device."""
        return max((int(count.item()) for count in self._skipped.values()), default=0)

    # ------------------------------------------------------- modes, averages

    @staticmethod
    def _y(p: Tensor, state: State) -> Tensor:
        """Y in the precision of the update: the parameter itself, or a new tensor where the parameter is narrower."""
        return p.detach() if "residual" not in state else p.to(state["residual"].dtype) + state["residual"]

    @torch.no_grad()
    def iterates(self, p: Tensor) -> Iterates:
        """Copies of X, Y and Z of a parameter, in any mode."""
        self.look_at_weights()
        state = self.state.get(p, {})
        if not state:
            self._place(p)
            if not self._team.holds(p):
                self.ensure_state(p)
            return Iterates(*(p.detach().to(compute_dtype(p), copy=True) for _ in range(3)))
        y, d, beta = self._local_y(state.get("y", p), state).clone(), local(state.get("d", p)), state.get("beta")
        if beta is None:
            return Iterates(*(part_like(part, p) for part in (y.clone(), y, y.clone())))
        found = averaging.x_of(y, d, beta), y, averaging.z_of(y, d, beta)
        return Iterates(*(part_like(part, p) for part in found))

    @torch.no_grad()
    def eval(self) -> None:
        """The model holds the average X until train(); Y is kept aside."""
        self.look_at_weights()
        if not self._training:
            return
        each = list(self._each())
        self._set_mode(training=False)
        if self.averages:
            for p, state in each:
                y = p.detach().clone()
                x = self._local_x(p, state)
                state["y"] = y
                local(p).copy_(x)
            self._weights_changed()

    @torch.no_grad()
    def train(self) -> None:
        """The model holds Y again, bit for bit what it was before eval()."""
        self.look_at_weights()
        back = not self._training
        for p, state in self._each():
            if "y" in state:
                local(p).copy_(local(state["y"]))
                del state["y"]
        self._set_mode(training=True)
        if back and self.averages:
            self._weights_changed()

    def _weights_changed(self) -> None:
        """Brings other processes' matrices up to date, and whatever was gathered of them."""
        params = [p for group in self.param_groups for p in group["params"]]
        owners = self._team.owners
        if owners is not None and (owned := [p for p in params if self.is_owned(p)]):
            owners.gather_(owned, [p.detach() for p in owned])
        reshard(params)

    def _local_y(self, p: Tensor, state: State) -> Tensor:
        return self._y(local(p), {name: local(value) for name, value in state.items()})

    def _local_x(self, p: Tensor, state: State) -> Tensor:
        """X of a parameter that holds Y, a new tensor: of the part held here."""
        y = self._local_y(p, state)
        return averaging.x_of(y, local(state["d"]), state["beta"]) if self.averages else y.clone()

    def _set_mode(self, *, training: bool) -> None:
        self._training = training
        for group in self.param_groups:
            group["sequence"] = "y" if training else "x"

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the model holds X; after, exactly what it held before, whatever happened. Nests."""
        was_training = self._training
        try:
            self.eval()
            yield
        finally:
            self.train() if was_training else self.eval()

    @torch.no_grad()
    def averaged_state_dict(self, model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Any]:
        """model.state_dict() with X in place of the parameters, as new tensors; the model is not touched.

        dtype None keeps each parameter's own. Buffers are copied as they are: statistics of BatchNorm belong to Y
        unless recalibrate_batch_norm ran at X.
        """
        self.look_at_weights()
        found = model.state_dict(keep_vars=True)
        mine = {id(p) for group in self.param_groups for p in group["params"]}
        if not any(id(value) in mine for value in found.values()):
            raise ValueError("averaged_state_dict: none of the optimizer's parameters belong to this model")
        new: dict[int, Tensor] = {}
        for p, state in self._each():
            x = self._local_x(state.get("y", p), state)
            new[id(p)] = part_like(x.to(dtype or p.dtype), p)
        owners = self._team.owners
        if owners is not None and owners.mode != "factor":
            for p in owners.of:
                new.setdefault(id(p), p.detach().to(dtype or p.dtype, copy=True))
            owners.gather_([*owners.of], [new[id(p)] for p in owners.of])
        for name, value in found.items():
            if isinstance(value, Tensor):
                if id(value) not in new:
                    convert = dtype is not None and isinstance(value, nn.Parameter) and value.is_floating_point()
                    new[id(value)] = value.detach().to(dtype if convert else value.dtype, copy=True)
                found[name] = new[id(value)]
        return found

    # ----------------------------------------------------------------- files

    def fingerprints(self, params: Sequence[Tensor]) -> list[Tensor]:
        found = [fingerprint(p) for p in params]
        self.sum_parts_(params, found)
        return found

    def holds(self, p: Tensor) -> bool:
        return self._team.holds(p)

    def is_owned(self, p: Tensor) -> bool:
        """Whether one process alone has the state of a parameter."""
        owners = self._team.owners
        return owners is not None and owners.mode != "factor" and p in owners.of

    def sum_parts_(self, params: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Adds up, in place, what was found on the parts of each parameter; all processes must ask for it."""
        self._team.sum_parts_(params, values)

    def sum_owned_(self, value: Tensor) -> None:
        """Adds up, in place, what each process found on the parameters that it owns."""
        owners = self._team.owners
        if owners is not None and owners.mode != "factor":
            self._team.sum_(value)

    def fit_state(self, *, replaced: bool = False) -> None:
        self._follow(replaced=replaced)
        for _ in self._each():
            pass

    def restore(self, *, training: bool, skipped_steps: int) -> None:
        self._set_mode(training=training)
        self._fitted.clear()
        self._fused = fused.Engines()
        device = self.param_groups[0]["params"][0].device if self.param_groups[0]["params"] else torch.device("cpu")
        self._skipped = {device: torch.tensor(skipped_steps, dtype=averaging.scalar_dtype(device), device=device)}


def as_loss(loss: Any, owner: str) -> Tensor:
    """What a closure returned, 0-dim."""
    if loss is None:
        raise RuntimeError(
            f"{owner}.step() needs the loss: call optimizer.step(lambda: loss) after loss.backward(), or step(closure) "
            "with a closure that returns it"
        )
    value = loss.detach() if isinstance(loss, Tensor) else torch.tensor(loss, dtype=torch.float64)
    if value.numel() != 1:
        raise RuntimeError(f"{owner}.step() needs the loss as one number, not of shape {tuple(value.shape)}")
    return value.reshape(())


def averaging_beta(group: Group) -> float:
    return float(group["beta"] if "beta" in group else group["betas"][0])
