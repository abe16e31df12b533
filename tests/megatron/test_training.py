"""Compares trainings through Megatron's own loop with those of its layers: they log the same digits.

The table is :data:`tests.megatron.trainings.TRAININGS`. The runs of a training share their ranks. What is no
pair of runs from one command line has a separate test below: another layout or precision, random numbers.
"""

import email
import json
import re
import shlex
import sys
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron_ampipe.block.settings import SHIPPED_GATES, TRACED_ITERATIONS
from megatron_ampipe.cli import main
from megatron_ampipe.files.timeline import Timeline
from megatron_ampipe.schedule import Direction, build
from megatron_ampipe.schedule.features import BlockFeatures
from tests.forked import completed
from tests.megatron.checkout.layout import lay_out
from tests.megatron.launcher import (
    MOCK_DATA,
    TINY_GPT,
    TINY_MOE,
    Run,
    assert_resumed,
    assert_same_digits,
    digits,
    environment,
    runs_of,
)
from tests.megatron.trainings import (
    BLOCKS,
    COMMON,
    CP,
    EP,
    FOUR_LAYERS,
    FULL,
    GQA,
    LLAMA,
    NO_LOSS,
    NUM_ITERATIONS,
    OVERLAPS,
    ROPE,
    ROUTERS,
    SAVED_ITERATION,
    STACK,
    TRAININGS,
    WHOLE_EXPERTS,
)

pytestmark = pytest.mark.timeout(1500)

MOMENT_TOLERANCE = 2e-5
"""Of Adam's first moments, relative to the largest of a parameter; measured: 5e-6."""
BF16_TOLERANCE = 5e-4
"""Of the losses of a bf16 run, relative; measured: 5e-5. One bf16 value has a rounding error up to 2e-3."""
LAST_CHECKPOINT = f"iter_{NUM_ITERATIONS:07d}"


def write_texts(folder: Path, dataset: str) -> None:
    """Write ``folder/dataset.bin`` and ``.idx`` from the sources of a Python package.

    In ``text`` each file is a document, in ``documents`` each line.
    """
    texts, cut = Path(email.__file__).parent, {"text": "0", "documents": "1"}[dataset]
    words = ["--suffixes", ".py", "--output", str(folder / dataset), "--document-bytes", cut]
    assert main(["data", str(texts), *words]) == 0


class Runs:
    """The runs of the trainings by name, as in ``Training.lines``; those of a training start together.

    Checkpoints, datasets, records and traces are in ``folder``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runs: dict[str, Run] = {}

    def __getitem__(self, run: str) -> Run:
        if run not in self._runs:
            name = run.partition(" ")[0]
            training = TRAININGS[name]
            if training.text is not None and not (self.folder / f"{training.text}.bin").exists():
                write_texts(self.folder, training.text)
            lines = training.lines(name, self.folder)
            self._runs |= runs_of(lines, num_ranks=training.num_ranks, stand_ins=training.stand_ins)
        return self._runs[run]

    def of(self, name: str) -> list[Run]:
        """The stock run of a training and those of AMPipe's layers."""
        return [self[f"{name} {number}"] for number in range(len(TRAININGS[name].ours) + 1)]


