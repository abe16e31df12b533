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
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from megatron_ampipe.errors import DifferenceFound
from megatron_ampipe.runtime.executors import ThreadExecutor
from megatron_ampipe.tools.measuring.bench_job import PEAK_PASSES, BenchJob, Variant
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
from megatron_ampipe.tools.measuring.ranks import Rank, RankJob
from megatron_ampipe.tools.measuring.reports import CaseReport, PassTimes, VariantReport
from megatron_ampipe.tools.measuring.tolerance import Tolerance


def measure(rank: Rank[BenchJob], case: Case, variants: Sequence[Variant]) -> CaseReport:
    """Measure one case; ``variants`` are what is compared, stock first."""
    job = rank.job
    factory = BlockFactory(rank, case, layers=job.layers)
    passes = Passes(rank, case)
    layers = [factory.stock, *(factory.build(variant) for variant in variants[1:])]
    difference = compare(passes, layers, variants, rank=rank.number, case=case)
    timed = [
        factory.build_timed(variant, num_passes=job.repeats, saved_bytes=job.link.burst_bytes)
        if variant.pipelined
        else None
        for variant in variants
    ]
    # In passes that are not timed.
    meter: TensorMeter | None = None
    watched = layers
    if not job.on_cuda:
        meter = TensorMeter()
        executor = WatchedExecutor(ThreadExecutor(), meter)
        watched = [layers[0], *(factory.build(variant, executor=executor) for variant in variants[1:])]
    peaks = [passes.peak_bytes(layer, meter=meter) for layer in watched]
    for _ in range(job.warmup):
        for layer in (*layers, *filter(None, timed)):
            passes.run(layer)
    samples: list[list[PassSample]] = [[] for _ in layers]
    alone: list[list[PassSample]] = [[] for _ in layers]
    for repeat in range(job.repeats):
        order = [(repeat + step) % len(layers) for step in range(len(layers))]
        for index in order:
            samples[index].append(passes.run(layers[index]))
        for index in order:
            timed_layer = timed[index]
            if timed_layer is not None:
                timed_layer.timer.recorder.start_iteration(repeat)
                alone[index].append(passes.run(timed_layer))
                timed_layer.timer.recorder.pause()

    entries: list[VariantReport] = []
    for index, timed_layer in enumerate(timed):
        timer = None if timed_layer is None else timed_layer.timer
        entries.append(
            {
                **_by_field(samples[index]),
                "stages": None if timer is None else stage_times(timer.recorder),
                "needs": None if timer is None else timer.needs,
                "issued_us": None if timer is None else timer.issued_us(),
                "alone": None if timer is None else _by_field(alone[index]),
                "apart_s": None if timer is None else _after_warmup(timer.apart_s, job.warmup),
                "difference": difference[index],
                "peak_bytes": peaks[index],
            }
        )
    return {"kernel": factory.kernel, "fused_gradients": factory.fused_gradients, "variants": entries}


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

    def results(self, layer: Layers, chosen: list[Tensor] | None = None) -> dict[str, Tensor]:
        """Everything that one pass computes, by name; with ``chosen`` experts, see :func:`same_experts`."""
        with nullcontext() if chosen is None else same_experts(layer, chosen):
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
        gc.collect()
        gc.disable()
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


def compare(
    passes: Passes, layers: Sequence[Layers], variants: Sequence[Variant], *, rank: int, case: Case
) -> list[float]:
    """The largest difference of each variant from stock, over tensors and ranks; the same on every rank."""
    chosen: list[Tensor] = []
    expected = passes.results(layers[0], chosen)
    largest = []
    for layer, variant in zip(layers, variants, strict=True):
        allowed = Tolerance.of(case.dtype, variant.wire)
        rounded = case.dtype != "fp32" or variant.wire is not None
        results = passes.results(layer, chosen if rounded else None)
        differences = {
            name: relative_difference(expected[name], results[name], allowed.order) for name in expected
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
