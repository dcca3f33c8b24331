"""SGLang's model modules as the target and the draft of a step."""

from __future__ import annotations

import logging
import os
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput, EagleDraftInput

from specattn.attention import AttnConfig, Layer
from specattn.batch import Phase
from specattn.errors import UnsupportedError
from specattn.integrations.sglang.algorithm import QUANTIZATION_VARIABLE, draft_quantization
from specattn.integrations.sglang.backend import LayerBackend
from specattn.integrations.sglang.fused import fused_block_head, fused_head, fused_target
from specattn.integrations.sglang.layers import (
    attention_layers,
    config_of,
    layer_config,
    model_layers,
)
from specattn.integrations.sglang.names import ALGORITHM, OLD, release
from specattn.integrations.sglang.readers import vocabulary_of
from specattn.kernels.gated_delta import LayerParts, LayerWeights
from specattn.speculative.model import DraftOutput, TargetOutput

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from specattn.cache.kv_pool import KVPool
    from specattn.integrations.sglang.blocks import BlockHead
    from specattn.speculative.model import AnyDraftModel, TargetModel

log = logging.getLogger(__name__)

#: 0 has SGLang's modules run, for comparisons.
FUSED_VARIABLE = "SPECATTN_SGLANG_FUSED"

#: SGLang's name of a forward, by the phase of the plan that it runs over.
MODES = {
    Phase.DECODE: ForwardMode.TARGET_VERIFY,
    Phase.VERIFY: ForwardMode.TARGET_VERIFY,
    Phase.DRAFT: ForwardMode.DECODE,
    Phase.PREFILL: ForwardMode.DRAFT_EXTEND_V2,
}
#: Whether SGLang computes logits of wanted rows alone in a draft extend.
SELECTS = any(field.name == "select_index" for field in fields(EagleDraftExtendInput))


class StepBackend(LayerBackend):
    """Attention and mixing per layer, as SGLang calls them.

    Parameters
    ----------
    runner, layer_of
        As in `LayerBackend`.
    place_of : callable
        Maps one of SGLang's layers to its place in the model.
    """

    def __init__(
        self, runner: Any, layer_of: Callable[[Any], Layer], place_of: Callable[[Any], int]
    ) -> None:
        super().__init__(runner, layer_of)
        self._place_of = place_of

    def forward(self, *args: Any, **options: Any) -> Tensor:
        """Attend; or mix what a layer with a state projects."""
        mixed, forward = options.get("mixed_qkv"), self.forward_metadata
        if mixed is None:
            attended: Tensor = super().forward(*args, **options)
            return attended
        assert forward is not None
        layer = options["layer"]
        weights = LayerWeights(layer.conv_weights, layer.A_log, layer.dt_bias)
        parts = LayerParts(mixed[None], options["b"][None], options["a"][None])
        return forward.mix(self._place_of(layer), parts, weights)


class SGLangModel:
    """A model of SGLang's, whose forwards are those of a step.

    Parameters
    ----------
    runner : ModelRunner
        SGLang's, with its model and pools.
    """

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        layers = model_layers(runner)
        self.layers = tuple(config_of(runner, layer) for layer in layers)
        self.attending = tuple(one for one in self.layers if isinstance(one, AttnConfig))
        self.device, self.dtype = torch.device(runner.device), runner.dtype
        self._index = {layer.layer_id: at for at, layer in enumerate(layers)}
        self._attention = StepBackend(runner, self._layer_of, self._place_of)

    def _layer_of(self, layer: Any) -> Layer:
        """Return SGLang's ``layer`` as one of the forward that runs."""
        forward = self._attention.forward_metadata
        assert forward is not None
        found = forward.layers[self._place_of(layer)]
        assert isinstance(found, Layer)
        return found

    def _place_of(self, layer: Any) -> int:
        """Return SGLang's ``layer``'s place in the model."""
        return self._index[layer.layer_id]

    def _run(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attend: Any,
        spec_info: Any = None,
        hidden: CaptureHiddenMode = CaptureHiddenMode.FULL,
        **options: Any,
    ) -> Any:
        """Run SGLang's module; return its `LogitsProcessorOutput`."""
        plan = attend.plan
        batch = ForwardBatch(
            forward_mode=MODES[plan.layout.phase],
            batch_size=plan.batch,
            input_ids=input_ids,
            req_pool_indices=plan.req_pool_indices,
            seq_lens=plan.seq_lens,
            out_cache_loc=plan.out_slots.reshape(-1),
            seq_lens_sum=None,
            positions=positions,
            spec_info=spec_info,
            spec_algorithm=self.runner.spec_algorithm,
            capture_hidden_mode=hidden,
            # those of a text are alike on all axes
            mrope_positions=positions.expand(3, -1),
        )
        self._attention.forward_metadata = attend
        with forward_context(ForwardContext(attn_backend=self._attention)):
            return self.runner.model.forward(input_ids, positions, batch, **options)


