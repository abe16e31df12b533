"""Training in FP8 over stand-ins of Transformer Engine's layers, compared with Megatron's layers over them.

In fp64, so that what is rounded to other FP8 numbers than in the whole sequence differs by far more than the
tolerance. Weights change between iterations, and a stale quantized weight is an error of the stand-in.
"""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_ampipe.schedule import Partner
from tests import cuda_graph_standin
from tests.dist.cases import AUX, MOE_AGAIN, SHARED, TOP2, Case, again
from tests.dist.test_cuda_graphs import ORDERS

pytestmark = pytest.mark.ranks(2)

TOLERANCE = 1e-9
"""Relative difference; measured: 1e-13."""
SMALLEST = 1e-5
"""What it does to a gradient if numbers below 2**-13 of a tile's largest are rounded with another scale, a
power of two; measured: 4e-7."""
ROUNDING = 2**-3
"""What rounding all numbers with another scale does; measured: 0.08."""
NUM_ITERATIONS = 2
NUM_MICROBATCHES = 3
"""Of an iteration in turn."""
VARIANTS: dict[str, dict[str, Any]] = {
    "degree4": {},
    "two-degrees": {"degree": 2, "backward_degree": 4},
    "stack-first-layer-bf16": {"layers": "mdm", "stack": 0},
    # Megatron's layers recompute through Transformer Engine in FP8.
    "recompute-moe": {"model": MOE_AGAIN, "stock": {"recompute_granularity": None}},
    "recompute-others": {
        "model": again("layernorm", "moe_act", "shared_experts", "core_attn", normalization="RMSNorm"),
        "stock": {"recompute_granularity": None},
    },
    "documents": {"documents": ((0, 100, 333),), "sequence_length": 512, "batch": 1},
    "stack-recompute": {"layers": "mm", "stack": 0, "recompute": math.inf},
    "partners": {"layers": "mdm", "stack": 0},
    "lancet": {"schedule": "lancet"},
    "joined": {"schedule": "joined", "layers": "mdm", "stack": 0},
    "partners-lancet": {"schedule": "lancet", "layers": "mdm", "stack": 0},
}

RUN_TWICE = {"recompute-moe": "experts", "recompute-others": "shared_experts", "stack-recompute": ""}
"""In these, layers with this in their name run first without a graph."""
BOTH = ("degree4", "stack-first-layer-bf16", "recompute-moe", "documents", "partners")
"""Those with both recipes."""


@pytest.fixture(autouse=True, scope="module")
def _stand_ins() -> None:
    from tests import te_fp8_standin

    te_fp8_standin.install()


def case_of(variant: str, recipe: str) -> Case:
    # 512 tokens, and 128 in a chunk.
    fields = {"sequence_length": 256, "batch": 2} | (VARIANTS | FIXED_ROWS)[variant]
    if variant in FIXED_ROWS:
        # Megatron's layers recompute through Transformer Engine in FP8.
        others = {"fixed_rows": True, "engine": "experts", "stock": {"recompute_granularity": None}}
        fields = others | fields
    precision = {
        "moe_router_dtype": "fp64",
        "gradient_accumulation_fusion": True,
        "fp8": "e4m3",
        "fp8_recipe": recipe,
        "first_last_layers_bf16": "first-layer-bf16" in variant,
        "num_layers_at_end_in_bf16": 0,
    }
    model = TOP2 | AUX | SHARED | precision
    return Case("fp8", **fields | {"model": model | fields.get("model", {})})


def pair(case: Case, recipe: str, *, experts_round: bool) -> list[torch.nn.Module]:
    """Megatron's layers and AMPipe's, in fp64."""
    from tests import te_fp8_standin
    from tests.dist.blocks import build_layers

    pair = [layer.double() for layer in build_layers(case)]
    for layer in pair:
        te_fp8_standin.quantize_linears(layer, recipe, experts_round_gradients=experts_round)
        if hasattr(layer, "layers"):
            layer.forward = functools.partial(loop_in_precision, layer.layers)
        else:
            layer.forward = functools.partial(in_precision, layer, layer.forward)
    return pair


