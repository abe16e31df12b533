"""Compares training runs with ``--ampipe-degree`` on real text with stock runs of the same command line.

A run is launched once, for the first test that needs it, and shared. In addition to Megatron's log (which has
only three decimals of the gradient norm), the checkpoints of the last iteration are compared: Adam's first
moments are a linear function of all gradients of the run, in full precision.
"""

from __future__ import annotations

import email
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_ampipe.block.settings import TRACED_ITERATIONS
from megatron_ampipe.files.timeline import Timeline
from megatron_ampipe.schedule import Direction, build
from megatron_ampipe.schedule.features import BlockFeatures
from tests.megatron.launcher import REPOSITORY, TINY_GPT, Run, environment, pretrain

pytestmark = pytest.mark.timeout(900)

TOLERANCE = 1e-5
"""Relative difference from the stock run due to fp32 rounding; measured: 1e-6."""
MOMENT_TOLERANCE = 2e-5
"""The same for Adam's first moments, relative to the largest of a parameter; measured: 5e-6."""
BF16_TOLERANCE = 5e-4
"""The same for the losses of a bf16 run; measured: 5e-5. One bf16 value has a rounding error up to 2e-3."""
FIRST_MOMENT = re.compile(r"\.exp_avg(\.|$)")
"""Name of the first moment of each parameter; with the distributed optimizer, of each gradient buffer."""
LAST_DIGIT_OF_GRAD_NORM = 1.001e-3
NUM_ITERATIONS = 6
SAVED_ITERATION = 3
NUM_MICRO_BATCHES = 2
"""Micro-batches of each rank in each iteration of the runs on two ranks."""

COMMON = [
    *TINY_GPT,
    *shlex.split(
        f"--vocab-size 256 --train-iters {NUM_ITERATIONS} --lr-decay-style constant --seed 7 "
        "--attention-dropout 0 --hidden-dropout 0 --ffn-hidden-size 96 --num-experts 4 "
        "--moe-token-dispatcher-type alltoall --expert-model-parallel-size 2 --split 80,20,0"
    ),
]
MODERN = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights "
    "--moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 "
)
CLASSIC = (
    "--seq-length 63 --micro-batch-size 2 --global-batch-size 8 --no-bias-gelu-fusion "
    "--moe-router-topk 1 --moe-router-pre-softmax "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-1 --moe-z-loss-coeff 1e-2 "
)
MIXED = (
    '--moe-layer-freq "[0,1]" --moe-router-topk 2 --moe-expert-capacity-factor 0.8 '
    "--moe-token-drop-policy position --moe-shared-expert-intermediate-size 32 --normalization RMSNorm "
    "--disable-bias-linear --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-1 "
    "--moe-z-loss-coeff 1e-2 --overlap-grad-reduce "
)
SHARDED = (
    MODERN
    + "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --global-batch-size 12 "
)
EVALUATED = "--eval-iters 1 --eval-interval 2 "
THREE_FILES = "--split 99,1,0 --train-iters 2 --eval-iters 1 --eval-interval 1 "
RESUMED = f"--ckpt-step {SAVED_ITERATION} --load "
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
EVALUATED_ALONE = MODERN + EVALUATED + "--skip-train " + RESUMED + "{folder}/modern "
DEGREE_4 = "--ampipe-degree 4 "


@dataclass(frozen=True, slots=True)
class Training:
    """One launch: its flags (``{folder}`` is the output folder of all runs), and the run it must equal."""

    flags: str
    stock: str | None = None
    num_ranks: int = 2
    losses: frozenset[str] = frozenset({"lm loss", "load_balancing_loss"})
    """The losses that a stock run must log."""
    data: str = "text"
    """The dataset that it reads."""


# Megatron also logs a load_balancing_loss of 0 for the types that are not used.
CLASSIC_LOSSES = frozenset({"lm loss", "load_balancing_loss", "seq_load_balancing_loss", "z_loss"})
TRAININGS = {
    "modern": Training(MODERN + EVALUATED),
    "modern-ampipe": Training(
        MODERN + EVALUATED + DEGREE_4 + "--ampipe-trace-dir {folder}/trace", stock="modern"
    ),
    "modern-joined": Training(MODERN + EVALUATED + DEGREE_4 + "--ampipe-schedule joined", stock="modern"),
    "classic": Training(CLASSIC, losses=CLASSIC_LOSSES),
    "classic-sequential-odd": Training(
        CLASSIC + "--ampipe-degree 3 --ampipe-schedule sequential", stock="classic"
    ),
    "classic-moe-only-recompute-odd": Training(
        CLASSIC + RECOMPUTED + DEGREE_4 + "--ampipe-schedule moe-only", stock="classic"
    ),
    "mixed": Training(MIXED, losses=frozenset({"lm loss", "load_balancing_loss", "z_loss"})),
    "mixed-capacity-shared": Training(MIXED + DEGREE_4, stock="mixed"),
    "sharded": Training(SHARDED, num_ranks=4),
    "sharded-dp2-ep2": Training(SHARDED + DEGREE_4, stock="sharded", num_ranks=4),
    "bf16": Training(MODERN + "--bf16"),
    "bf16-ampipe": Training(MODERN + "--bf16 " + DEGREE_4),
    "stock-from-ampipe": Training(MODERN + RESUMED + "{folder}/modern-ampipe", stock="modern"),
    "ampipe-from-stock": Training(MODERN + RESUMED + "{folder}/modern " + DEGREE_4, stock="modern"),
    "evaluated-alone": Training(EVALUATED_ALONE),
    "evaluated-alone-ampipe": Training(EVALUATED_ALONE + DEGREE_4),
    "three-files": Training(MODERN + THREE_FILES, data="three"),
    "three-files-ampipe": Training(MODERN + THREE_FILES + DEGREE_4, data="three"),
}
PARITY = [
    name
    for name, training in TRAININGS.items()
    if training.stock is not None and RESUMED not in training.flags
]


