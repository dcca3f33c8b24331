"""FA3 against the float64 oracle: the real library on Hopper, a stand-in elsewhere.

The stand-in computes what `flash_attn_with_kvcache` documents, so that everything the backend
does around the call is tested on any machine.
"""

from __future__ import annotations

import pytest
import torch

from specattn.attention.layers import LayeredBackend
from specattn.attention.multi_step import MultiStepDraftBackend
from specattn.backends.flash_attn import Fa3Backend
from specattn.batch import Phase, RowLayout
from specattn.cache.kv_pool import KVPool
from specattn.cache.slot_table import SlotTable
from specattn.config import AttnConfig, SpecConfig
from specattn.errors import UnsupportedError
from specattn.plan import AttnPlan, CsrPlan, ExtendPlan, MultiStepDims, causal_words
from specattn.testing.session import plan_of
from tests import oracle
from tests.attention.test_multi_step import feed
from tests.filling import put
from tests.recordings import recorded, refill

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16 = torch.bfloat16
REASONS = Fa3Backend.reasons
LENGTHS = [0, 1, 63, 200, 17, 129]


@pytest.fixture(autouse=True)
def library(monkeypatch):
    """The real library where it runs, elsewhere the stand-in."""
    if DEVICE.type == "cuda":
        if reasons := Fa3Backend.reasons(None, DEVICE):
            pytest.skip("; ".join(reasons))
        return
    monkeypatch.setattr(Fa3Backend, "module", "tests.backends.stand_ins")
    monkeypatch.setattr(Fa3Backend, "reasons", staticmethod(lambda config, device: []))


def backend_of(case: oracle.Case) -> Fa3Backend:
    config = AttnConfig(
        case.q.shape[1],
        case.k_cache.shape[1],
        case.q.shape[2],
        dtype=case.q.dtype,
        **case.settings,
    )
    assert not Fa3Backend.reasons(config, DEVICE)
    return Fa3Backend(config, DEVICE)


def tree_plan(case: oracle.Case, *, causal: bool) -> AttnPlan:
    batch, tail = case.args["tail_slots"].shape
    q_len = case.q.shape[0] // batch
    layout = RowLayout(q_len, tail, Phase.VERIFY, causal, case.page_size)
    return AttnPlan(layout=layout, **case.args)


def attend(case: oracle.Case, bound) -> None:
    case.clear()
    bound.schedule(None)
    bound.fill()
    bound.run(case.q, case.k_cache, case.v_cache, case.out, case.lse)


def check(case: oracle.Case, expected) -> None:
    """Hold to the oracle; a cap's tanh is approximate in FA3, and with it the lse."""
    oracle.check(case, expected, lse=not case.logit_cap)
    if case.logit_cap:
        seen = expected[1].isfinite()
        torch.testing.assert_close(
            case.lse.double().cpu()[seen], expected[1][seen], rtol=5e-3, atol=5e-3
        )


KINDS = [  # mode, q_len, tail
    ("chain", 1, 1),
    ("chain", 1, 4),
    ("chain", 6, 6),
    ("tree", 9, 9),
    ("tree", 70, 70),
    ("draft", 3, 3),
    ("draft", 3, 9),
    ("any", 4, 70),
]
SHAPES = [((8, 2), 64, BF16), ((4, 4), 128, BF16), ((7, 1), 128, torch.float16)]


@pytest.mark.parametrize(("heads", "head_dim", "dtype"), SHAPES, ids=str)
@pytest.mark.parametrize(("mode", "q_len", "tail"), KINDS)
def test_every_tree_mode(mode, q_len, tail, heads, head_dim, dtype):
    lengths = LENGTHS if q_len < 70 else [0, 150]
    case = oracle.make_tree_case(
        lengths,
        mode=mode,
        q_len=q_len,
        tail_len=tail,
        heads=heads,
        head_dim=head_dim,
        dtype=dtype,
        pads=2,
        device=str(DEVICE),
        pool_pad=8,
    )
    plan = tree_plan(case, causal=mode == "chain")
    if mode == "chain":  # padding keeps its causal words
        case.args["tail_words"][-2:] = causal_words(plan.layout).to(DEVICE)
        if q_len == 1:
            case.args["tail_words"][-2:] = (1 << tail) - 1
    attend(case, backend_of(case).bind(plan))
    check(case, oracle.oracle_tree(case))


