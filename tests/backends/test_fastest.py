"""What `auto` takes: the library's own kernels, and whoever is on record as faster."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from specattn.attention import Attention
from specattn.attention.layers import LayeredBackend
from specattn.backends import choose_backend, fastest, load_backend
from specattn.backends.base import CompositeBackend, attending
from specattn.backends.fastest import Choice, FastestBackend
from specattn.backends.flash_attn import Fa3Backend
from specattn.backends.flashmla import FlashMlaBackend
from specattn.backends.paged import PagedBackend
from specattn.batch import ForwardMode, Phase, RowLayout
from specattn.cache.kv_pool import KVPool
from specattn.cli.app import app
from specattn.config import FLOAT8, AttnConfig, SpecConfig
from specattn.engine.engine import Engine
from specattn.engine.request import Request
from specattn.plan import AttnInputs, AttnPlan, CsrPlan, ExtendPlan
from specattn.testing.oracle import check, head
from specattn.testing.session import config_of, plan_of
from tests.backends.spies import spy
from tests.oracle import make_extend_case, make_tree_case
from tests.tiny import TinyDraft, TinyTarget, dense_greedy
from tests.worlds import MODES, inputs, same, world

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HEADS = AttnConfig(32, 8, 128, dtype=torch.bfloat16)
LATENT = AttnConfig(128, 1, 576, 512, sm_scale=0.1, latent=True, dtype=torch.bfloat16)
PROMPTS = Choice("fa3", "prompts", "bfloat16", 128, 0, 1, 1, 1.1, 1.05, 5, "a card")
DECODE = Choice("flashmla", "decode", "bfloat16", 576, 128, 64, 16, 1.1, 1.05, 3, "a card")
CHAINS = replace(DECODE, forwards="chains", batch=8)
TINY_HEADS = AttnConfig(4, 2, 64)
KINDS = fastest.DECODE, fastest.CHAINS
TINY = replace(PROMPTS, dtype="float32", head_dim=64)
#: The composite's own tests run where a backend and the tensors are.
HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def hopper(monkeypatch):
    """A Hopper with `sgl_kernel`, as far as backends ask."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr("specattn.backends.paged.installed", lambda name: True)
    for backend in (Fa3Backend, FlashMlaBackend):
        monkeypatch.setattr(backend, "module", "tests.backends.stand_ins")
    # it calls FlashMLA, over memory of the device
    monkeypatch.setattr(FlashMlaBackend, "__init__", PagedBackend.__init__)


@pytest.fixture
def record(monkeypatch, tmp_path):
    """Another record: ``record(PROMPTS, DECODE)``, of Hopper."""

    def write(*choices: Choice, capability: str = "9.0") -> None:
        path = tmp_path / "fastest.json"
        path.write_text(json.dumps({capability: {"auto": [vars(choice) for choice in choices]}}))
        monkeypatch.setattr(fastest, "RECORD", path)

    return write


@pytest.fixture
def called(monkeypatch):
    """Backends that note their binds, by name: ``called("fa3", "base")``."""

    def register(*names: str, **promises) -> list[type]:
        spies = [spy(name, **promises) for name in names]
        for one in spies:
            one.refusals = lambda self, plan: []
        monkeypatch.setattr(fastest, "load_backend", {one.name: one for one in spies}.get)
        return spies

    return register


def tree(q_len: int, batch: int, phase: Phase = Phase.VERIFY, *, causal=True, page=1) -> AttnPlan:
    layout = RowLayout(q_len, q_len, phase, causal, page)
    table = torch.zeros(2, 64, dtype=torch.int32)
    return AttnPlan.over(layout, table, AttnInputs.alloc(batch, layout, CPU))


def prompts(page: int = 1) -> ExtendPlan:
    none = torch.zeros(1, dtype=torch.int32)
    return ExtendPlan(none[None], none.long(), none, none.new_zeros(2), none[None], 1, 1, page)


