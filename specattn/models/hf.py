"""Targets from Hugging Face, which attend through transformers' attention interface."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import torch

from specattn.autocast import without_autocast
from specattn.errors import ModelError
from specattn.models.interface import INTERFACE, HostAttend, ModelState
from specattn.models.pretrained import load_causal, tokenizer_of
from specattn.models.probe import probe_layers
from specattn.models.quantisation import prepare
from specattn.models.shards import check_heads, process_group
from specattn.speculative.model import TargetOutput

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

    from specattn.config import LayerConfig
    from specattn.speculative.model import Attend


@dataclass(frozen=True, eq=False, kw_only=True)
class LoadedTarget:
    """The parts that loaded targets have, whatever runs them.

    Parameters
    ----------
    name : str
        The model's folder or Hub id, for messages and for the tokenizer.
    features : tuple of int
        The hidden states that `forward` returns for a draft, in Hugging Face's numbering: state
        ``i`` enters layer ``i`` and leaves layer ``i - 1``, and state ``len(layers)`` is that after
        the final norm. Several states are concatenated in the order given; none are no features.
    """

    name: str = ""
    features: tuple[int, ...] = ()

    # a field of some targets and a property of others
    if TYPE_CHECKING:

        @property
        def layers(self) -> tuple[LayerConfig, ...]:
            """What every layer is."""

    def with_features(self, features: tuple[int, ...]) -> Self:
        """Return a target of the same weights that gives other ``features``.

        Raises
        ------
        ValueError
            If the model has no such hidden state.
        """
        if any(not 0 <= index <= len(self.layers) for index in features):
            raise ValueError(f"features must be 0..{len(self.layers)}, got {features}")
        return replace(self, features=features)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer next to the model, loaded on first use.

        Raises
        ------
        ModelError
            If there is none.
        """
        return tokenizer_of(self.name)


