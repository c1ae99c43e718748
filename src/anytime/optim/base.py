"""The one Optimizer behind all of them: its step. What it has and its state are in members.py, modes and the average in
modes.py."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, overload

import torch
from torch import Tensor

from .. import routing
from ..core import averaging
from ..core.averaging import Tensors
from ..core.direction import Batch
from ..core.layout import Layout
from ..distributed.parts import is_sharded, local
from . import fused
from .groups import Group, Ruled, places, unique_names
from .members import State
from .modes import Modes
from .moves import all_finite, chunks, compute_dtype, confined, fast_step, placed_as, precise_y, where_ok, write_
from .options import validate
from .rules import ELEMENTWISE, RULES

if TYPE_CHECKING:  # it needs Triton
    from .engine import Engine


class Rates(NamedTuple):
    """Of one step of B parameters: η, the rate whose square weighs the step in the average, and λ of each."""

    eta: Tensor
    weighs: Tensor
    decay: Sequence[float] | Tensor


class AnytimeOptimizer(Modes):
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
        self._on_nonfinite = on_nonfinite
        self._graph, self._chunk_bytes = graph, chunk_bytes
        self._fused = fused.Engines()
        self._skipped: dict[torch.device, Tensor] = {}
        super().__init__(params, matrix, rest, rules, unmatched, owners, process_group)

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: getattr(self, name) for name in ("_on_nonfinite", "_graph", "_chunk_bytes", "_skipped")}
        return {**super().__getstate__(), **kept, "_fused": fused.Engines()}

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
            so_far = self.skipped_steps if self._skipped else 0  # of devices where parameters were before
            self._skipped[device] = torch.full((), so_far, dtype=averaging.scalar_dtype(device), device=device)
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
            y = [precise_y(p, state) for p, state in zip(params[some], states[some], strict=True)]
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
    def skipped_steps(self) -> int:
        """How many steps were left out for inf or NaN gradients; reads one number from the device."""
        return max((int(count.item()) for count in self._skipped.values()), default=0)

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
    value = loss.detach() if isinstance(loss, Tensor) else torch.tensor(loss, dtype=torch.float64, device="cpu")
    if value.numel() != 1:
        raise RuntimeError(f"{owner}.step() needs the loss as one number, not of shape {tuple(value.shape)}")
    return value.reshape(())


def averaging_beta(group: Group) -> float:
    return float(group["beta"] if "beta" in group else group["betas"][0])
