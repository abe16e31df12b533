"""``ampipe bench --end-to-end`` without its processes: figures, loss curves, flags, refusals."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_ampipe.cli import main
from megatron_ampipe.errors import DifferenceFound
from megatron_ampipe.schedule import Exchange
from megatron_ampipe.tools.benchmark import training
from megatron_ampipe.tools.benchmark.bench_job import BenchJob
from megatron_ampipe.tools.benchmark.training import Curve
from megatron_ampipe.tools.benchmark.training_job import TrainingJob, training_flags, variant_flags
from megatron_ampipe.tools.benchmark.training_worker import ITERATION
from megatron_ampipe.tools.measuring.grid import Case
from megatron_ampipe.tools.measuring.variant import Cut, Variant

CASE = Case(
    name="one",
    sequence_length=64,
    batch=1,
    hidden=32,
    heads=4,
    experts=4,
    topk=1,
    ffn=64,
    activation="gelu",
    dtype="fp32",
)


JOB = BenchJob(
    cases=(CASE,),
    schedules=("ampipe",),
    cuts=(Cut.of(4),),
    link="none",
    num_ranks=2,
    pretended=False,
    device="cpu",
    repeats=2,
    warmup=1,
    seed=1,
    timeout_s=9.0,
    rendezvous="",
    cores=(),
    layers=3,
    stacks=(3,),
)


def curve(*ms: float, loss: float = 2.0) -> Curve:
    return Curve(ms, tuple(loss / (i + 1) for i in range(len(ms))))


def test_figures_of_trainings() -> None:
    # The first iteration of each training run does not count.
    curves = [
        [curve(900, 40, 40), curve(900, 80, 80)],
        [curve(900, 40, 50), curve(900, 80, 80)],
        [curve(900, 20, 20), curve(900, 20, 40)],
    ]
    case = training.case_result(CASE, JOB, JOB.variants_of(0), curves)
    assert (case["name"], case["layers"]) == ("one", 3)
    assert " ".join(case["flags"]).count("--num-layers 3") == 1
    assert (case["stock"]["ms"], case["stock"]["iterations_per_s"]) == (60.0, 16.6667)
    # Ratios 1, 0.8, 1 and 1: the 10th percentile is 0.86.
    assert (case["control"]["speedup"], case["control"]["spread"]) == (1.0, 0.1628)
    assert case["gloo_all_to_all"] is None
    (row,) = case["rows"]
    assert row["difference_seen"]
    assert (row["schedule"], row["degree"], row["ms"], row["iterations_per_s"]) == ("ampipe", 4, 20.0, 50.0)
    assert (row["layers"], row["stack"]) == (3, 3)
    # Ratios of the same iteration in the same round: 2, 2, 4, 2. The quotient of medians would be 3.
    assert row["speedup"] == 2.0
    assert row["loss_difference"] == 0.0
    assert row["trainings"][1] == {"ms": (900, 20, 40), "lm_loss": (2.0, 1.0, 2.0 / 3)}


def test_a_training_with_gloos_all_to_all_is_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = []

    def run(job: TrainingJob, **_: object) -> Curve:
        jobs.append(job)
        return curve(1, 1, 1)

    monkeypatch.setattr(training, "run", run)
    job = dataclasses.replace(JOB, gloo_all_to_all=True)
    (case,) = training.measure(job, rounds=1, on_iteration=lambda _: None)
    # Stock, its control, stock with gloo's and AMPipe.
    assert [job.gloo_all_to_all for job in jobs] == [False, False, True, False]
    assert [job.stock_attends_as for job in jobs] == ["fp32"] * 3 + [None]
    assert len({job.flags for job in jobs}) == 2
    assert (case["gloo_all_to_all"]["schedule"], case["gloo_all_to_all"]["difference_seen"]) == (
        "stock-gloo",
        False,
    )


@pytest.mark.parametrize(
    ("loss", "same"), [(2.0 * (1 + 9e-6), True), (2.0 * (1 + 2e-5), False), (float("nan"), False)]
)
def test_loss_curves_are_held_against_stock(loss: float, same: bool) -> None:
    variants = [Variant("stock", Cut.of(1)), Variant("ampipe", Cut.of(4))]
    curves = [[curve(1, 1)], [curve(1, 1, loss=loss)]]
    if same:
        training._check_same(CASE, variants, curves)
        return
    with pytest.raises(DifferenceFound, match="the loss of ampipe degree 4 differs"):
        training._check_same(CASE, variants, curves)


def test_a_line_of_megatrons_log_is_read() -> None:
    line = (
        " [2026-11-20 11:50:34.968488] iteration        7/       8 | consumed samples:            4 | "
        "elapsed time per iteration (ms): 1570.9 | learning rate: 1.0E-03 | global batch size:     4 | "
        "lm loss: 5.624668E+00 | loss scale: 1.0 | grad norm: 10.285 |"
    )
    found = ITERATION.search(line)
    assert found is not None
    assert found.groupdict() == {"number": "7", "ms": "1570.9", "lm_loss": "5.624668E+00"}
    assert ITERATION.search("iteration        7/       8 | nothing") is None


def test_flags_of_a_training() -> None:
    rich = dataclasses.replace(
        CASE, topk=2, query_groups=2, shared_ffn=48, activation="swiglu", capacity=1.25, dtype="bf16"
    )
    flags = training_flags(rich, layers=3, num_ranks=2, iterations=5, seed=9)
    text = " ".join(flags)
    for expected in (
        "--num-layers 3",
        "--expert-model-parallel-size 2",
        "--global-batch-size 4",
        "--train-iters 5",
        "--num-query-groups 2",
        "--moe-shared-expert-intermediate-size 48",
        "--moe-expert-capacity-factor 1.25 --moe-token-drop-policy position",
        "--bf16",
        "--swiglu",
    ):
        assert expected in text
    assert "--moe-router-pre-softmax" not in flags
    assert "--moe-router-pre-softmax" in training_flags(CASE, layers=1, num_ranks=2, iterations=5, seed=9)
    assert (
        variant_flags(Variant("stock", Cut.of(1)))
        == variant_flags(Variant("ampipe", Cut.of(1)))
        == ("--ampipe-degree", "1")
    )
    assert variant_flags(Variant("moe-only", Cut.of(2))) == (
        *("--ampipe-degree", "2", "--ampipe-schedule", "moe-only", "--ampipe-stack", "1"),
        *("--ampipe-memory", "keep"),
    )
    restoring = variant_flags(Variant("ampipe", Cut.of(4), stack=3, memory="rebuild"))
    assert restoring[-4:] == ("--ampipe-stack", "3", "--ampipe-memory", "rebuild")
    once = ("--ampipe-exchange", "ranks")
    assert variant_flags(Variant("ampipe", Cut.of(1), exchange=Exchange.RANKS)) == (
        "--ampipe-degree",
        "1",
        *once,
    )
    assert variant_flags(Variant("ampipe", Cut.of(4), exchange=Exchange.RANKS))[-2:] == once


def test_orders_of_a_training_survive_the_pipe() -> None:
    job = TrainingJob(
        flags=("--bf16",), stock_attends_as="bf16", link="none", num_ranks=2, timeout_s=3.0, cores=(0, 1)
    )
    assert TrainingJob.from_json(job.to_json()) == job


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rounds", "3"], "--rounds 3: belongs to --end-to-end"),
        (["--end-to-end", "--link", "emulated:1gbit"], "--link emulated:1gbit: a training needs real ranks"),
        (
            ["--end-to-end", "--grid", "deepseek", "--cases", "deepseek-8k-grouped"],
            "expert_kind torch-grouped of case deepseek-8k-grouped needs a GPU in a training",
        ),
        (["--end-to-end", "--pretend-peers"], "--pretend-peers: a training needs real ranks"),
        (["--end-to-end", "--plot", "x"], "--plot x: works with results of blocks"),
        (["--end-to-end", "--from", "x"], "--from x: works with results of blocks"),
        (["--end-to-end", "--planned", "x"], "--planned x: works with results of blocks"),
        (["--planned", "x", "--from", "y"], "--planned x: is for what will be measured"),
    ],
)
def test_what_end_to_end_refuses(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    assert said in capsys.readouterr().err
