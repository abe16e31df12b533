"""The runs on the modelled device, as data: all kinds of blocks, and random orders of stages."""

import dataclasses
import functools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from megatron_ampipe.schedule import (
    KEEP,
    STRATEGIES,
    WEIGHTS,
    BlockFeatures,
    Direction,
    Exchange,
    Pipeline,
    Program,
    Schedule,
    Stage,
    kinds,
    memory_to_text,
    needs_of,
    with_memory,
)
from megatron_ampipe.schedule.stage_kind import COMM, COMPUTE, INTRA
from tests.dist.cases import (
    ALLGATHER,
    AUX,
    MOE_AGAIN,
    ONCE_PER_NODE,
    PARITY,
    SHARED,
    TIGHT,
    TOP2,
    TP,
    Case,
    Z,
)

IssueOrder = Callable[..., tuple[tuple[str, Stage], ...]]
"""As ``schedule.issue_order``."""
RANKS = 2
RANKS_OF_NODES = 4
NUM_RANDOM_ORDERS = 30


class Run(NamedTuple):
    """One run of a block, whose executor is the one for CUDA, on the modelled device."""

    name: str
    case: Case
    pipeline: Pipeline | None = None
    """In place of that of the case."""
    in_flight: int = 1
    """Number of micro-batches whose forward runs before the first backward."""
    gradients: bool = True
    """If False, run under ``no_grad``."""
    issue: IssueOrder | None = None
    """In place of ``schedule.issue_order``."""
    engine: bool = False
    """With stand-ins of Transformer Engine's linear layers."""
    data_parallel: bool = False
    """With Megatron's data parallelism around the layer, as in a launch."""


def block(*, local_experts: int = 1, **fields: object) -> Case:
    """A block with ``local_experts`` experts on each rank."""
    model = {"num_moe_experts": RANKS * local_experts} | fields.pop("model", {})  # type: ignore[operator]
    return Case("block", world_size=RANKS, executor="cuda", model=model, **fields)  # type: ignore[arg-type]


LOSSES = AUX | Z | TOP2
VARIANTS = {
    "plain": {},
    "shared-recompute": SHARED | MOE_AGAIN,
    "allgather-recompute": ALLGATHER | MOE_AGAIN,
    "capacity-losses": TIGHT | LOSSES,
}


def runs() -> Iterator[Run]:
    """All runs."""
    for schedule in ("ampipe", "moe-only", "sequential"):
        for degree in (1, 3, 8):
            case = block(local_experts=4, schedule=schedule, degree=max(degree, 2))
            yield Run(f"{schedule}-{degree}", case, Pipeline.of(degree, schedule=schedule))
    for name, model in VARIANTS.items():
        case = block(local_experts=2, model=model)
        yield Run(f"{name}-no-grad", case, gradients=False)
        yield Run(f"{name}-in-flight", case, in_flight=3)
        yield Run(f"{name}-late", case, issue=lazy_issue)
    case = block(degree=4, layers="mdm", stack=0, recompute=math.inf, model=LOSSES)
    yield Run("recomputed-stack-in-flight", case, in_flight=3)
    yield Run("recomputed-stack-late", case, issue=lazy_issue)
    for number in range(5):
        issue = functools.partial(random_issue, random.Random(number))
        yield Run(f"recomputed-stack-random-{number}", case, issue=issue)
    for case in PARITY:
        # The split of the sequence and the attention kernel make no difference here. Stand-ins of DeepEP and
        # HybridEP are of real ranks, and those of fused kernels no kernels; a ring and ids of tensor-parallel
        # rows are not modelled.
        left_out = ("degree", "length", "kernel", "only", "fused", "gate-hash", "gate-ids")
        told = case.name.startswith(left_out) or case.pipeline.is_stock
        told = told or case.model.get("moe_token_dispatcher_type") == "flex"
        told = told or "context_parallel_size" in case.parallel or case.world_size > RANKS_OF_NODES
        if case.executor == "thread" and not told:
            yield Run(f"parity-{case.name}", dataclasses.replace(case, executor="cuda", kernel="exact"))
    yield from random_runs()
    yield from runs_of_lanes()
    # Layers that delay the gradients of their weights.
    for schedule in ("lancet", "joined"):
        case = block(schedule=schedule, model=SHARED | LOSSES)
        yield Run(f"engine-{schedule}-in-flight", case, in_flight=3, engine=True)
        yield Run(f"engine-{schedule}-late", case, issue=lazy_issue, engine=True)


