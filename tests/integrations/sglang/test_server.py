"""SGLang's server, started by one command, as OpenAI's own client finds it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from tests.integrations.sglang.engine import PAIR
from tests.integrations.sglang.steps_engine import TEXTS
from tests.integrations.sglang.test_algorithm import ROOT, VARIABLES, plain

pytestmark = pytest.mark.sglang
COMMAND = f"""
-m sglang.launch_server --model-path {PAIR / "target"} --device cpu --dtype float32
--attention-backend torch_native --disable-cuda-graph --grammar-backend none
--sampling-backend pytorch --max-total-tokens 2048 --max-running-requests 3
--skip-server-warmup --log-level info --speculative-algorithm SPECATTN
--speculative-draft-model-path {PAIR / "draft"} --speculative-num-steps 4
--speculative-eagle-topk 5 --speculative-num-draft-tokens 16
"""
#: Tokens of an answer, and seconds that a start may take on a busy machine.
NEW, START = 24, 600


def answers(address: str) -> bool:
    try:
        with urlopen(f"{address}/health", timeout=5) as response:
            return response.status == 200
    except (URLError, OSError):
        return False


def free_port() -> int:
    """Return a port that nobody listens at; SGLang adds 10000 for another one."""
    for port in range(20000 + os.getpid() % 20000, 50000):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A running server: its address and its log."""
    port = free_port()
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *COMMAND.split(), "--port", str(port)],
            cwd=ROOT,
            env=os.environ | VARIABLES | {"SGLANG_CPU_OMP_THREADS_BIND": "0"},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    address, until = f"http://127.0.0.1:{port}", time.monotonic() + START
    try:
        while not answers(address):
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < until
            time.sleep(1)
        yield address, log
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def client(server):
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{server[0]}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def wanted() -> list[str]:
    """What plain decoding writes after each text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(PAIR / "target" / "tokenizer.json"))
    return [tokenizer.decode(tokens[:NEW]) for tokens in plain()]


def ask(client, at: int, **asked):
    return client.completions.create(
        model="default",
        prompt=TEXTS[at],
        max_tokens=NEW,
        temperature=0,
        extra_body={"ignore_eos": True},
        **asked,
    )


def test_the_log_says_what_steps_are(server):
    lines = [line for line in Path(server[1]).read_text().splitlines() if "SPECATTN: " in line]
    text = "\n".join(lines)
    for part in ("target's forwards are fused", "head's forwards are fused", "steps 4-5-16"):
        assert part in text


def test_answers_whole_and_streamed(client, wanted):
    assert ask(client, 1).choices[0].text == wanted[1]
    pieces = [piece.choices[0].text for piece in ask(client, 1, stream=True) if piece.choices]
    assert len(pieces) > 2
    assert "".join(pieces) == wanted[1]


def test_answers_to_many_at_once(client, wanted):
    with ThreadPoolExecutor(len(TEXTS)) as pool:
        found = list(pool.map(lambda at: ask(client, at).choices[0].text, range(len(TEXTS))))
    assert found == wanted


def test_an_answer_ends_at_a_string(client, wanted):
    end = wanted[1][10:14]
    answer = ask(client, 1, stop=[end]).choices[0]
    assert answer.text == wanted[1][: wanted[1].index(end)]
    assert answer.finish_reason == "stop"


def test_a_client_that_leaves_disturbs_nobody(client, wanted):
    leaving = ask(client, 4, stream=True)
    next(iter(leaving))
    leaving.close()
    assert ask(client, 5).choices[0].text == wanted[5]


def test_log_probabilities(client, wanted):
    answer = ask(client, 2, logprobs=2).choices[0]
    assert answer.text == wanted[2]
    found = answer.logprobs
    assert len(found.token_logprobs) == NEW
    # greedy tokens are the most probable ones
    for own, best in zip(found.token_logprobs, found.top_logprobs, strict=True):
        assert own == pytest.approx(max(best.values()), abs=1e-5)


def test_what_is_refused_is_an_error_of_the_client(client, wanted):
    import openai

    with pytest.raises(openai.BadRequestError, match="SPECATTN does not serve logit_bias"):
        ask(client, 3, logit_bias=dict.fromkeys(map(str, range(600)), 1))
    assert ask(client, 2).choices[0].text == wanted[2]
