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

from megatron_ampipe.schedule import BlockFeatures, build, to_text
from megatron_ampipe.shipped import config_names
from tests.megatron.refusals_worker import PROCESS_GROUP_MADE
from tests.megatron.test_bad_files import TRACKER, write_dataset


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
    "utf16.yaml": "num-layers: 2\n".encode("utf-16"),
    "list.yaml": "- num-layers: 2\n",
    "two.yaml": "num-layers: 2\n---\nnum-layers: 4\n",
    "deep.yaml": "num-layers: " + "[" * 20_000,
    "bomb.yaml": _BOMB + "num-layers: *i\n",
    "self.yaml": "num-layers: &a [*a]\n",
    "merge.yaml": "base: &base {lr: 1}\n<<: *base\n",
    "infinite.yaml": "lr: 1e999\n",
    "nan.yaml": "lr: .nan\n",
    "nul.yaml": 'ampipe:\n  plan: "a\\0b"\n',
    "map.yaml": "lr: {a: 1}\n",
    "own-list.yaml": "ampipe: [degree, 4]\n",
    "own-degree.yaml": "ampipe:\n  degree: [4, 4]\n",
    "own-config.yaml": "ampipe:\n  config: tiny\n",
    "good.plan": _plan(),
    "cut.plan": _plan()[:120],
    "nan.plan": _plan(predicted_ms=float("nan")),
    "long.plan": _plan(stock_ms=10**400),
    "hidden.plan": _plan(hidden_share=7),
    "shares.plan": _plan(shares=[1e308, 1e308]),
    "schedule.plan": _plan(schedule=["qkv"]),
    "loop.plan": _plan(schedule=_schedule().replace("attention.0 route.0", "route.0 attention.0")),
    "repeat.plan": _plan(schedule=_schedule().replace("attention.0", "attention.0 attention.0", 1)),
    "missing.plan": _plan(schedule="schedule mine degree 2\n"),
    "lost-stage.plan": _plan(schedule=_schedule().replace(" merge.1", "", 1)),
    "nines.plan": _plan(schedule=_schedule().replace("degree 2", f"degree {_NINES}")),
    "nines-stage.plan": _plan(schedule=_schedule().replace("attention.1", f"attention.{_NINES}")),
    "good.cluster": _cluster(),
    "long.cluster": _cluster("alpha_us: 20", "alpha_us: 1" + "0" * 400),
    "nines.cluster": _cluster("ranks_per_node: 8", f"ranks_per_node: {_NINES}"),
    "inf.cluster": _cluster("alpha_us: 20", "alpha_us: .inf"),
    "words.cluster": _cluster("alpha_us: 20", "alpha_us: twenty"),
    "date.cluster": _cluster("alpha_us: 20", "alpha_us: 2026-13-45"),
    "slowdown.cluster": _cluster("compute_slowdown: ", "compute_slowdown: 0.1 # "),
    "huge.cluster": _cluster("alpha_us: 20", "alpha_us: 1.0e+308").replace(
        "beta_us_per_mb: 50", "beta_us_per_mb: 1.0e+308"
    ),
    "zero.cluster": "".join(
        re.sub(r"^(\s+(?:alpha|beta|merge|weights|forward_us|backward_us)\w*:) .*$", r"\1 0", line) + "\n"
        for line in _cluster().splitlines()
    ),
    "huge.model": "hidden-size: 1" + "0" * 400 + "\nnum-attention-heads: 1\nnum-experts: 8\nseq-length: 64\n",
    "nan.model": "hidden-size: .nan\nnum-attention-heads: 4\nnum-experts: 8\nseq-length: 64\n",
    "list.model": "hidden-size: [64]\nnum-attention-heads: 4\nnum-experts: 8\nseq-length: 64\n",
    "bool.model": "hidden-size: true\nnum-attention-heads: 4\nnum-experts: 8\nseq-length: 64\n",
    "switch.model": "hidden-size: 8\nswiglu: maybe\nnum-attention-heads: 4\nnum-experts: 8\nseq-length: 64\n",
    "topk.model": "hidden-size: 8\nmoe-router-topk: 9\nnum-attention-heads: 4\nnum-experts: 8\n"
    + "seq-length: 64\n",
    "experts.model": "hidden-size: 64\nnum-attention-heads: 4\nnum-experts: 1000000000000\nseq-length: 64\n",
    "good.trace": _trace(),
    "cut.trace": _trace()[:100],
    "list.json": "[]",
    "superscript.trace": _trace(name="attention.\u00b2"),
    "nines.trace": _trace(name="attention." + _NINES),
    "late.trace": _trace(ts=1e308, dur=1e308),
    "early.trace": _trace(ts=-1e300),
    "dollar.trace": _trace(name="att$\\frac{$.0"),
    "lane.trace": _trace(tid="x" * 100_000),
    "layer.trace": _trace(args={"layer": 10**300, "iteration": 1}),
    "rank.trace": _trace().replace('"rank": "0"', f'"rank": "{_NINES}"'),
    "labels.trace": _trace().replace('"rank": "0"', '"rank": "0", "degree": "$x\\n\\u0000"'),
    "true.trace": _trace(ts=True, dur="1"),
    "deep.json": "[" * 100_000,
    "axes.grid": "axes: [" + ", ".join(["[{name: a}, {name: b}]"] * 40) + "]\n",
}
"""Contents of files by name. Also ``folder`` (empty), ``pipe`` (without a writer), and those below."""


