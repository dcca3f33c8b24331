"""The fused decoders against transformers and against the models they were made from."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specattn import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.errors import ModelError
from specattn.models import (
    Eagle3Head,
    FusedTarget,
    HFTarget,
    fuse,
    load_draft,
)
from tests.hybrids import KINDS, LAYERS
from tests.models.heads import (
    HT,
    SPECULATORS_NORMS,
    VD,
    V,
    eagle3_tensors,
    speculators_norms,
    write,
)
from tests.samples import half, on_cpu, sampled

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
    "qwen3_moe": {"rope_type": "default", "rope_theta": 1e6},
    "mixtral": {"rope_type": "default", "rope_theta": 1e6},
    # layers of two kinds, each with a base of its own
    "gemma3_text": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
GEMMA3 = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
# these rotate a whole batch by its longest position, once that is beyond a length
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 12,
    "long_factor": [2.0] * 12,
}
# neither a power of two nor a multiple of one, as SmolLM2's 576 and nine heads over three
ODD = {"hidden_size": 72, "head_dim": 8, "num_attention_heads": 9, "num_key_value_heads": 3}
# attention comes first, and half of its dimensions are rotated
TURNED = LAYERS | {
    "layer_types": ["full_attention", "linear_attention"],
    "num_hidden_layers": 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [4, 2, 2],
    },
}
OTHER_ROPE = {"rope_type": "default", "rope_theta": 77.0}
LENGTH = 7
PROMPTS = [[5, 17, 3, 99, 42, 8, 61], [23], [7, 7, 80, 12, 55, 31, 2, 64, 19, 28, 77]]


def with_norms(folder, norms: list[str], biases: tuple[str, ...] = ()):
    """Write a head with norms of vLLM's speculators."""
    tensors = eagle3_tensors(biases=biases) | speculators_norms(norms)
    return write(folder, tensors, draft_vocab_size=VD, **dict.fromkeys(norms, True))


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@on_cpu(half, "kind", "changes", "path")
@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("llama", ODD),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"rope_parameters": DYNAMIC}),
        ("llama", {"rope_parameters": LONGROPE}),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen2", ODD | {"tie_word_embeddings": True}),
        ("qwen3", {"tie_word_embeddings": True}),
        # of two layers, one without experts
        ("qwen3_moe", EXPERTS | {"mlp_only_layers": [1], "moe_intermediate_size": 40}),
        ("mixtral", EXPERTS),
        ("gemma3_text", GEMMA3 | {"query_pre_attn_scalar": 50}),
        *(
            (kind, settings | {"num_hidden_layers": 2, "layer_types": LAYERS["layer_types"][:2]})
            for kind, settings in KINDS.items()
        ),
        *([("qwen3_5_text", TURNED | {"attention_bias": True})] if "qwen3_5_text" in KINDS else []),
    ],
)
def test_same_numbers_as_transformers_in_float64(tiny, dense, kind, changes) -> None:
    settings = {"tie_word_embeddings": False, "num_hidden_layers": 2} | changes
    if kind in ROPES:
        settings.setdefault("rope_parameters", ROPES[kind])
    model = tiny(kind, **settings)
    ids = torch.randint(1, 101, (LENGTH,))
    positions, rows = torch.arange(24, 24 + LENGTH), torch.tensor([6, 0, 6, 5])
    source = HFTarget.from_model(model)
    by_source = source.forward(ids, positions, dense(source.layers).at(positions)).logits
    target = FusedTarget.from_target(source).with_features((1, 0, 2, 1))
    # the model itself still runs, on views of the packed weights
    again = source.forward(ids, positions, dense(source.layers).at(positions)).logits
    assert torch.equal(again, by_source)

    out = target.forward(ids, positions, dense(target.layers).at(positions), rows)
    last = target.with_features((2,)).forward(
        ids, positions, dense(target.layers).at(positions), rows
    )

    source.restore()
    model.double().set_attn_implementation("eager")
    if "num_experts_per_tok" in changes:
        # the others know no float64
        model.set_experts_implementation("eager")
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
    assert [len(model.rotation.table) for model in (*served[0].blocks, *served[1].blocks)] == [
        128
    ] * 5
    assert fused[0].max_context_len == served[0].max_context_len == longest
    for given, used in zip(fused, served, strict=True):
        assert "rows" not in vars(given.blocks[0].rotary)
        assert used.for_context(70) is used
        assert used.for_context(129) is not used


