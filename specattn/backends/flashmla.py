"""DeepSeek's FlashMLA (https://github.com/deepseek-ai/FlashMLA) for Hopper, from `sgl_kernel`.

Pattern A: block table, lengths and FlashMLA's own plan are made on the device by ``fill``. Its
pages have 64 tokens, see `specattn.backends.paged`. Query tokens are masked causally.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from specattn.backends.paged import BlockTable, BoundPages, PagedBackend, latent_reasons
from specattn.errors import UnsupportedError

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
    package: ClassVar[str] = "sglang-kernel"
    majors: ClassVar[tuple[int, ...]] = (9,)
    page_sizes: ClassVar[tuple[int, ...]] = (64,)

    @staticmethod
    def geometry(config: AttnConfig) -> list[str]:
        """Say which widths stand in the way."""
        return latent_reasons(config, [(RANK, ROPE)])

    def bind_causal(self, plan: AttnPlan) -> BoundAttention:
        """Bind to decode, chain verify, draft extend and chain draft steps.

        Raises
        ------
        UnsupportedError
            If the library's kernels cannot be loaded.
        """
        try:
            return FlashMla.over(self.config, BlockTable.over(plan, self.page_size), self.library)
        except ImportError as error:
            raise UnsupportedError(f"backend {self.name!r}", [str(error)]) from error


@dataclass(frozen=True)
class FlashMla(BoundPages):
    """One causal call over prefix and tail."""

    library: Any
    parts: Tensor  # [parts, numbers of a part] int32: which keys of which requests
    splits: Tensor  # [B + 1] int32: where each request's partial results begin

    @classmethod
    def over(cls, config: AttnConfig, blocks: BlockTable, library: Any) -> FlashMla:
        """Allocate the plan; its shape depends on the device, the batch and the query rows."""
        made = cls(config, blocks, library, blocks.lens, blocks.lens)
        parts, splits = made.planned()
        return cls(config, blocks, library, parts.clone(), splits.clone())

    def planned(self) -> tuple[Tensor, Tensor]:
        """Let FlashMLA plan the lengths, on the device."""
        rows = self.shape[1] * self.config.num_qo_heads
        parts, splits = self.library.get_mla_metadata(self.blocks.lens, rows, 1)
        return parts, splits

    def fill(self) -> None:
        """List the pages of every request, and plan."""
        self.blocks.fill()
        parts, splits = self.planned()
        self.parts.copy_(parts)
        self.splits.copy_(splits)

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        if v_cache.data_ptr() != k_cache.data_ptr() or v_cache.stride() != k_cache.stride():
            raise ValueError(f"v_cache must be k_cache[..., :{RANK}], a view")
        blocks, shape = self.blocks, self.shape
        result, sums = self.library.flash_mla_with_kvcache(
            q.unflatten(0, shape),
            blocks.pages(k_cache),
            blocks.table,
            blocks.lens,
            RANK,
            self.parts,
            self.splits,
            softmax_scale=self.config.sm_scale,
            causal=shape[1] > 1,
        )
        out.unflatten(0, shape).copy_(result)
        if lse is not None:
            lse.unflatten(0, shape).copy_(sums.transpose(1, 2))
