"""Latent tree attention: absorbed MLA in every tree mode, and over index lists.

The plan and the merge are those of `attention.tree`; the kernel between them (`triton_tree`, or
`gluon` where the tile says so) reads the row of a token once, as key and as value, for all
heads.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from specattn.kernels.attention import naive as twin
from specattn.kernels.attention.gluon import GluonTile
from specattn.kernels.attention.tiles import HOPPER, DeviceLimits, MergeTile, TileConfig, fit_tile
from specattn.kernels.attention.tree import TreeAttention, _row_strides
from specattn.kernels.gluon_guard import gluon_ok
from specattn.kernels.mla.triton_tree import mla_attention_kernel

# a row of DeepSeek's, padded: no model has a wider one
ROW = 512 + 64
# two tiles of 73 KB and the queries fill the shared memory of a CTA; warps are the Triton kernel's
GLUON = GluonTile(64, 64, warps=8, stages=2, ctas_per_sm=1, max_regs=168, min_tiles=2)
# results are 512 columns wide; within 2 % of the best of seven for every batch measured
MERGE = MergeTile(8, parts=8, many=16, span=128)


def choose_mla_tile(
    rows: int, dtype: torch.dtype, head_dim: int, v_head_dim: int, device: torch.device
) -> TileConfig:
    """Choose the kernel and its tile.

    16-bit rows of 512 + 64 numbers take the Gluon kernel on a Hopper GPU where that kernel has
    passed its check; the first call runs it, so it must not be made under a graph's capture.
    """
    if (
        dtype in (torch.float16, torch.bfloat16)
        and (head_dim, v_head_dim) == (576, 512)
        and gluon_ok("mla_gluon", check_mla_gluon, device)
    ):
        return GLUON
    return mla_tile_config(rows, dtype, DeviceLimits.of(device))


def mla_tile_config(rows: int, dtype: torch.dtype, limits: DeviceLimits = HOPPER) -> TileConfig:
    """Choose by packed rows (query tokens × heads), as `tile_config` does; BN is at most 64.

    An accumulator of 512 columns sets the limits, above 32 rows with the queries in shared memory.
    The 16-bit tile up to 16 rows was the best of a prototype on an H200; the others were chosen
    by what compiles without spills in the loop over full tiles, or with few, and not yet timed.
    """
    if limits.major != HOPPER.major and dtype != torch.float32:
        # not yet timed, either; tensor memory would want each tile several times in shared memory
        tile = TileConfig(16, 32) if rows <= 16 else TileConfig(32, 32, warps=8, ctas_per_sm=1)
    else:
        tile = _hopper_tile(rows, dtype)
    return fit_tile(tile, ROW * dtype.itemsize, ROW * dtype.itemsize, limits)


def _hopper_tile(rows: int, dtype: torch.dtype) -> TileConfig:
    if dtype == torch.float32:
        # IEEE products run on the FMA units
        return TileConfig(16, 16, warps=8, stages=2)
    if rows <= 16:
        return TileConfig(16, 32)
    if rows <= 32:
        return TileConfig(32, 32, warps=8, ctas_per_sm=1)
    # of 32 keys, both warpgroups would compute the same logits from the narrowest products
    return TileConfig(64, 64, warps=8, stages=2, ctas_per_sm=1)


def check_mla_gluon(device: torch.device, tile: GluonTile = GLUON) -> None:
    """Hold the Gluon kernel to torch: short and cut requests, several segments, a tree.

    Raises
    ------
    ArithmeticError
        If it disagrees.
    """
    lengths, q_len, scale = [0, 3000, 61, 130], 3, 576**-0.5
    batch = len(lengths)
    random = torch.Generator(device).manual_seed(0)
    pool = torch.randn(4096, 1, 576, generator=random, device=device).bfloat16()
    q = torch.randn(batch * q_len, 16, 576, generator=random, device=device).bfloat16()
    slots = torch.randint(
        4096, (batch, max(lengths) + q_len), generator=random, device=device, dtype=torch.int32
    )
    plan: dict[str, Any] = {
        "seq_lens": torch.tensor(lengths, dtype=torch.int32, device=device),
        "req_pool_indices": torch.arange(batch, device=device),
    }
    tree: dict[str, Any] = {
        "tail_slots": slots[:, -q_len:],
        "tail_positions": None,
        "positions": None,
        # the second and the third node are children of the first
        "tail_words": torch.tensor([1, 3, 5], device=device).repeat(batch, 1)[..., None],
    }
    got, want = (torch.full_like(q[..., :512], torch.nan) for _ in range(2))
    sums, want_sums = (torch.full(q.shape[:2], torch.nan, device=device) for _ in range(2))
    kernel = MlaAttention(
        batch=batch,
        q_len=q_len,
        tail_len=q_len,
        num_qo_heads=16,
        head_dim=576,
        v_head_dim=512,
        dtype=q.dtype,
        device=device,
        sm_scale=scale,
        tile=tile,
    )
    kernel.plan(plan["seq_lens"], plan["req_pool_indices"], slots.stride(0))
    kernel.run(q, pool, pool[..., :512], got, sums, indices=slots, **tree)
    twin.tree_attention(
        q,
        pool,
        pool[..., :512],
        want,
        want_sums,
        req_to_token=slots,
        sm_scale=scale,
        **plan,
        **tree,
    )
    off = ((got - want).float().norm() / want.float().norm()).item()
    sums_off = (sums - want_sums).abs().max().item()
    if not (off < 1e-2 and sums_off < 1e-3):
        raise ArithmeticError(f"relative error {off:.1e}, log-sum-exp off by {sums_off:.1e}")


class MlaAttention(TreeAttention):
    """Launch constants and workspace of one bucket; ``plan``, ``plan_csr`` and ``run`` as there.

    ``run`` takes the pool twice: ``k_cache [slots, 1, head_dim]``, and ``v_cache``, which must be
    the view of its first ``v_head_dim`` columns.

    Parameters
    ----------
    num_qo_heads : int
        Heads, all of which read the same rows.
    head_dim, v_head_dim : int
        Width of a row, and of its latent part.
    tile : TileConfig, optional
        Overrides `choose_mla_tile`.
    merge : MergeTile, optional
        Overrides `MERGE`.
    batch, q_len, tail_len, dtype, device, sm_scale, csr, workspace
        See `TreeAttention`.

    Raises
    ------
    ValueError
        If a number is out of range or the workspace does not fit.
    """

    def __init__(
        self,
        *,
        batch: int,
        q_len: int,
        tail_len: int,
        num_qo_heads: int,
        head_dim: int,
        v_head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        sm_scale: float,
        csr: bool = False,
        workspace: Tensor | None = None,
        tile: TileConfig | None = None,
        merge: MergeTile | None = None,
    ) -> None:
        tile = tile or choose_mla_tile(
            q_len * num_qo_heads, dtype, head_dim, v_head_dim, torch.device(device)
        )
        if tile.block_n > 64:
            raise ValueError(f"block_n must be at most 64, got {tile.block_n}")
        if not v_head_dim < head_dim:
            raise ValueError(f"v_head_dim must be below {head_dim}, got {v_head_dim}")
        super().__init__(
            batch=batch,
            q_len=q_len,
            tail_len=tail_len,
            num_qo_heads=num_qo_heads,
            num_kv_heads=1,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            dtype=dtype,
            device=device,
            sm_scale=sm_scale,
            csr=csr,
            workspace=workspace,
            tile=tile,
        )
        self.merge_tile = merge or MERGE

    def _check_run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        out: Tensor,
        lse: Tensor | None,
        indices: Tensor,
    ) -> None:
        super()._check_run(q, k_cache, v_cache, out, lse, indices)
        check_latent(k_cache, v_cache)

    def _attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        out: Tensor,
        lse: Tensor | None,
        indices: Tensor,
        tensors: tuple[Tensor | None, ...],
        strides: tuple[int, ...],
    ) -> None:
        tile, shape = self.shape.tile, self.shape
        _, tail_slots, _, tail_words = tensors
        if isinstance(tile, GluonTile) and _copies_16_bytes(q, k_cache):
            self._attend_gluon(tile, q, k_cache, out, lse, indices, tail_slots, tail_words, strides)
            return
        options: dict[str, Any] = {"num_warps": tile.warps, "num_stages": tile.stages}
        if tile.max_regs:
            options["maxnreg"] = tile.max_regs
        if self._pdl:
            options["launch_pdl"] = True
        mla_attention_kernel[(shape.max_chunks * shape.m_tiles,)](
            q,
            k_cache,
            out,
            lse,
            indices,
            tail_slots,
            tail_words,
            self.tables.requests,
            self.tables.chunks,
            self.partial_out,
            self.partial_lse,
            self.factors[0],
            q.stride(0),
            q.stride(1),
            *_row_strides(out),
            *_row_strides(lse),
            strides[1],
            *strides[3:],
            SLOT=k_cache.stride(0),
            Q_LEN=self.q_len,
            TAIL=self.tail_len,
            WORDS=self.words,
            HEADS=self.num_qo_heads,
            BM=tile.block_m,
            BN=tile.block_n,
            MT=shape.m_tiles,
            STAGES=tile.stages,
            SHORT=tile.short,
            PDL=self._pdl,
            **latent_widths(self.head_dim, self.v_head_dim),
            **options,
        )

    def _attend_gluon(
        self,
        tile: GluonTile,
        q: Tensor,
        k_cache: Tensor,
        out: Tensor,
        lse: Tensor | None,
        indices: Tensor,
        tail_slots: Tensor | None,
        tail_words: Tensor | None,
        strides: tuple[int, ...],
    ) -> None:
        # Gluon is experimental: nothing may need it where this kernel is not used
        from specattn.kernels.mla.gluon import mla_gluon_kernel

        shape = self.shape
        options = {"launch_pdl": True} if self._pdl else {}
        mla_gluon_kernel[(shape.max_chunks * shape.m_tiles,)](
            q,
            k_cache,
            out,
            lse,
            indices,
            tail_slots,
            tail_words,
            self.tables.requests,
            self.tables.chunks,
            self.partial_out,
            self.partial_lse,
            self.factors[0],
            q.stride(0) // 8,
            q.stride(1) // 8,
            *_row_strides(out),
            *_row_strides(lse),
            strides[1],
            *strides[3:],
            SLOT=k_cache.stride(0),
            Q_LEN=self.q_len,
            TAIL=self.tail_len,
            WORDS=self.words,
            HEADS=self.num_qo_heads,
            MT=shape.m_tiles,
            STAGES=tile.stages,
            PRODUCER_REGS=tile.producer_regs,
            CONSUMER_REGS=tile.consumer_regs,
            PDL=self._pdl,
            num_warps=4,
            maxnreg=tile.max_regs,
            **options,
        )


def _copies_16_bytes(*tensors: Tensor) -> bool:
    """Whether every row of every head begins at a multiple of 16 bytes."""
    return all(
        t.data_ptr() % 16 == 0 and t.stride(0) % 8 == 0 and t.stride(1) % 8 == 0 for t in tensors
    )


def latent_widths(head_dim: int, v_head_dim: int) -> dict[str, int]:
    """Return the widths of the two parts of a row as constants of the kernels."""
    rope = head_dim - v_head_dim
    return {
        "RANK": v_head_dim,
        "ROPE": rope,
        "RANK_PAD": max(16, triton.next_power_of_2(v_head_dim)),
        "ROPE_PAD": max(16, triton.next_power_of_2(rope)),
    }


def check_latent(k_cache: Tensor, v_cache: Tensor) -> None:
    """Raise unless ``v_cache`` is the view of the first columns of ``k_cache``.

    Raises
    ------
    ValueError
        If it has memory or strides of its own.
    """
    if v_cache.data_ptr() != k_cache.data_ptr() or v_cache.stride() != k_cache.stride():
        raise ValueError(
            f"v_cache must be k_cache[..., :{v_cache.shape[-1]}], a view, "
            f"got memory or strides of its own"
        )