def test_what_is_on_record_can_be_taken():
    """Every line names a backend that says which plans it refuses, and gains in every cell."""
    found = json.loads(fastest.RECORD.read_text())
    assert "9.0" in found
    for choice in (Choice(**one) for tables in found.values() for one in tables["auto"]):
        assert callable(load_backend(choice.backend).refusals)
        assert choice.forwards in (fastest.PROMPTS, fastest.DECODE, fastest.CHAINS)
        assert choice.gain >= choice.least > 1
        assert choice.batch >= 1
        assert choice.measured


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (HEADS, "auto(triton; prompts fa3)"),
        (replace(HEADS, num_qo_heads=40), "auto(triton; prompts fa3)"),
        (replace(HEADS, dtype=torch.float16), "auto(triton; prompts fa3)"),
        (replace(HEADS, dtype=torch.float32), "triton"),
        (replace(HEADS, head_dim=256, v_head_dim=256), "triton"),
        (replace(HEADS, v_head_dim=64), "triton"),
        (replace(HEADS, window_left=127), "triton"),
        (replace(HEADS, logit_cap=30.0), "triton"),
        (replace(HEADS, sinks=True), "triton"),
        (replace(HEADS, kv_dtype=FLOAT8), "triton"),
        (replace(HEADS, deterministic=True), "triton"),
        (replace(HEADS, head_dim=512, v_head_dim=512), "torch_native"),
        (LATENT, "auto(triton_mla; decode flashmla, chains flashmla)"),
        (replace(LATENT, num_qo_heads=16), "triton_mla"),
        (replace(LATENT, dtype=torch.float16), "triton_mla"),
    ],
    ids=str,
)
def test_a_hopper_with_everything_takes(config, name, hopper):
    assert choose_backend("auto", [config], CUDA).name == name


