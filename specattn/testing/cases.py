"""Random forwards over permuted slots, with NaN in unused memory."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from specattn.batch import Phase, RowLayout
from specattn.testing.oracle import NAN, Case, visible_slots

if TYPE_CHECKING:
    from collections.abc import Set

# what a case says of itself as its form does
_SAME = ("window_left", "logit_cap", "latent", "page_size", "kv_scales", "deterministic")


@dataclass(frozen=True)
class Geometry:
    """The layer, and the pages, that checks use unless they sweep them.

    Parameters
    ----------
    heads : tuple of int
        Query and KV heads.
    head_dim, v_head_dim : int
        Widths; ``v_head_dim`` 0 means ``head_dim``.
    latent : bool
        Whether values are the first ``v_head_dim`` columns of the keys: absorbed latent attention,
        with one KV head, whatever ``heads`` says.
    page_size : int
        Slots of a page; as many as the backend needs if 0.
    """

    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    v_head_dim: int = 0
    latent: bool = False
    page_size: int = 0


@dataclass(frozen=True)
class Form(Geometry):
    """What a case looks like, whatever its kind.

    Parameters
    ----------
    heads, head_dim, v_head_dim, latent
        As in `Geometry`.
    dtype : torch.dtype
        Of q, k, v and out.
    window_left, logit_cap, deterministic
        As in `specattn.config.AttnConfig`.
    scale : float
        Factor on the usual ``head_dim ** -0.5``.
    page_size : int
        Pages are permuted; the slots of a page are in order.
    slots : int
        Slots of the pools; as many as needed if 0.
    pool_pad : int
        Columns past the heads that make the pools views.
    evict : bool
        Whether keys outside every window hold NaN.
    whole_pages : bool
        Whether all slots of a page in use hold numbers, not only those of keys.
    kv_dtype : torch.dtype or None
        Of stored keys and values, if not ``dtype``.
    kv_scales : tuple of float
        What stored keys and values are multiplied by.
    sinks : torch.dtype or None
        Of sinks, if the layer has them.
    device, seed
        Where the tensors live, and what they are drawn from.
    """

    head_dim: int = 32
    dtype: torch.dtype = torch.float32
    window_left: int = -1
    logit_cap: float = 0.0
    scale: float = 1.0
    page_size: int = 1
    slots: int = 0
    pool_pad: int = 0
    evict: bool = True
    whole_pages: bool = False
    deterministic: bool = False
    kv_dtype: torch.dtype | None = None
    kv_scales: tuple[float, float] = (1.0, 1.0)
    sinks: torch.dtype | None = None
    device: str | torch.device = "cpu"
    seed: int = 0


def _words_of(
    mode: str, q_len: int, tail_len: int, rng: random.Random
) -> tuple[list[int], list[int], list[int]]:
    """Draw bits and depths of each query, and depths of tail keys."""
    shift = tail_len - q_len
    if mode in ("any", "none"):
        depths, share = [rng.randrange(6) for _ in range(tail_len)], 0.8 if mode == "any" else 0.0
        bits = [rng.getrandbits(tail_len) if rng.random() < share else 0 for _ in range(q_len)]
        beyond = (1 << -(-tail_len // 64) * 64) - (1 << tail_len)
        return [row | beyond for row in bits], [rng.randrange(6) for _ in range(q_len)], depths
    if mode == "chain":
        parent = list(range(-1, tail_len - 1))
    elif mode == "alone":
        parent = [-1] * tail_len
    elif mode == "draft":
        parent = [
            (j // q_len - 1) * q_len + rng.randrange(q_len) if j >= q_len else -1
            for j in range(tail_len)
        ]
    else:
        parent = [-1] + [rng.randrange(max(0, j - 7), j) for j in range(1, tail_len)]
    bits, depths = [], []
    for j, up in enumerate(parent):
        bits.append((1 << j) | (bits[up] if up >= 0 else 0))
        depths.append(depths[up] + 1 if up >= 0 else 0)
    return bits[shift:], depths[shift:], depths


def _words(rows: list[int], tail_len: int) -> list[list[int]]:
    """Bit sets as signed 64-bit words."""
    count = max((tail_len + 63) // 64, 1)
    words = [[bits >> (64 * w) & (1 << 64) - 1 for w in range(count)] for bits in rows]
    return [[x - (1 << 64) if x >> 63 else x for x in row] for row in words]


def owned_slots(lengths: list[int], form: Form, rng: random.Random) -> tuple[list[list[int]], int]:
    """Return every request's slots, by shuffled pages, and how many there are.

    The first page is padding's; the last is nobody's, so that its slots always hold NaN.
    """
    page = form.page_size
    needs = [-(-length // page) for length in lengths]
    pages = form.slots // page or sum(needs) + 1 + max(8 // page, 1)
    assert sum(needs) <= pages - 2, f"{form.slots} slots are too few"
    order = rng.sample(range(1, pages - 1), sum(needs))
    owned = []
    for need, length in zip(needs, lengths, strict=True):
        mine, order = order[:need], order[need:]
        owned.append([p * page + at for p in mine for at in range(page)][:length])
    return owned, pages * page


def _pool(used: set[int], slots: int, dim: int, form: Form) -> Tensor:
    """Return a pool with NaN in unused slots and columns."""
    heads = 1 if form.latent else form.heads[1]
    pool = torch.full((slots, heads, dim + form.pool_pad), NAN)
    pool[sorted(used), :, :dim] = torch.randn(len(used), heads, dim)
    return pool.to(form.kv_dtype or form.dtype)[..., :dim].to(form.device)


def drawn(
    kind: Literal["tree", "lists", "extend"],
    args: dict[str, Any],
    form: Form,
    *,
    slots: int,
    written: Set[int] = frozenset(),
    **about: Any,
) -> Case:
    """Draw queries, pools and sinks around a plan's fields.

    Pools have ``slots``, of which those that are ``written`` hold numbers though no query sees
    them; the rest of the case is ``about``.
    """
    seen = visible_slots(kind, args, form.window_left if form.evict else -1)
    used = {slot for row in seen for slot in row}
    if form.whole_pages:
        pages = {slot // form.page_size for slot in used}
        used = {page * form.page_size + at for page in pages for at in range(form.page_size)}
    used |= written
    width, rows, device = form.v_head_dim or form.head_dim, len(seen), form.device
    q = torch.randn(rows, form.heads[0], form.head_dim).to(form.dtype).to(device)
    k_cache = _pool(used, slots, form.head_dim, form)
    v_cache = k_cache[..., :width] if form.latent else _pool(used, slots, width, form)
    if form.sinks is not None:
        # some below all logits, some above
        about["sinks"] = (4 * torch.randn(form.heads[0])).to(form.sinks).to(device)
    case = Case(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        out=q.new_empty(rows, form.heads[0], width),
        lse=torch.empty(rows, form.heads[0], device=device),
        args={n: t.to(device) if isinstance(t, Tensor) else t for n, t in args.items()},
        sm_scale=form.scale * form.head_dim**-0.5,
        kind=kind,
        **{name: getattr(form, name) for name in _SAME},
        **about,
    )
    case.clear()
    return case


def make_tree_case(  # noqa: PLR0913 - as its docstring says
    lengths: list[int],
    *,
    mode: str = "tree",
    q_len: int = 4,
    tail_len: int | None = None,
    pads: int = 0,
    width: int = 0,
    phase: Phase = Phase.VERIFY,
    **form: Any,
) -> Case:
    """Build a random batch of a tree mode.

    Parameters
    ----------
    lengths : list of int
        Prefix length of every request.
    mode : {"chain", "tree", "draft", "alone", "any", "none"}
        ``chain``: causal, query i is tail key i. ``tree``: a random tree over the tail, the queries
        being its last nodes. ``draft``: ``q_len`` branches, the tail step-major. ``alone``: every
        query sees its own key only. ``any``: random bits, some rows empty, all bits past the tail
        set. ``none``: the same, and all rows empty.
    q_len, tail_len : int
        Query tokens, and tail keys; without ``tail_len`` the tail is the query tokens.
    pads : int
        Padding requests at the end.
    width : int
        Columns of the table; as many as needed if 0.
    phase : Phase
        Of the layout.
    **form
        The fields of `Form`.
    """
    look, tail = Form(**form), q_len if tail_len is None else tail_len
    args, slots = _tree(lengths, mode, (q_len, tail), pads, width, look)
    # a tail key stays readable though no query sees it: its owner has written it
    written = set(args["tail_slots"].flatten().tolist())
    if pads:  # page 0 is padding's, and begins as zeros
        written |= set(range(look.page_size))
    return drawn(
        "tree",
        args,
        look,
        slots=slots,
        written=written,
        layout=RowLayout(q_len, tail, phase, mode == "chain", look.page_size),
        prefix_lens=lengths + [0] * pads,
        live=len(lengths) * q_len,
        out_slots=args["tail_slots"][:, tail - q_len :].to(look.device),
    )


def share_prefixes(case: Case, groups: list[tuple[list[int], int]]) -> Case:
    """Give requests of a tree case common slots, as radix caches do.

    Parameters
    ----------
    case : Case
        Which is changed, and returned.
    groups : list of (list of int, int)
        Requests, and the keys for which they get the slots of the first of them. What they had
        there holds NaN, unless a later group shares it.
    """
    table, rows = case.args["req_to_token"], case.args["req_pool_indices"]
    lens, freed = case.args["seq_lens"].tolist(), [table[0, :0]]
    for (first, *others), keys in groups:
        assert all(lens[b] >= keys for b in (first, *others)), f"not all have {keys} keys"
        for b in others:
            freed.append(table[rows[b], :keys].clone())
            table[rows[b], :keys] = table[rows[first], :keys]
    kept = {slot for row, n in zip(rows, lens, strict=True) for slot in table[row, :n].tolist()}
    gone = [slot for slot in torch.cat(freed).tolist() if slot not in kept]
    for pool in (case.k_cache, case.v_cache):
        pool[gone] = NAN
    return case


def _tree(
    lengths: list[int], mode: str, sizes: tuple[int, int], pads: int, width: int, form: Form
) -> tuple[dict[str, Tensor], int]:
    """Return an `AttnPlan`'s fields without layout, and the slot count."""
    rng, (q_len, tail) = random.Random(form.seed), sizes
    batch, width = len(lengths) + pads, width or max(lengths, default=0) + tail + 5
    owned, slots = owned_slots([n + tail for n in lengths], form, rng)
    # table row 0 belongs to padding; the others in random order
    rows = rng.sample(range(1, batch + 1), len(lengths)) + [0] * pads
    table = torch.full((batch + 1, width), slots - 1, dtype=torch.int32)
    table[0] = 0
    tails = torch.zeros(batch, tail, dtype=torch.int32)
    positions = torch.zeros(batch, q_len, dtype=torch.int64)
    tail_positions = torch.zeros(batch, tail, dtype=torch.int64)
    words = [_words(_idle_bits(mode, q_len, tail), tail) for _ in range(batch)]
    for b, prefix in enumerate(lengths):
        bits, depth_q, depth_k = _words_of(mode, q_len, tail, rng)
        words[b] = _words(bits, tail)
        mine = owned[b][prefix:]
        # only a causal tail is known to lie in the table's next columns
        end = prefix + (tail if mode == "chain" else 0)
        table[rows[b], :end] = torch.tensor(owned[b][:end], dtype=torch.int32)
        if mode != "chain":
            rng.shuffle(mine)
        tails[b] = torch.tensor(mine, dtype=torch.int32)
        positions[b] = prefix + torch.tensor(depth_q)
        tail_positions[b] = prefix + torch.tensor(depth_k)
    args = {
        "seq_lens": torch.tensor(lengths + [0] * pads, dtype=torch.int32),
        "req_pool_indices": torch.tensor(rows),
        "req_to_token": table,
        "positions": positions,
        "tail_slots": tails,
        "tail_positions": tail_positions,
        "tail_words": torch.tensor(words, dtype=torch.int64),
    }
    return args, slots


