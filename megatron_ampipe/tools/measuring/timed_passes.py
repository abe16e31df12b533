"""The work of a rank of ``ampipe bench``: check that all variants compute the same, then time them.

One pass is forward and backward of all layers. Ranks meet at a barrier before it. A rank measures from there
until its gradients are complete, and the command takes the maximum over ranks. Stock and
every variant run once in each repeat, in an order that is rotated from repeat to repeat, so that a machine
that becomes slower affects all equally.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from megatron_ampipe.errors import DifferenceFound
from megatron_ampipe.runtime.executors import ThreadExecutor
from megatron_ampipe.tools.measuring import megatron_graphs
from megatron_ampipe.tools.measuring.bench_job import (
    FIXED,
    PEAK_PASSES,
    STOCK_GRAPHS,
    BenchJob,
    Variant,
)
from megatron_ampipe.tools.measuring.blocks import DTYPES, BlockFactory, Layers
from megatron_ampipe.tools.measuring.grid import Case
from megatron_ampipe.tools.measuring.meters import (
    Clock,
    TensorMeter,
    Watch,
    WatchedExecutor,
    barrier,
    sent_bytes_by_class,
    stage_times,
)
from megatron_ampipe.tools.measuring.prepared import prepare, require_budgets
from megatron_ampipe.tools.measuring.ranks import Rank, RankJob
from megatron_ampipe.tools.measuring.reports import CaseReport, PassTimes, VariantReport
from megatron_ampipe.tools.measuring.tolerance import Tolerance


def measure(rank: Rank[BenchJob], case: Case, variants: Sequence[Variant]) -> CaseReport:
    """Measure one case; ``variants`` are what is compared, stock first."""
    with ExitStack() as prescribed:
        return _measure(rank, case, variants, prescribed)


def _measure(
    rank: Rank[BenchJob], case: Case, variants: Sequence[Variant], prescribed: ExitStack
) -> CaseReport:
    job = rank.job
    factory = BlockFactory(rank, case, layers=job.layers)
    passes = Passes(rank, case)
    experts = Experts(case, variants, prescribed)
    layers = [factory.stock, *(_built(factory, variant) for variant in variants[1:])]
    difference = compare(passes, layers, variants, rank=rank.number, case=case, experts=experts)
    timed = _timed(rank, factory, variants)
    # In passes that are not timed.
    meter: TensorMeter | None = None
    watched = layers
    if not job.on_cuda:
        meter = TensorMeter()
        executor = WatchedExecutor(ThreadExecutor(), meter)
        watched = [
            factory.build(replace(variant, graphs=False), executor=executor) if variant.pipelined else layer
            for variant, layer in zip(variants, layers, strict=True)
        ]
    for layer in dict.fromkeys([*filter(None, timed), *watched]):
        if layer not in layers:
            experts.prescribe(layer)
            passes.prepare(layer)
    peaks = [passes.peak_bytes(layer, meter=meter) for layer in watched]
    for _ in range(job.warmup):
        for layer in dict.fromkeys([*layers, *filter(None, timed)]):
            passes.run(layer)
    samples: list[list[PassSample]] = [[] for _ in layers]
    alone: list[list[PassSample]] = [[] for _ in layers]
    for repeat in range(job.repeats):
        order = [(repeat + step) % len(layers) for step in range(len(layers))]
        for index in order:
            samples[index].append(passes.run(layers[index]))
        for index in order:
            timed_layer = timed[index]
            # Variants that differ in graphs alone have the same stages.
            if timed_layer is not None and timed.index(timed_layer) == index:
                timed_layer.timer.recorder.start_iteration(repeat)
                alone[index].append(passes.run(timed_layer))
                timed_layer.timer.recorder.pause()
    for layer, variant in zip(layers, variants, strict=True):
        if layer.context is not None and variant.rows == FIXED:
            name = f"case {case.name}, {variant}"
            require_budgets(layer.context, device=torch.device(job.device), name=name)
        if layer.local_graphs is not None:
            layer.local_graphs.free()

    entries: list[VariantReport] = []
    for index, timed_layer in enumerate(timed):
        timer = None if timed_layer is None else timed_layer.timer
        first = index if timed_layer is None else timed.index(timed_layer)
        entries.append(
            {
                **_by_field(samples[index]),
                "stages": None if timer is None else stage_times(timer.recorder),
                "needs": None if timer is None else timer.needs,
                "issued_us": None if timer is None else timer.issued_us(),
                "alone": None if timer is None else _by_field(alone[first]),
                "apart_s": None if timer is None else _after_warmup(timer.apart_s, job.warmup),
                "difference": difference[index],
                "peak_bytes": peaks[index] + layers[index].graph_bytes,
                "graph_bytes": layers[index].graph_bytes,
            }
        )
    return {"kernel": factory.kernel, "fused_gradients": factory.fused_gradients, "variants": entries}


def _built(factory: BlockFactory, variant: Variant) -> Layers:
    """The layers of a variant that is not stock; with Megatron's own graphs, its layers."""
    return factory.build_with_graphs() if variant.schedule == STOCK_GRAPHS else factory.build(variant)


