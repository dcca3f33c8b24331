"""``custom_generate=specattn.generate`` writes what transformers' own ``generate`` writes."""

from __future__ import annotations

import functools
import gc
import re
import weakref

import pytest
import torch
from safetensors.torch import load_model, save_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.generation import BaseStreamer, StoppingCriteria

import specattn
from specattn import SpecConfig
from specattn.errors import ModelError, SpecAttnError, UnsupportedError
from specattn.integrations.transformers import _Columns, release, serving
from specattn.integrations.transformers.processors import PrefixGrammar
from specattn.models import HFTarget, LMDraft, load_draft, quantise_model
from specattn.models.fused.family import FAMILIES
from specattn.models.fused.scaled import ScaledProjection
from specattn.models.hub import PAIR
from specattn.speculative.prompts.launch import ADMIT, TARGET, Phase, PromptPart
from specattn.speculative.proposers.lookup import LookupProposer
from specattn.speculative.sampling.logits_processor import LogitsProcessor
from tests.distributions import Distribution, joint, p_value
from tests.models import heads
from tests.models.conftest import TINY
from tests.samples import half, on_cpu, sampled, star
from tests.speculative import three_tokens

MODELS = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 5},
    "gemma2": {"sliding_window": 7, "query_pre_attn_scalar": 40, "attn_logit_softcapping": 3.0},
    "gemma3_text": {"sliding_window": 4},
    "gpt_oss": {"sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
}
# few tokens, so that a random head is right at times and texts end of themselves
VOCAB, DRAFT_VOCAB, EOS, PAD = 23, 17, 2, 0
TREE = SpecConfig(num_steps=3, topk=4, num_draft_tokens=12)
CHAIN = SpecConfig(num_steps=2, topk=1, num_draft_tokens=3)
NEW = 14
# what the head proposes after it is often among what the target may draw, and often refused
PROMPT = [20, 20, 3]


def build(model_type: str = "llama", **changes: object):
    torch.manual_seed(0)
    settings = TINY | {"vocab_size": VOCAB, "num_hidden_layers": 3} | MODELS[model_type] | changes
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


@pytest.fixture
def model():
    return build()


