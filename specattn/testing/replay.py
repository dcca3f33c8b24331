"""Checks that one bind serves every batch of its bucket."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specattn.testing.cases import share_prefixes
from specattn.testing.oracle import NAN, ConformanceError, require
from specattn.testing.session import Session, tensors_of
from specattn.testing.setting import Kind, Mode, Setting, draft

if TYPE_CHECKING:
    from collections.abc import Iterator

    from specattn.testing.oracle import Case

BUCKET = 4
BATCHES: list[list[int]] = [[3, 40, 0], [90, 90, 90, 90], [1], [64, 65, 63, 70], [0, 0, 0, 0]]
# sizes that hold any of them
ROOM = {"width": 128, "slots": 768}
# long enough for backends that read common slots once, where that pays; groups as in
# `specattn.testing.cases.share_prefixes`
SHARED: list[tuple[list[int], list[tuple[list[int], int]]]] = [
    ([300, 290, 280, 20], [([0, 1, 2], 273)]),
    ([270, 300, 265, 300], [([0, 2], 260), ([1, 3], 300)]),
    ([300, 300, 300, 300], [([0, 1, 2, 3], 64), ([1, 3], 290)]),
    ([300, 300, 300, 300], []),
]
SHARED_ROOM: dict[str, Any] = {"width": 384, "slots": 2048}


def replays(
    setting: Setting, mode: Mode, batches: list[list[int]], form: dict[str, Any] = ROOM
) -> Iterator[Case]:
    """Draw a batch of padding, then ``batches``, of one bucket's shapes."""
    for seed, lengths in enumerate([[], *batches]):
        pads = BUCKET - len(lengths)
        yield setting.case(mode, lengths, pads=pads, seed=seed, **form)


def growth(setting: Setting, mode: Mode, batches: list[list[int]] = BATCHES) -> None:
    """Bind on padding, then run batches of other words and slots."""
    padding, *cases = replays(setting, mode, batches)
    session = setting.session(padding)
    for case in [padding, *cases]:
        session.forward(case)


def shared_prefixes(setting: Setting, mode: Mode) -> None:
    """Groups of requests over the same slots form, change and dissolve."""
    # tiles of such have room for the rows of several requests
    form = SHARED_ROOM | {"dtype": setting.small}
    padding, *cases = replays(setting, mode, [lengths for lengths, _ in SHARED], form)
    session = setting.session(padding)
    for case, (_, groups) in zip(cases, SHARED, strict=True):
        # pages are shared whole
        whole = [(members, keys - keys % case.page_size) for members, keys in groups]
        session.forward(share_prefixes(case, whole))


def buckets(setting: Setting, mode: Mode) -> None:
    """Two buckets over one storage and one backend, in turn."""
    padding, *cases = replays(setting, mode, BATCHES)
    large = setting.session(padding)
    small_cases = [
        setting.case(mode, lengths, pads=2 - len(lengths), seed=9, **ROOM)
        for lengths in ([40, 3], [7], [90, 0])
    ]
    small = setting.session(small_cases[0], large.backend, within=large)
    for first, second in zip(cases, small_cases, strict=False):
        large.forward(first)
        small.forward(second)


def interleaved_modes(setting: Setting) -> None:
    """All modes bound to one backend, in turn."""
    made: dict[str, Session] = {}
    backend = None
    for turn in range(2):
        for name, mode in setting.modes().items():
            if mode.kind == "extend":
                case = setting.case(mode, [5 + turn, 20])
                made[name] = setting.session(case, backend)
            else:
                case = setting.case(mode, [33 + turn, 5, 0], pads=1, seed=turn, **ROOM)
                made.setdefault(name, setting.session(case, backend))
            backend = made[name].backend
            made[name].forward(None if mode.kind == "extend" else case)


def blind_rows(
    setting: Setting, q_len: int = 9, tail_len: int = 70, lse: bool = True, **form: Any
) -> None:
    """Rows that see no key are 0, whatever ran in their places."""
    session: Session | None = None
    for bits, lengths in (("any", [33, 9, 40]), ("any", [0, 0, 7]), ("none", [0, 0, 0])):
        mode = Mode("tree", {"mode": bits, "q_len": q_len, "tail_len": tail_len})
        case = setting.case(mode, lengths, **ROOM, **form)
        session = session or setting.session(case, lse=lse)
        session.forward(case)


def steps(setting: Setting, kind: Kind) -> None:
    """Schedule draft steps, then fill; ancestors come before each runs."""
    sessions: list[Session] = []
    for step in range(3):
        case = setting.case(draft(kind, 3, step), [33, 70, 0], pads=1, seed=step)
        sessions.append(setting.session(case, sessions[0].backend if sessions else None))
    for _ in range(2):
        for session in sessions:
            session.schedule()
        ancestors = [_forget_ancestors(session.live) for session in sessions]
        for session in sessions:
            session.bound.fill()
        for session, (tensor, known) in zip(sessions, ancestors, strict=True):
            tensor.copy_(known)
            session.run()
            session.verdict()


