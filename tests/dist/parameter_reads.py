"""Finds modules whose parameters are read before their forward pre-hook has run.

With ``--overlap-param-gather``, Megatron waits for the all-gather of the parameters in that hook. All modules
with parameters and all torch calls are watched, so new stages need no change here.
"""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


class ParameterReads(TorchFunctionMode):
    """Context manager that watches the trainable parameters of ``module`` during one pass.

    Every torch call on a tensor that shares memory with a parameter is a read. Reads in C++ (torch's backward
    functions) and in other threads are not seen: a parameter that is only read there counts as unread.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self._owner_of: dict[int, str] = {}
        """The name of the module that owns a parameter, by the address of its memory."""
        self._names: dict[int, str] = {}
        self._hooks = []
        self._entered: set[str] = set()
        self._read: set[int] = set()
        self._early: dict[str, str] = {}
        for name, owner in module.named_modules():
            own = {
                _address(parameter): f"{name}.{part}"
                for part, parameter in owner.named_parameters(recurse=False)
                if parameter.requires_grad
            }
            if own:
                self._names |= own
                self._owner_of |= dict.fromkeys(own, name)
                self._hooks.append(owner.register_forward_pre_hook(self._enter(name)))

    def report(self) -> dict[str, Any]:
        """The findings; ``early`` names the function that first read a parameter too early."""
        owners = set(self._owner_of.values())
        return {
            "watched": len(self._names),
            "early": self._early,
            "never entered": sorted(owners - self._entered),
            "never read": sorted(self._names[address] for address in self._names.keys() - self._read),
        }

    def _enter(self, name: str) -> Any:
        def entered(*_: Any) -> None:
            self._entered.add(name)

        # In place of the hooks of Megatron's data parallelism.
        entered.__module__ = "megatron.core.distributed.test"
        return entered

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*error)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        # Calls that return no tensor query a size or the like.
        if _tensors(result):
            for tensor in _tensors((args, kwargs)):
                self._note(_address(tensor), function)
        return result

    def _note(self, address: int, function: Any) -> None:
        owner = self._owner_of.get(address)
        if owner is None:
            return
        self._read.add(address)
        if owner not in self._entered:
            self._early.setdefault(self._names[address], getattr(function, "__name__", str(function)))


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
