"""Attention through FlashInfer's paged wrappers (https://arxiv.org/abs/2501.01005).

Pattern B: a wrapper plans on the host before every step and copies its plan into buffers of fixed
address, which a recorded ``run`` reads. Pages are single slots, so that any pool and any tail
serve without copies; trees are custom masks, packed on the device from the ancestor words. All
kernels are FlashInfer's FA2 ones: only those take masks, and they exist for every GPU it supports.
"""

from __future__ import annotations

import math
import weakref
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from specattn.backends.base import Capabilities
from specattn.backends.flashinfer_plan import (
    MIN_FLOATS,
    BranchLists,
    Grid,
    PackedMasks,
    RequestLists,
    list_offsets,
)
from specattn.kernels import ops
from specattn.plan import AttnPlan, CsrPlan, ExtendPlan, Plan

if TYPE_CHECKING:
    from torch import Tensor

    from specattn.backends.base import BoundAttention
    from specattn.config import AttnConfig

HEAD_DIMS = (64, 128, 256)
#: FlashInfer's masked logit is -5e4 before scaling; a smaller scale would let it weigh something.
MIN_SCALE = 1e-3
#: Groups of query heads the CUDA-core decode kernel is fast for; larger ones use tensor cores.
SMALL_GROUP = 3


class FlashInferBackend:
    """FlashInfer's decode and prefill wrappers.

    Parameters
    ----------
    config : AttnConfig
        The layer geometry.
    device : torch.device
        A CUDA device.
    """

    name: ClassVar[str] = "flashinfer"
    capabilities: ClassVar[Capabilities] = Capabilities(
        graphs=True, host_plan=True, dtypes=(torch.float16, torch.bfloat16)
    )

    def __init__(self, config: AttnConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        self._floats: Tensor | None = None

    @staticmethod
    def reasons(config: AttnConfig | None, device: torch.device) -> list[str]:
        """Name what stands in the way."""
        found = []
        if find_spec("flashinfer") is None:
            found.append("flashinfer is not installed (pip install flashinfer-python, Linux only)")
        if device.type != "cuda":
            found.append(f"FlashInfer needs a CUDA device, got {device.type}")
        elif not torch.cuda.is_available():
            found.append("torch finds no CUDA device")
        elif torch.cuda.get_device_capability(device) < (8, 0):
            found.append("FlashInfer's FA2 kernels need compute capability 8.0")
        if config is None:
            return found
        if config.dtype not in FlashInferBackend.capabilities.dtypes:
            found.append(f"dtype must be float16 or bfloat16, got {config.dtype}")
        if config.head_dim not in HEAD_DIMS:
            found.append(f"head_dim must be 64, 128 or 256, got {config.head_dim}")
        if config.v_head_dim != config.head_dim:
            found.append(f"v_head_dim must equal head_dim, got {config.v_head_dim}")
        if config.sm_scale < MIN_SCALE:
            found.append(f"sm_scale must be at least {MIN_SCALE}, got {config.sm_scale}")
        return found

    def bind(self, plan: Plan) -> BoundAttention:
        """Bind to the plan's kind."""
        if isinstance(plan, CsrPlan):
            return FlashInferDecode(self, BranchLists(plan))
        if isinstance(plan, ExtendPlan):
            return FlashInferExtend(self, plan)
        if plan.layout.causal and plan.layout.q_len == 1:
            lists = RequestLists(plan, plan.batch, self.config.window_left)
            return FlashInferDecode(self, lists)
        return FlashInferRows(self, plan)

    def processors(self) -> int:
        """Return the device's streaming multiprocessors: FlashInfer cuts its work by them."""
        return torch.cuda.get_device_properties(self.device).multi_processor_count

    def floats(self, size: int) -> Tensor:
        """Return workspace that everything bound here shares: forwards run one after another."""
        size = max(size, MIN_FLOATS)
        if self._floats is None or len(self._floats) < size:
            self._floats = torch.zeros(size, dtype=torch.uint8, device=self.device)
        return self._floats


class _Planned:
    """A wrapper with an int workspace of its own, and what all bound kinds share."""

    def __init__(self, backend: FlashInferBackend, wrapper: Any, grid: Grid) -> None:
        self.config = backend.config
        self.wrapper = wrapper
        ints = torch.empty(grid.int_bytes, dtype=torch.uint8, device=backend.device)
        wrapper.reset_workspace_buffer(backend.floats(grid.float_bytes), ints)
        # A plan is staged in pinned memory: neither the next plan nor another owner of that
        # memory may write there before the device has fetched it.
        self._fetched = torch.cuda.Event()
        weakref.finalize(self, self._fetched.synchronize).atexit = False

    def _plan(self, *offsets: Tensor, **options: Any) -> None:
        """Plan on the host and send the plan to the wrapper's buffers."""
        config = self.config
        heads = config.num_qo_heads, config.num_kv_heads, config.head_dim
        self._fetched.synchronize()
        self.wrapper.plan(
            *offsets, *heads, 1, sm_scale=config.sm_scale, logits_soft_cap=config.logit_cap,
            q_data_type=config.dtype, kv_data_type=config.dtype, **options,
        )
        self._fetched.record()

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        for name, tensor in {"out": out, "lse": lse}.items():
            if tensor is not None and not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
        self.wrapper.run(
            q, (k_cache[:, None], v_cache[:, None]), out=out, lse=lse, return_lse=lse is not None
        )
        if lse is not None:
            # log2 to natural; a row without keys has about -5e4
            lse.mul_(math.log(2)).masked_fill_(lse < -3e4, -math.inf)


class FlashInferDecode(_Planned):
    """One query token per list: plain decoding, and draft steps from lists or of one branch."""

    def __init__(self, backend: FlashInferBackend, lists: RequestLists | BranchLists) -> None:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        self.lists = lists
        config = backend.config
        grid = Grid.recorded(config, lists.requests, 1, backend.processors())
        group = config.num_qo_heads // config.num_kv_heads
        # lists of requests end where the window does; for lists of others only the tensor-core
        # kernel starts there, the other one reads all keys and weighs some with 0
        self._window = config.window_left if isinstance(lists, BranchLists) else -1
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            backend.floats(grid.float_bytes), use_cuda_graph=True,
            use_tensor_cores=group > SMALL_GROUP or self._window >= 0,
            paged_kv_indptr_buffer=lists.indptr, paged_kv_indices_buffer=lists.indices,
            paged_kv_last_page_len_buffer=torch.ones_like(lists.indptr[1:]), backend="fa2",
        )
        super().__init__(backend, wrapper, grid)

    def schedule(self, seq_lens_cpu: Tensor | None) -> None:
        """Plan the lists' lengths."""
        offsets = self.lists.offsets(seq_lens_cpu)
        self._plan(offsets, self.lists.indices[:0], torch.ones_like(offsets[1:]),
                   window_left=self._window)

    def fill(self) -> None:
        """Fill the lists."""
        self.lists.fill()