def first_moments(checkpoint: Path) -> dict[str, Any]:
    """Adam's, of all parameters, in the checkpoint of an iteration; read without Megatron."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    entries = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    # With the distributed optimizer, the name of a gradient buffer.
    found = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata) and re.search(r"\.exp_avg(\.|$)", name)
    }
    with warnings.catch_warnings():
        # It warns that it loads everything in one process, which is intended.
        warnings.simplefilter("ignore", category=UserWarning)
        dcp.load(found, checkpoint_id=checkpoint, no_dist=True)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("trainings"))


def _of(condition: Any) -> list[str]:
    return [name for name, training in TRAININGS.items() if condition(training)]


@pytest.mark.parametrize("name", TRAININGS)
def test_trains_like_megatrons_layers(name: str, runs: Runs) -> None:
    stock, *ours = runs.of(name)
    assert_same_digits(stock, *ours, iterations=NUM_ITERATIONS)
    assert "chunk boundaries" not in stock.output, "not the layers that this run should use"
    for run in ours:
        assert run.validation_loss == digits(stock.validation_loss)
        for text in TRAININGS[name].said:
            assert run.says(text)
    evaluations = NUM_ITERATIONS // 2 if "--eval-iters 1" in TRAININGS[name].flags else 0
    assert len(stock.validation_loss) == evaluations


@pytest.mark.parametrize("name", _of(lambda training: training.restarts))
def test_goes_on_from_a_checkpoint_of_another_run(name: str, runs: Runs) -> None:
    """Its optimizer state included."""
    stock, *_ = runs.of(name)
    for number, other in TRAININGS[name].restarts:
        assert_resumed(runs[f"{name} {number} from {other}"], stock, first=SAVED_ITERATION + 1)


@pytest.mark.parametrize("name", _of(lambda training: training.moments))
def test_all_gradients_of_a_training_are_the_same(name: str, runs: Runs) -> None:
    """Adam's first moments are a linear function of all gradients of the run."""
    training = TRAININGS[name]
    runs.of(name)
    expected = first_moments(runs.folder / f"{name} 0" / LAST_CHECKPOINT)
    assert len(expected) >= 3, "dense parameters, and the experts of two ranks"
    others = [f"{name} {number + 1}" for number in range(len(training.ours))]
    for run in (*others, *(f"{name} {number} from {other}" for number, other in training.restarts)):
        found = first_moments(runs.folder / run / LAST_CHECKPOINT)
        assert found.keys() == expected.keys()
        wrong = {
            name: difference
            for name, tensor in expected.items()
            if not (difference := ((tensor - found[name]).abs().max() / tensor.abs().max()).item())
            <= MOMENT_TOLERANCE
        }
        assert not wrong, f"the gradients of {run} differ from stock: {wrong}"


def test_a_trace_has_every_stage_of_the_last_iterations(runs: Runs) -> None:
    """Every training micro-batch exactly once, which also shows that no evaluation was recorded."""
    runs.of("text")
    schedule = build("ampipe", degree=4, features=BlockFeatures(losses=True, chunked_qkv=True))
    expected = {
        (iteration, layer, str(direction), str(stage)): 2
        for iteration in range(NUM_ITERATIONS - TRACED_ITERATIONS + 1, NUM_ITERATIONS + 1)
        for layer in (1, 2)
        for direction in Direction
        for stage in schedule.program(direction).stages
    }
    for rank in (0, 1):
        timeline = Timeline.read_chrome(runs.folder / "trace" / f"rank{rank}.trace.json")
        assert timeline.rank == rank
        assert (timeline.labels["degree"], timeline.labels["schedule"]) == ("4", "ampipe")
        found = Counter((span.iteration, span.layer, span.direction, span.stage) for span in timeline.spans)
        assert dict(found) == expected
        communication = {"counts", "dispatch", "combine"}
        assert all(
            (span.lane == "comm") is (span.stage.partition(".")[0] in communication)
            for span in timeline.spans
        )
        assert 0 < timeline.hidden_share <= 1


def test_every_rank_replays_its_graphs(runs: Runs) -> None:
    stock, ours = (
        [int(count) for count in re.findall(r"replays: (\d+)", run.output)] for run in runs.of("graphs")
    )
    assert stock == [0] * 4
    assert len(ours) == 4 and min(ours) > 0


def test_the_routers_are_different_functions(runs: Runs) -> None:
    """Otherwise the pairs would also agree if the flag did nothing."""
    assert set(SHIPPED_GATES) == set(ROUTERS)
    assert len({tuple(runs[f"{name} 0"].lm_loss) for name in ROUTERS}) == len(ROUTERS)
    assert runs["cosine 2"].output.count("condensed share: 0.") == NUM_ITERATIONS
    assert runs["cosine 2"].says("another function than a stock run's")


