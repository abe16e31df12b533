"""Bad inputs as a table: what is run, its exit code, and a part of its message.

Read by :mod:`.test_bad_inputs`. No other test contains them.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ampipe.files.shipped import config_names
from megatron_ampipe.schedule import BlockFeatures, build, to_text
from tests.megatron.refusals_worker import PROCESS_GROUP_MADE


@dataclass(frozen=True, slots=True)
class Row:
    """One command.

    Attributes:
        name: Name of the row.
        words: The command line; the first word is a tool, or ``train`` for a launch with :data:`ACCEPTED` and
            the other words. ``{here}`` is the folder with the files.
        says: A part of the message.
        code: The exit code.
        environment: Additional environment variables.
    """

    name: str
    words: str
    says: str = ""
    code: int = 2
    environment: dict[str, str] = field(default_factory=dict)


def _schedule(degree: int = 2) -> str:
    return to_text(build("ampipe", degree=degree, features=BlockFeatures(chunked_qkv=True)))


def _plan(**changes: Any) -> str:
    """A plan of degree 2, as a user could write it."""
    values: dict[str, Any] = {
        "format": "ampipe-plan-1", "forward_degree": 2, "backward_degree": 2, "shares": [0.5, 0.5],
        "reason": "by hand", "schedule": _schedule(),
    }  # fmt: skip
    return json.dumps(values | changes)


def _cluster(old: str = "", new: str = "") -> str:
    text = config_names("clusters")["a800x8-20gbps"].read_text()
    assert old in text
    return text.replace(old, new, 1)


def _trace(**changes: Any) -> str:
    """A trace of one stage."""
    event = {"name": "attention.0", "cat": "forward", "ph": "X", "ts": 0.0, "dur": 1.0, "pid": 0}
    event |= {"tid": "compute", "args": {"layer": 1, "iteration": 1}}
    return json.dumps({"traceEvents": [event | changes], "otherData": {"rank": "0"}})


def _grid(changes: str) -> str:
    return config_names("bench")["cpu-small"].read_text() + changes


_BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
"""A few lines that YAML expands to a list of 10**9 words."""
_NINES = "9" * 5000
"""More digits than Python converts to a number."""

FILES: dict[str, str | bytes] = {
    "good.yaml": "num-layers: 2\n",
    "empty": "",
    "binary": bytes(range(256)) * 4,
    "tab.yaml": "num-layers: 2\n\thidden-size: 64\n",
    "latin.yaml": "num-layers: 2\n# Größe\n".encode("latin-1"),
    "list.yaml": "- num-layers: 2\n",
    "deep.yaml": "num-layers: " + "[" * 20_000,
    "bomb.yaml": _BOMB + "num-layers: *i\n",
    "infinite.yaml": "lr: 1e999\n",
    "map.yaml": "lr: {a: 1}\n",
    "own-config.yaml": "ampipe:\n  config: tiny\n",
    "good.plan": _plan(),
    "cut.plan": _plan()[:120],
    "nan.plan": _plan(predicted_ms=float("nan")),
    "hidden.plan": _plan(hidden_share=7),
    "loop.plan": _plan(schedule=_schedule().replace("attention.0 route.0", "route.0 attention.0")),
    "repeat.plan": _plan(schedule=_schedule().replace("attention.0", "attention.0 attention.0", 1)),
    "nines.plan": _plan(schedule=_schedule().replace("degree 2", f"degree {_NINES}")),
    "good.cluster": _cluster(),
    "inf.cluster": _cluster("alpha_us: 20", "alpha_us: .inf"),
    "date.cluster": _cluster("alpha_us: 20", "alpha_us: 2026-13-45"),
    "zero.cluster": "".join(
        re.sub(r"^(\s+(?:alpha|beta|merge|weights|forward_us|backward_us)\w*:) .*$", r"\1 0", line) + "\n"
        for line in _cluster().splitlines()
    ),
    "huge.model": "hidden-size: 1" + "0" * 400 + "\nnum-attention-heads: 1\nnum-experts: 8\nseq-length: 64\n",
    "list.model": "hidden-size: [64]\nnum-attention-heads: 4\nnum-experts: 8\nseq-length: 64\n",
    "topk.model": "hidden-size: 8\nmoe-router-topk: 9\nnum-attention-heads: 4\nnum-experts: 8\n"
    + "seq-length: 64\n",
    "good.trace": _trace(),
    "cut.trace": _trace()[:100],
    "list.json": "[]",
    "nines.trace": _trace(name="attention." + _NINES),
    "late.trace": _trace(ts=1e308, dur=1e308),
    "dollar.trace": _trace(name="att$\\frac{$.0"),
    "lane.trace": _trace(tid="x" * 100_000),
    "deep.json": "[" * 100_000,
    "axes.grid": "axes: [" + ", ".join(["[{name: a}, {name: b}]"] * 40) + "]\n",
}
"""Contents of files by name. Also ``folder`` (empty), ``pipe`` (without a writer), and those below."""


def write_files(folder: Path) -> None:
    """Create all files that the rows name."""
    for name, content in FILES.items():
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    for name in ("folder", "traces", "tree/megatron/core/package_info.py", "tree-2/megatron/core"):
        (folder / name).mkdir(parents=True)
    os.mkfifo(folder / "pipe")
    (folder / "traces/rank0.trace.json").mkdir()
    (folder / "tree-2/megatron/core/package_info.py").write_bytes(b"\xff\xfe\x00")


_PLAN = "plan --cluster dgx-h100 --model {here}/"
_ON = "plan --model mixtral-8x7b --cluster "
_CONFIG = "config --ampipe-config {here}/"
_DRAW = "draw --output {here}/out/p {here}/"
_FROM_PLAN = "train --ampipe-plan {here}/"
_NO_PIPE = "cannot be read (not a regular file)"
_NO_TRACE = "is not a trace written by AMPipe. Give a file that a run with --ampipe-trace-dir wrote"
_TORCHRUN = "Start the run with torchrun, which sets it, or unset it."

CONTROLS = (
    Row("train-by-plan", _FROM_PLAN + "good.plan", "", PROCESS_GROUP_MADE),
    Row("plan", _ON + "{here}/good.cluster", "choice: ", 0),
    Row("draw", _DRAW + "good.trace", "wrote ", 0),
    Row("config", _CONFIG + "good.yaml", "num-layers: 2", 0),
)
"""Valid arguments, so that only the argument in the row is wrong."""

_YAML = (
    Row("yaml-tab", _CONFIG + "tab.yaml", "tab.yaml:2: YAML: found character '\\t' that cannot start"),
    Row("yaml-latin-1", _CONFIG + "latin.yaml", "latin.yaml: cannot be read as YAML. Write 'key: value'"),
    Row("yaml-list", _CONFIG + "list.yaml", "list.yaml:1: top: does not hold keys with values."),
    Row("yaml-deep", _CONFIG + "deep.yaml", "deep.yaml: cannot be read as YAML."),
    Row("yaml-bomb", _CONFIG + "bomb.yaml", "bomb.yaml:2: YAML: the alias *a repeats a list or a section;"),
    Row("yaml-infinite", _CONFIG + "infinite.yaml", "infinite.yaml:1: --lr inf: must be at least 0."),
    Row(
        "yaml-section-as-value",
        _CONFIG + "map.yaml",
        "map.yaml:1: lr: {'a': '1'}: takes only numbers",
    ),
    Row("yaml-names-yaml", _CONFIG + "own-config.yaml", "a file cannot name further files. Name all of them"),
    Row("yaml-pipe", _CONFIG + "pipe", "pipe: is neither a file nor a built-in configuration."),
)
_PLANNER = (
    Row(
        "model-beyond-numbers", _PLAN + "huge.model", "huge.model:1: YAML: a number of 401 digits is too long"
    ),
    Row("model-list", _PLAN + "list.model", "hidden-size [64]: must be a whole number of at least 1. Write"),
    Row("model-topk", _PLAN + "topk.model", "topk.model:2: moe-router-topk 9: is above num-experts 8."),
    Row("model-cluster", _PLAN + "good.cluster", "good.cluster:5: intra: is a section, and no flag of"),
    Row("cluster-infinite", _ON + "{here}/inf.cluster", ":7: intra.all_to_all.alpha_us inf: must be a num"),
    Row("cluster-no-time", _ON + "{here}/zero.cluster", "figures with which the time of a block is 0. Write"),
    Row(
        "cluster-no-date",
        _ON + "{here}/date.cluster",
        "date.cluster: cannot be read as YAML. Look at configs",
    ),
    Row("cluster-plan", _ON + "{here}/good.plan", "good.plan:1: format: is not a known key. Use one of"),
    Row("set-twice", _ON + "dgx-h100 --set seq-length=64 --set seq-length=128", "seq-length was set before."),
    Row(
        "set-python",
        _ON + "dgx-h100 --set hidden-size=!!python/name:os.system",
        "has a value that is not YAML.",
    ),
    Row("set-huge", _ON + "dgx-h100 --set seq-length=100000000000000000000", "must be at most 10000000."),
    Row("planned-ranks", _ON + f"dgx-h100 --ranks {_NINES}", "is not a whole number of at least 1"),
    Row("planned-trace-of", _ON + f"dgx-h100 --trace x --trace-of {_NINES}", "is no degree such as 4, 4:2"),
    Row(
        "planned-twice",
        _ON + "dgx-h100 --output {here}/x --json {here}/x",
        "x: is the file of --json too. Name",
    ),
)
_TRACES = (
    Row("trace-cut", _DRAW + "cut.trace", "cut.trace: " + _NO_TRACE),
    Row("trace-digits", _DRAW + "nines.trace", _NO_TRACE),
    Row("trace-late", _DRAW + "late.trace", _NO_TRACE),
    Row("trace-formula", _DRAW + "dollar.trace", _NO_TRACE),
    Row("trace-long-lane", _DRAW + "lane.trace", _NO_TRACE),
    Row("trace-deep", _DRAW + "deep.json", _NO_TRACE),
    Row("trace-pipe", _DRAW + "pipe", f"trace {{here}}/pipe: {_NO_PIPE}. Give"),
    Row("trace-is-folder", _DRAW + "traces", "cannot be read (Is a directory). Give"),
    Row("trace-device", "draw --output {here}/out/p /dev/zero", f"trace /dev/zero: {_NO_PIPE}"),
)
_TOOLS = (
    Row(
        "bench-from-trace",
        "bench --from {here}/good.trace",
        "is not a result of ampipe bench. Give a file that",
    ),
    Row("bench-grid-axes", "bench --grid {here}/axes.grid", "axes: they make 1099511627776 cases. Make"),
    Row("bench-ranks", "bench --ranks 1000000", "--ranks 1000000: does not divide the 4 experts of case"),
    Row(
        "bench-two-hops",
        "bench --exchange rows,2dh",
        "--exchange 2dh: --link none has no nodes. Use --link inter=50mbit,intra=400mbit --nodes 2 --ranks-p",
    ),
    Row(
        "plan-two-hops",
        _ON + "dgx-h100 --ranks 8 --exchange 2dh",
        "--exchange 2dh: saves nothing in this layout: no rank or node gets a token twice, or ranks are not",
    ),
    Row("bench-seed", "bench --seed 99999999999999999999", "is more than 4294967295"),
    Row(
        "patch-binary",
        "patch check {here}/tree-2",
        "does not contain the version of Megatron. Name a release",
    ),
    Row("data-in-a-file", "data {here}/folder --output {here}/out/d", "holds no usable text file with the"),
)
_PLANS = (
    Row("plan-cut", _FROM_PLAN + "cut.plan", "cut.plan:1: YAML: found unexpected end of stream. Give"),
    Row("plan-not-a-number", _FROM_PLAN + "nan.plan", "predicted_ms 'NaN': must be a number, at least 0,"),
    Row("plan-hidden-share", _FROM_PLAN + "hidden.plan", "hidden_share 7: is a share, from 0 to 1. Write"),
    Row("plan-loop", _FROM_PLAN + "loop.plan", "can never finish: compute waits at route.0 for attention.0;"),
    Row("plan-degree-digits", _FROM_PLAN + "nines.plan", "is not 'schedule NAME degree N' or"),
    Row("plan-pipe", _FROM_PLAN + "pipe", f"plan {{here}}/pipe: {_NO_PIPE}. Give a file"),
    Row("plan-folder", _FROM_PLAN + "folder", "folder: cannot be read (Is a directory). Give a file"),
    Row("plan-empty-name", "train --ampipe-plan ''", "--ampipe-plan (empty): is empty. Give a value, or"),
    Row(
        "plan-with-schedule",
        _FROM_PLAN + "good.plan --ampipe-schedule ampipe",
        "is what the plan {here}/good.plan says.",
    ),
    Row(
        "plan-and-save",
        _FROM_PLAN + "good.plan --ampipe-save-plan x",
        "--ampipe-save-plan x: requires --ampipe-degree auto.",
    ),
    Row(
        "save-plan-foreign",
        "train --ampipe-degree auto --ampipe-save-plan {here}/good.trace",
        "good.trace:1: traceEvents",
    ),
    Row(
        "save-plan-in-a-file",
        "train --ampipe-degree auto --ampipe-save-plan {here}/empty/p",
        "cannot be written to (Not a directory).",
    ),
    Row(
        "auto-cluster-plan",
        "train --ampipe-degree auto --ampipe-cluster {here}/good.plan",
        "good.plan:1: format: is not a known key.",
    ),
)
_FLAGS = (
    Row(
        "degree-nan", "train --ampipe-degree nan", "--ampipe-degree 'nan': is neither a whole number nor auto"
    ),
    Row("degree-two-words", "train --ampipe-degree 4 4", "argument 4: is unexpected. A switch such as"),
    Row(
        "degree-no-word", "train --ampipe-degree", "--ampipe-degree (no value): expected one argument. Write"
    ),
    Row(
        "chunks-nan", "train --ampipe-chunks nan,nan", "--ampipe-chunks nan,nan: every share must be above 0."
    ),
    Row(
        "chunks-sum",
        "train --ampipe-chunks 0.5,0.5,0.5",
        "must have a sum of 1; the sum is 1.5. Use for example",
    ),
    Row(
        "chunks-one",
        "train --ampipe-chunks 1",
        "--ampipe-chunks 1: has no effect at --ampipe-degree 1, which",
    ),
    Row(
        "backward-zero",
        "train --ampipe-degree 4 --ampipe-backward-degree 0",
        "must be a divisor or a multiple of the degree of the forward",
    ),
    Row("stack-word", "train --ampipe-degree 4 --ampipe-stack every", "--ampipe-stack every: must be a"),
    Row(
        "schedule-case",
        "train --ampipe-degree 2 --ampipe-schedule AMPipe",
        "'AMPipe': invalid choice. Use one of: ",
    ),
    Row(
        "trace-dir-empty",
        "train --ampipe-degree 2 --ampipe-trace-dir ''",
        "--ampipe-trace-dir (empty): is empty.",
    ),
    Row(
        "trace-dir-file",
        "train --ampipe-degree 2 --ampipe-trace-dir {here}/empty",
        "cannot be written to (Not a directory).",
    ),
    Row(
        "save-file",
        "train --ampipe-degree 2 --save {here}/empty --save-interval 2",
        "cannot be written to (Not a directory).",
    ),
    Row(
        "router-hash-mtp",
        "train --ampipe-router hash --mtp-num-layers 1 --position-embedding-type rope",
        "--mtp-num-layers 1: with --ampipe-router hash, layers of multi-token prediction embed later",
    ),
    Row(
        "router-hash-loss",
        "train --ampipe-degree 2 --ampipe-router hash --moe-aux-loss-coeff 0.1",
        "--moe-aux-loss-coeff 0.1: has no effect with --ampipe-router hash",
    ),
    Row(
        "router-ids-mlp-chunks",
        "train --ampipe-router tests.gates:BiasedByIdRouter --mlp-chunks-for-training 2",
        "--mlp-chunks-for-training 2: with --ampipe-router tests.gates:BiasedByIdRouter, Megatron routes",
    ),
    Row(
        "flag-underscore",
        "train --ampipe_degree 2",
        "argument --ampipe_degree 2: there is no such flag. Did you",
    ),
    Row(
        "layer-pattern-short",
        "train --ampipe-degree 2 --moe-layer-freq [1,0,1]",
        "--moe-layer-freq of 3 layers with",
    ),
    Row(
        "layer-pattern-code",
        "train --ampipe-degree 2 --moe-layer-freq __import__(0)",
        "invalid moe_freq_type value.",
    ),
)
_VARIABLES = (
    Row(
        "variable-word",
        "train --ampipe-degree 2",
        "RANK abc: must be a whole number. " + _TORCHRUN,
        environment={"RANK": "abc"},
    ),
    Row(
        "variable-beyond",
        "train --ampipe-degree 2",
        "RANK 99: must be below WORLD_SIZE, which is 4. " + _TORCHRUN,
        environment={"RANK": "99"},
    ),
)
ROWS = (
    *_YAML, *_PLANNER, *_TRACES, *_TOOLS, *_PLANS, *_FLAGS, *_VARIABLES
)  # fmt: skip
