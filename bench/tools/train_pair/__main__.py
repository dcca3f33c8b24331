"""Train and measure the whole pair with one command."""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen3ForCausalLM

from . import corpus, measure
from .sizes import SIZES
from .target import DenseTarget, new_target
from .train_dflash import MASK_TOKEN, dflash_config, new_dflash, train_dflash
from .train_head import (
    OnPolicy,
    frequent_tokens,
    head_config,
    new_head,
    on_policy_rows,
    train_head,
)
from .train_target import stream_nll, train_target, windows

if TYPE_CHECKING:
    from .head import DenseHead

# seconds kept for the final measurements
RESERVE = 25.0


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.tools.train_pair", description=__doc__)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for target/, draft/ and dflash/"
    )
    parser.add_argument("--data", type=Path, default=Path(".train"), help="tokenised corpus")
    parser.add_argument("--stdlib", type=Path, help="default: the interpreter's own library")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--target-minutes", type=float, default=4.0)
    parser.add_argument("--generate-minutes", type=float, default=0.5)
    parser.add_argument("--draft-minutes", type=float, default=3.3)
    parser.add_argument("--dflash-minutes", type=float, default=1.6)
    parser.add_argument("--dflash-rows", type=int, help="rows per step of the DFlash head")
    parser.add_argument("--generate-rows", type=int, help="rows that the target writes at once")
    parser.add_argument("--metrics", type=Path, help="default: OUT/metrics.json; added to")
    parser.add_argument("--eval-rows", type=int, help="held-out prompts of each length")
    parser.add_argument("--stop-at", type=float, help="Unix time by which all must be done")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--prepare-only", action="store_true", help="only write --data")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    args.metrics = args.metrics or args.out / "metrics.json"
    return args


def save_target(model: Qwen3ForCausalLM, folder: Path) -> Qwen3ForCausalLM:
    """Write the target in bfloat16 and return it as stored."""
    stored = copy.deepcopy(model).to(torch.bfloat16).eval()
    stored.save_pretrained(folder)
    return stored


