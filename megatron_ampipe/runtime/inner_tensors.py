"""Tensors that a stage would keep for its backward, and that are computed once more instead.

Not a checkpoint: the autograd graph of the first run stays, without its tensors, and a second run gives them
back. So the second run can leave out the last product of the stage, of whose result the backward needs
nothing; torch's checkpoint would repeat it. MPipeMoE, section III-D, restores T_M in this way. Called by
:mod:`.block_call`, and by ``layers`` around the products.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class InnerTensors:
    """What the graph of one stage of one chunk has saved, as places without tensors until a second run.

    Tensors are told apart by the order in which operations save them, so both runs must be the same up to the
    last product. From a *down* product to the next *up* product nothing is dropped but the down product's own
    input: what a stage computes there does not run again.

    Args:
        kept: Tensors that are kept in any case: the parameters of the stage.
    """

    def __init__(self, kept: Collection[Tensor]) -> None:
        self._kept = frozenset(tensor.untyped_storage()._cdata for tensor in kept)
        self._places: deque[_Place] = deque()
        self._drops, self._runs_again = True, False
        self._input: Tensor | None = None

    @contextmanager
    def dropped(self) -> Iterator[None]:
        """The first run: what is saved in it becomes a place."""
        with torch.autograd.graph.saved_tensors_hooks(self._drop, _unpacked):
            yield

    @contextmanager
    def restored(self) -> Iterator[None]:
        """The second run: what would be saved in it fills the places. Builds a graph that nobody uses."""
        self._drops, self._runs_again = True, True
        hooks = torch.autograd.graph.saved_tensors_hooks(self._restore, _never_unpacked)
        with torch.enable_grad(), hooks:
            yield
        assert not self._places, f"a second run saved {len(self._places)} tensors less than the first"

    def up(self, product: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the first product of an expert."""
        self._drops = True
        return product(*args, **kwargs)

    def down(self, product: Callable[..., Any], tokens: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the last product of an expert; in the second run only give its input back.

        Args:
            product: Takes ``[T, F]`` first.
            tokens: ``[T, F]``.
            args: Further arguments of the product.
            kwargs: Further arguments of the product.

        Returns:
            What ``product`` returns; in the second run ``([T, 0], None)``, for code that expects an output
            and a bias, and whose own result is not used.
        """
        self._drops = False
        if self._runs_again:
            while self._places and (offset := self._places[0].offset_in_input) is not None:
                place = self._places.popleft()
                start = tokens.storage_offset() + offset
                place.tensor = tokens.detach().as_strided(place.size, place.stride, start)
            return tokens.new_empty((*tokens.shape[:-1], 0)), None
        self._input = tokens
        try:
            return product(tokens, *args, **kwargs)
        finally:
            self._input = None

    def _drop(self, tensor: Tensor) -> Tensor | _Place:
        source = self._input
        if source is not None and _share_memory(tensor, source):
            place = _Place(tensor, tensor.storage_offset() - source.storage_offset())
        elif self._drops and tensor.untyped_storage()._cdata not in self._kept:
            place = _Place(tensor, None)
        else:
            return tensor
        self._places.append(place)
        return place

    def _restore(self, tensor: Tensor) -> None:
        if not self._drops or tensor.untyped_storage()._cdata in self._kept:
            return
        place = self._places.popleft()
        found = (tensor.shape, tensor.dtype)
        assert found == (place.size, place.dtype), f"a second run saved {found} in place of {place}"
        place.tensor = tensor.detach()


class _Place:
    """Where the graph keeps a tensor. Only the graph refers to it, so the tensor goes with its last use.

    Attributes:
        offset_in_input: Where the tensor begins in the input of a down product; None for any other tensor.
    """

    __slots__ = ("dtype", "offset_in_input", "size", "stride", "tensor")

    def __init__(self, tensor: Tensor, offset_in_input: int | None) -> None:
        self.size, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        self.offset_in_input = offset_in_input
        self.tensor: Tensor | None = None

    def __repr__(self) -> str:
        return f"({self.size}, {self.dtype})"


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _unpacked(packed: Tensor | _Place) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    assert packed.tensor is not None, "the backward of a stage runs before its inner tensors are restored"
    return packed.tensor


def _never_unpacked(packed: object) -> Tensor:
    raise AssertionError("the graph of a second run was differentiated")
