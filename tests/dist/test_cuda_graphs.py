"""Blocks with stages captured as CUDA graphs, over a stand-in that records operations, compared with stock.

Inputs and weights change from pass to pass, so whatever a graph does not compute anew is an error.
"""

import gc
import math
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_ampipe.block.megatron_settings import Arguments
from megatron_ampipe.launch.captured import captured_stages
from megatron_ampipe.schedule import Exchange, StageKind
from tests import cuda_graph_standin, deep_ep_standin
from tests.dist.cases import (
    AUX,
    BIASED,
    CP,
    GQA,
    GRAPH_MODULES,
    LARGE,
    LATENT,
    LATENT_EXPERTS,
    PARITY,
    SHARED,
    SINKHORN,
    SWIGLU,
    TIGHT,
    TOP2,
    TP,
    YARN,
    Case,
    again,
)

pytestmark = pytest.mark.ranks(2)

TOLERANCE = 1e-5
PASSES = 4
"""One warms up, one captures, two replay."""
# Of the parity cases, one of each feature that captured stages have.
NAMES = (
    "degree1-ampipe-thread", "length31-degree3-batch3", "only-several-batch3", "kernel-reference-pieces-gqa",
    "stack-ddmm", "stack-two-degrees", "stack-mla-yarn", "rope-gqa-swiglu-rms", "layernorm-bias",
    "qk-layernorm", "fp32-residual", "shared-gate-moe-only", "scaling-factor", "router-fp64",
    "backward-degree2-of-4-ampipe", "flex-degree4-2-ampipe", "flex-hybridep-degree8-None-ampipe",
)  # fmt: skip
CASES = [case for case in PARITY if case.name in NAMES] + [
    Case("all-on-cuda", executor="cuda", rope=True, model=LARGE | SHARED),
    Case("latent-experts", model=LATENT_EXPERTS | AUX),
    Case("gate-of-attention", kernel="sdpa", rope=True, model=GQA | {"attention_output_gate": True}),
    Case("cosine", router="cosine", batch=3, model=TOP2 | AUX),
]
# What is recomputed, or is not saved, or has its weights' gradients apart, runs without a graph.
PARTLY = [
    *(
        Case(
            f"recompute-{'-'.join(names)}",
            layers="md",
            stack=0,
            rope=True,
            model=LARGE | SHARED | again(*names),
        )
        for names in (
            ("core_attn",),
            ("moe",),
            ("shared_experts", "mlp"),
            ("moe_act",),
        )
    ),
    Case("recompute-mla", model=LATENT | LARGE | again("mla_up_proj")),
    *(Case(f"memory-{name}", memory=name, model=LARGE) for name in ("rebuild", "redispatch", "offload")),
    Case("lancet", degree=1, schedule="lancet", model=LARGE),
    Case("joined", schedule="joined", model=LARGE | SHARED),
]
# What depends on other chunks or ranks, or on documents.
PARTLY += [
    Case("tp-stack", parallel=TP, layers="mdm", stack=0, rope=True, model=LARGE | SHARED),
    Case("tp", parallel=TP, batch=3, model=LARGE),
    Case("cp", parallel=CP, rope=True, model=LARGE | SHARED),
    Case("capacity", model=TIGHT | AUX),
    Case("capacity-dropped-by-probability", model=TIGHT | {"moe_token_drop_policy": "probs"}),
    Case("sinkhorn", model=SINKHORN | SHARED),
    Case("ranks", exchange=Exchange.RANKS, model=LARGE | SHARED),
    Case("documents", documents=((0, 5, 20), (0, 31), (0,)), batch=3, rope=True, model=LARGE),
    Case("condensed", condense=1, model=LARGE),
]
NEVER = [
    Case("recompute-full", layers="mm", stack=0, recompute=math.inf, model=LARGE | SHARED),
    Case("recompute-layernorm", model=LARGE | again("layernorm")),
]
"""All stages, or all whose output or input is a norm's."""


@pytest.fixture(autouse=True)
def _stand_ins() -> Any:
    deep_ep_standin.install()
    with cuda_graph_standin.stand_ins():
        yield


def captured(case: Case, modules: Collection[str] = GRAPH_MODULES) -> list[torch.nn.Module]:
    """Megatron's layers, and AMPipe's with graphs of these modules."""
    from tests.dist.blocks import build_layers, capture

    stock, ours = build_layers(case)
    config = getattr(ours, "layers", [ours])[0].config
    capture(ours, modules, left_out=left_out(case, config, modules))
    return [stock, ours]


def left_out(case: Case, config: Any, modules: Collection[str]) -> Collection[StageKind]:
    """The stages that a launch of such layers runs without a graph."""
    of_launch = {
        "cuda_graph_impl": "local",
        "cuda_graph_modules": [*modules],
        "transformer_impl": "local",
        "sft": bool(case.documents),
        "ampipe_exchange": case.exchange,
        "ampipe_condense": case.condense,
        "te_rng_tracker": True,
    }
    return captured_stages(Arguments(config, **of_launch)).left_out


