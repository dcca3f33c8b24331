"""Whole language models as drafts: what is emitted is the target's, and drafts read every token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.speculative.prompts.prefill import Prefill
from specattn.speculative.prompts.prompt import Prompt
from specattn.speculative.proposers.standalone import LMDraft
from specattn.speculative.sampling.params import SamplingBatch, SamplingParams
from specattn.speculative.step.decoder import StepDecoder
from specattn.speculative.step.setup import StepSetup
from tests.books import check_books
from tests.samples import half, on_cpu, sampled, star
from tests.speculative import three_tokens
from tests.speculative.test_host_plans import PlanningBackend
from tests.tiny import VOCAB, DenseAttend, TinyTarget, dense_greedy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = [[3, 14, 15, 9], [5], list(range(1, 30)), [7, 8] * 6]
TREES = {
    "chain": SpecConfig(3, 1, 4),
    "tree": SpecConfig(3, 3, 9),
    "wide": SpecConfig(2, 4, 21),
    "one": SpecConfig(1, 1, 2),
    "best first": SpecConfig(3, 1, 12, tree="best_first", ranks=4),
}
NEW = 20


@pytest.fixture(scope="module")
def target() -> TinyTarget:
    return TinyTarget(device=DEVICE)


@pytest.fixture(scope="module")
def wanted(target) -> list[list[int]]:
    return [dense_greedy(target, prompt, NEW) for prompt in PROMPTS]


def of(tree: str, context: int, requests: int) -> SpecConfig:
    return replace(TREES[tree], max_context_len=context, max_num_reqs=requests)


def another() -> LMDraft:
    """One layer more, and a window: right at times."""
    return LMDraft(TinyTarget(layers=3, window=6, heads=(2, 1), seed=5, device=DEVICE), VOCAB)


def poisoned(engine: Engine) -> Engine:
    """Let unwritten KV spoil whatever reads it; slot 0 is padding's, which is read."""
    for slot in (engine.target, engine.draft):
        slot.pool.k[:, 1:] = torch.nan
        slot.pool.v[:, 1:] = torch.nan
    return engine


def run(engine: Engine) -> list[list[int]]:
    results = engine.generate([Request(prompt, NEW) for prompt in PROMPTS])
    return [result.tokens for result in results]


@sampled(
    star,
    tree=["tree", *(name for name in TREES if name != "tree")],
    options={
        "default": {},
        "torch": {"backend": "torch_native"},
        "piecewise": {"cudagraph": "piecewise"},
        "host plans": {"backend": PlanningBackend},
        "csr": {"indices": "csr"},
        "tbo": {"tbo": True},
    },
)
def test_greedy_tokens_are_those_of_plain_decoding(target, wanted, tree, options) -> None:
    config = of(tree, 64, 3)
    engine = poisoned(Engine(target, another(), config, buckets=[1, 3], **options))
    assert run(engine) == wanted
    check_books(engine.table)


@on_cpu(half, "chunk", "tree")
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("chunk", [4096, 5])
def test_a_draft_like_the_target_is_always_right(target, wanted, tree, chunk) -> None:
    """So it has read every token at its own position, the bonus token included."""
    steps = TREES[tree].num_steps
    config = of(tree, 64, 4)
    engine = poisoned(Engine(target, LMDraft(target, VOCAB), config, buckets=[4]))
    engine._admission.prompts.chunk = chunk
    for _ in range(2):  # over slots that hold other texts the second time
        results = engine.generate([Request(prompt, NEW) for prompt in PROMPTS])
        assert [result.tokens for result in results] == wanted
        for result in results:
            if tree in ("chain", "one"):  # a tree may lack the path of the best tokens
                assert set(result.accept_lens[:-1]) == {steps + 1}
            assert max(result.accept_lens) == steps + 1


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_shared_prefix_drafts_as_a_cold_one(target, page_size) -> None:
    shared = list(range(1, 25))
    config = SpecConfig(3, 1, 4, 96, 2, page_size)
    # prompts that a graph replays call no forward
    options = {"buckets": [1, 2], "prompt_buckets": ()}
    engine = poisoned(Engine(target, LMDraft(target, VOCAB), config, **options))
    engine.add([Request([*shared, 33], 40)])
    for _ in range(3):
        engine.step()
    target.calls.clear()
    (late,) = engine.add([Request([*shared, 44, 45], 13)])
    assert 26 - 24 <= target.calls[0] < 26, "the prompt runs behind a prefix"
    while engine.num_running:
        engine.step()
    assert late.tokens == dense_greedy(target, [*shared, 44, 45], 13)
    assert set(late.accept_lens[:-1]) == {4}


