"""The command: what it runs, what it asks, what it writes."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from dataclasses import replace

import pytest

from anytime import cli
from anytime.experiments import grid as room
from anytime.experiments.items import ITEMS
from anytime.experiments.paper import check_data, paper, searches
from anytime.experiments.progress import last_row, left, line, showing, table
from anytime.experiments.recipes import Recipes
from anytime.experiments.run import Machine
from anytime.experiments.scales import SCALES
from anytime.studies import agreed
from anytime.train import UserError
from anytime.train.prepare import prepare


@pytest.fixture
def recorded(tmp_path, found):
    """A folder with all rows of nano."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found("nano").rows.values()))
    return out


MACHINE = Machine("python", 1, "", "cpu", 1, 1, 256)


def never(*arguments):
    raise AssertionError("something was run")


def test_everything_from_rows_alone(recorded, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(room, "execute", never)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["paper", "--scale", "nano", "--out", str(recorded)]) == 0
    page = (recorded / "index.md").read_text()
    for name, item in ITEMS.items():
        assert f"## {item.title}\n" in page
        for kind in ("md", "tex") if item.table else ("svg", "pdf"):
            assert (recorded / f"{name}.{kind}").stat().st_size > 100
            assert f"({name}.{kind})" in page
        assert item.paper in page
    for target in re.findall(r"\]\(([^)]+)\)", page):
        assert (recorded / target).exists(), target
    assert "Page:" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()


def test_some_items(recorded, monkeypatch):
    monkeypatch.setattr(room, "execute", never)
    assert cli.main(["paper", "main", "rates", "--out", str(recorded)]) == 0
    assert sorted(path.name for path in recorded.iterdir()) == [
        "index.md", "main.md", "main.tex", "rates.pdf", "rates.svg", "rows.jsonl",
    ]  # fmt: skip


def test_an_item_drawn_later_joins_the_page(recorded):
    for name in ("rates", "main"):
        cli.main(["paper", name, "--out", str(recorded)])
    page = (recorded / "index.md").read_text()
    headings = [line for line in page.splitlines() if line.startswith("## ")]
    assert headings == [f"## {ITEMS[name].title}" for name in ITEMS if name in ("rates", "main")]
    cli.main(["paper", "main", "--out", str(recorded)])
    assert (recorded / "index.md").read_text() == page


def test_an_item_that_is_not_there(capsys):
    assert cli.main(["paper", "mian"]) == 1
    assert "there is no item 'mian'; did you mean 'main'?" in capsys.readouterr().err
    assert cli.main(["paper", "--scale", "huge"]) == 1
    assert "there are nano, micro, small, large" in capsys.readouterr().err


def test_a_missing_row_is_an_error_with_the_command_that_makes_it(recorded, tmp_path, monkeypatch):
    """As when the runs could not be run."""
    rows = (recorded / "rows.jsonl").read_text().splitlines()
    kept = [row for row in rows if "no momentum" not in json.loads(row)["name"]]
    (recorded / "rows.jsonl").write_text("\n".join(kept) + "\n")
    monkeypatch.setattr(room.Grid, "machine", MACHINE)
    monkeypatch.setattr(room.Grid, "fill", lambda self, runs, show=None: None)
    wanted = r"ablation: there is no row of 'SF-NorMuon, no momentum, rate 0.069', seed 0, 200 steps; make it by: "
    with pytest.raises(UserError, match=wanted + "anytime paper ablation --scale nano --out"):
        paper(scale="nano", out=recorded, work=tmp_path / "work")


def test_the_cost_is_told_before_anything_is_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(room, "execute", never)
    monkeypatch.setattr(room.Grid, "_probe", lambda self, run: 1e5)
    monkeypatch.chdir(tmp_path)
    asked = []
    assert paper(["rates-adamw"], out=tmp_path / "out", work=tmp_path / "work", agree=asked.append) is None
    tokens = 3 * (50 + 100 + 200) * 4096
    first = "; ".join(f"AdamW to {horizon}×, rate 0.014, seed 0" for horizon in (1, 2, 4))
    assert asked == [f"nano: 9 runs, {tokens:,} tokens, about 43 s at 1 at once: {first}; and 6 more"]
    assert not (tmp_path / "out").exists()
    assert cli.main(["paper", "rates-adamw", "--out", str(tmp_path / "out")]) == 1  # no terminal
    assert "nobody is there to agree to it: say --yes" in capsys.readouterr().err


