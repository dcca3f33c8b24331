"""CUTLASS MLA decoding for Blackwell, from `sgl_kernel`, planned on the device.

Written against ``sglang-kernel`` 0.4.6, `cutlass_mla_decode` and `cutlass_mla_get_workspace_size`.
It takes one query token per request and has no mask, so every query token of a chain is a request
of its own, whose list of keys ends at that token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from specattn.backends.paged import BlockTable, BoundPages, PagedBackend, latent_reasons
from specattn.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from specattn.backends.base import BoundAttention, Capabilities
    from specattn.config import AttnConfig
    from specattn.plan import AttnPlan

RANK, ROPE, MAX_HEADS = 512, 64, 128


class CutlassMlaBackend(PagedBackend):
    """CUTLASS attention over one pool of latent rows; see `PagedBackend`."""

    name: ClassVar[str] = "cutlass_mla"
    capabilities: ClassVar[Capabilities] = replace(
        PagedBackend.capabilities, window=False, cap=False, lse=False
    )
    module: ClassVar[str] = "sgl_kernel"
    package: ClassVar[str] = "sglang-kernel"
    majors: ClassVar[tuple[int, ...]] = (10,)
    page_sizes: ClassVar[tuple[int, ...]] = (16, 32, 64, 128)
    page_size: ClassVar[int] = 128  # what SGLang runs it with

    def __init__(self, config: AttnConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._workspace = torch.empty(0, dtype=torch.uint8, device=device)

    @staticmethod
    def geometry(config: AttnConfig) -> list[str]:
        """Say which head counts and widths stand in the way."""
        found = latent_reasons(config, [(RANK, ROPE)])
        if config.num_qo_heads > MAX_HEADS:
            found.append(f"num_qo_heads is limited to {MAX_HEADS}, got {config.num_qo_heads}")
        return found

    def bind_causal(self, plan: AttnPlan) -> BoundAttention:
        """Bind to decode, chain verify and chain draft steps."""
        blocks = BlockTable.over(plan, self.page_size, lists=plan.layout.q_len)
        size = self.library.cutlass_mla_get_workspace_size(
            max_seq_len=blocks.max_keys, num_batches=len(blocks.lens), num_kv_splits=1
        )
        return CutlassMla(self.config, blocks, self.library.cutlass_mla_decode, self._scratch(size))

    def _scratch(self, size: int) -> Tensor:
        """Return workspace that everything bound here shares: forwards run one after another."""
        if len(self._workspace) < size:
            self._workspace = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self._workspace


@dataclass(frozen=True)
class CutlassMla(BoundPages):
    """One call in which every query token is a request."""

    function: Callable[..., Any]
    workspace: Tensor

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`.

        Raises
        ------
        UnsupportedError
            If an lse is asked for: the library returns none.
        """
        if lse is not None:
            raise UnsupportedError("backend 'cutlass_mla'", ["the library returns no lse"])
        result = self.function(
            q_nope=q[..., :RANK],
            q_pe=q[..., RANK:],
            kv_c_and_k_pe_cache=self.blocks.pages(k_cache).squeeze(2),
            seq_lens=self.blocks.lens,
            page_table=self.blocks.table,
            workspace=self.workspace,
            sm_scale=self.config.sm_scale,
            num_kv_splits=1,  # other counts are chosen on the host, from lengths
        )
        out.copy_(result)