@pytest.fixture(scope="session")
def head(tmp_path_factory):
    """The folder of a random EAGLE-3 head."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads, "V", VOCAB)
        patch.setattr(heads, "VD", DRAFT_VOCAB)
        tensors = heads.eagle3_tensors()
    sizes = {"vocab_size": VOCAB, "draft_vocab_size": DRAFT_VOCAB}
    return heads.write(tmp_path_factory.mktemp("draft") / "head", tensors, **sizes)


def prompts(rows: int, side: str = "left", seed: int = 3) -> dict[str, torch.Tensor]:
    """Ragged prompts with padding on one side; one row has none."""
    generator = torch.Generator().manual_seed(seed)
    lens = [9, *torch.randint(1, 9, (rows - 1,), generator=generator).tolist()]
    ids, mask = torch.full((rows, 9), PAD), torch.zeros(rows, 9, dtype=torch.long)
    for row, length in enumerate(lens):
        at = slice(9 - length, 9) if side == "left" else slice(0, length)
        # the tokens of a row do not depend on the side
        own = torch.Generator().manual_seed(seed + row)
        ids[row, at] = torch.randint(3, VOCAB, (length,), generator=own)
        mask[row, at] = 1
    return {"input_ids": ids, "attention_mask": mask}


def ours(model, inputs, **options):
    return model.generate(**inputs, custom_generate=specattn.generate, **options)


@on_cpu(half, "model_type", "drafted")
@pytest.mark.parametrize("drafted", [False, True], ids=["plain", "drafted"])
@pytest.mark.parametrize("model_type", MODELS)
def test_greedy_tokens_are_those_of_transformers(model_type, drafted, head):
    model = build(model_type, eos_token_id=None)
    drafts = {"draft": head, "spec_config": TREE} if drafted else {}
    free = model.generate(**prompts(1), max_new_tokens=NEW)
    options = {"max_new_tokens": NEW, "eos_token_id": int(free[0, 9 + 6])}
    for rows in (1, 4):
        want = model.generate(**prompts(rows), **options)
        assert torch.equal(ours(model, prompts(rows), **options, **drafts), want)
    assert serving.SERVED[model].is_fused == (model_type in FAMILIES)
    assert (want[:, -1] == PAD).any(), "no row ended before another"
    # transformers goes on after the padding there; from a row's last token, the side is nothing
    right = ours(model, prompts(rows, "right"), **options, **drafts)
    assert torch.equal(right[:, 9:], want[:, 9:])


def remainders(row: int, text: torch.Tensor) -> list[int]:
    """Which tokens may follow depends on the row, the newest token and the length."""
    rest = (row + int(text[-1]) + len(text)) % 3
    return [token for token in range(1, VOCAB) if token % 3 == rest]


@sampled(
    star,
    asked={
        "three": {
            "repetition_penalty": 1.2,
            "bad_words_ids": [[5], [9, 4]],
            "min_new_tokens": 12,
        },
        "repetition": {"repetition_penalty": 1.4},
        "repetition below 1": {"repetition_penalty": 0.7},
        "bad words": {
            "bad_words_ids": [[5], [7, 8], [20, 3], [EOS], *([t, 11] for t in range(3, 20))]
        },
        "min_new_tokens": {"min_new_tokens": 9},
        "min_length": {"min_length": 16},
        "unigrams": {"no_repeat_ngram_size": 1},
        "bigrams": {"no_repeat_ngram_size": 2},
        "suppressed": {"suppress_tokens": [4, 8, 11, 17, VOCAB + 5]},
        "at begin": {"begin_suppress_tokens": list(range(3, 20, 2))},
        "biased": {"sequence_bias": {(5,): 2.0, (7, 8): 3.0, (20, 3, 6): 4.0, (9,): -3.0}},
        "trigrams": {
            "no_repeat_ngram_size": 3,
            "suppress_tokens": [6],
            "repetition_penalty": 1.2,
        },
        "prefixes": {"prefix_allowed_tokens_fn": remainders},
    },
    drafted={"drafted": True, "plain": False},
)
def test_greedy_tokens_under_processors_are_those_of_transformers(asked, drafted, head):
    """Rows with padding too: penalties and sequences do not see it."""
    model, drafts = build(), {"draft": head, "spec_config": TREE} if drafted else {}
    options = {"max_new_tokens": NEW, "eos_token_id": [EOS, 9, 14]}
    inputs = prompts(4, seed=8)
    want = model.generate(**inputs, **options, **asked)
    assert torch.equal(ours(model, inputs, **options, **asked, **drafts), want)
    assert not torch.equal(unprocessed(4, 8, tuple(options["eos_token_id"])), want)


@functools.cache
def unprocessed(rows: int, seed: int, ends: tuple[int, ...]) -> torch.Tensor:
    """What transformers writes without any processor."""
    options = {"max_new_tokens": NEW, "eos_token_id": [*ends]}
    return build().generate(**prompts(rows, seed=seed), **options)


class NoTwice(LogitsProcessor):
    name = "no_twice"

    def process(self, logits, nodes, states):
        return logits.scatter(2, nodes.last(1), -torch.inf)


class Lifted(LogitsProcessor):
    name = "lifted"

    def process(self, logits, nodes, states):
        # it has to come after the penalty
        return torch.where(logits > nodes.last(1) % 3, logits / 2, logits)


def no_twice(ids, scores):
    return scores.scatter(1, ids[:, -1:], -torch.inf)


def lifted(ids, scores):
    return torch.where(scores > ids[:, -1:] % 3, scores / 2, scores)


@pytest.mark.parametrize("drafted", [False, True])
def test_processors_written_for_this_library_change_what_transformers_own_would(head, drafted):
    model, drafts = build(), {"draft": head, "spec_config": TREE} if drafted else {}
    options = {"max_new_tokens": NEW, "eos_token_id": EOS, "repetition_penalty": 1.3}
    inputs = prompts(5, seed=4)
    want = model.generate(**inputs, **options, logits_processor=[no_twice, lifted])
    own = [NoTwice(), Lifted()]
    assert torch.equal(ours(model, inputs, **options, **drafts, logits_processor=own), want)
    itself = specattn.generate(model, **inputs, **options, **drafts, logits_processor=own)
    assert torch.equal(itself, want)
    free = model.generate(**inputs, **options)
    assert free.shape != want.shape or not torch.equal(free, want)


def test_a_prefix_that_allows_nothing_ends_a_call_only_where_a_text_comes_to_it():
    allowed = {(4,): [5, 6, 7], (4, 5): [], (4, 6): [8], (4, 7): [9]}
    asked = []

    def allow(text):
        asked.append(tuple(text.tolist()))
        return allowed[asked[-1]]

    mask = torch.full((5, 1), -1, dtype=torch.int32)
    grammar = PrefixGrammar(allow, torch.tensor([4]), ends={7})
    # 5 leads nowhere, 9 is not allowed, 7 ends the text
    grammar.fill([4, 5, 6, 9, 7], [-1, 0, 0, 0, 0], mask)
    assert mask[:, 0].tolist() == [1 << 5 | 1 << 6 | 1 << 7, 0, 1 << 8, -1, -1]
    assert asked == [(4,), (4, 5), (4, 6)]
    grammar.accept([5])
    with pytest.raises(ValueError, match="prefix_allowed_tokens_fn allows no token after 5"):
        grammar.fill([5], [-1], mask[:1])


def test_min_p_keeps_what_transformers_keeps(model, head):
    """With a min-p of nearly 1, what is drawn is what is most probable."""
    options = {"max_new_tokens": NEW, "draft": head, "spec_config": TREE}
    drawn = ours(model, prompts(3), do_sample=True, min_p=0.9999, **options)
    assert torch.equal(drawn, ours(model, prompts(3), **options))


def test_drafts_are_accepted_at_times(model, head, monkeypatch):
    """Else the tests above would pass without speculation."""
    seen = []
    step = serving.Engine.step
    monkeypatch.setattr(
        serving.Engine, "step", lambda *a, **k: (gained := step(*a, **k), seen.extend(gained))[0]
    )
    ours(model, prompts(8), max_new_tokens=NEW, draft=head, spec_config=TREE)
    assert max(len(new) for _, new in seen) > 1


def test_quantised_models_and_heads(head):
    model = build()
    drafts = {"draft": head, "spec_config": TREE, "draft_quantization": "fp8"}
    plain = model.generate(**prompts(3), max_new_tokens=NEW)
    assert torch.equal(ours(model, prompts(3), max_new_tokens=NEW, **drafts), plain)
    ((_, loaded),) = serving.SERVED[model].engines.values()
    assert type(loaded.fc) is ScaledProjection
    quantise_model(model, "fp8-channel")
    want = model.generate(**prompts(3), max_new_tokens=NEW)
    assert torch.equal(ours(model, prompts(3), max_new_tokens=NEW, **drafts), want)
    for draft, how, why in ((loaded, "fp8", "needs a draft that is a head's"), (head, "int4", "")):
        wrong = {"draft": draft, "spec_config": TREE, "draft_quantization": how}
        with pytest.raises(ValueError, match=f"draft_quantization {why or 'must be fp8'}"):
            ours(model, prompts(1), max_new_tokens=NEW, **wrong)


@pytest.fixture(scope="module")
def pair():
    return AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32)


@pytest.fixture(scope="module")
def code():
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target", padding_side="left")
    tokenizer.pad_token = tokenizer.decode([0])
    texts = ["def f(x):", "class Point:\n    def __init__(", "import os\nimport sys\n\n"]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
    return tokenizer, inputs


@pytest.mark.parametrize("tree", [None, SpecConfig(5, 4, 16)], ids=["default", "tree"])
def test_the_shipped_pair(pair, code, tree):
    _, inputs = code
    want = pair.generate(**inputs, max_new_tokens=40)
    found = ours(pair, inputs, max_new_tokens=40, draft="shipped", spec_config=tree)
    assert torch.equal(found, want)


def test_stop_strings(pair, code):
    tokenizer, inputs = code
    stop = {"stop_strings": ["return", ")"], "tokenizer": tokenizer, "max_new_tokens": 40}
    want = pair.generate(**inputs, **stop)
    assert want.shape[1] < inputs["input_ids"].shape[1] + 40
    assert torch.equal(specattn.generate(pair, **inputs, **stop, draft="shipped"), want)


class Streamed(BaseStreamer):
    def __init__(self) -> None:
        self.given: list[list] = []

    def put(self, value) -> None:
        assert value.device.type == "cpu"
        self.given.append(value.tolist())

    def end(self) -> None:
        self.given.append(["end"])


@pytest.mark.parametrize("rows", [1, 3])
def test_a_streamer_gets_what_transformers_gives_it(model, head, rows):
    want, found, partly, itself = (Streamed() for _ in range(4))
    options = {"max_new_tokens": NEW, "draft": head, "spec_config": TREE}
    model.generate(**prompts(rows), max_new_tokens=NEW, streamer=want)
    ours(model, prompts(rows), streamer=found, **options)
    specattn.generate(model, **prompts(rows), streamer=itself, **options)
    own = functools.partial(specattn.generate, draft=head, spec_config=TREE)
    model.generate(
        **prompts(rows),
        custom_generate=lambda *a, **k: own(*a, **k),
        max_new_tokens=NEW,
        streamer=partly,
    )
    assert want.given[-1] == ["end"]
    assert found.given == want.given
    assert itself.given == want.given
    assert partly.given == want.given


class Holds(StoppingCriteria):
    """A row ends once it holds a token so many times; all rows do, if they are told to."""

    def __init__(self, token: int, times: int, *, together: bool) -> None:
        self.token, self.times, self.together = token, times, together

    def __call__(self, input_ids, scores, **_):
        assert scores is None
        held = (input_ids == self.token).sum(1) >= self.times
        return held.any().expand(len(held)) if self.together else held


@on_cpu(half, "together", "eos")
@pytest.mark.parametrize("eos", [EOS, None], ids=["eos", "no eos"])
@pytest.mark.parametrize("together", [False, True])
def test_stopping_criteria(head, eos, together):
    model = build(eos_token_id=eos)
    own = model.generate(**prompts(3), max_new_tokens=NEW)
    common = int(own[:, 9:].flatten().mode().values)
    for token, times in ((common, 2), (common, 4), (5, 2)):
        stop = {"stopping_criteria": [Holds(token, times, together=together)]}
        want = model.generate(**prompts(3), max_new_tokens=NEW, **stop)
        found = ours(model, prompts(3), max_new_tokens=NEW, **stop, draft=head, spec_config=TREE)
        assert torch.equal(found, want)


def test_a_time_that_is_over_ends_after_one_token(model, head):
    found = ours(model, prompts(3), max_new_tokens=NEW, max_time=1e-9, draft=head)
    assert torch.equal(found, model.generate(**prompts(3), max_new_tokens=1))


def test_several_ends_pad_token_and_lengths(model, head):
    drafted = {"draft": head, "spec_config": TREE}
    text = build(eos_token_id=None).generate(**prompts(3), max_new_tokens=NEW)[:, 9:]
    ends = sorted({int(text[0, 5]), int(text[1, 3])})
    for options in (
        {"eos_token_id": ends, "max_new_tokens": NEW},
        {"eos_token_id": ends, "max_new_tokens": NEW, "pad_token_id": 21},
        {"eos_token_id": ends[0], "max_length": 9 + NEW},
        {"eos_token_id": [*ends, VOCAB, VOCAB + 9], "max_new_tokens": NEW},
        {"max_new_tokens": 1},
        {},
    ):
        want = model.generate(**prompts(3), **options)
        assert torch.equal(ours(model, prompts(3), **options, **drafted), want)
    no_pad = build(pad_token_id=None)
    want = no_pad.generate(**prompts(3), max_new_tokens=NEW)
    assert torch.equal(ours(no_pad, prompts(3), max_new_tokens=NEW, **drafted), want)


def test_a_dict_is_returned_where_it_is_asked_for(model):
    options = {"max_new_tokens": 5, "return_dict_in_generate": True}
    want = model.generate(**prompts(3), **options)
    found = ours(model, prompts(3), **options)
    assert type(found) is type(want)
    assert torch.equal(found.sequences, want.sequences)


def test_without_a_prompt_it_starts_from_bos(model):
    want = model.generate(max_new_tokens=5)
    assert torch.equal(specattn.generate(model, max_new_tokens=5), want)


def test_a_row_without_tokens_is_refused(model):
    inputs = prompts(3)
    inputs["attention_mask"][1] = 0
    with pytest.raises(ValueError, match="the prompt is empty"):
        ours(model, inputs, max_new_tokens=5)


# -- drawing


def draw(model, calls: int, head, **options) -> list[tuple[int, ...]]:
    """Three tokens of 60 texts a call."""
    return [path for _ in range(calls) for path in _draw(model, head, **options)]


def _draw(model, head, **options) -> list[tuple[int, ...]]:
    drawn = ours(
        model,
        {"input_ids": torch.tensor([PROMPT])},
        do_sample=True,
        temperature=three_tokens.TEMPERATURE,
        top_k=three_tokens.TOP_K,
        max_new_tokens=3,
        num_return_sequences=60,
        draft=head,
        **options,
    )
    return [tuple(row) for row in drawn[:, len(PROMPT) :].tolist()]


def drawn_from():
    return build(eos_token_id=None, num_hidden_layers=4)


def distribution(model) -> Distribution:
    """The probability of every three tokens, by the model's own forward in float64."""
    exact = drawn_from().double()
    exact.load_state_dict(model.state_dict())

    def after(output: list[int]) -> dict[int, float]:
        with torch.no_grad():
            logits = exact(torch.tensor([[*PROMPT, *output]])).logits[0, -1]
        kept = logits.topk(three_tokens.TOP_K)
        probs = torch.softmax(kept.values / three_tokens.TEMPERATURE, -1)
        return dict(zip(kept.indices.tolist(), probs.tolist(), strict=True))

    return joint(after)


