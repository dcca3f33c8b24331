"""transformers' own ways to speculate, decoded by this library: assistants and prompt lookup."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import specattn
from specattn import SpecConfig
from specattn.errors import ModelError, UnsupportedError
from specattn.integrations.transformers import release, serving
from specattn.models import LMDraft
from specattn.speculative.proposers.lookup import LookupFirst, LookupProposer
from tests.integrations.test_transformers import (
    NEW,
    Fails,
    build,
    head,
    made,
    model,
    ours,
    prompts,
)
from tests.models.test_checkpoints import save_tokenizer

__all__ = ["head", "made", "model"]  # fixtures

TREE = SpecConfig(num_steps=3, topk=3, num_draft_tokens=9)


def perturbed(model_type: str = "llama", **changes):
    """A model that is often, and not always, of the same opinion as `build`'s."""
    other = build(model_type, **changes)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return other


@pytest.fixture
def assistant():
    return perturbed()


@pytest.fixture
def gained(monkeypatch) -> list[int]:
    """The tokens that requests gain, step by step, from here on."""
    seen: list[int] = []
    step = serving.Engine.step

    def spy(*args, **options):
        new = step(*args, **options)
        seen.extend(len(tokens) for _, tokens in new)
        return new

    monkeypatch.setattr(serving.Engine, "step", spy)
    return seen


LOOKUP = {"prompt_lookup_num_tokens": 3}


@pytest.mark.parametrize(
    ("kind", "lookup", "tree"),
    [
        ("assistant", {}, None),
        ("assistant", {}, TREE),
        ("assistant", LOOKUP, None),
        ("itself", {}, None),
        ("itself", LOOKUP, TREE),
        ("", LOOKUP, None),
        ("", LOOKUP, TREE),
    ],
    ids=["chain", "tree", "both", "itself", "both, tree", "lookup", "lookup, tree"],
)
def test_texts_are_those_of_transformers(model, assistant, gained, kind, lookup, tree):
    helper = {"assistant": assistant, "itself": model}.get(kind)
    options = {"max_new_tokens": NEW, "assistant_model": helper, **lookup}
    want = model.generate(**prompts(1), max_new_tokens=NEW)
    # transformers' own serves no batch
    assert torch.equal(model.generate(**prompts(1), **options), want)
    found = specattn.generate(model, **prompts(1), **options, spec_config=tree)
    assert torch.equal(found, want)
    want = model.generate(**prompts(3), max_new_tokens=NEW)
    assert torch.equal(ours(model, prompts(3), **options, spec_config=tree), want)
    assert max(gained) > 1
    if kind == "itself" and not lookup:
        assert max(gained) == 6


def test_processors_and_ends_are_as_without_an_assistant(model, assistant):
    options = {"max_new_tokens": NEW, "repetition_penalty": 1.2, "bad_words_ids": [[5], [9, 4]]}
    want = model.generate(**prompts(1), **options, eos_token_id=[2, 9, 14])
    options |= {"eos_token_id": [2, 9, 14], "assistant_model": assistant}
    assert torch.equal(model.generate(**prompts(1), **options), want)
    assert torch.equal(ours(model, prompts(1), **options, prompt_lookup_num_tokens=4), want)


