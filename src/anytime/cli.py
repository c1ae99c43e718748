"""The command `anytime`: a small table of commands, each a function; the only reader of argv."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from . import studies
from .studies import say as _say
from .train import config as settings
from .train.config import Config, Until
from .train.errors import Elsewhere, UserError
from .train.loop import Result
from .train.parallel import LAST_WORDS, leads

Command = Callable[[list[str]], int]

#: What a shell is told after a stop by a signal.
_SIGNALS = {"SIGINT": 130, "SIGTERM": 143}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 done, 1 something to mend (said in one line), 2 a wrong command, 128 + n after a signal."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _main(arguments)
        sys.stdout.flush()
        return status
    except Elsewhere:
        return 1
    except UserError as wrong:
        _say(f"error: {wrong}", sys.stderr)
        return 1
    except KeyboardInterrupt:
        if {*arguments[:1]} & {"paper", "frontier", "robust", "sweep"}:
            _say("stopped; the same command goes on from here", sys.stderr)
        return 130
    except BrokenPipeError:  # `anytime … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        _say(_overview())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from .version import __version__

        _say(__version__)
        return 0
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        _say(f"error: there is no command {name!r}{settings.nearest(name, COMMANDS)}\n\n{_overview()}", sys.stderr)
        return 2
    return COMMANDS[name](rest)


def _warn(text: str) -> None:
    _say(f"warning: {text}", sys.stderr)


def _overview() -> str:
    lines = [f"  {name:<10}{(command.__doc__ or '').splitlines()[0]}" for name, command in COMMANDS.items()]
    return "anytime: train without knowing how long\n\n" + "\n".join(lines) + "\n\nanytime COMMAND --help says more."


def _parse(
    what: Any,
    command: str,
    arguments: Sequence[str],
    *,
    default: Any = None,
    about: str | None = None,
    bare: bool = False,
) -> Any:
    """Arguments as a dataclass or a function's parameters say; `bare` leaves the names of nested ones as they are."""
    try:
        import tyro
    except ImportError:
        raise UserError('the command line needs tyro: pip install "anytime-optim[train]"') from None
    more: dict[str, Any] = {} if default is None else {"default": default}
    more |= {"config": (tyro.conf.OmitArgPrefixes,)} if bare else {}
    words = inspect.cleandoc(about or what.__doc__ or "").partition("\nArgs:")[0]
    return tyro.cli(what, prog=f"anytime {command}", args=list(arguments), description=words, **more)


def _take(arguments: list[str], *names: str) -> dict[str, str]:
    """Removes `--name value` and `--name=value` from the arguments; the last of several counts."""
    found: dict[str, str] = {}
    kept: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or name not in names:
            kept.append(argument)
        elif equals or (value := next(rest, "")):
            found[name] = value
        else:
            raise UserError(f"--{name} needs a value")
    arguments[:] = kept
    return found


def _take_first(arguments: list[str]) -> str | None:
    """Removes a first argument that is no option."""
    return arguments.pop(0) if arguments and not arguments[0].startswith("-") else None


# ------------------------------------------------------------------ commands


def train(arguments: list[str]) -> int:
    """train a model, resume a run, or extend it: anytime train [CONFIG.toml] --preset NAME --run FOLDER --until WHEN

    Settings come from the command line, else from CONFIG.toml, else from the preset. The same command on the same
    folder goes on where the run stopped; with a later --until it goes further. WHEN is '600 steps', '1e9 tokens', '2 h'
    (of training in all), 'loss 3.2' (of X, on validation), or left out: then Ctrl-C stops it, and nothing is lost.
    """
    with _by_one():
        config = _asked(list(arguments))
    return _run(config)


#: Before other options, for they change what those are by default.
_ASIDE = ("optimizer.name", "optimizer.recipe")


