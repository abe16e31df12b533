"""Opens the checkpoint that a run would load, with the readers of Megatron and torch, before the run starts.

They read the note of the newest checkpoint and the index, no weights. What is found only while weights are
loaded, such as a shard that is cut off or another model, ends with the same message, see :mod:`.failures`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch.refuse import reason_of

TRACKER = "latest_checkpointed_iteration.txt"
_FLAGS = ("--load", "--pretrained-checkpoint")


def check_checkpoint(args: argparse.Namespace) -> None:
    """Refuse a run whose checkpoint cannot be opened.

    Args:
        args: Megatron's validated arguments.

    Raises:
        BadInput: names the file or flag.
    """
    from megatron.core import dist_checkpointing
    from megatron.training import checkpointing
    from torch.distributed.checkpoint import FileSystemReader

    step = getattr(args, "ckpt_step", None)
    for flag, folder in folders_of(args):
        # Megatron itself checks object stores.
        if "://" in folder:
            return
        if Path(folder).exists() and not Path(folder).is_dir():
            raise BadInput(flag, folder, rule="is no folder", remedy="Name the one that a run saved to.")
        tracker = Path(folder) / TRACKER
        if not (tracker.is_file() or step):
            continue
        path: str | Path = tracker
        try:
            iteration, is_release = checkpointing.read_metadata(tracker) if tracker.is_file() else (0, False)
            path = checkpointing.get_checkpoint_name(
                folder, step or iteration, is_release, return_base_dir=True
            )
            any(Path(path).iterdir())
            if dist_checkpointing.check_is_distributed_checkpoint(path):
                FileSystemReader(path).read_metadata()
        except SystemExit as stop:
            rule = f"{tracker} holds neither the number of an iteration nor 'release'"
            raise refused(args, rule) from stop
        except Exception as error:
            raise refused(args, f"{path} cannot be read ({reason_of(error)})") from error
        return
    if args.pretrained_checkpoint is not None:
        raise refused(args, "holds no checkpoint, and neither does the folder of --load")
    # A non-persistent checkpoint is stored elsewhere.
    if args.load is not None and args.exit_on_missing_checkpoint and not args.non_persistent_ckpt_type:
        raise refused(args, "holds no checkpoint, and --exit-on-missing-checkpoint asks for one")


def folders_of(args: argparse.Namespace | None) -> list[tuple[str, str]]:
    """Flag and value of the folders that may hold the checkpoint, in the order in which Megatron looks."""
    folders = {flag: getattr(args, flag[2:].replace("-", "_"), None) for flag in _FLAGS}
    return [(flag, str(folder)) for flag, folder in folders.items() if folder is not None]


def refused(args: argparse.Namespace | None, rule: str) -> BadInput:
    """The error of a checkpoint that cannot be loaded."""
    folders = folders_of(args) or [("--load", "(not given)")]
    flag, folder = next((one for one in folders if (Path(one[1]) / TRACKER).exists()), folders[-1])
    saved = sorted(int(path.name[5:]) for path in Path(folder).glob("iter_*") if path.name[5:].isdecimal())
    remedy = "Name the folder that a run saved to, and give the flags of the model that it trained."
    if saved:
        others = ", ".join(map(str, saved[-5:]))
        remedy = (
            f"Give the flags of the model that was saved, or write the number of another checkpoint of these "
            f"into {Path(folder) / TRACKER}: {others}."
        )
    return BadInput(flag, folder, rule=rule, remedy=remedy)
