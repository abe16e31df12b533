"""No races on a modelled device, in any order of a checked schedule; inserted faults are reported.

docs/gpu.md lists what these tests cannot show.
"""

import itertools
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_ampipe.plan.stage_costs import host_calls
from megatron_ampipe.schedule import MOE_BLOCK, Direction, Exchange
from megatron_ampipe.schedule.chunks import DocumentRows
from tests.dist.cases import ALLGATHER, AUX, MOE_AGAIN, SHARED, TIGHT
from tests.dist.worker import start_alone
from tests.plan_cases import sized_block
from tests.streams.cases import RANKS, RANKS_OF_NODES, Run, block, lazy_issue, runs
from tests.streams.model import HOST, ModelStream

pytestmark = pytest.mark.ranks(1)
COUNTED = ("capacity", "parity-capacity", "parity-ranks", "parity-nodes", "parity-2dh", "nodes")
"""What is kept, or sent once, is counted, and the count is not waited for where rows are prepared."""


EVENT = "Event.synchronize"
WAITS = (
    # A layer of Megatron runs, with stand-ins: its own waits.
    (r"(ampipe|moe-only|sequential)-1", r"between blocks: .*"),
    (r"parity-delta-documents", r"between blocks: .*"),
    # The bounds of documents come with each micro-batch.
    (r"parity-documents-masked.*", r"between blocks: Tensor\.to"),
    (r"parity-documents.*", r"between blocks: Tensor\.tolist"),
    # How many rows are similar, and how many a router sends that gives tokens any number of experts.
    (r".*condense.*", r"(forward|backward) (again:)?condense: .*"),
    (r"parity-gate-(sigmoid|forward|varying|expert-choice).*", r"forward route: _local_scalar_dense"),
    # Megatron's sinkhorn repeats until it has converged.
    (r"parity-(choice|padding)-sinkhorn.*", r"forward choose: _local_scalar_dense"),
    # The test itself compares what a block that runs again has recorded (tests/dist/routing_records.py).
    (r"parity-replay-.*-recompute", r"backward again:route: equal"),
)
"""Names of runs, and where the host waits in them, other than for AMPipe's event of the counts."""


