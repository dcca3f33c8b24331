"""Steps that draft a block in one forward: what is decoded is the target's, tree by tree."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.kernels.tree import best_first_tree
from specattn.speculative.proposers import draft
from specattn.speculative.proposers.lookup import LookupFirst, LookupProposer
from specattn.speculative.sampling.params import SamplingParams
from specattn.speculative.step import verify
from tests.samples import half, on_cpu, sampled, star
from tests.speculative import three_tokens
from tests.speculative.blocks import PROMPTS, SIZE, decode, engine, p_value
from tests.speculative.three_tokens import PROMPT
from tests.tiny import TinyBlockDraft, TinyDraft, TinyTarget
from tests.worlds import BACKENDS, DEVICE

if TYPE_CHECKING:
    from tests.distributions import Distribution

CONTEXT = 96
TREES = {
    "chain": SpecConfig(5, 1, 6, CONTEXT, 5),
    "short chain": SpecConfig(2, 1, 3, CONTEXT, 5),
    "beams": SpecConfig(4, 3, 12, CONTEXT, 5),
    "beams of one depth": SpecConfig(1, 4, 4, CONTEXT, 5),
    "best first": SpecConfig(5, 1, 16, CONTEXT, 5, tree="best_first", ranks=4),
    "wide": SpecConfig(3, 1, 70, CONTEXT, 5, tree="best_first", ranks=20),
    "pages": SpecConfig(5, 1, 9, CONTEXT, 5, 4, tree="best_first", ranks=3),
}


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_greedy_tokens_are_those_of_plain_decoding(backend, name):
    gained = decode(engine(TREES[name], backend=backend, buckets=[1, 2, 5]))
    assert sum(gained) > 1.5 * len(gained), "drafts are accepted"


@sampled(star, name=["best first", "beams", "chain"], batch=[2, 1, 3, 4])
def test_any_batch_and_row_decodes_the_same(batch, name):
    """Requests follow each other on fewer rows: what the last one left is written again."""
    config = replace(TREES[name], max_num_reqs=batch)
    decode(engine(config, buckets=[batch]), [*PROMPTS, *PROMPTS[::-1]], 15)


@pytest.mark.parametrize("options", [{"cudagraph": "piecewise"}, {"tbo": True}], ids=str)
def test_parts_and_halves_decode_the_same(options):
    decode(engine(TREES["best first"], **options))


@pytest.mark.parametrize("first_draft", [0, 1])
def test_a_block_may_draft_from_its_first_place(first_draft):
    draft = TinyBlockDraft(SIZE, first_draft=first_draft, device=DEVICE)
    config = SpecConfig(SIZE - first_draft, 1, 12, CONTEXT, 5, tree="best_first", ranks=3)
    assert max(decode(engine(config, draft))) > 2


@on_cpu(half, "indices", "tree")
@pytest.mark.parametrize("tree", [(4, 1, 12, 4), (1, 1, 4, 6), (4, 1, 40, 61)], ids=str)
@pytest.mark.parametrize("indices", ["table", "csr"])
def test_a_best_first_tree_grows_along_the_chain_of_an_eagle_head(tree, indices):
    *shape, ranks = tree
    config = SpecConfig(*shape, CONTEXT, 5, tree="best_first", ranks=ranks)
    gained = decode(engine(config, TinyDraft(device=DEVICE), indices=indices))
    assert sum(gained) > 1.3 * len(gained)


def context_of(run: Engine) -> list[torch.Tensor]:
    """The draft's keys and values of every running text."""
    found = []
    for live in run.running:
        slots = run.table.req_to_token[live.row, : live.length].long()
        found += [run.draft.pool.k[:, slots], run.draft.pool.v[:, slots]]
    return found


@pytest.mark.parametrize("chunk", [1, 3, 4096])
def test_prompts_and_steps_leave_the_same_context(chunk):
    """In chunks, behind a cached prefix, and step by step."""
    text = [*PROMPTS[0], *PROMPTS[4]]
    run = engine(TREES["best first"])
    run._admission.prompts.chunk = chunk
    run.add([Request(text, 60)])
    run.add([Request([*text[:9], 60, 2], 60)])
    for _ in range(4):
        run.step()
    whole = engine(TREES["best first"])
    for live in run.running:
        whole.add([Request(live.tokens[:-1], 60)])
    for ours, theirs in zip(context_of(run), context_of(whole), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)


def test_a_step_drops_the_blocks_own_keys_and_values():
    """Nothing of a block reaches the committed context, whatever its masks hold."""
    found = []
    for mask in (60, 7):
        draft = TinyBlockDraft(SIZE, device=DEVICE)
        draft.block = replace(draft.block, mask_token_id=mask)
        run = engine(TREES["chain"], draft)
        run.add([Request(PROMPTS[0], 30)])
        while run.running[0].length < 20:
            run.step()
        found.append(context_of(run)[0][:, :20])
    torch.testing.assert_close(*found, rtol=1e-4, atol=2e-5)


def test_configs_take_turns_and_plain_decoding_keeps_the_context():
    configs = [TREES[name] for name in ("best first", "chain", "beams")]
    configs.append(configs[0].plain())
    turns = iter(range(10**6))
    run = engine(
        configs[0],
        configs=configs[1:],
        policy=lambda observed: observed.configs[next(turns) % len(observed.configs)],
    )
    decode(run, count=40)
    assert len(run.configs.used) >= 4


