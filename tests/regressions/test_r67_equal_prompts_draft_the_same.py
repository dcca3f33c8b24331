"""R67: sglang#8726.

Of equal prompts that were admitted together and shared their prefix, one got wrong proposals.

Prompts of one batch share whole pages, and each drafts as it does alone: equal ones the same, at
every step, whatever runs beside them and wherever the last page ends.
"""

from __future__ import annotations

import pytest
import torch

from specattn.engine.engine import Engine, Request
from tests.engines import engine as tiny_engine
from tests.samples import half, on_cpu
from tests.tiny import TinyDraft, TinyTarget
from tests.worlds import BACKENDS, DEVICE

PAGE, NEW = 4, 16
TEXT = [7 * at % 61 for at in range(5 * PAGE)]


def engine(backend, tree, models) -> Engine:
    options = {"models": models, "backend": backend, "buckets": [1, 4]}
    return tiny_engine(tree, page_size=PAGE, **options)


def row(run: Engine, out) -> int:
    """Those that share a prompt run after it."""
    return next(live.row for live in run.running if live.result is out)


def proposal(run: Engine, out) -> dict[str, torch.Tensor]:
    return {name: one[row(run, out)] for name, one in run.states.drafting.items()}


def same(ours, theirs) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@on_cpu(half, "length", "tree")
@pytest.mark.parametrize("tree", [(3, 1, 4), (3, 4, 9)], ids=["chain", "topk4"])
@pytest.mark.parametrize("length", [3 * PAGE - 1, 3 * PAGE, 3 * PAGE + 1, 4 * PAGE])
@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_rows_have_equal_proposals(backend, length, tree):
    models = TinyTarget(device=DEVICE), TinyDraft(device=DEVICE)
    one = Request(TEXT[:length], NEW)
    others = Request([*TEXT[: length - 1], 60], NEW), Request(TEXT[::-1][:length], NEW)
    first, second = one.samples(2)
    run, alone = engine(backend, tree, models), engine(backend, tree, models)
    outs = run.add([others[0], first, others[1], second])
    (want,) = alone.add([one])
    table = run.table.req_to_token[[row(run, out) for out in (outs[1], outs[3])], :length]
    assert int((table[0] == table[1]).sum()) == (length - 1) // PAGE * PAGE
    for _ in range(3):
        now = proposal(run, outs[1])
        same(now, proposal(run, outs[3]))
        same(now, proposal(alone, want))
        other = proposal(run, outs[0])
        assert not torch.allclose(now["hidden_states"], other["hidden_states"])
        run.step()
        alone.step()
    for each in (run, alone):
        while each.num_running:
            each.step()
    for out in (outs[1], outs[3]):
        assert out.tokens == want.tokens
        assert out.accept_lens == want.accept_lens
