"""Compares all attention kernels that this device supports with the reference, and checks their backends.

bf16 is compared with fp64 of the same inputs: whole sequences and later chunks, even and odd lengths.
"""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megatron_ampipe import compat
from megatron_ampipe.attention.kernels import FLASH_KERNELS, KERNELS, choose_kernel, why_not
from megatron_ampipe.runtime.segment import KeyValueSums
from megatron_ampipe.schedule import SequenceLayout, Span, chunk_sequence
from tests.reference_pieces import settings_of_plain_attention

pytestmark = pytest.mark.gpu

BOUND = 2**-6
"""Relative to the largest value: a few roundings of bf16 (2**-8 each)."""
MARKS = {"cudnn": "cudnn", "torch-flash-2": "flash_fwd"}
"""For each kernel, a part of the names of its device kernels."""
LATER = (Span(0, 1024, 3072),)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Spans of a chunk, and sizes of the tensors."""

    name: str
    spans: tuple[Span, ...]
    head_size: int = 128
    heads: int = 8
    groups: int = 2
    batch: int = 1

    @property
    def num_keys(self) -> int:
        return max(span.global_end for span in self.spans)


SIZES = [
    Sizes("whole", (Span(0, 2048, 0),)),
    Sizes("later chunk", LATER),
    Sizes("later chunk, one head each", LATER, groups=8, head_size=64, batch=2),
    Sizes("odd", (Span(0, 333, 501),), batch=3),
    Sizes("a few rows", (Span(0, 2, 700),)),
    Sizes(
        "tensor parallel", chunk_sequence(2048, degree=2, layout=SequenceLayout(tensor_ranks=2))[1].queries
    ),
    Sizes(
        "context parallel",
        chunk_sequence(2052, degree=3, layout=SequenceLayout(context_ranks=2, context_rank=1))[1].queries,
    ),
]


def usable(kernel: str, *, head_size: int) -> None:
    """Skip the test, with the reason, if a kernel cannot be used."""
    is_flash = kernel in FLASH_KERNELS
    objection = why_not(kernel, compat.current_gpu(), head_size) if is_flash else None
    if objection is not None:
        pytest.skip(f"{kernel}: {objection}")


def inputs(sizes: Sizes) -> list[Tensor]:
    rows = sum(span.length for span in sizes.spans)
    shapes = ((rows, sizes.heads), (sizes.num_keys, sizes.groups), (sizes.num_keys, sizes.groups))
    return [
        torch.randn(length, sizes.batch, heads, sizes.head_size, device="cuda").bfloat16().requires_grad_()
        for length, heads in shapes
    ]


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: sizes.name)
@pytest.mark.parametrize("kernel", [*MARKS, "sdpa"])
def test_attention_kernel_in_bf16(kernel: str, sizes: Sizes) -> None:
    from tests.dist.blocks import wrong

    usable(kernel, head_size=sizes.head_size)
    torch.manual_seed(1)
    tensors = inputs(sizes)
    precise = [x.detach().double().requires_grad_() for x in tensors]
    scale = sizes.head_size**-0.5
    expected = KERNELS["exact"](*precise, spans=sizes.spans, scale=scale)
    gradient = torch.randn_like(expected).bfloat16()
    wanted = [expected, *torch.autograd.grad(expected, precise, gradient.double())]
    found = KERNELS[kernel](*tensors, spans=sizes.spans, scale=scale)
    got = [found, *torch.autograd.grad(found, tensors, gradient)]
    sums = KeyValueSums(*tensors[1:])
    again = KERNELS[kernel](*tensors, spans=sizes.spans, scale=scale, sums=sums)
    of_query, *of_keys = torch.autograd.grad(again, tensors, gradient, allow_unused=True)
    # Kernels that support sums return no gradients to autograd.
    summed = of_keys if of_keys[0] is not None else sums.totals()
    names = ("output", "query", "key", "value", "again", "query again", "key sum", "value sum")
    exact = dict(zip(names, (*wanted, wanted[0], *wanted[1:]), strict=True))
    computed = (*got, again, of_query, *summed)
    assert wrong(exact, dict(zip(names, (x.double() for x in computed), strict=True)), BOUND) == {}


@pytest.mark.parametrize("kernel", MARKS)
def test_all_chunks_use_the_same_backend(kernel: str) -> None:
    usable(kernel, head_size=128)
    ran = []
    for sizes in SIZES[:2]:
        tensors = inputs(sizes)
        attend = KERNELS[kernel]
        # cuDNN compiles a kernel at the first call with a shape.
        for _ in range(2):
            with profile(activities=[ProfilerActivity.CUDA]) as recorded:
                output = attend(*tensors, spans=sizes.spans, scale=0.1)
                torch.autograd.grad(output, tensors, torch.ones_like(output))
                torch.cuda.synchronize()
        names = {event.key for event in recorded.key_averages()}
        ran.append({mark for mark in MARKS.values() if any(mark in name for name in names)})
    assert ran == [{MARKS[kernel]}] * 2


def test_the_chosen_kernel_runs() -> None:
    choice = choose_kernel(settings_of_plain_attention(), local=True, on_gpu=True)
    print(f"chosen: {choice.name} ({choice.reason})")
    test_attention_kernel_in_bf16(choice.name, SIZES[1])