def test_a_context_ends_with_its_last_slot(target) -> None:
    for tree in TREES:
        config = of(tree, 33, 4)
        engine = poisoned(Engine(target, another(), config, buckets=[4]))
        prompts = [*PROMPTS, list(range(1, 34))]
        results = engine.generate([Request(prompt, 99) for prompt in prompts])
        for prompt, result in zip(prompts, results, strict=True):
            assert result.tokens == dense_greedy(target, prompt, 34 - len(prompt))
            assert result.finish_reason == "context"


@pytest.mark.parametrize("at", [0, 1, 3], ids=["first", "second", "last"])
@pytest.mark.parametrize("chunk", [4096, 40])
def test_a_prompt_that_fills_its_context_leaves_the_drafts_of_others(target, at, chunk) -> None:
    """Only it has no bonus token to read; the draft is the target, and so always right."""
    config, prompts = of("chain", 33, 4), [[3, 14, 15, 9], [5], [7, 8] * 6]
    engine = poisoned(Engine(target, LMDraft(target, VOCAB), config, buckets=[4]))
    engine._admission.prompts.chunk = chunk
    prompts.insert(at, list(range(1, 34)))
    results = engine.generate([Request(prompt, 14) for prompt in prompts])
    assert results[at].finish_reason == "context"
    for prompt, result in zip(prompts, results, strict=True):
        assert result.tokens == dense_greedy(target, prompt, min(14, 34 - len(prompt)))
        assert set(result.accept_lens[:-1]) == ({4} if len(prompt) < 33 else set())


def test_configs_may_alternate_with_plain_decoding(target, wanted) -> None:
    """Plain steps keep the draft up to date."""
    main, plain = SpecConfig(3, 1, 4, 64, 4), SpecConfig(0, 1, 1, 64, 4)
    turns = iter(range(1000))

    def policy(observed):
        return observed.configs[next(turns) % len(observed.configs)]

    draft = LMDraft(target, VOCAB)
    engine = poisoned(Engine(target, draft, main, configs=[plain], policy=policy, buckets=[4]))
    results = engine.generate([Request(prompt, NEW) for prompt in PROMPTS])
    assert [result.tokens for result in results] == wanted
    for result in results:
        assert set(result.accept_lens[:-1]) == {1, 4}


@pytest.mark.parametrize(("own", "padded"), [(VOCAB - 6, 0), (VOCAB, 3)])
@pytest.mark.parametrize("tree", ["chain", "tree"])
def test_vocabularies_may_be_padded(target, wanted, tree, own, padded) -> None:
    """Tokens that one of the two has not are read as another, and never proposed."""

    class Padded(TinyTarget):
        vocab_size = own + padded

        def forward(self, input_ids, positions, attend, rows=None):
            assert DEVICE == "cuda" or (input_ids < self.vocab_size).all()
            out = super().forward(input_ids, positions, attend, rows)
            wide = torch.nn.functional.pad(out.logits, (0, padded), value=99.0)
            return replace(out, logits=wide[:, : self.vocab_size])

    draft = LMDraft(Padded(device=DEVICE), VOCAB)
    assert draft.vocab_size == own
    config = of(tree, 64, 3)
    engine = Engine(target, draft, config, buckets=[3])
    results = engine.generate([Request(prompt, NEW) for prompt in PROMPTS])
    assert [result.tokens for result in results] == wanted
    assert max(n for result in results for n in result.accept_lens) == 4


