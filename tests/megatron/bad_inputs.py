"""Bad inputs as tables, one row for each kind of failure: what is run, and a part of its message.

Read by :mod:`.test_bad_inputs`. ``{here}`` is a folder with :data:`FILES`; ``{path}`` is a dataset or a
checkpoint that the row has damaged.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy

from megatron_ampipe.files.inputs import config_names
from megatron_ampipe.schedule import BlockFeatures, build, to_text
from tests.megatron.one_launch import PROCESS_GROUP_MADE

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
    "key-twice": ("lr: 1\nlr: 2", "{line}2: YAML: the key 'lr' comes twice"),
    # Values.
    "word-for-number": ("lr: fast", "{line}1: --lr: invalid float value: 'fast'. Run with --help"),
    "switch-for-number": ("num-layers: true", "num-layers: True: takes numbers and text; words such"),
    "choice": ("attention-backend: flsh", "arguments (incomplete): 'flsh' is no choice of its flag. Run"),
    "list-for-pattern": (
        "moe-layer-freq: [0, 1]",
        "['0', '1']: takes numbers and text; words",
    ),
    # Sections.
    "own-at-top": ("degree: 4", "degree: there is no such flag. Write it below 'ampipe:', indented."),
    "own-degree-0": ("ampipe:\n  degree: 0", "{line}2: --ampipe-degree 0: must be a whole number"),
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
    "config-misspelt": (
        "config --ampipe-config mixtral-8x7",
        "nor a built-in configuration. Did you mean mi",
    ),
    "config-flag": ("config --num_layers 2", "--num_layers 2: there is no such flag. Did you mean --num-la"),
}
"""Commands, and a part of the message."""

_AUTO = "--ampipe-degree auto "
TRAIN = {
    "degree-0": ("--ampipe-degree 0", "--ampipe-degree 0: must be a whole number"),
    "degree-two-words": ("--ampipe-degree 4 4", "argument 4: there is no such flag. Run with"),
    "degree-above-sequence": (
        "--ampipe-degree 65",
        "65: must be between 1 and the number of rows of the sequence on one rank (64). Use",
    ),
    "schedule-at-degree-1": ("--ampipe-schedule ampipe", "has no effect at --ampipe-degree 1, which"),
    "exchange-in-one-chunk": (
        "--ampipe-exchange ranks --cpu-offloading-num-layers 1 --moe-router-topk 2 "
        "--expert-model-parallel-size 2",
        "--cpu-offloading-num-layers 1: with --ampipe-exchange ranks, activation offloading is not supported "
        "yet. Leave it out, or train with --ampipe-exchange rows.",
    ),
    "plan-and-degree": (
        "--ampipe-plan {here}/good.plan --ampipe-degree 4",
        "4: is what the plan {here}/good.plan says. Leave --ampipe-degree or --ampipe-plan out.",
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

VARIABLES = {
    "variable-word": (
        {"RANK": "abc"},
        "RANK abc: must be a whole number below WORLD_SIZE, which is 4. Start the run with torchrun,",
    ),
}
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
    "no-data": (
        _nothing,
        "",
        "--data-path (not given): a run needs data. Give --data-path PREFIX, or",
    ),
    "idx-cut": (_with(".idx", _cut), _DATA, "{path}.idx (buffer is smaller than requested size). Copy"),
    "no-tokens": (
        lambda path: write_dataset(path, [0, 0, 300]),
        "--data-path {path} --split 2,1,0",
        "--split 2,1,0: gives train no token of {path}. Use --split 100,0,0 and --eval-iters 0, or",
    ),
    "cache": (
        _nothing,
        _DATA + " --data-cache-path {path}.idx/cache",
        "Failed to write dataset materials",
    ),
}
"""What damages a dataset of eight documents of 300 tokens, flags, and a part of the message; None if well."""

CHECKPOINTS = {
    "new-folder": (_nothing, "--load {path}/new", None),
    "note-of-nothing": (_note("3"), "--load {path}", _UNLOADABLE),
    "shard-cut": (_with("/iter_0000002/__0_0.distcp", _cut), "--load {path}", _UNLOADABLE),
    "longer": (_nothing, "--load {path} --train-iters 6", _UNLOADABLE + "OptimizerParamScheduler: class inp"),
}
"""The same of a checkpoint of iteration 2."""
