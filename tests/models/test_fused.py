"""The fused decoders against transformers and against the models they were made from."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from bench.random_models import random_eagle3, random_target
from specattn import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.errors import ModelError
from specattn.models import (
    Eagle3Head,
    EagleHead,
    FeatureSpec,
    FusedEagle3,
    FusedTarget,
    HFTarget,
    fuse,
    load_draft,
)
from specattn.speculative.draft import choose_tokens
from tests.implementations import using
from tests.models.heads import (
    HT,
    SPECULATORS_NORMS,
    VD,
    eagle3_tensors,
    eagle_tensors,
    rand,
    speculators_norms,
    write,
)

ROPES = {
    "llama": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "qwen2": {"rope_type": "default", "rope_theta": 1e6},
    "qwen3": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0},
    "mistral": {"rope_type": "default", "rope_theta": 10000.0},
}
# by the longest position of the batch: a table by position would be right up to it only
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 12,
    "long_factor": [2.0] * 12,
}
# neither a power of two nor a multiple of one, as SmolLM2's 576 and nine heads over three
ODD = {"hidden_size": 72, "head_dim": 8, "num_attention_heads": 9, "num_key_value_heads": 3}
LENGTH = 7
PROMPTS = [[5, 17, 3, 99, 42, 8, 61], [23], [7, 7, 80, 12, 55, 31, 2, 64, 19, 28, 77]]


@pytest.fixture(params=["naive", "triton"])
def path(request):
    """The torch functions, and the kernels in Triton's interpreter."""
    if request.param == "triton" and torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    with using(request.param):
        yield


def with_norms(folder, norms: list[str], biases: tuple[str, ...] = ()):
    """Write a head with norms of vLLM's speculators."""
    tensors = eagle3_tensors(biases=biases) | speculators_norms(norms)
    return write(folder, tensors, draft_vocab_size=VD, **dict.fromkeys(norms, True))


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("llama", ODD),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen2", ODD | {"tie_word_embeddings": True}),
        ("qwen3", {"tie_word_embeddings": True}),
    ],
)
def test_same_numbers_as_transformers_in_float64(tiny, dense, kind, changes) -> None:
    tied = {"tie_word_embeddings": False} | changes
    model = tiny(kind, rope_parameters=ROPES[kind], num_hidden_layers=2, **tied)
    ids = torch.randint(1, 101, (LENGTH,))
    positions, rows = torch.arange(40, 40 + LENGTH), torch.tensor([6, 0, 6, 5])
    source = HFTarget.from_model(model)
    by_source = source.forward(ids, positions, dense(source.layers).at(positions)).logits
    target = FusedTarget.from_target(source).with_features(FeatureSpec((1, 0, 2, 1)))
    # the model itself still runs, on views of the packed weights
    again = source.forward(ids, positions, dense(source.layers).at(positions)).logits
    assert torch.equal(again, by_source)

    out = target.forward(ids, positions, dense(target.layers).at(positions), rows)
    last = target.with_features(FeatureSpec((2,))).forward(
        ids, positions, dense(target.layers).at(positions), rows
    )

    model.double().set_attn_implementation("eager")
    with torch.no_grad():
        want = model(
            input_ids=ids[None],
            position_ids=positions[None],
            output_hidden_states=True,
            use_cache=False,
        )
    states = torch.cat([want.hidden_states[i][0] for i in (1, 0, 2, 1)], dim=-1)
    found = off(out.logits, want.logits[0, rows]), off(out.hidden_states, states)
    assert max(found) < 3e-6, found
    found = off(last.logits, want.logits[0, rows]), off(last.hidden_states, want.hidden_states[2])
    assert max(found) < 3e-6, found


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    ("norms", "biases"),
    [([], ()), ([], ("q", "k", "v")), *((norms, ()) for norms in SPECULATORS_NORMS)],
)
def test_the_head_is_the_one_it_was_made_from(tiny, dense, tmp_path, norms, biases) -> None:
    target = HFTarget.from_model(tiny("llama", num_hidden_layers=4))
    head = load_draft(with_norms(tmp_path, norms, biases), target)
    ids, positions = torch.randint(1, 101, (9,)), torch.arange(9)
    hidden = head.combine(torch.randn(9, head.feature_size))
    rows = torch.tensor([8, 3])
    want = head.forward(ids, hidden, positions, dense(head.layers).at(positions), rows)
    fused = FusedEagle3.from_head(head, target.max_context_len)
    got = fused.forward(ids, hidden, positions, dense(fused.layers).at(positions), rows)
    assert off(got.logits, want.logits) < 3e-6
    assert off(got.hidden_states, want.hidden_states) < 3e-6
    sources = torch.tensor([3, 0, 3, 1, 2, 2, 0, 1, 3])
    of_few, of_each = (
        fused.forward(
            ids, states, positions, dense(fused.layers).at(positions), rows, sources=index
        )
        for states, index in ((hidden[:4], sources), (hidden[sources], None))
    )
    assert torch.equal(of_few.logits, of_each.logits)
    assert torch.equal(of_few.hidden_states, of_each.hidden_states)
    states = torch.randn(5, head.feature_size)
    torch.testing.assert_close(fused.combine(states), head.combine(states))
    assert fused.to_target(torch.tensor([3])).equal(head.to_target(torch.tensor([3])))
    for draft in (head, fused):
        chosen = choose_tokens(draft, got.logits, 3, None, rows)
        assert chosen.tokens.equal(head.to_target(got.logits.topk(3).indices))


