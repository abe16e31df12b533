"""Token dropping by position, on a CPU, as a GPU does it.

Megatron keeps an expert's first tokens with ``torch.topk`` over a map of zeros and ones. On CUDA ties go to
the lower index, which is what makes it "position"; on a CPU ties go to any, so a stock run there
would drop tokens by no rule at all. Called by :mod:`.megatron`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _BreakTiesByIndex(TorchFunctionMode):
    """Breaks the ties of ``torch.topk`` by index."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.topk:
            return func(*args, **kwargs)
        values, indices = torch.sort(args[0], dim=kwargs["dim"], descending=True, stable=True)
        return tuple(found.narrow(kwargs["dim"], 0, kwargs["k"]) for found in (values, indices))


def break_ties_by_index(drop: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's ``apply_router_token_dropping`` with the ties of its top-k broken by index."""

    def dropping(*args: Any, **kwargs: Any) -> Any:
        with _BreakTiesByIndex():
            return drop(*args, **kwargs)

    return dropping
