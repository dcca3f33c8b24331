"""Attention through FlashInfer's paged wrappers (https://arxiv.org/abs/2501.01005).

Pattern B: a wrapper plans on the host before every step and copies its plan into buffers of fixed
address, which a recorded ``run`` reads. Pages are single slots, so that any pool and any tail
serve without copies; trees are custom masks, packed on the device from the ancestor words. All
kernels are FlashInfer's FA2 ones: only those take masks, and they exist for every GPU it supports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from specattn.backends.base import Capabilities
from specattn.backends.flashinfer_base import FlashInferLayer, device_reasons, scale_reasons
from specattn.backends.flashinfer_bound import (
    FlashInferDecode,
    FlashInferExtend,
    FlashInferRows,
    FlashInferTree,
)
from specattn.backends.flashinfer_plan import BranchLists, RequestLists
from specattn.plan import AttnPlan, CsrPlan, ExtendPlan, Plan

if TYPE_CHECKING:
    from specattn.backends.base import BoundAttention
    from specattn.config import AttnConfig

HEAD_DIMS = (64, 128, 256)


class FlashInferBackend(FlashInferLayer):
    """FlashInfer's decode and prefill wrappers.

    Parameters
    ----------
    config : AttnConfig
        The layer geometry.
    device : torch.device
        A CUDA device.

    Attributes
    ----------
    two_passes_from : int or None
        Contexts (columns of ``req_to_token``) from which a tree without a window is attended in
        two passes, prefix and tail, merged by lse, instead of one whose mask covers both. A
        recorded step keeps the kind it was bound with, so the longest context decides. None is
        never; subclass for another limit.
    """

    name: ClassVar[str] = "flashinfer"
    capabilities: ClassVar[Capabilities] = Capabilities(
        graphs=True, host_plan=True, dtypes=(torch.float16, torch.bfloat16)
    )
    two_passes_from: ClassVar[int | None] = 8192

    @staticmethod
    def reasons(config: AttnConfig | None, device: torch.device) -> list[str]:
        """Name what stands in the way."""
        found = device_reasons(device)
        if config is None:
            return found
        if config.dtype not in FlashInferBackend.capabilities.dtypes:
            found.append(f"dtype must be float16 or bfloat16, got {config.dtype}")
        if config.head_dim not in HEAD_DIMS:
            found.append(f"head_dim must be 64, 128 or 256, got {config.head_dim}")
        if config.v_head_dim != config.head_dim:
            found.append(f"v_head_dim must equal head_dim, got {config.v_head_dim}")
        return found + scale_reasons(config)

    def bind(self, plan: Plan) -> BoundAttention:
        """Bind to the plan's kind."""
        if isinstance(plan, CsrPlan):
            return FlashInferDecode(self, BranchLists(plan, self.name))
        if isinstance(plan, ExtendPlan):
            return FlashInferExtend(self, plan)
        if plan.layout.causal and plan.layout.q_len == 1:
            lists = RequestLists(plan, plan.batch, self.config.window_left, self.name)
            return FlashInferDecode(self, lists)
        if self._in_two_passes(plan):
            return FlashInferTree(self, plan)
        return FlashInferRows(self, plan)

    def _in_two_passes(self, plan: AttnPlan) -> bool:
        """Whether a tree's prefix is worth a pass of its own; a window needs the mask there too."""
        if plan.layout.causal or self.config.window_left >= 0 or self.two_passes_from is None:
            return False
        return plan.req_to_token.shape[1] >= self.two_passes_from
