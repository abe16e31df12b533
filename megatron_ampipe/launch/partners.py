"""``--ampipe-partner``: Megatron's loops run the forward pass of a micro-batch together with a backward pass.

They are the loops of ``--overlap-moe-expert-parallel-comm``, without pipeline parallelism or with an
interleaved pipeline (``megatron.core.pipeline_parallel.combined_1f1b``). They request a schedule plan from
the model, and run the plans of two micro-batches as one. AMPipe's plan calls the model as without that flag;
its blocks meet the blocks of the backward pass in ``runtime.partners``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table
from megatron.core.pipeline_parallel.utils import AbstractSchedulePlan
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor
from torch.autograd import Variable

from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch.environment import Environment
from megatron_ampipe.launch.hooks import Hook
from megatron_ampipe.launch.megatron_types import Model
from megatron_ampipe.launch.run import RELAXES_MAX_CONNECTIONS_CHECK
from megatron_ampipe.layers.context import AMPipeContext
from megatron_ampipe.schedule.pipeline import Pipeline

MAX_CHAIN = 16
"""Micro-batches in a chain of CUDA graphs. A step of more is several chains, one after another: the last
backward pass of one and the first forward pass of the next have no partner."""


class PartneredSteps(Hook):
    """Makes Megatron run training steps with partners, while the pipeline of the context has a partner.

    ``flag`` is the flag with which the user asks for them.
    """

    def __init__(self, context: AMPipeContext, environment: Environment, *, flag: str) -> None:
        self._context = context
        self._environment = environment
        self._flag = flag
        self._models: Sequence[Model] = []
        self._pipelines: list[Pipeline] = []
        self._chains: dict[int, Hashable] = {}
        """Which plans begin a chain of CUDA graphs, and of how many micro-batches it is."""
        self._num_plans = 0

    def models_built(self, models: Sequence[Model]) -> None:
        self._models = models

    def before_step(self) -> None:
        """Switch on Megatron's overlap, without which its models are built."""
        partner = self._context.pipeline.partner
        if partner is None:
            return
        assert self._context.partners is not None
        self._context.partners.partner = partner
        self._switch(on=True)
        self._context.partners.graphs.give_up_step()
        num_models, num_microbatches = len(self._models), get_num_microbatches()
        config = get_model_config(self._models[0])
        group = config.microbatch_group_size_per_vp_stage if num_models > 1 else num_microbatches
        parts = [num_microbatches]
        if self._context.captures_passes and num_models == 1:
            parts = chains_of(num_microbatches)
        self._pipelines = []
        self._chains = {}
        for part in parts:
            if self._context.captures_passes:
                self._chains[len(self._pipelines)] = part
            self._pipelines += [
                self._context.pipeline.with_partners(forward=forward, backward=backward)
                for forward, backward in partners_of(part, num_models, min(group, part))
            ]
        self._num_plans = 0
        for model in self._models:
            unwrap_model(model).build_schedule_plan = functools.partial(self._plan, model)

    def after_step(self) -> None:
        if self._context.partners is not None:
            self._context.partners.graphs.end_step()
        self._switch(on=False)

    def _switch(self, *, on: bool) -> None:
        for settings in (self._environment.loop, *map(get_model_config, self._models)):
            setattr(settings, RELAXES_MAX_CONNECTIONS_CHECK, on)

    def _plan(self, model: Model, *args: object, **kwargs: object) -> MicroBatch:
        if self._environment.documents == "packed" and kwargs.get("packed_seq_params") is None:
            rule = "forward_step of this script gives no packed_seq_params, so documents would mix"
            remedy = "Start the run with -m megatron_ampipe.pretrain_gpt, or leave it out."
            raise BadInput(self._flag, "on", rule=rule, remedy=remedy)
        # Modulo, because Megatron may repeat a step to compare its results.
        place = self._num_plans % len(self._pipelines)
        self._num_plans += 1
        call = functools.partial(model, *args, **kwargs)
        return MicroBatch(
            self._context, model, self._pipelines[place], call, begins_chain=self._chains.get(place)
        )


