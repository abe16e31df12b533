"""The host platform: the flags that it adds and refuses."""

import pytest

from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch import host


def test_flags_are_added_and_explained() -> None:
    arguments, adjustments = host.adjust(["--num-layers", "2"])
    assert arguments[:2] == ["--num-layers", "2"]
    assert arguments[arguments.index("--distributed-backend") + 1] == "gloo"
    assert arguments[arguments.index("--transformer-impl") + 1] == "local"
    assert "--no-gradient-accumulation-fusion" in arguments
    assert arguments[2:] == [word for added in adjustments for word in added.split()]
    assert all(adjustments.values())


def test_flags_that_the_user_set_are_not_changed() -> None:
    given = ["--distributed-backend=gloo", "--transformer-impl", "local", "--num-workers", "2"]
    arguments, adjustments = host.adjust(given)
    added = {words.split()[0] for words in adjustments}
    assert added and not added & {"--distributed-backend", "--transformer-impl", "--num-workers"}
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