def test_angles_are_of_the_context_in_use(tiny, tmp_path) -> None:
    """A table of all positions of this model would be a gigabyte, for the head another."""
    longest = 10_000_000
    target = HFTarget.from_model(
        tiny("llama", num_hidden_layers=4, max_position_embeddings=longest)
    )
    head = load_draft(write(tmp_path, eagle3_tensors(), draft_vocab_size=VD), target)
    fused = fuse(target.with_features(head.features), head)
    config = SpecConfig(num_steps=3, topk=3, num_draft_tokens=9, max_context_len=70, max_num_reqs=4)
    engine = Engine(*fused, config, backend="torch_native", graphs=False)
    served = engine.target.model, engine.draft.model
    assert [len(model.rotation.table) for model in (*served[0].blocks, served[1].block)] == [
        128
    ] * 5
    assert fused[0].max_context_len == served[0].max_context_len == longest
    for given, used in zip(fused, served, strict=True):
        assert "rows" not in vars((given.blocks[0] if given is fused[0] else given.block).rotary)
        assert used.for_context(70) is used
        assert used.for_context(129) is not used


def test_positions_past_the_models_longest_are_rotated_as_transformers_does(tiny, dense) -> None:
    source = HFTarget.from_model(tiny("llama", max_position_embeddings=16))
    target = FusedTarget.from_target(source).for_context(64)
    ids, positions = torch.randint(1, 101, (LENGTH,)), torch.arange(50, 50 + LENGTH)
    got, want = (
        one.forward(ids, positions, dense(one.layers).at(positions)).logits
        for one in (target, source)
    )
    assert off(got, want) < 3e-6


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_speculation_generates_the_same(tiny, tmp_path, kind) -> None:
    target = HFTarget.from_model(tiny(kind, num_hidden_layers=4))
    head = load_draft(write(tmp_path, eagle3_tensors(), draft_vocab_size=VD), target)
    config = SpecConfig(num_steps=3, topk=3, num_draft_tokens=9, max_context_len=64, max_num_reqs=4)
    texts = []
    fused = FusedTarget.from_target(target)
    # a head is loaded for either
    again = load_draft(tmp_path, fused)
    for of, draft in (
        (target, head),
        (fused, again),
        (fused, FusedEagle3.from_head(head, target.max_context_len)),
    ):
        engine = Engine(
            of.with_features(head.features), draft, config, backend="torch_native", graphs=False
        )
        requests = [Request(p, max_new_tokens=12, ignore_eos=True) for p in PROMPTS]
        texts.append([result.tokens for result in engine.generate(requests)])
    assert texts[0] == texts[1] == texts[2]


