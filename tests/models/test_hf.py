from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import transformers

from specattn import Engine, Request, SpecConfig
from specattn.config import AttnConfig
from specattn.errors import ModelError
from specattn.models import HFTarget, LMDraft
from specattn.models.probe import _window_of
from tests.models.conftest import TINY

if TYPE_CHECKING:
    from collections.abc import Callable

LENGTH = 19
NO_INTERFACE = "does not use transformers' attention interface"
MODELS = {
    "llama": {},
    "qwen2": {},
    "qwen2_windowed": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen2_moe": {
        "use_sliding_window": True,
        "sliding_window": 5,
        "num_experts": 4,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3": {},
    "mistral": {"sliding_window": 5},
    "gemma2": {"sliding_window": 7, "query_pre_attn_scalar": 40, "attn_logit_softcapping": 3.0},
    "gemma3_text": {"sliding_window": 4},
    "phi3": {"head_dim": 16},
    # its window is in the mask alone
    "phimoe": {"sliding_window": 6, "num_local_experts": 4},
    "gpt2": {"n_positions": 128},
    "gpt_oss": {"sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "head_dim": 8,
        "v_head_dim": 20,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 3,
    },
}


@pytest.fixture
def model(tiny: Callable[..., torch.nn.Module], request: pytest.FixtureRequest) -> torch.nn.Module:
    name = request.param
    return tiny("qwen2" if name == "qwen2_windowed" else name, **MODELS[name])


def tokens(length: int = LENGTH, seed: int = 3) -> torch.Tensor:
    return torch.randint(1, 101, (length,), generator=torch.Generator().manual_seed(seed))


def reference(model: torch.nn.Module, ids: torch.Tensor) -> transformers.utils.ModelOutput:
    with torch.no_grad():
        return model(input_ids=ids[None], output_hidden_states=True, use_cache=False)


