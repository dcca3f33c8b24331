"""Makes engines, steps them ahead and drops them in flight: `python -m ... SEED ROUNDS`.

Two or three are alive at a time, of different settings, and what is left of their texts is
compared with plain decoding after the others have gone.
"""

from __future__ import annotations

import gc
import random
import sys

import torch

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from tests.tiny import TinyDraft, TinyTarget, dense_greedy
from tests.worlds import DEVICE

PROMPTS = [[3, 14, 15, 9, 26, 5], [35, 2], [8, 9, 7, 9], [32, 38, 4]]
TREES = (3, 4, 9), (2, 1, 3), (1, 2, 3), (0, 1, 1)
OPTIONS = {}, {"tbo": True}, {"cudagraph": "piecewise"}
NEW_TOKENS = 24


def main(seed: int, rounds: int) -> None:
    models, dice, alive = (
        (TinyTarget(device=DEVICE), TinyDraft(device=DEVICE)),
        random.Random(seed),
        [],
    )
    wanted = [dense_greedy(models[0], prompt, NEW_TOKENS) for prompt in PROMPTS]
    for _ in range(rounds):
        config = SpecConfig(*dice.choice(TREES), 96, len(PROMPTS))
        made = Engine(*models, config, buckets=(1, len(PROMPTS)), **dice.choice(OPTIONS))
        outputs = made.add([Request(prompt, NEW_TOKENS) for prompt in PROMPTS])
        alive.append((made, outputs))
        del made, outputs
        for engine, _ in alive:
            for _ in range(dice.randint(1, 3)):
                engine.step(ahead=True)
        while len(alive) > dice.randint(1, 2):
            # with a step ahead in flight
            alive.pop(dice.randrange(len(alive)))
            del engine
            if dice.random() < 0.5:
                gc.collect()
            if DEVICE.type == "cuda" and dice.random() < 0.5:
                torch.cuda.empty_cache()
            engine = alive[-1][0]
    for engine, outputs in alive:
        while engine.num_running:
            engine.step(ahead=True)
        assert [one.tokens for one in outputs] == wanted
    print("whole")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