def test_random_models_stay_finite_and_run_in_an_engine() -> None:
    shape = {
        "vocab_size": 101,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 5,
        "max_position_embeddings": 64,
        "head_dim": 16,
    }
    for config in (LlamaConfig(**shape), Qwen3Config(**shape, tie_word_embeddings=True)):
        target = random_target(config, dtype=torch.float32, device="cpu")
        head = random_eagle3(LlamaConfig(**shape), target, 60)
        target = target.with_features(head.features)
        tied = target.lm_head.weight.data_ptr() == target.embed_tokens.weight.data_ptr()
        assert tied == config.tie_word_embeddings
        spec = SpecConfig(
            num_steps=2, topk=2, num_draft_tokens=4, max_context_len=64, max_num_reqs=2
        )
        engine = Engine(target, head, spec, backend="torch_native", graphs=False)
        (result,) = engine.generate([Request([5, 6, 7], max_new_tokens=9, ignore_eos=True)])
        assert len(result.tokens) == 9


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("gemma2", {}, "model type 'gemma2' is not one of"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("llama", {"attention_bias": True}, "o_proj has a bias"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type 'dynamic'",
        ),
        ("llama", {"rope_parameters": LONGROPE}, "rope_type 'longrope' is not one of"),
    ],
)
def test_what_the_kernels_do_not_compute_is_refused(tiny, kind, changes, reason) -> None:
    target = HFTarget.from_model(tiny(kind, **changes))
    with pytest.raises(ModelError, match=reason):
        FusedTarget.from_target(target)


@pytest.mark.parametrize("name", ["self_attn.v_proj", "mlp.up_proj"])
def test_projections_that_are_more_than_their_weight_are_refused(tiny, name) -> None:
    """Quantised layers have scales, adapted ones further weights: neither may be left out."""

    class Scaled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = tiny("llama")
    model.model.layers[1].get_submodule(name).__class__ = Scaled
    with pytest.raises(ModelError, match=rf"model\.layers\.1\.{name} is a Scaled"):
        FusedTarget.from_target(HFTarget.from_model(model))


