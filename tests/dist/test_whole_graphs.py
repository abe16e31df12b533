"""Blocks whose passes are one CUDA graph each, over a stand-in for graphs, compared with stock."""

import contextlib
import dataclasses
import itertools
import math
import weakref
from collections.abc import Collection, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_ampipe.schedule import KEEP, Partner
from tests import cuda_graph_standin, deep_ep_standin
from tests.dist.cases import (
    ALL_TO_ALL,
    FIXED_ROWS,
    GLOBAL_AUX,
    GRAPH_MODULES,
    HYBRID,
    LARGE,
    LATENT_EXPERTS,
    SHARED,
    TP,
    Case,
)
from tests.dist.test_cuda_graphs import INTERLEAVED, MOVED, ORDERS, move_parameters

TOLERANCE = 1e-5
PASSES = 5
"""One learns budgets, one warms up, one captures, two replay."""
OPTIONS: dict[str, Any] = {"fixed_rows": True, "executor": "sequential"}
STACK = OPTIONS | {"layers": "mm", "stack": 0}
_ALIKE = (
    "degree2", "stack2", "one-expert-each", "probs-on-input", "odd-ffn", "lancet", "lancet-uncut",
    "ep4-degree2", "latent", "layernorm-moe", "tp-experts-lancet", "hybridep-degree2",
    "hybridep-one-expert-each", "hybridep-bias-capacity", "hybridep-probs-on-input", "hybridep-latent",
    "hybridep-tp-experts", "hybridep-engine-lancet", "engine-degree2", "engine-ep1", "engine-ep4-bias",
    "engine-moe-act", "engine-probs-on-input", "engine-tp-experts-lancet",
)  # fmt: skip
"""Cases that capture nothing that no other case has."""
CASES = [
    # On the calling thread: a capture does not see what others do.
    *(
        dataclasses.replace(case, executor="cuda" if case.executor == "cuda" else "sequential")
        for case in FIXED_ROWS
        # Memory strategies are refused with graphs.
        if case.memory == KEEP and case.name.removeprefix("fixed-") not in _ALIKE
    ),
    Case("fixed-cuda-executor-lancet", fixed_rows=True, executor="cuda", schedule="lancet", model=LARGE),
    Case("fixed-latent-experts", model=LATENT_EXPERTS | GLOBAL_AUX, **OPTIONS),
    Case(
        "fixed-joined-stack-tp", schedule="joined", layers="mm", stack=0, parallel=TP, model=LARGE, **OPTIONS
    ),
    Case(
        "fixed-fused", layers="mm", stack=0, model=LARGE | {"gradient_accumulation_fusion": True}, **OPTIONS
    ),
]


@pytest.fixture(autouse=True)
def _stand_ins() -> Any:
    from megatron_ampipe.exchange import fixed_rows

    deep_ep_standin.install()
    with cuda_graph_standin.stand_ins(), mock.patch.object(fixed_rows, "PADDING", math.nan):
        yield


def captured(
    case: Case, reductions: Any = None, *, modules: Collection[str] | None = None
) -> tuple[torch.nn.Module, torch.nn.Module, Any]:
    """Megatron's layers, and AMPipe's with graphs of whole passes, or of the stages of these modules; and the
    state of their fixed rows."""
    from megatron_ampipe.layers.context import WHOLE_PASSES
    from tests.dist.blocks import build_layers, capture
    from tests.dist.test_fixed_rows import fixed_rows_of

    stock, ours = build_layers(case, reductions=reductions)
    capture(ours, WHOLE_PASSES if modules is None else modules)
    state = fixed_rows_of(ours)
    state.is_watched = True
    return stock, ours, state


def set_budgets(state: Any, *, at_least: int = 8, device: str = "cpu") -> None:
    """Learn budgets of the passes so far, large enough for other inputs; passes then use them."""
    state.end_step()
    state.learn(3.0)
    for chunk in state._chunks:
        use_budget(chunk, lambda rows: max(rows, at_least), device=device)
    state.is_active = True


