"""Compares every schedule, executor and feature with a stock Megatron layer with the same weights (fp32).

Output, input gradient, all parameter gradients, router buffers and logged losses, to 1e-5 relative.
"""

import dataclasses
import json
import os
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_ampipe.exchange.nccl_ep import NCCLEPTransport
from megatron_ampipe.files.timeline import COMPUTE, StageSpan
from megatron_ampipe.schedule import KEEP
from tests import te_ep_standin, te_permutation_standin
from tests.dist.cases import AGAIN, PARITY, SCATTERED, Case
from tests.golden.write import FOLDER

TOLERANCE = 1e-5
COLLECTIVES = FOLDER / "collectives.json"
"""By case, what :func:`collectives` finds; written in place of compared if the environment asks for it."""
# New process groups take longer than most cases.
CASES = sorted(PARITY, key=lambda case: str(case.parallel))


@pytest.fixture(autouse=True, scope="module")
def _stand_ins() -> None:
    te_ep_standin.install()
    te_permutation_standin.install()


@pytest.fixture(autouse=True)
def _other_context() -> None:
    """NCCL EP has one for the process, and cases have other sizes."""
    te_ep_standin.ep_finalize()
    NCCLEPTransport._context_tokens = 0


def collectives(spans: Sequence[StageSpan]) -> dict[str, str]:
    """By direction and lane, the transfers of a pass in their order; the layer follows an ``@``."""
    found: dict[str, list[str]] = {}
    for span in spans:
        if span.lane != COMPUTE:
            found.setdefault(f"{span.direction} {span.lane}", []).append(f"{span.stage}@{span.layer}")
    return {lane: " ".join(names) for lane, names in sorted(found.items())}


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=pytest.mark.ranks(case.world_size)) for case in CASES]
)
def test_equals_stock(case: Case) -> None:
    from megatron_ampipe.layers.block_modules import BlockModules
    from megatron_ampipe.runtime.recorder import Recorder
    from tests.dist.blocks import build_layers, forward, inputs_of, run, wrong
    from tests.dist.parameter_reads import ParameterReads

    rank = torch.distributed.get_rank()
    recorder = Recorder(num_iterations=1 if case.executor == "thread" else 0)
    recorder.start_iteration(1)
    stock, ours = build_layers(case, recorder)
    # Ranks make groups in one order, so all are made before the first batch.
    late = AssertionError("a process group is made in a pass")
    with mock.patch.object(torch.distributed, "new_group", side_effect=late):
        expected, found = run(stock, case, rank=rank), run(ours, case, rank=rank)
    assert wrong(expected, found, TOLERANCE) == {}
    assert list(stock.state_dict()) == list(ours.state_dict())
    layer = "TransformerLayer" if case.pipeline.is_stock else "AMPipeTransformerLayer"
    assert {type(layer).__name__ for layer in getattr(ours, "layers", [ours])} == {layer}
    if case.executor == "thread":
        assert_known_order(case, collectives(recorder.timeline(rank=rank, labels={}).spans))
    if case.only_losses:
        # The comparison would also pass with zeros.
        routers = [value for name, value in expected.items() if name.endswith("mlp.router.weight")]
        assert len(routers) == case.layers.count("m")
        assert min(value.abs().max() for value in routers) > 1e-6
    # In a separate pass, so that the comparison runs without this mode.
    with ParameterReads(ours) as reads:
        forward(ours, inputs_of(case, rank=rank, dtype=torch.float32))
    report = reads.report()
    # Norms, QKV, output projection, router, and the two linear layers of an expert.
    assert report.pop("watched") >= 7
    # A hook that never runs leaves an all-gather unfinished (--overlap-param-gather).
    known: dict[str, Any] = {"early": {}, "never entered": [], "never read": []}
    if "g" in case.layers:
        # Megatron's gated delta net reads the weight of its convolution as it is.
        with ParameterReads(stock) as reads:
            forward(stock, inputs_of(case, rank=rank, dtype=torch.float32))
        known = {name: value for name, value in reads.report().items() if name != "watched"}
        assert known["early"] or not known["never entered"], "then reads are not seen at all"
        assert all("conv1d" in name for name in [*known["early"], *known["never entered"]])
    assert report == known
    assert_one_order_of_collectives(ours, case)
    if case.memory != KEEP:
        assert_same_bits(dataclasses.replace(case, memory=KEEP), found)
    if case in AGAIN and case.model["normalization"] == "LayerNorm":
        assert_same_bits(dataclasses.replace(case, model=case.model | {"recompute_granularity": None}), found)
    if case in SCATTERED:
        # Linear layers that exchange the rows inside.
        with mock.patch.object(BlockModules, "scatters_rows", False):
            assert_same_bits(case, found)


