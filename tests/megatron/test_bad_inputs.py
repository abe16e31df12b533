"""Every row of the tables of bad inputs ends soon, with its exit code and a helpful message.

``{here}`` is a folder with :data:`FILES`; ``{path}`` is a dataset or a checkpoint that the row has damaged.
"""

import json
import os
import shlex
import shutil
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy
import pytest

from megatron_ampipe.files.inputs import config_names
from megatron_ampipe.schedule import BlockFeatures, build, to_text
from tests.forked import run_ranks, variables_of
from tests.megatron.launcher import MOCK_DATA, TINY_GPT, TINY_MOE, environment, meeting_place, pretrain
from tests.megatron.one_launch import NOWHERE, PROCESS_GROUP_MADE, TRAIN
from tests.megatron.test_refusals import ACCEPTED

pytestmark = pytest.mark.timeout(900)

_PLAN_OF_DEGREE_2 = {
    "format": "ampipe-plan-1",
    "forward_degree": 2,
    "backward_degree": 2,
    "shares": [0.5, 0.5],
    "reason": "by hand",
    "schedule": to_text(build("ampipe", degree=2, features=BlockFeatures(chunked_qkv=True))),
}


_EVENT = {
    "name": "attention.0",
    "cat": "forward",
    "ph": "X",
    "ts": 0.0,
    "dur": 1.0,
    "pid": 0,
    "tid": "compute",
    "args": {"layer": 1, "iteration": 1},
}
_CLUSTER = config_names("clusters")["a800x8-20gbps"].read_text()
FILES = {
    "empty": "",
    "good.plan": json.dumps(_PLAN_OF_DEGREE_2),
    "good.cluster": _CLUSTER,
    "inf.cluster": _CLUSTER.replace("alpha_us: 20", "alpha_us: .inf", 1),
    "good.trace": json.dumps({"traceEvents": [_EVENT], "otherData": {"rank": "0"}}),
}
"""Contents of files by name."""


def write_files(folder: Path) -> None:
    """Create all files that the rows name."""
    for name, content in FILES.items():
        (folder / name).write_text(content)
    for name, (content, _) in YAML.items():
        (folder / f"{name}.yaml").write_text(content)


_BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
"""A few lines that YAML expands to a list of 10**9 words."""

YAML = {
    # Keys.
    "key-misspelt": ("lr: 1\nnum_layers: 2", "{line}2: num_layers: there is no such flag. Did you mean num-"),
    # Values.
    "word-for-number": ("lr: fast", "{line}1: --lr: invalid float value: 'fast'. Run with --help"),
    "switch-for-number": ("num-layers: true", "num-layers: True: takes numbers and text; words such"),
    "choice": ("attention-backend: flsh", "arguments (incomplete): 'flsh' is no choice of its flag. Run"),
    "list-for-pattern": ("moe-layer-freq: [0, 1]", "['0', '1']: takes numbers and text; words"),
    # Sections.
    "own-at-top": ("degree: 4", "degree: there is no such flag. Write it below 'ampipe:', indented."),
    "own-no-section": ("ampipe: 4", "{line}1: ampipe: is a section. Write one 'flag: value' on each line"),
    "file-in-file": ("ampipe:\n  config: tiny", "{line}2: ampipe-config: cannot be set in a file. Give"),
    # Files.
    "object": ("lr: !!python/object/apply:os.getcwd []", "{line}1: YAML: the tag !!python/object/apply:os."),
    "bomb": (_BOMB + "num-layers: *i\n", "{line}1: YAML: the alias *a repeats a list or a section; write"),
    "deep": ("num-layers: " + "[" * 20_000, "deep.yaml: cannot be read as YAML."),
}
"""Files for ``ampipe config``, and a part of the message; ``{line}`` is the file with a colon."""

