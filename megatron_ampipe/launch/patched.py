"""What the patches in ``patches/`` call from inside a Megatron-LM tree: one function per inserted spot.

For people who want the flags in their own tree, without our launcher. Holds the state of the one run that a
process makes. Where one of our launchers is at work, it does all this itself, and these functions hand on
what they are given. Nothing here stands in for a GPU.
"""

import argparse
import atexit
import sys
from typing import Any

from megatron_ampipe.errors import AMPipeError, BadInput
from megatron_ampipe.launch import flags
from megatron_ampipe.launch.ending import end_with

_args: Any = None
_context: Any = None
_gives_way = False
_is_reached = False


def give_way() -> None:
    """Do nothing from now on. Called by our launchers, which work on a patched tree as on any other."""
    global _gives_way
    _gives_way = True


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags; called in ``parse_args``, before it parses."""
    return parser if _gives_way else flags.add_arguments(parser)


def accept(args: Any) -> None:
    """Check the arguments and print the start-up table; called at the end of ``validate_args``.

    Ends the process, with our message and exit code, where they are refused.
    """
    global _args, _context
    if _gives_way:
        return
    from megatron_ampipe import compat
    from megatron_ampipe.launch.attach import prepare
    from megatron_ampipe.launch.exit_signal import keep_from_children
    from megatron_ampipe.launch.trace import write_trace

    try:
        compat.require_peers()
        _args, _context = args, prepare(args, adjustments=[])
    except AMPipeError as error:
        sys.exit(end_with(error))
    keep_from_children(args)
    # The training loop has no place of ours to write it in; a run that fails leaves a trace as well.
    atexit.register(write_trace, _context)


def refuse_yaml(args: Any) -> None:
    """Refuse our flags beside a ``--yaml-cfg``, which replaces them; called at the end of ``parse_args``."""
    if _gives_way or hasattr(args, "ampipe_degree"):
        return
    if any(word.startswith("--ampipe") for word in sys.argv):
        try:
            flags.config_from_args(args)
        except BadInput as error:
            sys.exit(end_with(error))


def layer_spec(spec: Any) -> Any:
    """The model's layer specification with its MoE layers pipelined; called in ``GPTModel.__init__``."""
    global _is_reached
    if _context is None:
        return spec
    from megatron_ampipe.layers.spec import pipelined

    _is_reached = True
    return pipelined(spec, _context)


def forward_step(step: Any) -> Any:
    """The forward step, which tells the recorder its iteration; called in ``pretrain``."""
    if _gives_way:
        return step
    from megatron_ampipe.launch.trace import recorded_when_called

    return recorded_when_called(step, _settings)


def _settings() -> tuple[Any, Any]:
    """The context and the arguments, once the models are built."""
    if _context is not None and not _is_reached:
        sys.exit(
            end_with(
                BadInput(
                    "--ampipe-degree",
                    _context.config.degree,
                    rule="this script builds no GPT model of Megatron's, so nothing is pipelined",
                    remedy="Leave it out, or train with pretrain_gpt.py.",
                )
            )
        )
    return _context, _args