def write_files(folder: Path) -> None:
    """Create all files that the rows name."""
    for name, content in FILES.items():
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    for name in ("folder", "pipes", "traces", "tree/megatron/core/package_info.py", "tree-2/megatron/core"):
        (folder / name).mkdir(parents=True)
    os.mkfifo(folder / "pipe")
    os.mkfifo(folder / "pipes/rank0.trace.json")
    (folder / "traces/rank0.trace.json").mkdir()
    (folder / "tree-2/megatron/core/package_info.py").write_bytes(b"\xff\xfe\x00")
    for name in ("a", "idx-folder", "bin-folder", "idx-pipe"):
        write_dataset(folder / name, [300] * 8)
    for name, replace in (
        ("idx-folder.idx", Path.mkdir),
        ("bin-folder.bin", Path.mkdir),
        ("idx-pipe.idx", os.mkfifo),
    ):
        (folder / name).unlink()
        replace(folder / name)
    for name in ("tracker-folder", "tracker-nines", "tracker-binary", "iteration-file", "tracker-pipe"):
        (folder / name).mkdir()
    (folder / "tracker-folder" / TRACKER).mkdir()
    os.mkfifo(folder / "tracker-pipe" / TRACKER)
    (folder / "tracker-nines" / TRACKER).write_text(_NINES)
    (folder / "tracker-binary" / TRACKER).write_bytes(bytes(range(256)))
    (folder / "iteration-file" / TRACKER).write_text("3")
    (folder / "iteration-file/iter_0000003").write_text("")


_PLAN = "plan --cluster dgx-h100 --model {here}/"
_ON = "plan --model mixtral-8x7b --cluster "
_CONFIG = "config --ampipe-config {here}/"
_DRAW = "draw --output {here}/out/p {here}/"
_DATA = "train --ampipe-degree 2 --split 100,0,0 --data-path "
_LOAD = "train --ampipe-degree 2 --load {here}/"
_FROM_PLAN = "train --ampipe-plan {here}/"
_NO_PIPE = "cannot be read (not a regular file)"
_NO_TRACE = "is not a trace written by AMPipe. Give a file that a run with --ampipe-trace-dir wrote"
_TORCHRUN = "Start the run with torchrun, which sets it, or unset it."

CONTROLS = (
    Row("train-by-plan", _FROM_PLAN + "good.plan", "", PROCESS_GROUP_MADE),
    Row("train-on-data", _DATA + "{here}/a", "", PROCESS_GROUP_MADE),
    Row("plan", _ON + "{here}/good.cluster", "choice: ", 0),
    Row("draw", _DRAW + "good.trace", "wrote ", 0),
    Row("config", _CONFIG + "good.yaml", "num-layers: 2", 0),
)
"""Valid arguments, so that only the argument in the row is wrong."""

