"""The time line of a recorded step: where its time goes.

A trace is a JSON file of `torch.profiler` (Chrome's format). A step is split into phases by the
kernels that stand between them, and its kernels into classes by their names; see `PHASES` and
`CLASSES`.
"""

from __future__ import annotations

import json
import re
import statistics
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PHASES = ("metadata", "draft", "tree", "verify", "accept", "extend")
CLASSES = ("target GEMM", "draft GEMM", "attention", "glue", "other", "idle")
BEGIN, END, PLAN = "begin_step", r"end_step|land_step|write_output", "_plan"
TREE, ACCEPT = "build_tree|best_first", r"accept_(greedy|sampled|rejection)|commit_kv|gather_path"
ATTENTION = (
    r"tree_attention|gluon_(tree|extend)|mla_|fixed_(attention|merge)|_extend_kernel|"
    r"^merge_kernel|merge_lse|flash::|flash_fwd|FlashAttn|fmha|BatchPrefill|BatchDecode|MergeState|xqa"
)
GEMM = r"gluon_linear|gemm|gemv|nvjet|cutlass|cublas|xmma|splitk|triton_(tem|mm)"
# of a model, but neither its GEMMs nor its attention
GLUE = (
    r"norm|rot(ate|ary)|rope|silu|gelu|act_and_mul|embed|store_kernel|split_k|elementwise|triton_|"
    r"index|gather|scatter|cat|copy|memcpy|memset|fill"
)
# choosing tokens and beams, and index lists
NOT_GLUE = (
    r"argmax|top_(splits|parts|merge)|topk|sort|softmax|select_kernel|append_kernel|accept|"
    r"multinomial|cumsum|scan|_fill_|fill_(window|lists|slots|draft|.*_table)|_plan|_step|write_output"
)
# gaps up to this are what a launch within a graph costs
SHORT_GAP_US = 2.0
MOST_NAME = 160
MODEL_PHASES = ("draft", "verify", "extend")


@dataclass(frozen=True)
class Kernel:
    """A kernel, copy or fill: microseconds from any zero, and its stream."""

    name: str
    start: float
    us: float
    stream: int

    @property
    def end(self) -> float:
        return self.start + self.us

    def like(self, pattern: str) -> bool:
        return re.search(pattern, self.name, re.IGNORECASE) is not None


@dataclass(frozen=True)
class Trace:
    """Kernels in order of their start, on what device, and the step's length without profiler."""

    kernels: list[Kernel]
    device: str = ""
    steps: int = 1
    untraced_us: float | None = None


@dataclass(frozen=True)
class Step:
    """A step's kernels with the phase of each; ``after_us`` until the next step began."""

    kernels: list[Kernel]
    phases: list[str]
    after_us: float | None = None

    @property
    def start(self) -> float:
        return self.kernels[0].start

    @property
    def us(self) -> float:
        return max(kernel.end for kernel in self.kernels) - self.start


def read(path: Path) -> Trace:
    """Read a trace."""
    found = json.loads(path.read_text())
    kernels = [
        Kernel(event["name"], event["ts"], event["dur"], event["args"]["stream"])
        for event in found["traceEvents"]
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and event["ph"] == "X"
    ]
    properties = found.get("deviceProperties") or [{}]
    kernels.sort(key=lambda kernel: kernel.start)
    return Trace(kernels, properties[0].get("name", ""))


