"""FlashInfer's wrappers as its 0.6.12 source has them, with the kernels in plain torch.

Plans are copied to the buffers handed over at construction and read back by ``run``; the work is
cut by FlashInfer's rules, so that workspaces and tiles are held to them without a GPU.
"""

from __future__ import annotations

import math
import sys

import pytest
import torch

from specattn.backends.flashinfer import FlashInferBackend
from specattn.backends.flashinfer_mla import FlashInferMlaBackend

PROCESSORS = 132
NONE = -5e4  # FlashInfer's minus infinity, before scaling


def install(monkeypatch):
    """Take the library's place on a machine without a GPU; with one, skip without the library."""
    if torch.cuda.is_available():
        if reasons := FlashInferBackend.reasons(None, torch.device("cuda")):
            pytest.skip("; ".join(reasons))
        return
    take_the_place(monkeypatch)
    monkeypatch.setattr(FlashInferBackend, "reasons", staticmethod(lambda config, device: []))


def take_the_place(monkeypatch):
    """Stand for the library; what backends say of the machine stays."""
    here = sys.modules[__name__]
    for name in ("flashinfer", "flashinfer.mla"):
        monkeypatch.setitem(sys.modules, name, here)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    for backend in (FlashInferBackend, FlashInferMlaBackend):
        monkeypatch.setattr(backend, "processors", lambda _: PROCESSORS)


