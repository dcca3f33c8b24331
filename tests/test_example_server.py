"""The example server, as OpenAI's own client finds it."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread
from urllib.error import HTTPError
from urllib.request import Request as Post
from urllib.request import urlopen

import pytest
import torch

pytest.importorskip("starlette", reason="the extra `dev` is not installed")
openai = pytest.importorskip("openai", reason="the extra `dev` is not installed")
uvicorn = pytest.importorskip("uvicorn", reason="the extra `dev` is not installed")

from specattn import (  # noqa: E402
    AsyncEngine,
    Engine,
    Request,
    RequestOutput,
    SamplingParams,
    SpecConfig,
)
from specattn.models.hub import PAIR  # noqa: E402
from specattn.speculative.step.host_buffers import TokenLogprobs  # noqa: E402
from tests.cli.command import PROMPT, loaded, plain_tokens, tokenizer  # noqa: E402

FILE = Path(__file__).parent.parent / "docs" / "examples" / "openai_server.py"
EXAMPLE = runpy.run_path(str(FILE))
CONTEXT, ROWS, NEW = 80, 2, 8
# as small instruct models have it: a system message that is there unless another one is given
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MESSAGES = [{"role": "user", "content": "class Point:"}]
SPOKEN = (
    "<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\nclass Point:<|im_end|>\n"
    "<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def engine():
    models = loaded(None, None, speculative=True, dtype=torch.float32, device=torch.device("cpu"))
    config = SpecConfig(3, 2, 6, max_context_len=CONTEXT, max_num_reqs=ROWS)
    return Engine(models.target, models.draft, config, tokenizer=tokenizer(), buckets=[ROWS])


def running(app):
    """Serve an application on a port of its own, until the fixture ends."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}/v1"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def owner(engine):
    with AsyncEngine(engine) as owner:
        yield owner


@pytest.fixture(scope="module")
def address(owner):
    chatty = copy.deepcopy(tokenizer())
    chatty.chat_template = CHATML
    grammars = None
    if make := EXAMPLE["XGrammarCompiler"]:
        grammars = make(tokenizer(), owner._engine.target.model)
    yield from running(EXAMPLE["serve"](owner, chatty, "pair", grammars))


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(base_url=address, api_key="-", max_retries=0) as client:
        yield client


def said(owner, request: Request) -> tuple[str, list]:
    """What the engine itself says, and its log-probabilities."""
    return read(owner.stream(request))


def read(stream) -> tuple[str, list]:
    outputs = list(stream)
    text = "".join(output.text for output in outputs)
    return text, [one for output in outputs for one in output.logprobs]


def complete(client, prompt=PROMPT, **asked):
    return client.completions.create(model="pair", prompt=prompt, **{"max_tokens": NEW} | asked)


