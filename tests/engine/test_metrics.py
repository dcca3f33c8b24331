"""An engine's numbers are those of its outputs, and reading them waits for nothing."""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.engine.serving import AsyncEngine
from specattn.errors import CapacityError
from specattn.speculative.sampling.params import SamplingParams

TREE = SpecConfig(3, 4, 9, 48, 3, page_size=2)
SHARED = [7 * at % 61 for at in range(9)]
# they end by length, by a stop token, and by the context; the second shares the first one's prompt
REQUESTS = [
    Request([*SHARED, 5], 12),
    Request([*SHARED, 9], 20, stop_token_ids=range(30)),
    Request(list(range(1, 40)), 99),
    Request([3], 1),
    Request([35], 9, SamplingParams(0.8, seed=5)),
]


def make(models, config=TREE, **options) -> Engine:
    return Engine(*models, config, backend="torch_native", buckets=(3,), **options)


def same(found, requests, results) -> None:
    """What is counted is what was handed out."""
    assert found.prompt_tokens == sum(len(request.prompt) for request in requests)
    assert found.generated_tokens == sum(len(result.tokens) for result in results)
    assert found.finished == Counter(result.finish_reason for result in results)
    gains = [gained for result in results for gained in result.accept_lens]
    assert found.accept_lens == tuple(gains.count(gained) for gained in range(TREE.num_steps + 2))
    assert found.accepted_per_step == pytest.approx(sum(gains) / len(gains))
    kept = [sum(gained > depth for gained in gains) for depth in range(1, TREE.num_steps + 1)]
    assert found.accepted_by_position == tuple(kept)


def test_totals_are_those_of_the_outputs(models):
    run = make(models)
    results = run.generate(REQUESTS)
    found = run.metrics()
    same(found, REQUESTS, results)
    assert set(found.finished) == {"length", "stop", "context"}
    assert found.shared_tokens == 8
    assert (found.running, found.waiting, found.free_rows) == (0, 0, 3)
    assert found.free_slots == found.slots == 3 * 48
    # again: totals go on
    results += run.generate(REQUESTS[:2])
    same(run.metrics(), REQUESTS + REQUESTS[:2], results)
    assert json.loads(json.dumps(asdict(found)))["accept_lens"] == list(found.accept_lens)


def test_prompts_that_wait_for_one_another_are_counted(models):
    """Each shares more with the one before, so they run in three waves."""
    run = make(models)
    texts = [[*range(20)], [*range(8), *range(30, 42)], [*range(8), *range(30, 38), 50, 51]]
    asked = [Request(text, 4) for text in texts]
    results = run.add(asked)
    assert run.metrics().shared_tokens == 6 + 14
    while run.num_running:
        run.step()
    same(run.metrics(), asked, results)


def test_nothing_has_no_mean(models):
    found = make(models).metrics()
    assert found.accepted_per_step == 0
    assert found.accepted_by_position == (0, 0, 0)
    assert found.finished == {}


def test_requests_are_counted_where_they_are(models):
    run, asked, seen = make(models), [Request([at], 9 + at) for at in range(1, 6)], []
    run.generate(asked, lambda *_: seen.append(run.metrics()))
    for found in seen:
        assert found.running + found.waiting + sum(found.finished.values()) == len(asked)
        assert found.free_rows == 3 - found.running
        assert (found.free_slots < found.slots) == bool(found.running)
    assert max(found.waiting for found in seen) == 2
    assert max(found.running for found in seen) == 3


def test_drafts_are_counted_by_the_config_of_their_step(models):
    plain, turn = TREE.plain(), iter(range(99))
    run = make(models, configs=[plain], policy=lambda seen: seen.configs[next(turn) % 2])
    results = run.add([Request([3, 1], 20), Request([35], 20)])
    while run.running:
        run.step()
    found, used = run.metrics(), run.configs.used
    assert found.draft_steps == used[TREE] > 1
    assert found.verify_steps == used[TREE] + used[plain] == max(one.steps for one in results)
    assert found.drafts == run.configs.advanced[TREE]
    assert found.draft_tokens == 8 * found.drafts
    same(found, [Request([3, 1]), Request([35])], results)


def test_plain_decoding_that_is_no_config_counts_too(models):
    """Next to the context's end, without a draft."""
    run = make(models)
    (result,) = run.generate([REQUESTS[2]])
    found = run.metrics()
    assert found.verify_steps == result.steps > found.draft_steps == found.drafts > 0


def test_requests_that_are_dropped_or_never_run(models, monkeypatch):
    run, asked = make(models), [Request([*SHARED, 5], 12), Request([3, 1], 12)]
    results = run.add(asked)
    before, admit = run.metrics(), run.scheduler.admit

    def fail(items, *, whole):
        if items[0][0].max_new_tokens > 1:
            raise CapacityError("no more")
        return admit(items, whole=whole)

    with monkeypatch.context() as patch:
        patch.setattr(run.scheduler, "admit", fail)
        with pytest.raises(CapacityError):  # the first one ends before the second one comes
            run.add([Request([8] * 9, 1), Request([8] * 9, 2)])
    assert run.metrics() == before
    run.drop(results[0])
    assert run.metrics().finished == {"dropped": 1}
    run.step()
    run.clear()
    run.clear()
    same(run.metrics(), asked, results)

    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.generate(REQUESTS, stop)
    assert sum(run.metrics().finished.values()) == 2 + len(REQUESTS)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_requests_that_wait_when_a_call_ends_are_dropped_too(models, error):
    run, waiting = make(models), []

    def stop(*_):
        waiting.append(run.metrics().waiting)
        raise error

    with pytest.raises(error):
        run.generate([Request([at], 9) for at in range(1, 6)], stop)
    assert waiting == [2]
    assert run.metrics().finished == {"dropped": 5}
    assert (run.metrics().waiting, run.metrics().running) == (0, 0)


class NoTorch(TorchDispatchMode):
    """Lets torch compute nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} ran")


def test_any_thread_may_ask_while_a_call_runs(models):
    """Nothing is asked of the device, and no lock is taken."""

    def ask(of):
        with NoTorch():
            return of.metrics()

    run = make(models)
    with ThreadPoolExecutor(1) as other:
        told = []
        run.generate(REQUESTS[:1], lambda *_: told.append(other.submit(ask, run).result()))
    assert told[0].running == 1
    with AsyncEngine(run) as server:
        tokens = sum(len(output.tokens) for output in server.stream(REQUESTS[1]))
        found = ask(server)
    assert found.generated_tokens == 12 + tokens
