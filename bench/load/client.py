"""Clients of an engine: so many requests in flight, and the next one comes as one ends."""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Event, RLock
from typing import TYPE_CHECKING, Any

import torch

from specattn.engine.engine import Engine
from specattn.engine.serving import AsyncEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from specattn.engine.metrics import EngineMetrics
    from specattn.engine.request import Request, RequestOutput


@dataclass(eq=False)
class Text:
    """A request, and what its client was handed.

    Parameters
    ----------
    request : Request
        As it was submitted.
    submitted : float
        When, by `time.perf_counter`.
    chunks : list of (float, int)
        When tokens came, and how many.
    tokens, accept_lens : list of int
        As in `RequestOutput`.
    """

    request: Request
    submitted: float
    chunks: list[tuple[float, int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    accept_lens: list[int] = field(default_factory=list)

    def came(self, tokens: Sequence[int], now: float) -> None:
        """Note new tokens, if there are any."""
        if tokens:
            self.chunks.append((now, len(tokens)))
            self.tokens += tokens


@dataclass
class PromptTime:
    """What the prompts of an engine took.

    Parameters
    ----------
    calls : int
        How often the engine ran prompts, or a later part of one.
    host : float
        Seconds of the host in these calls; first tokens are among them where calls wait for them.
    events : list of (torch.cuda.Event, torch.cuda.Event)
        On the stream, around each call.
    begins, hosts : list of float
        When each call began, by `time.perf_counter`, and its seconds of the host.
    """

    calls: int = 0
    host: float = 0.0
    events: list[tuple[Any, Any]] = field(default_factory=list)
    begins: list[float] = field(default_factory=list)
    hosts: list[float] = field(default_factory=list)

    @property
    def stream(self) -> float | None:
        """Seconds that the stream was the prompts'; None without CUDA. It waits for the device."""
        return sum(self.each) if self.events else None

    @property
    def each(self) -> list[float]:
        """Seconds of each call: of the stream, or without CUDA of the host."""
        if not self.events:
            return self.hosts
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in self.events]


class WatchedEngine(Engine):
    """An engine that tells what its prompts take: of the host, and of the stream.

    Attributes
    ----------
    prompt_time : PromptTime
        To be replaced by whoever begins to measure.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self.prompt_time = PromptTime()
        super().__init__(*args, **options)
        # of older sources it is a method of the engine
        owner = getattr(self, "_admission", self)
        owner._run_prompts = partial(self._watched, owner._run_prompts)
        # the later parts of a long prompt, in sources that have such
        if hasattr(owner, "_goes_on"):
            owner._goes_on = partial(self._watched_part, owner, owner._goes_on)

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Time nothing, and record no event, until the block ends."""
        owner = vars(getattr(self, "_admission", self))
        hooks = {name: owner.pop(name) for name in ("_run_prompts", "_goes_on") if name in owner}
        try:
            yield
        finally:
            owner.update(hooks)

    def _watched_part(self, owner: Any, run: Callable[..., bool], **options: Any) -> bool:
        """Launch the next part of a long prompt, and note what that takes if there is one."""
        return bool(run(**options) if owner._begun is None else self._watched(run, **options))

    def _watched(self, run: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Run prompts, and note what that takes."""
        found, cuda = self.prompt_time, self.table.req_to_token.is_cuda
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * cuda)]
        begin = time.perf_counter()
        for event in events[:1]:
            event.record()
        try:
            return run(*args, **options)
        finally:
            for event in events[1:]:
                event.record()
                found.events.append((events[0], event))
            found.calls += 1
            found.begins.append(begin)
            found.hosts.append(time.perf_counter() - begin)
            found.host += found.hosts[-1]


class _Loop(AsyncEngine):
    """An engine's own thread as the client of all requests.

    Nobody else needs the interpreter, so that nothing is measured but the engine.
    """

    def __init__(
        self, engine: Engine, requests: Iterable[Request], at_once: int, until: float
    ) -> None:
        self._todo, self._at_once, self._until = iter(requests), at_once, until
        self._texts: dict[int, Text] = {}
        # a stream that is deleted drops its request
        self._streams: list[Any] = []
        self._done, self._own_lock, self._going = Event(), RLock(), 0
        self._failed: Exception | None = None
        super().__init__(engine)

    def run(self) -> list[Text]:
        """Submit requests until there are no more, or no time; return their texts."""
        with self:
            with self._own_lock:
                for _ in range(self._at_once):
                    self._submit()
            while not self._done.wait(1.0):
                if not self._thread.is_alive():
                    raise RuntimeError("the engine's thread has ended")
        if self._failed is not None:
            raise self._failed
        return list(self._texts.values())

    def _submit(self) -> None:
        now = time.perf_counter()
        request = None if now > self._until else next(self._todo, None)
        if request is not None:
            stream = self.stream(request)
            self._streams.append(stream)
            self._texts[id(stream._feed)] = Text(request, now)
            self._going += 1
        elif not self._going:
            self._done.set()

    def _tell(self, results: Iterable[RequestOutput]) -> None:
        told = [(id(self._feeds[id(result)]), result) for result in results]
        super()._tell(result for _, result in told)
        now = time.perf_counter()
        with self._own_lock:
            for key, result in told:
                text = self._texts[key]
                text.came(result.tokens[len(text.tokens) :], now)
                if result.finish_reason:
                    text.accept_lens = result.accept_lens
                    self._going -= 1
                    self._submit()

    def _fail(self, error: Exception) -> None:
        self._failed = error
        self._done.set()
        super()._fail(error)


def by_engine(
    engine: Engine, requests: Iterable[Request], at_once: int, until: float
) -> list[Text]:
    """Load an engine from its own thread, as if clients took no time."""
    return _Loop(engine, requests, at_once, until).run()


def by_asyncio(
    engine: Engine, requests: Iterable[Request], at_once: int, until: float
) -> list[Text]:
    """Load an engine by asyncio tasks of one more thread, which read streams as a server does."""
    todo, texts = iter(requests), []

    async def client(server: AsyncEngine) -> None:
        while (now := time.perf_counter()) <= until:
            request = next(todo, None)
            if request is None:
                return
            text = Text(request, now)
            texts.append(text)
            async for output in server.stream(request):
                text.came(output.tokens, time.perf_counter())
                text.accept_lens += output.accept_lens

    async def all_of_them() -> None:
        with AsyncEngine(engine) as server:
            await asyncio.gather(*(client(server) for _ in range(at_once)))

    asyncio.run(all_of_them())
    return texts


def by_generate(
    engine: Engine, requests: Iterable[Request], at_once: int, until: float
) -> list[Text]:
    """Hand an engine all requests at once: as many run as it has rows, and the others wait."""
    texts = [Text(request, 0.0) for request in requests]

    def on_tokens(index: int, tokens: list[int]) -> None:
        texts[index].came(tokens, time.perf_counter())

    outputs = engine.generate([text.request for text in texts], on_tokens)
    for text, output in zip(texts, outputs, strict=True):
        text.submitted, text.accept_lens = output.started_at, output.accept_lens
    return texts


#: Clients, by what the command line calls them.
CLIENTS: dict[str, Callable[[Engine, Iterable[Request], int, float], list[Text]]] = {
    "engine": by_engine,
    "asyncio": by_asyncio,
    "generate": by_generate,
}


@dataclass(frozen=True)
class Load:
    """What an engine did under load.

    Parameters
    ----------
    texts : list of Text
        In the order in which they were submitted.
    begin : float
        By `time.perf_counter`.
    prompts : PromptTime
        What their prompts took.
    before, after : EngineMetrics
        The engine's numbers.
    """

    texts: list[Text]
    begin: float
    prompts: PromptTime
    before: EngineMetrics
    after: EngineMetrics


def first_tokens(engine: WatchedEngine, requests: Iterable[Request]) -> list[float]:
    """Return how many seconds `Engine.add` takes for each request, alone in an idle engine.

    It returns when the host has the first token. Nothing is watched meanwhile.
    """
    found = []
    with engine.unwatched():
        for request in requests:
            if engine.table.req_to_token.is_cuda:
                torch.cuda.synchronize()
            begin = time.perf_counter()
            (output,) = engine.add([request])
            found.append(time.perf_counter() - begin)
            if not output.finish_reason:
                engine.drop(output)
    return found


def load(
    engine: WatchedEngine,
    requests: Sequence[Request],
    at_once: int,
    *,
    seconds: float,
    client: str = "engine",
) -> Load:
    """Load an engine; after ``seconds`` no more requests come, and those in flight end.

    Raises
    ------
    RuntimeError
        If the engine ran no prompts where they are watched.
    """
    prompts = engine.prompt_time = PromptTime()
    before, begin = engine.metrics(), time.perf_counter()
    texts = CLIENTS[client](engine, requests, at_once, begin + seconds)
    if not prompts.calls:
        raise RuntimeError("_run_prompts was not called: watch what runs prompts now")
    return Load(texts, begin, prompts, before, engine.metrics())
