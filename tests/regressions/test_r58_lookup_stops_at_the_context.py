"""R58: vllm#42533.

A proposal that was looked up in the text reached beyond the model's longest context, and the steps
after it were refused, or wrote past the request's row.

A lookup that does not fit takes a smaller step, as any draft does: the context is filled to its
last slot, with the text of plain decoding, and requests beside it do not notice.
"""

from __future__ import annotations

import pytest

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.speculative.proposers.lookup import LookupFirst, LookupProposer
from tests.books import check_books
from tests.samples import half, on_cpu
from tests.speculative.blocks import poison
from tests.tiny import TinyDraft, TinyTarget, dense_greedy
from tests.worlds import DEVICE

CONTEXT, STEPS = 48, 8
# the target goes on with it, so that what is looked up is right
CYCLE = [17, 45, 14, 4]
PROMPTS = [(CYCLE * CONTEXT)[: CONTEXT - short] for short in (1, 2, 3, 7, 8, 9, 10, 20)]


@on_cpu(half, "kind", "page")
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("kind", ["lookup", "tree", "first"])
def test_contexts_are_filled_to_the_last_slot(kind, page):
    target, draft = TinyTarget(device=DEVICE), LookupProposer()
    if kind == "first":
        draft = LookupFirst(draft, TinyDraft(device=DEVICE))
    shape = (STEPS, 3, 20) if kind == "tree" else (STEPS, 1, STEPS + 1)
    config = SpecConfig(*shape, CONTEXT, 9, page)
    run = Engine(target, draft, config, graphs=False, buckets=[9])
    poison(run)
    furthest = []

    def spy(input_ids, positions, *rest, forward=target.forward):
        furthest.append(int(positions.max()))
        return forward(input_ids, positions, *rest)

    target.forward = spy
    outs = run.generate([*(Request(prompt, 99) for prompt in PROMPTS), Request(CYCLE, 30)])
    assert max(furthest) == CONTEXT - 1
    for prompt, out in zip(PROMPTS, outs[:-1], strict=True):
        assert out.finish_reason == "context"
        # the newest token has no slot
        assert len(prompt) + len(out.tokens) == CONTEXT + 1
        assert out.tokens == dense_greedy(TinyTarget(device=DEVICE), prompt, len(out.tokens))
    assert max(n for out in outs for n in out.accept_lens) > STEPS // 2
    assert outs[-1].tokens == dense_greedy(TinyTarget(device=DEVICE), CYCLE, 30)
    check_books(run.table)
    assert run.table.num_free_slots == (run.table.num_pages - 1) * page
