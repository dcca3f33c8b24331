"""What the target is worth: bits per byte, and repetition."""

from __future__ import annotations

import math
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .train_target import stream_nll, windows

if TYPE_CHECKING:
    from .sizes import PairSize
    from .target import DenseTarget


def bits_per_byte(target: DenseTarget, stream: Tensor, num_bytes: int, length: int) -> float:
    """Bits per byte over the stream; each row of ``length`` tokens starts without context."""
    nats, count = stream_nll(target, stream, length)
    # a partial last row is not scored, so its share of the bytes is left out as well
    return nats / math.log(2) / (num_bytes * count / (len(stream) - 1))


def repetition(row: list[int], n: int = 4) -> float:
    """Share of the n-grams of ``row`` that already occurred earlier in it."""
    grams = list(zip(*(row[i:] for i in range(n)), strict=False))
    return 1 - len(set(grams)) / len(grams)


@torch.no_grad()
def repetition_report(
    target: DenseTarget, stream: Tensor, size: PairSize
) -> tuple[dict, Tensor, Tensor]:
    """Compare repetition in greedy and sampled continuations with that of the text itself.

    The other values are the greedy continuations of held-out prompts, and sampled rows, prompt
    included, to show as samples.
    """
    prompt_len = size.prompt_lens[-1]
    length = prompt_len + size.eval_new_tokens
    prompts = windows(stream, size.eval_rows, prompt_len)
    greedy, sampled = (target.generate(prompts, length, temperature=at) for at in (0.0, 1.0))
    greedy = greedy[:, prompt_len:]
    real = windows(stream, size.eval_rows * 2, size.eval_new_tokens)
    kinds = {"greedy": greedy, "temperature_1": sampled[:, prompt_len:], "held_out_text": real}
    report = {name: fmean(repetition(row) for row in rows.tolist()) for name, rows in kinds.items()}
    return {**report, "n": 4, "row_tokens": size.eval_new_tokens}, greedy, sampled
