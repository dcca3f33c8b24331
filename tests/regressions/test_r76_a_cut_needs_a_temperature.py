"""R76: NVIDIA/TensorRT-LLM#19390.

A request for top-k that left out the temperature was decoded greedily without a word.

Top-k, top-p and min-p are refused by name where no temperature is given, and served with any, 0
among them.
"""

from __future__ import annotations

import pytest

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.speculative.sampling.params import SamplingParams
from tests.tiny import TinyDraft, TinyTarget, dense_greedy
from tests.worlds import DEVICE

PROMPT, NEW = [3, 14, 15, 9], 16
CUTS = [{"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 50, "top_p": 0.9}]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_what_cuts_a_law_is_not_ignored(cut):
    with pytest.raises(ValueError, match="temperature must be a number beside") as caught:
        SamplingParams(**cut)
    for name, value in cut.items():
        assert f"{name}={value}" in str(caught.value)
    run = Engine(
        TinyTarget(device=DEVICE), TinyDraft(device=DEVICE), SpecConfig(3, 3, 9, 64, 5), buckets=[5]
    )
    greedy = Request(PROMPT, NEW, SamplingParams(0.0, **cut))
    drawn = [Request(PROMPT, NEW, SamplingParams(2.0, seed=seed, **cut)) for seed in range(4)]
    out, *outs = run.generate([greedy, *drawn])
    assert out.tokens == dense_greedy(run.target.model, PROMPT, NEW)
    assert len({tuple(one.tokens) for one in outs}) == 4
