"""Adds AMPipe's flags to Megatron's parser.

The flags are the rows of :mod:`megatron_ampipe.block.settings`. What they ask for is in ``run.py``, conflicts
with Megatron's flags in ``refusals``.
"""

from __future__ import annotations

import argparse
import enum
import functools
import inspect
from collections.abc import Callable, Sequence

from megatron_ampipe import compat
from megatron_ampipe.block.settings import SETTING
from megatron_ampipe.errors import EnvironmentMissing
from megatron_ampipe.launch import config_files, host
from megatron_ampipe.launch.config_files import CONFIG_FLAG
from megatron_ampipe.launch.ending import report_parser_errors
from megatron_ampipe.launch.run import Run, requested

is_launched = False
"""Whether one of AMPipe's launchers runs this process. If so, the lines of a patched Megatron do nothing."""


def import_megatron() -> bool:
    """Import Megatron's training, on the host platform if there is no GPU. A patched Megatron stays inactive.

    Returns whether there is a GPU. Raises :class:`EnvironmentMissing` if torch or Megatron is missing or too
    old, or Megatron is too new.
    """
    global is_launched
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise EnvironmentMissing(f"PyTorch cannot be imported ({error}). Run: pip install torch") from error
    on_gpu = host.gpu_available()
    try:
        # First: with a Megatron of another version, imports or replacements may fail.
        compat.require_peers()
        if on_gpu:
            import megatron.training.training  # noqa: F401
        else:
            host.install()
    except ImportError as error:
        raise EnvironmentMissing(
            f"Megatron cannot be imported ({error}). Run: pip install '{compat.MEGATRON_REQUIREMENT}'"
        ) from error
    is_launched = True
    return on_gpu


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the ``ampipe`` argument group to Megatron's parser, and return the parser."""
    group = parser.add_argument_group(
        title="ampipe",
        description="Pipelining of attention and MoE inside every block: while the tokens of one chunk of "
        "the sequence travel between the experts, the attention and experts of other chunks compute.",
    )
    group.add_argument(
        CONFIG_FLAG,
        nargs="+",
        action="extend",
        metavar="FILE",
        help="YAML files of settings, or names of included ones such as mixtral-8x7b: Megatron's flags "
        "without the dashes in front, AMPipe's in a section 'ampipe:'; later files win over earlier ones, "
        "and the command line over all",
    )
    for setting in SETTING.values():
        if setting.type is bool:
            group.add_argument(setting.flag, action="store_true", default=None, help=setting.plain_help)
            continue
        group.add_argument(
            setting.flag,
            type=setting.type,
            choices=setting.choices,
            default=None,
            metavar=None if setting.choices else setting.metavar,
            help=setting.plain_help,
        )
    for action in parser._actions:
        # Functions such as ``lambda name: AttnBackend[name]`` look a name up, and argparse knows no KeyError.
        if inspect.isfunction(action.type):
            names = [choice.name for choice in action.choices or () if isinstance(choice, enum.Enum)]
            by_name = functools.partial(_by_name, action.type, names)
            # With the name of the function, which argparse prints for other errors.
            action.type = functools.update_wrapper(by_name, action.type)
    return parser


def _by_name(parse: Callable[[str], object], names: Sequence[str], text: str) -> object:
    """Call the type of an argument, and report a name that it does not find as argparse does.

    ``names`` are those that it finds; empty if they are not known.
    """
    try:
        return parse(text)
    except KeyError as error:
        rule = f"invalid choice: '{error.args[0]}' (choose from {', '.join(names)})"
        raise argparse.ArgumentTypeError(rule) from error


def full_parser() -> argparse.ArgumentParser:
    """Megatron's own parser with AMPipe's flags added. Call it after :func:`import_megatron`."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    report_parser_errors(parser)
    return add_arguments(parser)


def check_settings(resolved: config_files.Resolved, parser: argparse.ArgumentParser) -> Run:
    """Check types and choices of all flags, and AMPipe's settings together; errors name file and line.

    Returns the run that they ask for.
    """
    with resolved.locating_errors():
        args, _ = parser.parse_known_args(resolved.words)
        return requested(args)