def ceil(a: int, b: int) -> int:
    return -(-a // b)


def tile_of(rows: int, head_dim: int) -> int:
    if rows > 64 and head_dim < 256:
        return 128
    return 64 if rows > 16 else 16


def cut(rows, keys, total, heads, head_dim, window, graph, whole=False):
    """``PrefillSplitQOKVIndptr`` and ``PrefillPlan``: query tile, float and int bytes."""
    group, batch = heads[0] // heads[1], len(rows)
    packed, most = [r * group for r in rows], 2 * PROCESSORS // heads[1]
    if graph:
        tile = tile_of((total - batch + 1) * group, head_dim)
        tiles = ceil(total * group, tile) + batch - 1
    else:
        tile = tile_of(sum(packed) // batch, head_dim)
        tiles = sum(ceil(p, tile) for p in packed)
    near = [min(window + tile, k) if window >= 0 else k for k in keys]
    low, high = 128, max(1, *near)

    def made(chunk):
        work = zip(packed, near, strict=True)
        return sum(ceil(p, tile) * ceil(max(k, 1), chunk) for p, k in work)

    if whole:
        low = high
    while low < high:
        mid = (low + high) // 2
        low, high = (mid + 1, high) if made(mid) > most else (low, mid)
    split = graph or low < max(1, *near)
    ctas = max(most, tiles) if graph else made(low)
    assert made(low) <= ctas, "new batch size should not exceed padded batch size"
    floats = heads[0] * ctas * tile * (head_dim + 1) * 4 + 64 if split else 0
    return tile, floats, 13 * ctas + 4 * (batch + 1 + total + 1) + 256


class Wrapper:
    """What both wrappers share."""

    def reset_workspace_buffer(self, floats, ints):
        assert floats.dtype == ints.dtype == torch.uint8
        self._float_workspace_buffer, self._int_workspace_buffer = floats, ints

    def _plan(self, rows, offsets, indices, last, heads, dim, page_size, options):
        assert page_size == 1
        assert (last == 1).all()
        assert offsets.device.type == rows.device.type == "cpu", "a plan must not read the device"
        assert offsets.dtype == rows.dtype == torch.int32
        assert options.pop("q_data_type") == options.pop("kv_data_type") == torch.bfloat16
        whole = options.pop("disable_split_kv", False)
        assert not (whole and self.graph), "padded blocks would read what a plan did not write"
        self.options, self.total = options, int(rows[-1])
        keys, total = offsets.diff().tolist(), int(rows[-1])
        self.tile, floats, ints = cut(
            rows.diff().tolist(), keys, total, heads, dim, options["window_left"], self.graph, whole
        )
        assert floats <= self._float_workspace_buffer.numel(), "Buffer overflow: float workspace"
        assert ints <= self._int_workspace_buffer.numel(), "Buffer overflow: int workspace"
        if self.graph:
            assert len(offsets) == len(self.offsets)
            assert len(indices) <= len(self.indices)
            self.offsets.copy_(offsets)
            self.indices[: len(indices)].copy_(indices)
        else:
            self.offsets, self.indices = offsets.clone(), indices

    def _rows(self, q, cache, out, lse, rows, causal, masks=None):
        """One query row at a time; ``masks`` are FlashInfer's packed bytes and their offsets."""
        k, v = (pool[:, 0].double() for pool in cache)
        scale, cap = self.options["sm_scale"], self.options["logits_soft_cap"]
        window = self.options["window_left"]
        assert len(q) == self.total
        assert out.is_contiguous()
        group = q.shape[1] // k.shape[1]
        starts, ends = rows[:-1].tolist(), rows[1:].tolist()
        offsets, indices = self.offsets.tolist(), self.indices.tolist()
        for b, (start, end) in enumerate(zip(starts, ends, strict=True)):
            slots = indices[offsets[b] : offsets[b + 1]]
            for row in range(start, end):
                i, total = row - start, len(slots)
                if not total:
                    out[row] = 0.0
                    if lse is not None:
                        lse[row] = NONE
                    continue
                seen = torch.ones(total, dtype=torch.bool)
                here = total - (end - start) + i
                if masks is not None:
                    cells = i * total + torch.arange(total)
                    seen = masks[0][int(masks[1][b]) + cells // 8] >> cells % 8 & 1 == 1
                elif causal:
                    seen = torch.arange(total) <= here
                if window >= 0:
                    seen = seen & (torch.arange(total) >= here - window)
                keys = k[slots].repeat_interleave(group, 1)  # [N, Hq, D]
                logits = (keys * q[row].double()).sum(-1)
                logits = cap * torch.tanh(logits * scale / cap) if cap else logits * scale
                logits = logits.masked_fill(~seen[:, None], NONE)
                top = logits.amax(0)
                weights = (logits - top).exp()
                values = (weights[..., None] * v[slots].repeat_interleave(group, 1)).sum(0)
                out[row] = torch.where(top == NONE, 0.0, 1 / weights.sum(0))[:, None] * values
                if lse is not None:
                    base2 = weights.sum(0).log2()
                    lse[row] = base2 + torch.where(top == NONE, top, top / math.log(2))


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
        backend="auto",
    ):
        assert kv_layout == "NHD"
        assert use_cuda_graph
        assert backend == "fa2"
        self.graph, self.tensor_cores = use_cuda_graph, use_tensor_cores
        self.offsets, self.indices = paged_kv_indptr_buffer, paged_kv_indices_buffer
        assert len(paged_kv_last_page_len_buffer) == len(self.offsets) - 1

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
        group = num_qo_heads // num_kv_heads
        assert self.tensor_cores or group in (1, 2, 3, 4, 8), f"Unsupported group_size: {group}"
        rows = torch.arange(len(indptr), dtype=torch.int32)
        heads = num_qo_heads, num_kv_heads
        self._plan(rows, indptr, indices, last_page_len, heads, head_dim, page_size, options)

    def run(self, q, paged_kv_cache, out, lse, return_lse):
        assert return_lse == (lse is not None)
        self._rows(q, paged_kv_cache, out, lse, torch.arange(len(self.offsets)), causal=True)


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
    ):
        assert kv_layout == "NHD"
        assert backend == "fa2"
        self.graph, self.rows = use_cuda_graph, qo_indptr_buf
        self.offsets, self.indices = paged_kv_indptr_buf, paged_kv_indices_buf
        self.mask, self.mask_offsets = custom_mask_buf, mask_indptr_buf

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
        packed_custom_mask=None,
        causal=False,
        max_token_per_sequence=None,
        **options,
    ):
        assert max_token_per_sequence == qo_indptr.diff().max()
        self._plan(
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            (num_qo_heads, num_kv_heads),
            head_dim_qk,
            page_size,
            options,
        )
        self.causal = causal
        assert packed_custom_mask is None or not causal
        # cells, not bytes: what FlashInfer derives when it has not packed the mask itself
        cells = torch.zeros_like(qo_indptr)
        cells[1:] = (qo_indptr.diff() * paged_kv_indptr.diff()).cumsum(0)
        if not self.graph:
            self.rows = qo_indptr
            self.mask, self.mask_offsets = packed_custom_mask, cells
            return
        self.rows.copy_(qo_indptr)
        assert (packed_custom_mask is None) == (self.mask is None)
        if packed_custom_mask is not None:
            self.mask[: len(packed_custom_mask)].copy_(packed_custom_mask)
            self.mask_offsets.copy_(cells)

    def run(self, q, paged_kv_cache, out, lse, return_lse):
        assert return_lse == (lse is not None)
        masks = None if self.mask is None else (self.mask.int(), self.mask_offsets)
        self._rows(q, paged_kv_cache, out, lse, self.rows, self.causal, masks)