class Trainings:
    """The runs of this module by name, each launched at its first use.

    Args:
        folder: Contains the datasets ``text`` and ``three``; checkpoints and traces are written to it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runs: dict[str, Run] = {}

    def __getitem__(self, name: str) -> Run:
        if name not in self._runs:
            training = TRAININGS[name]
            self._runs[name] = pretrain(
                *COMMON,
                *shlex.split(training.flags.format(folder=self.folder)),
                *("--data-path", str(self.folder / training.data)),
                *("--data-cache-path", str(self.folder / "cache")),
                *("--save", str(self.folder / name), "--save-interval", str(SAVED_ITERATION)),
                num_ranks=training.num_ranks,
            )
        run = self._runs[name]
        assert run.exit_code == 0, run.output[-6000:]
        pipelined = "--ampipe-degree" in TRAININGS[name].flags
        assert ("chunk boundaries" in run.output) is pipelined, "not the layers that this run should use"
        assert "every degree draws" not in run.table, "there is no dropout"
        return run

    def moments(self, name: str) -> dict[str, object]:
        """Adam's first moment of every parameter after the last iteration of that run."""
        run = self[name]
        assert run.iterations[-1] == NUM_ITERATIONS
        return _first_moments(self.folder / name / f"iter_{NUM_ITERATIONS:07d}")


def _first_moments(checkpoint: Path) -> dict[str, object]:
    """Read only the tensors, without Megatron and without a process group."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    entries = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    found = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata) and FIRST_MOMENT.search(name)
    }
    with warnings.catch_warnings():
        # It warns that it loads everything in one process, which is intended.
        warnings.simplefilter("ignore", category=UserWarning)
        dcp.load(found, checkpoint_id=checkpoint, no_dist=True)
    return found


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    folder = tmp_path_factory.mktemp("training")
    texts = folder / "texts"
    texts.mkdir()
    for source in Path(email.__file__).parent.glob("*.py"):
        shutil.copy(source, texts)
    _make_dataset(texts, folder / "text", "--document-bytes", "0")
    three = folder / "three_texts"
    three.mkdir()
    for name in ("_header_value_parser.py", "headerregistry.py", "message.py"):
        shutil.copy(texts / name, three)
    _make_dataset(three, folder / "three")
    return Trainings(folder)


def _make_dataset(texts: Path, prefix: Path, *flags: str) -> None:
    command = [sys.executable, "-m", "megatron_ampipe.cli", "data", str(texts), "--output", str(prefix)]
    done = subprocess.run(
        [*command, *flags], cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr


def _logged_losses(run: Run) -> dict[str, list[float]]:
    """All losses that Megatron logs, by name, for all iterations."""
    found: dict[str, list[float]] = {}
    for line in run.output.splitlines():
        _, separator, fields = line.partition("elapsed time per iteration")
        if separator:
            for name, value in re.findall(r"\| (\w[\w ]* ?loss): ([0-9.E+-]+) ", fields):
                found.setdefault(name, []).append(float(value))
    return found


def _relative_differences(expected: list[float], found: list[float]) -> list[float]:
    return [abs(a - b) / abs(a) if a != b else 0.0 for a, b in zip(expected, found, strict=True)]


def _assert_moments_equal(expected: dict[str, object], found: dict[str, object]) -> None:
    assert len(expected) >= 3, "dense parameters, and the experts of two ranks"
    assert expected.keys() == found.keys()
    differences = {
        name: ((tensor - found[name]).abs().max() / tensor.abs().max()).item()
        for name, tensor in expected.items()
    }
    print(f"largest difference of Adam's first moments: {max(differences.values()):.1e}")
    wrong = {name: value for name, value in differences.items() if not value <= MOMENT_TOLERANCE}
    assert not wrong, f"the gradients of the run differ from stock: {wrong}"


@pytest.mark.parametrize("name", PARITY)
def test_training_equals_stock(name: str, trainings: Trainings) -> None:
    stock_name = TRAININGS[name].stock
    stock, ours = trainings[stock_name], trainings[name]
    assert ours.iterations == stock.iterations == list(range(1, NUM_ITERATIONS + 1))
    assert stock.lm_loss[-1] < stock.lm_loss[0] - 0.2, "a run that learns nothing proves little"
    expected, found = _logged_losses(stock), _logged_losses(ours)
    assert set(found) == set(expected) == TRAININGS[stock_name].losses
    for loss, values in expected.items():
        difference = max(_relative_differences(values, found[loss]))
        print(f"{loss}: {difference:.1e}")
        assert difference <= TOLERANCE, loss
    norms = [abs(a - b) for a, b in zip(stock.grad_norm, ours.grad_norm, strict=True)]
    assert max(norms) <= LAST_DIGIT_OF_GRAD_NORM
    _assert_moments_equal(trainings.moments(stock_name), trainings.moments(name))


def test_validation_losses_equal_stock(trainings: Trainings) -> None:
    stock, ours = trainings["modern"].validation_loss, trainings["modern-ampipe"].validation_loss
    assert len(stock) == NUM_ITERATIONS // 2
    assert max(_relative_differences(stock, ours)) <= TOLERANCE


def test_evaluation_alone_equals_stock(trainings: Trainings) -> None:
    """``--skip-train``: no iteration, and no count of them in Megatron's arguments."""
    assert trainings["modern"].exit_code == 0, "writes the checkpoint that is loaded"
    stock, ours = trainings["evaluated-alone"], trainings["evaluated-alone-ampipe"]
    assert stock.iterations == ours.iterations == []
    expected, found = (
        [float(loss) for loss in re.findall(r"on validation set \| lm loss value: (\S+)", run.output)]
        for run in (stock, ours)
    )
    assert len(expected) == 1
    assert max(_relative_differences(expected, found)) <= TOLERANCE


