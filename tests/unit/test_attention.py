"""Attention of chunks on the CPU: its parts, its sums, and that it is what the definition says."""

import random

import pytest
import torch
from torch import Tensor

from megatron_ampipe.runtime.attention import exact
from megatron_ampipe.runtime.cpu_flash import _parts_of, cpu_flash
from megatron_ampipe.runtime.key_value_sums import KeyValueSums
from megatron_ampipe.schedule import Span


@pytest.mark.parametrize(("length", "start"), [(1, 0), (128, 0), (129, 7), (300, 0), (512, 512), (700, 1)])
def test_parts_cover_what_a_query_sees_exactly_once(length: int, start: int) -> None:
    seen = torch.zeros(length, start + length, dtype=torch.int)
    for part in _parts_of(Span(0, length, start)):
        rows = slice(part.first_row, part.last_row)
        keys = slice(part.first_key, part.last_key)
        shape = seen[rows, keys].shape
        seen[rows, keys] += torch.ones(shape, dtype=torch.int).tril() if part.causal else 1
    assert torch.equal(seen, torch.ones_like(seen).tril(start))


@pytest.mark.parametrize("groups", [4, 2, 1])
def test_the_cpu_kernel_computes_the_definition(groups: int) -> None:
    torch.manual_seed(groups)
    spans = (Span(0, 300, 200), Span(300, 140, 600))
    query, key, value = (torch.randn(n, 2, heads, 16).double().requires_grad_()
                         for n, heads in ((440, 4), (740, groups), (740, groups)))  # fmt: skip
    expected = exact(query, key, value, spans=spans, scale=0.3)
    gradient = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (query, key, value), gradient)
    found = cpu_flash(query, key, value, spans=spans, scale=0.3)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for a, b in zip(torch.autograd.grad(found, (query, key, value), gradient), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    # The same with the gradients of keys and values added to sums.
    sums = KeyValueSums(key, value)
    found = cpu_flash(query, key, value, spans=spans, scale=0.3, sums=sums)
    of_query, *of_keys = torch.autograd.grad(found, (query, key, value), gradient, allow_unused=True)
    assert of_keys == [None, None]
    for a, b in zip((of_query, *sums.totals()), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(20))
def test_sums_are_sums_whatever_the_order(seed: int) -> None:
    noise = random.Random(seed)
    key, value = torch.empty(40, 1, 2, 3), torch.empty(40, 1, 2, 5)
    sums = KeyValueSums(key, value)
    expected = [torch.zeros_like(key), torch.zeros_like(value)]
    for _ in range(noise.randint(1, 6)):
        start = noise.randrange(40)
        rows = noise.randint(1, 40 - start)
        parts: list[Tensor] = [torch.randn(rows, *like.shape[1:]) for like in (key, value)]
        sums.add(start, *parts)
        for total, part in zip(expected, parts, strict=True):
            total[start : start + rows] += part
    torch.testing.assert_close(sums.totals(), tuple(expected))


def test_sums_of_16_bit_gradients_are_of_32() -> None:
    key = torch.empty(2, 1, 1, 1, dtype=torch.bfloat16)
    sums = KeyValueSums(key, key)
    for _ in range(257):
        sums.add(0, torch.ones_like(key), torch.ones_like(key))
    # bf16 would have stopped at 256.
    assert all(bool((total == 257).all()) for total in sums.totals())
