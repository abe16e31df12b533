"""Compares the cases named on the command line with stock; reports their differences, by case."""

from __future__ import annotations

import dataclasses
import sys
import traceback
from collections.abc import Sequence
from unittest import mock

from megatron_ampipe.files.timeline import COMPUTE, StageSpan
from tests import deep_ep_standin, te_permutation_standin
from tests.dist.cases import BY_NAME, SCATTERED
from tests.dist.worker import report, start, use_groups


def main() -> None:
    rank, _ = start()
    deep_ep_standin.install()
    te_permutation_standin.install()
    import torch

    from megatron_ampipe.layers.block_modules import BlockModules
    from megatron_ampipe.runtime.recorder import Recorder
    from megatron_ampipe.schedule import KEEP
    from tests.dist.blocks import build_layers, differences, forward, inputs_of, run
    from tests.dist.parameter_reads import ParameterReads

    results: dict[str, object] = {}
    groups: object = None
    for name in sys.argv[1:]:
        case = BY_NAME[name]
        if case.parallel != groups:
            # The layers of the case before refer to its groups.
            stock = ours = keeping = inside = None
            use_groups(**case.parallel)
            deep_ep_standin.forget_groups()
            groups = case.parallel
        try:
            recorder = Recorder(num_iterations=1 if case.executor == "thread" else 0)
            recorder.start_iteration(1)
            stock, ours = build_layers(case, recorder)
            # Ranks make groups in one order, so all are made before the first batch.
            late = AssertionError("a process group is made in a pass")
            with mock.patch.object(torch.distributed, "new_group", side_effect=late):
                expected, found = run(stock, case, rank=rank), run(ours, case, rank=rank)
            changed = []
            if case.memory != KEEP:
                _, keeping = build_layers(dataclasses.replace(case, memory=KEEP))
                kept = run(keeping, case, rank=rank)
                changed = [name for name, value in kept.items() if not torch.equal(value, found[name])]
            if case in SCATTERED:
                with mock.patch.object(BlockModules, "scatters_rows", False):
                    _, inside = build_layers(case)
                    kept = run(inside, case, rank=rank)
                changed += [name for name, value in kept.items() if not torch.equal(value, found[name])]
            spans = recorder.timeline(rank=rank, labels={}).spans
            # In a separate pass, so that the comparison runs without this mode.
            with ParameterReads(ours) as reads:
                forward(ours, inputs_of(case, rank=rank, dtype=torch.float32))
            results[name] = {
                "parameter reads": reads.report(),
                "differences": differences(expected, found),
                "largest": {key: value.abs().max().item() for key, value in expected.items()},
                "same state_dict": list(stock.state_dict()) == list(ours.state_dict()),
                "classes": sorted({type(layer).__name__ for layer in getattr(ours, "layers", [ours])}),
                "changed": changed,
                "collectives": collectives(spans),
            }
        except Exception:
            results[name] = {"error": traceback.format_exc()}
    report(results)


def collectives(spans: Sequence[StageSpan]) -> dict[str, str]:
    """By direction and lane, the transfers of a pass in their order; the layer follows an ``@``."""
    found: dict[str, list[str]] = {}
    for span in spans:
        if span.lane != COMPUTE:
            found.setdefault(f"{span.direction} {span.lane}", []).append(f"{span.stage}@{span.layer}")
    return {lane: " ".join(names) for lane, names in sorted(found.items())}


if __name__ == "__main__":
    main()
