"""Records the collectives that a rank's host issues, and compares the ranks: NCCL needs one order of all.

With ``NCCL_LAUNCH_ORDER_IMPLICIT``, collectives of several groups start on a GPU in the order in which its
host has issued them. If no order of all collectives agrees with that of every rank, ranks wait for each
other.
"""

import contextlib
import graphlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.attention.bias import CausalBias
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from megatron_ampipe.exchange import transports


class Issued(NamedTuple):
    """A collective that a rank has issued."""

    group: str
    """torch's name of the group, the same on all its ranks."""
    ranks: tuple[int, ...]
    operation: str
    row: tuple[Any, ...]
    """Type and sizes of a row, which all ranks of the group agree on."""
    sent: tuple[int, ...] | None = None
    """Rows for each rank of the group, if it is an all-to-all."""
    received: tuple[int, ...] | None = None


class _Operations(TorchDispatchMode):
    """Notes all operations of torch's process groups, but those inside :func:`recorded`'s replacements."""

    def __init__(self) -> None:
        super().__init__()
        self.issued: list[Issued] = []
        self.is_inside = False

    def note(self, group: Any, operation: str, tensor: torch.Tensor, **splits: Any) -> None:
        row = (str(tensor.dtype), *tensor.shape[1:])
        ranks = tuple(dist.get_process_group_ranks(group))
        self.issued.append(Issued(group.group_name, ranks, operation, row, **splits))

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operation._schema.name
        if name.startswith("c10d::") and not self.is_inside:
            groups = [arg for arg in args if isinstance(arg, torch.ScriptObject)]
            (group,) = (arg for arg in groups if "ProcessGroup" in str(arg._type()))
            tensor = next(leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
            self.note(dist.ProcessGroup.unbox(group), name, tensor)
        return operation(*args, **(kwargs or {}))


@contextlib.contextmanager
def recorded() -> Iterator[list[Issued]]:
    """Record within it what the calling thread issues."""
    operations = _Operations()

    def noted(function: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            note(*args, **kwargs)
            assert not operations.is_inside
            operations.is_inside = True
            try:
                return function(*args, **kwargs)
            finally:
                operations.is_inside = False

        return call

    def exchanged(output: Any, input: Any, receive: Any = None, send: Any = None, **others: Any) -> None:
        group = others.get("group") or dist.group.WORLD
        receive = receive if receive is not None else others.get("output_split_sizes")
        send = send if send is not None else others.get("input_split_sizes")
        if send is None:
            send, receive = ([tensor.shape[0] // group.size()] * group.size() for tensor in (input, output))
        operations.note(group, "all-to-all", input, sent=tuple(send), received=tuple(receive))

    def gathered(outgoing: Sequence[Any], incoming: Sequence[Any], group: Any) -> None:
        sent, received = (tuple(part.shape[0] for part in parts) for parts in (outgoing, incoming))
        operations.note(group, "all-to-all", outgoing[0], sent=sent, received=received)

    make_bias = CausalBias.__new__

    def bias(*args: Any) -> CausalBias:
        # It has no operations of groups, and cannot be made while a mode watches.
        with _disable_current_modes():
            return make_bias(*args)

    with (
        mock.patch.object(CausalBias, "__new__", bias),
        mock.patch.object(dist, "all_to_all_single", noted(dist.all_to_all_single, exchanged)),
        mock.patch.object(transports, "send_receive", noted(transports.send_receive, gathered)),
        operations,
    ):
        yield operations.issued


def problems(by_rank: Sequence[Sequence[Issued]]) -> list[str]:
    """What NCCL would not finish, of the collectives that each rank has issued; empty if there is nothing."""
    by_group: dict[str, dict[int, list[Issued]]] = defaultdict(lambda: defaultdict(list))
    for rank, issued in enumerate(by_rank):
        for one in issued:
            by_group[one.group][rank].append(one)
    found = []
    for ranks in by_group.values():
        members = next(iter(ranks.values()))[0].ranks
        found += _disagreements([ranks.get(rank, []) for rank in members], members)
    return found or _circle(by_rank)


def _disagreements(by_member: Sequence[Sequence[Issued]], members: Sequence[int]) -> list[str]:
    """Where ranks of a group issue other collectives in it."""
    counts = [len(issued) for issued in by_member]
    if len({*counts}) > 1:
        return [f"ranks {list(members)} issue {counts} collectives in a group"]
    found = []
    for place, same in enumerate(zip(*by_member, strict=True)):
        if len({(one.ranks, one.operation, one.row) for one in same}) > 1:
            found.append(f"collective {place} of ranks {list(members)} differs: {same}")
        elif same[0].sent is not None:
            sent = [list(one.sent) for one in same]
            received = [list(sizes) for sizes in zip(*(one.received for one in same), strict=True)]
            if sent != received:
                found.append(f"collective {place} of ranks {list(members)}: {sent} sent, {received} received")
    return found


def _circle(by_rank: Sequence[Sequence[Issued]]) -> list[str]:
    """Collectives that wait for each other in a circle."""
    before: dict[tuple[str, int], set[tuple[str, int]]] = defaultdict(set)
    for issued in by_rank:
        counts: dict[str, int] = defaultdict(int)
        last = None
        for one in issued:
            node = one.group, counts[one.group]
            counts[one.group] += 1
            before[node].update([] if last is None else [last])
            last = node
    try:
        graphlib.TopologicalSorter(before).prepare()
    except graphlib.CycleError as error:
        return [f"these wait for each other: {error.args[1]}"]
    return []
