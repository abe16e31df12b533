"""Steps of several micro-batches through four layers: Megatron's, stacks in chunks, and partners, in turns.

All use the same transport. Megatron's layers are measured twice; the second is the control. Partners run in
the order of Megatron's own for two micro-batches (the default), cut in two, and in the order that the
planner's search finds for the times of all stages, measured alone; passes without one are cut in two. The
bound is that of ``ampipe bench``: the larger of all computation and all transfers of the slowest rank, each
stage timed alone in every round, with what the first transfer waits for and what waits for the last one. The
kernel's TCP runs on the cores that compute: how much longer attention takes while a real link carries rows is
measured as well, and a second bound is that of computation so much slower for as long as there are transfers.
On a GPU all ranks but one are emulated, and stacks are also measured with their stages in CUDA graphs, and
with fixed rows and whole passes as graphs; budgets are learned, and graphs captured, before anything is
compared. The raw file has the peak of each kind of step, and what its graphs hold.

What is not AMPipe's, next to Megatron's layers: its own loop (:mod:`megatron_loop`) with CUDA graphs of the
same modules, with its overlap of two micro-batches, which it has in 16 bit only, and with both, which needs
layers of Transformer Engine; and ``moe-only``, which cuts experts and their exchanges, but not attention, as
Tutel does. A kind that cannot run here is in the raw file with what it needs (:mod:`step_kinds`).

Before anything is timed, gradients of every kind of step are compared with those of Megatron's layers. In
bf16, the experts that Megatron's layers choose for the first micro-batch are prescribed to all layers and
micro-batches, also while they are timed, since CUDA graphs would keep them. Needs root for a real link, from
the repository's root:

    PYTHONPATH=. python docs/measured/partners.py docs/measured/results/partners-200mbit.json 200mbit
    PYTHONPATH=. python docs/measured/partners.py docs/measured/results/partners-25MB.json emulated:25MB/s
    PYTHONPATH=. python docs/measured/partners.py gpu.json emulated:20GB/s mixtral mixtral-4k
    PYTHONPATH=. python docs/measured/partners.py te.json emulated:20GB/s mixtral mixtral-4k-te
"""

from __future__ import annotations

import contextlib
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from step_kinds import (
    CONTROL,
    DEGREES,
    KINDS,
    MEGATRON_GRAPHS,
    MOE_ONLY,
    OVERLAP,
    OVERLAP_GRAPHS,
    PARTNERS_WHOLE,
    STACK,
    STACK_GRAPHS,
    STACK_WHOLE,
    left_out,
)
from step_kinds import (
    MEGATRON as STOCK,
)

from megatron_ampipe.errors import DifferenceFound
from megatron_ampipe.plan.cluster import find_cluster, read_cluster
from megatron_ampipe.plan.partners import best_period, both_passes
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.plan.simulate import TimedProgram
from megatron_ampipe.schedule import MEGATRON, Partner, program_to_text, stage_from_text
from megatron_ampipe.tools.measuring import machine
from megatron_ampipe.tools.measuring.bench_job import EXACT, FIXED, GRAPH_MODULES
from megatron_ampipe.tools.measuring.grid import Case, block_of_case, find_grid, read_grid
from megatron_ampipe.tools.measuring.network import burst_bytes, parse_link
from megatron_ampipe.tools.measuring.ranks import Rank, RankJob, run_ranks
from megatron_ampipe.tools.measuring.tolerance import Tolerance

StageTimes = Mapping[str, Mapping[str, float]]
"""By direction and stage, with its layer, seconds that it takes alone."""

