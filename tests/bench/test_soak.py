"""A short soak over the tiny models, and what a soak notices."""

from __future__ import annotations

import json

import pytest
import torch

from bench import soak as soaking
from bench import soak_engines
from bench.soak import DRAWING, Dice, kinds_of, soak
from bench.soak_checks import Found, Wanted, compare, judge_memory, judge_steps, judge_texts
from bench.soak_watch import Watch
from bench.suite import proposers
from specattn.cache.slot_table import SlotTable
from specattn.config import SpecConfig
from specattn.engine.engine import Engine
from specattn.engine.request import Request, RequestOutput
from specattn.speculative.logprobs import TokenLogprobs
from specattn.speculative.lookup import LookupFirst, LookupProposer
from specattn.speculative.sampling import SamplingParams
from specattn.speculative.standalone import LMDraft
from tests.tiny import VOCAB, TinyBlockDraft, TinyDraft, TinyTarget

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = [[3, 14, 15, 9, 26, 5], [35], [3, 14, 15, 9, 2], [58, 9, 7, 9, 3]]
STEPS, NEW, CONTEXT = (300, 40, 96) if DEVICE == "cuda" else (60, 12, 32)


@pytest.fixture(scope="module")
def models():
    return TinyTarget(device=DEVICE), TinyDraft(device=DEVICE)


def engine(models, tree, *others, **options) -> Engine:
    config, *more = (SpecConfig(*one, CONTEXT, 4, 4) for one in (tree, *others))
    backend = "triton" if DEVICE == "cuda" else "torch_native"
    policy = Dice(3) if more else None
    return Engine(
        *models, config, configs=more, policy=policy, backend=backend, buckets=[2, 4], **options
    )


def short_soak(models, run=None, **more):
    """Soak one engine; return its part of the report."""
    report = soak(
        {"one": run or engine(models, (3, 3, 8))},
        engine(models, (0, 1, 1)),
        kinds_of(PROMPTS, NEW, CONTEXT, DRAWING[:3]),
        STEPS,
        seed=1,
        check_every=10,
        **more,
    )
    assert report["passed"]
    return report["proposers"]["one"]


def test_requests_come_and_go(models, monkeypatch):
    monkeypatch.setattr(soaking, "WINDOW", STEPS // 3)
    kept = []
    one = short_soak(models, keep=lambda seen: kept.append(json.loads(json.dumps(seen))))
    assert [seen["steps"] for seen in kept] == [STEPS // 3, STEPS // 3 * 2, STEPS, STEPS, STEPS]
    assert [seen["passed"] for seen in kept] == [False] * 4 + [True]
    seen = [seen["proposers"]["one"] for seen in kept]
    assert 0 < seen[0]["requests"] < seen[1]["requests"] < one["requests"]
    assert seen[-1] == json.loads(json.dumps(one))
    assert one["requests"] == one["joins"] > STEPS // 8
    assert one["greedy"] + one["drawn"] == one["requests"]
    assert not one["greedy_apart"]
    assert one["batch_sizes"][-1] == 4
    assert {"length", "context"} <= one["reasons"].keys()
    assert one["gained"] == one["gained_fresh"] > 1.3 * one["requests"]


def test_requests_come_and_go_while_settings_switch(models):
    run = engine(models, (3, 3, 8), (2, 1, 3), (0, 1, 1))
    one = short_soak(models, run)
    assert one["greedy"] > STEPS // 16
    assert not one["drawn"], "drawn tokens depend on the setting"
    assert not one["gained"], "and so do gains"
    assert not one["greedy_apart"]
    assert min(run.configs.used.values()) > STEPS // 8


@pytest.mark.parametrize(
    "options", [{"cudagraph": "piecewise"}, {"tbo": True}], ids=["piecewise", "halves"]
)
def test_requests_come_and_go_in_parts(models, options):
    one = short_soak(models, engine(models, (3, 3, 8), **options))
    assert one["greedy"] > STEPS // 16
    assert one["drawn"]
    assert not one["greedy_apart"]


def test_proposers_take_turns(models, monkeypatch, tmp_path):
    monkeypatch.setattr(soaking, "WINDOW", STEPS)
    target, eagle = models
    block, lookup = TinyBlockDraft(4, device=DEVICE), LookupProposer(1, 4)
    standalone = LMDraft(TinyTarget(device=DEVICE, layers=1, seed=3), VOCAB)
    chain = SpecConfig(3, 1, 4, CONTEXT, 4, 4, draft_sampling=True)
    tree = SpecConfig(3, 3, 8, CONTEXT, 4, 4)
    best = SpecConfig(3, 1, 8, CONTEXT, 4, 4, tree="best_first", ranks=3)
    drafts = {
        "EAGLE": (eagle, chain),
        "DFlash": (block, best),
        "lookup": (lookup, tree),
        "lookup first": (LookupFirst(lookup, block), best),
        "LM": (standalone, tree),
    }
    backend = "triton" if DEVICE == "cuda" else "torch_native"
    options = {"backend": backend, "buckets": [4], "sampled": True, "processed": True}
    kept = []
    report = soak(
        {name: Engine(target, *one, **options) for name, one in drafts.items()},
        Engine(target, None, tree.plain(), **options),
        kinds_of(PROMPTS, NEW, CONTEXT, DRAWING[3:]),
        STEPS,
        seed=2,
        keep=lambda seen: kept.append(json.loads(json.dumps(seen))),
    )
    assert [seen["passed"] for seen in kept] == [False, False, True]
    assert kept[-1] == json.loads(json.dumps(report))
    parts = report["proposers"]
    assert parts.keys() == drafts.keys()
    for one in parts.values():
        assert one["greedy"] + one["drawn"] == one["requests"] == one["joins"] > 0
        assert one["steps_by_part"]["step (processed)"]
        assert not one["greedy_apart"]
    assert {name: one["kv_bytes_per_token"] for name, one in parts.items()} == {
        "EAGLE": 512,
        "DFlash": 1024,
        "lookup": 0,
        "lookup first": 1024,
        "LM": 1024,
    }
    assert parts["lookup"]["state_bytes_per_request"] == 4 * (CONTEXT + 1)
    assert report["watched"]["steps"] == STEPS - STEPS // 10
    assert all(one["gained"] == one["gained_fresh"] > 0 for one in parts.values())
    rest = {"machine": {"device": "A GPU"}, "dtype": "float32", "context": CONTEXT}
    (tmp_path / proposers.RECORD).write_text(json.dumps(report | rest))
    assert "| DFlash | 1 KiB | 0.0 KiB |" in proposers.shown(tmp_path)


def test_every_kind_of_proposer_and_step_is_soaked():
    ways = [one for one in soak_engines.SETTINGS if one.others or one.options]
    assert {str([*one.options] or len(one.others)) for one in ways} == {
        "['cudagraph']",
        "['tbo']",
        "2",
    }
    shown = {(one.kind, one.lookup, one.config.tree) for one in soak_engines.SETTINGS}
    assert shown >= {
        ("eagle3", False, "beam"),
        ("eagle3", False, "best_first"),
        ("dflash", False, "beam"),
        ("dflash", False, "best_first"),
        ("none", True, "beam"),
        ("eagle3", True, "beam"),
        ("dflash", True, "best_first"),
        ("model", False, "beam"),
    }


def test_log_probabilities_are_compared_up_to_a_difference(models):
    plain, found = engine(models, (0, 1, 1)), Found()
    kind = Request(PROMPTS[0], 3, SamplingParams(1.0, logprobs=0))
    want = Wanted([3, 4, 5], [3], [-0.5, -0.25, -1.0])
    scored = [TokenLogprobs(value, {}) for value in (-0.5, -0.125, -3.0)]
    compare(kind, want, RequestOutput([3, 4, 6], logprobs=scored), plain, found, fixed=True)
    assert found.largest_logprob_error == 0.125
    assert (found.drawn_apart, found.gained) == (1, 0), "what follows a difference is another text"


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(frequency_penalty=1.5)])
def test_a_greedy_text_may_differ_only_where_it_was_undecided(models, sampling):
    """With processors, too, whose logits are others."""
    plain = engine(models, (0, 1, 1))
    kind = Request(PROMPTS[0], 6, sampling)
    (own,) = plain.generate([kind])
    other = RequestOutput([*own.tokens[:4], own.tokens[4] ^ 1, own.tokens[5]], "length")
    with pytest.raises(AssertionError, match=r"token 4 after .*, margin"):
        compare(kind, Wanted(own.tokens, [6], []), other, plain, Found(), fixed=True)


