"""Attention in Triton: one kernel for every tree mode, planned on the device.

On a machine without CUDA the kernels run in Triton's interpreter, which is switched on here; it
is exact and slow, and meant for tests.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from specattn.backends.base import Capabilities
from specattn.plan import AttnPlan, CsrPlan, ExtendPlan, Plan

if TYPE_CHECKING:
    from torch import Tensor

    from specattn.backends.base import BoundAttention
    from specattn.config import AttnConfig
    from specattn.kernels.tree_attention import TreeAttention

log = logging.getLogger(__name__)

MAX_HEAD_DIM = 256


class TritonBackend:
    """The library's own kernels.

    Parameters
    ----------
    config : AttnConfig
        The layer geometry.
    device : torch.device
        A CUDA device, or the CPU (interpreter).
    """

    name: ClassVar[str] = "triton"
    capabilities: ClassVar[Capabilities] = Capabilities(graphs=True)

    def __init__(self, config: AttnConfig, device: torch.device) -> None:
        if device.type == "cpu":
            _interpret()
        self.config = config
        self.device = device
        self._workspace: Tensor | None = None

    @staticmethod
    def reasons(config: AttnConfig | None, device: torch.device) -> list[str]:
        """Name what stands in the way."""
        found = []
        if find_spec("triton") is None:
            found.append("triton is not installed (pip install triton, Linux only)")
        if device.type not in ("cuda", "cpu"):
            found.append(f"Triton has no target for {device.type} devices")
        if device.type == "cpu" and "triton" in sys.modules and not _interpreting():
            found.append(
                "Triton was imported before its interpreter was switched on; "
                "set TRITON_INTERPRET=1 before Python starts"
            )
        if config is not None and max(config.head_dim, config.v_head_dim) > MAX_HEAD_DIM:
            found.append(f"head_dim is limited to {MAX_HEAD_DIM}, got {config.head_dim}")
        if config is not None and device.type == "cpu" and config.dtype == torch.bfloat16:
            found.append("Triton's interpreter does not serve bfloat16; use float32 or float16")
        return found

    def bind(self, plan: Plan) -> BoundAttention:
        """Bind to the plan's kind."""
        if isinstance(plan, AttnPlan):
            layout = plan.layout
            kernel = self._kernel(plan.batch, layout.q_len, layout.tail, csr=False)
            return TritonTree(plan, kernel)
        if isinstance(plan, CsrPlan):
            kernel = self._kernel(len(plan.kv_indptr) - 1, 1, 0, csr=True)
            return TritonCsr(plan, kernel)
        return TritonExtend(self.config, plan)

    def _kernel(self, batch: int, q_len: int, tail_len: int, *, csr: bool) -> TreeAttention:
        from specattn.kernels.tree_attention import TreeAttention

        config = self.config
        shape: dict[str, Any] = {
            "batch": batch, "q_len": q_len, "num_qo_heads": config.num_qo_heads,
            "num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim,
            "v_head_dim": config.v_head_dim, "dtype": config.dtype, "device": self.device,
        }
        return TreeAttention(
            **shape, tail_len=tail_len, sm_scale=config.sm_scale,
            window_left=config.window_left, logit_cap=config.logit_cap, csr=csr,
            workspace=self._scratch(TreeAttention.workspace_bytes(**shape)),
        )

    def _scratch(self, size: int) -> Tensor:
        """Return workspace that everything bound here shares: forwards run one after another."""
        if self._workspace is None or len(self._workspace) < size:
            self._workspace = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self._workspace


def _interpreting() -> bool:
    """Whether Triton's own library was loaded for the interpreter; it cannot change its mind."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    return isinstance(tl.sum, InterpretedFunction)


def _interpret() -> None:
    if "TRITON_INTERPRET" in os.environ:
        return
    os.environ["TRITON_INTERPRET"] = "1"
    log.warning("no CUDA device: Triton kernels run in Triton's interpreter, which is slow")


@dataclass(frozen=True)
class TritonTree:
    """A tree mode."""

    plan: AttnPlan
    kernel: TreeAttention

    def fill(self) -> None:
        """Cut the work into equal chunks, from the lengths on the device."""
        plan = self.plan
        self.kernel.plan(plan.seq_lens, plan.req_pool_indices, plan.req_to_token.stride(0))

    def schedule(self, seq_lens_cpu: Tensor | None) -> None:
        """Nothing to plan on the host."""

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        plan = self.plan
        self.kernel.run(
            q, k_cache, v_cache, out, lse, indices=plan.req_to_token, positions=plan.positions,
            tail_slots=plan.tail_slots, tail_positions=plan.tail_positions,
            tail_words=plan.tail_words,
        )


@dataclass(frozen=True)
class TritonCsr:
    """Draft decode from index lists."""

    plan: CsrPlan
    kernel: TreeAttention

    def fill(self) -> None:
        """Cut the work into equal chunks, from the lists' lengths on the device."""
        self.kernel.plan_csr(self.plan.kv_indptr)

    def schedule(self, seq_lens_cpu: Tensor | None) -> None:
        """Nothing to plan on the host."""

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        self.kernel.run(
            q, k_cache, v_cache, out, lse, indices=self.plan.kv_indices, positions=None,
            tail_slots=None, tail_positions=None, tail_words=None,
        )


@dataclass(frozen=True)
class TritonExtend:
    """A ragged prompt extend."""

    config: AttnConfig
    plan: ExtendPlan

    def fill(self) -> None:
        """Nothing to derive."""

    def schedule(self, seq_lens_cpu: Tensor | None) -> None:
        """Nothing to plan on the host."""

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        from specattn.kernels.extend_attention import extend_attention

        plan, config = self.plan, self.config
        extend_attention(
            q, k_cache, v_cache, out, lse,
            qo_indptr=plan.qo_indptr, seq_lens=plan.seq_lens,
            req_pool_indices=plan.req_pool_indices, req_to_token=plan.req_to_token,
            max_q_len=plan.max_q_len, sm_scale=config.sm_scale,
            window_left=config.window_left, logit_cap=config.logit_cap,
        )