def _timed(rank: Rank[BenchJob], factory: BlockFactory, variants: Sequence[Variant]) -> list[Layers | None]:
    """Layers that run the stages of each variant alone; the same where variants differ in graphs alone."""
    job = rank.job
    built: dict[Variant, Layers] = {}
    timed: list[Layers | None] = []
    for variant in variants:
        staged = replace(variant, graphs=False)
        if variant.pipelined and staged not in built:
            built[staged] = factory.build_timed(
                staged, num_passes=job.repeats, saved_bytes=job.link.burst_bytes
            )
        timed.append(built.get(staged))
    return timed


def _by_field(samples: Sequence[PassSample]) -> PassTimes:
    return {
        "wall_s": [sample.wall_s for sample in samples],
        "backward_s": [sample.backward_s for sample in samples],
        "wire_bytes": [sample.wire_bytes for sample in samples],
    }


def _after_warmup(passes_s: Mapping[str, Sequence[float]], warmup: int) -> dict[str, list[float]]:
    return {way: [*all_s[warmup:]] for way, all_s in passes_s.items()}


class PassSample(NamedTuple):
    """One pass on one rank.

    Attributes:
        wall_s: Seconds of the whole pass.
        backward_s: Seconds from the end of the forward pass, measured on the device if there is one.
        wire_bytes: By class of links, bytes that this rank sent, headers included; None if not counted.
    """

    wall_s: float
    backward_s: float
    wire_bytes: dict[str, int] | None


class Passes:
    """Runs passes of any layer, always with the same input and output gradient."""

    def __init__[Job: RankJob](self, rank: Rank[Job], case: Case) -> None:
        self._rank, self.on_cuda = rank, rank.job.on_cuda
        self._counts_wire = rank.job.link.is_network
        generator = torch.Generator().manual_seed(rank.job.seed * 10_007 + rank.number)
        shape = (case.sequence_length, case.batch, case.hidden)
        self._hidden, self._gradient = (
            torch.randn(shape, generator=generator).to("cuda" if self.on_cuda else "cpu", DTYPES[case.dtype])
            for _ in range(2)
        )
        # Later garbage collections skip the objects that exist now.
        gc.freeze()

    def run(self, layer: torch.nn.Module) -> PassSample:
        """One timed pass."""
        return self._run(layer)[0]

    def prepare(self, layer: Layers) -> None:
        """Learn budgets and capture graphs; sets the bytes that graphs hold."""
        layer.graph_bytes = prepare(layer, self.run, on_cuda=self.on_cuda)

    def results(self, layer: Layers) -> dict[str, Tensor]:
        """Everything that one pass computes, by name."""
        _, output, hidden = self._run(layer)
        assert hidden.grad is not None
        tensors = {"output": output.detach(), "gradient of the input": hidden.grad}
        for name, parameter in layer.named_parameters():
            # An expert that no token visits may be left without a gradient.
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            tensors[f"gradient of {name}"] = gradient + getattr(parameter, "main_grad", 0)
        return tensors

    def peak_bytes(self, layer: torch.nn.Module, *, meter: TensorMeter | None) -> int:
        """The peak of the bytes that a pass allocates, by ``meter`` on a CPU."""
        known = [self._hidden, self._gradient, *layer.parameters()]
        known += [each.main_grad for each in layer.parameters() if hasattr(each, "main_grad")]
        peaks = []
        for _ in range(PEAK_PASSES):
            _clear_gradients(layer)
            if meter is None:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                self._run(layer)
                peaks.append(torch.cuda.max_memory_allocated() - before)
            else:
                meter.restart(known)
                with Watch(meter):
                    self._run(layer)
                peaks.append(meter.peak)
        _clear_gradients(layer)
        return max(peaks)

    def _run(self, layer: torch.nn.Module) -> tuple[PassSample, Tensor, Tensor]:
        _clear_gradients(layer)
        hidden = self._hidden.detach().requires_grad_()
        graphs = getattr(layer, "local_graphs", None)
        gc.collect()
        gc.disable()
        with nullcontext() if graphs is None else graphs.step():
            return self._one(layer, hidden)

    def _one(self, layer: torch.nn.Module, hidden: Tensor) -> tuple[PassSample, Tensor, Tensor]:
        try:
            sent_before = sent_bytes_by_class() if self._counts_wire else {}
            barrier(on_cuda=self.on_cuda)
            begin = time.perf_counter()
            output, _ = layer(hidden_states=hidden, attention_mask=None)
            between = Clock(on_cuda=self.on_cuda)
            output.backward(self._gradient)
            backward_s = between.passed_s()
            wall_s = time.perf_counter() - begin
            wire_bytes = None
            if self._counts_wire:
                # A rank may have received all its data while a peer still receives.
                barrier(on_cuda=self.on_cuda)
                sent = sent_bytes_by_class()
                wire_bytes = {name: count - sent_before[name] for name, count in sent.items()}
            return PassSample(wall_s, backward_s, wire_bytes), output, hidden
        finally:
            gc.enable()
            self._rank.progress()


