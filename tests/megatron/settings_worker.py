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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ampipe import cli
from megatron_ampipe.launch import config_files, flags
from tests.help_examples import help_examples

LAUNCHES = {
    "tiny": ("quickstart", 2, ["--train-iters", "30"]),
    "gpt-moe-base": ("one-node", 8, []),
    "gpt-moe-medium": ("one-node", 8, []),
    "gpt-moe-large": ("one-node", 8, []),
    "gpt-moe-xl": ("one-node", 8, []),
    "mixtral-8x7b": ("one-node", 8, []),
    "mixtral-8x22b": ("one-node", 8, []),
    "deepseek-v2-lite": ("one-node", 8, []),
    "deepseek-v3-like": ("one-node", 64, []),
    "qwen3-30b-a3b-like": ("many-nodes", 64, []),
}
"""For every model: a run for it, the number of ranks, and further words."""
TINY = ["--ampipe-config", "tiny", "quickstart"]


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
        if flag not in ("--help", config_files.CONFIG_FLAG):
            words.append(flag)
            if action.nargs != 0:
                several = {None: 1, "+": 2, "*": 2}.get(action.nargs, action.nargs)
                words += [accepted_value(action)] * several
    return words


def accepted_value(action: argparse.Action) -> str:
    """A valid value of the flag, as text."""
    choices = [getattr(choice, "name", str(choice)) for choice in action.choices or ()]
    for text in (*choices[-1:], "3", "0.5", "attn", "some text: # 1"):
        with contextlib.suppress(Exception):
            value = (action.type or str)(text)
            if action.choices is None or value in action.choices:
                return text
    raise AssertionError(f"no value for {action.option_strings}")


def main() -> None:
    """Run everything."""
    import tests.preloaded  # noqa: F401 - what commands import, once

    folder = Path(sys.argv[1])
    parser = flags.full_parser()

    def back(words: Sequence[str]) -> list[list[str]]:
        """Flags whose values change in a round trip through resolved.yaml."""
        resolved = config_files.resolve(words, parser)
        path = folder / "resolved.yaml"
        path.write_text(config_files.as_yaml(resolved))
        again = config_files.resolve(["--ampipe-config", str(path)], parser)
        before, after = vars(parser.parse_args(resolved.words)), vars(parser.parse_args(again.words))
        return [[name, str(before[name]), str(after[name])] for name in before if before[name] != after[name]]

    def launched(model: str) -> dict[str, Any]:
        run, ranks, words = LAUNCHES[model]
        common = ["--ampipe-config", model, run, "--tokenizer-type", "NullTokenizer", "--mock-data", *words]
        return command("config", "--ranks", str(ranks), *common)

    def example(words: Sequence[str]) -> dict[str, Any]:
        """Run an example, with a user's file if the example has one."""
        mine = folder / "my" / "run.yaml"
        mine.parent.mkdir(exist_ok=True)
        mine.write_text("mock-data: true\ntrain-iters: 100\n")
        with contextlib.chdir(folder):
            return command(*words)

    report = {
        "launches": {model: launched(model) for model in LAUNCHES},
        "back": {model: back(["--ampipe-config", model]) for model in LAUNCHES},
        "every_flag": back(every_flag(parser)),
        "num_flags": len(every_flag(parser)),
        "as_yaml": command("config", *TINY, "--lr", "0.5", "--ampipe-degree", "4"),
        "as_command": command("config", "--format", "command", *TINY, "--lr", "0.5"),
        "refused": command("config", *TINY, "--num-layers", "two"),
        "refused_launch": command("config", "--ranks", "2", *TINY, "--mock-data", "--global-batch-size", "3"),
        "examples": {shlex.join(words): example(words) for words in help_examples("config")},
        "help": parser.format_help(),
    }
    Path(os.environ["AMPIPE_TEST_REPORT"]).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
