"""Targets of attention and Gated DeltaNet layers, against transformers and plain decoding."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

import specattn
from specattn import Engine, Request, SamplingParams, SpecConfig
from specattn.batch import ForwardMode
from specattn.cache.state_pool import StatePool
from specattn.config import StateConfig
from specattn.errors import CaptureMismatch, ModelError, UnsupportedError
from specattn.models import FusedTarget, HFTarget, LMDraft, load_dflash, load_draft, quantise_model
from specattn.models.draft import lm_draft, load_lm_draft
from specattn.models.fused import block
from specattn.models.mixers import names_of
from specattn.speculative.prompts.runner import PromptRunner
from specattn.speculative.proposers.lookup import LookupProposer
from specattn.speculative.step.step import Step
from specattn.testing import ConformanceError, memory_conformance
from specattn.testing.memories import CONFIGS
from tests.churn import Churn, Texts
from tests.cli.command import ON_CPU, run
from tests.grammars import Remainders
from tests.hybrids import KINDS, VOCAB, Guesses, generated, hybrid
from tests.implementations import using
from tests.models.heads import VD, eagle3_tensors, write
from tests.models.test_checkpoints import save_tokenizer
from tests.models.test_dflash import dflash_tensors
from tests.models.test_dflash import write as write_dflash
from tests.samples import half, on_cpu, sampled

PROMPTS = [[5, 17, 3, 99, 42, 8, 61], [23], [7, 7, 80, 12, 55, 31, 2, 64, 19, 28, 77]]
NEW = 20
SHAPES = {
    "plain": SpecConfig(0, 1, 1, 64, 4),
    "chain": SpecConfig(3, 1, 4, 64, 4),
    "beams of 2": SpecConfig(3, 2, 7, 64, 4),
    "beams of 4": SpecConfig(3, 4, 13, 64, 4),
    "best first": SpecConfig(4, 1, 9, 64, 4, tree="best_first", ranks=4),
}


@pytest.fixture(scope="module", params=KINDS)
def world(request):
    """A model, its texts, and the targets made of it."""
    model = hybrid(request.param)
    texts = generated(model, PROMPTS, NEW)
    target = HFTarget.from_model(model)
    return target, FusedTarget.from_target(target), texts


def engine(target, draft, config, **options) -> Engine:
    return Engine(target, draft, config, backend="torch_native", graphs=False, **options)


def requests(**asked) -> list[Request]:
    return [Request(prompt, NEW, **asked) for prompt in PROMPTS]


@on_cpu(half, "world", "fused", "shape")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fused", [False, True], ids=["modules", "fused"])
def test_greedy_texts_are_transformers_own(world, fused, shape) -> None:
    """Whatever is drafted, right or wrong, and however much of it is kept."""
    source, quick, texts = world
    known = [[*prompt, *text] for prompt, text in zip(PROMPTS, texts, strict=True)]
    config = SHAPES[shape]
    run = engine(quick if fused else source, Guesses(known) if config.num_steps else None, config)
    found = run.generate(requests())
    assert [one.tokens for one in found] == texts
    steps = [len(one.accept_lens) for one in found]
    assert max(steps) < NEW - 1 if config.num_steps else min(steps) == NEW - 1


@on_cpu(half, "world", "shape")
@pytest.mark.parametrize("shape", ["chain", "beams of 2", "best first"])
def test_heads_draft_for_it(world, tmp_path, shape) -> None:
    """An EAGLE-3 head reads layers of both kinds."""
    _, target, texts = world
    head = load_draft(write(tmp_path, eagle3_tensors(), draft_vocab_size=VD), target)
    run = engine(target.with_features(head.features), head, SHAPES[shape])
    assert [one.tokens for one in run.generate(requests())] == texts


@pytest.fixture(scope="module")
def one():
    """One fused target, its module, and its texts."""
    model = hybrid()
    texts = generated(model, PROMPTS, NEW)
    source = HFTarget.from_model(model)
    return FusedTarget.from_target(source), texts


@pytest.fixture
def guesses(one) -> Guesses:
    return Guesses([[*prompt, *text] for prompt, text in zip(PROMPTS, one[1], strict=True)])


def test_whole_models_and_lookup_draft_for_it(one, tiny) -> None:
    target, texts = one
    dense = HFTarget.from_model(tiny("qwen3", num_hidden_layers=2))
    drafts = lm_draft(dense, target), LookupProposer(1, 3)
    for draft, shape in zip(drafts, ("beams of 2", "beams of 4"), strict=True):
        for chunk in (4096, 5, 2):
            run = engine(target, draft, SHAPES[shape], prompt_chunk=chunk)
            assert isinstance(run._admission.prompts, PromptRunner)
            assert [result.tokens for result in run.generate(requests())] == texts


def test_block_drafts_read_its_layers(one, tmp_path) -> None:
    target, texts = one
    tensors, layers = dflash_tensors(features=2), {"target_layer_ids": [0, 2]}
    folder = write_dflash(
        tmp_path,
        tensors,
        num_target_layers=4,
        dflash_config=layers | {"mask_token_id": 100},
    )
    head = load_dflash(folder, target)
    for tree in ((5, 1, 6), (5, 2, 9)):
        run = engine(target.with_features(head.features), head, SpecConfig(*tree, 64, 4))
        assert [result.tokens for result in run.generate(requests())] == texts


def test_log_probabilities_are_those_of_a_plain_forward(one, guesses) -> None:
    target, texts = one
    run = engine(target, guesses, SHAPES["beams of 4"])
    source = hybrid()
    for result, prompt, text in zip(
        run.generate(requests(sampling=SamplingParams(logprobs=2))), PROMPTS, texts, strict=True
    ):
        assert result.tokens == text
        with torch.no_grad():
            logits = source(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1]
        want = logits.double().log_softmax(-1).gather(1, torch.tensor(text)[:, None])[:, 0]
        got = torch.tensor([found.value for found in result.logprobs], dtype=torch.float64)
        assert float((got - want).abs().max()) < 1e-5


def test_draws_are_those_of_plain_decoding(one, guesses) -> None:
    """A request's random numbers belong to it, so that trees change nothing."""
    target, _ = one
    asked = requests(sampling=SamplingParams(temperature=0.8, top_k=30, seed=5))
    plain = engine(target, None, SHAPES["plain"]).generate(asked)
    drawn = engine(target, guesses, SHAPES["beams of 4"]).generate(asked)
    assert [result.tokens for result in drawn] == [result.tokens for result in plain]


