"""The ``--ampipe-*`` flags: how they are parsed, and what they resolve to. Called by :mod:`.pretrain`."""

from __future__ import annotations

import argparse

from megatron_ampipe.config import CAPACITY_SCOPES, SCHEDULE_NAMES, TRACED_ITERATIONS, AMPipeConfig
from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch.settings import CONFIG_FLAG


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
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
        help="YAML files of settings, or names of ours such as mixtral-8x7b: Megatron's flags without the "
        "dashes in front, AMPipe's in a section 'ampipe:'; later files win over earlier ones, and the "
        "command line over all",
    )
    group.add_argument(
        "--ampipe-degree",
        type=int,
        default=1,
        metavar="N",
        help="number of chunks the sequence is cut into; 4 is a good first try, 1 builds Megatron's own "
        "layers (default: 1)",
    )
    group.add_argument(
        "--ampipe-schedule",
        choices=SCHEDULE_NAMES,
        default=None,
        help="order of the stages: ampipe overlaps communication with attention and experts, moe-only with "
        "experts alone, sequential not at all (default: ampipe)",
    )
    group.add_argument(
        "--ampipe-capacity-scope",
        choices=CAPACITY_SCOPES,
        default=None,
        help="tokens over which an expert's capacity counts: the whole sequence drops the tokens that a "
        "stock run drops; chunk gives every chunk its share, which is another function, and the only way "
        "to drop by probability (default: sequence)",
    )
    group.add_argument(
        "--ampipe-trace-dir",
        default=None,
        metavar="DIR",
        help=f"record when every stage of the last {TRACED_ITERATIONS} iterations ran, one Chrome/Perfetto "
        "trace per rank in DIR; 'ampipe draw DIR' makes a picture of it",
    )
    return parser


def config_from_args(args: argparse.Namespace) -> AMPipeConfig:
    """What the flags resolve to.

    Raises:
        BadInput: a value is wrong, or a flag could have no effect.
    """
    # Megatron puts what such a file holds in place of what was parsed, before or after this is called.
    if not hasattr(args, "ampipe_degree") or getattr(args, "yaml_cfg", None) is not None:
        raise BadInput(
            "--yaml-cfg",
            getattr(args, "yaml_cfg", ""),
            rule="replaces every flag, those of AMPipe included",
            remedy=f"Give the settings as flags, or in a file of {CONFIG_FLAG}.",
        )
    if args.ampipe_config is not None:
        raise BadInput(
            CONFIG_FLAG,
            " ".join(args.ampipe_config),
            rule="this launch parses flags without reading files first",
            remedy="Launch with -m megatron_ampipe.pretrain_gpt, or give the flags that 'ampipe config "
            f"--format command {CONFIG_FLAG} ...' prints.",
        )
    config = AMPipeConfig(
        degree=args.ampipe_degree,
        schedule=args.ampipe_schedule or "ampipe",
        capacity_scope=args.ampipe_capacity_scope or "sequence",
        trace_dir=args.ampipe_trace_dir,
    )
    if config.degree == 1:
        for flag, value in (
            ("--ampipe-schedule", args.ampipe_schedule),
            ("--ampipe-capacity-scope", args.ampipe_capacity_scope),
            ("--ampipe-trace-dir", args.ampipe_trace_dir),
        ):
            if value is not None:
                raise BadInput(
                    flag,
                    value,
                    rule="has no effect at --ampipe-degree 1, which builds Megatron's own layers",
                    remedy=f"Add --ampipe-degree 4, or leave {flag} out.",
                )
    return config
