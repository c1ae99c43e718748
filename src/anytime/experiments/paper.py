"""`anytime paper`: runs what is missing, then draws the paper's tables and figures from the rows alone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from ..train.errors import UserError
from ..train.files import make_folder, write_atomically
from . import draw
from .grid import Grid, Show, longest_first
from .items import Item, items_of
from .recipes import Found, Guess, MissingRow, Recipes
from .run import Machine, Run
from .scales import Scale, scale_of

Say = Callable[[str], None]


def searches(items: Iterable[Item], recipes: Recipes) -> list[Run]:
    """The first round."""
    names = {name: None for item in items for name in item.searches}
    return [run for name in names for run in recipes.search(name)]


def rounds(items: Sequence[Item], found: Found) -> list[Run]:
    """Both rounds, with the rates that `found` has."""
    return [*searches(items, found.recipes), *(run for item in items for run in item.runs(found))]


def paper(
    names: Sequence[str] = (),
    *,
    scale: str = "nano",
    data: str = "",
    out: Path | None = None,
    work: Path | None = None,
    jobs: int = 1,
    device: str = "",
    seconds: float | None = None,
    agree: Callable[[str], bool] = lambda text: True,
    say: Say = lambda text: None,
    showing: Callable[[], AbstractContextManager[Show]] | None = None,
) -> Path | None:
    """Tables and figures by name (all by default), at a scale, into a folder; the index page, or None if not agreed or
    if time ran out before its end.

    `agree` is told what it will cost before anything long is run.
    """
    chosen = scale_of(scale)
    items = items_of(names or chosen.shown)
    out = out or Path("results/paper") / scale
    work = work or Path("runs/paper") / scale
    rows = out / "rows.jsonl"
    recipes = Recipes(chosen)
    ends = math.inf if seconds is None else time.monotonic() + seconds
    with Grid(rows, work, data=data or chosen.data or "data", jobs=jobs, device=device) as grid:
        searched = not grid.missing(searches(items, recipes))
        wanted = rounds(items, (Found if searched else Guess)(recipes, grid.rows))
        if lacking := grid.missing(wanted):
            most = grid.estimate(wanted, chosen.speed)
            gpu = "" if chosen.speed is None else " of one H200"
            doubt = "" if searched or not grid.rows else "at most "  # what a search will find may be there already
            cost = f"{scale}: {doubt}{most}{gpu} at {jobs} at once: {named(lacking)}"
            try:
                check_data(chosen, grid.machine)
            except UserError as wrong:
                raise UserError(f"{cost}. But {wrong}") from None
            if not agree(cost):
                return None
            with nullcontext() if showing is None else showing() as show:

                def in_time(runs: list[Run]) -> bool:
                    grid.seconds = None if ends == math.inf else max(0.0, ends - time.monotonic())
                    grid.fill(longest_first(runs), show)
                    return grid.seconds is None or not grid.missing(runs)

                if not in_time(searches(items, recipes)) or not in_time(rounds(items, Found(recipes, grid.rows))):
                    return None
        return redraw(items, Found(recipes, grid.rows), out, say)


def check_data(scale: Scale, machine: Machine) -> None:
    """That the model's vocabulary is that of the data, in whole 64s: losses of another one do not compare."""
    size, wanted = machine.vocabulary, scale.model.vocabulary
    if size is not None and -(-size // 64) * 64 < wanted:
        raise UserError(
            f"the data's vocabulary is {size:,}, that of {scale.name} is {wanted:,}: prepare them with "
            + ("--tokenizer gpt2" if wanted == 50304 else f"--train-tokenizer {wanted}")
        )


def named(runs: Sequence[Run], few: int = 3) -> str:
    """The first few, and how many more."""
    told = "; ".join(f"{run.name}, seed {run.seed}" for run in runs[:few])
    return told + (f"; and {len(runs) - few} more" if len(runs) > few else "")


def redraw(items: Sequence[Item], found: Found, out: Path, say: Say = lambda text: None) -> Path:
    """Every item from the rows that are there, and a page with all that were ever drawn in this folder."""
    make_folder(out)
    scale = found.recipes.scale
    for item in items:
        try:
            write(item, found, out / item.name)
        except MissingRow as missing:
            raise UserError(
                f"{item.name}: {missing}; make it by: anytime paper {item.name} --scale {scale.name} --out {out}"
            ) from None
        say(f"{item.name}: {item.title}")
    parts = [f"# The paper's tables and figures, {scale.name}\n\n{about(scale)}\n"]
    parts += [f"## {item.title}\n\n{text}" for item in items_of(()) if (text := shown(item, out / item.name))]
    index = out / "index.md"
    write_atomically(index, ("\n".join(parts)).encode())
    return index


def write(item: Item, found: Found, path: Path) -> None:
    """An item's files."""
    if item.table is not None:
        table = item.table(found)
        write_atomically(path.with_suffix(".tex"), table.latex().encode())
        write_atomically(path.with_suffix(".md"), f"# {table.title}\n\n{table.markdown()}".encode())
    else:
        assert item.figure is not None
        draw.save(item.figure, found, path)


def shown(item: Item, path: Path) -> str:
    """An item's part of the page, from its files; nothing if it was not drawn yet."""
    if item.table is not None:
        file = path.with_suffix(".md")
        table = file.read_text("utf-8").partition("\n\n")[2] if file.exists() else ""
        return table and f"{table}\n[Markdown]({path.name}.md), [LaTeX]({path.name}.tex)\n"
    if not path.with_suffix(".svg").exists():
        return ""
    told = f"\nIn the paper: {item.paper}\n" if item.paper else ""
    return f"![{item.title}]({path.name}.svg)\n{told}\n[SVG]({path.name}.svg), [PDF]({path.name}.pdf)\n"


def about(scale: Scale) -> str:
    model = scale.model
    text = (
        f"{model.layers} layers of width {model.width}, {model.parameters:,} parameters, {scale.tokens(1):,} tokens a "
        f"step, 1× Chinchilla in {scale.steps(1):,} steps; {len(scale.seeds)} seed{'s' * (len(scale.seeds) > 1)}. "
        "Drawn from rows.jsonl by `anytime paper`."
    )
    if not scale.reported:
        text += (
            " The paper's own numbers are of models of 125M and 772M parameters: what they say in words stands beside."
        )
    return text
