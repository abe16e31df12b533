"""The process groups that AMPipe makes: all of them, on all ranks of the world, in one order.

torch counts the groups that a process makes, and this number is in the name of the next one. A group that
only some ranks make would give later groups of the world a different name on each rank, and their first
collective would wait until its timeout. Communicators that are split from another one need all of its ranks
too. So all ranks call :func:`make_groups` with requests for the same purposes, in one order, also ranks
without any layer that needs a group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """A group that this rank needs: some or all ranks of another group."""

    parent: dist.ProcessGroup
    """An existing group, whose timeout and NCCL options the new one gets."""
    purpose: str
    """What distinguishes it from other groups of the same ranks; a part of its description."""
    ranks: tuple[int, ...]
    """Global ranks, of which this rank is one."""

    @classmethod
    def of_all(cls, parent: dist.ProcessGroup, purpose: str) -> GroupRequest:
        """A group of all ranks of ``parent``."""
        return cls(parent, purpose, tuple(dist.get_process_group_ranks(parent)))


_made: dict[GroupRequest, dist.ProcessGroup] = {}


def make_groups(
    requests: Sequence[GroupRequest], *, create: Callable[..., dist.ProcessGroup | int] | None = None
) -> None:
    """Make the requested groups that do not exist yet. All ranks of the world must call it.

    ``create`` has the arguments and results of ``torch.distributed.new_group``, which is the default.
    """
    new_group: Callable[..., dist.ProcessGroup | int] = create or dist.new_group
    missing = {(request.purpose, request.ranks): request for request in requests if request not in _made}
    if not missing:
        return
    requested: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(requested, list(missing))
    for purpose, ranks in sorted({group for groups in requested for group in groups}):
        own = missing.get((purpose, ranks))
        group = new_group(
            list(ranks),
            timeout=None if own is None else timeout_of(own.parent),
            pg_options=None if own is None else nccl_options_of(own.parent),
            group_desc=f"ampipe {purpose}",
        )
        if own is not None:
            assert not isinstance(group, int), "torch says that a rank is not in the group that it requested"
            _made[own] = group


def made_group(request: GroupRequest) -> dist.ProcessGroup:
    """The group that :func:`make_groups` has made for a request."""
    group = _made.get(request)
    if group is None:
        raise RuntimeError(
            f"the group '{request.purpose}' of ranks {list(request.ranks)} has not been made: the process "
            "groups of a layer differ from those that its model was built with"
        )
    return group


def forget_groups() -> None:
    """Forget all groups, before the groups that they were made from are destroyed."""
    _made.clear()


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """The timeout of a group's collectives; None (torch's default) if its backend does not tell."""
    options = getattr(_backend_of(group), "options", None)
    return getattr(options, "_timeout", None)


def nccl_options_of(group: dist.ProcessGroup) -> object | None:
    """Options for a new group like ``group``, with a stream of high priority; None if it is not of NCCL.

    A transfer that is ready then does not wait for a kernel that fills the device.
    """
    if "nccl" not in dist.get_backend_config(group):
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    backend = cast(dist.ProcessGroupNCCL, _backend_of(group))
    # What --nccl-communicator-config-path sets.
    options.config = backend.options.config
    return options


def _backend_of(group: dist.ProcessGroup) -> object:
    """The backend for tensors of a GPU, or of the CPU if the group has no other one."""
    devices = group._device_types
    cuda = torch.device("cuda")
    backend = group._get_backend(cuda if cuda in devices else devices[0])
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL, torch wraps it.
    return getattr(backend, "wrapped_pg", backend)
