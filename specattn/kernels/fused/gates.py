"""Gates of what heads give, and columns in another order."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from specattn.checks import require_dense, require_rows, require_shape
from specattn.kernels import TritonModule, on_triton
from specattn.kernels.launch import cdiv, columns_of, launch_options, power_of_2

launch = TritonModule("specattn.kernels.fused.triton_gates")


def gather_columns(partials: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
    """Add up a product's partials, and put its columns in another order.

    Parameters
    ----------
    partials : Tensor
        ``[S, T, N]``, dense in its last axis.
    columns : Tensor
        ``[M]`` int64, below N: column j of the result is column ``columns[j]`` of the product.
    dtype : torch.dtype
        Of the result.

    Returns
    -------
    Tensor
        ``[T, M]``, contiguous.

    Raises
    ------
    ValueError
        If ``columns`` are of another shape or dtype, or a tensor is not dense.
    """
    size = len(columns)
    require_shape((size,), torch.int64, columns=columns)
    require_dense(columns=columns)
    require_rows(partials=partials)
    if on_triton(partials):
        split, count, _ = partials.shape
        out = partials.new_empty(count, size, dtype=dtype)
        block, warps = columns_of(count)
        if out.numel():
            launch.gather_columns_kernel[count, cdiv(size, block)](
                partials,
                columns,
                out,
                size,
                *partials.stride()[:2],
                SPLIT=split,
                BLOCK=block,
                num_warps=warps,
                **launch_options(partials.device),
            )
        return out
    return partials.float().sum(0)[:, columns].to(dtype)


def gated_rms_norm(x: Tensor, gates: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm what every head gives, and gate it by SiLU.

    Parameters
    ----------
    x : Tensor
        ``[T, H, D]``, contiguous.
    gates : Tensor
        ``[S, T, H D]``, dense in its last axis: they add up to what gates.
    weight : Tensor
        ``[D]``, of the norm of every head.
    eps : float
        Added to the mean of squares.

    Returns
    -------
    Tensor
        ``[T, H D]`` of the dtype of ``x``, contiguous.

    Raises
    ------
    ValueError
        If a tensor is of another shape or not dense.
    """
    count, heads, size = x.shape
    require_shape((len(gates), count, heads * size), gates=gates)
    require_shape((size,), weight=weight)
    require_dense(x=x, weight=weight)
    require_rows(gates=gates)
    if on_triton(x):
        out = torch.empty_like(x)
        if count:
            launch.gated_norm_kernel[count, heads](
                x,
                gates,
                weight,
                out,
                eps,
                *gates.stride()[:2],
                HEADS=heads,
                SIZE=size,
                BLOCK=power_of_2(size),
                SPLIT=len(gates),
                num_warps=1,
                **launch_options(x.device),
            )
        return out.flatten(1)
    gate, wide = gates.float().sum(0), x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return ((normed * weight.float()).flatten(1) * silu(gate)).to(x.dtype)


def gate_heads(x: Tensor, gates: Tensor) -> Tensor:
    """Gate what heads give by a sigmoid.

    Parameters
    ----------
    x : Tensor
        ``[T, N]``, contiguous.
    gates : Tensor
        ``[T, N]``, dense in its last axis.

    Returns
    -------
    Tensor
        ``[T, N]`` of the dtype of ``x``, contiguous.

    Raises
    ------
    ValueError
        If a tensor is of another shape or not dense.
    """
    check_gates(x, gates)
    if on_triton(x):
        count, size = x.shape
        out = torch.empty_like(x)
        block, warps = columns_of(count)
        if out.numel():
            launch.gate_heads_kernel[count, cdiv(size, block)](
                x,
                gates,
                out,
                size,
                gates.stride(0),
                BLOCK=block,
                num_warps=warps,
                **launch_options(x.device),
            )
        return out
    return (x.float() * gates.float().sigmoid()).to(x.dtype)


def check_gates(x: Tensor, gates: Tensor) -> None:
    """Raise a ValueError unless `gate_heads` takes these."""
    require_shape(tuple(x.shape), gates=gates)
    require_dense(x=x)
    require_rows(gates=gates)
