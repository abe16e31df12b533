"""Runs the file checks of command lines, most of them separately and some in launches; reports JSON.

One process imports Megatron. It runs the separate checks itself, and forks a child for each launch, with the
training entry point or the launcher. Run by :mod:`.test_bad_files`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from typing import Any

from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch import command_line, ending, host, pretrain, script
from megatron_ampipe.launch.refuse import refuse_as_bad_input
from tests.megatron.refusals_worker import PROCESS_GROUP_MADE, Launch
from tests.rendezvous import meeting_place


def check(words: list[str]) -> dict[str, Any]:
    """The result of the file checks for a command line, in the format of a launch's result."""
    from megatron.training.arguments import parse_args, validate_args

    from megatron_ampipe.launch.checkpoints import check_checkpoint
    from megatron_ampipe.launch.data_paths import check_data_paths

    sys.argv = ["pretrain_gpt", *words]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        args = parse_args(command_line.add_arguments)
        validate_args(args, pretrain.TOKENIZER_DEFAULT)
        try:
            with refuse_as_bad_input():
                check_data_paths(args)
                check_checkpoint(args)
        except BadInput as error:
            return {"code": error.exit_code, "errors": [f"error: {error}"], "traceback": False, "output": ""}
    return {"code": PROCESS_GROUP_MADE, "errors": [], "traceback": False, "output": ""}


def launch(words: list[str], *, loads: bool) -> Launch:
    """A launch, up to its process group or its end; of the launcher if the first word ends with ``.py``."""
    entry = script.main if words[0].endswith(".py") else pretrain.main
    return Launch(words, entry=functools.partial(entry, words), meets=meeting_place() if loads else None)


def main() -> None:
    """Report on all command lines in the first argument: JSON with (how far it runs, words) by name."""
    command_lines: dict[str, tuple[str, list[str]]] = json.loads(sys.argv[1])
    host.install()
    # There are no other ranks to wait for.
    ending.PEER_LAG_S = 0.0
    launches = {
        name: launch(words, loads=how == "loads")
        for name, (how, words) in command_lines.items()
        if how != "checks"
    }
    results = {name: check(words) for name, (how, words) in command_lines.items() if how == "checks"}
    results |= {name: child.result() for name, child in launches.items()}
    with open(os.environ["AMPIPE_TEST_REPORT"], "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main()
