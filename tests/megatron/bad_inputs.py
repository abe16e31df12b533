"""Inputs that no user should give, as a table: what is run, how it must end, and what it must say.

Read by :mod:`.test_bad_inputs`. None of them stands in another test.
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
from tests.megatron.refusal_flags import ACCEPTED
from tests.megatron.refusals_worker import PROCESS_GROUP_MADE
from tests.megatron.test_bad_files import TRACKER, write_dataset


@dataclass(frozen=True, slots=True)
class BadInputRow:
    """One command.

    Attributes:
        name: Of the row.
        words: The command line; the first word is a tool, or ``train`` for a launch of :data:`ACCEPTED`
            with the other words behind. ``{here}`` is the folder with the files.
        says: What the message holds.
        code: How the command ends.
        environment: Variables of its own.
    """

    name: str
    words: str
    says: str = ""
    code: int = 2
    environment: dict[str, str] = field(default_factory=dict)



def _schedule(degree: int = 2) -> str:
    return to_text(build("ampipe", degree=degree, features=BlockFeatures(chunked_qkv=True)))


def _plan(**changes: Any) -> str:
    """A plan of degree 2, as somebody could write it by hand."""
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
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
"""A few lines that stand for a list of 10**9 words."""
_NINES = "9" * 5000
"""More digits than Python turns into a number."""

FILES: dict[str, str | bytes] = {
    "empty": "",
    "binary": bytes(range(256)) * 4,
    "tab.yaml": "num-layers: 2\n\thidden-size: 64\n",
    "twice.yaml": "num-layers: 2\nlr: 1\nnum-layers: 4\n",
    "latin.yaml": "num-layers: 2\n# Größe\n".encode("latin-1"),
    "utf16.yaml": "num-layers: 2\n".encode("utf-16"),
    "list.yaml": "- num-layers: 2\n",
    "two.yaml": "num-layers: 2\n---\nnum-layers: 4\n",
    "deep.yaml": "num-layers: " + "[" * 20_000,
    "deep-map.yaml": "num-layers: " + "{a: " * 3000 + "}" * 3000,
    "bomb.yaml": _BOMB + "num-layers: *i\n",
    "self.yaml": "num-layers: &a [*a]\n",
    "merge.yaml": "base: &base {lr: 1}\n<<: *base\n",
    "python.yaml": "num-layers: !!python/object/apply:os.system ['echo pwned']\n",
    "infinite.yaml": "lr: 1e999\n",
    "nan.yaml": "lr: .nan\n",
    "nul.yaml": 'ampipe:\n  plan: "a\\0b"\n',
    "map.yaml": "lr: {a: 1}\n",
    "own-list.yaml": "ampipe: [degree, 4]\n",
    "own-degree.yaml": "ampipe:\n  degree: [4, 4]\n",
    "own-config.yaml": "ampipe:\n  config: tiny\n",
    "number-key.yaml": "1: 2\n",
    "null-key.yaml": "? \n: 2\n",
    "good.plan": _plan(),
    "cut.plan": _plan()[:120],
    "nan.plan": _plan(predicted_ms=float("nan")),
    "long.plan": _plan(stock_ms=10**400),
    "hidden.plan": _plan(hidden_share=7),
    "huge-share.plan": _plan(shares=[1e308, 1e308]),
    "format.plan": _plan(format=["ampipe-plan-1"]),
    "shares.plan": _plan(shares={"0": 1}),
    "schedule.plan": _plan(schedule=["qkv"]),
    "lane.plan": _plan(schedule=_schedule().replace("comm:", "copy:")),
    "loop.plan": _plan(schedule=_schedule().replace("attention.0 route.0", "route.0 attention.0")),
    "repeat.plan": _plan(schedule=_schedule().replace("attention.0", "attention.0 attention.0", 1)),
    "missing.plan": _plan(schedule="schedule mine degree 2\n"),
    "lost-stage.plan": _plan(schedule=_schedule().replace(" merge.1", "", 1)),
    "nines.plan": _plan(schedule=_schedule().replace("degree 2", f"degree {_NINES}")),
    "nines-stage.plan": _plan(schedule=_schedule().replace("attention.1", f"attention.{_NINES}")),
    "bomb.plan": _BOMB + "format: *i\n",
    "cluster.yaml": _cluster(),
    "long.cluster": _cluster("alpha_us: 20", "alpha_us: 1" + "0" * 400),
    "nines.cluster": _cluster("ranks_per_node: 8", f"ranks_per_node: {_NINES}"),
    "inf.cluster": _cluster("alpha_us: 20", "alpha_us: .inf"),
    "words.cluster": _cluster("alpha_us: 20", "alpha_us: twenty"),
    "negative.cluster": _cluster("beta_us_per_mb: 50", "beta_us_per_mb: -50"),
    "date.cluster": _cluster("alpha_us: 20", "alpha_us: 2026-13-45"),
    "no-compute.cluster": _cluster("compute:", "compute: {}\nx:"),
    "slowdown.cluster": _cluster("compute_slowdown: ", "compute_slowdown: 0.1 # "),
    "huge.cluster": _cluster("alpha_us: 20", "alpha_us: 1.0e+308").replace("beta_us_per_mb: 50", "beta_us_per_mb: 1.0e+308"),
    "zero.cluster": "".join(
        re.sub(r"^(\s+(?:alpha|beta|merge|weights|forward_us|backward_us)\w*:) .*$", r"\1 0", line) + "\n"
        for line in _cluster().splitlines()
    ),
    "bomb.cluster": _BOMB + "description: *i\n",
    "huge.model": "hidden-size: 1" + "0" * 400 + "\nnum-attention-heads: 1\nnum-experts: 8\nseq-length: 64\n",
    "octal.model": "hidden-size: 0100\nnum-attention-heads: 4\nnum-experts: 8\nseq-length: 64\n",
    "nan.model": "hidden-size: .nan\nnum-attention-heads: 4\nnum-experts: 8\nseq-length: 64\n",
    "list.model": "hidden-size: [64]\nnum-attention-heads: 4\nnum-experts: 8\nseq-length: 64\n",
    "bool.model": "hidden-size: true\nnum-attention-heads: 4\nnum-experts: 8\nseq-length: 64\n",
    "switch.model": "hidden-size: 64\nswiglu: maybe\nnum-attention-heads: 4\nnum-experts: 8\nseq-length: 64\n",
    "topk.model": "hidden-size: 64\nmoe-router-topk: 9\nnum-attention-heads: 4\nnum-experts: 8\nseq-length: 64\n",
    "bomb.model": _BOMB.replace("a: &a", "hidden-size: &a") + "lr: *i\n",
    "many-experts.model": "hidden-size: 64\nnum-attention-heads: 4\nnum-experts: 1000000000000\nseq-length: 64\n",
    "trace.json": _trace(),
    "cut.json": _trace()[:100],
    "list.json": "[]",
    "null.json": "null",
    "superscript.json": _trace(name="attention.\u00b2"),
    "nines.json": _trace(name="attention." + _NINES),
    "chunk.json": _trace(name="attention.99999999999"),
    "late.json": _trace(ts=1e308, dur=1e308),
    "early.json": _trace(ts=-1e300),
    "dollar.json": _trace(name="att$\\frac{$.0"),
    "lane.json": _trace(tid="x" * 100_000),
    "args.json": _trace(args=[1]),
    "layer.json": _trace(args={"layer": 10**300, "iteration": 1}),
    "rank.json": _trace().replace('"rank": "0"', f'"rank": "{_NINES}"'),
    "labels.json": _trace().replace('"rank": "0"', '"rank": "0", "degree": "$x\\n\\u0000"'),
    "events.json": '{"otherData": {"rank": "0"}, "traceEvents": {"ph": "X"}}',
    "no-rank.json": '{"otherData": {}, "traceEvents": []}',
    "true.json": _trace(ts=True, dur="1"),
    "deep.json": "[" * 100_000,
    "result.json": '{"format": "ampipe-bench-1", "cases": {}}',
    "sizes.grid": _grid("    hidden: 1" + "0" * 400 + "\n"),
    "axes.grid": "axes: [" + ", ".join(["[{name: a}, {name: b}]"] * 40) + "]\n",
    "bomb.grid": _BOMB + "cases: *i\n",
    "data.txt": "some words\n",
    "site.yaml": "partition: [a]\n",
    "weights.json": '{"train": 3}',
    "list.split.json": '[1, 2]',
}
"""By name. In addition: ``folder`` (empty), ``pipe`` (nobody writes to it), and others below."""


def write_files(folder: Path) -> None:
    """Make everything that the rows name."""
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
    for name, replace in (("idx-folder.idx", Path.mkdir), ("bin-folder.bin", Path.mkdir), ("idx-pipe.idx", os.mkfifo)):
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


_PLAN = "plan --cluster dgx-h100 --model"
_ON = "plan --model mixtral-8x7b --cluster"
_DRAW = "draw --output {here}/out/p"
_DATA = "train --ampipe-degree 2 --split 100,0,0 --data-path"

ROWS: tuple[BadInputRow, ...] = tuple(
    BadInputRow(*row) if isinstance(row, tuple) else row
    for row in (
        ("control", "train --ampipe-plan {here}/good.plan", "", PROCESS_GROUP_MADE),
        ("control-data", _DATA + " {here}/a", "", PROCESS_GROUP_MADE),
        ("control-plan", _ON + " {here}/cluster.yaml", "choice: ", 0),
        ("control-draw", _DRAW + " {here}/trace.json", "wrote", 0),
        *((f"config-{name}", f"config --ampipe-config {{here}}/{name}") for name in (*(n for n in FILES if n.endswith(".yaml")), "empty", "binary", "folder", "pipe", "trace.json")),
        ("config-dev-zero", "config --ampipe-config /dev/zero"),
        ("config-ranks-many", "config --ampipe-config tiny quickstart --mock-data --train-iters 100 --ranks 999999999999999999999"),
        ("config-ranks-3", "config --ampipe-config tiny quickstart --mock-data --train-iters 100 --ranks 3 --expert-model-parallel-size 2"),
        ("config-word", "config tiny"),
        ("config-equals", "config --ampipe-config= "),
        *((f"plan-model-{name}", f"{_PLAN} {{here}}/{name}") for name in (*(n for n in FILES if n.endswith(".model")), "empty", "binary", "folder", "pipe", "trace.json", "cluster.yaml", "good.plan", "bomb.yaml")),
        *((f"plan-cluster-{name}", f"{_ON} {{here}}/{name}") for name in (*(n for n in FILES if n.endswith(".cluster")), "empty", "binary", "folder", "pipe", "trace.json", "good.plan", "bomb.yaml", "nan.yaml")),
        ("plan-set-nan", _ON + " dgx-h100 --set hidden-size=.nan"),
        ("plan-set-twice", _ON + " dgx-h100 --set hidden-size=64 --set hidden-size=4096"),
        ("plan-set-list", _ON + " dgx-h100 --set hidden-size=[1]"),
        ("plan-set-map", _ON + " dgx-h100 --set hidden-size={{a"),
        ("plan-set-tag", _ON + " dgx-h100 --set hidden-size=!!python/name:os.system"),
        ("plan-set-nines", _ON + f" dgx-h100 --set hidden-size={_NINES}"),
        ("plan-set-huge", _ON + " dgx-h100 --set seq-length=100000000000000000000"),
        ("plan-set-experts", _ON + " dgx-h100 --set num-experts=0"),
        ("plan-ranks-3", _ON + " dgx-h100 --ranks 3"),
        ("plan-ranks-nines", _ON + f" dgx-h100 --ranks {_NINES}"),
        ("plan-ranks-superscript", _ON + " dgx-h100 --ranks ²"),
        ("plan-degrees-nines", _ON + f" dgx-h100 --degrees {_NINES}"),
        ("plan-degrees-empty", _ON + " dgx-h100 --degrees ,"),
        ("plan-imbalance-nan", _ON + " dgx-h100 --imbalance nan"),
        ("plan-trace-of-nines", _ON + f" dgx-h100 --trace x --trace-of {_NINES}"),
        ("plan-same-output", _ON + " dgx-h100 --output {here}/out/x --json {here}/out/x"),
        *((f"draw-{name}", f"{_DRAW} {{here}}/{name}") for name in (*(n for n in FILES if n.endswith(".json")), "empty", "binary", "folder", "pipe", "pipes", "traces", "good.plan")),
        ("draw-predicted-pipe", _DRAW + " {here}/trace.json --predicted {here}/pipe"),
        ("draw-predicted-recorded", _DRAW + " {here}/trace.json --predicted {here}/trace.json"),
        ("draw-predicted-folder", _DRAW + " {here}/trace.json --predicted {here}/folder"),
        ("draw-dev-zero", _DRAW + " /dev/zero"),
        ("draw-layer-0", _DRAW + " {here}/trace.json --layer 0"),
        ("draw-iteration-word", _DRAW + " {here}/trace.json --iteration last"),
        ("draw-picture", _DRAW + " {here}/trace.json --output {here}/x.pdf"),
        *((f"bench-from-{name}", f"bench --from {{here}}/{name}") for name in ("result.json", "trace.json", "folder", "pipe", "binary", "empty", "good.plan")),
        *((f"bench-grid-{name}", f"bench --grid {{here}}/{name}") for name in ("sizes.grid", "axes.grid", "bomb.grid", "folder", "pipe", "cluster.yaml", "trace.json")),
        ("bench-ranks-many", "bench --ranks 1000000"),
        ("bench-ranks-3", "bench --ranks 3"),
        ("bench-degrees", f"bench --degrees {_NINES}"),
        ("bench-degree-many", "bench --degrees 4096"),
        ("bench-link", "bench --link emulated:nan"),
        ("bench-predict-plan", "bench --predict {here}/good.plan"),
        ("bench-planned-pipe", "bench --planned {here}/pipe"),
        ("bench-seed", "bench --seed 99999999999999999999999"),
        ("bench-timeout", "bench --timeout nan"),
        ("profile-grid", "profile --output {here}/out.yaml --grid {here}/trace.json"),
        ("profile-case", "profile --output {here}/out.yaml --case nope"),
        ("profile-ranks", "profile --output {here}/out.yaml --ranks 3"),
        ("profile-seed", "profile --output {here}/out.yaml --seed 99999999999999999999999"),
        ("patch-folder", "patch check {here}/folder"),
        ("patch-file", "patch check {here}/empty"),
        ("patch-tree", "patch check {here}/tree"),
        ("patch-tree-2", "patch check {here}/tree-2"),
        ("data-file", "data {here}/data.txt --output {here}/out/d"),
        ("data-bytes", "data {here} --output {here}/out/d --document-bytes -1"),
        ("data-skip-all", "data {here}/folder --output {here}/out/d --skip-bad"),
        ("data-output-file", "data {here} --output {here}/empty/d"),
        ("data-output-root", "data {here} --output /"),
        ("data-suffix", "data {here} --output {here}/out/d --suffixes txt"),
        ("data-binary", "data {here} --output {here}/out/d --suffixes .json,.yaml"),
        ("sbatch-site", "sbatch --site {here}/site.yaml --nodes 1 --gpus-per-node 8 --no-check"),
        ("sbatch-site-pipe", "sbatch --site {here}/pipe --nodes 1 --gpus-per-node 8 --no-check"),
        ("sbatch-site-binary", "sbatch --site {here}/binary --nodes 1 --gpus-per-node 8 --no-check"),
        ("sbatch-model-pipe", "sbatch --model {here}/pipe --nodes 1 --gpus-per-node 8 --no-check"),
        ("sbatch-model-bomb", "sbatch --model {here}/bomb.yaml --nodes 1 --gpus-per-node 8 --no-check"),
        ("sbatch-run-trace", "sbatch --run {here}/trace.json --nodes 1 --gpus-per-node 8 --no-check"),
        ("sbatch-cluster-plan", "sbatch --cluster {here}/good.plan --nodes 1 --no-check"),
        ("sbatch-nodes", f"sbatch --nodes {_NINES} --gpus-per-node 8 --no-check"),
        ("sbatch-nodes-0", "sbatch --nodes 0 --gpus-per-node 8 --no-check"),
        ("sbatch-data-args-pipe", "sbatch --nodes 1 --gpus-per-node 8 --no-check -- --data-args-path {here}/pipe"),
        ("doctor-ranks", "doctor --ranks 0"),
        ("doctor-word", "doctor quick"),
        *((f"train-degree-{n}", f"train --ampipe-degree {n}") for n in ("nan", "1.5", "''", "1e3", "4,4", "0x4", _NINES, "9999999999999", "True")),
        ("train-degree-two", "train --ampipe-degree 4 4"),
        ("train-degree-none", "train --ampipe-degree"),
        *((f"train-chunks-{i}", f"train --ampipe-chunks {n}") for i, n in enumerate(("''", ",", "0.5,,0.5", "0.5;0.5", "nan,nan", "inf,1", "1", "1e-320,1", "0.5,0.5,0", "50%,50%", "-0.5,1.5", "0.5,0.5,0.5", ",".join(["0.001"] * 1000)))),
        *((f"train-backward-{n}", f"train --ampipe-degree 4 --ampipe-backward-degree {n}") for n in ("0", "-4", "auto", "2.0", _NINES)),
        *((f"train-plan-{name}", f"train --ampipe-plan {{here}}/{name}") for name in (*(n for n in FILES if n.endswith(".plan") and n != "good.plan"), "empty", "binary", "folder", "pipe", "cluster.yaml", "trace.json", "nowhere", "bomb.yaml")),
        ("train-plan-empty", "train --ampipe-plan ''"),
        ("train-plan-zero", "train --ampipe-plan /dev/zero"),
        ("train-plan-schedule", "train --ampipe-plan {here}/good.plan --ampipe-schedule ampipe"),
        ("train-plan-twice", "train --ampipe-plan {here}/good.plan --ampipe-save-plan {here}/x.plan"),
        ("train-save-plan-foreign", "train --ampipe-degree auto --ampipe-save-plan {here}/trace.json"),
        ("train-save-plan-pipe", "train --ampipe-degree auto --ampipe-save-plan {here}/pipe"),
        ("train-save-plan-empty", "train --ampipe-degree auto --ampipe-save-plan ''"),
        ("train-save-plan-file", "train --ampipe-degree auto --ampipe-save-plan {here}/empty/plan.yaml"),
        ("train-cluster-plan", "train --ampipe-degree auto --ampipe-cluster {here}/good.plan"),
        ("train-cluster-folder", "train --ampipe-degree auto --ampipe-cluster {here}/folder"),
        ("train-cluster-pipe", "train --ampipe-degree auto --ampipe-cluster {here}/pipe"),
        ("train-cluster-inf", "train --ampipe-degree auto --ampipe-cluster {here}/inf.cluster"),
        ("train-cluster-long", "train --ampipe-degree auto --ampipe-cluster {here}/long.cluster"),
        ("train-cluster-huge", "train --ampipe-degree auto --ampipe-cluster {here}/huge.cluster"),
        ("train-cluster-bare", "train --ampipe-cluster dgx-h100"),
        ("train-trace-file", "train --ampipe-degree 2 --ampipe-trace-dir {here}/empty"),
        ("train-trace-proc", "train --ampipe-degree 2 --ampipe-trace-dir /proc/nope"),
        ("train-trace-empty", "train --ampipe-degree 2 --ampipe-trace-dir ''"),
        ("train-trace-pipe", "train --ampipe-degree 2 --ampipe-trace-dir {here}/pipe"),
        ("train-board-file", "train --ampipe-degree 2 --tensorboard-dir {here}/empty"),
        ("train-save-file", "train --ampipe-degree 2 --save {here}/empty --save-interval 2"),
        ("train-save-proc", "train --ampipe-degree 2 --save /proc/nope --save-interval 2"),
        ("train-config-pipe", "train --ampipe-config {here}/pipe"),
        ("train-config-zero", "train --ampipe-config /dev/zero"),
        ("train-config-bomb", "train --ampipe-config {here}/bomb.yaml"),
        ("train-config-own", "train --ampipe-config {here}/own-config.yaml"),
        ("train-schedule-case", "train --ampipe-degree 2 --ampipe-schedule AMPipe"),
        ("train-schedule-empty", "train --ampipe-degree 2 --ampipe-schedule ''"),
        ("train-scope", "train --ampipe-degree 2 --ampipe-capacity-scope all"),
        ("train-flag", "train --ampipe-degrees 2"),
        ("train-flag-underscore", "train --ampipe_degree 2"),
        ("train-layers-huge", "train --ampipe-degree 2 --num-layers 100000000"),
        ("train-layers-huge-1", "train --num-layers 100000000"),
        ("train-seq-huge", "train --ampipe-degree 2 --seq-length 1000000000000 --max-position-embeddings 1000000000000"),
        ("train-experts-huge", "train --ampipe-degree 2 --num-experts 1000000000"),
        ("train-hidden-nines", f"train --ampipe-degree 2 --hidden-size {_NINES}"),
        ("train-lr-huge", "train --ampipe-degree 2 --lr 1e999"),
        ("train-iters-nines", "train --ampipe-degree 2 --train-iters 99999999999999999999999"),
        ("train-freq", "train --ampipe-degree 2 --moe-layer-freq ([1]*100000000)"),
        ("train-freq-code", "train --ampipe-degree 2 --moe-layer-freq __import__('os').getpid()"),
        ("train-freq-short", "train --ampipe-degree 2 --moe-layer-freq [1,0,1]"),
        ("train-tokenizer", "train --ampipe-degree 2 --tokenizer-type SentencePieceTokenizer --tokenizer-model {here}/nowhere"),
        ("train-no-vocab", "train --ampipe-degree 2 --tokenizer-type BertTokenizer"),
        ("train-yaml-cfg", "train --ampipe-degree 2 --yaml-cfg {here}/nowhere"),
        ("train-yaml-cfg-pipe", "train --ampipe-degree 2 --yaml-cfg {here}/pipe"),
        *((f"data-path-{i}", f"{_DATA} {n}") for i, n in enumerate((
            "{here}/a.bin", "{here}/a.idx", "{here}/folder", "{here}/idx-folder", "{here}/bin-folder", "{here}/idx-pipe", "''",
            "0.5 {here}/a 0.5", "-1 {here}/a 2 {here}/a", "0 {here}/a 0 {here}/a", "nan {here}/a 1 {here}/a", "{here}/a 0.5 {here}/a 0.5", "{here}/a {here}/a {here}/a", "1e999 {here}/a 1 {here}/a", "{here}/a {here}/nowhere", "/dev/null"))),
        ("data-args-nowhere", "train --ampipe-degree 2 --split 100,0,0 --data-args-path {here}/nowhere"),
        ("data-args-folder", "train --ampipe-degree 2 --split 100,0,0 --data-args-path {here}/folder"),
        ("data-args-empty", "train --ampipe-degree 2 --split 100,0,0 --data-args-path {here}/empty"),
        ("data-args-binary", "train --ampipe-degree 2 --split 100,0,0 --data-args-path {here}/binary"),
        ("data-args-pipe", "train --ampipe-degree 2 --split 100,0,0 --data-args-path {here}/pipe"),
        ("per-split-number", "train --ampipe-degree 2 --per-split-data-args-path {here}/weights.json"),
        ("per-split-list", "train --ampipe-degree 2 --per-split-data-args-path {here}/list.split.json"),
        ("per-split-binary", "train --ampipe-degree 2 --per-split-data-args-path {here}/binary"),
        ("split-nan", _DATA + " {here}/a --split nan,1,0"),
        ("split-inf", _DATA + " {here}/a --split 1e999,1,0"),
        ("split-empty", _DATA + " {here}/a --split ''"),
        ("split-four", _DATA + " {here}/a --split 1,1,1,1"),
        ("cache-file", _DATA + " {here}/a --data-cache-path {here}/empty"),
        ("sft-folder", "train --ampipe-degree 1 --sft --data-path {here}/folder"),
        *((f"load-{n}", f"train --ampipe-degree 2 --load {{here}}/{n}") for n in ("tracker-folder", "tracker-nines", "tracker-binary", "iteration-file", "tracker-pipe", "empty", "pipe")),
        ("load-empty-string", "train --ampipe-degree 2 --load ''"),
        ("ckpt-step", "train --ampipe-degree 2 --load {here}/folder --ckpt-step -3"),
        ("ckpt-step-nines", f"train --ampipe-degree 2 --load {{here}}/folder --ckpt-step {_NINES[:4000]}"),
        ("pretrained", "train --ampipe-degree 2 --pretrained-checkpoint {here}/nowhere"),
        *((f"env-{name}-{value}", f"train --ampipe-degree 2", "", 2, {name: value}) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE") for value in ("abc", "", "-1", "99")),
        ("env-port", "train --ampipe-degree 2", "", 2, {"MASTER_PORT": "abc"}),
        ("env-omp", "train --ampipe-degree 2", "", 2, {"OMP_NUM_THREADS": "many"}),
    )
)
