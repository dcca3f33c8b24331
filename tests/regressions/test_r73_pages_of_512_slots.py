"""R73: flashinfer#4347.

Attention over pages of more than 128 slots was wrong.

Pages of 256 and 512 slots give what pages of one slot do, for prompts, drafts and trees on both
sides of a page's edge and across it.
"""

from __future__ import annotations

import pytest

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from tests.books import check_books
from tests.oracle import check, make_tree_case, oracle_tree
from tests.regressions.attend import KINDS, attend
from tests.tiny import TinyDraft, TinyTarget, dense_greedy
from tests.worlds import BACKENDS, DEVICE, MODES, inputs, same, world

TEXT = [7 * at % 61 for at in range(600)]


@pytest.mark.parametrize("page", [256, 512])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_that_of_the_oracle(kind, page):
    lens = [page - 2, page - 1, page, page + 1]
    case = make_tree_case(
        lens, q_len=4, heads=(2, 1), head_dim=16, page_size=page, device=DEVICE.type
    )
    attend(case, kind)
    check(case, oracle_tree(case))


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_mode_does_as_with_single_slot_pages(backend, mode):
    lens, outs = [505, 511, 512, 513], []
    for page in (1, 256, 512):
        one = world(backend, [4], SpecConfig(4, 3, 9, 1024, 8, page))
        one.poison(lens)
        outs.append(one.run(mode, lens, inputs(mode, lens, 5)))
    same(outs[0], outs[1])
    same(outs[0], outs[2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_texts_cross_the_edge_of_a_page(backend):
    """The last two share a page."""
    models = TinyTarget(device=DEVICE), TinyDraft(device=DEVICE)
    run = Engine(*models, SpecConfig(3, 3, 9, 1024, 4, 512), backend=backend, buckets=[4])
    prompts = [TEXT[:length] for length in (505, 511, 513, 514)]
    outs = run.generate([Request(prompt, 12) for prompt in prompts])
    for prompt, out in zip(prompts, outs, strict=True):
        assert out.tokens == dense_greedy(models[0], prompt, 12)
    check_books(run.table)
