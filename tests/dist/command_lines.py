"""Runs command lines of GPT pretraining up to the models, and trains a stock and an AMPipe model to compare.

Forward and backward use Megatron's schedules.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from megatron.core import mpu, parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker, get_moe_metrics_tracker
from megatron.training import global_vars
from megatron.training.models.gpt import GPTModelBuilder

from megatron_ampipe.launch import gpt, pretrain
from megatron_ampipe.launch.gpt import embedding_ranks
from megatron_ampipe.launch.script import TrainingSession
from megatron_ampipe.layers.layer import AMPipeTransformerLayer

LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4
NUM_MICROBATCHES = 2


@contextlib.contextmanager
def launched(arguments: list[str]) -> Iterator[tuple[Any, Any, Any]]:
    """One command line up to its models: Megatron's arguments, the stock configuration and AMPipe's.

    Raises:
        BadInput: The launch is refused.
    """
    forget_last_launch()
    seen: list[Any] = []
    original = pretrain.use_pipelined_layers

    def using(model_config: Any, session: TrainingSession) -> None:
        # Wrapped, so that gradients are accumulated on the stream of training.
        assert session.context is None or hasattr(DistributedDataParallel.__init__, "__wrapped__")
        seen[:] = [session.args, copy.deepcopy(model_config), model_config]
        original(model_config, session)

    with mock.patch.dict(os.environ):
        with mock.patch.object(pretrain, "use_pipelined_layers", using):
            pretrain.prepare_training(TrainingSession(arguments))
        args, stock, ours = seen
        yield args, stock, ours


def forget_last_launch() -> None:
    """Reset what ``parse_and_validate_args`` refuses to set twice."""
    global_vars.destroy_global_vars()
    destroy_num_microbatches_calculator()


class Groups:
    """Megatron's process groups, created once for each combination of sizes and then reused."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], dict[str, Any]] = {}

    def use(self, args: Any) -> None:
        """Set the process groups of a launch with these arguments, and seed the random state."""
        sizes = {
            "tensor_model_parallel_size": args.tensor_model_parallel_size,
            "pipeline_model_parallel_size": args.pipeline_model_parallel_size,
            "virtual_pipeline_model_parallel_size": args.virtual_pipeline_model_parallel_size,
            "context_parallel_size": args.context_parallel_size,
            "expert_model_parallel_size": args.expert_model_parallel_size,
            "expert_tensor_parallel_size": args.expert_tensor_parallel_size,
        }
        key = (*sizes.values(), args.mtp_num_layers, args.untie_embeddings_and_output_weights)
        state = vars(parallel_state)
        names = [name for name in state if name.startswith("_") and name[1:2].isupper()]
        if key not in self._made:
            _agree_on_names_of_groups()
            parallel_state.destroy_model_parallel()
            parallel_state.initialize_model_parallel(**sizes, get_embedding_ranks=embedding_ranks)
            self._made[key] = {name: state[name] for name in names}
        # initialize_model_parallel assigns new values and modifies none in place.
        state.update(self._made[key])
        model_parallel_cuda_manual_seed(args.seed, force_reset_rng=True)


def _agree_on_names_of_groups() -> None:
    """torch names a group by a count, which differs where a rank alone has made groups for a line."""
    import torch.distributed as dist

    world = dist.distributed_c10d._world
    counts: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(counts, world.group_count)
    world.group_count = max(counts)


