"""Whole engines of SGLang's whose steps are this library's, on a CPU.

Greedy texts are compared with transformers' own, drawn ones and verify counts with `Engine`'s.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.integrations.sglang.engine import PAIR
from tests.integrations.sglang.steps_engine import (
    DRAWN,
    DRAWS,
    LAW,
    LENGTHS,
    LONGEST,
    SETTINGS,
    prompts,
)

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.sglang
#: Settings whose prompts are all asked for at once.
TOGETHER = [name for name in SETTINGS if name != "full"]


@functools.cache
def run(setting: str) -> dict:
    """Run a setting in a process of its own."""
    paths = [str(ROOT), str(ROOT / "tests/integrations/sglang/stubs")]
    known = {
        "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
        "SGLANG_USE_CPU_ENGINE": "1",
        "TRITON_INTERPRET": "1",
        "SPECATTN_SGLANG_BACKEND": "torch_native",
        "SPECATTN_COUNTS": os.environ.get("TMPDIR", "/tmp") + f"/specattn-{os.getpid()}.counts",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.integrations.sglang.steps_engine", setting],
        cwd=ROOT,
        env=os.environ | known,
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-4000:]
    return json.loads(lines[-1].removeprefix("RESULT "))


@functools.cache
def plain() -> list[list[int]]:
    """Greedy texts as transformers writes them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(PAIR / "target"), dtype=torch.float32)
    texts = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        # past all ends: no token has this number
        ends = {"eos_token_id": -1, "pad_token_id": 0}
        out = model.generate(ids, max_new_tokens=LONGEST, do_sample=False, **ends)
        texts.append(out[0, len(prompt) :].tolist())
    return texts


@functools.cache
def own(setting: str) -> SimpleNamespace:
    """What `Engine` takes for the prompts, and what it draws."""
    from specattn import Engine, Request, SamplingParams, SpecConfig
    from specattn.models import HFTarget, load_draft

    chosen = SETTINGS[setting]
    target = HFTarget.from_pretrained(str(PAIR / "target"), dtype=torch.float32)
    draft = load_draft(str(PAIR / "draft"), target, dtype=torch.float32)
    target = target.with_features(draft.features)
    page = chosen.options.get("page_size", 1)
    engine = Engine(target, draft, SpecConfig(*chosen.tree, 256, 6, page), buckets=[6])
    asked = [
        Request(prompt, new, ignore_eos=True)
        for prompt, new in zip(prompts(), LENGTHS, strict=True)
    ]
    drawing = [
        Request(prompts()[5], LENGTHS[5], sampling=SamplingParams(**law), ignore_eos=True)
        for law in DRAWN
    ]
    return SimpleNamespace(
        steps=[result.steps for result in engine.generate(asked)],
        drawn=[result.tokens for result in engine.generate(drawing)],
    )


def tokens(results: list[dict]) -> list[list[int]]:
    return [result["tokens"] for result in results]


