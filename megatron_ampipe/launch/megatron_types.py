"""What a launch uses of Megatron's objects, which have no types that mypy reads. Only their interfaces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from torch import Tensor
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from megatron_ampipe.runtime.collectives import Waitable


class BucketGroup(Protocol):
    """``_ParamAndGradBucketGroup``: gradients that are reduced in one collective."""

    grad_reduce_handle: Waitable | None
    start_grad_sync: Callable[..., None]
    finish_grad_sync: Callable[..., None]


class Model(Protocol):
    """A part of the model on this rank, in Megatron's wrappers or without."""

    training: bool
    bucket_groups: Iterable[BucketGroup]
    expert_parallel_bucket_groups: Iterable[BucketGroup]

    def __call__(self, *args: object, **kwargs: object) -> Tensor: ...

    def build_schedule_plan(self, *args: object, **kwargs: object) -> object:
        """For the loops of ``--overlap-moe-expert-parallel-comm``."""

    def named_modules(self) -> Iterator[tuple[str, Module]]: ...

    def zero_grad_buffer(self) -> None: ...

    def register_forward_pre_hook(self, hook: Callable[[Model, object], None]) -> RemovableHandle: ...


RunPasses = Callable[..., object]
"""What a ``train_step`` calls for all its passes, with keywords; ``data_iterator`` is one of them."""


class Optimizer(Protocol):
    """Megatron's optimizer."""

    def zero_grad(self) -> None: ...


class LayoutOfModel(Protocol):
    """What tells which pipeline stages have layers of multi-token prediction."""

    pipeline_model_parallel_layout: object
    mtp_num_layers: int | None
