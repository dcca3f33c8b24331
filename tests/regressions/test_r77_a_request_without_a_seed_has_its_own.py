"""R77: NVIDIA/TensorRT-LLM#19487, NVIDIA/TensorRT-LLM#17599, vllm#51226.

Requests without a seed shared one stream of random numbers, so that equal prompts got one text; and
a seed was dropped where another request of its batch had none.

A request that draws and names no seed gets a fresh one, which its output names and which repeats
it. A seed gives one text: alone, in any batch, and beside requests without one.
"""

from __future__ import annotations

import pytest
import torch

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.engine.serving import AsyncEngine
from specattn.speculative.sampling.params import SamplingParams
from tests.engines import engine as tiny_engine
from tests.worlds import DEVICE

PROMPT, NEW = [3, 14, 15, 9], 24
DRAWN = Request(PROMPT, NEW, SamplingParams(1.0))
SEEDED = Request(PROMPT, NEW, SamplingParams(1.0, seed=7))
CONFIGS = {
    "plain": SpecConfig(0, 1, 1, 64, 4),
    "drawn chain": SpecConfig(3, 1, 4, 64, 4, draft_sampling=True),
    "tree": SpecConfig(3, 3, 9, 64, 4),
}


def engine(name: str) -> Engine:
    return tiny_engine(CONFIGS[name], device=DEVICE, buckets=[1, 4])


def repeats(run: Engine, out) -> None:
    """The seed that an output names gives its text."""
    (again,) = run.generate([Request(PROMPT, NEW, SamplingParams(1.0, seed=out.seed))])
    assert again.tokens == out.tokens


@pytest.mark.parametrize("name", CONFIGS)
def test_equal_requests_differ_and_a_seed_repeats(name):
    run = engine(name)
    outs = run.generate([DRAWN, SEEDED, DRAWN, *DRAWN.samples(3)])
    assert len({tuple(out.tokens) for out in outs}) == len(outs)
    assert outs[1].seed == 7
    for out in outs:
        repeats(run, out)
    # one call after the other, too
    (later,) = run.generate([DRAWN])
    assert later.tokens not in [out.tokens for out in outs]


def test_streams_have_seeds_of_their_own():
    run = engine("tree")
    with AsyncEngine(run) as server:
        streams = [server.stream(one) for one in (DRAWN, SEEDED, DRAWN)]
        read = [list(stream) for stream in streams]
    texts = [[token for piece in pieces for token in piece.tokens] for pieces in read]
    assert len(set(map(tuple, texts))) == 3
    (alone,) = run.generate([SEEDED])
    assert texts[1] == alone.tokens
    for pieces, text in zip(read, texts, strict=True):
        seed = pieces[-1].seed
        (again,) = run.generate([Request(PROMPT, NEW, SamplingParams(1.0, seed=seed))])
        assert again.tokens == text


def test_torch_repeats_fresh_seeds():
    run, texts = engine("tree"), []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        texts.append([out.tokens for out in run.generate([DRAWN, DRAWN])])
    assert texts[0] == texts[1] != texts[2]
