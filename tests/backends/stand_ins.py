"""Stand-ins of attention libraries: they check arguments as the wheels do, and attend in a loop.

`standing_in` makes an adapter that calls them, so that everything around a library's kernels is
tested on any machine; ``module`` of such an adapter is this one.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from specattn.backends import load_backend


def standing_in(name: str, library: str = __name__) -> type:
    """Return backend ``name`` over its stand-in, wherever the tests run."""
    plain = load_backend(name)

    class StandIn(plain):
        module = library
        workspace_bytes: ClassVar[int] = 1024

        @classmethod
        def reasons(cls, config, device):
            machine = ("is not installed", "needs a CUDA device")
            found = plain.reasons(config, device)
            return [reason for reason in found if not any(text in reason for text in machine)]

    return StandIn


def attend(q, keys, values, scale, cap=0.0):
    """One query token ``[Hq, D]`` over ``[N, Hkv, D]``; float64, natural lse."""
    # consecutive query heads share a KV head
    groups = keys.shape[1], q.shape[0] // keys.shape[1]
    logits = torch.einsum("hgd,nhd->nhg", q.double().unflatten(0, groups), keys.double()) * scale
    if cap:
        logits = cap * torch.tanh(logits / cap)
    out = torch.einsum("nhg,nhd->hgd", logits.softmax(0), values.double())
    return out.flatten(0, 1), logits.logsumexp(0).flatten()


def attend_causal(q, k, v, table, lens, scale, *, left=-1, cap=0.0):
    """Attend ``q [B, q_len, Hq, D]`` over pages ``[pages, page_size, Hkv, D]``."""
    assert table.dtype == lens.dtype == torch.int32
    assert len(table) == len(lens) == len(q)
    assert int(table.max()) < len(k)
    out = torch.empty(*q.shape[:3], v.shape[3], dtype=torch.float64, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float64, device=q.device)
    for b, keys in enumerate(lens.tolist()):
        listed = table[b, : -(-keys // k.shape[1])].long()
        mine = [pool[listed].flatten(0, 1)[:keys].double() for pool in (k, v)]
        for i in range(q.shape[1]):
            end = keys - q.shape[1] + i + 1
            start = max(0, end - 1 - left) if left >= 0 else 0
            seen = [part[start:end] for part in mine]
            out[b, i], lse[b, i] = attend(q[b, i], *seen, scale, cap)
    return out, lse


def flash_attn_varlen_func(
    *,
    q,
    k,
    v,
    page_table,
    seqused_k,
    softmax_scale,
    causal,
    window_size,
    softcap,
    num_splits,
    return_lse,
):
    assert causal
    assert num_splits == 1
    assert window_size in ((None, None), (window_size[0], 0))
    left = -1 if window_size[0] is None else window_size[0]
    out, lse = attend_causal(q, k, v, page_table, seqused_k, softmax_scale, left=left, cap=softcap)
    return out.to(q.dtype), lse.float().transpose(1, 2) if return_lse else None


def trtllm_batch_decode_with_kv_cache(
    *,
    query,
    kv_cache,
    kv_layout,
    workspace_buffer,
    block_tables,
    seq_lens,
    max_seq_len,
    q_len_per_req,
    bmm1_scale,
    bmm2_scale,
    window_left,
    out,
    backend,
    lse,
    return_lse,
):
    assert (kv_layout, backend) == ("NHD", "trtllm-gen")
    assert not workspace_buffer.any()
    assert out.is_contiguous()
    assert max_seq_len >= int(seq_lens.max())
    k, v = kv_cache
    found, sums = attend_causal(
        query.unflatten(0, (-1, q_len_per_req)),
        k,
        v,
        block_tables,
        seq_lens,
        bmm1_scale,
        left=window_left,
    )
    out.copy_(found.flatten(0, 1) * bmm2_scale)
    assert return_lse == (lse is not None)
    if return_lse:
        lse.copy_(sums.flatten(0, 1) / math.log(2))
    return out


def trtllm_batch_decode_with_kv_cache_mla(
    *,
    query,
    kv_cache,
    workspace_buffer,
    qk_nope_head_dim,
    kv_lora_rank,
    qk_rope_head_dim,
    block_tables,
    seq_lens,
    max_seq_len,
    out,
    bmm1_scale,
    bmm2_scale,
    backend,
    lse,
    return_lse,
):
    assert (qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim) == (128, 512, 64)
    assert backend == "trtllm-gen"
    assert not workspace_buffer.any()
    assert kv_cache.shape[1] == 1
    assert kv_cache.shape[2] in (32, 64)
    assert block_tables.shape[1] % (128 / kv_cache.shape[2]) == 0
    assert max_seq_len >= int(seq_lens.max())
    assert out.shape == (*query.shape[:-1], kv_lora_rank)
    assert out.dtype == torch.bfloat16
    pages = kv_cache.transpose(1, 2)
    found, sums = attend_causal(query, pages, pages[..., :512], block_tables, seq_lens, bmm1_scale)
    out.copy_(found * bmm2_scale)
    if return_lse:
        lse.copy_(sums.flatten(0, 1) / math.log(2))
    return out


def cutlass_mla_get_workspace_size(*, max_seq_len, num_batches, num_kv_splits):
    assert min(max_seq_len, num_batches, num_kv_splits) > 0
    return 16 * num_batches


def cutlass_mla_decode(
    *, q_nope, q_pe, kv_c_and_k_pe_cache, seq_lens, page_table, workspace, sm_scale, num_kv_splits
):
    assert (q_nope.shape[2], q_pe.shape[2], kv_c_and_k_pe_cache.shape[2]) == (512, 64, 576)
    assert page_table.shape[1] % (128 / kv_c_and_k_pe_cache.shape[1]) == 0
    assert len(workspace) >= 16 * len(seq_lens)
    assert num_kv_splits == 1
    pages = kv_c_and_k_pe_cache[:, :, None]
    query = torch.cat([q_nope, q_pe], 2)[:, None]
    found, _ = attend_causal(query, pages, pages[..., :512], page_table, seq_lens, sm_scale)
    return found[:, 0].to(q_nope.dtype)


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    *,
    out=None,
    page_table,
    cache_seqlens,
    cache_batch_idx=None,
    causal=False,
    window_size=(-1, -1),
    softmax_scale,
    softcap=0.0,
    return_softmax_lse=False,
    cu_seqlens_q=None,
    max_seqlen_q=None,
    scheduler_metadata=None,
):
    """FlashAttention-3's; whatever lies in the storage after a table's row is its row's, too."""
    assert page_table.dtype == cache_seqlens.dtype == torch.int32
    assert page_table.stride(-1) == 1
    page = k_cache.shape[1]
    assert page <= 64, "a whole tile of keys may be read past the last"
    if scheduler_metadata is not None:
        scheduled = tile_schedule(
            len(cache_seqlens),
            q.shape[1] if cu_seqlens_q is None else max_seqlen_q,
            page_table.shape[1] * page,
            q.shape[-2],
            k_cache.shape[2],
            q.shape[-1],
            cache_seqlens,
            q.dtype,
            cu_seqlens_q=cu_seqlens_q,
            page_size=page,
            causal=causal,
            window_size=window_size,
            has_softcap=softcap > 0,
        )
        assert scheduler_metadata.equal(scheduled), "a schedule of another call, or other lengths"
    if cache_batch_idx is None:
        assert len(page_table) == len(cache_seqlens)
        cache_batch_idx = torch.arange(len(cache_seqlens), dtype=torch.int32)
    assert cache_batch_idx.dtype == torch.int32
    assert cache_batch_idx.is_contiguous()
    flat = q.flatten(0, 1) if cu_seqlens_q is None else q
    # what a row without keys gets
    result = torch.zeros_like(flat)
    lse = torch.full(flat.shape[:2], float("-inf"))
    bounds = cu_seqlens_q
    if bounds is None:
        bounds = torch.arange(0, len(flat) + 1, q.shape[1])
    entries = page_table.as_strided((page_table.untyped_storage().nbytes() // 4,), (1,), 0)
    keys, values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    # as the kernels are chosen: a window no list can outgrow is none
    longest = page_table.shape[1] * page
    left = window_size[0] if 0 <= window_size[0] < longest - 1 else -1
    for b, length in enumerate(cache_seqlens.tolist()):
        first, last = bounds[b : b + 2].tolist()
        assert max_seqlen_q is None or last - first <= max_seqlen_q
        begin = page_table.storage_offset() + int(cache_batch_idx[b]) * page_table.stride(0)
        pages = entries[begin : begin - (-length // page)].long()
        slots = (pages[:, None] * page + torch.arange(page)).flatten()[:length]
        mine = keys[slots].double(), values[slots].double()
        for i in range(first, last):
            place = length - (last - i) if causal or left >= 0 else length - 1
            seen = slice(max(0, place - left) if left >= 0 else 0, place + 1)
            if place >= 0:
                parts = (part[seen] for part in mine)
                result[i], lse[i] = attend(flat[i], *parts, softmax_scale, softcap)
    lse = lse.T if cu_seqlens_q is not None else lse.unflatten(0, q.shape[:2]).transpose(1, 2)
    out = torch.empty_like(q) if out is None else out
    out.copy_(result.view(q.shape))
    return (out, lse.contiguous()) if return_softmax_lse else out


def tile_schedule(
    batch_size,
    max_seqlen_q,
    max_seqlen_k,
    num_heads,
    num_heads_k,
    headdim,
    cache_seqlens,
    qkv_dtype=torch.bfloat16,
    *,
    cu_seqlens_q=None,
    page_size=None,
    causal=False,
    window_size=(-1, -1),
    has_softcap=False,
):
    """All that a schedule of FlashAttention-3's follows from, as numbers."""
    assert cache_seqlens.dtype == torch.int32
    assert len(cache_seqlens) == batch_size
    lens = [max_seqlen_q] * batch_size if cu_seqlens_q is None else cu_seqlens_q.diff().tolist()
    width = {torch.float16: 2, torch.bfloat16: 3}[qkv_dtype]
    form = [max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim, width, page_size]
    form += [causal, *window_size, has_softcap]
    return torch.tensor([*form, *lens, *cache_seqlens.tolist()], dtype=torch.int32)


def get_scheduler_metadata(**options):
    """FlashAttention-3's."""
    return tile_schedule(**options)


def get_mla_metadata(cache_seqlens, num_q_tokens_per_head_k, num_heads_k):
    """A plan made of the lengths, whose staleness a run notices."""
    assert cache_seqlens.dtype == torch.int32
    assert num_heads_k == 1
    parts = torch.full((3, 8), num_q_tokens_per_head_k, dtype=torch.int32)
    return parts, torch.cat([cache_seqlens.new_zeros(1), cache_seqlens.cumsum(0).int()])


def flash_mla_with_kvcache(
    q,
    k_cache,
    block_table,
    cache_seqlens,
    head_dim_v,
    tile_scheduler_metadata,
    num_splits,
    softmax_scale,
    causal,
):
    """FlashMLA's."""
    assert k_cache.shape[1:] == (64, 1, 576)
    assert (tile_scheduler_metadata == q.shape[1] * q.shape[2]).all()
    assert (num_splits.diff() == cache_seqlens).all(), "a plan of other lengths"
    assert causal == (q.shape[1] > 1)
    out, lse = attend_causal(
        q, k_cache, k_cache[..., :head_dim_v], block_table, cache_seqlens, softmax_scale
    )
    return out.to(q.dtype), lse.float().transpose(1, 2)
