"""What SGLang's models keep of requests, as a step's memory.

Of a hybrid model these are its pool of keys and values, and its pool of states. SGLang says by row
of its table where a request's states lie, so that its prompts, its radix cache and its copies of
shared prefixes stay as they are. What a step's nodes leave lies in the step: SGLang allocates no
state per node (`without_snapshots`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from specattn.buffers import fingerprint, send
from specattn.cache.hybrid_pool import HybridPool
from specattn.cache.kv_pool import KVPool
from specattn.cache.state_pool import StatePool
from specattn.config import StateConfig
from specattn.integrations.sglang.layers import (
    attention_layers,
    cached,
    config_of,
    mixing_layers,
    model_layers,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from specattn.batch import AcceptResult
    from specattn.buffers import Fingerprint
    from specattn.kernels.gated_delta import Nodes


@dataclass(frozen=True, eq=False)
class Checkpoints:
    """Where SGLang's radix cache finds states at certain lengths of texts.

    A step that comes to a multiple of ``interval`` leaves the state there beside the request's own,
    in one of two places that take turns. SGLang's host moves on to the other when it has read the
    step.

    Parameters
    ----------
    interval : int
        Tokens.
    places : Tensor
        ``[rows, turns]`` int64, SGLang's.
    turns : Tensor
        ``[rows]`` int64: which of them a step writes.
    lengths : Tensor
        ``[rows]`` int32: a text's tokens before the step.
    """

    interval: int
    places: Tensor
    turns: Tensor
    lengths: Tensor

    def of(self, accepted: AcceptResult, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return paths up to a checkpoint, and its places or 0."""
        before = self.lengths[rows]  # [B]
        after = before + accepted.accept_lens
        kept = after // self.interval * self.interval - before
        places = self.places[rows, self.turns[rows]]
        index = accepted.accept_index
        rank = torch.arange(index.shape[1], dtype=torch.int32, device=index.device)
        path = torch.where(rank < kept[:, None], index, -1)
        return path, torch.where(kept > 0, places, 0)


class HybridMemory(HybridPool):
    """SGLang's pools of a hybrid model, with its checkpoints."""

    _checkpoints: Checkpoints | None = None

    def follow(self, lengths: Tensor, interval: int, places: Tensor) -> None:
        """Keep checkpoints from now on; see `Checkpoints`."""
        turns = torch.zeros(len(places), dtype=torch.int64, device=places.device)
        self._checkpoints = Checkpoints(interval, places, turns, lengths)
        self._sent = [0] * len(places)

    def take_turns(self, rows: Sequence[int], requests: Sequence[Any]) -> None:
        """Say which places the next step writes; send what has changed."""
        if self._checkpoints is None:
            return
        changed = [
            (row, one.mamba_next_track_idx)
            for row, one in zip(rows, requests, strict=True)
            if self._sent[row] != one.mamba_next_track_idx
        ]
        if not changed:
            return
        for row, turn in changed:
            self._sent[row] = turn
        at, new = send(torch.tensor(changed).T.contiguous(), self.device)
        self._checkpoints.turns[at] = new

    def fingerprint(self) -> Fingerprint:
        """Describe both kinds, and the checkpoints; see `Memory.fingerprint`."""
        found = super().fingerprint()
        return (
            found if self._checkpoints is None else found + fingerprint(**vars(self._checkpoints))
        )

    def commit(
        self,
        tail_slots: Tensor,
        accepted: AcceptResult,
        rows: Tensor,
        nodes: Nodes | None = None,
    ) -> None:
        """Leave what checkpoints need, then go on; see `HybridPool.commit`."""
        if self._checkpoints is not None and nodes is not None:
            path, places = self._checkpoints.of(accepted, rows)
            self.states.commit(nodes, path, rows, places)
        super().commit(tail_slots, accepted, rows, nodes)


def memory_of(runner: Any) -> KVPool | HybridMemory:
    """Return what SGLang keeps for a model; nothing is copied.

    Parameters
    ----------
    runner : ModelRunner
        SGLang's, of a target or a draft.
    """
    found = [cached(runner, layer) for layer in attention_layers(runner)]
    configs, keys, values, scales = zip(*found, strict=True)
    kv = KVPool.from_external(
        configs,
        keys,
        None if configs[0].latent else values,
        scales=scales if scales[0] else None,
    )
    if not mixing_layers(runner):
        return kv
    pool = runner.req_to_token_pool
    held = pool.mamba_pool.mamba_cache
    layers = [config_of(runner, layer) for layer in model_layers(runner)]
    states = StatePool.from_external(
        [layer for layer in layers if isinstance(layer, StateConfig)],
        held.temporal,
        held.conv[0],
        pool.req_index_to_mamba_index_mapping,
    )
    return HybridMemory.of(layers, kv, states)
