"""A target's logits over a tree in float64: plain products over weights, keys and values.

Layers with states go on token by token, along every path. Float8 weights are what they hold times
their scales. Rows are not quantised here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import normalize, silu, softplus

from bench.step_forced import Watched
from bench.step_world import attending
from specattn.cache.hybrid_pool import HybridPool
from specattn.models.fused.delta import DeltaBlock
from specattn.models.fused.scaled import ScaledProjection

if TYPE_CHECKING:
    from torch import Tensor

    from bench.step_world import Setting, World
    from specattn.cache.memory import Memory
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
        If they or states after it are too far, not finite, or the step gains other than what is
        forced.
    """
    accept = world.forced(length, Watched)
    decoder = world.decoder(setting, [1], accept, record=False)
    context = min(CHECKED, world.rooms[0])
    rows = world.admit(decoder, 1, context)
    pool, slots = world.target.pool, world.table.req_to_token[rows[0], :context].long()
    before = kept(pool, rows[0], slots)
    (gained,) = decoder.step_async(rows, **setting.options(1, world.lowest)).wait()
    assert len(gained) == length, f"{setting.name}: gained {len(gained)} of {length}"
    assert int(decoder.states.seq_lens[rows[0]]) == context + length
    tokens, positions, words, logits = (seen[0] for seen in accept.seen)
    assert bool(logits.isfinite().all()), f"{setting.name}: logits are not finite"
    want, went_on = tree_logits(world.model, before, tokens, positions, words)
    error = _apart(logits, want)
    how = world.model.blocks[-1].feed.rows_format
    most = MOST_ERROR if how is None or how.terms == 2 else MOST_QUANTISED
    assert error < most, f"{setting.name}: logits are off by {error:.2e}"
    depths, path = positions - positions[0], _seen(words)
    end, after = path[depths.argmax()] & (depths == length - 1), kept(pool, rows[0], slots)
    for layer, nodes in went_on.items():
        for name, found, one in zip(("states", "windows"), after[layer], nodes, strict=True):
            off = _apart(found, one[end][0])
            # of few numbers some are further off than all are
            assert off < 2 * most, f"{setting.name}: {name} of layer {layer} are off by {off:.2e}"
    return error


def _apart(found: Tensor, want: Tensor) -> float:
    return float((found.double() - want).norm() / want.norm())