def test_other_machines_take_the_own_kernels(hopper, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "specattn")
    monkeypatch.setattr("specattn.backends.paged.installed", lambda name: False)
    assert choose_backend("auto", [HEADS], CUDA).name == "triton"
    assert "not fa3 for prompts" in caplog.messages[-1]
    assert "is not installed (pip install sglang-kernel)" in caplog.messages[-1]
    for capability in ((8, 0), (10, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, have=capability: have)
        assert choose_backend("auto", [HEADS], CUDA).name == "triton"
    assert choose_backend("auto", [HEADS], CPU).name == "torch_native"


def test_another_architecture_has_its_own_record(hopper, record):
    record(PROMPTS, capability="10.0")
    assert choose_backend("auto", [HEADS], CUDA).name == "triton"


def test_a_library_that_does_not_load_is_passed_over(hopper, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "specattn")
    monkeypatch.setattr(Fa3Backend, "module", "no_such_library")
    assert choose_backend("auto", [HEADS], CUDA).name == "triton"
    assert "no_such_library cannot be imported" in caplog.messages[-1]


def test_the_choice_is_logged_with_its_figures(hopper, record, caplog):
    record(PROMPTS)
    caplog.set_level(logging.INFO, "specattn")
    choose_backend("auto", [HEADS], CUDA)
    first, second = caplog.messages
    assert first.startswith("backend auto: triton on cuda (")
    assert second == (
        "backend auto: fa3 for prompts: heads of 128 in bfloat16, pages of 1 (1.10 times as fast "
        "as the own kernels: 5 cells, 1.05 at worst; a card)"
    )


STORED = replace(HEADS, kv_dtype=FLOAT8)


def test_a_float8_pool_is_told_where_it_is_slower(hopper, caplog):
    """In one line, with the figures of the record; the layers of a model share it."""
    line = json.loads(fastest.RECORD.read_text())["9.0"]["float8"]["128"]
    assert re.search(r"slower .*\(0\.\d\dx\).*; faster .*\(1\.\d\dx", line)
    caplog.set_level(logging.INFO, "specattn.backends")
    choose_backend("auto", [STORED, replace(STORED, num_qo_heads=16)], CUDA)
    (told,) = (message for message in caplog.messages if "float8" in message)
    assert told == f"backend auto: float8 keys and values, heads of 128: {line}"


@pytest.mark.parametrize(
    "config",
    [
        HEADS,
        replace(STORED, dtype=torch.float16),
        replace(STORED, head_dim=96, v_head_dim=96),
        replace(STORED, window_left=127),
        replace(STORED, logit_cap=30.0),
        replace(STORED, sinks=True),
        replace(STORED, deterministic=True),
    ],
    ids=str,
)
def test_nothing_is_told_of_what_was_not_measured_in_float8(config, hopper):
    assert not fastest.float8_gains([config], CUDA)
    assert fastest.float8_gains([config, STORED], CUDA)


def test_another_device_has_no_figures_of_float8(hopper, record, monkeypatch):
    assert not fastest.float8_gains([STORED], CPU)
    record(PROMPTS)
    assert not fastest.float8_gains([STORED], CUDA)


def test_an_engine_over_a_float8_pool_is_told(hopper, monkeypatch):
    """Its layers say how they are stored."""
    asked = []
    monkeypatch.setattr(
        fastest, "float8_gains", lambda configs, device: asked.extend(configs) or []
    )
    config = SpecConfig.plain(SpecConfig(max_context_len=64, max_num_reqs=1))
    Engine(TinyTarget(), None, config, kv_dtype=FLOAT8, graphs=False)
    assert {one.kv_dtype for one in asked} == {FLOAT8}


def test_ranks_choose_alike(hopper, monkeypatch):
    """Nothing is timed, and nothing but the record, the machine and the layers is asked."""
    for clock in ("time.perf_counter", "time.monotonic", "torch.cuda.Event"):
        monkeypatch.setattr(clock, lambda *_, **__: pytest.fail("something was timed"))
    one, other = (choose_backend("auto", [HEADS], CUDA) for _ in range(2))
    assert one == other
    assert one.choices


def test_the_command_says_what_is_taken_and_why(hopper, monkeypatch):
    rows = json.loads(CliRunner().invoke(app, ["backends", "--json"]).stdout)
    took = {row["device"]: row["takes"] for row in rows if row["backend"] == "auto"}
    assert [line.split()[0] for line in took["cpu"]] == ["torch_native"]
    assert took["cuda"][0].startswith("triton where none before it serves: one captured kernel")
    assert any(re.match(r"fa3 for prompts: heads of 128 .* times as fast", x) for x in took["cuda"])
    assert took["cuda"][-1:] == fastest.float8_gains(None, CUDA)[-1:] != []
    monkeypatch.setattr("specattn.backends.paged.installed", lambda name: False)
    shown = CliRunner().invoke(app, ["backends"]).stdout
    assert "auto on cuda" in shown
    assert "not fa3 for prompts: heads of 128" in shown


def test_a_models_layers_say_who_attends_in_which_forward(called):
    _, base = called("fa3", "base")
    pool = KVPool([TINY_HEADS], 64, HERE)
    layers = LayeredBackend(FastestBackend(base, (TINY,)), [TINY_HEADS], pool, HERE)
    layouts = {mode.value: layout for mode, layout in SpecConfig(3, 2, 6).layouts().items()}
    assert {name: layers.attending(layout, 1) for name, layout in layouts.items()} == dict.fromkeys(
        ("decode", "draft_decode", "target_verify", "draft_extend"), "base"
    )
    assert layers.attending(layouts["decode"], 1, prompts=True) == "fa3"


@pytest.mark.parametrize("name", ["triton", "triton,triton", "fa3", "triton_mla,flashmla"])
def test_an_explicit_backend_is_never_replaced(name, hopper):
    config = LATENT if "mla" in name else HEADS
    assert choose_backend(name, [config], CUDA) == load_backend(name)


def test_layers_of_one_model_choose_apart(called):
    """One layer's window, or values of another width, do not take the others' prompts from FA3."""
    fa3, base = called("fa3", "base")
    refused = {replace(HEADS, v_head_dim=64): ["v_head_dim must equal head_dim"]}
    fa3.reasons = staticmethod(lambda config, device: refused.get(config, []))
    layers = [replace(HEADS, window_left=127), *refused, HEADS]
    made = fastest.faster(base, layers, CPU)
    assert made is base, "there is no record of CPUs"
    made = FastestBackend(base, (PROMPTS,))
    chosen = [isinstance(made(one, CPU), CompositeBackend) for one in layers]
    assert chosen == [False, False, True]


def test_one_layer_that_is_refused_leaves_the_choice_to_others(hopper):
    odd = replace(HEADS, v_head_dim=64)
    assert choose_backend("auto", [odd, HEADS], CUDA).choices


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        (prompts(), "fa3"),
        (prompts(64), "base"),
        (tree(1, 16, Phase.DECODE), "base"),
        (tree(6, 16, Phase.PREFILL), "base"),
    ],
)
def test_prompts_alone_go_to_fa3(plan, name, called):
    _, base = called("fa3", "base")
    layer = FastestBackend(base, (PROMPTS,))(HEADS, CPU)
    assert layer.serving(plan).name == name


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        (tree(1, 16, Phase.DECODE, page=64), "flashmla"),
        (tree(1, 15, Phase.DECODE, page=64), "base"),
        (tree(1, 16, Phase.DRAFT, page=64), "flashmla"),
        (tree(4, 8, page=64), "flashmla"),
        (tree(4, 7, page=64), "base"),
        (tree(4, 8, causal=False, page=64), "base"),
        (tree(4, 8, page=16), "base"),
        (tree(4, 8, Phase.PREFILL, page=64), "base"),
        (prompts(64), "base"),
    ],
)
def test_chains_and_decode_alone_go_to_flashmla(plan, name, called):
    _, base = called("flashmla", "base")
    layer = FastestBackend(base, (DECODE, CHAINS))(LATENT, CPU)
    assert layer.serving(plan).name == name


