"""What SGLang 0.5.15 does for the metadata of a speculative step, in its order.

EAGLE (spec v2) over the Triton attention backend, at the replay of its three CUDA graphs: one GPU,
pages of one slot, a batch that is a captured size. ``OPERATIONS`` is the list, read in the release
(places are below ``sglang/srt/``), and each entry runs: SGLang's own Triton kernels, called with
its arguments, and the torch operations around them. ``EAGER`` is what its Python launches between
graphs, which costs the host as well; ``GRAPH`` is recorded in its graphs.

Everything doubtful is decided for SGLang. ``LEFT_OUT`` is not counted, its buffers are as small as
the batch allows (it clears a mask sized for the largest batch and context a server was started
for), and GPU times are those of a graph, without the gaps between eager launches.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

DRAFT, VERIFY, EXTEND = PHASES = ("draft", "verify", "extend")
EAGER, GRAPH = "eager", "graph"
#: SGLang's kernels, and the modules they are in.
KERNELS = {
    "assign_draft_cache_locs_contiguous": "speculative.triton_ops.cache_locs",
    "assign_extend_cache_locs": "speculative.triton_ops.cache_locs",
    "generate_draft_decode_kv_indices": "speculative.triton_ops.cache_locs",
    "create_flashinfer_kv_indices_triton": "layers.attention.triton_ops.kv_indices",
    "get_num_kv_splits_triton": "layers.attention.triton_ops.metadata",
    "compute_position_kernel": "model_executor.triton_ops.position",
}
#: triton_attention_num_kv_splits, as a server starts with.
MAX_KV_SPLITS = 8


@dataclass(frozen=True)
class Operation:
    """One entry of the list: its phase, how it runs, where it stands and what it does."""

    phase: str
    runs: str
    place: str
    what: str
    run: Callable[[Sglang], None]


#: What is not counted, and where it stands.
LEFT_OUT = (
    (
        "speculative/eagle_utils.py:771-850",
        "slots of the next step: lists of lengths on the host, "
        "two copies to the device, the allocator, and writing the slots to the table",
    ),
    (
        "managers/overlap_utils.py:230-274, 318-360",
        "the draft's state between steps: top-k, hidden "
        "states, bonus tokens and new lengths, written to a pool and gathered from it",
    ),
    (
        "model_executor/forward_batch_info.py:615-879",
        "building a ForwardBatch per phase in Python, but for its positions",
    ),
    (
        "model_executor/cuda_graph_buffer_registry.py:379-469",
        "verify: walking the registry of buffers in Python; the copy that it ends in is counted",
    ),
    ("speculative/spec_utils.py:145-178", "verify: record_stream of ten tensors"),
    (
        "speculative/eagle_draft_cuda_graph_runner.py:547-548, 572-581",
        "copies of top-k and hidden states into the graph's buffers",
    ),
    (
        "speculative/eagle_draft_extend_cuda_graph_runner.py:509, 536-544",
        "copies of tokens and hidden states into the graph's buffers",
    ),
    (
        "speculative/eagle_utils.py:106-133, 156, 202-204, 247-260",
        "choosing the nodes and building the tree, its links and the inside of its mask included",
    ),
    ("speculative/eagle_worker_v2.py:899-908", "extend: the rows whose logits are kept"),
    ("speculative/eagle_draft_extend_cuda_graph_runner.py:596-598", "extend: an event"),
    (
        "layers/attention/triton_backend.py:106-109",
        "reading lengths on the host: this backend asks for none",
    ),
)
OPERATIONS: list[Operation] = []


class Sglang:
    """The tensors of one batch, of SGLang's shapes and dtypes.

    Parameters
    ----------
    table : Tensor
        ``[R, C]`` int32, req_to_token; a request may be C tokens long.
    rows, lens : Tensor
        ``[B]`` int64: the requests' rows and committed lengths.
    topk, steps, nodes : int
        The setting.
    positions : Tensor
        ``[B, nodes]`` int64, of the tree's nodes, as building the tree leaves them.
    accept_lens : Tensor
        ``[B]`` int32, what verification accepted, the bonus token included.
    heads : tuple of int
        Query and KV heads.
    kernels : mapping
        SGLang's, by name; see `kernels`.
    """

    def __init__(
        self,
        table: Tensor,
        rows: Tensor,
        lens: Tensor,
        *,
        topk: int,
        steps: int,
        nodes: int,
        positions: Tensor,
        accept_lens: Tensor,
        heads: tuple[int, int],
        kernels: Mapping[str, Any],
    ) -> None:
        self.kernels, self.table, self.rows, self.heads = kernels, table, rows, heads
        self.batch, self.topk, self.steps, self.nodes = len(rows), topk, steps, nodes
        self.tree_positions, self.accept_lens = positions.flatten(), accept_lens
        self.device, self.context = table.device, table.shape[1]
        self.cores = 132
        if self.device.type == "cuda":
            self.cores = torch.cuda.get_device_properties(0).multi_processor_count
        batch, tokens = self.batch, self.batch * nodes
        self.pool_lens = self.zeros(len(table))
        self.pool_lens[rows] = lens
        self.draft = {
            "seq_lens": self.zeros(batch),
            "out_cache_loc": self.zeros(batch * topk * steps),
            "positions": self.zeros(batch * topk),
            "rows": self.zeros(batch),
        }
        self.draft_indptr = self.zeros(steps, batch * topk + 1, dtype=torch.int32)
        self.draft_indices = self.zeros(steps, batch * topk * self.context)
        self.num_kv_splits = self.zeros(batch * topk, dtype=torch.int32)
        named = ("seq_lens", "rows"), ("out_cache_loc", "positions")
        self.verify, self.extend = (
            {
                name: self.zeros(size)
                for names, size in zip(named, (batch, tokens), strict=True)
                for name in names
            }
            for _ in range(2)
        )
        for name in ("extend_seq_lens", "num_correct_drafts", "num_accept_tokens"):
            self.extend[name] = self.zeros(batch, dtype=torch.int32)
        self.lists = {
            phase: (
                self.zeros(batch + 1),
                self.zeros(batch + 1, dtype=torch.int32),
                self.zeros(batch * self.context),
            )
            for phase in (VERIFY, EXTEND)
        }
        self.mask_indptr = self.zeros(batch + 1)
        self.custom_mask = self.zeros(tokens * self.context, dtype=torch.uint8)

    def zeros(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def run(self, phase: str, runs: str | None = None) -> None:
        """Run the operations of a phase: all, the eager ones, or those in its graph."""
        for operation in RUNS[phase, runs]:
            operation(self)

    def fill_lists(self, phase: str, lens: Tensor) -> None:
        """Offsets and slots of every request's keys (layers/attention/triton_backend.py:364)."""
        _, indptr, indices = self.lists[phase]
        kv_indptr = indptr[: self.batch + 1]
        kv_indptr[1:] = torch.cumsum(lens, dim=0)
        self.kernels["create_flashinfer_kv_indices_triton"][(self.batch,)](
            self.table, self.rows, lens, kv_indptr, None, indices, self.table.stride(0)
        )

    def fill_queries(self, phase: str, end: int) -> None:
        """Offsets of every request's query tokens."""
        indptr = self.lists[phase][0]
        indptr[: self.batch + 1] = torch.arange(
            0, end, step=self.nodes, dtype=torch.int32, device=self.device
        )

    def copy_in(self, to: dict[str, Tensor], given: dict[str, Tensor]) -> None:
        """Copy with one foreach call per dtype (model_executor/runner_utils/buffers.py:42)."""
        groups: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for name, source in given.items():
            target = to[name][: len(source)]
            targets, sources = groups.setdefault((target.dtype, source.dtype), ([], []))
            targets.append(target)
            sources.append(source)
        for targets, sources in groups.values():
            torch._foreach_copy_(targets, sources)


