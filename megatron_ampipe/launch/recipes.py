"""Switches AMPipe on from Python, for runs that are started without a command line of Megatron's.

    from megatron_ampipe.launch.recipes import switch_on

    recipe = qwen3_30b_a3b_pretrain_config()
    switch_on(recipe, degree=4)

For recipes of Megatron-Bridge (``ConfigContainer``), its model providers, and Megatron's own
``GPTModelConfig`` and ``HybridModelConfig``: all of them build their layers from a layer specification, or
from a function that makes one. It is replaced by a function that pipelines what the first one makes. There is
no start-up table, trace or line in the log, and no automatic degree: these belong to launches with flags.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch import connections
from megatron_ampipe.launch.flags import switch_off_overlaps
from megatron_ampipe.launch.refusals import refuse_unsupported
from megatron_ampipe.schedule import ALL_LAYERS, Pipeline
from megatron_ampipe.schedule.config import AMPipeConfig

if TYPE_CHECKING:
    from megatron_ampipe.layers.context import AMPipeContext

_GPT, _HYBRID = "transformer_layer_spec", "hybrid_stack_spec"


def switch_on(
    recipe: Any,
    *,
    degree: int,
    backward_degree: int | None = None,
    schedule: str = "ampipe",
    stack: int = ALL_LAYERS,
    capacity_scope: str = "sequence",
) -> None:
    """Have the MoE layers of a recipe's model built as pipelined ones. Call it last, before the training.

    Args:
        recipe: A recipe with a field ``model``, or a model's configuration. Its layer specification is
            changed, and other overlaps of MoE communication are switched off, as by the flags.
        degree: As ``--ampipe-degree``; at 1, nothing is changed.
        backward_degree: As ``--ampipe-backward-degree``.
        schedule: As ``--ampipe-schedule``.
        stack: As ``--ampipe-stack``; 0 for all layers.
        capacity_scope: As ``--ampipe-capacity-scope``.

    Raises:
        BadInput: The settings are wrong, or AMPipe does not support the recipe.
    """
    model = getattr(recipe, "model", recipe)
    name = next((name for name in (_GPT, _HYBRID) if hasattr(model, name)), None)
    if name is None:
        raise BadInput(
            "recipe",
            type(model).__name__,
            rule=f"it has neither {_GPT} nor {_HYBRID}, one of which would be pipelined",
            remedy="Give a recipe of a GPT or hybrid model, or its field model.",
        )
    settings = {
        "degree": degree,
        "backward_degree": backward_degree,
        "schedule": schedule,
        "stack": stack,
        "capacity_scope": capacity_scope,
    }
    config = _config(**settings)
    if not config.pipelined:
        return
    given = getattr(model, name)
    if getattr(given, "func", None) in (gpt_layers, hybrid_stack):
        raise BadInput(
            "recipe",
            type(model).__name__,
            rule="AMPipe is switched on in it already",
            remedy="Call switch_on once.",
        )
    refuse_unsupported(config, Arguments(recipe, model, capacity_scope=capacity_scope))
    switch_off_overlaps(model)
    connections.set_default()
    pipelined = functools.partial(
        gpt_layers if name == _GPT else hybrid_stack, stock=given, settings=settings
    )
    # Megatron's own configuration of a hybrid model holds a specification only.
    from_function = name == _GPT or not _is_of_megatron(model)
    setattr(model, name, pipelined if from_function else pipelined(model))


def _is_of_megatron(model: Any) -> bool:
    return type(model).__module__.startswith("megatron.training.")


def gpt_layers(model: Any, vp_stage: int | None = None, *, stock: Any, settings: Mapping[str, Any]) -> Any:
    """The layer specification of a GPT, pipelined; called where the model is built.

    Args:
        model: The model's configuration.
        vp_stage: Virtual pipeline stage.
        stock: The specification or function that was there before; None for Megatron's own choice.
        settings: Of :func:`switch_on`.
    """
    from megatron_ampipe.layers.layer import pipelined

    if stock is None:
        from megatron.training.models.gpt import default_layer_spec

        stock = default_layer_spec
    return pipelined(_specification(stock, model, vp_stage=vp_stage), _context(_config(**settings)))


def hybrid_stack(model: Any, *, stock: Any, settings: Mapping[str, Any]) -> Any:
    """The stack of a hybrid model, pipelined; arguments as for :func:`gpt_layers`."""
    from megatron_ampipe.layers.hybrid import pipelined_stack

    if stock is None:
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

        stock = hybrid_stack_spec
    return pipelined_stack(_specification(stock, model, vp_stage=None), _context(_config(**settings)))


def _specification(stock: Any, model: Any, *, vp_stage: int | None) -> Any:
    """What ``stock`` is, or makes: a function takes the configuration and the stage if it can."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    # A specification can be called too: that builds the layer.
    if isinstance(stock, ModuleSpec) or not callable(stock):
        return stock
    parameters = inspect.signature(stock).parameters
    given = {"vp_stage": vp_stage} if "vp_stage" in parameters else {}
    return stock(model, **given) if len(parameters) > len(given) else stock(**given)


def _config(
    *, degree: int, backward_degree: int | None, schedule: str, stack: int, capacity_scope: str
) -> AMPipeConfig:
    pipeline = Pipeline.of(degree, backward_degree=backward_degree, schedule=schedule, stack=stack)
    return AMPipeConfig(pipeline=pipeline, schedule=schedule, capacity_scope=capacity_scope)


@functools.cache
def _context(config: AMPipeConfig) -> AMPipeContext:
    """One for all models of the process, as in a launch: it has the threads or streams of the lanes."""
    from megatron_ampipe.layers.context import AMPipeContext
    from megatron_ampipe.runtime.recorder import Recorder

    return AMPipeContext(config, recorder=Recorder(num_iterations=0))


class Arguments:
    """A recipe seen as Megatron's arguments, for the table of refusals.

    Args:
        recipe: Whose parts ``dataset``, ``ddp`` and ``train`` are looked into after the model.
        model: The model's configuration, whose fields are named as Megatron's arguments with few exceptions.
        capacity_scope: Of :func:`switch_on`.
    """

    def __init__(self, recipe: Any, model: Any, *, capacity_scope: str) -> None:
        parts = (getattr(recipe, name, None) for name in ("dataset", "ddp", "train"))
        self._parts = (model, *(part for part in parts if part is not None))
        self.num_experts = getattr(model, "num_moe_experts", None)
        self.group_query_attention = getattr(model, "num_query_groups", None) is not None
        self.ampipe_capacity_scope = capacity_scope if capacity_scope != "sequence" else None

    def __getattr__(self, name: str) -> Any:
        for part in self._parts:
            if hasattr(part, name):
                return getattr(part, name)
        raise AttributeError(name)
