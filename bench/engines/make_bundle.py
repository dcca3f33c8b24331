"""Pack SGLang for a Hopper machine that reaches no package index.

The machine has CUDA 13, Python 3.12, torch 2.11, Triton 3.6 and transformers, and nothing else of
SGLang's. What is packed starts its engine with Llama models, EAGLE-3 heads and the pair that comes
with this library: SGLang itself, the packages it imports at start, its CUDA kernels for SM90 alone,
and the kernels that it would otherwise compile at first use. Run it with Python 3.12, torch 2.11,
its torchvision, Triton 3.6, transformers, what `NEEDS` names, and CUDA 13's ``nvcc``; no GPU is
needed.

    python bench/engines/make_bundle.py --out FOLDER

On the other machine, in this repository's root, ``source FOLDER/env.sh`` unpacks the parts once,
to ``~/.sgl-site``, and sets the environment.
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
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

CACHE = Path(os.environ.get("SGL_BUNDLE_CACHE", Path.home() / ".cache" / "sgl-bundle"))
WHEELS = {
    "sglang": "0.5.15",
    "sglang-kernel": "0.4.4",
    "flashinfer-python": "0.6.12",
    "apache-tvm-ffi": "0.1.11",
}
# what `sglang.Engine` and its server import at start; found by importing them
NEEDS = (
    "annotated-types",
    "attrs",
    "compressed-tensors",
    "dill",
    "distro",
    "fastapi",
    "gguf",
    "jsonschema",
    "jsonschema-specifications",
    "loguru",
    "msgspec",
    "openai==2.6.1",
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
# parts of SGLang that its engine does without
DROP = ("multimodal_gen", "test", "eval", "srt/grpc", "jit_kernel/tests")
MODELS = {
    *("__init__.py", "registry.py", "utils.py", "llama.py", "llama_eagle.py", "llama_eagle3.py"),
    *("qwen2.py", "qwen3.py", "deepseek_common"),
}
# what SGLang imports and nothing here runs: progress in notebooks, speech, and DeepSeek's sparse
# attention, which imports the CUTLASS DSL (200 MB); SGLang asks whether a backend is one of these
STUBS = {
    "IPython/__init__.py": "",
    "IPython/display.py": "HTML = display = clear_output = lambda *a, **k: None\n",
    "soundfile.py": "",
    "sglang/srt/models/qwen3_asr.py": "class Qwen3ASRForConditionalGeneration:\n    pass\n",
    "sglang/srt/layers/attention/dsa_backend.py": "class DeepseekSparseAttnBackend:\n    pass\n\n\n"
    "class DeepseekSparseAttnMultiStepBackend:\n    pass\n",
}
# device images of FA3: its scheduler and merge, and head_dim 128 and 64 in bfloat16 without a cap
FA3_IMAGES, FA3_KEPT = 372, {1, 2, 3, 4, 6, 8, 11, 63, 64, 66, 68, 71}
SM90 = 90

BUILD = """
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
    # bytes of a token's keys: 8 heads of 128, 2 of 64
    for size in (2048, 256):
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
export PYTHONPATH="$PWD:$site" PYTHONUNBUFFERED=1 TVM_FFI_CACHE_DIR="$site/tvm-ffi"
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


def sglang(site: Path, wheels: Path) -> None:
    """Unpack SGLang, its kernels and FlashInfer, without what the engine does not touch."""
    root = site / "sglang"
    unpack(wheel("sglang", wheels), site, *(f"sglang/{name}" for name in DROP))
    for path in (root / "srt" / "models").iterdir():
        if path.name not in MODELS:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    # newer transformers knows some of these models itself
    register = re.compile(r"(Auto(?:Config|Processor)\.register\([^()]*[^(),=\s])\)")
    for path in (root / "srt" / "configs").glob("*.py"):
        text = path.read_text()
        again = register.sub(
            lambda call: call[0] if "exist_ok" in call[0] else call[1] + ", exist_ok=True)", text
        )
        path.write_text(again)
    ops = "sgl_kernel/"
    unpack(
        wheel("sglang-kernel", wheels),
        site,
        *(ops + name for name in ("sm100", "infllm", "spatial_ops", "testing", "flashmla_ops")),
        "triton_kernels",
    )
    keep_images(site / ops / "sm90" / "common_ops.abi3.so")
    keep_images(site / ops / "flash_ops.abi3.so", FA3_KEPT, FA3_IMAGES)
    data = "flashinfer/data/"
    unpack(wheel("flashinfer-python", wheels), site, data + "cutlass", data + "cccl")
    unpack(wheel("apache-tvm-ffi", wheels), site)


def wheel(name: str, wheels: Path) -> Path:
    """Return the wheel of a package whose version is fixed."""
    return download(f"{name}=={WHEELS[name]}", wheels)


def build(site: Path, wheels: Path) -> None:
    """Compile what would be compiled at first use; headers come from the whole FlashInfer."""
    work = CACHE / "build"
    full = work / "flashinfer"
    if not full.exists():
        unpack(wheel("flashinfer-python", wheels), full)
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
        "FLASHINFER_WORKSPACE_BASE": str(work),
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        # headers of CUDA's libraries, which come with torch
        "CPATH": ":".join(map(str, Path(torch.__file__).parents[1].glob("nvidia/*/include"))),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "MAX_JOBS": str(os.cpu_count()),
    }
    subprocess.run([sys.executable, "-c", BUILD], check=True, env=environment)
    # where the next build looks for them, too
    built = full / "flashinfer" / "data" / "aot"
    for path in work.glob(".cache/flashinfer/*/*/cached_ops/*/*.so"):
        (built / path.stem).mkdir(parents=True, exist_ok=True)
        shutil.copy(path, built / path.stem)
    shutil.copytree(built, site / "flashinfer" / "data" / "aot")
    for path in work.glob("tvm-ffi/*/*.so"):
        folder = site / "tvm-ffi" / path.parent.name
        folder.mkdir(parents=True)
        shutil.copy(path, folder)


def pack(site: Path, out: Path, part_mib: int) -> None:
    """Compress the folder and cut it into parts."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("site.tar.xz.*"):
        old.unlink()
    whole = CACHE / "site.tar"
    with tarfile.open(whole, "w") as tar:
        for path in sorted(site.iterdir()):
            tar.add(path, arcname=path.name)
    xz = subprocess.Popen(["xz", "-T0", "-7", "-c", str(whole)], stdout=subprocess.PIPE)
    assert xz.stdout is not None
    subprocess.run(
        ["split", "-d", "-b", f"{part_mib}M", "-", str(out / "site.tar.xz.")],
        check=True,
        stdin=xz.stdout,
    )
    if xz.wait():
        raise SystemExit("xz failed")
    whole.unlink()
    (out / "env.sh").write_text(ENV)
    for path in sorted(out.iterdir()):
        print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part-mib", type=int, default=40)
    options = parser.parse_args()
    wheels, site = CACHE / "wheels", CACHE / "site"
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    for requirement in NEEDS:
        unpack(download(requirement, wheels), site)
    sglang(site, wheels)
    for name, text in STUBS.items():
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).write_text(text)
    build(site, wheels)
    for folder in (*site.rglob("__pycache__"), *site.rglob("tests")):
        shutil.rmtree(folder, ignore_errors=True)
    pack(site, options.out, options.part_mib)


if __name__ == "__main__":
    main()
