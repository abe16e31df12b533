"""The arguments of ``ampipe bench``, and the checks of single arguments. Imports no torch.

Some are shared with ``ampipe profile``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_ampipe.errors import BadInput
from megatron_ampipe.schedule import (
    KEEP,
    SCHEDULE_NAMES,
    STRATEGIES,
    Exchange,
    parse_shares,
    parse_stack,
)
from megatron_ampipe.tools.measuring.link import Link, has_classes, parse_link, with_nodes
from megatron_ampipe.tools.measuring.variant import Cut
from megatron_ampipe.tools.whole_numbers import LARGEST_SEED, at_least

LAYERS_OF_TRAINING, ROUNDS = 2, 3
"""Of ``--end-to-end``, where they are not given."""
RANKS = 2
"""Where neither ``--ranks`` nor ``--nodes`` is given."""

_EPILOG = """\
examples:
  ampipe bench --grid cpu-small --link 200mbit --degrees 1,2,4,8 --json bench.json
      two ranks over a real 200 Mbit/s network between network namespaces (needs root)
  ampipe bench --grid cpu-small --link emulated:200mbit:50us
      the same without root: every all-to-all, of both layers, takes as much longer
  ampipe bench --grid paper --link emulated:20GB/s --json paper.json --plot paper
      on one GPU: the paper's cases; the other ranks are only pretended, and the output says so
  ampipe bench --link 100mbit --layers 4 --schedules ampipe --degrees 2,4 --json layers.json
      four layers: Megatron's one after the other, AMPipe's block by block, and AMPipe's under one schedule
  ampipe bench --link 200mbit --layers 8 --stack all --schedules ampipe --degrees 4 --memory keep,rebuild
      eight layers whose experts keep everything, and whose experts compute their inner tensors once more
  ampipe bench --link 100mbit --cases top2,many-top8 --degrees 4 --schedules ampipe --exchange rows,ranks
      each token sent for each of its experts, and once to each rank; with the bytes on the wire
  ampipe bench --link inter=50mbit,intra=400mbit --nodes 2 --ranks-per-node 2 --exchange rows,ranks
      a slow network between two nodes and a faster one within each
  ampipe bench --end-to-end --link 100mbit --schedules ampipe --degrees 4 --json training.json
      iterations per second of Megatron's whole training loop, and whether the losses are the same
  ampipe profile --link 100mbit --output mine.yaml && ampipe bench --link 100mbit --planned mine.yaml
      what ampipe plan would choose for each block, and schedules and degrees chosen by hand; with --layers
      also for layers that share a schedule
  ampipe bench --from bench.json --plot bench
      table and pictures of an earlier result
  ampipe bench --from bench.json --predict cluster.yaml
      what the planner predicts for each of its rows, next to what was measured

