"""Tokens that end one request, and not the others of its engine."""

from __future__ import annotations

import pytest

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from tests.tiny import TinyDraft, TinyTarget, dense_greedy
from tests.worlds import DEVICE

PROMPT, NEW = [3, 1, 4, 1, 5], 20


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_stop_token_ends_its_own_request(ignore_eos):
    target = TinyTarget(device=DEVICE)
    engine = Engine(target, TinyDraft(device=DEVICE), SpecConfig(3, 2, 6, 64, 2))
    text = dense_greedy(target, PROMPT, NEW)
    stop = text[7]
    stopped, free = engine.generate(
        [
            Request(PROMPT, NEW, ignore_eos=ignore_eos, stop_token_ids=[stop]),
            Request(PROMPT, NEW, ignore_eos=ignore_eos),
        ]
    )
    assert stopped.tokens == text[: text.index(stop) + 1]
    assert stopped.finish_reason == "eos"
    assert free.tokens == text


def test_stop_tokens_are_whole_numbers():
    assert Request(PROMPT, stop_token_ids=[5, 5]).stop_token_ids == {5}
    with pytest.raises(ValueError, match="every stop token"):
        Request(PROMPT, stop_token_ids=[1.5])
