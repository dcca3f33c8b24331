"""Loads whole language models as drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specattn.errors import ModelError
from specattn.models.hf import HFTarget
from specattn.models.vocabulary import check_padding, check_vocabulary, vocabulary
from specattn.speculative.standalone import LMDraft

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from specattn.models.fused import FusedTarget


def load_lm_draft(
    path_or_id: str | Path,
    target: HFTarget | FusedTarget,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> LMDraft:
    """Load a causal LM of Hugging Face as a target's draft.

    Parameters
    ----------
    path_or_id : str or Path
        As in `HFTarget.from_pretrained`: a folder, a GGUF file, or the name of a model on the Hub.
    target : HFTarget or FusedTarget
        The target model. It need not give any features.
    dtype, device : optional
        The dtype and device of the draft; the target's if None.

    Raises
    ------
    ModelError
        As `HFTarget.from_pretrained`. If draft and target have other tokenizers, or, where one of
        them has none, vocabularies that differ by more than padding. ``argument`` is "draft".
    """
    try:
        model = HFTarget.from_pretrained(
            path_or_id, dtype=dtype or target.dtype, device=device or target.device
        )
    except ModelError as error:
        raise ModelError("draft", str(error)) from error
    return lm_draft(model, target)


def lm_draft(model: HFTarget, target: HFTarget | FusedTarget) -> LMDraft:
    """Let a loaded model draft for a target.

    Parameters
    ----------
    model : HFTarget
        The draft's model. It need not give any features.
    target : HFTarget or FusedTarget
        The target.

    Raises
    ------
    ModelError
        As `load_lm_draft` for what does not fit.
    """
    found, wanted = vocabulary(model), vocabulary(target)
    name = model.name or f"the draft ({model.config.model_type})"
    if found is not None and wanted is not None:
        check_vocabulary(name, found, wanted, "its tokenizer")
    elif model.vocab_size != target.vocab_size:
        check_padding(name, model.vocab_size, target)
    return LMDraft(model, target.vocab_size)
