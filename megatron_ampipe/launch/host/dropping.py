"""Makes token dropping by position work on a CPU as on a GPU.

Megatron selects an expert's first tokens with ``torch.topk`` over a map of zeros and ones. On CUDA, ``topk``
prefers the lower index among equal values, which gives the policy "position". On a CPU the order of equal
values is arbitrary, so a stock run would drop arbitrary tokens. Called by :mod:`.megatron`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _BreakTiesByIndex(TorchFunctionMode):
    """``torch.topk`` prefers the lower index among equal values."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.topk:
            return func(*args, **kwargs)
        values, indices = torch.sort(args[0], dim=kwargs["dim"], descending=True, stable=True)
        return tuple(found.narrow(kwargs["dim"], 0, kwargs["k"]) for found in (values, indices))


def break_ties_by_index(drop: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's ``apply_router_token_dropping``; its top-k prefers the lower index among equal values."""

    def dropping(*args: Any, **kwargs: Any) -> Any:
        with _BreakTiesByIndex():
            return drop(*args, **kwargs)

    return dropping
