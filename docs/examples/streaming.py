"""One engine for many clients: texts come piece by piece, on threads and in asyncio at once.

    python docs/examples/streaming.py

from the project's root, after `pip install '.[models]'` there; with only its dependencies, put
`PYTHONPATH=.` before it.
"""

from __future__ import annotations

import asyncio
from contextlib import closing
from importlib.resources import files
from typing import TYPE_CHECKING

import torch

from specattn import AsyncEngine, Engine, Request, SpecConfig
from specattn.models import HFTarget, load_draft

if TYPE_CHECKING:
    from specattn.engine.serving import RequestStream

PAIR = files("specattn") / "pair"
PROMPTS = ["def read_config(path):", "class Point:\n    def __init__(self, x, y):", "import os\n"]


async def read(name: str, stream: RequestStream) -> str:
    """Return a text, printing its pieces as they come."""
    text = ""
    async for output in stream:
        text += output.text
        print(f"{name}: {output.text!r} {output.finish_reason}")
    return text


def read_on_a_thread(name: str, stream: RequestStream) -> str:
    """The same without asyncio."""
    text = ""
    for output in stream:
        text += output.text
        print(f"{name}: {output.text!r} {output.finish_reason}")
    return text


async def hang_up(stream: RequestStream) -> None:
    """Read a little, and drop the request: its row and slots are free at once."""
    with closing(stream):
        async for _output in stream:
            break


async def serve(engine: AsyncEngine, requests: list[Request]) -> list[str]:
    """Return the texts of clients that come together; one more goes away soon."""
    first, *others = (engine.stream(request) for request in requests)
    *texts, _ = await asyncio.gather(
        asyncio.to_thread(read_on_a_thread, "a thread", first),
        *(read(f"task {at}", stream) for at, stream in enumerate(others)),
        hang_up(engine.stream(requests[0])),
    )
    return texts


def main(new_tokens: int = 48) -> list[str]:
    """Return the texts that continue the prompts."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = HFTarget.from_pretrained(str(PAIR / "target"), dtype=torch.float32, device=device)
    draft = load_draft(str(PAIR / "draft"), target)
    engine = Engine(
        target.with_features(draft.features),
        draft,
        SpecConfig(num_steps=4, topk=2, num_draft_tokens=8, max_context_len=512, max_num_reqs=2),
        tokenizer=target.tokenizer,
    )
    # a thread of its own calls the engine until the block ends
    with AsyncEngine(engine) as server:
        return asyncio.run(serve(server, [Request(text, new_tokens) for text in PROMPTS]))


if __name__ == "__main__":
    main()
