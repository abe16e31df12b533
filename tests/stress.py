"""Stress test of blocks: emulated ranks, slow stages, poisoned memory; on any device and of any size.

Compares a block run by :class:`PoisoningExecutor` with the same block run stage by stage. Called by
``tests/gpu/test_stress.py``. The ranks are emulated, so :func:`start_ranks` must be called first.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_ampipe.runtime.collectives import Transfer
from megatron_ampipe.runtime.executors import SequentialExecutor
from megatron_ampipe.schedule import Partner
from megatron_ampipe.tools.measuring.emulation import Emulation, SequentialWork, mirror
from tests.dist.cases import LARGE, MOE_AGAIN, Case
from tests.dist.worker import start_alone

RANKS = 4


def block(
    degree: int,
    backward_degree: int | None = None,
    *,
    schedule: str = "ampipe",
    local_experts: int = 1,
    recompute: bool = False,
) -> Case:
    """A block, whose sizes a :class:`StressSetup` says."""
    degrees = f"{degree}:{backward_degree}" if backward_degree else str(degree)
    return Case(
        f"{schedule}-{degrees}-{local_experts}-local{'-recompute' if recompute else ''}",
        world_size=RANKS,
        degree=degree,
        backward_degree=backward_degree,
        schedule=schedule,
        kernel="sdpa",
        model=LARGE | {"num_moe_experts": local_experts * RANKS} | (MOE_AGAIN if recompute else {}),
    )


CUTS = ((2, None), (4, None), (8, None), (4, 2), (2, 4), (1, 4))
STRESSES = [
    *(
        block(*cut, local_experts=local_experts, recompute=recompute)
        for cut in CUTS
        for local_experts in (1, 2)
        for recompute in (False, True)
    ),
    *(block(degree, schedule="moe-only") for degree in (2, 4, 8)),
]


@dataclass(frozen=True)
class StressSetup:
    """The device and the sizes of a stress test, and what :class:`PoisoningExecutor` is made of."""

    device: str
    sequence_length: int
    hidden: int
    ffn: int
    executor: Callable[[], Any]
    delay: Callable[[], object]
    travel: Callable[[], object]


@contextmanager
def start_ranks() -> Iterator[None]:
    """A process group of :data:`RANKS` ranks, all emulated except this one."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import mappings

    before = dist.all_gather_into_tensor, mappings.dist_all_gather_func
    start_alone(RANKS, expert_model_parallel_size=RANKS)
    try:
        dist.all_gather_into_tensor = mappings.dist_all_gather_func = _emulation.gather_counts
        yield
    finally:
        dist.all_gather_into_tensor, mappings.dist_all_gather_func = before
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


_emulation = Emulation()


def differences_under(
    case: Case,
    setup: StressSetup,
    *,
    stock: bool = False,
    partner: Partner | None = None,
    insert_fault: Callable[[torch.nn.Module], object] | None = None,
) -> tuple[dict[str, float], int]:
    """The differences between a block under stress and the same block run sequentially.

    Args:
        case: The block.
        setup: Device and sizes.
        stock: Compare with Megatron's layer instead.
        partner: Three micro-batches with partners in this order, instead of one.
        insert_fault: Inserts a fault into the layer under stress.

    Returns:
        The largest difference of the output and of every gradient, relative to its largest value; and how
        often released memory was filled.
    """
    from tests.dist.blocks import build_layers, differences, run
    from tests.dist.micro_batches import step

    model = case.model | {"hidden_size": setup.hidden, "ffn_hidden_size": setup.ffn}
    case = dataclasses.replace(case, sequence_length=setup.sequence_length, model=model)
    _emulation.num_experts = model["num_moe_experts"]
    plain = build_layers(dataclasses.replace(case, schedule="sequential"), executor=SequentialExecutor())
    one_pass = functools.partial(run, case=case, rank=0, device=setup.device)
    of_plain, under_stress = one_pass, one_pass
    if partner is not None:
        of_plain = functools.partial(step, case=case)
        under_stress = functools.partial(step, case=case, partner=partner)
    with mirrored():
        expected = of_plain(plain[0 if stock else 1].to(setup.device))
    poisoning = PoisoningExecutor(setup.executor(), delay=setup.delay, travel=setup.travel)
    _, stressed = build_layers(case, executor=poisoning)
    if insert_fault is not None:
        insert_fault(stressed)
    stressed.to(setup.device)
    # Two passes, so that the second one allocates memory that the first has released.
    under_stress(stressed)
    stressed.zero_grad()
    found = under_stress(stressed)
    return differences(expected, found), poisoning.filled


def insert_unheld_reader(layer: torch.nn.Module) -> None:
    """Make the experts read the received tensors without a reference, like a stream without a wait."""
    experts = layer.mlp.experts
    forward = experts.forward
    experts.forward = lambda tokens, *rest: forward(_Unheld.apply(tokens), *rest)


