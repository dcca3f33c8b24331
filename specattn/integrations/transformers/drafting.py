"""What drafts in a call of transformers' ``generate``."""

from __future__ import annotations

import json
import weakref
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from transformers import PreTrainedModel

from specattn.checks import instance, kind_of, whole_number
from specattn.config import SpecConfig
from specattn.errors import ModelError
from specattn.kernels.lookup import MAX_NGRAM
from specattn.models import DFlashHead, Eagle3Head, EagleHead, HFTarget, MtpHead, load_draft
from specattn.models.draft import lm_draft, recurrent
from specattn.models.hub import PAIR
from specattn.models.probe import RecurrentModelError, probe_layers
from specattn.models.quantisation import check_format
from specattn.speculative.proposers.lookup import LookupFirst, LookupProposer
from specattn.speculative.proposers.proposer import ProposerFactory

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from specattn.models import FusedTarget

    #: A model as it was read, and what steps run: the same, or its fused form.
    Models = tuple[HFTarget, HFTarget | FusedTarget]

# drafts that read features of the target
_HEADS = EagleHead | Eagle3Head | DFlashHead | MtpHead
# the deepest tree
_MOST_TOKENS = 64
# transformers looks for two last tokens, and then for one
_NGRAM = 2


@dataclass(frozen=True)
class Drafting:
    """What drafts, and the tree.

    Parameters
    ----------
    spec : SpecConfig
        The tree alone; other numbers are the defaults.
    draft : str, PathLike, head, ProposerFactory or None
        As `generate` takes it.
    assistant : PreTrainedModel or None
        A whole model that drafts.
    max_ngram : int
        Most last tokens that prompt lookup looks for, before the others draft; 0 without it.
    quantization : str or None
        How to quantise a head that is loaded here.
    """

    spec: SpecConfig
    draft: Any = None
    assistant: Any = None
    max_ngram: int = 0
    quantization: str | None = None

    @classmethod
    def of(
        cls,
        draft: Any,
        assistant: Any,
        spec: SpecConfig | None,
        settings: Any,
        quantization: str | None = None,
    ) -> Self:
        """Read what a call asks for.

        Parameters
        ----------
        draft, assistant, spec
            Arguments of the call: ``draft``, ``assistant_model`` and ``spec_config``.
        settings : GenerationConfig
            Its settings.
        quantization : str, optional
            An argument of the call: ``draft_quantization``.

        Raises
        ------
        ValueError
            If two things would draft, or none with a tree; if a number is out of range; if what
            drafts is not loaded here, to be quantised.
        """
        check_format("draft_quantization", quantization)
        if quantization is not None and not isinstance(draft, str | PathLike):
            raise ValueError("draft_quantization needs a draft that is a head's folder or name")
        if assistant is not None and draft is not None:
            raise ValueError("draft must be None with an assistant_model: one of them drafts")
        if assistant is not None and not isinstance(assistant, PreTrainedModel):
            raise ValueError(
                f"assistant_model must be a model of transformers, got {kind_of(assistant)}"
            )
        lookup, ngram = settings.prompt_lookup_num_tokens, 0
        if lookup is not None:
            lookup = whole_number("prompt_lookup_num_tokens", lookup, 1, _MOST_TOKENS)
            ngram = settings.max_matching_ngram_size or _NGRAM
            ngram = whole_number("max_matching_ngram_size", ngram, 1, MAX_NGRAM)
        if spec is not None:
            instance("spec_config", spec, SpecConfig, "a SpecConfig")
        else:
            spec = _chain(draft, assistant, lookup)
        if spec.num_steps and draft is None and assistant is None and lookup is None:
            raise ValueError(f"draft must be given with {spec.num_steps} num_steps in spec_config")
        default = SpecConfig()
        spec = replace(
            spec, max_context_len=default.max_context_len, max_num_reqs=default.max_num_reqs
        )
        return cls(spec, draft, assistant, ngram, quantization)

    @property
    def key(self) -> tuple[object, ...]:
        """What calls have in common that can share an engine.

        It keeps no assistant alive, and an assistant of other weights has another one.
        """
        if self.assistant is not None:
            draft: object = weakref.ref(self.assistant), weights_of(self.assistant)
        else:
            named = isinstance(self.draft, str | PathLike)
            draft = str(self.draft) if named else id(self.draft)
        return draft, self.max_ngram, self.spec, self.quantization

    def load(self, target: HFTarget, assistant: Models | None) -> Any:
        """Return the draft as `Engine` takes it, or None.

        Parameters
        ----------
        target : HFTarget
            The target.
        assistant : tuple or None
            The ``assistant`` as it was read, and what steps run; it may be the target.

        Raises
        ------
        ModelError
            If there is no such draft, or it does not fit the target.
        """
        if not self.spec.num_steps:
            return None
        draft = _loaded(self.draft, target, self.quantization)
        if assistant is not None:
            read, runs = assistant
            with blaming_assistant(self.assistant, target.device):
                draft = replace(lm_draft(read, target), model=runs)
        if not self.max_ngram:
            return draft
        if draft is None:
            return LookupProposer(1, self.max_ngram)
        # a single token is nearly always found again: the draft would hardly be asked
        return LookupFirst(LookupProposer(min(2, self.max_ngram), self.max_ngram), draft)


