"""The kernels of the packages flash-attn, flash-attn-3 and flash-attn-4: FlashAttention 2, 3 and 4.

Three forms, as in :mod:`.backends`. Spans and documents call the packages' differentiable functions, which
keep the random state of dropout for their backward. Pieces call the functions below these, which return the
log-sum-exp, and take it in the backward. All take ``[B, R, H, C]``, or ``[rows, H, C]`` for documents, and
align causal masks and windows to the bottom right.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_ampipe import compat
from megatron_ampipe.attention.pieces import KernelOutput, PieceKernel, all_visible_keys


def flash_2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    dropout: float = 0.0,
    window: int | None = None,
) -> Tensor:
    """FlashAttention 2 of flash-attn; a :data:`~.backends.SpanFunction`."""
    attend = compat.flash_attention("flash-attn-2").flash_attn_func
    tensors = (x.transpose(0, 1) for x in (query, key, value))
    output: Tensor = attend(
        *tensors, dropout_p=dropout, **_scoring(scale), window_size=_window(window, unlimited=-1)
    )
    return output.transpose(0, 1)


def flash_2_documents(
    *given: Tensor | int, scale: float, dropout: float = 0.0, window: int | None = None
) -> Tensor:
    """The same for several documents; a :data:`~.backends.DocumentFunction`."""
    attend = compat.flash_attention("flash-attn-2").flash_attn_varlen_func
    tensors, bounds = given[:3], _bounds(given[3:])
    output: Tensor = attend(
        *tensors, **bounds, dropout_p=dropout, **_scoring(scale), window_size=_window(window, unlimited=-1)
    )
    return output


def flash_3(query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None = None) -> Tensor:
    """FlashAttention 3 of flash-attn-3; a :data:`~.backends.SpanFunction`."""
    attend = compat.flash_attention("flash-attn-3").flash_attn_func
    tensors = (x.transpose(0, 1) for x in (query, key, value))
    output = attend(*tensors, **_scoring(scale), window_size=_window(window, unlimited=-1))
    return _first(output).transpose(0, 1)


def flash_3_documents(*given: Tensor | int, scale: float, window: int | None = None) -> Tensor:
    """The same for several documents; a :data:`~.backends.DocumentFunction`."""
    attend = compat.flash_attention("flash-attn-3").flash_attn_varlen_func
    tensors, bounds = given[:3], _bounds(given[3:])
    return _first(attend(*tensors, **bounds, **_scoring(scale), window_size=_window(window, unlimited=-1)))


def flash_4(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """FlashAttention 4 of flash-attn-4; a :data:`~.backends.SpanFunction`."""
    attend = compat.flash_attention("flash-attn-4").flash_attn_func
    tensors = (x.transpose(0, 1) for x in (query, key, value))
    window_size = _window(window, unlimited=None)
    output = attend(*tensors, **_scoring(scale), window_size=window_size, learnable_sink=sinks)
    return _first(output).transpose(0, 1)


def flash_4_documents(
    *given: Tensor | int, scale: float, window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    """The same for several documents; a :data:`~.backends.DocumentFunction`."""
    attend = compat.flash_attention("flash-attn-4").flash_attn_varlen_func
    tensors, bounds = given[:3], _bounds(given[3:])
    window_size = _window(window, unlimited=None)
    return _first(
        attend(*tensors, **bounds, **_scoring(scale), window_size=window_size, learnable_sink=sinks)
    )


def _scoring(scale: float) -> dict[str, float | bool]:
    """The arguments of differentiable functions that are the same in all packages."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    return {"softmax_scale": scale, "causal": True, "deterministic": deterministic}


def _window(window: int | None, *, unlimited: int | None) -> tuple[int | None, int | None]:
    """How many keys before and after its own position a query sees; how a package writes all of them."""
    return (unlimited, unlimited) if window is None else (window, 0)


