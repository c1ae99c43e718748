"""Reading runs, thinning them, and the page as a browser shows it."""

from __future__ import annotations

import json
import math
import random
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anytime.train import report
from anytime.train.errors import UserError
from anytime.train.report import read_run, write_report

# --- runs as training would have left them ---

BATCH = 32_768
CONFIG = """\
name = "{name}"
seed = 1
betas = [0.9, 0.95]

[model]
width = 768
layers = 12

[optimizer]
name = "{optimizer}"
lr = {lr}
"""


def write_rows(folder: Path, rows: list[dict], end: str = "\n") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + end, encoding="utf-8")
    return folder


def make_run(
    folder: Path,
    steps: int = 600,
    *,
    start: int = 0,
    lr: float = 0.01,
    averaged: bool = True,
    every: int = 20,
    stop: str | None = "until {steps} steps",
    lost: range = range(0),
    mfu: bool = True,
    samples: bool = True,
) -> Path:
    """A plausible run: a power law with noise, slower where the rate is far from the best."""
    rng = random.Random(folder.name)
    floor = 2.9 + 0.15 * abs(math.log(lr / 0.01)) + (0 if averaged else 0.04)
    about = {"version": "0.1.0", "commit": "0123456789abcdef", "device": "NVIDIA H200", "parameters": 123_568_128}
    rows: list[dict] = [
        {"kind": "start", "step": start, "seconds": start * 0.061, "time": "2026-11-15T10:00:00Z", **about}
    ]
    texts = []
    for step in range(start + 1, steps + 1):
        here = {"step": step, "tokens": step * BATCH}
        clock = {"seconds": round(step * 0.061, 3)}
        mean = floor + 8.1 * (1 + step / 12) ** -0.62
        rate = lr * min(1, step / 60) * (1 if averaged else 0.5 + 0.5 * math.cos(math.pi * step / steps))
        loss = None if step in lost else mean + 0.09 + rng.gauss(0, 0.06)
        norm = None if step in lost else 0.3 + 4 / (1 + step / 20) + abs(rng.gauss(0, 0.05))
        rows.append({"kind": "step", **here, "loss": loss, "lr": rate, "grad_norm": norm})
        if step % every == 0:
            speed = {"tokens_per_second": 537_000 + rng.gauss(0, 4000), "data_wait": 0.001}
            rows.append(
                {"kind": "speed", **here, **clock, **speed, **({"mfu": 0.41 + rng.gauss(0, 0.004)} if mfu else {})}
            )
            if averaged:
                average = {
                    "c": 1 / (1 + step / 8),
                    "beta": 1 - 0.4 / (1 + step / 90) ** 0.5,
                    "distance": 24 * (1 - math.exp(-step / 150)) + rng.gauss(0, 0.2),
                    "rho": 0.03 + 0.2 / (1 + step / 30) + rng.gauss(0, 0.002),
                    "alpha": -0.02 + rng.gauss(0, 0.004),
                    "update_rms": 0.2 + rng.gauss(0, 0.001),
                }
                rows.append({"kind": "average", **here, **average})
        if step % (every * 5) == 0:
            value = None if step in lost else mean
            scores = {"loss": value, "perplexity": value and math.exp(value), "bits_per_byte": value and value / 3.02}
            rows.append({"kind": "eval", **here, **clock, **scores, "sequence": "x"})
            rows.append({"kind": "checkpoint", **here, **clock, "save_seconds": 0.8})
        if samples and step % max(steps // 3, 1) == 0:
            for prompt in ("The king", "In 1905"):
                texts.append(
                    {"step": step, "prompt": prompt, "text": f"{prompt} of step {step} <b>went</b>\n  on, " * 6}
                )
    if stop:
        rows.append({"kind": "stop", **here, **clock, "reason": stop.format(steps=steps)})
    write_rows(folder, rows)
    optimizer = "sf-normuon" if averaged else "normuon"
    config = CONFIG.format(name=folder.name.replace('"', ""), optimizer=optimizer, lr=lr)
    (folder / "config.toml").write_text(config, encoding="utf-8")
    if texts:
        (folder / "samples.jsonl").write_text("".join(json.dumps(t) + "\n" for t in texts), encoding="utf-8")
    return folder


def make_several(root: Path, steps: int = 600) -> list[Path]:
    """One plain, one branched off it, one scheduled, one with losses that were not finite, one just begun."""
    first = make_run(root / "sf-normuon", steps)
    branched = make_run(root / "sf-normuon-branch", steps, start=steps // 2, lr=0.007)
    (branched / "branch.json").write_text(json.dumps({"from": str(first), "step": steps // 2}), encoding="utf-8")
    scheduled = make_run(root / "normuon-cosine", steps, averaged=False, mfu=False, samples=False)
    bad = make_run(root / "too-fast", steps, lr=0.08, lost=range(steps * 3 // 5, steps + 1), stop=None)
    tiny = write_rows(
        root / "tiny",
        [
            {"kind": "start", "step": 0, "seconds": 0.0, "parameters": 1000, "device": "cpu", "version": "0.1.0"},
            {"kind": "step", "step": 1, "tokens": BATCH, "loss": 10.9, "lr": 0.0001},
        ],
    )
    return [first, branched, scheduled, bad, tiny]


def row(kind: str, step: int, **more) -> dict:
    return {"kind": kind, "step": step, **more}


def page_data(page: Path) -> dict:
    text = page.read_text(encoding="utf-8")
    return json.loads(text.split('<script type="application/json" id="data">')[1].split("</script>")[0])


# --- reading ---


def test_a_whole_run_is_read(tmp_path):
    run = read_run(make_several(tmp_path)[1])
    assert run.stopped() == "until 600 steps"
    assert [len(run.of(kind)) for kind in ("start", "step", "speed", "average", "eval", "stop")] == [
        1,
        300,
        15,
        15,
        3,
        1,
    ]
    assert run.config["optimizer"] == {"name": "sf-normuon", "lr": 0.007}
    assert run.branch == {"from": str(tmp_path / "sf-normuon"), "step": 300}
    assert {s["step"] for s in run.samples} == {400, 600}
    assert run.unreadable == 0


@pytest.mark.parametrize("torn", ['{"kind":"st', '{"kind":"step","step":', "[1, 2", "nul", "\ufffd"])
def test_a_torn_last_line_is_passed_over(tmp_path, torn):
    run = read_run(write_rows(tmp_path / "run", [row("start", 0), row("step", 1, loss=3.0)], end="\n" + torn))
    assert [r["kind"] for r in run.rows] == ["start", "step"]
    assert run.unreadable == 0
    assert run.stopped() is None
    assert (run.config, run.samples, run.branch) == ({}, (), None)


def test_lines_torn_in_the_middle_are_counted(tmp_path):
    folder = write_rows(tmp_path / "run", [row("start", 0), row("step", 1)])
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(text + '{"kind":"step","st' + json.dumps(row("start", 1)) + "\n" + text)
    run = read_run(folder)
    assert run.unreadable == 1
    assert [r["step"] for r in run.rows] == [0, 0, 1]


def test_rows_that_are_no_rows_are_passed_over(tmp_path):
    bad = [{"step": 3}, row("step", -1), row("step", True), row("step", 1.5), {"kind": "step"}, {"kind": 3, "step": 3}]
    assert len(read_run(write_rows(tmp_path / "run", [row("start", 0), *bad])).rows) == 1


def test_a_resume_takes_back_what_came_after_its_checkpoint(tmp_path):
    rows = [row("start", 0), *(row("step", n, loss=1.0) for n in range(1, 6)), row("stop", 5, reason="killed")]
    rows += [row("start", 3), *(row("step", n, loss=2.0) for n in range(4, 8))]
    run = read_run(write_rows(tmp_path / "run", rows))
    assert [(r["step"], r["loss"]) for r in run.of("step")] == [
        *((n, 1.0) for n in (1, 2, 3)),
        *((n, 2.0) for n in (4, 5, 6, 7)),
    ]
    assert run.of("stop") == []
    assert run.stopped() is None


def test_evaluations_are_those_at_x_once_a_step(tmp_path):
    rows = [row("eval", 1, loss=9.0, sequence="y"), row("eval", 1, loss=3.0, sequence="x"), row("eval", 1, loss=2.0)]
    assert [r["loss"] for r in read_run(write_rows(tmp_path / "a", rows)).evaluations()] == [2.0]
    assert [r["loss"] for r in read_run(write_rows(tmp_path / "b", rows[:1])).evaluations()] == [9.0]


@pytest.mark.parametrize("content", [None, "", "\n", '{"kind":"st'])
def test_a_folder_without_metrics_is_the_users_to_mend(tmp_path, content):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(UserError, match=r"metrics") as caught:
        read_run(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_broken_settings_are_the_users_to_mend(tmp_path):
    folder = make_run(tmp_path / "run", 20)
    (folder / "config.toml").write_text("a = \n[")
    with pytest.raises(UserError, match=r"config\.toml is not TOML") as caught:
        read_run(folder)
    assert "\n" not in str(caught.value)


def test_a_branch_file_being_written_is_none(tmp_path):
    folder = make_run(tmp_path / "run", 20)
    (folder / "branch.json").write_text('{"from')
    assert read_run(folder).branch is None


def test_names_tell_folders_apart(tmp_path):
    folders = [tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "other"]
    assert report._names(folders) == ["a/run", "b/run", "other"]
    assert report._names([tmp_path / "other", tmp_path / "other"]) == ["other", "other"]


# --- columns ---


@given(st.integers(1, 3000), st.integers(2, 200))
def test_buckets_cover_all_rows_in_order(count, limit):
    begins = report._buckets(count, limit).tolist()
    assert begins[0] == 0
    assert all(a < b for a, b in zip(begins, [*begins[1:], count], strict=True))
    assert len(begins) <= limit
    assert count > limit or begins == list(range(count))


@given(st.lists(st.integers(), max_size=60), st.integers(1, 40))
def test_thinning_keeps_order_and_both_ends(items, limit):
    kept = report._thinned(list(enumerate(items)), limit)
    assert len(kept) == min(len(items), limit)
    assert kept == sorted(set(kept))
    if items:
        assert kept[-1] == (len(items) - 1, items[-1])
    if len(items) > 1 and limit > 1:
        assert kept[0] == (0, items[0])


def test_a_curve_is_made_of_means_over_finite_numbers(tmp_path):
    rows = [row("step", n, tokens=10 * n, loss=float(n) if n % 2 else None) for n in range(1, 1001)]
    run = read_run(write_rows(tmp_path / "run", rows))
    curve = report._curve(run.of("step"), ("loss", "lr"), run, 40)
    assert set(curve) == {"step", "tokens", "loss"}  # no seconds anywhere, no rate
    assert len(curve["loss"]) <= 40
    assert curve["step"][:2] == [1.0, 2.0]  # the first steps stand alone
    assert curve["loss"][:2] == [1.0, None]
    assert curve["tokens"] == pytest.approx([10 * step for step in curve["step"]])
    for step, loss in list(zip(curve["step"], curve["loss"], strict=True))[10:]:
        assert loss == pytest.approx(step, abs=1)


def test_seconds_are_found_between_and_beyond_the_rows_that_have_them(tmp_path):
    rows = [row("start", 0, seconds=0.0), *(row("step", n) for n in range(1, 9))]
    rows += [row("speed", 2, seconds=10.0), row("speed", 6, seconds=60.0)]
    run = read_run(write_rows(tmp_path / "run", rows))
    found = report._fill(run.of("step"), "seconds", run.rows).tolist()
    assert found == pytest.approx([5, 10, 22.5, 35, 47.5, 60, 70, 80])


def test_samples_fit_into_what_they_may_take(tmp_path):
    folder = make_run(tmp_path / "run", 20, samples=False)
    texts = [{"step": n, "prompt": "p" * 10, "text": "t" * 90} for n in range(100) for _ in range(2)]
    (folder / "samples.jsonl").write_text("\n".join(map(json.dumps, texts)))
    run = read_run(folder)
    assert len(report._samples(run, 10**6)) == 200
    some = report._samples(run, 5000)
    assert some[-1]["step"] == 99
    assert 10 <= len(some) <= 50
    assert [(s["step"], len(s["text"])) for s in report._samples(run, 50)] == [(99, 50), (99, 50)]


def test_settings_are_flat_words(tmp_path):
    folder = make_run(tmp_path / "run", 20)
    (folder / "config.toml").write_text('e = "x y"\n[a]\nd = true\nb.c = [1, 2.5]\nt = 2026-11-15\n')
    assert report._data(read_run(folder), "run", 1)["settings"] == {
        "e": "x y",
        "a.d": "true",
        "a.b.c": "[1, 2.5]",
        "a.t": '"2026-11-15"',
    }


# --- the page as a file ---


def test_the_page_holds_the_runs(tmp_path):
    out = write_report(make_several(tmp_path), tmp_path / "new" / "report.html")
    assert out == tmp_path / "new" / "report.html"
    runs = {run["name"]: run for run in page_data(out)["runs"]}
    first, scheduled, bad, tiny = (runs[name] for name in ("sf-normuon", "normuon-cosine", "too-fast", "tiny"))
    assert first["headline"]["step"] == 600
    assert first["headline"]["tokens"] == 600 * BATCH
    assert first["headline"]["loss"] == first["eval"]["loss"][-1]
    assert first["eval"]["step"] == [100, 200, 300, 400, 500, 600]
    assert runs["sf-normuon-branch"]["headline"]["branch"] == {"from": str(tmp_path / "sf-normuon"), "step": "300"}
    assert scheduled["average"] == {}
    assert "mfu" not in scheduled["speed"]
    assert bad["headline"]["loss"] is None
    assert bad["headline"]["evaluated"]
    assert bad["headline"]["not_finite"] == 241
    assert bad["eval"]["loss"].count(None) == 3
    assert bad["headline"]["stopped"] is None
    assert tiny["headline"]["train_loss"] == 10.9
    assert not tiny["headline"]["evaluated"]


def test_what_a_run_says_cannot_leave_its_place(tmp_path):
    folder = make_run(tmp_path / "<script>alert(1)<!--", 20)
    text = {"step": 20, "prompt": "</script><script>alert(2)</script>", "text": "\ud800 {{plotly}} \u2028"}
    (folder / "samples.jsonl").write_text(json.dumps(text))
    page = write_report([folder], tmp_path / "report.html")
    content = page.read_text(encoding="utf-8")
    assert "alert(1)" in content
    assert "<script>alert" not in content
    assert page_data(page)["runs"][0]["samples"] == [text]


def test_the_page_asks_for_nothing_from_elsewhere(tmp_path):
    content = write_report([make_run(tmp_path / "run", 20)], tmp_path / "report.html").read_text(encoding="utf-8")
    own = content.split('id="plotly">')[0]
    assert not any(word in own for word in ("src=", "href=", "@import", "url("))
    assert "default-src 'none'" in own


def test_an_old_page_stays_if_the_new_one_cannot_be_written(tmp_path, monkeypatch):
    out = tmp_path / "report.html"
    out.write_text("old")
    folder = make_run(tmp_path / "run", 20)

    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(UserError, match="No space left on device"):
        write_report([folder], out)
    assert out.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "run"]


def test_what_cannot_be_a_page(tmp_path):
    folder = make_run(tmp_path / "run", 20)
    with pytest.raises(UserError, match="is a folder"):
        write_report([folder], tmp_path)
    with pytest.raises(UserError, match="no runs given"):
        write_report([], tmp_path / "report.html")
    with pytest.raises(UserError, match="cannot write"):
        write_report([folder], folder / "config.toml" / "report.html")


def test_without_plotly_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(UserError, match=r"anytime-optim\[train\]"):
        write_report([make_run(tmp_path / "run", 20)], tmp_path / "report.html")


def test_many_long_runs_stay_small(tmp_path):
    """Every curve is thinned as the number of runs asks for, however many rows there are."""
    run = read_run(make_run(tmp_path / "run", 12_000, every=2))
    alone, among = report._data(run, "run", 1), report._data(run, "run", 8)
    for data, most in ((alone, 2000), (among, 1000)):
        for place in ("train", "average", "speed", "eval"):
            assert all(len(column) <= most for column in data[place].values()), place
    assert alone["evaluations"] == 1200
    assert len(alone["eval"]["step"]) == 500
    assert len(json.dumps(alone)) < 1_000_000
    assert 8 * len(json.dumps(among)) < 3_000_000


# --- the page in a browser ---

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
ARGUMENTS += ["--disable-component-update", "--disable-sync"]
TRACES = "id => document.getElementById(`plot-${id}`).data.map(t => ({name: t.name, mode: t.mode, x: [...t.x]}))"
FONT = "() => document.getElementById('plot-loss').layout.font.color"
INK = "() => getComputedStyle(document.querySelector('#plot-loss .xtick text')).fill"
BACKGROUND = "() => getComputedStyle(document.body).backgroundColor"


def first_run(page, plot: str) -> dict:
    """The curve of the first run, at X where there is another."""
    return next(trace for trace in page.evaluate(TRACES, plot) if trace["name"] == "sf-normuon")


@pytest.fixture(scope="module")
def browser():
    """A missing browser is a failure: these tests run only when asked for."""
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.fail("the browser tests need chromium or google-chrome on the PATH")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    root = tmp_path_factory.mktemp("several")
    return write_report(make_several(root), root / "report.html")


@pytest.fixture
def open_page(browser):
    """Opens a page, waits until all is drawn, and at the end wants nothing said on the console, nothing fetched."""
    contexts, said = [], []

    def open_it(path: Path, width: int = 1280, **options):
        context = browser.new_context(viewport={"width": width, "height": 800}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda r: r.url.startswith(("file:", "data:", "blob:")) or said.append(r.url))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]")
        return page

    yield open_it
    for context in contexts:
        context.close()
    assert said == []


@pytest.mark.browser
def test_all_plots_are_drawn(open_page, several):
    page = open_page(several)
    drawn = page.eval_on_selector_all(".plot", "all => all.map(p => [p.id.slice(5), p.data.length])")
    assert dict(drawn) == {
        "loss": 9,  # loss at X of four runs, training loss of five
        **dict.fromkeys(["beta", "c", "rho", "alpha", "distance", "update_rms"], 3),
        "tokens_per_second": 4,
        "mfu": 3,
        "lr": 5,
        "grad_norm": 4,
    }
    for name, count in drawn:
        assert page.locator(f"#plot-{name} .scatterlayer .trace").count() == count
    assert page.locator(".card").count() == 5
    assert (
        page.locator(".card").nth(0).locator(".big strong").inner_text()
        == f"{page_data(several)['runs'][0]['headline']['loss']:.4f}"
    )
    assert page.locator(".card").nth(3).locator(".big strong").inner_text() == "NaN"
    assert "Running or killed" in page.locator(".card").nth(3).inner_text()
    assert "Stopped: until 600 steps" in page.locator(".card").nth(0).inner_text()
    assert page.locator("#evaluations tbody tr").count() == 6 + 3 + 6 + 6


@pytest.mark.browser
def test_plots_without_data_are_not_there(open_page, tmp_path):
    runs = make_several(tmp_path)
    page = open_page(write_report([runs[2]], tmp_path / "scheduled.html"))
    assert page.eval_on_selector_all(".plot", "all => all.map(p => p.id)") == [
        "plot-loss",
        "plot-tokens_per_second",
        "plot-lr",
        "plot-grad_norm",
    ]
    assert not page.locator("#average-section").is_visible()
    assert not page.locator("#samples-section").is_visible()
    assert page.locator("#legend button").count() == 0
    page = open_page(write_report([runs[4]], tmp_path / "tiny.html"))
    assert page.eval_on_selector_all(".plot", "all => all.map(p => p.id)") == ["plot-loss", "plot-lr"]
    assert not page.locator("#settings-section").is_visible()
    bare = write_rows(tmp_path / "bare", [row("start", 0, seconds=0.0)])
    page = open_page(write_report([bare], tmp_path / "bare.html"))
    assert page.locator(".plot:visible").count() == 0
    assert not page.locator("#bar").is_visible()


@pytest.mark.browser
def test_the_switches_change_what_is_drawn(open_page, several):
    page = open_page(several)
    shown = {}
    for axis in ("tokens", "time", "step"):
        page.check(f"#axis input[value={axis}]", force=True)
        shown[axis] = [first_run(page, plot)["x"] for plot in ("loss", "lr")]
    steps = [100, 200, 300, 400, 500, 600]
    assert shown["step"] == [steps, list(range(1, 601))]
    assert shown["tokens"] == [[n * BATCH for n in x] for x in shown["step"]]
    for time, step in zip(shown["time"], shown["step"], strict=True):  # in seconds: it is a short run
        assert time == pytest.approx([0.061 * n for n in step], abs=1e-3)
    assert page.locator("#plot-loss .xtitle").inner_html() == "step"

    page.check("#log-x")
    page.check("#log-y")
    layout = page.evaluate("() => document.getElementById('plot-loss')._fullLayout")
    assert (layout["xaxis"]["type"], layout["yaxis"]["type"]) == ("log", "log")
    page.uncheck("#training")
    assert [trace["mode"] for trace in page.evaluate(TRACES, "loss")] == ["lines+markers"] * 4
    page.get_by_role("button", name="too-fast").click()
    assert [trace["name"] for trace in page.evaluate(TRACES, "loss")] == [
        "sf-normuon",
        "sf-normuon-branch",
        "normuon-cosine",
    ]
    page.get_by_role("button", name="too-fast").click()
    assert len(page.evaluate(TRACES, "beta")) == 3


@pytest.mark.browser
def test_a_log_axis_leaves_out_what_it_has_no_place_for(open_page, tmp_path):
    """An evaluation before the first step is at zero tokens, and a cooldown may end at a c of zero."""
    rows = [row("start", 0, seconds=0.0), row("eval", 0, tokens=0, seconds=0.1, loss=5.5)]
    for n in (1, 2, 3):
        rows.append(row("eval", n, tokens=10 * n, seconds=float(n), loss=5.0 - n))
        rows.append(row("average", n, tokens=10 * n, c=0.3 - 0.1 * n if n < 3 else 0.0))
    page = open_page(write_report([write_rows(tmp_path / "run", rows)], tmp_path / "report.html"))
    values = "id => document.getElementById(`plot-${id}`).data.map(t => [[...t.x], [...t.y]])"
    assert page.evaluate(values, "loss") == [[[0, 10, 20, 30], [5.5, 4, 3, 2]]]
    assert page.evaluate(values, "c")[0][1] == [0.2, 0.1, None]
    page.check("#log-x")
    assert page.evaluate(values, "loss") == [[[None, 10, 20, 30], [5.5, 4, 3, 2]]]
    low, high = page.evaluate("() => document.getElementById('plot-loss').layout.xaxis.range")
    assert 0.9 < low < 1 < math.log10(30) < high < 1.6


@pytest.mark.browser
def test_the_theme_follows_the_system_until_one_is_chosen(open_page, several):
    page = open_page(several, color_scheme="light")
    look = lambda: tuple(page.evaluate(word) for word in (BACKGROUND, FONT, INK))  # noqa: E731
    light = look()
    page.emulate_media(color_scheme="dark")
    page.wait_for_function("() => document.documentElement.dataset.theme === 'dark'")
    dark = look()
    assert all(a != b for a, b in zip(light, dark, strict=True))
    page.check("#theme input[value=light]", force=True)
    assert look() == light
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert look() == light
    assert page.is_checked("#theme input[value=light]")
    page.check("#theme input[value=auto]", force=True)
    assert look() == dark
    assert open_page(several, color_scheme="dark").evaluate(BACKGROUND) == dark[0]


@pytest.mark.browser
def test_nothing_hangs_on_storage(open_page, several, browser):
    page = open_page(several)
    page.add_init_script("Object.defineProperty(window, 'localStorage', {get() { throw new Error('forbidden'); }})")
    page.reload()
    page.wait_for_selector("html[data-ready]")
    before = page.evaluate(BACKGROUND)
    page.check("#theme input[value=dark]", force=True)
    assert page.evaluate(BACKGROUND) != before


@pytest.mark.browser
@pytest.mark.parametrize("width", [360, 380, 768, 1280])
def test_the_page_never_scrolls_sideways(open_page, several, width):
    page = open_page(several, width)
    assert page.evaluate("() => document.documentElement.scrollWidth") == width
    sizes = page.eval_on_selector_all(
        ".chart .plot", "all => all.map(p => [p.clientWidth, p.querySelector('.main-svg').clientWidth])"
    )
    assert len({round(outer) for outer, _ in sizes}) == 1
    assert all(outer == inner for outer, inner in sizes)
    page.set_viewport_size({"width": 420, "height": 800})
    page.wait_for_function("() => document.querySelector('#plot-loss .main-svg').clientWidth < 420")
    assert page.evaluate("() => document.documentElement.scrollWidth") == 420


@pytest.mark.browser
def test_words_of_a_run_are_words(open_page, tmp_path):
    name = "<img src=x onerror=window.hit=1> & <b>bold"
    folder = make_run(tmp_path / name, 60)
    other = make_run(tmp_path / "<script>", 60)
    evil = "</script><script>window.hit=1</script><img src=x onerror=window.hit=1>"
    (folder / "samples.jsonl").write_text(json.dumps({"step": 60, "prompt": evil, "text": evil + " on"}))
    (folder / "config.toml").write_text(f"name = '{evil}'\n")
    page = open_page(write_report([folder, other], tmp_path / "report.html"))
    assert page.evaluate("() => window.hit") is None
    assert page.title() == f"{name}, <script> · anytime report"
    assert page.locator(".card h3").nth(0).inner_text() == name
    assert page.locator("main img").count() == 0
    assert page.locator(".sample pre").nth(0).inner_text() == evil + " on"
    assert page.locator("#settings td").nth(0).inner_text() == evil
    page.locator("#plot-loss").hover(force=True)
    page.wait_for_selector("#plot-loss .hoverlayer text")
    assert name in page.locator("#plot-loss .hoverlayer").text_content()


@pytest.mark.browser
def test_the_policy_lets_no_other_script_run(several, browser, tmp_path):
    """Were a word of a run ever to become a script, it would stay silent."""
    changed = tmp_path / "changed.html"
    changed.write_text(several.read_text(encoding="utf-8").replace("<main>", "<main><script>window.hit=1</script>"))
    page = browser.new_page()
    page.goto(changed.as_uri())
    page.wait_for_selector("html[data-ready]")
    assert page.evaluate("() => window.hit") is None
    page.close()


@pytest.mark.browser
def test_settings_and_samples(open_page, several):
    page = open_page(several)
    rows = page.locator("#settings tbody tr:visible")
    assert rows.locator("th").all_inner_texts() == ["name", "optimizer.name", "optimizer.lr"]
    assert rows.nth(2).locator("td").all_inner_texts() == ["0.01", "0.007", "0.01", "0.08", "–"]
    page.get_by_role("button", name="Show 4 identical").click()
    assert rows.count() == 7
    assert page.get_by_role("button", name="Hide 4 identical").get_attribute("aria-expanded") == "true"

    heads = page.locator(".sample h3")
    assert heads.all_inner_texts() == ["sf-normuon, step 600", "sf-normuon-branch, step 600", "too-fast, step 600"]
    page.select_option("#sample-step", "200")
    assert heads.all_inner_texts() == ["sf-normuon, step 200", "too-fast, step 200"]
    assert page.locator(".sample pre").nth(0).inner_text().startswith("The king of step 200 <b>went</b>\n  on, ")


@pytest.mark.browser
def test_the_keyboard_is_enough(open_page, several):
    page = open_page(several)
    page.focus("#axis input:checked")
    page.keyboard.press("ArrowRight")
    assert first_run(page, "loss")["x"][0] == pytest.approx(6.1)
    page.focus("#legend button")
    page.keyboard.press("Enter")
    assert page.get_attribute("#legend button", "aria-pressed") == "false"
    assert len(page.evaluate(TRACES, "loss")) == 7