def _idle_bits(mode: str, q_len: int, tail_len: int) -> list[int]:
    """Return a padding request's bits: causal, or each draft branch alone."""
    first = tail_len - q_len
    own = [1 << first + i for i in range(q_len)]
    return own if mode == "draft" else [sum(own[: i + 1]) for i in range(q_len)]


def make_extend_case(lengths: list[tuple[int, int]], **form: Any) -> Case:
    """Build a random ragged extend of prompts.

    Parameters
    ----------
    lengths : list of (int, int)
        Prefix length and new tokens of every request.
    **form
        The fields of `Form`.
    """
    look = Form(**form)
    rng = random.Random(look.seed)
    totals = [prefix + new for prefix, new in lengths]
    owned, slots = owned_slots(totals, look, rng)
    rows = rng.sample(range(1, len(lengths) + 1), len(lengths))
    table = torch.full((len(lengths) + 1, max(totals) + 3), slots - 1, dtype=torch.int32)
    for b, total in enumerate(totals):
        table[rows[b], :total] = torch.tensor(owned[b], dtype=torch.int32)
    news = torch.tensor([new for _, new in lengths])
    indptr = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    indptr[1:] = news.cumsum(0)
    written = [
        slot for (prefix, _), mine in zip(lengths, owned, strict=True) for slot in mine[prefix:]
    ]
    args = {
        "qo_indptr": indptr,
        "seq_lens": torch.tensor([p for p, _ in lengths], dtype=torch.int32),
        "req_pool_indices": torch.tensor(rows),
        "req_to_token": table,
        "max_q_len": int(news.max()),
    }
    return drawn(
        "extend",
        args,
        look,
        slots=slots,
        prefix_lens=[p for p, _ in lengths],
        live=int(news.sum()),
        out_slots=torch.tensor(written, dtype=torch.int32, device=look.device)[None],
    )


