"""Attention in Triton.

One kernel serves every tree mode and is planned on the device. On a machine without CUDA the
kernels run in Triton's interpreter, which is switched on here; it is exact and slow, and meant for
tests.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from specattn.backends.base import BoundAttention, Capabilities, FunctionAttention, JointFill
from specattn.buffers import ReadOnly
from specattn.config import FLOAT8
from specattn.kernels.attention import DeterministicSplits, TreeAttention, extend_attention
from specattn.kernels.attention.tiles import SHARE_FROM
from specattn.plan import AttnPlan, CsrPlan, ExtendPlan, Plan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from specattn.config import AttnConfig, KVScales
    from specattn.kernels.attention.plan import PlanRequest
    from specattn.kernels.fused.fp8 import RowsFormat, ScaledRows

log = logging.getLogger(__name__)

MAX_HEAD_DIM = 256
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


class TritonBackend(ReadOnly):
    """The library's own kernels, on CUDA or in the interpreter on CPUs."""

    name: ClassVar[str] = "triton"
    share_prefixes: ClassVar[bool] = False
    kernels: ClassVar[type[TreeAttention]] = TreeAttention
    capabilities: ClassVar[Capabilities] = Capabilities(
        graphs=True, kv_dtypes=(FLOAT8,), deterministic=True, sinks=True
    )

    def __init__(self, config: AttnConfig, device: torch.device) -> None:
        if device.type == "cpu":
            interpret()
        self.config = config
        self.device = device
        self._workspace = torch.empty(0, dtype=torch.uint8, device=device)

    @staticmethod
    def reasons(config: AttnConfig | None, device: torch.device) -> list[str]:
        """Name what stands in the way."""
        found = platform_reasons(config, device)
        if config is None:
            return found
        if max(config.head_dim, config.v_head_dim) > MAX_HEAD_DIM:
            found.append(f"head_dim is limited to {MAX_HEAD_DIM}, got {config.head_dim}")
        return found + float8_reasons(config, device)

    def bind(self, plan: Plan) -> BoundAttention:
        """Bind to the plan's kind."""
        if isinstance(plan, ExtendPlan):
            return self._extend(plan)
        return bind_kernel(plan, self._kernel(plan), deterministic=self.config.deterministic)

    def _extend(self, plan: ExtendPlan) -> BoundAttention:
        config = self.config
        options = prompts(plan) | {
            "page_size": plan.page_size,
            "sm_scale": config.sm_scale,
            "window_left": config.window_left,
            "logit_cap": config.logit_cap,
            "deterministic": config.deterministic,
        }
        return FunctionAttention(plan, extend_attention, options)

    def _kernel(self, plan: AttnPlan | CsrPlan) -> TreeAttention:
        config, splits = self.config, None
        if config.deterministic:
            indices = plan.kv_indices if isinstance(plan, CsrPlan) else plan.req_to_token
            splits = DeterministicSplits(indices.shape[-1], config.split_keys)
        return self.kernels(
            **bucket(plan),
            num_qo_heads=config.num_qo_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            v_head_dim=config.v_head_dim,
            dtype=config.dtype,
            device=self.device,
            sm_scale=config.sm_scale,
            window_left=config.window_left,
            logit_cap=config.logit_cap,
            page_size=1 if isinstance(plan, CsrPlan) else plan.layout.page_size,
            workspace=self.workspace,
            kv_dtype=config.kv_dtype,
            deterministic=splits,
            share_from=SHARE_FROM if self.shares else 0,
        )

    @property
    def shares(self) -> bool:
        """Whether its kernels share prefixes: those of latent layers cannot."""
        return self.share_prefixes and self.kernels is TreeAttention

    def workspace(self, size: int) -> Tensor:
        """Return at least ``size`` bytes; what was returned before stays valid.

        All that the backend binds shares them: forwards run one after another.
        """
        if len(self._workspace) < size:
            self._workspace = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self._workspace


class TritonSharingBackend(TritonBackend):
    """The same kernels; keys of a common prefix are read once.

    Requests whose prefixes begin in the same slots have one in common. Layers with a window,
    deterministic ones and index lists read keys as without. See docs/backends.md.
    """

    name = "triton_sharing"
    share_prefixes = True


def bucket(plan: AttnPlan | CsrPlan) -> dict[str, Any]:
    """Return the numbers of a plan's bucket, as `TreeAttention` takes them."""
    if isinstance(plan, CsrPlan):
        return {"batch": len(plan.kv_indptr) - 1, "q_len": 1, "tail_len": 0, "csr": True}
    return {"batch": plan.batch, "q_len": plan.layout.q_len, "tail_len": plan.layout.tail}


def prompts(plan: ExtendPlan) -> dict[str, Any]:
    """Return the tensors of prompts, as `extend_attention` takes them."""
    return {
        "qo_indptr": plan.qo_indptr,
        "seq_lens": plan.seq_lens,
        "req_pool_indices": plan.req_pool_indices,
        "req_to_token": plan.req_to_token,
        "max_q_len": plan.max_q_len,
    }


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

    def with_sinks(self, sinks: Tensor) -> Self:
        """Return the same with a layer's sinks; see `BoundAttention.with_sinks`."""
        return replace(self, kernel=self.kernel.with_sinks(sinks))

    def fill(self) -> None:
        """Split the work, from what is on the device."""
        self.request.fill()

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        self.kernel.run(q, k_cache, v_cache, out, lse, **self.inputs)

    def rows_for(
        self, how: RowsFormat, q: Tensor, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor | ScaledRows:
        """Attend for a product; see `BoundAttention.rows_for`."""
        if not self.kernel.quantises(how):
            return super().rows_for(how, q, k_cache, v_cache)
        return self.kernel.scaled(q, k_cache, v_cache, how, **self.inputs)


@dataclass(frozen=True)
class TritonTree(TritonBound, JointFill):
    """A tree mode, whose later layers prefetch the prefix, or index lists."""

    @property
    def prefetches(self) -> bool:
        """Whether `for_layer` makes use of ``prefetch``: lists hold new keys, too."""
        return not self.kernel.csr

    @staticmethod
    def fill_together(bounds: Sequence[TritonBound]) -> None:
        """Split the work of all ``bounds``, from the lengths on the device."""
        from specattn.kernels.attention.plan import fill_plans

        fill_plans([bound.request for bound in bounds])


@dataclass(frozen=True)
class TritonDeterministic(TritonBound):
    """Either of them in the deterministic mode.

    In draft steps and over index lists, what a query token sees is written after `fill`: ``late``
    says that `run` lists the paths.
    """

    late: bool

    def fill(self) -> None:
        """Split the work, and list the paths if they are known."""
        super().fill()
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
        request = kernel.plan_csr(plan.kv_indptr)
        inputs, late = {"indices": plan.kv_indices}, True
    else:
        table = plan.req_to_token
        request = kernel.plan(plan.seq_lens, plan.req_pool_indices, table.stride(0), table=table)
        inputs = {
            "indices": plan.req_to_token,
            "positions": plan.positions,
            "tail_slots": plan.tail_slots,
            "tail_positions": plan.tail_positions,
            "tail_words": plan.tail_words,
        }
        late = plan.grows
    if deterministic:
        return TritonDeterministic(plan, kernel, request, inputs, late)
    return TritonTree(plan, kernel, request, inputs)
