"""Checkpoints that cannot be a target's draft are refused, in one line that names what is wrong."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from specattn.errors import ModelError
from specattn.models import HFTarget, load_draft

if TYPE_CHECKING:
    from pathlib import Path
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
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    assert refusal(tmp_path, target) == "has corrupt weight files"
    (tmp_path / "model.safetensors").unlink()
    torch.save({"fc.weight": HFTarget}, tmp_path / "pytorch_model.bin")  # a class: code, in effect
    assert "corrupt or hold more than tensors" in refusal(tmp_path, target)
    (tmp_path / "config.json").write_text("{")
    assert refusal(tmp_path, target).startswith("cannot be loaded: Expecting property name")


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
        "is no EAGLE head: it has no tensor fc.weight, as a whole model or a Medusa head;"
    )
    medusa = write(tmp_path / "medusa", {"0.0.linear.weight": rand(HT, HT)}, medusa_num_heads=4)
    assert refusal(medusa, target) == "is a Medusa head, no EAGLE head"
    unnamed = write(tmp_path / "unnamed", {"medusa_head.0.0.linear.weight": rand(HT, HT)})
    assert refusal(unnamed, target).startswith("is no EAGLE head: ")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads 0; expected a whole number of at least"),
        ({"num_key_value_heads": 0}, "num_key_value_heads 0; expected a whole number of at least"),
        ({"head_dim": -24}, "head_dim -24; expected a whole number of at least 1"),
        ({"hidden_size": "64"}, "hidden_size '64'; expected a whole number of at least 1"),
        ({"num_key_value_heads": True}, "num_key_value_heads True; expected a whole number"),
        ({"draft_vocab_size": 37.0}, "draft_vocab_size 37.0; expected a whole number"),
        ({"hidden_act": "foo"}, "hidden_act 'foo', which transformers does not know"),
        ({"num_hidden_layers": 2}, "num_hidden_layers 2; an EAGLE-3 head has 1"),
        ({"eagle_config": [1]}, "eagle_config [1]; expected an object"),
        ({"transformer_layer_config": "x"}, "transformer_layer_config 'x'; expected an object"),
        *(
            ({"eagle_config": {IDS: ids}}, f"{IDS} {ids!r}; expected a list of whole numbers")
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
    assert message(**{up: None}) == f"lacks the tensor {up}"
    assert message(**{up: None, gate: None}) == f"lacks the tensor {gate} and 1 more"
    assert message(**{"layers.1.x": rand(3)}) == "has an unknown tensor layers.1.x"
    assert message(**{"model.norm.weight": rand(3)}) == "holds the tensor norm.weight twice"
    assert message(**{up: rand(80, 65)}) == (
        f"has a tensor {up} of torch.float32 [80, 65]; expected floating point [80, 64]"
    )
    assert up in message(**{up: torch.zeros(80, 64, dtype=torch.int8)})
    assert "fc.weight of torch.float32 [64, 128]; expected floating point [64, 192]" in message(
        **{"fc.weight": rand(64, 128)}
    )
    assert "lm_head.weight" in message(**{"lm_head.weight": rand(V, HT)})


def test_vocabulary_and_d2t_are_checked(target, tmp_path) -> None:
    tensors = eagle3_tensors()

    def message(d2t: torch.Tensor | None, **changes: Any) -> str:
        kept = {k: v for k, v in (tensors | {"d2t": d2t}).items() if v is not None}
        return refusal(write(tmp_path, kept, **changes), target)

    good = tensors["d2t"]
    beyond, twice = good.clone(), good.clone()
    beyond[-1], twice[1] = V - (VD - 1), good[0] - 1
    assert message(beyond) == f"maps a draft token to {V} by d2t; the target has {V} tokens"
    assert "maps a draft token to -1" in message(torch.full((VD,), -1))
    assert message(twice) == "maps two draft tokens to one target token by d2t"
    assert "d2t of torch.float32 [37]" in message(good.float())
    assert "d2t of torch.bool [37]; expected integers" in message(good.bool())
    assert "d2t of torch.int64 [37]; expected integers [36]" in message(good, draft_vocab_size=36)
    assert message(None, draft_vocab_size=VD) == (
        f"has {VD} tokens and no tensor d2t that maps them to the target's {V}"
    )
    assert message(good, vocab_size=90) == (
        f"was made for a vocabulary of 90 tokens; the target has {V}"
    )
    eagle = write(tmp_path, eagle_tensors(), vocab_size=90)
    assert "vocabulary of 90 tokens" in refusal(eagle, target)


def test_heads_that_do_not_fit_the_target(target, tmp_path) -> None:
    folder = write(tmp_path, eagle_tensors(), hidden_size=48)
    assert "has hidden_size 48, but EAGLE continues the target's" in refusal(folder, target)
    tensors = eagle3_tensors(48)
    folder = write(tmp_path, tensors, hidden_size=48)
    assert "has no embed_tokens.weight, and its hidden_size 48" in refusal(folder, target)
    del tensors["lm_head.weight"]
    tensors["embed_tokens.weight"] = rand(V, 48)
    folder = write(tmp_path, tensors, hidden_size=48)
    assert refusal(folder, target) == (
        f"has no lm_head.weight, and the target's [{V}, {HT}] is not [{VD}, 48], "
        "so the two cannot share one"
    )
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}
    folder = write(tmp_path, eagle3_tensors(), eagle_config=ids)
    assert refusal(folder, target).endswith("(eagle_aux_hidden_state_layer_ids); 0..3 can be read")
    changes = {"speculators_model_type": "eagle3", "eagle_aux_hidden_state_layer_ids": [1, 2, 5]}
    folder = write(tmp_path, eagle3_tensors(), **changes)
    assert "before layers [1, 2, 5] (eagle_aux_hidden_state_layer_ids); 0..4 can be read" in (
        refusal(folder, target)
    )
    folder = write(tmp_path, eagle3_tensors(), norm_before_fc=True)
    assert refusal(folder, target) == "lacks the tensor input_norm.weight"
    folder = write(tmp_path, eagle3_tensors(), norm_before_fc=True, fc_norm=True)
    assert refusal(folder, target).startswith("sets norm_before_fc and fc_norm")
    folder = write(tmp_path, eagle3_tensors(), intermediate_size=None)
    assert refusal(folder, target) == "has no intermediate_size in config.json"
    folder = write(tmp_path, eagle3_tensors(), rope_scaling={"type": "mrope"})
    assert refusal(folder, target).startswith("asks for the rope type 'mrope'; known are default, ")
    folder = write(tmp_path, eagle3_tensors(), num_attention_heads=5)
    assert "hidden size (64) is not a multiple of the number of att" in refusal(folder, target)
    folder = write(tmp_path, eagle3_tensors(), num_key_value_heads=3)
    assert "midlayer.self_attn.k_proj.weight" in refusal(folder, target)
