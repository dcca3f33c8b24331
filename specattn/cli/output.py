"""Texts of a run on standard output, its progress on standard error."""

from __future__ import annotations

import os
import stat
import sys
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from specattn.cli.loading import decode, progress_bar
from specattn.engine.detokenizer import TextStream, end_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from specattn.cli.loading import Models
    from specattn.cli.prompts import Prompts
    from specattn.engine.request import Request


class TextOutput:
    """The texts of a batch, written in order, each as early as possible.

    Prompts are shown before their texts on a terminal. Without ``live``, texts are only collected.
    """

    def __init__(
        self, models: Models, requests: Sequence[Request], prompts: Prompts, *, live: bool
    ) -> None:
        self._requests, self._prompts, self._live = requests, prompts, live
        eos = end_ids(models.target, models.tokenizer)
        self._ends = [
            frozenset(r.stop_token_ids).union(() if r.ignore_eos else eos) for r in requests
        ]
        detokenize = partial(decode, models.tokenizer)
        self._streams = [
            TextStream(detokenize, r.prompt, r.stop, r.min_new_tokens) for r in requests
        ]
        self._counts = [0] * len(requests)
        self._ended = [False] * len(requests)
        # text that waits until the texts before it are written
        self._ready = [""] * len(requests)
        # the text that is being written, and whether its heading is
        self._at, self._begun = 0, False
        self._last = ""

    @property
    def texts(self) -> tuple[str, ...]:
        """The part of every text that later tokens cannot change."""
        return tuple(stream.text for stream in self._streams)

    def take(self, index: int, tokens: list[int]) -> None:
        """Take a request's new tokens; see `specattn.Engine.generate`."""
        request, stream = self._requests[index], self._streams[index]
        ended = not self._ends[index].isdisjoint(tokens[-1:])
        self._ready[index] += stream.feed(tokens[:-1] if ended else tokens)
        self._counts[index] += len(tokens)
        if ended or stream.stopped or self._counts[index] >= request.max_new_tokens:
            self._end(index)
        self._write()

    def finish(self) -> None:
        """Write the rest."""
        for index in range(len(self._requests)):
            self._end(index)
        self._write()
        self._end_line()

    def _end(self, index: int) -> None:
        if not self._ended[index]:
            self._ended[index] = True
            self._ready[index] += self._streams[index].finish()

    def _write(self) -> None:
        """Write the texts up to the first that has not ended."""
        if not self._live:
            return
        while self._at < len(self._requests):
            self._begin()
            piece, self._ready[self._at] = self._ready[self._at], ""
            sys.stdout.write(piece)
            self._last = piece[-1:] or self._last
            if not self._ended[self._at]:
                break
            self._at, self._begun = self._at + 1, False
        sys.stdout.flush()

    def _begin(self) -> None:
        """Write the heading of a text, once."""
        if self._begun:
            return
        self._begun = True
        if self._at:
            self._end_line()
        if len(self._requests) > 1:
            label = self._prompts.label(self._at)
            sys.stdout.write(f"{chr(10) if self._at else ''}==> {label} <==\n")
        if sys.stdout.isatty():
            prompt = self._prompts.texts[self._at // self._prompts.samples]
            Console(file=sys.stdout, highlight=False).print(
                Text(prompt, style="dim"), end="", soft_wrap=True
            )
            self._last = prompt[-1:]
            # a text goes on with its prompt, an answer begins below it
            if self._prompts.chat:
                self._end_line()

    def _end_line(self) -> None:
        if self._live and self._last != "\n":
            sys.stdout.write("\n")
            self._last = "\n"


def writes_to_file() -> bool:
    """Return whether standard output is a file.

    On a screen, or a pipe that may lead to one, the text itself shows the progress, and a bar would
    get between its lines.
    """
    try:
        return stat.S_ISREG(os.fstat(sys.stdout.fileno()).st_mode)
    except (OSError, ValueError):  # not a real file, as in a notebook
        return False


@contextmanager
def progress(
    what: str, requests: Sequence[Request], *, hidden: bool = False
) -> Iterator[Callable[[int, list[int]], None]]:
    """Show a bar of the tokens so far on a terminal."""
    with progress_bar(what, hidden=hidden) as bar:
        task = bar.add_task(what, total=sum(request.max_new_tokens for request in requests))
        yield lambda _, tokens: bar.advance(task, len(tokens))
