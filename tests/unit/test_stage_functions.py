"""Every kind that layers run has a function."""

from __future__ import annotations

from megatron_ampipe.layers import attention_stages, moe_stages
from megatron_ampipe.layers.block_modules import FUNCTIONS
from megatron_ampipe.schedule import ALL_KINDS


def test_every_kind_that_layers_run_has_a_function() -> None:
    """All but those that the runtime runs itself: copies, gradients of weights and reductions."""
    of_layers = [
        kind for kind in ALL_KINDS if not (kind.copies or kind.of_parameters or kind.weights_of is not None)
    ]
    modules = (attention_stages.__name__, moe_stages.__name__)
    assert [kind for kind in of_layers if kind not in FUNCTIONS] == []
    assert [kind for kind in of_layers if kind.own_backward and FUNCTIONS[kind].backward is None] == []
    shipped = {kind for kind, function in FUNCTIONS.items() if function.run.__module__ in modules}
    assert shipped == set(of_layers), "a function of a kind that no schedule names"