def test_layers_keep_rotations_of_their_own(tiny) -> None:
    """Whatever the context, a layer's angles are its own table's."""
    target = FusedTarget.from_target(HFTarget.from_model(tiny("llama")))
    other = FusedTarget.from_target(HFTarget.from_model(tiny("llama", rope_parameters=OTHER_ROPE)))
    mixed = (target.blocks[0], other.blocks[1], *target.blocks[2:])
    one = replace(target, blocks=mixed).for_context(70)
    for at, of in enumerate((target, other)):
        want = of.for_context(70).blocks[at].rotation.table
        assert one.blocks[at].rotation.table.equal(want)
    first, second = (one.blocks[at].rotation.table for at in range(2))
    assert not first.equal(second)
    assert one.for_context(70) is one


def test_positions_past_the_models_longest_are_rotated_as_transformers_does(tiny, dense) -> None:
    source = HFTarget.from_model(tiny("llama", max_position_embeddings=16))
    target = FusedTarget.from_target(source).for_context(64)
    ids, positions = torch.randint(1, 101, (LENGTH,)), torch.arange(50, 50 + LENGTH)
    got, want = (
        one.forward(ids, positions, dense(one.layers).at(positions)).logits
        for one in (target, source)
    )
    assert off(got, want) < 3e-6


FAMILIES = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 6},
    "qwen3_moe": EXPERTS | {"mlp_only_layers": [1], "moe_intermediate_size": 40},
    "mixtral": EXPERTS,
}


def windows_or_half(family: int, shape: int) -> bool:
    """Windows shift a tree's mask; what else families have does not know the shape."""
    return family == 2 or half(family, shape)


@sampled(windows_or_half, kind=list(FAMILIES), steps={"tree": (3, 3, 9), "chain": (3, 1, 4)})
def test_speculation_generates_the_same(tiny, tmp_path, kind, steps) -> None:
    """As transformers alone does, greedily, and as the target unfused."""
    model = tiny(kind, num_hidden_layers=4, **FAMILIES[kind])
    with torch.no_grad():
        alone = [
            model.generate(
                torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False
            )[0, len(prompt) :].tolist()
            for prompt in PROMPTS
        ]
    target = HFTarget.from_model(model)
    head = load_draft(write(tmp_path, eagle3_tensors(), draft_vocab_size=VD), target)
    config = SpecConfig(*steps, max_context_len=64, max_num_reqs=4)
    texts = [alone]
    fused = FusedTarget.from_target(target)
    # a head is loaded for either
    again = load_draft(tmp_path, fused)
    for of, draft in ((target, head), (fused, head), (fused, again)):
        how = {"backend": "torch_native", "buckets": [len(PROMPTS)], "graphs": False}
        engine = Engine(of.with_features(head.features), draft, config, **how)
        requests = [Request(p, 12, min_new_tokens=12) for p in PROMPTS]
        texts.append([result.tokens for result in engine.generate(requests)])
    assert texts == [alone] * 4


def test_what_the_kernels_do_not_compute_is_refused(tiny) -> None:
    target = HFTarget.from_model(tiny("gemma2"))
    with pytest.raises(ModelError, match="model type 'gemma2' is not one of"):
        FusedTarget.from_target(target)


@pytest.mark.parametrize(("rope", "most"), [(DYNAMIC, 128), (LONGROPE, 32)])
def test_a_context_that_would_rotate_a_batch_is_refused(tiny, rope, most) -> None:
    target = FusedTarget.from_target(HFTarget.from_model(tiny("llama", rope_parameters=rope)))
    assert target.max_context_len == most
    assert len(target.for_context(most).blocks[0].rotation.table) == most
    with pytest.raises(ModelError, match=f"max_context_len must be at most {most}, got {most + 1}"):
        target.for_context(most + 1)


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


