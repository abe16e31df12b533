"""The Mamba layer of the host platform, compared with the recurrence that defines it, row by row."""

import torch
from torch.nn import functional

from megatron_ampipe.launch.host.hybrid_layers import GroupedRMSNorm, mamba_split_conv1d_scan

ROWS, BATCH, HEADS, WIDTH, STATE, GROUPS = 150, 2, 4, 3, 5, 2


def _row_by_row(
    x: torch.Tensor, dt: torch.Tensor, decay: torch.Tensor, b: torch.Tensor, c: torch.Tensor
) -> torch.Tensor:
    state = torch.zeros(BATCH, HEADS, WIDTH, STATE, dtype=x.dtype)
    rows = []
    for row in range(x.shape[1]):
        added = (dt[:, row, :, None] * x[:, row])[..., None] * b[:, row, :, None, :]
        state = state * torch.exp(dt[:, row] * decay)[..., None, None] + added
        rows.append((state * c[:, row, :, None, :]).sum(-1))
    return torch.stack(rows, 1)


def test_the_mixer_and_all_gradients_equal_its_definition() -> None:
    torch.manual_seed(2)
    inner, shared = HEADS * WIDTH, 2 * GROUPS * STATE
    shapes = ((BATCH, ROWS, 2 * inner + shared + HEADS), (inner + shared, 4), (inner + shared,))
    inputs = [torch.randn(shape) for shape in (*shapes, *[(HEADS,)] * 3)]
    inputs[4] = -4 * torch.rand(HEADS)
    packed, weight, bias, dt_bias, decay, skip = (tensor.requires_grad_() for tensor in inputs)
    found = mamba_split_conv1d_scan(
        packed, weight, bias, dt_bias, decay, D=skip, headdim=WIDTH, ngroups=GROUPS, activation="silu",
        norm_before_gate=False, chunk_size=128,
    )  # fmt: skip

    gate, rows, dt = packed.split([inner, inner + shared, HEADS], -1)
    # Row by row: the window of the last four rows, zeros before the first.
    padded = torch.cat([torch.zeros(BATCH, 3, inner + shared), rows], 1)
    convolved = sum(padded[:, shift : shift + ROWS] * weight[:, shift] for shift in range(4)) + bias
    x, b, c = functional.silu(convolved).split([inner, shared // 2, shared // 2], -1)
    x = x.reshape(BATCH, ROWS, HEADS, WIDTH)
    # Heads 0 and 1 use group 0, heads 2 and 3 group 1.
    b, c = (part.reshape(BATCH, ROWS, GROUPS, STATE)[:, :, [0, 0, 1, 1]] for part in (b, c))
    y = _row_by_row(x, functional.softplus(dt + dt_bias), decay, b, c) + skip[:, None] * x
    expected = y.reshape(BATCH, ROWS, inner) * functional.silu(gate)
    gradient = torch.randn_like(found)
    results = [[output, *torch.autograd.grad(output, inputs, gradient)] for output in (found, expected)]
    for one, other in zip(*results, strict=True):
        assert (one - other).abs().max() <= 1e-4 * other.abs().max()


def test_the_norm_is_of_each_group() -> None:
    norm = GroupedRMSNorm(6, eps=0.0, group_size=3, norm_before_gate=False)
    with torch.no_grad():
        norm.weight.copy_(torch.arange(1.0, 7.0))
    found = norm(torch.tensor([[3.0, 3.0, 3.0, 1.0, 1.0, 2.0]]))
    expected = torch.tensor([[1.0, 2.0, 3.0, 4 / 2**0.5, 5 / 2**0.5, 12 / 2**0.5]])
    torch.testing.assert_close(found, expected)
