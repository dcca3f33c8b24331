"""Compile the kernels ahead of time for several GPUs, none of which is needed.

Launches are those of the tests of kernels, of each kernel the largest, and those of the attention
that ``specattn bench`` times: they run on CPU tensors, and where they would launch, a cubin is made
for the target, by Triton and the ptxas it brings. What comes out says whether the kernels compile,
fit into shared memory, and spill; not whether they are right or fast there.

    python -m bench.tools.compile_targets [--targets 80,86] [--sources tests,attention,gluon]
        [--largest] [--out FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import KernelInterface

from bench.suite import matrix
from bench.suite.batch import Arena, Batch
from bench.suite.machine import machine
from bench.suite.peers import own
from bench.suite.results import write
from bench.tools.sanitize import TESTS, UNFIT
from specattn.kernels.attention.tiles import DeviceLimits
from specattn.kernels.fused import stream, stream_fp8
from specattn.kernels.mla import mla_extend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

KB = 1024
# multiprocessors, shared memory of a CTA: A100, A10 / RTX 30, L4 / RTX 40, H100 / H200, B200
LIMITS = {
    80: DeviceLimits(108, 163 * KB, 8),
    86: DeviceLimits(84, 99 * KB, 8),
    89: DeviceLimits(128, 99 * KB, 8),
    90: DeviceLimits(132, 227 * KB, 9),
    100: DeviceLimits(148, 227 * KB, 10),
}
HOPPER = 90
# e4m3, and the first target that converts it
FLOAT8, FLOAT8_SINCE = torch.float8_e4m3fn, 89
CPU = torch.device("cpu")
# tokens of context, for kernels do not depend on their number
CONTEXT = 128


@dataclass(frozen=True)
class Launch:
    """A launch that was made in ``case``, with all it was given."""

    case: str
    kernel: Any
    arguments: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in _leaves(*self.arguments.values()) if isinstance(leaf, Tensor)]

    @property
    def kind(self) -> tuple[Any, ...]:
        """What tells tests' launches apart: the kernel, and the types of its floating tensors."""
        return self.name, frozenset(t.dtype for t in self.tensors if t.is_floating_point())

    @property
    def constants(self) -> dict[str, Any]:
        """What a kernel is compiled for: its constants, and what is left out."""
        found = self.arguments.items()
        return {name: value for name, value in found if name.isupper() or value is None}

    @property
    def size(self) -> int:
        """Grows with the constants that blocks are of."""
        sizes = (one for one in _leaves(*self.constants.values()) if isinstance(one, int))
        return math.prod(max(1, one) for one in sizes)

    def compile(self) -> Any:
        return self.kernel.run(grid=(1,), warmup=True, **self.arguments)


def _leaves(*values: Any) -> Iterator[Any]:
    """Yield arguments, and those in tuples one by one."""
    for value in values:
        yield from _leaves(*value) if isinstance(value, tuple) else [value]


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


