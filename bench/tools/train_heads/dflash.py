"""The DFlash head (arXiv:2602.06036), computed densely over many blocks, and its losses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP

from .layers import Heads, Mixed, Norm, draw, start
from .layouts import plain, speculators

if TYPE_CHECKING:
    from transformers import LlamaConfig

    from .teacher import Teacher
    from .texts import Batch


class BlockLayer(nn.Module):
    """A Qwen3 decoder layer whose keys and values begin with those of the context."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (
            Norm(config.hidden_size, config.rms_norm_eps) for _ in range(2)
        )
        self.self_attn = Heads(config, config.hidden_size, normed=True)
        self.mlp = LlamaMLP(config)

    def forward(self, x: Tensor, context: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Map ``x [B, Q, H]`` to the same shape.

        It attends to ``context [B, T, H]`` and itself, of which ``positions [B, T + Q]`` and
        ``mask [B, 1, Q, T + Q]`` are.
        """
        attn, normed = self.self_attn, self.input_layernorm(x)
        q = attn.queries(normed, positions[:, context.shape[1] :])
        k, v = attn.keys_values(torch.cat([context, normed], 1), positions)
        x = x + attn.merged(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlash(nn.Module):
    """A DFlash head.

    A block at position a is token a of the row and ``block - 1`` of ``mask_id`` behind it. It sees
    the features of positions before a, which are the target's ``states``, and all of itself. Place
    k predicts token a + k. The embedding and the output projection are the target's. Training
    drafts ``anchors`` blocks of every row, at random places of the answer.
    """

    def __init__(
        self, config: LlamaConfig, states: tuple[int, ...], mask_id: int, *, block: int,
        anchors: int,
    ) -> None:  # fmt: skip
        super().__init__()
        self.config, self.states, self.mask_id = config, states, mask_id
        self.block, self.anchors = block, anchors
        # of the losses of places
        self.weights = [0.85**place for place in range(block - 1)]
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = Mixed(len(states) * hidden, hidden)
        self.hidden_norm, self.norm = Norm(hidden, eps), Norm(hidden, eps)
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.num_hidden_layers))
        draw(self)

    @torch.no_grad()
    def start(self, teacher: Teacher, batch: Batch) -> None:
        """Begin near the target."""
        features, last, _ = teacher(batch.tokens, logits_to_keep=1)
        start(self, features, last)

    def forward(
        self, tokens: Tensor, embed: nn.Module, features: Tensor, anchors: Tensor
    ) -> Tensor:
        """Draft a block at each of ``anchors [B, A]``, positions of ``tokens [B, T]``.

        ``features`` is ``[B, T, F]``. Returns ``[B, A, block - 1, H]``, the states of the masks
        before the output projection.
        """
        (rows, count), size = anchors.shape, self.block
        blocks = anchors.new_full((rows, count, size), self.mask_id)
        blocks[..., 0] = tokens.gather(1, anchors)
        place = torch.arange(size, device=tokens.device)
        at = torch.arange(tokens.shape[1], device=tokens.device)
        positions = torch.cat([at.expand(rows, -1), (anchors[..., None] + place).flatten(1)], 1)
        before = (at < anchors[..., None]).repeat_interleave(size, 1)
        own = torch.eye(count, dtype=torch.bool, device=tokens.device)
        own = own.repeat_interleave(size, 0).repeat_interleave(size, 1)
        mask = torch.cat([before, own.expand(rows, -1, -1)], -1)[:, None]
        context = self.hidden_norm(self.fc(features))
        x = embed(blocks.flatten(1)).to(context.dtype)
        for layer in self.layers:
            x = layer(x, context, positions, mask)
        return self.norm(x.unflatten(1, (count, size))[:, :, 1:])

    def losses(self, batch: Batch, teacher: Teacher) -> tuple[Tensor, Tensor]:
        """Return cross entropy and agreement with the text, by place of the block."""
        tokens, device = batch.tokens, batch.tokens.device
        generator = torch.Generator(device).manual_seed(batch.seed)
        drawn = torch.rand(len(tokens), self.anchors, generator=generator, device=device)
        # the first known token is the answer's first, and one is to be drafted at least
        room = (batch.lengths - 1 - batch.prompt_lens)[:, None]
        anchors = batch.prompt_lens[:, None] + (drawn * room).long()
        features, *_ = teacher(tokens, logits_to_keep=1)
        hidden = self(tokens, teacher.embed, features, anchors)
        at = anchors[..., None] + torch.arange(1, self.block, device=device)
        labels = F.pad(tokens, (0, self.block)).gather(1, at.flatten(1)).view_as(at)
        logits = teacher.lm_head(hidden.to(teacher.lm_head.weight.dtype)).float()
        entropy = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none")
        counted = at < batch.lengths[:, None, None]
        total = counted.sum((0, 1)).clamp(min=1)
        right = logits.argmax(-1) == labels
        loss, agreement = (
            (values.view_as(at) * counted).sum((0, 1)) / total for values in (entropy, right)
        )
        return loss, agreement

    def settings(self, layout: str, teacher: Teacher) -> dict[str, Any]:
        """Return ``config.json`` in the layout of z-lab, which SGLang reads, or of speculators."""
        kinds = ["full_attention"] * len(self.layers)
        if layout == "speculators":
            found = speculators(self.config, "dflash", teacher.name, self.block - 1)
            found["transformer_layer_config"]["layer_types"] = kinds
            return found | {
                "architectures": ["DFlashDraftModel"], "draft_vocab_size": self.config.vocab_size,
                # it counts states that enter a layer
                "aux_hidden_state_layer_ids": list(self.states),
                "block_size": self.block, "mask_token_id": self.mask_id,
                "sample_from_anchor": False, "sliding_window_non_causal": False,
            }  # fmt: skip
        # z-lab counts states that leave one
        leaving = [state - 1 for state in self.states]
        return plain(self.config, "DFlashDraftModel", "qwen3") | {
            "layer_types": kinds, "block_size": self.block, "num_target_layers": teacher.layers,
            "dflash_config": {"mask_token_id": self.mask_id, "target_layer_ids": leaving},
        }  # fmt: skip
