"""The norm of the local layers on the host platform: torch's norm, with support for sequence parallelism.

Under sequence parallelism the gradients of a norm's weights must be summed over the tensor-parallel ranks,
for which Megatron marks the weights. Its ``WrappedTorchNorm`` does not mark them and refuses sequence
parallelism; this builder marks them, as Megatron's fused norms do. :mod:`.megatron` uses it as
``WrappedTorchNorm.__new__``.
"""

from typing import Any

import torch

from megatron_ampipe.errors import BadInput

NORMS = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}


def build_norm(config: Any, hidden_size: int, eps: float = 1e-5, **_unused: object) -> torch.nn.Module:
    """A torch LayerNorm or RMSNorm over the last dimension, marked for the gradient reduction.

    Args:
        config: Megatron's ``TransformerConfig``; read for ``normalization`` and ``sequence_parallel``.
        hidden_size: Size of the last dimension.
        eps: Added to the variance.

    Raises:
        BadInput: The configuration asks for a norm that exists only as a GPU kernel.
    """
    if config.normalization not in NORMS:
        raise BadInput(
            "--normalization",
            config.normalization,
            rule="torch does not have this norm, which the local layers would need",
            remedy=f"Use one of: {', '.join(NORMS)}.",
        )
    for flag, value in (
        ("--apply-layernorm-1p", config.layernorm_zero_centered_gamma),
        ("--persist-layer-norm", config.persist_layer_norm),
        ("--memory-efficient-layer-norm", config.memory_efficient_layer_norm),
    ):
        if value:
            raise BadInput(
                flag, value, rule="the norm is a GPU kernel, and there is no GPU", remedy="Leave it off."
            )
    norm = NORMS[config.normalization](normalized_shape=hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm
