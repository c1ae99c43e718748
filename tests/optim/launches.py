"""Compiles every kernel that a step would launch, for the GPU architecture named (80, 90, …), and prints a line of JSON
for each: [name, bytes of machine code, bytes of shared memory]. None is there, so nothing is launched."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import nn
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

import anytime
from anytime.optim import fused

SHAPES = [(8, 8), (512, 1024), (1024, 512), (129, 127), (64,)]  # square and not, on the Gram matrix and not; Adam's
OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SFNorMuon", {}),
    ("SFNorMuon", {"recipe": "anytime", "polar": "polar-express-4"}),
    ("SFNorMuon", {"dtype": torch.bfloat16}),
    ("SFMuon", {"cautious": True, "polar_dtype": torch.bfloat16, "decay_at": "y"}),
    ("NorMuon", {}),
    ("AdamW", {}),
]


class Absent:
    """A GPU to compile for."""

    def __init__(self, architecture: int) -> None:
        self.target = GPUTarget("cuda", architecture, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


def main() -> None:
    driver.set_active(Absent(int(sys.argv[1])))
    fused.available = lambda device: True
    run, compiled = JITFunction.run, {}

    def compiled_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        compiled[kernel.hash] = (self.fn.__name__, len(kernel.asm["cubin"]), kernel.metadata.shared)
        return kernel

    JITFunction.run = compiled_only
    for name, options in OPTIMIZERS:
        dtype = options.pop("dtype", torch.float32)
        params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
        for p in params:
            p.grad = torch.zeros_like(p)
        getattr(anytime, name)(params, lr=0.01, **options).step()
    for found in compiled.values():
        print(json.dumps(found))


if __name__ == "__main__":
    main()