@pytest.mark.parametrize("model", MODELS, indirect=True)
def test_same_as_transformers_whole_chunked_and_flattened(model, dense) -> None:
    ids, other = tokens(), tokens(7, seed=4)
    want, want_other = reference(model, ids).logits[0], reference(model, other).logits[0]
    target = HFTarget.from_model(model)
    positions = torch.arange(LENGTH)

    whole = target.forward(ids, positions, dense(target.layers).at(positions))
    torch.testing.assert_close(whole.logits, want, atol=2e-5, rtol=1e-5)
    assert whole.hidden_states is None

    attend = dense(target.layers)
    chunks = [
        target.forward(ids[part], positions[part], attend.at(positions[part])).logits
        for part in (slice(0, 8), slice(8, 9), slice(9, LENGTH))
    ]
    torch.testing.assert_close(torch.cat(chunks), want, atol=2e-5, rtol=1e-5)

    # Two requests in one forward, their tokens shuffled: nothing depends on the order.
    order = torch.randperm(LENGTH + 7, generator=torch.Generator().manual_seed(5))
    both = torch.cat([positions, torch.arange(7)])[order]
    of = torch.cat([torch.zeros(LENGTH, dtype=torch.long), torch.ones(7, dtype=torch.long)])[order]
    attend = dense(target.layers).at(both, of)
    mixed = target.forward(torch.cat([ids, other])[order], both, attend).logits
    torch.testing.assert_close(mixed, torch.cat([want, want_other])[order], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("model", ["llama", "gemma2"], indirect=True)
def test_rows_select_logits_and_features_are_transformers_hidden_states(model, dense) -> None:
    ids, positions = tokens(), torch.arange(LENGTH)
    want = reference(model, ids)
    target = HFTarget.from_model(model).with_features((1, 0, 3))
    rows = torch.tensor([18, 0, 18, 5])

    out = target.forward(ids, positions, dense(target.layers).at(positions), rows)

    torch.testing.assert_close(out.logits, want.logits[0, rows], atol=2e-5, rtol=1e-5)
    states = torch.cat([want.hidden_states[i][0] for i in (1, 0, 3)], dim=-1)
    torch.testing.assert_close(out.hidden_states, states, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("model", ["qwen3"], indirect=True)
def test_last_feature_is_after_the_final_norm(model, dense) -> None:
    ids, positions = tokens(), torch.arange(LENGTH)
    plain = HFTarget.from_model(model)
    target = plain.with_features((3,))
    out = target.forward(ids, positions, dense(target.layers).at(positions))
    torch.testing.assert_close(target.lm_head(out.hidden_states), out.logits)
    assert plain.features == ()
    assert target.module is plain.module


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_rows_where_the_model_cannot_select_them_itself(model, dense, monkeypatch) -> None:
    ids, positions = tokens(), torch.arange(LENGTH)
    forward = model.forward

    def narrow(input_ids, position_ids=None, **rest):  # no logits_to_keep
        return forward(input_ids=input_ids, position_ids=position_ids, **rest)

    monkeypatch.setattr(model, "forward", narrow)
    target = HFTarget.from_model(model)
    rows = torch.tensor([3, 18])
    out = target.forward(ids, positions, dense(target.layers).at(positions), rows)
    whole = target.forward(ids, positions, dense(target.layers).at(positions))
    torch.testing.assert_close(out.logits, whole.logits[rows])


def test_probe_reports_every_layer(tiny) -> None:
    gemma = HFTarget.from_model(tiny("gemma2", **MODELS["gemma2"]))
    shared = {"sm_scale": 40**-0.5, "logit_cap": 3.0}
    assert gemma.layers == (
        AttnConfig(4, 2, 24, window_left=6, **shared),
        AttnConfig(4, 2, 24, **shared),
        AttnConfig(4, 2, 24, window_left=6, **shared),
    )
    qwen = HFTarget.from_model(tiny("qwen2", **MODELS["qwen2_windowed"]).to(torch.bfloat16))
    assert [layer.window_left for layer in qwen.layers] == [-1, 5, 5]
    assert {layer.dtype for layer in qwen.layers} == {torch.bfloat16} == {qwen.dtype}
    oss = HFTarget.from_model(tiny("gpt_oss", **MODELS["gpt_oss"]))
    assert [layer.window_left for layer in oss.layers] == [5, -1, 5]
    assert all(layer.sinks for layer in oss.layers)
    mistral = HFTarget.from_model(tiny("mistral", sliding_window=None))
    assert mistral.layers == (AttnConfig(4, 2, 24),) * 3
    deepseek = HFTarget.from_model(tiny("deepseek_v3", **MODELS["deepseek_v3"]))
    assert {(layer.head_dim, layer.v_head_dim) for layer in deepseek.layers} == {(24, 20)}


def test_facts_about_the_model(tiny) -> None:
    target = HFTarget.from_model(tiny("llama", eos_token_id=[2, 7]))
    target.module.generation_config.eos_token_id = 9
    assert (target.vocab_size, target.hidden_size, target.max_context_len) == (101, 64, 128)
    assert target.eos_token_ids == {2, 7, 9}
    assert target.device == torch.device("cpu")
    assert not any(parameter.requires_grad for parameter in target.module.parameters())
    with pytest.raises(ValueError, match=r"features must be 0\.\.3, got \(4,\)"):
        target.with_features((4,))
    with pytest.raises(ModelError, match="no tokenizer"):
        _ = target.tokenizer


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_context_ends_where_positions_would_rescale_the_whole_batch(tiny, kind) -> None:
    longrope = {"original_max_position_embeddings": 32, "short_factor": [1.0] * 8}
    more = longrope | {"long_factor": [2.0] * 8} if kind == "longrope" else {"factor": 2.0}
    rope = {"rope_type": kind, "rope_theta": 10000.0, **more}
    changes = {"head_dim": 16, "original_max_position_embeddings": 32}
    model_type = "phi3" if kind == "longrope" else "llama"
    target = HFTarget.from_model(tiny(model_type, rope_parameters=rope, **changes))
    limit = 32 if kind == "longrope" else 128
    assert target.max_context_len == limit
    assert target.for_context(limit) is target
    with pytest.raises(ModelError) as caught:
        target.for_context(limit + 1)
    assert caught.value.argument == "target"
    assert str(caught.value) == (
        f"{model_type} has rope type '{kind}', which rotates all tokens in another way once a "
        f"context is longer than {limit}: max_context_len must be at most {limit}, got {limit + 1}"
    )


@pytest.mark.parametrize("model_type", ["gpt2", "opt"])
def test_context_ends_with_a_table_of_positions(tiny, model_type) -> None:
    """As a draft's too, which would look for positions of the target's that it has not."""
    sizes = {"word_embed_proj_dim": 64, "ffn_dim": 64} if model_type == "opt" else {}
    model = HFTarget.from_model(tiny(model_type, max_position_embeddings=32, **sizes))
    rope = HFTarget.from_model(tiny("llama", max_position_embeddings=32))
    (text,) = plain(rope, 40).generate([Request([5, 6, 7], 40, ignore_eos=True)])
    assert (len(text.tokens), text.finish_reason) == (38, "context")
    (text,) = plain(model, 32).generate([Request([5, 6, 7], 40, ignore_eos=True)])
    assert (len(text.tokens), text.finish_reason) == (30, "context")
    said = f"{model_type} has a table of 32 positions: max_context_len must be at most 32, got 33"
    with pytest.raises(ModelError, match=said):
        plain(model, 33)
    with pytest.raises(ModelError, match=said):
        Engine(rope, LMDraft(model, 101), SpecConfig(3, 1, 4, 33, 1), graphs=False)


def plain(target: HFTarget, context: int) -> Engine:
    return Engine(target, None, SpecConfig(0, 1, 1, context, 1), graphs=False)


def test_forward_never_looks_at_positions_on_the_host(tiny, dense, monkeypatch) -> None:
    def read(*_: object, **__: object) -> None:
        raise AssertionError("transformers searched the positions for packed sequences")

    target = HFTarget.from_model(tiny("gemma2", **MODELS["gemma2"]))
    monkeypatch.setattr(transformers.masking_utils, "find_packed_sequence_indices", read)
    positions = torch.tensor([0, 1, 0])
    requests = torch.tensor([0, 0, 1])
    target.forward(tokens(3), positions, dense(target.layers).at(positions, requests))


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("llama4_text", {"intermediate_size_mlp": 32}, "has layers of kind chunked_attention"),
        (
            "falcon_h1",
            {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8},
            "has layers of Mamba, which needs a scan",
        ),
        ("mamba", {}, "has layers of Mamba, which needs a scan"),
        ("bert", {}, "has bidirectional attention"),
        # their positions begin at padding_idx + 1
        ("roberta", {"is_decoder": True}, "computes other heads in layer 0 .* positions"),
        ("xlm-roberta", {"is_decoder": True}, "computes other heads in layer 0 .* positions"),
        ("data2vec-text", {"is_decoder": True}, "computes other heads in layer 0 .* positions"),
        # which of the two depends on the version of transformers
        ("nemotron", {"head_dim": 16}, "does not (pass the arguments|use transformers' attention)"),
        ("stablelm", {"head_dim": 16}, "does not (pass the arguments|use transformers' attention)"),
    ],
)
def test_unsupported_models_are_refused_by_name(
    tiny, tmp_path, model_type, changes, reason
) -> None:
    model = tiny(model_type, **changes)
    model.save_pretrained(tmp_path)
    # loading must not fail in another way first
    for load, source in (
        (HFTarget.from_model, model),
        (HFTarget.from_pretrained, tmp_path),
    ):
        with pytest.raises(ModelError, match=f"model type '{model_type}' {reason}") as caught:
            load(source)
        assert caught.value.argument == "target"
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("bloom", {}),
        ("gptj", {"rotary_dim": 8}),
        ("gpt_neo", {"attention_types": [[["global"], 3]]}),
        ("mpt", {}),
        ("falcon", {}),
    ],
)
def test_old_models_are_refused_by_name_or_served_as_transformers_does(
    tiny, tmp_path, dense, model_type, changes
) -> None:
    """Releases of transformers bring one after another to its attention interface."""
    model = tiny(model_type, **changes)
    model.save_pretrained(tmp_path)
    ids, positions = tokens(), torch.arange(LENGTH)
    want = reference(model, ids).logits[0]
    for load, source in ((HFTarget.from_model, model), (HFTarget.from_pretrained, tmp_path)):
        if not model._supports_attention_backend:
            with pytest.raises(ModelError, match=f"model type '{model_type}' {NO_INTERFACE}"):
                load(source)
        else:
            target = load(source)
            out = target.forward(ids, positions, dense(target.layers).at(positions))
            torch.testing.assert_close(out.logits, want, atol=2e-5, rtol=1e-5)


