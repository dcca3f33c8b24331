"""Adapters of libraries for Blackwell GPUs.

Each is planned on the device over a block table.

No machine with these kernels was at hand. Each was written against a version of its library, and
what differs between the four is:

=============  =================  ==============  ============  ================  ==============
backend        library            query tokens    result        lse               workspace
=============  =================  ==============  ============  ================  ==============
`fa4`          flash-attn-4       causal, last    returned,     natural,          none
               4.0.0b36           of a request    copied        ``[B, Hq, q_len]``
`cutlass_mla`  sglang-kernel      one a list, no  returned,     none              sized by the
               0.4.6              mask            copied                          table
`trtllm_mha`   flashinfer-python  causal, last    written in    base 2, rows      256 MiB, zeros
               0.6.12             of a request    place         first
`trtllm_mla`   the same           the same        the same      the same          the same
=============  =================  ==============  ============  ================  ==============

The class attributes say the rest: GPUs, pages, dtypes and what the kernels do not serve.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from specattn.backends.base import head_reasons, latent_reasons
from specattn.backends.paged import PagedBackend
from specattn.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor

    from specattn.backends.base import Capabilities
    from specattn.backends.paged import BoundPages, Keys, Place
    from specattn.config import AttnConfig
    from specattn.plan import AttnPlan


class Fa4Backend(PagedBackend):
    """FlashAttention-4 (CuTe DSL), `flash_attn_varlen_func`; see `PagedBackend`.

    Its Hopper kernels read page tables, too; `fa3` is older and proven there. Where a page is a
    whole tile of keys (128), its kernels load the rows of the last page past a request's keys, too,
    and need them finite: the pool must have been initialised, as `KVPool` is.
    """

    name: ClassVar[str] = "fa4"
    module: ClassVar[str] = "flash_attn.cute.interface"
    package: ClassVar[str] = "--pre flash-attn-4"
    majors: ClassVar[tuple[int, ...]] = (9, 10, 11)
    page_sizes: ClassVar[tuple[int, ...]] = (16, 32, 64, 128)
    page_size: ClassVar[int] = 128  # a tile of keys: pages load by TMA
    max_head_dim: ClassVar[int] = 128

    @classmethod
    def geometry(cls, config: AttnConfig) -> list[str]:
        """Say which widths stand in the way."""
        if config.latent:
            return ["latent layers are not served"]
        widths = {"head_dim": config.head_dim, "v_head_dim": config.v_head_dim}
        return [
            f"{name} must be a multiple of 8 up to {cls.max_head_dim}, got {width}"
            for name, width in widths.items()
            if width % 8 or width > cls.max_head_dim
        ]

    def attend(
        self, bound: BoundPages, q: Tensor, k: Tensor, v: Tensor, out: Place, lse: Place
    ) -> Tensor:
        """Attend in one causal call over prefix and tail."""
        config, keys, shape = self.config, bound.keys, bound.shape
        left = config.window_left
        found: tuple[Tensor, Tensor] = self.library.flash_attn_varlen_func(
            q=q.unflatten(0, shape),
            k=keys.pages(k),
            v=keys.pages(v),
            page_table=keys.table,
            seqused_k=keys.lens,
            softmax_scale=config.sm_scale,
            causal=True,
            window_size=(None, None) if left < 0 else (left, 0),
            softcap=config.logit_cap,
            num_splits=1,
            return_lse=lse is not None,
        )
        if lse is not None:
            lse.unflatten(0, shape).copy_(found[1].transpose(1, 2))
        return found[0].flatten(0, 1)


class CutlassMlaBackend(PagedBackend):
    """CUTLASS MLA decoding, `cutlass_mla_decode`; see `PagedBackend`.

    The kernel has no mask, so every query token of a chain is a request of its own, whose list of
    keys ends at that token.
    """

    name: ClassVar[str] = "cutlass_mla"
    capabilities: ClassVar[Capabilities] = replace(
        PagedBackend.capabilities, window=False, cap=False, lse=False
    )
    module: ClassVar[str] = "sgl_kernel"
    majors: ClassVar[tuple[int, ...]] = (10,)
    page_sizes: ClassVar[tuple[int, ...]] = (16, 32, 64, 128)
    page_size: ClassVar[int] = 128  # what SGLang runs it with
    masks: ClassVar[bool] = False
    max_heads: ClassVar[int] = 128

    def __init__(self, config: AttnConfig, device: torch.device) -> None:
        super().__init__(config, device)
        if not hasattr(self.library, "cutlass_mla_decode"):
            reason = "sgl_kernel has no cutlass_mla_decode (that of sglang-kernel 0.4.6 has)"
            raise UnsupportedError(f"backend {self.name!r}", [reason])
        self._workspace = torch.empty(0, dtype=torch.uint8, device=device)

    @classmethod
    def geometry(cls, config: AttnConfig) -> list[str]:
        """Say which head counts and widths stand in the way."""
        found = latent_reasons(config, [(512, 64)])
        if config.num_qo_heads > cls.max_heads:
            found.append(f"num_qo_heads is limited to {cls.max_heads}, got {config.num_qo_heads}")
        return found

    def scratch(self, plan: AttnPlan, keys: Keys) -> tuple[Tensor, ...]:
        """Return the workspace, as large as the longest table so far needs."""
        size = self.library.cutlass_mla_get_workspace_size(
            max_seq_len=keys.most, num_batches=len(keys.lens), num_kv_splits=1
        )
        # everything bound here shares it: forwards run one after another
        if len(self._workspace) < size:
            self._workspace = torch.empty(size, dtype=torch.uint8, device=self.device)
        return (self._workspace,)

    def attend(
        self, bound: BoundPages, q: Tensor, k: Tensor, v: Tensor, out: Place, lse: Place
    ) -> Tensor:
        """Attend in one call in which every query token is a request."""
        if lse is not None:
            raise UnsupportedError("backend 'cutlass_mla'", ["the library returns no lse"])
        rank = self.config.v_head_dim
        result: Tensor = self.library.cutlass_mla_decode(
            q_nope=q[..., :rank],
            q_pe=q[..., rank:],
            kv_c_and_k_pe_cache=bound.keys.pages(k).squeeze(2),
            seq_lens=bound.keys.lens,
            page_table=bound.keys.table,
            workspace=bound.scratch[0],
            sm_scale=self.config.sm_scale,
            num_kv_splits=1,  # other counts are chosen on the host, from lengths
        )
        return result


class TrtllmMhaBackend(PagedBackend):
    """TRT-LLM's decode kernels over keys and values, `trtllm_batch_decode_with_kv_cache`.

    A window counts positions; see `PagedBackend`.
    """

    name: ClassVar[str] = "trtllm_mha"
    capabilities: ClassVar[Capabilities] = replace(PagedBackend.capabilities, cap=False)
    module: ClassVar[str] = "flashinfer.decode"
    package: ClassVar[str] = "flashinfer-python"
    majors: ClassVar[tuple[int, ...]] = (10,)
    page_sizes: ClassVar[tuple[int, ...]] = (16, 32, 64)
    # the library has kernels for more widths, but lists them nowhere
    head_dims: ClassVar[tuple[int, ...]] = (64, 128)
    # 8 MiB of counters, the softmax statistics, and scratch for keys split over thread blocks
    workspace_bytes: ClassVar[int] = 256 * 2**20

    def __init__(self, config: AttnConfig, device: torch.device) -> None:
        super().__init__(config, device)
        # zeros: the counters must be 0 at first, and the kernels leave them so
        self._workspace = torch.zeros(self.workspace_bytes, dtype=torch.uint8, device=device)

    @classmethod
    def geometry(cls, config: AttnConfig) -> list[str]:
        """Say which widths stand in the way."""
        return head_reasons(config, cls.head_dims, "trtllm_mla")

    def attend(
        self, bound: BoundPages, q: Tensor, k: Tensor, v: Tensor, out: Place, lse: Place
    ) -> Tensor:
        """Attend in one causal call over prefix and tail."""
        if out is None:
            out = q.new_empty(*q.shape[:-1], v.shape[-1])
        self.decode(
            bound,
            q,
            k,
            v,
            out,
            workspace_buffer=self._workspace,
            block_tables=bound.keys.table,
            seq_lens=bound.keys.lens,
            max_seq_len=bound.keys.most,
            bmm1_scale=self.config.sm_scale,
            bmm2_scale=1.0,
            backend="trtllm-gen",
            lse=lse,
            return_lse=lse is not None,
        )
        if lse is not None:
            lse.mul_(math.log(2))  # the library's is of base 2
        return out

    def decode(
        self, bound: BoundPages, q: Tensor, k: Tensor, v: Tensor, out: Tensor, **common: Any
    ) -> None:
        """Call the library's function with ``common`` and its own arguments."""
        pages = bound.keys.pages
        self.library.trtllm_batch_decode_with_kv_cache(
            query=q,
            kv_cache=(pages(k), pages(v)),
            kv_layout="NHD",
            q_len_per_req=bound.shape[1],
            window_left=self.config.window_left,
            out=out,
            **common,
        )