CPU_CASE = replace(
    next(case for case in read_grid(find_grid("cpu-small")) if case.topk == 1), sequence_length=2048
)
GPU_RANKS = 8
LAYERS, MICROBATCHES, ROUNDS = 4, 8, 3
PARTNERS = {
    f"partners, {MEGATRON}": Partner(order=MEGATRON),
    "partners, cut in two": Partner(2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps(RankJob):
    """What is timed: a block, and how many steps of each kind."""

    case: Case
    rounds: int


def main() -> None:
    """Measure over one link, and write the document."""
    file, link, *grid = sys.argv[1:]
    job = Steps(num_ranks=2, link=parse_link(link), case=CPU_CASE, rounds=ROUNDS)
    if grid:
        (case,) = read_grid(find_grid(grid[0]), only=grid[1])
        job = replace(
            job, num_ranks=GPU_RANKS, case=case, device="cuda", emulates_peers=True, rounds=ROUNDS + 1
        )
    of_ranks = run_ranks(job, work)
    # The slowest rank of each step.
    names = list(of_ranks[0]["seconds"])
    seconds = {
        name: [max(pair) for pair in zip(*(found["seconds"][name] for found in of_ranks), strict=True)]
        for name in names
    }
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    processor = {
        name: statistics.fmean(statistics.median(found["processor"][name]) for found in of_ranks)
        for name in names
    }
    bound_s, next_to_transfers_s = (
        max(bound_of_rank(found, slower) for found in of_ranks) for slower in (False, True)
    )
    for name in names:
        each = [
            1e3 * value / MICROBATCHES for value in (medians[name], min(seconds[name]), max(seconds[name]))
        ]
        gain, work_share = medians[STOCK] / medians[name], processor[name] / processor[STOCK]
        print(
            f"{name:20} {each[0]:5.0f} ms a micro-batch ({each[1]:.0f} to {each[2]:.0f}), {gain:.2f}x, ",
            end="",
        )
        print(f"processor {work_share:.2f}x, {bound_s / medians[name]:.1%} of the bound, ", end="")
        print(f"{next_to_transfers_s / medians[name]:.1%} of that next to transfers")
    missing = missing_kinds(job)
    for name, why in missing.items():
        print(f"{name:20} {why}")
    document = {
        "command": ["python", *sys.argv],
        "hardware": machine.hardware(),
        "versions": machine.versions(),
        "case": asdict(job.case) | {"layers": LAYERS, "microbatches": MICROBATCHES},
        "differences": of_ranks[0]["differences"],
        "left_out": missing,
        "tolerance": Tolerance.of(job.case.dtype, None).limit,
        "stages_seconds": [found["stages_s"] for found in of_ranks],
        "waits_seconds": [found["waits_s"] for found in of_ranks],
        "slowdowns": [found["slowdowns"] for found in of_ranks],
        "bound_seconds": bound_s,
        "bound_next_to_transfers_seconds": next_to_transfers_s,
        "searched": of_ranks[0]["searched"].splitlines(),
        "peak_bytes": of_ranks[0]["peak_bytes"],
        "graph_bytes": of_ranks[0]["graph_bytes"],
        "seconds": seconds,
        "processor_seconds": {name: [found["processor"][name] for found in of_ranks] for name in names},
    }
    Path(file).write_text(json.dumps(document, indent=1) + "\n")


def missing_kinds(job: Steps) -> dict[str, str]:
    """The kinds of steps that cannot run, each with what it needs."""
    return left_out(on_gpu=job.on_cuda, in_16_bit=job.case.dtype != "fp32", of_engine=not job.case.local)


def bound_of_rank(found: Mapping[str, Any], slower: bool) -> float:
    """Seconds that no order of all stages of a step can beat on a rank; ``slower`` next to transfers."""
    computation, transfers = (MICROBATCHES * found["stages_s"][lane] for lane in ("compute", "transfers"))
    if slower and found["slowdowns"]:
        # While as much is computed as without a transfer, less time has passed there.
        slowdown = statistics.median(found["slowdowns"])
        computation += (1 - 1 / slowdown) * min(transfers, slowdown * computation)
    return max(computation, transfers + sum(found["waits_s"].values()))


def sums(times_s: StageTimes) -> dict[str, float]:
    """Seconds of all computation and all transfers of a micro-batch."""
    seconds = {"compute": 0.0, "transfers": 0.0}
    for stages in times_s.values():
        for stage, time_s in stages.items():
            seconds["transfers" if stage_from_text(stage).is_communication else "compute"] += time_s
    return seconds


def waits(times_s: StageTimes, needs: Mapping[str, Mapping[str, Sequence[str]]]) -> dict[str, float]:
    """Seconds before the first transfer of a forward pass, and after the last one of a backward pass."""
    followers: dict[str, list[str]] = {stage: [] for stage in needs["backward"]}
    for stage, earlier in needs["backward"].items():
        for needed in earlier:
            followers[needed].append(stage)
    return {
        "forward": shortest_wait(times_s["forward"], needs["forward"]),
        "backward": shortest_wait(times_s["backward"], followers),
    }


def shortest_wait(times_s: Mapping[str, float], needs: Mapping[str, Sequence[str]]) -> float:
    """The least of what all transfers wait for."""
    until_s: dict[str, float] = {}
    for stage in TopologicalSorter(needs).static_order():
        until_s[stage] = max((until_s[other] + times_s[other] for other in needs[stage]), default=0.0)
    return min(until_s[stage] for stage in needs if stage_from_text(stage).is_communication)


def work(rank: Rank[Steps]) -> dict[str, Any]:
    """Times of every kind of step on this rank, and how much their gradients differ from Megatron's.

    Raises:
        DifferenceFound: a kind of step computes other gradients; nothing was timed.
    """
    emulation, case = rank.start_megatron(), rank.job.case
    if emulation is not None:
        emulation.num_experts = case.experts
    import torch
    import torch.distributed as dist
    from megatron_loop import OVERLAP as OVERLAP_FIELDS
    from megatron_loop import Loop, graphs

    from megatron_ampipe.runtime.partners import Partners
    from megatron_ampipe.tools.measuring.bench_job import Variant
    from megatron_ampipe.tools.measuring.blocks import DTYPES, BlockFactory, Layers
    from megatron_ampipe.tools.measuring.meters import stage_times
    from megatron_ampipe.tools.measuring.prepared import growth_bytes, prepare, require_budgets
    from megatron_ampipe.tools.measuring.timed_passes import same_experts

    on_cuda = rank.job.on_cuda
    factory = BlockFactory(rank, case, layers=LAYERS)
    torch.manual_seed(5 + rank.number)
    shape, dtype = (case.sequence_length, case.batch, case.hidden), DTYPES[case.dtype]
    given, above = (
        [torch.randn(shape).to(rank.job.device, dtype) for _ in range(MICROBATCHES)] for _ in range(2)
    )
    parameters = list(factory.stock.parameters())
    chosen: list[torch.Tensor] = []
    prescribed = contextlib.ExitStack()

    def with_same_experts(layers: Any) -> Any:
        if case.dtype != "fp32":
            prescribed.enter_context(same_experts(layers, chosen))
        return layers

    if case.dtype != "fp32":
        with same_experts(factory.stock, chosen):
            factory.stock(hidden_states=given[0], attention_mask=None)
    with_same_experts(factory.stock)

    def in_turn(layers: Any) -> list[torch.Tensor]:
        gradients = []
        for hidden, gradient in zip(given, above, strict=True):
            hidden = hidden.clone().requires_grad_()
            layers(hidden_states=hidden, attention_mask=None)[0].backward(gradient)
            gradients.append(hidden.grad)
        return gradients

    def with_partners(layers: Any) -> list[torch.Tensor]:
        context = layers.layers[0]._block.context
        context.partners = context.partners or Partners()
        usual, passes, gradients = context.pipeline, [], []
        context.partners.partner = usual.partner
        # Graphs of such passes are those of a whole step.
        context.partners.graphs.begin_step(MICROBATCHES)

        def ahead(number: int) -> None:
            context.pipeline = usual.with_partners(forward=number > 0, backward=number < MICROBATCHES - 1)
            hidden = given[number].clone().requires_grad_()
            passes.append((hidden, layers(hidden_states=hidden, attention_mask=None)[0]))
            context.pipeline = usual

        def back(number: int) -> None:
            hidden, output = passes[number]
            output.backward(above[number])
            passes[number] = None
            gradients.append(hidden.grad)

        ahead(0)
        for number in range(1, MICROBATCHES):
            context.partners.run(functools.partial(ahead, number), functools.partial(back, number - 1))
        back(MICROBATCHES - 1)
        context.partners.graphs.end_step()
        return gradients

    saved_bytes = burst_bytes(rank.job.link.rate_bit_per_s) if rank.job.link.is_network else 0
    # Layers that run every stage alone: uncut, and as passes without a partner run.
    uncut, halves = (
        with_same_experts(
            factory.build_timed(variant, num_passes=rank.job.rounds + 1, saved_bytes=saved_bytes)
        )
        for variant in (Variant.of("lancet", 1, stack=0), Variant.of("ampipe", DEGREES[0], stack=0))
    )
    for layers in (uncut, halves):
        in_turn(layers)

    def stages_alone(layers: Any, turn: int) -> StageTimes:
        """Medians of all passes until now, of one more step."""
        layers.timer.recorder.start_iteration(turn)
        in_turn(layers)
        layers.timer.recorder.pause()
        return {
            direction: {stage: statistics.median(passes) / 1e6 for stage, passes in stages.items()}
            for direction, stages in stage_times(layers.timer.recorder).items()
        }

    def searched(times_s: StageTimes) -> Partner:
        times: dict[tuple[str, str], list[float]] = {}
        # Means of all layers and ranks: every rank has to find the same order.
        of_ranks: list[Any] = [times_s] * (1 if rank.job.emulates_peers else rank.job.num_ranks)
        if not rank.job.emulates_peers:
            dist.all_gather_object(of_ranks, times_s)
        for of_rank in of_ranks:
            for direction, stages in of_rank.items():
                for name, time_s in stages.items():
                    times.setdefault((stage_from_text(name).name, direction), []).append(time_s)
        planned = replace(case, dtype="bf16")
        block = block_of_case(planned, num_ranks=rank.job.num_ranks, fused_gradients=factory.fused_gradients)
        # Only the stages of the program are used, not the figures of this cluster, which has none of fp32.
        predictor = Predictor(block, read_cluster(find_cluster("a800x8-20gbps")), num_layers=LAYERS)
        both = both_passes(predictor, Partner())
        stages = both.compiled.stages
        directions = ["forward" if stage.of_next_microbatch else "backward" for stage in stages]
        durations = tuple(
            statistics.fmean(times.get((stage.name, way), [0.0]))
            for stage, way in zip(stages, directions, strict=True)
        )
        overlap = replace(both.overlap, compute_slowdown=1.0, communication_slowdown=1.0, latency_us=0.0)
        return Partner(period=best_period(TimedProgram(both.compiled, durations, None, overlap)))

    def stack(
        degree: int, partner: Partner | None = None, *, rows: str = EXACT, graphs: bool = False
    ) -> Layers:
        variant = Variant.of("ampipe", degree, stack=0, partner=partner, rows=rows, graphs=graphs)
        return with_same_experts(factory.build(variant))

    def experts_alone(degree: int) -> Layers:
        return with_same_experts(factory.build(Variant.of("moe-only", degree)))

    missing = missing_kinds(rank.job)
    prepared: dict[str, Callable[[], int]] = {}
    """What runs before a kind of step is compared; returns the bytes that its graphs hold."""
    steps: dict[str, Callable[[], list[torch.Tensor]]] = {}
    with_budgets: dict[str, Layers] = {}

    def of_loop(name: str, build: Callable[[], Layers]) -> None:
        """A step of Megatron's own loop, where it runs."""
        if name not in missing:
            loop = Loop(with_same_experts(build()))
            steps[name] = functools.partial(loop.step, given, above)
            if loop.first_steps:
                first = functools.partial(loop.first, given, above)
                prepared[name] = functools.partial(growth_bytes, first, on_cuda=on_cuda)

    def captured(
        name: str, run: Callable[[Layers], list[torch.Tensor]], build: Callable[[], Layers], rows: str
    ) -> None:
        """A step whose graphs are captured before it is compared, where it runs."""
        if name not in missing:
            layers = build()
            steps[name] = functools.partial(run, layers)
            prepared[name] = functools.partial(prepare, layers, run, on_cuda=on_cuda)
            if rows == FIXED:
                with_budgets[name] = layers

    steps[STOCK] = steps[CONTROL] = functools.partial(in_turn, factory.stock)
    of_loop(MEGATRON_GRAPHS, factory.build_with_graphs)
    of_loop(OVERLAP, functools.partial(factory.build_megatron, **OVERLAP_FIELDS))
    overlap_fields = OVERLAP_FIELDS | graphs(GRAPH_MODULES)
    of_loop(OVERLAP_GRAPHS, functools.partial(factory.build_megatron, **overlap_fields))
    for degree in DEGREES:
        steps[MOE_ONLY.format(degree)] = functools.partial(in_turn, experts_alone(degree))
    for degree in DEGREES:
        steps[STACK.format(degree)] = functools.partial(in_turn, stack(degree))
    for kind, rows in ((STACK_GRAPHS, EXACT), (STACK_WHOLE, FIXED)):
        for degree in DEGREES:
            build = functools.partial(stack, degree, rows=rows, graphs=True)
            captured(kind.format(degree), in_turn, build, rows)
    partners = PARTNERS | {"partners, searched": searched(stages_alone(uncut, 0))}
    for name, partner in partners.items():
        steps[name] = functools.partial(with_partners, stack(DEGREES[0], partner))
        if partner.order == MEGATRON:
            build = functools.partial(stack, DEGREES[0], partner, rows=FIXED, graphs=True)
            captured(PARTNERS_WHOLE, with_partners, build, FIXED)
    assert [*steps] == [kind.name for kind in KINDS if kind.name not in missing]

    def together() -> None:
        dist.barrier()
        if on_cuda:
            torch.cuda.synchronize()

    def clear() -> None:
        for parameter in parameters:
            parameter.grad = None
            if hasattr(parameter, "main_grad"):
                parameter.main_grad.zero_()

    differences: dict[str, float] = {}
    peak_bytes: dict[str, int] = {}
    graph_bytes: dict[str, int] = {}
    expected: list[torch.Tensor] = []
    for name, step in steps.items():
        if name in prepared:
            graph_bytes[name] = prepared[name]()
        clear()
        allocated_bytes = restart_peak(on_cuda=on_cuda)
        found = step()
        peak_bytes[name] = peak_since(allocated_bytes, on_cuda=on_cuda) + graph_bytes.get(name, 0)
        found += list(map(gradient_of, parameters))
        expected = expected or found
        differences[name] = compared(name, found, expected, case.dtype)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    processor: dict[str, list[float]] = {name: [] for name in steps}
    slowdowns: list[float] = []
    for turn in range(rank.job.rounds):
        names = list(steps)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            clear()
            together()
            begin, begin_processor = time.perf_counter(), time.process_time()
            steps[name]()
            together()
            seconds[name].append(time.perf_counter() - begin)
            processor[name].append(time.process_time() - begin_processor)
            rank.say("step")
        together()
        if rank.job.link.is_network:
            slowdowns.append(slowdown(rank, factory.stock.layers[0].self_attention, given, above))
        uncut_s, halves_s = (stages_alone(layers, turn + 1) for layers in (uncut, halves))
    for name, layers in with_budgets.items():
        require_budgets(layers.context, device=torch.device(rank.job.device), name=name)
    prescribed.close()
    return {
        "seconds": seconds,
        "processor": processor,
        "differences": differences,
        "stages_s": sums(uncut_s),
        "waits_s": waits(halves_s, halves.timer.needs),
        "slowdowns": slowdowns,
        "searched": program_to_text(partners["partners, searched"].period),
        "peak_bytes": peak_bytes if on_cuda else {},
        "graph_bytes": graph_bytes if on_cuda else {},
    }


def gradient_of(parameter: Any) -> Any:
    """The whole gradient of a parameter: linear layers may have added a part of it to ``main_grad``."""
    gradient = 0.0 if parameter.grad is None else parameter.grad
    return gradient + getattr(parameter, "main_grad", 0.0)


def restart_peak(*, on_cuda: bool) -> int:
    """Forget the peak of allocated memory; returns the bytes that are allocated on the GPU."""
    import torch

    if not on_cuda:
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    allocated: int = torch.cuda.memory_allocated()
    return allocated


def peak_since(allocated_bytes: int, *, on_cuda: bool) -> int:
    """The peak since :func:`restart_peak`, beyond what was allocated then."""
    import torch

    if not on_cuda:
        return 0
    torch.cuda.synchronize()
    peak: int = torch.cuda.max_memory_allocated()
    return peak - allocated_bytes


def compared(name: str, found: Sequence[Any], expected: Sequence[Any], dtype: str) -> float:
    """The largest difference of the gradients of one kind of step from those of Megatron's layers.

    Relative to a tensor's largest value in fp32, otherwise to its norm, as in ``ampipe bench``.

    Raises:
        DifferenceFound: It is larger than rounding allows, or not a number.
    """
    from megatron_ampipe.tools.measuring.timed_passes import relative_difference

    allowed = Tolerance.of(dtype, None)
    pairs = zip(expected, found, strict=True)
    largest = max(relative_difference(before, after, allowed.order) for before, after in pairs)
    if largest > allowed.limit:
        raise DifferenceFound(
            f"{name} does not compute what Megatron's layers do: gradients are off by {largest:.1e}, allowed "
            f"is {allowed.limit:.0e}; nothing was timed."
        )
    return largest


def slowdown(rank: Rank[Steps], attention: Any, given: Sequence[Any], above: Sequence[Any]) -> float:
    """How many times as long attention takes while the link carries rows both ways."""
    import torch
    import torch.distributed as dist

    def attend() -> float:
        begin = time.perf_counter()
        for hidden, gradient in zip(given, above, strict=True):
            attention(hidden.clone().requires_grad_(), None)[0].backward(gradient)
        return time.perf_counter() - begin

    dist.barrier()
    alone_s = attend()
    slowest_s = torch.tensor(alone_s)
    dist.all_reduce(slowest_s, op=dist.ReduceOp.MAX)
    # What the link carries in twice this time, to and from each of two ranks.
    sent = torch.zeros(2 * int(2 * slowest_s * rank.job.link.rate_bit_per_s / 8), dtype=torch.uint8)
    transfer = dist.all_to_all_single(torch.empty_like(sent), sent, async_op=True)
    # No barrier, which would wait for the transfer.
    busy_s = attend()
    begin = time.perf_counter()
    transfer.wait()
    assert time.perf_counter() > begin + 0.01, "the link was not busy all the time"
    return busy_s / alone_s


if __name__ == "__main__":
    main()
