"""A forward's metadata inside SGLang's graphs: launches, and what the host reads."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.implementations import using
from tests.integrations.sglang import INSTALLED

if INSTALLED:
    from triton.runtime.interpreter import InterpretedFunction

    from specattn.integrations.sglang import backend
    from tests.integrations.sglang import (
        operators,  # noqa: F401
        worlds,
    )

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("active")]

#: Methods that wait for a device.
READS = {"__bool__", "__float__", "__index__", "__int__", "cpu", "item", "numpy", "tolist"}
#: Operators that do, besides those that a view or an allocation is not.
SYNCHRONOUS = {"_local_scalar_dense", "masked_select", "nonzero", "unique_dim", "_unique2"}
PREFIX = (3, 40, 17)


class Launches(TorchDispatchMode):
    """Collect what a GPU would launch; fail at operators that wait for it.

    A kernel of Triton counts as one, whatever its interpreter does, and so does every operator of
    torch that is neither a view nor an allocation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[str] = []
        self.interpreting = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if not self.interpreting:
            assert name not in SYNCHRONOUS, f"{name} waits for the device"
            if not (func.is_view or name in {"empty", "empty_like", "empty_strided", "detach"}):
                self.launched.append(name)
        return func(*args, **(kwargs or {}))


class NoReads(TorchFunctionMode):
    """Fail where a tensor's numbers come to the host."""

    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self.launches = launches

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        assert self.launches.interpreting or name not in READS, f"{name} reads on the host"
        return func(*args, **(kwargs or {}))


@contextmanager
def watched():
    """Yield the names of what is launched inside; a read by the host is an `AssertionError`."""
    launches = Launches()
    run = InterpretedFunction.run

    def counted(self, *args, **options):
        launches.launched.append(self.fn.__name__)
        launches.interpreting = True
        try:
            return run(self, *args, **options)
        finally:
            launches.interpreting = False

    with ExitStack() as stack:
        stack.enter_context(patch.object(InterpretedFunction, "run", counted))
        stack.enter_context(NoReads(launches))
        stack.enter_context(launches)
        yield launches.launched


@pytest.fixture(autouse=True)
def _triton(monkeypatch):
    monkeypatch.setenv("SPECATTN_SGLANG_BACKEND", "triton")
    # on a CPU it reads where rows and places lie; on an accelerator nothing
    for module in ("bound", "multi_step"):
        monkeypatch.setattr(f"specattn.attention.{module}.check_places", lambda *_: None)
    with using("triton"):
        yield


def metadata(made, batch):
    """Return what a replay launches for its metadata, after a first forward."""
    made.init_forward_metadata_out_graph(batch)
    made.init_forward_metadata_in_graph(batch)
    with watched() as launched:
        made.init_forward_metadata_out_graph(batch)
        made.init_forward_metadata_in_graph(batch)
    return launched


@pytest.mark.parametrize("mode", ["DECODE", "TARGET_VERIFY", "DRAFT_EXTEND_V2"])
def test_a_forward_takes_two_launches_and_reads_nothing(mode):
    mode, n = worlds.ForwardMode[mode], 5
    world = worlds.fixture(mode, PREFIX, n, 16)
    batch, made = world.forward_batch, world.backend
    if mode.is_target_verify():
        # SGLang writes the mask of its trees into the backend's buffer
        made._alloc_mask(n)
        mask = made.get_verify_buffers_to_fill_after_draft()[0]
        batch.spec_info = SimpleNamespace(draft_token_num=n, topk=4, custom_mask=mask)
    if mode.is_draft_extend_v2():
        batch.input_ids = torch.zeros(n * len(PREFIX), dtype=torch.int64)
    # SGLang's models are there before the first forward, the kit's layer is not
    made.layers.of(world.actual_module.attn)
    assert metadata(made, batch) == ["copy_in_rows_kernel", "_plan_kernel"]


@pytest.mark.parametrize("kind", [list, torch.tensor], ids=["listed", "captured"])
def test_prompts_are_told_how_long_they_are(kind):
    """Libraries size their work by it, and a context is far longer."""
    world = worlds.fixture(worlds.ForwardMode.EXTEND, PREFIX, 5, 16)
    made, batch = world.backend, world.forward_batch
    for name in ("extend_prefix_lens_cpu", "extend_seq_lens_cpu"):
        setattr(batch, name, kind(getattr(batch, name)))
    made.layers.of(world.actual_module.attn)
    made.init_forward_metadata_in_graph(batch)
    plan = made.forward_metadata.plan
    assert (plan.max_q_len, plan.max_seq_len) == (5, max(PREFIX) + 5)
    # SGLang captures prompts with lengths of its own, in tensors
    assert {type(plan.max_q_len), type(plan.max_seq_len)} == {int}
    assert plan.req_to_token.shape[1] > plan.max_seq_len


@pytest.mark.parametrize("topk", [1, 4])
def test_a_draft_takes_two_launches_and_one_per_choice(topk):
    steps, rows = 4, len(PREFIX)
    world = worlds.fixture(worlds.ForwardMode.DECODE, PREFIX, 1, 1)
    draft = backend.SpecAttnDraft(world.runner, topk, steps)
    batch = SimpleNamespace(
        batch_size=rows,
        forward_mode=worlds.ForwardMode.DECODE,
        req_pool_indices=torch.arange(rows),
        seq_lens=torch.tensor(PREFIX),
        out_cache_loc=200 + torch.arange(rows * topk * steps),
    )
    draft.layers.of(world.actual_module.attn)
    assert metadata(draft, batch) == ["copy_in_steps_kernel", "_plan_kernel"]
    chosen = torch.zeros(rows, topk, dtype=torch.int64)
    for step in range(1, steps - 1):
        draft.grow(step, chosen)
        with watched() as launched:
            draft.grow(step, chosen)
        assert launched == ([] if topk == 1 else ["grow_words_kernel"])


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.item(),
        lambda x: x.tolist(),
        lambda x: bool(x),
        lambda x: x.nonzero(),
        lambda x: x.cpu(),
    ],
    ids=["item", "tolist", "bool", "nonzero", "cpu"],
)
def test_the_watch_sees_reads(read):
    with pytest.raises(AssertionError), watched():
        read(torch.ones(1))


def test_the_watch_counts_what_torch_launches():
    x = torch.ones(3)
    with watched() as launched:
        x.view(3, 1)[:2].add_(1)
        torch.empty(3).copy_(x)
    assert launched == ["add_", "copy_"]