def test_layers_that_one_pool_cannot_hold_are_refused(tiny) -> None:
    """As those of Gemma 4, whose full layers have larger heads."""
    model = tiny("llama")
    attention = model.model.layers[2].self_attn
    attention.k_proj, attention.v_proj = torch.nn.Linear(64, 96), torch.nn.Linear(64, 96)
    with pytest.raises(ModelError) as caught:
        HFTarget.from_model(model)
    assert str(caught.value) == (
        "unsupported: model type 'llama' has KV heads of several shapes, which one pool cannot "
        "hold: 2 of 24 in layer 0, 4 of 24 in layer 2"
    )


def state_of(model: torch.nn.Module) -> tuple[list, ...]:
    return (
        [model.config._attn_implementation],
        [part.training for part in model.modules()],
        [one.requires_grad for one in model.parameters()],
    )


@pytest.mark.parametrize("model", ["qwen3", "gemma3_text"], indirect=True)
def test_a_model_is_given_back(model, dense) -> None:
    """Until then a call of anybody else says what to do; after it, one of the target does."""
    ids, positions = tokens(), torch.arange(LENGTH)
    want = reference(model, ids).logits[0]
    model.set_attn_implementation("sdpa")
    model.model.layers[1].mlp.train()
    model.lm_head.requires_grad_(False)
    before = state_of(model)
    target = HFTarget.from_model(model)
    again = HFTarget.from_model(model).with_features((1,))
    again.restore()  # as it was when it was wrapped again: the first target still runs
    assert state_of(model) != before
    for call in (lambda: model(ids[None]), lambda: model.generate(ids[None], max_new_tokens=2)):
        with pytest.raises(
            ModelError, match=rf"\({model.config.model_type}\) .* HFTarget\.restore"
        ):
            call()
    attend = dense(target.layers).at(positions)
    torch.testing.assert_close(target.forward(ids, positions, attend).logits, want)

    target.restore()
    assert state_of(model) == before
    torch.testing.assert_close(model(ids[None]).logits[0], want, atol=2e-5, rtol=1e-5)
    with pytest.raises(ModelError, match=r"attends in its own way again: .* HFTarget\.from_model"):
        target.forward(ids, positions, attend)
    HFTarget.from_model(model).forward(ids, positions, attend.at(positions))