def train(lines: Mapping[str, str], *, num_ranks: int = 2, stand_ins: str = "") -> Mapping[str, Run]:
    """Runs on mock data, unless a line names a dataset; all on the same ranks."""
    words = {
        name: [*COMMON, *([] if "--data-path" in flags else MOCK_DATA), *shlex.split(flags)]
        for name, flags in lines.items()
    }
    return runs_of(words, num_ranks=num_ranks, stand_ins=stand_ins)


# From one checkpoint: experts by ids are the same in every layout.
DEEP = (
    FOUR_LAYERS
    + NO_LOSS
    + ROPE
    + ("--global-batch-size 8 --ampipe-router hash --eval-iters 1 --eval-interval 4 ")
)
MOE_AGAIN = "--recompute-granularity selective --recompute-modules moe "
LAYOUTS = {
    "rows over ranks": WHOLE_EXPERTS + EP + BLOCKS + FULL + "--micro-batch-size 2",
    "rows over ranks, stock": WHOLE_EXPERTS + EP + MOE_AGAIN,
    "context": CP + EP + BLOCKS,
    "overlapped gathers": EP + OVERLAPS,
}
"""Flags of runs that must log the digits of ranks that have whole sequences."""


def test_every_layout_reads_the_ids_of_its_rows(tmp_path: Path) -> None:
    # Of the weights alone: another layout has other parameter groups.
    load = f"{DEEP}--load {tmp_path} --ckpt-step {SAVED_ITERATION} --no-load-rng --no-load-optim "
    lines = {"saved": f"{DEEP}{EP} --save {tmp_path} --save-interval {SAVED_ITERATION}", "whole": load + EP}
    found = train(lines | {name: load + flags for name, flags in LAYOUTS.items()})
    whole = found["whole"]
    assert whole.iterations == [3, 4] and len(whole.validation_loss) == 1
    assert_same_digits(whole, *(found[name] for name in LAYOUTS))
    for name in LAYOUTS:
        assert found[name].validation_loss == digits(whole.validation_loss), name


def test_ranks_of_a_context_log_the_digits_of_one_rank(tmp_path: Path) -> None:
    """From the same checkpoint.

    On a CPU, stock layers under context parallelism attend with AMPipe's own order of the rows, so two runs
    with the same layout could share a mistake in it. One rank has no such order.
    """
    load = f"{ROPE}{GQA}--load {tmp_path} --ckpt-step 2 --no-load-rng "
    saving = f"{ROPE}{GQA}--save {tmp_path} --save-interval 2"
    stock = train({"saved": saving, "alone": load}, num_ranks=1)["alone"]
    assert stock.iterations == [3, 4]
    ring = f"{load}--context-parallel-size 4 --ampipe-degree 3 "
    lines = {
        "stock": f"{load}--context-parallel-size 4 ",
        "ring": ring,
        "gathered": f"{ring}--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
        # Two heads of keys, which Transformer Engine's a2a could not divide between four ranks.
        "a2a": f"{ring}--cp-comm-type a2a",
    }
    found = train(lines, num_ranks=4)
    assert_same_digits(stock, *found.values())
    assert found["ring"].says("context ring of 4 ranks")
    assert found["ring"].says("1, in place of all with context parallelism, a layer needs keys and values")
    said = "--cp-comm-type all_gather in pipelined blocks, in place of"
    assert found["gathered"].says(f"{said} a2a+p2p:") and found["a2a"].says(f"{said} a2a:")