@pytest.mark.parametrize("tree", [CHAIN, TREE], ids=["chain", "tree"])
def test_drawn_tokens_have_the_distribution_of_the_target(head, tree, monkeypatch):
    model = drawn_from()
    wanted = distribution(model)
    torch.manual_seed(7)
    assert p_value(draw(model, 8, head, spec_config=tree), wanted) > 1e-3
    three_tokens.accept_every_draft(monkeypatch)
    spoilt = p_value(draw(model, 5, head, spec_config=tree), wanted)
    assert spoilt < 1e-6, "the test would not see a wrong distribution"


def test_top_p_keeps_what_transformers_keeps(model, head):
    """With top-p below every largest probability, what is drawn is what is most probable."""
    options = {"max_new_tokens": NEW, "draft": head, "spec_config": TREE}
    drawn = ours(model, prompts(3), do_sample=True, top_p=1e-4, **options)
    assert torch.equal(drawn, ours(model, prompts(3), **options))


def test_manual_seed_repeats_a_call(model, head):
    def text(seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        options = {"do_sample": True, "temperature": 2.0, "max_new_tokens": NEW}
        return ours(model, prompts(3), **options, draft=head).tolist()

    assert text(1) == text(1) != text(2)
    state = torch.get_rng_state()
    ours(model, prompts(3), max_new_tokens=3)
    assert torch.equal(torch.get_rng_state(), state), "greedy decoding draws no seeds"


# -- the model is used as it is


class Fails(BaseStreamer):
    def __init__(self, error: BaseException) -> None:
        self.error, self.left = error, 4

    def put(self, value) -> None:
        self.left -= 1
        if not self.left:
            raise self.error

    def end(self) -> None: ...


@sampled(
    half,
    model_type=["llama", "gemma3_text"],
    error={"none": None, "error": RuntimeError("x"), "interrupt": KeyboardInterrupt()},
)
def test_a_model_is_left_as_it_was(model_type, head, error):
    model = build(model_type)
    want = model.generate(**prompts(3), max_new_tokens=NEW)
    model.set_attn_implementation("eager")
    model.model.layers[1].mlp.train()
    before = model.config.to_dict()
    modes = [module.training for module in model.modules()]
    grads = [one.requires_grad for one in model.parameters()]
    for _ in range(2):
        streamer = None if error is None else Fails(error)
        options = {"draft": head, "max_new_tokens": NEW, "streamer": streamer}
        if error is None:
            ours(model, prompts(3), **options)
        else:
            with pytest.raises(type(error)):
                ours(model, prompts(3), **options)
        assert model.config._attn_implementation == "eager"
        assert model.config.to_dict() == before
        assert [module.training for module in model.modules()] == modes
        assert [one.requires_grad for one in model.parameters()] == grads
    assert torch.equal(ours(model, prompts(3), max_new_tokens=NEW, draft=head), want)
    assert torch.equal(model.generate(**prompts(3), max_new_tokens=NEW), want)


def test_a_model_that_is_refused_is_left_as_it_was():
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("bloom", vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=2)
    ).eval()
    before = model.config._attn_implementation
    with pytest.raises(ModelError, match="bloom"):
        ours(model, {"input_ids": torch.tensor([[5, 6]])}, max_new_tokens=3)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("fused", [True, False])
