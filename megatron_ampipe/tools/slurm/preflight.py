"""Checks the flags of a training run before its job is submitted, so that it does not fail after the queue.

Runs Megatron's parser and validation as ``ampipe config`` does, in a separate process: the import takes
seconds and much memory, and a login node may kill it. If Megatron cannot be imported, AMPipe's flags are
parsed and the parallel sizes checked; a note says that Megatron's flags were not checked, and names those
that look misspelt.
Called by :mod:`megatron_ampipe.tools.sbatch_command`.

Run as a module, it is that process: reads the arguments and the number of ranks as JSON, and prints one line
of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_ampipe.errors import BadInput, EnvironmentMissing
from megatron_ampipe.files.spelling import meant
from megatron_ampipe.launch.config_files import OWN_SECTION, ParserFlags, read_entries

TIMEOUT_S = 180
_ANSWER = "ampipe-preflight "


def check(words: Sequence[str], *, num_ranks: int, files: Sequence[Path]) -> str | None:
    """Refuse a training run that could not start.

    Args:
        words: Its complete command line.
        num_ranks: Number of ranks of the run.
        files: The settings files in ``words``, in order.

    Returns:
        A sentence about what could not be checked; None if Megatron has checked everything.

    Raises:
        BadInput: a flag or a file is refused.
    """
    try:
        settings = _Settings(words, files)
        _check_layout(settings, num_ranks)
        reason = _ask_megatron(words, num_ranks)
        if reason is None:
            return None
        settings.check_own()
    except BadInput as error:
        remedy = f"{error.remedy} To submit it anyway, add --no-check."
        raise BadInput(error.name, error.value, rule=error.rule, remedy=remedy) from error
    return (
        f"flags of Megatron are not checked: {reason}. To check them, run in the environment of the job: "
        f"ampipe config --ranks {num_ranks} and the flags of the script{settings.misspelt()}"
    )


def _ask_megatron(words: Sequence[str], num_ranks: int) -> str | None:
    """Check the arguments with Megatron. Returns None, or the reason why Megatron could not be run."""
    # Without the rank variables, so that it does not join a job inside which this command runs.
    inherited = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK")}
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=json.dumps({"words": list(words), "num_ranks": num_ranks}),
            env=inherited,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"Megatron's check took more than {TIMEOUT_S} s here"
    answers = [line for line in done.stdout.splitlines() if line.startswith(_ANSWER)]
    if not answers:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return f"Megatron's check ended with {done.returncode} here ({last})"
    answer = json.loads(answers[-1].removeprefix(_ANSWER))
    if "refused" in answer:
        raise BadInput(**answer["refused"])
    missing: str | None = answer.get("missing")
    return missing


def _check_layout(settings: _Settings, num_ranks: int) -> None:
    """Check the parallel sizes; messages name the flags."""
    experts, expert_parallel = settings.number("num-experts"), settings.number("expert-model-parallel-size")
    if experts and expert_parallel and experts % expert_parallel:
        raise BadInput(
            "--expert-model-parallel-size",
            expert_parallel,
            rule=f"does not divide the {experts} experts of --num-experts",
            remedy=f"Use for example {max(n for n in range(1, expert_parallel) if experts % n == 0)}.",
        )
    sizes = {
        flag: settings.number(flag) or 1
        for flag in ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size")
    }
    dense = sizes["tensor-model-parallel-size"] * sizes["pipeline-model-parallel-size"]
    tensor = settings.number("expert-tensor-parallel-size") or sizes["tensor-model-parallel-size"]
    routed = tensor * (expert_parallel or 1) * sizes["pipeline-model-parallel-size"]
    for product, of in (
        (dense * sizes["context-parallel-size"], "tensor, pipeline and context parallel sizes"),
        (routed, "tensor parallel size of the experts, expert and pipeline parallel sizes"),
    ):
        if product and num_ranks % product:
            raise BadInput(
                "--nodes times --gpus-per-node",
                num_ranks,
                rule=f"is not a multiple of {product}, the product of the {of}",
                remedy="Use more nodes, or reduce one of these sizes.",
            )


class _Settings:
    """The settings in files and on the command line, as text."""

    def __init__(self, words: Sequence[str], files: Sequence[Path]) -> None:
        self._entries = [entry for path in files for entry in read_entries(path)]
        self._groups: list[list[str]] = []
        for word in words:
            if word.startswith("--") or not self._groups:
                self._groups.append([])
            self._groups[-1].append(word)

    def number(self, flag: str) -> int | None:
        """The integer value of a flag, the last one if set several times; None if unset or not an integer."""
        found: object = None
        for entry in self._entries:
            if entry.key == flag and not entry.section:
                found = entry.value
        for name, *values in self._groups:
            plain, equals, attached = name.partition("=")
            if plain == f"--{flag}":
                found = attached if equals else (values or [""])[0]
        return int(found) if isinstance(found, str) and found.isdecimal() else None

    def check_own(self) -> None:
        """Refuse what AMPipe's parser refuses, in the files and on the command line."""
        # Imported here because it imports the planner, which nothing else in this module needs.
        from megatron_ampipe.launch.failures import report_parser_errors
        from megatron_ampipe.launch.flags import add_arguments

        parser = add_arguments(argparse.ArgumentParser(allow_abbrev=False, add_help=False))
        flags = ParserFlags(parser)
        for entry in self._entries:
            if entry.section:
                flags.words_of(entry, flags.flag_of(entry))
        report_parser_errors(parser)
        own = (group for group in self._groups if group[0].startswith(f"--{OWN_SECTION}-"))
        parser.parse_args([word for group in own for word in group])

    def misspelt(self) -> str:
        """The flags that are probably meant to be others, as sentences that follow another one."""
        from megatron_ampipe.plan.model_file import SIZE_FLAGS

        found = [(place, key, meant(key, SIZE_FLAGS)) for place, key in self._names()]
        return "".join(f". {place} {key}: did you mean {near}?" for place, key, near in found if near)

    def _names(self) -> Iterator[tuple[str, str]]:
        """Where each flag of Megatron is set, and its name."""
        yield from ((f"{entry.place}:", entry.key) for entry in self._entries if not entry.section)
        yield from (("flag", group[0].partition("=")[0]) for group in self._groups)


def main() -> None:
    """Check the arguments on standard input with Megatron, and print the result."""
    asked = json.load(sys.stdin)
    answer: dict[str, object] = {}
    # Some libraries print to standard output when they are imported.
    with contextlib.redirect_stdout(sys.stderr):
        from megatron_ampipe.tools.launch_check import check_launch_flags

        try:
            check_launch_flags(asked["words"], num_ranks=asked["num_ranks"])
        except BadInput as error:
            said = {"name": error.name, "rule": error.rule, "remedy": error.remedy}
            answer["refused"] = said | {"value": str(error.value)}
        except EnvironmentMissing as error:
            answer["missing"] = str(error).partition(" Run: ")[0].rstrip(".")
    print(_ANSWER + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