def test_ranks_of_a_context_separate_documents_like_one_rank(runs: Runs, tmp_path: Path) -> None:
    """Ranks with slices of the sequence; Megatron's layers rotate its rows as if ranks shared documents."""
    if not (runs.folder / "documents.bin").exists():
        write_texts(runs.folder, "documents")
    common = f"{EP}{ROPE}{GQA}--seq-length 64 --dataloader-inter-document-masking --calculate-per-token-loss "
    common += f"--vocab-size 256 --split 100,0,0 --data-path {runs.folder / 'documents'} "
    common += f"--data-cache-path {runs.folder / 'cache'} "
    load = f"{common}--load {tmp_path} --ckpt-step {SAVED_ITERATION} --no-load-rng --no-load-optim "
    lines = {"saved": f"{common}--save {tmp_path} --save-interval {SAVED_ITERATION}"}
    found = train(lines | {"whole": load, "ours": load + CP + BLOCKS})
    assert found["whole"].iterations == [3, 4]
    assert_same_digits(found["whole"], found["ours"])
    assert found["ours"].says("documents packed")


def test_what_differs_by_rounding_or_at_random() -> None:
    """16 bits agree to their rounding; of random numbers and of 8 bits, the losses agree approximately."""
    precisions = {"bf16": LLAMA + EP + "--bf16 ", "random": EP + "--moe-router-force-load-balancing "}
    lines = precisions | {f"{name} ours": flags + BLOCKS for name, flags in precisions.items()}
    lines |= {"learnt": EP, "fp8": f"{EP}{BLOCKS}--ampipe-wire fp8"}
    scope = "--ampipe-router-scope chunk --moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0"
    lines |= {"sinkhorn of chunks": EP + BLOCKS + scope}
    found = train(lines)
    assert found["bf16 ours"].lm_loss == pytest.approx(found["bf16"].lm_loss, rel=BF16_TOLERANCE)
    stock, ours = found["random"], found["random ours"]
    balance = "load_balancing_loss"
    assert sum(ours.losses[balance]) == pytest.approx(sum(stock.losses[balance]), rel=0.05)
    assert sum(ours.lm_loss) == pytest.approx(sum(stock.lm_loss), rel=0.01)
    exact = found["learnt"]
    assert ours.losses[balance] != exact.losses[balance], "routed by its weights"
    fp8 = found["fp8"]
    assert fp8.lm_loss == pytest.approx(exact.lm_loss, rel=1e-2) and fp8.lm_loss != exact.lm_loss
    assert fp8.says("rows and their gradients are cast")
    chunks = found["sinkhorn of chunks"]
    assert chunks.lm_loss[-1] < chunks.lm_loss[0]
    assert chunks.says("another function for each degree: later tokens of a chunk")


def test_gradients_reach_optimizers_that_need_a_gpu() -> None:
    """They read ``decoupled_grad``. Megatron offloads the parameters of 16-bit models only."""
    common = EP + "--use-distributed-optimizer --use-precision-aware-optimizer "
    kinds = {"aware": "--exp-avg-dtype bf16 ", "offloaded": "--optimizer-cpu-offload --bf16 "}
    lines = {name: common + flags for name, flags in kinds.items()}
    lines |= {f"{name} ours": flags + BLOCKS for name, flags in lines.items()}
    found = train(lines, stand_ins="optimizers")
    assert_same_digits(found["aware"], found["aware ours"], iterations=NUM_ITERATIONS)
    expected = found["offloaded"]
    assert found["offloaded ours"].lm_loss == pytest.approx(expected.lm_loss, rel=BF16_TOLERANCE)
    assert expected.lm_loss[-1] < expected.lm_loss[0]
    for name, run in found.items():
        # Those of experts, and all others; torch's optimizer updates what is offloaded.
        steps = 2 * NUM_ITERATIONS if name.startswith("aware") else 0
        assert run.output.count(f"steps of the stand-in: {steps}") == 2, name


