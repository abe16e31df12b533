"""Pretraining of GPT and hybrid models through Megatron's ``pretrain``: from a command line to an exit code.

Every flag of Megatron's GPT pretraining has the same meaning here, or is refused; AMPipe adds its own group.
The training step is in :mod:`.gpt`; models get their layers in :mod:`.script`.
"""

import sys
import time
from collections.abc import Sequence

from megatron_ampipe import compat
from megatron_ampipe.launch import host
from megatron_ampipe.launch.ending import known_cause, run_to_end
from megatron_ampipe.launch.run import Run
from megatron_ampipe.launch.script import TrainingSession, wrap_steps

PROGRAM_NAME = "pretrain_gpt"
TOKENIZER_DEFAULT = {"tokenizer_type": "GPT2BPETokenizer"}
"""The default of Megatron's own script."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Train from a command line (by default that of the process), and return the exit code."""
    start_time_s = time.time()
    session = TrainingSession(sys.argv[1:] if arguments is None else arguments)

    def train() -> int:
        run_config = prepare_training(session)
        from megatron.core.enums import ModelType
        from megatron.training import inprocess_restart, pretrain, set_startup_timestamps

        from megatron_ampipe.launch import gpt

        set_startup_timestamps(program_start=start_time_s, main_entry=time.time())
        run, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
        try:
            run(
                run_config,
                gpt.datasets_provider,
                ModelType.encoder_or_decoder,
                gpt.forward_step,
                store=store,
                get_embedding_ranks=gpt.embedding_ranks,
            )
        finally:
            session.end()
        return 0

    return run_to_end(train)


def prepare_training(session: TrainingSession) -> object:
    """Parse, check and build the configuration of a run, before any process group exists.

    Raises :class:`BadInput` if AMPipe refuses the arguments, :class:`EnvironmentMissing` if this Megatron
    cannot build a model from a configuration.
    """
    words = session.prepare_platform()
    compat.require_model_from_configuration()
    wrap_steps(session)
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        hybrid_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    sys.argv = [PROGRAM_NAME, *words]
    args = parse_and_validate_args(args_defaults=TOKENIZER_DEFAULT)
    is_gpt = args.hybrid_layer_pattern is None
    model_config = gpt_config_from_args(args) if is_gpt else hybrid_config_from_args(args)
    return pretrain_cfg_container_from_args(args, model_config)


def check_launch(words: Sequence[str]) -> Run:
    """The run of a command line on ``WORLD_SIZE`` ranks, resolved as by a launch, or :class:`BadInput`."""
    from megatron.training.arguments import parse_args, validate_args

    from megatron_ampipe.launch.resolve import resolve

    session = TrainingSession(words)
    sys.argv = [PROGRAM_NAME, *words]
    try:
        args = session.parse(parse_args)
        validate_args(args, TOKENIZER_DEFAULT)
        assert session.requested is not None
        return resolve(args, session.requested, adjustments={}, on_gpu=not host.installed())
    except Exception as error:
        raise known_cause(error) or error from error
