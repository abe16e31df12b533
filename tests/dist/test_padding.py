"""A ``padding_mask`` that chunks cannot follow is refused; parity cases have the others."""

from typing import Any

import pytest

from tests.dist.cases import QUANTILE, TOP2, TP, Case, Z

REFUSED = {
    "quantile balancing": {"model": QUANTILE},
    "a mean over the rows of each rank": {"parallel": TP, "layers": "mm", "stack": 0, "model": TOP2 | Z},
    "computes its choice": {"router": "sigmoid"},
}
"""By what the message says."""


@pytest.mark.ranks(2)
@pytest.mark.parametrize("text", REFUSED)
def test_what_padding_cannot_be_combined_with_is_refused(text: str) -> None:
    from megatron_ampipe.errors import BadInput
    from tests.dist.blocks import build_layers, forward, inputs_of

    settings: dict[str, Any] = REFUSED[text]
    case = Case("refused", padded=True, **settings)
    _, ours = build_layers(case)
    inputs = inputs_of(case, rank=0, dtype=next(ours.parameters()).dtype)
    with pytest.raises(BadInput, match=rf"padding_mask \[1, \d+\]: .*{text}"):
        forward(ours, inputs)
