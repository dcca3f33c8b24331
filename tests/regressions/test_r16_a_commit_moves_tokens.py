"""R16: sglang#26982, sglang#31218.

A KV pool type had no move operation (a release was reverted for it); another moved single tokens
in a page-interleaved layout and corrupted its index keys.

Every pool moves tokens, in all layers, for K and V of any width. After a commit, each position up
to the new length holds the token of the accepted path, whatever the pages.
"""

from __future__ import annotations

import pytest
import torch

from specattn.batch import AcceptResult
from specattn.cache.kv_pool import KVPool
from specattn.cache.slot_table import SlotTable
from specattn.config import AttnConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NODES, STEPS = 6, 3
PATHS = [[0, 2, 5], [0], [0, 1, 3, 4]]
LENS = [5, 0, 7]


def accepted() -> AcceptResult:
    index = torch.tensor([path + [-1] * (STEPS + 1 - len(path)) for path in PATHS])
    lens = torch.tensor([len(path) for path in PATHS])
    return AcceptResult(
        index.int().to(DEVICE), index.to(DEVICE), lens.int().to(DEVICE), lens.to(DEVICE)
    )


@pytest.mark.parametrize("page_size", [1, 4])
def test_every_position_holds_the_token_of_the_path(page_size):
    table = SlotTable(
        max_num_reqs=3, max_context_len=16, num_slots=64, page_size=page_size, device=DEVICE
    )
    rows = [table.allocate() for _ in LENS]
    for length in (3, 9, 16):
        table.reserve(rows, [length] * 3)
    layers = [AttnConfig(4, 2, 8, 12)] * 3
    pool = KVPool(layers, 64, DEVICE)
    pool.k.normal_()
    pool.v.normal_()
    slots = table.req_to_token[rows].long()  # [3, 16]
    tails = torch.stack([row[n : n + NODES] for row, n in zip(slots, LENS, strict=True)])
    want = {}
    for name in ("k", "v"):
        cache = getattr(pool, name)
        want[name] = [
            torch.cat([cache[:, row[:length]], cache[:, row[[length + node for node in path]]]], 1)
            for row, length, path in zip(slots, LENS, PATHS, strict=True)
        ]
    pool.commit(tails.int(), accepted())
    for name, expected in want.items():
        cache = getattr(pool, name)
        for row, tokens in zip(slots, expected, strict=True):
            assert torch.equal(cache[:, row[: tokens.shape[1]]], tokens)
    assert torch.equal(slots, table.req_to_token[rows].long())
