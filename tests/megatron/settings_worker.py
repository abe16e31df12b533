"""Holds configurations against Megatron's real parser and its checks, in one process; reports JSON.

Run by :mod:`.test_settings` with a folder for files; ``AMPIPE_TEST_REPORT`` names the report.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_ampipe import cli
from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch import pretrain, settings
from tests.megatron.settings_cases import LAUNCHES, WRONG, WRONG_LAUNCHES


def outcome(act: Callable[[], object]) -> dict[str, Any]:
    """What came of it: a value that JSON holds, or the message of a refusal."""
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


def main() -> None:
    """Try every case."""
    folder = Path(sys.argv[1])
    pretrain.import_megatron()
    parser = pretrain.full_parser()

    def check(name: str) -> None:
        wrong = WRONG[name]
        words = list(wrong.words)
        if wrong.yaml is not None:
            path = folder / f"{name}.yaml"
            path.write_text(wrong.yaml)
            words = ["--ampipe-config", str(path), *words]
        resolved = settings.resolve(words, parser)
        pretrain.check_settings(resolved, parser)
        parser.parse_args(resolved.words)

    def back(words: list[str]) -> list[list[str]]:
        """Flags whose values the way through resolved.yaml changes."""
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

    tiny = ["--ampipe-config", "tiny", "quickstart"]
    report = {
        "wrong": {name: outcome(lambda name=name: check(name)) for name in WRONG},
        "launches": {model: launched(model) for model in LAUNCHES},
        "wrong_launches": {
            name: command("config", "--ranks", "2", *tiny, "--mock-data", *words)
            for name, (words, _) in WRONG_LAUNCHES.items()
        },
        "back": {model: outcome(lambda m=model: back(["--ampipe-config", m])) for model in LAUNCHES},
        "as_yaml": command("config", *tiny, "--lr", "0.5", "--ampipe-degree", "4"),
        "as_command": command("config", "--format", "command", *tiny, "--lr", "0.5"),
        "refused": command("config", *tiny, "--num-layers", "two"),
    }
    Path(os.environ["AMPIPE_TEST_REPORT"]).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
