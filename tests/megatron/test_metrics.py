"""The metrics of a run with ``--ampipe-degree`` in Megatron's log, TensorBoard and Weights & Biases."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.megatron.launcher import (
    MODULE,
    REPOSITORY,
    TINY_GPT,
    TINY_MOE,
    environment,
    torchrun_command,
    train,
)

WANDB = """
import json, os
__version__ = "0"
class config: update = staticmethod(lambda *values, **settings: None)
def init(**settings): pass
def log(values, step=None, *rest):
    with open(os.environ["WANDB_WRITES"], "a") as file:
        file.write(json.dumps([step, {name: float(value) for name, value in values.items()}]) + "\\n")
def finish(): pass
"""
"""A fake wandb that writes the logged values to a file."""

TAGS = {
    "ampipe/degree",
    "ampipe/hidden-share",
    "ampipe/exposed-communication-ms",
    "ampipe/block-forward-ms",
    "ampipe/block-backward-ms",
}
# The output of another rank may end in the middle of a line, and then precedes AMPipe's line.
LINE = re.compile(r" ampipe at iteration +(\d+) \| (.*) \|$", re.M)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of 5 iterations that logs every second one and evaluates after the third; its folder and log."""
    pytest.importorskip("tensorboard")
    folder = tmp_path_factory.mktemp("metrics")
    (folder / "modules").mkdir()
    (folder / "modules/wandb.py").write_text(WANDB)
    command = torchrun_command(
        *("-m", MODULE, *TINY_GPT, *TINY_MOE, "--mock-data", "--expert-model-parallel-size", "2"),
        *("--train-iters", "5", "--log-interval", "2", "--eval-iters", "1", "--eval-interval", "3"),
        *("--tensorboard-dir", str(folder / "events"), "--ampipe-degree", "2"),
        *("--wandb-project", "p", "--wandb-exp-name", "e", "--wandb-save-dir", str(folder / "wandb")),
    )
    paths = os.pathsep.join([str(folder / "modules"), str(REPOSITORY)])
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=environment() | {"PYTHONPATH": paths, "WANDB_WRITES": str(folder / "writes")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return folder, done.stdout


def check_values(values: dict[str, float]) -> None:
    assert values.keys() == TAGS
    assert values["ampipe/degree"] == 2
    assert 0 <= values["ampipe/hidden-share"] <= 1
    assert values["ampipe/exposed-communication-ms"] > 0
    # In milliseconds: a block of this size takes a few, and less than a second.
    assert 0.1 < values["ampipe/block-forward-ms"] < 1000
    assert 0.1 < values["ampipe/block-backward-ms"] < 1000


def test_tensorboard_gets_scalars_at_the_log_interval(run: tuple[Path, str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run[0] / "events"))
    events.Reload()
    ours = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"] if tag.startswith("ampipe")}
    assert ours.keys() == TAGS
    assert {tuple(event.step for event in found) for found in ours.values()} == {(2, 4)}
    for index in range(2):
        check_values({tag: found[index].value for tag, found in ours.items()})
    assert "lm loss" in events.Tags()["scalars"]


def test_weights_and_biases_gets_the_same(run: tuple[Path, str]) -> None:
    writes = [json.loads(line) for line in (run[0] / "writes").read_text().splitlines()]
    ours = [(step, values) for step, values in writes if any(name.startswith("ampipe") for name in values)]
    assert [step for step, _ in ours] == [2, 4]
    for _, values in ours:
        check_values(values)
    assert len(writes) > len(ours), "Megatron's values are logged as well"


def test_the_log_gets_one_line_after_megatrons(run: tuple[Path, str]) -> None:
    _, output = run
    assert [number for number, _ in LINE.findall(output)] == ["2", "4"]
    names = [
        "degree",
        "hidden share",
        "exposed communication (ms)",
        "block forward (ms)",
        "block backward (ms)",
    ]
    for _, text in LINE.findall(output):
        assert [part.partition(":")[0] for part in text.split(" | ")] == names
    lines = output.splitlines()
    at = next(index for index, line in enumerate(lines) if LINE.search(line))
    assert any(re.search(r" iteration +2/ *5 \|", line) for line in lines[:at])


def test_without_expert_parallelism_no_hidden_share_is_logged() -> None:
    found = train("--ampipe-degree", "2", "--train-iters", "1", num_ranks=1)
    assert "AMPipe will not help" in found.output and "hidden share" not in found.output
    [(_, text)] = LINE.findall(found.output)
    assert text.startswith("degree: 2 | block forward (ms): ")


SAMPLED = """
from megatron_ampipe.launch import host
host.install()
import argparse, sys
import megatron.core.datasets.utils as dataset_utils
import megatron.training.training as training
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron_ampipe.launch import datasets
from megatron_ampipe.launch.hooks import Hook, Hooks
from megatron_ampipe.launch.recording import Recording
from megatron_ampipe.layers.context import AMPipeContext
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.schedule import Direction, Pipeline, Stage, kinds
from megatron_ampipe.schedule.pipeline import AMPipeConfig

def sampled(rank, trace_dir, log_interval=3):
    config = AMPipeConfig(pipeline=Pipeline.of(2), trace_dir=trace_dir)
    context = AMPipeContext(config, recorder=Recorder(num_iterations=9))
    args = argparse.Namespace(rank=rank, world_size=2, log_interval=log_interval, curr_iteration=0)
    recording = Recording(context, args)
    for iteration in range(7):
        args.curr_iteration = iteration
        for is_training in (True, False):
            recording.before_forward(torch.nn.Identity().train(is_training))
            context.recorder.enter((1,), Direction.FORWARD)
            context.recorder.add("compute", Stage(kinds.QKV), 0.0, 1.0)
    return [span.iteration for span in context.recorder.timeline(rank=0, labels={}).spans]

folder = sys.argv[1]
print(sampled(1, None), sampled(0, None), sampled(0, folder), sampled(1, None, log_interval=100), sep=";")
names = lambda: (
    training.train_step, training.training_log, DistributedDataParallel.__init__,
    GPTDataset._get_num_tokens_per_epoch, dataset_utils.compile_helpers,
)
stock, hooks = names(), Hooks()
hooks.install(pipelined=False)
print(names() == stock)
hooks.add(Hook())
hooks.install(pipelined=True)
datasets.use_built_helpers(hooks.replace)
datasets._refuse_parts_without_tokens(hooks.replace)
print([ours is theirs for ours, theirs in zip(names(), stock)])
hooks.remove()
print(names() == stock)
"""


def test_only_logged_iterations_are_recorded(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SAMPLED, str(tmp_path)],
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    recorded = "[3, 6];[];[1, 2, 3, 4, 5, 6, 7];[]"
    assert done.stdout.splitlines() == [recorded, "True", str([False] * 5), "True"]