def as_chunk(case: Case, *, pieces: int, rows: int, empty: bool = False) -> Case:
    """Return prompts as a captured chunk has them, see `specattn.plan.ExtendPlan`.

    Parameters
    ----------
    case : Case
        Of prompts.
    pieces, rows : int
        Pieces without tokens that follow, of row 0, and rows of NaN behind all, without slots.
    empty : bool
        Whether no piece has tokens.
    """
    args, count = dict(case.args), len(case.q) + rows
    for name, value in (("seq_lens", 0), ("req_pool_indices", 0), ("qo_indptr", case.live)):
        old = args[name]
        args[name] = torch.cat([old, old.new_full((pieces,), value)])
        if empty:
            args[name].zero_()
    args["max_seq_len"] = args["req_to_token"].shape[1]
    args["max_q_len"] = min(count, args["max_seq_len"])

    def padded(tensor: Tensor, value: float) -> Tensor:
        return torch.cat([tensor, tensor.new_full((rows, *tensor.shape[1:]), value)])

    assert case.out_slots is not None
    slots = padded(case.out_slots[0], -1)
    return replace(
        case,
        args=args,
        q=padded(case.q, NAN),
        out=padded(case.out, NAN),
        lse=padded(case.lse, NAN),
        out_slots=(slots.fill_(-1) if empty else slots)[None],
        prefix_lens=[*([0] * len(case.prefix_lens) if empty else case.prefix_lens), *[0] * pieces],
        live=0 if empty else case.live,
    )


