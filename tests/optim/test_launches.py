"""What the interpreter runs may still not compile, or need more memory than a GPU has: for GPUs that are not here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from anytime.core.kernels import passes, products, table

#: Kilobytes of shared memory a program may have, by architecture (CUDA's programming guide, compute capabilities).
SHARED = {80: 163, 89: 99, 90: 227, 100: 227, 120: 99}
#: Launched by a step.
KERNELS = {"finite", "tick", "momentum", "settle", "rows", "move", "adam", "_symmetric"}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", SHARED)
def test_every_kernel_of_a_step_compiles(architecture, tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(Path(__file__).with_name("launches.py")), str(architecture)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {name for name, _, _ in found} == KERNELS
    assert all(code > 0 for _, code, _ in found)
    assert max(shared for _, _, shared in found) <= SHARED[architecture] * 1024
    assert {*vars(table), *vars(passes), *vars(products)} >= KERNELS
