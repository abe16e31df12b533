"""Replacements for functions and modules inside Megatron that need a GPU or Transformer Engine.

Stock layers and AMPipe layers use the same replacements, so they can be compared.
"""

import contextlib
import copy
import functools
import itertools
import types
from collections.abc import Callable, Sequence
from unittest import mock

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module

from megatron_ampipe import compat
from megatron_ampipe.attention.kernels import KERNELS
from megatron_ampipe.exchange.transports import UNEQUAL_GATHER
from megatron_ampipe.launch.host.torch_calls import get_rng_state, set_rng_state
from megatron_ampipe.layers.chunk_attention import gather_sequence
from megatron_ampipe.layers.documents import DocumentReader
from megatron_ampipe.runtime.collectives import Transfer
from megatron_ampipe.schedule import SequenceLayout
from megatron_ampipe.schedule.chunks import Documents


def install() -> None:
    """Install all replacements."""
    import megatron.core.tensor_parallel.layers as linear
    import megatron.core.tensor_parallel.mappings as mappings
    import megatron.core.tensor_parallel.random as tracker
    import megatron.core.transformer.moe.moe_layer as moe_layer
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.router as router
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
    import megatron.core.utils as utils
    import megatron.training.training as training
    from megatron.core.jit import disable_jit_fuser
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    # For modules of Megatron that are imported later.
    disable_jit_fuser()

    # CudaRNGStatesTracker.add and .fork, and recompute, read and set the device's random state with these.
    tracker._get_cuda_rng_state = get_rng_state
    tracker._set_cuda_rng_state = set_rng_state

    # CheckpointWithoutOutput (--recompute-modules layernorm) calls Transformer Engine even without FP8.
    without_fp8 = {
        "FP8GlobalStateManager": types.SimpleNamespace(is_fp8_enabled=lambda: False),
        "activation_recompute_forward": lambda **_: contextlib.nullcontext(),
        "fp8_autocast": lambda **_: contextlib.nullcontext(),
    }
    for name, stand_in in without_fp8.items():
        vars(tracker).setdefault(name, stand_in)

    # MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize.
    moe_utils.maybe_move_tensor_to_cpu = _splits_to_host
    token_dispatcher.maybe_move_tensor_to_cpu = _splits_to_host

    # LinearWithGradAccumulationAndAsyncCommunication, with gradient accumulation fusion.
    linear.fused_weight_gradient_mlp_cuda = types.SimpleNamespace(
        wgrad_gemm_accum_fp32=add_weight_gradient, wgrad_gemm_accum_fp16=add_weight_gradient
    )
    linear._grad_accum_fusion_available = True

    # MoEAlltoAllTokenDispatcher with tensor-parallel experts.
    gather, scatter = UNEQUAL_GATHER
    mappings._gather_along_first_dim = _with_uneven_splits(
        mappings._gather_along_first_dim, gather, gathers=True
    )
    mappings._reduce_scatter_along_first_dim = _with_uneven_splits(
        mappings._reduce_scatter_along_first_dim, scatter, gathers=False
    )

    # TopKRouter.routing, with --moe-token-drop-policy position.
    dropping = _with_ordered_topk(router.apply_router_token_dropping)
    moe_utils.apply_router_token_dropping = router.apply_router_token_dropping = dropping

    # get_batch_on_this_cp_rank of packed documents.
    utils.tex = types.SimpleNamespace(thd_get_partitioned_indices=shared_rows)

    # Local layers under context parallelism, and local latent attention.
    LocalSpecProvider.core_attention = lambda self: HostDotProductAttention

    # MoELayer, with --moe-latent-size.
    moe_layer.HAVE_TE, moe_layer.TELinear = True, HostLatentProjection

    # LocalSpecProvider.layer_norm, TransformerBlock's final norm, QK norm. The class is patched, because many
    # modules hold a reference to it.
    WrappedTorchNorm.__new__ = staticmethod(lambda _cls, *args, **kwargs: build_norm(*args, **kwargs))

    if compat.has_hybrid_models():
        from megatron_ampipe.launch.host import hybrid_layers

        hybrid_layers.install()

    # pretrain() calls this, which asserts that there is CUDA.
    training.initialize_megatron = functools.partial(training.initialize_megatron, allow_no_cuda=True)


