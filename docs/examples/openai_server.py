"""OpenAI's API over one engine: `python docs/examples/openai_server.py FOLDER_OR_HUB_NAME`.

From the project's root, after `pip install '.[models,grammar]' starlette uvicorn` there. It is an
example of `AsyncEngine`: products serve through SGLang (docs/sglang.md).
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import AsyncIterator
from threading import Thread
from typing import Any

if __name__ == "__main__":  # as a shell reports Ctrl-C, also while the rest is imported
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))

import uvicorn
from jinja2 import TemplateError
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from specattn import AsyncEngine, Engine, Request, RequestOutput, SamplingParams, SpecConfig
from specattn.checks import flag, whole_number
from specattn.errors import SpecAttnError
from specattn.models import HFTarget
from specattn.speculative.proposers.lookup import LookupProposer

try:
    from specattn.integrations.xgrammar import XGrammarCompiler
except ImportError:
    XGrammarCompiler = None

# "length" is called so by OpenAI, too; "nonfinite" and "dropped" keep their names
FINISH = {"": None, "eos": "stop", "context": "length", "blocked": "stop"}
# fields that change nothing, whatever they are, and those that change nothing if they are so
IDLE = "user", "metadata", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"
OFF = False, [], "", "none", "auto"
OFF_FIELDS = "echo", "store", "tools", "tool_choice", "functions", "function_call", "suffix"
GAUGES = "running", "waiting", "free_rows", "free_slots", "slots"


class Answer:
    """The requests of one answer, and the words in which OpenAI gives it."""

    def __init__(self, body: dict[str, Any], chat: bool, tokenizer: Any, grammars: Any = None):
        main = "messages" if chat else "prompt"
        asked = {k: v for k, v in body.items() if v is not None or k == main}
        take, self.chat, self.tokenizer = asked.pop, chat, tokenizer
        self.stream, options = flag("stream", take("stream", False)), take("stream_options", {})
        given = typed("stream_options", options, dict, "an object").get
        self.with_usage = flag("include_usage", given("include_usage", False)) or not self.stream
        # as SGLang and vLLM have it: in every part of a stream
        each = flag("continuous_usage_stats", given("continuous_usage_stats", False))
        self.counted = each or not self.stream
        kind = "chat.completion" + ".chunk" * self.stream if chat else "text_completion"
        self.head = {"id": hex(time.time_ns()), "object": kind, "created": int(time.time())}
        self.head["model"] = take("model", "")
        prompts = self.prompts_of(take(main, None))
        self.counts = [sum(map(len, prompts)), 0]
        # a chat goes on to the context's end
        most = whole_number("max_tokens", take("max_tokens", 2**20 if chat else 16), 1)
        most = whole_number("max_completion_tokens", take("max_completion_tokens", most), 1)
        n, stop = whole_number("n", take("n", 1), 1, 128), take("stop", ())
        form = grammar_of(take("response_format", {"type": "text"}), grammars)
        bias = typed("logit_bias", take("logit_bias", {}), dict, "an object")
        bias = {int(token) if token.isdecimal() else token: x for token, x in bias.items()}
        scores = take("logprobs", None)
        if chat:
            top = whole_number("top_logprobs", take("top_logprobs", 0), 0, 20)
            scores = top if flag("logprobs", scores or False) else None
        drop_idle(asked)
        # what is left has to be fields of these, which say what is wrong
        sampling = SamplingParams(**{"temperature": 1.0} | asked, logit_bias=bias, logprobs=scores)
        made = [Request(prompt, most, sampling, stop=stop, grammar=form) for prompt in prompts]
        self.requests = [sample for one in made for sample in one.samples(n)]

    def prompts_of(self, given: Any) -> list[list[int]]:
        """Return the tokens of a chat up to its answer, or of texts to continue."""
        encode, template = self.tokenizer.encode, self.tokenizer.apply_chat_template
        if self.chat:
            messages = [message_of(one) for one in typed("messages", given, list, "a list")]
            given = template(messages, add_generation_prompt=True, return_dict=False)
        what = "a text, tokens, or a list of these"
        is_text = isinstance(given, str)
        if is_text or all(isinstance(one, int) for one in typed("prompt", given, list, what)):
            given = [given]
        every = [typed("prompt", one, str | list, what) for one in given]
        return [encode(one) if isinstance(one, str) else one for one in every]

    def write(self, outputs: dict[int, list[RequestOutput]]) -> dict[str, Any]:
        """Return what choices have got, and the usage at the end."""
        self.counts[1] += sum(len(one.tokens) for parts in outputs.values() for one in parts)
        found = self.head | {"choices": [self.choice(*pair) for pair in outputs.items()]}
        if self.counted or not outputs:
            names = "prompt_tokens", "completion_tokens", "total_tokens"
            found["usage"] = dict(zip(names, [*self.counts, sum(self.counts)], strict=True))
        return found

    def choice(self, at: int, parts: list[RequestOutput]) -> dict[str, Any]:
        """Return what a choice has got."""
        spell, text = self.tokenizer.decode, "".join(one.text for one in parts)
        rows = [
            (spell(token), score.value, [(spell(x), p) for x, p in score.alternatives.items()])
            for one in parts
            for token, score in zip(one.tokens, one.logprobs, strict=False)
        ]
        own: Any = {"delta" if self.stream else "message": {"role": "assistant", "content": text}}
        scores: Any = {"content": [entry(*row) for row in rows]}
        if not self.chat:
            # parts of a character are spelled alike: a text stands for its most probable token
            tops = [dict(reversed(dict(reversed(row[2])).items())) for row in rows]
            scores = {"tokens": [row[0] for row in rows], "top_logprobs": tops}
            scores["token_logprobs"], own = [row[1] for row in rows], {"text": text}
        reason = FINISH.get(parts[-1].finish_reason, parts[-1].finish_reason)
        return own | {"index": at, "finish_reason": reason, "logprobs": scores if rows else None}


def typed(name: str, value: Any, kind: Any, what: str) -> Any:
    """Return a field's value, which has to be of a kind."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be {what}, got {value!r}")
    return value


