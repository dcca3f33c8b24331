"""The command line, in process and as a process, over the shipped pair on the CPU."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from functools import cache
from importlib.resources import files
from pathlib import Path

import huggingface_hub
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from specattn import backends as library_backends
from specattn.cli import loading
from specattn.cli.app import app
from specattn.cli.compare import compare_plain
from specattn.cli.running import Outcome, Setup
from specattn.cli.text import OrderedText, TextStream, decode
from specattn.config import SpecConfig
from specattn.spec.generate import Generation, Request

ROOT = Path(__file__).parent.parent
PAIR = Path(str(files("specattn"))) / "pair"
PROMPT = "class Point:\n    def __init__(self, x, y):"
OTHERS = ["import os\n", "def read_config(path):", "for name in sorted(names):\n"]
ON_CPU = ["--device", "cpu"]
RUNNER = CliRunner()
load_models = loading.load_models


@cache
def loaded(*args, **kwargs):
    return load_models(*args, **kwargs)


@cache
def tokenizer():
    return AutoTokenizer.from_pretrained(PAIR / "target")


@cache
def plain_model():
    return AutoModelForCausalLM.from_pretrained(
        PAIR / "target", dtype=torch.float32, attn_implementation="sdpa"
    )


@cache
def plain_tokens(prompt: str, count: int) -> list[int]:
    """What transformers' own greedy decoding says."""
    ids = tokenizer()(prompt, return_tensors="pt").input_ids
    out = plain_model().generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return out[0, ids.shape[1] :].tolist()


@pytest.fixture(autouse=True)
def _load_once(monkeypatch):
    monkeypatch.delenv("SPECATTN_BACKEND", raising=False)
    monkeypatch.setattr(loading, "load_models", loaded)


def run(*args: str, stdin: str | bytes | None = None, env: dict | None = None):
    return RUNNER.invoke(app, args, input=stdin, env=env)


def generate(*args: str, count: int = 24, **rest):
    result = run("generate", *ON_CPU, "--max-new-tokens", str(count), *args, **rest)
    assert result.exit_code == 0, result.output
    return result


def generated(*args: str, **rest):
    return json.loads(generate("--json", *args, **rest).stdout)


def test_text_is_what_transformers_generates():
    result = generate(PROMPT)
    want = decode(tokenizer(), plain_tokens(PROMPT, 24))
    assert result.stdout == want + ("" if want.endswith("\n") else "\n")
    assert "accepted/step" in result.stderr
    assert re.search(r"step +torch_native", result.stderr)


def test_json_is_one_object_and_nothing_else():
    result = generate("--json", PROMPT)
    found = json.loads(result.stdout)
    assert found["tokens"] == plain_tokens(PROMPT, 24)
    assert found["text"] == decode(tokenizer(), found["tokens"])
    assert found["num_tokens"] == 24
    assert found["finish_reason"] == "length"
    assert found["backend"] == "torch_native"
    assert found["accepted_per_step"] > 2
    assert found["steps"] < 12
    assert 0 < found["time_to_first_token"] < 24 / found["tokens_per_second"]
    graphs = found["graphs"]
    assert graphs["replayed"] == graphs["fallbacks"] == 0
    assert graphs["unrecorded"] >= found["steps"]
    assert set(graphs["modes"]) == {"step"}
    assert "identical" not in found
    assert result.stderr == ""


@pytest.mark.parametrize(("options", "steps"), [
    (["--steps", "0"], 23),
    (["--draft-tokens", "1"], 23),
    (["--draft-tokens", "4"], None),
    (["--topk", "2", "--steps", "1"], None),
    (["--topk", "4"], None),
    (["--draft-sampling", "--steps", "3"], None),
    (["--topk", "8", "--steps", "3", "--draft-tokens", "20", "--page-size", "16"], None),
])
def test_every_shape_generates_the_same(options, steps):
    found = generated(*options, PROMPT)
    assert found["tokens"] == plain_tokens(PROMPT, 24)
    assert steps is None or found["steps"] == steps