def use_budget(chunk: Any, change: Any, *, device: str = "cpu") -> None:
    """Change the number of rows of each pair of ranks."""
    rows = tuple(tuple(map(change, row)) for row in chunk.budget.rows)
    chunk.use(dataclasses.replace(chunk.budget, rows=rows), torch.device(device))


def context_of(ours: Any) -> Any:
    """What AMPipe's layers share."""
    return getattr(ours, "layers", [ours])[0]._block.context


def exceeds(state: Any) -> bool:
    """Whether a count of the passes since the last step was above its budget."""
    return bool(state.overflow(torch.device("cpu")))


def of_ranks(cases: list[Case]) -> list[Any]:
    """The cases as parameters, each on its ranks."""
    return [pytest.param(case, id=case.name, marks=pytest.mark.ranks(case.world_size)) for case in cases]


def zero_main_grads(*layers: torch.nn.Module) -> None:
    """As Megatron's data parallelism before a step."""
    for layer in layers:
        for parameter in layer.parameters():
            if hasattr(parameter, "main_grad"):
                parameter.main_grad.zero_()
                parameter.grad_added_to_main_grad = False


def change_weights(*layers: torch.nn.Module) -> None:
    """As an optimizer does: in place."""
    with torch.no_grad():
        for layer in layers:
            for parameter in layer.parameters():
                parameter.mul_(0.9)


@pytest.mark.parametrize("case", of_ranks(sorted(CASES, key=lambda case: str(case.parallel))))
def test_replays_equal_stock(case: Case) -> None:
    from tests.dist.blocks import inputs_of, run, wrong

    stock, ours, state = captured(case)
    rank = torch.distributed.get_rank()
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number in range(PASSES):
        inputs = inputs_of(case, rank=rank + 10 * number, dtype=torch.float32)
        if inputs.rotary is not None:
            inputs = inputs._replace(rotary=inputs.rotary * (1 + number))
        zero_main_grads(stock, ours)
        expected, found = (run(layer, case, inputs=inputs) for layer in (stock, ours))
        assert wrong(expected, found, TOLERANCE) == {}, f"pass {number} differs from stock"
        # One graph for each pass of the stack.
        assert len(cuda_graph_standin.REPLAYS) == 2 * max(0, number - 1)
        if number == 0:
            set_budgets(state)
        assert not exceeds(state), "the budgets of the test are too small"
        with_gradient = [p for p in ours.parameters() if not getattr(p, "grad_added_to_main_grad", False)]
        returned = [*found.values(), *(parameter.grad for parameter in with_gradient)]
        kept += [(tensor, tensor.clone()) for tensor in returned if tensor is not None]
        change_weights(stock, ours)
    assert all(torch.equal(*pair) for pair in kept), "what a pass has returned is overwritten by a later one"


IN_FLIGHT = Case("in-flight", degree=2, layers="mm", rope=True, model=LARGE | SHARED, **OPTIONS)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("orders", "stack"),
    [
        pytest.param([ORDERS["1f1b"]], 0, id="1f1b"),
        pytest.param([*reversed(ORDERS.values())], 0, id="changing"),
        pytest.param([*INTERLEAVED.values()], 1, id="interleaved-changing"),
    ],
)
def test_several_micro_batches_in_flight(orders: list[str], stack: int) -> None:
    from tests.dist.blocks import wrong
    from tests.dist.micro_batches import step_in_order

    stock, ours, state = captured(dataclasses.replace(IN_FLIGHT, stack=stack))
    for number in range(max(4, len(orders) + 2)):
        order = orders[number % len(orders)]
        found = []
        for layer in (stock, ours):
            layer.zero_grad()
            model_chunks = layer.layers if ".1" in order else ()
            found.append(step_in_order(layer, IN_FLIGHT, order, model_chunks=model_chunks))
        assert wrong(*found, TOLERANCE) == {}, f"iteration {number}, {order}"
        if number == 0:
            set_budgets(state)
        assert not exceeds(state), "the budgets of the test are too small"
    assert cuda_graph_standin.REPLAYS and cuda_graph_standin.num_reused()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("model", [LARGE, LARGE | HYBRID], ids=["alltoall", "hybridep"])
