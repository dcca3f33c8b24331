"""MTP layers of a target's own checkpoint, against transformers' modules in float64."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import specattn
from specattn import Engine, Request, RequestOutput, SamplingParams, SpecConfig
from specattn.config import AttnConfig
from specattn.errors import ModelError
from specattn.kernels.fused.fp8 import scale_blocks
from specattn.models import FusedTarget, HFTarget, MtpHead, fuse, load_draft
from specattn.models.mtp_checkpoint import has_mtp
from specattn.testing import proposer_conformance
from tests.models.mtp_models import SIZE, TARGETS, VOCAB, Mtp, Oracle
from tests.samples import half, on_cpu

NAMES = [*TARGETS]


def standing_for(mtp: Mtp, folder, device: str = "cpu") -> SimpleNamespace:
    """What a head reads of its target, of families whose targets are not served by themselves."""
    config = mtp.config
    width = getattr(config, "qk_nope_head_dim", 0) + getattr(config, "qk_rope_head_dim", 0)
    heads = AttnConfig(4, 4, width) if width else AttnConfig(4, 2, 32)
    if width and (rope := config.rope_parameters)["rope_type"] == "yarn":
        scale = 0.1 * rope["mscale_all_dim"] * torch.tensor(rope["factor"]).log().item() + 1
        heads = AttnConfig(4, 4, width, sm_scale=width**-0.5 * scale**2)
    return SimpleNamespace(
        name=str(folder),
        layers=(heads,) * config.num_hidden_layers,
        eos_token_ids=frozenset(),
        embed_tokens=deepcopy(mtp.model.get_input_embeddings()).to(device),
        lm_head=deepcopy(mtp.model.lm_head).to(device),
        hidden_size=SIZE,
        vocab_size=VOCAB,
        max_context_len=256,
        dtype=torch.float32,
        device=torch.device(device),
    )


class Seeing:
    """Attention in float64 over what was stored, as far as ``sees [T, T]`` says of all tokens."""

    def __init__(self, config: AttnConfig, sees: torch.Tensor) -> None:
        self.config, self.sees, self.kv = config, sees, []

    def __call__(self, layer, q, k, v):
        assert layer == 0
        assert k.shape[1:] == (self.config.num_kv_heads, self.config.head_dim)
        assert v.shape[1:] == (self.config.num_kv_heads, self.config.v_head_dim)
        first = sum(len(pair[0]) for pair in self.kv)
        self.kv.append((k.double(), v.double()))
        keys, values = (torch.cat(parts) for parts in zip(*self.kv, strict=True))
        group = q.shape[1] // keys.shape[1]
        keys, values = (one.repeat_interleave(group, 1) for one in (keys, values))
        logits = torch.einsum("qhd,khd->hqk", q.double(), keys) * self.config.sm_scale
        hidden = ~self.sees[first : first + len(q), : len(keys)]
        weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)


# a prompt of five tokens, two children of its end, two children of each
PROMPT, PARENTS = 5, [4, 4, 5, 5, 6, 6]
LEVELS = [[5, 6], [7, 8, 9, 10]]


def sight() -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and who sees whom: ancestors and oneself."""
    parents = [*range(-1, PROMPT - 1), *PARENTS]
    positions, sees = [], torch.eye(len(parents), dtype=torch.bool)
    for at, parent in enumerate(parents):
        positions.append(0 if parent < 0 else positions[parent] + 1)
        if parent >= 0:
            sees[at] |= sees[parent]
    return torch.tensor(positions), sees


def drawn() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(VOCAB, (PROMPT + len(PARENTS),), generator=generator)
    return ids, torch.randn(PROMPT, SIZE, generator=generator)