@pytest.mark.parametrize("gone", ["AdamW to 2×, rate 0.042 #0", "SF-NorMuon, no momentum"])
def test_a_run_that_is_missing_is_named_before_it_is_made(recorded, tmp_path, gone, monkeypatch):
    """A searched one may be the best, so that what follows from it is in doubt."""
    monkeypatch.setattr(room.Grid, "machine", MACHINE)
    monkeypatch.setattr(room.Grid, "_probe", lambda self, run: 1e5)
    path = recorded / "rows.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    kept = [line for line in lines if not json.loads(line)["key"].startswith(gone)]
    assert len(kept) == len(lines) - 1
    path.write_text("".join([*kept, "null\n"]))
    asked = []
    assert paper(scale="nano", out=recorded, work=tmp_path / "work", agree=asked.append) is None
    assert gone.partition(" #")[0] in asked[0]
    assert asked[0].startswith("nano: at most " if "#" in gone else "nano: 1 run, ")


@pytest.mark.parametrize("items", [["main"], []])
def test_the_papers_sizes_cost_what_was_measured(tmp_path, items):
    """Large shows what the paper has of it. Without data nobody is asked, but told."""
    with pytest.raises(UserError) as told:
        paper(items, scale="large", data=str(tmp_path / "none"), out=tmp_path, work=tmp_path, agree=never)
    steps = 2 * 120_000 + 30_000 + 60_000 + 120_000
    days = steps * 524_288 / 100_675 / 86400
    said = str(told.value)
    assert said.startswith(
        f"large: 5 runs, {steps * 524_288:,} tokens, about {days:.1f} days of one H200 at 1 at once: "
    )
    assert f". But there is no data at {tmp_path / 'none'}: make it with " in said


@pytest.mark.parametrize(("size", "fits"), [(None, True), (50257, True), (50240, False), (4096, False)])
def test_data_of_another_vocabulary_are_refused(size, fits):
    with nullcontext() if fits else pytest.raises(UserError, match=f"vocabulary is {size or 0:,}, .* 50,304.*gpt2"):
        check_data(SCALES["small"], replace(MACHINE, vocabulary=size))


def test_the_data_s_vocabulary_is_looked_at(tmp_path):
    (tmp_path / "text.txt").write_text("a word and another\n" * 200)
    prepare([str(tmp_path / "text.txt")], tmp_path / "data", "bytes", workers=1)
    with pytest.raises(UserError, match=r"small: .* But the data's vocabulary is 25\d, that of small is 50,304"):
        paper(["main"], scale="small", data=str(tmp_path / "data"), out=tmp_path, work=tmp_path, agree=never)


def test_both_rounds_are_run(tmp_path, found, monkeypatch):
    """The second with the best rates of the first."""
    made = []

    def execute(run, folder, machine):
        made.append(run)
        return found("nano").rows[run.key]

    monkeypatch.setattr(room, "execute", execute)
    monkeypatch.setattr(room.Grid, "machine", MACHINE)
    monkeypatch.setattr(room.Grid, "_probe", lambda self, run: 1e5)
    index = paper(["ablation"], out=tmp_path / "out", work=tmp_path / "work")
    first = searches([ITEMS["ablation"]], Recipes(SCALES["nano"]))
    assert sorted(run.key for run in made[:3]) == sorted(run.key for run in first)
    assert sorted(run.name for run in made[3:]) == [
        "SF-NorMuon, no momentum, rate 0.069",
        "SF-NorMuon, no row normalization, rate 0.069",
    ]
    assert index == tmp_path / "out" / "index.md"