@pytest.mark.parametrize("page_size", [4, 16, 64, 256])
@pytest.mark.parametrize(("mode", "q_len", "tail"), KINDS)
def test_pages(mode, q_len, tail, page_size):
    """Pages in any order, prefixes around their ends; what nobody wrote in a page holds NaN."""
    lengths = [0, 1, 15, 16, 61, 64, 129, 200] if q_len < 70 else [0, 150]
    case = oracle.make_tree_case(
        lengths,
        mode=mode,
        q_len=q_len,
        tail_len=tail,
        heads=(8, 2),
        head_dim=64,
        dtype=BF16,
        page_size=page_size,
        device=str(DEVICE),
        pool_pad=8,
    )
    attend(case, backend_of(case).bind(plan_of(case)))
    check(case, oracle.oracle_tree(case))


@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_prompts_in_pages(cap, page_size):
    lengths = [(0, 5), (70, 3), (16, 0), (0, 1), (128, 40), (9, 7), (15, 1)]
    case = oracle.make_extend_case(
        lengths,
        heads=(8, 2),
        head_dim=128,
        dtype=BF16,
        logit_cap=cap,
        page_size=page_size,
        device=str(DEVICE),
    )
    attend(case, backend_of(case).bind(plan_of(case)))
    check(case, oracle.oracle_extend(case))


def pages_read(case: oracle.Case) -> list[int]:
    """Slots of the pages of every call."""
    backend, seen = backend_of(case), []
    library = backend.library.flash_attn_with_kvcache

    def function(q, k_cache, *rest, **options):
        seen.append(k_cache.shape[1])
        return library(q, k_cache, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend.library, "flash_attn_with_kvcache", function)
        attend(case, backend.bind(plan_of(case)))
    check(case, case.expected())
    return seen


def test_pages_are_read_where_keys_lie_in_them():
    """Slots are, where they do not: tails of trees, and what a window cuts."""
    form = {"heads": (4, 2), "head_dim": 64, "dtype": BF16, "device": str(DEVICE)}
    for page_size, most in ((1, 1), (16, 16), (64, 64), (128, 64)):
        paged = form | {"page_size": page_size}
        for q_len, tail in ((1, 1), (1, 3), (5, 5)):
            chain = {"mode": "chain", "q_len": q_len, "tail_len": tail}
            assert pages_read(oracle.make_tree_case([20, 3], **chain, **paged)) == [most]
            assert pages_read(oracle.make_tree_case([20, 3], **chain, window_left=7, **paged)) == [
                1
            ]
        assert pages_read(oracle.make_tree_case([20, 3], q_len=5, **paged)) == [most, 1]
        assert pages_read(oracle.make_extend_case([(3, 4), (18, 2)], **paged)) == [most]
        assert pages_read(oracle.make_extend_case([(3, 4), (18, 2)], window_left=5, **paged)) == [1]


@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (5, 0.0), (150, 0.0), (-1, 3.0), (40, 5.0)])
@pytest.mark.parametrize(("q_len", "tail"), [(1, 1), (1, 4), (6, 6)])
def test_windows_and_caps_on_causal_layouts(q_len, tail, window, cap):
    """Keys before every query's window hold NaN."""
    case = oracle.make_tree_case(
        LENGTHS,
        mode="chain",
        q_len=q_len,
        tail_len=tail,
        heads=(4, 2),
        head_dim=64,
        dtype=BF16,
        window_left=window,
        logit_cap=cap,
        scale=4.0,
        device=str(DEVICE),
    )
    attend(case, backend_of(case).bind(tree_plan(case, causal=True)))
    check(case, oracle.oracle_tree(case))


