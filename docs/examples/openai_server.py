"""OpenAI's API over one engine: `python docs/examples/openai_server.py FOLDER_OR_HUB_NAME`.

From the project's root, after `pip install '.[models]' starlette uvicorn` there. It is an example
of `AsyncEngine`: products serve through SGLang (docs/sglang.md).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from jinja2 import TemplateError
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from specattn import AsyncEngine, Engine, Request, RequestOutput, SamplingParams, SpecConfig
from specattn.errors import SpecAttnError
from specattn.models import HFTarget
from specattn.speculative.lookup import LookupProposer

FINISH = {"": None, "eos": "stop", "context": "length"}  # the others are called as OpenAI does


class Answer:
    """The requests of one answer, and the words in which OpenAI gives it."""

    def __init__(self, body: dict[str, Any], chat: bool, tokenizer: Any) -> None:
        asked = {"temperature": 1.0} | {k: v for k, v in body.items() if v is not None}
        take, self.chat, self.tokenizer = asked.pop, chat, tokenizer
        self.stream, options = bool(take("stream", False)), take("stream_options", {})
        self.with_usage = not self.stream or options.get("include_usage", False)
        kind = "chat.completion" + ".chunk" * self.stream if chat else "text_completion"
        self.head = {"id": hex(time.time_ns()), "object": kind, "created": int(time.time())}
        self.head["model"] = take("model", "")
        prompts = self.prompts_of(take("messages" if chat else "prompt", ""))
        self.counts = [sum(map(len, prompts)), 0]
        most = take("max_tokens", 2**20 if chat else 16)  # a chat goes on to the context's end
        most, n, stop = take("max_completion_tokens", most), take("n", 1), take("stop", ())
        scores, top = take("logprobs", None), take("top_logprobs", 0)
        scores = (top if scores else None) if chat else scores
        bias = {int(token): value for token, value in dict(take("logit_bias", {})).items()}
        # what is left has to be fields of these, which say what is wrong
        sampling = SamplingParams(**asked, logit_bias=bias, logprobs=scores)
        made = [Request(prompt, most, sampling, stop=stop) for prompt in prompts]
        self.requests = [sample for one in made for sample in one.samples(n)]

    def prompts_of(self, given: Any) -> list[list[int]]:
        """Return the tokens of a chat up to its answer, or of texts to continue."""
        encode, template = self.tokenizer.encode, self.tokenizer.apply_chat_template
        if self.chat:
            given = template(given, add_generation_prompt=True, return_dict=False)
        if not given or isinstance(given, str) or isinstance(given[0], int):
            given = [given]
        return [encode(one) if isinstance(one, str) else one for one in given]

    def write(self, outputs: dict[int, list[RequestOutput]]) -> dict[str, Any]:
        """Return what choices have got, and the usage at the end."""
        self.counts[1] += sum(len(one.tokens) for parts in outputs.values() for one in parts)
        found = self.head | {"choices": [self.choice(*pair) for pair in outputs.items()]}
        if not (self.stream and outputs):
            names = "prompt_tokens", "completion_tokens", "total_tokens"
            found["usage"] = dict(zip(names, [*self.counts, sum(self.counts)], strict=True))
        return found

    def choice(self, at: int, parts: list[RequestOutput]) -> dict[str, Any]:
        """Return what a choice has got."""
        spell, text = self.tokenizer.decode, "".join(one.text for one in parts)
        rows = [
            (spell(token), score.value, {spell(x): p for x, p in score.alternatives.items()})
            for one in parts
            for token, score in zip(one.tokens, one.logprobs, strict=False)
        ]
        scores: Any = {"content": [entry(*row) for row in rows]}
        own: Any = {"delta" if self.stream else "message": {"role": "assistant", "content": text}}
        if not self.chat:
            names, own = ("tokens", "token_logprobs", "top_logprobs"), {"text": text}
            scores = {name: [row[i] for row in rows] for i, name in enumerate(names)}
        reason = FINISH.get(parts[-1].finish_reason, parts[-1].finish_reason)
        return own | {"index": at, "finish_reason": reason, "logprobs": scores if rows else None}


def entry(token: str, value: float, top: dict[str, float]) -> dict[str, Any]:
    """Return a token of a chat, with its alternatives."""
    tops = [{"token": other, "logprob": x} for other, x in top.items()]
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


def serve(engine: AsyncEngine, tokenizer: Any, name: str) -> Starlette:
    """Return the application."""

    async def complete(post: Any) -> Response:
        answer = Answer(dict(await post.json()), post.url.path.startswith("/v1/chat"), tokenizer)
        streams = [engine.stream(request) for request in answer.requests]
        # when all is written, or the client has gone
        drop = BackgroundTask(lambda: [stream.close() for stream in streams])
        kind = "text/event-stream" if answer.stream else "application/json"
        return StreamingResponse(written(answer, streams), media_type=kind, background=drop)

    async def models(_: Any) -> Response:
        model = {"id": name, "object": "model", "created": 0, "owned_by": "specattn"}
        return JSONResponse({"object": "list", "data": [model]})

    async def refuse(_: Any, error: Exception) -> Response:
        found = {"message": str(error), "type": "invalid_request_error", "code": None}
        return JSONResponse({"error": found | {"param": None}}, 400)

    paths = "/v1/completions", "/v1/chat/completions"
    routes = [Route("/v1/models", models), *(Route(p, complete, methods=["POST"]) for p in paths)]
    refused = dict.fromkeys((ValueError, TypeError, TemplateError, SpecAttnError), refuse)
    return Starlette(routes=routes, exception_handlers=refused)


def main(model: str) -> None:
    """Serve a model; its drafts are what the text itself has said before."""
    target = HFTarget.from_pretrained(model)
    config = SpecConfig(4, 1, 5, max_context_len=2048, max_num_reqs=16)
    engine = Engine(target, LookupProposer(), config, tokenizer=target.tokenizer, processed=True)
    with AsyncEngine(engine) as server:
        uvicorn.run(serve(server, target.tokenizer, model), port=8000)


if __name__ == "__main__":
    main(sys.argv[1])
