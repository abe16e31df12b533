"""The losses that Megatron's routers log, for all supported versions of Megatron."""

from typing import Any

import torch

try:
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    def _tracker() -> dict[str, Any]:
        tracked: dict[str, Any] = get_moe_metrics_tracker().metrics
        return tracked

    def _values(entry: Any) -> torch.Tensor:
        values: torch.Tensor = entry.values
        return values

except ImportError:
    # 0.17.
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker as _tracker

    def _values(entry: Any) -> torch.Tensor:
        values: torch.Tensor = entry["values"]
        return values


def clear() -> None:
    """Forget all logged losses; the next model may have more layers."""
    _tracker().clear()


def zero() -> None:
    """Begin anew as Megatron does after a step: in place, because CUDA graphs add to these tensors."""
    for entry in _tracker().values():
        _values(entry).zero_()


def move() -> None:
    """Put them into other memory, with their values."""
    for entry in _tracker().values():
        values = _values(entry).clone()
        if isinstance(entry, dict):
            entry["values"] = values
        else:
            entry.values = values


def by_name() -> dict[str, torch.Tensor]:
    """The losses logged since the reset, per layer."""
    return {name: _values(entry).clone() for name, entry in _tracker().items()}
