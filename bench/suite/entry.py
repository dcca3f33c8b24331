"""A contestant in a cell: checked, recorded, and what came of it."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import torch

from . import oracle, timing
from .batch import Batch

if TYPE_CHECKING:
    from .batch import Arena
    from .cases import Case
    from .peers.base import Contestant

PLANS = 16


class Entry:
    """One contestant's line in a cell.

    Parameters
    ----------
    name, setting : str
        As tables show it.
    case : Case
        What it computes.
    failed : str
        Why it has no time.
    """

    def __init__(self, name: str, case: Case, *, setting: str = "", failed: str = "") -> None:
        self.name, self.case, self.setting, self.failed = name, case, setting, failed
        self.batch: Batch | None = None
        self.expected: list[oracle.Answer] | None = None
        self.contestant: Contestant | None = None
        self.recorded: timing.Recorded | None = None
        self.error = math.nan
        self.plan_us: float | None = None
        self.plan_wall_us: float | None = None

    def prepare(self, kind: type[Contestant], arena: Arena, like: Entry | None) -> None:
        """Check the result, time the plan and record the stack.

        ``like`` is an entry of the same case, whose batch and answers serve this one, too.

        Raises
        ------
        ArithmeticError
            If the result is off.
        """
        self.batch = like.batch if like and like.batch else Batch(self.case, arena)
        self.expected = like.expected if like and like.expected else oracle.answers(self.batch)
        self.contestant = kind(self.batch)
        self._check(self.contestant)
        if self.contestant.plans:
            self._time_plan(self.contestant)
        self.recorded = self._stack(self.contestant)

    def _check(self, contestant: Contestant) -> None:
        assert self.batch is not None
        assert self.expected is not None
        contestant.plan()
        contestant.out.fill_(math.nan)
        if self.batch.lse is not None:
            self.batch.lse.fill_(math.nan)
        contestant.run(0)
        self.error = oracle.error(self.batch, self.expected, *contestant.result())
        if not self.error < oracle.LIMIT:
            raise ArithmeticError(f"off by {self.error:.2e}")

    def _time_plan(self, contestant: Contestant) -> None:
        """Take the wall time of a plan, and for plans on the device that of one in a graph."""
        walls = []
        for _ in range(5):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            contestant.plan()
            torch.cuda.synchronize()
            walls.append((time.perf_counter() - begin) * 1e6)
        self.plan_wall_us = sorted(walls)[2]
        if contestant.device_plan:

            def plans() -> None:
                for _ in range(PLANS):
                    contestant.plan()

            self.plan_us = timing.median_of(timing.record(plans, PLANS), 8)

    def _stack(self, contestant: Contestant) -> timing.Recorded:
        """Record calls over the pools in turn."""
        assert self.batch is not None
        # what a recorded plan has left lies in its graph's memory
        contestant.plan()
        pools = len(self.batch.pools)
        single = timing.once(lambda: contestant.run(1))
        calls = max(min(pools, 8), min(timing.MOST_CALLS, round(timing.REPLAY_US / single)))

        def stack() -> None:
            for layer in range(calls):
                contestant.run(layer % pools)

        return timing.record(stack, calls)

    def drop(self) -> None:
        """Let go of the device's memory."""
        self.contestant = self.recorded = self.batch = self.expected = None

    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"name": self.name, "setting": self.setting}
        recorded, batch, contestant = self.recorded, self.batch, self.contestant
        if recorded is None or batch is None or contestant is None:
            return found | {"failed": self.failed}
        return found | {
            "us": round(recorded.median, 3),
            "p10_us": round(recorded.percentile(0.1), 3),
            "p90_us": round(recorded.percentile(0.9), 3),
            "rounds": len(recorded.times),
            "calls": recorded.calls,
            "error": float(f"{self.error:.3g}"),
            "plan_us": self.plan_us and round(self.plan_us, 2),
            "plan_wall_us": self.plan_wall_us and round(self.plan_wall_us, 1),
            "bytes": batch.bytes,
            "flops": batch.flops,
            "tokens": sum(self.case.lengths),
            "case": self.case.name,
            **contestant.detail(),
        }

    def line(self, copy_tb_s: float) -> str:
        if self.recorded is None or self.batch is None:
            return f"{self.name:30} {self.failed.splitlines()[0][:110]}"
        us = self.recorded.median
        floor = self.batch.bytes / copy_tb_s / 1e6
        spread = (self.recorded.percentile(0.9) - self.recorded.percentile(0.1)) / us
        text = (
            f"{self.name:30} {us:10.2f} us +-{spread / 2:5.1%} {floor / us:7.1%} of copy "
            f"{self.batch.flops / us / 1e6:6.1f} TF  error {self.error:.1e}"
        )
        if self.plan_us is not None:
            return f"{text}  plan {self.plan_us:8.2f}"
        if self.plan_wall_us is not None:
            return f"{text}  plan {self.plan_wall_us:8.2f} (host)"
        return text
