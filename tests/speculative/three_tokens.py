"""The target's distribution of three tokens, from the dense model alone, and engines that draw.

The target keeps its three most probable tokens, so that three tokens have 27 outcomes.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.speculative.sampling.params import SamplingParams
from specattn.speculative.step import verify
from tests import processors
from tests.distributions import Distribution, p_value
from tests.tiny import TinyDraft, TinyTarget

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPT = [3, 14, 15, 9]
TOP_K, TEMPERATURE = 3, 1.5
DRAWN = SamplingParams(TEMPERATURE, TOP_K)
# two full batches of `SETTINGS`, with which what must fail does so
DRAWS = 500
SETTINGS = {
    "plain": SpecConfig(0, 1, 1, 32, 250),
    "chain": SpecConfig(2, 1, 3, 32, 250),
    "tree": SpecConfig(2, 3, 7, 32, 250),
    "rejection": SpecConfig(2, 1, 3, 32, 250, draft_sampling=True),
}


def make_models() -> tuple[TinyTarget, TinyDraft]:
    """A draft that is surer than the target, and so refused at times."""
    return TinyTarget(device=DEVICE, sharp=1.0), TinyDraft(device=DEVICE, sharp=6.0)


def distribution(target: TinyTarget, prompt: list[int]) -> Distribution:
    """The probability of every three tokens after a prompt."""

    def logits(output: list[int]) -> list[float]:
        return processors.dense_logits(target, [*prompt, *output])

    texts = processors.three_tokens(logits, DRAWN)
    assert len(texts) == 27
    return texts


def requests(prompt=PROMPT, params=DRAWN, draws=DRAWS, **options) -> list[Request]:
    """Ask for three tokens after a prompt, again and again."""
    seeded = (replace(params, seed=1000 + at) for at in range(draws))
    return [Request(prompt, 3, one, **options) for one in seeded]


def drawn_p_value(
    run: Engine, wanted: Distribution, *args, least_gains: int = 0, **options
) -> float:
    """Hold what an engine draws for `requests` against a distribution."""
    results = run.generate(requests(*args, **options))
    gains = sum(n > 1 for result in results for n in result.accept_lens)
    assert gains >= least_gains, "hardly anything was accepted"
    return p_value([tuple(result.tokens) for result in results], wanted)


def accept_every_draft(monkeypatch) -> None:
    """Spoil the coins: every draft is kept that the target could have drawn."""
    honest = verify.path_coins

    def lenient(*args):
        coins = honest(*args)
        coins[verify.ACCEPT] = 0
        return coins

    monkeypatch.setattr(verify, "path_coins", lenient)
