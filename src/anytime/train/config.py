"""The settings of a run: frozen dataclasses and TOML.

A value comes from the command line, else from the TOML file, else from the preset (presets.py), else from the defaults
here. What a run is (its model, data, seed and optimizer) stays as it began; the rest may change whenever it is resumed.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from .errors import UserError
from .model import ModelConfig

T = TypeVar("T")


@dataclass(frozen=True)
class DataConfig:
    """Tokens to learn from and to be judged by."""

    # A folder made by `anytime data`, other token files, or "python": the source of Python's own library.
    path: str = "python"
    # Where validation tokens are; empty: the validation part of the same data.
    validation: str = ""
    # "bytes", "gpt2", "gpt2:RANKS", a tokenizer.json, or a folder; empty: the one that came with the data.
    tokenizer: str = ""
    # Attention stays within documents.
    documents: bool = False


#: What a recipe fills in.
FILLED = (
    "betas", "momentum", "momentum_growth", "momentum_growth_start", "nesterov", "weight_decay", "adam_lr",
    "adam_weight_decay", "adam_vector_betas", "averaging_power", "averaging_warmup", "beta_growth",
    "beta_growth_start", "decay_fading", "rate_fall", "rate_fall_start",
)  # fmt: skip


@dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer of this library by its class's name, and its options; None leaves the class's default."""

    # SFNorMuon, SFMuon, SFSpectralSGD, SFAdamW, SFSGD, SFLion, SFPlus; NorMuon, Muon, SpectralDescent, Shampoo, …
    name: str = "SFNorMuon"
    # Of SFNorMuon: what is not given below is as the paper or as the anytime recipe has it.
    recipe: Literal["paper", "anytime"] | None = None
    # η, reached after the warmup.
    lr: float | None = None
    # Steps in which the rate rises from zero.
    warmup_steps: int | None = None
    # λ.
    weight_decay: float | None = None
    # β of the average and β2 of the second moment; of Lion's and AdamW's kind, their own two.
    betas: tuple[float, float] | None = None
    # β of the average, where it is not one of `betas`.
    beta: float | None = None
    # The betas of biases, gains and other vectors; of SFAdamW.
    vector_betas: tuple[float, float] | None = None
    # Of the second moment of rows, of NorMuon.
    beta2: float | None = None
    # μ of the momentum whose polar factor is taken.
    momentum: float | None = None
    # With which power μ grows towards 1; 0 keeps it.
    momentum_growth: float | None = None
    # The step after which it grows.
    momentum_growth_start: int | None = None
    # Added to the root of the second moment.
    eps: float | None = None
    # Where decay acts: at the fast iterate, at the point of the gradient, nowhere.
    decay_at: Literal["z", "y", "none"] | None = None
    # Whether decay spares the entries that their update makes larger.
    cautious: bool | None = None
    # Whether rows of the polar factor are normalized.
    row_norm: bool | None = None
    # The polar factor of (1 − μ) G + μ M instead of M.
    nesterov: bool | None = None
    # newton-schulz, polar-express, polar-express-4, quintic, svd or low-rank.
    polar: str | None = None
    # Its precision; by default float16 on CUDA, float32 elsewhere.
    polar_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    # The precision in which the momentum is kept.
    momentum_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    # How an update is scaled to its matrix: rms (the paper's), max-side, aspect or none.
    scaling: str | None = None
    # Root mean square of the update over the rate, with the scaling "rms".
    update_rms: float | None = None
    # Keeps each matrix of Z in a ball: frobenius or spectral; of SFSpectralSGD.
    projection: str | None = None
    # Of that ball.
    radius: float | None = None
    # Of Adam's second moment: in the rate (the paper's), in the moment, or none.
    bias_correction: Literal["rate", "moment", "none"] | None = None
    # r: step t has the weight η² t^r in the average.
    averaging_power: float | None = None
    # Steps for which the average stays at the fast iterate.
    averaging_warmup: int | None = None
    # With which power β grows towards 1; 0 keeps it.
    beta_growth: float | None = None
    # The step after which it grows.
    beta_growth_start: int | None = None
    # T: the decay at step t is λ T / (T + t); 0 keeps it.
    decay_fading: int | None = None
    # With which power the rate falls; 0 keeps it.
    rate_fall: float | None = None
    # The step after which it falls.
    rate_fall_start: int | None = None
    # Steps in which β goes to beta_max; 0 keeps it; of SFPlus.
    beta_anneal_steps: int | None = None
    # Where it goes to.
    beta_max: float | None = None
    # Of the running mean of gradients' norms by which SFPlus divides the loss; 0 takes the last one.
    polyak_beta: float | None = None
    # The same of what is not a matrix of a hidden layer; by default the rate and decay above, or the recipe's.
    adam_lr: float | None = None
    adam_weight_decay: float | None = None
    adam_betas: tuple[float, float] | None = None
    # Of biases, gains and other vectors; by default adam_betas, or the recipe's.
    adam_vector_betas: tuple[float, float] | None = None
    adam_eps: float | None = None
    adam_decay_at: Literal["z", "y", "none"] | None = None
    adam_bias_correction: Literal["rate", "moment", "none"] | None = None
    # How the rate goes after its warmup: "constant" and "power" have no end, the others end at `horizon` steps.
    schedule: Literal["constant", "power", "cosine", "linear", "wsd"] = "constant"
    horizon: int | None = None
    # "power" is (1 + t / decay_steps)^−decay_power, t steps after the warmup.
    decay_steps: int = 400
    decay_power: float = 0.5
    # Part of the horizon over which "wsd" falls to zero, as 1 − √.
    decay_part: float = 0.2
    # The largest norm of the whole gradient; None does not clip.
    clip: float | None = None


