"""R83: vllm#53051.

A prompt of as many tokens as a step verifies was taken for a step: its states were not written, and
everything after it was decoded from none.

A prompt is a prompt, whatever its length: those around the size of a tree, alone and in a batch of
them, leave states that the first step goes on from.
"""

from __future__ import annotations

import pytest

from specattn import Engine, Request, SpecConfig
from specattn.models import FusedTarget, HFTarget
from tests.hybrids import Guesses, generated, hybrid

NEW = 8


@pytest.mark.parametrize("tree", [(2, 1, 3), (3, 3, 9)], ids=str)
def test_prompts_around_the_size_of_a_tree(tree) -> None:
    model, size = hybrid(), tree[2]
    prompts = [[7 + at for at in range(length)] for length in (1, size - 1, size, size, size + 1)]
    texts = generated(model, prompts, NEW)
    target = FusedTarget.from_target(HFTarget.from_model(model))
    known = [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)]
    config = SpecConfig(*tree, 64, 4)
    run = Engine(target, Guesses(known), config, backend="torch_native", graphs=False)
    for prompt, text in zip(prompts, texts, strict=True):
        (result,) = run.generate([Request(prompt, NEW)])
        assert result.tokens == text
    # requests of one size, as many tokens together as so many trees
    assert [one.tokens for one in run.generate([Request(prompts[2], NEW)] * 3)] == [texts[2]] * 3
