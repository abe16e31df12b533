"""The ``--ampipe-*`` flags: what each is called, takes and does. Called by :mod:`.command_line`.

:mod:`.resolve_flags` says what they resolve to together.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

from megatron_ampipe.config import AUTO, CAPACITY_SCOPES, GRAD_REDUCES, ROUTING_INTERVAL, TRACED_ITERATIONS
from megatron_ampipe.errors import BadInput
from megatron_ampipe.gate_names import ROUTER_SCOPES, SHIPPED_GATES
from megatron_ampipe.launch import connections
from megatron_ampipe.launch.resolve_flags import PlanReader, config_from_args
from megatron_ampipe.launch.settings import CONFIG_FLAG
from megatron_ampipe.plan.plan_file import Plan
from megatron_ampipe.schedule import SCHEDULE_NAMES, Exchange
from megatron_ampipe.switched_off_flags import LIFTS_ONE_CONNECTION, switch_off_overlaps
from megatron_ampipe.wire_names import SHIPPED_WIRES


def add_arguments(
    parser: argparse.ArgumentParser, *, read_plan: PlanReader = Plan.read
) -> argparse.ArgumentParser:
    """Add the ``ampipe`` argument group to Megatron's parser, and return the parser."""
    group = parser.add_argument_group(
        title="ampipe",
        description="Pipelining of attention and MoE inside every block: while the tokens of one chunk of "
        "the sequence travel between the experts, the attention and experts of other chunks compute.",
    )
    group.add_argument(
        CONFIG_FLAG,
        nargs="+",
        action="extend",
        metavar="FILE",
        help="YAML files of settings, or names of included ones such as mixtral-8x7b: Megatron's flags "
        "without the dashes in front, AMPipe's in a section 'ampipe:'; later files win over earlier ones, "
        "and the command line over all",
    )
    group.add_argument(
        "--ampipe-degree",
        type=_degree,
        default=None,
        metavar="N",
        help="number of chunks the sequence is cut into; 4 is a good first try, 1 builds Megatron's own "
        "layers (with --ampipe-exchange ranks, nodes or 2dh: AMPipe's, in one chunk), auto tries several in "
        "the first iterations and stays with the fastest (default: 1)",
    )
    group.add_argument(
        "--ampipe-backward-degree",
        type=int,
        default=None,
        metavar="N",
        help="degree of the backward pass, if it is to be another one; it divides --ampipe-degree or is "
        "divided by it (default: as --ampipe-degree)",
    )
    group.add_argument(
        "--ampipe-chunks",
        default=None,
        metavar="SHARE,SHARE",
        help="share of the sequence of every chunk, for example 0.4,0.3,0.3, in place of equal ones; implies "
        "the degree",
    )
    group.add_argument(
        "--ampipe-cluster",
        default=None,
        metavar="FILE",
        help="cluster file that 'ampipe profile' wrote, or the name of an included one: --ampipe-degree auto "
        "then plans at the start and tries nothing, and --ampipe-memory auto compares by its figures",
    )
    group.add_argument(
        "--ampipe-plan",
        default=None,
        metavar="FILE",
        help="plan that 'ampipe plan --output' wrote: degrees, chunks and order of the stages",
    )
    group.add_argument(
        "--ampipe-save-plan",
        default=None,
        metavar="FILE",
        help="write what --ampipe-degree auto chooses as a plan; a later run of the same command line finds "
        "the file and runs the plan in it, without trying again",
    )
    group.add_argument(
        "--ampipe-schedule",
        choices=SCHEDULE_NAMES,
        default=None,
        help="order of the stages: ampipe overlaps communication with attention and experts, moe-only with "
        "experts alone, sequential not at all. lancet is ampipe with weight gradients computed while the "
        "all-to-alls of the backward pass travel, which helps at degree 1 too. joined is ampipe with the "
        "weight gradients of all chunks at once, for --no-gradient-accumulation-fusion. Both need "
        "--transformer-impl local (default: ampipe)",
    )
    group.add_argument(
        "--ampipe-stack",
        default=None,
        metavar="N",
        help="how many consecutive layers share a schedule: the next layer then begins with its first chunk "
        "while the tokens of the last one's other chunks still travel. all: every layer of a pipeline stage; "
        "1: layer by layer, which --ampipe-cluster may also choose. Changes no result; the start-up table "
        "shows where layers cannot share one "
        "(default: all)",
    )
    group.add_argument(
        "--ampipe-memory",
        default=None,
        metavar="STRATEGY",
        help="what the experts keep for their backward pass: keep everything; rebuild computes their first "
        "product and activation once more instead, while tokens travel; redispatch also sends the tokens "
        "once more; offload copies all that they keep to host memory and back; S1 to S4 are those of "
        "MPipeMoE's table II (S1 is offload, S4 is redispatch); one for each chunk, as "
        "keep/rebuild/rebuild/rebuild; auto chooses for each chunk so that all fits into "
        "--ampipe-memory-budget, the fastest by the figures of --ampipe-cluster, without it what computes "
        "and sends least again. Changes no bit of any result (default: keep)",
    )
    group.add_argument(
        "--ampipe-memory-budget",
        default=None,
        metavar="SIZE",
        help="for --ampipe-memory auto: memory for the activations of the layers of a pipeline stage, such "
        "as 60GiB; a run for which no strategy fits stops at its start",
    )
    group.add_argument(
        "--ampipe-exchange",
        choices=[*map(str, Exchange), AUTO],
        default=None,
        help="how often a token is sent: rows sends it once for each of its experts, as Megatron does; ranks "
        "once to each rank that has some of them, which copies it and sends back the sum of their outputs: "
        "fewer bytes, the same result to rounding, also at --ampipe-degree 1; nodes once to each node that "
        "has some, where it is handed on over the faster links; 2dh sends every row of rows over these two "
        "hops: the same bytes between nodes in fewer messages. auto: what --ampipe-degree auto finds to be "
        "fastest (default: rows)",
    )
    group.add_argument(
        "--ampipe-ranks-per-node",
        type=int,
        default=None,
        metavar="N",
        help="for --ampipe-exchange nodes, 2dh or auto, and tensor-parallel experts and attention: how many "
        "consecutive ranks share the faster links "
        "(default: what torchrun says, LOCAL_WORLD_SIZE)",
    )
    group.add_argument(
        "--ampipe-grad-reduce",
        choices=GRAD_REDUCES,
        default=None,
        help="when the reductions of --overlap-grad-reduce start: stock, as soon as a bucket's last gradient "
        "is complete, while the next layer waits for its all-to-all; placed, after the last all-to-all of "
        "that layer's backward pass, while its attention computes, so that the two never share the network. "
        "Changes no bit of any gradient (default: stock)",
    )
    group.add_argument(
        "--ampipe-capacity-scope",
        choices=CAPACITY_SCOPES,
        default=None,
        help="tokens over which an expert's capacity counts: the whole sequence drops the tokens that a "
        "stock run drops; chunk gives every chunk its share, which is another function, but lets tokens "
        "that are dropped by probability leave before attention has ended (default: sequence)",
    )
    group.add_argument(
        "--ampipe-router",
        default=None,
        metavar="NAME",
        help=f"router of every MoE layer, at any degree: {', '.join(SHIPPED_GATES)}, or a subclass of "
        "Megatron's TopKRouter as package.module:Class, which 'ampipe gate' checks (default: Megatron's own)",
    )
    group.add_argument(
        "--ampipe-router-scope",
        choices=ROUTER_SCOPES,
        default=None,
        help="for a router that compares tokens with each other, such as expert-choice or Megatron's "
        "sinkhorn: chunk has it compare the tokens of a chunk, which is another function for each degree, "
        "and lets later tokens of the same chunk influence earlier ones; sequence refuses it, but runs "
        "sinkhorn as a stock run does, after all attention (default: sequence)",
    )
    group.add_argument(
        "--ampipe-wire",
        default=None,
        metavar="NAME",
        help="what the rows of tokens and their gradients become while they travel: "
        f"{', '.join(SHIPPED_WIRES)} (with a scale per row), or a class that encodes and decodes, as "
        "package.module:Class. Fewer bytes, rounded numbers (default: they are sent as they are)",
    )
    group.add_argument(
        "--ampipe-condense",
        type=float,
        default=None,
        metavar="THRESHOLD",
        help="send similar tokens to an expert once: of the tokens of a sequence within a chunk, one whose "
        "cosine with an earlier one is at least THRESHOLD, for example 0.9, takes its result. Fewer rows, "
        "but another function than a stock run's (default: every token is sent)",
    )
    group.add_argument(
        "--ampipe-trace-dir",
        default=None,
        metavar="DIR",
        help=f"record when every stage of the last {TRACED_ITERATIONS} iterations ran, one Chrome/Perfetto "
        "trace per rank in DIR; 'ampipe draw DIR' makes a picture of it",
    )
    group.add_argument(
        "--ampipe-routing-dir",
        default=None,
        metavar="DIR",
        help="record who goes where: tokens for every expert, from every rank in every chunk, and how many "
        "are similar, at any degree; one file per recorded iteration in DIR, which 'ampipe routing' "
        "shows and 'ampipe plan --routing' plans with",
    )
    group.add_argument(
        "--ampipe-routing-interval",
        type=int,
        default=None,
        metavar="N",
        help="record every Nth iteration in --ampipe-routing-dir: its first micro-batch, on the ranks of "
        f"one expert-parallel group (default: {ROUTING_INTERVAL})",
    )
    _prepare_when_parsed(parser, read_plan)
    return parser


