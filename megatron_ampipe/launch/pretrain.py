"""GPT pretraining through ``megatron.training.pretrain``: from a command line to an exit code.

Every flag of Megatron's GPT pretraining means here what it means there; AMPipe adds its own group and,
when it is switched on, its layer spec. Whatever is wrong with the input is found before any process
group exists. What one training step does is in :mod:`.gpt`. Called by ``megatron_ampipe.pretrain_gpt``.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence

from megatron_ampipe import __version__, compat
from megatron_ampipe.errors import BadInput, EnvironmentMissing
from megatron_ampipe.launch import flags, host, patched, settings
from megatron_ampipe.launch.early import check_own_flags
from megatron_ampipe.launch.ending import run_to_end
from megatron_ampipe.launch.refuse import refuse_as_bad_input, report_parser_errors
from megatron_ampipe.refusals import refuse_unsupported

PROGRAM_NAME = "pretrain_gpt"
TOKENIZER_DEFAULT = {"tokenizer_type": "GPT2BPETokenizer"}
"""What Megatron's own script defaults to."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and return the exit code.

    Args:
        arguments: The command line without the program name; that of the process when None.
    """
    start_time_s = time.time()
    words = list(sys.argv[1:] if arguments is None else arguments)

    def train() -> int:
        adjusted, adjustments = prepare_platform(words)
        launch = prepare_training(adjusted, adjustments)
        require_rendezvous()
        record_settings(words, adjustments)
        launch(start_time_s)
        return 0

    return run_to_end(lambda: check_own_flags(words), train)


def require_rendezvous() -> None:
    """Refuse a run whose ranks could not find each other, and have not found each other yet.

    Raises:
        EnvironmentMissing: Nothing says where they meet.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        # Who has made the process group needs no place to meet: ampipe bench joins ranks by a file.
        return
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise EnvironmentMissing(
                f"{name} is not set, which says where ranks find each other. Start the run with torchrun, "
                "which sets it: torchrun --standalone --nproc-per-node 1 -m megatron_ampipe.pretrain_gpt ..."
            )


def prepare_platform(arguments: Sequence[str]) -> tuple[list[str], list[host.Adjustment]]:
    """Make Megatron importable on this machine, and the command line one that it can parse.

    Returns:
        The command line Megatron is to parse, with the settings of every ``--ampipe-config`` in place of that
        flag; and what was added to it because there is no GPU.

    Raises:
        EnvironmentMissing: torch or Megatron is not there.
        BadInput: A configuration file is wrong, or a flag needs a GPU and there is none.
    """
    on_gpu = import_megatron()
    words = list(arguments)
    if settings.names_files(words):
        parser = full_parser()
        resolved = settings.resolve(words, parser)
        check_settings(resolved, parser)
        words = list(resolved.words)
    return (words, []) if on_gpu else host.adjust(words)


def import_megatron() -> bool:
    """Import what trains, on the host platform where there is no GPU; the way in is ours, not a patch's.

    Returns:
        Whether there is a GPU.

    Raises:
        EnvironmentMissing: torch or Megatron is not there, or too old.
    """
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise EnvironmentMissing(f"PyTorch cannot be imported ({error}). Run: pip install torch") from error
    on_gpu = host.gpu_available()
    try:
        if on_gpu:
            import megatron.training.training  # noqa: F401
        else:
            host.install()
    except ImportError as error:
        raise EnvironmentMissing(
            f"Megatron cannot be imported ({error}). Run: pip install 'megatron-core[training]>=0.19.2'"
        ) from error
    compat.require_peers()
    patched.give_way()
    return on_gpu


def prepare_training(
    arguments: Sequence[str], adjustments: Sequence[host.Adjustment]
) -> Callable[[float], None]:
    """Parse, check and build every configuration; no process group exists yet.

    Args:
        arguments: The command line without the program name.
        adjustments: What the host platform added to it, for the start-up table.

    Returns:
        A function of the start time (seconds since the epoch) that trains.

    Raises:
        BadInput: Megatron or AMPipe refuses the arguments.
        EnvironmentMissing: This Megatron cannot build a model from a configuration.
    """
    compat.require_model_from_configuration()
    from megatron.core.enums import ModelType
    from megatron.training import inprocess_restart, pretrain, set_startup_timestamps
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    from megatron_ampipe.launch import gpt
    from megatron_ampipe.launch.attach import attach
    from megatron_ampipe.launch.checkpoints import check_checkpoint
    from megatron_ampipe.launch.data_paths import check_data_paths
    from megatron_ampipe.launch.dataset_helpers import use_built_helpers
    from megatron_ampipe.launch.exit_signal import keep_from_children
    from megatron_ampipe.launch.metrics import logged
    from megatron_ampipe.launch.trace import recorded, write_trace

    sys.argv = [PROGRAM_NAME, *arguments]
    use_built_helpers()
    with refuse_as_bad_input():
        args = parse_and_validate_args(extra_args_provider=add_arguments, args_defaults=TOKENIZER_DEFAULT)
        check_required(args)
        check_data_paths(args)
        check_checkpoint(args)
        keep_from_children(args)
        model_config = gpt_config_from_args(args)
        context = attach(args, model_config, adjustments=adjustments)
        run_config = pretrain_cfg_container_from_args(args, model_config)

    def launch(start_time_s: float) -> None:
        set_startup_timestamps(program_start=start_time_s, main_entry=time.time())
        run, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
        try:
            with logged(context, args):
                run(
                    run_config,
                    gpt.datasets_provider,
                    ModelType.encoder_or_decoder,
                    recorded(gpt.forward_step, context, args),
                    store=store,
                    get_embedding_ranks=gpt.embedding_ranks,
                )
        finally:
            # Also what was recorded before a failure is worth seeing.
            write_trace(context)

    return launch


