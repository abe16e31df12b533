"""Switches AMPipe on from Python, for runs that are not started by Megatron's command line.

    from megatron_ampipe.launch.recipes import switch_on, switch_on_models

    switch_on(recipe, degree=2)      a recipe of Megatron-Bridge, before its training
    switch_on_models(degree=2)       all models that this process builds from here on

The first is for recipes (``ConfigContainer``), model providers, and Megatron's own model configurations: it
replaces their layer specification by a function that pipelines the layers. The second is for programs that
build models in their own ways (verl, ms-swift, slime): it changes the specification that is passed to the
constructors of Megatron's models. Tables, traces and an automatic degree need a launch with flags.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, TypedDict, Unpack

from megatron_ampipe import compat
from megatron_ampipe.block.megatron_settings import Arguments
from megatron_ampipe.block.settings import Settings
from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch import connections
from megatron_ampipe.launch.refusals import refuse_unsupported
from megatron_ampipe.launch.run import Run, switch_off_overlaps
from megatron_ampipe.schedule import ALL_LAYERS, Pipeline

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_ampipe.layers.context import AMPipeContext

_MCORE_BRIDGE = "mcore_bridge."
"""Where classes of ms-swift's models are defined."""
GPT, HYBRID = "transformer_layer_spec", "hybrid_stack_spec"
"""The field of a model's configuration that holds the layer specification, or a function that creates it."""


class Options(TypedDict, total=False):
    """Options of both functions, with the meaning and the defaults of the flags ``--ampipe-*``."""

    backward_degree: int | None
    schedule: str
    stack: int
    """0 for all layers."""
    capacity_scope: str


class AllOptions(Options):
    """The options with the degree, which has no default."""

    degree: int


def switch_on(recipe: object, *, degree: int, **options: Unpack[Options]) -> None:
    """Pipeline the MoE layers of a recipe's model. Call it after all other changes, before training.

    ``recipe`` has a field ``model``, or is a model's configuration. Its layer specification is changed, and
    other overlaps of MoE communication are switched off; at degree 1 nothing is changed. Raises
    :class:`BadInput` if the options are wrong or AMPipe does not support the recipe, and
    :class:`EnvironmentMissing` if torch or Megatron is of an unsupported version.
    """
    compat.require_peers()
    # Or a provider of models, which has the same fields.
    model: TransformerConfig = getattr(recipe, "model", recipe)
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
    # Plain values, so that the recipe can still be saved.
    settings: AllOptions = {"degree": degree, **options}
    run = _run(**settings)
    if not run.pipelined:
        return
    arguments = _arguments(recipe, model, capacity_scope=run.settings.capacity_scope)
    refuse_unsupported(run.settings, run.pipeline, arguments)
    for part in (model, *_overlaps_of_bridge(recipe)):
        switch_off_overlaps(part)
    if getattr(arguments, "use_megatron_fsdp", False):
        # As in a launch: FSDP gathers parameters by layer, and makes fused products overwrite gradients.
        settings["stack"], model.gradient_accumulation_fusion = 1, False
    connections.set_default()
    layers = functools.partial(pipelined_layers, name=name, given=given, settings=settings)
    # Megatron's own configuration of a hybrid model can only hold a specification.
    is_of_megatron = type(model).__module__.startswith("megatron.training.")
    setattr(model, name, layers(model) if name == HYBRID and is_of_megatron else layers)


def _overlaps_of_bridge(recipe: object) -> list[object]:
    """Megatron-Bridge's ``CommOverlapConfig`` and the copy in it, which it writes into the model later."""
    overlaps = getattr(recipe, "comm_overlap", None)
    copied = getattr(overlaps, "user_comm_overlap_cfg", None)
    return [part for part in (overlaps, copied) if part is not None]


def switch_on_models(*, degree: int, **options: Unpack[Options]) -> None:
    """Pipeline every GPT and hybrid model that this process builds from now on. Call it once.

    Models without MoE layers do not change. For each model, rank 0 prints whether it is pipelined. Raises
    :class:`BadInput` if the options are wrong, if AMPipe is switched on already, and later if a model is
    not supported; :class:`EnvironmentMissing` if torch or Megatron is of an unsupported version.
    """
    compat.require_peers()
    import torch
    from megatron.core.distributed import DistributedDataParallel

    from megatron_ampipe.launch.hooks import on_training_stream
    from megatron_ampipe.launch.script import models_of_megatron

    run = _run(degree, **options)
    models = models_of_megatron()
    if any(hasattr(vars(model)["__init__"], "ampipe") for model in models):
        remedy = "Call switch_on_models once, and switch_on for no recipe."
        raise BadInput("degree", degree, rule="AMPipe is switched on in this process already", remedy=remedy)
    if not run.pipelined:
        return
    connections.set_default()
    for model in models:
        name = GPT if model is models[0] else HYBRID
        wrapped = _constructor(model.__init__, run, name=name)  # type: ignore[misc]
        model.__init__ = wrapped  # type: ignore[misc]
    if torch.cuda.is_available():
        construct = on_training_stream(DistributedDataParallel.__init__)
        DistributedDataParallel.__init__ = construct


