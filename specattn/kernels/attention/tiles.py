"""Tile tables of the attention kernels, and limits of a device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from specattn.kernels.launch import power_of_2

FLOAT8 = torch.float8_e4m3fn
# shared memory of a multiprocessor that every resident CTA takes besides its own
RESERVED = 1024
LOG2E = 1.4426950408889634
# keys of the shortest prefix that requests share; half as many is what a group saves per request at
# least: a partial result more to write and merge costs a request about two tiles
SHARE_FROM = 256
# requests of a batch that may share: all are looked up at once
MOST_SHARERS = 256


def padded(width: int) -> int:
    """Return a tile's row width: a power of two from 16."""
    return max(16, power_of_2(width))


def logit_factors(scale: float, cap: float) -> tuple[float, float, float]:
    """Return ``base2, cap_in, cap_out``, which make logits in base 2.

    Those are ``base2 * s``, and with a cap ``cap_out * tanh(cap_in * s)``.
    """
    return scale * LOG2E, scale / cap if cap else 0.0, cap * LOG2E


@dataclass(frozen=True)
class DeviceLimits:
    """The limits of a device that launch constants depend on.

    Parameters
    ----------
    sms : int
        Multiprocessors to plan for.
    shared : int
        Bytes of shared memory a CTA can have.
    major : int
        Compute capability, the first number.
    """

    sms: int
    shared: int
    major: int

    @classmethod
    def of(cls, device: torch.device) -> DeviceLimits:
        """Read a CUDA device's limits; of others, 2 multiprocessors suit the interpreter."""
        if device.type != "cuda":
            return cls(2, HOPPER.shared, HOPPER.major)
        props = torch.cuda.get_device_properties(device)
        shared = props.shared_memory_per_multiprocessor - RESERVED
        return cls(props.multi_processor_count, shared, props.major)


HOPPER = DeviceLimits(sms=132, shared=227 * 1024, major=9)


@dataclass(frozen=True)
class TileConfig:
    """Launch constants of one attention kernel.

    Parameters
    ----------
    block_m, block_n : int
        Query rows (tokens × heads of a group) and keys per tile, powers of two from 16.
    warps, stages : int
        Warps per CTA; tiles in flight.
    ctas_per_sm : int
        Resident CTAs the grid is sized for. More than fit would run in waves.
    max_regs : int
        Register limit per thread, 0 for none.
    short : int
        Runs of at most this many full tiles go through the masked loop, which saves filling a
        second pipeline.
    min_tiles : int
        Key tiles a split of work holds at least, when a batch is small.
    """

    block_m: int
    block_n: int
    warps: int = 4
    stages: int = 3
    ctas_per_sm: int = 2
    max_regs: int = 0
    short: int = 8
    min_tiles: int = 1


@dataclass(frozen=True)
class MergeTile:
    """Launch constants of the kernel that merges the partials of requests.

    Parameters
    ----------
    rows : int
        Query rows of a program, a power of two.
    partials : int
        Parts that are loaded at once.
    many : int
        Parts that are loaded at once as long as there are as many; 0 for no such loop.
    span : int
        Columns of a program, a power of two; 0 for all.
    """

    rows: int
    partials: int
    many: int = 0
    span: int = 0


def merge_tile(batch: int) -> MergeTile:
    """Choose by the number of requests: few have many partials each."""
    return MergeTile(4 if batch == 1 else 8, 33 if batch <= 2 else 17 if batch <= 4 else 8)


def sharing_rows(rows: int, kv_dtype: torch.dtype, *, rests: bool) -> int:
    """Return the rows to choose a tile for where prefixes are shared.

    So many read a key at once. A request that shares nothing leaves more of them empty.

    Parameters
    ----------
    rows : int
        Packed rows of a request.
    kv_dtype : torch.dtype
        Of keys.
    rests : bool
        Whether half a tile without rows costs no products (Gluon).
    """
    # 128 in place of 64 halves what a group of trees reads; float8 tiles are shorter then
    wide = rests and rows > 16 and kv_dtype != FLOAT8
    return max(rows, 128 if wide else 64)


