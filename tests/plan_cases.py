"""Blocks, model files and clusters for tests of the planner, and a count of what a call costs."""

import cProfile
import dataclasses
import gc
import pstats
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_ampipe.plan.block import Block
from megatron_ampipe.plan.cluster import Cluster, Overhead, Overlap, TransferCost, find_cluster, read_cluster
from megatron_ampipe.tools.measuring.grid import Case

NONE: dict[str, Any] = {"basis": "derived", "source": "a test"}
PLAIN = """\
num-layers: 12
hidden-size: 1024
num-attention-heads: 16
seq-length: 16384
num-experts: 8
moe-router-topk: 1
moe-token-dispatcher-type: alltoall
bf16: true
expert-model-parallel-size: 8
"""
"""A model file."""


def model_file(folder: Path, more: str = "", *, without: str = "") -> Path:
    """That of :data:`PLAIN`, with more lines, and without one."""
    path = folder / "model.yaml"
    path.write_text(PLAIN.replace(without, "") + more)
    return path


def sized_block(**changes: Any) -> Block:
    """A small GPT-MoE block, 8 experts over 8 ranks."""
    sizes: dict[str, Any] = {
        "sequence_length": 8192,
        "batch": 1,
        "hidden": 1024,
        "heads": 16,
        "head_size": 64,
        "value_size": 64,
        "projections": ((1024, 3072),),
        "key_value_width": 2048,
        "experts": 8,
        "topk": 2,
        "ffn": 4096,
        "gated": False,
        "dtype": "bf16",
        "expert": 8,
    }
    return Block(**(sizes | changes))


def grid_case(**changes: Any) -> Case:
    """A block as a grid of ``ampipe bench`` has it."""
    sizes: dict[str, Any] = {
        "name": "one",
        "sequence_length": 512,
        "batch": 1,
        "hidden": 128,
        "heads": 4,
        "experts": 4,
        "topk": 1,
        "ffn": 512,
        "activation": "gelu",
        "dtype": "fp32",
    }
    return Case(**(sizes | changes))


def cluster(name: str = "a800x8-20gbps") -> Cluster:
    """A built-in cluster."""
    return read_cluster(find_cluster(name))


def without_device(source: Cluster) -> Cluster:
    """The cluster for training on the CPU, without slowdown of concurrent lanes."""
    host = dataclasses.replace(source.host, issue=Overhead(forward_us=0, backward_us=0, **NONE))
    overlap = Overlap(compute_slowdown=1, communication_slowdown=1, **NONE)
    return dataclasses.replace(source, host=host, overlap=overlap)


def with_copies(source: Cluster, *, alpha_us: float, us_per_mb: float) -> Cluster:
    """The cluster with a figure of copies to host memory."""
    copy = TransferCost(alpha_us=alpha_us, beta_us_per_mb=us_per_mb, **NONE)
    return dataclasses.replace(source, compute=dataclasses.replace(source.compute, copy=copy))


def python_calls(function: Callable[[], object]) -> int:
    """How many functions are called in it: the same on every machine, as times are not.

    Without collections of garbage: what these call counts as well, and when they come depends on the machine.
    """
    profile = cProfile.Profile()
    gc.collect()
    gc.disable()
    try:
        profile.runcall(function)
    finally:
        gc.enable()
    calls: int = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
    return calls
