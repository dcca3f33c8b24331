"""Values that are taken for others elsewhere are refused by name: fractions, bools, texts, ranges.

Each bad value goes into a call that is good without it, and the good call is made afterwards.
"""

from __future__ import annotations

import math
import re
from functools import cache, partial

import numpy as np
import pytest
import torch

from specattn import (
    AttnConfig,
    Engine,
    ExternalTable,
    KVPool,
    Prefill,
    Prompt,
    Request,
    SamplingBatch,
    SamplingParams,
    SlotTable,
    SpecConfig,
    inspect,
)
from specattn.batch import DraftTree, Phase, RowLayout
from specattn.checks import whole_number
from specattn.config import KVScales
from specattn.cuda_graph import GraphRunner
from specattn.masks import (
    full_mask,
    mask_indptr,
    packed_indptr,
    packed_mask,
    qlen_mask,
    words_from_mask,
)
from specattn.plan import AttnInputs
from tests.books import check_books
from tests.speculative import stepping
from tests.tiny import TinyDraft, TinyTarget
from tests.worlds import DEVICE


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def ints(*values):
    return torch.tensor(values)


HEADS = AttnConfig(4, 2, 64)
OTHER = AttnConfig(4, 4, 64)
E4M3, E5M2, F16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float16
WORDS = torch.ones(2, 3, 1, dtype=torch.int64)
LENS = torch.tensor([4, 0], dtype=torch.int32)
MASK = torch.ones(2, 3, 70, dtype=torch.bool)
WIDE = "[B, n, at least ceil(n / 64)] torch.int64"
BOOLS = "[B, n, keys] torch.bool"
CHAIN = ints([1, 2, -1], [1, 2, -1])
TREES = DraftTree(CHAIN, CHAIN, WORDS, CHAIN, 0 * CHAIN - 1, torch.zeros(2, 3, 0))
PLAIN = "num_steps 0 (plain decoding)"
ROWS = "distinct rows 1..3, or 0 for lines to skip"


def table(**given):
    return ExternalTable(torch.zeros(4, 8, dtype=torch.int32), i32(0, 0, 0, 0), **given)


def fill(**given):
    """Fill a table, and look that nothing is written if that is refused."""
    slots, reserved = torch.full((4, 8), 7, dtype=torch.int32), i32(7, 7, 7, 7)
    one = ExternalTable(slots, reserved, num_slots=40, page_size=4)
    try:
        one.fill(**given)
    except ValueError:
        assert reserved.tolist() == [0, 7, 7, 7]
        assert (slots[1:] == 7).all()
        raise


def books(method: str, **given):
    """Call a method of a table with two rows, whose books are in order afterwards."""
    one = SlotTable(max_num_reqs=4, max_context_len=16, num_slots=64, page_size=4)
    first, second = one.allocate(), one.allocate()
    one.reserve([first, second], [9, 12])
    one.commit(first, 9)
    try:
        getattr(one, method)(**given)
    except ValueError:
        assert one.rows == {first, second}
        assert one.committed(first) == 9
        raise
    finally:
        check_books(one)


def engine(**given) -> Engine:
    config = SpecConfig(1, 1, 2, max_context_len=16, max_num_reqs=2)
    options = {"backend": "torch_native", "buckets": [1]} | given
    return Engine(TinyTarget(layers=1), TinyDraft(), config, **options)


def add(**given):
    """Add requests to an engine, and look that none runs if that is refused."""
    try:
        RUNNING.add(**given)
    finally:
        RUNNING.clear()
        assert RUNNING.table.num_free_rows == 2


RUNNING = engine()


@cache
def stepped():
    """Requests that run, a decoder of their steps, and a prefill over the same table."""
    run = stepping.engine((2, 1, 3))
    rows = stepping.admitted(run)
    return (
        rows,
        run.decoder(run.config),
        Prefill(run.target, run.draft, run.table.req_to_token, run.config),
    )


def step(row):
    rows, decoder, _ = stepped()
    return decoder.step([row, *rows[1:3]])


def prompt(**given):
    return stepped()[2].run([Prompt(**given)], SamplingBatch.of([SamplingParams()], DEVICE))


