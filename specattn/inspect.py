"""Pictures of a step's tree, mask, KV slots and padding."""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specattn.checks import whole_number
from specattn.errors import NotCapturedError, TreeError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from specattn.batch import AcceptResult, Candidates, DraftTree
    from specattn.cache.slot_table import SlotTable
    from specattn.config import SpecConfig
    from specattn.cuda_graph import GraphRunner, Key


def tree(
    tree: DraftTree,
    tokenizer: Any = None,
    *,
    request: int = 0,
    scores: Tensor | None = None,
    accepted: AcceptResult | None = None,
) -> str:
    """Draw one request's tree, a line per node.

    Parameters
    ----------
    tree : DraftTree
        What is verified.
    tokenizer : object, optional
        A transformers tokenizer; without one, tokens are numbers.
    request : int
        Row of the batch.
    scores : Tensor, optional
        ``[B, n]``, the probability of each node's path; see `path_scores`.
    accepted : AcceptResult, optional
        Marks the nodes of the accepted path with ``*`` and names the bonus token below it.

    Returns
    -------
    str
        E.g., with scores and an accepted path::

            0 'def' @7  *
            ├─ 1 ' f' @8  p 0.62  path 0.62  *
            │  └─ 3 'ib' @9  p 0.81  path 0.50
            └─ 2 ' main' @8  p 0.11  path 0.11
            accepted 1 of 3 drafts, bonus 'or'

    Raises
    ------
    TreeError
        If the links visit a node twice or leave the row.
    ValueError
        If the batch has no such request.
    """
    request = whole_number("request", request, 0, len(tree.tokens) - 1)
    tokens, positions = tree.tokens[request].tolist(), tree.positions[request].tolist()
    paths = scores[request].tolist() if scores is not None else None
    kept = accepted.accept_index[request].tolist() if accepted is not None else []
    lines = []
    for indent, node, parent in _walk(tree, request):
        parts = [f"{indent}{node} {_name(tokens[node], tokenizer)} @{positions[node]}"]
        if paths is not None and node:
            own = paths[node] / paths[parent] if paths[parent] else 0.0
            parts += [f"p {own:.2f}", f"path {paths[node]:.2f}"]
        lines.append("  ".join([*parts, *(["*"] if node in kept else [])]))
    if accepted is not None:
        gained = int(accepted.accept_lens[request])
        bonus = _name(int(accepted.bonus_tokens[request]), tokenizer)
        lines.append(f"accepted {gained - 1} of {len(tokens) - 1} drafts, bonus {bonus}")
    return "\n".join(lines)


def _walk(tree: DraftTree, request: int) -> Iterator[tuple[str, int, int]]:
    """Yield indent, node and parent in the order of a drawing."""
    child = tree.retrieve_next_token[request].tolist()
    sibling = tree.retrieve_next_sibling[request].tolist()
    seen = {0}

    def below(parent: int, indent: str) -> Iterator[tuple[str, int, int]]:
        node = child[parent]
        while node != -1:
            if node in seen or not 0 <= node < len(child):
                raise TreeError(f"a link leads to node {node}, which is visited already or absent")
            seen.add(node)
            more = sibling[node] != -1
            yield indent + ("├─ " if more else "└─ "), node, parent
            yield from below(node, indent + ("│  " if more else "   "))
            node = sibling[node]

    yield "", 0, 0
    yield from below(0, "")


def path_scores(candidates: Candidates, config: SpecConfig) -> Tensor:
    """Return the path probability of every node that a step's tree keeps.

    Parameters
    ----------
    candidates : Candidates
        What the drafter proposed.
    config : SpecConfig
        The configuration that the tree is built with.

    Returns
    -------
    Tensor
        ``[B, n]`` float32; the root's is 1.
    """
    # the same choice: best first, ties to the lower index, NaN last, then in ascending order
    ranked = candidates.scores.nan_to_num(nan=-torch.inf)
    order = ranked.sort(dim=-1, descending=True, stable=True).indices
    kept = order[:, : config.num_draft_tokens - 1].sort(dim=-1).values
    return torch.cat([torch.ones_like(ranked[:, :1]), candidates.scores.gather(1, kept)], 1)


