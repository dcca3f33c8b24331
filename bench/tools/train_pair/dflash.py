"""The DFlash head as a dense module, in the names and shapes of speculators' checkpoints."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .head import Attention, Mlp, Norm, linear


class BlockLayer(nn.Module):
    """A Qwen3 decoder layer whose keys and values begin with those of the context."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm = Norm(hidden, eps)
        theta = config["rope_parameters"]["rope_theta"]
        self.self_attn = Attention(config, hidden, theta, normed=True)
        self.post_attention_layernorm = Norm(hidden, eps)
        self.mlp = Mlp(hidden, config["intermediate_size"])

    def forward(self, x: Tensor, context: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Map ``x [B, Q, H]`` to the same shape.

        It attends to ``context [B, T, H]`` and itself, of which ``positions [B, T + Q]`` and
        ``mask [B, 1, Q, T + Q]`` are; see `Attention.forward`.
        """
        normed = self.input_layernorm(x)
        attn, _ = self.self_attn(normed, torch.cat([context, normed], 1), positions, mask)
        x = x + attn
        return x + self.mlp(self.post_attention_layernorm(x))


class DenseDFlash(nn.Module):
    """DFlash draft head (arXiv:2602.06036), computed densely over many blocks of a row.

    A block at position a is token a of the row and masks behind it. It sees the features of
    positions before a, and all of itself. Place k predicts token a + k. The embedding and the
    output projection are the target's ``embed [vocab, H]``; they are not saved.
    """

    embed: Tensor

    def __init__(self, config: dict, target_embed: Tensor) -> None:
        super().__init__()
        layer = config["transformer_layer_config"]
        hidden, features = layer["hidden_size"], len(config["aux_hidden_state_layer_ids"])
        self.block_size, self.mask_token_id = config["block_size"], config["mask_token_id"]
        self.fc = linear(features * hidden, hidden)
        self.hidden_norm = Norm(hidden, layer["rms_norm_eps"])
        self.layers = nn.ModuleList(BlockLayer(layer) for _ in range(layer["num_hidden_layers"]))
        self.norm = Norm(hidden, layer["rms_norm_eps"])
        self.register_buffer("embed", target_embed.detach(), persistent=False)

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states ``[..., H]`` to logits ``[..., vocab]``."""
        return F.linear(self.norm(hidden), self.embed)

    def forward(self, tokens: Tensor, aux: Tensor, anchors: Tensor) -> Tensor:
        """Draft a block at every anchor.

        Parameters
        ----------
        tokens : Tensor
            ``[B, T]`` int64, the rows.
        aux : Tensor
            ``[B, T, F]``, the target's features of the rows.
        anchors : Tensor
            ``[B, A]`` int64, the positions at which blocks begin.

        Returns
        -------
        Tensor
            ``[B, A, block_size - 1, H]``, the states of the masks before ``norm``.
        """
        (rows, count), size = anchors.shape, self.block_size
        blocks = anchors.new_full((rows, count, size), self.mask_token_id)
        blocks[..., 0] = tokens.gather(1, anchors)
        place = torch.arange(size, device=tokens.device)
        at = torch.arange(tokens.shape[1], device=tokens.device)
        positions = torch.cat([at.expand(rows, -1), (anchors[..., None] + place).flatten(1)], 1)
        before = (at < anchors[..., None]).repeat_interleave(size, 1)
        own = torch.eye(count, dtype=torch.bool, device=tokens.device)
        own = own.repeat_interleave(size, 0).repeat_interleave(size, 1)
        mask = torch.cat([before, own.expand(rows, -1, -1)], -1)[:, None]
        context = self.hidden_norm(self.fc(aux))
        x = F.embedding(blocks.flatten(1), self.embed)
        for layer in self.layers:
            x = layer(x, context, positions, mask)
        return x.unflatten(1, (count, size))[:, :, 1:]
