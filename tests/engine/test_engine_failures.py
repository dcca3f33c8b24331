"""What fails costs nobody else a token, a row or a slot."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch

from specattn.engine.engine import Engine, Request
from specattn.errors import CapacityError
from specattn.speculative.sampling.params import SamplingParams
from specattn.speculative.step.host_buffers import InFlight, PendingStep
from tests.books import check_books
from tests.engines import engine as tiny_engine
from tests.tiny import dense_greedy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = [[3, 14, 15, 9, 26, 5], [35, 2], [8, 9, 7, 9]]


def engine(models, rows=3, **options) -> Engine:
    options |= {"models": models, "backend": "torch_native"}
    return tiny_engine((3, 4, 9), context=96, rows=rows, buckets=(rows,), **options)


def unharmed(run: Engine, rows: int = 3) -> None:
    """Nothing is held, and a request that comes now is served."""
    assert run.num_running == 0
    assert not run.scheduler.waiting
    assert run.table.num_free_rows == rows
    check_books(run.table)
    (out,) = run.generate([Request([35, 2], 9)])
    assert out.tokens == dense_greedy(run.target.model, [35, 2], 9)


def test_requests_that_come_together_come_all_or_not_at_all(models):
    """The second shares the first one's prompt, so that it runs when the first one has; no slot."""
    shared = list(range(1, 30))
    # padding, who runs, the first prompt, and one of the two tokens that the second has by itself
    run = engine(models, num_slots=1 + len(PROMPTS[0]) + 30 + 1)
    run.add([Request(PROMPTS[0], 12), Request([7], 1)])
    with pytest.raises(CapacityError, match="more pages of 1 KV slots are needed"):
        run.add([Request([*shared, more], 9) for more in (31, 32)])
    assert run.table.num_free_rows == 2
    check_books(run.table)
    result = run.running[0].result
    while run.num_running:
        run.step()
    assert result.tokens == dense_greedy(models[0], PROMPTS[0], 12)
    unharmed(run)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_prompts_that_are_interrupted_hold_nothing(models, monkeypatch, error):
    run = engine(models)

    def stop(*_args, **_options):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(run.target.model, "forward", stop)
        with pytest.raises(error):
            run.add([Request(prompt, 9) for prompt in PROMPTS])
    unharmed(run)


@pytest.mark.parametrize("call", [1, 3, 4, 9])
def test_texts_that_cannot_be_made_lose_no_tokens_in_silence(models, call):
    """The step's other tokens are lost with the one that failed, so no request goes on."""
    calls = []

    def text(tokens):
        calls.append(1)
        if len(calls) == call:
            raise RuntimeError("no such text")
        return str(tokens)

    run = engine(models, detokenize=text)
    with pytest.raises(RuntimeError, match="no such text"):  # noqa: PT012
        run.add([Request(prompt, 20, stop=("end",)) for prompt in PROMPTS])
        while run.num_running:
            run.step(ahead=True)
    unharmed(run)


class Angry:
    """A grammar that allows all, and takes so many tokens."""

    left = 6

    def fill(self, tokens, parents, bitmask):
        pass

    def accept(self, tokens):
        self.left -= len(tokens)
        if self.left < 0:
            raise RuntimeError("no such text")


@pytest.mark.parametrize("ends", ["text", "grammar"])
def test_what_raises_leaves_outputs_whole(models, ends):
    """A token of a dropped request has its log-probability, and its step is counted."""

    def text(tokens):
        if 31 in tokens:
            raise RuntimeError("no such text")
        return str(tokens)

    run = engine(models, detokenize=text)
    asked = {"stop": ("end",)} if ends == "text" else {"grammar": Angry}
    params = SamplingParams(logprobs=2)
    prompts = [35, 2], [3]
    results = run.add([Request(prompts[0], 90, params), Request(prompts[1], 90, params, **asked)])
    with pytest.raises(RuntimeError, match="no such text"):  # noqa: PT012
        while True:
            run.step(ahead=True)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.finish_reason == "dropped"
        assert len(result.logprobs) == len(result.tokens) == 1 + sum(result.accept_lens)
        assert result.tokens == dense_greedy(models[0], prompt, len(result.tokens))
    assert results[0].steps > results[1].steps > 0
    unharmed(run)


def test_a_wait_that_is_interrupted_leaves_no_step_in_flight(models, monkeypatch):
    run, waits, wait = engine(models), [], PendingStep.wait

    def stop(pending):
        waits.append(1)
        if len(waits) == 3:
            raise KeyboardInterrupt
        return wait(pending)

    with monkeypatch.context() as patch:
        patch.setattr(PendingStep, "wait", stop)
        with pytest.raises(KeyboardInterrupt):
            run.generate([Request(prompt, 30) for prompt in PROMPTS])
    unharmed(run)


@pytest.mark.parametrize("ahead", [False, True], ids=["waited", "ahead"])
def test_a_launch_that_is_interrupted_loses_no_tokens_in_silence(models, monkeypatch, ahead):
    """Lengths have advanced on the device by then: the next step would begin past those tokens."""
    run, launches, launched = engine(models), [], InFlight.launched
    run.add([Request(prompt, 30) for prompt in PROMPTS])

    def stop(*step, **kind):
        pending = launched(*step, **kind)
        launches.append(1)
        if len(launches) == 3:
            raise KeyboardInterrupt
        return pending

    with monkeypatch.context() as patch:
        patch.setattr(InFlight, "launched", stop)
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            while run.num_running:
                run.step(ahead=ahead)
    unharmed(run)


