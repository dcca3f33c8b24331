"""R30: vllm#53406, vllm#52475.

A backend declared that its graphs serve uniform batches of several query tokens, and sent those
through a prefill loop on the host.

What a backend declares is tried: every registered backend that can run here serves trees and
prompts as it says, replays them in a graph if it says so, or refuses at binding.
"""

from __future__ import annotations

import pytest
import torch

from specattn.backends import available, backend_names, load_backend
from specattn.batch import Phase, RowLayout
from specattn.config import AttnConfig
from specattn.errors import UnsupportedError
from specattn.plan import AttnPlan
from tests.oracle import check, make_tree_case, oracle_tree, tolerances_of
from tests.samples import half, on_cpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# every library has bfloat16; Triton's interpreter has float16
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
CONFIG = AttnConfig(4, 2, 64, dtype=DTYPE)
HERE = [name for name in backend_names() if not available(name, CONFIG, DEVICE)]


def plan_of(case, nodes: int, *, causal: bool) -> AttnPlan:
    return AttnPlan(layout=RowLayout(nodes, nodes, Phase.VERIFY, causal), **case.args)


def graphed(bound) -> torch.cuda.CUDAGraph:
    """Record ``fill`` and ``run``; a host loop inside fails here, or replays old lengths."""
    stream = torch.cuda.Stream()
    # the plan may be on its way
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        bound()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bound()
    return graph


@on_cpu(half, "name", "mode")
@pytest.mark.parametrize("mode", ["tree", "chain"])
@pytest.mark.parametrize("name", HERE)
def test_several_query_tokens_are_served_as_declared(name, mode):
    cls, nodes = load_backend(name), 5
    case = make_tree_case(
        [40, 0, 70], mode=mode, q_len=nodes, head_dim=64, dtype=DTYPE, device=DEVICE.type
    )
    promises = cls.capabilities
    plan = plan_of(case, nodes, causal=mode == "chain")
    backend = cls(CONFIG, DEVICE)
    if mode == "tree" and not promises.trees:
        with pytest.raises(UnsupportedError):
            backend.bind(plan)
        return
    bound, on_host = backend.bind(plan), case.args["seq_lens"].cpu()
    lse = case.lse if promises.lse else None

    def forward() -> None:
        bound.fill()
        bound.run(case.q, case.k_cache, case.v_cache, case.out, lse)

    expected = oracle_tree(case)
    recorded = None
    if promises.graphs and DEVICE.type == "cuda":
        lens = case.args["seq_lens"].clone()
        case.args["seq_lens"].zero_()  # captured on other lengths than it replays
        bound.schedule(torch.zeros_like(on_host))
        recorded = graphed(forward)
        case.args["seq_lens"].copy_(lens)
    bound.schedule(on_host)
    case.clear()
    forward() if recorded is None else recorded.replay()
    check(case, expected, lse=promises.lse, tolerances=tolerances_of(name, DTYPE))
