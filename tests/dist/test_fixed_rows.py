"""Compares layers with fixed rows with stock Megatron's, with anything in the padding."""

import dataclasses
import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests import deep_ep_standin
from tests.dist.cases import FIXED_HYBRID, FIXED_ROWS, Case

TOLERANCE = 1e-5
CASES = sorted(FIXED_ROWS, key=lambda case: str(case.parallel))


@pytest.fixture(autouse=True, scope="module")
def _stand_ins() -> None:
    deep_ep_standin.install()


def fixed_rows_of(layer: torch.nn.Module) -> Any:
    """The state that all layers share."""
    return next(iter(getattr(layer, "layers", [layer])))._block.context.fixed_rows


@pytest.mark.parametrize(
    ("case", "padding"),
    [
        pytest.param(case, padding, id=f"{case.name}-{padding}", marks=pytest.mark.ranks(case.world_size))
        for case in CASES
        # What HybridEP does not write is always NaN here.
        for padding in ((math.nan,) if case in FIXED_HYBRID else (None, math.nan))
    ],
)
def test_equals_stock(case: Case, padding: float) -> None:
    from megatron_ampipe.exchange import fixed_rows
    from megatron_ampipe.runtime.collectives import HostCopy
    from tests.dist.blocks import build_layers, forward, inputs_of, run, wrong
    from tests.dist.parameter_reads import ParameterReads
    from tests.dist.worker import empty_is_nan

    rank = torch.distributed.get_rank()
    stock, ours = build_layers(case)
    state = fixed_rows_of(ours)
    state.is_watched = True
    expected, exact = run(stock, case, rank=rank), run(ours, case, rank=rank)
    assert wrong(expected, exact, TOLERANCE) == {}
    state.end_step()
    state.learn(1.5)
    learned: list[Any] = [None] * case.world_size
    torch.distributed.all_gather_object(learned, state.budgets)
    assert learned == [state.budgets] * case.world_size, "ranks would capture graphs in different passes"
    state.is_active = True
    read = AssertionError("the host reads counts")
    with (
        mock.patch.object(fixed_rows, "PADDING", padding),
        mock.patch.object(HostCopy, "wait", side_effect=read),
        mock.patch.object(deep_ep_standin, "wait_for_rows", side_effect=read),
        empty_is_nan(),
    ):
        found = run(ours, case, rank=rank)
    assert wrong(expected, found, TOLERANCE) == {}
    assert not state.overflow(torch.device("cpu"))
    # Padding is there, or nothing was shown.
    assert len(state.budgets) == case.layers.count("m") * case.pipeline.num_chunks
    # Hooks of data parallelism wait for the parameters of a module when it is called.
    with ParameterReads(ours) as reads:
        forward(ours, inputs_of(case, rank=rank, dtype=torch.float32))
    report = reads.report()
    assert report.pop("watched") >= 7
    assert report == {"early": {}, "never entered": [], "never read": []}


