"""One gradient per parameter and micro-batch, and one order of reductions on all ranks.

Under autograd and Megatron's DDP, compared with a stock layer (fp32, two expert-parallel ranks, degree 4).
"""

import contextlib
import functools
import gc
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests import cuda_graph_standin
from tests.dist.cases import AUX, MOE_AGAIN, Case, Z
from tests.dist.worker import empty_is_nan

pytestmark = pytest.mark.ranks(2)

TOLERANCE = 1e-5
"""Relative difference; measured: 5e-7."""
SEQUENCE, BATCH = 32, 2
BASE: dict[str, Any] = {"moe_router_topk": 2, **AUX, **Z}
STACK = "mdm"
"""Layers that share a schedule: with experts, dense, with experts."""
FROZEN: dict[str, tuple[str, Callable[[str], bool]]] = {
    "router": ("m", lambda name: "router" in name),
    "one-expert": ("m", lambda name: "local_experts.0" in name),
    "all-but-router": ("m", lambda name: "router" not in name),
    "everything": ("m", lambda name: True),
    "everything-of-stack": (STACK, lambda name: True),
    "first-layer": (STACK, lambda name: name.startswith("layers.0.")),
    "all-but-second-layer": (STACK, lambda name: not name.startswith("layers.1.")),
}
"""The layers, and which of their parameters are not trained."""
ROUTINGS: dict[str, Callable[[int, int], int]] = {
    # (rank, row) to expert; experts 0 and 1 are on rank 0, 2 and 3 on rank 1.
    "rank-1-receives-nothing": lambda rank, row: 0 if rank == 0 else row % 2,
    "one-expert-for-all": lambda rank, row: 2,
    "changes-from-chunk-to-chunk": lambda rank, row: (
        row * 4 // SEQUENCE if rank == 0 else 3 - row * 4 // SEQUENCE
    ),
}


def make_hidden(seed: int) -> Tensor:
    """``[S, B, D]``, different for every seed and rank."""
    from tests.dist.blocks import HIDDEN

    generator = torch.Generator().manual_seed(1000 * seed + torch.distributed.get_rank())
    return torch.randn((SEQUENCE, BATCH, HIDDEN), generator=generator).requires_grad_()


def forward(layer: Any, hidden: Tensor) -> Tensor:
    """The layer's output."""
    output: Tensor = layer(hidden_states=hidden, attention_mask=None)[0]
    return output


def layers(kinds: str = "m", *, reductions: Any = None, **settings: Any) -> tuple[Any, Any]:
    """A stock layer, or several, and AMPipe's with the same weights, which share a schedule.

    ``settings`` are fields of a case, or of Megatron's configuration.
    """
    from tests.dist.blocks import build_layers

    fields = {name: settings.pop(name) for name in ("executor", "schedule", "degree") if name in settings}
    case = Case(
        "gradients",
        batch=BATCH,
        sequence_length=SEQUENCE,
        layers=kinds,
        stack=0 if len(kinds) > 1 else 1,
        model=BASE | settings,
        **fields,
    )
    return build_layers(case, reductions=reductions)


