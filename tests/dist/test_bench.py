"""``ampipe bench`` with real ranks.

Sizes are tiny, so the values mean nothing; the tests check that they exist and have the right type.
"""

import contextlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import step_kinds
import torch

from megatron_ampipe.tools.measuring import training
from tests.forked import REPOSITORY, completed
from tests.unit.test_ranks import needs_network

pytestmark = pytest.mark.alone

GRID = """\
defaults:
  {sequence_length: 64, batch: 1, hidden: 32, heads: 4, experts: 4, ffn: 64, activation: gelu, dtype: fp32}
cases:
  - {name: top1, topk: 1}
  - {name: rich, topk: 2, batch: 2, query_groups: 2, shared_ffn: 48, activation: swiglu, capacity: 1.25}
"""
MANY = "  - {name: many, topk: 4, experts: 8, sequence_length: 256}\n"


def environment(folder: Path) -> dict[str, str]:
    """All temporary files of the command are in the test's folder."""
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    return os.environ | {"TMPDIR": str(temporary)}


def bench(folder: Path, *words: str) -> tuple[dict[str, Any], str]:
    grid, output = folder / "tiny.yaml", folder / "result.json"
    grid.write_text(GRID + MANY * ("many" in words))
    command = [sys.executable, "-m", "megatron_ampipe.cli", "bench", "--grid", grid, "--json", output]
    done = completed(*command, *words, "--warmup", "0", env=environment(folder))
    assert not list((folder / "temporary").iterdir())
    assert sorted(path.name for path in folder.glob("*result.json*")) == ["result.json"]
    return json.loads(output.read_text()), done.stdout


def check_document(document: dict[str, Any], *, link: str, rows: list[tuple[str, int, int]]) -> None:
    """Of two repeats; ``rows`` are schedule, degree and stack."""
    assert document["link"] == link
    assert document["versions"]["torch"] and document["hardware"]["cpu"]
    assert len(document["hardware"]["load_average"]) == len(document["hardware"]["load_average_after"]) == 3
    assert [case["name"] for case in document["cases"]] == ["top1", "rich"]
    for case in document["cases"]:
        assert (case["link"], case["layers"]) == (link, document["layers"])
        assert case["stock_ms"] > 0 and case["stock_peak_bytes"] > 0
        assert len(case["control"]["samples_ms"]) == 2
        assert case["control"]["difference_from_stock"] == 0.0
        assert [(row["schedule"], row["degree"], row["stack"]) for row in case["rows"]] == rows
        for row in case["rows"]:
            assert len(row["samples_ms"]) == 2
            assert min(row["ms"], row["speedup"], row["peak_bytes"]) > 0
            assert row["difference_from_stock"] <= (1e-4 if row["degree"] > 1 else 0.0)
            assert bool(row["bound_share"]) is (row["degree"] > 1)


@needs_network
def test_layers_block_by_block_and_together(tmp_path: Path) -> None:
    """Over a real network."""
    link = "10mbit"
    cluster = str(REPOSITORY / "docs" / "measured" / "results" / "profile-100mbit.yaml")
    words = ["--layers", "3", "--degrees", "1,3", "--schedules", "sequential,ampipe", "--repeats", "2"]
    document, shown = bench(tmp_path, *words, "--link", link, "--predict", cluster)
    assert "3 layers" in shown and "emulated" not in shown
    assert "wire MB" in shown
    for case in document["cases"]:
        # Of the smaller case, more than the rows of one direction without headers.
        assert case["stock_wire_bytes"] > 3 * 64 * 32 * 4
        # A thread of gloo may keep a buffer for a moment after a collective.
        assert case["rows"][0]["peak_bytes"] == pytest.approx(case["stock_peak_bytes"], rel=0.1)
        for row in case["rows"]:
            assert row["predicted_ms"] > 0
            if row["degree"] > 1:
                needs = row["stage_needs"]["forward"]
                # The second layer takes what the first returns within the schedule, or from Megatron.
                assert (
                    ("merge.0" in needs["qkv.0@1"]) is ("merge.0@1" in needs["qkv.0@2"]) is (row["stack"] > 1)
                )
                # The same transfers in all.
                assert len(needs) == 3 * len([name for name in needs if "@" not in name])
    one, together = ("sequential", 1, 1), [("sequential", 3, 1), ("sequential", 3, 3)]
    both = [one, *together, *(("ampipe", *row[1:]) for row in (one, *together))]
    check_document(document, link=link, rows=both)


