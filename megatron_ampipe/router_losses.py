"""Whether a router adds losses to a training step: the one answer for layers, launch and plan.

Losses are a stage of the block's schedule, so whoever makes or checks a schedule has to count them as
Megatron's router does. Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence

AUX_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")
"""Load-balancing types that come with a loss."""


def router_has_losses(
    kinds: str | Sequence[str],
    *,
    coefficients: float | Sequence[float] | None,
    z_loss_coefficient: float | None,
) -> bool:
    """As Megatron's router decides it.

    An auxiliary loss counts with a coefficient above 0. The z-loss counts with any coefficient, 0 included:
    the router computes and logs it then.

    Args:
        kinds: ``--moe-router-load-balancing-type``, one or several.
        coefficients: ``--moe-aux-loss-coeff``: one, or one for each kind.
        z_loss_coefficient: ``--moe-z-loss-coeff``; None where it is not given.
    """
    if z_loss_coefficient is not None:
        return True
    names = [kinds] if isinstance(kinds, str) else list(kinds)
    numbers = [coefficients] if isinstance(coefficients, int | float) else list(coefficients or [])
    if len(numbers) == 1:
        numbers *= len(names)
    return any(name in AUX_LOSSES and number > 0 for name, number in zip(names, numbers, strict=False))
