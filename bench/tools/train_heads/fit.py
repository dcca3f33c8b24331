"""The training loop: AdamW, a cosine by time or steps, clipped gradients, curves."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

# of the whole
WARM_UP = 0.04
LOG_EVERY = 20


@dataclass(frozen=True)
class Recipe:
    """How a model is optimised, and for how long.

    The rate rises to ``lr`` and falls by a cosine, over so many seconds, or ``steps``: two runs of
    one seed then do the same. Matrices decay by ``weight_decay``. The held-out rows are looked at
    ``evaluations`` times, and at the end.
    """

    lr: float
    seconds: float
    steps: int | None = None
    weight_decay: float = 0.01
    evaluations: int = 8

    def done(self, step: int, elapsed: float) -> float:
        """Return how much of the training is over, 1 at its end."""
        wanted, found = (self.seconds, elapsed) if self.steps is None else (self.steps, step)
        return found / wanted if wanted else 1.0

    def optimizer(self, model: torch.nn.Module) -> torch.optim.AdamW:
        """Return AdamW for a model."""
        params = [p for p in model.parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in params if p.ndim > 1], "weight_decay": self.weight_decay},
            {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95), fused=params[0].is_cuda)


def fit(
    model: torch.nn.Module,
    loss_of: Callable[[int], Tensor],
    evaluate: Callable[[], dict[str, Any]],
    recipe: Recipe,
) -> dict[str, Any]:
    """Train a model in place and return the curves.

    ``loss_of`` returns the loss of a step, by its number, and ``evaluate`` what held-out rows show.
    """
    optimizer, start, step = recipe.optimizer(model), time.monotonic(), 0
    losses: list[dict[str, Any]] = []
    held_out: list[dict[str, Any]] = []

    def look() -> None:
        found = {"step": step, "seconds": round(time.monotonic() - start, 1)} | evaluate()
        held_out.append(found)
        print(found, flush=True)

    while (done := recipe.done(step, time.monotonic() - start)) < 1:
        if done * recipe.evaluations >= len(held_out):
            look()
        for group in optimizer.param_groups:
            rise = (done + 1e-3) / WARM_UP
            group["lr"] = recipe.lr * min(rise, 0.5 * (1 + math.cos(math.pi * done)))
        loss = loss_of(step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % LOG_EVERY == 0:
            losses.append({"step": step, "loss": round(loss.item(), 5)})
        step += 1
    look()
    return {"steps": step, "losses": losses, "held_out": held_out, "recipe": vars(recipe)}
