"""Clients of a server that speaks OpenAI's API: streams of completions, and when tokens came."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.load.client import Text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from specattn.engine.request import Request

HOST = "127.0.0.1"
HEAD = (
    "POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
    "Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
)
DATA, DONE = b"data: ", b"[DONE]"


@dataclass(eq=False)
class Answer(Text):
    """What a client was sent: when tokens came, without the tokens themselves.

    Parameters
    ----------
    text : str
        What they say.
    """

    text: str = ""

    def take(self, event: dict[str, Any], now: float) -> None:
        """Note an event of the stream, which has the count of all tokens so far."""
        if "choices" not in event:
            raise RuntimeError(f"a server answered {event}")
        self.text += "".join(choice["text"] for choice in event["choices"])
        if usage := event.get("usage"):
            new = usage["completion_tokens"] - sum(count for _, count in self.chunks)
            if new:
                self.chunks.append((now, new))


async def load(
    port: int, requests: Sequence[Request], clients: int, more: dict[str, Any]
) -> list[Answer]:
    """Have so many clients ask, each the next request when it has its answer.

    Parameters
    ----------
    port : int
        Where a server listens, on this machine.
    requests : sequence of Request
        Greedy ones; their answers are returned in their order.
    clients : int
        How many are in flight.
    more : dict
        Further fields of the requests' bodies.

    Raises
    ------
    RuntimeError
        If the server refuses a request.
    EOFError
        If it hangs up.
    """
    todo, answers = iter(requests), []

    async def client() -> None:
        for request in todo:
            answer = Answer(request, time.perf_counter())
            answers.append(answer)
            await _ask(port, answer, more)

    await asyncio.gather(*(client() for _ in range(clients)))
    return answers


async def _ask(port: int, answer: Answer, more: dict[str, Any]) -> None:
    """Send a request, and read its answer to the end."""
    body = {
        "prompt": list(answer.request.prompt),
        "max_tokens": answer.request.max_new_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    data = json.dumps(body | more).encode()
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(HEAD.format(host=HOST, length=len(data)).encode() + data)
        async for line in _lines(reader):
            if line.startswith(DATA) and line != DATA + DONE:
                answer.take(json.loads(line.removeprefix(DATA)), time.perf_counter())
    finally:
        writer.close()


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines of a body that comes in chunks."""
    head = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0] or b"chunked" not in head.lower():
        raise RuntimeError((head + await reader.read()).decode(errors="replace"))
    left = b""
    while size := int(await reader.readuntil(), 16):
        left += (await reader.readexactly(size + 2))[:-2]
        *whole, left = left.split(b"\n")
        for line in whole:
            yield line
