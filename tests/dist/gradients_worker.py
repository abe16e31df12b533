"""Compares an AMPipe layer with a stock layer under autograd and Megatron's DDP; reports by case name."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from tests.dist.cases import AUX, TIGHT, Case, Z
from tests.dist.worker import empty_is_nan, report, start, use_groups

SEQUENCE, BATCH = 32, 2
BASE: dict[str, Any] = {"moe_router_topk": 2, **AUX, **Z}
FROZEN: dict[str, tuple[str, Callable[[str], bool]]] = {
    "router": ("m", lambda name: "router" in name),
    "attention": ("m", lambda name: "self_attention" in name),
    "one-expert": ("m", lambda name: "local_experts.0" in name),
    "all-but-router": ("m", lambda name: "router" not in name),
    "everything": ("m", lambda name: True),
    "everything-of-stack": ("mdm", lambda name: True),
    "first-layer": ("mdm", lambda name: name.startswith("layers.0.")),
    "all-but-second-layer": ("mdm", lambda name: not name.startswith("layers.1.")),
}
"""The layers, and which of their parameters are not trained."""
ROUTINGS: dict[str, Callable[[int, int], int]] = {
    # (rank, row) to expert; experts 0 and 1 are on rank 0, 2 and 3 on rank 1.
    "rank-1-receives-nothing": lambda rank, row: 0 if rank == 0 else row % 2,
    "one-expert-for-all": lambda rank, row: 2,
    "changes-from-chunk-to-chunk": lambda rank, row: (
        row * 4 // SEQUENCE if rank == 0 else 3 - row * 4 // SEQUENCE
    ),
    "ranks-exchange-all": lambda rank, row: 2 + row % 2 if rank == 0 else row % 2,
}


def make_hidden(seed: int) -> Any:
    """``[S, B, D]``, different for every seed and rank."""
    import torch

    from tests.dist.blocks import HIDDEN

    rank = torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn((SEQUENCE, BATCH, HIDDEN), generator=generator).requires_grad_()


def forward(layer: Any, hidden: Any) -> Any:
    """The layer's output."""
    return layer(hidden_states=hidden, attention_mask=None)[0]