def test_drawn_tokens_repeat_with_a_seed(model, assistant):
    def text(seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        options = {"do_sample": True, "assistant_model": assistant, "max_new_tokens": 5}
        return ours(model, prompts(3), **options).tolist()

    assert text(1) == text(1) != text(2)


# -- what the options become


@pytest.mark.parametrize(
    ("assistant_tokens", "options", "steps"),
    [
        (None, {"assistant_model": True}, 5),
        (7, {"assistant_model": True}, 7),
        (None, {"prompt_lookup_num_tokens": 4}, 4),
        (None, {"assistant_model": True, "prompt_lookup_num_tokens": 4}, 4),
        (2, {"assistant_model": True, "prompt_lookup_num_tokens": 4}, 2),
        (7, {"assistant_model": True, "spec_config": TREE}, 3),
        # the assistant's settings count, as in transformers, and not those of the call
        (7, {"assistant_model": True, "num_assistant_tokens": 3}, 7),
    ],
)
def test_how_deep_the_chain_is(model, assistant, made, assistant_tokens, options, steps):
    assistant.generation_config.num_assistant_tokens = assistant_tokens
    assistant.generation_config.num_assistant_tokens_schedule = "heuristic"
    assistant.generation_config.assistant_confidence_threshold = 0.9
    if "assistant_model" in options:
        options = options | {"assistant_model": assistant}
    ours(model, prompts(1), max_new_tokens=3, **options)
    assert [config.num_steps for config in made] == [steps]


@pytest.mark.parametrize(
    ("size", "alone", "before"), [(None, (1, 2), (2, 2)), (1, (1, 1), (1, 1)), (5, (1, 5), (2, 5))]
)
def test_how_many_tokens_are_looked_for(model, assistant, head, size, alone, before):
    """In front of another draft a single token is no match, unless no more are wanted."""
    options = {"max_new_tokens": 3, "prompt_lookup_num_tokens": 4, "max_matching_ngram_size": size}
    ours(model, prompts(1), **options)
    ((_, lookup),) = serving.SERVED[model].engines.values()
    assert isinstance(lookup, LookupProposer)
    assert (lookup.min_ngram, lookup.max_ngram) == alone
    want = model.generate(**prompts(1), max_new_tokens=NEW)
    for behind in ({"assistant_model": assistant}, {"draft": head}):
        found = ours(model, prompts(1), **options | behind | {"max_new_tokens": NEW})
        assert torch.equal(found, want)
        both = list(serving.SERVED[model].engines.values())[-1][1]
        assert isinstance(both, LookupFirst)
        assert isinstance(both.draft, LMDraft) == ("assistant_model" in behind)
        assert (both.lookup.min_ngram, both.lookup.max_ngram) == before


# -- what is kept, and what becomes of an assistant


def test_a_second_call_reuses_the_engine_until_weights_change(model, assistant, made):
    want = model.generate(**prompts(3), max_new_tokens=5)
    options = {"max_new_tokens": 5, "assistant_model": assistant}
    for _ in range(2):
        assert torch.equal(ours(model, prompts(3), **options), want)
    assert len(made) == 1
    ours(model, prompts(3), max_new_tokens=5, prompt_lookup_num_tokens=5)
    ours(model, prompts(3), **options)
    assert len(made) == 2
    flipped = {name: one.flip(0).clone() for name, one in assistant.state_dict().items()}
    assistant.load_state_dict(flipped, assign=True)
    assert torch.equal(ours(model, prompts(3), **options), want)
    assert len(made) == 3
    assert torch.equal(ours(model, prompts(3), **options | {"assistant_model": perturbed()}), want)
    assert len(made) == 4
    release(model)
    ours(model, prompts(3), **options)
    assert len(made) == 5


@pytest.mark.parametrize("error", [None, RuntimeError("x")], ids=repr)
def test_an_assistant_is_left_as_it_was(model, assistant, error):
    want = assistant.generate(**prompts(3), max_new_tokens=NEW)
    assistant.set_attn_implementation("eager")
    assistant.model.layers[1].mlp.train()
    modes = [module.training for module in assistant.modules()]
    grads = [one.requires_grad for one in assistant.parameters()]
    options = {"assistant_model": assistant, "max_new_tokens": NEW}
    if error is None:
        ours(model, prompts(3), **options)
    else:
        with pytest.raises(RuntimeError):
            ours(model, prompts(3), **options, streamer=Fails(error))
    for one, attention in ((assistant, "eager"), (model, "sdpa")):
        assert one.config._attn_implementation == attention
    assert [module.training for module in assistant.modules()] == modes
    assert [one.requires_grad for one in assistant.parameters()] == grads
    # both may be called again, in either part
    ours(assistant, prompts(3), assistant_model=model, max_new_tokens=NEW)
    assert torch.equal(ours(assistant, prompts(3), max_new_tokens=NEW), want)


def test_nothing_keeps_a_model_or_its_assistant():
    one, other = build(), perturbed()
    for first, second in ((one, other), (other, one), (one, one)):
        ours(first, prompts(1), assistant_model=second, max_new_tokens=3)
    watch = weakref.ref(one), weakref.ref(other)
    del other, first, second
    gc.collect()
    assert watch[1]() is None
    assert torch.equal(
        ours(one, prompts(1), max_new_tokens=3), one.generate(**prompts(1), max_new_tokens=3)
    )
    del one
    gc.collect()
    assert watch[0]() is None


def test_an_assistant_in_another_call_is_refused(model, assistant):
    tried = []

    class Asks(Fails):
        def put(self, value) -> None:
            self.left -= 1
            if self.left != 2:  # the prompt comes before the call has them
                return
            for one, helper in ((assistant, None), (build(), assistant)):
                with pytest.raises(ValueError, match="another call"):
                    ours(one, prompts(1), assistant_model=helper, max_new_tokens=3)
                tried.append(one)

    options = {"assistant_model": assistant, "max_new_tokens": 3}
    ours(model, prompts(1), **options, streamer=Asks(RuntimeError()))
    assert len(tried) == 2
    ours(assistant, prompts(1), max_new_tokens=3)


# -- what is refused

REFUSED = {
    "two drafts": (
        {"assistant_model": "assistant", "draft": "shipped"},
        ValueError,
        "draft must be None with an assistant_model",
    ),
    "no model": ({"assistant_model": 3}, ValueError, "assistant_model must be a model of"),
    "no tokens": (
        {"prompt_lookup_num_tokens": 0},
        ValueError,
        r"prompt_lookup_num_tokens must be 1\.\.64, got 0",
    ),
    "many tokens": (
        {"prompt_lookup_num_tokens": 65},
        ValueError,
        r"prompt_lookup_num_tokens must be 1\.\.64, got 65",
    ),
    "a long match": (
        {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 65},
        ValueError,
        r"max_matching_ngram_size must be 1\.\.64, got 65",
    ),
    "a drawn lookup": (
        {"prompt_lookup_num_tokens": 3, "spec_config": SpecConfig(3, 1, 4, draft_sampling=True)},
        ValueError,
        "draft_sampling must be off with lookup",
    ),
}


@pytest.mark.parametrize(("options", "error", "match"), REFUSED.values(), ids=REFUSED)
def test_options_that_do_not_fit_are_named(model, assistant, options, error, match):
    given = {name: assistant if one == "assistant" else one for name, one in options.items()}
    with pytest.raises(error, match=match):
        ours(model, prompts(1), max_new_tokens=3, **given)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("number", [0, 65])
def test_an_assistants_number_of_tokens_is_named(model, assistant, number):
    assistant.generation_config.num_assistant_tokens = number
    with pytest.raises(ValueError, match=rf"num_assistant_tokens must be 1\.\.64, got {number}"):
        ours(model, prompts(1), max_new_tokens=3, assistant_model=assistant)


def test_an_assistant_that_cannot_draft_is_named(model):
    config = AutoConfig.for_model("mamba", vocab_size=23, hidden_size=32, num_hidden_layers=1)
    mamba = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ModelError, match=r"assistant_model: .* 'mamba' has layers with"):
        ours(model, prompts(1), max_new_tokens=3, assistant_model=mamba)
    with pytest.raises(ModelError, match=r"assistant_model must be on .* cpu, got meta"):
        ours(model, prompts(1), max_new_tokens=3, assistant_model=build().to("meta"))