@dataclass(frozen=True)
class Cooldown:
    """A linear fall of the rate to zero, set by `anytime branch`."""

    start: int = 0
    steps: int = 0


@dataclass(frozen=True)
class ParallelConfig:
    """How a model is spread over the processes that torchrun starts: replicas × shard × tensor of them."""

    # Processes that share one copy of weights and state (FSDP2); 1: each has its own (DDP), 0: all processes.
    shard: int = 1
    # Processes that compute every layer together, each with a part of its heads and columns.
    tensor: int = 1
    # With a copy each, who works on a matrix: all, or one its polar factor ("factor") or all of its step ("state").
    owners: Literal["all", "factor", "state"] = "all"
    # Seconds without an answer after which a process is given up, and the run with it.
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if self.shard < 0 or self.tensor < 1:
            raise UserError(
                f"parallel.shard is {self.shard}, must be 0 (all processes) or more; parallel.tensor is {self.tensor}, "
                "must be at least 1"
            )
        if not self.timeout > 0:
            raise UserError(f"parallel.timeout is {self.timeout}, must be a number of seconds above 0")


@dataclass(frozen=True)
class Config:
    """All settings of a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    cooldown: Cooldown = field(default_factory=Cooldown)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    seed: int = 0
    # The preset that the settings began from.
    preset: str = ""

    # The run's folder.
    run: str = "runs/run"
    # When to stop: "600 steps", "1e9 tokens", "2 h", "loss 3.2"; empty: when you say so.
    until: str = ""
    # Sequences a step, in all.
    batch_size: int = 512
    # Sequences at once on a device, fewer where its share is smaller; 0: up to 32.
    micro_batch: int = 0
    # Evaluations of X for each doubling of the steps; 0 leaves them out.
    eval_per_doubling: int = 4
    # Steps between further evaluations; 0 adds none.
    eval_every: int = 0
    # Steps at which to evaluate besides.
    eval_at: tuple[int, ...] = ()
    # Validation tokens of an evaluation.
    eval_tokens: int = 1 << 20
    # Steps from one checkpoint to the next; 0: only where the run stops.
    checkpoint_every: int = 1000
    # The newest checkpoints that are kept, at least 1; milestones are kept besides.
    keep_last: int = 2
    # Milestones, kept for good: a checkpoint every so many steps; 0 keeps none.
    keep_every: int = 0
    # Steps whose checkpoints are kept for good besides.
    keep_at: tuple[int, ...] = ()
    # Steps between rows of speed; losses reach the disk as often.
    log_every: int = 10
    # Steps between looks at the average and the update; 0 takes none.
    diagnose_every: int = 100
    # Further places to send metrics: "tensorboard", "trackio", "wandb".
    log_to: tuple[str, ...] = ()
    # A text sampled at each checkpoint begins so; empty samples nothing.
    prompt: str = ""
    # Write report.html into the run's folder where the run stops.
    report: bool = False
    # What to do at a loss that is inf or NaN; "skip" leaves such steps out and goes on.
    on_nan: Literal["stop", "skip"] = "stop"
    # Empty: CUDA where there is one, else the CPU.
    device: str = ""
    # Of activations; auto is bfloat16 on CUDA.
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    # By torch.compile; auto is on CUDA.
    compile: Literal["auto", "yes", "no"] = "auto"
    # Compute activations again in the backward pass: less memory, a third more work.
    recompute: bool = False
    # CPU threads; 0 leaves torch's choice. Runs are equal to the bit only at an equal number.
    threads: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("batch_size", 1), ("micro_batch", 0), ("eval_per_doubling", 0), ("eval_every", 0), ("eval_tokens", 1),
            ("checkpoint_every", 0), ("keep_last", 1), ("keep_every", 0), ("log_every", 1), ("diagnose_every", 0),
            ("threads", 0),
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise UserError(f"{name} is {getattr(self, name)}, must be at least {least}")
        if self.micro_batch and self.batch_size % self.micro_batch:
            raise UserError(f"micro_batch is {self.micro_batch}, must divide batch_size, which is {self.batch_size}")
        if not -(2**63) <= self.seed < 2**63:
            raise UserError(f"seed is {self.seed}, must have at most 63 bits")
        Until.parse(self.until)

    @property
    def sequences_at_once(self) -> int:
        return self.micro_batch or max(n for n in range(1, 33) if self.batch_size % n == 0)


#: What a run is. Everything else may change when it is resumed.
FIXED = ("model", "data.documents", "optimizer", "cooldown", "seed", "preset")


@dataclass(frozen=True)
class Until:
    """When a run ends; kind None: never by itself."""

    kind: Literal["steps", "tokens", "seconds", "loss"] | None = None
    value: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Until:
        said = text.strip().lower()
        if not said:
            return cls()
        part = r"\.?[0-9]*(?:e[+-]?[0-9]+)?"
        found = re.fullmatch(
            rf"([0-9]+(?:[_,][0-9]+)*{part})\s*(steps?|tokens?|[kmb]\s*tokens?|h|hours?|min|minutes?|s|seconds?)", said
        )
        loss = re.fullmatch(rf"(loss)\s*(?:<=?|=)?\s*([0-9]+{part})", said)
        value = math.inf
        if loss is not None:
            value, unit = float(loss[2]), "loss"
        elif found is not None:
            value, unit = float(found[1].replace("_", "").replace(",", "")), found[2]
        if not math.isfinite(value):
            raise UserError(f"until is {text!r}: say '600 steps', '1e9 tokens', '2 h', 'loss 3.2', or nothing")
        if unit == "loss":
            return cls("loss", value)
        if unit.startswith("step"):
            if value != int(value):
                raise UserError(f"until is {text!r}: the number of steps must be whole")
            return cls("steps", value)
        if unit.endswith(("token", "tokens")):
            return cls("tokens", value * {"k": 1e3, "m": 1e6, "b": 1e9}.get(unit[0], 1.0))
        return cls("seconds", value * {"h": 3600, "m": 60, "s": 1}[unit[0]])

    def fraction(self, step: int, tokens: int, seconds: float) -> float | None:
        """How much of the way is done, where that can be told."""
        if self.kind is None or self.kind == "loss":
            return None
        done = {"steps": step, "tokens": tokens, "seconds": seconds}[self.kind]
        return min(1.0, done / self.value) if self.value else 1.0


# ------------------------------------------------- plain values, TOML, merging


def bare(name: str) -> str:
    """An optimizer's name in any spelling: "sf-normuon" is "SFNorMuon"."""
    return name.lower().replace("-", "").replace("_", "")


