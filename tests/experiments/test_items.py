"""Every table and figure, from rows whose losses are known."""

from __future__ import annotations

import itertools
import math
import re

import pytest

from anytime.experiments import draw, tables
from anytime.experiments.items import ITEMS
from anytime.experiments.recipes import Found, MissingRow, Recipes
from anytime.experiments.scales import SCALES
from anytime.experiments.tables import Table, amount, first_at, number, percent, saved, tex
from anytime.theory import rho_quasi_steady


def test_the_step_at_which_a_loss_is_reached():
    curve = [(10, 4.0), (100, 3.0), (1000, 2.0)]
    assert first_at(curve, 3.0) == pytest.approx(100)
    assert first_at(curve, 2.5) == pytest.approx(10**2.5)
    assert first_at(curve, 5.0) == 10
    assert first_at(curve, 1.0) is None
    assert first_at([(1, 3.0), (2, 3.5), (4, 2.5), (8, 2.9)], 2.75) == pytest.approx(2 * 2**0.75)


def test_means_and_what_cannot_be_one():
    assert number([2.0]) == "2.000"
    assert number([2.0, 2.1, 2.2]) == "2.100 ± 0.100"
    assert number([2.0, math.inf]) == "diverged"
    assert percent([0.351]) == "35%"
    assert percent([0.3, 0.4]) == "35 ± 7%"
    assert percent([-math.inf]) == "not reached"
    assert [amount(n) for n in (999, 10240, 245_760, 2_621_440_000, 123_568_128)] == [
        "999", "10.2K", "246K", "2.6B", "124M",
    ]  # fmt: skip


def test_a_table_in_both_forms():
    table = Table("Of 5%", ["a", "b"], [["x_1", "**2** ± 1"]], "β₁ only")
    assert table.markdown() == "| a | b |\n| --- | ---: |\n| x_1 | **2** ± 1 |\n\nβ₁ only\n"
    assert "\\caption{Of 5\\%}" in table.latex()
    assert "x\\_1 & \\textbf{2} $\\pm$ 1 \\\\" in table.latex()
    assert tex("1× — 5%") == "1$\\times$ --- 5\\%"


def test_main_results(found):
    """SF-NorMuon is at 2 + 8/√t, SF-AdamW at 2 + 10/√t: 1 − (8/10)² = 36% of the steps are saved."""
    table = tables.main_results(found("micro"))
    for line, horizon in zip(table.body, (1, 2, 4, 8), strict=True):
        t = 620 * horizon
        wanted = [2 + height / math.sqrt(t) + 0.01 for height in (8, 10, 9)]  # seeds 0, 1, 2
        assert line[0] == f"{horizon}×"
        assert line[1] == f"**{wanted[0]:.3f} ± 0.010**"
        assert [cell.split(" ±")[0] for cell in line[2:4]] == [f"{value:.3f}" for value in wanted[1:]]
        assert line[4] in ("36 ± 0%", "36%")
    assert saved(found("micro"), 4) == pytest.approx([0.36] * 3, abs=0.003)
    assert "3 seeds" in table.note


def test_beside_the_papers_numbers(found):
    table = tables.main_results(found("small"))
    assert table.head[5:] == ["paper: SF-NorMuon", "paper: SF-AdamW", "paper: AdamW", "paper: saved"]
    assert table.body[0][5:] == ["3.318", "3.399", "3.354", "35%"]
    assert table.body[3][5:] == ["3.136", "3.141", "3.124", "11%"]
    table = tables.comparison(found("small"))
    assert table.body[1][-4:] == ["3.229", "3.282", "3.200", "3.231"]
    assert table.body[0][0] == "1× (2.6B tokens)"


def test_a_run_that_diverged_is_never_the_best(found):
    old = found("nano")
    rate = old.best_rate("AdamW", 2)
    run = old.recipes.scheduled("AdamW", rate, 2)
    rows = {**old.rows, run.key: {**old.rows[run.key], "losses": {}, "failed": "the loss is nan at step 3"}}
    new = Found(old.recipes, rows)
    assert new.best_rate("AdamW", 2) != rate
    assert new.best_rate("AdamW", 4) == old.best_rate("AdamW", 4)
    assert draw.rates_scheduled(new) is not None


