"""``ampipe profile`` on two ranks: it measures what the planner needs, and fits the planner's model.

How well the times of computation fit depends on the load of the machine, so the limits of their fits, which
tests/unit/test_profile.py checks, are not applied here. Those of exchanges are: the link, which takes longer
than anything else, limits their times from below whatever the load is.
"""

import math
from pathlib import Path

import pytest

from megatron_ampipe.plan.cluster import read_cluster
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.schedule import Exchange, build
from megatron_ampipe.tools.measuring import cluster_fit
from megatron_ampipe.tools.measuring.grid import block_of_case, read_grid
from tests.conftest import Command
from tests.dist.test_bench import GRID
from tests.megatron.launcher import execute, torchrun_command

pytestmark = pytest.mark.alone

RATE_BIT_PER_US = 5
LATENCY_US = 3000
LINK = f"emulated:{RATE_BIT_PER_US}mbit:{LATENCY_US // 1000}ms"
EXCHANGES = ("intra.all_to_all", "intra.direct_all_to_all")
WITHOUT_LIMITS = """
import os, sys
from megatron_ampipe.cli import main
from megatron_ampipe.tools.measuring import cluster_fit
cluster_fit.TOLERATED = 1e9
os.environ["LOCAL_WORLD_SIZE"] = "2"
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Of a tiny block, to a cluster file."""
    (tmp_path / "tiny.yaml").write_text(GRID)
    grid = ["--grid", str(tmp_path / "tiny.yaml"), "--case", "rich"]
    return ["profile", *grid, "--repeats", "3", "--output", str(tmp_path / "cluster.yaml")]


def test_a_cluster_file_from_ranks_that_it_starts(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ampipe: Command
) -> None:
    fit = cluster_fit.fit

    def fitted(samples: list[cluster_fit.Sample], *, noise_us: float = 0.0) -> tuple[dict[str, float], float]:
        is_exchange = samples[0].family in EXCHANGES
        return fit(samples, noise_us=noise_us if is_exchange else math.inf)

    monkeypatch.setattr(cluster_fit, "fit", fitted)
    assert f"wrote {words[-1]}" in ampipe(*words, "--link", LINK).out
    cluster = read_cluster(tmp_path / "cluster.yaml")
    # Tokens and probabilities are two exchanges, each with the link's latency.
    exchange = cluster.collective("all_to_all", across_nodes=False)
    assert exchange.time_us(0) == pytest.approx(2 * LATENCY_US, rel=0.5)
    # And its rate, for as many bytes as leave a rank with the rows of this block.
    for kilobytes in (4, 8):
        on_the_link_us = 8e3 * kilobytes / RATE_BIT_PER_US
        added_us = exchange.time_us(1e3 * kilobytes) - exchange.time_us(0)
        assert added_us == pytest.approx(on_the_link_us, rel=0.3)
    assert exchange.r_squared is not None and exchange.r_squared > 0.9
    assert {"qkv", "attention", "route", "shared", "expert", "merge", "any"} == set(cluster.host.stage)
    assert cluster.overlap.compute_slowdown >= 1


def test_as_one_of_torchruns_ranks(words: list[str], tmp_path: Path) -> None:
    """Every rank measures, and the first one writes.

    Four ranks are told to be on two nodes: the file has figures of both classes of links, with which two hops
    can be predicted.
    """
    program = tmp_path / "without_limits.py"
    program.write_text(WITHOUT_LIMITS)
    run = execute(torchrun_command(str(program), *words, num_ranks=4))
    assert run.exit_code == 0, run.output[-3000:]
    assert run.output.count(f"wrote {words[-1]}") == 1
    cluster = read_cluster(tmp_path / "cluster.yaml")
    assert cluster.ranks_per_node == 2
    assert "all_to_all" in (cluster.intra or ())
    assert {"all_to_all", "direct_all_to_all"} <= set(cluster.inter or ())
    (case,) = read_grid(tmp_path / "tiny.yaml", only="rich")
    block = block_of_case(case, num_ranks=4, fused_gradients=True)
    predictor = Predictor(block, cluster).changed(exchange=Exchange.NODES)
    schedule = build("ampipe", degree=2, features=predictor.features)
    assert predictor.pass_us(schedule, (32, 32)).forward > 0