def test_stops_grammars_and_penalties_hold(one, guesses) -> None:
    """What ends within a run ends there, and every node has its own history."""
    target, texts = one
    params = SamplingParams(repetition_penalty=1.3, presence_penalty=0.4)
    for shape in ("chain", "beams of 4"):
        runs = engine(target, guesses, SHAPES[shape]), engine(target, None, SHAPES["plain"])
        ended = runs[0].generate(requests(stop_token_ids=(texts[0][7], texts[2][5])))
        first = texts[0].index(texts[0][7])
        assert ended[0].tokens == texts[0][: first + 1]
        found, want = (
            [
                one.tokens
                for one in run.generate(
                    [
                        Request(prompt, NEW, params, grammar=partial(Remainders, prompt, VOCAB))
                        for prompt in PROMPTS
                    ]
                )
            ]
            for run in runs
        )
        assert found == want


@pytest.mark.parametrize(
    "options", [{"tbo": True}, {"cudagraph": "piecewise"}, {"validate": "debug"}]
)
def test_texts_are_the_same_however_steps_run(one, guesses, options) -> None:
    target, texts = one
    run = Engine(
        target, guesses, SHAPES["beams of 2"], backend="torch_native", buckets=(4,), **options
    )
    assert [result.tokens for result in run.generate(requests())] == texts


@pytest.mark.parametrize("config", CONFIGS, ids=lambda one: f"{one.num_steps}x{one.topk}")
def test_what_it_keeps_is_what_plain_decoding_leaves(one, config) -> None:
    for check in memory_conformance(one[0], configs=[config]):
        check()


def test_prompts_come_in_chunks_of_any_size(one) -> None:
    target, texts = one
    for chunk in (2, 3, 7):
        run = engine(target, None, SHAPES["plain"], prompt_chunk=chunk)
        assert [result.tokens for result in run.generate(requests())] == texts