_PLAN = "plan --model mixtral-8x7b --cluster "
_DRAW = "draw --output {here}/out/p {here}/"
_TRACE = "is not a trace written by AMPipe. Give a file that a run with --ampipe-trace-dir wrote"
TOOLS = {
    "cluster-infinite": (_PLAN + "{here}/inf.cluster", "intra.all_to_all.alpha_us inf: must be a number"),
    "cluster-is-a-plan": (_PLAN + "{here}/good.plan", "good.plan:1: format: is not a known key. Use one of"),
    "set-object": (_PLAN + "dgx-h100 --set hidden-size=!!python/name:os.system", "is not FLAG=VALUE"),
    "trace-is-a-plan": (_DRAW + "good.plan", _TRACE),
    "bench-from-trace": ("bench --from {here}/good.trace", "is not a result of ampipe bench. Give a file"),
    "config-flag": ("config --num_layers 2", "--num_layers 2: there is no such flag. Did you mean --num-la"),
}
"""Commands, and a part of the message."""

_AUTO = "--ampipe-degree auto "
LAUNCHES = {
    "degree-0": ("--ampipe-degree 0", "--ampipe-degree 0: must be a whole number"),
    "degree-two-words": ("--ampipe-degree 4 4", "argument 4: there is no such flag. Run with"),
    "schedule-at-degree-1": ("--ampipe-schedule ampipe", "has no effect at --ampipe-degree 1, which"),
    "exchange-in-one-chunk": (
        "--ampipe-exchange ranks --cpu-offloading-num-layers 1 --moe-router-topk 2 "
        "--expert-model-parallel-size 2",
        "--cpu-offloading-num-layers 1: with --ampipe-exchange ranks, activation offloading is not supported "
        "yet. Leave it out, or train with --ampipe-exchange rows.",
    ),
    "save-plan-foreign": (_AUTO + "--ampipe-save-plan {here}/good.trace", "good.trace:1: traceEvents"),
    "save-file": ("--ampipe-degree 2 --save {here}/empty --save-interval 2", "to (Not a directory)."),
    "router-ids": (
        "--ampipe-router tests.gates:BiasedByIdRouter --mlp-chunks-for-training 2",
        "--mlp-chunks-for-training 2: with --ampipe-router tests.gates:BiasedByIdRouter, Megatron routes",
    ),
    "flag-misspelt": ("--ampipe_degree 2", "argument --ampipe_degree 2: there is no such flag. Did you mean"),
    "megatrons-check": ("--hidden-size 130", "assert args.hidden_size % args.num_attention_heads == 0. The"),
}
"""Flags after those of a launch with made-up data, and a part of the message."""

CONTROLS = {
    "train-well": ("train --ampipe-plan {here}/good.plan", "", PROCESS_GROUP_MADE),
    "plan-well": (_PLAN + "{here}/good.cluster", "choice: ", 0),
    "draw-well": (_DRAW + "good.trace", "wrote ", 0),
}
"""Valid inputs, so that only the argument of a row is wrong: words, a part of the output, the exit code."""


def write_dataset(prefix: Path, lengths: Sequence[int]) -> None:
    """Write an indexed dataset of 16-bit tokens with documents of these lengths, without Megatron."""
    sizes = numpy.array(lengths, dtype=numpy.int32)
    starts = numpy.concatenate([[0], numpy.cumsum(sizes, dtype=numpy.int64)[:-1]]) * 2
    with Path(f"{prefix}.idx").open("wb") as index:
        index.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(sizes), len(sizes) + 1))
        index.write(sizes.tobytes() + starts.astype(numpy.int64).tobytes())
        index.write(numpy.arange(len(sizes) + 1, dtype=numpy.int64).tobytes())
    numpy.full(int(sizes.sum()), 7, dtype=numpy.uint16).tofile(f"{prefix}.bin")


