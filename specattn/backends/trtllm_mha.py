"""TRT-LLM's paged decode attention for Blackwell, from FlashInfer, planned on the device.

Written against ``flashinfer-python`` 0.6.12, `flashinfer.decode.trtllm_batch_decode_with_kv_cache`.
Its query tokens are the last of their request and masked causally; a window counts positions.
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

#: The library has kernels for more widths, but lists them nowhere.
HEAD_DIMS = (64, 128)
#: 8 MiB of counters, the softmax statistics, and scratch for keys split over thread blocks.
WORKSPACE_BYTES = 256 * 2**20


class TrtllmMhaBackend(PagedBackend):
    """`trtllm-gen` attention over keys and values of their own; see `PagedBackend`."""

    name: ClassVar[str] = "trtllm_mha"
    capabilities: ClassVar[Capabilities] = Capabilities(
        graphs=True, trees=False, lists=False, extend=False, cap=False,
        dtypes=(torch.float16, torch.bfloat16),
    )
    module: ClassVar[str] = "flashinfer.decode"
    package: ClassVar[str] = "flashinfer-python"
    majors: ClassVar[tuple[int, ...]] = (10,)
    page_sizes: ClassVar[tuple[int, ...]] = (16, 32, 64)
    scales: ClassVar[Scales] = Scales()

    def __init__(self, config: AttnConfig, device: torch.device) -> None:
        super().__init__(config, device)
        # zeros: the counters must be 0 at first, and the kernels leave them so
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    @staticmethod
    def geometry(config: AttnConfig) -> list[str]:
        """Say which widths stand in the way."""
        if config.latent:
            return ["latent layers are trtllm_mla's"]
        found = []
        if config.head_dim not in HEAD_DIMS:
            found.append(f"head_dim must be 64 or 128, got {config.head_dim}")
        if config.v_head_dim != config.head_dim:
            found.append(
                f"v_head_dim must equal head_dim {config.head_dim}, got {config.v_head_dim}"
            )
        return found

    def bind_causal(self, plan: AttnPlan) -> BoundAttention:
        """Bind to decode, chain verify and chain draft steps."""
        return TrtllmMha(
            self.config, self.scales, self.library.trtllm_batch_decode_with_kv_cache,
            self._workspace, BlockTable.over(plan, self.page_size),
        )


@dataclass(frozen=True)
class TrtllmMha:
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
        blocks = self.blocks
        bmm1_scale, bmm2_scale = self.scales.folded(self.config.sm_scale)
        self.function(
            query=q, kv_cache=(blocks.pages(k_cache), blocks.pages(v_cache)), kv_layout="NHD",
            workspace_buffer=self.workspace, block_tables=blocks.table, seq_lens=blocks.lens,
            max_seq_len=blocks.max_keys, q_len_per_req=blocks.plan.layout.q_len,
            bmm1_scale=bmm1_scale, bmm2_scale=bmm2_scale, window_left=self.config.window_left,
            out=out, backend="trtllm-gen", lse=lse, return_lse=lse is not None,
        )
        if lse is not None:
            lse.mul_(math.log(2))  # the library's is of base 2
