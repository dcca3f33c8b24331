"""Pack SGLang for a Hopper machine that reaches no package index.

The machine has CUDA 13, Python 3.12, the torch and Triton that the release pins (2.11 and 3.6 for
SGLang 0.5.15, 2.14.1 and 3.8 for 0.5.23), transformers, and nothing else of SGLang's. What is
packed starts its engine with Llama models, EAGLE-3 heads, Qwen3.5 and its MTP layer, and the pair
that comes with this library: SGLang itself, the packages it imports at start, its CUDA kernels for
SM90 alone, and the kernels that it would otherwise compile at first use. Run it with Python 3.12,
that torch, its torchvision, Triton, transformers, what SGLang imports while its kernels are built
(aiohttp, ninja, nvidia-ml-py, psutil, requests, and what these require), and CUDA 13's ``nvcc``,
``gcc`` and ``readelf``; no GPU is needed. What `NEEDS` and a release name is fetched.

    python bench/engines/make_bundle.py --out FOLDER [--sglang 0.5.23]

A bundle that is larger than ``--part-mib`` comes in parts, each in a numbered folder, ``env.sh`` in
the first: copy what they hold into one folder of the other machine. There, in this repository's
root, ``source FOLDER/env.sh`` joins and unpacks the parts once, to ``~/.sgl-site``, and sets the
environment; `PYTHONPATH` keeps what it had, as a torch beside the machine's own.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

CACHE = Path(os.environ.get("SGL_BUNDLE_CACHE", Path.home() / ".cache" / "sgl-bundle"))
# what `sglang.Engine` and its server import at start; found by importing them
NEEDS = (
    "annotated-types",
    "attrs",
    "dill",
    "distro",
    "fastapi",
    "gguf",
    "jsonschema",
    "jsonschema-specifications",
    "loguru",
    "msgspec",
    "opentelemetry-api",
    "orjson",
    "partial-json-parser",
    "pybase64",
    "pydantic==2.14.4",
    "pydantic-core==2.50.5",
    "python-multipart",
    "pyzmq",
    "referencing",
    "rpds-py",
    "setproctitle",
    "sniffio",
    "starlette",
    "typing-inspection",
    "uvicorn",
    "zstandard",
)
PLATFORMS = ("2014", "_2_17", "_2_27", "_2_28", "_2_34")
# device images of FA3: its scheduler and merge, and head_dim 128 and 64 in bfloat16 without a cap
FA3_IMAGES, FA3_KEPT = 372, {1, 2, 3, 4, 6, 8, 11, 63, 64, 66, 68, 71}
SM90 = 90

BUILD_0515 = """
import torch
from flashinfer import jit
from sglang.jit_kernel import activation, clamp_position, kvcache, norm, rope
from sglang.jit_kernel.utils import override_jit_cuda_arch

bf16, i32 = torch.bfloat16, torch.int32
with override_jit_cuda_arch(9, 0):
    activation._jit_activation_module(bf16)
    norm._jit_qknorm_module(64, bf16)
    for head_dim in (64, 128):
        rope._jit_fused_rope_module(True, head_dim, bf16)
    # bytes of a token's keys: 8 heads of 128, 2 of these, 3 of 64, 2 of these
    for size in (2048, 512, 384, 256):
        assert kvcache.can_use_store_cache(size)
    for dtype in (torch.int64, torch.int32):
        clamp_position._jit_clamp_position_module(dtype)
head = bf16, bf16, bf16, i32, 128, 128, 0, False, False
for spec in (
    jit.norm.gen_norm_module(),
    jit.gen_batch_decode_module(*head),
    jit.gen_batch_prefill_module("fa2", *head, False),
    jit.gen_batch_prefill_module("fa3", *head, False),
):
    if not spec.is_aot:
        spec.build(verbose=False)
"""
BUILD_0523 = """
import torch
from sglang.kernels.jit.utils import arch
from sglang.kernels.ops.activation import activation
from sglang.kernels.ops.attention import clamp_position, rope
from sglang.kernels.ops.kvcache import kvcache
from sglang.kernels.ops.layernorm import norm
from sglang.kernels.ops.speculative import sampling, tree

