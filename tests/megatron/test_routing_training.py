"""``--ampipe-routing-dir``: what trainings record at several degrees and layouts; it changes nothing."""

import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest

from megatron_ampipe.plan.recorded_routing import RecordedRouting, files_of, read_routing
from tests.megatron.launcher import MOCK_DATA, TINY_GPT, TINY_MOE, Run, assert_same_digits, runs_of
from tests.megatron.test_metrics import LINE

pytestmark = pytest.mark.timeout(900)

COMMON = [*TINY_GPT, *TINY_MOE, *MOCK_DATA, *shlex.split("--attention-dropout 0 --hidden-dropout 0")]
EP = "--expert-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 8 --train-iters 2"
RUNS = {
    "plain": EP,
    "stock": f"{EP} --ampipe-routing-dir {{folder}}/stock --ampipe-routing-interval 2",
    "degree 4": f"{EP} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
    "--ampipe-degree 4 --ampipe-routing-dir {folder}/chunks --ampipe-routing-interval 2",
    "tensor": "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
    "--expert-tensor-parallel-size 1 --train-iters 1 --ampipe-degree 2 "
    "--ampipe-routing-dir {folder}/tensor --ampipe-routing-interval 1",
    "stages": "--pipeline-model-parallel-size 2 --global-batch-size 1 --train-iters 1 --ampipe-degree 2 "
    "--ampipe-condense 0.3 --ampipe-routing-dir {folder}/stages --ampipe-routing-interval 1",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("routing")


@pytest.fixture(scope="module")
def runs(folder: Path) -> Mapping[str, Run]:
    return runs_of({name: [*COMMON, *shlex.split(RUNS[name].format(folder=folder))] for name in RUNS})


def routing(folder: Path, name: str) -> RecordedRouting:
    return read_routing(folder / name, flag="DIR")


def test_recording_changes_no_digit(runs: Mapping[str, Run]) -> None:
    assert runs["stock"].logged == runs["plain"].logged
    assert_same_digits(runs["plain"], runs["degree 4"])
    assert runs["degree 4"].says("how tokens are routed") and not runs["plain"].says("how tokens are routed")


def test_chunks_record_what_the_stock_layer_records(runs: Mapping[str, Run], folder: Path) -> None:
    assert list(files_of(folder / "stock")) == [2]
    (stock,), (chunks,) = routing(folder, "stock").records, routing(folder, "chunks").records
    assert stock.iteration == chunks.iteration == 2
    assert stock.tokens == (64,) and chunks.tokens == (16,) * 4
    assert stock.num_parts == chunks.num_parts == 4, "two sequences of each of two ranks"
    for of_stock, of_chunks in zip(stock.layers, chunks.layers, strict=True):
        assert of_stock.arrivals == of_chunks.arrivals
        for before, after in zip(of_stock.counts, of_chunks.counts, strict=True):
            assert before[0] == tuple(map(sum, zip(*after, strict=True)))
            assert sum(before[0]) == 2 * 64
            assert all(sum(chunk) == 2 * 16 for chunk in after)
    for record in (stock, chunks):
        # Layers take turns to be compared: this is the first of a run that records every second iteration.
        assert [layer.rows_compared > 0 for layer in record.layers] == [True, False]


def test_ranks_of_one_sequence_each_record_their_part(runs: Mapping[str, Run], folder: Path) -> None:
    (record,) = routing(folder, "tensor").records
    assert record.ranks_per_sequence == 2 and record.tokens == (16, 16)
    assert sum(layer.rows for layer in record.layers) == 2 * 64 * 2


def test_all_pipeline_stages_are_recorded_with_shares_as_in_the_log(
    runs: Mapping[str, Run], folder: Path
) -> None:
    (record,) = routing(folder, "stages").records
    assert [layer.layer for layer in record.layers] == [1, 2]
    # Each stage has one layer, and in each chunk compares one of the experts that have tokens.
    for layer in record.layers:
        ((first, second),) = layer.counts
        assert layer.rows_compared in {a + b for a in first for b in second if a and b}
    # The rank that writes the log is of the last stage; the log is of all its experts.
    (line,) = (text for _, text in LINE.findall(runs["stages"].output))
    # Without expert parallelism there is none.
    assert runs["stages"].says("AMPipe will not help") and "hidden share" not in line
    logged = float(line.partition("condensed share: ")[2].split()[0])
    last = record.layers[1]
    assert logged > 0 and 1 - last.rows_left[0.3] / last.rows_compared == pytest.approx(logged, abs=0.2)