def wanted(oracle: Oracle) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and states of the prompt and, level by level, of the tree below it."""
    (ids, states), (positions, sees) = drawn(), sight()
    states = states.double()
    for level in (*LEVELS, []):
        count = len(states)
        logits, out = oracle(ids[:count], states, positions[:count], sees[:count, :count])
        states = torch.cat([states, out[[PARENTS[at - PROMPT] for at in level]]])
    return logits, out


def got(head: MtpHead) -> tuple[torch.Tensor, torch.Tensor]:
    ids, states, positions, sees = (one.to(head.norm.device) for one in (*drawn(), *sight()))
    attend = Seeing(head.layers[0], sees)
    out = head.forward(ids[:PROMPT], head.combine(states), positions[:PROMPT], attend)
    logits, hidden = [out.logits], [out.hidden_states]
    for level in LEVELS:
        known = torch.cat(hidden)
        sources = torch.tensor([PARENTS[at - PROMPT] for at in level], device=ids.device)
        out = head.forward(ids[level], known, positions[level], attend, sources=sources)
        logits.append(out.logits)
        hidden.append(out.hidden_states)
    return torch.cat(logits).cpu(), torch.cat(hidden).cpu()


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("name", NAMES)
def test_a_head_computes_what_transformers_layers_do(name, tmp_path) -> None:
    mtp = Mtp.of(name)
    head = load_draft("mtp", standing_for(mtp, mtp.store(tmp_path)))
    assert isinstance(head, MtpHead)
    assert head.features == (mtp.config.num_hidden_layers,)

    for mine, theirs in zip(got(head), wanted(Oracle(mtp)), strict=True):
        torch.testing.assert_close(mine.double(), theirs, atol=1e-5, rtol=1e-5)


def swapped(head: MtpHead) -> MtpHead:
    return replace(head, fc=replace(head.fc, weight=head.fc.weight.roll(SIZE, 1)))


def unrotated(head: MtpHead) -> MtpHead:
    table = head.blocks[0].rotary
    rotary = deepcopy(table.rotary)
    rotary.inv_freq.zero_()
    return inside(head, rotary=replace(table, rotary=rotary))


def inside(head: MtpHead, **changes) -> MtpHead:
    return replace(head, blocks=(replace(head.blocks[0], **changes),))


FAULTS = {
    "states before embeddings": swapped,
    "no rotation": unrotated,
    "norms the other way round": lambda head: replace(
        head, embed_norm=head.hidden_norm, hidden_norm=head.embed_norm
    ),
    "weights of norms without what is added": lambda head: replace(head, norm=head.norm - 1),
    "another eps": lambda head: inside(head, eps=3e-2),
    "another scale": lambda head: inside(
        head, geometry=replace(head.layers[0], sm_scale=head.layers[0].head_dim ** -0.3)
    ),
}


@on_cpu(half, "name", "fault")
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", NAMES)
def test_a_planted_fault_is_far_from_transformers_layers(name, fault, tmp_path) -> None:
    """Or the test above would not see it."""
    mtp = Mtp.of(name)
    head = FAULTS[fault](load_draft("mtp", standing_for(mtp, mtp.store(tmp_path))))
    both = zip(got(head), wanted(Oracle(mtp)), strict=True)
    far = [(mine - theirs).abs().max() for mine, theirs in both]
    assert min(far) > 1e-3


PROMPTS = [[5, 17, 3, 99, 42, 8, 61], [23, 4], [7, 7, 80, 12, 55, 31, 2, 64, 19, 28, 77]]
NEW = 24
TREES = {
    "chain": SpecConfig(3, 1, 4, max_context_len=64, max_num_reqs=4),
    "beams": SpecConfig(3, 3, 9, max_context_len=64, max_num_reqs=4),
    "best first": SpecConfig(3, 1, 12, tree="best_first", max_context_len=64, max_num_reqs=4),
}


def greedy(mtp: Mtp, prompt: list[int]) -> list[int]:
    ends = {"eos_token_id": -1, "pad_token_id": 0}
    out = mtp.model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, **ends)
    return out[0, len(prompt) :].tolist()


@torch.no_grad()
def accepted(mtp: Mtp, prompt: list[int], text: list[int], steps: int) -> list[int]:
    """Tokens that each step of a chain gains, by the oracle."""
    oracle, whole = Oracle(mtp), torch.tensor(prompt + text)
    last = mtp.model(whole[None], output_hidden_states=True).hidden_states[-1][0]
    gains, at = [], len(prompt) + 1  # behind the bonus token
    while at < len(whole):
        ids, states, drafts = whole[1:at], last[: at - 1].double(), []
        for _ in range(steps):
            count = len(ids)
            logits, out = oracle(
                ids, states, torch.arange(count), torch.ones(count, count).tril().bool()
            )
            drafts.append(int(logits[-1].argmax()))
            ids, states = torch.cat([ids, logits[-1:].argmax(-1)]), torch.cat([states, out[-1:]])
        right = [one == other for one, other in zip(drafts, whole[at:].tolist(), strict=False)]
        gains.append(min([*right, False].index(False) + 1, len(whole) - at))
        at += gains[-1]
    return gains


@pytest.fixture(scope="module", params=NAMES)
def served(request, tmp_path_factory):
    """A target, its greedy texts, and the two as they are loaded."""
    mtp = Mtp.of(request.param, share=0.3)
    folder = mtp.store(tmp_path_factory.mktemp("target"))
    texts = [greedy(mtp, prompt) for prompt in PROMPTS]
    target = HFTarget.from_pretrained(folder)
    head = load_draft("mtp", target)
    target, head = fuse(target.with_features(head.features), head)
    assert isinstance(target, FusedTarget) == ("qwen" in request.param)
    return mtp, texts, target, head


def speculated(target, head, tree: str) -> list[RequestOutput]:
    engine = Engine(target, head, TREES[tree], backend="torch_native", graphs=False)
    return engine.generate([Request(one, NEW, ignore_eos=True) for one in PROMPTS])


def gain(results: list[RequestOutput]) -> float:
    """Tokens of a step."""
    return sum(sum(one.accept_lens) for one in results) / sum(one.steps for one in results)


@pytest.fixture(scope="module")
def chained(served) -> list[RequestOutput]:
    """What chains of the head come to."""
    _, _, target, head = served
    return speculated(target, head, "chain")


def chain_or_half(kind: int, tree: int) -> bool:
    """Chains say most of a head."""
    return not tree or half(kind, tree)


@on_cpu(chain_or_half, "served", "tree")
@pytest.mark.parametrize("tree", TREES)
def test_texts_are_the_targets_own(served, chained, tree) -> None:
    mtp, texts, target, head = served
    assert head.layers[0].latent == (not isinstance(target, FusedTarget))
    results = chained if tree == "chain" else speculated(target, head, tree)

    assert [result.tokens for result in results] == texts
    assert gain(results) > 1.4
    if tree == "chain":
        # so nothing that was drafted differs: norms, order, positions, what was kept of rejections
        assert [result.accept_lens for result in results] == [
            accepted(mtp, prompt, text, 3) for prompt, text in zip(PROMPTS, texts, strict=True)
        ]


@on_cpu(half, "served")
def test_prompts_in_captured_pieces_and_drawn_drafts_change_no_text(served) -> None:
    _, texts, target, head = served
    config = replace(TREES["chain"], draft_sampling=True, page_size=4)
    how = {"graphs": False, "prompt_chunk": 4, "prompt_buckets": [4, 8]}
    engine = Engine(target, head, config, backend="torch_native", **how)
    requests = [Request(one, NEW, ignore_eos=True) for one in PROMPTS]
    assert [one.tokens for one in engine.generate(requests)] == texts
    drawn = [replace(one, sampling=SamplingParams(temperature=1.0)) for one in requests]
    assert {len(one.tokens) for one in engine.generate(drawn)} == {NEW}


@pytest.fixture(scope="module")
def kit_models(tmp_path_factory):
    target = HFTarget.from_pretrained(Mtp.of("deepseek_v3").store(tmp_path_factory.mktemp("kit")))
    target.module.set_experts_implementation("batched_mm")
    head = load_draft("mtp", target)
    return target.with_features(head.features), head


KIT = [check.name for check in proposer_conformance(None, None)]


@pytest.mark.parametrize("at", range(len(KIT)), ids=KIT)
def test_a_head_keeps_the_rules_of_proposers(kit_models, at) -> None:
    target, head = kit_models
    [*proposer_conformance(head, target)][at]()


def test_a_head_that_mixes_in_another_order_costs_tokens_of_a_step_and_no_text(
    served, chained
) -> None:
    _, texts, target, head = served
    mixed = speculated(target, swapped(head), "chain")
    assert [result.tokens for result in mixed] == texts
    assert gain(mixed) < 1.1 < 1.4 < gain(chained)


def test_transformers_own_mtp_model_computes_the_same(tmp_path) -> None:
    found = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(found, "MtpModel"):
        pytest.skip("this release of transformers has no MtpModel")
    folder = Mtp.of("deepseek_v3").store(tmp_path)
    target = HFTarget.from_pretrained(folder)
    head = load_draft("mtp", target)
    # transformers knows the layers of the published sizes
    target.module._keys_to_ignore_on_load_unexpected = {r"model\.layers\.2\..*"}
    target.restore()
    theirs = found.MtpModel.from_pretrained(target.module)
    theirs.config._attn_implementation = "eager"
    (ids, states), (positions, sees) = drawn(), sight()
    ids, positions = ids[:PROMPT], positions[:PROMPT]

    with torch.no_grad():
        want = theirs.forward_layer(0, states[None], positions[None], None, input_ids=ids[None])
        logits = target.lm_head(want[0])
    out = head.forward(ids, states, positions, Seeing(head.layers[0], sees))

    torch.testing.assert_close(out.hidden_states, want[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out.logits, logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_5_text"])
def test_shards_are_read_by_their_index_and_further_layers_are_not(name, tmp_path, caplog) -> None:
    mtp = Mtp.of(name)
    more = {
        key.replace("layers.2.", "layers.3.").replace("mtp.layers.0.", "mtp.layers.1."): one + 1
        for key, one in mtp.tensors().items()
        if ".layers." in key
    }
    folder = mtp.store(tmp_path, **more)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {key: f"{'own' if key in mtp.tensors() else 'rest'}.safetensors" for key in tensors}
    places |= {key: "own.safetensors" for key in tensors if "layers.2.mlp.experts" in key}
    own = {key: one for key, one in tensors.items() if places[key] == "own.safetensors"}
    save_file(own, folder / "own.safetensors")
    # what is not read may be anything
    (folder / "rest.safetensors").write_text("no tensors")
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert has_mtp(folder)

    head = load_draft("mtp", standing_for(mtp, folder))

    assert "has 2 MTP layers: the first one drafts every token, applied again" in caplog.text
    for mine, theirs in zip(got(head), wanted(Oracle(mtp)), strict=True):
        torch.testing.assert_close(mine.double(), theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_part_of_a_checkpoint_of_images_has_the_layer(kind, tmp_path) -> None:
    mtp = Mtp.of(f"{kind}_text")
    file = mtp.store(tmp_path) / "config.json"
    nested = {"model_type": kind, "text_config": json.loads(file.read_text())}
    file.write_text(json.dumps(nested))
    assert has_mtp(tmp_path)
    head = load_draft("mtp", standing_for(mtp, tmp_path))
    for mine, theirs in zip(got(head), wanted(Oracle(mtp)), strict=True):
        torch.testing.assert_close(mine.double(), theirs, atol=1e-5, rtol=1e-5)


def in_blocks(mtp: Mtp) -> dict[str, torch.Tensor]:
    """Round an MTP layer's projections to float8 in blocks; return what is stored of them."""
    stored = {}
    for key, one in mtp.layer.named_parameters():
        if "_proj" in key and one.dim() == 2:
            scaled = scale_blocks(one.detach())
            one.data.copy_(scaled.restored())
            first = "model.layers.2." if "deepseek" in mtp.config.model_type else "mtp.layers.0."
            stored |= {first + key: scaled.values, f"{first}{key}_scale_inv": scaled.scale}
    return stored


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_5_text"])
def test_float8_weights_become_plain_ones(name, tmp_path) -> None:
    mtp = Mtp.of(name)
    folder = mtp.store(tmp_path, **in_blocks(mtp))
    file = folder / "config.json"
    settings = json.loads(file.read_text())
    how = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    file.write_text(json.dumps(settings | {"quantization_config": how}))

    head = load_draft("mtp", standing_for(mtp, folder))
    for mine, theirs in zip(got(head), wanted(Oracle(mtp)), strict=True):
        torch.testing.assert_close(mine.double(), theirs, atol=1e-5, rtol=1e-5)

    how["weight_block_size"] = [64, 128]
    file.write_text(json.dumps(settings | {"quantization_config": how}))
    with pytest.raises(
        ModelError, match=r"for weight_block_size \[64, 128\]; expected .* for \[128"
    ):
        load_draft("mtp", standing_for(mtp, folder))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["bfloat16", "fp8"])
