"""Compile for a GPU that is not there: its limits, a driver without it, small tensors."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import KernelInterface

from specattn.kernels.attention.tiles import DeviceLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KB = 1024
# multiprocessors, shared memory of a CTA: A100, A10 / RTX 30, L4 / RTX 40, H100 / H200, B200
LIMITS = {
    80: DeviceLimits(108, 163 * KB, 8),
    86: DeviceLimits(84, 99 * KB, 8),
    89: DeviceLimits(128, 99 * KB, 8),
    90: DeviceLimits(132, 227 * KB, 9),
    100: DeviceLimits(148, 227 * KB, 10),
}
BF16, F16, F32, I32, I64 = (torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64)
# e4m3, in cases whose name says so, and the first target that converts it
FLOAT8, FLOAT8_SINCE = torch.float8_e4m3fn, 89
BATCH, CONTEXT = 8, 1024


@dataclass(frozen=True)
class Compiled:
    """What ptxas made of one variant of a kernel for one target."""

    target: int
    case: str
    kernel: str
    registers: int
    stack: int
    shared: int
    warps: int


class OfflineDriver:
    """Stands in for the CUDA driver: names the target, launches nothing."""

    def __init__(self, target: int) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.target, 32)

    def get_current_device(self) -> int:
        # compiled kernels are kept per device
        return self.target

    def get_current_stream(self, device: int) -> int:
        return 0


def zeros(*shape: int, dtype: torch.dtype = I64) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def launches_early() -> bool:
    """Whether the target knows programmatic dependent launch."""
    return LIMITS[driver.active.target].major >= 9


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers per thread and bytes of stack, which is where spills go, of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


def compile_case(target: int, name: str, case: Callable[[], None]) -> Iterator[Compiled]:
    """Run one case's operations for ``target``; yield each kernel they launch, once."""
    if ("float8" in name and target < FLOAT8_SINCE) or ("gluon" in name and target != 90):
        return
    made: dict[str, Compiled] = {}

    def launch(kernel: Any, grid: Any) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            binary = kernel.run(*args, grid=grid, warmup=True, **kwargs)
            registers, stack = resources(binary.asm["cubin"])
            made.setdefault(
                binary.hash,
                Compiled(
                    target,
                    name,
                    kernel.fn.__name__,
                    registers,
                    stack,
                    binary.metadata.shared,
                    binary.metadata.num_warps,
                ),
            )

        return run

    driver.set_active(OfflineDriver(target))
    limits = mock.patch.object(DeviceLimits, "of", return_value=LIMITS[target])
    early = mock.patch("specattn.kernels.launch.supports_pdl", return_value=launches_early())
    triton = mock.patch("specattn.kernels.uses_triton", return_value=True)
    with limits, early, triton, mock.patch.object(KernelInterface, "__getitem__", launch):
        case()
    yield from made.values()