bf16 = torch.bfloat16
# flags of the compiler are those of a CUDA device
arch.is_cuda = lambda: True
with arch.override_jit_cuda_arch(9, 0):
    activation.activation_module(bf16)
    norm._jit_qknorm_module(64, bf16)
    for head_dim in (64, 128):
        rope._jit_fused_rope_module(True, head_dim, bf16, bf16)
    # bytes of a token's keys: 8 heads of 128, 2 of these, 3 of 64, 2 of these
    for size in (2048, 512, 384, 256):
        assert kvcache.can_use_store_cache(size)
    for dtype in (torch.int64, torch.int32):
        clamp_position._jit_clamp_position_module(dtype)
    tree._jit_tree_module()
    sampling._jit_sampling_module(4, True)
"""
FIND_BUILT = """

_find_in_cache = find_prebuilt


def find_prebuilt(*, scope, module_name):
    built = pathlib.Path(__file__).parents[5] / "jit" / module_name / f"{module_name}.so"
    return built if built.is_file() else _find_in_cache(scope=scope, module_name=module_name)
"""
# progress in notebooks, and speech
STUBS = {
    "IPython/__init__.py": "",
    "IPython/display.py": "HTML = display = clear_output = lambda *a, **k: None\n",
    "soundfile.py": "",
}


@dataclass(frozen=True)
class Release:
    """What a release of SGLang is packed of.

    Parameters
    ----------
    torch : str
        The torch that its kernels are built for.
    wheels : dict of str to str
        SGLang, its kernels and what they are compiled with, with their versions.
    needs : tuple of str
        What it imports at start, beside `NEEDS`.
    build : str
        The program that compiles kernels.
    drop : tuple of str
        Starts of the paths in the wheels that its engine does without.
    models : set of str
        The models that are kept, or none to keep all.
    stubs : dict of str to str
        Modules that SGLang imports and nothing here runs, beside `STUBS`: those that import the
        CUTLASS DSL (200 MB) or other packages, of which it asks whether something is one.
    """

    torch: str
    wheels: dict[str, str]
    needs: tuple[str, ...]
    build: str
    drop: tuple[str, ...]
    models: frozenset[str] = frozenset()
    stubs: dict[str, str] = field(default_factory=dict)


KERNEL_DROP = tuple(
    f"sgl_kernel/{name}"
    for name in ("sm100", "infllm_ops", "spatial_ops", "testing", "flashmla_ops")
)
RELEASES = {
    "0.5.15": Release(
        torch="2.11",
        wheels={
            "sglang": "0.5.15",
            "sglang-kernel": "0.4.4",
            "flashinfer-python": "0.6.12",
            "apache-tvm-ffi": "0.1.11",
        },
        needs=("compressed-tensors", "openai==2.6.1", "sgl-deep-gemm==0.1.4"),
        build=BUILD_0515,
        drop=(
            *("sglang/multimodal_gen", "sglang/test", "sglang/eval", "sglang/srt/grpc"),
            "sglang/jit_kernel/tests",
            *("flashinfer/data/cutlass", "flashinfer/data/cccl"),
        ),
        models=frozenset(
            (
                *("__init__.py", "registry.py", "utils.py"),
                *("llama.py", "llama_eagle.py", "llama_eagle3.py"),
                *("dflash.py", "qwen2.py", "qwen3.py", "deepseek_common"),
                # of hybrid targets, with what they import
                *("qwen2_moe.py", "qwen3_5.py", "qwen3_5_mtp.py"),
                *("qwen3_next.py", "qwen3_next_mtp.py", "qwen3_vl.py"),
            )
        ),
        stubs={
            "sglang/srt/models/qwen3_asr.py": "class Qwen3ASRForConditionalGeneration:\n    pass\n",
            "sglang/srt/layers/attention/dsa_backend.py": "class DeepseekSparseAttnBackend:\n"
            "    pass\n\n\nclass DeepseekSparseAttnMultiStepBackend:\n    pass\n",
        },
    ),
    "0.5.23": Release(
        torch="2.14.1",
        wheels={
            "sglang": "0.5.23",
            "sglang-kernel": "0.4.10",
            "flashinfer-python": "0.7.2",
            "apache-tvm-ffi": "0.1.11",
        },
        needs=(
            *("compressed-tensors==0.18.0", "datasets", "multiprocess", "openai==2.8.0"),
            *("transformers==5.19.0", "xgrammar==0.2.7"),
        ),
        build=BUILD_0523,
        # what is left of FlashInfer compiles kernels there that are not built here
        drop=(
            *("sglang/multimodal_gen", "sglang/test"),
            # servers in Rust
            *(
                f"sglang/srt/rust_extensions/_{name}"
                for name in ("bench", "grpc", "multi", "server")
            ),
            *("flashinfer/experimental/b12x", "flashinfer/experimental/cake_vsa"),
            *("flashinfer/moe_ep/kernel_src", "b12x"),
            *(
                f"flashinfer/data/csrc/{name}"
                for name in ("alphamoe", "bgmv", "blackwell", "cake_")
            ),
            *(
                f"flashinfer/data/csrc/{name}/"
                for name in ("experimental", "fused_moe", "gdn", "kda")
            ),
            "flashinfer/data/csrc/fmha_v2",
        ),
        stubs={
            # for SM100
            "sglang/kernels/ops/gemm/cutedsl_dual_gemm.py": "MAX_DUAL_GEMM_DECODE_TOKENS = 16\n\n\n"
            "class DualGemmQuantMode:\n"
            "    UNQUANT = DYNAMIC_PER_TOKEN = STATIC_PER_TENSOR = None\n\n\n"
            "def can_use_dual_gemm(*args):\n    return False\n",
            "sglang/srt/layers/attention/flashmla_backend.py": "class FlashMLABackend:\n"
            "    pass\n\n\nclass FlashMLAMultiStepDraftBackend:\n    pass\n",
        },
    ),
}

ENV = """# source this in the repository's root
site=${SGL_SITE:-$HOME/.sgl-site}
if [ ! -d "$site" ]; then
  mkdir -p "$site.part" && cat "$(dirname "${BASH_SOURCE[0]}")"/site.tar.xz.* | xz -dc -T0 |
    tar xif - -C "$site.part" && mv "$site.part" "$site"
