"""DeepSeek's FlashMLA (https://github.com/deepseek-ai/FlashMLA) for Hopper, from `sgl_kernel`.

It is planned on the device: ``fill`` makes the block table, the lengths and FlashMLA's own plan.
Its pages have 64 tokens, see `specattn.backends.paged`. Query tokens are masked causally.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from specattn.backends.base import latent_reasons
from specattn.backends.paged import BlockTable, BoundPages, PagedBackend
from specattn.errors import UnsupportedError
from specattn.kernels.mla import check_latent

if TYPE_CHECKING:
    from torch import Tensor

    from specattn.backends.base import BoundAttention, Capabilities
    from specattn.config import AttnConfig
    from specattn.plan import AttnPlan

#: Latent and rotated columns of a row.
RANK, ROPE = 512, 64


class FlashMlaBackend(PagedBackend):
    """FlashMLA over one pool of latent rows; see `PagedBackend`."""

    name: ClassVar[str] = "flashmla"
    capabilities: ClassVar[Capabilities] = replace(
        PagedBackend.capabilities, window=False, cap=False
    )
    module: ClassVar[str] = "sgl_kernel.flash_mla"
    page_sizes: ClassVar[tuple[int, ...]] = (64,)

    @classmethod
    def geometry(cls, config: AttnConfig) -> list[str]:
        """Say which widths stand in the way."""
        return latent_reasons(config, [(RANK, ROPE)])

    def __init__(self, config: AttnConfig, device: torch.device) -> None:
        super().__init__(config, device)
        try:
            # sgl_kernel can be imported without FlashMLA's extension, whose calls then fail
            self.library.get_mla_metadata(torch.ones(1, dtype=torch.int32, device=device), 1, 1)
        except (ImportError, AttributeError, RuntimeError) as error:
            raise UnsupportedError(f"backend {self.name!r}", [str(error)]) from error

    def bind_causal(self, plan: AttnPlan) -> BoundAttention:
        """Bind, with a plan of FlashMLA's own."""
        blocks = BlockTable.over(plan, self.page_size)
        # the shapes of the plan depend on the device, the batch and the query rows
        parts, splits = self.planned(blocks)
        return BoundRows(self, blocks, (parts.clone(), splits.clone()))

    def planned(self, blocks: BlockTable) -> tuple[Tensor, Tensor]:
        """Let FlashMLA plan the lengths, on the device."""
        rows = blocks.plan.layout.q_len * self.config.num_qo_heads
        parts, splits = self.library.get_mla_metadata(blocks.lens, rows, 1)
        return parts, splits

    def plan(self, bound: BoundPages) -> None:
        """Plan anew, where the plan was bound."""
        for kept, new in zip(bound.scratch, self.planned(bound.blocks), strict=True):
            kept.copy_(new)

    def attend(
        self, bound: BoundPages, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None
    ) -> None:
        """Copy what FlashMLA returns."""
        out.copy_(self.result(bound, q, k, v, lse))

    def result(
        self, bound: BoundPages, q: Tensor, k: Tensor, v: Tensor, lse: Tensor | None
    ) -> Tensor:
        """Attend in one causal call, into memory that FlashMLA allocates."""
        check_latent(k, v)
        blocks, shape = bound.blocks, bound.shape
        found: tuple[Tensor, Tensor] = self.library.flash_mla_with_kvcache(
            q.unflatten(0, shape),
            blocks.pages(k),
            blocks.table,
            blocks.lens,
            RANK,
            *bound.scratch,
            softmax_scale=self.config.sm_scale,
            causal=shape[1] > 1,
        )
        if lse is not None:
            lse.unflatten(0, shape).copy_(found[1].transpose(1, 2))
        return found[0].flatten(0, 1)


@dataclass(frozen=True)
class BoundRows(BoundPages):
    """FlashMLA over a block table, whose results need no copy."""

    backend: FlashMlaBackend

    def result(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, lse: Tensor | None = None
    ) -> Tensor:
        """Attend; see `BoundAttention.result`."""
        return self.backend.result(self, q, k_cache, v_cache, lse)
