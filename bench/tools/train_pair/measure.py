"""What the pair is worth: bits per byte, repetition, and simulated greedy acceptance."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .train_target import stream_nll, windows

if TYPE_CHECKING:
    from .dflash import DenseDFlash
    from .head import DenseHead
    from .sizes import PairSize
    from .target import DenseTarget

CHAIN = 5
# rows are grouped by the share of repeated 4-grams in what was generated
REPETITION_EDGES = (0.25, 0.5, 0.75)


def bits_per_byte(target: DenseTarget, stream: Tensor, num_bytes: int, length: int) -> float:
    """Bits per byte over the stream; each row of ``length`` tokens starts without context."""
    nats, count = stream_nll(target, stream, length)
    # a partial last row is not scored, so its share of the bytes is left out as well
    return nats / math.log(2) / (num_bytes * count / (len(stream) - 1))


def repetition(row: list[int], n: int = 4) -> float:
    """Share of the n-grams of ``row`` that already occurred earlier in it."""
    grams = list(zip(*(row[i:] for i in range(n)), strict=False))
    return 1 - len(set(grams)) / len(grams)


def mean(values: list[float]) -> float:
    """Arithmetic mean."""
    return sum(values) / len(values)


@torch.no_grad()
def accepted_prefix(head: DenseHead, aux: Tensor, rows: Tensor) -> Tensor:
    """Return ``[B, T - CHAIN - 1]``: how many of ``CHAIN`` greedy drafts after p match the text.

    ``rows [B, T]`` must be the target's own greedy text; then this is what verification accepts,
    for a rejected draft ends the chain and an accepted one equals the text.
    """
    length = rows.shape[1] - CHAIN - 1
    alive = torch.ones(len(rows), length, dtype=torch.bool, device=rows.device)
    count = torch.zeros_like(alive, dtype=torch.int64)
    for step, hidden in enumerate(head.unroll(rows[:, 1:], aux[:, :length], CHAIN)):
        drafted = head.draft_ids[head.logits(hidden).argmax(-1)]
        alive &= drafted == rows[:, step + 2 : step + 2 + length]
        count += alive
    return count


def walk(accepted: list[int], begin: int) -> list[int]:
    """Follow decoding from base ``begin``; return each step's gain, bonus included."""
    gains, base = [], begin
    while base < len(accepted):
        gains.append(accepted[base] + 1)
        base += gains[-1]
    return gains


@torch.no_grad()
def greedy_steps(
    head: DenseHead, target: DenseTarget, prompts: Tensor, size: PairSize
) -> tuple[Tensor, list[list[int]]]:
    """Return greedy continuations ``[B, new]`` and, per row, the gains of simulated decoding."""
    prompt_len = prompts.shape[1]
    rows = target.generate(prompts, prompt_len + size.eval_new_tokens, temperature=0.0)
    _, aux = target.forward(rows, aux_layers=size.aux_layers)
    accepted = accepted_prefix(head, aux, rows).tolist()
    # prefill yields the first new token; the first step is based on the prompt's last position
    return rows[:, prompt_len:], [walk(row, prompt_len - 1) for row in accepted]


def by_repetition(rows: list[list[int]], gains: list[list[int]]) -> list[dict]:
    """Mean tokens per step of the rows within each range of repetition."""
    shares = [repetition(row) for row in rows]
    groups = []
    for low, high in zip((0.0, *REPETITION_EDGES), (*REPETITION_EDGES, 1.01), strict=True):
        steps = [g for s, row in zip(shares, gains, strict=True) if low <= s < high for g in row]
        count = sum(low <= share < high for share in shares)
        tokens = mean(steps) if steps else None
        groups.append({"from": low, "rows": count, "mean_tokens_per_step": tokens})
    return groups


