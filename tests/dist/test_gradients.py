"""One gradient per parameter and micro-batch, and one order of reductions on all ranks.

Under autograd and Megatron's DDP, compared with a stock layer (fp32, two expert-parallel ranks, degree 4).
"""

import contextlib
import gc
import sys
import types
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import megatron_ampipe
from tests import cuda_graph_standin
from tests.algorithm import listed_path
from tests.dist.cases import AUX, IN_MDM, MOE_AGAIN, TOP2, Case, Z
from tests.dist.worker import empty_is_nan

pytestmark = pytest.mark.ranks(2)

TOLERANCE = 1e-5
"""Relative difference; measured: 5e-7."""
ALONE = Case("alone", batch=2, model=TOP2 | AUX | Z)
STACK = replace(ALONE, name="stack", **IN_MDM)
"""Layers that share a schedule: with experts, dense, with experts."""
FROZEN: dict[str, tuple[Case, Callable[[str], bool]]] = {
    "router": (ALONE, lambda name: "router" in name),
    "one-expert": (ALONE, lambda name: "local_experts.0" in name),
    "all-but-router": (ALONE, lambda name: "router" not in name),
    "everything": (ALONE, lambda name: True),
    "everything-of-stack": (STACK, lambda name: True),
    "first-layer": (STACK, lambda name: name.startswith("layers.0.")),
    "all-but-second-layer": (STACK, lambda name: not name.startswith("layers.1.")),
}
"""The layers, and which of their parameters are not trained."""


def inputs(case: Case, number: int = 0, *, routed: bool = False) -> Any:
    """Different for every number and rank.

    If ``routed`` (:func:`route_by_direction`), the first half of the rows goes to the first expert, the other
    to the second: each has rows of some chunks only, and rank 1 receives nothing.
    """
    from tests.dist.blocks import inputs_of

    given = inputs_of(case, rank=torch.distributed.get_rank() + 10 * number, dtype=torch.float32)
    if routed:
        half = case.sequence_length // 2
        given.hidden[..., :4] = 0
        given.hidden[:half, :, 0] = given.hidden[half:, :, 1] = 60
    return given


def route_by_direction(layer: Any) -> None:
    """Make the router select an expert by the direction of the token's vector."""
    with torch.no_grad():
        weight = layer.mlp.router.weight
        weight.mul_(0.01)
        weight[:, :4] += 3 * torch.eye(4)