@pytest.mark.parametrize("options", [
    ["--topk", "4", "--steps", "3", "--adaptive"], ["--steps", "4", "--adaptive"],
    ["--seams", "three"],
], ids=" ".join)
def test_steps_of_any_kind_generate_the_same(options):
    found = generated(*options, PROMPT)
    assert found["tokens"] == plain_tokens(PROMPT, 24)
    if "--seams" in options:
        assert set(found["graphs"]["modes"]) == {"draft_decode", "target_verify", "draft_extend"}
    else:
        assert len(found["settings"]) == 3 + ("--topk" in options)
        # one may have been on its way when the text ended
        assert sum(one["steps"] for one in found["settings"]) - found["steps"] in (0, 1)
        assert max(one["accepted_per_step"] for one in found["settings"]) > 2


def test_the_table_says_how_often_each_setting_was_used():
    result = generate("--adaptive", "--compare", "--steps", "3", PROMPT, count=12)
    assert re.search(r"depth +topk +nodes +steps +accepted/step, lately", result.stderr)
    assert re.search(r"^ *3 +1 +4 +\d", result.stderr, re.MULTILINE)
    assert "identical to plain decoding: 12 tokens" in result.stderr


def test_graphs_says_what_capturing_takes():
    options = ["--steps", "2", "--buckets", "1,3", "--sampled", *ON_CPU]
    result = run("graphs", *options, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["device"], found["recorded"], found["nbytes"]) == ("cpu", 0, 0)
    assert [(one["part"], one["bucket"]) for one in found["captures"]] == [
        ("step", 3), ("step", 1), ("step (sampled)", 3), ("step (sampled)", 1),
    ]
    assert 0 < found["seconds"] < found["seconds_with_buffers"]
    table = run("graphs", *options, "--seams", "three").stdout
    assert re.search(r"2 +target_verify +3 +\d+ ms +0.0 MiB +no +[0-9a-f]{12}", table)
    assert "no graphs were captured on cpu" in table


@pytest.mark.parametrize("sizes", ["", "1,x", "0", "2000"])
def test_graphs_refuses_senseless_buckets(sizes):
    result = run("graphs", "--buckets", sizes)
    assert result.exit_code == 2
    assert "--buckets: must be batch sizes 1..1024 with commas" in result.stderr


def test_compare_with_a_batch_of_different_lengths(tmp_path):
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps([PROMPT, *OTHERS]))
    options = "--compare", "--topk", "2", "--batch-size", "3"
    found = generated("--prompts", str(file), *options, count=12)
    assert len(found) == 4
    for prompt, one in zip([PROMPT, *OTHERS], found, strict=True):
        assert one["tokens"] == plain_tokens(prompt, 12)
        assert one["identical"] is True
        assert one["first_difference"] is None
        assert one["speed_up"] > 0
        assert one["plain"]["tokens"] == one["tokens"]
        assert one["plain"]["steps"] == 11


def test_compare_says_so_in_the_table():
    result = generate("--compare", "--topk", "2", PROMPT)
    assert "identical to plain decoding: 24 tokens; " in result.stderr
    assert "x as fast (" in result.stderr


@pytest.mark.parametrize("shape", [[], ["--topk", "4"]], ids=["chain", "tree"])
def test_compare_over_a_float8_cache(shape):
    """Both read what was rounded; a key that rounds the other way can tip a near tie."""
    found = generated("--kv-cache-dtype", "fp8_e4m3", "--compare", *shape, PROMPT)
    assert found["backend"] == "torch_native"
    if not found["identical"]:
        assert found["first_difference"]["plain_margin"] < 0.02, found["first_difference"]


def test_compare_of_sampled_tokens_compares_no_tokens():
    found = generated("--compare", "--temperature", "0.8", PROMPT, count=8)
    assert found["identical"] is None
    assert found["first_difference"] is None
    assert found["speed_up"] > 0
    shown = generate("--compare", "--temperature", "1", PROMPT, count=8)
    assert "the same law" in shown.stderr


