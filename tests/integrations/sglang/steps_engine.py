"""A whole `sglang.Engine` whose steps are this library's, on a CPU, as a program.

``python -m tests.integrations.sglang.steps_engine SETTING`` prints a line of JSON: what each part
of the setting's requests got. ``stubs/`` has what a CPU needs.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.integrations.sglang.engine import PAIR

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

TEXTS = (
    "def fibonacci(n):",
    "import os\nclass Reader:",
    "import os\nclass Reader:\n    def close(self):",
    "def main():\n    parser =",
    "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n\n"
    "    def __repr__(self):\n        return",
    "import sys\n\n\nfor line in",
)
#: How many tokens each writes: they join and end on their own.
LENGTHS = (8, 33, 20, 14, 27, 20)
#: Tokens of a context in which an answer ends.
CONTEXT = 96
#: How requests draw that name a seed.
DRAWN = (
    {"temperature": 1.0, "top_p": 0.9, "seed": 7},
    {"temperature": 0.7, "top_k": 20, "seed": 11},
)
#: How requests draw that name none, and how many there are.
PAIRS, DRAWS = {"temperature": 1.0, "top_k": 6}, 240
#: What requests ask of their logits, greedily, and by drawing.
PROCESSED: tuple[dict[str, Any], ...] = (
    {"frequency_penalty": 0.8, "presence_penalty": 0.4},
    {"repetition_penalty": 1.4},
    {"logit_bias": {"281": -4.0, "420": 3.0}},
    # the sixth token of the text may not end it before the fifteenth
    {"min_new_tokens": 14},
)
DRAWN_PROCESSED = {"temperature": 1.0, "min_p": 0.05, "frequency_penalty": 0.5, "seed": 5}
#: What constrained texts must match.
REGEX = r"[a-z_]+\([a-z, ]*\)[^(]*"
CROWD = 40


@dataclass(frozen=True)
class Setting:
    """Steps, topk, nodes, options of SGLang's, and the parts of requests that are asked for.

    ``fused`` is the variable that says which forwards are fused. ``trees`` are those of larger
    batches, and ``quantised`` says how the head is.
    """

    tree: tuple[int, int, int]
    parts: tuple[str, ...] = ("again", "drawn")
    options: dict[str, Any] = field(default_factory=dict)
    fused: str = "1"
    trees: str = ""
    quantised: str = ""


ALL = (
    "again",
    "drawn",
    "processed",
    "scored",
    "constrained",
    "streamed",
    "aborted",
    "refused",
    "pairs",
)
SETTINGS = {
    "tree": Setting((4, 5, 16), ALL),
    "chain": Setting((4, 1, 5), options={"disable_overlap_schedule": True}, fused="0"),
    "pages": Setting((4, 2, 8), options={"page_size": 16}),
    # all requests at once take a chain, fewer a tree
    "mixed": Setting((4, 5, 16), ("again", "drawn", "processed"), trees="3:2-1-3"),
    # a step wants more slots than SGLang's table has after the context
    "full": Setting(
        (5, 4, 8),
        ("crowd", "penalised", "endless"),
        {"max_total_tokens": 150, "context_length": CONTEXT},
    ),
    "float8 head": Setting((4, 5, 16), ("again",), quantised="fp8"),
    "ranks": Setting((4, 5, 16), ("drawn", "unseeded"), {"tp_size": 2}),
    "module ranks": Setting((4, 5, 16), ("drawn",), {"tp_size": 2}, fused="0"),
}


def options(setting: Setting) -> dict[str, Any]:
    """Return what `sglang.Engine` takes."""
    steps, topk, nodes = setting.tree
    return {
        "model_path": str(PAIR / "target"),
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "torch_native",
        "disable_cuda_graph": True,
        "grammar_backend": "xgrammar",
        "sampling_backend": "pytorch",
        "max_total_tokens": 2048,
        "max_running_requests": 3,
        # the longest prompt comes in two pieces
        "chunked_prefill_size": 32,
        "skip_server_warmup": True,
        "log_level": "error",
        "speculative_algorithm": "SPECATTN",
        "speculative_draft_model_path": str(PAIR / "draft"),
        "speculative_num_steps": steps,
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": nodes,
    } | setting.options


def prompts() -> list[list[int]]:
    """Return the prompts in the pair's tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(PAIR / "target" / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in TEXTS]


def sampling(params: dict[str, Any]) -> dict[str, Any]:
    """Return parameters as SGLang names them."""
    renamed = {"sampling_seed" if name == "seed" else name: value for name, value in params.items()}
    return {"temperature": 0} | renamed


SCORES = ("return_logprob", "top_logprobs_num", "token_ids_logprob")
SCORED = ("output_token_logprobs", "output_top_logprobs")


