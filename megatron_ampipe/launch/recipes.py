"""Switches AMPipe on from Python, for runs that are started without a command line of Megatron's.

    from megatron_ampipe.launch.recipes import switch_on

    recipe = qwen3_30b_a3b_pretrain_config()
    switch_on(recipe, degree=4)

For recipes of Megatron-Bridge (``ConfigContainer``), its model providers, and Megatron's own configurations
of models: all build their layers from a layer specification, or from a function that makes one, which is
replaced by a function that pipelines it. Tables, traces and an automatic degree need a launch with flags.
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
from megatron_ampipe.schedule.pipeline import AMPipeConfig

if TYPE_CHECKING:
    from megatron_ampipe.layers.context import AMPipeContext

GPT, HYBRID = "transformer_layer_spec", "hybrid_stack_spec"
"""The field of a model's configuration that holds the specification of its layers, or makes it."""


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

    The layer specification of ``recipe``, which has a field ``model`` or is a model's configuration, is
    changed, and other overlaps of MoE communication are switched off. The other arguments are as the flags
    ``--ampipe-*``: at degree 1 nothing is changed, and ``stack`` is 0 for all layers. Raises
    :class:`BadInput` if they are wrong, or AMPipe does not support the recipe.
    """
    model = getattr(recipe, "model", recipe)
    name = GPT if hasattr(model, GPT) else HYBRID
    given = getattr(model, name, None)
    rule = None
    if not hasattr(model, name):
        rule = f"it has neither {GPT} nor {HYBRID}, one of which would be pipelined"
    elif getattr(given, "func", None) is pipelined_layers:
        rule = "AMPipe is switched on in it already"
    if rule is not None:
        remedy = "Give a recipe of a GPT or hybrid model, or its field model, once."
        raise BadInput("recipe", type(model).__name__, rule=rule, remedy=remedy)
    # Plain values, which a recipe can be saved with.
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
    refuse_unsupported(config, Arguments(recipe, model, capacity_scope=capacity_scope))
    switch_off_overlaps(model)
    connections.set_default()
    layers = functools.partial(pipelined_layers, name=name, given=given, settings=settings)
    # Megatron's own configuration of a hybrid model holds a specification only.
    is_of_megatron = type(model).__module__.startswith("megatron.training.")
    setattr(model, name, layers(model) if name == HYBRID and is_of_megatron else layers)


def pipelined_layers(
    model: Any, vp_stage: int | None = None, *, name: str, given: Any, settings: Mapping[str, Any]
) -> Any:
    """What ``given`` makes of a configuration's field ``name``, pipelined as :func:`switch_on` says."""
    spec, context = specification(name, given, model, vp_stage=vp_stage), _context(_config(**settings))
    if name == GPT:
        from megatron_ampipe.layers.layer import pipelined

        return pipelined(spec, context)
    from megatron_ampipe.layers.hybrid import pipelined_stack

    return pipelined_stack(spec, context)


def specification(name: str, given: Any, model: Any, *, vp_stage: int | None = None) -> Any:
    """The specification that a model's configuration stands for.

    ``given`` is the value of its field ``name``, :data:`GPT` or :data:`HYBRID`: a specification, a function
    of the configuration and of the stage, if it takes them, or None for Megatron's own choice.
    """
    from megatron.core.transformer.spec_utils import ModuleSpec

    if given is None and name == GPT:
        from megatron.training.models.gpt import default_layer_spec as given
    elif given is None:
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec as given
    # A specification can be called too: that builds the layer.
    if isinstance(given, ModuleSpec) or not callable(given):
        return given
    parameters = inspect.signature(given).parameters
    stage = {"vp_stage": vp_stage} if "vp_stage" in parameters else {}
    return given(model, **stage) if len(parameters) > len(stage) else given(**stage)


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

    The fields of a model's configuration are named like them with few exceptions.
    """

    def __init__(self, recipe: Any, model: Any, *, capacity_scope: str) -> None:
        self._parts = (model, *(getattr(recipe, name, None) for name in ("dataset", "ddp", "train")))
        self.num_experts = getattr(model, "num_moe_experts", None)
        self.group_query_attention = getattr(model, "num_query_groups", None) is not None
        self.ampipe_capacity_scope = capacity_scope if capacity_scope != "sequence" else None

    def __getattr__(self, name: str) -> Any:
        for part in self._parts:
            if hasattr(part, name):
                return getattr(part, name)
        raise AttributeError(name)
