"""Process groups are made on all ranks in one order, with the timeout and the options of Megatron's."""

import datetime
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.dist.worker import use_groups

MINUTES = 7
LENGTH, VOCABULARY = 16, 64
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "counts": ({"expert_model_parallel_size": 2}, {"moe_token_dispatcher_type": "allgather"}),
    "rows of attention": (
        {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "expert_model_parallel_size": 2},
        {"sequence_parallel": True},
    ),
}
"""By the purpose of AMPipe's group: Megatron's sizes, and what else a model needs to use it."""


def build_model(settings: dict[str, Any]) -> torch.nn.Module:
    """This rank's stage of a model whose first stage has a dense layer, and the second one with experts."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_moe_experts=4,
        moe_layer_freq=[0, 1],
        add_bias_linear=False,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=2,
        normalization="RMSNorm",
        **settings,
    )
    return GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=False),
        VOCABULARY,
        LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
    )


def groups_of(purpose: str) -> list[dist.ProcessGroup]:
    """The groups of this rank that AMPipe has made for a purpose."""
    return [group for group in dist.distributed_c10d._world.pg_map if group.group_desc == f"ampipe {purpose}"]


def timeout_of(group: dist.ProcessGroup) -> datetime.timedelta:
    return group._get_backend(torch.device("cpu")).options._timeout


@pytest.mark.ranks(4)
@pytest.mark.parametrize("purpose", LAYOUTS)
def test_later_groups_of_the_world_work(purpose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if only the last of two pipeline stages has a layer that needs the group."""
    from megatron_ampipe.launch import recipes
    from megatron_ampipe.launch.script import models_of_megatron

    sizes, settings = LAYOUTS[purpose]
    use_groups(**sizes, pipeline_model_parallel_size=2, distributed_timeout_minutes=MINUTES)
    for model in models_of_megatron():
        monkeypatch.setattr(model, "__init__", model.__init__)
    recipes.switch_on_models(degree=2)
    build_model(sizes | settings)
    (group,) = groups_of(purpose)
    assert timeout_of(group) == datetime.timedelta(minutes=MINUTES)
    # A second model uses the same groups.
    build_model(sizes | settings)
    assert groups_of(purpose) == [group]
    later = dist.new_group(timeout=datetime.timedelta(seconds=20))
    ones = torch.ones(1)
    dist.all_reduce(ones, group=later)
    assert ones.item() == 4
    recipes._context_of.cache_clear()


@pytest.mark.ranks(4)
def test_groups_of_nodes_have_the_timeout_of_the_expert_parallel_group() -> None:
    from megatron.core import parallel_state

    from megatron_ampipe.block.settings import Settings
    from megatron_ampipe.layers.context import AMPipeContext
    from megatron_ampipe.layers.process_groups import make_groups_of_model
    from megatron_ampipe.runtime.recorder import Recorder
    from megatron_ampipe.schedule import Exchange, Pipeline
    from tests.dist.blocks import transformer_config
    from tests.dist.cases import Case

    use_groups(expert_model_parallel_size=4, distributed_timeout_minutes=MINUTES)
    pipeline = Pipeline.of(2, exchange=Exchange.NODES)
    context = AMPipeContext(Settings(ranks_per_node=2), pipeline, recorder=Recorder())
    make_groups_of_model(transformer_config(Case("nodes", world_size=4)), context, None)
    rank = dist.get_rank()
    found = {}
    for purpose in ("between nodes", "within a node"):
        (group,) = groups_of(purpose)
        assert timeout_of(group) == datetime.timedelta(minutes=MINUTES)
        found[purpose] = dist.get_process_group_ranks(group)
        # Megatron changes its timeout after the first iterations (--distributed-timeout-seconds-after-init).
        assert group in parallel_state._global_process_group_list
    node = rank - rank % 2
    assert found == {"between nodes": [rank % 2, rank % 2 + 2], "within a node": [node, node + 1]}


def test_groups_get_the_options_of_nccl() -> None:
    """Those that a file of --nccl-communicator-config-path has set for the group, and a high priority."""
    from megatron_ampipe.runtime.groups import nccl_options_of, timeout_of

    given = dist.ProcessGroupNCCL.Options(is_high_priority_stream=False)
    given._timeout = datetime.timedelta(minutes=MINUTES)
    given.config.max_ctas = 5
    given.config.min_ctas = 2
    given.config.cga_cluster_size = 1
    given.config.net_name = "IB"
    cuda = torch.device("cuda")
    backends = {cuda: SimpleNamespace(options=given)}
    group = SimpleNamespace(_device_types=[torch.device("cpu"), cuda], _get_backend=backends.get)
    with mock.patch.object(dist, "get_backend_config", lambda _: "cpu:gloo,cuda:nccl"):
        options = nccl_options_of(group)
    assert options is not given and options.is_high_priority_stream
    for name in ("max_ctas", "min_ctas", "cga_cluster_size", "net_name"):
        assert getattr(options.config, name) == getattr(given.config, name)
    assert timeout_of(group) == given._timeout
    with mock.patch.object(dist, "get_backend_config", lambda _: "cpu:gloo,cuda:gloo"):
        assert nccl_options_of(group) is None
