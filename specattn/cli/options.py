"""Options that commands share, and the speculative config that they make."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specattn.cli.errors import ArgumentError, naming_options

if TYPE_CHECKING:
    import torch

    from specattn.config import SpecConfig
    from specattn.speculative.step_setup import CudagraphMode

MODELS, SPECULATION, SAMPLING = "Models", "Speculation", "Sampling"
RUNNING, OUTPUT = "Running", "Output"
BACKEND_VARIABLE = "SPECATTN_BACKEND"


def option(panel: str, text: str, *names: str, **more: Any) -> Any:
    """Describe an option in a panel of the help, as `typer.Option` does."""
    return typer.Option(*names, rich_help_panel=panel, help=text, **more)


PromptArgument = Annotated[
    str | None,
    typer.Argument(metavar="PROMPT", help="Text to continue; - or nothing reads standard input."),
]
PromptsOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="A batch of prompts: one per line, a JSON list, or JSON lines (.jsonl) of strings or "
        'objects with a "prompt"; - for stdin.',
    ),
]
_CHAT = "Take each prompt as a message of the target's chat template."
ChatOption = Annotated[bool, typer.Option("--chat", help=_CHAT)]
SystemOption = Annotated[
    str | None, typer.Option("--system", metavar="TEXT", help="With --chat: the system message.")
]
_TARGET = (
    "Target: a folder, a file FILE.gguf, or the name of a model on the Hugging Face Hub. "
    "Default: the pair that comes with specattn."
)
_DRAFT = (
    "What drafts for the target: an EAGLE, EAGLE-2, EAGLE-3 or DFlash checkpoint; with "
    "--draft-kind model a whole model, given as a target is."
)
_KIND = (
    "What drafts: eagle3 (EAGLE heads), dflash, model (a whole model with the target's "
    "tokenizer), lookup (the text itself) or none."
)
DRAFT_KINDS = "eagle3", "dflash", "model", "lookup", "none"
_LOOKUP_FIRST = (
    "Where the text repeats itself, draft from it as lookup does, and else by the draft."
)
DTYPES = "auto, float32 (fp32), float16 (fp16) or bfloat16 (bf16)"
_DTYPE = f"{DTYPES}. auto is bfloat16 on CUDA, float32 elsewhere."
TargetOption = Annotated[str | None, option(MODELS, _TARGET, metavar="MODEL")]
DraftOption = Annotated[str | None, option(MODELS, _DRAFT, metavar="MODEL")]
DraftKindOption = Annotated[str, option(MODELS, _KIND, metavar="KIND")]
LookupFirstOption = Annotated[bool, option(MODELS, _LOOKUP_FIRST, "--lookup-first")]
DeviceOption = Annotated[str, option(MODELS, "auto, cpu, cuda or cuda:N.")]
DtypeOption = Annotated[str, option(MODELS, _DTYPE)]

#: Beside the tree's ``--topk`` there is a sampler's ``--top-k``.
NOT_TOP_K = "Not --top-k, which is about drawing tokens."
_TOPK = f"Branches kept at every depth. Default: 1, a chain. {NOT_TOP_K}"
_STEPS = "Depth of the draft tree; 0 is plain decoding. Default: 5."
_NODES = "Nodes verified at once, the root included. Default: steps + 1, or 4 per branch."
_TREE = "beam (chains and trees of --topk), or best_first (--draft-tokens most probable nodes)."
_RANKS = "Tokens of every depth that a best_first tree chooses from. Default: 8."
_DRAWN = "Draw the drafts and verify by rejection sampling; chains at a temperature only."
_ADAPTIVE = "Let every step take the given shape or a smaller one, by what drafts gain and cost."
TopkOption = Annotated[int | None, option(SPECULATION, _TOPK)]
StepsOption = Annotated[int | None, option(SPECULATION, _STEPS)]
DraftTokensOption = Annotated[int | None, option(SPECULATION, _NODES)]
TreeOption = Annotated[str, option(SPECULATION, _TREE)]
RanksOption = Annotated[int | None, option(SPECULATION, _RANKS)]
DraftSamplingOption = Annotated[bool, option(SPECULATION, _DRAWN, "--draft-sampling")]
AdaptiveOption = Annotated[bool, option(SPECULATION, _ADAPTIVE, "--adaptive")]

_BACKEND = "Attention backend, auto, or prefill,decode[,verify]; see `specattn backends`."
_KV_DTYPE = "Store keys and values as fp8_e4m3; auto is the model's dtype."
_BITS = "Attention whose bits depend on the text alone; slower. The triton backend has it."
_CUDAGRAPH = (
    "Record a step as one graph (full) or as three (piecewise); auto is full, or piecewise if a "
    "backend plans on the host."
)
_NO_FUSED = "Run transformers' own modules of whole models also where there are fused ones."
BackendOption = Annotated[str, option(RUNNING, _BACKEND, envvar=BACKEND_VARIABLE)]
KvDtypeOption = Annotated[str, option(RUNNING, _KV_DTYPE, "--kv-cache-dtype")]
DeterministicOption = Annotated[bool, option(RUNNING, _BITS, "--deterministic")]
CudagraphOption = Annotated[str, option(RUNNING, _CUDAGRAPH)]
NoFusedOption = Annotated[bool, option(RUNNING, _NO_FUSED, "--no-fused")]
PageSizeOption = Annotated[int, option(RUNNING, "KV slots per page, a power of two up to 512.")]
JsonOption = Annotated[bool, option(OUTPUT, "Print JSON and nothing else.", "--json")]

# room for one step of any config; the real context length follows from the prompts
_ANY_CONTEXT = 2**20
_DEFAULT_STEPS = 5
_NODES_PER_BRANCH = 4
_BEST_FIRST_NODES = 16


def speculation(
    topk: int | None,
    steps: int | None,
    draft_tokens: int | None,
    *,
    kind: str = "eagle3",
    lookup_first: bool = False,
    tree: str = "beam",
    ranks: int | None = None,
    page_size: int = 1,
    draft_sampling: bool = False,
    adaptive: bool = False,
) -> SpecConfig:
    """Return the speculative config of options; missing ones follow from the others."""
    from specattn.config import SpecConfig

    best_first: dict[str, Any] = {"tree": "best_first"} if _is_best_first(tree, ranks) else {}
    _check_kind(kind, lookup_first=lookup_first)
    needing = {
        "--draft-sampling": draft_sampling,
        "--tree best_first": bool(best_first) and not lookup_first,
    }
    _check_text(kind, needing, lookup_first=lookup_first)
    if kind == "none" and steps:
        raise ArgumentError("--steps", f"must be 0 with --draft-kind none, got {steps}")
    if steps is None:
        chain = not best_first and topk in (None, 1)
        steps = 0 if kind == "none" else _default_steps(draft_tokens if chain else None)
    topk = 1 if topk is None else topk
    if draft_tokens is None:
        draft_tokens = _BEST_FIRST_NODES if best_first else _default_nodes(topk, steps)
    if ranks is not None:
        best_first["ranks"] = ranks
    with naming_options():
        config = SpecConfig(
            steps,
            topk,
            draft_tokens,
            max_context_len=_ANY_CONTEXT,
            page_size=page_size,
            draft_sampling=draft_sampling and steps > 0,
            **best_first,
        )
    needing = {
        "--draft-sampling": draft_sampling,
        "--lookup-first": lookup_first,
        f"--draft-kind {kind}": kind not in ("eagle3", "none"),
        "--adaptive": adaptive,
    }
    if not steps:
        _refuse_plain(needing)
    return config


def _refuse_plain(needing: dict[str, bool]) -> None:
    """Refuse options that plain decoding would ignore."""
    for name, is_given in needing.items():
        if is_given:
            lacks = "smaller tree to choose from" if name == "--adaptive" else "drafts"
            raise ArgumentError(
                name, f"needs --steps of at least 1, got plain decoding, which has no {lacks}"
            )


def _check_text(kind: str, needing: dict[str, bool], *, lookup_first: bool) -> None:
    """Refuse options that need the probabilities of drafts, where the text drafts."""
    by_text = "--draft-kind lookup" if kind == "lookup" else "--lookup-first"
    for name, is_given in needing.items():
        if is_given and (kind == "lookup" or lookup_first):
            raise ArgumentError(name, f"needs drafts with probabilities, which {by_text} has not")


def _check_kind(kind: str, *, lookup_first: bool) -> None:
    """Refuse an unknown kind of draft, and one for the text to come first of."""
    if kind not in DRAFT_KINDS:
        names = f"{', '.join(DRAFT_KINDS[:-1])} or {DRAFT_KINDS[-1]}"
        raise ArgumentError("--draft-kind", f"must be {names}, got {kind!r}")
    if lookup_first and kind in ("lookup", "none"):
        raise ArgumentError(
            "--lookup-first", f"needs a draft behind the text, which --draft-kind {kind} has not"
        )


def _is_best_first(tree: str, ranks: int | None) -> bool:
    """Return whether trees are built best first."""
    if tree not in ("beam", "best_first"):
        raise ArgumentError("--tree", f"must be beam or best_first, got {tree!r}")
    if ranks is not None and tree == "beam":
        raise ArgumentError("--ranks", "needs --tree best_first")
    return tree == "best_first"


def _default_steps(draft_tokens: int | None) -> int:
    """Return ``--steps``; those of a chain follow from its nodes."""
    if draft_tokens is not None and 1 <= draft_tokens <= 65:
        return draft_tokens - 1
    return _DEFAULT_STEPS


def _default_nodes(topk: int, steps: int) -> int:
    """Return ``--draft-tokens`` for a shape; of an impossible shape any will do."""
    if topk == 1 or steps < 1:
        return max(1, min(steps + 1, 256))
    most = 1 + topk + (steps - 1) * topk**2
    return min(most, max(_NODES_PER_BRANCH * topk, steps + 1), 256)


def check_backend(
    name: str,
    device: torch.device,
    *,
    from_environment: bool,
    deterministic: bool = False,
    kv_dtype: torch.dtype | None = None,
) -> None:
    """Refuse a backend that is unknown, or cannot run on ``device`` as it is asked to."""
    from specattn.backends import available, backend_names, load_backend
    from specattn.config import AttnConfig

    argument = BACKEND_VARIABLE if from_environment else "--backend"
    names = backend_names()
    parts = name.split(",")
    if name != "auto":
        if len(parts) > 3 or any(part not in names for part in parts):
            raise ArgumentError(
                argument,
                f"must be one of {', '.join(('auto', *names))}, or "
                f"prefill,decode[,verify] of them, got {name!r}",
            )
        reasons = available(name, None, device)
        if reasons:
            raise ArgumentError(argument, f"{name} cannot run on {device}: {'; '.join(reasons)}")
    _check_offers(name, device, argument, deterministic=deterministic, kv_dtype=kv_dtype)
    if name != "auto":
        # Triton's interpreter must be switched on before anything imports Triton, and models do
        load_backend(name)(AttnConfig(1, 1, 16), device)


def _check_offers(
    name: str,
    device: torch.device,
    argument: str,
    *,
    deterministic: bool,
    kv_dtype: torch.dtype | None,
) -> None:
    """Refuse what a backend, or none that ``auto`` may take, declares."""
    from specattn.backends import AUTO, load_backend

    candidates = AUTO.get(device.type, AUTO["cpu"]) if name == "auto" else (name,)
    offers = [load_backend(one).capabilities for one in candidates]
    who = f"{argument} {name}" + (f" ({', '.join(candidates)})" if name == "auto" else "")
    if deterministic and not any(one.deterministic for one in offers):
        raise ArgumentError(
            "--deterministic", f"{who} has no such mode on {device}, and --backend triton has one"
        )
    if kv_dtype and not any(kv_dtype in one.kv_dtypes for one in offers):
        raise ArgumentError(
            "--kv-cache-dtype",
            f"must be auto with {who}, which stores keys and values as the model computes them",
        )


def pick_cudagraph(name: str) -> CudagraphMode | None:
    """Return how steps are recorded; None lets the engine choose."""
    known: dict[str, CudagraphMode | None] = {
        "auto": None,
        "full": "full",
        "piecewise": "piecewise",
    }
    if name not in known:
        raise ArgumentError("--cudagraph", f"must be auto, full or piecewise, got {name!r}")
    return known[name]


def from_environment(ctx: typer.Context, name: str) -> bool:
    """Return whether a parameter's value came from its environment variable."""
    return _source(ctx, name) == "ENVIRONMENT"


def is_given(ctx: typer.Context, name: str) -> bool:
    """Return whether a parameter stands on the command line."""
    return _source(ctx, name) == "COMMANDLINE"


def _source(ctx: typer.Context, name: str) -> str:
    source = ctx.get_parameter_source(name)
    return "" if source is None else source.name