def test_no_weight_is_held_twice(model, head, fused):
    with torch.no_grad():  # other tests have models of this seed
        for parameter in model.parameters():
            parameter.mul_(1.0173 + fused)
    parameters, before = dict(model.named_parameters()), model.state_dict()
    memory = {name: one.data_ptr() for name, one in before.items()}
    before = {name: one.clone() for name, one in before.items()}
    for _ in range(2):
        ours(model, prompts(3), max_new_tokens=5, draft=head, fused=fused)
    assert serving.SERVED[model].is_fused == fused
    for name, one in model.named_parameters():
        assert one is parameters[name]
        assert one.requires_grad
        assert (one.data_ptr() != memory[name]) == (fused and name.split(".")[-2] in PACKED), name
    assert all(torch.equal(one, before.pop(name)) for name, one in model.state_dict().items())
    # other tests may have left tensors of torch's compiler, which have no memory
    kinds = torch.Tensor, torch.nn.Parameter
    others = [one for one in gc.get_objects() if type(one) in kinds]
    for name, weight in parameters.items():
        for other in others:
            alike = (other.shape, other.dtype) == (weight.shape, weight.dtype)
            if alike and other.data_ptr() != weight.data_ptr():
                assert not torch.equal(other, weight), name


PACKED = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}


@pytest.mark.parametrize(("model_type", "again"), [("llama", 1), ("gemma3_text", 2)])
def test_a_model_that_is_trained_between_calls(model_type, again, made):
    """Fused layers read what an optimizer writes; sums of norms' weights are made anew."""
    model = build(model_type, eos_token_id=None, tie_word_embeddings=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    texts = []
    for _ in range(2):
        want = model.generate(**prompts(3), max_new_tokens=NEW)
        assert torch.equal(ours(model, prompts(3), max_new_tokens=NEW), want)
        texts.append(want.tolist())
        for one in model.parameters():
            one.grad = torch.randn_like(one)
        optimizer.step()
    assert texts[0] != texts[1]
    assert serving.SERVED[model].is_fused
    assert len(made) == again


class Doubled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def of_another_class(model):
    model.model.layers[1].mlp.down_proj.__class__ = Doubled


def with_a_forward(model):
    norm = model.model.layers[1].input_layernorm
    forward = norm.forward
    norm.forward = lambda x: -forward(x)


def hooked(model):
    model.model.layers[0].mlp.register_forward_hook(lambda part, args, out: out * 2)


def hooked_before(model):
    model.lm_head.register_forward_pre_hook(lambda part, args: (-args[0],))


def flattened(model):
    """As trainers that keep all parameters in one buffer."""
    flat = torch.cat([one.detach().flatten() for one in model.parameters()])
    for one, part in zip(
        model.parameters(), flat.split([one.numel() for one in model.parameters()]), strict=True
    ):
        one.data = part.view_as(one)


class Odd(torch.Tensor):
    """A kind of weights of its own."""


def of_another_kind(model):
    gate = model.model.layers[2].mlp.gate_proj
    gate.weight = torch.nn.Parameter(gate.weight.detach().as_subclass(Odd))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (of_another_class, r"model.layers.1.mlp.down_proj \(Doubled\) is a module of tests"),
        (with_a_forward, r"model.layers.1.input_layernorm \(.*\) has a forward of its own"),
        (hooked, r"model.layers.0.mlp \(LlamaMLP\) has a forward hook"),
        (hooked_before, r"lm_head \(Linear\) has a forward hook"),
        (flattened, "weights of model.layers.0 lie in memory that holds others, too"),
        (of_another_kind, r"model.layers.2.mlp.gate_proj \(Linear\) has a Odd"),
    ],
)
def test_what_a_fused_form_would_pass_over_is_run(model, change, why, caplog):
    plain = model.generate(**prompts(3), max_new_tokens=NEW)
    change(model)
    held = [one.data_ptr() for one in model.parameters()]
    want = model.generate(**prompts(3), max_new_tokens=NEW)
    assert torch.equal(plain, want) == (change in (flattened, of_another_kind))
    with caplog.at_level("INFO", "specattn"):
        assert torch.equal(ours(model, prompts(3), max_new_tokens=NEW), want)
    assert not serving.SERVED[model].is_fused
    assert re.search(f"LlamaForCausalLM is not fused: {why}", caplog.text)
    assert [one.data_ptr() for one in model.parameters()] == held


