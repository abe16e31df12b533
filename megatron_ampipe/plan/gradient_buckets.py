"""The buckets in which data parallelism reduces gradients: of how many parameters, complete in which layer.

Megatron has one buffer for the parameters of experts and one for all others, because different ranks reduce
them. Both are cut by the same rule (``--ddp-bucket-size``). Counted are the weights of matrix products:
norms, the router, and tables of words and positions are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_ampipe.plan.operation_times import (
    OperationTimes,
    Product,
    attention_products,
    expert_products,
    mlp_products,
    qkv_products,
    shared_products,
)
from megatron_ampipe.plan.workload import Workload


class LayerTensors(NamedTuple):
    """Parameters of each tensor of a layer on one rank, whose gradients are reduced."""

    experts: tuple[float, ...]
    others: tuple[float, ...]

    @property
    def parameters(self) -> float:
        """All of them together."""
        return sum(self.experts) + sum(self.others)


class LayerReductions(NamedTuple):
    """How long reducing the buckets takes that are complete with a layer, in microseconds.

    Attributes:
        experts: Those of experts, complete when the backward pass comes to attention.
        others: Those of all others, complete when it has ended the layer. (A bucket that ends within an MLP
            or shared experts is complete earlier, which is not counted.)
    """

    experts: float
    others: float

    @property
    def total_us(self) -> float:
        """Both, one after the other."""
        return self.experts + self.others


def tensors_of(workload: Workload, *, dense: bool) -> LayerTensors:
    """The tensors of a layer, with experts or ``dense``, without those that no other rank has."""
    products = [*qkv_products(workload, 0), *attention_products(workload, 0)]
    if dense:
        products += mlp_products(workload, 0)
    elif workload.shared_ffn is not None:
        products += shared_products(workload, 0)
    experts: tuple[float, ...] = ()
    if not dense and workload.expert_replicas > 1:
        experts = _weights(expert_products(workload, 0)) * workload.local_experts
    return LayerTensors(experts, _weights(products) if workload.replicas > 1 else ())


def _weights(products: Sequence[Product]) -> tuple[float, ...]:
    return tuple(one.k * one.n for one in products)


def completed(layers: Sequence[Sequence[float]], bucket_size: float) -> list[list[float]]:
    """Parameters of the buckets that are complete with each layer, in the order of the backward pass.

    A bucket ends with the tensor with which it has ``bucket_size`` parameters; the last one ends with the
    last layer.
    """
    found: list[list[float]] = []
    filled = 0.0
    for tensors in layers:
        found.append([])
        for tensor in tensors:
            filled += tensor
            if filled >= bucket_size:
                found[-1].append(filled)
                filled = 0.0
    if filled:
        found[-1].append(filled)
    return found


def reductions_us(
    times: OperationTimes, layers: Sequence[LayerTensors], bucket_size: float | None = None
) -> list[LayerReductions]:
    """How long reducing the buckets takes that are complete with each layer, one bucket after the other.

    Args:
        times: Of operations on the cluster.
        layers: In the order of the backward pass.
        bucket_size: ``--ddp-bucket-size``; one bucket for each buffer of each layer if None.

    Raises:
        BadInput: the cluster has no figure for it.
    """

    def of_buffer(buffer: Sequence[Sequence[float]], *, experts: bool) -> list[float]:
        buckets = [[sum(one)] for one in buffer] if bucket_size is None else completed(buffer, bucket_size)
        return [sum(times.reduction_us(size, experts=experts) for size in sizes) for sizes in buckets]

    of_experts = of_buffer([one.experts for one in layers], experts=True)
    of_others = of_buffer([one.others for one in layers], experts=False)
    return [LayerReductions(*both) for both in zip(of_experts, of_others, strict=True)]