def kernels() -> dict[str, Any]:
    """Import SGLang's kernels.

    Raises
    ------
    ImportError
        If SGLang, or a part of it, is not installed.
    """
    return {
        name: getattr(import_module(f"sglang.srt.{module}"), name)
        for name, module in KERNELS.items()
    }


def operation(
    phase: str, runs: str, place: str, what: str
) -> Callable[[Callable[[Sglang], None]], Callable[[Sglang], None]]:
    """Append what is decorated to the list."""

    def append(run: Callable[[Sglang], None]) -> Callable[[Sglang], None]:
        OPERATIONS.append(Operation(phase, runs, place, what, run))
        return run

    return append


def power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


@operation(DRAFT, EAGER, "managers/overlap_utils.py:293", "gather the batch's lengths")
def _(s: Sglang) -> None:
    s.lens = s.pool_lens[s.rows]


@operation(DRAFT, EAGER, "speculative/base_spec_worker.py:200-214", "slots of all draft steps")
def _(s: Sglang) -> None:
    s.draft_slots = torch.empty((s.batch * s.topk * s.steps,), dtype=torch.int64, device=s.device)
    s.kernels["assign_draft_cache_locs_contiguous"][(s.batch,)](
        s.rows, s.table, s.lens, s.draft_slots, s.context, s.topk, s.steps
    )


