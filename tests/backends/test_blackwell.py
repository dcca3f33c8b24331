"""The adapters of kernels that no machine here can run: everything around the library call.

The libraries are `tests.backends.stand_ins`, over which the conformance kit runs, too. Where a
wheel can be found, the call is checked against the signature in its source.
"""

from __future__ import annotations

import ast
import inspect
import random
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from specattn.attention.layers import LayeredBackend
from specattn.attention.multi_step import MultiStepDraftBackend
from specattn.backends import choose_backend, load_backend
from specattn.backends.base import installed
from specattn.backends.torch_native import TorchNativeBackend
from specattn.batch import Phase, RowLayout
from specattn.cache.kv_pool import KVPool
from specattn.cache.slot_table import SlotTable
from specattn.config import AttnConfig, SpecConfig
from specattn.engine.engine import Engine
from specattn.errors import UnsupportedError
from specattn.kernels.indices import KeySlots, fill_block_table
from specattn.plan import AttnPlan, CsrPlan, ExtendPlan, MultiStepDims
from specattn.testing.session import config_of
from tests import oracle
from tests.backends import stand_ins
from tests.backends.stand_ins import standing_in
from tests.filling import put
from tests.implementations import using
from tests.kernels.tree_oracle import DEVICE as PLACE
from tests.tiny import TinyDraft, TinyTarget

DEVICE = torch.device(PLACE)
INT = {"dtype": torch.int32, "device": DEVICE}
BF16 = torch.bfloat16
LATENT = {"heads": (5, 1), "head_dim": 576, "v_head_dim": 512, "latent": True, "scale": 2.0}
PLAIN = {"heads": (8, 2), "head_dim": 64, "v_head_dim": 64}
CALLS = {  # backend: package, source file, what it calls
    "fa4": ("flash_attn", "cute/interface.py", ["flash_attn_varlen_func"]),
    "trtllm_mha": ("flashinfer", "decode.py", ["trtllm_batch_decode_with_kv_cache"]),
    "trtllm_mla": ("flashinfer", "mla/_core.py", ["trtllm_batch_decode_with_kv_cache_mla"]),
    "cutlass_mla": (
        "sgl_kernel",
        "attention.py",
        ["cutlass_mla_decode", "cutlass_mla_get_workspace_size"],
    ),
}
FORMS = {"fa4": PLAIN, "trtllm_mha": PLAIN, "trtllm_mla": LATENT, "cutlass_mla": LATENT}


def make_case(name, lengths, q_len, tail, **form) -> oracle.Case:
    page_size = form.pop("page_size", load_backend(name).page_size)
    return oracle.make_tree_case(
        lengths,
        mode="chain",
        q_len=q_len,
        tail_len=tail,
        dtype=BF16,
        page_size=page_size,
        device=DEVICE,
        **(FORMS[name] | form),
    )


def backend_of(name, case, cls=None):
    config = AttnConfig(
        case.q.shape[1],
        case.k_cache.shape[1],
        case.q.shape[2],
        case.v_cache.shape[2],
        BF16,
        case.sm_scale,
        case.window_left,
        case.logit_cap,
        case.latent,
    )
    backend = (cls or standing_in(name))(config, DEVICE)
    assert not backend.geometry(config)
    return backend


def plan_of(case) -> AttnPlan:
    return AttnPlan(layout=case.layout, **case.args)


def run(bound, case, *, lse=True) -> None:
    case.clear()
    bound.schedule(None)
    bound.fill()
    bound.run(case.q, case.k_cache, case.v_cache, case.out, case.lse if lse else None)


@pytest.mark.parametrize("name", CALLS)
def test_every_page_size_by_a_subclass(name):
    plain = standing_in(name)
    for size in plain.page_sizes:
        case = make_case(name, [40, 3], 2, 2, page_size=size)
        other = type("Other", (plain,), {"page_size": size})
        lse = other.capabilities.lse
        run(backend_of(name, case, other).bind(plan_of(case)), case, lse=lse)
        oracle.check(case, oracle.oracle_tree(case), lse=lse)


