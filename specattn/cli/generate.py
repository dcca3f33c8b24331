"""``specattn generate``."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path  # noqa: TC003 - Typer evaluates annotations
from typing import TYPE_CHECKING, Annotated

import typer

from specattn.cli.errors import refuse, stderr
from specattn.cli.grammar import read_pattern
from specattn.cli.loading import spelling
from specattn.cli.options import (
    OUTPUT,
    RUNNING,
    SAMPLING,
    SPECULATION,
    TEXT,
    EngineCommand,
    PromptArgument,
    option,
    source,
)
from specattn.cli.prompts import read_prompts
from specattn.cli.requests import biases, forbid, requests_for
from specattn.engine.request import Request
from specattn.speculative.sampling.params import SamplingParams

if TYPE_CHECKING:
    from specattn.cli.prompts import Prompts
    from specattn.cli.report import Report
    from specattn.cli.running import Setup
    from specattn.config import SpecConfig

_PROMPTS = (
    "A batch of prompts: one per line, a JSON list, or JSON lines (.jsonl) of strings or "
    'objects with a "prompt"; - for stdin.'
)
_CHAT = "Take each prompt as a message of the target's chat template."
_SYSTEM = "With --chat: the system message."
_ADAPTIVE = "Let every step take the given shape or a smaller one, by what drafts gain and cost."
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
    "Of the first text, 0 by default; each further text of a batch has the next one. The same seed "
    "gives the same tokens up to rounding, which in 16 bits can change with the batch (not with "
    "--adaptive)."
)
_COMPARE = "Also decode plainly, and report the first difference and the speed-up."
_STOP = "End before this text; may be repeated."
_CONTEXT = "Longest context. Default: what the run needs."


@dataclass(frozen=True, kw_only=True)
class Generate(EngineCommand):
    """Continue a prompt: text on standard output, everything else on standard error."""

    prompt: PromptArgument = None
    prompts: Annotated[Path | None, typer.Option(metavar="FILE", help=_PROMPTS)] = None
    chat: Annotated[bool, typer.Option("--chat", help=_CHAT)] = False
    system: Annotated[str | None, typer.Option(metavar="TEXT", help=_SYSTEM)] = None
    adaptive: Annotated[bool, option(SPECULATION, _ADAPTIVE, "--adaptive")] = False
    temperature: Annotated[float, option(SAMPLING, "0 is greedy decoding.")] = 0.0
    top_k: Annotated[int, option(SAMPLING, _TOP_K)] = 0
    top_p: Annotated[float, option(SAMPLING, "Keep the most probable mass.")] = 1.0
    min_p: Annotated[float, option(SAMPLING, _MIN_P)] = 0.0
    repetition_penalty: Annotated[float, option(SAMPLING, _REPETITION)] = 1.0
    presence_penalty: Annotated[float, option(SAMPLING, _PRESENCE)] = 0.0
    frequency_penalty: Annotated[float, option(SAMPLING, _FREQUENCY)] = 0.0
    logit_bias: Annotated[list[str] | None, option(SAMPLING, _BIAS, metavar="TOKEN=VALUE")] = None
    bad_words: Annotated[list[str] | None, option(SAMPLING, _BAD, metavar="TEXT")] = None
    n: Annotated[int, option(SAMPLING, _N, "--n", min=1)] = 1
    seed: Annotated[int, option(SAMPLING, _SEED)] = 0
    max_new_tokens: Annotated[int, option(TEXT, "Most tokens per prompt.", min=1)] = 96
    min_new_tokens: Annotated[int, option(TEXT, _MIN_NEW, min=0)] = 0
    stop: Annotated[list[str] | None, option(TEXT, _STOP)] = None
    stop_token_id: Annotated[list[int] | None, option(TEXT, _STOP_TOKEN, metavar="TOKEN")] = None
    ignore_eos: Annotated[bool, option(TEXT, "Go on past the end.", "--ignore-eos")] = False
    json_schema: Annotated[str | None, option(TEXT, _SCHEMA, metavar="FILE|JSON")] = None
    regex: Annotated[str | None, option(TEXT, _REGEX, metavar="PATTERN")] = None
    max_context: Annotated[int | None, option(RUNNING, _CONTEXT, min=1)] = None
    batch_size: Annotated[int, option(RUNNING, "Prompts decoded at once.", min=1, max=1024)] = 16
    no_graphs: Annotated[bool, option(RUNNING, "Record no CUDA graphs.", "--no-graphs")] = False
    compare: Annotated[bool, option(OUTPUT, _COMPARE, "--compare")] = False
    logprobs: Annotated[int | None, option(OUTPUT, _LOGPROBS, metavar="K")] = None

    def run(self) -> None:
        """Read the prompts, decode them, and report."""
        from specattn.cli.running import Setup
        from specattn.speculative.proposers.drafts import draft_of

        found = read_prompts(
            self.prompt, self.prompts, chat=self.chat, system=self.system, samples=self.n
        )
        config, request = self.config(adaptive=self.adaptive), self._request()
        pattern = read_pattern(self.json_schema, self.regex, ignore_eos=self.ignore_eos)
        options, models = self.engine_options, self.load_for(config)
        config = config.reserving(draft_of(models.draft).draft_len(config))
        most, asked = models.target.max_context_len, self.max_context or 0
        beyond = f"must be at most {most}, the target's, got {asked}"
        refuse((asked > most, "--max-context", beyond))
        limit = asked or most
        request = forbid(request, self.bad_words or (), models)
        if pattern is not None:
            request = replace(request, grammar=pattern.compile(models))
        prompt_ids = found.encode(models.tokenizer, models.target.vocab_size, limit)
        needed = max(map(len, prompt_ids)) + self.max_new_tokens + config.reserve_len
        setup = Setup(
            models,
            requests_for(prompt_ids, request, samples=self.n),
            max_context_len=asked or min(limit, needed),
            batch_size=min(self.batch_size, len(prompt_ids) * self.n),
            options=options | {"graphs": not self.no_graphs},
            # compiling must not be measured; in Triton's interpreter there is nothing to compile
            warm_up=self.place.type == "cuda" or (self.compare and self.backend != "triton"),
            adaptive=self.adaptive,
        )
        report = self._decode(setup, config, found)
        if self.as_json:
            objects = report.objects()
            print(json.dumps(objects if found.batch or self.n > 1 else objects[0]))
        else:
            report.show(stderr())
        found.check_finite(report.outcome.results)

    def _request(self) -> Request:
        """Return a request without a prompt, as the options describe it."""
        sampling = self.make(SamplingParams, logit_bias=biases(self.logit_bias), bad_words=())
        if not sampling.drawn:
            drawn = {
                "--top-k": sampling.top_k != 0,
                "--top-p": sampling.top_p != 1,
                "--min-p": sampling.min_p != 0,
                "--draft-sampling": self.draft_sampling,
                "--n": self.n > 1,
                "--seed": source(self.ctx, "seed") == "COMMANDLINE",
            }
            greedy = "needs --temperature above 0, got 0, which is greedy decoding"
            refuse(*((given, name, greedy) for name, given in drawn.items()))
        most = f"must be at most --batch-size, {self.batch_size}, got {self.n}"
        refuse(
            (self.n > self.batch_size, "--n", most),
            ("" in (self.stop or ()), "--stop", "must not be empty"),
            ("" in (self.bad_words or ()), "--bad-words", "must not be empty"),
        )
        ends = self.stop_token_id or ()
        return self.make(Request, prompt=(), sampling=sampling, stop_token_ids=ends)

    def _decode(self, setup: Setup, config: SpecConfig, prompts: Prompts) -> Report:
        """Run the requests, and once more without speculation if asked to."""
        from specattn.cli.compare import compare_plain
        from specattn.cli.output import TextOutput, progress, writes_to_file
        from specattn.cli.report import Report
        from specattn.cli.running import run

        live = not self.as_json
        with stderr().status("preparing buffers and graphs"):
            engine = setup.engine(config)
            setup.prepare(engine)
        output = TextOutput(setup.models, setup.requests, prompts, live=live)
        with progress("decoding", setup.requests, hidden=live and not writes_to_file()) as advance:
            outcome = run(engine, setup.requests, output.take, advance)
        output.finish()
        report = Report(prompts, outcome, output.texts)
        if self.logprobs is not None:
            report = replace(report, spell=partial(spelling, setup.models.tokenizer))
        if not self.compare:
            return report
        with progress("plain decoding", setup.requests) as advance:
            return replace(report, comparison=compare_plain(outcome, setup, config, advance))
