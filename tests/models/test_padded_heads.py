"""Heads whose vocabulary is the target's but for padding draft as heads of its size do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from specattn import Engine, Request, SamplingParams, SpecConfig
from specattn.errors import ModelError
from specattn.models import HFTarget, fuse, load_dflash, load_draft
from tests.models import heads
from tests.models import test_dflash as dflash
from tests.models.heads import HT, rand
from tests.models.test_checkpoints import save_tokenizer
from tests.models.test_end_to_end import greedy
from tests.samples import half, on_cpu, sampled

if TYPE_CHECKING:
    from pathlib import Path

    from tests.models.heads import Tensors

# tokens of the target; those that its tokenizer names; of a larger head and of a smaller one
V, NAMED, MORE, LESS = 23, 16, 40, 19
PROMPTS, NEW = [[3, 15], [8, 8], [12, 12]], 12
KINDS = ("eagle", "eagle3", "dflash")
TREE = SpecConfig(2, 8, 24, max_context_len=64, max_num_reqs=4)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict:
    return {"folder": tmp_path_factory.mktemp("target")}


@pytest.fixture
def padded(tiny, models) -> tuple[HFTarget, list[list[int]]]:
    """A target that writes tokens of its padding, too, and what it writes alone."""
    if "target" not in models:
        model, folder = tiny("llama", num_hidden_layers=5, vocab_size=V), models["folder"]
        model.save_pretrained(folder)
        save_tokenizer(folder, {"a" * (at + 1): at for at in range(NAMED)})
        models["texts"] = [greedy(model, prompt, NEW) for prompt in PROMPTS]
        models["target"] = HFTarget.from_pretrained(folder)
        assert any(token >= LESS for text in models["texts"] for token in text)
    return models["target"], models["texts"]


def tensors_of(kind: str, size: int, own: str) -> Tensors:
    """A head of ``size`` tokens; heads of all sizes agree in those that they share."""
    make = {"eagle": heads.eagle_tensors, "eagle3": heads.eagle3_tensors}
    tensors = make.get(kind, dflash.dflash_tensors)()
    for name in ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d"):
        tensors.pop(name, None)
    torch.manual_seed(8)
    ends = {"embed_tokens.weight": rand(MORE, HT), "lm_head.weight": rand(MORE, HT)}
    # were these proposed, they would be first
    ends["lm_head.weight"][V:] *= 50
    return tensors | {key: ends[key][:size].clone() for key in ends if key.split(".")[0] in own}


def load(kind: str, folder: Path, tensors: Tensors, target: HFTarget, size: int):
    if kind == "dflash":
        settings = {"target_layer_ids": [0, 2, 4], "mask_token_id": 5}
        dflash.write(folder, tensors, vocab_size=size, dflash_config=settings)
        return load_dflash(folder, target)
    return load_draft(heads.write(folder, tensors, vocab_size=size), target)


def run(target: HFTarget, head) -> tuple[list, list]:
    engine = Engine(
        target.with_features(head.features), head, TREE, backend="torch_native", graphs=False
    )
    results = engine.generate([Request(p, NEW, ignore_eos=True) for p in PROMPTS])
    return [one.tokens for one in results], [one.accept_lens for one in results]


@sampled(half, kind=KINDS, own=["embed_tokens", "lm_head"], size={"larger": MORE, "smaller": LESS})
def test_what_pads_a_head_is_neither_read_nor_proposed(padded, tmp_path, kind, own, size) -> None:
    target, texts = padded
    head = load(kind, tmp_path, tensors_of(kind, size, own), target, size)
    common = min(size, V)
    assert head.vocab_size == common
    # one of the target's size, which reads what the other lacks as its last token
    tensors = tensors_of(kind, V, own)
    if "embed_tokens.weight" in tensors:
        tensors["embed_tokens.weight"][common:] = tensors["embed_tokens.weight"][common - 1]
    # the engine makes no other head of one that has its table of rotations
    plain = load(kind, tmp_path, tensors, target, V).for_context(TREE.max_context_len)
    logits = plain._logits
    object.__setattr__(
        plain, "_logits", lambda x: logits(x).index_fill(1, torch.arange(common, V), -torch.inf)
    )
    accepted = run(target, plain)[1]
    assert max(n for one in accepted for n in one) > 1
    assert run(target, head) == (texts, accepted)
    assert run(fuse(target)[0], head) == (texts, accepted)


def test_another_vocabulary_is_no_padding(padded, tmp_path) -> None:
    target, _ = padded
    for size, why in (
        (NAMED - 1, f", and its tokenizer names token {NAMED - 1}"),
        (V + 1025, ", which no padding of at most 1024 explains"),
    ):
        with pytest.raises(ModelError) as caught:
            load("eagle3", tmp_path, tensors_of("eagle3", size, ""), target, size)
        assert str(caught.value) == (
            f"{tmp_path} has vocab_size {size} in config.json; the target has {V}{why}"
        )


@pytest.mark.parametrize("size", [MORE, LESS], ids=["larger", "smaller"])
def test_draft_tokens_map_to_tokens_that_both_have(padded, tmp_path, size) -> None:
    """The last of them is one; the next one is padding of the larger vocabulary."""
    target, _ = padded
    common, tensors = min(size, V), tensors_of("eagle3", size, "lm_head")
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:3]

    def mapped(last: int) -> Tensors:
        return tensors | {"d2t": torch.tensor([2, 6, last]) - torch.arange(3)}

    head = load("eagle3", tmp_path, mapped(common - 1), target, size)
    assert head.target_ids.tolist() == [2, 6, common - 1]
    with pytest.raises(ModelError) as caught:
        load("eagle3", tmp_path, mapped(common), target, size)
    assert str(caught.value) == (
        f"{tmp_path} maps a draft token to {common} by d2t in model.safetensors; draft and target "
        f"both have tokens 0..{common - 1}"
    )


def test_a_mask_token_must_have_an_embedding(padded, tmp_path) -> None:
    """A head's own may lack one that the target's has."""
    target, _ = padded
    at = {"vocab_size": LESS, "dflash_config": {"target_layer_ids": [0, 2, 4], "mask_token_id": 20}}
    load_dflash(dflash.write(tmp_path, tensors_of("dflash", LESS, ""), **at), target)
    folder = dflash.write(tmp_path, tensors_of("dflash", LESS, "embed_tokens"), **at)
    with pytest.raises(ModelError, match=r"has mask_token_id 20 .* of 0\.\.18"):
        load_dflash(folder, target)


@on_cpu(half, "kind", "size")
@pytest.mark.parametrize("size", [MORE, LESS], ids=["larger", "smaller"])
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_padded_heads_draw(padded, tmp_path, kind, size) -> None:
    """Drawn drafts leave greedy requests of their batch alone."""
    target, texts = padded
    head = load(kind, tmp_path, tensors_of(kind, size, "lm_head"), target, size)
    config = SpecConfig(2, 1, 3, 64, 8, draft_sampling=True)
    target = target.with_features(head.features)
    engine = Engine(target, head, config, backend="torch_native", graphs=False)
    drawn = [Request(p, NEW, SamplingParams(1.5, seed=3), ignore_eos=True) for p in PROMPTS]
    greedy = [Request(p, NEW, ignore_eos=True) for p in PROMPTS]
    results = engine.generate([*greedy, *drawn])
    assert [one.tokens for one in results[: len(texts)]] == texts
    assert max(n for one in results for n in one.accept_lens) > 1
