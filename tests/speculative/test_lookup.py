"""Prompt lookup in whole steps, alone and in front of a draft: tokens, and their distribution."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.speculative.proposers import lookup
from specattn.speculative.proposers.lookup import LookupFirst, LookupProposer
from specattn.speculative.proposers.standalone import LMDraft
from specattn.speculative.sampling.params import SamplingParams
from specattn.speculative.states import StateField
from specattn.speculative.step.step import Step
from tests.books import check_books
from tests.grammars import Remainders, constrained_text
from tests.processors import GREEDY, greedy_text
from tests.samples import half, on_cpu, sampled, star
from tests.speculative import three_tokens
from tests.tiny import VOCAB, TinyDraft, TinyTarget, dense_greedy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOOP = [7, 8, 9, 10, 11, 7, 8, 9, 10, 12, 7, 8, 9]
PROMPTS = [LOOP, [35], [3, 14, 15] * 9, [58, 9, 7, 9, 3]]
TREES = {"chain": (4, 1, 5), "tree": (4, 4, 14), "few_nodes": (3, 5, 4), "past_a_word": (5, 8, 70)}
KINDS = ("alone", "in front", "of an LM")


@pytest.fixture(scope="module")
def models():
    return TinyTarget(device=DEVICE, window=9), TinyDraft(device=DEVICE)


@pytest.fixture(scope="module")
def expected(models):
    """Long enough for the greedy texts to repeat themselves."""
    return [dense_greedy(models[0], prompt, 60) for prompt in PROMPTS]


def proposer(kind, models, *numbers):
    alone = LookupProposer(*(numbers or (1, 4)))
    if kind == "alone":
        return alone
    other = LMDraft(TinyTarget(device=DEVICE, layers=1, seed=3), VOCAB)
    return LookupFirst(alone, models[1] if kind == "in front" else other)


def engine(models, kind, tree, *, numbers=(), max_num_reqs=4, page_size=1, context=128, **options):
    config = SpecConfig(*tree, context, max_num_reqs, page_size)
    options = {"buckets": [max_num_reqs]} | options
    return Engine(models[0], proposer(kind, models, *numbers), config, **options)


def texts(run, requests):
    """The text of every request as its steps left it, and what it was told."""
    run.add(requests)
    live = list(run.running)
    found = {}
    while run.num_running:
        for one in live:
            if one in run.running:
                length = int(run.states.seq_lens[one.row])
                table = run.states.drafting[lookup.TEXT]
                found[one.row] = one, table[one.row, : length + 1].tolist()
        run.step()
    return [(list(one.request.prompt) + one.result.tokens, text) for one, text in found.values()]


@sampled(star, kind=KINDS, tree={"tree": TREES["tree"]} | TREES)
def test_greedy_lookup_equals_greedy_decoding(models, expected, kind, tree):
    run = engine(models, kind, tree, buckets=None)
    out = run.generate([Request(p, 60 - i) for i, p in enumerate(PROMPTS)])
    for i, (result, want) in enumerate(zip(out, expected, strict=True)):
        assert result.tokens == want[: 60 - i]
    assert max(n for r in out for n in r.accept_lens) > 2, "nothing was ever accepted"
    check_books(run.table)


@sampled(star, kind=KINDS, chunk=[2, 5])
def test_prompts_in_chunks_and_behind_a_prefix(models, expected, kind, chunk):
    """The second request finds the first one's prompt cached, and has all of it as its text."""
    run = engine(models, kind, TREES["tree"], page_size=2)
    run._admission.prompts.chunk = chunk
    first = [Request(LOOP, 60), Request([*LOOP, 3], 30), Request([*LOOP, 3, 4], 30)]
    for whole, text in texts(run, first):
        assert text == whole[: len(text)]
        assert len(text) > len(LOOP) + 5
    out = run.generate(first)
    assert out[0].tokens == expected[0]
    assert out[2].tokens == dense_greedy(models[0], [*LOOP, 3, 4], 30)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_used_again(models, expected, kind):
    """Two rows for all requests: a text begins anew, whoever had the row before."""
    run = engine(models, kind, TREES["tree"], max_num_reqs=2)
    out = run.generate([Request(p, 60) for p in PROMPTS])
    assert [r.tokens for r in out] == expected
    short = run.generate([Request(PROMPTS[1], 20), Request(PROMPTS[3], 20)])
    assert [r.tokens for r in short] == [expected[1][:20], expected[3][:20]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_fills_its_context_to_the_last_slot(models, kind):
    run = engine(models, kind, TREES["tree"], context=48)
    out = run.generate([Request(LOOP, 99), Request(list(range(1, 45)), 99)])
    for result, prompt in zip(out, (LOOP, list(range(1, 45))), strict=True):
        assert result.finish_reason == "context"
        assert result.tokens == dense_greedy(models[0], prompt, len(result.tokens))


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_may_fill_the_context(models, kind):
    """Its first token, which has no slot, is the text's last."""
    prompt = [at % 7 for at in range(48)]
    (out,) = engine(models, kind, TREES["tree"], context=48).generate([Request(prompt, 9)])
    assert (out.tokens, out.finish_reason) == (dense_greedy(models[0], prompt, 1), "context")


@sampled(
    star,
    kind=KINDS[::-1],
    options={
        "piecewise": {"cudagraph": "piecewise"},
        "debugged": {"validate": "debug"},
        "halves": {"tbo": True},
    },
)
def test_steps_in_parts_and_debugged(models, expected, kind, options):
    run = engine(models, kind, TREES["tree"], **options)
    out = run.generate([Request(p, 60) for p in PROMPTS])
    assert [r.tokens for r in out] == expected


@pytest.mark.parametrize("tree", ["chain", "tree"])
def test_grammars_and_processors_see_padding_as_nodes_of_no_meaning(tree):
    target, penalised = TinyTarget(device=DEVICE), GREEDY["three"]
    run = engine((target, None), "alone", TREES[tree], cudagraph="piecewise")
    requests = [
        Request(p, 30, params, grammar=partial(Remainders, p) if has else None)
        for p, params, has in zip(
            PROMPTS, (SamplingParams(), penalised) * 2, (1, 0, 1, 1), strict=True
        )
    ]
    for request, out in zip(requests, run.generate(requests), strict=True):
        text = constrained_text if request.grammar else greedy_text
        assert out.tokens == text(target, list(request.prompt), 30, request.sampling)


def test_a_loop_is_followed_to_the_end_of_the_chain(models, expected):
    """Once the greedy text repeats itself, every step gains all it can."""
    run = engine(models, "alone", (6, 1, 7))
    (result,) = run.generate([Request([*LOOP, *expected[0]], 40)])
    want = dense_greedy(models[0], [*LOOP, *expected[0]], 40)
    assert result.tokens == want
    assert result.accept_lens.count(7) >= 3


def test_a_match_goes_before_the_draft_and_no_match_leaves_it(models):
    """Step by step, against the trees that lookup and the draft propose by themselves."""
    trees = {}
    for kind in ("alone", "in front", "draft"):
        draft = models[1] if kind == "draft" else proposer(kind, models, 2, 4)
        run = Engine(models[0], draft, SpecConfig(*TREES["tree"], 128, 2))
        # the first one's newest tokens do not matter: its text is put there
        run.add([Request(LOOP, 9), Request([1, 2, 3], 9)])
        rows = [one.row for one in run.running]
        run.table.reserve(rows, [128] * 2)
        run.states.bonus_tokens[rows[0]] = 10
        if kind != "draft":
            run.states.drafting[lookup.TEXT][rows[0], len(LOOP)] = 10
        with torch.no_grad():
            step = run.decoder(run.config).phases(rows)
            step.begin()
            trees[kind] = {name: one.clone() for name, one in vars(step.draft()).items()}
    for name, tensor in trees["in front"].items():
        assert torch.equal(tensor[0], trees["alone"][name][0]), name
        assert torch.equal(tensor[1], trees["draft"][name][1]), name
    assert trees["alone"]["tokens"][0, :3].tolist() == [10, 12, 7]
    assert trees["alone"]["retrieve_next_token"][1].tolist() == [-1] * 14


# its matches are longer than any here
NEVER = LookupProposer(64, 64)


@on_cpu(half, "last", "tree")
@pytest.mark.parametrize("tree", ["chain", "tree"])
@pytest.mark.parametrize("last", ["lookup", "draft"])
def test_whoever_stands_behind_drafts_as_alone(models, expected, tree, last):
    """Where those in front find nothing, every step gains what the last one gains by itself."""
    alone = LookupProposer(1, 4) if last == "lookup" else models[1]
    behind = LookupFirst(NEVER, alone), LookupFirst(NEVER, LookupFirst(NEVER, alone))
    gained = []
    for draft in (alone, *behind):
        run = Engine(models[0], draft, SpecConfig(*TREES[tree], 128, 4))
        out = run.generate([Request(p, 60) for p in PROMPTS])
        assert [r.tokens for r in out] == expected
        gained.append([r.accept_lens for r in out])
    assert gained[1:] == gained[:1] * 2
    assert max(max(lens) for lens in gained[0]) > 2, "nothing was ever accepted"


def test_buffers_are_each_proposers_own_in_the_memory_of_all_batch_sizes(models):
    run = Engine(models[0], LookupFirst(NEVER, LookupProposer(1, 4)), SpecConfig(4, 1, 5, 128, 4))
    run.add([Request(p, 9) for p in PROMPTS])
    large = run.decoder(run.config).phases([one.row for one in run.running])
    small = Step(large.setup, large.host.of(0, 1), large.packed[:1], large.arena)
    for name in ("tokens", "parents", "ngrams"):
        of = [
            [getattr(one, name) for one in (step.bound.lookup, step.bound.other)]
            for step in (large, small)
        ]
        assert of[0][0].data_ptr() != of[0][1].data_ptr()
        for whole, first in zip(*of, strict=True):
            assert (whole.data_ptr(), len(whole), len(first)) == (first.data_ptr(), 4, 1)


class KeepsATextOfItsOwn(LookupProposer):
    """What it keeps has lookup's name and another width."""

    def state_fields(self, config):
        return {lookup.TEXT: StateField(8, torch.int32)}


class KeepsSeeds(LookupProposer):
    """What it keeps has the name of the states' own."""

    def state_fields(self, config):
        return super().state_fields(config) | {"seeds": StateField(1, torch.int64)}


def test_fields_of_one_name_are_refused(models):
    config = SpecConfig(4, 1, 5, 128, 4)
    with pytest.raises(ValueError, match=r"'text' must be .*129.*got .*8.* of KeepsATextOfItsOwn"):
        Engine(models[0], LookupFirst(NEVER, KeepsATextOfItsOwn()), config)
    with pytest.raises(ValueError, match=r"must have names of their own, got \['seeds'\]"):
        Engine(models[0], KeepsSeeds(), config)


def test_several_settings_share_the_text(models, expected):
    """Plain steps append, too; a chain and a tree go on with what they left."""
    configs = [SpecConfig(*tree, 128, 4) for tree in ((0, 1, 1), TREES["chain"])]
    turn = iter(range(10_000))
    run = engine(
        models,
        "alone",
        TREES["tree"],
        configs=configs,
        policy=lambda observed: observed.configs[next(turn) % 3],
    )
    out = run.generate([Request(p, 60) for p in PROMPTS])
    assert [r.tokens for r in out] == expected


def test_what_cannot_be_is_refused(models):
    with pytest.raises(ValueError, match="min_ngram"):
        LookupProposer(4, 3)
    with pytest.raises(ValueError, match="matches"):
        LookupProposer(1, 3, 33)
    config = SpecConfig(2, 1, 3, 64, 2, draft_sampling=True)
    for kind in KINDS:
        with pytest.raises(ValueError, match="draft_sampling must be off with lookup"):
            Engine(models[0], proposer(kind, models), config)


def p_value(models, kind, tree, prompt, wanted):
    """Of drawn texts after a prompt."""
    config = SpecConfig(*tree, 64, 250)
    run = Engine(models[0], proposer(kind, models, 1, 3), config, buckets=[250])
    return three_tokens.drawn_p_value(run, wanted, prompt, least_gains=100)


@pytest.fixture(scope="module")
def drawing_models():
    return three_tokens.make_models()


@pytest.fixture(scope="module")
def drawing(drawing_models):
    """A prompt with what is probable after it, and the distribution of three tokens after that."""
    target, _ = drawing_models
    likely = three_tokens.distribution(target, three_tokens.PROMPT)
    paths = sorted(likely, key=likely.get)[-9:]
    prompt = [*(token for path in paths for token in path), *three_tokens.PROMPT]
    return prompt, three_tokens.distribution(target, prompt)


@pytest.mark.slow
@sampled(star, kind=KINDS, tree={"tree": (2, 3, 7), "chain": (2, 1, 3)})
def test_three_tokens_have_the_targets_joint_distribution(drawing_models, drawing, kind, tree):
    assert p_value(drawing_models, kind, tree, *drawing) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_one_coin_for_both_decisions_fails_the_same_test(
    drawing_models, drawing, kind, monkeypatch
):
    monkeypatch.setattr(three_tokens.verify, "FINAL", three_tokens.verify.ACCEPT)
    assert p_value(drawing_models, kind, (2, 3, 7), *drawing) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tree", [(4, 1, 5), (4, 4, 14)], ids=["chain", "tree"])
def test_replays_search_the_text_that_is_there_then(models, expected, kind, tree):
    """One graph per step, whatever the requests' texts are."""
    run = engine(models, kind, tree, cudagraph="full", buckets=[1, 2, 4])
    for prompts, wanted in ((PROMPTS, expected), (PROMPTS[::-1], expected[::-1])):
        out = run.generate([Request(p, 60) for p in prompts])
        assert [r.tokens for r in out] == wanted