def _prepare_when_parsed(parser: argparse.ArgumentParser, read_plan: PlanReader) -> None:
    """For a pipelined run, switch off other overlaps as soon as flags are parsed, and choose the queues.

    The start-up table says so (:mod:`.attach`). Until then CUDA has not been initialised, and Megatron has
    not validated its arguments.
    """
    parse = parser.parse_known_args

    @functools.wraps(parse)
    def parsing(*args: Any, **kwargs: Any) -> Any:
        found, rest = parse(*args, **kwargs)
        found.ampipe_put_aside = ()
        if getattr(found, "yaml_cfg", None) is not None:
            return found, rest
        if found.ampipe_config is not None:
            # Known once the files are read, after torch is imported, which may initialise CUDA.
            connections.set_default()
            return found, rest
        try:
            is_pipelined = config_from_args(found, read_plan=read_plan).pipelined
        except BadInput:
            # Reported by whoever parses: not all of these errors are of single flags.
            return found, rest
        if is_pipelined:
            connections.set_default()
            # Plain text: Megatron writes its arguments into checkpoints, which stock Megatron reads.
            found.ampipe_put_aside = tuple(one.setting for one in switch_off_overlaps(found))
            setattr(found, LIFTS_ONE_CONNECTION, True)
        else:
            connections.unset_default()
        return found, rest

    parser.parse_known_args = parsing  # type: ignore[method-assign]


def _degree(text: str) -> int | str:
    if text == AUTO:
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"is neither a whole number nor {AUTO}: {text!r}") from None