def test_every_part_of_a_model_is_given_back(monkeypatch) -> None:
    """Each attends in its own way again; a part may be in the configuration alone."""
    own = {**transformers.LlavaConfig.sub_configs, "spare": transformers.LlamaConfig}
    monkeypatch.setattr(transformers.LlavaConfig, "sub_configs", own)
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    vision |= {"num_hidden_layers": 1, "image_size": 8, "patch_size": 4, "projection_dim": 16}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**vision),
        text_config=transformers.LlamaConfig(**TINY),
        image_token_index=100,
    )
    config.spare = transformers.LlamaConfig(**TINY)
    model = transformers.LlavaForConditionalGeneration._from_config(config)
    parts = (config, config.text_config, config.vision_config, config.spare)
    kinds = ["flex_attention", "sdpa", "eager", "eager"]
    for part, kind in zip(parts, kinds, strict=True):
        part._attn_implementation_internal = kind
    model.model.vision_tower.eval()

    def now() -> list[str]:
        return [part._attn_implementation for part in parts]

    training = [part.training for part in model.modules()]
    assert len(set(training)) == 2
    target = HFTarget.from_model(model)
    assert now() == ["specattn"] * 4
    target.restore()
    assert now() == kinds
    assert [part.training for part in model.modules()] == training
    assert all(one.requires_grad for one in model.parameters())


def _whole(model: torch.nn.Module, **how: object) -> None:
    model.compile(**how)


def _forward(model: torch.nn.Module, **how: object) -> None:
    model.forward = torch.compile(model.forward, **how)


def _layers(model: torch.nn.Module, **how: object) -> None:
    for layer in model.model.layers:
        layer.compile(**how)


