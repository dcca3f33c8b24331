"""Engines with a block draft, and greedy decoding whose tokens must be plain decoding's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specattn.engine.engine import Engine, Request
from tests.books import check_books
from tests.speculative import three_tokens
from tests.tiny import TinyBlockDraft, TinyTarget, dense_greedy
from tests.worlds import DEVICE

if TYPE_CHECKING:
    from specattn.config import SpecConfig
    from tests.distributions import Distribution

SIZE = 6
PROMPTS = [[3, 14, 15, 9, 26, 5], [35, 2], [8, 9, 7, 9], [17], [4, 4, 4, 4, 4, 4, 4, 1]]


def engine(config: SpecConfig, draft=None, target=None, **options) -> Engine:
    options = {"buckets": [config.max_num_reqs]} | options
    target = target or TinyTarget(device=DEVICE)
    return Engine(target, draft or TinyBlockDraft(SIZE, device=DEVICE), config, **options)


def p_value(target: TinyTarget, config: SpecConfig, wanted: Distribution, **options) -> float:
    """Hold three drawn tokens against the target's joint distribution."""
    run = engine(config, TinyBlockDraft(3, device=target.device), target, buckets=[250])
    return three_tokens.drawn_p_value(run, wanted, **options)


def poison(run: Engine) -> None:
    """Leave NaN in every slot but that of padding."""
    for pool in (run.target.pool, *((run.draft.pool,) if run.draft else ())):
        for data in (*pool.k, *pool.v):
            data[1:].fill_(torch.nan)


def decode(run: Engine, prompts=PROMPTS, count=25) -> list[int]:
    """Decode greedily; return what the steps gained."""
    poison(run)
    results = run.generate([Request(prompt, count) for prompt in prompts])
    for result, prompt in zip(results, prompts, strict=True):
        assert result.tokens == dense_greedy(run.target.model, prompt, count)
    check_books(run.table)
    return [length for result in results for length in result.accept_lens]