def test_a_form_may_be_asked_for_in_turn(model, made):
    want = model.generate(**prompts(3), max_new_tokens=NEW)
    for fused in (True, False, False, True):
        assert torch.equal(ours(model, prompts(3), max_new_tokens=NEW, fused=fused), want)
        assert serving.SERVED[model].is_fused == fused
    assert len(made) == 3


def test_a_fused_model_is_not_touched(model, head, monkeypatch):
    """After the first call, which looks at it."""
    ours(model, prompts(3), max_new_tokens=3, draft=head)

    def touched(*_, **__):
        raise AssertionError

    model.set_attn_implementation = model.eval = model.forward = touched
    served = serving.SERVED[model]
    for _ in range(2):
        ours(model, prompts(3), max_new_tokens=3, draft=head)
        ours(model, prompts(3), max_new_tokens=3)
    assert serving.SERVED[model] is served


def test_a_fused_model_is_saved_whole(model, tmp_path):
    want = ours(model, prompts(3), max_new_tokens=NEW)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(ours(again, prompts(3), max_new_tokens=NEW), want)
    assert serving.SERVED[again].is_fused


@pytest.mark.parametrize("bias", [False, True])
def test_a_released_model_has_weights_of_its_own(bias, tmp_path):
    """safetensors saves no model whose weights are parts of others' memory."""
    model = build(attention_bias=bias, mlp_bias=bias)
    held, want = dict(model.named_parameters()), ours(model, prompts(3), max_new_tokens=NEW)
    with pytest.raises(RuntimeError, match="None is covering the entire storage"):
        save_model(model, tmp_path / "model.safetensors")
    release(model)
    save_model(model, tmp_path / "model.safetensors")
    for name, one in model.named_parameters():
        assert one is held[name]
        assert one.untyped_storage().nbytes() == one.nbytes, name
    load_model(model, tmp_path / "model.safetensors")
    assert torch.equal(ours(model, prompts(3), max_new_tokens=NEW), want)
    assert serving.SERVED[model].is_fused


