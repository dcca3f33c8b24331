"""TRT-LLM's paged decode attention for Blackwell, from FlashInfer, planned on the device.

Written against ``flashinfer-python`` 0.6.12, `flashinfer.decode.trtllm_batch_decode_with_kv_cache`.
Its query tokens are the last of their request and masked causally; a window counts positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from specattn.backends.paged import PagedBackend
from specattn.backends.trtllm import BoundTrtllm, TrtllmBackend

if TYPE_CHECKING:
    from torch import Tensor

    from specattn.backends.base import Capabilities
    from specattn.config import AttnConfig

#: The library has kernels for more widths, but lists them nowhere.
HEAD_DIMS = (64, 128)


@dataclass(frozen=True)
class TrtllmMha(BoundTrtllm):
    """Over pools of keys and of values."""

    def own(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> dict[str, Any]:
        """Return the arguments that are this function's own."""
        pages = self.blocks.pages
        return {
            "query": q,
            "kv_cache": (pages(k_cache), pages(v_cache)),
            "kv_layout": "NHD",
            "q_len_per_req": self.shape[1],
            "window_left": self.config.window_left,
            "out": out,
        }


class TrtllmMhaBackend(TrtllmBackend):
    """`trtllm-gen` attention over keys and values of their own; see `PagedBackend`."""

    name: ClassVar[str] = "trtllm_mha"
    capabilities: ClassVar[Capabilities] = replace(PagedBackend.capabilities, cap=False)
    module: ClassVar[str] = "flashinfer.decode"
    function: ClassVar[str] = "trtllm_batch_decode_with_kv_cache"
    page_sizes: ClassVar[tuple[int, ...]] = (16, 32, 64)
    bound: ClassVar[type[BoundTrtllm]] = TrtllmMha

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
