"""Where the Gluon kernel serves, and its check."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specattn.kernels.attention.gluon import check_kernel
from specattn.kernels.gluon_guard import gluon_ok
from specattn.kernels.mla.tiles import GLUON

if TYPE_CHECKING:
    from specattn.kernels.attention.tree_attention import TreeAttention


def serves(bucket: TreeAttention) -> bool:
    """Whether the kernel takes these rows, and runs right on their device.

    The first call finds out, so that it must not be made while a graph is captured.
    """
    return (
        bucket.dtype in (torch.float16, torch.bfloat16)
        and (bucket.head_dim, bucket.v_head_dim) == (576, 512)
        and gluon_ok("mla_gluon", check_mla_gluon, bucket.device)
    )


def check_mla_gluon(device: torch.device) -> None:
    """Raise an ArithmeticError unless the kernel agrees with torch."""
    from specattn.kernels.mla import MlaAttention

    random = torch.Generator(device).manual_seed(0)
    pool = torch.randn(4096, 1, 576, generator=random, device=device).bfloat16()
    check_kernel(MlaAttention, pool, pool[..., :512], heads=16, tile=GLUON)
