"""States and convolution windows of all layers of one model, by row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import torch

from specattn.buffers import ReadOnly, fingerprint
from specattn.checks import instance, require_dense, require_shape, whole_number
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

    from specattn.buffers import Fingerprint


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
    places : Tensor or None
        Of an engine's own states (`from_external`), where each row's lie.

    Raises
    ------
    ValueError
        If there is no layer, layers differ, or ``rows`` is no whole number from 1 on.
    """

    places: Tensor | None = None

    def __init__(
        self, layers: Sequence[StateConfig], rows: int, device: torch.device | str
    ) -> None:
        self._hold(layers)
        one, size = self._one, (len(layers), whole_number("rows", rows, 1))
        state, window = _shapes(one)
        self.states = torch.zeros(*size, *state, dtype=one.state_dtype, device=device)
        self.windows = torch.zeros(*size, *window, dtype=one.dtype, device=device)

    @classmethod
    def from_external(
        cls, layers: Sequence[StateConfig], states: Tensor, windows: Tensor, places: Tensor
    ) -> Self:
        """Return a pool over states that an engine has allocated.

        Nothing is copied or cleared. The engine says where each row's states lie, and may say so
        anew between steps. Row 0 and place 0 belong to padding. It zeroes or copies a place before
        a prompt goes on from there.

        Parameters
        ----------
        layers : sequence of StateConfig
            All of one geometry.
        states : Tensor
            ``[layers, P, num_v_heads, head_v_dim, head_k_dim]`` of ``state_dtype``, contiguous.
        windows : Tensor
            ``[layers, P, conv_channels, conv_width - 1]`` of ``dtype``, contiguous.
        places : Tensor
            ``[rows]`` int32 or int64, each below P, and each but 0 at most once.

        Raises
        ------
        ValueError
            For what the constructor refuses; if a tensor is of another shape or dtype, or not
            dense.
        """
        pool = cls.__new__(cls)
        pool._hold(layers)
        one, size = pool._one, (len(layers), states.shape[1])
        state, window = _shapes(one)
        require_shape((*size, *state), one.state_dtype, states=states)
        require_shape((*size, *window), one.dtype, windows=windows)
        require_shape(tuple(places.shape[:1]), places=places)
        if places.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"places must be int32 or int64, got {places.dtype}")
        require_dense(states=states, windows=windows, places=places)
        pool.states, pool.windows, pool.places = states, windows, places
        return pool

    def _hold(self, layers: Sequence[StateConfig]) -> None:
        for layer in layers:
            instance("every layer", layer, StateConfig, "a StateConfig")
        if len(set(layers)) != 1:
            found = sorted(set(layers), key=str)
            raise ValueError(f"layers of one pool must be at least one, and alike, got {found}")
        self.layers, self._one = tuple(layers), layers[0]

    def tensors(self) -> dict[str, Tensor]:
        """Return states and windows by name, all by row or its place."""
        return {"states": self.states, "windows": self.windows}

    def fingerprint(self) -> Fingerprint:
        """Describe the tensors that a graph bakes in."""
        return fingerprint(**self.tensors(), places=self.places)

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
        g, beta = (new(*size, one.num_v_heads, dtype=torch.float32) for _ in range(2))
        places = None if self.places is None else new(batch, dtype=torch.int64)
        inputs = new(*size, one.conv_channels)
        return Nodes(inputs, new(*size, *k_shape), new(*size, *v_shape), g, beta, places)

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
        if nodes.places is not None:
            if not layer:
                # for the layers after it, and for the commit
                nodes.places.copy_(self._places(rows))
            rows = nodes.places
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
        one, count, rows = self._one, parts.qkv.shape[1], self._places(rows)
        heads, dims = (one.num_k_heads, one.num_v_heads), (one.head_k_dim, one.head_v_dim)
        tokens = Tokens.alloc(self.windows, count, heads, dims)
        convolve_pieces(parts, weights, self.windows[layer], rows, qo_indptr, out=tokens)
        return read_pieces(tokens, self.states[layer], rows, qo_indptr)

    def _places(self, rows: Tensor) -> Tensor:
        """Return where rows' states lie."""
        return rows if self.places is None else self.places[rows].long()

    def commit(
        self, nodes: Nodes, accept_index: Tensor, rows: Tensor, into: Tensor | None = None
    ) -> None:
        """Fold accepted paths into all layers; see `commit_nodes`.

        With `places`, they are those that verification found, and ``into`` names places.
        """
        rows = rows if nodes.places is None else nodes.places
        commit_nodes(nodes, self.states, self.windows, rows, accept_index, into=into)


def _shapes(one: StateConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of a state and of a window."""
    state = (one.num_v_heads, one.head_v_dim, one.head_k_dim)
    return state, (one.conv_channels, one.conv_width - 1)
