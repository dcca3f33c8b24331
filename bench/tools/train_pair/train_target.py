"""Train the target on random windows of the corpus, for a given time."""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from .target import DenseTarget, block

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import Qwen3ForCausalLM

    from .sizes import PairSize

LOG_EVERY = 50
# every eighth step is one of full-length rows, so that late positions are trained too
LONG_EVERY = 8


@dataclass(frozen=True)
class Recipe:
    """How a model is optimised."""

    lr: float
    weight_decay: float
    eval_seconds: float


@dataclass(frozen=True)
class TargetRecipe(Recipe):
    """How the target is."""

    lr: float = 2.5e-3
    weight_decay: float = 0.1
    eval_seconds: float = 12.0
    dropout: float = 0.1


@dataclass
class Curve:
    """Loss curves as plain lists, for ``metrics.json``."""

    step: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)

    def add(self, step: int, seconds: float, loss: float) -> None:
        """Append one point."""
        self.step.append(step)
        self.seconds.append(round(seconds, 2))
        self.loss.append(round(loss, 5))


def optimizer_for(model: torch.nn.Module, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves norms alone."""
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=params[0].is_cuda)


def timed_steps(seconds: float, optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, float]]:
    """Yield step and elapsed seconds until time is up; the rate warms up, then decays by cosine."""
    peak = [group["lr"] for group in optimizer.param_groups]
    start, step = time.monotonic(), 0
    while (elapsed := time.monotonic() - start) < seconds:
        done = elapsed / seconds
        scale = min(done / 0.02, 0.5 * (1 + math.cos(math.pi * done)))
        for group, lr in zip(optimizer.param_groups, peak, strict=True):
            group["lr"] = lr * scale
        yield step, elapsed
        step += 1


def fit(
    model: torch.nn.Module,
    loss_of: Callable[[int], Tensor],
    evaluate: Callable[[float], float],
    *,
    seconds: float,
    recipe: Recipe,
) -> dict:
    """Train ``model`` in place for some seconds and return the curves.

    Parameters
    ----------
    model : Module
        What is trained.
    loss_of : callable
        Returns the loss of a step, by its number.
    evaluate : callable
        Returns the held-out loss; called at the start, every ``recipe.eval_seconds`` and at the
        end, with the seconds so far.
    seconds, recipe : float, Recipe
        How long, and how.
    """
    optimizer = optimizer_for(model, recipe.lr, recipe.weight_decay)
    train_curve, held_curve, last_eval = Curve(), Curve(), -math.inf
    for step, elapsed in timed_steps(seconds, optimizer):
        if elapsed - last_eval > recipe.eval_seconds:
            held_curve.add(step, elapsed, evaluate(elapsed))
            last_eval = elapsed
        loss = loss_of(step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % LOG_EVERY == 1:
            train_curve.add(step, elapsed, loss.item())
    held_curve.add(step + 1, seconds, evaluate(seconds))
    return {
        "train": vars(train_curve), "held_out": vars(held_curve), "steps": step + 1,
        "recipe": vars(recipe),
    }  # fmt: skip


def windows(stream: Tensor, rows: int, length: int) -> Tensor:
    """Draw ``[rows, length]`` random windows of the token stream ``[N]``."""
    starts = torch.randint(len(stream) - length, (rows, 1), device=stream.device)
    return stream[starts + torch.arange(length, device=stream.device)]


def lm_loss(target: DenseTarget, rows: Tensor, dropout: float) -> Tensor:
    """Mean next-token cross entropy over ``rows [B, T + 1]``, in nats."""
    hidden, _ = target.forward(rows[:, :-1], dropout)
    return F.cross_entropy(target.logits(hidden).float().flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def stream_nll(target: DenseTarget, stream: Tensor, length: int) -> tuple[float, int]:
    """Total nats and token count over the stream in separate rows of ``length`` tokens."""
    rows = stream[: (len(stream) - 1) // length * length + 1]
    inputs, labels = rows[:-1].view(-1, length), rows[1:].view(-1, length)
    total = torch.zeros((), device=stream.device, dtype=torch.float64)
    for x, y in zip(inputs.split(32), labels.split(32), strict=True):
        logits = target.logits(target.forward(x)[0])
        total += F.cross_entropy(logits.float().flatten(0, 1), y.flatten(), reduction="sum")
    return total.item(), labels.numel()


def compiled_block() -> Callable[..., Tensor]:
    """Compile `block` once; static shapes, since training uses just two."""
    return torch.compile(block, dynamic=False)


def train_target(
    model: Qwen3ForCausalLM,
    train: Tensor,
    held_out: Tensor,
    *,
    size: PairSize,
    seconds: float,
    compile_blocks: bool,
    recipe: TargetRecipe | None = None,
) -> dict:
    """Train ``model`` in place to its best held-out loss and return the curves."""
    recipe = recipe or TargetRecipe()
    target = DenseTarget(model, size.rope_theta, compiled_block() if compile_blocks else block)
    plain = DenseTarget(model, size.rope_theta)
    autocast = torch.autocast(train.device.type, torch.bfloat16)
    lengths = [size.max_positions] + [size.seq_len] * (LONG_EVERY - 1)
    best: tuple[float, dict] = (math.inf, {})

    def loss_of(step: int) -> Tensor:
        length = lengths[step % LONG_EVERY]
        rows = windows(train, size.batch_tokens // length, length + 1)
        with autocast:
            return lm_loss(target, rows, recipe.dropout)

    def evaluate(elapsed: float) -> float:
        nonlocal best
        with autocast:
            nats, count = stream_nll(plain, held_out, size.seq_len)
        print(f"target {elapsed:.0f} s held-out {nats / count:.4f}", flush=True)
        if nats / count < best[0]:
            best = (nats / count, copy.deepcopy(model.state_dict()))
        return nats / count

    # both shapes compile before the clock starts
    warm_up = time.monotonic()
    for step in (0, 1):
        loss_of(step).backward()
    model.zero_grad(set_to_none=True)
    print(f"target: warm-up {time.monotonic() - warm_up:.1f} s", flush=True)
    curves = fit(model, loss_of, evaluate, seconds=seconds, recipe=recipe)
    model.load_state_dict(best[1])
    tokens = curves["steps"] * size.batch_tokens
    return curves | {"tokens_seen": tokens, "epochs": tokens / len(train)}
