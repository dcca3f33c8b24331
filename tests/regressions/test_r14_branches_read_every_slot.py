"""R14: sglang#7725.

With pages and topk > 1, a branch duplicated the *indices* of its partial last page but not the KV
in it, and page-granular kernels read the holes: garbage drafts.

A branch lists slots, never pages: the prefix's own, then its ancestors'. Whatever part of a page
the prefix ends in, the drafts are those of single-slot pages.
"""

from __future__ import annotations

import pytest

from specattn.batch import ForwardMode
from specattn.config import SpecConfig
from tests.worlds import BACKENDS, DEVICE, inputs, same, world

MODE = ForwardMode.DRAFT_DECODE
# the draft nodes of a request cross one to three pages of 4
LENS = [8, 9, 10, 11, 12, 0, 1, 3]


def setting(page_size: int) -> SpecConfig:
    return SpecConfig(4, 3, 9, 256, 8, page_size)


@pytest.mark.parametrize("indices", ["table", "csr"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_drafts_do_not_depend_on_the_page_size(backend, indices):
    values = inputs(MODE, LENS, 1)
    drafts = []
    for page_size in (1, 4, 16):
        one = world(backend, [8], setting(page_size), indices=indices)
        one.poison(LENS)
        drafts.append(one.run(MODE, LENS, values))
    same(drafts[0], drafts[1])
    same(drafts[0], drafts[2])


def test_a_branch_lists_the_prefix_and_its_ancestors():
    one = world("torch_native", [8], setting(4), indices="csr")
    one.poison(LENS)
    one.run(MODE, LENS, inputs(MODE, LENS, 1))
    steps = one.step(MODE, 8).bound.multi_step
    words = steps.inputs.words[..., 0].tolist()
    assert steps.kv_indices.device.type == DEVICE.type
    for step in range(3):
        indptr = steps.kv_indptr[step].tolist()
        for b, length in enumerate(LENS):
            slots = one.table.req_to_token[one.rows[b]].tolist()
            for k in range(3):
                path = [node for node in range(9) if words[b][step][k] >> node & 1]
                begin, end = indptr[b * 3 + k : b * 3 + k + 2]
                listed = steps.kv_indices[step, begin:end].tolist()
                assert listed == slots[:length] + [slots[length + node] for node in path]