def chains_of(num_microbatches: int) -> list[int]:
    """The numbers of micro-batches of the chains of a step: at most :data:`MAX_CHAIN`.

    They are equal if that needs less than twice as many chains, as equal chains have the same graphs.
    """
    fewest = -(-num_microbatches // MAX_CHAIN)
    equal = (count for count in range(fewest, 2 * fewest) if num_microbatches % count == 0)
    count = next(equal, fewest)
    size, num_larger = divmod(num_microbatches, count)
    return [size + 1] * num_larger + [size] * (count - num_larger)


def partners_of(num_microbatches: int, num_models: int, group_size: int) -> list[tuple[bool, bool]]:
    """For each forward pass of a step on this rank, whether it and its backward pass have a partner.

    Args:
        num_microbatches: Number of micro-batches of the step.
        num_models: Number of virtual pipeline stages of this rank.
        group_size: Number of consecutive micro-batches of a virtual stage.
    """
    table = get_schedule_table(num_microbatches, num_models, group_size)
    # One forward pass comes before the first backward pass, which then has a partner.
    num_alone = 1
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        _, _, num_alone, _ = get_pp_rank_microbatches(
            num_microbatches, num_models, group_size, overlap_moe_expert_parallel_comm=True
        )
    backward = {
        (microbatch, num_models - 1 - model): place for place, (microbatch, model) in enumerate(table)
    }
    return [
        (place >= num_alone, backward[microbatch] < len(table) - num_alone)
        for place, microbatch in enumerate(table)
    ]


class MicroBatch(AbstractSchedulePlan):
    """The schedule plan of a micro-batch: Megatron's loops run it together with the backward of another.

    Args:
        context: The state of all layers.
        model: The model, in Megatron's wrappers.
        pipeline: How blocks run in this micro-batch.
        call: Calls the model.
        begins_chain: What chain of CUDA graphs begins with it, if any; then it runs after the other passes.
    """

    def __init__(
        self,
        context: AMPipeContext,
        model: Model,
        pipeline: Pipeline,
        call: Callable[[], Tensor],
        *,
        begins_chain: Hashable = None,
    ) -> None:
        self._context, self._pipeline, self._call = context, pipeline, call
        self.begins_chain = begins_chain
        inner = unwrap_model(model)
        self._input: Tensor | None = inner.decoder.input_tensor
        self._output: Tensor | None = None
        self.vp_stage: int | None = inner.vp_stage
        self.event = torch.cuda.Event()

    @staticmethod
    def run(
        f_schedule_plan: MicroBatch | None,
        b_schedule_plan: MicroBatch | None,
        b_grad: Tensor | None = None,
        pre_forward: Callable[[int | None], object] | None = None,
        pre_backward: Callable[[int | None], object] | None = None,
        post_forward: Callable[[Tensor, int | None], object] | None = None,
        post_backward: Callable[[Tensor | None, int | None], object] | None = None,
    ) -> Tensor | None:
        """Run the forward pass of one plan, the backward pass of another, or both together.

        Megatron's loops call it, so the seven parameters are those of its
        ``TransformerModelChunkSchedulePlan.run``. The functions receive and send tensors of other pipeline
        stages before and after a pass. Returns the output of the forward pass.
        """
        new, old = f_schedule_plan, b_schedule_plan
        if new is not None and pre_forward is not None:
            pre_forward(new.vp_stage)
        if old is not None and pre_backward is not None:
            pre_backward(old.vp_stage)
        output = _run_passes(new, old, b_grad)
        if new is not None and post_forward is not None:
            assert output is not None
            post_forward(output, new.vp_stage)
        if old is not None and post_backward is not None:
            post_backward(old.input_gradient, old.vp_stage)
        if new is not None:
            # Megatron waits for this event before it computes the loss.
            new.event.record()
        return output

    def run_with(self, old: MicroBatch, gradient: Tensor) -> Tensor:
        """Run the forward pass together with the backward pass of ``old``."""
        partners = self._context.partners
        assert partners is not None
        return partners.run(self.forward, functools.partial(old.backward, gradient))

    @property
    def input_gradient(self) -> Tensor | None:
        """The gradient of the input after the backward pass; None in the first pipeline stage."""
        return None if self._input is None else self._input.grad

    def forward(self) -> Tensor:
        """Run the forward pass, with the pipeline of a micro-batch that has these partners."""
        context, usual = self._context, self._context.pipeline
        if self.begins_chain is not None:
            assert context.partners is not None
            context.partners.graphs.begin_step(self.begins_chain)
        context.pipeline = self._pipeline
        try:
            self._output = self._call()
        finally:
            context.pipeline = usual
        return self._output

    def backward(self, gradient: Tensor) -> None:
        """Run the backward pass, from the gradient of the output."""
        # As in Megatron: torch.autograd.backward would check the shape of an output that was sent and freed.
        Variable._execution_engine.run_backward(
            tensors=(self._output,),
            grad_tensors=(gradient,),
            keep_graph=False,
            create_graph=False,
            inputs=(),
            allow_unreachable=True,
            accumulate_grad=True,
        )
        self._output = None


def _run_passes(new: MicroBatch | None, old: MicroBatch | None, gradient: Tensor | None) -> Tensor | None:
    """The forward pass of ``new``, the backward pass of ``old``; returns the output of the forward pass."""
    if old is None:
        assert new is not None
        return new.forward()
    assert gradient is not None
    if new is not None and new.begins_chain is None:
        return new.run_with(old, gradient)
    old.backward(gradient)
    return None if new is None else new.forward()
