"""The rooms of the package: which file may import which, and what importing it brings along."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import anytime
import anytime.train

ROOT = Path(anytime.__file__).parent
#: A file imports from its own room or from those before it.
ROOMS = (
    "version",
    "core.kernels",
    "core",
    "routing",
    "distributed",
    "storage",
    "optim",
    "batch_norm",
    "diagnostics",
    "theory",
    "train",
    "experiments",
    "integrations",
    "bench",
    "studies",
    "commands",
    "cli",
    "__main__",
)


def module_name(path: Path, root: Path) -> str:
    """Within the package: "" for its __init__, "core.polar" for core/polar.py."""
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix("__init__").rstrip(".")


def run_time_nodes(node: ast.AST):
    """All nodes but what stands under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield other
                yield from run_time_nodes(other)
            continue
        yield child
        yield from run_time_nodes(child)


def imports(path: Path, root: Path) -> list[str]:
    """Full names of what a file imports at run time, inside functions too: "torch.nn", "anytime.core.polar"."""
    package = "anytime." + module_name(path, root) if module_name(path, root) else "anytime"
    if path.name != "__init__.py":
        package = package.rpartition(".")[0]
    found = []
    for node in run_time_nodes(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            found += [f"{base}.{alias.name}" for alias in node.names]
    return found


def arrows(root: Path = ROOT) -> dict[str, set[str]]:
    """Each file of the package to the files of it that it imports."""
    files = {module_name(path, root): path for path in sorted(root.rglob("*.py"))}
    result: dict[str, set[str]] = {}
    for name, path in files.items():
        result[name] = set()
        for target in imports(path, root):
            if target.split(".")[0] != "anytime":
                continue
            inner = target.removeprefix("anytime").removeprefix(".")
            while inner not in files:  # a name inside a file
                inner = inner.rpartition(".")[0]
            if inner != name:
                result[name].add(inner)
    return result


def room(name: str) -> int | None:
    return next((i for i, r in enumerate(ROOMS) if name == r or name.startswith(r + ".")), None)


def wrong_arrows(found: dict[str, set[str]]) -> list[str]:
    """What imports from a later room, from the package's __init__, or stands in no room at all."""
    wrong = []
    for name, targets in found.items():
        if name == "":
            continue
        here = room(name)
        if here is None:
            wrong.append(f"{name} stands in no room")
            continue
        wrong += [f"{name} imports {t or 'anytime'}" for t in sorted(targets) if room(t) is None or room(t) > here]
    return wrong


def cycles(found: dict[str, set[str]]) -> list[str]:
    def reach(name: str, seen: set[str]) -> set[str]:
        for target in found[name] - seen:
            seen.add(target)
            reach(target, seen)
        return seen

    return sorted(name for name in found if name in reach(name, set()))


def test_files_import_from_the_rooms_above():
    found = arrows()
    assert found["optim.base"] >= {"core.direction", "routing"}
    assert wrong_arrows(found) == []


def test_no_file_is_in_a_cycle():
    assert cycles(arrows()) == []


@pytest.mark.parametrize(
    ("files", "wrong", "cyclic"),
    [
        ({"core/a.py": "from ..routing import x", "routing.py": ""}, ["core.a imports routing"], []),
        ({"core/a.py": "def f():\n    from .. import optim", "optim/__init__.py": ""}, ["core.a imports optim"], []),
        ({"routing.py": "import anytime.train.loop", "train/loop.py": ""}, ["routing imports train.loop"], []),
        ({"routing.py": "from . import Plan"}, ["routing imports anytime"], []),
        ({"core/a.py": "from .b import x", "core/b.py": "from . import a"}, [], ["core.a", "core.b"]),
        ({"core/kernels/a.py": "from ..b import x", "core/b.py": ""}, ["core.kernels.a imports core.b"], []),
        ({"helpers.py": ""}, ["helpers stands in no room"], []),
        (
            {"core/a.py": "if TYPE_CHECKING:\n    from ..optim.b import x\nelse:\n    x = 1", "optim/b.py": ""},
            [],
            [],
        ),
        ({"optim/b.py": "from ..core.a import x\nfrom ..routing import y", "core/a.py": "", "routing.py": ""}, [], []),
    ],
)
def test_the_check_sees_what_is_wrong(tmp_path, files, wrong, cyclic):
    for name in ("__init__.py", "core/__init__.py", *files):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files.get(name, ""), encoding="utf-8")
    assert wrong_arrows(arrows(tmp_path)) == wrong
    assert cycles(arrows(tmp_path)) == cyclic


