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
class TargetRecipe:
    """How the target is optimised."""

    lr: float = 2.5e-3
    weight_decay: float = 0.1
    dropout: float = 0.1
    eval_seconds: float = 12.0


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
    optimizer = optimizer_for(model, recipe.lr, recipe.weight_decay)
    autocast = torch.autocast(train.device.type, torch.bfloat16)
    lengths = [size.max_positions] + [size.seq_len] * (LONG_EVERY - 1)

    def backward(step: int) -> Tensor:
        length = lengths[step % LONG_EVERY]
        rows = windows(train, size.batch_tokens // length, length + 1)
        with autocast:
            loss = lm_loss(target, rows, recipe.dropout)
        loss.backward()
        return loss.detach()

    # both shapes compile before the clock starts
    warm_up = time.monotonic()
    float(backward(0) + backward(1))
    optimizer.zero_grad(set_to_none=True)
    print(f"target: warm-up {time.monotonic() - warm_up:.1f} s", flush=True)
    train_curve, held_curve, best = Curve(), Curve(), (math.inf, {})
    last_eval, step = 0.0, 0

    def evaluate(elapsed: float) -> None:
        nonlocal best
        with autocast:
            nats, count = stream_nll(plain, held_out, size.seq_len)
        held_curve.add(step, elapsed, nats / count)
        print(f"target {step} {elapsed:.0f} s held-out {nats / count:.4f}", flush=True)
        if nats / count < best[0]:
            best = (nats / count, copy.deepcopy(model.state_dict()))

    for step, elapsed in timed_steps(seconds, optimizer):
        loss = backward(step)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % LOG_EVERY == 0:
            train_curve.add(step, elapsed, loss.item())
        if elapsed - last_eval > recipe.eval_seconds:
            evaluate(elapsed)
            last_eval = elapsed
    evaluate(seconds)
    model.load_state_dict(best[1])
    tokens = (step + 1) * size.batch_tokens
    return {
        "train": vars(train_curve), "held_out": vars(held_curve), "tokens_seen": tokens,
        "epochs": tokens / len(train), "recipe": vars(recipe),
    }  # fmt: skip
