"""Runs real blocks through ``CudaExecutor`` on the modelled device."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from megatron_ampipe.exchange.budgets import FixedRows
from megatron_ampipe.launch.hooks import on_training_stream
from megatron_ampipe.layers.block_modules import BlockModules
from megatron_ampipe.layers.layer import AMPipeTransformerLayer
from megatron_ampipe.runtime import compile as compiler
from megatron_ampipe.runtime import segment
from megatron_ampipe.schedule import Exchange, kinds
from tests.dist import routing_records
from tests.dist.blocks import build_layers, forward, inputs_of, transformer_config
from tests.streams import model
from tests.streams.cases import Run
from tests.streams.host_calls import replacements
from tests.streams.model import DEVICE, HOST, ModelEvent, ModelStream
from tests.streams.tracker import Tracker


class RunResult(NamedTuple):
    """The result of one run, with its races."""

    races: tuple[str, ...]
    waits: tuple[tuple[str, str], ...]
    """Stage and call of every wait of the host; no stage between blocks."""
    issued: dict[str, dict[str, int]]
    """For each direction and stage, the number of device calls of each kind."""

    @property
    def num_operations(self) -> int:
        """How many operations were tracked."""
        return sum(calls.get("operation", 0) for calls in self.issued.values())


def _collective(outputs: Sequence[torch.Tensor], input: torch.Tensor, async_op: bool) -> None:
    """As NCCL's, on the current stream; peers send copies of this rank's rows, so that values are realistic.

    So torch runs them from 2.8 on. Before, each process group has a separate stream for them, which waits for
    the current one, as that does for it.
    """
    assert not async_op, "on CUDA, a lane has its own stream, which orders its collectives"
    DEVICE.note("collective")
    stream = DEVICE.current
    stream.inside_a_call = True
    try:
        for output in outputs:
            if input.shape[0]:
                output.copy_(input[torch.arange(output.shape[0], device="cuda") % input.shape[0]])
            else:
                output.zero_()
    finally:
        stream.inside_a_call = False


def _of_one(output: torch.Tensor, input: torch.Tensor, *_: Any, async_op: bool = False, **__: Any) -> None:
    _collective([output], input, async_op=async_op)


def _of_several(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: Any = None, async_op: bool = False
) -> None:
    # Of a gather: every rank is sent the same.
    assert all(one is inputs[0] for one in inputs)
    _collective(outputs, inputs[0], async_op=async_op)


PEERS = {
    "all_to_all_single": _of_one,
    "all_to_all": _of_several,
    "all_gather_into_tensor": _of_one,
    "reduce_scatter_tensor": _of_one,
}
"""Collectives of emulated peers: one process is rank 0 of several."""


def _splits_to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """In place of Megatron's function, which copies on another stream and waits before it reads: waits at
    once, on the stream that trains."""
    if not isinstance(tensor, torch.Tensor) or not tensor.is_cuda:
        return tensor
    with DEVICE.using(DEVICE.default):
        copy = tensor.cpu()
    return copy.numpy() if as_numpy else copy


@contextlib.contextmanager
def modelled_device() -> Iterator[Tracker]:
    """Context manager that tracks all operations on a modelled device in its initial state."""
    model.reset()
    tracker = Tracker()
    with contextlib.ExitStack() as stack:
        for name, replacement in {
            "Stream": ModelStream,
            "Event": ModelEvent,
            "stream": DEVICE.using,
            "current_stream": lambda *_: DEVICE.current,
            "default_stream": lambda *_: DEVICE.default,
            # Nothing waits for the whole device.
            "synchronize": None,
        }.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, replacement))
        # Megatron's copy stream, which is created with the first layer.
        side = ModelStream(name="dtoh")
        stack.enter_context(mock.patch.object(MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", side))
        stack.enter_context(mock.patch.object(segment, "_engine_run_backward", tracker.differentiate))
        stack.enter_context(mock.patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", _splits_to_host))
        for target, name, replacement in replacements(tracker):
            stack.enter_context(mock.patch.object(target, name, replacement))
        for name, peers in PEERS.items():
            stack.enter_context(mock.patch.object(torch.distributed, name, peers))
        stack.enter_context(tracker)
        yield tracker


def run_case(run: Run, *, warm: bool = False) -> RunResult:
    """Run forward and backward of a block; with ``warm``, report the second of two runs."""
    case = run.case
    _, layer = build_layers(case)
    context = next(block.context for block in _blocks(layer))
    if run.pipeline is not None:
        context.pipeline = run.pipeline
    _name_stages(context.executor)
    config = transformer_config(case)
    issued = mock.patch.object(compiler, "issue_order", run.issue) if run.issue else contextlib.nullcontext()
    with modelled_device() as tracker, issued:
        for constant in _host_constants(layer):
            tracker.make(constant, "a constant", owner=None)
        if run.data_parallel:
            layer = _data_parallel(layer, config)
        if context.fixed_rows is not None:
            _learn_budgets(layer, run, context.fixed_rows)
        for _ in range(1 + warm):
            HOST.waits.clear()
            DEVICE.issued.clear()
            with routing_records.watched(layer, case):
                _passes(layer, run)
    return RunResult(tuple(tracker.races), tuple(HOST.waits), dict(DEVICE.issued))


def _data_parallel(layer: Any, config: Any) -> DistributedDataParallel:
    """As Megatron's ``get_model`` makes it: on a separate stream."""
    with torch.cuda.stream(ModelStream(name="get_model")):
        made: DistributedDataParallel = on_training_stream(DistributedDataParallel)(
            config, DistributedDataParallelConfig(), layer
        )
        return made


