from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specattn.batch import AcceptResult
from specattn.cache.kv_pool import KVPool
from specattn.cache.slot_table import SlotTable
from specattn.config import AttnConfig
from specattn.errors import CapacityError
from tests.books import check_books

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def table(**over) -> SlotTable:
    return SlotTable(**({"max_num_reqs": 3, "max_context_len": 64, "num_slots": 129} | over))


@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
def test_every_reserved_position_has_its_own_slot_within_one_page(page_size):
    books = table(page_size=page_size, num_slots=64 * 4)
    rows = [books.allocate(), books.allocate()]
    books.reserve(rows, [37, 64])
    seen = []
    for row, length in zip(rows, [37, 64], strict=True):
        slots = books.req_to_token[row, :length]
        seen += slots.tolist()
        position = torch.arange(length)
        first = slots[position // page_size * page_size]
        assert (slots == first + position % page_size).all(), "a page is contiguous"
    assert len(set(seen)) == len(seen)
    assert min(seen) >= page_size, "page 0 belongs to padding"
    assert not books.req_to_token[0].any(), "row 0 belongs to padding"
    check_books(books)


def test_growing_keeps_the_slots_already_given():
    books = table()
    row = books.allocate()
    books.reserve([row], [5])
    before = books.req_to_token[row, :5].clone()
    books.reserve([row], [64])
    assert (books.req_to_token[row, :5] == before).all()


def test_a_context_that_is_not_whole_pages_can_be_filled():
    books = table(max_context_len=50, page_size=16, num_slots=160)
    row = books.allocate()
    books.reserve([row], [50])
    assert len(set(books.req_to_token[row].tolist())) == 50


def test_running_out_takes_nothing():
    books = table(num_slots=70)
    rows = [books.allocate(), books.allocate()]
    books.reserve(rows[:1], [40])
    free = books.num_free_slots
    with pytest.raises(CapacityError, match="more pages"):
        books.reserve(rows, [41, 60])
    assert books.num_free_slots == free
    with pytest.raises(CapacityError, match="do not fit into a context of 64"):
        books.reserve(rows[:1], [65])
    books.allocate()
    with pytest.raises(CapacityError, match="rows"):
        books.allocate()
    check_books(books)


def test_freeing_one_sharer_leaves_the_other_intact():
    books = table(page_size=4, num_slots=256)
    first = books.allocate()
    books.reserve([first], [20])
    books.commit(first, 18)
    with pytest.raises(ValueError, match="multiple of 4"):
        books.allocate(share=first, share_len=6)
    with pytest.raises(ValueError, match="18 tokens committed"):
        books.allocate(share=first, share_len=20)
    with pytest.raises(ValueError, match="share_len must be a multiple of 4 up to the 18 tokens"):
        books.allocate(share=first, share_len=-4)
    second = books.allocate(share=first, share_len=16)
    shared = books.req_to_token[second, :16].clone()
    assert (shared == books.req_to_token[first, :16]).all()
    books.reserve([second], [30])
    assert not set(books.req_to_token[second, 16:30].tolist()) & set(
        books.req_to_token[first, :20].tolist()
    ), "what follows the prefix is private"
    books.free(first)
    check_books(books)
    third = books.allocate()
    books.reserve([third], [64])
    assert not set(books.req_to_token[third].tolist()) & set(shared.tolist())
    books.free(second)
    books.free(third)
    check_books(books)
    assert books.num_free_slots == 252


@settings(max_examples=40)
@given(st.data())
def test_no_sequence_of_calls_leaks_a_page(data):
    books = table(page_size=data.draw(st.sampled_from([1, 4])), max_num_reqs=4, num_slots=200)
    whole, lengths = books.num_free_slots, {}
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["new", "share", "grow", "free"]))
        try:
            if action == "new" or not lengths:
                lengths[books.allocate()] = 0
                continue
            row = data.draw(st.sampled_from(sorted(lengths)))
            if action == "share":
                part = lengths[row] // books.page_size * books.page_size
                lengths[books.allocate(share=row, share_len=part)] = part
            elif action == "grow":
                new = min(64, lengths[row] + data.draw(st.integers(0, 30)))
                books.reserve([row], [new])
                books.commit(row, new)
                lengths[row] = new
            else:
                books.free(row)
                del lengths[row]
        except CapacityError:
            pass
        check_books(books)
    for row in lengths:
        books.free(row)
    assert books.num_free_slots == whole