fi
# what an installation of this library would leave: its entry points
python3 - "$site" <<'PY'
import sys, tomllib, pathlib
project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
folder = pathlib.Path(sys.argv[1], f"{project['name']}-0.0.0.dist-info")
folder.mkdir(exist_ok=True)
about = f"Metadata-Version: 2.1\\nName: {project['name']}\\nVersion: 0.0.0\\n"
(folder / "METADATA").write_text(about)
lines = []
for group, found in project.get("entry-points", {}).items():
    lines += [f"[{group}]", *(f"{name} = {value}" for name, value in found.items())]
(folder / "entry_points.txt").write_text("\\n".join(lines) + "\\n")
PY
export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 TVM_FFI_CACHE_DIR="$site/tvm-ffi"
export FLASHINFER_WORKSPACE_BASE="$HOME" FLASHINFER_CUDA_ARCH_LIST=9.0a
# a crash ends at once
export SGLANG_CUDA_COREDUMP_BEFORE_CRASH=0
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
"""


def download(requirement: str, folder: Path) -> Path:
    """Return the wheel of a requirement for CPython 3.12 on x86-64 Linux."""
    name = re.split("[=<>]", requirement)[0]
    pattern = f"{name.replace('-', '_')}-*.whl".lower()
    folder.mkdir(parents=True, exist_ok=True)

    def known() -> list[Path]:
        return [path for path in folder.iterdir() if Path(path.name.lower()).match(pattern)]

    if not known():
        platforms = [f"--platform=manylinux{p}_x86_64" for p in PLATFORMS]
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
        command += ["--only-binary=:all:", "--python-version=3.12", "--implementation=cp"]
        subprocess.run([*command, *platforms, "-d", str(folder), requirement], check=True)
    return max(known())


def unpack(wheel: Path, site: Path, *dropped: str) -> None:
    """Unpack a wheel but for what starts with ``dropped``."""
    with zipfile.ZipFile(wheel) as archive:
        names = (name for name in archive.namelist() if not name.startswith(dropped))
        archive.extractall(site, names)


def keep_images(path: Path, kept: set[int] | None = None, count: int | None = None) -> None:
    """Take a library's device code away but for SM90's, and but for images numbered in ``kept``.

    An image keeps its place and its header. Host code stays as it is. A launch of code that is gone
    is an error of CUDA's.
    """
    sections = subprocess.run(
        ["readelf", "-SW", str(path)], check=True, capture_output=True, text=True
    ).stdout
    line = next(line for line in sections.splitlines() if " .nv_fatbin " in line)
    at, size = (int(field, 16) for field in line.split("]")[1].split()[3:5])
    end, image = at + size, 0
    with path.open("r+b") as library:
        while at < end:
            library.seek(at)
            magic, version, header, length = struct.unpack("<IHHQ", library.read(16))
            if magic != 0xBA55ED50:
                at += 8
                continue
            image += 1
            library.seek(at + header)
            body = library.read(length)
            if kept is None or image in kept:
                code = b"".join(entry for entry, arch in entries(body) if arch == SM90)
                library.seek(at)
                library.write(struct.pack("<IHHQ", magic, version, header, len(code)))
            else:
                # entries without code
                code = b"".join(
                    entry[: struct.unpack("<I", entry[4:8])[0]].ljust(len(entry), b"\0")
                    for entry, _ in entries(body)
                )
            library.seek(at + header)
            library.write(code.ljust(length, b"\0"))
            at += header + length
    if count is not None and image != count:
        raise SystemExit(f"{path.name} has {image} device images, not {count}: another version?")


def entries(body: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield the entries of an image, each with the architecture it is for."""
    at = 0
    while at < len(body):
        header, size = struct.unpack("<IQ", body[at + 4 : at + 16])
        (arch,) = struct.unpack("<I", body[at + 28 : at + 32])
        yield body[at : at + header + size], arch
        at += header + size