def test_index_lists_stay(called):
    _, base = called("fa3", "base")
    plan = CsrPlan(RowLayout(1, 1, Phase.DRAFT), *torch.zeros(3, 1, 2, dtype=torch.int32)[:, 0])
    assert FastestBackend(base, (PROMPTS,))(HEADS, CPU).serving(plan).name == "base"


def test_a_plan_that_is_refused_stays(called):
    fa3, base = called("fa3", "base")
    fa3.refusals = lambda self, plan: ["a table of 2^31 entries"]
    assert FastestBackend(base, (PROMPTS,))(HEADS, CPU).serving(prompts()).name == "base"


def test_an_engine_sends_prompts_there_and_nothing_else(called):
    """Texts are those of plain decoding; draft extend, drafts and trees are the base's."""
    fa3, base = called("fa3", "base")
    target, draft = TinyTarget(device=HERE), TinyDraft(device=HERE)
    made = FastestBackend(base, (TINY, replace(TINY, head_dim=target.layers[0].head_dim)))
    config = SpecConfig(3, 2, 6, max_context_len=64, max_num_reqs=2)
    engine = Engine(target, draft, config, backend=made)
    requests = [Request([3, 1, 4, 1, 5][:n], max_new_tokens=8, ignore_eos=True) for n in (5, 2)]
    for request, result in zip(requests, engine.generate(requests), strict=True):
        assert list(result.tokens) == dense_greedy(target, list(request.prompt), 8)
    assert set(fa3.binds) == {"prompt"}
    assert fa3.ran
    assert set(base.binds) >= {"prefill", "draft", "verify"}
    assert "prompt" not in base.binds


def test_host_lengths_reach_whoever_plans_on_the_host(called):
    """Pattern B for the base, Pattern A for what is faster."""
    fa3, base = called("fa3", "base", host_plan=True)
    target = TinyTarget(device=HERE)
    made = FastestBackend(base, (replace(TINY, head_dim=target.layers[0].head_dim),))
    assert made.capabilities.host_plan
    config = SpecConfig.plain(SpecConfig(max_context_len=64, max_num_reqs=1))
    engine = Engine(target, None, config, backend=made)
    (result,) = engine.generate([Request([3, 1, 4], max_new_tokens=4, ignore_eos=True)])
    assert list(result.tokens) == dense_greedy(target, [3, 1, 4], 4)
    assert [0] in fa3.scheduled
    assert [3] in base.scheduled


