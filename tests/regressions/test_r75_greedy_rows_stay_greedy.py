"""R75: FlashML-org/FreeToken#471.

A greedy request in a batch that draws was given a tiny temperature: among equal logits it drew, and
its text was not the one that it has alone.

Greedy requests take the lower token at a tie, alone and beside requests that draw or have
processors, under any drafts, whatever else they name. Of a tiny temperature all tokens are among
the best.
"""

from __future__ import annotations

import pytest
import torch

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.speculative.model import TargetOutput
from specattn.speculative.sampling.params import SamplingParams
from tests.samples import half, on_cpu
from tests.tiny import DenseAttend, TinyDraft, TinyTarget, dense_greedy
from tests.worlds import DEVICE

PROMPT, NEW = [3, 14, 15, 9], 20
# the target wants the higher one often, and the draft knows it
LOW, HIGH = 12, 45
CONFIGS = {
    "plain": SpecConfig(0, 1, 1, 64, 5),
    "chain": SpecConfig(3, 1, 4, 64, 5),
    "drawn chain": SpecConfig(3, 1, 4, 64, 5, draft_sampling=True),
    "tree": SpecConfig(3, 3, 9, 64, 5),
}
BESIDE = {
    "alone": [],
    "beside draws": [SamplingParams(1.0, seed=1), SamplingParams(0.7, top_k=5, seed=2)],
    "beside processed": [SamplingParams(1.0, seed=1, frequency_penalty=1.0)],
}
ASKED = [SamplingParams(), SamplingParams(0.0, top_p=0.9), SamplingParams(0.0, top_k=2)]


class Tied(TinyTarget):
    """Two tokens have equal logits, to the bit."""

    def forward(self, *args, **options):
        out = super().forward(*args, **options)
        logits = out.logits.clone()
        logits[:, LOW] = logits[:, HIGH]
        return TargetOutput(logits, out.hidden_states)


@pytest.fixture(scope="module")
def target() -> Tied:
    return Tied(device=DEVICE)


@on_cpu(half, "name", "beside")
@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_lower_token_is_taken_in_any_batch(target, name, beside):
    # torch promises no order of equals on a GPU
    want = dense_greedy(Tied(), PROMPT, NEW)
    assert LOW in want
    assert HIGH not in want
    run = Engine(target, TinyDraft(device=DEVICE), CONFIGS[name], buckets=[5])
    others = [Request([at, 5], NEW, params) for at, params in enumerate(BESIDE[beside])]
    outs = run.generate([*others, *(Request(PROMPT, NEW, params) for params in ASKED)])
    assert [out.tokens for out in outs[-3:]] == [want] * 3


@pytest.mark.parametrize("name", CONFIGS)
def test_a_tiny_temperature_draws_among_the_best(target, name):
    run = Engine(target, TinyDraft(device=DEVICE), CONFIGS[name], buckets=[5])
    requests = [Request(PROMPT, NEW, SamplingParams(1e-6, seed=seed)) for seed in range(4)]
    outs = run.generate(requests)
    for out in outs:
        ids = torch.tensor([*PROMPT, *out.tokens], device=DEVICE)
        positions = torch.arange(len(ids), device=DEVICE)
        rows = target(ids, positions, DenseAttend(target.layers)).logits[len(PROMPT) - 1 : -1]
        drawn = rows.gather(1, ids[len(PROMPT) :, None])[:, 0]
        torch.testing.assert_close(drawn, rows.amax(1), rtol=0, atol=1e-4)
    assert len({tuple(out.tokens) for out in outs}) > 1, "ties are drawn"
