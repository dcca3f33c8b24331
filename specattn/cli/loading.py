"""Models by name, and the pair that is used when none is named."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specattn.cli.errors import ArgumentError, stderr
from specattn.cli.options import check_backend, from_environment

if TYPE_CHECKING:
    import torch
    import typer

    from specattn.speculative.model import DraftModel, TargetModel

# hidden size from which a CPU's threads gain from sharing one product; below, they only wait
_SHARED_FROM = 1024


@dataclass(frozen=True)
class Models:
    """A target, the draft head made for it, and the tokenizer of both.

    Parameters
    ----------
    target : TargetModel
        Returns the features that ``draft`` reads.
    draft : DraftModel or None
        None for plain decoding.
    tokenizer : object
        A transformers tokenizer.
    """

    target: TargetModel
    draft: DraftModel | None
    tokenizer: Any


def models_for(
    ctx: typer.Context,
    place: torch.device,
    target: str | None,
    draft: str | None,
    dtype: str,
    backend: str,
    *,
    speculative: bool,
    fused: bool = True,
) -> Models:
    """Load a command's models, once its dtype and backend are known to serve on ``place``.

    Raises
    ------
    ArgumentError, ModelError
        If one of the options cannot be had, or as `load_models`.
    """
    from specattn.cli.device import pick_dtype

    weights = pick_dtype(dtype, place)
    check_backend(backend, place, from_environment=from_environment(ctx, "backend"))
    return load_models(
        target, draft, speculative=speculative, dtype=weights, device=place, fused=fused
    )


def load_models(
    target: str | None,
    draft: str | None,
    *,
    speculative: bool,
    dtype: torch.dtype,
    device: torch.device,
    fused: bool = True,
) -> Models:
    """Load a pair, the shipped one by default.

    Parameters
    ----------
    target, draft : str or None
        Folders or names on the Hub.
    speculative : bool
        Whether a draft is needed at all.
    dtype, device
        Of the weights.
    fused : bool
        Whether to fuse each of them if that can be had (`specattn.models.fuse`).

    Raises
    ------
    ArgumentError, ModelError
        If a model is missing, broken, or does not fit the other.
    """
    if speculative and target is not None and draft is None:
        raise ArgumentError("--draft", "is needed with --target (or --steps 0 for plain decoding)")
    with stderr().status("loading models"):
        import torch

        from specattn.models import HFTarget, fuse, load_draft

        found = HFTarget.from_pretrained(target or shipped("target"), dtype=dtype, device=device)
        if device.type == "cpu" and found.hidden_size < _SHARED_FROM:
            torch.set_num_threads(1)
        head = None
        if speculative:
            head = load_draft(draft or shipped("draft"), found, dtype=dtype, device=device)
            found = found.with_features(head.features)
        return Models(*(fuse(found, head) if fused else (found, head)), found.tokenizer)


def shipped(part: str) -> str:
    """Return the folder of the shipped ``target`` or ``draft``.

    Raises
    ------
    ArgumentError
        If this installation lacks it.
    """
    folder = Path(str(files("specattn"))) / "pair" / part
    if not (folder / "config.json").is_file():
        raise ArgumentError(f"--{part}", f"is needed: this installation has no model in {folder}")
    return str(folder)
