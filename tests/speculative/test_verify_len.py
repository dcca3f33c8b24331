"""A verify length per request: the target's tokens, whatever each request verifies."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from specattn.config import SpecConfig
from specattn.engine.engine import Request
from specattn.errors import UnsupportedError
from specattn.speculative import verify
from specattn.speculative.lookup import LookupFirst, LookupProposer
from specattn.speculative.sampling import SamplingParams
from tests.grammars import Remainders, constrained_text
from tests.processors import GREEDY, greedy_text
from tests.speculative import laws
from tests.speculative.blocks import PROMPTS, SIZE, decode, engine, p_value, poison
from tests.speculative.laws import PROMPT
from tests.tiny import TinyBlockDraft, TinyDraft, TinyTarget
from tests.worlds import BACKENDS, DEVICE

CONTEXT = 112
BEST = {"tree": "best_first", "ranks": 4}
TREES = {
    "chain": SpecConfig(5, 1, 6, CONTEXT, 5, verify_len=4, verify_chunk=2),
    "node by node": SpecConfig(5, 1, 12, CONTEXT, 5, verify_len=5, verify_chunk=1, **BEST),
    "best first": SpecConfig(5, 1, 16, CONTEXT, 5, verify_len=8, verify_chunk=4, **BEST),
    "least": SpecConfig(5, 1, 16, CONTEXT, 5, verify_len=4, verify_chunk=4, **BEST),
    "two words": SpecConfig(
        3, 1, 70, CONTEXT, 5, tree="best_first", ranks=20, verify_len=14, verify_chunk=7
    ),
    "pages": SpecConfig(5, 1, 12, CONTEXT, 5, 4, verify_len=6, verify_chunk=3, **BEST),
}


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_greedy_tokens_are_those_of_plain_decoding(backend, name):
    gained = decode(engine(TREES[name], backend=backend))
    assert sum(gained) > 1.4 * len(gained), "drafts are accepted"


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_any_batch_and_row_decodes_the_same(batch):
    config = replace(TREES["best first"], max_num_reqs=batch)
    decode(engine(config, buckets=[batch]), [*PROMPTS, *PROMPTS[::-1]], 15)


@pytest.mark.parametrize(
    "options",
    [{"cudagraph": "piecewise"}, {"cudagraph": "piecewise", "validate": "debug"}, {"tbo": True}],
    ids=str,
)
def test_parts_checks_and_halves_decode_the_same(options):
    decode(engine(TREES["best first"], **options))


@pytest.mark.parametrize("name", ["chain", "best first"])
def test_an_eagle_head_shares_rows_too(name):
    decode(engine(TREES[name], TinyDraft(device=DEVICE)))


def test_window_layers_see_what_they_do_alone():
    decode(engine(TREES["best first"], target=TinyTarget(window=6, device=DEVICE)))


def test_backends_without_ragged_rows_are_refused():
    problem = r"requests cannot have different numbers of rows \(verify_len\)"
    with pytest.raises(UnsupportedError, match=f"backend 'flex': {problem}"):
        engine(TREES["best first"], backend="flex")
    with pytest.raises(UnsupportedError, match=f"{problem} in the deterministic mode"):
        engine(TREES["best first"], backend="triton", deterministic=True)


def test_processed_requests_see_whole_trees():
    """Penalties, log-probabilities and a grammar, beside a request that asks for nothing."""
    target, config = TinyTarget(device=DEVICE), TREES["best first"]
    kinds = [
        (GREEDY["three"], False),
        (SamplingParams(logprobs=2), True),
        (SamplingParams(), False),
    ]
    requests = [
        Request(
            PROMPTS[at],
            14,
            params,
            grammar=partial(Remainders, PROMPTS[at]) if has else None,
        )
        for at, (params, has) in enumerate(kinds)
    ]
    run = engine(config, target=target)
    for request, out in zip(requests, run.generate(requests), strict=True):
        text = constrained_text if request.grammar else greedy_text
        assert out.tokens == text(target, list(request.prompt), 14, request.sampling)
        assert len(out.logprobs) == (14 if request.sampling.logprobs is not None else 0)


def two_steps(policy=None, config=TREES["best first"]):
    """The same step, verified as whole trees and by shares; both have run but for the end."""
    found = []
    for one in (replace(config, verify_len=0), config):
        run = engine(one, graphs=False, verify_policy=policy if one.verify_len else None)
        poison(run)
        run.add([Request(prompt, 40) for prompt in PROMPTS[:4]])
        run.step()
        decoder = run.decoder(one)
        # a row of padding among them
        rows = [live.row for live in run.running]
        step = decoder.phases([*rows[:2], 0, *rows[2:]])
        with torch.no_grad():
            step.begin()
            tree = step.draft()
            logits, _ = step.verify(tree)
            step.accept(tree, logits)
        found.append((step, tree, logits))
    return found


def test_a_request_keeps_what_it_would_of_the_whole_tree():
    (whole, tree, logits), (some, cut, rows) = two_steps()
    lens = some.shared.buffers.lens.tolist()
    assert lens[2] == 0, "padding needs nothing"
    assert sum(lens) == 5 * 8
    assert max(lens) > min(lens[:2] + lens[3:]) > 0, "some verify more than others"
    assert rows.shape == (40, logits.shape[2])
    for b, length in enumerate(lens):
        at = cut.retrieve_index[b, :length]
        torch.testing.assert_close(rows[at], logits[b, :length], rtol=1e-4, atol=1e-4)
        assert torch.equal(cut.tokens[b, :length], tree.tokens[b, :length])
        path = [node for node in whole.buffers.accept_index[b].tolist() if node >= 0]
        kept = [node for node in some.buffers.accept_index[b].tolist() if node >= 0]
        if length:
            assert kept == [node for node in path if node < length]


def probable(probs, rows):
    return probs


@pytest.mark.parametrize("policy", [None, probable], ids=["steps", "tokens"])
def test_rows_go_to_the_paths_that_are_worth_most(policy):
    _, (step, _, _) = two_steps(policy)
    probs, chunk = step.shared.buffers.probs, 4
    lens = step.shared.buffers.lens.tolist()
    live = [b for b, length in enumerate(lens) if length]
    # counted in tokens, or in steps, of which a request that gains more needs fewer
    unit = torch.ones_like(probs[:, 0]) if policy is probable else probs.sum(1)
    worth = {
        (b, j): float(probs[b, j * chunk : (j + 1) * chunk].sum() / unit[b])
        for b in live
        for j in range(1, 4)
    }
    taken = {(b, j) for b, j in worth if j * chunk < lens[b]}
    left = worth.keys() - taken
    assert left
    assert min(worth[at] for at in taken) >= max(worth[at] for at in left)
    assert torch.equal(probs[live, 0], torch.ones(len(live), device=DEVICE))
    assert (probs.diff(dim=1) <= 0).all()


def test_a_policy_says_who_verifies_most():
    def for_second(probs, rows):
        return probs * (1 + 1000 * (torch.arange(len(probs), device=probs.device) == 1))[:, None]

    _, (step, _, _) = two_steps(for_second)
    assert step.shared.buffers.lens[1] == 16
    decode(engine(TREES["best first"], verify_policy=for_second))


def test_settings_take_turns():
    configs = [TREES["best first"], replace(TREES["best first"], verify_len=0), TREES["chain"]]
    turns = iter(range(10**6))
    run = engine(
        configs[0],
        configs=[*configs[1:], configs[0].plain()],
        policy=lambda observed: observed.configs[next(turns) % len(observed.configs)],
    )
    decode(run, count=40)
    assert len(run.configs.used) >= 4


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"verify_len": 16}, "verify_len must be below num_draft_tokens 16, got 16"),
        ({"verify_len": 6}, "verify_len must be a multiple of verify_chunk 4, got 6"),
        ({"verify_chunk": 3, "verify_len": 6}, "num_draft_tokens must be a multiple of verify_ch"),
        ({"tree": "beam", "topk": 2}, "verify_len needs topk 1"),
        ({"tree": "beam", "num_draft_tokens": 6, "draft_sampling": True}, "draft_sampling False"),
    ],
)
def test_what_has_no_length_is_refused(changes, problem):
    with pytest.raises(ValueError, match=problem):
        replace(TREES["best first"], **changes)


def test_drafts_without_probabilities_are_refused():
    problem = "verify_len needs the probabilities of drafted tokens: prompt lookup has none"
    block = TinyBlockDraft(SIZE, device=DEVICE)
    for draft in (LookupProposer(), LookupFirst(LookupProposer(), block)):
        with pytest.raises(ValueError, match=problem):
            engine(TREES["best first"], draft)
    with pytest.raises(ValueError, match="verify_policy needs a config with a verify_len"):
        engine(replace(TREES["chain"], verify_len=0), verify_policy=lambda probs, rows: probs)


LAWS = {
    "chain": SpecConfig(2, 1, 3, 16, 250, verify_len=2, verify_chunk=1),
    "best first": SpecConfig(
        2, 1, 6, 16, 250, tree="best_first", ranks=3, verify_len=3, verify_chunk=1
    ),
}


@pytest.fixture(scope="module")
def target() -> TinyTarget:
    return laws.make_models()[0]


@pytest.fixture(scope="module")
def law(target) -> laws.Law:
    return laws.joint_law(target, PROMPT)


@pytest.mark.parametrize("name", LAWS)
def test_three_tokens_have_the_targets_joint_law(target, law, name):
    assert p_value(target, LAWS[name], law) > 1e-3


def test_a_biased_sampler_fails_the_same_test(target, law, monkeypatch):
    monkeypatch.setattr(verify, "FINAL", verify.ACCEPT)
    assert p_value(target, LAWS["best first"], law) < 1e-30