def test_a_loop_of_ones_own_reserves_what_the_draft_writes(target) -> None:
    config = SpecConfig(3, 1, 4, 64, 2)
    draft = LMDraft(target, VOCAB)
    setup = StepSetup.over(target, draft, config, backend="torch_native")
    with pytest.raises(ValueError, match=r"reserve_len must be at least 5, .* got 4: use config"):
        StepDecoder.of(setup)
    config = config.reserving(draft.draft_len(config))
    assert config.reserving(3) is config
    setup = replace(setup, config=config)
    decoder, table, proposer = StepDecoder.of(setup), setup.table, setup.proposer
    row, prompt = table.allocate(), [3, 14, 15, 9]
    table.reserve([row], [len(prompt) + proposer.read_ahead])
    sampling = SamplingBatch.of((SamplingParams(),), target.device)
    out = Prefill.of(setup).run([Prompt(row, prompt)], sampling)
    where = torch.tensor([row], device=target.device)
    lens = torch.tensor([len(prompt)], dtype=torch.int32, device=target.device)
    setup.states.admit(where, lens, out.bonus_tokens, out.state, sampling)
    tokens = out.bonus_tokens.tolist()
    while len(tokens) < NEW:
        table.reserve([row], [len(prompt) + len(tokens) - 1 + config.reserve_len])
        (gained,) = decoder.step([row])
        assert len(gained) == 4
        tokens += gained
    assert tokens == dense_greedy(target, prompt, len(tokens))


def test_drafts_keep_the_keys_of_every_token(target) -> None:
    """As one forward over the whole text leaves them, up to the bonus token's."""
    draft = another()
    config = SpecConfig(3, 3, 9, 64, 2)
    engine = poisoned(Engine(target, draft, config, buckets=[2]))
    engine.add([Request([3, 14, 15, 9], 30), Request([5], 30)])
    for _ in range(4):
        engine.step()
    for live in engine.running:
        text = [*live.request.prompt, *live.result.tokens]
        assert len(text) == live.length + 1
        dense = DenseAttend(draft.layers)
        ids = torch.tensor(text, device=DEVICE)
        draft.model(ids, torch.arange(len(text), device=DEVICE), dense)
        slots = engine.table.req_to_token[live.row, : len(text)].long()
        for layer, (keys, values) in enumerate(dense.kv):
            for cache, want in ((engine.draft.pool.k, keys), (engine.draft.pool.v, values)):
                got = cache[layer, slots]
                assert (got - want).norm() <= 2e-5 * want.norm()


@pytest.fixture(scope="module")
def models() -> tuple[TinyTarget, LMDraft]:
    return TinyTarget(device=DEVICE, sharp=1.0), LMDraft(
        TinyTarget(device=DEVICE, sharp=6.0, seed=4), VOCAB
    )


SETTINGS = three_tokens.SETTINGS | {
    "best first": SpecConfig(2, 1, 7, 32, 250, tree="best_first", ranks=3)
}


def p_value(models, name: str) -> float:
    wanted = three_tokens.distribution(models[0], three_tokens.PROMPT)
    run = Engine(*models, SETTINGS[name], buckets=[250])
    return three_tokens.drawn_p_value(run, wanted)


@pytest.mark.parametrize("name", ["chain", "tree", "best first", "rejection"])
def test_three_tokens_have_the_targets_joint_distribution(models, name) -> None:
    assert p_value(models, name) > 1e-3


def test_a_lenient_rejection_fails_the_same_test(models, monkeypatch) -> None:
    three_tokens.accept_every_draft(monkeypatch)
    assert p_value(models, "rejection") < 1e-10


@pytest.mark.gpu
@pytest.mark.parametrize("tree", TREES)
def test_replays_give_what_plain_decoding_does(target, wanted, tree) -> None:
    config = of(tree, 64, 4)
    engine = Engine(target, another(), config, buckets=[4], sampled=True)
    assert run(engine) == wanted
    assert run(engine) == wanted
    assert not engine.decoder(engine.config).runner.stats.eager