def test_in_16_bits_and_quantised_a_head_is_about_the_same(name, how, tmp_path) -> None:
    mtp = Mtp.of(name)
    target = standing_for(mtp, mtp.store(tmp_path))
    most = 0.05 if how == "bfloat16" else 0.25
    options = {"dtype": torch.bfloat16} if how == "bfloat16" else {"quantization": "fp8"}
    head = load_draft("mtp", target, **options)
    if how == "bfloat16":
        # the head has the target's own
        target.embed_tokens.bfloat16()
        target.lm_head.bfloat16()
    for mine, theirs in zip(got(head), wanted(Oracle(mtp)), strict=True):
        assert (mine - theirs).norm() < most * theirs.norm()


NEXTN, APART = "model.layers.2.", "mtp."
BROKEN = {
    "no layer": (
        "deepseek_v3",
        None,
        "has no MTP layers in model.safetensors: it has no model.layers.2.*",
    ),
    "no norm": (
        "deepseek_v3",
        {f"{NEXTN}enorm.weight": None},
        "lacks the tensor model.layers.2.enorm.weight in model.safetensors",
    ),
    "no projection": (
        "qwen3_5_text",
        {f"{APART}layers.0.self_attn.q_proj.weight": None},
        "lacks the tensor mtp.layers.0.self_attn.q_proj.weight in model.safetensors",
    ),
    "half an expert": (
        "qwen3_next",
        {f"{APART}layers.0.mlp.experts.1.up_proj.weight": None},
        "lacks the tensor mtp.layers.0.mlp.experts.1.up_proj.weight in model.safetensors",
    ),
    "one expert less": (
        "deepseek_v3",
        {f"{NEXTN}mlp.experts.3.{kind}_proj.weight": None for kind in ("gate", "up", "down")},
        "has a tensor model.layers.2.mlp.experts.gate_up_proj of torch.float32 [3, 64, 64] in "
        "model.safetensors; expected floating point [4, 64, 64]",
    ),
    "without gates": (
        "qwen3_5_text",
        {f"{APART}layers.0.self_attn.q_proj.weight": torch.randn(128, 64)},
        "has a tensor mtp.layers.0.self_attn.q_proj.weight of torch.float32 [128, 64] in "
        "model.safetensors; expected floating point [256, 64]",
    ),
    "an indexer": (
        "deepseek_v3",
        {f"{NEXTN}self_attn.indexer.wk.weight": torch.randn(4, 64)},
        "has an unknown tensor model.layers.2.self_attn.indexer.wk.weight in model.safetensors",
    ),
    "no number": (
        "qwen3_5_text",
        {f"{APART}fc.weight": torch.full((64, 128), torch.nan)},
        "has NaN or infinite weights in mtp.fc.weight in model.safetensors",
    ),
    "float8 without scales": (
        "qwen3_5_text",
        {f"{APART}fc.weight": torch.ones(64, 128).to(torch.float8_e4m3fn)},
        "has float8 weights without scales of blocks in mtp.fc.weight in model.safetensors",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_wrong_with_a_layer_is_told_by_its_stored_name(case, tmp_path) -> None:
    name, changes, message = BROKEN[case]
    mtp = Mtp.of(name)
    folder = mtp.store(tmp_path, alone=changes is None, **changes or {})
    with pytest.raises(ModelError) as caught:
        load_draft("mtp", standing_for(mtp, folder))
    assert (caught.value.argument, str(caught.value)) == ("draft", f"{folder} {message}")
    # whoever names no draft is told the same
    assert has_mtp(folder) == (changes is not None)


def test_targets_without_layers_that_draft_are_refused(tiny, tmp_path) -> None:
    model = tiny("llama")
    model.save_pretrained(tmp_path / "llama")
    known = "those of deepseek_v3, glm4_moe_lite, qwen3_next, qwen3_5_text, qwen3_5_moe_text do"
    with pytest.raises(ModelError, match=f"'llama', whose MTP layers do not draft here; {known}"):
        load_draft("mtp", HFTarget.from_pretrained(tmp_path / "llama"))
    with pytest.raises(ModelError, match="the target is built in memory: its MTP layers are read"):
        load_draft("mtp", HFTarget.from_model(model))
    with pytest.raises(ModelError, match="the target is a GGUF file: its MTP layers are read"):
        load_draft("mtp", standing_for(Mtp.of("deepseek_v3"), "some.gguf"))
    with pytest.raises(ValueError, match="target must be what HFTarget"):
        load_draft("mtp", model)
    assert not any(map(has_mtp, (tmp_path / "llama", tmp_path, "./absent", "some.gguf")))


def test_a_folder_called_mtp_comes_first(tmp_path, monkeypatch) -> None:
    mtp = Mtp.of("deepseek_v3")
    target = standing_for(mtp, mtp.store(tmp_path / "target"))
    (tmp_path / "mtp").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"mtp has no config\.json"):
        load_draft("mtp", target)


def test_the_experts_of_a_head_run_as_those_of_its_target(tmp_path) -> None:
    folder = Mtp.of("deepseek_v3").store(tmp_path)
    target = HFTarget.from_pretrained(folder, dtype=torch.bfloat16)
    (block,) = load_draft("mtp", target).blocks
    mine, theirs = block.feed.module, target.module.model.layers[-1].mlp
    # routers stay in float32
    dtypes = [
        {key: one.dtype for key, one in module.state_dict().items()} for module in (mine, theirs)
    ]
    assert dtypes[0] == dtypes[1]
    assert set(dtypes[0].values()) == {torch.bfloat16, torch.float32}
    target.module.set_experts_implementation("batched_mm")
    assert block.feed.module.experts.config._experts_implementation == "batched_mm"


def test_the_layer_drafts_inside_transformers(tmp_path) -> None:
    mtp = Mtp.of("deepseek_v3", share=0.3)
    model = AutoModelForCausalLM.from_pretrained(mtp.store(tmp_path))
    ends = {"eos_token_id": -1, "pad_token_id": 0, "max_new_tokens": NEW, "do_sample": False}
    prompt = torch.tensor([PROMPTS[0]])
    out = model.generate(prompt, custom_generate=specattn.generate, draft="mtp", **ends)
    assert out[0, len(PROMPTS[0]) :].tolist() == greedy(mtp, PROMPTS[0])


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_kernels_on_the_gpu_compute_the_same(name, tmp_path) -> None:
    mtp = Mtp.of(name)
    head = load_draft("mtp", standing_for(mtp, mtp.store(tmp_path), "cuda"))
    for mine, theirs in zip(got(head), wanted(Oracle(mtp)), strict=True):
        torch.testing.assert_close(mine.double(), theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("tree", TREES)
def test_recorded_steps_are_eager_ones(tree, tmp_path) -> None:
    folder = Mtp.of("deepseek_v3", share=0.3).store(tmp_path)
    target = HFTarget.from_pretrained(folder, device="cuda")
    target.module.set_experts_implementation("batched_mm")
    head = load_draft("mtp", target)
    found = []
    for graphs in (False, True):
        engine = Engine(target.with_features(head.features), head, TREES[tree], graphs=graphs)
        results = engine.generate([Request(one, NEW, ignore_eos=True) for one in PROMPTS])
        found.append([(one.tokens, one.accept_lens) for one in results])
    assert found[0] == found[1]
    assert sum(sum(lens) for _, lens in found[0]) > 1.5 * sum(len(lens) for _, lens in found[0])
