"""Tests every row of the table of refusals with Megatron's parser and in a launch; reports JSON.

One process imports Megatron and forks a child per launch. Each child runs the complete training entry point,
without the time for imports. Run by :mod:`.test_refusals`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch import command_line, ending, host, pretrain
from megatron_ampipe.launch.flag_values import RANGES
from megatron_ampipe.launch.refusals import REFUSALS, refuse_unsupported
from megatron_ampipe.schedule import Pipeline
from megatron_ampipe.schedule.config import AMPipeConfig
from tests.megatron.refusal_flags import ALONE, COMPANIONS, VALUES

PROCESS_GROUP_MADE = 99
"""Exit code of a launch that has reached the creation of its process group."""


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


def out_of_range(parser: argparse.ArgumentParser, flag: str, *, known: bool) -> dict[str, Any]:
    """The parser's message for a number that is too small."""
    try:
        parser.parse_args([flag, "-1"] if known else [])
    except BadInput as error:
        return {"known": known, "message": str(error)}
    return {"known": known, "message": "accepted"}


class Launch:
    """An entry point that runs in a child.

    It must end before it creates a process group, unless ``meets`` says where its only rank meets itself.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        entry: Callable[[], int] | None = None,
        meets: Mapping[str, str] | None = None,
    ) -> None:
        self._output = os.memfd_create("launch")
        self._child = os.fork()
        if self._child == 0:
            os.dup2(self._output, 1)
            os.dup2(self._output, 2)
            import torch

            if meets is None:
                torch.distributed.init_process_group = lambda *_args, **_kwargs: os._exit(PROCESS_GROUP_MADE)
            os.environ.update(meets or {})
            code = entry() if entry is not None else pretrain.main(arguments)
            sys.stdout.flush()
            os._exit(code)

    def result(self) -> dict[str, Any]:
        """Wait for its end."""
        _, status = os.waitpid(self._child, 0)
        with open(self._output) as output:
            output.seek(0)
            said = output.read()
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        return {
            "code": os.waitstatus_to_exitcode(status),
            "errors": errors,
            "traceback": "Traceback" in said,
            "output": said[-1500:],
        }


def launched(command_lines: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Any]]:
    """The result of each launch; two run at the same time."""
    running: dict[str, Launch] = {}
    results = {}
    for name, arguments in command_lines.items():
        if len(running) == 2:
            oldest = next(iter(running))
            results[oldest] = running.pop(oldest).result()
        running[name] = Launch(arguments)
    return results | {name: launch.result() for name, launch in running.items()}


def main() -> None:
    """Report on all rows, and on all command lines given as JSON in the first argument."""
    base, others = json.loads(sys.argv[1])
    host.install()
    # There are no other ranks to wait for.
    ending.PEER_LAG_S = 0.0
    from megatron.core.extensions import kitchen
    from megatron.training.arguments import add_megatron_arguments

    # Megatron has the flags of this library only if it is installed; it is internal to NVIDIA.
    kitchen.HAVE_KITCHEN = True

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    parser = command_line.add_arguments(parser)
    actions = {flag: action for action in parser._actions for flag in action.option_strings}
    rows: dict[str, Any] = {}
    launches = {}
    for refusal in REFUSALS:
        known = refusal.setting in actions
        tried = triggering_flags(refusal.setting, actions[refusal.setting]) if known else []
        common = ALONE.get(refusal.setting, base)
        rows[refusal.setting] = {
            "known": known,
            "tried": [{"flags": flags, **refused_by_table(parser, [*common, *flags])} for flags in tried],
            "launch": None,
        }
        if tried:
            launches[refusal.setting] = [*common, *tried[0]]
    for setting, result in launched(launches).items():
        rows[setting]["launch"] = result
    report = {
        "accepted": Launch(base).result(),
        "rows": rows,
        "others": launched(others),
        "ranges": {flag: out_of_range(parser, flag, known=flag in actions) for flag in RANGES},
    }
    with open(os.environ["AMPIPE_TEST_REPORT"], "w") as file:
        json.dump(report, file)


if __name__ == "__main__":
    main()