def _learn_budgets(layer: Any, run: Run, fixed_rows: FixedRows) -> None:
    """Run once with exact rows, for counts; budgets are used from then on."""
    fixed_rows.is_watched = True
    _passes(layer, run)
    fixed_rows.end_step()
    fixed_rows.learn(1.5)
    fixed_rows.is_active = True
    DEVICE.issued.clear()


def _blocks(layer: Any) -> Iterator[BlockModules]:
    """The pipelined blocks of a layer, or of several."""
    for module in layer.modules():
        if isinstance(module, AMPipeTransformerLayer):
            yield module._block


def _host_constants(layer: Any) -> Iterator[torch.Tensor]:
    """Tensors that a dispatcher creates once, explicitly on the host."""
    dispatchers = [module.token_dispatcher for module in layer.modules() if isinstance(module, MoELayer)]
    dispatchers += [
        block.dispatcher(exchange)
        for block in _blocks(layer)
        if not block.dense
        for exchange in {Exchange.ROWS, block.context.pipeline.exchange}
    ]
    for dispatcher in dispatchers:
        if str(getattr(dispatcher, "permute_idx_device", None)) == "cpu":
            yield dispatcher.sort_input_by_local_experts
            yield dispatcher.restore_output_by_local_experts


def _passes(layer: Any, run: Run) -> None:
    outputs = []
    for number in range(run.in_flight):
        num_waits = len(HOST.waits)
        inputs = inputs_of(run.case, rank=number, device="cuda", dtype=torch.float32)
        # Those of the copies to the device.
        del HOST.waits[num_waits:]
        with torch.set_grad_enabled(run.gradients):
            outputs.append(forward(layer, inputs)[0])
        del inputs
    for output in outputs if run.gradients else ():
        output.backward(torch.ones_like(output))


def _name_stages(executor: Any) -> None:
    """Tell the device which stage is being issued; the executor is otherwise unchanged."""
    execute = executor.execute

    def named(tape: Any, run_call: Any, *rest: Any, **options: Any) -> None:
        counts = any(call.stage.kind == kinds.COUNTS for call in tape.calls)
        direction = "forward" if counts else "backward"

        def run(call: Any) -> Any:
            DEVICE.stage = f"{direction} {call.stage}"
            try:
                return run_call(call)
            finally:
                DEVICE.stage = ""

        execute(tape, run, *rest, **options)

    executor.execute = named
