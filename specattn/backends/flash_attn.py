"""FlashAttention-3 (`sgl_kernel`) over page tables, planned on the device.

FA3 reads KV through ``page_table [rows, width]``, ``cache_seqlens`` and a causal or no mask; it
knows no trees. Tables say what it reads (`specattn.backends.flash_attn_keys`), so no KV is ever
copied:

- where a layout is causal, the table is of the prefix followed by the tail, and one call attends;
- a tree is a pass over the prefix, and a pass in which every query token is a request of its own
  over the list of its ancestors, merged by their lse;
- index lists are read where they lie: with a row stride of 1, the "row" of a request is the offset
  at which its list begins;
- prompts are one causal call.

Keys that lie in pages are listed page by page; tails of trees, index lists, and whatever a window
cuts are listed slot by slot, over the same pool seen as pages of one slot.

A window counts list entries from the end of the list. On a causal layout that is the distance in
positions; in a tree it is not, so trees under a window are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from specattn.backends.base import BoundAttention, Capabilities, imported
from specattn.backends.flash_attn_keys import Lists, keys_of, prefix_of, prompt_of
from specattn.cuda_graph.capture_guard import Settable
from specattn.errors import UnsupportedError
from specattn.kernels import ops
from specattn.plan import AttnPlan, CsrPlan, ExtendPlan, Plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from specattn.backends.flash_attn_keys import Keys
    from specattn.config import AttnConfig

#: FA3 has more; these are the sizes it is tested with here.
HEAD_DIMS = (64, 128)
HOPPER = (9, 0)


class Fa3Backend(Settable):
    """FlashAttention-3 on Hopper.

    Trees under a window (any layout that is not causal, with ``window_left`` of 0 or more) are
    refused at `bind`; every other combination of the capabilities is served.

    Parameters
    ----------
    config : AttnConfig
        The layer geometry.
    device : torch.device
        A CUDA device of compute capability 9.0.

    Raises
    ------
    UnsupportedError
        If ``sgl_kernel`` is installed but cannot be imported.
    """

    name: ClassVar[str] = "fa3"
    capabilities: ClassVar[Capabilities] = Capabilities(
        graphs=True, dtypes=(torch.float16, torch.bfloat16)
    )
    module: ClassVar[str] = "sgl_kernel.flash_attn"

    def __init__(self, config: AttnConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        library = imported(self.module, self.name)
        self._call = Fa3Call(config, library.flash_attn_with_kvcache)

    @staticmethod
    def reasons(config: AttnConfig | None, device: torch.device) -> list[str]:
        """Name what stands in the way."""
        found = []
        if find_spec("sgl_kernel") is None:
            found.append("sgl_kernel is not installed (pip install sglang-kernel, Linux only)")
        if device.type != "cuda" or not torch.cuda.is_available():
            found.append(f"FA3 needs a CUDA device of compute capability 9.0, got {device}")
        elif (capability := torch.cuda.get_device_capability(device)) != HOPPER:
            found.append(f"FA3 needs compute capability 9.0, got {capability[0]}.{capability[1]}")
        if config is None:
            return found
        if config.dtype not in Fa3Backend.capabilities.dtypes:
            found.append(f"dtype must be float16 or bfloat16, got {config.dtype}")
        if config.head_dim not in HEAD_DIMS:
            found.append(f"head_dim must be 64 or 128, got {config.head_dim}")
        if config.v_head_dim != config.head_dim:
            found.append(
                f"v_head_dim must equal head_dim {config.head_dim}, got {config.v_head_dim}"
            )
        return found

    def bind(self, plan: Plan) -> BoundAttention:
        """Bind to the plan's kind.

        Raises
        ------
        UnsupportedError
            For a tree under a window, and for slot tables of 2^31 entries or more.
        """
        window = self.config.window_left
        if isinstance(plan, CsrPlan):
            lists = Lists.over(plan, window)
            return Fa3Rows(self._call, lists, (len(lists.lens), 1), causal=False)
        if isinstance(plan, ExtendPlan):
            return Fa3Extend(self._call, prompt_of(plan, window), plan)
        if plan.layout.causal:
            keys = keys_of(plan, window)
            return Fa3Rows(self._call, keys, (plan.batch, plan.layout.q_len), causal=True)
        if window >= 0:
            raise UnsupportedError(
                "backend 'fa3' with a tree",
                [
                    f"window_left {window} counts positions (tree depth), "
                    "FA3's window counts list entries"
                ],
            )
        return Fa3Tree.over(self._call, plan)


@dataclass(frozen=True)
class Fa3Call:
    """`flash_attn_with_kvcache` with what the layer fixes."""

    config: AttnConfig
    function: Callable[..., Any]

    def __call__(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        out: Tensor | None = None,
        *,
        causal: bool = False,
        window_left: int = -1,
        **tables: Any,
    ) -> tuple[Tensor, Tensor]:
        """Attend; returns ``out`` and the natural lse.

        q is ``[B, q_len, Hq, D]`` and the lse ``[B, Hq, q_len]``; ragged, ``[T, Hq, D]`` and
        ``[Hq, T]``. ``tables`` is what `flash_attn_keys.Keys.arguments` returns, and what makes
        a call ragged.
        """
        result: tuple[Tensor, ...] = self.function(
            q,
            k_pages,
            v_pages,
            out=out,
            causal=causal,
            window_size=(window_left, -1 if window_left < 0 else 0),
            softmax_scale=self.config.sm_scale,
            softcap=self.config.logit_cap,
            return_softmax_lse=True,
            **tables,
        )
        return result[0], result[1]


@dataclass(frozen=True)
class Fa3Rows(BoundAttention):
    """Equally many query tokens per request, in one call: causal layouts, and index lists."""

    call: Fa3Call
    keys: Keys
    shape: tuple[int, int]  # requests, query tokens of each
    causal: bool

    def fill(self) -> None:
        """List every request's keys."""
        self.keys.fill()

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        keys, shape = self.keys, self.shape
        _, sums = self.call(
            q.unflatten(0, shape),
            keys.pages(k_cache),
            keys.pages(v_cache),
            out.unflatten(0, shape),
            causal=self.causal,
            # the list of a single query token ends at its window already
            window_left=self.call.config.window_left if shape[1] > 1 else -1,
            **keys.arguments(),
        )
        if lse is not None:
            lse.unflatten(0, shape).copy_(sums.transpose(1, 2))