ALONE = Case("alone", layers="mdm", stack=0, rope=True, model=LARGE | SHARED)
"""What stages of one module hand to others is copied."""


def move_parameters(layer: torch.nn.Module) -> None:
    """As when the weights of a model are offloaded and come back."""
    for parameter in layer.parameters():
        parameter.data = parameter.data.clone()


def move_main_gradients(layer: torch.nn.Module) -> None:
    """As when the buffers of gradients are offloaded and come back."""
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros_like(parameter)


def move_buffers(layer: torch.nn.Module) -> None:
    """As a module does that registers a buffer again, with other contents."""
    for module in layer.modules():
        for name, buffer in module._buffers.items():
            if name == "expert_bias":
                module._buffers[name] = buffer.roll(1)


def drop_cached_embeddings(layer: torch.nn.Module) -> None:
    """As a module of Megatron does for all others of its class."""
    from megatron.core.models.common.embeddings import YarnRotaryEmbedding

    YarnRotaryEmbedding.forward.cache_clear()


FUSED = LARGE | {"gradient_accumulation_fusion": True}
MOVED = [
    (Case("parameters", model=LARGE), move_parameters),
    (Case("main-gradients", model=FUSED), move_main_gradients),
    (Case("buffers", model=LARGE | BIASED), move_buffers),
    (Case("cached-embeddings", model=YARN | LARGE), drop_cached_embeddings),
]
"""What graphs read or write, and what puts it into other memory between passes."""


@pytest.mark.parametrize(
    ("case", "modules", "move"),
    [
        *(pytest.param(case, GRAPH_MODULES, None, id=case.name) for case in [*CASES, *PARTLY]),
        *(pytest.param(ALONE, (module,), None, id=f"{module}-alone") for module in GRAPH_MODULES),
        *(pytest.param(case, GRAPH_MODULES, move, id=f"moved-{case.name}") for case, move in MOVED),
        *(pytest.param(case, GRAPH_MODULES, None, id=case.name) for case in NEVER),
    ],
)
def test_replays_equal_stock(
    case: Case, modules: tuple[str, ...], move: Callable[[torch.nn.Module], None] | None
) -> None:
    from tests.dist.blocks import inputs_of, run, wrong

    stock, ours = captured(case, modules)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number in range(PASSES):
        inputs = inputs_of(case, rank=torch.distributed.get_rank() + 10 * number, dtype=torch.float32)
        if inputs.rotary is not None:
            inputs = inputs._replace(rotary=inputs.rotary * (1 + number))
        expected, found = (run(layer, case, inputs=inputs) for layer in (stock, ours))
        assert wrong(expected, found, TOLERANCE) == {}, f"pass {number} differs from stock"
        if move is None:
            is_replayed = number > 0 and not case.pipeline.is_stock and case not in NEVER
            assert bool(cuda_graph_standin.REPLAYS) == is_replayed
        # What was added to ``main_grad`` leaves a placeholder without contents.
        with_gradient = [p for p in ours.parameters() if not getattr(p, "grad_added_to_main_grad", False)]
        returned = [*found.values(), *(parameter.grad for parameter in with_gradient)]
        kept += [(tensor, tensor.clone()) for tensor in returned if tensor is not None]
        with torch.no_grad():
            for of_stock, of_ours in zip(stock.parameters(), ours.parameters(), strict=True):
                of_ours.copy_(of_stock.mul_(0.9))
            if move is not None:
                move(stock)
                move(ours)
    assert all(torch.equal(*pair) for pair in kept), "what a pass has returned is overwritten by a later one"


def test_graphs_know_the_generators_that_change_their_state_in_a_capture() -> None:
    """Transformer Engine's attention advances one of Megatron's generators also without dropout."""
    from megatron.core.tensor_parallel import random

    from tests.dist.blocks import run

    case = Case("generators", model=LARGE)
    _, ours = captured(case)
    generators = {"model-parallel-rng": torch.Generator(), "data-parallel-rng": torch.Generator()}
    # Of Megatron's own tracker, states are no generators.
    with mock.patch.object(random, "get_all_rng_states", lambda: generators | {"expert": torch.zeros(16)}):
        for number in range(2):
            run(ours, case, rank=number)
    graphs = cuda_graph_standin.CAPTURED
    assert graphs and all(graph.generators == list(generators.values()) for graph in graphs)


