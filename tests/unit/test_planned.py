"""What ``--ampipe-memory auto`` chooses, and that it says so; what a planner is told of the layers."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from megatron_ampipe import compat
from megatron_ampipe.block.settings import AUTO, Settings, parse_size, size_to_text
from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch import planned
from megatron_ampipe.launch.environment import block_of_args, layers_split_weights, passes_in_flight
from megatron_ampipe.plan.cluster import find_cluster, read_cluster, write_cluster
from megatron_ampipe.plan.plan_file import Plan
from megatron_ampipe.schedule import (
    COPYING,
    STRATEGIES,
    BlockFeatures,
    Partner,
    Pipeline,
    chunk_strategies,
)
from tests import schedules
from tests.plan_cases import cluster, with_copies
from tests.unit.test_plan_made_for import resolved, run_of

PIPELINE = Pipeline.of(4)
INTERLEAVED = "tests.schedules:interleaved"


def run(**changes: Any) -> Any:
    usual = {"num_layers": 8, "global_batch_size": 8, "data_parallel_size": 8, "transformer_impl": "local"}
    stages = {"pipeline_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": None}
    return run_of(**(usual | stages | changes))


def choose_memory(pipeline: Pipeline, budget: str, file: str | None = None, *, degree: int | str = 4) -> Plan:
    """What is chosen for a run with a budget, and with the figures of a cluster."""
    args, settings = run(), Settings(degree=degree, memory_budget=budget, cluster=file, ranks_per_node=8)
    _, layers = block_of_args(args, settings)
    found = None if file is None else read_cluster(find_cluster(file, flag="--ampipe-cluster"))
    passes = passes_in_flight(args, settings)
    return planned.choose_memory(resolved(args, pipeline, settings=settings), layers, found, passes=passes)


@pytest.mark.parametrize("partner", [None, Partner(2, INTERLEAVED)], ids=["alone", "partner"])
def test_a_custom_order_is_checked_for_every_pass_of_a_run(partner: Partner | None) -> None:
    pipeline = Pipeline.of(4, backward_degree=2, schedule=INTERLEAVED, partner=partner)
    settings = Settings(degree=4, schedule=INTERLEAVED, ranks_per_node=8)

    def orders(**changes: Any) -> tuple[str, ...]:
        return planned.custom_orders(resolved(run(**changes), pipeline, settings=settings))

    found = orders()
    assert len(found) == (4 if partner else 2), "with a gradient and in an evaluation"
    assert all(text.startswith(f"schedule {INTERLEAVED} degree ") for text in found)
    assert {text.split()[3] for text in found} == ({"4", "2"} if partner else {"4"})
    with_other_attention = orders(experimental_attention_variant="gated_delta_net")
    assert "add-norm.0" in with_other_attention[2] and "attention.0" not in with_other_attention[2]
    assert planned.custom_orders(resolved(run(), PIPELINE)) == ()


def test_a_custom_order_is_checked_for_every_degree_that_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_most_two(degree: int, features: BlockFeatures) -> str:
        assert degree <= 2, f"{degree} chunks"
        return schedules.interleaved(degree, features)

    monkeypatch.setattr(schedules, "at_most_two", at_most_two, raising=False)
    name = "tests.schedules:at_most_two"
    tried = Settings(degree=AUTO, schedule=name, ranks_per_node=8)
    with pytest.raises(
        BadInput, match=r"at_most_two: for degree 4: fails: AssertionError: 4 chunks .*\. Change"
    ):
        planned.custom_orders(resolved(run(), Pipeline.of(1, schedule=name), settings=tried))


def peaks() -> dict[str, str]:
    """By strategy, what it is predicted to hold, from the message of a budget that none meets."""
    found = choose_memory(PIPELINE, "999GiB").reason
    sizes = dict(re.findall(r"(\w+) ([0-9.]+[MG]iB)", found.partition("(")[2]))
    return {"keep": found.partition("activations ")[2].partition(" ")[0], **sizes}


def test_a_budget_that_one_strategy_meets_selects_that_one() -> None:
    sizes = peaks()
    assert list(sizes) == [name for name in STRATEGIES if name not in COPYING]
    assert sorted(map(parse_size, sizes.values()), reverse=True) == list(map(parse_size, sizes.values()))
    for strategy, size in sizes.items():
        found = choose_memory(PIPELINE, size)
        assert found.pipeline.memory == strategy
        assert found.reason.startswith(
            f"the least work done again within {size}: predicted peak of the layers' activations"
        )


def test_a_budget_between_two_strategies_restores_in_some_chunks() -> None:
    keep, rebuild, redispatch = (parse_size(size) for size in peaks().values())
    found = choose_memory(PIPELINE, size_to_text((keep + rebuild) / 2))
    assert sorted(chunk_strategies(found.pipeline.memory)) == ["keep", "keep", "rebuild", "rebuild"]
    found = choose_memory(PIPELINE, size_to_text((rebuild + redispatch) / 2))
    assert set(chunk_strategies(found.pipeline.memory)) == {"rebuild", "redispatch"}
    # The number of chunks is not known yet.
    found = choose_memory(Pipeline.of(1), size_to_text((keep + rebuild) / 2), degree=AUTO)
    assert found.pipeline.memory == "rebuild"


def test_with_a_cluster_the_fastest_by_simulation_is_chosen() -> None:
    """On a slow network a rebuild is hidden under transfers, and a third transfer is what costs time."""
    keep, rebuild, redispatch = (parse_size(size) for size in peaks().values())
    budget = size_to_text((keep + rebuild) / 2)
    slow = choose_memory(PIPELINE, budget, "a800x8-20gbps")
    assert set(chunk_strategies(slow.pipeline.memory)) == {"keep", "rebuild"}
    assert slow.reason.startswith(f"the fastest by a800x8-20gbps within {budget}: predicted peak")
    tight = choose_memory(PIPELINE, size_to_text(redispatch), "a800x8-20gbps")
    assert tight.pipeline.memory == "redispatch"


def test_a_budget_that_only_a_copying_strategy_meets_selects_that_one(tmp_path: Path) -> None:
    """However slow copies are; some chunks may send their tokens again. Without their figure, the least of
    the others is named."""
    pipeline, file = Pipeline.of(8), str(tmp_path / "slow.yaml")
    slow = with_copies(cluster(), alpha_us=10.0, us_per_mb=1e5)
    write_cluster(slow, Path(file), head="a test")
    with pytest.raises(BadInput, match="is too small: the leanest strategy, S3,") as error:
        choose_memory(pipeline, "1MiB", file)
    least = str(error.value).partition("--ampipe-memory-budget ")[2].partition("Use at least")[2].split()[1]
    found = choose_memory(pipeline, least.rstrip(","), file)
    assert {"S3"} <= set(chunk_strategies(found.pipeline.memory)) <= {"S3", "redispatch"}
    assert "predicted peak of the layers' activations " + least.rstrip(",") in found.reason
    with pytest.raises(BadInput, match="is too small: the leanest strategy, redispatch,"):
        choose_memory(pipeline, least.rstrip(","), "a800x8-20gbps")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 1),
        ({"pipeline_model_parallel_size": 4, "global_batch_size": 64}, 4),
        # Fewer micro-batches than stages.
        ({"pipeline_model_parallel_size": 4, "global_batch_size": 16}, 2),
        # Warm-up of interleaved stages: 2 * 3 + 1 * 4, and the one in work.
        (
            {
                "pipeline_model_parallel_size": 4,
                "virtual_pipeline_model_parallel_size": 2,
                "global_batch_size": 64,
            },
            11,
        ),
    ],
)
def test_micro_batches_that_wait_for_their_backward_count(changes: dict[str, Any], expected: int) -> None:
    assert passes_in_flight(run(**changes), Settings()) == expected


AFTER_RESOLVE = ("attach", "auto", "hooks", "partners", "planned", "recording", "startup", "trials")
"""Modules of ``launch`` that get a resolved run, or parts of it."""


@pytest.mark.parametrize("module", AFTER_RESOLVE)
def test_after_resolve_nothing_reads_megatrons_arguments(module: str) -> None:
    source = (Path(planned.__file__).parent / f"{module}.py").read_text()
    names = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    assert not names & {"argparse", "Namespace", "Arguments", "get_args"}


@pytest.mark.parametrize(
    ("version", "changes", "expected"),
    [
        (None, {}, True),
        ("2.3.0", {}, True),
        ("2.2.1", {}, False),
        ("2.9.0", {"use_transformer_engine_op_fuser": True}, False),
        ("2.9.0", {"use_grouped_gemm_for_shared_expert": True}, False),
        ("2.2.1", {"transformer_impl": "local"}, True),
    ],
)
def test_weights_are_split_if_the_layers_can(
    version: str | None, changes: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = None if version is None else Version(version)
    monkeypatch.setattr(compat, "found_version", lambda name: found)
    args = run(**{"transformer_impl": "transformer_engine", **changes})
    assert layers_split_weights(args) == expected == block_of_args(args, Settings())[0].splits_weights