class _Unheld(torch.autograd.Function):
    """A tensor of the same memory, made from its address."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        # On stand-ins for CUDA, the storage knows where it really is.
        memory = torch._C._construct_storage_from_data_pointer(
            tensor.data_ptr(), tensor.untyped_storage().device, tensor.numel() * tensor.element_size()
        )
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(memory, 0, tensor.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


_NO_COUNT = -(2**40)
"""Used instead of NaN for integers; as a number of rows it cannot be allocated."""


@dataclass(frozen=True, slots=True)
class _Watched:
    """Memory that crosses lanes; ``alias`` keeps it, and ``stream`` (None on a CPU) owns it."""

    alias: Tensor
    stream: torch.cuda.Stream | None


class PoisoningExecutor:
    """Wraps another executor, and makes errors in memory lifetime and lane order visible as NaN.

    * Receive buffers of a collective are filled with NaN until the data arrive.
    * Send and receive buffers are filled with NaN once the last reference is gone: by the stream that owns
      the memory, before the next stage on that stream. From then on torch's allocator could give the memory
      to that stage, and a reader on another stream without a wait would read wrong data; here it reads NaN.
    * Computation is delayed before and after its kernels, and transfers take some time.

    Uses only the protocol of executors. Whether memory is still referenced is determined by the reference
    count of its storage, which includes tensors, views and what autograd has saved.

    Args:
        inner: The executor that runs the stages.
        delay: Keeps the current stream busy.
        travel: Likewise, for the duration of a transfer.
    """

    def __init__(self, inner: Any, *, delay: Callable[[], object], travel: Callable[[], object]) -> None:
        self._inner, self._delay, self._travel = inner, delay, travel
        self._watched: dict[int, _Watched] = {}
        self.filled = 0
        """How many times released memory has been filled."""

    def __getattr__(self, name: str) -> Any:
        """All other attributes are those of the inner executor."""
        return getattr(self._inner, name)

    def execute(self, tape: Any, run_call: Any, *rest: Any) -> None:
        """See ``runtime.executors.Executor``."""
        compute = _stream()

        def run(call: Any) -> Transfer | None:
            self._fill_released()
            if call.stage.is_communication:
                with _Allocations() as made:
                    transfer = run_call(call)
                here = _stream()
                for tensor in (*made.tensors, *transfer.outputs):
                    self._watch(tensor, here if made.holds(tensor) else compute)
                return transfer
            self._delay()
            run_call(call)
            self._delay()
            return None

        with mirrored(before=self._before_exchange(compute), travel=self._travel):
            self._inner.execute(tape, run, *rest)

    def _before_exchange(self, compute: torch.cuda.Stream | None) -> Callable[[Tensor, Tensor], None]:
        def prepare(output: Tensor, input: Tensor) -> None:
            _poison(output)
            # Buffers that the stage allocates on the lane itself are watched once the stage has ended.
            if not _Allocations.now_holds(input):
                self._watch(input, compute)

        return prepare

    def _watch(self, tensor: Tensor, stream: torch.cuda.Stream | None) -> None:
        on_device = tensor.is_cuda == (stream is not None)
        if on_device and tensor.numel():
            self._watched.setdefault(_key(tensor), _Watched(_memory_of(tensor), stream))

    def _fill_released(self) -> None:
        """Fill the memory that the allocator could now give to the stream of the next stage."""
        here = _stream()
        for key, watched in list(self._watched.items()):
            if watched.stream == here and _references(watched.alias) == _OURS_ALONE:
                _poison(watched.alias)
                self.filled += 1
                del self._watched[key]


@contextmanager
def mirrored(
    *,
    before: Callable[[Tensor, Tensor], object] = lambda output, input: None,
    travel: Callable[[], object] = lambda: None,
) -> Iterator[None]:
    """All-to-alls with emulated peers (``tools.measuring.emulation``), of stock layers and of AMPipe's.

    Args:
        before: Called with output and input when an exchange starts.
        travel: Keeps the lane busy before the data arrive.
    """

    def all_to_all_single(
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        group: Any = None,
        async_op: bool = False,
    ) -> SequentialWork | None:
        before(output, input)
        splits = output_split_sizes, input_split_sizes
        handle = SequentialWork((travel, lambda: mirror(output, input, *splits, group=group)))
        if async_op:
            return handle
        handle.wait()
        return None

    original, dist.all_to_all_single = dist.all_to_all_single, all_to_all_single
    try:
        yield
    finally:
        dist.all_to_all_single = original


class _Allocations(TorchDispatchMode):
    """Records the tensors that operations in this context allocate."""

    _active: ClassVar[_Allocations | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []
        self._keys: set[int] = set()

    def __enter__(self) -> _Allocations:
        _Allocations._active = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        _Allocations._active = None
        super().__exit__(*error)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and _key(leaf) not in given | self._keys:
                self._keys.add(_key(leaf))
                self.tensors.append(leaf)
        return result

    def holds(self, tensor: Tensor) -> bool:
        """Whether the memory of ``tensor`` was allocated here."""
        return _key(tensor) in self._keys

    @classmethod
    def now_holds(cls, tensor: Tensor) -> bool:
        """Likewise, for the context that is active."""
        return cls._active is not None and cls._active.holds(tensor)


def _stream() -> torch.cuda.Stream | None:
    """The current stream; None on stand-ins for CUDA."""
    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _references(tensor: Tensor) -> int:
    """The number of references to the memory: in torch, where all of Python count as one, and in Python."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) + sys.getrefcount(storage)


def _references_of_an_alias() -> int:
    tensor = torch.empty(1)
    alias = _memory_of(tensor)
    del tensor
    return _references(alias)


def _memory_of(tensor: Tensor) -> Tensor:
    """A tensor over the whole storage; not a view, so autograd does not notice changes."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())


_OURS_ALONE = _references_of_an_alias()


@torch.no_grad()
def _poison(tensor: Tensor) -> None:
    """Fill the whole storage of a tensor, as if the allocator had reused it."""
    memory = _memory_of(tensor)
    if memory.is_floating_point():
        memory.fill_(float("nan"))
    elif memory.dtype == torch.int64:
        memory.fill_(_NO_COUNT)
