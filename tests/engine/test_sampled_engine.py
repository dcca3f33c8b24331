"""When an engine captures the steps of requests that draw."""

from __future__ import annotations

import pytest

from specattn.engine.engine import Engine, Request
from specattn.speculative.sampling.params import SamplingParams
from tests.engines import engine as tiny_engine
from tests.worlds import DEVICE

REQUESTS = [Request([3, 1, 4], 12, SamplingParams(0.8, seed=2)), Request([35], 9)]


def engine(**options) -> Engine:
    last = {"policy": lambda observed: observed.configs[-1]}
    options |= {"device": DEVICE, "buckets": (1, 2)}
    return tiny_engine((3, 1, 4), (2, 2, 5), context=32, rows=2, **last, **options)


def test_a_sampled_engine_captures_nothing_when_requests_come(captures):
    run = engine(sampled=True)
    assert captures == ["step", "step (sampled)"] * 2
    for reports in run.graphs().values():
        steps = [one for one in reports if one.part.startswith("step")]
        assert [(one.part, one.bucket) for one in steps] == [
            (part, bucket) for part in ("step", "step (sampled)") for bucket in (2, 1)
        ]
    out = run.generate(REQUESTS)
    assert len(captures) == 4
    late = engine()
    assert captures[4:] == ["step"] * 2
    assert [one.tokens for one in late.generate(REQUESTS)] == [one.tokens for one in out]
    assert captures[6:] == ["step (sampled)"] * 2, "the first request that draws has them captured"


def test_greedy_requests_capture_nothing_for_others(captures):
    engine().generate([Request([3, 1, 4], 12)])
    assert captures == ["step"] * 2


@pytest.mark.parametrize("drawing", [False, True])
def test_plain_decoding_at_a_contexts_end_is_captured_as_the_others_are(captures, drawing):
    run = engine(sampled=True)
    (request, _), had = REQUESTS, len(captures)
    sampling = request.sampling if drawing else SamplingParams()
    (out,) = run.generate([Request(request.prompt, 99, sampling)])
    assert out.finish_reason == "context"
    assert captures[had:] == ["step", "step (sampled)"]
