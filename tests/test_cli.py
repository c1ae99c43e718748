"""The command line: every command on a tiny run, where settings come from, and how errors are told."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import anytime
from anytime import SFAdamW, cli
from anytime.bench import floor, peers, race
from anytime.cli import main
from anytime.train.checkpoint import read_resume
from anytime.train.config import FILLED, Config, merged, read_toml, to_toml
from anytime.train.errors import UserError
from anytime.train.loop import Result
from anytime.train.prepare import Count, Summary
from anytime.train.presets import PRESETS, preset
from anytime.train.runs import read_lines, stored_config
from anytime.train.shards import Tokens, write_shard
from anytime.train.tokenizer import BytesTokenizer

ROOT = Path(anytime.__file__).parent.parent
SETTINGS = """
batch_size = 2
eval_tokens = 256
threads = 1
keep_at = [2]
[model]
vocabulary = 256
layers = 1
width = 32
head = 16
context = 32
[optimizer]
lr = 0.02
warmup_steps = 2
[data]
path = "data"
"""
TEXT = "it is what it is, and what it is not it is not. " * 40


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Data, settings and a run of four steps."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "data").mkdir()
    ids = np.frombuffer(TEXT.encode(), np.uint8).astype(np.uint16)
    write_shard(folder / "data" / "train-000000.bin", ids)
    write_shard(folder / "data" / "val-000000.bin", ids[:400])
    BytesTokenizer().save(folder / "data")
    (folder / "tiny.toml").write_text(SETTINGS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", "tiny.toml", "--run", "run", "--until", "4 steps"]) == 0
    return folder


@pytest.fixture
def here(home, tmp_path, monkeypatch) -> Path:
    """A folder of one's own with the data, the settings and the run in it."""
    for name in ("data", "tiny.toml", "run"):
        (tmp_path / name).symlink_to(home / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def asked(monkeypatch) -> list[Config]:
    """The settings with which training would have begun."""
    found: list[Config] = []
    monkeypatch.setattr(cli, "_run", lambda config: found.append(config) or 0)
    return found


def fails(arguments: list[str], capsys, status: int = 1) -> str:
    """What it says after `error: `: one line, and nothing else."""
    assert main(arguments) == status
    said = capsys.readouterr()
    assert said.err.startswith("error: ")
    assert said.err.endswith("\n")
    assert said.err.count("\n") == 1
    return said.err[7:-1]


def leaves(arguments: list[str], capsys) -> tuple[object, str]:
    """The status of a command that the parser ends, and all it said."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    said = capsys.readouterr()
    return ended.value.code, " ".join((said.out + said.err).replace("│", " ").split())


# ------------------------------------------------------------ the command itself


def test_no_command_and_help(capsys):
    assert main([]) == 2
    first = capsys.readouterr().out
    for flag in ("-h", "--help"):
        assert main([flag]) == 0
        assert capsys.readouterr().out == first
    for name in cli.COMMANDS:
        assert f"\n  {name} " in first


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == anytime.__version__ + "\n"


def test_an_unknown_command(capsys):
    assert main(["smaple"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: there is no command 'smaple'; did you mean 'sample'?")


def test_argv_is_the_default(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["anytime", "--version"])
    assert main() == 0
    assert capsys.readouterr().out.strip() == anytime.__version__


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("train", ["--preset", "--run", "--until", "--batch-size", "--model.width", "--optimizer.lr", "--data.path"]),
        ("data", ["--out", "--tokenizer", "--train-tokenizer", "--val-every", "--val", "--text-key", "--separator",
                  "--workers", "--limit-tokens"]),
        ("sample", ["--prompt", "--at", "--count", "--temperature", "--top-k", "--seed", "--copies", "--device"]),
        ("eval", ["--data", "--at", "--tokens", "--at-once", "--device"]),
        ("export", ["--to", "--at", "--dtype"]),
        ("report", ["--out"]),
        ("bench", ["--preset", "--device", "--part", "--dtype", "--steps", "--only", "--out", "--picture"]),
    ],
)  # fmt: skip
def test_help_names_the_arguments(name, arguments, capsys):
    status, said = leaves([name, "--help"], capsys)
    assert status == 0
    for argument in arguments:
        assert f"{argument} " in said
    assert (cli.COMMANDS[name].__doc__ or "x").splitlines()[0].split(":")[0] in said


def test_help_of_train_names_the_presets_and_is_one_text(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    out = capsys.readouterr().out
    for name in PRESETS:
        assert name in out
    assert "\n    Settings come from" not in out  # the docstring's indentation is not the reader's


def test_help_of_branch(here, capsys):
    assert main(["branch", "--help"]) == 0
    said = capsys.readouterr().out
    for argument in ("--run", "--at", "--cooldown", "--average", "--optimizer.lr", "--data.path", "--until"):
        assert argument in said
    status, said = leaves(["branch", "run", "--help"], capsys)
    assert status == 0
    assert "--optimizer.lr" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--batch-sise", "4"], "--batch-size"),
        (["train", "--optimizer.weight-deacy", "4"], "--optimizer.weight-decay"),
        (["branch", "run", "--untill", "4 steps"], "--until"),
        (["sample", "run", "--temprature", "1"], "--temperature"),
        (["eval", "run", "--tokes", "1"], "--tokens"),
        (["export", "run", "--to", "x", "--dtyp", "float32"], "--dtype"),
        (["report", "run", "--ou", "x"], "--out"),
        (["data", "x", "--tokeniser", "bytes"], "--tokenizer"),
    ],
)
def test_a_typo_names_the_nearest(here, arguments, words, capsys):
    status, said = leaves(arguments, capsys)
    assert status == 2
    assert f"Perhaps you meant: {words} " in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--batch-size", "x"],
        ["train", "--optimizer.decay-at", "w"],
        ["eval", "run", "--tokens", "many"],
        ["export", "run"],
        ["export", "run", "--to", "x", "--dtype", "int8"],
        ["sample"],
    ],
)
def test_arguments_that_cannot_be_read(here, arguments, capsys):
    status, said = leaves(arguments, capsys)
    assert status == 2
    assert said


# --------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "none.toml"], "there is no file none.toml"),
        (["train", "data"], "data is not a run's"),
        (["train", "--run", "rum", "--until", "9 steps"], "there is no run in rum to go on with; --preset NAME begins"),
        (["train", "--run=rum"], "there is no run in rum to go on with; --preset NAME begins one there (demo, "),
        (["train", "--preset", "12m"], "there is no preset '12m'; did you mean '12M'?"),
        (["train", "--run", "data", "--data.path", "data", "--device", "cpu"], "data is not a run's"),
        (["train", "tiny.toml", "--run", "run", "--seed", "3"], "seed: 3 was 0"),
        (["train", "tiny.toml", "--run", "new", "--data.path", "nowhere"], "nowhere: make it with `anytime data"),
        (["train", "tiny.toml", "--run", "new", "--optimizer.name", "Adan"], "did you mean 'AdamW'?"),
        (["train", "tiny.toml", "--run", "new", "--optimizer.schedule", "linear"], "needs its last step"),
        (["sample", "nowhere"], "there is no run or model at nowhere"),
        (["sample", "run", "--temperature", "-1"], "temperature is -1.0"),
        (["sample", "run", "--copies", "0"], "copies"),
        (["eval", "run", "--tokens", "0"], "tokens is 0, must be at least 1"),
        (["train", "tiny.toml", "--run", "new", "--device", "meta"], "device is 'meta', which is not here"),
        (["eval", "run", "--at", "3"], "run keeps no step 3; it keeps 2, 4"),
        (["eval", "run", "--data", "nowhere"], "nowhere does not exist"),
        (["export", "run", "--to", "data"], "data is there already and not empty"),
        (["report"], "name at least one run's folder"),
        (["report", "data"], "there is no metrics.jsonl in data"),
        (["branch"], "name the run to branch from"),
        (["branch", "nowhere"], "nowhere is not a run's folder"),
        (["branch", "run", "--at", "3"], "run keeps no step 3; it keeps 2, 4"),
        (["branch", "run", "--at", "x"], "--at is 'x', must be a whole number of steps"),
        (["branch", "run", "--at", "-4"], "--at is '-4', must be a whole number of steps"),
        (["branch", "run", "--cooldown", "1.5"], "--cooldown is '1.5'"),
        (
            ["branch", "run", "--average", "drop", "--until", "4 steps"],
            "average is 'drop', must be 'keep' or 'restart'",
        ),
        (["branch", "run", "--run", "data"], "data is there already"),
        (["branch", "run", "--run", "b", "--model.width", "64"], "model.width is 64 and was 32"),
        (["data", "nowhere.txt", "--out", "d", "--tokenizer", "bytes"], "the input nowhere.txt does not exist"),
        (["data", "tiny.toml", "--out", "d", "--tokenizer", "nonsense"], "tokenizer 'nonsense'"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_what_a_user_did_is_told_in_one_line(here, arguments, words, capsys):
    assert words in fails(arguments, capsys)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batch-size", "0"], "batch_size is 0, must be at least 1"),
        (["--until", "someday"], "until is 'someday'"),
        (["--model.head", "7"], "model.head is 7"),
        (["--batch-size", "4", "--micro-batch", "3"], "micro_batch is 3"),
    ],
)
def test_a_value_that_the_settings_refuse_is_told_in_one_line_too(here, arguments, words, capsys):
    assert words in fails(["train", "tiny.toml", "--run", "new", *arguments], capsys)
    assert not (here / "new").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("batch_sise = 4", "bad.toml: there is no setting 'batch_sise'; did you mean 'batch_size'?"),
        ("[optimizer]\nlr = 'fast'", "bad.toml: optimizer.lr is 'fast', must be a number"),
        ("[optimizer]\nname = 5", "bad.toml: optimizer.name is 5, must be a text"),
        ("preset = 'dmeo'", "there is no preset 'dmeo'; did you mean 'demo'?"),
        ("preset = 5", "preset is 5"),
        ("run = 5", "run is 5"),
        ("until = 600", "bad.toml: until is 600, must be a text"),
        ("model = 5", "bad.toml: model is 5, must be a table"),
        ("= 5", "bad.toml is not TOML"),
    ],
)
def test_settings_in_a_file_that_are_wrong(here, text, words, capsys):
    (here / "bad.toml").write_text(text)
    assert words in fails(["train", "bad.toml"], capsys)


def test_without_tyro(here, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert 'pip install "anytime-optim[train]"' in fails(["sample", "run"], capsys)


def test_ctrl_c_and_signals(here, monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.COMMANDS, "report", interrupted)
    assert main(["report", "run"]) == 130
    assert not capsys.readouterr().err
    monkeypatch.setitem(cli.COMMANDS, "sweep", interrupted)
    assert main(["sweep", "space.toml"]) == 130
    assert "the same command goes on" in capsys.readouterr().err
    loop = sys.modules["anytime.train.loop"]
    for reason, status in (("SIGINT", 130), ("SIGTERM", 143), ("until 4 steps", 0)):
        monkeypatch.setattr(loop, "train", lambda *a, _r=reason, **k: Result(4, 256, 1.0, _r, None))
        assert main(["train", "tiny.toml", "--run", "run"]) == status


def test_other_errors_are_not_hidden(monkeypatch):
    def broken(arguments):
        raise RuntimeError("a defect")

    monkeypatch.setitem(cli.COMMANDS, "report", broken)
    with pytest.raises(RuntimeError, match="a defect"):
        main(["report"])


# -------------------------------------------------- where settings come from


def test_the_command_line_wins_over_the_file_and_the_file_over_the_preset(here, asked):
    (here / "c.toml").write_text("batch_size = 8\neval_tokens = 99\n[optimizer]\nmomentum = 0.5\nlr = 0.5\n")
    assert main(["train", "c.toml", "--preset", "demo", "--run", "x", "--batch-size", "6", "--optimizer.lr", "1"]) == 0
    (found,) = asked
    demo = merged(Config(), preset("demo"))
    optimizer = replace(demo.optimizer, lr=1.0, momentum=0.5)
    wanted = replace(demo, batch_size=6, eval_tokens=99, optimizer=optimizer, preset="demo", run="x")
    assert found == wanted


@pytest.mark.parametrize("text", ["[model]\nwidth = 64", "[model]\nhead = 48", "micro_batch = 4\nbatch_size = 12"])
def test_a_file_is_judged_with_its_preset_not_alone(here, asked, text):
    """96 wide in heads of 32 is the demo: 64 or heads of 48 fit it, not the defaults."""
    (here / "c.toml").write_text(text)
    assert main(["train", "c.toml", "--preset", "demo", "--run", "x"]) == 0
    assert asked[0] == merged(
        merged(Config(), preset("demo")), {**read_toml(Path("c.toml")), "preset": "demo", "run": "x"}
    )


def test_arguments_in_one_word(here, asked):
    assert main(["train", "--preset=demo", "--run=x", "--until=5 steps"]) == 0
    assert (asked[0].preset, asked[0].run, asked[0].until) == ("demo", "x", "5 steps")


def test_a_file_may_name_the_preset_and_the_run(here, asked):
    (here / "c.toml").write_text("preset = 'demo'\nrun = 'there'\nseed = 4\n")
    main(["train", "c.toml"])
    assert asked[-1] == replace(merged(Config(), preset("demo")), preset="demo", run="there", seed=4)
    main(["train", "c.toml", "--run", "elsewhere", "--preset", "2M"])
    assert (asked[-1].run, asked[-1].preset, asked[-1].model.width) == ("elsewhere", "2M", 160)


def test_the_default_folder_is_named_after_the_preset(here, asked):
    main(["train", "--preset", "0.5M"])
    main(["train"])
    assert [config.run for config in asked] == ["runs/0.5M", "runs/run"]


def test_lists_and_nothing_on_the_command_line(here, asked):
    main(["train", "--eval-at", "1", "2", "--optimizer.betas", "0.5", "0.6", "--optimizer.clip", "None", "--report"])
    (found,) = asked
    assert (found.eval_at, found.optimizer.betas, found.optimizer.clip, found.report) == (
        (1, 2),
        (0.5, 0.6),
        None,
        True,
    )


def test_a_run_that_is_there_brings_its_settings(here, asked):
    main(["train", "--run", "run"])
    assert asked[-1] == stored_config(here / "run")
    main(["train", "--run", "run", "--until", "9 steps"])
    assert asked[-1] == replace(stored_config(here / "run"), until="9 steps")
    (here / "c.toml").write_text("until = '7 steps'\nlog_every = 3\n")
    main(["train", "c.toml", "--run", "run"])
    assert (asked[-1].until, asked[-1].log_every, asked[-1].model.width) == ("7 steps", 3, 32)


def test_a_run_of_another_preset(here, capsys):
    words = fails(["train", "--preset", "demo", "--run", "run"], capsys)
    assert "run holds a run that began from no preset, not 'demo'" in words


def test_an_optimizer_of_another_name_has_its_own_defaults(here, asked):
    """A preset's options are for its optimizer."""
    (here / "c.toml").write_text("[optimizer]\nname = 'NorMuon'\n")
    main(["train", "c.toml", "--preset", "demo", "--run", "x"])
    (found,) = asked
    assert (found.optimizer.betas, found.optimizer.beta_growth, found.optimizer.warmup_steps) == (None, None, 10)


@pytest.mark.parametrize("where", ["file", "command line"])
def test_a_recipe_is_whole_whatever_the_preset_says(here, asked, where, monkeypatch):
    """The preset's options that a recipe fills in are not in its way; those said beside it are."""
    demo = {**PRESETS["demo"], "optimizer": {"lr": 0.02, "warmup_steps": 10, "beta_growth": 0.4, "momentum": 0.9}}
    monkeypatch.setitem(PRESETS, "demo", demo)
    (here / "c.toml").write_text("[optimizer]\nrecipe = 'anytime'\nmomentum = 0.7\n")
    said = ["--optimizer.recipe", "anytime", "--optimizer.momentum", "0.7"]
    main(["train", *(["c.toml"] if where == "file" else said), "--preset", "demo", "--run", "x"])
    found = asked[-1].optimizer
    assert (found.recipe, found.momentum, found.lr, found.warmup_steps) == ("anytime", 0.7, 0.02, 10)
    assert {getattr(found, key) for key in FILLED if key != "momentum"} == {None}


def test_a_branch_of_another_recipe_keeps_what_is_said_beside_it(here, monkeypatch):
    """Though it be what the recipe before had filled in."""
    assert main(["train", "tiny.toml", "--run", "recipe", "--optimizer.recipe", "anytime", "--until", "2 steps"]) == 0
    asked: list[Config] = []
    monkeypatch.setattr(cli, "_run", lambda config: asked.append(config) or 0)
    options = ["--optimizer.recipe", "paper", "--optimizer.betas", "0.4", "0.95"]
    main(["branch", "recipe", *options, "--until", "4 steps"])
    found = asked[-1].optimizer
    assert (found.recipe, found.betas, found.momentum_growth) == ("paper", (0.4, 0.95), None)
    main(["branch", "recipe", "--run", "plainly", "--optimizer.recipe", "paper", "--until", "4 steps"])
    assert asked[-1].optimizer.betas == (0.9, 0.95)


def test_a_recipe_that_is_not_there(here, capsys):
    words = fails(["train", "--optimizer.recipe", "any", "--run", "x"], capsys)
    assert "optimizer.recipe is 'any', must be one of 'paper', 'anytime'" in words


def test_an_optimizer_of_another_name_on_the_command_line(here, capsys):
    """As in a file: what the preset set for another optimizer must not be in the way."""
    arguments = ["--run", "x", "--optimizer.name", "AdamW", "--until", "1 steps", "--data.path", "data"]
    assert main(["train", "--preset", "demo", *arguments, "--no-report"]) == 0


# ------------------------------------------------------------ train, resume


def losses(run: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_lines(run / "metrics.jsonl") if row["kind"] == "step"}


def test_train_resume_and_extend(here, capsys):
    command = ["train", "tiny.toml", "--run", "new", "--until", "4 steps"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "The anytime curve" in said
    assert "Run: new at step 4." in said
    assert losses(here / "new") == losses(here / "run")
    assert main(command) == 0  # nothing is left to do
    assert list(losses(here / "new")) == [1, 2, 3, 4]
    assert main([*command[:-1], "6 steps"]) == 0
    assert list(losses(here / "new")) == [1, 2, 3, 4, 5, 6]
    assert main(["train", "tiny.toml", "--run", "whole", "--until", "6 steps"]) == 0
    assert losses(here / "whole") == losses(here / "new")


def test_samples_and_a_report_at_the_end(here, capsys):
    assert main(["train", "tiny.toml", "--run", "new", "--until", "2 steps", "--prompt", "it 😀", "--report"]) == 0
    said = capsys.readouterr().out
    assert "A sample at step 2:\nit 😀" in said
    assert f"Report: {here / 'new' / 'report.html'}" in said
    assert (here / "new" / "report.html").read_text().startswith("<!")
    assert main(["train", "--run", "new", "--until", "3 steps"]) == 0  # and it is read again


def test_a_wrong_option_does_not_spoil_the_folder(here, capsys):
    """What is mended may go into the same folder: nothing was trained there."""
    command = ["train", "tiny.toml", "--run", "new", "--until", "1 steps"]
    fails([*command, "--optimizer.lr", "-1"], capsys)
    assert main([*command, "--optimizer.lr", "0.01"]) == 0


def test_metrics_go_to_other_places_too(here):
    assert main(["train", "tiny.toml", "--run", "new", "--until", "2 steps", "--log-to", "tensorboard"]) == 0
    assert any(path.name.startswith("events.out.tfevents") for path in (here / "new").rglob("*"))


def test_a_folder_without_settings_is_no_run(here, capsys):
    (here / "bare").mkdir()
    assert "there is no run in bare to go on with" in fails(["train", "--run", "bare"], capsys)


def test_settings_that_were_lost_are_in_the_checkpoints(here, capsys):
    shutil.copytree(here / "run", here / "lost")
    before = stored_config(here / "lost")
    (here / "lost/config.toml").unlink()
    assert stored_config(here / "lost") == before
    said = fails(["train", "tiny.toml", "--run", "lost", "--seed", "9"], capsys)
    assert "holds a run with other settings (seed: 9 was 0)" in said
    assert main(["train", "--run", "lost", "--until", "5 steps"]) == 0
    assert read_toml(here / "lost/config.toml")["model"]["width"] == 32


@pytest.mark.parametrize(("line", "edited", "told"), [
    ("seed = 0", "seed = 9", "seed: 9 was 0"),
    ("lr = 0.02", "lr = 0.5", "optimizer.lr: 0.5 was 0.02"),
    ("width = 32", "width = 64", "model.width: 64 was 32"),
])  # fmt: skip
def test_settings_edited_by_hand_make_no_other_run(here, capsys, line, edited, told):
    shutil.copytree(here / "run", here / "copy")
    settings = (here / "copy/config.toml").read_text()
    assert settings.count(line + "\n") == 1
    (here / "copy/config.toml").write_text(settings.replace(line, edited))
    assert f"says of the run what its checkpoints do not ({told})" in fails(["train", "--run", "copy"], capsys)


def test_a_setting_that_may_change_may_be_edited_by_hand(here):
    shutil.copytree(here / "run", here / "copy")
    settings = (here / "copy/config.toml").read_text()
    (here / "copy/config.toml").write_text(settings.replace("batch_size = 2", "batch_size = 4"))
    assert main(["train", "--run", "copy", "--until", "5 steps"]) == 0
    assert [r["tokens"] for r in read_lines(here / "copy/metrics.jsonl") if r["kind"] == "stop"][-1] == 4 * 64 + 128


def test_a_branch_lies_beside_its_run_wherever_one_stands(here, monkeypatch):
    shutil.copytree(here / "run", here / "a run")
    monkeypatch.chdir(here / "a run")
    settings = Path("config.toml").read_text().replace('path = "data"', 'path = "../data"')
    Path("config.toml").write_text(settings)
    assert main(["branch", ".", "--until", "5 steps"]) == 0
    assert (here / "a run-branch-4/config.toml").exists()


@pytest.mark.parametrize("until", ["4 steps", "2 steps", "100 tokens"])
def test_a_branch_that_would_end_at_once_is_not_made(here, capsys, until):
    said = fails(["branch", "run", "--run", "new", "--until", until], capsys)
    assert f"until is '{until}', but run/checkpoints/step-00000004 is at step 4 already" in said
    assert not (here / "new").exists()


def test_minutes_below_zero(capsys):
    assert "minutes is -1, must be 0" in fails(["frontier", "nano", "--minutes", "-1", "--yes"], capsys)


def test_a_folder_that_cannot_be_made(here, capsys):
    said = fails(["frontier", "nano", "--data", "data", "--yes", "--out", "tiny.toml"], capsys)
    assert said == "cannot make the folder tiny.toml: File exists"


def test_an_export_needs_a_name(here, capsys, monkeypatch):
    (here / "empty").mkdir()
    monkeypatch.chdir(here / "empty")
    assert "to is '.': name a folder for it" in fails(["export", "../run", "--to", "."], capsys)


def test_how_to_go_on(here, capsys):
    said = ["train", "tiny.toml", "--run", "a b", "--optimizer.name", "NorMuon", "--optimizer.schedule", "linear"]
    assert main([*said, "--optimizer.horizon", "6", "--until", "4 steps"]) == 0
    assert capsys.readouterr().out.endswith("Further: anytime train --run 'a b' --until '6 steps'\n")
    assert main(["train", "--run", "a b", "--until", "6 steps"]) == 0
    assert "Its rate has ended; to go on otherwise: anytime branch 'a b' --at STEP" in capsys.readouterr().out
    assert main(["branch", "a b", "--cooldown", "3"]) == 1


def test_seeds_that_no_generator_takes(here, capsys):
    assert "seed is 9223372036854775808" in fails(["train", "--seed", str(2**63)], capsys)
    assert "seed is 9223372036854775808" in fails(["sample", "run", "--seed", str(2**63)], capsys)


def test_a_terminal_that_cannot_show_all(here):
    command = [sys.executable, "-m", "anytime", "sample", "run", "--prompt", "é", "--count", "2"]
    done = subprocess.run(command, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"?" in done.stdout


# ------------------------------------------------------------------ branch


def test_branch(here, capsys):
    assert main(["branch", "run", "--at", "2", "--cooldown", "3", "--average", "restart"]) == 0
    made = here / "run-cooldown-2"
    assert list(losses(made)) == [3, 4, 5]
    assert json.loads((made / "branch.json").read_text()) == {
        "from": str((here / "run").resolve()), "step": 2, "average": "restart", "cooldown": 3,
    }  # fmt: skip
    found = read_resume(made / "checkpoints" / "step-00000005")
    assert all(not t.any() for name, t in found.items() if name.endswith("/d"))


def test_branch_with_other_settings(here, asked):
    assert main(["branch", "run/", "--optimizer.lr", "0.5", "--eval-at", "9", "--until", "9 steps"]) == 0
    (found,) = asked
    wanted = stored_config(here / "run")
    optimizer = replace(wanted.optimizer, lr=0.5)
    assert found == replace(wanted, run="run-branch-4", until="9 steps", eval_at=(9,), optimizer=optimizer)
    assert stored_config(here / "run-branch-4") == found


def test_branch_until_where_the_source_ended(here, asked):
    """The most natural comparison of all: another rate, to the same end."""
    assert main(["branch", "run", "--at", "2", "--optimizer.lr", "0.5", "--until", "4 steps"]) == 0
    assert asked[0].until == "4 steps"


def test_branch_can_take_a_setting_back(here, asked):
    main(["train", "tiny.toml", "--run", "clipped", "--optimizer.clip", "1"])
    (here / "clipped").mkdir()
    (here / "clipped" / "checkpoints").symlink_to(here / "run" / "checkpoints")
    (here / "clipped" / "config.toml").write_text(to_toml(asked[-1]))
    assert main(["branch", "clipped", "--optimizer.clip", "None"]) == 0
    assert asked[-1].optimizer.clip is None


def test_a_branch_is_gone_on_with_by_train(here):
    assert main(["branch", "run", "--at", "2", "--run", "b", "--until", "3 steps"]) == 0
    assert main(["train", "--run", "b", "--until", "4 steps"]) == 0
    assert losses(here / "b") == {step: loss for step, loss in losses(here / "run").items() if step > 2}


# --------------------------------------------------- sample, eval, export, report


def test_sample(here, capsys):
    command = ["sample", "run", "--prompt", "it is", "--count", "20", "--seed", "3"]
    assert main(command) == 0
    first = capsys.readouterr().out
    assert first.startswith("it is")
    assert len(first.encode()) > 10
    main(command)
    assert capsys.readouterr().out == first
    main([*command, "--copies", "3", "--at", "2"])
    assert capsys.readouterr().out.count("\n---\n") == 2
    main(["sample", "run", "--prompt", "it", "--count", "9", "--temperature", "0"])
    likeliest = capsys.readouterr().out
    main(["sample", "run", "--prompt", "it", "--count", "9", "--top-k", "1", "--seed", "8"])
    assert capsys.readouterr().out == likeliest


def test_eval(here, capsys):
    assert main(["eval", "run", "--tokens", "256"]) == 0
    said = capsys.readouterr().out
    row = next(r for r in read_lines(here / "run" / "metrics.jsonl") if r["kind"] == "eval" and r["step"] == 4)
    assert said == (
        f"loss {row['loss']:.4f} nats a token, perplexity {row['perplexity']:.2f}, "
        f"{row['bits_per_byte']:.4f} bits a byte (step 4, 256 tokens)\n"
    )
    assert main(["eval", "run", "--tokens", "64", "--data", "data", "--at-once", "1", "--at", "2"]) == 0
    assert "(step 2, 64 tokens)" in capsys.readouterr().out


def test_export(here, capsys):
    assert main(["export", "run", "--to", "out", "--at", "2", "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out == "step 2 of run is in out\n"
    assert main(["sample", "out", "--count", "3"]) == 0
    assert main(["eval", "out", "--data", "data", "--tokens", "64"]) == 0
    assert main(["export", "out", "--to", "again"]) == 0


def test_report(here, capsys):
    assert main(["report", "run", "run", "--out", "page.html"]) == 0
    assert capsys.readouterr().out == f"Report: {here / 'page.html'}\n"
    assert "plotly" in (here / "page.html").read_text()
    assert not (here / "run" / "report.html").exists()
    assert main(["train", "tiny.toml", "--run", "new", "--until", "1 steps"]) == 0
    assert main(["report", "new"]) == 0
    assert (here / "new" / "report.html").exists()


# -------------------------------------------------------------------- data


def documents() -> list[str]:
    return [f"Document {i} says {i * i} things about {i % 7} of them. " * 4 for i in range(60)]


def write_input(folder: Path, kind: str) -> Path:
    path = folder / f"input.{kind}"
    if kind == "txt":
        path.write_text("\n<|endoftext|>\n".join(documents()))
    elif kind == "jsonl":
        path.write_text("".join(json.dumps({"body": text}) + "\n" for text in documents()))
    else:
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.table({"body": documents()}), path)
    return path


TRAINED = ["--train-tokenizer", "300"]


@pytest.mark.parametrize(
    ("kind", "tokenizer", "vocabulary"),
    [("txt", ["--tokenizer", "bytes"], 256), ("jsonl", TRAINED, 300), ("parquet", ["--tokenizer", "bytes"], 256)],
)
def test_data_and_then_training_on_it(here, kind, tokenizer, vocabulary, capsys):
    path = write_input(here, kind)
    key = [] if kind == "txt" else ["--text-key", "body"]
    command = ["data", path.name, "--out", "made", "--val-every", "10", "--workers", "1", *key, *tokenizer]
    assert main(command) == 0
    said = capsys.readouterr().out
    counts = [len(Tokens.open(here / "made", split)) for split in ("train", "val")]
    assert said == (
        f"{counts[0]:,} tokens to train on and {counts[1]:,} for validation in made (vocabulary {vocabulary}). "
        "Train on them: anytime train --preset 2M --data.path made\n"
    )
    before = {p.name: p.read_bytes() for p in (here / "made").iterdir()}
    assert main(command) == 0  # again is fine
    assert {p.name: p.read_bytes() for p in (here / "made").iterdir()} == before
    more = ["--data.path", "made", "--model.vocabulary", str(vocabulary), "--data.documents"]
    assert main(["train", "tiny.toml", "--run", "new", "--until", "2 steps", "--prompt", "Document", *more]) == 0
    capsys.readouterr()
    assert main(["sample", "new", "--prompt", "Document", "--count", "5"]) == 0
    assert capsys.readouterr().out.startswith("Document")


def test_every_argument_of_data_arrives(here, monkeypatch, capsys):
    asked = {}

    def prepare(inputs, out, tokenizer, *, progress, **more):
        asked.update(more, inputs=inputs, out=out, tokenizer=tokenizer)
        return Summary(out, 7, None, Count(1000), Count(20))

    monkeypatch.setattr(sys.modules["anytime.train.prepare"], "prepare", prepare)
    words = "a.txt b.txt --out o --tokenizer bytes --train-tokenizer 300 --val-every 17 --val c.txt d.txt --text-key k"
    assert main(["data", *words.split(), "--separator", "##", "--workers", "3", "--limit-tokens", "99"]) == 0
    assert asked == {
        "inputs": ("a.txt", "b.txt"), "out": Path("o"), "tokenizer": "bytes", "train_tokenizer": 300, "val_every": 17,
        "val_inputs": ("c.txt", "d.txt"), "text_key": "k", "separator": "##", "workers": 3, "limit_tokens": 99,
    }  # fmt: skip
    assert "1,000 tokens to train on and 20 for validation in o (vocabulary 7)" in capsys.readouterr().out


def test_data_with_validation_of_its_own_and_a_limit(here, capsys):
    write_input(here, "txt")
    (here / "judge.txt").write_text("Judge me by this. " * 30)
    command = ["data", "input.txt", "--val", "judge.txt", "--out", "made", "--tokenizer", "bytes", "--workers", "1"]
    assert main([*command, "--limit-tokens", "1000"]) == 0
    assert len(Tokens.open(here / "made", "train")) <= 1000
    assert len(Tokens.open(here / "made", "val")) == 18 * 30 + 1


def test_a_vocabulary_too_small_for_the_data_says_what_to_set(here, capsys):
    write_input(here, "txt")
    assert main(["data", "input.txt", "--out", "made", "--workers", "1", *TRAINED]) == 0
    capsys.readouterr()
    words = fails(["train", "tiny.toml", "--run", "new", "--data.path", "made", "--until", "1 steps"], capsys)
    assert "the data's tokenizer has 300 ids, the model a vocabulary of 256: set --model.vocabulary 320" in words


# ------------------------------------------------------------------- bench


@pytest.fixture
def tiny(monkeypatch, tmp_path) -> Path:
    """A preset of two layers, and rates that need no measuring."""
    monkeypatch.setitem(PRESETS, "tiny", {"model": {"layers": 2, "width": 8, "head": 4, "vocabulary": 16}})
    monkeypatch.setattr(race, "measure_rates", lambda device: floor.Rates(1e9, 1e9))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_bench_shows_a_table_writes_rows_and_draws(tiny, capsys):
    asked = ["bench", "--preset", "tiny", "--part", "both", "--steps", "2", "--device", "cpu"]
    assert main([*asked, "--only", "SFNorMuon", "torch-adamw", "--out", "rows.jsonl", "--picture", "bars.svg"]) == 0
    said = capsys.readouterr().out
    assert "tiny, 12 matrices: " in said
    assert "tiny, all parameters: " in said
    assert said.count("SFNorMuon, four steps") == said.count("torch AdamW, fused") == 2
    assert said.count("SFNorMuon") == 4
    assert said.count("floor: ") == 2
    assert f"Picture: {tiny / 'bars.svg'}" in said
    assert "</svg>" in (tiny / "bars.svg").read_text()
    rows = [json.loads(line) for line in (tiny / "rows.jsonl").read_text().splitlines()]
    assert [(row["part"], row["contestant"]) for row in rows] == [
        (part, name)
        for part in ("matrices", "all")
        for name in ("SFNorMuon", "SFNorMuon, four steps", "torch AdamW, fused")
    ]


def test_bench_chooses_by_the_device(tiny, monkeypatch, capsys):
    """Without arguments: a preset that suits it, all parameters, and every optimizer that is installed."""
    seen = []

    def measure(name, part, among, device, *, dtype, steps, tell):
        seen.append((name, part, [c.name for c in among], device.type, str(dtype), steps))
        raise UserError("enough")

    monkeypatch.setattr(race, "measure", measure)
    assert fails(["bench"], capsys) == "enough"
    ((name, part, names, device, dtype, steps),) = seen
    assert name == {"cuda": "125M", "cpu": "2M"}[device]
    assert (part, dtype, steps) == ("all", "torch.float32", None)
    assert {"SFNorMuon", "SFAdamW", "paper's listing", "torch AdamW, fused", "torch Muon"} <= {*names}


def test_bench_says_what_is_not_installed_and_what_failed(tiny, monkeypatch, capsys):
    def broken(params):
        raise RuntimeError("no such kernel\nand more")

    among = [peers.Contestant("mine", SFAdamW, ours=True), peers.Contestant("broken", broken)]
    among.append(peers.Contestant("absent", broken, module="no_such_package"))
    monkeypatch.setattr(peers, "contestants", lambda device: among)
    assert main(["bench", "--preset", "tiny", "--steps", "1", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "RuntimeError: no such kernel" in said
    assert "and more" not in said
    assert "absent" not in said
    assert "left out, not installed: no_such_package" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--preset", "127M"], "there is no preset '127M'; did you mean '12M'?"),
        (["--only", "SFNorMoun"], "there is no contestant 'SFNorMoun'; did you mean 'SFNorMuon'?"),
        (["--only", ","], "there is no contestant ','"),
        (["--steps", "0"], "steps is 0, must be at least 1"),
        (["--picture", "bars.gif"], "the picture is 'bars.gif', must end in .svg, .png or .pdf"),
        (["--device", "cuda:99"], "device is 'cuda:99', which is not here"),
        (["--out", "none/rows.jsonl"], "none/rows.jsonl could not be written: No such file or directory"),
    ],
)
def test_bench_says_what_is_wrong_in_a_line(tiny, monkeypatch, arguments, words, capsys):
    given = arguments if "--only" in arguments else [*arguments, "--only", "SFAdamW"]
    given = given if "--preset" in arguments else ["--preset", "tiny", *given]
    monkeypatch.setattr(race, "_race", None)  # found before anything is measured
    assert main(["bench", "--steps", "1", *given]) == 1
    assert capsys.readouterr().err.startswith(f"error: {words}")


def test_bench_without_matplotlib(tiny, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    words = fails(["bench", "--preset", "tiny", "--picture", "bars.svg"], capsys)
    assert words == "the picture needs matplotlib: pip install matplotlib"


# ------------------------------------------------------------- as a process


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["--help"], ["sample", "RUN", "--count", "5"], ["train", "--help"]])
def test_a_reader_that_went_away_is_no_error(here, arguments, unbuffered):
    """As in `anytime sample RUN | head -1`; with a buffer, what is written fails at the very end."""
    arguments = [str(here / "run") if a == "RUN" else a for a in arguments]
    command = [sys.executable, "-m", "anytime.cli", *arguments]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": ROOT, "env": environment}
    with subprocess.Popen(command, **pipes) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


@pytest.mark.slow
def test_the_module_is_the_command(here):
    done = subprocess.run([sys.executable, "-m", "anytime.cli", "sampel"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert "did you mean 'sample'?" in done.stderr