class Notes:
    """The launches that are made in a context, as they would be on the target.

    Parameters
    ----------
    target : int
        Its compute capability.
    gluon : bool
        Whether Gluon kernels take part.
    """

    def __init__(self, target: int, *, gluon: bool = False) -> None:
        self.target, self.gluon, self.case = target, gluon, ""
        self.launches: list[Launch] = []

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Note the test that runs, as a plugin of pytest."""
        self.case = item.nodeid.rpartition("/")[2]

    @contextlib.contextmanager
    def taken(self) -> Iterator[Notes]:
        """Note launches until the context ends."""

        def launch(kernel: Any, grid: Any) -> Callable[..., None]:
            def run(*args: Any, **named: Any) -> None:
                arguments = dict(zip(kernel.arg_names, args, strict=False)) | named
                self.launches.append(Launch(self.case, kernel, arguments))

            return run

        limits = LIMITS[self.target]
        values = {
            "uses_triton": True,
            "launch.supports_pdl": limits.major >= 9,
            "fused.stream.multiprocessors": limits.sms,
            "attention.gluon.gluon_ok": self.gluon,
            "mla.gluon.gluon_ok": self.gluon,
        }
        with contextlib.ExitStack() as stack:
            for name, value in values.items():
                patch = mock.patch(f"specattn.kernels.{name}", return_value=value)
                stack.enter_context(patch)
            stack.enter_context(mock.patch.object(DeviceLimits, "of", return_value=limits))
            stack.enter_context(mock.patch.object(KernelInterface, "__getitem__", launch))
            yield self


def largest(launches: Iterable[Launch], kind: Callable[[Launch], Any]) -> list[Launch]:
    """Return the largest launch of every kind, the first of equal ones."""
    found: dict[Any, Launch] = {}
    for launch in launches:
        known = found.setdefault(kind(launch), launch)
        if launch.size > known.size:
            found[kind(launch)] = launch
    return list(found.values())


def of_tests(target: int) -> list[Launch]:
    """Return the largest launch of every kernel in the tests of kernels.

    The tests fail, for nothing is computed; what they check is left to those who run them.
    """
    # nobody reads why they fail: comparing long lists would take hours, where CI asks for all of it
    quiet = ["-qq", "--assert=plain", "--tb=no", "-p", "no:logging", "-p", "no:cacheprovider"]
    options = [*quiet, "-n", "0", "-k", f"{UNFIT} and not rooms and not oracles"]
    with Notes(target).taken() as notes, contextlib.redirect_stdout(io.StringIO()):
        ended = pytest.main([*options, str(TESTS)], plugins=[notes])
    if ended != pytest.ExitCode.TESTS_FAILED:
        raise RuntimeError(f"the tests of kernels did not run to their end: {ended!r}")
    return largest(notes.launches, lambda launch: launch.kind)


def of_attention(target: int, *, gluon: bool = False) -> list[Launch]:
    """Return the launches of the cells that ``specattn bench`` times, each once."""
    arena = Arena(CPU, only_one=True)
    with Notes(target, gluon=gluon).taken() as notes:
        for case in (case for cell in matrix.quick().cells for case in cell.cases):
            short = replace(case, lengths=(CONTEXT,) * case.batch)
            arena.reserve([short])
            notes.case = f"{case.name}, gluon" if gluon else case.name
            attention = own(short)(Batch(short, arena))
            attention.plan()
            attention.run(0)
        notes.case = "latent prompt"
        _latent_prompt()
    found: dict[str, Launch] = {}
    for launch in notes.launches:
        found.setdefault(str((launch.kind, launch.constants)), launch)
    return list(found.values())


def _latent_prompt() -> None:
    """Launch prompts of latent attention, which no cell has."""
    q = torch.zeros(64, 16, 576, dtype=torch.bfloat16)
    cache = torch.zeros(CONTEXT, 1, 576, dtype=torch.bfloat16)
    lens = torch.zeros(3, dtype=torch.int32)
    mla_extend(
        q,
        cache,
        cache[..., :512],
        q[..., :512].contiguous(),
        None,
        qo_indptr=lens,
        seq_lens=lens[:2],
        req_pool_indices=lens[:2].long(),
        req_to_token=torch.zeros(2, CONTEXT, dtype=torch.int32),
        max_q_len=32,
        sm_scale=0.1,
    )


def of_gluon(target: int) -> list[Launch]:
    """Return the launches of Gluon kernels, which run on Hopper alone."""
    if target != HOPPER:
        return []
    found = [*of_attention(target, gluon=True)]
    checks = {
        "products": stream._check,
        "wide products": stream._check_wide,
        "float8": stream_fp8._check,
    }
    for case, check in checks.items():
        # what a check finds of itself is nothing computed
        with Notes(target).taken() as notes, contextlib.suppress(ArithmeticError):
            notes.case = case
            check(CPU)
        found += notes.launches
    return [launch for launch in found if "gluon" in launch.name]


SOURCES: dict[str, Callable[[int], list[Launch]]] = {
    "tests": of_tests,
    "attention": of_attention,
    "gluon": of_gluon,
}


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


def compiled(target: int, sources: Iterable[str], *, few: bool) -> Iterator[dict[str, Any]]:
    """Compile the launches of some sources for ``target``; yield what ptxas made of each variant.

    Registers are per thread; the stack and shared memory are in bytes. ``few`` takes the largest
    launch of every kernel.
    """
    driver.set_active(OfflineDriver(target))
    made = set()
    launches = [launch for source in sources for launch in SOURCES[source](target)]
    for launch in largest(launches, lambda one: one.name) if few else launches:
        if target < FLOAT8_SINCE and any(t.dtype == FLOAT8 for t in launch.tensors):
            continue
        binary = launch.compile()
        if binary.hash in made:
            continue
        made.add(binary.hash)
        registers, stack = resources(binary.asm["cubin"])
        yield {
            "target": target,
            "case": launch.case,
            "kernel": launch.name,
            "registers": registers,
            "stack": stack,
            "shared": binary.metadata.shared,
            "warps": binary.metadata.num_warps,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", default=",".join(map(str, LIMITS)))
    parser.add_argument("--sources", default=",".join(SOURCES))
    parser.add_argument("--largest", action="store_true", help="one launch of every kernel")
    parser.add_argument("--out", type=Path, help="write the records there, as JSON")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SystemExit("unset TRITON_INTERPRET: the interpreter compiles nothing")
    # the tests take a CPU's tensors, and leave Triton as it is
    os.environ |= {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    records = []
    for target in map(int, options.targets.split(",")):
        for one in compiled(target, options.sources.split(","), few=options.largest):
            records.append(one)
            spill = f" {one['stack']} bytes spilled" if one["stack"] else ""
            print(
                f"SM{target} {one['kernel']:32} {one['registers']:4} registers "
                f"{one['shared'] / KB:6.1f} KB{spill}  {one['case']}",
                flush=True,
            )
    if options.out:
        versions = {"triton": triton.__version__, "kernels": machine()["kernels"]}
        write({"versions": versions, "records": records}, options.out)


if __name__ == "__main__":
    main()
