"""BatchNorm at the average: its running statistics follow the weights that ran, which were Y."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


@torch.no_grad()
def recalibrate_batch_norm(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    max_batches: int | None = None,
) -> None:
    """Measures the running mean and variance of every BatchNorm anew, for the weights that the model holds now.

        with optimizer.averaged():
            anytime.recalibrate_batch_norm(model, loader)
            evaluate(model)

    Each statistic becomes the plain mean over the batches. Only BatchNorm layers run in training mode (dropout stays
    off), and every module's mode is restored. A batch is a tensor, or a tuple or list whose first entry is the input,
    moved to the model's device; `forward` runs any other kind. Without a BatchNorm the loader is not read.
    """
    layers = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
    if not layers:
        return
    if max_batches is not None and max_batches < 1:
        raise ValueError(f"max_batches is {max_batches}; it must be None or at least 1")
    modes = {module: module.training for module in model.modules()}
    momenta = {layer: layer.momentum for layer in layers}
    before = [[b.clone() for b in layer.buffers()] for layer in layers]
    seen = 0
    try:
        model.eval()
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # a cumulative mean
            layer.train()
        for batch in loader:
            _run(model, batch) if forward is None else forward(model, batch)
            seen += 1
            if seen == max_batches:
                break
        if not seen:
            raise ValueError("recalibrate_batch_norm: the loader gave no batch; the statistics are as they were")
    except BaseException:
        for layer, buffers in zip(layers, before, strict=True):
            for buffer, old in zip(layer.buffers(), buffers, strict=True):
                buffer.copy_(old)
        raise
    finally:
        for layer, momentum in momenta.items():
            layer.momentum = momentum
        for module, mode in modes.items():
            module.training = mode


def _run(model: nn.Module, batch: Any) -> None:
    inputs = batch[0] if isinstance(batch, tuple | list) else batch
    if not isinstance(inputs, Tensor):
        raise TypeError(
            f"a batch is {type(batch).__name__}: pass forward=lambda model, batch: … to run the model on it"
        )
    device = next(model.parameters()).device
    model(inputs.to(device))