def _asked(rest: list[str]) -> Config:
    """The settings that a command line of `train` means."""
    file = _take_first(rest)
    given = _take(rest, "preset", "run", *_ASIDE)
    if file is not None and Path(file).is_dir():
        given.setdefault("run", file)
        file = None
    base = _base(file, given)
    about = f"{inspect.cleandoc(train.__doc__ or '')}\n\nPresets: {', '.join(settings.PRESETS)}."
    config: Config = _parse(Config, "train", rest, default=base, about=about)
    if config.cooldown != base.cooldown:
        raise UserError("a cooldown is begun by `anytime branch RUN --cooldown STEPS`")
    return config


@contextlib.contextmanager
def _by_one() -> Iterator[None]:
    """What all processes of a run find alike is said by the first alone."""
    if leads():
        yield
        return
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
        try:
            yield
        except (UserError, SystemExit) as wrong:
            time.sleep(LAST_WORDS)
            raise Elsewhere(str(wrong)) from None


def _base(file: str | None, given: Mapping[str, str]) -> Config:
    """The settings before those of the command line: of the run that is there, or of the preset, then of the file."""
    from .train.checkpoint import checkpoints_in
    from .train.runs import stored_config

    values = settings.read_toml(Path(file)) if file is not None else {}
    settings.merged(Config(), {key: values[key] for key in ("preset", "run") if key in values}, source=file or "")
    name = given.get("preset", values.get("preset", ""))
    folder = given.get("run") or values.get("run") or f"runs/{name or 'run'}"
    stored = stored_config(Path(folder))
    if stored is not None and name not in ("", stored.preset) and not checkpoints_in(Path(folder) / "checkpoints"):
        stored = None  # nothing is lost
    if stored is not None and name not in ("", stored.preset):
        was = f"the preset {stored.preset!r}" if stored.preset else "no preset"
        raise UserError(f"{folder} holds a run that began from {was}, not {name!r}: choose another --run")
    if stored is None:
        stored = settings.merged(Config(), settings.preset(name) if name else {})
    config = settings.merged(stored, {**values, "preset": name or stored.preset, "run": folder}, source=file or "")
    aside = {key.removeprefix("optimizer."): given[key] for key in _ASIDE if key in given}
    return settings.merged(config, {"optimizer": aside}, source="the command line")


def _run(config: Config) -> int:
    """Trains, shows it, and says at the end what there is."""
    from .train.display import Display, eval_table
    from .train.loop import train as start
    from .train.runs import read_lines
    from .train.sinks import open_sinks

    if not leads():
        return _SIGNALS.get(start(config).reason, 0)
    until = Until.parse(config.until)

    def end(row: Mapping[str, Any]) -> float | None:
        known = all(key in row for key in ("step", "tokens", "seconds"))
        return until.fraction(row["step"], row["tokens"], row["seconds"]) if known else None

    folder = Path(config.run)
    with contextlib.ExitStack() as stack:
        sinks = open_sinks(config.log_to, folder, folder.name, settings.plain(config)) if config.log_to else []
        for sink in sinks:
            stack.callback(sink.close)
        display = stack.enter_context(Display(end if until.kind not in (None, "loss") else None))
        result = start(config, listeners=[display, *sinks], warn=display.warning)
    rows = read_lines(folder / "metrics.jsonl")
    if any(row["kind"] == "eval" for row in rows):
        _say(f"\nThe anytime curve: the loss of X, a finished model at each of these steps\n{eval_table(rows)}")
    if samples := read_lines(folder / "samples.jsonl"):
        _say(f"\nA sample at step {samples[-1]['step']:,}:\n{samples[-1]['prompt']}{samples[-1]['text']}")
    if config.report:
        from .train.report import write_report

        _say(f"\nReport: {write_report([folder], folder / 'report.html').resolve()}")
    _say(f"\nRun: {folder} at step {result.step:,}. {_next(config, result)}")
    return _SIGNALS.get(result.reason, 0)


