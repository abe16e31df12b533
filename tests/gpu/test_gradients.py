"""Gradients of two micro-batches under Megatron's data parallelism with ``--overlap-grad-reduce``.

Its hooks add each gradient to ``main_grad``, unless the layer has done so itself, as Transformer Engine's do.
"""

import dataclasses
import warnings
from collections.abc import Callable

import pytest
import torch

from tests.dist.cases import Case, Z
from tests.gpu.test_cuda import BF16_BOUND

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_rank")]

SIZES = {"hidden_size": 256, "ffn_hidden_size": 256, "moe_router_topk": 2, "gated_linear_unit": True}
LOCAL = Case(
    "local",
    world_size=1,
    degree=4,
    executor="cuda",
    kernel="sdpa",
    sequence_length=256,
    replay="replay_forward",
    model=SIZES | Z | {"activation_func": "silu", "bf16": True, "moe_router_dtype": "fp32"},
)


def main_gradients(layer: torch.nn.Module, case: Case) -> dict[str, torch.Tensor]:
    """What Megatron's optimizer gets after two micro-batches."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from tests.dist import routing_records
    from tests.dist.blocks import inputs_of, run_pass, transformer_config

    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True)
    wrapped = DistributedDataParallel(transformer_config(case), settings, layer)
    wrapped.zero_grad_buffer()
    for rank, last in ((0, False), (1, True)):
        inputs = inputs_of(case, rank=rank, device="cuda", dtype=torch.bfloat16)
        with routing_records.watched(layer, case):
            if last:
                run_pass(wrapped, inputs)
            else:
                with wrapped.no_sync():
                    run_pass(wrapped, inputs)
    wrapped.finish_grad_sync()
    return {name: parameter.main_grad.clone() for name, parameter in layer.named_parameters()}


def compare(case: Case, record_property: Callable[[str, object], None]) -> None:
    from tests.dist.blocks import build_layers, differences

    stock, ours = (layer.cuda().bfloat16() for layer in build_layers(case))
    expected = main_gradients(stock, case)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = differences(expected, main_gradients(ours, case))
    # torch says so once in a process.
    of_streams = [str(warning.message) for warning in said if "AccumulateGrad" in str(warning.message)]
    record_property("AccumulateGrad stream warning", of_streams[0] if of_streams else "none")
    assert {name: value for name, value in found.items() if not value <= BF16_BOUND} == {}


def test_local_layers_under_overlapped_reduction(record_property: Callable[[str, object], None]) -> None:
    compare(LOCAL, record_property)


def test_transformer_engine_under_overlapped_reduction(
    record_property: Callable[[str, object], None],
) -> None:
    pytest.importorskip("transformer_engine.pytorch", reason="needs transformer_engine")

    case = dataclasses.replace(
        LOCAL,
        name="transformer-engine",
        kernel=None,
        transformer_engine=True,
        model=LOCAL.model | {"gradient_accumulation_fusion": True, "moe_grouped_gemm": True},
    )
    compare(case, record_property)
