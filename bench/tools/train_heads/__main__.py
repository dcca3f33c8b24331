"""The commands: ``texts``, ``eagle3`` and ``dflash``."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from .layouts import LAYOUTS
from .texts import write
from .train import Training


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(prog="python -m bench.tools.train_heads", description=__doc__)
    commands = found.add_subparsers(dest="command", required=True)
    texts = commands.add_parser("texts", help="have the target write texts, or more of them")
    _common(texts)
    texts.add_argument("--length", type=int, default=640, help="most tokens of prompt and answer")
    texts.add_argument("--rows", type=int, default=512, help="texts that are written at once")
    texts.add_argument("--part", type=int, default=2048, help="prompts of a file")
    texts.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    texts.add_argument(
        "--chats", type=float, default=0.8, help="share of messages; 0: source alone"
    )
    texts.add_argument("--stdlib", type=Path, help="default: the interpreter's own library")
    texts.add_argument(
        "--leave-out", type=Path, nargs="*", default=[],
        help="files of problems that no text may repeat, as HumanEval.jsonl.gz",
    )  # fmt: skip
    eagle3 = commands.add_parser("eagle3", help="train an EAGLE-3 head")
    _training(eagle3, features=3, drafted=5)
    eagle3.add_argument("--draft-vocab", type=int, default=32000, help="tokens that it knows")
    eagle3.add_argument("--unroll", type=int, default=7, help="draft steps of training")
    dflash = commands.add_parser("dflash", help="train a DFlash head")
    _training(dflash, features=5, drafted=15)
    dflash.add_argument("--layers", type=int, default=2)
    dflash.add_argument("--block", type=int, default=16, help="tokens of a block")
    dflash.add_argument("--anchors", type=int, default=32, help="blocks of a row and step")
    return found


def _common(command: argparse.ArgumentParser) -> None:
    on_gpu = torch.cuda.is_available()
    command.add_argument("--target", required=True, help="a folder, a GGUF file or a Hub name")
    command.add_argument("--out", type=Path, required=True, help="the folder to write")
    command.add_argument("--minutes", type=float, default=8.0)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--device", default="cuda" if on_gpu else "cpu")
    command.add_argument(
        "--dtype", type=lambda name: getattr(torch, name), help="of the target",
        default=torch.bfloat16 if on_gpu else torch.float32,
    )  # fmt: skip


def _training(command: argparse.ArgumentParser, features: int, drafted: int) -> None:
    _common(command)
    add = command.add_argument
    add(
        "--texts", type=Path, nargs="+", required=True,
        help="folders that the command texts wrote, each with a seed of its own",
    )  # fmt: skip
    add("--layout", choices=LAYOUTS, default="sglang")
    add("--features", type=int, default=features, help="hidden states that it reads")
    add("--states", type=int, nargs="+", help="which; state i enters layer i")
    add("--intermediate", type=int, help="width of its MLP; the target's by default")
    add("--batch-tokens", type=int, default=8192, help="tokens of a step, padding included")
    add("--steps", type=int, help="train so many steps, whatever the minutes are")
    add("--lr", type=float, default=5e-4)
    add("--compile", action="store_true", help="compile norms and MLPs")
    add("--measure", type=int, default=64, help="held-out texts for the engine; 0 is off")
    add("--drafted", type=int, default=drafted, help="tokens of the chain that is measured")


def main() -> None:
    """Run a command."""
    args = parser().parse_args()
    if args.command == "texts":
        write(args)
    else:
        Training(args).run()


if __name__ == "__main__":
    main()