def test_a_difference_is_found_with_its_margin():
    models = loaded(None, None, speculative=True, dtype=torch.float32, device=torch.device("cpu"))
    prompts = [tokenizer()(text).input_ids for text in (PROMPT, OTHERS[0])]
    requests = tuple(Request(ids, max_new_tokens=12) for ids in prompts)
    setup = Setup(models, requests, 128, 2, "torch_native", graphs=False, warm_up=False)
    ours = [plain_tokens(PROMPT, 12), plain_tokens(OTHERS[0], 12)]
    changed = [*ours[1][:7], ours[1][7] + 1, *ours[1][8:]]
    outcome = Outcome((Generation(ours[0]), Generation(changed)), 1.0, ())
    found = compare_plain(outcome, setup, SpecConfig(), lambda index, tokens: None)
    assert found.differences[0] is None
    assert found.first is not None
    assert (found.first.request, found.first.position) == (1, 7)
    assert (found.first.token, found.first.plain_token) == (ours[1][7] + 1, ours[1][7])
    with torch.no_grad():
        ids = torch.tensor([prompts[1] + ours[1][:7]])
        reference = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32)
        best, second = reference(ids).logits[0, -1].topk(2).values.tolist()
    assert found.first.plain_margin == pytest.approx(best - second, abs=1e-3)
    cut = Outcome((Generation(ours[0]), Generation(ours[1][:5])), 1.0, ())
    shorter = compare_plain(cut, setup, SpecConfig(), lambda index, tokens: None).first
    assert shorter is not None
    assert (shorter.position, shorter.token, shorter.plain_token) == (5, None, ours[1][5])


def test_prompts_come_from_standard_input():
    want = generate(PROMPT).stdout
    assert generate("-", stdin=PROMPT).stdout == want
    assert generate(stdin=PROMPT + "\n").stdout == want


def test_prompts_come_from_lines_and_are_shown_in_their_order(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("\ufeffdef read_config(path):\r\nimport os\n\n", encoding="utf-8")
    want = [generate(text, count=8).stdout for text in ("def read_config(path):", "import os")]
    for size in ("1", "2"):
        result = generate("--prompts", str(file), "--batch-size", size, count=8)
        assert result.stdout == f"==> 1 <==\n{want[0]}\n==> 2 <==\n{want[1]}"
        assert "all 2" in result.stderr
    (only,) = generated("--prompts", "-", stdin="import os\n", count=8)
    assert only["tokens"] == plain_tokens("import os", 8)


def test_the_same_seed_gives_the_same_tokens_in_any_batch(tmp_path):
    sampled = ["--temperature", "1", "--top-p", "0.9", "--top-k", "50"]

    def drawn(*args: str):
        return generated(*sampled, "--seed", *args, count=14)

    alone = drawn("7", PROMPT)["tokens"]
    assert alone == drawn("7", PROMPT)["tokens"]
    assert alone != drawn("8", PROMPT)["tokens"]
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps([OTHERS[1], PROMPT]))
    assert alone == drawn("7", "--prompts", str(file))[1]["tokens"]


def test_a_stop_string_ends_the_text_before_it():
    whole = generated(PROMPT, count=40)["text"]
    found = generated(PROMPT, "--stop", "self.y", "--stop", "no such text", count=40)
    assert "self.y" in whole
    assert found["text"] == whole[: whole.index("self.y")]
    assert found["finish_reason"] == "stop"
    assert generate(PROMPT, "--stop", "self.y", count=40).stdout == found["text"] + "\n"


