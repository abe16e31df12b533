"""A command line of training or of a tool, as a rank without peers, with little memory beyond what it has."""

import os
import resource
import sys
from pathlib import Path

from tests.forked import variables_of

PROCESS_GROUP_MADE = 99
"""Exit code of a launch that has reached the creation of its process group."""
MEMORY_BYTES = 4 << 30
TRAIN = "train"
"""Stands for a training run, where other command lines have the name of a tool."""
NOWHERE = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
"""Where no ranks meet: the launch ends before it creates a process group."""


def main() -> int:
    """Run it; returns its exit code."""
    import torch

    from megatron_ampipe import cli
    from megatron_ampipe.launch import ending, pretrain

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + MEMORY_BYTES,) * 2)
    if os.environ["MASTER_PORT"] == NOWHERE["MASTER_PORT"]:
        # For Megatron's checks; the other ranks never exist.
        os.environ |= variables_of(0, 4)
        torch.distributed.init_process_group = lambda *_args, **_kwargs: os._exit(PROCESS_GROUP_MADE)
    # There are no other ranks to wait for.
    ending.PEER_LAG_S = 0.0
    tool, *words = sys.argv[1:]
    return pretrain.main(words) if tool == TRAIN else cli.main([tool, *words])


if __name__ == "__main__":
    sys.exit(main())
