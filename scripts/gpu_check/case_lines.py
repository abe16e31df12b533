"""A pytest plugin that writes the outcome of every test when it ends, so that a run that is cut has said it.

One line of JSON each, to the file of the option ``--case-lines``; the first has the number of tests.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """The file."""
    parser.addoption("--case-lines", metavar="FILE", type=Path, required=True)


def pytest_configure(config: pytest.Config) -> None:
    """The rest is done by an object, which knows the file."""
    config.pluginmanager.register(_Writer(config.getoption("--case-lines")))


class _Writer:
    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """How many there are."""
        self._write(tests=len(session.items))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The outcome of one; an error before or after it counts as its own."""
        if report.when != "call" and report.outcome == "passed":
            return
        said = ""
        if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
            said = report.longrepr[2]
        elif report.outcome != "passed":
            crash = getattr(report.longrepr, "reprcrash", None)
            said = crash.message if crash is not None else report.longreprtext[-200:]
        self._write(
            test=report.nodeid.rpartition("::")[2],
            outcome=report.outcome,
            said=" ".join(said.split())[:300],
            seconds=round(report.duration, 2),
            notes=[f"{name}: {value}" for name, value in report.user_properties],
        )

    def _write(self, **fields: object) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(fields) + "\n")