class FlashInferRows(_Planned):
    """A tree mode of several query tokens: causal, or under a mask made of the words."""

    def __init__(self, backend: FlashInferBackend, plan: AttnPlan) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        layout = plan.layout
        grid = Grid.recorded(backend.config, plan.batch, layout.q_len, backend.processors())
        self.plan = plan
        self.lists = RequestLists(plan, grid.requests, backend.config.window_left)
        self.masks = None if layout.causal else PackedMasks(self.lists)
        self._rows = list_offsets(torch.full((plan.batch,), layout.q_len), grid.requests)
        wrapper = BatchPrefillWithPagedKVCacheWrapper(
            backend.floats(grid.float_bytes), use_cuda_graph=True,
            qo_indptr_buf=torch.zeros_like(self.lists.indptr),
            paged_kv_indptr_buf=self.lists.indptr, paged_kv_indices_buf=self.lists.indices,
            paged_kv_last_page_len_buf=torch.ones_like(self.lists.indptr[1:]),
            custom_mask_buf=self.masks and self.masks.bits,
            mask_indptr_buf=self.masks and self.masks.indptr, backend="fa2",
        )
        super().__init__(backend, wrapper, grid)

    def schedule(self, seq_lens_cpu: Tensor | None) -> None:
        """Plan the lists' lengths at the uniform number of query tokens."""
        offsets, masks = self.lists.offsets(seq_lens_cpu), self.masks
        window = self.config.window_left if masks is None else -1
        self._plan(
            self._rows, offsets, self.lists.indices[:0], torch.ones_like(offsets[1:]),
            causal=masks is None, packed_custom_mask=None if masks is None else masks.bits[:0],
            window_left=window, max_token_per_sequence=self.plan.layout.q_len,
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


class FlashInferExtend(_Planned):
    """A ragged prompt extend; eager, so that it may read its lengths from the device."""

    def __init__(self, backend: FlashInferBackend, plan: ExtendPlan) -> None:
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
            rows, offsets, self._indices, torch.ones_like(offsets[1:]), causal=True,
            window_left=window, max_token_per_sequence=plan.max_q_len,
        )

    def fill(self) -> None:
        """Fill the lists, planning first where nobody has: prompts may skip ``schedule``."""
        plan = self.plan
        if self._indptr is None:
            self.schedule(None)
        assert self._indptr is not None
        ops("csr", self._indices.device).fill_lists(
            plan.req_to_token, plan.req_pool_indices, self._lens, self._no_tail, self._no_tail,
            self._indptr, self._indices, -1,
        )