def test_budgets_that_change_are_captured_again_and_exceeded_ones_are_seen(model: dict[str, Any]) -> None:
    from megatron_ampipe.exchange.flex import HybridEPTransport
    from tests.dist.blocks import inputs_of, run, wrong

    case = Case("budgets", degree=2, layers="mm", stack=1, model=model, stock=ALL_TO_ALL, **OPTIONS)
    stock, ours, state = captured(case)
    rank = torch.distributed.get_rank()

    def step(number: int) -> tuple[dict[str, float], int]:
        """What differs from stock, and how many graphs were replayed."""
        state.begin_step()
        before = len(cuda_graph_standin.REPLAYS)
        inputs = inputs_of(case, rank=rank + 10 * number, dtype=torch.float32)
        expected, found = (run(layer, case, inputs=inputs) for layer in (stock, ours))
        return wrong(expected, found, TOLERANCE), len(cuda_graph_standin.REPLAYS) - before

    assert step(0) == ({}, 0)
    set_budgets(state)
    # Both stacks warm up, then are captured.
    assert [step(number) for number in range(3)] == [({}, 0), ({}, 4), ({}, 4)]
    graphs = [weakref.ref(graph) for graph in cuda_graph_standin.CAPTURED]
    use_budget(state._chunks[0], lambda rows: rows + 1)
    assert step(3) == ({}, 4) and step(4) == ({}, 4)
    # The graphs of the other stack stay.
    assert len(graphs) == len(cuda_graph_standin.CAPTURED) == 4
    assert sum(graph() is not None for graph in graphs) == 2
    assert not exceeds(state)
    use_budget(state._chunks[-1], lambda rows: rows // 8)
    _, captured_now = step(5)
    assert captured_now == 4 and exceeds(state)
    # Every replay counts anew.
    state.begin_step()
    assert not exceeds(state)
    _, replayed = step(5)
    assert replayed == 4 and exceeds(state)
    # The repeat of a step has exact rows, and no graph.
    state.is_active = False
    assert step(5) == ({}, 0)
    state.is_active = True
    use_budget(state._chunks[-1], lambda rows: 64)
    assert step(5) == ({}, 4) and not exceeds(state)
    # A pass of longer sequences, for which HybridEP replaces the memory that graphs use.
    graphs = [weakref.ref(graph) for graph in cuda_graph_standin.CAPTURED]
    state.is_active = False
    with mock.patch.object(HybridEPTransport, "_most_tokens", 16):
        run(ours, dataclasses.replace(case, sequence_length=64), rank=rank)
    state.is_active = True
    assert step(6) == ({}, 4)
    num_kept = sum(graph() is not None for graph in graphs)
    assert num_kept == (0 if "moe_flex_dispatcher_backend" in model else len(graphs))


_ROUTER = ("moe_router", "moe_preprocess")
STAGES: dict[str, tuple[Collection[str], dict[str, Any]]] = {
    # Sizes of captured stages are budgets.
    "documents": (_ROUTER, {"documents": ((0, 5, 20), (0, 31), (0,)), "batch": 3, "rope": True}),
    "hybridep": (_ROUTER, {"model": LARGE | HYBRID}),
    "memory": (GRAPH_MODULES, {"memory": "redispatch", "model": LARGE | SHARED}),
    # As with a custom router: no captured stage depends on budgets, so a repeat has graphs, too.
    "attention": (("attn",), {}),
}
"""What forbids graphs of whole passes, the modules of which stages are captured then, and the case."""


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", STAGES)
def test_graphs_of_stages_follow_budgets_and_see_exceeded_ones(name: str) -> None:
    from tests.dist.blocks import inputs_of, run, wrong

    modules, changes = STAGES[name]
    changes = OPTIONS | {"model": LARGE, "stock": ALL_TO_ALL} | changes
    case = Case("stages", degree=2, layers="mm", stack=1, **changes)
    stock, ours, state = captured(case, modules=modules)
    rank = torch.distributed.get_rank()

    def step(number: int, *, is_active: bool = True) -> int:
        """The graphs that were replayed; what the step computes is compared if no budget was exceeded."""
        state.is_active = is_active
        state.begin_step()
        before = len(cuda_graph_standin.REPLAYS)
        inputs = inputs_of(case, rank=rank + 10 * number, dtype=torch.float32)
        expected, found = (run(layer, case, inputs=inputs) for layer in (stock, ours))
        assert wrong(expected, found, TOLERANCE) == {} or (is_active and exceeds(state)), f"step {number}"
        change_weights(stock, ours)
        return len(cuda_graph_standin.REPLAYS) - before

    assert step(0, is_active=False) == 0
    set_budgets(state)
    warm_up, captured_now, replayed = (step(number) for number in range(1, 4))
    depends = name != "attention"
    assert captured_now == replayed > 0 and warm_up == (0 if depends else replayed)
    assert not exceeds(state)
    # Of the first stack; graphs without sizes of budgets stay.
    graphs = [weakref.ref(graph) for graph in cuda_graph_standin.CAPTURED]
    use_budget(state._chunks[0], lambda rows: rows + 1)
    assert step(4) == step(5) == replayed
    num_kept = sum(graph() is not None for graph in graphs)
    assert num_kept == (len(graphs) // 2 if depends else len(graphs))
    use_budget(state._chunks[-1], lambda rows: rows // 8)
    for number in (6, 7):
        assert step(number) == replayed and exceeds(state)
    # The repeat has exact rows, and another budget follows.
    assert step(7, is_active=False) == (0 if depends else replayed)
    use_budget(state._chunks[-1], lambda rows: 192)
    assert step(8) == step(9) == replayed and not exceeds(state)


def move_losses(layer: torch.nn.Module) -> None:
    """As in a loop that makes new tensors for what routers log, and for the factor of their losses."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    from tests.dist import logged_losses

    logged_losses.move()
    scale = MoEAuxLossAutoScaler.main_loss_backward_scale
    if scale is not None:
        MoEAuxLossAutoScaler.main_loss_backward_scale = scale.clone()


ALL_MOVED = [*MOVED, (Case("losses", model=LARGE), move_losses)]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("case", "move"), [pytest.param(*pair, id=pair[0].name) for pair in ALL_MOVED])
def test_graphs_whose_memory_has_moved_are_captured_again(case: Case, move: Any) -> None:
    from tests.dist.blocks import run, wrong

    case = dataclasses.replace(case, **OPTIONS)
    stock, ours, state = captured(case)
    rank = torch.distributed.get_rank()
    for number in range(PASSES):
        zero_main_grads(stock, ours)
        expected, found = (run(layer, case, rank=rank + 10 * number) for layer in (stock, ours))
        assert wrong(expected, found, TOLERANCE) == {}, f"pass {number} differs from stock"
        if number == 0:
            set_budgets(state)
        change_weights(stock, ours)
        move(stock)
        move(ours)
    assert len(cuda_graph_standin.REPLAYS) == 2 * (PASSES - 2)


def note_hooks(layer: torch.nn.Module) -> list[str]:
    """A list to which hooks of parameters write: before their module runs, and when they have a gradient."""
    called: list[str] = []

    def noting(name: str) -> Any:
        hook = lambda *_: called.append(name)  # noqa: E731
        hook.__module__ = "megatron.core.distributed.test"
        return hook

    for name, module in layer.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.register_forward_pre_hook(noting(f"before {name}"))
    for name, parameter in layer.named_parameters():
        parameter.register_post_accumulate_grad_hook(noting(f"gradient of {name}"))
    return called


@pytest.mark.ranks(2)
def test_hooks_of_parameters_run_in_every_pass_and_in_its_order() -> None:
    """What waits for parameters before the launch, and what starts reductions after it."""
    from tests.dist.blocks import run

    case = Case("hooks", degree=2, model=LARGE | SHARED, **STACK)
    _, ours, state = captured(case)
    called = note_hooks(ours)
    by_pass: list[tuple[set[str], list[str]]] = []
    for number in range(PASSES):
        called.clear()
        run(ours, case, rank=number)
        gradients = [name for name in called if name.startswith("gradient")]
        by_pass.append(({*called} - {*gradients}, gradients))
        if number == 0:
            set_budgets(state)
    before, gradients = by_pass[0]
    assert len(before) > 10 and len(gradients) == len({*gradients}) > 10
    assert by_pass == [by_pass[0]] * PASSES


NUM_MICROBATCHES = 4
FUSED = LARGE | {"gradient_accumulation_fusion": True}
EXPERTS = [f"reduce layers.{{}}.mlp.experts.local_experts.{expert}.linear_fc1.weight" for expert in range(2)]
ATTENTION, ROUTER = "reduce layers.{}.input_layernorm.weight", "reduce layers.{}.mlp.router.weight"
LAST = [ATTENTION.format(0), ROUTER.format(0)]


def of_layer(layer: int, *reductions: str) -> list[str]:
    return [reduction.format(layer) for reduction in reductions]


PLACED_BETWEEN = [of_layer(1, *EXPERTS), of_layer(1, ROUTER) + of_layer(0, *EXPERTS), LAST]
"""Of the experts of layer 1; of the rest of it, and of the experts of layer 0; of the rest."""
REDUCED: dict[str, tuple[dict[str, Any], list[list[str]]]] = {
    "placed": ({"schedule": "ampipe"}, PLACED_BETWEEN),
    "placed-lancet-recomputed": ({"schedule": "lancet", "recompute": 1}, PLACED_BETWEEN),
    "overlapped": ({"executor": "cuda"}, [of_layer(1, *EXPERTS, ROUTER), of_layer(0, *EXPERTS) + LAST]),
}
"""What is changed in the case; what starts after each graph of the last backward pass, as buckets that are
named after a parameter. Linear layers add gradients to what is reduced."""


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", REDUCED)
def test_reductions_start_between_graphs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the last micro-batch of a step, in one order on all ranks, and when the gradients are complete."""
    from megatron_ampipe.runtime.reductions import Reductions
    from tests.dist.blocks import inputs_of, wrong
    from tests.dist.test_gradients import train

    changes, after_graphs = REDUCED[name]
    case = dataclasses.replace(Case(name, degree=2, model=FUSED, **STACK), **changes)
    reductions = Reductions(on_cuda=False, with_experts=True) if "placed" in name else None
    stock, ours, state = captured(case, reductions)
    context_of(ours).overlaps_reductions = True
    rank = torch.distributed.get_rank()
    events = note_reductions(ours, monkeypatch)

    def steps(*, learns: bool) -> Iterator[list[Any]]:
        """Two micro-batches each."""
        for number in range(PASSES):
            yield [
                inputs_of(case, rank=rank + 20 * number + 10 * second, dtype=torch.float32)
                for second in range(2)
            ]
            if learns and number == 0:
                set_budgets(state)

    expected, _ = train(stock, steps(learns=False), sharded=True)
    events.clear()
    found, fired = train(ours, steps(learns=True), reductions=reductions, sharded=True)
    assert wrong(expected, found, TOLERANCE) == {}
    assert fired == {parameter: [1] * 2 * PASSES for parameter in fired}
    assert not exceeds(state), "the budgets of the test are too small"
    backward = [["graph", *started] for started in after_graphs]
    first = ["micro-batch", *["graph"] * (1 + len(backward))]
    last = ["micro-batch", "graph", *itertools.chain.from_iterable(backward)]
    # Of the second step, the first micro-batch warms up.
    steps_with_graphs = [*last, *(first + last) * (PASSES - 2)]
    assert events[-len(steps_with_graphs) :] == steps_with_graphs
    of_ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(of_ranks, events)
    assert of_ranks == [events] * len(of_ranks)


def note_reductions(layer: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list to which micro-batches, launches of graphs and Megatron's reductions of gradients write."""
    from megatron.core.distributed import param_and_grad_buffer

    from tests.dist import blocks

    events: list[str] = []
    names = {parameter: name for name, parameter in layer.named_parameters()}
    groups = param_and_grad_buffer._ParamAndGradBucketGroup
    forward, start, replay = blocks.forward, groups.start_grad_sync, cuda_graph_standin.RecordedGraph.replay

    def begin(*given: Any) -> Any:
        events.append("micro-batch")
        return forward(*given)

    def reduce(group: Any, *options: Any, **more: Any) -> None:
        start(group, *options, **more)
        parameters = [parameter for bucket in group.buckets for parameter in bucket.params_list]
        events.append("reduce " + min(names.get(parameter, "") for parameter in parameters))

    def launch(graph: Any) -> None:
        events.append("graph")
        replay(graph)

    monkeypatch.setattr(blocks, "forward", begin)
    monkeypatch.setattr(groups, "start_grad_sync", reduce)
    monkeypatch.setattr(cuda_graph_standin.RecordedGraph, "replay", launch)
    # Megatron sets it for the whole process.
    monkeypatch.setattr(
        param_and_grad_buffer, "dist_reduce_scatter_func", param_and_grad_buffer.dist_reduce_scatter_func
    )
    return events


PARTNERED = {
    "stack": (Partner(), {}, 0),
    "degree2-lancet-recomputed": (Partner(2), {"schedule": "lancet", "recompute": 1}, 0),
    "fused-cuda-executor": (Partner(), {"executor": "cuda", "model": FUSED}, 1),
}
"""Partner, what is changed in the case, and layers that share a schedule."""


class Steps:
    """Steps of micro-batches with partners, each compared with the same step of Megatron's layers."""

    def __init__(self, case: Case, partner: Partner) -> None:
        from megatron_ampipe.runtime.partners import Partners

        self.case, self.partner = case, partner
        self.stock, self.ours, self.state = captured(case)
        context_of(self.ours).partners = Partners()
        self._num_steps = 0
        self.found: dict[str, torch.Tensor] = {}

    def run(self, number: int = NUM_MICROBATCHES) -> tuple[dict[str, float], int]:
        """What differs from stock, and how many graphs were replayed; then change weights."""
        from tests.dist.blocks import wrong
        from tests.dist.micro_batches import step

        self._num_steps += 1
        self.state.begin_step()
        before = len(cuda_graph_standin.REPLAYS)
        zero_main_grads(self.stock, self.ours)
        for layer in (self.stock, self.ours):
            layer.zero_grad()
        options: dict[str, Any] = {"number": number, "first": 100 * self._num_steps}
        expected = step(self.stock, self.case, **options)
        self.found = step(self.ours, self.case, partner=self.partner, **options)
        change_weights(self.stock, self.ours)
        return wrong(expected, self.found, TOLERANCE), len(cuda_graph_standin.REPLAYS) - before

    @property
    def links(self) -> list[Any]:
        """The graphs of the step that was run last, in the order of their captures."""
        return context_of(self.ours).partners.graphs._chain.links  # type: ignore[no-any-return]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", PARTNERED)
def test_a_step_with_partners_is_a_chain_of_graphs(name: str) -> None:
    partner, changes, stack = PARTNERED[name]
    steps = Steps(dataclasses.replace(IN_FLIGHT, stack=stack, **changes), partner)
    called = note_hooks(steps.ours)
    # The first forward pass and the last backward pass are alone.
    per_step = (NUM_MICROBATCHES + 1) * (1 if stack == 0 else 2)
    returned: list[tuple[torch.Tensor, torch.Tensor]] = []
    orders: list[list[str]] = []
    waits: list[set[str]] = []
    for number in range(PASSES):
        called.clear()
        assert steps.run() == ({}, per_step if number > 1 else 0), f"step {number}"
        if number == 0:
            set_budgets(steps.state)
        assert not exceeds(steps.state), "the budgets of the test are too small"
        returned += [(tensor, tensor.clone()) for tensor in steps.found.values()]
        orders.append([name for name in called if name.startswith("gradient")])
        waits.append({*called} - {*orders[-1]})
    assert all(torch.equal(*pair) for pair in returned), "a later step overwrites what a step has returned"
    assert len({*cuda_graph_standin.REPLAYS}) == 1 and cuda_graph_standin.num_reused()
    # Steps without graphs, too.
    assert len(orders[0]) > 10 * NUM_MICROBATCHES and orders == [orders[0]] * PASSES
    assert len(waits[0]) > 10 and waits == [waits[0]] * PASSES
    # Graphs that were replayed in another order would read what others have written over: even indices.
    links, num_stacks = steps.links, per_step // (NUM_MICROBATCHES + 1)
    links[num_stacks], links[2 * num_stacks] = links[2 * num_stacks], links[num_stacks]
    with pytest.raises(IndexError, match="index out of range"):
        steps.run()


def pool_bytes(pool: Any) -> int:
    """The memory of a pool."""
    return sum(block.num_bytes for block in cuda_graph_standin.POOLS[pool].blocks)


def move_all(layer: torch.nn.Module) -> None:
    """Parameters, and what routers log."""
    move_parameters(layer)
    move_losses(layer)


@contextlib.contextmanager
def third_micro_batch(layer: torch.nn.Module, change: Any) -> Iterator[None]:
    """The inputs of the third micro-batch of a step are changed."""
    from tests.dist import micro_batches

    forward, calls = micro_batches.forward, itertools.count()

    def run(called: torch.nn.Module, inputs: Any) -> Any:
        is_third = called is layer and next(calls) == 2
        return forward(called, change(inputs) if is_third else inputs)

    with mock.patch.object(micro_batches, "forward", run):
        yield


def fail(_inputs: Any) -> Any:
    raise RuntimeError("halfway")


def shorten(inputs: Any) -> Any:
    """As a loop that gives micro-batches of several lengths."""
    return inputs._replace(hidden=inputs.hidden.detach()[:-8].requires_grad_(), rotary=inputs.rotary[:-8])


@pytest.mark.ranks(2)
def test_the_graphs_of_a_step_with_partners_are_captured_again() -> None:
    steps = Steps(dataclasses.replace(IN_FLIGHT, stack=1), Partner())
    state = steps.state
    full = 2 * (NUM_MICROBATCHES + 1)
    assert steps.run() == ({}, 0)
    set_budgets(state)
    assert [steps.run() for _ in range(3)] == [({}, 0), ({}, full), ({}, full)]
    first = [weakref.ref(link.graph) for link in steps.links]
    use_budget(state._chunks[0], lambda rows: rows + 1)
    assert [steps.run() for _ in range(2)] == [({}, full)] * 2
    assert not any(graph() for graph in first) and len(cuda_graph_standin.CAPTURED) == full
    move_all(steps.stock)
    move_all(steps.ours)
    assert [steps.run() for _ in range(2)] == [({}, full)] * 2
    # A step with fewer micro-batches has other graphs, and those of the others stay.
    assert [steps.run(2) for _ in range(3)] == [({}, 0), ({}, 6), ({}, 6)]
    kept = [*cuda_graph_standin.CAPTURED]
    # Later passes use memory that earlier ones have freed.
    few, many = sorted(pool_bytes(pool) for pool in {graph.pool for graph in kept})
    assert many < 1.5 * few
    assert steps.run() == ({}, full) and len(kept) == len(cuda_graph_standin.CAPTURED) == full + 6
    assert not exceeds(state)
    # An exceeded budget is seen. The repeat has exact rows and no graphs, and the next step begins anew.
    use_budget(state._chunks[-1], lambda rows: rows // 8)
    for _ in range(2):
        _, replayed = steps.run()
        assert replayed == full and exceeds(state)
    state.is_active = False
    assert steps.run() == ({}, 0)
    state.is_active = True
    use_budget(state._chunks[-1], lambda rows: 64)
    assert [steps.run() for _ in range(2)] == [({}, full)] * 2 and not exceeds(state)
    # Also after a step that has failed halfway, or in which a micro-batch has another shape.
    for change, message in ((fail, "halfway"), (shorten, "pass 5 of this step is another one than")):
        with third_micro_batch(steps.ours, change), pytest.raises((RuntimeError, ValueError), match=message):
            steps.run()
        assert steps.run() == ({}, full)
