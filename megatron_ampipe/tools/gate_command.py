"""``ampipe gate``: checks router classes for ``--ampipe-router``. Needs Megatron; builds one small router."""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings

from megatron_ampipe.block.named_values import SHIPPED_GATES
from megatron_ampipe.errors import DifferenceFound
from megatron_ampipe.files.inputs import at_least

_EPILOG = """\
examples:
  ampipe gate my_package.routers:MyRouter     a class that can be imported here
  ampipe gate cosine sigmoid                  gates that AMPipe ships
  ampipe gate mine:Router --experts 64 --topk 6

Checks on one process that the choice for a token depends on that token alone, that chunks give the result of
the whole sequence with all router losses, that every parameter has a gradient, and its mark for sequence
parallelism. docs/gates.md explains each. Exit code 4 if a check fails.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``ampipe gate``."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "names",
        nargs="+",
        metavar="CLASS",
        help=f"package.module:Class, or one of {', '.join(SHIPPED_GATES)}",
    )
    parser.add_argument("--experts", type=at_least(1), default=8, metavar="N", help="experts (default: 8)")
    parser.add_argument(
        "--topk", type=at_least(1), default=2, metavar="N", help="experts per token (default: 2)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Check every class, print what was found, and fail if a promise is not kept.

    Raises:
        BadInput: there is no such class.
        DifferenceFound: a check failed.
    """
    if arguments.topk > arguments.experts:
        arguments.refuse(f"--topk {arguments.topk} is above --experts {arguments.experts}")
    from megatron_ampipe.launch.flags import import_megatron

    # Some libraries print to standard output when they are imported.
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(sys.stderr):
        import_megatron()
    import torch.distributed as dist

    from megatron_ampipe.layers.gates import load_gate
    from megatron_ampipe.tools.gate_check import check_gate

    # Modules of the user are found as by "python -m".
    sys.path.insert(0, "")
    gates = {name: load_gate(name) for name in arguments.names}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    failed = []
    try:
        for name, gate in gates.items():
            print(name)
            for found in check_gate(gate, num_experts=arguments.experts, topk=arguments.topk):
                print(f"  {'ok' if found.holds else 'FAILED':6}  {found.name}: {found.text}")
                if not found.holds:
                    failed.append(name)
    finally:
        dist.destroy_process_group()
    if failed:
        raise DifferenceFound(f"{', '.join(dict.fromkeys(failed))}: a check failed, see above.")
    return 0
