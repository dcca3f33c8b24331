"""One captured bucket: what it baked in, its replay, and what capturing it took."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch

from specattn.errors import CaptureMismatch

if TYPE_CHECKING:
    from torch import Tensor

    from specattn.buffers import Fingerprint
    from specattn.cuda_graph.capture_guard import Watch
    from specattn.cuda_graph.programs import BoundProgram


@dataclass(frozen=True)
class Captured:
    """One bucket: what runs, what was recorded, and over which memory.

    A batch that no bucket holds has neither a graph nor a ``watch``. ``order`` counts the captures
    of a runner, which took ``seconds`` each; ``nbytes`` is what the graphs' memory pool grew by.
    """

    bucket: int
    bound: BoundProgram
    fingerprint: Fingerprint
    outputs: Any
    graph: torch.cuda.CUDAGraph | None
    watch: Watch | None = field(repr=False)
    order: int = 0
    seconds: float = 0.0
    nbytes: int = 0

    def check(self) -> None:
        """Raise `CaptureMismatch` if the buffers are not those of the capture.

        `Watch` says what is compared every time and what in turn. Only if something is not what it
        was, the whole fingerprint is made again, to see whether it matters.
        """
        if self.watch is None or self.watch.unchanged():
            return
        now = self.bound.fingerprint()
        if now == self.fingerprint:
            self.watch.renew()
            return
        for (name, before), (_, after) in zip(_flat(self.fingerprint), _flat(now), strict=True):
            if before != after:
                raise CaptureMismatch(name, before, after)

    def schedule(self, seq_lens_cpu: Tensor | None) -> None:
        """Plan on the host for the lengths of the first requests; the others are padding."""
        if seq_lens_cpu is not None and len(seq_lens_cpu) < self.bucket:
            padding = self.bucket - len(seq_lens_cpu)
            seq_lens_cpu = torch.nn.functional.pad(seq_lens_cpu, (0, padding))
        self.bound.schedule(seq_lens_cpu)

    def replay(self) -> Any:
        """Run over the current buffers."""
        if self.graph is None:
            return run_eagerly(self.bound)
        self.graph.replay()
        return self.outputs

    def report(self, part: str) -> GraphReport:
        """Return what the capture took, of a part of this name."""
        digest = sha256(repr(_flat(self.fingerprint)).encode()).hexdigest()[:12]
        return GraphReport(
            part, self.bucket, self.order, self.seconds, self.nbytes, self.graph is not None, digest
        )


@torch.no_grad()
def run_eagerly(bound: BoundProgram) -> Any:
    """Fill and run; models may hold parameters, and what buffers hold has no history."""
    bound.fill()
    return bound.run()


def _flat(found: Fingerprint) -> list[tuple[str, object]]:
    """Return a fingerprint with settings field by field; a name may come more than once."""
    flat: list[tuple[str, object]] = []
    for name, value in found:
        if isinstance(value, dict):
            flat += [(f"{name}.{key}", part) for key, part in value.items()]
        else:
            flat.append((name, value))
    return flat


@dataclass(frozen=True)
class GraphReport:
    """What capturing one bucket took.

    Parameters
    ----------
    part : str
        The mode, or the part of a step.
    bucket : int
        The batch size.
    order : int
        How many buckets the runner had captured before.
    seconds : float
        Host time: compiling (or loading) kernels, a run or two to warm up, and the recording.
    nbytes : int
        What the memory pool that all graphs share grew by, in bytes. The largest bucket comes
        first and takes most of it. What the driver keeps of a graph is not in it.
    recorded : bool
        Whether there is a CUDA graph; without, the bucket runs eagerly over the same buffers.
    digest : str
        Of the fingerprint: 12 hexadecimal digits, the same as long as a replay finds the
        addresses, shapes and settings of the capture.
    """

    part: str
    bucket: int
    order: int
    seconds: float
    nbytes: int
    recorded: bool
    digest: str