def test_buckets_are_captured_by_whoever_serves_them(called):
    """Chains of few requests by the base, of more by the other one; replays bind nothing."""
    other, base = called("flashmla", "base")
    lines = (replace(TINY, backend="flashmla", forwards=what, batch=4) for what in KINDS)
    config = SpecConfig(3, 1, 4, max_context_len=256, max_num_reqs=8)
    made = FastestBackend(base, tuple(lines))
    split, whole = (world(backend, [2, 4], config, window=-1) for backend in (made, "torch_native"))
    assert {*other.binds} == {*base.binds} - {"prefill"} == {"verify", "draft"}
    bound = [*other.binds], [*base.binds]
    for mode in MODES:
        for lens in ([100], [30, 7, 61], [5, 0]):
            values = inputs(mode, lens, 1, config)
            if mode is ForwardMode.TARGET_VERIFY:
                depth = torch.arange(4, device=HERE)
                values["tree_positions"] = torch.tensor(lens, device=HERE)[:, None] + depth
                values["words"] = ((2 << depth) - 1).expand(len(lens), -1)[..., None]
            for one in (split, whole):
                one.poison(lens)
            same(split.run(mode, lens, values), whole.run(mode, lens, values))
    assert bound == (other.binds, base.binds)
    assert {4 * 4, 4} <= {*other.ran}


def test_a_capture_asks_whoever_serves(called):
    fa3, base = called("fa3", "base", graphs=True)
    fa3.capabilities = replace(fa3.capabilities, graphs=False)
    layer = FastestBackend(base, (PROMPTS,))(HEADS, CPU)
    assert not attending(layer, prompts()).capabilities.graphs
    assert attending(layer, tree(6, 1)).capabilities.graphs


def test_prompts_of_an_engines_table_and_its_draft_extends(called):
    """As SGLang calls it: the plan of prompts is ragged, that of a draft extend is not."""
    fa3, base = called("fa3", "base")
    table = torch.arange(64, dtype=torch.int32, device=HERE).view(2, 32)
    attention = Attention(table, max_batch=2, backend=FastestBackend(base, (TINY,)))
    cache = torch.zeros(64, 2, 64, device=HERE)
    layer = attention.layer(TINY_HEADS, cache, cache.clone())
    one = torch.ones(1, dtype=torch.int64, device=HERE)
    given = one, one, 2 * one, torch.tensor([33, 34]).to(HERE)
    assert attention.prompts(*given, max_q_len=2).plan.max_seq_len == 32
    fa3.binds.clear()
    forward = attention.prompts(*given, max_q_len=2, max_seq_len=3)
    assert forward.plan.max_seq_len == 3
    out = forward.attend(layer, *(torch.ones(2, n * 64, device=HERE) for n in (4, 2, 2)))
    assert out.shape == (2, 256)
    assert (fa3.binds, base.binds) == (["prompt"], [])
    attention.forward(RowLayout(3, 3, Phase.PREFILL, True), 1)
    assert base.binds == ["prefill"]


@pytest.mark.parametrize("latent", [False, True])
def test_results_are_those_of_one_backend(latent, monkeypatch):
    """Over the libraries, or stand-ins of theirs; chains for FlashMLA, prompts for FA3."""
    kind = FlashMlaBackend if latent else Fa3Backend
    if HERE.type == "cpu":
        monkeypatch.setattr(kind, "module", "tests.backends.stand_ins")
        monkeypatch.setattr(kind, "reasons", staticmethod(lambda config, device: []))
    elif reasons := kind.reasons(None, HERE):
        pytest.skip("; ".join(reasons))
    form = {"dtype": torch.bfloat16, "device": str(HERE)}
    if latent:
        form |= {"heads": (4, 1), "head_dim": 576, "v_head_dim": 512, "latent": True}
        case = make_tree_case([60, 3], mode="chain", q_len=4, page_size=64, **form)
        choice = replace(CHAINS, latent_heads=4, batch=2)
    else:
        case = make_extend_case([(0, 5), (70, 3)], heads=(4, 2), head_dim=128, **form)
        choice = PROMPTS
    layer = FastestBackend(load_backend("torch_native"), (choice,))(config_of(case), HERE)
    plan = plan_of(case)
    assert layer.serving(plan).name == kind.name
    bound = layer.bind(plan)
    bound.fill()
    bound.run(case.q, case.k_cache, case.v_cache, case.out, case.lse)
    check(*head(case, case.expected()))