def runs_of_lanes() -> Iterator[Run]:
    """Two hops, ranks that share an expert, rows of tensor-parallel ranks: in a late and in random orders."""
    nodes = dataclasses.replace(ONCE_PER_NODE[0], executor="cuda")
    two_hops = BlockFeatures(losses=True, nodes=True, chunked_qkv=True)
    shares = block(
        local_experts=2, parallel={"expert_tensor_parallel_size": RANKS, "expert_model_parallel_size": 1}
    )
    both = shares.parallel | {"expert_model_parallel_size": RANKS}
    rows = block(parallel=TP, layers="mdm", stack=0, model={"add_bias_linear": True} | LOSSES)
    yield Run("rows-in-flight", rows, in_flight=3)
    for name, case, features in (
        ("nodes", nodes, two_hops),
        ("nodes-2dh", dataclasses.replace(nodes, exchange=Exchange.TWO_DIMENSIONAL), two_hops),
        ("shares", shares, BlockFeatures(gathers=COMM, chunked_qkv=True)),
        (
            "shares-on-nodes",
            dataclasses.replace(shares, parallel=both, ranks_per_node=RANKS),
            BlockFeatures(gathers=INTRA, chunked_qkv=True),
        ),
        (
            "rows",
            rows,
            BlockFeatures(losses=True, chunked_qkv=True, row_links="network", gathers_rows=True),
        ),
    ):
        yield Run(f"{name}-late", case, issue=lazy_issue)
        for number in range(6):
            yield random_run(f"{name}-{number}", random.Random(number), case, features)


def random_runs() -> Iterator[Run]:
    """Random orders of the lanes and of the host that only respect the dependencies."""
    for number in range(NUM_RANDOM_ORDERS):
        chooser = random.Random(number)
        shared, losses, top2, recompute = (chooser.random() < 0.5 for _ in range(4))
        model = (SHARED if shared else {}) | (AUX if losses else {}) | (TOP2 if top2 else {})
        keeps = number % 5 == 0
        model |= MOE_AGAIN if keeps and recompute else {}
        case = block(local_experts=chooser.choice((1, 2)), model=model)
        features = BlockFeatures(losses=losses, shared=shared, chunked_qkv=True)
        memories = (KEEP,) if keeps else tuple(STRATEGIES)
        yield random_run(str(number), chooser, case, features, memories=memories)


def random_run(
    name: str,
    chooser: random.Random,
    case: Case,
    features: BlockFeatures,
    *,
    memories: Sequence[str] = tuple(STRATEGIES),
) -> Run:
    """A run of a block with a random memory strategy for each chunk and a random order of stages."""
    degree = chooser.choice((2, 3, 4))
    memory = memory_to_text([chooser.choice(memories) for _ in range(degree)])
    order = random_schedule(degree, with_memory(features, memory), chooser)
    return Run(
        f"random-{name}",
        dataclasses.replace(case, degree=degree),
        Pipeline.of(degree, order=order, memory=memory, exchange=case.exchange, stack=case.stack),
        in_flight=chooser.choice((1, 2)),
        issue=functools.partial(random_issue, chooser) if chooser.random() < 0.5 else None,
    )


def random_schedule(degree: int, features: BlockFeatures, chooser: random.Random) -> Schedule:
    """A random order of every lane that passes the check."""
    present = [kinds.QKV, kinds.ATTENTION, kinds.EXPERT, *([kinds.SHARED] if features.shared else [])]
    weights = [WEIGHTS[kind] for kind in present if chooser.random() < 0.5]
    joined = [kind for kind in weights if chooser.random() < 0.5]
    apart = [Stage(kind, None if kind in joined else 0) for kind in weights]
    schedule = Schedule("random", degree, Program(()), Program.of({COMPUTE: apart}), degree)

    def in_lanes(_: Program, direction: Direction) -> Program:
        needs = needs_of(schedule, [features], direction)
        combines = chooser.choice((COMM, "comm.second"))
        lanes: dict[str, list[Stage]] = {}
        left = dict(needs)
        while left:
            stage = chooser.choice([stage for stage in left if left.keys().isdisjoint(needs[stage])])
            del left[stage]
            lane = combines if stage.kind == kinds.COMBINE else stage.kind.lane.name
            lanes.setdefault(lane, []).append(stage)
        return Program.of(lanes)

    return schedule.mapped(in_lanes)


def random_issue(
    chooser: random.Random, program: Program, needs: dict[Stage, tuple[Stage, ...]], *, host_waits: bool
) -> tuple[tuple[str, Stage], ...]:
    """Lanes merged at random: a collective may be issued long after its inputs are ready."""
    return _merged(program, needs, lambda ready: chooser.choice(ready))


def lazy_issue(
    program: Program, needs: dict[Stage, tuple[Stage, ...]], *, host_waits: bool
) -> tuple[tuple[str, Stage], ...]:
    """Every collective is issued as late as the computation allows."""
    return _merged(program, needs, lambda ready: COMPUTE if COMPUTE in ready else ready[0])


def _merged(
    program: Program, needs: dict[Stage, tuple[Stage, ...]], choose: Callable[[list[str]], str]
) -> tuple[tuple[str, Stage], ...]:
    left = {lane: list(stages) for lane, stages in program.lanes}
    issued: dict[Stage, str] = {}
    while any(left.values()):
        ready = [lane for lane, stages in left.items() if stages and issued.keys() >= set(needs[stages[0]])]
        lane = choose(ready)
        issued[left[lane].pop(0)] = lane
    return tuple((lane, stage) for stage, lane in issued.items())