# what is called, and arguments that it takes
CALLS = {
    "AttnConfig": (AttnConfig, {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64}),
    "latent": (
        partial(AttnConfig, latent=True),
        {
            "num_qo_heads": 4,
            "num_kv_heads": 1,
            "head_dim": 64,
            "v_head_dim": 48,
            "sm_scale": 1.0,
        },
    ),
    "KVScales": (KVScales, {"k": 0.5, "v": np.float32(2)}),
    "KVScales.of": (partial(KVScales.of, torch.ones(2, 3), torch.ones(2, 3)), {"headroom": 2}),
    "SpecConfig": (SpecConfig, {"num_steps": 3, "topk": 2, "num_draft_tokens": 5}),
    "SamplingParams": (SamplingParams, {"temperature": 1, "top_k": np.int32(5), "top_p": 0.5}),
    "SlotTable": (SlotTable, {"max_num_reqs": 1, "max_context_len": 9, "num_slots": 64}),
    **{
        f"SlotTable.{method}": (partial(books, method), good)
        for method, good in {
            "allocate": {"share": 1, "share_len": np.int64(8)},
            "reserve": {"rows": [1, np.int64(2)], "lens": [12, torch.tensor(16)]},
            "commit": {"row": 1, "length": np.int32(12)},
            "committed": {"row": np.int64(2)},
            "free": {"row": np.int64(2)},
        }.items()
    },
    "Request": (
        Request,
        {"prompt": np.array([3, 1]), "max_new_tokens": np.int64(2), "stop": ["x"]},
    ),
    "Engine": (engine, {"num_slots": np.int64(40), "buckets": (np.int64(1), 2)}),
    "Engine.add": (add, {"requests": (Request([3, 1], 2),)}),
    "KVPool": (KVPool, {"layers": [HEADS], "num_slots": 9, "device": "cpu"}),
    "ExternalTable": (
        lambda **given: ExternalTable(
            torch.zeros(4, 8, dtype=torch.int32), i32(0, 0, 0, 0), **given
        ),
        {"num_slots": 40, "page_size": 4, "block_stride": 8},
    ),
    "fill": (
        fill,
        {
            "rows": torch.tensor([3, 0, 0]),
            "block_table": i32([2, 5], [1, 1], [1, 1]),
            "lens": i32(6, 8, 8),
        },
    ),
    "BufferSet.bind": (
        AttnInputs.alloc(4, RowLayout(2, 2, Phase.VERIFY), torch.device("cpu")).bind,
        {"batch": 2},
    ),
    "GraphRunner": (partial(GraphRunner, None), {"buckets": [1, 2], "device": torch.device("cpu")}),
    "step": (step, {"row": 5}),
    "Prompt": (prompt, {"row": 1, "tokens": [3, 14], "cached": 1}),
    "tree": (partial(inspect.tree, TREES), {"request": 1}),
    "mask": (partial(inspect.mask, WORDS[0]), {"prefix": 4}),
    "qlen_mask": (qlen_mask, {"words": WORDS, "keys": 64}),
    "words_from_mask": (words_from_mask, {"mask": MASK}),
    "mask_indptr": (mask_indptr, {"seq_lens": LENS, "num_draft_tokens": 3}),
    "packed_indptr": (packed_indptr, {"seq_lens": LENS, "num_draft_tokens": 3}),
    "full_mask": (full_mask, {"words": WORDS, "seq_lens": LENS}),
    "packed_mask": (packed_mask, {"words": WORDS, "seq_lens": LENS}),
}

# arguments that take one kind of value alone
WHOLE = {
    "AttnConfig": "num_qo_heads num_kv_heads head_dim v_head_dim window_left split_keys",
    "SpecConfig": "num_steps topk num_draft_tokens max_context_len max_num_reqs page_size",
    "SamplingParams": "top_k seed",
    "SlotTable": "max_num_reqs max_context_len num_slots page_size",
    "SlotTable.allocate": "share share_len",
    "SlotTable.commit": "row length",
    "SlotTable.committed": "row",
    "SlotTable.free": "row",
    "Request": "max_new_tokens",
    "Engine": "num_slots",
    "KVPool": "num_slots",
    "ExternalTable": "num_slots page_size block_stride",
    "BufferSet.bind": "batch",
    "qlen_mask": "keys",
    "mask_indptr": "num_draft_tokens",
    "Prompt": "cached",
    "tree": "request",
    "mask": "prefix",
}
NUMBERS = {
    "AttnConfig": "sm_scale logit_cap",
    "KVScales": "k v",
    "KVScales.of": "headroom",
    "SamplingParams": "top_p min_p",
}
FLAGS = {
    "AttnConfig": "latent deterministic",
    "SpecConfig": "draft_sampling",
    "Request": "ignore_eos",
}
KINDS = {
    "a whole number": (WHOLE, [2.5, 3.0, True, "3"]),
    "a number": (NUMBERS, [True, "0.5", None]),
    "True or False": (FLAGS, [1, "no", None]),
}
KIND_CASES = [
    pytest.param(call, name, kind, bad, id=f"{call}-{name}")
    for kind, (calls, bad) in KINDS.items()
    for call, names in calls.items()
    for name in names.split()
]