def sglang(release: Release, site: Path, wheels: Path, *, large: bool = False) -> None:
    """Unpack SGLang, its kernels and FlashInfer, without what the engine does not touch.

    ``large`` keeps FA3's kernels of all head sizes.
    """
    root = site / "sglang"
    for name in release.wheels:
        unpack(wheel(release, name, wheels), site, *release.drop, *KERNEL_DROP, "triton_kernels")
    for path in (root / "srt" / "models").iterdir():
        if release.models and path.name not in release.models:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    # newer transformers knows some of these models itself
    register = re.compile(r"(Auto(?:Config|Processor)\.register\([^()]*[^(),=\s])\)")
    for path in (root / "srt" / "configs").glob("*.py"):
        text = path.read_text()
        again = register.sub(
            lambda call: call[0] if "exist_ok" in call[0] else call[1] + ", exist_ok=True)", text
        )
        path.write_text(again)
    ops = site / "sgl_kernel"
    keep_images(ops / "sm90" / "common_ops.abi3.so")
    if large:
        keep_images(ops / "flash_ops.abi3.so")
    else:
        keep_images(ops / "flash_ops.abi3.so", FA3_KEPT, FA3_IMAGES)


def wheel(release: Release, name: str, wheels: Path) -> Path:
    """Return the wheel of a package whose version is fixed."""
    return download(f"{name}=={release.wheels[name]}", wheels)


