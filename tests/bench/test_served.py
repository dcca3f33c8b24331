"""Servers beside each other under the same clients, without SGLang and without a GPU."""

from __future__ import annotations

import asyncio
import gzip
import json
import runpy
from functools import partial
from threading import Thread
from time import perf_counter, sleep

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen2Config

pytest.importorskip("starlette", reason="the extra `dev` is not installed")
uvicorn = pytest.importorskip("uvicorn", reason="the extra `dev` is not installed")

from bench.engines import own_server, served, stream_client  # noqa: E402
from bench.engines.cells import OWN, SETTINGS  # noqa: E402
from bench.engines.sglang_side import FORCED  # noqa: E402
from bench.load import cells  # noqa: E402
from bench.shipped import PAIR, pair  # noqa: E402
from bench.step_world import Shape  # noqa: E402
from specattn import AsyncEngine, Engine, Request, SpecConfig  # noqa: E402
from specattn.models import HFTarget  # noqa: E402
from tests.cli.command import OTHERS, PROMPT, plain_tokens, tokenizer  # noqa: E402
from tests.models import gguf_files  # noqa: E402

NEW = 12
TEXTS = [PROMPT, *OTHERS]
SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "vocab_size": 97,
    "intermediate_size": 48,
}
# seconds that a run may take, however busy the machine is
HOURS = 1e4


@pytest.fixture
def port():
    """A port of the example server over the shipped pair, of two rows."""
    config = SpecConfig(3, 2, 6, max_context_len=64, max_num_reqs=2)
    engine = Engine(*pair("cpu", torch.float32), config, tokenizer=tokenizer())
    example = runpy.run_path(str(own_server.EXAMPLE))
    with AsyncEngine(engine) as owner:
        app = example["serve"](owner, tokenizer(), "pair")
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
        thread = Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            sleep(0.01)
        yield server.servers[0].sockets[0].getsockname()[1]
        server.should_exit = True
        thread.join()


def asked(port: int, requests: list[Request], clients: int, **more):
    return asyncio.run(stream_client.load(port, requests, clients, more))


def test_clients_are_told_what_plain_decoding_writes_and_when(port):
    requests = [Request(tokenizer().encode(text), NEW) for text in TEXTS]
    begin = perf_counter()
    answers = asked(port, requests, 2)
    assert [answer.request for answer in answers] == requests
    for answer, text in zip(answers, TEXTS, strict=True):
        tokens = plain_tokens(text, NEW)
        assert answer.text == tokenizer().decode(tokens)
        assert sum(count for _, count in answer.chunks) == len(tokens)
        assert len(answer.chunks) > 2, "it streams"
        at = [begin, answer.submitted, *(now for now, _ in answer.chunks), perf_counter()]
        assert at == sorted(at)
    first, second, *others = answers
    for answer in others:
        assert answer.submitted >= min(one.chunks[-1][0] for one in (first, second))


def test_what_a_server_refuses_is_said(port):
    with pytest.raises(RuntimeError, match="has 80 tokens, the context holds 64"):
        asked(port, [Request([1] * 80, NEW)], 1)
    with pytest.raises(RuntimeError, match="ignore_eos"):
        asked(port, [Request([1], NEW)], 1, ignore_eos=True)


def test_an_error_within_a_stream_is_one():
    answer = stream_client.Answer(Request([1]), 0.0)
    with pytest.raises(RuntimeError, match="out of memory"):
        answer.take({"error": {"message": "out of memory"}}, 1.0)


def test_tokens_are_counted_by_the_streams_own_counts():
    """Texts may be held back, and parts without new tokens come."""
    answer = stream_client.Answer(Request([1]), 0.0)
    for at, (text, total) in enumerate((("", 0), ("", 2), ("ab", 2), ("c", 5))):
        answer.take({"choices": [{"text": text}], "usage": {"completion_tokens": total}}, at)
    answer.take({"choices": [], "usage": {"completion_tokens": 6}}, 9)
    assert (answer.text, answer.chunks) == ("abc", [(1, 2), (3, 3), (9, 1)])


