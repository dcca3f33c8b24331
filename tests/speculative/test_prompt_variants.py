"""Later prompts launch what was compiled for the first ones, however many or long they are."""

from __future__ import annotations

import inspect
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from bench.random_models import random_eagle3, random_target
from bench.tools.compile_targets import HOPPER, Launch, Notes
from specattn.attention import Attention
from specattn.backends import triton as triton_backend
from specattn.config import AttnConfig, SpecConfig
from specattn.models.fused import projection
from specattn.speculative.prompts.prefill import Prefill
from specattn.speculative.prompts.prompt import Prompt
from specattn.speculative.prompts.runner import NewPrompt, PromptRunner
from specattn.speculative.proposers.lookup import LookupProposer
from specattn.speculative.proposers.standalone import LMDraft
from specattn.speculative.sampling.params import SamplingBatch, SamplingParams
from specattn.speculative.step.level import Level
from specattn.speculative.step.setup import StepSetup
from tests.tiny import TinyTarget

if TYPE_CHECKING:
    from collections.abc import Sequence

CPU = torch.device("cpu")
MOST, LONGEST = 8, 400
SLOTS = MOST * (LONGEST + 1) + 1
CONFIG = SpecConfig(3, 1, 4, LONGEST + 8, MOST)
LLAMA = LlamaConfig(
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=64,
    num_hidden_layers=2,
    vocab_size=96,
    max_position_embeddings=LONGEST + 8,
)


def variant(launch: Launch) -> tuple[Any, ...]:
    """Return what Triton compiles a launch for: constants, types, and what it knows of numbers."""
    kernel, parameters = launch.kernel, inspect.signature(launch.kernel.fn).parameters
    constants = {name for name, one in parameters.items() if "constexpr" in str(one.annotation)}
    # the interpreter keeps a decorator's arguments
    given = kernel.kwargs if hasattr(kernel, "kwargs") else vars(kernel)
    plain = given.get("do_not_specialize") or ()

    def known(name: str, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(known(name, one) for one in value)
        if isinstance(value, Tensor):
            return value.dtype, name in plain or value.data_ptr() % 16 == 0
        if name in constants or value is None:
            return value
        if name in plain or not isinstance(value, int):
            return type(value)
        return value == 1, value % 16 == 0

    # the rest are options of the compiler
    found = {
        name: known(name, value) if name in parameters else value
        for name, value in launch.arguments.items()
    }
    return launch.name, *sorted(found.items())


def models(kind: str) -> tuple[Any, Any]:
    """Return a target and a draft, fused unless keys and values are stored by themselves."""
    if kind == "stored apart":
        return TinyTarget(device=CPU), None
    target = random_target(LLAMA, dtype=torch.float16, device=CPU)
    if kind == "model":
        return target, LMDraft(random_target(LLAMA, dtype=torch.float16, device=CPU), 96)
    if kind == "lookup":
        return target, LookupProposer()
    head = random_eagle3(LLAMA, target, 32)
    return target.with_features(head.features), head


def prefill(target: Any, draft: Any) -> Prefill:
    setup = StepSetup.over(target, draft, CONFIG, num_slots=SLOTS, backend="triton")
    table = torch.ones(MOST + 1, CONFIG.max_context_len, dtype=torch.int32)
    return replace(Prefill.of(setup), table=table)


def launched(
    run: Prefill, lengths: Sequence[int], temperature: float = 0.0
) -> set[tuple[Any, ...]]:
    """Return what prompts of these lengths are compiled for.

    Nothing is computed: the launches are those of a GPU, over tensors of the CPU.
    """
    prompts = [Prompt(1 + row, [1] * length) for row, length in enumerate(lengths)]
    params = [SamplingParams(temperature, seed=row) for row in range(len(prompts))]
    with Notes(HOPPER).taken() as notes:
        run.run(prompts, SamplingBatch.of(params, CPU))
    return {variant(launch) for launch in notes.launches}


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "platform_reasons", lambda *_: [])
    monkeypatch.setattr(triton_backend, "interpret", lambda: None)
    # nothing is computed, and a CPU is slow in float16
    monkeypatch.setattr(projection, "linear", lambda x, weight, _: x.new_zeros(len(x), len(weight)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["stored apart", "model", "eagle3", "lookup"])
def test_no_number_or_length_of_prompts_compiles_a_kernel(kind: str, temperature: float) -> None:
    """A user would wait for it, amid the texts of others."""
    rng, run = random.Random(0), prefill(*models(kind))
    first = set().union(*(launched(run, [50] * n, temperature) for n in (1, 2)))
    assert len(first) > 3
    for _ in range(12):
        lengths = [rng.randint(2, LONGEST) for _ in range(rng.randint(1, MOST))]
        assert launched(run, lengths, temperature) <= first, lengths


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["stored apart", "model", "eagle3", "lookup"])
def test_nor_where_chunks_run_eagerly_and_nobody_waits(kind: str, temperature: float) -> None:
    setup = StepSetup.over(*models(kind), CONFIG, num_slots=SLOTS, backend="triton")
    runner = PromptRunner.of(setup, buckets=())
    assert runner is not None
    level = Level.SAMPLED if temperature else Level.GREEDY

    def launched_of(lengths: Sequence[int]) -> set[tuple[Any, ...]]:
        rows = [setup.table.allocate() for _ in lengths]
        setup.table.reserve(rows, [length + 1 for length in lengths])
        news = [
            NewPrompt(Prompt(row, [1] * length), SamplingParams(temperature, seed=row), level)
            for row, length in zip(rows, lengths, strict=True)
        ]
        with Notes(HOPPER).taken() as notes:
            runner.run(news)
        for row in rows:
            setup.table.free(row)
        return {variant(launch) for launch in notes.launches}

    rng = random.Random(0)
    first = set().union(*(launched_of([50] * n) for n in (1, 2)))
    assert len(first) > 3
    for _ in range(12):
        lengths = [rng.randint(2, LONGEST) for _ in range(rng.randint(1, MOST))]
        assert launched_of(lengths) <= first, lengths


def test_nor_where_an_engine_lays_them_out() -> None:
    rng, table = random.Random(0), torch.zeros(MOST, LONGEST, dtype=torch.int32)
    attention = Attention(table, max_batch=MOST, backend="triton")
    caches = (torch.zeros(SLOTS, 2, 16, dtype=torch.float16) for _ in "kv")
    layer = attention.layer(AttnConfig(4, 2, 16, dtype=torch.float16), *caches)

    def launched_of(lengths: Sequence[int]) -> set[tuple[Any, ...]]:
        rows, slots = torch.zeros(len(lengths)).int(), torch.zeros(sum(lengths)).int()
        q, k, v = (torch.zeros(sum(lengths), n, 16, dtype=torch.float16) for n in (4, 2, 2))
        with Notes(HOPPER).taken() as notes:
            lens = torch.tensor(lengths, dtype=torch.int32)
            forward = attention.prompts(rows, rows, lens, slots, max_q_len=max(lengths))
            forward.attend(layer, q, k, v)
        return {variant(launch) for launch in notes.launches}

    first = launched_of([50])
    assert len(first) == 3
    for _ in range(12):
        lengths = [rng.randint(2, LONGEST) for _ in range(rng.randint(1, MOST))]
        assert launched_of(lengths) <= first, lengths
