"""Run jobs as processes, within a number of seconds, and leave nothing of them behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from bench.engines.cells import Job

# a job that has less than this left is not started; what a start may take; how often jobs are
# looked after
LEAST, START, PAUSE = 40.0, 140.0, 0.1
# lines of a failed job's log that are printed
SHOWN = 60


class Child:
    """A job's process.

    It starts with what needs no time of its own, touches ``<name>.ready``, waits for
    ``<name>.go``, and appends its results to ``<name>.jsonl``.
    """

    def __init__(self, job: Job, out: Path, until: float, command: Sequence[str]) -> None:
        self.job = job
        self.ready, self.go = job.file(out, "ready"), job.file(out, "go")
        self.results, self.printed = job.file(out, "jsonl"), job.file(out, "log")
        self.until = min(until, time.time() + job.seconds)
        for path in (self.ready, self.go, self.results):
            path.unlink(missing_ok=True)
        self.log: TextIO = self.printed.open("w")
        self.process = subprocess.Popen(
            [*command, job.to_json(), str(out), str(self.until)],
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def over(self) -> bool:
        return self.process.poll() is not None or time.time() > self.until

    def stop(self) -> None:
        """End the process and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()

    def found(self) -> list[dict[str, Any]]:
        """Return its results, and a line of how it ended if that was early."""
        lines: list[dict[str, Any]] = []
        if self.results.exists():
            lines = [json.loads(line) for line in self.results.read_text().splitlines()]
        code = self.process.returncode
        if code:
            why = "out of time" if code == -signal.SIGKILL else f"exit status {code}"
            lines.append({"side": self.job.side, "setting": self.job.setting, "error": why})
        return lines

    def tail(self) -> str:
        """Return the end of its log."""
        lines = self.printed.read_text(errors="replace").splitlines()
        return "\n".join(lines[-SHOWN:])


def wait(done: Callable[[], bool]) -> None:
    """Return when something has come about."""
    while not done():
        time.sleep(PAUSE)


def groups(jobs: Sequence[Job], size: int) -> Iterator[list[Job]]:
    """Cut jobs into groups that start together."""
    for at in range(0, len(jobs), size):
        yield list(jobs[at : at + size])


def run(
    jobs: Sequence[Job],
    out: Path,
    seconds: float,
    *,
    together: int = 1,
    in_turn: bool = True,
    command: Sequence[str] | None = None,
) -> Iterator[tuple[Job, list[dict[str, Any]]]]:
    """Run jobs in order while time is left.

    Parameters
    ----------
    jobs : sequence of Job
        The most important first.
    out : Path
        Folder of logs and results.
    seconds : float
        What all of them may take.
    together : int
        How many start at the same time, which must fit on the device together.
    in_turn : bool
        Whether they measure one after the other, as timings must.
    command : sequence of str, optional
        What runs a job.

    Yields
    ------
    tuple of Job and list of dict
        What a job found. A job that there was no time for has one line that says so.
    """
    until = time.time() + seconds
    command = command or (sys.executable, "-m", "bench.engines.child")
    for group in groups(jobs, together):
        if until - time.time() < LEAST:
            for job in group:
                yield job, [{"side": job.side, "setting": job.setting, "error": "no time left"}]
            continue
        children = [Child(job, out, until, command) for job in group]
        try:
            started(children)
            if not in_turn:
                for child in children:
                    child.go.touch()
            for child in children:
                yield child.job, finished(child)
        finally:
            for child in children:
                child.stop()


def started(children: Sequence[Child]) -> None:
    """Wait until all are ready; those that are not after `START` seconds are ended."""
    late = time.time() + START
    wait(lambda: time.time() > late or all(one.ready.exists() or one.over for one in children))
    for child in children:
        if not child.ready.exists():
            child.stop()


def finished(child: Child) -> list[dict[str, Any]]:
    """Give a job its turn, and return what it found; the log of one that failed is printed."""
    child.go.touch()
    wait(lambda: child.over)
    child.stop()
    if child.process.returncode:
        print(f"==== {child.job.name}\n{child.tail()}", flush=True)
    return child.found()
