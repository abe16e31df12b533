"""``scripts/soak.sh`` in its shortest form: SIGTERM, and a checkpoint that is cut in the middle."""

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from tests.forked import REPOSITORY, completed


@pytest.mark.slow
def test_a_training_goes_on_after_sigterm_and_a_cut_checkpoint(tmp_path: Path) -> None:
    path = f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'scripts'}"
    flags = "--iterations 12 --interval 3 --minutes 0 --shape ep2 --only cut-at-sigterm --json"
    completed(
        *(sys.executable, "-m", "soak", *shlex.split(flags), str(tmp_path / "soak.json")),
        env={**os.environ, "PYTHONPATH": path},
        timeout_s=1200,
    )
    text = (tmp_path / "soak.json").read_text()
    document = json.loads(text)
    assert document["command"] == f"scripts/soak.sh {flags} soak.json"
    assert str(tmp_path) not in text and str(REPOSITORY) not in text
    undisturbed, cut = document["rounds"]
    assert (undisturbed["iterations"], undisturbed["checkpoints"], undisturbed["evaluations"]) == (12, 4, 6)
    assert undisturbed["recorded_iterations"] == undisturbed["with_a_rank_without_tokens"] == 4
    # Ended by the signal, refused, and trained to the end.
    assert (cut["kind"], cut["launches"]) == ("cut-at-sigterm", 3)
    assert cut["iterations"] == 12 + cut["repeated"] and 1 <= cut["repeated"] <= 3