def _forget_ancestors(live: Case) -> tuple[Tensor, Tensor]:
    """Leave every branch of a draft step its own node only.

    Returns the tensor that names ancestors, and what it has to hold when the step runs.
    """
    assert live.layout is not None
    branches, tail = live.layout.q_len, live.layout.tail
    if live.kind == "lists":
        # before its own node, a list ends with a node per step
        tensor, ends = live.args["kv_indices"], live.args["kv_indptr"][1:].long()
        known = tensor.clone()
        for back in range(2, tail // branches + 1):
            tensor[ends - back] = known[ends - 1]
        return tensor, known
    tensor = live.args["tail_words"]
    known = tensor.clone()
    own = torch.arange(tail - branches, tail, device=tensor.device)
    tensor.zero_()
    tensor[:, torch.arange(branches, device=tensor.device), own // 64] = 1 << own % 64
    return tensor, known


def layers(setting: Setting, mode: Mode) -> None:
    """One fill serves all layers: other queries, pools and outputs."""
    session = setting.session(setting.case(mode, [33, 5, 0]))
    session.forward()
    for _ in range(2):
        other = setting.case(mode, [33, 5, 0])
        layer = {n: getattr(other, n) for n in ("q", "k_cache", "v_cache", "out", "lse")}
        session.live = replace(session.live, **layer)
        session.run()
        session.verdict()


def scaled_layers(setting: Setting, mode: Mode) -> None:
    """One fill serves layers whose stored keys and values have other scales."""
    stored: dict[str, Any] = {"dtype": setting.small, "kv_scales": (2.0, 0.5)}
    stored["kv_dtype"] = setting.declared.kv_dtypes[0]
    session = setting.session(setting.case(mode, [33, 5, 0], **stored))
    session.forward()
    for scales in ((0.3, 0.5), (2.0, 7.0), (2.0, 0.5)):
        session.scale(scales)
        session.run()
        session.verdict()


def sink_layers(setting: Setting, mode: Mode) -> None:
    """One fill serves layers with other sinks."""
    session = setting.session(setting.case(mode, [33, 5, 0], sinks=torch.float32))
    session.forward()
    # in float16 larger ones leave outputs of nothing
    for drawn in (-math.inf, 3.0, 6.0):
        session.live.sinks = torch.full_like(session.live.lse[0], drawn)
        session.scale(session.live.kv_scales)
        session.run()
        session.verdict()


def without_lse(setting: Setting, mode: Mode) -> None:
    """The lse is optional, and its absence changes nothing."""
    setting.session(setting.case(mode, [33, 5, 0]), lse=False).forward()


def results(setting: Setting, mode: Mode) -> None:
    """What is returned is what is written in place."""
    session = setting.session(setting.case(mode, [33, 5, 0]))
    session.forward()
    live, layer = session.live, session.layer
    made = layer.result(live.q, live.k_cache, live.v_cache, live.lse if session.lse else None)
    alike = (made.shape, made.dtype, made.is_contiguous()) == (live.out.shape, live.out.dtype, True)
    require(alike, f"{list(made.shape)} {made.dtype} is not as out is")
    live.out.copy_(made)
    session.verdict()


def inputs_unchanged(setting: Setting, mode: Mode) -> None:
    """Nothing but the outputs is written, and nothing the plan names moves."""
    session = setting.session(setting.case(mode, [33, 5, 0]))
    given = {n: t for n, t in tensors_of(session.live).items() if n not in ("out", "lse")}
    before = {n: (t.data_ptr(), t.contiguous().view(torch.uint8).clone()) for n, t in given.items()}
    session.forward()
    for name, tensor in given.items():
        address, content = before[name]
        there = tensor.data_ptr() == address
        require(there, f"{name} moved to another address")
        same = torch.equal(tensor.contiguous().view(torch.uint8), content)
        require(same, f"{name} was written to")


def permuted_slots(setting: Setting, mode: Mode) -> None:
    """Slots are where tables say; numbers elsewhere hide no wrong one."""
    case = setting.case(mode, [33, 5, 0])
    for pool in (case.k_cache, case.v_cache):
        pool.nan_to_num_(0.5)
    setting.session(case).forward()


def poisoned_padding(setting: Setting, mode: Mode) -> None:
    """NaN in padding's own page 0 reaches no request."""
    session = setting.session(setting.case(mode, [33, 5, 0], pads=2))
    session.live.k_cache[: session.live.page_size] = NAN
    session.live.v_cache[: session.live.page_size] = NAN
    session.schedule()
    session.fill_and_run()
    try:
        session.verdict(padding=False)
    except ConformanceError as error:
        raise ConformanceError("padding", error.detail) from error