@pytest.mark.parametrize("name", CALLS)
def test_draft_steps_of_a_chain_over_a_slot_table(name):
    """What `SlotTable` hands out is what the adapters require; lengths cross a page's end."""
    page = load_backend(name).page_size
    heads = AttnConfig(4, 2, 64, dtype=BF16)
    if FORMS[name] is LATENT:
        heads = AttnConfig(3, 1, 576, 512, BF16, 0.05, latent=True)
    config = SpecConfig(4, 1, 5, max_context_len=2 * page, max_num_reqs=3, page_size=page)
    table = SlotTable(
        max_num_reqs=3, max_context_len=2 * page, num_slots=7 * page, page_size=page, device=DEVICE
    )
    rows = [table.allocate() for _ in range(3)]
    table.reserve(rows[::-1], [2 * page] * 3)
    pool = KVPool([heads], 7 * page, DEVICE)
    pool.k.normal_()
    if not heads.latent:
        pool.v.normal_()
    q = torch.randn(3, heads.num_qo_heads, heads.head_dim, device=DEVICE).to(BF16)
    outs = {}
    for which in ("torch_native", name):
        backend = "torch_native" if which == "torch_native" else standing_in(name)
        layers = LayeredBackend(backend, [heads], pool, DEVICE)
        bound = MultiStepDraftBackend(
            layers, MultiStepDims.of(config), table.req_to_token, 3, "table"
        ).bind(3)
        inputs, dims = bound.inputs, bound.dims
        put(
            inputs,
            dims,
            req_pool_indices=torch.tensor(rows, device=DEVICE),
            seq_lens=torch.tensor([page - 2, 0, page], **INT),
        )
        bound.schedule(torch.tensor([page - 2, 0, page], dtype=torch.int32))
        bound.fill_slots()
        bound.fill()
        inputs.words.copy_(torch.tensor([1, 3, 7], device=DEVICE)[None, :, None, None])
        outs[which] = q.new_full((3, 3, heads.num_qo_heads, heads.v_head_dim), float("nan"))
        for step, attention in enumerate(bound.steps):
            attention.bounds[0].run(q, pool.k[0], pool.v[0], outs[which][step])
    torch.testing.assert_close(outs[name], outs["torch_native"], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", ["naive", "triton"])
@pytest.mark.parametrize(
    ("lens", "tail", "lists", "max_len", "page", "width"),
    [
        ([0], 1, 1, 1, 16, 8),
        ([5, 127, 0, 64], 4, 1, 128, 64, 4),
        ([33, 7, 30], 5, 3, 40, 16, 8),
        ([300, 0, 511], 6, 6, 512, 32, 20),
        ([4500, 90], 2, 1, 4600, 16, 296),
    ],
)
def test_block_tables_against_lists(kind, lens, tail, lists, max_len, page, width):
    """Stale table entries, strided tails and a poisoned output, with a guard behind every row."""
    rng = random.Random(page)
    rows = rng.sample(range(len(lens) + 2), len(lens))
    table = [[rng.randrange(2**30) for _ in range(max_len)] for _ in range(len(lens) + 2)]
    tails = torch.full((len(lens), tail + 3), -9, **INT)
    owned = []
    for b, prefix in enumerate(lens):
        pages = [rng.randrange(1, 2**31 // page) for _ in range(width)]
        slots = [pages[p // page] * page + p % page for p in range(prefix + tail)]
        table[rows[b]][:prefix] = slots[:prefix]
        tails[b, :tail] = torch.tensor(slots[prefix:], **INT)
        owned.append(pages)
    wide = torch.full((len(lens) * lists, width + 1), -9, **INT)
    counts = torch.full((len(lens) * lists,), -9, **INT)
    with using(kind):
        fill_block_table(
            KeySlots(
                torch.tensor(table, **INT),
                torch.tensor(rows, device=DEVICE),
                torch.tensor(lens, **INT),
                tails[:, :tail],
            ),
            table=wide[:, :width],
            lens=counts,
            page_size=page,
            lists=lists,
        )
    for b, prefix in enumerate(lens):
        for i in range(lists):
            keys = prefix + tail - lists + 1 + i
            used = -(-keys // page)
            row = owned[b][:used] + [0] * (width - used) + [-9]
            assert wide[b * lists + i].tolist() == row, (b, i)
            assert counts[b * lists + i] == keys


@pytest.mark.parametrize("name", CALLS)
def test_what_is_not_served_is_refused_by_name(name):
    case = make_case(name, [3], 2, 2)
    backend = backend_of(name, case)
    tree = AttnPlan(layout=RowLayout(2, 2, Phase.VERIFY), **case.args)
    none = torch.zeros(2, **INT)
    lists = CsrPlan(RowLayout(1, 1, Phase.DRAFT), none, none, none[:1, None])
    prompt = ExtendPlan(none[None], none[:1].long(), none[:1], none, none[None], 1, 1)
    for plan, what in ((tree, "trees"), (lists, "index lists"), (prompt, "prompts")):
        with pytest.raises(UnsupportedError, match=f"'{name}': {what} are not served"):
            backend.bind(plan)
    small = replace(case, layout=replace(case.layout, page_size=8))
    with pytest.raises(UnsupportedError, match=r"page_size must be a multiple of \d+, got 8"):
        backend.bind(plan_of(small))
    bound = backend.bind(plan_of(case))
    if not backend.capabilities.lse:
        with pytest.raises(UnsupportedError, match="returns no lse"):
            run(bound, case)


@pytest.mark.parametrize("name", CALLS)
def test_hardware_it_cannot_use_is_one_reason(name, monkeypatch):
    backend, cuda = load_backend(name), torch.device("cuda")
    monkeypatch.setattr("specattn.backends.paged.installed", lambda module: True)
    (reason,) = backend.reasons(None, torch.device("cpu"))
    assert reason.startswith(f"{name} needs a CUDA device of compute capability")
    config = AttnConfig(5, 1, 576, 512, BF16, 0.1, latent=True)
    if FORMS[name] is PLAIN:
        config = AttnConfig(8, 2, 64, dtype=BF16)
    with pytest.raises(UnsupportedError) as caught:
        choose_backend(name, [config], torch.device("cpu"))
    assert caught.value.reasons == (reason,)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, served in (((8, 0), False), ((9, 0), name == "fa4"), ((10, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        found = backend.reasons(config, cuda)
        assert not found if served else len(found) == 1, (capability, found)
        assert served or found[0].endswith(f"got {capability[0]}.{capability[1]}")


@pytest.mark.parametrize("name", CALLS)
def test_geometry_is_named(name, monkeypatch):
    monkeypatch.setattr("specattn.backends.paged.installed", lambda module: False)
    odd = type("Odd", (load_backend(name),), {"page_size": 8})
    config = AttnConfig(200, 1, 140, 70, torch.float32, 0.1, 5, 3.0, latent=FORMS[name] is LATENT)
    found = "; ".join(odd.reasons(config, torch.device("cpu")))
    assert "is not installed (pip install" in found
    assert "page_size must be one of" in found
    assert "got torch.float32" in found
    assert ("window_left is not served" in found) == (not odd.capabilities.window)
    assert ("logit_cap is not served" in found) == (not odd.capabilities.cap)
    assert "got 70 + 70" in found if config.latent else "head_dim must" in found
    wrong = replace(config, latent=not config.latent)
    assert any("latent layers" in line for line in odd.geometry(wrong))


def test_a_library_without_the_kernel_is_refused_by_name(monkeypatch):
    monkeypatch.setattr("specattn.backends.paged.imported", lambda *_: SimpleNamespace())
    config = AttnConfig(5, 1, 576, 512, BF16, 0.1, latent=True)
    with pytest.raises(UnsupportedError, match="sgl_kernel has no cutlass_mla_decode"):
        load_backend("cutlass_mla")(config, DEVICE)


def test_a_library_that_does_not_import_is_an_error_with_its_cause(monkeypatch):
    def broken(name):
        raise ImportError("libcudart.so.12 is missing")

    monkeypatch.setattr("specattn.backends.base.import_module", broken)
    with pytest.raises(UnsupportedError, match=r"cannot be imported: libcudart\.so\.12"):
        load_backend("fa4")(AttnConfig(4, 2, 64, dtype=BF16), DEVICE)


def test_a_module_is_looked_for_without_importing_its_parents():
    assert installed("specattn.backends.paged")
    assert not installed("specattn.nowhere.at_all")
    assert not installed("no_such_package.module")
    assert not installed("ast.module")


def signature_in(source: Path, name: str) -> inspect.Signature:
    """The signature of a function in a source file, which may need a GPU to be imported."""
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            node.decorator_list, node.body, node.returns = [], [ast.Pass()], None
            given = node.args
            for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs):
                arg.annotation = None
            found: dict = {}
            module = ast.fix_missing_locations(ast.Module([node], []))
            exec(compile(module, str(source), "exec"), found)
            return inspect.signature(found[name])
    raise AssertionError(f"{source} has no function {name}")


@pytest.mark.parametrize("name", CALLS)
def test_the_call_fits_the_installed_library(name):
    package, file, functions = CALLS[name]
    if not installed(load_backend(name).module):
        pytest.skip(f"{load_backend(name).module} is not installed")
    (root,) = find_spec(package).submodule_search_locations
    for function in functions:
        # later releases of sglang-kernel have no MLA of CUTLASS
        if name == "cutlass_mla" and f"def {function}(" not in (Path(root) / file).read_text():
            pytest.skip(f"the sgl_kernel that is installed has no {function}")
        real = signature_in(Path(root) / file, function)
        ours = inspect.signature(getattr(stand_ins, function))
        real.bind(**dict.fromkeys(ours.parameters))


def test_slots_past_the_last_whole_page_are_left_out():
    """A pool may be larger than the pages its slot table hands out."""
    case = make_case("fa4", [40, 3], 2, 2)
    pools = [torch.cat([pool, pool[:5] * 0]) for pool in (case.k_cache, case.v_cache)]
    case = replace(case, k_cache=pools[0], v_cache=pools[1])
    run(backend_of("fa4", case).bind(plan_of(case)), case)
    oracle.check(case, oracle.oracle_tree(case))


def test_pages_of_another_size_are_refused_before_anything_runs():
    """A pool of smaller pages would be read wrongly, not fail."""

    class Paged(TorchNativeBackend):
        name, capabilities = "paged", load_backend("fa4").capabilities

    case = oracle.make_tree_case([40, 3], mode="chain", page_size=64, device=DEVICE)
    config = config_of(case)
    pool, message = KVPool([config], 256, DEVICE), "page_size must be a multiple of 128, got 64"
    with pytest.raises(UnsupportedError, match=message):
        LayeredBackend(Paged, [config], pool, DEVICE).bind(plan_of(case))
    LayeredBackend("torch_native", [config], pool, DEVICE).bind(plan_of(case))
    models, spec = (TinyTarget(), TinyDraft()), SpecConfig(3, 1, 4, 256, 2, page_size=64)
    with pytest.raises(UnsupportedError, match=message):
        Engine(*models, spec, backend=Paged)
    Engine(*models, replace(spec, page_size=128), backend=Paged)
