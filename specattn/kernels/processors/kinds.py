"""What a request asks of its logits, as bits."""

from __future__ import annotations

# repetition, presence and frequency penalties
PENALTIES = 1
# numbers added to the logits of some tokens
BIAS = 2
# sequences that must not be completed
BAD_WORDS = 4
# the only tokens that are possible
ALLOWED = 8
# as ALLOWED, of every node, from a bitmask of the batch
BITMASK = 16
# tokens that are impossible before a position
ENDS = 32