def check_required(args: argparse.Namespace) -> None:
    """Refuse what Megatron's own check lets through and its training loop then fails on.

    Raises:
        BadInput: A flag is missing that training cannot do without, or warm-up would not end.
    """
    if args.skip_train:
        return
    for flag, value, example in (
        ("--train-iters", args.train_iters or args.train_samples, 1000),
        ("--eval-interval", args.eval_interval, 1000),
        ("--lr", args.lr, 1e-4),
    ):
        if value is None:
            raise BadInput(
                flag,
                "(not given)",
                rule="training needs it",
                remedy=f"Give it, for example {flag} {example}.",
            )
    decay_iters = args.lr_decay_iters or args.train_iters
    if args.train_iters and args.lr_warmup_fraction is None and args.lr_warmup_iters >= decay_iters:
        raise BadInput(
            "--lr-warmup-iters",
            args.lr_warmup_iters,
            rule=f"is not less than the {decay_iters} iterations over which the learning rate changes",
            remedy=f"Use --lr-warmup-iters {decay_iters // 10}.",
        )


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Megatron's ``extra_args_provider``: AMPipe's flags, and errors that are reported in our form."""
    report_parser_errors(parser)
    return flags.add_arguments(parser)


def full_parser() -> argparse.ArgumentParser:
    """Megatron's parser with AMPipe's flags, as Megatron itself makes it; after :func:`import_megatron`."""
    from megatron.training.arguments import add_megatron_arguments

    return add_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))


def check_settings(resolved: settings.Resolved, parser: argparse.ArgumentParser) -> None:
    """Types and choices of everything that ``parser`` knows, and AMPipe's own settings together.

    Raises:
        BadInput: One of them is wrong; names the file and line that sets it.
    """
    try:
        args, _ = parser.parse_known_args(resolved.words)
        flags.config_from_args(args)
    except BadInput as error:
        raise resolved.located(error) from error


def check_launch(words: Sequence[str]) -> None:
    """What a launch checks before any process group exists, without building anything.

    Args:
        words: A resolved command line. ``WORLD_SIZE`` says for how many ranks.

    Raises:
        BadInput: Megatron or AMPipe refuses it.
    """
    from megatron.training.arguments import parse_args, validate_args

    sys.argv = [PROGRAM_NAME, *words]
    with refuse_as_bad_input():
        args = parse_args(add_arguments)
        validate_args(args, TOKENIZER_DEFAULT)
        check_required(args)
        refuse_unsupported(flags.config_from_args(args), args)


def record_settings(
    words: Sequence[str], adjustments: Sequence[host.Adjustment], *, script: str | None = None
) -> None:
    """Write ``resolved.yaml`` beside the logs: a file for ``--ampipe-config`` that repeats this run.

    Flags that a script adds to Megatron's are no settings of a file; they stand there as a comment.

    Args:
        words: The command line as the user gave it.
        adjustments: What was added to it. It stands there as a comment, so that the file also fits a machine
            that needs no adjustment.
        script: What was run, where that is not our entry.

    Raises:
        BadInput: Nothing can be written where the run's logs go.
    """
    if int(os.environ.get("RANK", "0")) != 0:
        return
    versions = [f"{name} {compat.found_version(name)}" for name in compat.MINIMUM_VERSIONS]
    run = "A run" if script is None else f"A run of {script}"
    notes = [
        f"{run} on {os.environ.get('WORLD_SIZE', '1')} ranks with megatron-ampipe {__version__}, "
        f"{', '.join(versions)}. Given to {settings.CONFIG_FLAG}, this file repeats it.",
        *(f"Added: {' '.join(change.arguments)} ({change.reason})" for change in adjustments),
    ]
    settings.write_beside_logs(settings.resolve(words, full_parser()), notes=notes)
