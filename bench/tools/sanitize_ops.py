"""The small operations that the sanitizer runs, by what they are for."""

from __future__ import annotations

from dataclasses import replace

import torch

from bench.tools.sanitize_ops_step import DIM, HEADS, Op, Step, by_torch
from specattn.batch import AcceptResult, Candidates, Linked, Marginals
from specattn.kernels.step import StepStart
from specattn.kernels.tree import Beams, accept_greedy

# width of a hidden state
HIDDEN = 4096


def trees(s: Step) -> list[Op]:
    logits = torch.randn(s.batch, 15, 64, device=s.device, generator=s.generator)
    log_probs, ranks = logits.log_softmax(-1).topk(8)
    block, best = Marginals(log_probs, ranks, log_probs[..., :0]), s.new_tree()
    return [
        Op("tree", lambda ops, _: s.build(ops)),
        Op("tree", lambda ops, _: ops.best_first_tree(block, s.bonus, s.lens, out=best)),
    ]


def lookups(s: Step) -> list[Op]:
    """Trees out of a text that repeats itself, their links, and what is written behind it."""
    text = s.ints(5, s.batch, s.table.shape[1]).int()
    tokens, parents = s.empty(s.batch, s.nodes), s.empty(s.batch, s.nodes)
    ngrams, emitted = s.empty(s.batch).int(), s.ints(s.vocab, s.batch, s.steps + 1)
    lens = torch.full_like(ngrams, s.steps)
    numbers = {"matches": s.topk, "min_ngram": 2, "max_ngram": 5, "num_steps": s.steps}
    out = {"tokens_out": tokens, "parents_out": parents, "ngrams_out": ngrams}
    linked, made = Linked(tokens, parents, ngrams), s.new_tree()
    return [
        Op("lookup", lambda ops, _: ops.lookup_tree(text, s.rows, s.lens, **numbers, **out)),
        Op("tree", lambda ops, _: ops.link_tree(linked, s.lens, out=made)),
        Op("lookup", lambda ops, _: ops.append_text(text, s.rows, s.lens, emitted, lens)),
    ]


