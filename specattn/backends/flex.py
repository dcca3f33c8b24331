"""Attention through torch's FlexAttention: any tree as a mask function over the ancestor words.

Correctness first: keys are gathered per request and padded to the longest, everything runs in
float32, and nothing is compiled, so no C++ or Triton compiler is needed (FlexAttention:
https://arxiv.org/abs/2412.05496).
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from specattn.backends.base import Capabilities, PatternA
from specattn.plan import AttnPlan, CsrPlan, ExtendPlan, Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from specattn.backends.base import BoundAttention
    from specattn.config import AttnConfig

    Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class FlexBackend:
    """FlexAttention without its compiler; eager, because it sizes its gather by the lengths.

    Parameters
    ----------
    config : AttnConfig
        The layer geometry.
    device : torch.device
        The CPU or a CUDA device.
    """

    name: ClassVar[str] = "flex"
    capabilities: ClassVar[Capabilities] = Capabilities()

    def __init__(self, config: AttnConfig, device: torch.device) -> None:
        self.config = config

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
            return FlexTree(self.config, plan)
        if isinstance(plan, CsrPlan):
            return FlexCsr(self.config, plan)
        return FlexExtend(self.config, plan)


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Run FlexAttention's eager code as it is: it would trace every new shape through dynamo."""
    import torch.nn.attention.flex_attention as library

    before = library._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    library._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    try:
        yield
    finally:
        library._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = before


def _gather(cache: Tensor, slots: Tensor, used: Tensor) -> Tensor:
    """Return the rows of ``slots [B, N]`` as ``[B, heads, N, dim]`` float32, 0 where not used.

    Masking the scores would not do: a weight of 0 times a NaN is NaN.
    """
    rows = cache[slots.long().masked_fill(~used, 0)].float()
    return rows.masked_fill(~used[..., None, None], 0).transpose(1, 2)


def _attend(
    config: AttnConfig, q: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, used: Tensor,
    mask: Mask,
) -> tuple[Tensor, Tensor]:
    """Attend ``q [B, T, Hq, D]`` to ``slots [B, N]``: ``[B, T, Hq, Dv]`` and ``[B, T, Hq]``.

    ``used [B, N]`` holds wherever ``mask(b, head, i, j)`` does for any i.
    """
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    cap = config.logit_cap

    def capped(score: Tensor, b: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    batch, q_len = q.shape[:2]
    blocks = create_block_mask(mask, batch, None, q_len, slots.shape[1], device=q.device)
    with _uncompiled():
        out, aux = flex_attention(
            q.float().transpose(1, 2), _gather(k_cache, slots, used),
            _gather(v_cache, slots, used), score_mod=capped if cap else None, block_mask=blocks,
            scale=config.sm_scale, enable_gqa=True, return_aux=AuxRequest(lse=True),
        )
    assert aux.lse is not None
    return out.transpose(1, 2), aux.lse.transpose(1, 2)


def _put(out: Tensor, lse: Tensor | None, values: Tensor, sums: Tensor) -> None:
    out.copy_(values.reshape(out.shape))
    if lse is not None:
        lse.copy_(sums.reshape(lse.shape))


@dataclass(frozen=True)
class FlexTree(PatternA):
    """A tree mode: keys are the prefix, padded to the longest, then the tail."""

    config: AttnConfig
    plan: AttnPlan

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        plan, left = self.plan, self.config.window_left
        width = int(plan.seq_lens.max())
        place = torch.arange(width, device=q.device)
        used = place < plan.seq_lens[:, None]                              # [B, width]
        if left >= 0:
            used &= place >= plan.positions.amin(1, keepdim=True) - left
        table = plan.req_to_token[plan.req_pool_indices, :width]
        _put(out, lse, *_attend(
            self.config, q.view(plan.batch, plan.layout.q_len, *q.shape[1:]), k_cache, v_cache,
            torch.cat([table, plan.tail_slots], 1),
            torch.cat([used, torch.ones_like(plan.tail_slots, dtype=torch.bool)], 1),
            self._mask(width),
        ))

    def _mask(self, width: int) -> Mask:
        plan, left = self.plan, self.config.window_left

        def mask(b: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
            tail = (j - width).clamp(min=0)
            word = plan.tail_words[b, i, tail // 64]
            seen = torch.where(j < width, j < plan.seq_lens[b], word >> tail % 64 & 1 != 0)
            if left < 0:
                return seen
            position = torch.where(j < width, j, plan.tail_positions[b, tail])
            distance = plan.positions[b, i] - position
            return seen & (distance >= 0) & (distance <= left)

        return mask


@dataclass(frozen=True)
class FlexCsr(PatternA):
    """Draft decode from index lists: a batch of one-token rows."""

    config: AttnConfig
    plan: CsrPlan

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        plan, left = self.plan, self.config.window_left
        begin = plan.kv_indptr[:-1, None].long()
        lens = plan.kv_indptr[1:, None] - plan.kv_indptr[:-1, None]        # [rows, 1]
        # a block mask needs a key, if only an invisible one
        place = torch.arange(max(int(lens.max()), 1), device=q.device)
        used = place < lens
        if left >= 0:
            used &= lens - 1 - place <= left
        slots = plan.kv_indices[(begin + place).masked_fill(~used, 0)]

        def mask(b: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return used[b, j]

        _put(out, lse, *_attend(self.config, q[:, None], k_cache, v_cache, slots, used, mask))


@dataclass(frozen=True)
class FlexExtend(PatternA):
    """A ragged prompt extend: queries and keys padded to the longest request."""

    config: AttnConfig
    plan: ExtendPlan

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        plan, left = self.plan, self.config.window_left
        if not len(q):
            return
        begin, end = plan.qo_indptr[:-1, None].long(), plan.qo_indptr[1:, None]
        row = begin + torch.arange(plan.max_q_len, device=q.device)        # [B, T]
        live = row < end
        place = torch.arange(plan.max_seq_len, device=q.device)
        prefix = plan.seq_lens
        used = place < prefix[:, None] + (end - begin)                     # [B, N]
        if left >= 0:
            used &= place >= prefix[:, None] - left

        def mask(b: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
            distance = prefix[b] + i - j
            seen = live[b, i] & (distance >= 0)
            return seen if left < 0 else seen & (distance <= left)

        slots = plan.req_to_token[plan.req_pool_indices, : plan.max_seq_len]
        values, sums = _attend(
            self.config, q[row.masked_fill(~live, 0)], k_cache, v_cache, slots, used, mask
        )
        _put(out, lse, values[live], sums[live])
