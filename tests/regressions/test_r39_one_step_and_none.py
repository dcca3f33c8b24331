"""R39: sglang#21709.

With one speculative step there is no draft decode backend, and whatever asked the first of them
(the extend graph among others) was off or wrong.

One step drafts from the extend alone; none is plain decoding. Both capture and replay all of
their modes.
"""

from __future__ import annotations

import pytest

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from tests.tiny import TinyDraft, TinyTarget, dense_greedy
from tests.worlds import BACKENDS, DEVICE

PROMPTS = [[3, 14, 15, 9], [35]]


@pytest.mark.parametrize("indices", ["table", "csr"])
@pytest.mark.parametrize("tree", [(0, 1, 1), (1, 1, 2), (1, 4, 4)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_few_steps_decode(backend, tree, indices):
    target, config = TinyTarget(device=DEVICE), SpecConfig(*tree, 64, 2)
    run = Engine(
        target, TinyDraft(device=DEVICE), config, backend=backend, buckets=[2], indices=indices
    )
    runner = run.decoder(config).runner
    for mode in run.decoder(config).modes:
        assert runner.captured(mode) == [2]
    if config.num_steps:
        (part,) = run.decoder(config).modes
        (step,) = runner._captured[part][2].program.steps
        assert step.bound.multi_step.steps == ()
    for result, prompt in zip(
        run.generate([Request(p, 16) for p in PROMPTS]), PROMPTS, strict=True
    ):
        assert result.tokens == dense_greedy(target, prompt, 16)
        assert (max(result.accept_lens) == 2) == (config.num_steps == 1)
    assert not runner.stats.eager
