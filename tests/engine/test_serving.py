"""One engine, many threads and tasks: their tokens are those of `generate`, whoever hangs up."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from functools import reduce
from threading import Event, current_thread

import pytest
import torch

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.engine.serving import AsyncEngine
from specattn.errors import CapacityError, UnsupportedError
from specattn.speculative.sampling.params import SamplingParams
from tests.engine.test_engine_failures import unharmed
from tests.grammars import Remainders
from tests.tiny import dense_greedy

CONTEXT = 96
PROMPTS = [[7 * at % 61 for at in range(start, start + 5 + 3 * start)] for start in range(6)]
REQUESTS = [
    Request(
        prompt,
        9 + 4 * at,
        SamplingParams(0.8 * (at % 2), seed=at, logprobs=2 if at > 3 else None),
    )
    for at, prompt in enumerate(PROMPTS)
]
# one that does not end before it is dropped, unless a test waits for that
LONG = Request([3, 14, 15], 90)


def text_of(tokens: list[int]) -> str:
    return "".join(f"{token} " for token in tokens)


def make(models, rows=3, *, tree=(3, 4, 9), **options) -> Engine:
    config = SpecConfig(*tree, CONTEXT, rows)
    settings = {"backend": "torch_native", "buckets": (rows,), "detokenize": text_of} | options
    return Engine(*models, config, **settings)


@pytest.fixture(scope="module")
def expected(models):
    return [result.tokens for result in make(models).generate(REQUESTS)]


def collect(stream) -> list[int]:
    """All tokens of a stream that ends; its pieces are sound."""
    outputs = list(stream)
    assert all(output.tokens or output.finish_reason for output in outputs)
    assert [bool(output.finish_reason) for output in outputs] == [False] * (len(outputs) - 1) + [
        True
    ]
    tokens = [token for output in outputs for token in output.tokens]
    assert "".join(output.text for output in outputs) == text_of(tokens)
    # the first token comes from the prompt
    assert sum(n for output in outputs for n in output.accept_lens) == len(tokens) - 1
    assert outputs[-1].finished_at >= outputs[-1].first_token_at >= outputs[0].started_at > 0
    return tokens


async def acollect(stream) -> list[int]:
    return collect([output async for output in stream])


class Patched:
    """Calls of a method of an engine: one waits for `go`, one of them raises an error."""

    def __init__(self, monkeypatch, engine, path: str, at: int = 0, error=None, free=0) -> None:
        *parts, name = path.split(".")
        owner = reduce(getattr, parts, engine)
        self.inside, self._go = Event(), Event()
        self._call, self._at, self._error, self._count = getattr(owner, name), at, error, 0
        # calls that need not wait
        self._free = free
        monkeypatch.setattr(owner, name, self)

    def go(self) -> None:
        self._go.set()

    def __call__(self, *args, **options):
        self._count += 1
        if self._count > self._free:
            self.inside.set()
            assert self._go.wait(600)
        if self._count == self._at:
            raise self._error
        return self._call(*args, **options)


@pytest.mark.parametrize("tree", [(3, 4, 9), (3, 1, 4), (0, 1, 1)], ids=["tree", "chain", "plain"])
def test_threads_and_tasks_get_the_tokens_of_generate(models, tree):
    """Twice as many at once as there are rows, from both sides."""
    engine = make(models, tree=tree)
    expected = [result.tokens for result in engine.generate(REQUESTS)]

    async def program(server):
        streams = [acollect(server.stream(request)) for request in REQUESTS]
        return await asyncio.gather(*streams)

    with AsyncEngine(engine) as server, ThreadPoolExecutor(7) as threads:
        tasks = threads.submit(asyncio.run, program(server))
        mine = [
            threads.submit(lambda one=request: collect(server.stream(one))) for request in REQUESTS
        ]
        assert [one.result() for one in mine] == expected
        assert tasks.result() == expected
    unharmed(engine)


def test_log_probabilities_come_with_their_tokens(models):
    engine, request = make(models), REQUESTS[-1]
    (whole,) = engine.generate([request])
    with AsyncEngine(engine) as server:
        outputs = list(server.stream(request))
    assert all(len(output.logprobs) == len(output.tokens) for output in outputs)
    assert [one for output in outputs for one in output.logprobs] == whole.logprobs
    assert len(whole.logprobs) == request.max_new_tokens


def test_a_grammar_is_made_where_its_request_is_submitted(models):
    """Nobody else waits for it, or for its error."""
    engine, prompt, makers = make(models), list(LONG.prompt), []

    def grammar():
        makers.append(current_thread())
        return Remainders(prompt)

    def broken():
        raise RuntimeError("no such schema")

    constrained = Request(prompt, 20, grammar=grammar)
    (whole,) = engine.generate([constrained])
    with AsyncEngine(engine) as server:
        makers.clear()
        beside, stream = server.stream(REQUESTS[2]), server.stream(constrained)
        with pytest.raises(RuntimeError, match="no such schema"):
            server.stream(Request(prompt, grammar=broken))
        assert collect(stream) == whole.tokens != dense_greedy(models[0], prompt, 20)
        assert collect(beside) == dense_greedy(models[0], PROMPTS[2], 17)
    assert makers == [current_thread()]
    unharmed(engine)


def test_one_thread_may_read_many_streams(models, expected):
    """They are submitted before the first one is read."""
    engine = make(models)
    with AsyncEngine(engine) as server:
        streams = [server.stream(request) for request in REQUESTS]
        assert [collect(stream) for stream in reversed(streams)] == expected[::-1]
    unharmed(engine)


def test_what_nobody_reads_is_merged(models):
    """With one row, the first request has ended when the second one has."""
    engine = make(models, rows=1)
    with AsyncEngine(engine) as server:
        slow, quick = server.stream(LONG), server.stream(REQUESTS[0])
        assert collect(quick) == dense_greedy(models[0], PROMPTS[0], 9)
        (output,) = slow
        assert output.tokens == dense_greedy(models[0], LONG.prompt, 90)
        assert output.text == text_of(output.tokens)
        assert output.finish_reason == "length"
        assert not list(slow), "it has ended"


@pytest.mark.parametrize("tree", [(3, 1, 4), (0, 1, 1)], ids=["chain", "plain"])
def test_a_stream_gets_so_many_tokens_at_once(models, tree):
    """But its first token, which does not wait, and its last part."""
    with AsyncEngine(make(models, tree=tree), stream_interval=7) as server:
        streams = [server.stream(Request(prompt, 43)) for prompt in PROMPTS]
        found = [list(stream) for stream in streams]
    for prompt, parts in zip(PROMPTS, found, strict=True):
        assert collect(parts) == dense_greedy(models[0], prompt, 43)
        assert all(len(part.tokens) >= 7 for part in parts[1:-1])
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match="stream_interval"):
            AsyncEngine(make(models), stream_interval=wrong)


def test_text_ends_before_a_stop_string(models):
    tokens = dense_greedy(models[0], LONG.prompt, 30)
    end = next(at for at in range(8, 30) if tokens.index(tokens[at]) == at)
    stop = f" {tokens[end]} "
    with AsyncEngine(make(models)) as server:
        outputs = list(server.stream(Request(LONG.prompt, 30, stop=(stop,))))
    assert "".join(output.text for output in outputs) == text_of(tokens[:end]).removesuffix(" ")
    assert [token for output in outputs for token in output.tokens] == tokens[: end + 1]
    assert outputs[-1].finish_reason == "stop"


def test_what_might_have_begun_a_stop_string_ends_the_text(models):
    """No more tokens come: it is handed out with the last ones."""
    tokens = dense_greedy(models[0], LONG.prompt, 9)
    request = Request(LONG.prompt, 9, stop=[f"{tokens[-1]} and on"])
    with AsyncEngine(make(models)) as server:
        *before, last = server.stream(request)
    assert last.finish_reason == "length"
    assert last.text.endswith(f"{tokens[-1]} ")
    assert "".join(output.text for output in (*before, last)) == text_of(tokens)


def test_the_text_of_the_least_length_is_whole(models):
    """Though every token would be a stop string."""
    tokens = dense_greedy(models[0], LONG.prompt, 10)
    request = Request(
        LONG.prompt, 30, stop=[f"<{token}>" for token in set(tokens)], min_new_tokens=9
    )
    engine = make(models, detokenize=lambda ids: "".join(f"<{token}>" for token in ids))
    with AsyncEngine(engine) as server:
        outputs = list(server.stream(request))
    assert [token for output in outputs for token in output.tokens] == tokens
    assert "".join(output.text for output in outputs) == "".join(f"<{t}>" for t in tokens[:9])


def test_without_detokenize_there_is_no_text(models):
    with AsyncEngine(make(models, detokenize=None)) as server:
        outputs = list(server.stream(REQUESTS[0]))
    assert {output.text for output in outputs} == {""}
    tokens = [token for output in outputs for token in output.tokens]
    assert tokens == dense_greedy(models[0], PROMPTS[0], 9)


def interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("leave", ["close", "delete", "interrupt"])
def test_who_hangs_up_frees_its_row(models, leave, monkeypatch):
    """The other waits for it: there is one row."""
    engine = make(models, rows=1)
    held = Patched(monkeypatch, engine, "step", free=1)
    with AsyncEngine(engine) as server:
        stream = server.stream(LONG)
        result = stream._feed.result if next(stream).tokens else None
        waiting = server.stream(REQUESTS[2])
        if leave == "close":
            stream.close()
            stream.close()
            assert not list(stream)
        if leave == "interrupt":
            with monkeypatch.context() as patch:
                patch.setattr(Future, "result", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    next(stream)
            assert not list(stream)
        del stream
        gc.collect()
        held.go()
        assert collect(waiting) == dense_greedy(models[0], PROMPTS[2], 17)
    assert result.finish_reason == "dropped"
    assert 0 < len(result.tokens) < 9
    unharmed(engine, rows=1)


def test_who_hangs_up_while_it_waits_never_runs(models, monkeypatch):
    engine = make(models, rows=1)
    held = Patched(monkeypatch, engine, "step", free=1)
    with AsyncEngine(engine) as server:
        long, waiting, last = (server.stream(one) for one in (LONG, LONG, REQUESTS[0]))
        next(long)
        waiting.close()
        long.close()
        held.go()
        assert collect(last) == dense_greedy(models[0], PROMPTS[0], 9)
        assert waiting._feed.result.finish_reason == "dropped"
        assert not waiting._feed.result.tokens
    unharmed(engine, rows=1)


def test_a_stream_that_nobody_read_to_its_end_is_not_run_again(models, monkeypatch):
    """It is closed when its request has ended; what comes after is served."""
    engine = make(models, rows=1)
    waited, wait = [], engine.scheduler.wait

    def noted(requests):
        waited.extend(requests)
        return wait(requests)

    monkeypatch.setattr(engine.scheduler, "wait", noted)
    with AsyncEngine(engine) as server:
        unread, second = server.stream(REQUESTS[0]), server.stream(REQUESTS[2])
        collect(second)
        assert unread._feed.result.finish_reason == "length"
        unread.close()
        assert not list(unread)
        assert collect(server.stream(REQUESTS[0])) == dense_greedy(models[0], PROMPTS[0], 9)
    assert waited == [REQUESTS[0], REQUESTS[2], REQUESTS[0]]
    assert unread._feed.result.tokens == dense_greedy(models[0], PROMPTS[0], 9)
    unharmed(engine, rows=1)


def test_a_task_that_is_cancelled_drops_its_request(models, expected, monkeypatch):
    engine = make(models, rows=2)
    held = Patched(monkeypatch, engine, "step", free=1)

    async def read(stream, begun):
        async for _ in stream:
            begun.set()

    async def program(server):
        stream, begun = server.stream(LONG), asyncio.Event()
        task = asyncio.create_task(read(stream, begun))
        await begun.wait()
        others = [asyncio.create_task(acollect(server.stream(one))) for one in REQUESTS]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        held.go()
        assert [output async for output in stream] == []
        return stream._feed.result, await asyncio.gather(*others)

    with AsyncEngine(engine) as server:
        dropped, others = asyncio.run(program(server))
    assert others == expected
    assert dropped.finish_reason == "dropped"
    unharmed(engine, rows=2)


def test_a_loop_that_ends_leaves_the_engine_to_others(models, monkeypatch):
    """`asyncio.run` cancels what still reads when it returns."""
    engine = make(models, rows=1)
    held = Patched(monkeypatch, engine, "step")

    async def program(server):
        stream = server.stream(LONG)
        reads = asyncio.create_task(acollect(stream))
        await asyncio.sleep(0)
        assert not reads.done()
        return stream._feed

    with AsyncEngine(engine) as server:
        feed = asyncio.run(program(server))
        held.go()
        assert collect(server.stream(REQUESTS[0])) == dense_greedy(models[0], PROMPTS[0], 9)
    assert feed.result.finish_reason == "dropped"
    unharmed(engine, rows=1)


@pytest.mark.parametrize(
    ("name", "at"),
    [("_run_prompts", 2), ("_launch_group", 3), ("_collect_group", 2)],
)
def test_what_the_engine_raises_reaches_every_consumer(models, expected, monkeypatch, name, at):
    """Those that wait as well, on threads and in asyncio; then it serves others."""
    engine = make(models)
    held = Patched(monkeypatch, engine._admission, "admit_waiting")
    owner = engine._flight if hasattr(engine._flight, name) else engine._admission
    fails = Patched(monkeypatch, owner, name, at, RuntimeError("the device is lost"))
    fails.go()

    async def read(stream):
        with pytest.raises(RuntimeError, match="the device is lost"):
            await acollect(stream)
        assert [output async for output in stream] == []

    with AsyncEngine(engine) as server, ThreadPoolExecutor(1) as threads:
        first, *requests = (Request([*LONG.prompt, at], 80) for at in range(6))
        streams = [server.stream(first)]
        # else a second one may come before that, and with it what fails, and others after it
        assert held.inside.wait(600)
        streams += [server.stream(request) for request in requests]
        task = threads.submit(asyncio.run, read(streams.pop()))
        # what fails comes after the first step, and all other requests with that
        held.go()
        for stream in streams:
            with pytest.raises(RuntimeError, match="the device is lost"):
                list(stream)
            assert not list(stream), "it has ended"
        task.result()
        assert [collect(server.stream(one)) for one in REQUESTS] == expected
    monkeypatch.undo()
    unharmed(engine)


def test_an_engine_that_is_lost_says_so_to_all(models, monkeypatch):
    """Nor its books can be put right: the thread ends."""
    engine = make(models)
    held = Patched(monkeypatch, engine, "step", 1, RuntimeError("the device is lost"))
    undo = Patched(monkeypatch, engine, "_forget", 1, RuntimeError("there is no device"))
    undo.go()
    server = AsyncEngine(engine)
    first = server.stream(LONG)
    assert held.inside.wait(600)
    late = server.stream(LONG)
    held.go()
    for stream in (first, late):
        with pytest.raises(RuntimeError, match="there is no device"):
            list(stream)
    server.close()
    with pytest.raises(ValueError, match="this AsyncEngine is closed") as closed:
        server.stream(LONG)
    assert "there is no device" in str(closed.value.__cause__)
    monkeypatch.undo()
    engine.clear()
    unharmed(engine)


def test_one_that_does_not_fit_by_itself_is_nobody_elses_error(models):
    """Be it the prompt, or what it grows into."""
    for prompt in (list(range(50)), [3, 1]):
        engine = make(models, num_slots=41)
        with AsyncEngine(engine) as server:
            before, large, after = (
                server.stream(one) for one in (REQUESTS[0], Request(prompt, 90), REQUESTS[2])
            )
            assert collect(before) == dense_greedy(models[0], PROMPTS[0], 9)
            with pytest.raises(CapacityError, match="more pages of 1 KV slots are needed"):
                list(large)
            assert collect(after) == dense_greedy(models[0], PROMPTS[2], 17)
        unharmed(engine)


def test_a_text_that_cannot_be_made_is_an_error_of_its_consumer(models, monkeypatch):
    """It is made on the consumer's thread; its request is dropped."""

    def broken(tokens):
        if tuple(tokens[:3]) == LONG.prompt:
            raise RuntimeError("no such character")
        return text_of(tokens)

    engine = make(models, rows=1, detokenize=broken)
    held = Patched(monkeypatch, engine, "step", free=1)
    with AsyncEngine(engine) as server:
        stream, other = server.stream(LONG), server.stream(REQUESTS[0])
        with pytest.raises(RuntimeError, match="no such character"):
            list(stream)
        held.go()
        assert collect(other) == dense_greedy(models[0], PROMPTS[0], 9)
        assert stream._feed.result.finish_reason == "dropped"
    unharmed(engine, rows=1)


