"""How requests draw, and what changes or forbids logits."""

from __future__ import annotations

from specattn.speculative.sampling.params import SamplingBatch as SamplingBatch
from specattn.speculative.sampling.params import SamplingParams as SamplingParams