def test_a_cap_on_trees():
    case = oracle.make_tree_case(
        LENGTHS,
        mode="tree",
        q_len=9,
        heads=(4, 2),
        head_dim=64,
        dtype=BF16,
        logit_cap=3.0,
        scale=4.0,
        device=str(DEVICE),
    )
    attend(case, backend_of(case).bind(tree_plan(case, causal=False)))
    check(case, oracle.oracle_tree(case))


def test_a_tree_under_a_window_is_refused_by_name():
    case = oracle.make_tree_case(
        [3], mode="tree", head_dim=64, dtype=BF16, window_left=5, device=str(DEVICE)
    )
    with pytest.raises(UnsupportedError, match="window_left 5 counts positions"):
        backend_of(case).bind(tree_plan(case, causal=False))


def test_index_lists_are_refused_by_name():
    case = oracle.make_csr_case([5, 0], heads=(8, 2), head_dim=64, dtype=BF16, device=str(DEVICE))
    slots = case.args["kv_indptr"].new_zeros(2, 1)
    plan = CsrPlan(RowLayout(1, 1, Phase.DRAFT), out_slots=slots, **case.args)
    with pytest.raises(UnsupportedError, match=r"index lists are not served \(indices='table'\)"):
        backend_of(case).bind(plan)


@pytest.mark.parametrize(("window", "cap"), [(-1, 0.0), (9, 0.0), (0, 0.0), (100, 3.0)])
def test_ragged_prompts(window, cap):
    lengths = [(0, 5), (70, 3), (5, 0), (0, 1), (130, 40), (9, 1)]
    case = oracle.make_extend_case(
        lengths,
        heads=(8, 2),
        head_dim=128,
        dtype=BF16,
        window_left=window,
        logit_cap=cap,
        device=str(DEVICE),
    )
    longest = max(prefix + new for prefix, new in lengths)
    slots = case.args["qo_indptr"].new_zeros(1, len(case.q))
    plan = ExtendPlan(out_slots=slots, max_seq_len=longest, **case.args)
    attend(case, backend_of(case).bind(plan))
    check(case, oracle.oracle_extend(case))


@pytest.mark.parametrize(
    ("mode", "q_len", "tail", "window", "page_size"),
    [
        ("chain", 6, 6, -1, 1),
        ("chain", 1, 3, 30, 1),
        ("tree", 9, 9, -1, 1),
        ("draft", 3, 9, -1, 1),
        ("chain", 6, 6, -1, 16),
        ("tree", 9, 9, -1, 16),
        ("draft", 3, 9, -1, 64),
    ],
)
def test_one_recording_serves_every_length_and_tree(mode, q_len, tail, window, page_size):
    """Recorded on padding; eager without a GPU, over the same static tensors."""
    batches = [[0] * 4, [3, 500, 0, 64], [0, 1, 2, 3], [700, 700, 1, 31], [5, 0, 0, 0]]
    cases = [
        oracle.make_tree_case(
            lengths,
            mode=mode,
            q_len=q_len,
            tail_len=tail,
            heads=(4, 2),
            head_dim=64,
            dtype=BF16,
            window_left=window,
            seed=seed,
            width=720,
            slots=2048,
            page_size=page_size,
            device=str(DEVICE),
        )
        for seed, lengths in enumerate(batches)
    ]
    static = cases[0]
    bound = backend_of(static).bind(plan_of(static))
    replay = recorded(
        lambda: (
            bound.fill(),
            bound.run(static.q, static.k_cache, static.v_cache, static.out, static.lse),
        )
    )
    for case in cases[1:]:
        refill(static, case)
        replay()
        check(static, oracle.oracle_tree(case))