def compare(args: Any, stock_config: Any, our_config: Any, *, pipelined: bool) -> None:
    """Train both models for a step, and assert that they agree."""
    GROUPS.use(args)
    stock = build(stock_config)
    # Megatron's builder modifies its configuration.
    ours = build(our_config)
    spread_out(stock)
    for mine, other in zip(ours, stock, strict=True):
        mine.load_state_dict(other.state_dict(), strict=True)
    assert [list(chunk.state_dict()) for chunk in stock] == [list(chunk.state_dict()) for chunk in ours]
    layers = [type(layer) for chunk in ours for layer in chunk.modules()]
    # A pipeline stage may have dense layers only.
    has_routers = any(".router." in name for chunk in stock for name, _ in chunk.named_parameters())
    assert (pipelined and has_routers) == (AMPipeTransformerLayer in layers)
    expected, found = train(args, stock), train(args, ours)
    assert expected.keys() == found.keys(), expected.keys() ^ found.keys()
    losses, of_ours = expected.pop("losses"), found.pop("losses")
    assert ((losses - of_ours).abs() <= LOSS_TOLERANCE * losses.abs()).all(), (losses, of_ours)
    wrong = {
        name: value for name, value in differences(expected, found).items() if not value <= GRADIENT_TOLERANCE
    }
    assert not wrong, f"differs from stock: {wrong}"


GROUPS = Groups()


def build(config: Any) -> list[torch.nn.Module]:
    config.finalize()
    chunks: list[torch.nn.Module] = GPTModelBuilder(config).build_distributed_models(
        ProcessGroupCollection.use_mpu_process_groups(),
        wrap_with_ddp=False,
        data_parallel_random_init=False,
    )
    for chunk in chunks:
        chunk.train()
    return chunks


def spread_out(chunks: list[torch.nn.Module]) -> None:
    """Scale the weights as in a trained model: initially all experts are nearly tied."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                if name.endswith("router.weight"):
                    parameter.mul_(20)
                elif parameter.dim() == 1:
                    noise = torch.randn(parameter.shape, generator=generator) * 0.05
                    parameter.add_(noise.to(parameter.dtype))


def train(args: Any, chunks: list[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Loss of every micro-batch, every parameter's gradient, buffers and logged losses, by name."""
    # Its entries are as long as the first model that logged had layers.
    destroy_moe_metrics_tracker()
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.grad = None
    batches = [iter(make_batches(args)) for _ in chunks]
    reduced = get_forward_backward_func()(
        forward_step_func=gpt.forward_step,
        data_iterator=batches if len(chunks) > 1 else batches[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=NUM_MICROBATCHES,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=False,
    )
    losses = [entry["lm loss"][0] / entry["lm loss"][1] for entry in reduced]
    found = {"losses": torch.stack(losses) if losses else torch.zeros(0)}
    for index, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            found[f"gradient of {index} {name}"] = over_tensor_ranks(gradient.float().clone(), parameter)
        for name, buffer in chunk.named_buffers():
            if buffer.is_floating_point():
                found[f"buffer {index} {name}"] = over_tensor_ranks(buffer.float().clone())
    for name, metric in get_moe_metrics_tracker().metrics.items():
        found[f"logged {name}"] = over_tensor_ranks(metric.values.float().clone())
    return found


def over_tensor_ranks(found: torch.Tensor, parameter: torch.nn.Parameter | None = None) -> torch.Tensor:
    """What belongs to the rows of this rank, summed as Megatron does before it uses it.

    Layers that share a schedule hold other rows of the sequence than Megatron's. Other gradients stay.
    """
    if mpu.get_tensor_model_parallel_world_size() == 1:
        return found
    if parameter is None or getattr(parameter, "sequence_parallel", False):
        torch.distributed.all_reduce(found, group=mpu.get_tensor_model_parallel_group())
    elif not getattr(parameter, "allreduce", True):
        torch.distributed.all_reduce(found, group=mpu.get_expert_data_parallel_group())
    return found


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


def differences(stock: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]) -> dict[str, float]:
    """For each entry the maximum difference, relative to its maximum.

    A gradient that is zero except for rounding is compared with a thousandth of the model's largest one.
    """
    largest = max(value.abs().max() for name, value in stock.items() if name.startswith("gradient"))
    found = {}
    for name, expected in stock.items():
        floor = largest * 1e-3 if name.startswith("gradient") else 1e-12
        error = (ours[name] - expected).abs().max()
        found[name] = (error / expected.abs().max().clamp_min(floor)).item()
    return found
