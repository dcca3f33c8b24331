"""A target whose weights transformers has sharded over two processes (gloo, on a CPU)."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from specattn import Engine, Request, SamplingParams, SpecConfig
from specattn.engine.intake import fresh_seed
from specattn.errors import ModelError, RankError
from specattn.models import FusedTarget, HFTarget, fuse, load_draft
from tests.models.conftest import DenseAttend
from tests.ranks import LIMIT, PAIR, SIZE, needs_shards, on_ranks

PAGE = Path(__file__).parents[2] / "docs" / "tensor_parallel.md"
pytestmark = [needs_shards, pytest.mark.slow, pytest.mark.timeout(2 * LIMIT)]

TEXTS = ["def read_config(path):", "import os\n", "class Point:\n    def"]
LIMITS = {"max_context_len": 256, "max_num_reqs": 2}
CHAIN = SpecConfig(4, 1, 5, **LIMITS)
TREE = SpecConfig(3, 4, 12, **LIMITS)
# a second bucket runs the same twice; "plain" has both
ONE_BUCKET = {"buckets": [2]}
CASES = {
    "plain": (SpecConfig(0, 1, 1, **LIMITS), {}),
    "chain": (CHAIN, ONE_BUCKET),
    "tree": (TREE, ONE_BUCKET),
    "pages": (
        SpecConfig(3, 4, 12, page_size=16, **LIMITS),
        {"cudagraph": "piecewise"} | ONE_BUCKET,
    ),
    "halves": (TREE, {"tbo": True} | ONE_BUCKET),
    "drawn": (SpecConfig(3, 1, 4, draft_sampling=True, **LIMITS), ONE_BUCKET),
}
# a tree is among them, too
FUSED = ["chain", "pages"]


def load(tp_plan: str | None = None):
    target = HFTarget.from_pretrained(PAIR / "target", dtype=torch.float32, tp_plan=tp_plan)
    head = load_draft(PAIR / "draft", target)
    return target.with_features(head.features), head


def requests_for(target, count: int = 4) -> list[Request]:
    """Greedy ones and ones that draw; more than there are rows."""
    how = [SamplingParams(), SamplingParams(0.7, seed=3), SamplingParams(1.0, 20, 0.9, seed=4)]
    return [
        Request(target.tokenizer(text).input_ids, count, how[at % len(how)], ignore_eos=True)
        for at, text in enumerate(TEXTS)
    ]


def tokens_of(target, head, name: str) -> list:
    config, options = CASES[name]
    engine = Engine(target, head, config, **options)
    return [result.tokens for result in engine.generate(requests_for(target))]


def refusal(call) -> str:
    with pytest.raises((ModelError, RankError)) as caught:
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


def text_logits(target) -> torch.Tensor:
    ids = torch.arange(3, 12)
    return target.forward(ids, ids, DenseAttend(target.layers).at(ids)).logits


def with_a_whole_weight():
    target, _ = load("auto")
    part = target.module.model.layers[1].mlp.down_proj
    part.weight = torch.nn.Parameter(part.weight.full_tensor())
    return target


def left_out(folder: Path, rank: int) -> float:
    """Return how far fused shards with biases everywhere are from the whole model."""
    home, found = small_model(rank, folder / "biases", 4, 2, attention_bias=True, mlp_bias=True), []
    for plan in (None, "auto"):
        target = HFTarget.from_pretrained(home, dtype=torch.float32, tp_plan=plan)
        fused, _ = fuse(target)
        assert isinstance(fused, FusedTarget)
        found.append(text_logits(fused))
    return float((found[1] - found[0]).norm() / found[0].norm())


def small_model(rank: int, folder: Path, heads: int, kv_heads: int, **more) -> Path:
    """Write a model, on rank 0 for both."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16 * heads,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        **more,
    )
    if rank == 0:
        model = LlamaForCausalLM(config)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter)
        model.save_pretrained(folder)
    dist.barrier()
    return folder


