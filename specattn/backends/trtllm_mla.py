"""TRT-LLM's absorbed MLA decoding for Blackwell, from FlashInfer, planned on the device.

Written against ``flashinfer-python`` 0.6.12,
`flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla`. Its block table must be a multiple of 128
keys wide; the query tokens of a request are masked causally.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from specattn.backends.paged import PagedBackend, latent_reasons
from specattn.backends.trtllm import BoundTrtllm, TrtllmBackend

if TYPE_CHECKING:
    from torch import Tensor

    from specattn.backends.base import Capabilities
    from specattn.config import AttnConfig

#: By latent rank, the width of the model's expanded heads without their rope part.
NOPE_DIMS = {512: 128, 256: 64}
ROPE = 64


@dataclass(frozen=True)
class TrtllmMla(BoundTrtllm):
    """Over one pool of latent rows."""

    def own(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> dict[str, Any]:
        """Return the arguments that are this function's own."""
        rank = self.config.v_head_dim
        return {
            "query": q.unflatten(0, self.shape),
            "out": out.unflatten(0, self.shape),
            "kv_cache": self.blocks.pages(k_cache).transpose(1, 2),
            "qk_nope_head_dim": NOPE_DIMS[rank],
            "kv_lora_rank": rank,
            "qk_rope_head_dim": ROPE,
        }


class TrtllmMlaBackend(TrtllmBackend):
    """`trtllm-gen` attention over one pool of latent rows; see `PagedBackend`."""

    name: ClassVar[str] = "trtllm_mla"
    capabilities: ClassVar[Capabilities] = replace(
        PagedBackend.capabilities, window=False, cap=False, dtypes=(torch.bfloat16,)
    )
    module: ClassVar[str] = "flashinfer.mla"
    function: ClassVar[str] = "trtllm_batch_decode_with_kv_cache_mla"
    page_sizes: ClassVar[tuple[int, ...]] = (32, 64)
    bound: ClassVar[type[BoundTrtllm]] = TrtllmMla

    @staticmethod
    def geometry(config: AttnConfig) -> list[str]:
        """Say which widths stand in the way."""
        return latent_reasons(config, [(rank, ROPE) for rank in NOPE_DIMS])