@pytest.mark.parametrize("name", ["chain", "beams", "best first"])
def test_lookup_goes_before_a_block(name):
    draft = LookupFirst(LookupProposer(), TinyBlockDraft(SIZE, device=DEVICE))
    decode(engine(TREES[name], draft), [[5, 6, 7, 8] * 4, *PROMPTS[1:]])


def test_what_a_block_cannot_give_is_refused():
    with pytest.raises(ValueError, match="num_steps must be at most 5, the tokens that a block"):
        engine(SpecConfig(6, 1, 7, CONTEXT, 5))
    for wide in (None, TinyDraft(device=DEVICE)):
        with pytest.raises(ValueError, match=r"ranks must be at most 61, the draft's vocabulary"):
            engine(SpecConfig(3, 1, 7, CONTEXT, 5, tree="best_first", ranks=62), wide)
    with pytest.raises(ValueError, match=r"topk must be at most 61, the draft's vocabulary"):
        engine(SpecConfig(1, 62, 63, CONTEXT, 5), TinyDraft(device=DEVICE))
    with pytest.raises(ValueError, match="tree='best_first' needs topk 1, got 2"):
        SpecConfig(3, 2, 7, tree="best_first")
    with pytest.raises(ValueError, match="draft_sampling must be False"):
        SpecConfig(3, 1, 7, tree="best_first", draft_sampling=True)
    with pytest.raises(ValueError, match=r"2\.\.7 with ranks 2 and num_steps 2, got 8"):
        SpecConfig(2, 1, 8, tree="best_first", ranks=2)
    with pytest.raises(ValueError, match="tree must be 'beam' or 'best_first'"):
        SpecConfig(tree="wide")


def test_one_launch_builds_the_tree_of_a_block(monkeypatch):
    """Of one draft forward: no more, however deep the tree is."""
    calls = {"forward": 0, "tree": 0}
    draft, forward = TinyBlockDraft(SIZE, device=DEVICE), TinyBlockDraft.forward_block

    def counted(*arguments, **named):
        calls["forward"] += 1
        return forward(*arguments, **named)

    def built(*arguments, **named):
        calls["tree"] += 1
        return best_first_tree(*arguments, **named)

    monkeypatch.setattr(TinyBlockDraft, "forward_block", counted)
    monkeypatch.setattr("specattn.speculative.step.step.best_first_tree", built)
    run = engine(TREES["best first"], draft, graphs=False)
    run.add([Request(PROMPTS[0], 30)])
    calls.update(forward=0, tree=0)
    run.step()
    assert calls == {"forward": 1, "tree": 1}


DRAWN = {
    "chain": SpecConfig(2, 1, 3, 16, 250),
    "rejection": SpecConfig(2, 1, 3, 16, 250, draft_sampling=True),
    "beams": SpecConfig(2, 2, 5, 16, 250),
    "best first": SpecConfig(2, 1, 6, 16, 250, tree="best_first", ranks=3),
}


@pytest.fixture(scope="module")
def target() -> TinyTarget:
    return three_tokens.make_models()[0]


@pytest.fixture(scope="module")
def wanted(target) -> Distribution:
    return three_tokens.distribution(target, PROMPT)


@pytest.mark.parametrize("name", DRAWN)
def test_three_tokens_have_the_targets_joint_distribution(target, wanted, name):
    assert p_value(target, DRAWN[name], wanted) > 1e-3


def test_places_of_a_block_are_drawn_apart():
    """Each by a coin of its own: what one place holds says nothing about another."""
    config, count = SpecConfig(4, 1, 5, 16, 100, draft_sampling=True), 100
    run = engine(config, TinyBlockDraft(SIZE, device=DEVICE, sharp=0.1), buckets=[count])
    # of one token that is kept, so that all requests have the same distributions
    drawn = [SamplingParams(2.0, top_k=1, seed=at) for at in range(count)]
    run.add([Request(PROMPT, 9, params) for params in drawn])
    rows = [one.row for one in run.running]
    run.table.reserve(rows, [16] * count)
    with torch.no_grad():
        step = run.decoder(config).phases(rows)
        step.begin()
        places = step.draft().tokens[:, 1:].T
    assert all(len(place.unique()) > 20 for place in places)
    apart = torch.corrcoef(places.double()) - torch.eye(4, device=DEVICE)
    assert apart.abs().max() < 0.5, "five times the deviation of so many draws"


def test_a_biased_sampler_fails_the_same_test(target, wanted, monkeypatch):
    monkeypatch.setattr(verify, "FINAL", verify.ACCEPT)
    assert p_value(target, DRAWN["best first"], wanted) < 1e-6


def test_a_distribution_that_is_not_the_one_drawn_from_fails_the_same_test(
    target, wanted, monkeypatch
):
    """A drawn chain is verified by the block's own distributions."""
    honest = draft.draw_tokens

    def drawn(probs, coins):
        return honest(probs.roll(1, 1), coins)

    monkeypatch.setattr(draft, "draw_tokens", drawn)
    assert p_value(target, DRAWN["rejection"], wanted, draws=1000) < 1e-6
