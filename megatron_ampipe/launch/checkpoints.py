"""Whether a run can continue from the checkpoint that it names, before it starts.

What is checked: that there is one where one is asked for, that its files are whole, and that model and
learning rate are those that were saved. Called by :mod:`.session`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch.checkpoint_files import Saved, check_files, find_checkpoint

_SIZES = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "kv_channels",
    "num_query_groups",
    "ffn_hidden_size",
    "swiglu",
    "num_experts",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
)
"""Arguments that shapes of parameters follow from."""


def check_checkpoint(args: argparse.Namespace) -> None:
    """Refuse a run whose checkpoint cannot be loaded, or is of another model.

    Args:
        args: Megatron's validated arguments.

    Raises:
        BadInput: names the file or flag.
    """
    saved = _chosen(args)
    if saved is None:
        return
    check_files(saved)
    if not saved.is_distributed:
        return
    state = _common_state(saved)
    then = state.get("args")
    if then is None:
        return
    # Upcycling makes experts of a dense model.
    if not getattr(args, "moe_use_upcycling", False):
        _compare_sizes(saved, then, args)
    resumes = not (args.finetune or args.no_load_optim or args.skip_train or saved.path.name == "release")
    keeps = args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler
    if resumes and not keeps and "opt_param_scheduler" in state:
        _compare_schedules(saved, state["opt_param_scheduler"], then, args)


def _chosen(args: argparse.Namespace) -> Saved | None:
    """The checkpoint that the run would load."""
    step = getattr(args, "ckpt_step", None)
    pretrained = getattr(args, "pretrained_checkpoint", None)
    for flag, folder in (("--load", args.load), ("--pretrained-checkpoint", pretrained)):
        if folder is None:
            continue
        # Megatron itself checks object stores.
        if "://" in str(folder):
            return None
        if (saved := find_checkpoint(flag, Path(folder), step=step)) is not None:
            return saved
    if pretrained is not None:
        raise BadInput(
            "--pretrained-checkpoint",
            pretrained,
            rule="holds no checkpoint, and neither does the folder of --load",
            remedy="Name the folder that a run saved to.",
        )
    # A non-persistent checkpoint is stored elsewhere.
    if args.load is not None and args.exit_on_missing_checkpoint and not args.non_persistent_ckpt_type:
        raise BadInput(
            "--load",
            args.load,
            rule="holds no checkpoint, and --exit-on-missing-checkpoint asks for one",
            remedy="Name the folder that a run saved to, or leave --exit-on-missing-checkpoint out to start "
            "from the beginning.",
        )
    return None


def _common_state(saved: Saved) -> dict[str, Any]:
    """What all ranks saved identically: arguments, iteration, learning rate. Read by Megatron."""
    from megatron.core import dist_checkpointing

    try:
        state: dict[str, Any] = dist_checkpointing.load_common_state_dict(str(saved.path))
    except Exception as error:
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        raise saved.refuse(f"Megatron cannot read {saved.path} ({said})") from error
    return state


def _compare_sizes(saved: Saved, then: Any, args: argparse.Namespace) -> None:
    for name in _SIZES:
        # Layers of a hybrid model are counted in another way than those of the GPT model it may start from.
        if name == "num_layers" and getattr(args, "hybrid_layer_pattern", None):
            continue
        if not hasattr(then, name) or not hasattr(args, name):
            continue
        saved_value, value = getattr(then, name), getattr(args, name)
        # Without grouped queries there are as many groups as heads, whatever the flag says.
        if name == "num_query_groups" and not (then.group_query_attention and args.group_query_attention):
            continue
        if saved_value != value:
            flag = f"--{name.replace('_', '-')}"
            raise BadInput(
                flag,
                value if value is not None else "(not given)",
                rule=f"the checkpoint {saved.path} was saved with {saved_value}",
                remedy=_remedy(flag, saved_value),
            )


def _remedy(flag: str, saved_value: object) -> str:
    if isinstance(saved_value, bool) or saved_value is None:
        return f"{'Add' if saved_value else 'Leave out'} {flag}, or load another checkpoint."
    return f"Use {flag} {saved_value}, or load another checkpoint."


def _compare_schedules(saved: Saved, schedule: Any, then: Any, args: argparse.Namespace) -> None:
    """Megatron demands that the learning rate continues as it was planned, unless a flag says otherwise."""
    for flag, value, unit, saved_value in _schedules(schedule, then, args):
        if value != saved_value:
            raise BadInput(
                flag,
                value,
                rule=f"the learning rate of the checkpoint {saved.path} was planned with {saved_value}{unit}",
                remedy="Add --override-opt-param-scheduler to plan it again, or "
                "--use-checkpoint-opt-param-scheduler to keep the plan.",
            )


def _schedules(
    schedule: Any, then: Any, args: argparse.Namespace
) -> Iterator[tuple[str, object, str, object]]:
    """Flag, value, unit and saved value of what is compared."""
    if args.train_iters and not args.train_samples and (args.lr_decay_iters or then.lr_decay_iters):
        flag = "--lr-decay-iters" if args.lr_decay_iters else "--train-iters"
        steps = (args.lr_decay_iters or args.train_iters) * args.global_batch_size
        saved_steps = schedule.get("lr_decay_steps", steps)
        if steps != saved_steps and args.global_batch_size != then.global_batch_size:
            yield "--global-batch-size", args.global_batch_size, "", then.global_batch_size
        per_iteration = args.global_batch_size
        yield flag, steps // per_iteration, " iterations", saved_steps / per_iteration
    for flag, value, key in (
        ("--lr", args.lr, "max_lr"),
        ("--min-lr", args.min_lr, "min_lr"),
        ("--lr-decay-style", args.lr_decay_style, "lr_decay_style"),
    ):
        yield flag, value, "", schedule.get(key, value)
