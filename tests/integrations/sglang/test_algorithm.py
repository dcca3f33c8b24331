"""Whole engines of SGLang's whose steps are this library's, on a CPU.

Greedy texts are compared with transformers' own, drawn ones and verify counts with `Engine`'s.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import gettempdir
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from tests.distributions import Distribution, joint, p_value
from tests.integrations.sglang.engine import PAIR
from tests.integrations.sglang.steps_engine import (
    CONTEXT,
    DRAWN,
    DRAWN_PROCESSED,
    DRAWS,
    LENGTHS,
    PAIRS,
    PROCESSED,
    REGEX,
    SETTINGS,
    prompts,
)

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.sglang
PATHS = [str(ROOT), str(ROOT / "tests/integrations/sglang/stubs"), os.environ.get("PYTHONPATH", "")]
#: What SGLang's processes need on a CPU.
VARIABLES = {
    "PYTHONPATH": os.pathsep.join(PATHS),
    "SGLANG_USE_CPU_ENGINE": "1",
    "TRITON_INTERPRET": "1",
    "SPECATTN_SGLANG_BACKEND": "torch_native",
    # compiling a few small functions takes longer than all that they do here
    "TORCH_COMPILE_DISABLE": "1",
    # a torch for CUDA brings NCCL, which ranks on a CPU would start
    "SGLANG_NCCL_SO_PATH": "none",
}
#: Settings whose prompts are all asked for at once, and those of one tree and of one head.
TOGETHER = [name for name in SETTINGS if name != "full"]
ONE_TREE = [name for name in TOGETHER if not SETTINGS[name].trees + SETTINGS[name].quantised]


def result(program: str, *arguments: str, **variables: str) -> Any:
    """Run a program of these tests in a process of its own, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.integrations.sglang.{program}", *arguments],
        cwd=ROOT,
        env=os.environ | VARIABLES | variables,
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-4000:]
    return json.loads(lines[-1].removeprefix("RESULT "))


@functools.cache
def run(setting: str) -> dict:
    """Run a setting."""
    counts = f"{gettempdir()}/specattn-{os.getpid()}-{setting}.counts"
    return result("steps_engine", setting, SPECATTN_COUNTS=counts)


@functools.cache
def plain() -> list[list[int]]:
    """Greedy texts as transformers writes them."""
    texts = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        # past all ends: no token has this number
        ends = {"eos_token_id": -1, "pad_token_id": 0}
        out = model().generate(ids, max_new_tokens=CONTEXT, do_sample=False, **ends)
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
        Request(prompts()[5], LENGTHS[5], sampling=SamplingParams(**params), ignore_eos=True)
        for params in (*DRAWN, DRAWN_PROCESSED)
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


@pytest.mark.parametrize("setting", ONE_TREE)
def test_verify_counts_are_those_of_this_librarys_engine(setting):
    assert [result["verified"] for result in run(setting)["first"]] == own(setting).steps


@pytest.mark.parametrize("setting", [name for name in TOGETHER if "ranks" not in name])
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


@pytest.mark.parametrize("setting", ONE_TREE)
def test_drawn_texts_are_those_of_this_librarys_engine(setting):
    """A seed names a text of a tree, whatever runs beside it; the greedy request is unchanged."""
    still, *drawn = run(setting)["drawn"]
    assert still["tokens"] == greedy()[3]
    assert tokens(drawn) == own(setting).drawn[: len(DRAWN)]
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
    names = "logit_bias", "log-probabilities of named tokens"
    for error, asked in zip(errors, names, strict=True):
        assert f"SPECATTN does not serve {asked}" in error


def test_crowds_over_a_pool_that_runs_out():
    found = run("full")
    texts = plain()
    for result in found["crowd"]:
        assert result["tokens"] == texts[result["at"]][: result["new"]]
    assert found["counts"]["retracted"]


@functools.cache
def model(dtype: torch.dtype = torch.float32):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(PAIR / "target"), dtype=dtype)


def processed_text(at: int, asked: dict, stop: int) -> list[int]:
    """Write a text greedily, a token at a time, from logits that are changed as asked."""
    prompt, text = prompts()[at], []
    while len(text) < LENGTHS[at]:
        with torch.no_grad():
            logits = model()(torch.tensor([[*prompt, *text]])).logits[0, -1]
        counts = torch.bincount(torch.tensor(text, dtype=torch.int64), minlength=len(logits))
        seen, scale = counts > 0, asked.get("repetition_penalty", 1.0)
        scaled = torch.where(logits > 0, logits / scale, logits * scale)
        logits = torch.where(seen, scaled, logits)
        logits = logits - asked.get("frequency_penalty", 0.0) * counts
        logits = logits - asked.get("presence_penalty", 0.0) * seen
        for token, value in asked.get("logit_bias", {}).items():
            logits[int(token)] += value
        ends = model().config.eos_token_id
        if len(text) < asked.get("min_new_tokens", 0):
            logits[[stop, *([ends] if isinstance(ends, int) else ends or [])]] = -float("inf")
        text.append(int(logits.argmax()))
        if "min_new_tokens" in asked and text[-1] == stop:
            break
    return text


