"""What holds texts of requests that come and go against each other notices what it should."""

from __future__ import annotations

import pytest

from specattn.config import SpecConfig
from specattn.engine.engine import Engine
from specattn.engine.request import Request, RequestOutput
from specattn.speculative.sampling.params import SamplingParams
from specattn.speculative.step.host_buffers import TokenLogprobs
from tests.churn import Texts, Watch
from tests.tiny import TinyDraft, TinyTarget

TREE = SpecConfig(3, 3, 8, 32, 4, 4)
KINDS = [
    Request([3, 14, 15, 9, 26, 5], 12),
    Request([35], 12, SamplingParams(1.0, seed=5)),
    Request([3, 14, 15, 9, 2], 12, SamplingParams(repetition_penalty=1.2, logprobs=3)),
    Request(
        [58, 9, 7], 12, SamplingParams(0.9, min_p=0.05, presence_penalty=0.6, seed=8, logprobs=0)
    ),
]


def output(*tokens, gains=(), scores=()):
    scored = [TokenLogprobs(value, {}) for value in scores]
    return RequestOutput(list(tokens), accept_lens=list(gains), logprobs=scored)


def test_what_depends_on_the_company_is_noticed():
    run = Engine(TinyTarget(), TinyDraft(), TREE, backend="torch_native", buckets=[2, 4])
    texts = Texts(run, KINDS)
    texts.alone = [output(*range(8), gains=(3, 2, 2), scores=[-1.0] * 8)] * 4
    drawn = output(*range(5), gains=(3, 2), scores=[-1.0] * 5)
    texts.hold([(0, drawn), (1, drawn), (3, output(0, 1, 2, 5))])
    for kind, other in (
        (0, output(0, 1, 2, 5)),
        (1, output(*range(6), gains=(2, 2, 2))),
        (3, output(*range(5), scores=[-1.0, -1.5])),
    ):
        with pytest.raises(AssertionError):
            texts.hold([(kind, other)])
    with pytest.raises(AssertionError):
        texts.hold([(1, output(9))] * 2)


def test_steps_are_counted_without_a_gpu_too():
    watch = Watch()
    with watch.over(), watch.watching(), watch.paused():
        pass
    assert watch.counted()["steps"] == 1
