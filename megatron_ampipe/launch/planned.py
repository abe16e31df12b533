"""Makes a pipeline from arguments and a cluster file, or from a plan file; keeps what a run has chosen.

Layers and runtime do not know ``plan``: they receive a ``schedule.Pipeline``. What ``--ampipe-degree auto``
chose for the shape of the flags becomes the plan file of ``--ampipe-save-plan``. What trials chose for every
shape is in :data:`NAME` next to the checkpoints, so that a restart tries no size of input twice.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_ampipe.block.hybrid_pattern import HybridPattern
from megatron_ampipe.block.settings import settings_of
from megatron_ampipe.errors import BadInput, RunFailed
from megatron_ampipe.files.inputs import load
from megatron_ampipe.files.records import read_record, write_record
from megatron_ampipe.launch.auto import Planner, print_on_first_rank
from megatron_ampipe.launch.refusals import exchanges_of, ranks_per_node, recomputes
from megatron_ampipe.launch.size_ranges import ChosenSize, Shape
from megatron_ampipe.launch.trials import Choice
from megatron_ampipe.plan.block import Block
from megatron_ampipe.plan.cluster import Cluster, find_cluster, read_cluster
from megatron_ampipe.plan.model_file import SIZE_FLAGS, ModelFile, StageLayers, block_of, layers_of
from megatron_ampipe.plan.plan_file import MadeFor, Plan, differences, made_for
from megatron_ampipe.plan.planner import make_plan
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.schedule import KEEP, BlockFeatures, Exchange, Pipeline, SequenceLayout, period
from megatron_ampipe.schedule.features import boundary, features_of_settings
from megatron_ampipe.schedule.pipeline import AMPipeConfig


def planner_of(
    args: argparse.Namespace,
    cluster_file: str,
    *,
    stack: int,
    memory: str = KEEP,
    exchanges: Sequence[Exchange] = (Exchange.ROWS,),
) -> Planner:
    """A planner for input shapes. Deterministic: ranks that read the same file make the same plan.

    Args:
        args: Megatron's validated arguments.
        cluster_file: The value of ``--ampipe-cluster``.
        stack: How many layers may share a schedule, see ``Pipeline.stack``.
        memory: What the experts keep, see ``Pipeline.memory``.
        exchanges: Those that are compared.

    Raises:
        BadInput: the file is wrong, or does not contain a figure that this model needs.
    """
    cluster = cluster_of_flag(cluster_file)
    block, layers = block_of_args(args, cluster), layers_of(_model_of_args(args))

    def plan(shape: Shape) -> Choice:
        rows, batch = shape
        length = rows * block.tensor * block.context
        of_shape = dataclasses.replace(block, sequence_length=length, batch=batch)
        predictor = Predictor(
            of_shape, cluster, num_layers=layers.num_layers, dense=layers.dense, memory=memory
        )
        planned = make_plan(predictor, stack=stack, exchanges=exchanges)
        reason = f"planned from {cluster_file}: {planned.reason}"
        return Choice(planned.pipeline(rows=rows), reason, planned.stages_ms)

    return plan


def cluster_of_flag(cluster_file: str) -> Cluster:
    """The cluster file that ``--ampipe-cluster`` names.

    Raises:
        BadInput: there is none, or it is wrong.
    """
    try:
        path = find_cluster(cluster_file)
    except BadInput as error:
        raise BadInput("--ampipe-cluster", cluster_file, rule=error.rule, remedy=error.remedy) from None
    return read_cluster(path)


def choice_of_plan(args: argparse.Namespace, plan: Plan, plan_file: str) -> Choice:
    """The pipeline of a plan, with notes on differences between this run and what the plan was made for.

    Args:
        args: Megatron's validated arguments.
        plan: The plan.
        plan_file: Its file, as the user gave it.

    Raises:
        BadInput: the plan was made for other blocks, or its order or chunks do not fit this model's blocks.
    """
    flag = "--ampipe-plan" if args.ampipe_plan is not None else "--ampipe-save-plan"

    def refused(rule: str, remedy: str = _REMEDY) -> BadInput:
        if args.ampipe_save_plan is not None:
            remedy = "Remove the file, or give another name, to choose again."
        return BadInput(flag, plan_file, rule=rule, remedy=remedy)

    notes: tuple[str, ...] = (f"{plan_file} has no section made_for, so it was not compared with this run",)
    if plan.made_for is not None:
        other = differences(plan.made_for, made_for_of_args(args))
        if essential := [difference for difference, stops in other.items() if stops]:
            raise refused(
                f"is not for the blocks of this model: it was made for {', '.join(essential)}",
                f"{_REMEDY} To use this one unchanged, remove its section made_for.",
            )
        notes = (f"the plan was made on: {plan.made_for.get('cluster')}",)
        if other:
            notes += (f"the plan was made for {', '.join(other)}; its predictions may be wrong",)
    if plan.memory != KEEP and (module := recomputes(args, "moe")) is not None:
        raise refused(
            f"has memory {plan.memory}, and --recompute-modules {module} computes the experts again",
            "Leave moe out of --recompute-modules.",
        )
    if plan.exchange not in exchanges_of(args):
        raise refused(
            f"is not for the blocks of this model: its exchange {plan.exchange} has nothing to save there"
        )
    layout = layout_of_args(args)
    pipeline = plan.pipeline(rows=args.seq_length // (layout.tensor_ranks * layout.context_ranks))
    try:
        # If layers share the order, two show whether it can be repeated.
        features = [_features_of(args, pipeline)] * (2 if _shares_schedule(args, pipeline) else 1)
        pipeline.schedule_of(features)
        pipeline.chunks(args.seq_length, layout)
    except BadInput as error:
        if error.name == "--seq-length":
            raise
        raise refused(f"is not for the blocks of this model: {error.value} {error.rule}") from error
    return Choice(pipeline, f"read from {plan_file}: {plan.reason}", plan.stages_ms, notes)


_REMEDY = "Make one with ampipe plan from a model file with this run's flags."


def _shares_schedule(args: argparse.Namespace, pipeline: Pipeline) -> bool:
    """Whether consecutive layers share a schedule."""
    return pipeline.stack != 1 and boundary(args, whole_attention=pipeline.whole_attention) is None


def _features_of(args: argparse.Namespace, pipeline: Pipeline) -> BlockFeatures:
    """The features of the blocks in training with a pipeline."""
    return pipeline.trained(features_of_args(args, shares_schedule=_shares_schedule(args, pipeline)))


def plan_of_choice(args: argparse.Namespace, choice: Choice) -> Plan:
    """What ``--ampipe-degree auto`` chose for the shape of input that the flags give, as a plan."""
    pipeline = choice.pipeline
    schedule = pipeline.order or pipeline.schedule_of([_features_of(args, pipeline)])
    forward_ms, backward_ms = choice.predicted_ms or (None, None)
    return Plan(
        schedule=period(schedule) if _shares_schedule(args, pipeline) else schedule,
        shares=pipeline.shares or (1 / pipeline.num_chunks,) * pipeline.num_chunks,
        stack=pipeline.stack,
        memory=pipeline.memory,
        exchange=pipeline.exchange,
        stages_forward_ms=forward_ms,
        stages_backward_ms=backward_ms,
        reason=choice.reason,
        made_for=made_for_of_args(args),
    )


NAME = "ampipe-degrees.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class _DegreesFile:
    """The format of the file in which a run remembers its trials.

    Attributes:
        flags: What the flags of AMPipe leave to the trials, as text, to compare.
        made_for: The block and its layout.
        sizes: What was chosen.
    """

    format: Literal["ampipe-degrees-1"]
    flags: str
    made_for: MadeFor = field(metadata={"last": True})
    sizes: tuple[ChosenSize, ...] = field(metadata={"last": True})


class KeptChoices:
    """Writes choices on the first rank, and reads what an earlier run of the same model and flags wrote.

    Args:
        args: Megatron's validated arguments.
        config: AMPipe's settings.
        announced: The shape of input that the flags give, whose choice becomes the plan file.
        exchanges: Those that the trials compare; nothing is remembered where a planner chooses.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        config: AMPipeConfig,
        *,
        announced: Shape,
        exchanges: Sequence[Exchange],
    ) -> None:
        self._args, self._config, self._announced = args, config, announced
        self._flags = f"{config.pipeline}; exchange {' or '.join(exchanges)}"
        remembers = config.cluster is None
        self._save = _file_in(args.save) if remembers else None
        self._load = _file_in(args.load or args.save) if remembers else None
        self._sizes: dict[Shape, ChosenSize] = {}

    def read(self) -> tuple[ChosenSize, ...]:
        """What an earlier run chose; nothing if there is no such file, or it is for another run."""
        if self._load is None or not self._load.is_file():
            return ()
        try:
            top = load(self._load, what="degrees", remedy="Remove it: degrees are tried again.")
            earlier, _ = read_record(self._load, _DegreesFile, top)
            for size in earlier.sizes:
                size.pipeline(self._config.pipeline)
        except BadInput as error:
            print_on_first_rank(f"degrees are tried again: {error}")
            return ()
        other = list(differences(earlier.made_for, made_for_of_args(self._args)))
        if earlier.flags != self._flags:
            other.append(f"{earlier.flags} (this run: {self._flags})")
        if other:
            print_on_first_rank(f"degrees are tried again: {self._load} is for {', '.join(other)}")
            return ()
        self._sizes = {size.shape: size for size in earlier.sizes}
        return earlier.sizes

    def keep(self, shape: Shape, choice: Choice) -> None:
        """Write a new choice. If that fails, training continues: the choice is made, and was logged."""
        if int(os.environ.get("RANK", "0")) != 0:
            return
        head = "chosen by --ampipe-degree auto"
        try:
            if self._config.save_plan is not None and shape == self._announced:
                plan = plan_of_choice(self._args, choice)
                plan.write(Path(self._config.save_plan), head=f"{head}; for --ampipe-plan FILE")
            if self._save is not None:
                self._sizes[shape] = ChosenSize.of(shape, choice.pipeline)
                sizes = tuple(self._sizes.values())
                made_for = made_for_of_args(self._args)
                record = _DegreesFile(
                    format="ampipe-degrees-1", flags=self._flags, made_for=made_for, sizes=sizes
                )
                write_record(self._save, record, head=f"{head}, for restarts of this run")
        except RunFailed as error:
            print_on_first_rank(f"a restart chooses again: {error}")