def _chain(draft: Any, assistant: Any, lookup: int | None) -> SpecConfig:
    """Return the chain of a call without ``spec_config``."""
    stated = getattr(assistant, "generation_config", None)
    steps = None if stated is None else stated.num_assistant_tokens
    if steps is not None:
        steps = whole_number("num_assistant_tokens", steps, 1, _MOST_TOKENS)
    if steps := steps or lookup:
        return SpecConfig(steps, 1, steps + 1)
    return SpecConfig().plain() if draft is None and assistant is None else SpecConfig()


def weights_of(model: Any, *, written: bool = False) -> tuple[object, ...]:
    """Return where a model's weights lie: other weights lie elsewhere.

    With ``written``, weights that were written to since are others, too.
    """
    found: list[object] = []
    parts = [model]
    # every call comes here: a walk by `Module.parameters` takes four times as long
    for part in parts:
        parts += filter(None, part._modules.values())
        for one in chain(part._parameters.values(), part._buffers.values()):
            if one is not None:
                found += one.data_ptr(), one.dtype
                if written and not one.is_inference():
                    found.append(one._version)
    return tuple(found)


def target_of(model: Any) -> HFTarget:
    """Return a model as a target, which does not keep it alive."""
    return HFTarget(weakref.proxy(model), probe_layers(model), name=model.name_or_path)


def features_for(target: HFTarget | FusedTarget, draft: Any) -> HFTarget | FusedTarget:
    """Return a target that gives what a draft reads."""
    behind = draft.draft if isinstance(draft, LookupFirst) else draft
    return target.with_features(behind.features) if isinstance(behind, _HEADS) else target


def _loaded(draft: Any, target: HFTarget, quantization: str | None) -> Any:
    """Return the draft head, or None."""
    # a class has what its instances have
    if draft is None or (
        isinstance(draft, _HEADS | ProposerFactory) and not isinstance(draft, type)
    ):
        return draft
    if not isinstance(draft, str | PathLike):
        whole = "; a whole model drafts as assistant_model=" * isinstance(draft, PreTrainedModel)
        raise ModelError(
            "draft",
            f"draft must be a folder, a name, a loaded head or a proposer, got {kind_of(draft)}"
            + whole,
        )
    if draft != "shipped":
        name = Path(draft) if isinstance(draft, PathLike) else draft
        return load_draft(name, target, quantization=quantization)
    known = json.loads((PAIR / "target" / "config.json").read_text())
    keys = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
    if any(known[key] != getattr(target.config, key) for key in keys):
        raise ModelError("draft", "the shipped draft is for the shipped target, not for this model")
    return load_draft(PAIR / "draft", target, quantization=quantization)


@contextmanager
def blaming_assistant(model: Any, device: torch.device) -> Iterator[None]:
    """Say of errors that they are about an ``assistant_model``."""
    if model.device != device:
        raise ModelError(
            "assistant_model",
            f"assistant_model must be on the model's device, {device}, got {model.device}",
        )
    try:
        yield
    except RecurrentModelError as error:
        why = recurrent(f"a model of type {model.config.model_type!r}")
        raise ModelError("assistant_model", f"assistant_model: {why}") from error
    except ModelError as error:
        raise ModelError("assistant_model", f"assistant_model: {error}") from error
