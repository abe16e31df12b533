"""Rows of tensor-parallel attention as stages against the same layers with these transfers inside.

Four layers and gloo ranks, over a network shaped as by ``ampipe bench``. Both kinds of layers are
run in the same processes, in turns; medians of the forward and backward pass together. Needs root, from the
repository's root:

    PYTHONPATH=. python docs/measured/attention_rows.py FILE 2:100mbit 2:200mbit
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

from megatron_ampipe.tools.measuring import machine, network
from megatron_ampipe.tools.measuring.network import parse_link

ROUNDS, TIMEOUT_S = 9, 500
RANKS_PER_NODE = 2
"""With two classes of links."""
STACKS = {"layer by layer": 1, "one stack": 0}
SHAPE = {"hidden_size": 256, "ffn_hidden_size": 256, "num_moe_experts": 4}


def main() -> None:
    """Measure all places that were asked for, ``RANKS:LINK``, and write the document."""
    file, *places = sys.argv[1:]
    found = {}
    for place in places:
        ranks, link = place.split(":", 1)
        found[place] = measure(int(ranks), link)
        print(place, {name: one["saved"] for name, one in found[place].items()}, flush=True)
    document = {
        "command": ["python", *sys.argv],
        "hardware": machine.hardware(),
        "versions": machine.versions(),
        "shape": SHAPE,
        "places": found,
    }
    Path(file).write_text(json.dumps(document, indent=1) + "\n")


def measure(ranks: int, text: str) -> dict[str, Any]:
    """What rank 0 found."""
    link = parse_link(text)
    per_node = None if link.within_node_bit_per_s is None else RANKS_PER_NODE
    networks = network.connected(link, ranks, ranks_per_node=per_node)
    with tempfile.TemporaryDirectory() as name, networks as pids:
        folder = Path(name)
        words = [sys.executable, __file__, "--rank", name]
        workers = [
            subprocess.Popen([*words, str(rank), str(ranks), str(pid)]) for rank, pid in enumerate(pids)
        ]
        try:
            for worker in workers:
                worker.wait(timeout=TIMEOUT_S)
        finally:
            for worker in workers:
                worker.kill()
        report: dict[str, Any] = json.loads((folder / "rank0.json").read_text())
    return report


def work(folder: Path, rank: int, ranks: int, namespace: int) -> None:
    """One rank, in a separate network."""
    network.enter(namespace)
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": network.INTERFACE, "AMPIPE_TEST_RENDEZVOUS": str(folder / "rendezvous"),
        "AMPIPE_TEST_REPORT": str(folder),
    }  # fmt: skip

    from tests.dist.cases import LARGE, TP, Case
    from tests.dist.worker import report, start, use_groups

    start()
    import torch

    from megatron_ampipe.layers.block_modules import BlockModules
    from tests.dist.blocks import build_layers, inputs_of, run_pass

    inside = mock.patch.object(BlockModules, "scatters_rows", False)
    parallel = TP | {"expert_model_parallel_size": ranks}
    use_groups(**parallel)
    found = {}
    for name, stack in STACKS.items():
        case = Case(
            "rows", world_size=ranks, parallel=parallel, layers="mmmm", stack=stack, degree=4,
            sequence_length=1024, model=LARGE | SHAPE, kernel="cpu-flash",
        )  # fmt: skip
        inputs = inputs_of(case, rank=rank, dtype=torch.float32)
        _, of_stages = build_layers(case)
        run_pass(of_stages, inputs)
        with inside:
            _, of_inside = build_layers(case)
            run_pass(of_inside, inputs)

        def timed(layer: torch.nn.Module, inputs: Any = inputs) -> float:
            torch.distributed.barrier()
            begin = time.perf_counter()
            run_pass(layer, inputs)
            torch.distributed.barrier()
            return 1000 * (time.perf_counter() - begin)

        ms: dict[str, list[float]] = {"stages": [], "inside": []}
        for _ in range(ROUNDS):
            ms["stages"].append(timed(of_stages))
            with inside:
                ms["inside"].append(timed(of_inside))
        median = {kind: statistics.median(each) for kind, each in ms.items()}
        saved = 1 - median["stages"] / median["inside"]
        found[name] = {"ms": ms, "median ms": median, "saved": saved}
    report(found)
    # Threads of gloo do not end by themselves in all versions.
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        _, _, at, own, count, namespace = sys.argv
        work(Path(at), int(own), int(count), int(namespace))
    else:
        main()
