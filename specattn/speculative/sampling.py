"""Sampling parameters of one request and of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specattn.checks import number, whole_number

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class SamplingParams:
    """How one request draws its tokens.

    Parameters
    ----------
    temperature : float
        Divides the logits; 0 is greedy decoding.
    top_k : int
        Keep the ``top_k`` most probable tokens; 0 keeps all.
    top_p : float
        Keep the fewest most probable tokens whose mass reaches ``top_p``, in (0, 1].
    seed : int
        Names the request's random numbers. Each is a function of seed, position and draw, so that
        a request's tokens do not depend on the batch it runs in.

    Raises
    ------
    ValueError
        If a parameter is of another kind or out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            number(name, getattr(self, name))
        # tensors of integers would cut fractions
        for name in ("top_k", "seed"):
            whole_number(name, getattr(self, name))
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 or more, got {self.temperature}")
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k must be 0 (off) or more, below 2**31, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must fit into 64 bits, got {self.seed}")


@dataclass(frozen=True)
class SamplingBatch:
    """The parameters of a batch as tensors.

    Parameters
    ----------
    greedy : bool
        Whether every request is greedy; known on the host, so that greedy batches compute no
        probabilities.
    temperature : Tensor
        ``[B]`` float32.
    top_k, top_p : Tensor or None
        ``[B]`` int32 and float32; None if no request of the batch uses it.
    seeds : Tensor
        ``[B]`` int64.
    """

    greedy: bool
    temperature: Tensor
    top_k: Tensor | None
    top_p: Tensor | None
    seeds: Tensor

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> SamplingBatch:
        """Gather the parameters of the requests of a batch.

        Parameters
        ----------
        params : sequence of SamplingParams
            One per request.
        device : torch.device
            Where the tensors go.
        """

        def column(name: str, dtype: torch.dtype) -> Tensor:
            return torch.tensor([getattr(p, name) for p in params], dtype=dtype, device=device)

        return cls(
            greedy=all(p.temperature == 0 for p in params),
            temperature=column("temperature", torch.float32),
            top_k=column("top_k", torch.int32) if any(p.top_k for p in params) else None,
            top_p=column("top_p", torch.float32) if any(p.top_p < 1 for p in params) else None,
            seeds=column("seed", torch.int64),
        )
