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
