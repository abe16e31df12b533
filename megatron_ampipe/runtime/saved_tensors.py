"""Executes what ``schedule.saved`` decides: activations that a stage does not save, and how they come back.

For each activation that its policy drops, a stage function gets an object of this module, and computes the
activation through it. That is all that layers do. :mod:`.saved_steps` binds the objects to the steps of a
tape, and they do the rest: what graphs save, copies to host memory, second runs.

| policy | of | object | comes back |
|---|---|---|---|
| recompute | inner tensors of experts | :class:`InnerTensors` | in the stage ``rebuild`` |
| host | the same | :class:`InnerTensors` | in ``load``, tokens that were sent again in ``resort`` |
| host | received tokens | :class:`~.host_copies.HostCopies` | in ``load-tokens`` |
| resend | received tokens | a slot of the tape | in ``redispatch`` |
| recompute | activation of experts | :class:`ActivationTensors` | when the graph needs it |
| recompute | core attention | :class:`RecomputedTensors` | when the graph needs it |
| recompute | output of a norm | :class:`DroppedOutput` | when the first graph needs it, for all of them |
| resend | gathered rows | :class:`ResentInput` | in ``regather-rows`` |
| recompute | a whole stage | :func:`inputs_again` | right before its backward |

Unlike torch's checkpoint, all of this works under ``torch.autograd.grad``, which differentiates a stage.
"""

from __future__ import annotations

import contextlib
import dataclasses
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Concatenate, Protocol

import torch
from torch import Tensor
from torch.nn import Module

from megatron_ampipe.runtime.block_functions import Function
from megatron_ampipe.runtime.collectives import Transfer
from megatron_ampipe.runtime.host_copies import HostCopies
from megatron_ampipe.runtime.segment import with_history
from megatron_ampipe.runtime.slot_ops import Spans, join, take_rows

LinearOutput = tuple[Tensor, Tensor | None]
"""What Megatron's linear layers return: an output, and a bias that the layer itself has not added."""
Again = Callable[[], Tensor]
"""Returns a dropped tensor in the backward pass."""


