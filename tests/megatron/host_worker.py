"""Checks of the host platform on two ranks; started by ``test_host.py`` under torchrun.

All ``check_*`` functions run on both ranks, in order; the first failure ends the process.
"""

from megatron_ampipe.launch import host

host.install()
host.install()  # A second call does nothing.

import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel.random import (  # noqa: E402
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)


def check_tracker_switches_and_restores_the_random_state() -> None:
    model_parallel_cuda_manual_seed(11, force_reset_rng=True)
    tracker = get_cuda_rng_tracker()
    outside = torch.get_rng_state()
    with tracker.fork():
        first = torch.rand(4)
        with tracker.fork("expert-parallel-rng"):
            inner = torch.rand(4)
        second = torch.rand(4)
    assert torch.equal(torch.get_rng_state(), outside)
    with tracker.fork():
        third = torch.rand(4)
    model_parallel_cuda_manual_seed(11, force_reset_rng=True)
    with get_cuda_rng_tracker().fork():
        repeated = torch.rand(12)
    assert torch.equal(torch.cat([first, second, third]), repeated)
    gathered = [torch.empty(4) for _ in range(2)]
    torch.distributed.all_gather(gathered, inner)
    assert not torch.equal(*gathered), "expert weights must differ between expert-parallel ranks"


def check_data_loaders_leave_the_random_state() -> None:
    before = torch.get_rng_state()
    list(torch.utils.data.DataLoader(range(3), pin_memory=True))
    assert torch.equal(torch.get_rng_state(), before)


def main() -> None:
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            print(name, flush=True)
            check()
    torch.distributed.destroy_process_group()
    print("all checks passed", flush=True)


if __name__ == "__main__":
    main()
