"""Whose log-probabilities a request wants."""

from __future__ import annotations

#: Of the target's logits; of processed logits; of the probabilities that tokens were drawn from.
RAW, PROCESSED, DRAWN = 0, 1, 2

#: Alternatives of a token at the most.
MAX_LOGPROBS = 20
