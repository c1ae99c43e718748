"""Measured gradient norms and function values beside the paper's bounds, as Markdown tables.

SF-SpectralSGD at the corollaries' (μ_T, η_T) on a quadratic, a factorization and a ridge softmax, with and without
noise; SF-SGD at η = D/(G √T) on the convex ones.
"""

from __future__ import annotations

import argparse

from anytime import theory


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def spectral(horizons: list[int], norm: str, runs: int) -> str:
    rows = []
    for problem in (theory.Quadratic(), theory.Factorization(), theory.Softmax()):
        for batch in (None, 4):
            for beta in (0.0, 0.5, 0.9):
                for T in horizons:
                    found = theory.measure(problem, T, norm=norm, beta=beta, batch=batch, runs=runs if batch else 1)
                    setting = [type(problem).__name__, "none" if batch is None else f"B = {batch}", f"{beta:g}", f"{T}"]
                    numbers = found.mu, found.eta, found.minimum, found.average, found.sharper.total, found.bound.total
                    rows.append(setting + [f"{number:.3g}" for number in numbers])
    return table(["problem", "noise", "β", "T", "μ_T", "η_T", "least", "average", "sharper", "bound"], rows)


def sgd(horizons: list[int], runs: int) -> str:
    rows = []
    for problem in (theory.AbsoluteError(), theory.Quadratic(), theory.Softmax()):
        for beta in (0.0, 0.9, 1.0):
            for T in horizons:
                found = theory.measure_sgd(problem, T, beta=beta, batch=1, runs=runs)
                numbers = found.eta, found.gap, found.bound
                rows.append([type(problem).__name__, f"{beta:g}", f"{T}", *(f"{number:.3g}" for number in numbers)])
    return table(["problem", "β", "T", "η", "F(x_T) − F*", "bound"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measured averages of gradient norms beside the paper's bounds.")
    parser.add_argument("--norm", choices=["frobenius", "spectral"], default="frobenius", help="of the smoothness")
    parser.add_argument("--horizons", type=int, nargs="+", default=[100, 1000], help="T, each a run of its own")
    parser.add_argument("--runs", type=int, default=8, help="over which the noise is averaged")
    arguments = parser.parse_args()
    print(f"SF-SpectralSGD, nuclear norm of ∇f(Y_t), {arguments.norm} smoothness\n")
    print(spectral(arguments.horizons, arguments.norm, arguments.runs))
    print("\nSF-SGD, one stochastic gradient a step\n")
    print(sgd(arguments.horizons, arguments.runs))


if __name__ == "__main__":
    main()