def without_a_weight(model):
    model.model.layers[1].self_attn.q_proj = torch.nn.Identity()


@pytest.mark.parametrize("change", [flattened, of_another_kind, without_a_weight])
def test_nobody_elses_memory_is_parted(model, change):
    change(model)
    held = [one.data_ptr() for one in model.parameters()]
    release(model)
    assert [one.data_ptr() for one in model.parameters()] == held


def test_logits_that_are_not_finite_end_the_call(model):
    with torch.no_grad():  # of tokens that no look at the model has seen
        model.model.embed_tokens.weight[5:].fill_(torch.nan)
    with pytest.raises(SpecAttnError, match="logits are NaN"):
        ours(model, prompts(2), max_new_tokens=3)
    assert model.config._attn_implementation == "sdpa"


def test_processors_that_leave_no_token_end_the_call(model):
    """An end that prefixes allow alone, and that is to come later."""
    asked = {"prefix_allowed_tokens_fn": lambda row, text: [EOS], "min_new_tokens": 2}
    with pytest.raises(SpecAttnError, match="the logits processors leave no token to choose"):
        ours(model, prompts(2), max_new_tokens=3, eos_token_id=EOS, **asked)


# -- what is kept from call to call


@pytest.fixture
def made(monkeypatch) -> list[SpecConfig]:
    """The settings of all engines that are built from here on."""
    settings: list[SpecConfig] = []

    class Counted(serving.Engine):
        def __init__(self, target, draft, config, **options) -> None:
            settings.append(config)
            super().__init__(target, draft, config, **options)

    monkeypatch.setattr(serving, "Engine", Counted)
    return settings


