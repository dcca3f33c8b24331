"""TRT-LLM's absorbed MLA decoding for Blackwell, from FlashInfer, planned on the device.

Written against ``flashinfer-python`` 0.6.12,
`flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla`. Its block table must be a multiple of 128
keys wide; the query tokens of a request are masked causally.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from specattn.backends.base import Capabilities
from specattn.backends.paged import BlockTable, PagedBackend, Scales

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from specattn.backends.base import BoundAttention
    from specattn.config import AttnConfig
    from specattn.plan import AttnPlan

#: By latent rank, the width of the model's expanded heads without their rope part.
NOPE_DIMS = {512: 128, 256: 64}
ROPE = 64
#: 8 MiB of counters, the softmax statistics, and scratch for keys split over thread blocks.
WORKSPACE_BYTES = 256 * 2**20


class TrtllmMlaBackend(PagedBackend):
    """`trtllm-gen` attention over one pool of latent rows; see `PagedBackend`."""

    name: ClassVar[str] = "trtllm_mla"
    capabilities: ClassVar[Capabilities] = Capabilities(
        graphs=True, trees=False, lists=False, extend=False, window=False, cap=False,
        dtypes=(torch.bfloat16,),
    )
    module: ClassVar[str] = "flashinfer.mla"
    package: ClassVar[str] = "flashinfer-python"
    majors: ClassVar[tuple[int, ...]] = (10,)
    page_sizes: ClassVar[tuple[int, ...]] = (32, 64)
    scales: ClassVar[Scales] = Scales()

    def __init__(self, config: AttnConfig, device: torch.device) -> None:
        super().__init__(config, device)
        # zeros: the counters must be 0 at first, and the kernels leave them so
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    @staticmethod
    def geometry(config: AttnConfig) -> list[str]:
        """Say which widths stand in the way."""
        if not config.latent:
            return ["only latent layers are served (AttnConfig.latent)"]
        rank, rope = config.v_head_dim, config.head_dim - config.v_head_dim
        if rank not in NOPE_DIMS or rope != ROPE:
            return [f"a row must be 512 + 64 or 256 + 64 numbers, got {rank} + {rope}"]
        return []

    def bind_causal(self, plan: AttnPlan) -> BoundAttention:
        """Bind to decode, chain verify and chain draft steps."""
        return TrtllmMla(
            self.config, self.scales, self.library.trtllm_batch_decode_with_kv_cache_mla,
            self._workspace, BlockTable.over(plan, self.page_size),
        )


@dataclass(frozen=True)
class TrtllmMla:
    """One causal call over prefix and tail."""

    config: AttnConfig
    scales: Scales
    function: Callable[..., Any]
    workspace: Tensor
    blocks: BlockTable

    def fill(self) -> None:
        """List the pages of every request."""
        self.blocks.fill()

    def schedule(self, seq_lens_cpu: Tensor | None) -> None:
        """Nothing to plan on the host."""

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        blocks, rank = self.blocks, self.config.v_head_dim
        shape = (blocks.plan.batch, blocks.plan.layout.q_len)
        bmm1_scale, bmm2_scale = self.scales.folded(self.config.sm_scale)
        self.function(
            query=q.unflatten(0, shape), kv_cache=blocks.pages(k_cache).transpose(1, 2),
            workspace_buffer=self.workspace, qk_nope_head_dim=NOPE_DIMS[rank],
            kv_lora_rank=rank, qk_rope_head_dim=ROPE, block_tables=blocks.table,
            seq_lens=blocks.lens, max_seq_len=blocks.max_keys, out=out.unflatten(0, shape),
            bmm1_scale=bmm1_scale, bmm2_scale=bmm2_scale, backend="trtllm-gen",
            lse=lse, return_lse=lse is not None,
        )
        if lse is not None:
            lse.mul_(math.log(2))  # the library's is of base 2
