"""The example server over an `Engine`, with a head or without, for `bench.engines.served`."""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoTokenizer

from bench.engines.cells import MTP, SETTINGS
from bench.load.cells import SMALL, loader
from bench.shipped import fitted
from bench.step_forced import Forced
from specattn.config import SpecConfig
from specattn.engine.engine import Engine
from specattn.engine.serving import AsyncEngine
from specattn.models import HFTarget

if TYPE_CHECKING:
    from collections.abc import Sequence

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "openai_server.py"


def engine_of(options: argparse.Namespace, tokenizer: Any) -> Engine:
    """Make the engine that the command line asks for."""
    steps, topk, nodes, gained = SETTINGS[options.setting]
    kind = "eagle3" if steps else "none"
    dtype, device = getattr(torch, options.dtype), torch.device(options.device)
    more: dict[str, Any] = {}
    if options.forced:
        models = loader(SMALL, device, dtype)(kind)
        if steps:
            lens = torch.full((options.rows,), gained, dtype=torch.int32, device=device)
            more["accept"] = Forced(lens, models[1].vocab_size)
    else:
        target = HFTarget.from_pretrained(str(options.target), dtype=dtype, device=device)
        models = fitted(target, kind, options.head)
    config = SpecConfig(steps, topk, nodes, options.context, options.rows)
    return Engine(*models, config, tokenizer=tokenizer, buckets=options.buckets, **more)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--head", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--setting", choices=[*SETTINGS.keys() - MTP], default="tree")
    parser.add_argument("--rows", type=int, required=True, help="most requests at once")
    parser.add_argument("--buckets", type=int, nargs="+", required=True, help="to capture")
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--forced", action="store_true", help="random weights, forced lengths")
    parser.add_argument("--stream-interval", type=int, default=1)
    parser.add_argument("--port", type=int, required=True)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options, example = arguments(argv), runpy.run_path(str(EXAMPLE))
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    engine = engine_of(options, tokenizer)
    with AsyncEngine(engine, options.stream_interval) as server:
        app = example["serve"](server, tokenizer, str(options.target))
        # requests are not what is read
        example["run"](app, server, port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