def shared_rows(bounds: Tensor, num_rows: int, num_ranks: int, rank: int) -> Tensor:
    """The rows that a context-parallel rank holds of packed documents, as Transformer Engine divides them.

    As ``thd_get_partitioned_indices``; ``bounds`` are those of the documents in ``num_rows`` rows.
    """
    starts = tuple(sorted({*bounds.tolist()} - {num_rows}))
    documents = Documents((starts,), num_rows, own_positions=True, context_ranks=num_ranks, context_rank=rank)
    spans = documents.spans_between(0, num_rows // num_ranks)
    return torch.cat([torch.arange(span.global_start, span.global_end) for span in spans])


def _splits_to_host(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
    """Convert split sizes for gloo, which needs ints; Megatron's function only converts CUDA tensors."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def add_weight_gradient(inputs: Tensor, gradient: Tensor, main_grad: Tensor) -> None:
    """``main_grad += gradient.T @ inputs``, like apex's ``wgrad_gemm_accum_fp32``, accumulated in fp32."""
    if gradient.dtype == main_grad.dtype:
        main_grad.addmm_(gradient.t(), inputs)
    else:
        main_grad.add_(gradient.t() @ inputs)


def _ordered_topk(values: Tensor, k: int, *, dim: int, **_options: object) -> tuple[Tensor, ...]:
    """``torch.topk`` that prefers the lower index among equal values, as on CUDA."""
    ordered = torch.sort(values, dim=dim, descending=True, stable=True)
    return tuple(part.narrow(dim, 0, k) for part in ordered)


def _with_ordered_topk[**P, Output](drop: Callable[P, Output]) -> Callable[P, Output]:
    """Wrap Megatron's ``apply_router_token_dropping`` to drop the same tokens by position as on a GPU.

    It selects tokens with ``torch.topk`` over zeros and ones, whose order is arbitrary on a CPU.
    """

    def dropping(*args: P.args, **kwargs: P.kwargs) -> Output:
        with mock.patch.object(torch, "topk", _ordered_topk):
            return drop(*args, **kwargs)

    return dropping


def _with_uneven_splits(
    collective: Callable[..., Tensor], start: Callable[..., Transfer], *, gathers: bool
) -> Callable[..., Tensor]:
    """Megatron's gather or reduce-scatter, with AMPipe's for uneven splits, which gloo lacks."""

    def collect(
        tensor: Tensor, group: ProcessGroup, splits: Sequence[int] | None = None, *options: object
    ) -> Tensor:
        if splits is None or group.size() == 1:
            return collective(tensor, group, splits, *options)
        own = [splits[group.rank()]]
        send, receive = (own, splits) if gathers else (splits, own)
        transfer = start([tensor], send=send, receive=receive, group=group)
        transfer.wait()
        return transfer.outputs[0]

    return collect


def build_norm(config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: object) -> Module:
    """A torch LayerNorm or RMSNorm over the last dimension, in place of ``WrappedTorchNorm``.

    That class refuses sequence parallelism; here weights are marked for it, as in Megatron's fused norms.
    """
    norm: Module = getattr(torch.nn, config.normalization)(normalized_shape=hidden_size, eps=eps)
    _mark_for_sequence_parallelism(norm, config)
    return norm


def _mark_for_sequence_parallelism(module: Module, config: TransformerConfig) -> None:
    """Let Megatron sum the gradients of a module over the ranks, which see different rows."""
    for parameter in module.parameters():
        vars(parameter)["sequence_parallel"] = config.sequence_parallel


class HostLatentProjection(torch.nn.Linear):
    """The projection before or after latent experts, as ``TELinear`` with ``parallel_mode="duplicated"``.

    Every tensor-parallel rank has the whole weight.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], object],
        bias: bool,
        **kwargs: object,
    ) -> None:
        super().__init__(input_size, output_size, bias=bias, dtype=config.params_dtype)
        assert kwargs["parallel_mode"] == "duplicated" and not kwargs["skip_bias_add"]
        if config.perform_initialization:
            init_method(self.weight)
        if bias:
            torch.nn.init.zeros_(self.bias)
        _mark_for_sequence_parallelism(self, config)

    def forward(self, rows: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """``[..., input_size]`` to ``[..., output_size]``, and None, as no bias is left to add."""
        return super().forward(rows), None


class HostDotProductAttention(DotProductAttention):
    """``DotProductAttention`` that also supports context parallelism, a separate head size for values, and
    packed documents, for which Megatron needs Transformer Engine. All other attention is Megatron's."""

    def __init__(
        self,
        config: TransformerConfig,
        *args: object,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: object,
    ) -> None:
        # The stock constructor reads this setting only to refuse context parallelism.
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        super().__init__(alone, *args, **kwargs)
        self.config = config
        self._uses_sdpa = config.context_parallel_size > 1 or v_channels is not None
        self._window = None
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, self.layer_number):
            self._window = config.window_size[0]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: object,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: object,
    ) -> Tensor:
        """``[S, B, H, C]``, ``[S, B, G, C]``, ``[S, B, G, V]`` (rows of this rank) to ``[S, B, H * V]``.

        Packed documents come without ``B``, as for Transformer Engine; attention stays within each document.
        """
        if packed_seq_params is None:
            return self._attend(query, key, value, *args, **kwargs)
        tensors, documents = (query, key, value), None
        if self.config.context_parallel_size > 1:
            # As Transformer Engine: ranks share each document.
            group = self.pg_collection.cp
            layout = SequenceLayout(context_ranks=group.size(), context_rank=group.rank())
            documents = DocumentReader().read(packed_seq_params, None, num_rows=len(query), layout=layout)
            query, key, value = (gather_sequence(x, group, documents) for x in tensors)
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        parts = [
            self._attend_alone(
                SequenceLayout(), *(x[first:last].unsqueeze(1) for x in (query, key, value)), None
            )
            for first, last in itertools.pairwise(bounds)
        ]
        context = torch.cat(parts).squeeze(1)
        if documents is None:
            return context
        spans = documents.spans_between(0, len(tensors[0]))
        return torch.cat([context[span.global_start : span.global_end] for span in spans])

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *args: object, **kwargs: object) -> Tensor:
        if self.config.context_parallel_size == 1:
            return self._attend_alone(SequenceLayout(), query, key, value, *args, **kwargs)
        group = self.pg_collection.cp
        layout = SequenceLayout(context_ranks=group.size(), context_rank=group.rank())
        key, value = gather_sequence(key, group), gather_sequence(value, group)
        return self._attend_alone(layout, query, key, value, *args, **kwargs)

    def _attend_alone(
        self,
        layout: SequenceLayout,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: object,
        **kwargs: object,
    ) -> Tensor:
        """Attention of this rank's rows, of a layout, to the keys of the whole sequence."""
        if not self._uses_sdpa:
            context: Tensor = super().forward(query, key, value, *args, **kwargs)
            return context
        # With query-key layer scaling, softmax_scale is divided by the layer number, and Megatron's softmax
        # multiplies by it again.
        divisor = self.layer_number if self.config.apply_query_key_layer_scaling else 1
        return KERNELS["sdpa"](
            query,
            key,
            value,
            spans=layout.spans(0, query.shape[0], sequence_length=key.shape[0]),
            scale=self.softmax_scale * divisor,
            dropout=self.attention_dropout.p if self.training else 0.0,
            window=self._window,
            sinks=self.softmax_offset,
        )