def _file_in(folder: str | None) -> Path | None:
    """The file next to checkpoints; None without any, or where they are in an object store."""
    return None if folder is None or "://" in folder else Path(folder) / NAME


def iterations_left(args: argparse.Namespace) -> int | None:
    """Iterations of training up to the end of the run, including the current one; None if it is not known."""
    done: int | None = getattr(args, "curr_iteration", None)
    if done is None or not args.train_iters:
        return None
    left: int = args.train_iters - done
    every = args.exit_interval
    return min(left, every - done % every) if every else left


def made_for_of_args(args: argparse.Namespace) -> MadeFor:
    """The record of this run's block and machines, to compare with that of a plan."""
    return made_for(
        dataclasses.replace(block_of_args(args, None), condense=args.ampipe_condense),
        cluster=f"the machines of a run with {args.world_size} ranks",
        ranks_per_node=ranks_per_node(args) or args.world_size,
    )


def layout_of_args(args: argparse.Namespace) -> SequenceLayout:
    """How the rows of a sequence are distributed over ranks."""
    return SequenceLayout(
        tensor_ranks=args.tensor_model_parallel_size if args.sequence_parallel else 1,
        context_ranks=args.context_parallel_size,
    )


def stage_of_args(args: argparse.Namespace) -> StageLayers:
    """The layers of the (virtual) pipeline stage with most."""
    return layers_of(_model_of_args(args))


