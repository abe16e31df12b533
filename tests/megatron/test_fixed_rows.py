"""Trainings with ``--ampipe-rows fixed`` log the digits of exact rows, also if steps exceed a budget."""

import re
import shlex
from pathlib import Path

import pytest

from megatron_ampipe.plan.plan_file import Plan
from megatron_ampipe.plan.recorded_routing import read_routing
from megatron_ampipe.schedule import Pipeline, period
from tests.golden.write import BLOCKS, schedule_of
from tests.megatron.launcher import MOCK_DATA, Run, assert_same_digits, runs_of
from tests.megatron.stand_ins import SMALL_BUDGETS
from tests.megatron.trainings import COMMON, EP, FOUR_LAYERS, LLAMA, OVERLAPS, PP, SHARED

pytestmark = pytest.mark.timeout(1500)

NUM_ITERATIONS = 10
STATE = (
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-2 "
    "--moe-router-load-balancing-type global_aux_loss --moe-z-loss-coeff 1e-2 --moe-input-jitter-eps 0.01 "
    "--hidden-dropout 0.1 --eval-iters 1 --eval-interval 4 --global-batch-size 8 "
)
"""What a repeated step must restore: buffers, random numbers, logged losses, sums of gradients."""
FIXED = "--ampipe-rows fixed --ampipe-rows-margin"
LINES = {
    "exact": "",
    "fixed": f"{FIXED} 3",
    "small": f"{FIXED} {SMALL_BUDGETS}",
}
PLACED = "--ampipe-grad-reduce placed --ddp-bucket-size 1000 "
WITHOUT_DRAWS = STATE.replace("--moe-input-jitter-eps 0.01 --hidden-dropout 0.1 ", "")
CAPTURED = EP + LLAMA + SHARED + FOUR_LAYERS + OVERLAPS + WITHOUT_DRAWS
KINDS = {
    # Two groups of expert-parallel ranks, of which one exceeds budgets. Parameters are gathered and gradients
    # reduced during the passes, of the repeat too. The more padding, the less of experts is kept.
    "stack": EP + LLAMA + SHARED + STATE + OVERLAPS + "--ampipe-degree 4 --ampipe-memory auto "
    "--ampipe-memory-budget 2.5MiB ",
    # A repeated step is recorded once.
    "lancet": EP + FOUR_LAYERS + STATE + "--ampipe-degree 2 --ampipe-schedule lancet --ampipe-stack 1 "
    "--ampipe-routing-dir {folder}/routing --ampipe-routing-interval 1 ",
    "mtp": EP + LLAMA + STATE + "--mtp-num-layers 1 --ampipe-degree 2 ",
    # Experts of Transformer Engine, by stand-ins.
    "engine": EP + LLAMA + STATE + "--spec tests.megatron.custom_spec engine_layer_of --ampipe-degree 2 "
    "--ampipe-schedule lancet ",
    # Only the first pipeline stage exceeds budgets.
    "pipeline": EP + PP + STATE + OVERLAPS + "--ampipe-degree 2 --ampipe-memory redispatch/S3 ",
    "interleaved": PP + STATE + OVERLAPS + PLACED + "--num-layers 8 --ampipe-degree 2 --ampipe-partner "
    "--num-layers-per-virtual-pipeline-stage 2 --ampipe-stack all ",
    # Whole passes as CUDA graphs, which draw no random numbers. Hooks run around their launches.
    "graphs": CAPTURED + "--ampipe-degree 2 --ampipe-stack 2 ",
    # Two micro-batches in one graph. A step of four is two chains: no digit may depend on who has a partner.
    "partners": CAPTURED + "--ampipe-degree 2 --ampipe-stack 2 --ampipe-schedule lancet --ampipe-partner "
    "--ampipe-partner-degree 2 ",
    "virtual": PP + WITHOUT_DRAWS + OVERLAPS + "--num-layers 8 --ampipe-degree 2 --ampipe-partner "
    "--num-layers-per-virtual-pipeline-stage 2 --ampipe-stack all ",
}
KINDS |= {
    # Stages as CUDA graphs in place of whole passes: attention draws, and what budgets decide is captured.
    "stages": EP + LLAMA + SHARED + WITHOUT_DRAWS + "--attention-dropout 0.1 --ampipe-degree 2 ",
}
FLEX = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep "
KINDS |= {
    # A rank that drops rows tells the others. Reductions start between graphs, of the repeats in stages.
    "hybridep-graphs": KINDS["graphs"] + FLEX + PLACED,
}
WITH_GRAPHS = ("graphs", "hybridep-graphs", "partners", "virtual", "stages")
GRAPHS = "--cuda-graph-impl local --cuda-graph-warmup-steps 1"
TRIED = 36
"""Iterations that are enough to choose a degree: each is tried three times before it is timed three times."""
AUTO = {
    "stock": "",
    "small": f"--ampipe-degree auto {FIXED} {SMALL_BUDGETS} --ampipe-save-plan {{folder}}/chosen.yaml",
}
"""The same training with stock layers, and with degrees that are tried."""


