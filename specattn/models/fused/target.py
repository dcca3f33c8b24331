"""Targets with everything between the matrix products fused.

The arithmetic is transformers'. Sums, norms and rotations are in float32 where transformers rounds
in between, so that the two differ by roundings in float16 and bfloat16.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Self, TypeVar

import torch
from torch import Tensor, nn

from specattn.autocast import without_autocast
from specattn.checks import instance
from specattn.config import AttnConfig, StateConfig
from specattn.errors import ModelError
from specattn.kernels.fused import add_rms_norm
from specattn.models.fused.block import (
    GATES,
    HEADS,
    MIXED,
    SUMMED,
    Block,
    FusedModel,
    RotaryTable,
    add_norm_for,
    projections_of,
)
from specattn.models.fused.delta import DeltaBlock
from specattn.models.fused.family import FAMILIES
from specattn.models.fused.readers import UnreadError, output_projection, projection_of
from specattn.models.fused.scaled import ScaledLinear
from specattn.models.hf import HFTarget, LoadedTarget
from specattn.models.shards import own, shared_axis
from specattn.speculative.model import TargetOutput
from specattn.speculative.proposers.standalone import LMDraft

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import ProcessGroup

    from specattn.kernels.fused.fp8 import RowsFormat
    from specattn.speculative.model import Attend

log = logging.getLogger(__name__)

Draft = TypeVar("Draft")

# Of a model that ranks share, the axis along which they share the weights of a layer.
_SHARED = {(*HEADS, *GATES): 0, SUMMED: 1}


@dataclass(frozen=True, eq=False, kw_only=True)
class FusedTarget(FusedModel, LoadedTarget):
    """A target of few kernel launches, which goes wherever an `HFTarget` goes.

    `from_target` makes one of a loaded model of the types in `FAMILIES`.

    Parameters
    ----------
    norm : Tensor
        ``[H]``, the weight of the final norm.
    max_context_len : int
        Tokens up to which positions mean what they did in training.
    eos_token_ids : frozenset of int
        Tokens that end a text.
    process_group : ProcessGroup or None
        The ranks that share the weights, if they are sharded. The other parts are those of
        `FusedModel` and `LoadedTarget`.
    """

    norm: Tensor
    max_context_len: int
    eos_token_ids: frozenset[int]
    process_group: ProcessGroup | None = None

    @classmethod
    @without_autocast
    def from_target(cls, target: HFTarget) -> Self:
        """Fuse a loaded model; the two share one copy of the weights.

        The weights of queries, keys and values are packed into one matrix, those of gate and up
        into another. The model's own weights become views of these. Ranks that share a model's
        heads and feed-forward parts fuse what each has, and add up their products.

        Raises
        ------
        ModelError
            If the fused path does not compute this model.
        """
        modules, group = target.module, target.process_group
        reasons = [*islice(_reasons(target), 2)]
        if reasons:
            raise ModelError("target", f"unsupported by the fused path: {'; '.join(reasons)}")
        family = FAMILIES[target.config.model_type]
        blocks = tuple(
            DeltaBlock.of_layer(layer, geometry, family, target.config)
            if isinstance(geometry, StateConfig)
            else Block.of_layer(layer, rotary, geometry, family, group)
            for layer, rotary, geometry in zip(
                modules.model.layers, _rotations(target), target.layers, strict=True
            )
        )
        for block in blocks:
            block.prepare()
        lm_head = output_projection(target.lm_head)
        lm_head.prepare()
        return cls(
            embed_tokens=target.embed_tokens,
            lm_head=lm_head,
            blocks=blocks,
            features=target.features,
            norm=family.norm(own(modules.model.norm.weight)),
            max_context_len=target.max_context_len,
            eos_token_ids=target.eos_token_ids,
            process_group=group,
            name=target.name,
        )

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.norm.device

    @torch.no_grad()
    @without_autocast
    def forward(
        self, input_ids: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> TargetOutput:
        """Run the model over flattened tokens; see `TargetModel.forward`."""
        blocks, eps = self.blocks, self.blocks[0].eps
        states, views = self._states(len(input_ids))
        ids, table = self._embedding(input_ids)
        x, stream = add_norm_for(
            blocks[0].rows_format,
            table[None],
            None,
            blocks[0].input_norm,
            eps,
            rows=ids,
            residual_out=views.get(0),
            dtype=self.dtype,
        )
        for layer, block in enumerate(blocks[:-1]):
            x, stream = block.attend(x, stream, layer, positions, attend)
            x, stream = add_norm_for(
                blocks[layer + 1].rows_format,
                block.feed(x),
                stream,
                blocks[layer + 1].input_norm,
                eps,
                residual_out=views.get(layer + 1),
                added_weight=block.added_norms[1],
            )
        last = len(blocks) - 1
        x, stream = blocks[last].attend(x, stream, last, positions, attend)
        # As a feature, the final norm is that of all tokens; else only the wanted rows need it.
        whole = last + 1 in views
        x, _ = add_rms_norm(
            blocks[last].feed(x),
            stream,
            self.norm,
            eps,
            rows=None if whole else rows,
            out=views.get(last + 1),
            added_weight=blocks[last].added_norms[1],
        )
        if whole and rows is not None:
            x = x[rows]
        if len(views) < len(self.features):
            states = torch.cat([views[index] for index in self.features], dim=1)
        return TargetOutput(self._logits(x), states)

    def _states(self, count: int) -> tuple[Tensor | None, dict[int, Tensor]]:
        """Allocate features ``[T, F]``; return each hidden state's part, too."""
        wanted = tuple(dict.fromkeys(self.features))
        if not wanted:
            return None, {}
        size = self.hidden_size
        states = self.norm.new_empty(count, len(wanted) * size, dtype=self.dtype)
        return states, dict(zip(wanted, states.split(size, dim=1), strict=True))


