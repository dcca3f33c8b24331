"""The target's law of three tokens, from the dense model alone, and how far counts are from it.

The target keeps its three most probable tokens, so that three tokens have 27 outcomes.
"""

from __future__ import annotations

import torch
from scipy.stats import chi2

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.speculative import verify
from specattn.speculative.sampling import SamplingParams
from tests.tiny import DenseAttend, TinyDraft, TinyTarget

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPT = [3, 14, 15, 9]
TOP_K, TEMPERATURE = 3, 1.5
# four full batches of `SETTINGS`; what must fail does so with half as many
DRAWS, FEWER = 1000, 500
SETTINGS = {
    "plain": SpecConfig(0, 1, 1, 32, 250),
    "chain": SpecConfig(2, 1, 3, 32, 250),
    "tree": SpecConfig(2, 3, 7, 32, 250),
    "rejection": SpecConfig(2, 1, 3, 32, 250, draft_sampling=True),
}

Law = dict[tuple[int, ...], float]


def make_models() -> tuple[TinyTarget, TinyDraft]:
    """A draft that is surer than the target, and so refused at times."""
    return TinyTarget(device=DEVICE, sharp=1.0), TinyDraft(device=DEVICE, sharp=6.0)


def joint_law(target: TinyTarget, prompt: list[int]) -> Law:
    """The probability of every three tokens after a prompt."""
    paths: Law = {(): 1.0}
    for _ in range(3):
        longer: Law = {}
        for path, mass in paths.items():
            probs = dense_probs(target, [*prompt, *path])
            longer |= {(*path, t): mass * p for t, p in enumerate(probs) if p > 0}
        paths = longer
    assert len(paths) == 27
    return paths


def dense_probs(target: TinyTarget, tokens: list[int]) -> list[float]:
    ids = torch.tensor(tokens, device=target.device)
    positions = torch.arange(len(tokens), device=target.device)
    logits = target(ids, positions, DenseAttend(target.layers)).logits[-1:].double()
    kept = logits.topk(TOP_K)
    weights = torch.softmax(kept.values / TEMPERATURE, -1)
    return torch.zeros_like(logits).scatter(1, kept.indices, weights)[0].tolist()


def p_value_of(run: Engine, law: Law, draws: int = DRAWS) -> float:
    """Draw three tokens after the prompt, again and again, and hold them against the law."""
    drawn = [SamplingParams(TEMPERATURE, TOP_K, seed=1000 + i) for i in range(draws)]
    results = run.generate([Request(PROMPT, 3, params) for params in drawn])
    return p_value(law, [tuple(result.tokens) for result in results])


def p_value(law: Law, drawn: list[tuple[int, ...]]) -> float:
    """Pearson's test of what was drawn against the law."""
    counts = dict.fromkeys(law, 0)
    for path in drawn:
        assert path in counts, "a token of probability 0 was emitted"
        counts[path] += 1
    expected = {path: len(drawn) * p for path, p in law.items()}
    statistic = sum((counts[path] - want) ** 2 / want for path, want in expected.items())
    return float(chi2.sf(statistic, len(law) - 1))


def accept_every_draft(monkeypatch) -> None:
    """Spoil the coins: every draft is kept that the target could have drawn."""
    honest = verify.path_coins

    def lenient(*args):
        coins = honest(*args)
        coins[verify.ACCEPT] = 0
        return coins

    monkeypatch.setattr(verify, "path_coins", lenient)