def test_greedy_completions_are_plain_decoding(client):
    text = tokenizer().decode(plain_tokens(PROMPT, NEW))
    answer = complete(client, temperature=0)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == (text, "length", None)
    length = len(tokenizer()(PROMPT).input_ids)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (length, NEW)
    pieces = list(complete(client, temperature=0, stream=True))
    assert len(pieces) > 2
    assert "".join(piece.choices[0].text for piece in pieces) == text
    assert [piece.choices[0].finish_reason for piece in pieces][-2:] == [None, "length"]
    # sixteen tokens, if nothing is said; a prompt may be tokens, and several
    ids = tokenizer()(PROMPT).input_ids
    free = client.completions.create(model="pair", prompt=[ids, ids], temperature=0)
    assert [one.text for one in free.choices] == [tokenizer().decode(plain_tokens(PROMPT, 16))] * 2


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 1.5, "seed": 7, "top_p": 0.9},
        {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"temperature": 0, "logit_bias": {"14": -100, "11": 5}},
    ],
    ids=["drawn", "penalties", "bias"],
)
def test_fields_are_those_of_a_request(client, owner, asked):
    given = asked | {"logit_bias": {int(t): x for t, x in asked.get("logit_bias", {}).items()}}
    want, _ = said(owner, Request(PROMPT, NEW, SamplingParams(**given)))
    assert complete(client, **asked).choices[0].text == want
    assert want != tokenizer().decode(plain_tokens(PROMPT, NEW))
    stop = want[4:7]
    answer = complete(client, **asked, stop=stop).choices[0]
    assert (answer.text, answer.finish_reason) == (want[: want.index(stop)], "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_choices_are_samples(client, owner, stream):
    """More than there are rows; without a seed, they are others each time."""
    request = Request(PROMPT, NEW, SamplingParams(2.0, seed=3))
    streams = [owner.stream(one) for one in request.samples(ROWS + 1)]
    want = [read(one)[0] for one in streams]
    assert len(set(want)) == len(want)
    found = complete(client, n=ROWS + 1, seed=3, temperature=2, stream=stream)
    texts = [""] * len(want)
    for piece in found if stream else [found]:
        for choice in piece.choices:
            texts[choice.index] += choice.text
    assert texts == want
    free = complete(client, temperature=2, n=ROWS)
    assert len({choice.text for choice in free.choices} - set(want)) == ROWS


def test_chats_go_through_the_template(client, owner):
    ids = tokenizer().encode(SPOKEN, add_special_tokens=False)
    want, scores = said(owner, Request(ids, NEW, SamplingParams(logprobs=2)))
    asked = {"model": "pair", "messages": MESSAGES, "temperature": 0, "max_completion_tokens": NEW}
    asked |= {"logprobs": True, "top_logprobs": 2}
    (choice,) = client.chat.completions.create(**asked).choices
    assert (choice.message.role, choice.message.content) == ("assistant", want)
    assert [one.logprob for one in choice.logprobs.content] == [one.value for one in scores]
    for one, score in zip(choice.logprobs.content, scores, strict=True):
        assert [top.logprob for top in one.top_logprobs] == [*score.alternatives.values()]
    assert "".join(one.token for one in choice.logprobs.content) == want
    *pieces, usage = client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    assert "".join(piece.choices[0].delta.content for piece in pieces) == want
    assert (usage.choices, usage.usage.total_tokens) == ([], len(ids) + NEW)
    # to the end of the context, if nothing is said
    del asked["max_completion_tokens"]
    (choice,) = client.chat.completions.create(**asked).choices
    assert choice.finish_reason == "length"
    assert len(choice.logprobs.content) > CONTEXT - len(ids)


def test_parts_of_a_stream_count_their_tokens_if_asked(client):
    asked = {"temperature": 0, "stream": True}
    assert all(piece.usage is None for piece in complete(client, **asked))
    every = {"include_usage": True, "continuous_usage_stats": True}
    *pieces, last = complete(client, **asked, stream_options=every)
    counts = [piece.usage.completion_tokens for piece in pieces]
    assert counts == sorted(counts)
    assert len(counts) > 2
    assert counts[-1] == last.usage.completion_tokens == NEW
    assert {piece.usage.prompt_tokens for piece in (*pieces, last)} == {
        len(tokenizer()(PROMPT).input_ids)
    }


def test_log_probabilities_of_a_completion(client, owner):
    want, scores = said(owner, Request(PROMPT, NEW, SamplingParams(logprobs=2)))
    found = complete(client, temperature=0, logprobs=2).choices[0].logprobs
    assert "".join(found.tokens) == want
    assert found.token_logprobs == [one.value for one in scores]
    assert [[*top.values()] for top in found.top_logprobs] == [
        [*one.alternatives.values()] for one in scores
    ]


def test_the_model_is_listed(client):
    assert [model.id for model in client.models.list()] == ["pair"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"temperature": -1}, "temperature must be 0 or more, got -1"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"n": 0}, r"n must be 1\.\.128, got 0"),
        ({"n": 129}, r"n must be 1\.\.128, got 129"),
        ({"logprobs": 50}, r"logprobs must be 0\.\.20, got 50"),
        ({"logit_bias": {"99999": 1}}, r"tokens of logit_bias must be 0\.\.3071"),
        ({"logit_bias": {"a": 1}}, "every token of logit_bias must be a whole number, got 'a'"),
        ({"extra_body": {"logit_bias": "x"}}, "logit_bias must be an object, got 'x'"),
        ({"stop": ["", "a"]}, "stop must be texts that are not empty"),
        ({"suffix": "end"}, "suffix is not served, got 'end'"),
        ({"echo": True}, "echo is not served, got True"),
        ({"extra_body": {"tools": [{}]}}, "tools is not served"),
        ({"extra_body": {"top_n": 3}}, "unexpected keyword argument 'top_n'"),
        ({"extra_body": {"stream_options": "x"}}, "stream_options must be an object, got 'x'"),
        (
            {"extra_body": {"response_format": {"type": "xml"}}},
            "response_format 'xml' is not served",
        ),
        ({"prompt": {"a": 1}}, "prompt must be a text, tokens, or a list of these"),
        ({"prompt": 7}, "prompt must be a text, tokens, or a list of these, got 7"),
        ({"prompt": ["a", 7]}, "prompt must be a text, tokens, or a list of these, got 7"),
        ({"prompt": [[1], {"a": 1}]}, "prompt must be a text, tokens, or a list of these"),
        ({"prompt": [1.5]}, "prompt must be a text, tokens, or a list of these"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [1] * 81}, "the prompt has 81 tokens, the context holds 80"),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_mistakes_are_answers_of_status_400(client, asked, message, stream):
    with pytest.raises(openai.BadRequestError, match=message) as refused:
        complete(client, stream=stream, **asked)
    assert refused.value.body["type"] == "invalid_request_error"