def _rotations(target: HFTarget) -> list[RotaryTable]:
    """Return every layer's rotations; layers of one type share a table."""
    rotary, length = target.module.model.rotary_emb, target.max_context_len
    ropes = getattr(target.config, "rope_parameters", None) or {}
    types = getattr(target.config, "layer_types", None) or [""] * len(target.layers)
    kinds = [kind if isinstance(ropes.get(kind), dict) else "" for kind in types]
    still = _still(target)
    tables = {kind: RotaryTable(rotary, length, still=still, layer_type=kind) for kind in kinds}
    return [tables[kind] for kind in kinds]


def _still(target: HFTarget) -> int:
    """Return the pairs of a head's dimensions that are not rotated."""
    if not FAMILIES[target.config.model_type].gated:
        return 0
    size = next(one.head_dim for one in target.layers if isinstance(one, AttnConfig))
    turned: Tensor = target.module.model.rotary_emb.inv_freq
    return size // 2 - len(turned)


def _reasons(target: HFTarget) -> Iterator[str]:
    """Say what the fused path does not compute of a model."""
    kind, config, sharded = target.config.model_type, target.config, bool(target.process_group)
    if kind not in FAMILIES:
        yield f"model type {kind!r} is not one of {', '.join(FAMILIES)}"
        return
    if getattr(config, "final_logit_softcapping", None):
        yield "logits are capped (final_logit_softcapping)"
    layers = getattr(target.module.model, "layers", None)
    if layers is None:
        yield f"a {type(target.module.model).__name__} has no layers of its own"
        return
    for at, layer in enumerate(layers):
        read = projections_of(layer)
        for name, part in read.items():
            yield from _odd(f"model.layers.{at}.{name}", part, sharded=sharded)
        for names in (HEADS, GATES, *MIXED):
            parts = {name: read[name] for name in names if name in read}
            yield from (f"model.layers.{at}.{reason}" for reason in _unlike(parts))
        if not read.keys() >= set(GATES) and not (FAMILIES[kind].experts and not sharded):
            yield f"model.layers.{at}.mlp is a {type(layer.mlp).__name__}"
    yield from _odd("lm_head", target.lm_head, sharded=sharded)


def _odd(name: str, part: nn.Module, *, sharded: bool) -> Iterator[str]:
    """Say what a module computes besides its product, if anything."""
    # an adapted layer has further weights
    try:
        projection_of(part)
    except UnreadError as error:
        yield f"{name} is {error}"
        return
    axis = next((axis for names, axis in _SHARED.items() if name.endswith(names)), None)
    found = shared_axis(part.weight) if isinstance(part, nn.Linear | ScaledLinear) else None
    if axis is not None and found != (axis if sharded else None):
        yield f"{name} is shared by ranks along axis {found}, not {axis}"


def _unlike(parts: dict[str, nn.Module]) -> Iterator[str]:
    """Say which packed module is quantised in another way than the first."""
    first = next(iter(parts), "")
    for name, part in parts.items():
        if _format(part) != _format(parts[first]):
            yield f"{name} is not quantised as {first} is"


def _format(part: nn.Module) -> RowsFormat | None:
    try:
        return projection_of(part).rows_format
    except UnreadError:
        return None


def fuse(
    target: HFTarget, draft: Draft | None = None
) -> tuple[HFTarget | FusedTarget, Draft | None]:
    """Fuse the target and the draft, where there is a fused form.

    A model that it does not compute is returned as it is, and the log says why at level INFO;
    `FusedTarget.from_target` raises the same reasons. A fused model shares the weights of the one
    it was made of. Heads are made fused when they are loaded.

    Parameters
    ----------
    target : HFTarget
        The target; the features that it gives stay the same.
    draft : head or LMDraft, optional
        A draft for this target, as it was loaded.

    Raises
    ------
    ValueError
        If ``target`` is no `HFTarget`.
    """
    instance("target", target, HFTarget, "an HFTarget (from_pretrained, from_model)")
    if isinstance(draft, LMDraft) and isinstance(draft.model, HFTarget):
        draft = replace(draft, model=_fused("draft", draft.model))
    return _fused("target", target), draft


def _fused(name: str, model: HFTarget) -> HFTarget | FusedTarget:
    """Return a model's fused form, or the model itself and log why."""
    try:
        return FusedTarget.from_target(model)
    except ModelError as error:
        log.info("the %s is not fused: %s", name, error)
        return model
