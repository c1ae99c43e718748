"""Another run from any kept step of a run: other data, another rate, or a short cooldown to zero."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..optim.base import AnytimeOptimizer
from ..storage.regions import regions_of
from .build import Rates, build_optimizer, optimizer_class, settled, without_recipe
from .checkpoint import (
    FORMAT,
    MODEL,
    Snapshot,
    as_weights,
    flatten,
    read_resume,
    read_state,
    read_tensors,
    weights,
    write_checkpoint,
)  # fmt: skip
from .config import Config, Cooldown, Until, flat, merged, plain, to_toml
from .data import absolute, check_tokenizer, check_vocabulary, open_data, tokenizer_in
from .errors import UserError
from .files import write_atomically
from .model import GPT
from .runs import CONFIG, LOCK, find_checkpoint, origin, stored_config

#: What the weights and the optimizer's state are made for, so that it cannot change on the way.
_KEPT = ("model.", "optimizer.name", "optimizer.momentum_dtype")


def branch(
    source: Path | str,
    to: Path | str,
    *,
    at: int | None = None,
    cooldown: int = 0,
    average: Literal["keep", "restart"] = "keep",
    changes: Mapping[str, Any] | None = None,
) -> Config:
    """Makes the run folder `to`, which stands at step `at` of `source` (its newest by default); train() goes on there.

    cooldown: the rate falls to zero linearly over so many steps, and the run ends there. average: "keep" goes on with
    X at the pace that it had, whatever the rate and the power of the weights are from there; "restart" begins
    the average anew from the weights Y; in a cooldown X then stays at Z, so that what comes out is the last iterate,
    as after a schedule. changes: settings as in TOML; other data begin at their beginning.
    """
    source, to = Path(source), Path(to)
    old = stored_config(source)
    if old is None:
        raise UserError(f"{source} is not a run's folder")
    if cooldown < 0:
        raise UserError(f"cooldown is {cooldown}, must be 0 (none) or a number of steps")
    if average not in ("keep", "restart"):
        raise UserError(f"average is {average!r}, must be 'keep' or 'restart'")
    averages = optimizer_class(old.optimizer.name).averages
    if average == "restart" and not averages:
        raise UserError(f"{old.optimizer.name} has no average to restart")
    found = find_checkpoint(source, at)
    state = read_state(found)
    step: int = state["step"]
    begun = without_recipe(old) if "lr" in (changes or {}).get("optimizer", {}) else old  # it fills in for the new rate
    config = merged(begun, changes or {}, source="the branch's settings")
    before, after = flat(plain(old)), flat(plain(config))
    for key in {**before, **after}:
        if key.startswith(_KEPT) and before.get(key) != after.get(key):
            raise UserError(f"{key} is {after.get(key)!r} and was {before.get(key)!r}: a branch cannot change it")
    config = dataclasses.replace(config, run=str(to), data=absolute(config.data))
    if cooldown:
        if (changes or {}).get("until"):
            raise UserError(f"a cooldown of {cooldown} steps ends there: leave out until")
        config = dataclasses.replace(config, cooldown=Cooldown(step, cooldown), until=f"{step + cooldown} steps")
        if average == "restart":
            optimizer = dataclasses.replace(config.optimizer, averaging_warmup=step + cooldown)
            config = dataclasses.replace(config, optimizer=optimizer)
    elif not (changes or {}).get("until"):
        config = dataclasses.replace(config, until="")
    config = settled(config)
    last = Rates(config).last_step
    if last is not None and step >= last:
        raise UserError(f"the rate is zero from step {last} on, and {found} is at {step}: name an earlier step by --at")
    until = Until.parse(config.until)
    reached = {"steps": step, "tokens": state["tokens"]}.get(until.kind or "", -1)
    if until.value <= reached:
        raise UserError(f"until is {config.until!r}, but {found} is at step {step:,} already")
    data = open_data(config.data, source / "data")  # found wanting now, not once the folder is there
    check_vocabulary(data.tokenizer, config.model.vocabulary)
    check_tokenizer(data.tokenizer, tokenizer_in(found))
    with torch.device("meta"):
        build_optimizer(GPT(config.model), config.optimizer)
    if data.train.fingerprint() != state["data"]:
        state |= {"data": None, "position": 0}

    def write(beside: Path) -> None:
        _fill(beside, found, state, old, config, restart=average == "restart")
        if config.data.path == old.data.path and (source / "data").is_dir():
            shutil.copytree(source / "data", beside / "data")

    about = {"from": str(source.resolve()), "step": step, "average": average, "cooldown": cooldown}
    _make(to, config, about, write)
    return config


def fine_tune(source: Path | str, config: Config, *, at: int | None = None) -> Config:
    """Makes the run folder `config.run`, which stands at step 0 with the weights X of step `at` of `source` (its newest
    by default) and an optimizer that has seen nothing; train() goes on there, with any optimizer and data."""
    source, to = Path(source), Path(config.run)
    found = find_checkpoint(source, at)
    state = read_state(found)
    config = settled(dataclasses.replace(config, data=absolute(config.data)))
    before, after = state["config"]["model"], plain(config.model)
    for key in after:
        if before.get(key) != after[key]:
            raise UserError(f"model.{key} is {after[key]!r} and was {before.get(key)!r}: its weights cannot change it")
    check_tokenizer(open_data(config.data, source / "data").tokenizer, tokenizer_in(found))
    model = GPT(config.model)
    model.load_state_dict(read_tensors(found / MODEL))
    packed = build_optimizer(model, config.optimizer).state_dict()
    tensors = as_weights(model.state_dict().items()) | flatten(packed["state"])
    fresh = {
        "step": 0, "tokens": 0, "position": 0, "data": None, "seconds": 0.0, "groups": packed["param_groups"],
        **origin(),
    }  # fmt: skip

    def write(beside: Path) -> None:
        _write(beside, found, fresh, config, read_tensors(found / MODEL), tensors)

    _make(to, config, {"from": str(source.resolve()), "step": state["step"], "optimizer": "fresh"}, write)
    return config


def _make(to: Path, config: Config, about: Mapping[str, Any], write: Callable[[Path], None]) -> None:
    """A run's folder that appears whole or not at all."""
    if to.exists():
        raise UserError(f"{to} is there already: choose another folder for the branch")
    beside = to.with_name(f".{to.name}.new")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        write(beside)
        write_atomically(beside / "branch.json", json.dumps(about, indent=1).encode())
        write_atomically(beside / CONFIG, to_toml(config).encode())
        (beside / LOCK).touch()
        beside.rename(to)
    except (OSError, UserError) as wrong:
        shutil.rmtree(beside, ignore_errors=True)
        reason = wrong.strerror if isinstance(wrong, OSError) else None
        raise UserError(f"cannot write the branch to {to}: {reason or wrong}") from None