def test_requests_come_go_and_give_their_rows_to_others(one, guesses) -> None:
    """More requests than rows, some dropped at any time, with steps ahead."""
    target, texts = one
    run = engine(target, guesses, SpecConfig(3, 2, 7, 64, 2))
    for turn in range(4):
        results = run.add(requests()[:2])
        for _ in range(turn):
            run.step(ahead=True)
        run.drop(results[turn % 2])
        (late,) = run.add(requests()[2:])
        while run.num_running:
            run.step(ahead=True)
        assert late.tokens == texts[2]
        assert results[1 - turn % 2].tokens == texts[1 - turn % 2]


PHASES = ("begin", "draft", "verify", "process", "accept", "commit", "extend", "advance")


def goes_on(run, kept, results, texts) -> None:
    """A failed step has left what lies by row, and requests write the same texts."""
    for name, part in run.target.by_row().items():
        assert torch.equal(part, kept[name]), name
    while run.num_running:
        run.step()
    assert [result.tokens for result in results] == texts


@on_cpu(half, "cudagraph", "phase")
@pytest.mark.parametrize("phase", PHASES[:-1])
@pytest.mark.parametrize("cudagraph", ["full", "piecewise"])
def test_a_half_that_fails_undoes_no_other(one, guesses, monkeypatch, phase, cudagraph) -> None:
    """Neither half of an eager step has happened, and no state was copied to put it back."""
    target, texts = one
    run = engine(target, guesses, SHAPES["beams of 2"], tbo=True, cudagraph=cudagraph)
    results = run.add(requests())
    run.step()
    kept = {name: part.clone() for name, part in run.target.by_row().items()}
    whole, turns = getattr(Step, phase), iter(range(10**6))

    def breaks(step, *given, **options):
        found = whole(step, *given, **options)
        if next(turns) == 1:
            raise RuntimeError("no more")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Step, phase, breaks)
        patch.setattr(torch.Tensor, "clone", None)
        with pytest.raises(RuntimeError, match="no more"):
            run.step()
    goes_on(run, kept, results, texts)


@pytest.mark.parametrize("phase", PHASES)
def test_a_step_that_fails_has_not_happened(one, guesses, monkeypatch, phase) -> None:
    """Requests go on from where they were, but for what they had gained already."""
    target, texts = one
    run = engine(target, guesses, SHAPES["beams of 2"])
    results = run.add(requests())
    run.step()
    kept = {name: part.clone() for name, part in run.target.by_row().items()}
    whole = getattr(Step, phase)

    def breaks(step, *given, **options):
        if phase != "advance":
            whole(step, *given, **options)
        raise RuntimeError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(Step, phase, breaks)
        with pytest.raises(RuntimeError, match="no more"):
            run.step()
    goes_on(run, kept, results, texts)


@pytest.mark.parametrize("phase", PHASES)
def test_an_interrupt_leaves_nothing_behind(one, guesses, monkeypatch, phase) -> None:
    target, texts = one
    run = engine(target, guesses, SHAPES["beams of 2"])
    run.add(requests())
    run.step()
    whole = getattr(Step, phase)

    def breaks(step, *given, **options):
        whole(step, *given, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Step, phase, breaks)
        with pytest.raises(KeyboardInterrupt):
            run.step()
    run.clear()
    assert [result.tokens for result in run.generate(requests())] == texts


def test_what_cannot_be_served_is_refused_by_name(one, tiny) -> None:
    target, _ = one
    draft = HFTarget.from_model(hybrid())
    with pytest.raises(ModelError, match="has layers with recurrent states, which go on by"):
        lm_draft(draft, target)
    with pytest.raises(UnsupportedError, match="whose steps nothing takes back"):
        engine(target, LMDraft(draft, VOCAB), SHAPES["chain"])
    with pytest.raises(UnsupportedError, match="trees have at most 64 nodes, got 65"):
        engine(target, LookupProposer(1, 2), SpecConfig(8, 9, 65, 96, 2))
    with pytest.raises(UnsupportedError, match="deterministic layers with states"):
        engine(target, None, SHAPES["plain"], deterministic=True)
    assert all(isinstance(layer, StateConfig) for layer in target.layers[::2])