@pytest.mark.parametrize("setting", ["tree", "mixed"])
@pytest.mark.parametrize("at", range(len(PROCESSED)))
def test_processed_texts_are_those_of_one_token_at_a_time(at, setting):
    """Penalties count tokens of the answer alone, as SGLang's do."""
    text = run(setting)["processed"][at]["tokens"]
    assert text == processed_text(1, PROCESSED[at], greedy()[1][5])
    assert text != greedy()[1]


def test_a_processed_request_that_draws_and_one_beside_it():
    *_, drawn, still = run("tree")["processed"]
    assert drawn["tokens"] == own("tree").drawn[-1]
    assert still["tokens"] == greedy()[3]


def test_an_answer_ends_with_the_context():
    """Before SGLang would write slots into another request's row."""
    found = run("full")["endless"]
    steps, topk, nodes = SETTINGS["full"].tree
    length, row = len(prompts()[0]) + len(found["tokens"]), CONTEXT + 4 + nodes
    assert length == row - 2 * max(topk * steps, nodes)
    assert found["end"]["type"] == "length"
    assert found["tokens"] == plain()[0][: len(found["tokens"])]


def test_constrained_texts_match():
    """The first is the most probable text that matches, a token at a time."""
    *constrained, free = run("tree")["constrained"]
    assert free["tokens"] == greedy()[3]
    tokenizer = Tokenizer.from_file(str(PAIR / "target" / "tokenizer.json"))
    for result in constrained:
        text = tokenizer.decode(result["tokens"])
        # an answer that ends by its length need not be whole
        assert re.fullmatch(REGEX, text) or re.match(r"[a-z_]+(\([a-z, ]*)?$", text), text
    assert constrained[0]["tokens"] != greedy()[1]


def test_penalties_survive_that_a_request_is_taken_back():
    texts = tokens(run("full")["penalised"])
    assert texts == [processed_text(1, PROCESSED[0], 0)] * len(texts)


def test_log_probabilities_of_a_text():
    scored, still, drawn = run("tree")["scored"]
    # whose first token another sampler draws than that of the request with log-probabilities
    assert drawn["tokens"] == own("tree").drawn[0]
    assert (scored["tokens"], still["tokens"]) == (greedy()[1], greedy()[3])
    prompt, text = prompts()[1], scored["tokens"]
    with torch.no_grad():
        logits = model()(torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1]
    best = logits.log_softmax(-1).topk(2)
    values = [value for value, _, _ in scored["output_token_logprobs"]]
    assert [token for _, token, _ in scored["output_token_logprobs"]] == text
    torch.testing.assert_close(torch.tensor(values), best.values[:, 0], atol=1e-4, rtol=0)
    for at, found in enumerate(scored["output_top_logprobs"]):
        assert [token for _, token, _ in found] == best.indices[at].tolist()
        seen = torch.tensor([value for value, _, _ in found])
        torch.testing.assert_close(seen, best.values[at], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("setting", "fused"), [("tree", 2), ("chain", 0), ("ranks", 2), ("module ranks", 0)]
)
def test_forwards_are_fused_where_they_can_be(setting, fused):
    assert run(setting)["counts"]["fused models"] == fused


def test_a_step_is_one_launch_of_ours(record_property):
    """Its worker launches nothing else; SGLang's scheduler adds a bounded number of its own."""
    counts = run("tree")["counts"]
    steps = counts["steps"]
    # a step with a grammar is three
    assert counts["parts"]
    assert counts["replays"] + counts["parts"] / 3 == steps
    assert "worker" not in counts
    record_property("scheduler_launches", counts["scheduler"] / steps)
    assert counts["scheduler"] <= 4 * steps


def test_larger_batches_take_another_tree():
    """Requests go from one to the other as others join and end, and their texts do not tell."""
    counts = run("mixed")["counts"]
    assert min(counts["steps of 16 nodes"], counts["steps of 3 nodes"]) > 10
    assert counts["steps of 16 nodes"] + counts["steps of 3 nodes"] == counts["steps"]
    # a greedy one beside some that draw, whose texts are each tree's own
    still, *drawn = run("mixed")["drawn"]
    assert still["tokens"] == greedy()[3]
    assert [len(text) for text in tokens(drawn)] == [LENGTHS[5]] * len(DRAWN)


@functools.cache
def distribution(temperature: float) -> Distribution:
    """Return the probabilities of two tokens after the first prompt, in float64."""
    exact, prompt = model(torch.float64), prompts()[0]

    def after(output: list[int]) -> dict[int, float]:
        with torch.no_grad():
            logits = exact(torch.tensor([[*prompt, *output]])).logits[0, -1] / temperature
        best = logits.topk(PAIRS["top_k"])
        return dict(zip(best.indices.tolist(), best.values.softmax(0).tolist(), strict=True))

    return joint(after, 2)


def test_requests_without_seeds_draw_from_the_targets_distribution():
    drawn = run("tree")["pairs"]
    assert len(drawn) == DRAWS
    assert p_value(drawn, distribution(PAIRS["temperature"])) > 1e-4
    # the control: another temperature
    assert p_value(drawn, distribution(2.5)) < 1e-4