def test_the_context_ends_the_text():
    used = len(tokenizer()(PROMPT).input_ids)
    found = generated(PROMPT, "--max-context", str(used + 10), count=40)
    assert found["finish_reason"] == "context"
    assert found["tokens"] == plain_tokens(PROMPT, 40)[: found["num_tokens"]]
    assert 10 <= found["num_tokens"] <= 11


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
        ["--draft-tokens", "300", "p"], "--draft-tokens: must be 1..256, got 300"),
    "steps": (["--steps", "65", "p"], "--steps: must be 0..64, got 65"),
    "negative_steps": (["--steps", "-1", "p"], "--steps: must be 0..64, got -1"),
    "topk": (["--topk", "0", "p"], "--topk: must be 1..64, got 0"),
    "plain_tree": (["--steps", "0", "--topk", "2", "p"], "--steps: 0 (plain decoding) needs"),
    "drawn_tree": (
        ["--draft-sampling", "--topk", "2", "p"], "--draft-sampling: needs --topk 1, got 2",
    ),
    "page_size": (["--page-size", "12", "p"], "--page-size: must be a power of two, got 12"),
    "max_new_tokens": (["--max-new-tokens", "0", "p"], "--max-new-tokens: "),
    "seams": (["--seams", "two", "p"], "--seams: must be auto, one or three, got 'two'"),
    "temperature": (["--temperature", "-1", "p"], "--temperature: must be 0 or more, got -1.0"),
    "top_p": (["--top-p", "0", "p"], "--top-p: must be above 0 and at most 1, got 0.0"),
    "top_k": (["--top-k", "-3", "p"], "--top-k: must be 0 (off) or more, got -3"),
    "stop": (["--stop", "", "p"], "--stop: must not be empty"),
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
    "device_without_data": (["--device", "meta", "p"], "--device: meta is not available here"),
    "dtype": (["--dtype", "int8", "p"], "--dtype: must be auto, float32, float16 or bfloat16"),
    "kv_cache_dtype": (
        ["--kv-cache-dtype", "int4", "p"], "--kv-cache-dtype: must be auto or fp8_e4m3, got 'int4'",
    ),
    "kv_cache_dtype_of_a_backend": (
        ["--backend", "flex", "--kv-cache-dtype", "fp8", "p"],
        "--backend: 'flex' on cpu: kv_dtype must be torch.float32, got torch.float8_e4m3fn",
    ),
    "deterministic_backend": (
        ["--backend", "torch_native", "--deterministic", "p"],
        "--backend: 'torch_native' on cpu: it has no deterministic mode",
    ),
    "missing_target": (["--target", "./absent", "--steps", "0", "p"], "--target: no such folder"),
    "file_as_target": (["--target", __file__, "--steps", "0", "p"], "--target: "),
    "missing_draft": (["--draft", "./absent", "p"], "--draft: no such folder"),
    "target_without_draft": (["--target", str(PAIR / "target"), "p"], "--draft: is needed"),
    "not_on_the_hub": (
        ["--target", "nobody/nothing", "--steps", "0", "p"], "--target: nobody/nothing is neither",
    ),
}


@pytest.mark.parametrize(("args", "line"), REFUSED.values(), ids=REFUSED)
def test_a_mistake_is_one_line_that_names_the_argument(args, line, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    before = [] if "--device" in args else ON_CPU
    result = run("generate", *before, *args, stdin="")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"specattn: error: {line}")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_that_is_not_there():
    result = run("generate", "--device", "cuda", "p")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "specattn: error: --device: cuda is not available: torch sees no CUDA device here\n"
    )


@pytest.mark.parametrize("source", ["stdin", "file", "json"])
def test_prompts_that_are_not_utf8(tmp_path, source):
    file = tmp_path / ("p.json" if source == "json" else "p.txt")
    file.write_bytes(b'["abc\xff"]' if source == "json" else b"abc\xff\n")
    args = ["-"] if source == "stdin" else ["--prompts", str(file)]
    result = run("generate", *args, stdin=b"abc\xff\n")
    assert (result.exit_code, result.stdout) == (2, "")
    argument = "PROMPT" if source == "stdin" else "--prompts"
    offset = 5 if source == "json" else 3
    assert result.stderr == (
        f"specattn: error: {argument}: is not UTF-8 (byte 0xff at offset {offset})\n"
    )


@pytest.mark.parametrize(("text", "line"), [
    ("", "{file} holds no prompts"),
    ("\n\n", "{file} holds no prompts"),
    ("one\n\ntwo\n", "prompt 2 is empty"),
    ('["one", ""]', "prompt 2 is empty"),
    ("one\n" + "x = 1 " * 3000, "prompt 2 has "),
])
def test_files_with_bad_prompts(tmp_path, text, line):
    file = tmp_path / "prompts.txt"
    file.write_text(text)
    result = run("generate", *ON_CPU, "--prompts", str(file))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"specattn: error: --prompts: {line.format(file=file)}")
    assert result.stderr.count("\n") == 1


def test_json_that_is_no_list_of_prompts(tmp_path):
    file = tmp_path / "prompts.json"
    for text in ("{}", "[]", "[1]", "[", '"one"'):
        file.write_text(text)
        result = run("generate", "--prompts", str(file))
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.endswith("prompts.json is not a JSON list of strings\n")