def build(release: Release, site: Path, wheels: Path, work: Path) -> None:
    """Compile what would be compiled at first use; headers come from the whole FlashInfer."""
    full = work / "flashinfer"
    if not full.exists():
        unpack(wheel(release, "flashinfer-python", wheels), full)
    stubs = work / "stubs"
    stubs.mkdir(parents=True, exist_ok=True)
    (stubs / "empty.c").write_text("int cuPointerGetAttribute(void) { return 100; }\n")
    # those of the driver are on the other machine
    for name, soname in {
        "libcudart.so": "libcudart.so.13",
        "libcuda.so": "libcuda.so.1",
        "libcuda.so.1": "libcuda.so.1",
    }.items():
        command = ["gcc", "-shared", "-fPIC", "-o", str(stubs / name), f"-Wl,-soname,{soname}"]
        subprocess.run([*command, str(stubs / "empty.c")], check=True)
    environment = os.environ | {
        "PYTHONPATH": f"{full}:{site}",
        "LIBRARY_PATH": str(stubs),
        "LD_LIBRARY_PATH": str(stubs),
        "TVM_FFI_CACHE_DIR": str(work / "tvm-ffi"),
        "SGLANG_JIT_CACHE_DIR": str(work / "jit"),
        "FLASHINFER_WORKSPACE_BASE": str(work),
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        # headers of CUDA's libraries, which come with torch
        "CPATH": ":".join(map(str, Path(torch.__file__).parents[1].glob("nvidia/*/include"))),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "MAX_JOBS": str(os.cpu_count()),
    }
    subprocess.run([sys.executable, "-c", release.build], check=True, env=environment)
    # where the next build looks for them, too
    built = full / "flashinfer" / "data" / "aot"
    built.mkdir(exist_ok=True)
    for path in work.glob(".cache/flashinfer/*/*/cached_ops/*/*.so"):
        (built / path.stem).mkdir(exist_ok=True)
        shutil.copy(path, built / path.stem)
    shutil.copytree(built, site / "flashinfer" / "data" / "aot")
    for path in work.glob("tvm-ffi/*/*.so"):
        folder = site / "tvm-ffi" / path.parent.name
        folder.mkdir(parents=True)
        shutil.copy(path, folder)
    give_built(work, site)


def give_built(work: Path, site: Path) -> None:
    """Let SGLang 0.5.23 find kernels by name; its cache asks for the compiler that made them."""
    cache = site / "sglang" / "kernels" / "jit" / "utils" / "compile" / "cache.py"
    for path in work.glob("jit/*/*/*/*/*.so"):
        folder = site / "jit" / path.stem
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder)
    if cache.exists():
        cache.write_text(cache.read_text() + FIND_BUILT)


def pack(site: Path, out: Path, part_mib: int) -> None:
    """Compress the folder; lay parts of a larger one in numbered folders."""
    out.mkdir(parents=True, exist_ok=True)
    for name in ("site.tar.xz.*", "env.sh"):
        for old in (*out.glob(name), *out.glob(f"[0-9][0-9]/{name}")):
            old.unlink()
    whole = out / "site.tar"
    with tarfile.open(whole, "w") as tar:
        for path in sorted(site.iterdir()):
            tar.add(path, arcname=path.name)
    subprocess.run(["xz", "-f", "-T0", "-7", str(whole)], check=True)
    for path in split(out / "site.tar.xz", part_mib << 20):
        print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB")


def split(whole: Path, size: int) -> list[Path]:
    """Cut a file into parts, several into numbered folders; the first one gets ``env.sh``."""
    out, parts = whole.parent, []
    single = whole.stat().st_size <= size
    with whole.open("rb") as file:
        while piece := file.read(size):
            folder = out if single else out / f"{len(parts):02}"
            folder.mkdir(exist_ok=True)
            parts.append(folder / f"{whole.name}.{len(parts):02}")
            parts[-1].write_bytes(piece)
    whole.unlink()
    (parts[0].parent / "env.sh").write_text(ENV)
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sglang", choices=RELEASES, default="0.5.15")
    parser.add_argument("--part-mib", type=int, default=58)
    parser.add_argument(
        "--hybrids", action="store_true", help="FA3 for heads of 256, too, which is larger"
    )
    options = parser.parse_args()
    release, home = RELEASES[options.sglang], CACHE / options.sglang
    if not torch.__version__.startswith(release.torch):
        parser.error(
            f"SGLang {options.sglang} needs torch {release.torch}, not {torch.__version__}"
        )
    wheels, site = home / "wheels", home / "site"
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    for requirement in (*NEEDS, *release.needs):
        unpack(download(requirement, wheels), site)
    sglang(release, site, wheels, large=options.hybrids)
    for name, text in (STUBS | release.stubs).items():
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).write_text(text)
    build(release, site, wheels, home / "build")
    for folder in (*site.rglob("__pycache__"), *site.rglob("tests")):
        shutil.rmtree(folder, ignore_errors=True)
    pack(site, options.out, options.part_mib)


if __name__ == "__main__":
    main()
