"""What is shown while a run goes on, on a terminal and elsewhere."""

from __future__ import annotations

import io
import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anytime.train import display as module
from anytime.train.display import Display, duration, eval_table, short

ROWS = [
    {"kind": "start", "step": 0, "seconds": 0.0, "device": "cpu", "parameters": 123_568_128},
    {"kind": "step", "step": 1, "tokens": 1000, "loss": 4.0, "lr": 0.01},
    {"kind": "step", "step": 2, "tokens": 2000, "loss": 3.0, "lr": 0.01},
    {"kind": "average", "step": 2, "tokens": 2000, "distance": 3.21, "c": 0.5, "beta": 0.9},
    {"kind": "speed", "step": 2, "tokens": 2000, "seconds": 12.3, "tokens_per_second": 512_345.6, "mfu": 0.41},
    {"kind": "eval", "step": 2, "tokens": 2000, "seconds": 12.5, "loss": 3.2, "perplexity": 24.53, "sequence": "x"},
    {"kind": "checkpoint", "step": 2, "tokens": 2000, "seconds": 12.5, "save_seconds": 1.25},
    {"kind": "stop", "step": 2, "tokens": 2000, "seconds": 12.5, "reason": "until 2 steps"},
]


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def usual_terminal(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")


def plain(rows, **options) -> list[str]:
    stream = io.StringIO()
    with Display(stream=stream, **options) as display:
        for row in rows:
            display(row)
    assert "\x1b" not in stream.getvalue()
    return stream.getvalue().splitlines()


def block(display: Display) -> str:
    """The live block as text."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=120)
    console.print(display._block())
    return console.file.getvalue()


def test_plain_lines_are_sparse():
    assert plain(ROWS) == [
        "started  123.6M parameters  cpu",
        "step 2  2k tokens  loss at Y 3.4949  tokens/s 512.3k  MFU 41.0%  |x-z| 3.21  12.3 s",
        "step 2  2k tokens  loss at X 3.2000  perplexity 24.53  12.5 s",
        "step 2  checkpoint, waited 1.2 s",
        "stopped at step 2: until 2 steps",
    ]


def test_what_is_absent_is_not_shown():
    rows = [{"kind": "start", "step": 300}, {"kind": "speed", "step": 301, "tokens_per_second": 10.0}]
    assert plain(rows) == ["resumed at step 300", "step 301  loss at Y -  tokens/s 10  -"]


def test_a_loss_that_is_not_finite_is_told_and_then_forgotten():
    step = lambda n, loss: {"kind": "step", "step": n, "loss": loss}  # noqa: E731
    speed = {"kind": "speed", "step": 2, "seconds": 1.0}
    lines = plain([step(1, 3.0), step(2, None), speed, step(3, 3.0), speed, {"kind": "eval", "step": 3, "loss": None}])
    assert ["loss at Y nan" in lines[0], "loss at Y 3.0000" in lines[1], "loss at X nan" in lines[2]] == [True] * 3


@given(st.lists(st.floats(-5, 5), min_size=1))
def test_the_smoothed_loss_is_a_weighted_mean(losses):
    smoothed = module._Smoothed()
    for loss in losses:
        smoothed.add(loss)
    weights = [module.SMOOTHING**age for age in reversed(range(len(losses)))]
    mean = sum(w * x for w, x in zip(weights, losses, strict=True)) / sum(weights)
    assert float(smoothed.shown()) == pytest.approx(mean, abs=1e-4)


def test_time_left_only_where_an_end_is_known():
    now = 0.0
    done = {1: 0.1, 2: 0.2, 3: None, 4: 0.6}
    stream = io.StringIO()
    with Display(lambda row: done[row["step"]], stream, clock=lambda: now) as display:
        for step in done:
            now += 30.0
            display({"kind": "speed", "step": step, "seconds": now})
    ends = [line.split("  ")[-1] for line in stream.getvalue().splitlines()]
    # 0.1 in 30 s: 0.8 take 240 s. Without a new share time goes on. 0.5 in 90 s: 0.4 take 72 s.
    assert ends == ["30.0 s", "4 min 0 s left", "8 min 0 s left", "1 min 12 s left"]
    assert not any("left" in line for line in plain(ROWS))
    assert not any("left" in line for line in plain(ROWS, end=lambda row: None))


def test_the_block_shows_where_the_run_is():
    now = 100.0
    display = Display(stream=Terminal(), clock=lambda: now)
    assert block(display).strip() == "waiting for the first step"
    with display:
        for row in ROWS[:6]:
            display(row)
    now += 60
    text = " ".join(block(display).split())
    for words in (
        "step 2",
        "loss at Y 3.4949",
        "loss at X 3.2000 (step 2)",
        "tokens 2k",
        "tokens/s 512.3k",
        "MFU 41.0%",
    ):
        assert words in text
    assert "|x-z| 3.21" in text
    assert "time 1 min 12 s" in text
    assert "left" not in text
    assert "%" not in text.replace("41.0%", "")


def test_the_block_shows_how_far_where_an_end_is_known():
    now = 0.0
    display = Display(lambda row: row["step"] / 4, Terminal(), clock=lambda: now)
    for step in (1, 3):
        now += 10
        display({"kind": "step", "step": step, "loss": 1.0})
    assert "75% 5.0 s left" in " ".join(block(display).split())
    display({"kind": "step", "step": 9, "loss": 1.0})
    assert "100% 0.0 s left" in " ".join(block(display).split())


def test_on_a_terminal_what_stays_stands_above_the_block():
    stream = Terminal()
    with Display(stream=stream) as display:
        for row in ROWS:
            display(row)
        display.message("[bold]as it is[/bold]")
        display.warning("mind [this]")
    shown = stream.getvalue()
    assert "\x1b[?25l" in shown  # the cursor was hidden for the block
    assert "\x1b[?25h" in shown  # and is there again
    for line in ("checkpoint, waited 1.2 s", "stopped at step 2", "[bold]as it is[/bold]", "warning: mind [this]"):
        assert line in shown
    assert "perplexity 24.53" in shown


@pytest.mark.parametrize("how", ["pipe", "dumb", "latin", "no rich"])
def test_without_a_capable_terminal_there_are_no_control_codes(how, monkeypatch):
    stream = io.StringIO() if how == "pipe" else Terminal()
    if how == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    elif how == "latin":
        stream.encoding = "latin-1"
    elif how == "no rich":
        monkeypatch.setitem(sys.modules, "rich", None)
    with Display(stream=stream) as display:
        for row in ROWS:
            display(row)
        display.message("‖é")
    assert "\x1b" not in stream.getvalue()
    assert stream.getvalue().endswith("?é\n" if how == "latin" else "‖é\n")


def test_an_exception_leaves_the_terminal_usable():
    stream = Terminal()
    with pytest.raises(RuntimeError), Display(stream=stream):
        raise RuntimeError
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")


def test_messages_and_warnings_are_plain_lines():
    stream = io.StringIO()
    with Display(stream=stream) as display:
        display.message("saved [x]")
        display.warning("slow")
    assert stream.getvalue() == "saved [x]\nwarning: slow\n"


def test_the_table_of_evaluations():
    rows = [
        *ROWS,
        {"kind": "eval", "step": 12_000, "tokens": 393_216_000, "loss": None, "perplexity": None, "sequence": "x"},
    ]
    assert eval_table(rows) == (
        "  step  tokens  loss at X  perplexity\n"
        "     2      2k     3.2000       24.53\n"
        "12,000  393.2M        nan         nan"
    )  # fmt: skip
    assert eval_table([{**rows[5], "bits_per_byte": 1.1}]).splitlines()[0].endswith("bits/byte")
    assert len(eval_table([]).splitlines()) == 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (3599.6, "1 h 0 min"),
        (90_061, "25 h 1 min"),
        (200_000, "2 d 7 h"),
        (math.nan, "-"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (999.97, "1k"), (32_768, "32.77k"), (1.5e9, "1.5B"), (3e12, "3T"), (math.nan, "-")],
)
def test_short_numbers(number, text):
    assert short(number) == text


def test_a_number_beyond_reason_stays_short():
    row = {"kind": "eval", "step": 1, "tokens": 10, "loss": 700.0, "perplexity": math.exp(700), "sequence": "x"}
    assert "1.01e+304" in eval_table([row])
