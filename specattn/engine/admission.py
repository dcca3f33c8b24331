"""How requests come in: checked, in waves that share prefixes, and through their prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from specattn.engine.request import RunningRequest
from specattn.speculative.prefill import Prompt
from specattn.speculative.sampling import SamplingBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specattn.cache.slot_table import SlotTable
    from specattn.engine.request import Request, RequestOutput
    from specattn.speculative.prefill import Prefill
    from specattn.speculative.sampling import SamplingParams
    from specattn.speculative.states import RequestStates

    Item = tuple[Request, RequestOutput]


def check_request(
    request: Request,
    limit: int,
    vocab_size: int,
    detokenize: Callable[[list[int]], str] | None,
) -> None:
    """Raise a ValueError if a request cannot run in contexts of ``limit`` tokens."""
    if not request.prompt:
        raise ValueError("the prompt is empty")
    if len(request.prompt) > limit:
        raise ValueError(f"the prompt has {len(request.prompt)} tokens, the context holds {limit}")
    low, high = min(request.prompt), max(request.prompt)
    if low < 0 or high >= vocab_size:
        raise ValueError(f"prompt tokens must be 0..{vocab_size - 1}, got {low}..{high}")
    if request.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {request.max_new_tokens}")
    if request.stop and detokenize is None:
        raise ValueError("stop strings need detokenize")


@dataclass
class Admission:
    """Gives requests rows, runs their prompts, and shares the prefixes of running requests.

    Parameters
    ----------
    table : SlotTable
        Rows and slots.
    states : RequestStates
        Where a request's first step finds what its prompt left.
    page_size : int
        Whole pages are shared.
    reserve_len : int
        Slots past its length that a request may need for a step.
    """

    table: SlotTable
    states: RequestStates
    page_size: int
    reserve_len: int
    _drawing: tuple[tuple[SamplingParams, ...], SamplingBatch] | None = field(
        default=None, init=False
    )

    def wave(
        self, waiting: Sequence[Item], running: Sequence[RunningRequest]
    ) -> tuple[list[Item], list[Item]]:
        """Return those whose prompts run now, and those who wait to share a prompt of theirs."""
        now: list[Item] = []
        later: list[Item] = []
        for item in waiting:
            (later if self._waits(item[0], now, running) else now).append(item)
        return now, later

    def run(
        self,
        prefill: Prefill,
        wave: Sequence[Item],
        running: Sequence[RunningRequest],
        *,
        whole: bool,
    ) -> list[tuple[RunningRequest, int]]:
        """Run the prompts of a wave; returns the requests, running now, and their first tokens.

        They get slots for their prompts; if ``whole``, for all their steps, and so do those that
        run already. Whatever fails, an interrupt included, their rows are free again.
        """
        prompts: list[Prompt] = []
        try:
            for request, _ in wave:
                donor, shared = self._donor(request.prompt, running)
                row = self.table.allocate(share=donor, share_len=shared)
                prompts.append(Prompt(row, request.prompt, shared))
            holders = [
                (prompt.row, request) for prompt, (request, _) in zip(prompts, wave, strict=True)
            ]
            if whole:
                holders += [(live.row, live.request) for live in running]
            self.table.reserve(
                [row for row, _ in holders],
                [self._end(one) if whole else len(one.prompt) for _, one in holders],
            )
            first = self._first_tokens(prefill, prompts, [request for request, _ in wave])
        except BaseException:
            for prompt in prompts:
                self.table.free(prompt.row)
            raise
        admitted = []
        for (request, result), prompt, token in zip(wave, prompts, first, strict=True):
            length = len(request.prompt)
            self.table.commit(prompt.row, length)
            admitted.append((RunningRequest(request, result, prompt.row, length), token))
        return admitted

    def _end(self, request: Request) -> int:
        """Return how many positions of a request may ever need slots.

        Its last step begins when it lacks one token, and its newest token has no slot yet.
        """
        longest = len(request.prompt) + request.max_new_tokens - 2
        return min(longest + self.reserve_len, self.table.max_context_len)

    def _first_tokens(
        self, prefill: Prefill, prompts: Sequence[Prompt], requests: Sequence[Request]
    ) -> list[int]:
        device, sampling = self.table.req_to_token.device, self._sampling(requests)
        out = prefill.run(prompts, sampling)
        lens = torch.tensor([len(p.tokens) for p in prompts], dtype=torch.int32)
        rows = torch.tensor([p.row for p in prompts])
        self.states.admit(rows.to(device), lens.to(device), out.bonus_tokens, out.state, sampling)
        first: list[int] = out.bonus_tokens.tolist()
        return first

    def _sampling(self, requests: Sequence[Request]) -> SamplingBatch:
        """Return the requests' parameters; a batch that stays the same is not sent again."""
        params = tuple(request.sampling for request in requests)
        if self._drawing is None or self._drawing[0] != params:
            device = self.table.req_to_token.device
            self._drawing = params, SamplingBatch.of(params, device)
        return self._drawing[1]

    def _waits(
        self, request: Request, wave: Sequence[Item], running: Sequence[RunningRequest]
    ) -> bool:
        """Whether a request of the wave will hold more of this prompt than a running one does."""
        shareable = max((_common(request.prompt, first.prompt) for first, _ in wave), default=0)
        return self._shared(request.prompt, shareable) > self._donor(request.prompt, running)[1]

    def _shared(self, prompt: Sequence[int], common: int) -> int:
        """Return how many tokens can be shared given a common prefix.

        The draft model's KV at a position depends on the next token too, so the last common
        token is not shared; and the prompt's last token must be run for its logits.
        """
        page = self.page_size
        return (min(common, len(prompt)) - 1) // page * page if common else 0

    def _donor(self, prompt: Sequence[int], running: Sequence[RunningRequest]) -> tuple[int, int]:
        """Return the row that shares most of the prompt, and how many tokens."""
        best = (0, 0)
        for live in running:
            common = min(_common(prompt, live.text), live.length + 1)
            shared = self._shared(prompt, common)
            if shared > best[1]:
                best = (live.row, shared)
        return best


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))
