"""Stand-ins for the packages flash-attn, flash-attn-3 and flash-attn-4 that compute on a CPU.

Names, order and defaults of the arguments are those of flash-attn 2.7 and 2.8, of flash-attn-3 3.0.0 and its
operators, and of flash-attn-4 4.0.0b36. Tensors must be as the kernels require, gradients that a kernel fills
come filled with NaN, and the random state and the log-sum-exp of a forward are checked in its backward.
"""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ampipe import compat
from tests import reference_pieces

RANDOM_STATE = torch.tensor([3, 5])
calls: list[str] = []
"""The functions that were called, in order."""


def _check(*tensors: Tensor) -> None:
    for tensor in tensors:
        assert tensor.stride(-1) == 1, "the last dimension is not contiguous"


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    return [tensor.transpose(1, 2) for tensor in tensors]


def _forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    _check(q, k, v)
    output, lse = reference_pieces.forward(*_heads_first(q, k, v), causal=causal, scale=scale)
    return output.transpose(1, 2).contiguous(), lse


def _backward(*given: Tensor, lse: Tensor, causal: bool, scale: float) -> list[Tensor]:
    """Of ``dout, q, k, v, out``."""
    _check(*given)
    assert lse.is_contiguous() and lse.shape == (given[1].shape[0], given[1].shape[2], given[1].shape[1])
    gradients = reference_pieces.backward(*_heads_first(*given), lse, causal=causal, scale=scale)
    return _heads_first(*gradients)


def _span(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: Any, **scoring: Any) -> Tensor:
    """A differentiable function of ``[B, R, H, C]``."""
    assert causal and not torch.are_deterministic_algorithms_enabled()
    left, right = window
    unlimited = left in (None, -1)
    assert right == (left if unlimited else 0)
    tensors = (x.transpose(0, 1) for x in (q, k, v))
    return reference_pieces.exact(*tensors, window=None if unlimited else left, **scoring).transpose(0, 1)


def _documents(attend: Callable[..., Tensor], *given: Any) -> Tensor:
    """Each document separately."""
    *tensors, rows, keys, most_rows, most_keys = given
    assert all(bounds.dtype == torch.int32 and bounds.is_contiguous() for bounds in (rows, keys))
    assert [most_rows, most_keys] == [int(bounds.diff().max()) for bounds in (rows, keys)]
    bounds_of_tensors = (rows, keys, keys)
    parts = [
        tensor.tensor_split(bounds[1:-1].tolist())
        for tensor, bounds in zip(tensors, bounds_of_tensors, strict=True)
    ]
    outputs = [attend(*(x.unsqueeze(0) for x in document)) for document in zip(*parts, strict=True)]
    return torch.cat(outputs, dim=1).squeeze(0)


# FlashAttention 2


def _flash_attn_forward_2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    calls.append("_flash_attn_forward")
    plain = (dropout_p, window_size_left, window_size_right, softcap, alibi_slopes, return_softmax)
    assert plain == (0.0, -1, -1, 0.0, None, False)
    output, lse = _forward(q, k, v, causal=causal, scale=softmax_scale)
    return output, lse, torch.empty(0), RANDOM_STATE