def _constructor(construct: Callable[..., None], run: Run, *, name: str) -> Callable[..., None]:
    """Wrap the constructor of a model to pipeline the layers in its argument ``name``."""
    from megatron_ampipe.launch.auto import print_on_first_rank

    signature = inspect.signature(construct)

    @functools.wraps(construct)
    def constructing(model: object, *args: object, **kwargs: object) -> None:
        bound = signature.bind(model, *args, **kwargs)
        given, kind = bound.arguments, type(model)
        transformer = given["config"]
        if not transformer.num_moe_experts:
            construct(model, *args, **kwargs)
            print_on_first_rank(f"a {kind.__name__} has no MoE layers, and stays as it is")
            return
        recipe = SimpleNamespace(train=SimpleNamespace(seq_length=given["max_sequence_length"], **given))
        arguments = _arguments(recipe, transformer, capacity_scope=run.settings.capacity_scope)
        refuse_unsupported(run.settings, run.pipeline, arguments)
        switch_off_overlaps(transformer)
        if any(base.__module__.startswith(_MCORE_BRIDGE) for base in kind.__mro__):
            given[name] = _with_megatrons_classes(given[name], transformer)
        given[name] = _pipelined(name, given[name], transformer, run, vp_stage=given.get("vp_stage"))
        if name == GPT:
            _make_groups(transformer, run, given.get("pg_collection"))
        if any(base.__module__.startswith(_MCORE_BRIDGE) for base in kind.__mro__):
            _check_patches_of_mcore_bridge(transformer, _context(run))
        construct(*bound.args, **bound.kwargs)
        print_on_first_rank(f"the layers of a {kind.__name__} are pipelined, degree {run.pipeline.degree}")

    constructing.ampipe = run  # type: ignore[attr-defined]
    return constructing


def _with_megatrons_classes(spec: object, transformer: TransformerConfig) -> object:
    """The layers of a specification with Megatron's classes in place of mcore-bridge's, from 1.6 on.

    Its layer differs by a factor of the rotation that is not fused, and by ``mlp_padding_free``; its router
    by a bias for images. Other subclasses stay, and are refused.
    """
    from megatron.core.transformer.moe.moe_layer import BaseMoELayer
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_layer import TransformerLayer

    if not isinstance(spec, TransformerBlockSubmodules) or spec.layer_specs is None:
        return spec
    is_changed = False
    layers = []
    for layer in spec.layer_specs:
        if _is_mcore_bridges(layer.module, TransformerLayer):
            layer, is_changed = replace(layer, module=TransformerLayer), True
        mlp = getattr(layer.submodules, "mlp", None)
        built = compat.mlp_class(mlp)
        experts = None
        if isinstance(built, type) and issubclass(built, BaseMoELayer):
            experts = compat.moe_submodules(mlp)
        if experts is not None and _is_mcore_bridges(experts.router, TopKRouter):
            mlp = compat.with_moe_submodules(mlp, replace(experts, router=TopKRouter))
            layer, is_changed = replace(layer, submodules=replace(layer.submodules, mlp=mlp)), True
        layers.append(layer)
    if not is_changed:
        return spec
    if getattr(transformer, "moe_router_enable_vl_bias", False):
        rule = "the router of mcore-bridge, which has a bias for images, is not called"
        raise BadInput("moe_router_enable_vl_bias", True, rule=rule, remedy="Train with --ampipe-degree 1.")
    scaling = getattr(transformer, "attention_scaling", None) or 1.0
    if not transformer.apply_rope_fusion and scaling != 1.0:
        rule = "without fusion, layers of mcore-bridge scale rotations by it, and Megatron's do not"
        raise BadInput("attention_scaling", scaling, rule=rule, remedy="Use --apply_rope_fusion true.")
    return replace(spec, layer_specs=layers)


def _is_mcore_bridges(found: object, of_megatron: type) -> bool:
    """Whether a class is mcore-bridge's own of this name, and no other subclass of Megatron's."""
    if not isinstance(found, type) or not issubclass(found, of_megatron):
        return False
    return found.__module__.startswith(_MCORE_BRIDGE) and found.__name__ == of_megatron.__name__