@operation(DRAFT, EAGER, "speculative/base_spec_worker.py:265", "positions of the first step")
def _(s: Sglang) -> None:
    s.draft_positions = s.lens.repeat_interleave(s.topk, dim=0)


@operation(
    DRAFT,
    EAGER,
    "speculative/eagle_draft_cuda_graph_runner.py:543-568",
    "copy lengths, slots, positions and rows into the graph's buffers",
)
def _(s: Sglang) -> None:
    s.copy_in(
        s.draft,
        {
            "seq_lens": s.lens,
            "out_cache_loc": s.draft_slots,
            "positions": s.draft_positions,
            "rows": s.rows,
        },
    )


@operation(
    DRAFT,
    EAGER,
    "layers/attention/triton_backend.py:1839-1855",
    "index lists of all steps and branches",
)
def _(s: Sglang) -> None:
    s.kernels["generate_draft_decode_kv_indices"][(s.steps, s.batch, s.topk)](
        s.rows,
        s.table,
        s.lens,
        s.draft_indices,
        s.draft_indptr,
        s.draft_positions,
        s.context,
        s.draft_indices.shape[1],
        s.draft_indptr.shape[1],
        power_of_two(s.batch),
        power_of_two(s.steps),
        power_of_two(s.batch * s.topk),
        1,
    )


@operation(
    DRAFT,
    EAGER,
    "layers/attention/triton_backend.py:1943-1946, 282-329",
    "parts that a branch's keys are cut into",
)
def _(s: Sglang) -> None:
    s.kernels["get_num_kv_splits_triton"][(1,)](
        s.num_kv_splits,
        s.lens,
        s.batch,
        s.topk,
        *s.heads,
        MAX_KV_SPLITS,
        s.cores,
        MAX_NUM_SEQ=max(256, power_of_two(s.batch)),
    )


@operation(DRAFT, GRAPH, "speculative/eagle_utils.py:83-87", "slots by step")
def _(s: Sglang) -> None:
    slots = s.draft["out_cache_loc"].view(s.batch, s.topk, s.steps)
    s.step_slots = slots.permute(2, 0, 1).reshape(s.steps, -1)


@operation(DRAFT, GRAPH, "speculative/eagle_worker_v2.py:722", "the next step's positions, each")
def _(s: Sglang) -> None:
    for _step in range(s.steps - 1):
        s.draft["positions"].add_(1)


@operation(
    DRAFT,
    GRAPH,
    "speculative/eagle_draft_cuda_graph_runner.py:449",
    "the first step's positions again",
)
def _(s: Sglang) -> None:
    s.draft["positions"].sub_(s.steps - 1)


@operation(VERIFY, EAGER, "speculative/eagle_utils.py:170-171", "set the whole mask buffer")
def _(s: Sglang) -> None:
    s.custom_mask.fill_(True)


@operation(VERIFY, EAGER, "speculative/eagle_utils.py:485-493", "slots of the tree's nodes")
def _(s: Sglang) -> None:
    end = s.lens + s.nodes
    s.verify_slots = torch.empty((s.batch * s.nodes,), dtype=torch.int64, device=s.device)
    s.kernels["assign_extend_cache_locs"][(s.batch,)](
        s.rows, s.table, s.lens, end, s.verify_slots, s.context, power_of_two(s.batch)
    )


@operation(
    VERIFY,
    EAGER,
    "model_executor/runner/decode_cuda_graph_runner.py:953-960",
    "copy positions, slots, rows and lengths into the graph's buffers",
)
def _(s: Sglang) -> None:
    s.copy_in(
        s.verify,
        {
            "positions": s.tree_positions,
            "out_cache_loc": s.verify_slots,
            "rows": s.rows,
            "seq_lens": s.lens,
        },
    )


