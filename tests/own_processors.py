"""Logits processors of a user's own, and what each does to a text's logits in plain Python."""

from __future__ import annotations

import math

import torch

from specattn.speculative.sampling.logits_processor import LogitsProcessor, StateField


class LastPenalty(LogitsProcessor):
    """Subtracts a number from the newest token's logit."""

    name = "last"

    def state_fields(self):
        return {"penalty": StateField(1, torch.float32)}

    def admit(self, states, params, prompt):
        if not isinstance(params, float):
            raise ValueError(f"last must be a float, got {params!r}")
        states["penalty"].fill_(params)

    def process(self, logits, nodes, states):
        amount = -states["penalty"][:, None].expand(*logits.shape[:2], 1)
        return logits.scatter_add(2, nodes.last(1), amount)


class NoNgram(LogitsProcessor):
    """No sequence of ``size`` tokens twice."""

    def __init__(self, size: int = 2) -> None:
        self.size, self.name = size, f"no {size}-gram"

    def process(self, logits, nodes, states):
        return logits.masked_fill(nodes.followers(self.size - 1), -torch.inf)


class Budget(LogitsProcessor):
    """A token may be emitted so many times: what was emitted is noted, the path is seen."""

    name = "budget"

    def state_fields(self):
        return dict.fromkeys(("token", "left"), StateField(1, torch.int64))

    def admit(self, states, params, prompt):
        states["token"].fill_(params[0])
        states["left"].fill_(params[1])

    def process(self, logits, nodes, states):
        below = nodes.path & (nodes.tokens == states["token"])[:, None]
        below[..., 0] = False
        out = below.sum(2) >= states["left"]  # [B, n]
        token = states["token"][:, None].expand(*out.shape, 1)
        kept = torch.where(out[..., None], -torch.inf, logits.gather(2, token))
        return logits.scatter(2, token, kept)

    def note(self, states, tokens, lens):
        place = torch.arange(tokens.shape[1], device=tokens.device)
        found = (tokens == states["token"]) & (place < lens[:, None])
        return {"left": states["left"] - found.sum(1, keepdim=True)}


class ForgetsThePath(LogitsProcessor):
    """Every node's newest token is taken to be node 0: `LastPenalty` as it must not be."""

    name, state_fields, admit = "last", LastPenalty.state_fields, LastPenalty.admit

    def process(self, logits, nodes, states):
        amount = -states["penalty"][:, None].expand(*logits.shape[:2], 1)
        return logits.scatter_add(2, nodes.last(1)[:, :1].expand_as(amount), amount)


def own() -> list[LogitsProcessor]:
    return [LastPenalty(), NoNgram(2), NoNgram(3), Budget()]


def processed(scores, prompt, output, asked):
    """The logits after the processors that ``asked`` names, in the order of `own`."""
    text, scores = [*prompt, *output], list(scores)
    if "last" in asked:
        scores[text[-1]] -= asked["last"]
    for size in (2, 3):
        if f"no {size}-gram" in asked and len(text) >= size:
            for at in range(len(text) - size + 1):
                *before, last = text[at : at + size]
                if before == text[-size + 1 :]:
                    scores[last] = -math.inf
    if "budget" in asked:
        token, most = asked["budget"]
        if output.count(token) >= most:
            scores[token] = -math.inf
    return scores
