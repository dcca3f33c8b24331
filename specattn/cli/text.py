"""From tokens to text as they arrive: whole characters only, and nothing past a stop string."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specattn.spec.request import TEXT_CONTEXT

if TYPE_CHECKING:
    from collections.abc import Sequence

# what tokenizers put where bytes do not, or do not yet, make a character
_REPLACEMENT = "\ufffd"


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of tokens, special tokens left out."""
    text: str = tokenizer.decode(
        list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return text


class TextStream:
    """The text of one request, piece by piece; the pieces together are its text.

    Characters whose last bytes are in tokens to come are held back, and so is what may turn out
    to be the beginning of a stop string.

    Parameters
    ----------
    tokenizer : object
        A transformers tokenizer.
    prompt : sequence of int
        The tokens that are continued.
    stop : sequence of str
        The text ends before the first of them.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._context = list(prompt[-TEXT_CONTEXT:])
        self._pending: list[int] = []
        self._taken = 0
        self._held = ""
        self.text = ""
        self.stopped = False

    def feed(self, tokens: Sequence[int]) -> str:
        """Take new tokens; return the text that has become certain."""
        self._pending += tokens
        new = self._new()
        whole = new.rstrip(_REPLACEMENT)
        fresh, self._taken = whole[self._taken :], max(len(whole), self._taken)
        if new and whole == new:
            self._context, self._pending, self._taken = self._pending, [], 0
        return self._emit(fresh)

    def finish(self) -> str:
        """Return what was held back; no tokens follow."""
        rest = self._emit(self._new()[self._taken :])
        self._pending, self._taken = [], 0
        if not self.stopped:
            rest += self._held
            self.text += self._held
        self._held = ""
        return rest

    def _new(self) -> str:
        before = decode(self._tokenizer, self._context)
        return decode(self._tokenizer, self._context + self._pending)[len(before) :]

    def _emit(self, fresh: str) -> str:
        if self.stopped:
            return ""
        text = self._held + fresh
        ends = [at for at in map(text.find, self._stop) if at >= 0]
        self.stopped = bool(ends)
        cut = min(ends) if ends else len(text) - self._could_begin_a_stop(text)
        text, self._held = text[:cut], text[cut:]
        self.text += text
        return text

    def _could_begin_a_stop(self, text: str) -> int:
        """Return the length of the longest end of ``text`` that a stop string begins with."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0


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
