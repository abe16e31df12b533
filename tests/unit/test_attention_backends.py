"""The kernels for GPUs, tested without one: torch's operators on the meta device and as fakes that compute,
the packages as fakes with their documented signatures. Their results on a GPU are tested in tests/gpu.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ampipe import compat
from megatron_ampipe.attention.kernels import KERNELS
from megatron_ampipe.runtime.key_value_sums import KeyValueSums
from megatron_ampipe.schedule import Span
from tests import reference_pieces

LATER = (Span(0, 24, 40),)
WHOLE = (Span(0, 64, 0),)
SEVERAL = (Span(0, 24, 16), Span(24, 8, 56))
GPU_KERNELS = ("cudnn", "torch-flash-2", "flash-attn-2", "flash-attn-3")
aten = torch.ops.aten


def tensors(
    spans: Sequence[Span], *, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    rows = sum(span.length for span in spans)
    shapes = ((rows, 2, 4, 16), (64, 2, 2, 16), (64, 2, 2, 16))
    return [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for shape in shapes]


class Called(TorchDispatchMode):
    """Records the calls of torch's attention operators: name, queries, keys, causal."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int, int, bool]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Trailing arguments with their default values are not passed on.
        arguments = function._schema.arguments
        named = {a.name: a.default_value for a in arguments}
        named |= {a.name: value for a, value in zip(arguments, args, strict=False)}
        if "scaled_dot_product" in str(function):
            query, key = named["query"].shape[2], named["key"].shape[2]
            self.calls.append((function.__name__.split(".")[0], query, key, named["is_causal"]))
        return self.compute(function, named, args, kwargs or {})

    def compute(
        self, function: Any, named: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return function(*args, **kwargs)


class Computing(Called):
    """Computes torch's attention operators with the reference implementation.

    ``lse_dimensions``: 3 or 4, the number of dimensions of cuDNN's log-sum-exp, which depends on torch's
    version; the backward operator expects what the forward operator returns.
    """

    def __init__(self, lse_dimensions: int) -> None:
        super().__init__()
        self._lse_dimensions = lse_dimensions
        self._random = torch.tensor([3, 5]), torch.tensor(7)

    def compute(
        self, function: Any, named: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        cudnn = "cudnn" in str(function)
        if "scaled_dot_product" not in str(function):
            return function(*args, **kwargs)
        rows_first = [named[name].permute(2, 0, 1, 3) for name in ("query", "key", "value")]
        causal, scale = named["is_causal"], kwargs["scale"]
        assert named["dropout_p"] == 0.0
        # Through torch, cuDNN's causal mask is aligned to the top left only.
        assert not (cudnn and causal) or len(rows_first[0]) == len(rows_first[1])
        if "backward" not in str(function):
            output, lse = reference_pieces.forward(*rows_first, causal=causal, scale=scale)
            lse = lse.unsqueeze(-1) if cudnn and self._lse_dimensions == 4 else lse
            return output.permute(1, 2, 0, 3), lse, None, None, 1, 1, *self._random, None
        assert (named["max_q"], named["max_k"]) == (len(rows_first[0]), len(rows_first[1]))
        assert named["philox_seed"] is self._random[0] and named["philox_offset"] is self._random[1]
        lse = named["logsumexp"]
        assert lse.is_contiguous() and lse.dim() == (self._lse_dimensions if cudnn else 3)
        gradient, output = (named[name].permute(2, 0, 1, 3) for name in ("grad_out", "out"))
        lse = lse.reshape(lse.shape[:3])
        found = reference_pieces.backward(gradient, *rows_first, output, lse, causal=causal, scale=scale)
        return tuple(x.permute(1, 2, 0, 3) for x in found)


FLASH_2, CUDNN = "_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention"


@pytest.mark.parametrize(
    ("kernel", "spans", "pieces"),
    [
        ("cudnn", LATER, [(CUDNN, 24, 24, True), (CUDNN, 24, 40, False)]),
        ("cudnn", WHOLE, [(CUDNN, 64, 64, True)]),
        ("torch-flash-2", LATER, [(FLASH_2, 24, 64, True)]),
        ("torch-flash-2", WHOLE, [(FLASH_2, 64, 64, True)]),
    ],
)
def test_torch_accepts_the_calls_and_all_chunks_use_the_same_kernel(
    kernel: str, spans: tuple[Span, ...], pieces: list[tuple[str, int, int, bool]]
) -> None:
    """On the meta device, where torch's operators check their arguments and compute shapes."""
    inputs = tensors(spans, device="meta", dtype=torch.bfloat16)
    with Called() as called:
        output = KERNELS[kernel](*inputs, spans=spans, scale=0.3)
        gradients = torch.autograd.grad(output, inputs, torch.empty_like(output))
    assert output.shape == (len(inputs[0]), 2, 64) and output.dtype == torch.bfloat16
    assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, x.dtype) for x in inputs]
    backward = [(name + "_backward", *rest) for name, *rest in pieces]
    assert called.calls == [*pieces, *backward]


