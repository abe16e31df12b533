"""Adds AMPipe's flags to Megatron's parser.

The flags are the rows of :mod:`megatron_ampipe.block.settings`. What they ask for is in ``run.py``, conflicts
with Megatron's flags in ``refusals.py``.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from typing import Any

from megatron_ampipe import compat
from megatron_ampipe.block.settings import SETTING
from megatron_ampipe.errors import BadInput, EnvironmentMissing, nearest
from megatron_ampipe.launch import config_files, host
from megatron_ampipe.launch.config_files import CONFIG_FLAG
from megatron_ampipe.launch.ending import LIST_OF_FLAGS, report_parser_errors
from megatron_ampipe.launch.run import requested

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
    parse = parser.parse_known_args

    @functools.wraps(parse)
    def parsing(*words: Any, **options: Any) -> Any:
        try:
            return parse(*words, **options)
        except KeyError as error:
            # An enum of Megatron's raises it.
            raise _no_choice(parser, words[0] if words else None, error) from error

    parser.parse_known_args = parsing  # type: ignore[method-assign]
    return parser


def _no_choice(parser: argparse.ArgumentParser, words: Sequence[str] | None, error: KeyError) -> BadInput:
    """The error for a word that no choice of its flag has as a name."""
    name = str(error.args[0])
    given = list(sys.argv[1:] if words is None else words)
    before = [given[at - 1] for at, word in enumerate(given) if at and word == name]
    before += [word.partition("=")[0] for word in given if word.endswith(f"={name}")]
    flag = next(iter(before), "arguments")
    actions = (action for action in parser._actions if flag in action.option_strings)
    choices = [
        choice.name for action in actions for choice in action.choices or () if hasattr(choice, "name")
    ]
    remedy = nearest(name, choices) if choices else LIST_OF_FLAGS
    return BadInput(flag, name, rule="is not one of its values", remedy=remedy)


def full_parser() -> argparse.ArgumentParser:
    """Megatron's own parser with AMPipe's flags added. Call it after :func:`import_megatron`."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    report_parser_errors(parser)
    return add_arguments(parser)


def check_settings(resolved: config_files.Resolved, parser: argparse.ArgumentParser) -> None:
    """Check types and choices of all flags, and AMPipe's settings together; errors name file and line."""
    try:
        args, _ = parser.parse_known_args(resolved.words)
        requested(args)
    except BadInput as error:
        raise resolved.located(error) from error
