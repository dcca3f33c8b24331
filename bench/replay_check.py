"""Host cost of comparing what a graph baked in, paid before every replay; no GPU needed.

    python -m bench.replay_check
"""

from __future__ import annotations

import timeit
from importlib.resources import files

import torch

from specattn.config import SpecConfig
from specattn.models import HFTarget, load_draft
from specattn.spec.generate import Engine

BUCKET = 4


def main() -> None:
    torch.set_num_threads(1)
    device, pair = ("cuda" if torch.cuda.is_available() else "cpu"), files("specattn") / "pair"
    target = HFTarget.from_pretrained(str(pair / "target"), device=device)
    draft = load_draft(str(pair / "draft"), target, device=device)
    config = SpecConfig(5, 4, 16, 512, BUCKET)
    engine = Engine(target.with_features(draft.features), draft, config, buckets=[BUCKET])
    for mode, done in engine.decoders[0].runner._captured.items():
        check = done[BUCKET].check
        best = min(timeit.repeat(check, number=50, repeat=400)) / 50 * 1e6
        print(f"{mode.value:14} {len(done[BUCKET].fingerprint):3} entries  {best:5.1f} us")


if __name__ == "__main__":
    main()
