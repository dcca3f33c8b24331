"""``specattn generate``."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer  # noqa: TC002 - Typer evaluates annotations

from specattn.cli import options
from specattn.cli.errors import ArgumentError, stderr
from specattn.cli.grammar import read_pattern
from specattn.cli.options import OUTPUT, RUNNING, SAMPLING, option
from specattn.cli.prompts import read_prompts
from specattn.cli.requests import (
    BAD_WORDS,
    check_drawn,
    forbid,
    not_empty,
    request_of,
    requests_for,
    sampling_params,
)

if TYPE_CHECKING:
    from specattn.cli.loading import Models
    from specattn.cli.prompts import Prompts
    from specattn.cli.report import Report
    from specattn.cli.running import Setup
    from specattn.config import SpecConfig

_TOP_K = "Keep the k most probable tokens; 0 is off. Not --topk, the branches of a tree."
_MIN_P = "Keep tokens at least that many times as probable as the most probable one; 0 is off."
_REPETITION = "Divide positive logits of tokens in the text, multiply negative ones; 1 is off."
_PRESENCE = "Subtract from the logits of tokens that were generated; 0 is off."
_FREQUENCY = "The same for each time that a token was generated."
_BIAS = "Add VALUE to the logits of the token with this id; may be repeated."
_BAD = "Never generate the tokens of this text, alone or after a space; may be repeated."
_N = "Texts per prompt, which share its KV; needs a temperature."
_SCHEMA = "Write JSON that matches this schema, a file or the JSON itself; needs xgrammar."
_REGEX = "Write a text that matches this regular expression as a whole; needs xgrammar."
_MIN_NEW = "Before so many tokens, neither an end nor a stop ends a text; 0 is off."
_STOP_TOKEN = "End with the token of this id; may be repeated."
_LOGPROBS = "Show each token's log-probability, and those of the k most probable tokens."
_SEED = (
    "Of the first text, 0 by default; each further text of a batch has the next one. The same "
    "seed gives "
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
    lookup_first: options.LookupFirstOption = False,
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
    top_k: Annotated[int, option(SAMPLING, _TOP_K)] = 0,
    top_p: Annotated[float, option(SAMPLING, "Keep the most probable mass.")] = 1.0,
    min_p: Annotated[float, option(SAMPLING, _MIN_P)] = 0.0,
    repetition_penalty: Annotated[float, option(SAMPLING, _REPETITION)] = 1.0,
    presence_penalty: Annotated[float, option(SAMPLING, _PRESENCE)] = 0.0,
    frequency_penalty: Annotated[float, option(SAMPLING, _FREQUENCY)] = 0.0,
    logit_bias: Annotated[list[str] | None, option(SAMPLING, _BIAS, metavar="TOKEN=VALUE")] = None,
    bad_words: Annotated[list[str] | None, option(SAMPLING, _BAD, metavar="TEXT")] = None,
    n: Annotated[int, option(SAMPLING, _N, "--n", min=1)] = 1,
    seed: Annotated[int, option(SAMPLING, _SEED)] = 0,
    max_new_tokens: Annotated[int, option(RUNNING, "Most tokens per prompt.", min=1)] = 96,
    min_new_tokens: Annotated[int, option(RUNNING, _MIN_NEW, min=0)] = 0,
    stop: Annotated[
        list[str] | None, option(RUNNING, "End before this text; may be repeated.")
    ] = None,
    stop_token_id: Annotated[
        list[int] | None, option(RUNNING, _STOP_TOKEN, metavar="TOKEN")
    ] = None,
    ignore_eos: Annotated[bool, option(RUNNING, "Go on past the end.", "--ignore-eos")] = False,
    json_schema: Annotated[str | None, option(RUNNING, _SCHEMA, metavar="FILE|JSON")] = None,
    regex: Annotated[str | None, option(RUNNING, _REGEX, metavar="PATTERN")] = None,
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
        lookup_first=lookup_first,
        tree=tree,
        ranks=ranks,
        page_size=page_size,
        draft_sampling=draft_sampling,
        adaptive=adaptive,
    )
    sampling = sampling_params(
        logit_bias or [],
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
    drawn = {"--draft-sampling": draft_sampling, "--n": n > 1}
    check_drawn(sampling, drawn | {"--seed": options.is_given(ctx, "seed")})
    if n > batch_size:
        raise ArgumentError("--n", f"must be at most --batch-size, {batch_size}, got {n}")
    request = request_of(
        sampling,
        max_new_tokens=max_new_tokens,
        stop=not_empty("--stop", stop),
        ignore_eos=ignore_eos,
        stop_token_ids=stop_token_id or (),
        min_new_tokens=min_new_tokens,
    )
    words, recorded = not_empty(BAD_WORDS, bad_words), options.pick_cudagraph(cudagraph)
    pattern = read_pattern(json_schema, regex, ignore_eos=ignore_eos)

    from specattn.cli.loading import models_for, pick_device, pick_kv_dtype
    from specattn.cli.running import Setup
    from specattn.speculative.drafts import draft_of

    place, stored = pick_device(device), pick_kv_dtype(kv_cache_dtype)
    models = models_for(
        ctx,
        place,
        target,
        draft,
        dtype,
        backend,
        deterministic=deterministic,
        kv_dtype=stored,
        speculative=config.num_steps > 0,
        kind=draft_kind,
        lookup_first=lookup_first,
        fused=not no_fused,
    )
    config = config.reserving(draft_of(models.draft).draft_len(config))
    limit = _context_limit(models, config, max_context)
    request = forbid(request, words, models)
    if pattern is not None:
        request = replace(request, grammar=pattern.compile(models))
    prompt_ids = found.encode(models.tokenizer, models.target.vocab_size, limit)
    needed = max(map(len, prompt_ids)) + max_new_tokens + config.reserve_len
    setup = Setup(
        models,
        requests_for(prompt_ids, request, samples=n),
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


def _context_limit(models: Models, config: SpecConfig, asked: int | None) -> int:
    """Return the longest context, within what the models can do."""
    most = models.target.max_context_len
    if asked is not None and asked > most:
        raise ArgumentError("--max-context", f"must be at most {most}, the target's, got {asked}")
    # text alone has no vocabulary of its own
    if 0 < models.draft_vocab_size < config.topk:
        raise ArgumentError(
            "--topk",
            f"must be at most {models.draft_vocab_size}, the draft's vocabulary, got {config.topk}",
        )
    return asked or most


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
