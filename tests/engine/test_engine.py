"""Greedy speculation equals greedy decoding, whatever the tree, the batch and the pages."""

from __future__ import annotations

import pytest
import torch

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.speculative.sampling.params import SamplingParams
from tests.books import check_books
from tests.samples import sampled
from tests.tiny import TinyDraft, TinyTarget, dense_greedy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = [[3, 14, 15, 9, 26, 5], [35], list(range(1, 40)), [58, 9, 7, 9, 3]]
TREES = {
    "plain": (0, 1, 1),
    "one_step": (1, 1, 2),
    "chain": (5, 1, 6),
    "wide": (3, 2, 6),
    "topk4": (4, 4, 16),
    "topk8_deep": (5, 8, 32),
    "few_nodes": (5, 4, 4),
    "fewest_nodes": (2, 2, 2),
    "one_step_wide": (1, 8, 9),
    "past_a_word": (4, 8, 70),
}


@pytest.fixture(scope="module")
def models():
    return TinyTarget(device=DEVICE, window=9), TinyDraft(device=DEVICE)


@pytest.fixture(scope="module")
def expected(models):
    return [dense_greedy(models[0], prompt, 40) for prompt in PROMPTS]


def engine(models, tree, **over) -> Engine:
    steps, topk, nodes = tree
    settings = {"max_context_len": 128, "max_num_reqs": 4, "page_size": 1}
    rest = {k: over.pop(k) for k in list(over) if k not in settings}
    config = SpecConfig(steps, topk, nodes, **(settings | over))
    return Engine(*models, config, **{"buckets": [config.max_num_reqs]} | rest)


def letters(tokens) -> str:
    return "".join(chr(ord("A") + token) for token in tokens)


@sampled(lambda tree, size: tree % 5 == size, tree=TREES, page_size=[1, 16, 2, 64, 512])
def test_greedy_speculation_equals_greedy_decoding(models, expected, tree, page_size):
    """Also with pages larger than the context, at topk > 1."""
    run = engine(models, tree, page_size=page_size, buckets=None)
    out = run.generate([Request(p, max_new_tokens=40 - i) for i, p in enumerate(PROMPTS)])
    for i, (result, want) in enumerate(zip(out, expected, strict=True)):
        assert result.tokens == want[: 40 - i]
        assert result.finish_reason == "length"
    check_books(run.table)
    assert run.table.num_free_rows == 4
    if tree[0] > 1 and tree[2] > 2:
        assert max(n for r in out for n in r.accept_lens) > 2, "nothing was ever accepted"


@pytest.mark.parametrize("tree", ["topk4", "wide", "topk8_deep", "chain"])
def test_shared_csr_rows_give_the_same_tokens_as_the_request_table(models, tree):
    """The drafts are equal too: as many tokens are accepted in every step."""
    runs = [
        engine(models, TREES[tree], indices=indices).generate(
            [Request(p, max_new_tokens=24) for p in PROMPTS]
        )
        for indices in ("table", "csr")
    ]
    for table, csr in zip(*runs, strict=True):
        assert table.tokens == csr.tokens
        assert table.accept_lens == csr.accept_lens


@pytest.mark.parametrize("tree", ["plain", "chain", "topk4", "one_step_wide"])
def test_near_the_context_limit_steps_shrink_instead_of_raising(models, expected, tree):
    """R32. Prompts up to the context itself; each request fills its context to the last slot."""
    limit = 48
    run = engine(models, TREES[tree], max_context_len=limit)
    prompts = [*PROMPTS, list(range(1, 45)), list(range(1, 49))]
    out = run.generate([Request(p, max_new_tokens=100) for p in prompts])
    for result, prompt in zip(out, prompts, strict=True):
        assert result.finish_reason == "context"
        assert len(prompt) + len(result.tokens) == limit + 1, "the last token has no slot"
        assert result.tokens == dense_greedy(models[0], prompt, len(result.tokens))
    check_books(run.table)


