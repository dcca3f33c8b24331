"""R36: NVIDIA/TensorRT-LLM#15022, NVIDIA/TensorRT-LLM#16746.

The draft length became 0, or changed, after the graph had been chosen: the graph of one width ran
tokens of another.

No draft is a setting like any other, with a captured shape of one node; a step picks its setting
first, and each setting has a decoder and graphs of its own.
"""

from __future__ import annotations

import pytest

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from tests.tiny import TinyDraft, TinyTarget, dense_greedy
from tests.worlds import BACKENDS, DEVICE

PROMPT = [3, 1, 4, 1, 5]
# one slot is left of a context of 24
LONG = [7 * i % 61 for i in range(23)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_draft_is_a_captured_shape(backend):
    target, plain = TinyTarget(device=DEVICE), SpecConfig(0, 1, 1, 32, 2)
    run = Engine(target, None, plain, backend=backend, buckets=[2])
    decoder = run.decoder(plain)
    (part,) = decoder.modes
    assert decoder.runner.captured(part) == [2]
    (out,) = run.generate([Request(PROMPT, 12)])
    assert out.tokens == dense_greedy(target, PROMPT, 12)
    assert decoder.runner.stats.replays[part] == 11


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_width_has_graphs_of_its_own(backend):
    """Requests near their limit step by smaller settings than the rest of the batch."""
    target, config = TinyTarget(device=DEVICE), SpecConfig(4, 3, 9, 24, 2)
    run = Engine(target, TinyDraft(device=DEVICE), config, backend=backend, buckets=[2])
    out = run.generate([Request(PROMPT, 99), Request(LONG, 99)])
    for result, prompt in zip(out, (PROMPT, LONG), strict=True):
        assert result.tokens == dense_greedy(target, prompt, len(result.tokens))
    widths = [decoder.config.num_draft_tokens for decoder in run.decoders]
    assert widths[0] == 9
    assert 1 in widths, "no request was decoded to its last slot"
    for decoder in run.decoders:
        (part,) = decoder.modes
        (step,) = decoder.runner._captured[part][2].program.steps
        assert step.verify_plan.layout.q_len == decoder.config.num_draft_tokens