Before anything is timed, outputs and gradients of all layers are compared; a difference ends with code 4.
Close other work first: the columns '10-90 %' and the rows of degree 1, which are Megatron's layer again,
show how quiet the machine was.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ampipe bench``."""
    parser.description = (
        "Measure forward and backward of MoE blocks: Megatron's own layers and AMPipe's, in turns."
    )
    parser.epilog = _EPILOG
    add = parser.add_argument
    grid = "blocks to measure: a YAML file or a name in configs/bench"
    link = (
        "none; a rate (200mbit) for a real network between namespaces; inter=RATE,intra=RATE for one between "
        "nodes and one within each; or emulated:RATE[:LATENCY]"
    )
    nodes = "with --link inter=RATE,intra=RATE: how many nodes there are; ranks of a node follow one another"
    degrees = "numbers of chunks; 4:2 is 4 in the forward pass and 2 in the backward pass"
    shares = "also measure chunks of these shares of the sequence (0.4,0.3,0.3); can be repeated"
    schedules = f"of {', '.join(SCHEDULE_NAMES)}"
    timeout = "fail after so many seconds without an answer of any rank"
    end_to_end = (
        "train models of these blocks with Megatron's own loop instead, on CPUs: --repeats iterations after "
        "--warmup ones"
    )
    layers = (
        "consecutive blocks that are measured together, each with its own weights "
        f"(default: 1; {LAYERS_OF_TRAINING} with --end-to-end)"
    )
    stack = (
        "how many of these layers share a schedule, so that a chunk enters the next layer before the others "
        "have left this one: 1 is block by block; numbers, or 'all' (default: 1,all)"
    )
    memory = (
        f"what the experts keep for their backward pass: of {', '.join(STRATEGIES)}; several are compared"
    )
    exchange = (
        "how often a token is sent: rows (for each of its experts, as Megatron), ranks (once to each rank "
        "that has some of them), or both; ranks is measured in cases where it saves something"
    )
    rounds = f"trainings of each kind, in turns (default: {ROUNDS}; with --end-to-end only)"
    pretend = (
        "run one rank; what the others would send is made from what it sends. Only with an emulated link, "
        "and chosen automatically if there are fewer GPUs than ranks"
    )
    predict = "also show what the planner predicts from this cluster file (ampipe profile writes one)"
    planned = "also measure what the planner chooses for each case and stack on this cluster"
    chosen = " (default: %(default)s)"
    add("--grid", metavar="NAME|FILE", default="cpu-small", help=grid + chosen)
    add("--cases", metavar="NAME,NAME", help="only these cases of the grid (default: all)")
    add("--link", metavar="L", default="none", help=link + chosen)
    add("--degrees", metavar="N,N", default="1,2,4,8", help=degrees + chosen)
    add("--chunks", metavar="SHARE,SHARE", action="append", default=[], help=shares)
    add("--planned", metavar="CLUSTER", help=planned)
    add("--schedules", metavar="S,S", default="moe-only,ampipe", help=schedules + chosen)
    add(
        "--ranks",
        metavar="N",
        type=at_least(1),
        help=f"expert-parallel ranks (default: {RANKS}, or those of all nodes)",
    )
    add("--nodes", metavar="N", type=at_least(2), help=nodes)
    add("--ranks-per-node", metavar="N", type=at_least(2), help="ranks of a node, with --nodes")
    add("--repeats", metavar="N", type=at_least(1), default=10, help="timed passes of each layer" + chosen)
    add("--warmup", metavar="N", type=at_least(0), default=2, help="passes before those" + chosen)
    add(
        "--seed",
        metavar="N",
        type=at_least(0, at_most=LARGEST_SEED),
        default=1,
        help="of weights and inputs" + chosen,
    )
    add("--timeout", metavar="S", type=at_least(1), default=300, help=timeout + chosen)
    add("--pretend-peers", action="store_true", help=pretend)
    add("--end-to-end", action="store_true", help=end_to_end)
    add("--layers", metavar="N", type=at_least(1), help=layers)
    add("--stack", metavar="N,N", help=stack)
    add("--memory", metavar="M,M", default=KEEP, help=memory + chosen)
    add("--exchange", metavar="E,E", default="rows", help=exchange + chosen)
    add("--rounds", metavar="N", type=at_least(1), help=rounds)
    add("--json", metavar="FILE", type=Path, help="write every sample and figure, versions and hardware")
    add("--plot", metavar="PREFIX", type=Path, help="write PREFIX-by-case.svg, .png and others")
    add("--predict", metavar="FILE", help=predict)
    add("--from", metavar="FILE", type=Path, dest="source", help="show and draw this result; measure nothing")


def cuts(degrees: str, chunks: Sequence[str]) -> tuple[Cut, ...]:
    """The values of ``--degrees`` and ``--chunks``, each once."""
    found = [_cut(word, degrees) for word in degrees.split(",")]
    for text in chunks:
        shares = parse_shares(text, flag="--chunks")
        found.append(Cut.of(len(shares), shares=shares))
    return tuple(dict.fromkeys(found))


def _cut(word: str, text: str) -> Cut:
    """One word of ``--degrees``: ``4``, or ``4:2``."""
    parts = word.split(":")
    if len(parts) > 2 or not all(map(_is_number, parts)):
        raise BadInput(
            "--degrees",
            text or "(empty)",
            rule="is not a list of whole numbers of at least 1",
            remedy="Use --degrees 1,2,4,8, or 4:2 for a backward pass of degree 2.",
        )
    forward, backward = int(parts[0]), int(parts[-1])
    if max(forward, backward) % min(forward, backward):
        raise BadInput(
            "--degrees", word, rule="one of the two must divide the other", remedy="Use for example 4:2."
        )
    return Cut(forward, backward)


def schedules(text: str) -> tuple[str, ...]:
    """The value of ``--schedules``, each once."""
    words = text.split(",")
    unknown = [word for word in words if word not in SCHEDULE_NAMES]
    if unknown:
        raise BadInput(
            "--schedules",
            unknown[0] or "(empty)",
            rule=f"is not one of {', '.join(SCHEDULE_NAMES)}",
            remedy="Use --schedules moe-only,ampipe.",
        )
    return tuple(dict.fromkeys(words))


def memories(text: str) -> tuple[str, ...]:
    """The value of ``--memory``, each once."""
    words = text.split(",")
    unknown = [word for word in words if word not in STRATEGIES]
    if unknown:
        raise BadInput(
            "--memory",
            unknown[0] or "(empty)",
            rule=f"is not one of {', '.join(STRATEGIES)}",
            remedy="Use --memory keep,rebuild.",
        )
    return tuple(dict.fromkeys(words))


def layers(arguments: argparse.Namespace) -> int:
    """The value of ``--layers``, or what it is without."""
    found: int | None = arguments.layers
    return found or (LAYERS_OF_TRAINING if arguments.end_to_end else 1)


def stacks(text: str | None, *, layers: int) -> tuple[int, ...]:
    """The value of ``--stack``, each once, ``all`` as a number.

    Args:
        text: What the user wrote; block by block and all layers together if None.
        layers: How many layers there are.

    Raises:
        BadInput: a word is no number of layers, or there are not as many layers.
    """
    found = []
    for word in (text if text is not None else "1,all").split(","):
        size = parse_stack(word, flag="--stack") or layers
        if size > layers:
            raise BadInput(
                "--stack",
                word,
                rule=f"is above the number of layers ({layers}), which cannot share a schedule with others",
                remedy=f"Use --layers {size}, or --stack all.",
            )
        found.append(size)
    return tuple(dict.fromkeys(found))


def exchanges(text: str) -> tuple[Exchange, ...]:
    """The value of ``--exchange``, each once.

    Raises:
        BadInput: a word is no exchange.
    """
    try:
        return tuple(dict.fromkeys(map(Exchange, text.split(","))))
    except ValueError:
        raise BadInput(
            "--exchange",
            text or "(empty)",
            rule=f"is not a list of {', '.join(Exchange)}",
            remedy="Use --exchange rows,ranks.",
        ) from None


def link_of(arguments: argparse.Namespace) -> Link:
    """The value of ``--link``, with that of ``--ranks-per-node``.

    Raises:
        BadInput: it is not a link, or the flags about nodes do not go together with it.
    """
    text = arguments.link
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


def ranks(arguments: argparse.Namespace) -> int:
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


def _is_number(word: str) -> bool:
    """Whether it is a whole number of at least 1; Python does not read one of thousands of digits."""
    return word.isascii() and word.isdecimal() and len(word) < 10 and int(word) > 0


def check_training(arguments: argparse.Namespace, link: Link) -> None:
    """What a flag needs or excludes, with and without ``--end-to-end``.

    Raises:
        BadInput: a flag could have no effect, or cannot be honoured.
    """
    if not arguments.end_to_end:
        if arguments.rounds is not None:
            rule = "belongs to --end-to-end: without it, nothing is trained"
            remedy = "Add --end-to-end, or leave --rounds out."
            raise BadInput("--rounds", arguments.rounds, rule=rule, remedy=remedy)
        return
    if link.emulated or arguments.pretend_peers:
        flag, value = ("--link", link.text) if link.emulated else ("--pretend-peers", "")
        raise BadInput(
            flag,
            value,
            rule="a training needs real ranks: what it learns depends on every token that arrives, and an "
            "emulated link would not slow its other collectives",
            remedy="Use --link 200mbit, or --link none.",
        )
    for flag, value in (
        ("--plot", arguments.plot),
        ("--from", arguments.source),
        ("--predict", arguments.predict),
        ("--planned", arguments.planned),
    ):
        if value is not None:
            rule = "works with results of blocks, not with --end-to-end"
            raise BadInput(flag, value, rule=rule, remedy=f"Leave {flag} out; --json holds every sample.")