def test_a_graph_draws_other_numbers_in_every_replay() -> None:
    """Forced load balancing, from a generator that graphs know: the numbers are those without graphs."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    from tests.dist.blocks import build_layers, capture, run, wrong

    case = Case(
        "random", layers="mm", stack=0, model=LARGE | SHARED | {"moe_router_force_load_balancing": True}
    )
    layers = [build_layers(case)[1] for _ in range(2)]
    capture(layers[1])
    trackers = [cuda_graph_standin.GraphSafeTracker() for _ in layers]
    logits: list[torch.Tensor] = []
    for number in range(PASSES):
        found = []
        for layer, tracker in zip(layers, trackers, strict=True):
            with (
                mock.patch.object(moe_utils, "get_cuda_rng_tracker", lambda tracker=tracker: tracker),
                mock.patch.object(random, "get_all_rng_states", lambda tracker=tracker: vars(tracker)),
            ):
                layer.zero_grad()
                found.append(run(layer, case, rank=0))
        assert wrong(*found, 0) == {}, f"pass {number} differs from one without graphs"
        assert torch.equal(*(tracker.generator.get_state() for tracker in trackers))
        logits.append(found[0]["output"])
    assert cuda_graph_standin.REPLAYS
    assert not any(torch.equal(logits[0], other) for other in logits[1:]), "the same numbers in every pass"


ORDERS = {
    "in-turn": "F0 B0 F1 B1 F2 B2",
    "all-first": "F0 F1 F2 B0 B1 B2",
    "all-first-reversed": "F0 F1 F2 B2 B1 B0",
    "1f1b": "F0 F1 B0 F2 B1 F3 B2 B3",
    "1f1b-deep": "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4",
    "evaluated-between": "F0 E1 F1 B0 E2 F2 B1 E0 B2",
    "never-differentiated": "F0 F1 F2 B0 F3 B2",
}
"""Of micro-batches in flight through all layers of a rank: F forward, B backward, E an evaluation."""
INTERLEAVED = {
    "interleaved": "F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 B2.1 B3.1 B2.0 B3.0",
    "interleaved-in-turn": "F0.0 F0.1 B0.1 B0.0 F1.0 F1.1 B1.1 B1.0",
    "interleaved-all-first": "F0.0 F1.0 F2.0 F0.1 F1.1 F2.1 B0.1 B1.1 B2.1 B0.0 B1.0 B2.0",
    "interleaved-crossed": "F0.0 F1.0 F1.1 F0.1 B1.1 F2.0 B0.1 B0.0 F2.1 B1.0 B2.1 B2.0",
}
"""Of micro-batches through two model chunks of a rank, each with separate stacks."""
IN_FLIGHT = Case("in-flight", degree=3, executor="cuda", layers="mm", rope=True, model=LARGE | SHARED)


@pytest.mark.parametrize(
    ("orders", "stack"),
    [
        pytest.param([ORDERS["1f1b"]], 0, id="1f1b"),
        pytest.param([ORDERS["all-first"]], 1, id="all-first-two-stacks"),
        pytest.param([INTERLEAVED["interleaved"]], 1, id="interleaved"),
        # Graphs are replayed in another order than they were captured in.
        pytest.param([*ORDERS.values()], 0, id="changing"),
        pytest.param([*reversed(ORDERS.values())], 1, id="changing-two-stacks"),
        pytest.param([*INTERLEAVED.values()], 1, id="interleaved-changing"),
    ],
)
def test_several_micro_batches_in_flight(orders: list[str], stack: int) -> None:
    """Memory that one capture has freed belongs to later captures of its pool."""
    from tests.dist.blocks import wrong
    from tests.dist.micro_batches import step_in_order

    case = replace(IN_FLIGHT, stack=stack)
    stock, ours = captured(case)
    for number in range(max(PASSES, len(orders) + 1)):
        order = orders[number % len(orders)]
        found = []
        for layer in (stock, ours):
            layer.zero_grad()
            model_chunks = layer.layers if ".1" in order else ()
            found.append(step_in_order(layer, case, order, model_chunks=model_chunks))
        assert wrong(*found, TOLERANCE) == {}, f"iteration {number}, {order}"
    assert cuda_graph_standin.REPLAYS and cuda_graph_standin.num_reused()


@pytest.fixture
def _no_collector() -> Any:
    """As with Megatron's ``--manual-gc``."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_graphs_of_the_last_shapes_are_kept(_no_collector: None) -> None:
    from tests.dist.blocks import run, wrong

    case = Case("shapes", degree=2, model=LARGE)
    stock, ours = captured(case)
    num_graphs = []
    # The third shape frees the graphs of the first, which returns.
    for length in (16, 24, 32, 16):
        of_length = replace(case, sequence_length=length)
        for number in range(3):
            expected, found = (run(layer, of_length, rank=number) for layer in (stock, ours))
            assert wrong(expected, found, TOLERANCE) == {}, f"length {length}, pass {number}"
        num_graphs.append(len(cuda_graph_standin.CAPTURED))
    of_one = num_graphs[0]
    assert of_one and num_graphs == [of_one, 2 * of_one, 2 * of_one, 2 * of_one]