def test_a_second_call_reuses_the_engine(model, head, made):
    for rows, new in ((3, NEW), (4, NEW), (1, 40), (3, 3)):
        want = model.generate(**prompts(rows), max_new_tokens=new)
        assert torch.equal(ours(model, prompts(rows), max_new_tokens=new, draft=head), want)
    assert len(made) == 1 or [config.max_num_reqs for config in made] == [4, 4]
    had = len(made)
    want = model.generate(**prompts(8), max_new_tokens=NEW)
    for _ in range(2):
        assert torch.equal(ours(model, prompts(8), max_new_tokens=NEW, draft=head), want)
    assert len(made) == had + 1
    ours(model, prompts(1), max_new_tokens=NEW, draft=head)
    assert len(made) == had + 1
    release(model)
    ours(model, prompts(1), max_new_tokens=NEW, draft=head)
    assert len(made) == had + 2


def test_no_more_than_two_settings_are_kept(model, head, made):
    settings = [{}, {"draft": head}, {"draft": head, "spec_config": TREE}]
    for options in (*settings, *settings[1:], settings[0]):
        ours(model, prompts(1), max_new_tokens=3, **options)
    assert len(made) == 4
    assert len(serving.SERVED[model].engines) == 2


def test_nothing_keeps_a_model(head):
    model = build()
    ours(model, prompts(3), max_new_tokens=5, draft=head)
    watch = weakref.ref(model), weakref.ref(model.lm_head)
    gc.collect()  # models of other tests
    kept = len(serving.SERVED)
    del model
    gc.collect()
    assert [one() for one in watch] == [None, None]
    assert len(serving.SERVED) == kept - 1


def replace_weights(model):
    other = {name: one.flip(0).clone() for name, one in model.state_dict().items()}
    model.load_state_dict(other, assign=True)


@pytest.mark.parametrize("change", [replace_weights, torch.nn.Module.float], ids=["other", "dtype"])
def test_other_weights_are_seen(model, head, made, change):
    """Graphs have the old ones' addresses, and pools their dtype."""
    if change is not replace_weights:
        model.bfloat16()
    ours(model, prompts(3), max_new_tokens=NEW)
    change(model)
    want = model.generate(**prompts(3), max_new_tokens=NEW)
    assert torch.equal(ours(model, prompts(3), max_new_tokens=NEW), want)
    assert torch.equal(ours(model, prompts(3), max_new_tokens=NEW, draft=head), want)
    assert len(made) == 3


