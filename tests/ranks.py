"""Two processes that share a target's weights, as `torchrun` starts them."""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
from importlib.resources import files
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from packaging.version import Version

SIZE = 2
PAIR = Path(str(files("specattn"))) / "pair"
# seconds; a busy machine needs long to import torch and transformers
LIMIT = 900

needs_shards = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.17"),
    reason="transformers older than 5.17 keeps no record of its shards",
)


def on_ranks(work, folder: Path) -> tuple[list[int | None], list]:
    """Return every rank's exit code, and what ``work(rank, folder)`` returned there."""
    context = multiprocessing.get_context("forkserver")
    # torch and transformers are imported once for all ranks
    context.set_forkserver_preload([work.__module__])
    found = [context.Process(target=_run, args=(rank, work, folder)) for rank in range(SIZE)]
    for process in found:
        process.start()
    try:
        for process in found:
            process.join(LIMIT)
    finally:
        for process in found:
            process.kill()
    outputs = [folder / f"{rank}.json" for rank in range(SIZE)]
    return (
        [process.exitcode for process in found],
        [json.loads(path.read_text()) if path.exists() else None for path in outputs],
    )


def _run(rank: int, work, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(SIZE)}
    dist.init_process_group(
        "gloo",
        # no port that another process could take first
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=SIZE,
        timeout=datetime.timedelta(seconds=LIMIT),
    )
    (folder / f"{rank}.json").write_text(json.dumps(work(rank, folder)))
    dist.destroy_process_group()
    # a thread of gloo that frees a tensor while Python shuts down aborts the process
    os._exit(0)
