"""Tests every row of the table of refusals with Megatron's parser; reports JSON."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import Any

from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch import failures, flags, host
from megatron_ampipe.launch.refusals import REFUSALS, refuse_unsupported
from megatron_ampipe.schedule import Pipeline
from megatron_ampipe.schedule.pipeline import AMPipeConfig
from tests.megatron.refusal_flags import ACCEPTED, ALONE, COMPANIONS, VALUES


def triggering_flags(setting: str, action: argparse.Action) -> list[list[str]]:
    """Command lines that set the flag to values that its row should refuse."""
    if setting in ALONE:
        return [[]]
    if setting in VALUES:
        given = VALUES[setting]
    elif action.nargs == 0:
        given = [[]]
    elif action.choices:
        given = [[str(choice)] for choice in action.choices if choice != action.default]
    else:
        given = [["2"]]
    return [[setting, *values, *COMPANIONS.get(setting, [])] for values in given]


def refused_by_table(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> dict[str, Any]:
    """Parse the arguments and check the result against the table."""
    try:
        refuse_unsupported(AMPipeConfig(pipeline=Pipeline.of(4)), parser.parse_args(arguments))
    except BadInput as error:
        return {"name": error.name, "value": str(error.value), "code": error.exit_code, "message": str(error)}
    return {"name": None}


def main() -> None:
    """Report on all rows."""
    host.install()
    from megatron.core.extensions import kitchen
    from megatron.training.arguments import add_megatron_arguments

    # Megatron has the flags of this library only if it is installed; it is internal to NVIDIA.
    kitchen.HAVE_KITCHEN = True

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    failures.report_parser_errors(parser)
    flags.add_arguments(parser)
    actions = {flag: action for action in parser._actions for flag in action.option_strings}
    rows: dict[str, Any] = {}
    for refusal in REFUSALS:
        common = ALONE.get(refusal.setting, ACCEPTED)
        tried = triggering_flags(refusal.setting, actions[refusal.setting])
        rows[refusal.setting] = [
            {"flags": words, **refused_by_table(parser, [*common, *words])} for words in tried
        ]
    with open(os.environ["AMPIPE_TEST_REPORT"], "w") as file:
        json.dump(rows, file)


if __name__ == "__main__":
    main()
