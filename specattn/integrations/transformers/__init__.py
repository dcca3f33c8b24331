"""Speculative decoding inside transformers: ``custom_generate=specattn.generate``.

transformers prepares a call (its settings, processors, stopping criteria and inputs), an `Engine`
decodes it, and this module translates between the two. What it would not do as transformers does,
it refuses by name.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationMixin, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput, StopStringCriteria

from specattn.checks import kind_of
from specattn.engine.request import Request
from specattn.errors import ModelError, SpecAttnError, UnsupportedError
from specattn.integrations.transformers.drafting import Drafting
from specattn.integrations.transformers.fusing import unpack
from specattn.integrations.transformers.processors import grammars_of, own_processors
from specattn.integrations.transformers.serving import SERVED, borrowed
from specattn.integrations.transformers.settings import Ends, min_new_tokens_of, refuse, sampling_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from specattn.config import SpecConfig
    from specattn.engine.engine import Engine
    from specattn.engine.request import RequestOutput
    from specattn.speculative.sampling.params import SamplingParams

__all__ = ["generate", "release"]

# The code and the local names of transformers' `generate` that `_call_of` reads.
_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__
_LOCALS = {"generation_config", "streamer", "assistant_model", "synced_gpus", "kwargs"}
if missing := _LOCALS - {*_GENERATE.co_varnames, *_GENERATE.co_cellvars}:
    raise ImportError(f"this version of transformers has no {sorted(missing)} in its generate")


def generate(  # noqa: PLR0913 - as its docstring says
    model: Any,
    input_ids: Tensor | None = None,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    generation_config: Any = None,
    *,
    streamer: Any = None,
    draft: Any = None,
    draft_quantization: str | None = None,
    spec_config: SpecConfig | None = None,
    backend: str = "auto",
    fused: bool = True,
    **kwargs: Any,
) -> Any:
    """Generate as ``model.generate`` does, with speculative decoding.

    It is called by itself, ``specattn.generate(model, **inputs, draft=...)``, with the arguments of
    ``model.generate``; or by transformers,
    ``model.generate(**inputs, custom_generate=specattn.generate, draft=...)``. The tokens are those
    of transformers, or have their distribution. The model keeps its weights, and gets its attention
    back when the call ends in any way. KV pools and CUDA graphs are kept for the next call, see
    `release`.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model that `HFTarget` serves.
    input_ids : Tensor, optional
        ``[B, L]`` int64. Padding is where ``attention_mask`` is 0, on any side; every row goes on
        after its last token.
    logits_processor, stopping_criteria, generation_config, streamer : optional
        As in transformers. Of the processors, temperature, top-k, top-p, min-p,
        the repetition penalty, bad words, ``min_length``, ``min_new_tokens``, n-grams that do not
        repeat, suppressed tokens, biases of sequences and allowed prefixes are served; and those
        of this library, instances of
        `specattn.speculative.sampling.logits_processor.LogitsProcessor`.
    draft : str, Path, loaded head or ProposerFactory, optional
        An EAGLE head: its folder or Hub id, ``"shipped"`` for that of the shipped pair, or one that
        `load_draft` has loaded; a whole model (`LMDraft`), or what else proposes tokens. Without
        one, ``assistant_model`` or ``prompt_lookup_num_tokens``, decoding is plain.
    draft_quantization : str, optional
        How to quantise the weights of a head that is given by its folder or name: ``"fp8"``,
        ``"fp8-channel"`` or ``"fp8-weights"``. A model is quantised by `quantise_model`, before.
    spec_config : SpecConfig, optional
        The tree; a chain of 5 by default, or as long as the settings of assisted generation say.
        The call itself decides ``max_context_len`` and ``max_num_reqs``.
    backend : str
        Attention backend; see `choose_backend`.
    fused : bool
        Whether steps may run the model's fused form, where there is one (docs/transformers.md): the
        first call packs its layers' weights, which become views of that.
    **kwargs
        More arguments of ``model.generate``, ``assistant_model`` among them: a whole model that
        drafts, with the tokenizer of ``model``.

    Returns
    -------
    Tensor or GenerateDecoderOnlyOutput
        ``[B, L + new]`` int64, the prompts and what was generated, padded as transformers pads; or
        that as ``sequences``, with ``return_dict_in_generate``.

    Raises
    ------
    UnsupportedError
        Naming every setting, processor and argument that is not served.
    ModelError
        If the model's attention is not served, or the draft is missing or does not fit.
    SpecAttnError
        If the target's logits are not finite where a token is to be chosen, or processors leave
        none.
    ValueError
        If another call for the same model has not returned; if ``model`` is no model, such as a
        path, or ``spec_config`` no `SpecConfig`.
    """
    if isinstance(model, type) or not callable(getattr(model, "generate", None)):
        raise ValueError(f"model must be a model of transformers, got {kind_of(model)}")
    own: dict[str, Any] = {
        "logits_processor": logits_processor,
        "stopping_criteria": stopping_criteria,
        "generation_config": generation_config,
        "streamer": streamer,
        "draft": draft,
        "draft_quantization": draft_quantization,
        "spec_config": spec_config,
        "backend": backend,
        "fused": fused,
    }
    if _call_of(generation_config) is not None:
        return _decode(model, input_ids, **own, **kwargs)
    # transformers loses the tokenizers on their way to a function
    if kwargs.get("assistant_tokenizer") is not None:
        why = "the argument assistant_tokenizer is not served: an assistant needs the model's own"
        raise UnsupportedError("generate", [why])
    tokenizer, stop_strings = kwargs.get("tokenizer"), kwargs.get("stop_strings")
    if tokenizer is not None and stop_strings is not None:
        del kwargs["tokenizer"], kwargs["stop_strings"]
        stop = StopStringCriteria(tokenizer, stop_strings)
        own["stopping_criteria"] = StoppingCriteriaList([*(stopping_criteria or ()), stop])
    return model.generate(input_ids, custom_generate=_decode, **own, **kwargs)


def release(model: Any) -> None:
    """Free what is kept for a model, and unpack its weights.

    A model keeps pools, graphs and drafts of the last two settings (draft, tree, backend,
    processors) until it is released, is collected, or has other weights. Weights that share memory
    since they were packed get memory of their own again, one by one.
    """
    SERVED.pop(model, None)
    unpack(model)


def _decode(  # noqa: PLR0913 - as its docstring says
    model: Any,
    input_ids: Any,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    *,
    streamer: Any = None,
    draft: Any = None,
    draft_quantization: str | None = None,
    spec_config: SpecConfig | None = None,
    backend: str = "auto",
    fused: bool = True,
    **model_kwargs: Any,
) -> Any:
    """Run the decoding loop of a call that transformers has prepared."""
    call = _call_of(generation_config)
    if call is None:
        raise UnsupportedError("generate", [f"{type(model).__name__} has a generate of its own"])
    refuse(generation_config, logits_processor, call, model_kwargs)
    drafting = Drafting.of(
        draft, call["assistant_model"], spec_config, generation_config, draft_quantization
    )
    models = [one for one in (model, drafting.assistant) if one is not None]
    if any(len(set((getattr(one, "hf_device_map", None) or {}).values())) > 1 for one in models):
        raise ModelError("target", "a model on several devices is not served")
    prompt_len = input_ids.shape[1]
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    ends = Ends.of(stopping_criteria, generation_config, prompt_len, vocab_size)
    sampling = sampling_of(generation_config, logits_processor)
    least = min_new_tokens_of(logits_processor, prompt_len)
    own = own_processors(logits_processor, prompt_len, vocab_size)
    sampling = replace(sampling, processors={one.name: given for one, given in own.items()})
    requests = _requests(input_ids, model_kwargs.get("attention_mask"), sampling, ends, least)
    grammars = grammars_of(logits_processor, input_ids, ends.eos)
    requests = [replace(one, grammar=make) for one, make in zip(requests, grammars, strict=True)]
    with borrowed(*models, fused=fused):
        engine = SERVED[model].engine(
            model, drafting, backend, len(requests), ends.max_length, own=tuple(own)
        )
        ids = _run(engine, requests, _Columns(input_ids, ends, streamer or call["streamer"]))
    if generation_config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=ids)
    return ids


def _call_of(generation_config: Any) -> dict[str, Any] | None:
    """Return the variables of the `generate` that prepared this call.

    It keeps the streamer and the assistant to itself where it calls a function, and tells which
    arguments are the user's.
    """
    frame = inspect.currentframe()
    while frame is not None and generation_config is not None:
        if frame.f_code is _GENERATE and frame.f_locals["generation_config"] is generation_config:
            return frame.f_locals
        frame = frame.f_back
    return None


def _requests(
    input_ids: Tensor, mask: Any, sampling: SamplingParams, ends: Ends, least: int
) -> list[Request]:
    """Return a request per row, without its padding.

    Seeds come from torch's default generator on the CPU, so ``torch.manual_seed`` repeats a call.
    """
    rows = input_ids.tolist()
    if mask is not None:
        kept = (mask != 0).tolist()
        rows = [list(compress(row, keep)) for row, keep in zip(rows, kept, strict=True)]
    most, seeds = ends.max_length - input_ids.shape[1], [0] * len(rows)
    if sampling.drawn:
        seeds = torch.randint(2**63 - 1, (len(rows),)).tolist()
    return [
        Request(
            row,
            most,
            replace(sampling, seed=seed),
            ignore_eos=True,
            stop_token_ids=ends.eos,
            min_new_tokens=min(least, most),
        )
        for row, seed in zip(rows, seeds, strict=True)
    ]


class _Columns:
    """Rows become columns, a token of each row, as transformers makes them.

    A row that is ahead of others waits for them. So streamers and stopping criteria see what they
    would see in transformers.
    """

    def __init__(self, input_ids: Tensor, ends: Ends, streamer: Any) -> None:
        self._ends, self._streamer = ends, streamer
        self._prompt_len = self._len = input_ids.shape[1]
        self._device = input_ids.device
        # on the host: what is written to a device waits for the step that is ahead there
        self._ids = input_ids.new_zeros(len(input_ids), ends.max_length, device="cpu")
        self._ids[:, : self._len] = input_ids
        self.ended = [False] * len(input_ids)

    def take(self, results: Sequence[RequestOutput]) -> bool:
        """Hand on whole columns; returns whether all rows have ended."""
        while not all(self.ended):
            column = [self._token(*row) for row in zip(results, self.ended, strict=True)]
            if None in column:
                return False
            tokens = self._ids.new_tensor(column)
            self._ids[:, self._len] = tokens
            self._len += 1
            if self._streamer is not None:
                self._streamer.put(tokens)
            stops = self.ended
            if self._ends.others:
                stops = self._ends.others(self._so_far(), None).tolist()
            full = self._len >= self._ends.max_length
            self.ended = [
                full or ended or stop or token in self._ends.eos
                for ended, stop, token in zip(self.ended, stops, column, strict=True)
            ]
        return True

    def _token(self, result: RequestOutput, ended: bool) -> int | None:
        """Return a row's next token, None if it is not there yet."""
        at = self._len - self._prompt_len
        if ended and self._ends.pad is not None:
            return self._ends.pad
        if at < len(result.tokens):
            return result.tokens[at]
        if result.finish_reason == "blocked":
            raise SpecAttnError("the logits processors leave no token to choose")
        if result.finish_reason == "nonfinite":
            raise SpecAttnError("the target's logits are NaN or infinite where a token is chosen")
        return None

    def unwanted(self, results: Sequence[RequestOutput]) -> list[RequestOutput]:
        """Return the running requests whose rows are padding now."""
        if self._ends.pad is None:
            return []
        rows = zip(results, self.ended, strict=True)
        return [result for result, ended in rows if ended and not result.finish_reason]

    def finish(self) -> Tensor:
        """Return the ids, and tell the streamer that they are all."""
        if self._streamer is not None:
            self._streamer.end()
        return self._so_far()

    def _so_far(self) -> Tensor:
        return self._ids[:, : self._len].to(self._device)


def _run(engine: Engine, requests: Sequence[Request], columns: _Columns) -> Tensor:
    """Decode until all rows have ended; what runs then is dropped."""
    try:
        return _run_columns(engine, requests, columns)
    finally:
        engine.clear()


def _run_columns(engine: Engine, requests: Sequence[Request], columns: _Columns) -> Tensor:
    results = engine.add(requests)
    while not columns.take(results):
        for result in columns.unwanted(results):
            engine.drop(result)
        assert engine.running, "a row has ended for the engine alone"
        engine.step(ahead=True)
    return columns.finish()
