"""Train the target that ships in ``specattn/pair``, on the Python standard library.

Its heads are trained by `bench.tools.train_heads`; see ``docs/pair.md``.

    python -m bench.tools.train_pair --out pair/target [--minutes 4]
"""

from __future__ import annotations

import argparse
import copy
import math
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from bench.suite.machine import machine
from bench.suite.results import write
from bench.tools.train_heads.corpus import END_OF_TEXT, encode, is_held_out, read_sources
from bench.tools.train_heads.fit import Recipe, fit

SHAPE = {
    "vocab_size": 3072, "hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 12,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 2048,
}  # fmt: skip
DROPOUT = 0.1
# every eighth step has rows of the full length, so that late positions are trained, too
LONG_EVERY = 8


def train_tokenizer(texts: list[str], vocab: int) -> Tokenizer:
    """Train a byte-level BPE with ``END_OF_TEXT`` as its only special token (id 0)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet,
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def new_target(shape: dict[str, int]) -> Qwen3ForCausalLM:
    """Draw a target; its projections into the residual stream start small, and drop out."""
    config = Qwen3Config(
        **shape, rope_theta=10000.0, rms_norm_eps=1e-6, tie_word_embeddings=True, bos_token_id=0,
        eos_token_id=0, pad_token_id=None,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    for layer in model.model.layers:
        for part in (layer.self_attn.o_proj, layer.mlp.down_proj):
            part.weight.data *= (2 * config.num_hidden_layers) ** -0.5
            part.register_forward_hook(lambda part, _, out: F.dropout(out, DROPOUT, part.training))
    return model


def nll(model: Qwen3ForCausalLM, rows: Tensor) -> Tensor:
    """Mean next-token cross entropy over ``rows [B, T + 1]``, in nats."""
    logits = model(rows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


@dataclass
class Training:
    """A target and its streams of tokens, ``[N]``, on one device."""

    model: Qwen3ForCausalLM
    train: Tensor
    held_out: Tensor
    length: int
    batch_tokens: int
    best: tuple[float, Any] = (math.inf, None)

    def loss(self, step: int) -> Tensor:
        """Return the loss of a step's random windows."""
        full = self.model.config.max_position_embeddings
        length = full if step % LONG_EVERY == 0 else self.length
        shape = (max(1, self.batch_tokens // length), 1)
        starts = torch.randint(len(self.train) - length, shape, device=self.train.device)
        self.model.train()
        with torch.autocast(self.train.device.type, torch.bfloat16):
            return nll(self.model, self.train[starts + torch.arange(length + 1).to(starts)])

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Return nats per token of the held-out stream, and keep the best weights."""
        rows = self.held_out[: (len(self.held_out) - 1) // self.length * self.length + 1]
        parts = rows.unfold(0, self.length + 1, self.length).split(32)
        self.model.eval()
        with torch.autocast(self.train.device.type, torch.bfloat16):
            total = sum(nll(self.model, part) * len(part) for part in parts)
        found = float(total) / sum(map(len, parts))
        if found < self.best[0]:
            self.best = found, copy.deepcopy(self.model.state_dict())
        return {"nats_per_token": round(found, 5)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--steps", type=int, help="train so many steps, whatever the minutes are")
    parser.add_argument("--length", type=int, default=1024, help="tokens of most rows")
    parser.add_argument("--batch-tokens", type=int, default=32768)
    parser.add_argument("--full", type=int, default=SHAPE["max_position_embeddings"])
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    sources = read_sources(args.stdlib)
    halves = [[sources[name] for name in sources if is_held_out(name) == held] for held in (0, 1)]
    tokenizer = train_tokenizer(halves[0], SHAPE["vocab_size"])
    train, held_out = (
        torch.from_numpy(encode(tokenizer, texts).astype("int64")).to(args.device)
        for texts in halves
    )
    shape = SHAPE | {"num_hidden_layers": args.layers, "max_position_embeddings": args.full}
    model = new_target(shape).to(args.device)
    training = Training(model, train, held_out, args.length, args.batch_tokens)
    recipe = Recipe(2.5e-3, args.minutes * 60, args.steps, weight_decay=0.1, evaluations=20)
    curves = fit(model, training.loss, training.evaluate, recipe)
    model.load_state_dict(training.best[1])
    model.to(torch.bfloat16).save_pretrained(args.out)
    names = {f"{name}_token": END_OF_TEXT for name in ("bos", "eos", "pad")}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=args.full, **names
    ).save_pretrained(args.out)
    tokens = {"train_tokens": len(train), "held_out_tokens": len(held_out)}
    write(tokens | curves | {"machine": machine()}, args.out / "training.json")


if __name__ == "__main__":
    main()