@pytest.mark.parametrize(("call", "name", "kind", "bad"), KIND_CASES)
def test_values_of_another_kind_are_refused(call, name, kind, bad):
    make, good = CALLS[call]
    for value in bad:
        with pytest.raises(ValueError, match=f"^{name} must be {kind}, got {value!r}$"):
            make(**(good | {name: value}))
    make(**good)


# the call, what is wrong, and what the error says after "<name> must be "
RANGES = [
    ("AttnConfig", {"num_qo_heads": 0}, "at least 1, got 0"),
    ("AttnConfig", {"num_qo_heads": 3}, "a multiple of num_kv_heads, got 3 and 2"),
    ("AttnConfig", {"num_kv_heads": 0}, "at least 1, got 0"),
    ("AttnConfig", {"head_dim": 0}, "at least 1, got 0"),
    ("AttnConfig", {"v_head_dim": -1}, "0 (head_dim) or more, got -1"),
    ("AttnConfig", {"window_left": -2}, "-1 (off) or more, got -2"),
    ("AttnConfig", {"split_keys": 64}, "a multiple of 128, got 64"),
    ("AttnConfig", {"split_keys": 0}, "a multiple of 128, got 0"),
    ("AttnConfig", {"sm_scale": -0.1}, "0 (1 / sqrt(head_dim)) or more, got -0.1"),
    ("AttnConfig", {"sm_scale": math.nan}, "0 (1 / sqrt(head_dim)) or more, got nan"),
    ("AttnConfig", {"sm_scale": math.inf}, "0 (1 / sqrt(head_dim)) or more, got inf"),
    ("AttnConfig", {"logit_cap": -1.0}, "0 (off) or more, got -1.0"),
    ("AttnConfig", {"logit_cap": math.nan}, "0 (off) or more, got nan"),
    ("AttnConfig", {"dtype": torch.int8}, "float32, float16 or bfloat16, got torch.int8"),
    ("AttnConfig", {"dtype": torch.float64}, "float32, float16 or bfloat16, got torch.float64"),
    ("AttnConfig", {"dtype": "float32"}, "float32, float16 or bfloat16, got float32"),
    ("AttnConfig", {"kv_dtype": E5M2}, f"dtype (torch.float32) or {E4M3}, got {E5M2}"),
    ("AttnConfig", {"kv_dtype": F16}, f"dtype (torch.float32) or {E4M3}, got {F16}"),
    ("latent", {"num_kv_heads": 2}, "1 with latent, got 2"),
    ("latent", {"v_head_dim": 0}, "1..63 (below head_dim) with latent, got 0"),
    ("latent", {"v_head_dim": 64}, "1..63 (below head_dim) with latent, got 64"),
    ("latent", {"sm_scale": 0}, "given with latent"),
    ("latent", {"kv_dtype": E4M3}, f"dtype with latent, got {E4M3}"),
    ("SpecConfig", {"num_steps": 65}, "0..64, got 65"),
    ("SpecConfig", {"topk": 0}, "1..64, got 0"),
    ("SpecConfig", {"num_draft_tokens": 12}, "2..11 with topk 2 and num_steps 3, got 12"),
    ("SpecConfig", {"num_draft_tokens": 1}, "2..11 with topk 2 and num_steps 3, got 1"),
    ("SpecConfig", {"num_draft_tokens": 5, "topk": 1}, "num_steps + 1 = 4 with topk 1, got 5"),
    ("SpecConfig", {"max_context_len": 4}, "at least 5 (one step's draft slots), got 4"),
    ("SpecConfig", {"max_num_reqs": 0}, "1..1048576, got 0"),
    ("SpecConfig", {"page_size": 12}, "a power of two, got 12"),
    ("SpecConfig", {"page_size": 1024}, "1..512, got 1024"),
    ("SamplingParams", {"temperature": True}, "a number, got True"),
    ("SamplingParams", {"temperature": "0.5"}, "a number, got '0.5'"),
    ("SamplingParams", {"temperature": -1}, "0 or more, got -1"),
    ("SamplingParams", {"temperature": math.nan}, "0 or more, got nan"),
    ("SamplingParams", {"top_k": -2}, "0 or -1 (off) or more, below 2**31, got -2"),
    ("SamplingParams", {"top_k": 2**31}, "0 or -1 (off) or more, below 2**31, got 2147483648"),
    ("SamplingParams", {"top_p": 0}, "above 0 and at most 1, got 0"),
    ("SamplingParams", {"top_p": 1.5}, "above 0 and at most 1, got 1.5"),
    ("SlotTable", {"page_size": 6}, "a power of two, got 6"),
    ("SlotTable", {"page_size": 0}, "a power of two, got 0"),
    ("SlotTable", {"max_num_reqs": 0}, "at least 1, got 0"),
    ("SlotTable", {"num_slots": 16, "page_size": 16}, "at least two pages, got 16"),
    (
        "SlotTable.allocate",
        {"share_len": 12},
        "a multiple of 4 up to the 9 tokens committed in row",
    ),
    ("Request", {"prompt": None}, "a sequence of token ids, or a text, got None"),
    ("Request", {"prompt": 5}, "a sequence of token ids, or a text, got 5"),
    ("Request", {"sampling": None}, "SamplingParams, got None"),
    ("Request", {"sampling": {"temperature": 1}}, "SamplingParams, got {'temperature': 1}"),
    ("Request", {"stop": None}, "a sequence of texts, got None"),
    ("Engine.add", {"requests": None}, "a sequence of Request, got None"),
    ("Engine.add", {"requests": Request([3])}, "a sequence of Request, got the one Request("),
    ("Engine.add", {"requests": [[3, 1]]}, "a sequence of Request, got [3, 1] in it"),
    ("Engine.add", {"requests": [None]}, "a sequence of Request, got None in it"),
    ("KVPool", {"num_slots": None}, "a whole number, got None"),
    ("KVPool", {"num_slots": 0}, "1..2147483647, got 0"),
    ("KVPool", {"num_slots": 2**31}, "1..2147483647, got 2147483648"),
    ("KVPool", {"layers": []}, "at least one, got none"),
    ("ExternalTable", {"block_stride": 6}, "a multiple of page_size (4), got 6"),
    ("fill", {"rows": ints(4, 0, 0)}, f"{ROWS}, got [4, 0, 0]"),
    ("fill", {"rows": ints(3, 0, -1)}, f"{ROWS}, got [3, 0, -1]"),
    ("fill", {"rows": ints(2, 0, 2)}, f"{ROWS}, got [2, 0, 2]"),
    ("fill", {"rows": None}, "a tensor, got None"),
    ("fill", {"rows": [3, 0, 0]}, "a tensor, got [3, 0, 0]"),
    ("fill", {"block_table": None}, "a tensor, got None"),
    ("fill", {"lens": None}, "a tensor, got None"),
    ("fill", {"lens": i32(6, 8, -8)}, "0 or more, got [6, 8, -8]"),
    ("BufferSet.bind", {"batch": 5}, "0..4, got 5"),
    ("BufferSet.bind", {"batch": -1}, "0..4, got -1"),
    ("GraphRunner", {"buckets": [0]}, "batch sizes of at least 1, got [0]"),
    ("KVScales.of", {"headroom": 0}, "above 0, got 0"),
    ("KVScales.of", {"headroom": math.nan}, "above 0, got nan"),
    ("mask_indptr", {"num_draft_tokens": 0}, "at least 1, got 0"),
    ("tree", {"request": 2}, "0..1, got 2"),
    ("tree", {"request": -1}, "0..1, got -1"),
    ("mask", {"prefix": -1}, "at least 0, got -1"),
    ("qlen_mask", {"words": WORDS.bool()}, f"{WIDE}, got [2, 3, 1] torch.bool"),
    ("qlen_mask", {"keys": 65}, "0..64, got 65"),
    ("words_from_mask", {"mask": 2 * MASK.int()}, f"{BOOLS}, got [2, 3, 70] torch.int32"),
    ("words_from_mask", {"mask": MASK[0]}, f"{BOOLS}, got [3, 70] torch.bool"),
    ("mask_indptr", {"seq_lens": i32(4, -1)}, "0 or more, got [4, -1]"),
    ("packed_indptr", {"seq_lens": i32(4, -1)}, "0 or more, got [4, -1]"),
    ("full_mask", {"seq_lens": i32(-4, 1)}, "0 or more, got [-4, 1]"),
    ("full_mask", {"seq_lens": i32(4)}, "[2] torch.int32 on cpu, got [1] torch.int32"),
    ("full_mask", {"seq_lens": LENS / 2}, "[2] torch.int32 on cpu, got [2] torch.float32"),
    ("full_mask", {"words": WORDS[0]}, f"{WIDE}, got [3, 1] torch.int64"),
    ("packed_mask", {"seq_lens": i32(4, -1)}, "0 or more, got [4, -1]"),
    ("packed_mask", {"words": WORDS[..., :0]}, f"{WIDE}, got [2, 3, 0] torch.int64"),
]


