"""Drafts of the host in whole steps: tokens, their distribution, what proposers are told."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.errors import TreeError
from specattn.speculative.proposers.host import HostProposer, HostTree
from specattn.speculative.proposers.lookup import LookupFirst, LookupProposer
from specattn.speculative.sampling.params import SamplingParams
from tests.books import check_books
from tests.grammars import Remainders, constrained_text
from tests.processors import GREEDY, greedy_text
from tests.speculative import three_tokens
from tests.speculative.stepping import hold_up
from tests.speculative.test_host_plans import PlanningBackend
from tests.tiny import VOCAB, TinyDraft, TinyTarget, dense_greedy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = [[7, 8, 9, 10, 11] * 3, [35], [3, 14, 15] * 9, [58, 9, 7, 9, 3]]
NEW = 40
TREES = {
    "chain": SpecConfig(4, 1, 5),
    "tree": SpecConfig(4, 3, 12),
    "best first": SpecConfig(5, 1, 70, tree="best_first", ranks=8),
}


class Guesses(HostProposer):
    """Knows what will be written, and errs in a way of its own.

    A tree has a wrong branch before the right one, and a sibling twice.
    """

    def __init__(self, known):
        self.known = {tuple(prompt): text for prompt, text in known}
        self.seen, self.calls = {}, 0

    def draft(self, requests, config):
        self.calls += 1
        for one in requests:
            assert not one.ended
            assert len(one.tokens) > self.seen.get(one, 0), "the host has read the last step"
            self.seen[one] = len(one.tokens)
        return [self.tree(one, config) for one in requests]

    def tree(self, one, config):
        prompt, at = tuple(one.tokens[: one.prompt_len]), len(one.tokens) - one.prompt_len
        right = self.known.get(prompt, [])[at : at + config.num_steps]
        if at % 7 == 3 or not right:
            return HostTree()
        if at % 3 == 1:
            right[-1] = (right[-1] + 1) % VOCAB
        if config.proposals == 1:
            return HostTree(right)
        wrong = [(token + 1) % VOCAB for token in right[:2]]
        tokens = [*wrong, right[0], right[0], *right[1:]]
        below = [len(wrong) + min(depth * 2, depth + 1) for depth in range(len(right) - 1)]
        parents = [*range(-1, len(wrong) - 1), -1, -1, *below]
        return HostTree(tokens, parents)


@pytest.fixture(scope="module")
def target():
    return TinyTarget(device=DEVICE, window=9)


@pytest.fixture(scope="module")
def expected(target):
    return [dense_greedy(target, prompt, NEW) for prompt in PROMPTS]


@pytest.fixture
def guesses(expected):
    return Guesses(zip(PROMPTS, expected, strict=True))


def of(tree, *, rows=4, context=128, page_size=1):
    return replace(TREES[tree], max_context_len=context, max_num_reqs=rows, page_size=page_size)


CASES = [(tree, {}) for tree in TREES]
CASES += [
    ("tree", {"cudagraph": "piecewise"}),
    ("tree", {"validate": "debug"}),
    ("tree", {"tbo": True}),
    ("chain", {"backend": PlanningBackend}),
]


@pytest.mark.parametrize(("tree", "options"), CASES, ids=str)
def test_greedy_texts_are_those_of_plain_decoding(target, expected, guesses, tree, options):
    """Requests end and join: there are two or three rows for four."""
    run = Engine(target, guesses, of(tree, rows=3 if "tbo" in options else 2), **options)
    out = run.generate([Request(p, NEW - i) for i, p in enumerate(PROMPTS)])
    for i, (result, want) in enumerate(zip(out, expected, strict=True)):
        assert result.tokens == want[: NEW - i]
        assert max(result.accept_lens) == TREES[tree].num_steps + 1
        assert 1 in result.accept_lens
    check_books(run.table)


@pytest.mark.gpu
@pytest.mark.parametrize("cudagraph", ["full", "piecewise"])
@pytest.mark.parametrize("tree", TREES)
def test_replays_verify_the_trees_of_their_step(target, expected, guesses, tree, cudagraph):
    """The host is far ahead of the device when it hands out the next tree."""
    run = Engine(target, guesses, of(tree), cudagraph=cudagraph, buckets=[1, 2, 4])
    for prompts, wanted in ((PROMPTS, expected), (PROMPTS[::-1], expected[::-1])):
        results = run.add([Request(p, NEW - 3 * i) for i, p in enumerate(prompts)])
        while run.num_running:
            hold_up()
            run.step(ahead=True)
        for i, (result, want) in enumerate(zip(results, wanted, strict=True)):
            assert result.tokens == want[: NEW - 3 * i]
            assert max(result.accept_lens) == TREES[tree].num_steps + 1
    assert sum(run.decoder(run.config).runner.stats.eager.values()) == 0


def test_a_request_is_the_same_object_from_first_to_last(target, expected):
    told, texts = {}, {}

    class Listens(HostProposer):
        def draft(self, requests, config):
            for one in requests:
                told.setdefault(one, []).append(len(one.tokens))
                assert texts.setdefault(one, one.tokens) is one.tokens
            return [HostTree()] * len(requests)

    run = Engine(target, Listens(), of("tree"))
    out = run.generate([Request(prompt, 20) for prompt in PROMPTS])
    assert [result.tokens for result in out] == [text[:20] for text in expected]
    assert len(told) == 4
    for (one, lens), prompt, text in zip(told.items(), PROMPTS, expected, strict=True):
        assert one.ended
        assert one.prompt_len == len(prompt)
        assert one.tokens == prompt + text[:20]
        assert lens == list(range(len(prompt) + 1, len(prompt) + 20))


@pytest.mark.parametrize("chunk", [1, 5])
def test_prompts_in_chunks_and_behind_a_prefix(target, expected, guesses, chunk):
    run = Engine(target, guesses, of("tree", page_size=2))
    run._admission.prompts.chunk = chunk
    longer = [*PROMPTS[0], 3]
    guesses.known[tuple(longer)] = want = dense_greedy(target, longer, 20)
    out = run.generate([Request(PROMPTS[0], NEW), Request(longer, 20)])
    assert [result.tokens for result in out] == [expected[0], want]
    assert max(out[1].accept_lens) == 5


def test_a_request_fills_its_context_to_the_last_slot(target, guesses):
    prompt = PROMPTS[0]
    guesses.known[tuple(prompt)] = want = dense_greedy(target, prompt, 34)
    run = Engine(target, guesses, of("tree", context=48))
    (result,) = run.generate([Request(prompt, 99)])
    assert result.finish_reason == "context"
    assert result.tokens == want
    assert max(result.accept_lens) == 5


def test_several_settings_take_turns(target, expected, guesses):
    configs = [of("chain"), of("best first"), of("tree").plain()]
    turn = iter(range(10_000))
    run = Engine(
        target,
        guesses,
        of("tree"),
        configs=configs,
        policy=lambda observed: observed.configs[next(turn) % 4],
    )
    out = run.generate([Request(prompt, NEW) for prompt in PROMPTS])
    assert [result.tokens for result in out] == expected
    assert min(run.configs.used.values()) > 1


def test_grammars_and_processors_read_the_hosts_trees():
    target, penalised, plain = TinyTarget(device=DEVICE), GREEDY["three"], SamplingParams()
    kinds = zip(PROMPTS, (plain, penalised) * 2, (True, False, True, True), strict=True)
    wanted = [
        (constrained_text if has else greedy_text)(target, prompt, 24, params)
        for prompt, params, has in list(kinds)
    ]
    guesses = Guesses(zip(PROMPTS, wanted, strict=True))
    requests = [
        Request(p, 24, params, grammar=partial(Remainders, p) if has else None)
        for p, params, has in zip(
            PROMPTS, (plain, penalised) * 2, (True, False, True, True), strict=True
        )
    ]
    out = Engine(target, guesses, of("tree")).generate(requests)
    assert [result.tokens for result in out] == wanted
    assert min(max(result.accept_lens) for result in out) > 2


# what is drafted, the error, and its message after the proposer's name
WRONG = {
    "late parent": (HostTree([1, 2], [-1, 1]), TreeError, r"parents\[1\] must be -1\.\.0, got 1"),
    "no parent": (HostTree([1], [-2]), TreeError, r"parents\[0\] must be -1\.\.-1, got -2"),
    "few parents": (HostTree([1, 2], [-1]), TreeError, "parents must be one per token, 2, got 1"),
    "token": (HostTree([5, 61]), TreeError, r"tokens\[1\] must be 0\.\.60, got 61"),
    "negative": (HostTree([-1]), TreeError, r"tokens\[0\] must be 0\.\.60, got -1"),
    "nodes": (HostTree([1] * 12, [-1] * 12), TreeError, "tokens must be at most 11, got 12"),
    "deep": (HostTree([1] * 5), TreeError, r"tokens\[4\] must be at most 4 deep, got 5"),
    "half": (HostTree([1.5]), ValueError, r"every token must be a whole number, got 1\.5"),
    "half parent": (HostTree([1], [0.5]), ValueError, r"every parent must be a whole number"),
    "a list": ([1, 2], ValueError, "a draft must be a HostTree, got list"),
}


class Spoilt(Guesses):
    """Drafts something else for the second request, when told to."""

    spoilt = None

    def draft(self, requests, config):
        good = super().draft(requests, config)
        if isinstance(self.spoilt, Exception):
            raise self.spoilt
        return good if self.spoilt is None else [good[0], self.spoilt, *good[2:]]


@pytest.fixture(scope="module")
def spoilt_run(target, expected):
    spoilt = Spoilt(zip(PROMPTS, expected, strict=True))
    return Engine(target, spoilt, of("tree")), spoilt


@pytest.mark.parametrize(("tree", "error", "message"), WRONG.values(), ids=WRONG)
def test_a_malformed_tree_is_refused_by_name_and_costs_nothing(
    spoilt_run, expected, tree, error, message
):
    """All that ran go on where they were."""
    run, spoilt = spoilt_run
    out = run.add([Request(prompt, 12) for prompt in PROMPTS])
    run.step()
    spoilt.spoilt = tree
    with pytest.raises(error, match=f"^Spoilt, request 1: {message}"):
        run.step(ahead=True)
    spoilt.spoilt = None
    spoilt.seen.clear()
    while run.num_running:
        run.step(ahead=True)
    assert [result.tokens for result in out] == [text[:12] for text in expected]


def test_what_a_proposer_raises_costs_nothing(spoilt_run, expected):
    run, spoilt = spoilt_run
    out = run.add([Request(prompt, 12) for prompt in PROMPTS])
    spoilt.spoilt = InterruptedError("no answer")
    with pytest.raises(InterruptedError, match="no answer"):
        run.step()
    spoilt.spoilt = None
    spoilt.seen.clear()
    while run.num_running:
        run.step()
    assert [result.tokens for result in out] == [text[:12] for text in expected]


def test_a_chain_is_one(target, guesses):
    run = Engine(target, guesses, of("chain"))
    (row,) = [one.row for one in run.running] if run.add([Request(PROMPTS[0], 9)]) else []
    run.table.reserve([row], [64])
    with pytest.raises(TreeError, match=r"Guesses, request 0: parents\[1\] must be 0, got -1"):
        run.decoder(run.config).step_async([row], trees=[HostTree([1, 2], [-1, -1])])


def test_a_loop_of_ones_own_hands_over_trees(target, expected, guesses):
    """Padding, a request that sits a step out, and a batch beyond the buckets."""
    run = Engine(target, guesses, of("tree"), buckets=[1, 2])
    run.add([Request(prompt, NEW) for prompt in PROMPTS])
    live, decoder = list(run.running), run.decoder(run.config)
    rows = [one.row for one in live]
    run.table.reserve(rows[:3], [128] * 3)
    run.table.reserved[rows[3]] = live[3].length
    for trees, asked in ((None, "trees must be given with the HostProposer Guesses"), ([], "3")):
        with pytest.raises(ValueError, match=asked):
            decoder.step_async(rows[:3], trees=trees)
    nodes = [HostTree(text[1:5]) for text in expected]
    gained = decoder.step_async([rows[0], 0, rows[3], rows[1]], trees=[*nodes[:1] * 3, nodes[1]])
    assert gained.wait() == [expected[0][1:6], [], [], expected[1][1:6]]
    # a tree below another token than the newest is a bad guess, and nothing else
    gained = decoder.step_async(rows[2:3], trees=[HostTree(torch.tensor(expected[2][2:5]))])
    assert gained.wait() == [expected[2][1:2]]
    assert decoder.step_async([]).wait() == []
    plain = run.decoder(run.config.plain())
    with pytest.raises(ValueError, match="trees need a decoder whose drafts are a HostProposer's"):
        plain.step_async(rows[:1], trees=nodes[:1])
    assert plain.step_async(rows[:1]).wait() == [expected[0][6:7]]


def test_phases_find_the_tree_that_was_handed_over(target, expected, guesses):
    run = Engine(target, guesses, replace(of("tree"), num_draft_tokens=6))
    run.add([Request(prompt, NEW) for prompt in PROMPTS[:2]])
    rows = [one.row for one in run.running]
    run.table.reserve(rows, [64] * 2)
    trees = [HostTree([4, 5, 6, 7], [-1, 0, -1, 1]), HostTree([9])]
    with torch.no_grad():
        step = run.decoder(run.config).phases(rows, trees=trees)
        step.begin()
        tree = step.draft()
    roots = [text[0] for text in expected]
    assert tree.tokens.tolist() == [[roots[0], 4, 5, 6, 7, 0], [roots[1], 9, 0, 0, 0, 0]]
    none = [-1] * 6
    assert tree.retrieve_next_token.tolist() == [[1, 2, 4, -1, -1, -1], [1, *none[1:]]]
    assert tree.retrieve_next_sibling.tolist() == [[-1, 3, -1, -1, -1, -1], none]
    depths = tree.positions - tree.positions[:, :1]
    assert depths.tolist() == [[0, 1, 2, 1, 3, 0], [0, 1, 0, 0, 0, 0]]


def test_the_first_rank_drafts_for_all(target, expected, guesses, monkeypatch):
    """Another rank takes rank 0's trees, and asks nobody."""
    run = Engine(target, guesses, of("tree"))
    decided = []

    def decide(_ranks, choose):
        decided.append(choose)
        return [HostTree(expected[0][1:5])]

    monkeypatch.setattr("specattn.engine.flight.decide", decide)
    (result,) = run.add([Request(PROMPTS[0], 9)])
    run.step()
    assert result.accept_lens == [5]
    assert not guesses.calls
    assert len(decided[0]()) == 1


