"""Runs command lines of GPT pretraining up to the models, and trains a stock and an AMPipe model to compare.

Forward and backward use Megatron's schedules.
"""

import contextlib
import copy
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import mpu
from megatron.core.distributed import DistributedDataParallel
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from megatron.training import global_vars
from megatron.training.models.gpt import GPTModelBuilder

from megatron_ampipe.launch import gpt, pretrain, script
from megatron_ampipe.launch.gpt import embedding_ranks
from megatron_ampipe.launch.script import TrainingSession
from megatron_ampipe.layers.layer import AMPipeTransformerLayer
from tests.dist.blocks import summed_results, wrong
from tests.dist.worker import use_groups

LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4
NUM_MICROBATCHES = 2


@contextlib.contextmanager
def launched(arguments: list[str]) -> Iterator[tuple[Any, Any]]:
    """One command line up to its models: Megatron's arguments, and the configuration of the models.

    Raises:
        BadInput: The launch is refused.
    """
    forget_last_launch()
    session = TrainingSession(arguments)
    with mock.patch.dict(os.environ):
        config = pretrain.prepare_training(session).model
        # Wrapped, so that gradients are accumulated on the stream of training.
        assert session.context is None or hasattr(DistributedDataParallel.__init__, "__wrapped__")
        yield session.args, config


def with_stock_layers() -> contextlib.AbstractContextManager[Any]:
    """Within it, models are built as without AMPipe."""
    return mock.patch.object(script, "_session", TrainingSession([]))


def forget_last_launch() -> None:
    """Reset what ``parse_and_validate_args`` refuses to set twice."""
    global_vars.destroy_global_vars()
    destroy_num_microbatches_calculator()


def use_groups_of(args: Any) -> None:
    """Set the process groups of a launch with these arguments, and seed the random state."""
    kinds = ("tensor_model", "pipeline_model", "virtual_pipeline_model", "context", "expert_model")
    names = [f"{kind}_parallel_size" for kind in (*kinds, "expert_tensor")]
    # Which ranks hold embeddings follows from these flags, too.
    embeddings = _embeddings_of(args.mtp_num_layers, args.untie_embeddings_and_output_weights)
    _agree_on_names_of_groups()
    use_groups(**{name: getattr(args, name) for name in names}, get_embedding_ranks=embeddings)


@functools.cache
def _embeddings_of(*flags: Any) -> Callable[..., list[int]]:
    """A function that only equals itself with the same flags."""
    return functools.partial(embedding_ranks)


def _agree_on_names_of_groups() -> None:
    """torch names a group by a count, which differs where a rank alone has made groups for a line."""
    import torch.distributed as dist

    world = dist.distributed_c10d._world
    counts: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(counts, world.group_count)
    world.group_count = max(counts)


def compare(args: Any, config: Any, *, pipelined: bool) -> None:
    """Train a stock and an AMPipe model of a configuration for a step, and assert that they agree."""
    use_groups_of(args)
    with with_stock_layers():
        # Megatron's builder modifies its configuration.
        stock = build(copy.deepcopy(config))
    ours = build(config)
    spread_out(stock)
    for mine, other in zip(ours, stock, strict=True):
        mine.load_state_dict(other.state_dict(), strict=True)
    assert list(stock.state_dict()) == list(ours.state_dict())
    # A pipeline stage may have dense layers only.
    has_routers = any(".router." in name for name, _ in stock.named_parameters())
    layers = [type(layer) for layer in ours.modules()]
    assert (pipelined and has_routers) == (AMPipeTransformerLayer in layers)
    (expected, losses), (found, of_ours) = train(args, stock), train(args, ours)
    assert of_ours == pytest.approx(losses, rel=LOSS_TOLERANCE)
    assert wrong(expected, found, GRADIENT_TOLERANCE, of_largest=1e-3) == {}


def build(config: Any) -> torch.nn.ModuleList:
    """The model chunks of this rank."""
    config.finalize()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    chunks = GPTModelBuilder(config).build_distributed_models(
        groups, wrap_with_ddp=False, data_parallel_random_init=False
    )
    return torch.nn.ModuleList(chunks).train()


def spread_out(chunks: torch.nn.Module) -> None:
    """Scale the weights as in a trained model: initially all experts are nearly tied."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in chunks.named_parameters():
            if name.endswith("router.weight"):
                parameter.mul_(20)
            elif parameter.dim() == 1:
                noise = torch.randn(parameter.shape, generator=generator) * 0.05
                parameter.add_(noise.to(parameter.dtype))


def train(args: Any, chunks: torch.nn.ModuleList) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Every parameter's gradient, buffers and logged losses, by name; the loss of every micro-batch."""
    # Megatron's logger is made for as many layers as the first model has.
    destroy_moe_metrics_tracker()
    chunks.zero_grad()
    batches = [iter(make_batches(args)) for _ in chunks]
    reduced = get_forward_backward_func()(
        forward_step_func=gpt.forward_step,
        data_iterator=batches,
        model=[*chunks],
        num_microbatches=NUM_MICROBATCHES,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=False,
    )
    losses = [float(entry["lm loss"][0] / entry["lm loss"][1]) for entry in reduced]
    return summed_results(chunks), losses


def make_batches(args: Any) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(50 + mpu.get_data_parallel_rank())
    shape = (args.micro_batch_size, args.seq_length)
    positions = torch.arange(args.seq_length).expand(shape).contiguous()
    mask = {}
    if args.create_attention_mask_in_dataloader:
        visible = torch.ones(args.seq_length, args.seq_length).tril()
        mask["attention_mask"] = (visible < 0.5).expand(args.micro_batch_size, 1, -1, -1).contiguous()
    return [
        {
            **mask,
            "tokens": torch.randint(0, 255, shape, generator=generator),
            "labels": torch.randint(0, 255, shape, generator=generator),
            "loss_mask": torch.ones(shape),
            "position_ids": positions,
        }
        for _ in range(NUM_MICROBATCHES)
    ]
