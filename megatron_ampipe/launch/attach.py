"""Puts AMPipe into a Megatron run: checks, layer specification, start-up table.

Called by :mod:`.pretrain` and :mod:`.hooks`.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.training import training

from megatron_ampipe import compat
from megatron_ampipe.config import AUTO, TRACED_ITERATIONS
from megatron_ampipe.launch import flags, host
from megatron_ampipe.launch.auto import AutoDegree, agreed_upon, print_on_first_rank
from megatron_ampipe.launch.planned import planner_of, read_pipeline
from megatron_ampipe.launch.startup import print_startup_table
from megatron_ampipe.launch.trace import prepare_trace_dir
from megatron_ampipe.launch.trials import candidates
from megatron_ampipe.layers.attention import kernel_name
from megatron_ampipe.layers.context import AMPipeContext
from megatron_ampipe.layers.spec import pipelined
from megatron_ampipe.refusals import refuse_unsupported
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.schedule import Chunk, SequenceLayout


def attach(
    args: argparse.Namespace, model_config: Any, *, adjustments: Sequence[host.Adjustment]
) -> AMPipeContext | None:
    """As :func:`prepare`, and make ``model_config`` build pipelined layers.

    Args:
        args: Megatron's validated arguments.
        model_config: Megatron's ``GPTModelConfig``; left as it is at degree 1.
        adjustments: What the host platform chose, for the table.
    """
    context = prepare(args, adjustments=adjustments)
    if context is not None:
        model_config.transformer_layer_spec = functools.partial(_layer_spec, context)
    return context


def prepare(args: argparse.Namespace, *, adjustments: Sequence[host.Adjustment]) -> AMPipeContext | None:
    """Hold the arguments against every rule, and print the start-up table on rank 0.

    Args:
        args: Megatron's validated arguments.
        adjustments: What the host platform chose, for the table.

    Returns:
        What the layers share, None at degree 1.

    Raises:
        BadInput: a flag is wrong or a combination is not supported.
    """
    config = flags.config_from_args(args)
    megatron = ("Megatron", compat.describe_megatron())
    if not config.pipelined:
        rows = [megatron, ("degree", "1: Megatron's own layers")]
        if config.plan is not None:
            rows.append(("why", read_pipeline(args, config.plan).reason))
        print_startup_table(rows, adjustments)
        return None
    refuse_unsupported(config, args)
    if config.trace_dir is not None:
        prepare_trace_dir(Path(config.trace_dir))
    adjustments = [*adjustments, *_drop_attention_mask(args), *_drop_padding(args)]
    # Without a trace, only what the log says of an iteration is recorded.
    context = AMPipeContext(
        config, recorder=Recorder(num_iterations=TRACED_ITERATIONS if config.trace_dir else 1)
    )
    layout = SequenceLayout(
        tensor_ranks=args.tensor_model_parallel_size if args.sequence_parallel else 1,
        context_ranks=args.context_parallel_size,
    )
    on_gpu = not host.installed()
    rows = [
        megatron,
        *_choose(args, context, layout),
        ("attention", _attention_kernel(args, on_gpu=on_gpu)),
        ("communication lane", "CUDA stream" if on_gpu else "thread (gloo)"),
        ("trace", config.trace_dir or "off"),
        *_differing_numbers(args),
    ]
    print_startup_table(rows, adjustments)
    return context


def _choose(
    args: argparse.Namespace, context: AMPipeContext, layout: SequenceLayout
) -> list[tuple[str, str]]:
    """Settle how blocks are run, or who will; the rows about it in the start-up table."""
    config, choice = context.config, None
    if config.plan is not None:
        choice = read_pipeline(args, config.plan)
        context.pipeline, context.predicted_ms = choice.pipeline, choice.predicted_ms
        training.train_step = agreed_upon(context, training.train_step)
    elif config.degree == AUTO:
        planner = None if config.cluster is None else planner_of(args, config.cluster)
        auto = AutoDegree(context, planner=planner, say=print_on_first_rank)
        rows = args.seq_length // (layout.tensor_ranks * layout.context_ranks)
        choice = auto.start((rows, args.micro_batch_size))
        training.train_step = auto.around(training.train_step)
        if choice is None:
            tried = ", ".join(map(str, candidates(rows)))
            return [
                ("degree", f"auto: the first iterations try {tried}, the fastest stays"),
                ("schedule", config.schedule),
            ]
    pipeline = context.pipeline
    degree = str(pipeline.degree)
    if pipeline.of_backward != pipeline.degree:
        degree += f" forward, {pipeline.of_backward} backward"
    return [
        ("degree", degree),
        ("schedule", pipeline.name),
        ("chunk boundaries", _boundaries(pipeline.chunks(args.seq_length, layout))),
        *([("why", choice.reason)] if choice is not None else []),
    ]


def _attention_kernel(args: argparse.Namespace, *, on_gpu: bool) -> str:
    return kernel_name(
        local=args.transformer_impl == "local",
        on_gpu=on_gpu,
        dtype=args.params_dtype,
        context_parallel=args.context_parallel_size > 1,
        latent=args.multi_latent_attention,
        dropout=args.attention_dropout > 0,
        window=args.window_size is not None,
    )


def _differing_numbers(args: argparse.Namespace) -> list[tuple[str, str]]:
    """A row that says that losses cannot be compared with those of another degree, where that is so."""
    rates = {"attention": args.attention_dropout, "hidden": args.hidden_dropout}
    drawing = " ".join(f"--{name}-dropout {rate:g}" for name, rate in rates.items() if rate > 0)
    if not drawing:
        return []
    return [
        (
            "note",
            f"{drawing}: every degree draws other random numbers, so losses differ from those of "
            "a stock run, "
            "and mean the same; to compare runs digit by digit use 0 for both",
        )
    ]


def _boundaries(chunks: Sequence[Chunk]) -> str:
    """Where the first rank's rows are cut, as rows of its residual stream."""
    ends = [chunk.hidden[-1].local_end for chunk in chunks]
    return " ".join(map(str, [0, *ends])) + f" of the {ends[-1]} rows of a rank"


def _layer_spec(context: AMPipeContext, model_config: Any, vp_stage: int | None = None) -> Any:
    """A ``GPTModelConfig.transformer_layer_spec``: Megatron's own choice, its MoE layers pipelined."""
    from megatron.training.models.gpt import default_layer_spec

    return pipelined(default_layer_spec(model_config, vp_stage), context)


def _drop_attention_mask(args: argparse.Namespace) -> list[host.Adjustment]:
    """Keep the data loader from building a mask of sequence length squared that nothing reads."""
    if not args.create_attention_mask_in_dataloader:
        return []
    args.create_attention_mask_in_dataloader = False
    return [
        host.Adjustment(
            flag="--no-create-attention-mask-in-dataloader",
            value=None,
            reason="chunks know their causal mask from their position",
        )
    ]


def _drop_padding(args: argparse.Namespace) -> list[host.Adjustment]:
    """Say that padding is not sent; the dispatcher of a chunk leaves it out."""
    if not args.moe_pad_expert_input_to_capacity:
        return []
    return [
        host.Adjustment(
            flag="--moe-pad-expert-input-to-capacity",
            value=None,
            reason="ignored: chunks send the kept tokens alone, with the same result",
        )
    ]
