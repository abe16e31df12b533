"""Makes the golden texts. Blocks are settings of Megatron, pipelines are flags: both outlive types of code.

Only :func:`schedule_of` and :func:`schedules_of` know names of the package; plans are answers of the command.
The refusals are those of ``docs/supported.md``. The collectives of each parity case are in
``collectives.json``: the parity test compares them, and rewrites them with ``AMPIPE_TEST_WRITE=1``.
"""

import contextlib
import io
import itertools
import json
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent

SETTINGS: Mapping[str, Any] = {
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": None,
    "moe_shared_expert_intermediate_size": None,
    "moe_expert_capacity_factor": None,
    "moe_token_drop_policy": "probs",
    "moe_token_dispatcher_type": "alltoall",
    "moe_latent_size": None,
    "tensor_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 8,
    "expert_tensor_parallel_size": 1,
    "sequence_parallel": False,
    "multi_latent_attention": False,
    "cp_comm_type": None,
    "attention_dropout": 0.0,
    "window_size": None,
}
"""Of a block whose router has no losses, with Megatron's names."""

_CAPACITY = {"moe_expert_capacity_factor": 1.0, "moe_token_drop_policy": "position"}
_TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
BLOCKS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "losses": {"moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.001},
    "shared": {"moe_shared_expert_intermediate_size": 512, "moe_aux_loss_coeff": 0.01},
    "capacity": _CAPACITY,
    "capacity-by-score": {"moe_expert_capacity_factor": 1.0},
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn"},
    "all-gather": {"moe_token_dispatcher_type": "allgather"},
    "flex": {"moe_token_dispatcher_type": "flex"},
    "latent": {"moe_latent_size": 64},
    "latent-attention": {"multi_latent_attention": True},
    "context-ring": {"context_parallel_size": 4},
    "context-gather": {"context_parallel_size": 2, "cp_comm_type": "allgather"},
    "tensor": _TENSOR,
    "tensor-local": {**_TENSOR, "local": True},
    "tensor-local-nodes": {**_TENSOR, "local": True, "ranks_per_node": 4},
    "tensor-experts": {**_TENSOR, "expert_tensor_parallel_size": 2},
    "tensor-experts-nodes": {**_TENSOR, "expert_tensor_parallel_size": 2, "ranks_per_node": 4, "local": True},
    "everything": {
        **_TENSOR,
        "local": True,
        "ranks_per_node": 4,
        "expert_tensor_parallel_size": 2,
        "moe_aux_loss_coeff": 0.01,
        "moe_shared_expert_intermediate_size": 512,
    },
    "dense": {"dense": True},
    "recomputed": {
        "recomputed": True,
        "moe_aux_loss_coeff": 0.01,
        "moe_shared_expert_intermediate_size": 512,
    },
    "condensed": {"condensed": True},
    "reduced": {"reduces": True},
    "reduced-experts": {"reduces": True, "reduces_experts": True},
}
"""By name, what differs from :data:`SETTINGS`; the rest is what AMPipe's own flags add to a block."""


def pipelines() -> Iterator[dict[str, Any]]:
    """The ways to run a block: flags by name."""
    orders = ("ampipe", "moe-only", "lancet", "joined", "sequential")
    for order, degree in itertools.product(orders, (1, 2, 4)):
        if degree > 1 or order in ("lancet", "sequential"):
            yield {"schedule": order, "degree": degree}
    yield {"schedule": "ampipe", "degree": 2, "backward_degree": 4}
    yield {"schedule": "ampipe", "degree": 4, "backward_degree": 2}
    for order, layers in itertools.product(("ampipe", "lancet", "moe-only"), (2, 3)):
        yield {"schedule": order, "degree": 2, "layers": layers}
    for memory in ("rebuild", "redispatch", "offload", "S2", "S3"):
        yield {"schedule": "ampipe", "degree": 2, "memory": memory}
    yield {"schedule": "lancet", "degree": 2, "memory": "keep/S3", "layers": 2}
    yield {"schedule": "ampipe", "degree": 2, "exchange": "nodes"}
    yield {"schedule": "ampipe", "degree": 2, "exchange": "nodes", "memory": "redispatch"}


