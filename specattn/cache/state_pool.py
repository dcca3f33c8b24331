"""States and convolution windows of all layers of one model, by row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specattn.buffers import ReadOnly
from specattn.checks import instance, whole_number
from specattn.config import StateConfig
from specattn.errors import UnsupportedError
from specattn.kernels.gated_delta import (
    MAX_NODES,
    LayerParts,
    LayerWeights,
    Nodes,
    Tokens,
    commit_nodes,
    convolve_nodes,
    convolve_pieces,
    read_pieces,
    verify_nodes,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class StatePool(ReadOnly):
    """The recurrent states and convolution windows of one model's layers.

    A request has one of each per layer, in its row of the table. Row 0 belongs to padding, and is
    never written.

    Parameters
    ----------
    layers : sequence of StateConfig
        All of one geometry.
    rows : int
        Rows of the table, row 0 included.
    device : torch.device
        Where the pool lives.

    Attributes
    ----------
    layers : tuple of StateConfig
        The layers.
    states : Tensor
        ``[layers, rows, num_v_heads, head_v_dim, head_k_dim]`` of ``state_dtype``.
    windows : Tensor
        ``[layers, rows, conv_channels, conv_width - 1]`` of ``dtype``: the last inputs of the
        convolution, the newest last.

    Raises
    ------
    ValueError
        If there is no layer, layers differ, or ``rows`` is no whole number from 1 on.
    """

    def __init__(
        self, layers: Sequence[StateConfig], rows: int, device: torch.device | str
    ) -> None:
        for layer in layers:
            instance("every layer", layer, StateConfig, "a StateConfig")
        if len(set(layers)) != 1:
            found = sorted(set(layers), key=str)
            raise ValueError(f"layers of one pool must be at least one, and alike, got {found}")
        self.layers, self._one = tuple(layers), layers[0]
        one, size = self._one, (len(layers), whole_number("rows", rows, 1))
        head = (one.num_v_heads, one.head_v_dim, one.head_k_dim)
        self.states = torch.zeros(*size, *head, dtype=one.state_dtype, device=device)
        window = (one.conv_channels, one.conv_width - 1)
        self.windows = torch.zeros(*size, *window, dtype=one.dtype, device=device)

    def tensors(self) -> dict[str, Tensor]:
        """Return states and windows by name; all of it lies by row."""
        return {"states": self.states, "windows": self.windows}

    def nodes(self, batch: int, count: int) -> Nodes:
        """Allocate what nodes leave for the commit of a step.

        They are ``count`` nodes of ``batch`` requests. A step's buffers serve its smaller batches,
        too (`Nodes.bind`). What runs side by side, as the halves of a batch, needs its own.

        Raises
        ------
        UnsupportedError
            If ``count`` is above 64.
        """
        if count > MAX_NODES:
            reason = f"trees have at most {MAX_NODES} nodes, got {count}"
            raise UnsupportedError("layers with states", [reason])
        one, size = self._one, (len(self.layers), batch, count)
        new = self.windows.new_zeros
        k_shape, v_shape = (one.num_k_heads, one.head_k_dim), (one.num_v_heads, one.head_v_dim)
        gates = [new(*size, one.num_v_heads, dtype=torch.float32) for _ in range(2)]
        return Nodes(
            new(*size, one.conv_channels), new(*size, *k_shape), new(*size, *v_shape), *gates
        )

    def verify(  # noqa: PLR0913 - a forward, as its operations take it
        self,
        layer: int,
        parts: LayerParts,
        weights: LayerWeights,
        *,
        rows: Tensor,
        words: Tensor,
        nodes: Nodes,
        follows: bool = False,
    ) -> Tensor:
        """Return what a layer gives after every node; no state changes.

        Parameters
        ----------
        layer : int
            Its place among the pool's layers.
        parts, weights
            As `specattn.kernels.gated_delta.convolve_nodes` takes them.
        rows, words : Tensor
            ``[B]`` int64 and ``[B, n, 1]`` int64: the plan's ``req_pool_indices`` and
            ``tail_words``.
        nodes : Nodes
            Those of B requests, of which the layer's part is written.
        follows : bool
            As in `specattn.kernels.gated_delta.verify_nodes`.

        Returns
        -------
        Tensor
            ``[B n, HV, V]``.

        Raises
        ------
        ValueError
            Before anything is written: if a tensor is of another shape or dtype or not dense.
        """
        inputs, tokens = nodes.layer(layer)
        convolve_nodes(parts, weights, self.windows[layer], rows, words, inputs=inputs, out=tokens)
        return verify_nodes(tokens, self.states[layer], rows, words, follows=follows)

    def read(
        self,
        layer: int,
        parts: LayerParts,
        weights: LayerWeights,
        *,
        rows: Tensor,
        qo_indptr: Tensor,
    ) -> Tensor:
        """Return what a layer gives for prompts, and carry states on.

        Parameters
        ----------
        layer, parts, weights
            As in `verify`, of T tokens.
        rows, qo_indptr : Tensor
            ``[P]`` int64 and ``[P + 1]`` int32: the plan's ``req_pool_indices`` and
            ``qo_indptr``.

        Returns
        -------
        Tensor
            ``[T, HV, V]``; 0 for tokens of no piece.

        Raises
        ------
        ValueError
            As in `verify`.
        """
        one, count = self._one, parts.qkv.shape[1]
        heads, dims = (one.num_k_heads, one.num_v_heads), (one.head_k_dim, one.head_v_dim)
        tokens = Tokens.alloc(self.windows, count, heads, dims)
        convolve_pieces(parts, weights, self.windows[layer], rows, qo_indptr, out=tokens)
        return read_pieces(tokens, self.states[layer], rows, qo_indptr)

    def commit(self, nodes: Nodes, accept_index: Tensor, rows: Tensor) -> None:
        """Fold accepted paths into all layers; see `commit_nodes`."""
        commit_nodes(nodes, self.states, self.windows, rows, accept_index)
