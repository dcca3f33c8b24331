"""R84: sglang#35150.

Every draft was rejected, and still the text of a hybrid model left that of plain decoding: what a
step committed was not the state that one token at a time leaves, and the difference grew.

The commit runs the recurrence over what was accepted, one token at a time, as plain decoding does:
after steps that reject all drafts, states and windows are those of plain decoding, after the last
step as after the first ones. Only products of more rows may round another way.
"""

from __future__ import annotations

import pytest

from specattn import Engine, Request, SpecConfig
from specattn.models import FusedTarget, HFTarget
from specattn.speculative.proposers.host import HostTree
from tests.hybrids import KINDS, VOCAB, Guesses, generated, hybrid
from tests.samples import half, on_cpu

PROMPTS = [[5, 17, 3, 99] * 3, [23, 8], [7, 7, 80, 12, 55]]
NEW = 40
CLOSE = 2e-6


class Wrong(Guesses):
    """No token is right: a chain of wrong ones, and as many wrong ones beside its first."""

    def tree(self, tokens, config):
        (text,) = (one for one in self.texts if one[: len(tokens)] == tokens)
        wrong = (text[len(tokens)] + 1) % VOCAB
        beside = config.num_draft_tokens - 1 - config.num_steps
        chain = range(-1, config.num_steps - 1)
        others = [(wrong + 1 + at) % (VOCAB - 2) for at in range(beside)]
        others = [one if one != text[len(tokens)] else VOCAB - 1 for one in others]
        return HostTree([wrong] * len(chain) + others, [*chain, *[-1] * beside])


def states(target, config, draft, texts):
    """Yield copies of all states, after the first steps and after the last."""
    run = Engine(target, draft, config, backend="torch_native", graphs=False)
    results = run.add([Request(prompt, NEW) for prompt in PROMPTS])
    for step in range(NEW - 2):
        run.step()
        if step in (2, NEW - 3):
            yield {name: part.clone() for name, part in run.target.by_row().items()}
    while run.num_running:
        run.step()
    assert [one.tokens for one in results] == texts
    assert {length for one in results for length in one.accept_lens} == {1}


@on_cpu(half, "kind", "tree")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tree", [(3, 1, 4), (3, 4, 7)], ids=str)
def test_states_are_those_of_plain_decoding(kind, tree) -> None:
    model = hybrid(kind)
    texts = generated(model, PROMPTS, NEW)
    target = FusedTarget.from_target(HFTarget.from_model(model))
    known = [[*prompt, *text, 0] for prompt, text in zip(PROMPTS, texts, strict=True)]
    plain, speculative = (
        list(states(target, config, draft, texts))
        for config, draft in (
            (SpecConfig(0, 1, 1, 96, 4), None),
            (SpecConfig(*tree, 96, 4), Wrong(known)),
        )
    )
    for one, other in zip(plain, speculative, strict=True):
        assert one.keys() == other.keys()
        for name, part in one.items():
            assert part.norm() > 0
            assert (other[name] - part).norm() < CLOSE * part.norm(), name