class BatchMLAPagedAttentionWrapper:
    """The host side of FlashInfer's wrapper, and its kernels in plain torch.

    The lists are read where the plan says, not where the buffer of offsets does: the kernels have
    their own copy of a plan, made when it was.
    """

    def __init__(
        self,
        float_workspace_buffer,
        use_cuda_graph=False,
        qo_indptr=None,
        kv_indptr=None,
        kv_indices=None,
        kv_len_arr=None,
        backend="auto",
    ):
        processed = PROCESSORS * 128 * (512 * 2 + 4)
        assert float_workspace_buffer.numel() >= processed
        self.graph = use_cuda_graph
        self.buffers = qo_indptr, kv_indptr, kv_indices, kv_len_arr
        self._kv_indices_buf = kv_indices

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
        given = qo_indptr, kv_indptr, kv_indices, kv_len_arr
        for tensor in (qo_indptr, kv_indptr, kv_len_arr):
            assert tensor.device.type == "cpu", "a plan must not read the device"
            assert tensor.dtype == torch.int32
        assert (head_dim_ckv, head_dim_kpe, page_size) == (512, 64, 1)
        assert q_data_type == kv_data_type == torch.bfloat16
        assert 128 % num_heads == 0
        if self.graph:
            for buffer, tensor in zip(self.buffers, given, strict=True):
                buffer[: len(tensor)].copy_(tensor)
            self.indices = self.buffers[2]
        else:
            assert (qo_indptr.diff() > 0).all(), "they would skew the tile"
            self.indices = kv_indices
        self.work = [t.tolist() for t in (qo_indptr, kv_indptr, kv_len_arr)]
        self.causal, self.scale = causal, sm_scale

    def run(self, q_nope, q_pe, ckv, kpe, out, lse, return_lse, return_lse_base_on_e):
        assert ckv.shape[1:] == (1, 512)
        assert kpe.shape[1:] == (1, 64)
        assert return_lse_base_on_e
        assert return_lse == (lse is not None)
        rows, starts, lens = self.work
        for b, length in enumerate(lens):
            slots = self.indices[starts[b] : starts[b] + length].long()
            for row in range(rows[b], rows[b + 1]):
                seen = slots[: length - (rows[b + 1] - row) + 1] if self.causal else slots
                keys, values = torch.cat([ckv, kpe], -1)[seen, 0], ckv[seen, 0]
                q = torch.cat([q_nope[row], q_pe[row]], -1)
                logits = q.double() @ keys.double().T * self.scale
                out[row] = logits.softmax(-1) @ values.double() if len(seen) else 0.0
                if lse is not None:
                    lse[row] = logits.logsumexp(-1)


class Event:
    """`torch.cuda.Event` where there is no CUDA: everything has happened already."""

    def record(self):
        pass

    def synchronize(self):
        pass