def test_chats_that_do_not_fit_are_refused(client, owner):
    for messages in ([], [{"content": "no role"}]):
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="pair", messages=messages)
    for address in running(EXAMPLE["serve"](owner, tokenizer(), "pair")):
        with (
            openai.OpenAI(base_url=address, api_key="-", max_retries=0) as plain,
            pytest.raises(openai.BadRequestError, match="chat_template is not set"),
        ):
            plain.chat.completions.create(model="pair", messages=MESSAGES)


@pytest.mark.parametrize(
    "content",
    [
        None,
        7,
        ["class"],
        [{"type": "text"}],
        [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "x"}}],
    ],
    ids=["null", "number", "no part", "no text", "image"],
)
def test_contents_that_are_no_text_are_refused_by_name(client, content):
    name = "'image_url' is not served" if str(content).count("image_url") else "must be"
    with pytest.raises(openai.BadRequestError, match=name):
        client.chat.completions.create(
            model="pair", messages=[{"role": "user", "content": content}]
        )


def test_parts_of_a_content_are_one_text(client):
    asked = {"model": "pair", "temperature": 0, "max_tokens": NEW}
    parts = [{"type": "text", "text": text} for text in ("class ", "Point:")]
    whole, joined = (
        client.chat.completions.create(messages=[{"role": "user", "content": content}], **asked)
        for content in ("class Point:", parts)
    )
    assert joined.choices[0].message.content == whole.choices[0].message.content
    assert joined.usage == whole.usage


def test_fields_that_change_nothing_are_taken(client):
    idle = {"user": "me", "metadata": {"a": "b"}, "response_format": {"type": "text"}}
    idle |= {"tools": [], "tool_choice": "none", "echo": False, "store": False, "seed": None}
    text = complete(client, temperature=0).choices[0].text
    assert complete(client, temperature=0, extra_body=idle).choices[0].text == text


def test_another_model_is_not_found(client, address):
    for ask in (client.completions, client.chat.completions):
        prompt = {"messages": MESSAGES} if ask is client.chat.completions else {"prompt": "a"}
        with pytest.raises(openai.NotFoundError, match="the model 'other' does not exist") as found:
            ask.create(model="other", max_tokens=1, **prompt)
        assert found.value.body["code"] == "model_not_found"
    assert post(address, "completions", json.dumps({"prompt": "a", "max_tokens": 1}))[0] == 200


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("chat/completions", '{"messages": null}', "messages must be a list, got None"),
        ("chat/completions", '{"messages": "a"}', "messages must be a list, got 'a'"),
        ("chat/completions", '{"messages": ["a"]}', "every message must be an object"),
        ("completions", '{"prompt": null}', "prompt must be a text, tokens"),
        ("completions", "{}", "prompt must be a text, tokens"),
        ("completions", '{"prompt": "a", "stream": "false"}', "stream must be True or False"),
        ("completions", '{"prompt": "a", "n": true}', "n must be a whole number, got True"),
        ("completions", "[" * 100_000, "JSON array"),
        ("completions", "no JSON", "Expecting value"),
        ("completions", "[1]", "the body must be an object"),
    ],
    ids=range(10),
)
def test_bodies_that_are_no_requests_are_answers_of_status_400(address, path, body, message):
    status, found = post(address, path, body)
    assert status == 400
    assert message in json.loads(found)["error"]["message"]


def post(address, path, body: str) -> tuple[int, str]:
    try:
        with urlopen(Post(f"{address}/{path}", body.encode(), method="POST")) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize("chat", [False, True])
def test_tokens_that_are_spelled_alike_keep_their_own_numbers(chat):
    """Bytes that are no character: the emitted one is the more probable."""
    a, b = [i for i in range(3072) if tokenizer().decode(i) == "\ufffd"][:2]
    scored = [TokenLogprobs(-0.2, {a: -0.2, b: -4.0})]
    output = RequestOutput([a], "length", logprobs=scored, text="\ufffd")
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
    words = copy.deepcopy(tokenizer())
    words.chat_template = CHATML
    answer = EXAMPLE["Answer"]({"prompt": "x"} | body if not chat else body, chat, words)
    found = answer.choice(0, [output])["logprobs"]
    if chat:
        tops = found["content"][0]["top_logprobs"]
        assert [(one["token"], one["logprob"]) for one in tops] == [
            ("\ufffd", -0.2),
            ("\ufffd", -4.0),
        ]
    else:
        assert found["top_logprobs"] == [{"\ufffd": -0.2}]