def features_of_args(args: argparse.Namespace, *, shares_schedule: bool = False) -> BlockFeatures:
    """The features of the blocks in training."""
    own = dataclasses.replace(settings_of(args), ranks_per_node=ranks_per_node(args))
    local = args.transformer_impl == "local"
    return features_of_settings(args, own, shares_schedule=shares_schedule, local=local)


def block_of_args(args: argparse.Namespace, cluster: Cluster | None) -> Block:
    """The block of Megatron's arguments; the cluster does not change it."""
    block, _ = block_of(_model_of_args(args), cluster, ranks=args.world_size)
    # The layers go by the nodes of the run, whatever machines the figures are of.
    block = dataclasses.replace(block, ranks_per_node=ranks_per_node(args))
    if not args.bf16 and not args.fp16:
        # A model file has no key for fp32: without a precision, it means that of the cluster.
        block = dataclasses.replace(block, dtype="fp32")
    return block


def _model_of_args(args: argparse.Namespace) -> ModelFile:
    """Megatron's arguments as a model file."""
    values: dict[str, Any] = {
        flag: value
        for flag in SIZE_FLAGS
        if (value := getattr(args, flag.replace("-", "_"), None)) is not None
    }
    if values.get("moe-expert-capacity-factor", 0.0) < 0:
        # Megatron treats a negative factor as none.
        del values["moe-expert-capacity-factor"]
    if getattr(args, "ampipe_recomputes", False):
        # Set aside: the layers recompute in place of Megatron.
        values["recompute-granularity"] = "full"
    pattern = HybridPattern.of_arguments(args)
    if pattern is not None and not pattern.runs:
        # Nothing is pipelined.
        del values["hybrid-layer-pattern"]
    values["no-gradient-accumulation-fusion"] = not args.gradient_accumulation_fusion
    return ModelFile(Path("arguments"), values, {}, settings_of(args))
