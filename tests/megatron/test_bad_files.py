"""Unusable datasets and checkpoints are refused with file and remedy, most before the first process group.

The launches share one process (:mod:`.bad_files_worker`), and the checkpoints are copies of a real one.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy
import pytest

from tests.megatron.checkout.layout import lay_out
from tests.megatron.launcher import MOCK_DATA, REPOSITORY, TINY_GPT, TINY_MOE, environment, pretrain
from tests.megatron.refusals_worker import PROCESS_GROUP_MADE

pytestmark = pytest.mark.timeout(600)

FLAGS = [*TINY_GPT, *TINY_MOE, "--vocab-size", "256"]
HEADER_BYTES = 34
DTYPE_CODES = {numpy.int32: 4, numpy.uint16: 8}


def write_dataset(prefix: Path, lengths: Sequence[int], *, dtype: Any = numpy.uint16, token: int = 7) -> None:
    """Write an indexed dataset with documents of these lengths, without Megatron."""
    sizes = numpy.array(lengths, dtype=numpy.int32)
    starts = numpy.concatenate([[0], numpy.cumsum(sizes, dtype=numpy.int64)[:-1]]) * dtype().itemsize
    with Path(f"{prefix}.idx").open("wb") as index:
        header = (b"MMIDIDX\0\0", 1, DTYPE_CODES[dtype], len(sizes), len(sizes) + 1)
        index.write(struct.pack("<9sQBQQ", *header))
        index.write(sizes.tobytes() + starts.astype(numpy.int64).tobytes())
        index.write(numpy.arange(len(sizes) + 1, dtype=numpy.int64).tobytes())
    numpy.full(int(sizes.sum()), token, dtype=dtype).tofile(f"{prefix}.bin")


def overwrite(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def cut(path: Path, *, bytes_left: int) -> None:
    with path.open("r+b") as file:
        file.truncate(bytes_left)


def describe(prefix: Path, documents: int) -> None:
    """Write the description that ``ampipe data`` puts next to a dataset."""
    values: dict[str, Any] = {"files": documents, "documents": documents, "document_bytes": 0, "tokens": 1}
    values |= {"source": "/", "suffixes": [], "size_bytes": 1, "vocabulary": 256, "skipped": 0}
    Path(f"{prefix}.json").write_text(json.dumps(values | {"content": "", "metadata": ""}))


@dataclass(frozen=True, slots=True)
class Bad:
    """One unusable dataset or checkpoint.

    Attributes:
        spoil: Damages the files. Its argument is the prefix of a dataset with eight documents of 300 tokens,
            or the folder of a checkpoint of iteration 2.
        flags: Flags to add to the command line; ``{path}`` is the argument of ``spoil``.
        expected: A part of the error line; None if nothing is wrong.
        runs: How far: only the checks, a launch up to its process group, or one that loads a checkpoint.
    """

    spoil: Callable[[Path], object]
    flags: str
    expected: str | None
    runs: Literal["checks", "starts", "loads"] = "checks"


def nothing(_path: Path) -> None:
    """Damage nothing."""


def _idx(prefix: Path) -> Path:
    return Path(f"{prefix}.idx")


def _bin(prefix: Path) -> Path:
    return Path(f"{prefix}.bin")


DATA = "--data-path {path} --split 100,0,0"
DATASETS = {
    "well": Bad(nothing, DATA, None, "starts"),
    "parts": Bad(nothing, "--train-data-path {path} --valid-data-path {path} --eval-iters 1", None),
    "split-99": Bad(
        nothing,
        "{script} --data-path {path} --split 99,1,0",
        "--split 99,1,0: gives validation 0 of the 8 documents of {path}, which have 0 tokens, and it "
        "needs 65. Use --split 100,0,0 and --eval-iters 0, or use ampipe data --document-bytes for more.",
        "starts",
    ),
    "split-100-evaluated": Bad(
        nothing,
        "--data-path {path} --split 100,0,0 --eval-iters 1",
        "--split 100,0,0: leaves nothing for validation, and --eval-iters 1 asks for it. Give it documents",
    ),
    "split-words": Bad(
        nothing, "--data-path {path} --split most,some", "--split most,some: is not up to three"
    ),
    "empty-documents": Bad(
        lambda prefix: write_dataset(prefix, [0, 0, 300]),
        "--data-path {path} --split 2,1,0",
        "--split 2,1,0: gives training 2 of the 3 documents of {path}, which have 0 tokens, and it needs 1. ",
    ),
    "parts-without-validation": Bad(
        nothing,
        "--train-data-path {path} --eval-iters 1",
        "--valid-data-path (not given): leaves nothing for validation, and --eval-iters 1 asks for it.",
    ),
    "idx-missing": Bad(
        lambda prefix: _idx(prefix).unlink(),
        DATA,
        "--data-path {path}: Megatron cannot read {path}.idx ([Errno 2] No such file or directory: ",
    ),
    "idx-pipe": Bad(
        lambda prefix: _idx(prefix).unlink() or os.mkfifo(_idx(prefix)),
        DATA,
        "Megatron cannot read {path}.idx ([Errno 22] not a regular file: '{path}.idx'). Copy or make the",
    ),
    "no-tokens": Bad(
        lambda prefix: write_dataset(prefix, [0, 0]), DATA, "{path}.idx lists no tokens, or is damaged."
    ),
    "weight-negative": Bad(
        nothing,
        "--data-path -1 {path} 2 {path} --split 100,0,0",
        "--data-path -1 2: weights of a blend must be at least 0, and one of them above. Write for example",
    ),
    "list-nowhere": Bad(
        nothing,
        "--data-args-path {path}/no --split 100,0,0",
        "arguments (refused by Megatron): [Errno 2] No such file or directory: '{path}/no'. The check is at ",
    ),
    "idx-empty": Bad(
        lambda prefix: cut(_idx(prefix), bytes_left=0),
        DATA,
        "{path}.idx (bad header, cannot read: {path}.idx)",
    ),
    "idx-cut": Bad(
        lambda prefix: cut(_idx(prefix), bytes_left=100),
        DATA,
        "{path}.idx (buffer is smaller than requested size). Copy or make the dataset again, or name another",
    ),
    "bin-cut": Bad(
        lambda prefix: cut(_bin(prefix), bytes_left=4000),
        DATA,
        "{path}.idx describes 4800 bytes, and {path}.bin has 4000. Copy or make the dataset again, or name",
    ),
    "vocabulary": Bad(
        lambda prefix: describe(prefix, 8),
        DATA + " --vocab-size 128",
        "--data-path {path}: holds the token 255, and --vocab-size 128 allows 0 to 127. Use --vocab-size 256",
    ),
    "vocabulary-of-another": Bad(lambda prefix: describe(prefix, 9), DATA + " --vocab-size 128", None),
    "token": Bad(
        lambda prefix: overwrite(_bin(prefix), 2 * 1000, b"\x2c\x01"),
        DATA,
        "--data-path {path}: holds the token 300, and --vocab-size 256 allows 0 to 255. Use --vocab-size 301",
    ),
}

TRACKER = "latest_checkpointed_iteration.txt"


def say(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / TRACKER).write_text(text)


def _saved(folder: Path) -> Path:
    return folder / "iter_0000002"


LOAD = "--load {path} "
CHECKPOINTS = {
    "well": Bad(nothing, LOAD, None, "starts"),
    "new-folder": Bad(nothing, "--load {path}/new", None),
    "tracker-word": Bad(
        say("two\n"),
        "{script} " + LOAD,
        "--load {path}: {path}/latest_checkpointed_iteration.txt holds neither the number of an iteration "
        "nor 'release'. Give the flags of the model that was saved, or write the number of another ",
        "starts",
    ),
    "tracker-word-read-for-arguments": Bad(
        say("two"), LOAD + "--use-checkpoint-args", "arguments (refused by Megatron): ", "starts"
    ),
    "tracker-binary": Bad(
        lambda folder: (folder / TRACKER).write_bytes(bytes(range(256))),
        LOAD,
        "--load {path}: {path}/latest_checkpointed_iteration.txt cannot be read ('utf-8' codec can't decode",
    ),
    "tracker-of-nothing": Bad(
        say("3"),
        LOAD,
        "--load {path}: {path}/iter_0000003 cannot be read ([Errno 2] No such file or directory: '{path}/it",
    ),
    "a-file": Bad(nothing, "--load {path}/" + TRACKER, "latest_checkpointed_iteration.txt: is no folder"),
    "settings-not-json": Bad(
        lambda folder: (_saved(folder) / "metadata.json").write_text("{"),
        LOAD,
        "{path}/iter_0000002 cannot be read (Expecting property name",
    ),
    "index-cut": Bad(
        lambda folder: cut(_saved(folder) / ".metadata", bytes_left=5000),
        LOAD,
        "--load {path}: {path}/iter_0000002 cannot be read (pickle data was truncated). Give the flags of ",
    ),
    "missing-and-asked-for": Bad(
        nothing,
        "--load {path}/new --exit-on-missing-checkpoint",
        "--load {path}/new: holds no checkpoint, and --exit-on-missing-checkpoint asks for one",
        "loads",
    ),
    "shard-cut": Bad(
        lambda folder: cut(_saved(folder) / "__0_0.distcp", bytes_left=70000),
        LOAD,
        "--load {path}: the checkpoint cannot be loaded (",
        "loads",
    ),
    "hidden-size": Bad(
        nothing,
        LOAD + "--hidden-size 128",
        "--load {path}: the checkpoint cannot be loaded (",
        "loads",
    ),
    "longer": Bad(
        nothing,
        LOAD + "--train-iters 6",
        "--load {path}: the checkpoint cannot be loaded (OptimizerParamScheduler: class input value 24 and ",
        "loads",
    ),
    "legacy-cut": Bad(
        lambda folder: legacy(folder, b"PK\x03\x04" + bytes(50)),
        LOAD,
        "--load {path}: the checkpoint cannot be loaded (Megatron has printed the reason above",
        "loads",
    ),
}


def legacy(folder: Path, content: bytes) -> None:
    """A checkpoint of the format ``torch``."""
    shutil.rmtree(_saved(folder))
    (_saved(folder) / "mp_rank_00").mkdir(parents=True)
    (_saved(folder) / "mp_rank_00" / "model_optim_rng.pt").write_bytes(content)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bad_files")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    """The results of one process that launches everything."""
    script = str(lay_out(folder / "checkout", "0.19"))
    saving = [
        *FLAGS,
        *MOCK_DATA,
        "--save",
        str(folder / "saved"),
        "--save-interval",
        "2",
        "--exit-interval",
        "2",
    ]
    run = pretrain(*saving, num_ranks=1)
    assert run.exit_code == 0, run.output[-4000:]
    command_lines = {}
    for kind, cases in (("data", DATASETS), ("load", CHECKPOINTS)):
        for name, case in cases.items():
            path = folder / f"{kind}-{name}"
            if kind == "data":
                write_dataset(path, [300] * 8)
            else:
                shutil.copytree(folder / "saved", path)
            case.spoil(path)
            flags = case.flags.format(path=path, script=script).split()
            scripts = [flags.pop(0)] if flags[0] == script else []
            made_up = MOCK_DATA if kind == "load" else []
            words = [*scripts, *FLAGS, *made_up, *flags]
            command_lines[f"{kind}-{name}"] = (case.runs, words)
    report = folder / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.megatron.bad_files_worker", json.dumps(command_lines)],
        cwd=REPOSITORY,
        env=environment()
        | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        | {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "AMPIPE_TEST_REPORT": str(report)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def _check(case: Bad, name: str, results: dict[str, Any], folder: Path) -> None:
    found = results[name]
    if case.expected is None:
        assert found["code"] == PROCESS_GROUP_MADE, found["output"]
        return
    assert found["code"] == 2, found["output"]
    assert len(found["errors"]) == 1
    assert case.expected.format(path=folder / name) in found["errors"][0]
    assert not found["traceback"]


@pytest.mark.parametrize("name", DATASETS)
def test_dataset(name: str, results: dict[str, Any], folder: Path) -> None:
    _check(DATASETS[name], f"data-{name}", results, folder)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoint(name: str, results: dict[str, Any], folder: Path) -> None:
    _check(CHECKPOINTS[name], f"load-{name}", results, folder)


def test_what_the_first_rank_alone_finds_ends_the_others(tmp_path: Path) -> None:
    """It builds the datasets' index while the others wait for it, here without a launcher that ends them."""
    prefix = tmp_path / "text"
    write_dataset(prefix, [300] * 8)
    words = [*DATA.format(path=prefix).split(), "--data-cache-path", f"{prefix}.idx/cache"]
    run = pretrain(*FLAGS, *words, "--expert-model-parallel-size", "2", timeout_s=90)
    assert run.exit_code == 2
    first, second = [line for line in run.output.splitlines() if line.startswith("error: ")]
    assert first.endswith("a folder in which the datasets' index can be written.")
    assert f": the data cannot be opened ([Errno 20] Not a directory: '{prefix}.idx/cache'). Name an" in first
    assert second.startswith("error: rank 1 failed: it has lost a peer, see above.")