@needs_network
def test_two_classes_of_links(tmp_path: Path) -> None:
    """Four ranks on two nodes: what leaves a node is counted separately, and less with exchanges of nodes."""
    words = ["--cases", "many", "--schedules", "ampipe", "--degrees", "2", "--repeats", "1"]
    nodes = ["--ranks", "4", "--ranks-per-node", "2", "--link", "inter=20mbit,intra=160mbit"]
    document, shown = bench(tmp_path, *words, *nodes, "--exchange", "rows,nodes,2dh")
    assert "4 ranks, 2 per node" in shown
    assert (document["ranks"], document["ranks_per_node"]) == (4, 2)
    (case,) = document["cases"]
    rows = {row["exchange"]: row for row in case["rows"]}
    assert set(rows) == {"rows", "nodes", "2dh"}
    assert all(row["difference_from_stock"] <= 1e-4 for row in rows.values())
    sent = {exchange: row["wire_bytes_by_class"] for exchange, row in rows.items()}
    assert all(by_class["inter"] > 0 < by_class["intra"] for by_class in sent.values())
    # Every token has four of eight experts: once to the other node in place of about twice.
    assert sent["nodes"]["inter"] < 0.75 * sent["rows"]["inter"]
    assert sent["2dh"]["inter"] == pytest.approx(sent["rows"]["inter"], rel=0.2)
    # No pass is faster than the slow links allow: each rank sends about a quarter of the bytes.
    fastest_ms = 8e3 * sent["rows"]["inter"] / 4 / 20e6
    assert rows["rows"]["ms"] > 0.5 * fastest_ms


def test_an_emulated_link_slows_both_layers_and_says_so(tmp_path: Path) -> None:
    link = "emulated:1gbit:10ms:nccl4:skew50ms"
    words = ["--link", link, "--degrees", "1,2", "--schedules", "ampipe", "--repeats", "2"]
    document, shown = bench(tmp_path, *words, "--emulate-peers")
    check_document(document, link=link, rows=[("ampipe", 1, 1), ("ampipe", 2, 1)])
    assert document["emulated"] is document["pretended"] is document["cases"][0]["emulated"] is True
    assert f"{link} (emulated) · 2 ranks, all but one emulated" in shown
    for case in document["cases"]:
        again, chunked = case["rows"]
        # Dispatch of tokens and probabilities, combine, and the same in backward: at least six latencies. And
        # one exchange of counts.
        assert min(case["stock_ms"], again["ms"]) > 60 + 50
        assert chunked["bound_ms"] >= 2 * 2 * 30


def test_skewed_routing_is_measured_with_the_numbers_of_stock(tmp_path: Path) -> None:
    words = ["--link", "emulated:1gbit", "--cases", "rich", "--degrees", "2", "--schedules", "ampipe"]
    document, _ = bench(tmp_path, *words, "--repeats", "1", "--imbalance", "1.8")
    (case,) = document["cases"]
    assert case["block"]["imbalance"] == 1.8
    assert case["rows"][0]["difference_from_stock"] <= 1e-4


@pytest.mark.ranks(1)
@pytest.mark.parametrize(("topk", "imbalance"), [(1, 1.5), (2, 2.0), (2, 3.9)])
def test_a_bias_gives_a_rank_so_many_times_the_mean(topk: int, imbalance: float) -> None:
    from megatron_ampipe.tools.measuring.blocks import skewing_bias

    torch.manual_seed(5)
    weight = 0.02 * torch.randn(16, 64)
    bias = skewing_bias(weight, topk=topk, num_ranks=4, imbalance=imbalance)
    chosen = (torch.sigmoid(torch.randn(4096, 64) @ weight.T) + bias).topk(topk).indices
    found = 4 * float((chosen < 4).float().mean())
    assert found == pytest.approx(imbalance, rel=0.08)
    assert bias[4:].abs().max() == 0 and len(set(bias[:4].tolist())) == 1


