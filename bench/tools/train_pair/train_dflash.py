"""Train the DFlash head on blocks of text that the target writes itself."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specattn.models.hub import PAIR_HEADS

from .dflash import DenseDFlash
from .train_head import LONG_EVERY, OnPolicy
from .train_target import Recipe, fit, windows

if TYPE_CHECKING:
    from .sizes import PairSize
    from .target import DenseTarget

# the token of a byte that no UTF-8 text has, in the alphabet of byte-level BPE: never in a text
MASK_TOKEN = "ÿ"
# times a logit, greedy text's law has all its mass on one token
GREEDY_SHARPNESS = 1e4


@dataclass(frozen=True)
class DFlashRecipe(Recipe):
    """How the head is optimised; ``place_decay`` weights place k by ``place_decay ** (k - 1)``."""

    lr: float = 2e-3
    weight_decay: float = 0.01
    eval_seconds: float = 10.0
    place_decay: float = 0.85


def dflash_config(size: PairSize, mask_token_id: int) -> dict:
    """Return the ``config.json`` of speculators 0.9 for a DFlash head, as the package's.

    It counts states that enter a layer, so each id is one above the layer whose output is read.
    """
    found = json.loads((PAIR_HEADS["dflash"] / "config.json").read_text())
    (method,) = found["speculators_config"]["proposal_methods"]
    method["speculative_tokens"] = size.block_size - 1
    found["transformer_layer_config"] |= {
        **size.shape,
        "intermediate_size": size.block_intermediate,
        "num_hidden_layers": size.block_layers,
        "layer_types": ["full_attention"] * size.block_layers,
        "rope_parameters": {"rope_type": "default", "rope_theta": size.rope_theta},
    }
    return found | {
        "aux_hidden_state_layer_ids": [layer + 1 for layer in size.block_features],
        "block_size": size.block_size,
        "mask_token_id": mask_token_id,
        "draft_vocab_size": size.vocab,
    }


def new_dflash(size: PairSize, target: DenseTarget, mask_token_id: int) -> DenseDFlash:
    """Start a head near the target: the latest layer passes through, branches begin small."""
    head = DenseDFlash(dflash_config(size, mask_token_id), target.embed.float())
    head.to(target.embed.device)
    with torch.no_grad():
        for name, module in head.named_modules():
            if isinstance(module, torch.nn.Linear):
                into_stream = name.endswith(("o_proj", "down_proj"))
                module.weight.normal_(std=0.01 if into_stream else 0.03)
        head.fc.weight[:, -size.hidden :] += torch.eye(size.hidden, device=head.embed.device)
        head.norm.weight.copy_(target.norm)
    return head


def draw_anchors(rows: OnPolicy, count: int, block_size: int) -> Tensor:
    """Draw ``[B, count]`` positions of what the target wrote, each with room for a block."""
    room = rows.tokens.shape[1] - block_size + 1 - rows.prompt_lens
    drawn = torch.rand(len(room), count, device=room.device) * room[:, None]
    return rows.prompt_lens[:, None] + drawn.long()


def place_losses(
    head: DenseDFlash, target: DenseTarget, rows: OnPolicy, anchors: Tensor, size: PairSize
) -> tuple[Tensor, Tensor]:
    """Return the mean loss and agreement ``[block_size - 1]`` of every place but the first.

    The label is the law of the row's next token: the target's at temperature 1, or its best token
    where the row is greedy. The agreement is with the target's best token.
    """
    with torch.no_grad():
        hidden, aux = target.forward(rows.tokens, aux_layers=size.block_features)
        # the state that predicts token a + k is that of position a + k - 1
        at = anchors[..., None] + torch.arange(size.block_size - 1, device=anchors.device)
        states = hidden[torch.arange(len(at), device=at.device)[:, None, None], at]
        sharpness = torch.where(rows.temperatures == 0, GREEDY_SHARPNESS, 1.0)
        logits = target.logits(states).float()
        probs = (logits * sharpness[:, None, None, None]).softmax(-1)
    log_q = head.logits(head(rows.tokens, aux, anchors)).float().log_softmax(-1)
    loss = -(probs * log_q).sum(-1).mean((0, 1))
    agreement = (log_q.argmax(-1) == logits.argmax(-1)).float().mean((0, 1))
    return loss, agreement


class BatchSource:
    """Training batches: rows that the target wrote, and now and then real text at full length."""

    def __init__(self, written: OnPolicy, stream: Tensor, size: PairSize, rows: int) -> None:
        self.written, self.stream, self.size, self.rows = written, stream, size, rows
        self.long_rows = max(1, rows * size.row_len // size.max_positions // 2)

    def draw(self, step: int) -> tuple[OnPolicy, Tensor]:
        """Return the rows of a step and their anchors."""
        size, device = self.size, self.stream.device
        if step % LONG_EVERY:
            picked = torch.randint(len(self.written.tokens), (self.rows,), device=device)
            rows = OnPolicy(*(part[picked] for part in self.written))
            return rows, draw_anchors(rows, size.block_anchors, size.block_size)
        tokens = windows(self.stream, self.long_rows, size.max_positions)
        begins = torch.full((self.long_rows,), min(size.prompt_lens), device=device)
        rows = OnPolicy(tokens, begins, torch.ones(self.long_rows, device=device))
        return rows, draw_anchors(rows, 4 * size.block_anchors, size.block_size)


def train_dflash(
    head: DenseDFlash, target: DenseTarget, data: tuple[OnPolicy, Tensor, OnPolicy], *,
    size: PairSize, seconds: float, rows: int, recipe: DFlashRecipe | None = None,
) -> dict:  # fmt: skip
    """Train ``head`` in place on ``data = (on-policy rows, real stream, held-out rows)``."""
    recipe = recipe or DFlashRecipe()
    written, stream, held = data
    source = BatchSource(written, stream, size, rows)
    greedy = OnPolicy(*(part[held.temperatures == 0] for part in held))
    greedy_anchors = draw_anchors(greedy, size.block_anchors, size.block_size)
    held_anchors = draw_anchors(held, size.block_anchors, size.block_size)
    # CPUs without bfloat16 units are slower with it
    autocast = torch.autocast(stream.device.type, torch.bfloat16, enabled=stream.is_cuda)
    decay = [recipe.place_decay**place for place in range(size.block_size - 1)]
    weights = torch.tensor(decay, device=stream.device) / sum(decay)
    agreement: list[list[float]] = []

    def loss_of(step: int) -> Tensor:
        batch, anchors = source.draw(step)
        with autocast:
            losses, _ = place_losses(head, target, batch, anchors, size)
            return losses @ weights

    def evaluate(elapsed: float) -> float:
        with torch.no_grad(), autocast:
            loss, _ = place_losses(head, target, held, held_anchors, size)
            _, agree = place_losses(head, target, greedy, greedy_anchors, size)
            mean = (loss @ weights).item()
        agreement.append([round(share, 4) for share in agree.tolist()])
        shares = " ".join(f"{share:.2f}" for share in agreement[-1])
        print(
            f"dflash {elapsed:.0f} s held-out {mean:.4f}, right by place, greedy text: {shares}",
            flush=True,
        )
        return mean

    curves = fit(head, loss_of, evaluate, seconds=seconds, recipe=recipe)
    return curves | {"held_out_agreement": agreement, "rows": rows}
