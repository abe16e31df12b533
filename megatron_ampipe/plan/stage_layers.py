"""The layers of one pipeline stage, which can share a schedule: how many, and which have no experts. Pure."""

from __future__ import annotations

import ast
from dataclasses import dataclass

_LONGEST = 10_000
"""Of a pattern of layers: it comes from a file, and could name any number."""


@dataclass(frozen=True, slots=True)
class StageLayers:
    """Consecutive layers that one rank runs one after another.

    Attributes:
        num_layers: How many.
        dense: Which of them have no experts, from 0.
    """

    num_layers: int = 1
    dense: tuple[int, ...] = ()

    @property
    def with_experts(self) -> int:
        """How many have experts."""
        return self.num_layers - len(self.dense)


def pattern_of(frequency: object, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer of a model has experts, from the value of ``--moe-layer-freq``.

    Args:
        frequency: A whole number, such as 2 for every second layer; a list of 0 and 1, or one as text, such
            as ``([0]*1+[1]*26)``.
        num_layers: Layers of the model.

    Raises:
        ValueError: it is none of these, or of another number of layers.
    """
    if type(frequency) is int and frequency > 0:
        return tuple(layer % frequency == 0 for layer in range(num_layers))
    try:
        found = (
            frequency if isinstance(frequency, list) else _value(ast.parse(str(frequency), mode="eval").body)
        )
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("is neither a whole number nor a pattern of 0 and 1") from None
    if type(found) is int and found > 0:
        return pattern_of(found, num_layers)
    if not isinstance(found, list) or not all(one in (0, 1) for one in found):
        raise ValueError("is neither a whole number nor a pattern of 0 and 1")
    if len(found) != num_layers:
        raise ValueError(f"is of {len(found)} layers, and num-layers is {num_layers}")
    return tuple(one == 1 for one in found)


def _value(node: ast.expr) -> object:
    """The value of a sum and product of lists and whole numbers."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.List(elts=elements):
            return [_value(element) for element in elements]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            one, other = _value(left), _value(right)
            if isinstance(one, list) and isinstance(other, list):
                return one + other
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            one, times = _value(left), _value(right)
            if isinstance(one, list) and type(times) is int and len(one) * times <= _LONGEST:
                return one * times
    raise ValueError("is neither a whole number nor a pattern of 0 and 1")


def busiest_stage(pattern: tuple[bool, ...], *, stages: int) -> StageLayers:
    """The layers of the pipeline stage with the most experts; of equal ones the last.

    Args:
        pattern: Whether each layer of the model has experts.
        stages: Pipeline stages, virtual ones included.
    """
    size = -(-len(pattern) // stages)
    parts = [pattern[first : first + size] for first in range(0, len(pattern), size)]
    part = max(reversed(parts), key=lambda one: (sum(one), len(one)))
    return StageLayers(len(part), tuple(layer for layer, experts in enumerate(part) if not experts))