def test_end_to_end_training_alternates_the_variants(tmp_path: Path) -> None:
    words = ["--end-to-end", "--cases", "rich", "--degrees", "4", "--schedules", "ampipe", "--repeats", "3"]
    words += ["--stack", "all", "--partner", "off,listed", "--micro-batches", "3"]
    document, shown = bench(tmp_path, *words, "--rounds", "1", "--layers", "2", "--link", "emulated:400mbit")
    assert {"ampipe", "stack", "partner", "listed", "control", "(emulated)"} <= set(shown.split())
    assert document["emulated"] is True
    assert (document["format"], document["layers"], document["rounds"]) == (training.FORMAT, 2, 1)
    (case,) = document["cases"]
    assert {"--mock-data", "--expert-model-parallel-size"} <= set(case["flags"])
    assert [(row["degree"], row["stack"], row["partner"]) for row in case["rows"]] == [
        (4, 2, None), (4, 2, "listed"),
    ]  # fmt: skip
    for kind in (case["stock"], case["control"], *case["rows"]):
        (found,) = kind["trainings"]
        assert len(found["ms"]) == len(found["lm_loss"]) == 3
        # The model learns: the first loss is about the logarithm of the vocabulary size.
        assert 6.5 > found["lm_loss"][0] > found["lm_loss"][-1] > 0
        assert kind.get("loss_difference", 0.0) <= training.TOLERANCE


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_different_results_are_refused_before_timing(dtype: str) -> None:
    from megatron_ampipe.errors import DifferenceFound
    from megatron_ampipe.tools.measuring.bench_job import Variant
    from megatron_ampipe.tools.measuring.grid import Case
    from megatron_ampipe.tools.measuring.timed_passes import compare

    class Passes:
        def results(self, layer: float) -> dict[str, torch.Tensor]:
            return {"output": torch.ones(2), "gradient": torch.tensor([1.0, layer])}

    class Experts:
        def of_results(self, layer: float, variant: Variant) -> Any:
            return contextlib.nullcontext()

        def prescribe(self, layer: float) -> None:
            pass

    sizes = ("sequence_length", "batch", "hidden", "heads", "experts", "topk", "ffn")
    case = Case(name="one", activation="gelu", dtype=dtype, **dict.fromkeys(sizes, 1))
    variants = (Variant("stock"), Variant.of("ampipe", 2))
    for same in (2.0, 2.0 + 1e-6):
        compare(Passes(), [2.0, same], variants, rank=0, case=case, experts=Experts())
    for other in (2.5, math.nan, math.inf):
        with pytest.raises(DifferenceFound, match="on rank 0 most in the gradient"):
            compare(Passes(), [2.0, other], variants, rank=0, case=case, experts=Experts())


def test_fixed_rows_and_graphs_are_compared_and_timed(tmp_path: Path) -> None:
    """On stand-ins for graphs, the other ranks emulated, as on one GPU; with Megatron's own graphs."""
    grid = tmp_path / "grid.yaml"
    grid.write_text(GRID.replace("gelu, dtype: fp32", "swiglu, dtype: bf16"))
    words = [
        *("--grid", grid, "--cases", "top1", "--ranks", "2", "--emulate-peers", "--link", "emulated:1gbit"),
        *("--degrees", "2,4", "--schedules", "ampipe", "--repeats", "2", "--warmup", "1"),
        *("--rows", "exact,fixed", "--cuda-graph-impl", "none,local"),
    ]
    done = completed(sys.executable, "-m", "tests.graphed", *words, env=environment(tmp_path))
    (case,) = json.loads(done.stdout.splitlines()[-1])
    found = [(row["schedule"], row["degree"], row["rows"], row["graphs"]) for row in case["rows"]]
    assert found == [
        ("stock-graphs", 1, "exact", True),
        *(("ampipe", degree, "exact", graphs) for graphs in (False, True) for degree in (2, 4)),
        *(("ampipe", degree, "fixed", graphs) for graphs in (False, True) for degree in (2, 4)),
    ]
    for row in case["rows"]:
        assert len(row["samples_ms"]) == 2 and row["graph_bytes"] == 0
        # Megatron's graphs run its own operations; AMPipe's round sums over chunks.
        assert row["difference_from_stock"] <= (0.0 if row["schedule"] == "stock-graphs" else 1e-2)
        assert bool(row["bound_share"]) is (row["degree"] > 1)
    # Padding is sent and kept.
    assert case["rows"][5]["peak_bytes"] > case["rows"][1]["peak_bytes"]


