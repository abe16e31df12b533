"""Blocks with stages captured as CUDA graphs, over a stand-in that records operations, compared with stock.

Inputs and weights change from pass to pass, so whatever a graph does not compute anew is an error.
"""

from collections.abc import Callable, Collection
from typing import Any
from unittest import mock

import pytest
import torch

from tests import cuda_graph_standin, deep_ep_standin
from tests.dist.cases import AUX, GQA, GRAPH_MODULES, LARGE, LATENT_EXPERTS, PARITY, SHARED, TOP2, Case

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


@pytest.fixture(autouse=True)
def _stand_ins() -> Any:
    deep_ep_standin.install()
    with cuda_graph_standin.stand_ins():
        yield


def captured(case: Case, modules: Collection[str] = GRAPH_MODULES) -> list[torch.nn.Module]:
    """Megatron's layers, and AMPipe's with graphs of these modules."""
    from tests.dist.blocks import build_layers, capture

    stock, ours = build_layers(case)
    capture(ours, modules)
    return [stock, ours]


ALONE = Case("alone", layers="mdm", stack=0, rope=True, model=LARGE | SHARED)
"""What stages of one module hand to others is copied."""


@pytest.mark.parametrize(
    ("case", "modules", "moves"),
    [
        *(pytest.param(case, GRAPH_MODULES, False, id=case.name) for case in CASES),
        *(pytest.param(ALONE, (module,), False, id=f"{module}-alone") for module in GRAPH_MODULES),
        pytest.param(Case("moved", model=LARGE), GRAPH_MODULES, True, id="moved-parameters"),
    ],
)
def test_replays_equal_stock(case: Case, modules: tuple[str, ...], moves: bool) -> None:
    from tests.dist.blocks import inputs_of, run, wrong

    stock, ours = captured(case, modules)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number in range(PASSES):
        inputs = inputs_of(case, rank=torch.distributed.get_rank() + 10 * number, dtype=torch.float32)
        if inputs.rotary is not None:
            inputs = inputs._replace(rotary=inputs.rotary * (1 + number))
        expected, found = (run(layer, case, inputs=inputs) for layer in (stock, ours))
        assert wrong(expected, found, TOLERANCE) == {}, f"pass {number} differs from stock"
        if not moves:
            assert bool(cuda_graph_standin.REPLAYS) == (number > 0 and not case.pipeline.is_stock)
        returned = [*found.values(), *(parameter.grad for parameter in ours.parameters())]
        kept += [(tensor, tensor.clone()) for tensor in returned if tensor is not None]
        with torch.no_grad():
            for of_stock, of_ours in zip(stock.parameters(), ours.parameters(), strict=True):
                of_ours.copy_(of_stock.mul_(0.9))
                if moves:
                    # Captured anew.
                    of_ours.data = of_ours.data.clone()
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


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_several_micro_batches_in_flight(order: tuple[int, ...]) -> None:
    """In the last pass but one, a forward pass has no backward pass."""
    from tests.dist.blocks import wrong
    from tests.dist.micro_batches import step

    case = Case("in-flight", executor="cuda", layers="mm", stack=0, rope=True, model=LARGE | SHARED)
    stock, ours = captured(case)
    for number in range(PASSES):
        for layer in (stock, ours):
            layer.zero_grad()
        given = order if number != PASSES - 2 else order[:2]
        expected, found = (step(layer, case, in_flight=given) for layer in (stock, ours))
        assert wrong(expected, found, TOLERANCE) == {}


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


def test_what_runs_again_is_refused() -> None:
    from megatron_ampipe.errors import BadInput
    from tests.dist.blocks import run

    case = Case("again", degree=1, schedule="lancet", model=LARGE)
    with pytest.raises(BadInput, match=r"stage qkv.*weight gradients"):
        run(captured(case)[1], case)