class Operators(TorchDispatchMode):
    """Records the operators that run, with the shapes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[torch.Size]]] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [
            value for value in torch.utils._pytree.tree_leaves(args) if isinstance(value, torch.Tensor)
        ]
        self.seen.append((str(operator), [tensor.shape for tensor in tensors]))
        return operator(*args, **(kwargs or {}))


READS = ("_local_scalar_dense", "nonzero", "masked_select", "repeat_interleave.Tensor", "unique")
"""Operators whose result the host waits for, or whose shape depends on data."""


def operators_of(layer: torch.nn.Module, case: Case, *, rank: int) -> list[tuple[str, list[torch.Size]]]:
    """What both passes run, on this thread, for the inputs of a rank."""
    from tests.dist.blocks import inputs_of, run_pass

    inputs = inputs_of(case, rank=rank, dtype=torch.float32)
    with Operators() as operators:
        run_pass(layer, inputs)
    return operators.seen


@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_fixed", [True, False], ids=["fixed", "exact"])
@pytest.mark.parametrize("name", ["fixed-degree2", "fixed-stack-lancet", "fixed-hybridep-degree2"])
def test_no_shape_depends_on_the_routing(name: str, is_fixed: bool) -> None:
    """With exact rows the same check finds some."""
    from tests.dist.blocks import build_layers, run

    (case,) = (dataclasses.replace(one, executor="sequential") for one in FIXED_ROWS if one.name == name)
    # Attention and losses are not what is looked at.
    case = dataclasses.replace(case, model=case.model | {"moe_router_load_balancing_type": "none"})
    rank = torch.distributed.get_rank()
    _, ours = build_layers(case)
    state = fixed_rows_of(ours)
    state.is_watched = True
    others = rank + 10
    for seed in (rank, others):
        run(ours, case, rank=seed)
    state.end_step()
    state.learn(1.5)
    state.is_active = is_fixed
    first, second = (operators_of(ours, case, rank=seed) for seed in (rank, others))
    assert len(first) > 100
    assert (first == second) is is_fixed
    reads = [name for name, _ in first if any(read in name for read in READS)]
    assert reads == [] or not is_fixed


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["fixed-degree4-batch3", "fixed-recompute-moe", "fixed-lancet"])
def test_weights_are_stacked_once_per_pass(name: str) -> None:
    """For all chunks, and never kept from one pass to the next."""
    from tests.dist.blocks import build_layers, forward, inputs_of, run

    (case,) = (dataclasses.replace(one, executor="sequential") for one in FIXED_ROWS if one.name == name)
    rank = torch.distributed.get_rank()
    _, ours = build_layers(case)
    state = fixed_rows_of(ours)
    state.is_watched = True
    run(ours, case, rank=rank)
    state.end_step()
    state.learn(1.5)
    state.is_active = True
    inputs = inputs_of(case, rank=rank, dtype=torch.float32)
    weights = (
        ours.mlp.experts.local_experts[0].linear_fc1.weight,
        ours.mlp.experts.local_experts[0].linear_fc2.weight,
    )
    shapes = [weight.shape for weight in weights]

    def stacked(operators: Operators) -> list[list[torch.Size]]:
        seen = [found for operator, found in operators.seen if operator.startswith("aten.stack")]
        return [found[0] for found in seen if found[0] in shapes]

    with Operators() as operators:
        output, _ = forward(ours, inputs)
    assert stacked(operators) == shapes
    with Operators() as operators:
        output.backward(inputs.gradient)
    assert sorted(stacked(operators)) == sorted(shapes)


@pytest.mark.parametrize("rebuilt", [(), (0, 2, 3), (0, 1, 2, 3)], ids=["keep", "mixed", "rebuild"])
def test_stacked_weights_are_released_after_the_last_chunk(rebuilt: tuple[int, ...]) -> None:
    """Also if only some chunks run again, so that the passes use the weights of a layer unequally often."""
    from megatron_ampipe.layers.fixed_experts import StackedWeights
    from megatron_ampipe.schedule import Direction

    weights = [torch.ones(2, 3), torch.ones(2, 3)]
    stacked = StackedWeights(4)
    for _ in range(4):
        stacked.take(weights, Direction.FORWARD)
    assert stacked._stacked is None
    copies = set()
    for chunk in range(4):
        if chunk in rebuilt:
            copies.add(stacked.take(weights, Direction.FORWARD))
        copies.add(stacked.take(weights, Direction.BACKWARD))
    assert stacked._stacked is None
    assert len(copies) == 1


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", ["fixed-ep4-degree2", "fixed-hybridep-ep4"])
def test_a_count_above_its_budget_is_seen(name: str) -> None:
    """Rows that do not fit are left out: the result is wrong, and finite, until somebody asks.

    Every rank sees it, or with HybridEP the one that drops them.
    """
    from megatron_ampipe.exchange import fixed_rows
    from megatron_ampipe.schedule import row_budget
    from tests.dist.blocks import build_layers, run, wrong

    (case,) = (one for one in FIXED_ROWS if one.name == name)
    rank = torch.distributed.get_rank()
    stock, ours = build_layers(case)
    state = fixed_rows_of(ours)
    state.is_watched = True
    expected, _ = run(stock, case, rank=rank), run(ours, case, rank=rank)
    state.end_step()
    # The largest number of rows of one pair, in the last chunk alone.
    counts, by_library = state._chunks[-1].window, case in FIXED_HYBRID
    if not by_library:
        counts.view(-1)[counts.argmax()] -= 2
    elif rank == 1:
        counts[0, rank] -= 2
    with mock.patch.object(row_budget, "VARIATION", 0.0):
        state.learn(1.0)
    state.begin_step()
    state.is_active = True
    with mock.patch.object(fixed_rows, "PADDING", math.nan):
        found = run(ours, case, rank=rank)
    assert state.overflow(torch.device("cpu")).tolist() == [int(not by_library or rank == 1)]
    assert all(value.isfinite().all() for value in found.values())
    # Some rank misses a row.
    problems: list[Any] = [None] * 4
    torch.distributed.all_gather_object(problems, sorted(wrong(expected, found, TOLERANCE)))
    assert any(problems)
    state.begin_step()
    state.is_active = False
    assert wrong(expected, run(ours, case, rank=rank), TOLERANCE) == {}


@pytest.mark.ranks(1)
def test_a_training_loop_that_nobody_watches_is_refused() -> None:
    from megatron_ampipe.errors import BadInput
    from tests.dist.blocks import build_layers, run

    (case,) = (one for one in FIXED_ROWS if one.name == "fixed-ep1")
    _, ours = build_layers(case)
    with pytest.raises(BadInput, match="does not run Megatron's train_step"):
        run(ours, case)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("path", ["", "local_experts.0", "local_experts.1.linear_fc2"])
def test_a_hook_inside_of_the_experts_is_refused(path: str) -> None:
    from megatron_ampipe.errors import BadInput
    from tests.dist.blocks import build_layers, run

    (case,) = (one for one in FIXED_ROWS if one.name == "fixed-ep1")
    _, ours = build_layers(case)
    fixed_rows_of(ours).is_watched = True
    ours.mlp.experts.get_submodule(path).register_forward_hook(lambda *_: None)
    with pytest.raises(BadInput, match=r"hook of mlp\.experts"):
        run(ours, case)