def test_a_gguf_file_becomes_a_folder_once(tmp_path):
    pytest.importorskip("gguf", reason="the extra `gguf` is not installed")
    model = gguf_files.tiny()
    path = gguf_files.write(model, tmp_path / "m.gguf")
    folder = served.as_folder(path, tmp_path / "out")
    assert folder == tmp_path / "out" / "m"
    read = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    for (name, weight), other in zip(model.named_parameters(), read.parameters(), strict=True):
        assert torch.equal(weight.bfloat16(), other), name
    prompts = [tokens([{"role": "user", "content": "x"}]) for tokens in map(chat, (path, folder))]
    assert prompts[0] == prompts[1]
    written = (folder / "config.json").stat().st_mtime_ns
    assert served.as_folder(path, tmp_path / "out") == folder
    assert (folder / "config.json").stat().st_mtime_ns == written
    assert served.as_folder(folder, tmp_path) == folder


def chat(path):
    tokenizer = HFTarget.from_pretrained(str(path)).tokenizer
    return partial(tokenizer.apply_chat_template, add_generation_prompt=True, return_dict=False)


def options(out, *more: str):
    return served.arguments(["--out", str(out), *more])


def published(folder, *more: str) -> list[str]:
    """The command line of the shipped pair, with problems of its own."""
    path = folder / "problems.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps({"prompt": text}) + "\n" for text in TEXTS)
    words = ["--target", PAIR / "target", "--head", PAIR / "draft", "--problems", path]
    return [*map(str, words), "--new", str(NEW), "--dtype", "float32", *more]


def told(command: list[str]) -> dict[str, list[str]]:
    """Options of a command by their names."""
    found: dict[str, list[str]] = {}
    for word in command[3:]:
        if word.startswith("--"):
            values = found.setdefault(word, [])
        else:
            values.append(word)
    return found


def test_servers_of_sglang_differ_in_their_drafts_alone(tmp_path, monkeypatch):
    monkeypatch.setenv(FORCED, "3")
    given = options(tmp_path, *published(tmp_path), "--clients", "1", "6")
    work = served.work_of(given)
    assert [one.prompt for one in work.requests] == [tuple(tokenizer().encode(t)) for t in TEXTS]
    commands = {
        name: told(served.command_of(side, work, given)[0])
        for name, side in served.SIDES.items()
        if side.backend != OWN
    }
    plain, ports = commands["plain"], {"--port", "--nccl-port"}
    assert plain["--cuda-graph-bs-decode"] == ["1", "2", "4", "6"]
    assert plain["--load-format"] == ["auto"]
    for missing in ("--disable-radix-cache", "--skip-tokenizer-init", "--speculative-algorithm"):
        assert missing not in plain
    for name, command in commands.items():
        differing = {one for one in command if command[one] != plain.get(one)} - ports
        assert all(one.startswith("--speculative") for one in differing - {"--max-total-tokens"})
        assert set(plain) <= set(command)
        assert FORCED not in served.environment_of(served.SIDES[name], work)
    assert len({command["--port"][0] for command in commands.values()}) == len(commands)
    assert commands["specattn"]["--speculative-algorithm"] == ["SPECATTN"]
    assert commands["eagle3"]["--speculative-algorithm"] == ["EAGLE3"]
    for one in ("num-steps", "eagle-topk", "num-draft-tokens"):
        name = f"--speculative-{one}"
        assert commands["specattn"][name] == commands["eagle3"][name]


@pytest.fixture
def tiny(monkeypatch):
    target = Qwen2Config(**SIZES, num_hidden_layers=6, tie_word_embeddings=True)
    shape = Shape("tiny", target, LlamaConfig(**SIZES, num_hidden_layers=1), 61)
    for module in (served, cells):
        monkeypatch.setattr(module, "shape_of", lambda model: shape)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("side", ["engine", "engine-plain"])