def kept(pool: Memory, row: int, slots: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Copy what every layer has of a request: keys and values, or state and window."""
    kv = attending(pool)
    if not isinstance(pool, HybridPool):
        return [(k[slots], v[slots]) for k, v in zip(kv.k, kv.v, strict=True)]
    held = pool.states
    return [
        (held.states[at, row].clone(), held.windows[at, row].clone())
        if layer in held.layers
        else (kv.k[at][slots], kv.v[at][slots])
        for layer, at in zip(pool.layers, pool.places, strict=True)
    ]


def _seen(words: Tensor) -> Tensor:
    """Return which nodes every node sees, ``[n, n]`` bool."""
    node = torch.arange(len(words), device=words.device)
    return ((words[:, node // 64] >> (node % 64)) & 1).bool()


def tree_logits(
    model: FusedTarget,
    before: list[tuple[Tensor, Tensor]],
    tokens: Tensor,
    positions: Tensor,
    words: Tensor,
) -> tuple[Tensor, dict[int, list[Tensor]]]:
    """Return the logits after every node of one request's tree.

    Parameters
    ----------
    model : FusedTarget
        Its weights are read, nothing of it is called.
    before : list of (Tensor, Tensor)
        What every layer has of the context, as of `kept`.
    tokens, positions : Tensor
        ``[n]`` int64.
    words : Tensor
        ``[n, W]`` int64: bit j of row i is set if node i sees node j.

    Returns
    -------
    logits : Tensor
        ``[n, V]`` float64.
    went_on : dict of int to list of Tensor
        States ``[n, HV, V, K]`` and windows ``[n, C, W - 1]`` after every node, float64, by layer
        that has some.
    """
    sees, went_on = _seen(words), {}
    x = model.embed_tokens.weight[tokens].double()
    for layer, block in enumerate(model.blocks):
        past = tuple(one.double() for one in before[layer])
        h = _norm(x, block.input_norm, block.eps)
        if isinstance(block, DeltaBlock):
            mixed, *went_on[layer] = _mix(block, h, positions, past, sees)
            x = x + mixed @ _numbers(block.out).T
        else:
            x = x + _attend(block, h, positions, past, sees) @ _numbers(block.o).T
        h = _norm(x, block.post_norm, block.eps)
        gate, up = (h @ _numbers(block.feed.gate_up).T).chunk(2, dim=-1)
        x = x + (silu(gate) * up) @ _numbers(block.feed.down).T
    last = _norm(x, model.norm, model.blocks[0].eps)
    # in pieces: all of it in float64 takes gigabytes
    pieces = model.lm_head.weight.split(PIECE)
    return torch.cat([last @ piece.double().T for piece in pieces], dim=1), went_on


def _numbers(one: Projection) -> Tensor:
    """Return a weight in float64."""
    if isinstance(one, ScaledProjection):
        return one.scaled.restored().double()
    return one.weight.double()


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def _attend(
    block: Block, h: Tensor, positions: Tensor, past: tuple[Tensor, ...], sees: Tensor
) -> Tensor:
    """Return ``[n, Hq D]``."""
    shape, turn = block.geometry, block.rotation
    heads = [shape.num_qo_heads, shape.num_kv_heads, shape.num_kv_heads]
    mask = torch.cat([sees.new_ones(len(h), len(past[0])), sees], dim=1)
    parts = h @ _numbers(block.qkv).T
    if block.columns is not None:
        parts = parts[:, block.columns]
    parts = parts.unflatten(-1, (-1, shape.head_dim))
    q, k, v, *gates = parts.split(heads if block.columns is None else [*heads, heads[0]], dim=1)
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
    out = torch.einsum("hqk,khd->qhd", weights, values)
    return (out * gates[0].sigmoid() if gates else out).flatten(1)


def _mix(
    block: DeltaBlock, h: Tensor, positions: Tensor, past: tuple[Tensor, ...], sees: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``[n, HV V]``, and states and windows after every node, by the recurrence."""
    one, weights, count = block.geometry, block.weights, len(h)
    columns = block.columns or [slice(None)] * len(block.mixed)
    pairs = zip(block.mixed, columns, strict=True)
    parts = torch.cat([(h @ _numbers(mixed).T)[:, order] for mixed, order in pairs], -1)
    heads = one.num_v_heads
    sizes = [one.conv_channels, heads * one.head_v_dim, heads, heads]
    qkv, z, b, a = parts.split(sizes, -1)
    gates = (-weights.a_log.double().exp() * softplus(a + weights.dt_bias.double())).exp()
    key = one.num_k_heads * one.head_k_dim
    states, windows, out = list(past[:1]) * count, list(past[1:]) * count, [z] * count
    for node in positions.argsort().tolist():
        above = sees[node] & (positions == positions[node] - 1)
        if bool(above.any()):
            parent = int(above.nonzero())
            states[node], windows[node] = states[parent], windows[parent]
        inputs = torch.cat([windows[node], qkv[node][:, None]], -1)  # [C, W]
        windows[node] = inputs[:, 1:]
        mixed = silu((inputs * weights.conv.double()).sum(-1))
        q, k, v = mixed.tensor_split([key, 2 * key])
        q, k = (
            normalize(x.view(one.num_k_heads, -1), dim=-1, eps=1e-12).repeat_interleave(
                heads // one.num_k_heads, 0
            )
            for x in (q, k)
        )
        state = states[node] * gates[node][:, None, None]  # [HV, V, K]
        missing = v.view(heads, -1) - (state @ k[..., None])[..., 0]
        states[node] = state + (b[node].sigmoid()[:, None] * missing)[..., None] * k[:, None]
        out[node] = (states[node] @ q[..., None])[..., 0] * one.head_k_dim**-0.5
    normed = _norm(torch.stack(out), block.norm, block.eps)  # [n, HV, V]
    return normed.flatten(1) * silu(z), torch.stack(states), torch.stack(windows)
