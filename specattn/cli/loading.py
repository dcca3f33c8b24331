"""Devices, dtypes and models by name, and the shipped pair."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from specattn.cli.errors import ArgumentError, refuse, stderr
from specattn.cli.torchrun import local_rank, world_size
from specattn.config import FLOAT8

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from specattn.speculative.model import TargetModel
    from specattn.speculative.proposers.drafts import Draft

log = logging.getLogger(__name__)

#: What ``--dtype`` may be.
DTYPES = "auto, float32 (fp32), float16 (fp16) or bfloat16 (bf16)"
_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}
#: What ``--quantization`` may be.
QUANTIZATIONS = ("fp8", "fp8-channel", "fp8-weights")
_Value = TypeVar("_Value")
# hidden size from which a CPU's threads gain from sharing one product; below, they only wait
_SHARED_FROM = 1024


@dataclass(frozen=True)
class Models:
    """A target, what drafts for it, and their tokenizer.

    The target returns the features that the draft reads; without a draft, decoding is plain.
    """

    target: TargetModel
    draft: Draft | None
    tokenizer: Any


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of tokens without special tokens."""
    text: str = tokenizer.decode(
        list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return text


def spelling(tokenizer: Any, token: int) -> str:
    """Return the text of one token, special ones included."""
    text: str = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    return text


def progress_bar(what: str, *first: ProgressColumn, hidden: bool = False) -> Progress:
    """Return a bar for a terminal's standard error; it leaves nothing behind."""
    return Progress(
        *first,
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=stderr(),
        transient=True,
        disable=hidden or not stderr().is_terminal,
    )


@contextmanager
def loading_bar() -> Iterator[None]:
    """Show on a terminal how many of the weights are loaded."""
    from transformers.utils import logging as transformers_logging

    bar = progress_bar("loading models", SpinnerColumn())
    task = bar.add_task("loading models", total=None)

    def follow(make: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Count here what transformers would show a bar of its own for."""
        if args:
            args = bar.track(args[0], task_id=task), *args[1:]
        return make(*args, **options)

    with bar:
        before = transformers_logging.set_tqdm_hook(follow)
        try:
            yield
        finally:
            transformers_logging.set_tqdm_hook(before)


def load_models(  # noqa: PLR0913 - a command's options
    target: str | None,
    draft: str | None,
    *,
    speculative: bool,
    dtype: torch.dtype,
    device: torch.device,
    kind: str = "eagle3",
    lookup_first: bool = False,
    fused: bool = True,
    quantization: str | None = None,
    draft_quantization: str | None = None,
) -> Models:
    """Load a target and its draft, by default the shipped pair.

    Models are folders, GGUF files or names on the Hub; ``dtype`` and ``device`` are those of the
    weights, and ``fused`` says whether to fuse each model that has a fused form
    (`specattn.models.fuse`). An ArgumentError or a ModelError names one that is missing, broken, or
    does not fit the other. ``kind`` is one of `options.DRAFT_KINDS`; lookup drafts without a model,
    or with ``lookup_first`` in front of one. A target's own MTP layer is its draft by default.
    Weights are quantised as the last two say.
    """
    kind = kind if speculative else "none"
    draft = _checked(target, draft, kind)
    with loading_bar():
        from specattn.models import HFTarget, fuse, load_dflash, load_draft, load_lm_draft
        from specattn.speculative.proposers.lookup import LookupFirst, LookupProposer

        found = HFTarget.from_pretrained(
            target or shipped("--target"),
            dtype=dtype,
            device=device,
            tp_plan="auto" if world_size() > 1 else None,
            quantization=quantization,
        )
        if quantization is not None and getattr(found.config, "quantization_config", None) is None:
            log.warning(
                "--quantization %s makes another model of %s, with texts of its own",
                quantization,
                found.name,
            )
        if device.type == "cpu" and found.hidden_size < _SHARED_FROM:
            torch.set_num_threads(1)
        head: Any = None
        loaders = {"eagle3": load_draft, "dflash": load_dflash, "model": load_lm_draft}
        if load := loaders.get(kind):
            head = load(
                draft or shipped("--draft", kind),
                found,
                dtype=dtype,
                device=device,
                quantization=draft_quantization,
            )
            if kind != "model":
                found = found.with_features(head.features)
        models: tuple[Any, Any] = fuse(found, head) if fused else (found, head)
        if kind == "lookup":
            models = models[0], LookupProposer()
        elif lookup_first:
            models = models[0], LookupFirst(LookupProposer(), models[1])
        return Models(*models, found.tokenizer)


def _checked(target: str | None, draft: str | None, kind: str) -> str | None:
    """Return the draft that is named, or what stands for the target's own.

    Names that are empty are refused, and a draft that the kind has no use for, or lacks.
    """
    refuse(
        (target == "", "--target", "must not be empty"),
        (draft == "", "--draft", "must not be empty"),
    )
    if draft is None:
        if kind == "model":
            raise ArgumentError("--draft", "is needed with --draft-kind model")
        if kind == "eagle3" and target is not None and drafts_itself(target):
            told = f"specattn: {target} drafts with its own MTP layer (--draft mtp)"
            stderr().print(Text(told), soft_wrap=True)
            return "mtp"
        if kind in ("eagle3", "dflash") and target is not None:
            raise ArgumentError(
                "--draft", "is needed with --target (or --draft-kind lookup, or none)"
            )
    elif kind in ("lookup", "none"):
        what = "plain decoding" if kind == "none" else f"--draft-kind {kind}"
        raise ArgumentError("--draft", f"must not be given: {what} has no model")
    return draft


def drafts_itself(target: str) -> bool:
    """Return whether a target has MTP layers that draft."""
    from specattn.models.mtp_checkpoint import has_mtp

    return has_mtp(target)


def shipped(option: str, kind: str = "") -> str:
    """Return the folder of the shipped target or head; without it, ``option`` is needed."""
    from specattn.models.hub import PAIR, PAIR_HEADS

    folder = PAIR / (PAIR_HEADS[kind].name if kind else "target")
    if not (folder / "config.json").is_file():
        raise ArgumentError(option, f"is needed: this installation has no model in {folder}")
    return str(folder)


def pick_device(name: str) -> torch.device:
    """Return the device ``name``, which becomes the current one on CUDA.

    ``auto`` is CUDA where there is one, else the CPU. Under ``torchrun`` every rank has a GPU of
    its own.
    """
    if world_size() > 1:
        name = _device_of_rank(name)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ArgumentError(
            "--device", f"must be auto, cpu, cuda, cuda:N or another torch device, got {name!r}"
        ) from error
    if device.type == "cpu" and device.index is not None:
        raise ArgumentError("--device", f"must be cpu, without an index, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("--device", f"{name} is not available: torch sees no CUDA device here")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ArgumentError(
            "--device", f"there is no {name}: torch sees {torch.cuda.device_count()} CUDA devices"
        )
    if device.type == "cuda" and device.index is not None:
        # kernels are launched on the current device, wherever their tensors are
        torch.cuda.set_device(device)
    try:
        torch.zeros(1, device=device).item()
    # each device type fails in its own way: not compiled in, no driver, no data
    except Exception as error:
        raise ArgumentError("--device", f"{name} is not available here") from error
    return device


def _device_of_rank(name: str) -> str:
    """Return the name of the device where transformers places a rank's shard."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("auto", kind):
        raise ArgumentError("--device", f"must be auto or {kind} under torchrun, got {name!r}")
    return f"cuda:{local_rank()}" if kind == "cuda" else kind


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype ``name``; ``auto`` is bfloat16 on CUDA, else float32."""
    auto = torch.bfloat16 if device.type == "cuda" else torch.float32
    return pick("--dtype", name, _DTYPES | {"auto": auto}, DTYPES)


def pick_quantization(option: str, name: str | None) -> str | None:
    """Return how an option says to quantise weights."""
    known = dict(zip(QUANTIZATIONS, QUANTIZATIONS, strict=True))
    expected = f"{', '.join(QUANTIZATIONS[:-1])} or {QUANTIZATIONS[-1]}"
    return None if name is None else pick(option, name, known, expected)


def pick_kv_dtype(name: str) -> torch.dtype | None:
    """Return the dtype of the KV cache, None for the model's."""
    # as vLLM and SGLang spell it, and torch
    known = dict.fromkeys(("fp8_e4m3", "fp8", "float8_e4m3fn"), FLOAT8)
    return pick("--kv-cache-dtype", name, known | {"auto": None}, "auto or fp8_e4m3")


def pick(option: str, name: str, known: Mapping[str, _Value], expected: str) -> _Value:
    """Return what an option's word stands for."""
    if name not in known:
        raise ArgumentError(option, f"must be {expected}, got {name!r}")
    return known[name]