@pytest.mark.parametrize("tree", ["chain", "topk4"])
def test_near_the_context_limit_requests_go_on_drawing(models, tree):
    """Plain decoding is captured for drawn tokens, too, when a request comes to it."""
    run = engine(models, TREES[tree], max_context_len=24)
    drawn = SamplingParams(1.0, seed=3)
    out = run.generate([Request([3, 1, 4], 99, drawn), Request([35], 99)])
    assert [r.finish_reason for r in out] == ["context", "context"]
    assert out[1].tokens == dense_greedy(models[0], [35], len(out[1].tokens))
    check_books(run.table)


def test_requests_of_a_batch_finish_independently(models, expected):
    run = engine(models, TREES["topk4"])
    counts = [1, 2, 17, 40]
    out = run.generate([Request(p, max_new_tokens=n) for p, n in zip(PROMPTS, counts, strict=True)])
    for result, want, count in zip(out, expected, counts, strict=True):
        assert result.tokens == want[:count]
    assert out[0].steps == 0, "one token comes from the prompt itself"


def test_more_requests_than_rows_wait_their_turn(models, expected):
    run = engine(models, TREES["wide"], max_num_reqs=2)
    seen: dict[int, list[int]] = {}
    out = run.generate(
        [Request(p, max_new_tokens=20) for p in PROMPTS],
        on_tokens=lambda i, new: seen.setdefault(i, []).extend(new),
    )
    for i, (result, want) in enumerate(zip(out, expected, strict=True)):
        assert result.tokens == want[:20] == seen[i]


def test_a_pool_without_slots_for_a_step_ahead_is_stepped_without(models, expected):
    room = len(PROMPTS[0]) + 40 + SpecConfig(*TREES["wide"]).reserve_len - 1
    run = engine(models, TREES["wide"], num_slots=room)
    (result,) = run.generate([Request(PROMPTS[0], max_new_tokens=40)])
    assert result.tokens == expected[0]
    check_books(run.table)


def test_models_that_could_be_trained_leave_no_history(expected):
    """Buffers outlive steps: with a history, every step would keep those before it alive."""
    target, draft = TinyTarget(device=DEVICE, window=9), TinyDraft(device=DEVICE)
    for model in (target, draft):
        model.requires_grad_(True)
    run = engine((target, draft), TREES["wide"])
    (result,) = run.generate([Request(PROMPTS[0], max_new_tokens=20)])
    assert result.tokens == expected[0][:20]
    kept = [*run.states.tensors().values(), run.target.pool.k, run.draft.pool.k]
    assert not any(tensor.requires_grad for tensor in kept)


def test_end_of_text_inside_an_accepted_path_truncates_there(models, expected):
    class Ending(TinyTarget):
        eos_token_ids = frozenset([expected[0][9]])

    target = Ending(device=DEVICE, window=9)
    want = expected[0][: expected[0].index(expected[0][9]) + 1]
    for name in ("plain", "chain", "topk4", "topk8_deep"):
        run = engine((target, models[1]), TREES[name])
        (out,) = run.generate([Request(PROMPTS[0], max_new_tokens=40)])
        assert (out.tokens, out.finish_reason) == (want, "eos")
        (out,) = run.generate([Request(PROMPTS[0], max_new_tokens=40, ignore_eos=True)])
        assert out.tokens == expected[0]


def test_a_stop_string_truncates_at_the_token_that_completes_it(models, expected):
    want = expected[2]
    stop = letters(want[6:9])
    first = letters(want).index(stop) + len(stop)
    run = engine(models, TREES["topk8_deep"], detokenize=letters)
    (out,) = run.generate([Request(PROMPTS[2], max_new_tokens=40, stop=("~~", stop))])
    assert (out.tokens, out.finish_reason) == (want[:first], "stop")


def test_a_stop_string_may_begin_with_the_space_before_the_first_token(models, expected):
    """Many tokenizers drop the space before the first of the tokens they are given."""

    def text(tokens):
        return "".join(f" {token}" for token in tokens).removeprefix(" ")

    run = engine(models, TREES["topk8_deep"], detokenize=text)
    stop = f" {expected[2][0]}"
    (out,) = run.generate([Request(PROMPTS[2], max_new_tokens=40, stop=(stop,))])
    assert (out.tokens, out.finish_reason) == (expected[2][:1], "stop")