@pytest.mark.parametrize("topk", [1, 2])
def test_draft_steps_read_words_written_after_the_fill(topk):
    """A step's ancestors become known while the steps run; the prefix lists do not change."""
    outs = {}
    heads = AttnConfig(4, 2, 64, dtype=BF16)
    config = SpecConfig(
        4, topk, 6 if topk > 1 else 5, max_context_len=16, max_num_reqs=3, page_size=4
    )
    for name in ("torch_native", "fa3"):
        torch.manual_seed(1)
        table = SlotTable(
            max_num_reqs=3, max_context_len=16, num_slots=64, page_size=4, device=DEVICE
        )
        rows = [table.allocate() for _ in range(3)]
        table.reserve(rows, [16, 16, 16])
        pool = KVPool([heads], 64, DEVICE)
        pool.k.normal_()
        pool.v.normal_()
        layers = LayeredBackend(name, [heads], pool, DEVICE)
        bound = MultiStepDraftBackend(layers, MultiStepDims.of(config), table.req_to_token, 3).bind(
            3
        )
        words = known_words(bound, rows, topk)
        bound.schedule(None)
        bound.fill_slots()
        bound.fill()
        bound.inputs.words.copy_(words)
        q = torch.randn(3 * topk, 4, 64, device=DEVICE).to(BF16)
        out = q.new_full((3, *q.shape), float("nan"))
        for step, attention in enumerate(bound.steps):
            attention.bounds[0].run(q, pool.k[0], pool.v[0], out[step])
        outs[name] = out
    torch.testing.assert_close(outs["fa3"], outs["torch_native"], rtol=2e-2, atol=2e-2)


def known_words(bound, rows: list[int], topk: int) -> torch.Tensor:
    """Fill the inputs; the words of a step are returned, and its buffers know only its own bit."""
    inputs, dims = bound.inputs, bound.dims
    if topk > 1:
        feed(bound, rows, [3, 5, 0])
        words = inputs.words.clone()
    else:
        lens = torch.tensor([3, 5, 0], dtype=torch.int32, device=DEVICE)
        put(inputs, dims, req_pool_indices=torch.tensor(rows, device=DEVICE), seq_lens=lens)
        words = torch.tensor([1, 3, 7], device=DEVICE)[None, :, None, None].expand(3, 3, 1, 1)
    own = 1 << torch.arange(dims.steps * topk, device=DEVICE).view(1, dims.steps, topk, 1)
    inputs.words.copy_(own.expand(inputs.words.shape))
    return words


def test_reasons_name_what_is_missing(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr("specattn.backends.paged.installed", lambda name: False)
    assert REASONS(None, cpu) == [
        f"{Fa3Backend.module} is not installed (pip install sglang-kernel)",
        "fa3 needs a CUDA device of compute capability 9.x, got cpu",
    ]
    config = AttnConfig(4, 2, 80, 40)
    assert REASONS(config, cpu)[2:] == [
        "dtype must be float16 or bfloat16, got torch.float32",
        "head_dim must be 64 or 128, got 80",
        "v_head_dim must equal head_dim 80, got 40",
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    needed = "fa3 needs a CUDA device of compute capability 9.x, got 8.6"
    assert REASONS(None, torch.device("cuda"))[1:] == [needed]


def test_a_library_that_does_not_import_is_an_error_with_its_cause(monkeypatch):
    def broken(name):
        raise ImportError("libcudart.so.12 is missing")

    monkeypatch.setattr("specattn.backends.base.import_module", broken)
    with pytest.raises(UnsupportedError, match=r"cannot be imported: libcudart\.so\.12"):
        Fa3Backend(AttnConfig(4, 2, 64, dtype=BF16), DEVICE)


def test_a_slot_table_past_int32_is_refused():
    none = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    plan = ExtendPlan(
        none.expand(2**16, 2**15), none.long(), none, none.new_zeros(2), none[None], 1, 1
    )
    backend = Fa3Backend(AttnConfig(4, 2, 64, dtype=BF16), DEVICE)
    with pytest.raises(UnsupportedError, match=r"less than 2\^31 entries, got 2147483648"):
        backend.bind(plan)