def test_random_weights_gain_what_they_are_told(tmp_path, side):
    """As the command that `served` writes has it; every id is a word."""
    given = options(tmp_path, "--random", "--clients", "2", "--dtype", "float32")
    work = served.work_of(given)
    kept = cells.CELLS["1.5b-32"]
    assert len(work.requests) == served.FEWEST
    assert all(kept.prompts[0] <= len(one.prompt) <= kept.prompts[1] for one in work.requests)
    words = AutoTokenizer.from_pretrained(work.tokenizer)
    assert words.decode([5, 60, 7]) == "5 60 7"
    assert words.encode("The capital of France")
    command, _ = served.command_of(served.SIDES[side], work, given)
    engine = own_server.engine_of(own_server.arguments(command[3:]), words)
    *_, gained = SETTINGS[served.SIDES[side].setting]
    answer = engine.generate([Request([1, 2, 3], 40)])[0]
    assert len(answer.tokens) == 40
    assert answer.text.split() == [str(token) for token in answer.tokens]
    assert max(answer.accept_lens) == gained
    for name in ("eagle3", "plain"):
        environment = served.environment_of(served.SIDES[name], work)
        assert environment.get(FORCED) == {"eagle3": "4", "plain": None}[name]
    told_of_sglang = told(served.command_of(served.SIDES["eagle3"], work, given)[0])
    assert told_of_sglang["--load-format"] == ["dummy"]
    config = json.loads((work.models[0] / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"]


def test_what_steps_gained_is_read_from_sglangs_log(tmp_path):
    log = tmp_path / "log"
    line = (
        "[2026-01-01 00:00:00] Decode batch, #running-req: {}, #token: 41, token usage: 0.10, "
        "accept len: {}, accept rate: 0.2, cuda graph: True, gen throughput (token/s): 99.0, "
        "#queue-req: 0\n"
    )
    log.write_text(line.format(9, 9.0))
    server = served.Server("eagle3", 1, log)
    server.look()
    assert server.accepted() is None
    with log.open("a") as file:
        file.write(line.format(3, 2.0) + line.format(1, 4.0))
    assert server.accepted() == pytest.approx(2.5)


def fake_plain(monkeypatch) -> None:
    """Stand in for SGLang's plain decoding by our own."""
    monkeypatch.setitem(served.SIDES, "plain", served.Side(OWN, "plain", "plain"))


@pytest.mark.slow
def test_the_command_measures_what_its_record_lacks(tmp_path, monkeypatch, capsys):
    fake_plain(monkeypatch)
    monkeypatch.setenv("PYTHONPATH", str(own_server.EXAMPLE.parents[2]))
    words = [*published(tmp_path), "--out", str(tmp_path), "--seconds", str(HOURS)]
    words += ["--together", "2", "--sides", "plain", "engine", "--commit", "abc"]
    served.main([*words, "--clients", "3"])
    lines = [json.loads(line) for line in (tmp_path / "served.jsonl").read_text().splitlines()]
    assert [(line["side"], line["clients"]) for line in lines] == [("plain", 3), ("engine", 3)]
    plain, engine = lines
    assert plain["accepted_per_step"] == 1.0
    assert engine["accepted_per_step"] > 1.5
    assert plain["tokens"] == engine["tokens"] == len(TEXTS) * NEW
    assert (engine["texts"], engine["equal_to_plain"]) == (len(TEXTS), 1.0)
    assert engine["machine"]["commit"] == "abc"
    # what is there is not measured again
    monkeypatch.setattr(served, "started", None)
    served.main([*words, "--clients", "3"])
    assert "`AsyncEngine`, tree" in capsys.readouterr().out


def test_texts_in_float32_have_to_be_those_of_plain_decoding(tmp_path, monkeypatch, capsys):
    texts = {"plain": ["a", "b", "c", "d"], "specattn": ["a", "b", "c", "d"]}
    texts["engine"] = ["a", "b", "c", "e"]
    line = dict.fromkeys(served.COLUMNS, 2.0) | {"texts": 4, "equal_to_plain": None}
    monkeypatch.setattr(
        served,
        "started",
        lambda names, *_: {name: (served.Server(name, 1, None), 1.0) for name in names},
    )
    monkeypatch.setattr(served, "load", lambda server, *_: (line.copy(), texts[server.name]))
    words = [*published(tmp_path), "--out", str(tmp_path), "--clients", "2", "--sides", *texts]
    with pytest.raises(SystemExit, match="lack of time: engine"):
        served.main(words)
    found = [json.loads(line) for line in (tmp_path / "served.jsonl").read_text().splitlines()]
    assert [one["equal_to_plain"] for one in found] == [1.0, 1.0, 0.75]
    assert "engine: texts in float32 are not plain decoding's" in capsys.readouterr().err
    (tmp_path / "served.jsonl").unlink()
    served.main([*words, "--dtype", "bfloat16"])
    assert "| 75% |" in capsys.readouterr().out


def test_nothing_starts_without_time_and_a_server_that_fails_is_named(
    tmp_path, monkeypatch, capsys
):
    begun = []
    monkeypatch.setattr(served, "started", lambda names, *_: begun.append(names) or {})
    words = [*published(tmp_path), "--out", str(tmp_path)]
    with pytest.raises(SystemExit, match="plain, engine"):
        served.main([*words, "--sides", "plain", "engine", "--seconds", "5"])
    assert not begun
    with pytest.raises(SystemExit, match="plain, engine"):
        served.main([*words, "--sides", "plain", "engine"])
    assert begun == [["plain"], ["engine"]]
    monkeypatch.undo()
    monkeypatch.setattr(served, "command_of", lambda *_: (["false"], 1))
    with pytest.raises(SystemExit, match="time: plain"):
        served.main([*words, "--sides", "plain"])
    assert "plain did not start" in capsys.readouterr().err


def test_a_load_that_takes_too_long_is_left(port):
    server = served.Server("engine", port, None)
    work = served.Work("pair", (), PAIR, [Request([1], 40)], forced=False)
    with pytest.raises(TimeoutError):
        served.load(server, work, 1, 0.0)


def test_a_page_gets_the_table(tmp_path, capsys):
    shared = {"model": "m", "dtype": "bfloat16", "machine": {"device": "a card", "sglang": "1"}}
    shared |= dict.fromkeys(served.COLUMNS, 2.0)
    lines = [
        shared | {"side": "engine", "clients": 8, "tokens_per_s": 3000.0},
        shared | {"side": "plain", "clients": 8, "tokens_per_s": 1500.0, "equal_to_plain": 1.0},
        shared | {"side": "engine", "clients": 1, "equal_to_plain": None},
    ]
    record, page = tmp_path / "served.jsonl", tmp_path / "page.md"
    record.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page.write_text("head\n<!-- results: other -->\nx\n<!-- end -->\n")
    page.write_text(page.read_text() + "<!-- results: served -->\n<!-- end -->\ntail\n")
    served.main(["--report", str(record), "--page", str(page)])
    text = page.read_text()
    assert text.startswith("head\n<!-- results: other -->\nx\n<!-- end -->\n")
    assert text.endswith("<!-- end -->\ntail\n")
    assert "m in bfloat16. a card: sglang 1." in text
    rows = [line.split(" | ")[:4] for line in text.splitlines() if line.startswith("|")][2:]
    assert rows == [
        ["| 1", "`AsyncEngine`, tree", "2", "2.00x"],
        ["| 8", "SGLang, plain", "1,500", "1.00x"],
        ["| 8", "`AsyncEngine`, tree", "3,000", "2.00x"],
    ]
    served.main(["--report", str(record), "--page", str(page)])
    assert page.read_text() == text, "it is the same again"
    assert "`AsyncEngine`, tree" in capsys.readouterr().out


def test_what_the_command_needs_is_asked_for(capsys):
    for words, message in (
        (["--random"], "--out is needed"),
        (["--out", "x", "--target", "y"], "--head and --problems are needed, or --random"),
    ):
        with pytest.raises(SystemExit):
            served.main(words)
        assert message in capsys.readouterr().err
