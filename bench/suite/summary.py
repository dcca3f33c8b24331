"""What a reader in a hurry wants to know: means and worst cells of the ratios to others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import tables

if TYPE_CHECKING:
    from .targets import Target

#: In words, the target's regime, and the section that has the cells.
LINES = (
    (
        "trees, against the fastest peer of each cell",
        "trees against the best peer, worst",
        "tree-verify",
    ),
    (
        "chains and decode, 64k tokens and more, against FlashAttention 3",
        "chains and decode against FA3, >= 64k tokens",
        "decode-and-chain-verify",
    ),
    (
        "drafts of 8 branches, against FlashInfer's decode",
        "draft decode, topk 8, against FlashInfer per branch",
        "draft-decode",
    ),
    (
        "prompts over a cached prefix, against FlashAttention 3",
        "prompts over a cached prefix against FA3",
        "draft-extend-and-prompts",
    ),
    (
        "latent attention, 16 heads, one node, against FlashInfer's",
        "MLA, 16 heads, 1 node, against FlashInfer (FA3)",
        "latent-attention-mla",
    ),
    (
        "metadata of a step, GPU time, against SGLang's operations",
        "metadata against SGLang's operations, GPU",
        "the-metadata-of-a-step",
    ),
    ("the same, host time", "metadata against SGLang's operations, host", "the-metadata-of-a-step"),
    (
        "EAGLE-3 at 8B, one request, forced to the acceptance that is published, against plain",
        "EAGLE-3 against plain decoding, batch 1, 8B",
        "whole-steps",
    ),
    (
        "its step, 4k tokens, 16 nodes, over the reading of its bytes (less is better)",
        "whole step over its bytes, 1 x 4k, 16 nodes, 8B",
        "whole-steps",
    ),
)


def table(found: list[Target]) -> str:
    """Return the headline ratios, mean and worst."""
    by_regime = {target.regime: target for target in found if target.points}
    rows = []
    for words, regime, section in LINES:
        if target := by_regime.get(regime):
            rows.append(
                [
                    f"[{words}](#{section})",
                    target.show(target.geomean),
                    target.show(target.worst.value),
                    str(len(target.points)),
                ]
            )
    return tables.table(["", "geomean", "worst", "cells"], rows)