def test_steps_that_wait_or_allocate_are_refused():
    watch = Watch()
    with watch.watching():
        pass
    good = watch.counted()
    judge_steps(good | {"waits": 1})
    for change, message in (
        ({"waits": 2}, "1 steps waited 2 times"),
        ({"launch_waits": 1}, "launches waited 1 times"),
        ({"allocations": {"num_device_alloc": 3}}, "steps allocated: .*3"),
    ):
        with pytest.raises(AssertionError, match=message):
            judge_steps(good | change)


def test_a_wrong_token_ends_a_soak(models, monkeypatch):
    run = engine(models, (3, 3, 8))
    append = run.scheduler.append
    monkeypatch.setattr(
        run.scheduler, "append", lambda one, tokens: append(one, [t ^ 1 for t in tokens])
    )
    with pytest.raises(AssertionError, match="margin"):
        short_soak(models, run)


def test_a_lost_slot_ends_a_soak(models, monkeypatch):
    run = engine(models, (3, 3, 8))
    release = SlotTable._release
    monkeypatch.setattr(SlotTable, "_release", lambda table, pages: release(table, pages[1:]))
    with pytest.raises(AssertionError, match=r"slots were lost|page"):
        short_soak(models, run)


def test_steps_that_gain_otherwise_are_noticed(models):
    plain, found = engine(models, (0, 1, 1)), Found()
    want = Wanted([3, 4, 5, 6, 7, 8], [3, 2, 1], [])
    result = RequestOutput([3, 4, 5, 6, 7], accept_lens=[2, 2, 1])
    compare(Request(PROMPTS[0], 6, DRAWING[1]), want, result, plain, found, fixed=True)
    assert (found.gained, found.gained_fresh) == (4, 5), "the last step was cut"


def test_what_grows_or_moves_is_refused():
    good = {
        "memory_warm": {"allocated": 0},
        "memory_end": {"allocated": 0},
        "drawn": 500,
        "drawn_apart": 5,
        "largest_logprob_error": 1e-5,
        "gained": 2000,
        "gained_fresh": 2000,
    }

    def judge(report):
        judge_memory(report)
        judge_texts(report)

    judge(good)
    for change, message in (
        ({"memory_end": {"allocated": 2 << 20}}, "more are in use"),
        ({"memory_end": {"reserved": 65 << 20}}, "more are held"),
        ({"memory_end": {"rss_kib": 1 << 20}}, "the host has"),
        ({"drawn_apart": 6}, "drawn texts"),
        ({"largest_logprob_error": 0.01}, "log-probabilities differ by 0.01"),
        ({"gained": 1979}, "steps gained 1979 tokens, alone 2000"),
    ):
        with pytest.raises(AssertionError, match=message):
            judge(good | change)