def test_a_dense_checkpoint_is_upcycled_as_by_megatrons_layers(tmp_path: Path) -> None:
    """Megatron's own upcycling is repaired by stand-ins; ``test_moe_flags.py`` says why."""
    without_experts = [*TINY_GPT, *COMMON[len(TINY_GPT) + len(TINY_MOE) :], "--disable-bias-linear"]
    saved = ["--save", str(tmp_path / "dense"), "--save-interval", "4"]
    lines = {"dense": [*without_experts, *MOCK_DATA, *saved]}
    upcycled = f"{EP} --moe-use-upcycling --load {tmp_path / 'dense'} --save-interval 100 --save {tmp_path}/"
    for name, flags in {"stock": "stock", "ours": f"ours {BLOCKS}"}.items():
        lines[name] = [*COMMON, *MOCK_DATA, *shlex.split(upcycled + flags)]
    found = runs_of(lines, stand_ins="upcycling")
    assert_same_digits(found["stock"], found["ours"], iterations=NUM_ITERATIONS)
    assert found["stock"].lm_loss[0] < found["dense"].lm_loss[0] - 0.01, "it has learnt before"
    assert (tmp_path / "ours" / "iter_0000001").is_dir(), "the upcycled checkpoint"


def test_evaluation_alone_equals_stock(runs: Runs) -> None:
    """``--skip-train``: no iteration, and no count of them in Megatron's arguments."""
    runs.of("text")
    flags = (
        f"{TRAININGS['text'].flags} --skip-train --load '{runs.folder / 'text 0'}' "
        f"--ckpt-step {SAVED_ITERATION} --data-path {runs.folder / 'text'} "
        f"--data-cache-path {runs.folder / 'cache'} "
    )
    found = train({"stock": flags, "ours": flags + BLOCKS})
    losses = [re.findall(r"on validation set \| lm loss value: (\S+)", run.output) for run in found.values()]
    assert all(run.iterations == [] and len(of) == 1 for run, of in zip(found.values(), losses, strict=True))
    expected, ours = ([float(loss) for loss in of] for of in losses)
    assert ours == digits(expected)


def test_the_hybrid_script_of_a_checkout_trains_like_stock(tmp_path: Path, runs: Runs) -> None:
    """``pretrain_hybrid.py`` with the launcher; every pair of both ranks is in the trace."""
    script = lay_out(tmp_path / "checkout", "0.19").with_name("pretrain_hybrid.py")
    flags = (
        f"{TRAININGS['hybrid-mamba'].flags} {STACK} --ampipe-trace-dir {tmp_path / 'trace'} "
        "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"
    )
    words = [str(script), *COMMON, *MOCK_DATA, *shlex.split(flags)]
    assert_same_digits(runs["hybrid-mamba 0"], runs_of({"script": words})["script"])
    for rank in (0, 1):
        events = json.loads((tmp_path / "trace" / f"rank{rank}.trace.json").read_text())["traceEvents"]
        layers = {event["args"]["layer"] for event in events if "layer" in event.get("args", {})}
        # Of the pattern M*EM*-*EM: the dense pair shares the schedule of the pair after it.
        assert layers == {2, 5, 7}


def test_the_checker_of_routers_finds_what_is_wrong() -> None:
    good = [*SHIPPED_GATES, "tests.gates:ForwardRouter", "tests.gates:BiasedByIdRouter"]
    bad = ["tests.gates:LookingAheadRouter", "tests.gates:OwnLossRouter"]
    gates = [*good, "tests.gates:ThresholdRouter", *bad]
    done = completed(sys.executable, "-m", "megatron_ampipe.cli", "gate", *gates, env=environment(), code=4)
    wrong = ("tests.gates:LookingAheadRouter, tests.gates:OwnLossRouter: a check failed", "see above")
    assert all(text in done.stderr for text in wrong)
    assert "if the choice compares tokens, set needs_all_tokens to the reason" in done.stdout
    assert "its routing computes a separate loss" in done.stdout
    assert "not compared in chunks, because each expert chooses among all tokens" in done.stdout
