"""Values of Megatron's flags that no run can have, at any degree, refused before Megatron fails at them.

Megatron finds some of them by accident (a division by zero), by a bare assertion, or not at all, and its
message then misleads. What AMPipe does not run is in :mod:`.refusals`. Imports neither torch nor Megatron;
called where a command line has been parsed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron_ampipe.errors import BadInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The numbers that a flag can have.

    Attributes:
        flags: Which.
        least: The smallest one.
        most: The largest one; None for no bound.
        remedy: What to write instead.
    """

    flags: tuple[str, ...]
    least: float
    most: float | None = None
    remedy: str

    @property
    def rule(self) -> str:
        """The rule, as a clause."""
        if self.most is None:
            return f"must be at least {self.least:g}"
        return f"must be between {self.least:g} and {self.most:g}"


RANGES: tuple[Range, ...] = (
    Range(
        flags=("--train-iters", "--train-samples"),
        least=1,
        remedy="Use for example 1000; to evaluate alone, add --skip-train.",
    ),
    Range(
        flags=(
            "--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads", "--kv-channels",
            "--num-query-groups", "--seq-length", "--max-position-embeddings", "--vocab-size",
            "--make-vocab-size-divisible-by",
        ),
        least=1,
        remedy="Give the size of the model, as its file in configs/models does.",
    ),
    Range(
        flags=(
            "--moe-router-topk", "--moe-ffn-hidden-size", "--moe-shared-expert-intermediate-size",
            "--moe-router-num-groups", "--moe-router-group-topk", "--kv-lora-rank", "--qk-head-dim",
            "--qk-pos-emb-head-dim", "--v-head-dim",
        ),
        least=1,
        remedy="Give the size of the model, or leave it out.",
    ),
    Range(flags=("--num-experts", "--mtp-num-layers"), least=0, remedy="Use 1 or more, or leave it out."),
    Range(
        flags=(
            "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size",
            "--expert-model-parallel-size", "--expert-tensor-parallel-size",
            "--num-layers-per-virtual-pipeline-stage",
        ),
        least=1,
        remedy="Use 1, or leave it out, for no such parallelism.",
    ),
    Range(
        flags=(
            "--micro-batch-size", "--global-batch-size", "--eval-micro-batch-size",
            "--eval-global-batch-size",
        ),
        least=1,
        remedy="Use 1 or more.",
    ),
    Range(
        flags=(
            "--log-interval", "--tensorboard-log-interval", "--eval-interval", "--save-interval",
            "--recompute-num-layers", "--distributed-timeout-minutes", "--lr-decay-iters",
            "--lr-decay-samples",
        ),
        least=1,
        remedy="Use 1 or more, or leave it out.",
    ),
    Range(
        flags=(
            "--eval-iters", "--exit-interval", "--lr", "--min-lr", "--lr-warmup-iters", "--lr-warmup-samples",
            "--lr-warmup-init", "--weight-decay", "--clip-grad", "--init-method-std",
            "--adam-eps", "--num-workers",
        ),
        least=0,
        remedy="Use 0 or more.",
    ),
    Range(
        flags=(
            "--attention-dropout", "--hidden-dropout", "--lr-warmup-fraction", "--adam-beta1", "--adam-beta2",
            "--rotary-percent",
        ),
        least=0,
        most=1,
        remedy="Use a share, for example 0.1.",
    ),
)  # fmt: skip
"""Numbers; each flag once."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """Settings that no run can have together.

    Attributes:
        setting: The flag to change.
        applies: Given the parsed arguments, the value that is shown, or None when all is well.
        rule: Why, as one clause.
        remedy: What to use instead.
    """

    setting: str
    applies: Callable[[Any], object]
    rule: str
    remedy: str


def _of(arguments: Any, name: str) -> Any:
    return getattr(arguments, name, None)


def _save_interval_missing(arguments: Any) -> object:
    wanted = _of(arguments, "save") is not None and _of(arguments, "save_interval") is None
    return "(not given)" if wanted else None


def _wandb_without_folder(arguments: Any) -> object:
    if _of(arguments, "save") or _of(arguments, "wandb_save_dir"):
        return None
    return _of(arguments, "wandb_project") or None


def _wandb_without_name(arguments: Any) -> object:
    named = _of(arguments, "wandb_exp_name") or not _of(arguments, "wandb_project")
    return None if named else "(not given)"


def _heads_do_not_divide(arguments: Any) -> object:
    hidden, heads = _of(arguments, "hidden_size"), _of(arguments, "num_attention_heads")
    if hidden is None or heads is None or _of(arguments, "kv_channels") is not None:
        return None
    return f"{heads} with --hidden-size {hidden}" if hidden % heads else None


def _positions_too_few(arguments: Any) -> object:
    length, positions = _of(arguments, "seq_length"), _of(arguments, "max_position_embeddings")
    if length is None or positions is None or positions >= length:
        return None
    return f"{positions} with --seq-length {length}"


def _empty(name: str) -> Callable[[Any], object]:
    return lambda arguments: "(empty)" if _of(arguments, name) == "" else None


def _layers_left_over(arguments: Any) -> object:
    pattern, layers = _of(arguments, "moe_layer_freq"), _of(arguments, "num_layers")
    if not isinstance(pattern, list) or layers is None or len(pattern) == layers:
        return None
    return f"of {len(pattern)} layers with --num-layers {layers}"


CP_COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")


def _unknown_comm_type(arguments: Any) -> object:
    chosen = _of(arguments, "cp_comm_type")
    if (_of(arguments, "context_parallel_size") or 1) == 1 or chosen is None:
        return None
    chosen = chosen if isinstance(chosen, list) else [chosen]
    return next((one for one in chosen if one not in CP_COMM_TYPES), None)


CONFLICTS: tuple[Conflict, ...] = (
    Conflict(
        "--cp-comm-type",
        _unknown_comm_type,
        "there is no such exchange of keys and values",
        f"Use one of: {', '.join(CP_COMM_TYPES)}.",
    ),
    Conflict(
        "--load",
        _empty("load"),
        "names nothing, so that a run would start from the beginning",
        "Name a folder, or leave it out.",
    ),
    Conflict(
        "--save",
        _empty("save"),
        "names nothing, so that nothing would be saved",
        "Name a folder, or leave it out.",
    ),
    Conflict(
        "--save-interval",
        _save_interval_missing,
        "with --save, Megatron needs to know how often",
        "Add --save-interval 1000, or leave --save out.",
    ),
    Conflict(
        "--wandb-project",
        _wandb_without_folder,
        "Weights & Biases keeps its files in the folder of --save, and there is none",
        "Add --save DIR or --wandb-save-dir DIR.",
    ),
    Conflict(
        "--wandb-exp-name",
        _wandb_without_name,
        "with --wandb-project, the run needs a name",
        "Add --wandb-exp-name NAME.",
    ),
    Conflict(
        "--num-attention-heads",
        _heads_do_not_divide,
        "does not divide it, and --kv-channels is not given",
        "Use a divisor of --hidden-size, or add --kv-channels 64.",
    ),
    Conflict(
        "--max-position-embeddings",
        _positions_too_few,
        "is less than the sequence has rows",
        "Use the value of --seq-length or more.",
    ),
    Conflict(
        "--moe-layer-freq",
        _layers_left_over,
        "the pattern must say of each layer whether it has experts",
        "Write one 0 or 1 for each layer, for example ([0]*1+[1]*11), or a number such as 2.",
    ),
)


def refuse_values(arguments: Any) -> None:
    """Check parsed arguments, defaults included, against the tables of this module.

    Args:
        arguments: An ``argparse.Namespace`` of Megatron's flags; those that are absent are not looked at.

    Raises:
        BadInput: for the first value that no run can have.
    """
    for one in RANGES:
        for flag in one.flags:
            for value in _numbers(getattr(arguments, flag.removeprefix("--").replace("-", "_"), None)):
                if (
                    not math.isfinite(value)
                    or value < one.least
                    or (one.most is not None and value > one.most)
                ):
                    rule = one.rule if math.isfinite(value) else "must be a number"
                    raise BadInput(flag, f"{value:g}", rule=rule, remedy=one.remedy)
    for conflict in CONFLICTS:
        shown = conflict.applies(arguments)
        if shown is not None:
            raise BadInput(conflict.setting, shown, rule=conflict.rule, remedy=conflict.remedy)


def _numbers(value: object) -> Iterator[float]:
    """The numbers of one flag; a custom script may use its name for another type."""
    for one in value if isinstance(value, list | tuple) else [value]:
        if isinstance(one, int | float) and not isinstance(one, bool):
            yield one