def test_graphs_that_are_freed_end_their_backward_pass(_no_collector: None) -> None:
    from tests.dist.blocks import forward, inputs_of, run, run_pass, summed_results, wrong

    case = Case("in-flight", degree=2, model=LARGE)
    stock, ours = captured(case)
    inputs = inputs_of(case, rank=torch.distributed.get_rank(), dtype=torch.float32)
    for _ in range(2):
        run_pass(ours, inputs)
    of_one = len(cuda_graph_standin.CAPTURED)
    for layer in (stock, ours):
        layer.zero_grad()
    outputs = [forward(layer, inputs)[0] for layer in (stock, ours)]
    for length in (16, 24):
        # Warms up, and is captured.
        for number in range(2):
            run(ours, replace(case, sequence_length=length), rank=number)
    ours.zero_grad()
    found = []
    for layer, output in zip((stock, ours), outputs, strict=True):
        output.backward(inputs.gradient)
        found.append({"output": output.detach()} | summed_results(layer))
    assert wrong(*found, TOLERANCE) == {}
    del output, outputs
    assert len(cuda_graph_standin.CAPTURED) == 2 * of_one


@pytest.mark.parametrize("reason", ["idle", "moved"])
def test_sets_that_no_pass_needs_are_freed(reason: str, _no_collector: None) -> None:
    from megatron_ampipe.runtime import graphs
    from tests.dist.micro_batches import step_in_order

    case = Case("sets", degree=2, model=LARGE)
    _, ours = captured(case)
    for _ in range(2):
        step_in_order(ours, case, ORDERS["all-first"])
    of_three = len(cuda_graph_standin.CAPTURED)
    if reason == "moved":
        move_parameters(ours)
    with mock.patch.object(graphs, "MAX_IDLE_PASSES", 4):
        step_in_order(ours, case, ORDERS["in-turn"])
        step_in_order(ours, case, ORDERS["in-turn"])
    assert of_three and len(cuda_graph_standin.CAPTURED) == of_three / 3


@pytest.mark.parametrize(("layers", "degree", "fused"), [("m", 2, True), ("mmm", 4, False)])
def test_temporary_memory_of_a_set_is_as_the_docs_say(layers: str, degree: int, fused: bool) -> None:
    """docs/gpu.md: five to eight hidden sizes per token of a stack, however many layers it has."""
    from tests.dist.micro_batches import step_in_order

    model = (
        SWIGLU | TOP2 | {"hidden_size": 128, "ffn_hidden_size": 256, "gradient_accumulation_fusion": fused}
    )
    options: dict[str, Any] = {"kernel": "cpu-flash", "sequence_length": 256, "executor": "cuda"}
    stack = 1 if len(layers) == 1 else 0
    case = Case("memory", degree=degree, layers=layers, stack=stack, model=model, **options)
    _, ours = captured(case)
    for _ in range(2):
        step_in_order(ours, case, "F0 F1 B0 B1")
    assert len(cuda_graph_standin.POOLS) == 2
    hidden = case.sequence_length * 128 * torch.float32.itemsize
    for pool in cuda_graph_standin.POOLS.values():
        temporary = sum(block.num_bytes for block in pool.blocks if block.is_free)
        assert 4.5 < temporary / hidden < 8.5


def test_hooks_for_parameters_run_in_every_pass() -> None:
    """Those of ``--overlap-param-gather``, of every module with parameters."""
    from tests.dist.blocks import run

    case = Case("hooks", model=LARGE | SHARED)
    _, ours = captured(case)
    called: set[str] = set()

    def waiting(name: str) -> Callable[..., None]:
        hook = lambda *_: called.add(name)  # noqa: E731
        hook.__module__ = "megatron.core.distributed.test"
        return hook

    for name, module in ours.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.register_forward_pre_hook(waiting(name))
    by_pass = []
    for number in range(PASSES):
        called.clear()
        run(ours, case, rank=number)
        by_pass.append({*called})
    assert by_pass[0] and by_pass == [by_pass[0]] * PASSES


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ["router", "shared_experts"])
def test_other_hooks_are_refused(name: str, late: bool) -> None:
    """Also of a module without own parameters, and after the capture."""
    from megatron_ampipe.errors import BadInput
    from tests.dist.blocks import run

    case = Case("hooks", model=LARGE | SHARED)
    _, ours = captured(case)
    for _ in range(PASSES if late else 0):
        run(ours, case)
    getattr(ours.mlp, name).register_forward_hook(lambda *_: None)
    with pytest.raises(
        BadInput, match=rf"hook of mlp\.{name} of layer 1.*calling it.*--cuda-graph-impl none"
    ):
        run(ours, case)
