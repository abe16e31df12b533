"""Checks of the host platform on two ranks; started by ``test_host.py`` under torchrun.

All ``check_*`` functions run on both ranks, in order; the first failure ends the process.
"""

import threading

from megatron_ampipe.launch import host

host.install()
host.install()  # A second call does nothing.

import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel.random import (  # noqa: E402
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)

CPU = torch.device("cpu")


def check_cuda_devices_are_mapped_to_the_cpu() -> None:
    for device in ("cuda", "cuda:1", 0, torch.device("cuda"), torch.cuda.current_device()):
        assert torch.zeros(2, device=device).device == CPU
        assert torch.zeros(2).to(device).device == CPU
        assert torch.zeros(2).new_empty(3, device=device).device == CPU
    assert torch.empty(2, pin_memory=True).cuda().pin_memory().device == CPU
    assert torch.nn.Linear(2, 2).cuda(0).weight.device == CPU
    assert torch.zeros(2).to(torch.float64).dtype == torch.float64
    assert torch.zeros(2).to(torch.ones(2, dtype=torch.int)).dtype == torch.int
    with torch.device("meta"):
        assert torch.empty(2).device.type == "meta"
    assert torch.zeros(2, device="meta").device.type == "meta"


def check_cuda_devices_are_mapped_in_threads_and_in_backward() -> None:
    class MakesBuffer(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            return grad + torch.zeros(1, device="cuda")

    x = torch.ones(3, requires_grad=True)
    MakesBuffer.apply(x).sum().backward()
    assert x.grad is not None and x.grad.device == CPU
    made: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: made.append(torch.ones(1, device="cuda")))
    thread.start()
    thread.join()
    assert made[0].device == CPU


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
