"""R81: vllm#52942, vllm#39273.

Where a proposer found nothing for a step, the step read the state from before the drafts that the
last one had accepted: texts of prompt lookup over hybrid models lost tokens and fell into loops.

The commit leaves the state where every next step finds it, whether that one has drafts or not: a
step with none, of another config, or of plain decoding goes on from what was accepted.
"""

from __future__ import annotations

import pytest

from specattn import Engine, Request, SpecConfig
from specattn.models import FusedTarget, HFTarget
from specattn.speculative.proposers.host import HostTree
from specattn.speculative.proposers.lookup import LookupProposer
from tests.hybrids import Guesses, generated, hybrid

PROMPTS = [[5, 17, 3, 99] * 3, [23, 8], [7, 7, 80, 12, 55]]
NEW = 24


class Sometimes(Guesses):
    """All right in one step, and nothing in the next."""

    def tree(self, tokens, config):
        text = next((one for one in self.texts if one[: len(tokens)] == tokens), [])
        right = text[len(tokens) : len(tokens) + config.num_steps]
        self.turn = not getattr(self, "turn", False)
        return HostTree(right if self.turn else [])


@pytest.fixture(scope="module")
def world():
    model = hybrid()
    texts = generated(model, PROMPTS, NEW)
    return FusedTarget.from_target(HFTarget.from_model(model)), texts


@pytest.mark.parametrize("tree", [(4, 1, 5), (4, 3, 9)], ids=str)
def test_a_step_without_drafts_follows_one_with_many(world, tree) -> None:
    target, texts = world
    known = [[*prompt, *text] for prompt, text in zip(PROMPTS, texts, strict=True)]
    for draft in (Sometimes(known), LookupProposer(1, 3)):
        run = Engine(target, draft, SpecConfig(*tree, 64, 4), backend="torch_native", graphs=False)
        for prompt, text in zip(PROMPTS, texts, strict=True):
            (result,) = run.generate([Request(prompt, NEW)])
            assert result.tokens == text
        if isinstance(draft, Sometimes):
            assert {1, 5} <= set(result.accept_lens)


def test_a_step_of_another_config_follows(world) -> None:
    """Near its context's end a request decodes plainly."""
    target, texts = world
    known = [[*prompt, *text] for prompt, text in zip(PROMPTS, texts, strict=True)]
    config = SpecConfig(4, 3, 9, len(PROMPTS[0]) + NEW, 4)
    run = Engine(target, Guesses(known), config, backend="torch_native", graphs=False)
    (result,) = run.generate([Request(PROMPTS[0], NEW)])
    assert result.tokens == texts[0][: len(result.tokens)]
    assert len(result.tokens) == NEW
