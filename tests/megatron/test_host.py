"""The host platform: the flags that it adds and refuses, when it loads, and what its replacements do."""

import threading

import pytest
import torch

from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch import host
from tests.dist.worker import use_groups

CPU = torch.device("cpu")


def test_flags_are_added_and_explained() -> None:
    arguments, adjustments = host.adjust(["--num-layers", "2"])
    assert arguments[:2] == ["--num-layers", "2"]
    assert arguments[arguments.index("--distributed-backend") + 1] == "gloo"
    assert arguments[arguments.index("--transformer-impl") + 1] == "local"
    assert "--no-gradient-accumulation-fusion" in arguments
    assert arguments[2:] == [part for adjustment in adjustments for part in adjustment.arguments]
    assert all(adjustment.reason for adjustment in adjustments)


def test_flags_that_the_user_set_are_not_changed() -> None:
    given = ["--distributed-backend=gloo", "--transformer-impl", "local", "--num-workers", "2"]
    arguments, adjustments = host.adjust(given)
    added = {adjustment.flag for adjustment in adjustments}
    assert not added & {"--distributed-backend", "--transformer-impl", "--num-workers"}
    assert arguments[: len(given)] == given


@pytest.mark.parametrize(
    "arguments",
    [
        ["--transformer-impl=transformer_engine"],
        ["--moe-token-dispatcher-type", "flex"],
        ["--moe-grouped-gemm"],
        ["--distributed-backend", "nccl"],
        ["--hybrid-layer-pattern", "M*E-GE"],
    ],
    ids=" ".join,
)
def test_flags_that_need_a_gpu_are_refused(arguments: list[str]) -> None:
    with pytest.raises(BadInput) as caught:
        host.adjust(["--num-layers", "2", *arguments])
    message = str(caught.value)
    assert message.startswith(arguments[0].partition("=")[0])
    assert caught.value.rule and caught.value.remedy


@pytest.mark.ranks(2)
def test_cuda_devices_are_mapped_to_the_cpu() -> None:
    host.install()  # A second call does nothing.
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


@pytest.mark.ranks(2)
def test_cuda_devices_are_mapped_in_threads_and_in_backward() -> None:
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


@pytest.mark.ranks(2)
def test_tracker_switches_and_restores_the_random_state(caplog: pytest.LogCaptureFixture) -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    use_groups()
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
    assert "CPU RNG state changed" not in caplog.text


@pytest.mark.ranks(2)
def test_data_loaders_leave_the_random_state() -> None:
    before = torch.get_rng_state()
    list(torch.utils.data.DataLoader(range(3), pin_memory=True))
    assert torch.equal(torch.get_rng_state(), before)