WRONG_PARTNERS = """\
import contextlib
import dataclasses
import json
import sys

import partners
import step_kinds

partners.LAYERS, partners.MICROBATCHES = 2, 3
wrong = sys.argv[1]
graphs = contextlib.ExitStack()


def left_out_here(**given):
    # What graphs hold on a GPU, their stand-ins hold here.
    return step_kinds.left_out(**given | {"on_gpu": wrong == "nothing"})


partners.left_out = left_out_here

start = partners.Rank.start_megatron


def start_wrong(rank):
    emulation = start(rank)
    if wrong == "nothing":
        from tests import graphed

        graphs.enter_context(graphed.stand_ins())
    from megatron_ampipe.tools.measuring.blocks import BlockFactory

    build = BlockFactory.build

    def build_wrong(factory, variant, **options):
        layers = build(factory, variant, **options)
        if wrong == "partner" and variant.pipeline.partner is not None:
            layers.register_forward_hook(lambda module, inputs, found: (found[0] * 1.05, found[1]))
        return layers

    BlockFactory.build = build_wrong
    build_megatron = BlockFactory.build_megatron

    def build_megatron_wrong(factory, **fields):
        layers = build_megatron(factory, **fields)
        if wrong == "overlap" and "overlap_moe_expert_parallel_comm" in fields:
            combine = layers.layers[0].mlp.combine
            layers.layers[0].mlp.combine = lambda output: combine(output) * 1.05
        return layers

    BlockFactory.build_megatron = build_megatron_wrong
    return emulation


partners.Rank.start_megatron = start_wrong

if __name__ == "__main__":
    case = dataclasses.replace(
        partners.CPU_CASE, sequence_length=64, hidden=32, ffn=64, topk=2, dtype="bf16"
    )
    link = partners.parse_link("emulated:100MB/s")
    found = partners.run_ranks(partners.Steps(num_ranks=2, link=link, case=case, rounds=1), partners.work)
    job = partners.Steps(num_ranks=2, link=link, case=case, rounds=1)
    print(json.dumps({"differences": found[0]["differences"], "left out": partners.missing_kinds(job)}))
"""


def run_partners(folder: Path, wrong: str, *, code: int) -> subprocess.CompletedProcess[str]:
    """The script of steps, small and in bf16, with one kind of layers that is 5 % off."""
    script = folder / "wrong_partners.py"
    script.write_text(WRONG_PARTNERS)
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "docs/measured")])
    return completed(sys.executable, script, wrong, env=environment(folder) | {"PYTHONPATH": path}, code=code)


@pytest.mark.parametrize(
    ("wrong", "name"), [("partner", "partners, megatron-1f1b"), ("overlap", "megatron, overlapped")]
)
def test_steps_are_compared_in_bf16(wrong: str, name: str, tmp_path: Path) -> None:
    """What comes before passes, with the same experts for all; what is 5 % off does not."""
    done = run_partners(tmp_path, wrong, code=1)
    assert f"DifferenceFound: {name} does not compute what Megatron's layers do" in done.stderr


def test_steps_of_megatron_alone_equal_its_layers(tmp_path: Path) -> None:
    """Megatron's own overlap and graphs run here, through its own loop, and give the same gradients."""
    found = json.loads(run_partners(tmp_path, "nothing", code=0).stdout)
    differences = found["differences"]
    of_megatron = ["megatron", "control", "megatron, CUDA graphs", "megatron, overlapped"]
    assert list(differences)[:4] == of_megatron
    assert {"moe-only, degree 2", "moe-only, degree 4"} <= set(differences)
    # The same operations, in another order of micro-batches only where gradients of weights are added.
    assert max(differences[name] for name in of_megatron if "graphs" not in name) < 1e-6
    # Graphs add those that linear layers do not in fp32, the others in 16 bit.
    assert differences["megatron, CUDA graphs"] < 4e-3
    # Nothing is dropped without a word.
    kinds = {kind.name for kind in step_kinds.KINDS}
    assert kinds == differences.keys() | found["left out"].keys()
    assert found["left out"] == {"megatron, overlapped, CUDA graphs": "needs layers of Transformer Engine"}
    assert not differences.keys() & found["left out"].keys()