class SGLangTarget(SGLangModel):
    """SGLang's target as a `specattn.speculative.model.TargetModel`.

    Parameters
    ----------
    runner : ModelRunner
        SGLang's.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self.vocab_size: int = runner.model_config.vocab_size
        self.max_context_len: int = runner.model_config.context_len
        self.eos_token_ids = frozenset(runner.model_config.hf_eos_token_id or ())

    def forward(
        self, input_ids: Tensor, positions: Tensor, attend: Any, rows: Tensor | None = None
    ) -> TargetOutput:
        """Run the target; the features are its auxiliary states side by side."""
        out = self._run(input_ids, positions, attend)
        logits = out.next_token_logits
        return TargetOutput(logits if rows is None else logits[rows], out.hidden_states)


class SGLangDraft(SGLangModel):
    """SGLang's head as a `specattn.speculative.model.DraftModel`.

    Parameters
    ----------
    runner : ModelRunner
        SGLang's.
    target_ids : Tensor or None
        ``[Vd]`` int64, the target's token of every token of the head.
    """

    def __init__(self, runner: Any, target_ids: Tensor | None) -> None:
        super().__init__(runner)
        model = runner.model
        self.hidden_size: int = runner.model_config.hidden_size
        self.vocab_size: int = model.logits_processor.vocab_size
        # other heads read the last state alone
        several = runner.spec_algorithm.is_eagle3()
        self.feature_size: int = model.model.fc.in_features if several else self.hidden_size
        self.target_ids = target_ids

    def combine(self, hidden_states: Tensor) -> Tensor:
        """Return the features: SGLang's module mixes them itself."""
        return hidden_states

    def forward(
        self,
        input_ids: Tensor,
        hidden_states: Tensor,
        positions: Tensor,
        attend: Any,
        rows: Tensor | None = None,
        *,
        sources: Tensor | None = None,
    ) -> DraftOutput:
        """Run the head over flattened tokens."""
        if sources is not None:
            hidden_states = hidden_states[sources]
        if rows is None:
            states = EagleDraftInput(hidden_states=hidden_states)
            out = self._run(input_ids, positions, attend, states)
            return DraftOutput(out.next_token_logits, out.hidden_states)
        extend = EagleDraftExtendInput(hidden_states=hidden_states)
        if SELECTS:
            extend.select_index = rows
        out = self._run(input_ids, positions, attend, extend, CaptureHiddenMode.LAST)
        logits, kept = out.next_token_logits, out.hidden_states
        return DraftOutput(logits, kept) if SELECTS else DraftOutput(logits[rows], kept[rows])

    def to_target(self, token_ids: Tensor) -> Tensor:
        """Map draft token ids to target token ids."""
        return token_ids if self.target_ids is None else self.target_ids[token_ids]


