"""Every polar factor and every form of the polynomials: how near to what it stands for, and how long it takes.

    python benchmarks/polar.py --device cuda --dtype bfloat16 float32 --out results/polar.jsonl

Polynomials are compared with themselves in float64, the SVD and the low-rank factor with the exact polar factor; an
error is of the Frobenius norm. `form` is the way the polynomial is computed; the library's own choice has a star.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
from anytime.core.polar import (
    COEFFICIENTS,
    _on_gram,
    _singly,
    _singly_on_gram,
    _whole,
    iteration,
    polar,
    svd_polar,
    unit_norm,
)

FORMS = {"whole": _whole, "Gram": _on_gram, "singly": _singly, "singly, Gram": _singly_on_gram}
SIDES = {"cpu": ((256, 256), (384, 384), (1536, 384), (384, 1536)), "cuda": ((768, 768), (3072, 768), (5120, 5120))}


def inputs(m: int, n: int, device: str) -> Iterator[tuple[str, Tensor]]:
    """Families of input, in float64."""
    draw = torch.Generator(device).manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, device=device, dtype=torch.float64)

    M = randn(m, n)
    yield "random", M
    P = svd_polar(M)
    sigma = torch.logspace(0, -4, min(m, n), device=device, dtype=torch.float64)
    yield "1 to 1e-4", P * sigma if m > n else sigma[:, None] * P
    yield "rank one, 1e-3", randn(m, 1) @ randn(1, n) / (m * n) ** 0.5 + 1e-3 * P


def factors(
    m: int, n: int, dtypes: list[str], device: str
) -> Iterator[tuple[str, str, str, Callable[[Tensor], Tensor]]]:
    """(method, form, precision, function)."""
    for name, coefficients in COEFFICIENTS.items():
        for precision in dtypes:
            dtype = getattr(torch, precision)
            own = iteration(min(m, n), max(m, n), dtype, torch.device(device))
            for form, iterate in FORMS.items():

                def factor(M: Tensor, c: Any = coefficients, dtype: Any = dtype, iterate: Any = iterate) -> Tensor:
                    X = unit_norm(M, c.safety).to(dtype)
                    return (iterate(X.mT, c).mT if m > n else iterate(X, c)).to(M.dtype)

                yield name, form + "*" * (iterate is own), precision, factor
    for name in ("svd", "low-rank"):
        yield name, "", "float32", lambda M, name=name: polar(M, name)


def seconds(factor: Callable[[Tensor], Tensor], M: Tensor, rounds: int) -> float:
    times = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        factor(M)
        if M.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description="Error and time of the polar factors.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], help="precisions of the polynomials")
    parser.add_argument("--sides", nargs="+", default=None, metavar="MxN")
    parser.add_argument("--batch", type=int, default=4, help="matrices at once")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None, help="a file of rows to append to")
    arguments = parser.parse_args()
    device = arguments.device
    sides = [tuple(map(int, s.split("x"))) for s in arguments.sides or ()] or SIDES[device]
    print("m x n | method | form | precision | ms | error: random | 1 to 1e-4 | rank one, 1e-3")
    for m, n in sides:
        families = dict(inputs(m, n, device))
        exact = {(None, kind): svd_polar(M) for kind, M in families.items()}
        exact |= {(c, kind): polar(M, c, torch.float64) for c in COEFFICIENTS for kind, M in families.items()}
        many = families["random"].float().expand(arguments.batch, m, n).contiguous()
        for method, form, precision, factor in factors(m, n, arguments.dtype, device):
            errors = {}
            for kind, M in families.items():
                expected = exact[method if method in COEFFICIENTS else None, kind]
                P = factor(M.float()[None])[0].double()
                errors[kind] = float((P - expected).norm() / expected.norm())
            took = seconds(factor, many, arguments.rounds)
            row = {"m": m, "n": n, "batch": arguments.batch, "method": method, "form": form, "precision": precision}
            row |= {"ms": round(1e3 * took, 3), "errors": errors, "torch": torch.__version__}
            row["device"] = (
                torch.cuda.get_device_name() if device == "cuda" else f"cpu, {torch.get_num_threads()} threads"
            )
            print(
                f"{m}x{n} | {method} | {form} | {precision} | {row['ms']} | "
                + " | ".join(f"{error:.1e}" for error in errors.values()),
                flush=True,
            )
            if arguments.out is not None:
                with arguments.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
