"""DeepSeek's FlashMLA (https://github.com/deepseek-ai/FlashMLA) for Hopper, from `sgl_kernel`.

Pattern A: block table, lengths and FlashMLA's own plan are made on the device by ``fill``. Its
pages have 64 tokens; that the pool's have them, too, is up to ``SpecConfig.page_size`` (64, or a
multiple of it), see `specattn.backends.paged`. Query tokens are masked causally.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from specattn.backends.base import Capabilities
from specattn.backends.paged import BlockTable, PagedBackend
from specattn.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor

    from specattn.backends.base import BoundAttention
    from specattn.config import AttnConfig
    from specattn.plan import AttnPlan

#: Latent and rotated columns of a row.
RANK, ROPE = 512, 64


class FlashMlaBackend(PagedBackend):
    """FlashMLA over one pool of latent rows; see `PagedBackend`."""

    name: ClassVar[str] = "flashmla"
    capabilities: ClassVar[Capabilities] = Capabilities(
        graphs=True, trees=False, lists=False, extend=False, window=False, cap=False,
        dtypes=(torch.float16, torch.bfloat16),
    )
    module: ClassVar[str] = "sgl_kernel.flash_mla"
    package: ClassVar[str] = "sglang-kernel"
    majors: ClassVar[tuple[int, ...]] = (9,)
    page_sizes: ClassVar[tuple[int, ...]] = (64,)

    @staticmethod
    def geometry(config: AttnConfig) -> list[str]:
        """Say which widths stand in the way."""
        if not config.latent:
            return ["only latent layers are served (AttnConfig.latent)"]
        rank, rope = config.v_head_dim, config.head_dim - config.v_head_dim
        if (rank, rope) != (RANK, ROPE):
            return [f"a row must be {RANK} + {ROPE} numbers, got {rank} + {rope}"]
        return []

    def bind_causal(self, plan: AttnPlan) -> BoundAttention:
        """Bind to decode, chain verify, draft extend and chain draft steps.

        Raises
        ------
        UnsupportedError
            If the library's kernels cannot be loaded.
        """
        try:
            return FlashMla.over(self.config, self.library, BlockTable.over(plan, self.page_size))
        except ImportError as error:
            raise UnsupportedError(f"backend {self.name!r}", [str(error)]) from error


@dataclass(frozen=True)
class FlashMla:
    """One causal call over prefix and tail."""

    config: AttnConfig
    library: Any
    blocks: BlockTable
    parts: Tensor  # [parts, numbers of a part] int32: which keys of which requests
    splits: Tensor  # [B + 1] int32: where each request's partial results begin

    @classmethod
    def over(cls, config: AttnConfig, library: Any, blocks: BlockTable) -> FlashMla:
        """Allocate the plan; its shape depends on the device, the batch and the query rows."""
        made = cls(config, library, blocks, blocks.lens, blocks.lens)
        parts, splits = made.planned()
        return cls(config, library, blocks, parts.clone(), splits.clone())

    def planned(self) -> tuple[Tensor, Tensor]:
        """Let FlashMLA plan the lengths, on the device."""
        rows = self.blocks.plan.layout.q_len * self.config.num_qo_heads
        parts, splits = self.library.get_mla_metadata(self.blocks.lens, rows, 1)
        return parts, splits

    def fill(self) -> None:
        """List the pages of every request, and plan."""
        self.blocks.fill()
        parts, splits = self.planned()
        self.parts.copy_(parts)
        self.splits.copy_(splits)

    def schedule(self, seq_lens_cpu: Tensor | None) -> None:
        """Nothing to plan on the host."""

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        if v_cache.data_ptr() != k_cache.data_ptr() or v_cache.stride() != k_cache.stride():
            raise ValueError(f"v_cache must be k_cache[..., :{RANK}], a view")
        blocks = self.blocks
        shape = (blocks.plan.batch, blocks.plan.layout.q_len)
        result, sums = self.library.flash_mla_with_kvcache(
            q.unflatten(0, shape), blocks.pages(k_cache), blocks.table, blocks.lens, RANK,
            self.parts, self.splits, softmax_scale=self.config.sm_scale, causal=shape[1] > 1,
        )
        out.unflatten(0, shape).copy_(result)
        if lse is not None:
            lse.unflatten(0, shape).copy_(sums.transpose(1, 2))