class RecomputedTensors:
    """What a function saves is dropped, and computed again by a second run when the graph first needs it.

    Tensors are matched by the order in which operations save them, so both runs must be the same.

    Args:
        kept: Tensors that are never dropped: parameters.
    """

    def __init__(self, kept: Collection[Tensor] = ()) -> None:
        self._kept = frozenset(tensor.untyped_storage()._cdata for tensor in kept)
        self._dropped: deque[_DroppedTensor] = deque()
        self._drops = True
        """Whether tensors that operations save now are dropped, or restored in a second run."""
        self._is_second_run = False
        self._run_again: Callable[[], object] | None = None

    def run[R](
        self,
        function: Callable[..., R],
        *inputs: Tensor,
        within: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> R:
        """Return ``function(*inputs)``. Call it once.

        Args:
            function: Has no side effects.
            inputs: Its arguments.
            within: Makes the context of the second run, for example of the same random states.
        """
        # Detached, as the second run must not keep the graph of the arguments.
        kept = [tensor.detach() for tensor in inputs]

        def run_again() -> None:
            with within():
                function(*with_history(kept))

        self._run_again = run_again
        with self.dropping():
            return function(*inputs)

    @contextmanager
    def dropping(self) -> Iterator[None]:
        """A context for the first run, whose saved tensors are dropped."""
        with torch.autograd.graph.saved_tensors_hooks(self._drop, self._unpack):
            yield

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """A context for the second run, whose saved tensors replace the dropped ones."""
        self._drops, self._is_second_run = True, True
        hooks = torch.autograd.graph.saved_tensors_hooks(self._restore, self._unpack)
        with torch.enable_grad(), hooks:
            yield
        assert not self._dropped, f"a second run saved {len(self._dropped)} tensors less than the first"

    def _drop(self, tensor: Tensor) -> Tensor | _DroppedTensor:
        if not self._drops or tensor.untyped_storage()._cdata in self._kept:
            return tensor
        dropped = _DroppedTensor(tensor)
        self._dropped.append(dropped)
        return dropped

    def _restore(self, tensor: Tensor) -> None:
        if not self._drops or tensor.untyped_storage()._cdata in self._kept:
            return
        dropped = self._dropped.popleft()
        saved, expected = (tensor.shape, tensor.dtype), (dropped.size, dropped.dtype)
        assert saved == expected, f"a second run saved {saved} in place of {expected}"
        dropped.tensor = tensor.detach()

    def _unpack(self, packed: Tensor | _DroppedTensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if packed.tensor is None and self._run_again is not None:
            run_again, self._run_again = self._run_again, None
            with self.restoring():
                run_again()
        assert packed.tensor is not None, "the backward of a stage runs before its tensors are restored"
        return packed.tensor


class ExpertTensors(RecomputedTensors, ABC):
    """The same for experts, whose linear layers run through :meth:`up` and :meth:`down`.

    The second run skips the last linear layer, because the backward does not need its output. Between a
    *down* layer and the next *up* layer only the input of the down layer is dropped, because a second run
    does not repeat the operations there.
    """

    def __init__(self, kept: Collection[Tensor]) -> None:
        super().__init__(kept)
        self._input: Tensor | None = None
        """The input of the down layer that runs at present."""

    @abstractmethod
    def up[**P](self, product: Callable[P, LinearOutput], *args: P.args, **kwargs: P.kwargs) -> LinearOutput:
        """Run the first linear layer of an expert."""

    def down[**P](
        self,
        product: Callable[Concatenate[Tensor, P], LinearOutput],
        tokens: Tensor,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> LinearOutput:
        """Run the last linear layer of an expert on ``tokens [T, F]``; the second run only restores these.

        It then returns ``([T, 0], None)`` in place of an output and a bias.
        """
        self._drops = False
        if self._is_second_run:
            while self._dropped and self._dropped[0].offset_in_source is not None:
                self._dropped.popleft().fill_from(tokens)
            return tokens.new_empty((*tokens.shape[:-1], 0)), None
        self._input = tokens
        try:
            return product(tokens, *args, **kwargs)
        finally:
            self._input = None

    def sorted(self, tokens: Tensor) -> None:
        """Called in both runs with the tokens ``[T, D]``, sorted by expert."""

    def _drop(self, tensor: Tensor) -> Tensor | _DroppedTensor:
        if not _shares_memory(tensor, self._input):
            return super()._drop(tensor)
        dropped = _DroppedTensor(tensor, source=self._input)
        self._dropped.append(dropped)
        return dropped


class InnerTensors(ExpertTensors):
    """The saved activations of the experts of one chunk, which stages of the backward pass restore.

    With ``copied``, tensors stay until :meth:`store` and come back with :meth:`load`. Nothing runs again,
    except the sorting of redispatched tokens.

    Args:
        kept: See :class:`RecomputedTensors`.
        copied: Copy tensors to host memory instead of recomputing them.
        resorted: With ``copied``, tokens sorted by expert are not copied: they are redispatched and sorted.
    """

    def __init__(self, kept: Collection[Tensor], *, copied: bool = False, resorted: bool = False) -> None:
        super().__init__(kept)
        self._copied, self._resorted = copied, resorted
        self._copies: HostCopies | None = None
        self._sorted_tokens: list[_DroppedTensor] = []

    def run[R](
        self,
        function: Callable[..., R],
        *inputs: Tensor,
        within: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> R:
        """Return ``function(*inputs)``; the first input are tokens sorted by expert. The stage that restores
        the tensors calls it again."""
        self.sorted(inputs[0])
        return function(*inputs)

    @contextmanager
    def dropping(self) -> Iterator[None]:
        """See :class:`RecomputedTensors`."""
        with super().dropping():
            yield
        self._input = None

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """See :class:`RecomputedTensors`."""
        if not self._copied:
            with super().restoring():
                yield
            return
        self._is_second_run = True
        with torch.no_grad():
            yield

    def store(self) -> Transfer:
        """Start to copy the tensors to host memory, after the first run."""
        tensors = [dropped.tensor for dropped in self._dropped if dropped.tensor is not None]
        assert len(tensors) == len(self._dropped), "tensors are stored that were not copied"
        self._copies = HostCopies(tensors)

        def release() -> None:
            for dropped in self._dropped:
                dropped.tensor = None

        return self._copies.store(release)

    def load(self) -> Transfer:
        """Start to copy the tensors back."""
        assert self._copies is not None, "tensors are loaded that were not stored"
        transfer, self._copies = self._copies.load(), None
        for tensor in transfer.outputs:
            self._dropped.popleft().tensor = tensor
        return dataclasses.replace(transfer, outputs=())

    def sorted(self, tokens: Tensor) -> None:
        """See :class:`ExpertTensors`."""
        if not self._resorted:
            return
        if not self._is_second_run:
            self._input = tokens
            return
        while self._sorted_tokens:
            self._sorted_tokens.pop().fill_from(tokens)

    def up[**P](self, product: Callable[P, LinearOutput], *args: P.args, **kwargs: P.kwargs) -> LinearOutput:
        """See :class:`ExpertTensors`."""
        self._drops = True
        return product(*args, **kwargs)

    def down[**P](
        self,
        product: Callable[Concatenate[Tensor, P], LinearOutput],
        tokens: Tensor,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> LinearOutput:
        """See :class:`ExpertTensors`."""
        if self._copied and not self._is_second_run:
            return product(tokens, *args, **kwargs)
        return super().down(product, tokens, *args, **kwargs)

    def _drop(self, tensor: Tensor) -> Tensor | _DroppedTensor:
        if not self._copied:
            return super()._drop(tensor)
        if _shares_memory(tensor, self._input):
            dropped = _DroppedTensor(tensor, source=self._input)
            self._sorted_tokens.append(dropped)
            return dropped
        if tensor.untyped_storage()._cdata in self._kept:
            return tensor
        dropped = _DroppedTensor(tensor)
        dropped.tensor = tensor.detach()
        self._dropped.append(dropped)
        return dropped


class ActivationTensors(ExpertTensors):
    """Drops what the operations between the linear layers save; recomputes it when the graph first needs it.

    As Megatron's ``moe_act``, whose checkpoint calls ``backward`` and so fails under ``torch.autograd.grad``.
    """

    def __init__(self, kept: Collection[Tensor]) -> None:
        super().__init__(kept)
        self._results: list[LinearOutput] = []
        self._next_results: Iterator[LinearOutput] = iter(())
        # Tensors saved before the first linear layer are not dropped.
        self._drops = False

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """See :class:`RecomputedTensors`."""
        with super().restoring():
            self._drops, self._next_results = False, iter(self._results)
            yield
        # Not earlier: new tensors could get the addresses of tensors in ``_kept``.
        self._results, self._next_results = [], iter(())

    def up[**P](self, product: Callable[P, LinearOutput], *args: P.args, **kwargs: P.kwargs) -> LinearOutput:
        """Run the first linear layer of an expert; the second run reuses the output of the first run."""
        if self._is_second_run:
            first_output, bias = next(self._next_results)
            self._drops = True
            (output,) = with_history([first_output])
            return output, bias
        self._drops = False
        output, bias = product(*args, **kwargs)
        self._kept |= {output.untyped_storage()._cdata}
        self._results.append((output.detach(), bias))
        self._drops = True
        return output, bias


class _DroppedTensor:
    """Stands in the graph for a saved tensor, perhaps a part of ``source``. Freed with the graph."""

    __slots__ = ("dtype", "offset_in_source", "size", "stride", "tensor")

    def __init__(self, tensor: Tensor, *, source: Tensor | None = None) -> None:
        self.size, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        self.offset_in_source: int | None = None
        if source is not None:
            self.offset_in_source = int(tensor.storage_offset() - source.storage_offset())
        self.tensor: Tensor | None = None

    def part_of(self, source: Tensor) -> Tensor:
        """The tensor as a view of ``source``, the tensor whose memory it shared."""
        assert self.offset_in_source is not None
        start = source.storage_offset() + self.offset_in_source
        return source.detach().as_strided(self.size, self.stride, start)

    def fill_from(self, source: Tensor) -> None:
        """Restore the tensor as a part of ``source``."""
        self.tensor = self.part_of(source)


def _shares_memory(tensor: Tensor, source: Tensor | None) -> bool:
    return source is not None and tensor.untyped_storage()._cdata == source.untyped_storage()._cdata


class DroppedOutput:
    """The output of a module that no graph keeps: the backward pass runs the module again.

    As Megatron's checkpoints that discard their output, which fail under ``torch.autograd.grad``. Gradients
    of the output go through the graph of the second run. The module works row by row and draws no random
    numbers.
    """

    module: Module

    def __init__(self) -> None:
        self._parameters: list[Tensor] = []
        self._rows: Tensor | None = None
        self._second_run: tuple[Tensor, Tensor] | None = None

    def compute(self, module: Module, rows: Tensor) -> Tensor:
        """Run the module on ``[R, B, D]``, differentiably. Call it once."""
        self.module = module
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._rows = rows.detach()
        output: Tensor = _ComputeWithoutGraph.apply(self, rows, *self._parameters)
        return output

    def compute_and_feed[R](self, module: Module, rows: Tensor, function: Callable[[Tensor], R]) -> R:
        """Run the module on ``[R, B, D]``, and a function on its output, which the function saves neither."""
        output = self.compute(module, rows)
        with not_saving(output, self.recompute):
            return function(output)

    def recompute(self) -> Tensor:
        """The output of :meth:`compute` again, in the backward pass."""
        return self._graph()[1].detach()

    def differentiate(self, gradient: Tensor) -> Sequence[Tensor | None]:
        """The gradients of the rows and the parameters from that of the output. Call it once."""
        rows, output = self._graph()
        self._rows = self._second_run = None
        return torch.autograd.grad(output, (rows, *self._parameters), gradient)

    def _graph(self) -> tuple[Tensor, Tensor]:
        if self._second_run is None:
            assert self._rows is not None, "an output is needed before it is computed, or after its backward"
            with torch.enable_grad():
                (rows,) = with_history([self._rows])
                self._second_run = rows, self.module(rows)
        return self._second_run


class _ComputeContext(Protocol):
    """What a node of :class:`_ComputeWithoutGraph` saves."""

    dropped: DroppedOutput


class _ComputeWithoutGraph(torch.autograd.Function):
    """Runs the module of a :class:`DroppedOutput`. Parameters are arguments so that they get gradients."""

    @staticmethod
    def forward(ctx: _ComputeContext, dropped: DroppedOutput, rows: Tensor, *parameters: Tensor) -> Tensor:
        ctx.dropped = dropped
        output: Tensor = dropped.module(rows)
        return output

    @staticmethod
    def backward(ctx: _ComputeContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.dropped.differentiate(gradient)


@contextmanager
def not_saving(tensor: Tensor, again: Again) -> Iterator[None]:
    """A context in which no graph saves ``tensor``; backward gets it from ``again()``, in its layout."""
    # The graph keeps the hooks, which must not refer to the tensor.
    memory, begin = tensor.untyped_storage()._cdata, tensor.storage_offset()

    def drop(saved: Tensor) -> Tensor | _DroppedTensor:
        if saved.untyped_storage()._cdata != memory:
            return saved
        dropped = _DroppedTensor(saved)
        dropped.offset_in_source = int(saved.storage_offset() - begin)
        return dropped

    def unpack(packed: Tensor | _DroppedTensor) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed.part_of(again())

    with torch.autograd.graph.saved_tensors_hooks(drop, unpack):
        yield


class ResentInput:
    """An input of a stage that its graph does not save: it is sent again before the graph needs it."""

    tensor: Tensor | None = None

    def __call__(self) -> Tensor:
        """The input, see :data:`Again`."""
        assert self.tensor is not None, "the backward of a stage runs before its input is sent again"
        return self.tensor


# Operations on slots, see :mod:`.slot_ops`.


def resent(resent_input: ResentInput, tensor: Tensor) -> ResentInput:
    """Put the tensor that was sent again into the object that the graph asks for it."""
    resent_input.tensor = tensor
    return resent_input


def rows_again(
    _: None, spans: Spans | None, parts: tuple[Sequence[Spans], int] | None, *outputs: DroppedOutput
) -> Again:
    """What returns an input of a stage again.

    Args:
        spans: The rows of the only output; None for all of them.
        parts: For several outputs: the rows that each gives, and the number of all rows.
        outputs: The dropped outputs that the input was made of.
    """

    def again() -> Tensor:
        recomputed = [output.recompute() for output in outputs]
        if parts is not None:
            return join(None, *parts, *recomputed)
        return recomputed[0] if spans is None else take_rows(recomputed[0], spans)

    return again


# Changes of a stage function: its arguments by keyword are such objects.


def not_saving_first(function: Function) -> Function:
    """The function, whose graph does not save its first input; the backward gets it from ``first_again``."""

    def run(
        state: object, chunk: int | None, *inputs: Tensor, first_again: Again, **options: object
    ) -> object:
        with not_saving(inputs[0], first_again):
            return function(state, chunk, *inputs, **options)

    return run


def given_first(function: Function) -> Function:
    """The function, which is given the dropped tensor of ``first_again`` as its first argument."""

    def run(state: object, chunk: int | None, *others: Tensor, first_again: Again) -> object:
        return function(state, chunk, first_again(), *others)

    return run


def dropping_inner(function: Function) -> Function:
    """The function of the experts, whose graph does not save its inner tensors."""

    def run(
        state: object, chunk: int | None, *inputs: Tensor, inner: InnerTensors, **options: object
    ) -> object:
        with inner.dropping():
            return function(state, chunk, *inputs, inner=inner, **options)

    return run


def restoring_inner(function: Function) -> Function:
    """A function that restores the inner tensors of the experts."""

    def run(state: object, chunk: int | None, *inputs: Tensor, inner: InnerTensors) -> tuple[()]:
        with inner.restoring():
            function(state, chunk, *with_history(inputs), inner=inner)
        return ()

    return run


def inputs_again(inputs: Sequence[Tensor], first_again: Again | None) -> Callable[[], Sequence[Tensor]]:
    """Returns the inputs of a stage that saves nothing else, to run it again.

    ``first_again``: The first input is dropped, too, and comes back from this.
    """
    kept = [tensor.detach() for tensor in inputs]
    if first_again is None:
        return lambda: kept
    del kept[0]
    return lambda: [first_again(), *kept]
