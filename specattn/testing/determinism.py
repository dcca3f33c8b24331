"""Checks that a text has the same bits in other company."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specattn.batch import Phase, RowLayout
from specattn.testing.cases import list_args
from specattn.testing.oracle import Case, require, visible_slots

if TYPE_CHECKING:
    from specattn.backends.base import AttentionBackend
    from specattn.testing.setting import Mode, Setting

# around tiles and cuts
LENGTHS = [126, 0, 140]


def picked(case: Case, requests: list[int], *, pads: int = 0, seed: int = 0) -> Case:
    """Take some requests, in other table rows and pages, with padding."""
    rng, a, page = torch.Generator().manual_seed(seed), case.args, case.page_size
    device, at = case.q.device, torch.tensor(requests)
    # page 0 is padding's
    pages = 1 + torch.randperm(len(case.k_cache) // page - 1, generator=rng)
    order = torch.cat([at.new_zeros(1), pages])[:, None] * page + torch.arange(page)
    order = order.flatten()
    moved, order, at = order.argsort().int().to(device), order.to(device), at.to(device)
    rows = (1 + torch.randperm(len(requests) + 2, generator=rng)[: len(requests)]).to(device)
    table = torch.zeros_like(a["req_to_token"][:1]).repeat(len(requests) + 3, 1)
    table[rows] = moved[a["req_to_token"][a["req_pool_indices"][at]].long()]
    q_len, tail = a["positions"].shape[1], a["tail_slots"].shape[1]
    args = {n: _padded(tensor[at], pads) for n, tensor in a.items() if n != "req_to_token"}
    args["tail_slots"] = _padded(moved[a["tail_slots"][at].long()], pads)
    args["req_pool_indices"] = _padded(rows, pads)
    k_cache, v_cache = case.k_cache[order], case.v_cache[order]
    if pads:
        # a padded row sees itself, as its forward has stored it
        k_cache[0], v_cache[0] = 1, 1
        own = torch.arange(tail - q_len, tail, device=device)
        row, word = torch.arange(q_len, device=device), own // 64
        args["tail_words"][len(requests) :, row, word] = 1 << own % 64
    q = _padded(case.q.unflatten(0, (-1, q_len))[at], pads).flatten(0, 1)
    return replace(
        case,
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        out=q.new_empty(*q.shape[:2], case.out.shape[2]),
        lse=case.lse.new_empty(q.shape[:2]),
        args=args | {"req_to_token": table},
        prefix_lens=args["seq_lens"].tolist(),
        live=len(requests) * q_len,
        out_slots=args["tail_slots"][:, tail - q_len :],
    )


def _padded(tensor: Tensor, pads: int) -> Tensor:
    return torch.cat([tensor, tensor.new_zeros(pads, *tensor.shape[1:])])


def as_decode(case: Case, rows: list[int], seed: int = 0) -> Case:
    """Decode a tree's query tokens as requests at their paths' ends."""
    lists, case = _paths(case, rows)
    rng, device = random.Random(seed), case.q.device
    table = torch.full((len(lists) + 1, max(map(len, lists)) + seed), len(case.k_cache) - 1)
    places = rng.sample(range(1, len(lists) + 1), len(lists))
    for place, slots in zip(places, lists, strict=True):
        table[place, : len(slots)] = torch.tensor(slots)
    lens = torch.tensor([len(slots) - 1 for slots in lists])
    args = {
        "seq_lens": lens.int(),
        "req_pool_indices": torch.tensor(places),
        "req_to_token": table.int(),
        "positions": lens[:, None],
        "tail_slots": torch.tensor([slots[-1:] for slots in lists]).int(),
        "tail_positions": lens[:, None],
        "tail_words": torch.ones(len(lists), 1, 1, dtype=torch.int64),
    }
    args = {name: tensor.to(device) for name, tensor in args.items()}
    return replace(
        case,
        args=args,
        prefix_lens=lens.tolist(),
        out_slots=args["tail_slots"],
        layout=RowLayout(1, 1, Phase.DECODE, causal=True),
    )


def as_lists(case: Case, rows: list[int]) -> Case:
    """Spell query tokens of a tree case out as index lists."""
    lists, case = _paths(case, rows)
    return replace(
        case,
        kind="lists",
        args=list_args(lists, len(case.k_cache) - 1, 0, case.q.device),
        layout=RowLayout(1, 1, Phase.DRAFT, causal=True),
        out_slots=torch.tensor([slots[-1:] for slots in lists]).int().to(case.q.device),
    )


def _paths(case: Case, rows: list[int]) -> tuple[list[list[int]], Case]:
    """Return what query tokens see without windows, and their rows' case."""
    lists = visible_slots("tree", case.args)
    return [lists[row] for row in rows], case.of_rows(rows)


