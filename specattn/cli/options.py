"""Options that commands share, and the speculative config that they make."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from functools import cached_property
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_type_hints

import typer

from specattn.cli import loading
from specattn.cli.errors import ArgumentError, naming_options, refuse
from specattn.config import AttnConfig, SpecConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from _typeshed import DataclassInstance

    Record = TypeVar("Record", bound=DataclassInstance)

MODELS, SPECULATION, SAMPLING = "Models", "Speculation", "Sampling"
TEXT, RUNNING, OUTPUT = "Text", "Running", "Output"
# in the order of the help; options of none of them come first
_PANELS = (None, MODELS, SPECULATION, SAMPLING, TEXT, RUNNING, OUTPUT)
BACKEND_VARIABLE = "SPECATTN_BACKEND"


def option(panel: str, text: str, *names: str, **more: Any) -> Any:
    """Describe an option in a panel of the help, as `typer.Option` does."""
    return typer.Option(*names, rich_help_panel=panel, help=text, **more)


PromptArgument = Annotated[
    str | None,
    typer.Argument(metavar="PROMPT", help="Text to continue; - or nothing reads standard input."),
]
_TARGET = (
    "Target: a folder, a file FILE.gguf, or the name of a model on the Hugging Face Hub. "
    "Default: the pair that comes with specattn."
)
_DRAFT = (
    "What drafts for the target: an EAGLE, EAGLE-2, EAGLE-3 or DFlash checkpoint, "
    "smollm2-135m, a head that comes with specattn, or mtp, the target's own MTP layer, which is "
    "the default where it has one; with --draft-kind model a whole model, given as a target is."
)
_KIND = (
    "What drafts: eagle3 (EAGLE heads and MTP layers), dflash, model (a whole model with the "
    "target's tokenizer), lookup (the text itself) or none."
)
#: What may draft.
DRAFT_KINDS = ("eagle3", "dflash", "model", "lookup", "none")
_LOOKUP_FIRST = (
    "Where the text repeats itself, draft from it as lookup does, and else by the draft."
)
_QUANTIZATION = (
    "Quantise the target's plain weights: fp8 (in blocks), fp8-channel or fp8-weights (nothing "
    "but weights). It is another model then. With FP8 weights, fp8-weights quantises nothing else."
)
_DRAFT_QUANTIZATION = "The same for the draft, on which the texts do not depend."
_DTYPE = f"{loading.DTYPES}. auto is bfloat16 on CUDA, float32 elsewhere."

#: Beside the tree's ``--topk`` there is a sampler's ``--top-k``.
NOT_TOP_K = "Not --top-k, which is about drawing tokens."
_TOPK = f"Branches kept at every depth. Default: 1, a chain. {NOT_TOP_K}"
_STEPS = "Depth of the draft tree; 0 is plain decoding. Default: 5."
_NODES = "Nodes verified at once, the root included. Default: steps + 1, or 4 per branch."
_TREE = "beam (chains and trees of --topk), or best_first (--draft-tokens most probable nodes)."
_RANKS = "Tokens of every depth that a best_first tree chooses from. Default: 8."
_DRAWN = "Draw the drafts and verify by rejection sampling; chains at a temperature only."
DraftTokensOption = Annotated[int | None, option(SPECULATION, _NODES)]

_BACKEND = "Attention backend, auto, or prefill,decode[,verify]; see `specattn backends`."
_KV_DTYPE = "Store keys and values as fp8_e4m3; auto is the model's dtype."
_BITS = "Attention whose bits depend on the text alone; slower. The triton backend has it."
_CUDAGRAPH = (
    "Record a step as one graph (full) or as three (piecewise); auto is full, or piecewise if a "
    "backend plans on the host."
)
_PAGE_SIZE = "KV slots per page, a power of two up to 512."
_NO_FUSED = "Run transformers' own modules of whole models also where there are fused ones."

_DEFAULT_STEPS = 5
_NODES_PER_BRANCH = 4
_BEST_FIRST_NODES = 16


@dataclass(frozen=True, kw_only=True)
class ModelCommand(ABC):
    """A command that loads models; its fields are its options."""

    ctx: typer.Context
    target: Annotated[str | None, option(MODELS, _TARGET, metavar="MODEL")] = None
    draft: Annotated[str | None, option(MODELS, _DRAFT, metavar="MODEL")] = None
    draft_kind: Annotated[str, option(MODELS, _KIND, metavar="KIND")] = "eagle3"
    device: Annotated[str, option(MODELS, "auto, cpu, cuda or cuda:N.")] = "auto"
    dtype: Annotated[str, option(MODELS, _DTYPE)] = "auto"
    backend: Annotated[str, option(RUNNING, _BACKEND, envvar=BACKEND_VARIABLE)] = "auto"
    page_size: Annotated[int, option(RUNNING, _PAGE_SIZE)] = 1

    @abstractmethod
    def run(self) -> None:
        """Run the command."""

    @cached_property
    def place(self) -> torch.device:
        """The device."""
        return loading.pick_device(self.device)

    def make(self, kind: type[Record], **others: Any) -> Record:
        """Return a record of the library, with the options that are its fields."""
        asked = {name: value for name, value in vars(self).items() if value is not None}
        values = {one.name: asked[one.name] for one in fields(kind) if one.name in asked} | others
        with naming_options():
            return kind(**values)

    def shape(self, topk: int, steps: int, nodes: int | None, **more: Any) -> SpecConfig:
        """Return a speculative config; its nodes follow from width and depth if need be."""
        return self.make(
            SpecConfig,
            num_steps=steps,
            topk=topk,
            num_draft_tokens=_default_nodes(topk, steps) if nodes is None else nodes,
            # room for one step of any config; the real length follows from the prompts
            max_context_len=2**20,
            **more,
        )

    def load(
        self, *, deterministic: bool = False, kv_dtype: torch.dtype | None = None, **how: Any
    ) -> loading.Models:
        """Check dtype and backend; load the models, ``how`` as `loading.load_models` has it."""
        weights = loading.pick_dtype(self.dtype, self.place)
        from_environment = source(self.ctx, "backend") == "ENVIRONMENT"
        check_backend(
            self.backend,
            self.place,
            argument=BACKEND_VARIABLE if from_environment else "--backend",
            deterministic=deterministic,
            kv_dtype=kv_dtype,
        )
        how = {"dtype": weights, "device": self.place, "kind": self.draft_kind, **how}
        return loading.load_models(self.target, self.draft, **how)


@dataclass(frozen=True, kw_only=True)
class EngineCommand(ModelCommand):
    """A command that makes an engine."""

    lookup_first: Annotated[bool, option(MODELS, _LOOKUP_FIRST, "--lookup-first")] = False
    quantization: Annotated[str | None, option(MODELS, _QUANTIZATION, metavar="HOW")] = None
    draft_quantization: Annotated[
        str | None, option(MODELS, _DRAFT_QUANTIZATION, metavar="HOW")
    ] = None
    topk: Annotated[int | None, option(SPECULATION, _TOPK)] = None
    steps: Annotated[int | None, option(SPECULATION, _STEPS)] = None
    draft_tokens: DraftTokensOption = None
    tree: Annotated[str, option(SPECULATION, _TREE)] = "beam"
    ranks: Annotated[int | None, option(SPECULATION, _RANKS)] = None
    draft_sampling: Annotated[bool, option(SPECULATION, _DRAWN, "--draft-sampling")] = False
    kv_cache_dtype: Annotated[str, option(RUNNING, _KV_DTYPE)] = "auto"
    deterministic: Annotated[bool, option(RUNNING, _BITS, "--deterministic")] = False
    cudagraph: Annotated[str, option(RUNNING, _CUDAGRAPH)] = "auto"
    no_fused: Annotated[bool, option(RUNNING, _NO_FUSED, "--no-fused")] = False
    as_json: Annotated[bool, option(OUTPUT, "Print JSON and nothing else.", "--json")] = False

    @cached_property
    def engine_options(self) -> dict[str, Any]:
        """Keyword arguments of an `Engine`, beside those for sizes."""
        modes = {"auto": None, "full": "full", "piecewise": "piecewise"}
        return {
            "backend": self.backend,
            "kv_dtype": loading.pick_kv_dtype(self.kv_cache_dtype),
            "deterministic": self.deterministic,
            "cudagraph": loading.pick(
                "--cudagraph", self.cudagraph, modes, "auto, full or piecewise"
            ),
        }

    def load_for(self, config: SpecConfig) -> loading.Models:
        """Load the models that a speculative config needs."""
        return self.load(
            deterministic=self.deterministic,
            kv_dtype=self.engine_options["kv_dtype"],
            speculative=config.num_steps > 0,
            lookup_first=self.lookup_first,
            fused=not self.no_fused,
            quantization=loading.pick_quantization("--quantization", self.quantization),
            draft_quantization=self._draft_quantization(),
        )

    def _draft_quantization(self) -> str | None:
        how = loading.pick_quantization("--draft-quantization", self.draft_quantization)
        without = how is not None and self.draft_kind in ("lookup", "none")
        reason = f"needs a model that drafts, which --draft-kind {self.draft_kind} has not"
        refuse((without, "--draft-quantization", reason))
        return how

    def config(self, *, adaptive: bool = False) -> SpecConfig:
        """Return the speculative config of options; missing ones follow from the others."""
        self._check_kind()
        kind, topk, steps, nodes = self.draft_kind, self.topk, self.steps, self.draft_tokens
        best_first = self.tree == "best_first"
        if steps is None:
            chain = not best_first and topk in (None, 1)
            steps = 0 if kind == "none" else _default_steps(nodes if chain else None)
        if best_first and nodes is None:
            nodes = _BEST_FIRST_NODES
        drawn = self.draft_sampling and steps > 0
        config = self.shape(1 if topk is None else topk, steps, nodes, draft_sampling=drawn)
        if not steps:
            needs = "needs --steps of at least 1, got plain decoding, which has no"
            refuse(
                (self.draft_sampling, "--draft-sampling", f"{needs} drafts"),
                (self.lookup_first, "--lookup-first", f"{needs} drafts"),
                (kind not in ("eagle3", "none"), f"--draft-kind {kind}", f"{needs} drafts"),
                (adaptive, "--adaptive", f"{needs} smaller tree to choose from"),
            )
        return config

    def _check_kind(self) -> None:
        """Refuse unknown kinds of trees and drafts, and what they have no use for."""
        kind, tree, first = self.draft_kind, self.tree, self.lookup_first
        kinds = f"{', '.join(DRAFT_KINDS[:-1])} or {DRAFT_KINDS[-1]}"
        by_text = "--draft-kind lookup" if kind == "lookup" else "--lookup-first"
        unknown = f"needs drafts with probabilities, which {by_text} has not"
        alone = f"needs a draft behind the text, which --draft-kind {kind} has not"
        refuse(
            (
                tree not in ("beam", "best_first"),
                "--tree",
                f"must be beam or best_first, got {tree!r}",
            ),
            (self.ranks is not None and tree == "beam", "--ranks", "needs --tree best_first"),
            (kind not in DRAFT_KINDS, "--draft-kind", f"must be {kinds}, got {kind!r}"),
            (first and kind in ("lookup", "none"), "--lookup-first", alone),
            (self.draft_sampling and (first or kind == "lookup"), "--draft-sampling", unknown),
            (tree == "best_first" and kind == "lookup", "--tree best_first", unknown),
            (
                kind == "none" and bool(self.steps),
                "--steps",
                f"must be 0 with --draft-kind none, got {self.steps}",
            ),
        )


def command(kind: type[ModelCommand]) -> Callable[..., None]:
    """Return the function of a command, whose parameters are the fields of its class."""
    hints = get_type_hints(kind, include_extras=True)

    def run(**given: Any) -> None:
        kind(**given).run()

    shape = signature(kind)
    parameters = [one.replace(annotation=hints[name]) for name, one in shape.parameters.items()]
    run.__doc__ = kind.__doc__
    run.__signature__ = shape.replace(parameters=sorted(parameters, key=_panel))  # type: ignore[attr-defined]  # for Typer
    return run


def _panel(parameter: Parameter) -> int:
    """Return the place of a parameter's panel; the context is in none."""
    described = get_args(parameter.annotation)[1:]
    return _PANELS.index(described[0].rich_help_panel if described else None)


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
    argument: str = "--backend",
    deterministic: bool = False,
    kv_dtype: torch.dtype | None = None,
) -> None:
    """Refuse a backend that is unknown, or cannot run on ``device`` as it is asked to."""
    from specattn.backends import AUTO, available, backend_names, load_backend

    names, parts, candidates = backend_names(), name.split(","), [name]
    if name == "auto":
        candidates = list(AUTO.get(device.type, AUTO["cpu"]))
    elif len(parts) > 3 or any(part not in names for part in parts):
        raise ArgumentError(
            argument,
            f"must be one of {', '.join(('auto', *names))}, or "
            f"prefill,decode[,verify] of them, got {name!r}",
        )
    elif reasons := available(name, None, device):
        raise ArgumentError(argument, f"{name} cannot run on {device}: {'; '.join(reasons)}")
    offers = [load_backend(one).capabilities for one in candidates]
    bits = any(one.deterministic for one in offers)
    stores = any(kv_dtype in one.kv_dtypes for one in offers)
    who = f"{argument} {name}" + (f" ({', '.join(candidates)})" if name == "auto" else "")
    no_mode = f"{who} has no such mode on {device}, and --backend triton has one"
    no_dtype = f"must be auto with {who}, which stores keys and values as the model computes them"
    refuse(
        (deterministic and not bits, "--deterministic", no_mode),
        (kv_dtype is not None and not stores, "--kv-cache-dtype", no_dtype),
    )
    if name != "auto":
        # Triton's interpreter must be switched on before anything imports Triton, and models do
        load_backend(name)(AttnConfig(1, 1, 16), device)


def source(ctx: typer.Context, name: str) -> str:
    """Return where a parameter's value comes from: COMMANDLINE, ENVIRONMENT or another place."""
    found = ctx.get_parameter_source(name)
    return "" if found is None else found.name
