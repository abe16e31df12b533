"""Blocks with stages captured as CUDA graphs, over a stand-in that records operations, compared with stock.

Inputs and weights change from pass to pass, so whatever a graph does not compute anew is an error.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from tests import cuda_graph_standin, deep_ep_standin
from tests.dist.cases import AUX, GQA, LARGE, LATENT_EXPERTS, PARITY, SHARED, TOP2, Case
from tests.dist.test_gradients import layers, make_hidden, train
from tests.dist.worker import empty_is_nan, use_groups

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
    use_groups()
    with cuda_graph_standin.stand_ins():
        yield


def assert_passes_equal(
    stock: torch.nn.Module, ours: torch.nn.Module, case: Case, *, before: Callable[[], object] | None = None
) -> None:
    """Passes with other inputs; ``before`` is called before each."""
    from tests.dist.blocks import run, wrong

    for number in range(PASSES):
        if before is not None:
            before()
        assert wrong(run(stock, case, rank=number), run(ours, case, rank=number), TOLERANCE) == {}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_replays_equal_stock(case: Case) -> None:
    from tests.dist.blocks import build_layers, capture, run, wrong

    stock, ours = build_layers(case)
    capture(ours)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number in range(PASSES):
        rank = torch.distributed.get_rank() + 10 * number
        expected, found = (run(layer, case, rank=rank) for layer in (stock, ours))
        assert wrong(expected, found, TOLERANCE) == {}, f"pass {number} differs from stock"
        assert bool(cuda_graph_standin.REPLAYS) == (number > 0 and not case.pipeline.is_stock)
        returned = [*found.values(), *(parameter.grad for parameter in ours.parameters())]
        kept += [(tensor, tensor.clone()) for tensor in returned if tensor is not None]
        with torch.no_grad():
            for of_stock, of_ours in zip(stock.parameters(), ours.parameters(), strict=True):
                of_ours.copy_(of_stock.mul_(0.9))
    assert all(torch.equal(*pair) for pair in kept), "what a pass has returned is overwritten by a later one"


def test_graphs_know_the_generators_that_change_their_state_in_a_capture() -> None:
    """Transformer Engine's attention advances one of Megatron's generators also without dropout."""
    from megatron.core.tensor_parallel import random

    from tests.dist.blocks import build_layers, capture, run

    case = Case("generators", model=LARGE)
    _, ours = build_layers(case)
    capture(ours)
    generators = {"model-parallel-rng": torch.Generator(), "data-parallel-rng": torch.Generator()}
    before = len(cuda_graph_standin.CAPTURED)
    # Of Megatron's own tracker, states are no generators.
    with mock.patch.object(random, "get_all_rng_states", lambda: generators | {"expert": torch.zeros(16)}):
        for number in range(2):
            run(ours, case, rank=number)
    captured = cuda_graph_standin.CAPTURED[before:]
    assert captured
    assert all(graph.generators == list(generators.values()) for graph in captured)


@pytest.mark.parametrize("module", ["attn", "moe_router", "moe_preprocess", "mlp"])
def test_each_module_alone(module: str) -> None:
    """What stages of one module hand to others is copied."""
    from tests.dist.blocks import build_layers, capture

    case = Case("alone", layers="mdm", stack=0, rope=True, model=LARGE | SHARED)
    stock, ours = build_layers(case)
    capture(ours, {module})
    assert_passes_equal(stock, ours, case)
    assert cuda_graph_standin.REPLAYS


def test_another_rotary_embedding() -> None:
    from tests.dist.blocks import build_layers, capture, inputs_of, run_pass, wrong

    case = Case("rotary", rope=True, model=LARGE)
    pair = build_layers(case)
    capture(pair[1])
    for number in range(PASSES):
        inputs = inputs_of(case, rank=number, dtype=torch.float32)
        inputs = inputs._replace(rotary=inputs.rotary * (1 + number))
        found = []
        for layer in pair:
            output, hidden = run_pass(layer, inputs)
            found.append({"output": output.detach(), "input gradient": hidden.grad})
        assert wrong(*found, TOLERANCE) == {}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_several_micro_batches_in_flight(order: tuple[int, ...]) -> None:
    from tests.dist import logged_losses
    from tests.dist.blocks import build_layers, capture, forward, inputs_of, summed_results, wrong

    logged_losses.clear()
    case = Case("in-flight", executor="cuda", layers="mm", stack=0, rope=True, model=LARGE | SHARED)
    found = []
    for layer in build_layers(case):
        capture(layer)
        for number in range(PASSES):
            layer.zero_grad()
            logged_losses.clear()
            outputs = []
            for micro_batch in range(len(order)):
                rank = torch.distributed.get_rank() + 10 * number + 100 * micro_batch
                inputs = inputs_of(case, rank=rank, dtype=torch.float32)
                outputs.append((*forward(layer, inputs), inputs.gradient))
            for micro_batch in order[: 3 - (number == 2)]:
                output, _, gradient = outputs[micro_batch]
                output.backward(gradient)
            if number == 2:
                # A forward pass without a backward pass.
                layer.zero_grad()
        found.append(summed_results(layer))
    assert wrong(*found, TOLERANCE) == {}


@pytest.mark.parametrize("fusion", [False, True])
@pytest.mark.parametrize("kinds", ["m", "mdm"])
def test_under_data_parallelism(kinds: str, fusion: bool) -> None:
    """The hooks of a parameter run once in each micro-batch; linear layers may add to ``main_grad``."""
    inputs = [[make_hidden(10 * iteration + index) for index in range(3)] for iteration in range(2)]
    from tests.dist.blocks import capture

    stock, ours = layers(kinds, gradient_accumulation_fusion=fusion)
    capture(ours)
    found = []
    for layer in (stock, ours):
        # Placeholders are never read.
        with empty_is_nan():
            found.append(train(layer, inputs))
    (expected, stock_fired), (main_grads, fired) = found
    assert fired == {name: [1] * 6 for name in fired} == stock_fired
    for name, value in expected.items():
        assert torch.allclose(main_grads[name], value, rtol=1e-4, atol=1e-5 * value.abs().max()), name
    assert cuda_graph_standin.REPLAYS


class WaitsForParameters:
    """A hook like those of ``--overlap-param-gather``: counts the calls of each module."""

    __module__ = "megatron.core.distributed.test"

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def watch(self, layer: torch.nn.Module) -> None:
        """Be called before each module with parameters."""
        for name, module in layer.named_modules():
            if next(module.parameters(recurse=False), None) is not None:
                hook = lambda _, __, name=name: self.calls.update([name])  # noqa: E731
                hook.__module__ = self.__module__
                module.register_forward_pre_hook(hook)


def test_hooks_for_parameters_run_in_every_pass() -> None:
    from tests.dist.blocks import build_layers, capture, run

    case = Case("hooks", model=LARGE | SHARED)
    _, ours = build_layers(case)
    capture(ours)
    waits = WaitsForParameters()
    waits.watch(ours)
    by_pass = []
    for number in range(PASSES):
        waits.calls.clear()
        run(ours, case, rank=number)
        by_pass.append({name for name, count in waits.calls.items() if count})
    assert by_pass[0] and by_pass == [by_pass[0]] * PASSES


def test_other_hooks_are_refused() -> None:
    from megatron_ampipe.errors import BadInput
    from tests.dist.blocks import build_layers, capture, run

    case = Case("hooks", model=LARGE)
    _, ours = build_layers(case)
    capture(ours)
    ours.mlp.router.register_forward_hook(lambda *_: None)
    with pytest.raises(BadInput, match=r"hook of .*Router.*calling it"):
        run(ours, case, rank=0)


def test_what_runs_again_is_refused() -> None:
    from megatron_ampipe.errors import BadInput
    from tests.dist.blocks import build_layers, capture, run

    case = Case("again", degree=1, schedule="lancet", model=LARGE)
    _, ours = build_layers(case)
    capture(ours)
    with pytest.raises(BadInput, match=r"stage qkv.*gradients of weights"):
        run(ours, case, rank=0)


def test_moved_parameters_are_captured_anew() -> None:
    from tests.dist.blocks import build_layers, capture

    def move() -> None:
        for parameter in ours.parameters():
            parameter.data = parameter.data.clone()

    case = Case("moved", model=LARGE)
    stock, ours = build_layers(case)
    capture(ours)
    assert_passes_equal(stock, ours, case, before=move)