@pytest.fixture(autouse=True, scope="module")
def _alone() -> None:
    """Rank 0 of several."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    torch.distributed.destroy_process_group()
    start_alone(RANKS_OF_NODES, expert_model_parallel_size=RANKS)
    # As Megatron's schedules; without a scale, the first backward pass makes one on the host.
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))


def _places(waits: Sequence[tuple[str, str]]) -> Counter[str]:
    """How often the host waits, by kind of stage and call."""
    return Counter(f"{place.partition('.')[0] or 'between blocks'}: {call}" for place, call in waits)


@pytest.mark.parametrize("run", list(runs()), ids=lambda run: run.name)
def test_there_are_no_races(run: Run) -> None:
    from tests.streams.run import run_case

    found = run_case(run)
    assert found.races == ()
    # A run in which nothing was tracked would prove nothing.
    assert found.num_operations > 50
    others = {place for place in _places(found.waits) if not place.endswith(EVENT)}
    patterns = [place for name, place in WAITS if re.fullmatch(name, run.name)]
    assert {place for place in others if not any(re.fullmatch(one, place) for one in patterns)} == set()
    if run.case.fixed_rows:
        assert found.waits == ()
    if run.name.startswith("parity-documents"):
        # Once for all layers.
        assert [place for place, _ in found.waits].count("") == run.in_flight
    if run.name.startswith(("recomputed-stack", "parity-stack-recompute-capacity")):
        # The host does not wait when a layer runs again.
        places = {place for place, _ in found.waits}
        assert any(place.startswith("forward dispatch") for place in places)
        assert not any(place.startswith("backward") for place in places)
    # What condenses tokens compares them.
    if run.name.startswith(COUNTED) and "condense" not in run.name:
        assert set(_places(found.waits)) == {f"forward dispatch: {EVENT}"}


def test_the_model_knows_which_copies_wait() -> None:
    from tests.streams.run import modelled_device

    with modelled_device() as tracker:
        on_host, on_device = torch.arange(4), torch.arange(4, device="cuda")
        mask = on_device > 1
        copies: dict[str, Callable[[], Any]] = {
            "from memory that is not pinned": lambda: on_host.to("cuda", non_blocking=True),
            "blocking": lambda: on_host.pin_memory().to("cuda"),
            "with another dtype": lambda: on_host.pin_memory().to("cuda", torch.int32, non_blocking=True),
            "into a tensor": lambda: on_device.copy_(on_host, non_blocking=True),
            "of a list": lambda: torch.tensor([1], device="cuda"),
            "of indices": lambda: on_device[on_host],
            "of rows by a mask": lambda: on_device[mask],
            "of repeats": lambda: on_device.repeat_interleave(on_device),
            "to the host": on_device.cpu,
            "to numbers": on_device.tolist,
        }
        for name, copy in copies.items():
            HOST.waits.clear()
            copy()
            assert len(HOST.waits) == 1, name
        HOST.waits.clear()
        pinned = on_host.pin_memory()
        copied = pinned.to("cuda", non_blocking=True)
        assert copied.is_cuda and not pinned.is_cuda
        assert torch.empty(4, dtype=torch.int64, pin_memory=True).copy_(copied, non_blocking=True).sum() == 6
        assert HOST.waits == []
        # It is read before it has arrived.
        assert [*tracker.races] == [
            "between blocks: sum: the host reads memory that is still being copied to"
        ]
        pinned.add_(1)
        assert "the host writes memory that is still being copied from" in [*tracker.races][-1]


def test_copies_of_single_functions_do_not_wait() -> None:
    """Those of functions that only kernels of a GPU need."""
    from megatron_ampipe.attention.backends import bounds_of
    from megatron_ampipe.layers.gates import TokenIds, hashed_experts
    from tests.dist.blocks import build_layers
    from tests.streams.run import modelled_device

    documents = [DocumentRows(0, 3, 0, 5), DocumentRows(0, 1, 5, 6)]
    _, layer = build_layers(block(local_experts=2, router="hash"))
    dispatcher, router = layer._block.dispatcher(Exchange.ROWS), layer.mlp.router
    dispatcher._fused, dispatcher._packed = True, SimpleNamespace(num_rows=8)
    router.id_source = TokenIds(16)
    with modelled_device() as tracker:
        rows, keys, most_rows, most_keys = bounds_of(documents, device=torch.device("cuda", 0))
        assert rows.is_cuda and keys.is_cuda
        dispatcher.set_counts(torch.arange(8, device="cuda"))
        dispatcher.transport()
        by_source, by_expert = dispatcher.splits.pieces
        assert by_source.is_cuda and by_expert.is_cuda
        experts = router.experts_of(torch.arange(16, device="cuda"))
        assert [call for _, call in HOST.waits] == [EVENT]
        assert tracker.races == {}
    assert (rows.tolist(), keys.tolist(), most_rows, most_keys) == ([0, 3, 4], [0, 5, 6], 3, 5)
    assert by_source.tolist() == by_expert.T.tolist() == [[0, 1], [4, 5]]
    assert torch.equal(experts, hashed_experts(torch.arange(16), 4, 1, salt=router._salt))


BLOCK = block(degree=4)
FIXED = block(degree=4, local_experts=2, fixed_rows=True)
FAULTS: dict[str, tuple[str, Callable[..., Any], str, dict[str, Any]]] = {
    "a missing event": (
        "tests.streams.model.ModelStream.wait_event", lambda stream, event: None,
        r"forward combine\.1: .* reads what forward expert\.1: .* has used", {},
    ),
    "a dropped hold": (
        "megatron_ampipe.runtime.streams.CommMemory.record_use", lambda comm_memory, tensors: (),
        r"allocated by forward dispatch\.\d: new_empty was released .* not ordered after backward expert\.\d",
        {"issue": lazy_issue},
    ),
    # No host waits for the counts of fixed rows.
    "a missing event of the counts": (
        "tests.streams.model.ModelStream.wait_event", lambda stream, event: None,
        r"forward expert\.1: .* reads what forward counts\.1: .* has used", {"case": FIXED},
    ),
    # Data parallelism is built on the stream that Megatron chooses.
    "accumulation on another stream": (
        "tests.streams.run.on_training_stream", lambda construct: construct,
        r"backward expert\.1: a gradient on compute is accumulated on get_model", {"data_parallel": True},
    ),
}  # fmt: skip
"""What is replaced, and by what; a regular expression of the race that it causes; how the block runs."""


@pytest.mark.parametrize("name", FAULTS)
def test_an_inserted_fault_is_reported(name: str) -> None:
    from tests.streams.run import run_case

    replaced, fault, race, options = FAULTS[name]
    run = Run(name, **{"case": BLOCK} | options)
    with mock.patch(replaced, fault):
        races = run_case(run).races
    assert any(re.search(race, found) for found in races), races
    assert run_case(run).races == ()


def test_collectives_and_counts_have_streams_of_high_priority() -> None:
    from tests.streams.run import run_case

    run_case(Run("streams", BLOCK))
    of_lanes = [stream for stream in ModelStream.made if stream.name.startswith("stream")]
    assert [stream.priority for stream in of_lanes] == [min(ModelStream.priority_range())] * 2


FIRST = {
    "forward qkv": 2,
    "backward qkv": -1,
    "forward attention": -8,
    "backward attention": -5,
    "backward route": -1,
    "forward merge": 1,
}
"""How many calls more the first chunk has: it makes the buffers, and sees no earlier keys."""
SEQUENCE_LENGTH = 64
"""Enough tokens for every expert to receive some in every chunk."""
PLANNED: dict[str, dict[str, Any]] = {
    f"{number} experts per rank": {"local_experts": number} for number in (1, 2, 4)
} | {"fixed rows": {"local_experts": 4, "fixed_rows": True}}
BLOCKS: dict[str, dict[str, Any]] = PLANNED | {
    "router losses, shared experts": {"model": AUX | SHARED},
    "capacity": {"model": TIGHT},
    "each token once per rank": {
        "local_experts": 2, "exchange": Exchange.RANKS, "model": {"moe_router_topk": 2}
    },
    "recompute of experts": {"model": MOE_AGAIN},
    "all-gather dispatcher": {"local_experts": 2, "model": ALLGATHER},
}  # fmt: skip


@pytest.mark.parametrize("degree", [2, 4, 8])
@pytest.mark.parametrize("name", BLOCKS)
def test_the_calls_of_the_host_are_as_the_planner_says(name: str, degree: int) -> None:
    from megatron_ampipe.layers import fixed_experts
    from tests.streams.run import run_case

    case = block(kernel="cpu-flash", sequence_length=SEQUENCE_LENGTH, degree=degree, **BLOCKS[name])
    # As in bf16, in which torch has grouped products for the modelled device.
    with mock.patch.object(fixed_experts, "_can_group", lambda *_: True):
        run = run_case(Run(name, case), warm=True)
    # One wait for each chunk, for the token counts; none in a backward pass, or between blocks.
    place = "expert" if name == "all-gather dispatcher" else "dispatch"
    assert _places(run.waits) == ({} if case.fixed_rows else {f"forward {place}: {EVENT}": degree})
    if name not in PLANNED:
        return
    of_planner = sized_block(
        experts=RANKS * PLANNED[name]["local_experts"],
        expert=RANKS,
        rows_margin=1.5 if case.fixed_rows else None,
    )
    calls: dict[str, list[int]] = defaultdict(list)
    for place, made in run.issued.items():
        if place:
            calls[place.partition(".")[0]].append(sum(made.values()))
    expected = {
        kind: host_calls(of_kind, direction, of_planner) + FIRST.get(kind, 0) / degree
        for direction, of_kind in itertools.product(Direction, MOE_BLOCK)
        if (kind := f"{direction} {of_kind}") in calls
    }
    counted = {kind: statistics.fmean(of_stages) for kind, of_stages in calls.items()}
    assert counted == pytest.approx(expected, rel=0.06), "counted, and in plan/stage_costs.py"