def test_budgets_and_sizes_are_the_papers(found):
    body = tables.budgets(found("small")).body
    assert body[0][1:6] == ["steps", "5,000", "10,000", "20,000", "40,000"]
    assert body[1][1:6] == ["tokens", "2.6B", "5.2B", "10.5B", "21.0B"]
    assert body[2][1:6] == ["steps", "30,000", "60,000", "120,000", "—"]
    assert body[0][6] == "48×: 240,000"
    lines = {line[0]: line[1:] for line in tables.architecture(found("small")).body}
    assert lines["… of matrices"] == ["84,934,656", "707,788,800"]
    assert lines["… of the embedding"] == ["38,633,472", "64,389,120"]
    assert lines["Heads"] == ["6", "10"]
    assert lines["MLP dimension"] == ["3,072", "5,120"]
    assert lines["Tokens a step"] == ["524,288", "524,288"]


def test_memory_is_counted(found):
    table = tables.memory(found("nano"))
    m, n = 64, 16
    wanted = {"SF-NorMuon": 3 * m * n + m, "SF-AdamW": 3 * m * n, "AdamW": 3 * m * n, "NorMuon": 2 * m * n + m}
    for line in table.body:
        assert line[2] == line[3] == f"{wanted[line[0]]:,}"
        assert line[4] == f"{4 * wanted[line[0]]:,}"


def test_best_settings_and_the_space(found):
    best = tables.best_settings(found("micro"))
    assert best.body[0][1:] == [
        "0.021 / 0.021 / 0.021 / 0.021", "0.035 / 0.035 / 0.035 / 0.035", "0.035", "0.035",
    ]  # fmt: skip
    small = tables.best_settings(found("small"))
    assert "AdamW 0.008 / 0.008 / 0.008 / 0.004" in small.note
    space = tables.space(found("small"))
    assert space.body[-5][:3] == ["AdamW", "rate, at each horizon", "0.002, 0.004, 0.006, 0.008, 0.01"]
    assert [line[2] for line in space.body if line[1] == "warmup steps"] == ["2,000", "2,000", "2,500", "2,500"]


def test_the_three_sequences(found):
    table = tables.sequences(found("nano"))
    assert [line[:2] for line in table.body][:2] == [
        ["SF-NorMuon, decay at z", "4×"],
        ["SF-NorMuon, decay at z", "20×"],
    ]
    x, y, z = map(float, table.body[0][2:])
    assert x == pytest.approx(2 + 8 / math.sqrt(200), abs=1e-3)
    assert (y, z) == (pytest.approx(x + 0.1, abs=2e-3), pytest.approx(x + 0.5, abs=2e-3))


def test_scales():
    """The paper's settings at its own sizes; elsewhere by the stated rules."""
    small, large, micro, nano = (SCALES[name] for name in ("small", "large", "micro", "nano"))
    assert small.rates("AdamW") == (0.002, 0.004, 0.006, 0.008, 0.01)
    assert (small.warmup("SF-NorMuon"), small.warmup("AdamW")) == (2000, 2500)
    assert (large.warmup("SF-NorMuon"), large.rates("SF-AdamW"), large.rates("AdamW")) == (2000, (0.008,), (0.004,))
    assert micro.steps(1) == math.ceil(20 * 507_904 / 16_384) == 620
    assert micro.warmup("SF-AdamW") == round(0.4 * 620)
    assert micro.rate(0.008) == float(f"{0.008 * math.sqrt(12):.2g}") == 0.028
    assert 10_000 <= nano.model.parameters <= 20_000
    assert 50 <= nano.steps(1) <= 80
    assert all(scale.long >= 20 for scale in SCALES.values())


def test_one_run_serves_every_horizon_and_the_long_run_goes_on_from_it(found, tmp_path):
    recipes = Recipes(SCALES["nano"])
    short, long = recipes.schedule_free("SF-NorMuon", 0.05), recipes.long("SF-NorMuon", "z", 0.05)
    assert short.folder(tmp_path) == long.folder(tmp_path)
    assert (short.steps, long.steps) == (200, 1000)
    assert recipes.long("SF-NorMuon", "y", 0.05).folder(tmp_path) != long.folder(tmp_path)
    assert short.config.eval_at == (50, 100, 200)
    options = short.config.optimizer
    assert (options.name, options.betas, options.momentum, options.weight_decay) == (
        "SFNorMuon",
        (0.9, 0.95),
        0.8,
        0.05,
    )
    cosine = recipes.scheduled("AdamW", 0.05, 2).config.optimizer
    assert (cosine.schedule, cosine.horizon, cosine.warmup_steps) == ("cosine", 100, 25)


FIGURES = [name for name, item in ITEMS.items() if item.figure is not None]


