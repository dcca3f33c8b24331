"""The peers' entry points in plain torch, with the signatures of the versions that are timed."""

from __future__ import annotations

import sys
from types import ModuleType

import torch


def attend(q, k, v, scale, seen=None):
    """One query token ``[H, D]`` over keys ``[N, Hkv, D]``; returns out and the natural lse."""
    group = q.shape[0] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    logits = torch.einsum("hd,nhd->hn", q.double(), k) * scale
    if seen is not None:
        logits = logits.masked_fill(~seen, -torch.inf)
    return torch.einsum("hn,nhd->hd", logits.softmax(-1), v), logits.logsumexp(-1)


def keys_of(cache, pages, count):
    """The first ``count`` tokens of pages, ``[N, Hkv, D]``."""
    return cache.double()[pages.long()].flatten(0, 1)[:count]


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    qv=None,
    cache_seqlens=None,
    page_table=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    softmax_scale=None,
    causal=False,
    num_splits=0,
    scheduler_metadata=None,
    return_softmax_lse=False,
    out=None,
):
    assert num_splits == 0
    assert page_table.dtype == cache_seqlens.dtype == cu_seqlens_q.dtype == torch.int32
    assert len(page_table) == len(cache_seqlens) == len(cu_seqlens_q) - 1
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
    assert int(cu_seqlens_q[-1]) == len(q)
    if scheduler_metadata is not None:
        assert scheduler_metadata == ("schedule", len(cache_seqlens), max_seqlen_q, causal)
    out = (
        torch.full((*q.shape[:2], v_cache.shape[-1]), torch.nan, dtype=q.dtype)
        if out is None
        else out
    )
    lse = torch.full((q.shape[1], len(q)), torch.nan)
    for b, count in enumerate(cache_seqlens.tolist()):
        k, v = (keys_of(cache, page_table[b], count) for cache in (k_cache, v_cache))
        if qv is not None:
            k = torch.cat([v, k], -1)
        begin, end = cu_seqlens_q[b : b + 2].tolist()
        for row in range(begin, end):
            seen = torch.arange(count) <= count - (end - row) if causal else None
            query = q[row] if qv is None else torch.cat([qv[row], q[row]], -1)
            out[row], lse[:, row] = attend(query, k, v, softmax_scale, seen)
    return (out, lse) if return_softmax_lse else out


def get_scheduler_metadata(
    batch_size,
    max_seqlen_q,
    max_seqlen_k,
    num_heads,
    num_heads_k,
    headdim,
    cache_seqlens,
    qkv_dtype,
    cu_seqlens_q,
    page_size,
    causal,
    has_softcap,
    num_splits,
):
    assert int(cache_seqlens.max()) <= max_seqlen_k
    return "schedule", batch_size, max_seqlen_q, causal


def merge_state_v2(v_a, s_a, v_b, s_b, v_merged=None, s_merged=None):
    assert all(s.is_contiguous() and s.shape == v_a.shape[:2] for s in (s_a, s_b))
    lse = torch.logaddexp(s_a.double(), s_b.double())
    v_merged.copy_(v_a * (s_a - lse).exp()[..., None] + v_b * (s_b - lse).exp()[..., None])
    return v_merged, lse


def get_mla_metadata(lens, rows, heads):
    return "parts", "splits"


def flash_mla_with_kvcache(
    q,
    k_cache,
    block_table,
    cache_seqlens,
    head_dim_v,
    parts,
    splits,
    softmax_scale=None,
    causal=False,
):
    assert (parts, splits) == ("parts", "splits")
    batch, rows = q.shape[:2]
    out = flash_attn_with_kvcache(
        q.flatten(0, 1),
        k_cache,
        k_cache[..., :head_dim_v],
        cache_seqlens=cache_seqlens,
        page_table=block_table,
        cu_seqlens_q=torch.arange(batch + 1).int() * rows,
        max_seqlen_q=rows,
        softmax_scale=softmax_scale,
        causal=causal,
    )
    return out.unflatten(0, (batch, rows)), None


class Prefill:
    """`BatchPrefillWithPagedKVCacheWrapper`."""

    def __init__(self, workspace, layout, backend="auto"):
        assert layout == "NHD"
        self._backend = backend

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        custom_mask=None,
        causal=False,
        sm_scale=None,
        q_data_type="float16",
        kv_data_type=None,
    ):
        assert self._backend in ("fa2", "fa3")
        assert kv_data_type in (q_data_type, torch.float8_e4m3fn)
        self.rows, self.offsets, self.pages = qo_indptr, paged_kv_indptr, paged_kv_indices
        self.last, self.size, self.scale = paged_kv_last_page_len, page_size, sm_scale
        self.mask, self.causal = custom_mask, causal

    def run(self, q, paged_kv_cache, out=None, return_lse=False, k_scale=1.0, v_scale=1.0):
        assert len(q) == int(self.rows[-1])
        out = torch.empty_like(q) if out is None else out
        lse = torch.empty(q.shape[:2])
        at = 0
        for b in range(len(self.last)):
            begin, end = self.rows[b : b + 2].tolist()
            pages = self.pages[self.offsets[b] : self.offsets[b + 1]]
            count = (len(pages) - 1) * self.size + int(self.last[b])
            k, v = (keys_of(cache, pages, count) for cache in paged_kv_cache)
            for row in range(begin, end):
                seen = torch.arange(count) <= count - (end - row) if self.causal else None
                if self.mask is not None:
                    seen = self.mask[at : at + count]
                    at += count
                found, lse[row] = attend(q[row], k, v, self.scale * k_scale, seen)
                out[row] = found * v_scale
        return (out, lse) if return_lse else out


