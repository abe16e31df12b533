"""The host platform: the flags that it adds and refuses."""

import pytest

from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch import host


def test_flags_that_the_user_set_are_not_changed() -> None:
    given = ["--distributed-backend=gloo", "--transformer-impl", "local", "--num-workers", "2"]
    arguments, adjustments = host.adjust(given)
    assert all(adjustments.values()), "reasons"
    added = {words.split()[0] for words in adjustments}
    assert "--no-gradient-accumulation-fusion" in added
    assert not added & {"--distributed-backend", "--transformer-impl", "--num-workers"}
    assert arguments[: len(given)] == given


@pytest.mark.parametrize(
    "arguments",
    [
        ["--transformer-impl=transformer_engine"],
        ["--moe-grouped-gemm"],
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
