"""Attention through FlashInfer's paged wrappers (https://arxiv.org/abs/2501.01005).

It is host-planned: a wrapper plans on the host before every step and copies its plan into buffers
of fixed address, which a recorded ``run`` reads. Pages are single slots, so that any pool and any
tail serve without copies; trees are custom masks, packed on the device from the ancestor words. All
kernels are FlashInfer's FA2 ones: only those take masks, and they exist for every GPU it supports.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from specattn.backends.base import BoundAttention, Capabilities, head_reasons
from specattn.backends.flashinfer_plan import (
    BranchLists,
    FlashInferLayer,
    Grid,
    Lists,
    PackedMasks,
    Planned,
    PromptLists,
    RequestLists,
    TailLists,
)
from specattn.checks import require_dense
from specattn.kernels.attention import merge_lse
from specattn.plan import AttnPlan, CsrPlan, ExtendPlan, Plan

if TYPE_CHECKING:
    from torch import Tensor

    from specattn.config import AttnConfig

HEAD_DIMS = (64, 128, 256)
#: Groups of query heads the CUDA-core decode kernel is fast for; larger ones use tensor cores.
SMALL_GROUP = 3
#: An lse below this is FlashInfer's -5e4: a row without keys.
NO_KEYS = -3e4


class FlashInferBackend(FlashInferLayer):
    """FlashInfer's decode and prefill wrappers.

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

    @classmethod
    def geometry(cls, config: AttnConfig) -> list[str]:
        """Say which widths and scales stand in the way."""
        return head_reasons(config, HEAD_DIMS, "flashinfer_mla") + super().geometry(config)

    def bind(self, plan: Plan) -> BoundAttention:
        """Bind to the plan's kind.

        Raises
        ------
        UnsupportedError
            If the plan may need 2^31 list entries or mask bits, which int32 offsets do not reach.
        """
        if isinstance(plan, CsrPlan):
            return FlashInferDecode(self, BranchLists(plan, self.name))
        if isinstance(plan, ExtendPlan):
            return FlashInferPrefill.over_prompts(self, plan)
        if plan.layout.causal and plan.layout.q_len == 1:
            lists = RequestLists(plan, plan.batch, self.config.window_left, self.name)
            return FlashInferDecode(self, lists)
        if self._in_two_passes(plan):
            return FlashInferTree(self, plan)
        return FlashInferPrefill.over(self, plan)

    def _in_two_passes(self, plan: AttnPlan) -> bool:
        """Whether a tree's prefix, without a window, gets its own pass."""
        if plan.layout.causal or self.config.window_left >= 0 or self.two_passes_from is None:
            return False
        return plan.req_to_token.shape[1] >= self.two_passes_from


class _Wrapper(Planned):
    """A wrapper of FlashInfer's with its int workspace, bound to a plan."""

    def __init__(
        self,
        backend: FlashInferLayer,
        lists: Lists,
        wrapper: Any,
        grid: Grid,
    ) -> None:
        super().__init__(backend, lists)
        self.wrapper = wrapper
        ints = torch.empty(grid.int_bytes, dtype=torch.uint8, device=backend.device)
        wrapper.reset_workspace_buffer(backend.floats(grid.float_bytes), ints)

    def _send(self, *offsets: Tensor, **options: Any) -> None:
        """Plan on the host and send the plan to the wrapper's buffers."""
        config = self.config
        heads = config.num_qo_heads, config.num_kv_heads, config.head_dim
        with self.staging():
            self.wrapper.plan(
                *offsets,
                *heads,
                1,
                sm_scale=config.sm_scale,
                logits_soft_cap=config.logit_cap,
                q_data_type=config.dtype,
                kv_data_type=config.dtype,
                **options,
            )

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        require_dense(out=out, lse=lse)
        self.attend(q, k_cache, v_cache, out, lse)
        if lse is not None:
            lse.mul_(math.log(2)).masked_fill_(lse < NO_KEYS, -math.inf)

    def attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None
    ) -> None:
        """Attend; the lse has base 2, and -5e4 in rows without keys."""
        self.wrapper.run(
            q, (k_cache[:, None], v_cache[:, None]), out=out, lse=lse, return_lse=lse is not None
        )


class FlashInferDecode(_Wrapper):
    """One query token per list: decoding, and draft steps."""

    def __init__(self, backend: FlashInferLayer, lists: RequestLists | BranchLists) -> None:
        config = backend.config
        grid = Grid.recorded(config, lists.requests, 1, backend.processors())
        group = config.num_qo_heads // config.num_kv_heads
        # lists of requests end where the window does; for lists of others only the tensor-core
        # kernel starts there, the other one reads all keys and weighs some with 0
        self._window = config.window_left if isinstance(lists, BranchLists) else -1
        wrapper = backend.library.BatchDecodeWithPagedKVCacheWrapper(
            backend.floats(grid.float_bytes),
            use_cuda_graph=True,
            use_tensor_cores=group > SMALL_GROUP or self._window >= 0,
            paged_kv_indptr_buffer=lists.indptr,
            paged_kv_indices_buffer=lists.indices,
            paged_kv_last_page_len_buffer=torch.ones_like(lists.indptr[1:]),
            backend="fa2",
        )
        super().__init__(backend, lists, wrapper, grid)

    def plan_lists(self, rows: Tensor, offsets: Tensor) -> None:
        """Plan the lists' lengths."""
        self._send(
            offsets, self.lists.indices[:0], torch.ones_like(offsets[1:]), window_left=self._window
        )


