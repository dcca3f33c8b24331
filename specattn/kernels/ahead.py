"""Compile kernels side by side, before they are first launched.

Triton compiles a kernel where it is first launched, on one core. Here launches are looked at
instead: what they need is compiled in threads. Most of the time is LLVM's and ptxas', which let
other threads run. As nothing is launched, nothing is computed either: what an operation would
write holds zeros.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar, copy_context
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import triton
from torch import Tensor
from triton.runtime import build
from triton.runtime.jit import JITFunction, KernelInterface

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_LIBRARY = __name__.partition(".")[0] + "."
# indices that nobody has computed lead somewhere, unless they are 0
_ALLOCATE = ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty"))


def compile_ahead(calls: Iterable[Callable[[], object]], device: torch.device) -> int:
    """Compile and load the kernels that calls launch, side by side.

    As many are compiled at once as there are cores. The calls are made on this thread, but none of
    this library's kernels is launched, unless in a context of its own (``Context().run``). What
    else they do is done: torch's operations run, over zeros where a kernel would have written, and
    so do other libraries' kernels. A kernel that does not compile is left to its first launch.

    Parameters
    ----------
    calls : iterable of callable
        What launches, without a read of the device.
    device : torch.device
        Where it does; the current one.

    Returns
    -------
    int
        How many kernels were compiled; others were loaded from Triton's cache.

    Raises
    ------
    Exception
        Whatever a call raises; the kernels before it are compiled.
    """
    # the mode of compiling ends with the context, whatever interrupts it
    return copy_context().run(_Compiler.compile, calls, device)


class _Compiler(triton.AsyncCompileMode):
    """Compiles and loads kernels in threads, each variant once."""

    active: ClassVar[ContextVar[_Compiler | None]] = ContextVar("compiler", default=None)
    one: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        super().__init__(executor, ignore_errors=True)
        self.seen: set[Hashable] = set()
        self.interrupted = False

    @classmethod
    def compile(cls, calls: Iterable[Callable[[], object]], device: torch.device) -> int:
        """Make the calls; return how many kernels were compiled for them."""
        # a new thread's device is the first
        current = torch.cuda.current_device() if device.type == "cuda" else None
        enter = None if current is None else partial(torch.cuda.set_device, current)
        with (
            cls.one,
            compiled() as missed,
            _loaded_apart(),
            ThreadPoolExecutor(initializer=enter) as executor,
            cls(executor) as compiler,
            _looked_at(),
        ):
            cls.active.set(compiler)
            try:
                _make(calls)
            except Exception:
                raise
            except BaseException:
                compiler.interrupted = True
                raise
        return len(missed)

    def submit(self, key: str, compile_fn: Callable[[], Any], *callbacks: Any) -> Any:
        """Have a thread compile and load a kernel; Triton calls this."""

        def load() -> Any:
            if self.interrupted:
                raise RuntimeError("the process was interrupted")
            kernel = compile_fn()
            # Triton would build its launcher at the first launch
            kernel._init_handles()
            return kernel

        return super().submit(key, load, *callbacks)

    def look_at(self, kernel: Any, grid: Any, *args: Any, **named: Any) -> None:
        """Compile what a launch needs, unless one like it was seen."""
        kind = (id(kernel), *map(_kind, args), *zip(named, map(_kind, named.values()), strict=True))
        # what describes a TMA copy may have no hash
        with suppress(TypeError):
            if kind in self.seen:
                return
            self.seen.add(kind)
        kernel.run(*args, grid=grid, warmup=True, **named)


def _make(calls: Iterable[Callable[[], object]]) -> None:
    for call in calls:
        call()


def _kind(value: Any) -> Hashable:
    """Return what tells variants apart, and more; cheaper than Triton's key."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16
    if isinstance(value, tuple | list):
        return tuple(map(_kind, value))
    if isinstance(value, Hashable):
        return value
    return _kind(list(vars(value).values()))


@contextmanager
def _looked_at() -> Iterator[None]:
    """Have launches looked at, and memory filled, where a compiler is active."""
    launch: Callable[..., Callable[..., Any]] = KernelInterface.__getitem__

    def launched(kernel: Any, grid: Any) -> Callable[..., Any]:
        compiler = _Compiler.active.get()
        ours = isinstance(kernel, JITFunction) and kernel.__module__.startswith(_LIBRARY)
        if compiler is None or not ours:
            return launch(kernel, grid)
        return partial(compiler.look_at, kernel, grid)

    with ExitStack() as stack:
        _swap(stack, KernelInterface, "__getitem__", launched)
        _swap_all(stack)
        yield


def _swap_all(stack: ExitStack) -> None:
    for owner, name in _ALLOCATE:
        _swap(stack, owner, name, _filled(getattr(owner, name)))


def _swap(stack: ExitStack, owner: Any, name: str, other: Any) -> None:
    """Put something else in a place, until the stack is left."""
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, other)


def _filled(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def allocated(*args: Any, **named: Any) -> Tensor:
        found = allocate(*args, **named)
        return found if _Compiler.active.get() is None else found.zero_()

    return allocated


@contextmanager
def _loaded_apart() -> Iterator[None]:
    """Let threads load launchers of kernels side by side.

    Triton 3.6 builds a Python module per launcher, all of one name. Loaded again, from its cache,
    it is the object of whichever came last, so that another thread may change what it holds before
    Triton reads it.
    """
    load, lock = build._load_module_from_path, threading.Lock()

    def loaded(name: str, path: str) -> SimpleNamespace:
        with lock:
            return SimpleNamespace(**vars(load(name, path)))

    with ExitStack() as stack:
        _swap(stack, build, "_load_module_from_path", loaded)
        yield


@contextmanager
def compiled() -> Iterator[list[str]]:
    """Note the kernels that Triton's cache did not have, by name."""
    missed: list[str] = []
    knobs, listener = triton.knobs.compilation, triton.knobs.compilation.listener

    def listen(**told: Any) -> None:
        if not told["cache_hit"]:
            missed.append(told["src"].name)
        if listener is not None:
            listener(**told)

    knobs.listener = listen
    try:
        yield missed
    finally:
        knobs.listener = listener