def nearest(name: str, among: typing.Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(among), 1, 0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def _fits(value: Any, kind: Any) -> Any:
    """The value as the annotated type, or TypeError."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        (kind,) = [a for a in arguments if a is not type(None)]
        return _fits(value, kind)
    if origin is Literal:
        if value not in arguments:
            raise TypeError(f"one of {', '.join(map(repr, arguments))}")
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise TypeError("a list")
        if arguments[-1] is not Ellipsis and len(value) != len(arguments):
            raise TypeError(f"a list of {len(arguments)}")
        return tuple(_fits(v, arguments[0]) for v in value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError({float: "a number", int: "a whole number", str: "a text", bool: "true or false"}[kind])
    return value


def merged(base: T, values: Mapping[str, Any], *, path: str = "", source: str = "the settings") -> T:
    """`base`, a dataclass, with values in place of some of its fields; an unknown key or a wrong type is an error.

    Another optimizer's name drops the options of the one before, but for its warmup and the trainer's own; another
    recipe drops those that a recipe fills in.
    """
    kinds = typing.get_type_hints(type(base))
    changes: dict[str, Any] = {}
    if not isinstance(values, Mapping):
        raise UserError(f"{source}: {path.rstrip('.') or 'this'} is {values!r}, must be a table of settings")
    if isinstance(base, OptimizerConfig) and bare(str(values.get("name", base.name))) != bare(base.name):
        kept = ("warmup_steps", "schedule", "horizon", "decay_steps", "decay_power", "decay_part", "clip")
        base = type(base)(**{name: getattr(base, name) for name in kept})  # another optimizer has other options
    if isinstance(base, OptimizerConfig) and values.get("recipe", base.recipe) != base.recipe:
        base = dataclasses.replace(base, **dict.fromkeys(FILLED))  # type: ignore[arg-type]
    for key, value in values.items():
        if key not in kinds:
            raise UserError(f"{source}: there is no setting {path + key!r}{nearest(key, kinds)}")
        old = getattr(base, key)
        if dataclasses.is_dataclass(old):
            changes[key] = merged(old, value, path=f"{path}{key}.", source=source)
            continue
        try:
            changes[key] = _fits(value, kinds[key])
        except TypeError as wrong:
            raise UserError(f"{source}: {path + key} is {value!r}, must be {wrong}") from None
    return dataclasses.replace(base, **changes)  # type: ignore[type-var]


def plain(config: Any) -> dict[str, Any]:
    """Nested dicts of plain values, without what is None."""
    found: dict[str, Any] = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            found[f.name] = plain(value)
        elif value is not None:
            found[f.name] = list(value) if isinstance(value, tuple) else value
    return found


def flat(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """{"model": {"width": 64}} as {"model.width": 64}."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{path}{key}.") if isinstance(value, Mapping) else {path + key: value}
    return found


