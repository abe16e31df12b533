"""Gradients of two micro-batches under Megatron's data parallelism with ``--overlap-grad-reduce``.

Its hooks add each gradient to ``main_grad``, unless the layer has done so itself, as Transformer Engine's do.
"""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch

from megatron_ampipe import compat
from tests.dist.cases import SHARED, Case, Z
from tests.gpu.test_cuda import BF16_BOUND, IN_BF16, ONE_DEVICE, on_device

if TYPE_CHECKING:
    from tests.dist.blocks import Inputs

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_rank")]

SIZES = {"hidden_size": 256, "ffn_hidden_size": 256, "moe_router_topk": 2, "gated_linear_unit": True}
LOCAL = Case(
    "local", kernel="sdpa", sequence_length=256, replay="replay_forward",
    model=SIZES | Z | IN_BF16 | {"activation_func": "silu"}, **ONE_DEVICE,
)  # fmt: skip


def main_gradients(layer: torch.nn.Module, case: Case, *, turned: bool = False) -> dict[str, torch.Tensor]:
    """What Megatron's optimizer gets after two micro-batches.

    If ``turned``, of a second iteration, for which the weights of linear layers have changed their sign.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.fp8_utils import get_fp8_context

    from tests.dist import routing_records
    from tests.dist.blocks import forward, inputs_of, transformer_config

    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True)
    wrapped = DistributedDataParallel(transformer_config(case), settings, layer)
    for iteration in range(2 if turned else 1):
        wrapped.zero_grad_buffer()
        wrapped.set_is_first_microbatch()
        if iteration:
            with torch.no_grad():
                for name, parameter in layer.named_parameters():
                    if "linear" in name and parameter.dim() > 1:
                        parameter.neg_()
        for rank, last in ((0, False), (1, True)):
            inputs = inputs_of(case, rank=rank, device="cuda", dtype=torch.bfloat16)
            with routing_records.watched(layer, case), contextlib.ExitStack() as stack:
                if not last:
                    stack.enter_context(wrapped.no_sync())
                with get_fp8_context(layer.config, 0):
                    output, _ = forward(wrapped, inputs)
                output.backward(inputs.gradient)
        wrapped.finish_grad_sync()
    return {name: parameter.main_grad.clone() for name, parameter in layer.named_parameters()}


Prepare = Callable[[torch.nn.Module, Case], None]
"""Called with AMPipe's layer before it is compared."""


@pytest.fixture
def compare(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Compares what Megatron's optimizer gets of both layers, and notes what torch says of streams."""
    from tests.dist.blocks import wrong

    def compared(
        case: Case, *, bound: float = BF16_BOUND, turned: bool = False, prepare: Prepare = lambda *_: None
    ) -> None:
        stock, ours = on_device(case)
        prepare(ours, case)
        expected = main_gradients(stock, case, turned=turned)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = main_gradients(ours, case, turned=turned)
        # torch says so once in a process.
        of_streams = [str(warning.message) for warning in said if "AccumulateGrad" in str(warning.message)]
        record_property("AccumulateGrad stream warning", of_streams[0] if of_streams else "none")
        assert wrong(expected, found, bound) == {}

    return compared


def test_local_layers_under_overlapped_reduction(compare: Callable[..., None]) -> None:
    compare(LOCAL)


def test_transformer_engine_under_overlapped_reduction(compare: Callable[..., None]) -> None:
    compare(of_transformer_engine())


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "apart"])
@pytest.mark.parametrize(("schedule", "degree"), [("lancet", 1), ("lancet", 2), ("joined", 2), ("joined", 4)])
def test_transformer_engine_delays_weight_gradients(
    schedule: str, degree: int, fused: bool, compare: Callable[..., None]
) -> None:
    case = of_transformer_engine(gradient_accumulation_fusion=fused, **SHARED)
    compare(dataclasses.replace(case, schedule=schedule, degree=degree))


