"""Checks configurations with Megatron's parser and validation, in one process; reports JSON.

Run by :mod:`.test_settings` with a folder for files; ``AMPIPE_TEST_REPORT`` names the report.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_ampipe import cli
from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch import command_line, settings
from tests.help_examples import help_examples
from tests.megatron.settings_cases import LAUNCHES, WRONG, WRONG_LAUNCHES


def outcome(act: Callable[[], object]) -> dict[str, Any]:
    """The result: a JSON value, or the message of a refusal."""
    try:
        return {"value": act(), "message": None}
    except BadInput as error:
        return {"message": str(error), "code": error.exit_code}
    except Exception as error:
        return {"message": None, "crash": repr(error)}


def command(*words: str) -> dict[str, Any]:
    """Run one ``ampipe`` command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(words)
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


def every_flag(parser: argparse.ArgumentParser) -> list[str]:
    """A command line with all flags of the parser that set a value, each with a valid value."""
    words: list[str] = []
    for action in parser._actions:
        flag = action.option_strings[-1]
        if flag in ("--help", settings.CONFIG_FLAG):
            continue
        words.append(flag)
        if action.nargs != 0:
            several = {None: 1, "+": 2, "*": 2}.get(action.nargs, action.nargs)
            words += [CHECKED.get(flag) or accepted_value(action)] * several
    return words


CHECKED = {"--cp-comm-type": "p2p"}
"""Values of flags that the parser takes as any text, and the check of values does not."""


def accepted_value(action: argparse.Action) -> str:
    """A valid value of the flag, as text."""
    choices = [getattr(choice, "name", str(choice)) for choice in action.choices or ()]
    # For floats a value below 1, because some of these flags take no more than 1.
    numbers = ("0.5", "3") if action.type is float else ("3", "0.5")
    for text in (*choices[-1:], *numbers, "attn", "some text: # 1"):
        with contextlib.suppress(Exception):
            value = (action.type or str)(text)
            if action.choices is None or value in action.choices:
                return text
    raise AssertionError(f"no value for {action.option_strings}")


def main() -> None:
    """Run all cases."""
    folder = Path(sys.argv[1])
    command_line.import_megatron()
    parser = command_line.full_parser()

    def check(name: str) -> None:
        wrong = WRONG[name]
        words = list(wrong.words)
        if wrong.yaml is not None:
            path = folder / f"{name}.yaml"
            path.write_text(wrong.yaml)
            words = ["--ampipe-config", str(path), *words]
        resolved = settings.resolve(words, parser)
        command_line.check_settings(resolved, parser)
        parser.parse_args(resolved.words)

    def back(words: list[str]) -> list[list[str]]:
        """Flags whose values change in a round trip through resolved.yaml."""
        resolved = settings.resolve(words, parser)
        path = folder / "resolved.yaml"
        path.write_text(settings.as_yaml(resolved))
        again = settings.resolve(["--ampipe-config", str(path)], parser)
        before, after = vars(parser.parse_args(resolved.words)), vars(parser.parse_args(again.words))
        return [[name, str(before[name]), str(after[name])] for name in before if before[name] != after[name]]

    def launched(model: str) -> dict[str, Any]:
        run, ranks, words = LAUNCHES[model]
        common = ["--ampipe-config", model, run, "--tokenizer-type", "NullTokenizer", "--mock-data", *words]
        return command("config", "--ranks", str(ranks), *common)

    def example(words: list[str]) -> dict[str, Any]:
        """Run an example, with a user's file if the example has one."""
        mine = folder / "my" / "run.yaml"
        mine.parent.mkdir(exist_ok=True)
        mine.write_text("mock-data: true\ntrain-iters: 100\n")
        with contextlib.chdir(folder):
            return command(*words)

    tiny = ["--ampipe-config", "tiny", "quickstart"]
    report = {
        "wrong": {name: outcome(lambda name=name: check(name)) for name in WRONG},
        "launches": {model: launched(model) for model in LAUNCHES},
        "wrong_launches": {
            name: command("config", "--ranks", "2", *tiny, "--mock-data", *words)
            for name, (words, _) in WRONG_LAUNCHES.items()
        },
        "back": {model: outcome(lambda m=model: back(["--ampipe-config", m])) for model in LAUNCHES},
        "every_flag": outcome(lambda: back(every_flag(parser))),
        "num_flags": len(every_flag(parser)),
        "as_yaml": command("config", *tiny, "--lr", "0.5", "--ampipe-degree", "4"),
        "as_command": command("config", "--format", "command", *tiny, "--lr", "0.5"),
        "refused": command("config", *tiny, "--num-layers", "two"),
        "examples": {shlex.join(words): example(words) for words in help_examples("config")},
        "help": parser.format_help(),
    }
    Path(os.environ["AMPIPE_TEST_REPORT"]).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
