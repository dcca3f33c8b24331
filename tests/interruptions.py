"""What an interrupted run knew: which tests had failed, and which were running where.

A plug-in of pytest. The summary comes when all workers have ended, which whoever has no time left
for the tests may not wait for; so this is said at once, and failures as they come, for whoever is
killed. SIGTERM stops a run as Ctrl-C does.
"""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


class Run:
    """The run of this process: of the only one, or of the one that has the workers."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.failed: list[str] = []
        # when each test began, and on which worker, which is known once it is set up
        self.began: dict[str, float] = {}
        self.workers: dict[str, str] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.began[nodeid] = time.monotonic()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(f"{report.nodeid} ({report.when})")
            self.config.get_terminal_writer().line(f"\nfailed: {self.failed[-1]}")
        if worker := getattr(report, "worker_id", ""):
            self.workers[report.nodeid] = f" on {worker}"

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.began.pop(nodeid, None)

    def pytest_keyboard_interrupt(self) -> None:
        now, out = time.monotonic(), self.config.get_terminal_writer()
        out.line(f"\ninterrupted: {len(self.failed)} failed, {len(self.began)} running")
        for nodeid in self.failed:
            out.line(f"  failed: {nodeid}")
        for nodeid, began in self.began.items():
            where = self.workers.get(nodeid, "")
            out.line(f"  running: {nodeid}{where}, for {now - began:.0f} s")
        out.flush()


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Run(config))
        signal.signal(signal.SIGTERM, _stop)


def _stop(number: int, frame: object) -> None:
    # a second one ends the process
    signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt
