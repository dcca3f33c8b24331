"""Train a head of either kind on the texts that its target wrote."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaMLP

from bench.suite.machine import machine
from bench.suite.results import write as write_json
from specattn.config import SpecConfig
from specattn.engine.engine import Engine
from specattn.engine.request import Request
from specattn.models import HFTarget, fuse, load_dflash, load_draft

from .dflash import DFlash
from .eagle3 import Eagle3
from .fit import Recipe, fit
from .layers import Norm
from .layouts import save
from .teacher import Teacher, layers_for, spread
from .texts import Batch, Texts

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

RECORD = "training.json"
# held-out batches that every evaluation looks at, and the seed of what it draws
LOOKED_AT, HELD_OUT_SEED = 4, 2**40


def new_head(args: argparse.Namespace, target: HFTarget, texts: Texts) -> Eagle3 | DFlash:
    """Draw a head that fits a target; what texts count decides on its tokens."""
    states = tuple(args.states or spread(len(target.layers), args.features))
    counts = texts.counts(target.vocab_size)
    if args.command == "eagle3":
        ids = counts.topk(min(args.draft_vocab, target.vocab_size)).indices.sort().values
        config = layers_for(target, 1, args.intermediate)
        return Eagle3(config, states, ids, unroll=args.unroll)
    # the last of the tokens that texts have least
    mask_id = target.vocab_size - 1 - int(counts.flip(0).argmin())
    config = layers_for(target, args.layers, args.intermediate)
    return DFlash(config, states, mask_id, block=args.block, anchors=args.anchors)


def as_given(value: object) -> str:
    """Return an argument as a command has it."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


class Training:
    """A head, its target and its texts on a device."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, torch.device(args.device)
        torch.manual_seed(args.seed)
        # cuDNN's attention plans anew for every shape
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.texts, written = Texts.load(args.texts)
        if not (self.texts.held_out & self.texts.greedy).any():
            names = ", ".join(map(str, args.texts))
            raise SystemExit(f"{names}: no greedy text is held out: write more texts")
        target = HFTarget.from_pretrained(args.target, dtype=args.dtype, device=args.device)
        self.head: Any = new_head(args, target, self.texts).to(self.device)
        self.teacher = Teacher(target, self.head.states)
        self.head.start(self.teacher, next(self.batches(held_out=False)))
        if args.compile:
            for module in self.head.modules():
                if isinstance(module, LlamaMLP | Norm):
                    module.compile(dynamic=True)
        weights = torch.tensor(self.head.weights, device=self.device)
        self.weights = weights / weights.sum()
        self.record: dict[str, Any] = {
            "arguments": {name: as_given(value) for name, value in vars(args).items()},
            "machine": machine() | {"transformers": transformers.__version__},
            "texts": written | {"read": len(self.texts.lengths)},
            "parameters": sum(p.numel() for p in self.head.parameters()),
        }
        if args.command == "eagle3":
            counts = self.texts.counts(target.vocab_size)
            known = counts[self.head.draft_ids.cpu()].sum() / counts.sum()
            self.record["draft_vocab_covers"] = round(known.item(), 5)

    def batches(self, *, held_out: bool) -> Iterator[Batch]:
        """Yield batches of what is trained on, or of what is not, for ever."""
        rows = (self.texts.held_out == held_out).nonzero()[:, 0]
        seed = HELD_OUT_SEED if held_out else self.args.seed
        return self.texts.batches(rows, self.args.batch_tokens, seed, self.device)

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return losses and agreements of every draft step or place."""
        # CPUs without bfloat16 units are slower with it
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            return self.head.losses(batch, self.teacher)

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Save the head, and return the means over some held-out batches."""
        save(self.head, self.head.settings(self.args.layout, self.teacher), self.args.out)
        found = map(self.losses, islice(self.batches(held_out=True), LOOKED_AT))
        losses, agreement = (torch.stack(each).mean(0) for each in zip(*found, strict=True))
        rounded = [[round(one, 4) for one in each.tolist()] for each in (losses, agreement)]
        loss = round((losses @ self.weights).item(), 4)
        return {"loss": loss, "losses": rounded[0], "agreement": rounded[1]}

    def run(self) -> None:
        """Train, save and measure."""
        args, batches, read = self.args, self.batches(held_out=False), 0

        def loss_of(_: int) -> Tensor:
            nonlocal read
            batch = next(batches)
            read += batch.tokens.numel()
            losses, _ = self.losses(batch)
            return losses @ self.weights

        recipe = Recipe(args.lr, args.minutes * 60, args.steps)
        self.record |= fit(self.head, loss_of, self.evaluate, recipe) | {"tokens_read": read}
        if self.device.type == "cuda":
            self.record["gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
        write_json(self.record, args.out / RECORD)
        if args.measure:
            self.head = None
            torch.cuda.empty_cache()
            self.record["acceptance"] = self.acceptance(min(args.drafted, len(self.weights)))
            print(self.record["acceptance"], flush=True)
            write_json(self.record, args.out / RECORD)

    def acceptance(self, drafted: int) -> dict[str, Any]:
        """Have the library's engine draft chains for held-out prompts with known greedy answers."""
        target, texts = self.teacher.target(), self.texts
        load: Any = {"eagle3": load_draft, "dflash": load_dflash}[self.args.command]
        head = load(self.args.out, target)
        rows = (texts.held_out & texts.greedy).nonzero()[: self.args.measure, 0]
        known, requests = [], []
        for ids, prompt, length in zip(
            *(one[rows].tolist() for one in (texts.tokens, texts.prompt_lens, texts.lengths)),
            strict=True,
        ):
            known.append(ids[prompt:length])
            requests.append(Request(ids[:prompt], length - prompt))
        room = texts.tokens.shape[1] + 2 * (drafted + 1)
        config = SpecConfig(drafted, 1, drafted + 1, room, min(32, len(rows)))
        engine = Engine(*fuse(target.with_features(head.features), head), config)
        outputs = engine.generate(requests)
        gained = [one for output in outputs for one in output.accept_lens]
        equal = [output.tokens == text for output, text in zip(outputs, known, strict=True)]
        return {
            "texts": len(rows), "equal_to_plain": sum(equal), "drafted": drafted,
            "tokens_per_step": round(sum(gained) / len(gained), 4),
            "steps_by_tokens": [gained.count(n) for n in range(1, drafted + 2)],
        }  # fmt: skip
