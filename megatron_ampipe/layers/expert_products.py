"""The two products of Megatron's experts, run so that their inner tensors need not be kept.

Megatron computes an expert in one module: first product, activation, last product
(``megatron/core/transformer/mlp.py: MLP.forward``, ``moe/experts.py: TEGroupedMLP.forward``). Here the two
linear layers inside it are run by :class:`~megatron_ampipe.runtime.saved_tensors.InnerTensors`; all else,
hooks included, is Megatron's. Used by :mod:`.moe_stages`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch.nn import Module

from megatron_ampipe.runtime.saved_tensors import InnerTensors


@dataclass(frozen=True, slots=True)
class ExpertProducts:
    """The linear layers of the local experts.

    Attributes:
        up: The first of each expert, or of all as a grouped product.
        down: The last.
    """

    up: tuple[Module, ...]
    down: tuple[Module, ...]

    @classmethod
    def of(cls, experts: Module) -> ExpertProducts:
        """Those inside Megatron's module of the local experts."""

        def named(name: str) -> tuple[Module, ...]:
            return tuple(
                module for path, module in experts.named_modules() if path.rpartition(".")[2] == name
            )

        found = cls(named("linear_fc1"), named("linear_fc2"))
        assert found.up and len(found.up) == len(found.down), f"{type(experts).__name__} has other products"
        return found


@contextmanager
def products_run_by(inner: InnerTensors | None, products: ExpertProducts) -> Iterator[None]:
    """Have ``inner`` run the products while this is open; nothing changes if it is None."""
    if inner is None:
        yield
        return
    with ExitStack() as stack:
        for modules, run in ((products.up, inner.up), (products.down, inner.down)):
            for module in modules:
                stack.enter_context(_forward_by(module, run))
        yield


@contextmanager
def _forward_by(module: Module, run: Callable[..., Any]) -> Iterator[None]:
    """Let ``run`` call the module's forward. The module is still called, so that its hooks run."""
    own = vars(module).get("forward")
    # As an attribute of the module it goes before the method of its class.
    vars(module)["forward"] = functools.partial(run, module.forward)
    try:
        yield
    finally:
        if own is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = own