def _flash_attn_backward_2(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    calls.append("_flash_attn_backward")
    plain = (dropout_p, window_size_left, window_size_right, softcap, alibi_slopes, deterministic)
    assert plain == (0.0, -1, -1, 0.0, None, False)
    assert rng_state is RANDOM_STATE
    _fill((dq, dk, dv), _backward(dout, q, k, v, out, lse=softmax_lse, causal=causal, scale=softmax_scale))
    return torch.empty(0)


def _fill(targets: Any, gradients: list[Tensor]) -> None:
    for target, gradient in zip(targets, gradients, strict=True):
        assert target.is_contiguous() and target.shape == gradient.shape
        target.copy_(gradient)


def flash_attn_func_2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor:
    calls.append("flash_attn_func")
    assert softmax_scale is not None and not deterministic
    return _span(q, k, v, causal=causal, window=window_size, scale=softmax_scale, dropout=dropout_p)


def flash_attn_varlen_func_2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    calls.append("flash_attn_varlen_func")
    assert softmax_scale is not None and not deterministic

    def attend(*tensors: Tensor) -> Tensor:
        return _span(*tensors, causal=causal, window=window_size, scale=softmax_scale, dropout=dropout_p)

    return _documents(attend, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)


# FlashAttention 3

_FWD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new = None, Tensor(v_new!)? v_new = None, "
    "Tensor? q_v = None, Tensor(out!)? out = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, "
    "Tensor? cu_seqlens_k_new = None, Tensor? seqused_q = None, Tensor? seqused_k = None, "
    "int? max_seqlen_q = None, int? max_seqlen_k = None, Tensor? page_table = None, "
    "Tensor? kv_batch_idx = None, Tensor? leftpad_k = None, Tensor? rotary_cos = None, "
    "Tensor? rotary_sin = None, Tensor? seqlens_rotary = None, Tensor? q_descale = None, "
    "Tensor? k_descale = None, Tensor? v_descale = None, float? softmax_scale = None, "
    "bool is_causal = False, int window_size_left = -1, int window_size_right = -1, "
    "int attention_chunk = 0, float softcap = 0.0, "
    "bool is_rotary_interleaved = False, Tensor? scheduler_metadata = None, int num_splits = 0, "
    "bool? pack_gqa = None, int sm_margin = 0) -> (Tensor(out!), Tensor, Tensor, Tensor)"
)
_BWD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq = None, "
    "Tensor(dk!)? dk = None, Tensor(dv!)? dv = None, Tensor? cu_seqlens_q = None, "
    "Tensor? cu_seqlens_k = None, Tensor? seqused_q = None, Tensor? seqused_k = None, "
    "int? max_seqlen_q = None, int? max_seqlen_k = None, float? softmax_scale = None, "
    "bool is_causal = False, int window_size_left = -1, int window_size_right = -1, float softcap = 0.0, "
    "bool deterministic = False, int sm_margin = 0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _named(operator: Any, given: tuple[Any, ...]) -> dict[str, Any]:
    """The arguments of an operator by name; torch leaves out the last ones that have their defaults."""
    arguments = operator.default._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments}
    return defaults | {argument.name: value for argument, value in zip(arguments, given, strict=False)}


