"""Every row of the tables of bad inputs ends soon, with its exit code and a helpful message."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from tests.forked import run_ranks, variables_of
from tests.megatron import bad_inputs
from tests.megatron.launcher import MOCK_DATA, TINY_GPT, TINY_MOE, environment, meeting_place, pretrain
from tests.megatron.one_launch import NOWHERE, TRAIN
from tests.megatron.test_refusals import ACCEPTED

pytestmark = pytest.mark.timeout(900)

ONE_RANK = {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
LIMIT_S = 60.0
SMALL = [*TINY_GPT, *TINY_MOE, "--vocab-size", "256"]

Asked = dict[str, tuple[list[str], dict[str, str], str | None, int]]
"""By name: words, environment, a part of the output, and the exit code."""


def asked(here: Path) -> Asked:
    """Everything that is run."""
    at = ACCEPTED.index("--ampipe-degree")
    stock = [*ACCEPTED[:at], *ACCEPTED[at + 2 :]]
    rows: Asked = {}
    for name, (_, says) in bad_inputs.YAML.items():
        path = str(here / f"{name}.yaml")
        rows[name] = (["config", "--ampipe-config", path], {}, says.replace("{line}", f"{path}:"), 2)
    for name, (words, says) in bad_inputs.TOOLS.items():
        rows[name] = (_words(words, here), {}, says, 2)
    for name, (words, says) in bad_inputs.TRAIN.items():
        rows[name] = ([TRAIN, *stock, *_words(words, here)], {}, says, 2)
    for name, (variables, says) in bad_inputs.VARIABLES.items():
        rows[name] = ([TRAIN, *stock, "--ampipe-degree", "2"], variables, says, 2)
    for name, (words, says, code) in bad_inputs.CONTROLS.items():
        tool, *rest = _words(words, here)
        rows[name] = ([tool, *(stock if tool == TRAIN else []), *rest], {}, says, code)
    saving = ["--save", str(here / "saved"), "--save-interval", "2", "--exit-interval", "2"]
    run = pretrain(*SMALL, *MOCK_DATA, *saving, num_ranks=1)
    assert run.exit_code == 0, run.output[-4000:]
    for name, (spoil, words, says) in bad_inputs.DATASETS.items():
        path = here / f"data-{name}"
        bad_inputs.write_dataset(path, [300] * 8)
        spoil(path)
        rows[f"data-{name}"] = _trains(path, [], words, says)
    for name, (spoil, words, says) in bad_inputs.CHECKPOINTS.items():
        path = here / f"load-{name}"
        shutil.copytree(here / "saved", path)
        spoil(path)
        rows[f"load-{name}"] = _trains(path, MOCK_DATA, words, says)
    return rows


def _words(text: str, here: Path) -> list[str]:
    return [word.replace("{here}", str(here)) for word in shlex.split(text)]


def _trains(
    path: Path, data: list[str], flags: str, says: str | None
) -> tuple[list[str], dict[str, str], str | None, int]:
    """A training run of one rank, which meets itself."""
    words = [TRAIN, *SMALL, *data, *(word.replace("{path}", str(path)) for word in flags.split())]
    expected = None if says is None else says.replace("{path}", str(path))
    return words, {**ONE_RANK, **meeting_place()}, expected, 0 if says is None else 2


NAMES = [
    *bad_inputs.YAML, *bad_inputs.TOOLS, *bad_inputs.TRAIN, *bad_inputs.VARIABLES, *bad_inputs.CONTROLS,
    *(f"data-{name}" for name in bad_inputs.DATASETS), *(f"load-{name}" for name in bad_inputs.CHECKPOINTS),
]  # fmt: skip


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all files."""
    here = tmp_path_factory.mktemp("bad")
    bad_inputs.write_files(here)
    return here


@pytest.fixture(scope="module")
def rows(here: Path) -> Asked:
    return asked(here)


@pytest.mark.parametrize("name", NAMES)
def test_it_ends_soon_and_says_why(name: str, here: Path, rows: Asked) -> None:
    words, variables, says, code = rows[name]
    # A world size of four for Megatron's checks; the other ranks never exist.
    alone = environment() | variables_of(0, 4) | NOWHERE | variables
    (ended,), (output,) = run_ranks(
        "tests.megatron.one_launch", words, environments=[alone], timeout_s=LIMIT_S
    )
    assert ended is not None, f"not ended after {LIMIT_S} s"
    assert ended == code and "Traceback" not in output, output
    assert (says or "").replace("{here}", str(here)) in output, output
    if code == 2:
        (said,) = (line for line in output.splitlines() if line.startswith(("error: ", "ampipe")))
        # NAME VALUE: RULE. REMEDY. Also with a long value, what is wrong and what to do are in sight.
        assert ": " in said and ". " in said and said.endswith((".", "?")) and len(said) < 2500, said


def test_what_the_first_rank_alone_finds_ends_the_others(tmp_path: Path) -> None:
    """It builds the datasets' index while the others wait for it, here without a launcher that ends them."""
    prefix = tmp_path / "text"
    bad_inputs.write_dataset(prefix, [0, 0, 300])
    words = ["--data-path", str(prefix), "--split", "2,1,0", "--expert-model-parallel-size", "2"]
    run = pretrain(*SMALL, *words, timeout_s=90)
    assert run.exit_code == 2
    first, second = [line for line in run.output.splitlines() if line.startswith("error: ")]
    assert first.startswith(f"error: --split 2,1,0: gives train no token of {prefix}.")
    assert second.startswith("error: rank 1 failed: it has lost a peer, see above.")