def train(
    layer: Any, iterations: list[list[Any]], *, reductions: Any = None, sharded: bool = False, **settings: Any
) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
    """Run iterations of micro-batches under DDP; returns the reduced gradients and counts of hook calls.

    With ``reductions``, the bucket groups ask there before they reduce.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from megatron_ampipe.launch.hooks import PlacedReductions
    from tests.dist.blocks import forward

    config = DistributedDataParallelConfig(
        overlap_grad_reduce=True,
        use_distributed_optimizer=sharded,
        grad_reduce_in_fp32=True,
        bucket_size=4000,
        **settings,
    )
    model = DistributedDataParallel(getattr(layer, "layers", [layer])[0].config, config, layer)
    if reductions is not None:
        PlacedReductions(reductions).models_built([model])
    parameters = dict(layer.named_parameters())
    calls: Counter[str] = Counter()
    accumulators = []
    for name, parameter in parameters.items():
        accumulators.append(parameter.expand_as(parameter).grad_fn.next_functions[0][0])
        accumulators[-1].register_hook(lambda *_, name=name: calls.update([name]))
    assert len(accumulators) >= 8
    fired: dict[str, list[int]] = {name: [] for name in parameters}
    main_grads: dict[str, Tensor] = {}
    for iteration, micro_batches in enumerate(iterations):
        model.zero_grad_buffer()
        for given in micro_batches:
            with contextlib.nullcontext() if given is micro_batches[-1] else model.no_sync():
                forward(model, given)[0].backward(given.gradient)
            for name in parameters:
                fired[name].append(calls.pop(name, 0))
        model.finish_grad_sync()
        for name, parameter in parameters.items():
            main_grads[f"{name} in iteration {iteration}"] = parameter.main_grad.clone()
    return main_grads, fired


FUSED = ALONE.model | {"gradient_accumulation_fusion": True}
FUSED_STACK = {"model": FUSED} | IN_MDM
ROUTED = {"model": ALONE.model | {"moe_router_topk": 1}}
FUSED_ROUTED = {"model": FUSED | {"moe_router_topk": 1}}
ENGINE = {"engine": "grouped", "model": FUSED}
DDP: dict[str, dict[str, Any]] = {
    "plain": {},
    "fused": {"model": FUSED},
    "routed": ROUTED,
    "fused-routed": FUSED_ROUTED,
    "engine-fused": ENGINE,
    "engine-fused-recompute": ENGINE | {"model": FUSED | MOE_AGAIN},
    "sharded-stack-fused": FUSED_STACK,
    "lancet-routed": ROUTED | {"schedule": "lancet", "degree": 1},
    "sharded-stack-fused-lancet": FUSED_STACK | {"schedule": "lancet", "degree": 1},
    "joined-routed": ROUTED | {"schedule": "joined"},
    "sharded-stack-fused-joined": FUSED_STACK | {"schedule": "joined", "degree": 2},
    "engine-fused-joined-routed": ENGINE | FUSED_ROUTED | {"schedule": "joined"},
    "sharded-engine-stack-fused-lancet": ENGINE | FUSED_STACK | {"schedule": "lancet", "degree": 2},
    "graphs": {},
    "graphs-stack-fused": FUSED_STACK,
}


@pytest.mark.parametrize("name", DDP)
def test_ddp_sees_every_parameter_once_per_micro_batch(name: str) -> None:
    """Fused layers add gradients of weights to ``main_grad``; the engine's overwrite it in the first one."""
    from tests.dist.blocks import build_layers, capture, wrong

    case, graphs, routed = replace(ALONE, **DDP[name]), "graphs" in name, "routed" in name
    fused = "gradient_accumulation_fusion" in case.model
    recorded = cuda_graph_standin.stand_ins() if graphs else contextlib.nullcontext()
    with recorded, empty_is_nan() if fused else contextlib.nullcontext():
        stock, ours = build_layers(case)
        if graphs:
            capture(ours)
        found = []
        for layer in (stock, ours):
            if routed:
                route_by_direction(layer)
            numbers = ((0, 1, 2), (10, 11, 12))
            given = [[inputs(case, number, routed=routed) for number in three] for three in numbers]
            found.append(train(layer, given, sharded="sharded" in name))
        assert bool(cuda_graph_standin.REPLAYS) or not graphs
    (expected, stock_fired), (main_grads, fired) = found
    assert wrong(expected, main_grads, TOLERANCE) == {}
    assert fired == {parameter: [1] * 6 for parameter in fired} == stock_fired
    if routed and torch.distributed.get_rank() == 1:
        assert not any(value.any() for name, value in main_grads.items() if ".experts." in name)
    written = sum(getattr(p, "grad_added_to_main_grad", False) for p in ours.parameters())
    # Query-key-value, projection, and two layers of two experts; of a dense layer its two layers.
    assert written == (0 if not fused else 6 + 4 + 6 if case.stack == 0 else 6)


