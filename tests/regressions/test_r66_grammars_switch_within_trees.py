"""R66: vllm#44297, local-inference-lab/vllm#476.

Whether a grammar holds was decided once per step, though a draft within the window switched it on;
the bonus node took "off" from drafts that were padding; and illegal drafts could still be accepted.

Every node has the mask of its own path: behind a marker that is a draft itself, beside one that is
a sibling, and at the bonus node behind fewer drafts than the tree has room for.
"""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
from torch import nn

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.speculative.proposers.host import HostTree
from specattn.speculative.sampling.params import SamplingParams
from tests.processors import dense_logits
from tests.regressions.known import Known
from tests.regressions.masks import leave
from tests.samples import half, on_cpu
from tests.tiny import TinyTarget, bigram
from tests.worlds import DEVICE

STEPS, NEW = 6, 14
PROMPT = [14, 15, 9]
# of a first run of six drafts: before it, first, in its midst, last, and the bonus
PLACES = [0, 1, 3, 6, 7]


class Target(TinyTarget):
    """Of another vocabulary."""

    def __init__(self, vocab: int) -> None:
        super().__init__(device=DEVICE)
        torch.manual_seed(1)
        self.vocab_size, self.embed = vocab, nn.Embedding(vocab, 64)
        self.head, self.table = nn.Linear(64, vocab, bias=False), 2 * bigram(vocab)
        self.to(DEVICE).requires_grad_(False)


class Marked:
    """All is allowed up to a marker, and behind it the last ten tokens alone."""

    def __init__(self, marker: int, vocab: int) -> None:
        self.marker, self.vocab, self.on = marker, vocab, False

    def fill(self, tokens, parents, bitmask) -> None:
        on = [self.on]
        for node, parent in enumerate(parents):
            if node:
                on.append(on[parent] or tokens[node] == self.marker)
            if on[node]:
                leave(bitmask[node], range(self.vocab - 10, self.vocab))

    def accept(self, tokens) -> None:
        for token in tokens:
            assert not self.on or token >= self.vocab - 10
            self.on |= token == self.marker


@cache
def target(vocab: int) -> Target:
    return Target(vocab)


@cache
def oracle(vocab: int) -> dict[int, tuple[list[int], list[int], list[int]]]:
    """A marker for each prompt, and its texts without the grammar, and with it."""
    found = {}
    for place in PLACES:
        # a prompt whose text has nothing twice before that place
        starts = (start for start in range(vocab) if start not in found)
        for start in starts:
            free = written(vocab, [start, *PROMPT], -1)
            wanted = written(vocab, [start, *PROMPT], free[place])
            if free.index(free[place]) == place and free != wanted:
                found[start] = free[place], free, wanted
                break
    assert len(found) == len(PLACES)
    return found


def written(vocab: int, prompt: list[int], marker: int) -> list[int]:
    """What plain greedy decoding writes."""
    text: list[int] = []
    for _ in range(NEW):
        scores = dense_logits(target(vocab), [*prompt, *text])
        first = vocab - 10 if marker in text else 0
        text.append(scores.index(max(scores[first:]), first))
    return text


class Short(Known):
    """Two drafts, whatever there is room for."""

    def following(self, tokens, count):
        return super().following(tokens, min(count, 2))


class Forked(Known):
    """Beside every draft lies the marker, and a token below it."""

    def __init__(self, texts, markers) -> None:
        super().__init__(texts)
        self.markers = markers

    def draft(self, requests, config):
        return [self.tree(list(one.tokens), config.num_steps) for one in requests]

    def tree(self, text: list[int], count: int) -> HostTree:
        tokens, parents, parent = [], [], -1
        for depth, token in enumerate(self.following(text, count)):
            at, below = len(tokens), depth + 1 < count
            marker = self.markers[text[0]]
            tokens += [marker, token, *[token] * below]
            parents += [parent, parent, *[at] * below]
            parent = at + 1
        return HostTree(tokens, parents)


def proposer(kind: str, vocab: int) -> Known:
    found = oracle(vocab)
    texts = [
        [start, *PROMPT, *(free if kind == "illegal" else wanted)]
        for start, (_, free, wanted) in found.items()
    ]
    if kind == "forked":
        return Forked(texts, {start: marker for start, (marker, *_) in found.items()})
    return (Short if kind == "short" else Known)(texts)


@on_cpu(half, "vocab", "kind")
@pytest.mark.parametrize("kind", ["legal", "illegal", "short", "forked"])
@pytest.mark.parametrize("vocab", [63, 64, 65])
def test_every_node_has_the_mask_of_its_path(vocab, kind):
    shape = (STEPS, 2, 20) if kind == "forked" else (STEPS, 1, STEPS + 1)
    run = Engine(target(vocab), proposer(kind, vocab), SpecConfig(*shape, 64, 10), buckets=[10])
    requests = [
        Request(
            [start, *PROMPT],
            NEW,
            SamplingParams(temperature, seed=start),
            grammar=partial(Marked, marker, vocab),
        )
        for temperature in (0.0, 1.0)
        for start, (marker, *_) in oracle(vocab).items()
    ]
    # the grammars look at drawn texts themselves
    outs = run.generate(requests)
    assert [out.tokens for out in outs[:5]] == [wanted for *_, wanted in oracle(vocab).values()]
    assert max(n for out in outs for n in out.accept_lens) == (3 if kind == "short" else STEPS + 1)