def _check_patches_of_mcore_bridge(transformer: TransformerConfig, context: AMPipeContext) -> None:
    """Refuse changes of ms-swift's models to Megatron's layers that pipelined layers would not do."""
    from megatron_ampipe.layers.documents import DocumentReader

    if getattr(transformer, "mlp_padding_free", False):
        rule = "padding would be routed to experts: the layer's method that leaves it out is not called"
        raise BadInput("mlp_padding_free", True, rule=rule, remedy="Use --mlp_padding_free false.")
    if not transformer.apply_rope_fusion:
        rule = "layers are given the rotation of every row of packed sequences, and not a table of positions"
        remedy = "Use --apply_rope_fusion true, or --padding_free false and --packing false."
        refused = BadInput("apply_rope_fusion", False, rule=rule, remedy=remedy)
        context.documents = DocumentReader(refused=refused)


def pipelined_layers(
    model: object, vp_stage: int | None = None, *, name: str, given: object, settings: AllOptions
) -> object:
    """The layer specification of a model's configuration, pipelined with the options of :func:`switch_on`.

    ``given`` is the value of its field ``name``, :data:`GPT` or :data:`HYBRID`: a specification, a function
    that may take the configuration and the stage, or None for Megatron's own choice.
    """
    from megatron.core.transformer.spec_utils import ModuleSpec

    if given is None:
        given = _default_of_megatron(name)
    # A ModuleSpec is callable too, but that would build the layer.
    if callable(given) and not isinstance(given, ModuleSpec):
        parameters = inspect.signature(given).parameters
        stage = {"vp_stage": vp_stage} if "vp_stage" in parameters else {}
        given = given(model, **stage) if len(parameters) > len(stage) else given(**stage)
    transformer = getattr(model, "transformer", model)
    if name == GPT:
        # Megatron-Bridge's provider holds the groups that it builds its model with.
        _make_groups(transformer, _run(**settings), getattr(model, "_pg_collection", None))
    return _pipelined(name, given, transformer, _run(**settings), vp_stage=vp_stage)


def _default_of_megatron(name: str) -> object:
    """What Megatron takes if the field ``name`` of a model's configuration is None."""
    if name == GPT:
        from megatron.training.models.gpt import default_layer_spec

        return default_layer_spec
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    return hybrid_stack_spec


def _pipelined(
    name: str, spec: object, transformer: TransformerConfig, run: Run, *, vp_stage: int | None
) -> object:
    """The specification with pipelined layers; ``transformer`` is the configuration of the layers."""
    if name == HYBRID:
        from megatron_ampipe.layers.hybrid import pipelined_stack

        return pipelined_stack(spec, _context(run))
    from megatron_ampipe.layers.layer import listed, pipelined

    context = _context(run)
    return pipelined(listed(spec, transformer, context, vp_stage=vp_stage), context)


def _make_groups(transformer: TransformerConfig, run: Run, groups: ProcessGroupCollection | None) -> None:
    """Make the process groups of a GPT model; every rank builds one. A hybrid stack makes its own."""
    from megatron_ampipe.layers.process_groups import make_groups_of_model

    make_groups_of_model(transformer, _context(run), groups)


def _run(
    degree: int,
    *,
    backward_degree: int | None = None,
    schedule: str = "ampipe",
    stack: int = ALL_LAYERS,
    capacity_scope: str = "sequence",
) -> Run:
    pipeline = Pipeline.of(degree, backward_degree=backward_degree, schedule=schedule, stack=stack)
    settings = Settings(schedule=schedule, capacity_scope=capacity_scope)
    return Run(settings=settings, pipeline=pipeline)


def _context(run: Run) -> AMPipeContext:
    return _context_of(run.settings, run.pipeline)


@functools.cache
def _context_of(settings: Settings, pipeline: Pipeline) -> AMPipeContext:
    """The context of all models of the process, as in a launch: it owns the threads or streams of lanes."""
    from megatron_ampipe.layers.context import AMPipeContext
    from megatron_ampipe.runtime.recorder import Recorder

    return AMPipeContext(settings, pipeline, recorder=Recorder(num_iterations=0))


def _arguments(recipe: object, model: object, *, capacity_scope: str) -> Arguments:
    """A recipe as Megatron's arguments, for the table of refusals.

    With few exceptions, fields of a model's configuration have the names of the arguments.
    """
    parts = (getattr(recipe, name, None) for name in ("dataset", "ddp", "train"))
    overlaps = [model, *_overlaps_of_bridge(recipe)]
    layout = next((given for part in overlaps if (given := getattr(part, "tp_comm_overlap_cfg", None))), None)
    return Arguments(
        model,
        *parts,
        tp_comm_overlap=any(getattr(part, "tp_comm_overlap", False) for part in overlaps),
        # A path, or an object with many numbers.
        tp_comm_overlap_cfg=layout if isinstance(layout, str | None) else type(layout).__name__,
        num_experts=getattr(model, "num_moe_experts", None),
        group_query_attention=getattr(model, "num_query_groups", None) is not None,
        ampipe_capacity_scope=capacity_scope if capacity_scope != "sequence" else None,
    )
