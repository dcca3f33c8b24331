"""What every step gains is what dense drafts would: texts do not show that drafts got worse."""

from __future__ import annotations

from functools import partial
from itertools import takewhile

import pytest
import torch

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.speculative.proposers.lookup import LookupFirst, LookupProposer
from specattn.speculative.proposers.standalone import LMDraft
from tests.kernels.lookup.test_lookup import brute_force
from tests.samples import half, on_cpu
from tests.speculative.test_draft_paths import dense_features
from tests.tiny import (
    VOCAB,
    DenseAttend,
    TinyBlockDraft,
    TinyDraft,
    TinyTarget,
    attentive,
    dense_greedy,
    turns,
)
from tests.worlds import DEVICE

LOOP = [7, 8, 9, 10, 11, 7, 8, 9, 10, 12, 7, 8, 9]
PROMPTS = [LOOP, [35], [3, 14, 15] * 5, [58, 9, 7, 9, 3]]
TREES = {"chain": (4, 1, 5), "tree": (3, 3, 9)}
KINDS = ("lookup", "eagle", "model", "block")
NEW = 24


def ints(values):
    return torch.tensor([*values], device=DEVICE)


def lm_probs(target, draft, text):
    """What a whole model says after a text and a path."""
    attend = DenseAttend(draft.layers)
    first = draft.model(ints(text), ints(range(len(text))), attend)
    kept = attend.kv

    def probs(path):
        out, attend.kv = first, [*kept]
        if path:
            places = ints(range(len(text), len(text) + len(path)))
            out = draft.model(ints(path), places, attend)
        return out.logits[-1].softmax(0)

    return probs


def eagle_probs(target, draft, text):
    """What a head says: over the target's features, then over its own states."""
    attend, last = DenseAttend(draft.layers), len(text) - 1
    features = draft.combine(dense_features(target, text[:-1]))
    first = draft(ints(text[1:]), features, ints(range(last)), attend)
    kept = attend.kv

    def probs(path):
        out, attend.kv = first, [*kept]
        for at, token in enumerate(path):
            out = draft(ints([token]), out.hidden_states[-1:], ints([last + at]), attend)
        return out.logits[-1].softmax(0)

    return probs


class DenseBlock(DenseAttend):
    """Attention of a block over its context; the first layer's tokens see all of it."""

    def __call__(self, layer, q, k, v):
        if layer:
            return super().__call__(layer, q, k, v)
        # causal attention of each token, as if it were the last one
        past, order = self.kv[0], torch.arange(len(q))
        found = []
        for at in order.tolist():
            turn = [*order[order != at].tolist(), at]
            self.kv[0] = list(past)
            found.append(super().__call__(0, q[turn], k[turn], v[turn])[-1])
        return torch.stack(found)


def block_probs(target, draft, text):
    """What a block says of a depth, whatever its path."""
    shape, last = draft.block, len(text) - 1
    states = draft.combine(dense_features(target, text[:-1]))
    attend, turned = DenseBlock(draft.layers), turns(ints(range(last)), 32, states.dtype)
    for layer, block in enumerate(draft.blocks):
        _, k, v = block.project(states, turned, skipped=block.config.num_qo_heads)
        attend.kv[layer] = [k.double(), v.double()]
    ids = [text[-1]] + [shape.mask_token_id] * (shape.size - 1)
    out = draft.forward_block(ints(ids), ints(range(last, last + shape.size)), attend)
    return lambda path: out[len(path) + shape.first_draft].softmax(0)


def beams(probs, tree):
    """The best candidates of every beam, then the best of all: EAGLE-2."""
    num_steps, topk, nodes = tree
    beam, found = [((), 1.0)], []
    for _ in range(num_steps):
        grown = []
        for path, score in beam:
            best = probs(path).topk(topk)
            pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
            grown += [((*path, token), score * prob) for prob, token in pairs]
        beam = sorted(grown, key=lambda one: -one[1])[:topk]
        found += grown
    return [path for path, _ in sorted(found, key=lambda one: -one[1])[: nodes - 1]]


def looked_up(tree, shortest, longest, text):
    """The paths of the text itself; none without a match."""
    num_steps, topk, nodes = tree
    settings = {"matches": topk, "min_ngram": shortest, "max_ngram": longest}
    tokens, parents, _ = brute_force(text, nodes, num_steps=num_steps, **settings)
    paths = {0: ()}
    for node in range(1, nodes):
        if parents[node] >= 0:
            paths[node] = (*paths[parents[node]], tokens[node])
    return [path for path in paths.values() if path]


def gains(prompt, wanted, propose):
    """What every step gains of a greedy text, by the paths that are proposed in it."""
    at, found = 1, []
    while at < len(wanted):
        kept = 0
        for path in propose([*prompt, *wanted[:at]]):
            pairs = zip(path, wanted[at:], strict=False)
            kept = max(kept, len([*takewhile(lambda pair: pair[0] == pair[1], pairs)]))
        found.append(min(kept + 1, len(wanted) - at))
        at += kept + 1
    return found


def model(kind):
    """A draft, and what gives its probabilities after a text."""
    if kind == "model":
        # like the target but for its output: a key or place that is wrong soon shows
        draft = attentive(DEVICE)
        draft.head.weight += 0.2 * draft.head.weight.flip(0)
        return LMDraft(draft, VOCAB), lm_probs
    if kind == "block":
        return TinyBlockDraft(device=DEVICE, noise=1.0), block_probs
    return TinyDraft(device=DEVICE), eagle_probs


def drafting(kind, tree, target):
    """A draft for an engine, and the paths that it has to propose after a text."""
    first, _, other = kind.partition(" before ")
    lookup = partial(looked_up, tree, 1, 4)
    if kind == "lookup":
        return LookupProposer(1, 4), lookup
    if other == "lookup":
        draft, behind = LookupProposer(1, 4), lookup
    else:
        draft, probs = model(other or first)
        behind = lambda text: beams(probs(target, draft, text), tree)  # noqa: E731
    if not other:
        return draft, behind
    front = partial(looked_up, tree, 2, 5)
    return LookupFirst(LookupProposer(2, 5), draft), lambda text: front(text) or behind(text)


@on_cpu(half, "kind", "tree")
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
@pytest.mark.parametrize("kind", [*KINDS, *(f"lookup before {other}" for other in KINDS)])
@torch.no_grad()
def test_every_step_gains_what_dense_drafts_do(kind, tree):
    attends = kind.endswith("model")
    target = attentive(DEVICE) if attends else TinyTarget(device=DEVICE, window=9)
    draft, propose = drafting(kind, tree, target)
    wanted = [dense_greedy(target, prompt, NEW) for prompt in PROMPTS]
    found = Engine(target, draft, SpecConfig(*tree, 128, 4)).generate(
        [Request(prompt, NEW) for prompt in PROMPTS]
    )
    assert [one.tokens for one in found] == wanted
    for prompt, text, one in zip(PROMPTS, wanted, found, strict=True):
        assert one.accept_lens == gains(prompt, text, propose)
    assert max(max(one.accept_lens) for one in found) > 2, "nothing was ever accepted"
