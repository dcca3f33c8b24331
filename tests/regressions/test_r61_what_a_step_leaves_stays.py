"""R61: vllm#53488, vllm#53520.

A draft's graphs shared their memory with the target's: replaying one overwrote the hidden states
that the other had left, before they were read. Prompts long enough to run without graphs were
right, shorter ones were not.

What a step leaves for whoever comes later has memory of its own: tokens and log-probabilities are
read after the next step was launched, and drafts go on from the target's states, while graphs of
several configs and prompts of new requests run in between.
"""

from __future__ import annotations

from itertools import cycle

import pytest
import torch

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.speculative.sampling.params import SamplingParams
from tests.tiny import DenseAttend, TinyDraft, TinyTarget
from tests.worlds import BACKENDS, DEVICE

PROMPTS = [[3, 14, 15, 9, 26, 5], [8, 9, 7, 9], [7 * at % 61 for at in range(30)]]
CONFIGS = [SpecConfig(*tree, 128, 3, 4) for tree in ((4, 1, 5), (2, 3, 7), (1, 1, 2))]
SCORED = SamplingParams(logprobs=2)
TOLERANCE = 1e-5 if DEVICE.type == "cpu" else 1e-4


def engine(backend, policy, **options) -> Engine:
    models = TinyTarget(device=DEVICE), TinyDraft(device=DEVICE)
    more = {"configs": CONFIGS[1:], "policy": policy, "processed": True, "buckets": [1, 3]}
    return Engine(*models, CONFIGS[0], backend=backend, **more, **options)


@pytest.mark.parametrize("options", [{}, {"cudagraph": "piecewise"}, {"tbo": True}], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_read_after_other_graphs_have_run(backend, options):
    # one config's steps follow each other, and another's
    order = cycle([*CONFIGS, *CONFIGS[::-1]])
    run = engine(backend, lambda observed: next(order), **options)
    late, results = list(PROMPTS), []
    for at in range(13):
        if at % 5 == 0:
            results += run.add([Request(late.pop(0), 99, SCORED)])
        run.step(ahead=at < 12)
    assert len(run.configs.used) == len(CONFIGS)
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert_plain(run.target.model, prompt, result)
    assert max(n for result in results for n in result.accept_lens) > 2
    assert_drafts_from_the_text(run, backend, options)


def assert_plain(target, prompt, result) -> None:
    """Tokens and log-probabilities are those of one forward over the text."""
    ids = torch.tensor([*prompt, *result.tokens], device=DEVICE)
    positions = torch.arange(len(ids), device=DEVICE)
    logits = target(ids, positions, DenseAttend(target.layers)).logits[len(prompt) - 1 : -1]
    assert result.tokens == logits.argmax(1).tolist()
    values = [found.value for found in result.logprobs]
    want = logits.double().log_softmax(1).amax(1).tolist()
    torch.testing.assert_close(values, want, rtol=0, atol=TOLERANCE)


def assert_drafts_from_the_text(run, backend, options) -> None:
    """What the next proposals start from is what a prefill of the text leaves."""
    fresh = engine(backend, lambda observed: observed.configs[0], **options)
    fresh.add([Request(live.tokens[:-1], 99) for live in run.running])
    for live, other in zip(run.running, fresh.running, strict=True):
        for name, ours in run.states.drafting.items():
            theirs = fresh.states.drafting[name]
            torch.testing.assert_close(ours[live.row], theirs[other.row], rtol=1e-3, atol=1e-4)