def test_a_head_scales_as_the_embedding_that_it_shares(tiny, dense, tmp_path) -> None:
    target = HFTarget.from_model(tiny("gemma3_text"))
    shared = load_draft(write(tmp_path, eagle3_tensors()), target)
    ids, positions = torch.randint(1, 101, (LENGTH,)), torch.arange(LENGTH)
    own = eagle3_tensors() | {"embed_tokens.weight": target.embed_tokens(torch.arange(V))}
    logits = []
    for head in (shared, load_draft(write(tmp_path, own), target)):
        hidden = torch.ones(LENGTH, HT)
        logits.append(head.forward(ids, hidden, positions, dense(head.layers).at(positions)).logits)
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("kind", "target_is"),
    [
        ("llama", FusedTarget),
        ("qwen2", FusedTarget),
        ("gemma3_text", FusedTarget),
        ("gemma2", HFTarget),
    ],
)
def test_what_can_be_fused_is(tiny, tmp_path, caplog, kind, target_is) -> None:
    caplog.set_level("INFO")
    target = HFTarget.from_model(tiny(kind, num_hidden_layers=4))
    head = load_draft(write(tmp_path, eagle3_tensors(), draft_vocab_size=VD), target)
    target = target.with_features(head.features)
    fused = fuse(target, head)
    assert tuple(map(type, fused)) == (target_is, Eagle3Head)
    left = target_is is HFTarget
    assert ("the target is not fused: unsupported by the fused path" in caplog.text) == left
    assert fuse(target)[1] is None


def test_a_model_in_memory_has_no_tokenizer(tiny) -> None:
    target = FusedTarget.from_target(HFTarget.from_model(tiny("llama")))
    with pytest.raises(ModelError, match="no tokenizer"):
        _ = target.tokenizer
    with pytest.raises(ValueError, match=r"features must be 0\.\.3"):
        target.with_features((4,))


class Clear:
    """Notes which tokens of a text choose their experts clearly, in all layers.

    Of the others bfloat16 may choose another expert, and compute something else.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.tokens = torch.ones(0, dtype=torch.bool)
        for name, module in model.named_modules():
            if name.endswith("mlp.gate"):
                module.register_forward_pre_hook(self._look)

    def _look(self, router: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        scores = args[0].flatten(0, -2) @ router.weight.T
        ranked = scores.sort(dim=-1, descending=True).values
        chosen = EXPERTS["num_experts_per_tok"]
        self.tokens &= ranked[:, chosen - 1] - ranked[:, chosen] > 0.1 * scores.std()


@pytest.mark.gpu
@pytest.mark.parametrize("norms", [[], SPECULATORS_NORMS[-1]], ids=["", "norms"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma3_text", "qwen3_moe", *KINDS])
def test_on_the_gpu(tiny, tmp_path, kind, norms) -> None:
    """Streamed products and programmatic launches, eager and recorded, against float64."""
    experts = EXPERTS if kind in ("qwen3_moe", "qwen3_next", "qwen3_5_moe_text") else {}
    changes = {"num_hidden_layers": 4} | KINDS.get(kind, {}) | {"head_dim": 64} | experts
    model = tiny(kind, **changes).to("cuda", torch.bfloat16)
    if experts:
        # they read nothing on the host
        model.set_experts_implementation("batched_mm")
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
    source.restore()
    exact = model.double()
    exact.set_attn_implementation("eager")
    if experts:
        exact.set_experts_implementation("eager")
    clear = Clear(exact)
    for prompt, tokens in zip(PROMPTS, texts[0], strict=True):
        ids = torch.tensor([prompt + tokens], device="cuda")
        clear.tokens = torch.ones(ids.shape[1], dtype=torch.bool, device="cuda")
        with torch.no_grad():
            logits = exact(ids).logits[0, len(prompt) - 1 : -1]
        lost = logits.max(-1).values - logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        judged = clear.tokens[len(prompt) - 1 : -1]
        assert int(judged.sum()) >= len(tokens) // 4
        # bfloat16 may prefer another of two nearly equal tokens, or experts of tokens before
        most = (0.3 if experts else 0.1) * float(logits.std())
        assert float(lost[judged].max()) < most, (lost, judged)