def test_when_time_is_over_the_rest_is_left_for_the_same_command(tmp_path, found, monkeypatch, capsys):
    made = []

    def execute(run, folder, machine):
        made.append(run.key)
        return found("nano").rows[run.key]

    monkeypatch.setattr(room, "execute", execute)
    monkeypatch.setattr(room.Grid, "machine", MACHINE)
    monkeypatch.setattr(room.Grid, "_probe", lambda self, run: 1e5)
    asked = ["paper", "ablation", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"), "--yes"]
    assert cli.main([*asked, "--minutes", "1e-9"]) == 1
    assert "There is more to run: the same command goes on." in capsys.readouterr().out
    assert len(made) < 3
    assert cli.main(asked) == 0
    assert len(made) == len(set(made)) == 5


# ------------------------------------------------------------------- progress


def test_lines_where_there_is_no_terminal(tmp_path, found, capsys):
    import sys

    rows = [*found("nano").rows.values()][:2]
    said: list[str] = []
    run = Recipes(SCALES["nano"]).schedule_free("SF-NorMuon", 0.05)
    with showing(sys.stdout, said.append) as show:
        show(room.State(rows[:1], {str(tmp_path): run}, 3, 10.0))
        show(room.State(rows, {}, 0, 20.0))
    assert said[0] == line(rows[0])
    assert said[1] == "  1 done, 1 running, 3 waiting, about 40 s left"
    assert line(rows[1]) in said
    assert line({**rows[0], "failed": "the loss is nan at step 3"}).endswith("the loss is nan at step 3, 10 s")


def test_how_far_a_run_is(tmp_path):
    assert last_row(tmp_path) == {}
    text = '{"kind": "step", "step": 7, "loss": 2.5}\n{"kind": "speed", "step": 100}\n{"half'
    (tmp_path / "metrics.jsonl").write_text(text)
    assert last_row(tmp_path) == {"step": 100, "loss": 2.5}
    run = Recipes(SCALES["nano"]).schedule_free("SF-NorMuon", 0.05)
    state = room.State([{}], {"a": run}, 2, 30.0)
    assert left(state, {"a": (run, {"step": 100})}, 2) == pytest.approx(2.5 * 30 / 1.5)
    assert left(room.State([], {}, 2, 1.0), {}, 2) is None


def test_the_table_of_a_terminal(tmp_path, found):
    from rich.console import Console

    (tmp_path / "metrics.jsonl").write_text('{"kind": "step", "step": 120, "loss": 2.5}\n')
    run = Recipes(SCALES["nano"]).schedule_free("SF-NorMuon", 0.05)
    console = Console(width=100, record=True, quiet=True)
    with console.capture() as seen:
        console.quiet = False
        console.print(table(room.State([{}], {str(tmp_path): run}, 3, 60.0)))
    text = seen.get()
    assert "1 done, 1 running, 3 waiting; 60 s, about" in text
    assert all(word in text for word in ("SF-NorMuon, rate 0.05", "120", "200", "2.500"))


@pytest.mark.parametrize(("answer", "status"), [("y", True), ("", False), ("no", False)])
def test_a_person_is_asked(monkeypatch, answer, status):
    import builtins
    import io

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr(builtins, "input", lambda text: answer)
    assert agreed("about 3 days", False) is status
    assert agreed("about 3 days", True)


@pytest.mark.slow
def test_the_whole_of_nano(tmp_path, monkeypatch, capsys):
    """All runs fresh, two at once, and every file of every item."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["paper", "--scale", "nano", "--jobs", "2", "--device", "cpu", "--yes"]) == 0
    out = tmp_path / "results/paper/nano"
    for name, item in ITEMS.items():
        for kind in ("md", "tex") if item.table else ("svg", "pdf"):
            assert (out / f"{name}.{kind}").stat().st_size > 100
    rows = [json.loads(text) for text in (out / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == len({row["key"] for row in rows}) == 32
    assert all(row["losses"] for row in rows if "failed" not in row)
    capsys.readouterr()
    monkeypatch.setattr(room.Grid, "fill", never)
    assert cli.main(["paper", "--scale", "nano"]) == 0  # drawn again from the rows