def _next(config: Config, result: Result) -> str:
    """How to go on from here."""
    if config.optimizer.horizon is not None or config.cooldown.steps:
        return f"Its rate ends; to go on otherwise: anytime branch {config.run} --at STEP"
    if result.reason.startswith("until"):
        return f"Further: anytime train --run {config.run} --until '{2 * max(result.step, 1)} steps'"
    return f"Go on: anytime train --run {config.run}"


def branch(arguments: list[str]) -> int:
    """start another run from a kept step: anytime branch RUN --at STEP [--cooldown STEPS] [--average restart]

    --run FOLDER is where it goes, --at the step (the newest by default), --cooldown a number of steps over which the
    rate falls to zero, --average keep or restart. Settings of the run may be changed as in `anytime train`: the rate
    (--optimizer.lr), the data (--data.path), the end (--until).
    """
    from .train.branch import branch as make
    from .train.checkpoint import step_of
    from .train.runs import find_checkpoint, stored_config

    rest = list(arguments)
    source = _take_first(rest)
    if source is None:
        if "--help" in rest or "-h" in rest:
            _say(inspect.cleandoc(branch.__doc__ or ""))
            return 0
        raise UserError("name the run to branch from: anytime branch RUN --at STEP")
    given = _take(rest, "at", "cooldown", "average", "run", "until")
    old = stored_config(Path(source))
    if old is None:
        raise UserError(f"{source} is not a run's folder")
    at, cooldown = _whole("at", given.get("at")), _whole("cooldown", given.get("cooldown")) or 0
    step = at if at is not None else step_of(find_checkpoint(Path(source)))
    folder = given.get("run", f"{source.rstrip('/')}-{'cooldown' if cooldown else 'branch'}-{step}")
    new = _parse(Config, "branch", rest, default=dataclasses.replace(old, run=folder), about=branch.__doc__)
    before = settings.flat(dataclasses.asdict(old))
    changes: dict[str, Any] = {"until": given["until"]} if "until" in given else {}
    for key, value in settings.flat(dataclasses.asdict(new)).items():
        if value != before[key] and key != "run":
            table = changes
            *tables, name = key.split(".")
            for inner in tables:
                table = table.setdefault(inner, {})
            table[name] = value
    average: Any = given.get("average", "keep")
    return _run(make(source, folder, at=at, cooldown=cooldown, average=average, changes=changes))


