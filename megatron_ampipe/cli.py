"""The ``ampipe`` command: picks the sub-command, and turns errors into a line of text and an exit code.

Does no work itself: each sub-command is a module of :mod:`megatron_ampipe.tools` with
``add_arguments(parser)`` and ``run(arguments) -> int``. Only the module of the sub-command that was asked
for is imported, so ``ampipe draw --help`` needs neither torch nor Megatron. Called by the console entry
point and by ``python -m megatron_ampipe.cli``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import select
import shlex
import sys
from collections.abc import Sequence

from megatron_ampipe import __version__
from megatron_ampipe.errors import AMPipeError, BadInput

INTERRUPTED = 130
BROKEN_PIPE = 141
"""As a shell says it of a program whose reader, such as ``head``, has had enough."""

TOOLS = {
    "bench": "measure Megatron's own layer against AMPipe's, over a link of a given rate",
    "config": "show and check the configuration that YAML files and flags make together",
    "data": "turn a directory of text files into a dataset that Megatron trains on",
    "doctor": "check an environment: packages, ranks, and whether overlap happens on this machine",
    "draw": "draw the timeline that a run recorded: what computed while what travelled",
    "patch": "put AMPipe's flags into a Megatron-LM checkout, or take them out",
    "plan": "predict a model's blocks on a cluster, and choose degree, chunks and order of stages",
    "profile": "measure what the operations of a block cost on these ranks, and write a cluster file",
    "sbatch": "write a SLURM job script for a training run, show it, and submit it",
}

_EPILOG = """\
examples:
  ampipe data --output data/stdlib          a dataset from Python's own source, to try things with
  ampipe draw traces/ --output timeline     timeline.svg and timeline.png of a recorded run
  ampipe bench --link 200mbit               Megatron's layer against AMPipe's over a slow network
  ampipe plan --model mixtral-8x7b --cluster dgx-h100      which degree, and why
  ampipe doctor                             is everything there, and does overlap happen here?
  ampipe config --ampipe-config mixtral-8x7b my-run.yaml   the settings these files make, checked
  ampipe patch check Megatron-LM            whether the patch for this checkout fits or is in it

'ampipe COMMAND --help' explains one command.

exit codes: 0 well, 1 something missing in the environment, 2 bad arguments or input, 3 failed while
running, 4 a check found a difference, 130 interrupted
"""


def build_parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """The parser of all sub-commands; only ``chosen`` gets its arguments, so only its module is imported."""
    parser = argparse.ArgumentParser(
        prog="ampipe",
        description="Tools around AMPipe, the pipelining of attention and MoE layers inside a block.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"megatron-ampipe {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in TOOLS.items():
        command = commands.add_parser(
            name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if name == chosen:
            tool = importlib.import_module(f"megatron_ampipe.tools.{name}_command")
            tool.add_arguments(command)
            command.set_defaults(run=tool.run)
    return parser


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse one command line.

    A tool that takes the flags of training (``training_flags`` among its defaults) receives there every word
    that is not its own; of the others such a word is an error.
    """
    # Only flags without a value come before the sub-command, so the first known word is it.
    parser = build_parser(next((word for word in words if word in TOOLS), None))
    parsed, others = parser.parse_known_args(words)
    if hasattr(parsed, "training_flags"):
        parsed.training_flags = others
    elif others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    return parsed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line.

    Args:
        arguments: The words after ``ampipe``; those of this process when None.

    Returns:
        The exit code. Errors have been printed to stderr, without a traceback.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words:
        build_parser(None).print_help(sys.stderr)
        return BadInput.exit_code
    try:
        parsed = parse(words)
        # For what a tool writes, which says how it was made.
        parsed.command_line = shlex.join(["ampipe", *words])
        code = int(parsed.run(parsed))
        sys.stdout.flush()
        return code
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    except AMPipeError as error:
        print(f"ampipe: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        if not _reader_has_gone():
            raise
        return BROKEN_PIPE
    except KeyboardInterrupt:
        print("ampipe: interrupted; nothing unfinished stands under a final name", file=sys.stderr)
        return INTERRUPTED


def _reader_has_gone() -> bool:
    """Whether it is standard output that nobody reads any more; then nothing more is written to it."""
    try:
        poll = select.poll()
        poll.register(sys.stdout, 0)
    except (AttributeError, OSError, ValueError):
        # No file, or a system without poll.
        return False
    if not poll.poll(0):
        return False
    # What is still in the buffer would be written when the interpreter ends, and fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


if __name__ == "__main__":
    sys.exit(main())
