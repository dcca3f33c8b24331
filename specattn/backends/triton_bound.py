"""What the Triton backends share: the interpreter, reasons, and bound attention."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar, Self

import torch

from specattn.backends.base import BoundAttention, JointFill
from specattn.plan import CsrPlan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from specattn.config import AttnConfig, KVScales
    from specattn.kernels.attention import TreeAttention
    from specattn.kernels.attention.triton_plan import PlanRequest
    from specattn.plan import AttnPlan

log = logging.getLogger(__name__)

#: The first GPUs that convert e4m3: Ada, then Hopper.
FLOAT8_SINCE = (8, 9)


def platform_reasons(config: AttnConfig | None, device: torch.device) -> list[str]:
    """Say why no Triton kernel can serve ``config`` on ``device``."""
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
    if config is not None and device.type == "cpu" and config.dtype == torch.bfloat16:
        found.append("Triton's interpreter does not serve bfloat16; use float32 or float16")
    return found


def float8_reasons(config: AttnConfig, device: torch.device) -> list[str]:
    """Name what stands in the way of reading float8 keys and values."""
    if config.kv_dtype is None:
        return []
    found = []
    if config.dtype == torch.float32:
        found.append("a float8 KV cache needs float16 or bfloat16 queries, got float32")
    if device.type == "cuda" and torch.cuda.is_available():
        have = torch.cuda.get_device_capability(device)
        if have < FLOAT8_SINCE:
            found.append(f"a float8 KV cache needs compute capability 8.9, got {have[0]}.{have[1]}")
    return found


def _interpreting() -> bool:
    """Whether Triton's library was loaded for the interpreter, for good."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    return isinstance(tl.sum, InterpretedFunction)


def interpret() -> None:
    """Switch Triton's interpreter on, once, and say so."""
    if "TRITON_INTERPRET" in os.environ:
        return
    os.environ["TRITON_INTERPRET"] = "1"
    log.warning("no CUDA device: Triton kernels run in Triton's interpreter, which is slow")


@dataclass(frozen=True)
class TritonBound(BoundAttention):
    """Attention over one plan.

    ``request`` fills the kernels' own plan; ``inputs`` are tensors that `TreeAttention.run` takes.
    """

    plan: AttnPlan | CsrPlan
    kernel: TreeAttention
    request: PlanRequest
    inputs: Mapping[str, Tensor]

    def for_layer(self, scales: KVScales | None, *, prefetch: bool) -> Self:
        """Return the same with a layer's scales; see `BoundAttention.for_layer`."""
        if scales is None and not self.prefetches:
            return self
        return replace(self, kernel=self.kernel.for_layer(scales, prefetch=prefetch))

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        self.kernel.run(q, k_cache, v_cache, out, lse, **self.inputs)


@dataclass(frozen=True)
class TritonCsr(TritonBound, JointFill):
    """Draft decode from index lists."""

    @staticmethod
    def fill_together(bounds: Sequence[TritonBound]) -> None:
        """Split the work of all ``bounds``, from the lengths on the device."""
        from specattn.kernels.attention.triton_plan import fill_plans

        fill_plans([bound.request for bound in bounds])


@dataclass(frozen=True)
class TritonTree(TritonCsr):
    """A tree mode, whose later layers prefetch the prefix."""

    prefetches: ClassVar[bool] = True


@dataclass(frozen=True)
class TritonDeterministic(TritonBound):
    """Either of them in the deterministic mode.

    In draft steps and over index lists, what a query token sees is written after `fill`: ``late``
    says that `run` lists the paths.
    """

    late: bool

    def fill(self) -> None:
        """Split the work, and list the paths if they are known."""
        self.kernel.kernels.fill(self.request)
        if not self.late:
            self.kernel.trace(**self.inputs)

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        if self.late:
            self.kernel.trace(**self.inputs)
        super().run(q, k_cache, v_cache, out, lse)


def bind_kernel(
    plan: AttnPlan | CsrPlan, kernel: TreeAttention, *, deterministic: bool
) -> TritonBound:
    """Bind the kernels of a bucket to its plan."""
    if isinstance(plan, CsrPlan):
        request = kernel.plan_request_csr(plan.kv_indptr)
        inputs, late = {"indices": plan.kv_indices}, True
    else:
        request = kernel.plan_request(
            plan.seq_lens, plan.req_pool_indices, plan.req_to_token.stride(0)
        )
        inputs = {
            "indices": plan.req_to_token,
            "positions": plan.positions,
            "tail_slots": plan.tail_slots,
            "tail_positions": plan.tail_positions,
            "tail_words": plan.tail_words,
        }
        late = plan.layout.tail > plan.layout.q_len
    if deterministic:
        return TritonDeterministic(plan, kernel, request, inputs, late)
    return (TritonCsr if isinstance(plan, CsrPlan) else TritonTree)(plan, kernel, request, inputs)
