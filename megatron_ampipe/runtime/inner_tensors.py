"""Tensors that a stage would keep for its backward, and that are restored there instead: computed once more,
or copied from host memory.

Computing them once more is not a checkpoint: the autograd graph of the first run stays, without its
tensors, and a second run gives them back. So the second run can leave out the last product of the stage, of
whose result the backward needs nothing; torch's checkpoint would repeat it. MPipeMoE, section III-D, restores
T_M in these ways. Called by :mod:`.steps`, and by ``layers`` around the products.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_ampipe.runtime.collectives import Transfer
from megatron_ampipe.runtime.host_memory import HostCopies


class InnerTensors:
    """What the graph of one stage of one chunk has saved, as places without tensors until a second run.

    Tensors are told apart by the order in which operations save them, so both runs must be the same up to the
    last product. From a *down* product to the next *up* product nothing is dropped but the down product's own
    input: what a stage computes there does not run again.

    Where they are copied, places keep their tensors until :meth:`store`, and get them back from :meth:`load`;
    nothing runs a second time, except what gives the tokens where these are sent once more.

    Args:
        kept: Tensors that are kept in any case: the parameters of the stage.
        copied: Tensors are copied to host memory, not computed once more.
        resorted: Then, of the tokens in the order in which the experts take them: not copied; a second run up
            to :meth:`sorted` gives them back.
    """

    def __init__(self, kept: Collection[Tensor], *, copied: bool = False, resorted: bool = False) -> None:
        self._kept = frozenset(tensor.untyped_storage()._cdata for tensor in kept)
        self._places: deque[_Place] = deque()
        self._drops, self._runs_again = True, False
        self._input: Tensor | None = None
        self._copied, self._resorted = copied, resorted
        self._copies: HostCopies | None = None
        self._of_tokens: list[_Place] = []

    @contextmanager
    def dropped(self) -> Iterator[None]:
        """The first run: what is saved in it becomes a place."""
        with torch.autograd.graph.saved_tensors_hooks(self._drop, _unpacked):
            yield
        self._input = None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """The second run: what would be saved in it fills the places. Builds a graph that nobody uses."""
        self._drops, self._runs_again = True, True
        if self._copied:
            with torch.no_grad():
                yield
            return
        hooks = torch.autograd.graph.saved_tensors_hooks(self._restore, _never_unpacked)
        with torch.enable_grad(), hooks:
            yield
        assert not self._places, f"a second run saved {len(self._places)} tensors less than the first"

    def store(self) -> Transfer:
        """Start to copy the tensors to host memory, after the first run."""
        self._copies = HostCopies([place.held for place in self._places])

        def release() -> None:
            for place in self._places:
                place.tensor = None

        return self._copies.store(release)

    def load(self) -> Transfer:
        """Start to copy the tensors back into the places."""
        assert self._copies is not None, "tensors are loaded that were not stored"
        transfer, self._copies = self._copies.load(), None
        for tensor in transfer.outputs:
            self._places.popleft().tensor = tensor
        return transfer

    def sorted(self, tokens: Tensor) -> None:
        """Told of the tokens ``[T, D]`` in the order in which the experts take them, in both runs."""
        if not self._resorted:
            return
        if not self._runs_again:
            self._input = tokens
            return
        while self._of_tokens:
            self._of_tokens.pop().view(tokens)

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
            while self._places and self._places[0].offset_in_input is not None:
                self._places.popleft().view(tokens)
            return tokens.new_empty((*tokens.shape[:-1], 0)), None
        if self._copied:
            return product(tokens, *args, **kwargs)
        self._input = tokens
        try:
            return product(tokens, *args, **kwargs)
        finally:
            self._input = None

    def _drop(self, tensor: Tensor) -> Tensor | _Place:
        if self._copied:
            return self._hold(tensor)
        source = self._input
        if source is not None and _share_memory(tensor, source):
            place = _Place(tensor, tensor.storage_offset() - source.storage_offset())
        elif self._drops and tensor.untyped_storage()._cdata not in self._kept:
            place = _Place(tensor, None)
        else:
            return tensor
        self._places.append(place)
        return place

    def _hold(self, tensor: Tensor) -> Tensor | _Place:
        source = self._input
        if source is not None and _share_memory(tensor, source):
            place = _Place(tensor, tensor.storage_offset() - source.storage_offset())
            self._of_tokens.append(place)
            return place
        if tensor.untyped_storage()._cdata in self._kept:
            return tensor
        place = _Place(tensor, None)
        place.tensor = tensor.detach()
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
        offset_in_input: Where the tensor begins in the input of a down product, or in the sorted tokens that
            are sent once more; None for any other tensor.
    """

    __slots__ = ("dtype", "offset_in_input", "size", "stride", "tensor")

    def __init__(self, tensor: Tensor, offset_in_input: int | None) -> None:
        self.size, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        self.offset_in_input = offset_in_input
        self.tensor: Tensor | None = None

    @property
    def held(self) -> Tensor:
        """The tensor, which is here."""
        assert self.tensor is not None
        return self.tensor

    def view(self, source: Tensor) -> None:
        """Take the tensor's part of the tensor that it lay in."""
        assert self.offset_in_input is not None
        start = source.storage_offset() + self.offset_in_input
        self.tensor = source.detach().as_strided(self.size, self.stride, start)

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