def _fill(to: Path, found: Path, state: dict[str, Any], old: Config, config: Config, *, restart: bool) -> None:
    """Writes the checkpoint that the branch begins from."""
    tensors = read_resume(found)
    model = read_tensors(found / MODEL)
    if restart:
        for name, tensor in tensors.items():
            if name.startswith("optimizer/") and name.endswith(("/d", "/weight_sum")):
                tensor.zero_()
        model = {name: tensor.clone() for name, tensor in weights(tensors).items()}
    else:
        before, after = (_next_weights(c, tensors, state["step"]) for c in (old, config))
        for name, weight in before.items():
            if 0 < weight != after[name] > 0:
                tensors[name] *= after[name] / weight
    _write(to, found, state, config, model, tensors)


def _next_weights(config: Config, tensors: Mapping[str, Tensor], done: int) -> dict[str, float]:
    """Name of a parameter's sum of weights -> the weight of its next step. A sum of others would stop the average or
    throw it away."""
    with torch.device("meta"):
        optimizer = build_optimizer(GPT(config.model), config.optimizer)
    groups = (group for group in optimizer.param_groups for _ in group["params"])
    found = {}
    for index, group in enumerate(groups):
        name = f"optimizer/{index}/weight_sum"
        if name in tensors:
            t = tensors[f"optimizer/{index}/step"].reshape(1) + 1
            found[name] = float(t ** group["averaging_power"])
            if group["rule"] != "sf-plus":  # whose weights are of the largest rate so far
                eta = AnytimeOptimizer.rates(optimizer, group, t, [{}]).weighs * Rates(config).factor(done)
                found[name] *= float(eta.square())
    return found


def _write(
    to: Path, found: Path, state: dict[str, Any], config: Config, model: dict[str, Tensor], tensors: dict[str, Tensor]
) -> None:
    state |= {"format": FORMAT, "config": plain(config), "evaluation": None, "evaluated": -1}
    texts = {
        "state.json": json.dumps(state, indent=1),
        "config.json": (found / "config.json").read_text(encoding="utf-8"),
    }
    regions = [region for name, tensor in tensors.items() for region in regions_of(name, tensor)]
    made = Snapshot(state["step"], model, regions, texts, tokenizer_in(found))
    write_checkpoint(to / "checkpoints", made)
