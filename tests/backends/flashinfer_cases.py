"""Cases for FlashInfer: one bound forward, into which batches of its shape are copied."""

from __future__ import annotations

from typing import Any

import torch

from specattn.backends.flashinfer import FlashInferBackend
from specattn.batch import Phase, RowLayout
from specattn.config import AttnConfig
from specattn.plan import AttnPlan
from tests.oracle import Case, check, make_tree_case, oracle_tree, tolerances_of
from tests.recordings import recorded, refill

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CUDA = DEVICE == "cuda"
TOLERANCES = tolerances_of("flashinfer")
BF16 = torch.bfloat16


def _case(*lengths: int, **options: Any) -> dict[str, Any]:
    return {"lengths": list(lengths), "head_dim": 64, **options}


# the options of the one kernel that is not compiled ahead in tests: a window of indices and a cap
BUILT = {"window_left": 6, "logit_cap": 3.0}


CHAIN = {"mode": "chain", "q_len": 1}


# prefix lengths, and what differs from: 4 nodes of a random tree, 4 query and 2 KV heads of 64
CASES = {
    "decode": _case(130, 7, 0, 64, **CHAIN),
    "decode_group_4": _case(65, 200, **CHAIN, heads=(4, 1)),
    "decode_group_7": _case(40, 300, **CHAIN, heads=(7, 1)),
    "decode_window": _case(130, 7, 0, **CHAIN, window_left=9),
    "draft_chain_window_4": _case(40, 0, 1, **CHAIN, tail_len=3, window_left=4),
    "draft_chain_window_1": _case(40, 0, 1, **CHAIN, tail_len=3, window_left=1),
    "tree": _case(130, 0, 64, 1, q_len=7),
    "tree_group_8": _case(140, 9, q_len=9, heads=(8, 1)),
    "tree_window": _case(63, 4, 0, q_len=9, window_left=6),
    "tree_window_0": _case(20, 1, q_len=5, window_left=0),
    "draft_window": _case(65, 3, mode="draft", q_len=3, tail_len=9, window_left=4),
}


def config_of(case: Case) -> AttnConfig:
    return AttnConfig(
        case.q.shape[1], case.k_cache.shape[1], case.q.shape[2], dtype=BF16, **case.settings
    )


class Live:
    """A backend bound once to the tensors of a case, into which other cases are copied."""

    def __init__(self, case: Case, causal: bool, backend: FlashInferBackend | None = None) -> None:
        _, q_len = case.args["positions"].shape
        layout = RowLayout(q_len, case.args["tail_slots"].shape[1], Phase.VERIFY, causal)
        self.case = case
        self.backend = backend or FlashInferBackend(config_of(case), torch.device(DEVICE))
        self.bound = self.backend.bind(AttnPlan(layout, **case.args))
        self.forward = self.step

    def load(self, case: Case) -> None:
        refill(self.case, case)

    def step(self) -> None:
        case = self.case
        self.bound.fill()
        self.bound.run(case.q, case.k_cache, case.v_cache, case.out, case.lse)

    def record(self) -> None:
        """Capture ``fill`` and ``run``; without CUDA, replaying is calling them."""
        self.schedule()
        self.forward = recorded(self.step)

    def schedule(self, lens: torch.Tensor | None = None) -> None:
        self.bound.schedule(self.case.args["seq_lens"].cpu() if lens is None else lens)

    def replay(self, lens: torch.Tensor | None = None) -> None:
        self.case.clear()
        self.schedule(lens)
        self.forward()

    def verdict(self) -> None:
        check(self.case, oracle_tree(self.case), tolerances=TOLERANCES)


def case_of(name: str, **more: Any) -> tuple[Case, bool]:
    options = CASES[name] | more
    causal = options.get("mode") == "chain"
    return make_tree_case(**options, dtype=BF16, device=DEVICE), causal


class TwoPassesBackend(FlashInferBackend):
    """Trees as a pass over the prefix and one over the tail, however short."""

    two_passes_from = 0


BATCHES = [[5, 0, 130], [300, 299, 1], [0, 0, 0], [64, 128, 63]]
RECORDED = {
    "decode": CHAIN,
    "decode_group_4": CHAIN | {"heads": (8, 2)},
    "chain": {"mode": "chain", "q_len": 5},
    "tree": {"q_len": 7},
    "tree_window": {"q_len": 7, "window_left": 5},
    "draft": {"mode": "draft", "q_len": 3, "tail_len": 6},
}


def batches(options: dict[str, Any]) -> list[Case]:
    """Batches of one shape: other lengths, slots, trees, queries and pools."""
    shape = {"width": 400, "slots": 1000, "pads": 1, "head_dim": 64}
    return [
        make_tree_case(lens, seed=seed, dtype=BF16, device=DEVICE, **shape, **options)
        for seed, lens in enumerate([[0, 0, 0], *BATCHES])
    ]
