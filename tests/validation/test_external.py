"""What an engine hands over is refused before anything is written, by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specattn import AttnConfig, ExternalTable, KVPool, RequestStates, StepDecoder
from specattn.cache.external import as_slots
from specattn.config import KVScales
from tests.cache.test_external_steps import host
from tests.worlds import DEVICE

HEADS = AttnConfig(4, 2, 8)
LATENT = AttnConfig(4, 1, 8, v_head_dim=6, sm_scale=0.3, latent=True)
FULL = (9, 2, 8)


def caches(count=3, shape=FULL, dtype=torch.float32, device=DEVICE) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(count)]


def spoilt(at: int, cache: torch.Tensor) -> list[torch.Tensor]:
    return [cache if layer == at else good for layer, good in enumerate(caches())]


def half_elements() -> list[torch.Tensor]:
    """Layers of which one begins half a number off."""
    size = 9 * 2 * 8
    storage = bytearray(3 * 4 * size + 2)
    starts = (0, 4 * size, 8 * size + 2)
    return [
        torch.frombuffer(storage, dtype=torch.float32, count=size, offset=at).view(FULL)
        for at in starts
    ]


SHARED = caches(1)[0]
WIDE = torch.zeros(3, 9, 2, 12, device=DEVICE)
BAD_CACHES = {
    "too_few": ({"k": caches(2)}, "k must have 3 layers, got 2"),
    "stacked": ({"v": torch.zeros(2, *FULL, device=DEVICE)}, "v must have 3 layers, got 2"),
    "pages": (
        {"k": caches(shape=(9, 4, 2, 8))},
        r"k\[0\] must be \[9, 2, 8\] .* got \[9, 4, 2, 8\]",
    ),
    "slots": ({"v": caches(shape=(8, 2, 8))}, r"v\[0\] must be \[9, 2, 8\] .* got \[8, 2, 8\]"),
    "one_shorter": (
        {"k": spoilt(2, caches(shape=(8, 2, 8))[0])},
        r"k\[2\] must be \[9, 2, 8\] .* got \[8, 2, 8\]",
    ),
    "heads": ({"k": caches(shape=(9, 1, 8))}, r"k\[0\] must be \[9, 2, 8\] .* got \[9, 1, 8\]"),
    "dtype": ({"k": caches(dtype=torch.float16)}, r"k\[0\] must be .*float32 .* got .*float16"),
    "stored": ({"v": caches(dtype=torch.float8_e4m3fn)}, r"v\[0\] must be .*float32 .* got .*e4m3"),
    "device": ({"v": caches(device="meta")}, r"v\[0\] must be .* got .* on meta"),
    "strides": (
        {"k": spoilt(1, torch.zeros(9, 4, 8, device=DEVICE)[:, :2])},
        r"k\[1\] must be dense .* of all layers, \(16, 8, 1\), got \(32, 8, 1\)",
    ),
    "last_axis": (
        {"v": [layer.mT.contiguous().mT for layer in caches()]},
        r"v\[0\] must be dense in its last axis, .* got \(16, 1, 2\)",
    ),
    "expanded": (
        {"k": [layer[:1].expand(FULL) for layer in caches()]},
        r"k\[0\] must be .* its slots and heads apart, .* got \(0, 8, 1\)",
    ),
    "one_head_for_all": (
        {"k": [layer[:, :1].expand(FULL) for layer in caches()]},
        r"k\[0\] must be .* its slots and heads apart, .* got \(16, 0, 1\)",
    ),
    "overlapping_slots": (
        {"v": [layer.as_strided(FULL, (4, 40, 1)) for layer in caches()]},
        r"v\[0\] must be .* slots and heads apart, .* got \(4, 40, 1\)",
    ),
    "numbers": ({"k": caches(shape=())}, r"k\[0\] must be .* got \[\]"),
    "columns": ({"k": WIDE[..., :8], "v": WIDE[..., 4:]}, "two share it"),
    "no_slots": ({"k": caches(shape=(0, 2, 8))}, "num_slots must be 1.*, got 0"),
    "twice": ({"k": [SHARED, *caches(2)], "v": [*caches(2), SHARED]}, "two share it"),
    "no_values": ({"v": None}, "v must be given unless layers are latent"),
    "values": ({"layers": [LATENT] * 3, "k": caches(shape=(9, 1, 8))}, "v must be given unless"),
    "geometry": ({"layers": [HEADS, HEADS, replace(HEADS, num_kv_heads=1)]}, "one KV geometry"),
    "scales": ({"scales": [KVScales()] * 3}, "scales are those of float8 pools"),
}


@pytest.mark.parametrize(("bad", "message"), BAD_CACHES.values(), ids=BAD_CACHES)
def test_caches_that_are_no_pool_are_refused(bad, message):
    good = {"layers": [HEADS] * 3, "k": caches(), "v": caches()}
    with pytest.raises(ValueError, match=message):
        KVPool.from_external(**(good | bad))
    assert KVPool.from_external(**good).num_slots == 9


def test_layers_must_begin_whole_elements_apart():
    with pytest.raises(ValueError, match="whole elements of 4 bytes apart"):
        KVPool.from_external([HEADS] * 3, half_elements(), caches(device="cpu"))


BAD_PAGES = {
    "slots": (torch.zeros(FULL), r"must be \[num_pages, page_size, heads, dim\].* got \[9, 2, 8\]"),
    "empty": (torch.zeros(0, 4, 2, 8), r"not empty, got \[0, 4, 2, 8\]"),
    "trailer": (
        torch.zeros(3, 72).as_strided((3, 4, 2, 8), (72, 16, 8, 1)),
        r"multiple of page_size \(4\) slots apart, got pages 72 and slots 16 elements",
    ),
    "half_a_page": (torch.zeros(5, 6, 2, 8)[:, :4], "got pages 96 and slots 16 elements"),
    "one_page_for_all": (torch.zeros(1, 4, 2, 8).expand(3, 4, 2, 8), "got pages 0 and slots 16"),
    "one_slot_for_all": (torch.zeros(3, 1, 2, 8).expand(3, 4, 2, 8), "got pages 16 and slots 0"),
    "pages_last": (torch.zeros(4, 3, 2, 8).transpose(0, 1), "got pages 16 and slots 48"),
}


@pytest.mark.parametrize(("pages", "message"), BAD_PAGES.values(), ids=BAD_PAGES)
def test_pages_that_are_no_slots_are_refused(pages, message):
    with pytest.raises(ValueError, match=message):
        as_slots(pages)


def ints(*shape, dtype=torch.int32, device=DEVICE):
    return torch.full(shape, 7, dtype=dtype, device=device)


BAD_TABLES = {
    "one_axis": ({"req_to_token": ints(4)}, r"\[rows \+ 1, max_context_len\], got \[4\]"),
    "no_row": ({"req_to_token": ints(1, 64)}, r"\[rows \+ 1, max_context_len\], got \[1, 64\]"),
    "int64": ({"req_to_token": ints(4, 64, dtype=torch.int64)}, "req_to_token must be .*int32"),
    "columns": ({"req_to_token": ints(64, 4).T}, r"rows that are dense and apart, .*\(1, 4\)"),
    "one_row": ({"req_to_token": ints(1, 64).expand(4, 64)}, r"dense and apart, .*\(0, 1\)"),
    "reserved_rows": ({"reserved": ints(3)}, r"reserved must be \[4\] .* got \[3\]"),
    "reserved_int64": ({"reserved": ints(4, dtype=torch.int64)}, "reserved must be .*int32"),
    "reserved_device": ({"reserved": ints(4, device="meta")}, "reserved must be .* got .* on meta"),
    "reserved_strides": ({"reserved": ints(8)[::2]}, "reserved must be contiguous, got stride 2"),
    "page_size": ({"page_size": 3}, "page_size must be a power of two, got 3"),
    "num_slots": ({"num_slots": 7}, "num_slots must be at least two pages, got 7"),
    "no_block_stride": ({"block_stride": 0}, r"block_stride must be a multiple of .* got 0"),
    "block_stride": ({"block_stride": 6}, r"block_stride must be a multiple of .* got 6"),
}


@pytest.mark.parametrize(("bad", "message"), BAD_TABLES.values(), ids=BAD_TABLES)
def test_tables_that_no_step_can_read_are_refused(bad, message):
    good = {"req_to_token": ints(4, 64), "reserved": ints(4), "num_slots": 90, "page_size": 4}
    given = good | bad
    with pytest.raises(ValueError, match=message):
        ExternalTable(**given)
    assert all(
        (given[name] == 7).all()
        for name in ("req_to_token", "reserved")
        if given[name].device.type != "meta"
    )
    table = ExternalTable(**good)
    assert (table.num_pages, table.max_context_len, table.block_stride) == (22, 64, 4)
    assert not table.req_to_token[0].any()
    assert not table.reserved[0]
    assert (table.req_to_token[1:] == 7).all()
    assert (table.reserved[1:] == 7).all()


BAD_FILLS = {
    "rows": ({"rows": ints(2)}, r"rows must be \[2\] torch.int64"),
    "lens": ({"lens": ints(3)}, r"lens must be \[2\] .* got \[3\]"),
    "lens_strides": ({"lens": ints(4)[::2]}, r"lens must be dense .* got \(2,\)"),
    "blocks_int64": ({"block_table": ints(2, 16, dtype=torch.int64)}, "block_table must .*int32"),
    "blocks_rows": ({"block_table": ints(3, 16)}, r"block_table must be \[2, 16\] .* \[3, 16\]"),
    "blocks_device": ({"block_table": ints(2, 16, device="meta")}, "block_table must .* on meta"),
    "one_row": ({"rows": torch.tensor(1, device=DEVICE)}, r"rows must be \[1\] .* got \[\]"),
    "one_block": ({"block_table": ints()}, r"block_table must be \[2, 1\] .* got \[\]"),
    "blocks_columns": ({"block_table": ints(16, 2).T}, "block_table must be dense in its last"),
}


@pytest.mark.parametrize(("bad", "message"), BAD_FILLS.values(), ids=BAD_FILLS)
def test_blocks_of_another_kind_are_refused(bad, message):
    table = ExternalTable(ints(4, 64), ints(4), num_slots=90, page_size=4)
    rows = torch.tensor([3, 1], device=DEVICE)
    good = {"rows": rows, "block_table": ints(2, 16), "lens": ints(2)}
    with pytest.raises(ValueError, match=message):
        table.fill(**(good | bad))
    assert (table.reserved[1:] == 7).all()
    table.fill(**good)
    assert table.req_to_token[3, :7].tolist() == [28, 29, 30, 31, 28, 29, 30]


@pytest.mark.parametrize("apart", [4, 8])
@pytest.mark.parametrize("block", [-1, 0, 2**28])
def test_blocks_outside_the_pools_name_no_slot_there(apart, block):
    """On a CPU they are refused; elsewhere, unread by the host, they are padding's."""
    # the last block ends with the pools
    most = (92 - 4) // apart
    table = ExternalTable(ints(4, 64), ints(4), num_slots=92, page_size=4, block_stride=apart)
    rows, lens = torch.tensor([3, 0, 1], device=DEVICE), ints(3)
    lens.copy_(torch.tensor([8, 8, 5]))
    blocks = ints(3, 16)
    blocks.copy_(torch.tensor([[most, 1], [block, block], [2, 3]]).repeat(1, 8))
    # what is past a length is not read, nor what is of row 0
    blocks[:, 2:] = block
    table.fill(rows, blocks, lens)
    assert table.req_to_token[3, :8].tolist() == [
        first * apart + at for first in (most, 1) for at in range(4)
    ]
    for wrong in {block, most + 1}:
        blocks[2, 1] = wrong
        if table.req_to_token.device.type == "cpu":
            with pytest.raises(ValueError, match=rf"blocks must be 1\.\.{most}, got .*{wrong}"):
                table.fill(rows, blocks, lens)
        else:
            table.fill(rows, blocks, lens)
            assert table.req_to_token[1, 4] == 0


def test_a_decoder_refuses_a_table_of_more_slots_than_its_pools():
    one = host()
    old, decoder = one.table, one.decoder
    table = ExternalTable(
        old.req_to_token, old.reserved, num_slots=one.pools[0].num_slots + 4, page_size=4
    )
    parts = decoder.target, decoder.draft, decoder.config
    with pytest.raises(ValueError, match="pools must have the table's 200 slots, got 196"):
        StepDecoder(*parts, table, decoder.states)
    with pytest.raises(ValueError, match="page_size must be the table's, 4, got 1"):
        StepDecoder(*parts[:2], replace(decoder.config, page_size=1), old, decoder.states)
    short = RequestStates.alloc(3, decoder.proposer.state_fields(decoder.config), DEVICE)
    with pytest.raises(ValueError, match=r"states.seq_lens must be \[4\] .* got \[3\]"):
        StepDecoder(*parts, old, short)
    one.step()
    one.check()