def beams(s: Step) -> list[Op]:
    """The step between two draft forwards, and the last one, which picks nothing."""
    batch, topk, step = s.batch, s.topk, s.steps - 2
    words = -(-(s.steps - 1) * topk // 64)
    children = (
        torch.rand(batch, topk, topk, device=s.device, generator=s.generator),
        s.ints(s.vocab, batch, topk, topk),
    )
    candidates = Candidates(*(torch.zeros_like(table) for table in vars(s.candidates).values()))
    scores = torch.rand(batch, topk, device=s.device, generator=s.generator)
    ids = s.empty(batch, topk)
    above = Beams(scores, ids, ids, s.ints(2**62, batch, topk, words))
    tokens, rows = s.empty(2, batch, topk)
    out = Beams(torch.zeros_like(scores), tokens, rows, s.empty(batch, topk, words))
    return [
        Op(
            "tree",
            lambda ops, _: ops.select_beams(step, *children, above, candidates=candidates, out=out),
        ),
        Op(
            "tree",
            lambda ops, _: ops.append_candidates(step + 1, *children, above, candidates=candidates),
        ),
    ]


def accepts(s: Step) -> list[Op]:
    tokens = s.tree.tokens
    found = [Op("tree", lambda ops, _: s.follow(ops))]
    probs = torch.rand(s.batch, s.nodes, s.vocab, device=s.device, generator=s.generator)
    # the children share most of the mass, as a draft worth its time would have it
    probs.mul_(0.5 / s.vocab).scatter_add_(
        2,
        tokens[:, None, :].expand(-1, s.nodes, -1),
        torch.full((s.batch, s.nodes, s.nodes), 0.75 / s.topk, device=s.device),
    )
    probs.div_(probs.sum(2, keepdim=True))
    coins, final = (
        torch.rand(s.batch, s.steps + 1, device=s.device, generator=s.generator) for _ in range(2)
    )
    found.append(
        Op(
            "tree",
            lambda ops, _: ops.accept_sampled(s.tree, probs, coins, final, out=s.accepted),
        )
    )
    if s.nodes > s.steps:
        target, draft = probs[:, : s.steps + 1], probs[:, 1 : s.steps + 1]
        nodes = tokens[:, : s.steps + 1].contiguous()
        chain = replace(s.tree, tokens=nodes, draft_probs=draft)
        found.append(
            Op(
                "tree",
                lambda ops, _: ops.accept_rejection(chain, target, coins, final, out=s.accepted),
            )
        )
    return found


def kv(s: Step) -> list[Op]:
    """Moves of the accepted path, of all layers or of one, and the store of a layer's new rows."""
    with by_torch():
        accept_greedy(s.tree, s.argmax, out=s.accepted)
    path = s.accepted.accept_index
    sets = max(2, min(64, 128 // s.batch))
    slots = torch.randperm(sets * s.batch * s.nodes, device=s.device, generator=s.generator)
    tails = (slots + 1).int().view(sets, s.batch, s.nodes)
    shape = (s.layers, slots.numel() + 1, HEADS, DIM)
    pools = [torch.zeros(shape, dtype=torch.bfloat16, device=s.device) for _ in range(2)]
    for pool in pools:
        pool.normal_(generator=s.generator)
    rank = torch.arange(path.shape[1], device=s.device)
    int(((path >= 0) & (path != rank)).sum())
    new = [
        torch.randn(
            s.batch * s.nodes, HEADS, DIM, device=s.device, generator=s.generator
        ).bfloat16()
        for _ in range(2)
    ]
    single = [pool[:1] for pool in pools]
    return [
        Op("cache", lambda ops, i: ops.commit_kv(*pools, tails[i], path), sets),
        Op("cache", lambda ops, i: ops.commit_kv(*single, tails[i], path), sets),
        Op("cache", lambda ops, i: ops.store_kv(*new, pools[0][0], pools[1][0], tails[i]), sets),
    ]


def lists(s: Step) -> list[Op]:
    """What library backends read: index lists, masks, page tables."""
    batch, topk, steps, nodes = s.batch, s.topk, s.steps, s.nodes
    at = (s.table, s.rows, s.lens)
    keys = int(s.lens.sum()) + batch * nodes
    tails = s.ints(2**24, batch, nodes).int()
    positions = s.tree.positions
    words = s.tree.words
    indptr = torch.zeros(batch + 1, dtype=torch.int32, device=s.device)
    indptr[1:] = (s.lens + nodes).cumsum(0)
    mask_indptr = torch.zeros_like(indptr)
    mask_indptr[1:] = ((s.lens + nodes) * nodes + 7).div(8, rounding_mode="floor").cumsum(0)
    indices = torch.zeros(keys, dtype=torch.int32, device=s.device)
    masks = torch.zeros(int(mask_indptr[-1]), dtype=torch.uint8, device=s.device)
    pages, lens = s.empty(batch, s.table.shape[1] + nodes).int(), s.empty(batch).int()
    blocks = s.empty(batch, -(-(s.table.shape[1] + nodes) // 64)).int()
    ancestors, counts = s.empty(batch * nodes, nodes).int(), s.empty(batch * nodes).int()
    found = [
        Op("indices", lambda ops, _: ops.fill_lists(*at, positions, tails, indptr, indices, -1)),
        Op(
            "indices",
            lambda ops, _: ops.pack_masks(
                indptr, mask_indptr, s.lens, positions, positions, words, masks, -1
            ),
        ),
        Op("indices", lambda ops, _: ops.fill_page_table(*at, tails, pages, lens, q_len=nodes)),
        Op("indices", lambda ops, _: ops.fill_ancestor_table(tails, words, ancestors, counts)),
        Op("indices", lambda ops, _: ops.fill_block_table(*at, tails, blocks, lens, page_size=64)),
    ]
    if steps > 1 and batch <= 64:
        found += draft_lists(s, topk, steps)
    return found


def draft_lists(s: Step, topk: int, steps: int) -> list[Op]:
    branches = s.ints(2**24, s.batch, steps, topk).int()
    words = torch.zeros(s.batch, steps, topk, -(-steps * topk // 64), dtype=torch.int64)
    for step in range(steps):
        for branch in range(topk):
            for above in range(step + 1):
                node = above * topk + branch
                bit = 1 << node % 64
                words[:, step, branch, node // 64] |= bit - 2**64 if bit >> 63 else bit
    words = words.to(s.device)
    indptr = torch.zeros(steps, s.batch * topk + 1, dtype=torch.int32, device=s.device)
    width = s.batch * topk * (s.table.shape[1] + steps)
    indices = torch.zeros(steps, width, dtype=torch.int32, device=s.device)
    arguments = (s.lens, branches, words, indptr, indices)
    return [
        Op("indices", lambda ops, _: ops.fill_draft_kv(s.table, s.rows, *arguments)),
        # on the lists that this has just filled
        Op("indices", lambda ops, _: ops.fill_draft_tails(steps - 1, *arguments)),
    ]


def ends(s: Step) -> list[Op]:
    """The begin and the end of a step over state tables, and the features of the accepted path."""
    batch, topk, steps, device = s.batch, s.topk, s.steps, s.device
    reserve, depth = max(s.nodes, topk * (steps - 1)), steps + 1
    # bonus token, top tokens and their probabilities, hidden state, how the request draws
    kinds = [
        ((), torch.int64),
        ((topk,), torch.int64),
        ((topk,), torch.float32),
        ((HIDDEN,), torch.bfloat16),
        ((), torch.float32),
        ((), torch.int32),
        ((), torch.float32),
        ((), torch.int64),
    ]
    tables = [s.ints(100, batch + 1, *shape).to(dtype) for shape, dtype in kinds]
    outs = [s.empty(batch, *shape).to(dtype) for shape, dtype in kinds]
    lens = torch.cat([s.lens[:1] * 0, s.lens])
    slots = s.ints(2**24, batch + 1, s.table.shape[1]).int()
    start = StepStart(
        rows=s.empty(batch),
        seq_lens=s.empty(batch).int(),
        window=s.empty(batch, reserve).int(),
        positions=s.empty(batch, depth),
        draft_positions=s.empty(batch, steps - 1, topk),
    )
    rows, reserved, tokens = s.rows + 1, lens + reserve, s.ints(s.vocab, batch, depth)
    # host buffers of one step
    on_host = rows[None].cpu()
    on_host = on_host.pin_memory() if rows.is_cuda else on_host
    after, packed = lens.clone(), s.empty(batch, 1 + depth)
    host = torch.zeros(1, batch, 1 + depth, dtype=torch.int64, pin_memory=packed.is_cuda)
    turn = torch.zeros(1, dtype=torch.int64, device=device)
    new = [s.ints(100, *out.shape).to(out.dtype) for out in outs[:4]]
    features = torch.randn(batch, s.nodes, 3 * HIDDEN, device=device, generator=s.generator)
    features = features.bfloat16()
    path = s.ints(s.nodes, batch, depth).int()
    kept = s.ints(depth + 1, batch, low=1).int()
    accepted = AcceptResult(path, tokens, kept, new[0])
    gathered = {
        "features_out": torch.zeros(batch, depth, 3 * HIDDEN, dtype=torch.bfloat16, device=device),
        "last_rows_out": s.empty(batch),
        "after_out": s.empty(batch),
    }
    extended = {
        "slots_out": s.empty(batch, depth).int(),
        "positions_out": s.empty(batch, depth, 1),
    }
    return [
        Op("indices", lambda ops, _: ops.fill_window(slots, rows, s.lens, **extended)),
        Op(
            "step",
            lambda ops, _: ops.begin_step(
                on_host,
                turn,
                lens,
                reserved,
                slots,
                reserve_len=reserve,
                out=start,
                copies=list(zip(tables, outs, strict=True)),
            ),
        ),
        Op(
            "step",
            lambda ops, _: ops.end_step(
                rows,
                s.lens,
                accepted,
                seq_lens_table=after,
                bonus_table=tables[0],
                copies=list(zip(new[1:], tables[1:4], strict=True)),
                packed_out=packed,
            ),
        ),
        Op("step", lambda ops, _: ops.write_output(packed, host, turn)),
        Op("step", lambda ops, _: ops.gather_path(features, accepted, s.lens, **gathered)),
    ]


GROUPS = (trees, lookups, beams, accepts, kv, lists, ends)
