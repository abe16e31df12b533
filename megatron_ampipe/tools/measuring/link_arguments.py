"""``--link`` with ``--nodes``, ``--ranks-per-node`` and ``--ranks``: declared, read and checked.

For the commands that start ranks over a link: ``ampipe bench`` and ``ampipe profile``. Imports no torch.
"""

from __future__ import annotations

import argparse

from megatron_ampipe.errors import BadInput
from megatron_ampipe.tools.measuring.link import Link, has_classes, parse_link, with_nodes
from megatron_ampipe.tools.whole_numbers import at_least

NO_LINK, RANKS = "none", 2
"""Where ``--link`` is not given, and where neither ``--ranks`` nor ``--nodes`` is."""

_LINK = (
    "none; a rate (200mbit) for a real network between namespaces; inter=RATE,intra=RATE for one between "
    "nodes and one within each; or emulated:RATE[:LATENCY]"
)
_NODES = "with --link inter=RATE,intra=RATE: how many nodes there are; ranks of a node follow one another"


def add_link_arguments(parser: argparse.ArgumentParser, *, fewest_ranks: int) -> None:
    """Declare the flags.

    Args:
        parser: Gets them.
        fewest_ranks: The smallest value of ``--ranks``.
    """
    add = parser.add_argument
    add("--link", metavar="L", help=f"{_LINK} (default: {NO_LINK})")
    add(
        "--ranks",
        metavar="N",
        type=at_least(fewest_ranks),
        help=f"expert-parallel ranks (default: {RANKS}, or those of all nodes)",
    )
    add("--nodes", metavar="N", type=at_least(2), help=_NODES)
    add("--ranks-per-node", metavar="N", type=at_least(2), help="ranks of a node, with --nodes")


def link_of(arguments: argparse.Namespace) -> Link:
    """The value of ``--link``, with that of ``--ranks-per-node``.

    Raises:
        BadInput: it is not a link, or the flags about nodes do not go together with it.
    """
    text = arguments.link or NO_LINK
    given = {"--nodes": arguments.nodes, "--ranks-per-node": arguments.ranks_per_node}
    if not has_classes(text):
        for flag, value in given.items():
            if value is not None:
                rule, remedy = f"has no effect with --link {text}", "Use --link inter=50mbit,intra=400mbit."
                raise BadInput(flag, value, rule=rule, remedy=remedy)
        return parse_link(text)
    for flag, value in given.items():
        if value is None:
            remedy = "Add for example --nodes 2 --ranks-per-node 2."
            raise BadInput("--link", text, rule=f"has two classes of links, and needs {flag}", remedy=remedy)
    return parse_link(with_nodes(text, ranks_per_node=arguments.ranks_per_node))


def num_ranks(arguments: argparse.Namespace) -> int:
    """The value of ``--ranks``, or how many there are without.

    Raises:
        BadInput: it is not the number of ranks of all nodes.
    """
    found: int = arguments.ranks or RANKS
    if arguments.nodes is None:
        return found
    of_nodes: int = arguments.nodes * arguments.ranks_per_node
    if arguments.ranks not in (None, of_nodes):
        rule = f"is not {arguments.nodes} nodes of {arguments.ranks_per_node} ranks"
        raise BadInput("--ranks", found, rule=rule, remedy=f"Leave it out: there are {of_nodes}.")
    return of_nodes