@pytest.mark.parametrize("schedule", ["ampipe", "joined"])
def test_transformer_engine_in_fp8(
    schedule: str, compare: Callable[..., None], record_property: Callable[[str, object], None]
) -> None:
    """In the second iteration, a quantized weight of the first would have the wrong sign."""
    case = of_transformer_engine(fp8="e4m3")
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    available = {
        "blockwise": FP8GlobalStateManager.is_fp8_block_scaling_available,
        "mxfp8": FP8GlobalStateManager.is_mxfp8_available,
        "tensorwise": FP8GlobalStateManager.is_fp8_available,
    }
    recipe = next((name for name, is_there in available.items() if is_there()[0]), None)
    if recipe is None:
        pytest.skip("needs a GPU with FP8")
    record_property("recipe", recipe)
    # Of 512 rows, a chunk has one tile.
    model = case.model | {"fp8_recipe": recipe}
    case = dataclasses.replace(case, sequence_length=512, schedule=schedule, model=model)
    compare(case, bound=FP8_BOUND, turned=True)


@pytest.mark.parametrize("schedule", ["ampipe", "lancet"])
@pytest.mark.parametrize(
    "recipe", [None, "tensorwise", "blockwise", "mxfp8"], ids=lambda recipe: recipe or "bf16"
)
def test_transformer_engine_over_fixed_rows(
    recipe: str | None, schedule: str, compare: Callable[..., None]
) -> None:
    """Where it takes numbers of rows from the device; one pass in which torch raises if the host waits."""
    # All experts of every token: rounding cannot decide between two that are nearly tied.
    fp8 = {} if recipe is None else {"fp8": "e4m3", "fp8_recipe": recipe}
    case = of_transformer_engine(moe_router_topk=4, **fp8)
    problem = compat.grouped_linear_problem(recipe, torch.cuda.get_device_capability())
    if problem is not None:
        pytest.skip(problem)
    case = dataclasses.replace(
        case, sequence_length=512, replay=None, fixed_rows=True, degree=4, schedule=schedule
    )
    compare(case, bound=BF16_BOUND if recipe is None else FP8_BOUND, turned=True, prepare=learn_budgets)


def learn_budgets(ours: torch.nn.Module, case: Case) -> None:
    """Learn the budgets of fixed rows in a pass with exact rows, and run one with them."""
    from tests.dist.blocks import inputs_of
    from tests.dist.test_fixed_rows import fixed_rows_of

    rows = fixed_rows_of(ours)
    rows.is_watched = True
    inputs = [inputs_of(case, rank=rank, device="cuda", dtype=torch.bfloat16) for rank in (0, 1)]
    for one in inputs:
        run_pass(ours, one)
    rows.end_step()
    rows.learn(2.0)
    rows.is_active = True
    run_pass(ours, inputs[0])
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        run_pass(ours, inputs[1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not rows.overflow(torch.device("cuda")).item()
    for parameter in ours.parameters():
        parameter.grad = None


def run_pass(layer: torch.nn.Module, inputs: "Inputs") -> None:
    """Both passes, in the precision of the layer."""
    from megatron.core.fp8_utils import get_fp8_context

    from tests.dist.blocks import forward

    with get_fp8_context(layer.config, 0):
        output, _ = forward(layer, inputs)
    output.backward(inputs.gradient)


FP8_BOUND = 2**-3
"""Relative to the largest value: a few roundings of e4m3 (2**-4 each), after sums in another order."""


def of_transformer_engine(**model: object) -> Case:
    """``LOCAL`` with layers of Transformer Engine; skips the test where there are none."""
    pytest.importorskip("transformer_engine.pytorch", reason="needs transformer_engine")
    return dataclasses.replace(
        LOCAL,
        name="transformer-engine",
        kernel=None,
        transformer_engine=True,
        model=LOCAL.model | {"gradient_accumulation_fusion": True, "moe_grouped_gemm": True, **model},
    )