def message_of(given: Any) -> dict[str, Any]:
    """Return a message whose content is one text."""
    message = typed("every message", given, dict, "an object with a role and a content")
    typed("role", message.get("role"), str, "a text")
    parts = message.get("content")
    if isinstance(parts, list):
        for part in parts:
            kind = typed("every part of a content", part, dict, "an object").get("type")
            if kind != "text":
                raise ValueError(f"content of type {kind!r} is not served, only text is")
        parts = "".join(typed("text", part.get("text"), str, "a text") for part in parts)
    return message | {"content": typed("content", parts, str, "a text, or parts of text")}


def grammar_of(given: Any, grammars: Any) -> Any:
    """Return what makes the grammar that an answer has to match, if any."""
    kind = typed("response_format", given, dict, "an object").get("type")
    if kind == "text":
        return None
    if kind != "json_schema" or grammars is None:
        raise ValueError(f"response_format {kind!r} is not served (json_schema needs xgrammar)")
    named = typed("json_schema", given.get("json_schema"), dict, "an object")
    return grammars.json_schema(typed("schema", named.get("schema"), dict, "an object"))


def drop_idle(asked: dict[str, Any]) -> None:
    """Drop fields that change nothing."""
    for name in {*IDLE, *OFF_FIELDS}.intersection(asked):
        if (given := asked.pop(name)) not in OFF and name in OFF_FIELDS:
            raise ValueError(f"{name} is not served, got {given!r}")


def entry(token: str, value: float, top: list[tuple[str, float]]) -> dict[str, Any]:
    """Return a token of a chat, with its alternatives."""
    tops = [{"token": other, "logprob": x} for other, x in top]
    return {"token": token, "logprob": value, "top_logprobs": tops}


