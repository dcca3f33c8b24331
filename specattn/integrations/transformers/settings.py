"""What a call of transformers' ``generate`` asks for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Self

from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation import (
    EosTokenCriteria,
    LogitNormalization,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specattn.errors import UnsupportedError
from specattn.speculative.sampling.logits_processor import LogitsProcessor
from specattn.speculative.sampling.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Which values of a setting of `GenerationConfig` are served; None serves any.
SETTINGS: dict[str, tuple[object, ...] | None] = {
    # where the keys lie; a quantized cache would change tokens
    "cache_implementation": (
        *("hybrid", "hybrid_chunked", "sliding_window", "offloaded", "offloaded_hybrid"),
        *("static", "offloaded_static", "dynamic", "dynamic_full", None),
    ),
}
for _values, _names in (
    (
        None,
        # this library applies the setting, or transformers does before or after it
        "max_length max_new_tokens min_length min_new_tokens max_time stop_strings do_sample "
        "temperature top_k top_p min_p repetition_penalty bad_words_ids no_repeat_ngram_size "
        "suppress_tokens begin_suppress_tokens sequence_bias "
        "renormalize_logits num_return_sequences bos_token_id eos_token_id pad_token_id "
        "return_dict_in_generate prompt_lookup_num_tokens max_matching_ngram_size "
        # nothing without beams or a cache of transformers' own, or what changes no token
        "early_stopping length_penalty num_assistant_tokens num_assistant_tokens_schedule "
        "assistant_confidence_threshold assistant_lookbehind target_lookbehind "
        "assistant_ensemble_weight speculation_type is_assistant "
        "decoder_start_token_id use_cache max_cache_len disable_compile transformers_version",
    ),
    (
        (False, None),
        "use_mtp top_h forced_bos_token_id forced_eos_token_id constraints "
        "force_words_ids remove_invalid_values exponential_decay_length_penalty "
        "token_healing watermarking_config output_attentions "
        "output_hidden_states output_scores output_logits "
        "assistant_early_exit cache_config compile_config continuous_batching_config low_memory "
        "dola_layers prefill_chunk_size",
    ),
    (
        (0, None),
        "encoder_no_repeat_ngram_size epsilon_cutoff eta_cutoff penalty_alpha diversity_penalty",
    ),
    (
        (1, None),
        "num_beams num_beam_groups typical_p encoder_repetition_penalty guidance_scale",
    ),
):
    SETTINGS.update(dict.fromkeys(_names.split(), _values))

# What transformers' `generate` adds to a model's arguments; only the mask is read.
_PREPARED = {
    "attention_mask",
    "cache",
    "cache_position",
    "logits_to_keep",
    "past_key_values",
    "position_ids",
    "use_cache",
}
# Of these, what a call may not give: the rest of the prompt's state is transformers' own.
_PREPARED_ONLY = _PREPARED - {"attention_mask", "use_cache"}
# transformers 5.24 hands the older name on as the newer, whichever the user wrote
_SPELLINGS = dict.fromkeys(("cache", "past_key_values"), "past_key_values (cache)")
# What would change the law of tokens, or what an assistant is; without one it means nothing.
_OF_ASSISTANTS = ("assistant_ensemble_weight", "speculation_type")
# What is served, in the order in which transformers applies it; the warpers only to draws.
_WARPERS = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}
_PROCESSORS = (
    SequenceBiasLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    NoBadWordsLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    SuppressTokensLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    # this library's kind, of the user
    LogitsProcessor,
    *_WARPERS,
    LogitNormalization,
)
_UNCLASSIFIED = {name for name in vars(GenerationConfig()) if name[0] != "_"} - SETTINGS.keys()


def refuse(
    config: Any, processors: Sequence[Any], call: dict[str, Any], arguments: dict[str, Any]
) -> None:
    """Name whatever is not served.

    Parameters
    ----------
    config : GenerationConfig
        The settings, as transformers has prepared them.
    processors : sequence of LogitsProcessor
        Those of the user and those that follow from the settings.
    call : dict
        What transformers' `generate` was called with.
    arguments : dict
        What it would give to the model's forward besides the tokens.

    Raises
    ------
    UnsupportedError
        If there is anything.
    """
    reasons = []
    for name, allowed in SETTINGS.items():
        value = getattr(config, name, None)
        if allowed is not None and value not in allowed:
            reasons.append(f"{name} must be {' or '.join(map(str, allowed))}, got {value!r}")
    new = [name for name in _UNCLASSIFIED if getattr(config, name, None) is not None]
    reasons += [f"{name} is a setting that this version does not know" for name in sorted(new)]
    if call["assistant_model"] is not None or config.prompt_lookup_num_tokens is not None:
        given = {name: getattr(config, name, None) for name in _OF_ASSISTANTS}
        reasons += [f"{name} must be None, got {value!r}" for name, value in given.items() if value]
    reasons += _odd_processors(processors)
    named = {"synced_gpus"} if call["synced_gpus"] else set()
    named |= {name for name in _PREPARED_ONLY if call["kwargs"].get(name) is not None}
    named |= {name for name, value in arguments.items() if value is not None} - _PREPARED
    spelled = {_SPELLINGS.get(name, name) for name in named}
    reasons += [f"the argument {name} is not served" for name in sorted(spelled)]
    if reasons:
        raise UnsupportedError("generate", reasons)


def _odd_processors(processors: Sequence[Any]) -> list[str]:
    """Say which processors are not served, or not as they are."""
    own = [one for one in processors if isinstance(one, LogitsProcessor)]
    kinds = [
        LogitsProcessor if isinstance(one, LogitsProcessor) else type(one) for one in processors
    ]
    unknown = [kind.__name__ for kind in kinds if kind not in _PROCESSORS]
    how = "write it as a specattn LogitsProcessor, which works here (docs/logits_processors.md)"
    reasons = [f"the logits processor {name} is not served: {how}" for name in unknown]
    # several of this library's may come one after the other
    ordered = [kind for kind in _PROCESSORS for one in kinds if one is kind]
    others = [kind for kind in kinds if kind is not LogitsProcessor]
    if not unknown and (kinds != ordered or len({*others}) < len(others)):
        reasons.append(
            "logits processors must come as sequence bias, repetition penalty, n-grams, bad words, "
            "least length, least new tokens, prefixes, suppressed tokens, specattn's, temperature, "
            "top-k, top-p, min-p, each at most once"
        )
    if len({one.name for one in own}) < len(own):
        reasons.append("logits processors of specattn must have different names")
    if {SequenceBiasLogitsProcessor, RepetitionPenaltyLogitsProcessor} <= {*kinds}:
        reasons.append("sequence_bias must be None beside repetition_penalty, which comes first")
    by_mass = (TopPLogitsWarper, MinPLogitsWarper)
    if any(one.min_tokens_to_keep > 1 for one in processors if type(one) in by_mass):
        reasons.append("min_tokens_to_keep must be 1")
    cut = (TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
    if any(one.filter_value > -math.inf for one in processors if type(one) in cut):
        reasons.append("filter_value must be -inf")
    ignored = [getattr(one, "prompt_ignore_length", None) for one in processors]
    # transformers itself leaves out the padding of each row
    if any(isinstance(length, int) for length in ignored):
        reasons.append("prompt_ignore_length must be None")
    return reasons


def sampling_of(config: Any, processors: Any) -> SamplingParams:
    """Return how every row draws; without ``do_sample`` the warpers change nothing."""
    found = {type(one): one for one in processors}
    asked: dict[str, Any] = {}
    if penalty := found.get(RepetitionPenaltyLogitsProcessor):
        asked["repetition_penalty"] = penalty.penalty
    if bad_words := found.get(NoBadWordsLogitsProcessor):
        # but for single end tokens
        asked["bad_words"] = list(bad_words.sequence_bias)
    if config.do_sample:
        asked["temperature"] = 1.0
        asked |= {
            name: getattr(found[kind], name) for kind, name in _WARPERS.items() if kind in found
        }
    return SamplingParams(**asked)


def min_new_tokens_of(processors: Any, prompt_len: int) -> int:
    """Return how many tokens come before an end-of-text token.

    transformers counts a row's padding among ``prompt_len``, and among the least length.
    """
    found = {type(one): one for one in processors}
    length, new = found.get(MinLengthLogitsProcessor), found.get(MinNewTokensLengthLogitsProcessor)
    return max(length.min_length - prompt_len if length else 0, new.min_new_tokens if new else 0, 0)


@dataclass(frozen=True)
class Ends:
    """Where rows end.

    Parameters
    ----------
    max_length : int
        Tokens of a row, its prompt and padding included.
    eos : frozenset of int
        Tokens that end a row.
    others : StoppingCriteriaList
        The criteria that are neither of these.
    pad : int or None
        What follows in a row that has ended. None if it goes on until all have ended, as
        transformers does without end-of-text tokens.
    """

    max_length: int
    eos: frozenset[int]
    others: Any
    pad: int | None

    @classmethod
    def of(cls, criteria: Sequence[Any], config: Any, prompt_len: int, vocab_size: int) -> Self:
        """Sort the stopping criteria of a call.

        Raises
        ------
        ValueError
            If rows that have ended need padding and there is no such token.
        """
        lengths = [one.max_length for one in criteria if type(one) is MaxLengthCriteria]
        eos = [one.eos_token_id.tolist() for one in criteria if type(one) is EosTokenCriteria]
        own = (MaxLengthCriteria, EosTokenCriteria)
        pad = None
        if any(hasattr(one, "eos_token_id") for one in criteria):
            pad = config.pad_token_id
            if pad is None:
                found = config.eos_token_id
                pad = found[0] if isinstance(found, list | tuple) else found
            if pad is None:
                raise ValueError("pad_token_id must be given with stopping criteria for eos tokens")
        return cls(
            # transformers looks at a row's length once it has a new token
            max(min(lengths, default=config.max_length), prompt_len + 1),
            # settings name end tokens that some models cannot write
            frozenset(one for one in chain.from_iterable(eos) if one in range(vocab_size)),
            StoppingCriteriaList(one for one in criteria if type(one) not in own),
            pad,
        )