def text_of(svg: str) -> list[str]:
    return re.findall(r">([^<>\n]+)</text>", svg)


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure(name, found, tmp_path):
    draw.save(ITEMS[name].figure, found("nano"), tmp_path / name)
    assert (tmp_path / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    svg = (tmp_path / f"{name}.svg").read_text()
    assert svg.startswith("<?xml")
    words = " ".join(text_of(svg))
    wanted = {
        "loss": ["SF-NorMuon", "SF-AdamW", "AdamW, cosine", "validation loss (nats a token)", "1×"],
        "optimizers": ["NorMuon, cosine", "SF-AdamW"],
        "decay": ["decay at z", "decay at y", "no decay", "RMS of Z", "20×"],
        "ablation": ["no momentum (μ = 0)", "no row normalization", "% of the tokens saved"],
        "steady": ["predicted ρ", "α", "end of warmup", "1%"],
        "layers": ["layer 1", "layer 2", "down", "predicted"],
        "rates": ["learning rate η", "validation loss at 4×", "0.035"],
        "rates-adamw": ["1× (50 steps)", "4× (200 steps)", "learning rate η"],
    }[name]
    for text in wanted:
        assert text in words, text


def test_smoothing():
    assert draw.smooth([0.0, 3.0, 6.0, 3.0], 1) == [1.5, 3.0, 4.0, 4.5]
    assert draw.smooth([2.0], 3) == [2.0]


def test_the_same_rows_give_the_same_picture(found, tmp_path):
    for name in ("a", "b"):
        draw.save(draw.rates_free, found("nano"), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_what_figures_show(found):
    """Saved without rows: 1 − 1/1.1² = 17%. The dashes go from the shorter schedule's end to the longest one's."""
    nano = found("nano")
    figure = draw.ablation(nano)
    assert [t.get_text() for axes in figure.axes for t in axes.texts if "saved" in t.get_text()] == [
        "75% of the tokens saved",
        "17% of the tokens saved",
    ]
    (axes,) = draw.loss(nano).axes
    dashes = [line for line in axes.lines if line.get_linestyle() == "--"]
    assert [line.get_xdata()[0] for line in dashes] == [50 * 4096, 100 * 4096]
    low, high = dashes[0].get_ydata()
    assert low == pytest.approx(2 + 9 / math.sqrt(50), abs=1e-4)
    assert high == pytest.approx(2 + 9 / math.sqrt(50) * (1.5 - 0.5 * 50 / 200), abs=1e-4)
    (axes,) = draw.rates_free(nano).axes
    stars = [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "*"]
    assert stars == [0.069, 0.069]


@pytest.mark.parametrize("name", list(ITEMS))
def test_a_missing_row_is_told_by_name(name, found):
    item = ITEMS[name]
    nothing = Found(Recipes(SCALES["nano"]), {})
    if not item.searches:
        assert item.table(nothing).body
        return
    with pytest.raises(MissingRow, match=r"no row of '.*', seed 0, \d+ steps"):
        (item.table or item.figure)(nothing)


# ------------------------------------------------------------------ prediction


def long_run(found):
    return found.recipes.long("SF-NorMuon", "z", found.best_rate("SF-NorMuon"))


def test_a_settled_run_is_as_predicted(found):
    """ρ of every matrix where its α says, but for one matrix, a tenth above."""
    micro = found("micro")
    run = long_run(micro)
    lr, decay, warmup = (getattr(run.config.optimizer, key) for key in ("lr", "weight_decay", "warmup_steps"))
    window = 1 / (lr * decay)
    row = micro.rows[run.key]
    names = [name for name in row["layers"][0] if name != "step"]
    rho = rho_quasi_steady(-0.02, lr, decay)

    def at(alpha):
        return {n: {"rho": rho * (1 + 0.1 * (n == names[3])), "alpha": alpha, "update_rms": 0.2} for n in names}

    alphas = itertools.cycle([-0.03, -0.01])
    layers = [{"step": r["step"], **at(a)} for r, a in zip(row["layers"], alphas, strict=False)]
    settled = Found(micro.recipes, {**micro.rows, run.key: {**row, "layers": layers}})
    table = tables.prediction(settled)
    first = table.body[0]
    assert first[0] == f"{warmup + 3 * window:,.0f} to {warmup + 4 * window:,.0f}"
    assert len(table.body) == (run.steps - warmup) // window - 3
    assert all(float(line[4][:-1]) < 20 for line in table.body)
    whole = [line for line in table.body if line[4] == "9.1%"]  # as many of one α as of the other
    assert whole
    for line in whole:
        assert float(line[2]) == pytest.approx(rho, abs=1e-4)
        assert float(line[1]) == pytest.approx(rho * (1 + 0.1 / len(names)), abs=1e-4)
        assert line[3] == f"{9.0909 / len(names):.1f}%"


def test_a_run_that_ends_too_soon_says_so(found):
    table = tables.prediction(found("nano"))
    assert not table.body
    assert "ends before the first of them" in table.note