_ordered: set[str] = set()
"""The layouts whose collectives this process has compared."""
_NOT_IN_A_LAYOUT = {
    "name": "", "executor": "thread", "kernel": "exact", "sequence_length": 0, "batch": 1, "rope": False,
    "shares": None, "only_losses": False, "documents": (), "stock": {},
}  # fmt: skip
"""What does not change which collectives a case has, and in which order."""
_WITH_COLLECTIVES = ("moe_token_disp", "moe_router", "moe_z", "moe_shared", "recompute", "cp_comm", "multi_")


def layout_of(case: Case) -> str:
    """What decides on the collectives of a case; the same text for cases that have the same."""
    model = {name: value for name, value in case.model.items() if name.startswith(_WITH_COLLECTIVES)}
    return str(dataclasses.replace(case, **_NOT_IN_A_LAYOUT, model=model))


def assert_one_order_of_collectives(ours: torch.nn.Module, case: Case) -> None:
    """The executor for GPUs issues the collectives of all groups in an order that all ranks agree on."""
    from megatron_ampipe.runtime.executors import CudaExecutor
    from tests.dist.blocks import run
    from tests.dist.collective_order import Issued, problems, recorded

    world_size, layout = torch.distributed.get_world_size(), layout_of(case)
    if world_size == 1 or case.pipeline.is_stock or layout in _ordered:
        return
    _ordered.add(layout)
    # All layers share it.
    context = next(iter(getattr(ours, "layers", [ours])))._block.context
    executor, context.executor = context.executor, CudaExecutor()
    with recorded() as issued:
        run(ours, case, rank=torch.distributed.get_rank())
    context.executor = executor
    by_rank: list[list[Issued]] = [[]] * world_size
    torch.distributed.all_gather_object(by_rank, issued)
    # A dispatcher that counts itself has a group for everything.
    counts_apart = case.model.get("moe_token_dispatcher_type") != "flex"
    assert len({one.group for one in issued}) > counts_apart, "counts and dispatches have different groups"
    assert problems(by_rank) == []


def assert_same_bits(case: Case, found: dict[str, torch.Tensor]) -> None:
    """AMPipe's layer of a case computes this."""
    from tests.dist.blocks import build_layers, run, wrong

    kept = run(build_layers(case)[1], case, rank=torch.distributed.get_rank())
    assert wrong(kept, found, 0.0) == {}


def assert_known_order(case: Case, found: dict[str, str]) -> None:
    """Every rank has the collectives of the golden file, in their order."""
    writes = os.environ.get("AMPIPE_TEST_WRITE") == "1"
    if writes and torch.distributed.get_rank():
        return
    stored = json.loads(COLLECTIVES.read_text(encoding="utf-8"))
    if not writes:
        assert found == stored[case.name]
    else:
        kept = {case.name: stored[case.name] for case in PARITY if case.name in stored}
        text = json.dumps(kept | {case.name: found}, indent=1, sort_keys=True)
        COLLECTIVES.write_text(text + "\n", encoding="utf-8")


@pytest.mark.ranks(4)
def test_the_order_of_collectives_with_interleaved_pipeline_stages() -> None:
    """Two pipeline ranks of two model chunks each, each on two expert-parallel ranks.

    What Megatron sends from stage to stage is left out: one rank sends what another one receives.
    """
    from megatron_ampipe.runtime.executors import CudaExecutor
    from tests.dist import one_device
    from tests.dist.blocks import build_layers
    from tests.dist.collective_order import Issued, problems, recorded
    from tests.dist.interleaved import step

    (case,) = [one.case for one in one_device.CASES[4] if one.case.name == "pp2-ep2"]
    _, ours = build_layers(dataclasses.replace(case, executor="thread"))
    context = ours.layers[0]._block.context
    executor, context.executor = context.executor, CudaExecutor()
    with recorded() as issued:
        step(ours, case)
    context.executor = executor
    issued = [one for one in issued if one.operation not in ("c10d::send", "c10d::recv_")]
    by_rank: list[list[Issued]] = [[]] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(by_rank, issued)
    assert len(issued) > 50 and problems(by_rank) == []
