"""``specattn generate``."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer  # noqa: TC002 - Typer evaluates annotations

from specattn.cli import options
from specattn.cli.errors import ArgumentError, naming_options, stderr
from specattn.cli.options import OUTPUT, RUNNING, SAMPLING, option
from specattn.cli.prompts import read_prompts
from specattn.cli.schema import compile_schema, read_schema

if TYPE_CHECKING:
    from specattn.cli.loading import Models
    from specattn.cli.prompts import Prompts
    from specattn.cli.report import Report
    from specattn.cli.running import Setup
    from specattn.config import SpecConfig
    from specattn.engine.request import Request
    from specattn.speculative.sampling import SamplingParams

_MIN_P = "Keep tokens at least that many times as probable as the most probable one; 0 is off."
_REPETITION = "Divide positive logits of tokens in the text, multiply negative ones; 1 is off."
_PRESENCE = "Subtract from the logits of tokens that were generated; 0 is off."
_FREQUENCY = "The same for each time that a token was generated."
_N = "Texts per prompt, which share its KV; needs a temperature."
_SCHEMA = "Write JSON that matches this schema, a file or the JSON itself; needs xgrammar."
_LOGPROBS = "Show each token's log-probability, and those of the k most probable tokens."
_SEED = (
    "Of the first text; each further text of a batch has the next one. The same seed gives "
    "the same tokens up to rounding, which in 16 bits can change with the batch (not with "
    "--adaptive)."
)
_COMPARE = "Also decode plainly, and report the first difference and the speed-up."


def generate(
    ctx: typer.Context,
    prompt: options.PromptArgument = None,
    prompts: options.PromptsOption = None,
    chat: options.ChatOption = False,
    system: options.SystemOption = None,
    target: options.TargetOption = None,
    draft: options.DraftOption = None,
    draft_kind: options.DraftKindOption = "eagle3",
    device: options.DeviceOption = "auto",
    dtype: options.DtypeOption = "auto",
    topk: options.TopkOption = None,
    steps: options.StepsOption = None,
    draft_tokens: options.DraftTokensOption = None,
    tree: options.TreeOption = "beam",
    ranks: options.RanksOption = None,
    draft_sampling: options.DraftSamplingOption = False,
    adaptive: options.AdaptiveOption = False,
    temperature: Annotated[float, option(SAMPLING, "0 is greedy decoding.")] = 0.0,
    top_k: Annotated[int, option(SAMPLING, "Keep the k most probable; 0 is off.")] = 0,
    top_p: Annotated[float, option(SAMPLING, "Keep the most probable mass.")] = 1.0,
    min_p: Annotated[float, option(SAMPLING, _MIN_P)] = 0.0,
    repetition_penalty: Annotated[float, option(SAMPLING, _REPETITION)] = 1.0,
    presence_penalty: Annotated[float, option(SAMPLING, _PRESENCE)] = 0.0,
    frequency_penalty: Annotated[float, option(SAMPLING, _FREQUENCY)] = 0.0,
    n: Annotated[int, option(SAMPLING, _N, "--n", min=1)] = 1,
    seed: Annotated[int, option(SAMPLING, _SEED)] = 0,
    max_new_tokens: Annotated[int, option(RUNNING, "Most tokens per prompt.", min=1)] = 96,
    stop: Annotated[
        list[str] | None, option(RUNNING, "End before this text; may be repeated.")
    ] = None,
    ignore_eos: Annotated[bool, option(RUNNING, "Go on past the end.", "--ignore-eos")] = False,
    json_schema: Annotated[str | None, option(RUNNING, _SCHEMA, metavar="FILE|JSON")] = None,
    backend: options.BackendOption = "auto",
    page_size: options.PageSizeOption = 1,
    kv_cache_dtype: options.KvDtypeOption = "auto",
    deterministic: options.DeterministicOption = False,
    max_context: Annotated[
        int | None, option(RUNNING, "Longest context. Default: what the run needs.", min=1)
    ] = None,
    batch_size: Annotated[int, option(RUNNING, "Prompts decoded at once.", min=1, max=1024)] = 16,
    cudagraph: options.CudagraphOption = "auto",
    no_fused: options.NoFusedOption = False,
    no_graphs: Annotated[bool, option(RUNNING, "Record no CUDA graphs.", "--no-graphs")] = False,
    compare: Annotated[bool, option(OUTPUT, _COMPARE, "--compare")] = False,
    logprobs: Annotated[int | None, option(OUTPUT, _LOGPROBS, metavar="K")] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Continue a prompt: text on standard output, everything else on standard error."""
    found = read_prompts(prompt, prompts, chat=chat, system=system, samples=n)
    config = options.speculation(
        topk,
        steps,
        draft_tokens,
        kind=draft_kind,
        tree=tree,
        ranks=ranks,
        page_size=page_size,
        draft_sampling=draft_sampling,
        adaptive=adaptive,
    )
    sampling = _sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logprobs=logprobs,
    )
    _check_drawn(sampling, {"--draft-sampling": draft_sampling, "--n": n > 1})
    if n > batch_size:
        raise ArgumentError("--n", f"must be at most --batch-size, {batch_size}, got {n}")
    stops, recorded = _stops(stop or []), options.pick_cudagraph(cudagraph)
    schema = None if json_schema is None else read_schema(json_schema, ignore_eos=ignore_eos)

    from specattn.cli.loading import models_for, pick_device, pick_kv_dtype
    from specattn.cli.running import Setup
    from specattn.engine.request import Request
    from specattn.speculative.proposer import draft_len_of

    place, stored = pick_device(device), pick_kv_dtype(kv_cache_dtype)
    models = models_for(
        ctx,
        place,
        target,
        draft,
        dtype,
        backend,
        speculative=config.num_steps > 0,
        kind=draft_kind,
        fused=not no_fused,
    )
    config = config.reserving(draft_len_of(models.draft, config))
    limit = _context_limit(models, config, max_context)
    grammar = None if schema is None else compile_schema(schema, models)
    prompt_ids = found.encode(models.tokenizer, models.target.vocab_size, limit)
    needed = max(map(len, prompt_ids)) + max_new_tokens + config.reserve_len
    setup = Setup(
        models,
        _requests(
            prompt_ids,
            Request((), max_new_tokens, sampling, stops, ignore_eos, grammar=grammar),
            samples=n,
        ),
        max_context_len=max_context or min(limit, needed),
        batch_size=min(batch_size, len(prompt_ids) * n),
        backend=backend,
        graphs=not no_graphs,
        # compiling must not be measured; in Triton's interpreter there is nothing to compile
        warm_up=place.type == "cuda" or (compare and backend != "triton"),
        kv_dtype=stored,
        deterministic=deterministic,
        cudagraph=recorded,
        adaptive=adaptive,
    )
    report = _decode(setup, config, found, compare=compare, live=not as_json)
    if as_json:
        objects = report.objects()
        print(json.dumps(objects if found.batch or n > 1 else objects[0]))
    else:
        report.show(stderr())
    found.check_finite(report.outcome.results)