@operation(VERIFY, EAGER, "layers/attention/triton_backend.py:446-453", "query offsets")
def _(s: Sglang) -> None:
    s.fill_queries(VERIFY, (1 + s.batch) * s.nodes)


@operation(
    VERIFY,
    EAGER,
    "layers/attention/triton_backend.py:454-456, 371-382",
    "index lists of the prefixes",
)
def _(s: Sglang) -> None:
    s.fill_lists(VERIFY, s.verify["seq_lens"])


@operation(
    VERIFY,
    EAGER,
    "layers/attention/triton_backend.py:482",
    "assign the mask to itself, which copies nothing",
)
def _(s: Sglang) -> None:
    s.custom_mask[: s.custom_mask.shape[0]] = s.custom_mask


@operation(VERIFY, EAGER, "layers/attention/triton_backend.py:485-487", "mask offsets")
def _(s: Sglang) -> None:
    sizes = s.nodes * (s.verify["seq_lens"] + s.nodes)
    s.mask_indptr[1 : s.batch + 1] = torch.cumsum(sizes, dim=0)


@operation(
    VERIFY,
    EAGER,
    "model_executor/runner/decode_cuda_graph_runner.py:918",
    "copy the positions again, at the replay",
)
def _(s: Sglang) -> None:
    s.verify["positions"][: s.batch * s.nodes].copy_(s.tree_positions)


@operation(EXTEND, EAGER, "speculative/eagle_worker_v2.py:892", "accepted drafts")
def _(s: Sglang) -> None:
    s.correct = s.accept_lens - 1


@operation(EXTEND, EAGER, "speculative/base_spec_worker.py:129-132", "prefix and query lengths")
def _(s: Sglang) -> None:
    s.prefix_lens = s.lens.to(torch.int32)
    s.extend_lens = torch.full((s.batch,), s.nodes, dtype=torch.int32, device=s.device)


@operation(
    EXTEND, EAGER, "model_executor/forward_batch_info.py:832-837", "positions and query starts"
)
def _(s: Sglang) -> None:
    s.extend_positions = torch.empty(s.batch * s.nodes, dtype=torch.int64, device=s.device)
    starts = torch.empty(s.batch, dtype=torch.int32, device=s.device)
    s.kernels["compute_position_kernel"][(s.batch,)](
        s.extend_positions, starts, s.prefix_lens, s.extend_lens, True
    )


@operation(EXTEND, EAGER, "speculative/base_spec_worker.py:151", "lengths after the extend")
def _(s: Sglang) -> None:
    s.after = s.lens + s.nodes


@operation(
    EXTEND,
    EAGER,
    "speculative/eagle_draft_extend_cuda_graph_runner.py:508-532",
    "copy lengths, slots, positions, rows and counts into the graph's buffers",
)
def _(s: Sglang) -> None:
    s.copy_in(
        s.extend,
        {
            "seq_lens": s.after,
            "out_cache_loc": s.verify_slots,
            "positions": s.extend_positions,
            "rows": s.rows,
            "extend_seq_lens": s.extend_lens,
            "num_correct_drafts": s.correct,
            "num_accept_tokens": s.accept_lens,
        },
    )


@operation(EXTEND, EAGER, "layers/attention/triton_backend.py:516-523", "query offsets")
def _(s: Sglang) -> None:
    s.fill_queries(EXTEND, s.batch * s.nodes + 1)


@operation(
    EXTEND,
    EAGER,
    "layers/attention/triton_backend.py:531-537, 371-382",
    "prefix lengths again, and their index lists",
)
def _(s: Sglang) -> None:
    new = s.extend["extend_seq_lens"][: s.batch].to(torch.int32)
    lens = torch.clamp(s.extend["seq_lens"] - new, min=0).to(torch.int32)
    s.fill_lists(EXTEND, lens)


#: The functions of a phase, all of them or those that run one way.
RUNS = {
    (phase, runs): [
        entry.run for entry in OPERATIONS if entry.phase == phase and runs in (None, entry.runs)
    ]
    for phase in PHASES
    for runs in (None, EAGER, GRAPH)
}