def loop_in_precision(layers: Any, *, hidden_states: Tensor, **given: Any) -> tuple[Tensor, None]:
    for layer in layers:
        hidden_states, _ = in_precision(layer, layer, hidden_states=hidden_states, **given)
    return hidden_states, None


def in_precision(layer: Any, forward: Callable[..., Any], **given: Any) -> Any:
    """As Megatron's loop over the layers."""
    from tests import te_fp8_standin

    with te_fp8_standin.get_fp8_context(layer.config, layer.layer_number - 1):
        return forward(**given)


def train(
    layer: Any,
    case: Case,
    *,
    partner: Partner | None = None,
    order: str | None = None,
    number: int = NUM_ITERATIONS,
    before: Callable[[int, Callable[[], object]], None] = lambda *_: None,
) -> dict[str, Tensor]:
    """Iterations of micro-batches, after each of which the weights change.

    Args:
        layer: Megatron's layer or layers, or AMPipe's.
        case: The case.
        partner: How passes with a partner run; None to run micro-batches one after another, or in an order.
        order: As of ``step_in_order``.
        number: Of iterations.
        before: Called before each iteration with its number, and what runs its passes.
    """
    from tests.dist.micro_batches import step, step_in_order

    def run() -> dict[str, Tensor]:
        for parameter in layer.parameters():
            parameter.grad, parameter.grad_added_to_main_grad = None, False
            total = getattr(parameter, "main_grad", None)
            if total is None or total.dtype != parameter.dtype:
                # Made before the layer was in fp64.
                parameter.main_grad = torch.zeros_like(parameter)
            else:
                total.zero_()
        for one in getattr(layer, "layers", [layer]):
            one.set_is_first_microbatch()
        return step_in_order(layer, case, order) if order else step(layer, case, partner=partner)

    found: dict[str, Tensor] = {}
    for iteration in range(number):
        before(iteration, run)
        results = run()
        found |= {f"{name} in iteration {iteration}": tensor.clone() for name, tensor in results.items()}
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                gradient = results[f"gradient of {name}"]
                parameter.add_(gradient, alpha=-0.01 / gradient.abs().max().item())
    return found


@pytest.mark.parametrize(
    ("variant", "recipe"),
    [*((variant, "mxfp8") for variant in VARIANTS), *((one, "blockwise") for one in BOTH)],
)
def test_chunks_of_whole_tiles_round_as_the_whole_sequence(variant: str, recipe: str) -> None:
    """All numbers are equal, if the operands of the gradients of experts' weights are not rounded."""
    from tests import te_fp8_standin
    from tests.dist.blocks import wrong

    case = case_of(variant, recipe)
    stock, ours = pair(case, recipe, experts_round=False)
    found = train(ours, case, partner=Partner(case.degree) if "partners" in variant else None)
    assert wrong(train(stock, case), found, TOLERANCE) == {}
    run_twice = RUN_TWICE.get(variant) if recipe == "mxfp8" else None
    for name, linear in ours.named_modules():
        if not isinstance(linear, te_fp8_standin.QuantizedLinear):
            continue
        in_bf16 = "first-layer-bf16" in variant and name.startswith("layers.0.")
        assert linear.calls and set(linear.calls) == {not in_bf16}
        # In each iteration once; a first run without a graph makes the one copy that it needs.
        runs = 2 if run_twice is not None and run_twice in name else 1
        assert linear.quantized == (0 if in_bf16 else runs * NUM_ITERATIONS), name