def _fwd(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    calls.append("fwd")
    given = _named(torch.ops.flash_attn_3.fwd, args)
    q, k, v = (given.pop(name) for name in "qkv")
    causal, scale = given.pop("is_causal"), given.pop("softmax_scale")
    # With another number, the kernel may split the keys.
    assert given.pop("num_splits") == 1
    plain = {"window_size_left": -1, "window_size_right": -1, "attention_chunk": 0, "softcap": 0.0}
    assert plain.items() <= given.items()
    assert not any(value for name, value in given.items() if name not in plain)
    output, lse = _forward(q, k, v, causal=causal, scale=scale)
    return output, lse, q.new_empty(0), q.new_empty(0)


def _bwd(*args: Any) -> tuple[Tensor, ...]:
    calls.append("bwd")
    given = _named(torch.ops.flash_attn_3.bwd, args)
    tensors = [given[name] for name in ("dout", "q", "k", "v", "out")]
    assert not given["deterministic"] and given["cu_seqlens_q"] is None
    assert (given["window_size_left"], given["window_size_right"]) == (-1, -1)
    how = {"lse": given["softmax_lse"], "causal": given["is_causal"], "scale": given["softmax_scale"]}
    _fill([given[name] for name in ("dq", "dk", "dv")], _backward(*tensors, **how))
    return tuple(tensors[0].new_empty(0) for _ in range(5))


_operators = torch.library.Library("flash_attn_3", "DEF")
for _schema, _function in ((_FWD, _fwd), (_BWD, _bwd)):
    _operators.define(_schema)
    _operators.impl(_schema.partition("(")[0], _function, "CompositeExplicitAutograd")


def flash_attn_func_3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor:
    calls.append("flash_attn_func")
    assert softmax_scale is not None and not deterministic
    return _span(q, k, v, causal=causal, window=window_size, scale=softmax_scale)


def flash_attn_varlen_func_3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> tuple[Tensor, None]:
    """As of 3.0.0b1, which also returns the log-sum-exp."""
    calls.append("flash_attn_varlen_func")
    assert softmax_scale is not None and not deterministic

    def attend(*tensors: Tensor) -> Tensor:
        return _span(*tensors, causal=causal, window=window_size, scale=softmax_scale)

    return _documents(attend, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), None


# FlashAttention 4


def _flash_attn_fwd_4(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    learnable_sink: Tensor | None = None,
    tile_mn: tuple[int, int] | None = None,
    mma_pv_is_rs: bool | None = None,
    intra_wg_overlap: bool | None = None,
    num_threads: int = 384,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    _arch: int | None = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
    gather_bwd_recompute_p: bool = False,
) -> tuple[Tensor, Tensor | None, None, None, None]:
    calls.append("_flash_attn_fwd")
    assert q is not None and k is not None and softmax_scale is not None
    output, of_rows = _forward(q, k, v, causal=causal, scale=softmax_scale)
    return output, of_rows if return_lse or q.requires_grad else None, None, None, None


def _flash_attn_bwd_4(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    m_block_size: int = 64,
    n_block_size: int = 128,
    num_threads: int = 256,
    pack_gqa: bool = False,
    num_stages_Q: int = 2,
    num_stages_dO: int = 2,
    SdP_swapAB: bool = False,
    dKV_swapAB: bool = False,
    dQ_swapAB: bool = False,
    AtomLayoutMSdP: int = 2,
    AtomLayoutNdKV: int = 2,
    AtomLayoutMdQ: int = 2,
    V_in_regs: bool = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    deterministic: bool = False,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    block_sparse_tensors: Any = None,
    dlse: Tensor | None = None,
    learnable_sink: Tensor | None = None,
) -> tuple[Tensor, ...]:
    calls.append("_flash_attn_bwd")
    assert softmax_scale is not None and not deterministic
    return tuple(_backward(dout, q, k, v, out, lse=lse, causal=causal, scale=softmax_scale))


def flash_attn_func_4(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> tuple[Tensor, None]:
    calls.append("flash_attn_func")
    assert softmax_scale is not None and not deterministic
    return _span(q, k, v, causal=causal, window=window_size, scale=softmax_scale, sinks=learnable_sink), None


def flash_attn_varlen_func_4(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> tuple[Tensor, None]:
    calls.append("flash_attn_varlen_func")
    assert softmax_scale is not None and not deterministic
    scoring = {"causal": causal, "window": window_size, "scale": softmax_scale, "sinks": learnable_sink}

    def attend(*tensors: Tensor) -> Tensor:
        return _span(*tensors, **scoring)

    return _documents(attend, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), None


_MODULES = {
    "flash-attn-2": {
        "_flash_attn_forward": _flash_attn_forward_2,
        "_flash_attn_backward": _flash_attn_backward_2,
        "flash_attn_func": flash_attn_func_2,
        "flash_attn_varlen_func": flash_attn_varlen_func_2,
    },
    "flash-attn-3": {
        "flash_attn_func": flash_attn_func_3,
        "flash_attn_varlen_func": flash_attn_varlen_func_3,
    },
    "flash-attn-4": {
        "_flash_attn_fwd": _flash_attn_fwd_4,
        "_flash_attn_bwd": _flash_attn_bwd_4,
        "flash_attn_func": flash_attn_func_4,
        "flash_attn_varlen_func": flash_attn_varlen_func_4,
    },
}
KERNELS = tuple(_MODULES)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all three packages installed, without metadata."""
    calls.clear()
    for package in compat.FLASH_ATTENTION:
        assert package.kernel is not None
        names = package.module.split(".")
        for end in range(1, len(names) + 1):
            monkeypatch.setitem(sys.modules, ".".join(names[:end]), ModuleType(".".join(names[:end])))
        for name, function in _MODULES[package.kernel].items():
            setattr(sys.modules[package.module], name, function)
    monkeypatch.setattr(compat.OptionalPackage, "is_installed", True)
    compat.flash_attention_problem.cache_clear()
