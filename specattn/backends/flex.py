"""Attention through torch's FlexAttention: any tree as a mask function over the ancestor words.

Correctness first: keys are gathered per request and padded to the longest, and everything runs in
float32 (FlexAttention: https://arxiv.org/abs/2412.05496). It is compiled where there are
compilers, and runs eagerly elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from specattn.backends.base import BoundAttention, Capabilities
from specattn.backends.flex_kernel import FlexKernel, Keys
from specattn.cuda_graph.capture_guard import Settable
from specattn.plan import AttnPlan, CsrPlan, ExtendPlan, Plan

if TYPE_CHECKING:
    from torch import Tensor

    from specattn.config import AttnConfig


class FlexBackend(Settable):
    """FlexAttention; no graphs, because it sizes its gather by the lengths.

    Parameters
    ----------
    config : AttnConfig
        The layer geometry.
    device : torch.device
        The CPU or a CUDA device.

    Attributes
    ----------
    compiled : bool
        Whether to compile where that is possible; subclass with False to run eagerly everywhere.
    """

    name: ClassVar[str] = "flex"
    capabilities: ClassVar[Capabilities] = Capabilities()
    compiled: ClassVar[bool] = True

    def __init__(self, config: AttnConfig, device: torch.device) -> None:
        self.config = config
        self.kernel = FlexKernel(config, device, compiled=self.compiled)

    @staticmethod
    def reasons(config: AttnConfig | None, device: torch.device) -> list[str]:
        """Name what stands in the way."""
        found = []
        if find_spec("torch.nn.attention.flex_attention") is None:
            found.append(f"torch {torch.__version__} has no FlexAttention")
        if device.type not in ("cpu", "cuda"):
            found.append(f"FlexAttention is not tested on {device.type} devices")
        return found

    def bind(self, plan: Plan) -> BoundAttention:
        """Bind to the plan's kind."""
        if isinstance(plan, AttnPlan):
            return FlexTree(self, plan)
        if isinstance(plan, CsrPlan):
            return FlexCsr(self, plan)
        return FlexExtend(self, plan)


def _put(
    out: Tensor, lse: Tensor | None, values: Tensor, sums: Tensor | None, live: Any = ...
) -> None:
    out.copy_(values[live].reshape(out.shape))
    if lse is not None:
        assert sums is not None
        lse.copy_(sums[live].reshape(lse.shape))


@dataclass(frozen=True)
class FlexTree(BoundAttention):
    """A tree mode: keys are the prefix, padded to the longest, then the tail."""

    backend: FlexBackend
    plan: AttnPlan

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        plan, left = self.plan, self.backend.config.window_left
        width = int(plan.seq_lens.max())
        place = torch.arange(width, device=q.device)
        used = place < plan.seq_lens[:, None]  # [B, width]
        if left >= 0:
            used &= place >= plan.positions.amin(1, keepdim=True) - left
        table = plan.req_to_token[plan.req_pool_indices, :width]
        keys = Keys(
            torch.cat([table, plan.tail_slots], 1),
            torch.cat([used, torch.ones_like(plan.tail_slots, dtype=torch.bool)], 1),
            plan.seq_lens,
            plan.positions,
            plan.tail_positions,
            plan.tail_words,
            *((0, left) if left >= 0 else ()),
        )
        q = q.view(plan.batch, plan.layout.q_len, *q.shape[1:])
        found = self.backend.kernel(q, k_cache, v_cache, keys, lse=lse is not None)
        _put(out, lse, *found)


@dataclass(frozen=True)
class FlexCsr(BoundAttention):
    """Draft decode from index lists: a batch of one-token rows."""

    backend: FlexBackend
    plan: CsrPlan

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        plan, left = self.plan, self.backend.config.window_left
        begin = plan.kv_indptr[:-1, None].long()
        lens = plan.kv_indptr.diff()
        # a block mask needs a key, if only an invisible one
        place = torch.arange(max(int(lens.max()), 1), device=q.device)
        used = place < lens[:, None]
        last = lens[:, None].long() - 1  # [rows, 1]
        if left >= 0:
            used &= last - place <= left
        slots = plan.kv_indices[(begin + place).masked_fill(~used, 0)]
        keys = Keys.listed(slots, used, lens, last, left)
        found = self.backend.kernel(q[:, None], k_cache, v_cache, keys, lse=lse is not None)
        _put(out, lse, *found)


@dataclass(frozen=True)
class FlexExtend(BoundAttention):
    """A ragged prompt extend: queries and keys padded to the longest request."""

    backend: FlexBackend
    plan: ExtendPlan

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        plan, left = self.plan, self.backend.config.window_left
        if not len(q):
            return
        begin, end = plan.qo_indptr[:-1, None].long(), plan.qo_indptr[1:, None]
        step = torch.arange(plan.max_q_len, device=q.device)
        live = begin + step < end  # [B, T]
        place = torch.arange(plan.max_seq_len, device=q.device)
        prefix = plan.seq_lens.long()[:, None]
        lens = prefix + (end - begin)
        used = place < lens  # [B, N]
        if left >= 0:
            used &= place >= prefix - left
        slots = plan.req_to_token[plan.req_pool_indices, : plan.max_seq_len]
        keys = Keys.listed(slots, used, lens[:, 0], prefix + step, left)
        found = self.backend.kernel(
            q[(begin + step).masked_fill(~live, 0)], k_cache, v_cache, keys, lse=lse is not None
        )
        _put(out, lse, *found, live)
