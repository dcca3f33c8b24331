"""A target's logits over a tree in float64: plain products over weights, keys and values.

Float8 weights are what they hold times their scales. Rows are not quantised here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import silu

from bench.step_forced import Watched
from specattn.models.fused.scaled import ScaledProjection

if TYPE_CHECKING:
    from torch import Tensor

    from bench.step_world import Setting, World
    from specattn.cache.kv_pool import KVPool
    from specattn.models import FusedTarget
    from specattn.models.fused.block import Block
    from specattn.models.fused.projection import Projection

# rows of the output matrix
PIECE = 2**14
# tokens of context
CHECKED = 512
# bfloat16 through all layers, relative L2 error of the logits
MOST_ERROR = 0.05
# rows in e4m3 through all layers
MOST_QUANTISED = 0.15


def check(world: World, setting: Setting, length: int) -> float:
    """Run an eager step of one request; returns how far its logits are from float64.

    Raises
    ------
    AssertionError
        If they are too far, not finite, or the step gains other than what is forced.
    """
    accept = world.forced(length, Watched)
    decoder = world.decoder(setting, [1], accept, record=False)
    context = min(CHECKED, world.rooms[0])
    rows = world.admit(decoder, 1, context)
    (gained,) = decoder.step_async(rows, **setting.options(1, world.lowest)).wait()
    assert len(gained) == length, f"{setting.name}: gained {len(gained)} of {length}"
    assert int(decoder.states.seq_lens[rows[0]]) == context + length
    tokens, positions, words, logits = (seen[0] for seen in accept.seen)
    assert bool(logits.isfinite().all()), f"{setting.name}: logits are not finite"
    slots = world.table.req_to_token[rows[0], :context]
    want = tree_logits(world.model, world.target.pool, slots, tokens, positions, words)
    error = float((logits.double() - want).norm() / want.norm())
    rows = world.model.blocks[0].qkv.rows_format
    most = MOST_ERROR if rows is None or rows.terms == 2 else MOST_QUANTISED
    assert error < most, f"{setting.name}: logits are off by {error:.2e}"
    return error


def tree_logits(
    model: FusedTarget,
    pool: KVPool,
    slots: Tensor,
    tokens: Tensor,
    positions: Tensor,
    words: Tensor,
) -> Tensor:
    """Return the logits after every node of one request's tree.

    Parameters
    ----------
    model : FusedTarget
        Its weights are read, nothing of it is called.
    pool : KVPool
        Keys and values of the context.
    slots : Tensor
        ``[L]``, where those are.
    tokens, positions : Tensor
        ``[n]`` int64.
    words : Tensor
        ``[n, W]`` int64: bit j of row i is set if node i sees node j.

    Returns
    -------
    Tensor
        ``[n, V]`` float64.
    """
    count, context = len(tokens), len(slots)
    node = torch.arange(count, device=tokens.device)
    sees = (words[:, node // 64] >> (node % 64)) & 1  # [n, n]
    mask = torch.cat([sees.new_ones(count, context), sees], dim=1).bool()
    x = model.embed_tokens.weight[tokens].double()
    for layer, block in enumerate(model.blocks):
        past = (pool.k[layer][slots.long()].double(), pool.v[layer][slots.long()].double())
        h = _norm(x, block.input_norm, block.eps)
        x = x + _attend(block, h, positions, past, mask) @ _numbers(block.o).T
        h = _norm(x, block.post_norm, block.eps)
        gate, up = (h @ _numbers(block.feed.gate_up).T).chunk(2, dim=-1)
        x = x + (silu(gate) * up) @ _numbers(block.feed.down).T
    last = _norm(x, model.norm, model.blocks[0].eps)
    # in pieces: all of it in float64 takes gigabytes
    pieces = model.lm_head.weight.split(PIECE)
    return torch.cat([last @ piece.double().T for piece in pieces], dim=1)


def _numbers(one: Projection) -> Tensor:
    """Return a weight in float64."""
    if isinstance(one, ScaledProjection):
        return one.scaled.restored().double()
    return one.weight.double()


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def _attend(
    block: Block, h: Tensor, positions: Tensor, past: tuple[Tensor, Tensor], mask: Tensor
) -> Tensor:
    """Return ``[n, Hq D]``."""
    shape, turn = block.geometry, block.rotation
    heads = shape.num_qo_heads, shape.num_kv_heads, shape.num_kv_heads
    parts = (h @ _numbers(block.qkv).T).unflatten(-1, (-1, shape.head_dim))
    q, k, v = parts.split(heads, dim=1)  # [n, heads, D]
    if turn.norms is not None:
        q, k = (
            _norm(part, weight, turn.eps) for part, weight in zip((q, k), turn.norms, strict=True)
        )
    cosine, sine = turn.table[positions].double()[:, None].chunk(2, dim=-1)

    def rotated(part: Tensor) -> Tensor:
        low, high = part.chunk(2, dim=-1)
        return torch.cat([low * cosine - high * sine, high * cosine + low * sine], dim=-1)

    keys, values = torch.cat([past[0], rotated(k)]), torch.cat([past[1], v])
    share = heads[0] // heads[1]
    keys, values = (part.repeat_interleave(share, dim=1) for part in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", rotated(q), keys) * shape.sm_scale
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)
