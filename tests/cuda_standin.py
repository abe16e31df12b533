"""Stand-ins for CUDA on which ``tests/gpu`` runs on a CPU; this module runs it.

On top of the host platform, every tensor has a place, ``cpu`` or ``cuda``, as the calls that make it say, and
``Tensor.device`` and ``is_cuda`` tell it. What CUDA or NCCL would refuse is refused: operands in both places,
and collectives of tensors of the host. ``torch.cuda.set_sync_debug_mode("error")`` raises where the host
waits for the device. Streams order nothing, and no kernel of CUDA runs: ``tests/streams`` checks the order.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_ampipe import compat
from megatron_ampipe.launch.host.torch_calls import FACTORIES, TENSOR_FACTORIES
from megatron_ampipe.runtime.collectives import send_receive
from megatron_ampipe.schedule import Span
from tests import cuda_graph_standin
from tests.dist.worker import report
from tests.ranks import PLUGINS, Outcomes

NAME = "cuda-stand-ins"
_CPU, _CUDA = torch.device("cpu"), torch.device("cuda", 0)
_MIX = ("aten::copy_", "aten::_to_copy", "aten::set_", "aten::fill_")
"""Operations whose operands may be in both places."""
_INDEX = ("aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_")
"""Operations whose indices, their second argument, may be on the host."""
NO_GPU = compat.Gpu(capability=(0, 0), cudnn=0, torch_flash=False, deterministic=False)
"""What decides on kernels of attention: none of a GPU can be used."""


_LARGEST = 1000
"""Keys of the attention kernels that run here."""
_ONE_THREAD = "places of tensors are known to one thread here"
_NO_KERNEL = "no kernel of CUDA runs here; tests/unit/test_emulated_link.py has what is launched"
_ONLY_A_GPU = {
    "test_a_missing_wait_is_seen": "streams order nothing here",
    "test_the_host_has_less_to_do": "replays are run operation by operation here",
    "test_a_transfer_lasts_as_long_as_the_link_takes": _NO_KERNEL,
    "test_every_block_moves_its_share": _NO_KERNEL,
    "test_partners_equal_stock_in_fp32": _ONE_THREAD,
    "test_partners_equal_the_sequence_of_stages": _ONE_THREAD,
    "test_steps_with_partners_equal_stock": _ONE_THREAD,
}


class Places(TorchDispatchMode):
    """Knows the place of every storage; the places of results follow from those of the operands."""

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[int, torch.device | None] = {}
        """Of every storage, by its address, which may be used again; None for what autograd makes itself, of
        which only it knows where. What was made before is on the CPU."""
        self.called_factory = False
        self.raises_at_waits = False

    def is_cuda(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the device."""
        return self._places.get(tensor.untyped_storage()._cdata) is _CUDA

    def put(self, tensor: Any, device: Any) -> Any:
        """Note where a tensor is that was just made."""
        for one in _tensors(tensor):
            self._places[one.untyped_storage()._cdata] = _CUDA if _is_cuda(device) else _CPU
        return tensor

    def move(self, tensor: Tensor, result: Tensor, device: Any, *, waits: bool = True) -> Tensor:
        """``result`` of a copy of ``tensor`` to a place; a separate copy if that is another place."""
        if self.is_cuda(tensor) == _is_cuda(device):
            return result
        if waits:
            self.wait("copy from or to the host")
        if result.untyped_storage()._cdata == tensor.untyped_storage()._cdata:
            result = result.clone()
        return self.put(result, device)

    def wait(self, call: str) -> None:
        """The host waits for the device."""
        if self.raises_at_waits:
            raise RuntimeError(f"called a synchronizing CUDA operation: {call}")

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operation._schema.name
        operands = _tensors(((args[0], *args[2:]) if name in _INDEX else args, kwargs))
        keys = [operand.untyped_storage()._cdata for operand in operands]
        places = [self._places.get(key, _CPU) for key in keys]
        on_device = any(place is _CUDA for place in places)
        # A number that is a tensor may be anywhere.
        on_host = any(
            place is _CPU and operand.dim() for place, operand in zip(places, operands, strict=True)
        )
        if on_device and on_host and name not in _MIX:
            raise RuntimeError(f"{name}: operands on cuda and on the CPU")
        if name.startswith("c10d::") and name != "c10d::barrier" and not all(p is _CUDA for p in places):
            raise RuntimeError(f"{name}: NCCL has no collective for tensors of the CPU")
        reads = name in cuda_graph_standin.READS or (name in _INDEX and _has_mask(args[1]))
        blocks = name == "aten::copy_" and on_host and not (args[2:] and args[2])
        if on_device and (reads or blocks):
            self.wait(name)
        result = operation(*args, **(kwargs or {}))
        place = _CUDA if on_device else None if None in places else _CPU
        if not operands and not self.called_factory:
            place = None
        for made in _tensors(result):
            key = made.untyped_storage()._cdata
            if key not in keys:
                self._places[key] = place
        return result


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return str(device).startswith("cuda") if isinstance(device, str) else isinstance(device, int)


