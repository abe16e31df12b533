"""Layouts of random sizes: refused before a launch if, and only if, Megatron would refuse them in one."""

import contextlib
import io
import random
import re
import shlex
import sys
import warnings
from collections.abc import Iterator

import pytest

from megatron_ampipe.block.layout import misfit
from megatron_ampipe.launch import flags
from tests.megatron.launcher import MOCK_DATA, TINY_GPT, TINY_MOE

NUM_LAYOUTS = 200
SIZES = {
    "world": (4, 6, 8, 12, 16),
    "--tensor-model-parallel-size": (1, 1, 1, 2, 3),
    "--pipeline-model-parallel-size": (1, 1, 2, 2, 4),
    "--context-parallel-size": (1, 1, 1, 2),
    "--expert-model-parallel-size": (1, 2, 3, 4, 8),
    "--expert-tensor-parallel-size": (None, None, 1, 2),
    "--num-experts": (4, 7, 8, 12),
    "--num-layers": (4, 4, 5, 8, 12),
    "--num-layers-per-virtual-pipeline-stage": (None, None, None, 1, 2, 3),
    "--num-virtual-stages-per-pipeline-rank": (None, None, None, None, 2),
    "--decoder-first-pipeline-num-layers": (None, None, None, None, 1, 2),
    "--decoder-last-pipeline-num-layers": (None, None, None, None, 1, 2),
    "--global-batch-size": (None, 8, 16, 24, 48, 48),
    "--micro-batch-size": (1, 1, 2),
    "--microbatch-group-size-per-virtual-pipeline-stage": (None, None, None, 3, 4),
    "--num-distributed-optimizer-instances": (1, 1, 1, 2),
}
"""What a layout is drawn from. Unlikely values stand once."""
ALWAYS = shlex.split("--sequence-parallel --use-distributed-optimizer --transformer-impl local --bf16")


def layouts() -> Iterator[tuple[int, list[str]]]:
    """A number of ranks and a command line, of each layout."""
    draw = random.Random(7)
    for _ in range(NUM_LAYOUTS):
        values = {name: draw.choice(choices) for name, choices in SIZES.items()}
        world = values.pop("world")
        pairs = ([name, str(value)] for name, value in values.items() if value is not None)
        yield world, [*TINY_GPT, *TINY_MOE, *MOCK_DATA, *ALWAYS, *(word for pair in pairs for word in pair)]


def refused_by_megatron(words: list[str], world: int, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """What Megatron says on its way to the first step; None if it would train."""
    import torch
    from megatron.core import num_microbatches_calculator, parallel_state
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.training import arguments
    from torch.testing._internal.distributed.fake_pg import FakeStore

    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "argv", ["pretrain", *words])
    try:
        args = arguments.validate_args(arguments.parse_args(), {})
        config = arguments.core_transformer_config_from_args(args)
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        parallel_state.initialize_model_parallel(
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            args.virtual_pipeline_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
            create_gloo_process_groups=False,
        )
        virtual = args.virtual_pipeline_model_parallel_size
        get_num_layers_to_build(config, vp_stage=None if virtual is None else 0, pp_rank=0)
        calculator = num_microbatches_calculator.ConstantNumMicroBatchesCalculator(
            args.global_batch_size, args.micro_batch_size, args.data_parallel_size, False, 1
        )
        if virtual is not None:
            # The check of the interleaved schedule, in its first step.
            group, pipeline = config.microbatch_group_size_per_vp_stage, args.pipeline_model_parallel_size
            assert pipeline <= group <= calculator.get(), "groups of micro-batches"
            assert not 0 < calculator.get() % group < pipeline, "the last group of micro-batches"
    except (AssertionError, ValueError, RuntimeError) as error:
        return str(error) or repr(error)
    finally:
        parallel_state.destroy_model_parallel()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return None


@pytest.mark.ranks(1)
@pytest.mark.timeout(600)
def test_a_layout_is_refused_if_and_only_if_megatron_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    flags.import_megatron()
    parser = flags.full_parser()
    wrong, refused, accepted = [], set(), 0
    for world, words in layouts():
        args = parser.parse_args(words)
        ours = misfit(args, world)
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
            theirs = refused_by_megatron(words, world, monkeypatch)
        if (ours is None) != (theirs is None):
            wrong.append((world, " ".join(words[len(TINY_GPT) + len(TINY_MOE) :]), ours, theirs))
        if ours is not None:
            refused.add((ours.key, re.sub(r"\d+", "N", ours.rule)[:30]))
        accepted += ours is None
    assert not wrong, "\n".join(map(str, wrong))
    assert len(refused) > 8 and accepted > 12, (accepted, refused)
