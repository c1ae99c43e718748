"""Who is measured: this library's optimizers, the paper's listing, and those of other libraries where installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..optim.sf_elementwise import SFAdamW
from ..optim.sf_spectral import SFNorMuon
from ..train.config import nearest
from ..train.errors import UserError

# ------------------------------------------------------------ the paper's listing


def newton_schulz(G: Tensor) -> Tensor:
    """The listing's polar factor: five steps in bfloat16, on one matrix."""
    tall = G.shape[0] > G.shape[1]
    X: Tensor = G.bfloat16()
    X = X / torch.linalg.matrix_norm(X).add(1e-7)
    X = X.mT if tall else X
    for _ in range(5):
        A = X @ X.mT
        B = A @ X
        X = 3.4445 * X - 4.7750 * B + 2.0315 * A @ B
    return X.mT if tall else X


class Listing(torch.optim.Optimizer):
    """The operations of the paper's listing: SF-NorMuon a matrix at a time, a norm read on the host for each."""

    def __init__(
        self,
        params: Sequence[Tensor],
        lr: float = 0.005,
        betas: tuple[float, float] = (0.9, 0.95),
        momentum: float = 0.8,
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        warmup_steps: int = 2000,
        polar: Callable[[Tensor], Tensor] = newton_schulz,
    ) -> None:
        self.polar, self.taken, self.weight_sum = polar, 0, 0.0
        options = {"lr": lr, "betas": betas, "momentum": momentum, "eps": eps}
        super().__init__(params, {**options, "weight_decay": weight_decay, "warmup_steps": warmup_steps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.taken += 1
        for group in self.param_groups:
            beta, beta2 = group["betas"]
            eta = group["lr"] * min(1.0, self.taken / group["warmup_steps"])
            self.weight_sum += eta**2
            c = eta**2 / self.weight_sum
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"z": p.clone(), "mom": torch.zeros_like(p), "v": torch.zeros_like(p[:, 0]).float()}
                z, v, M = state["z"], state["v"], state["mom"]
                M.mul_(group["momentum"]).add_(p.grad, alpha=1 - group["momentum"])
                P = self.polar(M).to(p.dtype)
                v.mul_(beta2).add_((P * P).mean(dim=1).float(), alpha=1 - beta2)
                P = P / (v.sqrt() + group["eps"]).to(P.dtype).unsqueeze(1)
                scale = 0.2 * eta * math.sqrt(p.numel()) / max(1e-12, float(P.float().norm()))
                x = (p - (1 - beta) * z) / beta
                z.sub_(z, alpha=eta * group["weight_decay"])
                z.sub_(P, alpha=scale)
                p.copy_((1 - beta) * z + beta * ((1 - c) * x + c * z))


# -------------------------------------------------------------- the contestants


@dataclass(frozen=True)
class Contestant:
    """An optimizer by name: `make` gets named parameters if it is ours, else bare ones.

    With `matrices_only`, another optimizer, torch's fused AdamW, takes the rest. `module` is what must be installed.
    The floor that a spectral one is compared with is that of SF-NorMuon by the polar factor `polar`.
    """

    name: str
    make: Callable[[Any], Any]
    module: str = ""
    ours: bool = False
    spectral: bool = True
    matrices_only: bool = False
    polar: str = "newton-schulz"

    @property
    def version(self) -> str | None:
        """The peer's, where its package says."""
        try:
            return importlib.metadata.version({"muon": "muon-optimizer"}.get(self.module, self.module))
        except (importlib.metadata.PackageNotFoundError, ValueError):  # none, or no package
            return None


class Recorded:
    """Replays an optimizer's step from a graph of one's own, as one does whose gradients stay where they are."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.state = optimizer, optimizer.state
        self.graph: Any = None
        self.before = 2  # steps outside of it

    def step(self) -> None:
        if self.before:
            self.before -= 1
            self.optimizer.step()
            return
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(self.graph):
                self.optimizer.step()
        self.graph.replay()


def fused_adamw(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, fused=True)


def contestants(device: torch.device) -> list[Contestant]:
    """Ours first, then the peers, installed or not."""
    cuda = device.type == "cuda"

    def peer(name: str, module: str, make: Callable[[Any, list[Tensor]], Any], *, spectral: bool = True) -> Contestant:
        def build(params: list[Tensor]) -> Any:
            return make(importlib.import_module(module), params)

        return Contestant(name, build, module, spectral=spectral, matrices_only=spectral)

    def in_training(optimizer: Any) -> Any:
        optimizer.train()
        return optimizer

    def muon_group(params: list[Tensor]) -> list[dict[str, Any]]:
        return [{"params": params, "use_muon": True}]

    def listing(params: list[Tensor]) -> Listing:
        return Listing(params, polar=torch.compile(newton_schulz) if cuda else newton_schulz)

    def replayed(module: Any, params: list[Tensor]) -> Any:
        wrap = importlib.import_module("dion.cuda_graph").CudaGraphOptimizer
        return wrap(module.NorMuon(params, use_triton=True), warmup_steps=3)

    def own(name: str, make: Callable[..., Any], *, spectral: bool = True, **options: Any) -> Contestant:
        polar = options.get("polar", "newton-schulz")
        return Contestant(name, lambda named: make(named, **options), ours=True, spectral=spectral, polar=polar)

    def recorded(named: Any, **options: Any) -> Recorded:
        return Recorded(SFNorMuon(named, **options))

    four: dict[str, Any] = {"polar": "polar-express-4"}
    graphs = [
        own("SFNorMuon, graph", SFNorMuon, graph=True),
        own("SFNorMuon, own graph", recorded),
        own("SFNorMuon, four steps, graph", SFNorMuon, graph=True, **four),
        own("SFNorMuon, four steps, own graph", recorded, **four),
        own("SFAdamW, graph", SFAdamW, spectral=False, graph=True),
    ]
    on_cuda = [
        peer("pytorch_optimizer Muon, Gram", "pytorch_optimizer",
             lambda m, ps: m.Muon(muon_group(ps), ns_method="gram_newton_schulz")),
        peer("dion NorMuon, Triton", "dion", lambda m, ps: m.NorMuon(ps, use_triton=True)),
        peer("dion NorMuon, Triton, graph", "dion", replayed),
    ]  # fmt: skip
    return [
        *(graphs if cuda else []),
        own("SFNorMuon", SFNorMuon),
        own("SFNorMuon, four steps", SFNorMuon, **four),
        own("SFAdamW", SFAdamW, spectral=False),
        Contestant("paper's listing", listing, matrices_only=True),
        Contestant("torch AdamW, fused", fused_adamw, spectral=False),
        peer("torch Muon", "torch", lambda m, ps: m.optim.Muon(ps)),
        peer("schedulefree AdamW", "schedulefree", lambda m, ps: in_training(m.AdamWScheduleFree(ps)), spectral=False),
        peer("muon Muon", "muon", lambda m, ps: m.SingleDeviceMuon(ps)),
        peer("pytorch_optimizer Muon", "pytorch_optimizer", lambda m, ps: m.Muon(muon_group(ps))),
        peer("pytorch_optimizer ScheduleFree(NorMuon)", "pytorch_optimizer",
             lambda m, ps: in_training(m.ScheduleFreeWrapper(m.NorMuon(muon_group(ps))))),
        peer("heavyball Muon", "heavyball", lambda m, ps: m.Muon(ps, consume_grad=False)),
        peer("dion NorMuon", "dion", lambda m, ps: m.NorMuon(ps)),
        *(on_cuda if cuda else []),
    ]  # fmt: skip


def chosen(among: Sequence[Contestant], only: Sequence[str]) -> tuple[list[Contestant], list[str]]:
    """Those whose names contain one of `only` (all if none is given), and the packages among them that are missing."""

    def bare(name: str) -> str:
        return re.sub("[^a-z0-9]", "", name.lower())

    for said in only:
        if not bare(said) or not any(bare(said) in bare(c.name) for c in among):
            names = [c.name for c in among]
            near = nearest(said, [*names, *(word for name in names for word in re.split("[ ,()]+", name))])
            raise UserError(f"there is no contestant {said!r}{near}; there are {'; '.join(names)}")
    wanted = [c for c in among if not only or any(bare(said) in bare(c.name) for said in only)]
    missing = {c.module for c in wanted if c.module and importlib.util.find_spec(c.module) is None}
    found = [c for c in wanted if c.module not in missing]
    if not found:
        raise UserError(f"nothing to measure: {', '.join(sorted(missing))} is not installed")
    return found, sorted(missing)
