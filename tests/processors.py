"""Logits processors, token by token in Python's float64; and texts decoded by them."""

from __future__ import annotations

import math

import torch

from specattn.speculative.sampling.params import SamplingParams
from tests.distributions import Distribution, joint
from tests.tiny import DenseAttend, known

#: Each processor alone, and three together.
GREEDY = {
    "repetition": SamplingParams(repetition_penalty=1.7),
    "presence": SamplingParams(presence_penalty=1.9),
    "frequency": SamplingParams(frequency_penalty=0.9),
    "bias": SamplingParams(logit_bias={7: 4.0, 9: -3.0, 11: 3.0}),
    "bad words": SamplingParams(bad_words=[[17, 45, 14], [4, 17, 45, 22], [54], [9, 54]]),
    "allowed": SamplingParams(allowed_tokens=range(0, 61, 3)),
    "three": SamplingParams(
        repetition_penalty=1.3, frequency_penalty=0.4, logit_bias={5: 2.0, 6: 1.0}
    ),
}


def processed(
    logits: list[float],
    prompt: list[int],
    output: list[int],
    params: SamplingParams,
    *,
    min_new_tokens: int = 0,
    ends: tuple[int, ...] = (),
) -> list[float]:
    """The logits after every processor, in the documented order."""
    bias = dict(params.logit_bias)
    scores = [x + bias.get(t, 0.0) for t, x in enumerate(logits)]
    text = [*prompt, *output]
    for token in set(text):
        score, penalty = scores[token], params.repetition_penalty
        scores[token] = score / penalty if score > 0 else score * penalty
    for token in set(output):
        scores[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    for *before, last in params.bad_words:
        if not before or text[-len(before) :] == list(before):
            scores[last] = -math.inf
    if params.allowed_tokens is not None:
        scores = [x if t in params.allowed_tokens else -math.inf for t, x in enumerate(scores)]
    if len(output) < min_new_tokens:
        scores = [-math.inf if t in ends else x for t, x in enumerate(scores)]
    return scores


def dense_logits(target, tokens: list[int]) -> list[float]:
    """A tiny model's logits after a text, without a cache; those of a text are computed once."""
    texts, text = known(target, dense_logits), tuple(tokens)
    if text not in texts:
        ids = torch.tensor(tokens, device=target.device)
        positions = torch.arange(len(tokens), device=target.device)
        logits = target(ids, positions, DenseAttend(target.layers)).logits[-1]
        texts[text] = logits.double().tolist()
    return texts[text]


def greedy_text(target, prompt: list[int], count: int, params: SamplingParams, **ends) -> list[int]:
    """What plain greedy decoding writes under processors."""
    output: list[int] = []
    for _ in range(count):
        logits = dense_logits(target, [*prompt, *output])
        scores = processed(logits, prompt, output, params, **ends)
        output.append(scores.index(max(scores)))
    return output


def no_path(words, nodes: int):
    """Replaces what finds the nodes' paths, in controls."""
    return torch.zeros(*words.shape[:2], nodes, dtype=torch.bool)


def drawn_from(scores: list[float], params: SamplingParams) -> list[float]:
    """The distribution of a token: temperature, then top-k, then top-p, then min-p."""
    best = max(scores)
    weights = {t: math.exp((x - best) / params.temperature) for t, x in enumerate(scores)}
    ranked = sorted(weights, key=lambda t: (-weights[t], t))[: params.top_k or None]
    total, before, kept = math.fsum(weights[t] for t in ranked), 0.0, set()
    for token in ranked:
        weight = weights[token]
        if weight > 0 and before < params.top_p * total and weight >= params.min_p:
            kept.add(token)
        before += weight
    total = math.fsum(weights[t] for t in kept)
    return [weights[t] / total if t in kept else 0.0 for t in range(len(scores))]


def three_tokens(next_logits, params: SamplingParams) -> Distribution:
    """The probability of every three tokens; ``next_logits`` maps a text's output to logits."""
    return joint(lambda output: dict(enumerate(drawn_from(next_logits(output), params))))
