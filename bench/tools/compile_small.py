"""Everything of a step besides attention, as `bench.tools.compile_targets` launches it."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import torch

from bench.tools.compile_offline import BATCH, BF16, CONTEXT, F32, I32, LIMITS, zeros
from specattn.batch import AcceptResult, Candidates, DraftTree, Linked, Marginals
from specattn.kernels import cache as caches
from specattn.kernels import (
    fused,
    indices,
    logprobs,
    lookup,
    masks,
    processors,
    sampling,
    step,
    tree,
)
from specattn.kernels.attention import merge_lse
from specattn.kernels.fused.stream import stream_gated, stream_linear


def draft_tree(nodes: int) -> DraftTree:
    ids, words = zeros(BATCH, nodes), zeros(BATCH, nodes, -(-nodes // 64))
    return DraftTree(ids, ids, words, ids, ids, ids, zeros(BATCH, 0, 0, dtype=F32))


def drafted(topk: int, steps: int) -> Candidates:
    count = topk + (steps - 1) * topk**2
    parents, none = zeros(BATCH, 1 + (steps - 1) * topk), zeros(BATCH, 0, 0, dtype=F32)
    return Candidates(zeros(BATCH, count, dtype=F32), zeros(BATCH, count), parents, none)


def build_tree(topk: int = 8, steps: int = 7, nodes: int = 64) -> None:
    roots = zeros(BATCH), zeros(BATCH, dtype=I32)
    tree.build_tree(drafted(topk, steps), *roots, topk=topk, out=draft_tree(nodes))


def best_first_tree(nodes: int = 128) -> None:
    block = zeros(BATCH, 15, 8, dtype=F32)
    tree.best_first_tree(
        Marginals(block, zeros(BATCH, 15, 8), block[..., :0]),
        zeros(BATCH),
        zeros(BATCH, dtype=I32),
        out=draft_tree(nodes),
        scores_out=zeros(BATCH, nodes, dtype=F32),
    )


def lookups(matches: int = 8, steps: int = 7, nodes: int = 64) -> None:
    """Trees out of text, their links, and what is written behind the text."""
    text, rows, lens = zeros(BATCH, CONTEXT, dtype=I32), zeros(BATCH), zeros(BATCH, dtype=I32)
    tokens, parents = zeros(BATCH, nodes), zeros(BATCH, nodes)
    lookup.lookup_tree(
        text,
        rows,
        lens,
        matches=matches,
        min_ngram=2,
        max_ngram=5,
        num_steps=steps,
        tokens_out=tokens,
        parents_out=parents,
        ngrams_out=lens,
    )
    for chosen in (None, lens):
        tree.link_tree(Linked(tokens, parents, chosen), lens, out=draft_tree(nodes))
    lookup.append_text(text, rows, lens, zeros(BATCH, steps + 1), lens)


def beams(topk: int = 8, steps: int = 7) -> None:
    candidates, ids = drafted(topk, steps), zeros(BATCH, topk)
    children = zeros(BATCH, topk, topk, dtype=F32), zeros(BATCH, topk, topk)
    best = tree.Beams(zeros(BATCH, topk, dtype=F32), ids, ids, zeros(BATCH, topk, 1))
    tree.append_candidates(steps - 1, *children, best, candidates=candidates)
    tree.select_beams(1, *children, best, candidates=candidates, out=best)
    roots = [child[:, :1].contiguous() for child in children]
    tree.select_beams(0, *roots, None, candidates=candidates, out=best)
    tree.grow_words(zeros(BATCH, steps, topk, 1), 2, zeros(BATCH, topk), flat=True)


def copies_in(n: int = 100, topk: int = 8, steps: int = 7) -> None:
    """What an engine's tensors become, with masks of all kinds."""
    table, rows, lens = zeros(2, CONTEXT, dtype=I32), zeros(BATCH), zeros(BATCH, dtype=I32)
    slots, words = zeros(BATCH, n, dtype=I32), zeros(BATCH, n, -(-n // 64))
    window = masks.Window(rows, 99, 16, zeros(BATCH, 2048, dtype=I32), lens, slots, slots, words)
    mask = zeros(BATCH, n * n, dtype=torch.uint8)
    for kind in masks.KINDS:
        own = None if kind == "prefix" else zeros(BATCH, n)
        masks.copy_in_rows(
            rows,
            rows if own is None else lens,
            own,
            own,
            None if own is None else mask,
            kind=kind,
            counted=n,
            req_to_token=table,
            out=masks.PlanInputs(rows, lens, slots, slots, zeros(BATCH, n), words),
            window=window if kind.startswith("full") else None,
        )
    for width in (1, topk):
        nodes = zeros(BATCH, steps, width, dtype=I32)
        masks.copy_in_steps(
            rows,
            lens,
            nodes if width > 1 else None,
            counted=0,
            req_to_token=table,
            out=masks.PlanInputs(
                rows, lens, nodes, nodes, nodes.long(), zeros(BATCH, steps, width, 1)
            ),
        )
    masks.copy_in_prompts(
        rows,
        lens,
        lens,
        slots[0],
        req_to_token=table,
        window=replace(window, store=slots[:1]),
        rows_out=rows,
        seq_lens_out=lens,
        indptr_out=zeros(BATCH + 1, dtype=I32),
        slots_out=slots[0],
    )


def accepts(n: int = 64, steps: int = 7, vocab: int = 32000) -> None:
    coins = zeros(BATCH, steps + 1, dtype=F32)
    path, lens = zeros(BATCH, steps + 1), zeros(BATCH, dtype=I32)
    out = AcceptResult(path.int(), path, lens, zeros(BATCH))
    probs = torch.zeros(1, 1, vocab).expand(BATCH, n, vocab)
    nodes = replace(draft_tree(n), draft_probs=probs[:, :steps])
    tree.accept_greedy(nodes, nodes.tokens, out=out)
    tree.accept_sampled(nodes, probs, coins, coins, out=out)
    tree.accept_rejection(nodes, probs, coins, coins, out=out)


def choices(dtype: torch.dtype = BF16, topk: int = 8, vocab: int = 32000) -> None:
    logits = zeros(BATCH, vocab, dtype=dtype)
    sampling.top_tokens(
        logits,
        topk,
        probs_out=zeros(BATCH, topk, dtype=F32),
        ids_out=zeros(BATCH, topk),
        target_ids=zeros(vocab),
    )
    sampling.argmax_tokens(logits)


def laws(dtype: torch.dtype = BF16, vocab: int = 32000) -> None:
    logits, values = zeros(BATCH, vocab, dtype=dtype), zeros(BATCH, dtype=F32)
    sampling.target_probs(logits, values, values.int(), values, 1)
    # many rows have fewer bins
    many = logits.repeat(4, 1)
    sampling.target_probs(many, values, values.int(), None, 4)
    sampling.target_probs(many, values, None, values, 4)
    sampling.target_probs(logits, values, values.int(), values, 1, values)
    sampling.target_probs(many, values, None, None, 4, values)
    sampling.path_coins(zeros(BATCH), values.int(), 4, 2)
    sampling.draw_tokens(logits.float(), values)


def processing(dtype: torch.dtype = BF16, vocab: int = 128256) -> None:
    rows, counts = zeros(BATCH), zeros(BATCH, dtype=I32)
    wide = processors.bitmask_words(vocab)
    columns = processors.ProcessorColumns(
        kinds=counts,
        history=zeros(BATCH, vocab, dtype=I32),
        penalties=zeros(BATCH, 3, dtype=F32),
        bias_ids=zeros(BATCH, 512, dtype=I32),
        bias_values=zeros(BATCH, 512, dtype=F32),
        bad_words=zeros(BATCH, 64, 16, dtype=I32),
        recent=zeros(BATCH, 15, dtype=I32),
        allowed=zeros(BATCH, wide, dtype=I32),
        end_ids=zeros(BATCH, 64, dtype=I32),
        ends_from=counts,
    )
    # plain decoding has one node, a number that kernels are compiled for
    for nodes, bitmask in ((16, None), (16, zeros(BATCH, 16, wide, dtype=I32)), (1, None)):
        logits = zeros(BATCH, nodes, vocab, dtype=dtype)
        processors.process_logits(logits, draft_tree(nodes), rows, bitmask, columns=columns)
    if vocab > 1:
        processing(dtype, vocab=1)
    for depth in (6, 1):
        processors.note_tokens(rows, zeros(BATCH, depth), counts, columns=columns)


def log_probs(
    dtype: torch.dtype = BF16, vocab: int = 128256, depth: int = 6, nodes: int = 16
) -> None:
    logits, law = zeros(BATCH, nodes, vocab, dtype=dtype), zeros(BATCH, nodes, vocab, dtype=F32)
    path, lens, rows = zeros(BATCH, depth), zeros(BATCH, dtype=I32), zeros(BATCH)
    for most, processed in ((20, law), (0, None)):
        out = zeros(2, BATCH, depth, 1 + most)
        tables = {"counts": lens, "kinds": lens, "values_out": out.float(), "ids_out": out}
        accepted = AcceptResult(path.int(), path, lens, rows, processed)
        logprobs.path_logprobs(logits, accepted, rows, zeros(1), **tables, processed=processed)
    # of one node, as after a prompt, and one token
    if vocab > 1:
        log_probs(dtype, vocab=1, depth=1, nodes=1)


def kv_operations(dtype: torch.dtype = BF16, stored: torch.dtype | None = None) -> None:
    pool = zeros(2, 16, 8, 128, dtype=stored or dtype)
    slots = zeros(BATCH, 8, dtype=I32)
    caches.commit_kv(pool, pool.clone(), slots, slots)
    caches.commit_kv([*pool], [*pool], slots, slots, offsets=zeros(2, 2), unit=16)
    new = zeros(BATCH * 8, 8, 128, dtype=dtype)
    caches.store_kv(new, new, pool[0], pool[1], slots)
    caches.write_slots(slots.view(-1), slots, slots[0], pieces=2, longest=9, page_size=16)
    parts, logs = zeros(BATCH, 8, 32, 128, dtype=dtype), zeros(BATCH, 8, 32, dtype=F32)
    merge_lse(parts, logs, slots[:, 0], parts, logs, slots, parts, logs)


def glue_kernels(dtype: torch.dtype = BF16, split: int = 5) -> None:
    parts, x = zeros(split, BATCH, 6144, dtype=F32), zeros(BATCH, 4096, dtype=dtype)
    ids, positions = zeros(BATCH), zeros(BATCH)
    fused.add_rms_norm(parts[..., :4096], x, x[0], 1e-5, rows=ids)
    fused.embed_rms_norm(ids, x, x[0], 1e-5)
    for rows in (None, ids):
        fused.embed_norm_pair(ids, x, x, x[0], x[0], 1e-5, rows=rows)
    fused.silu_mul(parts, dtype)
    fused.split_k_reduce(parts, dtype)
    q, cache = zeros(BATCH, 32, 128, dtype=dtype), zeros(2, 16, 8, 128, dtype=dtype)
    fused.qk_norm_rope_store_kv(
        parts,
        positions,
        fused.Rotation(zeros(9, 128, dtype=F32), (x[0, :128], x[0, :128]), 1e-5),
        q,
        cache[0],
        cache[1],
        zeros(2, 4, dtype=I32),
    )


def index_lists(topk: int = 8, steps: int = 7) -> None:
    table, rows, lens = zeros(2, CONTEXT, dtype=I32), zeros(BATCH), zeros(BATCH, dtype=I32)
    branches, words = zeros(BATCH, steps, topk, dtype=I32), zeros(BATCH, steps, topk, 1)
    indptr = zeros(steps, BATCH * topk + 1, dtype=I32)
    width = indices.draft_kv_width(BATCH, topk, steps, CONTEXT)
    slots = zeros(steps, width, dtype=I32)
    indices.fill_draft_kv(table, rows, lens, branches, words, indptr, slots)
    indices.fill_draft_tails(1, lens, branches, words, indptr, slots)
    tails, words = zeros(BATCH, 64, dtype=I32), zeros(BATCH, 64, 1)
    lists, keys = zeros(BATCH + 1, dtype=I32), indices.KeySlots(table, rows, lens, tails)
    for reach in (-1, 100):
        indices.fill_lists(
            keys,
            positions=words[..., 0],
            kv_indptr=lists,
            kv_indices=slots[0],
            window_left=reach,
        )
        masks.pack_masks(
            kv_indptr=lists,
            mask_indptr=lists,
            seq_lens=lens,
            positions=words[..., 0],
            tail_positions=words[..., 0],
            tail_words=words,
            mask=zeros(BATCH, dtype=torch.uint8),
            window_left=reach,
        )
        indices.fill_page_table(
            keys,
            table=zeros(BATCH, CONTEXT + 64, dtype=I32),
            lens=lens,
            q_len=64,
            window_left=reach,
        )
    indices.fill_ancestor_table(
        tails,
        words,
        table=zeros(BATCH * 64, 64, dtype=I32),
        lens=zeros(BATCH * 64, dtype=I32),
    )
    indices.fill_block_table(keys, table=zeros(BATCH, 32, dtype=I32), lens=lens, page_size=64)
    indices.fill_slots(
        rows, tails, lens, req_to_token=table, reserved=lens, page_size=16, block_stride=32
    )


def windows(width: int = 16, topk: int = 4, depth: int = 6) -> None:
    rows, lens = zeros(BATCH), zeros(BATCH, dtype=I32)
    table, slots = zeros(BATCH, CONTEXT, dtype=I32), zeros(BATCH, width, dtype=I32)
    positions = zeros(BATCH, depth, topk)
    indices.fill_window(table, rows, lens, slots_out=slots)
    indices.fill_window(table, rows, lens, slots_out=slots, positions_out=positions)
    indices.fill_window(table, rows, lens, slots_out=slots, positions_out=positions[..., :1])


def step_ends(topk: int = 4, depth: int = 6, dtype: torch.dtype = BF16) -> None:
    rows, lens, tokens = zeros(BATCH), zeros(BATCH, dtype=I32), zeros(BATCH, depth)
    state = (
        zeros(BATCH),
        zeros(BATCH, topk, dtype=F32),
        zeros(BATCH, 4096, dtype=dtype),
        zeros(BATCH, 32000, dtype=F32),
    )
    step.begin_step(
        zeros(2, BATCH),
        zeros(1),
        lens,
        lens,
        zeros(BATCH, CONTEXT, dtype=I32),
        reserve_len=16,
        out=step.StepStart(
            rows,
            lens,
            zeros(BATCH, 16, dtype=I32),
            tokens,
            zeros(BATCH, depth - 2, topk),
        ),
        copies=[(table, table) for table in state],
    )
    accepted = AcceptResult(tokens.int(), tokens, lens, zeros(BATCH))
    step.end_step(
        rows,
        lens,
        accepted,
        seq_lens_table=lens,
        bonus_table=zeros(BATCH),
        copies=[(table, table) for table in state],
        packed_out=zeros(BATCH, 1 + depth),
    )
    step.gather_path(
        zeros(BATCH, 16, 12288, dtype=dtype),
        accepted,
        lens,
        features_out=zeros(BATCH, depth, 12288, dtype=dtype),
        last_rows_out=rows,
        after_out=rows,
    )
    step.write_output(zeros(BATCH, 1 + depth), zeros(2, BATCH, 1 + depth), zeros(1))


def products(dtype: torch.dtype) -> None:
    """The smallest and the largest tile of products whose weights are streamed."""
    multiprocessors = mock.patch(
        "specattn.kernels.fused.stream._multiprocessors", return_value=LIMITS[90].sms
    )
    weight = zeros(2048, 1024, dtype=dtype)
    with multiprocessors:
        for rows in (8, 100):
            x = zeros(rows, 1024, dtype=dtype)
            stream_linear(x, weight)
            stream_gated(x, weight)
