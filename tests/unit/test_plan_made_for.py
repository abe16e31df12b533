"""What a plan was made for, and its differences from a run."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch.planned import choice_of_plan, planner_of
from megatron_ampipe.launch.trials import Choice
from megatron_ampipe.plan.plan_file import MadeFor, Plan, differences
from megatron_ampipe.plan.planner import make_plan
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.schedule import ALL_LAYERS
from tests.plan_cases import cluster, workload


def made_for(**changes: Any) -> MadeFor:
    figures = cluster()
    return MadeFor.of(workload(**changes), cluster=figures.description, ranks_per_node=figures.ranks_per_node)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    make_plan(Predictor(workload(), cluster()), degrees=(2,), full=False).write(path, head="a test")
    return path


def test_a_plan_file_contains_what_it_was_made_for(file: Path) -> None:
    found = Plan.read(file).made_for
    assert found == made_for()
    assert found is not None and found.cluster == cluster().description
    assert "  seq_length: 8192\n" in file.read_text() and "  swiglu: false\n" in file.read_text()


@pytest.mark.parametrize(
    ("changes", "flag", "essential"),
    [
        ({"sequence_length": 128}, "--seq-length", True),
        ({"hidden": 64}, "--hidden-size", True),
        ({"heads": 8}, "--num-attention-heads", True),
        ({"projections": ((1024, 1536),)}, "query, key and value projections", True),
        ({"experts": 16}, "--num-experts", True),
        ({"topk": 1}, "--moe-router-topk", True),
        ({"ffn": 64}, "--moe-ffn-hidden-size", True),
        ({"gated": True}, "--swiglu", True),
        ({"shared_ffn": 64}, "--moe-shared-expert-intermediate-size", True),
        ({"window": 128}, "--window-size", True),
        ({"expert": 4}, "--expert-model-parallel-size", True),
        ({"tensor": 2}, "--tensor-model-parallel-size", True),
        ({"context": 2}, "--context-parallel-size", True),
        ({"ring": True}, "--cp-comm-type", True),
        ({"batch": 2}, "--micro-batch-size", False),
        ({"dtype": "fp32"}, "precision", False),
        ({"dispatcher": "allgather"}, "--moe-token-dispatcher-type", False),
        ({"recomputes": True}, "--recompute-granularity full", False),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_difference_is_reported_with_its_flag(changes: dict[str, Any], flag: str, essential: bool) -> None:
    (found,) = differences(made_for(), made_for(**changes))
    assert (found.flag, found.essential) == (flag, essential)
    assert differences(made_for(), made_for()) == ()


def test_the_text_of_a_difference_has_the_flag_and_both_values() -> None:
    found = differences(made_for(), made_for(sequence_length=128, gated=True, shared_ffn=64))
    assert [str(one) for one in found] == [
        "--seq-length 8192 (this run: 128)",
        "--swiglu off (this run: on)",
        "--moe-shared-expert-intermediate-size not given (this run: 64)",
    ]


def test_every_field_of_a_workload_except_derived_ones_is_recorded() -> None:
    """A new field of a workload must be recorded, or listed here with the reason."""
    derived = {"key_value_width", "latent"}  # follow from heads and projections
    assumed = {"imbalance", "padded", "rows_seen", "condensed"}  # assumptions of the prediction
    features = {
        "losses",
        "capacity_per_chunk",
        "chooses",
        "ranks_per_node",
        "local",
    }  # by its order
    of_plan = {"exchange"}  # what the plan itself says
    choices = {"splits_weights"}  # what a planner may choose; layers that cannot run it refuse it
    # The order is that of all micro-batches, and gradients are reduced in the last one.
    last = {"replicas", "expert_replicas", "shards_optimizer", "places_reductions"}
    other_layers = {"dense_ffn"}  # a plan is of layers with experts, whatever is between them
    changed: dict[str, Any] = {
        "dtype": "fp32", "projections": ((1, 1),), "gated": True, "shared_ffn": 1, "capacity": 1.5,
        "window": 7, "grouped": True, "dispatcher": "allgather", "fused_gradients": False, "recomputes": True,
        "ring": True, "condense": 0.9,
    }  # fmt: skip
    for one in dataclasses.fields(type(workload())):
        if one.name in derived | assumed | features | of_plan | choices | last | other_layers:
            continue
        value = changed[one.name] if one.name in changed else getattr(workload(), one.name) * 2
        assert differences(made_for(), made_for(**{one.name: value})), one.name


def test_a_plan_without_the_section_can_be_read(file: Path) -> None:
    without_made_for(file)
    assert Plan.read(file).made_for is None


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ("swiglu: false", "swiglu: 7", r"made_for.swiglu 7: must be true or false"),
        ("seq_length: 8192", "seq_length: 0", r"made_for.seq_length 0: must be a whole number of at least 1"),
        ("  num_experts: 8\n", "", r"made_for.num_experts: is missing"),
        ("num_experts:", "num_expert:", r"Did you mean num_experts\?"),
    ],
)
def test_an_error_in_the_section_is_reported(old: str, new: str, part: str, file: Path) -> None:
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new, 1))
    with pytest.raises(BadInput, match=part):
        Plan.read(file)


def run_of(**changes: Any) -> argparse.Namespace:
    """The arguments of Megatron, in a run of :func:`workload`, that are compared with a plan."""
    values: dict[str, Any] = {
        "seq_length": 8192, "micro_batch_size": 1, "hidden_size": 1024, "num_attention_heads": 16,
        "kv_channels": 64, "ffn_hidden_size": 4096, "num_experts": 8, "moe_router_topk": 2, "bf16": True,
        "fp16": False, "moe_token_dispatcher_type": "alltoall", "expert_model_parallel_size": 8,
        "expert_tensor_parallel_size": 1, "tensor_model_parallel_size": 1, "context_parallel_size": 1,
        "sequence_parallel": False, "world_size": 8, "gradient_accumulation_fusion": True,
        "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None,
        "moe_expert_capacity_factor": None, "moe_shared_expert_intermediate_size": None,
        "multi_latent_attention": False, "ampipe_capacity_scope": None, "ampipe_router_scope": None,
        "moe_token_drop_policy": "probs", "ampipe_save_plan": None,
        "ampipe_plan": "plan.yaml", "recompute_granularity": None, "attention_dropout": 0.0,
        "window_size": None, "ampipe_condense": None, "transformer_impl": "transformer_engine",
    }  # fmt: skip
    return argparse.Namespace(**(values | changes))


@pytest.fixture(autouse=True)
def eight_ranks_on_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")


def test_the_only_note_of_the_planned_run_is_the_cluster(file: Path) -> None:
    choice = choice_of_plan(run_of(), Plan.read(file), str(file))
    assert choice.notes == (f"the plan was made on: {cluster().description}",)
    assert choice.pipeline.num_chunks == 2


def planned(stack: int, **changes: Any) -> Choice:
    run = run_of(num_layers=12, moe_layer_freq=[0] + 11 * [1], **changes)
    planner = planner_of(run, "a800x8-20gbps", stack=stack)
    return planner((run.seq_length // run.tensor_model_parallel_size, 1))


def test_a_run_plans_as_many_layers_as_may_share_a_schedule() -> None:
    slow = {"seq_length": 4096, "moe_router_topk": 4}
    blocks, together = planned(1, **slow), planned(ALL_LAYERS, **slow)
    assert blocks.pipeline.stack == 1 and together.pipeline.stack == ALL_LAYERS
    assert together.pipeline.order is not None and together.pipeline.order.repeats
    assert "12 layers as one schedule" in together.reason
    # From the first stage of the first layer to the last stage of the last one.
    assert sum(together.predicted_ms or ()) > 8 * sum(blocks.predicted_ms or ())
    assert planned(4, **slow, pipeline_model_parallel_size=6, world_size=48).pipeline.stack == 4
    assert planned(ALL_LAYERS, **slow, context_parallel_size=2, world_size=16).pipeline.stack == 1


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_run_with_a_plan_of_layers_that_share_a_schedule(tensor: int, tmp_path: Path) -> None:
    made = workload(topk=4, sequence_length=4096, tensor=tensor)
    path = tmp_path / "plan.yaml"
    make_plan(Predictor(made, cluster(), num_layers=6), degrees=(2,)).write(path, head="a test")
    run = run_of(seq_length=4096, moe_router_topk=4, tensor_model_parallel_size=tensor, world_size=8 * tensor)
    run.sequence_parallel = tensor > 1
    choice = choice_of_plan(run, Plan.read(path), str(path))
    assert choice.pipeline.stack == ALL_LAYERS and choice.predicted_ms is not None
    # Where there is a boundary, each layer runs it alone.
    alone = choice_of_plan(
        argparse.Namespace(**{**vars(run), "recompute_granularity": "full"}), Plan.read(path), ""
    )
    assert alone.pipeline == choice.pipeline


def test_a_difference_that_changes_only_times_is_a_note(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    choice = choice_of_plan(run_of(micro_batch_size=2, bf16=False), Plan.read(file), str(file))
    assert choice.notes[1] == (
        "the plan was made for --micro-batch-size 1 (this run: 2), precision bf16 (this run: fp32), "
        "ranks of a node 8 (this run: 2); its predictions may be wrong"
    )


def test_a_plan_for_another_block_is_refused_with_every_difference(file: Path) -> None:
    with pytest.raises(BadInput) as refused:
        choice_of_plan(run_of(seq_length=128, hidden_size=64, kv_channels=4), Plan.read(file), str(file))
    message = str(refused.value)
    assert message.startswith(f"--ampipe-plan {file}: is not for the blocks of this model: it was made for ")
    assert "--seq-length 8192 (this run: 128), --hidden-size 1024 (this run: 64)" in message
    assert "remove its section made_for" in message
    with pytest.raises(BadInput, match=r"--ampipe-save-plan .* Remove the file"):
        choice_of_plan(
            run_of(seq_length=128, ampipe_plan=None, ampipe_save_plan=str(file)), Plan.read(file), str(file)
        )


def without_made_for(file: Path) -> None:
    text = file.read_text()
    file.write_text(text[: text.index("made_for:")] + text[text.index("schedule: |") :])


def test_a_plan_without_the_section_runs_with_a_note(file: Path) -> None:
    """A file of an earlier version is accepted if its stages are those of this model's blocks."""
    without_made_for(file)
    assert choice_of_plan(run_of(seq_length=128), Plan.read(file), str(file)).notes == (
        f"{file} has no section made_for, so it was not compared with this run",
    )
    with pytest.raises(BadInput, match=r"is not for the blocks of this model: .* runs shared\.0 0 times"):
        choice_of_plan(run_of(moe_shared_expert_intermediate_size=64), Plan.read(file), str(file))


def test_the_error_for_a_bad_share_names_the_plan_file(file: Path) -> None:
    file.write_text(re.sub(r"shares:\n- .*\n- .*", "shares:\n- 0.00001\n- 0.99999", file.read_text()))
    with pytest.raises(BadInput) as refused:
        choice_of_plan(run_of(), Plan.read(file), str(file))
    assert str(refused.value).startswith(
        f"--ampipe-plan {file}: is not for the blocks of this model: 1e-05,0.99999 chunk 0 would"
    )
    assert "--ampipe-chunks" not in str(refused.value)