@pytest.mark.parametrize(
    ("call", "bad", "message"), RANGES, ids=[f"{call}-{next(iter(bad))}" for call, bad, _ in RANGES]
)
def test_values_out_of_range_are_refused(call, bad, message):
    make, good = CALLS[call]
    with pytest.raises(ValueError, match=f"^{next(iter(bad))} must be {re.escape(message)}"):
        make(**(good | bad))
    make(**good)


# the call, what is wrong, and how the error begins
TOGETHER = [
    ("SpecConfig", {"num_steps": 0, "num_draft_tokens": 1}, f"{PLAIN} needs topk 1 and"),
    ("SpecConfig", {"num_steps": 0, "topk": 1}, f"{PLAIN} needs topk 1 and num_draft_tokens 1"),
    ("SpecConfig", {"draft_sampling": True}, "draft_sampling needs topk 1, got 2"),
    ("SamplingParams", {"seed": 2**63}, "seed must fit into 64 bits, got 9223372036854775808"),
    ("KVScales", {"v": 0.0}, "v (the scale of float8 v) must be a normal float32 above 0, got 0.0"),
    ("SlotTable.reserve", {"rows": [1, True]}, "every row must be a whole number, got True"),
    ("SlotTable.reserve", {"rows": [1.0, 2]}, "every row must be a whole number, got 1.0"),
    ("SlotTable.reserve", {"rows": [1, None]}, "every row must be a whole number, got None"),
    ("SlotTable.reserve", {"lens": [5, True]}, "every length must be a whole number, got True"),
    ("SlotTable.reserve", {"lens": [5, 6.5]}, "every length must be a whole number, got 6.5"),
    ("SlotTable.reserve", {"lens": ["5", 6]}, "every length must be a whole number, got '5'"),
    ("SlotTable.allocate", {"share": 2}, "share_len must be a multiple of 4 up to the 0 tokens"),
    ("Request", {"prompt": [1, True]}, "every prompt token must be a whole number, got True"),
    ("Engine", {"buckets": [2.5]}, "every bucket must be a whole number, got 2.5"),
    ("Engine", {"buckets": [True]}, "every bucket must be a whole number, got True"),
    ("GraphRunner", {"buckets": [2.0]}, "every bucket must be a whole number, got 2.0"),
    ("GraphRunner", {"buckets": [1, True]}, "every bucket must be a whole number, got True"),
    ("step", {"row": True}, "every row must be a whole number, got True"),
    ("step", {"row": 1.0}, "every row must be a whole number, got 1.0"),
    ("Prompt", {"row": True}, "a prompt's row must be a whole number, got True"),
    ("Prompt", {"row": 1.5}, "a prompt's row must be a whole number, got 1.5"),
    ("Prompt", {"tokens": [3, 14.5]}, "every prompt token must be a whole number, got 14.5"),
    ("Prompt", {"tokens": [True, 14]}, "every prompt token must be a whole number, got True"),
    ("KVPool", {"layers": [HEADS, OTHER]}, "layers of one pool must share one KV geometry, got"),
]


@pytest.mark.parametrize(("call", "bad", "message"), TOGETHER, ids=lambda case: str(case)[:20])
def test_values_that_do_not_go_together_are_refused(call, bad, message):
    make, good = CALLS[call]
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        make(**(good | bad))
    make(**good)


@pytest.mark.parametrize("value", [3, np.int64(3), torch.tensor(3)])
def test_whole_numbers_of_any_library_are_ints(value):
    assert type(whole_number("n", value, 3, 3)) is int
    assert type(SpecConfig(value, 1, 4).num_steps) is int


@pytest.mark.parametrize(
    "value", [True, np.True_, torch.tensor(True), 3.0, torch.tensor(3.0), None, "3", [3]]
)
def test_nothing_else_is_a_whole_number(value):
    with pytest.raises(ValueError, match=r"^n must be a whole number, got "):
        whole_number("n", value)


def test_a_table_may_be_filled_for_nobody():
    none = torch.zeros(0, dtype=torch.int64)
    fill(rows=none, block_table=i32().view(0, 2), lens=i32())


def test_rows_may_be_an_array():
    rows, decoder, _ = stepped()
    assert all(decoder.step(np.array(rows)))