def test_answers_match_a_schema(client):
    pytest.importorskip("xgrammar", reason="the extra `grammar` is not installed")
    schema = {"type": "object", "properties": {"n": {"enum": [1, 23]}}, "required": ["n"]}
    given = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    asked = {"model": "pair", "response_format": given, "seed": 5}
    (choice,) = client.chat.completions.create(messages=MESSAGES, **asked).choices
    assert json.loads(choice.message.content)["n"] in (1, 23)
    assert choice.finish_reason == "stop"
    for wrong, message in (
        ({"type": "json_schema"}, "json_schema must be an object, got None"),
        (given | {"json_schema": {"schema": {"type": "no"}}}, "schema must be one that xgrammar"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            client.chat.completions.create(messages=MESSAGES, **asked | {"response_format": wrong})


def test_health_and_metrics(client, address, engine):
    complete(client)
    root = address.removesuffix("/v1")
    with urlopen(f"{root}/health") as answer:
        assert json.loads(answer.read()) == {"status": "ok"}
    with urlopen(f"{root}/metrics") as answer:
        found = dict(line.split(" ") for line in answer.read().decode().splitlines())
    now = engine.metrics()
    assert int(found["specattn_generated_tokens_total"]) == now.generated_tokens > 0
    assert int(found["specattn_free_rows"]) == ROWS
    assert int(found['specattn_finished_total{reason="length"}']) == now.finished["length"]
    gained = [found[f'specattn_gained_total{{tokens="{n}"}}'] for n in range(len(now.accept_lens))]
    assert tuple(map(int, gained)) == now.accept_lens
    status, missing = post(root, "none", "")
    assert (status, json.loads(missing)["error"]["code"]) == (404, None)


@pytest.mark.slow
def test_an_interrupt_ends_the_server_at_once():
    """Whatever clients wait for; without a traceback, as a shell reports it."""
    command = [sys.executable, "-u", str(FILE), str(PAIR / "target"), "--port", "0"]
    environment = os.environ | {"PYTHONPATH": str(FILE.parent.parent.parent)}
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        lines: list[str] = []
        while not (found := re.search(r"http://127.0.0.1:\d+", lines[-1] if lines else "")):
            lines.append(server.stderr.readline())
            assert lines[-1], lines
        body = {"prompt": PROMPT, "max_tokens": 2000, "stream": True, "n": 4}
        asked = Post(f"{found[0]}/v1/completions", json.dumps(body).encode(), method="POST")
        with urlopen(asked) as answer:
            assert answer.readline().startswith(b"data: ")
            whole = Thread(
                target=post,
                args=(f"{found[0]}/v1", "completions", json.dumps(body | {"stream": False})),
                daemon=True,
            )
            whole.start()
            server.send_signal(signal.SIGINT)
            rest = server.communicate(timeout=300)[1]
        whole.join()
    finally:
        server.kill()
    assert server.returncode == 130
    assert "Traceback" not in "".join(lines) + rest


def test_clients_that_go_away_drop_their_requests(client, address, engine, monkeypatch):
    """Be it in a stream, or while they wait for the whole: all rows come back."""
    endless = {"model": "pair", "prompt": PROMPT, "max_tokens": 10_000, "n": ROWS + 1}
    with monkeypatch.context() as patch:
        # none of them ends by itself: there are first tokens, and no steps
        patch.setattr(engine.scheduler, "schedule", lambda: time.sleep(0.001) or {})
        with client.completions.create(**endless, stream=True) as stream:
            assert next(stream).choices[0].finish_reason is None
        wait_for(lambda: not busy(engine))

        async def cancelled():
            async with openai.AsyncOpenAI(base_url=address, api_key="-", max_retries=0) as other:
                task = asyncio.create_task(other.completions.create(**endless))
                await asyncio.to_thread(wait_for, lambda: busy(engine))
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task

        asyncio.run(cancelled())
        wait_for(lambda: not busy(engine))
    assert engine.table.num_free_rows == ROWS
    assert len(complete(client, n=ROWS).choices) == ROWS


def busy(engine) -> bool:
    return bool(engine.running or engine.scheduler.waiting)


def wait_for(condition) -> None:
    while not condition():
        time.sleep(0.005)
