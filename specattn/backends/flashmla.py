"""DeepSeek's FlashMLA (https://github.com/deepseek-ai/FlashMLA) for Hopper, from `sgl_kernel`.

It is planned on the device: ``fill`` makes the block table, the lengths and FlashMLA's own plan.
Its pages have 64 tokens, see `specattn.backends.paged`. Query tokens are masked causally.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch

from specattn.backends.base import latent_reasons
from specattn.backends.paged import PagedBackend
from specattn.errors import UnsupportedError
from specattn.kernels.mla import check_latent
from specattn.plan import AttnPlan

if TYPE_CHECKING:
    from torch import Tensor

    from specattn.backends.base import Capabilities
    from specattn.backends.paged import BoundPages, Keys, Place
    from specattn.config import AttnConfig

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

    def scratch(self, plan: AttnPlan, keys: Keys) -> tuple[Tensor, ...]:
        """Return a plan of FlashMLA's own.

        Its shapes depend on the device, the batch and the query rows.
        """
        return tuple(part.clone() for part in self.planned(plan, keys))

    def planned(self, plan: AttnPlan, keys: Keys) -> tuple[Tensor, ...]:
        """Let FlashMLA plan the lengths, on the device."""
        rows = plan.layout.q_len * self.config.num_qo_heads
        found: tuple[Tensor, Tensor] = self.library.get_mla_metadata(keys.lens, rows, 1)
        return found

    def plan(self, bound: BoundPages) -> None:
        """Plan anew, where the plan was bound."""
        assert isinstance(bound.plan, AttnPlan)
        for kept, new in zip(bound.scratch, self.planned(bound.plan, bound.keys), strict=True):
            kept.copy_(new)

    def attend(
        self, bound: BoundPages, q: Tensor, k: Tensor, v: Tensor, out: Place, lse: Place
    ) -> Tensor:
        """Attend in one causal call, into memory that FlashMLA allocates."""
        check_latent(k, v)
        keys, shape = bound.keys, bound.shape
        found: tuple[Tensor, Tensor] = self.library.flash_mla_with_kvcache(
            q.unflatten(0, shape),
            keys.pages(k),
            keys.table,
            keys.lens,
            RANK,
            *bound.scratch,
            softmax_scale=self.config.sm_scale,
            causal=shape[1] > 1,
        )
        if lse is not None:
            lse.unflatten(0, shape).copy_(found[1].transpose(1, 2))
        return found[0].flatten(0, 1)
