"""Chunks that FP8 can train: what a tile is, which degrees fit, and who refuses the others."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ampipe.block.settings import Settings
from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch.refusals import refuse_unsupported
from megatron_ampipe.plan.planner import make_plan
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.plan.search import improve_chunks, named
from megatron_ampipe.schedule import Pipeline, SequenceLayout, even_chunks
from megatron_ampipe.schedule.chunks import require_whole_tiles
from megatron_ampipe.schedule.features import fp8_recipe, rows_of_tile
from tests.golden.write import SETTINGS
from tests.plan_cases import cluster, sized_block


def settings(recipe: str | None = "blockwise", **others: Any) -> SimpleNamespace:
    return SimpleNamespace(fp8="e4m3", fp8_recipe=recipe, **others)


def test_the_recipe_is_megatrons_default_unless_it_is_given() -> None:
    assert fp8_recipe(SimpleNamespace(fp8=None, fp8_recipe="delayed")) is None
    assert fp8_recipe(settings(None)) == "delayed"
    assert fp8_recipe(SimpleNamespace(fp8_format="hybrid", fp8_recipe="mxfp8")) == "mxfp8"


@pytest.mark.parametrize(
    ("recipe", "batch", "rows"),
    [("blockwise", 1, 128), ("blockwise", 3, 128), ("mxfp8", 4, 8), ("mxfp8", 64, 1)],
)
def test_rows_of_a_tile(recipe: str, batch: int, rows: int) -> None:
    assert rows_of_tile(settings(recipe), batch) == rows


@pytest.mark.parametrize(
    ("degree", "rows", "tile", "remedy"),
    [
        (8, 512, 128, "Use --ampipe-degree 4 without --ampipe-chunks."),
        (3, 1024, 32, "Use --ampipe-degree 2 without --ampipe-chunks."),
        (2, 96, 128, "Use --ampipe-degree 1, a longer sequence, or a larger --micro-batch-size."),
    ],
)
def test_a_cut_tile_is_refused(degree: int, rows: int, tile: int, remedy: str) -> None:
    with pytest.raises(BadInput) as refused:
        require_whole_tiles(Pipeline.of(degree).chunks(rows), tile)
    assert refused.value.remedy == remedy


def test_whole_tiles_and_one_chunk_of_any_length_are_accepted() -> None:
    """Rows of a tensor-parallel rank count."""
    layout = SequenceLayout(tensor_ranks=2)
    require_whole_tiles(Pipeline.of(4).chunks(1024, layout), 128)
    with pytest.raises(BadInput):
        require_whole_tiles(Pipeline.of(4).chunks(512, layout), 128)
    require_whole_tiles(Pipeline.of(1).chunks(100), 128)


def test_a_launch_is_refused_before_it_starts() -> None:
    run = {"num_experts": 4, "seq_length": 512, "micro_batch_size": 1, "sft": False}
    parsed = settings(**SETTINGS, **run, transformer_impl="transformer_engine")
    refuse_unsupported(Settings(), Pipeline.of(4), parsed)
    with pytest.raises(BadInput, match="--ampipe-degree 8: with this --fp8-recipe"):
        refuse_unsupported(Settings(), Pipeline.of(8), parsed)


@pytest.mark.parametrize("tile", [1, 128])
def test_chunks_that_the_planner_shapes_have_whole_tiles(tile: int) -> None:
    """Of 1024 rows; without FP8, chunks are so short here that they may end anywhere."""
    predictor = Predictor(sized_block(sequence_length=1024, fp8_tile=tile), cluster())
    shaped = improve_chunks(predictor, named(predictor, "ampipe", 3, 3))
    assert shaped.lengths != even_chunks(1024, 3)
    assert any(length % 128 for length in shaped.lengths) == (tile == 1)


def test_no_plan_where_no_degree_fits() -> None:
    plan = make_plan(Predictor(sized_block(sequence_length=192, fp8_tile=128), cluster()))
    assert plan.schedule.degree == 1
    assert "no degree cuts the 192 rows of a rank into chunks, with FP8 of whole tiles" in plan.reason