def test_a_draft_of_another_target(tmp_path):
    settings = json.loads((PAIR / "draft" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"vocab_size": 5}))
    weights = (PAIR / "draft" / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights)
    result = run("generate", *ON_CPU, "--draft", str(tmp_path), "p")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"specattn: error: --draft: {tmp_path} ")
    assert "vocabulary of 5" in result.stderr


def test_an_installation_without_the_pair(monkeypatch, tmp_path):
    monkeypatch.setattr(loading, "load_models", load_models)
    monkeypatch.setattr(loading, "files", lambda package: tmp_path)
    result = run("generate", *ON_CPU, "p")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("specattn: error: --target: is needed: this installation")


def test_a_backend_that_cannot_run_here(monkeypatch):
    triton = library_backends.load_backend("triton")
    monkeypatch.setattr(triton, "reasons", staticmethod(lambda config, device: ["no such luck"]))
    result = run("generate", *ON_CPU, "--backend", "triton", "p")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "specattn: error: --backend: triton cannot run on cpu: no such luck\n"
    )
    result = run("generate", *ON_CPU, "p", env={"SPECATTN_BACKEND": "triton"})
    assert result.exit_code == 2
    assert result.stderr.startswith("specattn: error: SPECATTN_BACKEND: triton cannot run on cpu")
    found = {
        (row["backend"], row["device"]): row
        for row in json.loads(run("backends", "--json").stdout)
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
    result = run("generate", *ON_CPU, "--backend", "triton", "--dtype", "bfloat16", "p")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("specattn: error: --backend: 'triton' on cpu: ")
    assert result.stderr.count("\n") == 1


def test_the_environment_names_the_backend():
    found = generated(PROMPT, count=2, env={"SPECATTN_BACKEND": "torch_native"})
    assert found["backend"] == "torch_native"


def test_inspect_shows_tree_mask_and_slots():
    result = run(
        "inspect", *ON_CPU, PROMPT, "--topk", "2", "--steps", "3", "--draft-tokens", "7",
        "--page-size", "4",
    )
    assert result.exit_code == 0, result.output
    tree, mask, slots = result.stdout.split("\n\n")
    used = len(tokenizer()(PROMPT).input_ids)
    first = tokenizer().decode(plain_tokens(PROMPT, 24)[:1])
    assert tree.splitlines()[1] == f"0 {first!r} @{used}  *"
    assert len(tree.splitlines()) == 1 + 7 + 1
    gained = int(re.search(r"accepted (\d) of 6 drafts", tree)[1])
    assert gained == tree.count("*") - 2  # the header's and the root's
    path = re.findall(r"\d+ ('.*?') @.*\*$", tree, re.MULTILINE)
    texts = [repr(tokenizer().decode([t])) for t in plain_tokens(PROMPT, 24)]
    assert path == texts[: gained + 1]
    assert f"bonus {texts[gained + 1]}" in tree
    assert f"  0  0..{used - 1}" in mask
    assert f"row 1: {used} committed in slots 4..{3 + used}" in slots
    assert "verify, nodes 0..6" in slots


def test_inspect_refuses_plain_decoding():
    result = run("inspect", *ON_CPU, PROMPT, "--steps", "0", "--topk", "1")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "specattn: error: --steps: must be at least 1: plain decoding has no tree\n"
    )


def test_version_help_and_unknown_commands():
    assert re.fullmatch(r"specattn \d+\.\d+\.\d+\n", run("--version").stdout)
    for args in ((), ("--help",), ("-h",)):
        result = run(*args)
        assert result.exit_code == 0
        assert all(name in result.stdout for name in ("generate", "backends", "inspect"))
    result = run("genrate")
    assert result.exit_code == 2
    assert result.stderr.startswith("specattn: error: no such command 'genrate'")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("sizes", [[1], [2, 1], [5], [100]])
def test_text_arrives_in_whole_characters(sizes):
    text = "naïve 💥 日本語 x\u0301 " + "\N{FAMILY}" * 3 + " end"
    prompt = tokenizer()("# prompt: é").input_ids
    ids = tokenizer()(text).input_ids
    assert len(ids) > len(text)  # some characters take several tokens
    stream, pieces, at = TextStream(tokenizer(), prompt), [], 0
    while at < len(ids):
        for size in sizes:
            pieces.append(stream.feed(ids[at : at + size]))
            at += size
    pieces.append(stream.finish())
    assert "".join(pieces) == stream.text == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_text_that_ends_inside_a_character():
    ids = tokenizer()("ok 💥").input_ids
    stream = TextStream(tokenizer(), [])
    shown = "".join(stream.feed([token]) for token in ids[:-1])
    assert shown == "ok "
    assert stream.finish() == decode(tokenizer(), ids[:-1])[3:]
    assert stream.text == decode(tokenizer(), ids[:-1])


