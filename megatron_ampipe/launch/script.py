"""Runs a training script of a Megatron-LM checkout, unedited, with AMPipe's flags.

    torchrun ... -m megatron_ampipe.launch PATH/pretrain_gpt.py <its flags> --ampipe-degree 4

The script runs as ``__main__``, with its own folder first on the path, as when it is launched by hand: the
``megatron`` package next to it is the one that is imported. :mod:`.hooks` wraps the functions that it calls.
Called by ``python -m megatron_ampipe.launch``.
"""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_ampipe.errors import AMPipeError, BadInput
from megatron_ampipe.launch.ending import run_to_end
from megatron_ampipe.launch.failures import known_cause, raised_in, refuse_as_bad_input
from megatron_ampipe.launch.hooks import Hooks
from megatron_ampipe.launch.session import TrainingSession

USAGE = """\
usage: torchrun ... -m megatron_ampipe.launch PATH/pretrain_gpt.py FLAGS...

Runs a training script of a Megatron-LM checkout, unedited, with AMPipe's flags in addition to its own.

  PATH/pretrain_gpt.py   the script; the megatron package next to it is the one that is used
  FLAGS                  the script's own, and --ampipe-degree N and the like; after the script,
                         --help lists them all
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script, and return the exit code.

    Args:
        arguments: The script's path and its command line; those of the process when None.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return 0

    session = TrainingSession(words[1:], script="".join(words[:1]))

    def check() -> None:
        find_script(words)
        session.check_command_line()

    return run_to_end(check, lambda: run_script(find_script(words), session))


def find_script(words: Sequence[str]) -> Path:
    """The script that a command line names first.

    Raises:
        BadInput: There is none, or it is not there.
    """
    example = "Name it before all flags: -m megatron_ampipe.launch PATH/pretrain_gpt.py --num-layers ..."
    if not words or words[0].startswith("-"):
        found = words[0] if words else "(not given)"
        raise BadInput("script", found, rule="the first argument is the script to run", remedy=example)
    script = Path(words[0])
    if script.is_dir():
        raise BadInput(
            "script",
            script,
            rule="is a folder",
            remedy=f"Name the script in it: {script / 'pretrain_gpt.py'}.",
        )
    if not script.is_file():
        raise BadInput("script", script, rule="is not there", remedy="Check the path of the checkout.")
    return script


def run_script(script: Path, session: TrainingSession) -> int:
    """Run ``script`` in this process.

    Returns:
        The exit code that the script ended with.

    Raises:
        AMPipeError: Bad input, or something missing.
    """
    # In place of what "python -m" set, as if the script had been named on python's command line.
    sys.path[0] = str(script.resolve().parent)
    words = session.prepare_platform()
    hooks = Hooks(session)
    hooks.install()
    sys.argv = [str(script), *words]
    code = 0
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as stop:
        if (cause := known_cause(stop)) is not None:
            raise cause from stop
        code = _exit_code(stop)
    except Exception as error:
        # What Megatron objects to before it trains is bad input, as in our own entry.
        if hooks.training or isinstance(error, AMPipeError) or not raised_in("megatron", error):
            raise
        with refuse_as_bad_input():
            raise
    finally:
        session.end()
    if code == 0:
        hooks.require_reached()
    return code


def _exit_code(stop: SystemExit) -> int:
    """What Python itself makes of a ``SystemExit``."""
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    print(stop.code, file=sys.stderr)
    return 1