def test_closing_ends_what_runs_and_waits(models, monkeypatch):
    """Consumers get the tokens there are, and the reason; the engine is its owner's again."""
    engine = make(models, rows=1)
    held = Patched(monkeypatch, engine, "step", free=1)
    server = AsyncEngine(engine)
    running, waiting = server.stream(LONG), server.stream(LONG)
    assert held.inside.wait(600)
    with ThreadPoolExecutor(2) as threads:
        closes = [threads.submit(server.close) for _ in range(2)]
        held.go()
        for close in closes:
            close.result()
    with pytest.raises(ValueError, match="this AsyncEngine is closed"):
        server.stream(LONG)
    tokens = [token for output in running for token in output.tokens]
    assert tokens == dense_greedy(models[0], LONG.prompt, len(tokens))
    (output,) = waiting
    assert (output.tokens, output.finish_reason) == ([], "dropped")
    monkeypatch.undo()
    unharmed(engine, rows=1)


AT_EXIT = """
import atexit
from specattn.engine.serving import AsyncEngine
from tests.engine.test_serving import LONG, make
from tests.tiny import TinyDraft, TinyTarget

atexit.register(lambda: print(len(stream._feed.result.tokens), stream._feed.result.finish_reason))
server = AsyncEngine(make((TinyTarget(), TinyDraft())))
steps = iter([server._engine.step])
# the first one has the first token; it never ends by itself
server._engine.step = lambda **options: next(steps, lambda **_: [])(**options)
stream = server.stream(LONG)
next(stream)
"""


