"""What every capture of a CUDA graph needs: leaves for parameters, addresses, kept outputs, a stream."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_ampipe.runtime.block_functions import BlockFunctions
from megatron_ampipe.runtime.segment import GradientSums
from megatron_ampipe.schedule import StageKind


class BlockLeaves:
    """Autograd leaves with the memory of the parameters of a block, which captured stages use in their place.

    The accumulation nodes of the parameters themselves belong to a stream that is not captured.
    """

    def __init__(self, functions: BlockFunctions) -> None:
        self._functions = functions
        self.all = tuple(map(_leaf, functions.parameters.all))
        """In the order of the parameters' numbers."""

    @contextlib.contextmanager
    def in_place(self, all_sums: Sequence[GradientSums]) -> Iterator[None]:
        """Replace the parameters by the leaves, in modules and in sums of gradients; restore on exit."""
        functions = self._functions
        leaf_by_parameter = dict(zip(functions.parameters.all, self.all, strict=True))
        numbers = {leaf: number for number, leaf in enumerate(self.all)}
        replaced: list[tuple[Module, str, Parameter]] = []
        for module in dict.fromkeys(itertools.chain.from_iterable(functions.stage_modules.values())):
            for name, parameter in module._parameters.items():
                if parameter in leaf_by_parameter:
                    replaced.append((module, name, parameter))
                    module._parameters[name] = leaf_by_parameter[parameter]
        for leaf in self.all:
            if hasattr(leaf, "grad_added_to_main_grad"):
                leaf.grad_added_to_main_grad = False
        for sums in all_sums:
            sums.parameters, sums.numbers = self.all, numbers
        try:
            yield
        finally:
            for module, name, parameter in replaced:
                module._parameters[name] = parameter
            for sums in all_sums:
                sums.parameters, sums.numbers = functions.parameters.all, functions.parameters.numbers

    def is_fused(self, number: int) -> bool:
        """Whether the gradient of a parameter was added to ``main_grad`` since :meth:`in_place` began."""
        return getattr(self.all[number], "grad_added_to_main_grad", False)


def _leaf(parameter: Parameter) -> Parameter:
    """A separate autograd leaf with the memory and the attributes of a parameter."""
    leaf = Parameter(parameter.data)
    vars(leaf).update(vars(parameter))
    return leaf


class UsedAddresses:
    """Where everything is that graphs of a stack use and that other code can move to other memory.

    Args:
        functions: The stage functions of each block.
        kinds: For each block, the kinds of stages that are captured.
        outside: Returns the tensors that captured stages use, other than their arguments, parameters, buffers
            and ``BlockState.outside``.
    """

    def __init__(
        self,
        functions: Sequence[BlockFunctions],
        kinds: Sequence[Collection[StageKind]],
        outside: Callable[[], Iterable[Tensor]],
    ) -> None:
        self._outside = outside
        self._parameters: list[Parameter] = []
        self._buffer_modules: list[Module] = []
        for block_functions, block_kinds in zip(functions, kinds, strict=True):
            for kind in block_kinds:
                self._parameters += block_functions.stage_parameters.get(kind, ())
                self._buffer_modules += block_functions.buffer_modules.get(kind, ())

    def now(self) -> tuple[int, ...]:
        """The address of each tensor; 0 for one that does not exist."""
        gradients = [getattr(parameter, "main_grad", None) for parameter in self._parameters]
        buffers = [buffer for module in self._buffer_modules for buffer in module._buffers.values()]
        tensors = [*self._parameters, *gradients, *buffers, *self._outside()]
        return tuple([0 if tensor is None else tensor.data_ptr() for tensor in tensors])


@contextlib.contextmanager
def keeping_cached(functions: Iterable[BlockFunctions], kept: list[object]) -> Iterator[None]:
    """Keep the outputs of modules that cache them: graphs read them, and other calls can empty the cache."""
    with contextlib.ExitStack() as stack:
        for block_functions in functions:
            for module in block_functions.caching_modules:
                handle = module.register_forward_hook(lambda _, __, output: kept.append(output))
                stack.callback(handle.remove)
        yield


@contextlib.contextmanager
def quantizing_weights(functions: Sequence[BlockFunctions]) -> Iterator[None]:
    """Have a graph of linear layers quantize their weights itself, in every replay.

    Layers in FP8 keep quantized weights for the micro-batches of a step. A graph that reads those of another
    pass would read old ones after the optimizer has changed the weights; and a pass that reads those of a
    graph would read memory of its pool.
    """
    for block_functions in functions:
        block_functions.forget_quantized_weights()
    try:
        yield
    finally:
        for block_functions in functions:
            block_functions.forget_quantized_weights()


def wait_for_parameters(modules: Sequence[Module]) -> None:
    """Run the forward pre-hooks of the modules (Megatron's ``--overlap-param-gather``)."""
    for module in modules:
        if module._forward_pre_hooks:
            for hook in module._forward_pre_hooks.values():
                hook(module, ())


@functools.cache
def capture_stream() -> torch.cuda.Stream:
    """The stream of all captures: torch cannot capture on the default stream, on which Megatron trains."""
    return torch.cuda.Stream()


@contextlib.contextmanager
def capturing(
    graph: torch.cuda.CUDAGraph, pool: object, generators: Iterable[torch.Generator]
) -> Iterator[None]:
    """Capture what is issued within into the graph, in memory of the pool."""
    # Transformer Engine's attention advances a generator even without dropout.
    for generator in generators:
        graph.register_generator_state(generator)
    torch.cuda.synchronize()
    with torch.cuda.stream(capture_stream()):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # type: ignore[arg-type]
        try:
            yield
        finally:
            graph.capture_end()
