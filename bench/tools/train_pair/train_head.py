"""Train the EAGLE-3 head by training-time test on text that the target writes itself."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from specattn.models.hub import PAIR_HEADS

from .head import DenseHead
from .train_target import Recipe, fit, windows

if TYPE_CHECKING:
    from .sizes import PairSize
    from .target import DenseTarget

# a step of real text at full length, for late positions; the other steps are on-policy rows
LONG_EVERY = 10


@dataclass(frozen=True)
class HeadRecipe(Recipe):
    """How the head is optimised; ``step_decay`` weights unroll step s by ``step_decay ** s``."""

    lr: float = 1.5e-3
    weight_decay: float = 0.01
    eval_seconds: float = 15.0
    step_decay: float = 0.9


class OnPolicy(NamedTuple):
    """Rows ``tokens [N, T]`` that the target wrote on from prompts.

    ``prompt_lens [N]`` says where each continuation begins, ``temperatures [N]`` how it was drawn.
    """

    tokens: Tensor
    prompt_lens: Tensor
    temperatures: Tensor


def on_policy_rows(
    target: DenseTarget, stream: Tensor, *, size: PairSize, seconds: float
) -> OnPolicy:
    """Return rows of ``row_len`` tokens: prompts from ``stream``, continued by the target.

    Greedy and temperature 1 alternate, over all prompt lengths; at least one batch of each.
    """
    deadline = time.monotonic() + seconds
    parts: list[Tensor] = []
    prompt_lens, temperatures = [], []
    kinds = list(itertools.product(size.prompt_lens, (0.0, 1.0)))
    for index in itertools.count():
        if index >= len(kinds) and time.monotonic() > deadline:
            break
        prompt_len, temperature = kinds[index % len(kinds)]
        prompts = windows(stream, size.generate_rows, prompt_len)
        parts.append(target.generate(prompts, size.row_len, temperature=temperature))
        prompt_lens += [prompt_len] * len(prompts)
        temperatures += [temperature] * len(prompts)
        if stream.is_cuda:
            torch.cuda.synchronize()
    tokens = torch.cat(parts)
    facts = (torch.tensor(fact, device=tokens.device) for fact in (prompt_lens, temperatures))
    order = torch.randperm(len(tokens), device=tokens.device)
    return OnPolicy(*(part[order] for part in (tokens, *facts)))


def frequent_tokens(rows: Tensor, vocab: int, draft_vocab: int) -> Tensor:
    """Return the ids of the most frequent tokens of ``rows``, ascending, ``[draft_vocab]``."""
    counts = torch.bincount(rows.flatten(), minlength=vocab)
    return counts.topk(draft_vocab).indices.sort().values


def head_config(size: PairSize) -> dict:
    """Return the ``config.json`` of a published EAGLE-3 head, as the package's, for this pair."""
    published = json.loads((PAIR_HEADS["eagle3"] / "config.json").read_text())
    layers = {"eagle_aux_hidden_state_layer_ids": list(size.aux_layers)}
    return {
        **published,
        **size.shape,
        "intermediate_size": size.draft_intermediate,
        "draft_vocab_size": size.draft_vocab,
        "rope_theta": size.rope_theta,
        "eagle_config": published["eagle_config"] | layers,
    }


def new_head(size: PairSize, target: DenseTarget, draft_ids: Tensor) -> DenseHead:
    """Start a head near the target: the latest layer passes through, the output rows are tied."""
    head = DenseHead(head_config(size), target.embed.float()).to(draft_ids.device)
    head.d2t.copy_(draft_ids - torch.arange(len(draft_ids), device=draft_ids.device))
    head.t2d[draft_ids] = True
    with torch.no_grad():
        for module in head.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.normal_(std=0.02)
        head.fc.weight[:, -size.hidden :] += torch.eye(size.hidden, device=draft_ids.device)
        head.lm_head.weight.copy_(target.embed[draft_ids])
        head.norm.weight.copy_(target.norm)
    return head


def step_losses(
    head: DenseHead, target: DenseTarget, rows: Tensor, size: PairSize
) -> tuple[list[Tensor], list[Tensor]]:
    """Return per unroll step the soft cross entropy and the greedy agreement with the target."""
    steps, length = size.draft_steps, rows.shape[1] - size.draft_steps - 1
    with torch.no_grad():
        hidden, aux = target.forward(rows, aux_layers=size.aux_layers)
        logits = target.logits(hidden).float()
        probs, best = logits.softmax(-1)[..., head.draft_ids], logits.argmax(-1)
    losses, agreements = [], []
    draft_ids = head.draft_ids
    for step, feature in enumerate(head.unroll(rows[:, 1:], aux[:, :length], steps)):
        log_q = head.logits(feature).float().log_softmax(-1)
        # chain base p predicts the token after p + 1 + step
        label = slice(step + 1, step + 1 + length)
        losses.append(-(probs[:, label] * log_q).sum(-1).mean())
        agreements.append((draft_ids[log_q.argmax(-1)] == best[:, label]).float().mean())
    return losses, agreements


def train_head(
    head: DenseHead, target: DenseTarget, data: tuple[Tensor, Tensor, Tensor], *,
    size: PairSize, seconds: float, recipe: HeadRecipe | None = None,
) -> dict:  # fmt: skip
    """Train ``head`` in place on ``data = (on-policy rows, real stream, held-out rows)``."""
    recipe = recipe or HeadRecipe()
    rows, stream, held_rows = data
    autocast = torch.autocast(rows.device.type, torch.bfloat16)
    decay = [recipe.step_decay**step for step in range(size.draft_steps)]
    weights = torch.tensor(decay, device=rows.device) / sum(decay)
    agreement: list[list[float]] = []
    long_rows = max(1, size.draft_rows * size.row_len // size.max_positions // 2)

    def loss_of(step: int) -> Tensor:
        if step % LONG_EVERY == 0:
            batch = windows(stream, long_rows, size.max_positions)
        else:
            batch = rows[torch.randint(len(rows), (size.draft_rows,), device=rows.device)]
        with autocast:
            losses, _ = step_losses(head, target, batch, size)
            return torch.stack(losses) @ weights

    def evaluate(elapsed: float) -> float:
        with torch.no_grad(), autocast:
            held, agree = step_losses(head, target, held_rows, size)
            loss = (torch.stack(held) @ weights).item()
        agreement.append([round(a.item(), 4) for a in agree])
        print(f"head {elapsed:.0f} s {loss:.4f}", flush=True)
        return loss

    curves = fit(head, loss_of, evaluate, seconds=seconds, recipe=recipe)
    return curves | {"held_out_agreement": agreement}
