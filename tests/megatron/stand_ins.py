"""Replaces what Megatron-FSDP, CUDA graphs and optimizers need of a GPU, and conversations, on a CPU.

Repairs Megatron's upcycling.
"""

import contextlib
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

from megatron_ampipe.launch import host
from tests import cuda_graph_standin


@contextlib.contextmanager
def fsdp() -> Iterator[None]:
    """Devices and device meshes of Megatron-FSDP are those of the CPU."""
    import megatron.core.distributed.fsdp.mcore_fsdp_adapter as adapter
    import torch
    from megatron.core.distributed.fsdp.src.megatron_fsdp import megatron_fsdp, param_and_grad_buffer
    from torch.distributed.device_mesh import DeviceMesh

    make_mesh = DeviceMesh.__init__

    def make_mesh_of_cpus(mesh: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        make_mesh(mesh, "cpu", *args, **kwargs)

    with_cpus = SimpleNamespace(**{**vars(torch), "device": lambda *_: torch.device("cpu")})
    others = tuple(flag for flag in host.GPU_ONLY_FLAGS if flag != "--use-megatron-fsdp")
    with contextlib.ExitStack() as stack:
        for module in (adapter, megatron_fsdp, param_and_grad_buffer):
            stack.enter_context(mock.patch.object(module, "torch", with_cpus))
        stack.enter_context(mock.patch.object(DeviceMesh, "__init__", make_mesh_of_cpus))
        stack.enter_context(mock.patch.object(host, "GPU_ONLY_FLAGS", others))
        # Megatron's rule for it.
        stack.enter_context(mock.patch.dict(os.environ, {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}))
        yield


@contextlib.contextmanager
def graphs() -> Iterator[None]:
    """Graphs are recorded; in the end each rank says how many it replayed."""
    local = {"--cuda-graph-impl": ("local",)}
    with mock.patch.dict(host.SUPPORTED_VALUES, local), cuda_graph_standin.stand_ins():
        yield
        print(f"replays: {len(cuda_graph_standin.REPLAYS)}")


@contextlib.contextmanager
def conversations() -> Iterator[None]:
    """``--sft`` reads these lines, and five tokens for each turn of a conversation."""
    import numpy
    from megatron.training.datasets import sft_dataset

    from megatron_ampipe.launch import gpt

    def tokens_of(conversation: list[Any], **_options: object) -> tuple[Any, Any]:
        return (numpy.arange(1, 1 + 5 * len(conversation)),) * 2

    get_batch = gpt.get_batch

    def packed_batch(*args: Any, **keywords: Any) -> Any:
        batch = get_batch(*args, **keywords)
        assert batch["cu_seqlens"].numel() > 2, "bounds of several conversations"
        return batch

    lines = [[{"role": "user" if turn % near else "system"} for turn in range(11)] for near in range(1, 9)]
    tokenizer = SimpleNamespace(eod=255, pad=0, vocab_size=256, unique_identifiers={})
    tokenizer.tokenize_conversation = tokens_of
    with (
        mock.patch.object(sft_dataset, "SFTLowLevelDataset", lambda _path: lines),
        mock.patch.object(gpt, "build_tokenizer", lambda _args: tokenizer),
        mock.patch.object(gpt, "get_batch", packed_batch),
    ):
        yield


@contextlib.contextmanager
def tensor_overlap() -> Iterator[None]:
    """``--tp-comm-overlap``, which AMPipe switches off, is read as where there is a GPU."""
    others = tuple(flag for flag in host.GPU_ONLY_FLAGS if flag != "--tp-comm-overlap")
    with mock.patch.object(host, "GPU_ONLY_FLAGS", others):
        yield


@contextlib.contextmanager
def hybridep() -> Iterator[None]:
    """HybridEP's buffers, and Megatron's flex dispatcher without a GPU."""
    from tests import deep_ep_standin

    deep_ep_standin.install()
    from megatron.core.transformer.moe import fused_a2a

    dispatchers = {"--moe-token-dispatcher-type": ("alltoall", "flex")}
    with mock.patch.dict(host.SUPPORTED_VALUES, dispatchers):
        yield
    fused_a2a.reset_hybrid_ep_buffer()


SMALL_BUDGETS = 7
"""From this ``--ampipe-rows-margin`` on, :func:`overflows` makes some budgets too small."""


@contextlib.contextmanager
def overflows() -> Iterator[None]:
    """Some budgets of ``--ampipe-rows fixed`` are too small: each time those of other chunks. With HybridEP.

    Only those of the first two ranks, so that others have to be told. Fewer and fewer: with all chunks of a
    training, about three steps are repeated, in a row.
    """
    import itertools

    from megatron_ampipe.exchange import budgets
    from megatron_ampipe.schedule.row_budget import RowBudget

    learn, turns = budgets.ChunkRows.learn, itertools.count(1)

    def learn_less(chunk: Any, margin: float, **options: bool) -> None:
        learn(chunk, margin, **options)
        if int(os.environ["RANK"]) < 2 and margin >= SMALL_BUDGETS and next(turns).bit_count() == 1:
            small = tuple(tuple(count // 32 for count in row) for row in chunk.budget.rows)
            chunk.use(RowBudget(small), chunk.window.device)

    with hybridep(), mock.patch.object(budgets.ChunkRows, "learn", learn_less):
        yield


@contextlib.contextmanager
def whole_graphs() -> Iterator[None]:
    """Both of these, and transfers on the calling thread, the only one that a capture sees.

    With partners, a step of four micro-batches is two chains of graphs.
    """
    from megatron_ampipe.launch import partners
    from megatron_ampipe.layers import block_stack
    from megatron_ampipe.runtime.executors import SequentialExecutor

    with (
        graphs(),
        overflows(),
        mock.patch.object(block_stack, "ThreadExecutor", SequentialExecutor),
        mock.patch.object(partners, "MAX_CHAIN", 3),
    ):
        yield


@contextlib.contextmanager
def optimizers() -> Iterator[None]:
    """Transformer Engine's Adam, and parameters that count as those of a device, to be offloaded.

    Megatron keeps its gradients in ``decoupled_grad``, and offloads only tensors of a device.
    """
    import sys

    from megatron.core import optimizer
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
    from torch import Tensor

    from tests.fused_adam_standin import FusedAdam

    divide = HybridDeviceOptimizer._get_sub_optimizer_param_groups

    def divide_device_parameters(hybrid: Any, fraction: float) -> Any:
        of_device = {id(parameter) for group in hybrid.param_groups for parameter in group["params"]}
        is_cuda = property(lambda tensor: id(tensor) in of_device)
        with mock.patch.object(Tensor, "is_cuda", is_cuda), mock.patch.object(Tensor, "cpu", Tensor.clone):
            return divide(hybrid, fraction)

    optimizers = SimpleNamespace(FusedAdam=FusedAdam)
    engine = {name: SimpleNamespace() for name in ("transformer_engine", "transformer_engine.pytorch")}
    others = tuple(flag for flag in host.GPU_ONLY_FLAGS if flag != "--optimizer-cpu-offload")
    with contextlib.ExitStack() as stack:
        # Not patch.dict: it would forget what a launch imports, a part of which the next imports again.
        for name, module in {**engine, "transformer_engine.pytorch.optimizers": optimizers}.items():
            assert name not in sys.modules, "the engine itself"
            sys.modules[name] = module  # type: ignore[assignment]
            stack.callback(sys.modules.pop, name)
        stack.enter_context(mock.patch.object(optimizer, "Adam", FusedAdam))
        stack.enter_context(mock.patch.object(optimizer, "USING_PYTORCH_OPTIMIZER", False))
        stack.enter_context(mock.patch.object(host, "GPU_ONLY_FLAGS", others))
        name = "_get_sub_optimizer_param_groups"
        stack.enter_context(mock.patch.object(HybridDeviceOptimizer, name, divide_device_parameters))
        yield
        print(f"steps of the stand-in: {FusedAdam.steps}")
        FusedAdam.steps = 0


@contextlib.contextmanager
def upcycling() -> Iterator[None]:
    """Repairs three faults of Megatron's upcycling, which no run of 0.19.2 survives.

    It names an argument that ``load_checkpoint`` does not have, builds the dense model from a configuration
    that was made before it cleared ``args.num_experts``, and leaves ``args.moe_ffn_hidden_size`` set.
    """
    from megatron.training import get_args, training
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models.gpt import GPTModelConfig

    load, builder_of = training.load_checkpoint, GPTModelConfig.get_builder_cls

    def load_checkpoint(*args: Any, model: Any = None, **keywords: Any) -> Any:
        return load(*args, **keywords) if model is None else load(model, **keywords)

    def builder_of_arguments(config: GPTModelConfig) -> Any:
        builder, args = builder_of(config), get_args()
        if args.num_experts is not None:
            return builder
        with mock.patch.object(args, "moe_ffn_hidden_size", None):
            dense = gpt_config_from_args(args)
        return lambda _config: builder(dense)

    with (
        mock.patch.object(training, "load_checkpoint", load_checkpoint),
        mock.patch.object(GPTModelConfig, "get_builder_cls", builder_of_arguments),
    ):
        yield


STAND_INS = {
    "": contextlib.nullcontext, "conversations": conversations, "fsdp": fsdp, "graphs": graphs,
    "optimizers": optimizers, "overflows": overflows, "tensor_overlap": tensor_overlap,
    "upcycling": upcycling, "whole_graphs": whole_graphs,
}  # fmt: skip
"""By name."""
