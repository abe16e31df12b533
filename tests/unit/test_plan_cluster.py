"""Cluster files: built-in files, writing and reading back, and errors with their line."""

from pathlib import Path

import pytest

from megatron_ampipe.errors import BadInput
from megatron_ampipe.files.inputs import config_names
from megatron_ampipe.plan.cluster import find_cluster, read_cluster, write_cluster

BUILT_IN = list(config_names("clusters").values())


@pytest.mark.parametrize("path", BUILT_IN, ids=lambda path: path.stem)
def test_built_in_files_are_written_and_read_back_unchanged(path: Path, tmp_path: Path) -> None:
    cluster = read_cluster(path)
    copy = tmp_path / "folder" / "copy.yaml"
    write_cluster(cluster, copy, head="a copy")
    assert read_cluster(copy) == cluster
    assert copy.read_text().startswith("# a copy\n")
    assert [entry.name for entry in copy.parent.iterdir()] == ["copy.yaml"]


def test_the_figures_of_fsmoe_equal_those_of_its_paper() -> None:
    testbed = read_cluster(find_cluster("fsmoe-testbed-b"))
    assert testbed.inter is not None and testbed.intra is not None
    # alpha 1.75e-1 ms and beta 3.06e-7 ms per byte.
    assert testbed.inter["all_to_all"].time_us(2_000_000) == pytest.approx(175 + 612)
    assert testbed.intra["all_gather"].time_us(1_000_000) == pytest.approx(32 + 168)
    # alpha 9.24e-2 ms and beta 4.42e-11 ms per operation.
    assert testbed.compute.gemm["fp16"].time_us(1000, 1000, 500) == pytest.approx(92.4 + 44.2)


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("ranks_per_node: 8", "rank_per_node: 8", ["rank_per_node", "Did you mean ranks_per_node?"]),
        ("ranks_per_node: 8", "ranks_per_node: 0", ["ranks_per_node 0", "at least 1"]),
        (
            "beta_us_per_mb: 50",
            "beta_us_per_mb: 50 us",
            ["'50 us'", "a number, at least 0, without a unit"],
        ),
        ("beta_us_per_mb: 50", "basis: derived", ["comes twice"]),
        ("compute_slowdown: 1.05", "compute_slowdown: 0.9", ["overlap.compute_slowdown", "at least 1"]),
    ],
)
def test_an_error_is_reported_with_its_line(old: str, new: str, parts: list[str], tmp_path: Path) -> None:
    text = find_cluster("a800x8-20gbps").read_text()
    assert old in text
    path = tmp_path / "broken.yaml"
    path.write_text(text.replace(old, new, 1))
    line = text[: text.index(old)].count("\n") + 1
    with pytest.raises(BadInput) as refused:
        read_cluster(path)
    message = str(refused.value)
    assert all(part in message for part in parts), message
    # A duplicate key is reported at its second line.
    assert f"{path}:{line}:" in message or "comes twice" in message, message


def test_times_of_a_table_are_interpolated(tmp_path: Path) -> None:
    text = find_cluster("a800x8-20gbps").read_text()
    path = tmp_path / "table.yaml"
    table = "    beta_us_per_mb: 50\n    table:\n    - {mb: 1, us: 120}\n    - {mb: 3, us: 100}\n"
    path.write_text(text.replace("    beta_us_per_mb: 50\n", table, 1))
    figure = read_cluster(path).collective("all_to_all", across_nodes=False)
    start = figure.alpha_us
    times = [figure.time_us(mb * 1e6) for mb in (0.0, 0.5, 1.0, 2.0, 3.0, 5.0)]
    assert times == pytest.approx([start, (start + 120) / 2, 120, 110, 100, 200])
    path.write_text(text.replace("    beta_us_per_mb: 50\n", table.replace("mb: 3", "mb: 1"), 1))
    with pytest.raises(
        BadInput, match=r"table\.yaml:\d+: intra\.all_to_all\.table: sizes must be above 0 MB and ascending"
    ):
        read_cluster(path)


def test_the_section_flags_is_checked_at_launch_only(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    text = find_cluster("a800x8-20gbps").read_text()
    path.write_text(text + "flags:\n  bf16: true\n  ampipe:\n    degree: 4\n")
    assert read_cluster(path) == read_cluster(find_cluster("a800x8-20gbps"))
    path.write_text(text + "flags: true\n")
    with pytest.raises(BadInput, match="must hold keys"):
        read_cluster(path)
