"""One engine serves the requests of many threads and asyncio tasks."""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING, Self, TypeVar

import torch

from specattn.checks import instance, whole_number
from specattn.engine.detokenizer import TextStream, spoken
from specattn.engine.engine import Engine
from specattn.engine.intake import take
from specattn.engine.request import RequestOutput
from specattn.errors import CapacityError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from specattn.engine.metrics import EngineMetrics
    from specattn.engine.request import Request
    from specattn.speculative.sampling.grammar import Grammar

    #: What a thread waits for, or a task.
    _Waiter = Future[None] | asyncio.Future[None]

_W = TypeVar("_W", "Future[None]", "asyncio.Future[None]")


@dataclass(eq=False)
class _Feed:
    """The messages of the engine's thread to the consumer of a request.

    The consumer reads the engine's ``result`` up to what was ``told``: tokens, steps, and why it
    ended. So outputs that nobody reads take no memory of their own.
    """

    request: Request
    result: RequestOutput = field(default_factory=RequestOutput)
    told: tuple[int, int, str] = (0, 0, "")
    read: tuple[int, int, str] = (0, 0, "")
    error: BaseException | None = None
    waiter: _Waiter | None = None
    lock: Lock = field(default_factory=Lock)

    def tell(self, error: BaseException | None = None) -> _Waiter | None:
        """Let the consumer read what there is, or raise an error.

        Returns what it waits for, if it does.
        """
        result = self.result
        with self.lock:
            self.told = len(result.tokens), len(result.accept_lens), result.finish_reason
            self.error = error
            waiter, self.waiter = self.waiter, None
        return waiter

    def news(self, waiter: Callable[[], _W]) -> _W | None:
        """Return a future until there is news; None if there is."""
        with self.lock:
            if self.told != self.read or self.error is not None:
                return None
            self.waiter = found = waiter()
        return found

    def take(self) -> RequestOutput:
        """Return what has been told and not read."""
        result, (tokens, steps, _) = self.result, self.read
        with self.lock:
            self.read, error = self.told, self.error
        if error is not None:
            raise error
        last, last_step, reason = self.read
        return replace(
            result,
            tokens=result.tokens[tokens:last],
            finish_reason=reason,
            accept_lens=result.accept_lens[steps:last_step],
            finished_at=result.finished_at if reason else 0.0,
            logprobs=result.logprobs[tokens:last],
        )


class RequestStream(Iterator[RequestOutput], AsyncIterator[RequestOutput]):
    """The outputs of one request as they come, for one consumer.

    It is read with ``for`` on a thread, or with ``async for`` in asyncio. Each `RequestOutput` has
    what is new since the one before: tokens, their ``text``, steps; times are the request's. The
    last one has the ``finish_reason``. What comes while nobody reads is merged into one output.

    A request whose stream is closed or deleted, or whose reader is cancelled or interrupted, is
    dropped: its row and slots are free when the step under way has ended. What the engine raises,
    the stream raises.
    """

    def __init__(self, feed: _Feed, commands: SimpleQueue[_Feed | None], engine: Engine) -> None:
        self._feed, self._commands, self._over = feed, commands, False
        self._text: TextStream | None = None
        if engine.detokenize is not None:
            self._text = TextStream.of(feed.request, engine.detokenize)

    def __next__(self) -> RequestOutput:
        if self._over:
            raise StopIteration
        try:
            waiter: Callable[[], Future[None]] = Future
            if (news := self._feed.news(waiter)) is not None:
                news.result()
            return self._take()
        except BaseException:
            self.close()
            raise

    async def __anext__(self) -> RequestOutput:
        if self._over:
            raise StopAsyncIteration
        try:
            news = self._feed.news(asyncio.get_running_loop().create_future)
            if news is not None:
                await news
            return self._take()
        except BaseException:
            self.close()
            raise

    def _take(self) -> RequestOutput:
        output = self._feed.take()
        self._over = bool(output.finish_reason)
        if self._text is not None:
            output.text = self._text.feed(spoken(self._feed.request, output))
            if self._over:
                output.text += self._text.finish()
        return output

    def close(self) -> None:
        """Drop the request, unless it has ended; the stream ends."""
        if not self._over:
            self._over = True
            # `__del__` may come in the midst of anything: a `SimpleQueue` allows that
            self._commands.put(self._feed)

    __del__ = close


