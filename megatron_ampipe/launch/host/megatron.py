"""Replacements for functions inside Megatron. Only this module and what it imports from here import Megatron.

Called last by :func:`megatron_ampipe.launch.host.install`, when ``torch`` is prepared for the import.
"""

import functools
import logging
import types
import warnings
from typing import Any

import torch

from megatron_ampipe import compat
from megatron_ampipe.launch.host.dropping import break_ties_by_index
from megatron_ampipe.launch.host.norm import build_norm
from megatron_ampipe.launch.host.random import get_rng_state, set_rng_state
from megatron_ampipe.launch.host.uneven_collectives import with_uneven_gather, with_uneven_reduce_scatter


def _run_eagerly(function: Any = None, **_options: object) -> Any:
    return function if function is not None else _run_eagerly


def _splits_to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron's function converts CUDA tensors only, and gloo needs split sizes as ints, not as a tensor."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def add_weight_gradient(inputs: torch.Tensor, gradient: torch.Tensor, main_grad: torch.Tensor) -> None:
    """``main_grad += gradient.T @ inputs``, like apex's ``wgrad_gemm_accum_fp32``, accumulated in fp32."""
    if gradient.dtype == main_grad.dtype:
        main_grad.addmm_(gradient.t(), inputs)
    else:
        main_grad.add_(gradient.t() @ inputs)


def _import_megatron() -> None:
    # The jit_fuser decorator binds torch.compile while megatron.core is imported, and the routing functions
    # are compiled where they are defined. On a CPU that costs a C++ compilation per shape, without a benefit.
    compile_, torch.compile = torch.compile, _run_eagerly
    # Hides "No CUDA runtime is found" of the extension loader, which recompute imports.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            # Hides "Apex / Transformer Engine is not installed", once per module: both need a GPU.
            warnings.simplefilter("ignore", category=UserWarning)
            import megatron.training.training  # noqa: F401
    finally:
        torch.compile = compile_


def install() -> None:
    """Import Megatron and replace the functions below."""
    _import_megatron()
    import megatron.core.tensor_parallel.layers as linear
    import megatron.core.tensor_parallel.mappings as mappings
    import megatron.core.tensor_parallel.random as tracker
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.router as router
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
    import megatron.training.training as training
    from megatron.core.jit import disable_jit_fuser
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from megatron_ampipe.launch.host import latent_projection
    from megatron_ampipe.launch.host.core_attention import HostDotProductAttention

    # For modules of Megatron that are imported later.
    disable_jit_fuser()

    # CudaRNGStatesTracker.add and .fork, and recompute, read and set the device's random state with these.
    tracker._get_cuda_rng_state = get_rng_state
    tracker._set_cuda_rng_state = set_rng_state

    # MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize.
    moe_utils.maybe_move_tensor_to_cpu = _splits_to_host
    token_dispatcher.maybe_move_tensor_to_cpu = _splits_to_host

    # LinearWithGradAccumulationAndAsyncCommunication, with gradient accumulation fusion.
    linear.fused_weight_gradient_mlp_cuda = types.SimpleNamespace(
        wgrad_gemm_accum_fp32=add_weight_gradient, wgrad_gemm_accum_fp16=add_weight_gradient
    )
    linear._grad_accum_fusion_available = True

    # MoEAlltoAllTokenDispatcher with tensor-parallel experts.
    mappings._gather_along_first_dim = with_uneven_gather(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = with_uneven_reduce_scatter(
        mappings._reduce_scatter_along_first_dim
    )

    # TopKRouter.routing, with --moe-token-drop-policy position.
    dropping = break_ties_by_index(router.apply_router_token_dropping)
    moe_utils.apply_router_token_dropping = router.apply_router_token_dropping = dropping

    # Local layers under context parallelism, and local latent attention.
    LocalSpecProvider.core_attention = lambda self: HostDotProductAttention

    # MoELayer, with --moe-latent-size.
    latent_projection.install()

    # LocalSpecProvider.layer_norm, TransformerBlock's final norm, QK norm. The class is patched, because many
    # modules hold a reference to it.
    WrappedTorchNorm.__new__ = staticmethod(lambda _cls, *args, **kwargs: build_norm(*args, **kwargs))

    if compat.has_hybrid_models():
        from megatron_ampipe.launch.host import hybrid_layers

        hybrid_layers.install()

    # pretrain() calls this, which asserts that there is CUDA.
    training.initialize_megatron = functools.partial(training.initialize_megatron, allow_no_cuda=True)
