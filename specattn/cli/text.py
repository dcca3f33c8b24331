"""Texts of a batch, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specattn.engine.detokenizer import TextStream


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of tokens, special tokens left out."""
    text: str = tokenizer.decode(
        list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return text


class OrderedText:
    """The texts of a batch, in the order of its prompts, as early as that order allows.

    Parameters
    ----------
    streams : sequence of TextStream
        One per request.
    """

    def __init__(self, streams: Sequence[TextStream]) -> None:
        self.streams = streams
        self._ready = [""] * len(streams)
        self._done = [False] * len(streams)
        self._at = 0

    def feed(self, index: int, tokens: Sequence[int], *, last: bool) -> list[tuple[int, str]]:
        """Take a request's new tokens; return what can be shown now, as (request, text)."""
        stream = self.streams[index]
        self._ready[index] += stream.feed(tokens)
        if last:
            self._ready[index] += stream.finish()
            self._done[index] = True
        return self._show()

    def finish(self) -> list[tuple[int, str]]:
        """Return everything not shown yet."""
        for index, stream in enumerate(self.streams):
            if not self._done[index]:
                self._ready[index] += stream.finish()
                self._done[index] = True
        return self._show()

    def _show(self) -> list[tuple[int, str]]:
        shown = []
        while self._at < len(self.streams):
            shown.append((self._at, self._ready[self._at]))
            self._ready[self._at] = ""
            if not self._done[self._at]:
                break
            self._at += 1
        return shown