def test_stop_strings_are_looked_for_in_new_text_alone(models):
    asked = []

    def text(tokens):
        asked.append(len(tokens))
        return letters(tokens)

    run = engine(models, TREES["topk8_deep"], detokenize=text)
    (out,) = run.generate([Request(PROMPTS[2], max_new_tokens=60, stop=("~~",), ignore_eos=True)])
    assert len(out.tokens) == 60
    long = [count for count in asked if count > 40]
    assert long == [len(PROMPTS[2][-8:]) + 60], "the output's text; else each token takes longer"


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        ("", "stop must be texts that are not empty, got ''"),
        (("END", ""), "stop must be texts that are not empty, got ''"),
        ((b"END",), "stop must be texts that are not empty, got b'END'"),
    ],
)
def test_stop_strings_that_end_any_text_are_refused(stop, message):
    with pytest.raises(ValueError, match=message):
        Request([1], stop=stop)


def test_stop_strings_stay_those_that_were_given(models, expected):
    stop = ["~~"]
    run = engine(models, TREES["chain"], detokenize=letters)
    (out,) = run.add([Request(PROMPTS[2], 40, stop=stop)])
    stop[:] = [letters(expected[2][3:5])]
    while run.num_running:
        run.step()
    assert (out.tokens, out.finish_reason) == (expected[2], "length")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([]), "prompt is empty"),
        (Request([1] * 129), "129 tokens, the context holds 128"),
        (Request([1], max_new_tokens=0), "max_new_tokens"),
        (Request([1], stop=("x",)), "detokenize"),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(models, request_, message):
    run = engine(models, TREES["wide"])
    with pytest.raises(ValueError, match=message):
        run.generate([Request([1, 2]), request_])
    check_books(run.table)
    assert run.num_running == 0
    assert run.table.num_free_rows == 4


def test_prompts_may_be_made_in_one_list_that_is_filled_again(models):
    """What ran with a prompt goes on with it, and shares it with nobody of another text."""
    shared = list(range(1, 21))
    texts = [[*shared, 5], [*shared[:3], *shared[:3:-1], 9], [*shared[::-1], 40, 41]]
    run, prompt, results = engine(models, TREES["chain"], page_size=4), [], []
    for text in texts:
        prompt[:] = text
        results += run.add([Request(prompt, 12)])
        run.step()
    while run.num_running:
        run.step()
    assert [r.tokens for r in results] == [dense_greedy(models[0], text, 12) for text in texts]


@pytest.mark.parametrize("prompt", [[1, 2.5], ["a", "text"], [[1, 2]], [None]], ids=str)
def test_prompts_of_no_whole_numbers_are_refused(prompt):
    with pytest.raises(ValueError, match="every prompt token must be a whole number, got "):
        Request(prompt)


@pytest.mark.parametrize("tree", ["plain", "chain", "topk4"])
def test_a_request_draws_the_same_tokens_in_any_batch(models, tree):
    """Coins depend on seed and position; greedy and sampled requests mix."""
    params = [
        SamplingParams(0.8, seed=5),
        SamplingParams(),
        SamplingParams(1.3, 7, 0.9, seed=6),
        SamplingParams(1.0, top_p=0.8, seed=7),
    ]
    requests = [Request(p, 16, s) for p, s in zip(PROMPTS, params, strict=True)]
    together = engine(models, TREES[tree]).generate(requests)
    run = engine(models, TREES[tree], max_num_reqs=3)
    backwards = run.generate(requests[::-1])[::-1]
    alone = [run.generate([r])[0] for r in requests]
    for a, b, c in zip(together, backwards, alone, strict=True):
        assert a.tokens == b.tokens == c.tokens
    (other,) = run.generate([Request(PROMPTS[0], 16, SamplingParams(0.8, seed=8))])
    assert other.tokens != together[0].tokens


