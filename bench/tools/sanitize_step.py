"""What `sanitize` runs of a step besides attention: state, vocabularies, decoder layers.

Everything is as large as it needs to be and no more, what nobody may read holds NaN, and what
nobody may write must still hold it afterwards.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bench.tools.sanitize_ops_step import by_torch
from bench.tools.sanitize_world import (
    BF16,
    DEVICE,
    F8,
    F16,
    F32,
    NAN,
    finite,
    noise,
    poison,
    put,
    same,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def states() -> None:
    """Begin and end over tables of every kind of width; the last request ends its tables."""
    from specattn.batch import AcceptResult
    from specattn.kernels.step import StepStart, begin_step, end_step, write_output

    context, reserve, depth, steps, topk = 40, 7, 5, 4, 3
    # padding, one without room, one that fills both its row and the table's last
    rows, lens = put([2, 0, 1, 4], torch.int64), put([0, 6, 0, 9, context - reserve])
    room = put([0, 6 + reserve - 1, reserve, 9 + reserve, context])
    layout = [
        ((), torch.int64),
        ((3,), F32),
        ((33,), F16),
        ((2077,), BF16),
        ((4097,), F32),
        ((), F32),
        ((5,), torch.int64),
    ]
    tables = [torch.randint(1, 99, (5, *shape)).to(dtype).to(DEVICE) for shape, dtype in layout]
    outs = [poison(4, *shape, dtype=dtype) for shape, dtype in layout]
    slots = torch.arange(5 * context, dtype=torch.int32).view(5, context).to(DEVICE)
    start = StepStart(
        rows=poison(4, dtype=torch.int64),
        seq_lens=poison(4, dtype=torch.int32),
        window=poison(4, reserve, dtype=torch.int32),
        positions=poison(4, depth, dtype=torch.int64),
        draft_positions=poison(4, steps, topk, dtype=torch.int64),
    )
    # as `HostBuffers.rows`: of two steps the second, and of six requests four
    on_host = torch.full((2, 6), -1, pin_memory=DEVICE == "cuda")
    on_host[1, :4] = rows
    turn = put([1], torch.int64)
    begin_step(
        on_host[:, :4],
        turn,
        lens,
        room,
        slots,
        reserve_len=reserve,
        out=start,
        copies=list(zip(tables, outs, strict=True)),
    )
    same("rows", start.rows, put([2, 0, 0, 4], torch.int64))
    same("slots", start.window[3], slots[4, -reserve:])
    for table, out in zip(tables, outs, strict=True):
        same("state", out, table[start.rows])
    before = [table.clone() for table in tables]
    new = [out + 1 for out in outs]
    packed = poison(4, 1 + depth, dtype=torch.int64)
    tokens, bonus = put([[9] * depth] * 4, torch.int64), put([9] * 4, torch.int64)
    end_step(
        start.rows,
        start.seq_lens,
        AcceptResult(poison(4, 0, dtype=torch.int32), tokens, put([3, 1, 0, 5]), bonus),
        seq_lens_table=lens,
        bonus_table=lens.long(),
        copies=list(zip(new, tables, strict=True)),
        packed_out=packed,
    )
    same("lengths", lens, put([0, 6, 3, 9, context - reserve + 5]))
    same("packed", packed[:, 0], put([3, 0, 0, 5], torch.int64))
    on_host = poison(2, 5, 1 + depth, dtype=torch.int64)
    write_output(packed, on_host, turn)
    same("output", on_host[1, :4], packed)
    same("turn", turn, put([0], torch.int64))
    for table, old, source in zip(tables, before, new, strict=True):
        same("untouched rows", table[[0, 1, 3]], old[[0, 1, 3]])
        same("new state", table[[2, 4]], source[[0, 3]])


def path(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    """Features along paths, of which one is as deep as can be and one empty."""
    from specattn.batch import AcceptResult
    from specattn.kernels.step import gather_path

    nodes, depth, width = 6, 4, 2077
    index = put([[0, 2, 3, 5], [0, -1, -1, -1], [-1] * 4])
    features = poison(3, nodes, width, dtype=dtype)
    # elsewhere there are only nodes that nobody accepted
    read = index.clamp(min=0).long()
    at = torch.arange(3, device=DEVICE)[:, None]
    features[at, read] = noise(3, depth, width, dtype=dtype)
    out = poison(3, depth, width, dtype=out_dtype)
    last, after = poison(3, dtype=torch.int64), poison(3, dtype=torch.int64)
    gather_path(
        features,
        AcceptResult(index, poison(0), put([4, 1, 0]), poison(0)),
        put([9, 0, 0]),
        features_out=out,
        last_rows_out=last,
        after_out=after,
    )
    finite(out)
    same("path", out, features[at, read].to(out_dtype))
    same("ends", last, put([3, 4, 8], torch.int64))
    same("lengths", after, put([13, 1, 0], torch.int64))


def plans(count: int) -> None:
    """Plans of different batches, tails and windows, and of lists, together and in two halves."""
    from specattn.kernels.attention import TreeAttention
    from specattn.kernels.attention.tiles import tile_config
    from specattn.kernels.attention.triton_plan import fill_plans

    cuts, kernels = [], []
    for i in range(count):
        batch, csr = (1, 4, 19)[i % 3], i % 4 == 3
        tokens = 1 if csr else 1 + i % 5
        kernel = TreeAttention(
            batch=batch,
            q_len=tokens,
            tail_len=0 if csr else tokens,
            num_qo_heads=8,
            num_kv_heads=2,
            head_dim=64,
            v_head_dim=64,
            dtype=F16,
            device=DEVICE,
            sm_scale=0.1,
            window_left=20 if i % 5 == 2 and not csr else -1,
            csr=csr,
            tile=tile_config(4 * tokens, 64, 64, F16, batch),
        )
        lens = torch.randint(0, 400, (batch + csr,), dtype=torch.int32)
        kernels.append(kernel)
        if csr:
            lens[0] = 0
            cuts.append(kernel.plan_request_csr(lens.cumsum(0).int().to(DEVICE)))
        else:
            rows = torch.arange(1, batch + 1).to(DEVICE)
            cuts.append(kernel.plan_request(lens.to(DEVICE), rows, 500))
    tables = [(k.tables.requests, k.tables.splits, k.tables.merges) for k in kernels]
    found = []
    for groups in ((cuts,), (cuts[: count // 2], cuts[count // 2 :])):
        for each in tables:
            for table in each:
                table.fill_(-77)
        for group in groups:
            fill_plans(group)
        found.append([table.clone() for each in tables for table in each])
    for one, other in zip(*found, strict=True):
        same("plans", one, other)


def choices(vocab: int, dtype: torch.dtype) -> None:
    """The best tokens of rows with ties, of NaN and of nothing."""
    from specattn.kernels.sampling import argmax_tokens, top_tokens

    logits = noise(5, vocab, dtype=dtype)
    logits[1] = 0
    logits[2, : vocab // 2] = NAN
    logits[3] = -torch.inf
    logits[4, -1] = 50
    names = torch.randperm(vocab).to(DEVICE)
    for topk in {1, min(vocab, 8), min(vocab, 20)}:
        for target_ids in (None, names):
            probs, ids = poison(5, topk), poison(5, topk, dtype=torch.int64)
            top_tokens(logits, topk, probs_out=probs, ids_out=ids, target_ids=target_ids)
            finite(probs)
            if not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
                raise ArithmeticError(f"tokens {ids.tolist()} of {vocab}")
            last = vocab - 1 if target_ids is None else int(names[-1])
            same("best", ids[4:, 0], put([last], torch.int64))
    same("argmax", argmax_tokens(logits)[2:], put([-1, -1, vocab - 1], torch.int64))
    many = logits[4:].repeat(150, 1)
    same("argmax of many rows", argmax_tokens(many), put([vocab - 1] * 150, torch.int64))


def processing(vocab: int, dtype: torch.dtype) -> None:
    """Requests with every processor, with none, and padding; the last node's row ends memory."""
    from specattn.batch import DraftTree
    from specattn.kernels.processors import ProcessorColumns, note_tokens, process_logits

    batch, nodes, last, many = 3, 4, vocab - 1, 512
    wide = -(-vocab // 32)
    few = min(many, vocab)
    columns = ProcessorColumns(
        kinds=put([0, 63, 0]),
        history=put([[last] * vocab] * 3),
        penalties=put([[1.5, 0.3, 0.2]] * 3, F32),
        bias_ids=put([[last - at if at < few else -1 for at in range(many)]] * 3),
        bias_values=put([[2.0] * many] * 3, F32),
        bad_words=put([[[-1] * 14 + [last, last]] * 64] * 3),
        recent=put([[last] * 15] * 3),
        allowed=put([[-1] * wide] * 3),
        end_ids=put([[last] + [-1] * 63] * 3),
        ends_from=put([9] * 3),
    )
    tokens, rows = put([[last] * nodes] * batch, torch.int64), put([1, 0, 2], torch.int64)
    positions = put([[4, 5, 5, 6]] * batch, torch.int64)
    words = put([[[1], [3], [5], [11]]] * batch, torch.int64)
    # the rest of a tree is not read
    tree = DraftTree(tokens, positions, words, *[poison(0)] * 4)
    logits = noise(batch, nodes, vocab, dtype=dtype)
    for bitmask in (None, put([[[-1] * wide] * nodes] * batch)):
        got = process_logits(logits, tree, rows, bitmask, columns=columns)
        with by_torch():
            want = process_logits(logits, tree, rows, bitmask, columns=columns)
        if not torch.allclose(got, want, rtol=1e-5, atol=1e-5):
            raise ArithmeticError("processed logits differ")
    lens = put([2, 1, 2])
    wanted = replace(columns, history=columns.history.clone(), recent=columns.recent.clone())
    note_tokens(rows, tokens, lens, columns=columns)
    with by_torch():
        note_tokens(rows, tokens, lens, columns=wanted)
    same("history", columns.history, wanted.history)
    same("recent", columns.recent, wanted.recent)


def log_probs(vocab: int, dtype: torch.dtype) -> None:
    """Log-probabilities of paths into the second of two turns; the last node's row ends memory."""
    from specattn.batch import AcceptResult
    from specattn.kernels.logprobs import path_logprobs

    batch, nodes, depth, most = 3, 4, 3, 5
    logits = noise(batch, nodes, vocab, dtype=dtype)
    processed, probs = logits.float() / 2, logits.float().softmax(2)
    shape = 2, batch + 1, depth, 1 + most
    values, ids = poison(*shape), poison(*shape, dtype=torch.int64)
    lens = [3, 1, 2]
    accepted = AcceptResult(
        put([[0, 2, 3], [1, -1, -1], [0, 3, -1]]),
        put([[vocab - 1] * depth] * batch, torch.int64),
        put(lens),
        put([vocab - 1] * batch, torch.int64),
        probs,
    )
    path_logprobs(
        logits,
        accepted,
        put([2, 1, 3], torch.int64),
        put([1], torch.int64),
        counts=put([-1, most, 0, 2]),
        kinds=put([0, 1, 0, 2]),
        values_out=values,
        ids_out=ids,
        processed=processed,
    )
    few = min(most, vocab)
    finite(values[1, 0, :3, 0], values[1, 1, 0, : 1 + few], values[1, 2, :2, : 1 + min(2, few)])
    same("what nobody wants", ids[0], poison(*shape[1:], dtype=torch.int64))
    same("past a path's end", ids[1, 1, 1:], poison(2, 1 + most, dtype=torch.int64))


def draws(vocab: int, dtype: torch.dtype) -> None:
    """Distributions with and without cuts, coins, and draws: all rows of all kinds of settings."""
    from specattn.kernels.sampling import draw_tokens, path_coins, target_probs, uniform

    requests, rows = 6, 2
    logits = noise(requests * rows, vocab, dtype=dtype)
    # ties everywhere, and nothing to draw
    logits[4] = 0
    logits[5] = -torch.inf
    # more tokens at the cut than are searched in registers
    logits[6:8] = logits[6:8].round()
    temperature = put([1.0, 0.0, 0.7, 2.0, 1e-6, 1.0], F32)
    top_k = put([0, 3, 2, vocab // 2 + 1, 5, vocab])
    top_p = put([0.9, 0.5, 1.0, 0.8, 0.3, 1e-4], F32)
    coins = path_coins(put([3, -1, 2**62, 0, 7, 9], torch.int64), put([0, 5, 9, 2, 3, 4]), 5, 3)
    finite(coins, uniform(put([1, 2], torch.int64), put([[1, 2, 3], [0, 4, 9]], torch.int64), 1))
    for k, p in ((None, None), (top_k, None), (None, top_p), (top_k, top_p)):
        probs = target_probs(logits, temperature, k, p, rows)
        same("no distribution", probs[5].isnan(), probs[5] != 0)
        probs[5] = probs[4]
        finite(probs)
        if (probs.sum(1) - 1).abs().max() > 1e-4:
            raise ArithmeticError(f"sums {probs.sum(1).tolist()}")
        weights, ends = probs[::rows].contiguous(), coins[0, :, 0].contiguous()
        tokens = draw_tokens(weights, ends)
        if not (probs[::rows].gather(1, tokens[:, None]) > 0).all():
            raise ArithmeticError(f"drawn without weight: {tokens.tolist()}")


def parts(split: int, rows: int, size: int, dtype: torch.dtype) -> Tensor:
    return noise(split, rows, size, dtype=dtype if split == 1 else F32)


def layer(split: int, dtype: torch.dtype) -> None:
    """What lies between the products of a decoder layer, at widths that are no power of two."""
    from specattn.kernels import fused

    size, count, vocab = 1032, 5, 11
    weight, stream = noise(size, dtype=dtype), noise(count, size, dtype=dtype)
    product = parts(split, count, size, dtype)
    finite(*fused.add_rms_norm(product, stream, weight, 1e-5))
    # a row that is not asked for is not read
    product[:, 2] = NAN
    stream[2] = NAN
    wanted = put([4, 0, 4], torch.int64)
    finite(*fused.add_rms_norm(product, stream, weight, 1e-5, rows=wanted))
    table, ids = noise(vocab, size, dtype=dtype), put([3, vocab - 1, 0, 3, 7], torch.int64)
    wide = poison(count, 2 * size, dtype=dtype)
    normed, embedded = fused.embed_rms_norm(ids, table, weight, 1e-5, embedded=wide[:, size:])
    finite(normed, embedded)
    same("beside the embeddings", wide[:, :size].isnan(), torch.ones_like(wide[:, :size]).bool())
    hidden = noise(count, size, dtype=dtype)
    finite(*fused.embed_norm_pair(ids, table, hidden, weight, weight, 1e-5))
    # as of `add_rms_norm`
    hidden[2] = NAN
    sources = put([4, 0, 4, 1, 3], torch.int64)
    finite(*fused.embed_norm_pair(ids, table, hidden, weight, weight, 1e-5, rows=sources))
    finite(fused.silu_mul(parts(split, count, 2 * 700, dtype), dtype))
    finite(fused.split_k_reduce(parts(split, count, 700, dtype), dtype))


def rotation(
    heads: int,
    kv_heads: int,
    dim: int,
    split: int,
    dtype: torch.dtype,
    stored: torch.dtype | None = None,
) -> None:
    """Keys and values go to their slots of a poisoned pool, and nowhere else."""
    from specattn.kernels.fused import Rotation, qk_norm_rope_store_kv

    product = parts(split, 6, (heads + 2 * kv_heads) * dim, dtype)
    angles = torch.rand(50, dim // 2) * 6
    table = torch.cat([angles.cos(), angles.sin()], 1).to(DEVICE)
    # the table's last row, and past it
    positions = put([0, 49, 7, 7, 60, 1], torch.int64)
    norms = (noise(dim, dtype=dtype), noise(dim, dtype=dtype))
    slots = put([[9, 2, 5], [0, 7, 3]])
    for normed, places in ((norms, slots), (None, None)):
        rows = 10 if places is not None else 6
        q = poison(6, heads, dim, dtype=dtype)
        k, v = (poison(rows, kv_heads, dim, dtype=stored or dtype) for _ in range(2))
        rotation = Rotation(table, normed, 1e-5)
        qk_norm_rope_store_kv(
            product, positions, rotation, q, k, v, places, k_scale=2.0, v_scale=0.5
        )
        finite(q)
        written = torch.zeros(rows, dtype=torch.bool, device=DEVICE)
        written[slice(None) if places is None else places.flatten().long()] = True
        for pool in (k, v):
            holds = pool.float().isfinite()
            same("slots", holds, written[:, None, None].expand_as(holds))


def streamed(rows: int, out: int, inner: int, dtype: torch.dtype) -> None:
    """Products at the speed of memory, whole and gated; the kernel is for Hopper only."""
    from specattn.kernels.fused.stream import stream_gated, stream_linear, streams

    x, weight = noise(rows, inner, dtype=dtype), noise(out, inner, dtype=dtype)
    if not streams(x, weight):
        raise RuntimeError("the kernel of streamed products needs a Hopper GPU")
    finite(stream_linear(x, weight), stream_gated(x, weight))


STEP: dict[str, Callable[[], None]] = {
    "state tables": states,
    "path, bf16": partial(path, BF16, BF16),
    "path, f32 to f16": partial(path, F32, F16),
    "3 plans": partial(plans, 3),
    "34 plans": partial(plans, 34),
    "1 token": partial(choices, 1, F32),
    "1201 tokens, f16": partial(choices, 1201, F16),
    "9001 tokens, bf16": partial(choices, 9001, BF16),
    "logits processors of 1": partial(processing, 1, F32),
    "logits processors of 9001, bf16": partial(processing, 9001, BF16),
    "log-probabilities of 1": partial(log_probs, 1, F32),
    "log-probabilities of 9001, bf16": partial(log_probs, 9001, BF16),
    "draws of 1": partial(draws, 1, F32),
    "draws of 701, f16": partial(draws, 701, F16),
    "draws of 9001, bf16": partial(draws, 9001, BF16),
}
MODELS: dict[str, Callable[[], None]] = {
    "1 part, bf16": partial(layer, 1, BF16),
    "3 parts, f16": partial(layer, 3, F16),
    "f32": partial(layer, 2, F32),
    "rotation, bf16": partial(rotation, 8, 4, 64, 1, BF16),
    "rotation, 3 parts, head 24, f16": partial(rotation, 6, 1, 24, 3, F16),
    "rotation, f8": partial(rotation, 4, 2, 64, 2, BF16, F8),
    "streamed, 16 rows, f16": partial(streamed, 16, 300, 72, F16),
    "streamed, 33 rows, bf16": partial(streamed, 33, 1000, 4096, BF16),
    "streamed, 64 rows, bf16": partial(streamed, 64, 128, 8200, BF16),
    "streamed, 100 rows, bf16": partial(streamed, 100, 128, 8200, BF16),
}