@pytest.mark.parametrize(
    ("schedule", "degree", "executor"),
    [("ampipe", 4, "thread"), ("ampipe", 4, "sequential"), ("lancet", 1, "thread"), ("joined", 2, "thread")],
)
def test_a_gradient_is_handed_over_without_a_copy(schedule: str, degree: int, executor: str) -> None:
    """Those of the experts, of the layers above the first, and what the node itself returns."""
    from megatron_ampipe.runtime.segment import GradientSums
    from tests.dist.blocks import build_layers, run_pass

    case = replace(STACK, schedule=schedule, degree=degree, executor=executor)
    _, layer = build_layers(case)
    names = {parameter: name for name, parameter in layer.named_parameters()}
    computed: dict[str, int] = {}
    take = GradientSums.take

    def noted(sums: GradientSums, number: int) -> Any:
        total = take(sums, number)
        if total is not None:
            computed[names[sums.parameters[number]]] = total.data_ptr()
        return total

    with mock.patch.object(GradientSums, "take", noted):
        run_pass(layer, inputs(case))
    assert computed == {name: p.grad.data_ptr() for name, p in layer.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("schedule", "degree", "sharded", "fp32"),
    [("ampipe", 2, False, False), ("lancet", 1, True, False), ("lancet", 1, True, True)],
)
def test_placed_reductions_give_the_same_gradients(
    schedule: str, degree: int, sharded: bool, fp32: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit; what is complete in time starts in a stage of the schedule, in one order on all ranks.

    In fp32 Megatron adds what it has received itself, in the wait.
    """
    from megatron.core.distributed import param_and_grad_buffer

    from megatron_ampipe.runtime.reductions import Reductions
    from tests.dist.blocks import build_layers, wrong

    # Megatron sets it for the whole process.
    reduce_scatter = param_and_grad_buffer.dist_reduce_scatter_func
    monkeypatch.setattr(param_and_grad_buffer, "dist_reduce_scatter_func", reduce_scatter)
    begun: list[int] = []

    class Noted(Reductions):
        """Notes how many start at once."""

        def _start(self, count: int) -> Any:
            works = super()._start(count)
            begun.extend([len(works)] if count else [])
            return works

    case = replace(STACK, schedule=schedule, degree=degree)
    given = [[inputs(case, 10 * iteration + index) for index in range(2)] for iteration in range(3)]
    more = {"reduce_scatter_with_fp32_accumulation": True} if fp32 else {}
    found = []
    for reductions in (None, Noted(on_cuda=False, with_experts=True)):
        _, layer = build_layers(case, reductions=reductions)
        main_grads, fired = train(layer, given, reductions=reductions, sharded=sharded, **more)
        found.append(main_grads)
    assert wrong(*found, 0.0) == {}
    assert fired == {parameter: [1] * 6 for parameter in fired}
    # In the last micro-batch of the second and third iteration: in the first, Megatron counts hooks. In turn
    # of the experts of layer 2, of layer 1, and of layer 0 and its experts.
    assert begun == [2, 1, 2, 2] * 2


def test_a_stage_is_reached_through_the_functions_that_the_design_lists() -> None:
    """docs/design.md, of both chunks of attention in a single layer of degree 2."""
    from megatron_ampipe.layers import attention_stages
    from tests.dist.blocks import build_layers, forward, inputs_of

    case = Case("path", layers="m", degree=2)
    _, layer = build_layers(case)
    inputs = inputs_of(case, rank=torch.distributed.get_rank(), dtype=torch.float32)
    package = Path(megatron_ampipe.__file__).parent
    paths: list[list[str]] = []

    def note(frame: types.FrameType, event: str, _: object) -> None:
        if event != "call" or frame.f_code is not attention_stages.attention.__code__:
            return
        path: list[str] = []
        at: types.FrameType | None = frame
        while at is not None:
            file = Path(at.f_code.co_filename)
            if package in file.parents:
                path.append(f"{file.relative_to(package)}: {at.f_code.co_name}")
            at = at.f_back
        paths.append(path[::-1])

    sys.setprofile(note)
    try:
        forward(layer, inputs)
    finally:
        sys.setprofile(None)
    assert len(paths) == 2
    assert paths[0] == paths[1] == listed_path()


def test_a_second_backward_is_refused() -> None:
    from tests.dist.blocks import build_layers, forward

    output = forward(build_layers(ALONE)[1], inputs(ALONE))[0].sum()
    output.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        output.backward()


@pytest.mark.parametrize("which", FROZEN)
def test_frozen_parameters_get_no_gradient(which: str) -> None:
    from tests.dist.blocks import build_layers, wrong

    case, is_frozen = FROZEN[which]
    for input_needs_gradient in (True, False):
        found = []
        for layer in build_layers(case):
            for name, parameter in layer.named_parameters():
                parameter.requires_grad_(not is_frozen(name))
            hidden = inputs(case).hidden.requires_grad_(input_needs_gradient)
            output, _ = layer(hidden_states=hidden, attention_mask=None)
            assert output.requires_grad == (input_needs_gradient or not which.startswith("everything"))
            if output.requires_grad:
                output.square().sum().backward()
            named = [("input", hidden), *layer.named_parameters()]
            present = {name: tensor.grad for name, tensor in named if tensor.grad is not None}
            found.append(present | {"output": output.detach()})
        assert wrong(*found, TOLERANCE) == {}


@pytest.mark.parametrize("case", [ALONE, STACK], ids=lambda case: case.name)
def test_without_gradients_nothing_is_kept(case: Case) -> None:
    """Evaluation saves nothing for backward, and keeps no tensor alive."""
    from megatron_ampipe.runtime.segment import Segment
    from megatron_ampipe.runtime.stack_call import StackCall
    from megatron_ampipe.runtime.steps import MicroBatchState
    from tests.dist.blocks import build_layers, forward, wrong

    def alive() -> int:
        gc.collect()
        return sum(isinstance(thing, MicroBatchState | StackCall | Segment) for thing in gc.get_objects())

    saved = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal saved
        saved += 1
        return tensor

    stock, ours = build_layers(case)
    given = inputs(case)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        with torch.no_grad():
            expected, _ = forward(stock, given)
            saved = 0
            output, _ = forward(ours, given)
        assert (saved, alive(), output.requires_grad) == (0, 0, False)
        with_graph, _ = forward(ours, given)
    assert saved and alive() and with_graph.requires_grad, "otherwise this would find nothing in any case"
    del with_graph
    assert alive() == 0, "a reference cycle holds the activations"
    assert wrong({"output": expected}, {"output": output}, TOLERANCE) == {}


def test_hooks_on_layers_that_share_a_schedule_are_refused() -> None:
    """Hooks of other layers are not, nor hooks of what is inside of a layer."""
    from megatron_ampipe.errors import BadInput
    from tests.dist.blocks import build_layers, run_pass

    def run(layer: Any, model: Any, register: str) -> None:
        handle = getattr(layer, register)(lambda *_: None)
        try:
            run_pass(model, inputs(ALONE))
        finally:
            handle.remove()

    registers = [
        *("register_forward_pre_hook", "register_forward_hook"),
        *("register_full_backward_pre_hook", "register_full_backward_hook"),
    ]
    _, stack = build_layers(STACK)
    for register in registers:
        with pytest.raises(
            BadInput, match=r"layers that share a schedule run as one.*--ampipe-stack 1"
        ) as said:
            run(stack.layers[1], stack, register)
        assert str(said.value).startswith(f"hook of layer 2 {__name__}.")
    stack.layers[1].forward = stack.layers[1].forward
    with pytest.raises(BadInput, match=r"layer 2: replaced forward: layers that share a schedule"):
        run_pass(stack, inputs(ALONE))
    del stack.layers[1].forward
    run(stack.layers[2].mlp.router, stack, "register_forward_hook")
    _, alone = build_layers(ALONE)
    for register in registers:
        run(alone, alone, register)


def test_fused_products_that_overwrite_gradients_are_refused() -> None:
    """Megatron-FSDP marks its parameters so: of several chunks, the last would be left."""
    from megatron_ampipe.errors import BadInput
    from tests.dist.blocks import build_layers, forward

    _, layer = build_layers(replace(ALONE, model=FUSED))
    layer.mlp.router.weight.overwrite_main_grad = True
    with pytest.raises(BadInput, match="--no-gradient-accumulation-fusion"):
        forward(layer, inputs(ALONE))