def _sampling(**fields: Any) -> SamplingParams:
    """Return how tokens are drawn."""
    from specattn.speculative.sampling import SamplingParams

    with naming_options():
        return SamplingParams(**fields)


def _check_drawn(params: SamplingParams, more: dict[str, bool]) -> None:
    """Refuse options that greedy decoding would ignore, and ``more`` that are given."""
    given = {"--top-k": params.top_k != 0, "--top-p": params.top_p != 1, "--min-p": params.min_p}
    for name, is_given in (given | more).items():
        if is_given and not params.temperature:
            raise ArgumentError(
                name, "needs --temperature above 0, got 0, which is greedy decoding"
            )


def _stops(texts: list[str]) -> tuple[str, ...]:
    if "" in texts:
        raise ArgumentError("--stop", "must not be empty")
    return tuple(texts)


def _context_limit(models: Models, config: SpecConfig, asked: int | None) -> int:
    """Return the longest context, within what the models can do."""
    most = models.target.max_context_len
    if asked is not None and asked > most:
        raise ArgumentError("--max-context", f"must be at most {most}, the target's, got {asked}")
    # text alone has no vocabulary of its own
    if models.draft is not None and 0 < models.draft.vocab_size < config.topk:
        raise ArgumentError(
            "--topk",
            f"must be at most {models.draft.vocab_size}, the draft's vocabulary, got {config.topk}",
        )
    return asked or most


def _requests(prompts: list[list[int]], request: Request, *, samples: int) -> tuple[Request, ...]:
    """Return the requests of every prompt; seeds count up, within 64 bits."""

    def seeded(index: int) -> SamplingParams:
        seed = (request.sampling.seed + index + 2**63) % 2**64 - 2**63
        return replace(request.sampling, seed=seed)

    first = [
        replace(request, prompt=ids, sampling=seeded(at * samples))
        for at, ids in enumerate(prompts)
    ]
    with naming_options():
        return tuple(sample for one in first for sample in one.samples(samples))


def _decode(
    setup: Setup, config: SpecConfig, prompts: Prompts, *, compare: bool, live: bool
) -> Report:
    """Run the requests, and once more without speculation if asked to."""
    from specattn.cli.compare import compare_plain
    from specattn.cli.loading import spelling
    from specattn.cli.output import TextOutput, progress, writes_to_file
    from specattn.cli.report import Report
    from specattn.cli.running import run

    with stderr().status("preparing buffers and graphs"):
        engine = setup.engine(config)
        setup.prepare(engine)
    output = TextOutput(setup.models, setup.requests, prompts, live=live)
    with progress("decoding", setup.requests, hidden=live and not writes_to_file()) as advance:
        outcome = run(engine, setup.requests, output.take, advance)
    output.finish()
    report = Report(prompts, outcome, output.texts)
    if setup.requests[0].sampling.logprobs is not None:
        report = replace(report, spell=lambda token: spelling(setup.models.tokenizer, token))
    if not compare:
        return report
    with progress("plain decoding", setup.requests) as advance:
        return replace(report, comparison=compare_plain(outcome, setup, config, advance))