async def written(answer: Answer, streams: list[Any]) -> AsyncIterator[str]:
    """Yield an answer at once, or as server-sent events, one choice after the other."""
    if not answer.stream:
        parts = {at: [output async for output in stream] for at, stream in enumerate(streams)}
        yield json.dumps(answer.write(parts))
        return
    for at, stream in enumerate(streams):
        async for output in stream:
            yield f"data: {json.dumps(answer.write({at: [output]}))}\n\n"
    if answer.with_usage:
        yield f"data: {json.dumps(answer.write({}))}\n\n"
    yield "data: [DONE]\n\n"


def serve(engine: AsyncEngine, tokenizer: Any, name: str, grammars: Any = None) -> Starlette:
    """Return the application; ``grammars`` compile the schemas of answers."""

    async def complete(post: Any) -> Response:
        body = typed("the body", await post.json(), dict, "an object")
        if body.get("model") not in (None, name):
            raise HTTPException(404, f"the model {body['model']!r} does not exist, {name!r} does")
        chat = post.url.path.startswith("/v1/chat")
        answer = Answer(body, chat, tokenizer, grammars)
        streams = [engine.stream(request) for request in answer.requests]
        # when all is written, or the client has gone
        drop = BackgroundTask(lambda: [stream.close() for stream in streams])
        kind = "text/event-stream" if answer.stream else "application/json"
        return StreamingResponse(written(answer, streams), media_type=kind, background=drop)

    async def refuse(_: Any, error: Exception) -> Response:
        status, what = getattr(error, "status_code", 400), getattr(error, "detail", str(error))
        found = {"message": what[:1000], "type": "invalid_request_error", "param": None}
        code = "model_not_found" if what.startswith("the model ") else None
        return JSONResponse({"error": found | {"code": code}}, status)

    model = {"id": name, "object": "model", "created": 0, "owned_by": "specattn"}
    paths = "/v1/completions", "/v1/chat/completions"
    routes = [Route(path, complete, methods=["POST"]) for path in paths] + [
        Route("/v1/models", lambda _: JSONResponse({"object": "list", "data": [model]})),
        Route("/health", lambda _: JSONResponse({"status": "ok"})),
        Route("/metrics", lambda _: PlainTextResponse(measured(engine))),
    ]
    # a body of many brackets is too deep for Python's parser
    kinds = ValueError, TypeError, RecursionError, TemplateError, SpecAttnError, HTTPException
    return Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, refuse))


def measured(engine: AsyncEngine) -> str:
    """Return the engine's numbers as Prometheus reads them (docs/monitoring.md)."""
    now = engine.metrics()
    found = {f'finished_total{{reason="{why}"}}': count for why, count in now.finished.items()}
    for gained, count in enumerate(now.accept_lens):
        found[f'gained_total{{tokens="{gained}"}}'] = count
    for name, value in vars(now).items():
        if isinstance(value, int):
            found[name if name in GAUGES else f"{name}_total"] = value
    return "".join(f"specattn_{name} {value}\n" for name, value in found.items())


def run(app: Starlette, engine: AsyncEngine, **where: Any) -> None:
    """Serve until a signal: it drops all requests, and then nothing keeps the server."""
    # only a client that does not read is waited for
    server = uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=3, **where))
    leave = server.handle_exit
    server.handle_exit = lambda *signal: (Thread(target=engine.close).start(), leave(*signal))[1]
    server.run()


def main() -> None:
    """Serve a model; its drafts are what the text itself has said before."""
    parser = argparse.ArgumentParser(description="OpenAI's API over one engine.")
    parser.add_argument("model", help="a folder, a file FILE.gguf, or a name on the Hub")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--stream-interval", type=int, default=1, help="tokens of a part")
    given = parser.parse_args()
    target = HFTarget.from_pretrained(given.model)
    grammars = XGrammarCompiler(target.tokenizer, target) if XGrammarCompiler else None
    config = SpecConfig(4, 1, 5, max_context_len=2048, max_num_reqs=16)
    engine = Engine(target, LookupProposer(), config, tokenizer=target.tokenizer, processed=True)
    with AsyncEngine(engine, given.stream_interval) as server:
        app = serve(server, target.tokenizer, given.model, grammars)
        run(app, server, host=given.host, port=given.port)


if __name__ == "__main__":
    main()
