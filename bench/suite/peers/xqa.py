"""FlashInfer's XQA, as SGLang's TRT-LLM backend calls it on Hopper, with any tree as its mask."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from .base import Contestant, int32, total_lens
from .flashinfer import Workspace

if TYPE_CHECKING:
    from torch import Tensor

    from ..batch import Batch
    from ..cases import Case

PAGES = (16, 32, 64, 128)
SEMAPHORES = 8 * 2**20


class Xqa(Contestant):
    """Decode, chains and trees over pages of 16 tokens or more, one launch and no plan."""

    name = "FlashInfer XQA"
    modes = ("tree", "chain")
    needs = ("flashinfer.xqa",)
    float8 = True

    @classmethod
    def refuses(cls, case: Case) -> str | None:
        found = super().refuses(case)
        if found is None and case.stored:
            # FlashInfer 0.6.12, compiled ahead for SM90
            return "its float8 modules lack a symbol when called, which ends the process"
        if found is None and case.page_size not in PAGES:
            return f"pages of {', '.join(map(str, PAGES))} only"
        return found

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        case, device = batch.case, batch.device
        self.seq_lens = int32(total_lens(batch), device).view(torch.uint32)[:, None]
        rows = (case.batch, 1) if case.q_len == 1 else (case.batch, 1, case.q_len)
        self.shape = (*rows, case.heads[0], case.head_dim)
        self.mask = None
        if case.q_len > 1:
            assert batch.bits is not None
            words = [[halves(bits, case.q_len) for bits in rows] for rows in batch.bits]
            self.mask = torch.tensor(words, dtype=torch.int32).to(torch.uint16).to(device)
        self.semaphores = torch.zeros(SEMAPHORES, dtype=torch.uint8, device=device)
        self.call: Any = import_module("flashinfer.xqa").xqa

    def run(self, pool: int) -> None:
        batch, case = self.batch, self.batch.case
        self.call(
            self.q.view(self.shape),
            batch.pages(batch.k(pool)),
            batch.pages(batch.v(pool)),
            batch.page_table,
            self.seq_lens,
            self.out.view(self.shape),
            Workspace.of(batch.device),
            self.semaphores,
            case.heads[1],
            case.page_size,
            q_scale=batch.scale * case.head_dim**0.5,
            kv_scale=batch.kv_scale,
            q_seq_len=case.q_len,
            mask=self.mask,
        )

    def result(self) -> tuple[Tensor, Tensor | None]:
        return self.out, None


def halves(bits: int, q_len: int) -> list[int]:
    """Cut a row's bits into 16-bit words, an even number of them, lowest first."""
    return [bits >> 16 * i & 0xFFFF for i in range(2 * (-(-q_len // 32)))]
