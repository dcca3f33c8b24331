"""Graphs of chunks of prompts on a GPU: replays that neither wait nor allocate."""

from __future__ import annotations

import gc
import random

import pytest
import torch

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.speculative.prompts.launch import ADMIT, TARGET, Phase, PromptPart
from specattn.speculative.prompts.prompt import Prompt
from specattn.speculative.prompts.runner import BUCKETS, NewPrompt, PromptRunner
from specattn.speculative.sampling.params import SamplingParams
from specattn.speculative.step.level import Level
from tests.speculative.test_prompt_runner import KINDS, Run, alone, params, texts
from tests.tiny import VOCAB, TinyDraft, TinyTarget, dense_greedy
from tests.worlds import DEVICE

pytestmark = pytest.mark.gpu
CONTEXT = 600


def news(run: Run, prompts, drawn) -> list[NewPrompt]:
    rows = [run.row(len(one)) for one in prompts]
    return [
        NewPrompt(Prompt(row, prompt), one, Level.SAMPLED if one.drawn else Level.GREEDY)
        for row, prompt, one in zip(rows, prompts, drawn, strict=True)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_waits_for_a_chunk(kind):
    run = Run(kind)
    runner = PromptRunner.of(run.setup, buckets=(16, 64))
    runner.capture(Level.SAMPLED)
    for part in (TARGET, ADMIT):
        assert runner.targets.recorded(part)
    for level in (Level.GREEDY, Level.SAMPLED):
        assert runner.firsts.recorded(PromptPart(Phase.FIRST, level))
    prompts = texts(4, 6, 9)
    drawn = params(6)
    want = [token for token, _ in alone(kind, prompts, drawn)]
    waiting = news(run, prompts, drawn)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        firsts = runner.run(waiting)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [one.wait() for one in firsts] == want
    assert runner.targets.stats.replays[TARGET] == 1
    assert not runner.targets.stats.eager


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_and_steps_allocate_nothing(kind):
    """Whatever is in a chunk; the host runs ahead of the device."""
    # what tests before have left may go at any time
    gc.collect()
    run = Run(kind)
    runner = PromptRunner.of(run.setup, buckets=(16, 64), chunk=64)
    rng, before = random.Random(0), 0
    for turn in range(200):
        prompts = texts(turn, rng.randint(1, 8), 20)
        waiting = news(run, prompts, [SamplingParams()] * len(prompts))
        runner.run(waiting)
        for one in waiting:
            run.setup.table.free(one.prompt.row)
        if turn == 20:
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert not runner.targets.stats.eager


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "head"])
def test_an_engine_records_chunks_and_replays_them(drafts):
    target = TinyTarget(device=DEVICE)
    tree = (3, 1, 4) if drafts else (0, 1, 1)
    draft = TinyDraft(device=DEVICE) if drafts else None
    run = Engine(target, draft, SpecConfig(*tree, CONTEXT, 4), backend="triton", sampled=True)
    captured = [(one.part, one.bucket) for one in run.graphs()[run.config] if one.recorded]
    assert {bucket for part, bucket in captured if part == "prompts"} == set(BUCKETS)
    rng = random.Random(1)
    requests = [
        Request([rng.randrange(VOCAB) for _ in range(rng.choice([1, 3, 40, 150, 500]))], 12)
        for _ in range(16)
    ]
    results = run.generate(requests)
    for request, result in zip(requests, results, strict=True):
        assert result.tokens == dense_greedy(target, request.prompt, 12)
    stats = run._admission.prompts.targets.stats
    assert stats.replays[TARGET] > 3
    assert not stats.eager


def test_drawn_texts_are_those_of_eager_prompts():
    target, draft = TinyTarget(device=DEVICE), TinyDraft(device=DEVICE)
    config = SpecConfig(3, 4, 9, 128, 3)
    requests = [
        Request(text, 20, SamplingParams(0.9, 20, 0.9, seed=at, min_p=0.01 * (at % 2)))
        for at, text in enumerate(texts(6, 12, 40))
    ]
    found = [
        [
            one.tokens
            for one in Engine(target, draft, config, backend="triton", **how).generate(requests)
        ]
        for how in ({}, {"prompt_buckets": ()}, {"graphs": False})
    ]
    assert found[0] == found[1] == found[2]


def test_steps_run_on_while_prompts_come():
    """In neither phase does the host wait for more than what it reads."""
    target = TinyTarget(device=DEVICE)
    run = Engine(target, None, SpecConfig(0, 1, 1, 128, 4), backend="triton")
    run.generate([Request([1, 2], 3)])
    waits = []
    synchronize = torch.cuda.synchronize

    def noted(*args):
        waits.append(args)
        return synchronize(*args)

    torch.cuda.synchronize = noted
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = run.scheduler.wait([Request([at, 5], 9) for at in range(9)])
        while run.scheduler.waiting or run.num_running:
            run._admission.admit_waiting()
            run.step(ahead=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize = synchronize
    assert not waits
    for at, result in enumerate(results):
        assert result.tokens == dense_greedy(target, [at, 5], 9)


def test_requests_with_processors_wait_for_nothing():
    target = TinyTarget(device=DEVICE)
    config = SpecConfig(0, 1, 1, 128, 4)
    asked = SamplingParams(
        1.0,
        seed=4,
        repetition_penalty=1.2,
        frequency_penalty=0.5,
        logit_bias={3: 2.0},
        bad_words=[[5, 6]],
        allowed_tokens=range(50),
        logprobs=2,
    )
    requests = [Request([at, 5], 9, asked, min_new_tokens=2) for at in range(6)]
    how = {"backend": "triton", "sampled": True, "processed": True}
    want = [one.tokens for one in Engine(target, None, config, **how).generate(requests)]
    run = Engine(target, None, config, **how)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = run.scheduler.wait(requests)
        while run.scheduler.waiting or run.num_running:
            run._admission.admit_waiting()
            run.step(ahead=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [one.tokens for one in results] == want
    assert all(len(one.logprobs) == len(one.tokens) for one in results)
