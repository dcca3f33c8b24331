from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors as hub_errors
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSeq2SeqLM, PreTrainedTokenizerFast
from transformers.utils import logging as hf_logging

from specattn.errors import ModelError
from specattn.models import HFTarget
from specattn.models.hub import blaming, fetch

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tiny, tmp_path: Path) -> Path:
    tiny("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def refusal(path_or_id: object) -> str:
    with pytest.raises(ModelError) as caught:
        HFTarget.from_pretrained(path_or_id)
    assert caught.value.argument == "target"
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_loads_quietly_and_gives_the_settings_back(folder, capfd) -> None:
    logged: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = logged.append
    hf_logging.add_handler(handler)
    hf_logging.set_verbosity_info()
    hf_logging.enable_progress_bar()
    capfd.readouterr()
    try:
        HFTarget.from_pretrained(folder)
    finally:
        hf_logging.remove_handler(handler)
    assert capfd.readouterr() == ("", "")
    assert not logged
    assert hf_logging.get_verbosity() == logging.INFO
    assert hf_logging.is_progress_bar_enabled()


def test_loads_a_folder_as_transformers_does(folder, tiny, dense) -> None:
    with torch.no_grad():
        want = tiny("llama")(input_ids=torch.arange(5)[None]).logits[0]
    target = HFTarget.from_pretrained(folder)
    positions = torch.arange(5)
    got = target.forward(positions, positions, dense(target.layers).at(positions)).logits
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-5)
    assert target.name == str(folder)


def test_dtype(folder) -> None:
    assert HFTarget.from_pretrained(folder).dtype == torch.float32
    target = HFTarget.from_pretrained(str(folder), dtype=torch.bfloat16)
    assert {target.dtype} == {layer.dtype for layer in target.layers} == {torch.bfloat16}


def test_tokenizer_is_the_one_next_to_the_model(folder, caplog, monkeypatch) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"<unk>": 0, "yes": 1, "no": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    tokenizer.model_max_length = 1
    tokenizer.save_pretrained(folder)
    target = HFTarget.from_pretrained(folder)
    assert target.tokenizer("no").input_ids == [2]
    assert target.tokenizer is target.tokenizer
    # a text that is too long is refused later, and once
    hf_logging.set_verbosity_warning()
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    assert target.tokenizer("no yes yes").input_ids == [2, 1, 1]
    assert not caplog.records
    tokenizer("no yes yes")
    assert "longer than the specified maximum" in caplog.text


def test_no_tokenizer(folder) -> None:
    target = HFTarget.from_pretrained(folder)
    with pytest.raises(ModelError) as caught:
        _ = target.tokenizer
    assert str(caught.value) == f"{folder} has no tokenizer: there is no tokenizer.json in it"
    (folder / "tokenizer_config.json").write_text("{}")
    target = HFTarget.from_pretrained(folder)
    # what transformers needs is in the last of its lines
    with pytest.raises(ModelError, match=r"the tokenizer of .* cannot be loaded.*sentencepiece"):
        _ = target.tokenizer


def test_missing_folders_and_unreachable_names(tmp_path, folder) -> None:
    assert refusal(tmp_path / "absent") == f"no such folder: {tmp_path / 'absent'}"
    assert refusal("./absent/model") == "no such folder: ./absent/model"
    assert refusal("a/b/c") == "no such folder: a/b/c"
    assert "is a file" in refusal(folder / "config.json")
    unreachable = "is neither a folder here nor in the Hub's cache, and the Hub cannot be reached"
    assert refusal("nobody/nothing") == f"nobody/nothing {unreachable}"
    assert refusal("nothing") == f"nothing {unreachable}"
    with pytest.raises(ModelError, match="Hub cannot be reached") as caught:
        fetch("draft", "nobody/nothing", ["*.json"])
    assert caught.value.argument == "draft"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (hub_errors.GatedRepoError, "is gated on the Hub"),
        (hub_errors.RepositoryNotFoundError, "is neither a folder here nor a model on the Hub"),
    ],
)
def test_what_the_hub_answers(error, text) -> None:
    cause = error.__new__(error)  # its constructor wants the Hub's response
    with pytest.raises(ModelError, match=f"org/model {text}"), blaming("target", "org/model"):
        raise OSError("several\nlines") from cause


def test_broken_configurations(folder) -> None:
    config = folder / "config.json"
    whole = config.read_text()
    config.write_text('{"model_type": "no_such_type"}')
    assert "model type `no_such_type`" in refusal(folder)
    settings = json.loads(whole)
    for changes, reason in (
        ({"hidden_act": "foo"}, f"{folder} cannot be loaded: there is no 'foo'"),
        (
            {"quantization_config": {"quant_method": "foo"}},
            f"{folder} has quant_method 'foo', unknown to transformers",
        ),
    ):
        config.write_text(json.dumps(settings | changes))
        assert refusal(folder) == reason
    config.write_text("{")
    assert "not a valid JSON file" in refusal(folder)
    config.unlink()
    assert "model_type" in refusal(folder)


def test_models_that_are_not_causal(tmp_path) -> None:
    t5 = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 11}
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", **t5))
    model.save_pretrained(tmp_path / "t5")
    assert "is an encoder-decoder; only decoders are supported" in refusal(tmp_path / "t5")
    AutoConfig.for_model("vit").save_pretrained(tmp_path / "vit")
    assert "is no causal language model (vit)" in refusal(tmp_path / "vit")


def test_unsupported_model_is_refused_after_loading(tiny, tmp_path) -> None:
    tiny("bloom").save_pretrained(tmp_path)
    assert "'bloom' does not use transformers' attention interface" in refusal(tmp_path)


def test_broken_weights(folder) -> None:
    weights = folder / "model.safetensors"
    whole, tensors = weights.read_bytes(), load_file(weights)
    for damaged in (b"", whole[:500], whole[:-4]):
        weights.write_bytes(damaged)
        assert refusal(folder) == f"{folder} has a truncated or corrupt model.safetensors"

    def save(**changes: torch.Tensor | None) -> None:
        kept = {k: v for k, v in (tensors | changes).items() if v is not None}
        save_file(kept, weights, metadata={"format": "pt"})

    save(**{"model.norm.weight": None, "lm_head.weight": None})
    assert refusal(folder) == f"{folder} lacks the tensor lm_head.weight and 1 more"
    save(**{"model.norm.weight": torch.zeros(3)})
    assert "has the wrong shape for the tensor model.norm.weight" in refusal(folder)
    weights.unlink()
    assert "no file named model.safetensors" in refusal(folder)
    (folder / "pytorch_model.bin").write_bytes(b"not a pickle")
    assert "weight files that are corrupt or hold more than tensors" in refusal(folder)
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "pytorch_model.bin").write_bytes((folder / "pytorch_model.bin").read_bytes()[:-4])
    assert refusal(folder) == f"{folder} has a truncated or corrupt pytorch_model.bin"


@pytest.mark.parametrize("size", [0, 4, 100, -4])
def test_the_damaged_shard_is_named(tiny, tmp_path, size) -> None:
    tiny("llama").save_pretrained(tmp_path, max_shard_size="50KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    shards[1].write_bytes(shards[1].read_bytes()[:size])
    assert refusal(tmp_path) == f"{tmp_path} has a truncated or corrupt {shards[1].name}"