@dataclass(frozen=True, eq=False)
class HFTarget(LoadedTarget):
    """A Hugging Face causal LM whose attention the caller supplies.

    Its attention is the ``attend`` of each `forward`. `from_pretrained` and `from_model` make one.
    The model is not patched: transformers dispatches attention by name, and keyword arguments of
    the model's call reach that dispatch. Nobody else can call the model until `restore`.

    Parameters
    ----------
    module : PreTrainedModel
        The model, in evaluation mode and without gradients.
    layers : tuple of AttnConfig or StateConfig
        What every layer is.
    before : ModelState, optional
        What `restore` puts the model back into; None leaves it as it is. The other parts are those
        of `LoadedTarget`.
    """

    module: Any
    layers: tuple[LayerConfig, ...]
    before: ModelState | None = None

    @classmethod
    def from_pretrained(
        cls,
        path_or_id: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        tp_plan: str | dict[str, str] | None = None,
        quantization: str | None = None,
    ) -> Self:
        """Load a model from a folder or from the Hub.

        Parameters
        ----------
        path_or_id : str or Path
            A folder as `save_pretrained` writes it, a file ``NAME.gguf``, whose weights become
            plain ones, or the name of a model on the Hub.
        dtype : torch.dtype, optional
            The dtype of the weights; the checkpoint's own if None, float32 of quantised ones.
        device : torch.device or str
            The device of the weights; of shards, transformers chooses it.
        tp_plan : str or dict, optional
            How transformers shards the weights over the processes of ``torchrun``; ``"auto"`` is
            the model's own plan. See docs/tensor_parallel.md.
        quantization : str, optional
            ``"fp8"``, ``"fp8-channel"`` or ``"fp8-weights"``: how to quantise plain weights, which
            makes another model; see docs/quantised_weights.md.

        Raises
        ------
        ModelError
            If the model is not found, unreachable, gated, corrupt or incomplete, or if this
            library does not compute its attention. ``argument`` is "target", or "quantization".
        ValueError
            If ``quantization`` is none of these.
        """
        module, name = load_causal(
            path_or_id, dtype=dtype, device=device, tp_plan=tp_plan, quantization=quantization
        )
        return cls.from_model(module, name=name)

    @classmethod
    def from_model(cls, module: Any, *, name: str = "") -> Self:
        """Wrap a model that is built already, until `restore`.

        Two short forwards show what attention the model computes. From then on it attends through
        this library alone, in evaluation mode and without gradients.

        Raises
        ------
        ModelError
            If this library does not compute the model's attention, or the model cannot be sharded
            so. The model is left as it was.
        """
        before = ModelState.of(module)
        name, config = name or module.name_or_path, module.config.get_text_config(decoder=True)
        try:
            module.eval().requires_grad_(False)
            check_heads(name, module, config)
            prepare(module)
            return cls(module, probe_layers(module), before, name=name)
        except BaseException:
            before.restore(module)
            raise

    def restore(self) -> None:
        """Give the model back, as it was before `from_model`.

        That is its attention, its modules' modes, and which parameters have gradients. The target
        runs no more; `from_model` wraps the model again. A `FusedTarget` made of it goes on.
        """
        if self.before is not None:
            self.before.restore(self.module)

    @property
    def config(self) -> Any:
        """The configuration of the model's text part."""
        return self.module.config.get_text_config(decoder=True)

    @property
    def hidden_size(self) -> int:
        """Width of one hidden state."""
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return int(self.lm_head.weight.shape[0])

    @property
    def max_context_len(self) -> int:
        """Most tokens for which the position embedding is that of training."""
        return min(int(self.config.max_position_embeddings), rescaling_length(self.config)[0])

    def for_context(self, max_context_len: int) -> Self:
        """Return the target itself if its positions allow the length.

        Raises
        ------
        ModelError
            If the model has a table of fewer positions. If a request of that length would rotate
            all tokens of its batch in another way, and make the keys in the pool wrong.
        """
        name, table = self.name or self.config.model_type, int(self.config.max_position_embeddings)
        if getattr(self.config, "rope_parameters", None) is None and max_context_len > table:
            raise ModelError(
                "target",
                f"{name} has a table of {table} positions: max_context_len must be at most "
                f"{table}, got {max_context_len}",
            )
        refuse_rescaling("target", name, self.config, max_context_len)
        return self

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """Token ids that end a text, by generation settings and configuration."""
        ids: set[int] = set()
        for source in (self.module.generation_config, self.config):
            eos = getattr(source, "eos_token_id", None)
            ids.update([] if eos is None else [eos] if isinstance(eos, int) else eos)
        return frozenset(ids)

    @cached_property
    def process_group(self) -> ProcessGroup | None:
        """The ranks that share the weights, if they are sharded."""
        return process_group(self.module)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and hidden states."""
        return self.embed_tokens.weight.dtype

    @property
    def embed_tokens(self) -> nn.Embedding:
        """The input embedding, for drafts that share it."""
        embedding: nn.Embedding = self.module.get_input_embeddings()
        return embedding

    @property
    def lm_head(self) -> nn.Linear:
        """The output projection, for drafts that share it."""
        head: nn.Linear = self.module.get_output_embeddings()
        return head

    @torch.no_grad()
    @without_autocast
    def forward(
        self, input_ids: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> TargetOutput:
        """Run the model over flattened tokens; see `TargetModel.forward`.

        Raises
        ------
        ModelError
            If the model has been given back.
        """
        if self.config._attn_implementation != INTERFACE:
            raise ModelError(
                "target",
                f"{self.name or self.config.model_type} attends in its own way again: wrap it anew "
                "by HFTarget.from_model",
            )
        narrow = rows is not None and self._takes_rows
        output = self.module(
            input_ids=input_ids[None],
            position_ids=positions[None],
            use_cache=False,
            return_dict=True,
            # What a list of indices selects differs between versions of transformers.
            output_hidden_states=bool(self.features),
            specattn_attention=HostAttend(attend),
            **({"logits_to_keep": rows} if narrow else {}),
        )
        logits = output.logits[0]  # [R or T, V]
        if rows is not None and not narrow:
            logits = logits[rows]
        states = [output.hidden_states[index][0] for index in self.features]
        if len(states) > 1:
            return TargetOutput(logits, torch.cat(states, dim=-1))
        return TargetOutput(logits, states[0] if states else None)

    @cached_property
    def _takes_rows(self) -> bool:
        return "logits_to_keep" in inspect.signature(self.module.forward).parameters


def refuse_rescaling(argument: str, name: str, config: Any, max_context_len: int) -> None:
    """Refuse contexts in which a rope type would rescale a whole batch.

    Parameters
    ----------
    argument : str
        The argument to blame: ``"target"`` or ``"draft"``.
    name : str
        The model, for the message.
    config : PreTrainedConfig
        Its configuration.
    max_context_len : int
        Tokens of the longest context.

    Raises
    ------
    ModelError
        If a request of that length would rotate all tokens of its batch in another way, and make
        the keys in the pool wrong.
    """
    limit, kind = rescaling_length(config)
    if max_context_len > limit:
        raise ModelError(
            argument,
            f"{name} has rope type {kind!r}, which rotates all tokens in another way once a "
            f"context is longer than {limit}: max_context_len must be at most {limit}, got "
            f"{max_context_len}",
        )


def rescaling_length(config: Any) -> tuple[int, str]:
    """Return the length where a rope type rescales, and the type."""
    ropes = getattr(config, "rope_parameters", None) or {}
    found = [(sys.maxsize, "")]
    for rope in (ropes, *(part for part in ropes.values() if isinstance(part, dict))):
        if (kind := rope.get("rope_type")) == "longrope":
            found.append((rope["original_max_position_embeddings"], kind))
        elif kind == "dynamic":
            found.append((int(config.max_position_embeddings), kind))
    return min(found)
