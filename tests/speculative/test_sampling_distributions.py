"""R19 (sglang#7207): what is emitted has the target's distribution, jointly over tokens and steps.

A toy target gives every prefix probabilities of its own, with impossible tokens among them.
Speculation runs until three tokens are out, for 10^5 requests that differ only in their seeds, and
the counts of all sequences are held against the exact product of the conditional probabilities.
"""

from __future__ import annotations

import pytest
import torch

from specattn.kernels.sampling import ACCEPT, DRAFT, FINAL, draw_tokens, uniform
from specattn.kernels.tree import accept_rejection, accept_sampled
from specattn.trees import links_from_parents
from tests.distributions import pearson
from tests.implementations import using
from tests.kernels.tree_oracle import DEVICE, linked_tree, poisoned_path

VOCAB, LENGTH, REQUESTS, CHUNK = 4, 3, 100_000, 5_000
KINDS = ["naive", pytest.param("triton", marks=pytest.mark.gpu)]
# parents of the nodes, and what to add to the prefix's number to get their tokens
TREES = {
    "chain": ([-1, 0, 1], [0, 1, 2]),
    "tree": ([-1, 0, 0, 1, 1, 2], [0, 1, 0, 3, 2, 2]),
    "deep_and_wide": ([-1, 0, 0, 0, 2, 4], [0, 3, 1, 2, 0, 1]),
    "repeated_siblings": ([-1, 0, 0, 0, 2, 2], [0, 1, 1, 3, 2, 2]),
}


class Model:
    """What follows every prefix of up to five tokens; they are numbered, longer after shorter."""

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        count = sum(VOCAB**t for t in range(LENGTH + 3))
        weights = torch.rand(count, VOCAB, generator=generator) ** 2
        weights *= torch.rand(count, VOCAB, generator=generator) > 0.25
        weights[:, 0] += 0.05
        self.probs = (weights / weights.sum(1, keepdim=True)).to(DEVICE)

    def of(self, prefix):
        # prefixes longer than the test looks at stay in the table
        return self.probs[prefix.clamp(max=len(self.probs) - 1)]

    def sequences(self):
        """Probability of every sequence of LENGTH tokens, in the order of their numbers."""
        joint, first = torch.ones(1, dtype=torch.float64, device=DEVICE), 0
        for t in range(LENGTH):
            after = self.probs[first : first + VOCAB**t].double()
            joint = (joint[:, None] * after).flatten()
            first += VOCAB**t
        return joint


def extend(prefix, token):
    """Number of the prefix one token longer: the root is 0, its children 1..V."""
    return prefix * VOCAB + 1 + token


def speculate(step, model, seeds):
    """Step until every request has LENGTH tokens; return the numbers of their sequences."""
    count = torch.zeros_like(seeds)
    prefix = torch.zeros_like(seeds)
    for _ in range(LENGTH):
        tokens, lens = step(model, prefix, seeds, count[:, None])
        for i in range(tokens.shape[1]):
            taken = (i < lens) & (count < LENGTH)
            prefix = torch.where(taken, extend(prefix, tokens[:, i]), prefix)
            count = count + taken.long()
    return prefix - sum(VOCAB**t for t in range(LENGTH))


def p_value(step, model, requests=REQUESTS):
    """Pearson's test of what is emitted against the product."""
    wanted = model.sequences()
    seeds = torch.arange(requests, device=DEVICE)
    found = [speculate(step, model, chunk) for chunk in seeds.split(CHUNK)]
    counts = torch.bincount(torch.cat(found), minlength=len(wanted))
    return pearson(counts.tolist(), wanted.tolist())


def tree_step(kind, name, *, one_coin=False):
    parents, offsets = TREES[name]
    links = links_from_parents(torch.tensor(parents, device=DEVICE))
    links = [link.expand(CHUNK, -1).contiguous() for link in links]
    steps = 3 if name == "deep_and_wide" else 2

    def step(model, prefix, seeds, position):
        nodes, tokens = [prefix], [torch.zeros_like(prefix)]
        for parent, offset in zip(parents[1:], offsets[1:], strict=True):
            tokens.append((prefix + offset) % VOCAB)
            nodes.append(extend(nodes[parent], tokens[-1]))
        positions = position + torch.arange(steps + 1, device=DEVICE)
        coins = uniform(seeds, positions, ACCEPT)
        final = coins if one_coin else uniform(seeds, positions, FINAL)
        out = poisoned_path(len(prefix), steps)
        with using(kind):
            accept_sampled(
                linked_tree(torch.stack(tokens, 1), *links),
                model.of(torch.stack(nodes, 1)),
                coins,
                final,
                out=out,
            )
        return out.accept_tokens, out.accept_lens

    return step


def rejection_step(kind, drafter, *, steps=2, one_coin=False, claimed=None):
    def step(model, prefix, seeds, position):
        positions = position + torch.arange(steps + 1, device=DEVICE)
        dice = uniform(seeds, positions, DRAFT)
        nodes, tokens = [prefix], [torch.zeros_like(prefix)]
        for depth in range(steps):
            tokens.append(draw_tokens(drafter.of(nodes[-1]), dice[:, depth].contiguous()))
            nodes.append(extend(nodes[-1], tokens[-1]))
        nodes = torch.stack(nodes, 1)
        coins = uniform(seeds, positions, ACCEPT)
        final = coins if one_coin else uniform(seeds, positions, FINAL)
        out = poisoned_path(len(prefix), steps)
        tokens = torch.stack(tokens, 1)
        drawn_from = (claimed or drafter).of(nodes[:, :steps])
        chain = linked_tree(tokens, tokens, tokens, drawn_from)
        with using(kind):
            accept_rejection(chain, model.of(nodes), coins, final, out=out)
        return out.accept_tokens, out.accept_lens

    return step


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("kind", KINDS)
def test_tree_sampling_follows_the_target(kind, name):
    assert p_value(tree_step(kind, name), Model(1)) > 1e-3


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_rejection_sampling_follows_the_target(kind, steps):
    assert p_value(rejection_step(kind, Model(2), steps=steps), Model(1)) > 1e-3


def test_a_perfect_drafter_is_never_refused():
    model = Model(1)
    step = rejection_step("naive", model)
    zeros = torch.zeros(CHUNK, dtype=torch.int64, device=DEVICE)
    _, lens = step(model, zeros, torch.arange(CHUNK, device=DEVICE), zeros[:, None])
    assert (lens == 3).all()


BIASED = {
    "one coin for both, tree": lambda: tree_step("naive", "tree", one_coin=True),
    "one coin for both, chain": lambda: tree_step("naive", "chain", one_coin=True),
    "one coin for both, rejection": lambda: rejection_step("naive", Model(2), one_coin=True),
    "another drafter's probabilities": lambda: rejection_step("naive", Model(2), claimed=Model(3)),
}


@pytest.mark.parametrize("name", BIASED)
def test_the_test_notices_bias(name):
    """The control: samplers that are nearly right fail by a wide margin."""
    assert p_value(BIASED[name](), Model(1), REQUESTS // 2) < 1e-9
