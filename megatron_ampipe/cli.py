"""The ``ampipe`` command: runs a sub-command, and reports an error as one line of text and an exit code.

Each sub-command is a module of :mod:`megatron_ampipe.tools` with ``EPILOG``, the end of its help,
``add_arguments(parser)`` and ``run(arguments) -> int``. Only the module of the requested sub-command is
imported, so ``ampipe draw --help`` needs neither torch nor Megatron.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from megatron_ampipe import __version__
from megatron_ampipe.errors import INTERRUPTED, AMPipeError, BadInput, EnvironmentMissing
from megatron_ampipe.files import outputs
from megatron_ampipe.tools import packages

BROKEN_PIPE = 141
"""Exit code for a closed standard output (128 + SIGPIPE), as when ``head`` stops reading."""

TOOLS = {
    "bench": "compare Megatron's layer with AMPipe's, over a link of a given rate",
    "config": "show and check the configuration that results from YAML files and flags",
    "data": "convert a directory of text files to a dataset that Megatron trains on",
    "doctor": "check an environment: packages, variables, ranks, and whether overlap happens",
    "draw": "draw the timeline that a run recorded: computation and communication of every stage",
    "gate": "check whether a router class for --ampipe-router works in chunks",
    "patch": "add AMPipe's flags to a Megatron-LM checkout, or remove them",
    "plan": "predict a model's blocks on a cluster, and choose degree, chunks and order of stages",
    "profile": "measure the operations of a block on these ranks, and write a cluster file",
    "routing": "show which experts a recorded training used, and what of it need not be sent",
    "sbatch": "write a SLURM job script for a training run, show it, and submit it",
}

_EPILOG = """\
examples:
  ampipe data --output data/stdlib          a small dataset, made from Python's standard library
  ampipe draw traces/ --output timeline     timeline.svg and timeline.png of a recorded run
  ampipe plan --model mixtral-8x7b --cluster dgx-h100      which degree to use, and why
  ampipe doctor                             is everything installed, and does overlap work here?

'ampipe COMMAND --help' explains one command.

exit codes: 0 success, 1 something is missing in the environment, 2 bad arguments or input, 3 failed while
running, 4 a check found a difference, 130 interrupted
"""


def build_parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """The parser of all sub-commands; adds arguments, and imports the module, for ``chosen`` only."""
    parser = argparse.ArgumentParser(
        prog="ampipe",
        description="Tools for AMPipe, which pipelines attention and MoE layers inside a transformer block.",
        epilog=_EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"megatron-ampipe {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in TOOLS.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name == chosen:
            tool = importlib.import_module(f"megatron_ampipe.tools.{name}_command")
            tool.add_arguments(command)
            command.epilog = tool.EPILOG
            command.set_defaults(run=tool.run, refuse=command.error)
    return parser


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse one command line.

    A tool that accepts training flags has ``training_flags`` among its defaults; all arguments that it does
    not define are stored there. For other tools an unknown argument is an error. Tools call ``refuse`` with a
    message where a combination of arguments is wrong; it ends the process as argparse does.
    """
    # Only flags without a value come before the sub-command, so it is the first known word.
    parser = build_parser(next((word for word in words if word in TOOLS), None))
    parsed, others = parser.parse_known_args(words)
    if hasattr(parsed, "training_flags"):
        parsed.training_flags = others
    elif others:
        remedy = "; write flags of Megatron and AMPipe after --" if hasattr(parsed, "flags") else ""
        parser.error(f"unrecognized arguments: {' '.join(others)}{remedy}")
    return parsed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line, that of the process when None, and return the exit code.

    Errors are printed to stderr, without a traceback.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words:
        build_parser(None).print_help(sys.stderr)
        return BadInput.exit_code
    try:
        parsed = parse(words)
        # Tools write the command line into their output files.
        parsed.command_line = outputs.shell_line(["ampipe", *words])
        code = int(parsed.run(parsed))
        sys.stdout.flush()
        return code
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    except AMPipeError as error:
        print("\n".join((f"ampipe: {error}", *getattr(error, "__notes__", ()))), file=sys.stderr)
        return error.exit_code
    except ImportError as error:
        if (error.name or "").startswith("megatron_ampipe"):
            raise
        remedy = "'ampipe doctor' says what is missing, and how to get it."
        if error.name in packages.PACKAGES:
            remedy = f"Run: {packages.INSTALL}"
        print(f"ampipe: {error}. {remedy}", file=sys.stderr)
        return EnvironmentMissing.exit_code
    except BrokenPipeError:
        # Otherwise the interpreter would write the rest of the buffer when it exits, and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt as interrupt:
        # A tool may have added a note that says where the finished part is.
        notes = getattr(interrupt, "__notes__", ["incomplete output was not saved under its final name"])
        print("ampipe: interrupted; " + "\n".join(notes), file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