@pytest.mark.parametrize(
    "compiled", [_whole, pytest.param(_forward, marks=pytest.mark.whole), _layers]
)
def test_compiled_models_are_looked_at_uncompiled(tiny, dense, compiled) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _inputs: object):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = tiny("mistral", sliding_window=5, num_hidden_layers=1)
    ids, positions = tokens(), torch.arange(LENGTH)
    want = reference(model, ids).logits[0]
    compiled(model, backend=backend)
    target = HFTarget.from_model(model)
    assert not graphs
    assert {layer.window_left for layer in target.layers} == {4}
    out = target.forward(ids, positions, dense(target.layers).at(positions))
    torch.testing.assert_close(out.logits, want, atol=2e-5, rtol=1e-5)
    assert graphs
    torch._dynamo.reset()


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.2.mlp.up_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
def test_weights_that_are_no_numbers_are_named(tiny, name, number) -> None:
    model = tiny("llama").requires_grad_(False)
    model.get_parameter(name).view(-1)[:8] = number
    with pytest.raises(ModelError, match=f"'llama' has weights that are NaN or infinite: {name}$"):
        HFTarget.from_model(model)
    model.get_parameter("lm_head.weight")[3] = number
    more = "" if name == "lm_head.weight" else " and 1 more"
    with pytest.raises(ModelError, match=f"{name}{more}$"):
        HFTarget.from_model(model)


def test_activations_that_overflow_are_no_weights(tiny) -> None:
    model = tiny("llama").half().requires_grad_(False)
    model.get_parameter("model.norm.weight").fill_(6e4)
    model.get_parameter("lm_head.weight").fill_(6e4)
    with pytest.raises(ModelError, match="computes logits that are NaN or infinite, of finite"):
        HFTarget.from_model(model)


@pytest.mark.filterwarnings("ignore")
def test_dynamic_quantisation_is_refused(tiny) -> None:
    quantize = torch.ao.quantization.quantize_dynamic
    for kinds, first in (
        ({torch.nn.Linear}, "model.layers.0.self_attn.q_proj"),
        ({"lm_head"}, "lm_head"),
    ):
        model = quantize(tiny("llama"), kinds, dtype=torch.qint8)
        with pytest.raises(ModelError, match=f"'llama' has {first} quantised by torch.ao, which "):
            HFTarget.from_model(model)


@pytest.mark.parametrize("model_type", ["roberta", "bert"])
def test_a_model_that_is_refused_is_left_as_it_was(tiny, model_type) -> None:
    model = tiny(model_type, is_decoder=model_type == "roberta").train()
    before = state_of(model)
    with pytest.raises(ModelError):
        HFTarget.from_model(model)
    assert state_of(model) == before


@pytest.mark.parametrize(
    ("mask", "window"),
    [
        (lambda q, k: k <= q, 0),
        (lambda q, k: (k <= q) & (k > q - 3000), 3000),
        (lambda q, k: (k <= q) & (k > q - 7001), 0),  # longer than any context
        (lambda q, k: (k <= q) & (k // 64 == q // 64), None),
        (lambda q, k: (k <= q) & (k % 2 == q % 2), None),
        (lambda q, k: (k <= q) | (k < 4), None),  # a prefix that sees all of itself
        (lambda q, k: k <= q + 1, None),
        (lambda q, k: torch.arange(4)[k] <= q, None),  # made for the tokens at hand
    ],
)
def test_windows_are_read_off_a_mask_at_any_distance(mask, window) -> None:
    found = _window_of(lambda _batch, _head, q, k: mask(q, k), 7000, torch.device("cpu"))
    assert found == window


def test_a_target_whose_logits_are_not_its_vocabulary_is_refused(tiny, monkeypatch) -> None:
    model = tiny("llama")
    forward = model.forward

    def short(**rest):
        output = forward(**rest)
        output.logits = output.logits[..., :90]
        return output

    monkeypatch.setattr(model, "forward", short)
    with pytest.raises(ModelError, match="'llama' has logits of 90 columns"):
        HFTarget.from_model(model)


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["llama", "gemma2"], indirect=True)
def test_forward_can_be_captured(model) -> None:
    target = HFTarget.from_model(model.cuda()).with_features((1, 2))
    ids, rows = tokens().cuda(), torch.tensor([4, 2], device="cuda")
    positions = torch.zeros(LENGTH, dtype=torch.long, device="cuda")

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q * k.sum() + v.repeat_interleave(q.shape[1] // v.shape[1], 1)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        target.forward(ids, positions, attend, rows)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = target.forward(ids, positions, attend, rows)

    ids.copy_(tokens(seed=8))
    positions.copy_(torch.arange(LENGTH))
    rows.copy_(torch.tensor([18, 0]))
    graph.replay()
    want = target.forward(ids, positions, attend, rows)
    torch.testing.assert_close(out.logits, want.logits)
    torch.testing.assert_close(out.hidden_states, want.hidden_states)