def _with(suffix: str, spoil: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda path: spoil(Path(f"{path}{suffix}"))


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _note(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "latest_checkpointed_iteration.txt").write_text(text)


def _nothing(_path: Path) -> None:
    """Damage nothing."""


_DATA = "--data-path {path} --split 100,0,0"
_UNLOADABLE = "--load {path}: the checkpoint cannot be loaded ("
DATASETS = {
    "well": (_nothing, _DATA, None),
    "no-data": (_nothing, "", "--data-path (not given): a run needs data. Give --data-path PREFIX, or"),
    "idx-cut": (_with(".idx", _cut), _DATA, "{path}.idx (buffer is smaller than requested size). Copy"),
    "no-tokens": (
        lambda path: write_dataset(path, [0, 0, 300]),
        "--data-path {path} --split 2,1,0",
        "--split 2,1,0: gives train no token of {path}. Use --split 100,0,0 and --eval-iters 0, or",
    ),
    "cache": (_nothing, _DATA + " --data-cache-path {path}.idx/cache", "Failed to write dataset materials"),
}
"""What damages a dataset of eight documents of 300 tokens, flags, and a part of the message; None if well."""

CHECKPOINTS = {
    "new-folder": (_nothing, "--load {path}/new", None),
    "note-of-nothing": (_note("3"), "--load {path}", _UNLOADABLE),
    "shard-cut": (_with("/iter_0000002/__0_0.distcp", _cut), "--load {path}", _UNLOADABLE),
    "longer": (_nothing, "--load {path} --train-iters 6", _UNLOADABLE + "OptimizerParamScheduler: class inp"),
}
"""The same of a checkpoint of iteration 2."""


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
    for name, (_, says) in YAML.items():
        path = str(here / f"{name}.yaml")
        rows[name] = (["config", "--ampipe-config", path], {}, says.replace("{line}", f"{path}:"), 2)
    for name, (words, says) in TOOLS.items():
        rows[name] = (_words(words, here), {}, says, 2)
    for name, (words, says) in LAUNCHES.items():
        rows[name] = ([TRAIN, *stock, *_words(words, here)], {}, says, 2)
    for name, (words, says, code) in CONTROLS.items():
        tool, *rest = _words(words, here)
        rows[name] = ([tool, *(stock if tool == TRAIN else []), *rest], {}, says, code)
    saving = ["--save", str(here / "saved"), "--save-interval", "2", "--exit-interval", "2"]
    run = pretrain(*SMALL, *MOCK_DATA, *saving, num_ranks=1)
    assert run.exit_code == 0, run.output[-4000:]
    for name, (spoil, words, says) in DATASETS.items():
        path = here / f"data-{name}"
        write_dataset(path, [300] * 8)
        spoil(path)
        rows[f"data-{name}"] = _trains(path, [], words, says)
    for name, (spoil, words, says) in CHECKPOINTS.items():
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
    *YAML, *TOOLS, *LAUNCHES, *CONTROLS,
    *(f"data-{name}" for name in DATASETS), *(f"load-{name}" for name in CHECKPOINTS),
]  # fmt: skip


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all files."""
    here = tmp_path_factory.mktemp("bad")
    write_files(here)
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
        if said.removeprefix("error: ").startswith("dataset "):
            assert "end of arguments" not in output, "some 850 lines of Megatron's stand before it"


def test_what_the_first_rank_alone_finds_ends_the_others(tmp_path: Path) -> None:
    """It builds the datasets' index while the others wait for it, here without a launcher that ends them."""
    prefix = tmp_path / "text"
    write_dataset(prefix, [0, 0, 300])
    words = ["--data-path", str(prefix), "--split", "2,1,0", "--expert-model-parallel-size", "2"]
    run = pretrain(*SMALL, *words, timeout_s=90)
    assert run.exit_code == 2
    first, second = [line for line in run.output.splitlines() if line.startswith("error: ")]
    assert first.startswith(f"error: --split 2,1,0: gives train no token of {prefix}.")
    assert second.startswith("error: rank 1 failed: it has lost a peer, see above.")
