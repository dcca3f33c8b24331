"""A proposer that knows how texts go on, so that accepted runs are as long as trees are deep."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specattn.speculative.proposers.host import HostProposer, HostTree

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Known(HostProposer):
    """Proposes, as a chain, what follows in one of several texts, whether or not it may end there.

    Several may begin as a request's own does: the first of them counts. Behind its last token it
    proposes nothing.
    """

    def __init__(self, texts: Iterable[Sequence[int]]) -> None:
        # prompts are part of them
        self.texts = [list(text) for text in texts]

    def draft(self, requests, config):
        return [HostTree(self.following(list(one.tokens), config.num_steps)) for one in requests]

    def following(self, tokens: list[int], count: int) -> list[int]:
        at = len(tokens)
        found = (text[at : at + count] for text in self.texts if text[:at] == tokens)
        return next(found, [])
