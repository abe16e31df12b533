"""Unusable datasets and checkpoints are refused before the first process group, with file and remedy.

The launches share one process (:mod:`.bad_files_worker`), and the checkpoints are copies of a real one.
"""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
        is_launched: Run a complete launch, not only the checks.
    """

    spoil: Callable[[Path], object]
    flags: str
    expected: str | None
    is_launched: bool = False


def nothing(_path: Path) -> None:
    """Damage nothing."""


def _idx(prefix: Path) -> Path:
    return Path(f"{prefix}.idx")


def _bin(prefix: Path) -> Path:
    return Path(f"{prefix}.bin")


DATA = "--data-path {path} --split 100,0,0"
DATASETS = {
    "well": Bad(nothing, DATA, None, is_launched=True),
    "split-99": Bad(
        nothing,
        "--data-path {path} --split 99,1,0",
        "--split 99,1,0: gives validation none of the 8 documents of {path}. Use --split 7,1,0, or make more "
        "documents of the same text: ampipe data --document-bytes.",
        is_launched=True,
    ),
    "split-99-degree-4": Bad(
        nothing,
        "--data-path {path} --split 99,1,0 --ampipe-degree 4",
        "--split 99,1,0: gives validation none",
        is_launched=True,
    ),
    "split-default": Bad(
        nothing, "--data-path {path}", "--split 969, 30, 1: gives validation none of the 8 documents"
    ),
    "split-remedy": Bad(nothing, "--data-path {path} --split 7,1,0", None),
    "split-remedy-of-three": Bad(nothing, "--data-path {path} --split 6,1,1", None),
    "split-100-evaluated": Bad(
        nothing,
        "--data-path {path} --split 100,0,0 --eval-iters 1",
        "--split 100,0,0: leaves nothing for validation, and --eval-iters 1 asks for it. Add --eval-iters 0",
    ),
    "split-nothing-to-train": Bad(
        nothing, "--data-path {path} --split 0,100,0", "--split 0,100,0: leaves nothing to train on"
    ),
    "split-words": Bad(
        nothing, "--data-path {path} --split most,some", "--split most,some: is not up to three"
    ),
    "split-negative": Bad(nothing, "--data-path {path} --split=-99,1", "--split -99,1: is not up to three"),
    "split-zeros": Bad(nothing, "--data-path {path} --split 0,0,0", "--split 0,0,0: is not up to three"),
    "split-of-one": Bad(
        lambda prefix: write_dataset(prefix, [2000]),
        "--data-path {path} --split 1,1",
        "--split 1,1: gives training none of the 1 documents of {path}. Use --split 100,0,0 with ",
    ),
    "short-validation": Bad(
        lambda prefix: write_dataset(prefix, [300, 300, 5]),
        "--data-path {path} --split 2,1,0",
        "--split 2,1,0: validation gets 1 documents of {path}, which have 5 tokens together, and it needs 65",
    ),
    "empty-documents": Bad(
        lambda prefix: write_dataset(prefix, [0, 0, 300]),
        "--data-path {path} --split 2,1,0",
        "--split 2,1,0: training gets 2 documents of {path}, which have 0 tokens together, and it needs 1",
    ),
    "parts-without-validation": Bad(
        nothing,
        "--train-data-path {path} --eval-iters 1",
        "--valid-data-path (not given): validation has no data, and --eval-iters 1 asks for it.",
    ),
    "parts": Bad(nothing, "--train-data-path {path} --valid-data-path {path} --eval-iters 1", None),
    "idx-missing": Bad(
        lambda prefix: _idx(prefix).unlink(), DATA, "--data-path {path}: the file {path}.idx is not there."
    ),
    "idx-empty": Bad(lambda prefix: cut(_idx(prefix), bytes_left=0), DATA, "{path}.idx is empty."),
    "idx-cut-header": Bad(
        lambda prefix: cut(_idx(prefix), bytes_left=20),
        DATA,
        "{path}.idx is cut off: it has 20 bytes, and its header alone takes 34.",
    ),
    "idx-cut": Bad(
        lambda prefix: cut(_idx(prefix), bytes_left=100),
        DATA,
        "{path}.idx is cut off: its header tells of 8 sequences, which take 202 bytes, and it has 100.",
    ),
    "idx-random": Bad(
        lambda prefix: _idx(prefix).write_bytes(numpy.random.default_rng(0).bytes(300)),
        DATA,
        "{path}.idx is no index of Megatron's: its first bytes are ",
    ),
    "idx-version": Bad(
        lambda prefix: overwrite(_idx(prefix), 9, b"\x07"), DATA, "byte 9 of {path}.idx says version 7"
    ),
    "idx-token-type": Bad(
        lambda prefix: overwrite(_idx(prefix), 17, b"\x63"),
        DATA,
        "byte 17 of {path}.idx says type of token",
    ),
    "idx-random-length": Bad(
        lambda prefix: overwrite(_idx(prefix), HEADER_BYTES + 4 * 3, b"\xff\xff\xff\x7f"),
        DATA,
        "sequence 3 of {path}.idx has 2147483647 tokens from byte 1800 on, and {path}.bin has 4800 bytes.",
    ),
    "idx-of-another": Bad(
        lambda prefix: write_dataset(prefix, [300] * 7) or _bin(prefix).write_bytes(bytes(4800)),
        DATA,
        "{path}.idx describes 4200 bytes, and {path}.bin has 4800.",
    ),
    "bin-cut": Bad(
        lambda prefix: cut(_bin(prefix), bytes_left=4000),
        DATA,
        "sequence 6 of {path}.idx has 300 tokens from byte 3600 on, and {path}.bin has 4000 bytes.",
    ),
    "bin-empty": Bad(lambda prefix: cut(_bin(prefix), bytes_left=0), DATA, "and {path}.bin has 0 bytes."),
    "vocabulary": Bad(
        lambda prefix: describe(prefix, 8),
        DATA + " --vocab-size 128",
        "--data-path {path}: holds tokens up to 255, as {path}.json says, and --vocab-size 128 ends at 127. "
        "Use --vocab-size 256.",
    ),
    "vocabulary-of-another": Bad(lambda prefix: describe(prefix, 9), DATA + " --vocab-size 128", None),
    "token": Bad(
        lambda prefix: overwrite(_bin(prefix), 2 * 1000, b"\x2c\x01"),
        DATA,
        "the token 300 at byte 2000 of {path}.bin is not in the vocabulary: --vocab-size 256 goes from 0 to ",
    ),
    "token-negative": Bad(
        lambda prefix: write_dataset(prefix, [300] * 8, dtype=numpy.int32, token=-1),
        DATA,
        "the token -1 at byte 0 of {path}.bin is not in the vocabulary",
    ),
    "launcher-split": Bad(
        nothing,
        "{script} --data-path {path} --split 99,1,0",
        "--split 99,1,0: gives validation none of the 8",
        is_launched=True,
    ),
}

TRACKER = "latest_checkpointed_iteration.txt"


def say(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / TRACKER).write_text(text)


def _saved(folder: Path) -> Path:
    return folder / "iter_0000002"


LOAD = "--load {path} "
CHECKPOINTS = {
    "well": Bad(nothing, LOAD, None, is_launched=True),
    "longer": Bad(
        nothing,
        LOAD + "--train-iters 6",
        "--train-iters 6: the learning rate of the checkpoint {path}/iter_0000002 was planned with 4.0 "
        "iterations. Add --override-opt-param-scheduler",
    ),
    "longer-overridden": Bad(nothing, LOAD + "--train-iters 6 --override-opt-param-scheduler", None),
    "lr": Bad(nothing, LOAD + "--lr 3e-4", "--lr 0.0003: the learning rate of the checkpoint"),
    "tracker-word": Bad(
        say("two\n"),
        LOAD,
        "--load {path}: {path}/latest_checkpointed_iteration.txt says 'two', which is neither the number of "
        "an iteration nor release. Saved here: 2. Write one of these into ",
    ),
    "tracker-empty": Bad(say(""), LOAD, "says '', which is neither"),
    "tracker-negative": Bad(say("-1"), LOAD, "says '-1', which is neither"),
    "tracker-word-in-launcher": Bad(
        say("two"), "{script} " + LOAD, "says 'two', which is neither", is_launched=True
    ),
    "tracker-word-read-for-arguments": Bad(
        say("two"), LOAD + "--use-checkpoint-args", "arguments (refused by Megatron): ", is_launched=True
    ),
    "tracker-of-nothing": Bad(say("3"), LOAD, "asks for iter_0000003, and there is no such folder"),
    "step-of-nothing": Bad(
        nothing, LOAD + "--ckpt-step 7", "--ckpt-step 7 asks for iter_0000007, and there is no such folder"
    ),
    "a-file": Bad(nothing, "--load {path}/" + TRACKER, "latest_checkpointed_iteration.txt: is a file"),
    "new-folder": Bad(nothing, "--load {path}/new", None),
    "missing-and-asked-for": Bad(
        nothing,
        "--load {path}/new --exit-on-missing-checkpoint",
        "--load {path}/new: holds no checkpoint, and --exit-on-missing-checkpoint asks for one.",
    ),
    "foreign": Bad(
        lambda folder: shutil.rmtree(_saved(folder)) or _saved(folder).mkdir(),
        LOAD,
        "{path}/iter_0000002 holds no checkpoint of Megatron's: .metadata is missing in it.",
    ),
    "settings-not-json": Bad(
        lambda folder: (_saved(folder) / "metadata.json").write_text("{"), LOAD, "metadata.json is not JSON"
    ),
    "settings-of-another": Bad(
        lambda folder: (_saved(folder) / "metadata.json").write_text("[]"),
        LOAD,
        "metadata.json does not say in which format the checkpoint is",
    ),
    "index-cut": Bad(
        lambda folder: cut(_saved(folder) / ".metadata", bytes_left=5000),
        LOAD,
        "{path}/iter_0000002/.metadata is cut off or damaged (5000 bytes; ",
    ),
    "index-random": Bad(
        lambda folder: (_saved(folder) / ".metadata").write_bytes(numpy.random.default_rng(1).bytes(500)),
        LOAD,
        "{path}/iter_0000002/.metadata is cut off or damaged (500 bytes; ",
    ),
    "shard-missing": Bad(
        lambda folder: (_saved(folder) / "__0_0.distcp").unlink(),
        LOAD,
        "{path}/iter_0000002/__0_0.distcp is missing.",
    ),
    "shard-cut": Bad(
        lambda folder: cut(_saved(folder) / "__0_0.distcp", bytes_left=70000),
        LOAD,
        "{path}/iter_0000002/__0_0.distcp is cut off: it has 70000 bytes, and ",
    ),
    "shard-random": Bad(
        lambda folder: overwrite(_saved(folder) / "__0_0.distcp", 0, b"\0" * 64),
        LOAD,
        "{path}/iter_0000002/__0_0.distcp is damaged: at byte 0 it has ",
    ),
    "hidden-size": Bad(
        nothing,
        LOAD + "--hidden-size 128",
        "--hidden-size 128: the checkpoint {path}/iter_0000002 was saved with 64. Use --hidden-size 64, or",
        is_launched=True,
    ),
    "num-experts": Bad(
        nothing,
        LOAD + "--num-experts 8 --ampipe-degree 4",
        "--num-experts 8: the checkpoint {path}/iter_0000002 was saved with 4.",
    ),
    "legacy-cut": Bad(
        lambda folder: legacy(folder, b"PK\x03\x04" + bytes(50)),
        LOAD,
        "mp_rank_00/model_optim_rng.pt is cut off after 54 bytes or damaged",
    ),
    "legacy-random": Bad(
        lambda folder: legacy(folder, b"hello"), LOAD, "model_optim_rng.pt was not written by torch.save"
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
            command_lines[f"{kind}-{name}"] = (case.is_launched, words)
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