def test_store_writes_the_named_slots_only():
    config = AttnConfig(4, 2, 8, v_head_dim=5)
    pool = KVPool([config, config], 12, "cpu")
    slots = torch.tensor([[7, 3], [1, 9]], dtype=torch.int32)[:, :1]  # a view with a row stride
    k, v = torch.randn(2, 2, 8), torch.randn(2, 2, 5)
    for pair in ((k, v), (k.flatten(1), v.flatten(1))):
        pool.store(1, slots, *pair)
        assert (pool.k[1, [7, 1]] == k).all()
        assert (pool.v[1, [7, 1]] == v).all()
        pool.k[1, [7, 1]] = 0
        assert not pool.k.any()
        pool.v.zero_()
    for pair in ((k, None), (None, v), (k[:1], v), (k[..., :7], v), (k, v.double())):
        with pytest.raises(ValueError, match=r"(k|v) .*must be"):
            pool.store(1, slots, *pair)
    assert not pool.k.any()
    assert not pool.v.any()


LATENT = AttnConfig(4, 1, 10, v_head_dim=6, sm_scale=0.3, latent=True)


@pytest.mark.parametrize("form", ["whole", "flat", "parts", "with values"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_latent_pool_stores_every_number_once(form, dtype):
    pool = KVPool([LATENT, LATENT], 12, DEVICE)
    assert pool.v.data_ptr() == pool.k.data_ptr()
    pool.k.fill_(-1)
    slots = torch.tensor([[7, 3], [1, 9]], dtype=dtype, device=DEVICE)[:, :1]
    row = torch.randn(2, 1, 10, device=DEVICE)
    given = {
        "whole": (row,),
        "flat": (row.flatten(1),),
        "parts": ((row[..., :6], row[..., 6:]),),
        "with values": (row, row[..., :6]),
    }
    pool.store(1, slots, *given[form])
    assert (pool.k[1, [7, 1]] == row).all()
    assert (pool.v[1, [7, 1]] == row[..., :6]).all()
    pool.k[1, [7, 1]] = -1
    assert (pool.k == -1).all()


def test_a_latent_pool_moves_every_number_once():
    """A second move of the shared columns would read rows that the first has written."""
    pool = KVPool([LATENT, LATENT], 12, DEVICE)
    pool.k.normal_()
    want = pool.k.clone()
    tail = torch.tensor([[7, 3, 11, 1, 9, 4]], dtype=torch.int32, device=DEVICE)
    for rank, node in enumerate([0, 2, 5]):
        want[:, tail[0, rank]] = pool.k[:, tail[0, node]]
    path = torch.tensor([[0, 2, 5, -1]], dtype=torch.int32, device=DEVICE)
    tokens = path.long()
    pool.commit(tail, AcceptResult(path, tokens, path.new_tensor([3]), tokens[:, 2]))
    assert torch.equal(pool.k, want)
    assert torch.equal(pool.v, want[..., :6])


@pytest.mark.parametrize(
    "other",
    [
        AttnConfig(4, 2, 16),
        AttnConfig(4, 2, 8, dtype=torch.float16),
        AttnConfig(4, 1, 8, v_head_dim=7, sm_scale=1.0, latent=True),
    ],
)
def test_one_pool_has_one_geometry(other):
    with pytest.raises(ValueError, match="geometry"):
        KVPool([AttnConfig(4, 2, 8), other], 12, "cpu")
