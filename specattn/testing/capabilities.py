"""Checks of what a backend declares: it refuses the rest."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from specattn.backends.base import attending
from specattn.config import FLOAT8
from specattn.errors import UnsupportedError
from specattn.testing.oracle import Case, ConformanceError, require, unwritten
from specattn.testing.replay import BATCHES, replays
from specattn.testing.session import plan_of
from specattn.testing.setting import MODES, Mode, Setting

if TYPE_CHECKING:
    from collections.abc import Iterator

    from specattn.backends.base import Capabilities
    from specattn.testing.session import Session


def refusals(setting: Setting) -> None:
    """Whatever is not declared is refused, by `reasons` or with an UnsupportedError."""
    declared = setting.factory.capabilities
    for name, (mode, form) in _undeclared(declared).items():
        try:
            case = setting.case(MODES[mode], [9], **form)
            setting.backend(case).bind(plan_of(case))
        except UnsupportedError:
            continue
        raise ConformanceError("capabilities", f"{name} is not declared, yet it was not refused")


def _undeclared(declared: Capabilities) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return mode and form of a case of each undeclared thing."""
    optional: dict[str, tuple[str, dict[str, Any]]] = {
        "trees": ("tree_verify", {}),
        "lists": ("draft_lists", {}),
        "extend": ("prompt_extend", {}),
        "window": ("decode", {"window_left": 3}),
        "cap": ("decode", {"logit_cap": 2.0}),
        "deterministic": ("decode", {"deterministic": True}),
        "sinks": ("decode", {"sinks": torch.float32}),
    }
    found = {name: case for name, case in optional.items() if not getattr(declared, name)}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        if dtype not in declared.dtypes:
            found[str(dtype)] = "decode", {"dtype": dtype}
    if (half := declared.page_size // 2) > 0:
        found[f"page_size {half}"] = "decode", {"page_size": half}
    if FLOAT8 not in declared.kv_dtypes:
        found[f"kv_dtype {FLOAT8}"] = "decode", {"kv_dtype": FLOAT8}
    return found


def host_mirror(setting: Setting) -> None:
    """Host planning without lengths is an error of that name."""
    planned, said = setting.factory.capabilities.host_plan, ""
    session = setting.session(setting.case(MODES["decode"], [33, 5]))
    try:
        session.bound.schedule(None)
    except (ValueError, UnsupportedError) as error:
        said = f"schedule(None) raised {error!r}"
    if planned:
        require(said, "schedule(None) was accepted though host_plan is set")
        named = "seq_lens_cpu" in said
        require(named, f"{said}, which must name seq_lens_cpu")
        return
    require(not said, f"host_plan is not declared, yet {said}")
    session.fill_and_run()
    session.verdict()


def _require_graphs(session: Session) -> None:
    if not attending(session.backend, session.plan).capabilities.graphs:
        raise UnsupportedError("this check", ["the backend declares no graphs for this plan"])


def no_sync(setting: Setting, mode: Mode) -> None:
    """``fill`` and ``run`` never wait for the device."""
    session = setting.session(setting.case(mode, [33, 5, 0]))
    _require_graphs(session)
    session.forward()  # compiles
    session.schedule()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        session.fill_and_run()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    session.verdict()


def graphs(setting: Setting, mode: Mode) -> None:
    """Recorded on padding, one graph serves every batch of the bucket."""
    padding, *cases = replays(setting, mode, [*BATCHES, [33, 5, 0], [33, 5, 0]])
    session = setting.session(padding)
    _require_graphs(session)
    session.schedule()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())

    with torch.cuda.stream(side):
        session.fill_and_run()
        session.fill_and_run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        session.fill_and_run()
    for case in cases:
        session.load(case)
        session.schedule()
        # a replay clears the outputs too: `Session.run` does, and was recorded
        graph.replay()
        session.verdict()


def bad_input(setting: Setting, mode: Mode) -> None:
    """A wrong tensor is a ValueError of its name, before any write."""
    session = setting.session(setting.case(mode, [33, 5, 0]))
    session.schedule()
    session.bound.fill()
    for name, bad, blamed in _bad(session.live, lse=session.lse):
        live = replace(session.live, **{name: bad})
        session.live.clear()
        lse, said = live.lse if session.lse else None, ""
        try:
            session.bound.run(live.q, live.k_cache, live.v_cache, live.out, lse)
        except ValueError as error:
            said = str(error) or "ValueError"
        require(said, f"{name} {bad.dtype} {list(bad.shape)} was not refused")
        named = re.search(rf"\b({blamed})\b", said)
        require(named, f"{name} is not named: {said}")
        whole = unwritten(session.live.out).all()
        require(whole, f"out was written before {name} was refused")
    session.forward()


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