def _has_mask(indices: Any) -> bool:
    return any(isinstance(one, Tensor) and one.dtype is torch.bool for one in indices)


@contextlib.contextmanager
def stand_ins() -> Iterator[Places]:
    """Within it, calls of CUDA work on the CPU. The host platform must be installed."""
    import megatron.core.transformer.moe.moe_layer as moe_layer
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
    from megatron.core import parallel_state
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    places = Places()
    init = torch.distributed.init_process_group

    def init_process_group(backend: str, **options: Any) -> None:
        init({"nccl": "gloo"}.get(backend, backend), **options)

    def splits_to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if not isinstance(tensor, Tensor) or not tensor.is_cuda:
            return tensor
        # Megatron copies on a separate stream, and waits before it reads.
        copy = places.put(tensor.detach().clone(), _CPU)
        return copy.numpy() if as_numpy else copy

    def set_sync_debug_mode(mode: str) -> None:
        places.raises_at_waits = mode == "error"

    # A buffer from before would be on the CPU.
    if parallel_state._GLOBAL_MEMORY_BUFFER is not None:
        parallel_state._GLOBAL_MEMORY_BUFFER.buffer.clear()
    with contextlib.ExitStack() as stack:

        def replace(target: Any, name: str, replacement: Any) -> None:
            stack.enter_context(mock.patch.object(target, name, replacement))

        for name in FACTORIES:
            replace(torch, name, _placing(getattr(torch, name), places))
        for name in TENSOR_FACTORIES:
            replace(Tensor, name, _placing(getattr(Tensor, name), places))
        replace(Tensor, "to", _moving(Tensor.to, places))
        replace(Tensor, "cuda", lambda tensor, *_, **__: places.move(tensor, tensor, _CUDA))
        replace(Tensor, "cpu", lambda tensor, *_, **__: places.move(tensor, tensor, _CPU))
        for name in ("tolist", "numpy"):
            replace(Tensor, name, _reading(getattr(Tensor, name), places))
        replace(Tensor, "device", property(lambda tensor: _CUDA if places.is_cuda(tensor) else _CPU))
        replace(Tensor, "is_cuda", property(places.is_cuda))
        replace(torch.nn.Module, "cuda", _module_to(places))
        state = torch.get_rng_state
        replace(torch, "get_rng_state", lambda: places.put(state(), _CPU))
        share = torch.from_numpy
        replace(torch, "from_numpy", lambda array: places.put(share(array), _CPU))
        replace(torch.cuda, "current_device", lambda: 0)
        replace(torch.cuda, "device", lambda *_: contextlib.nullcontext())
        replace(torch.cuda, "_sleep", lambda _: None)
        replace(torch.cuda, "set_sync_debug_mode", set_sync_debug_mode)
        replace(torch.distributed, "init_process_group", init_process_group)
        replace(torch.distributed, "all_to_all", _all_to_all)
        # What Megatron has imported by name calls these.
        for name in ("reduce_scatter_single", "all_gather_single"):
            replace(distributed_c10d, name, _quiet(getattr(distributed_c10d, name), places))
        # With NCCL, torch sends objects from the device.
        replace(distributed_c10d, "_get_object_coll_device", lambda group=None: "cuda")
        replace(token_dispatcher, "maybe_move_tensor_to_cpu", splits_to_host)
        replace(compat, "current_gpu", lambda: NO_GPU)
        # Where there is a GPU, the host platform gives Megatron neither.
        replace(LocalSpecProvider, "core_attention", lambda _: DotProductAttention)
        replace(moe_layer, "HAVE_TE", False)
        stack.enter_context(cuda_graph_standin.stand_ins())
        stack.enter_context(places)
        yield places


