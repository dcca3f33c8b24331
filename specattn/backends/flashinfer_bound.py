"""FlashInfer's wrappers, each with what it plans on the host and what it fills on the device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from specattn.backends.base import BoundAttention
from specattn.backends.flashinfer_base import FlashInferLayer, Staged, require_contiguous
from specattn.backends.flashinfer_plan import (
    BranchLists,
    Grid,
    PackedMasks,
    RequestLists,
    list_offsets,
    require_addressable,
)
from specattn.kernels import ops

if TYPE_CHECKING:
    from torch import Tensor

    from specattn.plan import AttnPlan, ExtendPlan

#: Groups of query heads the CUDA-core decode kernel is fast for; larger ones use tensor cores.
SMALL_GROUP = 3
#: An lse below this is FlashInfer's -5e4: a row without keys.
NO_KEYS = -3e4


class _Planned(Staged, BoundAttention):
    """A wrapper with an int workspace of its own, and what all bound kinds share."""

    def __init__(self, backend: FlashInferLayer, wrapper: Any, grid: Grid) -> None:
        super().__init__()
        self.config = backend.config
        self.wrapper = wrapper
        ints = torch.empty(grid.int_bytes, dtype=torch.uint8, device=backend.device)
        wrapper.reset_workspace_buffer(backend.floats(grid.float_bytes), ints)

    def _plan(self, *offsets: Tensor, **options: Any) -> None:
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
        require_contiguous(out, lse)
        self.attend(q, k_cache, v_cache, out, lse)
        if lse is not None:
            lse.mul_(math.log(2)).masked_fill_(lse < NO_KEYS, -math.inf)

    def attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None
    ) -> None:
        """Attend, with an lse of base 2 that is about -5e4 in rows without keys."""
        self.wrapper.run(
            q, (k_cache[:, None], v_cache[:, None]), out=out, lse=lse, return_lse=lse is not None
        )


class FlashInferDecode(_Planned):
    """One query token per list: plain decoding, and draft steps from lists or of one branch."""

    def __init__(self, backend: FlashInferLayer, lists: RequestLists | BranchLists) -> None:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        self.lists = lists
        config = backend.config
        grid = Grid.recorded(config, lists.requests, 1, backend.processors())
        group = config.num_qo_heads // config.num_kv_heads
        # lists of requests end where the window does; for lists of others only the tensor-core
        # kernel starts there, the other one reads all keys and weighs some with 0
        self._window = config.window_left if isinstance(lists, BranchLists) else -1
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            backend.floats(grid.float_bytes),
            use_cuda_graph=True,
            use_tensor_cores=group > SMALL_GROUP or self._window >= 0,
            paged_kv_indptr_buffer=lists.indptr,
            paged_kv_indices_buffer=lists.indices,
            paged_kv_last_page_len_buffer=torch.ones_like(lists.indptr[1:]),
            backend="fa2",
        )
        super().__init__(backend, wrapper, grid)

    def schedule(self, seq_lens_cpu: Tensor | None) -> None:
        """Plan the lists' lengths."""
        offsets = self.lists.offsets(seq_lens_cpu)
        self._plan(
            offsets, self.lists.indices[:0], torch.ones_like(offsets[1:]), window_left=self._window
        )

    def fill(self) -> None:
        """Fill the lists."""
        self.lists.fill()


class FlashInferRows(_Planned):
    """A tree mode of several query tokens: causal, or under a mask made of the words.

    With ``prefix_only``, the same query tokens over the prefix, which all of them see.
    """

    def __init__(
        self, backend: FlashInferLayer, plan: AttnPlan, *, prefix_only: bool = False
    ) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        layout = plan.layout
        grid = Grid.recorded(backend.config, plan.batch, layout.q_len, backend.processors())
        self.plan = plan
        self.lists = RequestLists(
            plan, grid.requests, backend.config.window_left, backend.name, prefix_only=prefix_only
        )
        self._causal = layout.causal and not prefix_only
        self.masks = None if layout.causal or prefix_only else PackedMasks(self.lists)
        self._rows = list_offsets(torch.full((plan.batch,), layout.q_len), grid.requests)
        wrapper = BatchPrefillWithPagedKVCacheWrapper(
            backend.floats(grid.float_bytes),
            use_cuda_graph=True,
            qo_indptr_buf=torch.zeros_like(self.lists.indptr),
            paged_kv_indptr_buf=self.lists.indptr,
            paged_kv_indices_buf=self.lists.indices,
            paged_kv_last_page_len_buf=torch.ones_like(self.lists.indptr[1:]),
            custom_mask_buf=self.masks and self.masks.bits,
            mask_indptr_buf=self.masks and self.masks.indptr,
            backend="fa2",
        )
        super().__init__(backend, wrapper, grid)

    def schedule(self, seq_lens_cpu: Tensor | None) -> None:
        """Plan the lists' lengths at the uniform number of query tokens."""
        offsets, masks = self.lists.offsets(seq_lens_cpu), self.masks
        window = self.config.window_left if masks is None else -1
        self._plan(
            self._rows,
            offsets,
            self.lists.indices[:0],
            torch.ones_like(offsets[1:]),
            causal=self._causal,
            packed_custom_mask=None if masks is None else masks.bits[:0],
            window_left=window,
            max_token_per_sequence=self.plan.layout.q_len,
        )
        if masks is not None:
            masks.schedule(offsets)

    def fill(self) -> None:
        """Fill the lists, and the masks if the words are known by now."""
        self.lists.fill()
        if self.masks is not None and not self.masks.late:
            self.masks.fill()

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        if self.masks is not None and self.masks.late:
            self.masks.fill()
        super().run(q, k_cache, v_cache, out, lse)


