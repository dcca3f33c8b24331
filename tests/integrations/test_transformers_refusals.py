"""What a call of transformers' ``generate`` asks for is served, or refused by name."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, GenerationConfig
from transformers.generation import (
    LogitNormalization,
    LogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import specattn
from specattn.errors import ModelError, UnsupportedError
from specattn.integrations.transformers.settings import (
    SETTINGS,
    min_new_tokens_of,
    refuse,
    sampling_of,
)
from specattn.speculative.proposers.lookup import LookupProposer
from specattn.speculative.sampling.params import SamplingParams
from tests.integrations.test_transformers import NEW, NoTwice, build, ours, prompts

CALL = {"assistant_model": None, "synced_gpus": None, "kwargs": {}}
REFUSED = sorted(name for name, values in SETTINGS.items() if values is not None)


@pytest.fixture(scope="module")
def model():
    return build()


def test_every_setting_of_this_transformers_is_classified():
    """A newer release with a new setting fails here: say what becomes of it."""
    settings = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert settings - SETTINGS.keys() == set()


@pytest.mark.parametrize("name", REFUSED)
def test_a_setting_is_refused_by_name(name):
    config = GenerationConfig()
    for value in SETTINGS[name]:
        setattr(config, name, value)
        refuse(config, [], CALL, {})
    setattr(config, name, 7)
    with pytest.raises(UnsupportedError, match=f"{name} must be .*, got 7"):
        refuse(config, [], CALL, {})


def test_the_defaults_of_transformers_are_served(model):
    config, _ = model._prepare_generation_config(None)
    refuse(config, [], CALL, {})


def test_a_setting_that_nobody_classified_is_refused(monkeypatch):
    from specattn.integrations.transformers import settings

    monkeypatch.setattr(settings, "_UNCLASSIFIED", {"dreaminess"})
    config = GenerationConfig(dreaminess=3)
    with pytest.raises(UnsupportedError, match="dreaminess is a setting"):
        refuse(config, [], CALL, {})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"spec_config": {"num_steps": 3}}, "spec_config must be a SpecConfig, got a dict"),
        ({"draft": LookupProposer}, "a loaded head or a proposer, got the class LookupProposer$"),
        ({"draft": 5}, "draft must be a folder, a name, a loaded head or a proposer, got an int$"),
        (
            {"assistant_model": torch.nn.Linear(2, 2)},
            "assistant_model must be a model of transformers, got a Linear$",
        ),
    ],
    ids=["spec_config", "class", "number", "assistant"],
)
def test_what_drafts_and_the_tree_are_of_their_kinds(model, given, message):
    with pytest.raises((ValueError, ModelError), match=message):
        ours(model, prompts(1), **given)


def test_a_whole_model_is_no_draft_but_an_assistant(model):
    with pytest.raises(ModelError, match=r"got a LlamaForCausalLM; .* as assistant_model=$"):
        ours(model, prompts(1), draft=model)


@pytest.mark.parametrize("other", ["path/to/model", LogitNormalization], ids=["path", "class"])
def test_what_is_no_model_is_refused(other):
    with pytest.raises(ValueError, match=r"model must be a model of transformers, got (a str|the)"):
        specattn.generate(other)


class Own(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_beams": 2}, "num_beams must be 1 or None, got 2"),
        (
            {"sequence_bias": {(5,): 2.0}, "repetition_penalty": 1.2},
            "sequence_bias must be None beside repetition_penalty",
        ),
        ({"remove_invalid_values": True}, "remove_invalid_values"),
        ({"do_sample": True, "typical_p": 0.5}, "typical_p"),
        ({"synced_gpus": True}, "the argument synced_gpus"),
        ({"past_key_values": DynamicCache()}, r"the argument past_key_values \(cache\) is"),
        ({"position_ids": torch.arange(9)[None]}, "the argument position_ids"),
        ({"inputs_embeds": torch.zeros(1, 9, 64)}, "the argument inputs_embeds"),
        (
            {"logits_processor": [Own()]},
            "the logits processor Own is not served: write it as a specattn LogitsProcessor",
        ),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
@pytest.mark.parametrize("itself", [False, True], ids=["custom_generate", "itself"])
@pytest.mark.filterwarnings("ignore")
def test_a_call_is_refused_by_name(model, options, match, itself):
    call = specattn.generate if itself else ours
    inputs = prompts(1) if itself else {"inputs": prompts(1)["input_ids"]}
    arguments = (model,) if itself else (model, inputs)
    with pytest.raises(UnsupportedError, match=match):
        call(*arguments, **(inputs if itself else {}), max_new_tokens=NEW, **options)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("name", "value"), [("assistant_ensemble_weight", 0.5), ("speculation_type", "dflash")]
)
def test_what_changes_an_assistant_is_refused_with_one(model, name, value):
    """Older releases of transformers have no such settings."""
    config = GenerationConfig()
    setattr(config, name, value)
    refuse(config, [], CALL, {})
    with pytest.raises(UnsupportedError, match=f"{name} must be None, got {value!r}"):
        refuse(config, [], CALL | {"assistant_model": model}, {})
    config.prompt_lookup_num_tokens = 3
    with pytest.raises(UnsupportedError, match=f"{name} must be None"):
        refuse(config, [], CALL, {})


def test_a_generate_of_a_models_own_is_refused():
    class Other(torch.nn.Module):
        def generate(self, input_ids, custom_generate, **_):
            return custom_generate(self, input_ids, None, None, None)

    with pytest.raises(UnsupportedError, match="Other has a generate of its own"):
        specattn.generate(Other())


# -- processors

WARPERS = [TemperatureLogitsWarper(0.7), TopKLogitsWarper(5), TopPLogitsWarper(0.9)]


def test_warpers_are_read():
    config = GenerationConfig(do_sample=True)
    assert sampling_of(config, []) == SamplingParams(1.0)
    assert sampling_of(config, WARPERS) == SamplingParams(0.7, 5, 0.9)
    assert sampling_of(config, [WARPERS[1]]) == SamplingParams(1.0, 5)
    refuse(config, [*WARPERS, LogitNormalization()], CALL, {})
    # without drawing they change no tokens
    assert sampling_of(GenerationConfig(), WARPERS) == SamplingParams()


@pytest.mark.parametrize(
    "processors",
    [
        WARPERS[::-1],
        [WARPERS[1], WARPERS[0]],
        [WARPERS[0], WARPERS[0]],
        [LogitNormalization(), *WARPERS],
    ],
    ids=["reversed", "top-k first", "twice", "normalised first"],
)
def test_warpers_in_another_order_are_refused(processors):
    with pytest.raises(UnsupportedError, match="temperature, top-k, top-p"):
        refuse(GenerationConfig(do_sample=True), processors, CALL, {})


def test_processors_are_read():
    """They change greedy tokens, too; a single end token is no bad word."""
    processors = [
        RepetitionPenaltyLogitsProcessor(1.3),
        NoBadWordsLogitsProcessor([[5], [2], [3, 4]], 2),
        MinLengthLogitsProcessor(15, 2),
        MinNewTokensLengthLogitsProcessor(9, 4, 2),
    ]
    read = {"repetition_penalty": 1.3, "bad_words": [[5], [3, 4]]}
    refuse(GenerationConfig(), processors, CALL, {})
    assert sampling_of(GenerationConfig(), processors) == SamplingParams(**read)
    drawn = [*processors, *WARPERS, MinPLogitsWarper(0.2)]
    config = GenerationConfig(do_sample=True)
    refuse(config, drawn, CALL, {})
    assert sampling_of(config, drawn) == SamplingParams(0.7, 5, 0.9, min_p=0.2, **read)
    assert [min_new_tokens_of(drawn, length) for length in (9, 12, 20)] == [6, 4, 4]
    assert min_new_tokens_of(WARPERS, 9) == 0


@pytest.mark.parametrize(
    ("processors", "match"),
    [
        ([MinPLogitsWarper(0.2), WARPERS[0]], "top-p, min-p, each at most once"),
        (
            [WARPERS[0], RepetitionPenaltyLogitsProcessor(1.3)],
            "repetition penalty, n-grams",
        ),
        ([NoTwice(), RepetitionPenaltyLogitsProcessor(1.3)], "suppressed tokens, specattn's"),
        ([NoTwice(), NoTwice()], "of specattn must have different names"),
        ([MinPLogitsWarper(0.2, min_tokens_to_keep=2)], "min_tokens_to_keep must be 1"),
        ([RepetitionPenaltyLogitsProcessor(1.3, 4)], "prompt_ignore_length must be None"),
    ],
    ids=["min-p first", "penalty last", "own first", "own twice", "kept", "ignored"],
)
def test_processors_that_would_do_something_else_are_refused(processors, match):
    with pytest.raises(UnsupportedError, match=match):
        refuse(GenerationConfig(do_sample=True), processors, CALL, {})


def test_a_subclass_of_a_warper_is_refused():
    class Hotter(TemperatureLogitsWarper):
        pass

    with pytest.raises(UnsupportedError, match="the logits processor Hotter"):
        refuse(GenerationConfig(), [Hotter(0.7)], CALL, {})


@pytest.mark.parametrize(
    "warper", [TopKLogitsWarper(5, filter_value=-1.0), TopPLogitsWarper(0.9, min_tokens_to_keep=2)]
)
def test_warpers_with_other_settings_are_refused(warper):
    with pytest.raises(UnsupportedError, match=r"filter_value|min_tokens_to_keep"):
        refuse(GenerationConfig(), [warper], CALL, {})