def test_a_model_is_given_back_as_it_was() -> None:
    model, ids = hybrid("qwen3_next"), torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        want = model(ids).logits
    target = HFTarget.from_model(model)
    FusedTarget.from_target(target)
    with pytest.raises(ModelError, match="mixes tokens through specattn while"):
        model(ids)
    target.restore()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, want)


def test_a_long_prompt_comes_in_parts_beside_others(one, guesses) -> None:
    """Each part goes on from what its row has read, while other rows step."""
    target, texts = one
    for draft, shape in ((guesses, "beams of 2"), (None, "plain")):
        run = engine(target, draft, SHAPES[shape], prompt_chunk=4)
        assert isinstance(run._admission.prompts, PromptRunner)
        (first,) = run.add(requests()[:1])
        run.step(ahead=True)
        results = run.generate(requests()[1:])
        assert [result.tokens for result in (first, *results)] == texts


@sampled(half, kind=["qwen3_5_text", "qwen3_next"], how=["fp8", "fp8-channel"])
def test_quantised_weights_are_served(kind, how, monkeypatch) -> None:
    """Whether or not the gates are quantised, too; rows are, in the launch that gates them."""
    model, part = hybrid(kind), hybrid(kind)
    quantise_model(model, how)
    texts = generated(model, PROMPTS, NEW)
    source = HFTarget.from_model(model)
    target = FusedTarget.from_target(source)
    assert target.blocks[0].rows_format is not None
    with monkeypatch.context() as patch:
        patch.setattr(block, "gate_heads", None)
        run = engine(target, LookupProposer(1, 2), SHAPES["beams of 2"])
        assert [result.tokens for result in run.generate(requests())] == texts
    # as published checkpoints have it
    for layer, other in zip(part.model.layers[::2], model.model.layers[::2], strict=True):
        names = names_of(layer.linear_attn)
        for name in names[: len(names) // 2]:
            setattr(layer.linear_attn, name, getattr(other.linear_attn, name))
    texts = generated(part, PROMPTS, NEW)
    source = HFTarget.from_model(part)
    for target in (source, FusedTarget.from_target(source)):
        run = engine(target, LookupProposer(1, 2), SHAPES["beams of 2"])
        assert [result.tokens for result in run.generate(requests())] == texts
    assert [len(one.mixed) for one in target.blocks[::2]] == [2, 2]


STATEFUL = "has layers with recurrent states, which go on by what is kept alone: it cannot draft"
OTHERS = {
    "mamba2": (
        {"num_heads": 8, "head_dim": 16, "state_size": 16, "expand": 2},
        "Mamba, which needs",
    ),
    "kimi_linear": (
        {
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "kv_lora_rank": 32,
            "linear_num_heads": 4,
            "linear_head_dim": 16,
        },
        "Kimi Delta Attention",
    ),
    "lfm2": ({"layer_types": ["conv", "full_attention", "conv"]}, "short convolutions"),
    "bamba": ({"mamba_n_heads": 8, "mamba_d_head": 16, "attn_layer_indices": [1]}, "Mamba, which"),
    "recurrent_gemma": ({}, "RG-LRU"),
    "falcon_h1": ({"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8}, "Mamba, which"),
    "minimax": (
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "head_dim": 16,
        },
        "Lightning Attention, which needs",
    ),
    "rwkv": ({"attention_hidden_size": 64}, "recurrent layers, which need a scan over trees"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_recurrent_layers_are_refused_by_name(tiny, kind, tmp_path) -> None:
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this release of transformers has no {kind}")
    changes, why = OTHERS[kind]
    model = tiny(kind, **changes)
    with pytest.raises(ModelError, match=why):
        HFTarget.from_model(model)
    # whatever they need to be verified, they cannot draft
    model.save_pretrained(tmp_path)
    target = HFTarget.from_model(tiny("llama"))
    with pytest.raises(ModelError, match=f"{tmp_path} {STATEFUL}") as caught:
        load_lm_draft(tmp_path, target)
    assert caught.value.argument == "draft"
    ids = torch.tensor([[5, 6, 7]])
    with pytest.raises(ModelError, match=f"assistant_model: .* '{kind}' {STATEFUL}"):
        specattn.generate(tiny("llama"), ids, max_new_tokens=2, assistant_model=model)


def test_inside_transformers_it_writes_the_same() -> None:
    """And the model is its own again after each call."""
    model, ids = hybrid(), torch.tensor([PROMPTS[0]])
    want = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    for options in ({"draft": LookupProposer(1, 3)}, {"spec_config": SHAPES["plain"]}):
        found = specattn.generate(model, ids, max_new_tokens=NEW, do_sample=False, **options)
        assert torch.equal(found, want)
        assert torch.equal(model.generate(ids, max_new_tokens=NEW, do_sample=False), want)


def test_commands_serve_it(tmp_path) -> None:
    """A folder of it is loaded and fused; what its rows take is told."""
    model = hybrid(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path, {chr(97 + at): at for at in range(26)})
    options = ["--target", str(tmp_path), "--draft-kind", "lookup", *ON_CPU]
    found = json.loads(run("graphs", *options, "--buckets", "1", "--json").stdout)
    states, windows = 2 * 4 * 32 * 16 * 4, 2 * 192 * 3 * 4
    assert found["state_nbytes_per_row"] == states + windows
    shown = run("graphs", *options, "--buckets", "1").stdout
    assert "layers with states keep 0.0 MiB per request" in shown
    result = run("generate", *options, "--max-new-tokens", "8", "--json", "g")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["fused"] == ["target"]
    assert answer["tokens"] == generated(model, [[6]], 8)[0]


def test_states_have_the_dtype_that_a_config_says() -> None:
    for asked, dtype in ((None, torch.float32), ("bfloat16", torch.bfloat16)):
        changes = {} if asked is None else {"mamba_ssm_dtype": asked}
        target = HFTarget.from_model(hybrid(**changes))
        assert target.layers[0].state_dtype == dtype
        run = engine(target, None, SHAPES["plain"])
        assert run.target.by_row()["states"].dtype == dtype
        assert len(run.generate(requests())[0].tokens) == NEW


def test_the_kernels_write_the_same(one, guesses) -> None:
    """Steps and prompts of layers of both kinds, by kernels alone."""
    target, texts = one
    config = SpecConfig(3, 2, 7, 32, 2)
    with using("triton"):
        run = Engine(target, guesses, config, backend="triton", graphs=False, prompt_chunk=5)
        results = run.generate([Request(prompt, 6) for prompt in PROMPTS])
    assert [result.tokens for result in results] == [text[:6] for text in texts]


def test_configs_of_one_engine_share_its_states(one, guesses) -> None:
    """Deep steps, wide ones and plain ones follow each other."""
    target, texts = one
    configs = [SHAPES["chain"], SHAPES["plain"]]
    turns = iter(range(10**6))
    run = engine(
        target,
        guesses,
        SHAPES["beams of 4"],
        configs=configs,
        policy=lambda seen: seen.configs[next(turns) % len(seen.configs)],
    )
    assert [result.tokens for result in run.generate(requests())] == texts


def test_what_comes_between_parts_may_fail(one) -> None:
    """The tree is verified by then, and no state has gone on."""
    target, texts = one
    lookup = LookupProposer(1, 2)
    run = engine(target, lookup, SHAPES["beams of 2"], cudagraph="piecewise")
    results = run.add(requests())
    run.step()
    kept = {name: part.clone() for name, part in run.target.by_row().items()}
    rows, decoder = [live.row for live in run.running], run.decoder(SHAPES["beams of 2"])
    run.table.reserve(rows, [40] * 3)

    def breaks(part):
        if part.mode is ForwardMode.DRAFT_EXTEND:
            raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        decoder.step(rows, between=breaks)
    assert all(torch.equal(part, kept[name]) for name, part in run.target.by_row().items())
    while run.num_running:
        run.step()
    assert [result.tokens for result in results] == texts


def test_requests_that_come_and_go_write_what_they_write_alone(one, guesses) -> None:
    """Of all kinds, at random, with steps ahead; then every row's state is that of its text."""
    target, texts = one
    run = engine(target, guesses, SpecConfig(3, 2, 7, 64, 4), prompt_chunk=6)
    kinds = [
        Request(PROMPTS[0], NEW),
        Request(PROMPTS[1], NEW, SamplingParams(0.8, seed=5)),
        Request(PROMPTS[2], NEW, SamplingParams(repetition_penalty=1.2, logprobs=1)),
    ]
    alone, churn = Texts(run, kinds), Churn(run, kinds, seed=4)
    for _ in range(100):
        alone.hold(churn.step())
    assert churn.joins > 12
    ended = churn.drop()
    assert all(result.finish_reason == "dropped" for _, result in ended)
    assert [result.tokens for result in run.generate(requests())] == texts


def test_the_guard_of_a_capture_knows_its_states(one) -> None:
    run = engine(one[0], None, SHAPES["plain"])
    run.add(requests()[:1])
    for name in ("states", "windows"):
        held = run.target.by_row()[name]
        before = held.data
        held.data = before.clone()
        with pytest.raises(CaptureMismatch, match=f"{name} changed since capture"):
            run.step()
        held.data = before
    assert run.step()


def test_the_text_part_of_a_published_layout_is_served(tmp_path) -> None:
    """Checkpoints come with a part for images; transformers loads the text's."""
    model = hybrid()
    text = {name: value for name, value in model.config.to_dict().items() if name != "dtype"}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
    vision |= {"out_hidden_size": 64, "patch_size": 4, "num_position_embeddings": 16}
    whole = AutoModelForImageTextToText.from_config(
        CONFIG_MAPPING["qwen3_5"](text_config=text, vision_config=vision)
    )
    whole.model.language_model.load_state_dict(model.model.state_dict())
    whole.lm_head.load_state_dict(model.lm_head.state_dict())
    whole.save_pretrained(tmp_path)
    target = FusedTarget.from_target(HFTarget.from_pretrained(tmp_path))
    run = engine(target, None, SHAPES["plain"])
    texts = generated(model, PROMPTS, NEW)
    assert [result.tokens for result in run.generate(requests())] == texts


def leaves_windows(pool, nodes, accept_index, rows) -> None:
    kept = pool.windows.clone()
    commit(pool, nodes, accept_index, rows)
    pool.windows.copy_(kept)


def leaves_a_layer(pool, nodes, accept_index, rows) -> None:
    kept = pool.states[-1].clone()
    commit(pool, nodes, accept_index, rows)
    pool.states[-1].copy_(kept)


def takes_rejected_nodes(pool, nodes, accept_index, rows) -> None:
    order = torch.arange(accept_index.shape[1], dtype=torch.int32, device=rows.device)
    commit(pool, nodes, torch.where(accept_index < 0, order, accept_index), rows)


def takes_nodes_in_their_order(pool, nodes, accept_index, rows) -> None:
    order = torch.arange(accept_index.shape[1], dtype=torch.int32, device=rows.device)
    commit(pool, nodes, torch.where(accept_index < 0, -1, order), rows)


commit = StatePool.commit
MUTANTS = [leaves_windows, leaves_a_layer, takes_rejected_nodes, takes_nodes_in_their_order]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_kit_catches_commits_that_go_wrong(one, monkeypatch, mutant) -> None:
    monkeypatch.setattr(StatePool, "commit", mutant)
    found = set()
    for check in memory_conformance(one[0], configs=CONFIGS[1:2]):
        try:
            check()
        except ConformanceError as error:
            found.add(error.broken)
    assert "kept paths" in found


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"tbo": True}, {"cudagraph": "piecewise"}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_recorded_steps_and_prompts_write_the_same(kind, options) -> None:
    """In float32: chains, trees and plain steps, by graphs; requests share rows in turn."""
    model = hybrid(kind, head_dim=64).to("cuda")
    if kind != "qwen3_5_text":
        # they read nothing on the host
        model.set_experts_implementation("batched_mm")
    texts = generated(model, PROMPTS, NEW)
    target = FusedTarget.from_target(HFTarget.from_model(model))
    known = [[*prompt, *text] for prompt, text in zip(PROMPTS, texts, strict=True)]
    for draft, shape in (
        (None, "plain"),
        (LookupProposer(1, 3), "chain"),
        (LookupProposer(1, 3), "beams of 4"),
        (Guesses(known), "beams of 2"),
    ):
        run = Engine(
            target,
            draft,
            SHAPES[shape],
            backend="triton",
            buckets=(1, 4),
            prompt_buckets=(4, 16),
            **options,
        )
        assert all(one.recorded for one in run.graphs()[run.config])
        for _ in range(2):
            assert [result.tokens for result in run.generate(requests())] == texts
