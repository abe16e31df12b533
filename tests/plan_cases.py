"""Blocks and clusters for tests of the planner."""

import dataclasses
from typing import Any

from megatron_ampipe.plan.block import Block
from megatron_ampipe.plan.cluster import Cluster, Overhead, Overlap, find_cluster, read_cluster

NONE: dict[str, Any] = {"basis": "derived", "source": "a test"}


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


def cluster(name: str = "a800x8-20gbps") -> Cluster:
    """A built-in cluster."""
    return read_cluster(find_cluster(name))


def without_device(source: Cluster) -> Cluster:
    """The cluster for training on the CPU, without slowdown of concurrent lanes."""
    host = dataclasses.replace(source.host, issue=Overhead(forward_us=0, backward_us=0, **NONE))
    overlap = Overlap(compute_slowdown=1, communication_slowdown=1, **NONE)
    return dataclasses.replace(source, host=host, overlap=overlap)