def save_head(head: torch.nn.Module, config: dict, folder: Path) -> None:
    """Write a head in bfloat16, in the layout that ``config`` is of."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for name, tensor in head.state_dict().items()
    }
    tensors = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


class Run:
    """One training run: its arguments, its data on the device, and the metrics so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.size = args, SIZES[args.size]
        if args.generate_rows:
            self.size = replace(self.size, generate_rows=args.generate_rows)
        self.start = time.time()
        data = corpus.load(args.data)
        self.facts = data.facts
        self.train, self.held_out = (
            torch.from_numpy(stream.astype("int64")).to(args.device)
            for stream in (data.train, data.held_out)
        )
        self.written: tuple[OnPolicy, OnPolicy] | None = None
        self.metrics: dict = {"corpus": data.facts, "size": vars(self.size), "measurements": []}
        if args.metrics.exists():
            self.metrics.update(json.loads(args.metrics.read_text()))

    def record(self, **values: object) -> None:
        """Add to the metrics and write them, so that a stopped run still leaves its numbers."""
        self.metrics.update(values)
        self.args.metrics.write_text(json.dumps(self.metrics) + "\n")
        print({k: v for k, v in values.items() if not k.endswith("_curves")}, flush=True)

    def stored_target(self) -> DenseTarget:
        """Train the target, unless ``--out`` already holds one, and return it as stored."""
        folder = self.args.out / "target"
        if not (folder / "model.safetensors").exists():
            self.train_target(folder)
        # CPUs multiply float32 faster, and it represents the stored weights exactly
        dtype = torch.bfloat16 if self.args.device.startswith("cuda") else torch.float32
        stored = Qwen3ForCausalLM.from_pretrained(folder, dtype=dtype)
        stored.to(self.args.device).requires_grad_(False)
        return DenseTarget(stored, self.size.rope_theta)

    def train_target(self, folder: Path) -> None:
        """Train and store the target."""
        args, size = self.args, self.size
        model = new_target(size).to(args.device)
        curves = train_target(
            model, self.train, self.held_out, size=size, seconds=args.target_minutes * 60,
            compile_blocks=not args.no_compile,
        )  # fmt: skip
        shutil.copytree(args.data / "tokenizer", folder, dirs_exist_ok=True)
        stored = DenseTarget(save_target(model, folder).requires_grad_(False), size.rope_theta)
        float32 = DenseTarget(model, size.rope_theta)
        sample = windows(self.train, 256, size.seq_len).flatten()
        self.record(
            target_curves=curves,
            target_parameters=sum(p.numel() for p in model.parameters()),
            bits_per_byte={"stored": self.bpb(stored), "float32": self.bpb(float32)},
            nats_per_token={
                "held_out": self.nats(stored, self.held_out),
                "train": self.nats(stored, sample),
            },
        )

    def bpb(self, target: DenseTarget) -> float:
        """Bits per byte on the held-out files."""
        num_bytes = self.facts["held_out_bytes"]
        return measure.bits_per_byte(target, self.held_out, num_bytes, self.size.seq_len)

    def nats(self, target: DenseTarget, stream: Tensor) -> float:
        """Mean loss per token, without dropout."""
        total, count = stream_nll(target, stream, self.size.seq_len)
        return total / count

    def draft_seconds(self) -> float:
        """Time left for the head: what was asked for, within ``--stop-at``."""
        wanted = self.args.draft_minutes * 60
        if self.args.stop_at is None:
            return wanted
        return min(wanted, self.args.stop_at - time.time() - RESERVE)

    def stored_head(self, target: DenseTarget) -> None:
        """Train and store the head, unless ``--out`` already holds one."""
        folder = self.args.out / "draft"
        if not (folder / "model.safetensors").exists():
            save_head(self.trained_head(target), head_config(self.size), folder)

    def rows(self, target: DenseTarget) -> tuple[OnPolicy, OnPolicy]:
        """Let the target write the training rows and those that are held out, once."""
        if self.written is None:
            size, seconds = self.size, self.args.generate_minutes * 60
            rows = on_policy_rows(target, self.train, size=size, seconds=seconds)
            # the prompts of the held-out rows are from held-out files
            few = replace(size, generate_rows=max(1, size.draft_rows // 4))
            held = on_policy_rows(target, self.held_out, size=few, seconds=0)
            self.written = rows, held
        return self.written

    def trained_head(self, target: DenseTarget) -> DenseHead:
        """Train the EAGLE-3 head on rows that the target wrote."""
        size = self.size
        rows, held = (written.tokens for written in self.rows(target))
        head = new_head(size, target, frequent_tokens(rows, size.vocab, size.draft_vocab))
        self.record(
            on_policy_tokens=rows.numel(),
            draft_vocab_coverage=head.t2d[held].float().mean().item(),
            head_parameters=sum(p.numel() for p in head.parameters()),
        )
        data, seconds = (rows, self.train, held), self.draft_seconds()
        self.record(head_curves=train_head(head, target, data, size=size, seconds=seconds))
        return head

    def stored_dflash(self, target: DenseTarget) -> None:
        """Train and store the DFlash head, unless ``--out`` already holds one."""
        folder = self.args.out / "dflash"
        if not (folder / "model.safetensors").exists():
            mask = self.tokenizer().token_to_id(MASK_TOKEN)
            head = new_dflash(self.size, target, mask)
            rows, held = self.rows(target)
            self.record(
                dflash_on_policy_tokens=rows.tokens.numel(),
                dflash_parameters=sum(p.numel() for p in head.parameters()),
            )
            curves = train_dflash(
                head, target, (rows, self.train, held), size=self.size,
                seconds=self.args.dflash_minutes * 60,
                rows=self.args.dflash_rows or self.size.draft_rows,
            )  # fmt: skip
            save_head(head, dflash_config(self.size, mask), folder)
            self.record(dflash_curves=curves)

    def tokenizer(self) -> Tokenizer:
        """Return the corpus's tokenizer."""
        return Tokenizer.from_file(str(self.args.data / "tokenizer" / "tokenizer.json"))

    def report(self, target: DenseTarget) -> None:
        """Measure repetition, late positions and samples with the stored weights."""
        rows = self.args.eval_rows or self.size.eval_rows
        size, begin = replace(self.size, eval_rows=rows), time.time()
        repetition, greedy, sampled = measure.repetition_report(target, self.held_out, size)
        total, count = stream_nll(target, self.held_out, size.max_positions)
        decode = self.tokenizer().decode_batch
        measurement = {
            "device": device_name(self.args.device),
            "torch": torch.__version__,
            "seconds": round(time.time() - begin, 1),
            "repetition": repetition,
            "nats_per_token_at_full_length": total / count,
            "samples": {
                "greedy_continuations": decode(greedy[-3:].tolist()),
                "sampled_with_prompt": decode(sampled[:3].tolist(), skip_special_tokens=False),
            },
        }
        self.record(measurements=[*self.metrics["measurements"], measurement])


def device_name(device: str) -> str:
    """The GPU's name, or the device type."""
    return torch.cuda.get_device_name() if device.startswith("cuda") else device


def main() -> None:
    """Prepare the corpus where it is missing, then train, save and measure."""
    args = parse_args()
    torch.manual_seed(0)
    # cuDNN attention would plan anew for every length that generation passes through
    torch.backends.cuda.enable_cudnn_sdp(False)
    size = SIZES[args.size]
    if not (args.data / "corpus.json").exists():
        args.data.mkdir(parents=True, exist_ok=True)
        # a target that is there already knows its own tokens only
        known = args.out / "target" / "tokenizer.json"
        tokenizer = Tokenizer.from_file(str(known)) if known.exists() else None
        corpus.prepare(args.data, size.vocab, size.max_positions, args.stdlib, tokenizer)
    if args.prepare_only:
        return
    args.out.mkdir(parents=True, exist_ok=True)
    run = Run(args)
    target = run.stored_target()
    run.stored_head(target)
    run.stored_dflash(target)
    run.report(target)


if __name__ == "__main__":
    main()