class Decode(Prefill):
    """`BatchDecodeWithPagedKVCacheWrapper`."""

    def __init__(
        self,
        workspace,
        layout,
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
    ):
        self._backend = "fa2"

    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        **options,
    ):
        rows = torch.arange(len(indptr)).int()
        super().plan(
            rows,
            indptr,
            indices,
            last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            **options,
        )


class Cascade:
    """`MultiLevelCascadeAttentionWrapper`."""

    def __init__(self, num_levels, workspace, layout):
        self._batch_prefill_wrappers = [Prefill(workspace, layout) for _ in range(num_levels)]

    def plan(self, rows, offsets, pages, last, *, head_dim, page_size, causal, **options):
        levels = zip(self._batch_prefill_wrappers, rows, offsets, pages, last, strict=True)
        for wrapper, *lists in levels:
            wrapper.plan(*lists, head_dim_qk=head_dim, page_size=page_size, **options)

    def run(self, q, paged_kv_cache):
        (a, s), (b, t) = (
            wrapper.run(q, paged_kv_cache, return_lse=True)
            for wrapper in self._batch_prefill_wrappers
        )
        return merge_state_v2(a, s, b, t, torch.empty_like(a))[0]


class Mla:
    """`BatchMLAPagedAttentionWrapper`."""

    def __init__(
        self,
        workspace,
        use_cuda_graph=False,
        qo_indptr=None,
        kv_indptr=None,
        kv_indices=None,
        kv_len_arr=None,
        backend="auto",
    ):
        assert use_cuda_graph

    def plan(
        self,
        qo_indptr,
        kv_indptr,
        kv_indices,
        kv_len_arr,
        num_heads,
        head_dim_ckv,
        head_dim_kpe,
        page_size,
        causal,
        sm_scale,
        q_data_type,
        kv_data_type,
    ):
        last = kv_len_arr - (kv_indptr.diff() - 1) * page_size
        self.inner = Prefill(None, "NHD", backend="fa2")
        self.inner.plan(
            qo_indptr,
            kv_indptr,
            kv_indices,
            last,
            num_heads,
            1,
            head_dim_ckv,
            page_size,
            causal=causal,
            sm_scale=sm_scale,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
        )

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, out=None):
        k = torch.cat([ckv_cache, kpe_cache], -1)[:, :, None]
        self.inner.run(torch.cat([q_nope, q_pe], -1), (k, ckv_cache[:, :, None]), out=out)


def xqa(
    q,
    k_cache,
    v_cache,
    page_table,
    seq_lens,
    output,
    workspace,
    semaphores,
    num_kv_heads,
    page_size,
    q_scale=1.0,
    kv_scale=1.0,
    q_seq_len=1,
    mask=None,
):
    assert seq_lens.dtype == torch.uint32
    assert seq_lens.shape == (q.shape[0], 1)
    scale = q_scale * kv_scale / q.shape[-1] ** 0.5
    for b, count in enumerate(seq_lens[:, 0].tolist()):
        k, v = (keys_of(cache, page_table[b], count) for cache in (k_cache, v_cache))
        for i in range(q_seq_len):
            at = (b, 0, i) if q_seq_len > 1 else (b, 0)
            seen = torch.ones(count, dtype=torch.bool)
            if q_seq_len > 1:
                words = mask[b, i].int().tolist()
                assert len(words) == 2 * -(-q_seq_len // 32)
                for j in range(q_seq_len):
                    seen[count - q_seq_len + j] = bool(words[j // 16] >> j % 16 & 1)
            found = attend(q[at], k, v, scale, seen)[0] * kv_scale
            output[at] = found.to(output.dtype)


def install(monkeypatch):
    """Put the fakes where the peers import from."""
    modules = {
        "sgl_kernel": {"merge_state_v2": merge_state_v2},
        "sgl_kernel.flash_attn": {
            "flash_attn_with_kvcache": flash_attn_with_kvcache,
            "get_scheduler_metadata": get_scheduler_metadata,
        },
        "sgl_kernel.flash_mla": {
            "get_mla_metadata": get_mla_metadata,
            "flash_mla_with_kvcache": flash_mla_with_kvcache,
        },
        "flashinfer": {
            "BatchPrefillWithPagedKVCacheWrapper": Prefill,
            "BatchDecodeWithPagedKVCacheWrapper": Decode,
        },
        "flashinfer.cascade": {"MultiLevelCascadeAttentionWrapper": Cascade},
        "flashinfer.mla": {"BatchMLAPagedAttentionWrapper": Mla},
        "flashinfer.xqa": {"xqa": xqa},
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
