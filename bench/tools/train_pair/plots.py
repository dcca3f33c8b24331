"""Draw the curves of ``metrics.json``: ``python -m bench.tools.train_pair.plots``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TRAIN, HELD_OUT = "#9db4c8", "#c2452d"


def draw_loss(axes: Axes, curves: dict, title: str) -> None:
    """Draw training and held-out loss over seconds."""
    for name, color in (("train", TRAIN), ("held_out", HELD_OUT)):
        # the first points are far above the rest and would flatten it
        points = list(zip(curves[name]["seconds"], curves[name]["loss"], strict=True))
        axes.plot(*zip(*points[1:], strict=True), color=color, label=name.replace("_", "-"))
    last = curves["held_out"]["loss"]
    axes.set_ylim(0.9 * min(curves["train"]["loss"]), 1.6 * last[-1])
    axes.set(title=title, xlabel="seconds of training (one H200)", ylabel="nats per token")
    axes.legend(frameon=False)


def draw_losses(metrics: dict, path: Path) -> None:
    """Loss of the target and of the head, side by side."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    draw_loss(left, metrics["target_curves"], "Target: next-token loss")
    draw_loss(right, metrics["head_curves"], "Head: soft cross entropy, mean of 7 draft steps")
    figure.savefig(path, dpi=120)


def draw_agreement(metrics: dict, path: Path) -> None:
    """Agreement per draft step while training."""
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    curves = metrics["head_curves"]
    for step, rates in enumerate(zip(*curves["held_out_agreement"], strict=True)):
        shade = plt.get_cmap("viridis")(step / 7)
        axes.plot(curves["held_out"]["seconds"], rates, color=shade, label=f"draft {step + 1}")
    axes.set(
        title="Head: drafts that are the target's best token",
        xlabel="seconds of training (one H200)", ylabel="share of positions", ylim=(0, 1),
    )  # fmt: skip
    axes.legend(frameon=False, ncols=2, fontsize="small")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Read the metrics and write both figures."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.tools.train_pair.plots", description=__doc__
    )
    default = Path(__file__).with_name("metrics.json")
    parser.add_argument("--metrics", type=Path, default=default)
    parser.add_argument("--out", type=Path, default=Path("docs/img"))
    args = parser.parse_args()
    metrics = json.loads(args.metrics.read_text())
    args.out.mkdir(parents=True, exist_ok=True)
    draw_losses(metrics, args.out / "pair_losses.png")
    draw_agreement(metrics, args.out / "pair_agreement.png")


if __name__ == "__main__":
    main()