def _clear_gradients(layer: torch.nn.Module) -> None:
    for parameter in layer.parameters():
        parameter.grad = None
        if hasattr(parameter, "main_grad"):
            parameter.main_grad.zero_()


class Experts:
    """Which experts layers use: those that stock chooses for the first pass, or each layer's own choice.

    Prescribed where a difference could come from rounding. If a variant has CUDA graphs, which keep the
    choice of their capture, they are prescribed in all passes of all layers; else only where the results of
    passes are compared.

    Args:
        case: What is measured.
        variants: What is compared.
        prescribed: Ends what this begins.
    """

    def __init__(self, case: Case, variants: Sequence[Variant], prescribed: ExitStack) -> None:
        self._is_rounded = case.dtype != "fp32"
        self._stays = self._is_rounded and any(variant.graphs for variant in variants)
        self._prescribed = prescribed
        self._chosen: list[Tensor] = []

    def of_results(self, layer: Layers, variant: Variant) -> AbstractContextManager[None]:
        """A context in which the results of a variant can be compared; stock comes first."""
        if not self._chosen:
            return same_experts(layer, self._chosen)
        is_rounded = self._is_rounded or variant.wire is not None
        return same_experts(layer, self._chosen) if is_rounded and not self._stays else nullcontext()

    def prescribe(self, layer: Layers) -> None:
        """Prescribe the experts of a layer in all later passes, if any variant has graphs."""
        if self._stays:
            self._prescribed.enter_context(same_experts(layer, self._chosen))


def compare(
    passes: Passes,
    layers: Sequence[Layers],
    variants: Sequence[Variant],
    *,
    rank: int,
    case: Case,
    experts: Experts,
) -> list[float]:
    """The largest difference of each variant from stock, over tensors and ranks; the same on every rank."""
    with experts.of_results(layers[0], variants[0]):
        expected = passes.results(layers[0])
    largest = []
    for layer, variant in zip(layers, variants, strict=True):
        allowed = Tolerance.of(case.dtype, variant.wire)
        experts.prescribe(layer)
        if variant.prepares:
            passes.prepare(layer)
        with experts.of_results(layer, variant):
            results = passes.results(layer)
        differences = {
            name: relative_difference(value, results[renamed(name, variant)], allowed.order)
            for name, value in expected.items()
        }
        name = max(differences, key=differences.__getitem__)
        worst = torch.tensor(differences[name], dtype=torch.float64, device=expected["output"].device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        largest.append(float(worst))
        if worst > allowed.limit:
            raise DifferenceFound(
                f"case {case.name}: {variant} does not compute what Megatron's layers do: off by {worst:.1e} "
                f"(on rank {rank} most in the {name}), allowed is {allowed.limit:.0e}; the case was not "
                "measured."
            )
    return largest


def renamed(name: str, variant: Variant) -> str:
    """The name in a variant's results of one of stock's results."""
    before = "gradient of layers."
    if variant.schedule == STOCK_GRAPHS and name.startswith(before):
        return "gradient of " + megatron_graphs.divided_name(name.removeprefix("gradient of "))
    return name


@contextmanager
def same_experts(layers: Layers, chosen: list[Tensor]) -> Iterator[None]:
    """A context in which routers use the experts ``chosen``, ``[T, K]`` by layer; fills it if it is empty.

    Rounding can change the choice between experts with nearly equal scores, so without it two correct results
    in 16 bit may have large differences.
    """
    routers = [layer.router for layer in layers.moe_layers]
    for number, router in enumerate(routers):
        router.router_replay = RouterReplay()
        action = RouterReplayAction.REPLAY_FORWARD if chosen else RouterReplayAction.RECORD
        router.router_replay.set_router_replay_action(action)
        if chosen:
            router.router_replay.set_target_indices(chosen[number])
    try:
        yield
        if not chosen:
            chosen += [router.router_replay.get_recorded_indices() for router in routers]
    finally:
        for router in routers:
            router.router_replay = None
        RouterReplay.clear_global_router_replay_instances()


def relative_difference(expected: Tensor, actual: Tensor, order: float) -> float:
    """The norm of the difference relative to that of ``expected``; infinite for NaN."""
    expected, actual = expected.double(), actual.double()
    size = torch.linalg.vector_norm(expected, order).clamp_min(1e-12)
    difference = torch.linalg.vector_norm(expected - actual, order) / size
    return float(difference.nan_to_num(nan=torch.inf, posinf=torch.inf))
