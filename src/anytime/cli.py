"""The command `anytime`: a small table of commands, each a function; the only reader of argv."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import commands, studies
from .studies import say
from .train import config as settings
from .train.build import Rates, settled, without_recipe
from .train.config import Config, Until
from .train.errors import Elsewhere, UserError
from .train.loop import Result
from .train.parallel import LAST_WORDS, leads
from .train.presets import PRESETS, preset

Command = Callable[[list[str]], int]

#: What a shell is told after a stop by a signal.
_SIGNALS = {"SIGINT": 130, "SIGTERM": 143}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 done, 1 something to mend (said in one line), 2 a wrong command, 128 + n after a signal."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # what a terminal cannot show is no reason to stop
    try:
        status = _main(arguments)
        sys.stdout.flush()
        return status
    except Elsewhere:
        return 1
    except UserError as wrong:
        say(f"error: {wrong}", sys.stderr)
        return 1
    except KeyboardInterrupt:
        if {*arguments[:1]} & {"paper", "frontier", "robust", "sweep"}:
            say("stopped; the same command goes on from here", sys.stderr)
        return 130
    except BrokenPipeError:  # `anytime … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        say(_overview())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from .version import __version__

        say(__version__)
        return 0
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        say(f"error: there is no command {name!r}{settings.nearest(name, COMMANDS)}\n\n{_overview()}", sys.stderr)
        return 2
    return COMMANDS[name](rest)


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
    bare = {argument.partition("=")[0] for argument in rest if argument.startswith("-")} <= {"--until"}
    base = _base(file, given, bare=bare)
    about = f"{inspect.cleandoc(train.__doc__ or '')}\n\nPresets: {', '.join(PRESETS)}."
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


def _base(file: str | None, given: Mapping[str, str], *, bare: bool) -> Config:
    """The settings before those of the command line: of the run that is there, or of the preset, then of the file.

    A `bare` command has no others but an end: with a folder alone it goes on there, and begins nothing.
    """
    from .train.checkpoint import checkpoints_in
    from .train.runs import stored_config

    values = settings.read_toml(Path(file)) if file is not None else {}
    settings.merged(Config(), {key: values[key] for key in ("preset", "run") if key in values}, source=file or "")
    name = given.get("preset", values.get("preset", ""))
    folder = given.get("run") or values.get("run") or f"runs/{name or 'run'}"
    stored, checkpoints = stored_config(Path(folder)), checkpoints_in(Path(folder) / "checkpoints")
    if stored is not None and not checkpoints:  # nothing is lost
        stored = without_recipe(stored) if name in ("", stored.preset) else None
    if stored is not None and name not in ("", stored.preset):
        was = f"the preset {stored.preset!r}" if stored.preset else "no preset"
        raise UserError(f"{folder} holds a run that began from {was}, not {name!r}: choose another --run")
    foreign = any(Path(folder).glob("*")) and not checkpoints  # that is said where it is opened
    if stored is None and bare and {*given} == {"run"} and not values and not foreign:
        begun = f"--preset NAME begins one there ({', '.join(PRESETS)})"
        raise UserError(f"there is no run in {folder} to go on with; {begun}")
    if stored is None:
        stored = settings.merged(Config(), preset(name) if name else {})
    config = settings.merged(stored, {**values, "preset": name or stored.preset, "run": folder}, source=file or "")
    return settings.merged(config, {"optimizer": _aside(given)}, source="the command line")


def _aside(given: Mapping[str, str]) -> dict[str, Any]:
    """Of _ASIDE, as a table of the optimizer's."""
    return {key.removeprefix("optimizer."): given[key] for key in _ASIDE if key in given}


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
        say(f"\nThe anytime curve: the loss of X, a finished model at each of these steps\n{eval_table(rows)}")
    if samples := read_lines(folder / "samples.jsonl"):
        say(f"\nA sample at step {samples[-1]['step']:,}:\n{samples[-1]['prompt']}{samples[-1]['text']}")
    if config.report:
        from .train.report import write_report

        say(f"\nReport: {write_report([folder], folder / 'report.html').resolve()}")
    say(f"\nRun: {folder} at step {result.step:,}. {_next(config, result)}")
    return _SIGNALS.get(result.reason, 0)


def _next(config: Config, result: Result) -> str:
    """How to go on from here."""
    last, run = Rates(settled(config)).last_step, shlex.quote(config.run)
    if last is not None and result.step >= last:
        return f"Its rate has ended; to go on otherwise: anytime branch {run} --at STEP"
    if result.reason.startswith("until"):
        further = min(2 * max(result.step, 1), last or sys.maxsize)
        return f"Further: anytime train --run {run} --until '{further} steps'"
    return f"Go on: anytime train --run {run}"


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
            say(inspect.cleandoc(branch.__doc__ or ""))
            return 0
        raise UserError("name the run to branch from: anytime branch RUN --at STEP")
    given = _take(rest, "at", "cooldown", "average", "run", "until", *_ASIDE)
    old = stored_config(Path(source))
    if old is None:
        raise UserError(f"{source} is not a run's folder")
    at, cooldown = _whole("at", given.get("at")), _whole("cooldown", given.get("cooldown")) or 0
    step = at if at is not None else step_of(find_checkpoint(Path(source)))
    beside = source.rstrip("/") if Path(source).name not in ("", "..") else os.path.abspath(source)
    folder = given.get("run", f"{beside}-{'cooldown' if cooldown else 'branch'}-{step}")
    aside = _aside(given)
    base = settings.merged(old, {"optimizer": aside}, source="the command line")
    new = _parse(Config, "branch", rest, default=dataclasses.replace(base, run=folder), about=branch.__doc__)
    before = settings.flat(dataclasses.asdict(base))
    changes: dict[str, Any] = {"until": given["until"]} if "until" in given else {}
    changes |= {"optimizer": aside} if aside else {}
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


def _typed(name: str, function: Callable[..., int]) -> Command:
    """A command whose arguments are the function's parameters, those of a dataclass among them by its fields' names."""

    def command(arguments: list[str]) -> int:
        return int(_parse(function, name, arguments, bare=True))

    command.__doc__ = function.__doc__
    return command


COMMANDS: dict[str, Command] = {
    "train": train,
    "data": _typed("data", commands.data),
    "branch": branch,
    "sample": _typed("sample", commands.sample),
    "eval": _typed("eval", commands.evaluate),
    "export": _typed("export", commands.export),
    "report": _typed("report", commands.report),
    "bench": _typed("bench", commands.bench),
    "plan": _typed("plan", commands.plan),
    "paper": _typed("paper", studies.paper),
    "frontier": _typed("frontier", studies.frontier),
    "robust": _typed("robust", studies.robust),
    "sweep": _typed("sweep", studies.sweep),
}

if __name__ == "__main__":
    sys.exit(main())
