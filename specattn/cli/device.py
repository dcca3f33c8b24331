"""Devices and dtypes by name."""

from __future__ import annotations

import torch

from specattn.cli.errors import ArgumentError
from specattn.config import FLOAT8

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}


# as vLLM and SGLang spell it, and torch
_FLOAT8 = ("fp8_e4m3", "fp8", "float8_e4m3fn")


def pick_device(name: str) -> torch.device:
    """Return the device ``name``; ``auto`` is CUDA where there is any, else the CPU.

    A CUDA device becomes the current one.

    Raises
    ------
    ArgumentError
        If there is no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ArgumentError(
            "--device", f"must be auto, cpu, cuda, cuda:N or another torch device, got {name!r}"
        ) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("--device", f"{name} is not available: torch sees no CUDA device here")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ArgumentError(
            "--device", f"there is no {name}: torch sees {torch.cuda.device_count()} CUDA devices"
        )
    if device.type == "cuda" and device.index is not None:
        # kernels are launched on the current device, wherever their tensors are
        torch.cuda.set_device(device)
    try:
        torch.zeros(1, device=device).item()
    # each device type fails in its own way: not compiled in, no driver, no data
    except Exception as error:
        raise ArgumentError("--device", f"{name} is not available here") from error
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype ``name``; ``auto`` is bfloat16 on CUDA, else float32.

    Raises
    ------
    ArgumentError
        If the name is not one of those known.
    """
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in _DTYPES:
        raise ArgumentError("--dtype", f"must be auto, float32, float16 or bfloat16, got {name!r}")
    return _DTYPES[name]


def pick_kv_dtype(name: str) -> torch.dtype | None:
    """Return the dtype of the KV cache, None for the model's.

    Raises
    ------
    ArgumentError
        If the name is not one of those known.
    """
    if name == "auto":
        return None
    if name not in _FLOAT8:
        raise ArgumentError("--kv-cache-dtype", f"must be auto or fp8_e4m3, got {name!r}")
    return FLOAT8