FIXED_ROWS: dict[str, dict[str, Any]] = {
    "fixed-degree4": {},
    "fixed-wire": {"wire": "fp8", "degree": 2},
    "fixed-lancet-first-layer-bf16": {"schedule": "lancet", "degree": 2, "layers": "mdm", "stack": 0},
    "fixed-recompute-moe-act": {
        "degree": 2, "model": again("moe_act", normalization="RMSNorm"),
    },
    "fixed-stack-recompute-bias": {
        "layers": "mm", "stack": 0, "degree": 2, "recompute": math.inf,
        "model": {
            "add_bias_linear": True, "normalization": "LayerNorm",
            "moe_shared_expert_intermediate_size": None,
        },
    },
    "fixed-partners-recompute": {"degree": 2, "layers": "mm", "stack": 0, "recompute": 1},
}  # fmt: skip
"""Of grouped experts, whose rows are filled up with zeros, without the host knowing their numbers."""
IN_FLIGHT = {"fixed-lancet-first-layer-bf16": "1f1b", "fixed-stack-recompute-bias": "evaluated-between"}
"""The order of the passes, by name."""


@pytest.mark.parametrize(
    ("variant", "recipe", "experts_round"),
    [
        *((variant, "mxfp8", False) for variant in [*FIXED_ROWS][2:]),
        *(("fixed-degree4", recipe, True) for recipe in ("blockwise", "mxfp8")),
        ("fixed-wire", "tensorwise", True),
    ],
)
def test_fixed_rows_round_as_exact_ones(variant: str, recipe: str, experts_round: bool) -> None:
    """All numbers are equal to those of Megatron's layers; where these round the operands of the gradients of
    experts' weights, to those of exact rows in the same chunks.

    With whole passes as CUDA graphs they are the same in every bit, though weights change between replays.
    """
    from megatron_ampipe.exchange import fixed_rows
    from megatron_ampipe.runtime.collectives import HostCopy
    from tests.dist.blocks import wrong
    from tests.dist.test_fixed_rows import fixed_rows_of
    from tests.dist.worker import empty_is_nan

    case = case_of(variant, recipe)
    stock, ours = pair(case, recipe, experts_round=experts_round)
    state, begin = fixed_rows_of(ours), copy.deepcopy(ours.state_dict())
    state.is_watched = True
    options: dict[str, Any] = {"order": ORDERS[IN_FLIGHT[variant]] if variant in IN_FLIGHT else None}
    if "partners" in variant:
        options = {"partner": Partner(), "number": NUM_ITERATIONS + 1}
    exact = train(ours, case, **options)
    expected = exact if experts_round else train(stock, case, **options | {"partner": None})
    assert wrong(expected, exact, TOLERANCE) == {}
    state.end_step()
    state.learn(1.5)
    state.is_active = True
    ours.load_state_dict(begin)
    read = AssertionError("the host reads counts")
    with (
        mock.patch.object(fixed_rows, "PADDING", math.nan),
        mock.patch.object(HostCopy, "wait", side_effect=read),
        empty_is_nan(),
    ):
        found = train(ours, case, **options)
    assert not state.overflow(torch.device("cpu")) and state.budgets
    assert wrong(expected, found, TOLERANCE) == {}
    if (variant, recipe) == ("fixed-degree4", "mxfp8"):
        # Of which others have graphs.
        return
    ours.load_state_dict(begin)
    with mock.patch.object(fixed_rows, "PADDING", math.nan), cuda_graph_standin.stand_ins():
        exceeds = (variant, recipe) == ("fixed-degree4", "blockwise")
        of_graphs = train_with_graphs(ours, case, options, exceeds=exceeds)
    assert {name for name in found if not torch.equal(found[name], of_graphs[name])} == set()


