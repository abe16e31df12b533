"""What a plan was made for, and its differences from a run."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from megatron_ampipe.block.settings import Settings
from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch.environment import block_of_args, environment_of, features_of_args
from megatron_ampipe.launch.planned import plan_of_run, planner_of
from megatron_ampipe.launch.refusals import refuse_unsupported
from megatron_ampipe.launch.run import Run
from megatron_ampipe.plan.plan_file import MadeFor, Plan, differences, made_for
from megatron_ampipe.plan.planner import make_plan
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.schedule import ALL_LAYERS, Pipeline
from tests.golden.write import SETTINGS
from tests.plan_cases import cluster, sized_block


def record(*, ranks_per_node: int = 8, **changes: Any) -> MadeFor:
    return made_for(sized_block(**changes), cluster="a machine", ranks_per_node=ranks_per_node)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    make_plan(Predictor(sized_block(), cluster()), degrees=(2,), full=False).write(path, head="a test")
    return path


@pytest.mark.parametrize(
    ("changes", "flag", "essential"),
    [
        ({"sequence_length": 128}, "--seq-length", True),
        ({"projections": ((1024, 1536),)}, "attention projections", True),
        ({"ring": True}, "--cp-comm-type", True),
        ({"batch": 2}, "--micro-batch-size", False),
        ({"dtype": "fp32"}, "precision", False),
        ({"recomputes": True}, "full recompute", False),
        ({"rows_margin": 1.25}, "--ampipe-rows-margin", False),
        ({"captures_passes": True}, "CUDA graphs of whole passes", False),
        ({"ranks_per_node": 2}, "ranks per node", False),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_difference_is_reported_with_its_flag(changes: dict[str, Any], flag: str, essential: bool) -> None:
    ((found, stops),) = differences(record(), record(**changes)).items()
    assert found.startswith(f"{flag} ") and stops == essential
    assert not differences(record(), record())


def test_a_key_that_only_one_side_has_is_a_difference() -> None:
    one, other = record(shared_ffn=64), record(gated=True)
    other["a_key_of_a_later_version"] = 3
    assert list(differences(one, other)) == [
        "--swiglu off (this run: on)",
        "a key of a later version not given (this run: 3)",
        "--moe-shared-expert-intermediate-size 64 (this run: not given)",
    ]
    assert all(differences(one, other).values())


def run_of(**changes: Any) -> argparse.Namespace:
    """The arguments of Megatron, in a run of :func:`block`, that are compared with a plan."""
    values: dict[str, Any] = {
        "seq_length": 8192, "micro_batch_size": 1, "hidden_size": 1024, "num_attention_heads": 16,
        "kv_channels": 64, "ffn_hidden_size": 4096, "num_experts": 8, "moe_router_topk": 2, "bf16": True,
        "fp16": False, "world_size": 8, "gradient_accumulation_fusion": True, "recompute_granularity": None,
        "transformer_impl": "transformer_engine", "ampipe_capacity_scope": None, "ampipe_router_scope": None,
        "ampipe_condense": None, "ampipe_partner": None, "ampipe_plan": "plan.yaml", "ampipe_save_plan": None,
    }  # fmt: skip
    return argparse.Namespace(**(SETTINGS | values | changes))


def resolved(args: argparse.Namespace, pipeline: Pipeline, **fields: Any) -> Run:
    """The parts of a resolved run with these arguments that are planned or compared with a plan."""
    settings = fields.pop("settings", Settings(ranks_per_node=8))
    block, _ = block_of_args(args, settings)
    return Run(
        settings=settings,
        pipeline=pipeline,
        environment=environment_of(args, settings, on_gpu=False),
        block=block,
        features=features_of_args(args, settings),
        **fields,
    )


def planned_from(args: argparse.Namespace, file: Path, *, saved: bool = False) -> Plan:
    """The plan of a file for a run with these arguments."""
    plan, settings = Plan.read(file), Settings(plan=str(file), ranks_per_node=8)
    given = frozenset({"save_plan" if saved else "plan"})
    return plan_of_run(resolved(args, plan.pipeline, settings=settings, plan=plan, given=given))


@pytest.fixture(autouse=True)
def eight_ranks_on_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")


def planned(stack: int, **changes: Any) -> Plan:
    run = run_of(num_layers=12, moe_layer_freq=[0] + 11 * [1], **changes)
    settings = Settings(ranks_per_node=8, degree="auto", cluster="a800x8-20gbps")
    _, layers = block_of_args(run, settings)
    asked = resolved(run, Pipeline.of(1, stack=stack), settings=settings)
    planner = planner_of(asked, cluster("a800x8-20gbps"), layers, partnered_share=0.0)
    return planner((run.seq_length // run.tensor_model_parallel_size, 1))


def test_a_run_plans_as_many_layers_as_may_share_a_schedule() -> None:
    slow = {"seq_length": 4096, "moe_router_topk": 4}
    blocks, together = planned(1, **slow), planned(ALL_LAYERS, **slow)
    assert blocks.pipeline.stack == 1 and together.pipeline.stack == ALL_LAYERS
    assert together.pipeline.order is not None and together.pipeline.order.repeats
    assert "12 layers as one schedule" in together.reason
    # From the first stage of the first layer to the last stage of the last one.
    assert sum(together.stages_ms or ()) > 8 * sum(blocks.stages_ms or ())
    assert planned(4, **slow, pipeline_model_parallel_size=6, world_size=48).pipeline.stack == 4
    assert planned(ALL_LAYERS, **slow, context_parallel_size=2, world_size=16).pipeline.stack == 1


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_run_with_a_plan_of_layers_that_share_a_schedule(tensor: int, tmp_path: Path) -> None:
    made = sized_block(topk=4, sequence_length=4096, tensor=tensor)
    path = tmp_path / "plan.yaml"
    make_plan(Predictor(made, cluster(), num_layers=6), degrees=(2,)).write(path, head="a test")
    run = run_of(seq_length=4096, moe_router_topk=4, tensor_model_parallel_size=tensor, world_size=8 * tensor)
    run.sequence_parallel = tensor > 1
    choice = planned_from(run, path)
    assert choice.pipeline.stack == ALL_LAYERS and choice.stages_ms is not None
    # Where there is a boundary, each layer runs it alone.
    alone = planned_from(argparse.Namespace(**{**vars(run), "recompute_granularity": "full"}), path)
    assert alone.pipeline == choice.pipeline


def test_a_saved_plan_for_another_block_is_refused(file: Path) -> None:
    run = run_of(seq_length=128)
    with pytest.raises(BadInput, match=r"^--ampipe-save-plan .* Remove the file.* its section made_for"):
        planned_from(run, file, saved=True)


def test_what_a_plan_says_is_refused_as_its_flags_are() -> None:
    run = run_of(recompute_granularity="full", ampipe_plan="p.yaml")
    settings, pipeline = Settings(plan="p.yaml"), Pipeline.of(4, memory="rebuild")
    says = "^--ampipe-memory rebuild with --recompute-granularity full: with --ampipe-plan p.yaml, .* flags.$"
    with pytest.raises(BadInput, match=says):
        refuse_unsupported(settings, pipeline, run)


def test_a_plan_without_the_section_runs_with_a_note(file: Path) -> None:
    """A file of an earlier version is accepted if its stages are those of this model's blocks."""
    file.write_text(file.read_text().partition("made_for:")[0])
    assert planned_from(run_of(seq_length=128), file).notes == (
        f"{file} has no section made_for, so it was not compared with this run",
    )
    with pytest.raises(BadInput, match=r"is not for the blocks of this model: .* runs shared\.0 0 times"):
        planned_from(run_of(moe_shared_expert_intermediate_size=64), file)
