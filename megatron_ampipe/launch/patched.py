"""What the patches in ``patches/`` call from inside a Megatron-LM tree: one function per inserted spot.

This module holds the session of the one run that a process makes, and ends the process with our message where
the run is refused. Where one of our launchers was used, it does all this itself, and these functions pass on
what they are given. Nothing here replaces a GPU.
"""

import argparse
import atexit
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from megatron_ampipe.errors import AMPipeError
from megatron_ampipe.launch import flags
from megatron_ampipe.launch.ending import end_with

_session: Any = None


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add AMPipe's flags; called in ``parse_args``, before it parses."""
    if flags.is_launched:
        return parser
    if not any(word.startswith("--ampipe") for word in sys.argv):
        # What is wrong with a command line without AMPipe is Megatron's to say.
        return flags.add_arguments(parser)
    parser = _own_session().add_arguments(parser)
    for name in ("parse_args", "parse_known_args"):
        setattr(parser, name, _ending_the_process(getattr(parser, name)))
    return parser


def refuse_yaml(args: Any) -> None:
    """Refuse our flags next to a ``--yaml-cfg``, which replaces them; called at the end of ``parse_args``."""
    if not flags.is_launched:
        with _ended_with_message():
            _own_session().check_parsed(args)


def accept(args: Any) -> None:
    """Check the arguments and print the start-up table; called at the end of ``validate_args``."""
    if flags.is_launched:
        return
    from megatron_ampipe import compat

    with _ended_with_message():
        compat.require_peers()
        _own_session().accept(args)
    # The training loop does not call AMPipe at its end, so the trace is written here; also after a failure.
    atexit.register(_own_session().end)


def layer_spec(spec: Any) -> Any:
    """The model's layer specification with its MoE layers pipelined; called in ``GPTModel.__init__``."""
    return spec if _session is None else _session.pipelined(spec)


def stack_spec(spec: Any) -> Any:
    """A hybrid model's stack with its attention-MoE pairs pipelined; called in ``HybridModel.__init__``."""
    return spec if _session is None else _session.pipelined(spec, is_stack=True)


def forward_step(step: Any) -> Any:
    """The forward step, with the hooks of the run; called in ``pretrain``."""
    if flags.is_launched:
        return step
    with _ended_with_message():
        return _ending_the_process(_own_session().hooked(step))


def _own_session() -> Any:
    """The session of this process."""
    global _session
    if _session is None:
        from megatron_ampipe.launch.session import TrainingSession

        _session = TrainingSession(sys.argv[1:], script=sys.argv[0], is_patch=True)
    return _session


@contextlib.contextmanager
def _ended_with_message() -> Iterator[None]:
    """End the process with the message and exit code of AMPipe's error."""
    try:
        yield
    except AMPipeError as error:
        sys.exit(end_with(error))


def _ending_the_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Likewise for every call of a function."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with _ended_with_message():
            return function(*args, **kwargs)

    return called
