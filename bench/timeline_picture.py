"""A picture of one step: kernels as bars, rows by stream and class, colours by phase."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench.suite import plots
from bench.timeline import PHASES, class_of, numbers

if TYPE_CHECKING:
    from pathlib import Path

    from bench.timeline import Step, Trace

COLORS = dict(
    zip(PHASES, ("#7f8c8d", "#2471a3", "#6c3483", "#c0392b", "#b7950b", "#1e8449"), strict=True)
)
ROWS = ("GEMM", "attention", "glue", "other")
# microseconds around the transition that the second panel shows
AROUND = 40.0


def draw(trace: Trace, step: Step, path: Path) -> None:
    """Draw the whole step, and the transition from verify over accept to extend."""
    import matplotlib
    import matplotlib.pyplot as plt

    streams = list(dict.fromkeys(kernel.stream for kernel in step.kernels))
    transition = _transition(step)
    with matplotlib.rc_context(plots.STYLE):
        height = 0.8 + 1.1 * len(streams)
        figure, axes = plt.subplots(
            2 if transition else 1,
            1,
            figsize=(11, height * (2 if transition else 1) + 0.3),
            squeeze=False,
            layout="constrained",
        )
        _panel(axes[0, 0], step, streams, (0, step.us))
        found = numbers(trace, step)
        gap = found["gaps_over_2us"]
        axes[0, 0].set_title(
            f"One step: {step.us / 1e3:.2f} ms, {len(step.kernels)} kernels, gaps over 2 us "
            f"{gap['share']:.2%}, {trace.device}",
            loc="left",
            pad=16,
        )
        if transition:
            _panel(axes[1, 0], step, streams, transition)
            axes[1, 0].set_title("From verify to extend", loc="left", pad=16)
        axes[-1, 0].set_xlabel("microseconds")
        _save(figure, path, f"{step.us:.3f} {len(step.kernels)}")


def _save(figure: Any, path: Path, made_for: str) -> None:
    if path.suffix == ".svg":
        plots.save(figure, path, made_for)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", dpi=160)


def _transition(step: Step) -> tuple[float, float] | None:
    accepts = [
        kernel for kernel, phase in zip(step.kernels, step.phases, strict=True) if phase == "accept"
    ]
    if not accepts:
        return None
    begin = accepts[0].start - step.start - AROUND
    end = max(kernel.end for kernel in accepts) - step.start + AROUND
    return max(0.0, begin), min(step.us, end)


def _panel(panel: Any, step: Step, streams: list[int], window: tuple[float, float]) -> None:
    """Draw what runs within the window, a row per stream and class."""
    bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
    spans: dict[str, tuple[float, float]] = {}
    for kernel, phase in zip(step.kernels, step.phases, strict=True):
        begin, end = (
            min(max(at - step.start, window[0]), window[1]) for at in (kernel.start, kernel.end)
        )
        if begin == end:
            continue
        row = class_of(kernel, phase).split()[-1]
        place = streams.index(kernel.stream) * len(ROWS) + ROWS.index(row)
        bars.setdefault((place, phase), []).append((begin, end - begin))
        first, last = spans.get(phase, (begin, end))
        spans[phase] = min(first, begin), max(last, end)
    for (place, phase), widths in bars.items():
        panel.broken_barh(widths, (place - 0.4, 0.8), color=COLORS[phase], linewidth=0)
    names = [f"{stream}: {row}" if len(streams) > 1 else row for stream in streams for row in ROWS]
    panel.set_yticks(range(len(names)), names)
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.set_xlim(*window)
    panel.grid(axis="y", visible=False)
    _label(panel, spans, window)


def _label(panel: Any, spans: dict[str, tuple[float, float]], window: tuple[float, float]) -> None:
    """Name the phases above the bars: those with room where they are, the others to the right."""
    crowded = []
    for phase, (begin, end) in spans.items():
        panel.axvspan(begin, end, color=COLORS[phase], alpha=0.08, linewidth=0)
        if end - begin > 0.05 * (window[1] - window[0]):
            panel.text(
                (begin + end) / 2,
                1.02,
                phase,
                color=COLORS[phase],
                ha="center",
                va="bottom",
                transform=panel.get_xaxis_transform(),
            )
        else:
            crowded.append(phase)
    for at, phase in enumerate(crowded):
        panel.text(
            1.005,
            0.9 - 0.15 * at,
            f"\u25a0 {phase}",
            color=COLORS[phase],
            va="top",
            transform=panel.transAxes,
        )
