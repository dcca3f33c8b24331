"""An engine under load: who is in flight, what clients are told, and texts that are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config

from bench.load import __main__ as command
from bench.load import cells, check, client, figures, written
from bench.step_world import Shape
from specattn.config import SpecConfig
from specattn.engine.engine import Engine
from specattn.engine.metrics import EngineMetrics
from specattn.engine.request import Request
from tests.samples import half, on_cpu

SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "vocab_size": 97,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
}
ROOT = Path(__file__).parent.parent.parent
CELL = cells.Cell(cells.SMALL, 3, (5, 15), (6, 14), 7)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    target = Qwen2Config(**SIZES, tie_word_embeddings=True)
    shape = Shape("tiny", target, LlamaConfig(**SIZES), 61)
    monkeypatch.setattr(cells, "shape_of", lambda model: shape)
    monkeypatch.setitem(cells.CELLS, "1.5b-32", CELL)


def engine(draft="plain", dtype=torch.float32):
    load = cells.loader(CELL.model, torch.device("cpu"), dtype)
    return cells.engine_of(load, [CELL], cells.DRAFTS[draft])


@pytest.mark.parametrize("by", client.CLIENTS)
def test_so_many_requests_are_in_flight_and_texts_are_those_of_plain_decoding(by):
    made, _ = engine()
    requests = CELL.requests(97, 0)
    found = client.load(made, requests, CELL.at_once, seconds=600, client=by)
    plain = Engine(made.target.model, None, SpecConfig(0, 1, 1, 64, 1))
    told = {text.request.prompt: text for text in found.texts}
    for request in requests:
        text = told[request.prompt]
        assert text.tokens == plain.generate([request])[0].tokens
        assert sum(count for _, count in text.chunks) == len(text.tokens)
        assert 1 + sum(text.accept_lens) == len(text.tokens)
    begins, now = [text.submitted for text in found.texts], CELL.at_once
    ends = sorted(text.chunks[-1][0] for text in found.texts)
    assert begins == sorted(begins)
    assert begins[now - 1] < ends[0], "all clients are there"
    for end, begin in zip(ends, begins[now:], strict=False):
        assert end <= begin, "one has to end before the next one comes"
        if by == "engine":
            told = [at for text in found.texts for at, _ in text.chunks]
            assert not any(end < at < begin for at in told), "which comes at once"
    assert found.after.prompt_tokens == sum(len(request.prompt) for request in requests)
    assert 0 < found.prompts.calls <= CELL.count


def test_no_requests_come_when_time_is_up():
    made, _ = engine()
    for by in ("engine", "asyncio"):
        texts = client.CLIENTS[by](made, CELL.requests(97, 0), CELL.at_once, 0.0)
        assert texts == []


def test_an_engine_that_fails_ends_the_load(monkeypatch):
    made, _ = engine()
    monkeypatch.setattr(made, "step", lambda **_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        client.load(made, CELL.requests(97, 0), CELL.at_once, seconds=600)


@on_cpu(half, "draft", "dtype")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("draft", ["plain", "eagle3"])
def test_texts_that_the_target_does_not_write_are_refused(draft, dtype):
    made, lowest = engine(draft, dtype)
    assert lowest == (61 if draft == "eagle3" else 0)
    texts = client.load(made, CELL.requests(97, 0), CELL.at_once, seconds=600).texts[:3]
    found = check.check(made, texts, lowest)
    assert found["checked"] == 3
    assert found["missed"] < check.MOST_MISSED
    for at in (0, sum(texts[1].accept_lens[:-1])):
        right, texts[1].tokens = texts[1].tokens, [*texts[1].tokens]
        texts[1].tokens[at] = (right[at] + 1) % 97
        with pytest.raises(check.WrongTexts):
            check.check(made, texts, lowest)
        texts[1].tokens = right
    # another request's text
    texts[1].tokens, texts[1].accept_lens = texts[2].tokens, texts[2].accept_lens
    with pytest.raises(check.WrongTexts):
        check.check(made, texts, lowest)


def test_forced_steps_gain_what_they_are_told():
    made, _ = engine("eagle3-tree")
    found = client.load(made, CELL.requests(97, 0), CELL.at_once, seconds=600)
    lens = [lens for text in found.texts for lens in text.accept_lens[:-1]]
    assert max(lens) == 4
    assert sum(lens) / len(lens) > 3.5, "trees may be shallower"


def test_figures_of_two_texts():
    """By hand: submitted at 0 and 3, tokens at 1, 2 (three), 4 and at 5, 6."""
    first = client.Text(Request([1]), 10.0)
    second = client.Text(Request([1]), 13.0)
    for text, chunks in ((first, [(11, 1), (12, 3), (14, 1)]), (second, [(15, 1), (16, 1)])):
        for at, count in chunks:
            text.came([7] * count, float(at))
        text.came([], 99.0)
    before = EngineMetrics(prompt_tokens=5, verify_steps=1, accept_lens=(0, 1, 0, 0))
    after = EngineMetrics(prompt_tokens=9, verify_steps=4, accept_lens=(0, 3, 0, 1))
    prompts = client.PromptTime(2, 1.5)
    found = figures.figures(client.Load([first, second], 10.0, prompts, before, after))
    assert (found["texts"], found["tokens"], found["seconds"]) == (2, 7, 6.0)
    assert found["tokens_per_s"] == pytest.approx(7 / 6, abs=1e-4)
    assert found["full_tokens_per_s"] == pytest.approx(4 / 3, abs=1e-4)
    assert (found["ttft_ms"], found["ttft_p99_ms"]) == (1500.0, 2000.0)
    # a third of a second three times, 2 s, 1 s
    assert found["itl_ms"] == pytest.approx(1000 / 3, abs=1e-4)
    assert (found["itl_p99_ms"], found["gap_p99_ms"], found["gap_most_ms"]) == (2000.0,) * 3
    assert (found["prompt_ms"], found["prompt_host"], found["prompt_tokens"]) == (750.0, 0.25, 4)
    assert found["prompt_stream"] is None
    # two more steps of a request that gained 1, and one that gained 3
    assert (found["steps"], found["batch"]) == (3, 1.0)
    assert found["per_step"] == pytest.approx(5 / 3, abs=1e-4)


def test_a_gap_in_units_of_steps_and_chunks():
    """By hand: steps of 2, a prompt of 5 launched at 13.5 that the step at 19 came after."""
    text = client.Text(Request([1]), 9.0)
    for at in (10, 12, 14, 21, 23, 25, 27):
        text.came([7], float(at))
    prompts = client.PromptTime(1, 5.0, begins=[13.5], hosts=[5.0])
    metrics = EngineMetrics(accept_lens=(0, 6))
    found = figures.figures(client.Load([text], 8.0, prompts, metrics, metrics))
    assert (found["step_ms"], found["chunk_ms"], found["gap_p99_ms"]) == (2e3, 5e3, 7e3)
    assert found["gap_p99_bounds"] == round(7 / 9, 4)


def test_later_parts_of_a_long_prompt_are_among_the_prompts_time():
    """Two requests run, and a prompt of 60 comes in parts of 8 between their steps."""
    made, _ = engine()
    made._admission.prompts.chunk = 8
    launched = []
    launch = made._admission.prompts.launch
    made._admission.prompts.launch = lambda wave: launched.append(wave) or launch(wave)
    long = Request([*range(1, 61)], 4, ignore_eos=True)
    requests = [Request([3], 24, ignore_eos=True), Request([5], 2, ignore_eos=True), long]
    found = client.load(made, requests, 2, seconds=600)
    assert len(launched) >= 1 + 8
    assert found.prompts.calls == len(found.prompts.begins) >= 8


def test_first_tokens_of_requests_alone_are_timed_unwatched():
    made, _ = engine()
    requests = CELL.requests(97, 0)
    hooks, during, add = dict(vars(made._admission)), [], made.add
    made.add = lambda some: during.append(hooks.keys() - vars(made._admission).keys()) or add(some)
    seconds = client.first_tokens(made, requests)
    assert len(seconds) == len(requests)
    assert all(found > 0 for found in seconds)
    assert during == [{"_run_prompts", "_goes_on"}] * len(requests)
    assert (made.prompt_time.calls, made.num_running) == (0, 0)
    assert vars(made._admission) == hooks, "what comes next is watched again"


def test_the_first_token_of_a_line_is_what_a_caller_of_one_request_waits_for(monkeypatch, capsys):
    asked = []
    few = replace(CELL, answers=(3, 5), count=3)
    monkeypatch.setitem(cells.CELLS, "first-token-1.5b", replace(few, at_once=1))
    monkeypatch.setitem(cells.CELLS, "1.5b-32", few)
    seconds = lambda made, requests: asked.append(requests) or [30.0, 10.0, 20.0]  # noqa: E731
    monkeypatch.setattr(command, "first_tokens", seconds)
    words = ["--dtype", "float32", "--cells"]
    for client_is, cell in (("engine", "first-token-1.5b"), ("asyncio", "first-token-1.5b")):
        command.main([*words, cell, "--client", client_is])
    command.main([*words, "1.5b-32"])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line[:2] == '{"']
    alone, elsewhere, many = found
    assert [len(requests) for requests in asked] == [3]
    assert (alone["ttft_ms"], alone["ttft_p99_ms"]) == (20_000.0, 30_000.0)
    for line in (elsewhere, many):
        assert "ttft_watched_ms" not in line
        assert line["ttft_ms"] != 20_000.0
    assert alone["ttft_watched_ms"] != 20_000.0


def test_prompts_of_a_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": [4, 5, 6]}) + "\n" + json.dumps({"prompt": "def f"}))
    tokenizer = SimpleNamespace(
        chat_template="chat",
        apply_chat_template=lambda chat, **_: [len(turn["content"]) for turn in chat],
    )
    cell, requests = cells.given(path, tokenizer, 32, 2, 3)
    assert [one.prompt for one in requests] == [(4, 5, 6), (5,), (4, 5, 6)]
    assert not any(one.ignore_eos for one in requests)
    assert (cell.at_once, cell.count, cell.longest) == (2, 3, 35)


def test_the_command_measures_the_shipped_pair_and_sets_sides_beside_each_other(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(cells.CELLS, "pair-4", cells.Cell(cells.SHIPPED, 2, (8, 12), (6, 8), 3))
    monkeypatch.setattr(command, "CHECKED", 2)
    words = ["--cells", "1.5b-32,pair-4", "--dtype", "float32", "--out", str(tmp_path)]
    command.main([*words, "--rounds", "2", "--label", "old", "--commit", "abc"])
    command.main([*words[2:], "--cells", "pair-4", "--drafts", "lookup,eagle3", "--label", "new"])
    lines = figures.read(tmp_path / "load.jsonl")
    names = [(line["cell"], line["draft"], line["side"], line["round"]) for line in lines]
    assert names == [
        *(("1.5b-32", "plain", "old", at) for at in (0, 1)),
        *(("pair-4", "plain", "old", at) for at in (0, 1)),
        ("pair-4", "lookup", "new", 0),
        ("pair-4", "eagle3", "new", 0),
    ]
    assert {line["equal_alone"] for line in lines} == {command.CHECKED}
    assert lines[0]["machine"]["commit"] == "abc"
    assert lines[-1]["per_step"] > 1.5, "the pair's head is a trained one"
    assert lines[-1]["tokens"] == lines[2]["tokens"], "sides get the same requests"
    capsys.readouterr()
    command.main(["--table", str(tmp_path / "load.jsonl")])
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert "first token, ms" in head
    assert [row.split(" | ")[:5] for row in rows][1:3] == [
        ["| pair-4", "plain", "engine", "old", "2"],
        ["| pair-4", "lookup", "engine", "new", "1"],
    ]


def test_first_tokens_inside_transformers(monkeypatch, tmp_path, capsys):
    cell = cells.Cell(cells.SMALL, 1, (15, 15), (4, 4), 3)
    monkeypatch.setitem(cells.INSIDE, "generate-1.5b", cell)
    words = ["--cells", "generate-1.5b", "--dtype", "float32", "--out", str(tmp_path)]
    command.main([*words, "--rounds", "2"])
    lines = figures.read(tmp_path / "load.jsonl")
    loops = [(line["client"], line["round"], line["equal_first"]) for line in lines]
    both = "transformers", "custom_generate", "custom_generate, not fused"
    assert loops == [(loop, turn, 3) for turn in (0, 1) for loop in both]
    assert all(0 < line["ttft_ms"] <= line["ttft_p99_ms"] for line in lines)
    assert "custom_generate" in capsys.readouterr().out


def test_unknown_names_are_refused(capsys):
    with pytest.raises(SystemExit):
        command.main(["--cells", "2b"])
    assert "known: first-token-1.5b" in capsys.readouterr().err


@pytest.fixture
def words(monkeypatch):
    """A vocabulary in which a draft is hardly right by chance."""
    sizes = SIZES | {"vocab_size": 3000, "max_position_embeddings": 512}
    target = Qwen2Config(**sizes, tie_word_embeddings=True)
    shape = Shape("tiny", target, LlamaConfig(**sizes), 1000)
    monkeypatch.setattr(cells, "shape_of", lambda model: shape)
    monkeypatch.setattr(cells, "small_of", lambda model: target)
    return 3000


def loaded_with(cell, draft):
    load = cells.loader(cell.model, torch.device("cpu"), torch.float32)
    made, lowest = cells.engine_of(load, [cell], cells.DRAFTS[draft])
    assert not lowest
    requests = cell.requests(made.target.model.vocab_size, 0)
    return client.load(made, requests, cell.at_once, seconds=600)


def gained(text, kept, steps):
    """What a request gains in its steps, by what a chain keeps at its positions."""
    found, at = [], len(text.request.prompt)
    while sum(found) < text.request.max_new_tokens - 1:
        run = 0
        while run < steps and kept[at + 1 + run]:
            run += 1
        left = text.request.max_new_tokens - 1 - sum(found)
        found.append(min(1 + run, left))
        at += found[-1]
    return found


@on_cpu(half, "draft", "temperature")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("draft", ["plain", "lookup", "eagle3", "eagle3-5", "model"])
def test_written_texts_keep_the_places_they_are_told(words, draft, temperature):
    cell = cells.Cell(cells.SMALL, 3, (50, 70), (20, 40), 6, temperature, written=True)
    found = loaded_with(cell, draft)
    setting = cells.DRAFTS[draft]
    text = written.Written(words, setting.share)
    assert text.check(found.texts) == {"checked": 6, "as_written": 6}
    assert found.after.shared_tokens == 0
    assert len({one.request.prompt[0] for one in found.texts}) == 6
    for one in found.texts:
        assert len(one.tokens) == one.request.max_new_tokens
        if draft == "lookup":
            continue
        assert one.accept_lens == gained(one, text.kept, setting.setting.shape[0])
    one = found.texts[2]
    at = next(at for at in range(1, 20) if not text.kept[len(one.request.prompt) + at])
    one.tokens[at] = (one.tokens[at] + 1) % words
    with pytest.raises(check.WrongTexts, match="was to be written"):
        text.check(found.texts)


@pytest.mark.parametrize(
    "draft", [pytest.param("lookup", marks=pytest.mark.slow), "eagle3", "eagle3-5", "model"]
)
def test_drafts_gain_on_written_texts_about_what_they_gain_on_humaneval(words, draft):
    """docs/published.md, greedy, 8 at once; lookup reads repetitions, others know places."""
    record = json.loads((ROOT / "bench" / "results" / "published_qwen15.json").read_text())
    chosen, cell = cells.DRAFTS[draft], cells.CELLS["1.5b-32-drafts"]
    (published,) = (
        line["accepted_per_step"]
        for line in record["results"]
        if (line["draft"], line["tree"]) == (chosen.setting.draft, chosen.setting.tree)
        and (line["by"], line["batch"], line["temperature"]) == ("specattn", 8, 0.0)
    )
    if draft == "lookup":
        texts = loaded_with(replace(cell, count=20, at_once=10), draft).texts
        lens = [count for text in texts for count in text.accept_lens]
    else:
        kept, depth = written.Written(words, chosen.share).kept, chosen.setting.shape[0]
        texts = [client.Text(request, 0.0) for request in cell.requests(words, 0)]
        lens = [count for text in texts for count in gained(text, kept, depth)]
    gain = sum(lens) / len(lens)
    if draft.startswith("eagle3"):
        # heads of minutes gain 1.87, 2.21 and 2.45 by a chain of 3, and the written one the last
        assert published < gain < 1.5 * published
    else:
        assert gain == pytest.approx(published, rel=0.06)


def test_adaptive_engines_write_the_same_texts(words):
    cell = cells.Cell(cells.SMALL, 3, (50, 70), (30, 40), 6, written=True)
    for draft in ("lookup-adaptive", "eagle3-adaptive", "model-adaptive"):
        text = written.Written(words, cells.DRAFTS[draft].share)
        assert text.check(loaded_with(cell, draft).texts)["as_written"] == 6


def test_parts_of_long_prompts_are_watched():
    made = client.WatchedEngine(
        cells.loader(CELL.model, torch.device("cpu"), torch.float32)("none")[0],
        None,
        SpecConfig(0, 1, 1, 128, 2),
        prompt_chunk=16,
    )
    # the long one comes while the second one runs
    asked = [([1, 2, 3], 4), ([5, 6, 7], 60), ([4] * 60, 4)]
    requests = [Request(prompt, new, ignore_eos=True) for prompt, new in asked]
    found = client.load(made, requests, 2, seconds=600)
    assert found.prompts.calls >= 1 + 4


def test_adaptive_engines_are_set_beside_the_best_of_their_kind():
    def line(draft, speed, cell="a"):
        line = {"cell": cell, "draft": draft, "client": "engine", "side": "this"}
        return line | {"tokens_per_s": speed}

    lines = [
        *(line("plain", speed) for speed in (90.0, 100.0, 110.0)),
        line("lookup", 150.0),
        line("lookup-adaptive", 120.0),
        line("eagle3", 50.0),
        line("eagle3-5", 60.0),
        line("eagle3-adaptive", 97.0),
        line("eagle3", 50.0, cell="b"),
    ]
    head, _, *rows = figures.table(lines).splitlines()
    at = head.split(" | ").index("over plain")
    found = {(row.split(" | ")[0], *row.split(" | ")[1:2]): row.split(" | ") for row in rows}
    told = {key: (row[at], row[at + 1]) for key, row in found.items()}
    assert told["| a", "plain"] == ("1.00x", "-")
    assert told["| a", "lookup-adaptive"] == ("1.20x", "0.80x")
    assert told["| a", "eagle3-adaptive"] == ("0.97x", "0.97x")
    assert told["| b", "eagle3"] == ("-", "-")