def schedule_of(block: Mapping[str, Any], pipeline: Mapping[str, Any]) -> tuple[Any, list[Any], Any]:
    """The schedule of a block, or of several; the features of each block; the pipeline.

    Raises:
        BadInput: there is none.
    """
    from dataclasses import replace

    from megatron_ampipe.block.settings import Settings
    from megatron_ampipe.schedule import Exchange, Pipeline, RecomputeRequest, decide
    from megatron_ampipe.schedule.features import features_of_settings

    flags = dict(pipeline)
    layers = flags.pop("layers", 1)
    own = ("dense", "recomputed", "condensed", "reduces", "reduces_experts", "local", "ranks_per_node")
    settings = types.SimpleNamespace(**{k: v for k, v in (SETTINGS | block).items() if k not in own})
    features = features_of_settings(
        settings,
        Settings(ranks_per_node=block.get("ranks_per_node")),
        dense=block.get("dense", False),
        shares_schedule=layers > 1,
        local=block.get("local", False),
    )
    given = {name: block[name] for name in own[2:5] if name in block}
    if block.get("recomputed", False):
        given["saved"] = decide(RecomputeRequest(full=True))
    features = features if features.dense else replace(features, **given)
    exchange = Exchange(flags.pop("exchange", "rows"))
    chosen = Pipeline.of(flags.pop("degree"), exchange=exchange, stack=layers, **flags)
    trained = [chosen.trained(features)] * layers
    if block.get("dense"):
        # Only next to a layer with experts.
        with_experts = features_of_settings(settings, Settings(), shares_schedule=layers > 1)
        trained[1::2] = [chosen.trained(with_experts)] * (layers // 2)
    return chosen.schedule_of(trained), trained, chosen


def schedules_of(block: Mapping[str, Any], pipeline: Mapping[str, Any]) -> str:
    """The text of a schedule, the order in which lanes are issued included; or why there is none."""
    from megatron_ampipe.errors import BadInput
    from megatron_ampipe.schedule import Direction, issue_order, needs_of, to_text

    try:
        schedule, trained, _ = schedule_of(block, pipeline)
    except (BadInput, AssertionError) as error:
        return f"refused: {type(error).__name__} {str(error).splitlines()[0] if str(error) else ''}\n"
    lines = [to_text(schedule)]
    for direction in Direction:
        needs = needs_of(schedule, trained, direction)
        for waits in (False, True):
            order = issue_order(schedule.program(direction), needs, host_waits=waits)
            places = " ".join(f"{stage}" for _, stage in order)
            lines.append(f"{direction} issued{', host waits' if waits else ''}: {places}\n")
    return "".join(lines)


def schedules() -> Iterator[tuple[str, str]]:
    """``(file name, text)`` for each block: all of its schedules."""
    for name, block in BLOCKS.items():
        parts = []
        for pipeline in pipelines():
            title = " ".join(f"{key}={value}" for key, value in pipeline.items())
            if not (block.get("dense") and pipeline.get("layers", 1) == 1):
                parts.append(f"== {title}\n{schedules_of(block, pipeline)}")
        yield f"schedules/{name}.txt", "\n".join(parts)


PLANS = (
    ("mixtral-8x7b", "a800x8-20gbps"),
    ("mixtral-8x22b", "fsmoe-testbed-b", "--ranks", "64", "--exchange", "auto"),
    ("gpt-moe-base", "ampipe-a800"),
    ("gpt-moe-xl", "ampipe-g5", "--stack", "1"),
    ("qwen3-30b-a3b-like", "dgx-h100"),
    ("qwen3-30b-a3b-like", "gb200-nvl72"),
    ("deepseek-v2-lite", "dgx-h100", "--ranks", "16", "--exchange", "auto"),
    ("deepseek-v3-like", "dgx-h100", "--ranks", "64"),
    ("deepseek-v3-like", "fsmoe-testbed-a", "--set", "recompute-granularity=full"),
    ("tiny", "dgx-h100"),
)
"""Arguments of ``ampipe plan``."""


def plans() -> Iterator[tuple[str, str]]:
    """``(file name, answer)`` for each of :data:`PLANS`."""
    from megatron_ampipe.cli import main

    for model, cluster, *rest in PLANS:
        exchange = [] if "--exchange" in rest else ["--exchange", "rows"]
        words = [*rest, *exchange, "--degrees", "2,4", "--no-partner", "--json", "-"]
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            code = main(["plan", "--model", model, "--cluster", cluster, *words])
        assert code == 0, f"{model} on {cluster}: exit code {code}"
        yield f"plans/{model}-{cluster}.json", json.dumps(json.loads(said.getvalue()), indent=1) + "\n"


def main() -> None:
    """Write all files, and remove those that nothing makes any more."""
    for folder in ("schedules", "plans"):
        for path in (FOLDER / folder).iterdir():
            path.unlink()
    for name, text in (*schedules(), *plans()):
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
