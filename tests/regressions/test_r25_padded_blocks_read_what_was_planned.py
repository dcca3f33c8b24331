"""R25: flashinfer#4002, flashinfer#4430, flashinfer#4794, flashinfer#5176, sglang#31349,
sglang#31387, sglang#34190.

Padded blocks read scheduler entries that a plan without split-KV never writes.

Every plan that is made again for a recorded step is one that splits, and so says which blocks are
padding; the one plan that does not split has no padded blocks. Whatever the workspaces held before,
a batch smaller than the recorded one is answered right.
"""

from __future__ import annotations

import pytest
import torch

from specattn.backends.flashinfer import FlashInferBackend
from tests.backends import fake_flashinfer as fake
from tests.backends.flashinfer_cases import (
    RECORDED,
    Live,
    TwoPassesBackend,
    batches,
    config_of,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
JUNK = 0x7F


@pytest.fixture(autouse=True)
def _junk(monkeypatch):
    """Whoever allocates bytes finds junk in them."""
    fake.install(monkeypatch)
    empty = torch.empty

    def dirty(*size, **options):
        made = empty(*size, **options)
        return made.fill_(JUNK) if made.dtype == torch.uint8 else made

    monkeypatch.setattr(torch, "empty", dirty)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, FlashInferBackend) for name in RECORDED),
        ("tree", TwoPassesBackend),
        ("draft", TwoPassesBackend),
    ],
)
def test_junk_in_the_workspaces_is_not_read(name, kind):
    first, *others = batches(RECORDED[name])
    backend = kind(config_of(first), torch.device(DEVICE))
    backend.floats(0).fill_(JUNK)
    live = Live(first, RECORDED[name].get("mode") == "chain", backend)
    live.record()
    wrapper = getattr(live.bound, "prefix", live.bound).wrapper
    for case in others:
        live.load(case)
        wrapper._int_workspace_buffer.fill_(JUNK)  # what a step plans, it plans anew
        backend.floats(0).fill_(JUNK)
        live.replay()
        live.verdict()
