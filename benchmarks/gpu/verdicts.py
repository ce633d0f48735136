"""A plugin of pytest: each test's verdict goes into the file of results as it is made (`pytest -p benchmarks.gpu.verdicts`).

Once an error has cost the process its CUDA context, no test after it can be judged, and none is run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import lines

CHARACTERS = 4000
"""Of the end of an error's text, and of what a test printed."""
_LOST = re.compile("illegal (memory access|address)|device-side assert|misaligned address|unspecified launch failure")
"""In the text of an error after which the process has no CUDA context."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lines", type=Path, required=True, help="the file of results")
    parser.addoption("--part", required=True, help="the part that these tests are")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Verdicts(config.getoption("lines"), config.getoption("part")))


class _Verdicts:
    def __init__(self, path: Path, part: str) -> None:
        self.path = path
        self.part = part
        self.lost = ""

    def _write(self, test: str, outcome: str, **more: Any) -> None:
        lines.append(self.path, kind="test", part=self.part, test=test, outcome=outcome, **more)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(nodeid, "began")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Of the call; of what comes before and after it where that did not pass."""
        if report.when != "call" and report.passed:
            return
        text = report.longreprtext
        if report.skipped:
            text = str(getattr(report, "wasxfail", None) or _reason(report.longrepr))
        elif report.failed and _LOST.search(text):
            self.lost = report.nodeid
        more = {"message": text[-CHARACTERS:]} if text else {}
        if report.capstdout:  # numbers
            more["output"] = report.capstdout[-CHARACTERS:]
        self._write(report.nodeid, report.outcome, seconds=round(report.duration, 3), **more)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(report.nodeid, "failed", message=report.longreprtext[-CHARACTERS:])
        elif report.skipped:
            self._write(report.nodeid, "skipped", message=_reason(report.longrepr))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        result = yield
        if self.lost:
            item.session.shouldstop = f"the device was lost in {self.lost}"
        return result


def _reason(skip: Any) -> str:
    return str(skip[2] if isinstance(skip, tuple) else skip).removeprefix("Skipped: ")
