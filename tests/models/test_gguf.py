"""GGUF files: the weights, tokens and chat template of the model that was written."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoTokenizer

from specattn import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.errors import ModelError
from specattn.models import HFTarget, LMDraft, fuse, load_draft, load_lm_draft, pretrained
from tests.models import gguf_files
from tests.models.test_end_to_end import greedy

gguf = pytest.importorskip("gguf", reason="the extra `gguf` is not installed")

PROMPTS = [[5, 17, 3, 99, 42, 8, 61], [23]]
TEXT = "hello world, he said: \u00e4!"


@pytest.fixture
def model():
    return gguf_files.tiny()


@pytest.mark.parametrize("q8", [False, True], ids=["f32", "q8_0"])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_a_file_has_the_weights_and_logits_of_the_model(model, tmp_path, dense, q8, dtype) -> None:
    path = gguf_files.write(model, tmp_path / "m.gguf", q8=q8)
    target = HFTarget.from_pretrained(path, dtype=dtype)
    assert (target.name, target.dtype) == (str(path), dtype or torch.float32)
    assert target.eos_token_ids == {model.config.eos_token_id}
    found, want = target.module.state_dict(), model.state_dict()
    assert found.keys() == want.keys()
    for name, weight in want.items():
        torch.testing.assert_close(found[name], weight.to(target.dtype), rtol=0, atol=0)
    if target.dtype == torch.float32:
        ids = torch.tensor(PROMPTS[0])
        places = torch.arange(len(ids))
        logits = target.forward(ids, places, dense(target.layers).at(places)).logits
        torch.testing.assert_close(logits, model(ids[None]).logits[0], atol=2e-5, rtol=1e-5)


def test_files_of_target_and_draft_generate_what_transformers_does(model, tmp_path) -> None:
    path = gguf_files.write(model, tmp_path / "target.gguf", q8=True)
    small = gguf_files.write(gguf_files.tiny(1), tmp_path / "draft.gguf")
    target = HFTarget.from_pretrained(path)
    draft = load_lm_draft(small, target)
    assert isinstance(draft, LMDraft)
    engine = Engine(*fuse(target, draft), SpecConfig(3, 2, 7, 64, 2), graphs=False)
    results = engine.generate([Request(prompt, 8, ignore_eos=True) for prompt in PROMPTS])
    assert [result.tokens for result in results] == [greedy(model, prompt) for prompt in PROMPTS]


def test_the_tokenizer_and_the_chat_template_are_those_of_the_folder(model, tmp_path) -> None:
    ours = HFTarget.from_pretrained(gguf_files.write(model, tmp_path / "m.gguf")).tokenizer
    theirs = AutoTokenizer.from_pretrained(gguf_files.save(model, tmp_path / "folder"))
    assert ours(TEXT).input_ids == theirs(TEXT).input_ids
    assert len(ours(TEXT).input_ids) < len(TEXT.encode())
    assert ours.decode(ours(TEXT).input_ids) == TEXT
    message = [{"role": "user", "content": TEXT}]
    chats = [
        one.apply_chat_template(message, add_generation_prompt=True, return_dict=True)
        for one in (ours, theirs)
    ]
    assert chats[0]["input_ids"] == chats[1]["input_ids"]


@pytest.mark.parametrize("key", ["eot", "eom"])
def test_ends_that_a_file_names_are_ends(model, tmp_path, key) -> None:
    fields = {f"tokenizer__ggml__{key}_token_id": 42}
    target = HFTarget.from_pretrained(gguf_files.write(model, tmp_path / "m.gguf", **fields))
    assert target.eos_token_ids == {model.config.eos_token_id, 42}


@pytest.mark.parametrize(
    ("control", "found"),
    [
        (["<|im_end|>", "<|im_start|>"], {"<|im_end|>"}),
        (["<end_of_turn>", "<|eot_id|>"], {"<end_of_turn>", "<|eot_id|>"}),
        (["<|end|>", "<|system|>"], {"<|end|>"}),
        (["<|end|>", "<|return|>"], set()),
    ],
    ids=["chatml", "two", "phi", "messages"],
)
def test_a_control_token_that_ends_a_turn_is_an_end(tmp_path, monkeypatch, control, found) -> None:
    """Be it named as one or not; where a turn has several messages, their end is none."""
    begin, end = "<|startoftext|>", "<|endoftext|>"
    # the same letters in another kind of token are text
    text = [token for token in gguf_files.TOKENS if token not in gguf_files.ENDS]
    tokens = [*text[:-1], "<|eot|>", *control, begin, end]
    monkeypatch.setattr(gguf_files, "TOKENS", tokens)
    monkeypatch.setattr(gguf_files, "ENDS", [end, *control, begin])
    model = gguf_files.tiny()
    target = HFTarget.from_pretrained(gguf_files.write(model, tmp_path / "m.gguf"))
    assert target.eos_token_ids == {tokens.index(token) for token in (end, *found)}
    fused, _ = fuse(target, None)
    assert fused.eos_token_ids == target.eos_token_ids


def test_a_file_is_read_once_and_quietly(model, tmp_path, monkeypatch, capsys) -> None:
    path = gguf_files.write(model, tmp_path / "m.gguf")
    calls = []

    def counted(name):
        kept = getattr(gguf, name)
        monkeypatch.setattr(gguf, name, lambda *args: calls.append(name) or kept(*args))
        return getattr(gguf, name)

    counting = [counted(name) for name in ("GGUFReader", "get_tensor_name_map")]
    HFTarget.from_pretrained(path)
    assert sorted(calls) == ["GGUFReader", "get_tensor_name_map"]
    assert [gguf.GGUFReader, gguf.get_tensor_name_map] == counting
    assert capsys.readouterr() == ("", "")


def refusal(path: object, **options: object) -> str:
    with pytest.raises(ModelError) as caught:
        HFTarget.from_pretrained(path, **options)
    assert caught.value.argument == "target"
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{path} ")


def test_files_that_are_no_targets(model, tmp_path, monkeypatch) -> None:
    assert refusal("/no/such.gguf") == "no such file: /no/such.gguf"
    path = tmp_path / "m.gguf"
    gguf_files.write(model, path)
    assert refusal(tmp_path) == "has no config.json; give its GGUF file, m.gguf"
    assert refusal(path, tp_plan="auto") == "is a GGUF file, whose weights are not sharded"
    monkeypatch.setattr(pretrained, "find_spec", lambda name: None)
    assert refusal(path) == "needs gguf and accelerate (pip install 'specattn[gguf]')"


@pytest.mark.parametrize("size", [0, 3, 100, 8000, 100_000, -1])
def test_a_truncated_file_is_called_so(model, tmp_path, size) -> None:
    path = gguf_files.write(model, tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:size])
    assert refusal(path).startswith("is truncated or corrupt: ")
    path.write_bytes(b"GGUF" + b"\0" * 60)
    assert refusal(path).startswith("is truncated or corrupt: ")


def test_a_shard_is_no_file(model, tmp_path) -> None:
    path = gguf_files.write(model, tmp_path / "m-00001-of-00003.gguf", split=3)
    assert refusal(path).startswith(
        "is one of 3 shards of a GGUF file, of which transformers reads"
    )
    whole = gguf_files.write(model, tmp_path / "m.gguf", split=1)
    assert HFTarget.from_pretrained(whole).vocab_size == model.config.vocab_size


def test_rope_that_transformers_does_not_read_is_refused(model, tmp_path) -> None:
    path = gguf_files.write(model, tmp_path / "m.gguf", llama__rope__scaling__type="yarn")
    assert refusal(path).startswith("has llama.rope.scaling.type yarn, which transformers does not")
    model.model.register_buffer("rope_freqs", torch.ones(8))
    gguf_files.write(model, path, llama__rope__scaling__type="none")
    assert refusal(path).startswith("has rope_freqs.weight, which transformers does not read")


def test_a_file_is_no_head(model, target, tmp_path) -> None:
    path = gguf_files.write(model, tmp_path / "m.gguf")
    with pytest.raises(ModelError, match="is no head but a whole model: load it by load_lm_draft"):
        load_draft(path, target)