TOKENS = {"a" * (at + 1): at for at in range(19)}


def test_another_tokenizer_is_refused_and_padding_is_not(tmp_path):
    """transformers keeps both tokenizers from a function; those beside the models tell."""

    def saved(name: str, tokens: dict[str, int] | None, size: int):
        build(vocab_size=size).save_pretrained(tmp_path / name)
        if tokens is not None:
            save_tokenizer(tmp_path / name, tokens)
        return AutoModelForCausalLM.from_pretrained(tmp_path / name)

    target = saved("target", TOKENS, 23)
    want = target.generate(**prompts(3), max_new_tokens=5)
    for size, tokens in ((20, TOKENS), (40, TOKENS), (40, None)):
        helper = saved("padded", tokens, size)
        found = ours(target, prompts(3), max_new_tokens=5, assistant_model=helper)
        assert torch.equal(found, want)
    other = saved("other", TOKENS | {"a": 1, "aa": 0}, 23)
    with pytest.raises(ModelError, match=r"other has another tokenizer .* 'aa' as token 0"):
        ours(
            target,
            prompts(1),
            max_new_tokens=3,
            assistant_model=other,
            tokenizer=1,
            assistant_tokenizer=2,
        )
    with pytest.raises(UnsupportedError, match="the argument assistant_tokenizer is not served"):
        specattn.generate(target, **prompts(1), assistant_model=other, assistant_tokenizer=2)
    few = build(vocab_size=17)
    with pytest.raises(ModelError, match=r"\(llama\) has vocab_size 17 .* names token 18"):
        ours(target, prompts(1), max_new_tokens=3, assistant_model=few)
    with pytest.raises(ModelError, match=r"\(llama\) has vocab_size 17 .* no tokenizer"):
        ours(build(), prompts(1), max_new_tokens=3, assistant_model=few)