_YAML = (
    Row("yaml-tab", _CONFIG + "tab.yaml", "tab.yaml:2: YAML: found character '\\t' that cannot start"),
    Row("yaml-latin-1", _CONFIG + "latin.yaml", "latin.yaml: cannot be read as YAML. Write 'key: value'"),
    Row("yaml-utf-16", _CONFIG + "utf16.yaml", "utf16.yaml: cannot be read as YAML."),
    Row("yaml-list", _CONFIG + "list.yaml", "list.yaml:1: top: does not hold keys with values."),
    Row("yaml-two-documents", _CONFIG + "two.yaml", "two.yaml:2: YAML: but found another document."),
    Row("yaml-deep", _CONFIG + "deep.yaml", "deep.yaml: cannot be read as YAML."),
    Row("yaml-bomb", _CONFIG + "bomb.yaml", "bomb.yaml:2: YAML: the alias *a repeats a list or a section;"),
    Row("yaml-of-itself", _CONFIG + "self.yaml", "self.yaml:1: YAML: "),
    Row("yaml-merge", _CONFIG + "merge.yaml", "merge.yaml:2: YAML: the alias *base repeats a list or a"),
    Row("yaml-infinite", _CONFIG + "infinite.yaml", "infinite.yaml:1: --lr inf: must be a number. Use 0 or"),
    Row("yaml-not-a-number", _CONFIG + "nan.yaml", "nan.yaml:1: lr: .nan: takes a number. Write for"),
    Row("yaml-nul-in-a-path", _CONFIG + "nul.yaml", "Give a file that ampipe plan --output wrote."),
    Row("yaml-section-as-value", _CONFIG + "map.yaml", "map.yaml:1: lr: is not a section. Write 'lr: value'"),
    Row("yaml-list-as-section", _CONFIG + "own-list.yaml", ":1: ampipe: is a section for settings of AMPipe"),
    Row("yaml-list-as-degree", _CONFIG + "own-degree.yaml", ":2: ampipe.degree: [4,4]: takes one value,"),
    Row("yaml-names-yaml", _CONFIG + "own-config.yaml", "a file cannot name further files. Name all of them"),
    Row("yaml-empty", _CONFIG + "empty", "empty:1: top: does not hold keys with values. Write"),
    Row("yaml-binary", _CONFIG + "binary", "binary: cannot be read as YAML. Write"),
    Row("yaml-pipe", _CONFIG + "pipe", "pipe: is neither a file nor a built-in configuration."),
    Row("yaml-trace", _CONFIG + "good.trace", "good.trace:1: traceEvents: there is no such flag."),
)
_PLANNER = (
    Row(
        "model-beyond-numbers", _PLAN + "huge.model", "huge.model:1: YAML: a number of 401 digits is too long"
    ),
    Row("model-many-experts", _PLAN + "experts.model", "experts.model:3: num-experts 1000000000000: must be"),
    Row("model-not-a-number", _PLAN + "nan.model", "hidden-size nan: must be a whole number of at least 1."),
    Row("model-list", _PLAN + "list.model", "hidden-size [64]: must be a whole number of at least 1. Write"),
    Row("model-true", _PLAN + "bool.model", "hidden-size True: must be a whole number of at least 1. Wri"),
    Row("model-maybe", _PLAN + "switch.model", "switch.model:2: swiglu maybe: must be true or false. Wri"),
    Row("model-topk", _PLAN + "topk.model", "topk.model:2: moe-router-topk 9: is above num-experts 8."),
    Row("model-cluster", _PLAN + "good.cluster", "good.cluster:5: intra: is a section, and no flag of"),
    Row("cluster-beyond-numbers", _ON + "{here}/long.cluster", "YAML: a number of 401 digits is too long"),
    Row("cluster-thousands-of-digits", _ON + "{here}/nines.cluster", ":3: YAML: a number of 5000 digits"),
    Row("cluster-infinite", _ON + "{here}/inf.cluster", ":7: intra.all_to_all.alpha_us inf: must be a num"),
    Row("cluster-huge", _ON + "{here}/huge.cluster", ":7: intra.all_to_all.alpha_us 1e+308: must be at most"),
    Row("cluster-no-time", _ON + "{here}/zero.cluster", "figures with which the time of a block is 0. Write"),
    Row("cluster-word", _ON + "{here}/words.cluster", "alpha_us 'twenty': must be a number, at least 0, w"),
    Row(
        "cluster-no-date",
        _ON + "{here}/date.cluster",
        "date.cluster: cannot be read as YAML. Look at configs",
    ),
    Row(
        "cluster-speed-up", _ON + "{here}/slowdown.cluster", "overlap.compute_slowdown 0.1: must be at least"
    ),
    Row("cluster-plan", _ON + "{here}/good.plan", "good.plan:1: format: is not a known key. Use one of"),
    Row("set-twice", _ON + "dgx-h100 --set seq-length=64 --set seq-length=128", "seq-length was set before."),
    Row("set-list", _ON + "dgx-h100 --set hidden-size=[1]", "--set hidden-size [1]: must be a whole number"),
    Row(
        "set-python",
        _ON + "dgx-h100 --set hidden-size=!!python/name:os.system",
        "has a value that is not YAML.",
    ),
    Row(
        "set-digits", _ON + f"dgx-h100 --set hidden-size={_NINES}", "has a value that is not YAML. Quote it."
    ),
    Row("set-huge", _ON + "dgx-h100 --set seq-length=100000000000000000000", "must be at most 10000000."),
    Row("planned-ranks", _ON + f"dgx-h100 --ranks {_NINES}", "is not a whole number of at least 1"),
    Row("planned-degrees", _ON + f"dgx-h100 --degrees {_NINES}", "is not a list of degrees from 2 to 64"),
    Row("planned-trace-of", _ON + f"dgx-h100 --trace x --trace-of {_NINES}", "is no degree such as 4, 4:2"),
    Row("planned-imbalance", _ON + "dgx-h100 --imbalance nan", "'nan' is not a number of at least 1"),
    Row(
        "planned-twice",
        _ON + "dgx-h100 --output {here}/x --json {here}/x",
        "x: is the file of --json too. Name",
    ),
)
_TRACES = (
    Row("trace-cut", _DRAW + "cut.trace", "cut.trace: " + _NO_TRACE),
    Row("trace-list", _DRAW + "list.json", "list.json: " + _NO_TRACE),
    Row("trace-superscript", _DRAW + "superscript.trace", _NO_TRACE),
    Row("trace-digits", _DRAW + "nines.trace", _NO_TRACE),
    Row("trace-late", _DRAW + "late.trace", _NO_TRACE),
    Row("trace-early", _DRAW + "early.trace", _NO_TRACE),
    Row("trace-formula", _DRAW + "dollar.trace", _NO_TRACE),
    Row("trace-long-lane", _DRAW + "lane.trace", _NO_TRACE),
    Row("trace-layer", _DRAW + "layer.trace", _NO_TRACE),
    Row("trace-rank", _DRAW + "rank.trace", _NO_TRACE),
    Row("trace-label", _DRAW + "labels.trace", _NO_TRACE),
    Row("trace-true", _DRAW + "true.trace", _NO_TRACE),
    Row("trace-deep", _DRAW + "deep.json", _NO_TRACE),
    Row("trace-binary", _DRAW + "binary", _NO_TRACE),
    Row("trace-pipe", _DRAW + "pipe", f"trace {{here}}/pipe: {_NO_PIPE}. Give"),
    Row("trace-pipe-in-folder", _DRAW + "pipes", _NO_PIPE),
    Row("trace-is-folder", _DRAW + "traces", "cannot be read (Is a directory). Give"),
    Row("trace-device", "draw --output {here}/out/p /dev/zero", f"trace /dev/zero: {_NO_PIPE}"),
    Row(
        "trace-predicted-pipe",
        _DRAW + "good.trace --predicted {here}/pipe",
        f"--predicted {{here}}/pipe: {_NO_PIPE}",
    ),
)
_TOOLS = (
    Row("bench-from-pipe", "bench --from {here}/pipe", f"--from {{here}}/pipe: {_NO_PIPE}. Give a file that"),
    Row(
        "bench-from-trace",
        "bench --from {here}/good.trace",
        "is not a result of ampipe bench. Give a file that",
    ),
    Row("bench-grid-axes", "bench --grid {here}/axes.grid", "axes: they make 1099511627776 cases. Make"),
    Row("bench-grid-bomb", "bench --grid {here}/bomb.yaml", "the alias *a repeats a list or a section"),
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
    Row("bench-degrees", f"bench --degrees {_NINES}", "is not a list of whole numbers of at least 1. Use"),
    Row("bench-seed", "bench --seed 99999999999999999999", "is more than 4294967295"),
    Row("bench-predict-plan", "bench --predict {here}/good.plan", "format: is not a known key. Use one of"),
    Row(
        "profile-seed", "profile --output {here}/out.yaml --seed 99999999999999999999", "is more than 429496"
    ),
    Row(
        "patch-binary",
        "patch check {here}/tree-2",
        "does not contain the version of Megatron. Name a release",
    ),
    Row("data-in-a-file", "data {here}/folder --output {here}/out/d", "holds no usable text file with the"),
    Row(
        "sbatch-site-pipe",
        "sbatch --site {here}/pipe --nodes 1 --gpus-per-node 8 --no-check",
        "not a regular file",
    ),
    Row(
        "sbatch-model-bomb",
        "sbatch --model {here}/bomb.yaml --nodes 1 --gpus-per-node 8 --no-check",
        "the alias *a",
    ),
    Row("sbatch-nodes", f"sbatch --nodes {_NINES} --gpus-per-node 8 --no-check", "is not a whole number of"),
)
_PLANS = (
    Row("plan-cut", _FROM_PLAN + "cut.plan", "cut.plan:1: YAML: found unexpected end of stream. Give"),
    Row("plan-not-a-number", _FROM_PLAN + "nan.plan", "predicted_ms 'NaN': must be a number, at least 0,"),
    Row("plan-beyond-numbers", _FROM_PLAN + "long.plan", "long.plan:1: YAML: a number of 401 digits is too"),
    Row("plan-hidden-share", _FROM_PLAN + "hidden.plan", "hidden_share 7: is a share, from 0 to 1. Write"),
    Row("plan-infinite-shares", _FROM_PLAN + "shares.plan", "shares[0] '1e+308': must be at most 1e+15."),
    Row("plan-list-as-schedule", _FROM_PLAN + "schedule.plan", "schedule ['qkv']: must be text. Write some"),
    Row("plan-loop", _FROM_PLAN + "loop.plan", "can never finish: compute waits at route.0 for attention.0;"),
    Row(
        "plan-twice-the-stage",
        _FROM_PLAN + "repeat.plan",
        "(forward) runs attention.0 2 times instead of once.",
    ),
    Row("plan-no-stage", _FROM_PLAN + "missing.plan", "0 times instead of once. Make one with ampipe plan"),
    Row("plan-lost-stage", _FROM_PLAN + "lost-stage.plan", "runs merge.1 0 times instead of once. Make one"),
    Row("plan-degree-digits", _FROM_PLAN + "nines.plan", "is not 'schedule NAME degree N' or"),
    Row(
        "plan-stage-digits", _FROM_PLAN + "nines-stage.plan", "is not a stage of a block of degree 2. Stages"
    ),
    Row("plan-pipe", _FROM_PLAN + "pipe", f"plan {{here}}/pipe: {_NO_PIPE}. Give a file"),
    Row("plan-folder", _FROM_PLAN + "folder", "folder: cannot be read (Is a directory). Give a file"),
    Row("plan-device", "train --ampipe-plan /dev/zero", f"plan /dev/zero: {_NO_PIPE}. Give"),
    Row("plan-cluster", _FROM_PLAN + "good.cluster", "good.cluster:2: description: is not a known key."),
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
        "save-plan-pipe",
        "train --ampipe-degree auto --ampipe-save-plan {here}/pipe",
        "cannot be written (it is no plain file).",
    ),
    Row(
        "save-plan-in-a-file",
        "train --ampipe-degree auto --ampipe-save-plan {here}/empty/p",
        "cannot be written (File exists).",
    ),
    Row(
        "auto-cluster-plan",
        "train --ampipe-degree auto --ampipe-cluster {here}/good.plan",
        "good.plan:1: format: is not a known key.",
    ),
    Row(
        "auto-cluster-digits",
        "train --ampipe-degree auto --ampipe-cluster {here}/long.cluster",
        "a number of 401 digits",
    ),
)
_FLAGS = (
    Row(
        "degree-nan", "train --ampipe-degree nan", "--ampipe-degree 'nan': is neither a whole number nor auto"
    ),
    Row("degree-empty", "train --ampipe-degree ''", "is neither a whole number nor auto"),
    Row("degree-two-words", "train --ampipe-degree 4 4", "argument 4: belongs to no flag. A switch such as"),
    Row(
        "degree-no-word", "train --ampipe-degree", "--ampipe-degree (no value): expected one argument. Write"
    ),
    Row("degree-digits", f"train --ampipe-degree {_NINES}", "is neither a whole number nor auto"),
    Row(
        "chunks-empty",
        "train --ampipe-chunks ''",
        "--ampipe-chunks (empty): is not a list of numbers separa",
    ),
    Row(
        "chunks-semicolon", "train --ampipe-chunks '0.5;0.5'", "is not a list of numbers separated by commas"
    ),
    Row(
        "chunks-nan", "train --ampipe-chunks nan,nan", "--ampipe-chunks nan,nan: every share must be above 0."
    ),
    Row("chunks-zero", "train --ampipe-chunks 0.5,0.5,0", "every share must be above 0. Use for example"),
    Row(
        "chunks-percent", "train --ampipe-chunks 50%,50%", "--ampipe-chunks 50%,50%: is not a list of numbers"
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
    Row(
        "backward-auto",
        "train --ampipe-degree 4 --ampipe-backward-degree auto",
        "'auto': invalid int value. Give",
    ),
    Row("stack-word", "train --ampipe-degree 4 --ampipe-stack every", "--ampipe-stack every: must be a"),
    Row("stack-empty", "train --ampipe-degree 4 --ampipe-stack ''", "--ampipe-stack (empty): must be"),
    Row("stack-negative", "train --ampipe-degree 4 --ampipe-stack -2", "--ampipe-stack -2: must be a"),
    Row("stack-digits", f"train --ampipe-degree 4 --ampipe-stack {_NINES}", "at least 1, or all. Use"),
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
        "cannot be written to (File exists).",
    ),
    Row(
        "board-file",
        "train --ampipe-degree 2 --tensorboard-dir {here}/empty",
        "cannot be written to (Not a directory).",
    ),
    Row(
        "save-file",
        "train --ampipe-degree 2 --save {here}/empty --save-interval 2",
        "cannot be written to (Not a directory).",
    ),
    Row(
        "save-empty",
        "train --ampipe-degree 2 --save '' --save-interval 2",
        "--save (empty): names nothing, so that",
    ),
    Row(
        "router-hash-mtp",
        "train --ampipe-router hash --mtp-num-layers 1 --position-embedding-type rope",
        "--mtp-num-layers 1: with --ampipe-router hash, layers of multi-token prediction embed later",
    ),
    Row(
        "router-hash-drops",
        "train --ampipe-degree 2 --ampipe-router hash --moe-expert-capacity-factor 1",
        "--moe-token-drop-policy probs: with --ampipe-router hash, all weights are equal",
    ),
    Row(
        "router-hash-balancing",
        "train --ampipe-degree 2 --ampipe-router hash --moe-router-load-balancing-type sinkhorn",
        "--moe-router-load-balancing-type sinkhorn: with --ampipe-router hash, experts are a fixed function",
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
    Row(
        "config-pipe",
        "train --ampipe-config {here}/pipe",
        "pipe: is neither a file nor a built-in configuration.",
    ),
)
_DATASETS = (
    Row("data-with-suffix", _DATA + "{here}/a.bin", "a.bin.bin is not there. Give the prefix of an indexed"),
    Row(
        "data-idx-is-folder",
        _DATA + "{here}/idx-folder",
        "idx-folder.idx cannot be read (Is a directory). Make",
    ),
    Row("data-idx-is-pipe", _DATA + "{here}/idx-pipe", f"idx-pipe.idx {_NO_PIPE}. Make it readable, or"),
    Row("data-bin-is-folder", _DATA + "{here}/bin-folder", "--data-path {here}/bin-folder: sequence"),
    Row(
        "data-weight-last",
        _DATA + "{here}/a 0.5 {here}/a 0.5",
        "the file 0.5.bin is not there. Give the pref",
    ),
    Row(
        "data-weight-negative",
        _DATA + "-1 {here}/a 2 {here}/a",
        "--data-path -1 2: weights of a blend must be",
    ),
    Row(
        "data-weight-zero", _DATA + "0 {here}/a 0 {here}/a", "--data-path 0 0: weights of a blend must be at"
    ),
    Row(
        "data-weight-nan", _DATA + "nan {here}/a 1 {here}/a", "--data-path nan 1: weights of a blend must be"
    ),
    Row(
        "data-list-nowhere",
        "train --ampipe-degree 2 --split 100,0,0 --data-args-path {here}/no",
        "no: there is no such plain file. Give",
    ),
    Row(
        "data-list-pipe",
        "train --ampipe-degree 2 --split 100,0,0 --data-args-path {here}/pipe",
        "pipe: there is no such plain file.",
    ),
    Row(
        "data-list-empty",
        "train --ampipe-degree 2 --split 100,0,0 --data-args-path {here}/empty",
        "arguments (refused by Megatron): ",
    ),
    Row(
        "data-parts-list",
        "train --ampipe-degree 2 --split 100,0,0 --per-split-data-args-path {here}/list.json",
        "(refused by Megatron): ",
    ),
    Row(
        "data-cache-file",
        _DATA + "{here}/a --data-cache-path {here}/empty",
        "empty: is a file. Name a folder, ",
    ),
    Row(
        "data-split-infinite",
        _DATA + "{here}/a --split 1e999,1,0",
        "is not up to three shares, for training,",
    ),
)
_CHECKPOINTS = (
    Row("load-tracker-folder", _LOAD + "tracker-folder", f"{TRACKER} is no plain file. Name the folder that"),
    Row("load-tracker-pipe", _LOAD + "tracker-pipe", f"{TRACKER} is no plain file. Name the folder that"),
    Row(
        "load-tracker-digits", _LOAD + "tracker-nines", "which is neither the number of an iteration nor rel"
    ),
    Row(
        "load-tracker-binary", _LOAD + "tracker-binary", "which is neither the number of an iteration nor re"
    ),
    Row(
        "load-iteration-file", _LOAD + "iteration-file", "asks for iter_0000003, and there is no such folder."
    ),
    Row("load-pipe", _LOAD + "pipe", "--load {here}/pipe: is a file. Name the folder that a run saved to."),
    Row(
        "load-empty",
        "train --ampipe-degree 2 --load ''",
        "--load (empty): names nothing, so that a run would",
    ),
    Row(
        "load-step-negative",
        _LOAD + "folder --ckpt-step -3",
        "--ckpt-step -3 asks for iter_-000003, and there",
    ),
    Row(
        "pretrained-nowhere",
        "train --ampipe-degree 2 --pretrained-checkpoint {here}/no",
        "holds no checkpoint,",
    ),
)
_VARIABLES = tuple(
    Row(f"variable-{name}-{value}", "train --ampipe-degree 2", said + _TORCHRUN, environment={name: value})
    for name, value, said in (
        ("RANK", "abc", "RANK abc: must be a whole number. "),
        ("RANK", "99", "RANK 99: must be below WORLD_SIZE, which is 4. "),
        ("WORLD_SIZE", "", "WORLD_SIZE (empty): must be a whole number. "),
        ("LOCAL_RANK", "-1", "LOCAL_RANK -1: must be a whole number. "),
        ("LOCAL_WORLD_SIZE", "abc", "LOCAL_WORLD_SIZE abc: must be a whole number. "),
        ("MASTER_PORT", "http", "MASTER_PORT http: must be a whole number. "),
    )
)
ROWS = (
    *_YAML, *_PLANNER, *_TRACES, *_TOOLS, *_PLANS, *_FLAGS, *_DATASETS, *_CHECKPOINTS, *_VARIABLES
)  # fmt: skip
