"""The named rules that a parameter group can follow."""

from __future__ import annotations

from ..core.direction import Adam, Direction, Gradient, Shampoo, Spectral, Steepest

RULES: dict[str, Direction] = {
    "normuon": Spectral(),
    "muon": Spectral(),
    "spectral-sgd": Spectral(first_gradient=True),
    "spectral-descent": Steepest("spectral"),
    "shampoo": Shampoo(),
    "sf-adamw": Adam(),
    "adamw": Adam(first_moment=True),
    "sf-plus": Adam(first_moment=True),
    "sgd": Gradient(),
    "sign": Steepest("max"),
    "lion": Steepest("max"),
}
#: Rules that do not read a parameter as matrices.
ELEMENTWISE = ("sf-adamw", "adamw", "sf-plus", "sgd", "sign", "lion")
