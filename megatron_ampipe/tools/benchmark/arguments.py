"""The arguments of ``ampipe bench``: what each is called, takes and does. Imports no torch.

:mod:`.argument_values` reads and checks them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_ampipe.block.named_values import SHIPPED_WIRES
from megatron_ampipe.schedule import KEEP, PAPER_NAMES, SCHEDULE_NAMES, STRATEGIES
from megatron_ampipe.tools.benchmark.argument_values import LAYERS_OF_TRAINING, ROUNDS, UNCHANGED
from megatron_ampipe.tools.measuring.link_arguments import add_link_arguments
from megatron_ampipe.tools.whole_numbers import LARGEST_SEED, at_least

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
Close other work first: the row 'control', Megatron's layer measured a second time, shows how quiet the
machine was. A speedup that is nearer to 1 than its spread is marked as no difference seen.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ampipe bench``."""
    parser.description = (
        "Measure forward and backward of MoE blocks: Megatron's own layers and AMPipe's, in turns."
    )
    parser.epilog = _EPILOG
    add = parser.add_argument
    grid = "blocks to measure: a YAML file or a name in configs/bench"
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
        f"what the experts keep for their backward pass: of {', '.join((*STRATEGIES, *PAPER_NAMES))}, or one "
        "for each chunk (keep/rebuild/rebuild/rebuild); several are compared"
    )
    exchange = (
        "how the all-to-all groups copies of a token: rows (one per expert, as Megatron), ranks (one per "
        "rank with some of them), nodes (one per node, with --nodes), several of these, or auto for all; "
        "each is measured in cases where it saves something"
    )
    wire = (
        f"how rows are cast for the transfer: {UNCHANGED}, {', '.join(SHIPPED_WIRES)} or a class; several "
        "are compared, their numbers with those of Megatron's layers"
    )
    rounds = f"trainings of each kind, in turns (default: {ROUNDS}; with --end-to-end only)"
    gloo = (
        "also measure Megatron's layers with gloo's own all-to-all, in place of the one that Megatron's and "
        "AMPipe's layers share on a CPU (stock-gloo)"
    )
    pretend = (
        "run one rank; what the others would send is made from what it sends. Only with an emulated link, "
        "and chosen automatically if there are fewer GPUs than ranks"
    )
    samples = "write every sample and figure, versions and hardware, whenever a case is finished"
    predict = "also show what the planner predicts from this cluster file (ampipe profile writes one)"
    planned = "also measure what the planner chooses for each case and stack on this cluster"
    chosen = " (default: %(default)s)"
    add("--grid", metavar="NAME|FILE", default="cpu-small", help=grid + chosen)
    add("--cases", metavar="NAME,NAME", help="only these cases of the grid (default: all)")
    add_link_arguments(parser, fewest_ranks=1)
    add("--degrees", metavar="N,N", default="1,2,4,8", help=degrees + chosen)
    add("--chunks", metavar="SHARE,SHARE", action="append", default=[], help=shares)
    add("--planned", metavar="CLUSTER", help=planned)
    add("--schedules", metavar="S,S", default="moe-only,ampipe", help=schedules + chosen)
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
    add("--wire", metavar="W,W", default=UNCHANGED, help=wire + chosen)
    add("--gloo-all-to-all", action="store_true", help=gloo)
    add("--rounds", metavar="N", type=at_least(1), help=rounds)
    add("--json", metavar="FILE", type=Path, help=samples)
    add("--plot", metavar="PREFIX", type=Path, help="write PREFIX-by-case.svg, .png and others")
    add("--predict", metavar="FILE", help=predict)
    add("--from", metavar="FILE", type=Path, dest="source", help="show and draw this result; measure nothing")