@pytest.mark.parametrize(
    ("tensors", "changes", "reason"),
    [
        ({"fc.bias": rand(HT)}, {}, "fc has a bias"),
        ({"midlayer.self_attn.o_proj.bias": rand(HT)}, {}, "midlayer.self_attn.o_proj has a bias"),
        ({"lm_head.bias": rand(VD)}, {}, "lm_head has a bias"),
        ({}, {"hidden_act": "gelu"}, "hidden_act is 'gelu', not 'silu'"),
        ({}, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not"),
        ({}, {"rope_parameters": LONGROPE}, "rope_type 'longrope' is not one of"),
    ],
)
def test_what_the_kernels_do_not_compute_of_a_head_is_refused(
    tiny, tmp_path, tensors, changes, reason
) -> None:
    target = HFTarget.from_model(tiny("llama"))
    head = load_draft(write(tmp_path, eagle3_tensors() | tensors, **changes), target)
    with pytest.raises(ModelError, match=reason) as caught:
        FusedEagle3.from_head(head, target.max_context_len)
    assert caught.value.argument == "draft"


def test_what_a_head_shares_with_its_target_must_be_plain_too(tiny, tmp_path) -> None:
    target = HFTarget.from_model(tiny("gemma3_text"))  # its embedding scales
    head = load_draft(write(tmp_path, eagle3_tensors()), target)
    with pytest.raises(ModelError, match="embed_tokens is a Gemma3TextScaledWordEmbedding"):
        FusedEagle3.from_head(head, target.max_context_len)


@pytest.mark.parametrize(
    ("kind", "draft", "target_is", "draft_is"),
    [
        ("llama", {}, FusedTarget, FusedEagle3),
        ("qwen2", {}, FusedTarget, FusedEagle3),
        ("llama", {"hidden_act": "gelu"}, FusedTarget, Eagle3Head),
        ("gemma3_text", {}, HFTarget, Eagle3Head),
    ],
)
def test_what_can_be_fused_is(tiny, tmp_path, caplog, kind, draft, target_is, draft_is) -> None:
    caplog.set_level("INFO")
    target = HFTarget.from_model(tiny(kind, num_hidden_layers=4))
    head = load_draft(write(tmp_path, eagle3_tensors(), draft_vocab_size=VD, **draft), target)
    target = target.with_features(head.features)
    config = SpecConfig(num_steps=2, topk=2, num_draft_tokens=4, max_context_len=64, max_num_reqs=4)
    texts, fused = [], fuse(target, head)
    assert tuple(map(type, fused)) == (target_is, draft_is)
    for name, left in (("target", target_is is HFTarget), ("draft", draft_is is Eagle3Head)):
        assert (f"the {name} is not fused: unsupported by the fused path" in caplog.text) == left
    for pair in ((target, head), fused):
        engine = Engine(*pair, config, backend="torch_native", graphs=False)
        requests = [Request(prompt, max_new_tokens=9, ignore_eos=True) for prompt in PROMPTS]
        texts.append([result.tokens for result in engine.generate(requests)])
    assert texts[0] == texts[1]


def test_heads_without_a_fused_form_stay(tiny, tmp_path) -> None:
    target = HFTarget.from_model(tiny("llama"))
    head = load_draft(write(tmp_path, eagle_tensors()), target)
    assert isinstance(head, EagleHead)
    fused, same = fuse(target, head)
    assert isinstance(fused, FusedTarget)
    assert same is head
    assert fuse(target)[1] is None


def test_a_model_in_memory_has_no_tokenizer(tiny) -> None:
    target = FusedTarget.from_target(HFTarget.from_model(tiny("llama")))
    with pytest.raises(ModelError, match="no tokenizer"):
        _ = target.tokenizer
    with pytest.raises(ValueError, match=r"hidden_states must be 0\.\.3"):
        target.with_features(FeatureSpec((4,)))


@pytest.mark.gpu
@pytest.mark.parametrize("norms", [[], SPECULATORS_NORMS[-1]], ids=["", "norms"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_on_the_gpu(tiny, tmp_path, kind, norms) -> None:
    """Streamed products and programmatic launches, eager and recorded, against float64."""
    model = tiny(kind, num_hidden_layers=4, head_dim=64).to("cuda", torch.bfloat16)
    source = HFTarget.from_model(model)
    head = load_draft(with_norms(tmp_path, norms), source)
    target, draft = fuse(source.with_features(head.features), head)
    config = SpecConfig(num_steps=3, topk=3, num_draft_tokens=9, max_context_len=64, max_num_reqs=4)
    texts = []
    for graphs in (False, True):
        engine = Engine(target, draft, config, backend="triton", graphs=graphs)
        requests = [Request(p, max_new_tokens=12, ignore_eos=True) for p in PROMPTS]
        texts.append([result.tokens for result in engine.generate(requests)])
    assert texts[0] == texts[1]
    exact = model.double()
    exact.set_attn_implementation("eager")
    for prompt, tokens in zip(PROMPTS, texts[0], strict=True):
        ids = torch.tensor([prompt + tokens], device="cuda")
        with torch.no_grad():
            logits = exact(ids).logits[0, len(prompt) - 1 : -1]
        lost = logits.max(-1).values - logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        # bfloat16 may prefer another of two nearly equal tokens
        assert float(lost.max()) < 0.1 * float(logits.std()), lost
