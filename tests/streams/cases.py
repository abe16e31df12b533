"""The runs on the modelled device, as data: all kinds of blocks, and random orders of their collectives."""

import dataclasses
import functools
import math
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from megatron_ampipe.schedule import STRATEGIES, Exchange, Pipeline, Program, Stage
from megatron_ampipe.schedule.stage_kind import COMPUTE
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
    yield from runs_in_other_orders()
    yield from runs_with_fixed_rows()
    # Layers that delay the gradients of their weights.
    for schedule in ("lancet", "joined"):
        case = block(schedule=schedule, model=SHARED | LOSSES, engine="grouped")
        yield Run(f"engine-{schedule}-in-flight", case, in_flight=3)
        yield Run(f"engine-{schedule}-late", case, issue=lazy_issue)


def runs_in_other_orders() -> Iterator[Run]:
    """Recompute, memory strategies, two hops, ranks that share an expert, rows of tensor-parallel ranks: each
    issued late, and at random."""
    nodes = dataclasses.replace(ONCE_PER_NODE[0], executor="cuda")
    shares = block(
        local_experts=2, parallel={"expert_tensor_parallel_size": RANKS, "expert_model_parallel_size": 1}
    )
    both = shares.parallel | {"expert_model_parallel_size": RANKS}
    memory = block(
        degree=len(STRATEGIES), local_experts=2, model=SHARED | LOSSES, memory="/".join(STRATEGIES)
    )
    cases = {
        "recomputed-stack": block(layers="mdm", stack=0, recompute=math.inf, model=LOSSES),
        "memory": memory,
        "memory-lancet": dataclasses.replace(memory, schedule="lancet"),
        "joined": block(degree=3, schedule="joined", model=SHARED, memory="redispatch"),
        "nodes": nodes,
        "nodes-2dh": dataclasses.replace(nodes, exchange=Exchange.TWO_DIMENSIONAL),
        "nodes-memory": dataclasses.replace(nodes, memory="redispatch"),
        "shares": shares,
        "shares-memory": dataclasses.replace(shares, memory="redispatch"),
        "shares-on-nodes": dataclasses.replace(shares, parallel=both, ranks_per_node=RANKS),
        "rows": block(parallel=TP, layers="mdm", stack=0, model={"add_bias_linear": True} | LOSSES),
    }
    for name, case in cases.items():
        yield Run(f"{name}-late", case, issue=lazy_issue)
        for number in range(3):
            issue = functools.partial(random_issue, random.Random(number))
            yield Run(f"{name}-random-{number}", case, in_flight=1 + number % 2, issue=issue)


def runs_with_fixed_rows() -> Iterator[Run]:
    """Counts stay on the device: only events order the stages that read them after the exchange of counts."""
    model = SHARED | LOSSES
    cases = {
        "plain": block(local_experts=2, degree=3, model=model),
        "moe-only": block(local_experts=2, schedule="moe-only", degree=3, backward_degree=6, model=model),
        "lancet": block(local_experts=2, schedule="lancet", model=model),
        "engine-lancet": block(local_experts=2, schedule="lancet", model=model, engine="experts"),
        "recomputed-stack": block(
            local_experts=2, layers="mdm", stack=0, recompute=math.inf, degree=3, model=LOSSES
        ),
        "recompute": block(local_experts=2, degree=3, model=model | MOE_AGAIN),
        "memory": block(
            degree=len(STRATEGIES), local_experts=2, schedule="lancet", model=model,
            memory="/".join(STRATEGIES),
        ),
        "shares-memory": block(
            local_experts=2, degree=2, memory="redispatch",
            parallel={"expert_tensor_parallel_size": RANKS, "expert_model_parallel_size": 1},
        ),
    }  # fmt: skip
    for name, case in cases.items():
        case = dataclasses.replace(case, fixed_rows=True)
        random_order = functools.partial(random_issue, random.Random(0))
        yield Run(f"fixed-{name}", case)
        yield Run(f"fixed-{name}-late", case, in_flight=2, issue=lazy_issue)
        yield Run(f"fixed-{name}-random", case, in_flight=2, issue=random_order)


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