class _Tail(_Planned):
    """The query tokens over the tail alone, under a mask made of the words.

    Planned once, without a graph's padding: all its lengths are the layout's.
    """

    def __init__(self, backend: FlashInferLayer, plan: AttnPlan) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        batch, q_len, tail = plan.batch, plan.layout.q_len, plan.layout.tail
        device = plan.tail_slots.device
        # FlashInfer begins a request's bytes where it counts its cells
        require_addressable(batch * q_len * tail, "mask bits", backend.name)
        begin = torch.arange(batch + 1, dtype=torch.int32)
        self.plan = plan
        self._indptr, self._cells = (begin * tail).to(device), (begin * q_len * tail).to(device)
        self._slots = plan.tail_slots.new_zeros(batch * tail)
        self._bits = torch.zeros(batch * q_len * tail, dtype=torch.uint8, device=device)
        grid = Grid.eager(backend.config, batch, batch * q_len, backend.processors())
        super().__init__(
            backend,
            BatchPrefillWithPagedKVCacheWrapper(backend.floats(grid.float_bytes), backend="fa2"),
            grid,
        )
        self._plan(
            begin * q_len,
            begin * tail,
            self._slots,
            torch.ones(batch, dtype=torch.int32),
            causal=False,
            packed_custom_mask=self._bits,
            window_left=-1,
            max_token_per_sequence=q_len,
            disable_split_kv=True,
        )

    def fill(self) -> None:
        """List the tail's slots."""
        self._slots.view(self.plan.tail_slots.shape).copy_(self.plan.tail_slots)

    def pack(self) -> None:
        """Pack the words."""
        plan = self.plan
        ops("csr", self._bits.device).pack_masks(
            self._indptr,
            self._cells,
            plan.seq_lens,
            plan.positions,
            plan.tail_positions,
            plan.tail_words,
            self._bits,
            -1,
        )


class FlashInferTree(BoundAttention):
    """A tree in two passes merged by their lse: over the prefix without a mask, and over the tail.

    The prefix takes the kernel without a mask, and the mask is a few bytes of the tail's, where one
    pass packs and reads a bit for every key of every node.
    """

    def __init__(self, backend: FlashInferLayer, plan: AttnPlan) -> None:
        self.plan = plan
        self.prefix = FlashInferRows(backend, plan, prefix_only=True)
        self.tail = _Tail(backend, plan)
        self._late = plan.layout.tail > plan.layout.q_len
        self._seen = plan.seq_lens.new_ones(plan.batch, plan.layout.q_len)

    def schedule(self, seq_lens_cpu: Tensor | None) -> None:
        """Plan the prefixes' lengths."""
        self.prefix.schedule(seq_lens_cpu)

    def fill(self) -> None:
        """Fill the lists, and the mask if the words are known by now."""
        self.prefix.fill()
        self.tail.fill()
        if not self._late:
            self.tail.pack()

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        require_contiguous(out, lse)
        if self._late:
            self.tail.pack()
        tail_out, shape = torch.empty_like(out), self._seen.shape
        prefix_lse, tail_lse = q.new_empty(2, *q.shape[:2], dtype=torch.float32)
        self.prefix.attend(q, k_cache, v_cache, out, prefix_lse)
        self.tail.attend(q, k_cache, v_cache, tail_out, tail_lse)
        whole = out.unflatten(0, shape)
        ops("merge_lse", q.device).merge_lse(
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


class FlashInferExtend(_Planned):
    """A ragged prompt extend; eager, so that it may read its lengths from the device."""

    def __init__(self, backend: FlashInferLayer, plan: ExtendPlan) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self.plan = plan
        self._indptr: Tensor | None = None
        self._lens = plan.seq_lens
        self._indices = plan.req_to_token.new_empty(0)
        self._no_tail = plan.req_to_token.new_empty(len(plan.req_pool_indices), 0)
        requests, tokens = len(plan.req_pool_indices), plan.out_slots.numel()
        grid = Grid.eager(backend.config, requests, tokens, backend.processors())
        wrapper = BatchPrefillWithPagedKVCacheWrapper(
            backend.floats(grid.float_bytes), backend="fa2"
        )
        super().__init__(backend, wrapper, grid)

    def schedule(self, seq_lens_cpu: Tensor | None) -> None:
        """Plan prefixes and new tokens; reads both from the device."""
        plan, window = self.plan, self.config.window_left
        rows, prefix = plan.qo_indptr.cpu(), plan.seq_lens.cpu()
        if window >= 0:
            prefix = prefix.clamp(max=window)
        offsets = list_offsets(prefix + rows.diff(), len(rows) - 1)
        self._indptr = offsets.to(plan.seq_lens.device)
        self._lens = plan.seq_lens + plan.qo_indptr.diff()
        self._indices = plan.req_to_token.new_empty(int(offsets[-1]))
        self._plan(
            rows,
            offsets,
            self._indices,
            torch.ones_like(offsets[1:]),
            causal=True,
            window_left=window,
            max_token_per_sequence=plan.max_q_len,
        )

    def fill(self) -> None:
        """Fill the lists, planning first where nobody has: prompts may skip ``schedule``."""
        plan = self.plan
        if self._indptr is None:
            self.schedule(None)
        assert self._indptr is not None
        ops("csr", self._indices.device).fill_lists(
            plan.req_to_token,
            plan.req_pool_indices,
            self._lens,
            self._no_tail,
            self._no_tail,
            self._indptr,
            self._indices,
            -1,
        )
