"""Every row of the table of bad inputs ends soon, with its exit code and a helpful message.

One process (:mod:`.bad_inputs_worker`) runs all of them.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.megatron.bad_inputs import CONTROLS, ROWS, Row, write_files
from tests.megatron.bad_inputs_worker import LIMIT_S, TRAIN
from tests.megatron.launcher import REPOSITORY, environment
from tests.megatron.refusal_flags import ACCEPTED

pytestmark = pytest.mark.timeout(600)


def command_line(row: Row, here: Path) -> list[str]:
    """The command line of a row; a launch gets flags that train at degree 1, with mock data."""
    tool, *words = (word.replace("{here}", str(here)) for word in shlex.split(row.words))
    if tool != TRAIN:
        return [tool, *words]
    at = ACCEPTED.index("--ampipe-degree")
    base = [*ACCEPTED[:at], *ACCEPTED[at + 2 :]]
    return [tool, *base, *words]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    write_files(folder)
    return folder


@pytest.fixture(scope="module")
def results(here: Path) -> dict[str, dict[str, Any]]:
    asked = {row.name: (command_line(row, here), row.environment) for row in (*CONTROLS, *ROWS)}
    (here / "asked").write_text(json.dumps(asked))
    report = here / "report"
    done = subprocess.run(
        [sys.executable, "-m", "tests.megatron.bad_inputs_worker", str(here / "asked")],
        cwd=REPOSITORY,
        # A world size of four for Megatron's checks; the other ranks never exist.
        env=environment()
        | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
        | {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "AMPIPE_TEST_REPORT": str(report)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    found: dict[str, dict[str, Any]] = json.loads(report.read_text())
    return found


def test_names_of_rows_are_unique() -> None:
    names = [row.name for row in (*CONTROLS, *ROWS)]
    assert len(set(names)) == len(names) and len(ROWS) >= 60
    assert all(row.says for row in ROWS)


@pytest.mark.parametrize("row", [*CONTROLS, *ROWS], ids=lambda row: row.name)
def test_it_ends_soon_and_says_why(row: Row, here: Path, results: dict[str, dict[str, Any]]) -> None:
    found = results[row.name]
    assert found["code"] is not None, f"not ended after {LIMIT_S} s"
    assert not found["traceback"], found["said"]
    assert found["code"] == row.code, found["said"]
    assert row.says.replace("{here}", str(here)) in found["said"], found["said"]
    if row in CONTROLS:
        return
    (said,) = [line for line in found["said"].splitlines() if line.startswith(("error: ", "ampipe"))]
    # AMPipe's messages are NAME VALUE: RULE. REMEDY. Those of argparse for a tool's arguments are one clause.
    assert ": error: argument " in said or (": " in said and ". " in said and said.endswith((".", "?"))), said
    # Also with a long value, what is wrong and what to do are in sight.
    assert ": error: argument " in said or len(said) < 2500, len(said)
