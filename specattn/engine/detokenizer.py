"""Text streams give whole characters of text, up to a stop string."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

from specattn.checks import function

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specattn.engine.request import Request, RequestOutput
    from specattn.speculative.model import TargetModel

# tokens before a new one that may change how it reads, e.g. by a leading space; at most so many
# are kept, for making their text anew takes as long as that of new ones
_CONTEXT, _MOST_CONTEXT = 8, 32
# what tokenizers put where bytes do not, or do not yet, make a character
_REPLACEMENT = "\ufffd"


@runtime_checkable
class Tokenizer(Protocol):
    """Makes tokens of text and text of tokens, as transformers does."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt, with those that begin a text."""

    def decode(
        self,
        token_ids: list[int],
        skip_special_tokens: bool = False,
        *,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        """Return the text of tokens."""


def text_functions(
    tokenizer: Tokenizer | None, detokenize: Callable[[list[int]], str] | None
) -> tuple[Callable[[str], list[int]] | None, Callable[[list[int]], str] | None]:
    """Return what makes tokens of prompts, and text of tokens.

    None where nothing does. A tokenizer does both, but for ``detokenize``; its texts have no
    special tokens.

    Raises
    ------
    ValueError
        If the tokenizer is none, or ``detokenize`` cannot be called.
    """
    if detokenize is not None:
        function("detokenize", detokenize)
    if tokenizer is None:
        return None, detokenize
    if not isinstance(tokenizer, Tokenizer):
        raise ValueError(f"tokenizer must encode and decode, got {tokenizer!r}")
    plain = partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return tokenizer.encode, detokenize or plain


def end_ids(target: TargetModel, tokenizer: object) -> frozenset[int]:
    """Return the tokens that end a text: the target's, and its tokenizer's.

    Chat models are often saved with the end of a turn in their tokenizer alone: as its end-of-text
    token, or as its end-of-turn token ``eot_token``.

    Parameters
    ----------
    target : TargetModel
        The target, with its ``eos_token_ids``.
    tokenizer : Tokenizer or None
        Its tokenizer; one without such attributes adds none.
    """
    own = [getattr(tokenizer, name, None) for name in ("eos_token_id", "eot_token_id")]
    found = target.eos_token_ids.union(one for one in own if isinstance(one, int))
    # settings and tokenizers name tokens that some models cannot write
    return frozenset(token for token in found if token in range(target.vocab_size))


class TextStream:
    """A text stream gives the text of one request in pieces.

    The pieces together are the text. Characters whose last bytes are in tokens to come are held
    back, and so is what may turn out to be the beginning of a stop string. A character that begins
    in the prompt's last tokens belongs to the text.

    Parameters
    ----------
    detokenize : callable
        Maps token ids to text.
    prompt : sequence of int
        The tokens that are continued.
    stop : sequence of str
        The text ends before the one that is complete first; of several, before the longest. So it
        does not matter in which runs the tokens come.
    min_new_tokens : int
        In the text of so many tokens, ``stop`` is not looked for.
    """

    def __init__(
        self,
        detokenize: Callable[[list[int]], str],
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        min_new_tokens: int = 0,
    ) -> None:
        self._detokenize, self._stop = detokenize, tuple(stop)
        self._unstopped = min_new_tokens
        self._context = list(prompt[-_CONTEXT:])
        # its text, when it has been made, and that with what is pending
        self._before, self._after = "", ""
        self._pending: list[int] = []
        self._taken = 0
        self._held = ""
        self.text = ""
        self.stopped = False

    @classmethod
    def of(cls, request: Request, detokenize: Callable[[list[int]], str]) -> Self:
        """Return the stream of a request's text."""
        return cls(detokenize, request.prompt, request.stop, request.min_new_tokens)

    def feed(self, tokens: Sequence[int]) -> str:
        """Take new tokens; return the text that has become certain."""
        if 0 < (first := self._unstopped) < len(tokens):
            return self.feed(tokens[:first]) + self.feed(tokens[first:])
        self._pending += tokens
        new = self._new()
        whole = new.rstrip(_REPLACEMENT)
        fresh, self._taken = whole[self._taken :], max(len(whole), self._taken)
        if new and whole == new:
            self._go_on()
        text = self._emit(fresh)
        self._unstopped -= len(tokens)
        return text

    def finish(self) -> str:
        """Return what was held back; no tokens follow."""
        rest = self._emit(self._new()[self._taken :]) if self._pending else ""
        self._pending, self._taken = [], 0
        if not self.stopped:
            rest += self._held
            self.text += self._held
        self._held = ""
        return rest

    def _go_on(self) -> None:
        """Make what was pending a part of the context."""
        self._context += self._pending
        self._pending, self._taken, self._before = [], 0, self._after
        if len(self._context) > _MOST_CONTEXT:
            del self._context[:-_CONTEXT]
            self._before = ""

    def _new(self) -> str:
        before = self._before or self._detokenize(self._context)
        # what is no character yet: bytes that the prompt ends with
        open_len = len(before) - len(before.rstrip(_REPLACEMENT))
        self._before, self._after = before, self._detokenize(self._context + self._pending)
        new = self._after[len(before) - open_len :]
        still_open = len(new) - len(new.lstrip(_REPLACEMENT))
        return new[min(open_len, still_open) :]

    def _emit(self, fresh: str) -> str:
        if self.stopped:
            return ""
        if self._unstopped > 0:
            self.text += fresh
            return fresh
        text = self._held + fresh
        found = ((text.find(stop), len(stop)) for stop in self._stop)
        ends = [(at + length, at) for at, length in found if at >= 0]
        self.stopped = bool(ends)
        cut = min(ends)[1] if ends else len(text) - self._could_begin_a_stop(text)
        text, self._held = text[:cut], text[cut:]
        self.text += text
        return text

    def _could_begin_a_stop(self, text: str) -> int:
        """Return the length of the longest end that begins a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0


def add_texts(
    requests: Sequence[Request],
    outputs: Sequence[RequestOutput],
    detokenize: Callable[[list[int]], str],
) -> None:
    """Give the outputs of requests that have ended their texts."""
    for request, output in zip(requests, outputs, strict=True):
        stream = TextStream.of(request, detokenize)
        stream.feed(spoken(request, output))
        stream.finish()
        output.text = stream.text


def spoken(request: Request, output: RequestOutput) -> list[int]:
    """Return an output's tokens, but for one that ended the request."""
    reason, tokens = output.finish_reason, output.tokens
    by_token = reason == "eos" or (reason == "stop" and tokens[-1] in request.stop_token_ids)
    return tokens[:-1] if by_token else tokens