def record(step: Callable[[], object], *, steps: int = 3, timed: int = 20) -> Trace:
    """Time ``timed`` calls, and record ``steps`` more with the profiler.

    Parameters
    ----------
    step : callable
        One step, e.g. a graph's replay. Whatever was compiled or captured is so already.
    steps, timed : int
        Calls under the profiler and, before them, without it.
    """
    import torch

    marks = [torch.cuda.Event(enable_timing=True) for _ in range(timed + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    # from mark to mark a launch is included, where the device waits for it
    lengths = [1e3 * a.elapsed_time(b) for a, b in pairwise(marks)]
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(whole))
        kernels = read(whole).kernels
    untraced = round(statistics.median(lengths), 1) if lengths else None
    return Trace(kernels, torch.cuda.get_device_name(), steps, untraced)


def split(trace: Trace) -> list[Step]:
    """Split a trace into steps.

    A step begins with ``begin_step`` on the stream of the first one and ends with the last
    ``end_step`` or ``write_output`` before the next. Without such kernels, all steps of a recording
    have as many.

    Raises
    ------
    ValueError
        If there is no kernel, or neither way of splitting fits.
    """
    kernels = trace.kernels
    marks = [at for at, kernel in enumerate(kernels) if kernel.like(BEGIN)]
    if marks:
        starts = [at for at in marks if kernels[at].stream == kernels[marks[0]].stream]
    elif kernels and len(kernels) % trace.steps == 0:
        starts = list(range(0, len(kernels), len(kernels) // trace.steps))
    else:
        raise ValueError(f"{len(kernels)} kernels are not {trace.steps} equal steps")
    found = []
    for start, stop in zip(starts, [*starts[1:], len(kernels)], strict=True):
        ends = [at for at in range(start, stop) if kernels[at].like(END)]
        own = kernels[start : ends[-1] + 1 if ends else stop]
        after = kernels[stop].start - max(k.end for k in own) if stop < len(kernels) else None
        found.append(Step(own, phases_of(own), after))
    return found


def phases_of(kernels: Sequence[Kernel]) -> list[str]:
    """Return the phase of every kernel of a step; of sub-batches by the stream of each."""
    streams = {kernel.stream for kernel in kernels if kernel.like(BEGIN)}
    if len(streams) < 2:
        return _phases(kernels)
    found = [""] * len(kernels)
    # work on streams without a step of their own goes with the first sub-batch's
    first = kernels[0].stream
    for stream in streams:
        own = [
            at
            for at, kernel in enumerate(kernels)
            if (kernel.stream if kernel.stream in streams else first) == stream
        ]
        for at, phase in zip(own, _phases([kernels[at] for at in own]), strict=True):
            found[at] = phase
    return found


def _phases(kernels: Sequence[Kernel]) -> list[str]:
    """Metadata, draft, ``build_tree``, verify, from the last GEMM on accept, extend."""
    count = len(kernels)

    def places(pattern: str, begin: int, end: int) -> list[int]:
        return [at for at in range(begin, end) if kernels[at].like(pattern)]

    trees = places(TREE, 0, count)
    tree, verify = (trees[0], trees[-1] + 1) if trees else (count, count)
    model = next(iter(places(GEMM, 0, count)), count)
    plans = places(f"{BEGIN}|{PLAN}", 0, min(model, tree))
    draft = plans[-1] + 1 if plans else 0
    if not trees:
        tree = verify = draft
    marks = places(ACCEPT, verify, count)
    accept, extend = (marks[0], marks[-1] + 1) if marks else (count, count)
    # the target's choices come between its last GEMM and the kernel that accepts
    gemms = places(GEMM, verify, accept) if marks else []
    accept = gemms[-1] + 1 if gemms else accept
    begins = (0, draft, tree, verify, accept, extend, count)
    return [
        phase
        for phase, (begin, end) in zip(PHASES, pairwise(begins), strict=True)
        for _ in range(begin, end)
    ]


def class_of(kernel: Kernel, phase: str) -> str:
    """Return what kind of work a kernel is, by its name; what is unknown is ``other``."""
    if kernel.like(ATTENTION):
        return "attention"
    if kernel.like(GEMM):
        return "target GEMM" if phase == "verify" else "draft GEMM"
    if phase in MODEL_PHASES and kernel.like(GLUE) and not kernel.like(NOT_GLUE):
        return "glue"
    return "other"


def gaps(kernels: Sequence[Kernel]) -> list[tuple[float, float, Kernel]]:
    """Return when no stream was busy: begin, length, and the kernel that came next."""
    found, busy = [], kernels[0].end
    for kernel in kernels[1:]:
        if kernel.start > busy:
            found.append((busy, kernel.start - busy, kernel))
        busy = max(busy, kernel.end)
    return found


def table(step: Step) -> dict[str, dict[str, float]]:
    """Return microseconds by phase and class; they add up to the step.

    Of the time in which any kernel is there, all since the one before it ended is a kernel's: most
    are launched long before they may read, and wait. The rest belongs to the phase of the kernel
    that comes next.
    """
    found = {phase: dict.fromkeys(CLASSES, 0.0) for phase in PHASES}
    ended = sorted(zip(step.kernels, step.phases, strict=True), key=lambda one: one[0].end)
    idle = gaps(step.kernels)
    before = step.start
    for kernel, phase in ended:
        us, before = kernel.end - before, kernel.end
        while idle and idle[0][0] < kernel.end:
            us -= idle.pop(0)[1]
        found[phase][class_of(kernel, phase)] += us
    phase_of = dict(zip(map(id, step.kernels), step.phases, strict=True))
    for _, length, after in gaps(step.kernels):
        found[phase_of[id(after)]]["idle"] += length
    return found


def numbers(trace: Trace, step: Step) -> dict[str, Any]:
    """Return everything about a step: its length, gaps, time by phase and class, its kernels."""
    cells = table(step)
    long = [length for _, length, _ in gaps(step.kernels) if length > SHORT_GAP_US]
    totals: dict[tuple[str, str], list[float]] = defaultdict(list)
    for kernel, phase in zip(step.kernels, step.phases, strict=True):
        totals[kernel.name[:MOST_NAME], phase].append(kernel.us)
    return {
        "device": trace.device,
        "us": round(step.us, 3),
        "untraced_us": trace.untraced_us,
        "after_us": None if step.after_us is None else round(step.after_us, 3),
        "gaps_over_2us": {
            "count": len(long),
            "us": round(sum(long), 3),
            "share": round(sum(long) / step.us, 5),
        },
        "phases": {p: {c: round(us, 3) for c, us in row.items()} for p, row in cells.items()},
        "by_name": [
            {"name": name, "phase": phase, "count": len(times), "us": round(sum(times), 3)}
            for (name, phase), times in sorted(totals.items(), key=lambda item: -sum(item[1]))
        ],
        "kernels": len(step.kernels),
    }


def markdown(found: dict[str, Any]) -> str:
    """Return the time by phase and class as a table, and a line about gaps."""
    rows = [*found["phases"].items()]
    rows.append(("all", {c: sum(row[c] for _, row in rows) for c in CLASSES}))
    lines = [f"| us | {' | '.join(CLASSES)} | all |", "|---" * (len(CLASSES) + 2) + "|"]
    for phase, row in rows:
        cells = " | ".join(f"{row[c]:.1f}" for c in CLASSES)
        lines.append(f"| {phase} | {cells} | {sum(row.values()):.1f} |")
    gap = found["gaps_over_2us"]
    untraced = found["untraced_us"]
    lines += [
        "",
        f"{found['kernels']} kernels, gaps over {SHORT_GAP_US:g} us: "
        f"{gap['count']}, {gap['us']:.1f} us, {gap['share']:.2%} of the step's "
        f"{found['us']:.1f} us" + (f" ({untraced:.1f} untraced)" if untraced else ""),
    ]
    return "\n".join(lines)


def middle(trace: Trace) -> Step:
    """Return the recorded step of median length."""
    steps = sorted(split(trace), key=lambda step: step.us)
    return steps[(len(steps) - 1) // 2]
