"""The process of one job: starts an engine, waits for its turn, and measures place by place."""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.engines.cells import OWN, Job, seconds_for

if TYPE_CHECKING:
    from collections.abc import Iterator

PAUSE = 0.05


class Turn:
    """A job's place among others: its results, its log, and the time it has.

    Parameters
    ----------
    job : Job
    out : Path
        Folder of its files.
    until : float
        When it must have ended, by `time.time`.
    """

    def __init__(self, job: Job, out: Path, until: float) -> None:
        self.job, self.out, self.until = job, out, until
        self.started = time.time()

    def wait(self) -> None:
        """Say that the engine has started, and wait until nobody else measures."""
        self.start_seconds = round(time.time() - self.started, 1)
        self.job.file(self.out, "ready").touch()
        while not self.job.file(self.out, "go").exists():
            time.sleep(PAUSE)

    def record(self, **found: Any) -> None:
        """Append a result."""
        line = {"kind": self.job.kind, "side": self.job.side, "setting": self.job.setting, **found}
        line |= self.job.stated
        line["start_s"] = self.start_seconds
        with self.job.file(self.out, "jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def places(self) -> Iterator[tuple[int, int]]:
        """Yield the places that there is time for; the others are recorded as left out."""
        for batch, context in self.job.places:
            if time.time() + seconds_for(batch, context) > self.until:
                self.record(batch=batch, context=context, error="no time left")
                continue
            yield batch, context

    def log_size(self) -> int:
        """Return where the log ends now."""
        sys.stdout.flush()
        return self.job.file(self.out, "log").stat().st_size

    def log_since(self, at: int) -> str:
        """Return what was written to the log since."""
        with self.job.file(self.out, "log").open("rb") as file:
            file.seek(at)
            return file.read().decode(errors="replace")


def main() -> None:
    job, out, until = Job.from_json(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    side = "own_side" if job.side == OWN else "sglang_side"
    import_module(f"bench.engines.{side}").run(Turn(job, out, until))
    sys.stdout.flush()
    # an engine's threads may outlive it
    os._exit(0)


if __name__ == "__main__":
    main()
