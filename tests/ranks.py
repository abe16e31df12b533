"""Tests that run on several ranks: those with the mark ``ranks(n)``, of a module in one launch.

On a rank a test is an ordinary one, after :func:`tests.dist.worker.start`; all ranks run the same tests in
the same order. It has passed if it has on every rank.
"""

import functools
import itertools
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.forked import run_workers

MOST = 80
"""Tests that share processes."""
_LEFT_OUT = ("cacheprovider", "xdist", "warnings", "anyio", "hypothesispytest", "unraisableexception")
PLUGINS = [word for name in _LEFT_OUT for word in ("-p", f"no:{name}")]
"""Options that leave out what ranks do not need. The last two import hypothesis, and collect garbage."""


class Outcomes:
    """A plugin: for each test, ``passed``, ``skipped: why`` or ``failed: how``."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep the outcome."""
        if report.when == "call" or report.outcome != "passed":
            why = report.longrepr[2] if report.skipped else report.longreprtext[-3000:]
            self.outcomes[report.nodeid] = report.outcome if report.passed else f"{report.outcome}: {why}"


class RankTest(pytest.Item):
    """A test whose outcomes the ranks report."""

    launch: Callable[[], list[dict[str, str]]]

    def runtest(self) -> None:
        """Start the ranks, if no other test has."""
        require_passed([outcomes.get(self.nodeid, "did not run") for outcomes in self.launch()])

    def repr_failure(self, excinfo: Any, style: Any = None) -> str:
        """What the rank said."""
        return str(excinfo.value)


def require_passed(outcomes: Sequence[str]) -> None:
    """Fail or skip the test as its ranks did, whose ``outcomes`` these are.

    A test is skipped only if every rank has skipped it: a skip must not hide what another rank has found.
    """
    skipped = [outcome for outcome in outcomes if outcome.startswith("skipped")]
    if outcomes and len(skipped) == len(outcomes):
        pytest.skip(skipped[0])
    wrong = [f"rank {rank} {outcome}" for rank, outcome in enumerate(outcomes) if outcome != "passed"]
    # A failure says more than that another rank has skipped the test.
    wrong.sort(key=lambda said: " skipped" in said)
    assert not wrong, "\n".join(wrong)


def on_ranks(items: list[pytest.Item]) -> None:
    """Replace marked tests, except on a rank."""
    launches: dict[tuple[Path, int], list[RankTest]] = defaultdict(list)
    for place, item in enumerate(items):
        mark = item.get_closest_marker("ranks")
        if mark is not None and "AMPIPE_TEST_REPORT" not in os.environ:
            items[place] = test = RankTest.from_parent(item.parent, name=item.name)
            test.own_markers = list(item.iter_markers())
            launches[item.path, *mark.args].append(test)
    for (_, num_ranks), tests in launches.items():
        for shared in itertools.batched(tests, MOST):
            names = [test.nodeid for test in shared]
            launch = functools.cache(
                functools.partial(run_workers, "tests.ranks", names, world_size=num_ranks)
            )
            for test in shared:
                test.launch = launch


def main() -> None:
    """Run the tests that the arguments name, as one of the ranks."""
    from tests.dist.worker import report, start

    start()
    found = Outcomes()
    pytest.main(["-q", *PLUGINS, *sys.argv[1:]], plugins=[found])
    report(found.outcomes)


if __name__ == "__main__":
    main()