def _toml(value: Any) -> str:
    """As JSON writes it, which is TOML but for the numbers that are none and one character."""
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def to_toml(config: Any) -> str:
    """Tables of numbers, truths, texts and lists of them."""
    values = plain(config)
    top = {k: v for k, v in values.items() if not isinstance(v, dict)}
    tables = [("", top), *((f"\n[{k}]\n", v) for k, v in values.items() if isinstance(v, dict))]
    return "".join(head + "".join(f"{k} = {_toml(v)}\n" for k, v in table.items()) for head, table in tables)


def read_toml(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except (OSError, UnicodeDecodeError) as wrong:
        raise UserError(f"cannot read {path}: {wrong}") from None
    except tomllib.TOMLDecodeError as wrong:
        raise UserError(f"{path} is not TOML: {wrong}") from None


def as_begun(config: Config, began: Config) -> Config:
    """The settings, but what a run is as another has it."""
    whole = {name: getattr(began, name) for name in FIXED if "." not in name}
    data = dataclasses.replace(config.data, documents=began.data.documents)
    return dataclasses.replace(config, data=data, **whole)


def changed(old: Config, new: Config) -> list[str]:
    """Settings that make another run of it, as 'model.width: 64 was 32'."""
    before, after = flat(plain(old)), flat(plain(new))
    fixed = [k for k in {**before, **after} if k.startswith(FIXED)]
    keys = [k for k in fixed if before.get(k) != after.get(k)]
    return [f"{k}: {after.get(k, 'default')} was {before.get(k, 'default')}" for k in keys]
