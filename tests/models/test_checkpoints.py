"""Checkpoints that cannot be a target's draft are refused, in one line that names what is wrong."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from specattn.errors import ModelError
from specattn.models import (
    Eagle3Head,
    FusedTarget,
    HFTarget,
    load_dflash,
    load_draft,
    load_lm_draft,
)

if TYPE_CHECKING:
    from pathlib import Path
from tests.models import test_dflash as dflash
from tests.models.heads import CONFIG, HT, VD, V, eagle3_tensors, eagle_tensors, rand, write

IDS = "eagle_aux_hidden_state_layer_ids"


def refusal(folder: Path, target: HFTarget) -> str:
    with pytest.raises(ModelError) as caught:
        load_draft(folder, target)
    assert caught.value.argument == "draft"
    message = str(caught.value)
    assert "\n" not in message
    return message.removeprefix(f"{folder} ")


def test_missing_files(target, tmp_path) -> None:
    assert refusal(tmp_path / "absent", target) == f"no such folder: {tmp_path / 'absent'}"
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert refusal(tmp_path, target) == "has neither model.safetensors nor pytorch_model.bin"
    (tmp_path / "config.json").unlink()
    assert refusal(tmp_path, target) == "has no config.json"
    write(tmp_path, eagle3_tensors(), layout="sharded")
    (tmp_path / "b.safetensors").unlink()
    assert refusal(tmp_path, target) == "lacks the file b.safetensors"


def test_corrupt_files(target, tmp_path) -> None:
    write(tmp_path, eagle3_tensors())
    whole = (tmp_path / "model.safetensors").read_bytes()
    for damaged in (b"x" * 100, whole[:-4], b""):
        (tmp_path / "model.safetensors").write_bytes(damaged)
        assert refusal(tmp_path, target) == "has a truncated or corrupt model.safetensors"
    write(tmp_path, eagle3_tensors(), layout="bin")
    whole = (tmp_path / "pytorch_model.bin").read_bytes()
    for damaged in (whole[:100], whole[:-4], b""):
        (tmp_path / "pytorch_model.bin").write_bytes(damaged)
        assert refusal(tmp_path, target) == "has a truncated or corrupt pytorch_model.bin"
    torch.save({"fc.weight": HFTarget}, tmp_path / "pytorch_model.bin")  # a class: code, in effect
    assert refusal(tmp_path, target) == (
        "has a pytorch_model.bin that is corrupt or holds more than tensors"
    )
    (tmp_path / "config.json").write_text("{")
    assert refusal(tmp_path, target).startswith("has a corrupt config.json: Expecting property")


def test_files_that_hold_something_else(target, tmp_path) -> None:
    weights = tmp_path / "pytorch_model.bin"
    write(tmp_path, eagle3_tensors(), layout="bin")
    wanted = "in pytorch_model.bin; expected a dict of tensors by name"
    for found in ([1, 2], torch.zeros(3), {"fc.weight": [1]}, {1: torch.zeros(3)}):
        torch.save(found, weights)
        assert refusal(tmp_path, target) == f"has a {type(found).__name__} {wanted}"
    (tmp_path / "config.json").write_text("[]")
    assert refusal(tmp_path, target) == "has a list in config.json; expected an object"
    index = write(tmp_path, eagle3_tensors(), layout="sharded") / "model.safetensors.index.json"
    for text, reason in (
        ("{}", "has no weight_map in model.safetensors.index.json"),
        ("[]", "has a list in model.safetensors.index.json; expected an object"),
    ):
        index.write_text(text)
        assert refusal(tmp_path, target) == reason


def test_what_is_no_eagle_head(target, tmp_path) -> None:
    target.module.save_pretrained(tmp_path / "whole")
    assert refusal(tmp_path / "whole", target).startswith(
        "is no EAGLE head: it has no tensor fc.weight in model.safetensors, as a whole model or a"
    )
    medusa = write(tmp_path / "medusa", {"0.0.linear.weight": rand(HT, HT)}, medusa_num_heads=4)
    assert refusal(medusa, target) == "is a Medusa head, no EAGLE head"
    unnamed = write(tmp_path / "unnamed", {"medusa_head.0.0.linear.weight": rand(HT, HT)})
    assert refusal(unnamed, target).startswith("is no EAGLE head: ")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads 0 in config.json; expected a whole numb"),
        ({"num_key_value_heads": 0}, "num_key_value_heads 0 in config.json; expected a whole numb"),
        ({"head_dim": -24}, "head_dim -24 in config.json; expected a whole number of at least 1"),
        ({"hidden_size": "64"}, "hidden_size '64' in config.json; expected a whole number of at"),
        ({"num_key_value_heads": True}, "num_key_value_heads True in config.json; expected a who"),
        ({"draft_vocab_size": 37.0}, "draft_vocab_size 37.0 in config.json; expected a whole"),
        (
            {"hidden_act": "foo"},
            "hidden_act 'foo' in config.json, which transformers does not know",
        ),
        ({"num_hidden_layers": 2}, "num_hidden_layers 2 in config.json; an EAGLE-3 head has 1"),
        ({"eagle_config": [1]}, "eagle_config [1] in config.json; expected an object"),
        (
            {"transformer_layer_config": "x"},
            "transformer_layer_config 'x' in config.json; expected",
        ),
        ({"num_attention_heads": 5}, "a config.json that transformers refuses: "),
        *(
            (
                {"eagle_config": {IDS: ids}},
                f"{IDS} {ids!r} in config.json; expected a list of whole",
            )
            for ids in ("123", 3, [0, 1.5, 2], [True, 1, 2], ["1"], {"1": 2})
        ),
    ],
)
def test_settings_that_are_none(target, tmp_path, changes, reason) -> None:
    folder = write(tmp_path, eagle3_tensors(), **changes)
    assert refusal(folder, target).startswith(f"has {reason}")


@pytest.mark.parametrize("where", [None, "transformer_layer_config"])
def test_a_quantised_head(target, tmp_path, where) -> None:
    quantised = {"quantization_config": {"quant_method": "nonesuch"}}
    folder = write(tmp_path, eagle3_tensors(), **({where: quantised} if where else quantised))
    assert refusal(folder, target).startswith("is quantised (quant_method 'nonesuch'); expected")


def test_every_wrong_tensor_is_named(target, tmp_path) -> None:
    tensors = eagle3_tensors()

    def message(**changes: torch.Tensor | None) -> str:
        kept = {k: v for k, v in (tensors | changes).items() if v is not None}
        return refusal(write(tmp_path, kept), target)

    up, gate = "midlayer.mlp.up_proj.weight", "midlayer.mlp.gate_proj.weight"
    assert message(**{up: None}) == f"lacks the tensor {up} in model.safetensors"
    assert (
        message(**{up: None, gate: None})
        == f"lacks the tensor {gate} and 1 more in model.safetensors"
    )
    assert (
        message(**{"layers.1.x": rand(3)})
        == "has an unknown tensor layers.1.x in model.safetensors"
    )
    assert (
        message(**{"model.norm.weight": rand(3)})
        == "holds the tensor norm.weight twice in model.safetensors"
    )
    assert message(**{up: rand(80, 65)}) == (
        f"has a tensor {up} of torch.float32 [80, 65] in model.safetensors; expected floating "
        "point [80, 64]"
    )
    assert up in message(**{up: torch.zeros(80, 64, dtype=torch.int8)})
    assert (
        "fc.weight of torch.float32 [64, 128] in model.safetensors; expected floating point [64, "
        in message(**{"fc.weight": rand(64, 128)})
    )
    assert "lm_head.weight" in message(**{"lm_head.weight": rand(V, HT)})


@pytest.mark.parametrize("number", [torch.nan, -torch.inf])
@pytest.mark.parametrize("name", ["midlayer.mlp.down_proj.weight", "norm.weight", "lm_head.weight"])
def test_weights_that_are_no_numbers(target, tmp_path, name, number) -> None:
    tensors = eagle3_tensors()
    tensors[name].view(-1)[-1] = number
    wanted = f"has NaN or infinite weights in {name} in model.safetensors"
    assert refusal(write(tmp_path, tensors), target) == wanted


def test_vocabulary_and_d2t_are_checked(target, tmp_path) -> None:
    tensors = eagle3_tensors()

    def message(d2t: torch.Tensor | None, **changes: Any) -> str:
        kept = {k: v for k, v in (tensors | {"d2t": d2t}).items() if v is not None}
        return refusal(write(tmp_path, kept, **changes), target)

    good = tensors["d2t"]
    beyond, twice = good.clone(), good.clone()
    beyond[-1], twice[1] = V - (VD - 1), good[0] - 1
    assert message(beyond) == (
        f"maps a draft token to {V} by d2t in model.safetensors; draft and target both have "
        f"tokens 0..{V - 1}"
    )
    assert "maps a draft token to -1" in message(torch.full((VD,), -1))
    assert message(twice) == (
        "maps two draft tokens to one target token by d2t in model.safetensors"
    )
    assert "d2t of torch.float32 [37]" in message(good.float())
    assert "d2t of torch.bool [37] in model.safetensors; expected integers" in message(good.bool())
    assert "[37] in model.safetensors; expected integers [36]" in message(good, draft_vocab_size=36)
    assert message(None, draft_vocab_size=VD) == (
        f"has draft_vocab_size {VD} in config.json, and no tensor d2t in model.safetensors that "
        f"maps these tokens to the target's {V}"
    )
    assert message(good, vocab_size=90) == (
        f"has vocab_size 90 in config.json; the target has {V}, and no tokenizer to say which of "
        "them are padding"
    )
    eagle = write(tmp_path, eagle_tensors(), vocab_size=90)
    assert "has vocab_size 90 in config.json" in refusal(eagle, target)


def test_a_map_of_ids_is_no_map_of_differences(target, tmp_path) -> None:
    """The mask t2d tells the two apart, and else that ids rise with every token."""
    tensors = eagle3_tensors()
    kept = tensors["t2d"].nonzero()[:, 0]

    def load(d2t: torch.Tensor, mask: torch.Tensor | None) -> Eagle3Head:
        found = {k: one for k, one in (tensors | {"t2d": mask}).items() if one is not None}
        return load_draft(write(tmp_path, found | {"d2t": d2t}), target)

    def message(d2t: torch.Tensor, mask: torch.Tensor | None) -> str:
        with pytest.raises(ModelError) as caught:
            load(d2t, mask)
        return str(caught.value).removeprefix(f"{tmp_path} ")

    said = (
        "has target ids in d2t in model.safetensors; expected each one's difference to the "
        "draft's own id"
    )
    first = torch.arange(VD)  # as differences these are even ids, which the target has
    for ids in (first, first.int(), first + first // 5, kept):
        assert message(ids, None) == said
    marks = torch.zeros(V, dtype=torch.bool)
    assert message(kept, tensors["t2d"]) == said
    assert message(kept.flip(0), tensors["t2d"]) == said
    assert message(first, marks.index_fill(0, first, True)) == said
    assert message(tensors["d2t"], marks.index_fill(0, first, True)) == (
        "has other target tokens in d2t than in t2d in model.safetensors"
    )
    # even ids are served where the mask says that they are meant, and so are few
    assert torch.equal(load(first, marks.index_fill(0, 2 * first, True)).target_ids, 2 * first)
    shuffled = kept[torch.randperm(VD, generator=torch.Generator().manual_seed(1))]
    for mask in (tensors["t2d"], None, marks):  # an empty mask says nothing
        assert torch.equal(load(shuffled - first, mask).target_ids, shuffled)
        assert torch.equal(load(kept - first, mask).target_ids, kept)
    tensors["lm_head.weight"] = rand(7, HT)
    assert load(torch.arange(7), None).target_ids.tolist() == list(range(0, 14, 2))


def test_heads_that_do_not_fit_the_target(target, tmp_path) -> None:
    folder = write(tmp_path, eagle_tensors(), hidden_size=48)
    assert "has hidden_size 48 in config.json, but EAGLE continues the target's" in refusal(
        folder, target
    )
    tensors = eagle3_tensors(48)
    folder = write(tmp_path, tensors, hidden_size=48)
    assert "has no embed_tokens.weight in model.safetensors, and its hidden_size 48" in refusal(
        folder, target
    )
    del tensors["lm_head.weight"]
    tensors["embed_tokens.weight"] = rand(V, 48)
    folder = write(tmp_path, tensors, hidden_size=48)
    assert refusal(folder, target) == (
        f"has no lm_head.weight in model.safetensors, and the target's [{V}, {HT}] is not "
        f"[{VD}, 48], so the two cannot share one"
    )
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}
    folder = write(tmp_path, eagle3_tensors(), eagle_config=ids)
    assert refusal(folder, target) == (
        f"has {IDS} [1, 2, 4] in config.json; the target can be read after the layers 0..3"
    )
    changes = {"speculators_model_type": "eagle3", "eagle_aux_hidden_state_layer_ids": [1, 2, 5]}
    folder = write(tmp_path, eagle3_tensors(), **changes)
    assert refusal(folder, target) == (
        f"has {IDS} [1, 2, 5] in config.json; the target can be read before the layers 0..4"
    )
    folder = write(tmp_path, eagle3_tensors(), norm_before_fc=True)
    assert refusal(folder, target) == "lacks the tensor input_norm.weight in model.safetensors"
    folder = write(tmp_path, eagle3_tensors(), norm_before_fc=True, fc_norm=True)
    assert refusal(folder, target).startswith("sets norm_before_fc and fc_norm in config.json, ")
    folder = write(tmp_path, eagle3_tensors(), intermediate_size=None)
    assert refusal(folder, target) == "has no intermediate_size in config.json"
    folder = write(tmp_path, eagle3_tensors(), rope_scaling={"type": "mrope"})
    assert refusal(folder, target).startswith(
        "asks for the rope type 'mrope' in config.json; known are default, "
    )
    folder = write(tmp_path, eagle3_tensors(), num_key_value_heads=3)
    assert "midlayer.self_attn.k_proj.weight" in refusal(folder, target)


def save_tokenizer(folder: Path, vocabulary: dict[str, int]) -> None:
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def test_another_tokenizer(target, tmp_path) -> None:
    """One that calls a token otherwise is another one; one that knows more tokens is not."""
    own, head = tmp_path / "target", tmp_path / "head"
    target.module.save_pretrained(own)
    save_tokenizer(own, {"a": 0, "b": 1, "c": 2})
    targets = [HFTarget.from_pretrained(own)]
    targets.append(FusedTarget.from_target(targets[0]))
    dflash.write(head, dflash.dflash_tensors())
    for same in ({"a": 0, "b": 1, "c": 2}, {"a": 0, "b": 1, "c": 2, "d": 3}, {"a": 0, "b": 1}):
        save_tokenizer(head, same)
        load_dflash(head, targets[0])
    save_tokenizer(head, {"a": 0, "c": 1, "b": 2})
    for one in targets:
        with pytest.raises(ModelError) as caught:
            load_dflash(head, one)
        assert str(caught.value) == (
            f"{head} has another tokenizer than the target: tokenizer.json has 'c' as token 1, the "
            "target has 'b'"
        )
    load_dflash(head, target)  # a target built in memory has none
    (head / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"head has a corrupt tokenizer\.json: "):
        load_dflash(head, targets[0])


@pytest.mark.parametrize("load", [load_draft, load_dflash, load_lm_draft])
def test_a_target_that_is_none_is_refused_before_a_checkpoint_is_read(load) -> None:
    with pytest.raises(ValueError, match=r"target must be what HFTarget.* returns, got a Linear"):
        load("no/such/folder", torch.nn.Linear(2, 2))