class AsyncEngine:
    """Serves requests of other threads, and of asyncio, with one engine.

    A thread of its own calls the engine until `close`, or Python's exit: it admits requests in
    their order, as rows and slots become free, and launches steps ahead. Tokens are those of
    `Engine.generate`. No consumer waits for another. How many requests wait is up to the caller.

    On a GPU, make the engine with ``sampled`` and ``processed`` where requests will ask for that:
    while something is captured, other threads may not allocate there.

    Parameters
    ----------
    engine : Engine
        Without requests. Its own calls are refused until `close`.
    stream_interval : int
        Tokens that a stream gets at once, but for its first part and its last. With many streams
        Python takes longer to hand parts out than a GPU to make them: then more is faster.

    Raises
    ------
    UnsupportedError
        If the target's weights are sharded.
    ValueError
        If it is no engine, has requests, or a call of another thread has not returned, or if
        ``stream_interval`` is no positive integer.
    """

    def __init__(self, engine: Engine, stream_interval: int = 1) -> None:
        instance("engine", engine, Engine, "an Engine")
        self._interval = whole_number("stream_interval", stream_interval, 1)
        device = engine.table.req_to_token.device
        if engine.ranks is not None:
            why = "the target's weights are sharded, and all ranks must take the same requests"
            raise UnsupportedError("AsyncEngine", [why])
        self._engine, self._scheduler = engine, engine.scheduler
        # a request comes, then perhaps is closed; None ends the thread
        self._commands: SimpleQueue[_Feed | None] = SimpleQueue()
        # of requests in the engine, by their results
        self._feeds: dict[int, _Feed] = {}
        self._lock, self._closed = Lock(), False
        self._error: BaseException | None = None
        # where the engine has launched so far; a new thread has another one
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        started: Future[None] = Future()
        self._thread = Thread(target=self._own, args=[started], name="specattn", daemon=True)
        self._thread.start()
        started.result()
        # Python stops such a thread anywhere when it exits
        atexit.register(self.close)

    def stream(self, request: Request | str) -> RequestStream:
        """Submit a request, from any thread; return its outputs as they come.

        Its grammar is made here, so that no other request waits for that.

        Raises
        ------
        ValueError
            If the request cannot run, as from `Engine.add`, or this is closed.
        Exception
            What making its grammar raises.
        """
        (checked,) = take([request], self._engine)
        if checked.grammar is not None:
            checked = replace(checked, grammar=_made(checked.grammar))
        feed = _Feed(checked)
        with self._lock:
            if self._closed:
                raise ValueError("this AsyncEngine is closed") from self._error
            self._commands.put(feed)
        return RequestStream(feed, self._commands, self._engine)

    def metrics(self) -> EngineMetrics:
        """Return the engine's numbers, from any thread; see `Engine.metrics`.

        Requests that come while a step runs are counted when it has ended.
        """
        return self._engine.metrics()

    def close(self) -> None:
        """Drop every request, end the thread, and let the engine go.

        Waits for the step under way. Streams of requests that had not ended get what there is, and
        the reason ``"dropped"``.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                self._commands.put(None)
        self._thread.join()
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _own(self, started: Future[None]) -> None:
        """Call the engine until `close`, or until it is lost."""
        error: BaseException | None = None
        try:
            if self._stream is not None:
                torch.cuda.set_stream(self._stream)
            with self._engine._one_thread():
                if self._busy:
                    raise ValueError("engine must have no requests")
                started.set_result(None)
                self._serve()
                self._engine._forget()
        except BaseException as caught:
            error = caught
            if not started.done():
                started.set_exception(error)
        with self._lock:
            self._closed, self._error = True, error
        while not self._commands.empty():
            if (feed := self._commands.get()) is not None:
                self._feeds[id(feed.result)] = feed
        _wake(feed.tell(error) for feed in self._feeds.values())

    @property
    def _busy(self) -> bool:
        return bool(self._scheduler.running or self._scheduler.waiting)

    def _serve(self) -> None:
        """Admit requests, step and hand out tokens, until `close`."""
        while self._receive():
            try:
                self._tell(self._engine._admission.admit_waiting())
                if self._scheduler.running:
                    gains = self._engine.step(ahead=True)
                    self._tell(result for result, _ in gains)
            except Exception as error:
                self._fail(error)

    def _receive(self) -> bool:
        """Take requests that come or are closed; False at `close`.

        Without anything to do, wait for the first.
        """
        while True:
            try:
                feed = self._commands.get(block=not self._busy)
            except Empty:
                return True
            if feed is None:
                return False
            if self._feeds.pop(id(feed.result), None) is not None:
                self._engine.drop(feed.result)
                _wake([feed.tell()])
            # else it comes, unless it was closed after its end
            elif not feed.result.finish_reason and feed.error is None:
                (feed.result,) = self._scheduler.wait([feed.request])
                self._feeds[id(feed.result)] = feed

    def _tell(self, results: Iterable[RequestOutput]) -> None:
        """Let consumers read what their requests have gained, once it is enough."""
        waiters = []
        for result in results:
            feed = self._feeds[id(result)]
            if result.finish_reason:
                del self._feeds[id(result)]
            elif (told := feed.told[0]) and len(result.tokens) < told + self._interval:
                continue
            waiters.append(feed.tell())
        _wake(waiters)

    def _fail(self, error: Exception) -> None:
        """Drop the requests that an error concerns; their streams raise it."""
        lost = list(self._feeds)
        if isinstance(error, CapacityError):
            # of one that runs by itself, or was to: the others have their slots
            waiting = [result for _, result in self._scheduler.waiting[:1]]
            results = [one.result for one in self._scheduler.running] or waiting
            lost = [id(result) for result in results]
            for result in results:
                self._engine.drop(result)
        else:
            self._engine._forget()
        _wake([self._feeds.pop(key).tell(error) for key in lost])


def _wake(waiters: Iterable[_Waiter | None]) -> None:
    """Wake threads singly, and the tasks of a loop together."""
    tasks: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for one in waiters:
        if isinstance(one, Future):
            one.set_result(None)
        elif one is not None:
            tasks.setdefault(one.get_loop(), []).append(one)
    for loop, some in tasks.items():
        # a loop that is closed has nobody who waits
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(_set, some)


def _set(waiters: Iterable[asyncio.Future[None]]) -> None:
    """Set what tasks wait for, but for those that were cancelled."""
    for one in waiters:
        if not one.done():
            one.set_result(None)


def _made(make: Callable[[], Grammar]) -> Callable[[], Grammar]:
    """Make a grammar now, for the first run of a request."""
    made = [make()]
    return lambda: made.pop() if made else make()