LAUNCHES = {
    "stack": (4, "overflows"),
    "lancet": (2, "overflows"),
    "mtp": (2, "overflows"),
    "engine": (2, "overflows"),
    "pipeline": (4, "overflows"),
    "interleaved": (2, "overflows"),
    "graphs": (2, "whole_graphs"),
    "hybridep-graphs": (2, "whole_graphs"),
    "partners": (2, "whole_graphs"),
    "virtual": (2, "whole_graphs"),
    "stages": (2, "whole_graphs"),
}
"""Ranks and stand-ins of each kind."""
WITHOUT_REPEATS = ("stack", "graphs", "partners")
"""Of these, a run that never exceeds a budget is compared, too."""


def lines_of(kind: str) -> list[str]:
    return [line for line in LINES if line != "fixed" or kind in WITHOUT_REPEATS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fixed")


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Run]:
    found: dict[str, Run] = {}
    for num_ranks, stand_ins in set(LAUNCHES.values()):
        words = {
            f"{kind} {line}": [
                *COMMON,
                *MOCK_DATA,
                *shlex.split(flags.format(folder=folder / line) + LINES[line]),
                *("--train-iters", str(NUM_ITERATIONS)),
                *(shlex.split(GRAPHS) if kind in WITH_GRAPHS and line != "exact" else []),
            ]
            for kind, flags in KINDS.items()
            for line in lines_of(kind)
            if LAUNCHES[kind] == (num_ranks, stand_ins)
        }
        if (num_ranks, stand_ins) == (2, "overflows"):
            words |= {
                f"auto {line}": [
                    *COMMON,
                    *MOCK_DATA,
                    *shlex.split(EP + LLAMA + AUTO[line].format(folder=folder)),
                    # Few rows, so that few degrees are tried.
                    *("--seq-length", "16", "--train-iters", str(TRIED)),
                ]
                for line in AUTO
            }
        if stand_ins == "whole_graphs":
            words["graphs plan"] = with_plan(words["graphs fixed"], folder / "plan.yaml")
        found |= runs_of(words, num_ranks=num_ranks, stand_ins=stand_ins)
    return found


def with_plan(words: list[str], path: Path) -> list[str]:
    """The same run by a plan of a file."""
    # Router losses and shared experts.
    _, layers, _ = schedule_of(BLOCKS["shared"], {"schedule": "ampipe", "degree": 2, "layers": 2})
    order = period(Pipeline.of(2).schedule_of(layers[:1]))
    pipeline = Pipeline.of(2, stack=2, shares=(0.5, 0.5), order=order)
    plan = Plan(pipeline=pipeline, reason="of a test")
    plan.write(path, head="a test")
    given = shlex.split("--ampipe-degree 2 --ampipe-stack 2")
    start = words.index(given[0])
    assert words[start : start + len(given)] == given
    return [*words[:start], *words[start + len(given) :], "--ampipe-plan", str(path)]


def steps_of(run: Run) -> tuple[int, int]:
    """Steps with budgets, and repeated ones, as a run says in the end."""
    (found,) = re.findall(r"fixed rows: (\d+) steps with budgets, (\d+) of them repeated", run.output)
    return int(found[0]), int(found[1])


@pytest.mark.parametrize("kind", KINDS)
def test_logs_the_digits_of_exact_rows(kind: str, runs: dict[str, Run]) -> None:
    exact, *others = (runs[f"{kind} {line}"] for line in lines_of(kind))
    assert_same_digits(exact, *others, iterations=NUM_ITERATIONS)
    for run in others:
        # Every digit: rows are added in the same order.
        assert run.logged == exact.logged
        assert run.validation_loss == exact.validation_loss
    assert "fixed rows" not in exact.output


def test_a_budget_of_memory_knows_the_padding(runs: dict[str, Run]) -> None:
    exact, fixed, small = (runs[f"stack {line}"] for line in LINES)
    assert exact.says("memory keep the least work done again within 2.5MiB")
    reason = "the least work done again within 2.5MiB"
    assert fixed.says(reason) and not fixed.says(f"memory keep {reason}")
    assert small.says("memory rebuild the least work done again within 2.5MiB")


