"""The metrics of a run with ``--ampipe-degree`` in Megatron's log, TensorBoard and Weights & Biases."""

import json
import os
import re
from pathlib import Path

import pytest

from megatron_ampipe.files.timeline import Timeline
from tests.conftest import Command
from tests.megatron.launcher import MODULE, REPOSITORY, TINY_GPT, TINY_MOE, execute, torchrun_command

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
    "ampipe/communication-ms",
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
        *("--ampipe-measure", "3-4", "--ampipe-trace-dir", str(folder / "traces")),
        *("--wandb-project", "p", "--wandb-exp-name", "e", "--wandb-save-dir", str(folder / "wandb")),
    )
    paths = os.pathsep.join([str(folder / "modules"), str(REPOSITORY)])
    done = execute(command, env={"PYTHONPATH": paths, "WANDB_WRITES": str(folder / "writes")})
    assert done.exit_code == 0, done.output[-6000:]
    return folder, done.output


def test_tensorboard_and_weights_and_biases_get_scalars_at_the_log_interval(run: tuple[Path, str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run[0] / "events"))
    events.Reload()
    assert "lm loss" in events.Tags()["scalars"]
    ours = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"] if tag.startswith("ampipe")}
    assert {tuple(event.step for event in found) for found in ours.values()} == {(2, 4)}
    of_board = [{tag: found[index].value for tag, found in ours.items()} for index in range(2)]
    writes = [json.loads(line) for line in (run[0] / "writes").read_text().splitlines()]
    assert len(writes) > 2, "Megatron's values are logged as well"
    of_wandb = {step: values for step, values in writes if any(name.startswith("ampipe") for name in values)}
    assert list(of_wandb) == [2, 4]
    for values in (*of_board, *of_wandb.values()):
        assert values.keys() == TAGS
        assert values["ampipe/degree"] == 2
        assert 0 <= values["ampipe/hidden-share"] <= 1
        exposed_ms = values["ampipe/exposed-communication-ms"]
        assert (
            0
            < exposed_ms
            == pytest.approx(
                values["ampipe/communication-ms"] * (1 - values["ampipe/hidden-share"]), rel=1e-3
            )
        )
        # In milliseconds: a block of this size takes a few, and less than a second.
        assert 0.1 < values["ampipe/block-forward-ms"] < 1000
        assert 0.1 < values["ampipe/block-backward-ms"] < 1000


def test_the_log_gets_one_line_after_megatrons(run: tuple[Path, str]) -> None:
    _, output = run
    assert [number for number, _ in LINE.findall(output)] == ["2", "4"]
    names = [
        "degree",
        "communication (ms)",
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


def test_the_medians_of_the_measured_iterations_are_logged_and_drawn(
    run: tuple[Path, str], ampipe: Command
) -> None:
    """Of the two iterations, of which one is not logged; and the trace has these, and not the last ones."""
    folder, output = run
    found = re.findall(r" ampipe, iterations 3 to 4, medians \| (.*) \|$", output, re.M)
    assert len(found) == 1
    timeline = Timeline.read_chrome(folder / "traces" / "rank1.trace.json")
    assert {span.iteration for span in timeline.spans} == {3, 4}
    shown = ampipe("draw", folder / "traces", "--output", folder / "picture").out
    assert f"rank 1, iterations 3 to 4, medians | {found[0]}" in shown.splitlines()
    numbers = re.fullmatch(
        r"communication per iteration \(ms\): (\S+) \| under computation: (\S+)%", found[0]
    )
    assert numbers is not None and float(numbers[1]) > 0 and 0 <= float(numbers[2]) <= 100