def test_the_documented_split_trains_on_three_files_like_stock(trainings: Trainings) -> None:
    stock, ours = trainings["three-files"], trainings["three-files-ampipe"]
    assert len(stock.lm_loss) == len(stock.validation_loss) == 2
    assert max(_relative_differences(stock.lm_loss, ours.lm_loss)) <= TOLERANCE
    assert max(_relative_differences(stock.validation_loss, ours.validation_loss)) <= TOLERANCE


@pytest.mark.parametrize("name", ["stock-from-ampipe", "ampipe-from-stock"])
def test_checkpoints_interchange(name: str, trainings: Trainings) -> None:
    """The run that is loaded is launched first; both continuations end with the same results as it."""
    unbroken = trainings["modern"]
    assert trainings["modern-ampipe"].exit_code == 0
    resumed = trainings[name]
    assert resumed.iterations == list(range(SAVED_ITERATION + 1, NUM_ITERATIONS + 1))
    expected = unbroken.lm_loss[SAVED_ITERATION:]
    # For the second iteration after a resume, Megatron prints the mean of the first two.
    expected[1] = (expected[0] + expected[1]) / 2
    assert max(_relative_differences(expected, resumed.lm_loss)) <= TOLERANCE
    _assert_moments_equal(trainings.moments("modern"), trainings.moments(name))


def test_bf16_stays_within_rounding_of_stock(trainings: Trainings) -> None:
    stock, ours = trainings["bf16"], trainings["bf16-ampipe"]
    differences = _relative_differences(stock.lm_loss, ours.lm_loss)
    print(f"lm loss in bf16: {max(differences):.1e}")
    assert max(differences) <= BF16_TOLERANCE
    assert ours.lm_loss[-1] < ours.lm_loss[0] - 0.2


@pytest.mark.parametrize("rank", [0, 1])
def test_trace_contains_every_stage_of_the_last_iterations(rank: int, trainings: Trainings) -> None:
    """Every training micro-batch exactly once, which also shows that no evaluation was recorded."""
    assert trainings["modern-ampipe"].validation_loss, "there must have been an evaluation to leave out"
    timeline = Timeline.read_chrome(trainings.folder / "trace" / f"rank{rank}.trace.json")
    assert timeline.rank == rank
    assert timeline.labels["degree"] == "4"
    assert timeline.labels["schedule"] == "ampipe"
    schedule = build("ampipe", degree=4, features=BlockFeatures(losses=True, chunked_qkv=True))
    found = Counter((span.iteration, span.layer, span.direction, span.stage) for span in timeline.spans)
    iterations = range(NUM_ITERATIONS - TRACED_ITERATIONS + 1, NUM_ITERATIONS + 1)
    expected = {
        (iteration, layer, str(direction), str(stage)): NUM_MICRO_BATCHES
        for iteration in iterations
        for layer in (1, 2)
        for direction in Direction
        for stage in schedule.program(direction).stages
    }
    assert dict(found) == expected
    communication = {"counts", "dispatch", "combine"}
    assert all(
        (span.lane == "comm") is (span.stage.partition(".")[0] in communication) for span in timeline.spans
    )
    assert 0 < timeline.hidden_share <= 1
