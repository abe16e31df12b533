"""Checks the files that command lines name, most of them alone and some in whole launches; reports JSON.

One process imports Megatron. It parses and checks by itself what only the checks are asked about, and forks a
child for each whole launch, by our entry or by the launcher. Run by :mod:`.test_bad_files`.
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
from tests.megatron.refusals_worker import PROCESS_GROUP_MADE, Launch


def check(words: list[str]) -> dict[str, Any]:
    """What the checks of files say of a command line, in the form of a launch's result."""
    from megatron.training.arguments import parse_args, validate_args

    from megatron_ampipe.launch.checkpoints import check_checkpoint
    from megatron_ampipe.launch.data_paths import check_data_paths

    sys.argv = ["pretrain_gpt", *words]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        args = parse_args(command_line.add_arguments)
        validate_args(args, pretrain.TOKENIZER_DEFAULT)
        try:
            check_data_paths(args)
            check_checkpoint(args)
        except BadInput as error:
            return {"code": error.exit_code, "errors": [f"error: {error}"], "traceback": False, "output": ""}
    return {"code": PROCESS_GROUP_MADE, "errors": [], "traceback": False, "output": ""}


def launch(words: list[str]) -> dict[str, Any]:
    """The result of a whole launch; one whose first word ends with ``.py`` goes to the launcher."""
    entry = script.main if words[0].endswith(".py") else pretrain.main
    return Launch(words, entry=functools.partial(entry, words)).result()


def main() -> None:
    """Report on every command line of the first argument: (whether it is launched, words) by name, JSON."""
    command_lines: dict[str, tuple[bool, list[str]]] = json.loads(sys.argv[1])
    host.install()
    # There are no other ranks to wait for.
    ending.PEER_LAG_S = 0.0
    results = {
        name: launch(words) if is_launched else check(words)
        for name, (is_launched, words) in command_lines.items()
    }
    with open(os.environ["AMPIPE_TEST_REPORT"], "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main()
