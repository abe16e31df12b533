"""The router class of a run (``--ampipe-router``): found, checked against the flags, shown.

Called by :mod:`.session`. What depends on the class itself is refused here; the table in
``refusals.py`` knows flags alone.
"""

from __future__ import annotations

import argparse
import functools
import weakref
from collections.abc import Callable
from typing import Any

from megatron.core.utils import unwrap_model

from megatron_ampipe.block.named_values import ROUTER_FLAG as FLAG
from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch.refusals import load_balancing, refuse_with_token_ids
from megatron_ampipe.layers.gates import load_gate, needs_all_tokens
from megatron_ampipe.layers.gates.id_router import TokenIdRouter, give_token_ids
from megatron_ampipe.schedule.config import AMPipeConfig

ForwardStep = Callable[..., Any]


def find_gate(config: AMPipeConfig, args: argparse.Namespace, *, of_script: bool = False) -> type | None:
    """The class that a run's MoE layers use as their router; None for Megatron's own.

    Args:
        config: What AMPipe's flags resolve to.
        args: Megatron's validated arguments.
        of_script: A script that is not ours reads the data.

    Raises:
        BadInput: there is no such class, or it does not fit the other flags.
    """
    name = config.router
    if name is None:
        return None
    if not args.num_experts:
        raise BadInput(
            FLAG, name, rule="the model has no MoE layer", remedy="Set --num-experts, or leave it out."
        )
    gate = load_gate(name)
    for setting in getattr(gate, "ignored_settings", ()):
        value = getattr(args, setting, None)
        if any(value) if isinstance(value, list) else value not in (None, False):
            raise BadInput(
                f"--{setting.replace('_', '-')}",
                value,
                rule=f"has no effect with {FLAG} {name}, which chooses experts in its own way",
                remedy="Leave one of the two out.",
            )
    reason = needs_all_tokens(gate)
    if reason is not None and config.router_scope == "sequence":
        raise BadInput(
            FLAG,
            name,
            rule=f"{reason}, which causal training does not allow",
            remedy="Add --ampipe-router-scope chunk and --ampipe-degree 4: it then compares the tokens of a "
            "chunk, and later tokens influence earlier ones within a chunk only.",
        )
    if reason is None and config.router_scope == "chunk" and load_balancing(args, "sinkhorn") is None:
        raise BadInput(
            "--ampipe-router-scope",
            "chunk",
            rule=f"has no effect with {FLAG} {name}, whose choice for a token depends on that token alone",
            remedy="Leave it out; a class says otherwise by an attribute needs_all_tokens.",
        )
    if reads_token_ids(gate):
        refuse_with_token_ids(name, args)
        if of_script and args.pipeline_model_parallel_size > 1:
            raise BadInput(
                "--pipeline-model-parallel-size",
                args.pipeline_model_parallel_size,
                rule=f"with {FLAG} {name}, every pipeline stage needs the ids of the tokens, and this script "
                "reads them for the first one alone",
                remedy="Start the run with -m megatron_ampipe.pretrain_gpt, or use a router that reads "
                "hidden states, such as --ampipe-router cosine.",
            )
    return gate


def reads_token_ids(gate: type | None) -> bool:
    """Whether a router class chooses by the ids of tokens."""
    return gate is not None and issubclass(gate, TokenIdRouter)


def given_token_ids(forward_step: ForwardStep) -> ForwardStep:
    """Megatron's forward step, which lets every model that it is given tell its routers the ids of tokens."""
    known: weakref.WeakSet[Any] = weakref.WeakSet()

    @functools.wraps(forward_step)
    def step(data_iterator: Any, model: Any, *rest: Any, **kwargs: Any) -> Any:
        inner = unwrap_model(model)
        if inner not in known:
            give_token_ids(inner).watch(inner)
            known.add(inner)
        return forward_step(data_iterator, model, *rest, **kwargs)

    return step