class SGLangBlocks(SGLangModel):
    """SGLang's DFlash head as a `specattn.speculative.proposers.block.BlockDraftModel`.

    Parameters
    ----------
    runner : ModelRunner
        SGLang's.
    target : nn.Module
        SGLang's target, whose embedding and output projection the head shares.
    settings : BlockHead
        What the head's settings say.
    """

    target_ids = None

    def __init__(self, runner: Any, target: Any, settings: BlockHead) -> None:
        super().__init__(runner)
        self.block, self._logit_scale = settings.block, settings.logit_scale
        self.feature_size: int = runner.model.fc.in_features
        self._embed_tokens, self._lm_head = target.get_input_embeddings(), vocabulary_of(target)
        self.vocab_size = self._lm_head.out_features

    def combine(self, hidden_states: Tensor) -> Tensor:
        """Mix the target's features ``[T, F]`` into the head's context ``[T, H]``."""
        context: Tensor = self.runner.model.project_target_hidden(hidden_states.to(self.dtype))
        return context

    def write_context(self, states: Tensor, positions: Tensor, pool: KVPool, slots: Tensor) -> None:
        """Store every layer's keys and values."""
        for at, layer in enumerate(self.runner.model.layers):
            attention = layer.self_attn
            keys, values = attention.kv_proj_only(states)
            keys = attention.apply_k_rope(positions, attention.apply_k_norm(keys))
            pool.store(at, slots, keys, values)

    def forward_block(
        self, input_ids: Tensor, positions: Tensor, attend: Any, rows: Tensor | None = None
    ) -> Tensor:
        """Run the head over blocks."""
        embeds = self._embed_tokens(input_ids)
        states = self._run(input_ids, positions, attend, input_embeds=embeds).hidden_states
        logits = self._lm_head.product(states if rows is None else states[rows])
        return logits if self._logit_scale == 1.0 else logits * self._logit_scale

    def to_target(self, token_ids: Tensor) -> Tensor:
        """Return the ids: the head's are the target's."""
        return token_ids


def join_states(model: Any) -> None:
    """Have SGLang 0.5.23 capture whole states of a Gemma 3.

    Its layers leave a state as two parts, of which SGLang captures the first.
    """
    if release() == OLD or type(model).__name__ != "Gemma3ForCausalLM":
        return
    inner = model.model

    def joined(layer: Any, _: Any, parts: tuple[Tensor, Tensor]) -> tuple[Tensor, None] | None:
        return (
            (parts[0] + parts[1], None) if layer.layer_id + 1 in inner.layers_to_capture else None
        )

    # the last one's state is normed
    for layer in inner.layers[:-1]:
        layer.register_forward_hook(joined)


def step_models(
    target: Any, draft: Any, target_ids: Tensor | None, blocks: BlockHead | None = None
) -> tuple[TargetModel, AnyDraftModel]:
    """Return a step's models, fused where they can be.

    Others are SGLang's modules; a DFlash head that cannot be fused is refused. The log says which,
    and why.

    Parameters
    ----------
    target, draft : ModelRunner
        SGLang's.
    target_ids : Tensor or None
        ``[Vd]`` int64, the target's token of every token of the head.
    blocks : BlockHead, optional
        Of a DFlash head.
    """
    modules = SGLangTarget(target)
    fuse_target = partial(
        fused_target,
        target.model,
        modules.attending,
        max_context_len=modules.max_context_len,
        eos_token_ids=modules.eos_token_ids,
    )
    if blocks is not None:
        layers = [layer_config(draft, layer) for layer in attention_layers(draft)]
        # what does not fit is refused whichever of both runs
        fused = fused_block_head(draft.model, target.model, layers, blocks)
        block_head = SGLangBlocks(draft, target.model, blocks)
        drafts = _fused("head", lambda: fused, block_head)
        return _fused("target", fuse_target, modules), drafts
    kind, head = draft_quantization(), SGLangDraft(draft, target_ids)
    fuse_head = partial(
        fused_head, draft.model, head.attending, target_ids=target_ids, quantization=kind
    )
    models = _fused("target", fuse_target, modules), _fused("head", fuse_head, head)
    if kind is not None:
        found = "is not fused, and not" if models[1] is head else "has its own weights"
        log.info("%s: the head %s quantised (%s=%s)", ALGORITHM, found, QUANTIZATION_VARIABLE, kind)
    return models


def _fused(name: str, fuse: Callable[[], Any], modules: SGLangModel) -> Any:
    """Return a model's fused form, or its modules; log why."""
    why = f"{FUSED_VARIABLE}=0"
    if os.environ.get(FUSED_VARIABLE) != "0":
        try:
            modules = fuse()
        except UnsupportedError as error:
            why = "; ".join(error.reasons)
        else:
            log.info("%s: the %s's forwards are fused over SGLang's weights", ALGORITHM, name)
            return modules
    log.info("%s: the %s's forwards are SGLang's modules (%s)", ALGORITHM, name, why)
    return modules