def _whole(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdigit():
        raise UserError(f"--{name} is {text!r}, must be a whole number of steps")
    return int(text)


def data(
    inputs: tuple[str, ...] = (),
    /,
    out: str = "data",
    tokenizer: str = "gpt2",
    train_tokenizer: int | None = None,
    val_every: int = 200,
    val: tuple[str, ...] = (),
    text_key: str = "text",
    separator: str = "<|endoftext|>",
    workers: int | None = None,
    limit_tokens: int | None = None,
) -> int:
    """turn text, JSONL, Parquet or a Hugging Face dataset into tokens: anytime data FILES… --out FOLDER

    An interrupted one goes on when the same command is given again.

    Args:
        inputs: files, folders, globs, or hf:NAME[:CONFIG]; none is FineWeb.
        out: the folder of tokens.
        tokenizer: bytes, gpt2, gpt2:RANKS_FILE, a tokenizer.json, or a folder with one.
        train_tokenizer: train a tokenizer of so many entries on the data, in place of --tokenizer.
        val_every: one document in so many is for validation; 0 keeps none.
        val: inputs for validation, in place of --val-every.
        text_key: the field of JSONL, or the column of Parquet, that holds the text.
        separator: the line between two documents of a plain text.
        workers: processes; all cores by default.
        limit_tokens: stop at about so many.
    """
    from .train.prepare import prepare

    with _progress() as show:
        made = prepare(
            inputs,
            Path(out),
            tokenizer,
            train_tokenizer=train_tokenizer,
            val_every=val_every,
            val_inputs=val,
            text_key=text_key,
            separator=separator,
            workers=workers,
            limit_tokens=limit_tokens,
            progress=show,
        )
    _say(
        f"{made.train.tokens:,} tokens to train on and {made.val.tokens:,} for validation in {out} "
        f"(vocabulary {made.vocabulary:,}). Train on them: "
        f"anytime train --preset {_fitting(made.vocabulary)} --data.path {out}"
    )
    return 0


def _fitting(vocabulary: int) -> str:
    """The preset for a first try with a vocabulary."""
    return "2M" if vocabulary <= 4096 else "125M" if vocabulary <= 50304 else f"125M --model.vocabulary {vocabulary}"


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[Any], None]]:
    """A bar of the parts done; nothing where there is no terminal."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.fields[done]}"), BarColumn(), TextColumn("{task.fields[speed]}"), TimeElapsedColumn())
    with Progress(*columns, disable=not sys.stdout.isatty()) as bar:
        task = bar.add_task("", done="", speed="", total=None)

        def show(now: Any) -> None:
            speed = f"{now.tokens:,} tokens, {now.bytes / 1e6 / max(now.seconds, 1e-9):.1f} MB/s"
            done = f"part {now.parts_done} of {now.parts}"
            bar.update(task, total=now.parts, completed=now.parts_done, done=done, speed=speed)

        yield show


def sample(
    path: str,
    /,
    prompt: str = "",
    at: int | None = None,
    count: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
    copies: int = 1,
    device: str = "",
) -> int:
    """let a trained model write: anytime sample RUN --prompt TEXT

    Args:
        path: a run's folder, a checkpoint's, or an export's.
        prompt: how the text begins.
        at: the step of the run; its newest by default.
        count: tokens to draw.
        temperature: 0 takes the likeliest token.
        top_k: draw among so many likeliest.
        seed: of the drawing.
        copies: texts to draw.
        device: empty is CUDA where there is one, else the CPU.
    """
    from .train import use

    trained = use.load(path, at=at, device=device, warn=_warn)
    texts = use.sample(trained, prompt, count=count, temperature=temperature, top_k=top_k, seed=seed, copies=copies)
    _say("\n---\n".join(prompt + text for text in texts))
    return 0


def evaluate(
    path: str,
    /,
    data: str = "",
    at: int | None = None,
    tokens: int | None = None,
    at_once: int = 8,
    device: str = "",
) -> int:
    """loss, perplexity and bits per byte of a trained model: anytime eval RUN [--data FOLDER]

    Args:
        path: a run's folder, a checkpoint's, or an export's.
        data: a folder or file of tokens; the run's own by default.
        at: the step of the run; its newest by default.
        tokens: how many to judge by; as many as the run's own evaluations by default.
        at_once: windows at a time.
        device: empty is CUDA where there is one, else the CPU.
    """
    from .train import use

    trained = use.load(path, at=at, device=device, warn=_warn)
    found = use.evaluate_model(trained, data, count=tokens, at_once=at_once)
    bits = "" if found.bits_per_byte is None else f", {found.bits_per_byte:.4f} bits a byte"
    step = trained.card.get("step", "?")
    _say(
        f"loss {found.loss:.4f} nats a token, perplexity {found.perplexity:.2f}{bits} "
        f"(step {step}, {found.tokens:,} tokens)"
    )
    return 0


def export(
    path: str, /, to: str, at: int | None = None, dtype: Literal["float32", "bfloat16", "float16"] = "float32"
) -> int:
    """write a model's weights, config and tokenizer to a folder: anytime export RUN --to FOLDER

    Args:
        path: a run's folder, or a checkpoint's.
        to: the new folder.
        at: the step of the run; its newest by default.
        dtype: of the weights.
    """
    from .train import use

    trained = use.load(path, at=at, device="cpu", warn=_warn)
    _say(f"step {trained.card['step']:,} of {path} is in {use.export(trained, Path(to), dtype=dtype)}")
    return 0


def report(runs: tuple[str, ...], /, out: str = "") -> int:
    """one HTML page about one or more runs: anytime report RUN… [--out FILE]

    Args:
        runs: folders of runs.
        out: the file; report.html in the first run's folder by default.
    """
    from .train.report import write_report

    if not runs:
        raise UserError("name at least one run's folder: anytime report RUN…")
    path = write_report([Path(run) for run in runs], Path(out) if out else Path(runs[0]) / "report.html")
    _say(f"Report: {path.resolve()}")
    return 0


def bench(
    preset: tuple[str, ...] = (),
    device: str = "",
    part: Literal["matrices", "all", "both"] = "all",
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    steps: int | None = None,
    only: tuple[str, ...] = (),
    out: str = "",
    picture: str = "",
) -> int:
    """how long an optimizer step takes here, beside other libraries': anytime bench [--preset NAME…] [--picture FILE]

    Args:
        preset: models by name; one that suits the device by default.
        device: empty is CUDA where there is one, else the CPU.
        part: the hidden matrices alone, all parameters, or one table for each.
        dtype: of weights and gradients.
        steps: how many the median is of; 20 on CUDA, 5 elsewhere.
        only: optimizers whose names contain one of these.
        out: a file of JSON lines to append the rows to.
        picture: a file of bars to draw, .svg, .png or .pdf.
    """
    import torch
    from rich.console import Console
    from rich.table import Table

    from .bench import peers, race, show
    from .train.device import choose_device
    from .train.runs import Lines

    where = choose_device(device)
    among, missing = peers.chosen(peers.contestants(where), only)
    presets = preset or (race.PRESET["cuda" if where.type == "cuda" else "cpu"],)
    for name in presets:
        settings.preset(name)
    if picture:
        show.figure_class(Path(picture))
    lines = Lines(Path(out))

    def write(rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows if out else ():
            lines.add(row)
        if out and (wrong := lines.flush()):
            raise UserError(f"{out} could not be written: {wrong.strerror}")

    write([])  # whether it can be, before anything is measured
    console = Console(file=sys.stdout, highlight=False, markup=False, width=None if sys.stdout.isatty() else 160)
    found = []
    for name in presets:
        for each in race.PARTS if part == "both" else (part,):
            with console.status(f"{name}, {each}") as shown:
                kind = getattr(torch, dtype)
                rows = race.measure(name, each, among, where, dtype=kind, steps=steps, tell=shown.update)
            found += rows
            head, *body = show.cells(rows)
            table = Table()
            for i, title in enumerate(head):
                table.add_column(title, justify="left" if title in ("optimizer", "note") else "right", no_wrap=i == 0)
            for row, line in zip(rows, body, strict=True):
                table.add_row(*line, style="bold" if row["ours"] else "red" if "error" in row else "")
            console.print(show.heading(rows[0]), table, show.floor_line(rows), sep="\n", soft_wrap=True)
            write(rows)
    if missing:
        _say(f"left out, not installed: {', '.join(missing)}")
    if picture:
        show.draw(found, Path(picture))
        _say(f"Picture: {Path(picture).resolve()}")
    return 0


def plan(
    model: tuple[str, ...] = ("125M",),
    gpus: tuple[int, ...] = (1,),
    shard: int | None = None,
    tensor: int | None = None,
    owners: Literal["all", "factor", "state", "gradient"] = "all",
    batch_tokens: int | None = None,
    micro_batch: int | None = None,
    recompute: Literal["auto", "yes", "no"] = "auto",
    context: int | None = None,
    vocabulary: int | None = None,
    optimizer: str = "SFNorMuon",
    dtype: Literal["float32", "bfloat16"] = "float32",
    memory: float = 80.0,
    link: float = 50.0,
    node_link: float = 300.0,
    node: int = 8,
    rate: float = 500.0,
    json: bool = False,
    markdown: bool = False,
) -> int:
    """what a model takes on so many GPUs, and how to lay it out: anytime plan --model 7B --gpus 64

    Bytes that each GPU holds and sends in a step: weights, gradients, state and messages are counted, activations and
    times estimated. Without --shard and --tensor it proposes the smallest layout that fits. Several models or numbers
    of GPUs give a line each.

    Args:
        model: a preset, 1.3B, 7B, 13B, 70B, or LAYERSxWIDTH.
        gpus: of all nodes.
        shard: GPUs that each weight is cut over (FSDP2); 1 is DDP, 0 all.
        tensor: GPUs that compute each block together (tensor parallelism).
        owners: under DDP, who works on a matrix: all, or one GPU for all.
        batch_tokens: a step, on all GPUs; about half a million by default.
        micro_batch: sequences at once on a GPU; as many as fit, up to 32, by default.
        recompute: activations computed again in the backward pass; auto is where sharding is not enough.
        context: tokens a sequence; the model's own by default.
        vocabulary: tokens there are; the model's own by default.
        optimizer: by name.
        dtype: of the weights.
        memory: GB of a GPU, of which nine tenths are planned with.
        link: GB a second that a GPU sends to other nodes.
        node_link: GB a second within its node.
        node: GPUs in a node.
        rate: TFLOP a second that a GPU reaches in products of matrices.
        json: a JSON object a line, everything in bytes, elements and seconds.
        markdown: the table of lines, as a page has it.
    """
    from json import dumps

    from rich.console import Console
    from rich.table import Table

    from .train import scale

    machine = scale.Machine(
        memory=1e9 * memory, products=1e12 * rate, link=1e9 * link, inner=1e9 * node_link, node=node
    )
    asked = scale.Asked(
        shard=shard, tensor=tensor, owners=None if owners == "all" else owners, batch_tokens=batch_tokens,
        micro_batch=micro_batch, recompute=None if recompute == "auto" else recompute == "yes", context=context,
        vocabulary=vocabulary, dtype=dtype, optimizer=settings.OptimizerConfig(name=optimizer),
    )  # fmt: skip
    found = [
        scale.plan(dataclasses.replace(asked, model=name, gpus=count), machine) for name in model for count in gpus
    ]
    if json:
        _say("\n".join(dumps(scale.as_json(each)) for each in found))
        return 0
    if markdown:
        _say(scale.markdown(scale.line_cells(found)))
        return 0
    console = Console(file=sys.stdout, highlight=False, markup=False, width=None if sys.stdout.isatty() else 160)

    def show(head: Sequence[str], *body: Sequence[str], left: Sequence[int] = (0,)) -> None:
        table = Table()
        for i, title in enumerate(head):
            table.add_column(title, justify="left" if i in left else "right", no_wrap=i == 0)
        for line in body:
            table.add_row(*line)
        console.print(table, soft_wrap=True)

    if len(found) > 1:
        show(*scale.line_cells(found), left=(0, 2))
        return 0
    (one,) = found
    console.print(scale.heading(one), soft_wrap=True)
    show(*scale.memory_cells(one), left=(0, 2))
    if one.messages:
        show(*scale.message_cells(one))
    lines = [scale.time_line(one), one.reason, scale.owners_line(one, asked.optimizer, dtype)]
    console.print(*filter(None, lines), sep="\n", soft_wrap=True)
    return 0


def _typed(name: str, function: Callable[..., int]) -> Command:
    """A command whose arguments are the function's parameters, those of a dataclass among them by its fields' names."""

    def command(arguments: list[str]) -> int:
        return int(_parse(function, name, arguments, bare=True))

    command.__doc__ = function.__doc__
    return command


COMMANDS: dict[str, Command] = {
    "train": train,
    "data": _typed("data", data),
    "branch": branch,
    "sample": _typed("sample", sample),
    "eval": _typed("eval", evaluate),
    "export": _typed("export", export),
    "report": _typed("report", report),
    "bench": _typed("bench", bench),
    "plan": _typed("plan", plan),
    "paper": _typed("paper", studies.paper),
    "frontier": _typed("frontier", studies.frontier),
    "robust": _typed("robust", studies.robust),
    "sweep": _typed("sweep", studies.sweep),
}

if __name__ == "__main__":
    sys.exit(main())
