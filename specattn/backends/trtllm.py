"""What the adapters of TRT-LLM's decode kernels share (``trtllm-gen``, from FlashInfer)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from specattn.backends.paged import BlockTable, BoundPages, PagedBackend, Scales

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from specattn.backends.base import BoundAttention
    from specattn.config import AttnConfig
    from specattn.plan import AttnPlan


class TrtllmBackend(PagedBackend):
    """An adapter of a function that takes block tables and one workspace; see `PagedBackend`."""

    package: ClassVar[str] = "flashinfer-python"
    majors: ClassVar[tuple[int, ...]] = (10,)
    scales: ClassVar[Scales] = Scales()
    function: ClassVar[str]  # of ``module``
    bound: ClassVar[type[BoundTrtllm]]
    # 8 MiB of counters, the softmax statistics, and scratch for keys split over thread blocks
    workspace_bytes: ClassVar[int] = 256 * 2**20

    def __init__(self, config: AttnConfig, device: torch.device) -> None:
        super().__init__(config, device)
        # zeros: the counters must be 0 at first, and the kernels leave them so
        self._workspace = torch.zeros(self.workspace_bytes, dtype=torch.uint8, device=device)

    def bind_causal(self, plan: AttnPlan) -> BoundAttention:
        """Bind to decode, chain verify, draft extend and chain draft steps."""
        return self.bound(
            self.config,
            BlockTable.over(plan, self.page_size),
            self.scales,
            getattr(self.library, self.function),
            self._workspace,
        )


@dataclass(frozen=True)
class BoundTrtllm(BoundPages, ABC):
    """One causal call over prefix and tail."""

    scales: Scales
    function: Callable[..., Any]
    workspace: Tensor

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        blocks = self.blocks
        bmm1_scale, bmm2_scale = self.scales.folded(self.config.sm_scale)
        self.function(
            workspace_buffer=self.workspace,
            block_tables=blocks.table,
            seq_lens=blocks.lens,
            max_seq_len=blocks.max_keys,
            bmm1_scale=bmm1_scale,
            bmm2_scale=bmm2_scale,
            backend="trtllm-gen",
            lse=lse,
            return_lse=lse is not None,
            **self.own(q, k_cache, v_cache, out),
        )
        if lse is not None:
            lse.mul_(math.log(2))  # the library's is of base 2

    @abstractmethod
    def own(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> dict[str, Any]:
        """Return the arguments that are this function's own."""
