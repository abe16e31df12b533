"""Runs blocks with made-up stages: over gloo compared with stock, or on the modelled device."""

from __future__ import annotations

import sys
import traceback
from typing import Any
from unittest import mock

from tests.dist.cases import AUX, Case
from tests.dist.worker import report

BLOCKS: dict[str, dict[str, Any]] = {
    "chunked": {},
    "fewer-backward": {"degree": 4, "backward_degree": 2},
    "fewer-forward": {"degree": 2, "backward_degree": 4},
    "whole-attention": {"schedule": "moe-only"},
    "in-order": {"schedule": "sequential"},
    "shared-and-losses": {"model": AUX | {"moe_shared_expert_intermediate_size": 48}},
}
ADDED = ("delay", "delay-copy", "audit", "delay-copy-audit", "fork", "move", "watch")


def added_kinds(name: str) -> Any:
    """The kinds that a name in :data:`ADDED` says."""
    from tests import added_stages as made_up

    kinds = [made_up.DELAY, made_up.COPY, made_up.AUDIT, made_up.FORK, made_up.MOVE, made_up.WATCH]
    by_name = {kind.name: (kind,) for kind in kinds} | {"fork": (made_up.FORK, made_up.MEET)}
    return tuple(kind for part in name.split("-") for kind in by_name[part])


def main() -> None:
    if sys.argv[1] == "gloo":
        over_gloo()
    else:
        on_the_modelled_device()


def over_gloo() -> None:
    """Every block with every choice of stages, by the executors of a host."""
    from tests.dist.worker import start, use_groups

    rank, _ = start()
    use_groups()
    from megatron_ampipe.runtime.recorder import Recorder
    from tests import added_stages as made_up
    from tests.dist.blocks import build_layers, differences, run

    results: dict[str, object] = {}
    for block, fields in BLOCKS.items():
        for executor in ("sequential", "thread"):
            for name in ADDED:
                case = Case(f"{block}-{executor}-{name}", executor=executor, **fields)
                try:
                    recorder = Recorder(num_iterations=1)
                    recorder.start_iteration(1)
                    stock, ours = build_layers(case, recorder, added=added_kinds(name))
                    expected = run(stock, case, rank=rank)
                    made_up.ran.clear()
                    found = run(ours, case, rank=rank)
                    spans = recorder.timeline(rank=rank, labels={}).spans
                    results[case.name] = {
                        "differences": differences(expected, found),
                        "ran": dict(made_up.ran),
                        "stages": sorted({(span.direction, span.lane, span.stage) for span in spans}),
                        "shortest delay us": min(
                            (s.end_us - s.begin_us for s in spans if s.stage.startswith("delay")),
                            default=None,
                        ),
                    }
                except Exception:
                    results[case.name] = {"error": traceback.format_exc()}
    report(results)


def on_the_modelled_device() -> None:
    """By the executor of a GPU, compared with the sequential one among the same pretended peers."""
    from tests.streams.cases import RANKS
    from tests.streams.worker import start

    start(RANKS)
    import torch
    from torch.autograd.graph import _engine_run_backward

    from tests.dist.blocks import EXECUTORS, build_layers, differences, run
    from tests.streams.run import modelled_device

    def backward(output: torch.Tensor, gradient: torch.Tensor) -> None:
        # Not Tensor.backward: a function mode, which makes tensors those of a device, is disabled inside it.
        _engine_run_backward(
            (output,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
        )

    def passes(case: Case, executor: str, name: str) -> tuple[Any, list[str]]:
        _, ours = build_layers(case, executor=EXECUTORS[executor](), added=added_kinds(name))
        # Of what a pretended peer does not send, the memory would hold whatever it held before.
        with (
            mock.patch.object(torch.Tensor, "new_empty", torch.Tensor.new_zeros),
            mock.patch.object(torch.Tensor, "backward", backward),
            modelled_device() as tracker,
        ):
            return run(ours, case, rank=0), list(tracker.races)

    results: dict[str, object] = {}
    for block, fields in BLOCKS.items():
        for name in ADDED:
            case = Case(f"{block}-cuda-{name}", executor="cuda", **fields)
            try:
                expected, _ = passes(case, "sequential", name)
                found, races = passes(case, "cuda", name)
                results[case.name] = {"differences": differences(expected, found), "races": races}
            except Exception:
                results[case.name] = {"error": traceback.format_exc()}
    report(results)


if __name__ == "__main__":
    main()
