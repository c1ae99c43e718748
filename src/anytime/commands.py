"""The commands that make, use and show things, each a function of what it may be asked; runs are cli.py's."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from .studies import say
from .train import config as settings
from .train import presets as named
from .train.errors import UserError


def _warn(text: str) -> None:
    say(f"warning: {text}", sys.stderr)


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
    say(
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
    say("\n---\n".join(prompt + text for text in texts))
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
    say(
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
    say(f"step {trained.card['step']:,} of {path} is in {use.export(trained, Path(to), dtype=dtype)}")
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
    say(f"Report: {path.resolve()}")
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
        named.preset(name)
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
        say(f"left out, not installed: {', '.join(missing)}")
    if picture:
        show.draw(found, Path(picture))
        say(f"Picture: {Path(picture).resolve()}")
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
        say("\n".join(dumps(scale.as_json(each)) for each in found))
        return 0
    if markdown:
        say(scale.markdown(scale.line_cells(found)))
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
