"""Texts that a target writes, as files of tokens, and batches of them.

A folder of texts has ``texts.json``, which says how they were made, and a file of tensors per part.
Parts are functions of the seed and their number, so writing goes on where it was stopped.
"""

from __future__ import annotations

import gzip
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.suite.machine import machine
from bench.suite.results import write as write_json
from specattn.config import SpecConfig
from specattn.engine.engine import Engine
from specattn.engine.request import Request
from specattn.models import HFTarget, fuse
from specattn.speculative.sampling.params import SamplingParams

from .prompts import Prompts, held_out, runs

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

RECORD = "texts.json"
# fewer new tokens teach nothing
SHORTEST = 8
# rows are padded to a multiple of it, so that few shapes occur
PADDING = 64


def file_of(folder: Path, part: int) -> Path:
    return folder / f"part-{part:05}.safetensors"


@dataclass(frozen=True)
class Writer:
    """Has a target answer prompts.

    Prompt and answer have at most ``length`` tokens, and a prompt half of that. Answers are drawn
    at ``temperatures``, in turn. None may hold one of the ``left_out`` runs of words.
    """

    engine: Engine
    tokenizer: Any
    prompts: Prompts
    left_out: set[tuple[str, ...]]
    length: int
    temperatures: Sequence[float]

    def request(self, number: int) -> Request | None:
        """Return a prompt as a request; None if it is a chat that is too long."""
        (text, chat), most = self.prompts.at(number), self.length // 2
        if chat and self.tokenizer.chat_template:
            turns = [{"role": "user", "content": text}]
            ids = self.tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, return_dict=False
            )
            if len(ids) > most:
                return None
        else:
            ids = self.tokenizer(f"{text}\n" if chat else text).input_ids[:most]
        # the quotient has held-out prompts take turns, too
        turn = (number + number // 16) % len(self.temperatures)
        sampling = SamplingParams(self.temperatures[turn], seed=number)
        return Request(ids, self.length - len(ids), sampling)

    def write(self, numbers: range) -> tuple[dict[str, Tensor], int]:
        """Return the tensors of a part, and how many texts repeat what is left out."""
        made = {number: self.request(number) for number in numbers}
        asked = {number: request for number, request in made.items() if request}
        waiting, texts = list(asked.items()), {}
        # as many as run at once: while requests wait, an engine runs a few prompts in every step
        while some := waiting[: self.engine.config.max_num_reqs]:
            outputs = self.engine.generate([request for _, request in some])
            for (number, request), output in zip(some, outputs, strict=True):
                texts[number] = [*request.prompt, *output.tokens]
            del waiting[: len(some)]
        repeated = set()
        if self.left_out:
            decoded = zip(texts, self.tokenizer.batch_decode(list(texts.values())), strict=True)
            repeated = {number for number, text in decoded if runs(text) & self.left_out}
        kept = [number for number in texts if number not in repeated]
        padded = [texts[number] + [0] * (self.length - len(texts[number])) for number in kept]
        return {
            "tokens": torch.tensor(padded, dtype=torch.int32).view(-1, self.length),
            "lengths": torch.tensor([len(texts[at]) for at in kept], dtype=torch.int64),
            "prompt_lens": torch.tensor([len(asked[at].prompt) for at in kept], dtype=torch.int64),
            "greedy": torch.tensor([not asked[at].sampling.drawn for at in kept], dtype=torch.bool),
            "held_out": torch.tensor([held_out(at) for at in kept], dtype=torch.bool),
        }, len(repeated)


def all_runs(paths: Sequence[Path]) -> set[tuple[str, ...]]:
    """Return the runs of words of files, which may be gzipped JSON lines."""
    found = set()
    for path in paths:
        read = gzip.decompress if path.suffix == ".gz" else bytes
        # a line break in JSON is two characters
        found |= runs(read(path.read_bytes()).decode().replace("\\n", "\n"))
    return found


def write(args: argparse.Namespace) -> None:
    """Write texts for some minutes, one part at least, behind those that are there."""
    settings = {
        "target": Path(args.target).name.removesuffix(".gguf"), "seed": args.seed,
        "length": args.length, "part": args.part, "temperatures": args.temperatures,
        "chats": args.chats, "left_out": [path.name for path in args.leave_out],
    }  # fmt: skip
    record: dict[str, Any] = settings | {"parts": []}
    if (args.out / RECORD).exists():
        record = json.loads((args.out / RECORD).read_text())
        if differing := [name for name, value in settings.items() if record[name] != value]:
            raise SystemExit(f"{args.out} has texts of another {', '.join(differing)}")
    begin = time.monotonic()
    target, _ = fuse(HFTarget.from_pretrained(args.target, dtype=args.dtype, device=args.device))
    config = SpecConfig(0, 1, 1, args.length + 2, args.rows)
    engine = Engine(target, None, config, sampled=max(args.temperatures) > 0)
    writer = Writer(
        engine, target.tokenizer, Prompts(args.seed, args.stdlib, args.chats),
        all_runs(args.leave_out), args.length, args.temperatures,
    )  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    while True:
        began, part = time.monotonic(), len(record["parts"])
        tensors, left_out = writer.write(range(part * args.part, (part + 1) * args.part))
        save_file(tensors, file_of(args.out, part))
        now = time.monotonic()
        new = int((tensors["lengths"] - tensors["prompt_lens"]).sum())
        facts = {"texts": len(tensors["lengths"]), "new_tokens": new, "left_out": left_out}
        facts["seconds"] = round(now - began, 2)
        print(f"part {part}, {now - begin:.0f} s: {facts}", flush=True)
        record["parts"].append(facts)
        write_json(record | {"machine": machine()}, args.out / RECORD)
        # another part would not end in time
        if 2 * now - began - begin > args.minutes * 60:
            return


def joined(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the records of folders as one, with all their parts and seeds."""
    first = records[0]
    seeds = [record["seed"] for record in records]
    if len({*seeds}) < len(seeds):
        raise SystemExit(f"two folders of texts have the same seed: {seeds}")
    for record in records:
        own = {"parts", "seed", "machine"}
        differing = [name for name in first if name not in own and record[name] != first[name]]
        if differing:
            raise SystemExit(f"folders of texts differ in {', '.join(differing)}")
    if len(records) == 1:
        return first
    return first | {"seed": seeds, "parts": [part for one in records for part in one["parts"]]}


@dataclass(frozen=True)
class Batch:
    """Rows of texts on a device, padded on the right; ``seed`` names what is drawn for them."""

    tokens: Tensor  # [B, T] int64
    prompt_lens: Tensor  # [B] int64
    lengths: Tensor  # [B] int64, of prompt and answer
    seed: int


@dataclass(frozen=True)
class Texts:
    """All texts of one or several folders, on the host."""

    tokens: Tensor  # [N, length] int32
    lengths: Tensor  # [N] int64, of prompt and answer
    prompt_lens: Tensor  # [N] int64
    greedy: Tensor  # [N] bool
    held_out: Tensor  # [N] bool

    @classmethod
    def load(cls, folders: Sequence[Path]) -> tuple[Texts, dict[str, Any]]:
        """Read folders, each of a seed of its own; return what they record, as one, too."""
        records = [json.loads((folder / RECORD).read_text()) for folder in folders]
        parts = [
            load_file(file_of(folder, part))
            for folder, one in zip(folders, records, strict=True)
            for part in range(len(one["parts"]))
        ]
        whole = {name: torch.cat([one[name] for one in parts]) for name in parts[0]}
        kept = whole["lengths"] - whole["prompt_lens"] >= SHORTEST
        return cls(**{name: one[kept] for name, one in whole.items()}), joined(records)

    def counts(self, size: int) -> Tensor:
        """Count each token id in the answers that are trained on, ``[size]``."""
        rows, place = ~self.held_out, torch.arange(self.tokens.shape[1])
        answer = (place >= self.prompt_lens[rows, None]) & (place < self.lengths[rows, None])
        return torch.bincount(self.tokens[rows][answer], minlength=size)

    def batches(
        self, rows: Tensor, budget: int, seed: int, device: torch.device
    ) -> Iterator[Batch]:
        """Yield batches of at most ``budget`` tokens for ever; every row comes once in a pass.

        Rows of a batch have the same length but for `PADDING`.
        """
        generator, number = torch.Generator().manual_seed(seed), seed
        widths = -(-self.lengths[rows] // PADDING) * PADDING
        while True:
            cut: list[tuple[Tensor, int]] = []
            for width in widths.unique().tolist():
                own = rows[widths == width]
                own = own[torch.randperm(len(own), generator=generator)]
                cut += ((some, width) for some in own.split(max(1, budget // width)))
            for at in torch.randperm(len(cut), generator=generator).tolist():
                some, width = cut[at]
                facts = self.tokens[some, :width].long(), self.prompt_lens[some], self.lengths[some]
                yield Batch(*(one.to(device) for one in facts), number)
                number += 1
