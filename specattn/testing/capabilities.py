"""Checks of what a backend declares: it refuses the rest."""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from specattn.backends.base import attending
from specattn.config import FLOAT8
from specattn.errors import UnsupportedError
from specattn.testing.oracle import Case, ConformanceError, unwritten
from specattn.testing.replay import BATCHES, replays
from specattn.testing.session import plan_of
from specattn.testing.setting import MODES, Mode, Setting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from specattn.testing.session import Session


def refusals(setting: Setting) -> None:
    """Whatever is not declared is refused, by `reasons` or with an UnsupportedError."""
    declared, tree = setting.factory.capabilities, MODES["tree_verify"]
    chain = MODES["decode"]
    undeclared: dict[str, Callable[[], Case]] = {
        str(dtype): partial(setting.case, chain, [9], dtype=dtype)
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        if dtype not in declared.dtypes
    }
    cases: dict[str, Callable[[], Case]] = {
        "trees": lambda: setting.case(tree, [9]),
        "lists": lambda: setting.case(MODES["draft_lists"], [9]),
        "extend": lambda: setting.case(MODES["prompt_extend"], [9]),
        "window": lambda: setting.case(chain, [9], window_left=3),
        "cap": lambda: setting.case(chain, [9], logit_cap=2.0),
        "deterministic": lambda: setting.case(chain, [9], deterministic=True),
        "sinks": lambda: setting.case(chain, [9], sinks=torch.float32),
    }
    undeclared |= {name: make for name, make in cases.items() if not getattr(declared, name)}
    if declared.page_size > 1:
        half = declared.page_size // 2
        undeclared[f"page_size {half}"] = partial(setting.case, chain, [9], page_size=half)
    if FLOAT8 not in declared.kv_dtypes:
        undeclared[f"kv_dtype {FLOAT8}"] = partial(setting.case, chain, [9], kv_dtype=FLOAT8)
    for name, make in undeclared.items():
        try:
            case = make()
            setting.backend(case).bind(plan_of(case))
        except UnsupportedError:
            continue
        raise ConformanceError("capabilities", f"{name} is not declared, yet it was not refused")


def host_mirror(setting: Setting) -> None:
    """Host planning without lengths is an error of that name."""
    planned = setting.factory.capabilities.host_plan
    session = setting.session(setting.case(MODES["decode"], [33, 5]))
    try:
        session.bound.schedule(None)
    except (ValueError, UnsupportedError) as error:
        if not planned:
            raise ConformanceError(
                "host mirror", f"host_plan is not declared, yet schedule(None) raised {error!r}"
            ) from error
        if "seq_lens_cpu" not in str(error):
            raise ConformanceError(
                "host mirror", f"schedule(None) must name seq_lens_cpu, got {error}"
            ) from error
        return
    if planned:
        raise ConformanceError("host mirror", "schedule(None) was accepted though host_plan is set")
    session.bound.fill()
    session.run()
    session.verdict("host mirror")


def _require_graphs(session: Session) -> None:
    if not attending(session.backend, session.plan).capabilities.graphs:
        raise UnsupportedError("this check", ["the backend declares no graphs for this plan"])


def no_sync(setting: Setting, mode: Mode) -> None:
    """``fill`` and ``run`` never wait for the device."""
    session = setting.session(setting.case(mode, [33, 5, 0]))
    _require_graphs(session)
    session.forward(None, "host sync")  # compiles
    session.schedule()
    with _sync_is_an_error():
        session.bound.fill()
        session.run()
    session.verdict("host sync")


@contextmanager
def _sync_is_an_error() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def graphs(setting: Setting, mode: Mode) -> None:
    """Recorded on padding, one graph serves every batch of the bucket."""
    padding, *cases = replays(setting, mode, [*BATCHES, [33, 5, 0], [33, 5, 0]])
    session = setting.session(padding)
    _require_graphs(session)
    session.schedule()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())

    def fill_and_run() -> None:
        session.bound.fill()
        session.run()

    with torch.cuda.stream(side):
        fill_and_run()
        fill_and_run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fill_and_run()
    for case in cases:
        session.load(case)
        session.schedule()
        # a replay clears the outputs too: `Session.run` does, and was recorded
        graph.replay()
        session.verdict("graphs")


def bad_input(setting: Setting, mode: Mode) -> None:
    """A wrong tensor is a ValueError of its name, before any write."""
    session = setting.session(setting.case(mode, [33, 5, 0]))
    session.schedule()
    session.bound.fill()
    for name, bad, blamed in _bad(session.live, lse=session.lse):
        live = replace(session.live, **{name: bad})
        session.live.clear()
        lse = live.lse if session.lse else None
        try:
            session.bound.run(live.q, live.k_cache, live.v_cache, live.out, lse)
        except ValueError as error:
            if not re.search(rf"\b({blamed})\b", str(error)):
                raise ConformanceError("bad input", f"{name} is not named: {error}") from error
        else:
            raise ConformanceError(
                "bad input", f"{name} {bad.dtype} {list(bad.shape)} was not refused"
            )
        if not unwritten(session.live.out).all():
            raise ConformanceError("bad input", f"out was written before {name} was refused")
    session.forward(None, "bad input")


def _bad(live: Case, *, lse: bool) -> Iterator[tuple[str, Any, str]]:
    """Yield argument, wrong tensor, and whom to blame."""
    other = torch.float16 if live.q.dtype == torch.float32 else torch.float32
    yield "q", live.q[:-1], "q|out"
    yield "q", live.q[..., :-1], "q|k_cache"
    yield "q", live.q.to(other), "q|k_cache|v_cache|out"
    yield "k_cache", live.k_cache[..., :-1], "k_cache|q"
    yield "k_cache", live.k_cache.to(other), "k_cache"
    yield "v_cache", live.v_cache.to(other), "v_cache"
    yield "out", live.out[:-1], "out|q"
    if lse:
        yield "lse", live.lse.double(), "lse"
