"""What the conformance kit does not see of FA3: the library on Hopper, a stand-in elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specattn.backends.flash_attn import Fa3Backend
from specattn.batch import Phase, RowLayout
from specattn.config import AttnConfig
from specattn.errors import UnsupportedError
from specattn.plan import CsrPlan, ExtendPlan
from specattn.testing.session import plan_of
from tests import oracle

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


def attend(case: oracle.Case, bound) -> None:
    case.clear()
    bound.schedule(None)
    bound.fill()
    bound.run(case.q, case.k_cache, case.v_cache, case.out, case.lse)


def test_float16_and_groups_of_seven():
    """The kit holds builds to bfloat16; see `tests.testing.test_libraries`."""
    form = {"heads": (7, 1), "head_dim": 128, "dtype": torch.float16, "device": str(DEVICE)}
    for q_len, lengths in ((9, LENGTHS), (70, [0, 150])):
        case = oracle.make_tree_case(lengths, q_len=q_len, pads=2, pool_pad=8, **form)
        attend(case, backend_of(case).bind(plan_of(case)))
        oracle.check(case, case.expected())


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
    oracle.check(case, case.expected())
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


def test_tiles_are_scheduled_once_for_all_layers():
    """FA3 schedules them in every call that is not given a schedule."""
    form = {"heads": (4, 2), "head_dim": 64, "dtype": BF16, "device": str(DEVICE)}
    chain = {"mode": "chain", "q_len": 3, "tail_len": 3}
    for case, passes in (
        (oracle.make_extend_case([(3, 4), (18, 2)], **form), 1),
        (oracle.make_extend_case([(3, 4), (18, 2)], window_left=5, **form), 1),
        (oracle.make_tree_case([20, 3], **chain, **form), 1),
        (oracle.make_tree_case([20, 3], q_len=5, **form), 2),
    ):
        backend, given = backend_of(case), []
        bound = backend.bind(plan_of(case))
        attend, schedule = (
            getattr(backend.library, name)
            for name in ("flash_attn_with_kvcache", "get_scheduler_metadata")
        )

        def call(*args, attend=attend, given=given, **options):
            given.append(options["scheduler_metadata"])
            return attend(*args, **options)

        def plan(*args, schedule=schedule, given=given, **options):
            given.append(None)
            return schedule(*args, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backend.library, "flash_attn_with_kvcache", call)
            patch.setattr(backend.library, "get_scheduler_metadata", plan)
            case.clear()
            bound.fill()
            assert given == [None] * passes
            for _ in range(3):
                bound.run(case.q, case.k_cache, case.v_cache, case.out, case.lse)
        assert len(given) == 4 * passes
        assert all(one is not None for one in given[passes:])
        oracle.check(case, case.expected())


class Launches(TorchDispatchMode):
    """The operations that launch something: all but views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names.append(str(func))
        return func(*args, **kwargs or {})


def test_the_keys_of_prompts_are_listed_in_three_launches():
    """Every chunk of prompts has them in its graph, some microseconds each."""
    form = {"heads": (4, 2), "head_dim": 64, "dtype": BF16, "device": str(DEVICE)}
    case = oracle.make_extend_case([(3, 4), (18, 2)], **form)
    bound = backend_of(case).bind(plan_of(case))
    with Launches() as launches:
        bound.keys.fill()
    assert len(launches.names) == 3, launches.names


def test_a_library_without_schedules_is_refused_by_name(monkeypatch):
    if DEVICE.type == "cuda":
        pytest.skip("the library has them")
    monkeypatch.delattr("tests.backends.stand_ins.get_scheduler_metadata")
    with pytest.raises(UnsupportedError, match="must have get_scheduler_metadata"):
        Fa3Backend(AttnConfig(4, 2, 64, dtype=BF16), DEVICE)


def test_a_tree_under_a_window_is_refused_by_name():
    case = oracle.make_tree_case(
        [3], mode="tree", head_dim=64, dtype=BF16, window_left=5, device=str(DEVICE)
    )
    with pytest.raises(UnsupportedError, match="window_left 5 counts positions"):
        backend_of(case).bind(plan_of(case))


def test_index_lists_are_refused_by_name():
    case = oracle.make_csr_case([5, 0], heads=(8, 2), head_dim=64, dtype=BF16, device=str(DEVICE))
    slots = case.args["kv_indptr"].new_zeros(2, 1)
    plan = CsrPlan(RowLayout(1, 1, Phase.DRAFT), out_slots=slots, **case.args)
    with pytest.raises(UnsupportedError, match=r"index lists are not served \(indices='table'\)"):
        backend_of(case).bind(plan)


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