def gradients(layer: Any, *inputs: Any) -> dict[str, Any]:
    """Clones of all gradients that are set, by name."""
    found = {f"input {index}": tensor.grad for index, tensor in enumerate(inputs)}
    found |= {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {name: None if gradient is None else gradient.clone() for name, gradient in found.items()}


def compare(stock: dict[str, Any], ours: dict[str, Any]) -> dict[str, float]:
    """Relative differences; infinite if only one side is None."""
    import torch

    from tests.dist.blocks import differences

    missing = {name: torch.zeros(()) for name in stock if stock[name] is None and ours[name] is None}
    unlike = {name for name in stock if (stock[name] is None) != (ours[name] is None)}
    both = stock.keys() - missing.keys() - unlike
    found = differences({name: stock[name] for name in both}, {name: ours[name] for name in both})
    return {name: value if value == value else float("inf") for name, value in found.items()} | dict.fromkeys(
        unlike, float("inf")
    )


STACK = "mdm"
"""Layers that share a schedule: with experts, dense, with experts."""


def layers(
    kinds: str = "m",
    *,
    executor: str = "thread",
    schedule: str = "ampipe",
    degree: int = 4,
    reductions: Any = None,
    **model: Any,
) -> tuple[Any, Any]:
    """A stock layer, or several, and AMPipe's with the same weights, which share a schedule."""
    from tests.dist import logged_losses
    from tests.dist.blocks import build_layers

    # Megatron keeps the losses of as many layers as the first model has.
    logged_losses.clear()
    case = Case(
        "gradients",
        batch=BATCH,
        sequence_length=SEQUENCE,
        layers=kinds,
        stack=0 if len(kinds) > 1 else 1,
        executor=executor,
        schedule=schedule,
        degree=degree,
        model=BASE | model,
    )
    return build_layers(case, reductions=reductions)


# DDP


def run_ddp(
    layer: Any,
    *,
    distributed_optimizer: bool,
    inputs: list[list[Any]],
    reductions: Any = None,
    **ddp_settings: Any,
) -> dict[str, Any]:
    """Run iterations of micro-batches under DDP; returns the reduced gradients and counts of hook calls.

    With ``reductions``, the bucket groups ask there before they reduce.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    settings = DistributedDataParallelConfig(
        overlap_grad_reduce=True,
        use_distributed_optimizer=distributed_optimizer,
        grad_reduce_in_fp32=True,
        bucket_size=4000,
        **ddp_settings,
    )
    model = DistributedDataParallel(getattr(layer, "layers", [layer])[0].config, settings, layer)
    for group in (*model.bucket_groups, *model.expert_parallel_bucket_groups):
        if reductions is not None:
            from megatron_ampipe.launch.hooks import hold_back

            hold_back(group, reductions)
    fired: dict[str, list[int]] = defaultdict(list)
    counts: dict[str, int] = defaultdict(int)
    accumulators = []

    def count(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            counts[name] += 1

        return hook

    for name, parameter in layer.named_parameters():
        accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        accumulator.register_hook(count(name))
        accumulators.append(accumulator)
    main_grads: dict[str, Any] = {}
    for iteration, micro_batches in enumerate(inputs):
        model.zero_grad_buffer()
        for index, hidden in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            with contextlib.nullcontext() if last else model.no_sync():
                forward(model, hidden).square().sum().backward()
            for name, _ in layer.named_parameters():
                fired[name].append(counts.pop(name, 0))
        model.finish_grad_sync()
        for name, parameter in layer.named_parameters():
            main_grads[f"{name} in iteration {iteration}"] = parameter.main_grad.clone()
    return {"main_grad": main_grads, "fired": dict(fired)}


def ddp(
    *,
    fusion: bool = False,
    distributed_optimizer: bool = False,
    routing: str | None = None,
    first_writes: bool = False,
    kinds: str = "m",
    **model: Any,
) -> dict[str, Any]:
    """Run the same iterations with both layers.

    Args:
        fusion: Linear layers add their weights' gradients to ``main_grad``.
        distributed_optimizer: Gradients are reduced to the shards of a distributed optimizer.
        routing: A name in ``ROUTINGS``.
        kinds: Which layers share a schedule.
        first_writes: In the first micro-batch, linear layers overwrite ``main_grad`` instead of adding to it.
        model: Fields of Megatron's configuration.
    """
    with empty_is_nan() if fusion else contextlib.nullcontext():
        pair = layers(kinds, gradient_accumulation_fusion=fusion, **model)
        if first_writes:
            from tests.dist.first_writes import use_first_writes

            for layer in pair:
                use_first_writes(layer)
        if routing is not None:
            for layer in pair:
                route_by_direction(layer)
        found = []
        for layer in pair:
            make = make_hidden if routing is None else lambda _: routed_hidden(routing)
            inputs = [[make(10 * iteration + index) for index in range(3)] for iteration in range(2)]
            found.append(run_ddp(layer, distributed_optimizer=distributed_optimizer, inputs=inputs))
        written = sum(getattr(p, "grad_added_to_main_grad", False) for p in pair[1].parameters())
    stock, ours = found
    return {
        "differences": compare(stock["main_grad"], ours["main_grad"]),
        "fired": ours["fired"],
        "stock fired": stock["fired"],
        "written by fused layers": written,
    }


def same_products(*, fusion: bool) -> dict[str, Any]:
    """The gradients of the same products, computed with those of the inputs and apart."""
    found = []
    for schedule in ("ampipe", "lancet"):
        with empty_is_nan() if fusion else contextlib.nullcontext():
            _, layer = layers(STACK, schedule=schedule, degree=2, gradient_accumulation_fusion=fusion)
            found.append(run_ddp(layer, distributed_optimizer=False, inputs=[[make_hidden(1)]])["main_grad"])
    return {"unequal": [name for name, value in found[0].items() if not value.equal(found[1][name])]}


def handed_over(kinds: str = "m", **settings: Any) -> dict[str, Any]:
    """Where the gradient of each parameter was computed, and where the parameter has it."""
    from megatron_ampipe.runtime.segment import GradientSums

    _, layer = layers(kinds, **settings)
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
    found = {name: p.grad.data_ptr() for name, p in layer.named_parameters() if p.grad is not None}
    return {"computed": computed, "found": found}


def placed(*, distributed_optimizer: bool, schedule: str, degree: int, **ddp_settings: Any) -> dict[str, Any]:
    """Reductions that the schedule places, compared with those that Megatron starts; what stages begin."""
    from megatron_ampipe.runtime.collectives import Transfer
    from megatron_ampipe.runtime.reductions import Reductions

    begun: list[tuple[str, int]] = []
    now = ""

    def enter(stage: Any) -> None:
        nonlocal now
        now = str(stage)

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
    for reductions in (None, Noted(on_cuda=False, of_experts=True)):
        _, layer = layers(STACK, schedule=schedule, degree=degree, reductions=reductions)
        inputs = [[make_hidden(10 * iteration + index) for index in range(2)] for iteration in range(3)]
        with executed_stages(enter):
            ran = run_ddp(
                layer,
                distributed_optimizer=distributed_optimizer,
                inputs=inputs,
                reductions=reductions,
                **ddp_settings,
            )
        found.append(ran["main_grad"])
    return {
        "unequal": [name for name, value in found[0].items() if not value.equal(found[1][name])],
        "fired": ran["fired"],
        "begun": begun,
    }


def placed_fp32() -> dict[str, Any]:
    """With reductions that add in fp32, and whose wait is what adds."""
    from megatron.core.distributed import param_and_grad_buffer

    reduce_scatter = param_and_grad_buffer.dist_reduce_scatter_func
    try:
        return placed(
            distributed_optimizer=True,
            schedule="lancet",
            degree=1,
            reduce_scatter_with_fp32_accumulation=True,
        )
    finally:
        # Megatron sets it for the whole process.
        param_and_grad_buffer.dist_reduce_scatter_func = reduce_scatter


# Autograd


def in_flight(kinds: str = "m") -> dict[str, Any]:
    """Two micro-batches in flight: forward a, forward b, backward a, backward b, in the same layers."""
    found = []
    for layer in layers(kinds):
        a, b = make_hidden(1), make_hidden(2)
        outputs = forward(layer, a), forward(layer, b)
        for output in outputs:
            output.square().sum().backward()
        found.append(gradients(layer, a, b))
    return {"differences": compare(*found)}


def twice() -> dict[str, Any]:
    """A second backward through one forward."""
    _, ours = layers()
    output = forward(ours, make_hidden(1)).sum()
    output.backward(retain_graph=True)
    try:
        output.backward()
    except RuntimeError as error:
        return {"message": str(error)}
    return {"message": None}


def frozen(which: str, *, input_needs_gradient: bool) -> dict[str, Any]:
    """Parameters that are not trained."""
    kinds, is_frozen = FROZEN[which]
    found, requires = [], []
    for layer in layers(kinds):
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(not is_frozen(name))
        hidden = make_hidden(1).detach().requires_grad_(input_needs_gradient)
        output = forward(layer, hidden)
        requires.append(output.requires_grad)
        if output.requires_grad:
            output.square().sum().backward()
        found.append(gradients(layer, hidden) | {"output": output.detach()})
    trained = sum(value is not None for value in found[1].values())
    return {"differences": compare(*found), "requires": requires, "with gradient": trained}


def no_grad(kinds: str = "m") -> dict[str, Any]:
    """Evaluation saves nothing for backward, and keeps no tensor alive."""
    import torch

    from megatron_ampipe.runtime.segment import Segment
    from megatron_ampipe.runtime.stack_call import StackCall
    from megatron_ampipe.runtime.steps import Pass

    def alive() -> int:
        gc.collect()
        return sum(isinstance(thing, Pass | StackCall | Segment) for thing in gc.get_objects())

    saved = 0

    def count(tensor: Any) -> Any:
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
        without = {"saved": saved, "alive": alive(), "requires grad": output.requires_grad}
        with_graph = forward(ours, hidden)
    trained = {"saved": saved, "alive": alive(), "requires grad": with_graph.requires_grad}
    del with_graph
    return {
        "differences": compare({"output": expected}, {"output": output}),
        "without": without,
        "with": trained,
        "left when the output is gone": alive(),
    }


# Hooks of layers and of parameters


HOOKS = (
    "register_forward_pre_hook",
    "register_forward_hook",
    "register_full_backward_pre_hook",
    "register_full_backward_hook",
)


def layer_hooks() -> dict[str, Any]:
    """What is said of every kind of hook, on a layer that shares a schedule with others, and on others."""
    from megatron_ampipe.errors import BadInput

    def message(layer: Any, model: Any, register: str) -> str | None:
        handle = getattr(layer, register)(lambda *_: None)
        try:
            forward(model, make_hidden(1)).sum().backward()
        except BadInput as error:
            return str(error)
        finally:
            handle.remove()
        return None

    _, stack = layers("mm")
    _, alone = layers()
    return {
        "refused": [message(stack.layers[1], stack, register) for register in HOOKS],
        "inside": message(stack.layers[1].mlp.router, stack, "register_forward_hook"),
        "allowed": [message(alone, alone, register) for register in HOOKS],
    }


def parameter_hooks(executor: str) -> dict[str, Any]:
    """When the gradients of each layer of a stack arrive: stages of layers and hooks, in order.

    Returns:
        ``events``: ``[layer, name, None]`` for the hook of a parameter, ``[layer, None, kind]`` for a stage
        of the backward pass.
    """
    _, ours = layers(STACK, executor=executor)
    events: list[tuple[int, str | None, str | None]] = []

    def hook(name: str) -> Callable[..., None]:
        layer = int(name.split(".")[1])
        return lambda *_: events.append((layer, name, None))

    accumulators = []
    for name, parameter in ours.named_parameters():
        accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        accumulator.register_hook(hook(name))
        accumulators.append(accumulator)
    output = forward(ours, make_hidden(1)).sum()
    with executed_stages(lambda stage: events.append((stage.layer, None, stage.kind.name))):
        output.backward()
    return {"events": events, "parameters": [name for name, _ in ours.named_parameters()]}


@contextlib.contextmanager
def executed_stages(tell: Callable[[Any], None]) -> Iterator[None]:
    """Calls ``tell`` with every stage before an executor runs it."""
    from megatron_ampipe.runtime.executors import SequentialExecutor, ThreadExecutor

    def telling(original: Callable[..., None]) -> Callable[..., None]:
        def execute(self: Any, tape: Any, run_call: Callable[[Any], Any], *rest: Any) -> None:
            def run(call: Any) -> Any:
                tell(call.stage)
                return run_call(call)

            original(self, tape, run, *rest)

        return execute

    with contextlib.ExitStack() as stack:
        for kind in (SequentialExecutor, ThreadExecutor):
            stack.enter_context(mock.patch.object(kind, "execute", telling(kind.execute)))
        yield


# Routings that leave experts idle


def route_by_direction(layer: Any) -> None:
    """Make the router select an expert by the direction of the token's vector."""
    import torch

    with torch.no_grad():
        weight = layer.mlp.router.weight
        weight.mul_(0.01)
        weight[:, :4] += 3 * torch.eye(4)


def routed_hidden(routing: str) -> Any:
    """Hidden states whose tokens are routed as in ``ROUTINGS`` (see :func:`route_by_direction`)."""
    import torch

    rank = torch.distributed.get_rank()
    hidden = make_hidden(3).detach()
    hidden[..., :4] = 0
    for row in range(SEQUENCE):
        hidden[row, :, ROUTINGS[routing](rank, row)] = 60
    return hidden.requires_grad_()


def routed(routing: str, **model: Any) -> dict[str, Any]:
    """One pass of both layers with a routing; and the experts of this rank that no token has chosen."""
    found = []
    for layer in layers(moe_router_topk=1, moe_router_pre_softmax=True, **model):
        route_by_direction(layer)
        hidden = routed_hidden(routing)
        output = forward(layer, hidden)
        output.square().sum().backward()
        found.append(gradients(layer, hidden) | {"output": output.detach()})
    idle = [
        int(name.split("local_experts.")[1].split(".")[0])
        for name, gradient in found[1].items()
        if "local_experts" in name and "linear_fc1.weight" in name and not gradient.abs().max() > 0
    ]
    return {"differences": compare(*found), "idle experts": idle}


FUSED_SHARDED = {"fusion": True, "distributed_optimizer": True, "kinds": STACK}
DDP: dict[str, dict[str, Any]] = {
    "": {},
    "-fused": {"fusion": True},
    "-sharded": {"distributed_optimizer": True},
    "-skewed": {"routing": "rank-1-receives-nothing"},
    "-fused-skewed": {"fusion": True, "routing": "one-expert-for-all"},
    "-fused-first-writes": {"fusion": True, "first_writes": True},
    "-fused-first-writes-recompute": {
        "fusion": True, "first_writes": True, "recompute_granularity": "selective",
        "recompute_modules": ["moe"],
    },
    "-stack": {"kinds": STACK},
    "-stack-fused-sharded": FUSED_SHARDED,
    "-lancet": {"routing": "one-expert-for-all", "schedule": "lancet", "degree": 1},
    "-stack-fused-sharded-lancet": FUSED_SHARDED | {"schedule": "lancet", "degree": 1},
    "-joined": {"routing": "one-expert-for-all", "schedule": "joined", "degree": 4},
    "-stack-fused-sharded-joined": FUSED_SHARDED | {"schedule": "joined", "degree": 2},
}  # fmt: skip
CASES: dict[str, Callable[[], dict[str, Any]]] = {
    **{f"ddp{name}": functools.partial(ddp, **settings) for name, settings in DDP.items()},
    "in-flight": in_flight,
    "twice": twice,
    **{
        f"frozen-{which}{'' if needs else '-constant-input'}": functools.partial(
            frozen, which, input_needs_gradient=needs
        )
        for which in FROZEN
        for needs in (True, False)
    },
    "no-grad": no_grad,
    "in-flight-stack": lambda: in_flight(STACK),
    "no-grad-stack": lambda: no_grad(STACK),
    "same-products": lambda: same_products(fusion=False),
    "same-products-fused": lambda: same_products(fusion=True),
    **{
        f"handed-over-{schedule}-{degree}-{executor}": functools.partial(
            handed_over, STACK, schedule=schedule, degree=degree, executor=executor
        )
        for schedule, degree in (("ampipe", 4), ("lancet", 1), ("joined", 2))
        for executor in ("thread", "sequential")
    },
    "placed": lambda: placed(distributed_optimizer=False, schedule="ampipe", degree=2),
    "placed-sharded-lancet": lambda: placed(distributed_optimizer=True, schedule="lancet", degree=1),
    "placed-sharded-fp32": placed_fp32,
    "layer-hooks": layer_hooks,
    "parameter-hooks-thread": lambda: parameter_hooks("thread"),
    "parameter-hooks-sequential": lambda: parameter_hooks("sequential"),
    **{f"routed-{routing}": functools.partial(routed, routing) for routing in ROUTINGS},
    "routed-capacity": lambda: routed("one-expert-for-all", **TIGHT),
    "routed-dropped-unequally": lambda: routed("rank-1-receives-nothing", **TIGHT),
}


def main() -> None:
    start()
    use_groups()
    results: dict[str, object] = {}
    for name in sys.argv[1:] or CASES:
        # The end of the log of a failed launch shows it.
        print(f"case {name}", flush=True)
        try:
            results[name] = CASES[name]()
        except Exception:
            results[name] = {"error": traceback.format_exc()}
    report(results)


if __name__ == "__main__":
    main()
