"""A mistake is one line on standard error that names the argument, and exit code 2."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import fields, replace
from inspect import signature

import huggingface_hub
import pytest
import torch
import typer

from specattn import Engine, Request, SamplingParams, SpecConfig
from specattn import backends as library_backends
from specattn.cli import loading, running
from specattn.cli.app import app
from specattn.cli.errors import OPTIONS, ArgumentError, named, naming_options
from tests.cli.command import ON_CPU, PAIR, load_models, loaded, refused, run

LONG = "x = 1\n" * 2000
REFUSED = {
    "topk_is_no_number": (["--topk", "x", "p"], "--topk: input should be a valid integer"),
    "unknown_option": (["--topkk", "2", "p"], "--topkk: no such option"),
    "draft_tokens_over_the_tree": (
        ["--topk", "2", "--steps", "2", "--draft-tokens", "8", "p"],
        "--draft-tokens: must be 2..7 with --topk 2 and --steps 2, got 8",
    ),
    "draft_tokens_of_a_chain": (
        ["--steps", "3", "--draft-tokens", "8", "p"],
        "--draft-tokens: must be --steps + 1 = 4 with --topk 1, got 8",
    ),
    "too_many_draft_tokens": (
        ["--draft-tokens", "300", "p"],
        "--draft-tokens: must be 1..256, got 300",
    ),
    "steps": (["--steps", "65", "p"], "--steps: must be 0..64, got 65"),
    "negative_steps": (["--steps", "-1", "p"], "--steps: must be 0..64, got -1"),
    "topk": (["--topk", "0", "p"], "--topk: must be 1..64, got 0"),
    "plain_tree": (["--steps", "0", "--topk", "2", "p"], "--steps: 0 (plain decoding) needs"),
    "drawn_tree": (
        ["--draft-sampling", "--topk", "2", "p"],
        "--draft-sampling: needs --topk 1, got 2",
    ),
    "adaptive_plain": (
        ["--adaptive", "--steps", "0", "p"],
        "--adaptive: needs --steps of at least 1, got plain",
    ),
    "adaptive_root": (["--adaptive", "--draft-tokens", "1", "p"], "--adaptive: needs --steps"),
    "page_size": (["--page-size", "12", "p"], "--page-size: must be a power of two, got 12"),
    "max_new_tokens": (["--max-new-tokens", "0", "p"], "--max-new-tokens: "),
    "cudagraph": (
        ["--cudagraph", "two", "p"],
        "--cudagraph: must be auto, full or piecewise, got 'two'",
    ),
    "temperature": (["--temperature", "-1", "p"], "--temperature: must be 0 or more, got -1.0"),
    "top_p": (["--top-p", "0", "p"], "--top-p: must be above 0 and at most 1, got 0.0"),
    "top_k": (
        ["--top-k", "-3", "p"],
        "--top-k: must be 0 or -1 (off) or more, below 2**31, got -3",
    ),
    "greedy_top_p": (
        ["--top-p", "0.9", "p"],
        "--top-p: needs --temperature above 0, got 0, which is greedy decoding",
    ),
    "greedy_top_k": (["--top-k", "5", "p"], "--top-k: needs --temperature above 0, got 0"),
    "min_p": (["--min-p", "2", "p"], "--min-p: must be 0 (off) to 1, got 2.0"),
    "greedy_min_p": (["--min-p", "0.1", "p"], "--min-p: needs --temperature above 0, got 0"),
    "repetition_penalty": (
        ["--repetition-penalty", "0", "p"],
        "--repetition-penalty: must be above 0, got 0.0",
    ),
    "presence_penalty": (
        ["--presence-penalty", "3", "p"],
        "--presence-penalty: must be -2 to 2, got 3.0",
    ),
    "frequency_penalty": (
        ["--frequency-penalty", "-3", "p"],
        "--frequency-penalty: must be -2 to 2, got -3.0",
    ),
    "logprobs": (["--logprobs", "21", "p"], "--logprobs: must be 0..20, got 21"),
    "no_samples": (["--n", "0", "p"], "--n: "),
    "greedy_samples": (["--n", "2", "p"], "--n: needs --temperature above 0, got 0"),
    "samples": (
        ["--n", "5", "--batch-size", "4", "--temperature", "1", "p"],
        "--n: must be at most --batch-size, 4, got 5",
    ),
    "seed": (
        ["--seed", str(2**63), "--temperature", "1", "p"],
        f"--seed: must fit into 64 bits, got {2**63}",
    ),
    "greedy_seed": (["--seed", "3", "p"], "--seed: needs --temperature above 0, got 0"),
    "bias_of_nothing": (
        ["--logit-bias", "5", "p"],
        "--logit-bias: must be TOKEN=VALUE, the id of a token and a number, got '5'",
    ),
    "bias_of_a_text": (["--logit-bias", "x=1", "p"], "--logit-bias: must be TOKEN=VALUE"),
    "bias_twice": (
        ["--logit-bias", "5=1", "--logit-bias", "5=2", "p"],
        "--logit-bias: must name every token once, got 5 twice",
    ),
    "bias_of_no_token": (
        ["--logit-bias", "3072=1", "p"],
        "--logit-bias: tokens must be 0..3071, got 3072..3072",
    ),
    "bias_of_no_number": (["--logit-bias", "5=nan", "p"], "--logit-bias: every --logit-bias must"),
    "empty_draft": (["--draft", "", "p"], "--draft: must not be empty"),
    "empty_target": (["--target", "", "p"], "--target: must not be empty"),
    "empty_draft_of_nothing": (
        ["--draft", "", "--draft-kind", "none", "p"],
        "--draft: must not be empty",
    ),
    "bad_words": (["--bad-words", "", "p"], "--bad-words: must not be empty"),
    "long_bad_words": (
        ["--bad-words", "x y " * 20, "p"],
        "--bad-words: must have 1 to 16 tokens each",
    ),
    "min_new_tokens": (
        ["--min-new-tokens", "9", "--max-new-tokens", "8", "p"],
        "--min-new-tokens: must be 0..8, got 9",
    ),
    "stop_token": (["--stop-token-id", "3072", "p"], "--stop-token-id: must be 0..3071, got 3072"),
    "negative_stop_token": (["--stop-token-id", "-1", "p"], "--stop-token-id: must be 0..3071"),
    "stop_token_is_no_number": (["--stop-token-id", "x", "p"], "--stop-token-id: input should be"),
    "many_ends": (
        ["--min-new-tokens", "2", *(f"--stop-token-id={at}" for at in range(66)), "p"],
        "--min-new-tokens: tokens that end a request with --min-new-tokens must be at most 64",
    ),
    "greedy_drafts": (
        ["--draft-sampling", "p"],
        "--draft-sampling: needs --temperature above 0, got 0",
    ),
    "drawn_drafts_of_plain_decoding": (
        ["--draft-sampling", "--temperature", "1", "--steps", "0", "p"],
        "--draft-sampling: needs --steps of at least 1, got plain decoding",
    ),
    "stop": (["--stop", "", "p"], "--stop: must not be empty"),
    "system_of_no_chat": (["--system", "s", "p"], "--system: needs --chat: a text to continue"),
    "system": (["--chat", "--system", "\udcff", "p"], "--system: is not UTF-8 (byte 0xff at"),
    "chat": (["--chat", "p"], "--chat: the target's tokenizer has no chat template"),
    "schema": (["--json-schema", "{", "p"], "--json-schema: is not JSON: Expecting property"),
    "schema_file": (["--json-schema", "/no/such", "p"], "--json-schema: cannot read /no/such: No"),
    "no_schema": (
        ["--json-schema", "", "p"],
        "--json-schema: must be a file or a JSON object, got ''",
    ),
    "schema_of_a_list": (
        ["--json-schema", "[1]", "p"],
        "--json-schema: must be a JSON object, got",
    ),
    "schema_of_no_end": (
        ["--json-schema", "{}", "--ignore-eos", "p"],
        "--json-schema: cannot be combined with --ignore-eos: what matches has an end",
    ),
    "regex": (["--regex", "", "p"], "--regex: must not be empty"),
    "regex_of_no_end": (["--regex", "a", "--ignore-eos", "p"], "--regex: cannot be combined with"),
    "regex_and_schema": (
        ["--regex", "a", "--json-schema", "{}", "p"],
        "--regex: cannot be combined with --json-schema",
    ),
    "two_prompts": (["p", "q"], "got unexpected extra argument"),
    "prompt_and_file": (["--prompts", "f", "p"], "--prompts: cannot be combined"),
    "empty_prompt": ([""], "PROMPT: the prompt is empty"),
    "empty_input": ([], "PROMPT: the prompt is empty"),
    "missing_file": (["--prompts", "/no/such"], "--prompts: cannot read /no/such: No such file"),
    "folder": (["--prompts", "/"], "--prompts: cannot read /: Is a directory"),
    "long_prompt": ([LONG], "PROMPT: the prompt has "),
    "long_for_the_context": (["--max-context", "8", LONG[:80]], "PROMPT: the prompt has "),
    "short_context": (["--max-context", "4", "p"], "--max-context: must be at least 6 "),
    "long_context": (["--max-context", "5000", "p"], "--max-context: must be at most 2048"),
    "backend": (["--backend", "cuda", "p"], "--backend: must be one of auto, triton"),
    "device": (["--device", "tpu9", "p"], "--device: must be auto, cpu, cuda"),
    "device_of_an_index": (
        ["--device", "cpu:7", "p"],
        "--device: must be cpu, without an index, got 'cpu:7'",
    ),
    "device_without_data": (["--device", "meta", "p"], "--device: meta is not available here"),
    "dtype": (
        ["--dtype", "int8", "p"],
        "--dtype: must be auto, float32 (fp32), float16 (fp16) or bfloat16 (bf16), got 'int8'",
    ),
    "kv_cache_dtype": (
        ["--kv-cache-dtype", "int4", "p"],
        "--kv-cache-dtype: must be auto or fp8_e4m3, got 'int4'",
    ),
    "kv_cache_dtype_of_a_backend": (
        ["--backend", "flex", "--kv-cache-dtype", "fp8", "p"],
        "--kv-cache-dtype: must be auto with --backend flex, which stores keys and values as",
    ),
    "deterministic_backend": (
        ["--backend", "torch_native", "--deterministic", "p"],
        "--deterministic: --backend torch_native has no such mode on cpu, and --backend triton",
    ),
    "deterministic": (
        ["--deterministic", "p"],
        "--deterministic: --backend auto (torch_native) has no such mode on cpu",
    ),
    "ranks": (
        ["--draft-kind", "dflash", "--tree", "best_first", "--ranks", "0", "p"],
        "--ranks: must be 1..255, got 0",
    ),
    "few_ranks": (
        ["--tree", "best_first", "--ranks", "1", "--steps", "3", "--draft-tokens", "9", "p"],
        "--draft-tokens: must be 2..4 with --ranks 1 and --steps 3, got 9",
    ),
    "kind": (
        ["--draft-kind", "medusa", "p"],
        "--draft-kind: must be eagle3, dflash, model, lookup or none, got 'medusa'",
    ),
    "steps_of_no_draft": (
        ["--draft-kind", "none", "--steps", "2", "p"],
        "--steps: must be 0 with --draft-kind none, got 2",
    ),
    "draft_of_text": (
        ["--draft-kind", "lookup", "--draft", "x", "p"],
        "--draft: must not be given: --draft-kind lookup has no model",
    ),
    "tree": (["--tree", "widest", "p"], "--tree: must be beam or best_first, got 'widest'"),
    "ranks_of_beams": (["--ranks", "4", "p"], "--ranks: needs --tree best_first"),
    "tree_of_branches": (
        ["--tree", "best_first", "--topk", "2", "p"],
        "--tree: best_first needs --topk 1, got 2",
    ),
    "tree_of_plain_decoding": (
        ["--tree", "best_first", "--draft-kind", "none", "p"],
        "--tree: best_first needs --steps of at least 1, got 0",
    ),
    "tree_of_text": (
        ["--tree", "best_first", "--draft-kind", "lookup", "p"],
        "--tree best_first: needs drafts with probabilities, which --draft-kind lookup has not",
    ),
    "drawn_text": (
        ["--draft-sampling", "--temperature", "1", "--lookup-first", "p"],
        "--draft-sampling: needs drafts with probabilities, which --lookup-first has not",
    ),
    "drawn_text_alone": (
        ["--draft-sampling", "--temperature", "1", "--draft-kind", "lookup", "p"],
        "--draft-sampling: needs drafts with probabilities, which --draft-kind lookup has not",
    ),
    "text_before_text": (
        ["--lookup-first", "--draft-kind", "lookup", "p"],
        "--lookup-first: needs a draft behind the text, which --draft-kind lookup has not",
    ),
    "text_before_nothing": (
        ["--lookup-first", "--steps", "0", "p"],
        "--lookup-first: needs --steps of at least 1, got plain decoding, which has no drafts",
    ),
    "kind_of_plain_decoding": (
        ["--draft-kind", "lookup", "--steps", "0", "p"],
        "--draft-kind lookup: needs --steps of at least 1, got plain decoding",
    ),
    "draft_of_plain_decoding": (
        ["--draft", "x", "--steps", "0", "p"],
        "--draft: must not be given: plain decoding has no model",
    ),
    "no_whole_model": (
        ["--draft-kind", "model", "p"],
        "--draft: is needed with --draft-kind model",
    ),
    "whole_model_as_a_head": (
        ["--draft", str(PAIR / "target"), "p"],
        f"--draft: {PAIR / 'target'} is no EAGLE head: it has no tensor fc.weight in "
        "model.safetensors, as a whole model or a Medusa head; give a head that was trained for "
        "this target, and load a whole model by --draft-kind model",
    ),
    "head_of_another_kind": (
        ["--draft", str(PAIR / "dflash"), "p"],
        f"--draft: {PAIR / 'dflash'} is a DFlash head, no EAGLE head: load it by --draft-kind dfl",
    ),
    "missing_target": (["--target", "./absent", "--steps", "0", "p"], "--target: no such folder"),
    "file_as_target": (["--target", __file__, "--steps", "0", "p"], "--target: "),
    "missing_draft": (["--draft", "./absent", "p"], "--draft: no such folder"),
    "missing_gguf": (["--target", "/no.gguf", "--steps", "0", "p"], "--target: no such file: /no"),
    "target_without_draft": (
        ["--target", str(PAIR / "target"), "p"],
        "--draft: is needed with --target (or --draft-kind lookup, or none)",
    ),
    "not_on_the_hub": (
        ["--target", "nobody/nothing", "--steps", "0", "p"],
        "--target: nobody/nothing is neither",
    ),
}


@pytest.mark.parametrize(("args", "line"), REFUSED.values(), ids=REFUSED)
def test_a_mistake_is_one_line_that_names_the_argument(args, line, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    before = [] if "--device" in args else ON_CPU
    assert refused("generate", *before, *args, stdin="").startswith(line)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_that_is_not_there():
    line = "--device: cuda is not available: torch sees no CUDA device here"
    assert refused("generate", "--device", "cuda", "p") == line


def test_the_device_that_is_asked_for_becomes_the_current_one(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: zeros(*shape))
    assert [loading.pick_device(name) for name in ("cuda:1", "cuda", "cpu")] == [
        torch.device("cuda:1"),
        torch.device("cuda"),
        torch.device("cpu"),
    ]
    assert chosen == [torch.device("cuda:1")]


@pytest.mark.parametrize("source", ["stdin", "file", "json"])
def test_prompts_that_are_not_utf8(tmp_path, source):
    file = tmp_path / ("p.json" if source == "json" else "p.txt")
    file.write_bytes(b'["abc\xff"]' if source == "json" else b"abc\xff\n")
    args = ["-"] if source == "stdin" else ["--prompts", str(file)]
    argument = "PROMPT" if source == "stdin" else "--prompts"
    line = f"{argument}: is not UTF-8 (byte 0xff at offset {5 if source == 'json' else 3})"
    assert refused("generate", *args, stdin=b"abc\xff\n") == line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "{file} holds no prompts"),
        ("\n\n", "{file} holds no prompts"),
        ("one\n\ntwo\n", "prompt 2 is empty"),
        ('["one", ""]', "prompt 2 is empty"),
        (
            r'["\ud83d\ude00", "x\ud83d"]',
            r"prompt 2 is no text: it has half of a character, '\ud83d'",
        ),
        ("[" * 100_000 + "\n\nx", "prompt 2 is empty"),
        ("one\n" + "x = 1 " * 3000, "prompt 2 has "),
    ],
)
def test_files_with_bad_prompts(tmp_path, text, line):
    file = tmp_path / "prompts.txt"
    file.write_text(text)
    told = refused("generate", *ON_CPU, "--prompts", str(file))
    assert told.startswith(f"--prompts: {line.format(file=file)}")


def test_json_that_is_no_list_of_prompts(tmp_path):
    file = tmp_path / "prompts.json"
    for text, message in (
        ("{}", "is not a JSON list of strings"),
        ("[1]", "is not a JSON list of strings"),
        ('"one"', "is not a JSON list of strings"),
        ("[]", "holds no prompts"),
        ("[", "is not JSON: Expecting value at character 1"),
        ("", "is not JSON: Expecting value at character 0"),
        ("[" * 100_000, "is not JSON: maximum recursion depth exceeded"),
    ):
        file.write_text(text)
        told = refused("generate", "--prompts", str(file))
        assert told.startswith(f"--prompts: {file} {message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "{file} holds no prompts"),
        ("\n \n", "{file} holds no prompts"),
        (
            '"one"\n\nimport os\n',
            "line 3 of {file} is not JSON: Expecting value at character 0",
        ),
        ("[]", 'line 1 of {file} is neither a string nor an object with a "prompt" string'),
        ('{"text": "x"}', "line 1 of {file} is neither"),
        ('{"prompt": ["x"]}', "line 1 of {file} is neither"),
        ('"one"\n{"prompt": ""}', "prompt 2 is empty"),
    ],
)
def test_json_lines_that_are_no_prompts(tmp_path, text, message):
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    told = refused("generate", "--prompts", str(file))
    assert told.startswith(f"--prompts: {message.format(file=file)}")


OTHER_COMMANDS = {
    "target_of_inspect": (
        ["inspect", "--target", "/nope", "p"],
        "--draft: is needed with --target",
    ),
    "kind_of_inspect": (
        ["inspect", "--draft-kind", "lookup", "p"],
        "--draft-kind: must be eagle3 or model here, got 'lookup'",
    ),
    "drawn_drafts_of_graphs": (
        ["graphs", "--draft-sampling"],
        "--draft-sampling: needs --sampled: greedy steps draw no drafts",
    ),
    "drawn_drafts_of_plain_graphs": (
        ["graphs", "--draft-sampling", "--steps", "0"],
        "--draft-sampling: needs --steps of at least 1, got plain decoding, which has no drafts",
    ),
    "folder_of_a_list": (
        ["bench", "--list", "--out", "/proc/nope"],
        "--out: cannot be combined with --list, which times nothing",
    ),
    "rounds_of_a_report": (
        ["bench", "--report", "--rounds", "7"],
        "--rounds: cannot be combined with --report, which times nothing",
    ),
    "part_of_all": (
        ["bench", "--full", "--part", "quick"],
        "--part: cannot be combined with --full, which has all parts",
    ),
}


@pytest.mark.parametrize(("args", "line"), OTHER_COMMANDS.values(), ids=OTHER_COMMANDS)
def test_other_commands_refuse_what_means_nothing(args, line):
    assert refused(*args) == line


def test_messages_name_the_options_of_fields():
    """Wherever a command has an option for it, no field of the library is named."""
    commands = typer.main.get_command(app).commands.values()
    known = {name for command in commands for param in command.params for name in param.opts}
    names = {field.name for one in (SpecConfig, SamplingParams, Request) for field in fields(one)}
    names |= signature(Engine).parameters.keys() - {"target", "draft"}  # the models themselves
    for name in names:
        if (option := f"--{name.replace('_', '-')}") in known:
            assert OPTIONS[name] == option
    assert {option.split()[0] for option in OPTIONS.values()} <= known
    for name, option in OPTIONS.items():
        with pytest.raises(ArgumentError) as caught, naming_options():
            raise ValueError(f"{name} must be another one, got 3")
        assert f"{caught.value.argument} {caught.value}" == f"{option} must be another one, got 3"


def test_what_an_engine_refuses_is_named_too(monkeypatch):
    def refusing(*_, **__):
        raise ValueError("a backend that plans on the host needs cudagraph='piecewise'")

    monkeypatch.setattr(running, "Engine", refusing)
    line = "--cudagraph: a backend that plans on the host needs --cudagraph piecewise"
    assert refused("generate", *ON_CPU, "p") == line


def test_paths_and_words_are_no_fields():
    text = "/models/topk/a-seed has no such tree, and topk.bin in its backend is not deterministic"
    assert named(text) == text
    with pytest.raises(ValueError, match="nothing of ours"), naming_options():
        raise ValueError("nothing of ours")


def test_a_draft_of_another_target(tmp_path):
    settings = json.loads((PAIR / "draft" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"vocab_size": 5}))
    weights = (PAIR / "draft" / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights)
    told = refused("generate", *ON_CPU, "--draft", str(tmp_path), "p")
    assert told.startswith(f"--draft: {tmp_path} ")
    assert "has vocab_size 5 in config.json; the target has 3072, and its" in told


@pytest.mark.parametrize("command", ["generate", "inspect"])
def test_a_tokenizer_of_more_tokens_than_the_target(monkeypatch, command):
    """As after adding tokens without resizing the model."""
    place, options = torch.device("cpu"), {"speculative": True, "dtype": torch.float32}
    models = loaded(None, None, device=place, **options)
    tokenizer = copy.deepcopy(models.tokenizer)
    tokenizer.add_tokens("<new>")
    models = replace(models, tokenizer=tokenizer)
    monkeypatch.setattr(loading, "load_models", lambda *args, **kwargs: models)
    size = models.target.vocab_size
    assert refused(command, *ON_CPU, "x<new>") == (
        f"PROMPT: the prompt has the token {size} by the target's tokenizer; "
        f"the target has {size} tokens"
    )


@pytest.mark.parametrize(("text", "kind"), [("[1]", "list"), ("true", "bool"), ('"{}"', "str")])
def test_a_schema_that_is_no_object(tmp_path, text, kind):
    file = tmp_path / "schema.json"
    file.write_text(text)
    line = f"--json-schema: must be a JSON object, got {kind}"
    assert refused("generate", "--json-schema", str(file), "p") == line


def test_a_schema_needs_an_extra(monkeypatch):
    monkeypatch.setattr("specattn.cli.grammar.find_spec", lambda name: None)
    for option, given in (("--json-schema", "{}"), ("--regex", "a+")):
        line = f"{option}: needs xgrammar (pip install 'specattn[grammar]')"
        assert refused("generate", option, given, "p") == line


def test_an_installation_without_the_pair(monkeypatch, tmp_path):
    monkeypatch.setattr(loading, "load_models", load_models)
    monkeypatch.setattr("specattn.models.hub.PAIR", tmp_path)
    told = refused("generate", *ON_CPU, "p")
    assert told.startswith("--target: is needed: this installation")


def test_a_backend_that_cannot_run_here(monkeypatch):
    triton = library_backends.load_backend("triton")
    monkeypatch.setattr(triton, "reasons", staticmethod(lambda config, device: ["no such luck"]))
    line = "triton cannot run on cpu: no such luck"
    assert refused("generate", *ON_CPU, "--backend", "triton", "p") == f"--backend: {line}"
    told = refused("generate", *ON_CPU, "p", env={"SPECATTN_BACKEND": "triton"})
    assert told == f"SPECATTN_BACKEND: {line}"
    found = {
        (row["backend"], row["device"]): row for row in json.loads(run("backends", "--json").stdout)
    }
    assert found["triton", "cpu"]["available"] is False
    assert found["triton", "cpu"]["reasons"] == ["no such luck"]
    assert found["torch_native", "cpu"]["available"] is True
    table = run("backends").stdout.splitlines()
    (line,) = [line for line in table if line.startswith("triton ") and " cpu " in line]
    assert re.search(r"cpu +no +no +no such luck", line)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="would switch this process to Triton's interpreter"
)
def test_a_backend_that_cannot_serve_the_models():
    told = refused("generate", *ON_CPU, "--backend", "triton", "--dtype", "bfloat16", "p")
    assert told.startswith("--backend: 'triton' on cpu: ")
