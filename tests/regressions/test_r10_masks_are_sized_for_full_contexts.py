"""R10: sglang#29450, sglang#9687, sglang#9481.

The verify graph's mask buffer had room for ``n`` rows of a full context without the ``n`` columns
of the tree itself, and a mask was not padded to the graph's batch: failures near the limit.

Attention here has no mask buffer: a tree's visibility is its words. Where a foreign mask is made,
its size comes from the function that places its cells, padded requests included.
"""

from __future__ import annotations

import torch

from specattn.batch import ForwardMode
from specattn.masks import full_mask, mask_indptr, packed_indptr, packed_mask
from specattn.trees import words_from_parents
from tests.worlds import CONFIG, DEVICE, world

NODES, CONTEXT, LIVE, PADDED = 6, 40, 3, 5


def test_masks_of_full_contexts_and_padding_fit():
    words = words_from_parents(torch.tensor([-1, 0, 0, 1, 2, 2])).expand(PADDED, -1, -1).to(DEVICE)
    lens = torch.tensor([CONTEXT] * LIVE + [0] * (PADDED - LIVE), dtype=torch.int32, device=DEVICE)
    cells = mask_indptr(lens, NODES)
    assert int(cells[-1]) == LIVE * NODES * (CONTEXT + NODES) + (PADDED - LIVE) * NODES**2
    assert len(full_mask(words, lens)) == int(cells[-1])
    sizes = [(NODES * (length + NODES) + 7) // 8 for length in lens.tolist()]
    assert packed_indptr(lens, NODES).diff().tolist() == sizes
    worst = PADDED * (NODES * (CONTEXT + NODES) + 7) // 8
    assert int(packed_indptr(lens, NODES)[-1]) <= worst
    memory = torch.full((worst + 16,), 0xA5, dtype=torch.uint8, device=DEVICE)
    packed_mask(words, lens, memory[:worst])
    assert (memory[worst:] == 0xA5).all()
    assert torch.equal(memory[: int(packed_indptr(lens, NODES)[-1])], packed_mask(words, lens))


def test_a_verify_plan_does_not_grow_with_the_context():
    plans = [
        world("torch_native", [8], config).step(ForwardMode.TARGET_VERIFY, 8).verify_plan
        for config in (CONFIG, type(CONFIG)(4, 3, 9, 64, 8, 4))
    ]
    for name in ("tail_words", "tail_slots", "positions", "seq_lens"):
        assert getattr(plans[0], name).shape == getattr(plans[1], name).shape