def test_a_program_that_forgets_to_close_ends():
    """What Python is told first at its exit, it does last: the request has been dropped by then."""
    run = [sys.executable, "-c", AT_EXIT]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "1 dropped\n"), done.stderr


def test_an_engine_has_one_owner(models):
    engine = make(models)
    with AsyncEngine(engine) as server:
        for call in (
            lambda: engine.generate([LONG]),
            lambda: engine.add([LONG]),
            engine.step,
            engine.clear,
            lambda: AsyncEngine(engine),
        ):
            with pytest.raises(ValueError, match="from one thread at a time: a call of another"):
                call()
        assert collect(server.stream(REQUESTS[0])) == dense_greedy(models[0], PROMPTS[0], 9)
    engine.add([LONG])
    with pytest.raises(ValueError, match="engine must have no requests"):
        AsyncEngine(engine)
    engine.clear()
    unharmed(engine)


def test_requests_that_cannot_run_are_refused_where_they_are_submitted(models):
    engine = make(models, detokenize=None)
    with AsyncEngine(engine) as server:
        for request, message in (
            (Request([61]), r"prompt tokens must be 0\.\.60"),
            (Request([5], stop=("x",)), "stop strings need detokenize"),
            ([5], "requests must be a sequence of Request"),
        ):
            with pytest.raises(ValueError, match=message):
                server.stream(request)
    unharmed(engine)


def test_sharded_weights_are_refused_by_name(models, monkeypatch):
    engine = make(models)
    monkeypatch.setattr(engine, "ranks", object())
    with pytest.raises(UnsupportedError, match=r"AsyncEngine.*weights are sharded"):
        AsyncEngine(engine)


@pytest.mark.gpu
def test_a_thread_replays_what_another_has_captured(models):
    """On the stream that was current there, be it no default one."""
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        engine = make(models, backend="triton", sampled=True, processed=True, buckets=(1, 3))
        expected = [result.tokens for result in engine.generate(REQUESTS)]
        stats = engine.decoder(engine.config).runner.stats
        before = sum(stats.replays.values())
        with AsyncEngine(engine) as server, ThreadPoolExecutor(6) as threads:
            streams = [server.stream(request) for request in REQUESTS]
            assert list(threads.map(collect, streams)) == expected
        assert sum(stats.replays.values()) > before
        assert not stats.eager
