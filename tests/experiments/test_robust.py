"""The robustness suite: what it declares, its page on made-up rows, images, wrong use, and real runs of all tasks."""

from __future__ import annotations

import copy
import dataclasses
import json
import math

import pytest
import torch

from anytime.experiments import robust as module
from anytime.experiments.anytime import STUDIES
from anytime.experiments.grid import Grid
from anytime.experiments.reading import TEXT, WORDS, Read, check, write_words
from anytime.experiments.robust import (
    HORIZONS,
    OCTAVES,
    PAPERS,
    SCALES,
    TASKS,
    Scale,
    Suite,
    frozen_recipe,
    papers,
    recipe,
    redraw,
    robust,
    scheduled,
)  # fmt: skip
from anytime.experiments.run import Machine
from anytime.experiments.search import Try
from anytime.experiments.vision import KINDS, NETS, Images, images
from anytime.train.build import settled
from anytime.train.data import PYTHON, write_python
from anytime.train.errors import UserError
from anytime.train.shards import Tokens

POINT = Try.of({"momentum": 0.9, "averaging_power": 3.0}, 1)
NANO = SCALES["nano"]


def freeze(path, study="nano", **entries):
    """What a study would have written."""
    study = STUDIES[study]
    points = {f"{h:g}": [[dict(POINT.setting), POINT.octave]] for h in study.horizons}
    path.write_text(json.dumps(entries or {"anytime": {"tried": 15, "rate": study.rate, "points": points}}))
    return path


# ---------------------------------------------------------------- declarations


@pytest.mark.parametrize("scale", SCALES)
def test_all_runs_can_be_trained_and_none_is_another(scale):
    found = Suite(SCALES[scale].tasks(POINT, TEXT), POINT, {})
    keys = []
    for name in TASKS:
        if name not in ("rates", "fine-tune"):  # which begin with runs of code
            for run in found.runs(name):
                keys.append(run.key)
                warmup = settled(run.config).optimizer.warmup_steps
                if run.config.optimizer.recipe is None:
                    assert run.steps > warmup == found.tasks[name].warmup
                else:
                    assert run.steps > warmup == 10  # the recipe's own
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("name", ["code", "bytes", "small-batch", "large-batch", "vit", "conv"])
def test_a_task_is_one_run_against_a_schedule_for_each_horizon_and_rate(name):
    task = NANO.tasks(POINT, WORDS)[name]
    steps = [task.steps(h) for h in task.horizons]
    assert steps == pytest.approx([part * steps[-1] for part in HORIZONS], abs=1)
    runs = Suite({name: task}, POINT, {}).runs(name)
    assert len(runs) == len(task.seeds) * (2 + len(HORIZONS) * len(OCTAVES))
    ours = recipe(task, POINT, 0)
    looks = ours.settings["looks"] if isinstance(task, Images) else ours.config.eval_at
    assert list(looks) == steps
    assert ours.config.optimizer.lr == STUDIES["nano"].lr(1)
    assert ours.config.optimizer.averaging_power == 3.0
    at = [scheduled(task, o, task.horizons[0], 0).config.optimizer for o in OCTAVES]
    assert [o.lr / task.rate for o in at] == pytest.approx([0.25, 0.5, 1, 2, 4])
    assert {(o.name, o.schedule, o.momentum, o.horizon) for o in at} == {("NorMuon", "linear", 0.9, steps[0])}
    assert papers(task, 0).config.optimizer.betas == (0.9, 0.95)
    assert papers(task, 0).config.optimizer.averaging_power is None  # nor anything else of a preset's


@pytest.mark.parametrize("scale", SCALES)
def test_other_batches_keep_the_tokens_of_the_run_and_the_schedules_of_its_warmup(scale):
    """The recipe stays as it is."""
    tasks = [SCALES[scale].tasks(POINT, WORDS)[n] for n in ("code", "small-batch", "large-batch")]
    code, *others = (scheduled(task, 0, task.horizons[-1], 0) for task in tasks)
    assert [run.config.batch_size / code.config.batch_size for run in others] == [1 / 4, 4]
    for run in others:
        assert run.tokens == pytest.approx(code.tokens, rel=0.02)
        assert run.config.optimizer.warmup_steps * run.config.batch_size == pytest.approx(
            code.config.optimizer.warmup_steps * code.config.batch_size, rel=0.02
        )
    ours = [recipe(task, POINT, 0) for task in tasks]
    assert [run.config.batch_size for run in ours] == [run.config.batch_size for run in (code, *others)]
    assert len({run.config.optimizer for run in ours}) == 1