def train_with_graphs(ours: Any, case: Case, options: dict[str, Any], *, exceeds: bool) -> dict[str, Tensor]:
    """As :func:`train`, with whole passes as CUDA graphs.

    Args:
        ours: AMPipe's layer or layers, with budgets.
        case: The case.
        options: Of :func:`train`.
        exceeds: Whether the last iteration exceeds budgets at first, and is repeated with exact rows.
    """
    from megatron_ampipe.layers.context import WHOLE_PASSES
    from megatron_ampipe.runtime.executors import SequentialExecutor
    from megatron_ampipe.runtime.partners import Partners
    from tests.dist.blocks import capture
    from tests.dist.test_fixed_rows import fixed_rows_of
    from tests.dist.test_whole_graphs import context_of, use_budget

    state, context = fixed_rows_of(ours), context_of(ours)
    # A capture does not see what other threads do.
    context.executor = SequentialExecutor()
    context.partners = Partners() if "partner" in options else None
    capture(ours, WHOLE_PASSES)
    last = NUM_ITERATIONS - 1

    def before(iteration: int, run: Callable[[], object]) -> None:
        require_own_weights(ours)
        if not exceeds or iteration != last:
            return
        for chunk in state._chunks:
            use_budget(chunk, lambda rows: rows // 8)
        state.begin_step()
        run()
        assert state.overflow(torch.device("cpu"))
        state.is_active = False

    found = train(ours, case, before=before, **options)
    replays = len(cuda_graph_standin.REPLAYS)
    num_forward = options["order"].count("F") if options.get("order") else NUM_MICROBATCHES
    if "partner" not in options:
        # The first micro-batch warms up. Those of the last iteration, which was repeated, are graphs, too.
        assert replays == 2 * (NUM_ITERATIONS * num_forward - 1)
    else:
        # The first step is recorded; the first forward pass and the last backward pass are alone.
        assert replays == NUM_ITERATIONS * (num_forward + 1)
    return found


def require_own_weights(layer: torch.nn.Module) -> None:
    """Fail if a layer keeps a quantized weight in memory of a graph, for passes without graphs to read."""
    of_graphs = {address for pool in cuda_graph_standin.POOLS.values() for address in pool.addresses}
    for name, linear in layer.named_modules():
        for kept in getattr(linear, "_fp8_workspaces", {}).values():
            address = kept.along_rows.untyped_storage().data_ptr()
            assert address not in of_graphs, name


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8", "tensorwise"])
def test_only_rounding_differs(recipe: str) -> None:
    """In the first iteration: with tiles, of the gradients of experts' weights; with one scale, of all."""
    from tests.dist.blocks import differences

    case = case_of("degree4", recipe)
    stock, ours = pair(case, recipe, experts_round=True)
    found = differences(train(stock, case), train(ours, case))
    first = {name: value for name, value in found.items() if name.endswith("iteration 0")}
    others = {name for name, value in first.items() if not value <= TOLERANCE}
    experts = {name for name in first if "local_experts" in name}
    assert experts & others
    assert (others <= experts) == (recipe != "tensorwise")
    assert max(first.values()) < (ROUNDING if recipe == "tensorwise" else SMALLEST)


def test_several_packed_sequences_share_scales_of_attention_weights() -> None:
    """Megatron's layers have one sequence after another, and chunks the same rows of all."""
    from tests.dist.blocks import differences

    case = dataclasses.replace(case_of("degree4", "blockwise"), documents=((0, 100, 233), (0, 50)))
    stock, ours = pair(case, "blockwise", experts_round=False)
    found = differences(train(stock, case), train(ours, case))
    others = {name for name, value in found.items() if not value <= TOLERANCE}
    assert others and all("gradient" in name and "self_attention" in name for name in others)
    assert max(found.values()) < SMALLEST


@pytest.mark.parametrize(("degree", "recipe"), [(8, "blockwise"), (3, "mxfp8")])
def test_other_chunks_are_refused(degree: int, recipe: str) -> None:
    from megatron_ampipe.errors import BadInput

    case = dataclasses.replace(case_of("degree4", recipe), degree=degree)
    _, ours = pair(case, recipe, experts_round=True)
    with pytest.raises(BadInput, match="chunks must have multiples of"):
        train(ours, case)