class Asking:
    """Requests to an engine, by the number of their prompt."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.prompts = engine, prompts()
        self.known: dict[str, Any] = {}

    async def one(self, at: int, new: int | None = None, **asked: Any) -> dict[str, Any]:
        """Ask once; return tokens, verify forwards, cached tokens and the end."""
        scores = {name: asked.pop(name) for name in SCORES if name in asked}
        out = await self.engine.async_generate(
            input_ids=self.prompts[at],
            sampling_params={
                "temperature": 0,
                "max_new_tokens": new or LENGTHS[at],
                "ignore_eos": True,
                **asked,
            },
            **scores,
        )
        meta = out["meta_info"]
        found = {name: meta[name] for name in SCORED if name in meta}
        return found | {
            "tokens": out["output_ids"],
            "verified": meta.get("spec_verify_ct"),
            "cached": meta["cached_tokens"],
            "end": meta["finish_reason"],
        }

    async def first(self) -> Any:
        """All prompts, greedily."""
        return await asyncio.gather(*(self.one(at) for at in range(len(TEXTS))))

    async def again(self) -> Any:
        """Some of them, from the radix cache; one ends early, one takes no step."""
        stop = self.known["first"][1]["tokens"][6]
        return await asyncio.gather(
            self.one(4),
            self.one(1, stop_token_ids=[stop], ignore_eos=False),
            self.one(2),
            self.one(0, 1),
        )

    async def drawn(self) -> Any:
        """A greedy request beside two that draw."""
        return await asyncio.gather(self.one(3), *(self.one(5, **sampling(one)) for one in DRAWN))

    async def processed(self) -> Any:
        """Requests that ask something of their logits, and one that does not."""
        stop = self.known["first"][1]["tokens"][5]
        first, *others, last = PROCESSED
        return await asyncio.gather(
            *(self.one(1, **asked) for asked in (first, *others)),
            self.one(1, stop_token_ids=[stop], ignore_eos=False, **last),
            self.one(5, **sampling(DRAWN_PROCESSED)),
            self.one(3),
        )

    async def penalised(self) -> Any:
        """More requests with a penalty than the pool holds."""
        return await asyncio.gather(*(self.one(1, **PROCESSED[0]) for _ in range(4)))

    async def scored(self) -> Any:
        """A request with log-probabilities and the best two, beside one that wants none."""
        asked = {"return_logprob": True, "top_logprobs_num": 2}
        return await asyncio.gather(
            self.one(1, **asked), self.one(3), self.one(5, **sampling(DRAWN[0]))
        )

    async def constrained(self) -> Any:
        """Requests whose texts must match something, one of which draws, and one that is free."""
        return await asyncio.gather(
            self.one(1, regex=REGEX), self.one(5, regex=REGEX, **sampling(DRAWN[0])), self.one(3)
        )

    async def unseeded(self) -> Any:
        """Requests that draw and name no seed."""
        return await asyncio.gather(*(self.one(5, temperature=1.0) for _ in range(3)))

    async def streamed(self) -> Any:
        """The tokens that had come whenever some came."""
        asked = {"temperature": 0, "max_new_tokens": LENGTHS[1], "ignore_eos": True}
        coming = await self.engine.async_generate(
            input_ids=self.prompts[1], sampling_params=asked, stream=True
        )
        return [out["output_ids"] async for out in coming]

    async def aborted(self) -> Any:
        """How long requests ended that were aborted, then all prompts again."""
        asked = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
        started = [
            asyncio.create_task(
                self.engine.async_generate(input_ids=ids, sampling_params=asked, rid=f"long-{at}")
            )
            for at, ids in enumerate(self.prompts)
        ]
        await asyncio.sleep(1)
        for at in range(len(started)):
            self.engine.tokenizer_manager.abort_request(rid=f"long-{at}")
        ended = await asyncio.gather(*started)
        kinds = [out["meta_info"]["finish_reason"]["type"] for out in ended]
        return {"ends": kinds, "after": await self.first()}

    async def refused(self) -> Any:
        """A request that is served, and the errors of those beside it."""
        many = {"logit_bias": dict.fromkeys(map(str, range(600)), 1.0)}
        # SGLang 0.5.15 fails where one request of a prompt batch asks for this and another does not
        named = {"return_logprob": True, "token_ids_logprob": [5]}
        pair = await asyncio.gather(self.one(2), self.one(3, **many), return_exceptions=True)
        alone = await asyncio.gather(self.one(3, **named), return_exceptions=True)
        return [pair[0], str(pair[1]), str(alone[0])]

    async def pairs(self) -> Any:
        """Two tokens of many requests of one prompt, none of which names a seed."""
        out = await asyncio.gather(*(self.one(0, 2, **PAIRS) for _ in range(DRAWS)))
        return [one["tokens"] for one in out]

    async def endless(self) -> Any:
        """An answer that goes on to the end of the context."""
        return await self.one(0, max_new_tokens=None)

    async def crowd(self) -> Any:
        """Requests that come and end at random."""
        chance = random.Random(0)

        async def one(at: int, new: int, seconds: float) -> Any:
            await asyncio.sleep(seconds)
            return {"at": at, "new": new, **await self.one(at, new)}

        drawn = [
            (chance.randrange(len(TEXTS)), chance.randrange(2, 25), chance.uniform(0, 3))
            for _ in range(CROWD)
        ]
        return await asyncio.gather(*(one(*asked) for asked in drawn))


def main(setting: str) -> None:
    """Run all parts of a setting."""
    import sglang

    chosen = SETTINGS[setting]
    ranks = chosen.options.get("tp_size", 1)
    # SGLang wants a core named for each rank where they share a memory node
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(ranks)))
    os.environ["SPECATTN_SGLANG_FUSED"] = chosen.fused
    os.environ["SPECATTN_SGLANG_TREES"] = chosen.trees
    os.environ["SPECATTN_SGLANG_DRAFT_QUANTIZATION"] = chosen.quantised
    engine = sglang.Engine(**options(chosen))
    asking = Asking(engine)
    try:
        for part in ("first", *chosen.parts):
            ask: Callable[[], Awaitable[Any]] = getattr(asking, part)
            asking.known[part] = engine.loop.run_until_complete(ask())
    finally:
        engine.shutdown()
    counted = Path(os.environ.get("SPECATTN_COUNTS", ""))
    if counted.is_file():
        asking.known["counts"] = json.loads(counted.read_text())
    print("RESULT " + json.dumps(asking.known), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