def acceptance(
    head: DenseHead, target: DenseTarget, stream: Tensor, size: PairSize
) -> tuple[dict, Tensor]:
    """Simulate greedy decoding with chains of five on held-out prompts of several lengths.

    The second value holds the generated continuations, ``[B, eval_new_tokens]``.
    """
    by_prompt, generated, gains = {}, [], []
    for prompt_len in size.prompt_lens:
        prompts = windows(stream, size.eval_rows, prompt_len)
        rows, row_gains = greedy_steps(head, target, prompts, size)
        by_prompt[str(prompt_len)] = mean([g for row in row_gains for g in row])
        gains += row_gains
        generated.append(rows)
    long = windows(stream, max(1, size.eval_rows // 8), size.max_positions - size.eval_new_tokens)
    _, long_gains = greedy_steps(head, target, long, size)
    by_prompt[str(long.shape[1])] = mean([g for row in long_gains for g in row])
    steps = [g for row in gains for g in row]
    greedy = torch.cat(generated)
    histogram = torch.bincount(torch.tensor(steps), minlength=CHAIN + 2)[1:]
    report = {
        "chain": CHAIN, "generated_tokens": greedy.numel(), "steps": len(steps),
        "mean_tokens_per_step": mean(steps), "by_prompt_len": by_prompt,
        "by_repetition": by_repetition(greedy.tolist(), gains),
        "steps_gaining_1_to_6": histogram.tolist(),
    }  # fmt: skip
    return report, greedy


@torch.no_grad()
def accepted_of_blocks(head: DenseDFlash, aux: Tensor, rows: Tensor, begin: int) -> Tensor:
    """Return ``[B, T - block_size - begin + 1]``: how many drafts of a block match the text.

    A block begins at every position from ``begin``. ``rows [B, T]`` must be the target's own
    greedy text from there on; then this is what verification accepts.
    """
    size, length = head.block_size, rows.shape[1]
    anchors = torch.arange(begin, length - size + 1, device=rows.device).expand(len(rows), -1)
    # the blocks of a row see only themselves, so few at a time cost less
    drafted = torch.cat(
        [head.logits(head(rows, aux, few)).argmax(-1) for few in anchors.split(16, 1)], 1
    )
    text = rows.unfold(1, size, 1)[:, begin:, 1:]
    return (drafted == text).cumprod(-1).sum(-1)


@torch.no_grad()
def block_acceptance(
    head: DenseDFlash, target: DenseTarget, stream: Tensor, size: PairSize
) -> dict:
    """Simulate greedy decoding with whole blocks on held-out prompts of several lengths.

    Means are given for the block's first ``CHAIN`` drafts, as EAGLE's, and for all of them.
    """
    report: dict = {"block_size": head.block_size, "by_prompt_len": {}}
    blocks, repeated = {CHAIN: [], head.block_size - 1: []}, []
    for prompt_len in size.prompt_lens:
        prompts = windows(stream, size.eval_rows, prompt_len)
        rows = target.generate(prompts, prompt_len + size.eval_new_tokens, temperature=0.0)
        repeated += rows[:, prompt_len:].tolist()
        accepted = torch.cat(
            [
                accepted_of_blocks(
                    head, target.forward(few, aux_layers=size.block_features)[1], few, prompt_len
                )
                for few in rows.split(16)
            ]
        )
        for most, gains in blocks.items():
            gains += [walk(row, 0) for row in accepted.clamp(max=most).tolist()]
        last = gains[-len(rows) :]
        report["by_prompt_len"][str(prompt_len)] = mean([g for row in last for g in row])
    for most, gains in blocks.items():
        steps = [g for row in gains for g in row]
        report[f"chain_of_{most}"] = {"steps": len(steps), "mean_tokens_per_step": mean(steps)}
    report["by_repetition"] = by_repetition(repeated, gains)
    report["steps_gaining"] = torch.bincount(torch.tensor(steps)).tolist()[1:]
    return report


def repetition_report(
    target: DenseTarget, greedy: Tensor, stream: Tensor, size: PairSize
) -> tuple[dict, Tensor]:
    """Compare repetition in greedy and sampled continuations with that of the text itself.

    The second value holds sampled rows, prompt included, to show as samples.
    """
    prompt_len = size.prompt_lens[-1]
    prompts = windows(stream, size.eval_rows, prompt_len)
    sampled = target.generate(prompts, prompt_len + size.eval_new_tokens, temperature=1.0)
    real = windows(stream, size.eval_rows * 2, size.eval_new_tokens)
    kinds = {"greedy": greedy, "temperature_1": sampled[:, prompt_len:], "held_out_text": real}
    report = {name: mean([repetition(r) for r in rows.tolist()]) for name, rows in kinds.items()}
    return {**report, "n": 4, "row_tokens": size.eval_new_tokens}, sampled