def test_core_knows_tensors_and_nothing_else():
    """torch, the standard library and core itself; kernels may add triton."""
    for path in sorted((ROOT / "core").rglob("*.py")):
        for target in imports(path, ROOT):
            top = target.split(".")[0]
            kernel = module_name(path, ROOT).startswith("core.kernels")
            allowed = top in {"torch", *sys.stdlib_module_names, *(["triton"] if kernel else [])}
            assert allowed or target.startswith("anytime.core."), f"{path.name} imports {target}"


def test_importing_brings_torch_alone():
    """Nothing but what torch brings itself; typing_extensions is one of its requirements."""
    code = "import sys, torch, typing_extensions; old = {*sys.modules}; import anytime; print(*{*sys.modules} - old)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    brought = {name.partition(".")[0] for name in done.stdout.split()}
    assert "anytime" in brought
    assert brought - {"anytime", "torch", *sys.stdlib_module_names} == set()


@pytest.mark.parametrize("module", ["anytime.train", "anytime.cli"])
def test_the_training_system_needs_numpy_and_safetensors_besides(module):
    """Its command line, display and report import what they need when they are used."""
    base = "import sys, torch, numpy, safetensors.torch, torch.nn.attention.flex_attention, torch.utils.checkpoint"
    base += ", torch.distributed.checkpoint, torch.distributed.fsdp, torch.distributed.tensor.parallel"
    base += ", torch.distributed.checkpoint"
    code = f"{base}; old = {{*sys.modules}}; import {module}; print(*{{*sys.modules}} - old)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    brought = {name.partition(".")[0] for name in done.stdout.split()}
    assert brought - {"anytime", "torch", "numpy", "safetensors", *sys.stdlib_module_names} == set()


def test_the_core_of_training_does_not_know_its_edge():
    found = arrows()
    for name in ("config", "model", "build", "checkpoint", "loop", "runs", "evaluate", "batches", "shards", "data"):
        edge = {"train.display", "train.report", "train.sinks", "train.prepare", "cli"}
        assert found[f"train.{name}"] & edge == set(), name


def test_no_library_file_prints_or_runs_text():
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("print", "eval", "exec"), f"{path}:{node.lineno}"
            if isinstance(node, ast.ExceptHandler):
                assert node.type is not None, f"{path}:{node.lineno}"
        assert "pickle" not in {name.partition(".")[0] for name in imports(path, ROOT)}, path


@pytest.mark.parametrize("name", anytime.train.__all__)
def test_public_names_of_training_are_documented(name):
    assert name == "PRESETS" or (getattr(anytime.train, name).__doc__ or "").strip()


@pytest.mark.parametrize("name", anytime.__all__)
def test_public_names_are_documented(name):
    """By a docstring of their own, not one inherited."""
    thing = getattr(anytime, name)
    assert (thing.__doc__ or "").strip()
    assert not inspect.isclass(thing) or "__doc__" in vars(thing)


def test_all_is_complete():
    """What the package's __init__ imports is public, once each."""
    assert len(set(anytime.__all__)) == len(anytime.__all__)
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    imported = {a.asname or a.name for node in tree.body if isinstance(node, ast.ImportFrom) for a in node.names}
    assert imported == set(anytime.__all__)