class FlashInferPrefill(_Wrapper):
    """Attention of several query tokens per request over lists of keys.

    It is under ``masks``, or ``causal``: the keys end with the query tokens, which see those before
    them; or neither. ``q_len`` is the most query tokens of a request.
    """

    def __init__(
        self,
        backend: FlashInferLayer,
        lists: Lists,
        grid: Grid,
        q_len: int,
        *,
        causal: bool,
        masks: PackedMasks | None = None,
    ) -> None:
        self.masks, self._q_len, self._causal = masks, q_len, causal
        self._recorded = isinstance(lists, RequestLists)
        buffers: dict[str, Any] = {}
        if self._recorded:
            buffers = {
                "use_cuda_graph": True,
                "qo_indptr_buf": torch.zeros_like(lists.indptr),
                "paged_kv_indptr_buf": lists.indptr,
                "paged_kv_indices_buf": lists.indices,
                "paged_kv_last_page_len_buf": torch.ones_like(lists.indptr[1:]),
                "custom_mask_buf": masks and masks.bits,
                "mask_indptr_buf": masks and masks.indptr,
            }
        wrapper = backend.library.BatchPrefillWithPagedKVCacheWrapper(
            backend.floats(grid.float_bytes), backend="fa2", **buffers
        )
        super().__init__(backend, lists, wrapper, grid)

    @classmethod
    def over(
        cls, backend: FlashInferLayer, plan: AttnPlan, *, prefix_only: bool = False
    ) -> FlashInferPrefill:
        """Bind to a tree mode, or to the prefix that all see."""
        layout, config = plan.layout, backend.config
        grid = Grid.recorded(config, plan.batch, layout.q_len, backend.processors())
        lists = RequestLists(
            plan, grid.requests, config.window_left, backend.name, prefix_only=prefix_only
        )
        masks = None
        if not (layout.causal or prefix_only):
            masks = PackedMasks(plan, lists, backend.name)
        causal = layout.causal and not prefix_only
        return cls(backend, lists, grid, layout.q_len, causal=causal, masks=masks)

    @classmethod
    def over_tail(cls, backend: FlashInferLayer, plan: AttnPlan) -> FlashInferPrefill:
        """Bind to the tail alone, planned once, without a graph's padding."""
        lists, q_len = TailLists(plan), plan.layout.q_len
        masks = PackedMasks(plan, lists, backend.name)
        grid = Grid.eager(backend.config, plan.batch, plan.batch * q_len, backend.processors())
        made = cls(backend, lists, grid, q_len, causal=False, masks=masks)
        made.schedule(None)
        return made

    @classmethod
    def over_prompts(cls, backend: FlashInferLayer, plan: ExtendPlan) -> FlashInferPrefill:
        """Bind to prompts; eager, so it may read their lengths."""
        lists = PromptLists(plan, backend.config.window_left)
        requests, tokens = len(plan.req_pool_indices), plan.out_slots.numel()
        grid = Grid.eager(backend.config, requests, tokens, backend.processors())
        return cls(backend, lists, grid, plan.max_q_len, causal=True)

    def plan_lists(self, rows: Tensor, offsets: Tensor) -> None:
        """Plan the lists' lengths."""
        masks, indices = self.masks, self.lists.indices
        options: dict[str, Any] = {}
        if masks is not None:
            options["packed_custom_mask"] = masks.bits[:0] if self._recorded else masks.bits
        if isinstance(self.lists, TailLists):
            options["disable_split_kv"] = True
        self._send(
            rows,
            offsets,
            indices[:0] if self._recorded else indices,
            torch.ones_like(offsets[1:]),
            causal=self._causal,
            window_left=-1 if masks is not None else self.config.window_left,
            max_token_per_sequence=self._q_len,
            **options,
        )
        if masks is not None and self._recorded:
            masks.schedule(offsets)

    def fill(self) -> None:
        """Fill the lists, and the masks if the words are known."""
        super().fill()
        if self.masks is not None and not self.masks.late:
            self.masks.fill()

    def pack_late(self) -> None:
        """Pack the words that were not known when the lists were filled."""
        if self.masks is not None and self.masks.late:
            self.masks.fill()

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        self.pack_late()
        super().run(q, k_cache, v_cache, out, lse)


class FlashInferTree(BoundAttention):
    """A tree in two passes, prefix and tail, merged by their lse.

    The prefix takes the kernel without a mask, and the mask is a few bytes of the tail's, where one
    pass packs and reads a bit for every key of every node.
    """

    def __init__(self, backend: FlashInferLayer, plan: AttnPlan) -> None:
        self.plan = plan
        self.prefix = FlashInferPrefill.over(backend, plan, prefix_only=True)
        self.tail = FlashInferPrefill.over_tail(backend, plan)
        self._seen = plan.seq_lens.new_ones(plan.batch, plan.layout.q_len)

    def schedule(self, seq_lens_cpu: Tensor | None) -> None:
        """Plan the prefixes' lengths."""
        self.prefix.schedule(seq_lens_cpu)

    def fill(self) -> None:
        """Fill the lists, and the mask if the words are known."""
        self.prefix.fill()
        self.tail.fill()

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        require_dense(out=out, lse=lse)
        self.tail.pack_late()
        tail_out, shape = torch.empty_like(out), self._seen.shape
        prefix_lse, tail_lse = q.new_empty(2, *q.shape[:2], dtype=torch.float32)
        self.prefix.attend(q, k_cache, v_cache, out, prefix_lse)
        self.tail.attend(q, k_cache, v_cache, tail_out, tail_lse)
        whole = out.unflatten(0, shape)
        merge_lse(
            whole,
            prefix_lse.unflatten(0, shape),
            self.plan.seq_lens,
            tail_out.unflatten(0, shape),
            tail_lse.unflatten(0, shape),
            self._seen,
            whole,
            None if lse is None else lse.unflatten(0, shape),
            base2=True,
        )
        if lse is not None:
            lse.masked_fill_(lse < NO_KEYS, -math.inf)
