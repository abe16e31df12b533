"""Refuses hooks on layers that run as one: their tensors are not those of the layer.

Such layers share a schedule, or are the two layers of a block of a hybrid model. The first one runs all of
them, and the others return what they are given. Called by
:mod:`.pipelined_block` in every pass, because hooks come and go during a run.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_ampipe.errors import BadInput

_KINDS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
_HARMLESS = "megatron.core.distributed."
"""Megatron's data parallelism waits for the layer's own parameters in a pre-hook, and a layer has none: its
modules have them, and are called."""


def refuse_hooks(layers: Iterable[TransformerLayer]) -> None:
    """Check that no layer has a hook of the user.

    Raises:
        BadInput: for the first hook that would see other tensors than those of its layer.
    """
    for layer in layers:
        for attribute, kind in _KINDS.items():
            for hook in getattr(layer, attribute).values():
                module = getattr(hook, "__module__", None) or type(hook).__module__
                if not module.startswith(_HARMLESS):
                    raise BadInput(
                        f"{kind} of layer {layer.layer_number}",
                        f"{module}.{getattr(hook, '__qualname__', type(hook).__qualname__)}",
                        rule="layers that share a schedule run as one, so it would see other tensors",
                        remedy="Use --ampipe-stack 1 in a GPT, or hook modules inside the layer, which see "
                        "chunks.",
                    )