@dataclass(frozen=True)
class Fa3Tree(BoundAttention):
    """Any ancestor words: a pass over the prefixes, one over the ancestors, and their merge."""

    call: Fa3Call
    plan: AttnPlan
    prefix: Keys
    table: Tensor  # [B * q_len, tail] int32
    lens: Tensor  # [B * q_len] int32

    @classmethod
    def over(cls, call: Fa3Call, plan: AttnPlan) -> Fa3Tree:
        """Allocate the lists of ancestors."""
        queries = plan.batch * plan.layout.q_len
        table = plan.req_to_token.new_zeros(queries, plan.layout.tail)
        return cls(call, plan, prefix_of(plan), table, table.new_zeros(queries))

    @property
    def grows(self) -> bool:
        """Whether the tail holds earlier nodes: a draft step, whose words `run` finds written."""
        return self.plan.layout.tail > self.plan.layout.q_len

    def fill(self) -> None:
        """List the prefixes, and the ancestors of every query token if they are known by now."""
        self.prefix.fill()
        if not self.grows:
            self._list_ancestors()

    def _list_ancestors(self) -> None:
        ops("page_table", self.table.device).fill_ancestor_table(
            self.plan.tail_slots, self.plan.tail_words, self.table, self.lens
        )

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        plan, prefix = self.plan, self.prefix
        shape = (plan.batch, plan.layout.q_len)
        if self.grows:
            self._list_ancestors()
        merged = out.unflatten(0, shape)
        _, prefix_lse = self.call(
            q.unflatten(0, shape),
            prefix.pages(k_cache),
            prefix.pages(v_cache),
            merged,
            **prefix.arguments(),
        )
        tail_out, tail_lse = self.call(
            q[:, None],
            k_cache[:, None],
            v_cache[:, None],
            page_table=self.table,
            cache_seqlens=self.lens,
        )
        ops("merge_lse", q.device).merge_lse(
            merged,
            prefix_lse.transpose(1, 2),
            plan.seq_lens,
            tail_out.view(merged.shape),
            tail_lse.view(*shape, -1),
            self.lens.view(shape),
            merged,
            None if lse is None else lse.unflatten(0, shape),
        )


@dataclass(frozen=True)
class Fa3Extend(BoundAttention):
    """A ragged prompt extend: one causal call."""

    call: Fa3Call
    keys: Keys
    plan: ExtendPlan

    def fill(self) -> None:
        """List every request's keys."""
        self.keys.fill()

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        keys = self.keys
        _, sums = self.call(
            q,
            keys.pages(k_cache),
            keys.pages(v_cache),
            out,
            causal=True,
            window_left=self.call.config.window_left,
            cu_seqlens_q=self.plan.qo_indptr,
            max_seqlen_q=self.plan.max_q_len,
            **keys.arguments(),
        )
        if lse is not None:
            lse.copy_(sums.T)