def fit_tile(
    tile: TileConfig, key_bytes: int, query_bytes: int, limits: DeviceLimits
) -> TileConfig:
    """Shrink a tile until its CTAs have room on a multiprocessor.

    Tiles for Hopper stay as they are. The order, bytes in flight before the size of a tile before
    occupancy, is a choice, not a measurement.

    Parameters
    ----------
    tile : TileConfig
        What the table says.
    key_bytes, query_bytes : int
        Bytes in shared memory of a key, with its value where that is stored apart, and of a row.
    limits : DeviceLimits
        Of the device.
    """
    if limits.major == HOPPER.major:
        return tile
    if limits.major < HOPPER.major:
        # mma.sync keeps the queries in registers; a product's result may pass through memory
        query_bytes //= 4
    while limits.shared + RESERVED < tile.ctas_per_sm * (
        tile.stages * tile.block_n * key_bytes + tile.block_m * query_bytes + RESERVED
    ):
        if tile.stages > 2:
            tile = replace(tile, stages=tile.stages - 1)
        elif tile.block_n > 32:
            tile = replace(tile, block_n=tile.block_n // 2)
        elif tile.ctas_per_sm > 1:
            tile = replace(tile, ctas_per_sm=tile.ctas_per_sm - 1)
        elif tile.block_m > 16:
            tile = replace(tile, block_m=tile.block_m // 2)
        else:
            break
    return tile


def tile_config(
    rows: int,
    head_dim: int,
    v_head_dim: int,
    dtype: torch.dtype,
    batch: int,
    limits: DeviceLimits = HOPPER,
) -> TileConfig:
    """Choose the tile by packed rows (tokens × group), head size, device.

    ``dtype`` is that of the keys. One captured graph serves every length, so nothing here may
    depend on it. The 16-bit values for heads up to 128 were measured on an H200. The others keep
    clear of spills and of the shared memory a CTA can have, by what the compiler reports.
    """
    key, value = power_of_2(head_dim), power_of_2(v_head_dim)
    if dtype == torch.float32:
        # IEEE products run on the FMA units: registers set the limits
        tile = TileConfig(16, 32 if key + value <= 256 else 16, stages=2)
    elif limits.major == HOPPER.major and dtype == FLOAT8:
        tile = _float8_tile(rows, key + value)
    elif limits.major == HOPPER.major:
        tile = _hopper_tile(rows, key + value, batch)
    else:
        tile = _other_tile(rows, key + value)
    size = _item_bytes(dtype)
    return fit_tile(tile, (key + value) * size, key * size, limits)


def _other_tile(rows: int, width: int) -> TileConfig:
    """Tiles where operands of products pass through registers, or accumulators do not."""
    if rows <= 16:
        return TileConfig(16, 64 if width <= 256 else 32, ctas_per_sm=3, max_regs=168)
    if width > 256:
        return TileConfig(64, 32, warps=8, ctas_per_sm=1)
    if rows <= 64:
        return TileConfig(64, 64)
    return TileConfig(128, 64, warps=8, ctas_per_sm=1)


def _hopper_tile(rows: int, width: int, batch: int) -> TileConfig:
    # a limit of 168 leaves the register file room for a merge CTA, which then starts early; with
    # few requests its own CTAs are larger
    few = batch <= 4
    if rows <= 16:
        return TileConfig(16, 64 if width <= 256 else 32, ctas_per_sm=3, max_regs=168)
    if rows <= 64:
        if width <= 256:
            return TileConfig(64, 64, max_regs=168 if few else 192)
        if width <= 384:
            return TileConfig(64, 64, ctas_per_sm=1)
        return TileConfig(64, 32, stages=4, ctas_per_sm=1)
    if width <= 256:
        return TileConfig(128, 128, warps=8, ctas_per_sm=1)
    return TileConfig(128, 64, warps=8, stages=3 if width <= 384 else 2, ctas_per_sm=1)


def _float8_tile(rows: int, width: int) -> TileConfig:
    """Choose what compiles over float8 keys for sm_90 without spills.

    A float8 tile is converted on its way to the products, once per tile of query rows, and takes
    half the room in flight: wide tiles pay. Up to 64 rows, 128 keys in two CTAs per multiprocessor
    were the best of a prototype on an H200. Fewer rows gain nothing from smaller tiles, whose
    products read their operands byte by byte.
    """
    if rows <= 64:
        if width <= 256:
            return TileConfig(64, 128)
        return TileConfig(64, 64 if width <= 384 else 32)
    block_n = 128 if width <= 256 else 64 if width <= 384 else 32
    return TileConfig(128, block_n, warps=8, ctas_per_sm=1)


def _item_bytes(dtype: torch.dtype) -> int:
    """Return a number's bytes in shared memory, where float8 becomes 16 bits."""
    return max(dtype.itemsize, 2)


def deterministic_tile_config(
    head_dim: int, v_head_dim: int, dtype: torch.dtype, limits: DeviceLimits = HOPPER
) -> TileConfig:
    """Choose the one tile of deterministic attention, whatever batch and mode."""
    return tile_config(64, head_dim, v_head_dim, dtype, 1024, limits)


def extend_tile_config(
    head_dim: int, v_head_dim: int, dtype: torch.dtype, limits: DeviceLimits = HOPPER
) -> TileConfig:
    """Choose the tile of the prompt kernel, which is bound by arithmetic."""
    key, value = power_of_2(head_dim), power_of_2(v_head_dim)
    width = key + value
    if dtype == torch.float32:
        tile = TileConfig(32, 32 if width <= 256 else 16, warps=8, stages=2, ctas_per_sm=1)
    elif limits.major != HOPPER.major:
        tile = _other_tile(128, width)
    else:
        # 128 keys a tile were 11 to 48 % slower
        tile = TileConfig(128, 64, warps=8, stages=3 if width <= 384 else 2, ctas_per_sm=1)
    size = _item_bytes(dtype)
    return fit_tile(tile, width * size, key * size, limits)


@dataclass(frozen=True)
class GluonTile(TileConfig):
    """Launch constants of the Gluon kernel; ``warps`` and ``short`` do not apply.

    Parameters
    ----------
    block_m : int
        64 or 128: one or two consumer warpgroups.
    producer_regs, consumer_regs : int
        Registers per thread of the producer and of the second consumer; the first consumer has
        what is left of ``max_regs`` per thread of the CTA.
    pages : bool
        Whole pages come by TMA, where the pool has pages.
    raw_stages : int
        Tiles of float8 keys and values on their way to the warps that convert them; 0 where they
        have 16 bits, as has all that follows.
    converters, converter_regs : int
        Those warps, for keys and as many for values, and their registers per thread.
    """

    producer_regs: int = 72
    consumer_regs: int = 216
    pages: bool = False
    raw_stages: int = 0
    converters: int = 4
    converter_regs: int = 72


def gluon_tile_config(
    rows: int,
    head_dim: int,
    batch: int,
    page_size: int,
    kv_dtype: torch.dtype,
    has_cap: bool = False,
) -> GluonTile:
    """Choose the tile by packed rows, head size, batch and page."""
    if kv_dtype == FLOAT8:
        return _gluon_float8_tile(rows)
    if rows > 64:
        tile = GluonTile(128, 128, ctas_per_sm=1, max_regs=168)
        if head_dim > 128:
            return replace(tile, block_n=64, stages=2, producer_regs=56, consumer_regs=224)
        if page_size >= 16:
            return replace(tile, producer_regs=56, consumer_regs=224, pages=True)
        # of few requests: two CTAs share the rows, so half as many partial results are merged
        if rows <= 128 and batch <= 4 and head_dim == 128 and not has_cap:
            return replace(tile, block_m=64)
        return tile
    if head_dim > 128:
        return GluonTile(64, 64, ctas_per_sm=1, max_regs=168)
    # a cap's arithmetic hides behind the copies only where two CTAs share a multiprocessor
    if batch <= 8 and head_dim == 128 and not has_cap:
        return GluonTile(64, 64, stages=6, ctas_per_sm=1, max_regs=168, min_tiles=2)
    return GluonTile(64, 64, max_regs=128, producer_regs=56)


def _gluon_float8_tile(rows: int) -> GluonTile:
    """Choose a tile with room to convert float8 keys."""
    tile = GluonTile(64, 128, stages=2, ctas_per_sm=1, max_regs=128, raw_stages=2)
    if rows <= 64:
        return replace(tile, converter_regs=88)
    return replace(
        tile,
        block_m=128,
        block_n=64,
        stages=3,
        max_regs=96,
        producer_regs=56,
        consumer_regs=152,
        raw_stages=3,
        converter_regs=56,
    )


def gluon_extend_tile(head_dim: int, page_size: int, kv_dtype: torch.dtype) -> GluonTile:
    """Choose the tile of prompts, which are bound by arithmetic."""
    if kv_dtype == FLOAT8 or head_dim > 128:
        return gluon_tile_config(128, head_dim, 1, page_size, kv_dtype)
    tile = GluonTile(128, 128, stages=2, ctas_per_sm=1, max_regs=168)
    if page_size >= 16:
        return replace(tile, producer_regs=56, consumer_regs=224, pages=True)
    return replace(tile, producer_regs=88, consumer_regs=208)
