"""R24: vllm#53051, vllm#50532, vllm#53059, vllm#49918, syv-ai/qwen38#25.

Graphs were picked by shape alone, so a prompt of exactly as many tokens as a verify has replayed
the verify graph: garbage for prompts of one length.

The mode is the key of a graph. Prompts of every width that some graph has decode as from scratch,
and a mode that was not captured is refused.
"""

from __future__ import annotations

import pytest

from specattn.batch import ForwardMode
from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.errors import NotCapturedError
from tests.tiny import TinyDraft, TinyTarget, dense_greedy
from tests.worlds import BACKENDS, CONFIG, DEVICE, inputs, world

# widths of draft steps, extend and verify, and their neighbours
WIDTHS = range(1, 11)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_prompt_as_wide_as_a_graph_is_still_a_prompt(backend):
    target, draft = TinyTarget(device=DEVICE), TinyDraft(device=DEVICE)
    run = Engine(target, draft, SpecConfig(4, 3, 9, 64, 1, 4), backend=backend, buckets=[1])
    for width in WIDTHS:
        prompt = [(7 * i + width) % 61 for i in range(width)]
        before = run.decoder(run.config).runner.stats.replays.total()
        run.add([Request(prompt, 6)])
        assert run.decoder(run.config).runner.stats.replays.total() == before
        (live,) = run.running
        while run.num_running:
            run.step()
        assert live.result.tokens == dense_greedy(target, prompt, 6)


def test_a_width_that_fits_is_no_reason_to_replay():
    one = world(BACKENDS[-1], [1])
    values = inputs(ForwardMode.TARGET_VERIFY, [9], 0, CONFIG)
    with pytest.raises(NotCapturedError, match="'decode' was never captured"):
        one.run(ForwardMode.DECODE, [9], values)