def make_lists_case(
    lengths: list[int],
    *,
    topk: int,
    step: int,
    pads: int = 0,
    width: int = 0,
    **form: Any,
) -> Case:
    """Build draft step ``step``: branches list prefix, ancestors and themselves.

    Parameters
    ----------
    lengths : list of int
        Prefix length of every request.
    topk, step : int
        Branches, and steps before this one.
    pads : int
        Padding requests at the end; their branches list slot 0.
    width : int
        Entries of ``kv_indices`` per list; a few more than needed if 0.
    **form
        The fields of `Form`.
    """
    tree = make_tree_case(lengths, **draft_step(topk, step), pads=pads, **form)
    lists = visible_slots("tree", tree.args)[: tree.live]
    lists += [[0] * (step + 1)] * (pads * topk)
    args = list_args(lists, len(tree.k_cache) - 1, width * len(lists), tree.q.device)
    return replace(tree, kind="lists", args=args)


def draft_step(topk: int, step: int) -> dict[str, Any]:
    """Return the options that make a tree case draft step ``step``."""
    mode, tail_len = "draft" if topk > 1 else "chain", topk * (step + 1)
    return {"mode": mode, "q_len": topk, "tail_len": tail_len, "phase": Phase.DRAFT}


def list_args(
    lists: list[list[int]], stale: int, width: int, device: torch.device | str
) -> dict[str, Tensor]:
    """Return ``kv_indptr`` and ``kv_indices`` of lists; later entries are stale.

    There are ``width`` entries, or, if 0, three more than needed.
    """
    flat = [slot for row in lists for slot in row]
    flat += [stale] * (width - len(flat) if width else 3)
    indptr = torch.tensor([0, *map(len, lists)]).cumsum(0).int()
    return {"kv_indptr": indptr.to(device), "kv_indices": torch.tensor(flat).int().to(device)}