def work(rank: int, folder: Path) -> dict:
    target, head = load("auto")
    found = {"tokens": {name: tokens_of(target, head, name) for name in CASES}}
    engine = Engine(target, head, CHAIN, **ONE_BUCKET)
    found["heads"] = [
        (layer.num_qo_heads, layer.num_kv_heads)
        for slot in (engine.target, engine.draft)
        for layer in slot.pool.layers[:1]
    ]
    found["kv"] = engine.target.pool.k.numel()

    def policy(observed):
        assert rank == 0, "rank 1 might choose something else"
        return observed.configs[-1]

    adaptive = Engine(target, head, CHAIN, configs=[TREE], policy=policy, **ONE_BUCKET)
    results = adaptive.generate(requests_for(target))
    found["adaptive"] = [result.tokens for result in results]
    found["used"] = [adaptive.configs.used[config] for config in (CHAIN, TREE)]
    logits = text_logits(target)
    fused, _ = fuse(target, head)
    found["fused"] = {name: tokens_of(fused, head, name) for name in FUSED}
    found["named"] = type(fused).__name__
    # its weights are views of the fused ones
    found["unchanged"] = torch.equal(text_logits(target), logits)
    found["left"] = left_out(folder, rank)
    ids = target.tokenizer(TEXTS[0]).input_ids
    found["refused"] = {
        "fused": refusal(lambda: FusedTarget.from_target(with_a_whole_weight())),
        "settings": refusal(lambda: Engine(target, head, CHAIN, num_slots=500 + rank)),
        "seeds": refusal(
            lambda: engine.generate([Request(ids, 4, SamplingParams(1.0, seed=rank))])
        ),
    }
    for name, heads in {"few": (2, 1), "odd": (6, 3)}.items():
        odd = small_model(rank, folder / name, *heads)
        found["refused"][name] = refusal(lambda: HFTarget.from_pretrained(odd, tp_plan="auto"))  # noqa: B023
    torch.manual_seed(rank)
    results = engine.generate(Request(ids, 4, SamplingParams(1.0)).samples(2))
    found["fresh"] = [result.seed for result in results]
    (running,) = engine.add([Request(ids, 4)])
    running.tokens[-1] += rank
    found["refused"]["tokens"] = refusal(lambda: engine.add([Request(ids, 4)]))
    engine.clear()
    found["after"] = engine.generate([Request(ids, 4)])[0].tokens
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    program = program.replace("path/to/", f"{PAIR}/")
    # ranks round sums otherwise than one process, which shows in 16 bits
    program = program.replace('"auto")', '"auto", dtype=torch.float32)')
    # fewer buckets and tokens
    program = program.replace("_len=512)", "_len=512, max_num_reqs=1)").replace("=64)", "=24)")
    names = {"torch": torch}
    exec(compile(program, PAGE.name, "exec"), names)
    found["page"] = names["result"].tokens
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    codes, found = on_ranks(work, tmp_path_factory.mktemp("ranks"))
    assert codes == [0] * SIZE
    assert found[0]["tokens"] == found[1]["tokens"]
    return found[0]


@pytest.fixture(scope="module")
def whole():
    return load()


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_write_what_one_process_writes(found, whole, name):
    assert found["tokens"][name] == tokens_of(*whole, name)


def test_rank_0_chooses_the_config_for_all(found, whole):
    options = {"configs": [TREE], "policy": lambda observed: observed.configs[-1]} | ONE_BUCKET
    engine = Engine(*whole, CHAIN, **options)
    assert found["adaptive"] == [out.tokens for out in engine.generate(requests_for(whole[0]))]
    assert found["used"] == [0, engine.configs.used[TREE]]


def test_a_rank_has_its_own_heads_of_the_target_and_all_of_the_draft(found, whole):
    assert found["heads"] == [[2, 1], [4, 2]]
    assert found["kv"] * SIZE == Engine(*whole, CHAIN).target.pool.k.numel()


@pytest.mark.parametrize("name", FUSED)
def test_fused_shards_write_what_one_process_writes(found, whole, name):
    assert found["named"] == "FusedTarget"
    assert found["fused"][name] == tokens_of(*whole, name)
    assert found["unchanged"]


def test_a_bias_is_added_once(found):
    assert found["left"] < 1e-5


def test_other_shards_are_not_fused(found):
    assert "down_proj is shared by ranks along axis None, not 1" in found["refused"]["fused"]


@pytest.mark.parametrize("name", ["settings", "seeds", "tokens"])
def test_ranks_that_differ_are_refused(found, name):
    assert found["refused"][name].startswith("RankError: ")
    assert "the same on all ranks of a sharded target, but on rank 1" in found["refused"][name]


def test_requests_without_a_seed_get_that_of_rank_0(found):
    """Else `generate` would have raised a `RankError`."""
    torch.manual_seed(0)
    first = fresh_seed()
    assert found["fresh"] == [first, first + 1]


def test_an_engine_serves_after_a_refusal(found, whole):
    ids = whole[0].tokenizer(TEXTS[0]).input_ids
    assert found["after"] == Engine(*whole, CHAIN).generate([Request(ids, 4)])[0].tokens


def test_the_program_of_the_page_writes_what_one_process_writes(found, whole):
    ids = whole[0].tokenizer("def fibonacci(n):").input_ids
    assert found["page"] == Engine(*whole, CHAIN).generate([Request(ids, 24)])[0].tokens


def test_heads_that_ranks_cannot_share_are_refused(found):
    """More ranks than KV heads, and heads that do not divide."""
    assert "num_key_value_heads 1, which 2 ranks cannot share" in found["refused"]["few"]
    assert "num_key_value_heads 3, which 2 ranks cannot share" in found["refused"]["odd"]


def die(rank: int, folder: Path) -> str:
    target, head = load("auto")
    engine = Engine(target, head, CHAIN, buckets=[1])
    calls = []

    def on_tokens(index, tokens):
        calls.append(tokens)
        if rank == 1 and len(calls) == 3:
            os._exit(9)

    with pytest.raises(RuntimeError) as caught:
        engine.generate([Request(target.tokenizer(TEXTS[0]).input_ids, 128)], on_tokens)
    assert not engine.running
    os._exit(0 if (folder / "0.json").write_text(f'"{type(caught.value).__name__}"') else 1)


def test_a_rank_that_dies_ends_the_other_with_an_error(tmp_path):
    codes, (error, _) = on_ranks(die, tmp_path)
    assert codes == [0, 9]
    assert error
