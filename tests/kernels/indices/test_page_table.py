"""Page tables and the lse merge against lists and float64, on permuted slots and poison."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specattn.kernels.indices import (
    KeySlots,
    fill_ancestor_table,
    fill_block_table,
    fill_draft_kv,
    fill_lists,
    fill_page_table,
    fill_slots,
)
from tests.implementations import EXAMPLES, IMPLEMENTATIONS, by_each, using
from tests.kernels.tree_oracle import DEVICE, to_word

CANARY = -99
INT = {"dtype": torch.int32, "device": DEVICE}


def slot_lists(rng: random.Random, lens: list[int], tail: int, max_len: int):
    """A table with permuted rows and stale entries, and strided tail slots."""
    rows = rng.sample(range(1, len(lens) + 3), len(lens))
    table = [[rng.randrange(1, 2**31) for _ in range(max_len)] for _ in range(len(lens) + 3)]
    tails = [[rng.randrange(1, 2**31) for _ in range(tail)] for _ in lens]
    wide = torch.full((len(lens), tail + 2), CANARY, **INT)
    wide[:, :tail] = torch.tensor(tails, **INT)
    return rows, table, tails, wide[:, :tail]


@settings(max_examples=EXAMPLES)
@given(
    lens=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    q_len=st.integers(1, 5),
    more=st.integers(0, 8),
    window=st.sampled_from([-1, 0, 6, 50]),
)
@example([0], 4, 0, -1)
@example([1500, 3, 0, 1024], 5, 0, -1)
@by_each
def test_page_table_is_prefix_then_tail_from_the_window_on(lens, q_len, more, window):
    tail, max_len = q_len + more, max(*lens, 1)
    rng = random.Random(tail)
    rows, table, tails, tail_slots = slot_lists(rng, lens, tail, max_len)
    width = max_len + tail if window < 0 else min(max_len + tail, window + q_len)
    out = torch.full((len(lens), width), CANARY, **INT)
    counts = torch.full((len(lens),), CANARY, **INT)
    fill_page_table(
        KeySlots(
            torch.tensor(table, **INT),
            torch.tensor(rows, device=DEVICE),
            torch.tensor(lens, **INT),
            tail_slots,
        ),
        table=out,
        lens=counts,
        q_len=q_len,
        window_left=window,
    )
    for b, length in enumerate(lens):
        expected = table[rows[b]][:length] + tails[b]
        first_query = length + tail - q_len
        expected = expected[max(0, first_query - window) if window >= 0 else 0 :]
        assert counts[b] == len(expected)
        assert out[b].tolist() == expected + [CANARY] * (width - len(expected))


def test_one_program_may_walk_a_whole_row(monkeypatch):
    """With more rows than programs to share, every kernel that spreads rows loops over blocks."""
    monkeypatch.setattr("specattn.kernels.launch.PROGRAMS", 1)
    lens, tail, max_len = [2500, 0], 3, 3000
    rows, table, _, tail_slots = slot_lists(random.Random(0), lens, tail, max_len)
    rows, lens = torch.tensor(rows, device=DEVICE), torch.tensor(lens, **INT)
    table, width = torch.tensor(table, **INT), max_len + tail
    words = torch.ones(2, 1, 1, 1, dtype=torch.int64, device=DEVICE)
    found = []
    for implementation in IMPLEMENTATIONS:
        pages, blocks, lists = (torch.full((2, width), CANARY, **INT) for _ in range(3))
        counts = torch.zeros(3, 2, **INT)
        indptr = torch.zeros(1, 3, **INT)
        drafts = torch.full((1, 2 * (max_len + 1)), CANARY, **INT)
        ends = torch.tensor([0, 2503, 2506], **INT)
        with using(implementation):
            keys = KeySlots(table, rows, lens, tail_slots)
            fill_page_table(keys, table=pages, lens=counts[0], q_len=1)
            fill_block_table(keys, table=blocks, lens=counts[1], page_size=1)
            chain = keys._replace(tail=tail_slots[:, :1, None].contiguous())
            fill_draft_kv(chain, words, kv_indptr=indptr, kv_indices=drafts)
            fill_lists(
                keys,
                positions=words[:, 0, 0],
                kv_indptr=ends,
                kv_indices=lists.view(-1),
                window_left=-1,
            )
        found.append((pages, blocks, drafts, indptr, lists, counts))
    for torch_made, kernel in zip(*found, strict=True):
        assert torch.equal(torch_made, kernel)


@pytest.mark.parametrize("programs", [2048, 1])
@pytest.mark.parametrize(
    ("lens", "context", "blocks", "page", "apart"),
    [
        ([7, 0, 12, 1], 12, 3, 4, 4),
        ([5, 3], 9, 9, 1, 1),
        ([40, 33, 16], 40, 3, 16, 32),
        ([2500, 3], 3000, 200, 16, 96),
        ([99, -5, 64], 50, 4, 16, 16),
        ([99, 3], 90, 2, 16, 16),
    ],
)
def test_blocks_become_slots(
    implementation, lens, context, blocks, page, apart, programs, monkeypatch
):
    """Of rows in any order, up to each length; lines of row 0, and what is past a length, stay."""
    monkeypatch.setattr("specattn.kernels.launch.PROGRAMS", programs)
    rng = random.Random(context)
    count = len(lens) + 3
    rows = rng.sample(range(1, count), len(lens))
    most = 2**31 // apart - 1
    lines = [[rng.randrange(1, most) for _ in range(blocks)] for _ in lens]
    # no blocks of the pools: their slots are padding's
    outside, last = [-1, -(2**31), most, 2**31 - 1][:blocks], lines[-1]
    last[: len(outside)] = outside
    wanted = dict(zip(rows, zip(lens, lines, strict=True), strict=True))
    lines.append([CANARY] * blocks)  # padding's
    wide = torch.full((count, context + 5), CANARY, **INT)
    reserved = torch.full((count,), CANARY, **INT)
    table = torch.full((len(lines), blocks + 2), CANARY, **INT)
    table[:, :blocks] = torch.tensor(lines, **INT)
    fill_slots(
        torch.tensor([*rows, 0], device=DEVICE),
        table[:, :blocks],
        torch.tensor([*lens, 7], **INT),
        req_to_token=wide[:, :context],
        reserved=reserved,
        page_size=page,
        block_stride=apart,
        num_blocks=most,
    )
    last[: len(outside)] = [0] * len(outside)
    assert reserved[0] == 0
    for row in range(count):
        length, line = wanted.get(row, (0, []))
        length = min(max(length, 0), context, blocks * page)
        slots = [line[at // page] * apart + at % page for at in range(length)]
        assert wide[row].tolist() == slots + [CANARY] * (context + 5 - length)
        assert reserved[row] == (length if row in wanted or not row else CANARY)


@settings(max_examples=EXAMPLES)
@given(st.integers(1, 3), st.integers(1, 5), st.integers(0, 70))
@example(2, 2, 128)
@by_each
def test_ancestors_are_packed_in_bit_order(batch, q_len, more):
    tail = q_len + more
    rng = random.Random(tail)
    _, _, tails, tail_slots = slot_lists(rng, [0] * batch, tail, 1)
    count = -(-tail // 64)
    bits = [[rng.getrandbits(tail) for _ in range(q_len)] for _ in range(batch)]
    bits[0][0] = 0
    beyond = 2 ** (64 * count) - 2**tail  # set bits past the tail mean nothing
    words = torch.tensor(
        [
            [[to_word((row | beyond) >> 64 * w & 2**64 - 1) for w in range(count)] for row in req]
            for req in bits
        ],
        device=DEVICE,
    )
    spaced = torch.stack([words, words + 1], 1)[:, 0]  # a step of the draft's words: strided
    out = torch.full((batch * q_len, tail), CANARY, **INT)
    counts = torch.full((batch * q_len,), CANARY, **INT)
    fill_ancestor_table(tail_slots, spaced, table=out, lens=counts)
    for query in range(batch * q_len):
        b, i = divmod(query, q_len)
        expected = [tails[b][j] for j in range(tail) if bits[b][i] >> j & 1]
        assert counts[query] == len(expected)
        assert out[query].tolist() == expected + [CANARY] * (tail - len(expected))
