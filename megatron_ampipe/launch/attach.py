"""Puts AMPipe into a Megatron run: checks, layer specification, start-up table.

Called by :mod:`.pretrain` and :mod:`.hooks`.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ampipe import compat
from megatron_ampipe.config import TRACED_ITERATIONS, refuse_unsupported
from megatron_ampipe.launch import flags, host
from megatron_ampipe.launch.startup import print_startup_table
from megatron_ampipe.launch.trace import prepare_trace_dir
from megatron_ampipe.layers.attention import kernel_name
from megatron_ampipe.layers.context import AMPipeContext
from megatron_ampipe.layers.spec import pipelined
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.schedule import Chunk, SequenceLayout, chunk_sequence


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
    if config.degree == 1:
        print_startup_table([megatron, ("degree", "1: Megatron's own layers")], adjustments)
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
    chunks = chunk_sequence(args.seq_length, degree=config.degree, layout=layout)
    on_gpu = not host.installed()
    rows = [
        megatron,
        ("degree", str(config.degree)),
        ("schedule", config.schedule),
        ("chunk boundaries", _boundaries(chunks)),
        ("attention", _attention_kernel(args, on_gpu=on_gpu)),
        ("communication lane", "CUDA stream" if on_gpu else "thread (gloo)"),
        ("trace", config.trace_dir or "off"),
    ]
    print_startup_table(rows, adjustments)
    return context


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
