"""Requests on their way into an engine: checked, with tokens and seeds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING

import torch

from specattn.engine.request import Request
from specattn.speculative.logits_processor import check_names
from specattn.speculative.processors import MAX_END_IDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from specattn.engine.detokenizer import Texts
    from specattn.engine.ranks import Ranks
    from specattn.speculative.logits_processor import LogitsProcessor
    from specattn.speculative.model import TargetModel


@dataclass(frozen=True)
class Intake:
    """Checks requests, and gives them the tokens and seeds that they lack.

    Parameters
    ----------
    target : TargetModel
        The model that decodes them.
    limit : int
        Tokens that a context holds.
    texts : Texts
        What makes tokens of prompts, and text to look for stop strings in.
    processors : tuple of LogitsProcessor
        Those that requests may ask for by name.
    ranks : Ranks
        Where the same requests must come.
    """

    target: TargetModel
    limit: int
    texts: Texts
    processors: tuple[LogitsProcessor, ...]
    ranks: Ranks

    def take(self, requests: Sequence[Request | str], running: object) -> list[Request]:
        """Return requests that can run.

        Parameters
        ----------
        requests : sequence of Request or str
            Any number; a text is a request to continue it.
        running : object
            What must be the same on all ranks, too.

        Raises
        ------
        ValueError
            If there is something else than a `Request` or a text among them; if a prompt is a text,
            and nothing makes tokens of it; if it is empty, longer than the limit or has tokens
            outside the vocabulary; if stop tokens or tokens of ``sampling`` lie outside it, or
            there are too many to end a request with ``min_new_tokens``; if ``max_new_tokens`` is
            below 1; if one has stop strings, and there is no text, or asks for an unknown
            processor.
        RankError
            If ranks are given different ones.
        """
        checked = [self._encoded(one) for one in _listed(requests)]
        for request in checked:
            self._check(request)
        self.ranks.agree("requests, their seeds included,", (checked, running))
        if not any(one.sampling.lacks_seed for one in checked):
            return checked
        seeds = count(self.ranks.decide(fresh_seed))
        return [one.seeded(next(seeds)) if one.sampling.lacks_seed else one for one in checked]

    def _encoded(self, request: Request | str) -> Request:
        """Return a request whose prompt has tokens."""
        if isinstance(request, str):
            request = Request(request)
        if not isinstance(request, Request):
            raise ValueError(f"requests must be a sequence of Request, got {request!r} in it")
        if not isinstance(request.prompt, str):
            return request
        if self.texts.encode is None:
            raise ValueError(
                f"prompt must be token ids in an engine without a tokenizer, got {request.prompt!r}"
            )
        return replace(request, prompt=self.texts.encode(request.prompt))

    def _check(self, request: Request) -> None:
        if not request.prompt:
            raise ValueError("the prompt is empty")
        if len(request.prompt) > self.limit:
            raise ValueError(
                f"the prompt has {len(request.prompt)} tokens, the context holds {self.limit}"
            )
        most, ends = self.target.vocab_size, frozenset(request.stop_token_ids)
        for name, ids in (("prompt", request.prompt), ("stop", ends)):
            low, high = min(ids, default=0), max(ids, default=0)
            if low < 0 or high >= most:
                raise ValueError(f"{name} tokens must be 0..{most - 1}, got {low}..{high}")
        if request.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {request.max_new_tokens}")
        request.sampling.check_tokens(most)
        if request.stop and self.texts.decode is None:
            raise ValueError("stop strings need detokenize")
        if request.min_new_tokens and (size := len(ends | self.target.eos_token_ids)) > MAX_END_IDS:
            raise ValueError(
                f"tokens that end a request with min_new_tokens must be at most {MAX_END_IDS}, "
                f"got {size}"
            )
        check_names(dict(request.sampling.processors), self.processors)


def _listed(requests: Iterable[Request | str]) -> list[Request | str]:
    """Return requests as a list; one by itself is none."""
    if isinstance(requests, Request | str):
        raise ValueError(f"requests must be a sequence of Request, got the one {requests!r}")
    try:
        return list(requests)
    except TypeError as problem:
        raise ValueError(f"requests must be a sequence of Request, got {requests!r}") from problem


def fresh_seed() -> int:
    """Draw a seed that others can follow; ``torch.manual_seed`` repeats it."""
    return int(torch.randint(2**62, (), device="cpu"))
