"""Log-probabilities of emitted tokens: where steps leave them for the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from specattn.kernels.logprobs import MAX_LOGPROBS

if TYPE_CHECKING:
    from collections.abc import Sequence


class TokenLogprobs(NamedTuple):
    """An emitted token's log-probability, and those of its alternatives.

    Parameters
    ----------
    value : float
        The token's own, a natural logarithm.
    alternatives : dict of int to float
        Those of the most probable tokens, the most probable first, the lower token at a tie;
        whether or not the emitted token is one of them. Impossible tokens are left out.
    """

    value: float
    alternatives: dict[int, float]


@dataclass(frozen=True)
class LogprobBuffers:
    """Memory that steps write log-probabilities to, in the turns of `HostBuffers`.

    Parameters
    ----------
    values, ids : Tensor
        ``[S, B, D, 1 + K]`` float32 and int64, of S steps of B requests that gain up to D tokens:
        the token's own, then K alternatives; as `path_logprobs` writes them.
    """

    values: Tensor
    ids: Tensor

    @classmethod
    def alloc(
        cls, steps: int, batch: int, depth: int, device: torch.device, *, pinned: bool = False
    ) -> LogprobBuffers:
        """Allocate memory on ``device``, or ``pinned`` memory of the host for it."""
        shape = steps, batch, depth, 1 + MAX_LOGPROBS
        place = torch.device("cpu") if pinned else device
        pin = pinned and device.type == "cuda"
        values = torch.zeros(shape, dtype=torch.float32, device=place, pin_memory=pin)
        return cls(values, torch.zeros(shape, dtype=torch.int64, device=place, pin_memory=pin))

    @classmethod
    def join(cls, parts: Sequence[LogprobBuffers]) -> LogprobBuffers:
        """Return the requests of all ``parts``, in order."""
        return cls(*(torch.cat([getattr(p, name) for p in parts], 1) for name in ("values", "ids")))

    def of(self, requests: slice) -> LogprobBuffers:
        """Return the buffers of these requests of every step."""
        return LogprobBuffers(self.values[:, requests], self.ids[:, requests])

    def entry(self, entry: int, batch: int) -> LogprobBuffers:
        """Return a copy on the host of one step's entry."""
        values, ids = (x[entry : entry + 1, :batch].cpu() for x in (self.values, self.ids))
        return LogprobBuffers(values.clone(), ids.clone())

    def read(self, at: int, gained: int, count: int) -> list[TokenLogprobs]:
        """Return what a request's tokens have got, of an `entry`.

        Parameters
        ----------
        at : int
            The request's place in the batch.
        gained : int
            Tokens that it gained.
        count : int
            Alternatives that it wants.
        """
        values = self.values[0, at, :gained, : 1 + count].tolist()
        ids = self.ids[0, at, :gained, 1 : 1 + count].tolist()
        return [
            TokenLogprobs(
                own, {i: x for i, x in zip(tokens, others, strict=True) if x > -float("inf")}
            )
            for (own, *others), tokens in zip(values, ids, strict=True)
        ]