class TrtllmMlaBackend(TrtllmMhaBackend):
    """TRT-LLM's kernels over latent rows, `trtllm_batch_decode_with_kv_cache_mla`.

    Their block table must be a multiple of 128 keys wide; see `PagedBackend`.
    """

    name: ClassVar[str] = "trtllm_mla"
    capabilities: ClassVar[Capabilities] = replace(
        PagedBackend.capabilities, window=False, cap=False, dtypes=(torch.bfloat16,)
    )
    module: ClassVar[str] = "flashinfer.mla"
    page_sizes: ClassVar[tuple[int, ...]] = (32, 64)
    # by latent rank, the width of the model's expanded heads without their rope part
    nope_dims: ClassVar[dict[int, int]] = {512: 128, 256: 64}

    @classmethod
    def geometry(cls, config: AttnConfig) -> list[str]:
        """Say which widths stand in the way."""
        return latent_reasons(config, [(rank, 64) for rank in cls.nope_dims])

    def decode(
        self, bound: BoundPages, q: Tensor, k: Tensor, v: Tensor, out: Tensor, **common: Any
    ) -> None:
        """Call the library's function with ``common`` and its own arguments."""
        rank = self.config.v_head_dim
        self.library.trtllm_batch_decode_with_kv_cache_mla(
            query=q.unflatten(0, bound.shape),
            out=out.unflatten(0, bound.shape),
            kv_cache=bound.keys.pages(k).transpose(1, 2),
            qk_nope_head_dim=self.nope_dims[rank],
            kv_lora_rank=rank,
            qk_rope_head_dim=self.config.head_dim - rank,
            **common,
        )