@pytest.fixture
def flash_attn_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """The internal functions of flash-attn from 2.7 on; older ones returned more values."""
    random_state = torch.tensor([3, 5])

    plain = {
        "dropout_p": 0.0, "window_size_left": -1, "window_size_right": -1, "softcap": 0.0,
        "alibi_slopes": None,
    }  # fmt: skip

    def _flash_attn_forward(
        q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool, **given: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        assert given == plain | {"return_softmax": False}
        rows_first = (x.transpose(0, 1) for x in (q, k, v))
        output, lse = reference_pieces.forward(*rows_first, causal=causal, scale=softmax_scale)
        return output.transpose(0, 1), lse, torch.empty(0), random_state

    def _flash_attn_backward(*tensors: Tensor, softmax_scale: float, causal: bool, **given: Any) -> Tensor:
        *taken, softmax_lse, dq, dk, dv = tensors
        assert given == plain | {"deterministic": False, "rng_state": random_state}
        _write_gradients(taken, softmax_lse, (dq, dk, dv), causal=causal, scale=softmax_scale)
        return torch.empty(0)

    interface = types.ModuleType("flash_attn.flash_attn_interface")
    vars(interface).update(_flash_attn_forward=_flash_attn_forward, _flash_attn_backward=_flash_attn_backward)
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)


def _write_gradients(
    given: Sequence[Tensor], lse: Tensor, into: Sequence[Tensor | None], *, causal: bool, scale: float
) -> None:
    assert lse.is_contiguous() and lse.dtype == torch.float32
    gradient, query, key, value, output = (x.transpose(0, 1) for x in given)
    found = reference_pieces.backward(gradient, query, key, value, output, lse, causal=causal, scale=scale)
    for target, part in zip(into, found, strict=True):
        assert target is not None and target.is_contiguous()
        target.copy_(part.transpose(0, 1))


FA3_FORWARD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? seqused_k=None,"
    " float? softmax_scale=None, bool is_causal=False,"
    " int window_size_left=-1, int window_size_right=-1, int num_splits=0, int sm_margin=0)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
FA3_BACKWARD = (
    "bwd(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq=None,"
    " Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, float? softmax_scale=None, bool is_causal=False,"
    " int window_size_left=-1, int window_size_right=-1, bool deterministic=False, int sm_margin=0)"
    " -> (Tensor)"
)
"""The arguments that AMPipe passes, in their positions, and some with defaults; one has a different name."""


def _register_flash_attn_3(monkeypatch: pytest.MonkeyPatch, forward: str) -> torch.library.Library:
    library = torch.library.Library("flash_attn_3", "DEF")
    library.define(forward)
    library.define(FA3_BACKWARD)
    package = types.ModuleType("flash_attn_3")
    package.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "flash_attn_3", package)
    monkeypatch.setitem(sys.modules, "flash_attn_3._C", types.ModuleType("flash_attn_3._C"))
    compat.has_flash_attn_3.cache_clear()
    return library


@pytest.fixture
def flash_attn_3(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The operators of flash-attn-3."""

    def fwd(
        q: Tensor, k: Tensor, v: Tensor, seqused_k: Any = None, softmax_scale: Any = None,
        is_causal: bool = False, left: int = -1, right: int = -1, num_splits: int = 0, **others: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert softmax_scale is not None and num_splits == 1
        rows_first = (x.transpose(0, 1) for x in (q, k, v))
        output, lse = reference_pieces.forward(*rows_first, causal=is_causal, scale=softmax_scale)
        return output.transpose(0, 1).contiguous(), lse, torch.empty(0), torch.empty(0)

    def bwd(*given: Any, deterministic: bool = False, **others: Any) -> Tensor:
        *taken, softmax_lse, dq, dk, dv, softmax_scale, is_causal = given[:11]
        assert softmax_scale is not None and not deterministic
        _write_gradients(taken, softmax_lse, (dq, dk, dv), causal=is_causal, scale=softmax_scale)
        return torch.empty(0)

    library = _register_flash_attn_3(monkeypatch, FA3_FORWARD)
    library.impl("fwd", fwd, "CompositeExplicitAutograd")
    library.impl("bwd", bwd, "CompositeExplicitAutograd")
    yield
    library._destroy()
    compat.has_flash_attn_3.cache_clear()


@pytest.mark.usefixtures("flash_attn_2", "flash_attn_3")
@pytest.mark.parametrize("lse_dimensions", [3, 4])
@pytest.mark.parametrize("spans", [LATER, WHOLE, SEVERAL], ids=["later", "whole", "several"])
@pytest.mark.parametrize("kernel", GPU_KERNELS)
def test_merged_attention_with_each_kernel_equals_the_reference(
    kernel: str, spans: tuple[Span, ...], lse_dimensions: int
) -> None:
    """Tests layouts, arguments and merging; the kernels themselves are fakes of the reference."""
    torch.manual_seed(3)
    inputs = tensors(spans)
    expected = KERNELS["exact"](*inputs, spans=spans, scale=0.3)
    gradient = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, inputs, gradient)
    with Computing(lse_dimensions):
        found = KERNELS[kernel](*inputs, spans=spans, scale=0.3)
        gradients = torch.autograd.grad(found, inputs, gradient)
        sums = KeyValueSums(*inputs[1:])
        again = KERNELS[kernel](*inputs, spans=spans, scale=0.3, sums=sums)
        torch.autograd.grad(again, inputs, gradient, allow_unused=True)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for a, b in zip((*gradients, *sums.totals()), (*wanted, *wanted[1:]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_cudnn_refuses_a_single_key() -> None:
    inputs = tensors((Span(0, 1, 40),), device="meta")
    with pytest.raises(AssertionError, match="cuDNN attends to two keys or more"):
        KERNELS["cudnn"](*inputs, spans=(Span(0, 1, 40),), scale=0.3)


@pytest.mark.parametrize("name", ["is_causal", "causal"])
def test_flash_attention_3_is_used_if_its_operators_take_our_arguments(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = _register_flash_attn_3(monkeypatch, FA3_FORWARD.replace("is_causal", name))
    try:
        assert compat.has_flash_attn_3() is (name == "is_causal")
    finally:
        library._destroy()
        compat.has_flash_attn_3.cache_clear()