def resumed(case: Case, cuts: list[int]) -> list[tuple[Case, Tensor]]:
    """Cut prompts in two; return both extends, and their rows."""
    a, pieces = case.args, []
    begins = a["qo_indptr"][:-1].tolist()
    news = a["qo_indptr"].diff().tolist()
    for lows, highs in (([0] * len(cuts), cuts), (cuts, news)):
        parts = list(zip(begins, lows, highs, strict=True))
        rows = torch.cat([torch.arange(at + low, at + high) for at, low, high in parts])
        rows, done = rows.to(case.q.device), torch.tensor(lows, dtype=torch.int32)
        indptr = torch.tensor([0, *(high - low for _, low, high in parts)]).cumsum(0).int()
        args: dict[str, Any] = a | {
            "qo_indptr": indptr.to(case.q.device),
            "max_q_len": int(indptr.diff().max()),
            "seq_lens": a["seq_lens"] + done.to(case.q.device),
        }
        assert case.out_slots is not None
        piece = replace(
            case.of_rows(rows),
            args=args,
            prefix_lens=args["seq_lens"].tolist(),
            out_slots=case.out_slots[:, rows],
        )
        pieces.append((piece, rows))
    return pieces


def same_paths(setting: Setting, mode: Mode, **form: Any) -> None:
    """Every row has the bits of decoding its path, or its list."""
    case = setting.case(mode, LENGTHS, **form)
    backend = setting.backend(case)
    wanted, rows = _bits(setting, backend, case), list(range(len(case.q)))
    _compare(wanted, _bits(setting, backend, as_decode(case, rows)), "decoding")
    if setting.factory.capabilities.lists:
        _compare(wanted, _bits(setting, backend, as_lists(case, rows)), "an index list")


def same_batches(setting: Setting, mode: Mode, **form: Any) -> None:
    """A request has the same bits alone, in any order, and padded."""
    case = setting.case(mode, LENGTHS, **form)
    backend, q_len = setting.backend(case), len(case.q) // len(LENGTHS)
    wanted = _bits(setting, backend, case)
    for seed, (requests, pads) in enumerate([([2], 0), ([0], 3), ([1, 2, 0], 1)]):
        rows = [request * q_len + token for request in requests for token in range(q_len)]
        found = _bits(setting, backend, picked(case, requests, pads=pads, seed=seed))
        _compare(
            [part[rows] for part in wanted], found, f"requests {requests} with {pads} of padding"
        )


def same_prompts(setting: Setting, mode: Mode, **form: Any) -> None:
    """A prompt has the same bits whole and in pieces."""
    case = setting.case(mode, LENGTHS, **form)
    backend = setting.backend(case)
    wanted = _bits(setting, backend, case)
    for piece, rows in resumed(case, [2, 5, 1]):
        found = _bits(setting, backend, piece)
        _compare([part[rows] for part in wanted], found, "a prompt in pieces")


def _bits(setting: Setting, backend: AttentionBackend, case: Case) -> list[Tensor]:
    session = setting.session(case, backend)
    session.forward()
    live = session.live
    return [live.out[: live.live], live.lse[: live.live]][: 1 + session.lse]


def _compare(wanted: list[Tensor], found: list[Tensor], what: str) -> None:
    for want, got in zip(wanted, found, strict=True):
        off = (want != got).flatten(1).any(1)
        said = f"{int(off.sum())} of {len(off)} rows have other bits as {what}"
        require(not off.any(), said)