def test_what_cannot_be_is_refused(target, guesses):
    with pytest.raises(ValueError, match="draft_sampling must be off with a HostProposer"):
        Engine(target, guesses, SpecConfig(2, 1, 3, 64, 2, draft_sampling=True))
    with pytest.raises(ValueError, match="a HostProposer drafts alone, got Guesses behind"):
        Engine(target, LookupFirst(LookupProposer(), guesses), of("tree"))
    run = Engine(target, TinyDraft(device=DEVICE), of("tree"))
    run.add([Request(PROMPTS[1], 9)])
    with pytest.raises(ValueError, match="trees need a decoder whose drafts"):
        run.decoder(run.config).step_async([run.running[0].row], trees=[HostTree()])


class Likely(HostProposer):
    """Drafts the most probable texts, with one token twice below the root."""

    def __init__(self, wanted):
        self.wanted = wanted

    def draft(self, requests, config):
        return [self.tree(one.tokens[one.prompt_len :], config) for one in requests]

    def tree(self, text, config):
        begun = [path for path in self.wanted if list(path[: len(text)]) == text]
        paths = [path[len(text) :] for path in sorted(begun, key=self.wanted.get)[::-1]]
        if config.topk == 1:
            return HostTree(paths[0])
        firsts = list(dict.fromkeys(path[0] for path in paths if path))
        if not firsts:
            return HostTree()
        below = [path[1] for path in paths if path[0] == firsts[0] and len(path) > 1]
        below = below[:1]
        tokens = [firsts[0], firsts[0], *firsts[1:2], *below]
        return HostTree(tokens, [-1] * (len(tokens) - len(below)) + [0] * len(below))


@pytest.fixture(scope="module")
def drawing():
    target, _ = three_tokens.make_models()
    return target, three_tokens.distribution(target, three_tokens.PROMPT)


def p_value(drawing, tree, **options):
    target, wanted = drawing
    run = Engine(target, Likely(wanted), three_tokens.SETTINGS[tree], buckets=[250])
    return three_tokens.drawn_p_value(run, wanted, least_gains=100, **options)


@pytest.mark.parametrize("tree", ["chain", "tree"])
def test_three_tokens_have_the_targets_joint_distribution(drawing, tree):
    assert p_value(drawing, tree) > 1e-3


def test_one_coin_for_both_decisions_fails_the_same_test(drawing, monkeypatch):
    monkeypatch.setattr(three_tokens.verify, "FINAL", three_tokens.verify.ACCEPT)
    assert p_value(drawing, "tree", draws=750) < 1e-10