def test_what_may_begin_a_stop_string_is_held_back():
    ids = tokenizer()("one two three four").input_ids
    stream = TextStream(tokenizer(), [], ["two thirds", "four!", "three"])
    pieces = [stream.feed([token]) for token in ids]
    assert "".join(pieces) == stream.text == "one two "
    assert stream.stopped
    assert stream.finish() == ""
    ended = TextStream(tokenizer(), [], ["four!"])
    shown = "".join(ended.feed([token]) for token in ids)
    assert shown == "one two three "
    assert ended.finish() == "four"
    assert ended.text == "one two three four"


def test_a_batch_is_shown_in_order_as_early_as_possible():
    words = [tokenizer()(text).input_ids for text in ("a b c", "d e", "f")]
    ordered = OrderedText([TextStream(tokenizer(), []) for _ in words])
    assert ordered.feed(1, words[1], last=False) == [(0, "")]
    assert ordered.feed(0, words[0], last=False) == [(0, "a b c")]
    assert ordered.feed(2, words[2], last=True) == [(0, "")]
    assert ordered.feed(0, words[1], last=True) == [(0, "d e"), (1, "d e")]
    assert ordered.feed(1, words[2], last=True) == [(1, "f"), (2, "f")]
    assert ordered.finish() == []


def process(*args: str, **rest) -> subprocess.Popen:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.Popen(
        [sys.executable, "-m", "specattn", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        cwd=ROOT, env=environment | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "0"},
        **rest,
    )


def test_an_interrupt_ends_quietly():
    running = process(
        "generate", *ON_CPU, PROMPT, "--max-new-tokens", "2000", "--ignore-eos",
        # a shell's background jobs, and what they start, ignore interrupts
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert running.stdout is not None
    assert running.stdout.read(8)  # it is generating
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    # Python ends by the signal itself if it was inside an exec of text
    assert running.returncode in (130, -signal.SIGINT)
    assert errors == b""


def test_a_closed_pipe_ends_quietly():
    running = process("generate", *ON_CPU, PROMPT, "--max-new-tokens", "2000", "--ignore-eos")
    assert running.stdout is not None
    assert running.stderr is not None
    assert running.stdout.readline()
    running.stdout.close()
    assert running.stderr.read() == b""
    assert running.wait(timeout=60) == 141


def test_an_argument_that_is_not_utf8():
    running = process("generate", os.fsdecode(b"abc\xff"))
    out, errors = running.communicate(timeout=60)
    assert (running.returncode, out) == (2, b"")
    assert errors == b"specattn: error: PROMPT: is not UTF-8 (byte 0xff at offset 3)\n"


def test_closed_standard_streams():
    def closed(*args: str, close: tuple[int, ...]):
        return process(*args, preexec_fn=lambda: [os.close(fd) for fd in close])

    _, errors = (running := closed("generate", close=(0,))).communicate(timeout=60)
    assert running.returncode == 2
    assert errors.startswith(b"specattn: error: PROMPT: is missing; ")
    _, errors = (running := closed("backends", close=(0, 1))).communicate(timeout=60)
    assert (running.returncode, errors) == (0, b"")
    out, _ = (running := closed("generate", "", close=(2,))).communicate(timeout=60)
    assert (running.returncode, out) == (2, b"")


def test_triton_on_a_cpu_says_that_it_interprets():
    running = process(
        "generate", *ON_CPU, "--backend", "triton", "--steps", "1", "--max-new-tokens", "2",
        "--json", "a",
    )
    out, errors = running.communicate(timeout=280)
    assert running.returncode == 0, errors
    assert json.loads(out)["tokens"] == plain_tokens("a", 2)
    assert errors.count(b"\n") == 1
    assert errors.startswith(b"specattn: warning: ")
    assert b"interpreter" in errors