@pytest.mark.parametrize("kind", KINDS)
def test_counts_the_steps_that_are_repeated(kind: str, runs: dict[str, Run]) -> None:
    if kind in WITHOUT_REPEATS:
        assert steps_of(runs[f"{kind} fixed"]) == (NUM_ITERATIONS - 2, 0)
    small = runs[f"{kind} small"]
    num_steps, num_repeated = steps_of(small)
    assert num_steps == NUM_ITERATIONS - 2 and 1 <= num_repeated < num_steps
    assert len(re.findall(r"more rows than a budget", small.output)) == num_repeated


def test_a_repeated_step_is_recorded_once(runs: dict[str, Run], folder: Path) -> None:
    exact, small = (
        read_routing(folder / line / "routing", flag="DIR").records for line in ("exact", "small")
    )
    assert [record.iteration for record in small] == [*range(1, NUM_ITERATIONS + 1)]
    assert small == exact


def test_degrees_are_tried_with_budgets_that_each_has_learned(runs: dict[str, Run], folder: Path) -> None:
    stock, small = (runs[f"auto {line}"] for line in AUTO)
    assert small.losses == {name: pytest.approx(values, rel=2e-4) for name, values in stock.losses.items()}
    assert re.search(r"AMPipe: input of 16 rows x 1: degree .* an iteration spent", small.output)
    assert "trying degrees 1, 2, one per iteration, for up to 31 iterations" in small.output
    num_steps, num_repeated = steps_of(small)
    assert num_steps == TRIED - 2 and num_repeated > 0
    saved = Plan.read(folder / "chosen.yaml").made_for
    assert saved is not None and saved["rows_margin"] == SMALL_BUDGETS


def test_a_plan_is_run_with_whole_passes(runs: dict[str, Run]) -> None:
    planned, fixed = runs["graphs plan"], runs["graphs fixed"]
    assert planned.says("CUDA graphs whole passes") and planned.says("read from")
    assert planned.logged == fixed.logged and steps_of(planned) == steps_of(fixed)
    assert re.findall(r"replays: (\d+)", planned.output) == re.findall(r"replays: (\d+)", fixed.output)


@pytest.mark.parametrize("kind", ["graphs", "hybridep-graphs"])
def test_whole_passes_are_replayed_on_every_rank(kind: str, runs: dict[str, Run]) -> None:
    """Two stacks of two layers, four micro-batches of a rank in each step with budgets.

    Reductions start at the end of the second layer, and in its half or that of the first one if placed.
    """
    replays = {line: replays_of(runs[f"{kind} {line}"]) for line in lines_of(kind)}
    assert replays["exact"] == [0, 0] and runs[f"{kind} small"].says("CUDA graphs whole passes")
    of_pass = 2 * (1 + (3 if "--ampipe-grad-reduce placed" in KINDS[kind] else 2))
    # The first pass of each stack warms up.
    all_steps = ((NUM_ITERATIONS - 2) * 4 - 1) * of_pass
    assert replays.get("fixed") in (None, [all_steps] * 2)
    # Budgets that a repeat has changed are captured again; a repeat itself runs without graphs.
    first, second = replays["small"]
    assert 0 < first == second <= all_steps


def test_stages_are_replayed_where_attention_draws(runs: dict[str, Run]) -> None:
    small = runs["stages small"]
    line = (
        "AMPipe: CUDA graphs of the stages route shared merge, not of whole passes: --attention-dropout draws"
    )
    assert line in small.output and line not in runs["stages exact"].output
    first, second = replays_of(small)
    assert first == second > 0


def replays_of(run: Run) -> list[int]:
    """The graphs that each rank has replayed."""
    return sorted(int(count) for count in re.findall(r"replays: (\d+)", run.output))


def test_passes_with_partners_are_replayed_in_every_step(runs: dict[str, Run]) -> None:
    # Two chains of two micro-batches and two stacks; the first chain is recorded.
    per_chain = 2 * 3
    expected = (NUM_ITERATIONS - 2) * 2 * per_chain - per_chain
    for line in ("fixed", "small"):
        assert replays_of(runs[f"partners {line}"]) == [expected] * 2, line
    # Of 16 forward passes of a pipeline rank, three or five have no partner. One step is recorded.
    per_step = [32 - (16 - 5), 32 - (16 - 3)]
    expected_of_ranks = sorted((NUM_ITERATIONS - 3) * count for count in per_step)
    assert replays_of(runs["virtual small"]) == expected_of_ranks