def _all_to_all(received: Sequence[Tensor], sent: Sequence[Tensor], group: Any = None) -> None:
    """As NCCL's, which takes tensors of different sizes; gloo's does not."""
    for work in send_receive(sent, received, group):
        work.wait()


def _quiet(collective: Callable[..., Any], places: Places) -> Callable[..., Any]:
    """A collective of which gloo's own copies are no waits."""

    @functools.wraps(collective)
    def quiet(*args: Any, **kwargs: Any) -> Any:
        before, places.raises_at_waits = places.raises_at_waits, False
        try:
            return collective(*args, **kwargs)
        finally:
            places.raises_at_waits = before

    return quiet


def _placing(make: Callable[..., Tensor], places: Places) -> Callable[..., Tensor]:
    """A function that makes a tensor where it is told; where it is not, the operation has put it."""

    @functools.wraps(make)
    def placed(*args: Any, **kwargs: Any) -> Tensor:
        before, places.called_factory = places.called_factory, True
        try:
            made = make(*args, **kwargs)
        finally:
            places.called_factory = before
        if kwargs.get("device") is None:
            # torch.tensor copies without an operation.
            return places.put(made, _CPU) if make.__name__ == "tensor" else made
        if make.__name__ in ("tensor", "as_tensor") and _is_cuda(kwargs["device"]):
            places.wait(f"torch.{make.__name__}")
        return places.put(made, kwargs["device"])

    return placed


def _moving(to: Callable[..., Tensor], places: Places) -> Callable[..., Tensor]:
    def moved(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        target = kwargs.get("device", args[0] if args else None)
        if isinstance(target, Tensor):
            target = target.device
        result = to(tensor, *args, **kwargs)
        is_place = isinstance(target, (str, int, torch.device))
        waits = not kwargs.get("non_blocking")
        return places.move(tensor, result, target, waits=waits) if is_place else result

    return moved


def _reading(read: Callable[..., Any], places: Places) -> Callable[..., Any]:
    def reads(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if places.is_cuda(tensor):
            assert read.__name__ != "numpy", "a tensor of the device has no numpy array"
            places.wait(read.__name__)
        return read(tensor, *args, **kwargs)

    return reads


def _module_to(places: Places) -> Callable[..., torch.nn.Module]:
    def cuda(module: torch.nn.Module, *_: Any) -> torch.nn.Module:
        for tensor in (*module.parameters(), *module.buffers()):
            places.put(tensor, _CUDA)
        return module

    return cuda


class StandIns(Outcomes):
    """The plugin: runs every test within :func:`stand_ins`, blocks under stress with small sizes."""

    def __init__(self) -> None:
        super().__init__()
        # By which pytest knows a plugin.
        self.__name__ = NAME

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtestloop(self) -> Iterator[None]:
        """All tests, and the fixtures that they share."""
        from tests.gpu import test_attention, test_stress

        small = dataclasses.replace(test_stress.SETUP, sequence_length=32, hidden=32, ffn=64)
        later = [test_attention.Sizes("later chunk", (Span(0, 64, 64),))]
        with (
            stand_ins(),
            mock.patch.object(test_stress, "SETUP", small),
            mock.patch.object(test_attention, "SIZES", later * 2),
        ):
            yield

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Skip what a CPU cannot show, or what takes it long."""
        from tests.gpu import test_attention

        for item in items:
            reason = _ONLY_A_GPU.get(getattr(item, "originalname", ""))
            given = item.callspec.params if hasattr(item, "callspec") else {}
            if "sizes" in given and given["sizes"].num_keys > _LARGEST:
                reason = "takes long on a CPU"
            if given.get("kernel") in test_attention.MARKS:
                reason = "a kernel of CUDA"
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


def main() -> None:
    """Run the tests, and report the outcome of each."""
    from megatron_ampipe.launch import host

    host.install()
    torch.set_num_threads(1)
    plugin = StandIns()
    pytest.main(["tests/gpu", "-q", *PLUGINS], plugins=[plugin])
    report(plugin.outcomes)


if __name__ == "__main__":
    main()
