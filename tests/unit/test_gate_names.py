"""The values of ``--ampipe-router`` that are refused before anything is imported."""

from __future__ import annotations

import pytest

from megatron_ampipe.block.named_values import SHIPPED_GATES, class_path
from megatron_ampipe.errors import BadInput


@pytest.mark.parametrize("name", SHIPPED_GATES)
def test_shipped_gates_are_classes(name: str) -> None:
    assert class_path(name).startswith("megatron_ampipe.layers.gates:")


def test_a_class_is_named_by_module_and_class() -> None:
    assert class_path("a.b_2:Router") == "a.b_2:Router"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "is neither package.module:Class nor one of noisy-topk"),
        ("cosin", "Did you mean cosine?"),
        ("a.b.Router", "Use for example --ampipe-router cosine"),
        ("a..b:Router", "is neither package.module:Class"),
        ("a:b:c", "is neither package.module:Class"),
    ],
)
def test_other_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(BadInput, match="--ampipe-router") as caught:
        class_path(name)
    assert message in str(caught.value)
