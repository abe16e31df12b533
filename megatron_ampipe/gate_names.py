"""The values of ``--ampipe-router``: gates that AMPipe ships by name, and classes of the user.

Imports neither torch nor Megatron. Read by ``config``, which checks the form of a value, and by
``layers.gates``, which finds the class.
"""

from __future__ import annotations

from megatron_ampipe.class_names import require_class_path
from megatron_ampipe.errors import BadInput

FLAG = "--ampipe-router"

SHIPPED_GATES = {
    "noisy-topk": "megatron_ampipe.layers.gates.noisy:NoisyTopKRouter",
    "cosine": "megatron_ampipe.layers.gates.cosine:CosineRouter",
    "sigmoid": "megatron_ampipe.layers.gates.sigmoid:SigmoidRouter",
    "expert-choice": "megatron_ampipe.layers.gates.expert_choice:ExpertChoiceRouter",
    "hash": "megatron_ampipe.layers.gates.hashed:HashRouter",
}
"""Classes by the name under which a user asks for them. Their papers are in docs/gates.md."""

IMPOSSIBLE_GATES = {
    "soft-moe": (
        "an expert of SoftMoE works on mixtures of all tokens of a sequence, so every token would depend on "
        "later ones, and no chunk could be sent before the last is known",
        "Use one of " + ", ".join(SHIPPED_GATES) + ".",
    ),
    "sinkhorn": (
        "it is a load-balancing type of Megatron",
        "Use --moe-router-load-balancing-type sinkhorn.",
    ),
}
"""Names of gates that there are and that cannot be had: why, and what to use."""

ROUTER_SCOPES = ("sequence", "chunk")
"""Over which tokens a gate may compare tokens with each other."""


def class_path(name: str) -> str:
    """``package.module:Class`` for a value of ``--ampipe-router``.

    Raises:
        BadInput: the value is neither a shipped gate nor of this form.
    """
    if name in IMPOSSIBLE_GATES:
        rule, remedy = IMPOSSIBLE_GATES[name]
        raise BadInput(FLAG, name, rule=rule, remedy=remedy)
    if name in SHIPPED_GATES:
        return SHIPPED_GATES[name]
    examples = "cosine", "my_package.my_module:MyRouter"
    require_class_path(FLAG, name, list(SHIPPED_GATES), examples=examples)
    return name