def _bounds(bounds: Sequence[Tensor | int]) -> dict[str, Tensor | int]:
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    return dict(zip(names, bounds, strict=True))


def _first(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    """The output alone: FlashAttention 4 and older versions of 3 also return the log-sum-exp."""
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output


def _rows_first(tensor: Tensor) -> Tensor:
    """``[B, H, R, C]``, as pieces have it, to ``[B, R, H, C]``; each head contiguous, as kernels require."""
    tensor = tensor.transpose(1, 2)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _heads_first(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(tensor.transpose(1, 2) for tensor in tensors)


def _empty_gradients(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous memory for the gradients of these tensors."""
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors]


_PLAIN_2 = {
    "dropout_p": 0.0,
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "alibi_slopes": None,
}


def _flash_2_forward(*tensors: Tensor, causal: bool, scale: float) -> KernelOutput:
    forward = compat.flash_attention("flash-attn-2")._flash_attn_forward
    output, lse, _, random_state = forward(
        *map(_rows_first, tensors), softmax_scale=scale, causal=causal, return_softmax=False, **_PLAIN_2
    )
    return output.transpose(1, 2), lse, random_state


def _flash_2_backward(*given: Tensor, causal: bool, scale: float) -> tuple[Tensor, ...]:
    backward = compat.flash_attention("flash-attn-2")._flash_attn_backward
    *tensors, lse, random_state = given
    tensors = list(map(_rows_first, tensors))
    gradients = _empty_gradients(tensors[1:4])
    # The kernel reads the random state even without dropout.
    backward(
        *tensors,
        lse.contiguous(),
        *gradients,
        softmax_scale=scale,
        causal=causal,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        rng_state=random_state,
        **_PLAIN_2,
    )
    return _heads_first(gradients)


# The operators of FlashAttention 3, whose arguments have kept their names, unlike those of the functions
# around them.


def _flash_3_forward(*tensors: Tensor, causal: bool, scale: float) -> KernelOutput:
    # Importing the module registers the operators.
    compat.flash_attention("flash-attn-3")
    output, lse, *_ = torch.ops.flash_attn_3.fwd(
        *map(_rows_first, tensors), softmax_scale=scale, is_causal=causal, num_splits=1
    )
    return output.transpose(1, 2), lse


def _flash_3_backward(*given: Tensor, causal: bool, scale: float) -> tuple[Tensor, ...]:
    *tensors, lse = given
    tensors = list(map(_rows_first, tensors))
    gradients = _empty_gradients(tensors[1:4])
    dq, dk, dv = gradients
    torch.ops.flash_attn_3.bwd(
        *tensors,
        lse.contiguous(),
        dq=dq,
        dk=dk,
        dv=dv,
        softmax_scale=scale,
        is_causal=causal,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return _heads_first(gradients)


def _flash_4_forward(*tensors: Tensor, causal: bool, scale: float) -> KernelOutput:
    forward = compat.flash_attention("flash-attn-4")._flash_attn_fwd
    output, lse, *_ = forward(*map(_rows_first, tensors), softmax_scale=scale, causal=causal, return_lse=True)
    return output.transpose(1, 2), lse


def _flash_4_backward(*given: Tensor, causal: bool, scale: float) -> tuple[Tensor, ...]:
    backward = compat.flash_attention("flash-attn-4")._flash_attn_bwd
    *tensors, lse = given
    gradient, query, key, value, output = map(_rows_first, tensors)
    gradients = backward(
        query,
        key,
        value,
        output,
        gradient,
        lse.contiguous(),
        softmax_scale=scale,
        causal=causal,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return _heads_first(gradients)


FLASH_2_PIECES = PieceKernel(all_visible_keys, _flash_2_forward, _flash_2_backward)
FLASH_3_PIECES = PieceKernel(all_visible_keys, _flash_3_forward, _flash_3_backward)
FLASH_4_PIECES = PieceKernel(all_visible_keys, _flash_4_forward, _flash_4_backward)
