"""FlashAttention-4 (CuTe DSL) over paged KV, planned on the device.

Written against ``flash-attn-4`` 4.0.0b36, `flash_attn.cute.interface.flash_attn_varlen_func`, of
which the arguments here are what a batch of equally long queries over a page table needs. It has
no ``out`` argument, so its result is copied. Its Hopper kernels read page tables, too; `fa3` is
older and proven there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from specattn.backends.paged import BlockTable, BoundPages, PagedBackend

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from specattn.backends.base import BoundAttention
    from specattn.config import AttnConfig
    from specattn.plan import AttnPlan

MAX_HEAD_DIM = 128


class Fa4Backend(PagedBackend):
    """FlashAttention-4; see `PagedBackend`.

    Where a page is a whole tile of keys (128), its kernels load the rows of the last page past a
    request's keys, too, and need them finite: the pool must have been initialised, as `KVPool` is.
    """

    name: ClassVar[str] = "fa4"
    module: ClassVar[str] = "flash_attn.cute.interface"
    package: ClassVar[str] = "--pre flash-attn-4"
    majors: ClassVar[tuple[int, ...]] = (9, 10, 11)
    page_sizes: ClassVar[tuple[int, ...]] = (16, 32, 64, 128)
    page_size: ClassVar[int] = 128  # a tile of keys: pages load by TMA

    @staticmethod
    def geometry(config: AttnConfig) -> list[str]:
        """Say which widths stand in the way."""
        if config.latent:
            return ["latent layers are not served"]
        found = []
        for name in ("head_dim", "v_head_dim"):
            width = getattr(config, name)
            if width % 8 or width > MAX_HEAD_DIM:
                found.append(f"{name} must be a multiple of 8 up to {MAX_HEAD_DIM}, got {width}")
        return found

    def bind_causal(self, plan: AttnPlan) -> BoundAttention:
        """Bind to decode, chain verify and chain draft steps."""
        blocks = BlockTable.over(plan, self.page_size)
        return Fa4(self.config, blocks, self.library.flash_attn_varlen_func)


@dataclass(frozen=True)
class Fa4(BoundPages):
    """One causal call over prefix and tail."""

    function: Callable[..., Any]

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        config, blocks, shape = self.config, self.blocks, self.shape
        left = config.window_left
        result, sums = self.function(
            q=q.unflatten(0, shape),
            k=blocks.pages(k_cache),
            v=blocks.pages(v_cache),
            page_table=blocks.table,
            seqused_k=blocks.lens,
            softmax_scale=config.sm_scale,
            causal=True,
            window_size=(None, None) if left < 0 else (left, 0),
            softcap=config.logit_cap,
            num_splits=1,
            return_lse=lse is not None,
        )
        out.unflatten(0, shape).copy_(result)
        if lse is not None:
            lse.unflatten(0, shape).copy_(sums.transpose(1, 2))