def test_a_wait_that_is_interrupted_again_lets_nobody_go_on(models, monkeypatch):
    run, waits, wait = engine(models), [], PendingStep.wait
    run.add([Request(prompt, 30) for prompt in PROMPTS])

    def stop(pending):
        waits.append(1)
        if len(waits) > 2:
            raise KeyboardInterrupt
        return wait(pending)

    with monkeypatch.context() as patch:
        patch.setattr(PendingStep, "wait", stop)
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            while run.num_running:
                run.step(ahead=True)
    assert run.num_running == 0
    assert run.table.num_free_rows == 3
    run.clear()
    unharmed(run)


def test_a_bad_request_is_found_before_its_turn(models):
    """It would wait for rows; what runs already goes on."""
    run = engine(models, rows=2)
    (before,) = run.add([Request(PROMPTS[0], 12)])
    with pytest.raises(ValueError, match="prompt is empty"):
        run.generate([*(Request(prompt, 5) for prompt in PROMPTS), Request([])])
    assert run.num_running == 1
    while run.num_running:
        run.step()
    assert before.tokens == dense_greedy(models[0], PROMPTS[0], 12)
    unharmed(run, rows=2)


def test_whoever_runs_already_is_finished_too_and_not_told_of(models):
    run, told = engine(models), []
    (before,) = run.add([Request(PROMPTS[0], 12)])
    (out,) = run.generate([Request(PROMPTS[1], 5)], lambda at, new: told.append((at, new)))
    assert before.tokens == dense_greedy(models[0], PROMPTS[0], 12)
    assert [token for _, new in told for token in new] == out.tokens
    assert {at for at, _ in told} == {0}


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (lambda: Request([5, 61]), r"prompt tokens must be 0\.\.60, got 5\.\.61"),
        (lambda: Request([5, -1]), r"prompt tokens must be 0\.\.60, got -1\.\.5"),
        (
            lambda: Request([5], sampling=SamplingParams(1.0, top_k=2**31)),
            "top_k must be 0 .* below 2.*31, got 2147483648",
        ),
    ],
)
def test_numbers_that_no_tensor_can_hold_are_refused(models, request_, message):
    run = engine(models)
    with pytest.raises(ValueError, match=message):
        run.add([Request(PROMPTS[0]), request_()])
    unharmed(run)


def test_one_thread_at_a_time_calls_an_engine(models, monkeypatch):
    """The others are told so in a line, and harm nothing: another call, once it has returned."""
    run, forward = engine(models), models[0].forward
    inside, told = Event(), Event()

    def wait_inside(*args, **options):
        inside.set()
        assert told.wait(600)
        return forward(*args, **options)

    calls = {
        "generate": lambda: run.generate([Request(PROMPTS[0], 9)]),
        "add": lambda: run.add([Request(PROMPTS[1], 9)]),
        "step": run.step,
        "drop": lambda: run.drop(None),
        "clear": run.clear,
    }
    monkeypatch.setattr(models[0], "forward", wait_inside)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(calls["generate"])
        assert inside.wait(600)
        for call in calls.values():
            with pytest.raises(ValueError, match="from one thread at a time: a call of another"):
                threads.submit(call).result()
        told.set()
        (result,) = first.result()
        assert result.tokens == dense_greedy(models[0], PROMPTS[0], 9)
        monkeypatch.undo()
        (again,) = threads.submit(calls["generate"]).result()
        assert again.tokens == result.tokens
    unharmed(run)


def test_who_is_told_of_tokens_may_drop_and_add_but_not_generate(models):
    """``on_tokens`` is called between the steps, on the thread of `generate`."""
    run = engine(models, rows=2)
    requests, added, refused = [Request(prompt, 30) for prompt in PROMPTS], [], []

    def note(index: int, new: list[int]) -> None:
        first = [one for one in run.running if one.request is requests[0]]
        if index == 0 and first[0].result.steps == 2:
            run.drop(first[0].result)
            added.extend(run.add([Request([7], 3)]))
            with pytest.raises(ValueError, match="requests of another generate wait"):
                run.generate([Request([7], 3)])
            refused.append(index)

    first, *others = run.generate(requests, note)
    assert first.finish_reason == "dropped"
    assert refused == [0]
    for result, prompt, count in zip(
        [*others, *added], [*PROMPTS[1:], [7]], (30, 30, 3), strict=True
    ):
        assert result.tokens == dense_greedy(models[0], prompt, count)
    unharmed(run, rows=2)


def test_clear_while_requests_wait_ends_them_all(models):
    run, told = engine(models, rows=1), []

    def note(index: int, new: list[int]) -> None:
        told.append(index)
        if len(told) == 3:
            run.clear()

    results = run.generate([Request(prompt, 30) for prompt in PROMPTS], note)
    assert [result.finish_reason for result in results] == ["dropped"] * 3
    assert results[0].tokens
    assert set(told) == {0}
    unharmed(run, rows=1)
