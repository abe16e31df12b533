"""What can be refused of a launch before torch is imported: AMPipe's own flags, and torchrun's variables.

Megatron's flags are left to Megatron's parser. Where files of settings are named, only the types of AMPipe's
flags are checked here: how they combine is known only with what the files say. Called by :mod:`.session`.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Sequence

from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch import flags, settings
from megatron_ampipe.launch.flags import PlanReader, config_from_args
from megatron_ampipe.launch.refuse import report_parser_errors

_PREFIX = "--ampipe"
_RANKS = (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
"""Variables of torchrun: the index of a rank, and how many ranks there are."""


def check_rank_variables() -> None:
    """Refuse wrong values of torchrun's variables, where they are set.

    Raises:
        BadInput: One is no whole number, or the number of a rank is not below how many there are.
    """
    remedy = "Start the run with torchrun, which sets it, or unset it."
    for name in (*itertools.chain(*_RANKS), "MASTER_PORT"):
        value = os.environ.get(name, "0")
        if not (value.isascii() and value.isdecimal() and len(value) < 10):
            raise BadInput(name, value or "(empty)", rule="must be a whole number", remedy=remedy)
    for rank, count in _RANKS:
        if rank in os.environ and count in os.environ and int(os.environ[rank]) >= int(os.environ[count]):
            rule = f"must be below {count}, which is {os.environ[count]}"
            raise BadInput(rank, os.environ[rank], rule=rule, remedy=remedy)


def check_own_flags(words: Sequence[str], *, read_plan: PlanReader) -> None:
    """Refuse a wrong flag of AMPipe's in a command line.

    Args:
        words: The command line without the program name.
        read_plan: Reads the plan file that it names.

    Raises:
        BadInput: There is no such flag, or its value is wrong, or it contradicts another one of AMPipe's.
    """
    if not any(word.startswith(_PREFIX) for word in words) or {"-h", "--help"} & set(words):
        return
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    report_parser_errors(parser)
    args, others = flags.add_arguments(parser, read_plan=read_plan).parse_known_args(list(words))
    for index, word in enumerate(others):
        if word.startswith(_PREFIX):
            values = itertools.takewhile(lambda other: not other.startswith("-"), others[index + 1 :])
            parser.error(f"unrecognized arguments: {' '.join([word, *values])}")
    # A --yaml-cfg replaces all flags; that is refused once Megatron has read it.
    if not settings.names_files(words) and "--yaml-cfg" not in words:
        config_from_args(args, read_plan=read_plan)