def greedy(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """Return each prompt's text of a length."""
    return [text[:length] for text, length in zip(plain(), lengths, strict=True)]


@pytest.mark.parametrize("setting", TOGETHER)
def test_greedy_texts_are_the_targets(setting):
    """The prompts join and end on their own, and the longest comes in pieces."""
    assert len(prompts()[4]) > 32
    assert tokens(run(setting)["first"]) == greedy()


@pytest.mark.parametrize("setting", TOGETHER)
def test_verify_counts_are_those_of_this_librarys_engine(setting):
    assert [result["verified"] for result in run(setting)["first"]] == own(setting).steps


@pytest.mark.parametrize("setting", [name for name in TOGETHER if name != "ranks"])
def test_texts_from_the_radix_cache_that_end_early(setting):
    again = run(setting)["again"]
    whole = [greedy()[at] for at in (4, 1, 2, 0)]
    # the longest prompt has whole pages, of any size
    assert again[0]["cached"]
    stopped = again[1]
    assert stopped["end"]["type"] == "stop"
    assert stopped["end"]["matched"] == stopped["tokens"][-1] == whole[1][6]
    first = whole[1].index(whole[1][6])
    assert tokens(again) == [whole[0], whole[1][: first + 1], whole[2], whole[3][:1]]


@pytest.mark.parametrize("setting", TOGETHER)
def test_drawn_texts_are_those_of_this_librarys_engine(setting):
    """A seed names a text, whatever runs beside it; the greedy request is unchanged."""
    still, *drawn = run(setting)["drawn"]
    assert still["tokens"] == greedy()[3]
    assert tokens(drawn) == own(setting).drawn
    assert tokens(drawn)[0] != tokens(drawn)[1]


def test_ranks_draw_alike_without_seeds():
    """Ranks that drew apart would run other batches, and end with an error."""
    texts = tokens(run("ranks")["unseeded"])
    assert {len(text) for text in texts} == {LENGTHS[5]}
    assert len(set(map(tuple, texts))) == len(texts)


def test_a_stream_brings_the_whole_text_in_pieces():
    pieces = run("tree")["streamed"]
    text = greedy()[1]
    assert len(pieces) > 1
    # SGLang streams what is new, or all so far
    joined = [token for piece in pieces for token in piece]
    assert text in (joined, pieces[-1])


def test_texts_after_others_were_aborted():
    aborted = run("tree")["aborted"]
    assert "abort" in aborted["ends"]
    assert tokens(aborted["after"]) == greedy()


def test_requests_are_refused_by_name_and_others_go_on():
    served, *errors = run("tree")["refused"]
    assert served["tokens"] == greedy()[2]
    for error, asked in zip(errors, ("min_p, penalties", "logit_bias", "logprobs"), strict=True):
        assert f"SPECATTN does not serve {asked}" in error


def test_crowds_over_a_pool_that_runs_out():
    found = run("full")
    texts = plain()
    for result in found["crowd"]:
        assert result["tokens"] == texts[result["at"]][: result["new"]]
    assert found["counts"]["retracted"]


@pytest.mark.parametrize(("setting", "fused"), [("tree", 2), ("chain", 0), ("ranks", 0)])
def test_forwards_are_fused_where_they_can_be(setting, fused):
    assert run(setting)["counts"]["fused models"] == fused


def test_a_step_is_one_launch_of_ours(record_property):
    """Its worker launches nothing else; SGLang's scheduler adds a bounded number of its own."""
    counts = run("tree")["counts"]
    steps = counts["steps"]
    assert counts["replays"] == steps
    assert "worker" not in counts
    record_property("scheduler_launches", counts["scheduler"] / steps)
    assert counts["scheduler"] <= 4 * steps


@functools.cache
def law(temperature: float) -> dict[tuple[int, ...], float]:
    """Return the probabilities of two tokens after the first prompt, in float64."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(PAIR / "target"), dtype=torch.float64)

    def after(ids: list[int]) -> list[tuple[int, float]]:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1] / temperature
        best = logits.topk(LAW["top_k"])
        probs = best.values.softmax(0).tolist()
        return list(zip(best.indices.tolist(), probs, strict=True))

    prompt = prompts()[0]
    pairs = {}
    for one, first in after(prompt):
        pairs |= {(one, two): first * second for two, second in after([*prompt, one])}
    return pairs


def p_value(drawn: list[list[int]], expected: dict[tuple[int, ...], float]) -> float:
    """Return chi-square's, with rare pairs put together."""
    from scipy.stats import chisquare

    counts = Counter(map(tuple, drawn))
    assert counts.keys() <= expected.keys()
    often = {pair for pair, prob in expected.items() if prob * len(drawn) >= 5}
    seen = [counts[pair] for pair in often]
    wanted = [expected[pair] * len(drawn) for pair in often]
    rest = len(drawn) - sum(seen), len(drawn) - sum(wanted)
    return chisquare([*seen, rest[0]], [*wanted, rest[1]]).pvalue


def test_requests_without_seeds_draw_from_the_targets_law():
    drawn = run("tree")["law"]
    assert len(drawn) == DRAWS
    assert p_value(drawn, law(LAW["temperature"])) > 1e-4
    # the control: another law
    assert p_value(drawn, law(2.5)) < 1e-4
