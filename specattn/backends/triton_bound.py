"""What the Triton backends share: the interpreter, reasons, workspace, and bound tree kernels."""

from __future__ import annotations

import logging
import os
import sys
from abc import abstractmethod
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar, Self

import torch

from specattn.backends.base import JointFill

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from specattn.config import AttnConfig, KVScales
    from specattn.kernels.attention.tree import TreeAttention
    from specattn.kernels.attention.triton_plan import PlanRequest
    from specattn.plan import AttnPlan, CsrPlan

log = logging.getLogger(__name__)

#: The first GPUs that convert e4m3: Ada, then Hopper.
FLOAT8_SINCE = (8, 9)


def platform_reasons(config: AttnConfig | None, device: torch.device) -> list[str]:
    """Name what stands in the way of any Triton kernel for ``config`` on ``device``."""
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
    """Whether Triton's own library was loaded for the interpreter; it cannot change its mind."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    return isinstance(tl.sum, InterpretedFunction)


def interpret() -> None:
    """Switch Triton's interpreter on, once, and say so."""
    if "TRITON_INTERPRET" in os.environ:
        return
    os.environ["TRITON_INTERPRET"] = "1"
    log.warning("no CUDA device: Triton kernels run in Triton's interpreter, which is slow")


class Scratch:
    """Workspace that everything a backend binds shares: forwards run one after another.

    Parameters
    ----------
    device : torch.device
        Where it lives.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes: Tensor | None = None

    def of(self, size: int) -> Tensor:
        """Return at least ``size`` bytes; what was returned before stays valid."""
        if self._bytes is None or len(self._bytes) < size:
            self._bytes = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._bytes


class TritonPlanned(JointFill):
    """Bound attention over a plan that is filled in one launch with all others of its kind."""

    @abstractmethod
    def plan_request(self) -> PlanRequest:
        """Return the plan, and the tensors that hold its lengths."""

    @staticmethod
    def fill_together(bounds: Sequence[TritonPlanned]) -> None:
        """Cut the work of all of ``bounds`` into equal chunks, from the lengths on the device."""
        from specattn.kernels.attention.triton_plan import fill_plans

        fill_plans([bound.plan_request() for bound in bounds])


@dataclass(frozen=True)
class TritonTree(TritonPlanned):
    """A tree mode."""

    prefetches: ClassVar[bool] = True
    plan: AttnPlan
    kernel: TreeAttention

    def for_layer(self, scales: KVScales | None, *, prefetch: bool) -> Self:
        """Return the same with a layer's scales; see `BoundAttention.for_layer`."""
        kernel = self.kernel if scales is None else self.kernel.scaled(scales.k, scales.v)
        return replace(self, kernel=kernel.following() if prefetch else kernel)

    def plan_request(self) -> PlanRequest:
        """Return the plan, to be filled from the requests' lengths."""
        plan = self.plan
        return self.kernel.plan_request(
            plan.seq_lens, plan.req_pool_indices, plan.req_to_token.stride(0)
        )

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        plan = self.plan
        self.kernel.run(
            q,
            k_cache,
            v_cache,
            out,
            lse,
            indices=plan.req_to_token,
            positions=plan.positions,
            tail_slots=plan.tail_slots,
            tail_positions=plan.tail_positions,
            tail_words=plan.tail_words,
        )


@dataclass(frozen=True)
class TritonCsr(TritonPlanned):
    """Draft decode from index lists."""

    plan: CsrPlan
    kernel: TreeAttention

    def for_layer(self, scales: KVScales | None, *, prefetch: bool) -> Self:
        """Return the same with a layer's scales; see `BoundAttention.for_layer`."""
        if scales is None:
            return self
        return replace(self, kernel=self.kernel.scaled(scales.k, scales.v))

    def plan_request(self) -> PlanRequest:
        """Return the plan, to be filled from the lists' lengths."""
        return self.kernel.plan_request_csr(self.plan.kv_indptr)

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        self.kernel.run(
            q,
            k_cache,
            v_cache,
            out,
            lse,
            indices=self.plan.kv_indices,
            positions=None,
            tail_slots=None,
            tail_positions=None,
            tail_words=None,
        )
