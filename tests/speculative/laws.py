"""The target's law of three tokens, from the dense model alone, and how far counts are from it.

The target keeps its three most probable tokens, so that three tokens have 27 outcomes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from scipy.stats import chi2

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.speculative import verify
from specattn.speculative.sampling import SamplingParams
from tests.processors import Law, dense_logits
from tests.processors import joint_law as law_of
from tests.tiny import TinyDraft, TinyTarget

if TYPE_CHECKING:
    from collections.abc import Iterable

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


def joint_law(target: TinyTarget, prompt: list[int]) -> Law:
    """The probability of every three tokens after a prompt."""
    paths = law_of(lambda output: dense_logits(target, [*prompt, *output]), DRAWN)
    assert len(paths) == 27
    return paths


def requests(prompt=PROMPT, params=DRAWN, draws=DRAWS, **options) -> list[Request]:
    """Ask for three tokens after a prompt, again and again."""
    seeded = (replace(params, seed=1000 + at) for at in range(draws))
    return [Request(prompt, 3, one, **options) for one in seeded]


def p_value_of(run: Engine, law: Law, *args, **options) -> float:
    """Hold what an engine draws for `requests` against a law."""
    results = run.generate(requests(*args, **options))
    return p_value(law, [tuple(result.tokens) for result in results])


def p_value(law: Law, drawn: Iterable[tuple[int, ...]]) -> float:
    """Pearson's test of what was drawn; 0 if a token came that the law does not have."""
    counts = Counter(drawn)
    if not counts.keys() <= law.keys():
        return 0.0
    expected = {path: counts.total() * p for path, p in law.items()}
    # rare outcomes are one
    rare = {path for path, want in expected.items() if want < 5}
    pairs = [(counts[path], want) for path, want in expected.items() if path not in rare]
    if rare:
        pairs.append((sum(counts[path] for path in rare), sum(expected[path] for path in rare)))
    assert len(pairs) > 3
    return float(chi2.sf(sum((n - want) ** 2 / want for n, want in pairs), len(pairs) - 1))


def accept_every_draft(monkeypatch) -> None:
    """Spoil the coins: every draft is kept that the target could have drawn."""
    honest = verify.path_coins

    def lenient(*args):
        coins = honest(*args)
        coins[verify.ACCEPT] = 0
        return coins

    monkeypatch.setattr(verify, "path_coins", lenient)
