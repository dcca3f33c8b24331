"""Requests without a seed get a fresh one each, which their outputs name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specattn.engine.engine import Engine, Request
from specattn.engine.serving import AsyncEngine
from specattn.speculative.sampling.params import SamplingBatch, SamplingParams
from tests.engines import engine as tiny_engine
from tests.tiny import dense_greedy
from tests.worlds import DEVICE

PROMPT = [7 * at % 61 for at in range(9)]
OPEN = Request(PROMPT, 12, SamplingParams(1.1))
NAMED = Request(PROMPT, 12, SamplingParams(1.1, seed=5))


def engine(models, rows=4, **options) -> Engine:
    options |= {"models": models, "backend": "torch_native"}
    return tiny_engine((3, 2, 6), rows=rows, buckets=[rows], **options)


def texts(models, requests, **options) -> list[tuple[int | None, list[int]]]:
    return [(out.seed, out.tokens) for out in engine(models, **options).generate(requests)]


def test_equal_requests_get_texts_of_their_own(models):
    found = texts(models, [OPEN] * 4)
    assert len({tuple(tokens) for _, tokens in found}) == 4
    seeds = [seed for seed, _ in found]
    # alone, a seed gives the same text again
    for at in (0, 3):
        assert texts(models, [OPEN.seeded(seeds[at])]) == found[at : at + 1]
    again = texts(models, [OPEN] * 4)
    assert not {seed for seed, _ in again} & set(seeds)


def test_given_seeds_and_greedy_requests_do_not_notice_them(models):
    greedy = Request(PROMPT, 12)
    (alone,) = texts(models, [NAMED])
    _, first, plain, second, named = texts(models, [OPEN, NAMED, greedy, NAMED, OPEN])
    assert first == second == alone
    assert alone[0] == 5
    assert plain == (None, dense_greedy(models[0], PROMPT, 12))
    assert named[0] not in (None, 5)


@pytest.mark.parametrize("chunk", [1, 7, 12])
def test_prompts_of_several_forwards_draw_what_whole_ones_do(models, chunk):
    requests = [replace(NAMED, prompt=PROMPT[at:]).seeded(at) for at in (0, 5, 2, 8)]
    run = engine(models)
    run._admission.prompts.chunk = chunk
    found = [out.tokens for out in run.generate(requests)]
    assert found == [tokens for _, tokens in texts(models, requests)]


def test_only_requests_that_need_a_seed_move_the_generator(models):
    run, before = engine(models), torch.get_rng_state()
    run.generate([NAMED, Request(PROMPT, 2)])
    assert torch.equal(torch.get_rng_state(), before)
    run.generate([OPEN])
    assert not torch.equal(torch.get_rng_state(), before)


def test_torchs_seed_repeats_them(models):
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        found.append(texts(models, [OPEN, OPEN]))
    assert found[0] == found[1]


def test_samples_without_a_seed_are_those_of_consecutive_ones(models):
    found = texts(models, OPEN.samples(3))
    first, _ = found[0]
    assert [seed for seed, _ in found] == [first, first + 1, first + 2]
    assert texts(models, OPEN.seeded(first).samples(3)) == found


def test_a_request_that_waits_for_slots_keeps_its_seed(models):
    """It is tried with others, and rolled back."""
    requests = [replace(OPEN, prompt=[at, *PROMPT]) for at in range(3)]
    run = engine(models, num_slots=45)
    most = []
    found = run.generate(requests, lambda *_: most.append(run.num_running))
    assert max(most) == 1
    for request, out in zip(requests, found, strict=True):
        assert texts(models, [request.seeded(out.seed)]) == [(out.seed, out.tokens)]


def test_streams_and_added_requests_name_theirs(models):
    run = engine(models)
    added = run.add([OPEN, NAMED])
    assert added[0].seed is not None
    assert added[1].seed == 5
    run.clear()
    with AsyncEngine(run) as server:
        outputs = list(server.stream(OPEN))
    (seed,) = {out.seed for out in outputs}
    tokens = [token for out in outputs for token in out.tokens]
    assert texts(models, [OPEN.seeded(seed)]) == [(seed, tokens)]


def test_a_loop_of_ones_own_has_to_name_them():
    with pytest.raises(ValueError, match="seed must be given to parameters that draw, got None"):
        SamplingBatch.of([SamplingParams(), SamplingParams(0.5)], DEVICE)
    assert SamplingBatch.of([SamplingParams()], DEVICE).seeds.tolist() == [0]