def test_a_shift_and_a_fine_tuning_begin_with_code():
    tasks = NANO.tasks(POINT, TEXT)
    shift, tuned = recipe(tasks["shift"], POINT, 1), recipe(tasks["fine-tune"], POINT, 1)
    assert isinstance(shift, Read)
    assert isinstance(tuned, Read)
    assert shift.reads == {PYTHON: shift.tokens // 2, TEXT: shift.tokens // 2}
    assert shift.config.eval_at == (shift.steps * 3 // 4, shift.steps)
    assert tuned.reads == {TEXT: tuned.tokens}
    code = recipe(tasks["code"], POINT, 1)
    assert tuned.base is not None
    assert tuned.base.key == code.key
    suite = Suite(tasks, POINT, {})
    assert {run.key for run in suite.runs("fine-tune")} == {recipe(tasks["code"], POINT, s).key for s in NANO.seeds}
    one = Suite(tasks, POINT, {code.key: {}}).runs("fine-tune")
    assert sum(run.name.startswith("fine-tune") for run in one) == 17
    again = recipe(tasks["shift"], POINT, 1, average="restart")
    assert again.key != shift.key
    assert again.folder(module.Path()) != shift.folder(module.Path())
    moved = dataclasses.replace(shift, at=3)
    assert moved.key != shift.key


# --------------------------------------------------------------- made-up losses


def made_up(run):
    """Falls with the steps; the recipe 0.01 above a schedule whose best rate is twice the study's."""
    options = run.settings["optimizer"]
    rate = math.log2(options["lr"] / NANO.study.rate)
    if options["name"] == "NorMuon":
        worse = 0.1 * abs(rate - 1)
    elif "averaging_power" in options:
        worse = 0.01 + 0.02 * abs(rate - 0.5) + 0.005 * run.name.endswith("restarted")
    else:
        worse = 0.2
    looks = run.settings.get("looks") or run.config.eval_at
    return {"key": run.key, "losses": {str(s): 2 + 1 / s + worse + run.seed / 10 for s in looks}}


@pytest.fixture(scope="module")
def whole():
    rows = {}
    found = Suite(NANO.tasks(POINT, WORDS), POINT, rows)
    while missing := [run for name in TASKS for run in found.runs(name) if run.key not in rows]:
        rows |= {run.key: made_up(run) for run in missing}
    return found


@pytest.fixture
def suite(whole):
    return Suite(whole.tasks, POINT, copy.deepcopy(whole.rows))


def lines(page, title):
    part = page.split(f"## {title}\n")[1].split("\n## ")[0]
    return [[c.strip() for c in line.strip("| ").split("|")] for line in part.splitlines() if line.startswith("|")][2:]


def test_the_page(suite, tmp_path):
    page = redraw(suite, TASKS, tmp_path).read_text("utf-8")
    body = lines(page, "Regret")
    names = ["code", "bytes", "small batch", "large batch", "fine-tune to words", "shift to words", "vit", "conv"]
    assert list(dict.fromkeys(line[0] for line in body)) == names
    assert len(body) == 7 * 3 + 2
    for line in body:
        steps = int(line[1])
        loss, schedule, published = (float(cell.split(" ± ")[0]) for cell in line[2:5])
        assert loss == pytest.approx(2.06 + 1 / steps, abs=2e-4)
        assert schedule == pytest.approx(2.05 + 1 / steps, abs=2e-4)
        assert published == pytest.approx(2.25 + 1 / steps, abs=2e-4)
        assert line[5:] == [f"{2 * NANO.study.rate:g}", "+0.0100", "+0.0100, +0.0100"]
    assert "rate 0.0707" in page
    ours, schedule = lines(page, "Rates")
    assert ours[0] == "anytime"
    assert schedule[:2] == ["NorMuon", f"{2 * NANO.study.rate:g}"]
    least = 2.05 + 1 / 140
    assert [float(c.split(" ± ")[0]) for c in ours[2:7]] == pytest.approx(
        [least + 0.01 + 0.02 * d for d in (2, 1, 0, 1, 2)], abs=2e-3
    )
    assert [float(c.split(" ± ")[0]) for c in schedule[2:7]] == pytest.approx(
        [least + 0.1 * d for d in (2, 1, 0, 1, 2)], abs=2e-4
    )
    assert ours[7] == "2.0"
    kept, anew, _, _ = lines(page, "Shift to words")
    assert float(anew[1].split(" ± ")[0]) - float(kept[1].split(" ± ")[0]) == pytest.approx(0.005, abs=2e-4)


def test_a_page_of_some_tasks(suite, tmp_path):
    page = redraw(suite, ["rates"], tmp_path).read_text("utf-8")
    assert "## Rates" in page
    assert "## Regret" not in page
    assert "Shift" not in redraw(suite, ["conv"], tmp_path).read_text("utf-8")


def test_the_best_is_of_the_same_seed_and_horizon(suite):
    task = suite.tasks["code"]
    low = scheduled(task, -4, task.horizons[1], 1)
    suite.rows[low.key]["losses"] = {str(low.steps): 1.0}
    assert suite.best(task, task.horizons[1], 1) == (1.0, -4)
    assert suite.best(task, task.horizons[1], 0)[1] == 2
    assert suite.best(task, task.horizons[0], 1)[1] == 2


def test_what_diverged_is_never_the_best_and_is_said(suite, tmp_path):
    task = suite.tasks["conv"]
    for seed in task.seeds:
        for octave in (2, 4):
            suite.rows[scheduled(task, octave, task.horizons[0], seed).key] |= {"losses": {}, "failed": "the loss"}
        suite.rows[recipe(task, POINT, seed).key] |= {"losses": {}, "failed": "the loss"}
    first = lines(redraw(suite, ["conv"], tmp_path).read_text("utf-8"), "Regret")[0]
    assert first[5] == f"{NANO.study.rate:g}"
    assert first[2] == first[6] == "diverged"


def test_a_missing_row_is_named(suite, tmp_path):
    gone = papers(suite.tasks["vit"], 1)
    rows = {key: row for key, row in suite.rows.items() if key != gone.key}
    with pytest.raises(
        UserError, match=rf"no row of \"vit: {PAPERS}, .*, seed 1, 160 steps; make it by: anytime robust"
    ):
        redraw(Suite(suite.tasks, POINT, rows), TASKS, tmp_path)


# ------------------------------------------------------------------------ images


def test_images_come_from_their_seed():
    pixels, kinds = images(5000, 16, 1)
    again, same = images(5000, 16, 1)
    assert torch.equal(pixels, again)
    assert torch.equal(kinds, same)
    assert pixels.shape == (5000, 1, 16, 16)
    assert pixels.isfinite().all()
    assert kinds.bincount().min() > 400
    assert len(kinds.bincount()) == KINDS
    assert not torch.equal(images(100, 16, 2)[0], pixels[:100])


def test_kinds_can_be_told_apart():
    """A small net, some steps of plain Adam: better than chance, on images not seen; not by a look at their mean."""
    torch.manual_seed(0)
    pixels, kinds = images(1024, 16, 1, noise=0.0)
    model = NETS["conv"](16, 16)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for i in range(60):
        batch = torch.arange(64) + 64 * i % 1024
        torch.nn.functional.cross_entropy(model(pixels[batch]), kinds[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
    seen, right = images(512, 16, 2, noise=0.0)
    assert torch.nn.functional.cross_entropy(model(seen), right) < math.log(KINDS) - 0.1


@pytest.mark.parametrize("net", NETS)
def test_a_run_on_images(net, tmp_path):
    """The same twice; at a horizon of its own the schedule ends; the row has what others have."""
    common = NANO._common() | {"warmup": 2}
    task = Images(net, **common, net=net, size=8, width=8, count=128, batch=16, whole=16)
    machine = Machine("", 0, "", "cpu", 1, 1)
    row = recipe(task, POINT, 0).execute(tmp_path, machine)
    assert list(row["losses"]) == ["4", "8", "16"]
    assert row["losses"] == recipe(task, POINT, 0).execute(tmp_path, machine)["losses"]
    assert row["losses"] != recipe(task, POINT, 1).execute(tmp_path, machine)["losses"]
    assert row["tokens"] == 16 * 16 * 4
    assert list(scheduled(task, 0, 0.5, 0).execute(tmp_path, machine)["losses"]) == ["8"]
    broken = dataclasses.replace(task, rate=1e30)
    assert "failed" in scheduled(broken, 0, 1, 0).execute(tmp_path, machine)


# --------------------------------------------------------------------- wrong use


def test_wrong_names(tmp_path):
    with pytest.raises(UserError, match="there is no task 'fine-tun'; did you mean 'fine-tune'"):
        robust(["fine-tun"])
    with pytest.raises(UserError, match="there is no scale 'nan'; did you mean 'nano'"):
        robust(scale="nan")


def test_the_recipe_must_be_frozen(tmp_path):
    with pytest.raises(UserError, match=r"frozen\.json holds no recipe: `anytime frontier 2M` finds it"):
        robust(frozen=tmp_path / "frozen.json", out=tmp_path)
    other = freeze(tmp_path / "frozen.json", NorMuon={"tried": 1, "rate": 0.05, "points": {}})
    with pytest.raises(UserError, match="`anytime frontier nano` finds it"):
        frozen_recipe(other, STUDIES["nano"])
    assert frozen_recipe(freeze(tmp_path / "frozen.json"), STUDIES["nano"]) == POINT
    with pytest.raises(UserError, match=r"was chosen at rates of 0\.05"):
        frozen_recipe(tmp_path / "frozen.json", STUDIES["2M"])


def test_bytes_needs_a_text(tmp_path):
    said = []
    where = {"scale": "nano", "frozen": freeze(tmp_path / "frozen.json"), "out": tmp_path, "work": tmp_path / "work"}
    assert robust(["bytes"], **where, say=said.append) is None
    assert said == ["bytes is left out: it needs a text, by --text FILE"]
    short = tmp_path / "short.txt"
    short.write_text("a few words. " * 100)
    with pytest.raises(UserError, match=r"'bytes: anytime, .* takes 71,680 bytes of text, more than 4 times the 1,236"):
        robust(["bytes"], **where, text=str(short))


def test_rows_of_another_text_are_refused(tmp_path):
    write_python(tmp_path / PYTHON)
    write_words(tmp_path / PYTHON, tmp_path / WORDS)
    texts = {name: Tokens.open(str(tmp_path / name), "train") for name in (PYTHON, WORDS)}
    assert 20 * len(texts[WORDS]) > len(texts[PYTHON]) > 3 * len(texts[WORDS])
    run = recipe(NANO.tasks(POINT, WORDS)["shift"], POINT, 0)
    row = {"key": "a", "texts": {name: tokens.fingerprint() for name, tokens in texts.items()}}
    for change, wrong in (({}, None), ({WORDS: "other"}, WORDS)):
        (tmp_path / "rows.jsonl").write_text(json.dumps(row | {"texts": row["texts"] | change}) + "\n")
        grid = Grid(tmp_path / "rows.jsonl", tmp_path)
        if wrong is None:
            check([run], texts, grid)
        else:
            with pytest.raises(UserError, match="are of another words than this one"):
                check([run], texts, grid)


# --------------------------------------------------------------------- real runs


@pytest.mark.slow
def test_a_small_suite_from_its_first_run_to_its_page(tmp_path, monkeypatch):
    """All tasks, of a few steps each; when time runs out it stops, and goes on from its rows."""
    study = dataclasses.replace(STUDIES["nano"], warmup=8)
    tiny = Scale(
        study, study.settings, whole=0.2, seeds=(0,),
        images={"size": 8, "width": 8, "count": 128, "batch": 16, "whole": 40},
    )  # fmt: skip
    monkeypatch.setitem(SCALES, "tiny", tiny)
    monkeypatch.setattr(module, "OCTAVES", (-2, 0))
    monkeypatch.setattr("anytime.experiments.vision.HELD_OUT", 256)
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)  # threads that wait for each other on a busy machine
    text = tmp_path / "text.txt"
    text.write_text("one two three four five six. " * 500)
    where = {"scale": "tiny", "frozen": freeze(tmp_path / "frozen.json"), "out": tmp_path / "out"}
    where |= {"work": tmp_path / "work", "text": str(text)}
    assert robust(**where, seconds=1e-3) is None
    page = robust(**where).read_text("utf-8")
    rows = (tmp_path / "out" / "rows.jsonl").read_bytes()
    assert {line[0] for line in lines(page, "Regret")} == {
        "code", "bytes", "small batch", "large batch", "fine-tune to text", "shift to text", "vit", "conv",
    }  # fmt: skip
    assert "diverged" not in page
    found = {row["name"]: row for row in map(json.loads, rows.splitlines())}
    shifted = [row for name, row in found.items() if name.startswith("shift to text: anytime")]
    assert [list(row["losses"]) for row in shifted] == [["43", "56"]] * 2
    assert shifted[0]["losses"] != shifted[1]["losses"]
    assert set(shifted[0]["texts"]) == {PYTHON, TEXT}
    tuned = next(row for name, row in found.items() if name.startswith("fine-tune to text: anytime"))
    fresh = next(row for name, row in found.items() if name.startswith("bytes: anytime"))
    assert tuned["losses"]["14"] < fresh["losses"]["14"]  # it had learnt something before
    costs = []
    del where["text"]  # once it is in the rows, the page needs it no more
    assert robust(**where, agree=costs.append) is not None
    assert costs == []
    assert (tmp_path / "out" / "rows.jsonl").read_bytes() == rows
