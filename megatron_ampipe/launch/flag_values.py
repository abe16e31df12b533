"""Values of Megatron's flags that no run can have, at any degree, and that Megatron accepts or misnames.

What AMPipe does not run is in :mod:`.refusals`. Imports neither torch nor Megatron.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from megatron_ampipe.errors import BadInput

_RANGES = {
    (1, None): """
        train-iters train-samples num-layers hidden-size ffn-hidden-size num-attention-heads kv-channels
        num-query-groups seq-length max-position-embeddings vocab-size make-vocab-size-divisible-by
        moe-router-topk moe-ffn-hidden-size moe-shared-expert-intermediate-size moe-router-num-groups
        moe-router-group-topk kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim
        tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size
        expert-model-parallel-size expert-tensor-parallel-size num-layers-per-virtual-pipeline-stage
        micro-batch-size global-batch-size eval-micro-batch-size eval-global-batch-size log-interval
        tensorboard-log-interval eval-interval save-interval recompute-num-layers
        distributed-timeout-minutes lr-decay-iters lr-decay-samples
    """,
    (0, None): """
        num-experts mtp-num-layers eval-iters exit-interval lr min-lr lr-warmup-iters lr-warmup-samples
        lr-warmup-init weight-decay clip-grad init-method-std adam-eps num-workers
    """,
    (0, 1): "attention-dropout hidden-dropout lr-warmup-fraction adam-beta1 adam-beta2 rotary-percent",
}
RANGES = {f"--{name}": limits for limits, names in _RANGES.items() for name in names.split()}
"""The least and the largest number of each flag; None for no bound."""
CP_COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")


def refuse_values(arguments: Any) -> None:
    """Check parsed arguments, defaults included.

    Args:
        arguments: An ``argparse.Namespace`` of Megatron's flags; those that are absent are not looked at.

    Raises:
        BadInput: for the first value that no run can have.
    """
    for flag, (least, most) in RANGES.items():
        value = getattr(arguments, flag.removeprefix("--").replace("-", "_"), None)
        # A custom script may use the name for another type.
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not math.isfinite(value) or value < least or value > (math.inf if most is None else most):
            rule = f"must be at least {least}" if most is None else f"must be between {least} and {most}"
            remedy = f"Use {least} or more, or leave it out." if most is None else "Use for example 0.1."
            raise BadInput(flag, f"{value:g}", rule=rule, remedy=remedy)
    for setting, shown, rule, remedy in _conflicts(arguments):
        raise BadInput(setting, shown, rule=rule, remedy=remedy)


def _conflicts(arguments: Any) -> Iterator[tuple[str, object, str, str]]:
    """Flag, value, rule and remedy of what no run can have together."""

    def of(name: str) -> Any:
        return getattr(arguments, name, None)

    comm_types = of("cp_comm_type")
    for kind in comm_types if isinstance(comm_types, list) else [comm_types]:
        if (of("context_parallel_size") or 1) > 1 and kind not in (None, *CP_COMM_TYPES):
            rule = "there is no such exchange of keys and values"
            yield "--cp-comm-type", kind, rule, f"Use one of: {', '.join(CP_COMM_TYPES)}."
    remedy = "Name a folder, or leave it out."
    if of("load") == "":
        yield "--load", "(empty)", "is empty, so that a run would start from the beginning", remedy
    if of("save") == "":
        yield "--save", "(empty)", "is empty, so that nothing would be saved", remedy
    if of("save") and of("save_interval") is None:
        rule = "with --save, Megatron needs to know how often"
        yield "--save-interval", "(not given)", rule, "Add --save-interval 1000, or leave --save out."
    if of("wandb_project") and not (of("save") or of("wandb_save_dir")):
        rule = "Weights & Biases keeps its files in the folder of --save, and there is none"
        yield "--wandb-project", of("wandb_project"), rule, "Add --save DIR or --wandb-save-dir DIR."
    if of("wandb_project") and not of("wandb_exp_name"):
        rule = "with --wandb-project, the run needs a name"
        yield "--wandb-exp-name", "(not given)", rule, "Add --wandb-exp-name NAME."
    pattern, layers = of("moe_layer_freq"), of("num_layers")
    if isinstance(pattern, list) and layers is not None and len(pattern) != layers:
        shown = f"of {len(pattern)} layers with --num-layers {layers}"
        rule = "the pattern must say of each layer whether it has experts"
        remedy = "Write one 0 or 1 for each layer, for example ([0]*1+[1]*11), or a number such as 2."
        yield "--moe-layer-freq", shown, rule, remedy


def check_required(arguments: Any) -> None:
    """Refuse what Megatron's own check accepts and its training loop then fails on.

    Args:
        arguments: Megatron's validated arguments.

    Raises:
        BadInput: A flag is missing that training cannot do without, or warm-up would not end.
    """
    if arguments.skip_train:
        return
    needed = {"train_iters": 1000, "eval_interval": 1000, "lr": 1e-4}
    for name, example in needed.items():
        samples = arguments.train_samples if name == "train_iters" else None
        if getattr(arguments, name) is None and not samples:
            flag = f"--{name.replace('_', '-')}"
            remedy = f"Give it, for example {flag} {example}."
            raise BadInput(flag, "(not given)", rule="training needs it", remedy=remedy)
    decay_iters = arguments.lr_decay_iters or arguments.train_iters
    warms_up = arguments.train_iters and arguments.lr_warmup_fraction is None
    if warms_up and arguments.lr_warmup_iters >= decay_iters:
        rule = f"is not less than the {decay_iters} iterations over which the learning rate changes"
        remedy = f"Use --lr-warmup-iters {decay_iters // 10}."
        raise BadInput("--lr-warmup-iters", arguments.lr_warmup_iters, rule=rule, remedy=remedy)