@pytest.mark.parametrize("page_size", [1, 8])
def test_a_prefix_hit_equals_a_cold_run(models, page_size):
    """R53: tokens, drafts (as many accepted in every step) and slots, with one sharer freed."""
    long = [7 * i % 61 for i in range(50)]
    prompts = [[*long, 5, 6], [*long, 9], long[:40], [*long, 5, 6]]
    cold = [
        engine(models, TREES["topk4"], page_size=page_size).generate([Request(p, 20)])[0]
        for p in prompts
    ]
    # a graph would not call the target
    run = engine(models, TREES["topk4"], page_size=page_size, prompt_buckets=())
    before = models[0].calls
    before.clear()
    first, *rest = run.add([Request(prompts[0], 3), *(Request(p, 20) for p in prompts[1:])])
    assert before[0] < 60, "one request runs the prefix"
    assert sum(before) < 52 + 3 * 20, "the others run only what they do not share"
    while run.num_running:
        run.step()
        check_books(run.table)
    assert first.tokens == cold[0].tokens[:3]
    for hit, want in zip(rest, cold[1:], strict=True):
        assert hit.tokens == want.tokens
        assert hit.accept_lens == want.accept_lens


def test_prompts_are_run_in_pieces_of_bounded_size(models, expected):
    run = engine(models, TREES["topk4"], prompt_buckets=(), prompt_chunk=7)
    models[0].calls.clear()
    out = run.generate([Request(p, max_new_tokens=10) for p in PROMPTS])
    assert max(models[0].calls[:8]) == 7
    for result, want in zip(out, expected, strict=True):
        assert result.tokens == want[:10]


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU every test here runs the Triton backend")
@pytest.mark.parametrize(
    ("tree", "page_size", "indices"),
    [("chain", 1, "table"), ("topk4", 16, "table"), ("wide", 4, "csr")],
)
def test_the_interpreter_gives_the_same_tokens(models, expected, tree, page_size, indices):
    run = engine(
        models, TREES[tree], page_size=page_size, indices=indices, backend="triton", buckets=[2]
    )
    out = run.generate([Request(p, max_new_tokens=8) for p in PROMPTS[:2]])
    for result, want in zip(out, expected, strict=False):
        assert result.tokens == want[:8]


@pytest.mark.parametrize("tree", ["plain", "topk4"])
def test_every_parameter_reaches_the_steps_and_leaves_with_its_request(models, expected, tree):
    """What leaves one token to draw is greedy; rows that had it draw like new ones afterwards."""
    params = [
        SamplingParams(1.5, top_k=1),
        SamplingParams(1.5, top_p=1e-6, seed=3),
        SamplingParams(1e-5, seed=4),
        SamplingParams(),
    ]
    run = engine(models, TREES[tree])
    out = run.generate([Request(p, 20, s) for p, s in zip(PROMPTS, params, strict=True)])
    assert [r.tokens for r in out] == [want[:20] for want in expected]
    free = [Request(p, 20, SamplingParams(1.5, seed=i)) for i, p in enumerate(PROMPTS)]
    again, fresh = run.generate(free), engine(models, TREES[tree]).generate(free)
    assert [r.tokens for r in again] == [r.tokens for r in fresh]
    assert all(r.tokens != want[:20] for r, want in zip(again, expected, strict=True))


@pytest.mark.parametrize("page_size", [1, 8])
def test_what_a_request_has_generated_is_shared_too(models, expected, page_size):
    """A turn that follows on another one's text, which is still being written."""
    run = engine(models, TREES["topk4"], page_size=page_size, prompt_buckets=())
    told = PROMPTS[2]
    (first,) = run.add([Request(told, 40)])
    while len(first.tokens) < 24:
        run.step(ahead=True)
    prompt = [*told, *first.tokens[:20], 5]
    models[0].calls.clear()
    (second,) = run.add([Request(prompt, 8)])
    shared = (len(prompt) - 2) // page_size * page_size
    assert models[0].calls == [len(prompt) - shared]
    while run.num_running:
        run.step(ahead=True)
    run.clear()
    check_books(run.table)
    assert first.tokens == expected[2]
    assert second.tokens == dense_greedy(models[0], prompt, 8)


def test_a_context_beyond_the_targets_is_told(models, caplog) -> None:
    for longest in (4096, 4097):
        caplog.clear()
        engine(models, (0, 1, 1), max_context_len=longest, max_num_reqs=1, graphs=False)
        assert ("max_context_len 4097 is above" in caplog.text) == (longest > 4096)