def mask(words: Tensor, prefix: int) -> str:
    """Draw a row per query token and a column per tail key.

    Parameters
    ----------
    words : Tensor
        ``[q_len, W]`` int64 ancestor words of one request.
    prefix : int
        Keys before the tail; every row sees them all.

    Returns
    -------
    str
        E.g. for three nodes, the last two children of the first::

            row  prefix  012
              0  0..6    #..
              1  0..6    ##.
              2  0..6    #.#
    """
    prefix = whole_number("prefix", prefix, 0)
    rows = words.tolist()
    # the last row sees itself, the last key of the tail, in every mode
    bits = [64 * at + (word % 2**64).bit_length() for row in rows for at, word in enumerate(row)]
    keys = max(bits, default=0)
    seen = f"0..{prefix - 1}" if prefix else "none"
    width = max(len(seen), len("prefix"))
    head = [f"row  {'prefix':<{width}}  {''.join(str(key % 10) for key in range(keys))}"]
    if keys > 10:
        tens = "".join(str(key // 10 % 10) if key % 10 == 0 else " " for key in range(keys))
        head.insert(0, f"     {'':<{width}}  {tens}".rstrip())
    return "\n".join(
        head
        + [
            f"{index:>3}  {seen:<{width}}  "
            + "".join("#" if row[key // 64] >> key % 64 & 1 else "." for key in range(keys))
            for index, row in enumerate(rows)
        ]
    )


def kv_map(table: SlotTable, config: SpecConfig | None = None) -> str:
    """Say which request holds which KV slots.

    Parameters
    ----------
    table : SlotTable
        Rows and slots of the requests.
    config : SpecConfig, optional
        Adds, for every request, where a step of this configuration writes next.

    Returns
    -------
    str
        A line per request, e.g. ``row 1: 7 committed in slots 1..7, 64 more reserved in 8..71``.
    """
    held = {row: table.pages(row) for row in sorted(table.rows)}
    users: dict[int, list[int]] = {}
    for row, pages in held.items():
        for page in pages:
            users.setdefault(page, []).append(row)
    lines = []
    for row, pages in held.items():
        size, length = len(pages) * table.page_size, table.committed(row)
        slots = table.req_to_token[row].tolist()[:size]
        line = f"row {row}: {length} committed in slots {_runs(slots[:length])}"
        if slots[length:]:
            line += f", {len(slots) - length} more reserved in {_runs(slots[length:])}"
        lines.append(line)
        shared = [page for page in pages if len(users[page]) > 1]
        if shared:
            others = sorted({other for page in shared for other in users[page]} - {row})
            lines.append(
                f"  first {len(shared) * table.page_size} shared with "
                f"row {', '.join(map(str, others))}"
            )
        if config is not None:
            lines += [f"  {line}" for line in _windows(slots[length:], config)]
    lines.append(f"row 0: padding, slots {_runs(range(table.page_size))}")
    lines.append(f"free: {table.num_free_slots} slots, {table.num_free_rows} rows")
    return "\n".join(lines)


def explain_replay(runner: GraphRunner[Key], mode: Key, count: int) -> str:
    """Say which bucket would serve a batch, and what its padding holds.

    Parameters
    ----------
    runner : GraphRunner
        With ``mode`` captured.
    mode : ForwardMode or StepPart
        The forward, or the part of a step.
    count : int
        Requests.

    Raises
    ------
    NotCapturedError
        If ``mode`` was never captured.
    """
    sizes = runner.captured(mode)
    if not sizes:
        parts = dict.fromkeys(report.part for report in runner.reports())
        raise NotCapturedError(mode.value, list(parts))
    what = f"{mode.value}, {count} request{'s' if count != 1 else ''}"
    at = bisect.bisect_left(sizes, count)
    if at == len(sizes):
        return f"{what}: no captured bucket of {sizes} holds them; they run eagerly"
    how = "a recorded CUDA graph" if runner.recorded(mode) else "eager over static buffers"
    lines = [f"{what}: bucket {sizes[at]} of {sizes}, {how}"]
    padding = sizes[at] - count
    if padding:
        rows = "row" if padding == 1 else "rows"
        lines.append(f"{padding} {rows} of padding: table row 0, length 0, slots of page 0")
    return "\n".join(lines)


def _name(token: int, tokenizer: Any) -> str:
    return str(token) if tokenizer is None else repr(tokenizer.decode([token]))


def _runs(slots: Sequence[int]) -> str:
    """Write slots as runs: ``1..4 9 12..13``."""
    runs: list[list[int]] = []
    for slot in slots:
        if runs and slot == runs[-1][1] + 1:
            runs[-1][1] = slot
        else:
            runs.append([slot, slot])
    return " ".join(f"{a}..{b}" if b > a else str(a) for a, b in runs) or "none"


def _windows(free: Sequence[int], config: SpecConfig) -> Iterator[str]:
    """Say which slots the forwards of a step write."""
    for step in range(config.num_draft_forwards):
        at = step * config.topk
        yield f"draft step {step}: {_runs(free[at : at + config.topk])}"
    nodes = config.num_draft_tokens
    yield f"verify, nodes 0..{nodes - 1}: {_runs(free[:nodes])}"
    if config.num_steps:
        yield f"draft extend: {_runs(free[: config.num_steps + 1])}"
