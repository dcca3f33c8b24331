"""R80: vllm#43559, vllm#43650, vllm#53912, vllm#47194.

A prefix of a hybrid model was found in the cache: keys and values came from it, and with them a
recurrent state of another length, of rejected drafts, or none. Texts went wrong from the first hit
on, and stayed so.

Requests of a model with layers that keep states share no prefix, and none gets keys and values
without its state: the same prompt again after another one, prompts that begin alike, and those that
go on where a text with rejected drafts ended are written as from a cold start.
"""

from __future__ import annotations

import pytest

from specattn import Engine, Request, SpecConfig
from specattn.models import FusedTarget, HFTarget
from tests.hybrids import Guesses, generated, hybrid
from tests.samples import half, on_cpu

A, B = [5, 17, 3, 99, 42, 8, 61, 12, 7], [23, 88, 4, 31]
NEW = 14


@pytest.fixture(scope="module")
def model():
    return hybrid()


@pytest.fixture(scope="module")
def cold(model) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and the texts that transformers writes after them."""
    # the same again, beginnings of different lengths, and what follows a text
    first = generated(model, [A], NEW)[0]
    prompts = [A, B, A, A[:6], [*A[:6], 2], [*A, *first[:5]], [*A, *first[:5], 50], A]
    return prompts, generated(model, prompts, NEW)


@on_cpu(half, "shape", "page")
@pytest.mark.parametrize("shape", [(0, 1, 1), (3, 1, 4), (3, 3, 9)], ids=str)
@pytest.mark.parametrize("page", [1, 4])
def test_hits_are_cold_runs(model, cold, shape, page) -> None:
    prompts, texts = cold
    source = HFTarget.from_model(model)
    target = FusedTarget.from_target(source)
    known = [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)]
    config = SpecConfig(*shape, 64, 4, page_size=page)
    draft = Guesses(known) if shape[0] else None
    run = Engine(target, draft, config, backend="torch_native", graphs=False)
    alone = [run.generate([Request(prompt, NEW)])[0].tokens for prompt in prompts]
    # beside each other, while those that they might share run
    together = [one.tokens for one in run.generate([Request(prompt, NEW) for prompt in prompts])]
    source.restore()
    assert alone == texts
    assert together == texts
    assert run.metrics().shared_tokens == 0
