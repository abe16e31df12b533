"""Runs ``tests/gpu`` on stand-ins for CUDA, in this process; reports the outcome of every test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest

from megatron_ampipe.launch import host
from tests.dist.worker import report


def main() -> None:
    host.install()
    import torch

    from tests.cuda_standin import StandIns, stand_ins

    torch.set_num_threads(1)
    plugin = StandIns()
    words = [word for name in ("cacheprovider", "xdist", "warnings") for word in ("-p", f"no:{name}")]
    pytest.main(["tests/gpu", "-q", "--durations=8", *words, *sys.argv[1:]], plugins=[plugin])
    with stand_ins():
        refused = [_said(call) for call in _wrong_calls()]
    report({"outcomes": plugin.outcomes, "refused": refused})


def _wrong_calls() -> Iterator[Callable[[], object]]:
    """What a GPU would refuse."""
    import torch

    on_device = torch.ones(2, device="cuda")
    yield lambda: on_device + torch.ones(2)
    yield lambda: on_device.index_add(0, torch.tensor([0]), torch.ones(1, device=on_device.device))
    yield lambda: on_device.numpy()
    torch.cuda.set_sync_debug_mode("error")
    yield on_device.tolist
    yield lambda: on_device.sum().item()
    yield lambda: on_device[on_device > 0]
    yield on_device.cpu
    yield lambda: torch.tensor([1.0], device="cuda")
    yield lambda: on_device.copy_(torch.ones(2))


def _said(call: Callable[[], object]) -> str:
    try:
        return f"well: {call()}"
    except (RuntimeError, AssertionError) as error:
        return str(error)


if __name__ == "__main__":
    main()
