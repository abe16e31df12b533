"""Every row of the table of bad inputs ends soon, with its exit code and a helpful message.

``{here}`` is the folder of all files: those with contents below, datasets and checkpoints.
"""

import json
import os
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy
import pytest

from megatron_ampipe.files.inputs import config_names
from megatron_ampipe.schedule import BlockFeatures, build, to_text
from tests.forked import run_ranks
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
_BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
"""A few lines that YAML expands to a list of 10**9 words."""
FILES = {
    "empty": "",
    "good.plan": json.dumps(_PLAN_OF_DEGREE_2),
    "inf.cluster": config_names("clusters")["a800x8-20gbps"].read_text().replace("_us: 20", "_us: .inf", 1),
    "wide.layout": "expert-model-parallel-size: 32",
    "a.trace": json.dumps({"traceEvents": [], "otherData": {"rank": "0"}}),
}
"""Contents of files by name."""

YAML = {
    # Keys.
    "key-misspelt": ("lr: 1\nnum_layers: 2", "{line}2: num_layers: there is no such flag. Did you mean num-"),
    "section-misspelt": ("ampip:\n  degree: 2", "{line}1: ampip: there is no such flag. Did you mean amp"),
    # Values.
    "word-for-number": ("lr: fast", "{line}1: --lr fast: is not a number. Use for example --lr 2."),
    "number-for-switch": ("swiglu: 1", "{line}1: swiglu: '1': is a switch, and takes true or false without"),
    "choice": (
        "attention-backend: flsh",
        "{line}1: --attention-backend flsh: is not one of its values. Did you mean flash?",
    ),
    "name-of-no-choice": (
        "cuda-graph-impl: local\ncuda-graph-modules: [experts]",
        "{line}2: --cuda-graph-modules experts: is not one of its values. Run with --help",
    ),
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
"""Contents of files for ``ampipe config``, and a part of the message; ``{line}`` is the file with a colon."""

ALONE = "alone"
"""Stands for a training of one rank that meets itself, where others have the name of a tool or ``TRAIN``."""
_PLAN = "plan --model mixtral-8x7b --cluster "
_WHOLE = " --split 100,0,0"
_UNLOADABLE = ": the checkpoint cannot be loaded ("
REFUSED = {
    **{
        name: (f"config --ampipe-config {file}", says.replace("{line}", f"{file}:"))
        for name, (_, says) in YAML.items()
        for file in (f"{{here}}/{name}.yaml",)
    },
    "cluster-infinite": (_PLAN + "{here}/inf.cluster", "intra.all_to_all.alpha_us inf: must be a number"),
    "cluster-is-a-plan": (_PLAN + "{here}/good.plan", "good.plan:1: format: is not a known key. Use one of"),
    "set-object": (_PLAN + "dgx-h100 --set hidden-size=!!python/name:os.system", "is not FLAG=VALUE"),
    "bench-from-trace": ("bench --from {here}/a.trace", "is not a result of ampipe bench. Give a file"),
    "set-misspelt": (
        _PLAN + "dgx-h100 --set num-expert=4",
        "--set num-expert 4: has no effect: no size of a block depends on it. Did you mean num-experts?",
    ),
    "half": (
        "config --num-layers 7.5",
        "--num-layers 7.5: is not a whole number. Use for example --num-layers 7.",
    ),
    "half-degree": (
        "config --ampipe-degree 7.5",
        "--ampipe-degree 7.5: is neither a whole number nor auto. Use for example --ampipe-degree 2,",
    ),
    "word-unknown": (
        "config --ampipe-schedule lance",
        "--ampipe-schedule lance: is neither package.module:function nor one of ampipe, moe-only, lancet, "
        "joined, sequential. Did you mean lancet?",
    ),
    "no-value": ("config --num-layers", "--num-layers: expected one argument. Write its value after it, or"),
    "config-flag": ("config --num_layers 2", "--num_layers 2: there is no such flag. Did you mean --num-la"),
    "config-nodes": (
        "config --ranks 4 --ranks-per-node 3",
        "--ranks 4: is not a multiple of --ranks-per-node 3. Use for example --ranks 6: all nodes",
    ),
    # tests/megatron/test_layouts.py has every rule.
    "config-layout": (
        "config --ampipe-config tiny quickstart {here}/wide.layout --mock-data --train-iters 2 --ranks 8",
        "{here}/wide.layout:1: --expert-model-parallel-size 32: must divide the 4 experts of a layer. Use",
    ),
    "config-batch": (
        "config --ampipe-config tiny quickstart --mock-data --train-iters 2 --ranks 8",
        "quickstart.yaml:6: --global-batch-size 2: must be a multiple of 8: --micro-batch-size 1 on each of",
    ),
    "launch-layout": (
        "train --expert-model-parallel-size 4 --expert-tensor-parallel-size 2 --num-experts 4",
        "--expert-model-parallel-size 4 x --expert-tensor-parallel-size 2 is 8, which must divide the 4 "
        "ranks of the run. Use 8 ranks, or --expert-model-parallel-size 2.",
    ),
    "config-nodes-alone": (
        "config --ranks-per-node 2",
        "--ranks-per-node 2: has no effect without --ranks. Add",
    ),
    # Launches.
    "degree-two-words": ("train --ampipe-degree 4 4", "argument 4: unexpected argument. Leave it out,"),
    "degree-above-rows": (
        "train --ampipe-degree 1000",
        "must be between 1 and the number of rows of the sequence on one rank (64). Use --ampipe-degree 2.",
    ),
    "no-interval": (
        "train --save {here}/new",
        "--save-interval (not given): Megatron needs it with these arguments. Add --save-interval 500,",
    ),
    "no-micro-batch": (
        "config --ampipe-config tiny --mock-data --ranks 2",
        "--micro-batch-size (not given): Megatron needs it with these arguments. Add --micro-b",
    ),
    "custom-schedule": (
        "train --ampipe-degree 2 --ampipe-schedule tests.schedules:loses_a_stage",
        "--ampipe-schedule tests.schedules:loses_a_stage: for degree 2: the forward order lacks combine.1. "
        "Change the function (docs/schedules.md), or use --ampipe-schedule ampipe.",
    ),
    "schedule-at-degree-1": ("train --ampipe-schedule ampipe", "has no effect at --ampipe-degree 1, which"),
    "exchange-in-one-chunk": (
        "train --ampipe-exchange ranks --cpu-offloading-num-layers 1 --moe-router-topk 2 "
        "--expert-model-parallel-size 2",
        "--cpu-offloading-num-layers 1: with --ampipe-exchange ranks, activation offloading is not supported "
        "yet. Leave it out, or train with --ampipe-exchange rows.",
    ),
    "save-plan-foreign": (
        "train --ampipe-degree auto --ampipe-save-plan {here}/a.trace",
        "a.trace:1: traceEvents",
    ),
    "save-file": ("train --ampipe-degree 2 --save {here}/empty --save-interval 2", "to (Not a directory)."),
    "router-ids": (
        "train --ampipe-router tests.gates:BiasedByIdRouter --mlp-chunks-for-training 2",
        "--mlp-chunks-for-training 2: with --ampipe-router tests.gates:BiasedByIdRouter, Megatron routes",
    ),
    "flag-misspelt": ("train --ampipe_degree 2", "--ampipe_degree 2: there is no such flag. Did you mean"),
    "megatrons-check": ("train --hidden-size 130", "args.hidden_size % args.num_attention_heads == 0. The"),
    # Datasets.
    "no-data": ("alone", "--data-path (not given): a run needs data. Give --data-path PREFIX, or"),
    "idx-cut": (
        "alone --data-path {here}/cut" + _WHOLE,
        "{here}/cut.idx (buffer is smaller than requested size). Copy",
    ),
    "no-tokens": (
        "alone --data-path {here}/few --split 2,1,0",
        "--split 2,1,0: gives train no token of {here}/few. Use --split 100,0,0 and --eval-iters 0, or",
    ),
    "cache": (
        "alone --data-path {here}/data --data-cache-path {here}/data.idx/cache" + _WHOLE,
        "Failed to write dataset materials",
    ),
    # Checkpoints.
    "note-of-nothing": ("alone --mock-data --load {here}/noted", "--load {here}/noted" + _UNLOADABLE),
    "shard-cut": ("alone --mock-data --load {here}/torn", "--load {here}/torn" + _UNLOADABLE + "EOFError). "),
    "longer": (
        "alone --mock-data --load {here}/saved --train-iters 6",
        "had another schedule of the learning rate (OptimizerParamScheduler: class input value 24 and",
    ),
    "other-optimizer": (
        "alone --mock-data --load {here}/sharded --use-distributed-optimizer",
        "--load {here}/sharded: without Transformer Engine or apex, Megatron cannot load the optimizer state "
        "that --use-distributed-optimizer saves. With --no-load-optim, the weights are loaded and the",
    ),
    "other-layout": (
        "alone --mock-data --load {here}/ep2",
        "--load {here}/ep2: the optimizer state of the checkpoint is of another layout or optimizer (Could "
        "not find parameter group",
    ),
}
"""Command lines, and a part of the message. ``train`` goes on with those of a launch on made-up data."""

CONTROLS = {
    "train-well": ("train --ampipe-plan {here}/good.plan", "", PROCESS_GROUP_MADE),
    # As on a login node, where no launcher says how many ranks share a node.
    "config-nodes-well": (
        "config --ampipe-config tiny quickstart --mock-data --train-iters 2 --global-batch-size 4 "
        "--expert-model-parallel-size 4 --ranks 4 --ranks-per-node 2 --ampipe-degree 2 "
        "--ampipe-exchange nodes",
        "exchange: nodes",
        0,
    ),
    "data-well": ("alone --data-path {here}/data" + _WHOLE, "", 0),
    "longer-well": (
        "alone --mock-data --load {here}/saved --train-iters 3 --override-opt-param-scheduler",
        "",
        0,
    ),
    "other-optimizer-well": (
        "alone --mock-data --load {here}/sharded --use-distributed-optimizer --no-load-optim --train-iters 3",
        "",
        0,
    ),
    "other-layout-well": ("alone --mock-data --load {here}/ep2 --no-load-optim --train-iters 3", "", 0),
    "load-new-folder": ("alone --mock-data --load {here}/new", "", 0),
}
"""Valid inputs, so that only the argument of a row is wrong: the same, and the exit code."""

OTHER_CHECKPOINTS = {
    "sharded": (["--use-distributed-optimizer"], 1),
    "ep2": (["--expert-model-parallel-size", "2"], 2),
}
"""Further flags of runs that save checkpoints, and their numbers of ranks, by folder."""

LIMIT_S = 60.0
SMALL = [*TINY_GPT, *TINY_MOE, "--vocab-size", "256"]


def write_dataset(prefix: Path, lengths: Sequence[int]) -> None:
    """Write an indexed dataset of 16-bit tokens with documents of these lengths."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for length in lengths:
        builder.add_document(numpy.full(length, 7), [length])
    builder.finalize(f"{prefix}.idx")


def cut(path: Path) -> None:
    """Lose the second half of a file."""
    os.truncate(path, path.stat().st_size // 2)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all files."""
    here = tmp_path_factory.mktemp("bad")
    for name, content in FILES.items():
        (here / name).write_text(content)
    for name, (content, _) in YAML.items():
        (here / f"{name}.yaml").write_text(content)
    for name, lengths in {"data": [300] * 8, "cut": [300] * 8, "few": [0, 0, 300]}.items():
        write_dataset(here / name, lengths)
    cut(here / "cut.idx")
    saving = ["--save", str(here / "saved"), "--save-interval", "2", "--exit-interval", "2"]
    run = pretrain(*SMALL, *MOCK_DATA, *saving, num_ranks=1)
    assert run.exit_code == 0, run.output[-4000:]
    for name, (words, num_ranks) in OTHER_CHECKPOINTS.items():
        saving[1] = str(here / name)
        run = pretrain(*SMALL, *MOCK_DATA, *saving, *words, num_ranks=num_ranks)
        assert run.exit_code == 0, run.output[-4000:]
        # Said when they are saved, not only when they cannot be resumed.
        assert run.says("With --no-load-optim, the weights are loaded") == (name == "sharded")
    for name in ("noted", "torn"):
        shutil.copytree(here / "saved", here / name)
    (here / "noted" / "latest_checkpointed_iteration.txt").write_text("3")
    cut(here / "torn" / "iter_0000002" / "__0_0.distcp")
    return here


def launched(text: str, here: Path) -> tuple[list[str], dict[str, str]]:
    """The arguments of ``one_launch`` for a command line, and its environment."""
    tool, *words = shlex.split(text.replace("{here}", str(here)))
    if tool == ALONE:
        return [TRAIN, *SMALL, *words], meeting_place()
    at = ACCEPTED.index("--ampipe-degree")
    stock = [*ACCEPTED[:at], *ACCEPTED[at + 2 :]] if tool == TRAIN else []
    return [tool, *stock, *words], NOWHERE


@pytest.mark.parametrize("name", [*REFUSED, *CONTROLS])
def test_it_ends_soon_and_says_why(name: str, here: Path) -> None:
    text, says, code = CONTROLS[name] if name in CONTROLS else (*REFUSED[name], 2)
    words, variables = launched(text, here)
    env = environment() | variables
    (ended,), (output,) = run_ranks(
        "tests.megatron.one_launch", words, num_ranks=1, env=env, timeout_s=LIMIT_S
    )
    assert ended is not None, f"not ended after {LIMIT_S} s"
    assert ended == code and "Traceback" not in output, output
    assert says.replace("{here}", str(here)) in output, output
    if code == 2:
        (said,) = (line for line in output.splitlines() if line.startswith(("error: ", "ampipe")))
        # NAME VALUE: RULE. REMEDY. Also with a long value, what is wrong and what to do are in sight.
        assert "?." not in said and ".." not in said.replace("...", ""), said
        assert ": " in said and ". " in said and said.endswith((".", "?")) and len(said) < 2500, said
        if said.removeprefix("error: ").startswith("dataset "):
            assert "end of arguments" not in output, "some 850 lines of Megatron's stand before it"


def test_what_the_first_rank_alone_finds_ends_the_others(here: Path) -> None:
    """It builds the datasets' index while the others wait for it, here without a launcher that ends them."""
    words = ["--data-path", str(here / "few"), "--split", "2,1,0", "--expert-model-parallel-size", "2"]
    run = pretrain(*SMALL, *words, timeout_s=90)
    assert run.exit_code == 2
    first, second = [line for line in run.output.splitlines() if line.startswith("error: ")]
    assert first.startswith(f"error: --split 2,1,0: gives train no token of {here / 'few'}.")
    assert second.startswith("error: rank 1 failed: it has lost a peer, see above.")
