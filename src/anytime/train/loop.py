"""The training loop: it needs no end, and may be stopped, resumed and extended at any step.

Everything a step depends on is in the checkpoint or is a pure function of its number: an extended run is bit for bit
the run that never stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import torch
from torch import Tensor

from ..diagnostics import Probe
from .batches import Batches, Prefetcher
from .build import Options, Rates, build_optimizer, settled
from .checkpoint import (
    FORMAT,
    Snapshot,
    Writer,
    as_weights,
    checkpoints_in,
    copy_off,
    fill,
    flatten,
    index_of,
    newest_whole,
    parts_of,
    read_state,
    step_of,
)
from .config import Config, Until, plain
from .data import absolute, check_tokenizer, check_vocabulary, open_data, tokenizer_in
from .device import autocast, device_name, peak
from .errors import Diverged, UserError
from .evaluate import Evaluation, evaluate
from .model import GPT, whole
from .parallel import World, clip_, joined
from .runs import Row, Run, origin
from .signals import Stop
from .texts import write_texts

Listener = Callable[[Row], None]
Warn = Callable[[str], None]


@dataclass(frozen=True)
class Result:
    """Where a run stands."""

    step: int
    tokens: int
    seconds: float
    reason: str
    evaluation: Evaluation | None


def train(config: Config, *, listeners: Sequence[Listener] = (), warn: Warn | None = None) -> Result:
    """Trains the run in config.run, from where it stands, until config.until; see Config for all settings.

    `listeners` get every row of metrics as it is written, `warn` what a person should know; where torchrun started
    several processes, those of the first do.
    """
    with joined(config) as world:
        config = settled(dataclasses.replace(config, data=absolute(config.data)))
        if warn is None or not world.leads:
            warn = _hush
        with Run(config, world.talk) as run:
            return _train(run, world, listeners, warn)


def _hush(text: str) -> None:
    pass


def _train(run: Run, world: World, listeners: Sequence[Listener], warn: Warn) -> Result:
    config = run.config
    loop = Loop(run, listeners, warn, world)
    run.begin()
    try:
        return loop.go()
    except Exception as wrong:  # a second Ctrl-C is none: it does not wait
        with contextlib.suppress(Exception):  # this one came first
            loop.writer.wait()
        if not isinstance(wrong, torch.OutOfMemoryError) and "can't allocate memory" not in str(wrong):
            raise
        now, share = loop.at_once, config.batch_size // world.readers
        smaller = max((n for n in range(1, now // 2 + 1) if share % n == 0), default=None)
        hint = "try --recompute, or a smaller model" if smaller is None else f"try --micro-batch {smaller}"
        raise UserError(
            f"there is too little memory for {now} sequences of {config.model.context} at once: {hint}; "
            f"{loop.last_saved()}"
        ) from wrong


class Loop:
    """One process's part of a run, set up and restored when it is made."""

    def __init__(self, run: Run, listeners: Sequence[Listener], warn: Warn, world: World) -> None:
        self.run, self.listeners, self.warn, self.world = run, listeners, warn, world
        self.config = config = run.config
        self.until = Until.parse(config.until)
        if config.threads > 1024:  # torch may fall down
            raise UserError(f"threads is {config.threads}, must be at most 1024")
        if config.threads:
            torch.set_num_threads(config.threads)
        self.device = world.device
        self.at_once = world.at_once(config)
        with world.talk.leader_first():  # it may have to make them
            self.data = open_data(config.data, run.data)
        self.fingerprint = self.data.train.fingerprint()
        check_vocabulary(self.data.tokenizer, config.model.vocabulary)
        if self.data.validation is None and (config.eval_per_doubling or config.eval_every or config.eval_at):
            raise UserError(
                f"{config.data.path} has no validation tokens: give some by --data.validation, or turn evaluation off "
                "by --eval-per-doubling 0"
            )
        if self.until.kind == "loss" and self.data.validation is None:
            raise UserError("until a loss needs validation tokens: give some by --data.validation")
        if self.until.kind == "loss" and not (config.eval_per_doubling or config.eval_every or config.eval_at):
            raise UserError("until a loss needs evaluations: give --eval-per-doubling, --eval-every or --eval-at")
        if config.prompt and not (self.data.tokenizer is not None and self.data.tokenizer.encode(config.prompt)):
            raise UserError(f"prompt is {config.prompt!r}: it needs a --data.tokenizer that makes tokens of it")
        separator = None
        if config.data.documents:
            separator = self.data.tokenizer.end if self.data.tokenizer is not None else None
            if separator is None:
                raise UserError("data.documents needs a tokenizer with an end-of-text id: give it by --data.tokenizer")
        self.model = GPT(config.model, separator=separator, recompute=config.recompute)
        self.model.initialize(config.seed)
        compiled = config.compile == "yes" or (config.compile == "auto" and self.device.type == "cuda")
        self.forward = world.spread(self.model, config, compiled)
        self.optimizer = build_optimizer(self.model, config.optimizer, owners=world.owners(config))
        self.options = Options(self.optimizer)
        self.rates = Rates(config)
        self.writer = Writer(run.checkpoints, config.keep_last, run.milestone, world.files)

        self.step = self.tokens = self.position = 0
        self.seconds = 0.0
        self.saved: int | None = None
        self.evaluation: Evaluation | None = None
        self.evaluated = -1  # the step of the last evaluation
        self._restore()
        last, per_step = self.rates.last_step, config.batch_size * config.model.context
        asked = {"steps": self.until.value, "tokens": self.step + (self.until.value - self.tokens) / per_step}
        if last is not None and math.ceil(asked.get(self.until.kind or "", 0.0)) > last:
            raise UserError(
                f"the rate is zero from step {last} on: a schedule cannot be extended to {config.until}; "
                "branch from an earlier step, or start a run with a later --optimizer.horizon"
            )
        self._pending: list[tuple[int, int, float, Tensor, Tensor | None]] = []
        self._clock = time.perf_counter()
        self._waited = 0.0
        self._mark = (self.tokens, self.seconds)

    # ------------------------------------------------------------ save, restore

    def _restore(self) -> None:
        found = newest_whole(self.run.checkpoints, self.warn, peers=self.world.talk)
        if found is None:
            if checkpoints_in(self.run.checkpoints):
                raise UserError(
                    f"no checkpoint in {self.run.checkpoints} is whole: restore one from a backup, or remove the "
                    "folder to start over"
                )
            self.run.go_back_to(None)
            return
        state = read_state(found)
        index = index_of(found)
        fill(found, index, as_weights(self.model.state_dict().items()))
        packed = self.optimizer.state_dict()["state"]
        fill(found, index, flatten(packed))
        self.optimizer.load_state_dict({"state": packed, "param_groups": state["groups"]})
        if state["data"] not in (None, self.fingerprint):
            raise UserError(
                f"the tokens in {self.config.data.path} are not those that the run {self.run.folder} began with: give "
                "the old ones by --data.path, or go on with new ones by `anytime branch`"
            )
        check_tokenizer(self.data.tokenizer, tokenizer_in(found))
        self.step, self.tokens, self.position = state["step"], state["tokens"], state["position"]
        self.seconds = state["seconds"]
        self.saved = self.step
        if state["evaluation"] is not None:
            self.evaluation = Evaluation(**state["evaluation"])
            self.evaluated = state["evaluated"]
        self.run.go_back_to(found)

    def _snapshot(self) -> Snapshot:
        packed = self.optimizer.state_dict()
        resume = as_weights(self.model.state_dict().items()) | flatten(packed["state"])
        state = {
            "format": FORMAT,
            "step": self.step,
            "tokens": self.tokens,
            "position": self.position,
            "data": self.fingerprint,
            "seconds": self._total_seconds(),
            "evaluation": None if self.evaluation is None else dataclasses.asdict(self.evaluation),
            "evaluated": self.evaluated,
            "groups": packed["param_groups"],
            **origin(),
            "config": plain(self.config),
        }
        parts = parts_of(resume, self.world.talk)
        model = {}
        for name, x in self.optimizer.averaged_state_dict(self.model).items():
            x = whole(x)  # one at a time
            if self.world.leads:
                model[name] = copy_off(x)
        copied = None
        if self.device.type == "cuda":
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        texts = {
            "state.json": json.dumps(state, indent=1),
            "config.json": model_card(self.model, self.step, self.tokens),
        }
        return Snapshot(self.step, model, parts, texts, self.data.tokenizer, copied)

    def _save(self) -> None:
        """Hands a checkpoint of this step to the writer, with all that the metrics say up to it on disk before."""
        if self.saved == self.step:
            return
        self._flush()
        began = time.perf_counter()
        if self.config.prompt:
            text = self._sample()
            if self.world.leads:
                self.run.samples.add({"step": self.step, "prompt": self.config.prompt, "text": text})
                self._disk(self.run.samples.flush(sync=True))
        self._flush_rows(sync=True)
        self._disk(self.writer.save(self._snapshot()))
        self.saved = self.step
        waited = time.perf_counter() - began
        self._emit({"kind": "checkpoint", **self._now(), "save_seconds": round(waited, 4)})

    def _sample(self) -> str:
        """By all processes alike, for each may hold a part of the model; the first one's is kept."""
        c, tokenizer = self.config, self.data.tokenizer
        assert tokenizer is not None
        with self.optimizer.averaged(), torch.compiler.set_stance("force_eager"):
            return write_texts(self.model, tokenizer, c.prompt, seed=c.seed + self.step, precision=c.precision)[0]

    def _disk(self, wrong: Exception | None) -> None:
        """A disk that takes nothing more is no reason to lose the run: it goes on, and tries again next time."""
        if wrong is not None:
            self.warn(
                f"{wrong}; {self.last_saved()}; training goes on and the next checkpoint will be tried: make room"
            )

    def last_saved(self) -> str:
        """In words."""
        kept = checkpoints_in(self.run.checkpoints)
        return f"the last checkpoint is of step {step_of(kept[0])}" if kept else "there is no checkpoint yet"

    # ------------------------------------------------------------------ metrics

    def _now(self) -> Row:
        return {"step": self.step, "tokens": self.tokens, "seconds": round(self._total_seconds(), 3)}

    def _total_seconds(self) -> float:
        now = time.perf_counter()
        self.seconds += now - self._clock
        self._clock = now
        return self.seconds

    def _emit(self, row: Row) -> None:
        if self.world.leads:
            self.run.metrics.add(row)
            for listener in self.listeners:
                listener(row)

    def _flush_rows(self, *, sync: bool = False) -> None:
        if self.world.leads:
            self._disk(self.run.metrics.flush(sync=sync))

    def _flush(self) -> None:
        """Reads the losses of the last steps from the device, in one go, and writes them: means over all processes."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        columns = [self.world.total(torch.stack([p[3] for p in pending])) / self.world.readers]
        if pending[0][4] is not None:
            columns.append(torch.stack([p[4] for p in pending if p[4] is not None]))
        read = torch.stack([c.float() for c in columns]).tolist()
        for i, (step, tokens, rate, _, norm) in enumerate(pending):
            row = {"kind": "step", "step": step, "tokens": tokens, "loss": read[0][i], "lr": rate}
            if norm is not None:
                row["grad_norm"] = read[1][i]
            if not math.isfinite(read[0][i]) and self.config.on_nan == "stop":
                self._flush_rows()
                failed = self.writer.wait()
                note = "" if failed is None else f"; {failed}"
                raise Diverged(
                    f"the loss is {read[0][i]} at step {step}: stopped, {self.last_saved()}{note}; "
                    "start over or branch with a lower --optimizer.lr or with --optimizer.clip 1, or leave such steps "
                    "out by --on-nan skip"
                )
            self._emit(row)

    def _speed(self) -> None:
        """A row of how fast it went since the last one; the losses were just read, so the device is idle."""
        seconds = self._total_seconds()
        tokens, before = self._mark
        elapsed = max(seconds - before, 1e-9)
        row = {"kind": "speed", **self._now(), "tokens_per_second": round((self.tokens - tokens) / elapsed, 1)}
        row["data_wait"] = round(self._waited / elapsed, 5)
        if self.device.type == "cuda":
            if (most := peak(self.device)) is not None:
                per_second = row["tokens_per_second"] * self.config.model.flops_per_token
                row["mfu"] = round(per_second / most / self.world.size, 4)
            row["memory"] = torch.cuda.max_memory_allocated(self.device)
        self._emit(row)
        self._flush_rows()
        self._mark, self._waited = (self.tokens, seconds), 0.0

    # ---------------------------------------------------------------- training

    def go(self) -> Result:
        """Trains until the end or a signal, and saves; after an error the last checkpoint stands."""
        with Stop().listening() as stop:  # before anyone is told that it has begun
            return self._go(stop)

    def _go(self, stop: Stop) -> Result:
        started = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        model = self.config.model
        about = {
            "device": device_name(self.device),
            "parameters": model.parameters,
            "flops_per_token": model.flops_per_token,
        }
        if self.world.size > 1:
            about |= {"processes": self.world.size, "shard": self.world.shard, "tensor": self.world.tensor}
        batches = Batches(self.data.train, model.context, self.config.seed, model.vocabulary)
        self._clock = time.perf_counter()
        self._emit({"kind": "start", **self._now(), "time": started, **origin(), **about})
        ahead = Prefetcher(
            batches,
            self.position,
            self.config.batch_size,
            self.at_once,
            self.device,
            rank=self.world.reader,
            world=self.world.readers,
        )
        with ahead as source:
            if self.step == 0 and self._evaluates_at_all():
                self._evaluate()
            asked, seconds = self.world.agree(0, self._total_seconds())
            reason = self._reached(seconds)
            while reason is None:
                self._train_step(source)
                if self.step % self.config.log_every == 0:
                    self._flush()
                    self._speed()
                if self._evaluation_due():
                    self._evaluate()
                asked, seconds = self.world.agree(stop.asked, self._total_seconds())
                reason = signal.Signals(asked).name if asked else self._reached(seconds)
                if reason is None and self._checkpoint_due():
                    self._save()
            if not asked and self._evaluates_at_all() and self.evaluated != self.step:
                self._evaluate()
            self._flush()
            self._save()
            failed = self.writer.wait()
        self._emit({"kind": "stop", **self._now(), "reason": reason})
        lines = self.world.talk.leaders(self.run.metrics.flush(sync=True) if self.world.leads else None)
        if failed is not None or lines is not None:
            raise UserError(f"{failed or lines}; {self.last_saved()}: make room and run the same command again")
        return Result(self.step, self.tokens, self.seconds, reason, self.evaluation)

    def _train_step(self, source: Iterator[tuple[Tensor, Tensor]]) -> None:
        config, optimizer = self.config, self.optimizer
        rate = self.options.apply(self.rates.factor(self.step)) * self.rates.warmed(self.step)
        rate *= self.options.fallen(self.step)
        parts = config.batch_size // self.world.readers // self.at_once
        loss = torch.zeros((), device=self.device)
        for number in range(parts):
            began = time.perf_counter()
            inputs, targets = next(source)
            self._waited += time.perf_counter() - began
            with self.forward.accumulating(last=number == parts - 1):
                with autocast(self.device, config.precision):
                    part = self.forward.loss(inputs, targets)
                (part / parts).backward()  # type: ignore[no-untyped-call]
            loss += part.detach() / parts
        norm = None
        if config.optimizer.clip is not None:
            norm = clip_(list(self.model.parameters()), config.optimizer.clip, self.world)
        every = config.diagnose_every
        probe = Probe(optimizer) if every and (self.step + 1) % every == 0 else None
        if optimizer.needs_loss:
            mean: Any = self.world.total(loss.clone()) / self.world.readers
            optimizer.step(lambda: mean)
        else:
            optimizer.step()
        optimizer.zero_grad()
        self.step += 1
        self.position += config.batch_size
        self.tokens += config.batch_size * config.model.context
        self._pending.append((self.step, self.tokens, rate, loss, norm))
        if probe is not None:
            self._flush()
            self._emit({"kind": "average", "step": self.step, "tokens": self.tokens, **probe.read()})

    def _reached(self, seconds: float) -> str | None:
        until = self.until
        if until.kind == "loss":
            there = self.evaluation is not None and self.evaluation.loss <= until.value
        else:
            there = until.fraction(self.step, self.tokens, seconds) == 1.0
        if not there and self.rates.last_step is not None and self.step >= self.rates.last_step:
            return "the rate is zero"
        return f"until {self.config.until}" if there else None

    # -------------------------------------------------------------- evaluation

    def _evaluates_at_all(self) -> bool:
        c = self.config
        return bool(c.eval_per_doubling or c.eval_every or c.eval_at)

    def _evaluation_due(self) -> bool:
        c, step = self.config, self.step
        if step in c.eval_at or (c.eval_every and step % c.eval_every == 0):
            return True
        return log_spaced(step, c.eval_per_doubling)

    def _evaluate(self) -> None:
        assert self.data.validation is not None
        model = self.config.model
        with self.optimizer.averaged():
            self.evaluation = evaluate(
                self.forward.loss,
                self.data.validation,
                context=model.context,
                vocabulary=model.vocabulary,
                count=self.config.eval_tokens,
                at_once=self.at_once,
                device=self.device,
                precision=self.config.precision,
                tokenizer=self.data.tokenizer,
                world=self.world,
            )
        self.evaluated = self.step
        self._flush()
        self._emit({"kind": "eval", **self._now(), **self.evaluation.row(), "sequence": "x"})
        self._flush_rows()

    def _checkpoint_due(self) -> bool:
        every = self.config.checkpoint_every
        return (every > 0 and self.step % every == 0) or self.run.milestone(self.step)


def log_spaced(step: int, per_doubling: int, first: int = 8) -> bool:
    """Whether a step is one of the rounded powers of 2^(1 / per_doubling)."""
    if not per_doubling or step < first:
        return False
    nearest = round(per_doubling * math.log2(step))
    return any(round(2 ** ((nearest + i) / per_doubling)) == step for i in (-1, 0, 1))


def model_card(model: GPT, step: int, tokens: int) -> str:
    """What it takes to build the model, and where it comes from."""
    card = {"architecture": "anytime.train.GPT", "model": plain(model.config), "separator": model.separator}
    card |= {"step": step, "tokens": tokens, **origin()}
    return json.dumps(card, indent=1)