def train(
    layer: Any, inputs: list[list[Tensor]], *, reductions: Any = None, sharded: bool = False, **settings: Any
) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
    """Run iterations of micro-batches under DDP; returns the reduced gradients and counts of hook calls.

    With ``reductions``, the bucket groups ask there before they reduce.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from megatron_ampipe.launch.hooks import hold_back

    config = DistributedDataParallelConfig(
        overlap_grad_reduce=True,
        use_distributed_optimizer=sharded,
        grad_reduce_in_fp32=True,
        bucket_size=4000,
        **settings,
    )
    model = DistributedDataParallel(getattr(layer, "layers", [layer])[0].config, config, layer)
    for group in (*model.bucket_groups, *model.expert_parallel_bucket_groups):
        if reductions is not None:
            hold_back(group, reductions)
    parameters = dict(layer.named_parameters())
    calls: Counter[str] = Counter()
    accumulators = []
    for name, parameter in parameters.items():
        accumulators.append(parameter.expand_as(parameter).grad_fn.next_functions[0][0])
        accumulators[-1].register_hook(lambda *_, name=name: calls.update([name]))
    assert len(accumulators) >= 8
    fired: dict[str, list[int]] = {name: [] for name in parameters}
    main_grads: dict[str, Tensor] = {}
    for iteration, micro_batches in enumerate(inputs):
        model.zero_grad_buffer()
        for index, hidden in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            with contextlib.nullcontext() if last else model.no_sync():
                forward(model, hidden).square().sum().backward()
            for name in parameters:
                fired[name].append(calls.pop(name, 0))
        model.finish_grad_sync()
        for name, parameter in parameters.items():
            main_grads[f"{name} in iteration {iteration}"] = parameter.main_grad.clone()
    return main_grads, fired


TOP1 = {"moe_router_topk": 1, "moe_router_pre_softmax": True}
FUSED_SHARDED = {"fusion": True, "sharded": True, "kinds": STACK}
DDP: dict[str, dict[str, Any]] = {
    "plain": {},
    "fused": {"fusion": True},
    "skewed": {"routing": "rank-1-receives-nothing"} | TOP1,
    "experts-of-one-chunk": {"routing": "changes-from-chunk-to-chunk"} | TOP1,
    "fused-skewed": {"fusion": True, "routing": "one-expert-for-all"},
    "engine-fused": {"engine": True, "fusion": True},
    "engine-fused-recompute": {"engine": True, "fusion": True} | MOE_AGAIN,
    "stack-fused-sharded": FUSED_SHARDED,
    "lancet": {"routing": "one-expert-for-all", "schedule": "lancet", "degree": 1},
    "stack-fused-sharded-lancet": FUSED_SHARDED | {"schedule": "lancet", "degree": 1},
    "joined": {"routing": "one-expert-for-all", "schedule": "joined", "degree": 4},
    "stack-fused-sharded-joined": FUSED_SHARDED | {"schedule": "joined", "degree": 2},
    "engine-fused-joined": {
        "engine": True, "fusion": True, "schedule": "joined", "degree": 4, "routing": "one-expert-for-all",
    },
    "engine-stack-fused-sharded-lancet": FUSED_SHARDED
    | {"engine": True, "schedule": "lancet", "degree": 2},
    "graphs": {"graphs": True},
    "graphs-stack-fused": {"graphs": True, "fusion": True, "kinds": STACK},
}  # fmt: skip


@pytest.mark.parametrize("name", DDP)
def test_ddp_sees_every_parameter_once_per_micro_batch(name: str) -> None:
    compare_under_ddp(**DDP[name])


def compare_under_ddp(
    *,
    kinds: str = "m",
    fusion: bool = False,
    engine: bool = False,
    graphs: bool = False,
    sharded: bool = False,
    routing: str | None = None,
    **settings: Any,
) -> None:
    """With ``fusion``, linear layers add gradients of weights to ``main_grad``.

    Those that are stand-ins of Transformer Engine's (``engine``) overwrite it in the first micro-batch.
    """
    from tests.dist.blocks import capture, wrong
    from tests.te_linear_standin import use_engine

    recorded = cuda_graph_standin.stand_ins() if graphs else contextlib.nullcontext()
    with recorded, empty_is_nan() if fusion else contextlib.nullcontext():
        stock, ours = layers(kinds, gradient_accumulation_fusion=fusion, **settings)
        if graphs:
            capture(ours)
        found = []
        for layer in (stock, ours):
            if engine:
                use_engine(layer, grouped=True)
            if routing is not None:
                route_by_direction(layer)
            make = make_hidden if routing is None else functools.partial(routed_hidden, routing)
            inputs = [[make(10 * iteration + index) for index in range(3)] for iteration in range(2)]
            found.append(train(layer, inputs, sharded=sharded))
        assert bool(cuda_graph_standin.REPLAYS) or not graphs
    (expected, stock_fired), (main_grads, fired) = found
    assert wrong(expected, main_grads, TOLERANCE) == {}
    assert fired == {parameter: [1] * 6 for parameter in fired} == stock_fired
    if routing == "rank-1-receives-nothing" and torch.distributed.get_rank() == 1:
        assert not any(value.any() for name, value in main_grads.items() if "local_experts" in name)
    written = sum(getattr(p, "grad_added_to_main_grad", False) for p in ours.parameters())
    # Query-key-value, projection, and two layers of two experts; of a dense layer its two layers.
    assert written == (0 if not fusion else 6 + 4 + 6 if kinds == STACK else 6)


@pytest.mark.parametrize("fusion", [False, True])
def test_weight_gradients_apart_are_bitwise_the_same(fusion: bool) -> None:
    from tests.dist.blocks import wrong

    found = []
    for schedule in ("ampipe", "lancet"):
        with empty_is_nan() if fusion else contextlib.nullcontext():
            _, layer = layers(STACK, schedule=schedule, degree=2, gradient_accumulation_fusion=fusion)
            found.append(train(layer, [[make_hidden(1)]])[0])
    assert wrong(*found, 0.0) == {}


@pytest.mark.parametrize(
    ("schedule", "degree", "executor"),
    [("ampipe", 4, "thread"), ("ampipe", 4, "sequential"), ("lancet", 1, "thread"), ("joined", 2, "thread")],
)
def test_a_gradient_is_handed_over_without_a_copy(schedule: str, degree: int, executor: str) -> None:
    """Those of the experts, of the layers above the first, and what the node itself returns."""
    from megatron_ampipe.runtime.segment import GradientSums

    _, layer = layers(STACK, schedule=schedule, degree=degree, executor=executor)
    names = {parameter: name for name, parameter in layer.named_parameters()}
    computed: dict[str, int] = {}
    take = GradientSums.take

    def noted(sums: GradientSums, number: int) -> Any:
        total = take(sums, number)
        if total is not None:
            computed[names[sums.parameters[number]]] = total.data_ptr()
        return total

    with mock.patch.object(GradientSums, "take", noted):
        forward(layer, make_hidden(1)).square().sum().backward()
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

    from megatron_ampipe.runtime.collectives import Transfer
    from megatron_ampipe.runtime.executors import ThreadExecutor
    from megatron_ampipe.runtime.reductions import Reductions
    from tests.dist.blocks import wrong

    # Megatron sets it for the whole process.
    reduce_scatter = param_and_grad_buffer.dist_reduce_scatter_func
    monkeypatch.setattr(param_and_grad_buffer, "dist_reduce_scatter_func", reduce_scatter)
    begun: list[tuple[str, int]] = []
    now = ""
    execute = ThreadExecutor.execute

    def telling(self: Any, tape: Any, run_call: Callable[[Any], Any], *rest: Any) -> None:
        def run(call: Any) -> Any:
            nonlocal now
            now = str(call.stage)
            return run_call(call)

        execute(self, tape, run, *rest)

    class Noted(Reductions):
        """Notes what each stage begins: on another thread, when nothing else is in flight."""

        def start_until(self, mark: int) -> Transfer:
            where, transfer = now, super().start_until(mark)
            if transfer.begin is None:
                return transfer

            def begin() -> Any:
                works = transfer.begin()
                begun.append((where, len(works)))
                return works

            return Transfer((), begin=begin)

    found = []
    for reductions in (None, Noted(on_cuda=False, with_experts=True)):
        _, layer = layers(STACK, schedule=schedule, degree=degree, reductions=reductions)
        inputs = [[make_hidden(10 * iteration + index) for index in range(2)] for iteration in range(3)]
        with mock.patch.object(ThreadExecutor, "execute", telling):
            more = {"reduce_scatter_with_fp32_accumulation": True} if fp32 else {}
            main_grads, fired = train(layer, inputs, reductions=reductions, sharded=sharded, **more)
        found.append(main_grads)
    assert wrong(*found, 0.0) == {}
    assert fired == {parameter: [1] * 6 for parameter in fired}
    # In the last micro-batch of the second and third iteration: in the first, Megatron counts hooks.
    in_turn = ["reduce-experts@2", "reduce@1", "reduce", "reduce-experts"]
    assert [where for where, _ in begun] == in_turn * 2
    assert sum(number for _, number in begun) >= 4
    of_ranks: list[Any] = [None, None]
    torch.distributed.all_gather_object(of_ranks, begun)
    assert of_ranks[0] == of_ranks[1]


def test_a_second_backward_is_refused() -> None:
    _, ours = layers()
    output = forward(ours, make_hidden(1)).sum()
    output.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        output.backward()


@pytest.mark.parametrize("which", FROZEN)
def test_frozen_parameters_get_no_gradient(which: str) -> None:
    from tests.dist.blocks import wrong

    kinds, is_frozen = FROZEN[which]
    with_gradient = {}
    for input_needs_gradient in (True, False):
        found = []
        for layer in layers(kinds):
            for name, parameter in layer.named_parameters():
                parameter.requires_grad_(not is_frozen(name))
            hidden = make_hidden(1).detach().requires_grad_(input_needs_gradient)
            output = forward(layer, hidden)
            assert output.requires_grad == (input_needs_gradient or not which.startswith("everything"))
            if output.requires_grad:
                output.square().sum().backward()
            named = [("input", hidden), *layer.named_parameters()]
            present = {name: tensor.grad for name, tensor in named if tensor.grad is not None}
            found.append(present | {"output": output.detach()})
        assert wrong(*found, TOLERANCE) == {}
        with_gradient[input_needs_gradient] = len(found[1])
    # The output is always there, the gradient of the input only if it is required.
    assert with_gradient[True] == with_gradient[False] + 1
    assert with_gradient[False] >= (1 if which.startswith("everything") else 2)


@pytest.mark.parametrize("kinds", ["m", STACK])
def test_without_gradients_nothing_is_kept(kinds: str) -> None:
    """Evaluation saves nothing for backward, and keeps no tensor alive."""
    from megatron_ampipe.runtime.segment import Segment
    from megatron_ampipe.runtime.stack_call import StackCall
    from megatron_ampipe.runtime.steps import Pass
    from tests.dist.blocks import wrong

    def alive() -> int:
        gc.collect()
        return sum(isinstance(thing, Pass | StackCall | Segment) for thing in gc.get_objects())

    saved = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal saved
        saved += 1
        return tensor

    stock, ours = layers(kinds)
    hidden = make_hidden(1)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        with torch.no_grad():
            expected = forward(stock, hidden)
            saved = 0
            output = forward(ours, hidden)
        assert (saved, alive(), output.requires_grad) == (0, 0, False)
        with_graph = forward(ours, hidden)
    assert saved and alive() and with_graph.requires_grad, "otherwise this would find nothing in any case"
    del with_graph
    assert alive() == 0, "a reference cycle holds the activations"
    assert wrong({"output": expected}, {"output": output}, TOLERANCE) == {}


def test_hooks_on_layers_that_share_a_schedule_are_refused() -> None:
    """Hooks of other layers are not, nor hooks of what is inside of a layer."""
    from megatron_ampipe.errors import BadInput

    def run(layer: Any, model: Any, register: str) -> None:
        handle = getattr(layer, register)(lambda *_: None)
        try:
            forward(model, make_hidden(1)).sum().backward()
        finally:
            handle.remove()

    registers = [
        *("register_forward_pre_hook", "register_forward_hook"),
        *("register_full_backward_pre_hook", "register_full_backward_hook"),
    ]
    _, stack = layers("mm")
    for register in registers:
        with pytest.raises(
            BadInput, match=r"layers that share a schedule run as one.*--ampipe-stack 1"
        ) as said:
            run(stack.layers[1], stack, register)
        assert str(said.value).startswith(f"hook of layer 2 {__name__}.")
    run(stack.layers[1].mlp.router, stack, "register_forward_hook")
    _, alone = layers()
    for register in registers:
        run(alone, alone, register)


def test_fused_products_that_overwrite_gradients_are_refused() -> None:
    """Megatron-FSDP marks its parameters so: of several chunks, the last would be left."""
    from megatron_ampipe.errors import BadInput

    _, layer = layers(gradient_accumulation_fusion=True)
    layer.mlp.router.weight.overwrite_main_grad = True
    with pytest.raises(BadInput, match="--no-gradient-accumulation-fusion"):
        forward(layer, make_hidden(1))


def route_by_direction(layer: Any) -> None:
    """Make the router select an expert by the direction of the token's vector."""
    with torch.no_grad():
        weight = layer.mlp.router.weight
        weight.mul_(0.01)
        weight[:, :4] += 3 * torch.eye(4)


def routed_hidden(routing: str, seed: int) -> Tensor:
    """Hidden states whose tokens are routed as in ``ROUTINGS`` (see :func:`route_by_direction`)."""
    hidden = make_hidden(seed).detach()
    hidden[..., :4] = 0
    for row in range(SEQUENCE):
        hidden[row, :, ROUTINGS[routing](torch.distributed.get_rank(), row)] = 60
    return hidden.requires_grad_()
