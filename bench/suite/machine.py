"""Where and with what something was measured."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

#: Distributions, and the modules that know their version where no metadata is installed.
LIBRARIES = {
    "specattn": "specattn",
    "torch": "torch",
    "triton": "triton",
    "flashinfer-python": "flashinfer",
    "sglang-kernel": "sgl_kernel",
    "sglang": "sglang",
}


def machine(commit: str | None = None) -> dict[str, Any]:
    """Return the device, the versions and the commit."""
    found: dict[str, Any] = {"device": "CPU", "cuda": torch.version.cuda}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["device"] = properties.name
        found["capability"] = f"{properties.major}.{properties.minor}"
        found["multiprocessors"] = properties.multi_processor_count
        found["memory_gb"] = round(properties.total_memory / 2**30, 1)
    for name, module in LIBRARIES.items():
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = getattr(sys.modules.get(module), "__version__", None)
    return found | {
        "commit": commit or _commit(),
        "kernels": _digest(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _commit() -> str | None:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    return found.stdout.strip() or None


def _digest() -> str:
    """Hash the kernels' sources: what was timed, also where there is no repository."""
    import specattn

    sources = sorted((Path(specattn.__file__).parent / "kernels").rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]
