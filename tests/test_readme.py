"""What the README and the guides show runs as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import anytime

ROOT = Path(__file__).parents[1]


def blocks(path: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / path).read_text(), re.DOTALL)


def test_the_readmes_lines_run(capsys):
    (code,) = blocks("README.md")
    scope: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), scope)
    printed = capsys.readouterr().out
    assert "hidden matrix" in printed
    model, weights = scope["model"], scope["weights"]
    assert isinstance(model, nn.Module)
    assert not torch.equal(weights["0.weight"], model[0].weight)
    model.load_state_dict(weights)
    assert abs(model(torch.ones(1, 8)).item() - 8.0) < 4.0  # it has learnt to add, roughly


def test_the_guides_rules_are_legal():
    code = next(block for block in blocks("docs/guide.md") if "rules=" in block)

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(8, 24)
            self.proj = nn.Linear(128, 8)

    model = nn.Module()
    model.first = nn.Linear(4, 8)
    model.block = nn.Module()
    model.block.attn = Attention()
    model.adapter = nn.Linear(4, 4)
    scope = {"model": model, "anytime": anytime}
    exec(compile(code, "guide.md", "exec"), scope)
    plan = scope["optimizer"].plan
    assert plan["block.attn.qkv.weight"].layout.sizes == (8, 8, 8)
    assert plan["first.weight"].rule == "sf-adamw"
    assert plan["adapter.weight"].rate == 0.5


@pytest.mark.parametrize("document", ["README.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))])
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / document).read_text()):
        if "://" not in target:
            assert ((ROOT / document).parent / target).exists(), target


def test_the_readme_maps_every_file():
    text = (ROOT / "README.md").read_text() + (ROOT / "docs/extending.md").read_text()
    for path in (ROOT / "src/anytime").rglob("*.py"):
        assert path.name == "__init__.py" or path.name in text, path


def test_the_comparison_runs(tmp_path):
    command = [sys.executable, str(ROOT / "examples/compare.py"), "--quick", "--out", str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "one anytime run, at X" in done.stdout
    assert (tmp_path / "runs/report.html").stat().st_size > 1_000_000


def test_the_makefile_runs_the_readmes_commands():
    text = (ROOT / "README.md").read_text()
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    asked = re.findall(r"^make ([a-z-]+)", text, re.MULTILINE)
    assert {"demo", "test"} <= set(asked) <= set(targets)
