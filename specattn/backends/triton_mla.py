"""Absorbed multi-head latent attention in Triton, over one pool of latent rows.

DeepSeek-V2 (arXiv:2405.04434): queries carry the key projection, all heads read the same row per
token, and the row's latent part is the value, too. See docs/mla.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from specattn.backends.base import (
    BoundAttention,
    Capabilities,
    FunctionAttention,
    lists_refused,
    undeclared,
)
from specattn.backends.triton import TritonBackend, platform_reasons, prompts
from specattn.kernels.mla import MlaAttention, mla_extend
from specattn.plan import CsrPlan, ExtendPlan, Plan

if TYPE_CHECKING:
    import torch

    from specattn.config import AttnConfig
    from specattn.kernels.attention import TreeAttention

# what the accumulator and the tiles in shared memory are sized for
MAX_RANK, MAX_ROPE = 512, 64


class TritonMlaBackend(TritonBackend):
    """The library's own kernels for ``latent`` layers; they share no prefixes."""

    name: ClassVar[str] = "triton_mla"
    kernels: ClassVar[type[TreeAttention]] = MlaAttention
    capabilities: ClassVar[Capabilities] = Capabilities(
        graphs=True, lists=False, window=False, cap=False
    )

    @staticmethod
    def reasons(config: AttnConfig | None, device: torch.device) -> list[str]:
        """Name what stands in the way."""
        found = platform_reasons(config, device)
        return found if config is None else found + _geometry(config)

    def bind(self, plan: Plan) -> BoundAttention:
        """Bind to the plan's kind; an UnsupportedError for index lists."""
        if isinstance(plan, CsrPlan):
            raise lists_refused(self.name)
        return super().bind(plan)

    def _extend(self, plan: ExtendPlan) -> BoundAttention:
        options = prompts(plan) | {"sm_scale": self.config.sm_scale}
        return FunctionAttention(plan, mla_extend, options)


def _geometry(config: AttnConfig) -> list[str]:
    if not config.latent:
        return ["only latent layers are served (AttnConfig.latent)"]
    found = []
    if config.v_head_dim > MAX_RANK:
        found.append(f"v_head_dim is limited to {MAX_RANK}, got {config.v_head_dim}")
    rope = config.head_dim - config.v_head_dim
    if rope > MAX_ROPE:
        found.append(f"head_dim - v_head_dim is limited to {MAX_ROPE}, got {rope}")
    return found + undeclared(config, TritonMlaBackend.capabilities)