def test_inference_mode_may_come_and_go(model, head):
    want = model.generate(**prompts(3), max_new_tokens=NEW)
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            assert torch.equal(ours(model, prompts(3), max_new_tokens=NEW, draft=head), want)


def test_a_call_inside_a_call_is_refused(model):
    class Asks(Streamed):
        def put(self, value) -> None:
            super().put(value)
            if len(self.given) == 2:
                with pytest.raises(ValueError, match="another call"):
                    specattn.generate(model, **prompts(1), max_new_tokens=3)

    asks = Asks()
    ours(model, prompts(1), max_new_tokens=3, streamer=asks)
    assert len(asks.given) == 5
    assert model.config._attn_implementation == "sdpa"


# -- drafts


def test_a_draft_is_a_folder_or_a_loaded_head(model, head):
    want = model.generate(**prompts(3), max_new_tokens=NEW)
    loaded = load_draft(head, HFTarget.from_model(build()))
    for draft in (head, str(head), loaded):
        assert torch.equal(ours(model, prompts(3), max_new_tokens=NEW, draft=draft), want)


@pytest.mark.parametrize("tree", [SpecConfig(3, 1, 4), SpecConfig(3, 2, 7)], ids=str)
def test_a_whole_model_and_a_text_may_draft(model, tree):
    want = model.generate(**prompts(3), max_new_tokens=NEW)
    target = HFTarget.from_model(build())
    for draft in (LMDraft(target, target.vocab_size), LookupProposer(1, 3)):
        options = {"draft": draft, "spec_config": tree}
        assert torch.equal(ours(model, prompts(3), max_new_tokens=NEW, **options), want)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"draft": "shipped"}, ModelError, "the shipped draft"),
        ({"draft": "no/such/folder"}, ModelError, "no such folder"),
        ({"draft": 3}, ModelError, "draft must be"),
        ({"spec_config": CHAIN}, ValueError, "draft must be given"),
        ({"backend": "nobody"}, UnsupportedError, "nobody"),
    ],
)
def test_a_wrong_draft_is_named(model, options, error, match):
    with pytest.raises(error, match=match):
        ours(model, prompts(1), max_new_tokens=3, **options)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("lengths", [(9,), (12, 5), (30, 3, 7)])
def test_first_tokens_come_by_the_engines_chunks(model, monkeypatch, lengths):
    """The first token of a call is that of a captured chunk, of every call."""
    made = functools.partial(serving.Engine, prompt_buckets=(16, 48))
    monkeypatch.setattr(serving, "Engine", made)
    ids = torch.full((len(lengths), max(lengths)), PAD)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        # none shares a prefix with another, which would come one after the other
        ids[row, -length:] = torch.arange(5 * row, 5 * row + length) % (VOCAB - 3) + 3
        mask[row, -length:] = 1
    settings = {"attention_mask": mask, "max_new_tokens": 3, "do_sample": False}
    want = model.generate(ids, pad_token_id=PAD, **settings)
    for turn in (1, 2):
        got = model.generate(ids, pad_token_id=PAD, custom_generate=specattn.generate, **settings)
        assert got.equal(want)
        ((engine, _),) = serving.SERVED[model].engines.values()
        chunks = engine._admission.prompts
        assert not chunks.waits
        assert chunks.targets.stats.replays == {TARGET: turn, ADMIT: turn}
        assert chunks.firsts.stats.replays == {PromptPart(Phase.FIRST): turn}
        assert not chunks.targets.stats.eager


@pytest.mark.gpu
def test_chunks_inside_transformers_are_recorded():
    model = build().cuda()
    ids = torch.arange(3, 19, device="cuda")[None]
    model.generate(ids, max_new_tokens=3, custom_generate=specattn.generate)
    ((engine, _),) = serving.SERVED[model].engines.values()
    assert engine._admission.prompts.targets.recorded(TARGET)


@pytest.mark.gpu
def test_a_step_that_is_ahead_is_not_waited_for(monkeypatch):
    """Tokens that came are handed on from the host."""
    model, inputs = build().cuda(), {name: one.cuda() for name, one in prompts(3).items()}
    take, seen = _Columns.take, []

    def watched(self, results):
        torch.cuda.set_sync_debug_mode("error")
        try:
            seen.append(take(self, results))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return seen[-1]

    monkeypatch.setattr(_Columns, "take", watched)
    want, found = Streamed(), Streamed()
    model.generate(**inputs, max_new_tokens=NEW, streamer=want)
    out = ours(model, inputs, max_new_tokens=NEW, streamer=found)
    assert out.is_cuda
    assert found.given == want.given
    assert len(seen) > 2
