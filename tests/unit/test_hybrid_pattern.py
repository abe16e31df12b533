"""Which layers of a hybrid model are pipelined."""

from types import SimpleNamespace

import pytest

from megatron_ampipe.block.hybrid_pattern import runs_of, runs_of_pairs, stages_of

UNEVEN = {
    "pipeline_model_parallel_size": 3,
    "decoder_first_pipeline_num_layers": 2,
    "decoder_last_pipeline_num_layers": 3,
}


@pytest.mark.parametrize(
    ("layers", "runs"),
    [
        ("*E", [(0, 1)]),
        ("*E*E", [(0, 2)]),
        ("+EM+E", [(0, 1), (3, 1)]),
        ("M*E-*EE*", [(1, 1), (4, 1)]),
        # A dense pair shares the schedule of its neighbors only.
        ("*-*E*-", [(0, 3)]),
        ("*-M*E", [(3, 1)]),
        ("*-*-", []),
        ("E*M", []),
        ("**E", [(1, 1)]),
    ],
)
def test_runs_of_pairs(layers: str, runs: list[tuple[int, int]]) -> None:
    assert list(runs_of_pairs(layers)) == runs


@pytest.mark.parametrize(
    ("text", "sizes", "stages"),
    [
        ("*E|M*/E*", {"pipeline_model_parallel_size": 2}, ("*E", "M*")),
        ("*EM*EM", {"pipeline_model_parallel_size": 2}, ("*EM", "*EM")),
        ("*E*E*EM", UNEVEN, ("*E", "*E", "*EM")),
    ],
)
def test_pipeline_stages(text: str, sizes: dict[str, int], stages: tuple[str, ...]) -> None:
    assert stages_of(SimpleNamespace(hybrid_layer_pattern=text, **sizes)) == stages


def test_dense_pairs_are_known() -> None:
    assert runs_of(("*-*EM*E", "*EM")) == ((False, True), (True,), (True,))
