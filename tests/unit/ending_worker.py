"""Ends processes in all ways in which a launch can end, and reports the output of each.

One process imports torch and forks a child for each. Run by :mod:`.test_ending`.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch import ending

FOLDER = Path(sys.argv[1])
MEGATRON: Any = ModuleType("megatron.training")
MEGATRON.get_args = lambda: SimpleNamespace(load="/loaded")


def fail() -> int:
    raise ValueError("deep inside")


def refuse() -> int:
    raise BadInput("--flag", 7, rule="is wrong", remedy="Use --flag 8.")


def fail_to_load() -> int:
    failures = {0: (RuntimeError("PytorchStreamReader failed\nmore"), None)}
    return load_checkpoint("raise error", error=CheckpointException("read", failures))


def load_checkpoint(line: str, module: str = "torch", **known: Any) -> int:
    """Raise in a function of ``module`` that Megatron's has called."""
    inner: dict[str, Any] = {"__name__": module, **known}
    exec(f"def read():\n    {line}", inner)
    outer: dict[str, Any] = {"__name__": "megatron.training.checkpointing", "read": inner["read"]}
    exec("def load_checkpoint():\n    read()", outer)
    outer["load_checkpoint"]()
    return 0


def run_out_of_memory_in_loading() -> int:
    return load_checkpoint("raise RuntimeError('CUDA out of memory. Tried to allocate 2.00 GiB')")


def fail_by_ourselves_in_loading() -> int:
    return load_checkpoint("raise ValueError('a fault')", "megatron_ampipe.layers.layer")


def wait_for_a_worker() -> int:
    raise RuntimeError("DataLoader timed out after 30 seconds")


def leave_as_megatron() -> int:
    text = "def train():\n    import sys; sys.exit()"
    training: dict[str, Any] = {"__name__": "megatron.training.training"}
    exec(compile(text, "/site-packages/megatron/training/training.py", "exec"), training)
    training["train"]()
    return 0


def leave_as_script() -> int:
    sys.exit(5)


def be_interrupted() -> int:
    # A shell that runs the tests in the background ignores SIGINT, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)
    finally:
        # A second signal, from torchrun, while the first one is handled.
        os.kill(os.getpid(), signal.SIGINT)
    return 0


def meet_nowhere() -> int:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    return 0


def lose_a_peer() -> int:
    raise RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer [10.0.0.1]:1")


def finish() -> int:
    return 0


FUNCTIONS: tuple[Callable[[], int], ...] = (
    *(fail, refuse, meet_nowhere, fail_to_load, run_out_of_memory_in_loading, fail_by_ourselves_in_loading),
    *(wait_for_a_worker, leave_as_megatron, leave_as_script, be_interrupted, finish, lose_a_peer),
)
WAYS = {function.__name__: function for function in FUNCTIONS}


def start(name: str) -> int:
    child = os.fork()
    if child:
        return child
    output = os.open(FOLDER / f"{name}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(FOLDER / f"{name}.json")
    # In place of Megatron, whose import takes long.
    sys.modules["megatron.training"] = MEGATRON
    code: Any = 99
    try:
        code = ending.run_to_end(WAYS[name])
    except SystemExit as stop:
        code = stop.code
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    children = {name: start(name) for name in WAYS}
    codes = {name: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for name, pid in children.items()}
    (FOLDER / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main()
